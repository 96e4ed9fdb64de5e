"""Plans of specdec generate: its settings, the engines it needs, the sources that name them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.layout import EngineConfig
from specdec.errors import SpecDecError, UsageError
from specdec.files.backends import BACKENDS, TENSORRT_LLM, TORCH
from specdec.generate import plans, sources
from specdec.generate.plans import EnginePlan
from specdec.generate.settings import GenerateSettings, check_settings
from tests.conftest import make_llama

Settings = GenerateSettings


def make_settings(**changes: Any) -> GenerateSettings:
    values: dict[str, Any] = {"texts": ["abc"], "model_dir": "model", "backend": TORCH}
    return Settings(**values | changes)


def test_a_stage_is_given_its_own_settings() -> None:
    """Those of run include the options of methods that need no drafter."""
    settings = make_settings(
        dtype="float16", max_batch_size=3, temperature="0.5", suffix_max_tokens=6, max_seq_len=50,
        draft_model_dir="small",
    )  # fmt: skip
    assert settings.list_stage("convert")["dtype"] == "float16"
    assert settings.list_stage("convert")["model_dir"] == "model"
    assert settings.list_stage("build")["max_batch_size"] == 3
    run = settings.list_stage("run")
    assert (run["temperature"], run["suffix_max_tokens"]) == ("0.5", 6)
    for stage in ("convert", "build", "run"):
        names = settings.list_stage(stage)
        assert not {"max_seq_len", "draft_model_dir", "texts", "no_cache"} & names.keys(), stage
    assert plans.list_changes("convert", settings.list_stage("convert")) == {
        "model_dir": "model", "dtype": "float16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fact", "remedy"),
    [
        ({"model_dir": None}, "missing --model-dir", "give the target"),
        ({"texts": []}, "no prompt was given", "write prompts after the options"),
        ({"texts": [], "stop_words": ["a"]}, "no prompt was given", "before --stop-words, which"),
        ({"clear_cache": True, "texts": []}, "--clear-cache does nothing else, and --model-dir and"
         " --backend was given too", "clear the cache first"),
        ({"draft_model_dir": "a", "suffix_max_tokens": 4},
         "--draft-model-dir and --suffix-max-tokens exclude one another", "give one of them"),
        ({"drafter_model_dir": "a", "eagle_model_dir": "b", "prompt_lookup_num_tokens": 2},
         "--drafter-model-dir, --eagle-model-dir and --prompt-lookup-num-tokens exclude", "give"),
        ({"input_file": Path("x")}, "prompts and --input-file are both given", "leave one"),
        ({"no_cache": True, "force": True}, "--force has no effect with --no-cache", "leave one"),
        ({"draft_len": "3"}, "--draft-len 3 without --draft-model-dir", "give the draft model"),
        ({"draft_tree_tokens": 3}, "--draft-tree-tokens without --draft-model-dir", "give the"),
        ({"max_seq_len": 8, "max_output_len": 8},
         "--max-output-len 8 leaves a prompt no room in --max-seq-len 8", "lower the first"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(changes: dict[str, Any], fact: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_settings(make_settings(**changes))
    assert caught.value.message.startswith(fact)
    assert caught.value.hint is not None
    assert remedy in caught.value.hint


def test_settings_that_are_right() -> None:
    check_settings(Settings(clear_cache=True))
    for changes in (
        {}, {"draft_len": "auto"}, {"max_seq_len": 9, "max_output_len": 8},
        {"draft_model_dir": "a", "draft_len": "3", "show_drafts": True},
        {"suffix_max_tokens": 4, "suffix_min_probability": 0.5},  # of one method
        {"texts": [], "input_file": Path("x")},
    ):  # fmt: skip
        check_settings(make_settings(**changes))


def test_the_target_s_engine_serves_all_drafts_without_weights() -> None:
    plain = plans.plan_target(make_settings())
    assert plans.plan_target(make_settings(suffix_max_tokens=6)) == plain
    assert plans.plan_target(make_settings(prompt_lookup_num_tokens=3)) == plain
    assert plain.build["max_seq_len"] is None
    assert "speculative_decoding_mode" not in plain.build
    assert "packed_weights" not in plain.build
    assert plans.plan_target(make_settings(device="cuda")).build["packed_weights"] is False
    drafting = make_settings(draft_model_dir="small", drafter_weights="int4_wo")
    assert plans.plan_target(drafting).build["drafter_weights"] == "auto", "it drafts for none"


@pytest.mark.parametrize(
    ("changes", "mode", "length"),
    [
        ({"prompt_lookup_num_tokens": 3}, "draft_tokens_external", 3),
        ({"suffix_max_tokens": 6, "no_speculation": True}, "draft_tokens_external", 6),
        ({"draft_model_dir": "a"}, "draft_tokens_external", 8),
        ({"draft_model_dir": "a", "draft_len": "auto"}, "draft_tokens_external", 8),
        ({"draft_model_dir": "a", "draft_len": "11"}, "draft_tokens_external", 11),
        ({"draft_model_dir": "a", "draft_len": "2", "draft_tree_tokens": 20},
         "draft_tokens_external", 20),
    ],
)  # fmt: skip
def test_engines_of_fixed_drafts_have_room_for_them(
    changes: dict[str, Any], mode: str, length: int
) -> None:
    """Such as TensorRT-LLM's; plain decoding needs the engine that its drafts would."""
    wanted = {"speculative_decoding_mode": mode, "max_draft_len": length}
    settings = make_settings(**changes)
    assert plans.plan_drafts(settings) == wanted
    build = plans.plan_target(make_settings(**changes | {"backend": TENSORRT_LLM})).build
    assert {name: build[name] for name in wanted} == wanted
    assert plans.plan_drafts(make_settings()) == {}


