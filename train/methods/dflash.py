"""DFlash: a block of mask tokens, filled in one pass (https://arxiv.org/abs/2602.06036).

At an anchor, token t+1 of a row, the drafter reads the block of that token and S-1 mask tokens, all
of which see one another, and in every layer keys and values that it makes of the target's inner
states at the tokens up to t: c = norm(F [h_a ; h_b ; ...]). From the normed state of the mask token
i places after the anchor the target's output layer computes the distribution of token t+1+i. All
the blocks of a row are computed side by side; none sees another.

    row        x0 x1 x2 x3 x4 x5 x6         block at t = 2    x3 m  m  m    sees c0 c1 c2
    context    c0 c1 c2 c3 c4 c5 c6         its labels           x4 x5 x6

With a Markov head (DSpark, https://github.com/deepseek-ai/DeepSpec) every place of a block drafts
the token after it, the anchor's too. The head adds a bias to each place's logits, computed from the
token before, which in training is the row's token.

The loss of place i has the weight decay^i. A step takes some anchors of every row, drawn at random
from those with a label after them; their losses are weighted up to the number of all anchors with
labels, so that the gradient is on average that of all.
Legend: B rows, T tokens, A anchors, S tokens of a block, D hidden, N labels, V vocabulary, K K/V
heads, G queries of a K/V head, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
from ..start_config import follow_layers
from ..target import FrozenTarget
from .base import (
    HeadInput,
    Labels,
    OutputLayer,
    Result,
    TrainableDrafter,
    TrainingMethod,
    choose_mask_token,
)
from .eagle import describe_layers
from .eagle_parts.nets import GatedMlp, Projections, RmsNorm, RotaryTables, make_linear

GOLDEN_RATIO = 0.6180339887  # multiples of it, without their whole parts, spread evenly


@dataclasses.dataclass(frozen=True)
class Anchors:
    """Blocks of a batch, by the last token [B, A] whose states each may see.

    is_real: [B, A], false where a row has fewer blocks. shares: [B, 1], places of a row for each of
    its blocks.
    """

    context_ends: Tensor
    is_real: Tensor
    shares: Tensor


@dataclasses.dataclass(frozen=True)
class Angles:
    """Cosines and sines of the context's positions [T, 1, H] and of the blocks' [B, A, S, 1, H]."""

    context: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]


class DFlashAttention(Projections):
    """Attention of blocks over the context before them and all of their own tokens."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, model.hidden_size)
        self.q_norm = RmsNorm(model.head_size, model.norm_epsilon)
        self.k_norm = RmsNorm(model.head_size, model.norm_epsilon)

    def _project(self, x: Tensor, angles: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return keys and values [..., K, H] of x [..., D]."""
        heads = (-1, self.head_size)
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, heads)), *angles)
        values: Tensor = self.v_proj(x).unflatten(-1, heads)
        return keys, values

    def forward(self, x: Tensor, context: Tensor, is_hidden: Tensor, angles: Angles) -> Tensor:
        """Attend: x [B, A, S, D], context [B, T, D] -> [B, A, S, D].

        is_hidden: [B, A, T], true where a block may not see the context.
        """
        keys, values = self._project(x, angles.blocks)  # [B, A, S, K, H]
        context_keys, context_values = self._project(context, angles.context)  # [B, T, K, H]
        num_heads, width = keys.shape[-2:]
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (-1, width)))
        queries = rotate(queries, *angles.blocks) * width**-0.5
        queries = queries.unflatten(-2, (num_heads, -1))
        context_scores = torch.einsum("basngh,btnh->bngast", queries, context_keys)
        context_scores = context_scores.float().masked_fill(
            is_hidden[:, None, None, :, None], -torch.inf
        )
        block_scores = torch.einsum("basngh,barnh->bngasr", queries, keys).float()
        weights = torch.cat((context_scores, block_scores), dim=-1).softmax(-1).to(values.dtype)
        num_context = context.shape[1]
        mixed_values = torch.einsum(
            "bngast,btnh->basngh", weights[..., :num_context], context_values
        )
        mixed_values = mixed_values + torch.einsum(
            "bngasr,barnh->basngh", weights[..., num_context:], values
        )
        result: Tensor = self.o_proj(mixed_values.flatten(3))
        return result


class DFlashLayer(torch.nn.Module):
    """Qwen3 decoder layer whose attention sees the context too."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.self_attn = DFlashAttention(model)
        self.post_attention_layernorm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = GatedMlp(model)

    def forward(self, x: Tensor, context: Tensor, is_hidden: Tensor, angles: Angles) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, is_hidden, angles)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class MarkovHead(torch.nn.Module):
    """Bias of the logits by the token before: its row times a matrix, which begins as zero."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = torch.nn.Embedding(vocab_size, rank)
        self.markov_w2 = OutputLayer(rank, vocab_size)
        torch.nn.init.normal_(self.markov_w1.weight, std=0.02)
        torch.nn.init.zeros_(self.markov_w2.weight)


class DFlash(TrainableDrafter):
    """DFlash drafter and its loss, with the parameter names of z-lab's and DeepSpec's drafters."""

    output_layers = ("markov_head.markov_w2.weight",)
    mask_row: Tensor

    def __init__(
        self, settings: TrainSettings, model: ModelConfig, *, num_auxiliary: int, mask_row: Tensor,
        mask_token_id: int = 0, embedding_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Make fresh layers.

        mask_row: [D], the mask token's row of the target's embedding. embedding_scale: factor of
        that embedding's rows.
        """
        self.options = as_options(settings, DFlashTrain)
        # Number of tokens of a block.
        self.first_drafting_token = 0 if self.options.dflash_markov_rank else 1
        super().__init__(
            settings, num_positions=self.options.dflash_block_size - self.first_drafting_token,
            loss_decay=self.options.dflash_loss_decay, vocab_size=model.vocab_size,
        )  # fmt: skip
        self.model = model
        self.mask_token_id, self.embedding_scale = mask_token_id, embedding_scale
        self.fc = make_linear(num_auxiliary * model.hidden_size, model.hidden_size)
        self.hidden_norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        self.layers = torch.nn.ModuleList(
            DFlashLayer(model) for _ in range(model.num_hidden_layers)
        )
        self.norm = RmsNorm(model.hidden_size, model.norm_epsilon)
        if rank := self.options.dflash_markov_rank:
            self.markov_head = MarkovHead(model.vocab_size, rank)
        self.register_buffer("mask_row", mask_row.detach().clone(), persistent=False)
        self._rotary = RotaryTables(model)

    def choose_anchors(self, mask: Tensor) -> Anchors:
        """Draw the blocks of a step at random; those of an evaluation are fixed and evenly spread.

        mask: [B, T], true for tokens that are labels.
        """
        num_places = max(0, mask.shape[1] - 2)
        next_labels = torch.nn.functional.pad(mask, (0, self.num_positions))[:, 2:]
        has_label = next_labels.unfold(1, self.num_positions, 1).any(-1)[:, :num_places]
        if self.training:
            priorities = self.draw_uniform(has_label.shape, mask.device)
        else:
            priorities = (torch.arange(num_places, device=mask.device) * GOLDEN_RATIO % 1).expand(
                has_label.shape
            )
        num_anchors = min(self.options.dflash_num_anchors, num_places)
        scores, context_ends = priorities.masked_fill(~has_label, -1).topk(num_anchors, dim=1)
        is_real = scores >= 0
        num_real = is_real.sum(1, keepdim=True).clamp(min=1)
        return Anchors(context_ends, is_real, has_label.sum(1, keepdim=True) / num_real)

    def fill_blocks(self, features: Features, anchors: Anchors) -> Tensor:
        """Return the states of the blocks' tokens for the target's output layer, [B, A, S, D]."""
        assert features.auxiliary is not None
        context = self.hidden_norm(self.fc(features.auxiliary))
        num_tokens, context_ends = features.tokens.shape[1], anchors.context_ends
        row_indices = torch.arange(len(context_ends), device=context_ends.device)[:, None]
        anchor_embeddings = features.embedded[row_indices, context_ends + 1]  # [B, A, D]
        size = self.options.dflash_block_size
        mask_embeddings = self.mask_row.to(anchor_embeddings.dtype).expand(
            *anchor_embeddings.shape[:2], size - 1, -1
        )
        x = (
            torch.cat((anchor_embeddings[:, :, None], mask_embeddings), dim=2)
            * self.embedding_scale
        )
        x = x.to(context.dtype)
        is_hidden = torch.arange(num_tokens, device=context_ends.device) > context_ends[:, :, None]
        tables = self._rotary.get_tables(num_tokens + size, context_ends.device)
        block_positions = (
            context_ends[:, :, None] + 1 + torch.arange(size, device=context_ends.device)
        )
        angles = Angles(
            tuple(table[:num_tokens, None] for table in tables),
            tuple(table[block_positions].unsqueeze(3) for table in tables),
        )
        for layer in self.layers:
            x = layer(x, context, is_hidden, angles)
        result: Tensor = self.norm(x)
        return result

    def iterate_guesses(
        self, features: Features, mask: Tensor, num_labels: Tensor
    ) -> Iterator[tuple[Tensor, Labels]]:
        assert features.head is not None
        anchors = self.choose_anchors(mask)
        guesses = self.fill_blocks(features, anchors)
        row_indices = torch.arange(len(mask), device=mask.device)[:, None]
        for position in range(self.num_positions):
            label_positions = anchors.context_ends + 2 + position
            is_inside = label_positions < mask.shape[1]
            label_positions = label_positions.clamp(max=mask.shape[1] - 1)
            label_mask = anchors.is_real & is_inside & mask[row_indices, label_positions]  # [B, A]
            head_input = features.head.join_input(
                guesses[:, :, self.first_drafting_token + position][label_mask]
            )
            if self.options.dflash_markov_rank:
                previous_embeddings = self.markov_head.markov_w1(
                    features.tokens[row_indices, label_positions - 1][label_mask]
                )
                head_input = torch.cat(
                    (head_input, previous_embeddings.to(head_input.dtype)), dim=1
                )
            weights = (self.weigh_labels(position, num_labels) * anchors.shares).float()
            yield (
                head_input,
                Labels(
                    mask=label_mask,
                    tokens=features.tokens[row_indices, label_positions][label_mask],
                    weights=weights.expand_as(label_mask)[label_mask],
                    hidden=features.hidden[row_indices, label_positions - 1][label_mask],
                ),
            )

    def use_head(
        self, features: Features, position: int, x: Tensor, use: Callable[[HeadInput], Result]
    ) -> Result:
        assert features.head is not None
        head_weight = features.head.joint_weight
        if not self.options.dflash_markov_rank:
            return use(HeadInput(x, head_weight))
        result: Result = self.markov_head.markov_w2(
            x, lambda x, weight: use(HeadInput(x, head_weight, weight))
        )
        return result


