"""Which formats of quantized Hugging Face folders are read, and what their sections may say.

A key that changes the numbers must have a value that is understood here; a key that is not known
is an error, since it might. Bits, groups and zeros are then checked against the tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from specdec.errors import SpecDecError, shorten
from specdec.files.reading import read_json
from specdec.model.quantization import FLOAT8, FP8, NVFP4_GROUP_SIZE

from ..hf import QUANTIZATION_NAME, HfFolder
from . import float4, matrices
from .matrices import Matrix

# Makes a matrix of a folder's module.
Maker = Callable[[HfFolder, str], Matrix]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFormat:
    """A format that is read.

    title: its name in docs; marker: the tensor that tells a quantized module; stored_as: how a
    checkpoint holds the numbers, None where only --dequantize writes any; bits: those read.
    """

    title: str
    marker: str
    stored_as: str | None
    bits: str


INT4 = "four bits"
FP8_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
SOURCE_FORMATS: Mapping[str, SourceFormat] = {
    "awq": SourceFormat(title="AutoAWQ (gemm)", marker="qweight", stored_as=INT4, bits="4"),
    "gptq": SourceFormat(title="GPTQ", marker="qweight", stored_as=INT4, bits="4, 8"),
    "pack-quantized": SourceFormat(
        title="compressed-tensors pack-quantized", marker="weight_packed", stored_as=INT4,
        bits="4, 8",
    ),
    "fp8-static": SourceFormat(
        title="FP8, static scales", marker="weight", stored_as=FP8, bits="8"
    ),
    "fp8-dynamic": SourceFormat(
        title="FP8, inputs scaled as they come", marker="weight", stored_as=FP8_ROWS, bits="8"
    ),
    "fp8-weights": SourceFormat(
        title="FP8, inputs not rounded, or a scale a row and static inputs", marker="weight",
        stored_as=None, bits="8",
    ),
    "fp8-block": SourceFormat(title="FP8 in blocks", marker="weight", stored_as=None, bits="8"),
    "modelopt-int4": SourceFormat(
        title="ModelOpt INT4 AWQ", marker="weight", stored_as=INT4, bits="4"
    ),
    "modelopt-nvfp4": SourceFormat(
        title="ModelOpt NVFP4", marker="weight", stored_as="NVFP4", bits="4"
    ),
    "nvfp4-pack-quantized": SourceFormat(
        title="compressed-tensors nvfp4-pack-quantized", marker="weight_packed", stored_as=None,
        bits="4",
    ),
    "modelopt-nvfp4-weights": SourceFormat(
        title="ModelOpt W4A16_NVFP4", marker="weight", stored_as=None, bits="4"
    ),
}  # fmt: skip
_READ = "AWQ, GPTQ, compressed-tensors, ModelOpt and FP8 folders are read"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """Quantization by a folder's sections: format, number of bits, and how a matrix is read."""

    name: str
    bits: int
    description: str
    make: Maker

    @property
    def format(self) -> SourceFormat:
        return SOURCE_FORMATS[self.name]

    @property
    def stored_as(self) -> str | None:
        """Return how a checkpoint holds the numbers; None where it cannot."""
        return None if self.format.stored_as == INT4 and self.bits != 4 else self.format.stored_as

    def find_modules(self, folder: HfFolder) -> list[str]:
        """List the modules of a folder whose matrices are quantized."""
        ending = f".{self.format.marker}"
        dtypes = {"fp8": (FLOAT8,), "modelopt": ("uint8", "int8")}
        wanted_dtypes = dtypes.get(self.name.partition("-")[0])
        return [
            name.removesuffix(ending) for name, info in folder.tensors.items()
            if name.endswith(ending) and (wanted_dtypes is None or info.dtype in wanted_dtypes)
        ]  # fmt: skip


