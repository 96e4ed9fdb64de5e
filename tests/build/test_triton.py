"""specdec-build --emit-triton: Triton's templates filled in for an engine, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.build.pipeline import build_engine
from specdec.build.settings import BuildSettings
from specdec.build.triton import FRACTION, KNOWN_VARIABLES, NEEDED_VARIABLES
from specdec.errors import SpecDecError, UsageError
from specdec.trtllm.facts import LABELS
from tests.trtllm.worlds import EXTERNAL, LOOKAHEAD, MAX_BATCH, PAGED, World, make_world

TOKEN = re.compile(r'\s*(?:#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[\w.+-]+)')
# Where a variable stands outside of a text, as in Triton's own files.
BARE = {
    "triton_max_batch_size": "max_batch_size: {}",
    "decoupled_mode": "model_transaction_policy {{ decoupled: {} }}",
    "max_queue_delay_microseconds": "dynamic_batching {{ max_queue_delay_microseconds: {} }}",
    "max_queue_size": "dynamic_batching {{ default_queue_policy: {{ max_queue_size: {} }} }}",
    "logits_datatype": 'input [ {{ name: "draft_logits" data_type: {} dims: [ -1, -1 ] }} ]',
    "encoder_input_features_data_type": 'input [ {{ name: "features" data_type: {} }} ]',
    "prompt_embedding_table_data_type": 'input [ {{ name: "table" data_type: {} }} ]',
    "preprocessing_instance_count": "instance_group [ {{ count: {} kind: KIND_CPU }} ]",
    "postprocessing_instance_count": "instance_group [ {{ count: {} kind: KIND_CPU }} ]",
    "bls_instance_count": "instance_group [ {{ count: {} kind: KIND_CPU }} ]",
}


def parse(text: str) -> dict[str, list[Any]]:
    """Parse protobuf's text format: field -> values, messages as such dictionaries."""
    tokens = TOKEN.findall(text)
    assert TOKEN.sub("", text).strip() == ""
    tokens.reverse()

    def skip(mark: str) -> bool:
        return bool(tokens) and tokens[-1] == mark and bool(tokens.pop())

    def read_message(is_inner: bool) -> dict[str, list[Any]]:
        fields: dict[str, list[Any]] = {}
        while tokens and tokens[-1] != "}":
            name = tokens.pop()
            assert re.fullmatch(r"\w+", name), name
            skip(":")
            fields.setdefault(name, []).extend(read_values() if skip("[") else [read_value()])
            skip(",")
        assert skip("}") == is_inner
        return fields

    def read_values() -> list[Any]:
        values = []
        while not skip("]"):
            values.append(read_value())
            skip(",")
        return values

    def read_value() -> Any:
        if skip("{"):
            return read_message(True)
        token = tokens.pop()
        assert token not in ("}", "]", ":", ","), token
        if not token.startswith('"'):
            return token
        return re.sub(
            r"\\([0-7]{3}|.)", lambda m: chr(int(m[1], 8)) if len(m[1]) == 3 else m[1], token[1:-1]
        )

    return read_message(False)


def list_parameters(config: dict[str, list[Any]]) -> dict[str, str]:
    return {entry["key"][0]: entry["value"][0]["string_value"][0] for entry in config["parameters"]}


