#!/usr/bin/env python3
"""Write the mean of two drafters' weights, where the second went on from the first.

    python average.py FIRST SECOND --output-dir OUTPUT

Where trainings share a beginning, the mean of their weights may draft as well as the better of them
on texts of both kinds (model soups, https://arxiv.org/abs/2203.05482). The configuration is the
second's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the mean in the type of the tensors; of integers, which have to be equal, these."""
    if not second.is_floating_point():
        if not torch.equal(first, second):
            raise SystemExit("error: the drafters draft different tokens")
        return second
    return ((first.float() + second.float()) / 2).to(second.dtype)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    first, second = load_file(args.first / WEIGHTS), load_file(args.second / WEIGHTS)
    tensors = {name: average(first[name], tensor) for name, tensor in second.items()}
    args.output_dir.mkdir(parents=True)
    shutil.copy(args.second / "config.json", args.output_dir)
    with safe_open(args.second / WEIGHTS, "pt") as file:
        save_file(tensors, args.output_dir / WEIGHTS, file.metadata())


if __name__ == "__main__":
    main()
