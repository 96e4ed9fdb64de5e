"""A plain Llama in a Hugging Face folder, written as the GGUF file that llama.cpp reads.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp's own converter refuses
tokenizers that it does not know by hash, such as one that was trained for an example.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from .processes import PeerError

VERSION, ALIGNMENT = 3, 32
UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5  # types of values
FORMS = {UINT32: "<I", FLOAT32: "<f", BOOL: "<?", INT32: "<i"}
TENSOR_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
NORMAL, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def export_gguf(source: Path, path: Path) -> None:
    """Write a Hugging Face folder as a GGUF file; raise PeerError for more than a plain Llama."""
    config = json.loads((source / "config.json").read_text())
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    unknown = [key for key in ("rope_scaling", "attention_bias", "mlp_bias") if config.get(key)]
    if config["architectures"] != ["LlamaForCausalLM"] or unknown or theta is None:
        raise PeerError(f"{source} is no plain Llama: {unknown or config['architectures']}")
    partial = path.with_suffix(".partial")
    with safe_open(source / "model.safetensors", framework="pt") as tensors:
        write_gguf(partial, list_values(source, config, theta), Tensors(tensors, config))
    partial.replace(path)


def list_values(source: Path, config: dict[str, Any], theta: float) -> dict[str, tuple[int, Any]]:
    """The file's keys with their types and values; a pair of types stands for a list."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tokens, kinds, merges = read_tokenizer(source, config["vocab_size"])
    return {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, source.name),
        "general.alignment": (UINT32, ALIGNMENT),
        "general.file_type": (UINT32, FILE_TYPES[config.get("dtype") or config["torch_dtype"]]),
        "llama.vocab_size": (UINT32, config["vocab_size"]),
        "llama.context_length": (UINT32, config["max_position_embeddings"]),
        "llama.block_count": (UINT32, config["num_hidden_layers"]),
        "llama.embedding_length": (UINT32, config["hidden_size"]),
        "llama.feed_forward_length": (UINT32, config["intermediate_size"]),
        "llama.attention.head_count": (UINT32, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        "llama.attention.key_length": (UINT32, head_size),
        "llama.attention.value_length": (UINT32, head_size),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
        "llama.rope.dimension_count": (UINT32, head_size),
        "llama.rope.freq_base": (FLOAT32, theta),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, kinds)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": (UINT32, config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (UINT32, config["eos_token_id"]),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
    }


def read_tokenizer(source: Path, vocab_size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens by id, their kinds, and the merges, of a byte-level BPE."""
    described = json.loads((source / "tokenizer.json").read_text())
    model = described["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise PeerError(f"{source} has a tokenizer of another kind than byte-level BPE")
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return tokens, kinds, merges


class Tensors:
    """A safetensors file under llama.cpp's names, read one tensor at a time."""

    def __init__(self, file: Any, config: dict[str, Any]) -> None:
        self._file, self._config = file, config
        self._sources = {translate_name(name): name for name in file.keys()}

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


def translate_name(name: str) -> str:
    """llama.cpp's name of a tensor; raise PeerError for one that a plain Llama has not."""
    stem = name.removesuffix(".weight")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight"
    parts = stem.split(".", 3)
    if parts[:2] != ["model", "layers"] or len(parts) < 4 or parts[3] not in LAYER_NAMES:
        raise PeerError(f"{name} is not known of a plain Llama")
    return f"blk.{parts[2]}.{LAYER_NAMES[parts[3]]}.weight"


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a projection, reordered: llama.cpp rotates a channel with the next one.

    Hugging Face rotates it with the one half a head further on.
    """
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, values: dict[str, tuple[int, Any]], tensors: Tensors) -> None:
    """Write the head, then the tensors, each at a multiple of the alignment."""
    names = tensors.list_names()
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(names), len(values)))
        for key, (kind, value) in values.items():
            write_text(file, key)
            file.write(struct.pack("<I", kind))
            write_value(file, kind, value)
        offset = 0
        for name in names:
            tensor = tensors.read(name)
            write_text(file, name)
            shape = list(tensor.shape)[::-1]  # the innermost dimension comes first
            form = f"<I{len(shape)}QIQ"
            file.write(struct.pack(form, len(shape), *shape, TENSOR_TYPES[tensor.dtype], offset))
            offset += round_up(tensor.numel() * tensor.element_size())
        pad(file)
        for name in names:
            # As bytes: numpy has no bfloat16.
            file.write(tensors.read(name).contiguous().view(torch.uint8).numpy().data)
            pad(file)


def write_value(file: BinaryIO, kind: int, value: Any) -> None:
    """Write a number, a text, or a list of them with its type and length before it."""
    if kind == STRING:
        write_text(file, value)
    elif kind == ARRAY:
        inner, entries = value
        file.write(struct.pack("<IQ", inner, len(entries)))
        for entry in entries:
            write_value(file, inner, entry)
    else:
        file.write(struct.pack(FORMS[kind], value))


def write_text(file: BinaryIO, text: str) -> None:
    data = text.encode()
    file.write(struct.pack("<Q", len(data)) + data)


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def pad(file: BinaryIO) -> None:
    """Go on at the next multiple of the alignment."""
    file.write(bytes(round_up(file.tell()) - file.tell()))
