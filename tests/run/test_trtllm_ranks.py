"""TensorRT-LLM engines of several ranks under MPI, machines without what they need, and options."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.command.settings import resolve_settings, to_arguments
from specdec.decode.drafters.eagle import check_choices
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import SpecDecError, UsageError
from specdec.methods.eagle import EagleParams
from specdec.run.settings import RunSettings
from specdec.system.mpi import World as MpiWorld
from specdec.system.mpi import find_world
from specdec.trtllm.engine_folder import EngineFolder, read_engine_folder
from specdec.trtllm.run_checks import find_sampling_problems
from specdec.trtllm.run_options import make_eagle_options
from tests.engines import call
from tests.trtllm.worlds import (
    EXTERNAL,
    LOOKAHEAD,
    PAGED,
    World,
    forget_runtime,
    make_prompts,
)


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


@pytest.mark.thorough
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on most machines without it
    forget_runtime()
    importlib.invalidate_caches()
    with pytest.raises(SpecDecError, match="which is not installed here") as caught:
        world.run(engine, make_prompts(4))
    assert "install tensorrt-llm==" in caught.value.hint
    assert caught.value.message.count("(1)") == 0
    from specdec.trtllm.runner import import_runtime

    with pytest.raises(SpecDecError, match="which is not installed here"):
        import_runtime()
    report = world.run(engine, make_prompts(4), dry_run=True)
    assert report["backend"] == "tensorrt-llm"


@pytest.mark.thorough
def test_lookahead_gets_its_window(world: World) -> None:
    engine = world.engine("lookahead", world.checkpoint("plain"), *LOOKAHEAD)
    expected = world.run(world.torch_engine("plain", world.checkpoint("plain")), make_prompts(4))
    report = world.run(engine, make_prompts(4))
    assert report["outputs"][0]["output_ids"] == expected["outputs"][0]["output_ids"]
    assert report["stats"]["method"] == "lookahead"
    assert world.calls("from_dir")[0]["options"]["lookahead_config"] == [3, 3, 3]
    with pytest.raises(SpecDecError, match="built with max_draft_len 11"):
        world.run(engine, make_prompts(4), lookahead_config="[7,7,7]")
    with pytest.raises(SpecDecError, match=r"\[2,3,2\] drafts 7 .* exactly .*, 11") as caught:
        world.run(engine, make_prompts(4), lookahead_config="[2,3,2]")
    assert "give [3,3,3], or build with --max-draft-len 7" in caught.value.hint
    world.run(engine, make_prompts(4), None, lookahead_config="[2,4,2]", max_output_len=3)
    assert world.calls("from_dir")[0]["options"]["lookahead_config"] == [2, 4, 2]


@pytest.fixture
def eagle_folder(world: World) -> EngineFolder:
    """An EAGLE engine, as its folder tells of it: the line 0.14 has none to build."""
    plain = read_engine_folder(world.engine("plain", world.checkpoint("plain"), *PAGED))
    config = {
        **plain.pretrained, "architecture": "EagleForCausalLM", "num_eagle_layers": 3,
        "max_non_leaves_per_layer": 4, "max_draft_len": 8, "eagle_net_config": NET,
    }  # fmt: skip
    return dataclasses.replace(plain, mode="eagle", max_draft_len=8, pretrained=config)


NET = {
    "architecture": "LlamaForCausalLM", "dtype": "float32", "hidden_size": 64, "head_size": 16,
    "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 1, "vocab_size": 128, "norm_epsilon": 1e-5, "hidden_act": "silu",
    "rotary_base": 10000.0, "rotary_scaling": None, "max_position_embeddings": 512,
    "attn_bias": False, "mlp_bias": False,
}  # fmt: skip


def test_an_eagle_tree_is_as_deep_as_the_engine(eagle_folder: EngineFolder) -> None:
    """The runtime's default tree is four deep: another engine refuses it when it is loaded."""
    own = make_eagle_options(RunSettings(), eagle_folder)["eagle_choices"]
    assert (len(own), max(map(len, own))) == (8, 3)
    with pytest.raises(UsageError, match="2 deep, and TensorRT-LLM needs exactly"):
        make_eagle_options(RunSettings(eagle_choices="[[0],[0,0]]"), eagle_folder)
    choices = "[[0],[0,0],[0,0,0]]"
    assert make_eagle_options(RunSettings(eagle_choices=choices), eagle_folder) == {
        "eagle_choices": [[0], [0, 0], [0, 0, 0]]
    }
    tight = dict(eagle_folder.pretrained, max_draft_len=2)
    with pytest.raises(SpecDecError, match="max_draft_len is 2, .* num_eagle_layers, 3"):
        make_eagle_options(RunSettings(), dataclasses.replace(eagle_folder, pretrained=tight))


