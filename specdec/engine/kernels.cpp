// Native kernels of the embedded engine: what lies between the linears of a decoder layer.
//
// Plain C interface, no torch headers: specdec-build compiles this file for the machine it runs on,
// specdec/engine/native.py calls it. Every function exists for float32, bfloat16 and float16;
// arithmetic is float32, results are rounded to nearest even.
//
// In half precision a token's numbers have the same bits whatever is computed beside it, in other
// copies of a template and by other loops. So each operation is the source's choice, never the
// compiler's: where a product is added to something, `mul_add` stands, which is one fused operation
// where the processor has those and two roundings everywhere where it has not; and sums over a row
// go through `sum_row`, whose order does not depend on how a loop is vectorized. Never write
// a * b + c here: a compiler may fuse it in one place and not in the next.
//
// Legend: B rows, T tokens a row, N query heads, K key/value heads, H head size, S positions,
// R cache rows, D hidden, I inner size.

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

#include <omp.h>
#if defined(__linux__)
#include <linux/futex.h>
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
// Whether the processor fuses products and sums in one instruction.
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

// What fits a register: compilers make very slow code of wider vectors. kMaxRows says how many rows of
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

// One number as a float, or kVector of them: what a loop over a row reads for its sum's type.
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
  Floats parts[kSums / kVector] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums)
#pragma GCC unroll 4
    for (int64_t part = 0; part < kSums / kVector; ++part)
      parts[part] = add(parts[part], i + part * kVector);
  float sums[kSums];
  std::memcpy(sums, parts, sizeof sums);
  for (int64_t part = 0; part < kSums && i < count; ++i, ++part) sums[part] = add(sums[part], i);
  for (int64_t half = kSums / 2; half > 0; half /= 2)
    for (int64_t part = 0; part < half; ++part) sums[part] += sums[part + half];
  return sums[0];
}

// exp of a float or of each of a vector, with a relative error below 2e-7 on [-87, 0]:
// 2^k * polynomial(r), x = k ln 2 + r with |r| <= ln 2 / 2. What is added rounds to whole numbers,
// which are then the last bits of the sum.
template <typename V>
inline V exp_fast(V x) {
  typedef typename std::conditional<std::is_same<V, float>::value, uint32_t, Words>::type Bits;
  const V least = V{} - 87.0f, most = V{} + 88.0f, rounding = V{} + 12582912.0f;
  x = x < least ? least : x > most ? most : x;
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
inline V tanh_fast(V x) {
  const V size = x < V{} ? -x : x, square = x * x;
  V p = V{} - 5.70498872745e-3f;
  p = mul_add(p, square, V{} + 2.06390887954e-2f);
  p = mul_add(p, square, V{} - 5.37397155531e-2f);
  p = mul_add(p, square, V{} + 1.33314422036e-1f);
  p = mul_add(p, square, V{} - 3.33332819422e-1f);
  const V near = mul_add(p * square, x, x);
  const V e = exp_fast(size * -2.0f), far = (1.0f - e) / (1.0f + e);
  return size < V{} + 0.625f ? near : x < V{} ? -far : far;
}

inline float sigmoid(float x) {
  float e = exp_fast(-(x < 0 ? -x : x));  // in (0, 1]: never overflows
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

inline float silu(float x) { return x * sigmoid(x); }

// 0.5 (1 + tanh u) is sigmoid(2 u), here with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline float gelu_tanh(float x) {
  return x * sigmoid(1.5957691216057308f * mul_add(0.044715f * x * x, x, x));
}

// How threads wait for each other within a call. Who waits looks for what is to change, and between looks
// lets others have the core: a thread that spins instead may burn the turn that the other one waits for,
// and one that sleeps takes longer to wake than many a loop here takes. Where a look lasted long, others
// did want the core: then threads sleep for a number of waits before they look so long again, twice as
// many each time. One for all threads of a process.
constexpr int kSpins = 1000, kLooks = 3000;
constexpr int64_t kFirstCalm = 16, kMostCalm = 4096;
constexpr std::chrono::microseconds kLongLook(700);
constexpr int64_t kLine = 64;  // bytes of a line of the caches
// A member's part of a product is taken by about so many turns.
constexpr int64_t kTurnsOfPart = 16;

inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that one thread raises and others wait for.
class Signal {
 public:
  uint32_t read() const { return number_.load(std::memory_order_acquire); }

  void raise() {
    number_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
  }

  void wait(uint32_t before) {  // until it is another number
    for (int i = 0; i < kSpins; ++i) {
      if (read() != before) return;
      relax();
    }
    if (calm_.load(std::memory_order_relaxed) > 0) {
      calm_.fetch_sub(1, std::memory_order_relaxed);
    } else {
      auto looked = std::chrono::steady_clock::now();
      for (int i = 0; i < kLooks; ++i) {
        std::this_thread::yield();
        const auto now = std::chrono::steady_clock::now();
        if (now - looked > kLongLook) {
          const int64_t calm = std::min(2 * last_calm_.load(std::memory_order_relaxed), kMostCalm);
          last_calm_.store(calm, std::memory_order_relaxed);
          calm_.store(calm, std::memory_order_relaxed);
          if (read() != before) return;
          break;
        }
        looked = now;
        if (read() != before) {
          last_calm_.store(kFirstCalm / 2, std::memory_order_relaxed);
          return;
        }
      }
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (number_.load(std::memory_order_seq_cst) == before) sleep(before);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
#if defined(__linux__)
  void sleep(uint32_t before) {
    syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
  void wake() {}
#endif

  std::atomic<uint32_t> number_{0};
  std::atomic<int> sleepers_{0};
  inline static std::atomic<int64_t> calm_{0}, last_calm_{kFirstCalm / 2};
};

class Crew;
thread_local Crew *current_crew = nullptr;  // of the thread that leads it

// One of the threads that run a loop, of `count`.
struct Member {
  int64_t index, count;
  Crew *crew;

  int64_t begin(int64_t size) const { return size * index / count; }
  int64_t end(int64_t size) const { return size * (index + 1) / count; }

  template <typename F>
  void share(int64_t size, const F &body) const {  // its part of so many rounds
    for (int64_t i = begin(size); i < end(size); ++i) body(i);
  }

  void meet() const;  // until all are here

  // Its part of so many rounds, body(begin, end), and then what others have not come to of theirs: a
  // thread that the system lets wait holds the others up for a few rounds, not for all of its part.
  // All offer their parts before they meet. At least so many rounds are taken at a time.
  void offer(int64_t size) const;
  template <typename F>
  void work(int64_t size, int64_t least, const F &body) const;
};

// The rounds of a member that nobody has begun: it takes the first, others the last.
class alignas(kLine) Rest {
 public:
  void offer(int64_t begin, int64_t end) { span_.store(join(begin, end), std::memory_order_relaxed); }

  // Up to `count` rounds for who asks; none where none is left.
  std::pair<int64_t, int64_t> take(int64_t count, bool is_own) {
    for (uint64_t seen = span_.load(std::memory_order_relaxed);;) {
      const int64_t begin = seen >> 32, end = seen & UINT32_MAX, size = std::min(count, end - begin);
      const int64_t first = is_own ? begin : end - size;
      const uint64_t rest = is_own ? join(begin + size, end) : join(begin, first);
      if (size == 0 || span_.compare_exchange_weak(seen, rest, std::memory_order_relaxed))
        return {first, first + size};
    }
  }

 private:
  static uint64_t join(int64_t begin, int64_t end) {
    return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
  }

  std::atomic<uint64_t> span_{0};  // of two halves: where it begins and ends
};

// OpenMP's threads, kept together for a call of many loops: its leader runs what lies between them.
class Crew {
 public:
  int64_t count = 1;
  std::vector<Rest> rests;  // of the members

  void serve(int64_t index) {
    for (uint32_t number = 0;; ++number) {
      loops_.wait(number);
      if (run_ == nullptr) return;
      run_(body_, Member{index, count, this});
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.raise();
    }
  }

  template <typename F>
  void lead(int64_t members, const F &body) {
    count = members;
    rests = std::vector<Rest>(members);
    current_crew = this;
    body();
    current_crew = nullptr;
    run_ = nullptr;
    loops_.raise();
  }

  template <typename F>
  void run(const F &body) {
    if (count == 1) return body(Member{0, 1, nullptr});
    const uint32_t before = done_.read();
    body_ = &body;
    run_ = [](const void *given, const Member &member) { (*static_cast<const F *>(given))(member); };
    left_.store(count - 1, std::memory_order_relaxed);
    loops_.raise();
    current_crew = nullptr;  // a loop within a loop is the member's own
    body(Member{0, count, this});
    current_crew = this;
    done_.wait(before);
  }

  void meet() {
    const uint32_t before = met_.read();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return met_.wait(before);
    arrived_.store(0, std::memory_order_relaxed);
    met_.raise();
  }

 private:
  Signal loops_, done_, met_;
  std::atomic<int64_t> left_{0}, arrived_{0};
  void (*run_)(const void *, const Member &) = nullptr;
  const void *body_ = nullptr;
};

inline void Member::meet() const {
  if (crew != nullptr) return crew->meet();
  if (count > 1) {
#pragma omp barrier
  }
}

inline void Member::offer(int64_t size) const {
  if (crew != nullptr) crew->rests[index].offer(begin(size), end(size));
}

template <typename F>
void Member::work(int64_t size, int64_t least, const F &body) const {
  if (crew == nullptr) return body(begin(size), end(size));
  const int64_t most = size / (kTurnsOfPart * count), rounds = std::max(most / least, int64_t{1}) * least;
  for (int64_t i = 0; i < count;) {
    const auto [first, last] = crew->rests[(index + i) % count].take(rounds, i == 0);
    if (first < last)
      body(first, last);
    else
      ++i;
  }
}

// Runs `body` with a crew for all loops in it, if they are long enough for several threads.
template <typename F>
void with_crew(bool is_long, const F &body) {
  if (!is_long || current_crew != nullptr || omp_get_max_threads() == 1) return body();
  Crew crew;
#pragma omp parallel
  {
    if (omp_get_thread_num() == 0)
      crew.lead(omp_get_num_threads(), body);
    else
      crew.serve(omp_get_thread_num());
  }
}

// Runs `body` in all threads of the crew, or of OpenMP where there is none; in one if it is short.
template <typename F>
void in_threads(bool is_long, const F &body) {
  if (!is_long) return body(Member{0, 1, nullptr});
  if (current_crew != nullptr) return current_crew->run(body);
#pragma omp parallel
  body(Member{omp_get_thread_num(), omp_get_num_threads(), nullptr});
}

template <typename F>
void for_each(int64_t size, bool is_long, const F &body) {
  in_threads(is_long, [&](const Member &member) { member.share(size, body); });
}

inline int64_t count_threads() {
  return current_crew != nullptr ? current_crew->count : omp_get_max_threads();
}

// Below this many multiply-adds a thread team costs more than it saves.
constexpr int64_t kParallelWork = 1 << 15;

template <typename E>
void rms_norm_row(const E *x, const E *weight, E *out, int64_t D, float epsilon) {
  const float sum = sum_row(D, [&](auto sums, int64_t i) {
    const auto v = read<decltype(sums)>(x + i);
    return mul_add(v, v, sums);
  });
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(D) + epsilon);
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
void norm_row(const E *x, const E *weight, const E *bias, E *out, int64_t D, float epsilon) {
  if (bias == nullptr)
    rms_norm_row(x, weight, out, D, epsilon);
  else
    layer_norm_row(x, weight, bias, out, D, epsilon);
}

// The norm of x, to which `delta` is added before, if given: times `share`, and itself normed first
// where it has a norm, of which added[0] is the weight and added[1] the bias.
template <typename E>
void add_norm(E *x, const E *delta, const E *const *added, float share, const E *weight,
              const E *bias, E *out, int64_t rows, int64_t D, float epsilon) {
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
    norm_row(row, weight, bias, to, D, epsilon);
  });
}

// Of rows [2 I] one half, from `activated` on, is activated and multiplied with the other.
template <float (*activate)(float), typename E>
void gate_mul(const E *halves, E *out, int64_t rows, int64_t I, int64_t activated = 0) {
  for_each(rows, rows * I > kParallelWork, [&](int64_t r) {
    const E *gate = halves + r * 2 * I + activated, *up = halves + r * 2 * I + (I - activated);
    E *to = out + r * I;
#pragma omp simd
    for (int64_t i = 0; i < I; ++i)
      store(to[i], round_through<E>(activate(to_float(gate[i]))) * to_float(up[i]));
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

// Products with a matrix W [N, depth] that is packed by tiles of kTile outputs, which follow each
// other; a tile is steps over the depth of kStepBytes, in the order that Packing tells. Every output
// is summed over its inputs in order, however many rows there are: the same row gives the same bits
// alone and among others.
constexpr int64_t kWords = 2, kTile = kWords * kVector, kStepBytes = 4 * kTile;

// Steps after which blocks of rows take turns: these and the next ones stay in the nearest cache.
constexpr int64_t kTurn = 8192 / kStepBytes;

// Kinds of products with bfloat16 weights beside the usual: by pairs (AVX512-BF16, ARM), or summed as
// Intel's AMX does. SPECDEC_PAIRS, SPECDEC_BANDS: these in plain code, so that they can be tested where
// there is no such processor.
#if defined(SPECDEC_PAIRS)
constexpr bool kMultipliesPairs = true, kSumsBands = false;
// Clang up to 14 writes these names without the second underscore.
#elif defined(SPECDEC_BANDS) || ((defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512F__))
constexpr bool kMultipliesPairs = false, kSumsBands = true;
static_assert(SPECDEC_FUSED, "AMX's sums are of fused products");
#elif defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kMultipliesPairs = true, kSumsBands = false;
#else
constexpr bool kMultipliesPairs = false, kSumsBands = false;
#endif
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512F__) && defined(__linux__) && \
    !defined(SPECDEC_BANDS) && !defined(SPECDEC_PAIRS)
#define SPECDEC_AMX 1
#else
#define SPECDEC_AMX 0
#endif
// How far ahead of what is multiplied a matrix is fetched, and whether a single block of rows fetches it
// to the second cache alone. Processors with AMX fetch the rest of a page by themselves if they are asked
// for what is near. Zen 4 has more lines under way if they are not to go on to the nearest cache.
#if SPECDEC_AMX
constexpr int64_t kPrefetchBytes = 1536;
constexpr bool kFetchesFar = false;
#elif defined(__AVX512BF16__)
constexpr int64_t kPrefetchBytes = 8192;
constexpr bool kFetchesFar = true;
#else
constexpr int64_t kPrefetchBytes = 4096;
constexpr bool kFetchesFar = false;
#endif

// Products of integers by AMX, whose sums are exact and so the same as by other instructions.
#if (defined(__AMX_INT8__) || defined(__AMXINT8__)) && defined(__AVX512BW__) && defined(__linux__)
#define SPECDEC_AMX_INTEGERS 1
#else
#define SPECDEC_AMX_INTEGERS 0
#endif

// AMX sums by bands of so many steps: even inputs and odd ones apart, both from zero, each product
// fused; then it adds the two, and that to the sum of the bands before. Denormal numbers are zero to
// it, in what it reads and in each result.
constexpr int64_t kBand = 16;

// While there is one, this thread's floats are rounded as AMX rounds them: nearest, no denormals, no
// exceptions. What is computed meanwhile comes from memory and goes to it, which keeps it in between.
class Flushing {
#if defined(__SSE2__)
  unsigned kept, own = 0x9fc0;

 public:
  Flushing() { asm volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(kept) : "m"(own) : "memory"); }
  ~Flushing() { asm volatile("ldmxcsr %0" : : "m"(kept) : "memory"); }
#else
  static_assert(!kSumsBands, "AMX's sums in plain code are for x86");

 public:
  Flushing() {}
#endif
};

// A step holds kElements inputs of each output, that of output j and input i at place(j, i): for
// float16 each input's kVector outputs side by side, for bfloat16 pairs of inputs in 32-bit words.
// Input is what rows are packed as, kInputs of them a step: floats, or two bfloat16 where the
// processor multiplies such pairs.
template <typename E>
struct Packing {
  typedef float Input;
  static constexpr int64_t kElements = kStepBytes / kTile / sizeof(E), kInputs = kElements;
  static constexpr int64_t place(int64_t j, int64_t i) {
    return (j / kVector * kElements + i) * kVector + j % kVector;
  }
};

template <>
struct Packing<bf16> {
  typedef std::conditional<kMultipliesPairs, uint32_t, float>::type Input;
  static constexpr int64_t kElements = 2, kInputs = kMultipliesPairs ? 1 : 2;
  static constexpr int64_t place(int64_t j, int64_t i) { return 2 * j + i; }
};

template <typename E>
inline int64_t count_steps(int64_t depth) {
  return (depth + Packing<E>::kElements - 1) / Packing<E>::kElements;
}

// What is in a register from here on, and no compiler knows why: so it neither puts the instruction off
// nor makes another one of it and the next.
template <typename V>
inline V pin(V vector) {
#if defined(__AVX512F__)
  asm("" : "+v"(vector));
#elif defined(__SSE2__)
  asm("" : "+x"(vector));
#endif
  return vector;
}

// x in every lane. Where an instruction could read and spread it again for each product, compilers
// are kept from that: two products a cycle would then need two loads and wait for them.
template <typename V, typename X>
inline V spread(X x) {
  return pin(x - V{});
}

// sum + a * b, in the register that has the sum. With only 16 of them GCC's own choice is to move sums
// about, some to memory and back in every step.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
constexpr bool kAddsInPlace = true;
#else
constexpr bool kAddsInPlace = false;
#endif

inline Floats add_in_place(Floats sum, Floats a, Floats b) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#else
  return mul_add(a, b, sum);
#endif
}

// sums[k][m] += w[k] * x[m].
template <int M, bool kInPlace = true>
inline void add_outer(Floats (&sums)[kWords][M], const Floats (&w)[kWords], const float *x) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const Floats input = spread<Floats>(x[m]);
#pragma GCC unroll 2
    for (int64_t k = 0; k < kWords; ++k)
      sums[k][m] = kInPlace ? add_in_place(sums[k][m], w[k], input) : mul_add(w[k], input, sums[k][m]);
  }
}

// sums[k][m] += what a step holds of each output, times the inputs of row m: x is [kInputs][M].
template <int M, typename E>
inline void add_products(Floats (&sums)[kWords][M], const E *step, const float *x) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < Packing<E>::kInputs; ++i) {
    Floats w[kWords];
    for (int64_t k = 0; k < kWords; ++k) w[k] = widen(step + Packing<E>::place(k * kVector, i));
    // GCC keeps float16's sums in registers if left alone.
    add_outer<M, std::is_same<E, float>::value>(sums, w, x + i * M);
  }
}

template <int M>
inline void add_products(Floats (&sums)[kWords][M], const bf16 *step, const float *x) {
  Floats w[kWords];
  for (int64_t k = 0; k < kWords; ++k) w[k] = widen_low(load<Words>(step + k * 2 * kVector));
  add_outer<M>(sums, w, x);
  // With few registers what was read is read again, and none may be left for widen_high's mask.
  if constexpr (kAddsInPlace) asm("" : "+r"(step));
  for (int64_t k = 0; k < kWords; ++k) {
    const Words words = load<Words>(step + k * 2 * kVector);
    if constexpr (kAddsInPlace && M == kMaxRows)
      w[k] = widen_low(pin(words >> 16));
    else
      w[k] = widen_high(words);
  }
  add_outer<M>(sums, w, x + M);
}

