// Attention of a step's tokens over the cache.

#pragma once

#include "attention_lanes.h"

namespace {

// Attention of a layer. q_norm, k_norm: weights [H] of the norms of each query and each key before
// they are rotated, or null; cosine, sine: [lines, rotated]; window: positions that a token sees,
// itself included, or 0 for all; scale: of the scores; cap: a score s becomes cap tanh(s / cap), or 0
// where it stays; epsilon: of the norms, offset: what their weights are stored less; query_shift: how
// many lines further on a query's line is than a key's; sinks: [N], a score of each query head that has
// no value, or null.
template <typename E>
struct Attention {
  const E *q_norm, *k_norm, *cosine, *sine;
  int64_t rotated, window;
  float scale, cap, epsilon, offset = 0.0f;
  int64_t query_shift = 0;
  const E *sinks = nullptr;
};

// Queries that use keys and values at a time, while these are cached: of a step of up to so many
// all, of longer ones half as many.
constexpr int64_t kQueries = 128;
// Steps of as many queries may be halved for more threads: fewer take little longer together.
constexpr int64_t kEvenQueries = 16;

// A step of B rows with T tokens each. rows, past: [B], a row's place in the cache and how many tokens
// are committed there; lines: [B, T], a token's line of the rotary tables; positions: [B, C], of the C
// newest tokens in the cache in their sequence, the step's own last; tree_mask: [B, T, C], of the same;
// output_mask: [B, T], zero for tokens whose output is not read and may be anything, or null. All of it
// stays as it is until the call is over.
struct Step {
  int64_t B, T, C;
  const int64_t *rows, *positions, *lines, *past;
  const uint8_t *tree_mask, *output_mask;
};

// N query heads and K key/value heads of H numbers, and a cache of R rows with S positions.
struct Heads {
  int64_t N, K, H, R, S;
};

// A layer's attention over a step. qkv: [B, T, (N + 2K) H], normed and rotated in place; cache: keys
// [R, K, S, H] then values of one layer; out: [B, T, N H].
//
// The queries of a K/V head of a row are numbered q = t * group + g, and go by tiles. Where there are
// fewer tiles than threads, the blocks of each tile are shared out in slices, and merged afterwards.
// Threads have a copy of this object, which points to nothing that another layer
// changes but for numbers: a thread that is late computes what is not taken, and nothing worse.
template <typename E>
class Attend {
 public:
  Attend(E *qkv, E *cache, const Attention<E> &attention, const Step &step, const Heads &heads, E *out)
      : attention(attention), step(step), heads(heads), qkv(qkv), out(out), key_cache(cache),
        value_cache(cache + heads.R * heads.K * heads.S * heads.H) {
    for (int64_t b = 0; b < step.B; ++b) {
      const BlockRange range = find_range(b);
      longest = std::max(longest, step.past[b] + step.C - range.first_block * kBlockPositions);
      most_blocks = std::max(most_blocks, range.count());
    }
    const int64_t num_queries = step.T * group;
    tile_size = num_queries > kQueries ? kQueries / 2 : num_queries;
    // Where no blocks can be shared out, half as many queries leave fewer threads without any.
    const bool is_uneven = most_blocks == 1 && step.B * heads.K % count_threads() != 0;
    if (is_uneven && tile_size == num_queries && tile_size >= kEvenQueries)
      tile_size = round_up(tile_size / 2, kSpanRows);
    num_tiles = (num_queries + tile_size - 1) / tile_size;
    line_size = round_up(std::min(longest, kBlockPositions + step.C), kSpan);
    padded_queries = kByBands ? round_up(tile_size, kLanes) : tile_size;
    partial_size = round_up(padded_queries * (width + 2), kSums);  // so that what follows is aligned
  }

