"""Settings of specdec-verify."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.errors import UsageError
from specdec.methods import list_options
from specdec.methods.draft_target import DraftTargetDraft
from specdec.settings import add_options, get_flags, list_given, name_flag, require, setting

# What each claim alone reads; `sampling` joins the engine's.
CHECKPOINT_FLAGS = ("checkpoint_dir", "workers")
SAMPLING_FLAGS = ("num_samples", "temperature", "top_k", "random_seed")
SHARED_FLAGS = ("json",)


@add_options(*list_options("draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """One field is one flag."""

    checkpoint_dir: Path | None = setting(
        kind="path", metavar="CKPT", help="Checkpoint folder to check, file by file."
    )
    workers: int | None = setting(
        kind="int", minimum=1, metavar="N",
        help="Files hashed at a time; one per processor core if not given.",
    )  # fmt: skip
    engine_dir: Path | None = setting(
        kind="path", metavar="ENGINE", help="Engine whose output is compared with its model's."
    )
    model_dir: str | None = setting(
        metavar="HF", help="Folder or hub id of the base model that the engine was made from."
    )
    acceptance: str = setting(
        "exact", choices=("exact", "typical"), hidden=True, help="typical is refused: it is lossy."
    )
    verify_hashes: bool = setting(
        False, kind="flag", help="Compare every byte of the engine with its manifest first."
    )
    prompts: Path | None = setting(
        kind="path", metavar="FILE",
        help="Prompts, .txt or .jsonl as for specdec-run; a small set of its own if not given.",
    )  # fmt: skip
    max_output_len: int = setting(
        64, kind="int", minimum=1, metavar="N", help="New tokens compared a prompt."
    )
    num_alone: int = setting(
        2, kind="int", minimum=0, metavar="N",
        help="Prompts that are also run one at a time, to compare with the batch.",
    )  # fmt: skip
    sampling: bool = setting(
        False, kind="flag", help="Also test sampled text against the model's exact distribution."
    )
    num_samples: int = setting(
        1000, kind="int", minimum=100, metavar="N", help="Sampling: requests a prompt."
    )
    temperature: float = setting(
        1.0, kind="float", metavar="T", help="Sampling: the requests' temperature."
    )
    top_k: int = setting(4, kind="int", minimum=2, help="Sampling: the requests' top-k.")
    random_seed: int = setting(
        0, kind="int", minimum=0, metavar="S", help="Sampling: the first request's seed."
    )
    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="Where engine and model are run."
    )
    json: bool = setting(False, kind="flag", help="Print one JSON object on stdout.")


def check_flags(settings: VerifySettings) -> None:
    """Raise UsageError for flags that are missing, contradict one another, or have no effect."""
    flags = get_flags(VerifySettings)
    given = [name for name, (_, default) in flags.items() if getattr(settings, name) != default]
    if settings.checkpoint_dir is not None or not {"engine_dir", "model_dir"} & set(given):
        _refuse(given, set(CHECKPOINT_FLAGS + SHARED_FLAGS), "--checkpoint-dir, a claim of its own")
        if settings.checkpoint_dir is None:
            raise UsageError(
                "missing --checkpoint-dir, or --engine-dir and --model-dir",
                "name the checkpoint or the engine to verify",
            )
        return
    require(settings, "engine_dir", "model_dir")
    if settings.acceptance != "exact":
        raise UsageError(
            "--acceptance typical gives up the target's distribution, so that it can have no proof;"
            " greedy text is exact with it too",
            "leave it out: what is verified is the engine with exact acceptance",
        )
    _refuse(given, set(flags) - set(CHECKPOINT_FLAGS), "--engine-dir")
    if not settings.sampling:
        _refuse(given, set(flags) - set(SAMPLING_FLAGS), "greedy text alone: --sampling is absent")
    if not 0 < settings.temperature < 100:
        raise UsageError(
            f"--temperature is {settings.temperature:g}", "give a number above 0 and below 100"
        )
    pair_flags = list_given(settings, DraftTargetDraft)
    if pair_flags and "draft_engine_dir" not in pair_flags:
        raise UsageError(
            f"{name_flag(pair_flags[0])} without --draft-engine-dir",
            "give the draft model's engine",
        )


def _refuse(given: list[str], allowed: set[str], what: str) -> None:
    useless = ["--" + name.replace("_", "-") for name in given if name not in allowed]
    if useless:
        raise UsageError(f"{', '.join(useless)}: no effect with {what}", "leave it out")
