// Gated DeltaNet: layers with a state for each head, of which specdec/engine/delta_net.py tells.

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

// Rows of a head's state that one thread advances, so that they share keys and queries, and how many
// of them at once, so that their sums do not wait for one another.
constexpr int64_t kStateRows = 16;
constexpr int kRowsAtOnce = 4;

template <typename V>
inline void put(float *to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// `sum_row` of R rows, in the same order: `add` is told which.
template <int R, typename Add>
inline void sum_rows(int64_t count, float *out, const Add &add) {
  Floats parts[R][kSums / kVector] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums)
#pragma GCC unroll 4
    for (int64_t part = 0; part < kSums / kVector; ++part)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) parts[r][part] = add(r, parts[r][part], i + part * kVector);
  float sums[R][kSums];
  std::memcpy(sums, parts, sizeof sums);
  for (int64_t part = 0; part < kSums && i < count; ++i, ++part)
    for (int r = 0; r < R; ++r) sums[r][part] = add(r, sums[r][part], i);
  for (int64_t half = kSums / 2; half > 0; half /= 2)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      for (int64_t part = 0; part < half; ++part) sums[r][part] += sums[r][part + half];
  for (int r = 0; r < R; ++r) out[r] = sums[r][0];
}

// A token goes through R rows of a head's state, [R, I]: their deltas and outputs, [R].
template <int R>
inline void advance_rows(float *rows, int64_t I, const float *key, const float *query,
                         const float *values, float fade, float strength, float *deltas,
                         float *outputs) {
  float seen[R];
  sum_rows<R>(I, seen, [&](int r, auto sums, int64_t i) {
    float *at = rows + r * I + i;
    const auto faded = read<decltype(sums)>(at) * fade;
    put(at, faded);
    return mul_add(faded, read<decltype(sums)>(key + i), sums);
  });
  for (int r = 0; r < R; ++r) deltas[r] = strength * (values[r] - seen[r]);
  sum_rows<R>(I, outputs, [&](int r, auto sums, int64_t i) {
    typedef decltype(sums) N;
    float *at = rows + r * I + i;
    const N x = mul_add(read<N>(key + i), N{} + deltas[r], read<N>(at));
    put(at, x);
    return mul_add(x, read<N>(query + i), sums);
  });
}

// qkvz: [tokens, C + V J], of which the first C = 2 K I + V J go through the convolution; ba:
// [tokens, 2 V]; out: [tokens, V J]. Of all cache rows: state [R, V, J, I], window [R, taps - 1, C],
// and of logged tokens keys [R, P, K, I], deltas [R, P, V, J], decays [R, P, V], inputs [R, P, C].
// weights: [taps, C]; rate, bias: [V]; norm: [J].
template <typename E>
struct DeltaNet {
  const E *qkvz, *ba;
  E *out;
  const Run *runs;
  int64_t num_runs;
  float *state;
  E *window;
  float *keys, *deltas, *decays;
  E *inputs;
  const float *weights, *rate, *bias;
  const E *norm;
  float epsilon;
  DeltaSizes s;
  // What `run` makes: C, each token's run and place in it, where each run begins among the tokens; of
  // each token what the convolution yields, outputs, strengths and fades.
  int64_t C = 0;
  std::vector<std::pair<int64_t, int64_t>> tokens = {};
  std::vector<int64_t> starts = {};
  std::vector<float> mixed = {}, outputs = {}, strengths = {}, fades = {};

  void run() {
    C = 2 * s.K * s.I + s.V * s.J;
    for (int64_t n = 0; n < num_runs; ++n) {
      starts.push_back(static_cast<int64_t>(tokens.size()));
      for (int64_t t = 0; t < runs[n].count; ++t) tokens.emplace_back(n, t);
    }
    const int64_t M = static_cast<int64_t>(tokens.size());
    mixed.resize(M * C);
    outputs.resize(M * s.V * s.J);
    strengths.resize(M * s.V);
    fades.resize(M * s.V);
    with_crew(M * s.V * s.J * s.I > kParallelWork, [&] {
      const int64_t heads = 2 * s.K + s.V, blocks = (s.J + kStateRows - 1) / kStateRows;
      for_each(M * heads, true, [&](int64_t i) { prepare(i / heads, i % heads); });
      for_each(num_runs * s.V * blocks, true, [&](int64_t i) {
        const int64_t first = i % blocks * kStateRows;
        advance(i / (s.V * blocks), i / blocks % s.V, first, std::min(first + kStateRows, s.J));
      });
      for_each(num_runs, true, [&](int64_t n) { log(n); });
      for_each(M * s.V, true, [&](int64_t i) { finish(i / s.V, i % s.V); });
    });
  }

  // The input of the convolution at a place of a run's text; those before 0 are of steps before.
  const E *find_input(const Run &r, int64_t place) const {
    if (place >= 0) return qkvz + (r.first + place) * (C + s.V * s.J);
    const int64_t before = r.folded + s.taps - 1 + place;
    if (before < s.taps - 1) return window + (r.row * (s.taps - 1) + before) * C;
    return inputs + (r.row * s.P + before - (s.taps - 1)) * C;
  }