def test_the_draft_model_s_engine() -> None:
    """Its type is --drafter-weights, and it drafts for nothing itself."""
    changes: dict[str, Any] = {"draft_model_dir": "small", "max_batch_size": 4, "max_seq_len": 70}
    plan = plans.plan_draft(make_settings(**changes, dtype="bfloat16", drafter_weights="int8_wo"))
    assert plan.convert == {"model_dir": "small", "dtype": "bfloat16"}
    assert plan.build["quantization"] == "int8_wo"
    assert plan.build["drafter_weights"] == "auto"
    assert (plan.build["max_batch_size"], plan.build["max_seq_len"]) == (4, 70)
    plan = plans.plan_draft(make_settings(**changes, drafter_weights="same"))
    assert plan.build["quantization"] is None


@pytest.mark.parametrize(
    ("length", "max_positions", "wanted"),
    [(100, 50, 100), (None, 50, 50), (None, 8192, 4096), (None, None, 4096)],
)
def test_the_longest_sequence(length: int | None, max_positions: int | None, wanted: int) -> None:
    build = plans.complete_build({"max_seq_len": length, "max_batch_size": 2}, max_positions)
    assert build == {"max_seq_len": wanted, "max_batch_size": 2}


def test_backends_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans.choose_backend(TORCH) is BACKENDS[TORCH]
    monkeypatch.setattr(plans, "choose_default", lambda: BACKENDS[TENSORRT_LLM])
    assert plans.choose_backend("auto") is BACKENDS[TENSORRT_LLM]


def test_what_an_engine_depends_on(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    settings = make_settings(
        model_dir=str(tmp_path / "target"), drafter_model_dir=str(tmp_path / "drafter"),
        max_batch_size=5,
    )  # fmt: skip
    plan = plans.plan_target(settings)
    assert plan.models == [str(tmp_path / "target"), str(tmp_path / "drafter")]
    adapted = make_settings(**vars(settings) | {"lora_dir": Path("lora")})
    assert plans.plan_target(adapted).models == [plan.models[0], "lora", plan.models[1]]
    description = plan.describe()
    assert [model["path"] for model in description["models"]] == plan.models
    assert description["build"] == {"backend": TORCH, "max_batch_size": 5}, "only what was chosen"
    assert plan.name.startswith("target-")
    same = plans.plan_target(make_settings(**vars(settings) | {"temperature": "1.0"}))
    assert same.name == plan.name, "how it is run is no matter"
    other = plans.plan_target(make_settings(**vars(settings) | {"max_batch_size": 6}))
    assert other.name != plan.name


def describe_files(path: Path) -> dict[str, Any]:
    files: dict[str, Any] = sources.describe_model(str(path))["files"]
    return files


def test_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "weights.safetensors"
    file.write_bytes(b"123")
    os.utime(file, ns=(5, 7))
    stat = file.stat()
    wanted = {
        "path": str(folder),
        "files": {"weights.safetensors": [3, 7, stat.st_ctime_ns]},
    }
    assert sources.describe_model(str(folder)) == wanted
    (folder / "subfolder").mkdir()
    (tmp_path / "link").symlink_to(folder)
    assert sources.describe_model(str(tmp_path / "link")) == wanted
    os.utime(file, ns=(5, 8))
    assert sources.describe_model(str(folder)) != wanted
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"12")
    os.utime(gguf, ns=(1, 2))
    description = sources.describe_model(str(gguf))
    assert description["path"] == str(gguf)
    assert description["files"]["model.gguf"][:2] == [2, 2]


def test_a_replaced_file_of_one_size_and_time_is_another(tmp_path: Path) -> None:
    """As `cp -p` and rsync leave it, which keep the time of the file that they copy."""
    file, new_file = tmp_path / "model" / "weights.safetensors", tmp_path / "new"
    file.parent.mkdir()
    for path in (file, new_file):
        path.write_text(path.name[:3])
        os.utime(path, ns=(5, 7))
    before = describe_files(file.parent)
    new_file.replace(file)
    assert describe_files(file.parent) != before
    assert describe_files(file.parent)["weights.safetensors"][:2] == [3, 7]