inline Floats add_pairs(Floats sums, Words words, Words inputs) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)words, (__m512bh)inputs);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Floats)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)words, (bfloat16x8_t)inputs);
#else
  sums = mul_add(widen_low(words), widen_low(inputs), sums);
  return mul_add(widen_high(words), widen_high(inputs), sums);
#endif
}

template <int M>
inline void add_products(Floats (&sums)[kWords][M], const bf16 *step, const uint32_t *x) {
  Words w[kWords];
  for (int64_t k = 0; k < kWords; ++k) w[k] = load<Words>(step + k * 2 * kVector);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    const Words inputs = spread<Words>(x[m]);
#pragma GCC unroll 2
    for (int64_t k = 0; k < kWords; ++k) sums[k][m] = add_pairs(sums[k][m], w[k], inputs);
  }
}

#if SPECDEC_AMX || SPECDEC_AMX_INTEGERS
// Whether the system lets this process use AMX's registers, which it must be asked once. Where it does
// not, plain code takes the same sums.
inline bool can_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_permitted;
}

// How a thread's AMX registers are shaped while there is one: `rows` of sums in 0 to 3 and of inputs
// in 4 and 5; in 6 and 7 so many words of 16 outputs, a band or less. Or for a band and three blocks of
// rows: sums in 0 to 5, outputs in 6, inputs in 7.
class Registers {
 public:
  explicit Registers(int64_t rows, int64_t words = kBand, bool is_for_three = false) {
    struct {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int at = 0; at < 8; ++at) {
      shape.row_bytes[at] = static_cast<uint16_t>(at == 4 || at == 5 ? 4 * words : kLine);
      shape.rows[at] = static_cast<uint8_t>(at < 6 || (at == 7 && is_for_three) ? rows : words);
    }
    static_assert(sizeof shape == 64, "as the instruction takes it");
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Registers() { asm volatile("tilerelease"); }
};

// Instructions as they are: compilers' functions for them do not all say what memory is read.
template <int kRegister>
inline void clear_register() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}

template <int kRegister>
inline void load_register(const char *from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(kRegister) : "memory");
}

template <int kRegister>
inline void store_register(char *to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(kRegister) : "memory");
}

constexpr int64_t kAmxRows = 16, kBandBytes = kBand * kStepBytes;
#endif

#if SPECDEC_AMX
// Adds the products of inputs X with a band W to sums.
template <int kSums, int kX, int kW>
inline void multiply_registers() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
}
#endif

// How a layer attends. q_norm, k_norm: weights [H] of the norms of each query and each key before
// they are rotated, or null; cosine, sine: [lines, rotated]; window: positions that a token sees,
// itself included, or 0 for all; scale: of the scores; cap: a score s becomes cap tanh(s / cap), or 0
// where it stays; epsilon: of the norms.
template <typename E>
struct Attention {
  const E *q_norm, *k_norm, *cosine, *sine;
  int64_t rotated, window;
  float scale, cap, epsilon;
};

// A token's attention is summed by blocks of kBlockPositions of the text before it. In each, scores
// are products of queries with keys, the block's result is that of weights with values, both summed
// in order; then blocks are merged in order. Where a block ends depends on a token's place in its
// text alone, not on the step: so blocks can be shared out to threads.
constexpr int64_t kBlockPositions = 512;
// Queries that use keys and values at a time, while these are cached: of a step of up to so many
// all, of longer ones half as many.
constexpr int64_t kQueries = 128;

// Vectors of sums for each row of a product: kSpanRows rows of them stay in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSpanVectors = 4;
#else
constexpr int kSpanVectors = 2;
#endif
constexpr int kSpanRows = 4;
constexpr int64_t kSpan = kSpanVectors * kVector;

// C [R, columns] (+)= A [R, depth] B [depth, columns] for so many vectors of columns.
template <int R, int Vectors>
inline void add_span(const float *A, int64_t a_row, const float *B, int64_t b_row, int64_t depth,
                     float *C, int64_t c_row, bool is_first) {
  Floats sums[R][Vectors] = {};
  if (!is_first)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load<Floats>(C + r * c_row + v * kVector);
  for (int64_t i = 0; i < depth; ++i) {
    Floats b[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) b[v] = load<Floats>(B + i * b_row + v * kVector);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Floats a = spread<Floats>(A[r * a_row + i]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = mul_add(b[v], a, sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      std::memcpy(C + r * c_row + v * kVector, &sums[r][v], sizeof(Floats));
}

template <int Vectors>
inline void add_rows(const float *A, int64_t rows, int64_t a_row, const float *B, int64_t b_row,
                     int64_t depth, float *C, int64_t c_row, bool is_first) {
  for (; rows >= kSpanRows; rows -= kSpanRows, A += kSpanRows * a_row, C += kSpanRows * c_row)
    add_span<kSpanRows, Vectors>(A, a_row, B, b_row, depth, C, c_row, is_first);
  if (rows == 3) add_span<3, Vectors>(A, a_row, B, b_row, depth, C, c_row, is_first);
  if (rows == 2) add_span<2, Vectors>(A, a_row, B, b_row, depth, C, c_row, is_first);
  if (rows == 1) add_span<1, Vectors>(A, a_row, B, b_row, depth, C, c_row, is_first);
}

// C [rows, columns] = A [rows, depth] B [depth, columns], columns in whole vectors; added to what is
// there but where it is the first.
inline void add_product(const float *A, int64_t rows, int64_t a_row, const float *B,
                        int64_t columns, int64_t depth, float *C, int64_t c_row, bool is_first) {
  int64_t c = 0;
  for (; c + kSpan <= columns; c += kSpan)
    add_rows<kSpanVectors>(A, rows, a_row, B + c, columns, depth, C + c, c_row, is_first);
  for (; c < columns; c += kVector)
    add_rows<1>(A, rows, a_row, B + c, columns, depth, C + c, c_row, is_first);
}

// Lanes of a and of b: those where lane & D is 0 and not 0 trade places.
template <int D, bool kSecond, size_t... J>
inline Words trade(Words a, Words b, std::index_sequence<J...>) {
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b, (kSecond ? (J & D ? kVector + J : J + D) : (J & D ? kVector + J - D : J))...);
#else
  return __builtin_shuffle(
      a, b, Words{(kSecond ? (J & D ? kVector + J : J + D) : (J & D ? kVector + J - D : J))...});
#endif
}

// Rows become columns.
template <int D = kVector / 2>
inline void turn(Words (&rows)[kVector]) {
  constexpr auto lanes = std::make_index_sequence<kVector>();
#pragma GCC unroll 16
  for (int r = 0; r < kVector; ++r)
    if (!(r & D)) {
      const Words a = rows[r], b = rows[r + D];
      rows[r] = trade<D, false>(a, b, lanes);
      rows[r + D] = trade<D, true>(a, b, lanes);
    }
  if constexpr (D > 1) turn<D / 2>(rows);
}

// The numbers in each word as floats: the first ones, kSpan further the second ones.
inline void put(Words words, float *to, const float *) { std::memcpy(to, &words, sizeof words); }

inline void put(Words words, float *to, const bf16 *) {
  const Floats low = widen_low(words), high = widen_high(words);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + kSpan, &high, sizeof high);
}

inline void put(Words words, float *to, const half *) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kVector)));
  for (int i = 0; i < 2; ++i, words >>= 16, to += kSpan) {
    const Halves bits = __builtin_convertvector(words & 0xffffu, Halves);
    half numbers[kVector];
    std::memcpy(numbers, &bits, sizeof numbers);
    const Floats wide = widen(numbers);
    std::memcpy(to, &wide, sizeof wide);
  }
}

// Keys and values are read row after row: what lies so far ahead is fetched.
template <typename E>
inline void fetch_row(const E *row, int64_t H) {
  
  const char *ahead = reinterpret_cast<const char *>(row) + kPrefetchBytes;
  for (int64_t at = 0; at < H * static_cast<int64_t>(sizeof(E)); at += kLine)
    __builtin_prefetch(ahead + at);
}

// Keys [count, H], up to kSpan of them, side by side: [H, kSpan], zeros beyond `count`.
template <typename E>
void turn_keys(const E *keys, int64_t count, int64_t H, float *to) {
  constexpr int64_t kNumbers = 4 / sizeof(E);  // in a word
  const int64_t whole = H / (kNumbers * kVector) * (kNumbers * kVector);
  for (int64_t p = 0; p < kSpan; p += kVector) {
    for (int64_t r = p; r < p + kVector; ++r) fetch_row(keys + r * H, H);
    for (int64_t h = 0; h < whole; h += kNumbers * kVector) {
      Words rows[kVector];
      for (int64_t r = 0; r < kVector; ++r)
        rows[r] = p + r < count ? load<Words>(keys + (p + r) * H + h) : Words{};
      turn(rows);
      for (int64_t r = 0; r < kVector; ++r) put(rows[r], to + (h + r * kNumbers) * kSpan + p, keys);
    }
    for (int64_t r = p; r < p + kVector; ++r)
      for (int64_t h = whole; h < H; ++h)
        to[h * kSpan + r] = r < count ? to_float(keys[r * H + h]) : 0.0f;
  }
}

// A score that counts for nothing.
constexpr float kHidden = -1e30f;

// Scores [count], whole parts of kSums, become exp(score - top), 0 where they are hidden.
inline void weigh(float *scores, int64_t count, float &top, float &total) {
  Floats most = Floats{} + kHidden;
  for (int64_t i = 0; i < count; i += kVector) {
    const Floats x = load<Floats>(scores + i);
    most = x > most ? x : most;
  }
  top = kHidden;
  for (int64_t j = 0; j < kVector; ++j) top = most[j] > top ? most[j] : top;
  for (int64_t i = 0; i < count; i += kVector) {
    const Floats x = load<Floats>(scores + i), weights = exp_fast(x - top);
    const Floats kept = x > Floats{} + kHidden ? weights : Floats{};
    std::memcpy(scores + i, &kept, sizeof kept);
  }
  total = sum_row(count, [&](auto sums, int64_t i) {
    return sums + read<decltype(sums)>(scores + i);
  });
}

// What queries found in some positions: weighted sums of values [queries, width], and of each query
// the largest score and the sum of the weights.
struct Found {
  float *sums, *tops, *totals;
  int64_t width;

  Found(float *memory, int64_t queries, int64_t width)
      : sums(memory), tops(memory + queries * width), totals(tops + queries), width(width) {}

  void clear(int64_t count) const {
    std::fill_n(sums, count * width, 0.0f);
    std::fill_n(tops, count, kHidden);
    std::fill_n(totals, count, 0.0f);
  }

  // Adds what was found in the positions that follow.
  void add(const Found &next, int64_t count) const {
    for (int64_t q = 0; q < count; ++q) {
      const float top = std::max(tops[q], next.tops[q]);
      const float share = exp_fast(tops[q] - top), next_share = exp_fast(next.tops[q] - top);
      tops[q] = top;
      totals[q] = mul_add(next.totals[q], next_share, totals[q] * share);
      for (int64_t i = q * width; i < (q + 1) * width; i += kVector) {
        const Floats own = load<Floats>(sums + i) * share;
        const Floats sum = mul_add(load<Floats>(next.sums + i), Floats{} + next_share, own);
        std::memcpy(sums + i, &sum, sizeof sum);
      }
    }
  }
};

// Scores of queries [count, H] for `num_keys` positions: [count, stride]; scratch: [H, kSpan].
template <typename E>
void score(const float *queries, int64_t count, const E *keys, int64_t num_keys, int64_t H,
           float cap, float *scratch, float *scores, int64_t stride) {
  for (int64_t p = 0; p < num_keys; p += kSpan) {
    turn_keys(keys + p * H, num_keys - p, H, scratch);
    add_product(queries, count, H, scratch, kSpan, H, scores + p, stride, true);
  }
  for (int64_t q = 0; q < count && cap > 0.0f; ++q)
    for (float *at = scores + q * stride, *end = at + num_keys; at < end; at += kVector) {
      const Floats capped = cap * tanh_fast(load<Floats>(at) / cap);
      std::memcpy(at, &capped, sizeof capped);
    }
}

// sums [count, width] = weights [count, stride] times values [num_values, H]; width: H in whole
// vectors; scratch: [kSpan, width].
template <typename E>
void add_values(const float *weights, int64_t count, int64_t stride, const E *values,
                int64_t num_values, int64_t H, float *scratch, float *sums, int64_t width) {
  for (int64_t v = 0; v < num_values; v += kSpan) {
    const int64_t some = std::min(kSpan, num_values - v);
    for (int64_t i = 0; i < some; ++i) {
      const E *from = values + (v + i) * H;
      float *to = scratch + i * width;
      fetch_row(from, H);
      int64_t h = 0;
      for (; h + kVector <= H; h += kVector) {
        const Floats wide = widen(from + h);
        std::memcpy(to + h, &wide, sizeof wide);
      }
      for (; h < width; ++h) to[h] = h < H ? to_float(from[h]) : 0.0f;
    }
    add_product(weights + v, count, stride, scratch, width, some, sums, width, v == 0);
  }
}

struct Line {
  alignas(kLine) char bytes[kLine];
};

// Attention in bfloat16 where products are summed as AMX does, by AMX or in plain code. Queries go by
// kLanes side by side. Scores are summed over the head by bands, before they are scaled; weights are
// rounded to bfloat16, and their products with values summed by bands of positions, which begin where
// a block does: so a band's positions depend on a token's place in its text alone, too.
constexpr int64_t kLanes = 16, kBandPositions = 2 * kBand, kLaneWords = kBand * kLanes;
// Keys that are multiplied at a time.
constexpr int64_t kKeys = 4 * kLanes;
constexpr int64_t kBandBlock = kBlockPositions / kBandPositions;  // bands of a block

// What is read next, which is fetched into the second cache while something else is computed.
struct Ahead {
  const char *from;
  int64_t lines;  // at each step

  void fetch() {
    for (int64_t line = 0; line < lines; ++line, from += kLine) __builtin_prefetch(from, 0, 2);
  }
};

// `kCount` keys, `row` bytes one after the other, times queries [bands, kBand, kLanes] of pairs.
template <int kCount>
inline void score_plainly(const char *keys, int64_t row, int64_t bands, const uint32_t *queries,
                          float *scores) {
  for (int64_t lane = 0; lane < kLanes; lane += kVector) {
    Floats sums[kCount] = {};
    for (int64_t band = 0; band < bands; ++band) {
      Floats even[kCount] = {}, odd[kCount] = {};
      for (int64_t i = band * kBand; i < (band + 1) * kBand; ++i) {
        const Words words = load<Words>(queries + i * kLanes + lane);
        const Floats low = widen_low(words), high = widen_high(words);
#pragma GCC unroll 4
        for (int k = 0; k < kCount; ++k) {
          uint32_t key;
          std::memcpy(&key, keys + k * row + i * 4, 4);
          even[k] = mul_add(low, spread<Floats>(as_float(key << 16)), even[k]);
          odd[k] = mul_add(high, spread<Floats>(as_float(key & 0xffff0000u)), odd[k]);
        }
      }
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) sums[k] += even[k] + odd[k];
    }
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k)
      std::memcpy(scores + k * kLanes + lane, &sums[k], sizeof(Floats));
  }
}

#if SPECDEC_AMX
// kKeys keys.
inline void score_amx(const char *keys, int64_t row, int64_t bands, const uint32_t *queries,
                      float *scores) {
  char *to = reinterpret_cast<char *>(scores);
  clear_register<0>();
  clear_register<1>();
  clear_register<2>();
  clear_register<3>();
  for (int64_t band = 0; band < bands; ++band, keys += kLine) {
    load_register<4>(reinterpret_cast<const char *>(queries + band * kLaneWords), kLine);
    load_register<5>(keys, row);
    multiply_registers<0, 5, 4>();
    load_register<6>(keys + kLanes * row, row);
    multiply_registers<1, 6, 4>();
    load_register<7>(keys + 2 * kLanes * row, row);
    multiply_registers<2, 7, 4>();
    load_register<5>(keys + 3 * kLanes * row, row);
    multiply_registers<3, 5, 4>();
  }
  store_register<0>(to, kLine);
  store_register<1>(to + kLanes * kLine, kLine);
  store_register<2>(to + 2 * kLanes * kLine, kLine);
  store_register<3>(to + 3 * kLanes * kLine, kLine);
}

// Sums of the weights of kLanes queries times kTiles tiles of values.
template <int kTiles>
inline void add_weighted_amx(const char *weights, const char *values, int64_t row, int64_t bands,
                             const char *from, char *to) {
  const auto for_tiles = [](const auto &run) {
    run(std::integral_constant<int, 0>());
    if constexpr (kTiles > 1) run(std::integral_constant<int, 1>());
    if constexpr (kTiles > 2) run(std::integral_constant<int, 2>());
    if constexpr (kTiles > 3) run(std::integral_constant<int, 3>());
  };
  for_tiles([&](auto tile) {
    constexpr int kAt = decltype(tile)::value;
    if (from == nullptr)
      clear_register<kAt>();
    else
      load_register<kAt>(from + kAt * kLine, row);
  });
  for (int64_t band = 0; band < bands; ++band, weights += kLanes * kLine, values += kBand * row) {
    load_register<4>(weights, kLine);
    for_tiles([&](auto tile) {
      constexpr int kAt = decltype(tile)::value;
      load_register<5 + kAt % 3>(values + kAt * kLine, row);
      multiply_registers<kAt, 4, 5 + kAt % 3>();
    });
  }
  for_tiles([&](auto tile) {
    constexpr int kAt = decltype(tile)::value;
    store_register<kAt>(to + kAt * kLine, row);
  });
}
#endif

// sums [kLanes, width] = those before, or zeros, plus weights [bands, kLanes, kBand] times values
// [bands, kBand, width], both pairs; of queries `first` to `last`, others may be computed too.
inline void add_weighted(const uint32_t *weights, int64_t first, int64_t last,
                         const uint32_t *values, int64_t width, int64_t bands, bool by_amx,
                         const float *before, float *sums) {
#if SPECDEC_AMX
  if (by_amx) {
    for (int64_t h = 0; h < width; h += 4 * kLanes) {
      const char *weight = reinterpret_cast<const char *>(weights);
      const char *value = reinterpret_cast<const char *>(values + h);
      const char *from = before != nullptr ? reinterpret_cast<const char *>(before + h) : nullptr;
      char *to = reinterpret_cast<char *>(sums + h);
      const int64_t tiles = (width - h) / kLanes;
      const auto add = tiles == 1   ? add_weighted_amx<1>
                       : tiles == 2 ? add_weighted_amx<2>
                       : tiles == 3 ? add_weighted_amx<3>
                                    : add_weighted_amx<4>;
      add(weight, value, width * 4, bands, from, to);
    }
    return;
  }
#else
  (void)by_amx;
#endif
  constexpr int kCount = 4;
  const Flushing flushing;
  for (int64_t h = 0; h < width; h += kVector)
    for (int64_t q = first / kCount * kCount; q < last; q += kCount) {
      Floats total[kCount] = {};
      if (before != nullptr)
        for (int64_t r = 0; r < kCount; ++r) total[r] = load<Floats>(before + (q + r) * width + h);
      for (int64_t band = 0; band < bands; ++band) {
        Floats even[kCount] = {}, odd[kCount] = {};
        for (int64_t i = 0; i < kBand; ++i) {
          const Words words = load<Words>(values + (band * kBand + i) * width + h);
          const Floats low = widen_low(words), high = widen_high(words);
#pragma GCC unroll 4
          for (int64_t r = 0; r < kCount; ++r) {
            const uint32_t weight = weights[band * kLaneWords + (q + r) * kBand + i];
            even[r] = mul_add(low, spread<Floats>(as_float(weight << 16)), even[r]);
            odd[r] = mul_add(high, spread<Floats>(as_float(weight & 0xffff0000u)), odd[r]);
          }
        }
#pragma GCC unroll 4
        for (int64_t r = 0; r < kCount; ++r) total[r] += even[r] + odd[r];
      }
      for (int64_t r = 0; r < kCount; ++r)
        std::memcpy(sums + (q + r) * width + h, &total[r], sizeof(Floats));
    }
}

