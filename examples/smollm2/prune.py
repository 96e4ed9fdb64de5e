#!/usr/bin/env python3
"""Cut a Llama with tied embeddings down to a draft model of the same vocabulary.

    python prune.py --model-dir MODEL --output-dir OUT [--hidden-size 192] [--num-layers 4] ...

The hidden state is projected onto the main directions of the embedding's rows (its right singular
vectors), and every matrix with it; norms' weights go into the matrices after them. Of the layers,
evenly spaced ones stay, the first and the last among them; of a layer, the first query heads with
their K/V heads, and of the MLP the channels with the largest weights. The pruned model has to be
trained (examples/pycode/pretrain.py --start-from OUT --teacher-dir MODEL).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.text.pretrained import load_model, load_tokenizer


def cut_layer(own: dict[str, Tensor], axes: Tensor, shape: LlamaConfig) -> dict[str, Tensor]:
    """The tensors of a smaller layer; axes [D, d] are the directions that stay."""
    into_attention = own["input_layernorm.weight"][:, None] * axes  # [D, d]
    into_mlp = own["post_attention_layernorm.weight"][:, None] * axes
    num_queries = shape.num_attention_heads * shape.head_dim
    num_keys = shape.num_key_value_heads * shape.head_dim
    gate, up = own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]
    down = own["mlp.down_proj.weight"]
    sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = sizes.topk(shape.intermediate_size).indices.sort().values
    # The norms divide by the root of the mean over fewer channels, which have most of the sum.
    ones = torch.full((shape.hidden_size,), (len(axes) / shape.hidden_size) ** 0.5)
    return {
        "input_layernorm.weight": ones,
        "self_attn.q_proj.weight": own["self_attn.q_proj.weight"][:num_queries] @ into_attention,
        "self_attn.k_proj.weight": own["self_attn.k_proj.weight"][:num_keys] @ into_attention,
        "self_attn.v_proj.weight": own["self_attn.v_proj.weight"][:num_keys] @ into_attention,
        "self_attn.o_proj.weight": axes.T @ own["self_attn.o_proj.weight"][:, :num_queries],
        "post_attention_layernorm.weight": ones.clone(),
        "mlp.gate_proj.weight": gate[kept] @ into_mlp,
        "mlp.up_proj.weight": up[kept] @ into_mlp,
        "mlp.down_proj.weight": axes.T @ down[:, kept],
    }


def prune(model: LlamaForCausalLM, shape: LlamaConfig) -> LlamaForCausalLM:
    """The smaller model, in float32."""
    large = {name: tensor.float() for name, tensor in model.state_dict().items()}
    table = large["model.embed_tokens.weight"]  # [V, D]
    axes = torch.linalg.eigh(table.T @ table).eigenvectors[:, -shape.hidden_size :].flip(1)
    small = {"model.embed_tokens.weight": table @ axes}
    last = model.config.num_hidden_layers - 1
    for index in range(shape.num_hidden_layers):
        source = round(index * last / max(1, shape.num_hidden_layers - 1))
        prefix = f"model.layers.{source}."
        own = {n.removeprefix(prefix): t for n, t in large.items() if n.startswith(prefix)}
        for name, tensor in cut_layer(own, axes, shape).items():
            small[f"model.layers.{index}.{name}"] = tensor
    # The output layer is the embedding, so the last norm's weights can go into nothing.
    norm = (axes**2 * large["model.norm.weight"][:, None]).sum(0)
    small["model.norm.weight"] = norm * (len(axes) / shape.hidden_size) ** 0.5
    pruned = LlamaForCausalLM(shape)
    pruned.load_state_dict(small, strict=False)
    pruned.tie_weights()
    return pruned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=3)
    parser.add_argument("--intermediate-size", type=int, default=512)
    args = parser.parse_args()
    model = load_model(args.model_dir, dtype=torch.float32)
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    shape = LlamaConfig.from_dict({
        **config.to_dict(),
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": -(-args.num_heads // group),
        "head_dim": config.hidden_size // config.num_attention_heads,
        "intermediate_size": args.intermediate_size,
    })  # fmt: skip
    prune(model, shape).save_pretrained(args.output_dir)
    load_tokenizer(args.model_dir).save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
