"""Pipeline of a match: open the target, find candidates, hold each against the target."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.command.stages import load_command
from specdec.errors import SpecDecError, summarize
from specdec.files.acceptance import read_acceptance
from specdec.files.folders import MODEL, MTP, find_gguf, look_at, recognize_drafter
from specdec.files.origin import is_same, list_folder_names, read_training
from specdec.files.vocabulary import has_same_tokens, read_vocabulary
from specdec.methods import METHODS
from specdec.options import name_flag
from specdec.system import logs

from .candidates import TARGET, Candidate, find_candidates, find_target
from .numbers import (
    describe_acceptance,
    describe_drafter,
    describe_folder,
    describe_model,
    read_trained_length,
)
from .settings import MatchSettings

logger = logs.get_logger(__name__)
ANY_DRAFTER = "drafter_model_dir"


@dataclasses.dataclass(frozen=True)
class Target:
    """Target of a match: its name and path, what holds drafters against it, and its numbers."""

    name: str
    path: Path
    matcher: Any  # of specdec-convert
    numbers: Mapping[str, Any]

    @property
    def checkpoint(self) -> CheckpointConfig:
        checkpoint: CheckpointConfig = self.matcher.checkpoint
        return checkpoint

    def has_name(self, names: list[str]) -> bool:
        """Return whether one of some names is the target's."""
        folder = self.path if self.path.is_dir() else self.path.parent
        target_names = [self.name, *list_folder_names(folder)]
        return any(is_same(base, name) for base in names for name in target_names)


def match_drafters(settings: MatchSettings) -> dict[str, Any]:
    """Return a report of the target and of all candidates, those that fit first."""
    path = find_target(settings.model_dir)
    candidates, warnings = find_candidates(settings.among, path)
    label = f"matching {len(candidates)} folders and files with {settings.model_dir}"
    # The checks log what a conversion does; the report has what matters here.
    with logs.show_waiting(label, logger) as tell, logs.hush("specdec", logging.ERROR):
        matcher = load_command("convert").open_matcher(str(path))
        target = Target(settings.model_dir, path, matcher, describe_model(matcher.checkpoint))
        own_drafters = [
            Candidate(target.name, path, TARGET, option) for option in matcher.own_options
        ]
        entries = []
        for number, candidate in enumerate([*own_drafters, *candidates]):
            tell(f"{number} of {len(own_drafters) + len(candidates)}")
            entries.append(judge(target, candidate))
    entries.sort(key=_rank)
    return {
        "target": {
            "name": target.name, "path": str(path), **target.numbers,
            "vocabulary": matcher.vocabulary,
        },
        "num_fitting": sum(entry["fits"] for entry in entries),
        "candidates": entries,
        "warnings": warnings,
    }  # fmt: skip