// Raw scores [count, kLanes] of keys [count, H]; what lies beyond `count`, up to whole kKeys, is of
// no key. scratch: [kKeys, bands of the head].
inline void score_lanes(const bf16 *keys, int64_t count, int64_t H, const uint32_t *queries,
                        bool by_amx, Ahead ahead, bf16 *scratch, float *scores) {
  const int64_t bands = (H + 2 * kBand - 1) / (2 * kBand), row = bands * kLine;
  const auto run = [&] {
    for (int64_t p = 0; p < count; p += kKeys, keys += kKeys * H, scores += kKeys * kLanes) {
      const int64_t some = std::min(kKeys, count - p);
      const bf16 *from = keys;
      ahead.fetch();
      if (some < kKeys || H * 2 != row) {
        std::memset(static_cast<void *>(scratch), 0, kKeys * row);
        for (int64_t k = 0; k < some; ++k)
          std::memcpy(static_cast<void *>(scratch + k * row / 2), keys + k * H, H * sizeof(bf16));
        from = scratch;
      }
      const char *bytes = reinterpret_cast<const char *>(from);
#if SPECDEC_AMX
      if (by_amx) {
        score_amx(bytes, row, bands, queries, scores);
        continue;
      }
#endif
      for (int64_t k = 0; k < kKeys; k += 4)
        score_plainly<4>(bytes + k * row, row, bands, queries, scores + k * kLanes);
    }
  };
  if (by_amx) return run();
  const Flushing flushing;
  run();
}

// Scores [rows, kLanes] of whole bands become weights in bfloat16, [bands, kLanes, kBand] pairs, 0
// where they are hidden or next to nothing; of each query the largest score and the sum of weights.
inline void weigh_lanes(const float *scores, int64_t rows, float scale, Ahead ahead,
                        uint32_t *weights, float *tops, float *totals) {
  const float factor = scale * 1.44269504088896341f;
  for (int64_t lane = 0; lane < kLanes; lane += kVector) {
    Floats most = Floats{} + kHidden;
    for (int64_t i = 0; i < rows; ++i) {
      const Floats x = load<Floats>(scores + i * kLanes + lane);
      most = x > most ? x : most;
    }
    const Floats top = most > Floats{} + kHidden ? most : Floats{};
    // 2^x with a relative error below 3e-6, rounded to nearest.
    const auto round_weight = [&](const float *from) {
      const Floats x = (load<Floats>(from) - top) * factor, rounding = Floats{} + 12582912.0f;
      const Floats rounded = x + rounding, part = x - (rounded - rounding);
      Floats p = Floats{} + 9.58285e-3f;
      p = mul_add(p, part, Floats{} + 5.590644e-2f);
      p = mul_add(p, part, Floats{} + 2.4024099e-1f);
      p = mul_add(p, part, Floats{} + 6.9312419e-1f);
      p = mul_add(p, part, Floats{} + 1.0f);
      const Words weight = (Words)p + ((Words)rounded << 23);
      return (x > Floats{} - 125.0f ? weight : Words{}) + 0x8000u;
    };
    Floats parts[4] = {};
    for (int64_t band = 0; band < rows / kBandPositions; ++band)
      for (int64_t pair = 0; pair < kBand; pair += kVector) {
        if (lane + pair == 0) ahead.fetch();
        Words words[kVector];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kVector; ++i) {
          const float *from = scores + (band * kBandPositions + 2 * (pair + i)) * kLanes + lane;
          const Words low = round_weight(from), high = round_weight(from + kLanes) & 0xffff0000u;
          words[i] = low >> 16 | high;
          parts[i % 2 * 2] += widen_high(low);
          parts[i % 2 * 2 + 1] += (Floats)high;
        }
        turn(words);
        for (int64_t q = 0; q < kVector; ++q)
          std::memcpy(weights + band * kLaneWords + (lane + q) * kBand + pair, &words[q],
                      sizeof(Words));
      }
    const Floats total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    const Floats scaled = most > Floats{} + kHidden ? most * scale : most;
    std::memcpy(tops + lane, &scaled, sizeof scaled);
    std::memcpy(totals + lane, &total, sizeof total);
  }
}

// Hides scores [rows, kLanes] but those from first[lane] to last[lane].
inline void hide(const float *first, const float *last, int64_t rows, float *scores) {
  const float seen = *std::max_element(first, first + kLanes);
  const float end = *std::min_element(last, last + kLanes);
  for (int64_t i = 0; i < rows; ++i) {
    const float at = static_cast<float>(i);
    if (at >= seen && at < end) continue;
    for (int64_t lane = 0; lane < kLanes; lane += kVector) {
      float *to = scores + i * kLanes + lane;
      const Floats score = load<Floats>(to), place = Floats{} + at;
      const Floats late = place < load<Floats>(last + lane) ? score : Floats{} + kHidden;
      const Floats kept = place >= load<Floats>(first + lane) ? late : Floats{} + kHidden;
      std::memcpy(to, &kept, sizeof kept);
    }
  }
}

// Pairs of two rows of values [H], or null for zeros: [width].
inline void pair_rows(const bf16 *low, const bf16 *high, int64_t H, int64_t width, uint32_t *to) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kVector)));
  const auto read_words = [](const bf16 *from, int64_t h) {
    return from == nullptr ? Words{} : __builtin_convertvector(load<Halves>(from + h), Words);
  };
  int64_t h = 0;
  for (; h + kVector <= H; h += kVector) {
    const Words words = read_words(low, h) | read_words(high, h) << 16;
    std::memcpy(to + h, &words, sizeof words);
  }
  for (; h < width; ++h) {
    const uint32_t one = low != nullptr && h < H ? low[h].bits : 0;
    to[h] = one | (high != nullptr && h < H ? static_cast<uint32_t>(high[h].bits) << 16 : 0);
  }
}

// The queries of a K/V head in pairs, [bands, kBand, kLanes]: `find` tells where a lane's query is,
// null for none.
template <typename Find>
inline void pair_queries(const Find &find, int64_t H, uint32_t *to) {
  const int64_t bands = (H + 2 * kBand - 1) / (2 * kBand);
  for (int64_t band = 0; band < bands; ++band) {
    uint32_t lines[kLanes][kBand] = {};
    const int64_t size = std::min(2 * kBand, H - band * 2 * kBand);
    for (int64_t lane = 0; lane < kLanes; ++lane)
      if (const bf16 *query = find(lane))
        std::memcpy(lines[lane], query + band * 2 * kBand, size * sizeof(bf16));
    for (int64_t lane = 0; lane < kLanes; lane += kVector)
      for (int64_t pair = 0; pair < kBand; pair += kVector) {
        Words words[kVector];
        for (int64_t i = 0; i < kVector; ++i) words[i] = load<Words>(lines[lane + i] + pair);
        turn(words);
        for (int64_t i = 0; i < kVector; ++i)
          std::memcpy(to + band * kLaneWords + (pair + i) * kLanes + lane, &words[i], sizeof(Words));
      }
  }
}

// What a thread needs for queries by lanes, one part after the other.
struct LaneMemory {
  int64_t query_words;  // of a query in pairs
  uint32_t *queries, *weights, *values, *own_values;
  float *scores, *newest, *sums;
  bf16 *keys;

  static int64_t count_words(int64_t H) { return round_up(H, kBandPositions) / 2; }

  // In floats, of which each part takes whole lines.
  static int64_t measure(int64_t queries, int64_t H, int64_t C) {
    const int64_t words = count_words(H), width = round_up(H, kLanes);
    return (queries + kKeys) * words + kLanes * (round_up(C, kKeys) + width) +
           kBlockPositions * (kLanes + kLanes / 2 + width);
  }

  LaneMemory(float *memory, int64_t count, int64_t H, int64_t C) : query_words(count_words(H)) {
    const int64_t width = round_up(H, kLanes), block = kBlockPositions;
    const auto take = [&](int64_t size) { return std::exchange(memory, memory + size); };
    const auto take_words = [&](int64_t size) { return reinterpret_cast<uint32_t *>(take(size)); };
    queries = take_words(count * query_words);
    weights = take_words(block / 2 * kLanes);
    values = take_words(block / 2 * width);
    own_values = take_words(block / 2 * width);
    scores = take(block * kLanes);
    newest = take(round_up(C, kKeys) * kLanes);
    sums = take(kLanes * width);
    keys = reinterpret_cast<bf16 *>(take(kKeys * query_words));
  }
};

// qkv: [B, T, (N + 2K) H], normed and rotated in place; cache: keys [R, K, S, H] then values of one
// layer; positions, lines: [B, T], the token's place in the sequence and its line of the tables;
// tree_mask: [B, T, C], of the C newest tokens in the cache, the step's own last (C is T where there
// is a window); out: [B, T, N H]. wanted: [B, T], zero where out may be anything, or null.
template <typename E>
void attend(E *qkv, E *cache, const Attention<E> &how, const int64_t *rows,
            const int64_t *positions, const int64_t *lines, const int64_t *past,
            const uint8_t *tree_mask, E *out, int64_t B, int64_t T, int64_t C, int64_t N, int64_t K,
            int64_t H, int64_t R, int64_t S, const uint8_t *wanted = nullptr) {
  const int64_t stride = (N + 2 * K) * H, group = N / K, head = S * H;
  const int64_t rotated = how.rotated, window = how.window;
  constexpr bool kByBands = kSumsBands && std::is_same<E, bf16>::value;
  E *key_cache = cache, *value_cache = cache + R * K * head;
  const bool parallel_rotate = B * T * stride > kParallelWork;
  for_each(B * T, parallel_rotate, [&](int64_t bt) {
    const int64_t b = bt / T, slot = past[b] + C - T + bt % T, line = lines[bt] * rotated;
    const E *cosine = how.cosine + line, *sine = how.sine + line;
    E *token = qkv + bt * stride;
    for (int64_t n = 0; n < N + K && how.q_norm != nullptr; ++n)
      rms_norm_row(token + n * H, n < N ? how.q_norm : how.k_norm, token + n * H, H, how.epsilon);
    for (int64_t n = 0; n < N && rotated > 0; ++n)
      rotate_to(token + n * H, token + n * H, cosine, sine, rotated, H);
    for (int64_t k = 0; k < K; ++k) {
      const int64_t at = (rows[b] * K + k) * head + slot * H;
      rotate_to(token + (N + k) * H, key_cache + at, cosine, sine, rotated, H);
      std::memcpy(value_cache + at, token + (N + K + k) * H, sizeof(E) * H);
    }
  });
  // The first committed position that a token sees: those are stored at their own numbers.
  const auto find_first = [&](int64_t b, int64_t t) {
    const int64_t first = window > 0 ? positions[b * T + t] - window + 1 : 0;
    return first < 0 ? 0 : first < past[b] ? first : past[b];
  };
  // A row's blocks that only hold committed positions; `last` is that of the newest ones, with the
  // step's tokens. Those may lie in more than one block, by their places in the text.
  struct Range {
    int64_t first, last, num_last;
    bool is_chain;  // each of the step's tokens lies at its place, so all blocks are alike
    int64_t count() const { return last + num_last - first; }
  };
  const auto find_chain = [&](int64_t b) {
    bool is_chain = kByBands && C == T;
    for (int64_t t = 0; t < T && is_chain; ++t) {
      const uint8_t *mask = tree_mask + (b * T + t) * C;
      is_chain = (window <= 0 || positions[b * T + t] == past[b] + t) &&
                 std::all_of(mask, mask + t + 1, [](uint8_t seen) { return seen; }) &&
                 std::none_of(mask + t + 1, mask + C, [](uint8_t seen) { return seen; });
    }
    return is_chain;
  };
  std::vector<Range> ranges(B);
  int64_t longest = 0, most_blocks = 0;
  for (int64_t b = 0; b < B; ++b) {
    int64_t first = past[b];
    for (int64_t t = 0; t < T; ++t) first = std::min(first, find_first(b, t));
    const int64_t last = past[b] / kBlockPositions;
    const int64_t num_last = (past[b] % kBlockPositions + C - 1) / kBlockPositions + 1;
    if (find_chain(b))
      ranges[b] = {first / kBlockPositions, last + num_last - 1, 1, true};
    else
      ranges[b] = {first / kBlockPositions, last, num_last, false};
    longest = std::max(longest, past[b] + C - ranges[b].first * kBlockPositions);
    most_blocks = std::max(most_blocks, ranges[b].count());
  }
  // Where a row is no chain: which of the newest tokens each one sees, and as the last how many.
  std::vector<int32_t> seen;
  const bool has_trees = std::any_of(ranges.begin(), ranges.end(),
                                     [](const Range &range) { return !range.is_chain; });
  if (kByBands && has_trees) {
    seen.resize(B * T * (C + 1));
    for (int64_t bt = 0; bt < B * T; ++bt) {
      int32_t *slots = &seen[bt * (C + 1)];
      for (int64_t j = 0; j < C; ++j)
        if (tree_mask[bt * C + j]) slots[slots[C]++] = static_cast<int32_t>(j);
    }
  }
  // The queries of a K/V head are numbered q = t * group + g, and go by tiles.
  const int64_t num_queries = T * group, tile = num_queries > kQueries ? kQueries / 2 : num_queries;
  const int64_t tiles = (num_queries + tile - 1) / tile;
  const int64_t width = round_up(H, kByBands ? kLanes : kVector);
  const int64_t row = round_up(std::min(longest, kBlockPositions + C), kSpan);
  const int64_t found_queries = kByBands ? round_up(tile, kLanes) : tile;
  const int64_t found_size = found_queries * (width + 2);
  const bool parallel_attend = B * T * N * H * longest > kParallelWork;
  // With fewer heads than threads each one's blocks are shared out, and merged afterwards.
  const int64_t threads = parallel_attend ? count_threads() : 1, items = B * K * tiles;
  const int64_t parts =
      items % threads == 0 ? 1 : std::min(most_blocks, (4 * threads + items - 1) / items);
  const std::unique_ptr<float[]> kept(new float[parts > 1 ? items * most_blocks * found_size : 0]);

  in_threads(parallel_attend, [&](const Member &member) {
    static thread_local std::vector<Line> memory;
    const int64_t size =
        kByBands ? LaneMemory::measure(found_queries, H, C)
                 : tile * (H + 2 * row) + kSpan * width + kBlockPositions;
    memory.resize((2 * found_size + size) * sizeof(float) / sizeof(Line) + 1);
    float *found_at = reinterpret_cast<float *>(memory.data());
    const Found whole(found_at, found_queries, width);
    const Found block_found(found_at + found_size, found_queries, width);
    const LaneMemory lanes(found_at + 2 * found_size, found_queries, H, C);
    float *queries = found_at + 2 * found_size, *scores = queries + tile * H;
    float *weights = scores + tile * row, *wide = weights + tile * row;
    float *line = wide + kSpan * width;
    bool by_amx = false;
#if SPECDEC_AMX
    std::optional<Registers> registers;
    by_amx = kByBands && can_use_amx();
    if (by_amx) registers.emplace(kAmxRows);
#endif
    int64_t b, k, first, count;  // of the item at hand: its row, K/V head and queries
    const auto set_item = [&](int64_t item) {
      b = item / (K * tiles), k = item / tiles % K, first = item % tiles * tile;
      count = std::min(tile, num_queries - first);
    };
    const auto get_token = [&](int64_t q) { return (first + q) / group; };
    const auto get_head = [&](int64_t q) { return k * group + (first + q) % group; };
    const auto is_wanted = [&] {
      const auto is_set = [](uint8_t own) { return own != 0; };
      return wanted == nullptr || std::any_of(wanted + b * T + get_token(0),
                                              wanted + b * T + get_token(count - 1) + 1, is_set);
    };
    const auto finish = [&] {
      for (int64_t q = 0; q < count; ++q) {
        float *sums = whole.sums + q * width;
        E *to = out + ((b * T + get_token(q)) * N + get_head(q)) * H;
        for (int64_t h = 0; h < H; ++h) store(to[h], sums[h] / whole.totals[q]);
      }
    };
    // The weights of the newest positions, those in their block `part` of the text: a token's place
    // is the number of those before it that are seen with it. line: the block in that order.
    const auto weigh_newest = [&](int64_t part, const Found &found) {
      const int64_t before = past[b] % kBlockPositions, begin = part * kBlockPositions;
      const int64_t used = std::min(kBlockPositions, before + C - begin);
      const int64_t committed = part == 0 ? before : 0;
      for (int64_t q = 0; q < count; ++q) {
        const int64_t t = get_token(q), *place = positions + b * T;
        const uint8_t *mask = tree_mask + (b * T + t) * C;
        const float *from = scores + q * row;
        float *to = weights + q * row;
        std::copy_n(from, committed, line);
        std::fill(line + committed, line + round_up(used, kSums), kHidden);
        const int64_t unseen = find_first(b, t) - (past[b] - before);
        std::fill(line, line + std::max<int64_t>(0, std::min(committed, unseen)), kHidden);
        for (int64_t j = 0, at = before - begin; j < C; ++j)
          if (mask[j] && ++at > 0 && at <= used && (window <= 0 || place[j] > place[t] - window))
            line[at - 1] = from[before + j];
        weigh(line, round_up(used, kSums), found.tops[q], found.totals[q]);
        std::copy_n(line, committed, to);
        for (int64_t j = 0, at = before - begin; j < C; ++j)
          to[before + j] = mask[j] && ++at > 0 && at <= used ? line[at - 1] : 0.0f;
      }
    };
    // The same as run_part does, by lanes.
    const auto run_lanes = [&](int64_t part, const auto &find, const auto &take) {
      if constexpr (kByBands) {
        const Range range = ranges[b];
        const int64_t units = range.last + 1 - range.first, newest = past[b] % kBlockPositions;
        const E *keys = key_cache + (rows[b] * K + k) * head;
        const E *values = value_cache + (rows[b] * K + k) * head;
        const bool is_capped = how.cap > 0.0f || !(how.scale > 0.0f);
        const auto score_keys = [&](int64_t slot, int64_t num_keys, int64_t q, Ahead ahead, float *to) {
          score_lanes(keys + slot * H, num_keys, H, lanes.queries + q * lanes.query_words, by_amx,
                      ahead, lanes.keys, to);
          for (float *end = to + num_keys * kLanes; to < end && is_capped; to += kVector) {
            Floats x = load<Floats>(to) * how.scale;
            if (how.cap > 0.0f) x = how.cap * tanh_fast(x / how.cap);
            std::memcpy(to, &x, sizeof x);
          }
        };
        const auto get_seen = [&](int64_t t) { return &seen[(b * T + t) * (C + 1)]; };
        for (int64_t q = 0; q < count; q += kLanes)
          pair_queries(
              [&](int64_t lane) {
                const int64_t at = std::min(q + lane, count - 1);
                return qkv + (b * T + get_token(at)) * stride + get_head(at) * H;
              },
              H, lanes.queries + q * lanes.query_words);
        const int64_t last_block = range.first + units * (part + 1) / parts;
        for (int64_t block = range.first + units * part / parts; block < last_block; ++block) {
          const int64_t base = block * kBlockPositions;
          const bool is_tree = block == range.last && !range.is_chain;
          const int64_t length = is_tree ? newest : std::min(kBlockPositions, past[b] + C - base);
          // Positions of bands that are the same for all queries.
          const int64_t common =
              is_tree ? newest / kBandPositions * kBandPositions : round_up(length, kBandPositions);
          // While the first queries read keys, values are fetched; then the next block's keys.
          const int64_t lines = kBandPositions * H * 2 / kLine;  // of a band's
          const char *next = reinterpret_cast<const char *>(keys + (base + kBlockPositions) * H);
          const bool has_next = block + 1 < last_block;
          const auto pair_values = [&] {
            Ahead ahead{next + lines / 2 * kBandBlock * kLine, has_next ? lines / 2 : 0};
            for (int64_t p = 0; p < common; p += 2) {
              const E *low = values + (base + p) * H;
              if (p % kBandPositions == 0) ahead.fetch();
              pair_rows(p < length ? low : nullptr, p + 1 < length ? low + H : nullptr, H, width,
                        lanes.values + p / 2 * width);
            }
          };
          for (int64_t i = 0; i < (is_tree ? range.num_last : 1); ++i) {
            const Found found = find(block - range.first + i);
            const int64_t begin = i * kBlockPositions - newest;  // the first of the step's here
            const int64_t before = i == 0 ? length : 0, bands = i == 0 ? common / kBandPositions : 0;
            for (int64_t q = 0; q < count; q += kLanes) {
              const int64_t some = std::min(kLanes, count - q);
              const bool is_first = i == 0 && q == 0;
              const Ahead at_values{reinterpret_cast<const char *>(values + base * H),
                                    is_first ? lines * kKeys / kBandPositions : 0};
              if (before > 0) score_keys(base, before, q, at_values, lanes.scores);
              float unseen[kLanes], used[kLanes];
              int64_t most = before;
              for (int64_t lane = 0; lane < kLanes; ++lane) {
                const int64_t t = get_token(std::min(q + lane, count - 1));
                const int64_t from = window > 0 ? positions[b * T + t] - window + 1 - base : 0;
                const int64_t to = range.is_chain ? past[b] + t + 1 - base : before;
                unseen[lane] = static_cast<float>(std::min(std::max<int64_t>(from, 0), before));
                used[lane] = static_cast<float>(std::min(std::max<int64_t>(to, 0), before));
                if (is_tree)
                  most = std::max(most, std::min<int64_t>(kBlockPositions, get_seen(t)[C] - begin));
              }
              const int64_t places = round_up(most, kBandPositions);
              hide(unseen, used, places, lanes.scores);
              if (is_tree) {
                score_keys(past[b], C, q, Ahead{nullptr, 0}, lanes.newest);
                for (int64_t lane = 0; lane < some; ++lane) {
                  const int64_t t = get_token(q + lane), *place = positions + b * T;
                  const int32_t *slots = get_seen(t);
                  const int64_t end = std::min<int64_t>(slots[C], begin + kBlockPositions);
                  for (int64_t n = std::max<int64_t>(begin, 0); n < end; ++n)
                    if (window <= 0 || place[slots[n]] > place[t] - window)
                      lanes.scores[(n - begin) * kLanes + lane] = lanes.newest[slots[n] * kLanes + lane];
                }
              }
              float *sums = found.sums + q * width;
              weigh_lanes(lanes.scores, places, is_capped ? 1.0f : how.scale,
                          Ahead{next, is_first && has_next ? lines / 2 : 0}, lanes.weights,
                          found.tops + q, found.totals + q);
              if (is_first) pair_values();
              add_weighted(lanes.weights, 0, some, lanes.values, width, bands, by_amx, nullptr, sums);
              // What follows is each token's own, or that of several with the same.
              for (int64_t lane = 0, next = 0; is_tree && lane < some; lane = next) {
                const int32_t *slots = get_seen(get_token(q + lane));
                for (next = lane + 1; next < some; ++next)
                  if (!std::equal(slots, slots + C + 1, get_seen(get_token(q + next)))) break;
                const int64_t end = std::min<int64_t>(slots[C] - begin, kBlockPositions);
                const int64_t first_place = bands * kBandPositions;
                const auto find_value = [&](int64_t at) -> const E * {
                  if (at < before) return values + (base + at) * H;
                  return at < end ? values + (past[b] + slots[at + begin]) * H : nullptr;
                };
                uint32_t *to = lanes.own_values;
                for (int64_t at = first_place; at < round_up(end, kBandPositions); at += 2, to += width)
                  pair_rows(find_value(at), find_value(at + 1), H, width, to);
                add_weighted(lanes.weights + bands * kLaneWords, lane, next, lanes.own_values, width,
                             (to - lanes.own_values) / (kBand * width), by_amx, sums, lanes.sums);
                std::copy(lanes.sums + lane * width, lanes.sums + next * width, sums + lane * width);
              }
            }
            take(found);
          }
        }
      }
    };
    // Hands each block that a part of an item has to `take`.
    const auto run_part = [&](int64_t part, const auto &find, const auto &take) {
      if constexpr (kByBands) return run_lanes(part, find, take);
      const Range range = ranges[b];
      const int64_t units = range.last + 1 - range.first;
      const E *keys = key_cache + (rows[b] * K + k) * head;
      const E *values = value_cache + (rows[b] * K + k) * head;
      for (int64_t q = 0; q < count; ++q) {
        const E *query = qkv + (b * T + get_token(q)) * stride + get_head(q) * H;
        for (int64_t h = 0; h < H; ++h) queries[q * H + h] = to_float(query[h]) * how.scale;
      }
      const int64_t end = range.first + units * (part + 1) / parts;
      for (int64_t block = range.first + units * part / parts; block < end; ++block) {
        const int64_t base = block * kBlockPositions;
        const bool is_last = block == range.last;
        const int64_t length = is_last ? past[b] + C - base : kBlockPositions;
        score(queries, count, keys + base * H, length, H, how.cap, wide, scores, row);
        for (int64_t i = 0; i < (is_last ? range.num_last : 1); ++i) {
          const Found found = find(block - range.first + i);
          int64_t begin = 0;
          if (is_last) {
            begin = i > 0 ? past[b] - base : 0;
            weigh_newest(i, found);
          } else {
            for (int64_t q = 0; q < count; ++q) {
              float *line = scores + q * row;
              const int64_t unseen = find_first(b, get_token(q)) - base;
              if (unseen > 0) std::fill_n(line, std::min(unseen, kBlockPositions), kHidden);
              weigh(line, kBlockPositions, found.tops[q], found.totals[q]);
            }
          }
          add_values((is_last ? weights : scores) + begin, count, row, values + (base + begin) * H,
                     length - begin, H, wide, found.sums, width);
          take(found);
        }
      }
    };
    const auto find_kept = [&](int64_t item, int64_t block) {
      return Found(&kept[(item * most_blocks + block) * found_size], found_queries, width);
    };
    if (parts == 1) {
      member.share(items, [&](int64_t item) {
        set_item(item);
        if (!is_wanted()) return;
        whole.clear(count);
        run_part(
            0, [&](int64_t) { return block_found; },
            [&](const Found &found) { whole.add(found, count); });
        finish();
      });
    } else {
      member.share(items * parts, [&](int64_t at) {
        set_item(at / parts);
        if (!is_wanted()) return;
        run_part(
            at % parts, [&](int64_t block) { return find_kept(at / parts, block); },
            [](const Found &) {});
      });
      member.meet();
      member.share(items, [&](int64_t item) {
        set_item(item);
        if (!is_wanted()) return;
        whole.clear(count);
        for (int64_t i = 0; i < ranges[b].count(); ++i) whole.add(find_kept(item, i), count);
        finish();
      });
    }
  });
}

