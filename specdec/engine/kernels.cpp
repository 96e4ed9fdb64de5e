// Native kernels of the embedded engine: what lies between the linears of a decoder layer.
//
// Plain C interface, no torch headers: specdec-build compiles this file for the machine it runs on,
// specdec/engine/native.py calls it. Every function exists for float32, bfloat16 and float16;
// arithmetic is float32, results are rounded to nearest even.
//
// In half precision a token's numbers have the same bits whatever is computed beside it, in other
// copies of a template and by other loops. So each operation is the source's choice, never the
// compiler's: where a product is added to something, `mul_add` stands, which is one fused operation
// where the processor has those and two roundings everywhere where it has not; and sums over a row
// go through `sum_row`, whose order does not depend on how a loop is vectorized. Never write
// a * b + c here: a compiler may fuse it in one place and not in the next.
//
// Legend: B rows, T tokens a row, N query heads, K key/value heads, H head size, S positions,
// R cache rows, D hidden, I inner size.

#include "kernels/delta_net.h"
#include "kernels/layers.h"
#include "kernels/pair_draft.h"

namespace {

// A function's types as specdec/engine/native_library.py reads them, a letter each, the result's first: v of
// none, p of a pointer, and those below.
template <typename T>
constexpr char kLetter = std::is_void<T>::value ? 'v' : 'p';
template <>
constexpr char kLetter<int64_t> = 'i';
template <>
constexpr char kLetter<float> = 'f';
template <>
constexpr char kLetter<double> = 'd';

template <typename R, typename... A>
struct Types {
  static_assert(((std::is_pointer<A>::value || kLetter<A> != 'p') && ...), "a type without a letter");
  static constexpr char letters[] = {kLetter<R>, kLetter<A>..., 0};
};

template <typename R, typename... A>
constexpr const char *tell_types(R (*)(A...)) {
  return Types<R, A...>::letters;
}

}  // namespace

#define SPECDEC_TYPES(function) const char *function##_types = tell_types(&function);