def build_dflash(settings: TrainSettings, target: FrozenTarget) -> DFlash:
    """Make a drafter of the target's sizes; heads and rotary embedding are --start-from's."""
    options, table = as_options(settings, DFlashTrain), target.table
    requested_token = options.dflash_mask_token_id
    mask_token_id = choose_mask_token(
        "--dflash-mask-token-id", requested_token, target.config, table
    )
    size = options.dflash_intermediate_size
    model = describe_layers(target, options.dflash_num_layers, size)
    return DFlash(
        settings,
        follow_layers(settings.start_from, model, has_given_size=size is not None),
        num_auxiliary=len(target.aux_layers),
        mask_row=table[mask_token_id],
        mask_token_id=mask_token_id,
        embedding_scale=target.shape.embedding_scale,
    )


def choose_layers(settings: TrainSettings, config: Any) -> tuple[int, ...]:
    """Choose target layers that a drafter reads, evenly spread; the first only in short models.

    The last layer is never one: transformers returns its output only after the final norm.
    """
    num_layers = as_options(settings, DFlashTrain).dflash_num_target_layers
    last_layer = int(config.num_hidden_layers) - 2
    if last_layer < 0:
        raise SpecDecError(
            "the target has one layer, and DFlash reads layers before the last",
            "train a drafter of another --method",
        )
    first_layer = 1 if last_layer >= num_layers else 0
    if num_layers == 1:
        return ((first_layer + last_layer + 1) // 2,)
    return tuple(
        sorted(
            {
                round(first_layer + (last_layer - first_layer) * i / (num_layers - 1))
                for i in range(num_layers)
            }
        )
    )


def describe_dflash(drafter: DFlash, target: FrozenTarget) -> Mapping[str, Any]:
    """Return the config.json of z-lab's drafters, or with a Markov head of DeepSpec's."""
    model, options = drafter.model, drafter.options
    drafter_keys: dict[str, Any] = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(target.aux_layers),
    }
    if drafter.embedding_scale != 1:
        drafter_keys["input_embedding_scale"] = drafter.embedding_scale
    layout: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": drafter_keys}
    if options.dflash_markov_rank:
        layout = {
            "architectures": ["Qwen3DSparkModel"],
            **drafter_keys,
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


def list_accepted_copies(target: FrozenTarget) -> Mapping[str, Tensor]:
    """Return the target's embedding and output layer, which DeepSpec's drafters repeat."""
    assert target.head is not None
    return {"embed_tokens.weight": target.table, "lm_head.weight": target.head.weight}


METHOD = TrainingMethod(
    build=build_dflash,
    describe=describe_dflash,
    convert_folder="--dflash-model-dir",
    choose_layers=choose_layers,
    optional_prefixes=("markov_head.",),
    list_accepted_copies=list_accepted_copies,
    needs_head=True,
)
