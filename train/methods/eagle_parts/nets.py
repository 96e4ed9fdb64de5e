"""EAGLE: decoder layers that continue the target's features (https://arxiv.org/abs/2401.15077).

With f_t the target's last hidden state and e the target's embedding, the drafter reads at place t
the pair of e(x_{t+1}) and f_t, and gives g_t, its guess of f_{t+1}, from which the target's own
output layer makes the distribution of token t+2. Further on it reads its own guesses instead of
features it does not have yet: draft step i at place t reads e(x_{t+1+i}) and step i-1's g_t, and
attends to the true pairs up to place t and to its own steps before, as in a draft of the engine
("training-time test", https://arxiv.org/abs/2503.01840). With one step this is EAGLE-1's recipe.

    EAGLE-1   x = F [e ; s] + b, then layers, the first without its input norm; loss of a step:
              token_weight x (divergence from the target's distribution) + smooth L1 to f_{t+1+i}
    EAGLE-3   s_0 = F [h_a ; h_b ; h_c], outputs of three of the target's layers; the layer attends
              over [norm(e) ; norm(s)] and adds to s; its own norm and output layer give the
              distribution; no loss of features. EAGLE-3.1 norms the input of F, as a whole or by
              layers, and its next step may read the normed state
    P-EAGLE   EAGLE-3 whose steps after the first read a mask token's embedding, and instead of s
              F applied to a learned vector: one pass drafts all steps

Legend: B rows, T tokens, D hidden, N labels, V vocabulary, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, smooth_l1_loss

from specdec.engine.layers import attend, rms_norm
from specdec.engine.rotary import RotaryTable, rotate
from specdec.methods.eagle import Eagle3Params, EagleTrain
from specdec.model.config import ModelConfig
from specdec.options import as_options

from ...features import Features, OutputHead
from ...settings import TrainSettings
from ..base import (
    HeadInput,
    Labels,
    OutputLayer,
    Result,
    TrainableDrafter,
)

LEAST_SIZE = 1e-6  # of the largest input channel's size; a smaller channel is scaled as if so large

History = list[tuple[Tensor, Tensor]]  # keys and values [B, K, T_i, H] of the steps so far


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm, by the engine's function."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class ScaledLinear(torch.nn.Linear):
    """Linear layer whose weights are trained on inputs of even sizes.

    An optimizer's steps are about equally large for all weights, so that those of an input channel
    a thousand times as large as the others would outweigh all. input_scale: [num_inputs], powers of
    two, by which inputs are multiplied; written weights have it in them.
    """

    input_scale: Tensor

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = False) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.register_buffer("input_scale", torch.ones(num_inputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.input_scale.to(x.dtype))

    def even_inputs(self, sizes: Tensor) -> None:
        """Scale inputs of these sizes to about 1, and the weights so that outputs stay.

        sizes: [num_inputs], such as root mean squares. Channels far smaller than the largest are
        scaled less, since they are hardly more than rounding.
        """
        sizes = sizes.clamp(min=LEAST_SIZE * (float(sizes.max()) or 1.0))
        scale = torch.exp2(-sizes.log2().round())
        with torch.no_grad():
            self.weight.mul_(self.input_scale / scale)
        self.input_scale.copy_(scale)


def make_linear(num_inputs: int, num_outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(num_inputs, num_outputs, bias=False)


class Projections(torch.nn.Module):
    """Matrices of an attention that reads [..., width]."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        self.head_size = model.head_size
        num_queries = model.num_attention_heads * model.head_size
        num_keys = model.num_key_value_heads * model.head_size
        self.q_proj = make_linear(width, num_queries)
        self.k_proj = make_linear(width, num_keys)
        self.v_proj = make_linear(width, num_keys)
        self.o_proj = make_linear(num_queries, model.hidden_size)


