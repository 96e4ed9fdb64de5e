// Gated short convolutions, of which specdec/engine/short_conv.py tells.

#pragma once

#include "head_states.h"

namespace {

// C channels; taps of the convolution; P tokens of each cache row that can be logged. A record as those
// of layers.h.
struct ConvSizes {
  int64_t C, taps, P;
};

// product: [tokens, 3 C], of the input's gate, the output's gate and the input; out: [tokens, C]. Of all
// cache rows: window [R, taps - 1, C], and of logged tokens inputs [R, P, C]. weights: [taps, C]; bias:
// [C], or null.
template <typename E>
struct ShortConv {
  const E *product;
  E *out;
  const Run *runs;
  int64_t num_runs;
  E *window, *inputs;
  const float *weights, *bias;
  ConvSizes s;
  // Results of `run`: each token's run and place in it, where each run begins among them, and gated
  // inputs, a token after another.
  std::vector<std::pair<int64_t, int64_t>> tokens = {};
  std::vector<int64_t> starts = {};
  std::vector<E> gated = {};

  void run() {
    for (int64_t n = 0; n < num_runs; ++n) {
      starts.push_back(static_cast<int64_t>(tokens.size()));
      for (int64_t t = 0; t < runs[n].count; ++t) tokens.emplace_back(n, t);
    }
    const int64_t M = static_cast<int64_t>(tokens.size());
    gated.resize(M * s.C);
    const bool is_long = M * s.C * s.taps > kParallelWork;
    run_in_team(is_long, [&] {
      for_each(M, is_long, [&](int64_t m) { gate(m); });
      for_each(M, is_long, [&](int64_t m) { convolve(m); });
      for_each(num_runs, is_long, [&](int64_t n) { log(n); });
    });
  }

  const E *find_product(int64_t m) const {
    return product + (runs[tokens[m].first].first + tokens[m].second) * 3 * s.C;
  }

  // The gated input at a place of a run's text; those before 0 are of steps before.
  const E *find_input(int64_t n, int64_t position) const {
    const Run &r = runs[n];
    if (position >= 0) return gated.data() + (starts[n] + position) * s.C;
    const int64_t position_before = r.folded + s.taps - 1 + position;
    if (position_before < s.taps - 1) return window + (r.row * (s.taps - 1) + position_before) * s.C;
    return inputs + (r.row * s.P + position_before - (s.taps - 1)) * s.C;
  }

  void gate(int64_t m) {
    const E *gates = find_product(m), *x = gates + 2 * s.C;
    E *to = gated.data() + m * s.C;
#pragma omp simd
    for (int64_t c = 0; c < s.C; ++c) store(to[c], to_float(gates[c]) * to_float(x[c]));
  }

  void convolve(int64_t m) {
    const auto &[n, t] = tokens[m];
    static thread_local std::vector<float> sums;
    if (bias != nullptr)
      sums.assign(bias, bias + s.C);
    else
      sums.assign(s.C, 0.0f);
    float *sum = sums.data();
    for (int64_t tap = 0; tap < s.taps; ++tap) {
      const E *input = find_input(n, t + tap - (s.taps - 1));
      const float *weight = weights + tap * s.C;
#pragma omp simd
      for (int64_t c = 0; c < s.C; ++c) sum[c] = mul_add(to_float(input[c]), weight[c], sum[c]);
    }
    const E *gates = find_product(m) + s.C;
    E *to = out + (runs[n].first + t) * s.C;
#pragma omp simd
    for (int64_t c = 0; c < s.C; ++c) store(to[c], sum[c] * to_float(gates[c]));
  }

  // Keeps what the next step needs of a run.
  void log(int64_t n) {
    const Run &r = runs[n];
    std::vector<E> newest((s.taps - 1) * s.C);
    for (int64_t tap = 0; tap < s.taps - 1; ++tap)
      std::memcpy(newest.data() + tap * s.C, find_input(n, r.kept - (s.taps - 1) + tap),
                  sizeof(E) * s.C);
    for (int64_t t = r.kept; t < r.count; ++t)
      std::memcpy(inputs + (r.row * s.P + t - r.kept) * s.C, find_input(n, t), sizeof(E) * s.C);
    std::memcpy(window + r.row * (s.taps - 1) * s.C, newest.data(), sizeof(E) * newest.size());
  }
};

}  // namespace
