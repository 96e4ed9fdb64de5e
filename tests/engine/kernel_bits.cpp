// Holds a library of kernels to the rule of bits, and tells what it computes.
//
//     kernel_bits LIBRARY
//
// The rule: a token's numbers have the same bits whatever is computed beside it, by however many
// threads.
// Status 1 and a line on stderr for each place where they have not. On stdout a line for each kernel
// and type: its name and a sum of the bits of its results for fixed inputs, so that libraries of
// other compilers, tunings and processors can be compared. Needs no Python: it runs under an
// emulator too.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace {

void *library;
int failures = 0;

template <typename F>
F *find(const std::string &name) {
  void *symbol = dlsym(library, name.c_str());
  if (symbol == nullptr) {
    std::fprintf(stderr, "%s is missing\n", name.c_str());
    std::exit(2);
  }
  return reinterpret_cast<F *>(symbol);
}

void expect(bool holds, const std::string &what) {
  if (holds) return;
  std::fprintf(stderr, "other bits: %s\n", what.c_str());
  ++failures;
}

// Types are known by their bits alone: numbers are made of random ones, and never computed with.
struct Float32 {
  typedef uint32_t Bits;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr const char *kSuffix = "f32";
};
struct Bfloat16 {
  typedef uint16_t Bits;
  static constexpr int kMantissa = 7, kBias = 127;
  static constexpr const char *kSuffix = "bf16";
};
struct Float16 {
  typedef uint16_t Bits;
  static constexpr int kMantissa = 10, kBias = 15;
  static constexpr const char *kSuffix = "f16";
};

uint64_t state;

uint32_t draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

// Numbers of either sign of 2^lowest to 2^(lowest + 4).
template <typename T>
std::vector<typename T::Bits> make(int64_t count, int lowest) {
  std::vector<typename T::Bits> numbers(count);
  for (auto &number : numbers) {
    const uint32_t random = draw();
    const uint32_t exponent = static_cast<uint32_t>(T::kBias + lowest) + (random >> 1) % 4;
    const uint32_t mantissa = draw() >> 5 & ((1u << T::kMantissa) - 1);
    const uint32_t sign = (random & 1u) << (8 * sizeof(number) - 1);
    number = static_cast<typename T::Bits>(sign | exponent << T::kMantissa | mantissa);
  }
  return numbers;
}

uint64_t add_bits(uint64_t sum, const void *data, size_t size) {
  const unsigned char *bytes = static_cast<const unsigned char *>(data);
  for (size_t i = 0; i < size; ++i) sum = (sum ^ bytes[i]) * 1099511628211u;
  return sum;
}

template <typename Number>
uint64_t add_bits(uint64_t sum, const std::vector<Number> &numbers) {
  return add_bits(sum, numbers.data(), numbers.size() * sizeof(Number));
}

constexpr uint64_t kStart = 14695981039346656037u;

template <typename T>
struct Checks {
  typedef typename T::Bits E;
  typedef std::vector<E> Numbers;

  static std::string name(const std::string &kernel) { return kernel + "_" + T::kSuffix; }

  static void tell(const std::string &kernel, uint64_t sum) {
    std::printf("%s %016llx\n", name(kernel).c_str(), static_cast<unsigned long long>(sum));
  }

  static Numbers pack(const Numbers &weight, int64_t N, int64_t depth) {
    const int64_t pair = 4 / sizeof(E);
    Numbers packed((N + 31) / 32 * ((depth + pair - 1) / pair) * 32 * pair);
    find<void(const E *, int64_t, int64_t, E *)>("specdec_pack_matrix_" + std::string(T::kSuffix))(
        weight.data(), N, depth, packed.data());
    return packed;
  }

  // Random integers; those of 4 bits with zeros, scales of the inputs and an order of these.
  static std::vector<char> pack_integers(int64_t bits, int64_t N, int64_t depth) {
    const int64_t group = 32, groups = bits == 8 ? 1 : (depth + group - 1) / group;
    std::vector<uint8_t> codes(bits == 8 ? N * depth : (N + 1) / 2 * depth), zeros(N * groups);
    for (auto &code : codes) code = static_cast<uint8_t>(draw() >> 24);
    for (auto &zero : zeros) zero = static_cast<uint8_t>(draw() >> 28);
    std::vector<float> scales(N * groups), input_scales(depth);
    for (auto *list : {&scales, &input_scales}) {
      const auto numbers = make<Float32>(static_cast<int64_t>(list->size()), -4);
      std::memcpy(list->data(), numbers.data(), list->size() * sizeof(float));
    }
    std::vector<int32_t> order(depth);
    for (int64_t i = 0; i < depth; ++i) order[i] = static_cast<int32_t>(depth - 1 - i);
    const bool is_full = bits == 4;
    const int64_t sizes[] = {N, depth, bits, group, !is_full, is_full, is_full, is_full};
    std::vector<char> packed(find<int64_t(const int64_t *)>("specdec_measure_integers")(sizes));
    find<void(const uint8_t *, const float *, const uint8_t *, const float *, const int32_t *,
              const int64_t *, char *)>("specdec_pack_integers")(
        codes.data(), scales.data(), is_full ? zeros.data() : nullptr,
        is_full ? input_scales.data() : nullptr, is_full ? order.data() : nullptr, sizes,
        packed.data());
    return packed;
  }

