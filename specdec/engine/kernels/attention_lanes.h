// Attention in bfloat16, by lanes of queries.

#pragma once

#include "amx.h"
#include "attention_floats.h"

namespace {

// Memory of the size and alignment of a line of the processor's cache.
struct CacheLine {
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

// Memory that is read next, and fetched into the second cache while something else is computed.
struct Prefetch {
  const char *from;
  int64_t lines;  // at each step

  void fetch() {
    for (int64_t line = 0; line < lines; ++line, from += kLine) __builtin_prefetch(from, 0, 2);
  }
};

// Multiplies `kCount` keys, `row` bytes one after the other, by queries [bands, kBand, kLanes] of pairs.
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
// Multiplies kKeys keys by such queries.
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

// Adds the weights of kLanes queries times kTiles tiles of values, to sums at `from` or to zeros.
template <int kTiles>
inline void add_weighted_amx(const char *weights, const char *values, int64_t row, int64_t bands,
                             const char *from, char *to) {
  Sums<kTiles> sums;
  sums.row = row;
  for (int64_t index = 0; index < kTiles; ++index) sums.addresses[index] = to + index * kLine;
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
// [bands, kBand, width], both pairs; of queries `first_query` to `last_query`, others may be computed too.
inline void add_weighted(const uint32_t *weights, int64_t first_query, int64_t last_query,
                         const uint32_t *values, int64_t width, int64_t bands, bool by_amx,
                         const float *earlier_sums, float *sums) {
#if SPECDEC_AMX
  if (by_amx) {
    for (int64_t h = 0; h < width; h += 4 * kLanes) {
      const char *weight = reinterpret_cast<const char *>(weights);
      const char *value = reinterpret_cast<const char *>(values + h);
      const char *from = earlier_sums != nullptr ? reinterpret_cast<const char *>(earlier_sums + h) : nullptr;
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
    for (int64_t q = first_query / kCount * kCount; q < last_query; q += kCount) {
      Floats total[kCount] = {};
      if (earlier_sums != nullptr)
        for (int64_t r = 0; r < kCount; ++r) total[r] = load<Floats>(earlier_sums + (q + r) * width + h);
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
                        bool by_amx, Prefetch prefetch, bf16 *scratch, float *scores) {
  const int64_t bands = (H + 2 * kBand - 1) / (2 * kBand), row = bands * kLine;
  const auto run = [&] {
    for (int64_t p = 0; p < count; p += kKeys, keys += kKeys * H, scores += kKeys * kLanes) {
      const int64_t num_keys = std::min(kKeys, count - p);
      const bf16 *from = keys;
      prefetch.fetch();
      if (num_keys < kKeys || H * 2 != row) {
        std::memset(static_cast<void *>(scratch), 0, kKeys * row);
        for (int64_t k = 0; k < num_keys; ++k)
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
inline void make_lane_weights(const float *scores, int64_t rows, float scale, Prefetch prefetch,
                        uint32_t *weights, float *tops, float *totals) {
  const float factor = scale * 1.44269504088896341f;
  for (int64_t lane = 0; lane < kLanes; lane += kVector) {
    Floats largest = Floats{} + kHidden;
    for (int64_t i = 0; i < rows; ++i) {
      const Floats x = load<Floats>(scores + i * kLanes + lane);
      largest = x > largest ? x : largest;
    }
    const Floats top = largest > Floats{} + kHidden ? largest : Floats{};
    // 2^x with a relative error below 3e-6, rounded to nearest.
    const auto round_weight = [&](const float *from) {
      const Floats x = (load<Floats>(from) - top) * factor, rounding = Floats{} + 12582912.0f;
      const Floats rounded = x + rounding, fraction = x - (rounded - rounding);
      Floats p = Floats{} + 9.58285e-3f;
      p = mul_add(p, fraction, Floats{} + 5.590644e-2f);
      p = mul_add(p, fraction, Floats{} + 2.4024099e-1f);
      p = mul_add(p, fraction, Floats{} + 6.9312419e-1f);
      p = mul_add(p, fraction, Floats{} + 1.0f);
      const Words weight = (Words)p + ((Words)rounded << 23);
      return (x > Floats{} - 125.0f ? weight : Words{}) + 0x8000u;
    };
    Floats weight_sums[4] = {};
    for (int64_t band = 0; band < rows / kBandPositions; ++band)
      for (int64_t pair = 0; pair < kBand; pair += kVector) {
        if (lane + pair == 0) prefetch.fetch();
        Words words[kVector];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kVector; ++i) {
          const float *from = scores + (band * kBandPositions + 2 * (pair + i)) * kLanes + lane;
          const Words low = round_weight(from), high = round_weight(from + kLanes) & 0xffff0000u;
          words[i] = low >> 16 | high;
          weight_sums[i % 2 * 2] += widen_high(low);
          weight_sums[i % 2 * 2 + 1] += (Floats)high;
        }
        transpose(words);
        for (int64_t q = 0; q < kVector; ++q)
          std::memcpy(weights + band * kLaneWords + (lane + q) * kBand + pair, &words[q],
                      sizeof(Words));
      }
    const Floats total = (weight_sums[0] + weight_sums[1]) + (weight_sums[2] + weight_sums[3]);
    const Floats scaled = largest > Floats{} + kHidden ? largest * scale : largest;
    std::memcpy(tops + lane, &scaled, sizeof scaled);
    std::memcpy(totals + lane, &total, sizeof total);
  }
}

// Hides scores [rows, kLanes] but those from first_positions[lane] to last_positions[lane].
inline void hide_scores(const float *first_positions, const float *last_positions, int64_t rows,
                        float *scores) {
  const float first_seen = *std::max_element(first_positions, first_positions + kLanes);
  const float end = *std::min_element(last_positions, last_positions + kLanes);
  for (int64_t i = 0; i < rows; ++i) {
    const float position = static_cast<float>(i);
    if (position >= first_seen && position < end) continue;
    for (int64_t lane = 0; lane < kLanes; lane += kVector) {
      float *to = scores + i * kLanes + lane;
      const Floats score = load<Floats>(to), position_lanes = Floats{} + position;
      const Floats hidden = Floats{} + kHidden;
      const Floats ended = position_lanes < load<Floats>(last_positions + lane) ? score : hidden;
      const Floats visible = position_lanes >= load<Floats>(first_positions + lane) ? ended : hidden;
      std::memcpy(to, &visible, sizeof visible);
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
    const uint32_t low_bits = low != nullptr && h < H ? low[h].bits : 0;
    to[h] = low_bits | (high != nullptr && h < H ? static_cast<uint32_t>(high[h].bits) << 16 : 0);
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
        transpose(words);
        for (int64_t i = 0; i < kVector; ++i)
          std::memcpy(to + band * kLaneWords + (pair + i) * kLanes + lane, &words[i], sizeof(Words));
      }
  }
}

// Memory of a thread for queries by lanes, one array after the other.
struct LaneWorkspace {
  int64_t query_words;  // of a query in pairs
  uint32_t *queries, *weights, *values, *tail_values;
  float *scores, *newest, *sums;
  bf16 *keys;

  static int64_t count_words(int64_t H) { return round_up(H, kBandPositions) / 2; }

  // Its size in floats; each array takes whole cache lines.
  static int64_t measure(int64_t queries, int64_t H, int64_t C) {
    const int64_t words = count_words(H), width = round_up(H, kLanes);
    return (queries + kKeys) * words + kLanes * (round_up(C, kKeys) + width) +
           kBlockPositions * (kLanes + kLanes / 2 + width);
  }

  LaneWorkspace(float *memory, int64_t count, int64_t H, int64_t C) : query_words(count_words(H)) {
    const int64_t width = round_up(H, kLanes), block = kBlockPositions;
    const auto take = [&](int64_t size) { return std::exchange(memory, memory + size); };
    const auto take_words = [&](int64_t size) { return reinterpret_cast<uint32_t *>(take(size)); };
    queries = take_words(count * query_words);
    weights = take_words(block / 2 * kLanes);
    values = take_words(block / 2 * width);
    tail_values = take_words(block / 2 * width);
    scores = take(block * kLanes);
    newest = take(round_up(C, kKeys) * kLanes);
    sums = take(kLanes * width);
    keys = reinterpret_cast<bf16 *>(take(kKeys * query_words));
  }
};

}  // namespace
