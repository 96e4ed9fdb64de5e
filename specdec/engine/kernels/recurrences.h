// Layers with a state in the one call that runs all layers, see layers.h.

#pragma once

#include "mamba2.h"
#include "short_conv.h"

namespace {

// A layer's weights besides its products, of the kinds that short_conv.h and mamba2.h compute; absent
// ones are null. index: which of the layers with a state it is. width, out_width: numbers of a token
// that its first product yields and that its last one reads. A record as those of layers.h.
enum RecurrenceKind : int64_t { kShortConv, kMamba2 };

struct RecurrenceRecord {
  const float *weights, *conv_bias, *rate, *bias, *skip;
  const void *norm;
  double epsilon;
  int64_t kind, index, width, out_width;
};

// A step's runs, and the states of all layers side by side, each as HeadStates and ShortConv have them:
// of R cache rows, of which each has C channels of the convolution. Short convolutions have no `heads`
// but for taps and P.
struct StatesRecord {
  const Run *runs;
  float *state;
  void *window;
  float *keys, *deltas, *decays;
  void *inputs;
  int64_t num_runs, R, C;
  DeltaSizes heads;
};

// Mixes a token's product with those of the tokens before it, into out [num_tokens, r.out_width]: zeros
// for tokens that belong to no run. The layer's states are written.
template <typename E>
void run_recurrence(const E *product, int64_t num_tokens, const RecurrenceRecord &r,
                    const StatesRecord &s, E *out) {
  const DeltaSizes &z = s.heads;
  int64_t num_used = 0;
  for (int64_t n = 0; n < s.num_runs; ++n) num_used += s.runs[n].count;
  if (num_used < num_tokens)
    std::memset(static_cast<void *>(out), 0, sizeof(E) * num_tokens * r.out_width);
  const int64_t first = r.index * s.R, first_record = first * z.P;
  E *window = static_cast<E *>(s.window) + first * (z.taps - 1) * s.C;
  E *inputs = static_cast<E *>(s.inputs) + first_record * s.C;
  if (r.kind == kShortConv) {
    ShortConv<E> net = {product, out,       s.runs,      s.num_runs,         window,
                        inputs,  r.weights, r.conv_bias, {s.C, z.taps, z.P}};
    return net.run();
  }
  Mamba2<E> net = {{product, s.runs, s.num_runs, s.state + first * z.V * z.I * z.J, window,
                    s.keys + first_record * z.K * z.I, s.deltas + first_record * z.V * z.J,
                    s.decays + first_record * z.V, inputs, r.weights, r.rate, r.bias, z, r.width},
                   out, r.conv_bias, r.skip, static_cast<const E *>(r.norm),
                   static_cast<float>(r.epsilon), true};
  net.run();
}

}  // namespace
