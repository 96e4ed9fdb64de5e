"""An existing checkpoint, of ours or TensorRT-LLM's, as the target that a drafter is added to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.checkpoint.config import find_shared_head, parse_checkpoint_config
from specdec.checkpoint.inventory import compare_tensors, find_rank_files
from specdec.errors import Problems, SpecDecError, count, join_names
from specdec.files.folders import CHECKPOINT, expect_folder
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.model.config import ModelConfig
from specdec.model.int4 import INT4_GROUPS
from specdec.model.quantization import ALGORITHMS, FLOAT8_STORAGE
from specdec.model.sharding import Block, list_blocks
from specdec.model.tensors import (
    EMBEDDING,
    HEAD,
    Shard,
    TensorSpec,
    get_rank_shape,
    get_stored_dtype,
    list_target_tensors,
)

from .plan import (
    PlannedTensor,
    RankPlan,
    SourceSlice,
    check_num_layers,
    report_missing,
    report_unread,
)

SUPPORTED_QUANTIZATION = (None, *ALGORITHMS, INT4_GROUPS)


class CheckpointFolder:
    """A plain checkpoint: its config.json as it is, and each rank's file."""

    def __init__(self, path: Path) -> None:
        expect_folder(path, CHECKPOINT, "--base-model-checkpoint-dir")
        self.path = path
        self.config = read_json(path / "config.json")
        shared_head = find_shared_head(path, self.config)
        checkpoint = parse_checkpoint_config(self.config | shared_head)
        if checkpoint.method is not None:
            raise SpecDecError(
                f"{path} already holds a {checkpoint.method.name} drafter",
                "give the checkpoint of the target alone",
            )
        if checkpoint.model.pp_size > 1:
            raise SpecDecError(
                f"{path} has pp_size={checkpoint.model.pp_size}; speculative engines have no"
                " pipeline stages",
                "convert the target again without --pp-size",
            )
        # A shared head is written out: a drafter's engine reads it under its own name.
        self.model: ModelConfig = dataclasses.replace(checkpoint.model, share_embedding_table=False)
        algorithm = checkpoint.quantization.quant_algo
        if algorithm not in SUPPORTED_QUANTIZATION:
            raise SpecDecError(
                f"{path} is quantized with {algorithm}",
                "convert the model that it was made from; taken are unquantized checkpoints and"
                f" those of {', '.join(filter(None, SUPPORTED_QUANTIZATION))}",
            )
        self.quantization = checkpoint.quantization
        tp_size = self.model.tp_size
        paths, problems = find_rank_files(path, tp_size, f"tp_size {tp_size}")
        problems.raise_all()
        self.ranks = [TensorFile(path) for path in paths]
        # Where its absence alone tells that the head is shared, no rank may have a part of it.
        self.is_head_shared = checkpoint.model.share_embedding_table and not (
            shared_head and any(HEAD in rank.tensors for rank in self.ranks)
        )

    @property
    def files(self) -> list[Path]:
        return [self.path / "config.json", *(rank.path for rank in self.ranks)]

    @property
    def is_head_quantized(self) -> bool:
        """Return whether the head's weights are stored in a quantized type."""
        info = self.ranks[0].tensors.get(HEAD)
        return info is not None and info.dtype in FLOAT8_STORAGE

    def plan(self, problems: Problems) -> list[RankPlan]:
        """Plan to pass every rank's tensors on as they are; append what is wrong with them."""
        check_num_layers(self.model.num_hidden_layers, self.ranks[0])
        specs = list_target_tensors(self.model)
        return [
            self._plan_rank(rank, file, specs, problems) for rank, file in enumerate(self.ranks)
        ]

    def _plan_rank(
        self, rank: int, file: TensorFile, specs: dict[str, TensorSpec], problems: Problems
    ) -> RankPlan:
        dtype = self.model.dtype
        expected = {
            name: TensorInfo(get_stored_dtype(name, dtype), get_rank_shape(spec, self.model))
            for name, spec in specs.items()
        }
        comparison = compare_tensors(file.tensors, expected, self.quantization)
        tensors = {}
        for name in (*comparison.matching_tensors, *comparison.scales):  # copied as they are
            info = file.tensors[name]
            tensors[name] = PlannedTensor(info, (SourceSlice(file, name, Block(0, info.num_rows)),))
        missing_names = list(comparison.missing_tensors)
        if HEAD in missing_names and (head := self._share_embedding(rank, file)):
            tensors[HEAD] = head
            missing_names.remove(HEAD)
        report_missing(file, missing_names, problems)
        report_unread(file, comparison.unread_tensors, problems)
        if comparison.mismatches:
            problems.add(
                f"{file.path}: {count(len(comparison.mismatches), 'tensor')} at odds with"
                f" config.json: {join_names(comparison.mismatches)}",
                "take both from the same conversion",
            )
        return tensors

    def _share_embedding(self, rank: int, file: TensorFile) -> PlannedTensor | None:
        """Return the head's rows of an embedding table that is stored once for both."""
        info = file.tensors.get(EMBEDDING)
        spec = list_target_tensors(self.model)[EMBEDDING]
        if not self.is_head_shared or info is None:
            return None
        head = TensorSpec(spec.shape, Shard.VOCAB)
        shape = get_rank_shape(head, self.model)
        if spec.shard is Shard.REPLICATED:
            blocks = list_blocks(head, self.model, rank)
        elif spec.shard is Shard.VOCAB:
            blocks = [Block(0, shape[0])]
        else:  # a part of every column is no part of the head
            return None
        slices = tuple(SourceSlice(file, EMBEDDING, block) for block in blocks)
        return PlannedTensor(TensorInfo(info.dtype, shape), slices)
