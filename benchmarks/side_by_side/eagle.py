"""The pycode EAGLE-3 drafter for a grown target: it drafts what the small one drafts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.grow import (
    Filler,
    complete_config,
    grow_config,
    grow_tensors,
    read_model,
    write_model,
)

LAYER = "layers.0."
MAPS = ("d2t", "t2d")  # between the target's vocabulary and its own
KNOWN = ("fc.weight", "norm.weight", "lm_head.weight", *MAPS)
HEADS = ("q_proj", "k_proj", "v_proj")


def grow_eagle(
    tensors: Mapping[str, Tensor], small: Mapping[str, Any], large: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """The drafter's tensors for the target's shape, in float32.

    Its layer grows as a target's does, once with what attention reads of the embedding and once
    with what it reads of the feature, which `fc` makes of the target's layers.
    """
    hidden = small["hidden_size"]
    halves = []
    for number, norm in enumerate(("input_layernorm", "hidden_norm")):
        model = {
            f"model.{name}": tensor for name, tensor in tensors.items() if name.startswith(LAYER)
        }
        for name in HEADS:
            key = f"model.{LAYER}self_attn.{name}.weight"
            model[key] = model[key][:, number * hidden : (number + 1) * hidden]
        model[f"model.{LAYER}input_layernorm.weight"] = tensors[f"{LAYER}{norm}.weight"]
        model |= {
            "model.norm.weight": tensors["norm.weight"],
            "lm_head.weight": tensors["lm_head.weight"],
            "model.embed_tokens.weight": tensors["lm_head.weight"],  # it has none of its own
        }
        halves.append(grow_tensors(model, small, large, seed + number))
    first, second = halves
    filler = Filler(seed + 2)
    size = large["hidden_size"]
    weight = tensors["fc.weight"].float()
    features = weight.chunk(weight.shape[1] // hidden, 1)
    grown = {
        name.removeprefix("model."): tensor
        for name, tensor in first.items()
        if name != "model.embed_tokens.weight"
    }
    for name in HEADS:
        key = f"{LAYER}self_attn.{name}.weight"
        grown[key] = torch.cat((first[f"model.{key}"], second[f"model.{key}"]), 1)
    return grown | {
        f"{LAYER}hidden_norm.weight": second[f"model.{LAYER}input_layernorm.weight"],
        # The target's added channels are zero, and so are the feature's.
        "fc.weight": torch.cat([filler.widen(f, size, size, writes=False) for f in features], 1),
        **{name: tensors[name] for name in MAPS if name in tensors},
    }


def write_eagle(source: Path, folder: Path, shape: argparse.Namespace) -> None:
    """Grow a drafter's folder to a shape: benchmarks/grow.py's settings; its layers stay one."""
    tensors, config = read_model(source)
    unknown = sorted({*tensors} - {*KNOWN} - {n for n in tensors if n.startswith(LAYER)})
    if unknown:
        raise SystemExit(f"{source}: {unknown[0]} is not known of an EAGLE-3 drafter that grows")
    small = complete_config(config)
    large = grow_config(small, argparse.Namespace(**vars(shape) | {"layers": 1}))
    dtype = getattr(torch, shape.dtype)
    grown = {
        name: tensor if name in MAPS else tensor.to(dtype)
        for name, tensor in grow_eagle(tensors, small, large, shape.seed).items()
    }
    write_model(folder, source, grown, large | {"dtype": shape.dtype})
