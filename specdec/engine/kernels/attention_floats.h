// Attention in floats: products of queries, keys and values, and the merging of blocks.

#pragma once

#include "norms.h"

namespace {

// A token's attention is summed by blocks of kBlockPositions of the text before it. In each, scores
// are products of queries with keys, the block's result is that of weights with values, both summed
// in order; then blocks are merged in order. Where a block ends depends on a token's place in its
// text alone, not on the step: so blocks can be shared out to threads.
constexpr int64_t kBlockPositions = 512;

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

// Exchanges lanes of a whose lane & D is not 0 with lanes of b whose lane & D is 0.
template <int D, bool kSecond, size_t... J>
inline Words swap_lanes(Words a, Words b, std::index_sequence<J...>) {
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b, (kSecond ? (J & D ? kVector + J : J + D) : (J & D ? kVector + J - D : J))...);
#else
  return __builtin_shuffle(
      a, b, Words{(kSecond ? (J & D ? kVector + J : J + D) : (J & D ? kVector + J - D : J))...});
#endif
}

// Turns rows of words into columns.
template <int D = kVector / 2>
inline void transpose(Words (&rows)[kVector]) {
  constexpr auto lanes = std::make_index_sequence<kVector>();
#pragma GCC unroll 16
  for (int r = 0; r < kVector; ++r)
    if (!(r & D)) {
      const Words a = rows[r], b = rows[r + D];
      rows[r] = swap_lanes<D, false>(a, b, lanes);
      rows[r + D] = swap_lanes<D, true>(a, b, lanes);
    }
  if constexpr (D > 1) transpose<D / 2>(rows);
}

// Stores the numbers in each word as floats: the first ones, kSpan further the second ones.
inline void store_floats(Words words, float *to, const float *) { std::memcpy(to, &words, sizeof words); }

inline void store_floats(Words words, float *to, const bf16 *) {
  const Floats low = widen_low(words), high = widen_high(words);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + kSpan, &high, sizeof high);
}

inline void store_floats(Words words, float *to, const half *) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kVector)));
  for (int i = 0; i < 2; ++i, words >>= 16, to += kSpan) {
    const Halves bits = __builtin_convertvector(words & 0xffffu, Halves);
    half numbers[kVector];
    std::memcpy(numbers, &bits, sizeof numbers);
    const Floats wide = widen(numbers);
    std::memcpy(to, &wide, sizeof wide);
  }
}

// Fetches the memory that lies kPrefetchBytes ahead, as keys and values are read row after row.
template <typename E>
inline void fetch_row(const E *row, int64_t H) {
  const char *ahead = reinterpret_cast<const char *>(row) + kPrefetchBytes;
  for (int64_t byte = 0; byte < H * static_cast<int64_t>(sizeof(E)); byte += kLine)
    __builtin_prefetch(ahead + byte, 0, kFetchesFar ? 2 : 3);
}

// Lays keys [count, H], up to kSpan of them, side by side: [H, kSpan], zeros beyond `count`.
template <typename E>
void transpose_keys(const E *keys, int64_t count, int64_t H, float *to) {
  constexpr int64_t kNumbers = 4 / sizeof(E);  // in a word
  const int64_t vector_part = H / (kNumbers * kVector) * (kNumbers * kVector);
  for (int64_t p = 0; p < kSpan; p += kVector) {
    for (int64_t r = p; r < p + kVector; ++r) fetch_row(keys + r * H, H);
    for (int64_t h = 0; h < vector_part; h += kNumbers * kVector) {
      Words rows[kVector];
      for (int64_t r = 0; r < kVector; ++r)
        rows[r] = p + r < count ? load<Words>(keys + (p + r) * H + h) : Words{};
      transpose(rows);
      for (int64_t r = 0; r < kVector; ++r)
        store_floats(rows[r], to + (h + r * kNumbers) * kSpan + p, keys);
    }
    for (int64_t r = p; r < p + kVector; ++r)
      for (int64_t h = vector_part; h < H; ++h)
        to[h * kSpan + r] = r < count ? to_float(keys[r * H + h]) : 0.0f;
  }
}

