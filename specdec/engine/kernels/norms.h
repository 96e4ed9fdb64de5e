// Norms, activations, rotations: what lies between the products.

#pragma once

#include "threads.h"

namespace {

// offset: what weights are stored less; with one, the result is rounded once.
template <typename E>
void rms_norm_row(const E *x, const E *weight, E *out, int64_t D, float epsilon,
                  float offset = 0.0f) {
  const float sum = sum_row(D, [&](auto sums, int64_t i) {
    const auto v = read<decltype(sums)>(x + i);
    return mul_add(v, v, sums);
  });
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(D) + epsilon);
  if (offset != 0.0f) {
#pragma omp simd
    for (int64_t i = 0; i < D; ++i)
      store(out[i], to_float(x[i]) * scale * (to_float(weight[i]) + offset));
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < D; ++i)
    store(out[i], round_through<E>(to_float(x[i]) * scale) * to_float(weight[i]));
}

template <typename E>
void layer_norm_row(const E *x, const E *weight, const E *bias, E *out, int64_t D, float epsilon) {
  const float sum = sum_row(
      D, [&](auto sums, int64_t i) { return sums + read<decltype(sums)>(x + i); });
  const float mean = sum / static_cast<float>(D);
  const float squares = sum_row(D, [&](auto sums, int64_t i) {
    const auto v = read<decltype(sums)>(x + i) - mean;
    return mul_add(v, v, sums);
  });
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(D) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < D; ++i)
    store(out[i],
          mul_add((to_float(x[i]) - mean) * scale, to_float(weight[i]), to_float(bias[i])));
}

// Root-mean-square norm, or layer norm where there is a bias.
template <typename E>
void norm_row(const E *x, const E *weight, const E *bias, E *out, int64_t D, float epsilon,
              float offset = 0.0f) {
  if (bias == nullptr)
    rms_norm_row(x, weight, out, D, epsilon, offset);
  else
    layer_norm_row(x, weight, bias, out, D, epsilon);
}

// The norm of x, to which `delta` is added before, if given: times `share`, and itself normed first
// where it has a norm, of which added[0] is the weight and added[1] the bias.
template <typename E>
void add_norm(E *x, const E *delta, const E *const *added, float share, const E *weight,
              const E *bias, E *out, int64_t rows, int64_t D, float epsilon, float offset = 0.0f) {
  for_each(rows, rows * D > kParallelWork, [&](int64_t r) {
    E *row = x + r * D, *to = out + r * D;
    if (delta != nullptr) {
      const E *add = delta + r * D;
      if (added[0] != nullptr) {
        norm_row(add, added[0], added[1], to, D, epsilon);
        add = to;
      }
#pragma omp simd
      for (int64_t i = 0; i < D; ++i)
        store(row[i], mul_add(to_float(add[i]), share, to_float(row[i])));
    }
    norm_row(row, weight, bias, to, D, epsilon, offset);
  });
}

// An activation takes as long as so many multiply-adds.
constexpr int64_t kActivationWork = 8;

// Of rows [2 I] one half, from `activated` on, is activated and multiplied with the other.
template <float (*activate)(float), typename E>
void gate_mul(const E *halves, E *out, int64_t rows, int64_t I, int64_t activated = 0) {
  for_each(rows, rows * I * kActivationWork > kParallelWork, [&](int64_t r) {
    const E *gate = halves + r * 2 * I + activated, *up = halves + r * 2 * I + (I - activated);
    E *to = out + r * I;
#pragma omp simd
    for (int64_t i = 0; i < I; ++i)
      store(to[i], round_through<E>(activate(to_float(gate[i]))) * to_float(up[i]));
  });
}

// Of rows [2 I] the second half, at most `limit`, times its sigmoid of `slope` times itself, and times one
// more than the first half, which is cut to -limit and limit.
template <typename E>
void gate_mul_cut(const E *halves, E *out, int64_t rows, int64_t I, float slope, float limit) {
  for_each(rows, rows * I * kActivationWork > kParallelWork, [&](int64_t r) {
    const E *up = halves + r * 2 * I, *gate = up + I;
    E *to = out + r * I;
#pragma omp simd
    for (int64_t i = 0; i < I; ++i) {
      const float g = to_float(gate[i]), u = to_float(up[i]), cut_gate = g > limit ? limit : g;
      const float cut_up = u > limit ? limit : u < -limit ? -limit : u;
      store(to[i], cut_gate * sigmoid(slope * cut_gate) * (cut_up + 1.0f));
    }
  });
}

// Rotates the first `size` dimensions of a head of H, halves paired; the others are copied.
template <typename E>
void rotate_to(const E *from, E *to, const E *cosine, const E *sine, int64_t size, int64_t H) {
  int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    float a = to_float(from[i]), b = to_float(from[i + half]);
    store(to[i], mul_add(a, to_float(cosine[i]), -(b * to_float(sine[i]))));
    store(to[i + half], mul_add(b, to_float(cosine[i + half]), a * to_float(sine[i + half])));
  }
  if (from != to && size < H) std::memcpy(to + size, from + size, sizeof(E) * (H - size));
}

// Activations of an MLP: 0 SiLU, 1 GELU by tanh, 2 GELU by erf, 3 ReLU.
inline float gelu_erf(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); }

inline float relu(float x) { return x > 0.0f ? x : 0.0f; }

template <float (*activate)(float), typename E>
void apply_to(E *x, int64_t count) {
  share(count, count > kParallelWork, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) store(x[i], activate(to_float(x[i])));
  });
}

// Logits become cap tanh(scale x / cap).
template <typename E>
void cap_logits(E *x, int64_t count, float scale, float cap) {
  share(count, count > kParallelWork, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i)
      store(x[i], cap * tanh_fast(to_float(x[i]) * scale / cap));
  });
}

}  // namespace
