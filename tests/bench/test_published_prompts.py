"""specdec-bench reads the files of Spec-Bench and HumanEval as they are published."""

from __future__ import annotations

import collections
import gzip
import json
from pathlib import Path

import pytest

from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError
from specdec.measure.prompts import MT_BENCH_CATEGORIES, group_requests, read_prompt_set
from specdec.measure.report import format_report
from specdec.text.pretrained import load_tokenizer
from tests.bench.test_bench import bench

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_spec_bench(folder: Path) -> Path:
    """Ten questions of each category in the order and with the keys of the published file."""
    lines: list[dict[str, object]] = []
    for category in (*MT_BENCH_CATEGORIES, *TASKS):
        turns = (
            [f"def {category}", "x ="] if category in MT_BENCH_CATEGORIES else [f"The {category}"]
        )
        for _ in range(10):
            lines.append({"question_id": 81 + len(lines), "category": category, "turns": turns})
            if category not in MT_BENCH_CATEGORIES[:1]:
                lines[-1]["reference"] = ["a"]
    write_lines(folder / "data" / "spec_bench" / "question.jsonl", lines)
    return folder


def write_human_eval(path: Path) -> Path:
    lines: list[dict[str, object]] = [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(a):\n", "entry_point": f"f{n}",
         "canonical_solution": "    return a\n", "test": "def check(candidate): ..."}
        for n in range(5)
    ]  # fmt: skip
    write_lines(path, lines)
    return path


def test_spec_bench_has_six_tasks(tmp_path: Path) -> None:
    folder = write_spec_bench(tmp_path / "Spec-Bench")
    prompts = read_prompt_set(Path(f"spec-bench:{folder}"))
    counts = collections.Counter(prompt.category for prompt in prompts)
    assert list(counts) == ["mt_bench", *TASKS]
    assert list(counts.values()) == [80, 10, 10, 10, 10, 10]
    assert {len(p.turns) for p in prompts if p.category == "mt_bench"} == {2}
    prompts_of_file = read_prompt_set(Path(f"spec-bench:{folder / 'data' / 'spec_bench'}"))
    assert prompts_of_file == prompts
    few = read_prompt_set(Path(f"spec-bench:{folder}"), num_each=8)
    assert collections.Counter(p.category for p in few) == dict.fromkeys(counts, 8)
    # One of each of MT-bench's categories.
    assert [p.turns[0] for p in few[:8]] == [f"def {name}" for name in MT_BENCH_CATEGORIES]
    assert read_prompt_set(Path(f"spec-bench:{folder}"), num_each=99) == prompts


@pytest.mark.parametrize("name", ["HumanEval.jsonl.gz", "HumanEval.jsonl"])
def test_human_eval_is_what_a_user_asks(name: str, folder: Path, tmp_path: Path) -> None:
    """In the chat template where there is one, else the function's head itself."""
    path = write_human_eval(tmp_path / name)
    prompts = read_prompt_set(Path(f"humaneval:{path}"))
    tokenizer = load_tokenizer(str(folder / "target"))
    settings = DecodeSettings(engine_dir=folder)
    for template in (None, TEMPLATE):
        tokenizer.chat_template = template
        (requests,) = group_requests(prompts, settings, tokenizer, lambda _: []).values()
        text = "def f4(a):\n" if template is None else "<user>def f4(a):\n<assistant>"
        expected = tokenizer(text, add_special_tokens=template is None)["input_ids"]
        assert requests[4].input_ids == expected
    assert [prompt.category for prompt in prompts] == ["humaneval"] * 5


@pytest.mark.thorough
def test_a_report_has_a_row_for_each_task(engine: Path, folder: Path, tmp_path: Path) -> None:
    spec_bench = write_spec_bench(tmp_path)
    report = bench(
        engine, folder, prompts=Path(f"spec-bench:{spec_bench}"), prompts_per_category=1,
        batch_sizes="1", repeat=1,
    )  # fmt: skip
    (batch,) = report["batches"]
    assert list(batch["categories"]) == ["mt_bench", *TASKS]
    assert [category["texts"]["compared"] for category in batch["categories"].values()] == [
        2,
        1,
        1,
        1,
        1,
        1,
    ]
    assert all(p["texts"]["equal"] == p["texts"]["compared"] for p in batch["categories"].values())
    assert report["num_prompts"] == 7
    (row,) = (line for line in format_report(report).splitlines() if line.startswith("mt_bench"))
    assert row.endswith("2 of 2")


def test_what_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    def refuse(prompts: str) -> str:
        with pytest.raises(SpecDecError) as caught:
            read_prompt_set(Path(prompts))
        return caught.value.message

    assert "holds no Spec-Bench" in refuse(f"spec-bench:{tmp_path}")
    lines: list[dict[str, object]] = [{"task_id": "a", "input_ids": [1]}, {"prompt": "a"}]
    for line in lines:
        write_lines(tmp_path / "a.jsonl", [line])
        message = refuse(f"humaneval:{tmp_path / 'a.jsonl'}")
        assert 'line 1 has no "task_id" or no "prompt"' in message
    path = write_human_eval(tmp_path / "a.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-9])
    assert "a.jsonl.gz is not gzip" in refuse(f"humaneval:{path}")
    path.write_text("no gzip")
    assert "a.jsonl.gz is not gzip" in refuse(f"humaneval:{path}")
    assert "is neither .txt nor .jsonl" in refuse(f"{write_human_eval(tmp_path / 'a.gz')}")
