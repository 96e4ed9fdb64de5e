"""specdec generate: the three stages' own text, from an engine that is kept while it is right."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec import Engine
from specdec.command.stages import load_command
from specdec.errors import SpecDecError, UsageError
from specdec.files.engine_cache import EngineCache
from specdec.generate import pipeline
from specdec.system import logs
from tests.conftest import (
    ROOT,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_tokenizer,
    read_error_lines,
)
from tests.convert.hub_server import COMMIT, HubServer
from tests.engines import run_cli_here
from tests.families import make_family_model
from tests.forks import fork, run_main

PROMPTS = ("abc", "hello there")
Generate = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("models")
    make_tokenizer(make_llama(parent, seed=3))
    make_drafter(parent, exit_dim=80, seed=5, scale=3.0)
    make_tokenizer(make_llama(parent / "small", hidden=32, layers=1, seed=4))
    return parent


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and no compiler: kernels are not what is tested."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "none")


def call(stage: str, *args: object) -> Any:
    """Run a command; also `report`, its JSON, and `ids` of its outputs where it printed any."""
    done: Any = run_cli_here(stage, *args)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("{"):
        done.report = json.loads(done.stdout)
        done.ids = [output["output_ids"] for output in done.report["outputs"]]
    return done


@pytest.fixture
def generate(models: Path) -> Generate:
    def generate(*args: object, model: Path = models / "target") -> Any:
        return call("generate", "--model-dir", model, "--max-output-len", 8, *args)

    return generate


def test_the_text_is_that_of_the_three_commands(
    models: Path, generate: Generate, tmp_path: Path
) -> None:
    flags = ["--drafter-model-dir", models / "drafter", "--redrafter-num-beams", 2]
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    call("convert", "--model-dir", models / "target", "--output-dir", checkpoint, *flags)
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine)
    expected = call(
        "run", "--engine-dir", engine, "--tokenizer-dir", models / "target", "--json",
        "--max-output-len", 8, "--input-text", *PROMPTS,
    )  # fmt: skip
    first = generate(*flags, "--json", *PROMPTS)
    again = generate(*PROMPTS, *flags, "--json")
    assert first.ids == expected.ids == again.ids
    assert first.report["stats"]["method"] == "suffix,redrafter"
    assert "\ncheckpoint " in "\n" + first.stderr
    assert "checkpoint" not in again.stderr, "it is converted once"
    assert ".partial" not in first.stderr, "a folder is named as it will be found"
    (entry,) = [path for path in (tmp_path / "cache" / "generate").iterdir() if path.is_dir()]
    assert sorted(path.name for path in entry.iterdir()) == ["engine"]
    for done, how in ((first, "engine kept: "), (again, "engine taken from the cache: ")):
        (line,) = [line for line in done.stderr.splitlines() if line.startswith(how)]
        assert str(entry / "engine") in line
        assert " MB" in line


def test_a_drafter_of_any_method(models: Path, generate: Generate, tmp_path: Path) -> None:
    heads = make_medusa_heads(tmp_path)
    for option in ("--drafter-model-dir", "--medusa-model-dir"):
        done = generate(option, heads, "--json", "abc")
        assert done.report["stats"]["method"] == "suffix,medusa"
    done = generate("--drafter-model-dir", models / "target", "--draft-len", 2, "--json", "abc")
    assert done.report["stats"]["method"] == "draft_target", "a whole model drafts by itself"


def test_one_engine_serves_all_drafts_without_weights(
    models: Path, generate: Generate, tmp_path: Path
) -> None:
    """Every method and length, and plain decoding; a draft model has an engine beside it."""
    plain = generate(*PROMPTS, "--json")
    small = models / "small" / "target"
    runs: list[tuple[str, list[object]]] = [
        ("prompt_lookup", ["--prompt-lookup-num-tokens", 3]),
        ("suffix", ["--suffix-max-tokens", 4]),
        ("suffix", ["--suffix-max-tokens", 6]),
        ("suffix", ["--suffix-max-tokens", 8]),
        ("lookahead", ["--lookahead-config", "[2,2,2]"]),
        ("draft_target", ["--draft-model-dir", small, "--draft-len", 2]),
        ("draft_target", ["--draft-model-dir", small, "--draft-len", 11]),
        ("plain", ["--no-speculation", "--suffix-max-tokens", 5]),
        ("plain", ["--no-speculation", "--draft-model-dir", small]),
    ]
    num_conversions = 0
    for method, flags in runs:
        done = generate(*PROMPTS, "--json", *flags)
        assert done.ids == plain.ids
        assert done.report["stats"]["method"] == method
        num_conversions += done.stderr.count("\ncheckpoint ")
    assert num_conversions == 1, "that of the draft model"
    entries = [path for path in (tmp_path / "cache" / "generate").iterdir() if path.is_dir()]
    assert len(entries) == 2
    alone = generate("abc", "--json", model=small)
    assert "engine taken from the cache" in alone.stderr


@pytest.mark.parametrize(
    ("flags", "stdin", "message"),
    [
        (["--input-file", "-"], '{"prompt": 3}\n', "line 1: prompt is 3, not a text"),
        (["--input-file", "-"], '{"prompt": "a", "logprobs": 1}\n', "add --json"),
        (
            ["abc", "--show-drafts", "--streaming", "--suffix-max-tokens", "3"],
            "",
            "what is rejected is known when",
        ),
        (["abc", "--show-drafts", "--no-speculation"], "", "no effect with --no-speculation"),
        (["abc", "--draft-len", "auto", "--no-speculation"], "", "no effect with --no-speculation"),
        (
            ["--input-file", "-", "--chat-template", "raw", "--no-apply-chat-template"],
            "abc",
            "--chat-template has no effect on texts with --no-apply-chat-template",
        ),
        ([""], "", "prompt 0 is empty"),
        (["abc", "--max-seq-len", "20", "--max-output-len", "19"], "", "lower --max-output-len"),
        (["a", "--draft-model-dir", "x", "--draft-budget", "fixed"], "", "give --draft-len N"),
        (["a", "--model-dir", "x/y"], "", "--model-dir x/y is not a local folder"),
        (
            ["--input-file", "-"],
            '{"text": "a"}',
            "stdin line 1: unknown key 'text' (did you",
        ),
        (["abc", "--apply-chat-template"], "", "the tokenizer has no chat template"),
        (["abc", "--temperature", "1,2"], "", "--temperature has 2 values for 1 prompts"),
    ],
)
def test_prompts_are_checked_before_anything_is_built(
    models: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], stdin: str, message: str
) -> None:
    monkeypatch.setattr(pipeline, "make_engine", lambda *_: pytest.fail("built first"))
    done = run_cli_here("generate", "--model-dir", models / "target", *flags, stdin=stdin)
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-seq-len", "100000"], "max_seq_len=100000 exceeds the model's"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--backend", "tensorrt-llm"], "TensorRT-LLM is not installed here"),
        (["--quantization", "int4"], "its columns in groups of 32"),
        (["--drafter-weights", "int8"], "the checkpoint has no drafter"),
        (["--eagle-choices", "[[0]]"], "--eagle-choices has no effect with an engine that runs"),
        (["--draft-budget", "fixed"], "--draft-budget fixed has no effect with plain decoding"),
        (["--draft-model-dir", "OTHER", "--draft-len", "2"], "the tokenizers differ"),
        (["--eagle-model-dir", "EAGLE", "--eagle-choices", "[[0],[999]]"], "999"),
        (["--lookahead-config", "[2,2,2]", "--model-dir", "HYBRID"], "is a hybrid whose states"),
        (["--draft-model-dir", "SHORT", "--max-seq-len", "200"], "max_position_embeddings=128"),
        (["--suffix-max-tokens", "1024"], "suffix decoding drafts 1024 tokens a step, the engine"),
        (
            ["--draft-model-dir", "SHORT", "--max-seq-len", "99", "--draft-len", "1024"],
            "has room for 1023",
        ),
    ],
)
def test_what_the_stages_refuse_is_known_before(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.setattr(pipeline, "make_engine", lambda *_: pytest.fail("built first"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "OTHER" in flags:
        other = make_llama(tmp_path, hidden=32, layers=1, vocab=130, name="OTHER")
        make_tokenizer(other, vocab=130)
    if "EAGLE" in flags:
        make_eagle_drafter(tmp_path).rename(tmp_path / "EAGLE")
    if "HYBRID" in flags:
        make_tokenizer(make_family_model(tmp_path, "qwen3_5", vocab=128, name="HYBRID"))
    if "SHORT" in flags:
        short = make_llama(tmp_path, hidden=32, layers=1, name="SHORT", max_position_embeddings=128)
        make_tokenizer(short)
    flags = [str(tmp_path / flag) if flag.isupper() else flag for flag in flags]
    done = run_cli_here(
        "generate", "--model-dir", models / "target", *flags, "--max-output-len", 4, "abc"
    )
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.split())
    assert not list((tmp_path / "cache").glob("generate/*"))


def test_a_download_is_told_while_an_engine_is_planned(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the work tells itself is told once."""

    def foresee(settings: Any) -> Any:
        logs.get_logger("specdec.convert.hub").info("fetching %s", settings.model_dir)
        logs.get_logger("specdec.convert.pipeline").warning("told later")
        raise SpecDecError("no network", "connect")

    monkeypatch.setattr(load_command("convert"), "foresee", foresee)
    done = run_cli_here("generate", "--model-dir", models / "target", "abc")
    assert "fetching " in done.stderr
    assert "told later" not in done.stderr
    assert "error: no network" in done.stderr


