"""The torch backend's plan and the tensors that it writes, alone: on checkpoints of a few numbers.

Each number is that of a checkpoint's tensor, so that a row in a wrong place is seen.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from specdec.build.backends import torch_engine, torch_tensors
from specdec.build.backends.torch_engine import EngineReader, TorchPlan, plan_build
from specdec.build.limits import resolve_limits
from specdec.build.settings import BuildSettings
from specdec.checkpoint.config import CheckpointConfig
from specdec.checkpoint.inventory import list_tensors
from specdec.engine import int8, native_library
from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.methods import METHODS
from specdec.methods.eagle import Eagle3Params, EagleParams
from specdec.methods.medusa import MedusaParams
from specdec.model import int4
from specdec.model.quantization import Quantization
from specdec.model.sharding import join, split
from tests.engine.models import make_model

HEADS = MedusaParams(max_draft_len=9, num_heads=2, num_layers=1)
LAYER = "transformer.layers.0."
FC, GATE, PROJ, GATE_UP = (
    f"{LAYER}mlp.{name}.weight" for name in ("fc", "gate", "proj", "gate_up")
)
# Of a quantized checkpoint: all but fc and gate.
EXCLUDED = ("*attention*", "*proj", "*lm_head", "*embedding")
DENSE = f"{LAYER}attention.dense.weight"
MEDUSA_HEAD = "medusa_heads.1.lm_head.weight"


def make_checkpoint(
    drafter: EagleParams | MedusaParams | None = None,
    quantization: str | None = None,
    method: str = "medusa",
    **changes: Any,
) -> CheckpointConfig:
    """A Llama of one layer [32] with an MLP of 64."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "head_size": 8, "intermediate_size": 64}
    return CheckpointConfig(
        model=make_model(**sizes | changes), method=METHODS[method] if drafter else None,
        drafter=drafter, raw={},
        quantization=Quantization(quant_algo=quantization, exclude_modules=EXCLUDED),
    )  # fmt: skip


def make_arrays(checkpoint: CheckpointConfig) -> dict[str, Any]:
    """Whole tensors of whole numbers from -40 to 40, at random."""
    generator = np.random.default_rng(7)
    specs = list_tensors(checkpoint.model, checkpoint.drafter)
    return {
        name: generator.integers(-40, 41, spec.shape).astype(np.float32)
        for name, spec in specs.items()
    }


def write_checkpoint(
    folder: Path, checkpoint: CheckpointConfig, arrays: Mapping[str, Any]
) -> list[TensorFile]:
    """The ranks' files of whole tensors; what has no specification is in each."""
    folder.mkdir(exist_ok=True)
    specs = list_tensors(checkpoint.model, checkpoint.drafter)
    for rank in range(checkpoint.model.tp_size):
        rank_arrays = {
            name: split(array, specs[name], checkpoint.model, rank)
            if name in specs and array.shape == specs[name].shape else array
            for name, array in arrays.items()
        }  # fmt: skip
        save_file(rank_arrays, folder / f"rank{rank}.safetensors")
    return [
        TensorFile(folder / f"rank{rank}.safetensors") for rank in range(checkpoint.model.tp_size)
    ]


def read_all(plan: TorchPlan, file: str) -> dict[str, Any]:
    """A file's tensors in the order of their types, in which scales come before integers."""
    reader = EngineReader(plan, file)
    read = {}
    for name in sorted(plan.files[file], key=lambda n: plan.files[file][n].dtype != "float32"):
        produced = reader.read(name)
        array = produced if isinstance(produced, np.ndarray) else np.concatenate(list(produced))
        info = plan.files[file][name]
        assert (str(array.dtype), array.size) == (info.dtype, np.prod(info.shape)), name
        read[name] = array.reshape(info.shape)
    return read


def plan_here(
    folder: Path, checkpoint: CheckpointConfig, arrays: Mapping[str, Any], **settings: Any
) -> TorchPlan:
    write_checkpoint(folder, checkpoint, arrays)
    return plan_build(BuildSettings(**{"optimize": "none"} | settings), checkpoint, folder)


# ---- Plain tensors.


