"""DFlash drafters computed straightforwardly: one query after another, in float64, no cache."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.eagle_reference import read_layers


class DFlashReference:
    """A drafter as its folder has it, alongside its target; every call computes everything anew."""

    def __init__(self, target: Path, drafter: Path) -> None:
        document = json.loads((drafter / "config.json").read_text())
        self.net: dict[str, Any] = document.get("transformer_layer_config", document)
        own = document.get("dflash_config", document)
        self.layers = own.get("target_layer_ids") or [
            layer - 1 for layer in document["aux_hidden_state_layer_ids"]
        ]
        self.mask = own["mask_token_id"]
        self.size = own.get("block_size") or document["block_size"]
        self.scale = own.get("input_embedding_scale", own.get("embedding_scale", 1.0))
        # DeepSpec's layout, which has no name for it, always does.
        is_deepspec = document["architectures"] == ["Qwen3DSparkModel"]
        self.samples_anchor = document.get("sample_from_anchor", is_deepspec)
        self.has_markov = bool(document.get("markov_rank"))
        self.target = AutoModelForCausalLM.from_pretrained(target).to(torch.float32).eval()
        self.tensors = {
            name: t.double() for name, t in load_file(drafter / "model.safetensors").items()
        }
        rows = self.target.get_input_embeddings().weight.detach()
        self.embedding = self.tensors.get("embed_tokens.weight", rows.double())
        head = self.target.lm_head.weight.detach().double()
        self.head = self.tensors.get("lm_head.weight", head)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root-mean-square norm of the last dimension."""
        root = (x.square().mean(-1, keepdim=True) + self.net["rms_norm_eps"]).sqrt()
        return x / root * self.tensors[name]

    def multiply(self, x: Tensor, name: str) -> Tensor:
        """x [..., D] by a matrix of the folder, with its bias if it has one."""
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Rotate the heads [N, H] of one token, pair by pair as complex numbers."""
        half = x.shape[-1] // 2
        steps = torch.arange(half, dtype=torch.float64) / half
        angles = position * self.net["rope_theta"] ** -steps
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    def project(self, x: Tensor, prefix: str, part: str, position: int | None) -> Tensor:
        """Queries, keys or values [N, H] of one token's state [D]."""
        heads = self.multiply(x, f"{prefix}{part}_proj").view(-1, self.net["head_dim"])
        if position is None:
            return heads
        return self.turn(self.norm(heads, f"{prefix}{part}_norm.weight"), position)

    @torch.no_grad()
    def read_context(self, text: Sequence[int]) -> Tensor:
        """What the drafter makes of the target's layers at every token, [T, D]."""
        read = torch.cat(read_layers(self.target, text, self.layers)[1], dim=-1).double()
        return self.norm(self.multiply(read, "fc"), "hidden_norm.weight")

    def sees(self, layer: int, query: int, key: int) -> bool:
        """Whether a layer's window reaches from one position to another before it."""
        types = self.net.get("layer_types") or ["full_attention"] * (layer + 1)
        return types[layer] == "full_attention" or key > query - self.net["sliding_window"]

    @torch.no_grad()
    def compute_logits(self, text: Sequence[int]) -> Tensor:
        """Logits [P, V] of the places after `text`, whose last token is the anchor."""
        context, start = self.read_context(text[:-1]), len(text) - 1
        block = [text[-1], *[self.mask] * (self.size - 1)]
        x = self.embedding[torch.tensor(block)] * self.scale
        group = self.net["num_attention_heads"] // self.net["num_key_value_heads"]
        for layer in range(self.net["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            attention = f"{prefix}self_attn."
            states = [*context, *self.norm(x, f"{prefix}input_layernorm.weight")]
            keys = [self.project(s, attention, "k", p) for p, s in enumerate(states)]
            values = [self.project(s, attention, "v", None) for s in states]
            mixed = []
            for position in range(start, start + self.size):
                query = self.project(states[position], attention, "q", position)
                seen = [p for p in range(len(states)) if self.sees(layer, position, p)]
                out = []
                for head, own in enumerate(query):
                    scores = torch.stack([own @ keys[p][head // group] for p in seen])
                    weights = (scores / math.sqrt(len(own))).softmax(0)
                    out.append(weights @ torch.stack([values[p][head // group] for p in seen]))
                mixed.append(torch.cat(out))
            x = x + self.multiply(torch.stack(mixed), f"{attention}o_proj")
            read = self.norm(x, f"{prefix}post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(self.multiply(read, f"{prefix}mlp.gate_proj"))
            inner = gate * self.multiply(read, f"{prefix}mlp.up_proj")
            x = x + self.multiply(inner, f"{prefix}mlp.down_proj")
        logits = self.norm(x, "norm.weight")[0 if self.samples_anchor else 1 :] @ self.head.T
        if "d2t" not in self.tensors:
            return logits
        own = torch.arange(logits.shape[1]) + self.tensors["d2t"].long()
        whole = torch.full((len(logits), self.net["vocab_size"]), -torch.inf).double()
        whole[:, own] = logits
        return whole

    def add_before(self, logits: Tensor, before: int) -> Tensor:
        """Logits [V] of a place after the token in the place before it."""
        if not self.has_markov:
            return logits
        row = self.tensors["markov_head.markov_w1.weight"][before]
        added = self.tensors["markov_head.markov_w2.weight"] @ row
        if "d2t" not in self.tensors:
            return logits + added
        whole = logits.clone()
        whole[torch.arange(len(added)) + self.tensors["d2t"].long()] += added
        return whole

    def draft_levels(self, text: Sequence[int], num_tokens: int, top_k: int) -> set[Any]:
        """The most probable paths of the `top_k` best ones of each length that went on."""
        level: dict[tuple[int, ...], float] = {(): 0.0}
        everything: dict[tuple[int, ...], float] = {}
        for logits in self.compute_logits(text):
            grown = {}
            for path, total in level.items():
                scores = self.add_before(logits, [text[-1], *path][-1]).log_softmax(-1)
                best = scores.topk(top_k)
                for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    grown[(*path, token)] = total + score
            everything |= grown
            level = dict(sorted(grown.items(), key=lambda item: -item[1])[:top_k])
        return set(sorted(everything, key=lambda path: -everything[path])[:num_tokens])

    def draft(self, text: Sequence[int], num_tokens: int, top_k: int) -> set[tuple[int, ...]]:
        """The most probable paths, found among all there are of `top_k` tokens a place."""
        if self.has_markov:
            return self.draft_levels(text, num_tokens, top_k)
        scores, tokens = self.compute_logits(text).log_softmax(-1).topk(top_k, dim=-1)
        paths: dict[tuple[int, ...], float] = {(): 0.0}
        everything: dict[tuple[int, ...], float] = {}
        for own, names in zip(scores.tolist(), tokens.tolist(), strict=True):
            paths = {
                (*path, token): total + score
                for path, total in paths.items()
                for token, score in zip(names, own, strict=True)
            }
            everything |= paths
        return set(sorted(everything, key=lambda path: -everything[path])[:num_tokens])
