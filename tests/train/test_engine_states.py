"""Hidden states of an engine: the drafters of a run with the target, and no other model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.train import setup
from specdec.train.rows import TokenRows
from specdec.train.settings import TrainSettings
from tests.conftest import make_llama
from tests.engines import make_engine
from tests.train.test_extracted import BASIC, EAGLE3
from tests.train.test_hidden_states import hide_the_layers, read_bytes


@pytest.fixture(scope="module")
def engine(target_dir: Path, lasting_dir: Path) -> Path:
    return make_engine(lasting_dir / "states-engine", target_dir)


@pytest.fixture
def inputs(few_inputs: tuple[object, ...]) -> tuple[object, ...]:
    return (*few_inputs, *BASIC)


@pytest.mark.parametrize(
    "method", [EAGLE3, ("--method", "medusa", "--self-distillation", 0.5)], ids=["eagle3", "medusa"]
)
def test_an_engine_gives_the_drafter_of_a_run_with_the_target(
    method: Any, run_train: Any, inputs: Any, tmp_path: Path, engine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = (*inputs, *method)
    run_train(*options, "--output-dir", tmp_path / "live")
    hide_the_layers(monkeypatch)
    given = (*options, "--hidden-states-from", engine)
    kept = ("--hidden-states-dir", tmp_path / "kept")
    run_train(*given, "--output-dir", tmp_path / "drafter")
    run_train(*given, *kept, "--output-dir", tmp_path / "kept-drafter")
    weights = {name: load_file(next((tmp_path / name).glob("*.safetensors")))
               for name in ("live", "drafter")}  # fmt: skip
    for name, tensor in weights["live"].items():
        torch.testing.assert_close(weights["drafter"][name], tensor, rtol=1e-3, atol=1e-4)
    assert read_bytes(tmp_path / "kept-drafter") == read_bytes(tmp_path / "drafter")
    other = run_train(*options, *kept, "--output-dir", tmp_path / "other", ends=1)
    assert "--hidden-states-from is None, was 'an engine, config.json " in other.last_lines[0]


def test_what_does_not_fit_is_refused(
    run_train: Any, inputs: Any, tmp_path: Path, engine: Path, target_dir: Path
) -> None:
    def train(source: object, *more: object, ends: int = 1) -> str:
        done = run_train(
            *inputs, *EAGLE3, "--hidden-states-from", source, *more, "--force", "--output-dir",
            tmp_path / "out", ends=ends,
        )  # fmt: skip
        assert not (tmp_path / "out").exists()
        return "\n".join(done.last_lines)

    layers = train(engine, "--hidden-states-layers", "1,2", ends=2)
    assert "which has all layers" in layers
    short = make_engine(tmp_path / "short", target_dir, build=("--max-seq-len", 16))
    message = train(short)
    assert "its max_seq_len is 16, the longest row has 32 tokens" in message
    assert "--model-max-length 16" in message
    other = make_engine(tmp_path, make_llama(tmp_path, seed=5))
    message = train(other)
    assert "num_hidden_layers is" in message or "hidden_size is" in message


def test_an_engine_of_other_weights_is_refused(
    target_dir: Path, tmp_path: Path, engine: Path, data_file: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(8)
    config = LlamaConfig.from_pretrained(target_dir)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    settings = TrainSettings(
        model_dir=tmp_path / "other", data=data_file, hidden_states_from=str(engine)
    )
    with pytest.raises(setup.SpecDecError, match="its logits, of at most .*, differ by up to"):
        open_target(settings)


def open_target(settings: TrainSettings) -> Any:
    from types import SimpleNamespace

    from specdec.train.methods import load_method
    from specdec.train.target import load_config

    accelerator = SimpleNamespace(device=torch.device("cpu"))
    return setup.open_target(
        setup.Setup(
            settings=settings, accelerator=accelerator, method=load_method("eagle"),
            config=load_config(settings.model_dir), dtype="float32", max_length=32,
        )
    )  # fmt: skip


def test_states_are_those_of_transformers_whatever_the_rows_beside(
    target_dir: Path, data_file: Path, engine: Path
) -> None:
    import numpy as np
    from transformers import AutoModelForCausalLM

    settings = TrainSettings(
        model_dir=target_dir, data=data_file, hidden_states_from=str(engine), eagle_version="3"
    )
    target = open_target(settings)
    rows = TokenRows(
        tokens=np.arange(3, 43, dtype=np.int32),
        mask=np.ones(40, np.bool_),
        bounds=np.array([0, 29, 40]),
    )
    from specdec.train.target import make_batch

    cpu = torch.device("cpu")
    both = target.find_states(make_batch(rows, [0, 1], cpu))
    alone = target.find_states(make_batch(rows, [1], cpu))
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    with torch.no_grad():
        output = model.model(torch.arange(32, 43)[None], output_hidden_states=True)
    expected = [output.last_hidden_state, *(output.hidden_states[i + 1] for i in target.aux_layers)]
    assert len(both) == len(expected) > 1
    for column, single, states in zip(both, alone, expected, strict=True):
        torch.testing.assert_close(column[1:, :11], states, rtol=1e-4, atol=1e-5)
        assert torch.equal(column[1:, :11], single)
