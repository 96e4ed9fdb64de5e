// GGML's block types: their forms in one table, and what a file's block of each holds.

#pragma once

#include "integers.h"

namespace {

// Matrices as GGUF files have them, ggml/src/ggml-quants.c:
//
//     weight[n, i] = scale[n, g] * (code[n, i] - zero) + minimum[n, g]
//
// with codes of 2 to 6 or of 8 bits in groups of 32 or 16 inputs. Codes of IQ4_NL, IQ4_XS and MXFP4 are
// numbers in a book of 16 integers, which stand in the code's place.

// GGML's numbers of the types.
enum BlockType : int64_t {
  kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2_K = 10, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13,
  kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23, kMXFP4 = 39,
};

// How scales and minima are stored: float16 of each group; or of each group of a super-block bytes, signed
// bytes, or halves of one byte, the scale in the lower, all times the super-block's float16 (minima are
// less than zero), which is exact in float32; or the exponent of each group's power of two.
enum class Scales { kHalves, kBytes, kSignedBytes, kNibbles, kExponents };

// bits, group: of a code, of inputs. inputs, bytes: of a file's block, whose float16 begin at byte
// `factors`. zero: of a book's codes what was added to its integers, so that they are bytes. unit: inputs
// that are packed together.
struct BlockForm {
  int64_t bits, group, inputs, bytes, factors, unit;
  Scales scales;
  bool has_minima;
  int32_t zero, largest;  // code as it is multiplied
  bool has_book;
};

constexpr BlockForm find_form(int64_t type) {
  switch (type) {
    case kQ4_0: return {4, 32, 32, 18, 0, 64, Scales::kHalves, false, 8, 15, false};
    case kQ4_1: return {4, 32, 32, 20, 0, 64, Scales::kHalves, true, 0, 15, false};
    case kQ5_0: return {5, 32, 32, 22, 0, 64, Scales::kHalves, false, 16, 31, false};
    case kQ5_1: return {5, 32, 32, 24, 0, 64, Scales::kHalves, true, 0, 31, false};
    case kQ8_0: return {8, 32, 32, 34, 0, 64, Scales::kHalves, false, kByteZero, 255, false};
    case kQ2_K: return {2, 16, 256, 84, 80, 256, Scales::kNibbles, true, 0, 3, false};
    case kQ3_K: return {3, 16, 256, 110, 108, 256, Scales::kSignedBytes, false, 4, 7, false};
    case kQ4_K: return {4, 32, 256, 144, 0, 256, Scales::kBytes, true, 0, 15, false};
    case kQ5_K: return {5, 32, 256, 176, 0, 256, Scales::kBytes, true, 0, 31, false};
    case kQ6_K: return {6, 16, 256, 210, 208, 256, Scales::kSignedBytes, false, 32, 63, false};
    case kIQ4_NL: return {4, 32, 32, 18, 0, 64, Scales::kHalves, false, kByteZero, 255, true};
    case kIQ4_XS: return {4, 32, 256, 136, 0, 256, Scales::kSignedBytes, false, kByteZero, 255, true};
    case kMXFP4: return {4, 32, 32, 17, 0, 128, Scales::kExponents, false, 12, 24, true};
    default: return {};
  }
}

// A book's integers, each with the form's `zero` added: as bytes.
struct Book {
  alignas(16) uint8_t bytes[16];
};

constexpr Book find_book(int64_t type) {
  constexpr int kNonlinear[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  constexpr int kTwiceE2M1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  Book book{};
  for (int i = 0; i < 16; ++i)
    book.bytes[i] = static_cast<uint8_t>((type == kMXFP4 ? kTwiceE2M1 : kNonlinear)[i] + find_form(type).zero);
  return book;
}

// The bytes of a book that the bytes of `codes` number.
inline Words look_up(const Book &book, Words codes) {
#if defined(__AVX512BW__)
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i *>(book.bytes));
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i *>(book.bytes));
  return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), (__m256i)codes);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_u8(vld1q_u8(book.bytes), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof codes];
  std::memcpy(bytes, &codes, sizeof codes);
  for (auto &byte : bytes) byte = book.bytes[byte];
  std::memcpy(&codes, bytes, sizeof codes);
  return codes;
#endif
}

