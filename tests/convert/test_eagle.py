"""EAGLE drafters: every published layout is read, TensorRT-LLM's is written, errors are named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from specdec.checkpoint.config import parse_checkpoint_config, read_checkpoint_config
from specdec.checkpoint.inventory import list_tensors
from specdec.files.tensor_file import TensorFile
from specdec.model.tensors import get_rank_shape
from tests.conftest import make_eagle_drafter, make_llama
from tests.convert.checkpoints import read_config
from tests.convert.conftest import Converter
from tests.convert.golden_models import GOLDEN, read_ranks
from tests.engines import call

NUM_LAYERS = 8  # of the target: SafeAILab's default layers are 1, 3 and 4
AUX_LAYERS = (1, 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), layers=NUM_LAYERS, vocab=131)


@pytest.fixture(scope="module")
def eagle1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of its own number: 8 and 2 where the target has 4 and 2."""
    return make_eagle_drafter(tmp_path_factory.mktemp("e1"), vocab=131, heads=8, rope_theta=5e5)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle_drafter(
        tmp_path_factory.mktemp("e3"), version=3, vocab=131, draft_vocab=70, aux_layers=AUX_LAYERS
    )


Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


def copy_drafter(source: Path, folder: Path, edit: Edit) -> str:
    """Copy a drafter with its config and tensors changed."""
    shutil.copytree(source, folder)
    config, tensors = read_config(folder), load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


