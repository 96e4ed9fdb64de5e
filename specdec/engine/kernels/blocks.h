// Products with packed matrices of GGML's block types.

#pragma once

#include "block_forms.h"

namespace {

// Inputs are rounded as for Integers, by the weights' own groups. A group's sum is of integers; then it is
// scaled by the inputs' scale and by the weight's, and the minimum is multiplied by the inputs' scale and
// their sum.

// Header of a packed run of a matrix's rows, which are of one type. N is of the whole matrix in the
// first run; `next` is where the next run begins, in bytes from here, 0 in the last. bits: 0, by which it
// is known among Integers. Then there are tiles: units of inputs one after the other, each its scales
// and the codes of its groups.
struct BlockRows {
  int64_t N, depth, bits, type, rows, next, unused[2];
};
static_assert(sizeof(BlockRows) == sizeof(Integers), "which one it is, its third field tells");

template <int64_t kType>
struct BlockMatrix {
  typedef uint32_t Input;
  static constexpr int64_t kNumber = kType;
  // Types that fewer files have are compiled for fewer rows at once, in a third of the time.
  static constexpr bool kIsUsual =
      kType == kQ4_0 || kType == kQ4_1 || kType == kQ8_0 || kType == kQ4_K || kType == kQ6_K;
  static constexpr int kMostRows = kIsUsual ? kMaxRows : 8;
  static constexpr int kMostTiles = 1;  // memory is read faster in one stream
  static constexpr int64_t kNearRows = kType == kQ8_0 ? 4 : kType == kQ4_0 ? 1 : 0;
  static constexpr BlockForm kForm = find_form(kType);
  static constexpr int64_t kBits = kForm.bits, kGroup = kForm.group, kParts = kGroup / 4;
  static constexpr bool kHasMinima = kForm.has_minima, kIsSuper = kForm.inputs == 256;
  static constexpr int64_t kGroups = kForm.unit / kGroup;  // of a unit
  static constexpr int64_t kBlockInputs = kForm.inputs, kBlockBytes = kForm.bytes;
  // Codes lie in words of as many lower bits, after which is a word of all upper bits if there are any:
  // those of a group, or of two whose upper bits fill one.
  static constexpr int64_t kLowBits = kBits == 8 ? 8 : kBits < 4 ? 2 : 4, kHighBits = kBits - kLowBits;
  static constexpr int64_t kCodeGroups = kBits == 3 ? 2 : 1, kCodeParts = kCodeGroups * kParts;
  static constexpr int64_t kCodeSteps = kCodeParts * kBits / 8, kLowSteps = kCodeParts * kLowBits / 8;
  static constexpr int64_t kShared = 8 / kLowBits;  // parts of a word of lower bits
  // Of a unit: lists of kTile numbers of two bytes, each group's or the super-block's, and of one byte.
  static constexpr bool kHasHalves = kForm.scales == Scales::kHalves;
  static constexpr bool kHasNibbles = kForm.scales == Scales::kNibbles;
  static constexpr bool kHasExponents = kForm.scales == Scales::kExponents;
  static constexpr int64_t kFactors = kHasExponents ? 0 : 1 + kHasMinima;
  static constexpr int64_t kByteLists = kHasHalves ? 0 : kHasNibbles ? 1 : 1 + kHasMinima;
  static constexpr int64_t kScaleBytes =
      2 * kFactors * (kHasHalves ? kGroups : 1) + kByteLists * kGroups;  // of an output
  static constexpr int64_t kScaleSteps = (kScaleBytes + 3) / 4;
  static constexpr int64_t kUnitSteps = kScaleSteps + kGroups / kCodeGroups * kCodeSteps;
  static constexpr int64_t turn = (kUnitSteps < kTurn ? kTurn / kUnitSteps : 1) * kUnitSteps;
  // Smaller codes may be multiplied in sums of 16 bits, which so many products fit in.
  static constexpr bool kHasShorts = kSumsShorts && kForm.largest < 64;
  static constexpr int64_t kMostShortParts = 32767 / (2 * kForm.largest * kLargest);
  static constexpr int64_t kShortParts = kMostShortParts >= kParts ? kParts : kMostShortParts >= 4 ? 4 : 2;
  static constexpr int kLanes = kMultipliesBytes || kHasShorts ? 1 : 2;  // words that 4 inputs take
  static constexpr int64_t kHead = 3;  // inputs that each group of a row begins with
  static constexpr int64_t header = 0, kGroupRow = kHead + kParts * kLanes;
  static constexpr int32_t kZero = kForm.zero;
  static constexpr Book kBook = find_book(kType);
  const char *tiles;
  int64_t depth, steps, tile_bytes, row;

