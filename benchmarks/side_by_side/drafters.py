"""The pycode drafters for a grown target: EAGLE, DFlash and Medusa draft what the small ones do."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.grow import (
    ALL,
    Filler,
    complete_config,
    grow_config,
    grow_tensors,
    place_heads,
    write_model,
)

LAYER = "layers.0."
MAPS = ("d2t", "t2d")  # between the target's vocabulary and its own
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")  # from tokens to tokens
READ = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
LAYER_IDS = {
    "eagle_config": "eagle_aux_hidden_state_layer_ids", "dflash_config": "target_layer_ids",
}  # fmt: skip


def grow_medusa(tensors: Mapping[str, Tensor], size: int, seed: int) -> dict[str, Tensor]:
    """Medusa heads for the target's hidden size, in float32: the SiLU of zero is zero."""
    filler = Filler(seed)
    return {
        name: filler.widen_linear(tensor, tensor.shape[-1], size, size)
        if ".linear." in name
        else filler.place(tensor, len(tensor), size)
        for name, tensor in tensors.items()
    }


def grow_layers(
    tensors: Mapping[str, Tensor], small: Mapping[str, Any], large: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Those of a drafter's tensors that a target has too, grown as a target's."""
    blank = torch.ones(1, small["hidden_size"])
    absent = {
        "model.embed_tokens.weight": blank, "model.norm.weight": blank[0],
        f"model.{LAYER}input_layernorm.weight": blank[0],
        "lm_head.weight": tensors.get("lm_head.weight", blank),
    }  # fmt: skip
    model = absent | {f"model.{name}": tensor for name, tensor in tensors.items()}
    grown = {
        name.removeprefix("model."): tensor
        for name, tensor in grow_tensors(model, small, large, seed).items()
    }
    return {name: tensor for name, tensor in grown.items() if name in tensors}


def grow_net(
    tensors: dict[str, Tensor], small: Mapping[str, Any], large: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Tensors of an EAGLE or DFlash drafter for the target's shape, in float32.

    EAGLE-3's first layer grows once with what its attention reads of the embedding and once with
    what it reads of the feature.
    """
    hidden, size = small["hidden_size"], large["hidden_size"]
    num_read = tensors[READ[0]].shape[1] // hidden
    read = zip(*(tensors[name].chunk(num_read, 1) for name in READ), strict=True)
    parts = [
        grow_layers(tensors | dict(zip(READ, part, strict=True)), small, large, seed + number)
        for number, part in enumerate(read)
    ]
    grown = parts[0] | {name: torch.cat([part[name] for part in parts], 1) for name in READ}
    filler = Filler(seed + num_read)
    for name, tensor in tensors.items():
        if name.startswith("fc."):
            grown[name] = filler.widen_linear(tensor, hidden, size, size)
        elif name in ("hidden_norm.weight", f"{LAYER}hidden_norm.weight"):
            grown[name] = filler.widen_norm(tensor, size)
        elif name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
            grow_head_norm(filler, grown, name, tensor, small, large)
        elif name == "mask_hidden":  # states side by side, as fc reads them
            states = tensor.reshape(-1, hidden)
            wide = filler.place(states, len(states), size, silent=ALL)
            grown[name] = wide.reshape(1, 1, -1)
        elif name in (*MAPS, *MARKOV):
            grown[name] = tensor
    return grown


def grow_head_norm(
    filler: Filler, grown: dict[str, Tensor], name: str, weight: Tensor,
    small: Mapping[str, Any], large: Mapping[str, Any],
) -> None:  # fmt: skip
    """Put the norm of queries or keys into `grown`, and change the projection it norms.

    The added channels of a head that exists would be heard by the norm: they are zero. The only
    epsilon is what the hidden size makes of it, and the projection makes up for the rest.
    """
    is_key = name.endswith("k_norm.weight")
    places, size = place_heads(small, large, kv=is_key), large["head_dim"]
    # grow_tensors has made queries larger by this, for the divisor: after a norm, its weight is.
    growth = math.sqrt(size / small["head_dim"])
    matrix = grown[name.replace("norm", "proj")]
    rows = matrix[places] * math.sqrt(small["hidden_size"] / large["hidden_size"])
    matrix.view(-1, size, matrix.shape[1])[(places // size).unique()] = 0
    matrix[places] = rows * (growth if is_key else 1)
    wide = filler.widen_norm(weight, size, places[: len(weight)])
    grown[name] = wide * (1 if is_key else growth)


def write_drafter(source: Path, folder: Path, shape: argparse.Namespace) -> None:
    """Grow a drafter's folder to a shape: benchmarks/grow.py's settings; its layers stay as many.

    Which kind it is, its tensors tell.
    """
    file = next(source.glob("*.safetensors"))
    tensors, config = load_file(file), json.loads((source / "config.json").read_text())
    large: dict[str, Any] = {"dtype": shape.dtype}
    if "medusa_num_heads" in config:
        grown = grow_medusa(tensors, shape.hidden, shape.seed)
        large = config | large
    else:
        small = complete_config(config)
        layers = {"layers": config["num_hidden_layers"]}
        large = grow_config(small, argparse.Namespace(**vars(shape) | layers)) | large
        grown = grow_net(tensors, small, large, shape.seed)
        if unknown := sorted({*tensors} - {*grown}):
            raise SystemExit(f"{source}: {unknown[0]} is not known of a drafter that grows")
        reads_layers = any(name.endswith("hidden_norm.weight") for name in tensors)
        told = [(config.get(p, {}) | config).get(name) for p, name in LAYER_IDS.items()]
        if reads_layers and not any(told):
            raise SystemExit(f"{source}: config.json does not tell the layers that are read")
        if "num_target_layers" in config:
            large["num_target_layers"] = shape.layers
    dtype = getattr(torch, shape.dtype)
    write_model(
        folder, source,
        {name: t if name in MAPS else t.to(dtype) for name, t in grown.items()}, large,
    )  # fmt: skip
    (folder / "model.safetensors").rename(folder / file.name)
