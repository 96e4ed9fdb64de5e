"""Models in the place of engine folders: `Engine.load` makes engines in the cache of generate."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.decode.call_settings import NON_LOAD_OPTIONS
from specdec.decode.settings import DecodeSettings
from specdec.errors import UsageError, suggest
from specdec.files.folders import MODEL, find_gguf, is_hub_id, look_at
from specdec.options import get_flags

LIBRARY = "specdec.generate.library"  # stages are imported when their work is asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedFolders:
    """Folders that an engine is loaded from, and the options that are left for the loading.

    tokenizer: the model's folder or Hub id, None for an engine's own.
    """

    engine: str | Path
    draft: str | Path | None
    tokenizer: str | Path | None
    options: Mapping[str, Any]


def is_model(name: str | Path | None, *, needs_owner: bool = True) -> bool:
    """Return whether a name is a model's: a folder of Hugging Face, a GGUF file, or a Hub id.

    needs_owner: whether a Hub id has one, as where a name without may be that of an engine folder.
    """
    if not name or not isinstance(name, (str, Path)):  # which is refused with the other options
        return False
    path = Path(name)
    if path.exists():
        return find_gguf(path) is not None or (path.is_dir() and look_at(path).kind == MODEL)
    if "/" in str(name):
        return not path.parent.exists() and is_hub_id(str(name))  # else it is a path that is wrong
    return not needs_owner and is_hub_id(str(name))


def make_engines(
    stack: contextlib.ExitStack,
    path: str | Path,
    *,
    drafter: str | Path | None,
    draft: str | Path | None,
    limits: Mapping[str, int | None],
    device: str,
    options: Mapping[str, Any],
    needs_owner: bool = True,
) -> LoadedFolders:
    """Return the folders of an engine, which is made where `path` is a model.

    stack: keeps made engines in the cache until it is closed. drafter, draft: as of `Engine.load`.
    limits: max_batch_size and max_seq_len. needs_owner: as of `is_model`.
    """
    decode_names = get_flags(DecodeSettings)
    model_options = {name: value for name, value in options.items() if name not in decode_names}
    decode_options = {name: value for name, value in options.items() if name in decode_names}
    if not is_model(path, needs_owner=needs_owner):
        _refuse_model_options(path, drafter, model_options)
        return LoadedFolders(engine=path, draft=draft, tokenizer=None, options=options)
    has_draft_model = is_model(draft, needs_owner=needs_owner)
    fixed = {
        **limits, "model_dir": str(path), "device": device,
        "drafter_model_dir": None if drafter is None else str(drafter),
        "draft_model_dir": str(draft) if has_draft_model else None,
    }  # fmt: skip
    library = importlib.import_module(LIBRARY)
    _refuse_unknown(model_options, library.list_model_options())
    engine, draft_engine = library.hold_models(stack, fixed, model_options)
    return LoadedFolders(
        engine=engine, draft=draft_engine if draft_engine is not None else draft,
        tokenizer=path, options=decode_options,
    )  # fmt: skip


def _refuse_unknown(options: Mapping[str, Any], made_names: Sequence[str]) -> None:
    """Raise UsageError for an option that neither a model nor its engine has."""
    decode_names = [name for name in get_flags(DecodeSettings) if name not in NON_LOAD_OPTIONS]
    for name in options:
        if name not in made_names:
            raise UsageError(
                f"Engine.load has no option {name!r}{suggest(name, [*made_names, *decode_names])}",
                f"its options are {', '.join(decode_names)}; with a model also"
                f" {', '.join(made_names)}",
            )


def _refuse_model_options(
    path: str | Path, drafter: str | Path | None, options: Mapping[str, Any]
) -> None:
    """Raise UsageError for what says how a model is made an engine, beside an engine."""
    names = ["drafter"] if drafter is not None else []
    if options:
        made_names = importlib.import_module(LIBRARY).list_model_options()
        names += [name for name in options if name in made_names]
    if names:
        raise UsageError(
            f"{names[0]} says how a model is made an engine, and {path} is no model's folder, GGUF"
            " file or Hub id",
            "give the model in the place of the engine, or leave it out",
        )