  BlockMatrix(int64_t depth, const char *tiles) : tiles(tiles), depth(depth) {
    const int64_t units = (depth + kGroups * kGroup - 1) / (kGroups * kGroup);
    steps = units * kUnitSteps;
    tile_bytes = steps * kStepBytes;
    row = units * kGroups * kGroupRow;
  }

  // Where a group's scales are in a unit, or its minima: of one byte after all those of two bytes.
  static int64_t find_scales(int64_t group, bool are_minima) {
    if (kHasHalves) return 2 * kTile * (group + are_minima * kGroups);
    return 2 * kTile * kFactors + kTile * (group + (are_minima && !kHasNibbles) * kGroups);
  }

  static inline __attribute__((always_inline)) Floats read_scales(const char *unit, int64_t group,
                                                                  bool are_minima, int64_t k) {
    const auto *factors = reinterpret_cast<const half *>(unit) + are_minima * kTile + k * kVector;
    const char *group_scales = unit + find_scales(group, are_minima);
    const auto *bytes = reinterpret_cast<const uint8_t *>(group_scales) + k * kVector;
    if constexpr (kHasHalves)
      return widen(reinterpret_cast<const half *>(group_scales) + k * kVector);
    else if constexpr (kHasExponents)
      return read_exponents(widen_bytes(bytes));
    else if constexpr (kHasNibbles)
      return to_floats(are_minima ? widen_bytes(bytes) >> 4 : widen_bytes(bytes) & 15) * widen(factors);
    else if constexpr (kForm.scales == Scales::kSignedBytes)
      return to_floats(widen_bytes(reinterpret_cast<const int8_t *>(bytes))) * widen(factors);
    else
      return to_floats(widen_bytes(bytes)) * widen(factors);
  }

  // Four codes of each output as bytes, those of inputs 4 part to 4 part + 3. A word of lower bits holds
  // kShared parts, the first in the lowest bits of its bytes, and so does the one of upper bits.
  static Words unpack(const char *codes, int64_t part, int64_t k) {
    const auto read = [&](int64_t step) {
      return load<Words>(codes + step * kStepBytes + k * 4 * kVector);
    };
    constexpr uint32_t kBytes = 0x01010101u;
    if constexpr (kBits == 8) return pin(read(part));  // not to be read again for each row
    const Words low = read(part / kShared) >> part % kShared * kLowBits & kBytes * ((1 << kLowBits) - 1);
    if constexpr (kForm.has_book) return look_up(kBook, low);
    if constexpr (kHighBits == 0) return low;
    const int64_t shift = kLowBits - part * kHighBits;
    const Words high = read(kLowSteps);
    const Words shifted = shift > 0 ? high << shift : shift < 0 ? high >> -shift : high;
    return low | (shifted & kBytes * ((1 << kBits) - (1 << kLowBits)));
  }

  // Four bytes of them as they are multiplied: together, or by pairs two apart.
  static Words pick_lane(Words bytes, int lane) {
    if constexpr (kLanes == 1) return bytes;
    return lane == 0 ? bytes & 0x00ff00ffu : (Words)((Shorts)bytes >> 8);
  }

  static uint32_t pack_lane(const int8_t *bytes, int lane) {
    if constexpr (kLanes == 1) {
      uint32_t word;
      std::memcpy(&word, bytes, sizeof word);
      return word;
    }
    return static_cast<uint16_t>(bytes[lane]) | static_cast<uint32_t>(bytes[lane + 2]) << 16;
  }