// Where a matrix is fetched ahead of its use: two lines from `from` on, at each step `stride` bytes
// further; to the second cache alone if it is far. A line that is fetched twice costs next to nothing.
template <bool kIsFar>
struct Fetch {
  const char *from;
  int64_t stride;

  // What a step holds, or as many of a tile's scales.
  static void fetch(const char *from) {
    for (int64_t at = 0; at < kStepBytes; at += kLine) __builtin_prefetch(from + at, 0, kIsFar ? 2 : 3);
  }
};

// Two kinds of packed matrices follow. Each tells its number of steps, where its tiles are and how
// many bytes of one come before its first step; how many inputs a row takes when it is packed; packs
// rows; and multiplies with them.

// Of numbers of type E, as all else is.
template <typename E>
struct FloatMatrix {
  typedef typename Packing<E>::Input Input;
  static constexpr bool kHasBands = kSumsBands && std::is_same<E, bf16>::value;
  static constexpr int kMostRows = kHasBands ? kMaxRows / 2 : kMaxRows;
  static constexpr int64_t header = 0;
  const char *tiles;
  int64_t depth, steps, tile_bytes, row;

  FloatMatrix(const E *packed, int64_t depth)
      : tiles(reinterpret_cast<const char *>(packed)),
        depth(depth),
        steps(count_steps<E>(depth)),
        tile_bytes(steps * kStepBytes),
        row(steps * Packing<E>::kInputs) {}

  // Inputs of the steps from `begin` to `end` over the depth: [kInputs][rows] each of X
  // [rows, depth], zeros beyond the depth.
  template <typename X>
  void pack(const X *x, int64_t rows, int64_t begin, int64_t end, float *to) const {
    constexpr int64_t kInputs = Packing<E>::kInputs;
    const int64_t first = begin * kInputs, last = end * kInputs, used = std::min(last, depth);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t at = first; at < used; ++at) {
        const float input = to_float(x[m * depth + at]);
        to[at * rows + m] = kHasBands ? round_through<E>(input) : input;
      }
    if (used < last) std::fill(to + used * rows, to + last * rows, 0.0f);
  }

  template <typename X>
  void pack(const X *x, int64_t rows, int64_t begin, int64_t end, uint32_t *to) const {
    const auto round = [](X input) -> uint32_t {
      if constexpr (std::is_same<X, bf16>::value) return input.bits;
      bf16 rounded;
      store(rounded, to_float(input));
      return rounded.bits;
    };
    const int64_t whole = std::min(end, depth / 2);
    for (int64_t m = 0; m < rows; ++m) {
      const X *row = x + m * depth;
      for (int64_t step = begin; step < whole; ++step)
        to[step * rows + m] = round(row[2 * step]) | round(row[2 * step + 1]) << 16;
      if (whole < end) to[whole * rows + m] = round(row[2 * whole]);
    }
  }

  // Adds the products of M rows of packed inputs with G tiles that follow each other, over the steps
  // from `begin` to `end`, to sums [M, G * kTile], which begin at zero. Not inlined, since compilers
  // keep fewer of the sums in registers where the callers' variables want some.
  template <int M, int G, bool kIsFar>
  __attribute__((noinline)) void add(const Input *x, int64_t begin, int64_t end, const char *tile,
                                     Fetch<kIsFar> fetch, float *out) const {
    if constexpr (kHasBands) return add_bands<M, G>(x, begin, end, tile, fetch, out);
    Floats sums[G][kWords][M] = {};
    if (begin > 0)
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
          for (int64_t k = 0; k < kWords; ++k)
            std::memcpy(&sums[g][k][m], out + (m * G + g) * kTile + k * kVector, sizeof(Floats));
    for (int64_t step = begin; step < end; ++step)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const char *ahead = fetch.from + (step - begin) * fetch.stride + g * tile_bytes;
        fetch.fetch(ahead);
        add_products<M>(sums[g],
                        reinterpret_cast<const E *>(tile + g * tile_bytes + step * kStepBytes),
                        x + step * Packing<E>::kInputs * M);
      }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int64_t k = 0; k < kWords; ++k)
          std::memcpy(out + (m * G + g) * kTile + k * kVector, &sums[g][k][m], sizeof(Floats));
  }

  // The same as AMX sums; `begin` is where a band begins.
  template <int M, int G, bool kIsFar>
  void add_bands(const float *x, int64_t begin, int64_t end, const char *tile, Fetch<kIsFar> fetch,
                 float *out) const {
    if (begin == 0) std::fill(out, out + M * G * kTile, 0.0f);
    const Flushing flushing;
    for (int64_t step = begin; step < end;) {
      Floats even[G][kWords][M] = {}, odd[G][kWords][M] = {};
      for (const int64_t stop = std::min(step + kBand, end); step < stop; ++step)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          const char *ahead = fetch.from + (step - begin) * fetch.stride + g * tile_bytes;
          fetch.fetch(ahead);
          const char *from = tile + g * tile_bytes + step * kStepBytes;
          Floats low[kWords], high[kWords];
          for (int64_t k = 0; k < kWords; ++k) {
            const Words w = load<Words>(from + k * 4 * kVector);
            low[k] = widen_low(w);
            high[k] = widen_high(w);
          }
          add_outer<M>(even[g], low, x + 2 * step * M);
          add_outer<M>(odd[g], high, x + (2 * step + 1) * M);
        }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int64_t k = 0; k < kWords; ++k)
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) {
            float *to = out + (m * G + g) * kTile + k * kVector;
            const Floats sum = load<Floats>(to) + (even[g][k][m] + odd[g][k][m]);
            std::memcpy(to, &sum, sizeof sum);
          }
    }
  }
};

// Matrices of integers: weight[n, i] = scale[n, g] * (code[n, i] - zero[n, g]) with codes of 4 bits
// from 0 to 15 or of 8 bits from 1 to 255, where g is the input's group of `group` inputs, or the
// same for a whole row. What they are multiplied with are not the inputs but these, rounded, which
// is part of what such a matrix means: of each group of a row's inputs the largest magnitude becomes
// 127 and the others the nearest of the integers, ties to even. Sums over a group are of integers and
// exact, in whatever form a processor takes them; each is scaled by the inputs' scale, then by the
// weight's, and added to the float32 sum of the groups before it.

// How a packed one begins; what it has of input scales [depth] and of the order of inputs [depth]
// follows, then the tiles: each its scales [kTile] by groups, as many zeros if it has any, its steps.
struct Integers {
  int64_t N, depth, bits, group, has_row_scales, has_zeros, has_input_scales, has_order;
};

// A processor's form: kParts vectors are unpacked out of every one that is stored. Where it sums four
// products of bytes at once, inputs are bytes, else pairs of 16 bits. Where it sums two products of bytes
// in 16 bits, an unsigned one with a signed one, inputs of 4-bit codes are bytes too: two products are
// 2 * 15 * 127 at most, so those of kShortSteps steps, 8 times as much, fit before they must be widened.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_DOTPROD)
constexpr bool kMultipliesBytes = true, kSumsShorts = false;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool kMultipliesBytes = false, kSumsShorts = true;
#else
constexpr bool kMultipliesBytes = false, kSumsShorts = false;
#endif
constexpr int64_t kShortSteps = 4;
// Bytes from 1 to 255 mean integers from -127 to 127, except where bytes are taken for signed ones.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kByteZero = 0;
#else
constexpr int kByteZero = 128;
#endif

typedef int32_t Ints __attribute__((vector_size(4 * kVector)));
typedef uint16_t Shorts __attribute__((vector_size(4 * kVector)));

