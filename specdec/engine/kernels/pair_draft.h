// EAGLE's drafts: all passes of a step's draft in one call.

#pragma once

#include "blocks.h"
#include "layers.h"

namespace {

// How the rows of a drafter's embedding are kept.
enum EmbeddingKind : int64_t { kPlainRows, kPackedRows, kPackedBlocks, kBlockRows };

// An EAGLE drafter, see specdec/engine/eagle.py, fields of eight bytes by the same names as in
// specdec/engine/native_border.py. embedding: [rows, D] by `embedding_kind`, where rows of blocks lie
// `embedding_stride` bytes apart and have `embedding_types`. fc: of the target's states [F] in EAGLE-3, of
// an embedding and a feature in EAGLE-1. read_norms: weight and bias of each of `num_read_norms` parts of
// the states. embedding_norm, feature_norm: of EAGLE-3, null in EAGLE-1. final_norm: weight and bias.
// drafted: [V], the token of each of the head's outputs, null where these are all tokens. Matrices are
// packed, of integers where a flag says so.
struct PairNet {
  const void *embedding;
  const uint8_t *embedding_types;
  const void *fc, *fc_bias;
  const void *const *read_norms;
  const void *embedding_norm, *feature_norm;
  const void *layers;
  const void *const *final_norm;
  const void *head;
  const int64_t *drafted;
  int64_t embedding_kind, embedding_rows, embedding_stride, F, num_read_norms, V, norms_residual,
      norms_output, is_fc_integer, is_head_integer;
  double head_scale, epsilon;
};

// A tree of ranks that is the same in every step, where `levels` is given: for each of L levels the nodes
// that are run, the tokens that are ranked, and the nodes that are drafted; then of each node that is run
// its place among those drafted in the level before and its parent's among those run there; then of each
// that is drafted its parent's place among those run and its rank. Else EAGLE-2's dynamic tree of at most
// L levels, W nodes wide, of which the N best are kept while a level promises more than `min_gain`.
struct PairTree {
  const int64_t *levels;
  int64_t L, W, N;
  double min_gain;
};

// Source of the drafts of B rows: at most T new pairs of each. states: the target's, [., F], `num_states` of
// which are new: their lines there, and the rows and positions of the features that are made of them.
// rows, past, counts: [B], of the drafter's cache, and new pairs; tokens: [B, T], of these; temperatures:
// [B]. features: [R, positions, D].
struct PairStep {
  const void *states;
  const int64_t *lines, *state_rows, *state_positions;
  void *features;
  const int64_t *rows, *past, *counts, *tokens;
  const double *temperatures;
  int64_t num_states, feature_positions, B, T;
};

template <typename E>
void multiply_any(const E *x, int64_t M, int64_t depth, const void *matrix, bool is_integer, const E *bias,
                  int64_t N, E *y) {
  if (is_integer)
    multiply(x, M, depth, static_cast<const Integers *>(matrix), bias, N, y);
  else
    multiply(x, M, depth, static_cast<const E *>(matrix), bias, N, y);
}

// One draft of all rows. `run_pairs` runs the new pairs, and `rank` tells what may follow the level's nodes,
// of which `run` runs those of the next level.
template <typename E>
struct PairDraft {
  const PairNet &net;
  const PairStep &step;
  Shape shape;  // B, T and C change from pass to pass
  const Scalars &scalars;
  E *const cache;
  const int64_t B, D, max_width;
  const float epsilon;
  int64_t width = 1, num_run = 0;  // nodes of the level, and nodes that have run after the texts
  std::vector<int64_t> past;       // with the new pairs
  std::vector<int64_t> positions, run_positions;
  std::vector<uint8_t> mask, output_mask, next_mask;
  std::vector<E> embedded, above, first, x, normed, hidden, next_hidden, head_input;
  std::vector<float> widened;
  std::vector<int64_t> ranked;  // [B, width, W]
  std::vector<float> scores;

