"""Writer of GGUF, llama.cpp's format: a model, an EAGLE-3 drafter, or an MTP head.

A drafter's file holds its target's tokenizer; an MTP head's, also its embedding and output layer.

Keys and names are llama.cpp's at 0c1e57098 (src/llama-arch.cpp, src/models/, conversion/llama.py),
written through its package `gguf`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.engine.rotary import compute_frequencies
from specdec.errors import SpecDecError, shorten
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.staging import check_free_space
from specdec.gguf.file import PLAIN
from specdec.gguf.folder import localize
from specdec.gguf.names import ARCHITECTURES, MTP_NAMES, NAMES, READ, order_turned
from specdec.model.config import ModelConfig
from specdec.model.rotary_scaling import get_kind
from specdec.model.tensors import EMBEDDING, HEAD
from specdec.system.libraries import import_gguf

from .source import TARGET_NAMES, Contents, Order, TensorRows, list_entered
from .tokenizers import Vocabulary, read_template, read_tokenizer

LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
HEAD_NAMES = {hf_name: gguf_name for gguf_name, hf_name in MTP_NAMES.items()}
# dtype -> the file's type of matrices, by their names in the gguf package.
TYPES = {dtype: kind for kind, dtype in PLAIN.items()}
Q8_BLOCK = 32


def plan_file(order: Order) -> Contents:
    """Name the file's tensors, and raise every error that the export may have."""
    import_gguf("--to gguf")
    source, tensor_rows = order.source, order.source.tensors
    if source.kind == "mtp":
        stored_tensors = source.file.tensors
        tensor_rows = tensor_rows | {
            name: TensorRows(stored_name)
            for stored_name, name in TARGET_NAMES.items()
            if stored_name in stored_tensors
        }
        source.left_out.clear()  # the file holds the target's tensors, too
    net = get_net(order)
    tensors = {rename(name, net): rows for name, rows in tensor_rows.items()}
    if source.kind == "plain" and source.is_same(HEAD, EMBEDDING):
        del tensors["output.weight"]  # llama.cpp and our reader take the embedding
    plan_rotary(net)
    if net.sliding_window is not None and net.sliding_window < net.max_position_embeddings:
        raise SpecDecError(
            f"llama.cpp's {ARCHITECTURES[net.architecture]} models see all tokens, this one a"
            f" window of {net.sliding_window}",
            "give it to a runtime that reads the Hugging Face folder",
        )
    read_words(order)
    if order.settings.gguf_type == "Q8_0":
        check_q8_rows({name: source.get_info(rows).shape for name, rows in tensors.items()})
    return Contents(config={}, tensors=tensors, weights_name="model.gguf")


def check_q8_rows(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise SpecDecError for a matrix whose rows do not split into blocks of Q8_0."""
    for name, shape in shapes.items():
        if len(shape) > 1 and shape[-1] % Q8_BLOCK:
            raise SpecDecError(
                f"{name} has rows of {shape[-1]} numbers, which do not split into Q8_0's blocks of"
                f" {Q8_BLOCK}",
                "give another --gguf-type",
            )


def get_net(order: Order) -> ModelConfig:
    """Return the model to write: the target, the target with an MTP layer, or the drafter's net."""
    model = order.source.model
    if order.source.kind == "mtp":
        return dataclasses.replace(model, num_hidden_layers=model.num_hidden_layers + 1)
    return model if order.source.kind == "plain" else order.eagle.net


def rename(name: str, net: ModelConfig) -> str:
    """Return GGUF's name of a tensor; raise SpecDecError where it has none."""
    if name == "d2t":
        return name
    last_layer, names = net.num_hidden_layers - 1, READ[ARCHITECTURES[net.architecture]].layer
    module, _, kind = name.replace("mtp.layers.0.", f"layers.{last_layer}.").rpartition(".")
    if module in HEAD_NAMES:
        return f"blk.{last_layer}.{HEAD_NAMES[module]}.{kind}"
    match = LAYER.fullmatch(module)
    if match and match.group(2) in names:
        return f"blk.{match.group(1)}.{names[match.group(2)]}.{kind}"
    if module not in NAMES:
        raise SpecDecError(f"{name} has no name in a GGUF file", "export it for another runtime")
    return f"{NAMES[module]}.{kind}"


def plan_rotary(net: ModelConfig) -> Array | None:
    """Return the divisors of the rotary frequencies [R / 2]; None without scaling."""
    kind = get_kind(net.rotary_scaling) if net.rotary_scaling else "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3") or net.recurrence is not None:
        raise SpecDecError(
            f"rotary scaling {shorten(kind)} is not written as GGUF",
            "linear and llama3 are, but not of hybrids; llama.cpp's convert_hf_to_gguf.py knows"
            " others",
        )
    plain, _ = compute_frequencies(dataclasses.replace(net, rotary_scaling=None), 1)
    scaled, _ = compute_frequencies(net, 1)
    factors: Array = (plain / scaled).numpy()
    return factors


def read_words(order: Order) -> Vocabulary:
    """Read the tokenizer of --model-dir."""
    model_dir = order.settings.model_dir
    folder = None if model_dir is None else localize(model_dir)
    return read_tokenizer(folder, order.source.model.vocab_size)