// sums + the products of each lane's bytes, or its 16-bit numbers, with those of x, the signed ones.
inline Ints add_parts(Ints sums, Words w, Words x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x);
#elif defined(__AVX512BW__)
  return pin(sums + (Ints)_mm512_madd_epi16((__m512i)w, (__m512i)x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return pin(sums + (Ints)_mm256_madd_epi16((__m256i)w, (__m256i)x));
#elif defined(__SSE2__) && !defined(__AVX512F__)
  return pin(sums + (Ints)_mm_madd_epi16((__m128i)w, (__m128i)x));
#else
  const Ints low = (Ints)(x << 16) >> 16, high = (Ints)x >> 16;
  return sums + (Ints)(w & 0xffffu) * low + (Ints)(w >> 16) * high;
#endif
}

// The same in sums of 16 bits, each of two bytes' products.
inline Words add_shorts(Words sums, Words w, Words x) {
#if defined(__AVX512BW__)
  const __m512i products = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
  return pin((Words)_mm512_add_epi16((__m512i)sums, products));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i products = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
  return pin((Words)_mm256_add_epi16((__m256i)sums, products));
#else
  static_assert(!kSumsShorts, "of which there are none");
  return (void)w, (void)x, sums;
#endif
}

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// The nearest integers, ties to even.
inline Ints round_to_ints(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (Ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
  return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
  Ints rounded;
  for (int64_t j = 0; j < kVector; ++j) rounded[j] = static_cast<int32_t>(std::nearbyint(x[j]));
  return rounded;
#endif
}

constexpr int64_t kMaxGroup = 128;
constexpr int kLargest = 127;
constexpr float kSmallest = 1e-30f;  // a group of smaller inputs is zeros: 127 times as much fits

// Up to kMaxGroup inputs as bytes, zeros beyond `count`; returns their scale: one byte is so much.
// Where an input is not finite, neither is the scale.
inline float round_group(float *x, int64_t count, int8_t *bytes) {
  for (int64_t i = count; i < kMaxGroup; ++i) x[i] = 0.0f;
  Words top{};
  for (int64_t i = 0; i < kMaxGroup; i += kVector) {
    const Words magnitude = load<Words>(x + i) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  uint32_t most = 0;
  for (int64_t j = 0; j < kVector; ++j) most = std::max<uint32_t>(most, top[j]);
  const float largest = as_float(most);
  const bool is_finite = most < 0x7f800000u;
  const float factor = is_finite && largest >= kSmallest ? kLargest / largest : 0.0f;
  for (int64_t i = 0; i < kMaxGroup; i += kVector) {
    typedef int8_t Bytes __attribute__((vector_size(kVector)));
    const Ints rounded = round_to_ints(load<Floats>(x + i) * factor);
    const Bytes narrow = __builtin_convertvector(rounded, Bytes);
    std::memcpy(bytes + i, &narrow, sizeof narrow);
  }
  if (!is_finite) {
    std::memset(bytes, 0, kMaxGroup);
    return as_float(0x7fc00000u);
  }
  return largest >= kSmallest ? largest / kLargest : 0.0f;
}

inline int32_t add_bytes(const int8_t *bytes) {
  int32_t sum = 0;
  for (int64_t i = 0; i < kMaxGroup; ++i) sum += bytes[i];
  return sum;
}

template <int kBits>
struct IntegerMatrix {
  typedef uint32_t Input;
  static constexpr int kMostRows = kMaxRows;
  static constexpr int64_t kElements = 32 / kBits;  // inputs of a step, of each output
  static constexpr bool kHasShorts = kSumsShorts && kBits == 4;
  static constexpr bool kHasBytes = kMultipliesBytes || kHasShorts;
  static constexpr int kParts = (kHasBytes ? 8 : 16) / kBits;
  static constexpr int64_t kHead = 3;  // inputs that each group of a row begins with
  const float *input_scales = nullptr;
  const int32_t *order = nullptr;
  const char *tiles;
  int64_t depth, group_steps, groups, steps, scale_stride, scales_bytes;
  int64_t header, tile_bytes, group_row, row;
  bool has_zeros;

  explicit IntegerMatrix(const Integers *packed)
      : depth(packed->depth),
        group_steps(packed->group / kElements),
        groups((depth + packed->group - 1) / packed->group),
        steps((depth + kElements - 1) / kElements),
        has_zeros(packed->has_zeros) {
    const int64_t listed = packed->has_row_scales ? 1 : groups;
    const int64_t list_bytes = round_up(depth * 4, kLine);
    scale_stride = packed->has_row_scales ? 0 : kTile;
    scales_bytes = listed * kTile * 4;
    header = scales_bytes * (has_zeros ? 2 : 1);
    tile_bytes = header + steps * kStepBytes;
    group_row = kHead + group_steps * kParts;
    row = groups * group_row;
    const char *at = reinterpret_cast<const char *>(packed + 1);
    if (packed->has_input_scales) {
      input_scales = reinterpret_cast<const float *>(at);
      at += list_bytes;
    }
    if (packed->has_order) {
      order = reinterpret_cast<const int32_t *>(at);
      at += list_bytes;
    }
    tiles = at;
  }

  // Which vectors of bytes or pairs there are in a stored one. Byte b of a lane holds input b of its
  // step, with 4 bits also input b + 4 in the upper half; a pair is of inputs two apart.
  static Words unpack(Words w, int part) {
    if constexpr (kHasBytes)
      return kBits == 8 ? w : w >> 4 * part & 0x0f0f0f0fu;
    else if (kBits == 8 && part == 1)
      return (Words)((Shorts)w >> 8);  // one instruction, where a shift of words takes a mask too
    else
      return w >> kBits * part & (kBits == 8 ? 0x00ff00ffu : 0x000f000fu);
  }

  static uint32_t pack_part(const int8_t *step, int part) {
    if constexpr (kHasBytes) {
      uint32_t word;
      std::memcpy(&word, step + 4 * part, sizeof word);
      return word;
    } else {
      const int first = kBits == 8 ? part : part / 2 + part % 2 * 4;
      return static_cast<uint16_t>(step[first]) | static_cast<uint32_t>(step[first + 2]) << 16;
    }
  }

  // Group g of a row's inputs as kMaxGroup bytes, zeros beyond it; returns their scale.
  template <typename X>
  float round(const X *row, int64_t g, int8_t *bytes) const {
    const int64_t group = group_steps * kElements, first = g * group;
    const int64_t count = std::min(group, depth - first);
    float numbers[kMaxGroup];
    if (order == nullptr && input_scales == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) numbers[i] = to_float(row[first + i]);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t which = order == nullptr ? first + i : order[first + i];
        const float scale = input_scales == nullptr ? 1.0f : input_scales[which];
        numbers[i] = to_float(row[which]) * scale;
      }
    }
    return round_group(numbers, count, bytes);
  }

  // What a group's sum begins with where zeros are the usual, for inputs of this sum.
  static int32_t begin_sum(int32_t sum) { return -(kBits == 4 ? 8 : kByteZero) * sum; }

  // Of every group of every row its scale, what its sum begins with, the sum of its inputs, and
  // these: each [rows].
  template <typename X>
  void pack(const X *x, int64_t rows, int64_t begin, int64_t end, uint32_t *to) const {
    for (int64_t g = begin / group_steps; g * group_steps < end; ++g) {
      uint32_t *start = to + g * group_row * rows;
      for (int64_t m = 0; m < rows; ++m) {
        int8_t bytes[kMaxGroup];
        start[m] = as_bits(round(x + m * depth, g, bytes));
        const int32_t sum = add_bytes(bytes);
        start[rows + m] = static_cast<uint32_t>(begin_sum(sum));
        start[2 * rows + m] = static_cast<uint32_t>(-sum);
        uint32_t *words = start + kHead * rows + m;
        for (int64_t step = 0; step < group_steps; ++step)
          for (int part = 0; part < kParts; ++part, words += rows)
            *words = pack_part(bytes + step * kElements, part);
      }
    }
  }

  // As of FloatMatrix; `begin` is where a group begins.
  template <int M, int G, bool kIsFar>
  void add(const Input *x, int64_t begin, int64_t end, const char *tile, Fetch<kIsFar> fetch,
           float *out) const {
    if (begin == 0) std::fill(out, out + M * G * kTile, 0.0f);
    for (int64_t step = begin; step < end;) {
      const int64_t group = step / group_steps, stop = std::min(step + group_steps, end);
      const uint32_t *head = x + group * group_row * M, *words = head + kHead * M;
      const char *scales = tile + group * scale_stride * 4;
      Ints sums[G][kWords][M];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const char *ahead = scales + g * tile_bytes + 4 * scale_stride;  // of the next group
        fetch.fetch(ahead);
#pragma GCC unroll 2
        for (int64_t k = 0; k < kWords; ++k)
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m)
            sums[g][k][m] =
                has_zeros ? load<Ints>(scales + scales_bytes + g * tile_bytes + k * 4 * kVector) *
                                static_cast<int32_t>(head[2 * M + m])
                          : static_cast<int32_t>(head[M + m]) - Ints{};
      }
      for (int64_t pause; step < stop; words += (pause - step) * kParts * M, step = pause) {
        pause = kHasShorts ? std::min(step + kShortSteps, stop) : step + 1;
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          Words shorts[kWords][M] = {};
          const uint32_t *x_step = words;
          const char *ahead = fetch.from + (step - begin) * fetch.stride + g * tile_bytes;
          const char *from = tile + g * tile_bytes + header + step * kStepBytes;
          const char *last = from + (pause - step) * kStepBytes;
          for (; from < last; from += kStepBytes, ahead += fetch.stride, x_step += kParts * M) {
            fetch.fetch(ahead);
            Words w[kWords];
            for (int64_t k = 0; k < kWords; ++k) w[k] = load<Words>(from + k * 4 * kVector);
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
              Words parts[kWords];
              for (int64_t k = 0; k < kWords; ++k) parts[k] = unpack(w[k], part);
#pragma GCC unroll 12
              for (int m = 0; m < M; ++m) {
                const Words inputs = spread<Words>(x_step[part * M + m]);
#pragma GCC unroll 2
                for (int64_t k = 0; k < kWords; ++k)
                  if constexpr (kHasShorts)
                    shorts[k][m] = add_shorts(shorts[k][m], parts[k], inputs);
                  else
                    sums[g][k][m] = add_parts(sums[g][k][m], parts[k], inputs);
              }
            }
          }
          if constexpr (kHasShorts)
#pragma GCC unroll 2
            for (int64_t k = 0; k < kWords; ++k)
#pragma GCC unroll 12
              for (int m = 0; m < M; ++m)
                sums[g][k][m] = add_parts(sums[g][k][m], shorts[k][m], Words{} + 0x00010001u);
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int64_t k = 0; k < kWords; ++k) {
          const Floats scale = load<Floats>(scales + g * tile_bytes + k * 4 * kVector);
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) {
            float *to = out + (m * G + g) * kTile + k * kVector;
            const Floats scaled = to_floats(sums[g][k][m]) * as_float(head[m]);
            const Floats sum = mul_add(scaled, scale, load<Floats>(to));
            std::memcpy(to, &sum, sizeof sum);
          }
        }
    }
  }
};

// With few rows several tiles are multiplied at once: more sums that do not wait for each other.
constexpr int kWideTiles = 4;

template <typename Matrix>
constexpr int count_wide(int rows) {
  return rows == 1 ? kWideTiles : 2 * rows < Matrix::kMostRows ? kWideTiles / 2 : 1;
}

template <typename Matrix, bool kIsFar>
void add_tiles(const Matrix &w, int64_t rows, bool is_wide, const typename Matrix::Input *x,
               int64_t begin, int64_t end, const char *tile, Fetch<kIsFar> fetch, float *out) {
  switch (rows) {
#define SPECDEC_ROWS(M)                                                     \
  case M:                                                                   \
    if constexpr (M <= Matrix::kMostRows) {                                 \
      constexpr int kWide = count_wide<Matrix>(M);                          \
      if (is_wide)                                                          \
        w.template add<M, kWide>(x, begin, end, tile, fetch, out);          \
      else                                                                  \
        w.template add<M, 1>(x, begin, end, tile, fetch, out);              \
    }                                                                       \
    break;
    SPECDEC_ROWS(1) SPECDEC_ROWS(2) SPECDEC_ROWS(3) SPECDEC_ROWS(4) SPECDEC_ROWS(5)
    SPECDEC_ROWS(6) SPECDEC_ROWS(7) SPECDEC_ROWS(8) SPECDEC_ROWS(9) SPECDEC_ROWS(10)
    SPECDEC_ROWS(11) SPECDEC_ROWS(12)
#undef SPECDEC_ROWS
  }
}

// Rows [M] in `blocks` parts, as even as can be.
struct Blocks {
  int64_t rows, count;
  int64_t begin(int64_t block) const { return rows * block / count; }
  int64_t size(int64_t block) const { return begin(block + 1) - begin(block); }
};

// Sums [rows, width] of the outputs from `output` on, `used` of them, plus bias go to y [rows, N].
template <typename B, typename O>
inline void put_sums(const float *sums, int64_t rows, int64_t width, const B *bias, int64_t output,
                     int64_t used, int64_t N, O *y) {
  const auto put = [&](int64_t m, int64_t first, int64_t count) {
    O *to = y + m * N + output + first;
    const float *from = sums + m * width + first;
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) store(to[j], from[j]);
    } else {
      const B *add = bias + output + first;
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) store(to[j], from[j] + to_float(add[j]));
    }
  };
  for (int64_t m = 0; m < rows; ++m) {
    int64_t first = 0;
    for (; first + kTile <= used; first += kTile) put(m, first, kTile);  // a constant for the compiler
    put(m, first, used - first);
  }
}

// y = x W^T + bias for the tiles from `begin` to `end` and rows of one block, which read each tile once.
template <typename Matrix, typename B, typename O>
void multiply_block(const Matrix &w, int64_t rows, const typename Matrix::Input *x, const B *bias,
                    int64_t begin, int64_t end, int64_t N, O *y) {
  const int64_t wide = count_wide<Matrix>(static_cast<int>(rows));
  float sums[kWideTiles * kMaxRows * kTile];
  for (int64_t t = begin; t < end;) {
    const int64_t count = t + wide <= end ? wide : 1, width = count * kTile, output = t * kTile;
    const char *tile = w.tiles + t * w.tile_bytes;
    const Fetch<kFetchesFar> fetch{tile + w.header + kPrefetchBytes, kStepBytes};
    add_tiles(w, rows, count > 1, x, 0, w.steps, tile, fetch, sums);
    put_sums(sums, rows, width, bias, output, std::min(width, N - output), N, y);
    t += count;
  }
}

// The same for several blocks. They take turns at every kTurn steps of a tile, and each fetches its part
// of what the next turn reads: so memory is read all the time.
template <typename Matrix, typename B, typename O>
void multiply_blocks(const Matrix &w, Blocks blocks, const typename Matrix::Input *x, const B *bias,
                     int64_t begin, int64_t end, int64_t N, O *y) {
  static thread_local std::vector<float> sums;
  sums.resize(blocks.rows * kTile);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t output = t * kTile;
    const char *tile = w.tiles + t * w.tile_bytes;
    for (int64_t step = 0, stop = 0; step < w.steps; step = stop) {
      stop = std::min(step + kTurn, w.steps);
      const char *next = tile + (stop < w.steps ? w.header + stop * kStepBytes : w.tile_bytes);
      for (int64_t b = 0; b < blocks.count; ++b) {
        const Fetch<false> fetch{next + kTurn * kStepBytes * b / blocks.count, kStepBytes / blocks.count};
        add_tiles(w, blocks.size(b), false, x + blocks.begin(b) * w.row, step, stop, tile, fetch,
                  sums.data() + blocks.begin(b) * kTile);
      }
    }
    put_sums(sums.data(), blocks.rows, kTile, bias, output, std::min(kTile, N - output), N, y);
  }
}

// y[M][N] = x[M][depth] W^T + bias.
template <typename Matrix, typename X, typename B, typename O>
void multiply_matrix(const X *x, int64_t M, const Matrix &w, const B *bias, int64_t N, O *y) {
  typedef typename Matrix::Input Input;
  const int64_t tiles = (N + kTile - 1) / kTile, depth = w.depth, steps = w.steps, row = w.row;
  const Blocks blocks{M, (M + Matrix::kMostRows - 1) / Matrix::kMostRows};
  static thread_local std::vector<Input> scratch;
  scratch.resize(M * row);
  Input *inputs = scratch.data();
  in_threads(M * N * depth > kParallelWork, [&](const Member &member) {
    member.share((steps + kTurn - 1) / kTurn, [&](int64_t turn) {
      const int64_t step = turn * kTurn;
      for (int64_t b = 0; b < blocks.count; ++b)
        w.pack(x + blocks.begin(b) * depth, blocks.size(b), step, std::min(step + kTurn, steps),
               inputs + blocks.begin(b) * row);
    });
    member.offer(tiles);
    member.meet();
    member.work(tiles, kWideTiles, [&](int64_t begin, int64_t end) {
      if (blocks.count > 1)
        multiply_blocks(w, blocks, inputs, bias, begin, end, N, y);
      else
        multiply_block(w, M, inputs, bias, begin, end, N, y);
    });
  });
}

#if SPECDEC_AMX
// Inputs of up to kFewBytes stay in the second cache. While up to kFewBlocks are multiplied, kFewBands of a
// tile stay in the nearest; more blocks take kFewLongBands, in the second. More inputs take kManyTiles
// together, by so few bands that the inputs of two blocks stay in the nearest cache for all of these. Three
// blocks fetch from further ahead. So many tiles' outputs are put at a time: a row of them is another page
// of memory.
constexpr int64_t kFewBytes = 1400000, kFewBlocks = 8, kFewBands = 4, kFewLongBands = 64;
constexpr int64_t kManyTiles = 8, kManyBands = 8, kThreeAhead = 4096, kPutTiles = 8, kPackBands = 16;
// From here on a matrix is read from memory, for one row a little faster by plain code.
constexpr int64_t kCachedNumbers = 1 << 20;

// Bands `begin` to `end` of tiles of tile_bytes that follow each other; of these bands `whole` ones
// are whole, and the one after them is in `rest`, filled up with zeros.
struct Bands {
  const char *tile, *rest;
  int64_t tile_bytes, whole, begin, end;
};

// What is fetched for each band where it does not stream: four times so many lines.
struct BandsAhead {
  const char *at;
  int64_t lines;
};

// Adds the products of kX blocks of `rows` rows with kW tiles, of which one is 1, to sums
// [kX * rows, kW * kTile], which begin at zero. x: all bands of the first block, x_bytes before the
// next one's. What lies `ahead` is fetched meanwhile, a part between two products (many at once keep these
// waiting): a whole band for each where it streams, with more blocks than one into the second cache, as they
// keep the way into the nearest busy. A function of its own: what a processor fetches by itself depends on
// where the loop's instructions lie.
template <int kX, int kW, bool kStreams>
__attribute__((noinline)) void add_amx(const char *x, int64_t x_bytes, int64_t rows, const Bands &w,
                                       BandsAhead ahead, float *sums) {
  constexpr int64_t kWidth = kW * kTile * 4;  // bytes of a row of sums
  char *to = reinterpret_cast<char *>(sums), *more = kW == 1 ? to + rows * kWidth : to + 2 * kLine;
  char *last = more + rows * kWidth;  // of three blocks
  if (w.begin == 0) {
    clear_register<0>();
    clear_register<1>();
    if constexpr (kX * kW >= 2) {
      clear_register<2>();
      clear_register<3>();
    }
    if constexpr (kX == 3) {
      clear_register<4>();
      clear_register<5>();
    }
  } else {
    load_register<0>(to, kWidth);
    load_register<1>(to + kLine, kWidth);
    if constexpr (kX * kW >= 2) {
      load_register<2>(more, kWidth);
      load_register<3>(more + kLine, kWidth);
    }
    if constexpr (kX == 3) {
      load_register<4>(last, kWidth);
      load_register<5>(last + kLine, kWidth);
    }
  }
  for (int64_t band = w.begin; band < w.end; ++band) {
    const bool is_whole = band < w.whole;
    const char *from = is_whole ? w.tile + band * kBandBytes : w.rest;
    const char *inputs = x + band * rows * kLine;
    const auto fetch = [&](int64_t begin, int64_t end) {  // of a band's 32 lines
      if constexpr (kStreams) {
#pragma GCC unroll 32
        for (int64_t line = begin; line < end; ++line)
#pragma GCC unroll 2
          for (int64_t g = 0; g < kW; ++g)
            __builtin_prefetch(ahead.at + g * w.tile_bytes + line * kLine, 0, kX > 1 ? 2 : 3);
      } else {
        for (int64_t line = 0; line < ahead.lines; ++line, ahead.at += kLine)
          __builtin_prefetch(ahead.at, 0, 2);
      }
    };
    if constexpr (kX == 3) {
      fetch(0, 8);
      load_register<7>(inputs, kLine);
      load_register<6>(from, kStepBytes);
      multiply_registers<0, 7, 6>();
      fetch(8, 16);
      load_register<7>(inputs + x_bytes, kLine);
      multiply_registers<2, 7, 6>();
      fetch(16, 24);
      load_register<7>(inputs + 2 * x_bytes, kLine);
      multiply_registers<4, 7, 6>();
      fetch(24, 32);
      load_register<6>(from + kLine, kStepBytes);
      multiply_registers<5, 7, 6>();
      load_register<7>(inputs + x_bytes, kLine);
      multiply_registers<3, 7, 6>();
      load_register<7>(inputs, kLine);
      multiply_registers<1, 7, 6>();
    } else if constexpr (kX == 2) {
      fetch(0, 8);
      load_register<4>(inputs, kLine);
      load_register<6>(from, kStepBytes);
      multiply_registers<0, 4, 6>();
      fetch(8, 16);
      load_register<5>(inputs + x_bytes, kLine);
      multiply_registers<2, 5, 6>();
      fetch(16, 24);
      load_register<6>(from + kLine, kStepBytes);
      multiply_registers<1, 4, 6>();
      fetch(24, 32);
      multiply_registers<3, 5, 6>();
    } else {
      fetch(0, 8);
      load_register<4>(inputs, kLine);
      load_register<6>(from, kStepBytes);
      multiply_registers<0, 4, 6>();
      fetch(8, 16);
      load_register<6>(from + kLine, kStepBytes);
      multiply_registers<1, 4, 6>();
      fetch(16, 24);
      if constexpr (kW == 2) {
        from += is_whole ? w.tile_bytes : kBandBytes;
        load_register<6>(from, kStepBytes);
        multiply_registers<2, 4, 6>();
      }
      fetch(24, 32);
      if constexpr (kW == 2) {
        load_register<6>(from + kLine, kStepBytes);
        multiply_registers<3, 4, 6>();
      }
    }
    if constexpr (kStreams) ahead.at += kBandBytes;
  }
  store_register<0>(to, kWidth);
  store_register<1>(to + kLine, kWidth);
  if constexpr (kX * kW >= 2) {
    store_register<2>(more, kWidth);
    store_register<3>(more + kLine, kWidth);
  }
  if constexpr (kX == 3) {
    store_register<4>(last, kWidth);
    store_register<5>(last + kLine, kWidth);
  }
}