// kVector bytes as integers.
template <typename Byte>
inline Ints widen_bytes(const Byte *from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return (Ints)(std::is_signed<Byte>::value ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
  return (Ints)(std::is_signed<Byte>::value ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  Ints wide;
  for (int64_t j = 0; j < kVector; ++j) wide[j] = from[j];
  return wide;
#endif
}

// Half of the power of two that an exponent of MXFP4 stands for, as its book has twice the numbers.
inline float read_exponent(uint32_t exponent) {
  return as_float(exponent < 2 ? (exponent + 1) << 21 : (exponent - 1) << 23);
}

inline Floats read_exponents(Ints exponents) {
  return (Floats)(exponents < 2 ? (exponents + 1) << 21 : (exponents - 1) << 23);
}

// A file's block. factors: its scale and minimum in float16, which lie in the file or in `halves`; then
// its codes, and its bytes of scales, then of minima: signed ones as they are read.
struct Block {
  const uint8_t *factors;
  uint8_t codes[256], scales[2][16], halves[4];
};

inline void split_halves(const uint8_t *from, int64_t count, uint8_t *low, uint8_t *high) {
  for (int64_t i = 0; i < count; ++i) {
    low[i] = from[i] & 15;
    high[i] = from[i] >> 4;
  }
}

// Adds bits to codes, of 32 inputs after the other from higher bits of each of 32 bytes.
inline void add_upper_bits(const uint8_t *from, int64_t bits, int64_t place, int64_t groups, uint8_t *codes) {
  for (int64_t i = 0; i < 32 * groups; ++i)
    codes[i] |= static_cast<uint8_t>((from[i % 32] >> bits * (i / 32) & ((1 << bits) - 1)) << place);
}

// Scales and minima of Q4_K and Q5_K, 6 bits each.
inline void read_sixes(const uint8_t *bits, Block &block) {
  for (int64_t g = 0; g < 8; ++g) {
    const bool is_low = g < 4;
    block.scales[0][g] = is_low ? bits[g] & 63 : (bits[g + 4] & 15) | bits[g - 4] >> 6 << 4;
    block.scales[1][g] = is_low ? bits[g + 4] & 63 : bits[g + 4] >> 4 | bits[g] >> 6 << 4;
  }
}

// Reads a super-block's codes and bytes of scales.
inline void read_super_block(const uint8_t *from, int64_t type, Block &block) {
  uint8_t *codes = block.codes;
  if (type == kQ6_K) {
    for (int64_t i = 0; i < 4; ++i)
      split_halves(from + 32 * i, 32, codes + i / 2 * 128 + i % 2 * 32, codes + i / 2 * 128 + i % 2 * 32 + 64);
    for (int64_t i = 0; i < 2; ++i) add_upper_bits(from + 128 + 32 * i, 2, 4, 4, codes + 128 * i);
    std::memcpy(block.scales[0], from + 192, 16);
  } else if (type == kQ4_K || type == kQ5_K) {
    const uint8_t *low = from + (type == kQ5_K ? 48 : 16);
    for (int64_t i = 0; i < 4; ++i) split_halves(low + 32 * i, 32, codes + 64 * i, codes + 64 * i + 32);
    if (type == kQ5_K) add_upper_bits(from + 16, 1, 4, 8, codes);
    read_sixes(from + 4, block);
  } else if (type == kIQ4_XS) {
    const int64_t high = from[2] | from[3] << 8;
    for (int64_t g = 0; g < 8; ++g) {
      split_halves(from + 8 + 16 * g, 16, codes + 32 * g, codes + 32 * g + 16);
      const int64_t scale = (from[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4;
      block.scales[0][g] = static_cast<uint8_t>(scale - 32);
    }
  } else {
    std::memset(codes, 0, 256);
    for (int64_t i = 0; i < 2; ++i)
      add_upper_bits(from + (type == kQ3_K ? 32 : 16) + 32 * i, 2, 0, 4, codes + 128 * i);
    if (type == kQ2_K) {
      std::memcpy(block.scales[0], from, 16);
      return;
    }
    add_upper_bits(from, 1, 2, 8, codes);
    const uint8_t *bits = from + 96;
    for (int64_t g = 0; g < 16; ++g) {
      const int64_t low = bits[g % 8] >> g / 8 * 4 & 15;
      block.scales[0][g] = static_cast<uint8_t>((low | (bits[8 + g % 4] >> 2 * (g / 4) & 3) << 4) - 32);
    }
  }
}

// Reads what the file's block has.
inline void read_block(const uint8_t *from, int64_t type, Block &block) {
  const BlockForm form = find_form(type);
  block.factors = from + form.factors;
  if (form.inputs == 256) return read_super_block(from, type, block);
  if (type == kQ8_0) {
    for (int64_t i = 0; i < 32; ++i) block.codes[i] = from[2 + i] ^ (kByteZero == 128 ? 0x80 : 0);
    return;
  }
  split_halves(from + form.bytes - 16, 16, block.codes, block.codes + 16);
  if (form.bits == 5)
    for (int64_t i = 0; i < 32; ++i)
      block.codes[i] |= static_cast<uint8_t>((from[form.bytes - 20 + i / 8] >> i % 8 & 1) << 4);
  if (form.scales == Scales::kExponents) block.scales[0][0] = from[0];
}

}  // namespace
