"""gpt-oss, 20b and 120b: attention with sinks, and mixtures whose experts have biases.

Every other layer has a window, the first one of them. A folder has the experts of a layer in one
tensor, gate and up row by row: in MXFP4 as published, else as [in, out].
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.architectures import Architecture
from specdec.model.config_reader import ConfigReader

from .. import mxfp4
from ..hf import HfFolder
from ..plan import ComputedTensors
from .base import (
    Family,
    Layout,
    describe_rotary,
    get_window,
    read_decoder,
    read_experts,
    read_windows,
)
from .llama import BESIDE_MLP, HF_LAYER, OUR_LAYER
from .qwen import EXPERTS, describe_sizes

# transformers' scaling of a config.json that has none.
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_JOINT = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_blocks|_scales|_bias|)")
# A joint tensor's matrices, with their places among its rows and how many of these there are.
_PARTS = {"gate_up": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down": (("down_proj", 0, 1),)}


def read_gpt_oss(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read the fields of `ModelConfig`."""
    name = "rope_parameters" if reader.get_object("rope_parameters") else "rope_scaling"
    rotary = reader.get_object(name) or YARN
    values = read_decoder(
        reader.enter({**reader.config, name: rotary}), norm_epsilon=("rms_norm_eps", 1e-5),
        max_positions=131072, num_kv_heads=8, absent_head_dim=64, rotary_base=150000.0,
    )  # fmt: skip
    values |= read_windows(reader, values["num_hidden_layers"], get_window(reader, 128), pattern=2)
    values |= read_experts(reader, layout, values, num=128, top_k=4, renormalizes=True)
    has_bias = reader.get_bool("attention_bias", True)
    values["own_arithmetic"] = Architecture(
        mlp="experts", activations=("swiglu",), qkv_bias=has_bias, dense_bias=has_bias,
        mlp_bias=True, has_sinks=True, gate_limit=reader.get_float("swiglu_limit", 7.0),
        gate_slope=reader.get_float("swiglu_alpha", 1.702),
    )  # fmt: skip
    return values


@dataclasses.dataclass(frozen=True)
class _ExpertRows:
    """Rows of a joint tensor that are an expert's matrix or its bias.

    joint: the tensor's name without what tells its form; rows: of an expert in it, of which every
    `step`-th from `first` on is taken.
    """

    joint: str
    expert: int
    rows: int
    first: int
    step: int

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the joint tensor's rows from the first to the last of [start, stop)."""
        offset = self.expert * self.rows + self.first
        return offset + start * self.step, offset + max(start, stop - 1) * self.step + 1


