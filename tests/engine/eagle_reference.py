"""EAGLE drafters computed straightforwardly, on transformers' own layers and without a cache."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.levels import DRAFTER_MIN_TEMPERATURE
from specdec.decode.requests import ActiveRequest
from specdec.engine.tree import Tree


class EagleReference:
    """A drafter as its folder has it, alongside its target; every path is computed as a whole."""

    def __init__(self, target: Path, drafter: Path, *, version: int = 1) -> None:
        self.is_third = version == 3
        self.document = json.loads((drafter / "config.json").read_text())
        self.target = AutoModelForCausalLM.from_pretrained(target).to(torch.float32).eval()
        fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                  "vocab_size", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
        self.config = LlamaConfig(**{name: self.document[name] for name in fields})
        self.config._attn_implementation = "eager"
        self.tensors = load_file(drafter / "model.safetensors")
        embedding = self.target.get_input_embeddings().weight
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.layers = [
            self._make_layer(index) for index in range(self.document["num_hidden_layers"])
        ]
        self.aux_layers = self.document.get("eagle_config", {}).get(
            "eagle_aux_hidden_state_layer_ids"
        )
        self.norm_before_residual = self.document.get("norm_before_residual", False)
        self.read = functools.cache(self._read)

    def _make_layer(self, index: int) -> Any:
        layer = LlamaDecoderLayer(self.config, index)
        prefix = f"layers.{index}."
        own = {k.removeprefix(prefix): w for k, w in self.tensors.items() if k.startswith(prefix)}
        if index == 0 and self.is_third:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows, columns = own[f"self_attn.{name}.weight"].shape
                setattr(layer.self_attn, name, torch.nn.Linear(columns, rows, bias=False))
            layer.hidden_norm = LlamaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        elif index == 0:
            layer.input_layernorm = torch.nn.Identity()
        layer.load_state_dict(own)
        return layer.eval()

    @torch.no_grad()
    def make_features(self, text: Sequence[int]) -> Tensor:
        """Features [T, D] of a text."""
        hidden, outputs = read_layers(self.target, text, self.aux_layers or ())
        return self.narrow(outputs) if self.is_third else hidden

    def narrow(self, parts: list[Tensor]) -> Tensor:
        """What `fc` makes of the outputs of some layers, [T, D]."""
        if self.document.get("fc_norm"):
            parts = [self.norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)]
        read = torch.cat(parts, dim=-1)
        if self.document.get("norm_before_fc"):
            read = self.norm(read, "input_norm.weight")
        return read @ self.tensors["fc.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """transformers' norm with the weights of that name."""
        norm = LlamaRMSNorm(x.shape[-1], self.config.rms_norm_eps)
        norm.load_state_dict({"weight": self.tensors[name]})
        normed: Tensor = norm(x)
        return normed

    @torch.no_grad()
    def run(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """The next features [T, D] of pairs."""
        size = len(tokens)
        embedded = self.embedding[torch.tensor(list(tokens))]
        positions = torch.arange(size)[None]
        tables = self.rotary(features[None], positions)
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        arguments = {"attention_mask": mask, "position_ids": positions}
        if not self.is_third:
            x = torch.cat((embedded, features), dim=-1) @ self.tensors["fc.weight"].T
            x = (x + self.tensors.get("fc.bias", 0))[None]
            for layer in self.layers:
                out = layer(x, position_embeddings=tables, **arguments)
                x = out[0] if isinstance(out, tuple) else out
            return x.reshape(size, -1)
        first, *others = self.layers
        normed = first.hidden_norm(features)
        read = torch.cat((first.input_layernorm(embedded), normed), dim=-1)[None]
        x = (normed if self.norm_before_residual else features)[None]
        x = x + first.self_attn(read, position_embeddings=tables, attention_mask=mask)[0]
        x = x + first.mlp(first.post_attention_layernorm(x))
        for layer in others:
            out = layer(x, position_embeddings=tables, **arguments)
            x = out[0] if isinstance(out, tuple) else out
        x = x.reshape(size, -1)
        return self.norm(x, "norm.weight") if self.document.get("norm_output") else x

    @torch.no_grad()
    def _read(self, text: tuple[int, ...], path: tuple[int, ...]) -> tuple[list[int], Tensor, Any]:
        """Tokens of pairs, their features, and what follows each: once for each text and path."""
        is_parallel = "mask_hidden" in self.tensors  # P-EAGLE, whose places know the text only
        if path and not is_parallel:
            tokens, features, hidden = self.read(text, path[:-1])
            tokens, features = [*tokens, path[-1]], torch.cat((features, hidden[-1:]))
            return tokens, features, self.run(tokens, features)
        tokens, features = list(text[1:]), self.make_features(text[:-1])
        if is_parallel:
            parts = self.tensors["mask_hidden"].reshape(1, -1).chunk(len(self.aux_layers), dim=-1)
            features = torch.cat((features, *[self.narrow(list(parts))] * len(path)))
            tokens += [self.document["pard_token"]] * len(path)
        return tokens, features, self.run(tokens, features)

    @torch.no_grad()
    def rank(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Log-probabilities of the target's tokens after `text`, whose last is new, and `path`."""
        _, _, hidden = self.read(tuple(text), tuple(path))
        last = hidden[-1]
        if self.is_third and not self.document.get("norm_output"):
            last = self.norm(last, "norm.weight")
        head = self.tensors.get("lm_head.weight", self.target.lm_head.weight)
        own = (head @ last).log_softmax(-1)
        if "d2t" not in self.tensors:
            return own
        scores = torch.full((self.document["vocab_size"],), -torch.inf)
        scores[torch.arange(len(own)) + self.tensors["d2t"]] = own
        return scores

    def draft_static(
        self, text: Sequence[int], choices: Sequence[Sequence[int]]
    ) -> set[tuple[int, ...]]:
        """The paths of tokens that a tree of ranks gives."""
        return {self._follow(text, ranks) for ranks in choices}

    def _follow(self, text: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, int(self.rank(text, path).topk(rank + 1).indices[rank]))
        return path

    def draft_dynamic(
        self, text: Sequence[int], *, top_k: int, depth: int, num_tokens: int
    ) -> set[tuple[int, ...]]:
        """The paths of tokens of EAGLE-2's tree, judged at the temperature of greedy requests.

        P-EAGLE's are judged as they are.
        """
        temperature = 1.0 if "mask_hidden" in self.tensors else DRAFTER_MIN_TEMPERATURE
        drafted: dict[tuple[int, ...], float] = {}
        level: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(depth):
            below = {}
            for path, score in level.items():
                best = (self.rank(text, path) / temperature).log_softmax(-1).topk(top_k)
                for token, own in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    below[(*path, token)] = score + own
            drafted |= below
            level = dict(sorted(below.items(), key=lambda item: -item[1])[:top_k])
        return set(sorted(drafted, key=lambda path: -drafted[path])[:num_tokens])


def read_layers(
    target: Any, text: Sequence[int], layers: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """The last hidden states of a text and the outputs of some layers, all [T, D]."""
    outputs: list[Tensor] = []
    hooks = [
        target.model.layers[layer].register_forward_hook(
            lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in layers
    ]
    hidden: Tensor = target.model(torch.tensor([list(text)])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return hidden, [out.reshape(len(text), -1) for out in outputs]


Drafts = dict[int, list[tuple[list[int], set[tuple[int, ...]]]]]


@contextlib.contextmanager
def record_drafts(drafter: Drafter) -> Iterator[Drafts]:
    """What is proposed in the body: by request, (text so far, paths of the tree) of every step."""
    drafts: Drafts = {}
    propose = drafter.propose

    def keep(requests: Sequence[ActiveRequest]) -> list[Candidates]:
        candidates = propose(requests)
        for request, one in zip(requests, candidates, strict=True):
            text = [*request.request.input_ids, *request.output_ids]
            own = drafts.setdefault(request.request.index, [])
            own.append((text, list_token_paths(one.tree)))
        return candidates

    drafter.propose = keep  # type: ignore[method-assign]
    try:
        yield drafts
    finally:
        del drafter.propose


def list_token_paths(tree: Tree) -> set[tuple[int, ...]]:
    """The tokens on the way to every node, without the root's."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parents[node]], int(tree.tokens[node])))
    return set(paths[1:])