  // A block type of GGML's: inputs and bytes of a block, and where its float16 begin, none below zero.
  struct BlockType {
    int64_t type, inputs, bytes, factors, num_factors;
  };
  static constexpr BlockType kBlockTypes[] = {
      {2, 32, 18, 0, 1},     {3, 32, 20, 0, 2},     {6, 32, 22, 0, 1},     {7, 32, 24, 0, 2},
      {8, 32, 34, 0, 1},     {10, 256, 84, 80, 2},  {11, 256, 110, 108, 1}, {12, 256, 144, 0, 2},
      {13, 256, 176, 0, 2},  {14, 256, 210, 208, 1}, {20, 32, 18, 0, 1},    {23, 256, 136, 0, 1},
      {39, 32, 17, 0, 0}};

  // Random blocks of two types, each a part of a matrix; their scales are small.
  static std::vector<char> pack_blocks(const BlockType &first, const BlockType &second, int64_t N,
                                       int64_t depth) {
    const auto measure = find<int64_t(const int64_t *)>("specdec_measure_blocks");
    const auto pack = find<void(const uint8_t *, int64_t, const int64_t *, char *)>("specdec_pack_blocks");
    std::vector<char> packed;
    for (int64_t part = 0; part < 2; ++part) {
      const BlockType &of = part ? second : first;
      const int64_t rows = part ? N / 2 : N - N / 2, stride = depth / of.inputs * of.bytes;
      std::vector<uint8_t> blocks(rows * stride);
      for (auto &byte : blocks) byte = static_cast<uint8_t>(draw() >> 24);
      for (int64_t at = 0; at < rows * stride; at += of.bytes)
        if (of.num_factors == 0)
          blocks[at] = static_cast<uint8_t>(112 + blocks[at] % 8);
        else
          for (int64_t end = at + of.factors + 1, i = 0; i < of.num_factors; ++i, end += 2)
            blocks[end] = static_cast<uint8_t>((blocks[at + of.factors + 1] & 0x83) | 0x20);
      int64_t head[8] = {N, depth, 0, of.type, rows, 0, 0, 0};
      const int64_t size = measure(head), place = static_cast<int64_t>(packed.size());
      if (part == 0) head[5] = size;
      packed.resize(place + size);
      pack(blocks.data(), stride, head, packed.data() + place);
    }
    return packed;
  }

  static void pointwise() {
    uint64_t norms = kStart, gates = kStart;
    const auto add_norm =
        find<void(E *, const E *, const E *, const E *, float, const E *, const E *, E *, int64_t,
                  int64_t, float, float)>(name("specdec_add_norm"));
    for (int64_t size : {1, 8, 40, 321, 1024})
      for (int way = 0; way < 6; ++way) {
        const bool has_bias = way % 2, has_delta = way > 1, is_normed = way > 3;
        const Numbers start = make<T>(7 * size, -2), delta = make<T>(7 * size, -2);
        const Numbers weight = make<T>(size, -2), bias = make<T>(size, -2);
        const auto run = [&](int64_t first, int64_t count, Numbers &x, Numbers &out) {
          x.assign(start.begin() + first * size, start.begin() + (first + count) * size);
          out.resize(count * size);
          const E *added = has_delta ? delta.data() + first * size : nullptr;
          const E *own_bias = has_bias ? bias.data() : nullptr;
          add_norm(x.data(), added, is_normed ? bias.data() : nullptr, own_bias,
                   is_normed ? 0.3f : 1.0f, weight.data(), own_bias, out.data(), count, size,
                   1e-5f, 0.0f);
        };
        Numbers x, out, one, alone;
        run(0, 7, x, out);
        norms = add_bits(add_bits(norms, x), out);
        for (int64_t r = 0; r < 7; ++r) {
          run(r, 1, one, alone);
          expect(std::equal(alone.begin(), alone.end(), out.begin() + r * size), name("add_norm"));
        }
      }
    for (const char *kernel : {"specdec_silu_mul", "specdec_gelu_mul"}) {
      const auto gate_mul = find<void(const E *, E *, int64_t, int64_t)>(name(kernel));
      for (int lowest : {-12, -4, 0, 4})
        for (int64_t size : {1, 40, 321}) {
          const Numbers gate_up = make<T>(3 * 2 * size, lowest);
          Numbers out(3 * size);
          gate_mul(gate_up.data(), out.data(), 3, size);
          gates = add_bits(gates, out);
        }
    }
    const auto cap = find<void(E *, int64_t, float, float)>(name("specdec_cap_logits"));
    Numbers logits = make<T>(321, 2), one;
    const Numbers start = logits;
    cap(logits.data(), 321, 0.7f, 30.0f);
    for (int64_t i = 0; i < 321; ++i) {
      one = {start[i]};
      cap(one.data(), 1, 0.7f, 30.0f);
      expect(one[0] == logits[i], name("cap_logits"));
    }
    tell("cap_logits", add_bits(kStart, logits));
    tell("add_norm", norms);
    tell("gate_mul", gates);
  }

