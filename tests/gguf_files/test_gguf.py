"""GGUF files as bases, against llama.cpp's own converter, the package gguf and transformers."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.gguf import file as gguf_file
from specdec.gguf import folder
from specdec.gguf.folder import localize
from specdec.gguf.model import GgufModel
from specdec.gguf.names import order_turned
from specdec.gguf.tokenizer import TokenizerMaker
from specdec.system.cache import clear_entry
from specdec.text.pretrained import load_model, load_tokenizer
from tests.blocks import LLAMA_NORMS, LLAMA_ROWS, begin_llama, finish
from tests.covering import cover
from tests.engines import call, reset_accelerator, run_cli_here
from tests.families import EXPERTS, HYBRIDS, make_family_model
from tests.gguf_files.cases import CASES

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
SMALL: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 24}
MTP = {
    f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
}
TYPES = [kind for kind in gguf_file.TYPES if kind not in gguf_file.PLAIN]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(folder, "_find_parent", lambda: tmp_path / "cache")


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(CASES))
def test_what_llama_cpp_converted_is_the_model(name: str, tmp_path: Path) -> None:
    family, fields = CASES[name]
    if transformers.__version__.startswith("4.") and family in EXPERTS:
        pytest.skip("transformers 4 has experts in other tensors, and draws other numbers")
    source = make_family_model(tmp_path, family, dtype="bfloat16", **SMALL | fields)
    own = load_model(source, dtype=torch.float32)
    read = load_model(GOLDEN / f"{name}.gguf", dtype=torch.float32)
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        found, expected = read(ids).logits, own(ids).logits
    if family in (*HYBRIDS, "granitemoehybrid"):  # whose file has the exponential of A_log
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    if family in HYBRIDS:
        names = {name.replace("mtp.layers.0", "model.layers.1") for name in list_mtp(name)}
        kept = {name for name in own.state_dict() if "layers.1." in name and "expert" not in name}
        assert kept | MTP <= names


def list_mtp(name: str) -> list[str]:
    return [key for key in GgufModel(GOLDEN / f"{name}.gguf").tensors if key.startswith("mtp.")]


def write_gguf(path: Path, kind: str = "F32", **more: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Write a llama of random weights, matrices in a type; return the file's own arrays."""
    writer = begin_llama(path, **more)
    generator, arrays = np.random.default_rng(0), {}
    chosen = getattr(gguf.GGMLQuantizationType, kind)
    block, num_bytes = gguf.GGML_QUANT_SIZES[chosen]
    for name, rows in LLAMA_ROWS.items():
        shape = (rows, 256 // block * num_bytes)
        arrays[f"{name}.weight"] = data = generator.integers(0, 256, shape, np.uint8)
        if kind == "F32":
            data = generator.standard_normal((rows, 256)).astype(np.float32)
            arrays[f"{name}.weight"] = data
        writer.add_tensor(f"{name}.weight", data, raw_dtype=None if kind == "F32" else chosen)
    for name in LLAMA_NORMS:
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    finish(writer)
    return arrays


def edit(
    source: Path, path: Path, keys: dict[str, Any],
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors,
    architecture: str | None = None,
) -> None:  # fmt: skip
    """Copy a file of llama.cpp's converter with other values of keys, and other tensors.

    architecture: one whose keys have other names, but the same meanings.
    """
    read = gguf.GGUFReader(source)
    old = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture or old)
    for old_name, field in read.fields.items():
        name = old_name
        if architecture is not None and old_name.startswith(f"{old}."):
            name = architecture + old_name.removeprefix(old)
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in keys:
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1])
    for name, value in keys.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    types = {tensor.name: tensor.tensor_type for tensor in read.tensors}
    for name, data in change({tensor.name: tensor.data for tensor in read.tensors}).items():
        twins = (
            name, name.replace("attn_qkv", "attn_q"), re.sub("(gate|up)_e", "gate_up_e", name),
            name.replace("gate_up", "up"),
        )  # fmt: skip
        kind = next(types[twin] for twin in twins if twin in types)
        writer.add_tensor(name, np.array(data), raw_dtype=kind)
    finish(writer)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
