// Experts, and all layers in one call.

#pragma once

#include "attention.h"
#include "recurrences.h"
#include "search.h"

namespace {

// The experts of a layer that a rank holds. This record and those below are fields of eight bytes (of
// four in `Scalars`) by the same names in specdec/engine/native_border.py; their sizes are compared when
// a library is loaded. router: [num, D], packed; up: [2 I, D] of each of the rank's `count` experts,
// counted from `first_expert`, packed: the rows that are multiplied, then those that are activated;
// down: [D, I]; gate: [D], of the shared expert, or null for none; that is absent where shared_I is 0.
// counters: steps, tokens, experts chosen by any of a step's tokens. router_bias: [num]; up_biases, down_biases: [count, 2 I]
// and [count, D]; each may be null, as score_bias [num], of the choice alone, and scales [num], of the weight of
// each expert. limit, slope: of `gate_mul_cut`, or limit is 0 for silu, and for gelu where uses_gelu says so.
struct ExpertsRecord {
  const float *router, *router_bias;
  const void *up_biases, *down_biases;
  double limit, slope;
  const void *const *up, *const *down;
  const void *shared_up, *shared_down, *gate;
  const float *score_bias, *scales;
  int64_t *counters;
  int64_t num, top_k, first_expert, count, I, shared_I, renormalizes, uses_sigmoid, uses_gelu;
  double weight_scale, sum_epsilon;
};

// Softmax over all scores [num] of a token, or the sigmoid of each.
inline void finish_scores(float *scores, const ExpertsRecord &e) {
  if (e.uses_sigmoid) {
    for (int64_t i = 0; i < e.num; ++i) scores[i] = sigmoid(scores[i]);
    return;
  }
  float top = scores[0], total = 0.0f;
  for (int64_t i = 1; i < e.num; ++i) top = scores[i] > top ? scores[i] : top;
  for (int64_t i = 0; i < e.num; ++i) total += scores[i] = exp_fast(scores[i] - top);
  for (int64_t i = 0; i < e.num; ++i) scores[i] /= total;
}

// The scores of a token's experts, and the best of them, first: of equal ones those that torch.topk
// takes, which calls the same functions. Returns what the weights are divided by.
inline float choose_experts(float *scores, const ExpertsRecord &e, std::vector<Ranked> &queue) {
  finish_scores(scores, e);
  float sum = 0.0f;
  queue.resize(e.num);
  for (int64_t i = 0; i < e.num; ++i)
    queue[i] = rank(e.score_bias == nullptr ? scores[i] : scores[i] + e.score_bias[i], i);
  const auto better = [](const Ranked &a, const Ranked &b) { return a.first > b.first; };
  if (e.top_k * 64 <= e.num) {
    std::partial_sort(queue.begin(), queue.begin() + e.top_k, queue.end(), better);
  } else {
    std::nth_element(queue.begin(), queue.begin() + e.top_k - 1, queue.end(), better);
    std::sort(queue.begin(), queue.begin() + e.top_k - 1, better);
  }
  for (int64_t k = 0; k < e.top_k; ++k) sum += scores[queue[k].second];
  return e.renormalizes ? sum + static_cast<float>(e.sum_epsilon) : 1.0f;
}

// Buffers that the experts of a layer use one after the other.
template <typename E>
struct ExpertBuffers {
  std::vector<E> rows, halves, gated;
  std::vector<float> products;
};

// An expert's matrices and biases, of which those may be null.
template <typename W, typename E>
struct Expert {
  const W *up, *down;
  int64_t I;
  const E *up_bias, *down_bias;

