"""Every family: its table and its configuration, against models as transformers saves them."""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.checkpoint.config import parse_checkpoint_config, read_checkpoint_config
from specdec.convert.families import FAMILIES, list_families
from specdec.convert.families.base import Family, Layout, describe_rotary
from specdec.convert.hf import HfFolder
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from specdec.methods import METHODS
from specdec.model.architectures import ARCHITECTURES, KEY, Architecture
from specdec.model.config import ModelConfig
from specdec.model.experts import OWN_KEYS
from specdec.model.tensors import list_target_tensors
from specdec.trtllm.facts import LABELS, load_facts
from specdec.trtllm.lacks import PAIRS
from tests.conftest import ROOT, make_drafter, make_eagle_drafter, make_medusa_heads
from tests.convert.checkpoints import (
    join_checkpoint,
    read_config,
    read_hugging_face,
    set_config,
)
from tests.convert.conftest import Converter
from tests.convert.golden_models import summarize_rank
from tests.covering import TAKES_ALL
from tests.engine.models import make_model as make_config
from tests.engines import run_cli_here
from tests.families import (
    CLASSES,
    CONVOLVING,
    EXPERTS,
    GRANITES,
    HYBRIDS,
    NOT_IN_014,
    OWN,
    WRITTEN_AS,
    make_family_model,
)
from tests.parity.models import VARIANTS

NAMES = [family.name for family in FAMILIES.values()]
ROTARY = [name for name in NAMES if name not in ("gemma4", "gpt2", "opt")]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip

Maker = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Random models, each made once; a test that changes one has to copy it."""
    made: dict[str, Path] = {}

    def make(family: str, **config: Any) -> Path:
        key = repr((family, config))
        if key not in made:
            made[key] = make_family_model(tmp_path_factory.mktemp(family), family, **config)
        return made[key]

    return make


def copy_model(folder: Path, tmp_path: Path, **values: Any) -> Path:
    """Copy a model and change keys of its config.json; "ABSENT" removes one.

    Rotary fields are told in the way of transformers 4, whichever version saved the model.
    """
    shutil.copytree(folder, tmp_path / "copy")
    rotary = read_config(folder).get("rope_parameters", {})
    old = {key: rotary[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotary}
    if rotary.get("rope_type", "default") != "default":
        old["rope_scaling"] = {key: value for key, value in rotary.items() if key not in old}
    return set_config(tmp_path / "copy", **{"rope_parameters": "ABSENT"} | old | values)


# ---- The list.


def read_family(family: Family, folder: Path) -> ModelConfig:
    layout = Layout(
        dtype="float16", tp_size=1, pp_size=1, use_parallel_embedding=False,
        embedding_sharding_dim=0, share_embedding_table=False,
    )  # fmt: skip
    return family.read_model(HfFolder(folder), layout)[0]


def test_the_list_of_families_is_complete() -> None:
    """Every family has a test model, parity with transformers, and a row in the docs."""
    missing = [
        f"{place}: {name}"
        for family in FAMILIES.values()
        for place, name, is_there in (
            ("tests/families.py", family.name, family.name in CLASSES),
            ("tests/parity/models.py", family.name, family.architectures[0] in VARIANTS),
            *(("docs/convert.md", name, name in read_docs_table())
              for name in family.architectures),
        )
        if not is_there
    ]  # fmt: skip
    assert missing == []
    claimed = [name for family in list_families() for name in family.architectures]
    assert sorted(claimed) == sorted(FAMILIES), "no architecture has two families"
    own = {family.architectures[0] for family in FAMILIES.values()}
    assert {model_class for _, model_class in CLASSES.values()} == own == set(VARIANTS)
    assert read_docs_table().keys() == set(FAMILIES)


def read_docs_table() -> dict[str, list[str]]:
    """The table of families in docs/convert.md: architecture -> the cells alongside it."""
    text = (ROOT / "docs/convert.md").read_text().split("## Families")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()]
    assert rows[0] == ["architecture", "models", "TensorRT-LLM"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_the_table_of_drafters_is_what_the_lines_have() -> None:
    text = (ROOT / "docs/convert.md").read_text().split("## Drafters and backends")[1]
    lines = [row.strip("|").strip() for row in text.splitlines() if row.startswith("|")]
    rows = [re.split(r" *\| *", line) for line in lines[: lines.index("--- | --- | ---") + 10]]
    assert [cell.removeprefix("TensorRT-LLM ") for cell in rows[0][1:]] == list(LABELS)
    told = {title: cells for title, *cells in rows[2:]}
    names = {title: m for m in METHODS.values() for title in m.own_architectures.values()}
    assert names.keys() <= told.keys()
    for title, method in names.items():
        for label, cell in zip(LABELS, told[title], strict=True):
            pairs = {} if title == "EAGLE-3" else PAIRS[label].get(method.name, {})
            assert cell == (", ".join(f"`{name}`" for name in pairs) or "none"), title
            known = load_facts(label).architectures
            assert {name for pair in pairs.values() for name in pair} <= {*known, *pairs}
            assert not set(known) & method.own_architectures.keys()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_family_computes_is_told(architecture: str, make: Maker) -> None:
    """By TensorRT-LLM's name of it, or by flags; TensorRT-LLM must not meet half a description."""
    family = FAMILIES[architecture]
    model = read_family(family, make(family.name))
    lines = [label for label in LABELS if model.architecture in load_facts(label).architectures]
    is_own = model.own_arithmetic is not None
    assert is_own == (model.architecture not in ARCHITECTURES)
    if is_own and lines:
        assert family.describe is not describe_rotary, f"TensorRT-LLM has {model.architecture}"
    if not is_own:
        assert lines, "its name alone is told"
    told = f"as `{model.architecture}`" if model.architecture != architecture else "yes"
    if len(lines) < len(LABELS):
        told = f"only {', '.join(lines)}"
    assert read_docs_table()[architecture][1] == (told if lines else "no")


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_without_a_number_of_kv_heads_have_transformers_default(
    family: str, make: Maker, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    default = getattr(transformers, CLASSES[family][0])().num_key_value_heads
    assert read_family(FAMILIES[CLASSES[family][1]], folder).num_key_value_heads == default


def test_a_family_that_tells_nothing_is_an_error() -> None:
    values = vars(make_config()) | {"architecture": "ToyForCausalLM"}
    with pytest.raises(ValueError, match="nothing tells what ToyForCausalLM computes"):
        ModelConfig(**values)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_names_every_tensor(architecture: str, make: Maker) -> None:
    """A family's table covers the tensors of its models and nothing else."""
    family = FAMILIES[architecture]
    model = read_family(family, make(family.name, layers=11))
    specs = list_target_tensors(model)
    sources = family.find_source_rows(specs, num_experts=model.experts.num if model.experts else 1)
    parts = [part for parts in sources.values() for part in parts]
    assert len(parts) == len(set(parts))
    assert not any("{" in part.name for part in parts)
    assert any(".10." in part.name for part in sources["transformer.layers.10.mlp.fc.weight"])
    modules = {re.sub(r"\.\d+\.", ".{layer}.", name.rpartition(".")[0]) for name in specs}
    if "lm_head.weight" not in specs:  # Gemma's, which is shared
        modules |= {"lm_head"}
    assert modules == set(family.modules)


# ---- Architectures that TensorRT-LLM does not have.


@pytest.mark.parametrize("family", NOT_IN_014)
def test_a_line_without_the_architecture_is_refused(
    family: str, make: Maker, convert: Converter, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """By convert where the line was asked for, by every TensorRT-LLM build."""
    name = CLASSES[family][1]
    error = convert.fail(model_dir=make(family), trtllm_version="0.14")
    assert error.message == f"TensorRT-LLM 0.14 has no {name}"
    assert "leave --trtllm-version out" in error.hint
    log.set_level(logging.INFO)
    convert(model_dir=make(family), trtllm_version="1.2")
    said = f"TensorRT-LLM 1.2 has no {name}: this checkpoint is for specdec's own backends"
    assert (said in log.text) == (family in OWN)
    for label in LABELS if family in OWN else ["0.14"]:
        done = run_cli_here(
            "build", "--checkpoint-dir", convert.output, "--output-dir", tmp_path / "engine",
            "--backend", "tensorrt-llm", "--trtllm-version", label, "--dry-run",
        )  # fmt: skip
        assert done.returncode == 1
        assert f"TensorRT-LLM {label} has no {name}" in done.stderr
        assert "use --backend torch" in done.stderr.partition("hint: ")[2]


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("label", LABELS)
def test_phi_with_fewer_kv_heads_is_no_model_of_tensorrt_llm(
    label: str, kv_heads: int, make: Maker, convert: Converter, tmp_path: Path
) -> None:
    """Its class, of every line, has no number of K/V heads."""
    convert(model_dir=make("phi", kv_heads=kv_heads), trtllm_version=label)
    assert ("tensorrt-llm" in convert.report["backends"]) == (kv_heads == 8)
    done = run_cli_here(
        "build", "--checkpoint-dir", convert.output, "--output-dir", tmp_path / "engine",
        "--backend", "tensorrt-llm", "--trtllm-version", label, "--dry-run",
    )  # fmt: skip
    fact = f"TensorRT-LLM {label}'s PhiForCausalLM has as many K/V heads as heads, and the"
    assert done.returncode == (1 if kv_heads == 2 else 0), done.stderr
    assert (fact in done.stderr) == (kv_heads == 2)


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({}, {"norm": "layer", "qkv_bias": False, "dense_bias": False, "mlp_bias": False}),
        (
            {"use_parallel_residual": True, "use_qkv_bias": True},
            {"norm": "layer", "is_parallel": True, "qkv_bias": True, "dense_bias": False,
             "mlp_bias": False},
        ),
    ],
)  # fmt: skip
def test_flags_are_written_and_read_back(
    change: dict[str, Any], flags: dict[str, Any], make: Maker, convert: Converter, tmp_path: Path
) -> None:
    """Of each model its own, not of the family; with a drafter added as well."""
    folder = make("stablelm", **change)
    convert(model_dir=folder, tp_size=2)
    check_tensors(convert.output, "stablelm", folder)
    config = read_config(convert.output)
    assert config[KEY] == flags
    model = read_checkpoint_config(convert.output).model
    assert model.own_arithmetic == Architecture(**flags)
    drafter = make_eagle_drafter(tmp_path, version=3, hidden=64, vocab=67, aux_layers=(0, 1))
    second = tmp_path / "second"
    convert(base_model_checkpoint_dir=convert.output, eagle_model_dir=drafter, output_dir=second)
    assert read_checkpoint_config(second).model == model


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([], "arithmetic is [], not an object"),
        ({"v_norm": True}, "arithmetic has v_norm, which this release does not compute"),
        ({"norm": "batch"}, "arithmetic.norm is 'batch'"),
        ({"norm": ["rms"]}, "arithmetic.norm is ['rms']"),
        ({"is_parallel": 1}, "arithmetic.is_parallel is 1"),
        ({"qkv_bias": "no"}, "arithmetic.qkv_bias is 'no'"),
        ({"activations": ["mish"]}, "arithmetic.activations is ['mish']"),
        ({"activations": [["silu"]]}, "arithmetic.activations is [['silu']]"),
        ({"norm_epsilon": "x"}, "arithmetic.norm_epsilon is 'x'"),
        (None, "checkpoint architecture 'StableLmForCausalLM' is not supported"),
    ],
)
def test_flags_that_nobody_knows_are_refused(
    told: Any, message: str, make: Maker, convert: Converter
) -> None:
    config = read_config(convert(model_dir=make("stablelm"))) | {KEY: told}
    with pytest.raises(SpecDecError) as caught:
        parse_checkpoint_config(config)
    assert message in caught.value.message


def test_flags_that_contradict_the_name_are_refused(make: Maker, convert: Converter) -> None:
    config = read_config(convert(model_dir=make("llama")))
    assert parse_checkpoint_config(config | {KEY: {}}).model.own_arithmetic is None
    with pytest.raises(SpecDecError, match="is not what LlamaForCausalLM computes"):
        parse_checkpoint_config(config | {KEY: {"norm": "layer"}})