  void run() {
    for_each(step.B * step.T, step.B * step.T * stride > kParallelWork, [&](int64_t bt) { rotate(bt); });
    const bool is_long = step.B * step.T * heads.N * heads.H * longest > kParallelWork;
    run_in_team(is_long, [&] {
      const int64_t threads = is_long ? count_threads() : 1, all_tiles = step.B * heads.K * num_tiles;
      if (all_tiles % threads != 0)
        num_slices = std::min(most_blocks, (4 * threads + all_tiles - 1) / all_tiles);
      static thread_local std::vector<float> memory;
      if (num_slices > 1) partials = reserve(memory, all_tiles * most_blocks * partial_size);
      const Attend copy = *this;
      share_repeatable(all_tiles * num_slices, 1, is_long,
                       [copy](const ChunkClaim &claim, int64_t begin, int64_t end) {
                         copy.run_slices(claim, begin, end);
                       });
      if (num_slices == 1) return;
      share_repeatable(all_tiles, 1, is_long, [copy](const ChunkClaim &claim, int64_t begin, int64_t end) {
        copy.merge_tiles(claim, begin, end);
      });
    });
  }

 private:
  static constexpr bool kByBands = kSumsBands && std::is_same<E, bf16>::value;

  // The blocks that a row's tokens see, from `first_block` on. Those before `last_block` hold committed
  // positions only; `last_block` holds the newest committed ones and the step's tokens, which may lie
  // in `num_last` blocks by their places in the text.
  struct BlockRange {
    int64_t first_block, last_block, num_last;
    bool is_chain;  // each of the step's tokens lies at its place, so all blocks are alike
    int64_t count() const { return last_block + num_last - first_block; }
  };

  // The row, the K/V head and the queries of a tile, and the keys and values that it reads.
  struct QueryTile {
    int64_t number, b, k, first_query, count;
    const E *keys, *values;
    BlockRange range;
  };

  // Memory that a thread works in.
  struct Workspace {
    PartialOutput merged_output, block;
    LaneWorkspace lanes;
    float *queries, *scores, *weights, *wide, *line;
    std::vector<int32_t> *seen;  // of the tile's row
    bool by_amx = false;
#if SPECDEC_AMX
    std::optional<Registers> registers;
#endif

    Workspace(const Attend &attend, float *memory)
        : merged_output(memory, attend.padded_queries, attend.width),
          block(memory + attend.partial_size, attend.padded_queries, attend.width),
          lanes(memory + 2 * attend.partial_size, attend.padded_queries, attend.heads.H, attend.step.C),
          queries(memory + 2 * attend.partial_size),
          scores(queries + attend.tile_size * attend.heads.H),
          weights(scores + attend.tile_size * attend.line_size),
          wide(weights + attend.tile_size * attend.line_size),
          line(wide + kSpan * attend.width) {
#if SPECDEC_AMX
      by_amx = kByBands && can_use_amx();
      if (by_amx) registers.emplace(kAmxRows);
#endif
      static thread_local std::vector<int32_t> slots;
      seen = &slots;
    }
  };

  float *borrow_memory() const {
    static thread_local std::vector<CacheLine> memory;
    const int64_t size =
        kByBands ? LaneWorkspace::measure(padded_queries, heads.H, step.C)
                 : tile_size * (heads.H + 2 * line_size) + kSpan * width + kBlockPositions;
    return reinterpret_cast<float *>(reserve(memory, (2 * partial_size + size) * 4 / kLine + 1));
  }

  void rotate(int64_t bt) {
    const int64_t b = bt / step.T, slot = step.past[b] + step.C - step.T + bt % step.T;
    const int64_t line = step.lines[bt] * attention.rotated, H = heads.H;
    const E *cosine = attention.cosine + line, *sine = attention.sine + line;
    const int64_t shift = attention.query_shift * attention.rotated;
    E *token = qkv + bt * stride;
    for (int64_t n = 0; n < heads.N + heads.K && attention.q_norm != nullptr; ++n)
      rms_norm_row(token + n * H, n < heads.N ? attention.q_norm : attention.k_norm, token + n * H, H,
                   attention.epsilon, attention.offset);
    for (int64_t n = 0; n < heads.N && attention.rotated > 0; ++n)
      rotate_to(token + n * H, token + n * H, cosine + shift, sine + shift, attention.rotated, H);
    for (int64_t k = 0; k < heads.K; ++k) {
      const int64_t offset = (step.rows[b] * heads.K + k) * head_size + slot * H;
      rotate_to(token + (heads.N + k) * H, key_cache + offset, cosine, sine, attention.rotated, H);
      std::memcpy(value_cache + offset, token + (heads.N + heads.K + k) * H, sizeof(E) * H);
    }
  }

