"""What `accelerate launch` asked for: FSDP and DeepSpeed in the meaning they have here.

The launcher speaks through the environment. What it asks to split is split by torch's `fully_shard`
(see sharding.py); accelerate and DeepSpeed's own engines would take drafter and frozen target for
one model that is trained. So the environment is taken here, before accelerate sees it, and a
setting that nothing here obeys is refused by its name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from specdec.command.settings import name_flag
from specdec.errors import UsageError
from specdec.files.reading import read_json

from .settings import TrainSettings

ACCELERATE = "ACCELERATE_"
FSDP = "FSDP_"
DEEPSPEED = "ACCELERATE_DEEPSPEED_"
NOT_HERE = "leave it out, or let it be {}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """What the processes divide among them; the rest each of them holds whole.

    drafter: its weights between the steps, its gradients and its optimizer's numbers. regathers:
    its weights are put together for the forward and again for the backward pass. adds_up_first:
    gradients stay whole until a step's last pass. takes_turns: only one process at a time loads the
    target. layer_class: what the target's layers have to be.
    """

    asked_by: str = ""
    target: bool = False
    drafter: bool = False
    regathers: bool = True
    adds_up_first: bool = False
    takes_turns: bool = False
    layer_class: str | None = None


def take_launch(
    settings: TrainSettings, environment: MutableMapping[str, str] = os.environ
) -> tuple[TrainSettings, Split]:
    """Return the settings with the launcher's, and what is to be split; raise UsageError.

    The variables of FSDP and DeepSpeed are removed: transformers too would act on them.
    """
    for name, option in (
        ("USE_MEGATRON_LM", "Megatron-LM"),
        ("USE_PARALLELISM_CONFIG", "--use_parallelism_config"),
    ):
        if _is_true(environment.get(ACCELERATE + name)):
            raise UsageError(
                f"accelerate was launched with {option}, which cannot train a drafter here",
                "launch with --multi_gpu, --use_fsdp --fsdp_version 2 or --use_deepspeed",
            )
    uses_fsdp = _is_true(environment.get("ACCELERATE_USE_FSDP"))
    uses_deepspeed = _is_true(environment.get("ACCELERATE_USE_DEEPSPEED"))
    settings = _take_precision(settings, environment.get("ACCELERATE_MIXED_PRECISION", "no"))
    split = Split()
    if uses_fsdp:
        split = read_fsdp(environment)
    elif uses_deepspeed:
        settings, split = read_deepspeed(settings, environment)
    if split.asked_by and environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise UsageError(
            f"accelerate was launched with --dynamo_backend and {split.asked_by}",
            "leave out --dynamo_backend: what is split is not compiled",
        )
    if settings.shard_target and not split.target:
        split = dataclasses.replace(split, target=True, asked_by=split.asked_by or "--shard-target")
    for name in list(environment):
        if name in TAKEN or uses_fsdp and name.startswith(FSDP) or name.startswith(DEEPSPEED):
            del environment[name]
    return settings, split


TAKEN = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING",
)  # fmt: skip


def _is_true(text: str | None) -> bool:
    return (text or "").lower() in ("true", "1", "yes", "y", "t", "on")


def _take_precision(settings: TrainSettings, wanted: str) -> TrainSettings:
    """`--mixed_precision`; "no" is the launcher's default and says nothing."""
    if wanted == "no":
        return settings
    if wanted != "bf16" or settings.dtype == "float32":
        raise UsageError(
            f"accelerate was launched with --mixed_precision {wanted}, and --dtype is"
            f" {settings.dtype}",
            "leave --mixed_precision out: --dtype bfloat16 or float32 says what to compute in",
        )
    return dataclasses.replace(settings, dtype="bfloat16")