def test_fc_and_gate_are_one_matrix_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(HEADS)
    arrays = make_arrays(checkpoint)
    plan = plan_here(tmp_path, checkpoint, arrays)
    assert (plan.prepack, plan.compile_kernels, plan.packs) == (False, False, False)
    assert (plan.needs_kernels, plan.draft_vocab_size, plan.block_types) == (False, None, None)
    stored = read_all(plan, "weights.safetensors")
    assert stored.keys() - arrays.keys() == {GATE_UP}
    assert arrays.keys() - stored.keys() == {FC, GATE}
    np.testing.assert_array_equal(stored.pop(GATE_UP)[:64], arrays[FC])
    np.testing.assert_array_equal(read_all(plan, "weights.safetensors")[GATE_UP][64:], arrays[GATE])
    for name, array in stored.items():
        np.testing.assert_array_equal(array, arrays[name])
    assert plan.num_bytes == 4 * sum(array.size for array in arrays.values())
    assert torch_engine.describe_plan(plan) | {"weight_files": plan.num_bytes} == {
        "prepack": False, "native_kernels": False, "packed_weights": False, "quantization": None,
        "block_types": None, "drafter_weights": None, "draft_vocab_size": None,
        "weights_bytes": plan.num_bytes, "num_tensors": len(arrays) - 1,
        "weight_files": plan.num_bytes,
    }  # fmt: skip


def test_a_drafter_of_two_ranks_is_whole_and_in_a_file_of_its_own(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(HEADS, tp_size=2)
    arrays = make_arrays(checkpoint)
    plan = plan_here(tmp_path, checkpoint, arrays)
    assert list(plan.files) == ["rank0.safetensors", "rank1.safetensors", "drafter.safetensors"]
    drafter = read_all(plan, "drafter.safetensors")
    assert set(drafter) == {name for name in arrays if name.startswith("medusa_heads.")}
    for name, array in drafter.items():
        np.testing.assert_array_equal(array, arrays[name])
    second = read_all(plan, "rank1.safetensors")
    np.testing.assert_array_equal(
        second[GATE_UP], np.concatenate([arrays[FC][32:], arrays[GATE][32:]])
    )
    np.testing.assert_array_equal(second[PROJ], arrays[PROJ][:, 32:])
    np.testing.assert_array_equal(second["lm_head.weight"], arrays["lm_head.weight"][64:])


@pytest.mark.parametrize(
    ("name", "stacked"),
    [("mlp.fc", [[3], [4], [1], [2]]), ("mlp.proj", [[1], [2], [3], [4]])],
)  # fmt: skip
def test_a_fused_mlp_is_stored_with_the_activated_half_first(
    name: str, stacked: Sequence[Sequence[int]]
) -> None:
    model = make_model(architecture="Phi3ForCausalLM")
    assert model.arithmetic.mlp == "fused"
    rows = np.array([[1], [2], [3], [4]], np.float32)
    array = torch_tensors.stack_parts([rows], model, f"{LAYER}{name}")
    assert array.tolist() == stacked
    names = torch_tensors.name_parts(f"{LAYER}mlp.gate_up", model)
    assert names == [f"{LAYER}mlp.fc"]


# ---- Chosen tokens of a drafter.


def test_heads_of_chosen_tokens_and_their_offsets(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(HEADS)
    arrays = make_arrays(checkpoint)
    tokens = [*range(3, 128, 2)] + [126]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens[::-1]))
    plan = plan_here(
        tmp_path, checkpoint, arrays, draft_vocab_file=tmp_path / "tokens.json",
        drafter_weights="int8",
    )  # fmt: skip
    assert (plan.draft_vocab_size, plan.drafter_weights) == (64, "int8")
    stored = read_all(plan, "weights.safetensors")
    tokens.sort()
    np.testing.assert_array_equal(stored["medusa_heads.0.d2t"] + np.arange(64), tokens)
    rows = torch.from_numpy(arrays[MEDUSA_HEAD][tokens])
    codes, scales = int8.quantize(rows, "a head")
    np.testing.assert_array_equal(stored[MEDUSA_HEAD], codes)
    np.testing.assert_array_equal(stored["medusa_heads.1.lm_head.per_channel_scale"], scales)
    # The target's own head and layers are whole, and in the model's type.
    np.testing.assert_array_equal(stored["lm_head.weight"], arrays["lm_head.weight"])
    np.testing.assert_array_equal(stored[PROJ], arrays[PROJ])