# ---- Tensors.


@functools.lru_cache(32)
def read_made(model_dir: Path, family: str) -> dict[str, Any]:
    """The tensors of a model that stays as it is made."""
    return read_hugging_face(model_dir, family)


def check_tensors(folder: Path, family: str, model_dir: Path) -> None:
    joined, expected = join_checkpoint(folder), {**read_made(model_dir, family)}
    # 0.14's name of a shared expert.
    joined = {re.sub(r"(\d\.)shared", r"\1mlp.shared", name): own for name, own in joined.items()}
    if read_checkpoint_config(folder).model.share_embedding_table:
        del expected["lm_head.weight"]
    assert joined.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(joined[name], value), name


def list_layouts() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A family, its sizes, and a conversion's flags: more ranks than K/V heads, an odd vocabulary,
    every layout of the embedding, a head of its own and a tied one, stages, experts, biases.

    Every layout with those families that have rules of their own for the table or the positions,
    and with two of five others: each of them has a head of its own and a tied one.
    """
    own, tied = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
    six = {"heads": 6, "kv_heads": 3, "hidden": 48, "layers": 4}
    layouts = [(own, 2, 0), (own, 4, None), (tied, 1, None), (tied, 2, 1), (tied, 8, 0)]
    for number, family in enumerate(NAMES):
        if family == "gemma4":  # whose layers are of several sizes: tests/parity has them
            continue
        has_own_rules = TAKES_ALL or family in ("llama", "gemma", "gemma2", "gpt2", "opt")
        turns = range(len(layouts)) if has_own_rules else (number % 2, 2 + number % 3)
        for turn in turns:
            sizes, tp_size, dim = layouts[turn % len(layouts)]
            split = {"use_parallel_embedding": True, "embedding_sharding_dim": dim}
            yield family, sizes, {"tp_size": tp_size} | (split if dim is not None else {})
        yield family, six, {"tp_size": 3, "pp_size": 4}
    yield "llama", six, {"tp_size": 3}
    yield "gpt2", six, {"pp_size": 2}
    for family in sorted(set(EXPERTS) - {"gemma4"}):
        version = "1.2" if family in NOT_IN_014 else "0.14"
        for tp_size, ep_size in ((2, 2), (4, 2), (4, 4)):
            flags = {"tp_size": tp_size, "moe_ep_size": ep_size, "trtllm_version": version}
            yield family, {"heads": 4, "kv_heads": 2}, flags
    both = {"attention_bias": True, "mlp_bias": True}
    yield "llama", both, {"tp_size": 2}
    yield "llama", {"kv_heads": 1, "heads": 4} | both, {"tp_size": 4}
    yield "llama", {"head_dim": 32, "kv_heads": 4}, {"tp_size": 8}
    yield "gemma", {"attention_bias": True, "hidden": 48}, {"tp_size": 2}
    yield "gpt_oss", {"attention_bias": False, "kv_heads": 1}, {"tp_size": 2}


@pytest.mark.parametrize(("family", "sizes", "flags"), list_layouts())
def test_what_transformers_saves_comes_through(
    family: str, sizes: dict[str, Any], flags: dict[str, Any], make: Maker, convert: Converter
) -> None:
    """Tensor by tensor, joined again."""
    model_dir = make(family, **sizes)
    output = convert(model_dir=model_dir, **flags)
    check_tensors(output, family, model_dir)
    tp_size, pp_size = flags.get("tp_size", 1), flags.get("pp_size", 1)
    assert len(list(output.glob("rank*"))) == tp_size * pp_size
    assert convert.report["pp_size"] == pp_size
    config, ep_size = read_config(output), flags.get("moe_ep_size", 1)
    expected = {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}
    if family != "opt":
        expected |= {"gpus_per_node": 8, "cp_size": 1}
        expected |= {"moe_tp_size": tp_size // ep_size, "moe_ep_size": ep_size}
    assert config["mapping"] == expected
    if pp_size == 1 and "tie_word_embeddings" in sizes:
        # Gemma 1 and 2 leave a tied head out, except where a rank's columns would be no part of it.
        is_tied, dim = sizes["tie_word_embeddings"], flags.get("embedding_sharding_dim")
        leaves_out = family in ("gemma", "gemma2") and is_tied and dim != 1
        assert ("lm_head.weight" in summarize_rank(output / "rank0.safetensors")) != leaves_out
    if "moe_ep_size" in flags:  # only a rank's own experts are there, and of each its part
        tensors = TensorFile(output / "rank1.safetensors").tensors
        inner = EXPERTS[family].get("moe_intermediate_size", 48)
        shape = tensors["transformer.layers.1.mlp.proj.weight"].shape
        assert shape == (4 // ep_size, 64, inner // (tp_size // ep_size))
    if family == "llama":
        assert config["attn_bias"] is config["mlp_bias"] is sizes.get("mlp_bias", False)
    if family == "gemma":
        assert config["head_size"] == sizes.get("hidden", 64) // sizes.get("heads", 8)


@pytest.mark.parametrize("family", NAMES)
def test_a_head_of_its_own_beside_a_config_that_ties_it(
    family: str, make: Maker, tmp_path: Path, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    """What an adapter that was merged leaves; a stored copy of the embedding stays tied."""
    sizes = {"word_embed_proj_dim": 32} if family == "opt" else {}
    model_dir = make(family, tie_word_embeddings=False, **sizes)
    expected = summarize_rank(convert(model_dir=model_dir) / "rank0.safetensors")
    folder = copy_model(model_dir, tmp_path, tie_word_embeddings=True)
    convert(model_dir=folder, force=True)
    assert summarize_rank(convert.output / "rank0.safetensors") == expected
    assert "the stored head is taken, as transformers 5 takes it" in log.text
    log.clear()
    tensors = load_file(folder / "model.safetensors")
    table = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    save_file(tensors | {"lm_head.weight": tensors[table].clone()}, folder / "model.safetensors")
    convert(model_dir=folder, force=True)
    assert "stored head" not in log.text
    joined = join_checkpoint(convert.output)
    head = joined.get("lm_head.weight", joined["transformer.vocab_embedding.weight"])
    assert family == "opt" or np.array_equal(head, joined["transformer.vocab_embedding.weight"])


# Granite's experts are stacked as they are published, under other names.
GRANITE_NAMES = {
    "input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}  # fmt: skip


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and stack the experts as transformers 5 does with save_original_format=False."""
    fused: dict[str, Any] = {}
    places = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
    for name, tensor in tensors.items():
        stem, _, kind = name.partition(".block_sparse_moe.")
        if kind in GRANITE_NAMES:
            fused[f"{stem}.block_sparse_moe.{GRANITE_NAMES[kind]}"] = tensor
            continue
        name = name.replace(".block_sparse_moe.", ".mlp.")
        stem, _, rest = name.partition(".experts.")
        if not rest:
            fused[name] = tensor
            continue
        expert, part, _ = rest.split(".")
        place = places.get(part, "down")
        fused.setdefault(f"{stem}.experts.{place}", {})[int(expert)] = tensor
    for stem in [name.removesuffix(".down") for name in fused if name.endswith(".down")]:
        gate, up, down = (fused.pop(f"{stem}.{place}") for place in ("gate", "up", "down"))
        order = range(len(down))
        fused[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([gate[e], up[e]]) for e in order])
        fused[f"{stem}.down_proj"] = torch.stack([down[e] for e in order])
    return fused


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("family", sorted(set(EXPERTS) - {"gemma4", "gpt_oss"}))
def test_experts_in_one_tensor(
    family: str, kind: str, make: Maker, tmp_path: Path, convert: Converter
) -> None:
    # The first layer of an LFM2 has an MLP.
    model_dir = make(family, heads=4, kv_heads=2, layers=2 if family in CONVOLVING else 1)
    layouts = [{}, {"tp_size": 2}, {"tp_size": 4, "moe_ep_size": 2}]
    expected = [
        summarize_rank(convert(model_dir=model_dir, force=True, **flags) / "rank0.safetensors")
        for flags in layouts
    ]
    folder = copy_model(model_dir, tmp_path)
    fused = fuse_experts(load_file(folder / "model.safetensors"))
    save_file(fused, folder / "model.safetensors")
    if transformers.__version__.startswith("5.") and kind == "safetensors":
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
        model.save_pretrained(tmp_path / "saved", save_original_format=False)
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert saved.keys() == fused.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in fused.items())
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(fused, folder / "pytorch_model.bin")
    for flags, rank in zip(layouts, expected, strict=True):
        convert(model_dir=folder, force=True, **flags)
        assert summarize_rank(convert.output / "rank0.safetensors") == rank