  // Any rows among any others.
  template <typename W>
  static uint64_t products(const char *kernel, int64_t N, int64_t depth, const Numbers &x,
                           const std::vector<W> &packed, const Numbers &bias) {
    const auto multiply =
        find<void(const E *, int64_t, int64_t, const W *, const E *, int64_t, E *)>(name(kernel));
    const int64_t M = static_cast<int64_t>(x.size()) / depth;
    Numbers whole(M * N), part;
    multiply(x.data(), M, depth, packed.data(), bias.data(), N, whole.data());
    for (int64_t count = 1; count < M; ++count) {
      const int64_t first = M - count;
      part.assign(count * N, 0);
      multiply(x.data() + first * depth, count, depth, packed.data(), bias.data(), N, part.data());
      expect(std::equal(part.begin(), part.end(), whole.begin() + first * N), name(kernel));
    }
    part.assign(M * N, 0);
    multiply(x.data(), M, depth, packed.data(), nullptr, N, part.data());
    return add_bits(add_bits(kStart, whole), part);
  }

  static void all_products() {
    uint64_t plain = kStart, int8 = kStart, int4 = kStart;
    const int64_t sizes[][2] = {{1, 1}, {33, 7}, {96, 40}, {200, 321}};
    for (const auto &size : sizes) {
      const int64_t N = size[0], depth = size[1];
      const Numbers x = make<T>(41 * depth, -2), weight = make<T>(N * depth, -4);
      const Numbers bias = make<T>(N, -2);
      plain ^= products<E>("specdec_multiply", N, depth, x, pack(weight, N, depth), bias);
      const char *kernel = "specdec_multiply_integers";
      int8 ^= products<char>(kernel, N, depth, x, pack_integers(8, N, depth), bias);
      int4 ^= products<char>(kernel, N, depth, x, pack_integers(4, N, depth), bias);
    }
    // Sums that cancel out but for what was rounded, so that no rounding hides after the result's.
    const int64_t N = 64, depth = 320;
    Numbers x = make<T>(14 * depth, -2), weight = make<T>(N * depth, -4);
    for (int64_t m = 0; m < 14; ++m) cancel(&x[m * depth], depth / 2, 1, true);
    for (int64_t n = 0; n < N; ++n) cancel(&weight[n * depth], depth / 2, 1, false);
    plain ^= products<E>("specdec_multiply", N, depth, x, pack(weight, N, depth), Numbers(N));
    uint64_t blocks = kStart;
    const Numbers wide = make<T>(30 * 768, -2);
    for (const BlockType &of : kBlockTypes) {
      const Numbers bias = make<T>(75, -2);
      const auto packed = pack_blocks(of, kBlockTypes[of.type == 14 ? 0 : 9], 75, 768);
      blocks ^= products<char>("specdec_multiply_integers", 75, 768, wide, packed, bias);
    }
    tell("multiply", plain);
    tell("multiply_blocks", blocks);
    tell("multiply_int8", int8);
    tell("multiply_int4", int4);
  }

  // The second half of 2 * count vectors becomes the first, with another sign where asked for.
  static void cancel(E *numbers, int64_t count, int64_t size, bool is_negated) {
    for (int64_t i = 0; i < count * size; ++i)
      numbers[count * size + i] =
          static_cast<E>(numbers[i] ^ (is_negated ? E(1) << (8 * sizeof(E) - 1) : E(0)));
  }