  // Of every group of every row its scale, what its sum begins with, what a minimum is multiplied by,
  // and its inputs: each [rows]. A last unit's groups beyond the depth are zeros.
  void pack(const Numbers &x, int64_t first_row, int64_t rows, int64_t begin, int64_t end,
            uint32_t *to) const {
    const float sign = kIsSuper ? -1.0f : 1.0f;
    for (int64_t g = begin / kUnitSteps * kGroups; g < end / kUnitSteps * kGroups; ++g)
      for (int64_t m = 0; m < rows; ++m) {
        uint32_t *words = to + g * kGroupRow * rows + m;
        float numbers[kGroup] = {};
        if (g * kGroup < depth)
          x.visit([&](const auto *from) {
            from += (first_row + m) * depth + g * kGroup;
            for (int64_t i = 0; i < kGroup; i += kVector) {
              const Floats wide = widen(from + i);
              std::memcpy(numbers + i, &wide, sizeof wide);
            }
          });
        int8_t bytes[kGroup];
        int32_t sum = 0;
        const float scale = round_group<kGroup>(numbers, bytes, sum);
        words[0] = as_bits(scale);
        words[rows] = static_cast<uint32_t>(kHasMinima ? 0 : -kZero * sum);
        words[2 * rows] = as_bits(sign * scale * static_cast<float>(sum));
        words += kHead * rows;
        for (int64_t part = 0; part < kParts; ++part)
          for (int lane = 0; lane < kLanes; ++lane, words += rows)
            *words = pack_lane(bytes + 4 * part, lane);
      }
  }

  // As of FloatMatrix; `begin` is where a unit begins.
  template <int M, int G, bool kIsFar>
  void add(const Input *x, int64_t begin, int64_t end, const char *tile, Fetch<kIsFar> fetch,
           float *out) const {
    static_assert(G == 1, "one tile at a time");
    if (begin == 0) std::fill(out, out + M * kTile, 0.0f);
    // Sums of floats are not in use while those of integers are, which are of a whole group: to put them
    // down once in a group costs less than to spread each input twice. Measured with AVX2's sums of 16 bits;
    // and on Zen 5, where it pays with up to 10 rows if codes are taken apart.
    constexpr bool kSpreadsOften = kMultipliesBytes && kVector == 16 && kBits < 8 && M <= 10;
    constexpr bool kPutsFloatsDown = kIsUsual && (kHasShorts ? kRegisters == 16 : kSpreadsOften);
    constexpr int64_t kSumsInUse = kPutsFloatsDown ? kWords * M : 2 * kWords * M;
    constexpr bool kFits = kSumsInUse + 4 <= kRegisters && (kIsUsual || M <= 2);
    constexpr int64_t kAtOnce = kFits || (kIsUsual && kLanes > 1) ? kWords : 1;
    // GCC makes a copy of the function for each number that it knows, and so for one block and several.
    const int64_t stride = can_be_several<BlockMatrix>(M) ? hide(fetch.stride) : fetch.stride;
    // One turn ahead: with super-blocks that is less than what is fetched ahead elsewhere.
    if (kIsFar && kIsSuper && kAtOnce < kWords) fetch.from += turn * kStepBytes - kPrefetchBytes;
    for (int64_t stop = 0; begin < end; fetch.from += (stop - begin) * fetch.stride, begin = stop) {
      stop = kAtOnce == kWords ? end : std::min(begin + turn, end);
      for (int64_t k = 0; k < kWords; k += kAtOnce)
        add_units<M, kAtOnce>(x, begin, stop, tile, {fetch.from, stride}, kAtOnce < kWords ? hide(k) : k, out);
    }
  }

