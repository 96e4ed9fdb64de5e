"""Flags of specdec-convert that are missing, contradict one another, or have no effect."""

from __future__ import annotations

from specdec.command.settings import require
from specdec.options import Contradiction, find_given, list_given, name_flag, refuse_contradictions
from specdec.text.documents import check_data_file

from .methods import FOLDERS, find_folder
from .quantize.formats import FORMATS
from .settings import ConvertSettings

CALIBRATION = (
    "calibration_data", "calib_size", "calib_batch_size", "calib_max_seq_length", "calib_device",
)  # fmt: skip
SETTINGS_OF_QUANTIZATION = ("kv_cache_dtype", "group_size", *CALIBRATION)


def check_settings(settings: ConvertSettings) -> None:
    """Raise UsageError for flags that cannot be obeyed together; read no model."""
    require(settings)
    refuse_contradictions(settings, CONTRADICTIONS)
    if settings.calibration_data is not None:
        check_data_file(settings.calibration_data, "--calibration-data")


def _find_two_drafters(settings: ConvertSettings) -> str | None:
    flags = [name_flag(option) for option in FOLDERS if getattr(settings, option) is not None]
    return " and ".join(flags) if len(flags) > 1 else None


def _find_other_methods(settings: ConvertSettings) -> str | None:
    """Return a method's option that is given without its drafter, and that drafter's flag."""
    for folder, method in FOLDERS.items():
        useless = list_given(settings, method.options["convert"])
        if useless and getattr(settings, folder) is None:
            return f"{name_flag(useless[0])} has no effect without {name_flag(folder)}"
    return None


def _list_group_sizes(settings: ConvertSettings) -> tuple[int, ...]:
    """Return the group sizes that the format offers."""
    name = settings.quantization
    return FORMATS[name].algorithm.group_sizes if name is not None else ()


def _calibrates(settings: ConvertSettings) -> bool:
    name = settings.quantization
    return name is not None and (FORMATS[name].needs_data or settings.kv_cache_dtype is not None)


CONTRADICTIONS: tuple[Contradiction, ...] = (
    # ---- The models.
    (
        lambda s: s.model_dir is not None and s.base_model_checkpoint_dir is not None,
        "--model-dir and --base-model-checkpoint-dir are both given", "give one of them",
    ),
    (
        lambda s: s.model_dir is None and s.base_model_checkpoint_dir is None,
        "missing --model-dir",
        "give the target: --model-dir, or --base-model-checkpoint-dir for an existing checkpoint",
    ),
    (
        _find_two_drafters,
        "{found} are both given", "a checkpoint holds one drafter: give one of them",
    ),
    (
        lambda s: s.speculative_decoding_mode
        and find_given(s, "base_model_checkpoint_dir", *(f for f in FOLDERS if "mtp" not in f)),
        "{found} and --speculative-decoding-mode mtp, which takes the head in --model-dir, are both"
        " given", "leave one of them out",
    ),
    (
        _find_other_methods,
        "{found}", "give the drafter's folder, or leave the option out",
    ),
    (
        lambda s: s.base_model_checkpoint_dir is not None and find_folder(s) is None,
        "--base-model-checkpoint-dir without a drafter leaves nothing to convert",
        f"give the drafter to add to the checkpoint: {' or '.join(map(name_flag, FOLDERS))}",
    ),
    (
        lambda s: s.lora_dir is not None and s.base_model_checkpoint_dir is not None,
        "--lora-dir adds to a Hugging Face model, not to --base-model-checkpoint-dir",
        "give the model as --model-dir",
    ),
    (
        lambda s: s.lora_dir is not None and s.quantization is not None,
        "--lora-dir and --quantization are both given, and the calibration runs the model without"
        " the adapter",
        "quantize with specdec-build --quantization int8|int4; or merge the adapter with PEFT's"
        " merge_and_unload, and convert what its save_pretrained writes",
    ),
    # ---- Quantization.
    (
        lambda s: not s.quantization and find_given(s, *SETTINGS_OF_QUANTIZATION),
        "{found} has no effect without --quantization",
        "give --quantization fp8, or leave the option out",
    ),
    (
        lambda s: s.quantization is not None and s.base_model_checkpoint_dir is not None,
        "--quantization takes a Hugging Face target, not --base-model-checkpoint-dir",
        "give the target as --model-dir: the calibration runs it with transformers",
    ),
    (
        lambda s: s.group_size is not None and len(_list_group_sizes(s)) < 2,
        "--group-size has no effect with --quantization {quantization}: there is nothing to choose",
        "leave it out",
    ),
    (
        lambda s: s.group_size not in (None, *_list_group_sizes(s)) and _list_group_sizes(s),
        "--group-size is {group_size}; --quantization {quantization} has groups of {found[0]},"
        " {found[1]}, {found[2]}",
        "give {found[2]}, or leave it out",
    ),
    (
        lambda s: s.quantization and not _calibrates(s) and find_given(s, *CALIBRATION),
        "{found} has no effect: --quantization {quantization} needs no calibration",
        "leave it out, or give --kv-cache-dtype fp8, which does",
    ),
    (
        lambda s: _calibrates(s) and s.calibration_data is None,
        "--quantization {quantization} without --calibration-data",
        "give a .txt, .jsonl or .json file of texts like those to be decoded: the scales come from"
        " them",
    ),
    # ---- The ranks' layout.
    (
        lambda s: find_folder(s) is not None and (s.pp_size or 1) > 1,
        "--pp-size is {pp_size}, but an engine with a drafter has no pipeline stages",
        "use --tp-size, or leave --pp-size out",
    ),
    (
        lambda s: s.use_embedding_sharing and s.line != "0.14" and s.line,
        "--use-embedding-sharing is not for --trtllm-version {found}: since 0.16,"
        " TensorRT-LLM itself shares a head that equals the embedding",
        "leave it out, or convert for 0.14",
    ),
    (
        lambda s: s.use_embedding_sharing
        and (s.base_model_checkpoint_dir is not None or find_folder(s) == "drafter_model_dir"),
        "--use-embedding-sharing has no effect on a checkpoint with a ReDrafter drafter or made"
        " from another one: their head is always written", "leave it out",
    ),
    (
        lambda s: s.base_model_checkpoint_dir and find_given(s, "moe_tp_size", "moe_ep_size"),
        "--moe-tp-size and --moe-ep-size have no effect with --base-model-checkpoint-dir",
        "leave them out: the checkpoint's experts stay as they are split",
    ),
    (
        lambda s: s.embedding_sharding_dim not in (None, 0, 1),
        "--embedding-sharding-dim is {embedding_sharding_dim}",
        "give 0 (vocabulary) or 1 (hidden size)",
    ),
    (
        lambda s: s.embedding_sharding_dim is not None and not s.use_parallel_embedding,
        "--embedding-sharding-dim has no effect without --use-parallel-embedding",
        "give both, or neither",
    ),
)  # fmt: skip
