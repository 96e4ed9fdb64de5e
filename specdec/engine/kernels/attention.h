// Attention of a step's tokens over the cache.

#pragma once

#include "amx.h"
#include "norms.h"

namespace {

// How a layer attends. q_norm, k_norm: weights [H] of the norms of each query and each key before
// they are rotated, or null; cosine, sine: [lines, rotated]; window: positions that a token sees,
// itself included, or 0 for all; scale: of the scores; cap: a score s becomes cap tanh(s / cap), or 0
// where it stays; epsilon: of the norms, offset: what their weights are stored less.
template <typename E>
struct Attention {
  const E *q_norm, *k_norm, *cosine, *sine;
  int64_t rotated, window;
  float scale, cap, epsilon, offset = 0.0f;
};

// A token's attention is summed by blocks of kBlockPositions of the text before it. In each, scores
// are products of queries with keys, the block's result is that of weights with values, both summed
// in order; then blocks are merged in order. Where a block ends depends on a token's place in its
// text alone, not on the step: so blocks can be shared out to threads.
constexpr int64_t kBlockPositions = 512;
// Queries that use keys and values at a time, while these are cached: of a step of up to so many
// all, of longer ones half as many.
constexpr int64_t kQueries = 128;
// Steps of as many queries may be halved for more threads: fewer take little longer together.
constexpr int64_t kEvenQueries = 16;

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
    for (int v = 0; v < Vectors; ++v) b[v] = pin(load<Floats>(B + i * b_row + v * kVector));
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

// C [rows, columns] = A [rows, depth] B [depth, b_row], columns in whole vectors; added to what is
// there but where it is the first.
inline void add_product(const float *A, int64_t rows, int64_t a_row, const float *B, int64_t b_row,
                        int64_t columns, int64_t depth, float *C, int64_t c_row, bool is_first) {
  int64_t c = 0;
  for (; c + kSpan <= columns; c += kSpan)
    add_rows<kSpanVectors>(A, rows, a_row, B + c, b_row, depth, C + c, c_row, is_first);
  for (; c < columns; c += kVector)
    add_rows<1>(A, rows, a_row, B + c, b_row, depth, C + c, c_row, is_first);
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
    __builtin_prefetch(ahead + at, 0, kFetchesFar ? 2 : 3);
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
    // With few queries a whole span takes no longer than a part.
    const int64_t used = count < kSpanRows ? kSpan : std::min(kSpan, round_up(num_keys - p, kVector));
    add_product(queries, count, H, scratch, kSpan, used, H, scores + p, stride, true);
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
    add_product(weights + v, count, stride, scratch, width, width, some, sums, width, v == 0);
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
  constexpr int64_t kPart = kLanes * kLine;
  const Sums<4> sums{{to, to + kPart, to + 2 * kPart, to + 3 * kPart}, kLine};
  sums.clear();
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
  sums.store();
}

// Sums of the weights of kLanes queries times kTiles tiles of values.
template <int kTiles>
inline void add_weighted_amx(const char *weights, const char *values, int64_t row, int64_t bands,
                             const char *from, char *to) {
  Sums<kTiles> sums;
  sums.row = row;
  for (int64_t at = 0; at < kTiles; ++at) sums.places[at] = to + at * kLine;
  if (from == nullptr)
    sums.clear();
  else
    sums.load(from - to);
  for (int64_t band = 0; band < bands; ++band, weights += kLanes * kLine, values += kBand * row) {
    load_register<4>(weights, kLine);
    sums.for_each([&](auto tile) {
      constexpr int kAt = decltype(tile)::value;
      load_register<5 + kAt % 3>(values + kAt * kLine, row);
      multiply_registers<kAt, 4, 5 + kAt % 3>();
    });
  }
  sums.store();
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

// A step of B rows with T tokens each. rows, past: [B], a row's place in the cache and how many tokens
// are committed there; lines: [B, T], a token's line of the rotary tables; positions: [B, C], of the C
// newest tokens in the cache in their sequence, the step's own last; tree_mask: [B, T, C], of the same;
// wanted: [B, T], zero where a result may be anything, or null. All of it stays as it is until the call
// is over.
struct Step {
  int64_t B, T, C;
  const int64_t *rows, *positions, *lines, *past;
  const uint8_t *tree_mask, *wanted;
};

// N query heads and K key/value heads of H numbers, and a cache of R rows with S positions.
struct Heads {
  int64_t N, K, H, R, S;
};

// A layer's attention over a step. qkv: [B, T, (N + 2K) H], normed and rotated in place; cache: keys
// [R, K, S, H] then values of one layer; out: [B, T, N H].
//
// The queries of a K/V head are numbered q = t * group + g, and go by tiles; a tile of a K/V head of a
// row is an item. Where there are fewer items than threads, the blocks of each are shared out in parts,
// and merged afterwards. Threads have a copy of this object, which points to nothing that another layer
// changes but for numbers: a thread that is late computes what is not taken, and nothing worse.
template <typename E>
class Attend {
 public:
  Attend(E *qkv, E *cache, const Attention<E> &how, const Step &step, const Heads &heads, E *out)
      : how(how), step(step), heads(heads), qkv(qkv), out(out), key_cache(cache),
        value_cache(cache + heads.R * heads.K * heads.S * heads.H) {
    for (int64_t b = 0; b < step.B; ++b) {
      const Range range = find_range(b);
      longest = std::max(longest, step.past[b] + step.C - range.first * kBlockPositions);
      most_blocks = std::max(most_blocks, range.count());
    }
    const int64_t num_queries = step.T * group;
    tile = num_queries > kQueries ? kQueries / 2 : num_queries;
    // Where no blocks can be shared out, half as many queries leave fewer threads without any.
    const bool is_uneven = most_blocks == 1 && step.B * heads.K % count_threads() != 0;
    if (is_uneven && tile == num_queries && tile >= kEvenQueries) tile = round_up(tile / 2, kSpanRows);
    tiles = (num_queries + tile - 1) / tile;
    line_size = round_up(std::min(longest, kBlockPositions + step.C), kSpan);
    found_queries = kByBands ? round_up(tile, kLanes) : tile;
    found_size = round_up(found_queries * (width + 2), kSums);  // so that what follows is aligned
  }

  void run() {
    for_each(step.B * step.T, step.B * step.T * stride > kParallelWork, [&](int64_t bt) { rotate(bt); });
    const bool is_long = step.B * step.T * heads.N * heads.H * longest > kParallelWork;
    with_crew(is_long, [&] {
      const int64_t threads = is_long ? count_threads() : 1, items = step.B * heads.K * tiles;
      if (items % threads != 0) parts = std::min(most_blocks, (4 * threads + items - 1) / items);
      static thread_local std::vector<float> memory;
      if (parts > 1) kept = borrow(memory, items * most_blocks * found_size);
      const Attend own = *this;
      share_repeatable(items * parts, 1, is_long, [own](const Hold &hold, int64_t begin, int64_t end) {
        own.run_parts(hold, begin, end);
      });
      if (parts == 1) return;
      share_repeatable(items, 1, is_long, [own](const Hold &hold, int64_t begin, int64_t end) {
        own.merge_items(hold, begin, end);
      });
    });
  }

 private:
  static constexpr bool kByBands = kSumsBands && std::is_same<E, bf16>::value;

  // A row's blocks that only hold committed positions; `last` is that of the newest ones, with the
  // step's tokens. Those may lie in more than one block, by their places in the text.
  struct Range {
    int64_t first, last, num_last;
    bool is_chain;  // each of the step's tokens lies at its place, so all blocks are alike
    int64_t count() const { return last + num_last - first; }
  };

  // The row, the K/V head and the queries of an item, and what it reads.
  struct Item {
    int64_t number, b, k, first, count;
    const E *keys, *values;
    Range range;
  };

  // What a thread needs.
  struct Memory {
    Found whole, block;
    LaneMemory lanes;
    float *queries, *scores, *weights, *wide, *line;
    std::vector<int32_t> *seen;  // of the item's row
    bool by_amx = false;
#if SPECDEC_AMX
    std::optional<Registers> registers;
#endif

    Memory(const Attend &own, float *at)
        : whole(at, own.found_queries, own.width),
          block(at + own.found_size, own.found_queries, own.width),
          lanes(at + 2 * own.found_size, own.found_queries, own.heads.H, own.step.C),
          queries(at + 2 * own.found_size),
          scores(queries + own.tile * own.heads.H),
          weights(scores + own.tile * own.line_size),
          wide(weights + own.tile * own.line_size),
          line(wide + kSpan * own.width) {
#if SPECDEC_AMX
      by_amx = kByBands && can_use_amx();
      if (by_amx) registers.emplace(kAmxRows);
#endif
      static thread_local std::vector<int32_t> slots;
      seen = &slots;
    }
  };

  float *get_memory() const {
    static thread_local std::vector<Line> memory;
    const int64_t size = kByBands ? LaneMemory::measure(found_queries, heads.H, step.C)
                                  : tile * (heads.H + 2 * line_size) + kSpan * width + kBlockPositions;
    return reinterpret_cast<float *>(borrow(memory, (2 * found_size + size) * 4 / kLine + 1));
  }

  void rotate(int64_t bt) {
    const int64_t b = bt / step.T, slot = step.past[b] + step.C - step.T + bt % step.T;
    const int64_t line = step.lines[bt] * how.rotated, H = heads.H;
    const E *cosine = how.cosine + line, *sine = how.sine + line;
    E *token = qkv + bt * stride;
    for (int64_t n = 0; n < heads.N + heads.K && how.q_norm != nullptr; ++n)
      rms_norm_row(token + n * H, n < heads.N ? how.q_norm : how.k_norm, token + n * H, H,
                   how.epsilon, how.offset);
    for (int64_t n = 0; n < heads.N && how.rotated > 0; ++n)
      rotate_to(token + n * H, token + n * H, cosine, sine, how.rotated, H);
    for (int64_t k = 0; k < heads.K; ++k) {
      const int64_t at = (step.rows[b] * heads.K + k) * head_size + slot * H;
      rotate_to(token + (heads.N + k) * H, key_cache + at, cosine, sine, how.rotated, H);
      std::memcpy(value_cache + at, token + (heads.N + heads.K + k) * H, sizeof(E) * H);
    }
  }

  // The first committed position that a token sees: those are stored at their own numbers.
  int64_t find_first(int64_t b, int64_t t) const {
    return std::clamp<int64_t>(get_lowest(b, t), 0, step.past[b]);
  }

  // Positions of a row's newest tokens [C], of which the last T are the step's own.
  const int64_t *get_positions(int64_t b) const { return step.positions + b * step.C; }

  int64_t get_position(int64_t b, int64_t t) const { return get_positions(b)[step.C - step.T + t]; }

  // The lowest position that a token's window holds.
  int64_t get_lowest(int64_t b, int64_t t) const {
    return how.window > 0 ? get_position(b, t) - how.window + 1 : 0;
  }

  const uint8_t *get_mask(int64_t b, int64_t t) const {
    return step.tree_mask + (b * step.T + t) * step.C;
  }

  bool is_chain(int64_t b) const {
    const auto is_seen = [](uint8_t seen) { return seen != 0; };
    for (int64_t t = 0; t < step.T; ++t) {
      const uint8_t *mask = get_mask(b, t);
      if (how.window > 0 && get_position(b, t) != step.past[b] + t) return false;
      if (!std::all_of(mask, mask + t + 1, is_seen)) return false;
      if (std::any_of(mask + t + 1, mask + step.C, is_seen)) return false;
    }
    return true;
  }

  Range find_range(int64_t b) const {
    int64_t first = step.past[b];
    for (int64_t t = 0; t < step.T; ++t) first = std::min(first, find_first(b, t));
    const int64_t last = step.past[b] / kBlockPositions;
    const int64_t num_last = (step.past[b] % kBlockPositions + step.C - 1) / kBlockPositions + 1;
    if (kByBands && step.C == step.T && is_chain(b))
      return {first / kBlockPositions, last + num_last - 1, 1, true};
    return {first / kBlockPositions, last, num_last, false};
  }

  Item get_item(int64_t number) const {
    const int64_t b = number / (heads.K * tiles), k = number / tiles % heads.K;
    const int64_t first = number % tiles * tile, at = (step.rows[b] * heads.K + k) * head_size;
    return {number, b, k, first, std::min(tile, step.T * group - first), key_cache + at,
            value_cache + at, find_range(b)};
  }

  int64_t get_token(const Item &item, int64_t q) const { return (item.first + q) / group; }

  int64_t get_head(const Item &item, int64_t q) const {
    return item.k * group + (item.first + q) % group;
  }

  const E *get_query(const Item &item, int64_t q) const {
    return qkv + (item.b * step.T + get_token(item, q)) * stride + get_head(item, q) * heads.H;
  }

  bool is_wanted(const Item &item) const {
    if (step.wanted == nullptr) return true;
    const uint8_t *own = step.wanted + item.b * step.T;
    return std::any_of(own + get_token(item, 0), own + get_token(item, item.count - 1) + 1,
                       [](uint8_t is_set) { return is_set != 0; });
  }

  void finish(const Hold &hold, const Item &item, const Found &found) const {
    hold.put([&] {
      for (int64_t q = 0; q < item.count; ++q) {
        const float *sums = found.sums + q * width;
        E *to = out + ((item.b * step.T + get_token(item, q)) * heads.N + get_head(item, q)) * heads.H;
        for (int64_t h = 0; h < heads.H; ++h) store(to[h], sums[h] / found.totals[q]);
      }
    });
  }

  Found find_kept(const Item &item, int64_t block) const {
    return Found(kept + (item.number * most_blocks + block) * found_size, found_queries, width);
  }

  void run_parts(const Hold &hold, int64_t begin, int64_t end) const {
    Memory memory(*this, get_memory());
    for (int64_t at = begin; at < end; ++at) {
      const Item item = get_item(at / parts);
      if (!is_wanted(item)) continue;
      if (parts > 1) {
        run_part(memory, item, at % parts, [&](int64_t block, const Found &found) {
          hold.put([&] { std::copy_n(found.sums, found_size, find_kept(item, block).sums); });
        });
        continue;
      }
      memory.whole.clear(item.count);
      run_part(memory, item, 0,
               [&](int64_t, const Found &found) { memory.whole.add(found, item.count); });
      finish(hold, item, memory.whole);
    }
  }

  void merge_items(const Hold &hold, int64_t begin, int64_t end) const {
    const Found whole(get_memory(), found_queries, width);
    for (int64_t at = begin; at < end; ++at) {
      const Item item = get_item(at);
      if (!is_wanted(item)) continue;
      whole.clear(item.count);
      for (int64_t i = 0; i < item.range.count(); ++i) whole.add(find_kept(item, i), item.count);
      finish(hold, item, whole);
    }
  }

  // Hands what is found in each block that a part of an item has, and the block's number, to `take`.
  template <typename Take>
  void run_part(Memory &memory, const Item &item, int64_t part, const Take &take) const {
    const int64_t blocks = item.range.last + 1 - item.range.first;
    const int64_t begin = item.range.first + blocks * part / parts;
    const int64_t end = item.range.first + blocks * (part + 1) / parts;
    if constexpr (kByBands) {
      if (!item.range.is_chain) list_seen(item.b, *memory.seen);
      for (int64_t q = 0; q < item.count; q += kLanes)
        pair_queries([&](int64_t lane) { return get_query(item, std::min(q + lane, item.count - 1)); },
                     heads.H, memory.lanes.queries + q * memory.lanes.query_words);
      for (int64_t block = begin; block < end; ++block)
        run_lanes(memory, item, block, block + 1 < end, take);
    } else {
      for (int64_t q = 0; q < item.count; ++q) {
        const E *query = get_query(item, q);
        for (int64_t h = 0; h < heads.H; ++h)
          memory.queries[q * heads.H + h] = to_float(query[h]) * how.scale;
      }
      for (int64_t block = begin; block < end; ++block) run_block(memory, item, block, take);
    }
  }

  template <typename Take>
  void run_block(Memory &memory, const Item &item, int64_t block, const Take &take) const {
    const int64_t base = block * kBlockPositions, past = step.past[item.b], H = heads.H;
    const bool is_last = block == item.range.last;
    const int64_t length = is_last ? past + step.C - base : kBlockPositions;
    score(memory.queries, item.count, item.keys + base * H, length, H, how.cap, memory.wide,
          memory.scores, line_size);
    for (int64_t i = 0; i < (is_last ? item.range.num_last : 1); ++i) {
      int64_t begin = 0;
      if (is_last) {
        begin = i > 0 ? past - base : 0;
        weigh_newest(memory, item, i);
      } else {
        for (int64_t q = 0; q < item.count; ++q) {
          float *line = memory.scores + q * line_size;
          const int64_t unseen = find_first(item.b, get_token(item, q)) - base;
          if (unseen > 0) std::fill_n(line, std::min(unseen, kBlockPositions), kHidden);
          weigh(line, kBlockPositions, memory.block.tops[q], memory.block.totals[q]);
        }
      }
      add_values((is_last ? memory.weights : memory.scores) + begin, item.count, line_size,
                 item.values + (base + begin) * H, length - begin, H, memory.wide, memory.block.sums,
                 width);
      take(block - item.range.first + i, memory.block);
    }
  }

  // The weights of the newest positions, those in their block `part` of the text: a token's place
  // is the number of those before it that are seen with it. memory.line: the block in that order.
  void weigh_newest(Memory &memory, const Item &item, int64_t part) const {
    const int64_t past = step.past[item.b], before = past % kBlockPositions;
    const int64_t begin = part * kBlockPositions, C = step.C;
    const int64_t used = std::min(kBlockPositions, before + C - begin);
    const int64_t committed = part == 0 ? before : 0;
    float *line = memory.line;
    for (int64_t q = 0; q < item.count; ++q) {
      const int64_t t = get_token(item, q), lowest = get_lowest(item.b, t);
      const int64_t *positions = get_positions(item.b);
      const uint8_t *mask = get_mask(item.b, t);
      const float *from = memory.scores + q * line_size;
      float *to = memory.weights + q * line_size;
      std::copy_n(from, committed, line);
      std::fill(line + committed, line + round_up(used, kSums), kHidden);
      const int64_t unseen = find_first(item.b, t) - (past - before);
      std::fill(line, line + std::max<int64_t>(0, std::min(committed, unseen)), kHidden);
      for (int64_t j = 0, at = before - begin; j < C; ++j)
        if (mask[j] && ++at > 0 && at <= used && positions[j] >= lowest)
          line[at - 1] = from[before + j];
      weigh(line, round_up(used, kSums), memory.block.tops[q], memory.block.totals[q]);
      std::copy_n(line, committed, to);
      for (int64_t j = 0, at = before - begin; j < C; ++j)
        to[before + j] = mask[j] && ++at > 0 && at <= used ? line[at - 1] : 0.0f;
    }
  }

  // Of each of a row's tokens [T, C + 1]: which of the newest tokens it sees, and as the last how many.
  void list_seen(int64_t b, std::vector<int32_t> &seen) const {
    seen.assign(step.T * (step.C + 1), 0);
    for (int64_t t = 0; t < step.T; ++t) {
      int32_t *slots = &seen[t * (step.C + 1)];
      const uint8_t *mask = get_mask(b, t);
      for (int64_t j = 0; j < step.C; ++j)
        if (mask[j]) slots[slots[step.C]++] = static_cast<int32_t>(j);
    }
  }

  const int32_t *get_seen(const Memory &memory, const Item &item, int64_t q) const {
    return &(*memory.seen)[get_token(item, q) * (step.C + 1)];
  }

  // A block by lanes. `length` positions are there for all queries, `common` of them in bands that are
  // the same for all; `newest` committed ones are in the block of the step's tokens.
  struct LaneBlock {
    int64_t base, length, common, newest;
    bool is_tree;
    Ahead next;  // of what the block after this one reads

    int64_t count_bands() const { return common / kBandPositions; }
  };

  // The same as run_block, by lanes. While the first queries read keys, values are fetched; then the
  // next block's keys.
  template <typename Take>
  void run_lanes(Memory &memory, const Item &item, int64_t number, bool has_next, const Take &take) const {
    const Range &range = item.range;
    const int64_t past = step.past[item.b], base = number * kBlockPositions, H = heads.H;
    const int64_t newest = past % kBlockPositions;
    const bool is_tree = number == range.last && !range.is_chain;
    const int64_t length = is_tree ? newest : std::min(kBlockPositions, past + step.C - base);
    const int64_t common =
        is_tree ? newest / kBandPositions * kBandPositions : round_up(length, kBandPositions);
    const int64_t lines = kBandPositions * H * 2 / kLine;  // of a band's
    const char *next = reinterpret_cast<const char *>(item.keys + (base + kBlockPositions) * H);
    const LaneBlock block{base, length, common, newest, is_tree, {next, has_next ? lines / 2 : 0}};
    for (int64_t i = 0; i < (is_tree ? range.num_last : 1); ++i) {
      const int64_t begin = i * kBlockPositions - newest;  // the first of the step's here
      const int64_t before = i == 0 ? length : 0, bands = i == 0 ? block.count_bands() : 0;
      for (int64_t q = 0; q < item.count; q += kLanes) {
        const int64_t some = std::min(kLanes, item.count - q);
        const bool is_first = i == 0 && q == 0;
        const Ahead at_values{reinterpret_cast<const char *>(item.values + base * H),
                              is_first ? lines * kKeys / kBandPositions : 0};
        if (before > 0) score_keys(memory, item, base, before, q, at_values, memory.lanes.scores);
        const int64_t places = hide_unseen(memory, item, block, q, begin, before);
        if (is_tree) put_newest_scores(memory, item, q, begin);
        float *sums = memory.block.sums + q * width;
        weigh_lanes(memory.lanes.scores, places, is_capped() ? 1.0f : how.scale,
                    is_first ? block.next : Ahead{nullptr, 0}, memory.lanes.weights,
                    memory.block.tops + q, memory.block.totals + q);
        if (is_first) pair_values(memory, item, block);
        add_weighted(memory.lanes.weights, 0, some, memory.lanes.values, width, bands, memory.by_amx,
                     nullptr, sums);
        if (is_tree) add_own_values(memory, item, block, q, begin, before, bands, sums);
      }
      take(number - range.first + i, memory.block);
    }
  }

  bool is_capped() const { return how.cap > 0.0f || !(how.scale > 0.0f); }

  void score_keys(Memory &memory, const Item &item, int64_t slot, int64_t num_keys, int64_t q,
                  Ahead ahead, float *to) const {
    const LaneMemory &lanes = memory.lanes;
    score_lanes(item.keys + slot * heads.H, num_keys, heads.H, lanes.queries + q * lanes.query_words,
                memory.by_amx, ahead, lanes.keys, to);
    for (float *end = to + num_keys * kLanes; to < end && is_capped(); to += kVector) {
      Floats x = load<Floats>(to) * how.scale;
      if (how.cap > 0.0f) x = how.cap * tanh_fast(x / how.cap);
      std::memcpy(to, &x, sizeof x);
    }
  }

  // Hides what the queries from q on do not see of a block; returns the places that any of them uses, in
  // whole bands.
  int64_t hide_unseen(Memory &memory, const Item &item, const LaneBlock &block, int64_t q,
                      int64_t begin, int64_t before) const {
    float unseen[kLanes], used[kLanes];
    int64_t most = before;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t at = std::min(q + lane, item.count - 1), t = get_token(item, at);
      const int64_t from = how.window > 0 ? get_position(item.b, t) - how.window + 1 - block.base : 0;
      const int64_t to = item.range.is_chain ? step.past[item.b] + t + 1 - block.base : before;
      unseen[lane] = static_cast<float>(std::min(std::max<int64_t>(from, 0), before));
      used[lane] = static_cast<float>(std::min(std::max<int64_t>(to, 0), before));
      if (block.is_tree) {
        const int64_t count = get_seen(memory, item, at)[step.C] - begin;
        most = std::max(most, std::min<int64_t>(kBlockPositions, count));
      }
    }
    const int64_t places = round_up(most, kBandPositions);
    hide(unseen, used, places, memory.lanes.scores);
    return places;
  }

  // Scores of the newest tokens, at the places that they have for each query.
  void put_newest_scores(Memory &memory, const Item &item, int64_t q, int64_t begin) const {
    const LaneMemory &lanes = memory.lanes;
    score_keys(memory, item, step.past[item.b], step.C, q, Ahead{nullptr, 0}, lanes.newest);
    const int64_t *positions = get_positions(item.b);
    for (int64_t lane = 0; lane < std::min(kLanes, item.count - q); ++lane) {
      const int64_t lowest = get_lowest(item.b, get_token(item, q + lane));
      const int32_t *slots = get_seen(memory, item, q + lane);
      const int64_t end = std::min<int64_t>(slots[step.C], begin + kBlockPositions);
      for (int64_t n = std::max<int64_t>(begin, 0); n < end; ++n)
        if (positions[slots[n]] >= lowest)
          lanes.scores[(n - begin) * kLanes + lane] = lanes.newest[slots[n] * kLanes + lane];
    }
  }

  // A block's values in pairs, while the second half of the next block's keys is fetched.
  void pair_values(Memory &memory, const Item &item, const LaneBlock &block) const {
    Ahead ahead{block.next.from + block.next.lines * kBandBlock * kLine, block.next.lines};
    for (int64_t p = 0; p < block.common; p += 2) {
      const E *low = item.values + (block.base + p) * heads.H;
      if (p % kBandPositions == 0) ahead.fetch();
      pair_rows(p < block.length ? low : nullptr, p + 1 < block.length ? low + heads.H : nullptr,
                heads.H, width, memory.lanes.values + p / 2 * width);
    }
  }

  // Adds the values behind the common bands, which are each token's own, or those of several that see
  // the same.
  void add_own_values(Memory &memory, const Item &item, const LaneBlock &block, int64_t q, int64_t begin,
                      int64_t before, int64_t bands, float *sums) const {
    const LaneMemory &lanes = memory.lanes;
    const int64_t some = std::min(kLanes, item.count - q), C = step.C, H = heads.H;
    for (int64_t lane = 0, next = 0; lane < some; lane = next) {
      const int32_t *slots = get_seen(memory, item, q + lane);
      for (next = lane + 1; next < some; ++next)
        if (!std::equal(slots, slots + C + 1, get_seen(memory, item, q + next))) break;
      const int64_t end = std::min<int64_t>(slots[C] - begin, kBlockPositions);
      const auto find_value = [&](int64_t at) -> const E * {
        if (at < before) return item.values + (block.base + at) * H;
        return at < end ? item.values + (step.past[item.b] + slots[at + begin]) * H : nullptr;
      };
      uint32_t *to = lanes.own_values;
      const int64_t stop = round_up(end, kBandPositions);
      for (int64_t at = bands * kBandPositions; at < stop; at += 2, to += width)
        pair_rows(find_value(at), find_value(at + 1), H, width, to);
      add_weighted(lanes.weights + bands * kLaneWords, lane, next, lanes.own_values, width,
                   (to - lanes.own_values) / (kBand * width), memory.by_amx, sums, lanes.sums);
      std::copy(lanes.sums + lane * width, lanes.sums + next * width, sums + lane * width);
    }
  }

  Attention<E> how;
  Step step;
  Heads heads;
  E *qkv, *out, *key_cache, *value_cache;
  float *kept = nullptr;  // what is found in each block of each item
  int64_t stride = (heads.N + 2 * heads.K) * heads.H, group = heads.N / heads.K;
  int64_t head_size = heads.S * heads.H, width = round_up(heads.H, kByBands ? kLanes : kVector);
  int64_t longest = 0, most_blocks = 0, parts = 1;
  int64_t tile, tiles, line_size, found_queries, found_size;
};

}  // namespace