  PairDraft(const PairNet &net, const PairStep &step, const Shape &s, const Scalars &scalars, E *cache,
            int64_t max_width)
      : net(net), step(step), shape(s), scalars(scalars), cache(cache), B(step.B), D(s.D),
        max_width(max_width), epsilon(static_cast<float>(net.epsilon)) {
    const int64_t M = B * std::max(step.T, max_width);
    for (auto *buffer : {&embedded, &above, &x, &normed, &hidden, &next_hidden, &head_input})
      buffer->resize(M * D);
    first.resize(2 * M * D);
  }

  static const E *as_floats(const void *p) { return static_cast<const E *>(p); }

  // Makes the features of new states.
  void make_features() {
    const int64_t n = step.num_states, F = net.F;
    if (n == 0) return;
    E *features = static_cast<E *>(step.features);
    const bool has_fc = net.feature_norm != nullptr;  // else a feature is the state
    std::vector<E> read(n * F), made(n * D);
    const MembersWait members_wait;
    for (int64_t i = 0; i < n; ++i) {
      const E *state = as_floats(step.states) + step.lines[i] * F;
      std::memcpy(&read[i * F], state, sizeof(E) * F);
      const int64_t size = net.num_read_norms > 0 ? F / net.num_read_norms : 0;
      for (int64_t j = 0; j < net.num_read_norms; ++j)
        norm_row(state + j * size, as_floats(net.read_norms[2 * j]), as_floats(net.read_norms[2 * j + 1]),
                 &read[i * F + j * size], size, epsilon);
    }
    if (has_fc)
      multiply_any(read.data(), n, F, net.fc, net.is_fc_integer != 0, as_floats(net.fc_bias), D, made.data());
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = step.state_rows[i] * step.feature_positions + step.state_positions[i];
      std::memcpy(features + place * D, has_fc ? &made[i * D] : &read[i * D], sizeof(E) * D);
    }
  }

  void embed(int64_t token, E *out) {
    if (net.embedding_kind == kPlainRows) {
      std::memcpy(out, as_floats(net.embedding) + token * D, sizeof(E) * D);
      return;
    }
    if (net.embedding_kind == kPackedRows) {
      const PackedRow<E> row(as_floats(net.embedding), D, token);
      for (int64_t i = 0; i < D; ++i) out[i] = row[i];
      return;
    }
    widened.resize(D);
    if (net.embedding_kind == kPackedBlocks)
      unpack_block_rows(static_cast<const BlockRows *>(net.embedding), &token, 1, widened.data());
    else
      widen_blocks(static_cast<const uint8_t *>(net.embedding), net.embedding_rows, net.embedding_stride,
                   net.embedding_types, &token, 1, D, widened.data());
    for (int64_t i = 0; i < D; ++i) store(out[i], widened[i]);
  }

  // Runs M = B T tokens after the features `above`; `hidden` are their next ones, and `normed` is the last
  // layer's output normed.
  void run_tokens(const int64_t *tokens, int64_t T, int64_t C, const int64_t *step_past,
                  const std::vector<int64_t> &newest_positions, const std::vector<int64_t> &lines,
                  const std::vector<uint8_t> &seen, const uint8_t *outputs) {
    const int64_t M = B * T;
    for (int64_t m = 0; m < M; ++m) embed(tokens[m], &embedded[m * D]);
    if (net.feature_norm != nullptr) {
      for (int64_t m = 0; m < M; ++m) {
        E *pair = &first[2 * m * D];
        norm_row(&embedded[m * D], as_floats(net.embedding_norm), as_floats(nullptr), pair, D, epsilon);
        norm_row(&above[m * D], as_floats(net.feature_norm), as_floats(nullptr), pair + D, D, epsilon);
        std::memcpy(&x[m * D], net.norms_residual ? pair + D : &above[m * D], sizeof(E) * D);
      }
    } else {
      std::vector<E> pairs(2 * M * D);
      const MembersWait members_wait;
      for (int64_t m = 0; m < M; ++m) {
        std::memcpy(&pairs[2 * m * D], &embedded[m * D], sizeof(E) * D);
        std::memcpy(&pairs[(2 * m + 1) * D], &above[m * D], sizeof(E) * D);
      }
      multiply_any(pairs.data(), M, 2 * D, net.fc, net.is_fc_integer != 0, as_floats(net.fc_bias), D, x.data());
      std::memcpy(first.data(), x.data(), sizeof(E) * M * D);
    }
    shape.B = B, shape.T = T, shape.C = C;
    shape.first_depth = net.feature_norm != nullptr ? 2 * D : D;
    const Step layer_step{B, T, C, step.rows, newest_positions.data(), lines.data(), step_past, seen.data(),
                          outputs};
    const auto run = shape.is_integer ? run_layers<Integers, E> : run_layers<E, E>;
    run(x.data(), first.data(), normed.data(), net.layers,
        reinterpret_cast<const E *const *>(net.final_norm), cache, layer_step, nullptr, nullptr, shape, scalars,
        nullptr);
  }