# ---- A drafter's type.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "int4", "drafter_weights": "auto", "group_size": 32}, "int8"),
        ({"quantization": "int8", "drafter_weights": "same"}, None),
        ({"quantization": "int8", "drafter_weights": "int4"}, "int4"),
        ({"quantization": "int8", "packed_weights": False}, None),  # as for a GPU
        ({"quantization": "int8", "optimize": "none"}, None),
        ({}, None),
    ],
)
def test_a_drafter_is_rounded_where_the_target_is_and_a_cpu_runs_both(
    settings: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(HEADS)
    arrays = make_arrays(checkpoint)
    plan = plan_here(tmp_path, checkpoint, arrays, **{"optimize": "native"} | settings)
    assert plan.drafter_weights == expected
    stored = plan.files["weights.safetensors"]
    assert stored[MEDUSA_HEAD].dtype == ("float32" if expected is None else "int8")


@pytest.mark.parametrize(("version", "expected"), [(1, "int8"), (3, "int4")])
def test_eagle_3_is_int4_beside_a_quantized_target(
    version: int, expected: str, tmp_path: Path
) -> None:
    """Heads too: two codes of a column of the matrix in a byte."""
    third = Eagle3Params(aux_layers=(0,), draft_vocab_size=32, norm_before_residual=False)
    net = make_model(hidden_size=64, num_hidden_layers=1, head_size=8, intermediate_size=64)
    drafter = EagleParams(
        net=net,
        num_eagle_layers=1,
        max_non_leaves_per_layer=2,
        max_draft_len=4,
        eagle3=third if version == 3 else None,
    )
    checkpoint = make_checkpoint(drafter, hidden_size=64, method="eagle")
    arrays = make_arrays(checkpoint)
    for name in [name for name in arrays if name.endswith(".d2t")]:
        arrays[name] = np.zeros(32, np.int64)
    plan = plan_here(tmp_path, checkpoint, arrays, optimize="native", quantization="int8")
    assert plan.drafter_weights == expected
    heads = [name for name in plan.files["weights.safetensors"] if name.endswith(".lm_head.weight")]
    assert heads
    for head in heads:
        info = plan.files["weights.safetensors"][head]
        assert info.dtype == "int8"
        assert info.shape[0] == (16 if version == 3 else net.vocab_size)


def test_no_copy_is_made_of_a_head_that_is_the_target_s(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(HEADS)
    arrays = make_arrays(checkpoint)
    arrays[MEDUSA_HEAD] = arrays["lm_head.weight"]
    options = {"optimize": "native", "quantization": "int8"}
    assert plan_here(tmp_path, checkpoint, arrays, **options).drafter_weights is None
    plan = plan_here(tmp_path, checkpoint, arrays, **options, drafter_weights="int8")
    assert plan.drafter_weights == "int8"


def test_a_model_without_a_drafter_has_none_to_round(tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    plan = plan_here(
        tmp_path, checkpoint, make_arrays(checkpoint), optimize="native", quantization="int8"
    )
    assert plan.drafter_weights is None


# ---- Integers.


@pytest.mark.parametrize("tp_size", [1, 2])
def test_int8_rounds_whole_rows_also_where_ranks_hold_parts(tp_size: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tp_size=tp_size)
    arrays = make_arrays(checkpoint)
    arrays[PROJ][5] = 0
    arrays[PROJ][6, 3] = 127 * 4  # in rank 0's half: rank 1 rounds by the same scale, 4
    plan = plan_here(tmp_path, checkpoint, arrays, quantization="int8")
    ranks = [read_all(plan, file) for file in plan.files]
    specs = list_tensors(checkpoint.model, None)
    for name in (PROJ, DENSE):
        parts = [rank[name].astype(np.float32) for rank in ranks]
        codes, expected = join(parts, specs[name], checkpoint.model), arrays[name]
        scales = ranks[-1][f"{name.removesuffix('weight')}per_channel_scale"]
        for rank in ranks:
            np.testing.assert_array_equal(
                rank[f"{name.removesuffix('weight')}per_channel_scale"], scales
            )
        largest = np.abs(expected).max(1)
        np.testing.assert_allclose(scales, np.where(largest == 0, 1, largest / 127), rtol=1e-6)
        np.testing.assert_array_equal(codes, np.round(expected / scales[:, None]))
    if tp_size == 2:
        assert ranks[0][PROJ][6, 3] == 127
        assert np.abs(ranks[1][PROJ][6]).max() <= 10
    for rank in ranks:  # what no layer multiplies with is as it was
        assert rank["lm_head.weight"].dtype == rank["transformer.ln_f.weight"].dtype == np.float32


def test_int4_rounds_groups_to_numbers_that_have_a_code(tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    arrays = make_arrays(checkpoint)
    generator = np.random.default_rng(3)
    codes = generator.integers(0, 16, arrays[PROJ].shape)
    codes[:, ::32] = 0  # the largest of each group, 8 times its scale
    scales = 2.0 ** generator.integers(-3, 3, (len(codes), 2))
    arrays[PROJ] = ((codes - 8) * np.repeat(scales, 32, 1)).astype(np.float32)
    plan = plan_here(tmp_path, checkpoint, arrays, quantization="int4", group_size=32)
    stored = read_all(plan, "weights.safetensors")
    assert stored[PROJ].shape == (16, 64)
    np.testing.assert_array_equal(int4.unpack(stored[PROJ]), codes)
    np.testing.assert_array_equal(stored[f"{LAYER}mlp.proj.weights_scaling_factor"], scales)


def test_int4_without_a_group_that_divides(tmp_path: Path) -> None:
    for settings, checkpoint, remedy in (
        ({"group_size": 128}, make_checkpoint(), "use --group-size 32"),
        ({"group_size": 128}, make_checkpoint(hidden_size=64, head_size=16), "use --group-size 64"),
        ({}, make_checkpoint(intermediate_size=40), "use --quantization int8"),
    ):
        with pytest.raises(SpecDecError, match="its rows go in pairs, its columns") as caught:
            torch_tensors.plan_layout(
                BuildSettings(quantization="int4", **settings), checkpoint, set()
            )
        assert caught.value.hint == remedy
    for inner, size in ((64, 32), (256, 64)):
        checkpoint = make_checkpoint(hidden_size=size, intermediate_size=inner, head_size=16)
        plan = torch_tensors.plan_layout(BuildSettings(quantization="int4"), checkpoint, set())
        scales = plan["weights.safetensors"][f"{LAYER}mlp.proj.weights_scaling_factor"]
        assert scales.shape == (size, inner // size)
    assert torch_tensors.plan_layout(BuildSettings(), make_checkpoint(), set()) == {
        "weights.safetensors": {
            name.replace("mlp.fc", "mlp.gate_up"): TensorInfo(
                "float32", (128, 32) if name == FC else spec.shape
            )
            for name, spec in list_tensors(make_checkpoint().model, None).items() if name != GATE
        }
    }  # fmt: skip


def test_fp8_keeps_bytes_and_stacks_the_scales_of_both_halves(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(quantization="FP8")
    arrays = make_arrays(checkpoint)
    for index, name in enumerate((FC, GATE)):
        arrays[name] = np.full(arrays[name].shape, index + 56, np.int8)
        module = name.removesuffix("weight")
        arrays[f"{module}weights_scaling_factor"] = np.array([index + 0.5], np.float32)
        arrays[f"{module}activation_scaling_factor"] = np.array([8 - index], np.float32)
    plan = plan_here(tmp_path, checkpoint, arrays)
    stored = {
        name: EngineReader(plan, "weights.safetensors").read(name)
        for name in plan.files["weights.safetensors"] if ".mlp.gate_up" in name
    }  # fmt: skip
    assert plan.files["weights.safetensors"][GATE_UP] == TensorInfo("float8_e4m3fn", (128, 32))
    assert stored[GATE_UP].dtype == np.uint8
    assert (stored[GATE_UP][[0, 63, 64, 127], 0]).tolist() == [56, 56, 57, 57]
    assert stored[f"{LAYER}mlp.gate_up.weights_scaling_factor"].tolist() == [0.5, 1.5]
    # One input, so one scale of it: the larger.
    assert stored[f"{LAYER}mlp.gate_up.activation_scaling_factor"].tolist() == [8]


def write_four_bits(
    arrays: dict[str, Any], name: str, codes: Any, scales: Any, **further: Any
) -> None:
    module = name.removesuffix("weight")
    arrays[name] = int4.pack(codes)
    arrays[f"{module}weights_scaling_factor"] = np.float32(scales)
    arrays.update({f"{module}{kind}": array for kind, array in further.items()})


def test_four_bits_are_stacked_with_zeros_where_one_half_has_some(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(quantization="INT4_GROUPS")
    arrays = make_arrays(checkpoint)
    codes = np.random.default_rng(5).integers(0, 16, (2, 64, 32), np.uint8)
    scales = np.arange(128, dtype=np.float32).reshape(2, 64, 1) + 1
    order = np.arange(32, dtype=np.int32)[::-1].copy()
    zeros = np.full((64, 1), 3, np.uint8)
    write_four_bits(arrays, FC, codes[0], scales[0], input_permutation=order)
    write_four_bits(
        arrays, GATE, codes[1], scales[1], input_permutation=order, weights_zero_point=zeros
    )
    plan = plan_here(tmp_path, checkpoint, arrays)
    stored = read_all(plan, "weights.safetensors")
    module = GATE_UP.removesuffix("weight")
    np.testing.assert_array_equal(int4.unpack(stored[GATE_UP]), codes.reshape(128, 32))
    np.testing.assert_array_equal(stored[f"{module}weights_scaling_factor"], scales.reshape(128, 1))
    assert stored[f"{module}weights_zero_point"].ravel().tolist() == [8] * 64 + [3] * 64
    np.testing.assert_array_equal(stored[f"{module}input_permutation"], order)
    # Two halves that read their inputs in other orders are not one matrix.
    arrays[f"{LAYER}mlp.gate.input_permutation"] = np.arange(32, dtype=np.int32)
    with pytest.raises(SpecDecError, match=r"mlp\.fc and .*mlp\.gate have other groups, input"):
        plan_here(tmp_path / "unlike", checkpoint, arrays)


def test_ggml_blocks_are_stacked_and_counted(tmp_path: Path) -> None:
    # Rows of Q8_0 are 34 bytes to 32 numbers, and those of Q4_0 18: the shorter are filled up.
    checkpoint = make_checkpoint(quantization="GGUF")
    arrays = make_arrays(checkpoint)
    for name, (kind, size) in {FC: (8, 34), GATE: (2, 18)}.items():
        rows = np.zeros((64, size), np.uint8)
        rows[:, 2:] = kind
        arrays[name] = rows
        arrays[f"{name.removesuffix('weight')}ggml_types"] = np.full(64, kind, np.uint8)
    plan = plan_here(tmp_path, checkpoint, arrays)
    assert plan.block_types == {"float32": 5, "Q8_0": 1, "Q4_0": 1}
    del arrays["lm_head.weight"]  # as where the embedding is the head
    (tied,) = write_checkpoint(tmp_path / "tied", checkpoint, arrays)
    counts = torch_tensors.count_block_types(tied, {FC, GATE}, checkpoint.model)
    assert counts == {"float32": 4, "Q8_0": 1, "Q4_0": 1}
    stored = read_all(plan, "weights.safetensors")
    assert stored[f"{LAYER}mlp.gate_up.ggml_types"].tolist() == [8] * 64 + [2] * 64
    assert stored[GATE_UP].shape == (128, 34)
    assert stored[GATE_UP][[0, 64]].tolist() == [
        [0, 0] + [8] * 32, [0, 0] + [2] * 16 + [0] * 16
    ]  # fmt: skip


# ---- The folder.


def write_here(plan: TorchPlan, folder: Path) -> dict[str, str]:
    folder.mkdir()
    limits = resolve_limits(BuildSettings(max_seq_len=16), plan.checkpoint)
    hashes, has_kernels = torch_engine.write_engine(plan, limits, folder, "the id")
    assert not has_kernels
    return hashes


def test_the_folder_that_is_written(tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    arrays = make_arrays(checkpoint)
    plan = plan_here(tmp_path / "checkpoint", checkpoint, arrays)
    assert list(write_here(plan, tmp_path / "engine")) == ["weights.safetensors"]
    weights = load_file(tmp_path / "engine" / "weights.safetensors")
    np.testing.assert_array_equal(weights[GATE_UP], np.concatenate([arrays[FC], arrays[GATE]]))
    np.testing.assert_array_equal(weights[PROJ], arrays[PROJ])
    config = read_json(tmp_path / "engine" / "config.json")
    assert (config["backend"], config["build_config"]["max_seq_len"]) == ("torch", 16)
    described = {name: config["torch_config"][name] for name in ("build_id", "kernels", "prepack")}
    assert described == {"build_id": "the id", "kernels": None, "prepack": False}
    work = torch_engine.plan_engine(
        BuildSettings(optimize="none", checkpoint_dir=tmp_path / "checkpoint"), checkpoint,
        resolve_limits(BuildSettings(), checkpoint),
    )  # fmt: skip
    (tmp_path / "again").mkdir()
    hashes, further, words = work.write(tmp_path / "again", "the id")
    assert further == {"native_kernels": False}
    assert words == f"9 tensors, {plan.num_bytes / 1e6:.1f} MB, no native kernels"
    again = (tmp_path / "again" / "weights.safetensors").read_bytes()
    assert again == (tmp_path / "engine" / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("is_needed", [False, True])
def test_a_compiler_that_fails(
    is_needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(folder: Path) -> dict[str, str]:
        (folder / "half").touch()
        raise SpecDecError("the compiler failed", "install another")

    monkeypatch.setattr(native_library, "compile_kernels", fail)
    checkpoint = make_checkpoint()
    plan = plan_here(tmp_path / "checkpoint", checkpoint, make_arrays(checkpoint))
    plan = dataclasses.replace(plan, compile_kernels=True, packs=True, needs_kernels=is_needed)
    if is_needed:
        with pytest.raises(SpecDecError, match="the compiler failed"):
            write_here(plan, tmp_path / "engine")
        return
    with caplog.at_level(logging.WARNING):
        write_here(plan, tmp_path / "engine")
    assert "no native kernels: the compiler failed; the engine will run on torch's" in caplog.text
    files = sorted(path.name for path in (tmp_path / "engine").iterdir())
    assert files == ["config.json", "weights.safetensors"]


def test_what_is_said_of_blocks_and_integers(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, settings = make_checkpoint(), BuildSettings(quantization="int8")
    with caplog.at_level(logging.INFO):
        torch_engine.log_matrices(settings, checkpoint, None, compiles=True)
        assert caplog.messages == []
        torch_engine.log_matrices(settings, checkpoint, None, compiles=False)
        torch_engine.log_matrices(
            BuildSettings(), checkpoint, {"Q8_0": 4, "float32": 1}, compiles=True
        )
        torch_engine.log_matrices(BuildSettings(), checkpoint, {"Q4_K": 2}, compiles=False)
    assert caplog.messages == [
        "int8 without native kernels: weights will be widened in every step, which is slow",
        "GGUF: matrices multiplied as they are: Q8_0 (4); float32: 1",
        "GGUF: matrices widened when the engine is loaded: Q4_K (2)",
    ]


def test_limits_of_an_engine_whose_tensors_are_not_there_yet() -> None:
    limits = torch_engine.foresee_limits(BuildSettings(max_batch_size=4), make_checkpoint(HEADS))
    assert (limits.max_batch_size, limits.max_draft_len, limits.max_seq_len) == (4, 9, 2048)
    settings = BuildSettings(quantization="int4", group_size=128)
    with pytest.raises(SpecDecError, match="its columns in groups of 128"):
        torch_engine.foresee_limits(settings, make_checkpoint())


def test_a_head_is_shared_where_it_is_the_embedding_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    arrays = make_arrays(checkpoint)
    sources = write_checkpoint(tmp_path / "unlike", checkpoint, arrays)
    assert torch_tensors.share_head(checkpoint, sources) is checkpoint
    arrays["lm_head.weight"] = arrays["transformer.vocab_embedding.weight"].copy()
    sources = write_checkpoint(tmp_path / "alike", checkpoint, arrays)
    shared = torch_tensors.share_head(checkpoint, sources)
    assert shared.model == dataclasses.replace(checkpoint.model, share_embedding_table=True)
    assert shared.raw == {"share_embedding_table": True}
    assert torch_tensors.share_head(shared, sources) is shared
    arrays["lm_head.weight"][0, 0] = -0.0  # equal to 0, and other bits
    arrays["transformer.vocab_embedding.weight"][0, 0] = 0.0
    sources = write_checkpoint(tmp_path / "zeros", checkpoint, arrays)
    assert torch_tensors.share_head(checkpoint, sources) is checkpoint
    # Two ranks have a half of the head each, and the whole embedding.
    for is_split in (False, True):
        two = make_checkpoint(tp_size=2, use_parallel_embedding=is_split)
        arrays["lm_head.weight"] = arrays["transformer.vocab_embedding.weight"]
        sources = write_checkpoint(tmp_path / f"ranks{is_split}", two, arrays)
        assert torch_tensors.share_head(two, sources).model.share_embedding_table is is_split
    arrays["lm_head.weight"] = arrays["lm_head.weight"].copy()
    arrays["lm_head.weight"][-1, -1] += 1  # the second rank's
    sources = write_checkpoint(tmp_path / "one", two, arrays)
    assert torch_tensors.share_head(two, sources) is two
