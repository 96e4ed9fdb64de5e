"""What is wrong is named with its numbers, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import SpecDecError
from specdec.files.tensor_file import FOREIGN_BITS, TensorFile
from specdec.text.pretrained import load_model
from tests.convert.checkpoints import set_config
from tests.convert.conftest import Converter, Source
from tests.convert.golden_models import read_tensors, rewrite, summarize_rank

Edit = Callable[[dict[str, Any]], Any]
MODEL = "llama_mha_f32"  # one file, float32: numpy can rewrite it
DRAFTER = "drafter_A_rnn_e96"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def copy(source: Source, tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden input folder, change its config or tensors, and return the copy."""

    def make(name: str, *, config: dict[str, Any] | None = None, edit: Edit | None = None) -> Path:
        folder = tmp_path / f"copy-{name}"
        shutil.copytree(source(name), folder)
        if config is not None:
            values = json.loads((folder / "config.json").read_text()) | config
            values = {key: value for key, value in values.items() if value != "ABSENT"}
            (folder / "config.json").write_text(json.dumps(values))
        if edit is not None:
            tensors = read_tensors(folder / "model.safetensors")
            edit(tensors)
            rewrite(folder / "model.safetensors", tensors)
        return folder

    return make


Copy = Callable[..., Path]


# ---- The target's folder.


K_PROJ = Q_PROJ.replace("q_proj", "k_proj")
BIAS = Q_PROJ.replace("weight", "bias")


def move_rows(tensors: dict[str, Any]) -> None:
    """From one tensor to the next: the fused qkv would have the right shape."""
    both = np.concatenate([tensors[Q_PROJ], tensors[K_PROJ]])
    tensors[Q_PROJ], tensors[K_PROJ] = both[:56].copy(), both[56:].copy()


@pytest.mark.parametrize(
    ("edit", "config", "messages"),
    [
        (
            lambda t: (t.pop(Q_PROJ), t.pop("model.norm.weight")), {},
            [f"lacks 2 tensors: {Q_PROJ}, model.norm.weight"],
        ),
        (lambda t: t.pop("lm_head.weight"), {}, ["lacks 1 tensor: lm_head.weight"]),
        (
            lambda t: [t.pop(name) for name in list(t)[:12]], {},
            ["lacks 12 tensors: ", " and 2 more"],
        ),
        (
            lambda t: t.update({BIAS: np.ones(64, np.float32)}), {},
            [f"holds 1 tensor that the conversion would not use: {BIAS}"],
        ),
        (
            None, {"num_hidden_layers": 1},
            ["9 tensors that the conversion would not use: model.layers.1."],
        ),
        (
            lambda t: t.update({Q_PROJ: t[Q_PROJ][:, :32].copy()}), {},
            [f"{Q_PROJ} has shape [64, 32], not [64, 64]"],
        ),
        (
            move_rows, {},
            [f"{Q_PROJ} has shape [56, 64], not [64, 64]",
             f"{K_PROJ} has shape [72, 64], not [64, 64]"],
        ),
        (
            lambda t: t.update({Q_PROJ: np.ones((64, 64), np.int8)}), {},
            [f"{Q_PROJ} is int8, which cannot be converted to float32"],
        ),
        (None, {"hidden_size": None, "vocab_size": -1}, ["size is missing", "vocab_size is -1"]),
    ],
)  # fmt: skip
def test_tensors_at_odds_with_the_config(
    edit: Edit | None, config: dict[str, Any], messages: list[str], copy: Copy, convert: Converter
) -> None:
    found = convert.fail(model_dir=copy(MODEL, edit=edit, config=config)).message
    assert all(message in found for message in messages)