  // Attention whose results are what was rounded and nothing else: equal keys have opposite values,
  // the newest tokens none.
  static uint64_t attention(int64_t N, int64_t K, int64_t H, int64_t window, float limit,
                            int64_t past) {
    const int64_t S = past + 26, stride = (N + 2 * K) * H;
    const std::vector<int64_t> parents = {-1, 0, 0, 1, 3, 3, 4, 4, 7}, chain = {0, 1, 3, 4, 7};
    Numbers cache = make<T>(2 * K * S * H, -3), qkv = make<T>(9 * stride, -2);
    const Numbers large = make<T>(K * S * H, 6);
    std::copy(large.begin(), large.end(), cache.begin() + K * S * H);
    for (int64_t k = 0; k < K; ++k) {
      cancel(&cache[k * S * H], past / 2, H, false);
      cancel(&cache[(K + k) * S * H], past / 2, H, true);
    }
    for (int64_t t = 0; t < 9; ++t)
      std::fill_n(qkv.begin() + t * stride + (N + K) * H, K * H, E(0));
    const auto attend =
        find<void(E *, E *, const E *, const E *, const E *, const E *, const int64_t *,
                  const int64_t *, const int64_t *, const int64_t *, const uint8_t *, E *, int64_t,
                  int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                  float, float, float, float, int64_t, const E *)>(name("specdec_attend"));
    const auto set_threads = find<void(int64_t)>("specdec_set_num_threads");
    const Numbers norm = make<T>(H, -1), scores = make<T>(N, 0);
    const E *normed = limit > 0.0f ? norm.data() : nullptr;
    const E *sinks = window > 0 ? scores.data() : nullptr;
    const auto run = [&](Numbers &to, Numbers tokens, const std::vector<int64_t> &positions,
                         const std::vector<uint8_t> &mask, int64_t before) {
      const int64_t n = static_cast<int64_t>(positions.size()), row = 0;
      Numbers out(n * N * H);
      attend(tokens.data(), to.data(), normed, normed, nullptr, nullptr, &row, positions.data(),
             positions.data(), &before, mask.data(), out.data(), 1, n, n, N, K, H, 1, S, 0, window,
             0.125f, limit, 1e-5f, 0.0f, 0, sinks);
      return out;
    };
    std::vector<uint8_t> mask(81);
    std::vector<int64_t> positions(9);
    for (int64_t t = 0; t < 9; ++t) {
      int64_t depth = 0;
      for (int64_t at = t; at >= 0; at = parents[at], ++depth) mask[t * 9 + at] = 1;
      positions[t] = past + depth - 1;
    }
    const std::string what = name("attend") + ", " + std::to_string(N) + " heads, " +
                             std::to_string(K) + " kv heads, size " + std::to_string(H) +
                             ", window " + std::to_string(window) + ", cap " +
                             std::to_string(limit) + ", " + std::to_string(past) + " before, ";
    Numbers tree_cache = cache;
    const Numbers tree = run(tree_cache, qkv, positions, mask, past);
    for (int64_t threads : {5, 1, 2}) {
      set_threads(threads);
      expect(run(tree_cache, qkv, positions, mask, past) == tree,
             what + std::to_string(threads) + " threads");
    }
    for (int64_t i = 0; i < 5; ++i) {
      const auto from = qkv.begin() + chain[i] * stride;
      const Numbers alone = run(cache, Numbers(from, from + stride), {past + i}, {1}, past + i);
      expect(std::equal(alone.begin(), alone.end(), tree.begin() + chain[i] * N * H),
             what + "token " + std::to_string(i) + " in a tree");
    }
    return add_bits(kStart, tree);
  }

  static void all_attention() {
    uint64_t sum = kStart;
    const int64_t heads[][3] = {{6, 6, 64}, {6, 2, 64}, {12, 1, 32}, {8, 2, 40}, {2, 2, 128}};
    for (const auto &head : heads)
      for (int64_t window : {0, 8})
        for (float limit : {0.0f, 2.0f})
          sum ^= attention(head[0], head[1], head[2], window, limit, 38);
    // Sums go by blocks of 512 positions: a tree across the end of one, and many blocks.
    for (int64_t past : {506, 510, 1536, 2610})
      for (int64_t window : {0, 600}) {
        sum ^= attention(8, 1, 40, window, 0.0f, past);
        sum ^= attention(6, 6, 64, window, 2.0f, past);
      }
    tell("attend", sum);
  }

  // The states of a layer: short convolutions of kC channels and kTaps taps, or Mamba-2 with a group, two
  // heads of 24 numbers and a state of 16.
  struct States {
    static constexpr int64_t kTaps = 3, kLogged = 4, kRows = 3, kHeads = 2, kKeys = 16, kValues = 24;
    static constexpr int64_t kC = 2 * kKeys + kHeads * kValues;
    std::vector<float> state = std::vector<float>(kRows * kHeads * kKeys * kValues);
    std::vector<float> keys = std::vector<float>(kRows * kLogged * kKeys);
    std::vector<float> deltas = std::vector<float>(kRows * kLogged * kHeads * kValues);
    std::vector<float> decays = std::vector<float>(kRows * kLogged * kHeads);
    Numbers window = Numbers(kRows * (kTaps - 1) * kC), inputs = Numbers(kRows * kLogged * kC);

    uint64_t sum() const { return add_bits(add_bits(kStart, state), window); }
  };

  // Two layers of a decoder over random caches, the first with the window. is_normed: with norms of
  // queries, keys and what is added, with caps, and with another rotary table for the second layer.
  // recurrence: of the second layer in place of attention, 0 a short convolution, 1 Mamba-2.
  struct Layers {
    int64_t N, K, H, I, window, activation, is_gated, bits;  // 0, or of integers
    bool has_bias, is_normed = false;
    int64_t recurrence = -1;
    int64_t D = N * H, R = 3, S = 96, rotated = H;
    std::vector<Numbers> kept;
    std::vector<std::vector<char>> kept_integers;
    std::vector<const void *> pointers, final_norm;
    Numbers embedding, row, cosine, sine, sinks;
    std::vector<std::vector<uint32_t>> vectors;  // float32, of the second layer's recurrence
    std::vector<int64_t> recurrence_record;
    // Of a step of the second layer: its states, and of each row the tokens that are there, that are kept
    // and that were accepted of the step before.
    mutable States *states = nullptr;
    mutable std::vector<int64_t> counts, kept_counts, folded_counts;

