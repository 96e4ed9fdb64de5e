"""Absurd config.json files, thousands of them: planned as they say, or refused; nothing else."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoint.config import parse_checkpoint_config
from specdec.checkpoint.inventory import describe_rank
from specdec.convert.checkpoint import CheckpointFolder
from specdec.convert.families import FAMILIES
from specdec.convert.pipeline import convert_model, make_plan
from specdec.convert.plan import ConversionPlan
from specdec.convert.settings import ConvertSettings
from specdec.errors import Problems
from specdec.verify.contents import check_contents
from tests.convert.conftest import Source
from tests.convert.fuzzing import attempt, fuzz
from tests.convert.golden_models import GOLDEN
from tests.families import EXPERTS, make_family_model

MAX_GROWTH = 300 << 20  # bytes that the process may grow by in a test
# A target of every family: the smallest there is with a checkpoint of TensorRT-LLM's own, or None.
TARGETS = {
    "gemma": "gemma_mha", "gpt2": "gpt2_tiny", "llama": "llama_gqa", "mistral": "mistral_swa",
    "opt": "opt_tiny", "phi": "phi2", "phi3": "phi3", "qwen2": "qwen2_gqa", "ministral": None,
    "gemma2": "gemma2_mqa", "gemma3": None, "gemma4": None,
    "granite": None, "qwen3": None, "seed_oss": None,
    "smollm3": None, "stablelm": None, "mixtral": "mixtral_f32", "qwen2_moe": "qwen2moe_gqa",
    "qwen3_moe": None, "ministral3": None, "qwen3_5": None, "qwen3_5_moe": None, "qwen3_next": None,
    "gpt_oss": None, "lfm2": None, "lfm2_moe": None, "granitemoe": None, "granitemoeshared": None,
    "granitemoehybrid": None,
}  # fmt: skip
DRAFTERS = {"drafter_model_dir": "drafter_A_rnn_e96", "medusa_model_dir": "medusa_4x1"}
KEYS = [
    "rope_scaling", "rope_parameters", "sliding_window", "head_dim", "num_key_value_heads",
    "partial_rotary_factor", "tie_word_embeddings", "torch_dtype", "dtype", "architectures",
    "model_type", "text_config", "quantization_config", "layer_types", "medusa", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "full_attention_interval", "swiglu_limit", "swiglu_alpha",
    "full_attn_idxs", "conv_L_cache", "block_ff_dim", "num_dense_layers", "mamba_n_heads",
    "mamba_d_head", "mamba_n_groups", "num_local_experts", "time_step_limit",
]  # fmt: skip
ROPE_KEYS = ["type", "rope_type", "factor", "short_factor", "long_factor", "rope_theta",
             "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
             "llama_4_scaling_beta"]  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-4, 300)
    | st.sampled_from([10**9, 10**12, 2**31, 2**63 - 1, 2**63, 10**299, -(10**18)])
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
    | st.sampled_from(["linear", "yarn", "longrope", "llama3", "dynamic", "float32", "LlamaModel",
                       "FP8", "INT8", "W4A16", "gelu", "silu", "x" * 5000])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(ROPE_KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)


@st.composite
def change(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """A config with some keys removed, given other values, or added, also one level down."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    for _ in range(draw(st.integers(1, 4))):
        place = changed
        inner = [key for key, value in changed.items() if isinstance(value, dict)]
        is_nested = draw(st.booleans())
        if inner and is_nested:
            place = changed[draw(st.sampled_from(inner))]
        names = sorted(place) or ["x"]
        key = draw(st.sampled_from(names) | st.sampled_from(names) | st.sampled_from(KEYS))
        if draw(st.integers(0, 4)) == 0:
            place.pop(key, None)
        else:
            place[key] = draw(VALUES)
    return changed


def read_memory(field: str) -> int:
    """Return bytes of this process by their name in /proc/self/status: VmRSS now, VmHWM at most."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what all tests need, so that a test's memory is its own whichever is run first."""
    make_family_model(tmp_path_factory.mktemp("warm"), "llama")