  Expert(const void *up, const void *down, int64_t I, const void *up_bias = nullptr,
         const void *down_bias = nullptr)
      : up(static_cast<const W *>(up)), down(static_cast<const W *>(down)), I(I),
        up_bias(static_cast<const E *>(up_bias)), down_bias(static_cast<const E *>(down_bias)) {}
};

// products [M, D] = down (silu(gate x) * up x), for M rows of x, or with gelu or the gate of `gate_mul_cut`.
template <typename W, typename E>
void run_expert(const E *x, int64_t M, int64_t D, const Expert<W, E> &expert, const ExpertsRecord &e,
                ExpertBuffers<E> &buffers) {
  const int64_t I = expert.I;
  buffers.halves.resize(M * 2 * I);
  buffers.gated.resize(M * I);
  buffers.products.resize(M * D);
  multiply(x, M, D, expert.up, expert.up_bias, 2 * I, buffers.halves.data());
  if (e.limit > 0)
    gate_mul_cut(buffers.halves.data(), buffers.gated.data(), M, I, static_cast<float>(e.slope),
                 static_cast<float>(e.limit));
  else if (e.uses_gelu)
    gate_mul<gelu_tanh>(buffers.halves.data(), buffers.gated.data(), M, I, I);
  else
    gate_mul<silu>(buffers.halves.data(), buffers.gated.data(), M, I, I);
  multiply(buffers.gated.data(), M, I, expert.down, expert.down_bias, D, buffers.products.data());
}

// Computes out [M, D], the sum of a rank's experts for x [M, D]. An expert's matrices are read once for
// all its tokens; a token's experts are added up in the order of their numbers, whoever goes with it.
// routed_by: [M, D], what the router reads, or null for x.
template <typename W, typename E>
void mix_experts(const E *x, int64_t M, int64_t D, const ExpertsRecord &e, E *out,
                 const E *routed_by = nullptr) {
  std::vector<float> scores(M * e.num), sums(M * D, 0.0f);
  std::vector<std::vector<std::pair<int64_t, float>>> routed(e.num);  // tokens and their weights
  std::vector<Ranked> queue;
  multiply(routed_by == nullptr ? x : routed_by, M, D, e.router, e.router_bias, e.num, scores.data());
  for (int64_t m = 0; m < M; ++m) {
    const float divisor = choose_experts(&scores[m * e.num], e, queue);
    const float scale = static_cast<float>(e.weight_scale);
    for (int64_t k = 0; k < e.top_k; ++k) {
      const int64_t expert = queue[k].second;
      const float own_scale = e.scales == nullptr ? 1.0f : e.scales[expert];
      routed[expert].emplace_back(m, scores[m * e.num + expert] / divisor * own_scale * scale);
    }
  }
  e.counters[0] += 1;
  e.counters[1] += M;
  for (const auto &tokens : routed) e.counters[2] += !tokens.empty();
  ExpertBuffers<E> buffers;
  const auto add = [&](float weight, const float *from, int64_t token) {
    float *to = &sums[token * D];
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) to[d] = mul_add(weight, from[d], to[d]);
  };
  for (int64_t expert = 0; expert < e.count; ++expert) {
    const auto &tokens = routed[e.first_expert + expert];
    const int64_t count = static_cast<int64_t>(tokens.size());
    if (count == 0) continue;
    buffers.rows.resize(count * D);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(&buffers.rows[i * D], x + tokens[i].first * D, sizeof(E) * D);
    const E *up_biases = static_cast<const E *>(e.up_biases);
    const E *down_biases = static_cast<const E *>(e.down_biases);
    const Expert<W, E> matrices(e.up[expert], e.down[expert], e.I,
                                up_biases == nullptr ? nullptr : up_biases + expert * 2 * e.I,
                                down_biases == nullptr ? nullptr : down_biases + expert * D);
    run_expert(buffers.rows.data(), count, D, matrices, e, buffers);
    for (int64_t i = 0; i < count; ++i)
      add(tokens[i].second, &buffers.products[i * D], tokens[i].first);
  }
  if (e.shared_I > 0) {
    const E *gate = static_cast<const E *>(e.gate);
    run_expert(x, M, D, Expert<W, E>(e.shared_up, e.shared_down, e.shared_I), e, buffers);
    for (int64_t m = 0; m < M; ++m) {
      if (gate == nullptr) {
        add(1.0f, &buffers.products[m * D], m);
        continue;
      }
      const float amount = sum_row(D, [&](auto partial_sum, int64_t i) {
        typedef decltype(partial_sum) V;
        return mul_add(read<V>(x + m * D + i), read<V>(gate + i), partial_sum);
      });
      add(sigmoid(amount), &buffers.products[m * D], m);
    }
  }
  for (int64_t i = 0; i < M * D; ++i) store(out[i], sums[i]);
}

