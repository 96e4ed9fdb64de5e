"""--show-drafts marks how each token came; --streaming --json tells it line by line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdec.decode import loop
from specdec.errors import UsageError
from specdec.run import drafts
from specdec.run.drafts import COLOURS, MARKS, REJECTED, format_pieces, split_text
from tests.conftest import make_llama, make_tokenizer, read_error_lines
from tests.engines import call, make_noisy_copy, run_cli_here, run_here
from tests.forks import fork, run_main

LIMIT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft model that is right now and then: the target with some noise."""
    parent = tmp_path_factory.mktemp("drafts")
    target = make_llama(parent, seed=5)
    make_tokenizer(target)
    make_noisy_copy(target, parent / "noisy", noise=0.15)
    make_tokenizer(parent / "noisy")
    external = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4)
    narrow = ("--max-batch-size", 8, "--max-num-tokens", 8)
    for name, source, flags in (
        ("pair", "target", external), ("plain", "noisy", ()), ("narrow", "noisy", narrow),
    ):  # fmt: skip
        call("convert", "--model-dir", parent / source, "--output-dir", parent / f"{name}-ckpt")
        call(
            "build", "--checkpoint-dir", parent / f"{name}-ckpt", "--output-dir", parent / name,
            "--optimize", "none", "--tokenizer-dir", target, *flags,
        )  # fmt: skip
    return parent


