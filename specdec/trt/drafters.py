"""Drafters as networks: what a build writes of them, and what stands for them where they run.

Legend: B rows, W beams, L tokens of a beam, C candidates of a beam, M states, D hidden, E the
drafter's width, V drafted vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.engine.draft_net import make_whole, name_decoder_tensors, rank_logits
from specdec.engine.eagle import EagleNet, take_net
from specdec.engine.integers import take_tensors
from specdec.engine.kv_cache import KVCache
from specdec.engine.redrafter import NUM_CANDIDATES
from specdec.engine.step import Step
from specdec.engine.transfers import to_device
from specdec.files.tensor_file import TensorFile
from specdec.files.torch_tensors import to_tensor
from specdec.methods.base import DrafterParams
from specdec.methods.eagle import EagleParams
from specdec.methods.medusa import MedusaParams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import EMBEDDING, OFFSETS
from specdec.trt.decoder import NetworkDecoder, run_rows
from specdec.trt.matrices import multiply
from specdec.trt.network import NetworkWriter, Sizes
from specdec.trt.runtime import EngineRunner
from specdec.trt.target import LayersWriter, write_head

DRAFTER, DRAFTER_HEAD = "drafter0.engine", "drafter_head0.engine"
DRAFTER_FEATURES, OFFSETS_FILE = "drafter_features0.engine", "drafter_tokens.safetensors"
KINDS = (ReDrafterParams, MedusaParams, EagleParams)


def list_networks(drafter: DrafterParams | None) -> list[str]:
    """Return the files of a drafter's networks."""
    if not isinstance(drafter, EagleParams):
        return [] if drafter is None else [DRAFTER]
    return [DRAFTER, DRAFTER_HEAD, *([DRAFTER_FEATURES] if drafter.eagle3 is not None else [])]


