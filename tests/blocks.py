"""Random rows in GGML's block types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from specdec.model.blocks import TYPES, dequantize, widen_rows

Array = np.ndarray[Any, np.dtype[Any]]


def make_rows(kind: int, num_rows: int, depth: int, seed: int = 0, scale: float = 0.05) -> Array:
    """Blocks uint8 [num_rows, bytes] of a type: any codes, scales of either sign up to `scale`.

    The largest of a super-block's scales is about that times 32. Exponents are of powers of two up
    to `scale`.
    """
    generator, of = np.random.default_rng(seed), TYPES[kind]
    shape = (num_rows, depth // of.size, of.num_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for at in of.halves:
        halves = generator.uniform(-scale, scale, (*shape[:2], 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    for at in of.exponents:
        blocks[:, :, at] = 127 + math.frexp(scale)[1] - generator.integers(1, 5, shape[:2])
    return blocks.reshape(num_rows, -1)


# Scales with which such weights are as large as those of a linear with 256 inputs.
SCALES = {
    2: 0.015, 3: 0.01, 6: 0.008, 7: 0.005, 8: 1e-3, 10: 5e-3, 11: 2e-3, 12: 3e-4, 13: 1.5e-4,
    14: 1.5e-4, 20: 1e-3, 23: 1e-4, 39: 0.02,
}  # fmt: skip


def put_blocks(
    tensors: dict[str, torch.Tensor], kinds: Mapping[str, Sequence[int]], *, as_blocks: bool = True
) -> None:
    """Replace matrices by random ones, in blocks or as float32: equal shares of rows of the types.

    kinds: the types of a module, by the end of its name.
    """
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        module = name.removesuffix(".weight")
        chosen = next((types for end, types in kinds.items() if module.endswith(end)), ())
        if not chosen:
            continue
        num_rows, depth = tensors[name].shape
        parts = np.array_split(np.arange(num_rows), len(chosen))
        rows = [
            make_rows(kind, len(part), depth, len(name) + i, SCALES[kind])
            for i, (kind, part) in enumerate(zip(chosen, parts, strict=True))
        ]
        types = np.repeat(np.array(chosen, np.uint8), [len(part) for part in parts])
        whole = np.concatenate(widen_rows(rows))
        if as_blocks:
            tensors[f"{module}.ggml_types"] = torch.from_numpy(types)
        tensors[name] = torch.from_numpy(whole if as_blocks else dequantize(whole, types, depth))


def write_gguf(path: Path, kinds: Mapping[str, int]) -> Path:
    """A random Llama of two layers with a shared head; kinds: a matrix's type by its name.

    Type 0 is float32. Its tokens have no meaning.
    """
    hidden, inner, heads, kv_heads, vocab = 256, 512, 4, 2, 128
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    kv_size = hidden // heads * kv_heads
    shapes = {
        "attn_q": (hidden, hidden), "attn_k": (kv_size, hidden), "attn_v": (kv_size, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    names = [f"blk.{layer}.{name}" for layer in range(2) for name in shapes]
    for index, name in enumerate(["token_embd", *names]):
        module = name.rpartition(".")[2]
        num_rows, depth = shapes.get(module, (vocab, hidden))
        of = gguf.GGMLQuantizationType(kinds[module])
        if of in SCALES:
            rows = make_rows(of, num_rows, depth, index, SCALES[of])
        else:
            numbers = np.random.default_rng(index).normal(0, 0.06, (num_rows, depth))
            rows = gguf.quants.quantize(numbers.astype(np.float32), of)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=of)
    norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(2) for n in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    finish(writer)
    return path


# Rows of the matrices of a Llama with one layer and a width of 256, and its norms.
LLAMA_ROWS = {
    "token_embd": 32, "blk.0.attn_q": 256, "blk.0.attn_k": 128, "blk.0.attn_v": 128,
    "blk.0.attn_output": 256, "blk.0.ffn_gate": 256, "blk.0.ffn_up": 256, "blk.0.ffn_down": 256,
}  # fmt: skip
LLAMA_NORMS = "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"


def begin_llama(path: Path, architecture: str = "llama", **metadata: Any) -> gguf.GGUFWriter:
    """Begin a GGUF file of that Llama, without tensors; `__` in a key of metadata is a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "context_length": 64, "embedding_length": 256, "block_count": 1,
        "feed_forward_length": 256, "head_count": 4, "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what a writer has, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
