// Native kernels of the embedded engine: what lies between the linears of a decoder layer.
//
// Plain C interface, no torch headers: specdec-build compiles this file in a second or two for the
// machine it runs on, specdec/engine/native.py calls it. Every function exists for float32 and
// bfloat16; arithmetic is float32, results are rounded to nearest even.
//
// Legend: B rows, T tokens a row, N query heads, K key/value heads, H head size, S positions,
// R cache rows, D hidden, I inner size.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

inline void store(float &to, float x) { to = x; }

inline void store(bf16 &to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = x != x ? 0x7fc0u : static_cast<uint16_t>(rounded);
}

template <typename E>
inline float round_through(float x) {
  E stored;
  store(stored, x);
  return to_float(stored);
}

// exp with a relative error below 2e-7 on [-87, 0], written so that compilers vectorize it:
// 2^k * polynomial(r), x = k ln 2 + r with |r| <= ln 2 / 2.
inline float exp_fast(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float k = std::nearbyint(x * 1.44269504088896341f);
  float r = x - k * 0.693359375f;
  r -= k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent = (static_cast<int32_t>(k) + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}

// Below this many multiply-adds a thread team costs more than it saves.
constexpr int64_t kParallelWork = 1 << 15;

template <typename E>
void rms_norm_row(const E *x, const E *weight, E *out, int64_t D, float epsilon) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < D; ++i) {
    float v = to_float(x[i]);
    sum += v * v;
  }
  float scale = 1.0f / std::sqrt(sum / static_cast<float>(D) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < D; ++i)
    store(out[i], round_through<E>(to_float(x[i]) * scale) * to_float(weight[i]));
}

template <typename E>
void rms_norm(const E *x, const E *weight, E *out, int64_t rows, int64_t D, float epsilon) {
#pragma omp parallel for if (rows * D > kParallelWork)
  for (int64_t r = 0; r < rows; ++r) rms_norm_row(x + r * D, weight, out + r * D, D, epsilon);
}

template <typename E>
void add_rms_norm(E *x, const E *delta, const E *weight, E *out, int64_t rows, int64_t D,
                  float epsilon) {
#pragma omp parallel for if (rows * D > kParallelWork)
  for (int64_t r = 0; r < rows; ++r) {
    E *row = x + r * D;
    const E *add = delta + r * D;
#pragma omp simd
    for (int64_t i = 0; i < D; ++i) store(row[i], to_float(row[i]) + to_float(add[i]));
    rms_norm_row(row, weight, out + r * D, D, epsilon);
  }
}

template <typename E>
void silu_mul(const E *gate_up, E *out, int64_t rows, int64_t I) {
#pragma omp parallel for if (rows * I > kParallelWork)
  for (int64_t r = 0; r < rows; ++r) {
    const E *gate = gate_up + r * 2 * I, *up = gate + I;
    E *to = out + r * I;
#pragma omp simd
    for (int64_t i = 0; i < I; ++i) {
      float g = to_float(gate[i]);
      float e = exp_fast(-(g < 0 ? -g : g));  // in (0, 1]: never overflows
      float sigmoid = (g < 0 ? e : 1.0f) / (1.0f + e);
      store(to[i], round_through<E>(g * sigmoid) * to_float(up[i]));
    }
  }
}

template <typename E>
void rotate_to(const E *from, E *to, const E *cosine, const E *sine, int64_t H) {
  int64_t half = H / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    float a = to_float(from[i]), b = to_float(from[i + half]);
    store(to[i], a * to_float(cosine[i]) - b * to_float(sine[i]));
    store(to[i + half], b * to_float(cosine[i + half]) + a * to_float(sine[i + half]));
  }
}

