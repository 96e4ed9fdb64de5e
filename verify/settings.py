"""Options of specdec-verify."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from specdec.command.settings import require
from specdec.decode.settings import DecodeSettings
from specdec.methods import list_options
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import (
    Contradiction,
    add_options,
    like,
    list_given,
    name_flag,
    option_group,
    refuse_contradictions,
    setting,
)

CHECKPOINT_FILES = option_group("A checkpoint's files")
ENGINE_TEXT = option_group("An engine's text")
SAMPLING = option_group("Its sampling")

# Options that one claim alone reads; `sampling` adds to the engine's.
CHECKPOINT_FLAGS = ("checkpoint_dir", "workers")
SAMPLING_FLAGS = ("num_samples", "temperature", "top_k", "random_seed")
SHARED_FLAGS = ("json",)


@add_options(*list_options("draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """Options of specdec-verify: each field is a flag."""

    checkpoint_dir: Path | None = CHECKPOINT_FILES(
        metavar="CKPT", help="Checkpoint folder to check, file by file."
    )
    workers: int | None = CHECKPOINT_FILES(
        minimum=1, metavar="N",
        help="Files to hash at the same time; if not given, one for each processor core.",
    )  # fmt: skip
    engine_dir: Path | None = ENGINE_TEXT(
        folder="engine",
        metavar="ENGINE",
        help="The engine whose text is compared with its model's; if not given, the one that"
        " specdec generate makes of the model, or has in its cache.",
    )
    model_dir: str | None = ENGINE_TEXT(
        folder="model",
        metavar="HF",
        help="Folder or Hub id of the base model that the engine was made from.",
    )
    dtype: str = ENGINE_TEXT(
        "auto", choices=("auto", "float16", "bfloat16", "float32"),
        help="Without --engine-dir: type of the engine that is made; auto keeps the model's.",
    )  # fmt: skip
    verify_hashes: bool = ENGINE_TEXT(
        False, help="Compare every byte of the engine with its manifest first."
    )
    prompts: Path | None = ENGINE_TEXT(
        metavar="FILE",
        help="File of prompts, .txt or .jsonl as for specdec-run; a few built-in ones if not"
        " given.",
    )  # fmt: skip
    max_output_len: int = ENGINE_TEXT(
        64, minimum=1, metavar="N", help="New tokens to compare for each prompt."
    )
    no_speculation: bool = like(
        DecodeSettings, "no_speculation",
        "Compare the text of plain decoding; otherwise the engine's drafter drafts in every step,"
        " or suffixes where it has none.",
        group="An engine's text",
    )  # fmt: skip
    num_alone: int = ENGINE_TEXT(
        2, minimum=0, metavar="N",
        help="How many prompts are also run alone, to compare them with the batch.",
    )  # fmt: skip
    sampling: bool = SAMPLING(
        False, help="Also test sampled text against the model's exact distribution."
    )
    num_samples: int = SAMPLING(
        1000, minimum=100, metavar="N", help="With --sampling: samples of each prompt."
    )
    temperature: float = SAMPLING(1.0, metavar="T", help="With --sampling: the temperature.")
    top_k: int = SAMPLING(4, minimum=2, help="With --sampling: the top-k.")
    random_seed: int = SAMPLING(
        0, minimum=0, metavar="S", help="With --sampling: seed of the first sample."
    )
    device: str = like(
        DecodeSettings, "device", "Device for the engine and the model.", group="An engine's text"
    )
    json: bool = setting(False, help="Print one JSON object on stdout.")


def _idle(are_read: Callable[[str], bool], context: str) -> Contradiction:
    """Return the rule that refuses options without effect in a context."""

    def find(settings: VerifySettings) -> str:
        typed_names = list_given(settings, VerifySettings)
        return ", ".join(name_flag(name) for name in typed_names if not are_read(name))

    return find, f"{{found}}: no effect with {context}", "leave it out"


def _find_pair(settings: VerifySettings) -> str | None:
    names = list_given(settings, DraftTargetDraft)
    return name_flag(names[0]) if names and "draft_engine_dir" not in names else None


OF_CHECKPOINT: tuple[Contradiction, ...] = (
    _idle((*CHECKPOINT_FLAGS, *SHARED_FLAGS).__contains__, "--checkpoint-dir, a claim of its own"),
    (lambda s: s.checkpoint_dir is None,
     "missing --checkpoint-dir, or --model-dir", "name the checkpoint or the model to verify"),
)  # fmt: skip
GREEDY = _idle(lambda name: name not in SAMPLING_FLAGS, "greedy text alone: --sampling is absent")
OF_ENGINE: tuple[Contradiction, ...] = (
    _idle(lambda name: name not in CHECKPOINT_FLAGS, "--engine-dir"),
    (lambda s: not s.sampling and GREEDY[0](s), *GREEDY[1:]),
    (lambda s: not 0 < s.temperature < 100, "--temperature is {temperature:g}",
     "give a number above 0 and below 100"),
    (lambda s: s.engine_dir is not None and s.dtype != "auto",
     "--dtype with --engine-dir, which has a type", "leave one out"),
    (_find_pair, "{found} without --draft-engine-dir", "give the draft model's engine"),
)  # fmt: skip


def check_settings(settings: VerifySettings) -> None:
    """Raise UsageError for flags that are missing, contradict one another, or have no effect."""
    names = list_given(settings, VerifySettings)
    if settings.checkpoint_dir is not None or not {"engine_dir", "model_dir"} & set(names):
        refuse_contradictions(settings, OF_CHECKPOINT)
        return
    require(settings, "model_dir")
    refuse_contradictions(settings, OF_ENGINE)