  // The first committed position that a token sees: those are stored at their own numbers.
  int64_t find_first_position(int64_t b, int64_t t) const {
    return std::clamp<int64_t>(get_lowest(b, t), 0, step.past[b]);
  }

  // Positions of a row's newest tokens [C], of which the last T are the step's attend.
  const int64_t *get_positions(int64_t b) const { return step.positions + b * step.C; }

  int64_t get_position(int64_t b, int64_t t) const { return get_positions(b)[step.C - step.T + t]; }

  // The lowest position that a token's window holds.
  int64_t get_lowest(int64_t b, int64_t t) const {
    return attention.window > 0 ? get_position(b, t) - attention.window + 1 : 0;
  }

  const uint8_t *get_mask(int64_t b, int64_t t) const {
    return step.tree_mask + (b * step.T + t) * step.C;
  }

  bool is_chain(int64_t b) const {
    const auto is_seen = [](uint8_t seen) { return seen != 0; };
    for (int64_t t = 0; t < step.T; ++t) {
      const uint8_t *mask = get_mask(b, t);
      if (attention.window > 0 && get_position(b, t) != step.past[b] + t) return false;
      if (!std::all_of(mask, mask + t + 1, is_seen)) return false;
      if (std::any_of(mask + t + 1, mask + step.C, is_seen)) return false;
    }
    return true;
  }

  BlockRange find_range(int64_t b) const {
    int64_t first_position = step.past[b];
    for (int64_t t = 0; t < step.T; ++t)
      first_position = std::min(first_position, find_first_position(b, t));
    const int64_t last_block = step.past[b] / kBlockPositions;
    const int64_t num_last = (step.past[b] % kBlockPositions + step.C - 1) / kBlockPositions + 1;
    if (kByBands && step.C == step.T && is_chain(b))
      return {first_position / kBlockPositions, last_block + num_last - 1, 1, true};
    return {first_position / kBlockPositions, last_block, num_last, false};
  }

  QueryTile get_tile(int64_t number) const {
    const int64_t b = number / (heads.K * num_tiles), k = number / num_tiles % heads.K;
    const int64_t first_query = number % num_tiles * tile_size;
    const int64_t offset = (step.rows[b] * heads.K + k) * head_size;
    return {number, b, k, first_query, std::min(tile_size, step.T * group - first_query), key_cache + offset,
            value_cache + offset, find_range(b)};
  }

  int64_t get_token(const QueryTile &tile, int64_t q) const { return (tile.first_query + q) / group; }

  int64_t get_head(const QueryTile &tile, int64_t q) const {
    return tile.k * group + (tile.first_query + q) % group;
  }

  const E *get_query(const QueryTile &tile, int64_t q) const {
    return qkv + (tile.b * step.T + get_token(tile, q)) * stride + get_head(tile, q) * heads.H;
  }

  bool needs_output(const QueryTile &tile) const {
    if (step.output_mask == nullptr) return true;
    const uint8_t *mask = step.output_mask + tile.b * step.T;
    return std::any_of(mask + get_token(tile, 0), mask + get_token(tile, tile.count - 1) + 1,
                       [](uint8_t is_set) { return is_set != 0; });
  }

  void write_outputs(const ChunkClaim &claim, const QueryTile &tile, const PartialOutput &partial) const {
    claim.write([&] {
      for (int64_t q = 0; q < tile.count; ++q) {
        const float *sums = partial.sums + q * width;
        const int64_t head = get_head(tile, q);
        E *to = out + ((tile.b * step.T + get_token(tile, q)) * heads.N + head) * heads.H;
        float share = 1.0f, total = partial.totals[q];
        if (attention.sinks != nullptr) {
          const float sink = to_float(attention.sinks[head]), top = std::max(sink, partial.tops[q]);
          share = exp_fast(partial.tops[q] - top);
          total = mul_add(total, share, exp_fast(sink - top));
        }
        for (int64_t h = 0; h < heads.H; ++h) store(to[h], sums[h] * share / total);
      }
    });
  }

