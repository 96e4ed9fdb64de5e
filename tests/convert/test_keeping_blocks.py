"""What a checkpoint keeps of a GGUF file whose matrices are in GGML's block types."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.gguf.model import GgufModel
from specdec.model.blocks import dequantize
from tests.blocks import finish, write_gguf
from tests.conftest import make_drafter
from tests.engine.kernels import needs_compiler
from tests.engines import call
from tests.methods import EXTERNAL, use_method
from tests.run.test_int8_engine import build, generate

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
# As in a Q4_K_M file, where q, k and v differ; and some more.
KINDS = {"attn_q": 12, "attn_k": 12, "attn_v": 14, "attn_output": 2, "ffn_gate": 8, "ffn_up": 3,
         "ffn_down": 12, "token_embd": 14}  # fmt: skip
# As files of Q3_K_M and those that take a type for each tensor have them.
Q3_K_M = {"attn_q": 11, "attn_k": 11, "attn_v": 13, "attn_output": 12, "ffn_gate": 11, "ffn_up": 11,
          "ffn_down": 12, "token_embd": 11}  # fmt: skip
MIXED = {"attn_q": 20, "attn_k": 7, "attn_v": 13, "attn_output": 10, "ffn_gate": 39, "ffn_up": 6,
         "ffn_down": 11, "token_embd": 23}  # fmt: skip


def convert(source: Path, name: str, *flags: object) -> Path:
    out = source.parent / name
    call("convert", "--model-dir", source, "--output-dir", out, "--dtype", "float32", *flags)
    return out


def run(checkpoint: Path, *flags: object, speculate: bool = True) -> list[list[int]]:
    engine = build(checkpoint, f"{checkpoint.name}-{len(flags)}-{speculate}", *flags)
    return generate(TorchEngine(engine, device="cpu", speculate=speculate))[0]


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("kinds", [KINDS, Q3_K_M, MIXED], ids=["Q4_K_M", "Q3_K_M", "mixed"])
def test_a_file_runs_as_it_is(kinds: dict[str, int], tmp_path: Path) -> None:
    """Types that differ within a linear, a shared head, a drafter."""
    source = write_gguf(tmp_path / "model.gguf", kinds)
    drafter = ("--drafter-model-dir", make_drafter(tmp_path / "drafter", hidden=256))
    kept = convert(source, "kept", *drafter)
    assert read_json(kept / "config.json")["quantization"]["quant_algo"] == "GGUF"
    tensors = load_file(kept / "rank0.safetensors")
    qkv = tensors["transformer.layers.0.attention.qkv.ggml_types"]
    q, k, v = (kinds[f"attn_{letter}"] for letter in "qkv")
    assert qkv.tolist() == [q] * 256 + [k] * 128 + [v] * 128
    assert "lm_head.weight" not in tensors
    plain = convert(source, "plain", "--dequantize", *drafter)
    assert read_json(plain / "config.json")["quantization"]["quant_algo"] is None
    text = run(kept, "--optimize", "none")
    assert text == run(plain, "--optimize", "none"), "weights have the library's bits"
    assert len({tuple(each) for each in text}) > 1, "the texts differ"
    assert run(kept) == run(kept, speculate=False), "drafts change no token"


def test_what_is_stacked_with_another_type_is_plain(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", KINDS | {"attn_k": 0, "ffn_up": 0})
    kept = convert(source, "kept")
    tensors = load_file(kept / "rank0.safetensors")
    plain = ["attention.qkv", "mlp.fc", "mlp.gate"]
    modules = [f"transformer.layers.{layer}.{name}" for layer in range(2) for name in plain]
    excluded = read_json(kept / "config.json")["quantization"]["exclude_modules"]
    assert sorted(excluded) == sorted(modules)
    assert all(tensors[f"{module}.weight"].dtype is torch.float32 for module in modules)
    assert tensors["transformer.layers.1.mlp.proj.weight"].dtype is torch.uint8
    assert run(kept, "--optimize", "none") == run(
        convert(source, "plain", "--dequantize"), "--optimize", "none"
    )


def test_types_that_stay_are_named_and_those_that_are_widened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = convert(write_gguf(tmp_path / "model.gguf", MIXED | {"attn_q": 0}), "kept")
    told = "IQ4_XS (1), MXFP4 (2), Q2_K (2), Q3_K (2), Q5_0 (2); widened to float32: F32 (2), Q5_1"
    line = f"model.gguf: matrices that stay as they are: {told} (2), Q5_K (2)\n"
    assert line in capsys.readouterr().err
    plain = convert(tmp_path / "model.gguf", "plain", "--dequantize")
    assert run(kept, "--optimize", "none") == run(plain, "--optimize", "none")


def rewrite(name: str, path: Path, kinds: tuple[int, ...], inner: int = 0) -> Path:
    """A golden file, its matrices in types by turns. inner: of experts, whose values are new."""
    reader = gguf.GGUFReader(GOLDEN / f"{name}.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer, generator = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    for field in reader.fields.values():
        value = field.contents()
        if field.name.endswith(".expert_feed_forward_length"):
            value = inner or value
        if field.name.startswith(f"{architecture}."):
            writer.add_key_value(field.name, value, field.types[0], field.types[-1])
    for number, tensor in enumerate(reader.tensors):
        kind = gguf.GGMLQuantizationType.F32
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if inner and "_exps.weight" in tensor.name:
            num, rows, columns = values.shape
            height = 2 * inner if "gate_up" in tensor.name else inner
            shape = (num, rows, inner) if "down" in tensor.name else (num, height, columns)
            values = generator.normal(0, 0.3, shape).astype(np.float32)
        if values.ndim > 1 and values.shape[-1] % 32 == 0 and "gate_inp" not in tensor.name:
            kind = gguf.GGMLQuantizationType(kinds[number % len(kinds)])
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return path


def find_blocks(kept: Path, plain: Path) -> set[str]:
    """What a checkpoint keeps in blocks, by layer and module; its values are those of the other."""
    found, expected = (load_file(folder / "rank0.safetensors") for folder in (kept, plain))
    modules = [name.removesuffix(".ggml_types") for name in found if name.endswith(".ggml_types")]
    for name in modules:
        rows, types = found[f"{name}.weight"].numpy(), found[f"{name}.ggml_types"].numpy()
        values = expected[f"{name}.weight"]
        flat = dequantize(rows.reshape(-1, rows.shape[-1]), types.reshape(-1), values.shape[-1])
        assert torch.equal(torch.from_numpy(flat).view(values.shape), values), name
    return {name.partition("layers.")[2] or name for name in modules}


@needs_compiler
def test_a_hybrid_keeps_heads_that_lie_elsewhere(tmp_path: Path) -> None:
    """Value heads are put in order, queries parted from gates, and columns moved by blocks."""
    source = rewrite("qwen35", tmp_path / "model.gguf", (2, 8))
    head = ("--mtp-model-dir", source)
    kept = convert(source, "kept", *head)
    plain = convert(source, "plain", "--dequantize", *head)
    assert find_blocks(kept, plain) >= {
        "0.linear_attention.qkvz", "0.linear_attention.ba", "0.linear_attention.dense",
        "1.attention.qkv", "1.attention.dense",
    }  # fmt: skip
    assert read_json(kept / "config.json")["architecture"] == "SpecDecMtpForCausalLM"
    assert run(kept) == run(kept, speculate=False)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3_moe", (2, 8, 3)),
        ("qwen3_moe", (6, 39, 7)),
        ("qwen2_moe", (2, 8, 3)),
        ("gemma4", (2, 8, 3)),
    ],
)
def test_experts_stay_in_blocks(name: str, kinds: tuple[int, ...], tmp_path: Path) -> None:
    """Those of a layer all, or none, with the shared one."""
    source = rewrite(name, tmp_path / "model.gguf", kinds, inner=64)
    kept, plain = convert(source, "kept"), convert(source, "plain", "--dequantize")
    found = find_blocks(kept, plain)
    assert {"0.attention.qkv", "1.attention.dense"} <= found
    if name == "qwen2_moe":  # whose shared expert has 48 columns
        assert not any(".mlp." in module for module in found)
    else:
        experts = "experts." if name == "gemma4" else ""
        parts = [f"{experts}{part}" for part in ("fc", "proj")]
        assert {f"{layer}.mlp.{part}" for layer in (0, 1) for part in parts} <= found
    if name == "gemma4":  # the table, of which a step reads the rows of its tokens, and its kin
        inputs = {"transformer.layer_inputs", "transformer.layer_input_proj", "3.input_gate"}
        assert inputs <= found
    text = run(kept, "--optimize", "none")
    assert text == run(plain, "--optimize", "none"), "weights have the library's bits"
    assert len({tuple(each) for each in text}) > 1, "the texts differ"
    engine = TorchEngine(build(kept, "engine", *EXTERNAL), device="cpu", speculate=False)
    alone = generate(engine)[0]
    use_method(engine, "prompt_lookup")
    texts, accepted = generate(engine)
    assert texts == alone, "drafts change no token"
    assert accepted > 0


def test_blocks_are_not_taken_apart(tmp_path: Path) -> None:
    """Columns that move by less than a block cannot stay in blocks."""
    model = GgufModel(write_gguf(tmp_path / "model.gguf", KINDS))
    name = "model.layers.0.mlp.down_proj.weight"
    entry, values = model.entries[name], model.read(name)
    for size in (256, 128):
        columns = np.arange(512).reshape(-1, size)[::-1].reshape(-1)
        model.entries[name] = dataclasses.replace(entry, columns=columns)
        assert np.array_equal(model.read(name), values[:, columns])
        kind, _, rows = model.raw(name)
        if size == 128:
            assert rows is None
        else:
            assert rows is not None
            moved = dequantize(rows[:], np.full(256, kind, np.uint8), 512)
            assert np.array_equal(moved, values[:, columns])


def test_ranks_have_whole_blocks(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", KINDS)
    whole = load_file(convert(source, "whole") / "rank0.safetensors")
    folder = convert(source, "split", "--tp-size", 2)
    parts = [load_file(folder / f"rank{rank}.safetensors") for rank in range(2)]
    for name in ("attention.dense.weight", "mlp.proj.weight"):
        both = [part[f"transformer.layers.1.{name}"] for part in parts]
        assert torch.equal(torch.cat(both, 1), whole[f"transformer.layers.1.{name}"])
    types = parts[1]["transformer.layers.1.attention.qkv.ggml_types"]
    assert types.tolist() == [12] * 192 + [14] * 64
    with pytest.raises(SpecDecError, match=r"mlp.proj does not split over 4 ranks: .* 128 columns"):
        convert(source, "split-4", "--tp-size", 4)
    with pytest.raises(SpecDecError, match="only the torch backend runs GGML's blocks"):
        convert(source, "stages", "--pp-size", 2)