    // What the second layer's first product yields of a token, and what its last one reads.
    int64_t width(int layer) const {
      if (layer == 0 || recurrence < 0) return (N + 2 * K) * H;
      return recurrence == 0 ? 3 * States::kC : States::kC + States::kHeads * (States::kValues + 1);
    }
    int64_t mixed_width(int layer) const {
      if (layer == 0 || recurrence < 0) return N * H;
      return recurrence == 0 ? States::kC : States::kHeads * States::kValues;
    }

    const void *keep(const Numbers &numbers) {
      kept.push_back(numbers);
      return kept.back().data();
    }

    const void *matrix(int64_t outputs, int64_t depth) {
      if (bits == 0) return keep(pack(make<T>(outputs * depth, -7), outputs, depth));
      kept_integers.push_back(pack_integers(bits, outputs, depth));
      return kept_integers.back().data();
    }

    void fill() {
      kept.reserve(64);
      kept_integers.reserve(64);
      const auto extra = [&](int64_t size) {
        return is_normed ? keep(make<T>(size, -1)) : nullptr;
      };
      const auto vector = [&](int64_t size) { return keep(make<T>(size, -3)); };
      const auto bias = [&](int64_t size) { return has_bias ? vector(size) : nullptr; };
      for (int layer = 0; layer < 2; ++layer)
        for (const void *pointer : {
                 vector(D), bias(D), matrix(width(layer), D), bias(width(layer)),
                 matrix(D, mixed_width(layer)), bias(D), vector(D), bias(D), matrix(I * (1 + is_gated), D),
                 bias(I * (1 + is_gated)), matrix(D, I), bias(D), extra(H), extra(H), extra(D),
                 static_cast<const void *>(nullptr), extra(D), static_cast<const void *>(nullptr)})
          pointers.push_back(pointer);
      final_norm = {vector(D), bias(D)};
      embedding = make<T>(64 * D, -2);
      row = make<T>(2 * 2 * K * S * H, -2);
      cosine = make<T>(S * H, -3);
      sine = make<T>(S * H, -3);
      sinks = make<T>(N, -1);
      if (recurrence < 0) return;
      const int64_t sizes[] = {States::kTaps * States::kC, States::kC, States::kHeads, States::kHeads,
                               States::kHeads};
      for (int64_t size : sizes) vectors.push_back(make<Float32>(size, -3));
      for (uint32_t &rate : vectors[2]) rate |= 1u << 31;  // states fade
      for (const auto &list : vectors) recurrence_record.push_back(reinterpret_cast<int64_t>(list.data()));
      recurrence_record.push_back(reinterpret_cast<int64_t>(vector(mixed_width(1))));
      const double epsilon = 1e-5;
      recurrence_record.push_back(0);
      std::memcpy(&recurrence_record.back(), &epsilon, sizeof epsilon);
      for (int64_t number : {recurrence, int64_t(0), width(1), mixed_width(1)})
        recurrence_record.push_back(number);
    }

    // Every row of the cache holds the same numbers.
    Numbers make_cache() const {
      Numbers cache;
      for (int64_t part = 0; part < 4; ++part)  // keys and values of each layer
        for (int64_t r = 0; r < R; ++r)
          cache.insert(cache.end(), row.begin() + part * K * S * H,
                       row.begin() + (part + 1) * K * S * H);
      return cache;
    }