  // Adds units of K vectors of the tile's outputs, from `first_vector` on: as many as have all sums that
  // are in use at once in registers. Taking codes apart twice would cost more than it saves where
  // they are multiplied as pairs. Each pass over a tile fetches its part of what is ahead, line by line;
  // Zen 4 is faster if it also fetches its own lines, every other one, where a unit has few of them.
  template <int M, int64_t K>
  static __attribute__((noinline)) void add_units(const Input *x, int64_t begin, int64_t end,
                                                  const char *tile, Fetch<kFetchesFar> fetch,
                                                  int64_t first_vector, float *out) {
    const uint32_t *head = x + begin / kUnitSteps * kGroups * kGroupRow * M;
    fetch.stride = fetch.stride * K / kWords;
    fetch.from += first_vector / K * (end - begin) * fetch.stride;
    out += first_vector * kVector;
    Floats sums[K][M];
#pragma GCC unroll 2
    for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) sums[k][m] = load<Floats>(out + m * kTile + k * kVector);
    for (int64_t step = begin; step < end; step += kUnitSteps) {
      const char *unit = tile + step * kStepBytes, *codes = unit + kScaleSteps * kStepBytes;
      if (kFetchesFar && kBits == 4 && !kIsSuper && K < kWords)
        for (int64_t i = 0; i < kUnitSteps; ++i)
          Fetch<false>::fetch<4 * K * kVector>(unit + i * kStepBytes + first_vector * 4 * kVector +
                                               kNearBytes);
      for (int64_t i = 0; i < kScaleSteps; ++i, fetch.from += fetch.stride)
        fetch.template fetch<4 * K * kVector>(fetch.from);
      for (int64_t group = 0; group < kGroups; codes += kCodeSteps * kStepBytes) {
        for (int64_t i = 0; i < kCodeSteps; ++i, fetch.from += fetch.stride)
          fetch.template fetch<4 * K * kVector>(fetch.from);
#pragma GCC unroll 2
        for (int64_t i = 0; i < kCodeGroups; ++i, ++group, head += kGroupRow * M)
          add_group<M, K>(head, unit, codes, group, i * kParts, first_vector, sums);
      }
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m)
        std::memcpy(out + m * kTile + k * kVector, &sums[k][m], sizeof(Floats));
  }

  // Adds a unit of one group, whose codes begin with a part.
  template <int M, int64_t K>
  static inline __attribute__((always_inline)) void add_group(const uint32_t *head, const char *unit,
                                                              const char *codes, int64_t group,
                                                              int64_t first_part, int64_t first_vector,
                                                              Floats (&to)[K][M]) {
    Ints sums[K][M];
    Words shorts[K][M] = {};
#pragma GCC unroll 2
    for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m)
        sums[k][m] = kHasMinima ? Ints{} : static_cast<int32_t>(head[M + m]) - Ints{};
    const uint32_t *words = head + kHead * M;
#pragma GCC unroll 8
    for (int64_t part = 0; part < kParts; ++part) {
      Words bytes[K];
      for (int64_t k = 0; k < K; ++k) bytes[k] = unpack(codes, first_part + part, first_vector + k);
#pragma GCC unroll 2
      for (int lane = 0; lane < kLanes; ++lane) {
        Words w[K];
        for (int64_t k = 0; k < K; ++k) w[k] = pick_lane(bytes[k], lane);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const Words inputs = spread<Words>(words[(part * kLanes + lane) * M + m]);
#pragma GCC unroll 2
          for (int64_t k = 0; k < K; ++k)
            if constexpr (kHasShorts)
              shorts[k][m] = add_shorts(shorts[k][m], w[k], inputs);
            else
              sums[k][m] = add_parts(sums[k][m], w[k], inputs);
        }
      }
      if (kHasShorts && (part + 1) % kShortParts == 0)
#pragma GCC unroll 2
        for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) {
            sums[k][m] = add_parts(sums[k][m], shorts[k][m], Words{} + 0x00010001u);
            shorts[k][m] = Words{};
          }
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < K; ++k) {
      const Floats scale = read_scales(unit, group, false, first_vector + k);
      Floats minimum{};
      if constexpr (kHasMinima) minimum = read_scales(unit, group, true, first_vector + k);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        to[k][m] = mul_add(to_floats(sums[k][m]) * as_float(head[m]), scale, to[k][m]);
        if (kHasMinima) to[k][m] = mul_add(as_float(head[2 * M + m]) - Floats{}, minimum, to[k][m]);
      }
    }
  }
};