def run(folder: Path, *flags: object, status: int = 0, has_draft: bool = True) -> str:
    draft = ["--draft-engine-dir", folder / "plain", "--draft-len", 3] if has_draft else []
    draft += ["--draft-budget", "fixed"] if has_draft else []
    done = run_cli_here(
        "run", "--engine-dir", folder / "pair", *draft, "--end-id", 127, "--max-output-len", LIMIT,
        "--input-text", "def a", "return", "--device", "cpu", *flags,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """What --json says, with origins."""
    report: dict[str, Any] = json.loads(run(folder, "--json", "--show-drafts"))
    return report


def test_json_has_the_origins(folder: Path, whole: dict[str, Any]) -> None:
    plain = json.loads(run(folder, "--json"))
    for output, other in zip(whole["outputs"], plain["outputs"], strict=True):
        origins = output["origins"]
        assert output == {**other, "origins": origins}
        assert len(origins) == len(output["output_ids"]) == LIMIT
        assert origins[0] == "plain"
        assert origins.count("draft") == output["stats"]["num_accepted"]
        assert origins.count("bonus") >= output["stats"]["num_verify_steps"] - 1
    kinds = {origin for output in whole["outputs"] for origin in output["origins"]}
    assert kinds == {"draft", "bonus", "plain"}


ODD_MARKS = {
    "draft": ("\1", "\2"),
    REJECTED: ("\3", "\4"),
    "bonus": ("\5", "\6"),
    "plain": ("", ""),
}


def strip_marks(shown: str) -> list[str]:
    """Each output without marks and rejected drafts."""
    found = re.findall(r'Output \[Text \d Beam 0\]: "(.*?)"(?=\nInput|\n$)', shown, re.DOTALL)
    bare = [re.sub("\3.*?\4", "", text, flags=re.DOTALL) for text in found]
    bare = [
        re.sub("\1.*?\2", lambda m: m[0].replace("|", ""), text, flags=re.DOTALL) for text in bare
    ]
    return [re.sub("[\1\2\5\6]", "", text) for text in bare]


def test_the_marked_text_is_the_text(
    folder: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without marks and rejected drafts, with stop words too; the vocabulary here has no bar."""
    monkeypatch.setattr(drafts, "MARKS", ODD_MARKS)
    shown = run(folder, "--show-drafts")
    outputs = whole["outputs"]
    texts = [output["output_text"] for output in outputs]
    assert "|" not in "".join(texts)
    assert strip_marks(shown) == texts
    shown = shown.partition("\n")[2]  # after the legend
    num_accepted = sum(
        part.count("|") + 1 for part in re.findall("\1(.*?)\2", shown, flags=re.DOTALL)
    )
    assert num_accepted == sum(output["stats"]["num_accepted"] for output in outputs)
    num_bonus = sum(output["origins"].count("bonus") for output in outputs)
    assert 0 < shown.count("\5") <= num_bonus  # one may be a special token, without text
    assert shown.count("\3") > 5
    stop = texts[0][10:12]
    cut = json.loads(run(folder, "--json", "--stop-words", stop))["outputs"]
    assert len(cut[0]["output_text"]) < len(texts[0])
    shown = run(folder, "--show-drafts", "--stop-words", stop)
    assert strip_marks(shown) == [output["output_text"] for output in cut]


def test_one_legend(folder: Path) -> None:
    shown = run(folder, "--show-drafts")
    assert shown.startswith("Drafts: {+accepted draft+}, [-rejected draft-], <the target's own")
    assert shown.count("Drafts: ") == 1


def test_colours_on_a_terminal_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that is written besides has marks."""
    command = [
        "run", "--engine-dir", folder / "pair", "--draft-engine-dir", folder / "plain",
        "--draft-len", 3, "--input-text", "def a", "--max-output-len", LIMIT, "--end-id", 127,
        "--show-drafts", "--output-file", tmp_path / "out.txt",
    ]  # fmt: skip
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = os.openpty()
    try:
        with fork(
            lambda: run_main(*command), {"TERM": "xterm"}, stdin=subprocess.DEVNULL, stdout=theirs
        ) as process:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # as Linux tells that the other end is closed
                    break
                if not piece:
                    break
                shown += piece
            assert process.stderr is not None
            told = process.stderr.read()
        assert process.returncode == 0, told
    finally:
        os.close(ours)
    text = shown.decode().replace("\r\n", "\n")
    for kind in ("draft", REJECTED, "bonus"):
        assert COLOURS[kind][0] in text
        assert MARKS[kind][0] + "x" not in text
    written = (tmp_path / "out.txt").read_text()
    assert "\x1b" not in written
    assert "{+" in written


def test_pieces() -> None:
    pieces = [("plain", ["a"]), ("draft", ["b", "c"]), (REJECTED, ["x y"]), ("bonus", ["d"])]
    assert format_pieces(pieces, in_colour=False) == "a{+b|c+}[-x y-]<d>"
    coloured = format_pieces(pieces, in_colour=True)
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == "abcx yd"


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_character_stands_with_its_last_token() -> None:
    assert split_text(Bytes(), list("aé€".encode())) == ["a", "", "é", "", "", "€"]
    assert split_text(Bytes(), list("a€".encode())[:-1]) == ["a", "", "\ufffd"]
    assert split_text(Bytes(), []) == []


def test_a_line_of_json_a_step(folder: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    """Together they are what --json gives."""
    shown = run(folder, "--json", "--streaming", "--show-drafts", "--output-file", tmp_path / "f")
    assert shown == (tmp_path / "f").read_text()
    lines = [json.loads(line) for line in shown.splitlines()]
    outputs = [line["output"] for line in lines if "output" in line]
    assert outputs == whole["outputs"]
    assert set(lines[-1]) == {"stats"}
    steady = {"method", "num_output_tokens", "num_verify_steps", "acceptance_length"}
    assert all(lines[-1]["stats"][key] == whole["stats"][key] for key in steady)
    for output in outputs:
        events = [line for line in lines if line.get("index") == output["index"]]
        assert len(events) == output["stats"]["num_verify_steps"] + 1
        assert "".join(event["text"] for event in events) == output["output_text"]
        assert sum((event["token_ids"] for event in events), []) == output["output_ids"]
        assert sum((event["origins"] for event in events), []) == output["origins"]
        reasons = [event["finish_reason"] for event in events]
        assert reasons == [None] * (len(events) - 1) + [output["finish_reason"]]


def test_interrupted_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output is there, with what it has."""
    step, steps = loop.Batch.step, 0

    def interrupt(batch: loop.Batch) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        step(batch)

    monkeypatch.setattr(loop.Batch, "step", interrupt)
    done = run_cli_here(
        "run", "--engine-dir", folder / "pair", "--no-speculation", "--max-output-len", 9,
        "--input-text", "def a", "return", "--json", "--streaming", "--end-id", 127,
    )  # fmt: skip
    assert done.returncode == 1
    assert read_error_lines(done.stderr)[0] == "interrupted: 0 of 2 prompts were finished"
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    outputs = [line["output"] for line in lines if "output" in line]
    assert [output["finish_reason"] for output in outputs] == [None, None]
    assert [len(output["output_ids"]) for output in outputs] == [3, 3]
    assert lines[-1]["interrupted"] is True


def test_a_plain_engine_shows_what_suffixes_draft(folder: Path) -> None:
    """It has no drafts to show only where its steps have no room for any."""
    flags = ["--input-text", "ababababab", "--show-drafts"]
    shown = run_here(["--engine-dir", folder / "plain", *flags])
    assert shown["stats"]["method"] == "suffix"
    assert {"draft", "bonus"} & {*shown["outputs"][0]["origins"]}, "it says who wrote what"
    with pytest.raises(UsageError, match="no effect with an engine that runs plain"):
        call("run", "--engine-dir", folder / "narrow", *flags)
