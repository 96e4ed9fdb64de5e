"""The steps of a training by themselves: devices, setup, job, sanity, the written folder."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import SpecDecError, UsageError
from specdec.files import manifest as manifest_module
from specdec.files.acceptance import MAX_DEPTH, NAME, NUM_BUCKETS, Acceptance
from specdec.files.tensor_file import TensorFile
from specdec.model.config import ModelConfig
from specdec.system import machine
from specdec.train import devices, job, output, sanity, setup, start_config
from specdec.train import loop as loop_module
from specdec.train import target as target_module
from specdec.train.job import TrainingJob
from specdec.train.methods.base import TrainingMethod
from specdec.train.rows import TokenRows, prepare_rows
from specdec.train.settings import LAYERS_FLAG, TrainSettings
from specdec.train.setup import Setup
from specdec.train.start_config import compare_config, follow_layers
from specdec.train.state import (
    START_FACT,
    TrainingState,
    collect_facts,
    list_inferred,
)
from tests.engines import reset_accelerator

ACCELERATOR = SimpleNamespace(
    mixed_precision="no", num_processes=2, device=torch.device("cpu"), is_main_process=True,
    process_index=0, wait_for_everyone=lambda: None,
)  # fmt: skip


def make_settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "method": "medusa", "model_dir": "owner/base", "data": Path("data.jsonl"),
        "output_dir": Path("out"), "learning_rate": 1e-3, "self_distillation": 0.25,
    }  # fmt: skip
    return TrainSettings(**values | changes)


def make_setup(settings: TrainSettings | None = None, **changes: Any) -> Setup:
    values: dict[str, Any] = {
        "settings": settings or make_settings(), "accelerator": ACCELERATOR,
        "method": make_method(), "config": SimpleNamespace(dtype="float16", vocab_size=320),
        "dtype": "float32", "max_length": 30,
    }  # fmt: skip
    return Setup(**values | changes)


class LinearDrafter(torch.nn.Linear):
    """A drafter of one linear layer, whose tensors are written as they are."""

    def finish_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        return weights


def make_method(**changes: Any) -> TrainingMethod:
    """A method whose drafter is one linear layer, beside a tensor of the target's."""
    values: dict[str, Any] = {
        "build": lambda settings, target: LinearDrafter(3, 2),
        "describe": lambda drafter, target: {"width": drafter.in_features, "name": target.name},
        "convert_folder": "--medusa-model-dir",
        "list_written_copies": lambda target: {"shared": target.table},
        "list_accepted_copies": lambda target: {"shared": target.table},
    }  # fmt: skip
    return TrainingMethod(**values | changes)


def make_rows(*rows: list[int]) -> TokenRows:
    """Rows all of whose tokens but the first are labels."""
    tokens = np.concatenate([np.array(row, np.int32) for row in rows])
    bounds = np.cumsum([0, *map(len, rows)])
    mask = np.ones(len(tokens), bool)
    mask[bounds[:-1]] = False
    return TokenRows(tokens, mask, bounds)


TARGET: Any = SimpleNamespace(
    name="base", table=torch.full((5, 3), 1 / 3), config=SimpleNamespace(dtype="bfloat16"),
    shape=SimpleNamespace(vocab_size=5), token_counts=None,
)  # fmt: skip


# setup.py


@pytest.mark.parametrize(
    ("limit", "wanted_length", "length"),
    [(64, None, 64), (4096, None, 2048), (None, None, 2048), (64, 64, 64), (None, 9999, 9999)],
)
def test_the_length_of_rows(limit: int | None, wanted_length: int | None, length: int) -> None:
    config = SimpleNamespace(max_position_embeddings=limit)
    settings = make_settings(model_max_length=wanted_length)
    assert setup.choose_max_length(settings, config) == length


def test_rows_longer_than_the_target_reads() -> None:
    config = SimpleNamespace(n_positions=64)
    with pytest.raises(SpecDecError) as caught:
        setup.choose_max_length(make_settings(model_max_length=65), config)
    assert "--model-max-length 65 is more than the 64 positions" in caught.value.message
    assert caught.value.hint == "use at most 64"