@pytest.fixture(autouse=True)
def bound_memory(warm_process: None) -> Iterator[None]:
    """Fail for a test in which the process was much larger than at the test's beginning."""
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = read_memory("VmRSS")
    yield
    assert read_memory("VmHWM") - before < MAX_GROWTH


def read_source(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / "sources" / f"{name}.json").read_text())["config"]
    return config


def plan(**flags: Any) -> ConversionPlan:
    """Plan a conversion, which checks everything; the output's folder is never looked at."""
    return make_plan(ConvertSettings(output_dir=Path("out"), **flags))


def test_every_family_is_here() -> None:
    assert set(TARGETS) == {family.name for family in FAMILIES.values()}


@pytest.mark.thorough
@pytest.mark.parametrize("family", TARGETS)
def test_targets(family: str, source: Source, tmp_path: Path) -> None:
    golden = TARGETS[family]
    if golden is not None:
        folder = Path(shutil.copytree(source(golden), tmp_path / "model"))
    else:
        folder = make_family_model(tmp_path, family, name="model")
    good = json.loads((folder / "config.json").read_text())
    assert plan(model_dir=str(folder)).ranks[0]

    @fuzz(80)
    @given(change(good), st.sampled_from([1, 2, 3, 8]), st.booleans())
    def check(config: dict[str, Any], tp_size: int, is_split: bool) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        flags: dict[str, Any] = {"tp_size": tp_size, "use_parallel_embedding": is_split}
        if is_split and family in EXPERTS:
            flags["moe_ep_size"] = tp_size
        planned, _ = attempt(lambda: plan(model_dir=str(folder), **flags))
        if planned is not None:
            assert len(planned.ranks) == tp_size
            json.dumps(planned.config, allow_nan=False)

    check()
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is written"


@pytest.mark.thorough
@pytest.mark.parametrize("flag", DRAFTERS)
def test_drafters(flag: str, source: Source, tmp_path: Path) -> None:
    folder = shutil.copytree(source(DRAFTERS[flag]), tmp_path / "drafter")
    flags: dict[str, Any] = {"model_dir": str(source("llama_gqa")), flag: str(folder)}
    if flag == "medusa_model_dir":
        flags["num_medusa_layers"] = 1
    assert plan(**flags).ranks[0]

    @fuzz(80)
    @given(change(read_source(DRAFTERS[flag])))
    def check(config: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        attempt(lambda: plan(**flags))

    check()


CHECKPOINTS = [
    "llama_gqa", "llama_gqa+drafter_A_rnn_e96", "phi3", "gpt2_tiny", "modelopt", "stablelm",
    "qwen2moe_gqa",
]  # fmt: skip


def make_checkpoint(name: str, source: Source, folder: Path) -> Path:
    if name == "modelopt":
        return Path(shutil.copytree(GOLDEN / "modelopt" / "trtllm" / "llama-fp8-fp8kv-tp1", folder))
    model, _, drafter = name.partition("+")
    is_golden = name != "stablelm"
    target = source(model) if is_golden else make_family_model(folder.parent, name)
    convert_model(
        ConvertSettings(
            model_dir=str(target), output_dir=folder,
            drafter_model_dir=str(source(drafter)) if drafter else None,
        )
    )  # fmt: skip
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, source: Source, tmp_path: Path) -> None:
    """As a base for a drafter, and as what specdec-verify checks."""
    folder = make_checkpoint(name, source, tmp_path / "ckpt")
    path = folder / "config.json"
    path.chmod(0o644)
    good = json.loads(path.read_text())
    found: list[str] = []
    check_contents(folder, found)
    assert found == []

    @fuzz(80)
    @given(change(good))
    def check(config: dict[str, Any]) -> None:
        path.write_text(json.dumps(config))
        attempt(lambda: CheckpointFolder(folder).plan(Problems()))
        attempt(lambda: check_contents(folder, []))
        parsed, _ = attempt(lambda: parse_checkpoint_config(config))
        if parsed is not None and parsed.model.num_hidden_layers < 100:
            for info in describe_rank(parsed, 0).values():
                assert all(size >= 0 for size in info.shape)
                assert math.prod(info.shape) >= 0

    check()