// Calls visit(place in a unit of output j, number of the block, its bytes) for a block's scales and minima.
template <typename Matrix, typename Unit, typename Byte, typename Visit>
void visit_scales(Unit *unit, int64_t first_group, int64_t j, Byte *factors, Byte (*scales)[16],
                  const Visit &visit) {
  for (int64_t list = 0; list < Matrix::kFactors; ++list)
    visit(unit + (Matrix::kHasHalves ? Matrix::find_scales(first_group, list) : 2 * kTile * list) + 2 * j,
          factors + 2 * list, 2);
  for (int64_t list = 0; list < Matrix::kByteLists; ++list)
    for (int64_t g = 0; g < Matrix::kBlockInputs / Matrix::kGroup; ++g)
      visit(unit + Matrix::find_scales(first_group + g, list) + j, scales[list] + g, 1);
}

// Puts a block of output j, whose inputs begin at `first_input`, in its tile.
template <typename Matrix>
void put_block(const Block &block, int64_t first_input, int64_t j, char *tile) {
  constexpr int64_t kUnit = Matrix::kForm.unit, kInputs = Matrix::kCodeParts * 4;
  char *unit = tile + first_input / kUnit * Matrix::kUnitSteps * kStepBytes;
  visit_scales<Matrix>(unit, first_input % kUnit / Matrix::kGroup, j, block.factors, block.scales,
                       [](char *to, const uint8_t *from, int64_t size) { std::memcpy(to, from, size); });
  for (int64_t i = 0; i < Matrix::kBlockInputs; i += kInputs) {
    uint32_t words[Matrix::kCodeSteps] = {};
    for (int64_t part = 0; part < Matrix::kCodeParts; ++part) {
      uint32_t bytes;
      std::memcpy(&bytes, block.codes + i + 4 * part, 4);
      const uint32_t low = bytes & 0x01010101u * ((1 << Matrix::kLowBits) - 1);
      words[part / Matrix::kShared] |= low << part % Matrix::kShared * Matrix::kLowBits;
      if constexpr (Matrix::kHighBits > 0)
        words[Matrix::kLowSteps] |= (bytes - low) >> Matrix::kLowBits << part * Matrix::kHighBits;
    }
    const int64_t steps = (first_input % kUnit + i) / kInputs * Matrix::kCodeSteps;
    char *to = unit + (Matrix::kScaleSteps + steps) * kStepBytes + 4 * j;
    for (int64_t step = 0; step < Matrix::kCodeSteps; ++step)
      std::memcpy(to + step * kStepBytes, &words[step], 4);
  }
}

// Takes a block of output j, whose inputs begin at `first_input`, out of its tile, as `read_block` reads it.
template <typename Matrix>
void take_block(const char *tile, int64_t first_input, int64_t j, Block &block) {
  constexpr int64_t kUnit = Matrix::kForm.unit, kInputs = Matrix::kCodeParts * 4;
  const char *unit = tile + first_input / kUnit * Matrix::kUnitSteps * kStepBytes;
  block.factors = block.halves;
  visit_scales<Matrix>(unit, first_input % kUnit / Matrix::kGroup, j, block.halves, block.scales,
                       [](const char *from, uint8_t *to, int64_t size) { std::memcpy(to, from, size); });
  for (int64_t i = 0; i < Matrix::kBlockInputs; i += kInputs) {
    const int64_t steps = Matrix::kScaleSteps + (first_input % kUnit + i) / kInputs * Matrix::kCodeSteps;
    const char *from = unit + steps * kStepBytes + 4 * j;
    uint32_t words[Matrix::kCodeSteps];
    for (int64_t step = 0; step < Matrix::kCodeSteps; ++step)
      std::memcpy(&words[step], from + step * kStepBytes, 4);
    for (int64_t part = 0; part < Matrix::kCodeParts; ++part) {
      uint32_t bytes = words[part / Matrix::kShared] >> part % Matrix::kShared * Matrix::kLowBits &
                       0x01010101u * ((1 << Matrix::kLowBits) - 1);
      if constexpr (Matrix::kHighBits > 0)
        bytes |= (words[Matrix::kLowSteps] >> part * Matrix::kHighBits &
                  0x01010101u * ((1 << Matrix::kHighBits) - 1))
                 << Matrix::kLowBits;
      std::memcpy(block.codes + i + 4 * part, &bytes, 4);
    }
  }
}

