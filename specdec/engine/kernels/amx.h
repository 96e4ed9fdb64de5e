// Products by Intel's AMX, with numbers and with integers.

#pragma once

#include "blocks.h"

namespace {

#if SPECDEC_AMX || SPECDEC_AMX_INTEGERS
// Asks the system, once, whether this process may use AMX's registers. Where it may not, plain code
// takes the same sums.
inline bool can_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_permitted;
}

// Shape of a thread's AMX registers while there is one of these: `rows` of sums in 0 to 3 and of inputs
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
    for (int index = 0; index < 8; ++index) {
      shape.row_bytes[index] = static_cast<uint16_t>(index == 4 || index == 5 ? 4 * words : kLine);
      shape.rows[index] = static_cast<uint8_t>(index < 6 || (index == 7 && is_for_three) ? rows : words);
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

// Registers from 0 on, each with its place in memory; their rows lie `row` bytes apart there.
template <int kCount>
struct Sums {
  char *addresses[kCount];
  int64_t row;

  void clear() const {
    for_each([](auto index) { clear_register<decltype(index)::value>(); });
  }
  void load(int64_t distance = 0) const {  // so many bytes from its place
    for_each([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      load_register<kIndex>(addresses[kIndex] + distance, row);
    });
  }
  void store() const {
    for_each([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      store_register<kIndex>(addresses[kIndex], row);
    });
  }

  // run(std::integral_constant<int, register>()) for each.
  template <typename F>
  static void for_each(const F &run) {
    visit(run, std::make_integer_sequence<int, kCount>());
  }

 private:
  template <typename F, int... kRegisters>
  static void visit(const F &run, std::integer_sequence<int, kRegisters...>) {
    (run(std::integral_constant<int, kRegisters>()), ...);
  }
};

constexpr int64_t kAmxRows = 16, kBandBytes = kBand * kStepBytes;
#endif

#if SPECDEC_AMX
// Adds the products of inputs X with a band W to sums.
template <int kSums, int kX, int kW>
inline void multiply_registers() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kW));
}
#endif

#if SPECDEC_AMX
constexpr int64_t kFewBytes = 1400000;  // of inputs, which stay in the second cache
constexpr int64_t kFewBlocks = 8;  // of rows, while which are multiplied bands of a tile stay in a cache:
constexpr int64_t kFewBands = 4;  // for so few blocks in the nearest,
constexpr int64_t kFewLongBands = 64;  // for more blocks in the second
constexpr int64_t kManyTiles = 8;  // that more inputs than kFewBytes take together
constexpr int64_t kManyBands = 8;  // at a time then: inputs of two blocks stay in the nearest cache
constexpr int64_t kThreeAhead = 4096;  // bytes ahead from which three blocks fetch
constexpr int64_t kPutTiles = 8;  // whose outputs are put together, as a row of them is another page
constexpr int64_t kPackBands = 16;  // of inputs that a thread packs at a time
// From here on a matrix is read from memory, for one row a little faster by plain code.
constexpr int64_t kCachedNumbers = 1 << 20;

// Bands `begin` to `end` of tiles of tile_bytes that follow each other; of these bands `num_whole` ones
// are whole, and the one after them is in `padded_band`, filled up with zeros.
struct Bands {
  const char *tile, *padded_band;
  int64_t tile_bytes, num_whole, begin, end;
};

