// Numbers, vectors, and functions of them.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__)
#error "sums have an order here: compile the kernels without -ffast-math"
#endif
// Tells whether the processor fuses products and sums in one instruction.
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMAF)
#define SPECDEC_FUSED 1
#else
#define SPECDEC_FUSED 0
#endif

namespace {

struct bf16 {
  uint16_t bits;
};

struct half {  // float16
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }

// In plain code without branches, which compilers vectorize. Exponents differ by 112; a subnormal
// number m 2^-24 is (1 + m 2^-10) 2^-14 less 2^-14.
inline float to_float(half x) {
  const uint32_t shifted = (x.bits & 0x7fffu) << 13, exponent = x.bits & 0x7c00u;
  const float small = as_float(shifted + (113u << 23)) - as_float(113u << 23);
  const uint32_t normal = exponent == 0x7c00u ? shifted | 0x7f800000u : shifted + (112u << 23);
  const uint32_t magnitude = exponent == 0 ? as_bits(small) : normal;
  return as_float(magnitude | (x.bits & 0x8000u) << 16);
}

inline void store(float &to, float x) { to = x; }

// Below 2^-14 the sum with 1/2, whose last bit is 2^-24, does the rounding.
inline void store(half &to, float x) {
  const uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  const uint32_t finite = magnitude < (113u << 23) ? small : normal < 0x7c00u ? normal : 0x7c00u;
  const uint32_t rounded = magnitude > 0x7f800000u ? 0x7e00u : finite;
  to.bits = static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000u));
}

inline void store(bf16 &to, float x) {
  const uint32_t bits = as_bits(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = x != x ? 0x7fc0u : static_cast<uint16_t>(rounded);
}

template <typename E>
inline float round_through(float x) {
  E stored;
  store(stored, x);
  return to_float(stored);
}

// Number of registers of vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
// Vectors that fit a register: compilers make very slow code of wider vectors. kMaxRows says how many rows of
// sums fit into all registers, beside what is multiplied.
#if defined(__AVX512F__)
constexpr int64_t kVector = 16;
constexpr int kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int64_t kVector = 8;
constexpr int kMaxRows = 6;
#elif defined(__aarch64__)
constexpr int64_t kVector = 4;
constexpr int kMaxRows = 12;
#else
constexpr int64_t kVector = 4;
constexpr int kMaxRows = 6;
#endif
typedef float Floats __attribute__((vector_size(4 * kVector)));
typedef uint32_t Words __attribute__((vector_size(4 * kVector)));

// a * b + c, fused where the processor does that: in one rounding there, else in two.
inline float mul_add(float a, float b, float c) {
#if SPECDEC_FUSED
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Floats mul_add(Floats a, Floats b, Floats c) {
#if !SPECDEC_FUSED
  return a * b + c;
#elif defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
  return (Floats)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int64_t j = 0; j < kVector; ++j) c[j] = mul_add(a[j], b[j], c[j]);
  return c;
#endif
}

inline int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

template <typename V, typename E>
inline V load(const E *from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// The two numbers in each word, as floats.
inline Floats widen_low(Words words) { return (Floats)(words << 16); }

inline Floats widen_high(Words words) { return (Floats)(words & 0xffff0000u); }

// kVector numbers as floats.
inline Floats widen(const float *from) { return load<Floats>(from); }

inline Floats widen(const bf16 *from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kVector)));
  return widen_low(__builtin_convertvector(load<Halves>(from), Words));
}

inline Floats widen(const half *from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__aarch64__)
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t *>(from));
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(bits));
#else
  Floats wide;
  for (int64_t j = 0; j < kVector; ++j) wide[j] = to_float(from[j]);
  return wide;
#endif
}

// One number as a float, or kVector of them, as a loop over a row reads for its sum's type.
template <typename V, typename E>
inline V read(const E *from) {
  if constexpr (std::is_same<V, float>::value)
    return to_float(*from);
  else
    return widen(from);
}