@pytest.mark.parametrize(("layers", "width", "tokens"), [(3, 1, 8), (4, 2, 63), (4, 10, 4)])
def test_the_tree_of_an_eagle_engine_stays_within_its_limits(
    eagle_folder: EngineFolder, layers: int, width: int, tokens: int
) -> None:
    """The runtime counts the nodes of a level that go on, and fails beyond them."""
    config = dict(
        eagle_folder.pretrained, num_eagle_layers=layers, max_non_leaves_per_layer=width,
        max_draft_len=tokens,
    )  # fmt: skip
    folder = dataclasses.replace(eagle_folder, pretrained=config)
    choices = make_eagle_options(RunSettings(), folder)["eagle_choices"]
    check_choices(tuple(map(tuple, choices)), EagleParams.from_checkpoint(config))
    assert (len(choices), max(map(len, choices))) == (tokens, layers)


def test_a_dynamic_tree_needs_its_width_and_room_for_it(eagle_folder: EngineFolder) -> None:
    def choose(**settings: Any) -> dict[str, Any]:
        return make_eagle_options(RunSettings(**settings), eagle_folder)

    tree = {"eagle_use_dynamic_tree": True, "eagle_dynamic_tree_max_top_k": 4}
    assert choose(eagle_use_dynamic_tree=True) == tree, "the engine's max_non_leaves_per_layer"
    assert choose(eagle_dynamic_tree_max_top_k=3) == tree | {"eagle_dynamic_tree_max_top_k": 3}
    with pytest.raises(SpecDecError, match="max-top-k is 5, the engine's max_non_leaves.* is 4"):
        choose(eagle_use_dynamic_tree=True, eagle_dynamic_tree_max_top_k=5)
    with pytest.raises(UsageError, match="--eagle-tree-tokens"):
        choose(eagle_tree_tokens=5)
    with pytest.raises(UsageError, match="a static tree, --eagle-use-dynamic-tree a dynamic"):
        choose(eagle_choices="[[0]]", eagle_use_dynamic_tree=True)


def test_eagle_decodes_greedily_whatever_the_temperature(eagle_folder: EngineFolder) -> None:
    """Unless it accepts typical tokens, which are not the target's distribution."""
    request = Request(index=0, input_ids=[5, 6], max_output_len=4, end_ids=frozenset())
    assert not find_sampling_problems(request, eagle_folder)
    sampled = dataclasses.replace(request, sampling=SamplingParams(temperature=0.7))
    ((fact, remedy),) = find_sampling_problems(sampled, eagle_folder)
    assert "samples with temperature 0.7, and TensorRT-LLM's EAGLE decodes greedily" in fact
    assert remedy == "leave the temperature out"
    asking = dataclasses.replace(request, num_logprobs=0, allows_drafts=False)
    (logprobs, _), (drafts, _) = find_sampling_problems(asking, eagle_folder)
    assert "asks for log-probabilities, which is not offered" in logprobs
    assert "asks for decoding without drafts, which is not offered" in drafts