// Calls `use` with a run's matrix.
template <typename Use>
inline auto with_blocks(int64_t type, int64_t depth, const char *tiles, const Use &use) {
  switch (type) {
    case kQ4_0: return use(BlockMatrix<kQ4_0>(depth, tiles));
    case kQ4_1: return use(BlockMatrix<kQ4_1>(depth, tiles));
    case kQ5_0: return use(BlockMatrix<kQ5_0>(depth, tiles));
    case kQ5_1: return use(BlockMatrix<kQ5_1>(depth, tiles));
    case kQ8_0: return use(BlockMatrix<kQ8_0>(depth, tiles));
    case kQ2_K: return use(BlockMatrix<kQ2_K>(depth, tiles));
    case kQ3_K: return use(BlockMatrix<kQ3_K>(depth, tiles));
    case kQ4_K: return use(BlockMatrix<kQ4_K>(depth, tiles));
    case kQ5_K: return use(BlockMatrix<kQ5_K>(depth, tiles));
    case kIQ4_NL: return use(BlockMatrix<kIQ4_NL>(depth, tiles));
    case kIQ4_XS: return use(BlockMatrix<kIQ4_XS>(depth, tiles));
    case kMXFP4: return use(BlockMatrix<kMXFP4>(depth, tiles));
    default: return use(BlockMatrix<kQ6_K>(depth, tiles));
  }
}

inline int64_t measure_blocks(const BlockRows &run) {
  return with_blocks(run.type, run.depth, nullptr, [&](const auto &w) {
    return static_cast<int64_t>(sizeof run) + (run.rows + kTile - 1) / kTile * w.tile_bytes;
  });
}

// Packs a run, whose rows of blocks lie `stride` bytes apart.
void pack_blocks(const uint8_t *rows, int64_t stride, const BlockRows &run, char *packed) {
  ask_for_huge_pages(packed, measure_blocks(run));
  std::memcpy(packed, &run, sizeof run);
  with_blocks(run.type, run.depth, packed + sizeof run, [&](const auto &w) {
    typedef typename std::decay<decltype(w)>::type Matrix;
    constexpr int64_t kInputs = Matrix::kBlockInputs;
    for_each((run.rows + kTile - 1) / kTile, run.rows * w.depth > kParallelWork, [&](int64_t t) {
      char *tile = const_cast<char *>(w.tiles) + t * w.tile_bytes;
      std::memset(tile, 0, w.tile_bytes);
      Block block;
      for (int64_t j = 0; j < std::min(kTile, run.rows - t * kTile); ++j)
        for (int64_t i = 0; i < w.depth / kInputs; ++i) {
          read_block(rows + (t * kTile + j) * stride + i * Matrix::kBlockBytes, run.type, block);
          put_block<Matrix>(block, i * kInputs, j, tile);
        }
    });
  });
}

