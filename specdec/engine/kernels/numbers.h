// Inputs and outputs of products, of one of three types each.

#pragma once

#include "simd.h"

namespace {

// Rows of numbers of one of three types. Products are compiled once for all of them, as their types matter
// only where rows are packed and outputs are put.
class Numbers {
 public:
  explicit Numbers(const float *numbers) : numbers_(numbers), type_(Type::kFloat) {}
  explicit Numbers(const bf16 *numbers) : numbers_(numbers), type_(Type::kBf16) {}
  explicit Numbers(const half *numbers) : numbers_(numbers), type_(Type::kHalf) {}

  // Calls use(pointer to the numbers).
  template <typename Use>
  auto visit(const Use &use) const {
    if (type_ == Type::kBf16) return use(static_cast<const bf16 *>(numbers_));
    if (type_ == Type::kHalf) return use(static_cast<const half *>(numbers_));
    return use(static_cast<const float *>(numbers_));
  }

 private:
  enum class Type { kFloat, kBf16, kHalf };
  const void *numbers_;
  Type type_;
};

// Puts `count` numbers from place `first` on as floats.
__attribute__((noinline)) inline void widen_numbers(const Numbers &x, int64_t first, int64_t count,
                                                    float *to) {
  x.visit([=](const auto *from) {
    int64_t i = 0;
    for (; i + kVector <= count; i += kVector) {
      const Floats wide = widen(from + first + i);
      std::memcpy(to + i, &wide, sizeof wide);
    }
    for (; i < count; ++i) to[i] = to_float(from[first + i]);
  });
}

// Sums [rows, width] of the outputs from `output` on, `num_outputs` of them, plus bias go to y
// [rows, stride].
template <typename B, typename O>
inline void put_sums(const float *sums, int64_t rows, int64_t width, const B *bias, int64_t output,
                     int64_t num_outputs, int64_t stride, O *y) {
  const auto put = [&](int64_t m, int64_t first_output, int64_t count) {
    O *to = y + m * stride + output + first_output;
    const float *from = sums + m * width + first_output;
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) store(to[j], from[j]);
    } else {
      const B *add = bias + output + first_output;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) store(to[j], from[j] + to_float(add[j]));
    }
  };
  constexpr int64_t kAtOnce = 2 * kVector;
  for (int64_t m = 0; m < rows; ++m) {
    int64_t first_output = 0;
    for (; first_output + kAtOnce <= num_outputs; first_output += kAtOnce)
      put(m, first_output, kAtOnce);  // a constant for the compiler
    put(m, first_output, num_outputs - first_output);
  }
}

// Outputs y [rows, stride], which the products of a matrix and its bias go to, from output `first` on.
struct Outputs {
  void (*put)(const Outputs &to, const float *sums, int64_t rows, int64_t width, int64_t output,
              int64_t num_outputs);  // as `put_sums` does
  const void *bias;
  void *y;
  int64_t stride, first = 0;

  template <typename B, typename O>
  static Outputs make(const B *bias, O *y, int64_t stride) {
    const auto put = [](const Outputs &to, const float *sums, int64_t rows, int64_t width, int64_t output,
                        int64_t num_outputs) {
      put_sums(sums, rows, width, static_cast<const B *>(to.bias), to.first + output, num_outputs, to.stride,
               static_cast<O *>(to.y));
    };
    return {put, bias, y, stride};
  }
};

}  // namespace