def test_files_that_are_read_are_not_replaced(tmp_path: Path) -> None:
    """Models of the Hub and absent files are none of them."""
    data, start = tmp_path / "data.txt", tmp_path / "start"
    data.touch()
    start.mkdir()
    settings = make_settings(data=data, start_from=start, eval_data=tmp_path / "absent")
    assert setup.list_inputs(settings) == [data, start]
    assert setup.list_inputs(make_settings(model_dir=str(tmp_path), data=data)) == [tmp_path, data]


@pytest.mark.parametrize(
    ("needs_head", "share", "wanted"),
    [(False, 0.0, False), (False, None, False), (False, 0.1, True), (True, 0.0, True)],
)
def test_the_head_is_read_where_it_teaches(
    needs_head: bool, share: float | None, wanted: bool
) -> None:
    settings = make_settings(self_distillation=share)
    assert make_setup(settings, method=make_method(needs_head=needs_head)).needs_head is wanted


def test_the_setup_and_its_target(target_dir: Path) -> None:
    """The type follows the devices; the target has the layers that the method reads."""
    settings = make_settings(model_dir=str(target_dir), self_distillation=0.0, method="redrafter")
    prepared = setup.prepare_setup(settings, ACCELERATOR)
    assert (prepared.dtype, prepared.max_length) == ("float32", 64)
    assert prepared.config.hidden_size == 32
    half = setup.prepare_setup(
        settings, SimpleNamespace(**{**vars(ACCELERATOR), "mixed_precision": "bf16"})
    )
    assert half.dtype == "bfloat16"
    method = make_method(choose_layers=lambda settings, config: (0, config.num_hidden_layers - 1))
    for share in (0.0, 0.5):
        changed = dataclasses.replace(settings, self_distillation=share)
        target = setup.open_target(dataclasses.replace(prepared, method=method, settings=changed))
        assert target.aux_layers == (0, 1)
        assert (target.head is not None) == (share > 0)
        assert target.name == "target"


# devices.py


@pytest.fixture
def quiet_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, and no state that another training left."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    reset_accelerator()


@pytest.mark.parametrize(
    ("dtype", "has_fast_bf16", "precision"),
    [("auto", False, "no"), ("auto", True, "bf16"), ("float32", True, "no"),
     ("bfloat16", False, "bf16")],
)  # fmt: skip
@pytest.mark.usefixtures("quiet_launch")
def test_the_type_of_the_devices(
    dtype: str, has_fast_bf16: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_has_fast_bf16", lambda: has_fast_bf16)
    accelerator = devices.start_accelerator(make_settings(dtype=dtype))
    assert accelerator.mixed_precision == precision
    assert accelerator.num_processes == 1


@pytest.mark.usefixtures("quiet_launch")
def test_one_process_splits_no_target() -> None:
    with pytest.raises(UsageError, match="--shard-target has no effect in a training of one"):
        devices.start_accelerator(make_settings(shard_target=True))


@pytest.mark.parametrize(("kind", "is_usable"), [("MULTI_GPU", True), ("DEEPSPEED", False)])
def test_kinds_of_devices(kind: str, is_usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), num_processes=2)
    monkeypatch.setattr(devices, "_open_accelerator", lambda settings: accelerator)
    if is_usable:
        assert devices.start_accelerator(make_settings(shard_target=True)) is accelerator
    else:
        with pytest.raises(SpecDecError, match="accelerate found devices of the kind DEEPSPEED"):
            devices.start_accelerator(make_settings())


@pytest.mark.parametrize(
    ("flags", "is_fast"),
    [("fma avx512_bf16 sse", True), ("fma amx_bf16", True), ("avx512f", False), (None, False)],
)
def test_processors_that_multiply_bf16(
    flags: str | None, is_fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "CPU_INFO", info)
    assert devices._has_fast_bf16() is is_fast


# job.py


@pytest.mark.parametrize(
    ("asked", "stored", "written"),
    [("auto", "bfloat16", "bfloat16"), ("auto", "torch.bfloat16", "bfloat16"),
     ("auto", "float16", "float32"), ("auto", None, "float32"), ("float16", "bfloat16", "float16")],
)  # fmt: skip
def test_the_type_of_the_weights(asked: str, stored: str | None, written: str) -> None:
    target = SimpleNamespace(config=SimpleNamespace(dtype=stored))
    assert make_job(make_settings(save_dtype=asked), target=target).save_dtype == written


