// Layers with a state for each head, of which specdec/engine/head_states.py tells.

#pragma once

#include "norms.h"

namespace {

// K key heads of I numbers, V value heads of J; taps of the convolution; P tokens of each cache row that
// can be logged. A record as those of layers.h.
struct DeltaSizes {
  int64_t K, V, I, J, taps, P;
};

// A step's tokens of one cache row, from `first` on: `kept` of them are certain. `folded` tokens that
// the step before has logged were accepted.
struct Run {
  int64_t row, first, count, kept, folded;
};

// Columns of a head's state that are advanced at once, side by side in registers: every column's sums
// are taken by itself, so no sum goes across a register.
constexpr int64_t kColumns = 2, kStateColumns = kColumns * kVector;

// A token goes through such columns, [I, kStateColumns]. `values` become their deltas: times the
// strength, and where `corrects` less what the state has for the key. The sums over keys and queries
// have two parts each, of even and odd rows.
template <bool corrects>
inline void advance_columns(Floats *state, int64_t I, const float *key, const float *query,
                            Floats *values, float fade, float strength, Floats *outputs) {
  Floats recalled[2][kColumns] = {}, sums[2][kColumns] = {};
  const auto look = [&](int64_t i, Floats *to) {
#pragma GCC unroll 2
    for (int64_t c = 0; c < kColumns; ++c)
      to[c] = mul_add(state[i * kColumns + c], key[i] - Floats{}, to[c]);
  };
  const auto change = [&](int64_t i, Floats *to) {
#pragma GCC unroll 2
    for (int64_t c = 0; c < kColumns; ++c) {
      Floats &element = state[i * kColumns + c];
      element = mul_add(key[i] - Floats{}, values[c], element * fade);
      to[c] = mul_add(element, query[i] - Floats{}, to[c]);
    }
  };
  int64_t i = 0;
  if (corrects) {
    for (; i + 2 <= I; i += 2) look(i, recalled[0]), look(i + 1, recalled[1]);
    if (i < I) look(i, recalled[0]);
    for (int64_t c = 0; c < kColumns; ++c)
      values[c] = (values[c] - (recalled[0][c] + recalled[1][c]) * fade) * strength;
  } else {
    for (int64_t c = 0; c < kColumns; ++c) values[c] *= strength;
  }
  for (i = 0; i + 2 <= I; i += 2) change(i, sums[0]), change(i + 1, sums[1]);
  if (i < I) change(i, sums[0]);
  for (int64_t c = 0; c < kColumns; ++c) outputs[c] = sums[0][c] + sums[1][c];
}

// product: [tokens, width], of which the first C = 2 K I + V J numbers go through the convolution, and
// the next V J are gates. Of all cache rows: state [R, V, I, J], window [R, taps - 1, C], and of logged
// tokens keys [R, P, K, I], deltas [R, P, V, J], decays [R, P, V], inputs [R, P, C]. weights: [taps, C];
// rate, bias: [V].
template <typename E>
struct HeadStates {
  const E *product;
  const Run *runs;
  int64_t num_runs;
  float *state;
  E *window;
  float *keys, *deltas, *decays;
  E *inputs;
  const float *weights, *rate, *bias;
  DeltaSizes s;
  int64_t width;
  // Results of `run`: C, M tokens, each one's run and place in it, where each run begins among them; of
  // each token what the convolution yields and outputs, both a head after another, strengths and fades.
  int64_t C = 0, M = 0;
  std::vector<std::pair<int64_t, int64_t>> tokens = {};
  std::vector<int64_t> starts = {};
  std::vector<float> strengths = {}, fades = {};
  float *mixed = nullptr, *outputs = nullptr;

  // prepare: of a token's head of queries, keys or values, which finds strengths and fades, too. finish:
  // of one of `num_parts` of a token's outputs.
  template <bool corrects, typename Prepare, typename Finish>
  void run(const Prepare &prepare, int64_t num_parts, const Finish &finish) {
    C = 2 * s.K * s.I + s.V * s.J;
    for (int64_t n = 0; n < num_runs; ++n) {
      starts.push_back(static_cast<int64_t>(tokens.size()));
      for (int64_t t = 0; t < runs[n].count; ++t) tokens.emplace_back(n, t);
    }
    M = static_cast<int64_t>(tokens.size());
    static thread_local std::vector<float> memory;
    mixed = reserve(memory, M * (C + s.V * s.J)), outputs = mixed + M * C;
    strengths.resize(M * s.V);
    fades.resize(M * s.V);
    run_in_team(M * s.V * s.J * s.I > kParallelWork, [&] {
      const int64_t heads = 2 * s.K + s.V, blocks = (s.J + kStateColumns - 1) / kStateColumns;
      for_each(M * heads, true, [&](int64_t i) { prepare(i / heads, i % heads); });
      for_each(num_runs * s.V * blocks, true, [&](int64_t i) {
        advance<corrects>(i / (s.V * blocks), i / blocks % s.V, i % blocks * kStateColumns);
      });
      for_each(num_runs, true, [&](int64_t n) { log(n); });
      for_each(M * num_parts, true, [&](int64_t i) { finish(i / num_parts, i % num_parts); });
    });
  }

  // A token's number in the step.
  int64_t find_token(int64_t m) const { return runs[tokens[m].first].first + tokens[m].second; }

