"""Python's way to specdec generate: Engine.load takes a model, and chat answers with calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, PromptError, SpecDecError, UsageError
from specdec.decode.models import LoadedFolders, is_model, make_engines
from specdec.generate.library import hold_models, list_model_options
from specdec.text.encoding import TEMPLATES
from tests.conftest import make_drafter, make_llama, make_tokenizer
from tests.engines import run_cli_here
from tests.serve.servers import CALLING_TEMPLATE

PROMPTS = ["abc", "hello there"]
ADD = {
    "name": "add", "description": "Sum.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 3), ("small/target", 4)):
        folder = parent / name
        make_tokenizer(make_llama(folder.parent, hidden=32, layers=1, seed=seed))
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"chat_template": CALLING_TEMPLATE}
        path.write_text(json.dumps(config))
    make_drafter(parent, exit_dim=40, hidden=32, seed=5, scale=3.0)
    return parent


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of these tests' own, and no compiler."""
    folder = tmp_path_factory.getbasetemp() / "library-cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(folder))
    monkeypatch.setenv("CXX", "none")
    return folder / "generate"


@pytest.fixture
def engine(models: Path) -> Iterator[Engine]:
    with Engine.load(models / "target", device="cpu") as engine:
        yield engine


def list_entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("*") if path.is_dir())


def test_a_model_is_loaded_from_the_cache_of_generate(models: Path, cache: Path) -> None:
    done: Any = run_cli_here(
        "generate", "--model-dir", models / "target", "--max-output-len", 8, "--json",
        "--no-apply-chat-template", *PROMPTS,
    )  # fmt: skip
    expected = [output["output_ids"] for output in json.loads(done.stdout)["outputs"]]
    (entry,) = list_entries(cache)
    with Engine.load(models / "target", device="cpu") as engine:
        outputs = engine.generate(PROMPTS, max_output_len=8)
        assert run_cli_here("generate", "--clear-cache").returncode == 0
        assert list_entries(cache) == [entry], "an engine in use is left"
        assert engine.tokenizer is not None
    assert [output.token_ids for output in outputs] == expected
    assert run_cli_here("generate", "--clear-cache").returncode == 0
    assert list_entries(cache) == []


def test_drafters_beside_a_model(models: Path) -> None:
    """Of any method by what the folder holds, and a small model by both of its names."""
    target, small = models / "target", models / "small" / "target"
    for given, method in (
        ({"drafter": models / "drafter"}, "suffix,redrafter"),
        ({"drafter": small, "draft_len": 2}, "draft_target"),
        ({"draft": str(small), "draft_len": 2, "dtype": "float32"}, "draft_target"),
    ):
        with Engine.load(target, device="cpu", max_seq_len=64, **given) as engine:
            assert engine.describe()["method"] == method
            assert engine.max_seq_len <= 64


def test_wrong_uses_are_told_before_anything_is_made(models: Path, cache: Path) -> None:
    target = models / "target"
    with Engine.load(target, device=None, no_cache=True) as engine:  # type: ignore[arg-type]
        assert engine.describe()["device"] == "cpu"
    entries = list_entries(cache)
    for path, options, message in (
        (target, {"dtyp": "float32"}, "Engine.load has no option 'dtyp' (did you mean dtype?)"),
        (target, {"dtype": "float3"}, "dtype"),
        (target, {"drafter": models / "none"}, "none"),
        (models / "none", {}, "does not exist"),
        (models / "none", {"drafter": target}, "drafter says how a model is made an engine"),
        (models / "none", {"quantization": "int8"}, "quantization says how a model"),
        (target, {"max_seq_len": 1}, "max_seq_len"),
        (target, {"max_seq_len": "many"}, "max_seq_len: expected a whole number"),
        (target, {"max_batch_size": 0}, "max_batch_size: expected at least 1"),
        (target, {"max_batch_size": True}, "max_batch_size: expected a whole number"),
    ):  # fmt: skip
        with pytest.raises(SpecDecError) as caught:
            Engine.load(path, device="cpu", **options)
        assert message in f"{caught.value.message} {caught.value.hint}", caught.value
    assert list_entries(cache) == entries


