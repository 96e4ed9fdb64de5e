// Products with packed matrices of numbers.

#pragma once

#include "numbers.h"
#include "threads.h"

namespace {

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
// for what is near. Zen 4 has more lines under way if they are not to go on to the nearest cache; where
// few products are taken of each line it reads ahead faster by itself, unless it is asked for what is far.
#if SPECDEC_AMX
constexpr int64_t kPrefetchBytes = 1536, kNearBytes = kPrefetchBytes;
constexpr bool kFetchesFar = false;
#elif defined(__AVX512BF16__)
constexpr int64_t kPrefetchBytes = 8192, kNearBytes = 1024;
constexpr bool kFetchesFar = true;
#else
constexpr int64_t kPrefetchBytes = 4096, kNearBytes = kPrefetchBytes;
constexpr bool kFetchesFar = false;
#endif
constexpr int kNearProducts = 5;  // of a vector that is read, at most: then what is near is fetched

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
  unsigned caller_mode, flushing_mode = 0x9fc0;

 public:
  Flushing() {
    asm volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(caller_mode) : "m"(flushing_mode) : "memory");
  }
  ~Flushing() { asm volatile("ldmxcsr %0" : : "m"(caller_mode) : "memory"); }
#else
  static_assert(!kSumsBands, "AMX's sums in plain code are for x86");

 public:
  Flushing() {}
#endif
};

// A step holds kElements inputs of each output, that of output j and input i at find_offset(j, i): for
// float16 each input's kVector outputs side by side, for bfloat16 pairs of inputs in 32-bit words.
// Input is what rows are packed as, kInputs of them a step: floats, or two bfloat16 where the
// processor multiplies such pairs.
template <typename E>
struct Packing {
  typedef float Input;
  static constexpr int64_t kElements = kStepBytes / kTile / sizeof(E), kInputs = kElements;
  static constexpr int64_t find_offset(int64_t j, int64_t i) {
    return (j / kVector * kElements + i) * kVector + j % kVector;
  }
};

template <>
struct Packing<bf16> {
  typedef std::conditional<kMultipliesPairs, uint32_t, float>::type Input;
  static constexpr int64_t kElements = 2, kInputs = kMultipliesPairs ? 1 : 2;
  static constexpr int64_t find_offset(int64_t j, int64_t i) { return 2 * j + i; }
};

template <typename E>
inline int64_t count_steps(int64_t depth) {
  return (depth + Packing<E>::kElements - 1) / Packing<E>::kElements;
}

inline int64_t count_rows_inside(const int64_t *rows, int64_t count, int64_t N) {
  for (int64_t n = 0; n < count; ++n)
    if (rows[n] < 0 || rows[n] >= N) return n;
  return count;
}

// A row of a packed matrix, whose numbers are read one by one.
template <typename E>
struct PackedRow {
  typedef Packing<E> P;
  const E *tile;
  int64_t output;

  PackedRow(const E *packed, int64_t depth, int64_t row)
      : tile(packed + row / kTile * count_steps<E>(depth) * kTile * P::kElements), output(row % kTile) {}

  E operator[](int64_t i) const {
    return tile[i / P::kElements * kTile * P::kElements + P::find_offset(output, i % P::kElements)];
  }
};

// Keeps a value in a register from here on, and no compiler knows why: so it neither puts the instruction off
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