  // The input of the convolution at a place of a run's text; those before 0 are of steps before.
  const E *find_input(const Run &r, int64_t position) const {
    if (position >= 0) return product + (r.first + position) * width;
    const int64_t position_before = r.folded + s.taps - 1 + position;
    if (position_before < s.taps - 1) return window + (r.row * (s.taps - 1) + position_before) * C;
    return inputs + (r.row * s.P + position_before - (s.taps - 1)) * C;
  }

  // Convolves the channels of a head of queries, keys or values of a token; returns them.
  float *convolve(int64_t m, int64_t head, const float *biases) {
    const Run &r = runs[tokens[m].first];
    const bool is_value = head >= 2 * s.K;
    const int64_t size = is_value ? s.J : s.I, v = head - 2 * s.K;
    const int64_t from = is_value ? 2 * s.K * s.I + v * s.J : head * s.I;
    float *to = mixed + from * M + m * size;
    for (int64_t c = 0; c < size; ++c) to[c] = biases == nullptr ? 0.0f : biases[from + c];
    for (int64_t tap = 0; tap < s.taps; ++tap) {
      const E *input = find_input(r, tokens[m].second + tap - (s.taps - 1)) + from;
      const float *weight = weights + tap * C + from;
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) to[c] = mul_add(to_float(input[c]), weight[c], to[c]);
    }
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) to[c] = silu(to[c]);
    return to;
  }

  // Notes the fade of a value head; returns the softplus that it is made of.
  float fade(int64_t m, int64_t v, float x) {
    x += bias[v];
    const float length = x > 20.0f ? x : std::log1p(std::exp(x));
    fades[m * s.V + v] = std::exp(rate[v] * length);
    return length;
  }

  // Columns of a value head's state from `first_column` on: what was accepted is applied, then the run's
  // tokens. The state is written with the kept ones; those after them go on in a copy.
  template <bool corrects>
  void advance(int64_t n, int64_t v, int64_t first_column) {
    const Run &r = runs[n];
    const int64_t key_head = v / (s.V / s.K), I = s.I;
    const int64_t num_columns = std::min(kStateColumns, s.J - first_column);
    const size_t bytes = sizeof(float) * num_columns;
    float *head_state = state + (r.row * s.V + v) * I * s.J + first_column;
    static thread_local std::vector<Floats> memory;
    memory.assign(I * kColumns, Floats{});
    Floats *columns = memory.data();
    const auto find_row = [&](int64_t i) { return reinterpret_cast<float *>(columns + i * kColumns); };
    Floats values[kColumns] = {}, sums[kColumns];
    for (int64_t i = 0; i < I; ++i) std::memcpy(find_row(i), head_state + i * s.J, bytes);
    for (int64_t p = 0; p < r.folded; ++p) {
      const int64_t record = r.row * s.P + p;
      const float fade = decays[record * s.V + v], *key = keys + (record * s.K + key_head) * I;
      std::memcpy(values, deltas + (record * s.V + v) * s.J + first_column, bytes);
      for (int64_t i = 0; i < I; ++i)
        for (int64_t c = 0; c < kColumns; ++c) {
          Floats &x = columns[i * kColumns + c];
          x = mul_add(key[i] - Floats{}, values[c], x * fade);
        }
    }
    for (int64_t t = 0; t <= r.count; ++t) {
      if (t == r.kept)
        for (int64_t i = 0; i < I; ++i) std::memcpy(head_state + i * s.J, find_row(i), bytes);
      if (t == r.count) break;
      const int64_t m = starts[n] + t;
      const float *query = mixed + key_head * I * M + m * I, *key = query + s.K * I * M;
      std::memcpy(values, mixed + (2 * s.K * I + v * s.J) * M + m * s.J + first_column, bytes);
      advance_columns<corrects>(columns, I, key, query, values, fades[m * s.V + v],
                                strengths[m * s.V + v], sums);
      std::memcpy(outputs + (v * M + m) * s.J + first_column, sums, bytes);
      if (t < r.kept) continue;
      std::memcpy(deltas + ((r.row * s.P + t - r.kept) * s.V + v) * s.J + first_column, values, bytes);
    }
  }

  // Keeps what the next step needs of a run besides the deltas.
  void log(int64_t n) {
    const Run &r = runs[n];
    std::vector<E> newest((s.taps - 1) * C);
    for (int64_t tap = 0; tap < s.taps - 1; ++tap)
      std::memcpy(newest.data() + tap * C, find_input(r, r.kept - (s.taps - 1) + tap), sizeof(E) * C);
    std::memcpy(window + r.row * (s.taps - 1) * C, newest.data(), sizeof(E) * newest.size());
    for (int64_t t = r.kept; t < r.count; ++t) {
      const int64_t record = r.row * s.P + t - r.kept, m = starts[n] + t;
      for (int64_t head = 0; head < s.K; ++head)
        std::memcpy(keys + (record * s.K + head) * s.I, mixed + ((s.K + head) * M + m) * s.I,
                    sizeof(float) * s.I);
      std::memcpy(decays + record * s.V, fades.data() + m * s.V, sizeof(float) * s.V);
      std::memcpy(inputs + record * C, find_input(r, t), sizeof(E) * C);
    }
  }
};

}  // namespace
