#!/usr/bin/env python3
"""Models of the families in specdec and in llama.cpp, on one GGUF file of random weights each.

    python benchmarks/family_speed.py [--models LFM2-1.2B ...] [--rounds 7] [--llama-bin FOLDER]
                                      [--llama-source FOLDER] [--make-only] [--remove]

A file has the widths, the vocabulary and the kinds of layers of a published model, and as many of
its layers as the table below says. transformers names its tensors, llama.cpp's own converter and
quantizer write it with zeros, in the type that people download, and every tensor is then filled by
chance; it stays in --folder, where a later run finds it. The time of a step does not depend on what
the weights are, but on how many experts are read: random routers choose them as good as by chance.

Measured is what benchmarks/gguf_types.py measures: plain decoding and the reading of a prompt by
turns with llama-server, steps of several tokens, peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from benchmarks import gguf_types
from benchmarks.side_by_side.llama_files import convert_folder
from benchmarks.side_by_side.processes import PeerError, run_logged
from specdec.errors import SpecDecError
from specdec.files.reading import Array, write_json
from specdec.model.blocks import TYPES, BlockType

SOURCE = gguf_types.PROGRAMS.parents[1] / "source" / "vendor" / "llama.cpp"
NOISE = 0.02
BLOCK_LENGTH = (1 << 20) - 3  # bytes or numbers that are repeated: no width divides it
# Of types with an offset, in their scale, the one with which weights have a mean of about zero.
OFFSETS = {
    "Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5,
}  # fmt: skip
MXFP4_EXPONENTS = 119, 122  # with codes of 4 bits they give weights of about NOISE
SLIDING, FULL, CONV = "sliding_attention", "full_attention", "conv"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a published model: transformers' class, fields of its config.json, a file's type.

    num_hidden_layers in the fields, or in those of a wrapper's text model, says how many layers the
    file has; the published model may have more.
    """

    family: str
    kind: str
    fields: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        """Layers of the file."""
        return int(self.fields.get("text_config", self.fields)["num_hidden_layers"])

    @property
    def class_name(self) -> str:
        """transformers' class of the model, or of the wrapper that has its text model."""
        if "text_config" in self.fields:
            return f"{self.family}ForConditionalGeneration"
        return f"{self.family.removesuffix('Text')}ForCausalLM"


def place_layers(count: int, places: Sequence[int], kind: str, other: str) -> list[str]:
    """Return the kinds of layers, one kind in some places and another in all others."""
    return [kind if layer in places else other for layer in range(count)]


_LFM2 = {
    "vocab_size": 65536, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
    "norm_eps": 1e-5, "conv_L_cache": 3, "max_position_embeddings": 128000,
}  # fmt: skip
_GRANITE4 = {
    "vocab_size": 100352, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "mamba_d_state": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_expand": 2,
    "position_embedding_type": "nope", "tie_word_embeddings": True, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}  # fmt: skip