def write_file(path: Path, order: Order, contents: Contents) -> None:
    """Write the file, reading one tensor at a time."""
    gguf = import_gguf("--to gguf")
    source = order.source
    net, words = get_net(order), read_words(order)
    is_drafter = source.kind == "eagle3"
    architecture = "eagle3" if is_drafter else ARCHITECTURES[net.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    kind = order.settings.gguf_type or TYPES[source.model.dtype]
    add_values(gguf, writer, order, net, words, kind)
    if is_drafter:
        # EAGLE-3's keys by hand: the package names them only since 0.20.
        writer.add_array("eagle3.target_layers", list_entered(order.eagle3))
        writer.add_uint32("eagle3.target_hidden_size", source.model.hidden_size)
        writer.add_bool("eagle3.norm_before_residual", order.eagle3.norm_before_residual)
        writer.add_bool("eagle3.norm_before_fc", order.eagle3.norm_before_fc)
    planned_tensors = plan_tensors(gguf, writer, order, contents, kind)
    # The package's error for a full disk does not name the disk.
    check_free_space(
        path, sum(num_bytes for num_bytes, _ in planned_tensors), "the file takes at least"
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, make in planned_tensors:
        writer.write_tensor_data(make())
    writer.close()


def add_values(
    gguf: Any, writer: Any, order: Order, net: ModelConfig, words: Vocabulary, kind: str
) -> None:
    """Add llama.cpp's keys for the model and its tokenizer."""
    writer.add_name(order.settings.output_dir.name)
    files = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, files[kind]))
    for name, value in {
        "vocab_size": net.vocab_size, "context_length": net.max_position_embeddings,
        "block_count": net.num_hidden_layers, "embedding_length": net.hidden_size,
        "feed_forward_length": net.intermediate_size, "head_count": net.num_attention_heads,
        "head_count_kv": net.num_key_value_heads, "key_length": net.head_size,
        "value_length": net.head_size, "layer_norm_rms_eps": net.norm_epsilon,
        "rope_dimension_count": net.rotary_size, "rope_freq_base": net.rotary_base,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    if (sizes := net.linear_attention) is not None:
        # A text's position has one value in all sections.
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        for key, number in {
            "nextn_predict_layers": 1, "ssm.conv_kernel": sizes.num_taps,
            "ssm.state_size": sizes.key_size, "ssm.group_count": sizes.num_key_heads,
            "ssm.time_step_rank": sizes.num_value_heads, "ssm.inner_size": sizes.sections[2],
        }.items():  # fmt: skip
            writer.add_uint32(f"{writer.arch}.{key}", number)
    writer.add_tokenizer_model("gpt2" if words.scores is None else "llama")
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    if words.scores is None:
        writer.add_token_merges(words.merges)
    else:
        writer.add_token_scores(words.scores)
        writer.add_add_space_prefix(words.adds_space)
        writer.add_add_eos_token(False)
    for name, number in words.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(words.adds_bos)
    template = read_template(Path(localize(order.settings.model_dir or "")))
    if template is not None:
        writer.add_chat_template(template)


def plan_tensors(
    gguf: Any, writer: Any, order: Order, contents: Contents, kind: str
) -> list[tuple[int, Callable[[], Array]]]:
    """Announce every tensor: vectors in float32, matrices in the type `kind`.

    Returns the size of each tensor in bytes, and a function that reads it.
    """
    types, source, planned_tensors = gguf.GGMLQuantizationType, order.source, []

    def add(name: str, shape: tuple[int, ...], kind: Any, make: Callable[[], Array]) -> None:
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // size * block_bytes
        writer.add_tensor_info(name, shape, np.float32, num_bytes, raw_dtype=kind)
        planned_tensors.append((num_bytes, make))

    factors = plan_rotary(get_net(order))
    if factors is not None:
        float_factors = factors.astype(np.float32)
        add("rope_freqs.weight", float_factors.shape, types.F32, lambda: float_factors)
    for name in sorted(contents.tensors):
        rows = contents.tensors[name]
        shape = source.get_info(rows).shape
        if name == "d2t":
            # Absolute ids: Hugging Face's are offsets from the draft token's id.
            ids: Array = source.read(rows) + np.arange(shape[0])
            add(name, shape, types.I64, functools.partial(np.asarray, ids))
            continue
        tensor_kind = types.F32 if len(shape) == 1 else types[kind]
        add(
            name,
            shape,
            tensor_kind,
            functools.partial(read_tensor, gguf, order, name, rows, tensor_kind),
        )
    return planned_tensors


def read_tensor(gguf: Any, order: Order, name: str, rows: TensorRows, kind: Any) -> Array:
    """Read a tensor in one of GGUF's types, with llama.cpp's order of query and key rows."""
    net, array = get_net(order), order.source.read(rows)
    heads = {"attn_q": net.num_attention_heads, "attn_k": net.num_key_value_heads}
    module = name.split(".")[-2]
    if module in heads and ARCHITECTURES[net.architecture] == "llama":
        array = array[np.argsort(order_turned(len(array), heads[module]))]
    dtype = PLAIN.get(kind.name, "float32")
    values: Array = np.ascontiguousarray(cast(array, order.source.model.dtype, dtype))
    if module.endswith("norm"):
        values = values + np.float32(READ[ARCHITECTURES[net.architecture]].shift)
    return values if kind.name in PLAIN else gguf.quants.quantize(values, kind)
