"""Error lines: of bounded length, each fact and remedy once, options of other tools understood."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.command.stages import MAX_LINE, MAX_LISTED, MAX_WORD, print_error
from specdec.errors import Problems, PromptError, SpecDecError, cut_middle, summarize
from tests.conftest import (
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    read_error_lines,
)
from tests.engines import call, run_cli_here


def test_a_long_line_keeps_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("the start " + "x" * 100_000 + " the end", "remedy " + "y" * 100_000)
    fact, hint = read_error_lines(capsys.readouterr().err)
    for line in (fact, hint):
        assert len(line) < MAX_WORD + 200
    assert "the start x" in fact
    assert fact.endswith("x the end")
    assert "[99700 characters]" in fact
    # A value of many words, and an error of several problems, each with room of its own.
    for number, most in ((1, MAX_LINE), (3, 3 * MAX_LINE), (20, MAX_LISTED * MAX_LINE)):
        print_error("1, " * 100_000 + "end", "remedy", number)
        fact, hint = read_error_lines(capsys.readouterr().err)
        assert most - 10 < len(fact) < most + 50
        assert (fact[-3:], hint) == ("end", "remedy")


def test_texts_are_cut_only_where_they_are_long() -> None:
    assert cut_middle("a" * 50, 50) == "a" * 50
    assert cut_middle("a" * 60 + "b" * 40, 30) == "a" * 20 + " ... [70 characters] ... " + "b" * 10
    assert len(summarize(ValueError("z" * 10_000))) < 500


def test_problems_and_remedies_are_told_once() -> None:
    Problems([]).raise_all()
    with pytest.raises(SpecDecError) as caught:
        Problems.from_table(
            (1, "one", "do this"), (0, "no", ""), ([2], "two", "do that")
        ).raise_all()
    assert caught.value.message == "2 problems: (1) one; (2) two"
    assert caught.value.hint == "(1) do this; (2) do that"
    with pytest.raises(SpecDecError) as caught:
        Problems([*((name, "correct it") for name in "aba"), ("c", "leave it")]).raise_all()
    assert caught.value.message == "3 problems: (1) a; (2) b; (3) c"
    assert caught.value.hint == "(1, 2) correct it; (3) leave it"
    assert caught.value.problems == [("a", "correct it"), ("b", "correct it"), ("c", "leave it")]
    with pytest.raises(SpecDecError) as caught:
        Problems([(str(n), "correct it") for n in range(1000)]).raise_all()
    assert caught.value.message.endswith("(20) 19; and 980 more")
    assert caught.value.hint == "correct it"
    with pytest.raises(SpecDecError) as caught:
        Problems([("a", "correct it")] * 7).raise_all()
    assert caught.value.message == "a"


@pytest.mark.parametrize("kind", ["redrafter", "medusa", "eagle", "eagle3"])
def test_a_wrong_vocabulary_is_told_once(kind: str, tmp_path: Path) -> None:
    makers: dict[str, tuple[str, Callable[..., Path]]] = {
        "redrafter": ("--drafter-model-dir", make_drafter),
        "medusa": ("--medusa-model-dir", make_medusa_heads),
        "eagle": ("--eagle-model-dir", make_eagle_drafter),
        "eagle3": ("--eagle-model-dir", functools.partial(make_eagle_drafter, version=3)),
    }
    flag, make = makers[kind]
    words = ["--model-dir", make_llama(tmp_path), "--output-dir", tmp_path / "out"]
    with pytest.raises(SpecDecError) as caught:
        call("convert", *words, flag, make(tmp_path, vocab=200))
    assert caught.value.message.count("200") == 1
    assert "vocab_size is 200, the target's 128" in caught.value.message


def test_errors_come_back_from_a_process_pool() -> None:
    with pytest.raises(SpecDecError) as caught:
        Problems().add("prompt 0 is empty", "give one", "text", "is empty").raise_all()
    error: Any = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, PromptError)
    assert (error.message, error.hint, error.field) == ("prompt 0 is empty", "give one", "text")
    assert error.reason == "is empty"


@pytest.mark.parametrize(
    ("stage", "option", "meant"),
    [
        ("run", "--max_tokens", "--max-output-len"),
        ("run", "--max-new-tokens", "--max-output-len"),
        ("run", "--prompt", "--input-text"),
        ("run", "--prompts", "--input-file"),
        ("run", "--engine-dri", "--engine-dir"),
        ("generate", "-m", "--model-dir"),
        ("generate", "--ctx-size", "--max-seq-len"),
        ("serve", "-c", "--max-seq-len"),
        ("convert", "--qformat", "--quantization"),
        ("convert", "--tp", "--tp-size"),
        ("build", "--max-model-len", "--max-seq-len"),
        ("bench", "--prompt", "--prompts"),
    ],
)
def test_options_of_other_tools(stage: str, option: str, meant: str) -> None:
    more = ["--checkpoint-dir", "c", "--output-dir", "o"] if stage == "build" else []
    done = run_cli_here(stage, option, "1", *more)
    assert done.returncode == 2
    fact, _ = read_error_lines(done.stderr)
    assert f"(did you mean {meant}?)" in fact


def test_stages_of_a_pipeline_are_told(tmp_path: Path) -> None:
    words = ["--model-dir", make_llama(tmp_path, layers=2), "--output-dir", tmp_path / "ck"]
    done = run_cli_here("convert", *words, "--tp-size", 2, "--pp-size", 2)
    assert "tp_size 2, pp_size 2" in done.stderr
