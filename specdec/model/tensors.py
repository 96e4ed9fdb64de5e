"""Canonical tensor names (TensorRT-LLM's), their shapes, and how each splits over ranks."""

from __future__ import annotations

import dataclasses
from enum import Enum

from specdec.model.config import ModelConfig
from specdec.model.experts import Experts
from specdec.model.linear_attention import LinearAttention
from specdec.model.mamba2 import Mamba2Sizes
from specdec.model.short_conv import ShortConvSizes

EMBEDDING = "transformer.vocab_embedding.weight"
HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
# The nets of EAGLE, its first, of DFlash and MTP; what a reduced vocabulary adds to a drafted
# token.
EAGLE_NET, DFLASH_NET, MTP_NET = "eagle_nets.0.", "dflash.", "mtp."
# The net of an MTP assistant, and its head by centroids: a row for each token, what stands for as
# many tokens, and the tokens in the order of the centroids.
ASSISTANT_NET = "mtp_assistant."
TOKEN_ROWS, CENTROIDS = "drafter.vocab_embedding.weight", "drafter.centroids.weight"
TOKEN_ORDER = "drafter.token_order"
# DSpark's two matrices of DFlash's: a row for the token before, and a head that reads that.
MARKOV_EMBEDDING, MARKOV_HEAD = "markov.vocab_embedding.weight", f"markov.{HEAD}"
OFFSETS = "d2t"
NETS_OFFSETS = tuple(net + OFFSETS for net in (EAGLE_NET, DFLASH_NET, MTP_NET, ASSISTANT_NET))
# Tensors that a token's choice among a layer's experts is computed with.
ROUTER, ROUTER_BIAS = "mlp.router.weight", "mlp.router.bias"
# Beginning of the names of experts beside an MLP, within the layer.
ADDED_EXPERTS = "mlp.experts."
# A score of each query head, see `Architecture.has_sinks`.
SINKS = "attention.sinks"
# The table of what each layer reads of a token besides the layer before it, and its numbers' norm.
LAYER_INPUTS, LAYER_INPUT_NORM = "transformer.layer_inputs.weight", "transformer.layer_input_norm"
# Beginnings of the names of a layer of linear attention, within the layer.
LINEAR_MODULE = "linear_attention."
CONV_MODULE = "short_conv."  # of a layer with a short convolution
MAMBA_MODULE = "mamba."  # of a layer of Mamba-2
# The bias of each expert's score, and the MLP of a mixture's first layers.
SCORE_BIAS, DENSE_MODULE = "mlp.expert_bias", "mlp.dense."


class Shard(Enum):
    """How a tensor is divided over tensor-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds all of it
    ROWS = "rows"  # dimension 0, evenly
    COLUMNS = "columns"  # dimension 1, evenly
    QKV = "qkv"  # dimension 0 = [q; k; v], each by heads; few K/V heads are duplicated
    VOCAB = "vocab"  # dimension 0, ceil(V / tp) rows per rank, zero rows at the end
    SECTIONS = "sections"  # dimension 0 = `TensorSpec.sections`, or two halves, each split evenly
    # Tensors of three dimensions, the first of which counts experts; see `Experts`.
    EXPERT_PAIRS = "expert_pairs"  # whole experts, and of each as SECTIONS, in halves
    EXPERT_COLUMNS = "expert_columns"  # whole experts, and of each as COLUMNS


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of the whole model.

    shape: [out, in] for a matrix, [size] for a vector, [experts, out, in] for those of a mixture.
    owner: the model whose heads a QKV tensor has, where that is not the target. sections: rows of
    each part of a SECTIONS tensor that is not made of halves; num_whole: the first of them, which
    every rank has whole.
    """

    shape: tuple[int, ...]
    shard: Shard
    owner: ModelConfig | None = None
    sections: tuple[int, ...] = ()
    num_whole: int = 0


