"""The command specdec-run: text and JSON, prompts, limits, damaged engines."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest

from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json, write_json
from specdec.files.staging import check_output_file, write_whole
from specdec.files.tensor_file import TensorFile
from specdec.methods.suffix import DEFAULT_TOKENS
from specdec.run import cli as run_cli_module
from specdec.run.cli import format_stats
from tests.conftest import make_drafter, make_llama, make_tokenizer, read_error_lines, run_cli
from tests.engines import call, make_engine, run_cli_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and an engine of 512 positions and 3 requests a batch."""
    parent = tmp_path_factory.mktemp("run")
    target, drafter = make_llama(parent), make_drafter(parent, exit_dim=96, scale=3.0)
    make_tokenizer(parent / "tokenizer")
    make_engine(
        parent, target, drafter, beams=3, length=3,
        build=["--max-batch-size", 3, "--max-input-len", 60],
    ).rename(parent / "engine")  # fmt: skip
    return parent


def list_flags(folder: Path, *args: object) -> list[object]:
    engine = ["--engine-dir", folder / "engine", "--tokenizer-dir", folder / "tokenizer"]
    return [*engine, *args]


def run(folder: Path, *args: object) -> dict[str, Any]:
    done = run_cli_here("run", *list_flags(folder, "--json", *args))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_json_report(folder: Path) -> None:
    flags = ["--input_text", "def a", "class", "x", "return", "--max_output_len", 12]
    report = run(folder, *flags)
    assert [o["index"] for o in report["outputs"]] == [0, 1, 2, 3]
    assert [o["input_text"] for o in report["outputs"]] == ["def a", "class", "x", "return"]
    for output in report["outputs"]:
        stats = output["stats"]
        assert len(output["output_ids"]) == stats["num_output_tokens"] <= 12
        assert output["finish_reason"] in ("length", "eos")
        assert sum(stats["accepted_histogram"]) == stats["num_verify_steps"]
        assert len(stats["accepted_histogram"]) == 1 + DEFAULT_TOKENS
        assert output["output_text"]
    stats = report["stats"]
    assert stats["method"] == "suffix,redrafter"
    assert stats["num_output_tokens"] == sum(len(o["output_ids"]) for o in report["outputs"])
    plain = run(folder, *flags, "--no-speculation")
    assert [o["output_ids"] for o in plain["outputs"]] == [
        o["output_ids"] for o in report["outputs"]
    ]
    assert plain["stats"]["method"] == "plain"
    assert plain["stats"]["acceptance_length"] == 1.0
    assert plain["outputs"][0]["stats"]["num_draft_tokens"] == 0


def test_a_pasted_share_of_gpu_memory_is_no_error(folder: Path) -> None:
    pasted = ["--max_output_len", 5, "--kv_cache_free_gpu_memory_fraction=0.4"]
    done = run_cli_here("run", *list_flags(folder, "--input_text", "def a", *pasted))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("--kv-cache-free-gpu-memory-fraction has no effect") == 1