def make_job(settings: TrainSettings, **changes: Any) -> TrainingJob:
    rows = make_rows([1, 2])
    values: dict[str, Any] = {
        "state": TrainingState(settings.output_dir), "target": TARGET, "train_rows": rows,
        "heldout_rows": rows, "target_files": [], "data_files": [],
    }  # fmt: skip
    return TrainingJob(**vars(make_setup(settings)) | values | changes)


def test_weights_of_a_drafter_that_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of the target are passed over; what may be absent begins anew."""
    path = tmp_path / "model.safetensors"
    weight = torch.arange(6.0).view(2, 3)
    drafter: Any = torch.nn.Sequential()
    drafter.finish_weights = dict
    drafter.add_module("body", torch.nn.Linear(3, 2, bias=False))
    drafter.add_module("extra", torch.nn.Linear(1, 1, bias=False))
    fresh = drafter.extra.weight.detach().clone()
    save_file(
        {"trunk.weight": weight.half(), "shared": torch.ones(9), "mask": torch.zeros(9)}, path
    )
    file = start_config.open_start(tmp_path, path.name)
    method = make_method(
        optional_prefixes=("extra.",), published_prefixes={"trunk.": "body."},
        derived_tensors=("mask",),
    )  # fmt: skip
    logging.getLogger("specdec").propagate = True
    job.copy_weights(drafter, file, method, {"shared": torch.ones(9)})
    assert "shared" not in caplog.text
    assert torch.equal(drafter.body.weight, weight)
    assert torch.equal(drafter.extra.weight, fresh)
    caplog.clear()
    job.copy_weights(drafter, file, method, {"shared": torch.ones(9) + 0.05})
    assert "shared in" in caplog.text, "quantized"
    assert "is off by 4.8 % from the target's" in caplog.text
    for other in (torch.zeros(9), torch.ones(8)):
        with pytest.raises(SpecDecError, match=r"shared \[9\] in .* is not the target's \["):
            job.copy_weights(drafter, file, method, {"shared": other})
    with pytest.raises(SpecDecError) as caught:
        job.copy_weights(drafter, file, make_method(), {})
    for fact in (
        f"extra.weight in {path} is missing, of this training [1, 1]",
        f"shared in {path} is [9], of this training missing",
    ):
        assert fact in caught.value.message
    assert "body.weight in" in caught.value.message, "published names are the method's"


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.full((2, 3), torch.nan), "bias": torch.zeros(2)}, path)
    drafter: Any = LinearDrafter(3, 2)
    with pytest.raises(SpecDecError, match="1 tensor in .* no finite numbers: weight"):
        job.copy_weights(drafter, TensorFile(path), make_method(), {})


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert list(start_config.open_start(tmp_path, "model.safetensors").tensors) == ["a"]
    (tmp_path / "other.safetensors").unlink()
    with pytest.raises(SpecDecError) as caught:
        start_config.open_start(tmp_path, "model.safetensors")
    assert caught.value.message.endswith("has no model.safetensors; it has pytorch_model.bin")


def test_shapes_of_another_training(tmp_path: Path) -> None:
    job.refuse_shapes(tmp_path, {"a": [1, 2]}, {"a": [1, 2]})
    with pytest.raises(SpecDecError, match=r"a in .* is \[1, 2\], of this training \[2, 1\]"):
        job.refuse_shapes(tmp_path, {"a": [1, 2]}, {"a": [2, 1]})


def test_a_drafter_begins_by_the_seed_or_by_another(tmp_path: Path) -> None:
    """And the target knows how often each token is a label: 1 twice, 4 once."""
    rows = make_rows([0, 1, 4], [2, 1])
    target: Any = SimpleNamespace(**vars(TARGET))
    first, again, other = (
        job.make_drafter(make_setup(make_settings(seed=seed)), target, rows).state_dict()
        for seed in (1, 1, 2)
    )
    assert torch.equal(first["weight"], again["weight"])
    assert not torch.equal(first["weight"], other["weight"])
    assert target.token_counts.tolist() == [0, 2, 0, 0, 1]
    save_file({**other, "shared": target.table}, tmp_path / "model.safetensors")
    settings = make_settings(seed=1, start_from=tmp_path)
    started = job.make_drafter(make_setup(settings), target, rows).state_dict()
    assert torch.equal(started["weight"], other["weight"])


def test_a_start_is_compared_by_its_facts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("specdec").propagate = True
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = {
        "num_attention_heads": 4, "rope_theta": 1e4, "rope_scaling": scaling, "vocab_size": 9,
        "max_position_embeddings": 64, "norm_output": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
    }  # fmt: skip
    path = tmp_path / "config.json"

    def compare(**changes: Any) -> None:
        path.write_text(json.dumps(config | changes))
        compare_config(tmp_path, config)

    path.write_text("{}")
    compare_config(tmp_path, config)
    compare(
        vocab_size=8, max_position_embeddings=32, norm_output=False,
        rope_scaling={"type": "linear", "factor": 2.0},
    )  # fmt: skip
    new_form = {"rope_type": "linear", "factor": 2.0, "rope_theta": config["rope_theta"]}
    compare(rope_scaling=None, rope_parameters=new_form)  # as transformers 5 writes it
    assert not caplog.messages
    with pytest.raises(SpecDecError, match=r"rope_scaling in .*'factor': 4.0"):
        compare(rope_scaling=None, rope_parameters={**new_form, "factor": 4.0})
    with pytest.raises(SpecDecError) as error:
        compare(num_attention_heads=2, rope_theta=5e5, rope_scaling=None, norm_output=True)
    for key in ("num_attention_heads", "rope_theta", "rope_scaling", "norm_output"):
        assert f"{key} in {path} is" in str(error.value)
    compare(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    assert "layers [0, 2, 4], this training those of [1, 5, 8]" in caplog.text


def test_layers_are_those_of_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A published drafter has its own; what its config.json does not say is the target's."""
    logging.getLogger("specdec").propagate = True
    caplog.set_level(logging.INFO, "specdec")
    llama3 = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = ModelConfig(
        architecture="LlamaForCausalLM", dtype="float32", vocab_size=9, hidden_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_size=8,
        intermediate_size=16, norm_epsilon=1e-5, max_position_embeddings=64, rotary_base=5e5,
        rotary_scaling={"rope_type": "llama3", **llama3},
    )  # fmt: skip

    def follow(**config: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return follow_layers(tmp_path, model)

    assert follow_layers(None, model) == follow_layers(tmp_path, model) == follow() == model
    assert not caplog.messages
    own = follow(num_attention_heads=8, head_dim=4, rms_norm_eps=1e-6, rope_theta=10000)
    assert own == dataclasses.replace(
        model, num_attention_heads=8, num_key_value_heads=8, head_size=4, norm_epsilon=1e-6,
        rotary_base=1e4, rotary_scaling=None,
    )  # fmt: skip
    assert "keeps its own num_attention_heads 8 (the target has 4)" in caplog.text
    assert "rope_theta 10000.0 (the target has 500000.0)" in caplog.text
    inner = {"rope_theta": 99.0, "num_attention_heads": 8, "num_key_value_heads": 4}
    speculators = follow(transformer_layer_config=inner)
    assert (speculators.rotary_base, speculators.num_attention_heads) == (99.0, 8)
    assert follow(intermediate_size=24).intermediate_size == 24
    given = follow_layers(tmp_path, model, has_given_size=True)
    assert given.intermediate_size == 16
    version_5 = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    followed = follow(rope_parameters=version_5)
    assert (followed.rotary_base, followed.rotary_scaling) == (
        1e4, {"rope_type": "linear", "factor": 2.0},
    )  # fmt: skip
    for wrong, fact in (
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads of 8 with 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "is dynamic"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "of a part of each head"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
    ):
        with pytest.raises(SpecDecError, match=fact):
            follow(**wrong)


def test_facts_that_an_earlier_training_did_not_record(tmp_path: Path) -> None:
    """Layer ids that are not given follow from the drafter; given ones must be vouched for."""
    (tmp_path / "config.json").write_text("{}")
    settings = make_settings(output_dir=tmp_path / "out", start_from=tmp_path)
    facts = collect_facts(settings, "float32", 1, [], [])
    state = TrainingState(settings.output_dir)
    state.open({n: v for n, v in facts.items() if n != START_FACT}, resume=False)
    facts |= {LAYERS_FLAG: "2,4"}
    state.open(facts, resume=True, inferred=list_inferred(settings))
    given = list_inferred(dataclasses.replace(settings, hidden_states_layers="2,4"))
    with pytest.raises(SpecDecError, match="hidden-states-layers is '2,4', was None") as caught:
        state.open(facts, resume=True, inferred=given)
    assert f'add "{LAYERS_FLAG}": "2,4" to {state.folder / "settings.json"}' in caught.value.hint
    state.open(facts, resume=False)
    with pytest.raises(SpecDecError, match="config.json is 'another', was '"):
        state.open(facts | {START_FACT: "another"}, resume=True, inferred=given)


def test_rows_are_tokenized_once(target_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Held-out rows are those of --eval-data; a second start maps what the first has written."""
    for name, text in (("data.txt", "def add\n"), ("eval.txt", "return first\n")):
        (tmp_path / name).write_text(text)
    settings = make_settings(
        model_dir=str(target_dir), data=tmp_path / "data.txt", eval_data=tmp_path / "eval.txt",
        output_dir=tmp_path / "out",
    )  # fmt: skip
    state = TrainingState(settings.output_dir)
    state.open({}, resume=False)
    train_rows, heldout_rows = job.load_rows(make_setup(settings), state, 320)
    ids = [tokenizer(text)["input_ids"] for text in ("def add", "return first")]
    for rows, text_ids in zip((train_rows, heldout_rows), ids, strict=True):
        tokens = rows.tokens.tolist()
        assert tokens[0] == tokenizer.eos_token_id, "before each text"
        assert tokens[1 : 1 + len(text_ids)] == text_ids
    (tmp_path / "data.txt").write_text("other text")
    again, _ = job.load_rows(make_setup(settings), state, 320)
    assert again.tokens.tolist() == train_rows.tokens.tolist()
    with pytest.raises(SpecDecError, match="the target has 9"):
        job.load_rows(make_setup(settings), state, 9)
    np.save(state.data_folder / "train.tokens.npy", np.flip(train_rows.tokens))
    with pytest.raises(SpecDecError, match=r"train\.tokens\.npy are damaged"):
        job.load_rows(make_setup(settings), state, 320)
    (state.data_folder / "complete").unlink()
    elsewhere = {**vars(ACCELERATOR), "is_main_process": False, "process_index": 1}
    with pytest.raises(SpecDecError, match="is not there on process 1"):
        job.load_rows(make_setup(settings, accelerator=SimpleNamespace(**elsewhere)), state, 320)


def test_a_job_is_prepared(target_dir: Path, data_file: Path, tmp_path: Path) -> None:
    """Its state has the hashes of what the weights depend on; another start resumes it."""
    settings = make_settings(
        model_dir=str(target_dir), data=data_file, output_dir=tmp_path / "out", method="redrafter"
    )
    prepared = setup.prepare_setup(settings, ACCELERATOR)
    prepared_job = job.prepare_job(prepared)
    assert prepared_job.target.shape.vocab_size == 320
    assert np.diff(prepared_job.train_rows.bounds).max() == prepared_job.max_length == 64
    assert len(prepared_job.heldout_rows) == 1, "2% of 40 documents"
    assert [Path(file["path"]).name for file in prepared_job.data_files] == ["data.jsonl"]
    assert {"config.json", "model.safetensors"} <= {
        Path(file["path"]).name for file in prepared_job.target_files
    }
    assert prepared_job.save_dtype == "float32"
    changed = dataclasses.replace(settings, learning_rate=5e-3, resume=True)
    with pytest.raises(SpecDecError, match="--resume: not the same training"):
        job.prepare_job(dataclasses.replace(prepared, settings=changed))


# sanity.py


@pytest.mark.parametrize(
    ("accuracies", "is_known"),
    [([[0.9, 1.0], [0.95, 1.0]], True), ([[1.0, 1.0], [0.89, 1.0]], False), ([[0.0, 1.0]], False)],
)
def test_a_row_is_known_by_every_position(accuracies: list[list[float]], is_known: bool) -> None:
    assert sanity.is_known_by_heart({"top_k_accuracy": accuracies}) is is_known


@pytest.mark.parametrize("max_steps", [None, 7])
def test_one_row_is_learned(
    max_steps: int | None, target_dir: Path, data_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has the first row to learn and to be asked for, in steps of that row alone."""
    loops: list[SimpleNamespace] = []
    accuracies = [[1.0, 1.0], [0.5, 0.75]]

    def make_loop(*arguments: Any) -> SimpleNamespace:
        names = ("settings", "accelerator", "target", "drafter", "rows", "heldout", "hooks")
        loop = SimpleNamespace(**dict(zip(names, arguments, strict=True)), step=5)
        loop.run = lambda: {"top_k_accuracy": accuracies}
        loops.append(loop)
        return loop

    monkeypatch.setattr(loop_module, "Loop", make_loop)
    monkeypatch.setattr(devices, "start_accelerator", lambda settings: ACCELERATOR)
    settings = make_settings(
        model_dir=str(target_dir), data=data_file, method="medusa", batch_size=3, num_epochs=2.0,
        max_steps=max_steps, gradient_accumulation_steps=4,
    )  # fmt: skip
    with pytest.raises(SpecDecError) as caught:
        sanity.learn_one_row(settings)
    (loop,) = loops
    num_tokens = len(loop.rows.tokens)
    assert len(loop.rows) == 1
    tokenizer = target_module.load_tokenizer(str(target_dir), 320)
    rows, _ = prepare_rows(data_file, None, tokenizer, 64)
    assert loop.rows.tokens.tolist() == rows.tokens[: rows.bounds[1]].tolist()
    assert loop.heldout is loop.rows
    assert loop.settings.max_steps == (max_steps or 400)
    assert (loop.settings.batch_size, loop.settings.gradient_accumulation_steps) == (1, 1)
    assert (loop.settings.num_epochs, loop.settings.save_steps) == (None, 0)
    assert loop.hooks.is_enough is sanity.is_known_by_heart
    assert caught.value.message == (
        f"--sanity: after 5 steps on one row of {num_tokens} tokens the top-1 accuracies are"
        " 100.0 50.0%, not 90% or more"
    )
    accuracies[1][0] = 0.9
    report = sanity.learn_one_row(settings)
    assert (report["method"], report["steps"], report["sanity"]) == ("medusa", 5, True)
    assert report["row_tokens"] == num_tokens


# output.py


REPORT: dict[str, Any] = {
    "tokens": 1200, "steps": 6,
    "eval": {
        "rows": 3, "num_labels": 50, "loss": 1.5, "loss_per_position": [0.5, 1.0],
        "top_k_accuracy": [[0.5, 0.75, 1.0], [0.25, 0.5, 0.625]], "chain_length": 1.62549,
    },
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    """A folder with all files, and the drafter that they are of."""
    settings = make_settings(output_dir=tmp_path / "out", medusa_num_heads=2)
    file = {"path": "/a/b/config.json", "bytes": 12, "sha256": "ab"}
    finished_job = make_job(settings, target_files=[file])
    finished_job.state.open({}, resume=False)
    for step, loss in ((1, 3.5), (2, 3.25)):
        finished_job.state.add_log({"step": step, "mean_loss": loss})
    drafter: Any = LinearDrafter(3, 2)
    drafter.register_buffer("d2t", torch.tensor([0, 7]))
    folder = tmp_path / "drafter"
    folder.mkdir()
    weights = drafter.state_dict()
    output.write_drafter(folder, finished_job, drafter, weights, REPORT, rows_per_step=8)
    return folder, drafter


def test_the_acceptance_of_an_interrupted_run_is_not_published(tmp_path: Path) -> None:
    """Only one that this run measured is of these weights."""
    settings = make_settings(output_dir=tmp_path / "out", medusa_num_heads=2)
    finished_job = make_job(settings)
    finished_job.state.open({}, resume=False)
    measured = Acceptance(
        right=((1,) * NUM_BUCKETS,) * MAX_DEPTH, seen=((2,) * NUM_BUCKETS,) * MAX_DEPTH,
        gains=(0.5,), num_drafts=3, about={},
    )  # fmt: skip
    measured.write(finished_job.state.folder / NAME)
    drafter: Any = LinearDrafter(3, 2)
    acceptance = {"dtype": "x", "acceptance_length": 2.3, "prompts": 4, "num_output_tokens": 90,
                  "num_verify_steps": 38}  # fmt: skip
    for name, found in (("measured", {"acceptance": acceptance}), ("not", {})):
        (folder := tmp_path / name).mkdir()
        report = REPORT | {"eval": REPORT["eval"] | found}
        output.write_drafter(
            folder, finished_job, drafter, drafter.state_dict(), report, rows_per_step=8
        )
        assert (folder / NAME).exists() == bool(found)


def test_the_files_of_a_drafter(written: tuple[Path, torch.nn.Module]) -> None:
    """Weights of the target's type, ids as integers, and what the target shares."""
    folder, drafter = written
    tensors = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "weight": torch.bfloat16, "bias": torch.bfloat16, "shared": torch.bfloat16,
        "d2t": torch.int64,
    }  # fmt: skip
    assert torch.equal(tensors["weight"], drafter.state_dict()["weight"].bfloat16())
    assert torch.equal(tensors["shared"], TARGET.table.bfloat16())
    assert tensors["d2t"].tolist() == [0, 7]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"width": 3, "name": "base", "dtype": "bfloat16"}
    log = (folder / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["mean_loss"] for line in log] == [3.5, 3.25]
    manifest = json.loads((folder / manifest_module.NAME).read_text())
    assert manifest["results"] == REPORT
    assert manifest["compute"] == {
        "dtype": "float32", "device": "cpu", "processes": 2, "rows_per_step": 8,
        "model_max_length": 30,
    }  # fmt: skip


def test_the_model_card(written: tuple[Path, torch.nn.Module]) -> None:
    card = (written[0] / "README.md").read_text()
    for line in (
        "tags: [speculative-decoding, medusa]",
        "# medusa drafter for base",
        "* `config.json` 12 bytes, sha256 `ab`",
        "1200 tokens were seen in 6 steps of 8 rows of up to 30 tokens.",
        "* computed in float32 on 2 x cpu",
        "* training loss 3.5 at the start, 3.25 at the end",
        "3 rows held out of the data, 50 labels at the first position. Loss (nats, summed over"
        " the positions): 1.5.",
        "| draft token | loss | top-1 | top-2 | top-3 |",
        "| --- | --- | --- | --- | --- |",
        "| 1 | 0.500 | 50.0% | 75.0% | 100.0% |",
        "| 2 | 1.000 | 25.0% | 50.0% | 62.5% |",
        "The acceptance by an engine was not measured; `specdec-run --json` shows it.",
    ):
        assert line in card.splitlines(), line
    assert "* AdamW, learning rate 0.001 after a warm-up over 10% of the steps" in card
    assert "* 25% of what is learned is the target's own distribution" in card
    assert "medusa_num_heads 2" in card
    assert "A greedy chain of 2 draft tokens would yield 1.63 tokens per verify step" in card


def test_the_card_of_a_measured_drafter() -> None:
    settings = make_settings(eval_data=Path("/x/held.jsonl"), start_from=Path("/y/first"))
    acceptance = {
        "dtype": "bfloat16", "acceptance_length": 2.345, "prompts": 4, "num_output_tokens": 90,
        "num_verify_steps": 38,
    }  # fmt: skip
    report = REPORT | {"eval": REPORT["eval"] | {"acceptance": acceptance}}
    compute = {"rows_per_step": 1, "model_max_length": 9, "dtype": "x", "processes": 1,
               "device": "cpu"}  # fmt: skip
    card = output.write_card(make_job(settings), [{"step": 1}], report, compute)
    assert "3 rows of `held.jsonl`, 50 labels" in card
    assert "* went on from the drafter `first`" in card
    assert "training loss" not in card, "no line of the log has one"
    assert "emitted **2.35** tokens per verify step: greedy decoding of 4 held-out" in card
    assert "90 tokens in 38 verify steps." in card
