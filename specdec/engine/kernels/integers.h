// Products with packed matrices of integers.

#pragma once

#include "gemm.h"

namespace {

// Matrices of integers: weight[n, i] = scale[n, g] * (code[n, i] - zero[n, g]) with codes of 4 bits
// from 0 to 15 or of 8 bits from 1 to 255, where g is the input's group of `group` inputs, or the
// same for a whole row. What they are multiplied with are not the inputs but these, rounded, which
// is part of what such a matrix means: of each group of a row's inputs the largest magnitude becomes
// 127 and the others the nearest of the integers, ties to even. Sums over a group are of integers and
// exact, in whatever form a processor takes them; each is scaled by the inputs' scale, then by the
// weight's, and added to the float32 sum of the groups before it.

// Header of a packed one; what it has of input scales [depth] and of the order of inputs [depth]
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

// Adds products of bytes in sums of 16 bits, each of two bytes' products.
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

// The largest of a vector's numbers, and the sum of them all.
inline uint32_t find_largest(Words x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)x);
#else
  uint32_t largest_bits = 0;
  for (int64_t j = 0; j < kVector; ++j) largest_bits = std::max<uint32_t>(largest_bits, x[j]);
  return largest_bits;
#endif
}

inline int32_t add_up(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int64_t j = 0; j < kVector; ++j) sum += x[j];
  return sum;
#endif
}