    // The states [B, T, D] after tokens on top of past[b] others. wanted: [B, T], or empty for all.
    Numbers step(Numbers &cache, const std::vector<int64_t> &past,
                 const std::vector<int64_t> &tokens, const std::vector<int64_t> &parents,
                 const std::vector<uint8_t> &wanted = {}) const {
      const int64_t B = static_cast<int64_t>(past.size());
      const int64_t n = static_cast<int64_t>(tokens.size());
      std::vector<uint8_t> mask(B * n * n);
      std::vector<int64_t> positions(B * n), rows(B);
      Numbers x, out(B * n * D);
      for (int64_t b = 0; b < B; ++b) {
        rows[b] = b;
        for (int64_t t = 0; t < n; ++t) {
          int64_t depth = 0;
          for (int64_t at = t; at >= 0; at = parents[at], ++depth) mask[(b * n + t) * n + at] = 1;
          positions[b * n + t] = past[b] + depth - 1;
          x.insert(x.end(), embedding.begin() + tokens[t] * D,
                   embedding.begin() + (tokens[t] + 1) * D);
        }
      }
      const int64_t shape[] = {B, n, n, 0, D, N, K, H, I, R, S, rotated, 2, activation,
                               is_gated, 0, bits > 0, std::max(width(0), width(1)),
                               std::max(mixed_width(0), mixed_width(1))};
      std::vector<int64_t> runs, states_record;
      if (states != nullptr) {
        for (int64_t b = 0; b < B; ++b)
          for (int64_t number : {b, b * n, counts[b], kept_counts[b], folded_counts[b]})
            runs.push_back(number);
        for (const void *pointer : {static_cast<const void *>(runs.data()),
                                    static_cast<const void *>(states->state.data()),
                                    static_cast<const void *>(states->window.data()),
                                    static_cast<const void *>(states->keys.data()),
                                    static_cast<const void *>(states->deltas.data()),
                                    static_cast<const void *>(states->decays.data()),
                                    static_cast<const void *>(states->inputs.data())})
          states_record.push_back(reinterpret_cast<int64_t>(pointer));
        for (int64_t number : {B, R, States::kC, int64_t(1), States::kHeads, States::kKeys,
                               States::kValues, States::kTaps, States::kLogged})
          states_record.push_back(number);
      }
      // Of a layer its pointers, its rotary table, its sinks, its window, no shift, no experts, and its
      // recurrence.
      std::vector<const void *> records;
      for (int layer = 0; layer < 2; ++layer) {
        const bool is_other = layer == 1 && is_normed;
        const int64_t own_window = is_other ? 0 : window;
        records.insert(records.end(), pointers.begin() + layer * 18, pointers.begin() + (layer + 1) * 18);
        for (const void *field : {static_cast<const void *>(is_other ? sine.data() : cosine.data()),
                                  static_cast<const void *>(is_other ? cosine.data() : sine.data()),
                                  static_cast<const void *>(is_other ? sinks.data() : nullptr),
                                  reinterpret_cast<const void *>(own_window),
                                  static_cast<const void *>(nullptr), static_cast<const void *>(nullptr),
                                  static_cast<const void *>(layer == 1 && recurrence >= 0
                                                                ? recurrence_record.data()
                                                                : nullptr)})
          records.push_back(field);
      }
      const float scalars[] = {1e-5f, 0.125f, is_normed ? 2.0f : 0.0f, is_normed ? 0.3f : 1.0f};
      find<void(E *, const E *, E *, const void *, const void *const *, E *, const int64_t *,
                const int64_t *, const int64_t *, const int64_t *, const uint8_t *, const int64_t *, E *,
                const uint8_t *, const int64_t *, const float *, const int64_t *)>(
          name("specdec_run_layers"))(
          x.data(), nullptr, out.data(), records.data(), final_norm.data(), cache.data(), rows.data(),
          positions.data(), positions.data(), past.data(), mask.data(), nullptr, nullptr,
          wanted.empty() ? nullptr : wanted.data(), shape, scalars,
          states == nullptr ? nullptr : states_record.data());
      return out;
    }
  };

  // A chain of tokens: alone, in a tree beside others, in a batch, at the front of a prompt.
  static uint64_t steps(Layers layers, const std::string &what) {
    const int64_t past = 37;
    const std::vector<int64_t> chain = {5, 9, 2, 30, 41};
    layers.fill();
    Numbers cache = layers.make_cache(), expected;
    for (size_t at = 0; at < chain.size(); ++at) {
      const int64_t before = past + static_cast<int64_t>(at);
      const Numbers state = layers.step(cache, {before}, {chain[at]}, {-1});
      expected.insert(expected.end(), state.begin(), state.end());
    }
    uint64_t sum = add_bits(kStart, expected);
    const auto compare = [&](const std::vector<int64_t> &pasts, const std::vector<int64_t> &tokens,
                             const std::vector<int64_t> &parents,
                             const std::vector<int64_t> &nodes, const std::string &where) {
      Numbers fresh = layers.make_cache();
      const Numbers states = layers.step(fresh, pasts, tokens, parents);
      sum = add_bits(sum, states);
      for (size_t i = 0; i < nodes.size(); ++i)
        expect(std::equal(states.begin() + nodes[i] * layers.D,
                          states.begin() + (nodes[i] + 1) * layers.D,
                          expected.begin() + static_cast<int64_t>(i) * layers.D),
               what + ", token " + std::to_string(i) + where);
      // Of the last layer every fourth token, then none: no bit of those or of the cache changes.
      for (int64_t every : {4, 0}) {
        const int64_t M = static_cast<int64_t>(states.size()) / layers.D;
        std::vector<uint8_t> wanted(M);
        for (int64_t m = 0; m < M; ++m) wanted[m] = every > 0 && m % every == every - 1;
        Numbers own = layers.make_cache(), kept = states;
        for (int64_t i = 0; i < M * layers.D; ++i)
          if (wanted[i / layers.D] == 0) kept[i] = E();
        const Numbers some = layers.step(own, pasts, tokens, parents, wanted);
        expect(add_bits(kStart, own) == add_bits(kStart, fresh) &&
                   add_bits(kStart, some) == add_bits(kStart, kept),
               what + ", every " + std::to_string(every) + "th token wanted" + where);
      }
    };
    const std::vector<int64_t> tokens = {5, 9, 8, 2, 30, 17, 23, 41, 50};
    const std::vector<int64_t> parents = {-1, 0, 0, 1, 3, 3, 4, 4, 7}, nodes = {0, 1, 3, 4, 7};
    compare({past}, tokens, parents, nodes, " in a tree");
    compare({past, 21, 60}, tokens, parents, nodes, " in a batch of trees");
    compare({past, 60}, chain, {-1, 0, 1, 2, 3}, {0, 1, 2, 3, 4}, " in a batch of chains");
    std::vector<int64_t> prompt = chain, before = {-1, 0, 1, 2, 3};
    for (int64_t t = 5; t < 23; ++t) {
      prompt.push_back(t);
      before.push_back(t - 1);
    }
    compare({past}, prompt, before, {0, 1, 2, 3, 4}, " in a prompt");
    return sum;
  }