  PartialOutput get_partial(const QueryTile &tile, int64_t block) const {
    float *memory = partials + (tile.number * most_blocks + block) * partial_size;
    return PartialOutput(memory, padded_queries, width);
  }

  void run_slices(const ChunkClaim &claim, int64_t begin, int64_t end) const {
    Workspace memory(*this, borrow_memory());
    for (int64_t index = begin; index < end; ++index) {
      const QueryTile tile = get_tile(index / num_slices);
      if (!needs_output(tile)) continue;
      if (num_slices > 1) {
        run_slice(memory, tile, index % num_slices, [&](int64_t block, const PartialOutput &partial) {
          claim.write([&] { std::copy_n(partial.sums, partial_size, get_partial(tile, block).sums); });
        });
        continue;
      }
      memory.merged_output.clear(tile.count);
      run_slice(memory, tile, 0,
                [&](int64_t, const PartialOutput &partial) {
                  memory.merged_output.add(partial, tile.count);
                });
      write_outputs(claim, tile, memory.merged_output);
    }
  }

  void merge_tiles(const ChunkClaim &claim, int64_t begin, int64_t end) const {
    const PartialOutput merged_output(borrow_memory(), padded_queries, width);
    for (int64_t tile_index = begin; tile_index < end; ++tile_index) {
      const QueryTile tile = get_tile(tile_index);
      if (!needs_output(tile)) continue;
      merged_output.clear(tile.count);
      for (int64_t i = 0; i < tile.range.count(); ++i) merged_output.add(get_partial(tile, i), tile.count);
      write_outputs(claim, tile, merged_output);
    }
  }

  // Calls `take` with the number and the partial output of each block in a slice of a tile.
  template <typename Take>
  void run_slice(Workspace &memory, const QueryTile &tile, int64_t slice, const Take &take) const {
    const int64_t blocks = tile.range.last_block + 1 - tile.range.first_block;
    const int64_t begin = tile.range.first_block + blocks * slice / num_slices;
    const int64_t end = tile.range.first_block + blocks * (slice + 1) / num_slices;
    if constexpr (kByBands) {
      if (!tile.range.is_chain) list_seen(tile.b, *memory.seen);
      for (int64_t q = 0; q < tile.count; q += kLanes)
        pair_queries([&](int64_t lane) { return get_query(tile, std::min(q + lane, tile.count - 1)); },
                     heads.H, memory.lanes.queries + q * memory.lanes.query_words);
      for (int64_t block = begin; block < end; ++block)
        run_lanes(memory, tile, block, block + 1 < end, take);
    } else {
      for (int64_t q = 0; q < tile.count; ++q) {
        const E *query = get_query(tile, q);
        for (int64_t h = 0; h < heads.H; ++h)
          memory.queries[q * heads.H + h] = to_float(query[h]) * attention.scale;
      }
      for (int64_t block = begin; block < end; ++block) run_block(memory, tile, block, take);
    }
  }

  // Computes a block in floats, and hands its partial output to `take`.
  template <typename Take>
  void run_block(Workspace &memory, const QueryTile &tile, int64_t block, const Take &take) const {
    const int64_t base = block * kBlockPositions, past = step.past[tile.b], H = heads.H;
    const bool is_last = block == tile.range.last_block;
    const int64_t length = is_last ? past + step.C - base : kBlockPositions;
    compute_scores(memory.queries, tile.count, tile.keys + base * H, length, H, attention.cap,
                   memory.wide, memory.scores, line_size);
    for (int64_t i = 0; i < (is_last ? tile.range.num_last : 1); ++i) {
      int64_t begin = 0;
      if (is_last) {
        begin = i > 0 ? past - base : 0;
        make_newest_weights(memory, tile, i);
      } else {
        for (int64_t q = 0; q < tile.count; ++q) {
          float *line = memory.scores + q * line_size;
          const int64_t unseen = find_first_position(tile.b, get_token(tile, q)) - base;
          if (unseen > 0) std::fill_n(line, std::min(unseen, kBlockPositions), kHidden);
          make_weights(line, kBlockPositions, memory.block.tops[q], memory.block.totals[q]);
        }
      }
      add_values((is_last ? memory.weights : memory.scores) + begin, tile.count, line_size,
                 tile.values + (base + begin) * H, length - begin, H, memory.wide, memory.block.sums,
                 width);
      take(block - tile.range.first_block + i, memory.block);
    }
  }