def test_all_problems_come_in_one_message(copy: Copy, source: Source, convert: Converter) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        del tensors["model.norm.weight"]
        tensors["stray"] = np.ones(1, np.float32)
        tensors[Q_PROJ] = tensors[Q_PROJ].T[:8].copy()

    drafter = copy(DRAFTER, edit=lambda t: t.pop("rnn_w.weight"))
    error = convert.fail(model_dir=copy(MODEL, edit=edit), drafter_model_dir=drafter)
    assert error.message.startswith("4 problems: (1) ")
    for text in ("lacks 1 tensor: model.norm.weight", "use: stray", "[8, 64], not [64, 64]",
                 "lacks 1 tensor: rnn_w.weight"):  # fmt: skip
        assert text in error.message


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_names_with_a_prefix(prefix: str, copy: Copy, convert: Converter) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    error = convert.fail(model_dir=copy(MODEL, edit=edit))
    assert f"tensors begin with {prefix}, as {prefix}model." in error.message
    assert "problems" not in error.message
    assert f"without {prefix} in" in error.hint


def test_shards_without_an_index(copy: Copy, convert: Converter) -> None:
    folder = copy(MODEL)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    hint = convert.fail(model_dir=folder).hint
    assert hint.startswith("download model.safetensors.index.json too")


def test_a_folder_of_the_hubs_cache(copy: Copy, convert: Converter, tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    for name in ("blobs", "refs", "snapshots"):
        (cache / name).mkdir(parents=True)
    snapshot = copy(MODEL).rename(cache / "snapshots" / "abc")
    error = convert.fail(model_dir=cache)
    assert "is a model's folder in the Hub's cache, with snapshots" in error.message
    assert error.hint == f"give one of them: {snapshot}"
    convert(model_dir=snapshot)


def test_no_config_and_no_weights(copy: Copy, convert: Converter) -> None:
    folder = copy(MODEL)
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    error = convert.fail(model_dir=folder)
    assert "holds neither model.safetensors nor" in error.message
    assert error.message.endswith("; it holds tf_model.h5")
    assert "save_pretrained" in error.hint
    (folder / "tf_model.h5").unlink()
    assert convert.fail(model_dir=folder).message.endswith("nor model.pt")
    (folder / "config.json").unlink()
    assert "is an empty folder, not" in convert.fail(model_dir=folder).message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LLaMAForCausalLM"]}, "'LLaMAForCausalLM' is not supported: it has"
         " the modules of LlamaForCausalLM, and nothing that is known here to be computed"),
        ({"architectures": [["x"]]}, "architectures is [['x']], not a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
        ({"architectures": [], "model_type": "lama"}, "model_type 'lama', with no architecture"),
        ({"architectures": None, "model_type": "t5", "num_decoder_layers": 2, "rms_norm_eps": None},
         "model_type 't5', with no architecture named beside it, is not supported: it has an"
         " encoder (num_decoder_layers); the nearest supported one, LlamaForCausalLM, has not"),
        ({"hidden_size": "ABSENT"}, "hidden_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number of at least 1"),
        ({"vocab_size": "128"}, "vocab_size is '128', not a whole number"),
        ({"vocab_size": 10**20}, "vocab_size is 100000000000000000000, not a number below 2**63"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, not a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not a boolean"),
        ({"num_hidden_layers": 999}, "is said to have 999 layers, but holds 21 tensors"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 1000"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 64 is not a multiple of"
         " num_attention_heads 7"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads=3"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta is 5.0 and in"
         " rope_parameters 6.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"torch_dtype": "float8_e4m3fn"}, "gives torch_dtype 'float8_e4m3fn'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized"),
        ({"vocab_size": 100}, "has shape [128, 64], not [100, 64]"),
    ],
)  # fmt: skip
def test_wrong_config(config: dict[str, Any], message: str, copy: Copy, convert: Converter) -> None:
    assert message in convert.fail(model_dir=copy(MODEL, config=config)).message


def test_a_model_of_several_parts(copy: Copy, convert: Converter) -> None:
    """A wrapper that is opened, and one that is not known to compute what its text model does."""
    config = {"text_config": {"vocab_size": 9}, "architectures": ["LlavaForConditionalGeneration"]}
    folder = copy(MODEL, config=config)
    assert "model_type None, with no architecture" in convert.fail(model_dir=folder).message
    set_config(folder, architectures=["PaliGemmaForConditionalGeneration"])
    error = convert.fail(model_dir=folder)
    assert "'PaliGemmaForConditionalGeneration' is not supported: its text model" in error.message
    assert error.hint.startswith("save its text model alone; the wrappers that are opened here")


@pytest.mark.parametrize(
    ("model", "tp_size", "words"),
    [(MODEL, 3, ""), (MODEL, 16, ""), ("llama_inter110", 4, "intermediate_size=110")],
)
def test_tp_size_that_does_not_divide(
    model: str, tp_size: int, words: str, source: Source, convert: Converter
) -> None:
    error = convert.fail(model_dir=source(model), tp_size=tp_size)
    assert words in error.message
    assert f"do not split over tp_size={tp_size}" in error.message
    assert "1, 2" in error.hint


# ---- Files that are not what they should be.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf{}", "is not JSON: it begins with a byte order mark"),
        ("{}".encode("utf-16"), "is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"hidden_size": NaN}', "is not JSON: NaN is not a JSON number"),
        (b'{"hidden_size": -Infinity}', "is not JSON: -Infinity is not a JSON number"),
        (b'{"rms_norm_eps": 1e999}', "is not JSON: the number '1e999' is too large"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "is not JSON: a number of 5001 digits"),
        (b'{"a": 1, "a": 2}', "is not JSON: the key 'a' is given twice"),
        (b'{"a": "\\ud800"}', "is not JSON: half of a character"),
        (b'{"a": "\\ud83d\\\\\\uDe00", "b": 1}', "is not JSON: half of a character"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100 deep"),
        (b'{"a": ' * 100_000, "is not JSON: values nested too deeply"),
        (b"", "is not JSON: Expecting value"),
        (b"[1]", "holds no JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
    ],
)
def test_unreadable_config(content: bytes, message: str, copy: Copy, convert: Converter) -> None:
    folder = copy(MODEL)
    (folder / "config.json").write_bytes(content)
    assert message in convert.fail(model_dir=folder).message


def test_a_config_too_large_to_read(copy: Copy, convert: Converter) -> None:
    folder = copy(MODEL)
    os.truncate(folder / "config.json", 10**12)  # a hole: no byte of it is on the disk
    assert "has 1000000000000 bytes, more than the" in convert.fail(model_dir=folder).message


@pytest.mark.parametrize("filename", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "broken link", "loop"])
def test_what_is_no_file(filename: str, kind: str, copy: Copy, convert: Converter) -> None:
    folder = copy(MODEL)
    path = folder / filename
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if kind == "broken link" else filename)
    expected = {"broken link": "does not exist: it is a link to no", "loop": "cannot be read: "}
    message = convert.fail(model_dir=folder).message
    assert f"{path} {expected.get(kind, 'is a folder, pipe or device, not a file')}" in message