  // A chain of tokens whose second layer has a state: alone, in a batch, as drafts of which two are
  // accepted, after drafts that are rejected, and at the front of a prompt.
  static uint64_t state_steps(Layers layers, const std::string &what) {
    const int64_t past = 37, D = layers.D;
    const std::vector<int64_t> chain = {5, 9, 2, 30, 41}, line = {-1, 0, 1, 2, 3};
    layers.fill();
    Numbers cache = layers.make_cache(), expected;
    States alone, states;
    const auto step = [&](States &of, Numbers &to, const std::vector<int64_t> &pasts,
                          const std::vector<int64_t> &tokens, std::vector<int64_t> counts,
                          std::vector<int64_t> kept, std::vector<int64_t> folded,
                          const std::vector<uint8_t> &wanted = {}) {
      layers.states = &of;
      layers.counts = counts, layers.kept_counts = kept, layers.folded_counts = folded;
      std::vector<int64_t> parents(tokens.size());
      for (size_t t = 0; t < tokens.size(); ++t) parents[t] = static_cast<int64_t>(t) - 1;
      return layers.step(to, pasts, tokens, parents, wanted);
    };
    const auto check = [&](const Numbers &found, int64_t at, int64_t first, int64_t count,
                           const std::string &where) {
      expect(std::equal(found.begin() + at * D, found.begin() + (at + count) * D,
                        expected.begin() + first * D),
             what + where);
    };
    for (size_t at = 0; at < chain.size(); ++at) {
      const Numbers state =
          step(alone, cache, {past + static_cast<int64_t>(at)}, {chain[at]}, {1}, {1}, {0});
      expected.insert(expected.end(), state.begin(), state.end());
    }
    const uint64_t sum = add_bits(add_bits(kStart, expected), &alone.state[0], 64);
    // Two rows: all of the chain as drafts, and three tokens of it beside padding.
    cache = layers.make_cache();
    Numbers found = step(states, cache, {past, past}, chain, {5, 3}, {1, 1}, {0, 0});
    check(found, 0, 0, 5, ", drafts");
    check(found, 5, 0, 3, ", drafts beside padding");
    // Two drafts of the first row were accepted, none of the second.
    found = step(states, cache, {past + 3, past + 1}, {30, 41}, {2, 2}, {2, 2}, {2, 0});
    check(found, 0, 3, 2, ", after accepted drafts");
    expect(add_bits(kStart, states.state.data(), sizeof(float) * states.state.size() / 3) ==
               add_bits(kStart, alone.state.data(), sizeof(float) * alone.state.size() / 3),
           what + ", the state");
    // Of the last layer nothing is read but one token: the states are those of all.
    std::vector<int64_t> prompt = chain;
    for (int64_t t = 5; t < 23; ++t) prompt.push_back(t);
    States whole, cut;
    Numbers fresh = layers.make_cache();
    found = step(whole, fresh, {past}, prompt, {23}, {23}, {0});
    check(found, 0, 0, 5, ", in a prompt");
    std::vector<uint8_t> wanted(23);
    wanted[3] = 1;
    fresh = layers.make_cache();
    found = step(cut, fresh, {past}, prompt, {23}, {23}, {0}, wanted);
    check(found, 3, 3, 1, ", one token wanted");
    expect(cut.sum() == whole.sum(), what + ", the state where one token is wanted");
    return sum;
  }

  static void all_steps() {
    const int64_t heads[][3] = {{3, 3, 64}, {4, 2, 64}, {6, 1, 32}, {4, 2, 40}, {1, 1, 128}};
    uint64_t plain = kStart, integers = kStart;
    int64_t at = 0;
    for (const auto &head : heads)
      for (int64_t window : {0, 7}) {
        const int64_t N = head[0], K = head[1], H = head[2], is_gated = at % 2;
        const int64_t activation = is_gated ? at / 2 % 2 : at % 4 == 0 ? 1 : 3;
        const std::string what = name("run_layers") + ", " + std::to_string(N) + " heads, " +
                                 std::to_string(K) + " kv heads, size " + std::to_string(H) +
                                 ", window " + std::to_string(window);
        Layers layers{N, K, H, 48, window, activation, is_gated, 0, at % 3 == 0};
        plain ^= steps(layers, what);
        if (at % 3 == 1) {
          for (layers.bits = 4; layers.bits <= 8; layers.bits += 4)
            integers ^= steps(layers, what + ", integers");
        }
        ++at;
      }
    tell("run_layers", plain);
    tell("run_layers_integers", integers);
    tell("run_layers_normed", steps({4, 2, 40, 48, 7, 1, 1, 0, false, true},
                                    name("run_layers") + ", normed"));
    for (int64_t kind : {0, 1}) {
      const std::string label = kind == 0 ? "run_layers_convolved" : "run_layers_mamba2";
      const Layers hybrid{4, 2, 40, 48, 7, 0, 1, 0, kind == 0, false, kind};
      tell(label, state_steps(hybrid, name(label)));
    }
    tell("run_layers_erf", steps({4, 2, 40, 48, 0, 2, 0, 0, true}, name("run_layers") + ", erf"));
  }