// Keeps a number from being known to a compiler, which would make a copy of a function for it.
inline int64_t hide(int64_t x) {
  asm("" : "+r"(x));
  return x;
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
    for (int64_t k = 0; k < kWords; ++k) w[k] = widen(step + Packing<E>::find_offset(k * kVector, i));
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

// Where a matrix is fetched ahead of its use: two lines from `from` on, at each step `stride` bytes
// further; to the second cache alone if it is far. A line that is fetched twice costs next to nothing.
template <bool kIsFar>
struct Fetch {
  const char *from;
  int64_t stride;

  // Fetches the bytes of a step, or as many of a tile's scales.
  template <int64_t kBytes = kStepBytes>
  static void fetch(const char *from) {
    for (int64_t byte = 0; byte < kBytes; byte += kLine) __builtin_prefetch(from + byte, 0, kIsFar ? 2 : 3);
  }
};

// Two kinds of packed matrices follow. Each tells its number of steps, where its tiles are and how
// many bytes of one come before its first step; how many inputs a row takes when it is packed; packs
// rows; and multiplies with them.

// With few rows several tiles are multiplied at once: more sums that do not wait for each other.
constexpr int kWideTiles = 4;

// Of numbers of type E, as all else is.
template <typename E>
struct FloatMatrix {
  typedef typename Packing<E>::Input Input;
  static constexpr bool kHasBands = kSumsBands && std::is_same<E, bf16>::value;
  static constexpr int kMostRows = kHasBands ? kMaxRows / 2 : kMaxRows;
  static constexpr int kMostTiles = kWideTiles;
  static constexpr int64_t kNearRows = kNearProducts / Packing<E>::kInputs;
  static constexpr int64_t header = 0, turn = kTurn;
  const char *tiles;
  int64_t depth, steps, tile_bytes, row;

  FloatMatrix(const E *packed, int64_t depth)
      : tiles(reinterpret_cast<const char *>(packed)),
        depth(depth),
        steps(count_steps<E>(depth)),
        tile_bytes(steps * kStepBytes),
        row(steps * Packing<E>::kInputs) {}

  // Inputs of the steps from `begin` to `end` over the depth: [kInputs][rows] each of rows of X
  // [., depth], zeros beyond the depth.
  void pack(const Numbers &x, int64_t first_row, int64_t rows, int64_t begin, int64_t end, Input *to) const {
    x.visit([&](const auto *from) { pack_rows(from + first_row * depth, rows, begin, end, to); });
  }

  template <typename X>
  void pack_rows(const X *x, int64_t rows, int64_t begin, int64_t end, float *to) const {
    constexpr int64_t kInputs = Packing<E>::kInputs;
    const int64_t first_input = begin * kInputs, last_input = end * kInputs;
    const int64_t num_inputs = std::min(last_input, depth);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t i = first_input; i < num_inputs; ++i) {
        const float input = to_float(x[m * depth + i]);
        to[i * rows + m] = kHasBands ? round_through<E>(input) : input;
      }
    if (num_inputs < last_input) std::fill(to + num_inputs * rows, to + last_input * rows, 0.0f);
  }

  template <typename X>
  void pack_rows(const X *x, int64_t rows, int64_t begin, int64_t end, uint32_t *to) const {
    const auto round = [](X input) -> uint32_t {
      if constexpr (std::is_same<X, bf16>::value) return input.bits;
      bf16 rounded;
      store(rounded, to_float(input));
      return rounded.bits;
    };
    const int64_t whole_steps = std::min(end, depth / 2);
    for (int64_t m = 0; m < rows; ++m) {
      const X *row = x + m * depth;
      for (int64_t step = begin; step < whole_steps; ++step)
        to[step * rows + m] = round(row[2 * step]) | round(row[2 * step + 1]) << 16;
      if (whole_steps < end) to[whole_steps * rows + m] = round(row[2 * whole_steps]);
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

  // Adds a tile's products in the order of AMX's sums; `begin` is where a band begins.
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

template <typename Matrix>
constexpr bool can_be_several(int rows) {
  return rows >= (Matrix::kMostRows + 1) / 2;
}

template <typename Matrix>
constexpr int count_wide(int rows) {
  constexpr int max_tiles = Matrix::kMostTiles;
  return rows == 1 ? max_tiles : 2 * rows < Matrix::kMostRows ? (max_tiles + 1) / 2 : 1;
}

// Adds products of a block of `rows` rows with a tile, or with as many as are multiplied at once. kIsAlone:
// the step has no other block, else all its blocks have half of the most rows or more.
template <bool kIsAlone, typename Matrix, bool kIsFar>
void add_tiles(const Matrix &w, int64_t rows, bool is_wide, const typename Matrix::Input *x,
               int64_t begin, int64_t end, const char *tile, Fetch<kIsFar> fetch, float *out) {
  switch (rows) {
#define SPECDEC_ROWS(M)                                                     \
  case M:                                                                   \
    if constexpr (M <= Matrix::kMostRows && (kIsAlone || can_be_several<Matrix>(M))) { \
      constexpr int kWide = kIsAlone ? count_wide<Matrix>(M) : 1;           \
      if (kWide > 1 && is_wide)                                             \
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

// y = x W^T + bias for the tiles from `begin` to `end` and rows of one block, which read each tile once.
template <typename Matrix>
void multiply_block(const Matrix &w, int64_t rows, const typename Matrix::Input *x, const ChunkClaim &claim,
                    int64_t begin, int64_t end, int64_t N, const Outputs &y) {
  const int64_t num_wide = count_wide<Matrix>(static_cast<int>(rows));
  const int64_t ahead = w.header + (rows <= Matrix::kNearRows ? kNearBytes : kPrefetchBytes);
  float sums[kWideTiles * kMaxRows * kTile];
  for (int64_t t = begin; t < end;) {
    const int64_t count = t + num_wide <= end ? num_wide : 1, width = count * kTile, output = t * kTile;
    const char *tile = w.tiles + t * w.tile_bytes;
    const Fetch<kFetchesFar> fetch{tile + ahead, kStepBytes};
    add_tiles<true>(w, rows, count > 1, x, 0, w.steps, tile, fetch, sums);
    const auto write_results = [&] {
      y.put(y, sums, rows, width, output, std::min(width, N - output));
    };
    if (!claim.write(write_results)) return;
    t += count;
  }
}

// Multiplies the tiles from `begin` to `end` by several blocks of rows. They take turns at every kTurn
// steps of a tile, and each fetches its part of what the next turn reads: so memory is read all the
// time.
template <typename Matrix>
void multiply_blocks(const Matrix &w, Blocks blocks, const typename Matrix::Input *x, const ChunkClaim &claim,
                     int64_t begin, int64_t end, int64_t N, const Outputs &y) {
  static thread_local std::vector<float> sums;
  sums.resize(blocks.rows * kTile);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t output = t * kTile;
    const char *tile = w.tiles + t * w.tile_bytes;
    for (int64_t step = 0, stop = 0; step < w.steps; step = stop) {
      stop = std::min(step + w.turn, w.steps);
      const char *next_steps = tile + (stop < w.steps ? w.header + stop * kStepBytes : w.tile_bytes);
      for (int64_t b = 0; b < blocks.count; ++b) {
        const Fetch<false> fetch{next_steps + w.turn * kStepBytes * b / blocks.count,
                                 kStepBytes / blocks.count};
        add_tiles<false>(w, blocks.size(b), false, x + blocks.begin(b) * w.row, step, stop, tile, fetch,
                  sums.data() + blocks.begin(b) * kTile);
      }
    }
    const auto write_results = [&] {
      y.put(y, sums.data(), blocks.rows, kTile, output, std::min(kTile, N - output));
    };
    if (!claim.write(write_results)) return;
  }
}

// So many inputs are packed before other threads could begin.
constexpr int64_t kPackedAlone = 1 << 13;

// y[M][N] = x[M][depth] W^T + bias.
template <typename Matrix>
void multiply_matrix(const Numbers &x, int64_t M, const Matrix &w, int64_t N, const Outputs &y) {
  typedef typename Matrix::Input Input;
  const int64_t tiles = (N + kTile - 1) / kTile, depth = w.depth, steps = w.steps, row = w.row;
  const Blocks blocks{M, (M + Matrix::kMostRows - 1) / Matrix::kMostRows};
  static thread_local std::vector<Input> scratch;
  const bool is_long = M * N * depth > kParallelWork;
  run_in_team(is_long, [&] {
    Input *inputs = reserve(scratch, M * row);
    for_each((steps + w.turn - 1) / w.turn, is_long && M * depth > kPackedAlone, [&](int64_t turn) {
      const int64_t step = turn * w.turn;
      for (int64_t b = 0; b < blocks.count; ++b)
        w.pack(x, blocks.begin(b), blocks.size(b), step, std::min(step + w.turn, steps),
               inputs + blocks.begin(b) * row);
    });
    share_repeatable(tiles, kWideTiles, is_long, [=](const ChunkClaim &claim, int64_t begin, int64_t end) {
      if (blocks.count > 1)
        multiply_blocks(w, blocks, inputs, claim, begin, end, N, y);
      else
        multiply_block(w, M, inputs, claim, begin, end, N, y);
    });
  });
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
      const int64_t whole_steps = std::min(end, depth / P::kElements);
      for (int64_t j = 0; j < rows; ++j) {
        const E *row = weight + (t * kTile + j) * depth;
        for (int64_t step = begin; step < whole_steps; ++step)
          for (int64_t i = 0; i < P::kElements; ++i)
            tile[step * kStep + P::find_offset(j, i)] = row[step * P::kElements + i];
        if (whole_steps < end)
          for (int64_t i = 0; whole_steps * P::kElements + i < depth; ++i)
            tile[whole_steps * kStep + P::find_offset(j, i)] = row[whole_steps * P::kElements + i];
      }
    }
  });
}

// Rows of a packed matrix [N, depth], [count, depth]. Returns how many of their numbers are below N, up to
// the first that is not: then nothing is written.
template <typename E>
int64_t unpack_rows(const E *packed, int64_t N, int64_t depth, const int64_t *rows, int64_t count, E *out) {
  if (const int64_t inside = count_rows_inside(rows, count, N); inside < count) return inside;
  for_each(count, count * depth > kParallelWork, [&](int64_t n) {
    const PackedRow<E> row(packed, depth, rows[n]);
    for (int64_t i = 0; i < depth; ++i) out[n * depth + i] = row[i];
  });
  return count;
}

}  // namespace