// qkv: [B, T, (N + 2K) H], rotated in place; cache: keys [R, K, S, H] then values of one layer;
// cosine, sine: [positions, H]; tree_mask: [B, T, T]; out: [B, T, N H].
template <typename E>
void attend(E *qkv, E *cache, const E *cosine, const E *sine, const int64_t *rows,
            const int64_t *positions, const int64_t *past, const uint8_t *tree_mask, E *out,
            int64_t B, int64_t T, int64_t N, int64_t K, int64_t H, int64_t R, int64_t S) {
  const int64_t stride = (N + 2 * K) * H, group = N / K, head = S * H;
  E *key_cache = cache, *value_cache = cache + R * K * head;
  const bool parallel_rotate = B * T * stride > kParallelWork;
#pragma omp parallel for if (parallel_rotate)
  for (int64_t bt = 0; bt < B * T; ++bt) {
    const int64_t b = bt / T, slot = past[b] + bt % T, p = positions[bt];
    E *token = qkv + bt * stride;
    for (int64_t n = 0; n < N; ++n)
      rotate_to(token + n * H, token + n * H, cosine + p * H, sine + p * H, H);
    for (int64_t k = 0; k < K; ++k) {
      const int64_t at = (rows[b] * K + k) * head + slot * H;
      rotate_to(token + (N + k) * H, key_cache + at, cosine + p * H, sine + p * H, H);
      std::memcpy(value_cache + at, token + (N + K + k) * H, sizeof(E) * H);
    }
  }
  int64_t longest = 0;
  for (int64_t b = 0; b < B; ++b) longest = past[b] + T > longest ? past[b] + T : longest;
  const float scale = 1.0f / std::sqrt(static_cast<float>(H));
  const bool parallel_attend = B * T * N * H * longest > kParallelWork;
#pragma omp parallel if (parallel_attend)
  {
    // Per thread: queries and sums [group, H], scores [group, S], one key or value row [H].
    std::vector<float> queries(group * H), sums(group * H), scores(group * longest), row(H);
    std::vector<int64_t> visible(longest);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < B * K * T; ++item) {
      const int64_t b = item / (K * T), k = item / T % K, t = item % T;
      const uint8_t *mask = tree_mask + (b * T + t) * T;
      const E *keys = key_cache + (rows[b] * K + k) * head;
      const E *values = value_cache + (rows[b] * K + k) * head;
      const E *query = qkv + (b * T + t) * stride + k * group * H;
      int64_t count = past[b];
      for (int64_t s = 0; s < count; ++s) visible[s] = s;
      for (int64_t j = 0; j < T; ++j)
        if (mask[j]) visible[count++] = past[b] + j;
      for (int64_t i = 0; i < group * H; ++i) {
        queries[i] = to_float(query[i]) * scale;
        sums[i] = 0.0f;
      }
      for (int64_t v = 0; v < count; ++v) {
        const E *from = keys + visible[v] * H;
        float *to = row.data();
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) to[i] = to_float(from[i]);
        for (int64_t g = 0; g < group; ++g) {
          const float *q = queries.data() + g * H;
          float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
          for (int64_t i = 0; i < H; ++i) dot += q[i] * to[i];
          scores[g * longest + v] = dot;
        }
      }
      for (int64_t g = 0; g < group; ++g) {
        float *s = scores.data() + g * longest;
        float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t v = 0; v < count; ++v) top = s[v] > top ? s[v] : top;
#pragma omp simd reduction(+ : total)
        for (int64_t v = 0; v < count; ++v) {
          s[v] = exp_fast(s[v] - top);
          total += s[v];
        }
        const float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t v = 0; v < count; ++v) s[v] *= inverse;
      }
      for (int64_t v = 0; v < count; ++v) {
        const E *from = values + visible[v] * H;
        float *to = row.data();
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) to[i] = to_float(from[i]);
        for (int64_t g = 0; g < group; ++g) {
          const float weight = scores[g * longest + v];
          float *sum = sums.data() + g * H;
#pragma omp simd
          for (int64_t i = 0; i < H; ++i) sum[i] += weight * to[i];
        }
      }
      E *to = out + ((b * T + t) * N + k * group) * H;
      for (int64_t i = 0; i < group * H; ++i) store(to[i], sums[i]);
    }
  }
}

}  // namespace

extern "C" {

// Bumped with every change of a signature below; checked when an engine is loaded.
int64_t specdec_abi_version() { return 1; }

#define SPECDEC_EXPORT(E, suffix)                                                                 \
  void specdec_rms_norm_##suffix(const E *x, const E *weight, E *out, int64_t rows, int64_t D,    \
                                 float epsilon) {                                                 \
    rms_norm(x, weight, out, rows, D, epsilon);                                                   \
  }                                                                                               \
  void specdec_add_rms_norm_##suffix(E *x, const E *delta, const E *weight, E *out, int64_t rows, \
                                     int64_t D, float epsilon) {                                  \
    add_rms_norm(x, delta, weight, out, rows, D, epsilon);                                        \
  }                                                                                               \
  void specdec_silu_mul_##suffix(const E *gate_up, E *out, int64_t rows, int64_t I) {             \
    silu_mul(gate_up, out, rows, I);                                                              \
  }                                                                                               \
  void specdec_attend_##suffix(E *qkv, E *cache, const E *cosine, const E *sine,                  \
                               const int64_t *rows, const int64_t *positions,                     \
                               const int64_t *past, const uint8_t *tree_mask, E *out, int64_t B,  \
                               int64_t T, int64_t N, int64_t K, int64_t H, int64_t R,             \
                               int64_t S) {                                                       \
    attend(qkv, cache, cosine, sine, rows, positions, past, tree_mask, out, B, T, N, K, H, R, S); \
  }

SPECDEC_EXPORT(float, f32)
SPECDEC_EXPORT(bf16, bf16)
}