class Section:
    """A section of a config.json, read key by key; a key that no reader asked for is an error."""

    def __init__(self, folder: HfFolder, values: Mapping[str, Any], location: str) -> None:
        self.folder = folder
        self.values = values
        self.location = location
        self.known_keys: set[str] = set()

    def take(self, key: str, *allowed_values: Any, default: Any = None) -> Any:
        """Return a value, which must be one of those allowed, if any are given."""
        self.known_keys.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        kinds = {(type(allowed_value), allowed_value) for allowed_value in allowed_values}
        if kinds and (not isinstance(value, Hashable) or (type(value), value) not in kinds):
            choices = ", ".join(str(choice) for choice in allowed_values if choice is not None)
            raise self.refuse(f"{key} is {shorten(value)}", f"{key} may be {choices}; {_REMEDY}")
        return value

    def take_group_size(self, default: int) -> int:
        """Return `group_size`, a number of columns; -1 means all of them."""
        value = self.take("group_size", default=default)
        if type(value) is int and (value > 0 or value == -1):
            return value
        fact = f"group_size is {shorten(value)}"
        raise self.refuse(fact, "give a whole number, or -1 for whole rows")

    def skip(self, *keys: str) -> None:
        """Leave out keys that change no number."""
        self.known_keys.update(keys)

    def refuse_rest(self) -> None:
        """Raise SpecDecError for keys that are not known and have a value."""
        unknown_keys = {
            key: value for key, value in self.values.items()
            if key not in self.known_keys and value not in (None, False, [], {})
        }  # fmt: skip
        if unknown_keys:
            key_words = ", ".join(f"{key} {shorten(value)}" for key, value in unknown_keys.items())
            raise self.refuse(f"{key_words}: not known, and may change the numbers", _REMEDY)

    def refuse(self, fact: str, remedy: str) -> SpecDecError:
        return SpecDecError(f"{self.folder.path} is quantized ({self.location}): {fact}", remedy)


_REMEDY = "convert the unquantized model instead"
UNNAMED = "by a method without a name"


def read_sections(folder: HfFolder) -> list[tuple[str, Any]]:
    """Read what a folder says of its quantization: methods, and what each says."""
    sections: list[tuple[str, Any]] = []
    path = folder.path / QUANTIZATION_NAME
    if path.is_file():
        sections.append(("modelopt", read_json(path).get("quantization")))
    section = folder.config.get("quantization_config")
    mlx = folder.config.get("quantization")  # which its newer versions write as both
    if isinstance(mlx, dict) and {"group_size", "bits"} <= mlx.keys() and section in (None, mlx):
        return [*sections, ("mlx", mlx)]
    if section is not None:
        sections.append((_find_method(section), section))
    elif any(name.endswith(".qweight") for name in folder.tensors):
        sections += _read_own_file(folder)
    return sections or _recognize(folder)


def _find_method(section: Any) -> str:
    """Return the method that a section names, as transformers finds it."""
    if not isinstance(section, dict):
        return UNNAMED
    if section.get("load_in_8bit") or section.get("load_in_4bit"):  # early ones name no method
        return "bitsandbytes"
    return str(section.get("quant_method") or UNNAMED)


def _recognize(folder: HfFolder) -> list[tuple[str, Any]]:
    """Return the method of a folder that says nothing, by a tensor that only its matrices have."""
    methods = [
        method for name in folder.tensors
        for ending, method in MARKS.items() if name.endswith(ending)
    ]  # fmt: skip
    return [(methods[0], {})] if methods else []


def _read_own_file(folder: HfFolder) -> list[tuple[str, Any]]:
    """Read the section that early AutoGPTQ and AutoAWQ wrote into a separate file."""
    for name, method in OWN_FILES.items():
        if (path := folder.path / name).is_file():
            values = read_json(path)
            renamed = {EARLY_KEYS.get(key, key): value for key, value in values.items()}
            return [(method, renamed)]
    return []


def refuse_quantized(folder: HfFolder) -> None:
    """Raise SpecDecError where a drafter's matrices are stored quantized."""
    quantized_names = [
        name for name, info in folder.tensors.items()
        if name.endswith((*QUANTIZED, *MARKS)) or info.dtype == FLOAT8
    ]  # fmt: skip
    if quantized_names:
        raise SpecDecError(
            f"{folder.path} holds a drafter with quantized matrices ({quantized_names[0]}), and"
            " drafters are read unquantized",
            "take the drafter that it was made from; specdec-build --drafter-weights int8 or int4"
            " rounds its matrices",
        )


