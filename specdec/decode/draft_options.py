"""The draft-target options, from either way of writing them."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from specdec.decode.settings import DecodeSettings
from specdec.errors import UsageError

OPTIONS = ("draft_len", "draft_devices", "target_devices", "use_logits")
FORM = "[4,[0],[1],True]: draft length, draft devices, target devices, whether to use logits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """How the draft model is used. draft_len: None adapts it. Devices: None where not given."""

    draft_len: int | None
    draft_devices: tuple[int, ...] | None
    target_devices: tuple[int, ...] | None
    use_logits: bool


def read_draft_options(settings: DecodeSettings) -> DraftOptions | None:
    """Return the options of a draft-target run, None of any other; raise UsageError."""
    joined = settings.draft_target_model_config
    given = [name for name in OPTIONS if getattr(settings, name)]
    names = ", ".join("--" + name.replace("_", "-") for name in given)
    if settings.draft_engine_dir is None:
        if adapts_drafts(settings):
            given, names = given[1:], names.partition(", ")[2]
        if settings.draft_tokenizer_dir is not None:
            given, names = ["draft_tokenizer_dir"], "--draft-tokenizer-dir"
        if joined is not None or given:
            raise UsageError(
                f"{names or '--draft-target-model-config'} without --draft-engine-dir",
                "give the draft model's engine",
            )
        return None
    if settings.no_speculation:
        raise UsageError(
            "--draft-engine-dir has no effect with --no-speculation", "leave one of them out"
        )
    if joined is None:
        return DraftOptions(
            draft_len=_read_draft_len(settings.draft_len),
            draft_devices=_read_devices("--draft-devices", settings.draft_devices),
            target_devices=_read_devices("--target-devices", settings.target_devices),
            use_logits=settings.use_logits,
        )
    if given:
        raise UsageError(
            f"--draft-target-model-config and {names} are both given", "use one way or the other"
        )
    return _read_joined(joined)


def adapts_drafts(settings: DecodeSettings) -> bool:
    """Whether another method than draft-target is to draft only while that pays."""
    return settings.draft_engine_dir is None and settings.draft_len == "auto"


def read_literal(flag: str, text: str, form: str, *, length: int) -> list[Any]:
    """Read a flag that is a list of `length` entries; raise UsageError that shows its form."""
    try:
        value = ast.literal_eval(text)  # literals only; nothing is executed
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise UsageError(f"{flag} is {text!r}", f"write it as {form}")
    return list(value)


def is_device_list(value: object) -> bool:
    """Tell whether an entry is a list of one or more device numbers."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(type(device) is int and device >= 0 for device in value)


def _read_joined(text: str) -> DraftOptions:
    flag = "--draft-target-model-config"
    draft_len, draft_devices, target_devices, use_logits = read_literal(flag, text, FORM, length=4)
    is_good = is_device_list(draft_devices) and is_device_list(target_devices)
    if not is_good or type(draft_len) is not int or draft_len < 1 or type(use_logits) is not bool:
        raise UsageError(f"{flag} is {text!r}", f"write it as {FORM}")
    return DraftOptions(
        draft_len=draft_len,
        draft_devices=tuple(draft_devices),
        target_devices=tuple(target_devices),
        use_logits=use_logits,
    )


def _read_draft_len(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--draft-len is {text!r}", "give a whole number above 0, or auto")
    return int(text)


def _read_devices(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.strip("[]").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"{flag} is {text!r}", "give device numbers, as 0 or 0,1")
    return tuple(int(part) for part in parts)
