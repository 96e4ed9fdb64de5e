"""Models in the place of engine folders: a server makes their engines in the cache of generate."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from specdec.decode.models import is_model, make_engines
from specdec.errors import UsageError
from specdec.options import Contradiction, name_flag, refuse_contradictions
from specdec.system import logs

from .settings import ServeSettings

PLACES = {"model_dir": "engine_dir", "draft_model_dir": "draft_engine_dir"}
OPTIONS = ("drafter_model_dir", "draft_model_dir", "quantization")  # of a model
CONTRADICTIONS: tuple[Contradiction, ...] = (
    (lambda s: s.model_dir and s.engine_dir,
     "--model-dir and --engine-dir are both given", "leave one of them out"),
    (lambda s: s.draft_model_dir and s.draft_engine_dir,
     "--draft-model-dir and --draft-engine-dir are both given", "leave one of them out"),
    (lambda s: not s.model_dir and ", ".join(name_flag(n) for n in OPTIONS if getattr(s, n)),
     "{found} without --model-dir",
     "give the model, or leave it out: an engine has been made with its drafter"),
    (lambda s: not s.model_dir and not s.engine_dir,
     "missing --model-dir, or --engine-dir", "give it on the command line or in a --config recipe"),
    (lambda s: s.served_model_name == "",
     "--served-model-name is empty", "give a name, or leave it out"),
)  # fmt: skip


def place_models(settings: ServeSettings) -> ServeSettings:
    """Return settings with each model in an engine's place, so that they can be checked.

    Raises UsageError where there is no engine, both are given, or an option lacks its model.
    """
    refuse_contradictions(settings, CONTRADICTIONS)
    if settings.model_dir is None:
        return settings
    if logs.get_launched_rank() is not None:
        raise UsageError(
            "--model-dir under a launcher, whose ranks need one engine folder",
            "make it with specdec-convert and specdec-build, and give --engine-dir",
        )
    models = {name: model for name in PLACES if (model := getattr(settings, name)) is not None}
    for name, model in models.items():
        if not is_model(model, needs_owner=False):
            raise UsageError(
                f"{name_flag(name)} {model} is no model's folder, GGUF file or Hub id",
                f"check the path; an engine folder is given as {name_flag(PLACES[name])}",
            )
    changes: dict[str, Any] = {PLACES[name]: Path(model) for name, model in models.items()}
    changes["tokenizer_dir"] = settings.tokenizer_dir or settings.model_dir
    name = Path(settings.model_dir).name.removesuffix(".gguf")
    changes["served_model_name"] = settings.served_model_name or name
    return dataclasses.replace(settings, **changes)


def hold_engines(stack: contextlib.ExitStack, settings: ServeSettings) -> ServeSettings:
    """Return settings with the engines of their models, made or taken from the cache.

    stack: keeps them in the cache until it is closed. settings: as `place_models` returns them.
    """
    if settings.model_dir is None:
        return settings
    folders = make_engines(
        stack, settings.model_dir, drafter=settings.drafter_model_dir,
        draft=settings.draft_model_dir, device=settings.device,
        limits={"max_batch_size": settings.max_batch_size, "max_seq_len": settings.max_seq_len},
        options={} if settings.quantization is None else {"quantization": settings.quantization},
        needs_owner=False,
    )  # fmt: skip
    changes: dict[str, Any] = {"engine_dir": Path(folders.engine)}
    if settings.draft_model_dir is not None:
        changes["draft_engine_dir"] = folders.draft
    return dataclasses.replace(settings, **changes)
