// Products with packed matrices of GGML's block types.

#pragma once

#include "integers.h"

namespace {

// Matrices as GGUF files have them, ggml/src/ggml-quants.c:
//
//     weight[n, i] = scale[n, g] * (code[n, i] - zero) + minimum[n, g]
//
// with codes of 4, 6 or 8 bits in groups of 32 or 16 inputs. In Q4_0, Q4_1 and Q8_0 scale and minimum
// are float16; in Q4_K and Q6_K they are integers times the float16 of 256 inputs (minima are less than
// zero), which is exact in float32. Inputs are rounded as for Integers, by the weights' own groups. A
// group's sum is of integers; then it is scaled by the inputs' scale and by the weight's, and the
// minimum is multiplied by the inputs' scale and their sum.

// GGML's numbers of the types.
enum BlockType : int64_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12, kQ6_K = 14 };

// How a packed part of a matrix begins: rows of one type. The first part has N rows of the whole
// matrix; `next` is where the next part begins, in bytes from here, 0 in the last. bits: 0, by which it
// is known among Integers. Then there are tiles: units of inputs one after the other, each its scales
// and the codes of its groups.
struct BlockRows {
  int64_t N, depth, bits, type, rows, next, unused[2];
};
static_assert(sizeof(BlockRows) == sizeof(Integers), "which one it is, its third field tells");

// Of a type: bytes of the file's block, and inputs of that and of a unit.
struct BlockSizes {
  int64_t bytes, inputs, unit;
};

inline BlockSizes get_block_sizes(int64_t type) {
  switch (type) {
    case kQ4_0: return {18, 32, 64};
    case kQ4_1: return {20, 32, 64};
    case kQ8_0: return {34, 32, 64};
    case kQ4_K: return {144, 256, 256};
    default: return {210, 256, 256};
  }
}

inline int64_t count_bits(int64_t type) { return type == kQ8_0 ? 8 : type == kQ6_K ? 6 : 4; }

inline Floats widen_bytes(const uint8_t *from) {
  typedef uint8_t Bytes __attribute__((vector_size(kVector)));
  return to_floats(__builtin_convertvector(load<Bytes>(from), Ints));
}

inline Floats widen_bytes(const int8_t *from) {
  typedef int8_t Bytes __attribute__((vector_size(kVector)));
  return to_floats(__builtin_convertvector(load<Bytes>(from), Ints));
}

template <int kBits>
struct BlockMatrix {
  typedef uint32_t Input;
  static constexpr int kMostRows = kMaxRows;
  static constexpr int kMostTiles = 1;  // memory is read faster in one stream
  static constexpr int64_t kGroup = kBits == 6 ? 16 : 32, kParts = kGroup / 4;
  static constexpr int64_t kCodeSteps = kGroup * kBits / 32;  // of a group
  // Codes of 4 or 6 bits may be multiplied in sums of 16 bits, which so many products fit in.
  static constexpr bool kHasShorts = kSumsShorts && kBits < 8;
  static constexpr int64_t kShortParts = kBits == 4 ? kParts : 2;
  static constexpr int kLanes = kMultipliesBytes || kHasShorts ? 1 : 2;  // words that 4 inputs take
  static constexpr int64_t kHead = 3;  // inputs that each group of a row begins with
  static constexpr int64_t header = 0, kGroupRow = kHead + kParts * kLanes;
  static constexpr int64_t kZero = kBits == 8 ? kByteZero : kBits == 6 ? 32 : 8;
  const char *tiles;
  int64_t depth, groups, scale_steps, unit_steps, turn, steps, tile_bytes, row;
  bool is_super, has_minima;

  BlockMatrix(int64_t type, int64_t depth, const char *tiles)
      : tiles(tiles), depth(depth), is_super(type >= kQ4_K), has_minima(type == kQ4_1 || type == kQ4_K) {
    const int64_t unit = get_block_sizes(type).unit, units = (depth + unit - 1) / unit;
    groups = unit / kGroup;
    const int64_t own = is_super ? groups + 2 : 2 * groups;  // bytes of an output's scales
    scale_steps = (own * (has_minima ? 2 : 1) + 3) / 4;
    unit_steps = scale_steps + groups * kCodeSteps;
    turn = std::max<int64_t>(1, kTurn / unit_steps) * unit_steps;
    steps = units * unit_steps;
    tile_bytes = steps * kStepBytes;
    row = units * groups * kGroupRow;
  }

  // Where the scales of a unit's group are, or its minima: those of 256 inputs, then of its groups.
  const char *find_scales(const char *unit, int64_t group, bool are_minima) const {
    const int64_t list = are_minima ? groups : 0;
    return unit + (is_super ? kTile * (has_minima ? 4 : 2) + kTile * (list + group)
                            : 2 * kTile * (list + group));
  }