class EagleAttention(Projections):
    """Self-attention of a Llama layer over the steps of a draft."""

    def forward(self, x: Tensor, history: History, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend: x [B, T_i, width] of the newest step -> [B, T_i, D]; add its keys to `history`.

        cos, sin: [T_i, 1, H].
        """
        heads = (-1, self.head_size)
        queries = rotate(self.q_proj(x).unflatten(-1, heads), cos, sin)
        keys = rotate(self.k_proj(x).unflatten(-1, heads), cos, sin)
        values = self.v_proj(x).unflatten(-1, heads).to(queries.dtype)
        history.append((keys.transpose(1, 2), values.transpose(1, 2)))
        attended = attend(
            queries,
            torch.cat([k for k, _ in history], dim=2),
            torch.cat([v for _, v in history], dim=2),
            make_mask([k.shape[2] for k, _ in history], x.device).expand(len(x), 1, -1, -1),
        )
        result: Tensor = self.o_proj(attended.to(x.dtype))
        return result


def make_mask(sizes: list[int], device: torch.device) -> Tensor:
    """Return the mask [1, 1, T_i, sum of sizes] of the newest step, true where a place is seen.

    A place sees the first step up to itself, and of the later steps only itself. sizes: number of
    places of each step, the newest step last.
    """
    num_places = sizes[-1]
    first_step_mask = torch.ones(num_places, sizes[0], dtype=torch.bool, device=device).tril()
    later_step_masks = [
        torch.eye(num_places, n, dtype=torch.bool, device=device) for n in sizes[1:]
    ]
    return torch.cat((first_step_mask, *later_step_masks), dim=1)[None, None]


class GatedMlp(torch.nn.Module):
    """MLP of a Llama layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = make_linear(model.hidden_size, model.intermediate_size)
        self.up_proj = make_linear(model.hidden_size, model.intermediate_size)
        self.down_proj = make_linear(model.intermediate_size, model.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class EagleLayer(torch.nn.Module):
    """Llama decoder layer; the first layer's input differs between EAGLE-1 and EAGLE-3."""

    def __init__(self, model: ModelConfig, *, is_first: bool, is_eagle3: bool) -> None:
        super().__init__()
        hidden_size, epsilon = model.hidden_size, model.norm_epsilon
        self.joins_embedding = is_first and is_eagle3  # joins state and embedding in the layer
        self.has_input_norm = not is_first or is_eagle3
        if self.has_input_norm:
            self.input_layernorm = RmsNorm(hidden_size, epsilon)
        if self.joins_embedding:
            self.hidden_norm = RmsNorm(hidden_size, epsilon)
        self.self_attn = EagleAttention(
            model, 2 * hidden_size if self.joins_embedding else hidden_size
        )
        self.post_attention_layernorm = RmsNorm(hidden_size, epsilon)
        self.mlp = GatedMlp(model)

    def forward(
        self, x: Tensor, embedded: Tensor, history: History, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Run the layer: x, embedded [B, T_i, D] -> [B, T_i, D].

        Only EAGLE-3's first layer reads the embedding.
        """
        attention_input = x
        if self.joins_embedding:
            attention_input = torch.cat(
                (self.input_layernorm(embedded), self.hidden_norm(x)), dim=-1
            )
        elif self.has_input_norm:
            attention_input = self.input_layernorm(x)
        x = x + self.self_attn(attention_input, history, cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class RotaryTables:
    """Cosines and sines of a drafter's positions, computed anew where more are needed."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._table: RotaryTable | None = None

    def get_tables(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of at least `num_positions` positions, both [positions, H]."""
        if self._table is None or self._table.num_positions < num_positions:
            size = max(512, 1 << (num_positions - 1).bit_length())
            self._table = RotaryTable(self.model, size, torch.float32, device)
        return self._table.cos.to(device), self._table.sin.to(device)


class TrainablePairDrafter(TrainableDrafter):
    """Drafter whose layers read pairs of an embedding and a state: the target's, then guesses."""

    def make_first_state(self, features: Features) -> Tensor:
        """Return the states that the first step reads with the embeddings, [B, T, D]."""
        return features.hidden

    def make_history(self) -> Any:
        """Make the empty key/value history of the layers."""
        raise NotImplementedError

    def join_pair(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Join embeddings and states to the layers' input, [B, T_i, D]."""
        raise NotImplementedError

    def run_layers(self, x: Tensor, embedded: Tensor, history: Any, step: int) -> Tensor:
        """Return the layers' output of a step, whose places have positions from `step` on."""
        raise NotImplementedError

    def finish_state(self, state: Tensor) -> Tensor:
        """Turn the layers' output into a step's guess, which is the next step's state."""
        return state

    def choose_next_pair(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings and states that a step after the first reads."""
        return embedded, state

    def draft_states(self, features: Features) -> list[Tensor]:
        """Run all steps from every place: guesses [B, T-2-i, D]."""
        state, history = self.make_first_state(features), self.make_history()
        guesses = []
        for step in range(self.num_positions):
            num_places = max(0, features.tokens.shape[1] - 2 - step)
            state = state[:, :num_places]
            # Layers run for no places, too: other processes wait for this one to gather them.
            embedded = features.embedded[:, 1 + step : 1 + step + num_places].to(state.dtype)
            if step:
                embedded, state = self.choose_next_pair(embedded, state)
            x = self.join_pair(embedded, state)
            state = self.finish_state(self.run_layers(x, embedded, history, step))
            guesses.append(state)
        return guesses


class Eagle(TrainablePairDrafter):
    """EAGLE drafter and its loss, with the parameter names of SafeAILab's drafters."""

    fc: ScaledLinear
    layers: Any  # ModuleList of `EagleLayer`

    def __init__(self, settings: TrainSettings, model: ModelConfig) -> None:
        self.options = as_options(settings, EagleTrain)
        super().__init__(
            settings, num_positions=self.options.eagle_num_steps,
            loss_decay=self.options.eagle_loss_decay, vocab_size=model.vocab_size,
        )  # fmt: skip
        self.model = model
        self._rotary = RotaryTables(model)

    def _add_layers(self, *, is_eagle3: bool) -> None:
        self.layers = torch.nn.ModuleList(
            EagleLayer(self.model, is_first=index == 0, is_eagle3=is_eagle3)
            for index in range(self.model.num_hidden_layers)
        )

    def finish_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        scale = weights["fc.input_scale"]
        finished = {name: tensor for name, tensor in weights.items() if name != "fc.input_scale"}
        return finished | {"fc.weight": weights["fc.weight"] * scale}

    def make_history(self) -> list[History]:
        return [[] for _ in self.layers]

    def run_layers(self, x: Tensor, embedded: Tensor, history: list[History], step: int) -> Tensor:
        end = step + x.shape[1]
        cos, sin = (table[step:end, None] for table in self._rotary.get_tables(end, x.device))
        for layer, layer_history in zip(self.layers, history, strict=True):
            x = layer(x, embedded, layer_history, cos, sin)
        return x


class Eagle1(Eagle):
    """EAGLE-1, whose weights EAGLE-2 shares: guesses are features of the target."""

    def __init__(
        self, settings: TrainSettings, model: ModelConfig, *, embedding_scale: float = 1.0
    ) -> None:
        super().__init__(settings, model)
        self.fc = ScaledLinear(
            2 * model.hidden_size, model.hidden_size, bias=self.options.eagle_bias
        )
        # Factor by which the features are larger than the table's rows.
        self.fc.weight.data[:, : model.hidden_size] *= embedding_scale
        self._add_layers(is_eagle3=False)

    def make_first_state(self, features: Features) -> Tensor:
        """Return the target's features; noise in training prepares for the drafter's errors."""
        noise = self.options.eagle_noise if self.training else 0.0
        if not noise:
            return features.hidden
        hidden = features.hidden
        numbers = self.draw_uniform(hidden.shape, hidden.device).to(hidden.dtype)
        return hidden + noise * (numbers - 0.5)

    def join_pair(self, embedded: Tensor, state: Tensor) -> Tensor:
        layer_input: Tensor = self.fc(torch.cat((embedded, state), dim=-1))
        return layer_input

    def compute_position_loss(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        token_weight = self.options.eagle_token_weight
        tokens = dataclasses.replace(labels, weights=labels.weights * token_weight)
        loss, losses, ranks = super().compute_position_loss(
            features, position, x, tokens, measure=measure
        )
        feature_losses = smooth_l1_loss(x.float(), labels.hidden.float(), reduction="none").mean(-1)
        loss = loss + (feature_losses * labels.weights).sum()
        return loss, token_weight * losses + feature_losses.detach(), ranks


class Eagle3(Eagle):
    """EAGLE-3: inner states of the target, and an output layer of the drafter's own."""

    output_layers = ("lm_head.weight",)

    def __init__(
        self, settings: TrainSettings, model: ModelConfig, head: OutputHead, params: Eagle3Params,
        draft_tokens: Tensor | None = None, mask_row: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Make fresh layers; the output layer begins as the target's.

        draft_tokens: tokens that can be drafted, rising; None: all. mask_row: [D], the row of
        P-EAGLE's mask token in the target's embedding.
        """
        super().__init__(settings, model)
        self.params = params
        self.d2t: Tensor | None
        self.register_buffer(
            "d2t", None if draft_tokens is None else draft_tokens - torch.arange(len(draft_tokens))
        )
        num_auxiliary = len(params.aux_layers)
        if params.norm_before_fc:
            self.input_norm = RmsNorm(num_auxiliary * model.hidden_size, model.norm_epsilon)
        if params.fc_norm:
            norms = (RmsNorm(model.hidden_size, model.norm_epsilon) for _ in params.aux_layers)
            self.fc_norm = torch.nn.ModuleList(norms)
        self.fc = ScaledLinear(num_auxiliary * model.hidden_size, model.hidden_size)
        self._add_layers(is_eagle3=True)
        self.norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.lm_head = OutputLayer(model.hidden_size, params.draft_vocab_size)
        weight = head.weight
        if draft_tokens is not None:
            weight = weight[draft_tokens.to(weight.device)]
        self.lm_head.weight.data = weight.detach().float() * head.scale
        self.mask_row: Tensor | None
        self.register_buffer("mask_row", mask_row, persistent=False)
        if mask_row is not None:
            self.mask_hidden = torch.nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def make_first_state(self, features: Features) -> Tensor:
        """Return the target's inner states, projected to the drafter's width."""
        assert features.auxiliary is not None
        return self._project_states(features.auxiliary)

    def choose_next_pair(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Replace embeddings and states by P-EAGLE's mask."""
        if self.mask_row is None:
            return embedded, state
        mask_state = self._project_states(self.mask_hidden.to(state.dtype))
        return self.mask_row.to(embedded.dtype).expand_as(embedded), mask_state.expand_as(state)

    def norm_states(self, states: Tensor) -> Tensor:
        """Norm the target's inner states [..., A D] as this drafter reads them."""
        if self.params.norm_before_fc:
            states = self.input_norm(states)
        if self.params.fc_norm:
            layer_states = states.chunk(len(self.fc_norm), dim=-1)
            normed = [
                norm(layer_state)
                for norm, layer_state in zip(self.fc_norm, layer_states, strict=True)
            ]
            states = torch.cat(normed, dim=-1)
        return states

    def _project_states(self, states: Tensor) -> Tensor:
        drafter_states: Tensor = self.fc(self.norm_states(states))
        return drafter_states

    def finish_state(self, state: Tensor) -> Tensor:
        """Norm the state where the next step reads it normed."""
        normed: Tensor = self.norm(state) if self.params.norm_output else state
        return normed

    def join_pair(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the state alone, as the embedding joins it inside of the first layer."""
        return state

    def use_head(
        self, features: Features, position: int, x: Tensor, use: Callable[[HeadInput], Result]
    ) -> Result:
        x = x if self.params.norm_output else self.norm(x)
        draft_tokens = None
        if self.d2t is not None:
            draft_tokens = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        result: Result = self.lm_head(
            x, lambda x, weight: use(HeadInput(x, weight, draft_tokens=draft_tokens))
        )
        return result