def get_rank_shape(spec: TensorSpec, model: ModelConfig) -> tuple[int, ...]:  # noqa: PLR0911 - a return for each kind of shard
    """Shape of one rank's part; the same on every rank."""
    model = spec.owner or model
    tp_size, num_rows, row_shape = model.tp_size, spec.shape[0], spec.shape[1:]
    if spec.shard in (Shard.ROWS, Shard.SECTIONS):
        num_whole = sum(spec.sections[: spec.num_whole])
        return (num_whole + (num_rows - num_whole) // tp_size, *row_shape)
    if spec.shard is Shard.COLUMNS:
        return (num_rows, spec.shape[1] // tp_size)
    if spec.shard is Shard.VOCAB:
        return (-(-num_rows // tp_size), *row_shape)
    if spec.shard in (Shard.EXPERT_PAIRS, Shard.EXPERT_COLUMNS):
        assert model.experts is not None
        num, num_parts = len(model.experts.list_rank_experts(0)), model.experts.tp_size
        if spec.shard is Shard.EXPERT_PAIRS:
            return (num, row_shape[0] // num_parts, row_shape[1])
        return (num, row_shape[0], row_shape[1] // num_parts)
    if spec.shard is Shard.QKV:
        own_heads = model.num_attention_heads // tp_size
        heads = own_heads * model.query_parts + 2 * model.get_num_kv_heads()
        return (heads * model.head_size, *row_shape)
    return spec.shape


def list_target_tensors(model: ModelConfig) -> dict[str, TensorSpec]:
    """Map canonical names to every tensor of the target, whole."""
    arithmetic, hidden = model.arithmetic, model.hidden_size
    embedding_shard = Shard.REPLICATED
    if model.use_parallel_embedding:
        embedding_shard = Shard.COLUMNS if model.embedding_sharding_dim == 1 else Shard.VOCAB
    tensors = {
        "transformer.vocab_embedding.weight": TensorSpec(
            (model.vocab_size, hidden), embedding_shard
        )
    }
    if arithmetic.positions == "learned":
        tensors["transformer.position_embedding.weight"] = TensorSpec(
            (model.max_position_embeddings, hidden), embedding_shard
        )
    if model.layer_sizes is not None and (size := model.layer_sizes.input_size):
        width = model.num_hidden_layers * size
        tensors |= {
            LAYER_INPUTS: TensorSpec((model.layer_sizes.input_vocab_size, width), Shard.REPLICATED),
            "transformer.layer_input_proj.weight": TensorSpec((width, hidden), Shard.REPLICATED),
            f"{LAYER_INPUT_NORM}.weight": TensorSpec((size,), Shard.REPLICATED),
        }
    for layer in range(model.num_hidden_layers):
        prefix = f"transformer.layers.{layer}."
        tensors |= {prefix + name: spec for name, spec in list_layer_tensors(model, layer).items()}
    if not arithmetic.is_post_norm:
        tensors |= list_norm(model, "transformer.ln_f")
    if not model.share_embedding_table:
        tensors["lm_head.weight"] = TensorSpec((model.vocab_size, hidden), Shard.VOCAB)
    if arithmetic.head_bias:
        tensors["lm_head.bias"] = TensorSpec((model.vocab_size,), Shard.VOCAB)
    return tensors


def list_linears(model: ModelConfig) -> list[str]:
    """Map canonical names to every layer's linears: what is quantized where anything is."""
    return [
        name.removesuffix(".weight")
        for name, spec in list_target_tensors(model).items()
        if name.endswith(".weight")
        and any(part in name for part in ("attention.", CONV_MODULE, MAMBA_MODULE, ".mlp."))
        and not name.endswith("norm.weight")
        and len(spec.shape) > 1
    ]


def list_rank_names(model: ModelConfig, rank: int) -> dict[str, str]:
    """Name in a rank's file -> canonical name; rank = pipeline stage * tp_size + tensor rank.

    A pipeline stage holds its share of the layers, counted from 0; the first has the embeddings,
    the last the final norm and the head.
    """
    stage = rank // model.tp_size
    num_layers = model.num_hidden_layers // model.pp_size
    first_layer = stage * num_layers
    names = {}
    for name in list_target_tensors(model):
        module, _, inner_name = name.removeprefix("transformer.").partition(".")
        if module == "layers":
            layer, _, inner_name = inner_name.partition(".")
            if first_layer <= int(layer) < first_layer + num_layers:
                names[f"transformer.layers.{int(layer) - first_layer}.{inner_name}"] = name
        elif module in ("vocab_embedding", "position_embedding"):
            if stage == 0:
                names[name] = name
        elif stage == model.pp_size - 1:
            names[name] = name
    return names


def list_layer_tensors(model: ModelConfig, layer: int = 0) -> dict[str, TensorSpec]:
    """Map names within a layer to every tensor of it, whole."""
    arithmetic = model.arithmetic
    tensors = list_norm(model, "input_layernorm")
    recurrence, hidden = model.get_recurrence(layer), model.hidden_size
    if isinstance(recurrence, ShortConvSizes):
        tensors |= _list_short_conv(recurrence, hidden)
    elif isinstance(recurrence, Mamba2Sizes):
        tensors |= _list_mamba(recurrence, hidden, model.tp_size)
    elif recurrence is not None:
        tensors |= _list_linear(recurrence, hidden)
    else:
        has_keys, sizes = model.get_source(layer) is None, model.resize(layer)
        for name, spec in _list_attention(sizes, has_keys=has_keys).items():
            owner = sizes if sizes is not model and spec.shard is Shard.QKV else None
            tensors[name] = dataclasses.replace(spec, owner=owner)
    tensors |= _list_mlp(model.resize(layer), layer)
    if not arithmetic.is_parallel:
        tensors |= list_norm(model, "post_layernorm")
    if arithmetic.inner_norms:  # whose post_layernorm is of what attention yields
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors |= list_norm(model, name)
    return tensors | _list_uneven(model)


def _list_uneven(model: ModelConfig) -> dict[str, TensorSpec]:
    """List the tensors of a layer that no usual layer has."""
    arithmetic, tensors = model.arithmetic, dict[str, TensorSpec]()
    if arithmetic.adds_experts:
        tensors |= _list_added_experts(model)
    if model.layer_sizes is not None and (size := model.layer_sizes.input_size):
        shape = (size, model.hidden_size)
        tensors |= {
            "input_gate.weight": TensorSpec(shape, Shard.REPLICATED),
            "input_proj.weight": TensorSpec(shape[::-1], Shard.REPLICATED),
        }
        tensors |= list_norm(model, "post_input_layernorm")
    if arithmetic.scales_layers:
        tensors["scalar.weight"] = TensorSpec((1,), Shard.REPLICATED)
    return tensors


def _list_attention(model: ModelConfig, *, has_keys: bool) -> dict[str, TensorSpec]:
    """List the tensors of a layer that attends to keys, its own or those of an earlier layer."""
    q_size = model.num_attention_heads * model.head_size
    if not has_keys:
        return {
            "attention.q.weight": TensorSpec((q_size, model.hidden_size), Shard.ROWS),
            "attention.dense.weight": TensorSpec((model.hidden_size, q_size), Shard.COLUMNS),
            "attention.q_layernorm.weight": TensorSpec((model.head_size,), Shard.REPLICATED),
        }
    qkv_size = q_size * model.query_parts + 2 * model.num_key_value_heads * model.head_size
    tensors = {
        "attention.qkv.weight": TensorSpec((qkv_size, model.hidden_size), Shard.QKV),
        "attention.dense.weight": TensorSpec((model.hidden_size, q_size), Shard.COLUMNS),
    }
    if model.arithmetic.qk_norm:
        of_head = TensorSpec((model.head_size,), Shard.REPLICATED)
        tensors |= {f"attention.{letter}_layernorm.weight": of_head for letter in "qk"}
    if model.arithmetic.has_sinks:
        tensors[SINKS] = TensorSpec((model.num_attention_heads,), Shard.ROWS)
    # A bias after a sum over ranks is whole on every rank; the others split as their rows do.
    if model.has_qkv_bias:
        tensors["attention.qkv.bias"] = TensorSpec((qkv_size,), Shard.QKV)
    if model.has_dense_bias:
        tensors["attention.dense.bias"] = TensorSpec((model.hidden_size,), Shard.REPLICATED)
    return tensors


def _list_linear(sizes: LinearAttention, hidden: int) -> dict[str, TensorSpec]:
    """List the tensors of a layer of linear attention.

    qkvz: queries, keys, values, and what gates the output. ba: the strength of an update and the
    decay, of each value head. conv: the taps of each channel, the oldest token's first.
    """
    q_rows, k_rows, v_rows = sizes.sections
    heads = sizes.num_value_heads
    in_sections = (q_rows, k_rows, v_rows, v_rows)
    taps = tuple(rows * sizes.num_taps for rows in sizes.sections)
    specs = {
        "qkvz.weight": TensorSpec((sum(in_sections), hidden), Shard.SECTIONS, sections=in_sections),
        "ba.weight": TensorSpec((2 * heads, hidden), Shard.SECTIONS),
        "conv.weight": TensorSpec((sum(taps),), Shard.SECTIONS, sections=taps),
        "dt_bias": TensorSpec((heads,), Shard.ROWS),
        "A_log": TensorSpec((heads,), Shard.ROWS),
        "norm.weight": TensorSpec((sizes.value_size,), Shard.REPLICATED),
        "dense.weight": TensorSpec((hidden, v_rows), Shard.COLUMNS),
    }
    return {LINEAR_MODULE + name: spec for name, spec in specs.items()}


def _list_short_conv(sizes: ShortConvSizes, hidden: int) -> dict[str, TensorSpec]:
    """List the tensors of a layer with a short convolution.

    in_proj: the gate of the convolution's input, that of its output, and the input. conv: the taps
    of each channel, the oldest token's first.
    """
    channels = sizes.num_channels
    in_sections, taps = (channels,) * 3, channels * sizes.num_taps
    specs = {
        "in_proj.weight": TensorSpec(
            (3 * channels, hidden), Shard.SECTIONS, sections=in_sections
        ),
        "conv.weight": TensorSpec((taps,), Shard.ROWS),
        "dense.weight": TensorSpec((hidden, channels), Shard.COLUMNS),
    }  # fmt: skip
    if sizes.has_bias:
        specs |= {
            "in_proj.bias": TensorSpec((3 * channels,), Shard.SECTIONS, sections=in_sections),
            "conv.bias": TensorSpec((channels,), Shard.ROWS),
            "dense.bias": TensorSpec((hidden,), Shard.REPLICATED),
        }
    return {CONV_MODULE + name: spec for name, spec in specs.items()}


def _list_mamba(sizes: Mamba2Sizes, hidden: int, tp_size: int) -> dict[str, TensorSpec]:
    """List the tensors of a Mamba-2 layer.

    in_proj: C, B, x, the gate z, and a step's length for each head. conv: the taps of each channel
    of C, B and x, the oldest token's first; channels: their biases. A group that ranks share is
    whole on each.
    """
    c_rows, b_rows, x_rows = sizes.sections
    heads, num_taps = sizes.num_value_heads, sizes.num_taps
    num_whole = 0 if sizes.splits_groups(tp_size) else 2
    in_sections = (c_rows, b_rows, x_rows, x_rows, heads)
    taps = tuple(rows * num_taps for rows in sizes.sections)

    def cut(sections: tuple[int, ...], *row_shape: int) -> TensorSpec:
        shape = (sum(sections), *row_shape)
        return TensorSpec(shape, Shard.SECTIONS, sections=sections, num_whole=num_whole)

    specs = {
        "in_proj.weight": cut(in_sections, hidden),
        "conv.weight": cut(taps),
        "dt_bias": TensorSpec((heads,), Shard.ROWS),
        "A_log": TensorSpec((heads,), Shard.ROWS),
        "D": TensorSpec((heads,), Shard.ROWS),
        "norm.weight": TensorSpec((x_rows,), Shard.ROWS),
        "dense.weight": TensorSpec((hidden, x_rows), Shard.COLUMNS),
    }
    if sizes.conv_bias:
        specs["channels.bias"] = cut(sizes.sections)
    if sizes.has_bias:
        specs |= {
            "in_proj.bias": cut(in_sections),
            "dense.bias": TensorSpec((hidden,), Shard.REPLICATED),
        }
    return {MAMBA_MODULE + name: spec for name, spec in specs.items()}


def _list_mlp(model: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """List the tensors of a layer's MLP, or of its experts.

    A mixture's MLP has gate and fc in one, the activated half first.
    """
    arithmetic, hidden, inner = model.arithmetic, model.hidden_size, model.intermediate_size
    experts = None if arithmetic.adds_experts else model.get_experts(layer)
    if experts is not None:
        return _list_experts(experts, hidden, has_bias=model.has_mlp_bias)
    if arithmetic.mlp == "experts":
        return {
            f"{DENSE_MODULE}fc.weight": TensorSpec((2 * inner, hidden), Shard.SECTIONS),
            f"{DENSE_MODULE}proj.weight": TensorSpec((hidden, inner), Shard.COLUMNS),
        }
    fc = TensorSpec((inner, hidden), Shard.ROWS)
    if arithmetic.mlp == "fused":
        fc = TensorSpec((2 * inner, hidden), Shard.SECTIONS)
    mlp = {"mlp.fc.weight": fc, "mlp.proj.weight": TensorSpec((hidden, inner), Shard.COLUMNS)}
    if arithmetic.mlp == "gated":
        mlp["mlp.gate.weight"] = fc
    # A bias after a sum over ranks is whole on every rank; the others split as their rows do.
    if model.has_mlp_bias:
        mlp |= {
            "mlp.fc.bias": TensorSpec(fc.shape[:1], fc.shard),
            "mlp.proj.bias": TensorSpec((hidden,), Shard.REPLICATED),
        }
        if arithmetic.mlp == "gated":
            mlp["mlp.gate.bias"] = TensorSpec(fc.shape[:1], fc.shard)
    return mlp


def _list_added_experts(model: ModelConfig) -> dict[str, TensorSpec]:
    """List the tensors of experts beside an MLP: theirs, and the norms that bring both together."""
    assert model.experts is not None
    experts = _list_experts(model.experts, model.hidden_size, has_bias=False)
    tensors = {
        name if name == ROUTER else name.replace("mlp.", ADDED_EXPERTS): spec
        for name, spec in experts.items()
    } | {
        "mlp.router.scale": TensorSpec((model.hidden_size,), Shard.REPLICATED),
        "mlp.router.per_expert_scale": TensorSpec((model.experts.num,), Shard.REPLICATED),
    }
    names = ("mlp.post_layernorm", "mlp.experts.pre_layernorm", "mlp.experts.post_layernorm")
    return tensors | {key: spec for name in names for key, spec in list_norm(model, name).items()}


def _list_experts(experts: Experts, hidden: int, *, has_bias: bool) -> dict[str, TensorSpec]:
    """List the tensors of a layer's experts; of two halves the activated is second.

    Their biases, those of all experts one after the other, are whole on every rank.
    """
    num, inner, shared_module = experts.num, experts.inner, experts.shared_name
    tensors = {
        ROUTER: TensorSpec((num, hidden), Shard.REPLICATED),
        "mlp.fc.weight": TensorSpec((num, 2 * inner, hidden), Shard.EXPERT_PAIRS),
        "mlp.proj.weight": TensorSpec((num, hidden, inner), Shard.EXPERT_COLUMNS),
    }
    if has_bias:
        tensors |= {
            ROUTER_BIAS: TensorSpec((num,), Shard.REPLICATED),
            "mlp.fc.bias": TensorSpec((num * 2 * inner,), Shard.REPLICATED),
            "mlp.proj.bias": TensorSpec((num * hidden,), Shard.REPLICATED),
        }
    if experts.has_score_bias:
        tensors[SCORE_BIAS] = TensorSpec((num,), Shard.REPLICATED)
    if inner := experts.shared_inner:
        tensors |= {
            f"{shared_module}.fc.weight": TensorSpec((2 * inner, hidden), Shard.SECTIONS),
            f"{shared_module}.proj.weight": TensorSpec((hidden, inner), Shard.COLUMNS),
        }
    if experts.shared_inner and experts.gates_shared:
        tensors[f"{shared_module}_gate.weight"] = TensorSpec((1, hidden), Shard.REPLICATED)
    return tensors


def list_norm(model: ModelConfig, name: str) -> dict[str, TensorSpec]:
    """List the tensors of a norm, by name."""
    spec = TensorSpec((model.hidden_size,), Shard.REPLICATED)
    tensors = {f"{name}.weight": spec}
    if model.arithmetic.norm == "layer":
        tensors[f"{name}.bias"] = spec
    return tensors


def find_first_copy(name: str) -> str:
    """Return the tensor that a further EAGLE net's repeats; the name itself of any other."""
    head, _, inner_name = name.partition(".")
    return EAGLE_NET + inner_name.partition(".")[2] if head == "eagle_nets" else name


def get_stored_dtype(name: str, dtype: str) -> str:
    """Return the type that a tensor is stored in alongside weights of `dtype`."""
    vectors = (
        ROUTER, ROUTER_BIAS, SCORE_BIAS, f"{LINEAR_MODULE}A_log", f"{LINEAR_MODULE}dt_bias",
        *(MAMBA_MODULE + vector for vector in ("A_log", "dt_bias", "D")),
    )  # fmt: skip
    if name.endswith(tuple(f".{vector}" for vector in vectors)):
        return "float32"
    return "int64" if name in (*NETS_OFFSETS, ASSISTANT_NET + TOKEN_ORDER) else dtype