def test_text_form_and_output_file(folder: Path, tmp_path: Path) -> None:
    """As a process, which the other tests spare."""
    flags = ["--max-output-len", 5, "--output-file", tmp_path / "out.txt", "--run-profiling"]
    done = run_cli("run", *list_flags(folder, "--input-text", "ab", "cd", *flags))
    assert done.returncode == 0, done.stderr
    assert 'Input [Text 0]: "ab"\nOutput [Text 0 Beam 0]: "' in done.stdout
    assert 'Input [Text 1]: "cd"\nOutput [Text 1 Beam 0]: "' in done.stdout
    assert (tmp_path / "out.txt").read_text() == done.stdout
    assert "tokens per verify step" in done.stderr
    assert "draft " in done.stderr


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("failing", ["stdout", "file"])
def test_one_of_both_outputs_fails(
    failing: str, is_json: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has gone, or a full disk, left no --output-file."""

    def fail(*_: object, **options: object) -> None:
        if not options.get("err"):
            raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "stdout":
        monkeypatch.setattr(click, "echo", fail)
    else:
        monkeypatch.setattr(run_cli_module, "write_whole", fail)
    flags = ["--max-output-len", 2, "--output-file", tmp_path / "out", *["--json"] * is_json]
    done = run_cli_here("run", *list_flags(folder, "--input-text", "ab", *flags))
    assert done.returncode == 1
    text = (tmp_path / "out").read_text() if failing == "stdout" else done.stdout
    assert ('"outputs"' if is_json else "Output [Text 0 Beam 0]") in text


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "1.05 tokens per verify step, nothing drafted in 298 of 310"),
        ({"num_drafted_steps": 300}, "1.05 tokens per verify step"),  # the last of each text
        ({"num_drafted_steps": None}, "1.05 tokens per verify step"),
        ({"method": "plain", "num_drafted_steps": 0}, "1.05 tokens per verify step"),
        ({"num_verify_steps": 0, "num_drafted_steps": 0}, "1.05 tokens per verify step"),
    ],
)
def test_the_line_says_where_nothing_was_drafted(values: dict[str, Any], told: str) -> None:
    stats = {
        "method": "eagle", "device": "cpu", "dtype": "float32", "num_output_tokens": 326,
        "generate_seconds": 1.0, "tokens_per_second": 326.0, "acceptance_length": 1.05,
        "num_verify_steps": 310, "num_drafted_steps": 12, **values,
    }  # fmt: skip
    assert format_stats(stats).endswith(told)


def test_jsonl_requests(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "ab", "max_output_len": 3}, {"input_ids": [5, 6, 7]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8-sig")  # with the mark that editors of Windows begin with
    report = run(folder, "--input-file", file, "--max-output-len", 6, "--end-id", 0)
    assert report["outputs"][0]["input_text"] == "ab"
    assert len(report["outputs"][0]["output_ids"]) == 3
    assert report["outputs"][1]["input_ids"] == [5, 6, 7]
    assert report["outputs"][1]["stats"]["num_output_tokens"] == 6
    file.write_text('{"input_ids": [5, 6, 7], "max_output_len": 6}\n')
    bare = ["--engine-dir", folder / "engine", "--input-file", file, "--json"]
    (output,) = json.loads(run_cli_here("run", *bare).stdout)["outputs"]
    assert output["output_ids"] == report["outputs"][1]["output_ids"], "ids need no tokenizer"


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_of_the_base_model(name: str, folder: Path, tmp_path: Path) -> None:
    """transformers takes config.json's where there is no generation_config.json."""
    free = run(folder, "--input-text", "ab", "--max-output-len", 10, "--end-id", 0)
    ids = free["outputs"][0]["output_ids"]
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    write_json(tmp_path / "tokenizer" / name, {"eos_token_id": [0, ids[4]]})
    flags = ["--tokenizer-dir", tmp_path / "tokenizer", "--input-text", "ab"]
    (output,) = run(folder, *flags, "--max-output-len", 10)["outputs"]
    assert output["output_ids"] == ids[: ids.index(ids[4]) + 1]
    assert output["finish_reason"] == "eos"


def test_defaults_that_are_not_applied_are_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    told = {"repetition_penalty": 1.05, "top_k": 20, "top_p": 1.0, "suppress_tokens": [3]}
    write_json(tmp_path / "tokenizer" / "generation_config.json", told)
    flags = list_flags(folder, "--input-text", "ab", "--max-output-len", 2)
    done = run_cli_here("run", *flags, "--tokenizer-dir", tmp_path / "tokenizer")
    assert "each request: top_k 20, repetition_penalty 1.05, suppress_tokens [3]" in done.stderr


def test_limits_name_every_prompt(folder: Path) -> None:
    texts = ["ab", "y " * 40, "cd"]
    done = run_cli_here("run", *list_flags(folder, "--input-text", *texts, "--max-output-len", 511))
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = read_error_lines(done.stderr)
    assert "prompt 0 has 2 tokens and asks for 511 more, the engine's max_seq_len is 512" in error
    assert "max_input_len is 60" in error
    assert "prompt 2" in error
    assert "lower --max-output-len to 510: the model takes 512 tokens at most" in hint
    assert "--max-seq-len" not in hint  # which could not be more
    done = run_cli_here("run", *list_flags(folder, "--input-text", texts[1], "--max-output-len", 9))
    assert "or build with --max-input-len 80 or more" in " ".join(done.stderr.split())


def test_where_writing_fails_the_old_output_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.txt").write_text("old")
    real = Path.write_text

    def fill_disk(path: Path, text: str, **kind: Any) -> None:
        real(path, text[:1], **kind)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(OSError, match="No space left.*out.txt"):
        write_whole(tmp_path / "out.txt", "new", force=True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.txt", "old")]


@pytest.mark.parametrize(
    ("flag", "name", "match"),
    [
        ("--output-file", "", "is a folder"),
        ("--output-file", "file/x", "cannot be written: .*file is a file"),
        ("--output-file", "file/no/x", "cannot be written: .*file is a file"),
        ("--output-file", "file", "file exists"),
        ("--input-file", "", "is a folder"),
        ("--input-file", "none.txt", "none.txt does not exist"),
        ("--input-file", "file", r"neither \.txt nor \.jsonl"),
        ("--tokenizer-dir", "", "has no tokenizer"),
    ],
)
def test_files_that_cannot_be_used(
    folder: Path, tmp_path: Path, flag: str, name: str, match: str
) -> None:
    """Told before anything is generated."""
    (tmp_path / "file").touch()
    texts = [] if flag == "--input-file" else ["--input-text", "a"]
    with pytest.raises(SpecDecError, match=match):
        call("run", "--engine-dir", folder / "engine", *texts, flag, tmp_path / name)


def test_the_folder_of_an_output_is_made(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "no" / "such" / "out.json"
    flags = ["--max-output-len", 2, "--output-generation-logits", "--output-file", out]
    call("run", *list_flags(folder, "--input-text", "ab", *flags))
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "out.json", "out.logits.safetensors",
    ]  # fmt: skip


def test_an_output_is_replaced_only_with_force(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes about while the text is generated, and for the logits alongside it."""
    out, logits = tmp_path / "out.txt", tmp_path / "out.logits.safetensors"
    flags = ["--max-output-len", 2, "--output-generation-logits", "--output-file", out]
    run = list_flags(folder, "--input-text", "ab", *flags)
    for path in (out, logits):
        path.write_text("kept")
        with pytest.raises(SpecDecError, match=f"{path} exists"):
            call("run", *run)
        assert [p.read_text() for p in tmp_path.iterdir()] == ["kept"]
        path.unlink()

    def check_too_early(path: Path, *, force: bool, inputs: list[Path]) -> None:
        check_output_file(path, force=force, inputs=inputs)
        path.write_text("kept")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.run.pipeline.check_output_file", check_too_early)
        with pytest.raises(SpecDecError, match="made since"):
            call("run", *run)
    assert {p.read_text() for p in tmp_path.iterdir()} == {"kept"}
    call("run", *run, "--force")
    assert "Output [Text 0 Beam 0]" in out.read_text()
    assert TensorFile(logits).tensors


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"input_ids": [500]}', "holds token 500, the model's vocabulary has 128"),
        ('{"input_ids": []}', "prompt 0 is empty"),
        ('{"input_ids": [5], "stop_token_ids": [128]}', "stop_token_ids 128, the model's vocab"),
        ('{"prompt": "a", "chat_template_kwargs": {"x": 1}}', "is a text and has chat_template_k"),
        ('{"input_ids": [5], "continue_final_message": true}', "is token ids and has continue_f"),
        ("", "holds no prompt"),
    ],
)
def test_prompts_that_the_engine_cannot_take(
    folder: Path, tmp_path: Path, line: str, match: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(SpecDecError, match=match):
        call("run", *list_flags(folder, "--input-file", file))


def test_end_token_of_the_flag(folder: Path) -> None:
    flags = ["--input-text", "ab", "--max-output-len", 10, "--end-id"]
    with pytest.raises(SpecDecError, match="--end-id is 128, the model's vocabulary has 128"):
        call("run", *list_flags(folder, *flags, 128))
    whole = run(folder, *flags, -1)["outputs"][0]["output_ids"]
    assert len(whole) == 10
    ended = run(folder, *flags, whole[4])["outputs"][0]["output_ids"]
    assert ended == whole[: whole.index(whole[4]) + 1]


def test_prompt_sources_are_exclusive(folder: Path) -> None:
    engine = ["--engine-dir", folder / "engine"]
    with pytest.raises(UsageError, match="exactly one of --input-text and --input-file"):
        call("run", *engine)
    with pytest.raises(UsageError, match="text prompts need a tokenizer"):
        call("run", *engine, "--input-text", "a")


def damage(folder: Path, name: str) -> None:
    config = read_json(folder / "config.json")
    if name == "missing config":
        (folder / "config.json").unlink()
        return
    if name == "a checkpoint":
        config = config["pretrained_config"]
    else:
        config["backend"] = "onnx"
    write_json(folder / "config.json", config)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("missing config", "config.json does not exist"),
        ("a checkpoint", "is a checkpoint folder, not an engine folder"),
        ("other backend", "built for the backend 'onnx'"),
    ],
)
def test_damaged_engines(folder: Path, tmp_path: Path, name: str, match: str) -> None:
    shutil.copytree(folder / "engine", tmp_path / "engine")
    damage(tmp_path / "engine", name)
    flags = ["--engine-dir", tmp_path / "engine", "--input-text", "a", "--device", "cpu"]
    with pytest.raises(SpecDecError, match=match):
        call("run", *list_flags(folder, *flags))
