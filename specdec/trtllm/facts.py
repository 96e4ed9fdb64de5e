"""Facts of the lines of TensorRT-LLM, read from data files: flags, modes, architectures, keys.

The facts were read from TensorRT-LLM's public sources, for which each file names its commits. They
are what the checks before a build and the tests' doubles are made of.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, UsageError

LABELS = ("1.2", "0.14")
DEFAULT_LABEL = "1.2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildFlag:
    """A flag of trtllm-build. kind: `switch` takes no value; `is_list`: several values."""

    name: str
    kind: str  # int, text, switch
    default: Any = None
    choices: tuple[str, ...] = ()
    is_list: bool = False
    aliases: tuple[str, ...] = ()
    is_plugin: bool = False  # recorded in build_config.plugin_config

    @property
    def is_toggle(self) -> bool:
        return self.choices == ("enable", "disable")

    def parse(self, words: Sequence[str]) -> Any:
        """Return the value that some words of a command line give; raise UsageError.

        Of the words only their number is checked, and that a number is one: a value that its parser
        does not take, trtllm-build refuses.
        """
        flag, text = f"--{self.name}", " ".join(words)
        expectation = self._name_words()
        if bool(words) == (self.kind == "switch") or (len(words) > 1 and not self.is_list):
            remedy = "alone" if self.kind == "switch" else expectation
            raise UsageError(f"{flag} takes {expectation}, got {text!r}", f"give {flag} {remedy}")
        if self.kind == "switch":
            return True
        if self.kind == "int":
            if not re.fullmatch(r"-?[0-9]+", words[0]):
                fact = f"{flag}: expected a whole number, got {text!r}"
                raise UsageError(fact, f"give {flag} a whole number")
            return int(words[0])
        return list(words) if self.is_list else words[0]

    def _name_words(self) -> str:
        if self.kind == "switch":
            return "no value"
        return "values" if self.is_list else "one value"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """One line of TensorRT-LLM.

    releases: the first release of the line, and the first that is not of it any more. modes: number
    by name of each speculation mode, as an engine's config.json has it. without_kv_heads: the
    architectures whose attention has as many K/V heads as heads. quant_algos: the layouts of
    ModelOpt's that its loader reads, each with what keeps it from reading a whole model in it, or
    null. quant_group_sizes: those of its int4 kernels.
    """

    label: str
    releases: tuple[str, str]
    sources: str
    pins: dict[str, str]
    pins_source: str
    flags: dict[str, BuildFlag]
    modes: dict[str, int]
    architectures: tuple[str, ...]
    without_kv_heads: tuple[str, ...]
    mapping_keys: tuple[str, ...]
    quantization_keys: tuple[str, ...]
    moe_keys: tuple[str, ...]
    quant_algos: dict[str, str | None]
    quant_group_sizes: tuple[int, ...]
    build_config_keys: tuple[str, ...]
    runner_from_dir: tuple[str, ...]
    runner_generate: tuple[str, ...]
    runner_generate_kwargs: tuple[str, ...]

    def find_flag(self, name: str) -> BuildFlag | None:
        """Return a flag by its name or an alias, with underscores."""
        flags = self.flags.values()
        return next((flag for flag in flags if name in (flag.name, *flag.aliases)), None)

    def list_flag_names(self) -> list[str]:
        """List every name that a flag can be given by."""
        return [name for flag in self.flags.values() for name in (flag.name, *flag.aliases)]

    def covers(self, version: str) -> bool:
        """Return whether a release, as `1.2.0rc2` names one, is of this line."""
        start, end = (_order_candidate(release) for release in self.releases)
        return start <= _order_candidate(version) < end


@functools.cache
def load_facts(label: str) -> Facts:
    """Read the facts of a line of TensorRT-LLM."""
    assert label in LABELS, label
    path = Path(__file__).with_name(f"facts_{label.replace('.', '_')}.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    entries = document.pop("build_flags").items()
    flags = {name: BuildFlag(name=name, **_freeze(entry)) for name, entry in entries}
    return Facts(flags=flags, **_freeze(document))


def _freeze(document: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in document.items()}


def find_facts(version: str) -> Facts | None:
    """Return the facts of the line that a release of TensorRT-LLM belongs to, if there are any."""
    return next((load_facts(label) for label in LABELS if load_facts(label).covers(version)), None)


def find_label(version: str) -> str:
    """Return the label of an installed release's line; raise SpecDecError if none is known."""
    facts = find_facts(version)
    if facts is None:
        raise SpecDecError(*explain_unknown(version))
    return facts.label


def explain_unknown(version: str) -> tuple[str, str]:
    """Explain why a release is of no line here, and what to do."""
    lines = "; ".join(
        f"{label}: {start} and later, before {end}"
        for label in LABELS
        for start, end in (load_facts(label).releases,)
    )
    remedy = (
        f"install a release of a recorded line ({lines}), or use --dry-run or --emit-script"
        " with --trtllm-version"
    )
    if _order_candidate(version) < _order_candidate(load_facts(DEFAULT_LABEL).releases[1]):
        return f"TensorRT-LLM {version} is of a line whose flags are not recorded here", remedy
    return (
        f"TensorRT-LLM {version} builds and runs no engines: 1.3.0rc20 was the last release with"
        " the TensorRT backend",
        f"{remedy}; or migrate to its PyTorch backend: specdec-export --to trtllm-pytorch writes"
        " what trtllm-serve reads",
    )


def list_lines_with(flag: str) -> list[str]:
    """List the labels of the lines whose trtllm-build has a flag."""
    return [label for label in LABELS if load_facts(label).find_flag(flag) is not None]


def _order_candidate(version: str) -> tuple[int, int, int, float]:
    """Return a release's three numbers and its candidate's; `1.3` comes before all of 1.3.0's."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:(?:[.-]?(?:rc|a|b|dev))(\d*))?", version)
    if match is None:
        return (-1, -1, -1, -1)
    major, minor, patch, candidate = match.groups()
    candidate_rank = (
        -1 if patch is None else float(candidate or 0) if candidate is not None else math.inf
    )
    return int(major), int(minor), int(patch or 0), candidate_rank