  Floats read_scales(const char *unit, int64_t group, bool are_minima, int64_t k) const {
    const char *own = find_scales(unit, group, are_minima);
    if (!is_super) return widen(reinterpret_cast<const half *>(own) + k * kVector);
    const Floats whole = widen(reinterpret_cast<const half *>(unit) + (are_minima ? kTile : 0) + k * kVector);
    if constexpr (kBits == 6)
      return widen_bytes(reinterpret_cast<const int8_t *>(own) + k * kVector) * whole;
    return widen_bytes(reinterpret_cast<const uint8_t *>(own) + k * kVector) * whole;
  }

  // Four codes of each output as bytes, those of a group's inputs 4 part to 4 part + 3. A word of 4 bits
  // holds two parts, the first in the lower halves of its bytes; of 6 bits the upper two of all four
  // parts are in a word of their own, the first part's lowest.
  static Words unpack(const char *codes, int64_t part, int64_t k) {
    const auto read = [&](int64_t step) {
      return load<Words>(codes + step * kStepBytes + k * 4 * kVector);
    };
    if constexpr (kBits == 8) return read(part);
    const Words low = read(part / 2) >> (part % 2 ? 4 : 0) & 0x0f0f0f0fu;
    if constexpr (kBits == 4) return low;
    const Words high = read(kParts / 2);
    const Words shifted = part == 0 ? high << 4 : part == 1 ? high << 2 : part == 2 ? high : high >> 2;
    return low | (shifted & 0x30303030u);
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
  // and its inputs: each [rows].
  template <typename X>
  void pack(const X *x, int64_t rows, int64_t begin, int64_t end, uint32_t *to) const {
    const float sign = is_super ? -1.0f : 1.0f;
    for (int64_t g = begin / unit_steps * groups; g < end / unit_steps * groups; ++g) {
      const int64_t first = g * kGroup, count = std::max<int64_t>(0, std::min(kGroup, depth - first));
      for (int64_t m = 0; m < rows; ++m) {
        uint32_t *words = to + g * kGroupRow * rows + m;
        float numbers[kGroup];
        int8_t bytes[kGroup];
        for (int64_t i = 0; i < count; ++i) numbers[i] = to_float(x[m * depth + first + i]);
        const float scale = round_group<kGroup>(numbers, count, bytes);
        const int32_t sum = add_bytes<kGroup>(bytes);
        words[0] = as_bits(scale);
        words[rows] = static_cast<uint32_t>(has_minima ? 0 : -static_cast<int32_t>(kZero) * sum);
        words[2 * rows] = as_bits(sign * scale * static_cast<float>(sum));
        words += kHead * rows;
        for (int64_t part = 0; part < kParts; ++part)
          for (int lane = 0; lane < kLanes; ++lane, words += rows)
            *words = pack_lane(bytes + 4 * part, lane);
      }
    }
  }

  // As of FloatMatrix; `begin` is where a unit begins.
  template <int M, int G, bool kIsFar>
  void add(const Input *x, int64_t begin, int64_t end, const char *tile, Fetch<kIsFar> fetch,
           float *out) const {
    if (begin == 0) std::fill(out, out + M * G * kTile, 0.0f);
    const uint32_t *head = x + begin / unit_steps * groups * kGroupRow * M;
    for (int64_t step = begin; step < end; step += unit_steps) {
      const char *unit = tile + step * kStepBytes;
      const char *ahead = fetch.from + (step - begin) * fetch.stride;
      for (int64_t i = 0; i < scale_steps; ++i, ahead += fetch.stride)
        for (int g = 0; g < G; ++g) fetch.fetch(ahead + g * tile_bytes);
      const char *codes = unit + scale_steps * kStepBytes;
      for (int64_t group = 0; group < groups; ++group, codes += kCodeSteps * kStepBytes) {
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
          add_group<M>(head, unit + g * tile_bytes, codes + g * tile_bytes, group,
                       Fetch<kIsFar>{ahead + g * tile_bytes, fetch.stride}, out + g * kTile, G * kTile);
        ahead += kCodeSteps * fetch.stride;
        head += kGroupRow * M;
      }
    }
  }

  // The same of one group and one tile, whose sums lie `width` apart for each row.
  template <int M, bool kIsFar>
  inline void add_group(const uint32_t *head, const char *unit, const char *codes, int64_t group,
                        Fetch<kIsFar> fetch, float *out, int64_t width) const {
    Ints sums[kWords][M];
    Words shorts[kWords][M] = {};
#pragma GCC unroll 2
    for (int64_t k = 0; k < kWords; ++k)
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) sums[k][m] = static_cast<int32_t>(head[M + m]) - Ints{};
    for (int64_t i = 0; i < kCodeSteps; ++i) fetch.fetch(fetch.from + i * fetch.stride);
    const uint32_t *words = head + kHead * M;
#pragma GCC unroll 8
    for (int64_t part = 0; part < kParts; ++part) {
      Words bytes[kWords];
      for (int64_t k = 0; k < kWords; ++k) bytes[k] = unpack(codes, part, k);
#pragma GCC unroll 2
      for (int lane = 0; lane < kLanes; ++lane) {
        Words w[kWords];
        for (int64_t k = 0; k < kWords; ++k) w[k] = pick_lane(bytes[k], lane);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const Words inputs = spread<Words>(words[(part * kLanes + lane) * M + m]);
#pragma GCC unroll 2
          for (int64_t k = 0; k < kWords; ++k)
            if constexpr (kHasShorts)
              shorts[k][m] = add_shorts(shorts[k][m], w[k], inputs);
            else
              sums[k][m] = add_parts(sums[k][m], w[k], inputs);
        }
      }
      if (kHasShorts && (part + 1) % kShortParts == 0)
#pragma GCC unroll 2
        for (int64_t k = 0; k < kWords; ++k)
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) {
            sums[k][m] = add_parts(sums[k][m], shorts[k][m], Words{} + 0x00010001u);
            shorts[k][m] = Words{};
          }
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < kWords; ++k) {
      const Floats scale = read_scales(unit, group, false, k);
      const Floats minimum = has_minima ? read_scales(unit, group, true, k) : Floats{};
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        float *to = out + m * width + k * kVector;
        Floats sum = load<Floats>(to);
        sum = mul_add(to_floats(sums[k][m]) * as_float(head[m]), scale, sum);
        if (has_minima) sum = mul_add(as_float(head[2 * M + m]) - Floats{}, minimum, sum);
        std::memcpy(to, &sum, sizeof sum);
      }
    }
  }
};

