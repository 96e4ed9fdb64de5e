// Ranking of tokens, and ReDrafter's searches.

#pragma once

#include "amx.h"
#include "norms.h"

namespace {

typedef std::pair<float, int64_t> Ranked;  // a logit or score, and which one it is

// Tells whether one goes before the other: the larger, of equal ones the first. NaN has no place in such
// an order, and the library's sorting needs one: all that is ranked comes out of `rank`.
inline bool goes_before(const Ranked &a, const Ranked &b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// NaN is ranked as minus infinity.
inline Ranked rank(float x, int64_t which) { return {x == x ? x : -HUGE_VALF, which}; }

// The greatest of each of M rows of V logits, of equal ones the first, or the first NaN: [M]. A maximum
// is the same in any order, so that here a reduction may be the compiler's.
template <typename E>
void find_greatest(const E *logits, int64_t M, int64_t V, int64_t *greatest) {
  constexpr int64_t kLane = 64;  // logits of which it is known at once whether one is the greatest
  for_each(M, M * V > kParallelWork, [&](int64_t m) {
    const E *row = logits + m * V;
    float top = -HUGE_VALF;
    int has_nan = 0;
#pragma omp simd reduction(max : top) reduction(| : has_nan)
    for (int64_t v = 0; v < V; ++v) {
      const float x = to_float(row[v]);
      has_nan |= x != x;
      top = x > top ? x : top;
    }
    const auto is_found = [&](int64_t v) {
      const float x = to_float(row[v]);
      return has_nan != 0 ? x != x : x == top;
    };
    int64_t begin = 0;
    for (; begin + kLane < V; begin += kLane) {
      int found = 0;
#pragma omp simd reduction(| : found)
      for (int64_t v = begin; v < begin + kLane; ++v) found |= is_found(v);
      if (found != 0) break;
    }
    while (begin + 1 < V && !is_found(begin)) ++begin;
    greatest[m] = begin;
  });
}

// The best `num_kept` of `count` logits, best first.
void find_best(const float *logits, int64_t count, int64_t num_kept, std::vector<Ranked> &heap) {
  heap.clear();
  for (int64_t v = 0; v < count; ++v) {
    if (static_cast<int64_t>(heap.size()) < num_kept) {
      heap.push_back(rank(logits[v], v));
      std::push_heap(heap.begin(), heap.end(), goes_before);
    } else if (logits[v] > heap.front().first) {
      std::pop_heap(heap.begin(), heap.end(), goes_before);
      heap.back() = {logits[v], v};
      std::push_heap(heap.begin(), heap.end(), goes_before);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), goes_before);
}

// The best `width` of `count` logits, best first, as (log-probability among the best `num_kept`, token).
void rank_tokens(const float *logits, int64_t count, int64_t num_kept, int64_t width,
                 std::vector<Ranked> &heap) {
  find_best(logits, count, num_kept, heap);
  const float top = heap[0].first;
  float total = 0.0f;
  for (const auto &entry : heap) total += std::exp(entry.first - top);
  heap.resize(width);
  for (auto &entry : heap) entry.first -= top + std::log(total);
}

// The best `width` of `count` logits times `sharpness`, best first, as (log-probability among all, token).
void rank_all(const float *logits, int64_t count, int64_t width, float sharpness,
              std::vector<Ranked> &heap) {
  find_best(logits, count, width, heap);
  const float top = heap[0].first;
  const float total = sum_row(count, [&](auto sums, int64_t v) {
    return sums + exp_fast((read<decltype(sums)>(logits + v) - top) * sharpness);
  });
  for (auto &entry : heap) entry.first = (entry.first - top) * sharpness - std::log(total);
}

// The best `width` tokens and their log-probabilities, [M, width], of x [M, depth] times a packed
// head of V outputs.
template <typename W, typename E>
void rank_outputs(const E *x, int64_t M, int64_t depth, const W *head, const E *bias, int64_t V,
                  int64_t width, int64_t *tokens, float *scores) {
  std::vector<float> logits(M * V);
  multiply(x, M, depth, head, bias, V, logits.data());
  for_each(M, M * V > kParallelWork, [&](int64_t m) {
    std::vector<Ranked> ranked;
    ranked.reserve(width);
    rank_all(&logits[m * V], V, width, 1.0f, ranked);
    for (int64_t j = 0; j < width; ++j) {
      tokens[m * width + j] = ranked[j].second;
      scores[m * width + j] = ranked[j].first;
    }
  });
}

// A ReDrafter drafter, see specdec/engine/redrafter.py, of E but for its matrices, which are of
// type P and packed for `multiply`; absent ones are null. context_proj, state_proj: the input
// projection's columns for the target's hidden state and for the recurrent one; blocks: weight and
// bias of each residual block by turns; drafted: [V], the token of each of the head's outputs, null
// where these are all tokens. X is the exit dimension, V the head's outputs.
template <typename P, typename E>
struct Drafter {
  const E *embedding;
  bool is_embedding_packed;
  const P *rnn_w, *rnn_u;
  const E *rnn_u_bias;
  const P *context_proj, *state_proj;
  const E *input_bias;
  const void *const *blocks;
  int64_t num_blocks;
  const P *lm_head;
  const int64_t *drafted;
  int64_t V, H, X;

  int64_t name(int64_t output) const { return drafted != nullptr ? drafted[output] : output; }

  void embed(int64_t token, float *out) const {
    const PackedRow<E> packed(embedding, H, is_embedding_packed ? token : 0);
    for (int64_t i = 0; i < H; ++i) out[i] = to_float(is_embedding_packed ? packed[i] : embedding[token * H + i]);
  }
};

// Sizes of B searches, as specdec/engine/native.py writes them: W beams (or nodes of each level) of L
// tokens, N nodes of a tree, V, H and X of the drafter, C candidates of a beam.
struct SearchShape {
  int64_t B, W, L, N, V, H, X, C, is_integer, is_embedding_packed;
};

// B searches by such a drafter, W nodes of each at every level but the first, whose only node is the
// root: `run` makes the logits of what follows a level's nodes, from which `choose` goes on.
template <typename P, typename E>
struct Search {
  const Drafter<P, E> &drafter;
  const E *hidden;  // [B, H], the target's state before each root
  const int64_t B, W;
  int64_t width = 1, level = 0;
  std::vector<int64_t> level_tokens;  // [B, width], the tokens of the level's nodes
  std::vector<float> logits, state, next_state, embedded, x, products, recurrent_products, contexts;

  Search(const Drafter<P, E> &d, const E *hidden, const int64_t *roots, int64_t B, int64_t W)
      : drafter(d), hidden(hidden), B(B), W(W), level_tokens(roots, roots + B) {
    const int64_t max_nodes = B * W, max_width = std::max(2 * d.H, d.X);
    for (auto *states : {&state, &next_state, &embedded}) states->resize(max_nodes * d.H);
    for (auto *buffer : {&x, &products, &recurrent_products}) buffer->resize(max_nodes * max_width);
    logits.resize(max_nodes * d.V);
    if (d.context_proj == nullptr) return;
    contexts.resize(B * d.X);  // the same at every level
    multiply(hidden, B, d.H, d.context_proj, d.input_bias, d.X, contexts.data());
  }

  void run() {
    const Drafter<P, E> &d = drafter;
    const int64_t M = B * width, H = d.H, X = d.X;
    const E *none = nullptr;
    for (int64_t m = 0; m < M; ++m) d.embed(level_tokens[m], &embedded[m * H]);
    if (d.rnn_w != nullptr) {
      multiply(embedded.data(), M, H, d.rnn_w, none, H, products.data());
      if (level > 0) multiply(state.data(), M, H, d.rnn_u, d.rnn_u_bias, H, recurrent_products.data());
      for (int64_t m = 0; m < M; ++m)
        for (int64_t i = 0; i < H; ++i) {
          const float recurrent = level > 0 ? recurrent_products[m * H + i] : to_float(d.rnn_u_bias[i]);
          next_state[m * H + i] = silu(products[m * H + i] + recurrent);
        }
    } else {
      for (int64_t i = 0; i < M * H; ++i) next_state[i] = embedded[i] + (level > 0 ? state[i] : 0.0f);
    }
    state.swap(next_state);
    if (d.state_proj != nullptr) {
      multiply(state.data(), M, H, d.state_proj, none, X, x.data());
      for (int64_t m = 0; m < M; ++m)
        for (int64_t i = 0; i < X; ++i) x[m * X + i] += contexts[m / width * X + i];
    } else {
      for (int64_t m = 0; m < M; ++m) {
        const E *context = hidden + m / width * H;
        for (int64_t i = 0; i < H; ++i) x[m * 2 * H + i] = to_float(context[i]);
        std::memcpy(&x[m * 2 * H + H], &state[m * H], sizeof(float) * H);
      }
    }
    for (int64_t block = 0; block < d.num_blocks; ++block) {
      multiply(x.data(), M, X, static_cast<const P *>(d.blocks[2 * block]),
               static_cast<const E *>(d.blocks[2 * block + 1]), X, products.data());
      for (int64_t m = 0; m < M; ++m)
#pragma omp simd
        for (int64_t i = 0; i < X; ++i) {
          const float z = products[m * X + i];
          x[m * X + i] = mul_add(z, sigmoid(z), x[m * X + i]);
        }
    }
    multiply(x.data(), M, X, d.lm_head, none, d.V, logits.data());
  }

  // The next level's node w of row b is a token after node `source` of this one.
  void choose(int64_t b, int64_t w, int64_t source, int64_t token) {
    const int64_t to = b * W + w, H = drafter.H;
    std::memcpy(&next_state[to * H], &state[(b * width + source) * H], sizeof(float) * H);
    level_tokens[to] = token;
  }

  void begin_choice() { level_tokens.resize(B * W); }

  void end_choice() {
    state.swap(next_state);
    width = W;
    ++level;
  }
};

// ReDrafter's beam search: beams [B, W, L] after each of B tokens. Scores are normalized over the C
// best candidates of a beam.
template <typename P, typename E>
void search_beams(const Drafter<P, E> &drafter, const E *hidden, const int64_t *tokens,
                  int64_t *beams, int64_t B, int64_t W, int64_t L, int64_t C) {
  const int64_t max_beams = B * W, V = drafter.V;
  Search<P, E> search(drafter, hidden, tokens, B, W);
  std::vector<float> scores(B, 0.0f), next_scores(max_beams);
  std::vector<int64_t> paths(max_beams * L), next_paths(max_beams * L);
  std::vector<std::vector<Ranked>> ranked(max_beams);
  for (auto &heap : ranked) heap.reserve(C);
  for (int64_t step = 0; step < L; ++step) {
    search.run();
    const int64_t width = search.width, M = B * width;
    for_each(M, M * V > kParallelWork, [&](int64_t m) {
      rank_tokens(&search.logits[m * V], V, C, W, ranked[m]);
    });
    search.begin_choice();
    for (int64_t b = 0; b < B; ++b) {
      // Each beam's best W tokens hold the best W of all.
      std::vector<Ranked> candidates;
      for (int64_t w = 0; w < width; ++w)
        for (int64_t j = 0; j < W; ++j)
          candidates.push_back(rank(scores[b * width + w] + ranked[b * width + w][j].first, w * W + j));
      std::partial_sort(candidates.begin(), candidates.begin() + W, candidates.end(), goes_before);
      for (int64_t w = 0; w < W; ++w) {
        const int64_t beam = candidates[w].second / W, source = b * width + beam, to = b * W + w;
        const int64_t token = drafter.name(ranked[source][candidates[w].second % W].second);
        next_scores[to] = candidates[w].first;
        std::memcpy(&next_paths[to * L], &paths[source * L], sizeof(int64_t) * step);
        next_paths[to * L + step] = token;
        search.choose(b, w, beam, token);
      }
    }
    search.end_choice();
    paths.swap(next_paths);
    scores.assign(next_scores.begin(), next_scores.end());
  }
  std::memcpy(beams, paths.data(), sizeof(int64_t) * max_beams * L);
}

// ReDrafter's dynamic tree, as `DynamicTree` in levels.py grows it. Every level goes on from the W
// nodes of the greatest scores, sums of log-probabilities at each row's temperature, and drafts W
// tokens from each; the N best of all that were drafted make the tree, in the order in which they
// were. Another level is drafted while more than `min_gain` of the newest one's tokens are expected to
// be accepted, in all rows together and at most one in each. nodes: [3, B, N], tokens, parents and
// depths, the root being node 0 and not listed; chances: [B, N], of each below its parent. Returns
// the number of levels; unless it is L, a row has no more nodes than these drafted.
template <typename P, typename E>
int64_t search_tree(const Drafter<P, E> &drafter, const E *hidden, const int64_t *tokens,
                    const double *temperatures, double min_gain, int64_t *nodes, double *chances,
                    int64_t B, int64_t W, int64_t L, int64_t N) {
  typedef std::pair<double, int64_t> Scored;
  const auto is_better = [](const Scored &a, const Scored &b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  const int64_t V = drafter.V, max_nodes = W + (L - 1) * W * W;
  Search<P, E> search(drafter, hidden, tokens, B, W);
  std::vector<int64_t> seen_tokens(B * max_nodes), parents(B * max_nodes);
  std::vector<double> log_chances(B * max_nodes), totals(B * max_nodes);
  std::vector<int64_t> level_nodes(B * W);  // the nodes of the level that is run, among those seen
  std::vector<std::vector<Ranked>> ranked(B * W);
  for (auto &heap : ranked) heap.reserve(W);
  std::vector<Scored> candidates;
  int64_t begin = 0, end = 0;  // of the newest level among those seen
  while (true) {
    search.run();
    const int64_t width = search.width, M = B * width;
    for_each(M, M * V > kParallelWork, [&](int64_t m) {
      const float sharpness = static_cast<float>(1 / temperatures[m / width]);
      rank_all(&search.logits[m * V], V, W, sharpness, ranked[m]);
    });
    begin = end;
    end += width * W;
    double level_gain = 0.0;
    search.begin_choice();
    for (int64_t b = 0; b < B; ++b) {
      candidates.clear();
      for (int64_t w = 0; w < width; ++w) {
        auto &ranked_tokens = ranked[b * width + w];
        for (auto &entry : ranked_tokens) entry.first = rank(entry.first, 0).first;
        const int64_t parent = begin > 0 ? level_nodes[b * W + w] : -1;
        for (int64_t j = 0; j < W; ++j) {
          const int64_t node = begin + w * W + j, index = b * max_nodes + node;
          seen_tokens[index] = drafter.name(ranked_tokens[j].second);
          parents[index] = parent;
          log_chances[index] = ranked_tokens[j].first;
          totals[index] = log_chances[index] + (parent < 0 ? 0.0 : totals[b * max_nodes + parent]);
          candidates.push_back({totals[index], node});
        }
      }
      std::partial_sort(candidates.begin(), candidates.begin() + W, candidates.end(), is_better);
      double expected = 0.0;
      for (int64_t w = 0; w < W; ++w) {
        const int64_t node = candidates[w].second;
        expected += std::exp(candidates[w].first);
        level_nodes[b * W + w] = node;
        search.choose(b, w, (node - begin) / W, seen_tokens[b * max_nodes + node]);
      }
      level_gain += expected < 1.0 ? expected : 1.0;
    }
    search.end_choice();
    if (search.level == L || !(level_gain > min_gain)) break;
  }
  const int64_t num_kept = std::min(N, end);
  std::vector<int64_t> node_of(max_nodes);
  for (int64_t b = 0; b < B; ++b) {
    candidates.clear();
    for (int64_t i = 0; i < end; ++i) candidates.push_back({totals[b * max_nodes + i], i});
    std::partial_sort(candidates.begin(), candidates.begin() + num_kept, candidates.end(), is_better);
    std::sort(candidates.begin(), candidates.begin() + num_kept,
              [](const Scored &a, const Scored &b) { return a.second < b.second; });
    int64_t *drafted = nodes + b * N, *drafted_parents = drafted + B * N, *depths = drafted_parents + B * N;
    for (int64_t n = 0; n < num_kept; ++n) {
      const int64_t i = candidates[n].second, parent = parents[b * max_nodes + i];
      node_of[i] = n + 1;
      drafted[n] = seen_tokens[b * max_nodes + i];
      // A parent is at least as probable as its child, and comes first where they tie.
      drafted_parents[n] = parent < 0 ? 0 : node_of[parent];
      depths[n] = parent < 0 ? 1 : depths[drafted_parents[n] - 1] + 1;
      chances[b * N + n] = std::exp(log_chances[b * max_nodes + i]);
    }
  }
  return search.level;
}

}  // namespace
