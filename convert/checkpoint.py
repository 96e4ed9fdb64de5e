"""An existing checkpoint, of ours or TensorRT-LLM's, as the target that a drafter is added to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.errors import SpecDecError, raise_problems
from specdec.schema import ModelConfig, parse_checkpoint_config
from specdec.storage import TensorFile, TensorInfo, read_json
from specdec.tensors import Shard, TensorSpec, get_rank_shape, list_target_tensors

from .plan import (
    Piece,
    PlannedTensor,
    Problems,
    RankPlan,
    check_num_layers,
    count,
    join_names,
    report_missing,
    report_unread,
)
from .sharding import Block, list_blocks

HEAD = "lm_head.weight"
EMBEDDING = "transformer.vocab_embedding.weight"
# What TensorRT-LLM's own writer stores and every loader computes anew.
ROTARY_BUFFERS = ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention")
SCALES = ("weights_scaling_factor", "activation_scaling_factor")
KV_SCALES = ("kv_cache_scaling_factor", "k_cache_scaling_factor", "v_cache_scaling_factor")
QUANTIZED_DTYPES = ("float8_e4m3fn", "int8", "uint8")  # older writers store float8 as int8
SUPPORTED_QUANTIZATION = (None, "FP8")


class CheckpointFolder:
    """A plain checkpoint: its config.json as it is, and each rank's file."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise SpecDecError(
                f"--base-model-checkpoint-dir {path} is not a folder", "check the path"
            )
        self.path = path
        self.config = read_json(path / "config.json")
        checkpoint = parse_checkpoint_config(self.config)
        if checkpoint.method is not None:
            raise SpecDecError(
                f"{path} already holds a {checkpoint.method.name} drafter",
                "give the checkpoint of the target alone",
            )
        # A shared head is written out: a drafter's engine reads it under its own name.
        self.model: ModelConfig = dataclasses.replace(checkpoint.model, share_embedding_table=False)
        quantization = self.config.get("quantization")
        algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
        if algorithm not in SUPPORTED_QUANTIZATION:
            raise SpecDecError(
                f"{path} is quantized with {algorithm}",
                "this release takes unquantized and FP8 checkpoints; other kinds come later",
            )
        self.is_quantized = algorithm is not None
        self.ranks = self._open_ranks()

    @property
    def files(self) -> list[Path]:
        return [self.path / "config.json", *(rank.path for rank in self.ranks)]

    @property
    def is_head_quantized(self) -> bool:
        """Whether the head's weights are stored in a quantized type."""
        info = self.ranks[0].tensors.get(HEAD)
        return info is not None and info.dtype in QUANTIZED_DTYPES

    def plan(self, problems: Problems) -> list[RankPlan]:
        """Plan to pass every rank's tensors on as they are; append what is wrong with them."""
        check_num_layers(self.model.num_hidden_layers, self.ranks[0])
        specs = list_target_tensors(self.model)
        return [
            self._plan_rank(rank, file, specs, problems) for rank, file in enumerate(self.ranks)
        ]

    def _open_ranks(self) -> list[TensorFile]:
        tp_size = self.model.tp_size
        present = {path.name for path in self.path.glob("rank*.safetensors")}
        # A few more than are there are enough to tell what is absent.
        wanted = [f"rank{rank}.safetensors" for rank in range(min(tp_size, len(present) + 10))]
        absent = [name for name in wanted if name not in present]
        surplus = sorted(present - set(wanted))
        problems = []
        if absent:
            problems.append(
                (
                    f"{self.path} has tp_size {tp_size} but lacks {join_names(absent)}",
                    "copy the folder again",
                )
            )
        if surplus:
            problems.append(
                (
                    f"{self.path} has tp_size {tp_size} but also holds {join_names(surplus)}",
                    "its config.json belongs to another conversion: copy the folder again",
                )
            )
        raise_problems(problems)
        return [TensorFile(self.path / name) for name in wanted]

    def _plan_rank(
        self, rank: int, file: TensorFile, specs: dict[str, TensorSpec], problems: Problems
    ) -> RankPlan:
        tensors: RankPlan = {}
        missing, wrong = [], []
        for name, spec in specs.items():
            info = file.tensors.get(name)
            if info is None:
                shared = self._share_embedding(rank, file) if name == HEAD else None
                if shared is None:
                    missing.append(name)
                else:
                    tensors[name] = shared
                continue
            expected = get_rank_shape(spec, self.model)
            if info.shape != expected:
                wrong.append(f"{name} has shape {list(info.shape)}, not {list(expected)}")
            elif not self._suits(name, info):
                wrong.append(f"{name} is {info.dtype}, config.json says {self.model.dtype}")
            else:
                tensors[name] = pass_on(file, name)
        unread = []
        for name in file.tensors:
            if name in specs or name.rpartition(".")[2].removesuffix("_local") in ROTARY_BUFFERS:
                continue
            if self.is_quantized and self._is_scale(name, specs):
                tensors[name] = pass_on(file, name)
            else:
                unread.append(name)
        for name, info in file.tensors.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and info.dtype in QUANTIZED_DTYPES and self.is_quantized:
                missing += [f"{module}.{s}" for s in SCALES if f"{module}.{s}" not in tensors]
        report_missing(file, missing, problems)
        report_unread(file, unread, problems)
        if wrong:
            problems.append(
                (
                    f"{file.path}: {count(wrong, 'tensor')} at odds with config.json:"
                    f" {join_names(wrong)}",
                    "take both from the same conversion",
                )
            )
        return tensors

    def _suits(self, name: str, info: TensorInfo) -> bool:
        if info.dtype == self.model.dtype:
            return True
        is_matrix = name.endswith(".weight") and len(info.shape) == 2
        return self.is_quantized and is_matrix and info.dtype in QUANTIZED_DTYPES

    @staticmethod
    def _is_scale(name: str, specs: dict[str, TensorSpec]) -> bool:
        module, _, kind = name.rpartition(".")
        if kind in KV_SCALES:
            return f"{module}.qkv.weight" in specs
        return kind in SCALES and f"{module}.weight" in specs

    def _share_embedding(self, rank: int, file: TensorFile) -> PlannedTensor | None:
        """Return the head's part of an embedding table that 0.14 stored once for both."""
        info = file.tensors.get(EMBEDDING)
        spec = list_target_tensors(self.model)[EMBEDDING]
        if not self.config.get("share_embedding_table") or info is None:
            return None
        head = TensorSpec(spec.shape, Shard.VOCAB)
        shape = get_rank_shape(head, self.model)
        if spec.shard is Shard.WHOLE:
            blocks = list_blocks(head, self.model, rank)
        elif spec.shard is Shard.VOCAB:
            blocks = [Block(0, shape[0])]
        else:  # a part of every column is no part of the head
            return None
        pieces = tuple(Piece(file, EMBEDDING, block) for block in blocks)
        return PlannedTensor(TensorInfo(info.dtype, shape), pieces)


def pass_on(file: TensorFile, name: str) -> PlannedTensor:
    """Plan a tensor that is copied as it is."""
    info = file.tensors[name]
    block = Block(0, info.shape[0]) if info.shape else None
    return PlannedTensor(info, (Piece(file, name, block),))
