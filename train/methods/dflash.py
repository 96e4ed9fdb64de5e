"""DFlash: a block of mask tokens, filled in one pass (https://arxiv.org/abs/2602.06036).

At an anchor, token t+1 of a row, the drafter reads the block of that token and S-1 mask tokens, all
of which see one another, and in every layer keys and values that it makes of the target's inner
states at the tokens up to t: c = norm(F [h_a ; h_b ; ...]). What comes of the mask token i places
behind the anchor, normed, goes to the target's own output layer, which makes of it the distribution
of token t+1+i. All the blocks of a row are computed side by side; none sees another.

    row        x0 x1 x2 x3 x4 x5 x6         block at t = 2    x3 m  m  m    sees c0 c1 c2
    context    c0 c1 c2 c3 c4 c5 c6         its labels           x4 x5 x6

With a Markov head (DSpark, https://github.com/deepseek-ai/DeepSpec) every place of a block drafts
the token after it, the anchor's too. The head adds to each place's logits what it makes of the
token before, which in training is the row's own token.

The loss of place i has the weight decay^i. A step takes some anchors of every row, drawn at random
from those with a label behind them; their losses count for as many as all of these are, so that the
gradient is on average that of all.
Legend: B rows, T tokens, A anchors, S tokens of a block, D hidden, N labels, V vocabulary, K K/V
heads, G queries of a K/V head, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.engine.rotary import rotate
from specdec.errors import SpecDecError
from specdec.methods.dflash import DFlashTrain
from specdec.model.config import ModelConfig
from specdec.options import as_options

from ..features import Features
from ..settings import TrainSettings
from ..target import Target
from .base import Drafter, Labels, TrainingMethod, choose_mask_token
from .eagle import GatedMlp, Projections, RmsNorm, RotaryTables, describe_layers, make_linear

GOLDEN = 0.6180339887  # multiples of it, without their whole parts, spread evenly


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The blocks of a batch: places [B, A], the last token that each may see the states of.

    is_real: [B, A], false where a row has fewer. shares: [B, 1], how many places each stands for.
    """

    places: Tensor
    is_real: Tensor
    shares: Tensor


@dataclasses.dataclass(frozen=True)
class Angles:
    """Cosines and sines of the context's positions [T, 1, H] and of the blocks' [B, A, S, 1, H]."""

    context: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]


class Attention(Projections):
    """Attention of blocks over the context before them and all of themselves."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, model.hidden_size)
        self.q_norm = RmsNorm(model.head_size, model.norm_epsilon)
        self.k_norm = RmsNorm(model.head_size, model.norm_epsilon)

    def _project(self, x: Tensor, angles: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, H] of x [..., D]."""
        shape = (*x.shape[:-1], -1, self.head_size)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), *angles)
        values: Tensor = self.v_proj(x).view(shape)
        return keys, values

    def forward(self, x: Tensor, context: Tensor, hidden: Tensor, angles: Angles) -> Tensor:
        """x [B, A, S, D]; context [B, T, D]; hidden [B, A, T], true where a block sees nothing."""
        keys, values = self._project(x, angles.blocks)  # [B, A, S, K, H]
        early_keys, early_values = self._project(context, angles.context)  # [B, T, K, H]
        num_rows, num_anchors, size, num_heads, width = keys.shape
        queries = self.q_norm(self.q_proj(x).view(num_rows, num_anchors, size, -1, width))
        queries = rotate(queries, *angles.blocks) * width**-0.5
        queries = queries.view(num_rows, num_anchors, size, num_heads, -1, width)
        early = torch.einsum("basngh,btnh->bngast", queries, early_keys)
        early = early.float().masked_fill(hidden[:, None, None, :, None], -torch.inf)
        own = torch.einsum("basngh,barnh->bngasr", queries, keys).float()
        weights = torch.cat((early, own), dim=-1).softmax(-1).to(values.dtype)
        num_early = context.shape[1]
        out = torch.einsum("bngast,btnh->basngh", weights[..., :num_early], early_values)
        out = out + torch.einsum("bngasr,barnh->basngh", weights[..., num_early:], values)
        result: Tensor = self.o_proj(out.reshape(num_rows, num_anchors, size, -1))
        return result