# ---- What is written.


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_eagle1_is_written_as_tensorrt_llm_reads_it(
    tp_size: int, target: Path, eagle1: Path, convert: Converter
) -> None:
    """Against the layout as its loader describes it, computed here by hand."""
    convert(model_dir=target, eagle_model_dir=str(eagle1), tp_size=tp_size, num_eagle_layers=3)
    own, base = load_file(eagle1 / "model.safetensors"), load_file(target / "model.safetensors")
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    height = -(-131 // tp_size)
    head = np.zeros((height * tp_size, 64), np.float32)
    head[:131] = base["lm_head.weight"]
    for rank in range(tp_size):
        written = load_file(convert.output / f"rank{rank}.safetensors")

        def take(array: Any, parts: int = tp_size, at: int = rank, axis: int = 0) -> Any:
            return np.split(array, parts, axis)[at]

        # Two K/V heads over four ranks: each goes to two.
        kv_parts, kv_at = min(2, tp_size), rank * min(2, tp_size) // tp_size
        wanted = {
            "drafter.fc.weight": take(own["fc.weight"]),
            "drafter.fc.bias": take(own["fc.bias"]),
            "drafter.vocab_embedding.weight": own["embed_tokens.weight"],
            "drafter.layers.0.attention.qkv.weight": np.concatenate(
                [
                    take(own[attention + "q_proj.weight"]),
                    take(own[attention + "k_proj.weight"], kv_parts, kv_at),
                    take(own[attention + "v_proj.weight"], kv_parts, kv_at),
                ]
            ),
            "drafter.layers.0.attention.dense.weight": take(
                own[attention + "o_proj.weight"], axis=1
            ),
            "drafter.layers.0.mlp.fc.weight": take(own[mlp + "gate_proj.weight"]),
            "drafter.layers.0.mlp.gate.weight": take(own[mlp + "up_proj.weight"]),
            "drafter.layers.0.mlp.proj.weight": take(own[mlp + "down_proj.weight"], axis=1),
            "drafter.layers.0.post_layernorm.weight": own[
                "layers.0.post_attention_layernorm.weight"
            ],
            "lm_head.weight": take(head),
        }
        names = {f"eagle_nets.{net}.{name}" for net in range(3) for name in wanted}
        assert {name for name in written if name.startswith("eagle")} == names
        for net in range(3):
            for name, array in wanted.items():
                np.testing.assert_array_equal(written[f"eagle_nets.{net}.{name}"], array, name)
        assert "transformer.layers.7.attention.qkv.weight" in written


def test_eagle1_config(target: Path, eagle1: Path, convert: Converter) -> None:
    convert(model_dir=target, eagle_model_dir=str(eagle1), tp_size=2)
    config = read_config(convert.output)
    assert config["architecture"] == "EagleForCausalLM"
    assert config["base_architecture"] == "LlamaForCausalLM"
    numbers = {key: config[key] for key in config if "eagle" in key or key.startswith("max_")}
    net = numbers.pop("eagle_net_config")
    assert numbers == {
        "num_eagle_layers": 4, "max_draft_len": 63, "max_non_leaves_per_layer": 10,
        "max_position_embeddings": 512,
    }  # fmt: skip
    assert net == {
        "architecture": "LlamaForCausalLM", "dtype": "float32", "logits_dtype": "float32",
        "position_embedding_type": "rope_gpt_neox", "mapping": config["mapping"],
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "use_parallel_embedding": False, "embedding_sharding_dim": 0, "vocab_size": 131,
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_size": 8, "intermediate_size": 96, "norm_epsilon": 1e-6,
        "max_position_embeddings": 512, "rotary_base": 500000.0, "rotary_scaling": None,
        "hidden_act": "silu",
    }  # fmt: skip
    assert convert.report["method"] == "eagle"


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("flags", [{}, {"tp_size": 2, "use_parallel_embedding": True}])
def test_what_is_written_is_read_back(
    version: int, flags: Any, target: Path, eagle1: Path, eagle3: Path, convert: Converter
) -> None:
    drafter = eagle1 if version == 1 else eagle3
    convert(model_dir=target, eagle_model_dir=str(drafter), max_draft_len=20, **flags)
    checkpoint = parse_checkpoint_config(read_config(convert.output))
    assert checkpoint.mode == "eagle"
    assert checkpoint.drafter is not None
    written = {key: read_config(convert.output)[key] for key in checkpoint.drafter.to_checkpoint()}
    net = written["eagle_net_config"]
    ours = checkpoint.drafter.to_checkpoint()
    assert ours.pop("eagle_net_config").items() <= net.items()
    assert ours == {key: value for key, value in written.items() if key != "eagle_net_config"}
    specs = list_tensors(checkpoint.model, checkpoint.drafter)
    shapes = {name: list(get_rank_shape(spec, checkpoint.model)) for name, spec in specs.items()}
    for rank in read_ranks(convert.output):
        assert {name: info[1] for name, info in rank.items()} == shapes
    call("verify", "--checkpoint-dir", convert.output)


# ---- What is read.


def to_safeailab(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """SafeAILab's: the only layer has a name of its own, and config.json tells no layers."""
    del config["eagle_config"]
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


def to_speculators(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """speculators': layers count as those that are entered, the layer's config is an object."""
    net = {key: config.pop(key) for key in list(config) if key != "draft_vocab_size"}
    del net["eagle_config"]
    config |= {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUX_LAYERS],
        "norm_before_residual": False, "transformer_layer_config": net,
        "speculators_config": {"algorithm": "eagle3"},
    }  # fmt: skip


def to_old_speculators(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The same before it told the layers."""
    to_speculators(config, tensors)
    del config["eagle_aux_hidden_state_layer_ids"]


def to_specforge(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """SpecForge's: SafeAILab's name, ModelOpt's object."""
    layers = config["eagle_config"]
    to_safeailab(config, tensors)
    config["eagle_config"] = layers


@pytest.mark.thorough
@pytest.mark.parametrize("edit", [to_safeailab, to_speculators, to_old_speculators, to_specforge])
def test_every_layout_of_eagle3_gives_the_same(
    edit: Edit, target: Path, eagle3: Path, convert: Converter, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"model_dir": target, "tp_size": 2}
    expected = convert(eagle_model_dir=str(eagle3), output_dir=tmp_path / "expected", **flags)
    convert(eagle_model_dir=copy_drafter(eagle3, tmp_path / "other", edit), **flags)
    assert read_ranks(convert.output) == read_ranks(expected)
    config = read_config(convert.output)
    assert config == read_config(expected)
    assert config["architecture"] == "Eagle3ForCausalLM"
    assert config["eagle3"] == {
        "aux_layers": list(AUX_LAYERS), "draft_vocab_size": 70, "norm_before_residual": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "is_midlayer"),
    [
        ({"num_hidden_layers": 40}, True),  # SafeAILab's for Vicuna 13B
        ({"model_type": "qwen2"}, True),  # SpecForge's for QwQ
        ({"model_type": "phi3"}, False),  # SpecForge's for Phi-4
        ({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, False),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, False),  # Qwen2.5-VL
    ],
)
def test_fields_that_the_writers_class_does_not_read(
    fields: dict[str, Any], is_midlayer: bool, target: Path, eagle3: Path, convert: Converter,
    tmp_path: Path,
) -> None:  # fmt: skip
    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config.update(fields)
        if is_midlayer:
            to_specforge(config, tensors)

    drafter = copy_drafter(eagle3, tmp_path / "other", edit)
    expected = convert(model_dir=target, eagle_model_dir=str(eagle3))
    written = convert(model_dir=target, eagle_model_dir=drafter, output_dir=tmp_path / "ckpt")
    assert read_config(written) == read_config(expected)
    assert read_ranks(written) == read_ranks(expected)


@pytest.mark.parametrize(
    ("key", "layers"),
    [("eagle_aux_hidden_state_layer_ids", [2, 3, 4]), ("aux_hidden_states_layer_ids", [1, 2, 3])],
)
def test_a_list_at_the_top_alone(
    key: str, layers: list[int], target: Path, eagle3: Path, convert: Converter, tmp_path: Path
) -> None:
    """Counts the layers that are entered, as vLLM and llama.cpp do; AngelSlim's those left."""

    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        del config["eagle_config"]
        config[key] = layers

    convert(model_dir=target, eagle_model_dir=copy_drafter(eagle3, tmp_path / "other", edit))
    assert read_config(convert.output)["eagle3"]["aux_layers"] == [1, 2, 3]


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_normed_residual_of_speculators(
    kind: str, is_told: bool, target: Path, eagle3: Path, convert: Converter, tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Where config.json does not tell, vLLM takes true, for which these folders are written."""

    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        to_speculators(config, tensors)
        del config["norm_before_residual"]
        config |= {"speculators_model_type": kind} | (
            {"norm_before_residual": True} if is_told else {}
        )
        if kind == "peagle":
            config["mask_token_id"] = 3
            tensors["mask_hidden"] = np.ones((1, 192), np.float32)

    convert(model_dir=target, eagle_model_dir=copy_drafter(eagle3, tmp_path / "other", edit))
    assert read_config(convert.output)["eagle3"]["norm_before_residual"] is True
    assert ("has no norm_before_residual; taken as true" in log.text) != is_told


def put_norms(where: str, **norms: bool) -> Edit:
    """EAGLE-3.1's norms, told in one of the places where they are read."""

    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        generator = np.random.default_rng(5)
        names = ["input_norm"] if norms.get("norm_before_fc") else []
        names += [f"fc_norm.{part}" for part in range(3)] if norms.get("fc_norm") else []
        for name in names:
            size = 64 * (1 if "." in name else 3)
            tensors[f"{name}.weight"] = generator.standard_normal(size, np.float32)
        if where == "speculators":
            to_speculators(config, tensors)
        (config["eagle_config"] if where == "eagle_config" else config).update(norms)

    return edit


@pytest.mark.parametrize("norm", ["norm_before_fc", "fc_norm"])
def test_the_norms_of_eagle31(
    norm: str, target: Path, eagle3: Path, convert: Converter, tmp_path: Path
) -> None:
    written = []
    for where in ("", "eagle_config", "speculators"):
        edit = put_norms(where, norm_output=True, **{norm: True})
        drafter = copy_drafter(eagle3, tmp_path / (where or "top"), edit)
        folder = tmp_path / f"checkpoint-{where}"
        convert(model_dir=target, eagle_model_dir=drafter, output_dir=folder, tp_size=2)
        written.append((read_config(folder), read_ranks(folder)))
    assert written[0] == written[1] == written[2]
    eagle = written[0][0]["eagle3"]
    assert {name for name, value in eagle.items() if value is True} == {norm, "norm_output"}
    own = load_file(tmp_path / "top" / "model.safetensors")
    rank = load_file(tmp_path / "checkpoint-" / "rank1.safetensors")
    for name in own:
        if name.startswith(("input_norm", "fc_norm")):
            np.testing.assert_array_equal(rank[f"eagle_nets.0.drafter.{name}"], own[name])
    parse_checkpoint_config(written[0][0])
    error = convert.fail(
        model_dir=target, output_dir=tmp_path / "no",
        eagle_model_dir=copy_drafter(
            eagle3, tmp_path / "both", put_norms("", norm_before_fc=True, fc_norm=True)
        ),
    )  # fmt: skip
    assert "norm_before_fc and fc_norm are both true" in error.message


def test_modelopt_export(convert: Converter, tmp_path: Path) -> None:
    """The real export: no embedding, no map of the vocabulary, yarn in its config.json."""
    target = make_llama(tmp_path, layers=NUM_LAYERS, vocab=512, dtype="bfloat16")
    drafter = GOLDEN / "eagle" / "modelopt_llama"
    convert(model_dir=target, eagle_model_dir=str(drafter))
    config = read_config(convert.output)
    assert config["eagle3"]["aux_layers"] == [1, 3, 4]
    assert config["eagle_net_config"]["rotary_scaling"]["rope_type"] == "yarn"
    written = TensorFile(convert.output / "rank0.safetensors")
    own = TensorFile(drafter / "model.safetensors")
    base = TensorFile(target / "model.safetensors")

    def same(name: str, *others: str, file: TensorFile = own) -> None:
        wanted = np.concatenate([file.read(other) for other in others])
        np.testing.assert_array_equal(written.read(f"eagle_nets.0.{name}"), wanted)

    layer = "layers.0."
    same("drafter.fc.weight", "fc.weight")
    same("drafter.ln_f.weight", "norm.weight")
    same("lm_head.weight", "lm_head.weight")
    same("drafter.vocab_embedding.weight", "model.embed_tokens.weight", file=base)
    same(f"drafter.{layer}hidden_norm.weight", f"{layer}hidden_norm.weight")
    same(f"drafter.{layer}input_layernorm.weight", f"{layer}input_layernorm.weight")
    same(
        f"drafter.{layer}attention.qkv.weight",
        *(f"{layer}self_attn.{kind}_proj.weight" for kind in "qkv"),
    )
    assert "eagle_nets.0.d2t" not in written.tensors


def test_a_pickle_and_what_the_folder_lacks(
    target: Path, eagle1: Path, convert: Converter, tmp_path: Path
) -> None:
    """pytorch_model.bin, as published; the target's embedding, and zeros for a bias."""
    folder = tmp_path / "published"
    folder.mkdir()
    shutil.copy(eagle1 / "config.json", folder)
    own = load_file(eagle1 / "model.safetensors")
    kept = {
        n: torch.from_numpy(a)
        for n, a in own.items()
        if n not in ("fc.bias", "embed_tokens.weight")
    }
    torch.save(kept, folder / "pytorch_model.bin")
    convert(model_dir=target, eagle_model_dir=str(folder), tp_size=2)
    for rank in (0, 1):
        written = load_file(convert.output / f"rank{rank}.safetensors")
        prefix = "eagle_nets.1.drafter."
        np.testing.assert_array_equal(written[prefix + "fc.bias"], np.zeros(32, np.float32))
        np.testing.assert_array_equal(
            written[prefix + "vocab_embedding.weight"],
            written["transformer.vocab_embedding.weight"],
        )
        half = np.split(own["fc.weight"], 2)[rank]
        np.testing.assert_array_equal(written[prefix + "fc.weight"], half)


# ---- P-EAGLE.


KEY, MASK = "eagle_aux_hidden_state_layer_ids", "mask_token_id"


def put_mask(
    where: str, shape: tuple[int, ...] = (1, 1, 192), token: Any = 9, **fields: Any
) -> Edit:
    """A P-EAGLE drafter: as vLLM reads it, the token by one of its names, or as speculators'."""

    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        values = np.random.default_rng(5).standard_normal(192, np.float32)
        tensors["mask_hidden"] = values[: math.prod(shape)].reshape(shape)
        if where == "speculators":
            to_speculators(config, tensors)
            config["speculators_model_type"] = "peagle"
        elif where == "SpecForge":  # whose list says as its EAGLE-3's which layers are left
            config["architectures"] = ["PEagleDraftModel"]
        elif where == "pard_token":  # vLLM takes either list for those that are entered
            config["eagle_config"][KEY] = [layer + 1 for layer in AUX_LAYERS]
        else:
            config[KEY] = [layer + 1 for layer in AUX_LAYERS]
        name = MASK if where in ("speculators", "SpecForge") else where
        config.update({name: token} | fields)

    return edit


def test_every_layout_of_p_eagle_gives_the_same(
    target: Path, eagle3: Path, convert: Converter, tmp_path: Path
) -> None:
    written = []
    for where, shape in (
        ("mask_token_id", (1, 1, 192)), ("pard_token", (1, 192)), ("ptd_token_id", (1, 1, 192)),
        ("speculators", (1, 1, 192)), ("SpecForge", (1, 1, 192)),
    ):  # fmt: skip
        drafter = copy_drafter(eagle3, tmp_path / where, put_mask(where, shape))
        folder = tmp_path / f"checkpoint-{where}"
        convert(model_dir=target, eagle_model_dir=drafter, output_dir=folder, tp_size=2)
        written.append((read_config(folder), read_ranks(folder)))
    assert all(one == written[0] for one in written)
    config = written[0][0]
    assert config["num_eagle_layers"] == 8
    assert config["eagle3"]["mask_token_id"] == 9
    params: Any = read_checkpoint_config(folder).drafter
    assert params.to_checkpoint()["eagle3"] == config["eagle3"]
    for rank in range(2):
        found = load_file(folder / f"rank{rank}.safetensors")["eagle_nets.0.drafter.mask_hidden"]
        own = load_file(tmp_path / "pard_token" / "model.safetensors")["mask_hidden"]
        np.testing.assert_array_equal(found[0], own)


# ---- What is refused.


def drop(name: str) -> Edit:
    return lambda config, tensors: tensors.pop(name)


def put(**fields: Any) -> Edit:
    return lambda config, tensors: config.update(fields)


def put_eagle(**fields: Any) -> Edit:
    return lambda config, tensors: config["eagle_config"].update(fields)


def put_speculators(**fields: Any) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        to_speculators(config, tensors)
        net = config["transformer_layer_config"]
        (net if "model_type" in fields else config).update(fields)

    return edit


def put_tensor(name: str, value: Any) -> Edit:
    return lambda config, tensors: tensors.update({name: np.array(value)})


def shift_offset(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["d2t"][5] = tensors["d2t"][4] - 1  # now the same token


def leave_vocabulary(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["d2t"][69] = 100


def tie_head(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config.update(tie_word_embeddings=True, draft_vocab_size=131)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]


def flip_flag(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["t2d"][0] ^= True


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("version", "edit", "message"),
    [
        (1, drop("fc.weight"), "holds no fc.weight, which every EAGLE drafter has"),
        (1, drop("layers.0.self_attn.k_proj.weight"), "lacks 1 tensor: layers.0.self_attn.k_proj"),
        (1, put_tensor("layers.0.self_attn.k_proj.bias", [0.0]), "would not use: layers.0."),
        (1, put_tensor("eagle_module.fc.weight", [0.0]), "(eagle_module.fc.weight), and another"),
        (1, put_tensor("midlayer.x", [0.0]), "two namings of one layer"),
        (1, put(vocab_size=130), "drafter's vocab_size is 130, the target's 131"),
        (1, put(num_hidden_layers=2), "lacks 9 tensors"),
        (1, put(num_hidden_layers=2**60), "is said to have"),
        (1, put(attention_bias=True), "attention_bias is True"),
        (1, put(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (1, put(logit_scale=0.5), "logit_scale is 0.5"),
        (1, put(head_dim=15), "rotates 15 dimensions, which is odd"),
        (1, put(num_key_value_heads=3), "is not a multiple of num_key_value_heads=3"),
        (3, put_eagle(eagle_aux_hidden_state_layer_ids=[1, 3, 8]), "layers [1, 3, 8], the target"),
        (3, put_eagle(eagle_aux_hidden_state_layer_ids=[1, 3, 3]), "layers [1, 3, 3], the target"),
        (3, put_eagle(eagle_aux_hidden_state_layer_ids=[1, 3]), "for the outputs of 2 layers"),
        (3, put_eagle(eagle_aux_hidden_state_layer_ids="1"), "layer_ids is '1'"),
        (3, put_eagle(use_last_layernorm=False), "use_last_layernorm is False"),
        (3, put_eagle(use_mtp_layernorm=True), "use_mtp_layernorm is True"),
        (3, put_eagle(parallel_draft_step=2), "parallel_draft_step is 2"),
        (3, put_mask("other"), "mask_hidden is there, and none of mask_token_id, pard_token, ptd"),
        (3, put_mask("pard_token", ptd_token_id=8), "pard_token and ptd_token_id name different"),
        (3, put_mask("pard_token", (1, 191)), "mask_hidden has shape [1, 191], not [1, 192]"),
        (3, put_mask("pard_token", (192,)), "mask_hidden has shape [192], not [1, 192]"),
        (3, put_mask("pard_token", token="9"), "pard_token is '9', not a whole number"),
        (3, put_mask("pard_token", token=131), "mask_token_id is 131, the target's vocab_size 131"),
        (3, put(parallel_drafting=True), "parallel_drafting is True, and there is no mask_hidden"),
        (3, put(pard_token=5), "pard_token is 5, and there is no mask_hidden"),
        (3, put_speculators(speculators_model_type="peagle", mask_token_id=5), "mask_hidden"),
        (3, put_speculators(norm_before_fc=True), "lacks 1 tensor: input_norm.weight"),
        (3, put_speculators(norm_output=1), "norm_output is 1, not a boolean"),
        (3, put_speculators(model_type="qwen3"), "model_type is 'qwen3'"),
        (3, put_speculators(model_type="llama", layer_types=["sliding_attention"]), "layer_types"),
        (3, put_speculators(speculators_model_type="eagle"), "speculators_model_type is 'eagle'"),
        (3, put(architectures=["LlamaForCausalLM"], model_type="phi3"), "model_type is 'phi3'"),
        (3, put_speculators(eagle_aux_hidden_state_layer_ids=[0, 2, 4]), "layers [-1, 1, 3]"),
        (1, put(rope_is_neox_style=False), "rope_is_neox_style is False: rotary embeddings of"),
        (3, put(rope_interleave=True), "rope_interleave is True: rotary embeddings of"),
        (3, put_eagle(rotary_interleaved=1), "eagle_config.rotary_interleaved is 1: rotary"),
        (3, put_speculators(model_type="llama", is_neox_style=False),
         "transformer_layer_config.is_neox_style is False: rotary"),
        (3, shift_offset, "maps 70 drafted tokens to 69 from 0 to"),
        (3, leave_vocabulary, "to 169; the target has 131"),
        (3, flip_flag, "t2d and d2t disagree"),
        (3, put_tensor("t2d", np.zeros(136, np.bool_)), "t2d has shape [136], and the target's"),
        (3, drop("d2t"), "lacks 1 tensor: d2t"),
        (3, drop("lm_head.weight"), "lacks 1 tensor: lm_head.weight"),
        (3, tie_head, "tie_word_embeddings is true and there is no lm_head.weight"),
        (3, put_tensor("d2t", np.zeros(70, np.int32)), "d2t is int32"),
        (3, put(draft_vocab_size=71), "d2t is int64 [70], not int64 [71]"),
    ],
)  # fmt: skip
def test_drafters_at_odds(
    version: int, edit: Edit, message: str, target: Path, eagle1: Path, eagle3: Path,
    convert: Converter, tmp_path: Path,
) -> None:  # fmt: skip
    drafter = copy_drafter(eagle1 if version == 1 else eagle3, tmp_path / "bad", edit)
    error = convert.fail(model_dir=target, eagle_model_dir=drafter)
    assert message in error.message


def test_a_map_of_a_full_vocabulary(
    target: Path, eagle3: Path, convert: Converter, tmp_path: Path
) -> None:
    """SafeAILab's files have one always; it must then say nothing."""

    def widen(offset: int) -> Edit:
        def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
            config["draft_vocab_size"] = 131
            tensors["lm_head.weight"] = np.ones((131, 64), np.float32)
            tensors["d2t"] = np.full(131, offset)
            tensors["t2d"] = np.zeros(131, np.bool_)

        return edit

    good = copy_drafter(eagle3, tmp_path / "good", widen(0))
    convert(model_dir=target, eagle_model_dir=good)
    assert "eagle_nets.0.d2t" not in read_ranks(convert.output)[0]
    bad = copy_drafter(eagle3, tmp_path / "bad", widen(1))
    error = convert.fail(model_dir=target, eagle_model_dir=bad, output_dir=tmp_path / "no")
    assert "d2t renames tokens of a vocabulary that is not reduced" in error.message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trtllm_version": "0.14"}, "TensorRT-LLM 0.14 has no EAGLE"),
        ({"max_draft_len": 257}, "--max-draft-len is 257, EAGLE trees have at most 256 tokens"),
        ({"tp_size": 4, "eagle": 3}, "num_key_value_heads=3 do not split over tp_size=4"),
        ({"tp_size": 3}, "do not split over tp_size=3"),
    ],
)
def test_flags_and_ranks(
    flags: dict[str, Any], message: str, target: Path, eagle1: Path, convert: Converter,
    tmp_path: Path,
) -> None:  # fmt: skip
    drafter = eagle1
    if flags.pop("eagle", None):
        drafter = make_eagle_drafter(tmp_path, vocab=131, heads=12, kv_heads=3, hidden=96)
        target = make_llama(tmp_path, vocab=131, hidden=96, kv_heads=4)
    error = convert.fail(model_dir=target, eagle_model_dir=str(drafter), **flags)
    assert message in error.message


def test_a_target_saved_with_its_drafter(target: Path, convert: Converter, tmp_path: Path) -> None:
    folder = tmp_path / "together"
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["eagle_module.fc.weight"] = np.zeros((64, 128), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = convert.fail(model_dir=folder)
    assert "holds a drafter besides the target: eagle_module.fc.weight" in error.message


DESCRIPTION = {
    "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 96, "hidden_size": 64,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "rope_theta": 500000.0, "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
}  # fmt: skip


def save_together(
    target: Path, drafter: Path, folder: Path, description: dict[str, Any] | None, **more: Any
) -> Path:
    """Write a target with its drafter as ModelOpt's trainer saves both."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    own = {n: t for n, t in load_file(drafter / "model.safetensors").items() if "embed" not in n}
    tensors |= {f"eagle_module.{name}": tensor for name, tensor in {**own, **more}.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"modelopt_state_dict": []}, folder / "modelopt_state.pth")
    config = read_config(folder)
    if description is not None:
        (folder / "config.json").write_text(json.dumps(config | {"eagle": description}))
    return folder


@pytest.mark.parametrize("has_own_layers", [True, False])
def test_a_drafter_saved_with_its_target(
    target: Path, eagle1: Path, convert: Converter, tmp_path: Path, has_own_layers: bool
) -> None:
    """As ModelOpt's trainer saves both: the same checkpoint as of the drafter alone."""
    description = DESCRIPTION if has_own_layers else DESCRIPTION | {"head_dim": 8}
    together = save_together(target, eagle1, tmp_path / "together", description)
    alone = tmp_path / "alone"
    shutil.copytree(eagle1, alone)
    tensors = load_file(alone / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, alone / "model.safetensors", metadata={"format": "pt"})
    if not has_own_layers:  # the target's tables turn them then
        (alone / "config.json").write_text(json.dumps(read_config(alone) | {"rope_theta": 1e4}))
    convert(model_dir=target, eagle_model_dir=str(alone))
    expected = read_config(convert.output), read_ranks(convert.output)
    for model in (target, together):  # the target alone, and the one beside the drafter
        convert(model_dir=model, eagle_model_dir=str(together), force=True)
        assert (read_config(convert.output), read_ranks(convert.output)) == expected


def test_a_drafter_saved_with_its_target_and_not_described(
    target: Path, convert: Converter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config(target)
    drafter = make_eagle_drafter(
        tmp_path, vocab=131, heads=config["num_attention_heads"], own_embedding=False,
        kv_heads=config["num_key_value_heads"], intermediate=config["intermediate_size"],
    )  # fmt: skip
    together = save_together(target, drafter, tmp_path / "together", None)
    convert(model_dir=target, eagle_model_dir=str(together))
    assert "its layers are taken for the target's kind" in caplog.text
    net = read_config(convert.output)["eagle_net_config"]
    assert (net["num_hidden_layers"], net["intermediate_size"]) == (1, config["intermediate_size"])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("hidden_norm.weight", "an EAGLE-3 (hidden_norm.weight), which its config.json does not"),
        ("norm.weight", "an EAGLE-1 with norm.weight: that of the paper"),
        ("layers.0.self_attn.q_proj.bias", "would not use: layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_drafter_saved_with_its_target_of_another_kind(
    target: Path, eagle1: Path, convert: Converter, tmp_path: Path, tensor: str, message: str
) -> None:
    more = {tensor: np.zeros(64, np.float32)}
    together = save_together(target, eagle1, tmp_path / "together", DESCRIPTION, **more)
    error = convert.fail(model_dir=target, eagle_model_dir=str(together))
    assert message in error.message


def test_no_head_to_draft_with(
    target: Path, eagle1: Path, convert: Converter, tmp_path: Path
) -> None:
    """A target whose head is missing is an error of its own, and no head is made up."""
    folder = tmp_path / "headless"
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = convert.fail(model_dir=folder, eagle_model_dir=str(eagle1))
    assert "lacks 1 tensor: lm_head.weight" in error.message
    assert "does not hold what makes eagle_nets.0.lm_head.weight" in error.message