def test_experts_in_one_tensor_that_are_laid_out_otherwise(
    make: Maker, tmp_path: Path, convert: Converter
) -> None:
    """[in, out], as other models have them, or quantized, is refused by name."""
    folder = copy_model(make("qwen3_moe", layers=1), tmp_path)
    fused = fuse_experts(load_file(folder / "model.safetensors"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    changed = fused | {name: fused[name].transpose(1, 2).contiguous()}
    save_file(changed, folder / "model.safetensors")
    message = convert.fail(model_dir=folder).message
    assert f"{name} has shape [4, 64, 48], not [4, 48, 64]" in message
    scales = {f"{name}_scale_inv": torch.ones(4, 1, 1)}
    save_file(
        fused | scales | {name: fused[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors"
    )
    section = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    for flags in ({}, {"dequantize": True}):
        set_config(folder, quantization_config=section)
        error = convert.fail(model_dir=folder, **flags)
        assert (
            f"{name} is float8_e4m3fn: experts in one tensor are read unquantized" in error.message
        )


def test_gemmas_norms_are_added_to_before_they_are_rounded(make: Maker, convert: Converter) -> None:
    model_dir = make("gemma", dtype="bfloat16")
    convert(model_dir=model_dir, dtype="float16")
    norm = load_file(model_dir / "model.safetensors")["model.norm.weight"]
    ours = load_file(convert.output / "rank0.safetensors")["transformer.ln_f.weight"]
    assert torch.equal(ours, (norm.float() + 1).to(torch.float16))
    assert not torch.equal(ours, (norm + 1).to(torch.float16))


PREFIXES = [
    (family.name, family.prefixes[0], other)
    for family in FAMILIES.values()
    for other in family.prefixes[1:]
]


@pytest.mark.parametrize(("family", "prefix", "other"), PREFIXES)
def test_names_without_the_prefix(
    family: str, prefix: str, other: str, make: Maker, tmp_path: Path, convert: Converter
) -> None:
    """As the inner model is saved on its own; both namings in one folder are refused."""
    model_dir = make(family, tie_word_embeddings=False)
    expected = summarize_rank(convert(model_dir=model_dir) / "rank0.safetensors")
    folder = copy_model(model_dir, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        other + name.removeprefix(prefix) if name.startswith(prefix) else name: value
        for name, value in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors")
    convert(model_dir=folder, force=True)
    assert summarize_rank(convert.output / "rank0.safetensors") == expected
    first = next(name for name in sorted(tensors) if name.startswith(prefix))
    save_file(renamed | {first: tensors[first].clone()}, folder / "model.safetensors")
    error = convert.fail(model_dir=folder, force=True)
    assert "has 2 namings of one model" in error.message
    assert first in error.message


@pytest.mark.parametrize(
    ("family", "buffer"),
    [
        *((family, "model.layers.1.self_attn.rotary_emb.inv_freq") for family in ROTARY),
        ("gpt2", "transformer.h.1.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
    ],
)
def test_buffers_are_left_out(
    family: str, buffer: str, make: Maker, tmp_path: Path, convert: Converter
) -> None:
    """Those that every loader computes; any other is an error."""
    folder = copy_model(make(family), tmp_path)
    expected = summarize_rank(convert(model_dir=folder) / "rank0.safetensors")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {buffer: torch.ones(4)}, folder / "model.safetensors")
    convert(model_dir=folder, force=True)
    assert summarize_rank(convert.output / "rank0.safetensors") == expected
    save_file(tensors | {buffer + "es": torch.ones(4)}, folder / "model.safetensors")
    error = convert.fail(model_dir=folder, force=True)
    assert f"would not use: {buffer}es" in error.message


def test_a_transposed_source_is_checked_as_it_is_stored(
    make: Maker, tmp_path: Path, convert: Converter
) -> None:
    folder = copy_model(make("gpt2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, folder / "model.safetensors")
    error = convert.fail(model_dir=folder)
    assert f"{name} has shape [192, 64], not [64, 192]" in error.message


# ---- Configurations.


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("version", ["1.2", "0.14"])
def test_configurations_are_read_back(
    family: str, version: str, make: Maker, convert: Converter
) -> None:
    """By either line's keys; what a line does not take is not there."""
    if version == "0.14" and family in NOT_IN_014:
        pytest.skip("refused; see test_a_line_without_the_architecture_is_refused")
    folder = convert(model_dir=make(family), trtllm_version=version, tp_size=2)
    config = read_config(folder)
    model = read_checkpoint_config(folder).model
    expected = WRITTEN_AS.get(family, CLASSES[family][1])
    assert model.architecture == config["architecture"] == expected
    assert (model.tp_size, model.vocab_size, model.num_hidden_layers) == (2, 67, 2)
    assert (KEY in config) == (family in OWN)
    assert model.share_embedding_table == (family in ("gemma", "gemma2"))
    assert ("share_embedding_table" in config) == (version == "0.14")
    has_key = family in ("llama", "mistral", "ministral", "qwen2", "gpt2") and version == "0.14"
    assert ("moe" in config) == (has_key or family in EXPERTS)
    if family in EXPERTS:
        assert model.experts is not None
        assert model.experts.num == config["moe"]["num_experts"] == 4
        # What the line makes MoeConfig of: another key is a TypeError there.
        only = {"moe_intermediate_size", "num_shared_experts"} if version == "0.14" else set()
        if family in (*CONVOLVING, *GRANITES[1:]):  # no line has it, and makes MoeConfig of it
            only, shared_key = set(OWN_KEYS.values()), {OWN_KEYS["gates_shared"]}
            own_keys = only - shared_key if family in CONVOLVING else shared_key
            assert only & set(config["moe"]) == own_keys
        assert set(config["moe"]) - only == {
            "num_experts", "top_k", "normalization_mode", "sparse_mixer_epsilon", "tp_mode"
        }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"n_head": 5}, "n_embd 64 is not a multiple of n_head 5"),
        ("gpt2", {"activation_function": "mish"}, "hidden_act='mish' is not known for GPT2"),
        ("opt", {"word_embed_proj_dim": 32},
         "word_embed_proj_dim is 32, but model.decoder.project_in.weight is missing, not [64, 32]"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
        ("opt", {"layer_norm_elementwise_affine": False}, "elementwise_affine is False"),
        ("opt", {"enable_bias": False}, "enable_bias is False"),
        ("opt", {"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("phi", {"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ("phi", {"partial_rotary_factor": 1.5}, "rotary_pct=1.5"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act='gelu' is not known for Phi3ForCausalLM"),
        ("llama", {"is_causal": False}, "is_causal is False: tokens that attend to later ones"),
        ("gpt2", {"is_causal": 0}, "is_causal is 0"),
        ("gemma3", {"is_causal": None}, "is_causal is None"),
        ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.9}}}, "per_layer_config is {'1':"),
        ("mixtral", {"per_layer_config": {"0": {"skip": ["mlp"]}}}, "per_layer_config is {'0':"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not known for LlamaForCausalLM"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rotary scaling 'mrope' is not supported"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "rotary scaling 'default' has unknown factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "'llama3' has no factor"),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 0}}, "'linear' has factor 0"),
        ("mistral", {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
         "rope_type 'yarn' and type 'linear', which disagree"),
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": "ABSENT"},
         "original_max_position_embeddings is missing"),
        ("phi3", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 32},
                  "original_max_position_embeddings": 16}, "is 16 and in the scaling 32"),
        ("phi3", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 32},
                  "original_max_position_embeddings": "ABSENT"},
         "is 32 in the scaling, and absent beside it, which means 4096"),
        ("phi3", {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16},
         "'longrope' has no short_factor, long_factor"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 3},
                  "original_max_position_embeddings": 16},
         "'longrope' has long_factor of 3 values, not 4 positive numbers"),
        ("mistral", {"sliding_window": "no"}, "sliding_window is 'no'"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("stablelm", {"head_dim": 16}, "head_dim is 16"),
        ("seed_oss", {"attention_out_bias": "no"}, "attention_out_bias is 'no'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, not a positive"),
        ("gemma2", {"layer_types": ["full_attention"]},
         "layer_types is ['full_attention'] for 2 layers"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
         "rope_parameters scales sliding layers: {'rope_type': 'linear'}"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
         "rope_parameters has an object for each type of layer"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0, not a positive number"),
        ("granite", {"residual_multiplier": "x"}, "residual_multiplier is 'x', not a positive"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mixtral", {"num_experts_per_tok": 5}, "top_k is 5, not of 1 to 4"),
        ("mixtral", {"num_local_experts": 3000}, "said to have 3000 experts a layer, but holds"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 5},
         "num_experts 4 and num_local_experts 5 disagree"),
        ("qwen2_moe", {"num_experts": 5}, "lacks 6 tensors"),
        *((family, {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
           "layer_types is ['sliding_attention', 'full_attention']")
          for family in ("phi3", "mixtral", "qwen2_moe", "smollm3")),
        ("phi3", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, "layer_types is"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(
    family: str, change: dict[str, Any], message: str, make: Maker, tmp_path: Path,
    convert: Converter,
) -> None:  # fmt: skip
    folder = copy_model(make(family), tmp_path, **change)
    assert message in convert.fail(model_dir=folder).message


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_either_name_of_the_number_of_experts(
    name: str, make: Maker, tmp_path: Path, convert: Converter
) -> None:
    """transformers 4 and 5 call Qwen3-MoE's differently."""
    both = dict.fromkeys(("num_experts", "num_local_experts"), "ABSENT")
    folder = copy_model(make("qwen3_moe"), tmp_path, **both | {name: 4})
    assert read_config(convert(model_dir=folder))["moe"]["num_experts"] == 4


FIRST_LENGTH = "original_max_position_embeddings"
SCALINGS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    LLAMA3,
    LONGROPE | {"original_max_position_embeddings": 32},
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "scaling"),
    [(name, SCALINGS[(at + more) % 5]) for at, name in enumerate(ROTARY) for more in (0, 2)],
)
def test_every_rotary_scaling_is_carried_over(
    family: str, scaling: dict[str, Any], make: Maker, tmp_path: Path, convert: Converter
) -> None:
    """From the place where transformers 4 writes it and from that of transformers 5."""
    if family in ("phi", "stablelm") and "short_factor" in scaling:  # half of each head is rotated
        scaling = scaling | {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    folder = copy_model(make(family), tmp_path, rope_scaling=scaling, rope_theta=5e5)
    if "short_factor" in scaling or family == "phi3":  # whose own value is outside of the scaling
        set_config(folder, original_max_position_embeddings=scaling.get(FIRST_LENGTH, 32))
    convert(model_dir=folder)
    written = read_config(convert.output)
    assert written["rotary_scaling"] == scaling
    assert written["rotary_base"] == 5e5
    model = read_checkpoint_config(convert.output).model
    assert (model.rotary_scaling, model.rotary_base) == (scaling, 5e5)
    if scaling.get("type") == "longrope":
        assert model.original_max_position_embeddings == 32
    fraction = read_config(folder).get("partial_rotary_factor")
    set_config(
        folder, rope_scaling="ABSENT", rope_theta="ABSENT", partial_rotary_factor="ABSENT",
        rope_parameters=scaling | {"rope_theta": 5e5, "partial_rotary_factor": fraction},
    )  # fmt: skip
    convert(model_dir=folder, force=True)
    assert read_config(convert.output) == written


def test_longrope_as_tensorrt_llm_reads_it(make: Maker, tmp_path: Path, convert: Converter) -> None:
    """Phi-3's own fields, the length alongside the scaling, and its first name."""
    folder = copy_model(
        make("phi3"), tmp_path, rope_scaling=LONGROPE | {"type": "su"},
        original_max_position_embeddings=32,
    )  # fmt: skip
    convert(model_dir=folder)
    config = read_config(convert.output)
    expected = {
        "position_embedding_type": "long_rope", "original_max_position_embeddings": 32,
        "longrope_scaling_short_factors": [1.0] * 4, "longrope_scaling_long_factors": [2.0] * 4,
        "rotary_scaling": LONGROPE,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("family", "change", "windows"),
    [
        ("mistral", {"sliding_window": 16}, [16, 16]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("mistral", {"sliding_window": "ABSENT"}, [4096, 4096]),
        ("ministral", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
         [8, None]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, [None, None]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2,
                   "layer_types": "ABSENT"}, [None, None]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1,
                   "layer_types": "ABSENT"}, [None, 16]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0,
                   "layer_types": "ABSENT"}, [16, 16]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True,
                   "layer_types": ["sliding_attention"] * 2}, [16, 16]),
        ("phi3", {"sliding_window": 16}, [16, 16]),
        ("phi3", {"sliding_window": None}, [None, None]),
        ("llama", {"sliding_window": 16}, [None, None]),
        ("gemma2", {"sliding_window": "ABSENT", "layer_types": "ABSENT"}, [4096, None]),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
         [None, 16]),
        ("gemma3", {"sliding_window": 16, "layer_types": "ABSENT"}, [16, 16]),
        ("gemma3", {"sliding_window": 16, "layer_types": "ABSENT", "sliding_window_pattern": 1},
         [None, None]),
        ("gemma3", {"sliding_window": 16, "layer_types": "ABSENT",
                    "_sliding_window_pattern": "ABSENT", "sliding_window_pattern": 2}, [16, None]),
    ],
)  # fmt: skip
def test_sliding_windows_are_recorded(
    family: str, change: dict[str, Any], windows: list[int | None], make: Maker, tmp_path: Path,
    convert: Converter,
) -> None:  # fmt: skip
    """One for all layers, or for some of them, as the engine takes them."""
    convert(model_dir=copy_model(make(family), tmp_path, **change))
    config, model = read_config(convert.output), read_checkpoint_config(convert.output).model
    found = [model.sliding_window if model.is_sliding(layer) else None for layer in (0, 1)]
    assert found == windows
    if family == "gemma3":  # which TensorRT-LLM reads
        assert all(
            (config["_sliding_window_pattern"] > at) == bool(windows[at - 1]) for at in (1, 2)
        )
    elif family != "gemma2":
        assert config.get("sliding_window") == max(filter(None, windows), default=None)
        assert ("layer_types" in config) == (len(set(windows)) > 1)