  // The weights of the newest positions, of which those in the text's block `block_index` count: a
  // token's place there is the number of tokens before it that a query sees with it. memory.line: the
  // block's scores in the order of these places.
  void make_newest_weights(Workspace &memory, const QueryTile &tile, int64_t block_index) const {
    const int64_t past = step.past[tile.b], before = past % kBlockPositions;
    const int64_t begin = block_index * kBlockPositions, C = step.C;
    const int64_t num_places = std::min(kBlockPositions, before + C - begin);
    const int64_t committed = block_index == 0 ? before : 0;
    float *line = memory.line;
    for (int64_t q = 0; q < tile.count; ++q) {
      const int64_t t = get_token(tile, q), lowest = get_lowest(tile.b, t);
      const int64_t *positions = get_positions(tile.b);
      const uint8_t *mask = get_mask(tile.b, t);
      const float *from = memory.scores + q * line_size;
      float *to = memory.weights + q * line_size;
      std::copy_n(from, committed, line);
      std::fill(line + committed, line + round_up(num_places, kSums), kHidden);
      const int64_t unseen = find_first_position(tile.b, t) - (past - before);
      std::fill(line, line + std::max<int64_t>(0, std::min(committed, unseen)), kHidden);
      for (int64_t j = 0, place = before - begin; j < C; ++j)
        if (mask[j] && ++place > 0 && place <= num_places && positions[j] >= lowest)
          line[place - 1] = from[before + j];
      make_weights(line, round_up(num_places, kSums), memory.block.tops[q], memory.block.totals[q]);
      std::copy_n(line, committed, to);
      for (int64_t j = 0, place = before - begin; j < C; ++j)
        to[before + j] = mask[j] && ++place > 0 && place <= num_places ? line[place - 1] : 0.0f;
    }
  }

  // seen: [T, C + 1], of each of a row's tokens the newest tokens that it sees, and last their number.
  void list_seen(int64_t b, std::vector<int32_t> &seen) const {
    seen.assign(step.T * (step.C + 1), 0);
    for (int64_t t = 0; t < step.T; ++t) {
      int32_t *slots = &seen[t * (step.C + 1)];
      const uint8_t *mask = get_mask(b, t);
      for (int64_t j = 0; j < step.C; ++j)
        if (mask[j]) slots[slots[step.C]++] = static_cast<int32_t>(j);
    }
  }

  const int32_t *get_seen(const Workspace &memory, const QueryTile &tile, int64_t q) const {
    return &(*memory.seen)[get_token(tile, q) * (step.C + 1)];
  }

  // A block by lanes. `length` positions are there for all queries, `common` of them in bands that are
  // the same for all queries; `newest` committed positions are in the block of the step's tokens.
  struct LaneBlock {
    int64_t base, length, common, newest;
    bool is_tree;
    Prefetch next_keys;  // of the next block's keys

    int64_t count_bands() const { return common / kBandPositions; }
  };