def test_a_file_that_may_not_be_read(
    copy: Copy, convert: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(MODEL)
    original = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    message = convert.fail(model_dir=folder).message
    assert message == f"{folder / 'model.safetensors'} cannot be read: Permission denied"


def test_links_to_files_are_followed(copy: Copy, source: Source, convert: Converter) -> None:
    """As they lie in the Hub's cache."""
    folder = copy("llama_gqa")
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    expected = (convert(model_dir=source("llama_gqa")) / "rank0.safetensors").read_bytes()
    assert (convert(model_dir=folder, force=True) / "rank0.safetensors").read_bytes() == expected


@pytest.mark.parametrize("name", ["F8_E5M2", "U16", "C64"])
def test_types_that_are_refused_where_they_are_needed(
    name: str, copy: Copy, convert: Converter
) -> None:
    folder = copy(MODEL)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    begin, end = header[Q_PROJ]["data_offsets"]
    width = FOREIGN_BITS[name] // 8
    header[Q_PROJ] |= {"dtype": name, "shape": [64, (end - begin) // 64 // width]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert TensorFile(path).tensors[Q_PROJ].dtype == name
    with pytest.raises(SpecDecError, match=f"as '{name}', which is not supported"):
        TensorFile(path).read(Q_PROJ)
    assert Q_PROJ in convert.fail(model_dir=folder).message


@pytest.mark.thorough
def test_many_tensors_are_listed_quickly(tmp_path: Path) -> None:
    entries = {
        f"model.layers.{i}.weight": {
            "dtype": "BF16", "shape": [1, 2], "data_offsets": [4 * i, 4 * i + 4]
        }
        for i in range(100_000)
    }  # fmt: skip
    text = json.dumps(entries).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(400_000))
    began = time.process_time()
    assert len(TensorFile(path).tensors) == 100_000
    assert time.process_time() - began < 5


# ---- The index of a sharded folder.


@pytest.mark.parametrize(
    "filename", ["../llama_gqa/model-00001-of-00003.safetensors", "/etc/passwd", "a/../../b", ""]
)
def test_index_pointing_outside_the_folder(filename: str, copy: Copy, convert: Converter) -> None:
    folder = copy("llama_gqa")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = filename
    path.write_text(json.dumps(index))
    assert "names files outside the folder" in convert.fail(model_dir=folder).message


def test_index_naming_absent_files(copy: Copy, convert: Converter) -> None:
    folder = copy("llama_gqa")
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    message = convert.fail(model_dir=folder).message
    assert "names 2 of 3 files that are not there" in message
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in message


def test_index_at_odds_with_its_files(copy: Copy, convert: Converter) -> None:
    folder = copy("llama_gqa")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    index["weight_map"]["no.such"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    message = convert.fail(model_dir=folder).message
    assert "lacks tensors that the index places there: no.such" in message
    assert "holds tensors that the index does not place there: model.norm.weight" in message


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_index_decides_between_copies(
    kind: str, copy: Copy, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    """An overlay of some tensors, whose stale copies stay in the first shards."""
    folder = copy("llama_gqa")
    expected = summarize_rank(convert(model_dir=folder) / "rank0.safetensors")
    path = folder / "model.safetensors.index.json"
    places = json.loads(path.read_text())["weight_map"]
    save: Any = save_file
    if kind == "bin":
        path.unlink()
        path, save = folder / "pytorch_model.bin.index.json", torch.save
    new: dict[str, torch.Tensor] = {}
    for shard in sorted(set(places.values())):
        tensors = load_file(folder / shard)
        (folder / shard).unlink()
        moved = {name: tensors[name] for name in tensors if "layers.1.mlp" in name}
        stale = {name: torch.full_like(value, torch.nan) for name, value in moved.items()}
        new |= moved
        save(tensors | stale | {"old.inv_freq": torch.ones(2)}, folder / f"{shard}.{kind}")
    assert new
    save(new, folder / f"a.{kind}")
    weight_map = {n: f"a.{kind}" if n in new else f"{place}.{kind}" for n, place in places.items()}
    path.write_text(json.dumps({"weight_map": weight_map}))
    convert(model_dir=folder, force=True)
    assert summarize_rank(convert.output / "rank0.safetensors") == expected
    assert "not read: 1 tensors that no entry" in log.text
    sources = json.loads((convert.output / "manifest.json").read_text())["sources"]
    assert {f"a.{kind}", *weight_map.values()} < {Path(own["path"]).name for own in sources}
    if kind == "safetensors":
        with pytest.raises(SpecDecError, match="transformers would read the copies in model-0"):
            load_model(folder)
    del weight_map["model.norm.weight"]  # is it of the model?
    path.write_text(json.dumps({"weight_map": weight_map}))
    message = convert.fail(model_dir=folder, force=True).message
    assert "a shard holds 1 tensor that the model needs and no entry of the index names" in message
    assert message.endswith(": model.norm.weight")


# ---- The drafter.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 32}, "the drafter's hidden_size is 32, the target's 64"),
        ({"vocab_size": 131}, "the drafter's vocab_size is 131, the target's 128"),
        ({"vocab_size": 131, "hidden_size": 32}, "the drafter's vocab_size is 131"),
        ({"exit_dim": 80}, "input_proj.weight has shape [96, 128], not [80, 128]"),
        ({"exit_dim": "ABSENT"}, "exit_dim is missing"),
        ({"exit_dim": 128}, "needs no input projection, but there is input_proj.bias"),
        ({"num_draft_layers": 1}, "would not use: lm_head.1.linear.bias"),
        ({"num_draft_layers": 3}, "lacks 3 tensors: lm_head.2.linear.weight"),
        ({"num_draft_layers": 10**9}, "is said to have 1000000000 layers"),
        ({"rnn": False}, "says rnn is false, but there is rnn_u.bias, rnn_u.weight, rnn_w.weight"),
        ({"rnn": "yes"}, "rnn is 'yes', not a boolean"),
        ({"predict_n_tokens": 4}, "draft_len_per_beam is 5, but the drafter was trained to predict"
         " 4 tokens (predict_n_tokens)"),
        ({"num_draft_tokens": 3}, "trained to predict 3 tokens (num_draft_tokens)"),
    ],
)  # fmt: skip
def test_drafter_config_at_odds(
    config: dict[str, Any], message: str, copy: Copy, source: Source, convert: Converter
) -> None:
    error = convert.fail(model_dir=source(MODEL), drafter_model_dir=copy(DRAFTER, config=config))
    assert message in error.message


def test_trained_length_allows_as_much(copy: Copy, source: Source, convert: Converter) -> None:
    drafter = copy(DRAFTER, config={"predict_n_tokens": 4, "num_draft_tokens": None})
    convert(model_dir=source(MODEL), drafter_model_dir=drafter, redrafter_draft_len_per_beam=4)
    assert convert.report["config"]["redrafter_draft_len_per_beam"] == 4


def test_drafter_without_rnn_tensors(copy: Copy, source: Source, convert: Converter) -> None:
    drafter = copy("drafter_A_norn_e96", config={"rnn": True})
    message = convert.fail(model_dir=source(MODEL), drafter_model_dir=drafter).message
    assert "lacks 3 tensors: rnn_u.weight, rnn_u.bias, rnn_w.weight" in message


def rename(prefix: str, new: str, *, keep: bool = False) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            tensors[new + name.removeprefix(prefix)] = tensors[name] if keep else tensors.pop(name)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (rename("lm_head.", "lm_heads.", keep=True), "under 2 names: lm_head.*, lm_heads.*"),
        (rename("lm_head.", "0.", keep=True), "under 2 names: lm_head.*, 0.*"),
        (rename("lm_head.", "lm_heads."), "mixes two namings: lm_heads.* and input_proj.bias"),
        (rename("input_proj.", "input_projs."), "mixes two namings: lm_head.* and input_projs"),
        (
            rename("lm_head.", "head."),
            "holds no tensor of the drafter's layers and head, lm_head.*",
        ),
        (rename("rnn_u.", "rnn."), "would not use: rnn.bias, rnn.weight"),
    ],
)
def test_drafter_namings_are_not_guessed(
    edit: Edit, message: str, copy: Copy, source: Source, convert: Converter
) -> None:
    error = convert.fail(model_dir=source(MODEL), drafter_model_dir=copy(DRAFTER, edit=edit))
    assert message in error.message