  // The channels of a head of queries, keys or values of a token; of values strength and fade, too.
  void prepare(int64_t m, int64_t head) {
    const Run &r = runs[tokens[m].first];
    const bool is_value = head >= 2 * s.K;
    const int64_t size = is_value ? s.J : s.I, v = head - 2 * s.K;
    const int64_t from = is_value ? 2 * s.K * s.I + v * s.J : head * s.I;
    float *to = mixed.data() + m * C + from;
    for (int64_t tap = 0; tap < s.taps; ++tap) {
      const E *input = find_input(r, tokens[m].second + tap - (s.taps - 1)) + from;
      const float *weight = weights + tap * C + from;
#pragma omp simd
      for (int64_t c = 0; c < size; ++c)
        to[c] = mul_add(to_float(input[c]), weight[c], tap == 0 ? 0.0f : to[c]);
    }
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) to[c] = silu(to[c]);
    if (!is_value) {
      const float sum = sum_row(size, [&](auto sums, int64_t c) {
        const auto x = read<decltype(sums)>(to + c);
        return mul_add(x, x, sums);
      });
      float scale = 1.0f / std::sqrt(sum + 1e-6f);
      if (head < s.K) scale /= std::sqrt(static_cast<float>(s.I));
#pragma omp simd
      for (int64_t c = 0; c < size; ++c) to[c] *= scale;
      return;
    }
    const E *both = ba + (r.first + tokens[m].second) * 2 * s.V;
    const float x = to_float(both[s.V + v]) + bias[v];
    strengths[m * s.V + v] = sigmoid(to_float(both[v]));
    fades[m * s.V + v] = std::exp(rate[v] * (x > 20.0f ? x : std::log1p(std::exp(x))));
  }

  // Rows [first, last) of a value head's state: what was accepted is applied, then the run's tokens.
  // Behind the kept ones a copy goes on.
  void advance(int64_t n, int64_t v, int64_t first, int64_t last) {
    const Run &r = runs[n];
    const int64_t key_head = v / (s.V / s.K), I = s.I;
    float *rows = state + ((r.row * s.V + v) * s.J + first) * I;
    for (int64_t p = 0; p < r.folded; ++p) {
      const int64_t at = r.row * s.P + p;
      const float fade = decays[at * s.V + v], *key = keys + (at * s.K + key_head) * I;
      for (int64_t j = first; j < last; ++j) {
        const float delta = deltas[(at * s.V + v) * s.J + j];
        float *row = rows + (j - first) * I;
#pragma omp simd
        for (int64_t i = 0; i < I; ++i) row[i] = mul_add(key[i], delta, row[i] * fade);
      }
    }
    std::vector<float> copy;
    for (int64_t t = 0; t < r.count; ++t) {
      if (t == r.kept) {
        copy.assign(rows, rows + (last - first) * I);
        rows = copy.data();
      }
      const int64_t m = starts[n] + t;
      const float *query = mixed.data() + m * C + key_head * I, *key = query + s.K * I;
      const float *value = mixed.data() + m * C + 2 * s.K * I + v * s.J;
      const float fade = fades[m * s.V + v], strength = strengths[m * s.V + v];
      float *logged = deltas + ((r.row * s.P + t - r.kept) * s.V + v) * s.J;
      float *to = outputs.data() + (m * s.V + v) * s.J, own[kStateRows];
      for (int64_t j = first; j < last;) {
        float *row = rows + (j - first) * I, *delta = own + (j - first);
        const bool is_full = j + kRowsAtOnce <= last;
        const auto go = is_full ? advance_rows<kRowsAtOnce> : advance_rows<1>;
        go(row, I, key, query, value + j, fade, strength, delta, to + j);
        j += is_full ? kRowsAtOnce : 1;
      }
      if (t >= r.kept) std::memcpy(logged + first, own, sizeof(float) * (last - first));
    }
  }

  // What the next step needs of a run besides the deltas.
  void log(int64_t n) {
    const Run &r = runs[n];
    std::vector<E> newest((s.taps - 1) * C);
    for (int64_t tap = 0; tap < s.taps - 1; ++tap)
      std::memcpy(newest.data() + tap * C, find_input(r, r.kept - (s.taps - 1) + tap), sizeof(E) * C);
    std::memcpy(window + r.row * (s.taps - 1) * C, newest.data(), sizeof(E) * newest.size());
    for (int64_t t = r.kept; t < r.count; ++t) {
      const int64_t at = r.row * s.P + t - r.kept, m = starts[n] + t;
      std::memcpy(keys + at * s.K * s.I, mixed.data() + m * C + s.K * s.I,
                  sizeof(float) * s.K * s.I);
      std::memcpy(decays + at * s.V, fades.data() + m * s.V, sizeof(float) * s.V);
      std::memcpy(inputs + at * C, find_input(r, t), sizeof(E) * C);
    }
  }

  // A head's output is normed, then multiplied with its gate.
  void finish(int64_t m, int64_t v) {
    const Run &r = runs[tokens[m].first];
    const int64_t token = r.first + tokens[m].second;
    const float *from = outputs.data() + (m * s.V + v) * s.J;
    const E *gate = qkvz + token * (C + s.V * s.J) + C + v * s.J;
    E *to = out + (token * s.V + v) * s.J;
    const float sum = sum_row(s.J, [&](auto sums, int64_t j) {
      const auto x = read<decltype(sums)>(from + j);
      return mul_add(x, x, sums);
    });
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(s.J) + epsilon);
#pragma omp simd
    for (int64_t j = 0; j < s.J; ++j)
      store(to[j], to_float(norm[j]) * (from[j] * scale) * silu(to_float(gate[j])));
  }
};

}  // namespace
