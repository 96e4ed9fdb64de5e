"""Facts by which the stages choose a backend: what each executes, takes, and suits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.engine import support as torch_support
from specdec.model.quantization import Quantization
from specdec.trt import support as trt_support
from specdec.trtllm import support as trtllm_support
from specdec.trtllm.facts import load_facts
from tests.engine.models import make_model


def make_checkpoint(
    algorithm: str | None = None, architecture: str = "LlamaForCausalLM", **changes: Any
) -> Any:
    model = make_model(**changes)
    raw = {"architecture": architecture, "num_attention_heads": 4, "num_key_value_heads": 4}
    return SimpleNamespace(model=model, raw=raw, quantization=Quantization(quant_algo=algorithm))


def find_facts(module: Any, checkpoint: Any, label: str | None = None) -> list[str]:
    return [fact for fact, _ in module.find_checkpoint_problems(checkpoint, label)]


@pytest.mark.parametrize(
    ("algorithm", "pp_size", "facts"),
    [
        (None, 1, []), ("FP8", 1, []), ("W4A16_AWQ", 1, []), ("GGUF", 1, []),
        ("NVFP4", 1, ["the torch backend does not execute NVFP4"]),
        ("W4A8_AWQ", 2, ["the torch backend has no pipeline stages, and pp_size is 2",
                         "the torch backend does not execute W4A8_AWQ"]),
    ],
)  # fmt: skip
def test_torch_executes(algorithm: str | None, pp_size: int, facts: list[str]) -> None:
    checkpoint = make_checkpoint(algorithm, pp_size=pp_size)
    assert find_facts(torch_support, checkpoint) == facts
    assert torch_support.is_installed() is torch_support.suits_machine() is True
    assert torch_support.takes_flag("gemm_plugin") is False


def test_tensorrt_is_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tensorrt", None):
        monkeypatch.setattr(trt_support, "find_package", lambda: package)  # noqa: B023 - called here
        assert trt_support.is_installed() is (package is not None)
        assert trt_support.suits_machine() is False
    assert trt_support.find_checkpoint_problems(make_checkpoint("NVFP4", pp_size=2)) is None
    assert trt_support.takes_flag("gemm_plugin") is False


@pytest.mark.parametrize(
    ("is_installed", "num_gpus", "suits"), [(True, 1, True), (True, 0, False), (False, 1, False)]
)
def test_tensorrt_llm_suits_machines_with_a_gpu(
    is_installed: bool, num_gpus: int, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trtllm_support, "is_importable", lambda name: is_installed and name == "tensorrt_llm"
    )
    monkeypatch.setattr(trtllm_support, "list_gpus", lambda: (("gpu",) * num_gpus, None))
    assert trtllm_support.is_installed() is is_installed
    assert trtllm_support.suits_machine() is suits


def test_tensorrt_llm_loads_by_line() -> None:
    """A class, its heads, and the layout; 1.2 unless another line is named."""
    assert find_facts(trtllm_support, make_checkpoint()) == []
    lacking = make_checkpoint(architecture="Qwen3ForCausalLM")
    assert find_facts(trtllm_support, lacking) == []
    assert find_facts(trtllm_support, lacking, "0.14") == [
        "TensorRT-LLM 0.14 has no Qwen3ForCausalLM"
    ]
    both = make_checkpoint("GGUF", architecture="NoneForCausalLM")
    first, second = find_facts(trtllm_support, both)
    assert first == "TensorRT-LLM 1.2 has no NoneForCausalLM"
    assert second.startswith("TensorRT-LLM 1.2 cannot load GGUF checkpoints: ")
    (name, *_) = load_facts("1.2").without_kv_heads
    grouped = make_checkpoint(architecture=name)
    grouped.raw["num_key_value_heads"] = 2
    (fact,) = find_facts(trtllm_support, grouped)
    assert fact.endswith("and the checkpoint has 2 for 4 heads")


def test_tensorrt_llm_s_flags_are_those_of_any_line() -> None:
    """One of 0.14 alone counts, and one of 1.2 alone."""
    names = [set(load_facts(label).list_flag_names()) for label in ("1.2", "0.14")]
    only_old = sorted(names[1] - names[0])
    assert only_old
    for name in ("gemm_plugin", only_old[0], sorted(names[0] - names[1])[0]):
        assert trtllm_support.takes_flag(name)
    assert not trtllm_support.takes_flag("gem_plugin")
