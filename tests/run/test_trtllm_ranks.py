"""TensorRT-LLM engines of several ranks under MPI, machines without what they need, and options."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.errors import SpecDecError, UsageError
from specdec.mpi import World as MpiWorld
from specdec.mpi import find_world
from specdec.run.backends.tensorrt_options import make_eagle_options
from specdec.run.settings import RunSettings
from specdec.settings import resolve_settings, to_arguments
from specdec.trtllm.engine_folder import read_engine_folder
from specdec.trtllm.facts import LABELS
from tests.conftest import read_error_lines, run_cli
from tests.engines import call
from tests.trtllm.worlds import (
    EXTERNAL,
    PAGED,
    World,
    forget_runtime,
    install_mpirun,
    make_prompts,
    make_world,
)


@pytest.fixture(scope="module", params=LABELS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from make_world(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture
def pair(world: World) -> Path:
    """An engine of two ranks."""
    whole = world.folder / "plain2-ckpt-whole"
    if not whole.exists():
        call(
            "convert", "--model-dir", world.target, "--output-dir", whole, "--trtllm-version",
            world.label,
        )  # fmt: skip
    return world.engine("pair", world.checkpoint("plain2", "--tp-size", 2), *PAGED)


@pytest.fixture
def under_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")


def test_ranks_are_started_with_mpirun_and_the_first_one_prints(world: World, pair: Path) -> None:
    """Prompts come from stdin, which the first rank alone can read."""
    install_mpirun(world)
    requests = make_prompts(4, 9, max_output_len=8)
    engine = world.torch_engine("plain", world.checkpoint("plain"))
    expected = world.run(engine, requests)
    world.log.unlink(missing_ok=True)
    done = run_cli(
        "run", "--engine-dir", pair, "--tokenizer-dir", world.target, "--input-file", "-",
        "--json", "--end-id", 127, env=world.environment,
        stdin="".join(json.dumps(request) + "\n" for request in requests),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outputs"] == expected["outputs"]
    assert report["stats"]["tp_size"] == 2
    ranks = [entry["options"]["rank"] for entry in world.calls("from_dir")]
    assert sorted(ranks) == [0, 1]
    assert len({entry["pid"] for entry in world.calls("from_dir")}) == 2
    assert len(world.calls("generate")) == 1
    if world.label != LABELS[0]:
        return  # the rest is the same
    failed = run_cli(
        "run", "--engine-dir", pair, "--tokenizer-dir", world.target, "--input-text=--a b",
        "--max-output-len", 5000, env=world.environment,
    )  # fmt: skip
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "5000 more" in read_error_lines(failed.stderr)[0]


def test_ranks_of_a_launcher_are_used_as_found(
    world: World, pair: Path, under_mpi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_prompts(4, max_output_len=6)
    report = world.run(pair, requests)
    assert len(report["outputs"][0]["output_ids"]) == 6
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert world.run(pair, requests) is None
    assert [entry["options"]["rank"] for entry in world.calls("from_dir")] == [1]
    assert not world.calls("generate")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(SpecDecError, match=r"OMPI_COMM_WORLD_SIZE is 3, the engine has 2 ranks"):
        world.run(pair, requests)


def test_one_rank_among_several_processes_is_an_error(world: World, under_mpi: None) -> None:
    engine = world.engine("plain", world.checkpoint("plain"), *PAGED)
    with pytest.raises(SpecDecError, match="SIZE is 2, the engine has 1 ranks"):
        world.run(engine, make_prompts(4))


def test_a_draft_engine_wants_a_single_process(world: World, under_mpi: None) -> None:
    target = world.engine("target", world.checkpoint("plain"), *EXTERNAL)
    draft = world.engine("draft", world.draft(), *PAGED)
    with pytest.raises(SpecDecError, match="is led from a single process"):
        world.run(target, make_prompts(4), draft_engine_dir=draft)


def test_a_target_of_two_ranks_beside_a_draft_engine(
    world: World, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator mode of 1.x leads both from here; 0.14 has none."""
    assert pair.exists()
    target = world.engine("pair-target", world.checkpoint("plain2"), *EXTERNAL)
    draft = world.engine("draft", world.draft(), *PAGED)
    settings = {"draft_engine_dir": draft, "draft_len": "4", "max_output_len": 9}
    devices = {"draft_devices": "0", "target_devices": "1,2"}
    if world.label == "0.14":
        with pytest.raises(SpecDecError, match="has 2 ranks, and this TensorRT-LLM has no"):
            world.run(target, make_prompts(4), None, **settings, **devices)
        return
    report = world.run(target, make_prompts(4), None, **settings, **devices)
    assert len(report["outputs"][0]["output_ids"]) == 9
    loaded = [entry["options"] for entry in world.calls("from_dir")]
    assert [entry["device_ids"] for entry in loaded] == [[1, 2], [0]]
    assert all(entry["is_orchestrator_mode"] for entry in loaded)