def test_hints_about_lengths_lead_to_their_end(generate: Generate, models: Path) -> None:
    """What a hint says is enough, and no hint names an option that cannot help."""
    short = ("generate", "--model-dir", models / "target", "--max-output-len", 8)
    done = run_cli_here(*short, "--max-seq-len", 12, "a b c d e f")
    fact, hint = read_error_lines(done.stderr)
    (length,) = re.findall(r"give --max-seq-len (\d+) or more", hint)
    assert generate("--max-seq-len", length, "a b c d e f").returncode == 0
    fact, hint = read_error_lines(run_cli_here(*short, "x" * 600).stderr)
    assert "max_input_len is 511" in fact
    assert "--max" not in hint
    assert "the model takes 512 tokens at most" in hint


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(models / "target", folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def test_a_chat_model_gets_a_chat(chat_model: Path, generate: Generate, tmp_path: Path) -> None:
    form, text = "prompts: each is a user's turn", "prompts: text to continue"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "abc"}]}\n{"prompt": "hello there"}\n'
    )
    chat = generate("--json", *PROMPTS, model=chat_model)
    outputs = chat.report["outputs"]
    assert [o["input_text"] for o in outputs] == [f"<user>{p}<answer>" for p in PROMPTS]
    assert chat.stderr.count(form) == 1
    assert "--no-apply-chat-template" in chat.stderr
    assert chat.ids == generate("--json", "--input-file", rows, model=chat_model).ids
    assert chat.ids == generate("--json", *PROMPTS, "--apply-chat-template", model=chat_model).ids
    streamed = generate("--streaming", *PROMPTS, model=chat_model)
    assert streamed.stdout == generate(*PROMPTS, model=chat_model).stdout
    bare = generate("--json", *PROMPTS, "--no-apply-chat-template", model=chat_model)
    assert bare.stderr.count(text) == 1
    base = generate("--json", *PROMPTS)
    assert base.ids == bare.ids != chat.ids
    assert f"{text} (the model has no chat template)" in base.stderr
    given = generate("--json", *PROMPTS, "--chat-template", chat_model / "chat_template.jinja")
    assert given.ids == chat.ids


