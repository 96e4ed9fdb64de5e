"""The ReDrafter drafter: a recurrent head over the target's last hidden state, beam searched.

Recurrent Drafter, https://arxiv.org/abs/2403.09919. Legend: B rows, W beams, L draft tokens a
beam, D hidden, E exit dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.engine.draft_net import rank_logits, take_drafter_tensors, take_offsets
from specdec.engine.integers import (
    IntegerMatrix,
    lay_out,
    make_linear,
    take_matrix,
    take_tensor,
)
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.native import NativeKernels
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.engine.native_models import DynamicTrees, PackedDrafter
from specdec.engine.ranking import find_top
from specdec.engine.transfers import Array
from specdec.methods.redrafter import ReDrafterParams

# Candidates of a beam are its most probable tokens; the published search keeps 50.
NUM_CANDIDATES = 50


class ReDrafterHead:
    """Drafter network and its searches. `weights` are a checkpoint's `drafter.*` tensors.

    With kernels a whole search is one native call, of beams or of a dynamic tree.
    """

    def __init__(
        self,
        params: ReDrafterParams,
        weights: Mapping[str, Weight],
        embedding: Tensor | KernelMatrix,
        *,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
    ) -> None:
        self.params = params
        self.embedding = embedding
        # The sum that a shortened vocabulary adds to the number of a head's output, [V].
        self.offsets = take_offsets(take_drafter_tensors(weights, "drafter."), embedding.shape[0])
        num_outputs = embedding.shape[0] if self.offsets is None else len(self.offsets)
        self.num_candidates = min(max(NUM_CANDIDATES, params.num_beams), num_outputs)
        self.kernels = kernels
        if isinstance(embedding, Tensor):
            prepack = prepack and can_prepack(embedding.dtype, embedding.device)

        def linear(name: str) -> Linear:
            return make_linear(weights, f"drafter.{name}", prepack=prepack, kernels=kernels)

        blocks = [f"layers.{i}.linear" for i in range(params.num_layers)]
        names = [*blocks, "lm_head", *(["rnn_w", "rnn_u"] if params.is_rnn else [])]
        linears = {name: linear(name) for name in names}
        self.packed: PackedDrafter | None = None
        if params.has_input_proj:
            if kernels is None:
                linears["input_proj"] = linear("input_proj")
            else:
                joint = take_matrix(weights, "drafter.input_proj")
                assert isinstance(joint, Tensor | IntegerMatrix)
                # Parts for the target's state, and for the recurrent state.
                context_half, state_half = (
                    joint.halve() if isinstance(joint, IntegerMatrix) else joint.chunk(2, 1)
                )
                bias = take_tensor(weights, "drafter.input_proj.bias")
                linears["context_proj"] = lay_out(
                    context_half, bias, prepack=False, kernels=kernels
                )
                linears["state_proj"] = lay_out(state_half, prepack=False, kernels=kernels)
        if kernels is not None:
            self.packed = PackedDrafter(
                linears, embedding, num_layers=params.num_layers, exit_dim=params.exit_dim,
                num_candidates=self.num_candidates, kernels=kernels, tokens=self._list_tokens(),
            )  # fmt: skip
        self.input_proj = linears.get("input_proj")
        self.blocks = [linears[name] for name in blocks]
        self.lm_head = linears["lm_head"]
        self.rnn_w, self.rnn_u = linears.get("rnn_w"), linears.get("rnn_u")

    def _list_tokens(self) -> Tensor | None:
        """List the token of each of the head's outputs; None where these are all tokens."""
        offsets = self.offsets
        return None if offsets is None else offsets + torch.arange(len(offsets))

    def update_state(self, tokens: Tensor, state: Tensor | None) -> Tensor:
        """Return the recurrent state [..., D] after `tokens` [...]; None is the zero state."""
        embedded = (
            self.embedding.look_up(tokens) if isinstance(self.embedding, KernelMatrix)
            else torch.nn.functional.embedding(tokens, self.embedding)
        )  # fmt: skip
        if self.rnn_w is None or self.rnn_u is None:
            return embedded if state is None else embedded + state
        mixed = self.rnn_w(embedded)
        if state is None:
            bias = self.rnn_u.bias
            return torch.nn.functional.silu(mixed if bias is None else mixed + bias)
        return torch.nn.functional.silu(mixed + self.rnn_u(state))

    def _mix(self, context: Tensor, state: Tensor) -> Tensor:
        """Mix the target's states [..., 1, D] with recurrent ones into head inputs [..., n, E]."""
        x = torch.cat((context.expand(*state.shape[:-1], -1), state), dim=-1)
        if self.input_proj is not None:
            x = self.input_proj(x)
        for block in self.blocks:
            x = x + torch.nn.functional.silu(block(x))
        return x

    def rank_tokens(
        self, context: Tensor, state: Tensor, width: int, sharpness: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rank the `width` most probable next tokens [..., n, width]; return log-probabilities too.

        context: the target's states [..., 1, D]; state: [..., n, D]. sharpness: as in `DraftNet`.
        """
        logits = self.lm_head(self._mix(context, state))
        return rank_logits(logits, width, self.offsets, sharpness)

    def search_trees(
        self, hidden: Tensor, tokens: Tensor, num_tokens: int, temperatures: Array,
        min_gain: float,
    ) -> DynamicTrees | None:  # fmt: skip
        """Search dynamic trees after `tokens` [B], which follow `hidden` [B, D], by the kernels.

        None where there are none: `BeamDraft` has them grown. temperatures: [B], of the logits;
        min_gain: as in `Drafter`.
        """
        if self.kernels is None or self.packed is None:
            return None
        width, length = self.params.num_beams, self.params.draft_len_per_beam
        return self.kernels.search_trees(
            self.packed, hidden, tokens, width, length, num_tokens, temperatures, min_gain
        )

    def search_beams(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Search beams after `tokens` [B], which follow `hidden` [B, D]. Returns drafts [B, W, L].

        Scores are sums of log-probabilities, normalized over each beam's best candidates.
        """
        width, length = self.params.num_beams, self.params.draft_len_per_beam
        batch, num_candidates = tokens.shape[0], self.num_candidates
        if self.kernels is not None and self.packed is not None:
            return self.kernels.search_beams(self.packed, hidden, tokens, width, length)
        # All beams start from the same token, so the first step needs one of them only.
        state = self.update_state(tokens[:, None], None)  # [B, 1, D]
        context = hidden[:, None]  # [B, 1, D]
        beams = scores = None
        for _ in range(length):
            if beams is not None:
                assert scores is not None
                state = self.update_state(beams[:, :, -1], state)
            logits = self.lm_head(self._mix(context, state))  # [B, W, V]
            values, candidate_ids = find_top(logits.float(), num_candidates)
            totals = values.log_softmax(-1)  # [B, W, C]
            if scores is not None:
                totals = totals + scores[:, :, None]
            scores, flat = find_top(totals.flatten(1), width)  # [B, W]
            next_tokens = candidate_ids.flatten(1).gather(1, flat)[:, :, None]  # [B, W, 1]
            if self.offsets is not None:
                next_tokens = next_tokens + self.offsets[next_tokens]
            if beams is None:
                beams = next_tokens
                state = state.expand(batch, width, -1)
            else:
                source = (flat // num_candidates)[:, :, None]
                beams = torch.cat((beams.gather(1, source.expand_as(beams)), next_tokens), dim=-1)
                state = state.gather(1, source.expand_as(state))
        assert beams is not None
        return beams