// Moves the rows of x [M, width] whose output is read to its beginning; returns their number.
template <typename E>
int64_t gather_rows(E *x, int64_t M, int64_t width, const uint8_t *output_mask) {
  int64_t count = 0;
  for (int64_t m = 0; m < M; ++m)
    if (output_mask[m] != 0) {
      if (count < m) std::memcpy(x + count * width, x + m * width, sizeof(E) * width);
      ++count;
    }
  return count;
}

// Moves the first `count` rows of x back to the rows whose output is read; the others become zeros.
template <typename E>
void spread_rows(E *x, int64_t M, int64_t width, const uint8_t *output_mask, int64_t count) {
  for (int64_t m = M - 1; m >= 0; --m) {
    E *to = x + m * width;
    if (output_mask[m] == 0)
      std::memset(static_cast<void *>(to), 0, sizeof(E) * width);
    else if (--count < m)
      std::memcpy(to, x + count * width, sizeof(E) * width);
  }
}

// The weights of a decoder's layer. up: gate and up stacked where it is gated; q_norm, k_norm: norms of
// queries and of keys; dense_norm, down_norm: norms of the outputs of dense and of down; cosine, sine:
// null for a layer without positions; window, query_shift, sinks: as of Attention; experts: instead of up and down;
// recurrence: instead of attention, with qkv for its first product. Absent ones are null, and a layer
// without post norm has attention and MLP read the same input. Matrices are packed, of type W; all else
// is of type E.
template <typename W, typename E>
struct LayerRecord {
  const E *norm, *norm_bias;
  const W *qkv;
  const E *qkv_bias;
  const W *dense;
  const E *dense_bias, *post, *post_bias;
  const W *up;
  const E *up_bias;
  const W *down;
  const E *down_bias, *q_norm, *k_norm, *dense_norm, *dense_norm_bias, *down_norm, *down_norm_bias;
  const E *cosine, *sine, *sinks;
  int64_t window, query_shift;
  const ExpertsRecord *experts;
  const RecurrenceRecord *recurrence;
};

// The layers of a decoder over one step's tokens. Legend as above; M = B T tokens. first: [M,
// first_depth], what the first layer's attention reads, or null where that is its normed input. x: [M,
// D], overwritten by the last layer's output; out: [M, D], its norm; observed: [number of them, M, D].
// step.output_mask: [M], zero for tokens of which the last layer writes no more than keys and values, so
// that x, out and observed hold zeros for them; or null. cache: of the layers that attend, one after
// another. states: of the others, or null where there are none; product_width, mixed_width: the most
// numbers of a token that a layer's first product yields and that its second one reads.
struct Shape {
  int64_t B, T, C, first_depth, D, N, K, H, I, R, S, rotated, num_layers, activation;
  int64_t is_gated, observing, is_integer, product_width, mixed_width;
};

// share: factor of the outputs of attention and MLP when they are added to the layer's input.
struct Scalars {
  float epsilon, scale, cap, share;
};