# What the launcher always says, or what means the same as is done here; None: not said.
FSDP_TAKEN: Mapping[str, tuple[str | None, ...]] = {
    "FSDP_SHARDING_STRATEGY": (None, "full_shard", "1"),
    "FSDP_OFFLOAD_PARAMS": (None, "false"),
    "FSDP_AUTO_WRAP_POLICY": (None, "transformer_based_wrap"),
    "FSDP_BACKWARD_PREFETCH": (None, "no_prefetch"),
    "FSDP_STATE_DICT_TYPE": (None, "full_state_dict"),
    "FSDP_FORWARD_PREFETCH": (None, "false"),
    "FSDP_USE_ORIG_PARAMS": (None, "true"),
    "FSDP_SYNC_MODULE_STATES": (None, "true"),
    "FSDP_ACTIVATION_CHECKPOINTING": (None, "false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (None, "false"),
    "FSDP_RESHARD_AFTER_FORWARD": (None, "true", "false"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (None, "true", "false"),
}
FSDP_FREE = ("FSDP_VERSION", "FSDP_MIN_NUM_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP")


def read_fsdp(environment: Mapping[str, str]) -> Split:
    """FSDP version 2: the target's layers and the drafter are split."""
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise UsageError(
            f"accelerate was launched with version {version} of FSDP",
            "launch with --fsdp_version 2",
        )
    for name in sorted(n for n in environment if n.startswith(FSDP)):
        value = environment[name]
        if name in FSDP_FREE:
            continue
        allowed = FSDP_TAKEN.get(name, (None,))
        if value.lower() not in allowed:
            others = [text for text in allowed if text is not None]
            raise UsageError(
                f"--{name.lower()} {value} of accelerate has no effect here",
                NOT_HERE.format(" or ".join(others)) if others else "leave it out",
            )
    regathers = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
    return Split(
        asked_by="--use_fsdp",
        target=regathers,
        drafter=True,
        regathers=regathers,
        takes_turns=regathers and _is_true(environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING")),
        layer_class=environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP"),
    )


# The launcher's options, by DeepSpeed's own names of them in a configuration file.
DEEPSPEED_OPTIONS: Mapping[str, tuple[str, str]] = {
    "zero_optimization.stage": ("--zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
    "zero_optimization.offload_optimizer.device": (
        "--offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    ),
    "zero_optimization.offload_param.device": (
        "--offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "--zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    ),
    "gradient_accumulation_steps": (
        "--gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    "gradient_clipping": ("--gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING"),
    "moe": ("--deepspeed_moe_layer_cls_names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
}  # fmt: skip


def read_deepspeed(
    settings: TrainSettings, environment: Mapping[str, str]
) -> tuple[TrainSettings, Split]:
    """ZeRO's stages: 1 the drafter's optimizer, 2 its gradients too, 3 the target's layers too."""
    wanted: dict[str, tuple[str, Any]] = {
        key: (option, environment[name])
        for key, (option, name) in DEEPSPEED_OPTIONS.items()
        if name in environment
    }
    usual_stage = 2
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path != "none":
        flat = _flatten(read_json(Path(path)))
        wanted = {key: (f"{key} in {path}", value) for key, value in flat}
        usual_stage = 0
    option, value = wanted.pop("zero_optimization.stage", ("--zero_stage", None))
    stage = _take_number(option, value, int)
    stage = usual_stage if stage is None else stage
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"{option} is {stage}", "give 0, 1, 2 or 3")
    changes = _take_amounts(settings, wanted)
    option, value = wanted.pop("bf16.enabled", ("", None))
    if value is True:
        changes["dtype"] = _take_precision(settings, "bf16").dtype
    for option, value in wanted.values():
        if not _is_idle(value):
            raise UsageError(
                f"{option} is {value} for DeepSpeed, which has no effect here",
                "leave it out; specdec-train --help lists what can be set",
            )
    init = environment.get("ACCELERATE_DEEPSPEED_ZERO3_INIT")
    if _is_true(init) and stage != 3:
        raise UsageError(
            f"--zero3_init_flag has no effect with --zero_stage {stage}", "leave it out"
        )
    split = Split(
        asked_by=f"--use_deepspeed --zero_stage {stage}" if stage else "",
        target=stage == 3,
        drafter=stage > 0,
        regathers=stage == 3,
        adds_up_first=stage == 1,
        takes_turns=stage == 3 and (init is None or _is_true(init)),
    )
    return dataclasses.replace(settings, **changes), split


def _is_idle(value: Any) -> bool:
    """Tell whether a value says "no", or "as the program says"."""
    return value is None or value is False or str(value).lower() in ("auto", "none", "false")


def _flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _take_number(option: str, value: Any, kind: Callable[[str], float]) -> Any:
    """The number that an option has; None where it says nothing."""
    if _is_idle(value):
        return None
    try:
        return kind(str(value))
    except ValueError:
        raise UsageError(f"{option} is {value!r}", "give a number") from None


# DeepSpeed's name, ours, its kind, and the launcher's own default, which says nothing.
AMOUNTS: tuple[tuple[str, str, Callable[[str], float], float | None], ...] = (
    ("gradient_accumulation_steps", "gradient_accumulation_steps", int, 1),
    ("gradient_clipping", "max_grad_norm", float, None),
    ("train_micro_batch_size_per_gpu", "batch_size", int, None),
)


def _take_amounts(settings: TrainSettings, wanted: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Remove from `wanted` what our own flags say too; return those that it changes.

    Where our flag has its default the launcher's value counts; where both say something, they have
    to say the same.
    """
    changes: dict[str, Any] = {}
    defaults = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
    for key, name, kind, silent in AMOUNTS:
        option, given = wanted.pop(key, ("", None))
        value, ours = _take_number(option, given, kind), getattr(settings, name)
        if value is None or value in (silent, ours):
            continue
        if ours != defaults[name]:
            raise UsageError(
                f"{option} is {value:g} for DeepSpeed, {name_flag(name)} is {ours:g}",
                "give one of them, or the same to both",
            )
        changes[name] = value
    return changes
