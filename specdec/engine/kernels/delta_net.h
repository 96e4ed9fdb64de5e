// Gated DeltaNet: layers with a state for each head, of which specdec/engine/delta_net.py tells.

#pragma once

#include "head_states.h"

namespace {

// ba: [tokens, 2 V], of strengths and rates; out: [tokens, V J]; norm: [J].
template <typename E>
struct DeltaNet : HeadStates<E> {
  const E *ba;
  E *out;
  const E *norm;
  float epsilon;

  void run() {
    HeadStates<E>::template run<true>([&](int64_t m, int64_t head) { prepare(m, head); }, this->s.V,
                                      [&](int64_t m, int64_t v) { finish(m, v); });
  }

  // The channels of a head of queries, keys or values of a token; of values strength and fade, too.
  void prepare(int64_t m, int64_t head) {
    const DeltaSizes &s = this->s;
    float *to = this->convolve(m, head, nullptr);
    if (head < 2 * s.K) {
      const float sum = sum_row(s.I, [&](auto sums, int64_t c) {
        const auto x = read<decltype(sums)>(to + c);
        return mul_add(x, x, sums);
      });
      float scale = 1.0f / std::sqrt(sum + 1e-6f);
      if (head < s.K) scale /= std::sqrt(static_cast<float>(s.I));
#pragma omp simd
      for (int64_t c = 0; c < s.I; ++c) to[c] *= scale;
      return;
    }
    const E *gates = ba + this->find_token(m) * 2 * s.V;
    const int64_t v = head - 2 * s.K;
    this->strengths[m * s.V + v] = sigmoid(to_float(gates[v]));
    this->fade(m, v, to_float(gates[s.V + v]));
  }

  // A head's output is normed, then multiplied with its gate.
  void finish(int64_t m, int64_t v) {
    const DeltaSizes &s = this->s;
    const int64_t token = this->find_token(m);
    const float *from = this->outputs + (v * this->M + m) * s.J;
    const E *gate = this->product + token * this->width + this->C + v * s.J;
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
