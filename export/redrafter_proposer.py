"""ReDrafter (https://arxiv.org/abs/2403.09919) as a proposer class of vLLM 0.32.

specdec-export writes this file alongside a drafter's config.json and model.safetensors; it does not
import specdec:

    PYTHONPATH=FOLDER vllm serve TARGET --enforce-eager --speculative-config
        '{"method": "custom_class", "model": "redrafter_proposer.ReDrafter",
          "num_speculative_tokens": 5}'

vLLM gives a proposer the target's module when it is loaded, and afterwards tokens alone. A hook on
that module reads the target's hidden states. Legend: T tokens of a step, B requests, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

FOLDER = Path(__file__).parent


class ReDrafter:
    """Proposer of the most probable chain of tokens; vLLM makes one for each worker."""

    def __init__(self, vllm_config: Any) -> None:
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("ReDrafter drafts on one device: leave out tensor and pipeline sizes")
        if not vllm_config.model_config.enforce_eager:
            raise ValueError("a captured graph would hide the target's steps: give --enforce-eager")
        self.length: int = vllm_config.speculative_config.num_speculative_tokens
        self.config = json.loads((FOLDER / "config.json").read_text())
        self.step: tuple[Tensor, Tensor, Tensor] | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Read the weights in the target's type, and hook the target's module."""
        self.embedding = target_model.get_submodule("model.embed_tokens")
        like = next(self.embedding.parameters())
        hidden_size = self.config["hidden_size"]
        if like.shape[-1] != hidden_size:
            raise ValueError(
                f"the drafter's hidden size is {hidden_size}, the target's {like.shape[-1]}:"
                " use the drafter that was trained for this target"
            )
        tensors = load_file(FOLDER / "model.safetensors")
        self.weights = {name: tensor.to(like) for name, tensor in tensors.items()}
        target_model.register_forward_hook(self.take_step, with_kwargs=True)

    def take_step(self, module: Any, inputs: Any, options: Mapping[str, Any], output: Any) -> None:
        """Keep hidden states [T, D], positions [T], and where requests start among them [B + 1]."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict) and metadata:  # vLLM has no metadata while it measures memory
            if not isinstance(output, Tensor):
                raise TypeError(f"the target yields a {type(output).__name__}, not hidden states")
            starts = next(iter(metadata.values())).query_start_loc
            self.step = (output, options["positions"], starts)

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for each request with a new token; a request amid its prompt gets no draft."""
        if self.step is None:
            raise RuntimeError("no step of the target was seen since the last drafts")
        (hidden, positions, starts), self.step = self.step, None
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not rows:
            return drafts
        row_starts = starts.tolist()
        # The newest token follows the hidden state one position before its own.
        indices = [
            row_starts[row] + int(num_tokens_no_spec[row]) - 2 - int(positions[row_starts[row]])
            for row in rows
        ]
        assert all(
            row_starts[row] <= index < row_starts[row + 1]
            for row, index in zip(rows, indices, strict=True)
        ), "the steps that vLLM computes and drafts for do not belong together"
        newest = torch.tensor([sampled_token_ids[row][-1] for row in rows], device=hidden.device)
        chains = self.draft(hidden[indices], newest).tolist()
        for row, chain in zip(rows, chains, strict=True):
            drafts[row] = chain
        return drafts

    def draft(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the chain after `tokens` [B], which follow `hidden` [B, D]: [B, length]."""
        state, chain = torch.zeros_like(hidden), []
        for _ in range(self.length):
            embedded = self.embedding(tokens)
            if self.config["rnn"]:
                state = silu(self.apply("rnn_w", embedded) + self.apply("rnn_u", state))
            else:
                state = embedded + state
            tokens = self.compute_logits(hidden, state).argmax(-1)
            chain.append(tokens)
        return torch.stack(chain, dim=1)

    def compute_logits(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Return next-token logits [B, V] of the target's hidden state and the recurrent state."""
        x, num_layers = torch.cat((hidden, state), dim=-1), self.config["num_draft_layers"]
        if "input_proj.weight" in self.weights:
            x = self.apply("input_proj", x)
        for layer in range(num_layers):
            x = x + silu(self.apply(f"lm_head.{layer}.linear", x))
        return self.apply(f"lm_head.{num_layers}", x)

    def apply(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer."""
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