// A file's block: codes, and of the whole block and of its groups the scales, then minima. What a group
// has for its own is float16 where the block is no super-block.
struct Block {
  uint8_t codes[256];
  uint16_t whole[2];
  uint16_t scales[2][16];
};

inline void split_halves(const uint8_t *from, int64_t count, uint8_t *low, uint8_t *high) {
  for (int64_t i = 0; i < count; ++i) {
    low[i] = from[i] & 15;
    high[i] = from[i] >> 4;
  }
}

// Reads what the file's block has; a super-block's scales are bytes, those of Q6_K signed.
inline void read_block(const uint8_t *from, int64_t type, Block &block) {
  const auto read_half = [](const uint8_t *at) { return static_cast<uint16_t>(at[0] | at[1] << 8); };
  if (type == kQ6_K) {
    const uint8_t *low = from, *high = from + 128;
    for (int64_t i = 0; i < 256; ++i) {
      const int64_t part = i / 32 % 4, l = i % 32, part_low = i / 128 * 64 + part % 2 * 32 + l;
      const int upper = high[i / 128 * 32 + l] >> 2 * part & 3;
      block.codes[i] = static_cast<uint8_t>((low[part_low] >> (part / 2 * 4) & 15) | upper << 4);
    }
    for (int64_t g = 0; g < 16; ++g) block.scales[0][g] = from[192 + g];
    block.whole[0] = read_half(from + 208);
  } else if (type == kQ4_K) {
    block.whole[0] = read_half(from);
    block.whole[1] = read_half(from + 2);
    const uint8_t *bits = from + 4;
    for (int64_t g = 0; g < 8; ++g) {
      const bool is_low = g < 4;
      block.scales[0][g] = is_low ? bits[g] & 63 : (bits[g + 4] & 15) | bits[g - 4] >> 6 << 4;
      block.scales[1][g] = is_low ? bits[g + 4] & 63 : bits[g + 4] >> 4 | bits[g] >> 6 << 4;
    }
    for (int64_t i = 0; i < 4; ++i)
      split_halves(from + 16 + 32 * i, 32, block.codes + 64 * i, block.codes + 64 * i + 32);
  } else {
    block.scales[0][0] = read_half(from);
    if (type == kQ4_1) block.scales[1][0] = read_half(from + 2);
    if (type == kQ8_0)
      for (int64_t i = 0; i < 32; ++i)
        block.codes[i] = from[2 + i] ^ (kByteZero == 128 ? 0x80 : 0);
    else
      split_halves(from + (type == kQ4_1 ? 4 : 2), 16, block.codes, block.codes + 16);
  }
}

