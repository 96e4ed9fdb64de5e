"""A plain Llama in a Hugging Face folder, written as the GGUF file that llama.cpp reads.

By llama.cpp's own package `gguf`. Its converter refuses tokenizers that it does not know by hash,
such as one that was trained for an example.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
)
from safetensors import safe_open
from torch import Tensor

from .processes import PeerError

TENSOR_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
FILE_TYPES = {
    "float32": LlamaFileType.ALL_F32,
    "float16": LlamaFileType.MOSTLY_F16,
    "bfloat16": LlamaFileType.MOSTLY_BF16,
}


def export_gguf(source: Path, path: Path) -> None:
    """Write a Hugging Face folder as a GGUF file; raise PeerError for more than a plain Llama."""
    config = json.loads((source / "config.json").read_text())
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    unknown = [key for key in ("rope_scaling", "attention_bias", "mlp_bias") if config.get(key)]
    if config["architectures"] != ["LlamaForCausalLM"] or unknown or theta is None:
        raise PeerError(f"{source} is no plain Llama: {unknown or config['architectures']}")
    writer = GGUFWriter(path.with_suffix(".partial"), "llama")
    add_values(writer, source, config, theta)
    with safe_open(source / "model.safetensors", framework="pt") as file:
        write_tensors(writer, Tensors(file, config))
    path.with_suffix(".partial").replace(path)


def add_values(writer: GGUFWriter, source: Path, config: dict[str, Any], theta: float) -> None:
    """Add all that llama.cpp asks for about the model and its tokenizer."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tokens, kinds, merges = read_tokenizer(source, config["vocab_size"])
    writer.add_name(source.name)
    writer.add_file_type(FILE_TYPES[config.get("dtype") or config["torch_dtype"]])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def read_tokenizer(source: Path, vocab_size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens by id, their kinds, and the merges, of a byte-level BPE."""
    described = json.loads((source / "tokenizer.json").read_text())
    model = described["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise PeerError(f"{source} has a tokenizer of another kind than byte-level BPE")
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [int(TokenType.UNUSED)] * vocab_size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, TokenType.NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], TokenType.CONTROL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return tokens, kinds, merges


class Tensors:
    """A safetensors file under llama.cpp's names, read one tensor at a time."""

    def __init__(self, file: Any, config: dict[str, Any]) -> None:
        self._file, self._config = file, config
        names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        self._sources = {}
        for name in file.keys():
            theirs = names.get_name(name, try_suffixes=(".weight",))
            if theirs is None or not theirs.endswith(".weight"):
                raise PeerError(f"{name} is not known of a plain Llama")
            self._sources[theirs] = name

    def list_names(self) -> list[str]:
        return sorted(self._sources)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored: norms in float32, projections of queries and keys reordered."""
        tensor: Tensor = self._file.get_tensor(self._sources[name])
        if tensor.dim() == 1:
            return tensor.float()
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        key = heads.get(name.removesuffix(".weight").rsplit(".", 1)[-1])
        return tensor if key is None else interleave(tensor, self._config[key])


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a projection, reordered: llama.cpp rotates a channel with the next one.

    Hugging Face rotates it with the one half a head further on.
    """
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_tensors(writer: GGUFWriter, tensors: Tensors) -> None:
    """Write the file, reading one tensor at a time."""
    names = tensors.list_names()
    for name in names:
        tensor = tensors.read(name)
        kind, num_bytes = TENSOR_TYPES[tensor.dtype], tensor.numel() * tensor.element_size()
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        # As bytes: numpy has no bfloat16.
        writer.write_tensor_data(tensors.read(name).contiguous().view(torch.uint8).numpy())
    writer.close()