def test_values_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    arrays = write_gguf(tmp_path / "model.gguf", kind)
    model = GgufModel(tmp_path / "model.gguf")
    chosen = getattr(gguf.GGMLQuantizationType, kind)
    for name, ours, heads in (
        ("token_embd", "model.embed_tokens", None),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj", 4),
        ("blk.0.attn_k", "model.layers.0.self_attn.k_proj", 2),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj", None),
    ):  # fmt: skip
        data = arrays[f"{name}.weight"]
        expected = gguf.quants.dequantize(data, chosen)
        if heads is not None:
            order = order_turned(len(data), heads)
            expected, data = expected[order], data[order]
        ours = f"{ours}.weight"
        assert np.array_equal(model.read(ours).view(np.uint32), expected.view(np.uint32))
        part = model.read_block(ours, 5, 17, (32, 96))
        assert np.array_equal(part.view(np.uint32), expected[5:17, 32:96].copy().view(np.uint32))
        found, shape, rows = model.raw(ours)
        assert (found, shape) == (chosen, expected.shape)
        assert rows is not None
        assert np.array_equal(rows[3:9, 2:7], data[3:9, 2:7])
        assert np.array_equal(np.asarray(rows), data)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf")
    whole = GgufModel(tmp_path / "one.gguf")
    for number in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number + 1:05d}-of-00002.gguf", "llama")
        if number == 0:
            for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
                getattr(writer, f"add_{key}")(whole.metadata[f"llama.{key}"])
            writer.add_head_count(4)
            writer.add_head_count_kv(2)
            writer.add_layer_norm_rms_eps(1e-5)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for at, stored in enumerate(entry.stored for entry in whole.entries.values()):
            if at % 2 == number:
                data = stored.read(0, stored.num_rows).view(np.float32).reshape(stored.shape)
                writer.add_tensor(stored.name, data)
        finish(writer)
    (tmp_path / "one.gguf").rename(tmp_path / "one.bin")
    first = tmp_path / "m-00001-of-00002.gguf"
    split = GgufModel(first)
    assert split.tensors == whole.tensors
    assert [path.name[:7] for path in split.files] == ["m-00001", "m-00002"]
    assert localize(tmp_path) == localize(first)
    (
        tmp_path / "hub"
    ).mkdir()  # as in the Hub's cache, whose files are links to such of other names
    for number, part in enumerate(split.files):
        shutil.copy(part, tmp_path / f"blob-{number}")
        (tmp_path / "hub" / part.name).symlink_to(tmp_path / f"blob-{number}")
    assert read_json(Path(localize(tmp_path / "hub")) / "config.json") == split.config
    with pytest.raises(SpecDecError, match="part 2 of 2"):
        GgufModel(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(SpecDecError, match="m-00002-of-00002.gguf is not there"):
        GgufModel(first)


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({}, "IQ2_XXS", r"token_embd.weight is of ggml's type IQ2_XXS"),
        ({"architecture": "rwkv7"}, "F32", "an architecture that is not read: rwkv7"),
        ({"llama__attention__clamp_kqv": 8.0}, "F32", r"llama.attention.clamp_kqv 8.0"),
        ({"llama__attention__causal": False}, "F32", "llama.attention.causal False"),
        ({"llama__rope__scaling__type": "dynamic"}, "F32", "rope.scaling.type is 'dynamic'"),
        ({"general__type": "adapter"}, "F32", r"what goes with one: llama \('adapter'\)"),
        ({"llama__attention__head_count": "4"}, "F32", "head_count is '4', not a whole number"),
        ({"llama__block_count": 2**31 - 1}, "F32", "block_count is .*, not .* from 1 to 1000"),
        ({"llama__rope__dimension_count": 0}, "F32", "dimension_count is 0, not a whole number"),
        ({"llama__rope__freq_base": float("nan")}, "F32", "freq_base is nan, not a positive"),
        ({"llama__attention__head_count": 3}, "F32", "attn_q.weight has 256 rows, for 3 heads of"),
        ({"tokenizer__ggml__tokens": 5}, "F32", "tokens is 5, not a list of str"),
        ({"tokenizer__ggml__scores": ["a"]}, "F32", "scores is .*, not a list of float"),
        ({"split__count": "2"}, "F32", "is 0 of '2'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    more: dict[str, Any], kind: str, told: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", kind, **more)
    with pytest.raises(SpecDecError, match=told):
        GgufModel(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "key", "value", "fact"),
    [
        ("granite", "granite.logit_scale", "x", "granite.logit_scale is 'x', not a positive"),
        ("granite", "granite.logit_scale", ["x"], "granite.logit_scale is 'x', not a positive"),
        ("granite", "granite.logit_scale", [1.0, 2.0], "logit_scale differs from layer to layer"),
        ("granite", "granite.logit_scale", 0.0, "granite.logit_scale is 0.0, not a positive"),
        ("granite_hybrid", "granitehybrid.logit_scale", "x", "logit_scale is 'x', not a positive"),
        ("granite_hybrid_dense", "granitehybrid.feed_forward_length", 0,
         "feed_forward_length is 0, not a whole number"),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused(
    name: str, key: str, value: Any, fact: str, tmp_path: Path
) -> None:
    edit(GOLDEN / f"{name}.gguf", tmp_path / "m.gguf", {key: value})
    with pytest.raises(SpecDecError, match=fact):
        GgufModel(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "source"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3_moe")]
)
def test_the_text_models_of_those_that_see(name: str, source: str, tmp_path: Path) -> None:
    """Their files have keys about images besides; the three positions of a text's token are one."""
    keys = {f"{name}.rope.dimension_sections": [2, 1, 1, 0], f"{name}.n_deepstack_layers": 3}
    edit(GOLDEN / f"{source}.gguf", tmp_path / "m.gguf", keys, architecture=name)
    found, expected = GgufModel(tmp_path / "m.gguf"), GgufModel(GOLDEN / f"{source}.gguf")
    assert found.config == expected.config
    assert found.tensors == expected.tensors
    for tensor in found.tensors:
        np.testing.assert_array_equal(found.read(tensor), expected.read(tensor))


def test_value_heads_that_key_heads_do_not_divide(tmp_path: Path) -> None:
    edit(GOLDEN / "qwen35.gguf", tmp_path / "m.gguf", {"qwen35.ssm.group_count": 3})
    with pytest.raises(SpecDecError, match=r"time_step_rank 4 is no multiple of .*group_count 3"):
        GgufModel(tmp_path / "m.gguf")


def test_one_of_two_lists_of_factors_is_missing(tmp_path: Path) -> None:
    edit(
        GOLDEN / "phi3.gguf", tmp_path / "m.gguf", {},
        lambda tensors: {name: t for name, t in tensors.items() if "factors_short" not in name},
    )  # fmt: skip
    with pytest.raises(SpecDecError, match=r"the tensor rope_factors_short.weight is missing"):
        GgufModel(tmp_path / "m.gguf")


def test_a_window_pattern_of_0_is_a_window_everywhere(tmp_path: Path) -> None:
    for pattern, kinds in ((0, "SSSSSS"), (1, "FFFFFF"), (2, "SFSFSF")):
        name = tmp_path / f"{pattern}.gguf"
        edit(GOLDEN / "gemma3.gguf", name, {"gemma3.attention.sliding_window_pattern": pattern})
        types = GgufModel(name).config["layer_types"]
        assert "".join(each[0].upper() for each in types) == kinds[: len(types)]
    edit(GOLDEN / "gemma3.gguf", name, {"gemma3.attention.sliding_window_pattern": "x"})
    with pytest.raises(SpecDecError, match="sliding_window_pattern is 'x'"):
        GgufModel(name)


def test_biases_of_one_tensor_for_queries_keys_and_values(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them with --fuse-qkv."""
    fused = tmp_path / "fused.gguf"

    def fuse(tensors: dict[str, Any]) -> dict[str, Any]:
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        return tensors

    edit(GOLDEN / "llama.gguf", fused, {}, fuse)
    edit(fused, tmp_path / "more.gguf", {"llama.attention.head_count_kv": 1})
    with pytest.raises(SpecDecError, match=r"attn_qkv.* has 64 rows, for 6 heads of 8"):
        GgufModel(tmp_path / "more.gguf")
    whole, parts = GgufModel(fused), GgufModel(GOLDEN / "llama.gguf")
    assert whole.config == parts.config
    for name in parts.tensors:
        assert np.array_equal(whole.read(name), parts.read(name)), name


@pytest.mark.parametrize("is_first", [False, True])
def test_tensors_that_a_file_has_under_two_names(is_first: bool, tmp_path: Path) -> None:
    """Those of the later one were read; llama.cpp refuses such a file."""
    path = tmp_path / "twice.gguf"

    def add(tensors: dict[str, Any]) -> dict[str, Any]:
        parts = [tensors[f"blk.0.attn_{part}.weight"] for part in "qkv"]
        fused = {"blk.0.attn_qkv.weight": 2 * np.concatenate(parts)}
        return fused | tensors if is_first else tensors | fused

    edit(GOLDEN / "llama.gguf", path, {}, add)
    with pytest.raises(SpecDecError, match=r"self_attn\.\w_proj\.weight twice, in blk"):
        GgufModel(path)


def test_mixtures_with_tensors_that_are_one(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them with --fuse-qkv and --fuse-gate-up-exps."""

    def fuse(tensors: dict[str, Any]) -> dict[str, Any]:
        for name in list(tensors):
            if "ffn_up_exps" in name:
                parts = [tensors.pop(name.replace("up", part)) for part in ("gate", "up")]
                tensors[name.replace("up", "gate_up")] = np.concatenate(parts, axis=1)
            if "gate_up" in name:
                halves = np.split(tensors.pop(name), 2, axis=1)
                for half, data in zip(("gate", "up"), halves, strict=True):
                    tensors[name.replace("gate_up", half)] = data
            if ".attn_v." in name:
                parts = [tensors.pop(name.replace("attn_v", f"attn_{part}")) for part in "qkv"]
                tensors[name.replace("attn_v", "attn_qkv")] = np.concatenate(parts)
        return tensors

    for name in ("gemma4", "gemma4_dense", "qwen35_moe"):
        edit(GOLDEN / f"{name}.gguf", tmp_path / f"{name}.gguf", {}, fuse)
        found, expected = (GgufModel(parent / f"{name}.gguf") for parent in (tmp_path, GOLDEN))
        assert found.config == expected.config
        assert found.tensors == expected.tensors
        for tensor in found.tensors:
            np.testing.assert_array_equal(found.read(tensor), expected.read(tensor))


def test_stablelm_is_parallel_where_it_lacks_a_norm(tmp_path: Path) -> None:
    """As llama.cpp has it, whose converter writes `true` where config.json does not say."""
    said = {"stablelm.use_parallel_residual": True}
    edit(GOLDEN / "stablelm.gguf", tmp_path / "said.gguf", said)
    assert GgufModel(tmp_path / "said.gguf").config["use_parallel_residual"] is False
    edit(
        GOLDEN / "stablelm.gguf", tmp_path / "lacks.gguf", {},
        lambda tensors: {name: t for name, t in tensors.items() if "ffn_norm" not in name},
    )  # fmt: skip
    assert GgufModel(tmp_path / "lacks.gguf").config["use_parallel_residual"] is True


@pytest.mark.parametrize("kind", ["none", "no_vocab", "t5"])
def test_weights_are_converted_beside_a_tokenizer_that_is_not_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer__ggml__model=kind)
    call("convert", "--model-dir", tmp_path / "m.gguf", "--output-dir", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    assert ("a tokenizer of kind 't5'" in capsys.readouterr().err) is (kind == "t5")
    if kind == "t5":
        with pytest.raises(SpecDecError, match="a tokenizer of kind 't5'"):
            load_tokenizer(tmp_path / "m.gguf")


def test_a_full_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")

    def write_json(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write_json", write_json)
    with pytest.raises(SpecDecError, match="m.gguf cannot be written to .*/cache: No space left"):
        localize(tmp_path / "m.gguf")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_is_read_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the file, if it is the cache's. What a user removes all the same is made again."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    download = tmp_path / "cache" / "models" / "m.gguf"
    download.parent.mkdir()
    write_gguf(download)
    for _ in range(2):
        made = Path(localize(download))
        assert not clear_entry(made)
        assert not clear_entry(download)
        assert (made / "config.json").is_file()
        shutil.rmtree(made)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    model = tmp_path / "cut.gguf"
    for end in (3, 20, 200, 900, len(whole) - 1000):
        model.write_bytes(whole[:end])
        with pytest.raises(SpecDecError, match="cut.gguf"):
            GgufModel(model)
    random = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(whole)
        for at in random.integers(0, 1500, 4):
            damaged[at] = random.integers(0, 256)
        model.write_bytes(damaged)
        try:
            GgufModel(model)
        except SpecDecError:
            continue


def move_tensor(path: Path, name: str, num_bytes: int) -> int:
    """Change where a file's header says that a tensor lies; return where it did."""
    data = bytearray(path.read_bytes())
    end = data.index(name.encode()) + len(name)
    num_dimensions = int.from_bytes(data[end : end + 4], "little")
    position = end + 4 + 8 * num_dimensions + 4  # beyond its shape and type
    offset = int.from_bytes(data[position : position + 8], "little")
    data[position : position + 8] = (offset + num_bytes).to_bytes(8, "little")
    path.write_bytes(data)
    return offset


@pytest.mark.parametrize("num_bytes", [1, 32, -32, -4000])
def test_tensors_follow_one_another(num_bytes: int, tmp_path: Path) -> None:
    """As llama.cpp reads them: one that lies on another, or apart, belongs to a damaged file."""
    shutil.copy(GOLDEN / "llama.gguf", tmp_path / "m.gguf")
    name = "blk.0.ffn_gate.weight"
    offset = move_tensor(tmp_path / "m.gguf", name, num_bytes)
    fact = (
        f"places '{name}' at byte {offset + num_bytes} of its data, and the tensors before it end"
        f" at byte {offset}, with alignment 32"
    )
    with pytest.raises(SpecDecError, match=fact) as caught:
        GgufModel(tmp_path / "m.gguf")
    assert "truncated or damaged" in caught.value.hint


@pytest.mark.parametrize("alignment", [1, 8, 256])
def test_tensors_are_padded_to_the_alignment_of_the_file(alignment: int, tmp_path: Path) -> None:
    """Of vectors whose ends no usual alignment has, too."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    arrays = {f"t{n}": np.arange(n, dtype=np.float32) for n in (1, 3, 70, 2)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    finish(writer)
    file = gguf_file.GgufFile(tmp_path / "m.gguf")
    for name, array in arrays.items():
        rows = file.tensors[name].read(0, len(array))
        np.testing.assert_array_equal(gguf_file.decode(rows, "F32").reshape(-1), array)


# Texts that tokenizers trip over.
TEXTS = (
    "Hello world", "  two  spaces ", "\n\n\tx\r\n y", "I'm you'RE 's", "12345 1a2b", "caf\u00e9",
    "\u65e5\u672c", "<|end|>a<|end|> b", "\U0001f642", "\u2581x", "<0x0A>", " ",
)  # fmt: skip


def list_metadata(kind: str, *, prefix: bool) -> dict[str, Any]:
    """A small vocabulary of one of the three kinds."""
    from specdec.files.vocabulary import list_byte_letters

    space = "\u0120" if kind == "gpt2" else "\u2581"
    if kind != "gpt2":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds = [2, 3, 3, *[6] * 256]
        words = ["\u2581", *"Helowrdxabpc", "He", "ll", "llo", "Hello", "\u2581w", "or", "ld"]
        words += ["\u2581\u2581", "\u2581wor", "\u2581world", "sp"]
    else:
        tokens, kinds = ["<unk>", "<s>", "</s>"], [3, 3, 3]
        words = [*list_byte_letters(), "He", "ll", "llo", "Hello", "\u0120w", "or"]
    tokens, kinds = [*tokens, *words, "<|end|>"], [*kinds, *[1] * len(words), 4]
    return {
        "model": kind, "pre": "smollm", "tokens": tokens, "token_type": kinds,
        "scores": [-float(at) for at in range(len(tokens))],
        "merges": ["H e", "l l", "ll o", "He llo", f"{space} w", "o r"],
        "add_space_prefix": prefix, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "prefix", "begins"),
    cover(itertools.product(["gpt2", "llama", "gemma4"], [False, True], [False, True])),
)
def test_tokenizer_and_template(kind: str, prefix: bool, begins: bool, tmp_path: Path) -> None:
    metadata = list_metadata(kind, prefix=prefix) | {"add_bos_token": begins}
    named = {f"tokenizer__ggml__{key}": value for key, value in metadata.items()}
    write_gguf(
        tmp_path / "m.gguf", tokenizer__chat_template="{{ messages[0]['content'] }}!", **named
    )
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    end = len(metadata["tokens"]) - 1
    begins |= kind == "gemma4"  # in llama.cpp too, whatever the file says
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert (ids[:1] == [1]) is begins
        assert ids.count(end) == text.count("<|end|>")
        if (kind, prefix) != ("llama", True):
            written = text if kind == "gpt2" else text.replace("\u2581", " ")
            assert tokenizer.decode(ids[begins:]) == written
    hello = [metadata["tokens"].index("Hello")]
    space = [metadata["tokens"].index("\u2581")] if (kind, prefix) == ("llama", True) else []
    assert tokenizer("Hello", add_special_tokens=False)["input_ids"] == space + hello
    turn = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "x!"
    ends = read_json(Path(localize(tmp_path / "m.gguf")) / "generation_config.json")["eos_token_id"]
    assert ends == [2, end]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_5_text", "phi3"])
def test_a_text_is_not_normalized_as_the_models_own_tokenizer_does(
    architecture: str, tmp_path: Path
) -> None:
    """AutoTokenizer of transformers 5 would take Qwen's class, which makes one letter of two."""
    named = {
        f"tokenizer__ggml__{key}": value
        for key, value in list_metadata("gpt2", prefix=False).items()
    }
    write_gguf(tmp_path / "m.gguf", **named)
    folder = Path(localize(tmp_path / "m.gguf"))
    copied = shutil.copytree(folder, tmp_path / "engine")
    config = read_json(copied / "config.json") | {"model_type": architecture}
    (copied / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(copied)
    for text in ("cafe\u0301", "caf\u00e9"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    written = Tokenizer.from_file(str(copied / "tokenizer.json")).get_added_tokens_decoder()
    assert tokenizer.added_tokens_decoder == written


def make_with_tokenizer(parent: Path, family: str) -> Path:
    """A model's folder with a tokenizer of all bytes and a chat template."""
    words = list_metadata("gpt2", prefix=False)
    size = len(words["tokens"])
    source = make_family_model(parent, family, vocab=size, hidden=32, intermediate=32)
    ids = {token: at for at, token in enumerate(words["tokens"])}
    own = Tokenizer(BPE(ids, [tuple(merge.split()) for merge in words["merges"]]))
    own.pre_tokenizer = ByteLevel(add_prefix_space=False)
    own.decoder = ByteLevelDecoder()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<|end|>"],
        chat_template="{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    ).save_pretrained(source)  # fmt: skip
    return source


def export(source: Path, parent: Path, *flags: str) -> Path:
    call("export", "--model-dir", source, "--to", "gguf", *flags, "--output-dir", parent / "out")
    return parent / "out" / "model.gguf"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "F32"), ("llama", "BF16"), ("qwen2", "Q8_0"), ("qwen3", "F16")]
)
def test_what_is_exported_is_read_again(family: str, kind: str, tmp_path: Path) -> None:
    """The same values, tokens and template as the folder's."""
    source = make_with_tokenizer(tmp_path, family)
    file = export(source, tmp_path, "--gguf-type", kind)
    whole, read = load_model(source, dtype=torch.float32), load_model(file, dtype=torch.float32)
    expected = {name: t.clone() for name, t in whole.state_dict().items()}
    for numbers in expected.values():
        if numbers.ndim == 2 and kind == "Q8_0":
            of = gguf.GGMLQuantizationType.Q8_0
            blocks = gguf.quants.quantize(numbers.numpy(), of)
            numbers.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, of)))
        elif numbers.ndim == 2 and kind != "F32":
            half = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
            numbers.copy_(numbers.to(half))
    assert read.state_dict().keys() == expected.keys()
    for name, numbers in read.state_dict().items():
        assert torch.equal(numbers, expected[name]), name
    theirs, ours = load_tokenizer(source), load_tokenizer(file)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "yes"}]
    assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns)
    again = export(file, tmp_path / "again", "--gguf-type", kind, "--dtype", "float32")
    assert again.read_bytes() == file.read_bytes()
    whole.load_state_dict(expected)
    whole.save_pretrained(source)
    for name, model in (("one", source), ("two", file)):
        call("convert", "--model-dir", model, "--output-dir", tmp_path / name, "--dtype",
             "float32", *["--dequantize"][: kind == "Q8_0" and name == "two"])  # fmt: skip
    first, second = (
        load_file(tmp_path / name / "rank0.safetensors") for name in ("one", "two")
    )  # fmt: skip
    assert first.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_diagnose_takes_a_file(tmp_path: Path) -> None:
    file = export(make_with_tokenizer(tmp_path, "llama"), tmp_path, "--gguf-type", "Q8_0")
    told = run_cli_here("convert", "--model-dir", file, "--output-dir", tmp_path / "ckpt").stderr
    assert "bfloat16 with GGUF weights" in told
    call("build", "--checkpoint-dir", tmp_path / "ckpt", "--output-dir", tmp_path / "e",
         "--optimize", "none", "--speculative-decoding-mode", "draft_tokens_external",
         "--max-draft-len", 2)  # fmt: skip
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hello Hello"}\n')
    done = run_cli_here(
        "diagnose", "--engine-dir", tmp_path / "e", "--tokenizer-dir", file, "--prompts",
        tmp_path / "p.jsonl", "--prompt-lookup-num-tokens", 2, "--max-output-len", 4, "--repeat", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in bfloat16 with GGUF weights on cpu" in done.stdout
    assert "the chat template is not used" in done.stdout


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_commands_take_a_file(name: str, tmp_path: Path) -> None:
    if transformers.__version__.startswith("4.") and name in EXPERTS:
        pytest.skip("transformers 4 has no such model")
    model, out = GOLDEN / f"{name}.gguf", tmp_path / "out"
    call("convert", "--model-dir", model, "--dtype", "float32", "--output-dir", out)
    checked = read_json(out / "manifest.json")["sources"]
    assert [Path(source["path"]).name for source in checked] == [f"{name}.gguf"]
    call("build", "--checkpoint-dir", out, "--backend", "torch", "--output-dir", tmp_path / "e")
    told = run_cli_here(
        "verify", "--engine-dir", tmp_path / "e", "--model-dir", model, "--max-output-len", 20,
    )  # fmt: skip
    assert told.stdout.startswith("PASS"), told.stderr


@pytest.mark.thorough
def test_training_and_calibration_take_a_file(tmp_path: Path) -> None:
    """A file's drafter and its int8 checkpoint have the bytes of those of the folder it was."""
    source = make_with_tokenizer(tmp_path, "llama")
    file = export(source, tmp_path, "--gguf-type", "F32")
    row = {"messages": [{"role": r, "content": "Hello Hello yes"} for r in ("user", "assistant")]}
    data = tmp_path / "data.jsonl"
    data.write_text(4 * (json.dumps(row) + "\n"))
    found = []
    for model in (source, file):
        out = tmp_path / f"of-{model.name}"
        reset_accelerator()
        call("train", "--model-dir", model, "--data", data, "--eval-data", data, "--output-dir",
             out / "head", "--method", "eagle", "--eagle-version", 3, "--eagle-draft-vocab-size",
             100, "--dtype", "float32", "--max-steps", 2, "--eval-prompts", 0,
             "--hidden-states-dir", out / "states")  # fmt: skip
        call("convert", "--model-dir", model, "--eagle-model-dir", out / "head", "--output-dir",
             out / "ckpt", "--dtype", "float32", "--quantization", "int8_sq",
             "--calibration-data", data)  # fmt: skip
        found.append(load_file(out / "ckpt" / "rank0.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("gpt2", {"merges": ["H e", "no such"]}, "the merge 'no such', and 'no' is no token"),
        ("gpt2", {"merges": ["H e", "ll ll"]}, "the merge 'll ll', and 'llll' is no token"),
        ("gpt2", {"merges": None}, "287 tokens without the merges that texts are read by"),
        ("gemma4", {"merges": None}, "287 tokens without the merges that texts are read by"),
        ("gpt2", {"token_type": [1] * 999}, "287 tokens with 999 kinds"),
        ("gpt2", {"merges": ["Hello"]}, "the merge 'Hello', and '' is no token"),
        ("gpt2", {"merges": ["l l o"]}, "the merge 'l l o', and 'l o' is no token"),
        ("gpt2", {"add_bos_token": 7}, "add_bos_token 7, which is neither true nor false"),
        ("llama", {"add_space_prefix": "no"}, "add_space_prefix 'no', which is neither"),
        ("llama", {"scores": [float("nan")] * 287}, "scores that are no finite numbers"),
        ("llama", {"scores": [0.5]}, "287 tokens with 1 scores"),
        ("llama", {"token_type": [1]}, "287 tokens with 1 kinds"),
        ("llama", {"tokens": ["a", "b", "a"]}, "the token 'a' under two numbers"),
        ("gpt2", {"pre": 5}, "the pre-tokenizer '5'"),
    ],
)
def test_malformed_tokenizers_are_refused(
    kind: str, changed: dict[str, Any], message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By name; the weights are converted all the same."""
    metadata = list_metadata(kind, prefix=False)
    if "scores" in changed and len(changed["scores"]) > 1:
        changed = {"scores": [float("nan")] * len(metadata["tokens"])}
    message = message.replace("287", str(len(metadata["tokens"])))
    named = {
        f"tokenizer__ggml__{key}": value
        for key, value in (metadata | changed).items() if value is not None
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", **named)
    with pytest.raises(SpecDecError, match="what is not read") as caught:
        load_tokenizer(tmp_path / "m.gguf")
    assert message in caught.value.message
    call("convert", "--model-dir", tmp_path / "m.gguf", "--output-dir", tmp_path / "out")
    assert "give --tokenizer-dir" in capsys.readouterr().err


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """By the file's name; a list of the names of further templates is none of them."""
    metadata = list_metadata("gpt2", prefix=False)
    named = {f"tokenizer__ggml__{key}": value for key, value in metadata.items()}
    file = tmp_path / "m.gguf"
    for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use"):
        write_gguf(file, **named | {key.replace(".", "__"): ["{{ 1 }}", "{{ 2 }}"]})
        with pytest.raises(SpecDecError, match=f"m.gguf has what is not read: {key} .*no text"):
            load_tokenizer(file)
    named["tokenizer__chat_templates"] = ["tool_use"]
    write_gguf(file, tokenizer__chat_template="{{ 1 }}", **named)
    assert load_tokenizer(file).chat_template == "{{ 1 }}"


def test_a_token_without_end_is_refused(tmp_path: Path) -> None:
    """All of its divisions were looked up, which took minutes for a file of a megabyte."""
    metadata = list_metadata("llama", prefix=False)
    tokens = metadata["tokens"]

    def make(length: int) -> None:
        metadata["tokens"] = [*tokens[:-1], "x" * length]
        TokenizerMaker(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}).make()

    make(1024)
    with pytest.raises(SpecDecError, match="of 1000000 characters, more than 1024") as caught:
        make(1_000_000)
    assert len(caught.value.message) < 500


def test_an_id_beyond_the_vocabulary_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = list_metadata("gpt2", prefix=False) | {"eos_token_id": 5000, "padding_token_id": 9}
    named = {f"tokenizer__ggml__{key}": value for key, value in metadata.items()}
    write_gguf(tmp_path / "m.gguf", **named)
    call("convert", "--model-dir", tmp_path / "m.gguf", "--output-dir", tmp_path / "out")
    told = capsys.readouterr().err
    assert f"eos_token_id is 5000, and there are {len(metadata['tokens'])} tokens" in told
    assert "padding" not in told


def test_a_word_that_is_the_padding_stays_a_word(tmp_path: Path) -> None:
    """As in a file whose config.json had a pad_token_id of 0: texts lost every such letter."""
    words = list_metadata("gpt2", prefix=False)
    word, begin = words["tokens"].index("e"), words["tokens"].index("o")
    words |= {"padding_token_id": word, "bos_token_id": begin, "add_bos_token": False}
    write_gguf(tmp_path / "m.gguf", **{f"tokenizer__ggml__{k}": v for k, v in words.items()})
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    ids = tokenizer("Hello e</s>")["input_ids"]
    assert ids[0] == words["tokens"].index("Hello")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello e"


def test_tokens_of_one_score_are_made_as_transformers_makes_them(tmp_path: Path) -> None:
    """As those are that a vocabulary was extended by."""
    base = pytest.importorskip("transformers.tokenization_utils_base")
    if not hasattr(base, "generate_merges"):
        pytest.skip("transformers 4 has it elsewhere")
    words = list_metadata("llama", prefix=False)
    first, random = len(words["tokens"]), np.random.default_rng(3)
    extension = {"".join(random.choice(list("Helowrd"), size)) for size in (2, 3, 3, 4, 4) * 40}
    words["tokens"] += sorted(extension - set(words["tokens"]))
    words["token_type"] += [1] * (len(words["tokens"]) - first)
    words["scores"] += [0.0] * (len(words["tokens"]) - first)
    named = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    model = json.loads(TokenizerMaker(tmp_path, named).make().to_str())["model"]
    scores = dict(zip(words["tokens"], words["scores"], strict=True))
    merges = base.generate_merges(model["vocab"], scores)
    assert [tuple(merge) for merge in model["merges"]] == merges


def test_a_beginning_beyond_the_vocabulary_is_the_usual_one(tmp_path: Path) -> None:
    """Of SentencePiece, as in llama.cpp: texts had none."""
    words = list_metadata("llama", prefix=False) | {"bos_token_id": 2**32 - 1}
    named = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    assert TokenizerMaker(tmp_path, named).make().encode("Hello").tokens == ["<s>", "Hello"]


def test_marks_belong_to_their_letter_in_qwen35(tmp_path: Path) -> None:
    """Where Qwen 2 begins a new word: the first letters of Hindi's word for Hindi."""
    words = list_metadata("gpt2", prefix=False)
    for pre, expected_words in (("qwen2", ["\u0939", "\u093f\u0928"]), ("qwen35", [])):
        named = {f"tokenizer.ggml.{key}": value for key, value in (words | {"pre": pre}).items()}
        splitter = TokenizerMaker(tmp_path, named).make().pre_tokenizer
        assert splitter is not None
        text = "\u0939\u093f\u0928"
        found = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
        assert found == (expected_words or [text])


def test_a_merge_of_random_bytes_is_never_a_fault(tmp_path: Path) -> None:
    """Whatever the package tokenizers raises is told as what the file has."""
    metadata, random = list_metadata("gpt2", prefix=False), np.random.default_rng(2)
    letters = [*metadata["tokens"], " ", "", "\x00"]
    for _ in range(30):
        merges = ["".join(random.choice(letters, 3)) for _ in range(4)]
        named = {f"tokenizer.ggml.{k}": v for k, v in (metadata | {"merges": merges}).items()}
        try:
            TokenizerMaker(tmp_path, named).make()
        except SpecDecError:
            continue


def test_ministral_3_is_read_as_llama_cpp_names_it(tmp_path: Path) -> None:
    """Its scale of queries and its YaRN are keys of the file, beyond the original length too."""
    source = make_family_model(tmp_path, "ministral3", **SMALL)
    config, tensors = read_json(source / "config.json"), load_file(source / "model.safetensors")
    rotary, head = config["rope_parameters"], config["head_dim"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mistral3")
    for name, value in {
        "context_length": config["max_position_embeddings"], "embedding_length": 32,
        "block_count": 2, "feed_forward_length": 24, "head_count": 4, "head_count_kv": 2,
        "key_length": head, "value_length": head, "rope_dimension_count": head,
        "rope_freq_base": rotary["rope_theta"], "layer_norm_rms_eps": config["rms_norm_eps"],
        "rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": rotary["factor"],
        "rope_scaling_orig_ctx_len": rotary["original_max_position_embeddings"],
        "rope_scaling_yarn_log_mul": rotary["mscale_all_dim"],
        "attn_temperature_scale": rotary["llama_4_scaling_beta"],
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MISTRAL3, 2)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if ".q_proj" in name or ".k_proj" in name:
            order = order_turned(len(values), len(values) // head)
            values = values[np.argsort(order)]
        assert (gguf_name := names.get_name(name, (".weight",))) is not None
        writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    finish(writer)
    ids = torch.arange(3, 43)[None]
    found, expected = (
        load_model(each, dtype=torch.float32)(ids).logits for each in (tmp_path / "m.gguf", source)
    )
    torch.testing.assert_close(found, expected)
