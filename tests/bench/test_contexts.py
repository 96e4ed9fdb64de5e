"""benchmarks/contexts.py and without_loops.py without llama.cpp."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import contexts, without_loops
from benchmarks.contexts import Ours, Theirs, compare, format_rows, measure
from benchmarks.side_by_side import models
from specdec.bench.engine import Bench, open_bench
from specdec.run.settings import RunSettings


class FakeServer:
    """Counts tokens as llama-server does: those of a prompt that its slot does not hold."""

    def __init__(self, words: list[str]) -> None:
        self.folder = Path(words[words.index("--slot-save-path") + 1])
        self.held: list[int] = []
        self.calls: list[str] = []
        self.forgets = False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(path)
        action = path.partition("?action=")[2]
        if action == "erase":
            self.held = []
        elif action == "save":
            (self.folder / body["filename"]).write_text(json.dumps(self.held))
        elif action == "restore":
            self.held = json.loads((self.folder / body["filename"]).read_text())
        if action:
            return {}
        prompt, count = body["prompt"], body["n_predict"]
        known = 0 if self.forgets else len(prompt) - 1
        while self.held[:known] != prompt[:known]:
            known -= 1
        self.held = prompt
        return {
            "timings": {
                "prompt_n": len(prompt) - known, "predicted_n": count,
                "prompt_ms": 10.0 * (len(prompt) - known), "predicted_ms": 40.0 * (count - 1),
            }
        }  # fmt: skip

    def end(self) -> None:
        pass


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Theirs:
    monkeypatch.setattr(contexts, "Server", FakeServer)
    return Theirs(tmp_path / "llama-server", tmp_path / "model.gguf", tmp_path, 128, 1)


@pytest.fixture(scope="module")
def bench(engine: Path, folder: Path) -> Bench:
    settings = RunSettings(
        engine_dir=engine, tokenizer_dir=str(folder / "target"), device="cpu",
    )  # fmt: skip
    return open_bench(settings)


def test_ours_takes_what_it_holds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "VOCAB_SIZE", bench.engine.decoder.model.vocab_size)
    context = list(range(5, 45))
    ours = Ours(bench, len(context))
    assert ours.read(context) > 0
    for size in (1, 8, 1):
        assert ours.time_step(context, 7, size) > 0
        assert ours._timing.num_steps <= contexts.NUM_STEPS
    assert ours._timing.num_steps == contexts.NUM_STEPS, "plain: a token a step"
    with pytest.raises(AssertionError):
        ours.time_step([9, *context[1:]], 7, 1)


def test_theirs_restores_a_file(theirs: Theirs, tmp_path: Path) -> None:
    server: Any = theirs.server
    context = list(range(5, 45))
    assert theirs.read(context) == pytest.approx(0.4)
    assert theirs.time_step(context, 3, 1) == pytest.approx(0.04), "its first token is no step"
    assert theirs.time_step(context, 4, 8) == pytest.approx(0.08)
    server.calls.clear()
    theirs.hold(context)
    theirs.read([1, 2])
    theirs.hold(context)
    assert server.calls.count("/slots/0?action=save") == 1
    assert theirs.time_step(context, 5, 1) == pytest.approx(0.04)
    assert len(list(tmp_path.glob("context-40-*.bin"))) == 1
    server.forgets = True
    with pytest.raises(SystemExit, match="has read 41 tokens and written 9, expected were 1 and 9"):
        theirs.time_step(context, 3, 1)


def test_turns(bench: Bench, theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context within --prompt is read by both in each round, a longer one by ours, once."""
    monkeypatch.setattr(contexts, "VOCAB_SIZE", bench.engine.decoder.model.vocab_size)
    args = argparse.Namespace(contexts=[8, 32], prompt=8, rounds=2, repeat=1)
    rows = [row | {"ratios": compare(row)} for row in measure(bench, theirs, args)]
    assert [row["context"] for row in rows] == [8, 32]
    short, long = rows
    assert set(short["ratios"]) == {"first_token", "step_1", "step_8"}
    assert short["llama.cpp"]["first_token"]["median"] == pytest.approx(80)
    assert set(long["ratios"]) == {"step_1", "step_8"}
    assert long["llama.cpp"]["step_1"]["median"] == pytest.approx(40)
    table = format_rows(rows)
    assert "/ 40.0 (" in table
    assert "/ - |" in table


def test_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["contexts.py", "--llama-server", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="error: there is no .*none\nhint: benchmarks/peers.py"):
        contexts.main()


def test_prompts_whose_texts_do_not_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeEngine:
        @classmethod
        def load(cls, *_: Any, **__: Any) -> FakeEngine:
            return cls()

        def __enter__(self) -> FakeEngine:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def generate(self, prompts: list[str], max_output_len: int) -> list[Any]:
            return [
                argparse.Namespace(
                    token_ids=[at % (2 if "loop" in text else 99) for at in range(max_output_len)]
                )
                for text in prompts
            ]

    monkeypatch.setattr(without_loops, "Engine", FakeEngine)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": text}) for text in ("one", "a loop", "two")]
    source.write_text("\n".join(lines) + "\n")
    words = ["--prompt-file", source, "--output", output, "--engine-dir", tmp_path]
    monkeypatch.setattr("sys.argv", ["without_loops.py", *map(str, words)])
    without_loops.main()
    assert output.read_text().splitlines() == [lines[0], lines[2]]
    assert capsys.readouterr().out == "2 of 3 texts do not loop\n"
    # By the engine that is left of a size.
    found = models.Models(tmp_path, tmp_path, tmp_path, tmp_path)
    monkeypatch.setattr(without_loops, "prepare_models", lambda *_: found)
    loaded: list[Path] = []

    def load(path: Path, **_: Any) -> FakeEngine:
        loaded.append(path)
        return FakeEngine()

    monkeypatch.setattr(FakeEngine, "load", load)
    words = ["--prompt-file", source, "--output", output, "--size", "small"]
    monkeypatch.setattr("sys.argv", ["without_loops.py", *map(str, words)])
    with pytest.raises(SystemExit, match="batches.py --size small --prepare"):
        without_loops.main()
    engine = tmp_path / "engines" / "draft-target"
    engine.mkdir(parents=True)
    (engine / "config.json").touch()
    without_loops.main()
    assert loaded == [engine]