def test_a_prompt_with_the_template_written_out_is_told(
    chat_model: Path, generate: Generate
) -> None:
    told = "<s> in a prompt is taken as text"
    assert told in generate("<s>abc", model=chat_model).stderr
    assert told not in generate("<s>abc", "--no-apply-chat-template", model=chat_model).stderr
    assert told not in generate("abc", model=chat_model).stderr


def test_run_says_how_a_chat_model_gets_a_chat(
    chat_model: Path, generate: Generate, tmp_path: Path
) -> None:
    generate("abc", model=chat_model)
    (engine,) = (tmp_path / "cache" / "generate").glob("*/engine")
    run = ("run", "--engine-dir", engine, "--tokenizer-dir", chat_model, "--max-output-len", 2)
    told = "prompts: text to continue (--apply-chat-template"
    assert told in call(*run, "--input-text", "abc").stderr
    for flag in ("--apply-chat-template", "--no-apply-chat-template"):
        assert told not in call(*run, "--input-text", "abc", flag).stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "abc"}]}\n')
    assert told not in call(*run, "--input-file", rows).stderr
    row = json.loads(rows.read_text()) | {"chat_template_kwargs": {"role": 1, "tihnk": False}}
    rows.write_text(json.dumps(row))
    told = "the chat template does not read tihnk"
    assert call(*run, "--input-file", rows).stderr.count(told) == 1