def read_scheme(folder: HfFolder) -> Scheme | None:
    """Return how a folder says that it is quantized, or None; SpecDecError if it is not read."""
    schemes: list[Scheme] = []
    for method, values in read_sections(folder):
        if not isinstance(values, dict):
            raise SpecDecError(
                f"{folder.path} is quantized ({method}), and its section is {shorten(values)}, not"
                " an object",
                "copy or download the folder again",
            )
        if method in IN_BLOCKS:
            continue
        if method not in METHODS:
            reason, remedy = REFUSED.get(method, ("a format that is not read", _REMEDY))
            raise SpecDecError(
                f"{folder.path} is quantized ({method}): {reason}", f"{remedy}; {_READ}"
            )
        section = Section(folder, values, method)
        section.skip("quant_method")
        schemes.append(METHODS[method](section))
        section.refuse_rest()
    if len({(scheme.name, scheme.bits) for scheme in schemes}) > 1:
        descriptions = " and ".join(scheme.description for scheme in schemes)
        raise SpecDecError(
            f"{folder.path} is quantized ({descriptions}): its sections disagree",
            f"correct {QUANTIZATION_NAME} or quantization_config of config.json",
        )
    return schemes[0] if schemes else None


def holds_blocks(folder: HfFolder) -> bool:
    """Return whether a folder says that it has matrices whose groups are blocks of GGML's."""
    return any(method in IN_BLOCKS for method, _ in read_sections(folder))


# Keys that say how AWQ or GPTQ quantized, which transformers 5 writes for both; they change nothing
# in what the tensors hold.
QUANTIZER_KEYS = (
    "damp_percent", "true_sequential", "act_group_aware", "dataset", "tokenizer", "lm_head", "meta",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs", "model_seqlen",
)  # fmt: skip
# Keys of that kind that AutoRound writes, where it writes GPTQ's layout.
AUTOROUND_KEYS = (
    "autoround_version", "iters", "nsamples", "seqlen", "lr", "minmax_lr", "train_bs",
    "gradient_accumulate_steps", "low_gpu_mem_usage", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "scale_dtype", "provider",
)  # fmt: skip


def _check_rules(section: Section) -> None:
    """Refuse GPTQModel's rules for modules, but those that leave them unquantized.

    Which these are their tensors tell.
    """
    rules = section.take("dynamic", default={})
    names = [*rules] if isinstance(rules, dict) else [rules]
    if any(not str(name).startswith("-:") for name in names):
        raise section.refuse(
            f"dynamic {shorten(rules)} gives some modules other numbers; only rules that leave"
            " modules out, -:NAME, are read",
            _REMEDY,
        )


def _read_awq(section: Section) -> Scheme:
    section.take("bits", 4, default=4)
    for name in ("version", "format", "checkpoint_format"):  # the others are GPTQModel's
        section.take(name, "gemm", "GEMM", default="gemm")
    section.take("backend", "autoawq", "auto", default="autoawq")
    section.take("method", "awq", default="awq")
    section.take("pack_dtype", "int32", default="int32")
    _check_rules(section)
    has_zeros = section.take("zero_point", True, False, default=True)
    size = section.take_group_size(128)
    section.skip(
        "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
        "exllama_config", "sym", "desc_act", *QUANTIZER_KEYS,
    )  # fmt: skip
    make = functools.partial(matrices.AwqMatrix, group_size=size, is_symmetric=not has_zeros)
    return Scheme(name="awq", bits=4, description=f"AWQ, group_size {size}", make=make)