def write_drafter(
    name: str, writer: NetworkWriter, drafter: DrafterParams, model: ModelConfig,
    weights: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Write one of `list_networks`."""
    if isinstance(drafter, ReDrafterParams):
        _SearchWriter(writer, drafter, weights).write(model.hidden_size)
    elif isinstance(drafter, MedusaParams):
        _write_medusa(writer, drafter, model, weights)
    else:
        assert isinstance(drafter, EagleParams)
        eagle = _EagleWriter(writer, drafter, model, weights)
        networks = {DRAFTER: eagle.write_layers, DRAFTER_HEAD: eagle.write_head}
        networks.get(name, eagle.write_features)()


def _multiply(writer: NetworkWriter, weights: Mapping[str, Tensor], name: str, x: Any) -> Any:
    """Compute x W^T + b by the whole linear of this name."""
    return multiply(writer, x, weights, name)[0]


def _run_head(
    writer: NetworkWriter, weights: Mapping[str, Tensor], prefix: str, blocks: Sequence[str], x: Any
) -> Any:
    """Return the logits of a head: blocks of x + silu(x W^T + b), then its matrix."""
    for block in blocks:
        y = _multiply(writer, weights, f"{prefix}{block}.linear", x)
        x = writer.add(x, writer.activate("SILU", y))
    return _multiply(writer, weights, f"{prefix}lm_head", x)


def _write_medusa(
    writer: NetworkWriter, params: MedusaParams, model: ModelConfig, weights: Mapping[str, Tensor]
) -> None:
    """Write a network: `logits_i` [B, V] of each head from `states` [B, D]."""
    states = writer.add_input("states", writer.dtype, "B", model.hidden_size)
    blocks = [f"medusa_layers.{i}" for i in range(params.num_layers)]
    for head in range(params.num_heads):
        logits = _run_head(writer, weights, f"medusa_heads.{head}.", blocks, states)
        writer.mark_output(logits, f"logits_{head}")


class _SearchWriter:
    """ReDrafter's beam search, unrolled over the length of its beams: `ReDrafterHead`'s."""

    def __init__(
        self, writer: NetworkWriter, params: ReDrafterParams, weights: Mapping[str, Tensor]
    ) -> None:
        self._writer, self._params, self._weights = writer, params, weights
        self._embedding = writer.constant(weights[EMBEDDING])
        num_outputs = len(weights["drafter.lm_head.weight"])
        self._num_candidates = min(max(NUM_CANDIDATES, params.num_beams), num_outputs)

    def write(self, width: int) -> None:
        """Write a network: `drafts` [B, W, L] from `states` [B, D] and `tokens` [B] after them."""
        writer = self._writer
        states = writer.add_input("states", writer.dtype, "B", width)
        newest_tokens = writer.reshape(writer.add_input("tokens", torch.int64, "B"), (0, 1))
        context = writer.reshape(states, (0, 1, width))
        state = writer.constant(torch.zeros(1, 1, width, dtype=writer.dtype))
        scores = writer.number(0, 3, torch.float32)
        beams: list[Any] = []  # the tokens of each place, [B, W, 1]
        for _ in range(self._params.draft_len_per_beam):
            state = self._update(newest_tokens, state)
            zeros = writer.gather(
                context, writer.combine("SUB", newest_tokens, newest_tokens), 1, 1
            )
            scores, beam_tokens, source = self._choose(zeros, state, scores)
            newest_tokens = writer.reshape(beam_tokens, (0, 0))
            beams = [writer.gather(beam, source, 1, 1) for beam in beams] + [beam_tokens]
            state = writer.gather(state, source, 1, 1)
        writer.mark_output(writer.join(beams, 2), "drafts")

    def _update(self, tokens: Any, state: Any) -> Any:
        """Return the next recurrent state [B, W, D] after tokens [B, W]."""
        writer, weights = self._writer, self._weights
        embedded = writer.gather(self._embedding, tokens)
        if not self._params.is_rnn:
            return writer.add(embedded, state)
        mixed = _multiply(writer, weights, "drafter.rnn_w", embedded)
        recurrent_state = _multiply(writer, weights, "drafter.rnn_u", state)
        return writer.activate("SILU", writer.add(mixed, recurrent_state))

    def _choose(self, context: Any, state: Any, scores: Any) -> tuple[Any, Any, Any]:
        """Choose tokens; return scores and tokens [B, W, 1], and the beams [B, W] before them."""
        writer, params, count = self._writer, self._params, self._num_candidates
        x = writer.join([context, state], 2)
        if params.has_input_proj:
            x = _multiply(writer, self._weights, "drafter.input_proj", x)
        blocks = [f"layers.{i}" for i in range(params.num_layers)]
        logits = _run_head(writer, self._weights, "drafter.", blocks, x)
        values, tokens = writer.top(writer.cast(logits, torch.float32), count, 2)
        values = writer.combine("SUB", values, writer.reduce("MAX", values, 2))
        sums = writer.reduce("SUM", writer.unary("EXP", values), 2)
        totals = writer.add(writer.combine("SUB", values, writer.unary("LOG", sums)), scores)
        best_scores, flat = writer.top(writer.reshape(totals, (0, -1)), params.num_beams, 1)
        beam_tokens = writer.gather(writer.reshape(tokens, (0, -1)), flat, 1, 1)
        source = writer.combine("FLOOR_DIV", flat, writer.number(count, 2, torch.int32))
        return (
            writer.reshape(best_scores, (0, 0, 1)),
            writer.reshape(beam_tokens, (0, 0, 1)),
            source,
        )


class _EagleWriter:
    """EAGLE's layers, its head, and what makes features of the target's layers: `EagleNet`'s."""

    def __init__(
        self, writer: NetworkWriter, params: EagleParams, model: ModelConfig,
        weights: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._params, drafter_weights = take_net(params, weights)
        self._own = take_tensors(drafter_weights)
        self.net = self._params.make_net_model(make_whole(model))
        self._scale = 1.0 if params.eagle3 is not None else model.output_multiplier_scale
        self._writer = writer
        self._named = take_tensors(name_decoder_tensors(self._own, weights, self.net))

    def _norm(self, x: Any, name: str) -> Any:
        return self._writer.rms_norm(x, self._own[f"drafter.{name}"], self.net.norm_epsilon)

    def write_layers(self) -> None:
        """Write a network: `next_features` [B, T, E] of pairs of `features` and later tokens."""
        writer, third, width = self._writer, self._params.eagle3, self.net.hidden_size
        layers = LayersWriter(writer, self.net, self._named)
        features = writer.add_input("features", writer.dtype, "B", "T", width)
        embedded = writer.gather(writer.constant(self._named[EMBEDDING]), layers.tokens)
        if third is None:
            pairs = writer.join([embedded, features], 2)
            x = first_input = _multiply(writer, self._own, "drafter.fc", pairs)
        else:
            normed = self._norm(features, "layers.0.hidden_norm.weight")
            embedded = self._norm(embedded, "layers.0.input_layernorm.weight")
            first_input = writer.join([embedded, normed], 2)
            x = normed if third.norm_before_residual else features
        x, _ = layers.run(x, (), first_input)
        if third is not None and third.norm_output:
            x = self._norm(x, "ln_f.weight")
        writer.mark_output(x, "next_features")

    def write_head(self) -> None:
        """Write a network: `logits` [M, V] of what `write_layers` returns."""
        third = self._params.eagle3
        is_bare = third is not None and not third.norm_output
        prepare = (lambda x: self._norm(x, "ln_f.weight")) if is_bare else None
        write_head(self._writer, self.net, self._named, scale=self._scale, prepare=prepare)

    def write_features(self) -> None:
        """Write a network: `features` [M, E] of `states` [M, F], the read layers side by side."""
        writer, third = self._writer, self._params.eagle3
        assert third is not None
        width, norms = self._own["drafter.fc.weight"].shape[1], third.list_read_norms()
        x = writer.add_input("states", writer.dtype, "M", width)
        if norms:  # one of all, or one of each layer's part
            weight = torch.stack([self._own[f"drafter.{name}"] for name in norms])
            x = writer.reshape(x, (0, *weight.shape))
            x = writer.reshape(writer.rms_norm(x, weight, self.net.norm_epsilon), (0, width))
        writer.mark_output(_multiply(writer, self._own, "drafter.fc", x), "features")


@dataclasses.dataclass
class HeadNetwork:
    """Network in the place of a `ReDrafterHead` or of `MedusaHeads`.

    size: rows that it takes at once. vocab_size: of what is drafted.
    """

    params: DrafterParams
    runner: EngineRunner
    size: int
    vocab_size: int

    @property
    def runners(self) -> list[EngineRunner]:
        """Runners of the drafter's network."""
        return [self.runner]

    def search_beams(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Search beams as `ReDrafterHead.search_beams` does."""
        inputs = {"states": hidden, "tokens": tokens.long()}
        return run_rows(self.runner, inputs, self.size)["drafts"].long()

    def rank_tokens(self, hidden: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rank tokens as `MedusaHeads.rank_tokens` does."""
        outputs = run_rows(self.runner, {"states": hidden}, self.size)
        ranked = [
            rank_logits(outputs[f"logits_{head}"], width) for head, width in enumerate(widths)
        ]
        tokens, scores = (
            torch.cat(shard_values, dim=-1) for shard_values in zip(*ranked, strict=True)
        )
        return tokens, scores


class EagleNetworks(EagleNet):
    """An `EagleNet` that is networks."""

    def __init__(  # the base class's would make layers
        self, params: EagleParams, decoder: NetworkDecoder, runners: Sequence[EngineRunner],
        offsets: Tensor | None,
    ) -> None:  # fmt: skip
        """Take the drafter's decoder; runners: the one of EAGLE-3's features."""
        self.params, self.offsets = params, offsets
        self.decoder: NetworkDecoder = decoder
        self.mask_feature = None  # drafters with one are refused by the build
        self._feature_runners = list(runners)

    @property
    def runners(self) -> list[EngineRunner]:
        """Runners of the drafter's networks."""
        return [*self.decoder.runners, *self._feature_runners]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V]: the head's network scales and norms what it reads."""
        return self.decoder.compute_logits(hidden)

    def make_features(self, states: Tensor) -> Tensor:
        """Make features [M, E] from what is read of the target [M, F]."""
        for runner in self._feature_runners:
            inputs = {"states": states}
            states = run_rows(runner, inputs, self.decoder.sizes.states)["features"]
        return states

    def forward(self, step: Step, features: Tensor, cache: KVCache) -> Tensor:
        """Run pairs of a feature [B, T, E] and the next token; return the next features."""
        inputs = {"tokens": to_device(step.tokens, features.device), "features": features}
        return self.decoder.run_step(step, cache, inputs)["next_features"]


def open_drafter(
    folder: Path, drafter: DrafterParams, model: ModelConfig, device: torch.device, sizes: Sizes
) -> HeadNetwork | EagleNetworks:
    """Open the network of an engine folder's drafter."""
    runners = [EngineRunner(folder / name, device) for name in list_networks(drafter)]
    if not isinstance(drafter, EagleParams):
        return HeadNetwork(drafter, runners[0], sizes.rows, model.vocab_size)
    offsets = None
    if (folder / OFFSETS_FILE).exists():
        offsets = to_tensor(TensorFile(folder / OFFSETS_FILE).read(OFFSETS), "int64").to(device)
    decoder = NetworkDecoder(
        drafter.make_net_model(make_whole(model)), *runners[:2], sizes=sizes,
        num_positions=sizes.positions, device=device,
    )  # fmt: skip
    return EagleNetworks(drafter, decoder, runners[2:], offsets)