def test_without_mpirun_several_ranks_are_an_error(
    world: World, pair: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecDecError, match="has 2 ranks, and there is no mpirun"):
        world.run(pair, make_prompts(4))
    monkeypatch.setenv("SPECDEC_MPI_RANKS", "2")
    with pytest.raises(SpecDecError, match="one of 2 ranks that mpirun was to start"):
        world.run(pair, make_prompts(4))
    assert world.run(pair, make_prompts(4), dry_run=True)["tp_size"] == 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, (3, 4)),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0",
             "SLURM_STEP_NUM_TASKS": "2"},
            (1, 2),
        ),
        # A batch script's own commands: srun has not started them.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, None),
    ],
)  # fmt: skip
def test_launchers(variables: dict[str, str], expected: tuple[int, int] | None) -> None:
    found = find_world(variables)
    assert (found and (found.rank, found.size)) == expected
    assert found is None or isinstance(found, MpiWorld)


def test_a_command_line_is_made_from_settings(tmp_path: Path) -> None:
    import click

    from specdec.run.cli import command

    settings = RunSettings(
        engine_dir=tmp_path, input_text=["--a b", "c,d"], temperature="0.5,1", top_p=0.25,
        stop_words=["\n\n", "x"], json=True, kv_cache_enable_block_reuse=True, max_output_len=7,
        draft_target_model_config="[4,[0],[1],True]",
    )  # fmt: skip
    context = command.make_context("run", to_arguments(settings))
    typed = {
        key: value
        for key, value in context.params.items()
        if context.get_parameter_source(key) is click.core.ParameterSource.COMMANDLINE
    }
    assert resolve_settings(RunSettings, "run", typed, None) == settings


def test_without_tensorrt_llm_a_run_ends_in_one_sentence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine("plain", world.checkpoint("plain"), *PAGED)
    site = str(world.folder / "double" / "site")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != site])
    forget_runtime()
    importlib.invalidate_caches()
    with pytest.raises(SpecDecError, match="which is not installed here") as caught:
        world.run(engine, make_prompts(4))
    assert "install tensorrt-llm==" in caught.value.hint
    assert caught.value.message.count("(1)") == 0
    from specdec.run.backends.tensorrt_runner import import_runtime

    with pytest.raises(SpecDecError, match="which is not installed here"):
        import_runtime()
    report = world.run(engine, make_prompts(4), dry_run=True)
    assert report["backend"] == "tensorrt-llm"


def test_lookahead_gets_its_window(world: World) -> None:
    flags = ("--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 11)
    engine = world.engine("lookahead", world.checkpoint("plain"), *flags)
    expected = world.run(world.torch_engine("plain", world.checkpoint("plain")), make_prompts(4))
    report = world.run(engine, make_prompts(4))
    assert report["outputs"][0]["output_ids"] == expected["outputs"][0]["output_ids"]
    assert report["stats"]["method"] == "lookahead"
    assert world.calls("from_dir")[0]["options"]["lookahead_config"] == [3, 3, 3]
    with pytest.raises(SpecDecError, match="built with max_draft_len 11"):
        world.run(engine, make_prompts(4), lookahead_config="[7,7,7]")


NET = {
    "architecture": "LlamaForCausalLM", "dtype": "float32", "hidden_size": 64, "head_size": 16,
    "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 1, "vocab_size": 128, "norm_epsilon": 1e-5, "hidden_act": "silu",
    "rotary_base": 10000.0, "rotary_scaling": None, "max_position_embeddings": 512,
    "attn_bias": False, "mlp_bias": False,
}  # fmt: skip


def test_an_eagle_engine_needs_a_tree_as_deep_as_itself(world: World) -> None:
    """The runtime drops choices beside a dynamic tree, and wants paths of num_eagle_layers."""
    plain = read_engine_folder(world.engine("plain", world.checkpoint("plain"), *PAGED))
    config = {
        **plain.pretrained, "architecture": "EagleForCausalLM", "num_eagle_layers": 3,
        "max_non_leaves_per_layer": 4, "max_draft_len": 8, "eagle_net_config": NET,
    }  # fmt: skip
    folder = dataclasses.replace(plain, mode="eagle", max_draft_len=8, pretrained=config)
    with pytest.raises(UsageError, match="EAGLE needs a tree"):
        make_eagle_options(RunSettings(), folder)
    with pytest.raises(UsageError, match="2 deep, and TensorRT-LLM wants exactly"):
        make_eagle_options(RunSettings(eagle_choices="[[0],[0,0]]"), folder)
    with pytest.raises(UsageError, match="a static tree, --eagle-use-dynamic-tree a dynamic"):
        make_eagle_options(RunSettings(eagle_choices="[[0]]", eagle_use_dynamic_tree=True), folder)
    with pytest.raises(UsageError, match="--eagle-tree-tokens"):
        make_eagle_options(RunSettings(eagle_tree_tokens=5), folder)
    choices = "[[0],[0,0],[0,0,0]]"
    assert make_eagle_options(RunSettings(eagle_choices=choices), folder) == {
        "eagle_choices": [[0], [0, 0], [0, 0, 0]]
    }
    dynamic = RunSettings(eagle_use_dynamic_tree=True, eagle_dynamic_tree_max_top_k=4)
    assert make_eagle_options(dynamic, folder) == {
        "eagle_use_dynamic_tree": True, "eagle_dynamic_tree_max_top_k": 4,
    }  # fmt: skip
    with pytest.raises(UsageError, match="--eagle-choices has no effect"):
        make_eagle_options(RunSettings(eagle_choices=choices), plain)