class Layer(torch.nn.Module):
    """A Qwen3 decoder layer whose attention sees the context too."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = GatedMlp(model)

    def forward(self, x: Tensor, context: Tensor, hidden: Tensor, angles: Angles) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, hidden, angles)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class MarkovHead(torch.nn.Module):
    """What the token before makes likely: a row for it, by a matrix; nothing to begin with."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = torch.nn.Embedding(vocab_size, rank)
        self.markov_w2 = make_linear(rank, vocab_size)
        torch.nn.init.normal_(self.markov_w1.weight, std=0.02)
        torch.nn.init.zeros_(self.markov_w2.weight)


class DFlash(Drafter):
    """The drafter and its loss; parameter names are those of z-lab's and DeepSpec's drafters."""

    mask_row: Tensor

    def __init__(
        self, settings: TrainSettings, model: ModelConfig, *, num_auxiliary: int, mask_row: Tensor,
        mask_token_id: int = 0, embedding_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """mask_row: [D], the mask token's row of the target's embedding.

        embedding_scale: what the rows of that embedding are multiplied by.
        """
        self.options = as_options(settings, DFlashTrain)
        # The first place of a block that drafts.
        self.first_place = 0 if self.options.dflash_markov_rank else 1
        super().__init__(
            settings, num_positions=self.options.dflash_block_size - self.first_place,
            loss_decay=self.options.dflash_loss_decay, vocab_size=model.vocab_size,
        )  # fmt: skip
        self.model = model
        self.mask_token_id, self.embedding_scale = mask_token_id, embedding_scale
        self.fc = make_linear(num_auxiliary * model.hidden_size, model.hidden_size)
        self.hidden_norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.layers = torch.nn.ModuleList(Layer(model) for _ in range(model.num_hidden_layers))
        self.norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        if rank := self.options.dflash_markov_rank:
            self.markov_head = MarkovHead(model.vocab_size, rank)
        self.register_buffer("mask_row", mask_row.detach().clone(), persistent=False)
        self._rotary = RotaryTables(model)

    def choose_anchors(self, mask: Tensor) -> Anchors:
        """Draw the blocks of a step; in an evaluation always the same, evenly spread.

        mask [B, T]: which tokens are labels.
        """
        num_places = max(0, mask.shape[1] - 2)
        later = torch.nn.functional.pad(mask, (0, self.num_positions))[:, 2:]
        labels = later.unfold(1, self.num_positions, 1).any(-1)[:, :num_places]
        if self.training:
            drawn = torch.rand(labels.shape, device=mask.device)
        else:
            drawn = (torch.arange(num_places, device=mask.device) * GOLDEN % 1).expand(labels.shape)
        most = min(self.options.dflash_num_anchors, num_places)
        scores, places = drawn.masked_fill(~labels, -1).topk(most, dim=1)
        is_real = scores >= 0
        num_real = is_real.sum(1, keepdim=True).clamp(min=1)
        return Anchors(places, is_real, labels.sum(1, keepdim=True) / num_real)

    def fill_blocks(self, features: Features, anchors: Anchors) -> Tensor:
        """What the target's output layer is to read of every token of the blocks, [B, A, S, D]."""
        assert features.auxiliary is not None
        context = self.hidden_norm(self.fc(features.auxiliary))
        num_tokens, places = features.tokens.shape[1], anchors.places
        lines = torch.arange(len(places), device=places.device)[:, None]
        first = features.embedded[lines, places + 1]  # [B, A, D]
        size = self.options.dflash_block_size
        masks = self.mask_row.to(first.dtype).expand(*first.shape[:2], size - 1, -1)
        x = torch.cat((first[:, :, None], masks), dim=2) * self.embedding_scale
        x = x.to(context.dtype)
        hidden = torch.arange(num_tokens, device=places.device) > places[:, :, None]
        tables = self._rotary.find(num_tokens + size, places.device)
        positions = places[:, :, None] + 1 + torch.arange(size, device=places.device)
        angles = Angles(
            tuple(table[:num_tokens, None] for table in tables),
            tuple(table[positions].unsqueeze(3) for table in tables),
        )
        for layer in self.layers:
            x = layer(x, context, hidden, angles)
        result: Tensor = self.norm(x)
        return result

    def guess(
        self, features: Features, mask: Tensor, num_labels: Tensor
    ) -> Iterator[tuple[Tensor, Labels]]:
        assert features.head is not None
        anchors = self.choose_anchors(mask)
        guesses = self.fill_blocks(features, anchors)
        lines = torch.arange(len(mask), device=mask.device)[:, None]
        for position in range(self.num_positions):
            at = anchors.places + 2 + position
            is_inside = at < mask.shape[1]
            at = at.clamp(max=mask.shape[1] - 1)
            chosen = anchors.is_real & is_inside & mask[lines, at]  # [B, A]
            read = features.head.join_input(guesses[:, :, self.first_place + position][chosen])
            if self.options.dflash_markov_rank:
                before = self.markov_head.markov_w1(features.tokens[lines, at - 1][chosen])
                read = torch.cat((read, before.to(read.dtype)), dim=1)
            weights = (self.weigh(position, num_labels) * anchors.shares).float()
            yield (
                read,
                Labels(
                    mask=chosen,
                    tokens=features.tokens[lines, at][chosen],
                    weights=weights.expand_as(chosen)[chosen],
                    hidden=features.hidden[lines, at - 1][chosen],
                ),
            )

    def judge(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert features.head is not None
        more = self.markov_head.markov_w2.weight if self.options.dflash_markov_rank else None
        weight = features.head.joint_weight
        return self.compare(features, x, weight, labels, measure=measure, more=more)


def build_dflash(settings: TrainSettings, target: Target) -> DFlash:
    """Make a drafter of the target's sizes."""
    options, table = as_options(settings, DFlashTrain), target.table
    given = options.dflash_mask_token_id
    mask_token_id = choose_mask_token("--dflash-mask-token-id", given, target.config, table)
    return DFlash(
        settings,
        describe_layers(target, options.dflash_num_layers, options.dflash_intermediate_size),
        num_auxiliary=len(target.aux_layers),
        mask_row=table[mask_token_id],
        mask_token_id=mask_token_id,
        embedding_scale=target.shape.embedding_scale,
    )


def choose_layers(settings: TrainSettings, config: Any) -> tuple[int, ...]:
    """Spread the layers that are read over the target, without its first where there are enough.

    The last layer is left out: its output is not to be had without the final norm.
    """
    wanted = as_options(settings, DFlashTrain).dflash_num_target_layers
    last = int(config.num_hidden_layers) - 2
    if last < 0:
        raise SpecDecError(
            "the target has one layer, and DFlash reads layers before the last",
            "train a drafter of another --method",
        )
    first = 1 if last >= wanted else 0
    if wanted == 1:
        return ((first + last + 1) // 2,)
    return tuple(sorted({round(first + (last - first) * i / (wanted - 1)) for i in range(wanted)}))


def describe_dflash(drafter: DFlash, target: Target) -> Mapping[str, Any]:
    """Return the config.json of z-lab's drafters, or with a Markov head of DeepSpec's."""
    model, options = drafter.model, drafter.options
    own: dict[str, Any] = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(target.aux_layers),
    }
    if drafter.embedding_scale != 1:
        own["input_embedding_scale"] = drafter.embedding_scale
    layout: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    if options.dflash_markov_rank:
        layout = {
            "architectures": ["Qwen3DSparkModel"],
            **own,
            "num_anchors": options.dflash_num_anchors,
            "markov_rank": options.dflash_markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
        }
    return {
        **layout,
        "model_type": "qwen3",
        **model.describe_sizes(),
        "attention_bias": False,
        "layer_types": ["full_attention"] * model.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "num_target_layers": int(target.config.num_hidden_layers),
        "block_size": options.dflash_block_size,
    }


METHOD = TrainingMethod(
    build=build_dflash,
    describe=describe_dflash,
    convert_folder="--dflash-model-dir",
    choose_layers=choose_layers,
    new_parts=("markov_head.",),
    needs_head=True,
)