def test_the_window_that_tensorrt_llm_loses_is_asked_for(make: Maker, convert: Converter) -> None:
    config = read_config(convert(model_dir=make("gemma2")))
    del config["sliding_window"]
    with pytest.raises(SpecDecError, match="sliding_window is missing, as TensorRT-LLM's own"):
        parse_checkpoint_config(config)
    model = parse_checkpoint_config(config | {"sliding_window": None}).model
    assert model.is_sliding(0)
    assert model.sliding_window is None


def test_gemma_3_as_transformers_5_writes_it(
    make: Maker, tmp_path: Path, convert: Converter
) -> None:
    """The rotary embedding of either kind of layer in an object of its own."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 3e5, "rope_local_base_freq": 500.0, "rope_scaling": scaling}
    folder = copy_model(make("gemma3"), tmp_path, **old)
    convert(model_dir=folder)
    written = read_config(convert.output)
    assert (written["rotary_base"], written["rope_local_base_freq"]) == (3e5, 500.0)
    assert written["rotary_scaling"] == scaling
    new = {
        "full_attention": scaling | {"rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    set_config(folder, rope_parameters=new, **dict.fromkeys(old, "ABSENT"))
    convert(model_dir=folder, force=True)
    assert read_config(convert.output) == written


def test_granite_as_tensorrt_llm_reads_it(make: Maker, convert: Converter) -> None:
    """An attention_multiplier of 1 too, which its own converter takes for none."""
    numbers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    for given in (0.5, 1.0):
        folder = make("granite", attention_multiplier=given, logits_scaling=8.0, **numbers)
        convert(model_dir=folder, force=True)
        expected = {"attention_multiplier": given * 8**0.5, "output_multiplier_scale": 1 / 8}
        config = read_config(convert.output)
        assert {key: config[key] for key in expected | numbers} == expected | numbers
        model = read_checkpoint_config(convert.output).model
        assert model.attention_scale == pytest.approx(given)


@pytest.mark.parametrize(
    ("family", "field", "value", "expected"),
    [
        ("gpt2", "activation_function", "gelu_new", "gelu_new"),
        ("gpt2", "activation_function", "gelu_pytorch_tanh", "gelu_new"),
        ("gpt2", "activation_function", "gelu", "gelu"),
        ("opt", "activation_function", "relu", "relu"),
        ("opt", "activation_function", "gelu", "gelu"),
        ("phi", "hidden_act", "gelu", "gelu"),
        ("phi3", "hidden_act", "silu", "swiglu"),
        ("gemma", "hidden_act", "gelu", "gelu"),
        ("gemma", "hidden_activation", "gelu_pytorch_tanh", "gelu"),
    ],
)
def test_activations(
    family: str, field: str, value: str, expected: str, make: Maker, tmp_path: Path,
    convert: Converter, log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """TensorRT-LLM's names; where it computes the tanh form of an exact gelu, a warning says so."""
    convert(model_dir=copy_model(make(family), tmp_path, **{field: value}), trtllm_version="1.2")
    assert read_config(convert.output)["hidden_act"] == expected
    is_other = value == "gelu" and family != "gemma"
    assert ("TensorRT-LLM computes its tanh form" in log.text) == is_other