def test_tp_size_that_does_not_divide_the_drafter(
    copy: Copy, source: Source, convert: Converter
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if not name.startswith("rnn"):
                tensors[name] = tensors[name][tuple(
                    slice(0, 94 if size == 96 else size) for size in tensors[name].shape
                )].copy()  # fmt: skip

    drafter = copy(DRAFTER, config={"exit_dim": 94}, edit=edit)
    convert(model_dir=source(MODEL), drafter_model_dir=drafter, tp_size=2)
    error = convert.fail(
        model_dir=source(MODEL), drafter_model_dir=drafter, tp_size=4,
        output_dir=convert.output.parent / "other",
    )  # fmt: skip
    assert "exit_dim=94 do not split over tp_size=4" in error.message


# ---- An existing checkpoint as the target.


@pytest.fixture
def base(source: Source, convert: Converter, tmp_path: Path) -> Path:
    return convert(model_dir=source(MODEL), output_dir=tmp_path / "base", tp_size=2)


def change_config(folder: Path, change: Edit) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_rank(folder: Path, rank: int, change: Edit) -> None:
    tensors = read_tensors(folder / f"rank{rank}.safetensors")
    change(tensors)
    rewrite(folder / f"rank{rank}.safetensors", tensors)


def test_base_with_other_flags(base: Path, source: Source, convert: Converter) -> None:
    flags: dict[str, Any] = {
        "base_model_checkpoint_dir": base, "drafter_model_dir": source(DRAFTER),
    }  # fmt: skip
    message = convert.fail(**flags, tp_size=4).message
    assert message == f"--tp-size is 4, but {base} has tp_size 2"
    message = convert.fail(**flags, use_parallel_embedding=True).message
    assert "has use_parallel_embedding false, embedding_sharding_dim 0" in message
    convert(**flags, tp_size=2)


def test_base_rank_files_are_checked(base: Path, source: Source, convert: Converter) -> None:
    norm = "transformer.ln_f.weight"

    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].copy()
        tensors["transformer.stray"] = tensors.pop(norm)
        bias = "transformer.layers.0.input_layernorm.weight"
        tensors[bias] = tensors[bias].astype(np.float16)

    change_rank(base, 1, change)
    flags: dict[str, Any] = {
        "base_model_checkpoint_dir": base, "drafter_model_dir": source(DRAFTER),
    }  # fmt: skip
    message = convert.fail(**flags).message
    rank1 = base / "rank1.safetensors"
    assert f"{rank1} lacks 1 tensor: {norm}" in message
    assert f"{rank1} holds 1 tensor that the conversion would not use: transformer.stray" in message
    assert "lm_head.weight has shape [10, 64], not [64, 64]" in message
    assert "input_layernorm.weight is float16, config.json says float32" in message
    rank1.unlink()
    message = convert.fail(**flags).message
    assert message == f"{base} has tp_size 2 but lacks rank1.safetensors"
    shutil.copy(base / "rank0.safetensors", rank1)
    shutil.copy(base / "rank0.safetensors", base / "rank2.safetensors")
    message = convert.fail(**flags).message
    assert message == f"{base} has tp_size 2 but also holds rank2.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["mapping"].update(pp_size=2), "pp_size=2"),
        (lambda c: c["mapping"].update(tp_size=8, world_size=8), "has tp_size 8 but lacks rank2"),
        (lambda c: c["quantization"].update(quant_algo="W8A16"), "is quantized with W8A16"),
        (
            lambda c: c.update(architecture="BloomForCausalLM"),
            "'BloomForCausalLM' is not supported",
        ),
        (lambda c: c.update(num_hidden_layers=999), "is said to have 999 layers"),
        (lambda c: c.pop("vocab_size"), "vocab_size is None"),
    ],
)
def test_base_config(
    change: Edit, message: str, base: Path, source: Source, convert: Converter
) -> None:
    change_config(base, change)
    flags = {"base_model_checkpoint_dir": base, "drafter_model_dir": source(DRAFTER)}
    assert message in convert.fail(**flags).message


# ---- Flags and folders.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "--model-dir ./no/such/folder does not exist"),
        ("nobody/nothing", "at the Hub nothing was asked: HF_HUB_OFFLINE is set, and no copy is"),
        ("nothing", "--model-dir nothing is not a local folder, and at the Hub nothing was asked"),
        ("a/b/c", "--model-dir a/b/c does not exist"),
        ("no\0thing", "does not exist"),
        ("", "--model-dir is empty"),
        (__file__, "is a file"),
    ],
)
def test_model_that_is_not_there(name: str, message: str, convert: Converter) -> None:
    assert message in convert.fail(model_dir=name).message


def test_output_that_would_replace_an_input(copy: Copy, convert: Converter) -> None:
    folder = copy(MODEL)
    error = convert.fail(model_dir=folder, output_dir=folder, force=True)
    assert "which it would replace" in error.message