extern "C" {

// Bumped with every change of what an argument below means, or of the order of packed numbers or of
// sums; checked when an engine is loaded. Another order raises PACKING_VERSION of packed.py too.
int64_t specdec_abi_version() { return 33; }

// Tells whether products with bfloat16 weights are by AMX: 1; 0 where the kernels are made for it and the
// system refuses it, so that other instructions get the same bits, slower; else -1.
int64_t specdec_use_amx() {
#if SPECDEC_AMX
  return can_use_amx();
#else
  return -1;
#endif
}

// Of the calling thread, for the calls that it makes from now on.
void specdec_set_num_threads(int64_t count) { num_threads = count; }

#define SPECDEC_EXPORT(E, suffix)                                                                 \
  void specdec_add_norm_##suffix(E *x, const E *delta, const E *delta_weight, const E *delta_bias,\
                                 float share, const E *weight, const E *bias, E *out,             \
                                 int64_t rows, int64_t D, float epsilon, float offset) {          \
    const E *const added[] = {delta_weight, delta_bias};                                          \
    add_norm(x, delta, added, share, weight, bias, out, rows, D, epsilon, offset);                \
  }                                                                                               \
  void specdec_silu_mul_##suffix(const E *gate_up, E *out, int64_t rows, int64_t I) {             \
    gate_mul<silu>(gate_up, out, rows, I);                                                        \
  }                                                                                               \
  void specdec_gelu_mul_##suffix(const E *gate_up, E *out, int64_t rows, int64_t I) {             \
    gate_mul<gelu_tanh>(gate_up, out, rows, I);                                                   \
  }                                                                                               \
  void specdec_cap_logits_##suffix(E *x, int64_t count, float scale, float cap) {                 \
    cap_logits(x, count, scale, cap);                                                             \
  }                                                                                               \
  void specdec_attend_##suffix(                                                                   \
      E *qkv, E *cache, const E *q_norm, const E *k_norm, const E *cosine, const E *sine,         \
      const int64_t *rows, const int64_t *positions, const int64_t *lines, const int64_t *past,   \
      const uint8_t *tree_mask, E *out, int64_t B, int64_t T, int64_t C, int64_t N, int64_t K,    \
      int64_t H, int64_t R, int64_t S, int64_t rotated, int64_t window, float scale, float cap,   \
      float epsilon, float offset, int64_t query_shift, const E *sinks) {                         \
    const Attention<E> attention = {q_norm, k_norm, cosine,  sine,   rotated,                     \
                              window, scale,  cap,     epsilon, offset, query_shift, sinks};      \
    const Step step{B, T, C, rows, positions, lines, past, tree_mask, nullptr};                   \
    Attend<E>(qkv, cache, attention, step, {N, K, H, R, S}, out).run();                           \
  }                                                                                               \
  void specdec_pack_matrix_##suffix(const E *weight, int64_t N, int64_t depth, E *packed) {       \
    pack_matrix(weight, N, depth, packed);                                                        \
  }                                                                                               \
  int64_t specdec_unpack_rows_##suffix(const E *packed, int64_t N, int64_t depth,                 \
                                       const int64_t *rows, int64_t count, E *out) {              \
    return unpack_rows(packed, N, depth, rows, count, out);                                       \
  }                                                                                               \
  void specdec_multiply_##suffix(const E *x, int64_t M, int64_t depth, const E *packed,           \
                                 const E *bias, int64_t N, E *y) {                                \
    multiply(x, M, depth, packed, bias, N, y);                                                    \
  }                                                                                               \
  void specdec_multiply_integers_##suffix(const E *x, int64_t M, int64_t depth,                   \
                                          const Integers *packed, const E *bias, int64_t N,       \
                                          E *y) {                                                 \
    multiply(x, M, depth, packed, bias, N, y);                                                    \
  }                                                                                               \
  void specdec_run_layers_##suffix(                                                               \
      E *x, const E *first, E *out, const void *layers, const E *const *final_norm, E *cache,     \
      const int64_t *rows, const int64_t *positions, const int64_t *lines, const int64_t *past,   \
      const uint8_t *tree_mask, const int64_t *observed_layers, E *observed,                      \
      const uint8_t *output_mask, const Shape *shape, const Scalars *scalars,                     \
      const StatesRecord *states) {                                                               \
    const Shape &s = *shape;                                                                      \
    const auto run = s.is_integer ? run_layers<Integers, E> : run_layers<E, E>;                   \
    run_in_team(s.B * s.T * s.D * s.D > kParallelWork, [&] {                                      \
      const Step step{s.B, s.T, s.C, rows, positions, lines, past, tree_mask, output_mask};       \
      run(x, first, out, layers, final_norm, cache, step, observed_layers, observed, s, *scalars, \
          states);                                                                                \
    });                                                                                           \
  }                                                                                               \
  void specdec_mix_experts_##suffix(const E *x, int64_t M, int64_t D, const ExpertsRecord *experts, \
                                    E *out, int64_t is_integer, const E *routed_by) {             \
    const auto mix = is_integer ? mix_experts<Integers, E> : mix_experts<E, E>;                   \
    mix(x, M, D, *experts, out, routed_by);                                                       \
  }                                                                                               \
  void specdec_run_delta_net_##suffix(                                                            \
      const E *qkvz, const E *ba, E *out, const int64_t *runs, int64_t num_runs, float *state,    \
      E *window, float *keys, float *deltas, float *decays, E *inputs, const float *weights,      \
      const float *rate, const float *bias, const E *norm, float epsilon,                         \
      const DeltaSizes *sizes) {                                                                  \
    const DeltaSizes &s = *sizes;                                                                 \
    DeltaNet<E> net = {{qkvz, reinterpret_cast<const Run *>(runs), num_runs, state, window, keys, \
                        deltas, decays, inputs, weights, rate, bias, s,                           \
                        2 * (s.K * s.I + s.V * s.J)},                                             \
                       ba, out, norm, epsilon};                                                   \
    net.run();                                                                                    \
  }                                                                                               \
  void specdec_run_mamba2_##suffix(                                                               \
      const E *product, void *out, const int64_t *runs, int64_t num_runs, float *state, E *window, \
      float *keys, float *deltas, float *decays, E *inputs, const float *weights,                 \
      const float *conv_bias, const float *rate, const float *bias, const float *skip,            \
      const E *norm, float epsilon, int64_t is_normed, const DeltaSizes *sizes) {                 \
    const DeltaSizes &s = *sizes;                                                                 \
    Mamba2<E> net = {{product, reinterpret_cast<const Run *>(runs), num_runs, state, window,      \
                      keys, deltas, decays, inputs, weights, rate, bias, s,                       \
                      2 * (s.K * s.I + s.V * s.J) + s.V},                                         \
                     out, conv_bias, skip, norm, epsilon, is_normed != 0};                        \
    net.run();                                                                                    \
  }                                                                                               \
  void specdec_run_short_conv_##suffix(                                                           \
      const E *product, E *out, const int64_t *runs, int64_t num_runs, E *window, E *inputs,      \
      const float *weights, const float *bias, const ConvSizes *sizes) {                          \
    ShortConv<E> net = {product, out, reinterpret_cast<const Run *>(runs), num_runs, window,      \
                        inputs, weights, bias, *sizes};                                           \
    net.run();                                                                                    \
  }                                                                                               \
  void specdec_rank_outputs_##suffix(const E *x, int64_t M, int64_t depth, const void *head,      \
                                     const E *bias, int64_t V, int64_t width, int64_t *tokens,    \
                                     float *scores, int64_t is_integer) {                         \
    const auto rank = [&](auto none) {                                                            \
      run_in_team(M * V * depth > kParallelWork, [&] {                                            \
        rank_outputs(x, M, depth, static_cast<decltype(none)>(head), bias, V, width, tokens,      \
                     scores);                                                                     \
      });                                                                                         \
    };                                                                                            \
    if (is_integer)                                                                               \
      rank(static_cast<const Integers *>(nullptr));                                               \
    else                                                                                          \
      rank(static_cast<const E *>(nullptr));                                                      \
  }                                                                                               \
  int64_t specdec_search_##suffix(const E *embedding, const E *hidden, const int64_t *tokens,     \
                                  const void *const *matrices, const E *const *biases,            \
                                  const void *const *blocks, int64_t num_blocks,                  \
                                  const int64_t *drafted, const double *temperatures,             \
                                  double min_gain, int64_t *nodes, double *chances,               \
                                  const SearchShape *shape) {                                     \
    const SearchShape &s = *shape;                                                                \
    const auto search = [&](auto none) {                                                          \
      const auto get_matrix = [&](int64_t i) { return static_cast<decltype(none)>(matrices[i]); };\
      typedef typename std::remove_const<typename std::remove_pointer<decltype(none)>::type>::type P; \
      const Drafter<P, E> drafter = {                                                             \
          embedding, s.is_embedding_packed != 0, get_matrix(0), get_matrix(1), biases[0],         \
          get_matrix(2), get_matrix(3), biases[1], blocks, num_blocks, get_matrix(4), drafted,    \
          s.V, s.H, s.X};                                                                         \
      int64_t levels = s.L;                                                                       \
      run_in_team(s.B * s.V * s.X > kParallelWork, [&] {                                          \
        if (temperatures != nullptr)                                                              \
          levels = search_tree(drafter, hidden, tokens, temperatures, min_gain, nodes, chances, s.B, \
                               s.W, s.L, s.N);                                                    \
        else                                                                                      \
          search_beams(drafter, hidden, tokens, nodes, s.B, s.W, s.L, s.C);                       \
      });                                                                                         \
      return levels;                                                                              \
    };                                                                                            \
    if (s.is_integer) return search(static_cast<const Integers *>(nullptr));                      \
    return search(static_cast<const E *>(nullptr));                                               \
  }                                                                                               \
  void specdec_find_greatest_##suffix(const E *logits, int64_t M, int64_t V, int64_t *greatest) { \
    find_greatest(logits, M, V, greatest);                                                        \
  }                                                                                               \
  int64_t specdec_draft_pairs_##suffix(const PairNet *net, const PairStep *step,                  \
                                       const PairTree *tree, const Shape *shape,                  \
                                       const Scalars *scalars, E *cache, int64_t *nodes,          \
                                       double *log_chances) {                                     \
    int64_t levels = 0;                                                                           \
    run_in_team(step->B * net->V * shape->D > kParallelWork, [&] {                                \
      levels = draft_pairs(*net, *step, *tree, *shape, *scalars, cache, nodes, log_chances);      \
    });                                                                                           \
    return levels;                                                                                \
  }                                                                                               \
  SPECDEC_TYPES(specdec_add_norm_##suffix) SPECDEC_TYPES(specdec_silu_mul_##suffix)               \
  SPECDEC_TYPES(specdec_gelu_mul_##suffix) SPECDEC_TYPES(specdec_cap_logits_##suffix)             \
  SPECDEC_TYPES(specdec_attend_##suffix) SPECDEC_TYPES(specdec_pack_matrix_##suffix)              \
  SPECDEC_TYPES(specdec_multiply_##suffix) SPECDEC_TYPES(specdec_multiply_integers_##suffix)      \
  SPECDEC_TYPES(specdec_run_layers_##suffix) SPECDEC_TYPES(specdec_mix_experts_##suffix)          \
  SPECDEC_TYPES(specdec_rank_outputs_##suffix) SPECDEC_TYPES(specdec_search_##suffix)             \
  SPECDEC_TYPES(specdec_run_delta_net_##suffix) SPECDEC_TYPES(specdec_unpack_rows_##suffix)           \
  SPECDEC_TYPES(specdec_draft_pairs_##suffix) SPECDEC_TYPES(specdec_find_greatest_##suffix)       \
  SPECDEC_TYPES(specdec_run_short_conv_##suffix) SPECDEC_TYPES(specdec_run_mamba2_##suffix)

void specdec_ask_for_huge_pages(void *start, int64_t size) { ask_for_huge_pages(start, size); }

// Size of a packed matrix of integers, in bytes.
int64_t specdec_measure_integers(const Integers *sizes) { return measure_integers(*sizes); }

void specdec_pack_integers(const uint8_t *codes, const float *scales, const uint8_t *zeros,
                           const float *input_scales, const int32_t *order, const Integers *sizes,
                           char *packed) {
  pack_integers(codes, scales, zeros, input_scales, order, *sizes, packed);
}

// Size of packed rows of GGML's blocks, one run of a matrix, in bytes.
int64_t specdec_measure_blocks(const BlockRows *run) { return measure_blocks(*run); }

void specdec_pack_blocks(const uint8_t *rows, int64_t stride, const BlockRows *run, char *packed) {
  pack_blocks(rows, stride, *run, packed);
}

int64_t specdec_widen_blocks(const uint8_t *rows, int64_t N, int64_t stride, const uint8_t *types,
                             const int64_t *chosen, int64_t count, int64_t depth, float *out) {
  return widen_blocks(rows, N, stride, types, chosen, count, depth, out);
}

int64_t specdec_unpack_block_rows(const BlockRows *packed, const int64_t *rows, int64_t count,
                                  float *out) {
  return unpack_block_rows(packed, rows, count, out);
}

SPECDEC_TYPES(specdec_abi_version)
SPECDEC_TYPES(specdec_use_amx)
SPECDEC_TYPES(specdec_set_num_threads)
SPECDEC_TYPES(specdec_ask_for_huge_pages)
SPECDEC_TYPES(specdec_measure_integers)
SPECDEC_TYPES(specdec_pack_integers)
SPECDEC_TYPES(specdec_measure_blocks)
SPECDEC_TYPES(specdec_pack_blocks)
SPECDEC_TYPES(specdec_widen_blocks)
SPECDEC_TYPES(specdec_unpack_block_rows)

// Sizes of the records that native_border.py writes.
int64_t specdec_size_of_LayerRecord = sizeof(LayerRecord<float, float>);
int64_t specdec_size_of_ExpertsRecord = sizeof(ExpertsRecord);
int64_t specdec_size_of_Shape = sizeof(Shape);
int64_t specdec_size_of_Scalars = sizeof(Scalars);
int64_t specdec_size_of_SearchShape = sizeof(SearchShape);
int64_t specdec_size_of_DeltaSizes = sizeof(DeltaSizes);
int64_t specdec_size_of_ConvSizes = sizeof(ConvSizes);
int64_t specdec_size_of_RecurrenceRecord = sizeof(RecurrenceRecord);
int64_t specdec_size_of_StatesRecord = sizeof(StatesRecord);
int64_t specdec_size_of_PairNet = sizeof(PairNet);
int64_t specdec_size_of_PairStep = sizeof(PairStep);
int64_t specdec_size_of_PairTree = sizeof(PairTree);

SPECDEC_EXPORT(float, f32)
SPECDEC_EXPORT(bf16, bf16)
SPECDEC_EXPORT(half, f16)
}