  const E *get_next_features() const { return net.norms_output ? normed.data() : x.data(); }

  // The head reads this: normed in EAGLE-3.
  const E *get_outputs() const { return net.feature_norm != nullptr ? normed.data() : x.data(); }

  // Runs the new pairs; the level is then that of the roots.
  void run_pairs() {
    const int64_t T = step.T;
    positions.assign(B * T, 0);
    mask.assign(B * T * T, 0);
    output_mask.assign(B * T, 0);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t count = step.counts[b], place = step.rows[b] * step.feature_positions + step.past[b];
      const E *features = static_cast<const E *>(step.features) + place * D;
      for (int64_t t = 0; t < T; ++t) {
        const int64_t m = b * T + t;
        const bool is_padding = t >= count;  // which sees itself
        positions[m] = step.past[b] + (is_padding ? 0 : t);
        for (int64_t c = is_padding ? t : 0; c <= t; ++c) mask[m * T + c] = 1;
        if (is_padding)
          std::memset(static_cast<void *>(&above[m * D]), 0, sizeof(E) * D);
        else
          std::memcpy(&above[m * D], features + t * D, sizeof(E) * D);
      }
      output_mask[b * T + count - 1] = 1;
    }
    run_tokens(step.tokens, T, T, step.past, positions, positions, mask, output_mask.data());
    past.assign(B, 0);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t m = b * T + step.counts[b] - 1;
      std::memcpy(&hidden[b * D], get_next_features() + m * D, sizeof(E) * D);
      std::memcpy(&head_input[b * D], get_outputs() + m * D, sizeof(E) * D);
      past[b] = step.past[b] + step.counts[b];
    }
    mask.clear();
  }

  // Ranks the best `count` tokens after each node of the level.
  void rank(int64_t count) {
    const int64_t M = B * width;
    for (int64_t b = 0; b < B; ++b) {
      E rounded;
      store(rounded, static_cast<float>(1 / step.temperatures[b]));
      const float sharpness = to_float(rounded), head_scale = static_cast<float>(net.head_scale);
      for (int64_t i = b * width * D; i < (b + 1) * width * D; ++i) {
        if (net.head_scale != 1) store(head_input[i], to_float(head_input[i]) * head_scale);
        store(head_input[i], to_float(head_input[i]) * sharpness);
      }
    }
    ranked.resize(M * count);
    scores.resize(M * count);
    const E *none = nullptr;
    if (net.is_head_integer)
      rank_outputs(head_input.data(), M, D, static_cast<const Integers *>(net.head), none, net.V, count,
                   ranked.data(), scores.data());
    else
      rank_outputs(head_input.data(), M, D, as_floats(net.head), none, net.V, count, ranked.data(),
                   scores.data());
    if (net.drafted != nullptr)
      for (int64_t &token : ranked) token = net.drafted[token];
  }

  // Runs `count` nodes of each row below those of the level: tokens, and their parents' places in it, [B,
  // count]. They are the level then.
  void run(const std::vector<int64_t> &tokens, const std::vector<int64_t> &parents, int64_t count) {
    const int64_t C = num_run + count;
    std::vector<int64_t> all_positions(B * C);
    positions.assign(B * count, 0);
    next_mask.assign(B * count * C, 0);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t position = num_run > 0 ? run_positions[b * num_run + num_run - 1] + 1 : past[b];
      for (int64_t c = 0; c < C; ++c)
        all_positions[b * C + c] = c < num_run ? run_positions[b * num_run + c] : position;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t m = b * count + i, from = b * width + parents[m];
        positions[m] = position;
        if (num_run > 0) std::memcpy(&next_mask[m * C], &mask[from * num_run], num_run);
        next_mask[m * C + num_run + i] = 1;
        std::memcpy(&above[m * D], &hidden[from * D], sizeof(E) * D);
      }
    }
    mask.swap(next_mask);
    run_positions.swap(all_positions);
    run_tokens(tokens.data(), count, C, past.data(), run_positions, positions, mask, nullptr);
    std::memcpy(hidden.data(), get_next_features(), sizeof(E) * B * count * D);
    std::memcpy(head_input.data(), get_outputs(), sizeof(E) * B * count * D);
    num_run = C;
    width = count;
  }
};

