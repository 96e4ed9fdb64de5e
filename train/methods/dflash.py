"""DFlash: a block of mask tokens, filled in one pass (https://arxiv.org/abs/2602.06036).

At an anchor, token t+1 of a row, the drafter reads the block of that token and S-1 mask tokens, all
of which see one another, and in every layer keys and values that it makes of the target's inner
states at the tokens up to t: c = norm(F [h_a ; h_b ; ...]). What comes of the mask token i places
behind the anchor, normed, goes to the target's own output layer, which makes of it the distribution
of token t+1+i. All the blocks of a row are computed side by side; none sees another.

    row        x0 x1 x2 x3 x4 x5 x6         block at t = 2    x3 m  m  m    sees c0 c1 c2
    context    c0 c1 c2 c3 c4 c5 c6         its labels           x4 x5 x6

With a Markov head (DSpark, https://github.com/deepseek-ai/DeepSpec) every place of a block drafts
the token after it, the anchor's too, and what a head of its own reads of the token before is added
to its logits: in training that is the row's own token.

The loss of place i has the weight decay^i. A step takes some anchors of every row, drawn at random
from those with a label behind them; their losses count for as many as all of these are, so that the
gradient is on average that of all.
Legend: B rows, T tokens, A anchors, S tokens of a block, D hidden, N labels, V vocabulary, K K/V
heads, G queries of a K/V head, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.engine.rotary import RotaryTable, rotate
from specdec.errors import SpecDecError
from specdec.methods.dflash import DFlashTrain
from specdec.model.config import ModelConfig
from specdec.options import as_options

from ..features import Features
from ..loss import compute_loss, measure_positions
from ..settings import TrainSettings
from ..target import Target
from .base import Drafter, TrainingMethod, choose_mask_token, make_teacher
from .eagle import GatedMlp, RmsNorm, describe_layers, make_linear

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

    context: tuple[Tensor, Tensor]
    blocks: tuple[Tensor, Tensor]


class Attention(torch.nn.Module):
    """Attention of blocks over the context before them and all of themselves."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_size = model.head_size
        hidden, num_keys = model.hidden_size, model.num_key_value_heads * model.head_size
        num_queries = model.num_attention_heads * model.head_size
        self.q_proj = make_linear(hidden, num_queries)
        self.k_proj = make_linear(hidden, num_keys)
        self.v_proj = make_linear(hidden, num_keys)
        self.o_proj = make_linear(num_queries, hidden)
        self.q_norm = RmsNorm(model.head_size, model.norm_epsilon)
        self.k_norm = RmsNorm(model.head_size, model.norm_epsilon)

    def _project(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a drafter is beside its layers, and how it is trained.

    embedding_scale: what the rows of the target's embedding are multiplied by. markov_rank: of a
    Markov head, 0 for none.
    """

    block_size: int
    mask_token_id: int
    embedding_scale: float
    num_anchors: int
    max_k: int
    loss_decay: float
    self_distillation: float
    markov_rank: int = 0


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
        self, model: ModelConfig, recipe: Recipe, *, num_auxiliary: int, mask_row: Tensor
    ) -> None:
        """mask_row: [D], the mask token's row of the target's embedding."""
        super().__init__()
        self.model, self.recipe = model, recipe
        self.first_place = 0 if recipe.markov_rank else 1  # of a block that drafts
        self.num_positions = recipe.block_size - self.first_place
        self.max_k = min(recipe.max_k, model.vocab_size)
        self.fc = make_linear(num_auxiliary * model.hidden_size, model.hidden_size)
        self.hidden_norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.layers = torch.nn.ModuleList(Layer(model) for _ in range(model.num_hidden_layers))
        self.norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        if rank := recipe.markov_rank:
            self.markov_head = MarkovHead(model.vocab_size, rank)
        self.register_buffer("mask_row", mask_row.detach().clone(), persistent=False)
        self._table: RotaryTable | None = None

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
        most = min(self.recipe.num_anchors, num_places)
        scores, places = drawn.masked_fill(~labels, -1).topk(most, dim=1)
        is_real = scores >= 0
        num_real = is_real.sum(1, keepdim=True).clamp(min=1)
        return Anchors(places, is_real, labels.sum(1, keepdim=True) / num_real)

    def _find_angles(self, anchors: Anchors, num_tokens: int) -> Angles:
        size, device = self.recipe.block_size, anchors.places.device
        needed = num_tokens + size
        if self._table is None or self._table.num_positions < needed:
            room = max(512, 1 << (needed - 1).bit_length())
            self._table = RotaryTable(self.model, room, torch.float32, device)
        positions = anchors.places[:, :, None] + 1 + torch.arange(size, device=device)
        tables = self._table.cos.to(device), self._table.sin.to(device)
        return Angles(
            (tables[0][:num_tokens, None], tables[1][:num_tokens, None]),
            (tables[0][positions].unsqueeze(3), tables[1][positions].unsqueeze(3)),
        )

    def fill_blocks(self, features: Features, anchors: Anchors) -> Tensor:
        """What the target's output layer is to read of every token of the blocks, [B, A, S, D]."""
        assert features.auxiliary is not None
        context = self.hidden_norm(self.fc(features.auxiliary))
        num_tokens, places = features.tokens.shape[1], anchors.places
        lines = torch.arange(len(places), device=places.device)[:, None]
        first = features.embedded[lines, places + 1]  # [B, A, D]
        num_masks = self.recipe.block_size - 1
        masks = self.mask_row.to(first.dtype).expand(*first.shape[:2], num_masks, -1)
        x = torch.cat((first[:, :, None], masks), dim=2) * self.recipe.embedding_scale
        x = x.to(context.dtype)
        hidden = torch.arange(num_tokens, device=places.device) > places[:, :, None]
        angles = self._find_angles(anchors, num_tokens)
        for layer in self.layers:
            x = layer(x, context, hidden, angles)
        result: Tensor = self.norm(x)
        return result

    def forward(
        self, features: Features, mask: Tensor, num_labels: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor]:
        assert features.head is not None
        anchors = self.choose_anchors(mask)
        guesses = self.fill_blocks(features, anchors)
        total = features.hidden.new_zeros((), dtype=torch.float32)
        losses, ranks, masks = [], [], []
        lines = torch.arange(len(mask), device=mask.device)[:, None]
        for position in range(self.num_positions):
            at = anchors.places + 2 + position
            is_inside = at < mask.shape[1]
            at = at.clamp(max=mask.shape[1] - 1)
            chosen = anchors.is_real & is_inside & mask[lines, at]  # [B, A]
            weight = self.recipe.loss_decay**position / num_labels[position].clamp(min=1)
            read = features.head.join_input(guesses[:, :, self.first_place + position][chosen])
            if self.recipe.markov_rank:
                before = self.markov_head.markov_w1(features.tokens[lines, at - 1][chosen])
                read = torch.cat((read, before.to(read.dtype)), dim=1)
            loss, own_losses, own_ranks = compute_loss(
                read,
                features.head.joint_weight,
                features.tokens[lines, at][chosen],
                (weight * anchors.shares).float().expand_as(chosen)[chosen],
                measure=measure,
                teacher=make_teacher(
                    features, features.hidden[lines, at - 1][chosen], self.recipe.self_distillation
                ),
                more=self.markov_head.markov_w2.weight if self.recipe.markov_rank else None,
            )
            total = total + loss
            losses.append(own_losses)
            ranks.append(own_ranks)
            masks.append(chosen)
        measures = measure_positions(torch.cat(losses), torch.cat(ranks), masks, self.max_k)
        return total, measures.pack()


def build_dflash(settings: TrainSettings, target: Target) -> DFlash:
    """Make a drafter of the target's sizes."""
    assert settings.self_distillation is not None
    options = as_options(settings, DFlashTrain)
    table = target.embedding.weight
    assert isinstance(table, Tensor)
    given = options.dflash_mask_token_id
    mask_token_id = choose_mask_token("--dflash-mask-token-id", given, target.config, table)
    recipe = Recipe(
        block_size=options.dflash_block_size,
        mask_token_id=mask_token_id,
        embedding_scale=target.shape.embedding_scale,
        num_anchors=options.dflash_num_anchors,
        max_k=settings.report_top_k,
        loss_decay=options.dflash_loss_decay,
        self_distillation=settings.self_distillation,
        markov_rank=options.dflash_markov_rank,
    )
    return DFlash(
        describe_layers(target, options.dflash_num_layers, options.dflash_intermediate_size),
        recipe,
        num_auxiliary=len(target.aux_layers),
        mask_row=table[mask_token_id],
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
    model, recipe = drafter.model, drafter.recipe
    own: dict[str, Any] = {
        "mask_token_id": recipe.mask_token_id,
        "target_layer_ids": list(target.aux_layers),
    }
    if recipe.embedding_scale != 1:
        own["input_embedding_scale"] = recipe.embedding_scale
    layout: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    if recipe.markov_rank:
        layout = {
            "architectures": ["Qwen3DSparkModel"],
            **own,
            "num_anchors": recipe.num_anchors,
            "markov_rank": recipe.markov_rank,
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
        "block_size": recipe.block_size,
    }


METHOD = TrainingMethod(
    build=build_dflash,
    describe=describe_dflash,
    convert_folder="--dflash-model-dir",
    choose_layers=choose_layers,
    new_parts=("markov_head.",),
    needs_head=True,
)
