"""Medusa's golden cases: the same bytes and keys as NVIDIA's converter and ModelOpt write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.checkpoint.config import parse_checkpoint_config
from specdec.checkpoint.inventory import list_tensors
from specdec.files.tensor_file import TensorFile
from specdec.model.tensors import get_rank_shape
from tests.convert.conftest import Converter, Source
from tests.convert.golden_models import GOLDEN, summarize_rank

MEDUSA = GOLDEN / "medusa"
MODELOPT = MEDUSA / "modelopt_llama"
CASES = [case for path in sorted(MEDUSA.glob("*.json")) for case in json.loads(path.read_text())]
CHECKPOINTS = json.loads((MODELOPT / "checkpoints.json").read_text())

# Where the reference is wrong and ours differs: by model or option, the keys of config.json and
# the tensors that differ, and why.
SHARED = {"share_embedding_table": (True, False)}  # yet it stores a head of its own
WINDOW = {"sliding_window": (None, 64)}  # which it forgets
QWEN = {
    "rotary_base": (10000.0, 1000000.0),  # it writes its flag's default
    # What 1.x, which has Medusa for Qwen, wants to know; the case was written by 0.14.
    "attn_bias": (None, True), "qwen_type": (None, "qwen2"), "model_type": (None, "qwen2"),
    "base_architecture": (None, "Qwen2ForCausalLM"), "moe_intermediate_size": (None, 0),
    "moe_shared_expert_intermediate_size": (None, 0), "share_embedding_table": (False, None),
}  # fmt: skip
DIFFERENT_KEYS: dict[str, dict[str, tuple[Any, Any]]] = {
    "share": SHARED, "mistral_swa": WINDOW, "qwen15_mha": QWEN,
}  # fmt: skip
# It reads a Qwen model as a Llama and drops the attention biases.
ADDED_TENSORS = {
    "qwen15_mha": {f"transformer.layers.{layer}.attention.qkv.bias" for layer in (0, 1)}
}


def get_version(case: dict[str, Any]) -> str:
    """0.14 wrote the cases; it has no Medusa for Qwen."""
    return "1.2" if case["model"].startswith("qwen") else "0.14"


def convert_case(case: dict[str, Any], source: Source, convert: Converter, **flags: Any) -> Path:
    options = list(case["options"])
    if "--num_medusa_heads" in options:
        flags["num_medusa_heads"] = int(options[options.index("--num_medusa_heads") + 1])
    return convert(
        model_dir=source(case["model"]), medusa_model_dir=str(source(case["drafter"])),
        dtype=case["dtype"], tp_size=case["tp_size"],
        **{"trtllm_version": get_version(case), **flags},
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_golden_case(case: dict[str, Any], source: Source, convert: Converter) -> None:
    folder = convert_case(case, source, convert)
    different: dict[str, tuple[Any, Any]] = {}
    for reason in (case["model"], *case["options"]):
        different |= DIFFERENT_KEYS.get(reason, {})
    added = ADDED_TENSORS.get(case["model"], set())
    for rank, expected in enumerate(case["ranks"]):
        ours = summarize_rank(folder / f"rank{rank}.safetensors")
        assert set(ours) - set(expected) == added
        assert {name: info for name, info in ours.items() if name not in added} == expected
    assert not (folder / f"rank{case['tp_size']}.safetensors").exists()
    config = json.loads((folder / "config.json").read_text())
    theirs = {key: pair[0] for key, pair in different.items() if pair[0] is not None}
    assert theirs.items() <= case["config"].items(), "a listed difference is none"
    expected_config = case["config"] | {key: pair[1] for key, pair in different.items()}
    assert config == {
        k: v for k, v in expected_config.items() if k not in different or v is not None
    }


def test_all_cases_are_there() -> None:
    assert len(CASES) == 36
    assert {case["path"] for case in CASES} == {"medusa"}
    assert [case["tp_size"] for case in CHECKPOINTS] == [1, 2]


@pytest.mark.parametrize("model", ["llama_gqa", "mistral_swa", "qwen15_mha"])
@pytest.mark.parametrize("version", ["1.2", "0.14"])
def test_what_is_written_is_read_back(
    model: str, version: str, source: Source, convert: Converter
) -> None:
    case = next(c for c in CASES if c["model"] == model and not c["options"])
    if version == "0.14" and model == "qwen15_mha":
        error = convert.fail(
            model_dir=source(model), medusa_model_dir=str(source(case["drafter"])),
            trtllm_version=version,
        )  # fmt: skip
        assert "TensorRT-LLM 0.14 has no Medusa for Qwen2ForCausalLM" in error.message
        assert error.hint == "convert for 1.2"
        return
    folder = convert_case(case, source, convert, trtllm_version=version)
    config = json.loads((folder / "config.json").read_text())
    checkpoint = parse_checkpoint_config(config)
    assert checkpoint.mode == "medusa"
    assert checkpoint.drafter is not None
    assert checkpoint.drafter.to_checkpoint() == {
        "num_medusa_heads": 4, "num_medusa_layers": 1, "max_draft_len": 63,
    }  # fmt: skip
    # 0.14 names no target; a Mistral that is read as a Llama keeps its window.
    expected = source(model) / "config.json"
    architecture = json.loads(expected.read_text())["architectures"][0]
    assert checkpoint.model.architecture == (
        "LlamaForCausalLM" if version == "0.14" else architecture
    )
    assert checkpoint.model.sliding_window == (64 if model == "mistral_swa" else None)
    specs = list_tensors(checkpoint.model, checkpoint.drafter)
    shapes = {name: list(get_rank_shape(spec, checkpoint.model)) for name, spec in specs.items()}
    ours = summarize_rank(folder / "rank0.safetensors")
    assert {name: info[1] for name, info in ours.items()} == shapes


@pytest.mark.parametrize("golden", CHECKPOINTS, ids=lambda golden: f"tp{golden['tp_size']}")
@pytest.mark.parametrize("has_own_folder", [False, True])
def test_modelopt_folder(
    golden: dict[str, Any], has_own_folder: bool, convert: Converter, tmp_path: Path
) -> None:
    """A model that ModelOpt saved with its heads; the heads come from it or from a copy."""
    target = tmp_path / "both"
    shutil.copytree(MODELOPT, target)
    # A pickle that is never opened: this one would not open.
    (target / "modelopt_state.pth").write_bytes(b"\x80\x04garbage")
    heads = target
    if has_own_folder:
        heads = tmp_path / "heads"
        shutil.copytree(target, heads)
    convert(
        model_dir=target, medusa_model_dir=str(heads), tp_size=golden["tp_size"],
        use_parallel_embedding=True,
    )  # fmt: skip
    for rank, expected in enumerate(golden["ranks"]):
        assert summarize_rank(convert.output / f"rank{rank}.safetensors") == expected
    config = json.loads((convert.output / "config.json").read_text())
    for key in (
        "num_medusa_heads", "num_medusa_layers", "max_draft_len", "rotary_base", "vocab_size",
        "norm_epsilon", "use_parallel_embedding", "architecture",
    ):  # fmt: skip
        assert config[key] == golden["config"][key], key


@pytest.mark.parametrize("golden", CHECKPOINTS, ids=lambda golden: f"tp{golden['tp_size']}")
def test_modelopt_checkpoint_is_read(golden: dict[str, Any]) -> None:
    """Its config.json names the class that ModelOpt made as the target's architecture."""
    assert golden["config"]["base_architecture"] == "MedusaLlamaForCausalLM"
    checkpoint = parse_checkpoint_config(golden["config"])
    assert checkpoint.model.architecture == "LlamaForCausalLM"
    assert checkpoint.model.tp_size == golden["tp_size"]
    specs = list_tensors(checkpoint.model, checkpoint.drafter)
    shapes = {name: list(get_rank_shape(spec, checkpoint.model)) for name, spec in specs.items()}
    assert {name: info[1] for name, info in golden["ranks"][0].items()} == shapes


def test_padding_at_a_tp_size_that_the_reference_gets_wrong(
    source: Source, convert: Converter
) -> None:
    """131 tokens over two ranks: 66 rows each, the last of them zero, as `lm_head` has."""
    case = next(case for case in CASES if case["model"] == "llama_vocab131")
    folder = convert_case(case | {"tp_size": 2}, source, convert)
    parts = [TensorFile(folder / f"rank{rank}.safetensors") for rank in (0, 1)]
    for name in ("lm_head.weight", "medusa_heads.3.lm_head.weight"):
        assert [part.tensors[name].shape for part in parts] == [(66, 64), (66, 64)]
        assert not parts[1].read(name)[65].any()
        assert parts[1].read(name)[64].any()
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 131