def _read_gptq(section: Section) -> Scheme:
    bits = section.take("bits", 4, 8)
    kind = section.take("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    section.take("format", "gptq", "gptq_v2", kind, default=kind)
    section.take("method", "gptq", default="gptq")
    section.take("pack_dtype", "int32", default="int32")
    section.take("data_type", "int", default="int")
    _check_rules(section)
    is_symmetric = section.take("sym", True, False, None)
    is_ordered = section.take("desc_act", True, False, default=False)
    # Static groups are of columns as they lie, in whatever order these were quantized.
    is_ordered = is_ordered and section.take("static_groups", default=False) is not True
    size = section.take_group_size(128)
    meta = section.take("meta", default={})
    quantizer = meta.get("quantizer", "") if isinstance(meta, dict) else ""
    section.skip(
        "damp_auto_increment", "static_groups", "mse", "model_name_or_path",
        "model_file_base_name", "use_exllama", "disable_exllama", "exllama_config",
        "use_cuda_fp16", "backend", "quantizer", "hyb_act", *QUANTIZER_KEYS, *AUTOROUND_KEYS,
    )  # fmt: skip
    make = functools.partial(
        matrices.GptqMatrix, group_size=size, bits=bits, zero_offset=int(kind == "gptq"),
        carries="gptqmodel" in str(quantizer), is_ordered=is_ordered,
        is_symmetric=is_symmetric is True,
    )  # fmt: skip
    words = f"GPTQ, {bits} bits, group_size {size}, checkpoint_format {kind}"
    return Scheme(name="gptq", bits=bits, description=words, make=make)


def _read_compressed(section: Section) -> Scheme:
    _check_compression(section)
    groups = section.take("config_groups")
    format_name = section.take("format", default="")
    kind, bits, strategy, size, block, inputs, is_ordered, is_symmetric = _read_groups(
        section, groups
    )
    is_packed = format_name == "pack-quantized" and strategy in ("channel", "group")
    if kind == "int" and is_packed and bits in (4, 8):
        maker = functools.partial(
            matrices.PackedMatrix, group_size=size, bits=bits, is_ordered=is_ordered,
            is_symmetric=is_symmetric,
        )  # fmt: skip
        words = f"compressed-tensors pack-quantized, {bits} bits, group_size {size}"
        return Scheme(name="pack-quantized", bits=bits, description=words, make=maker)
    if format_name == NVFP4_PACKED and (kind, bits, strategy, size) == NVFP4_WEIGHTS:
        words = f"compressed-tensors {NVFP4_PACKED}"
        return Scheme(name=NVFP4_PACKED, bits=4, description=words, make=float4.PackedFloat4Matrix)
    if (kind, bits) == ("float", 8) and format_name in FLOAT_FORMATS:
        rounding = "weights" if inputs == "static" and strategy != "tensor" else inputs
        words = f"compressed-tensors FP8, {strategy}"
        return _make_float8(words, block, rounding, in_scale_dtype=True)
    raise section.refuse(
        f"format {format_name or None}, weights {kind} of {bits} bits by {strategy}",
        f"pack-quantized of 4 or 8 bits by channel or group, NVFP4 and FP8 are read; {_REMEDY}",
    )


NVFP4_PACKED = "nvfp4-pack-quantized"
NVFP4_WEIGHTS = ("float", 4, "tensor_group", NVFP4_GROUP_SIZE)
# compressed-tensors' formats of float8; "" where a section names none.
FLOAT_FORMATS = ("float-quantized", "naive-quantized", "")


def _check_compression(section: Section) -> None:
    """Raise SpecDecError for a section whose tensors are not those of its groups."""
    # Some writers leave the status of the model in memory; tensors are compressed all the same.
    section.take("quantization_status", "compressed", "frozen", default="compressed")
    section.take("kv_cache_scheme")
    sparsity = section.take("sparsity_config", default={})
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise section.refuse(f"sparsity_config has format {sparsity['format']!r}", _REMEDY)
    if section.take("transform_config", default={}):
        raise section.refuse(
            "transform_config rotates weights and activations, which is not read", _REMEDY
        )
    section.skip("ignore", "version", "global_compression_ratio")


# Values of compressed-tensors' `actorder`: those of which a model has weight_g_idx, and the others.
STORED_ORDERS = ("group", "dynamic", True)
UNSTORED_ORDERS = ("weight", "static", False)


class GroupedWeights(NamedTuple):
    """Weights of a group of compressed-tensors, which is a set of modules.

    kind: int or float; block: rows and columns of one of float8. inputs: how inputs are rounded.
    is_ordered: whether columns are in groups by the order of activations, which is stored; by
    "weight" they were quantized in that order, in groups of columns as they lie.
    """

    kind: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    inputs: str
    is_ordered: bool
    is_symmetric: bool


def _read_groups(section: Section, groups: Any) -> GroupedWeights:
    """Return what `_read_group` does of each group, which must all be alike."""
    if not isinstance(groups, dict) or not groups:
        raise section.refuse(f"config_groups is {shorten(groups)}", _REMEDY)
    weights = [_read_group(section, name, group) for name, group in groups.items()]
    if any(other_weights != weights[0] for other_weights in weights):
        raise section.refuse("its config_groups quantize weights in different ways", _REMEDY)
    return weights[0]


def _read_group(section: Section, name: str, values: Any) -> GroupedWeights:
    """Read one of a section's groups."""
    if not isinstance(values, dict) or not isinstance(values.get("weights"), dict):
        raise section.refuse(f"config_groups.{name} is {shorten(values)}", _REMEDY)
    group = Section(section.folder, values, f"{section.location}, config_groups.{name}")
    group.skip("targets", "format")
    weights = Section(section.folder, group.take("weights"), f"{group.location}.weights")
    weights.skip("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    is_symmetric = weights.take("symmetric", True, False, default=True)
    order = weights.take("actorder", *STORED_ORDERS, *UNSTORED_ORDERS, default=False)
    weights.take("dynamic", False, default=False)
    kind = weights.take("type", "int", "float", default="int")
    bits = weights.take("num_bits", default=8)
    size = weights.take_group_size(-1)
    default_strategy = {True: "group", False: "tensor"}[size > 0]
    strategy = weights.take(
        "strategy", "tensor", "channel", "group", "block", "tensor_group", default=default_strategy
    )
    block = weights.take("block_structure")
    weights.refuse_rest()
    inputs = group.take("input_activations")
    rounding = "weights"
    if inputs is not None:
        like = {"type": kind, "num_bits": bits}
        if kind != "float" or not isinstance(inputs, dict) or not like.items() <= inputs.items():
            raise section.refuse(
                f"inputs of linears are rounded too ({shorten(inputs)})",
                f"4-bit weights with plain inputs and FP8 are read; {_REMEDY}",
            )
        input_strategy = inputs.get("strategy")
        if inputs.get("dynamic", False) is False and input_strategy in (None, "tensor"):
            rounding = "static"
        elif inputs.get("dynamic") is True and input_strategy == "token":
            rounding = "dynamic"
    if group.take("output_activations") is not None:
        raise section.refuse("outputs of linears are rounded too", _REMEDY)
    group.refuse_rest()
    block = _read_block(section, block)
    is_ordered = order in STORED_ORDERS
    return GroupedWeights(kind, bits, strategy, size, block, rounding, is_ordered, is_symmetric)


def _read_block(section: Section, value: Any) -> tuple[int, int] | None:
    """Return rows and columns of a block of float8."""
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise section.refuse(f"a block of {shorten(value)}", "give rows and columns")
    return value[0], value[1]


def _make_float8(
    words: str, block: tuple[int, int] | None, inputs: str, *, in_scale_dtype: bool = False
) -> Scheme:
    """Return the scheme of FP8 weights with inputs that are static, dynamic or not rounded."""
    name = "fp8-block" if block else f"fp8-{inputs}"
    make = functools.partial(matrices.Float8Matrix, block=block, in_scale_dtype=in_scale_dtype)
    return Scheme(name=name, bits=8, description=words, make=make)


def _read_fp8(section: Section) -> Scheme:
    scheme = section.take("activation_scheme", "static", "dynamic", default="dynamic")
    block = _read_block(section, section.take("weight_block_size"))
    section.take("fmt", "e4m3", default="e4m3")
    section.take("scale_fmt", "ue8m0", "float", default="float")  # how scales were chosen
    section.take("expert_dtype", "fp8", default="fp8")
    section.skip(
        "modules_to_not_convert", "modules_to_convert", "ignored_layers", "kv_cache_scheme"
    )
    words = f"FP8, activation_scheme {scheme}" + (f", blocks of {list(block)}" if block else "")
    return _make_float8(words, block, scheme)


def _read_modelopt(section: Section) -> Scheme:
    algorithm = section.take("quant_algo")
    section.take("kv_cache_quant_algo", FP8, default=FP8)
    section.take("has_zero_point", False, default=False)
    section.skip("exclude_modules", "ignore", "config_groups", "kv_cache_scheme", "producer")
    section.skip("pre_quant_scale")  # the tensors tell
    size = section.take_group_size(128)
    if algorithm == "FP8":
        return _make_float8("ModelOpt FP8", None, "static")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return _make_float8(f"ModelOpt {algorithm}", None, "dynamic")
    if algorithm == "W4A16_AWQ":
        size = _find_group_size(section, size)
        make = functools.partial(matrices.ModeloptInt4Matrix, group_size=size)
        words = f"ModelOpt {algorithm}, group_size {size}"
        return Scheme(name="modelopt-int4", bits=4, description=words, make=make)
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        rounds_inputs = algorithm == "NVFP4"
        return Scheme(
            name="modelopt-nvfp4" + "-weights" * (not rounds_inputs),
            bits=4,
            description=f"ModelOpt {algorithm}",
            make=functools.partial(float4.Nvfp4Matrix, rounds_inputs=rounds_inputs),
        )
    raise section.refuse(
        f"quant_algo {shorten(algorithm)}",
        "FP8, FP8_PER_CHANNEL_PER_TOKEN, W4A16_AWQ, NVFP4 and W4A16_NVFP4 of ModelOpt are read;"
        f" {_REMEDY}",
    )


def _find_group_size(section: Section, size: int) -> int:
    """Return the group size, which config.json has in its groups."""
    groups = section.values.get("config_groups")
    if "group_size" in section.values or not isinstance(groups, dict):
        return size
    sizes = {
        group["weights"].get("group_size") for group in groups.values()
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    }  # fmt: skip
    group_size = sizes.pop() if len(sizes) == 1 else None
    if type(group_size) is not int or group_size < 1:
        raise section.refuse("its config_groups give no group_size", "copy the folder again")
    return group_size


# Where early versions of AutoGPTQ and AutoAWQ wrote what is in config.json now, by other keys.
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
EARLY_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}
# Endings of the names of tensors that only quantized matrices have.
QUANTIZED = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".scales",
    ".weight_scale_2",
)
# Such endings of methods that are not read -> the method; some writers leave out its section.
MARKS = {
    ".SCB": "bitsandbytes", ".weight.absmax": "bitsandbytes", ".q_scale_max": "exl2",
    ".trellis": "exl3", ".W_q": "hqq", ".weight._data": "quanto", ".qweight": UNNAMED,
}  # fmt: skip
METHODS: Mapping[str, Callable[[Section], Scheme]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
}
# Methods of which a family's `prepare` reads the tensors, and GGML has blocks.
IN_BLOCKS = ("mxfp4",)
# quant_method -> why it is not read, and what to do.
REFUSED: Mapping[str, tuple[str, str]] = {
    UNNAMED: (
        "no quantization_config of config.json names the method",
        "take the folder's own config.json; or convert the unquantized model instead",
    ),
    "bitsandbytes": (
        "its numbers are blocks of the flattened matrix with scales that are quantized again, laid"
        " out for its own kernels, which neither backend has",
        "convert the model that it was made from; or load it with transformers where bitsandbytes"
        " runs, call dequantize() and save_pretrained(), and convert that",
    ),
    "mlx": (
        "its groups of numbers are MLX's, which no backend has",
        "convert the model that it was made from; or write plain weights with `mlx_lm.convert"
        " --hf-path FOLDER --dequantize --mlx-path PLAIN`, and convert those",
    ),
}