def test_stdin_is_read_once(models: Path, generate: Generate) -> None:
    words = ("generate", "--model-dir", models / "target", "--max-output-len", 8, "--input-file")
    done = run_cli_here(*words, "-", "--json", stdin="abc\nhello there\n")
    assert [o["output_ids"] for o in json.loads(done.stdout)["outputs"]] == generate(
        *PROMPTS, "--json"
    ).ids


def test_a_tokenizer_from_elsewhere(models: Path, generate: Generate, tmp_path: Path) -> None:
    bare = make_llama(tmp_path, seed=3)
    expected = generate("abc", "--json")
    done = generate("abc", "--json", "--tokenizer-dir", models / "target", model=bare)
    assert done.ids == expected.ids


def test_whatever_goes_in_makes_another_engine(generate: Generate, tmp_path: Path) -> None:
    mine = make_llama(tmp_path, seed=3)
    make_tokenizer(mine)
    folder = tmp_path / "cache" / "generate"
    seen: set[str] = set()

    def count_new(*args: object) -> int:
        generate("abc", *args, model=mine)
        entries = {path.name for path in folder.iterdir() if path.is_dir()}
        new = len(entries - seen)
        seen.update(entries)
        return new

    assert count_new() == 1
    assert count_new("--temperature", 1, "--streaming") == 0, "options of run make no engine"
    assert count_new("--dtype", "bfloat16") == 1
    assert count_new("--max-seq-len", 40) == 1
    os.utime(mine / "config.json", ns=(1, 1))
    assert count_new() == 1
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    module = "base_model.model.model.layers.0.mlp.up_proj"
    factors = {
        f"{module}.lora_A.weight": torch.ones(1, 64),
        f"{module}.lora_B.weight": torch.ones(112, 1),
    }
    save_file(factors, adapter / "adapter_model.safetensors")
    assert count_new("--lora-dir", adapter) == 1


def test_what_a_killed_process_left_goes_a_day_later(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / f"specdec-generate-{name}" for name in ("old", "used", "new")]
    with contextlib.ExitStack() as stack:
        for folder in folders:
            with contextlib.ExitStack() as use:
                use.enter_context(EngineCache(folder).hold("a", lambda _: None, force=False))
                if folder.name.endswith("used"):
                    stack.push(use.pop_all())
            if not folder.name.endswith("new"):
                for path in (folder, folder / "a.lock"):
                    os.utime(path, (1000, 1000))
        link = tmp_path / "specdec-generate-link"
        link.symlink_to(tmp_path)
        os.utime(link, (1000, 1000), follow_symlinks=False)
        generate("abc", "--no-cache")
        assert [folder.exists() for folder in folders] == [False, True, True]
        assert (folders[1] / "a").is_dir()
        assert link.is_symlink()


def test_an_engine_that_is_not_kept(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert "not kept" in generate("abc", "--no-cache").stderr
    assert not (tmp_path / "cache" / "generate").exists()
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").touch()
    told = generate("abc").stderr
    assert "cache is a file, so the engine is not kept" in told
    assert re.search(r"^engine of [0-9.]+ MB, not kept$", told, re.MULTILINE)
    assert "engine kept" not in told
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: temporary in path.parents)
    assert "cache is read-only, so the engine is not kept" in generate("abc").stderr
    assert not (tmp_path / "cache" / "generate").exists()
    assert list(temporary.iterdir()) == []


def test_two_processes_share_one_conversion(models: Path) -> None:
    words = ("generate", "--model-dir", models / "target", "--max-output-len", 4, "abc")
    both = [fork(lambda: run_main(*words)) for _ in range(2)]
    told = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0]
    assert sum("\nengine kept: " in errors for _, errors in told) == 1


