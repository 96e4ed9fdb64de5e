"""Reads checkpoints, and the models they were made of, as the tests need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specdec.checkpoint.config import read_checkpoint_config
from specdec.checkpoint.inventory import list_tensors
from specdec.model.sharding import join
from specdec.model.tensors import list_rank_names
from tests.convert.golden_models import read_tensors
from tests.families import CLASSES, GRANITES, HYBRIDS

LLAMA_NAMES = {
    "mlp.gate.": "mlp.router.", "block_sparse_moe.gate": "mlp.router",
    "self_attn.q_norm": "attention.q_layernorm", "self_attn.k_norm": "attention.k_layernorm",
    "model.embed_tokens": "transformer.vocab_embedding", "model.norm": "transformer.ln_f",
    "model.layers": "transformer.layers", "post_attention_layernorm": "post_layernorm",
    "self_attn.o_proj": "attention.dense", "self_attn.qkv_proj": "attention.qkv",
    "mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate", "mlp.down_proj": "mlp.proj",
    "mlp.gate_up_proj": "mlp.fc",
}  # fmt: skip
LFM2_NAMES = {
    "model.embed_tokens": "transformer.vocab_embedding", "model.embedding_norm": "transformer.ln_f",
    "model.layers": "transformer.layers", "operator_norm": "input_layernorm",
    "ffn_norm": "post_layernorm", "self_attn.q_layernorm": "attention.q_layernorm",
    "self_attn.k_layernorm": "attention.k_layernorm", "self_attn.out_proj": "attention.dense",
    "conv.conv": "short_conv.conv", "conv.in_proj": "short_conv.in_proj",
    "conv.out_proj": "short_conv.dense",
}  # fmt: skip
NEW_NAMES = {
    "phi": {
        "model.embed_tokens": "transformer.vocab_embedding", "model.layers": "transformer.layers",
        "model.final_layernorm": "transformer.ln_f", "self_attn.dense": "attention.dense",
        "mlp.fc1": "mlp.fc", "mlp.fc2": "mlp.proj",
    },
    "gpt2": {
        "transformer.wte": "transformer.vocab_embedding",
        "transformer.wpe": "transformer.position_embedding",
        "transformer.h.": "transformer.layers.",
        "ln_1": "input_layernorm", "ln_2": "post_layernorm", "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj",
    },
    "opt": {
        "model.decoder.embed_tokens": "transformer.vocab_embedding",
        "model.decoder.embed_positions": "transformer.position_embedding",
        "model.decoder.final_layer_norm": "transformer.ln_f",
        "model.decoder.layers": "transformer.layers", "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_layernorm", "self_attn.out_proj": "attention.dense",
        "fc1": "mlp.fc", "fc2": "mlp.proj",
    },
    "lfm2": LFM2_NAMES | {
        "feed_forward.w1": "mlp.fc", "feed_forward.w3": "mlp.gate", "feed_forward.w2": "mlp.proj",
    },
    "lfm2_moe": LFM2_NAMES | {
        "feed_forward.w1": "mlp.dense.fc", "feed_forward.w2": "mlp.dense.proj",
        "feed_forward.": "mlp.", "mlp.gate.": "mlp.router.",
    },
    **dict.fromkeys(GRANITES, LLAMA_NAMES | {
        "block_sparse_moe.router": "mlp.router", "shared_mlp.input_linear": "mlp.shared_expert.fc",
        "shared_mlp.output_linear": "mlp.shared_expert.proj", "mamba.out_proj": "mamba.dense",
        "mamba.conv1d.weight": "mamba.conv.weight", "mamba.conv1d.bias": "mamba.channels.bias",
    }),
}  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def set_config(folder: Path, **values: Any) -> Path:
    """Change keys of the folder's config.json; "ABSENT" removes one."""
    config = {**read_config(folder), **values}
    config = {key: value for key, value in config.items() if value != "ABSENT"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def join_checkpoint(folder: Path) -> dict[str, Any]:
    """The whole tensors of a checkpoint, put together from its ranks."""
    checkpoint = read_checkpoint_config(folder)
    model = checkpoint.model
    specs = list_tensors(model, checkpoint.drafter)
    parts: dict[str, list[Any]] = {name: [] for name in specs}
    for rank in range(model.tp_size * model.pp_size):
        stored = read_tensors(folder / f"rank{rank}.safetensors")
        names = {name: name for name in specs}
        if model.pp_size > 1:
            names = list_rank_names(model, rank)
        assert stored.keys() == names.keys()
        for name, canonical in names.items():
            parts[canonical].append(stored[name])
    assert {len(ranks) for ranks in parts.values()} == {model.tp_size}
    return {name: join(parts[name], spec, model) for name, spec in specs.items()}


def read_hugging_face(folder: Path, family: str) -> dict[str, Any]:
    """Canonical tensors of a model as transformers loads it, told without the families' tables."""
    import torch
    import transformers

    model_class = getattr(transformers, CLASSES[family][1])
    model = model_class.from_pretrained(folder, torch_dtype=torch.float32)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    if family == "gpt_oss":
        state = _split_rows(state)
    state = _split_experts(state)
    tensors = _stack_experts(state)
    if family in HYBRIDS:
        state = _take_linear(state, tensors, model.config)
    for name, value in state.items():
        if ".k_proj" in name or ".v_proj" in name or ("expert" in name and "_bias" not in name):
            continue
        if family == "lfm2_moe" and ".feed_forward.w3" in name:  # w1 takes it along
            continue
        new = name
        for old, ours in NEW_NAMES.get(family, LLAMA_NAMES).items():
            new = new.replace(old, ours)
        if ".q_proj" in name:
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            if family in HYBRIDS:  # a head's query, then its gate
                heads = parts[0].reshape(-1, 2, model.config.head_dim, parts[0].shape[1])
                query, gate = (heads[:, at].reshape(-1, parts[0].shape[1]) for at in (0, 1))
                parts = [query, *parts[1:], gate]
            new, value = new.replace("self_attn.q_proj", "attention.qkv"), np.concatenate(parts)
        elif ".c_" in name:
            value = value.T
        elif ".conv.conv.weight" in name:
            value = value.reshape(-1)
        elif "mlp.dense.fc" in new:
            value = np.concatenate([value, state[name.replace("w1", "w3")]])
        elif "embed_positions" in name:
            value = value[2:]
        elif ".mamba.in_proj" in name or ".mamba.conv1d" in name:
            value = _turn_sections(name, value, model.config)
        elif "gate_up_proj" in name or "shared_mlp.input_linear" in name:
            value = np.concatenate(np.split(value, 2)[::-1])
        elif family.startswith("gemma") and "norm" in name:
            value = value + np.float32(1)
        tensors[new] = value
    return tensors


def _turn_sections(name: str, value: Any, config: Any) -> Any:
    """Mamba-2's rows of C, B and x in this order, then those of z and of the rates."""
    x_rows = config.mamba_expand * config.hidden_size
    state_rows = config.mamba_n_groups * config.mamba_d_state
    sections = (x_rows, state_rows, state_rows)
    if "in_proj" in name:
        z, *parts, rates = np.split(value, np.cumsum((x_rows, *sections)))
        return np.concatenate([*parts[::-1], z, rates])
    return np.concatenate(np.split(value, np.cumsum(sections)[:2])[::-1]).reshape(-1)


def _take_linear(state: dict[str, Any], tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """Add the canonical tensors of linear attention; return what else there is."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = [config.linear_key_head_dim] * 2 + [config.linear_value_head_dim * values // keys] * 2
    for name in [name for name in state if name.endswith("linear_attn.A_log")]:
        own = {n: v for n, v in state.items() if n.startswith(name.removesuffix("A_log"))}
        state = {n: v for n, v in state.items() if n not in own}
        own = {n.split("linear_attn.")[1].removesuffix(".weight"): v for n, v in own.items()}
        if "in_proj_qkvz" in own:  # of each key head all
            heads = own["in_proj_qkvz"].reshape(keys, sum(sizes), -1)
            ends = np.cumsum(sizes)[:-1]
            parts = [p.reshape(-1, heads.shape[-1]) for p in np.split(heads, ends, axis=1)]
            qkvz, ba = np.concatenate(parts), own["in_proj_ba"].reshape(keys, 2, values // keys, -1)
            ba = np.concatenate([ba[:, at].reshape(values, -1) for at in (0, 1)])
        else:
            qkvz = np.concatenate([own["in_proj_qkv"], own["in_proj_z"]])
            ba = np.concatenate([own["in_proj_b"], own["in_proj_a"]])
        prefix = name.replace("model.", "transformer.").replace("linear_attn", "linear_attention")
        prefix = prefix.removesuffix("A_log")
        tensors |= {
            prefix + "A_log": own["A_log"], prefix + "dt_bias": own["dt_bias"],
            prefix + "qkvz.weight": qkvz, prefix + "ba.weight": ba,
            prefix + "conv.weight": own["conv1d"].reshape(-1),
            prefix + "norm.weight": own["norm"], prefix + "dense.weight": own["out_proj"],
        }  # fmt: skip
    return state


def _split_rows(state: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss's experts in the order of the others', and their biases by our names."""
    split: dict[str, Any] = {}
    for name, value in state.items():
        stem, _, kind = name.rpartition(".experts.")
        ours = stem.replace("model.", "transformer.")
        if kind == "gate_up_proj":  # [in, out], and of the outputs every second one is of up
            value = np.concatenate([value[..., at::2] for at in (0, 1)], axis=-1).swapaxes(1, 2)
        elif kind == "down_proj":
            value = value.swapaxes(1, 2)
        elif kind == "gate_up_proj_bias":
            name = f"{ours}.fc.bias"
            value = np.concatenate([value[:, at::2] for at in (1, 0)], axis=1).reshape(-1)
        elif kind == "down_proj_bias":
            name, value = f"{ours}.proj.bias", value.reshape(-1)
        split[name.replace("self_attn.sinks", "attention.sinks")] = value
    return split


def _split_experts(state: dict[str, Any]) -> dict[str, Any]:
    """The same with a tensor an expert: transformers 5 has those of a layer in one."""
    split: dict[str, Any] = {}
    for name, value in state.items():
        stem, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for at, both in enumerate(value):
                gate, up = np.split(both, 2)
                split[f"{stem}.experts.{at}.gate_proj.weight"] = gate
                split[f"{stem}.experts.{at}.up_proj.weight"] = up
        elif kind == "down_proj":
            for at, down in enumerate(value):
                split[f"{stem}.experts.{at}.down_proj.weight"] = down
        else:
            split[name] = value
    return split


def _stack_experts(state: dict[str, Any]) -> dict[str, Any]:
    """The canonical tensors of all experts, by 1.x's names."""
    tensors: dict[str, Any] = {}
    own = [name for name in state if "expert" in name and "down" not in name and "w2" not in name]
    for name in own:
        layer = "transformer.layers." + name.split(".")[2] + ".mlp."
        if name.endswith("_gate.weight"):
            tensors[layer + "shared_expert_gate.weight"] = state[name]
            continue
        if "gate_proj" in name or "w1" in name:
            up, down = (
                name.replace("gate_proj", f"{kind}_proj").replace("w1", weight)
                for kind, weight in (("up", "w3"), ("down", "w2"))
            )
            fc, key = np.concatenate([state[up], state[name]]), "shared_expert." * ("shared" in up)
            tensors.setdefault(f"{layer}{key}fc.weight", []).append(fc)
            tensors.setdefault(f"{layer}{key}proj.weight", []).append(state[down])
    return {
        name: (value[0] if "shared" in name else np.stack(value)) if type(value) is list else value
        for name, value in tensors.items()
    }