def write_templates(folder: Path, *, without: str = "", extra: str = "") -> Path:
    """Stand-ins for Triton's files: the same variables, in the same places, and a model.py."""
    for model, names in KNOWN_VARIABLES.items():
        lines = [f'name: "{model}"', 'backend: "python"  # a comment']
        for name in names:
            variable = f"${{{name}}}"
            if name == without:
                continue
            if name in BARE:
                lines.append(BARE[name].format(variable))
            else:
                key = "gpt_model_path" if name == "engine_dir" else name
                value = f'value: {{ string_value: "{variable}" }}'
                lines.append(f'parameters: {{ key: "{key}" {value} }}')
        if extra and model == "tensorrt_llm":
            lines.append(f'parameters: {{ key: "new" value: {{ string_value: "${{{extra}}}" }} }}')
        path = folder / model / "1"
        path.mkdir(parents=True)
        (path / "model.py").write_text("# Triton's own\n")
        (path.parent / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module", params=LABELS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    for world in make_world(tmp_path_factory.mktemp("world"), request.param):
        write_templates(world.folder / "templates")
        yield world


def emit(
    world: World, engine: Path, output: Path, *parameters: str, **settings: Any
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "triton_templates": world.folder / "templates",
        "triton_parameters": ["tokenizer_dir=/models/hf", *parameters],
    } | settings
    return build_engine(BuildSettings(output_dir=engine, emit_triton=output, **options))


def refuse(match: str, world: World, engine: Path, *parameters: str, **settings: Any) -> str:
    """Emit in vain; return the remedy."""
    output = world.folder / "refused"
    with pytest.raises(SpecDecError, match=match) as caught:
        emit(world, engine, output, *parameters, **settings)
    assert not output.exists()
    return caught.value.hint


def read_models(folder: Path) -> dict[str, dict[str, list[Any]]]:
    return {path.parent.name: parse(path.read_text()) for path in folder.glob("*/config.pbtxt")}


def test_a_repository_describes_its_engine(world: World, tmp_path: Path) -> None:
    engine = world.engine("redrafter", world.redrafter())
    report = emit(world, engine, tmp_path / "repo", f"{FRACTION}=0.5")
    models = read_models(tmp_path / "repo")
    assert set(models) == set(report["models"]) == set(KNOWN_VARIABLES)
    for name, config in models.items():
        assert config["name"] == [name]
        assert config["max_batch_size"] == [str(MAX_BATCH)]
        assert (tmp_path / "repo" / name / "1" / "model.py").read_text() == "# Triton's own\n"
    parameters = list_parameters(models["tensorrt_llm"])
    assert parameters["gpt_model_path"] == str(engine)
    assert parameters["kv_cache_free_gpu_mem_fraction"] == "0.5"
    assert parameters["enable_kv_cache_reuse"] == "False"
    assert parameters["lora_prefetch_dir"] == "${lora_prefetch_dir}"  # the backend's own default
    assert models["tensorrt_llm"]["model_transaction_policy"] == [{"decoupled": ["False"]}]
    assert list_parameters(models["preprocessing"])["tokenizer_dir"] == "/models/hf"
    assert list_parameters(models["tensorrt_llm_bls"])["tensorrt_llm_draft_model_name"].startswith(
        "${"
    )
    assert report["launch"].endswith("--world_size=1")
    with pytest.raises(SpecDecError, match="exists and is not empty"):
        emit(world, engine, tmp_path / "repo")
    emit(world, engine, tmp_path / "repo", "decoupled_mode=True", force=True)
    config = read_models(tmp_path / "repo")["tensorrt_llm"]
    assert config["model_transaction_policy"] == [{"decoupled": ["True"]}]


def test_draft_target_is_served_by_the_bls_model(world: World, tmp_path: Path) -> None:
    target = world.engine("target", world.checkpoint("plain"), *EXTERNAL)
    draft = world.engine("draft", world.draft(), *PAGED)
    settings: dict[str, Any] = {"triton_draft_engine_dir": draft}
    with pytest.raises(SpecDecError, match="both engines are on one GPU"):
        emit(world, target, tmp_path / "repo", **settings)
    devices = ("gpu_device_ids=1", "draft.gpu_device_ids=0")
    report = emit(world, target, tmp_path / "repo", *devices, **settings)
    names = "--tensorrt_llm_model_name tensorrt_llm,tensorrt_llm_draft --multi-model"
    assert names in report["launch"]
    models = read_models(tmp_path / "repo")
    assert models["tensorrt_llm_draft"]["name"] == ["tensorrt_llm_draft"]
    ours, theirs = (list_parameters(models[n]) for n in ("tensorrt_llm", "tensorrt_llm_draft"))
    assert (ours["gpt_model_path"], theirs["gpt_model_path"]) == (str(target), str(draft))
    assert (ours["gpu_device_ids"], theirs["gpu_device_ids"]) == ("1", "0")
    assert ours["enable_kv_cache_reuse"] == theirs["enable_kv_cache_reuse"] == "True"
    bls = list_parameters(models["tensorrt_llm_bls"])
    assert bls["tensorrt_llm_model_name"] == "tensorrt_llm"
    assert bls["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    for match, engines, parameters in (
        ("refuses to stream drafts", (target, draft), ("decoupled_mode=True", *devices)),
        ("has mode draft_tokens_external", (draft, target), (f"{FRACTION}=0.4",)),
        ("is '0,1', the engine has 1 ranks", (target, draft), ("gpu_device_ids=0,1", devices[1])),
    ):
        refuse(match, world, engines[0], *parameters, triton_draft_engine_dir=engines[1])


def test_a_pairs_engines_keep_their_own_folders(world: World, tmp_path: Path) -> None:
    """A variable is of every model that has it: the server would draft with the target."""
    target = world.engine("target", world.checkpoint("plain"), *EXTERNAL)
    draft = world.engine("draft", world.draft(), *PAGED)
    parameters = (
        "gpu_device_ids=1", "draft.gpu_device_ids=0", "engine_dir=/engines/target",
        "draft.engine_dir=/engines/draft", f"draft.{FRACTION}=0.3",
    )  # fmt: skip
    emit(world, target, tmp_path / "repo", *parameters, triton_draft_engine_dir=draft)
    models = read_models(tmp_path / "repo")
    found = [list_parameters(models[n])["gpt_model_path"]
             for n in ("tensorrt_llm", "tensorrt_llm_draft", "preprocessing")]  # fmt: skip
    assert found == ["/engines/target", "/engines/draft", "/engines/target"]
    fractions = [list_parameters(models[n])[FRACTION]
                 for n in ("tensorrt_llm", "tensorrt_llm_draft")]  # fmt: skip
    assert fractions == [f"${{{FRACTION}}}", "0.3"]
    refuse(f"{FRACTION} is '2'", world, target, f"{FRACTION}=2")


def test_any_character_reaches_the_server(world: World, tmp_path: Path) -> None:
    engine = world.engine("plain", world.checkpoint("plain"), *PAGED)
    odd = 'a "b"\\c\n\td # ü'
    repository = tmp_path / "my repo; $x"
    report = emit(
        world, engine, repository, triton_parameters=[
            f"tokenizer_dir={odd}", f"engine_dir=/{odd}", f"lora_prefetch_dir={odd}",
        ],
    )  # fmt: skip
    parameters = list_parameters(read_models(repository)["tensorrt_llm"])
    assert parameters["tokenizer_dir"] == parameters["lora_prefetch_dir"] == odd
    assert parameters["gpt_model_path"] == f"/{odd}"
    assert shlex.split(report["launch"])[2] == f"--model_repo={repository}"
    refuse("a word or a number for max_queue_size, not '1 }'", world, engine, "max_queue_size=1 }")
    wrong = ["tokenizer_dir=/models/${name}"]
    assert "without dollar signs" in refuse("name", world, engine, triton_parameters=wrong)


def test_unknown_and_missing_variables_are_errors(world: World, tmp_path: Path) -> None:
    engine = world.engine("redrafter", world.redrafter())
    templates = write_templates(tmp_path / "new", extra="new_knob")
    refuse("has unknown variables new_knob", world, engine, triton_templates=templates)
    emit(
        world, engine, tmp_path / "repo", "new_knob=7", "max_queue_size=9",
        triton_templates=templates,
    )  # fmt: skip
    config = read_models(tmp_path / "repo")["tensorrt_llm"]
    assert list_parameters(config)["new"] == "7"
    old = write_templates(tmp_path / "old", without="enable_kv_cache_reuse")
    refuse("has no variable enable_kv_cache_reuse", world, engine, triton_templates=old)
    refuse(r"no template has it \(did you mean medusa_choices", world, engine, "medusa_choice={0}")
    remedy = refuse("does not exist", world, engine, triton_templates=tmp_path)
    assert "all_models/inflight_batcher_llm" in remedy
    assert all(set(NEEDED_VARIABLES[m]) <= set(KNOWN_VARIABLES[m]) for m in KNOWN_VARIABLES)


def test_engines_that_need_more_or_are_not_tensorrt_llms(world: World, tmp_path: Path) -> None:
    medusa = world.engine("medusa", world.medusa(), "--speculative-decoding-mode", "medusa")
    refuse("of mode medusa is served with medusa_choices", world, medusa)
    emit(world, medusa, tmp_path / "repo", "medusa_choices={0}, {0, 0}")
    config = read_models(tmp_path / "repo")["tensorrt_llm"]
    assert list_parameters(config)["medusa_choices"] == "{0}, {0, 0}"
    engine = world.torch_engine("plain", world.checkpoint("plain"))
    refuse("and Triton serves TensorRT-LLM's", world, engine)
    engine, parameter = (
        world.engine("plain", world.checkpoint("plain"), *PAGED),
        "speculative_decoding_fast_logits",
    )
    refuse("needs participant_ids of each engine", world, engine, f"{parameter}=True")
    emit(world, engine, tmp_path / "x", f"{parameter}=False")


def test_a_lookahead_window_fills_the_engine(world: World, tmp_path: Path) -> None:
    engine = world.engine("lookahead", world.checkpoint("plain"), *LOOKAHEAD)
    names = ("window_size", "ngram_size", "verification_set_size")

    def list_window(*sizes: object) -> list[str]:
        return [f"lookahead_{name}={size}" for name, size in zip(names, sizes, strict=True)]

    refuse(r"\[2,3,2\] drafts 7 .* exactly .*, 11", world, engine, *list_window(2, 3, 2))
    refuse("are 3, x, 3", world, engine, *list_window(3, "x", 3))
    emit(world, engine, tmp_path / "repo", *list_window(3, 3, 3))
    found = list_parameters(read_models(tmp_path / "repo")["tensorrt_llm"])
    assert [found[f"lookahead_{name}"] for name in names] == ["3", "3", "3"]


def test_one_command_builds_and_emits(world: World, tmp_path: Path) -> None:
    settings = BuildSettings(
        checkpoint_dir=world.checkpoint("plain"), output_dir=tmp_path / "engine",
        backend="tensorrt-llm", emit_triton=tmp_path / "repo", max_batch_size=2,
        triton_templates=world.folder / "templates", triton_parameters=["tokenizer_dir=/hf"],
    )  # fmt: skip
    build_engine(dataclasses.replace(settings, dry_run=True))
    assert not (tmp_path / "repo").exists()
    report = build_engine(settings)
    assert report["triton_dir"] == str(tmp_path / "repo")
    models = read_models(tmp_path / "repo")
    assert models["ensemble"]["max_batch_size"] == ["2"]
    assert list_parameters(models["tensorrt_llm"])["gpt_model_path"] == str(tmp_path / "engine")
    with pytest.raises(UsageError, match="--emit-triton has no meaning for the torch backend"):
        build_engine(dataclasses.replace(settings, backend="torch", output_dir=tmp_path / "torch"))