// Drafts a static tree: tokens [B, N + 1], of which a row's first is there, and log-probabilities below
// the parents.
template <typename E>
int64_t draft_static(PairDraft<E> &draft, const PairTree &tree, int64_t *nodes, double *log_chances) {
  const int64_t B = draft.B, num_nodes = tree.N + 1;
  const int64_t *sizes = tree.levels, *numbers = tree.levels + 3 * tree.L;
  int64_t drafted = 1, before = 1;  // the first node of the next level and of the one before
  std::vector<int64_t> tokens, parents;
  for (int64_t level = 0; level < tree.L; ++level, sizes += 3) {
    const int64_t num_run = sizes[0], width = sizes[1], num_children = sizes[2];
    if (level > 0) {
      tokens.resize(B * num_run);
      parents.resize(B * num_run);
      for (int64_t b = 0; b < B; ++b)
        for (int64_t i = 0; i < num_run; ++i) {
          tokens[b * num_run + i] = nodes[b * num_nodes + before + numbers[i]];
          parents[b * num_run + i] = numbers[num_run + i];
        }
      draft.run(tokens, parents, num_run);
    }
    numbers += 2 * num_run;
    draft.rank(width);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t i = 0; i < num_children; ++i) {
        const int64_t from = (b * num_run + numbers[i]) * width + numbers[num_children + i];
        nodes[b * num_nodes + drafted + i] = draft.ranked[from];
        log_chances[b * num_nodes + drafted + i] = draft.scores[from];
      }
    numbers += 2 * num_children;
    before = drafted;
    drafted += num_children;
  }
  return tree.L;
}

