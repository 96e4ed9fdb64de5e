"""benchmarks/run_all.py: which commands there are, and what a failing one does to the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import run_all
from benchmarks.run_all import list_steps, main, parse_args, run_steps

BENCHMARKS = Path(run_all.__file__).parent
# grow.py makes models, drafters.py drafters; run_all.py runs the others; field.py, gguf_types.py
# and training_study.py need files that do not ship, family_speed.py llama.cpp's converter; scale.py
# is an account of a training.
NO_BENCHMARKS = {
    "__init__", "family_speed", "field", "gguf_types", "grow", "drafters", "pace_share", "run_all",
    "scale", "sessions", "training_study",
}  # fmt: skip


@pytest.mark.parametrize("size", ["full", "pycode"])
def test_every_benchmark_is_a_step_and_takes_its_flags(size: str, tmp_path: Path) -> None:
    flags = "--rounds 2 --lengths '4,8'"
    words = ["--size", size, "--output-dir", str(tmp_path), "--peers-flags", flags]
    steps = list_steps(parse_args(words), has_gpu=True)
    scripts = {Path(step[0]).stem for step in steps.values() if step[0] != "-m"}
    assert scripts == {path.stem for path in BENCHMARKS.glob("*.py")} - NO_BENCHMARKS
    assert steps["peers"][-4:] == ["--rounds", "2", "--lengths", "4,8"]
    for name, (script, *arguments) in steps.items():
        path = Path(*arguments[0].split(".")).with_suffix(".py") if script == "-m" else Path(script)
        package = {"peers": "side_by_side", "serve": "under_load"}.get(path.stem)
        files = [path, BENCHMARKS / "side_by_side" / "models.py"]  # which has the shared flags
        files += (BENCHMARKS / package).glob("*.py") if package else []
        source = "".join((BENCHMARKS.parent / file).read_text() for file in files)
        for flag in (word for word in arguments if word.startswith("--")):
            assert f'"{flag}"' in source, (name, flag)


def test_without_llama_cpp_nothing_is_beside_it() -> None:
    steps = list_steps(parse_args(["--peers", "specdec"]), has_gpu=False)
    assert not {"serve-load", "gpu"} & set(steps)
    assert "peers" in steps


def test_a_failing_step_is_named_and_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"first": ["-c", "print('one'); raise SystemExit(3)"], "second": ["-c", "print('two')"]}
    assert run_steps(steps, tmp_path / "out") == ["first"]
    records = json.loads((tmp_path / "out" / "steps.json").read_text())["steps"]
    assert [(name, step["exit_status"]) for name, step in records.items()] == [
        ("first", 3), ("second", 0),
    ]  # fmt: skip
    assert (tmp_path / "out" / "second.log").read_text() == "two\n"
    assert "one\n" in capfd.readouterr().out

    monkeypatch.setattr(run_all, "list_steps", lambda args, has_gpu: steps)
    with pytest.raises(SystemExit, match=r"1 of 2 steps failed: first\n.*STEP\.log"):
        main(["--output-dir", str(tmp_path / "out")])
    main(["--output-dir", str(tmp_path / "out"), "--only", "second"])


def test_unknown_steps_are_named_and_commands_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"no step wrong\nhint: batches, edits"):
        main(["--only", "wrong", "peers"])
    main(["--only", "serve-costs", "--list", "--output-dir", "/out"])
    command = f"{BENCHMARKS / 'serve.py'} costs --size full --output /out/serve-costs.json"
    assert capsys.readouterr().out == f"serve-costs: {command}\n"