  // Computes a block by lanes, and hands its partial output to `take`. While the first queries read
  // keys, values are fetched; then the next block's keys.
  template <typename Take>
  void run_lanes(Workspace &memory, const QueryTile &tile, int64_t number, bool has_next,
                 const Take &take) const {
    const BlockRange &range = tile.range;
    const int64_t past = step.past[tile.b], base = number * kBlockPositions, H = heads.H;
    const int64_t newest = past % kBlockPositions;
    const bool is_tree = number == range.last_block && !range.is_chain;
    const int64_t length = is_tree ? newest : std::min(kBlockPositions, past + step.C - base);
    const int64_t common =
        is_tree ? newest / kBandPositions * kBandPositions : round_up(length, kBandPositions);
    const int64_t lines = kBandPositions * H * 2 / kLine;  // of a band's
    const char *next_keys = reinterpret_cast<const char *>(tile.keys + (base + kBlockPositions) * H);
    const LaneBlock block{base, length, common, newest, is_tree, {next_keys, has_next ? lines / 2 : 0}};
    for (int64_t i = 0; i < (is_tree ? range.num_last : 1); ++i) {
      const int64_t begin = i * kBlockPositions - newest;  // the first of the step's here
      const int64_t before = i == 0 ? length : 0, bands = i == 0 ? block.count_bands() : 0;
      for (int64_t q = 0; q < tile.count; q += kLanes) {
        const int64_t num_queries = std::min(kLanes, tile.count - q);
        const bool is_first = i == 0 && q == 0;
        const Prefetch value_prefetch{reinterpret_cast<const char *>(tile.values + base * H),
                                      is_first ? lines * kKeys / kBandPositions : 0};
        if (before > 0) score_keys(memory, tile, base, before, q, value_prefetch, memory.lanes.scores);
        const int64_t places = hide_unseen(memory, tile, block, q, begin, before);
        if (is_tree) add_newest_scores(memory, tile, q, begin);
        float *sums = memory.block.sums + q * width;
        make_lane_weights(memory.lanes.scores, places, is_capped() ? 1.0f : attention.scale,
                          is_first ? block.next_keys : Prefetch{nullptr, 0}, memory.lanes.weights,
                          memory.block.tops + q, memory.block.totals + q);
        if (is_first) pair_values(memory, tile, block);
        add_weighted(memory.lanes.weights, 0, num_queries, memory.lanes.values, width, bands,
                     memory.by_amx, nullptr, sums);
        if (is_tree) add_tail_values(memory, tile, block, q, begin, before, bands, sums);
      }
      take(number - range.first_block + i, memory.block);
    }
  }

  bool is_capped() const { return attention.cap > 0.0f || !(attention.scale > 0.0f); }

  void score_keys(Workspace &memory, const QueryTile &tile, int64_t slot, int64_t num_keys, int64_t q,
                  Prefetch prefetch, float *to) const {
    const LaneWorkspace &lanes = memory.lanes;
    score_lanes(tile.keys + slot * heads.H, num_keys, heads.H, lanes.queries + q * lanes.query_words,
                memory.by_amx, prefetch, lanes.keys, to);
    for (float *end = to + num_keys * kLanes; to < end && is_capped(); to += kVector) {
      Floats x = load<Floats>(to) * attention.scale;
      if (attention.cap > 0.0f) x = attention.cap * tanh_fast(x / attention.cap);
      std::memcpy(to, &x, sizeof x);
    }
  }

  // Hides the scores of positions that the queries from q on do not see of a block; returns the places
  // that any of these queries uses, in whole bands.
  int64_t hide_unseen(Workspace &memory, const QueryTile &tile, const LaneBlock &block, int64_t q,
                      int64_t begin, int64_t before) const {
    float first_places[kLanes], last_places[kLanes];
    int64_t longest_lane = before;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t query = std::min(q + lane, tile.count - 1), t = get_token(tile, query);
      const int64_t from =
          attention.window > 0 ? get_position(tile.b, t) - attention.window + 1 - block.base : 0;
      const int64_t to = tile.range.is_chain ? step.past[tile.b] + t + 1 - block.base : before;
      first_places[lane] = static_cast<float>(std::min(std::max<int64_t>(from, 0), before));
      last_places[lane] = static_cast<float>(std::min(std::max<int64_t>(to, 0), before));
      if (block.is_tree) {
        const int64_t count = get_seen(memory, tile, query)[step.C] - begin;
        longest_lane = std::max(longest_lane, std::min<int64_t>(kBlockPositions, count));
      }
    }
    const int64_t places = round_up(longest_lane, kBandPositions);
    hide_scores(first_places, last_places, places, memory.lanes.scores);
    return places;
  }