// Puts a block of output j, whose inputs begin at `first`, in its tile.
template <int kBits>
void put_block(const BlockMatrix<kBits> &w, const Block &block, int64_t inputs, int64_t first,
               int64_t j, char *tile) {
  typedef BlockMatrix<kBits> Matrix;
  const int64_t unit_inputs = w.groups * Matrix::kGroup, own = inputs / Matrix::kGroup;
  char *unit = tile + first / unit_inputs * w.unit_steps * kStepBytes;
  if (w.is_super)
    for (int64_t list = 0; list < 1 + w.has_minima; ++list)
      std::memcpy(unit + 2 * (list * kTile + j), &block.whole[list], 2);
  for (int64_t g = 0; g < own; ++g) {
    const int64_t group = first % unit_inputs / Matrix::kGroup + g, size = w.is_super ? 1 : 2;
    for (int64_t list = 0; list < 1 + w.has_minima; ++list)
      std::memcpy(const_cast<char *>(w.find_scales(unit, group, list == 1)) + size * j,
                  &block.scales[list][g], size);  // the lower byte of both first
    const uint8_t *codes = block.codes + g * Matrix::kGroup;
    uint32_t words[Matrix::kCodeSteps] = {};
    for (int64_t part = 0; part < Matrix::kParts; ++part) {
      uint32_t bytes;
      std::memcpy(&bytes, codes + 4 * part, 4);
      if (kBits == 8) {
        words[part] = bytes;
      } else {
        words[part / 2] |= (bytes & 0x0f0f0f0fu) << part % 2 * 4;
        if (kBits == 6) words[Matrix::kParts / 2] |= (bytes >> 4 & 0x03030303u) << 2 * part;
      }
    }
    char *to = unit + (w.scale_steps + group * Matrix::kCodeSteps) * kStepBytes + 4 * j;
    for (int64_t step = 0; step < Matrix::kCodeSteps; ++step)
      std::memcpy(to + step * kStepBytes, &words[step], 4);
  }
}

// Calls `use` with a part's matrix.
template <typename Use>
inline auto with_blocks(int64_t type, int64_t depth, const char *tiles, const Use &use) {
  switch (count_bits(type)) {
    case 8: return use(BlockMatrix<8>(type, depth, tiles));
    case 6: return use(BlockMatrix<6>(type, depth, tiles));
    default: return use(BlockMatrix<4>(type, depth, tiles));
  }
}

inline int64_t measure_blocks(const BlockRows &part) {
  return with_blocks(part.type, part.depth, nullptr, [&](const auto &w) {
    return static_cast<int64_t>(sizeof part) + (part.rows + kTile - 1) / kTile * w.tile_bytes;
  });
}

// Packs a part, whose rows of blocks lie `stride` bytes apart.
void pack_blocks(const uint8_t *rows, int64_t stride, const BlockRows &part, char *packed) {
  ask_for_huge_pages(packed, measure_blocks(part));
  std::memcpy(packed, &part, sizeof part);
  const BlockSizes sizes = get_block_sizes(part.type);
  with_blocks(part.type, part.depth, packed + sizeof part, [&](const auto &w) {
    for_each((part.rows + kTile - 1) / kTile, part.rows * w.depth > kParallelWork, [&](int64_t t) {
      char *tile = const_cast<char *>(w.tiles) + t * w.tile_bytes;
      std::memset(tile, 0, w.tile_bytes);
      Block block;
      for (int64_t j = 0; j < std::min(kTile, part.rows - t * kTile); ++j)
        for (int64_t i = 0; i < w.depth / sizes.inputs; ++i) {
          read_block(rows + (t * kTile + j) * stride + i * sizes.bytes, part.type, block);
          put_block(w, block, sizes.inputs, i * sizes.inputs, j, tile);
        }
    });
  });
}

// y[M][N] = x[M][depth] W^T + bias.
template <typename X, typename B, typename O>
void multiply_parts(const X *x, int64_t M, const BlockRows *part, const B *bias, int64_t N, O *y) {
  for (int64_t output = 0;;) {
    const B *own_bias = bias == nullptr ? nullptr : bias + output;
    with_blocks(part->type, part->depth, reinterpret_cast<const char *>(part + 1), [&](const auto &w) {
      multiply_matrix(x, M, w, own_bias, part->rows, y + output, N);
    });
    if (part->next == 0) return;
    output += part->rows;
    part = reinterpret_cast<const BlockRows *>(reinterpret_cast<const char *>(part) + part->next);
  }
}

}  // namespace