// The sum over `count` numbers, to which `add` adds that of place i, or kVector from there on. It is
// taken in kSums parts, each over every kSums-th number in order, whatever a vector holds.
constexpr int64_t kSums = 16;

template <typename Add>
inline float sum_row(int64_t count, const Add &add) {
  Floats vector_sums[kSums / kVector] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums)
#pragma GCC unroll 4
    for (int64_t lane = 0; lane < kSums / kVector; ++lane)
      vector_sums[lane] = add(vector_sums[lane], i + lane * kVector);
  float sums[kSums];
  std::memcpy(sums, vector_sums, sizeof sums);
  for (int64_t lane = 0; lane < kSums && i < count; ++i, ++lane) sums[lane] = add(sums[lane], i);
  for (int64_t half = kSums / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

// Loops over activations are vectorized only where all of them is inlined, which a compiler otherwise
// decides by the size of the whole file.
#define SPECDEC_INLINE inline __attribute__((always_inline))

// exp of a float or of each of a vector that are at most 0, with a relative error below 2e-7 from -87 on:
// 2^k * polynomial(r), x = k ln 2 + r with |r| <= ln 2 / 2. What is added rounds to whole numbers,
// which are then the last bits of the sum.
template <typename V>
SPECDEC_INLINE V exp_fast(V x) {
  typedef typename std::conditional<std::is_same<V, float>::value, uint32_t, Words>::type Bits;
  const V min_x = V{} - 87.0f, rounding = V{} + 12582912.0f;
  x = x < min_x ? min_x : x;
  const V rounded = mul_add(x, V{} + 1.44269504088896341f, rounding), k = rounded - rounding;
  V r = mul_add(k, V{} - 0.693359375f, x);
  r = mul_add(k, V{} + 2.12194440e-4f, r);
  V p = V{} + 1.9875691500e-4f;
  p = mul_add(p, r, V{} + 1.3981999507e-3f);
  p = mul_add(p, r, V{} + 8.3334519073e-3f);
  p = mul_add(p, r, V{} + 4.1665795894e-2f);
  p = mul_add(p, r, V{} + 1.6666665459e-1f);
  p = mul_add(p, r, V{} + 5.0000001201e-1f);
  p = mul_add(p * r, r, r) + 1.0f;
  Bits bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits = (bits + 127u) << 23;
  V scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// tanh of a float or of each of a vector, with an error below 2e-7: a polynomial up to 0.625, where
// 1 - e would lose digits, beyond it (1 - e) / (1 + e) with e = exp(-2 |x|).
template <typename V>
SPECDEC_INLINE V tanh_fast(V x) {
  const V size = x < V{} ? -x : x, square = x * x;
  V p = V{} - 5.70498872745e-3f;
  p = mul_add(p, square, V{} + 2.06390887954e-2f);
  p = mul_add(p, square, V{} - 5.37397155531e-2f);
  p = mul_add(p, square, V{} + 1.33314422036e-1f);
  p = mul_add(p, square, V{} - 3.33332819422e-1f);
  const V polynomial = mul_add(p * square, x, x);
  const V e = exp_fast(size * -2.0f), quotient = (1.0f - e) / (1.0f + e);
  return size < V{} + 0.625f ? polynomial : x < V{} ? -quotient : quotient;
}

SPECDEC_INLINE float sigmoid(float x) {
  float e = exp_fast(-(x < 0 ? -x : x));  // in (0, 1]: never overflows
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

SPECDEC_INLINE float silu(float x) { return x * sigmoid(x); }

// 0.5 (1 + tanh u) is sigmoid(2 u), here with u = sqrt(2 / pi) (x + 0.044715 x^3).
SPECDEC_INLINE float gelu_tanh(float x) {
  return x * sigmoid(1.5957691216057308f * mul_add(0.044715f * x * x, x, x));
}

}  // namespace