def _rank(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order entries: those that fit first, and of these drafters before ever larger models."""
    size = entry["numbers"].get("num_parameters") or 0
    return not entry["fits"], entry["draft_vocabulary"] is not None, size


def judge(target: Target, candidate: Candidate) -> dict[str, Any]:
    """Return whether a candidate drafts for the target and how, or why not, with its numbers."""
    entry: dict[str, Any] = {
        "name": candidate.name, "path": str(candidate.path), "source": candidate.source,
        "method": None, "title": None, "fits": False, "reasons": [], "warnings": [],
        "numbers": {}, "trained_length": None, "base_models": [], "names_target": None,
        "vocabulary": None, "draft_vocabulary": None, "shared_tokens": None,
        "acceptance": None, "command": None,
    }  # fmt: skip
    try:
        _hold(target, candidate, entry)
        entry["fits"] = True
    except SpecDecError as error:
        entry["reasons"] = [{"fact": fact, "remedy": remedy} for fact, remedy in error.problems]
    except OSError as error:
        fact = f"{error.filename or candidate.path}: {error.strerror or error}"
        entry["reasons"] = [{"fact": fact, "remedy": "check the path and its permissions"}]
    except Exception as error:  # noqa: BLE001 - a fault with one candidate hides no other
        logger.debug("%s", candidate.path, exc_info=True)
        fact = f"{candidate.path}: unexpected {type(error).__name__}: {summarize(error)}"
        remedy = "this is a fault in specdec: convert it with --debug, and report the traceback"
        entry["reasons"] = [{"fact": fact, "remedy": remedy}]
    return entry


def _hold(target: Target, candidate: Candidate, entry: dict[str, Any]) -> None:
    """Hold a candidate against the target by its kind, and complete its entry."""
    kind = None
    try:
        kind = _find_kind(candidate)
    finally:
        if kind != MODEL and candidate.source != TARGET and candidate.path.is_dir():
            _describe(target, candidate.path, entry)
    entry["method"] = "draft_target" if kind == MODEL else kind
    entry["title"] = METHODS[entry["method"]].title
    hold = _hold_model if kind == MODEL else _hold_drafter
    hold(target, candidate, entry)


def _find_kind(candidate: Candidate) -> str:
    """Return the kind of a candidate's drafter, MODEL for a whole model."""
    if candidate.option is not None:
        return next(name for name, m in METHODS.items() if m.folder == candidate.option)
    if find_gguf(candidate.path) is not None:
        return MODEL
    return recognize_drafter(candidate.path, name_flag(ANY_DRAFTER))


def _describe(target: Target, path: Path, entry: dict[str, Any]) -> None:
    """Add to an entry what a drafter's folder says of itself, whether it fits or not."""
    config = look_at(path).config
    base_models = list(dict.fromkeys(read_training(path, config)[1]))
    entry |= {
        "numbers": describe_folder(path, config), "base_models": base_models,
        "names_target": target.has_name(base_models) if base_models else None,
        "trained_length": read_trained_length(path), "vocabulary": read_vocabulary(path),
    }  # fmt: skip
    with contextlib.suppress(SpecDecError):  # for which the conversion refuses the drafter
        acceptance = read_acceptance(path)
        entry["acceptance"] = describe_acceptance(acceptance) if acceptance is not None else None


def _hold_drafter(target: Target, candidate: Candidate, entry: dict[str, Any]) -> None:
    """Add to an entry what a drafter with the target's features is; SpecDecError if none fits."""
    option = candidate.option or ANY_DRAFTER
    foreseen = target.matcher.hold(str(candidate.path), option)
    form, numbers = describe_drafter(foreseen.checkpoint.drafter)
    entry["title"] = form or entry["title"]
    entry["numbers"] |= numbers
    warnings = [foreseen.warning] if foreseen.warning else []
    tokens, target_tokens = entry["vocabulary"], target.matcher.vocabulary
    if tokens and target_tokens and not has_same_tokens(tokens, target_tokens):
        warnings.append(
            f"its tokenizer has {tokens['num_tokens']} tokens, the target's"
            f" {target_tokens['num_tokens']}, and some ids mean something else"
        )
    entry["warnings"] = warnings + _compare_lengths(target, entry)
    if candidate.source == TARGET and option == METHODS[MTP].folder:
        entry["command"] = _write_command(target, "--speculative-decoding-mode", "mtp")
    else:
        entry["command"] = _write_command(target, name_flag(option), candidate.name)


def _hold_model(target: Target, candidate: Candidate, entry: dict[str, Any]) -> None:
    """Add to an entry what a whole model would be as a draft model; SpecDecError if it cannot."""
    from specdec.text.vocabulary_check import ModelTokens, check_vocabularies

    convert, path = load_command("convert"), candidate.path
    settings = convert.settings_class(model_dir=str(path), output_dir=Path("checkpoint"))
    checkpoint, vocabulary = convert.foresee(settings)
    entry["numbers"], entry["vocabulary"] = describe_model(checkpoint), vocabulary
    draft_size, target_size = checkpoint.model.vocab_size, target.checkpoint.model.vocab_size
    target_vocabulary = target.matcher.vocabulary
    words = ["--draft-model-dir", candidate.name]
    entry["draft_vocabulary"] = "same"
    try:
        check_vocabularies(
            ModelTokens(target.path, target_size, target_vocabulary),
            ModelTokens(path, draft_size, vocabulary), None, None,
        )  # fmt: skip
    except SpecDecError:
        if target_vocabulary is None or vocabulary is None:
            raise
        entry["shared_tokens"] = _count_shared(target, path, draft_size)
        entry["draft_vocabulary"] = "shared"
        words += ["--draft-vocabulary", "shared"]
    warnings = _compare_lengths(target, entry)
    if target_vocabulary is None or vocabulary is None:
        warnings.append("whether both models have one tokenizer is not known: one has none")
    sizes = entry["numbers"]["num_parameters"], target.numbers["num_parameters"]
    if sizes[0] >= sizes[1]:
        warnings.append(
            f"it has {sizes[0]:,} parameters, the target {sizes[1]:,}: a draft model pays only"
            " where it is much smaller"
        )
    entry["warnings"], entry["command"] = warnings, _write_command(target, *words)


def _count_shared(target: Target, draft: Path, draft_size: int) -> int:
    """Count the tokens that both vocabularies have; SpecDecError for too few to be drafted."""
    import torch

    from specdec.text.pretrained import load_tokenizer
    from specdec.text.token_map import SharedTokens

    tokenizers = (
        load_tokenizer(target.path, "--model-dir"), load_tokenizer(draft, "--draft-model-dir")
    )  # fmt: skip
    target_size = target.checkpoint.model.vocab_size
    return SharedTokens(*tokenizers, target_size, draft_size, torch.device("cpu")).counts[0]


def _compare_lengths(target: Target, entry: Mapping[str, Any]) -> list[str]:
    """Return the warning for a drafter that was made for shorter texts than the target."""
    num_positions, trained_length = target.numbers["max_positions"], entry["trained_length"]
    positions = entry["numbers"].get("max_positions")
    if num_positions is None:
        return []
    if trained_length is not None and trained_length < num_positions:
        return [
            f"it was trained on texts of up to {trained_length:,} tokens, the target has"
            f" {num_positions:,} positions"
        ]
    if type(positions) is int and positions < num_positions:
        return [f"it has {positions:,} positions, the target {num_positions:,}"]
    return []


def _write_command(target: Target, *words: str) -> str:
    """Return the command that drafts for the target."""
    return shlex.join(["specdec", "generate", "--model-dir", target.name, *words, "Hello"])