def test_a_chat_answers_with_a_message(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = engine.chat(messages, max_output_len=6)
    assert output.message == {"role": "assistant", "content": output.text}
    assert output.prompt == "u:hi a:"
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    grammar = {"lark": f"start: {json.dumps(f'so {call}')}"}
    pytest.importorskip("llguidance")
    tools = [ADD, {"type": "function", "function": {**ADD, "name": "sub"}}]
    output = engine.chat(messages, tools=tools, max_output_len=99, grammar=grammar)
    assert output.prompt.startswith("T:add T:sub u:hi")
    assert output.message is not None
    (made,) = output.message["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert output.message["content"] == "so"
    result = {"role": "tool", "tool_call_id": made["id"], "content": "2"}
    history = [*messages, dict(output.message), result]
    again = engine.chat(history, tools=tools, max_output_len=4)
    assert f"a:so{call} t:2" in again.prompt
    cut = engine.chat(messages, tools=tools, max_output_len=20, grammar=grammar)
    assert cut.finish_reason == "length"
    assert cut.message is not None
    assert "<tool_call>" not in cut.message["content"]
    assert "tool_calls" not in engine.chat(messages, max_output_len=99, grammar=grammar).message  # type: ignore[operator]


def test_refusals_of_a_chat(engine: Engine, models: Path) -> None:
    for messages, tools, message in (
        ([], (), "not a list of messages"),
        ([{"content": "x"}], (), "message 0 is"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}], (), "no call"),
        ([{"role": "user", "content": "x"}], [{"type": "function"}], "tool 0 is"),
        ([{"role": "user", "content": "x"}], {"name": "f"}, "not a list"),
    ):
        with pytest.raises(PromptError, match=message):
            engine.chat(messages, tools=tools)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no setting 'max_tokens'"):
        engine.chat([{"role": "user", "content": "x"}], max_tokens=3)
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    path = models / "odd.jinja"
    path.write_text(template)
    with Engine.load(models / "target", device="cpu", chat_template=str(path)) as odd:
        with pytest.raises(PromptError, match="not known how the model writes tool calls"):
            odd.chat([{"role": "user", "content": "x"}], tools=[ADD])
    with Engine.load(models / "target", device="cpu", chat_template="chatml") as plain:
        assert TEMPLATES["chatml"] == plain.tokenizer.chat_template
        output = plain.chat([{"role": "user", "content": "x"}], tools=[ADD], max_output_len=2)
        assert "You can call functions." in output.prompt


def test_names_of_models(models: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert is_model(models / "target")
    assert is_model("owner/name")
    for name in (None, "", "name", tmp_path / "empty", f"{tmp_path}/missing", "a/b/c"):
        assert not is_model(name)


def test_options_of_a_model_are_told_from_those_of_decoding(tmp_path: Path, cache: Path) -> None:
    entries = list_entries(cache) if cache.exists() else []
    names = list_model_options()
    assert {"dtype", "quantization", "no_cache", "force"} <= {*names}
    assert not {"model_dir", "max_batch_size", "max_output_len"} & {*names}
    call: dict[str, Any] = {"drafter": None, "draft": None, "limits": {}, "device": "cpu"}
    with contextlib.ExitStack() as stack:
        folders = make_engines(stack, tmp_path, **call, options={"suffix_max_tokens": 4})
        assert folders == LoadedFolders(
            engine=tmp_path, draft=None, tokenizer=None, options={"suffix_max_tokens": 4}
        )
        for changes in ({"options": {"dtype": "float16"}}, {"options": {}, "drafter": "d"}):
            with pytest.raises(UsageError, match="says how a model is made an engine"):
                make_engines(stack, tmp_path, **call | changes)
        with pytest.raises(UsageError, match="dtype"):
            hold_models(stack, {"model_dir": "owner/name"}, {"dtype": 3})
    assert (list_entries(cache) if cache.exists() else []) == entries, "nothing is made"
