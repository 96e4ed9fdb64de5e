#!/usr/bin/env python3
"""Grow a small Llama, and its ReDrafter drafter, to a larger shape that computes the same function.

    python benchmarks/grow.py --model-dir examples/pycode/target --output-dir out/grown/target \
                              --drafter-model-dir examples/pycode/redrafter \
                              --drafter-output-dir out/grown/redrafter

The cost of a step is then that of the large shape, and text and acceptance are the small model's.
The default shape has 986M parameters: 22 layers, hidden 2048, SwiGLU 5632, 32 heads, 4 K/V heads.

Added weights are random wherever nothing comes of it, so that no arithmetic is cheaper than with
trained weights. Added layers have output projections of zero, whose signs are random: no two are
equal. Added channels of the hidden state stay zero, since nothing writes to them, and what reads
them is random. Norms divide by the mean over more channels, for which their weights and epsilon
make up. Added heads and added MLP channels are random, and the columns that would read them are
zero. A larger head is rotated by the same angles where its base is raised to the power of the
ratio, and its queries make up for the larger divisor.

Logits are compared before anything is written: in float32 they must agree to rounding; in bfloat16,
to which the changed norms and queries are rounded anew, in the best token of nearly every position.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NOISE = 0.02
MAX_DIFFERENCE = 1e-3  # of logits in float32, over their spread
LEAST_AGREEMENT = 0.9  # of best tokens, in half precision
NUM_CHECKED = 256  # positions
ALL = slice(None)


class Filler:
    """Makes tensors of random numbers with a smaller tensor inside."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def make(self, *shape: int) -> Tensor:
        """Random numbers, [*shape]; a block of them repeated, for a billion would take a minute."""
        count = math.prod(shape)
        block = torch.randn(min(count, 1 << 20), generator=self._generator) * NOISE
        return block.repeat(-(-count // block.numel()))[:count].view(shape)

    def make_zeros(self, *shape: int) -> Tensor:
        """Zeros of random sign: exporters that store equal tensors once find none equal."""
        return torch.zeros(*shape).copysign(self.make(*shape))

    def place(
        self, weight: Tensor, *shape: int, rows: Tensor | None = None,
        columns: Tensor | None = None, silent: slice | Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Put a vector or a matrix into a larger one, which is random elsewhere.

        rows, columns: where its own go; to the beginning if not given. silent: rows that must give
        nothing besides.
        """
        wide = self.make(*shape)
        if silent is not None:
            wide[silent] = 0
        given = (rows, columns)[: weight.dim()]
        own = [
            torch.arange(n) if at is None else at for n, at in zip(weight.shape, given, strict=True)
        ]
        wide[torch.meshgrid(*own, indexing="ij")] = weight.float()
        return wide

    def widen_norm(self, weight: Tensor, size: int, places: Tensor | None = None) -> Tensor:
        """The weight of a norm over channels of which the added ones are zero."""
        return self.place(weight.float() * math.sqrt(len(weight) / size), size, rows=places)

    def widen_linear(self, weight: Tensor, small: int, large: int, size: int) -> Tensor:
        """A projection to `size` channels, or its bias; those that it adds are zero.

        small, large: channels of a hidden state, one or several of which are read side by side.
        """
        if weight.dim() == 1:
            return self.place(weight, size, silent=ALL)
        added = slice(len(weight), None)
        parts = weight.chunk(weight.shape[1] // small, 1)
        return torch.cat([self.place(part, size, large, silent=added) for part in parts], 1)


def grow_config(config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The grown model's config.json; raise SystemExit where the shape cannot hold the model."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    smaller = {
        "--layers": (args.layers, config["num_hidden_layers"]),
        "--hidden": (args.hidden, config["hidden_size"]),
        "--intermediate": (args.intermediate, config["intermediate_size"]),
        "--kv-heads": (args.kv_heads, kv_heads),
        "--head-size": (args.head_size, head_size),
        "query heads of each K/V head": (args.heads // args.kv_heads, heads // kv_heads),
    }
    for name, (wanted, least) in smaller.items():
        if wanted < least:
            raise SystemExit(f"{name} is {wanted}, the model has {least}: it can only grow")
    if config.get("rope_scaling") or config.get("attention_bias") or config.get("mlp_bias"):
        raise SystemExit("models with rotary scaling or biases are not grown")
    if args.heads % args.kv_heads or args.head_size % 2:
        raise SystemExit("--heads must be a multiple of --kv-heads, and --head-size even")
    theta = config.get("rope_theta", 10000.0)
    ratio = args.head_size / head_size
    return dict(config) | {
        "num_hidden_layers": args.layers, "hidden_size": args.hidden, "head_dim": args.head_size,
        "intermediate_size": args.intermediate, "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads, "rope_theta": theta**ratio,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / args.hidden,
        "tie_word_embeddings": False,
    }  # fmt: skip


def place_heads(small: Mapping[str, Any], large: Mapping[str, Any], *, kv: bool) -> Tensor:
    """Where the rows of a projection into heads go, [small rows].

    Query heads keep their K/V head. Rotation pairs a channel with that half a head further on, so
    each half of a head goes to the beginning of the larger half.
    """
    key = "num_key_value_heads" if kv else "num_attention_heads"
    kv_small, kv_large = small["num_key_value_heads"], large["num_key_value_heads"]
    group, large_group = small[key] // kv_small, large[key] // kv_large
    head = torch.arange(small[key])
    head = head // group * large_group + head % group
    size = small["head_dim"]
    channel = torch.arange(size)
    channel = channel % (size // 2) + channel // (size // 2) * (large["head_dim"] // 2)
    places: Tensor = (head[:, None] * large["head_dim"] + channel).flatten()
    return places


def grow_tensors(
    tensors: Mapping[str, Tensor], small: Mapping[str, Any], large: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """The grown model's tensors, in float32."""
    filler = Filler(seed)
    hidden, inner, size = large["hidden_size"], large["intermediate_size"], large["head_dim"]
    num_q, num_kv = large["num_attention_heads"] * size, large["num_key_value_heads"] * size
    queries, keys = (place_heads(small, large, kv=kv) for kv in (False, True))
    # The added channels of a head that exists would change its scores.
    silent = torch.zeros(num_q, dtype=torch.bool)
    silent.view(-1, size)[(queries // size).unique()] = True
    silent[queries] = False
    # By matrix, its shape, and where it goes. Values are not rotated, and may lie like keys.
    matrices: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
        "self_attn.q_proj": ((num_q, hidden), {"rows": queries, "silent": silent}),
        "self_attn.k_proj": ((num_kv, hidden), {"rows": keys}),
        "self_attn.v_proj": ((num_kv, hidden), {"rows": keys}),
        "self_attn.o_proj": ((hidden, num_q), {"columns": queries, "silent": ALL}),
        "mlp.gate_proj": ((inner, hidden), {}),
        "mlp.up_proj": ((inner, hidden), {}),
        "mlp.down_proj": ((hidden, inner), {"silent": ALL}),
    }
    scales = {"self_attn.q_proj": math.sqrt(size / small["head_dim"])}
    grown: dict[str, Tensor] = {}
    for layer in range(large["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        is_added = layer >= small["num_hidden_layers"]
        for name, (shape, where) in matrices.items():
            key = f"{prefix}{name}.weight"
            if not is_added:
                weight = tensors[key].float() * scales.get(name, 1)
                grown[key] = filler.place(weight, *shape, **where)
            elif name in ("self_attn.o_proj", "mlp.down_proj"):
                grown[key] = filler.make_zeros(*shape)
            else:
                grown[key] = filler.make(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            key = f"{prefix}{name}.weight"
            grown[key] = torch.ones(hidden) if is_added else filler.widen_norm(tensors[key], hidden)
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    return grown | {
        "model.embed_tokens.weight": filler.place(embedding, len(embedding), hidden, silent=ALL),
        "model.norm.weight": filler.widen_norm(tensors["model.norm.weight"], hidden),
        "lm_head.weight": filler.place(head, len(head), hidden),
    }


def grow_redrafter(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], hidden: int, exit_dim: int, seed: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Grow a ReDrafter drafter, as Apple's names have it, to a hidden state that is larger.

    The target's added channels are zero; so stay the recurrent state's and the head's.
    """
    filler = Filler(seed)
    small, small_exit = config["hidden_size"], config["exit_dim"]
    if small_exit == 2 * small or exit_dim == 2 * hidden:
        raise SystemExit("drafters without an input projection are not grown: change --exit-dim")
    if exit_dim < small_exit or hidden < small:
        raise SystemExit(f"the drafter has exit dimension {small_exit} and hidden size {small}")
    grown: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        reads_states = name.startswith("rnn") or (
            "input_proj" in name and tensor.shape == (small_exit, 2 * small)
        )
        size = hidden if name.startswith("rnn") else exit_dim
        if tensor.dim() == 1 or reads_states:
            grown[name] = filler.widen_linear(tensor, small, hidden, size)
        elif tensor.shape == (config["vocab_size"], small_exit):
            grown[name] = filler.place(tensor, len(tensor), exit_dim)
        elif tensor.shape == (small_exit, small_exit):
            grown[name] = filler.widen_linear(tensor, small_exit, exit_dim, exit_dim)
        else:
            raise SystemExit(f"{name} of shape {list(tensor.shape)} is not known of a drafter")
    return grown, dict(config) | {"hidden_size": hidden, "exit_dim": exit_dim}


def read_model(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config.json of a Hugging Face folder with one safetensors file."""
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Write out what config.json may leave to be reckoned."""
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    return dict(config) | {
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "rope_theta": theta or 10000.0,
    }


@torch.inference_mode()
def compute_logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Compute transformers' logits in float32 for a fixed row of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**copy.deepcopy(dict(config))))
    own = {name: tensor.float() for name, tensor in tensors.items()}
    own.setdefault("lm_head.weight", own["model.embed_tokens.weight"])
    model.load_state_dict(own, assign=True, strict=True)
    settings = model.config
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    generator = torch.Generator().manual_seed(1)
    length = min(NUM_CHECKED, config["max_position_embeddings"])
    ids = torch.randint(0, config["vocab_size"], (1, length), generator=generator)
    logits: Tensor = model.eval()(ids).logits[0]
    return logits


def check_logits(expected: Tensor, found: Tensor, *, is_exact: bool) -> dict[str, float]:
    """Compare; raise SystemExit where the grown model is another one."""
    difference = float((expected - found).abs().max() / expected.std())
    agreement = float((expected.argmax(-1) == found.argmax(-1)).float().mean())
    if is_exact and not difference < MAX_DIFFERENCE:
        raise SystemExit(f"logits differ by {difference:.2g} of their spread: nothing is written")
    if not agreement >= LEAST_AGREEMENT:
        raise SystemExit(f"best tokens agree in {agreement:.1%} only: nothing is written")
    return {"max_difference": difference, "agreement": agreement}


def write_model(
    folder: Path, source: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write a Hugging Face folder, the tokenizer's files taken along."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in source.iterdir():
        if path.suffix == ".json" and path.name not in ("config.json", "manifest.json"):
            shutil.copy(path, folder / path.name)


def grow_model(args: argparse.Namespace) -> dict[str, Any]:
    """Grow, check and write the model, and its drafter if one is given."""
    dtype = getattr(torch, args.dtype)
    for folder in (args.output_dir, args.drafter_output_dir):
        if folder is not None and folder.exists():
            raise SystemExit(f"{folder} exists: choose another folder")
    tensors, raw = read_model(args.model_dir)
    small = complete_config(raw)
    large = grow_config(small, args)
    large |= {"dtype": args.dtype}
    large.pop("torch_dtype", None)
    if isinstance(large.get("rope_parameters"), dict):  # transformers 5
        large["rope_parameters"] = large["rope_parameters"] | {"rope_theta": large["rope_theta"]}
    drafter: dict[str, Tensor] = {}
    if args.drafter_model_dir is not None:
        drafter, drafter_config = read_model(args.drafter_model_dir)
        drafter, drafter_config = grow_redrafter(
            drafter, drafter_config, args.hidden, args.exit_dim, args.seed + 1
        )
    grown = grow_tensors(tensors, small, large, args.seed)
    report: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in grown.values()),
        "float32": check_logits(
            compute_logits(small, tensors), compute_logits(large, grown), is_exact=True
        ),
    }
    if dtype is not torch.float32:
        for weights in (tensors, grown):
            for name in weights:
                weights[name] = weights[name].to(dtype)
        report[args.dtype] = check_logits(
            compute_logits(small, tensors), compute_logits(large, grown), is_exact=False
        )
    write_model(args.output_dir, args.model_dir, grown, large)
    if drafter:
        report["drafter_parameters"] = sum(tensor.numel() for tensor in drafter.values())
        drafter = {name: tensor.to(dtype) for name, tensor in drafter.items()}
        drafter_config |= {"dtype": args.dtype}
        write_model(args.drafter_output_dir, args.drafter_model_dir, drafter, drafter_config)
    return report


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--drafter-model-dir", type=Path, help="a ReDrafter drafter to grow too")
    parser.add_argument("--drafter-output-dir", type=Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--exit-dim", type=int, default=2048, help="of the grown drafter")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    if (args.drafter_model_dir is None) != (args.drafter_output_dir is None):
        parser.error("--drafter-model-dir and --drafter-output-dir go together")
    return args


if __name__ == "__main__":
    print(json.dumps(grow_model(parse_args()), indent=2))