// y[M][N] = x[M][depth] W^T + bias by AMX. Rows go by blocks of up to kAmxRows, all of one size, the
// last filled up with zeros. One block takes two tiles at a time; more are taken by groups of two, the
// last of an odd number by three. With few inputs the first group alone reads a tile from memory, what it
// fetches near ahead; with many, all groups together fetch what comes next.
template <typename X, typename B, typename O>
void multiply_amx(const X *x, int64_t M, int64_t depth, const bf16 *packed, const B *bias,
                  int64_t N, O *y) {
  struct Line {
    alignas(kLine) bf16 numbers[2 * kBand];
  };
  if (M == 0) return;
  const int64_t steps = count_steps<bf16>(depth), bands = (steps + kBand - 1) / kBand;
  const int64_t blocks = (M + kAmxRows - 1) / kAmxRows, rows = (M + blocks - 1) / blocks;
  const int64_t tiles = (N + kTile - 1) / kTile, tile_bytes = steps * kStepBytes;
  const int64_t groups = std::max<int64_t>(blocks / 2, 1), x_bytes = bands * rows * kLine;
  const bool is_alone = blocks == 1, is_only = groups == 1;
  const bool is_few = is_only || blocks * x_bytes <= kFewBytes;
  const int64_t together = is_alone ? 2 : is_few ? 1 : kManyTiles;
  const int64_t few_bands = is_only ? bands : blocks <= kFewBlocks ? kFewBands : kFewLongBands;
  const int64_t stretch = is_few ? few_bands : kManyBands;
  const int64_t near = blocks == 3 ? kThreeAhead : kPrefetchBytes;
  static thread_local std::vector<Line> scratch;
  if (static_cast<int64_t>(scratch.size()) < blocks * bands * rows) scratch.resize(blocks * bands * rows);
  Line *inputs = scratch.data();
  in_threads(M * N * depth > kParallelWork, [&](const Member &member) {
    const int64_t parts = (bands + kPackBands - 1) / kPackBands;
    member.share(blocks * parts, [&](int64_t part) {
      const int64_t block = part / parts, start = part % parts * kPackBands;
      Line *to = inputs + (block * bands + start) * rows;
      for (int64_t band = start; band < std::min(start + kPackBands, bands); ++band)
        for (int64_t m = block * rows; m < (block + 1) * rows; ++m, ++to) {
          const int64_t begin = band * 2 * kBand, used = m < M ? std::min(2 * kBand, depth - begin) : 0;
          const X *from = x + m * depth + begin;
          if constexpr (std::is_same<X, bf16>::value)
            if (used == 2 * kBand) {
              std::memcpy(to->numbers, from, sizeof to->numbers);
              continue;
            }
          *to = Line{};
          for (int64_t i = 0; i < used; ++i) store(to->numbers[i], to_float(from[i]));
        }
    });
    member.offer(tiles);
    member.meet();
    const Registers registers(rows, kBand, true);
    Line rest[kManyTiles * kBandBytes / kLine] = {};
    static thread_local std::vector<Line> sums_memory;
    const int64_t sums_size = blocks * rows * kTile;  // of a tile
    const int64_t kept = is_only ? together : std::max(together, kPutTiles);
    const int64_t sums_lines = kept * sums_size * static_cast<int64_t>(sizeof(float)) / kLine;
    if (static_cast<int64_t>(sums_memory.size()) < sums_lines) sums_memory.resize(sums_lines);
    float *sums = reinterpret_cast<float *>(sums_memory.data());
    const char *first = reinterpret_cast<const char *>(packed);
    member.work(tiles, kept, [&](int64_t begin, int64_t last) {
      for (int64_t t = begin; t < last; t += together) {
        const int64_t count = std::min(together, last - t), at = (t - begin) % kept;
        const char *tile = first + t * tile_bytes;
        Bands w{tile, reinterpret_cast<const char *>(rest), tile_bytes, steps / kBand, 0, 0};
        if (w.whole < bands)
          for (int64_t g = 0; g < count; ++g)
            std::memcpy(&rest[g * kBandBytes / kLine], w.tile + g * tile_bytes + w.whole * kBandBytes,
                        tile_bytes - w.whole * kBandBytes);
        for (; w.begin < bands; w.begin = w.end) {
          w.end = std::min(w.begin + stretch, bands);
          // With many: what follows of these tiles, else of those after them.
          const bool is_end = w.end == bands;
          const int64_t next = is_few ? w.begin * kBandBytes + near
                                      : is_end ? together * tile_bytes : w.end * kBandBytes;
          const int64_t following = std::min(stretch, is_end ? bands : bands - w.end);
          const int64_t own_bands = w.end - w.begin, all_bands = groups * own_bands;
          const int64_t lines =
              is_few ? 0 : (following * (kBandBytes / kLine / 4) + all_bands - 1) / all_bands;
          int64_t fetched = 0, some = 0;
          for (int64_t block = 0; block < blocks; block += some) {
            some = is_alone ? 1 : blocks - block == 3 ? 3 : 2;
            const char *from = reinterpret_cast<const char *>(inputs) + block * x_bytes;
            const bool streams = is_few && block == 0;
            for (int64_t g = 0; g < count; g += together == 2 ? 2 : 1) {
              Bands own = w;
              own.tile += g * tile_bytes;
              own.rest += g * kBandBytes;
              const BandsAhead ahead{own.tile + next + fetched, fetched < following * kBandBytes ? lines : 0};
              float *to = sums + (at + g) * sums_size + block * rows * kTile;
              if (is_alone && count == 2)
                add_amx<1, 2, true>(from, x_bytes, rows, own, ahead, to);
              else if (is_alone)
                add_amx<1, 1, true>(from, x_bytes, rows, own, ahead, to);
              else if (streams && some == 3)
                add_amx<3, 1, true>(from, x_bytes, rows, own, ahead, to);
              else if (streams)
                add_amx<2, 1, true>(from, x_bytes, rows, own, ahead, to);
              else if (some == 3)
                add_amx<3, 1, false>(from, x_bytes, rows, own, ahead, to);
              else
                add_amx<2, 1, false>(from, x_bytes, rows, own, ahead, to);
            }
            fetched += own_bands * lines * 4 * kLine;
          }
        }
        if (is_alone) {
          put_sums(sums, M, count * kTile, bias, t * kTile, std::min(count * kTile, N - t * kTile), N, y);
          continue;
        }
        const int64_t finished = at + count;
        if (finished < kept && t + count < last) continue;
        for (int64_t m = 0; m < M; ++m)
          for (int64_t g = 0; g < finished; ++g) {
            const int64_t output = (t - at + g) * kTile;
            put_sums(sums + g * sums_size + m * kTile, 1, kTile, bias, output, std::min(kTile, N - output), N,
                     y + m * N);
          }
      }
    });
  });
}
#endif

#if SPECDEC_AMX_INTEGERS
// Adds the products of signed bytes X with bytes W to sums.
template <int kSums, int kX, int kW, bool kIsSigned>
inline void multiply_bytes() {
  if constexpr (kIsSigned)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
}

// From so many rows on integers are multiplied by AMX, a chunk of so many inputs at a time.
constexpr int64_t kAmxLeastRows = 7, kAmxChunk = 512;
constexpr int64_t kFarBytes = 3 << 14;  // beyond the chunk that goes to the nearest cache next

// Some groups of a row's inputs and of 16 outputs. x: bytes of kRows rows, by `parts` of a group, which
// a register holds; heads: of each group the scales of the rows and what their sums begin with; w:
// bytes as a matrix of 8 bits has them; scales: of the outputs, the next group's scale_bytes further.
struct Groups {
  const char *x, *w, *scales, *ahead;
  const uint32_t *heads;
  int64_t count, parts, part_words, scale_bytes, lines;
};

// Adds the products of a group's inputs with 16 outputs to sums [kRows, kTile]. While one group is
// multiplied, the sums of the group before it are scaled.
template <int kRows, bool kIsSigned>
void add_groups(const Groups &w, float *sums) {
  static_assert(kVector == kAmxRows, "a row of a register is a vector");
  alignas(kLine) char found[2][kRows * kLine];
  Floats totals[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) totals[r] = load<Floats>(sums + r * kTile);
  const char *ahead = w.ahead;
  const auto start = [&](auto which, int64_t g) {
    constexpr int kAt = decltype(which)::value;
    for (int64_t line = 0; line < w.lines; ++line, ahead += kLine) {
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + kFarBytes, 0, 2);  // to the second cache
    }
    clear_register<kAt>();
    for (int64_t part = g * w.parts; part < (g + 1) * w.parts; ++part) {
      load_register<4 + kAt>(w.x + part * w.part_words * 4 * kRows, 4 * w.part_words);
      load_register<6 + kAt>(w.w + part * w.part_words * kStepBytes, kStepBytes);
      multiply_bytes<kAt, 4 + kAt, 6 + kAt, kIsSigned>();
    }
    store_register<kAt>(found[kAt], kLine);
  };
  const auto finish = [&](const char *from, int64_t g) {
    const Floats scale = load<Floats>(w.scales + g * w.scale_bytes);
    const uint32_t *head = w.heads + g * 2 * kRows;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Ints sum = load<Ints>(from + r * kLine);
      if constexpr (!kIsSigned) sum += static_cast<int32_t>(head[kRows + r]);
      totals[r] = mul_add(to_floats(sum) * as_float(head[r]), scale, totals[r]);
    }
  };
  constexpr std::integral_constant<int, 0> even;
  constexpr std::integral_constant<int, 1> odd;
  start(even, 0);
  for (int64_t g = 0; g < w.count; g += 2) {
    if (g + 1 < w.count) start(odd, g + 1);
    finish(found[0], g);
    if (g + 2 < w.count) start(even, g + 2);
    if (g + 1 < w.count) finish(found[1], g + 1);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) std::memcpy(sums + r * kTile, &totals[r], sizeof(Floats));
}

// Signed bytes of the steps from `begin` to `end` of a tile: of codes of 4 bits without zeros 16 times
// the integer.
inline void unpack_steps(const IntegerMatrix<4> &w, const char *tile, int64_t begin, int64_t end,
                         char *to) {
  const auto put = [&](Words bytes, int64_t k) { std::memcpy(to + k * kLine, &bytes, kLine); };
  for (int64_t step = begin; step < end;) {
    const int64_t g = step / w.group_steps, stop = std::min(end, (g + 1) * w.group_steps);
    Words zeros[kWords] = {};
    if (w.has_zeros)
      for (int64_t k = 0; k < kWords; ++k)
        zeros[k] = load<Words>(tile + w.scales_bytes + g * w.scale_stride * 4 + k * kLine) * 0x01010101u;
    for (; step < stop; ++step, to += 2 * kStepBytes)
#pragma GCC unroll 2
      for (int64_t k = 0; k < kWords; ++k) {
        const Words codes = load<Words>(tile + w.header + step * kStepBytes + k * kLine);
        if (w.has_zeros) {
          put((Words)_mm512_sub_epi8((__m512i)(codes & 0x0f0f0f0fu), (__m512i)zeros[k]), k);
          put((Words)_mm512_sub_epi8((__m512i)(codes >> 4 & 0x0f0f0f0fu), (__m512i)zeros[k]), kWords + k);
        } else {
          put((codes << 4 & 0xf0f0f0f0u) ^ 0x80808080u, k);
          put((codes & 0xf0f0f0f0u) ^ 0x80808080u, kWords + k);
        }
      }
  }
}

// y[M][N] = x[M][depth] W^T + bias by AMX. Rows go by blocks of equal size,
// which is one that add_groups is compiled for; the last is filled up with zeros.
template <int kBits, typename X, typename B, typename O>
void multiply_by_bytes(const X *x, int64_t M, const IntegerMatrix<kBits> &w, const B *bias, int64_t N,
                       O *y) {
  typedef IntegerMatrix<kBits> Matrix;
  struct Line {
    alignas(kLine) char bytes[kLine];
  };
  const int64_t least = (M + (M + kAmxRows - 1) / kAmxRows - 1) / ((M + kAmxRows - 1) / kAmxRows);
  const int64_t rows = least <= 8 ? 8 : least <= 12 ? 12 : kAmxRows, blocks = (M + rows - 1) / rows;
  const auto add = rows == 8    ? add_groups<8, kBits == 4>
                   : rows == 12 ? add_groups<12, kBits == 4>
                                : add_groups<kAmxRows, kBits == 4>;
  const int64_t group = w.group_steps * Matrix::kElements, part_words = std::min(kBand, group / 4);
  const int64_t parts = group / part_words / 4;
  const int64_t tiles = (N + kTile - 1) / kTile, x_bytes = w.groups * group * rows;
  const int64_t chunk = kAmxChunk / group, head = 2 * rows;
  const int64_t lines = (kAmxChunk / Matrix::kElements * kStepBytes / kLine + 2 * blocks * chunk - 1) /
                        (2 * blocks * chunk);
  static thread_local std::vector<Line> x_memory;
  static thread_local std::vector<uint32_t> heads_memory;
  x_memory.resize(blocks * x_bytes / kLine);
  heads_memory.resize(blocks * w.groups * head);
  char *inputs = x_memory.data()->bytes;
  uint32_t *heads = heads_memory.data();
  in_threads(M * N * w.depth > kParallelWork, [&](const Member &member) {
    member.share(w.groups, [&](int64_t g) {
      for (int64_t m = 0; m < blocks * rows; ++m) {
        const int64_t block = m / rows, r = m % rows;
        int8_t bytes[kMaxGroup] = {};
        const float factor = kBits == 4 && !w.has_zeros ? 0.0625f : 1.0f;
        const float scale = m < M ? w.round(x + m * w.depth, g, bytes) * factor : 0.0f;
        uint32_t *own = heads + (block * w.groups + g) * head;
        own[r] = as_bits(scale);
        own[rows + r] = static_cast<uint32_t>(Matrix::begin_sum(add_bytes(bytes)));
        char *to = inputs + block * x_bytes + g * group * rows + r * 4 * part_words;
        for (int64_t part = 0; part < parts; ++part)
          std::memcpy(to + part * part_words * 4 * rows, bytes + part * part_words * 4, part_words * 4);
      }
    });
    member.offer(tiles);
    member.meet();
    const Registers registers(rows, part_words);
    alignas(kLine) char unpacked[kAmxChunk * kTile] = {};
    static thread_local std::vector<Line> sums_memory;
    sums_memory.resize(blocks * rows * kTile * sizeof(float) / sizeof(Line));
    float *sums = reinterpret_cast<float *>(sums_memory.data());
    member.work(tiles, 1, [&](int64_t begin, int64_t last) {
      for (int64_t t = begin; t < last; ++t) {
        const char *tile = w.tiles + t * w.tile_bytes;
        std::fill_n(sums, blocks * rows * kTile, 0.0f);
        for (int64_t g = 0; g < w.groups; g += chunk) {
          const int64_t count = std::min(chunk, w.groups - g), step = g * w.group_steps;
          const int64_t end = std::min(w.steps, step + count * w.group_steps);
          const char *from = tile + w.header + step * kStepBytes;
          const bool is_copied = kBits == 4 || end < step + count * w.group_steps;
          const char *ahead = from + chunk * w.group_steps * kStepBytes;
          if constexpr (kBits == 4) {
            unpack_steps(w, tile, step, end, unpacked);
          } else if (is_copied) {
            std::memcpy(unpacked, from, (end - step) * kStepBytes);
          }
          if (is_copied) from = unpacked;
          for (int64_t block = 0; block < blocks; ++block)
            for (int64_t k = 0; k < kWords; ++k, ahead += chunk * lines * kLine)
              add(
                  {inputs + block * x_bytes + g * group * rows, from + k * kLine,
                   tile + (g * w.scale_stride + k * kVector) * 4, ahead,
                   heads + (block * w.groups + g) * head, count, parts, part_words,
                   w.scale_stride * 4, lines},
                  sums + block * rows * kTile + k * kVector);
        }
        const int64_t output = t * kTile;
        put_sums(sums, M, kTile, bias, output, std::min(kTile, N - output), N, y);
      }
    });
  });
}
#endif

template <int kBits, typename X, typename B, typename O>
void multiply_integers(const X *x, int64_t M, const IntegerMatrix<kBits> &w, const B *bias, int64_t N,
                       O *y) {
#if SPECDEC_AMX_INTEGERS
  if (M >= kAmxLeastRows && can_use_amx()) return multiply_by_bytes(x, M, w, bias, N, y);
#endif
  multiply_matrix(x, M, w, bias, N, y);
}

// The same with W packed, of numbers of type W or of Integers.
template <typename X, typename W, typename B, typename O>
void multiply(const X *x, int64_t M, int64_t depth, const W *packed, const B *bias, int64_t N,
              O *y) {
#if SPECDEC_AMX
  if constexpr (std::is_same<W, bf16>::value)
    if ((M > 1 || N * depth < kCachedNumbers) && can_use_amx())
      return multiply_amx(x, M, depth, packed, bias, N, y);
#endif
  if constexpr (!std::is_same<W, Integers>::value)
    multiply_matrix(x, M, FloatMatrix<W>(packed, depth), bias, N, y);
  else if (packed->bits == 4)
    multiply_integers(x, M, IntegerMatrix<4>(packed), bias, N, y);
  else
    multiply_integers(x, M, IntegerMatrix<8>(packed), bias, N, y);
}

// Asks for huge pages, of which a matrix needs few enough for the processor to know where they all
// are. Many systems give them only to those who ask; where there are none, nothing is lost.
inline void ask_for_huge_pages(void *start, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + size) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)start, (void)size;
#endif
}

constexpr int64_t kBlock = 64;  // steps at a time, so that lines read are used up while cached

// Lays out W [N, depth] for `multiply`; what lies beyond N and depth is zero.
template <typename E>
void pack_matrix(const E *weight, int64_t N, int64_t depth, E *packed) {
  typedef Packing<E> P;
  constexpr int64_t kStep = kTile * P::kElements;
  const int64_t tiles = (N + kTile - 1) / kTile, steps = count_steps<E>(depth);
  const int64_t size = steps * kStep;
  ask_for_huge_pages(packed, tiles * size * static_cast<int64_t>(sizeof(E)));
  for_each(tiles, N * depth > kParallelWork, [&](int64_t t) {
    E *tile = packed + t * size;
    const int64_t rows = std::min(kTile, N - t * kTile);
    if (rows < kTile || depth % P::kElements) std::memset(tile, 0, size * sizeof(E));
    for (int64_t begin = 0; begin < steps; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, steps);
      const int64_t whole = std::min(end, depth / P::kElements);
      for (int64_t j = 0; j < rows; ++j) {
        const E *row = weight + (t * kTile + j) * depth;
        for (int64_t step = begin; step < whole; ++step)
          for (int64_t i = 0; i < P::kElements; ++i)
            tile[step * kStep + P::place(j, i)] = row[step * P::kElements + i];
        if (whole < end)
          for (int64_t i = 0; whole * P::kElements + i < depth; ++i)
            tile[whole * kStep + P::place(j, i)] = row[whole * P::kElements + i];
      }
    }
  });
}

