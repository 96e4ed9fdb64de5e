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
              distribution; no loss of features. EAGLE-3.1 norms what F reads, as a whole or by
              layers, and may feed the normed state on
    P-EAGLE   EAGLE-3 whose steps after the first read a mask token's embedding, and instead of s
              what F makes of one that is learned: one pass drafts them all

Legend: B rows, T tokens, D hidden, N labels, V vocabulary, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, smooth_l1_loss

from specdec.engine.layers import attend, rms_norm
from specdec.engine.rotary import RotaryTable, rotate
from specdec.methods.eagle import EAGLE3_FIXED, Eagle3Params, EagleTrain
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, read_rotary
from specdec.model.rotary_scaling import get_kind
from specdec.options import as_options

from ..features import Features, OutputHead
from ..settings import TrainSettings
from ..target import Target
from .base import Drafter, Labels, TrainingMethod, choose_mask_token

# Rotary scalings by which a position's angles depend only on the position.
STEADY_SCALINGS = ("linear", "llama3", "yarn")

History = list[tuple[Tensor, Tensor]]  # keys and values [B, K, T_i, H] of the steps so far


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm, the engine's own."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


def make_linear(num_inputs: int, num_outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(num_inputs, num_outputs, bias=False)


class Projections(torch.nn.Module):
    """The matrices of an attention that reads [..., width]."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        self.head_size = model.head_size
        num_queries = model.num_attention_heads * model.head_size
        num_keys = model.num_key_value_heads * model.head_size
        self.q_proj = make_linear(width, num_queries)
        self.k_proj = make_linear(width, num_keys)
        self.v_proj = make_linear(width, num_keys)
        self.o_proj = make_linear(num_queries, model.hidden_size)


class Attention(Projections):
    """Self-attention of a Llama layer over the steps of a draft."""

    def forward(self, x: Tensor, history: History, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T_i, width] of the newest step, which joins `history`; cos, sin [T_i, 1, H]."""
        shape = (*x.shape[:2], -1, self.head_size)
        queries = rotate(self.q_proj(x).view(shape), cos, sin)
        keys = rotate(self.k_proj(x).view(shape), cos, sin)
        values = self.v_proj(x).view(shape).to(queries.dtype)
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
    """[1, 1, T_i, sum of sizes]: a place of the newest step sees the first step up to itself.

    It sees only its own place in the later steps. sizes: places of each step, the newest last.
    """
    num_places = sizes[-1]
    first = torch.ones(num_places, sizes[0], dtype=torch.bool, device=device).tril()
    later = [torch.eye(num_places, n, dtype=torch.bool, device=device) for n in sizes[1:]]
    return torch.cat((first, *later), dim=1)[None, None]


class GatedMlp(torch.nn.Module):
    """A Llama layer's MLP."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = make_linear(model.hidden_size, model.intermediate_size)
        self.up_proj = make_linear(model.hidden_size, model.intermediate_size)
        self.down_proj = make_linear(model.intermediate_size, model.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(torch.nn.Module):
    """A Llama decoder layer; the first one enters as its version of EAGLE has it."""

    def __init__(self, model: ModelConfig, *, is_first: bool, is_third: bool) -> None:
        super().__init__()
        hidden_size, epsilon = model.hidden_size, model.norm_epsilon
        self.joins = is_first and is_third  # embedding and state inside of the layer
        self.has_input_norm = not is_first or is_third
        if self.has_input_norm:
            self.input_layernorm = RmsNorm(hidden_size, epsilon)
        if self.joins:
            self.hidden_norm = RmsNorm(hidden_size, epsilon)
        self.self_attn = Attention(model, 2 * hidden_size if self.joins else hidden_size)
        self.post_attention_layernorm = RmsNorm(hidden_size, epsilon)
        self.mlp = GatedMlp(model)

    def forward(
        self, x: Tensor, embedded: Tensor, history: History, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """x, embedded [B, T_i, D]; only EAGLE-3's first layer reads the embedding."""
        entered = x
        if self.joins:
            entered = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), dim=-1)
        elif self.has_input_norm:
            entered = self.input_layernorm(x)
        x = x + self.self_attn(entered, history, cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class RotaryTables:
    """Cosines and sines for a drafter's positions, made longer where they do not suffice."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._table: RotaryTable | None = None

    def find(self, needed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those of at least `needed` positions, both [positions, H]."""
        if self._table is None or self._table.num_positions < needed:
            size = max(512, 1 << (needed - 1).bit_length())
            self._table = RotaryTable(self.model, size, torch.float32, device)
        return self._table.cos.to(device), self._table.sin.to(device)


class PairDrafter(Drafter):
    """Layers that read pairs of an embedding and a state, and then their own states instead."""

    def begin(self, features: Features) -> Tensor:
        """What the first step reads along with the embeddings, [B, T, D]."""
        return features.hidden

    def begin_history(self) -> Any:
        """What the layers keep of the steps so far."""
        raise NotImplementedError

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What enters the layers, [B, T_i, D]."""
        raise NotImplementedError

    def run_layers(self, x: Tensor, embedded: Tensor, history: Any, step: int) -> Tensor:
        """The layers' output of a step, whose places have positions from `step` on."""
        raise NotImplementedError

    def leave(self, state: Tensor) -> Tensor:
        """What comes of the layers' output: a step's guess, and the next one's state."""
        return state

    def go_on(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What a step after the first reads, of the text's embeddings and the state before it."""
        return embedded, state

    def draft(self, features: Features) -> list[Tensor]:
        """Run all steps from every place: guesses [B, T-2-i, D]."""
        state, history = self.begin(features), self.begin_history()
        guesses = []
        for step in range(self.num_positions):
            num_places = max(0, features.tokens.shape[1] - 2 - step)
            state = state[:, :num_places]
            if num_places:
                embedded = features.embedded[:, 1 + step : 1 + step + num_places].to(state.dtype)
                if step:
                    embedded, state = self.go_on(embedded, state)
                x = self.join(embedded, state)
                state = self.leave(self.run_layers(x, embedded, history, step))
            guesses.append(state)
        return guesses


class Eagle(PairDrafter):
    """The drafter and its loss; parameter names are those of SafeAILab's drafters."""

    def __init__(self, settings: TrainSettings, model: ModelConfig) -> None:
        self.options = as_options(settings, EagleTrain)
        super().__init__(
            settings, num_positions=self.options.eagle_num_steps,
            loss_decay=self.options.eagle_loss_decay, vocab_size=model.vocab_size,
        )  # fmt: skip
        self.model = model
        self._rotary = RotaryTables(model)

    def _add_layers(self, *, is_third: bool) -> None:
        self.layers = torch.nn.ModuleList(
            Layer(self.model, is_first=index == 0, is_third=is_third)
            for index in range(self.model.num_hidden_layers)
        )

    def begin_history(self) -> list[History]:
        return [[] for _ in self.layers]

    def run_layers(self, x: Tensor, embedded: Tensor, history: list[History], step: int) -> Tensor:
        end = step + x.shape[1]
        cos, sin = (part[step:end, None] for part in self._rotary.find(end, x.device))
        for layer, own in zip(self.layers, history, strict=True):
            x = layer(x, embedded, own, cos, sin)
        return x


class Eagle1(Eagle):
    """EAGLE-1, whose weights EAGLE-2 shares: guesses are features of the target."""

    def __init__(
        self, settings: TrainSettings, model: ModelConfig, *, embedding_scale: float = 1.0
    ) -> None:
        super().__init__(settings, model)
        self.fc = torch.nn.Linear(
            2 * model.hidden_size, model.hidden_size, bias=self.options.eagle_bias
        )
        # The embeddings that it reads are smaller than the features by so much.
        self.fc.weight.data[:, : model.hidden_size] *= embedding_scale
        self._add_layers(is_third=False)

    def begin(self, features: Features) -> Tensor:
        """The target's features, in training with noise, so that errors are not fed on."""
        noise = self.options.eagle_noise if self.training else 0.0
        if not noise:
            return features.hidden
        return features.hidden + noise * (torch.rand_like(features.hidden) - 0.5)

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        joined: Tensor = self.fc(torch.cat((embedded, state), dim=-1))
        return joined

    def judge(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        token_weight = self.options.eagle_token_weight
        tokens = dataclasses.replace(labels, weights=labels.weights * token_weight)
        loss, losses, ranks = super().judge(features, position, x, tokens, measure=measure)
        missed = smooth_l1_loss(x.float(), labels.hidden.float(), reduction="none").mean(-1)
        loss = loss + (missed * labels.weights).sum()
        return loss, token_weight * losses + missed.detach(), ranks


class Eagle3(Eagle):
    """EAGLE-3: inner states of the target, and an output layer of the drafter's own."""

    def __init__(
        self, settings: TrainSettings, model: ModelConfig, head: OutputHead, params: Eagle3Params,
        kept: Tensor | None = None, mask_row: Tensor | None = None,
    ) -> None:  # fmt: skip
        """kept: the tokens that it drafts, rising; None: all. mask_row: [D], P-EAGLE's mask token's
        row of the target's embedding."""
        super().__init__(settings, model)
        self.params = params
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if kept is None else kept - torch.arange(len(kept)))
        num_auxiliary = len(params.aux_layers)
        if params.norm_before_fc:
            self.input_norm = RmsNorm(num_auxiliary * model.hidden_size, model.norm_epsilon)
        if params.fc_norm:
            norms = (RmsNorm(model.hidden_size, model.norm_epsilon) for _ in params.aux_layers)
            self.fc_norm = torch.nn.ModuleList(norms)
        self.fc = make_linear(num_auxiliary * model.hidden_size, model.hidden_size)
        self._add_layers(is_third=True)
        self.norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.lm_head = make_linear(model.hidden_size, params.draft_vocab_size)
        weight = head.weight if kept is None else head.weight[kept.to(head.weight.device)]
        self.lm_head.weight.data = weight.detach().float() * head.scale
        self.mask_row: Tensor | None
        self.register_buffer("mask_row", mask_row, persistent=False)
        if mask_row is not None:
            self.mask_hidden = torch.nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def begin(self, features: Features) -> Tensor:
        """The inner states, brought to the drafter's width."""
        assert features.auxiliary is not None
        return self._narrow(features.auxiliary)

    def go_on(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """P-EAGLE's mask instead of both."""
        if self.mask_row is None:
            return embedded, state
        begun = self._narrow(self.mask_hidden.to(state.dtype))
        return self.mask_row.to(embedded.dtype).expand_as(embedded), begun.expand_as(state)

    def _narrow(self, read: Tensor) -> Tensor:
        if self.params.norm_before_fc:
            read = self.input_norm(read)
        if self.params.fc_norm:
            parts = read.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            read = torch.cat(normed, dim=-1)
        begun: Tensor = self.fc(read)
        return begun

    def leave(self, state: Tensor) -> Tensor:
        """The state, normed where the next step reads it so."""
        normed: Tensor = self.norm(state) if self.params.norm_output else state
        return normed

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Only the state; the embedding joins it inside of the first layer."""
        return state

    def judge(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.d2t is not None:
            # The target's choice among these is learned; the text's tokens do not count.
            kept = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
            assert features.head is not None
            features = dataclasses.replace(features, head=features.head.take(kept))
            labels = dataclasses.replace(labels, tokens=torch.zeros_like(labels.tokens))
        x = x if self.params.norm_output else self.norm(x)
        return self.compare(features, x, self.lm_head.weight, labels, measure=measure)


def build_eagle(settings: TrainSettings, target: Target) -> Eagle:
    """Make a drafter of the target's sizes; EAGLE-3's output layer begins as the target's."""
    assert target.head is not None
    options = as_options(settings, EagleTrain)
    model = describe_layers(target, options.eagle_num_layers, options.eagle_intermediate_size)
    if options.eagle_version == "1":
        return Eagle1(settings, model, embedding_scale=target.shape.embedding_scale)
    kept = choose_vocabulary(options.eagle_draft_vocab_size, target)
    mask_token_id, mask_row = None, None
    if options.eagle_parallel:
        given = options.eagle_mask_token_id
        mask_token_id = choose_mask_token(
            "--eagle-mask-token-id", given, target.config, target.table
        )
        mask_row = target.table[mask_token_id].detach().clone()
    params = Eagle3Params(
        aux_layers=target.aux_layers,
        draft_vocab_size=model.vocab_size if kept is None else len(kept),
        norm_before_residual=False,
        mask_token_id=mask_token_id,
        **{name: getattr(options, f"eagle_{name}") for name in Eagle3Params.NEWER},
    )
    return Eagle3(settings, model, target.head, params, kept, mask_row)


def choose_vocabulary(size: int | None, target: Target) -> Tensor | None:
    """The most frequent tokens of the data, rising; None for all."""
    if size is None or size >= target.shape.vocab_size:
        return None
    assert target.token_counts is not None
    counts = torch.from_numpy(target.token_counts)
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def describe_layers(
    target: Target, num_layers: int, intermediate_size: int | None = None
) -> ModelConfig:
    """Describe the drafter's layers: a Llama's, of the target's sizes and rotary embedding.

    intermediate_size: the MLP's, where it is not the target's.
    """
    config, hidden_size = target.config, target.shape.hidden_size
    num_heads = int(config.num_attention_heads)
    sizes = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    rotary = read_rotary(ConfigReader(config.to_dict(), Path(target.name)))
    is_steady = get_kind(rotary.scaling or {}) in STEADY_SCALINGS
    return ModelConfig(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=target.shape.vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_size=int(getattr(config, "head_dim", None) or hidden_size // num_heads),
        intermediate_size=intermediate_size or next(filter(None, sizes), 4 * hidden_size),
        norm_epsilon=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.max_position_embeddings),
        rotary_base=rotary.base or 10000.0,
        rotary_scaling=rotary.scaling if is_steady else None,
    )


def choose_layers(settings: TrainSettings, config: Any) -> tuple[int, ...]:
    """Choose the target's layers whose outputs are read: EAGLE-3's usual ones, or an even spread.

    The last layer is left out: its output is not to be had without the final norm.
    """
    options = as_options(settings, EagleTrain)
    if options.eagle_version != "3":
        return ()
    num_layers = int(config.num_hidden_layers)
    usual = {1, num_layers // 2 - 1, num_layers - 4}
    if len(usual) < 3 or min(usual) < 0:
        usual = {0, (num_layers - 1) // 2, max(0, num_layers - 2)}
    return tuple(sorted(usual))


def describe_eagle(drafter: Eagle, target: Target) -> Mapping[str, Any]:
    """Return the config.json of SafeAILab's EAGLE-1, or of EAGLE-3 as ModelOpt exports it."""
    model = drafter.model
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **model.describe_sizes(),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if isinstance(drafter, Eagle1):
        return config | {"bias": drafter.options.eagle_bias}
    assert isinstance(drafter, Eagle3)
    if drafter.params.mask_token_id is not None:
        config |= {
            "parallel_drafting": True,
            # vLLM's, which counts the layers that are entered by what is read.
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in target.aux_layers],
            "mask_token_id": drafter.params.mask_token_id,
            "pard_token": drafter.params.mask_token_id,
        }
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": drafter.params.draft_vocab_size,
        **{name: getattr(drafter.params, name) for name in Eagle3Params.NEWER},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
            **EAGLE3_FIXED,
            "parallel_draft_heads_num_layers": 1,
        },
    }


def list_shared(target: Target) -> Mapping[str, Tensor]:
    """The target's embedding, which SafeAILab's EAGLE-1 repeats and EAGLE-3 does not."""
    return {} if target.aux_layers else {"embed_tokens.weight": target.table}


def list_convert_flags(settings: TrainSettings) -> list[str]:
    """A pass drafts as many tokens as it was trained for, which config.json has no name for."""
    options = as_options(settings, EagleTrain)
    return ["--num-eagle-layers", str(options.eagle_num_steps)] if options.eagle_parallel else []


METHOD = TrainingMethod(
    build=build_eagle,
    describe=describe_eagle,
    convert_folder="--eagle-model-dir",
    convert_flags=list_convert_flags,
    choose_layers=choose_layers,
    list_shared=list_shared,
    new_parts=("mask_hidden",),  # P-EAGLE may start from an EAGLE-3
    needs_head=True,
)