// Drafts a dynamic tree as `DynamicTree` in levels.py grows it: tokens, parents and depths [3, B, N + 1],
// the root being node 0, and log-probabilities below the parents. Returns the number of levels; a row has
// no more nodes than these drafted.
template <typename E>
int64_t draft_dynamic(PairDraft<E> &draft, const PairTree &tree, int64_t *nodes, double *log_chances) {
  const int64_t B = draft.B, W = tree.W, L = tree.L, stride = tree.N + 1;
  const int64_t max_nodes = W + (L - 1) * W * W;
  std::vector<int64_t> seen_tokens(B * max_nodes), seen_parents(B * max_nodes, -1);
  std::vector<float> totals(B * max_nodes), row_scores;
  std::vector<int64_t> level_nodes(B * W), tokens(B * W), parents(B * W, 0);
  std::vector<Ranked> candidates;
  const auto find_nodes = [&](int64_t b, int64_t begin, int64_t end, int64_t count) {
    candidates.clear();
    for (int64_t i = begin; i < end; ++i) candidates.push_back(rank(totals[b * max_nodes + i], i));
    std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(), goes_before);
  };
  draft.rank(W);
  int64_t begin = 0, end = W, num_levels = 1;  // of the newest level among those seen
  for (int64_t b = 0; b < B; ++b)
    for (int64_t j = 0; j < W; ++j) {
      seen_tokens[b * max_nodes + j] = draft.ranked[b * W + j];
      totals[b * max_nodes + j] = draft.scores[b * W + j];
      level_nodes[b * W + j] = j;
    }
  for (; num_levels < L; ++num_levels) {
    float level_gain = 0.0f;
    bool is_settled = end >= tree.N;
    for (int64_t b = 0; b < B; ++b) {
      const float *row_totals = &totals[b * max_nodes];
      float expected = 0.0f, best = -HUGE_VALF;
      for (int64_t w = 0; w < W; ++w) {
        const float total = row_totals[level_nodes[b * W + w]];
        expected += std::exp(total);
        best = total > best ? total : best;
        tokens[b * W + w] = seen_tokens[b * max_nodes + level_nodes[b * W + w]];
      }
      level_gain += expected > 1.0f ? 1.0f : expected;
      if (!is_settled) continue;
      row_scores.assign(row_totals, row_totals + end);
      std::nth_element(row_scores.begin(), row_scores.begin() + tree.N - 1, row_scores.end(),
                       [](float a, float b) { return rank(a, 0).first > rank(b, 0).first; });
      is_settled = best <= row_scores[tree.N - 1];
    }
    if (!(level_gain > tree.min_gain) || is_settled) break;
    draft.run(tokens, parents, W);
    draft.rank(W);
    begin = end;
    end += W * W;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t w = 0; w < W; ++w)
        for (int64_t j = 0; j < W; ++j) {
          const int64_t parent = level_nodes[b * W + w], to = b * max_nodes + begin + w * W + j;
          const int64_t from = (b * W + w) * W + j;
          seen_tokens[to] = draft.ranked[from];
          seen_parents[to] = parent;
          totals[to] = draft.scores[from] + totals[b * max_nodes + parent];
        }
      find_nodes(b, begin, end, W);
      for (int64_t w = 0; w < W; ++w) {
        level_nodes[b * W + w] = candidates[w].second;
        parents[b * W + w] = (candidates[w].second - begin) / W;
      }
    }
  }
  const int64_t num_kept = std::min(tree.N, end);
  std::vector<int64_t> kept(num_kept);
  for (int64_t b = 0; b < B; ++b) {
    find_nodes(b, 0, end, num_kept);
    for (int64_t n = 0; n < num_kept; ++n) kept[n] = candidates[n].second;
    std::sort(kept.begin(), kept.end());
    int64_t *row_tokens = nodes + b * stride, *row_parents = row_tokens + B * stride;
    int64_t *depths = row_parents + B * stride;
    for (int64_t n = 0; n < num_kept; ++n) {
      const int64_t i = b * max_nodes + kept[n], parent = seen_parents[i];
      row_tokens[n + 1] = seen_tokens[i];
      // A parent is at least as probable as its child, and comes first where they tie.
      const int64_t place = std::lower_bound(kept.begin(), kept.end(), parent) - kept.begin();
      row_parents[n + 1] = parent < 0 ? 0 : std::min(place, n - 1) + 1;
      depths[n + 1] = depths[row_parents[n + 1]] + 1;
      const double above = parent < 0 ? 0.0 : totals[b * max_nodes + parent];
      log_chances[b * stride + n + 1] = static_cast<double>(totals[i]) - above;
    }
  }
  return num_levels;
}

// Drafts for all rows of a step; returns the number of levels. nodes: tokens, parents
// and depths, [3, B, N + 1], of a static tree's nodes the tokens alone.
template <typename E>
int64_t draft_pairs(const PairNet &net, const PairStep &step, const PairTree &tree, const Shape &shape,
                    const Scalars &scalars, E *cache, int64_t *nodes, double *log_chances) {
  PairDraft<E> draft(net, step, shape, scalars, cache, tree.W);
  const MembersWait members_wait;  // before its buffers are gone
  const int64_t stride = tree.N + 1;
  for (int64_t b = 0; b < step.B; ++b) {
    const int64_t root = b * stride;
    nodes[root] = step.tokens[b * step.T + step.counts[b] - 1];
    nodes[root + step.B * stride] = -1;
    nodes[root + 2 * step.B * stride] = 0;
    log_chances[root] = 0.0;
  }
  draft.make_features();
  draft.run_pairs();
  if (tree.levels != nullptr) return draft_static(draft, tree, nodes, log_chances);
  return draft_dynamic(draft, tree, nodes, log_chances);
}

}  // namespace