@pytest.mark.parametrize(
    ("family", "change", "fraction"),
    [
        ("phi", {"partial_rotary_factor": "ABSENT"}, 0.5),
        ("phi", {"partial_rotary_factor": 0.25}, 0.25),
        ("phi3", {"partial_rotary_factor": "ABSENT"}, 1.0),
        ("phi3", {"partial_rotary_factor": 0.75}, 0.75),
    ],
)
def test_rotated_part_of_a_head(
    family: str, change: dict[str, Any], fraction: float, make: Maker, tmp_path: Path,
    convert: Converter,
) -> None:  # fmt: skip
    folder = copy_model(make(family), tmp_path, **change)
    convert(model_dir=folder)
    assert read_config(convert.output)["rotary_pct"] == fraction
    assert "partial_rotary_factor" not in read_config(convert.output)
    if fraction == 0.75:
        error = convert.fail(model_dir=folder, trtllm_version="0.14", force=True)
        assert "0.75, which TensorRT-LLM 0.14's Phi-3 ignores" in error.message


@pytest.mark.parametrize("version", ["1.2", "0.14"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_opts_projections_are_multiplied_with_its_table(
    is_tied: bool, version: str, make: Maker, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    """As TensorRT-LLM's converter does; what is left is an embedding and a head of their own."""
    folder = make(
        "opt",
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        tie_word_embeddings=is_tied,
        vocab=66,
    )
    flags: dict[str, Any] = {"use_embedding_sharing": True} if version == "0.14" else {}
    flags |= {"use_parallel_embedding": True, "embedding_sharding_dim": 1}
    # As its converter does it: cast, multiplied in float32, cast; and nothing of it is split.
    convert(model_dir=folder, tp_size=2, trtllm_version=version, dtype="float16", **flags)
    assert ("--use-embedding-sharing has no effect" in log.text) == (version == "0.14")
    assert "--use-parallel-embedding has no effect" in log.text
    source = {k: v.half().float() for k, v in load_file(folder / "model.safetensors").items()}
    prefix = "model.decoder."
    table = source[f"{prefix}embed_tokens.weight"]
    head = table if is_tied else source["lm_head.weight"]
    head = (head @ source[f"{prefix}project_out.weight"]).half()
    table = (table @ source[f"{prefix}project_in.weight"].T).half()
    for rank, half in enumerate(head.chunk(2)):
        written = load_file(convert.output / f"rank{rank}.safetensors")
        assert torch.equal(written["lm_head.weight"], half)
        assert torch.equal(written["transformer.vocab_embedding.weight"], table)
        positions = source[f"{prefix}embed_positions.weight"][2:].half()
        assert torch.equal(written["transformer.position_embedding.weight"], positions)
    config = read_config(convert.output)
    assert (config["use_parallel_embedding"], config["embedding_sharding_dim"]) == (False, 1)
    joined = join_checkpoint(convert.output)
    assert "transformer.ln_f.weight" not in joined
    assert read_config(convert.output)["do_layer_norm_before"] is False
    assert KEY not in read_config(convert.output)
    checkpoint = read_checkpoint_config(convert.output)
    assert checkpoint.model.arithmetic.is_post_norm
    assert checkpoint.model.hidden_size == 64


# ---- Flags of the layout.


SHARING = {"use_embedding_sharing": True, "trtllm_version": "0.14"}
HEADS16 = {"heads": 16, "kv_heads": 16, "hidden": 64}


@pytest.mark.parametrize(
    ("family", "sizes", "flags", "message"),
    [
        ("opt", {}, SHARING | {"pp_size": 2}, "share_embedding_table with pp_size=2"),
        ("opt", {}, SHARING | {"tp_size": 2, "use_parallel_embedding": True,
                               "embedding_sharding_dim": 1},
         "share_embedding_table with embedding_sharding_dim=1"),
        ("llama", {}, {"pp_size": 3}, "num_hidden_layers=2 does not split over pp_size=3"),
        ("llama", {}, {"tp_size": 2, "moe_ep_size": 2},
         "is no mixture of experts: --moe-ep-size has no effect"),
        ("qwen2_moe", HEADS16, {"tp_size": 2, "moe_ep_size": 3}, "moe_ep_size is 3, not of 1 to 2"),
        ("qwen2_moe", HEADS16, {"tp_size": 2, "moe_tp_size": 2, "moe_ep_size": 2},
         "moe_ep_size=2 is not tp_size=2"),
        ("qwen2_moe", HEADS16, {"tp_size": 8, "moe_ep_size": 8},
         "num_experts=4 do not split over moe_ep_size=8"),
        ("qwen2_moe", HEADS16, {"tp_size": 16, "moe_ep_size": 1},
         "do not split over moe_tp_size=16"),
    ],
)  # fmt: skip
def test_layouts_that_a_model_has_not(
    family: str, sizes: dict[str, Any], flags: dict[str, Any], message: str, make: Maker,
    convert: Converter,
) -> None:  # fmt: skip
    assert message in convert.fail(model_dir=make(family, **sizes), **flags).message


@pytest.mark.parametrize("family", [name for name in NAMES if name not in NOT_IN_014])
def test_sharing_leaves_the_head_out(
    family: str, make: Maker, convert: Converter, log: pytest.LogCaptureFixture
) -> None:
    model_dir = make(family, tie_word_embeddings=True)
    flags = {"use_embedding_sharing": True, "trtllm_version": "0.14", "tp_size": 2}
    convert(model_dir=model_dir, use_parallel_embedding=True, **flags)
    check_tensors(convert.output, family, model_dir)
    assert read_config(convert.output)["share_embedding_table"] is True
    assert "lm_head.weight" not in summarize_rank(convert.output / "rank1.safetensors")
    assert [record for record in log.records if record.levelno >= logging.WARNING] == []
    convert(model_dir=model_dir, force=True, **flags)
    check_tensors(convert.output, family, model_dir)
    assert ("every rank holds the whole shared table" in log.text) == (
        family not in ("gemma", "gemma2")
    )


# ---- ReDrafter on other bases than Llama.


@pytest.mark.parametrize(
    ("family", "architecture", "base_architecture"),
    [
        ("mistral", "ReDrafterForLLaMALM", "LlamaForCausalLM"),
        ("qwen2", "ReDrafterForQWenLM", "Qwen2ForCausalLM"),
    ],
)
def test_redrafter_on_other_bases(
    family: str, architecture: str, base_architecture: str, make: Maker, tmp_path: Path,
    convert: Converter,
) -> None:  # fmt: skip
    """In one step, and added to a checkpoint, which comes to the same."""
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}
    model_dir = make(family, **(window if family == "qwen2" else {"sliding_window": 16}))
    drafter = make_drafter(tmp_path, vocab=67, exit_dim=96)
    convert(model_dir=model_dir, drafter_model_dir=drafter, tp_size=2)
    config = read_config(convert.output)
    assert config["architecture"] == architecture
    assert config["base_model_architecture"] == base_architecture
    checkpoint = read_checkpoint_config(convert.output)
    assert checkpoint.model.architecture == base_architecture
    assert checkpoint.model.sliding_window == 16
    joined = join_checkpoint(convert.output)
    for name, value in read_hugging_face(model_dir, family).items():
        assert np.array_equal(joined[name], value), name
    base = convert(model_dir=model_dir, output_dir=tmp_path / "base", tp_size=2)
    second = tmp_path / "second"
    convert(base_model_checkpoint_dir=base, drafter_model_dir=drafter, output_dir=second)
    assert read_config(second) == config
    for rank in ("rank0.safetensors", "rank1.safetensors"):
        assert (second / rank).read_bytes() == (convert.output / rank).read_bytes()


@pytest.mark.parametrize(
    ("title", "option", "make_folder", "sizes"),
    [
        ("ReDrafter", "drafter_model_dir", make_drafter, {}),
        ("Medusa", "medusa_model_dir", make_medusa_heads, {}),
        ("EAGLE-1", "eagle_model_dir", make_eagle_drafter, {"heads": 8}),
        ("EAGLE-3", "eagle_model_dir", make_eagle_drafter, {"heads": 8, "version": 3}),
    ],
)
def test_a_drafter_that_tensorrt_llm_has_no_class_for(
    title: str, option: str, make_folder: Maker, sizes: dict[str, Any], make: Maker,
    tmp_path: Path, convert: Converter, log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Convert takes it and says once who builds it; what was asked for TensorRT-LLM is refused.

    What each line's build says of each pair is tested in tests/parity/test_pairs.py.
    """
    log.set_level(logging.INFO)
    drafter = make_folder(tmp_path, vocab=67, **sizes)
    fact = f"has no {title} for PhiForCausalLM" if title != "EAGLE-3" else "has no EAGLE-3"
    convert(model_dir=make("phi"), **{option: str(drafter)}, trtllm_version="1.2")
    assert convert.report["backends"] == ["torch"]
    assert convert.report["lack"] == f"TensorRT-LLM 1.2 {fact}"
    assert log.text.count(f"1.2 {fact}: this checkpoint is for specdec's own backends") == 1
    for family, hint in (("phi", "leave --trtllm-version out"), ("llama", "convert for 1.2")):
        if family == "phi" or title in ("EAGLE-1", "EAGLE-3"):
            flags = {option: str(drafter), "output_dir": tmp_path / "no", "trtllm_version": "0.14"}
            error = convert.fail(model_dir=make(family), **flags)
            assert error.message.startswith(f"TensorRT-LLM 0.14 has no {title} for")
            assert hint in error.hint


def test_a_head_that_only_some_ranks_have_is_no_shared_one(
    make: Maker, tmp_path: Path, convert: Converter
) -> None:
    base = convert(model_dir=make("llama"), output_dir=tmp_path / "base", tp_size=2)
    tensors = load_file(base / "rank0.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, base / "rank0.safetensors")
    drafter = make_drafter(tmp_path, vocab=67)
    error = convert.fail(base_model_checkpoint_dir=base, drafter_model_dir=drafter)
    assert "rank0.safetensors lacks 1 tensor: lm_head.weight" in error.message
