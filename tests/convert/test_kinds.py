"""A model of no family is told by what it computes; a wrapper's text model is taken out of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from specdec.convert.families import FAMILIES
from specdec.convert.kinds import MARKS, describe_kind
from specdec.text.pretrained import load_model
from tests.conftest import change_tensors, make_llama
from tests.convert.checkpoints import join_checkpoint, read_config
from tests.convert.conftest import Converter
from tests.engines import continue_greedily, list_requests, make_engine
from tests.families import make_family_model, make_hybrid

NAMES = {family.name: family for family in FAMILIES.values()}
# transformers' configuration, changes of it, and a tensor's name: the nearest of the families, the
# first of these that is here, and something that none of them has.
UNKNOWN: list[tuple[str, dict[str, Any], str, list[str], str]] = [
    ("GptOssConfig", {}, "model.layers.0.self_attn.sinks", ["mixtral", "llama"],
     "attention sinks (model.layers.0.self_attn.sinks)"),
    ("DeepseekV3Config", {}, "", ["qwen2_moe", "mixtral", "llama"],
     "attention over a compressed cache (MLA) (kv_lora_rank)"),
    ("Llama4TextConfig", {}, "", ["qwen3_moe", "mixtral", "qwen3"],
     "attention in chunks (attention_chunk_size)"),
    ("MambaConfig", {}, "", ["llama"],
     "state space, convolution or linear attention layers (state_size)"),
    ("BloomConfig", {"slow_but_exact": True}, "transformer.wpe.weight", ["gpt2"],
     "positions as a bias of the attention (slow_but_exact)"),
    ("T5Config", {}, "", ["llama"], "an encoder (is_encoder_decoder)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "tensor", "nearest", "told"), UNKNOWN)
def test_an_unknown_model_is_told_by_what_it_computes(
    name: str, changes: dict[str, Any], tensor: str, nearest: list[str], told: str
) -> None:
    import transformers

    config = getattr(transformers, name)().to_dict() | changes
    found, lacking = describe_kind(config, [tensor], NAMES)
    assert found == next(family for family in nearest if family in NAMES)
    assert told in lacking


def test_a_model_without_marks_is_like_a_llama() -> None:
    import transformers

    assert describe_kind(transformers.Olmo2Config().to_dict(), (), NAMES) == ("llama", [])


def test_what_a_family_has_is_not_told_as_lacking() -> None:
    """The marks of each family that is here are told of nothing that it lacks."""
    for mark in MARKS:
        for family in set(mark.families) & set(NAMES):
            assert describe_kind({}, (), [family])[1] == []
            if mark.keys:
                assert describe_kind({mark.keys[0]: 7}, (), [family])[1] == []
    assert describe_kind({"num_local_experts": 8}, (), ["llama"]) == (
        "llama", ["experts (num_local_experts)"]
    )  # fmt: skip
    assert describe_kind({"num_local_experts": 0, "use_qk_norm": False}, (), ["llama"])[1] == []


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 8},
         "modules of other names (model.final_norm, model.layers.N.channel_pre_norm"),
        ("Olmo", {}, "lacks model.layers.N.input_layernorm, model.layers.N.post_attention"),
        ("Olmo2", {}, "lacks model.layers.N.input_layernorm, model.layers.N.pre_feedforward"),
        ("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_inner": 48},
         "modules of other names (transformer.h.N.attn.k_proj"),
        ("Cohere", {}, "lacks model.layers.N.post_attention_layernorm"),
        ("Persimmon", {}, "modules of other names"),
    ],
)  # fmt: skip
def test_an_unknown_model_is_like_another_only_where_it_was_looked_for(
    name: str, sizes: dict[str, Any], told: str, convert: Converter, tmp_path: Path
) -> None:
    import transformers

    common = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**common | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "model")
    message = convert.fail(model_dir=tmp_path / "model").message
    assert "looks like" not in message
    assert told in message


def test_what_has_all_modules_is_not_called_alike(convert: Converter, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    config = read_config(model) | {"architectures": ["NewForCausalLM"], "model_type": "new"}
    (model / "config.json").write_text(json.dumps(config))
    message = convert.fail(model_dir=model).message
    assert "has the modules of LlamaForCausalLM" in message
    assert "whether it computes the same is not known" in message


def test_two_names_of_a_model_that_disagree(convert: Converter, tmp_path: Path) -> None:
    """transformers goes by model_type; a type that is no family's contradicts nothing."""
    model = make_llama(tmp_path)
    config = read_config(model)
    for model_type in ("mistral", "qwen2", "gemma3_text"):
        (model / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        message = convert.fail(model_dir=model).message
        assert f"LlamaForCausalLM, and model_type is '{model_type}', which is " in message
    for known in ({"model_type": "mine"}, {"model_type": None}, {
        "architectures": ["MinistralForCausalLM"], "model_type": "mistral",
    }):  # fmt: skip
        (model / "config.json").write_text(json.dumps(config | known))
        convert(model_dir=model, force=True)


def test_models_without_a_head(convert: Converter, tmp_path: Path) -> None:
    """A class of transformers' without a head is its family's, whose head may be the embedding."""
    model = make_llama(tmp_path)
    config = read_config(model) | {"architectures": ["LlamaModel"]}
    with change_tensors(model) as tensors:
        del tensors["lm_head.weight"]
    (model / "config.json").write_text(json.dumps(config))
    assert "lacks 1 tensor: lm_head.weight" in convert.fail(model_dir=model).message
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    convert(model_dir=model)


# ---- Wrappers.


def make_wrapper(
    folder: Path, target: Path, architecture: str, *, is_old: bool, **text: Any
) -> Path:
    """A text model's folder as a wrapper holds it, its vision tower alongside it."""
    folder.mkdir()
    inner = read_config(target)
    tensors = load_file(target / "model.safetensors")
    body = "language_model.model." if is_old else "model.language_model."
    head = "language_model.lm_head." if is_old else "lm_head."
    renamed = {
        body + name.removeprefix("model.") if name.startswith("model.")
        else head + name.removeprefix("lm_head."): tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    vision = "" if is_old else "model."
    some = next(iter(tensors.values()))
    renamed |= {
        f"{vision}vision_tower.patch_conv.weight": some.clone(),
        f"{vision}multi_modal_projector.linear_1.weight": some.clone(),
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    left_out = ("architectures", "torch_dtype", "dtype", "transformers_version")
    config = {
        "architectures": [architecture], "torch_dtype": "float32",
        "text_config": {k: v for k, v in inner.items() if k not in left_out} | text,
        "vision_config": {"hidden_size": 8},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("is_old", [True, False])
def test_a_wrappers_text_model_is_taken_out(
    is_old: bool, convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    log.set_level("INFO")
    target = make_llama(tmp_path)
    plain = join_checkpoint(convert(model_dir=target))
    wrapper = make_wrapper(
        tmp_path / "wrapper", target, "LlavaForConditionalGeneration", is_old=is_old
    )
    output = convert(model_dir=wrapper, output_dir=tmp_path / "second", tp_size=2)
    assert read_config(output)["architecture"] == "LlamaForCausalLM"
    found = join_checkpoint(output)
    assert found.keys() == plain.keys()
    assert all(np.array_equal(found[name], value) for name, value in plain.items())
    assert "of LlavaForConditionalGeneration is taken; 2 vision tensors are left out" in log.text
    tensors = load_file(wrapper / "model.safetensors")
    save_file(tensors | {"unknown.weight": tensors.popitem()[1]}, wrapper / "model.safetensors")
    error = convert.fail(model_dir=wrapper, output_dir=tmp_path / "no")
    assert "1 tensor that the conversion would not use: unknown.weight" in error.message


def test_a_hybrids_text_model_is_taken_out_of_what_is_published(
    convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Vision tensors and those of the layers that draft are left out, and told."""
    log.set_level("INFO")
    target = make_hybrid(tmp_path)
    plain = join_checkpoint(convert(model_dir=target))
    name = "Qwen3_5ForConditionalGeneration"
    wrapper = make_wrapper(tmp_path / "wrapper", target, name, is_old=False)
    tensors = load_file(wrapper / "model.safetensors")
    names = {
        "model.vision_tower.patch_conv": "model.visual.patch_embed.proj",
        "model.multi_modal_projector.linear_1": "mtp.layers.0.self_attn.q_proj",
    }
    tensors = {
        names.get(name.removesuffix(".weight"), name.removesuffix(".weight")) + ".weight"
        if name.endswith(".weight") else name: tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    save_file(
        tensors | {"mtp.fc.weight": tensors["lm_head.weight"].clone()},
        wrapper / "model.safetensors",
    )
    output = convert(model_dir=wrapper, output_dir=tmp_path / "second")
    found = join_checkpoint(output)
    assert found.keys() == plain.keys()
    assert all(np.array_equal(found[name], value) for name, value in plain.items())
    assert f"text model of {name} is taken; 1 vision tensors are left out" in log.text
    assert "2 tensors of a head that drafts (mtp." in log.text


@pytest.mark.parametrize("is_told", [True, False])
def test_a_head_that_the_wrapper_ties(is_told: bool, convert: Converter, tmp_path: Path) -> None:
    """transformers 5 leaves it out by the wrapper's own key, whatever the text model's says."""
    wrapper = make_wrapper(
        tmp_path / "w", make_llama(tmp_path), "Mistral3ForConditionalGeneration", is_old=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    tensors = load_file(wrapper / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, wrapper / "model.safetensors")
    if not is_told:
        assert "lacks 1 tensor: lm_head.weight" in convert.fail(model_dir=wrapper).message
        return
    path = wrapper / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    found = join_checkpoint(convert(model_dir=wrapper))
    assert np.array_equal(found["lm_head.weight"], found["transformer.vocab_embedding.weight"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("gemma2", "Llava", "final_logit_softcapping 30.0"),
        ("granite", "LlavaNext", "logits_scaling 4.0"),
        ("mistral", "Mistral3", ""),
        ("qwen3_5", "Qwen3_5", ""),
    ],
)
def test_a_reference_is_the_text_model_that_is_converted(
    family: str, name: str, told: str, convert: Converter, tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its own cap and scale of logits, which its wrapper's class lacks; tied by the outer key."""
    import torch

    more: dict[str, Any] = {"logits_scaling": 4.0} if family == "granite" else {}
    target = make_family_model(tmp_path, family, tie_word_embeddings=True, **more)
    wrapper = make_wrapper(
        tmp_path / "w", target, f"{name}ForConditionalGeneration", is_old=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    kind = {"LlavaNext": "llava_next"}.get(name, name.lower())
    config = read_config(wrapper) | {
        "model_type": kind, "tie_word_embeddings": True, "vision_config": {}
    }  # fmt: skip
    (wrapper / "config.json").write_text(json.dumps(config))
    tokens = torch.tensor([[5, 9, 33, 7]])
    for auto, field in (("AutoModelForCausalLM", "logits"), ("AutoModel", "last_hidden_state")):
        alone, taken = (
            load_model(folder, auto, dtype=torch.float32)(tokens)[field]
            for folder in (target, wrapper)
        )
        assert torch.equal(alone, taken)
    convert(model_dir=wrapper)
    assert (f"{told} of the text model is computed" if told else "") in log.text
    assert bool(told) == ("leaves it out" in log.text)


def test_a_window_that_its_class_does_not_read(convert: Converter, tmp_path: Path) -> None:
    """Qwen3 alone has one; transformers' Qwen3-VL caches by it, and attends without it."""
    windows = {"model_type": "qwen3_vl_text", "use_sliding_window": True, "sliding_window": 4}
    wrapper = make_wrapper(
        tmp_path / "w", make_family_model(tmp_path, "qwen3"), "Qwen3VLForConditionalGeneration",
        is_old=False, **windows,
    )  # fmt: skip
    message = convert.fail(model_dir=wrapper).message
    assert "use_sliding_window is True, and models of type qwen3_vl_text have no window" in message


def test_one_tensor_under_two_names_is_refused(convert: Converter, tmp_path: Path) -> None:
    target = make_llama(tmp_path)
    wrapper = make_wrapper(
        tmp_path / "w", target, "LlavaForConditionalGeneration", is_old=True
    )  # fmt: skip
    tensors = load_file(wrapper / "model.safetensors")
    tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"].clone()
    save_file(tensors, wrapper / "model.safetensors")
    error = convert.fail(model_dir=wrapper)
    assert "two namings of one tensor" in error.message


def test_llama_4_is_refused_by_what_its_text_model_has(convert: Converter, tmp_path: Path) -> None:
    from transformers import Llama4TextConfig

    wrapper = make_wrapper(
        tmp_path / "w", make_llama(tmp_path), "Llama4ForConditionalGeneration", is_old=True,
        **Llama4TextConfig().to_dict(),
    )  # fmt: skip
    error = convert.fail(model_dir=wrapper)
    assert "'Llama4ForConditionalGeneration' is not supported: its text model ('llama4_text')" in (
        error.message
    )
    assert "attention in chunks (attention_chunk_size)" in error.message


TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 112, "vocab_size": 131, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
WRAPPED: dict[str, dict[str, Any]] = {
    "Mistral3": {
        "text_config": TEXT | {
            "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False
        },
        "vision_config": VISION | {"model_type": "pixtral"},
    },
    "Gemma3": {
        "text_config": TEXT | {"query_pre_attn_scalar": 16, "sliding_window": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
}  # fmt: skip
SEEING = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "out_hidden_size": 64,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2]}
TOKEN_IDS = {
    "image_token_id": 125, "video_token_id": 126, "vision_start_token_id": 127,
    "vision_end_token_id": 128,
}  # fmt: skip
_QWEN_VL: dict[str, Any] = TOKEN_IDS | {
    "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"} | {
        "rope_parameters": SECTIONS
    }
}  # fmt: skip
_QWEN3_VL: dict[str, Any] = {
    "text_config": TEXT | {
        "head_dim": 24,
        "rope_parameters": {**SECTIONS, "mrope_interleaved": True, "mrope_section": [4, 4, 4]},
    },
    "vision_config": SEEING | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}  # fmt: skip
WRAPPED |= {
    "Qwen2VL": _QWEN_VL | {"vision_config": SEEING | {"embed_dim": 16, "hidden_size": 64}},
    "Qwen2_5_VL": _QWEN_VL | {"vision_config": SEEING | {"fullatt_block_indexes": [0]}},
    "Qwen3VL": TOKEN_IDS | _QWEN3_VL | {"tie_word_embeddings": True},
    "Qwen3VLMoe": TOKEN_IDS | _QWEN3_VL | {
        "text_config": _QWEN3_VL["text_config"] | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
    },
}  # fmt: skip


def write_wrapper(folder: Path, name: str) -> Any:
    """Write a wrapper with its vision tower as transformers does; return the model."""
    import torch
    import transformers

    model_class = getattr(transformers, f"{name}ForConditionalGeneration", None)
    if model_class is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(5)
    model = model_class(model_class.config_class(**copy.deepcopy(WRAPPED[name]))).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 0.06 if "embed_tokens" in key and name == "Gemma3" else 2.0
                weight.copy_(torch.randn(weight.shape) * scale / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def spell_otherwise(
    folder: Path, name: str, rename: Callable[[str], str], change: Callable[[Any], Any]
) -> Path:
    """Write a wrapper's folder with other tensor names and another config.json; return it."""
    tensors = load_file(folder / "model.safetensors")
    spelled = folder.parent / name
    spelled.mkdir()
    save_file(
        {rename(key): tensor for key, tensor in tensors.items()}, spelled / "model.safetensors"
    )
    (spelled / "config.json").write_text(json.dumps(change(read_config(folder))))
    return spelled


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of Qwen2-VL as it is published: the text model's keys among the others."""
    text = config.pop("text_config")
    rotary = text.pop("rope_parameters")
    sections = {"type": "mrope", "mrope_section": rotary["mrope_section"]}
    return config | {k: v for k, v in text.items() if k not in ("model_type", "architectures")} | {
        "rope_scaling": sections, "rope_theta": rotary["rope_theta"], "model_type": "qwen2_5_vl",
    }  # fmt: skip


def wrap_again(config: dict[str, Any]) -> dict[str, Any]:
    """A wrapper that holds this one; the inner ones do not name their classes."""
    inner = {key: value for key, value in config.items() if key != "architectures"}
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    return outer | {"text_config": inner, "dtype": config["dtype"]}


def test_the_spellings_of_a_model_that_sees(
    convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """As Qwen2.5-VL is published, as transformers writes it, and inside of another wrapper."""
    log.set_level("INFO")
    write_wrapper(tmp_path / "model", "Qwen2_5_VL")
    # transformers 5 writes the names that were published first.
    old = spell_otherwise(tmp_path / "model", "old", lambda key: key, flatten)
    new, inner = "model.language_model.", "model.language_model.model."
    twice = spell_otherwise(
        tmp_path / "model", "twice",
        lambda key: re.sub("^(model[.])", f"{inner}language_model.", key).replace(
            "visual.", f"{inner}visual."
        ),
        wrap_again,
    )  # fmt: skip
    named = spell_otherwise(
        tmp_path / "model", "named",
        lambda key: re.sub("^model[.]", new, key).replace("visual.", "model.visual."),
        lambda config: config | {
            "text_config": config["text_config"] | {"architectures": config["architectures"]}
        },
    )  # fmt: skip
    plain = convert(model_dir=tmp_path / "model", output_dir=tmp_path / "plain")
    groups = []
    for folder in (old, twice, named):
        other = convert(model_dir=folder, output_dir=tmp_path / f"ckpt-{folder.name}")
        assert read_config(other) == read_config(plain)
        expected, found = join_checkpoint(plain), join_checkpoint(other)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())
        groups.append(log.messages[-2].rpartition("left out: ")[2])
    assert groups[0] == "visual.blocks 12, visual.merger 5, visual.patch_embed 1"
    assert groups[2] == groups[0].replace("visual.", "model.visual.")


def test_experts_that_are_stored_in_columns(convert: Converter, tmp_path: Path) -> None:
    """Qwen3-VL's are published as [in, out]; transformers takes them as [out, in], too."""
    write_wrapper(tmp_path / "model", "Qwen3VLMoe")
    plain = join_checkpoint(convert(model_dir=tmp_path / "model", tp_size=2))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    shapes = [tuple(t.shape[1:]) for name, t in tensors.items() if ".experts.gate_up" in name]
    assert shapes == [(64, 48)] * 2 or shapes == [(48, 64)] * 2
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(turned, tmp_path / "model" / "model.safetensors")
    found = join_checkpoint(
        convert(model_dir=tmp_path / "model", output_dir=tmp_path / "second", tp_size=2)
    )
    assert all(np.array_equal(found[name], value) for name, value in plain.items())


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    """Saved by transformers itself, with its vision tower."""
    import torch

    from specdec.decode.engine import TorchEngine

    model = write_wrapper(tmp_path / "target", name)
    prompts = [[5, 9, 77], [3] * 20]
    engine = TorchEngine(make_engine(tmp_path, tmp_path / "target"), device="cpu")
    requests = list_requests(prompts, 16)
    outputs = [result.output_ids for result in engine.generate(requests)]
    assert outputs == continue_greedily(model, prompts, 16)
    assert len(set(outputs[0])) > 3, "the text varies"
    tokens = torch.tensor([[5, 9, 33, 7]])
    logits = load_model(tmp_path / "target", dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(logits, model(tokens).logits)