def test_a_failed_build_leaves_nothing(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = pipeline.call_stage

    def fail(stage: str, options: dict[str, Any]) -> None:
        if stage == "build":
            raise SpecDecError("no space is left", "free some")
        honest(stage, options)

    monkeypatch.setattr(pipeline, "call_stage", fail)
    with pytest.raises(AssertionError, match="no space is left"):
        generate("abc")
    left = [path.suffix for path in (tmp_path / "cache" / "generate").iterdir()]
    assert left == [".lock"]


def test_clearing_spares_what_is_in_use(generate: Generate, tmp_path: Path) -> None:
    generate("abc")
    cache = EngineCache(tmp_path / "cache" / "generate")

    def make(folder: Path) -> None:
        (folder / "file").write_bytes(b"123")

    with cache.hold("other", make, force=False) as folder:
        told = call("generate", "--clear-cache").stderr
        assert "1 engine removed" in told
        assert "1 in use are left" in told
        assert (folder / "file").is_file()
    removed_entries, num_used = cache.clear()
    assert [(entry.name, entry.num_bytes) for entry in removed_entries] == [("other", 3)]
    assert num_used == 0
    assert [path for path in cache.folder.iterdir() if path.is_dir()] == []


def test_engines_beyond_the_limit_go(
    models: Path, generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used; one alone is made and stays, and so does one that is loaded."""
    folder = tmp_path / "cache" / "generate"

    def list_names() -> set[str]:
        return {path.name for path in folder.iterdir() if path.is_dir()}

    monkeypatch.setenv("SPECDEC_MAX_CACHE_GB", "0")
    alone = generate("abc")
    assert "the engines in use take 0." in alone.stderr
    assert "beyond its limit of 0 GB (SPECDEC_MAX_CACHE_GB)" in alone.stderr
    assert "removed" not in alone.stderr
    (first,) = list_names()
    with Engine.load(folder / first / "engine", tokenizer=models / "target"):
        assert "removed" not in generate("abc", "--max-seq-len", 40).stderr
        assert len(list_names()) == 2
    done = generate("abc", "--max-seq-len", 50)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("removed 2 engines of")]
    assert first in line
    assert len(list_names()) == 1
    monkeypatch.setenv("SPECDEC_MAX_CACHE_GB", "many")
    failed = run_cli_here("generate", "--model-dir", models / "target", "abc", "--dtype", "float16")
    assert read_error_lines(failed.stderr)[0] == "SPECDEC_MAX_CACHE_GB is 'many'"
    assert len(list_names()) == 1


def test_forced_work_is_done_again(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path)
    made = []
    for force in (False, False, True):
        with cache.hold("engine", lambda folder: made.append(folder), force=force) as folder:
            assert folder == tmp_path / "engine"
    assert len(made) == 2


def test_a_hub_model_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = "import json, sys; from specdec.generate.sources import describe_model as d;"
    code += "print(json.dumps(d('someone/small')))"

    def describe(**env: str) -> dict[str, Any]:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **env,
        }  # fmt: skip
        command = [sys.executable, "-c", code]
        found: dict[str, Any] = json.loads(subprocess.check_output(command, env=environment))
        return found

    with HubServer({"someone/small": tmp_path}) as server:
        assert describe(HF_ENDPOINT=server.url)["commit"] == COMMIT
    assert describe(HF_HUB_OFFLINE="1")["commit"] is None
    ref = tmp_path / "hf" / "hub" / "models--someone--small" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("abc123")
    assert describe(HF_HUB_OFFLINE="1") == {"hub": "someone/small", "commit": "abc123"}


@pytest.mark.parametrize(
    ("args", "fact"),
    [
        (["abc"], "missing --model-dir"),
        (["--model-dir", "x"], "no prompt was given"),
        (["--model-dir", "x", "--stop-words", "y", "abc"], "no prompt was given"),
        (
            ["--model-dir", "x", "--drafter-model-dir", "y", "--draft-model-dir", "z", "abc"],
            "--drafter-model-dir and --draft-model-dir exclude one another",
        ),
        (["--clear-cache", "abc"], "TEXT was given too"),
    ],
)
def test_what_cannot_be_meant(args: list[str], fact: str) -> None:
    with pytest.raises(UsageError, match=re.escape(fact)):
        load_command("generate").main(args, standalone_mode=False)


@pytest.mark.parametrize("flag", ["--model-dir", "--draft-model-dir"])
@pytest.mark.parametrize(
    ("name", "status"), [("/nonexistent", 1), ("nobody/nothing", 1), (__file__, 1), ("", 2)]
)
def test_a_missing_model_leaves_nothing(
    flag: str, name: str, status: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models / "target")
    given = [] if flag == "--model-dir" else ["--model-dir", models / "target"]
    done = run_cli_here("generate", *given, flag, name, "abc")
    assert done.returncode == status
    fact, hint = read_error_lines(done.stderr)
    assert f"{flag} {name or 'is empty'}" in fact
    assert not (tmp_path / "cache").exists()
    assert hint
    assert "Traceback" not in done.stderr