// Memory that is fetched for each band where it does not stream: four times so many lines.
struct BandsAhead {
  const char *address;
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
  char *sum_bytes = reinterpret_cast<char *>(sums);
  constexpr int64_t kBlock = kW == 1 ? kWidth : 0;  // bytes of a row of all blocks' sums
  const auto find = [&](int block, int64_t line) { return sum_bytes + block * rows * kBlock + line * kLine; };
  const auto registers = [&] {
    if constexpr (kX == 3)
      return Sums<6>{{find(0, 0), find(0, 1), find(1, 0), find(1, 1), find(2, 0), find(2, 1)}, kWidth};
    else if constexpr (kX == 2)
      return Sums<4>{{find(0, 0), find(0, 1), find(1, 0), find(1, 1)}, kWidth};
    else if constexpr (kW == 2)
      return Sums<4>{{find(0, 0), find(0, 1), find(0, 2), find(0, 3)}, kWidth};
    else
      return Sums<2>{{find(0, 0), find(0, 1)}, kWidth};
  }();
  if (w.begin == 0)
    registers.clear();
  else
    registers.load();
  for (int64_t band = w.begin; band < w.end; ++band) {
    const bool is_whole = band < w.num_whole;
    const char *from = is_whole ? w.tile + band * kBandBytes : w.padded_band;
    const char *inputs = x + band * rows * kLine;
    const auto fetch = [&](int64_t begin, int64_t end) {  // of a band's 32 lines
      if constexpr (kStreams) {
#pragma GCC unroll 32
        for (int64_t line = begin; line < end; ++line)
#pragma GCC unroll 2
          for (int64_t g = 0; g < kW; ++g)
            __builtin_prefetch(ahead.address + g * w.tile_bytes + line * kLine, 0, kX > 1 ? 2 : 3);
      } else {
        for (int64_t line = 0; line < ahead.lines; ++line, ahead.address += kLine)
          __builtin_prefetch(ahead.address, 0, 2);
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
    if constexpr (kStreams) ahead.address += kBandBytes;
  }
  registers.store();
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
  const int64_t near_bytes = blocks == 3 ? kThreeAhead : kPrefetchBytes;
  static thread_local std::vector<Line> scratch;
  const bool is_long = M * N * depth > kParallelWork;
  run_in_team(is_long, [&] {
    Line *inputs = reserve(scratch, blocks * bands * rows);
    const int64_t num_slices = (bands + kPackBands - 1) / kPackBands;
    for_each(blocks * num_slices, is_long && M * depth > kPackedAlone, [&](int64_t slice) {
      const int64_t block = slice / num_slices, start = slice % num_slices * kPackBands;
      Line *to = inputs + (block * bands + start) * rows;
      for (int64_t band = start; band < std::min(start + kPackBands, bands); ++band)
        for (int64_t m = block * rows; m < (block + 1) * rows; ++m, ++to) {
          const int64_t begin = band * 2 * kBand;
          const int64_t num_used = m < M ? std::min(2 * kBand, depth - begin) : 0;
          const X *from = x + m * depth + begin;
          if constexpr (std::is_same<X, bf16>::value)
            if (num_used == 2 * kBand) {
              std::memcpy(to->numbers, from, sizeof to->numbers);
              continue;
            }
          *to = Line{};
          for (int64_t i = 0; i < num_used; ++i) store(to->numbers[i], to_float(from[i]));
        }
    });
    const int64_t sums_size = blocks * rows * kTile;  // of a tile
    const int64_t max_waiting = is_only ? together : std::max(together, kPutTiles);
    const char *matrix_bytes = reinterpret_cast<const char *>(packed);
    share_repeatable(tiles, max_waiting, is_long, [=](const ChunkClaim &claim, int64_t begin,
                                                         int64_t end_tile) {
      const Registers registers(rows, kBand, true);
      alignas(kLine) char padded_band[kManyTiles * kBandBytes];
      static thread_local std::vector<Line> sums_memory;
      float *sums = reinterpret_cast<float *>(reserve(sums_memory, max_waiting * sums_size * 4 / kLine));
      for (int64_t t = begin; t < end_tile; t += together) {
        const int64_t count = std::min(together, end_tile - t), tile_index = (t - begin) % max_waiting;
        const char *tile = matrix_bytes + t * tile_bytes;
        Bands w{tile, padded_band, tile_bytes, steps / kBand, 0, 0};
        if (w.num_whole < bands)
          for (int64_t g = 0; g < count; ++g) {
            const int64_t from = w.num_whole * kBandBytes, size = tile_bytes - from;
            std::memcpy(padded_band + g * kBandBytes, w.tile + g * tile_bytes + from, size);
            std::memset(padded_band + g * kBandBytes + size, 0, kBandBytes - size);
          }
        for (; w.begin < bands; w.begin = w.end) {
          w.end = std::min(w.begin + stretch, bands);
          // With many: what follows of these tiles, else of those after them.
          const bool is_end = w.end == bands;
          const int64_t next_bytes = is_few ? w.begin * kBandBytes + near_bytes
                                      : is_end ? together * tile_bytes : w.end * kBandBytes;
          const int64_t following = std::min(stretch, is_end ? bands : bands - w.end);
          const int64_t own_bands = w.end - w.begin, all_bands = groups * own_bands;
          const int64_t lines =
              is_few ? 0 : (following * (kBandBytes / kLine / 4) + all_bands - 1) / all_bands;
          int64_t fetched = 0, num_blocks = 0;
          for (int64_t block = 0; block < blocks; block += num_blocks) {
            num_blocks = is_alone ? 1 : blocks - block == 3 ? 3 : 2;
            const char *from = reinterpret_cast<const char *>(inputs) + block * x_bytes;
            const bool streams = is_few && block == 0;
            for (int64_t g = 0; g < count; g += together == 2 ? 2 : 1) {
              Bands group_bands = w;
              group_bands.tile += g * tile_bytes;
              group_bands.padded_band += g * kBandBytes;
              const BandsAhead ahead{group_bands.tile + next_bytes + fetched,
                                     fetched < following * kBandBytes ? lines : 0};
              float *to = sums + (tile_index + g) * sums_size + block * rows * kTile;
              if (is_alone && count == 2)
                add_amx<1, 2, true>(from, x_bytes, rows, group_bands, ahead, to);
              else if (is_alone)
                add_amx<1, 1, true>(from, x_bytes, rows, group_bands, ahead, to);
              else if (streams && num_blocks == 3)
                add_amx<3, 1, true>(from, x_bytes, rows, group_bands, ahead, to);
              else if (streams)
                add_amx<2, 1, true>(from, x_bytes, rows, group_bands, ahead, to);
              else if (num_blocks == 3)
                add_amx<3, 1, false>(from, x_bytes, rows, group_bands, ahead, to);
              else
                add_amx<2, 1, false>(from, x_bytes, rows, group_bands, ahead, to);
            }
            fetched += own_bands * lines * 4 * kLine;
          }
        }
        const int64_t num_finished = tile_index + count;
        if (!is_alone && num_finished < max_waiting && t + count < end_tile) continue;
        const auto write_results = [&] {
          if (is_alone)
            return put_sums(sums, M, count * kTile, bias, t * kTile, std::min(count * kTile, N - t * kTile),
                            N, y);
          for (int64_t m = 0; m < M; ++m)
            for (int64_t g = 0; g < num_finished; ++g) {
              const int64_t output = (t - tile_index + g) * kTile;
              put_sums(sums + g * sums_size + m * kTile, 1, kTile, bias, output,
                       std::min(kTile, N - output), N, y + m * N);
            }
        };
        if (!claim.write(write_results)) return;
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

constexpr int64_t kAmxLeastRows = 7;  // from which on integers are multiplied by AMX
constexpr int64_t kAmxChunk = 512;  // inputs that are multiplied at a time
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
  alignas(kLine) char stored_sums[2][kRows * kLine];
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
    for (int64_t word_slice = g * w.parts; word_slice < (g + 1) * w.parts; ++word_slice) {
      load_register<4 + kAt>(w.x + word_slice * w.part_words * 4 * kRows, 4 * w.part_words);
      load_register<6 + kAt>(w.w + word_slice * w.part_words * kStepBytes, kStepBytes);
      multiply_bytes<kAt, 4 + kAt, 6 + kAt, kIsSigned>();
    }
    store_register<kAt>(stored_sums[kAt], kLine);
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
    finish(stored_sums[0], g);
    if (g + 2 < w.count) start(even, g + 2);
    if (g + 1 < w.count) finish(stored_sums[1], g + 1);
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
template <int kBits>
void multiply_by_bytes(const Numbers &x, int64_t M, const IntegerMatrix<kBits> &w, int64_t N,
                       const Outputs &y) {
  typedef IntegerMatrix<kBits> Matrix;
  struct Line {
    alignas(kLine) char bytes[kLine];
  };
  const int64_t min_rows = (M + (M + kAmxRows - 1) / kAmxRows - 1) / ((M + kAmxRows - 1) / kAmxRows);
  const int64_t rows = min_rows <= 8 ? 8 : min_rows <= 12 ? 12 : kAmxRows, blocks = (M + rows - 1) / rows;
  const auto add = rows == 8    ? add_groups<8, kBits == 4>
                   : rows == 12 ? add_groups<12, kBits == 4>
                                : add_groups<kAmxRows, kBits == 4>;
  const int64_t group = w.group_steps * Matrix::kElements, part_words = std::min(kBand, group / 4);
  const int64_t num_slices = group / part_words / 4;
  const int64_t tiles = (N + kTile - 1) / kTile, x_bytes = w.groups * group * rows;
  const int64_t chunk = kAmxChunk / group, head = 2 * rows;
  const int64_t lines = (kAmxChunk / Matrix::kElements * kStepBytes / kLine + 2 * blocks * chunk - 1) /
                        (2 * blocks * chunk);
  static thread_local std::vector<Line> x_memory;
  static thread_local std::vector<uint32_t> heads_memory;
  const bool is_long = M * N * w.depth > kParallelWork;
  run_in_team(is_long, [&] {
    char *inputs = reserve(x_memory, blocks * x_bytes / kLine)->bytes;
    uint32_t *heads = reserve(heads_memory, blocks * w.groups * head);
    for_each(w.groups, is_long, [&](int64_t g) {
      for (int64_t m = 0; m < blocks * rows; ++m) {
        const int64_t block = m / rows, r = m % rows;
        int8_t bytes[kMaxGroup] = {};
        const float factor = kBits == 4 && !w.has_zeros ? 0.0625f : 1.0f;
        int32_t sum = 0;
        const float scale = m < M ? w.round(x, m, g, bytes, sum) * factor : 0.0f;
        uint32_t *group_heads = heads + (block * w.groups + g) * head;
        group_heads[r] = as_bits(scale);
        group_heads[rows + r] = static_cast<uint32_t>(Matrix::begin_sum(sum));
        char *to = inputs + block * x_bytes + g * group * rows + r * 4 * part_words;
        for (int64_t slice = 0; slice < num_slices; ++slice)
          std::memcpy(to + slice * part_words * 4 * rows, bytes + slice * part_words * 4, part_words * 4);
      }
    });
    share_repeatable(tiles, 1, is_long, [=](const ChunkClaim &claim, int64_t begin, int64_t end_tile) {
      const Registers registers(rows, part_words);
      alignas(kLine) static thread_local char unpacked[kAmxChunk * kTile] = {};
      static thread_local std::vector<Line> sums_memory;
      float *sums = reinterpret_cast<float *>(reserve(sums_memory, blocks * rows * kTile * 4 / kLine));
      for (int64_t t = begin; t < end_tile; ++t) {
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
                   heads + (block * w.groups + g) * head, count, num_slices, part_words,
                   w.scale_stride * 4, lines},
                  sums + block * rows * kTile + k * kVector);
        }
        const int64_t output = t * kTile;
        const auto write_results = [&] {
          y.put(y, sums, M, kTile, output, std::min(kTile, N - output));
        };
        if (!claim.write(write_results)) return;
      }
    });
  });
}
#endif

template <int kBits>
void multiply_integers(const Numbers &x, int64_t M, const IntegerMatrix<kBits> &w, int64_t N,
                       const Outputs &y) {
#if SPECDEC_AMX_INTEGERS
  if (M >= kAmxLeastRows && can_use_amx()) return multiply_by_bytes(x, M, w, N, y);
#endif
  multiply_matrix(x, M, w, N, y);
}

// Multiplies by a packed matrix of numbers, or of Integers or BlockRows.
template <typename W>
__attribute__((noinline)) void multiply_packed(const Numbers &x, int64_t M, int64_t depth, const W *packed,
                                               int64_t N, const Outputs &y) {
  if constexpr (!std::is_same<W, Integers>::value)
    multiply_matrix(x, M, FloatMatrix<W>(packed, depth), N, y);
  else if (packed->bits == 0)
    multiply_runs(x, M, reinterpret_cast<const BlockRows *>(packed), y);
  else if (packed->bits == 4)
    multiply_integers(x, M, IntegerMatrix<4>(packed), N, y);
  else
    multiply_integers(x, M, IntegerMatrix<8>(packed), N, y);
}

// Multiplies by a packed matrix, of numbers of type W, or of Integers or BlockRows.
template <typename X, typename W, typename B, typename O>
void multiply(const X *x, int64_t M, int64_t depth, const W *packed, const B *bias, int64_t N,
              O *y) {
#if SPECDEC_AMX
  if constexpr (std::is_same<W, bf16>::value)
    if ((M > 1 || N * depth < kCachedNumbers) && can_use_amx())
      return multiply_amx(x, M, depth, packed, bias, N, y);
#endif
  multiply_packed(Numbers(x), M, depth, packed, N, Outputs::make(bias, y, N));
}

}  // namespace