class JointExperts(ComputedTensors):
    """Matrices and biases of the experts that a folder has in joint tensors, by Qwen's names."""

    def __init__(self, folder: HfFolder) -> None:
        self.entries: dict[str, _ExpertRows] = {}
        self.joint_names: list[str] = []
        infos: dict[str, TensorInfo] = {}
        for name, info in folder.tensors.items():
            match = _JOINT.fullmatch(name)
            if match is None:
                continue
            self.joint_names.append(name)
            num_sizes = {"_blocks": 4, "_bias": 2, "": 3}.get(match[3])
            if len(info.shape) == num_sizes:
                self._check_form(match, folder)
                infos |= self._list_entries(match, info)
        super().__init__(folder, infos, self.compute_rows)

    @staticmethod
    def _check_form(match: re.Match[str], folder: HfFolder) -> None:
        """Raise SpecDecError for matrices in two forms, and for MXFP4 that is not whole."""
        if match[3] != "_blocks":
            return
        name = f"{match[1]}.{match[2]}_proj"
        blocks, scales = folder.tensors[match[0]], folder.tensors.get(f"{name}_scales")
        needed = TensorInfo("uint8", blocks.shape[:3])
        if name in folder.tensors:
            raise SpecDecError(
                f"{folder.path} holds {name} and, in MXFP4, {match[0]}",
                "keep one of them: which holds the model's weights cannot be known",
            )
        if scales != needed or (blocks.dtype, blocks.shape[3]) != ("uint8", mxfp4.GROUP // 2):
            found = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise SpecDecError(
                f"{folder.path}: {match[0]} is {blocks.dtype} {list(blocks.shape)}, and"
                f" {name}_scales is {found}: MXFP4 has 16 bytes for each of its powers",
                "copy or download the folder again",
            )

    def _list_entries(self, match: re.Match[str], info: TensorInfo) -> dict[str, TensorInfo]:
        """Add the entries of a joint tensor; return their types and shapes by name."""
        experts, projection, form = match.groups()
        num_experts, rows = info.shape[0], info.shape[-1 if form in ("", "_bias") else 1]
        row_shape: tuple[int, ...] = ()
        dtype = info.dtype
        if form == "_blocks":
            row_shape, dtype = (info.shape[2] * mxfp4.GROUP,), "bfloat16"
        elif not form:
            row_shape = (info.shape[1],)
        kind = "bias" if form == "_bias" else "weight"
        infos = {}
        for expert in range(num_experts):
            for part, first, step in _PARTS[projection]:
                name = f"{experts}.{expert}.{part}.{kind}"
                joint = f"{experts}.{projection}_proj"
                self.entries[name] = _ExpertRows(joint, expert, rows, first, step)
                infos[name] = TensorInfo(dtype, (rows // step, *row_shape))
        return infos

    def compute_rows(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None
    ) -> Array:
        """Return rows [start, stop) of an expert's matrix or bias, all or some of its columns."""
        entry, folder = self.entries[name], self.folder
        if name.endswith(".bias"):
            first, last = entry.span(start, stop)
            offset = entry.expert * entry.rows
            row = folder.read_block(f"{entry.joint}_bias", entry.expert, entry.expert + 1)[0]
            return np.ascontiguousarray(row[first - offset : last - offset : entry.step])
        if f"{entry.joint}_blocks" in folder.tensors:
            weights = mxfp4.widen(*self._read_groups(entry, start, stop))
        else:  # [in, out]
            depth, offset = self.tensors[name].shape[1], entry.expert * entry.rows
            first, last = (row - offset for row in entry.span(start, stop))
            matrix = entry.expert * depth
            block = folder.read_block(entry.joint, matrix, matrix + depth, (first, last))
            weights = block[:, :: entry.step].T
        return np.ascontiguousarray(weights if columns is None else weights[:, slice(*columns)])

    def _read_groups(self, entry: _ExpertRows, start: int, stop: int) -> tuple[Array, Array]:
        """Return the numbers [rows, groups, 16] and the powers [rows, groups] of some rows."""
        first, last = entry.span(start, stop)
        powers = self.folder.read_block(f"{entry.joint}_scales", first, last)
        groups = powers.shape[1]
        numbers = self.folder.read_block(f"{entry.joint}_blocks", first * groups, last * groups)
        return numbers.reshape(last - first, groups, -1)[:: entry.step], powers[:: entry.step]

    def raw(self, name: str) -> tuple[mxfp4.Kind, tuple[int, ...], _BlockRows] | None:
        """Return an expert's matrix in GGML's blocks, as `GgufModel.raw` does; None for others."""
        if f"{self.entries[name].joint}_blocks" not in self.folder.tensors or name.endswith("bias"):
            return None
        return mxfp4.Kind.MXFP4, self.tensors[name].shape, _BlockRows(self, name)

    def read_blocks(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of an expert's matrix in GGML's blocks."""
        return mxfp4.make_blocks(*self._read_groups(self.entries[name], start, stop))


@dataclasses.dataclass(frozen=True)
class _BlockRows:
    """Rows of blocks, uint8 [rows, bytes], which are read where they are indexed by two slices."""

    experts: JointExperts
    name: str

    def __getitem__(self, key: tuple[slice, slice]) -> Array:
        start, stop, _ = key[0].indices(self.experts.tensors[self.name].num_rows)
        return self.experts.read_blocks(self.name, start, stop)[:, key[1]]


def prepare(folder: HfFolder, dtype: str) -> HfFolder:
    """Return the folder with each expert's matrices and biases by names of their own."""
    experts = JointExperts(folder)
    return folder.substitute(experts, experts.joint_names) if experts.joint_names else folder


GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    modules=BESIDE_MLP | EXPERTS | {
        OUR_LAYER + "attention": (HF_LAYER + "self_attn",),  # of sinks
        OUR_LAYER + "mlp.router": (HF_LAYER + "mlp.router",),
    },
    prepare=prepare,
    read_config=read_gpt_oss,
    describe=lambda model, config: describe_rotary(model, config) | describe_sizes(model),
)  # fmt: skip