  // Puts scores of the newest tokens at the places that these have for each query.
  void add_newest_scores(Workspace &memory, const QueryTile &tile, int64_t q, int64_t begin) const {
    const LaneWorkspace &lanes = memory.lanes;
    score_keys(memory, tile, step.past[tile.b], step.C, q, Prefetch{nullptr, 0}, lanes.newest);
    const int64_t *positions = get_positions(tile.b);
    for (int64_t lane = 0; lane < std::min(kLanes, tile.count - q); ++lane) {
      const int64_t lowest = get_lowest(tile.b, get_token(tile, q + lane));
      const int32_t *slots = get_seen(memory, tile, q + lane);
      const int64_t end = std::min<int64_t>(slots[step.C], begin + kBlockPositions);
      for (int64_t n = std::max<int64_t>(begin, 0); n < end; ++n)
        if (positions[slots[n]] >= lowest)
          lanes.scores[(n - begin) * kLanes + lane] = lanes.newest[slots[n] * kLanes + lane];
    }
  }

  // Lays out a block's values in pairs, while the second half of the next block's keys is fetched.
  void pair_values(Workspace &memory, const QueryTile &tile, const LaneBlock &block) const {
    Prefetch prefetch{block.next_keys.from + block.next_keys.lines * kBandBlock * kLine,
                      block.next_keys.lines};
    for (int64_t p = 0; p < block.common; p += 2) {
      const E *low = tile.values + (block.base + p) * heads.H;
      if (p % kBandPositions == 0) prefetch.fetch();
      pair_rows(p < block.length ? low : nullptr, p + 1 < block.length ? low + heads.H : nullptr,
                heads.H, width, memory.lanes.values + p / 2 * width);
    }
  }

  // Adds the values after the common bands: each query has its own there, or shares them with others
  // that see the same tokens.
  void add_tail_values(Workspace &memory, const QueryTile &tile, const LaneBlock &block, int64_t q,
                       int64_t begin, int64_t before, int64_t bands, float *sums) const {
    const LaneWorkspace &lanes = memory.lanes;
    const int64_t num_queries = std::min(kLanes, tile.count - q), C = step.C, H = heads.H;
    for (int64_t lane = 0, next_lane = 0; lane < num_queries; lane = next_lane) {
      const int32_t *slots = get_seen(memory, tile, q + lane);
      for (next_lane = lane + 1; next_lane < num_queries; ++next_lane)
        if (!std::equal(slots, slots + C + 1, get_seen(memory, tile, q + next_lane))) break;
      const int64_t end = std::min<int64_t>(slots[C] - begin, kBlockPositions);
      const auto find_value = [&](int64_t place) -> const E * {
        if (place < before) return tile.values + (block.base + place) * H;
        return place < end ? tile.values + (step.past[tile.b] + slots[place + begin]) * H : nullptr;
      };
      uint32_t *to = lanes.tail_values;
      const int64_t stop = round_up(end, kBandPositions);
      for (int64_t place = bands * kBandPositions; place < stop; place += 2, to += width)
        pair_rows(find_value(place), find_value(place + 1), H, width, to);
      add_weighted(lanes.weights + bands * kLaneWords, lane, next_lane, lanes.tail_values, width,
                   (to - lanes.tail_values) / (kBand * width), memory.by_amx, sums, lanes.sums);
      std::copy(lanes.sums + lane * width, lanes.sums + next_lane * width, sums + lane * width);
    }
  }

  Attention<E> attention;
  Step step;
  Heads heads;
  E *qkv, *out, *key_cache, *value_cache;
  float *partials = nullptr;  // the partial output of each block of each tile
  int64_t stride = (heads.N + 2 * heads.K) * heads.H, group = heads.N / heads.K;
  int64_t head_size = heads.S * heads.H, width = round_up(heads.H, kByBands ? kLanes : kVector);
  int64_t longest = 0, most_blocks = 0, num_slices = 1;
  int64_t tile_size, num_tiles, line_size, padded_queries, partial_size;
};

}  // namespace
