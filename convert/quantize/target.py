"""A Hugging Face target that is quantized on its way: its flags, calibration rows and plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.documents import check_data_file
from specdec.errors import UsageError
from specdec.files.tensor_file import DTYPES
from specdec.model.config import ModelConfig

from ..hf import HfFolder
from ..plan import Part, RankPlan, count_elements
from ..settings import ConvertSettings
from . import calibration
from .scales import Quantizer, name_kv_scales, plan_quantizer, quantize_config

CALIBRATION_FLAGS = (
    "calibration_data", "calib_size", "calib_batch_size", "calib_max_seq_length", "calib_device",
)  # fmt: skip


def check_flags(settings: ConvertSettings) -> None:
    """Raise UsageError for quantization flags that lack one another or a Hugging Face target."""
    if settings.quantization is None:
        for name in ("kv_cache_dtype", *CALIBRATION_FLAGS):
            if getattr(settings, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect without --quantization",
                    "give --quantization fp8, or leave the option out",
                )
        return
    if settings.base_model_checkpoint_dir is not None:
        raise UsageError(
            "--quantization takes a Hugging Face target, not --base-model-checkpoint-dir",
            "give the target as --model-dir: the calibration runs it with transformers",
        )
    if settings.calibration_data is None:
        raise UsageError(
            f"--quantization {settings.quantization} without --calibration-data",
            "give a .txt or .jsonl file of texts like those to be decoded: the activation scales"
            " come from them",
        )
    check_data_file(settings.calibration_data, "--calibration-data")


def quantize_target(
    settings: ConvertSettings,
    folder: HfFolder,
    model: ModelConfig,
    sources: Mapping[str, tuple[Part, ...]],
    ranks: Sequence[RankPlan],
    config: Mapping[str, Any],
) -> tuple[list[RankPlan], dict[str, Any], Quantizer]:
    """Plan a target's FP8 form; return its ranks, its config.json, and what finds the scales."""
    assert settings.calibration_data is not None
    assert settings.model_dir is not None
    device = calibration.choose_device(settings.calib_device or "auto")
    itemsize = np.dtype(DTYPES[model.dtype][1]).itemsize
    num_bytes = itemsize * sum(count_elements(info) for info in folder.tensors.values())
    calibration.check_memory(num_bytes, device, folder.path)
    rows = calibration.read_rows(
        settings.calibration_data,
        functools.partial(calibration.load_model_tokenizer, settings.model_dir),
        size=settings.calib_size,
        max_length=min(
            settings.calib_max_seq_length or calibration.DEFAULT_MAX_LENGTH,
            model.max_position_embeddings,
        ),
        vocab_size=model.vocab_size,
    )
    kv_scales = name_kv_scales(settings.trtllm_version) if settings.kv_cache_dtype else ()
    quantized, quantizer = plan_quantizer(
        ranks,
        sources,
        model,
        model_dir=folder.path,
        kv_scales=kv_scales,
        calibrate=functools.partial(
            calibration.observe,
            folder.path,
            rows,
            dtype=model.dtype,
            device=device,
            batch_size=settings.calib_batch_size or 1,
        ),
    )
    return quantized, quantize_config(config, has_kv_scales=bool(kv_scales)), quantizer