SHAPES = {
    "LFM2-1.2B": Shape(
        family="Lfm2", kind="Q4_K_M",
        fields=_LFM2 | {
            "intermediate_size": 12288, "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "LFM2-8B-A1B": Shape(
        family="Lfm2Moe", kind="Q4_K_M",
        fields=_LFM2 | {
            "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_hidden_layers": 8,
            "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
            "layer_types": place_layers(8, (2, 6), FULL, CONV),
        },
    ),
    "granite-4.0-h-micro": Shape(
        family="GraniteMoeHybrid", kind="Q4_K_M",
        fields=_GRANITE4 | {
            "hidden_size": 2048, "intermediate_size": 8192, "shared_intermediate_size": 8192,
            "num_hidden_layers": 20, "num_attention_heads": 32, "num_key_value_heads": 8,
            "mamba_n_heads": 64, "num_local_experts": 0, "num_experts_per_tok": 0,
            "attention_multiplier": 0.015625, "logits_scaling": 8.0,
            "layer_types": place_layers(20, (5, 15), "attention", "mamba"),
        },
    ),
    "granite-4.0-h-tiny": Shape(
        family="GraniteMoeHybrid", kind="Q4_K_M",
        fields=_GRANITE4 | {
            "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024,
            "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4,
            "mamba_n_heads": 48, "num_local_experts": 64, "num_experts_per_tok": 6,
            "attention_multiplier": 0.0078125, "logits_scaling": 6.0,
            "layer_types": place_layers(16, (5, 15), "attention", "mamba"),
        },
    ),
    "gemma-4-E2B": Shape(
        family="Gemma4Text", kind="Q4_K_M",
        fields={
            "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size": 1536,
            "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
            "num_hidden_layers": 20, "num_attention_heads": 8, "num_key_value_heads": 1,
            "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 10,
            "use_double_wide_mlp": True, "sliding_window": 512, "final_logit_softcapping": 30.0,
            "layer_types": place_layers(20, (4, 9, 14, 19), FULL, SLIDING),
        },
    ),
    "gemma-4-26B-A4B": Shape(
        family="Gemma4Text", kind="Q4_K_M",
        fields={
            "vocab_size": 262144, "hidden_size": 2816, "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112, "moe_intermediate_size": 704, "enable_moe_block": True,
            "num_experts": 128, "top_k_experts": 8, "num_hidden_layers": 3,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
            "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "sliding_window": 1024,
            "final_logit_softcapping": 30.0, "layer_types": place_layers(3, (2,), FULL, SLIDING),
        },
    ),
    "gpt-oss-20b": Shape(
        family="GptOss", kind="MXFP4_MOE",
        fields={
            "num_hidden_layers": 4, "num_local_experts": 32, "num_experts_per_tok": 4,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
    "Ministral-3-3B": Shape(
        family="Ministral3", kind="Q4_K_M",
        fields={
            "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 12,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-VL-2B": Shape(
        family="Qwen3VL", kind="Q4_K_M",
        fields={
            "tie_word_embeddings": True,
            "text_config": {
                "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 8,
                "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 262144,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                },
            },
        },
    ),
}  # fmt: skip


def list_tensors(shape: Shape) -> tuple[Any, dict[str, tuple[str, list[int]]]]:
    """Return a model's configuration, and the tensors of its folder: safetensors' types, shapes."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    make_config = getattr(transformers, f"{shape.family}Config")
    name = shape.class_name
    fields, has_blocks = dict(shape.fields), "quantization_config" in shape.fields
    config = make_config(**fields)
    config.architectures, config.dtype = [name], "bfloat16"
    fields.pop("quantization_config", None)
    with torch.device("meta"):
        model = getattr(transformers, name)(make_config(**fields))
    tensors = dict(revert_weight_conversion(model, model.state_dict()))
    if config.get_text_config().tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    listed: dict[str, tuple[str, list[int]]] = {}
    for key, tensor in tensors.items():
        sizes = list(tensor.shape)
        if has_blocks and key.endswith("_proj") and len(sizes) == 3:
            num_experts, depth, width = sizes
            listed[f"{key}_blocks"] = "U8", [num_experts, width, depth // 32, 16]
            listed[f"{key}_scales"] = "U8", [num_experts, width, depth // 32]
        else:
            listed[key] = "BF16", sizes
    return config, listed


def write_folder(shape: Shape, folder: Path) -> None:
    """Write a Hugging Face folder with a tokenizer, whose weights are a hole: nothing but zeros."""
    folder.mkdir(parents=True)
    config, listed = list_tensors(shape)
    # As published: transformers has other names for some kinds of layers.
    values = config.to_dict()
    for key, value in shape.fields.items():
        values[key] = {**values[key], **value} if key == "text_config" else value
    (folder / "config.json").write_text(json.dumps(values, indent=2, default=str))
    vocab_size = int(config.get_text_config().vocab_size)
    write_tokenizer(folder, vocab_size, is_gemma=shape.family == "Gemma4Text")
    header, end = {}, 0
    for key, (dtype, sizes) in listed.items():
        start, end = end, end + math.prod(sizes) * (2 if dtype == "BF16" else 1)
        header[key] = {"dtype": dtype, "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)


def fill_file(file: Path) -> None:
    """Put random weights into the tensors of a GGUF file, in place."""
    import gguf

    generator, types = np.random.default_rng(0), {kind.name: kind for kind in TYPES.values()}
    blocks = {name: draw_blocks(kind, generator) for name, kind in types.items()}
    numbers = (generator.standard_normal(BLOCK_LENGTH) * NOISE).astype(np.float32)
    for tensor in gguf.GGUFReader(file, "r+").tensors:
        data, name = tensor.data.reshape(-1), tensor.tensor_type.name
        if name in blocks:
            unit = types[name].num_bytes
            repeat_into(data.reshape(-1, unit), blocks[name], generator)
        elif name == "BF16":
            widened = torch.from_numpy(numbers).bfloat16().view(torch.uint8).numpy()
            repeat_into(data.reshape(-1, 2), widened.reshape(-1, 2), generator)
        elif name == "F32" and "rope_freqs" not in tensor.name:
            repeat_into(data, numbers, generator)
            if tensor.name.endswith("ssm_a"):
                data[:] = -np.exp(data)
            elif "conv" in tensor.name:
                data *= 10
            elif len(tensor.shape) == 1 and not tensor.name.endswith(("bias", "sinks.weight")):
                data += 1
        elif name != "F32":
            raise PeerError(f"{file.name}: {tensor.name} is of type {name}, which is not filled")


def draw_blocks(kind: BlockType, generator: np.random.Generator) -> Array:
    """Draw blocks of a type whose weights are about NOISE, uint8 [blocks, bytes]."""
    import gguf

    count = BLOCK_LENGTH // kind.num_bytes
    blocks = generator.integers(0, 256, (count, kind.num_bytes), np.uint8)
    for column in kind.exponents:
        blocks[:, column] = generator.integers(*MXFP4_EXPONENTS, count)
    scale = 1.0
    for _ in range(2 if kind.halves else 0):  # the first time, to see how large weights are
        # The second number of a type is that of its offset, which brings the mean to zero.
        for column, factor in zip(kind.halves, (1.0, OFFSETS.get(kind.name, 0.0)), strict=False):
            half = np.array([scale * factor], np.float16)
            blocks[:, column : column + 2] = half.view(np.uint8)
        number = getattr(gguf.GGMLQuantizationType, kind.name)
        scale *= NOISE / float(gguf.dequantize(blocks[:1000], number).std())
    return blocks


def repeat_into(data: Array, block: Array, generator: np.random.Generator) -> None:
    """Fill an array with another one, repeated from any place of it on."""
    place = int(generator.integers(len(block)))
    done = 0
    while done < len(data):
        taken = block[place : place + len(data) - done]
        data[done : done + len(taken)] = taken
        done, place = done + len(taken), 0


def write_tokenizer(folder: Path, vocab_size: int, *, is_gemma: bool) -> None:
    """Write a tokenizer with a token for each byte, in Gemma's form or byte-level.

    Gemma's converter takes the whole vocabulary from it, the others pad it.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>"]
    if is_gemma:
        bytes_ = [f"<0x{value:02X}>" for value in range(256)]
        words = [*specials, *bytes_, "▁", *map(chr, range(33, 127)), "he"]
        words += [f"<unused{number}>" for number in range(vocab_size - len(words))]
        model = BPE(
            {word: number for number, word in enumerate(words)}, [("h", "e")],
            byte_fallback=True, fuse_unk=True, unk_token="<unk>",
        )  # fmt: skip
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
        tokenizer = Tokenizer(BPE({w: n for n, w in enumerate(words)}, [("h", "e")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", settings)


def make_file(name: str, args: argparse.Namespace) -> Path:
    """Return a model's GGUF file, made unless it is there; raise PeerError."""
    shape = SHAPES[name]
    file: Path = args.folder / f"{name}-{shape.num_layers}-layers-{shape.kind}.gguf"
    if file.exists():
        return file
    folder, whole = args.folder / f"{name}.folder", args.folder / f"{name}-BF16.gguf"
    partial, log = file.with_suffix(".partial"), args.folder / "family-speed.log"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        write_folder(shape, folder)
        convert_folder(args.llama_source, folder, whole, log, has_zeros=True)
        words = [args.llama_bin / "llama-quantize", whole, partial, shape.kind, args.threads]
        run_logged(words, log, f"quantizing {name} as {shape.kind}")
        fill_file(partial)
        partial.rename(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in (whole, partial):
            path.unlink(missing_ok=True)
    return file


def measure_models(args: argparse.Namespace) -> Iterator[gguf_types.Row]:
    """Yield each model's row; without figures where only its file is made."""
    for name in args.models:
        try:
            file = make_file(name, args)
            if not args.make_only:
                label = f"{name}, {SHAPES[name].kind}"
                yield {"type": label} | gguf_types.measure_file(file, args)
            if args.remove:
                file.unlink()
        except (PeerError, SpecDecError) as error:
            yield {"type": name, "error": str(error)}


def main(words: Sequence[str] | None = None) -> None:
    parser = gguf_types.make_common_parser(__doc__, ROOT / "out" / "family-speed")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--llama-source", type=Path, default=SOURCE, help="its checkout")
    parser.add_argument("--make-only", action="store_true", help="make the files, measure nothing")
    parser.add_argument("--remove", action="store_true", help="remove a file that is measured")
    args = parser.parse_args(words)
    gguf_types.report_rows(measure_models, args, "family-speed")


if __name__ == "__main__":
    main()
