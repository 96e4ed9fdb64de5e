"""Flags of specdec-train that contradict one another, have no effect, or name a wrong folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from specdec.command.settings import require
from specdec.errors import SpecDecError, UsageError
from specdec.files.staging import check_output_dir, list_local
from specdec.methods import METHODS
from specdec.methods.eagle import Eagle3Params, EagleTrain
from specdec.options import Contradiction, list_given, name_flag, refuse_contradictions
from specdec.system.logs import get_launched_rank
from specdec.text.documents import check_data_file

from .settings import TRAINABLE, TrainSettings
from .setup import list_inputs, read_bytes
from .tracker import check_tracker

# Variables that accelerate's launcher sets for options that change a training.
LAUNCHER_VARIABLES = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND",
)  # fmt: skip


def check_settings(settings: TrainSettings) -> None:
    """Raise the errors of the settings that show before anything is loaded."""
    refuse_launcher(os.environ)
    is_dry = settings.sanity or settings.plan
    require(settings, "model_dir", "data", *([] if is_dry else ["output_dir"]))
    for name in TRAINABLE:
        useless_options = list_given(settings, METHODS[name].options["train"])
        if useless_options and name != settings.method:
            raise UsageError(
                f"{name_flag(useless_options[0])} has no effect with --method {settings.method}",
                "leave it out",
            )
    refuse_contradictions(settings, CONTRADICTIONS)
    check_tracker(settings.tracker)
    check_data_file(settings.data, "--data")
    if settings.eval_data is not None:
        check_data_file(settings.eval_data, "--eval-data")
    if settings.start_from is not None and not settings.start_from.is_dir():
        raise SpecDecError(
            f"--start-from {settings.start_from} is no folder", "give one that specdec-train wrote"
        )
    if not is_dry:
        check_folders(settings)


def check_folders(settings: TrainSettings) -> None:
    """Raise where an output folder may not be written, or holds an unfinished training."""
    from .state import TrainingState

    states = settings.hidden_states_dir
    if states is not None:
        paths = [states.resolve(), settings.output_dir.resolve()]
        if paths[0] in (paths[1], *paths[1].parents) or paths[1] in paths[0].parents:
            raise UsageError(
                f"--hidden-states-dir {states} and --output-dir {settings.output_dir} are one"
                " folder, or one lies in the other",
                "name two folders side by side",
            )
    inputs = [*list_inputs(settings), *list_local(states)]
    # Only the writer: other processes may see this training's new folder.
    if (get_launched_rank() or 0) == 0:
        TrainingState(settings.output_dir).refuse_unfinished(
            resume=settings.resume, force=settings.force
        )
    check_output_dir(settings.output_dir, force=settings.force, inputs=inputs)


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """Raise UsageError where accelerate was launched with options that have no effect here."""
    for name in LAUNCHER_VARIABLES:
        value = environment.get(name, "no").lower()
        if value not in ("no", "false", "0", ""):
            option = "--" + name.removeprefix("ACCELERATE_").lower()
            raise UsageError(
                f"accelerate was launched with {option} ({name}={value}), which has no effect here",
                "launch with torchrun --nproc-per-node N $(which specdec-train) ...; --shard-target"
                " and --shard-drafter split what does not fit, --dtype says what to compute in",
            )


def find_decay(settings: TrainSettings) -> str | None:
    """Return the flag of the method's loss decay, where it was given another value."""
    name = f"{settings.method}_loss_decay"
    options = METHODS[settings.method].options["train"]
    return name_flag(name) if name in list_given(settings, options) else None


def is_size(text: str) -> bool:
    """Return whether a text is a number of tokens, of at least 1."""
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0


