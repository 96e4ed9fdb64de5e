"""docs/flags.md: the flags of ours that it names exist, and no flag of trtllm-build is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from specdec.command.stages import STAGES, StageCommand, load_command
from specdec.trtllm.facts import LABELS, load_facts
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "flags.md"
FLAG = re.compile(r"--[a-z][a-z0-9_-]*")


def read_rows() -> Iterator[tuple[str, str, list[str]]]:
    """Yield (their tool, our command, cells) of every row."""
    theirs = ours = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            theirs, _, ours = line[3:].partition(": specdec-")
            ours = "data" if ours.startswith("train data") else ours.split()[0]
        elif line.startswith("| `"):
            yield theirs, ours, [cell.strip() for cell in line.strip("|").split("|")]


def list_flags(name: str) -> set[str]:
    train = load_command("train")
    assert isinstance(train, StageCommand)
    command = train.subcommands["data"] if name == "data" else load_command(name)
    params = command.get_params(click.Context(command))
    return {opt for param in params for opt in (*param.opts, *param.secondary_opts)}


def test_our_flags_exist() -> None:
    known = {name: list_flags(name) for name in (*STAGES, "data")}
    wrong = []
    num_flags = 0
    for tool, command, (_, ours, note) in read_rows():
        spans = re.findall(r"`([^`]+)`", ours)
        for span in spans:
            named = re.match(r"specdec-([a-z]+)\s?", span)
            flags = FLAG.findall(span)
            assert named or flags, f"{tool}: {span}"
            num_flags += len(flags)
            wrong += [
                f"{tool}: {f}" for f in flags if f not in known[named[1] if named else command]
            ]
        wrong += [
            f"{tool}: {flag} in a note"
            for flag in re.findall(r"`(--[a-z-]+)", note)
            if flag not in known[command]
        ]
    assert wrong == []
    assert num_flags > 80


def test_rows_say_what_takes_a_flag_s_place() -> None:
    for tool, _, (theirs, ours, note) in read_rows():
        assert FLAG.search(theirs)
        if not ours:
            said = re.match(r"(no effect|not offered|passed on|refused)\b", note)
            assert said, f"{tool}: {theirs} leads nowhere"


def test_no_flag_of_trtllm_build_is_missing() -> None:
    listed = {
        flag.removeprefix("--")
        for tool, _, (theirs, *_) in read_rows()
        if tool == "trtllm-build"
        for flag in FLAG.findall(theirs)
    }
    for label in LABELS:
        assert {name.replace("-", "_") for name in load_facts(label).flags} - listed == set()


def test_no_flag_is_listed_twice_for_a_tool() -> None:
    seen: list[tuple[str, str]] = []
    for tool, _, (theirs, *_) in read_rows():
        seen += [(tool, flag) for flag in FLAG.findall(theirs)]
    assert len(seen) == len(set(seen))