  static void drafting() {
    const int64_t V = 96, D = 64, W = 3, L = 4, B = 2;
    const Numbers weight = make<T>(V * D, -4), bias = make<T>(V, -2), x = make<T>(6 * D, -2);
    const Numbers head = pack(weight, V, D);
    const auto rank = find<void(const E *, int64_t, int64_t, const E *, const E *, int64_t, int64_t,
                                int64_t *, float *, int64_t)>(name("specdec_rank_outputs"));
    std::vector<int64_t> tokens(6 * 5), alone(5);
    std::vector<float> scores(6 * 5), alone_scores(5);
    rank(x.data(), 6, D, head.data(), bias.data(), V, 5, tokens.data(), scores.data(), 0);
    for (int64_t m = 0; m < 6; ++m) {
      rank(x.data() + m * D, 1, D, head.data(), bias.data(), V, 5, alone.data(),
           alone_scores.data(), 0);
      expect(std::equal(alone.begin(), alone.end(), tokens.begin() + m * 5) &&
                 std::memcmp(alone_scores.data(), &scores[m * 5], 5 * sizeof(float)) == 0,
             name("rank_outputs"));
    }
    tell("rank_outputs", add_bits(kStart, tokens));
    tell("rank_scores", add_bits(kStart, scores));

    const auto square = [&] { return pack(make<T>(D * D, -6), D, D); };
    const Numbers embedding = make<T>(V * D, -2), hidden = make<T>(B * D, -2);
    const Numbers rnn_w = square(), rnn_u = square(), rnn_u_bias = make<T>(D, -3);
    const Numbers context = square(), recurrent = square(), input_bias = make<T>(D, -3);
    const Numbers block = square(), block_bias = make<T>(D, -3);
    const void *blocks[] = {block.data(), block_bias.data()};
    const void *matrices[] = {rnn_w.data(), rnn_u.data(), context.data(), recurrent.data(),
                              head.data()};
    const E *biases[] = {rnn_u_bias.data(), input_bias.data()};
    const int64_t last[] = {3, 70}, kNodes = 7;
    const auto search = find<int64_t(const E *, const E *, const int64_t *, const void *const *,
                                     const E *const *, const void *const *, int64_t, const int64_t *,
                                     const double *, double, int64_t *, double *, const int64_t *)>(
        name("specdec_search"));
    const auto call = [&](int64_t first, int64_t count, const double *temperatures, int64_t *found,
                          double *chances) {
      const int64_t sizes[] = {count, W, L, kNodes, V, D, D, 10, 0, 0};
      search(embedding.data(), hidden.data() + first * D, last + first, matrices, biases, blocks, 1,
             nullptr, temperatures, 0.0, found, chances, sizes);
    };
    const auto run_beams = [&](int64_t first, int64_t count) {
      std::vector<int64_t> beams(count * W * L);
      call(first, count, nullptr, beams.data(), nullptr);
      return beams;
    };
    const std::vector<int64_t> beams = run_beams(0, B);
    // Of each row the nodes' columns [3, kNodes], and how likely each is.
    std::vector<int64_t> nodes(3 * B * kNodes), own(3 * kNodes);
    std::vector<double> chances(B * kNodes), own_chances(kNodes);
    const double temperatures[] = {1.0, 0.5};
    call(0, B, temperatures, nodes.data(), chances.data());
    for (int64_t b = 0; b < B; ++b) {
      const std::vector<int64_t> one = run_beams(b, 1);
      expect(std::equal(one.begin(), one.end(), beams.begin() + b * W * L), name("search_beams"));
      call(b, 1, temperatures + b, own.data(), own_chances.data());
      for (int64_t column = 0; column < 3; ++column)
        expect(std::equal(own.begin() + column * kNodes, own.begin() + (column + 1) * kNodes,
                          nodes.begin() + (column * B + b) * kNodes),
               name("search_tree"));
      expect(std::equal(own_chances.begin(), own_chances.end(), chances.begin() + b * kNodes),
             name("search_tree"));
    }
    tell("search_beams", add_bits(kStart, beams));
    tell("search_tree", add_bits(kStart, nodes));
  }

  static void run() {
    state = 1;
    pointwise();
    all_products();
    all_attention();
    all_steps();
    drafting();
  }
};

}  // namespace

int main(int count, char **arguments) {
  if (count == 2) library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", count == 2 ? dlerror() : "usage: kernel_bits LIBRARY");
    return 2;
  }
  find<void(int64_t)>("specdec_set_num_threads")(2);  // so that work is divided
  Checks<Float16>::run();
  Checks<Bfloat16>::run();
  Checks<Float32>::run();
  return failures == 0 ? 0 : 1;
}
