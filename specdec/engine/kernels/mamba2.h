// Mamba-2: layers with a state for each head, of which specdec/engine/mamba2.py tells.

#pragma once

#include "head_states.h"

namespace {

// Of a token's product the last V numbers are rates. out: [tokens, V J] of E, normed, where `is_normed`,
// else of float, not normed; conv_bias: [C], or null; skip: [V]; norm: [V J].
template <typename E>
struct Mamba2 : HeadStates<E> {
  void *out;
  const float *conv_bias, *skip;
  const E *norm;
  float epsilon;
  bool is_normed;

  void run() {
    HeadStates<E>::template run<false>([&](int64_t m, int64_t head) { prepare(m, head); }, this->s.K,
                                       [&](int64_t m, int64_t k) { finish(m, k); });
  }

  // The channels of a head of C, B or x of a token; of x the length of its step and the fade, too.
  void prepare(int64_t m, int64_t head) {
    const DeltaSizes &s = this->s;
    this->convolve(m, head, conv_bias);
    if (head < 2 * s.K) return;
    const int64_t v = head - 2 * s.K;
    const E *rates = this->product + (this->find_token(m) + 1) * this->width - s.V;
    this->strengths[m * s.V + v] = this->fade(m, v, to_float(rates[v]));
  }

  // The outputs of a group of heads are multiplied with their gates, then normed together.
  void finish(int64_t m, int64_t k) {
    const DeltaSizes &s = this->s;
    const int64_t token = this->find_token(m), heads = s.V / s.K, size = heads * s.J;
    const int64_t first = token * s.V * s.J + k * size;
    static thread_local std::vector<float> memory;
    float *gated = is_normed ? reserve(memory, size) : static_cast<float *>(out) + first;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t v = k * heads + head;
      const float *from = this->outputs + (v * this->M + m) * s.J, weight = skip[v];
      const float *x = this->mixed + (2 * s.K * s.I + v * s.J) * this->M + m * s.J;
      const E *gate = this->product + token * this->width + this->C + v * s.J;
      float *to = gated + head * s.J;
#pragma omp simd
      for (int64_t j = 0; j < s.J; ++j)
        to[j] = mul_add(weight, x[j], from[j]) * silu(to_float(gate[j]));
    }
    if (!is_normed) return;
    const float sum = sum_row(size, [&](auto sums, int64_t j) {
      const auto x = read<decltype(sums)>(gated + j);
      return mul_add(x, x, sums);
    });
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + epsilon);
    E *to = static_cast<E *>(out) + first;
    const E *weights = norm + k * size;
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) store(to[j], to_float(weights[j]) * (gated[j] * scale));
  }
};

}  // namespace
