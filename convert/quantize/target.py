"""A Hugging Face target that is quantized on its way: its calibration rows and plan."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.command.settings import need
from specdec.errors import Problems
from specdec.files.tensor_file import DTYPES
from specdec.model.config import ModelConfig
from specdec.model.quantization import FP8
from specdec.model.sharding import Block, list_blocks
from specdec.model.tensors import TensorSpec, list_linears
from specdec.system import logs

from ..hf import HfFolder, TargetTensors
from ..plan import RankPlan
from ..settings import ConvertSettings
from . import calibration
from .formats import FORMATS, Format
from .scales import Quantizer, describe_section, name_kv_scales, plan_quantizer

logger = logs.get_logger(__name__)

SEARCH_SIZE = 128  # rows that a search takes, if not told otherwise
MEASURED_SIZE = 32  # rows to measure on, at most


def quantize_target(
    settings: ConvertSettings, target: TargetTensors, ranks: Sequence[RankPlan]
) -> tuple[list[RankPlan], dict[str, Any], Quantizer]:
    """Plan a target's quantized form.

    Returns its ranks, what config.json says of its quantization, and what finds the scales.
    """
    format_, model = FORMATS[need(settings.quantization)], target.model
    group_size = settings.group_size or format_.group_size
    linears = {name: target.specs[name] for name in map("{}.weight".format, list_linears(model))}
    find_problems(format_, linears, model, group_size).raise_all()
    one_rank = dataclasses.replace(model, tp_size=1, pp_size=1)
    (whole_ranks,) = target.plan(linears, model=one_rank, ignored=("*",))
    kv_scales = name_kv_scales(settings.line) if settings.kv_cache_dtype else ()
    calls: dict[str, Any] = {"calibrate": lambda watches: calibration.Observations({})}
    if settings.calibration_data is not None:
        calls = _prepare_calibration(settings, target.folder, model, format_)
    quantized, quantizer = plan_quantizer(
        target,
        format_,
        ranks,
        whole_ranks,
        group_size=group_size or 0,
        kv_scales=kv_scales,
        **calls,
    )
    section = describe_section(format_, has_kv_scales=bool(kv_scales), group_size=group_size)
    return quantized, section, quantizer


def _prepare_calibration(
    settings: ConvertSettings, folder: HfFolder, model: ModelConfig, format_: Format
) -> dict[str, Any]:
    """Read the calibration's rows; return what calibrates with them and what measures the rest."""
    device = calibration.choose_device(settings.calib_device or "auto")
    itemsize = np.dtype(DTYPES[model.dtype][1]).itemsize
    num_bytes = itemsize * sum(math.prod(info.shape) for info in folder.tensors.values())
    calibration.check_memory(num_bytes, device, folder.path)
    usual_size = SEARCH_SIZE if format_.smooths else calibration.DEFAULT_SIZE
    rows = calibration.read_rows(
        need(settings.calibration_data),
        functools.partial(calibration.load_model_tokenizer, need(settings.model_dir)),
        size=settings.calib_size,
        max_length=min(
            settings.calib_max_seq_length or calibration.DEFAULT_MAX_LENGTH,
            model.max_position_embeddings,
        ),
        vocab_size=model.vocab_size,
        usual_size=usual_size,
        spare=0 if format_.name == FP8 else MEASURED_SIZE,
    )
    held_out_rows: list[list[int]] = []
    if format_.name != FP8:
        rows, held_out_rows = calibration.hold_out(rows, settings.calib_size, usual_size)
    calls: dict[str, Any] = {
        "calibrate": functools.partial(
            calibration.observe,
            folder.path,
            rows,
            dtype=model.dtype,
            device=device,
            batch_size=settings.calib_batch_size or 1,
        )
    }
    if format_.name != FP8 and held_out_rows:
        calls["evaluate"] = functools.partial(
            _evaluate, held_out_rows, dtype=model.dtype, device=device
        )
    elif format_.name != FP8:
        logger.warning(
            "%s has no rows beside the calibration's: what the quantization costs is not measured",
            settings.calibration_data,
        )
    return calls


def _evaluate(rows: Sequence[list[int]], quantizer: Quantizer, **options: Any) -> dict[str, Any]:
    from .evaluate import compare_models

    return compare_models(
        quantizer.model_dir, rows, quantizer.matrices, quantizer.format, quantizer.scales,
        **options,
    )  # fmt: skip


def find_problems(
    format_: Format, linears: Mapping[str, TensorSpec], model: ModelConfig, group_size: int | None
) -> Problems:
    """List what keeps matrices from being stored: rows in pairs, whole groups on every rank."""
    for name, spec in linears.items():
        for block in list_blocks(spec, model, 0):
            if problems := _find_block_problems(format_, name, spec, block, model, group_size):
                return problems  # every layer has the same
    return Problems()


def _find_block_problems(
    format_: Format, name: str, spec: TensorSpec, block: Block, model: ModelConfig,
    group_size: int | None,
) -> Problems:  # fmt: skip
    """List what keeps a rank's block of a matrix from being stored."""
    problems = Problems()
    other_way = "use another --quantization"
    if model.tp_size > 1:
        other_way = "use a smaller --tp-size, or another --quantization"
    first_column, last_column = block.columns or (0, spec.shape[1])
    width = last_column - first_column
    if format_.algorithm.rows == 2 and (block.start % 2 or block.stop % 2):
        problems.add(
            f"{name}: a rank has rows {block.start} to {block.stop}, and four-bit rows are"
            " stored in pairs",
            other_way,
        )
    if group_size is not None and width % group_size:
        fitting_sizes = [size for size in format_.algorithm.group_sizes if not width % size]
        problems.add(
            f"{name}: the {width} columns that a rank has are no multiple of the group size"
            f" {group_size}",
            f"give --group-size {fitting_sizes[-1]}" if fitting_sizes else other_way,
        )
    return problems