// Score of a position that a query does not see.
constexpr float kHidden = -1e30f;

// Scores [count], in whole parts of kSums, become exp(score - top), 0 where they are hidden.
inline void make_weights(float *scores, int64_t count, float &top, float &total) {
  Floats largest = Floats{} + kHidden;
  for (int64_t i = 0; i < count; i += kVector) {
    const Floats x = load<Floats>(scores + i);
    largest = x > largest ? x : largest;
  }
  top = kHidden;
  for (int64_t j = 0; j < kVector; ++j) top = largest[j] > top ? largest[j] : top;
  for (int64_t i = 0; i < count; i += kVector) {
    const Floats x = load<Floats>(scores + i), weights = exp_fast(x - top);
    const Floats visible_weights = x > Floats{} + kHidden ? weights : Floats{};
    std::memcpy(scores + i, &visible_weights, sizeof visible_weights);
  }
  total = sum_row(count, [&](auto sums, int64_t i) {
    return sums + read<decltype(sums)>(scores + i);
  });
}

// The output of queries over some positions: weighted sums of values [queries, width], and of each
// query the largest score and the sum of the weights.
struct PartialOutput {
  float *sums, *tops, *totals;
  int64_t width;

  PartialOutput(float *memory, int64_t queries, int64_t width)
      : sums(memory), tops(memory + queries * width), totals(tops + queries), width(width) {}

  void clear(int64_t count) const {
    std::fill_n(sums, count * width, 0.0f);
    std::fill_n(tops, count, kHidden);
    std::fill_n(totals, count, 0.0f);
  }

  // Adds the output over the positions that follow.
  void add(const PartialOutput &next, int64_t count) const {
    for (int64_t q = 0; q < count; ++q) {
      const float top = std::max(tops[q], next.tops[q]);
      const float share = exp_fast(tops[q] - top), next_share = exp_fast(next.tops[q] - top);
      tops[q] = top;
      totals[q] = mul_add(next.totals[q], next_share, totals[q] * share);
      for (int64_t i = q * width; i < (q + 1) * width; i += kVector) {
        const Floats scaled_sums = load<Floats>(sums + i) * share;
        const Floats sum = mul_add(load<Floats>(next.sums + i), Floats{} + next_share, scaled_sums);
        std::memcpy(sums + i, &sum, sizeof sum);
      }
    }
  }
};

// Computes scores of queries [count, H] for `num_keys` positions: [count, stride]; scratch: [H, kSpan].
template <typename E>
void compute_scores(const float *queries, int64_t count, const E *keys, int64_t num_keys, int64_t H,
           float cap, float *scratch, float *scores, int64_t stride) {
  for (int64_t p = 0; p < num_keys; p += kSpan) {
    transpose_keys(keys + p * H, num_keys - p, H, scratch);
    // With few queries a whole span takes no longer than some of its columns.
    const int64_t num_columns =
        count < kSpanRows ? kSpan : std::min(kSpan, round_up(num_keys - p, kVector));
    add_product(queries, count, H, scratch, kSpan, num_columns, H, scores + p, stride, true);
  }
  for (int64_t q = 0; q < count && cap > 0.0f; ++q)
    for (float *score = scores + q * stride, *end = score + num_keys; score < end; score += kVector) {
      const Floats capped = cap * tanh_fast(load<Floats>(score) / cap);
      std::memcpy(score, &capped, sizeof capped);
    }
}

// sums [count, width] = weights [count, stride] times values [num_values, H]; width: H in whole
// vectors; scratch: [kSpan, width].
template <typename E>
void add_values(const float *weights, int64_t count, int64_t stride, const E *values,
                int64_t num_values, int64_t H, float *scratch, float *sums, int64_t width) {
  for (int64_t v = 0; v < num_values; v += kSpan) {
    const int64_t num_rows = std::min(kSpan, num_values - v);
    for (int64_t i = 0; i < num_rows; ++i) {
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
    add_product(weights + v, count, stride, scratch, width, width, num_rows, sums, width, v == 0);
  }
}

}  // namespace