// The same of integers. codes: of 8 bits [N, depth], or of 4 bits [N / 2, depth], rows 2 r and
// 2 r + 1 in the lower and upper halves of row r; both signed, so that 0 is the usual zero. scales,
// zeros: [N, groups], or [N] where there is one a row.
template <int kBits>
void pack_tiles(const uint8_t *codes, const float *scales, const uint8_t *zeros,
                const Integers *packed) {
  const IntegerMatrix<kBits> w(packed);
  const int64_t N = packed->N, listed = w.scales_bytes / kTile / 4;
  const int64_t tiles = (N + kTile - 1) / kTile;
  char *first = const_cast<char *>(w.tiles);
  for_each(tiles, N * w.depth > kParallelWork, [&](int64_t t) {
    char *tile = first + t * w.tile_bytes;
    const int64_t rows = std::min(kTile, N - t * kTile);
    if (rows < kTile) std::memset(tile, 0, w.tile_bytes);
    for (int64_t j = 0; j < rows; ++j)
      for (int64_t g = 0; g < listed; ++g) {
        const int64_t from = (t * kTile + j) * listed + g;
        char *to = tile + (g * kTile + j) * 4;
        std::memcpy(to, scales + from, 4);
        if (zeros != nullptr) {
          const int32_t zero = zeros[from];
          std::memcpy(to + w.scales_bytes, &zero, 4);
        }
      }
    for (int64_t begin = 0; begin < w.steps; begin += kBlock)
      for (int64_t j = 0; j < rows; ++j) {
        const int64_t n = t * kTile + j;
        const uint8_t *row = codes + (kBits == 4 ? n / 2 : n) * w.depth;
        for (int64_t step = begin; step < std::min(begin + kBlock, w.steps); ++step) {
          constexpr int64_t kElements = IntegerMatrix<kBits>::kElements;
          const int64_t at = step * kElements, count = std::min(kElements, w.depth - at);
          uint32_t words[2] = {};
          std::memcpy(words, row + at, count);
          uint32_t word = words[0] ^ (kByteZero == 128 ? 0x80808080u : 0u);
          if (kBits == 4) {
            for (auto &half : words) half = (half >> n % 2 * 4 & 0x0f0f0f0fu) ^ 0x08080808u;
            word = words[0] | words[1] << 4;
          }
          std::memcpy(tile + w.header + step * kStepBytes + 4 * j, &word, 4);
        }
      }
  });
}

inline int64_t measure_integers(const Integers &sizes) {
  const int64_t tiles = (sizes.N + kTile - 1) / kTile;
  const int64_t lists = (sizes.has_input_scales + sizes.has_order) * round_up(sizes.depth * 4, kLine);
  const int64_t tile_bytes = sizes.bits == 4 ? IntegerMatrix<4>(&sizes).tile_bytes
                                             : IntegerMatrix<8>(&sizes).tile_bytes;
  return static_cast<int64_t>(sizeof sizes) + lists + tiles * tile_bytes;
}

void pack_integers(const uint8_t *codes, const float *scales, const uint8_t *zeros,
                   const float *input_scales, const int32_t *order, const Integers &sizes,
                   char *packed) {
  ask_for_huge_pages(packed, measure_integers(sizes));
  std::memcpy(packed, &sizes, sizeof sizes);
  char *at = packed + sizeof sizes;
  for (const void *list : {static_cast<const void *>(input_scales), static_cast<const void *>(order)})
    if (list != nullptr) {
      std::memcpy(at, list, sizes.depth * 4);
      at += round_up(sizes.depth * 4, kLine);
    }
  const auto *head = reinterpret_cast<const Integers *>(packed);
  if (sizes.bits == 4)
    pack_tiles<4>(codes, scales, zeros, head);
  else
    pack_tiles<8>(codes, scales, zeros, head);
}

typedef std::pair<float, int64_t> Ranked;  // a logit or score, and which one it is

// Whether one goes before the other: the larger, of equal ones the first. NaN has no place in such
// an order, and the library's sorting needs one: all that is ranked comes out of `rank`.
inline bool goes_before(const Ranked &a, const Ranked &b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// NaN is ranked as minus infinity.
inline Ranked rank(float x, int64_t which) { return {x == x ? x : -HUGE_VALF, which}; }

// The best `kept` of `count` logits, best first.
void find_best(const float *logits, int64_t count, int64_t kept, std::vector<Ranked> &heap) {
  heap.clear();
  for (int64_t v = 0; v < count; ++v) {
    if (static_cast<int64_t>(heap.size()) < kept) {
      heap.push_back(rank(logits[v], v));
      std::push_heap(heap.begin(), heap.end(), goes_before);
    } else if (logits[v] > heap.front().first) {
      std::pop_heap(heap.begin(), heap.end(), goes_before);
      heap.back() = {logits[v], v};
      std::push_heap(heap.begin(), heap.end(), goes_before);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), goes_before);
}

// The best `width` of `count` logits, best first, as (log-probability among the best `kept`, token).
void rank_tokens(const float *logits, int64_t count, int64_t kept, int64_t width,
                 std::vector<Ranked> &heap) {
  find_best(logits, count, kept, heap);
  const float top = heap[0].first;
  float total = 0.0f;
  for (const auto &entry : heap) total += std::exp(entry.first - top);
  heap.resize(width);
  for (auto &entry : heap) entry.first -= top + std::log(total);
}

// The same as log-probabilities among all of them, of logits that are multiplied by `sharpness` first.
void rank_all(const float *logits, int64_t count, int64_t width, float sharpness,
              std::vector<Ranked> &heap) {
  find_best(logits, count, width, heap);
  const float top = heap[0].first;
  const float total = sum_row(count, [&](auto sums, int64_t v) {
    return sums + exp_fast((read<decltype(sums)>(logits + v) - top) * sharpness);
  });
  for (auto &entry : heap) entry.first = (entry.first - top) * sharpness - std::log(total);
}

// The best `width` tokens and their log-probabilities, [M, width], of x [M, depth] times a packed
// head of V outputs.
template <typename W, typename E>
void rank_outputs(const E *x, int64_t M, int64_t depth, const W *head, const E *bias, int64_t V,
                  int64_t width, int64_t *tokens, float *scores) {
  std::vector<float> logits(M * V);
  multiply(x, M, depth, head, bias, V, logits.data());
  for_each(M, M * V > kParallelWork, [&](int64_t m) {
    std::vector<Ranked> best;
    best.reserve(width);
    rank_all(&logits[m * V], V, width, 1.0f, best);
    for (int64_t j = 0; j < width; ++j) {
      tokens[m * width + j] = best[j].second;
      scores[m * width + j] = best[j].first;
    }
  });
}

// A ReDrafter drafter, see specdec/engine/redrafter.py, of E but for its matrices, which are of
// type P and packed for `multiply`; absent ones are null. context_proj, state_proj: the input
// projection's columns for the target's hidden state and for the recurrent one; blocks: weight and
// bias of each residual block by turns; drafted: [V], the token of each of the head's outputs, null
// where these are all tokens. X is the exit dimension, V the head's outputs.
template <typename P, typename E>
struct Drafter {
  const E *embedding;
  const P *rnn_w, *rnn_u;
  const E *rnn_u_bias;
  const P *context_proj, *state_proj;
  const E *input_bias;
  const void *const *blocks;
  int64_t num_blocks;
  const P *lm_head;
  const int64_t *drafted;
  int64_t V, H, X;

  int64_t name(int64_t output) const { return drafted != nullptr ? drafted[output] : output; }
};

// B searches by such a drafter, W nodes of each at every level but the first, whose only node is the
// root: `run` makes the logits of what follows a level's nodes, from which `choose` goes on.
template <typename P, typename E>
struct Search {
  const Drafter<P, E> &drafter;
  const E *hidden;  // [B, H], the target's state before each root
  const int64_t B, W;
  int64_t width = 1, level = 0;
  std::vector<int64_t> last;  // [B, width], the tokens of the level's nodes
  std::vector<float> logits, state, next, embedded, x, first, second, contexts;

  Search(const Drafter<P, E> &d, const E *hidden, const int64_t *roots, int64_t B, int64_t W)
      : drafter(d), hidden(hidden), B(B), W(W), last(roots, roots + B) {
    const int64_t most = B * W, wide = std::max(2 * d.H, d.X);
    for (auto *states : {&state, &next, &embedded}) states->resize(most * d.H);
    for (auto *inner : {&x, &first, &second}) inner->resize(most * wide);
    logits.resize(most * d.V);
    if (d.context_proj == nullptr) return;
    contexts.resize(B * d.X);  // the same at every level
    multiply(hidden, B, d.H, d.context_proj, d.input_bias, d.X, contexts.data());
  }

  void run() {
    const Drafter<P, E> &d = drafter;
    const int64_t M = B * width, H = d.H, X = d.X;
    const E *none = nullptr;
    for (int64_t m = 0; m < M; ++m)
      for (int64_t i = 0; i < H; ++i) embedded[m * H + i] = to_float(d.embedding[last[m] * H + i]);
    if (d.rnn_w != nullptr) {
      multiply(embedded.data(), M, H, d.rnn_w, none, H, first.data());
      if (level > 0) multiply(state.data(), M, H, d.rnn_u, d.rnn_u_bias, H, second.data());
      for (int64_t m = 0; m < M; ++m)
        for (int64_t i = 0; i < H; ++i) {
          const float recurrent = level > 0 ? second[m * H + i] : to_float(d.rnn_u_bias[i]);
          next[m * H + i] = silu(first[m * H + i] + recurrent);
        }
    } else {
      for (int64_t i = 0; i < M * H; ++i) next[i] = embedded[i] + (level > 0 ? state[i] : 0.0f);
    }
    state.swap(next);
    if (d.state_proj != nullptr) {
      multiply(state.data(), M, H, d.state_proj, none, X, x.data());
      for (int64_t m = 0; m < M; ++m)
        for (int64_t i = 0; i < X; ++i) x[m * X + i] += contexts[m / width * X + i];
    } else {
      for (int64_t m = 0; m < M; ++m) {
        const E *context = hidden + m / width * H;
        for (int64_t i = 0; i < H; ++i) x[m * 2 * H + i] = to_float(context[i]);
        std::memcpy(&x[m * 2 * H + H], &state[m * H], sizeof(float) * H);
      }
    }
    for (int64_t block = 0; block < d.num_blocks; ++block) {
      multiply(x.data(), M, X, static_cast<const P *>(d.blocks[2 * block]),
               static_cast<const E *>(d.blocks[2 * block + 1]), X, first.data());
      for (int64_t m = 0; m < M; ++m)
#pragma omp simd
        for (int64_t i = 0; i < X; ++i) {
          const float z = first[m * X + i];
          x[m * X + i] = mul_add(z, sigmoid(z), x[m * X + i]);
        }
    }
    multiply(x.data(), M, X, d.lm_head, none, d.V, logits.data());
  }

  // The next level's node w of row b is a token after node `source` of this one.
  void choose(int64_t b, int64_t w, int64_t source, int64_t token) {
    const int64_t to = b * W + w, H = drafter.H;
    std::memcpy(&next[to * H], &state[(b * width + source) * H], sizeof(float) * H);
    last[to] = token;
  }

  void begin_choice() { last.resize(B * W); }

  void end_choice() {
    state.swap(next);
    width = W;
    ++level;
  }
};

// ReDrafter's beam search: beams [B, W, L] after each of B tokens. Scores are normalized over the C
// best candidates of a beam.
template <typename P, typename E>
void search_beams(const Drafter<P, E> &drafter, const E *hidden, const int64_t *tokens,
                  int64_t *beams, int64_t B, int64_t W, int64_t L, int64_t C) {
  const int64_t most = B * W, V = drafter.V;
  Search<P, E> search(drafter, hidden, tokens, B, W);
  std::vector<float> scores(B, 0.0f), next_scores(most);
  std::vector<int64_t> paths(most * L), next_paths(most * L);
  std::vector<std::vector<Ranked>> ranked(most);
  for (auto &heap : ranked) heap.reserve(C);
  for (int64_t step = 0; step < L; ++step) {
    search.run();
    const int64_t width = search.width, M = B * width;
    for_each(M, M * V > kParallelWork, [&](int64_t m) {
      rank_tokens(&search.logits[m * V], V, C, W, ranked[m]);
    });
    search.begin_choice();
    for (int64_t b = 0; b < B; ++b) {
      // Each beam's best W tokens hold the best W of all.
      std::vector<Ranked> grown;
      for (int64_t w = 0; w < width; ++w)
        for (int64_t j = 0; j < W; ++j)
          grown.push_back(rank(scores[b * width + w] + ranked[b * width + w][j].first, w * W + j));
      std::partial_sort(grown.begin(), grown.begin() + W, grown.end(), goes_before);
      for (int64_t w = 0; w < W; ++w) {
        const int64_t place = grown[w].second / W, source = b * width + place, to = b * W + w;
        const int64_t token = drafter.name(ranked[source][grown[w].second % W].second);
        next_scores[to] = grown[w].first;
        std::memcpy(&next_paths[to * L], &paths[source * L], sizeof(int64_t) * step);
        next_paths[to * L + step] = token;
        search.choose(b, w, place, token);
      }
    }
    search.end_choice();
    paths.swap(next_paths);
    scores.assign(next_scores.begin(), next_scores.end());
  }
  std::memcpy(beams, paths.data(), sizeof(int64_t) * most * L);
}

// ReDrafter's dynamic tree, as `DynamicTree` in levels.py grows it. Every level goes on from the W
// nodes of the greatest scores, sums of log-probabilities at each row's temperature, and drafts W
// tokens from each; the N best of all that were drafted make the tree, in the order in which they
// were. Another level is drafted while more than `least` of the newest one's tokens are expected to
// be accepted, in all rows together and at most one in each. nodes: [3, B, N], tokens, parents and
// depths, the root being node 0 and not listed; chances: [B, N], of each below its parent. Returns
// the number of levels; unless it is L, a row has no more nodes than these drafted.
template <typename P, typename E>
int64_t search_tree(const Drafter<P, E> &drafter, const E *hidden, const int64_t *tokens,
                    const double *temperatures, double least, int64_t *nodes, double *chances,
                    int64_t B, int64_t W, int64_t L, int64_t N) {
  typedef std::pair<double, int64_t> Scored;
  const auto is_better = [](const Scored &a, const Scored &b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  const int64_t V = drafter.V, all = W + (L - 1) * W * W;
  Search<P, E> search(drafter, hidden, tokens, B, W);
  std::vector<int64_t> seen(B * all), parents(B * all);
  std::vector<double> own(B * all), totals(B * all);
  std::vector<int64_t> run(B * W);  // the nodes of the level that is run, among those seen
  std::vector<std::vector<Ranked>> ranked(B * W);
  for (auto &heap : ranked) heap.reserve(W);
  std::vector<Scored> grown;
  int64_t begin = 0, end = 0;  // of the newest level among those seen
  while (true) {
    search.run();
    const int64_t width = search.width, M = B * width;
    for_each(M, M * V > kParallelWork, [&](int64_t m) {
      const float sharpness = static_cast<float>(1 / temperatures[m / width]);
      rank_all(&search.logits[m * V], V, W, sharpness, ranked[m]);
    });
    begin = end;
    end += width * W;
    double promised = 0.0;
    search.begin_choice();
    for (int64_t b = 0; b < B; ++b) {
      grown.clear();
      for (int64_t w = 0; w < width; ++w) {
        auto &best = ranked[b * width + w];
        for (auto &entry : best) entry.first = rank(entry.first, 0).first;
        const int64_t parent = begin > 0 ? run[b * W + w] : -1;
        for (int64_t j = 0; j < W; ++j) {
          const int64_t place = begin + w * W + j, at = b * all + place;
          seen[at] = drafter.name(best[j].second);
          parents[at] = parent;
          own[at] = best[j].first;
          totals[at] = own[at] + (parent < 0 ? 0.0 : totals[b * all + parent]);
          grown.push_back({totals[at], place});
        }
      }
      std::partial_sort(grown.begin(), grown.begin() + W, grown.end(), is_better);
      double expected = 0.0;
      for (int64_t w = 0; w < W; ++w) {
        const int64_t place = grown[w].second;
        expected += std::exp(grown[w].first);
        run[b * W + w] = place;
        search.choose(b, w, (place - begin) / W, seen[b * all + place]);
      }
      promised += expected < 1.0 ? expected : 1.0;
    }
    search.end_choice();
    if (search.level == L || !(promised > least)) break;
  }
  const int64_t kept = std::min(N, end);
  std::vector<int64_t> node_of(all);
  for (int64_t b = 0; b < B; ++b) {
    grown.clear();
    for (int64_t i = 0; i < end; ++i) grown.push_back({totals[b * all + i], i});
    std::partial_sort(grown.begin(), grown.begin() + kept, grown.end(), is_better);
    std::sort(grown.begin(), grown.begin() + kept,
              [](const Scored &a, const Scored &b) { return a.second < b.second; });
    int64_t *drafted = nodes + b * N, *above = drafted + B * N, *depths = above + B * N;
    for (int64_t n = 0; n < kept; ++n) {
      const int64_t i = grown[n].second, parent = parents[b * all + i];
      node_of[i] = n + 1;
      drafted[n] = seen[b * all + i];
      // A parent is at least as probable as its child, and comes first where they tie.
      above[n] = parent < 0 ? 0 : node_of[parent];
      depths[n] = parent < 0 ? 1 : depths[above[n] - 1] + 1;
      chances[b * N + n] = std::exp(own[b * all + i]);
    }
  }
  return search.level;
}

// Activations of an MLP: 0 SiLU, 1 GELU by tanh, 2 GELU by erf, 3 ReLU.
inline float gelu_erf(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); }

inline float relu(float x) { return x > 0.0f ? x : 0.0f; }

template <float (*activate)(float), typename E>
void apply_to(E *x, int64_t count) {
  in_threads(count > kParallelWork, [&](const Member &member) {
    const int64_t end = member.end(count);
#pragma omp simd
    for (int64_t i = member.begin(count); i < end; ++i) store(x[i], activate(to_float(x[i])));
  });
}

// A rank's part of a layer's experts, as specdec/engine/native.py writes it: eight bytes a field.
// router: [num, D], packed; up: [2 I, D] of each of the rank's `count` experts, counted from `first`,
// packed: what is multiplied, then what is activated; down: [D, I]; gate: [D], of the shared expert,
// which is absent where shared_I is 0; seen: steps, tokens, experts chosen by any of a step's tokens.
struct Experts {
  const float *router;
  const void *const *up, *const *down;
  const void *shared_up, *shared_down, *gate;
  int64_t *seen;
  int64_t num, top_k, first, count, I, shared_I, renormalizes;
};
static_assert(sizeof(Experts) == 14 * 8, "a field is eight bytes");

// Softmax over all scores [num] of a token, and the best of them, first: of equal ones those that
// torch.topk takes, which calls the same functions. Returns what the weights are divided by.
inline float choose_experts(float *scores, const Experts &e, std::vector<Ranked> &queue) {
  float top = scores[0], total = 0.0f, sum = 0.0f;
  for (int64_t i = 1; i < e.num; ++i) top = scores[i] > top ? scores[i] : top;
  for (int64_t i = 0; i < e.num; ++i) total += scores[i] = exp_fast(scores[i] - top);
  queue.resize(e.num);
  for (int64_t i = 0; i < e.num; ++i) queue[i] = rank(scores[i] / total, i);
  const auto better = [](const Ranked &a, const Ranked &b) { return a.first > b.first; };
  if (e.top_k * 64 <= e.num) {
    std::partial_sort(queue.begin(), queue.begin() + e.top_k, queue.end(), better);
  } else {
    std::nth_element(queue.begin(), queue.begin() + e.top_k - 1, queue.end(), better);
    std::sort(queue.begin(), queue.begin() + e.top_k - 1, better);
  }
  for (int64_t k = 0; k < e.top_k; ++k) sum += queue[k].first;
  return e.renormalizes ? sum : 1.0f;
}

// Buffers that the experts of a layer use one after the other.
template <typename E>
struct ExpertBuffers {
  std::vector<E> rows, halves, gated;
  std::vector<float> products;
};

// products [M, D] = down (silu(gate x) * up x), for M rows of x.
template <typename W, typename E>
void run_expert(const E *x, int64_t M, int64_t D, const void *up, const void *down, int64_t I,
                ExpertBuffers<E> &buffers) {
  buffers.halves.resize(M * 2 * I);
  buffers.gated.resize(M * I);
  buffers.products.resize(M * D);
  const E *none = nullptr;
  multiply(x, M, D, static_cast<const W *>(up), none, 2 * I, buffers.halves.data());
  gate_mul<silu>(buffers.halves.data(), buffers.gated.data(), M, I, I);
  multiply(buffers.gated.data(), M, I, static_cast<const W *>(down), none, D,
           buffers.products.data());
}

// out [M, D]: what a rank's experts make of x [M, D]. An expert's matrices are read once for all its
// tokens; a token's experts are added up in the order of their numbers, whoever goes with it.
template <typename W, typename E>
void mix_experts(const E *x, int64_t M, int64_t D, const Experts &e, E *out) {
  std::vector<float> scores(M * e.num), sums(M * D, 0.0f);
  std::vector<std::vector<std::pair<int64_t, float>>> chosen(e.num);  // tokens and their weights
  std::vector<Ranked> queue;
  multiply(x, M, D, e.router, static_cast<const float *>(nullptr), e.num, scores.data());
  for (int64_t m = 0; m < M; ++m) {
    const float divisor = choose_experts(&scores[m * e.num], e, queue);
    for (int64_t k = 0; k < e.top_k; ++k)
      chosen[queue[k].second].emplace_back(m, queue[k].first / divisor);
  }
  e.seen[0] += 1;
  e.seen[1] += M;
  for (const auto &tokens : chosen) e.seen[2] += !tokens.empty();
  ExpertBuffers<E> buffers;
  const auto add = [&](float weight, const float *from, int64_t token) {
    float *to = &sums[token * D];
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) to[d] = mul_add(weight, from[d], to[d]);
  };
  for (int64_t own = 0; own < e.count; ++own) {
    const auto &tokens = chosen[e.first + own];
    const int64_t count = static_cast<int64_t>(tokens.size());
    if (count == 0) continue;
    buffers.rows.resize(count * D);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(&buffers.rows[i * D], x + tokens[i].first * D, sizeof(E) * D);
    run_expert<W>(buffers.rows.data(), count, D, e.up[own], e.down[own], e.I, buffers);
    for (int64_t i = 0; i < count; ++i)
      add(tokens[i].second, &buffers.products[i * D], tokens[i].first);
  }
  if (e.shared_I > 0) {
    const E *gate = static_cast<const E *>(e.gate);
    run_expert<W>(x, M, D, e.shared_up, e.shared_down, e.shared_I, buffers);
    for (int64_t m = 0; m < M; ++m) {
      const float amount = sum_row(D, [&](auto part, int64_t i) {
        typedef decltype(part) V;
        return mul_add(read<V>(x + m * D + i), read<V>(gate + i), part);
      });
      add(sigmoid(amount), &buffers.products[m * D], m);
    }
  }
  for (int64_t i = 0; i < M * D; ++i) store(out[i], sums[i]);
}