// A block's weights, as the package gguf computes them: a scale times a code fits in float32.
template <typename Matrix>
void widen_block(const Block &block, float *out) {
  float factors[2] = {};
  for (int64_t list = 0; list < Matrix::kFactors; ++list)
    factors[list] = to_float(load<half>(block.factors + 2 * list));
  for (int64_t i = 0; i < Matrix::kBlockInputs; i += Matrix::kGroup) {
    float scale = factors[0], minimum = factors[1];
    const uint8_t byte = block.scales[0][i / Matrix::kGroup];
    if constexpr (Matrix::kHasExponents) {
      scale = read_exponent(byte);
    } else if constexpr (Matrix::kHasNibbles) {
      scale *= static_cast<float>(byte & 15);
      minimum = -(factors[1] * static_cast<float>(byte >> 4));
    } else if constexpr (Matrix::kIsSuper) {
      scale *= static_cast<float>(Matrix::kHasMinima ? byte : static_cast<int8_t>(byte));
      minimum = -(factors[1] * static_cast<float>(block.scales[1][i / Matrix::kGroup]));
    }
    for (int64_t j = i; j < i + Matrix::kGroup; ++j) {
      const uint8_t code = Matrix::kForm.has_book ? Matrix::kBook.bytes[block.codes[j]] : block.codes[j];
      if constexpr (Matrix::kHasMinima)
        out[j] = mul_add(code, scale, minimum);
      else if constexpr (Matrix::kZero == 0)
        out[j] = static_cast<float>(static_cast<int8_t>(code)) * scale;
      else
        out[j] = static_cast<float>(code - Matrix::kZero) * scale;
    }
  }
}

// Rows of the weights, [count, depth], of N rows of blocks that lie `stride` bytes apart. Returns how
// many it widened: those before one that there is not, or that is of no blocks.
inline int64_t widen_blocks(const uint8_t *rows, int64_t N, int64_t stride, const uint8_t *types,
                            const int64_t *chosen, int64_t count, int64_t depth, float *out) {
  Block block{};
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = chosen[n];
    if (row < 0 || row >= N) return n;
    const bool is_done = with_blocks(types[row], depth, nullptr, [&](const auto &w) {
      typedef typename std::decay<decltype(w)>::type Matrix;
      constexpr int64_t kInputs = Matrix::kBlockInputs, kBytes = Matrix::kBlockBytes;
      if (types[row] != Matrix::kNumber || depth % kInputs != 0) return false;
      if (depth / kInputs * kBytes > stride) return false;
      for (int64_t i = 0; i < depth / kInputs; ++i, out += kInputs) {
        read_block(rows + row * stride + i * kBytes, Matrix::kNumber, block);
        widen_block<Matrix>(block, out);
      }
      return true;
    });
    if (!is_done) return n;
  }
  return count;
}

inline const BlockRows *find_next(const BlockRows *run) {
  return reinterpret_cast<const BlockRows *>(reinterpret_cast<const char *>(run) + run->next);
}

// Rows of a packed matrix's weights, [count, depth]; returns what `unpack_rows` does.
inline int64_t unpack_block_rows(const BlockRows *packed, const int64_t *rows, int64_t count, float *out) {
  if (const int64_t inside = count_rows_inside(rows, count, packed->N); inside < count) return inside;
  for_each(count, count * packed->depth > kParallelWork, [&](int64_t n) {
    const BlockRows *run = packed;
    int64_t row = rows[n];
    for (; row >= run->rows && run->next != 0; run = find_next(run)) row -= run->rows;
    with_blocks(run->type, run->depth, reinterpret_cast<const char *>(run + 1), [&](const auto &w) {
      typedef typename std::decay<decltype(w)>::type Matrix;
      const char *tile = w.tiles + row / kTile * w.tile_bytes;
      Block block{};
      for (int64_t i = 0; i < w.depth; i += Matrix::kBlockInputs) {
        take_block<Matrix>(tile, i, row % kTile, block);
        widen_block<Matrix>(block, out + n * w.depth + i);
      }
    });
  });
  return count;
}

// y[M][N] = x[M][depth] W^T + bias.
inline void multiply_runs(const Numbers &x, int64_t M, const BlockRows *run, Outputs y) {
  for (;;) {
    with_blocks(run->type, run->depth, reinterpret_cast<const char *>(run + 1), [&](const auto &w) {
      multiply_matrix(x, M, w, run->rows, y);
    });
    if (run->next == 0) return;
    y.first += run->rows;
    run = find_next(run);
  }
}

}  // namespace