def test_files_in_subfolders_that_are_read_are_among_them(tmp_path: Path) -> None:
    """Shards that an index names and named chat templates; nothing outside, nothing else inside."""
    for name in ("parts/a.safetensors", "parts/other", "additional_chat_templates/tool.jinja"):
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text("x")
    (tmp_path / "outside").write_text("x")
    folder, index = tmp_path / "model", "model.safetensors.index.json"
    shards = {"a": "parts/a.safetensors", "b": "../outside", "c": "absent", "d": 5}
    (folder / index).write_text(json.dumps({"weight_map": shards}))
    names = {index, "parts/a.safetensors", "additional_chat_templates/tool.jinja"}
    files = describe_files(folder)
    assert files.keys() == names
    (folder / "parts" / "a.safetensors").write_text("yy")
    assert describe_files(folder)["parts/a.safetensors"] != files["parts/a.safetensors"]
    for damaged in ("{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": []}}'):
        (folder / index).write_text(damaged)
        assert describe_files(folder).keys() == names - {"parts/a.safetensors"}


def test_a_model_of_the_hub_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is offline here: the commit is that of its cache, where there is one."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert sources.describe_model("owner/name") == {"hub": "owner/name", "commit": None}
    ref = tmp_path / "hub" / "models--owner--name" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("abc123\n")
    assert sources.describe_model("owner/name") == {"hub": "owner/name", "commit": "abc123"}


@pytest.mark.parametrize(
    ("model", "name"),
    [("/a/b/Llama-3.2", "Llama-3.2"), ("owner/na me:v1", "na-me-v1"), ("...", "model"),
     ("x" * 99, "x" * 40), ("é", "model")],
)  # fmt: skip
def test_entries_are_named_for_readers(model: str, name: str) -> None:
    """The model's name, and the first 16 digits of a sum over sorted JSON."""
    wanted = hashlib.sha256(b'{"a": 1, "b": [2]}').hexdigest()[:16]
    assert sources.name_entry(model, {"b": [2], "a": 1}) == f"{name}-{wanted}"


def test_the_tool_is_part_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A changed line of the product is another engine; a file of another kind is none."""
    import importlib.util
    from types import SimpleNamespace

    (tmp_path / "__init__.py").write_text("")
    find_spec = SimpleNamespace(
        find_spec=lambda _: SimpleNamespace(origin=tmp_path / "__init__.py")
    )
    monkeypatch.setattr(sources, "importlib", SimpleNamespace(util=find_spec))
    assert importlib.util.find_spec("specdec") is not None
    digests = []
    for name in ("readme.md", "a.py", "b.h"):
        digests.append(sources.describe_tool.__wrapped__()["sources"])
        (tmp_path / name).write_text("text")
    digests.append(sources.describe_tool.__wrapped__()["sources"])
    assert digests[0] == digests[1], "of another kind"
    assert len(set(digests)) == 3
    assert digests[0] == hashlib.sha256(b"__init__.py" * 3).hexdigest(), "of three packages"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[EnginePlan, EngineConfig]:
    """A plan and what it foresees."""
    folder = make_llama(tmp_path_factory.mktemp("foreseen"), seed=3)
    plan = plans.plan_target(make_settings(model_dir=str(folder), max_seq_len=40))
    config = plans.foresee_engine(plan)
    assert config is not None
    return plan, config


def test_an_engine_is_foreseen_without_a_build(engine: tuple[EnginePlan, EngineConfig]) -> None:
    plan, config = engine
    assert config.build.max_seq_len == 40
    assert config.checkpoint.model.architecture == "LlamaForCausalLM"
    assert not config.has_fixed_drafts
    assert not Path("checkpoint").exists()
    trtllm = EnginePlan(convert=plan.convert, build=plan.build | {"backend": TENSORRT_LLM})
    with pytest.raises(SpecDecError, match="TensorRT-LLM is not installed here"):
        plans.foresee_engine(trtllm)


def test_requests_beyond_the_engines(engine: tuple[EnginePlan, EngineConfig]) -> None:
    from specdec.decode.requests import Request

    _, config = engine
    vocab_size = config.checkpoint.model.vocab_size
    prompts = [([1] * 30, 10), ([1] * 30, 11), ([vocab_size], 1)]
    requests = [
        Request(index=index, input_ids=ids, max_output_len=length, end_ids=frozenset())
        for index, (ids, length) in enumerate(prompts)
    ]
    small = dataclasses.replace(config, build=dataclasses.replace(config.build, max_seq_len=39))
    plans.check_lengths(requests[:1], [config])
    with pytest.raises(SpecDecError, match="39"):
        plans.check_lengths(requests[:1], [config, small])
    with pytest.raises(SpecDecError) as caught:
        plans.check_lengths(requests, [config])
    assert "30" in caught.value.message
    assert "11" in caught.value.message
    assert str(vocab_size) in caught.value.message


def test_decoding_is_checked_before_a_build(engine: tuple[EnginePlan, EngineConfig]) -> None:
    from specdec.command.stages import load_command

    def check(**changes: Any) -> None:
        settings = make_settings(**changes)
        run = load_command("run").settings_class(**settings.list_stage("run"))
        plans.check_decoding(settings, run, None, [engine[1]])

    check()
    check(no_speculation=True)
    check(prompt_lookup_num_tokens=3)
    with pytest.raises(SpecDecError, match="drafts 10000 tokens a step, the engine has room"):
        check(suffix_max_tokens=10_000)