// kSize inputs as bytes, and their sum; returns their scale: one byte is so much. Where an input is not
// finite, neither is the scale.
template <int64_t kSize>
inline float round_group(const float *x, int8_t *bytes, int32_t &sum) {
  Words top{};
  for (int64_t i = 0; i < kSize; i += kVector) {
    const Words magnitude = load<Words>(x + i) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  const uint32_t largest_bits = find_largest(top);
  const float largest = as_float(largest_bits);
  if (largest_bits >= 0x7f800000u) {
    std::memset(bytes, 0, kSize);
    sum = 0;
    return as_float(0x7fc00000u);
  }
  const bool is_zero = largest < kSmallest;
  const float factor = is_zero ? 0.0f : kLargest / largest;
  Ints sums{};
  for (int64_t i = 0; i < kSize; i += kVector) {
    typedef int8_t Bytes __attribute__((vector_size(kVector)));
    const Ints rounded = round_to_ints(load<Floats>(x + i) * factor);
    const Bytes narrow = __builtin_convertvector(rounded, Bytes);
    sums += rounded;
    std::memcpy(bytes + i, &narrow, sizeof narrow);
  }
  sum = add_up(sums);
  return is_zero ? 0.0f : largest / kLargest;
}

template <int kBits>
struct IntegerMatrix {
  typedef uint32_t Input;
  static constexpr int kMostRows = kMaxRows, kMostTiles = kWideTiles;
  static constexpr int64_t kElements = 32 / kBits;  // inputs of a step, of each output
  static constexpr bool kHasShorts = kSumsShorts && kBits == 4;
  static constexpr bool kHasBytes = kMultipliesBytes || kHasShorts;
  static constexpr int kParts = (kHasBytes ? 8 : 16) / kBits;
  static constexpr int64_t kNearRows = kNearProducts / kParts;
  static constexpr int64_t kHead = 3;  // inputs that each group of a row begins with
  static constexpr int64_t turn = kTurn;
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
    const char *bytes = reinterpret_cast<const char *>(packed + 1);
    if (packed->has_input_scales) {
      input_scales = reinterpret_cast<const float *>(bytes);
      bytes += list_bytes;
    }
    if (packed->has_order) {
      order = reinterpret_cast<const int32_t *>(bytes);
      bytes += list_bytes;
    }
    tiles = bytes;
  }

  // Returns one of the kParts vectors of bytes or pairs in a stored one. Byte b of a lane holds input b
  // of its step, with 4 bits also input b + 4 in the upper half; a pair is of inputs two apart.
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
      const int first_input = kBits == 8 ? part : part / 2 + part % 2 * 4;
      return static_cast<uint16_t>(step[first_input]) | static_cast<uint32_t>(step[first_input + 2]) << 16;
    }
  }

  // Group g of a row's inputs as kMaxGroup bytes, zeros beyond it, and their sum; returns their scale.
  float round(const Numbers &x, int64_t row, int64_t g, int8_t *bytes, int32_t &sum) const {
    const int64_t group = group_steps * kElements, first = g * group;
    const int64_t count = std::min(group, depth - first);
    float numbers[kMaxGroup] = {};
    if (order == nullptr && input_scales == nullptr) {
      widen_numbers(x, row * depth + first, count, numbers);
    } else {
      x.visit([&](const auto *from) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t which = order == nullptr ? first + i : order[first + i];
          const float scale = input_scales == nullptr ? 1.0f : input_scales[which];
          numbers[i] = to_float(from[row * depth + which]) * scale;
        }
      });
    }
    return round_group<kMaxGroup>(numbers, bytes, sum);
  }

  // First summand of a group's sum where zeros are the usual, for inputs of this sum.
  static int32_t begin_sum(int32_t sum) { return -(kBits == 4 ? 8 : kByteZero) * sum; }

  // Of every group of every row its scale, what its sum begins with, the sum of its inputs, and
  // these: each [rows].
  void pack(const Numbers &x, int64_t first_row, int64_t rows, int64_t begin, int64_t end,
            uint32_t *to) const {
    for (int64_t g = begin / group_steps; g * group_steps < end; ++g) {
      uint32_t *start = to + g * group_row * rows;
      for (int64_t m = 0; m < rows; ++m) {
        int8_t bytes[kMaxGroup];
        int32_t sum = 0;
        start[m] = as_bits(round(x, first_row + m, g, bytes, sum));
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
          const char *step_end = from + (pause - step) * kStepBytes;
          for (; from < step_end; from += kStepBytes, ahead += fetch.stride, x_step += kParts * M) {
            fetch.fetch(ahead);
            Words w[kWords];
            for (int64_t k = 0; k < kWords; ++k) w[k] = load<Words>(from + k * 4 * kVector);
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
              Words unpacked[kWords];
              for (int64_t k = 0; k < kWords; ++k) unpacked[k] = unpack(w[k], part);
#pragma GCC unroll 12
              for (int m = 0; m < M; ++m) {
                const Words inputs = spread<Words>(x_step[part * M + m]);
#pragma GCC unroll 2
                for (int64_t k = 0; k < kWords; ++k)
                  if constexpr (kHasShorts)
                    shorts[k][m] = add_shorts(shorts[k][m], unpacked[k], inputs);
                  else
                    sums[g][k][m] = add_parts(sums[g][k][m], unpacked[k], inputs);
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

// Lays out a matrix of integers. codes: of 8 bits [N, depth], or of 4 bits [N / 2, depth], rows 2 r and
// 2 r + 1 in the lower and upper halves of row r; both signed, so that 0 is the usual zero. scales,
// zeros: [N, groups], or [N] where there is one a row.
template <int kBits>
void pack_tiles(const uint8_t *codes, const float *scales, const uint8_t *zeros,
                const Integers *packed) {
  const IntegerMatrix<kBits> w(packed);
  const int64_t N = packed->N, listed = w.scales_bytes / kTile / 4;
  const int64_t tiles = (N + kTile - 1) / kTile;
  char *first_tile = const_cast<char *>(w.tiles);
  for_each(tiles, N * w.depth > kParallelWork, [&](int64_t t) {
    char *tile = first_tile + t * w.tile_bytes;
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
          const int64_t first_input = step * kElements, count = std::min(kElements, w.depth - first_input);
          uint32_t words[2] = {};
          std::memcpy(words, row + first_input, count);
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
  char *destination = packed + sizeof sizes;
  for (const void *list : {static_cast<const void *>(input_scales), static_cast<const void *>(order)})
    if (list != nullptr) {
      std::memcpy(destination, list, sizes.depth * 4);
      destination += round_up(sizes.depth * 4, kLine);
    }
  const auto *head = reinterpret_cast<const Integers *>(packed);
  if (sizes.bits == 4)
    pack_tiles<4>(codes, scales, zeros, head);
  else
    pack_tiles<8>(codes, scales, zeros, head);
}

}  // namespace