template <typename W, typename E>
void run_layers(E *x, const E *first, E *out, const void *records, const E *const *final_norm, E *cache,
                const Step &step, const int64_t *observed_layers, E *observed, const Shape &s,
                const Scalars &scalars, const StatesRecord *states) {
  const auto *layers = static_cast<const LayerRecord<W, E> *>(records);
  const uint8_t *output_mask = step.output_mask;
  const float epsilon = scalars.epsilon, share = scalars.share;
  const int64_t num_tokens = s.B * s.T;
  int64_t M = num_tokens;
  const int64_t heads = (s.N + 2 * s.K) * s.H, up_width = s.I * (1 + s.is_gated);
  const int64_t cache_size = 2 * s.R * s.K * s.S * s.H;  // of a layer
  std::vector<E> qkv(M * s.product_width), attended(M * s.mixed_width), mixed(M * s.D);
  std::vector<E> up(M * up_width);
  std::vector<E> gated(s.is_gated ? M * s.I : 0), down_output(M * s.D);
  const MembersWait members_wait;  // before these are gone
  E *layer_cache = cache;
  if (first == nullptr)
    add_norm<E>(x, nullptr, nullptr, share, layers->norm, layers->norm_bias, out, M, s.D, epsilon);
  for (int64_t layer = 0; layer < s.num_layers; ++layer) {
    const LayerRecord<W, E> &w = layers[layer];
    const bool is_last = layer + 1 == s.num_layers;
    const E *dense_norm[] = {w.dense_norm, w.dense_norm_bias};
    const E *down_norm[] = {w.down_norm, w.down_norm_bias};
    const Attention<E> attention = {
        w.q_norm, w.k_norm,      w.cosine,    w.sine, w.cosine ? s.rotated : 0,
        w.window, scalars.scale, scalars.cap, epsilon, 0.0f, w.query_shift, w.sinks};
    const bool has_input = layer == 0 && first != nullptr;
    const bool is_cut = output_mask != nullptr && is_last;
    const bool attends = w.recurrence == nullptr;
    const int64_t mixed_width = attends ? s.N * s.H : w.recurrence->out_width;
    multiply(has_input ? first : out, M, has_input ? s.first_depth : s.D, w.qkv, w.qkv_bias,
             attends ? heads : w.recurrence->width, qkv.data());
    if (attends) {
      Step layer_step = step;
      if (!is_cut) layer_step.output_mask = nullptr;
      Attend<E>(qkv.data(), layer_cache, attention, layer_step, {s.N, s.K, s.H, s.R, s.S},
                attended.data()).run();
      layer_cache += cache_size;
    } else {
      run_recurrence(qkv.data(), M, *w.recurrence, *states, attended.data());
    }
    if (is_cut) {
      gather_rows(attended.data(), M, mixed_width, output_mask);
      if (w.post == nullptr) gather_rows(out, M, s.D, output_mask);  // which the MLP reads, too
      M = gather_rows(x, M, s.D, output_mask);
      if (M == 0) {
        spread_rows(x, num_tokens, s.D, output_mask, M);
        spread_rows(out, num_tokens, s.D, output_mask, M);
        return;
      }
    }
    multiply(attended.data(), M, mixed_width, w.dense, w.dense_bias, s.D, mixed.data());
    if (w.post != nullptr)
      add_norm(x, mixed.data(), dense_norm, share, w.post, w.post_bias, out, M, s.D, epsilon);
    E *down = w.post != nullptr ? mixed.data() : down_output.data();
    if (w.experts != nullptr) {
      mix_experts<W>(out, M, s.D, *w.experts, down);
    } else {
      multiply(out, M, s.D, w.up, w.up_bias, up_width, up.data());
      if (s.is_gated) {
        if (s.activation == 0)
          gate_mul<silu>(up.data(), gated.data(), M, s.I);
        else
          gate_mul<gelu_tanh>(up.data(), gated.data(), M, s.I);
      } else if (s.activation == 1) {
        apply_to<gelu_tanh>(up.data(), M * up_width);
      } else if (s.activation == 2) {
        apply_to<gelu_erf>(up.data(), M * up_width);
      } else {
        apply_to<relu>(up.data(), M * up_width);
      }
      multiply(s.is_gated ? gated.data() : up.data(), M, s.I, w.down, w.down_bias, s.D, down);
    }
    if (w.post == nullptr)
      for (int64_t i = 0; i < M * s.D; ++i)
        store(mixed[i], to_float(mixed[i]) + to_float(down_output[i]));
    add_norm(x, mixed.data(), down_norm, share, is_last ? final_norm[0] : layers[layer + 1].norm,
             is_last ? final_norm[1] : layers[layer + 1].norm_bias, out, M, s.D, epsilon);
    if (is_cut) {
      spread_rows(x, num_tokens, s.D, output_mask, M);
      spread_rows(out, num_tokens, s.D, output_mask, M);
    }
    const int64_t size = num_tokens * s.D;
    for (int64_t i = 0; i < s.observing; ++i)
      if (observed_layers[i] == layer) std::memcpy(observed + i * size, x, sizeof(E) * size);
  }
}

}  // namespace