// Logits become cap tanh(scale x / cap).
template <typename E>
void cap_logits(E *x, int64_t count, float scale, float cap) {
  in_threads(count > kParallelWork, [&](const Member &member) {
    const int64_t end = member.end(count);
#pragma omp simd
    for (int64_t i = member.begin(count); i < end; ++i)
      store(x[i], cap * tanh_fast(to_float(x[i]) * scale / cap));
  });
}

// Moves the wanted rows of x [M, width] to its beginning; returns how many they are.
template <typename E>
int64_t gather_rows(E *x, int64_t M, int64_t width, const uint8_t *wanted) {
  int64_t count = 0;
  for (int64_t m = 0; m < M; ++m)
    if (wanted[m] != 0) {
      if (count < m) std::memcpy(x + count * width, x + m * width, sizeof(E) * width);
      ++count;
    }
  return count;
}

// Moves the first rows of x back to where they are wanted; the others are zeros.
template <typename E>
void spread_rows(E *x, int64_t M, int64_t width, const uint8_t *wanted, int64_t count) {
  for (int64_t m = M - 1; m >= 0; --m) {
    E *to = x + m * width;
    if (wanted[m] == 0)
      std::memset(static_cast<void *>(to), 0, sizeof(E) * width);
    else if (--count < m)
      std::memcpy(to, x + count * width, sizeof(E) * width);
  }
}

// The layers of a decoder over one step's tokens. Legend as above; M = B T tokens. weights of a
// layer, in order: weight and bias of input norm, QKV, dense, post norm, up (gate and up stacked
// where it is gated), down; weights of the norms of queries and of keys; weight and bias of the norm
// of what dense yields, and of what down yields. Absent ones are null, and a layer without post norm
// has attention and MLP read the same input. experts: of each layer, in place of up and down, or
// null. tables: cosines and sines by turns, null for layers without positions; attending: of each
// layer its window and the number of its table. first: [M, first_depth], what the first layer's
// attention reads, or null where that is its normed input. x: [M, D], overwritten by the last layer's
// output; out: [M, D], its norm; observed: [number of them, M, D]. wanted: [M], zero for tokens of
// which the last layer writes no more than keys and values: what x, out and observed have of them is
// zeros; or null. Matrices are of type W, all else is of type E.
struct Shape {
  int64_t B, T, C, first_depth, D, N, K, H, I, R, S, rotated, num_layers, activation;
  int64_t is_gated, observing, is_integer;
};

// share: of what attention and MLP yield, in what is added to the layer's input.
struct Scalars {
  float epsilon, scale, cap, share;
};

constexpr int64_t kLayerPointers = 18;

template <typename W, typename E>
void run_layers(E *x, const E *first, E *out, const E *const *weights, const E *const *final_norm,
                const Experts *experts, E *cache, const E *const *tables, const int64_t *attending,
                const int64_t *rows, const int64_t *positions, const int64_t *lines,
                const int64_t *past, const uint8_t *tree_mask, const int64_t *observed_layers,
                E *observed, const uint8_t *wanted, const Shape &shape, const Scalars &scalars) {
  const Shape &s = shape;
  const float epsilon = scalars.epsilon, share = scalars.share;
  const int64_t num_tokens = s.B * s.T;
  int64_t M = num_tokens;
  const int64_t heads = (s.N + 2 * s.K) * s.H, inner = s.I * (1 + s.is_gated);
  const int64_t layer_cache = 2 * s.R * s.K * s.S * s.H;
  std::vector<E> qkv(M * heads), attended(M * s.N * s.H), mixed(M * s.D), up(M * inner);
  std::vector<E> gated(s.is_gated ? M * s.I : 0), second(M * s.D);
  if (first == nullptr)
    add_norm<E>(x, nullptr, nullptr, share, weights[0], weights[1], out, M, s.D, epsilon);
  for (int64_t layer = 0; layer < s.num_layers; ++layer) {
    const E *const *w = weights + layer * kLayerPointers;
    const E *const *next = layer + 1 < s.num_layers ? w + kLayerPointers : final_norm;
    const auto matrix = [w](int64_t at) { return reinterpret_cast<const W *>(w[at]); };
    const E *const *table = tables + 2 * attending[2 * layer + 1];
    const int64_t rotated = table[0] ? s.rotated : 0;
    const Attention<E> how = {w[12],   w[13],                table[0],      table[1],
                              rotated, attending[2 * layer], scalars.scale, scalars.cap,
                              epsilon};
    const bool given = layer == 0 && first != nullptr;
    const bool is_cut = wanted != nullptr && layer + 1 == s.num_layers;
    multiply(given ? first : out, M, given ? s.first_depth : s.D, matrix(2), w[3], heads,
             qkv.data());
    attend(qkv.data(), cache + layer * layer_cache, how, rows, positions, lines, past, tree_mask,
           attended.data(), s.B, s.T, s.C, s.N, s.K, s.H, s.R, s.S, is_cut ? wanted : nullptr);
    if (is_cut) {
      gather_rows(attended.data(), M, s.N * s.H, wanted);
      if (w[6] == nullptr) gather_rows(out, M, s.D, wanted);  // which the MLP reads, too
      M = gather_rows(x, M, s.D, wanted);
      if (M == 0) {
        spread_rows(x, num_tokens, s.D, wanted, M);
        spread_rows(out, num_tokens, s.D, wanted, M);
        return;
      }
    }
    multiply(attended.data(), M, s.N * s.H, matrix(4), w[5], s.D, mixed.data());
    if (w[6] != nullptr)
      add_norm(x, mixed.data(), w + 14, share, w[6], w[7], out, M, s.D, epsilon);
    E *down = w[6] != nullptr ? mixed.data() : second.data();
    if (experts != nullptr) {
      mix_experts<W>(out, M, s.D, experts[layer], down);
    } else {
      multiply(out, M, s.D, matrix(8), w[9], inner, up.data());
      if (s.is_gated) {
        if (s.activation == 0)
          gate_mul<silu>(up.data(), gated.data(), M, s.I);
        else
          gate_mul<gelu_tanh>(up.data(), gated.data(), M, s.I);
      } else if (s.activation == 1) {
        apply_to<gelu_tanh>(up.data(), M * inner);
      } else if (s.activation == 2) {
        apply_to<gelu_erf>(up.data(), M * inner);
      } else {
        apply_to<relu>(up.data(), M * inner);
      }
      multiply(s.is_gated ? gated.data() : up.data(), M, s.I, matrix(10), w[11], s.D, down);
    }
    if (w[6] == nullptr)
      for (int64_t i = 0; i < M * s.D; ++i)
        store(mixed[i], to_float(mixed[i]) + to_float(second[i]));
    add_norm(x, mixed.data(), w + 16, share, next[0], next[1], out, M, s.D, epsilon);
    if (is_cut) {
      spread_rows(x, num_tokens, s.D, wanted, M);
      spread_rows(out, num_tokens, s.D, wanted, M);
    }
    const int64_t size = num_tokens * s.D;
    for (int64_t i = 0; i < s.observing; ++i)
      if (observed_layers[i] == layer) std::memcpy(observed + i * size, x, sizeof(E) * size);
  }
}

}  // namespace

extern "C" {

// Bumped with every change of a signature below, of what an argument means, or of the order of
// packed numbers or of sums; checked when an engine is loaded. Another order raises PACKING_VERSION of packed.py too.
int64_t specdec_abi_version() { return 19; }

// Whether products with bfloat16 weights are by AMX: 1; 0 where the kernels are made for it and the
// system refuses it, so that other instructions get the same bits, slower; else -1.
int64_t specdec_use_amx() {
#if SPECDEC_AMX
  return can_use_amx();
#else
  return -1;
#endif
}

// Of the calling thread, for the calls that it makes from now on.
void specdec_set_num_threads(int64_t count) { omp_set_num_threads(static_cast<int>(count)); }

#define SPECDEC_EXPORT(E, suffix)                                                                 \
  void specdec_add_norm_##suffix(E *x, const E *delta, const E *delta_weight, const E *delta_bias,\
                                 float share, const E *weight, const E *bias, E *out,             \
                                 int64_t rows, int64_t D, float epsilon) {                        \
    const E *const added[] = {delta_weight, delta_bias};                                          \
    add_norm(x, delta, added, share, weight, bias, out, rows, D, epsilon);                        \
  }                                                                                               \
  void specdec_silu_mul_##suffix(const E *gate_up, E *out, int64_t rows, int64_t I) {             \
    gate_mul<silu>(gate_up, out, rows, I);                                                        \
  }                                                                                               \
  void specdec_gelu_mul_##suffix(const E *gate_up, E *out, int64_t rows, int64_t I) {             \
    gate_mul<gelu_tanh>(gate_up, out, rows, I);                                                   \
  }                                                                                               \
  void specdec_cap_logits_##suffix(E *x, int64_t count, float scale, float cap) {                 \
    cap_logits(x, count, scale, cap);                                                             \
  }                                                                                               \
  void specdec_attend_##suffix(                                                                   \
      E *qkv, E *cache, const E *q_norm, const E *k_norm, const E *cosine, const E *sine,         \
      const int64_t *rows, const int64_t *positions, const int64_t *lines, const int64_t *past,   \
      const uint8_t *tree_mask, E *out, int64_t B, int64_t T, int64_t C, int64_t N, int64_t K,    \
      int64_t H, int64_t R, int64_t S, int64_t rotated, int64_t window, float scale, float cap,   \
      float epsilon) {                                                                            \
    const Attention<E> how = {q_norm, k_norm, cosine, sine, rotated, window, scale, cap, epsilon};\
    attend(qkv, cache, how, rows, positions, lines, past, tree_mask, out, B, T, C, N, K, H, R, S);\
  }                                                                                               \
  void specdec_pack_matrix_##suffix(const E *weight, int64_t N, int64_t depth, E *packed) {       \
    pack_matrix(weight, N, depth, packed);                                                        \
  }                                                                                               \
  void specdec_multiply_##suffix(const E *x, int64_t M, int64_t depth, const E *packed,           \
                                 const E *bias, int64_t N, E *y) {                                \
    multiply(x, M, depth, packed, bias, N, y);                                                    \
  }                                                                                               \
  void specdec_multiply_integers_##suffix(const E *x, int64_t M, int64_t depth,                   \
                                          const Integers *packed, const E *bias, int64_t N,       \
                                          E *y) {                                                 \
    multiply(x, M, depth, packed, bias, N, y);                                                    \
  }                                                                                               \
  void specdec_run_layers_##suffix(                                                               \
      E *x, const E *first, E *out, const E *const *weights, const E *const *final_norm,          \
      const void *experts, E *cache, const E *const *tables, const int64_t *attending,            \
      const int64_t *rows, const int64_t *positions, const int64_t *lines, const int64_t *past,   \
      const uint8_t *tree_mask, const int64_t *observed_layers, E *observed,                      \
      const uint8_t *wanted, const int64_t *shape, const float *scalars) {                        \
    Shape sizes;                                                                                  \
    std::memcpy(&sizes, shape, sizeof sizes);                                                     \
    Scalars numbers;                                                                              \
    std::memcpy(&numbers, scalars, sizeof numbers);                                               \
    const auto run = sizes.is_integer ? run_layers<Integers, E> : run_layers<E, E>;               \
    with_crew(sizes.B * sizes.T * sizes.D * sizes.D > kParallelWork, [&] {                        \
      run(x, first, out, weights, final_norm, static_cast<const Experts *>(experts), cache,       \
          tables, attending, rows, positions, lines, past, tree_mask, observed_layers, observed,  \
          wanted, sizes, numbers);                                                                \
    });                                                                                           \
  }                                                                                               \
  void specdec_mix_experts_##suffix(const E *x, int64_t M, int64_t D, const void *experts, E *out, \
                                    int64_t is_integer) {                                         \
    const auto mix = is_integer ? mix_experts<Integers, E> : mix_experts<E, E>;                   \
    mix(x, M, D, *static_cast<const Experts *>(experts), out);                                    \
  }                                                                                               \
  void specdec_rank_outputs_##suffix(const E *x, int64_t M, int64_t depth, const void *head,      \
                                     const E *bias, int64_t V, int64_t width, int64_t *tokens,    \
                                     float *scores, int64_t is_integer) {                         \
    const auto rank = [&](auto none) {                                                            \
      with_crew(M * V * depth > kParallelWork, [&] {                                              \
        rank_outputs(x, M, depth, static_cast<decltype(none)>(head), bias, V, width, tokens,      \
                     scores);                                                                     \
      });                                                                                         \
    };                                                                                            \
    if (is_integer)                                                                               \
      rank(static_cast<const Integers *>(nullptr));                                               \
    else                                                                                          \
      rank(static_cast<const E *>(nullptr));                                                      \
  }                                                                                               \
  int64_t specdec_search_##suffix(const E *embedding, const E *hidden, const int64_t *tokens,     \
                                  const void *const *matrices, const E *const *biases,            \
                                  const void *const *blocks, int64_t num_blocks,                  \
                                  const int64_t *drafted, const double *temperatures, double least,\
                                  int64_t *found, double *chances, const int64_t *sizes) {        \
    const int64_t B = sizes[0], W = sizes[1], L = sizes[2], N = sizes[3], C = sizes[7];           \
    const auto search = [&](auto none) {                                                          \
      const auto at = [&](int64_t i) { return static_cast<decltype(none)>(matrices[i]); };        \
      typedef typename std::remove_const<typename std::remove_pointer<decltype(none)>::type>::type P;\
      const Drafter<P, E> drafter = {embedding, at(0), at(1), biases[0], at(2), at(3), biases[1], \
                                     blocks, num_blocks, at(4), drafted, sizes[4], sizes[5],      \
                                     sizes[6]};                                                   \
      int64_t levels = L;                                                                         \
      with_crew(B * drafter.V * drafter.X > kParallelWork, [&] {                                  \
        if (temperatures != nullptr)                                                              \
          levels = search_tree(drafter, hidden, tokens, temperatures, least, found, chances, B, W,\
                               L, N);                                                             \
        else                                                                                      \
          search_beams(drafter, hidden, tokens, found, B, W, L, C);                               \
      });                                                                                         \
      return levels;                                                                              \
    };                                                                                            \
    if (sizes[8]) return search(static_cast<const Integers *>(nullptr));                          \
    return search(static_cast<const E *>(nullptr));                                               \
  }

void specdec_ask_for_huge_pages(void *start, int64_t size) { ask_for_huge_pages(start, size); }

// What a packed matrix of integers takes, in bytes.
int64_t specdec_measure_integers(const Integers *sizes) { return measure_integers(*sizes); }

void specdec_pack_integers(const uint8_t *codes, const float *scales, const uint8_t *zeros,
                           const float *input_scales, const int32_t *order, const Integers *sizes,
                           char *packed) {
  pack_integers(codes, scales, zeros, input_scales, order, *sizes, packed);
}

SPECDEC_EXPORT(float, f32)
SPECDEC_EXPORT(bf16, bf16)
SPECDEC_EXPORT(half, f16)
}