EAGLE1_OPTIONS = ("eagle_token_weight", "eagle_noise", "eagle_bias")
EAGLE3_OPTIONS = (*Eagle3Params.NEWER, "draft_vocab_size", "parallel", "mask_token_id")
CONTRADICTIONS: tuple[Contradiction, ...] = (
    (
        lambda s: s.plan and s.sanity, "both --plan and --sanity are given", "give one of them",
    ),
    (
        lambda s: s.tracker is not None and (s.plan or s.sanity),
        "--tracker {tracker} with --plan or --sanity, which log nothing", "leave it out",
    ),
    (
        lambda s: s.max_steps is not None and s.num_epochs is not None,
        "both --max-steps and --num-epochs are given", "give one of them",
    ),
    (
        lambda s: s.num_epochs == 0, "--num-epochs is 0",
        "nothing would be learned: give more than 0",
    ),
    (
        lambda s: s.learning_rate == 0, "--learning-rate is 0",
        "nothing would be learned: give more than 0",
    ),
    (
        lambda s: s.hidden_states_dtype != "auto" and s.hidden_states_dir is None,
        "--hidden-states-dtype {hidden_states_dtype} without --hidden-states-dir: none are kept",
        "name a folder with --hidden-states-dir, or leave the type out",
    ),
    (
        lambda s: s.max_disk is not None and s.hidden_states_dir is None,
        "--max-disk {max_disk} without --hidden-states-dir: no states are kept",
        "name a folder with --hidden-states-dir, or leave it out",
    ),
    (
        lambda s: s.max_disk is not None and read_bytes(s.max_disk) is None,
        "--max-disk is {max_disk!r}", "give a number of bytes, such as 500GB, 1.5TB or 64GiB",
    ),
    (
        lambda s: s.max_disk is not None and s.shard_target,
        "--max-disk with --shard-target: processes that share a target read it equally often, which"
        " those of kept states do not",
        "leave one of them out",
    ),
    (
        lambda s: s.hidden_states_layers is not None and s.hidden_states_from is None,
        "--hidden-states-layers without --hidden-states-from: the target is run here",
        "give the server or folder of the states, or leave the layers out",
    ),
    (
        lambda s: s.hidden_states_from is not None and s.shard_target,
        "--shard-target with --hidden-states-from: no layers are loaded that could be split",
        "leave one of them out",
    ),
    (
        lambda s: s.hidden_states_from and s.eval_prompts and not (s.sanity or s.plan),
        "--hidden-states-from with --eval-prompts {eval_prompts}: an engine's acceptance needs the"
        " target's layers, which are not loaded",
        "give --eval-prompts 0, and measure the drafter where the target runs",
    ),
    (
        lambda s: s.muon_learning_rate is not None and s.optimizer != "muon",
        "--muon-learning-rate has no effect with --optimizer {optimizer}", "leave one of them out",
    ),
    (
        lambda s: s.muon_learning_rate == 0, "--muon-learning-rate is 0",
        "most weights would learn nothing: give more than 0",
    ),
    (lambda s: s.warmup_ratio > 1, "--warmup-ratio is {warmup_ratio:g}", "give 0 to 1"),
    (
        lambda s: s.self_distillation > 1, "--self-distillation is {self_distillation:g}",
        "give a share, 0 to 1",
    ),
    (
        lambda s: s.loss != "kl" and not s.self_distillation,
        "--loss {loss} with --self-distillation {self_distillation:g}: it is a loss from the"
        " target's distribution, of which nothing would be learned",
        "give --self-distillation 1, or leave --loss out",
    ),
    (
        lambda s: s.depth_weighting != "decay" and find_decay(s),
        "{found} has no effect with --depth-weighting {depth_weighting}", "leave one of them out",
    ),
    (
        lambda s: s.stop_at_acceptance is not None and not s.eval_prompts,
        "--stop-at-acceptance without --eval-prompts: no acceptance is measured",
        "give --eval-prompts more than 0",
    ),
    *(
        (
            lambda s, name=f"eagle_{name}": (
                s.eagle_version == "1" and getattr(s, name) not in (None, False, "auto")
            ),
            f"{name_flag(f'eagle_{name}')} is for EAGLE-3",
            f"give --eagle-version 3, or leave {name_flag(f'eagle_{name}')} out",
        )
        for name in EAGLE3_OPTIONS
    ),
    (
        lambda s: s.eagle_version == "3" and next(
            map(name_flag, (n for n in EAGLE1_OPTIONS if n in list_given(s, EagleTrain))), None
        ),
        "{found} is for EAGLE-1",
        "give --eagle-version 1, or leave {found} out",
    ),
    (
        lambda s: s.eagle_mask_token_id is not None and not s.eagle_parallel,
        "--eagle-mask-token-id is {eagle_mask_token_id} without --eagle-parallel",
        "give both, or leave the token out",
    ),
    (
        lambda s: not is_size(size := s.eagle_draft_vocab_size) and size not in ("auto", "full"),
        "--eagle-draft-vocab-size is {eagle_draft_vocab_size!r}",
        "give auto, full, or a number of tokens of at least 1",
    ),
    (
        lambda s: is_size(s.eagle_draft_vocab_size) and s.self_distillation != 1,
        "--eagle-draft-vocab-size with --self-distillation {self_distillation:g}: a text has"
        " tokens that are not drafted",
        "give --self-distillation 1, or leave one of the two out",
    ),
    (
        lambda s: s.eagle_norm_before_fc and s.eagle_fc_norm,
        "--eagle-norm-before-fc and --eagle-fc-norm are both given", "give one of them",
    ),
)  # fmt: skip
