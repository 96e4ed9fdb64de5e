"""The pycode models in float32, as the oracles take them, and what specdec does with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import ROOT, change_tensors

PYCODE = ROOT / "examples" / "pycode"
HEADS = (32, 64)  # head sizes that vLLM's attention has on a CPU, of those that pycode needs


def pad_heads(source: Path, folder: Path) -> Path:
    """Copy a Llama, or layers like a Llama's, in float32, every head widened with zeros.

    vLLM's attention has no heads of 40 or 24 on a CPU. Rotated are as many dimensions as before,
    queries grow by what the larger head's scale takes from them: the same numbers but for rounding.
    Where heads are normalized, what the zeros take from the mean is given to queries and keys, and
    taken from keys again after the norm; from queries the larger head's scale takes it.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    config.pop("torch_dtype", None)
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(path).items()
    }
    inner = config.get("transformer_layer_config", config)
    if (size := inner.get("head_dim")) is not None and size not in HEADS:
        wide = min(head for head in HEADS if head > size)
        for name, tensor in tensors.items():
            layer, kind = name.rsplit(".", 2)[0], name.rpartition(".")[0].rpartition(".")[2]
            if kind in ("q_proj", "k_proj", "v_proj"):
                is_normed = kind == "k_proj" and f"{layer}.k_norm.weight" in tensors
                scale = (wide / size) ** 0.5 if kind == "q_proj" or is_normed else 1.0
                tensors[name] = _pad(tensor, size, wide) * scale
            elif kind in ("q_norm", "k_norm"):
                scale = (size / wide) ** 0.5 if kind == "k_norm" else 1.0
                tensors[name] = torch.nn.functional.pad(tensor, (0, wide - size)) * scale
            elif kind == "o_proj":
                tensors[name] = _pad(tensor.T, size, wide).T.contiguous()
        rotary = {"rope_type": "default", "rope_theta": inner.pop("rope_theta"),
                  "partial_rotary_factor": size / wide}  # fmt: skip
        inner.pop("rope_scaling", None)
        inner |= {"head_dim": wide, "rope_parameters": rotary}
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _pad(rows: Tensor, size: int, wide: int) -> Tensor:
    heads = rows.view(-1, size, rows.shape[-1])
    return torch.nn.functional.pad(heads, (0, 0, 0, wide - size)).reshape(-1, rows.shape[-1])


def add_mask(drafter: Path, folder: Path) -> Path:
    """A copy of an EAGLE-3 drafter as one of P-EAGLE's: right in its first place, seldom later."""
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(3)
    with change_tensors(folder) as tensors:
        mask = torch.randn(1, 1, tensors["fc.weight"].shape[1], generator=generator)
        tensors["mask_hidden"] = mask.to(tensors["fc.weight"].dtype)
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config |= {
        "mask_token_id": 1, "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def train_hybrid(folder: Path, texts: Path) -> Path:
    """A Qwen3.5 of four layers with pycode's tokenizer, trained on texts for two minutes."""
    from tokenizers import Tokenizer
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    shutil.copytree(PYCODE / "target", folder, ignore=shutil.ignore_patterns("model*", "config*"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    ids = torch.tensor([token for row in rows for token in tokenizer.encode(row).ids])
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=256,
            num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
            linear_value_head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0), 150
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 129, (4,), generator=generator).tolist()
        batch = torch.stack([ids[at : at + 128] for at in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def drop_bias(source: Path, folder: Path) -> Path:
    """Copy an EAGLE-1 drafter without its fc.bias, which vLLM has no room for."""
    shutil.copytree(source, folder)
    with change_tensors(folder) as tensors:
        tensors["fc.bias"].zero_()
    return folder


def read_prompts(count: int) -> list[list[int]]:
    """Token ids of the first prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PYCODE / "target" / "tokenizer.json"))
    lines = (PYCODE / "prompts.jsonl").read_text().splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
