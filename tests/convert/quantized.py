"""Tiny quantized Hugging Face folders of every format, with the weights that they stand for.

The packers follow the formats' documents and writers, number by number, and know nothing of the
readers: AutoAWQ 0.2.9 `awq/modules/linear/gemm.py`, GPTQModel 7.7.0 `nn_modules/qlinear`,
compressed-tensors 0.20.0, ModelOpt 0.47.0 `export/quant_utils.py`, DeepSeek-V3
`inference/kernel.py`. The weights are computed in torch, in the type that those libraries take.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import make_family_model

GROUP = 32
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, torch.Tensor]
# Makes the tensors of a matrix by their kind, and the weights that they stand for.
Packer = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers [rows, n] as int32 [rows, ceil(n * bits / 32)], the first in the lowest bits."""
    per_word = 32 // bits
    rows, count = numbers.shape
    words = torch.zeros(rows, -(-count // per_word), dtype=torch.int64)
    for i in range(count):
        words[:, i // per_word] |= numbers[:, i].to(torch.int64) << (bits * (i % per_word))
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


@dataclasses.dataclass
class Rounded:
    """A matrix in whole numbers: codes [out, in], scales and zeros [out, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor  # [in]: the group of each column

    def restore(self) -> torch.Tensor:
        """The weights, in the type of the scales."""
        numbers = self.codes - self.zeros[:, self.groups]
        return numbers.to(self.scales.dtype) * self.scales[:, self.groups]


def round_groups(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = GROUP,
    is_symmetric: bool,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
    spare: int = 0,
) -> Rounded:
    """Round a matrix [out, in] by groups of columns, of a shuffled order if one is given.

    spare: the lowest zero that may come out.
    """
    num_inputs = weight.shape[1]
    size = num_inputs if group == -1 else group
    groups = torch.arange(num_inputs) // size
    if order is not None:
        groups = groups[order.argsort()]
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    scales, zeros = [], []
    for i in range(num_inputs // size):
        part = weight[:, groups == i].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            scales.append(part.abs().amax(1) / (middle - 1))
            zeros.append(torch.full_like(low, middle))
        else:
            scales.append((high - low) / largest)
            zeros.append((-low / scales[-1]).round().clamp(spare, largest))
    scale = torch.stack(scales, 1).to(dtype)
    zero = torch.stack(zeros, 1).to(torch.int32)
    codes = (weight.float() / scale.float()[:, groups]).round() + zero[:, groups]
    return Rounded(codes.clamp(0, largest).to(torch.int32), scale, zero, groups)


def pack_awq(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    rounded = round_groups(weight, is_symmetric=False, dtype=torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffle(numbers: torch.Tensor) -> torch.Tensor:  # [rows, out]
        return numbers.reshape(len(numbers), -1, 8)[:, :, order].reshape(len(numbers), -1)

    tensors = {
        "qweight": pack_bits(shuffle(rounded.codes.T), 4),
        "qzeros": pack_bits(shuffle(rounded.zeros.T), 4),
        "scales": rounded.scales.T.contiguous(),
    }
    return tensors, rounded.restore()


def make_gptq(
    *, bits: int, is_symmetric: bool, version: int, acts: bool = False, group: int = GROUP
) -> Packer:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=generator) if acts else None
        rounded = round_groups(
            weight, bits=bits, group=group, is_symmetric=is_symmetric, dtype=torch.float16,
            order=order, spare=2 - version,
        )  # fmt: skip
        tensors = {
            "qweight": pack_bits(rounded.codes, bits).T.contiguous(),
            "qzeros": pack_bits(rounded.zeros.T - (2 - version), bits),
            "scales": rounded.scales.T.contiguous(),
            "g_idx": rounded.groups.to(torch.int32),
        }
        return tensors, rounded.restore()

    return pack


def make_compressed(
    *, bits: int, is_symmetric: bool, dtype: torch.dtype, acts: bool = False, group: int = GROUP
) -> Packer:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=generator) if acts else None
        rounded = round_groups(
            weight, bits=bits, group=group, is_symmetric=is_symmetric, dtype=dtype, order=order
        )
        tensors = {
            "weight_packed": pack_bits(rounded.codes, bits),
            "weight_scale": rounded.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = pack_bits(rounded.zeros.T, bits).T.contiguous()
        if acts:
            tensors["weight_g_idx"] = rounded.groups.to(torch.int32)
        return tensors, rounded.restore()

    return pack


def make_float8(*, by: str, dtype: torch.dtype, name: str = "weight_scale") -> Packer:
    """by: tensor, channel, or block (of 24 rows and 40 columns, which divide nothing)."""

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        height, width = {"tensor": weight.shape, "channel": (1, weight.shape[1])}.get(by, (24, 40))
        scales = torch.zeros(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
        whole = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (
                    slice(i * height, i * height + height),
                    slice(j * width, j * width + width),
                )
                scales[i, j] = weight[place].abs().max() / 448
                if dtype == torch.float8_e8m0fnu:
                    scales[i, j] = scales[i, j].log2().ceil().exp2()
                whole[place] = scales[i, j].to(dtype).float()
        stored = (weight.float() / whole).to(torch.float8_e4m3fn)
        own = scales.to(dtype).reshape(() if by == "tensor" else scales.shape)
        restored = stored.float() * whole
        is_deepseek = name == "weight_scale_inv"
        return {"weight": stored, name: own}, restored if is_deepseek else restored.to(dtype)

    return pack


def pack_static(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    tensors, restored = make_float8(by="tensor", dtype=torch.float32)(weight, generator)
    return tensors | {"input_scale": torch.tensor(0.5)}, restored


def pack_modelopt(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    inputs = 0.5 + torch.rand(weight.shape[1], generator=generator).to(torch.bfloat16)
    rounded = round_groups(weight.float() / inputs, is_symmetric=True, dtype=torch.float32)
    signed = (rounded.codes - 8).to(torch.int8)
    tensors = {
        "weight": ((signed[0::2] & 15) | (signed[1::2] << 4)).view(torch.uint8),
        "weight_scale": rounded.scales,
        "pre_quant_scale": inputs,
    }
    return tensors, rounded.restore() * inputs.float()


def pack_nvfp4(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    grouped = weight.float().reshape(len(weight), -1, 16)
    whole = torch.tensor(4 / (6 * 448))  # which q, k and v share
    scales = (grouped.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    restored_scales = (scales.float() * whole)[:, :, None]
    codes = ((grouped / restored_scales)[..., None] - FLOAT4).abs().argmin(-1)
    flat = codes.reshape(weight.shape)
    tensors = {
        "weight": (flat[:, 0::2] | flat[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.25),
    }
    return tensors, (FLOAT4[codes] * restored_scales).reshape(weight.shape)


def pack_compressed_nvfp4(
    weight: torch.Tensor, generator: torch.Generator
) -> tuple[Tensors, torch.Tensor]:
    """As llm-compressor writes it: the matrix's scale is what a group's is divided by."""
    tensors, _ = pack_nvfp4(weight, generator)
    whole = 1 / tensors.pop("weight_scale_2")
    tensors["weight_packed"] = tensors.pop("weight")
    tensors["weight_global_scale"] = whole.reshape(1)
    tensors["input_global_scale"] = tensors.pop("input_scale").reshape(1)
    packed = tensors["weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], 2).reshape(len(packed), -1, 16).long()
    scales = tensors["weight_scale"].float() / whole
    restored = FLOAT4.where(torch.arange(16) != 8, -0.0)[codes] * scales[:, :, None]
    return tensors, restored.reshape(weight.shape).to(torch.bfloat16)


def describe_gptq(bits: int, **values: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "desc_act": False,
        "damp_percent": 0.1, "true_sequential": True, "static_groups": False,
    } | values  # fmt: skip


def describe_compressed(format_name: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    args = {"dynamic": False, "symmetric": True, "observer": "minmax", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}}
    groups["group_0"] |= {"output_activations": None, **group}
    return {
        "quant_method": "compressed-tensors", "format": format_name, "config_groups": groups,
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip


def describe_int(bits: int, **values: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
    return describe_compressed("pack-quantized", weights | values)


FLOAT8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = {**FLOAT8_ARGS, "strategy": "token", "dynamic": True}
FP8_ROWS = "FP8_PER_CHANNEL_PER_TOKEN"
MODELOPT = {"has_zero_point": False, "pre_quant_scale": True, "exclude_modules": ["lm_head"]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of quantized folder. format: the key of SOURCE_FORMATS; kept: its quant_algo, or
    None where a checkpoint has no place for it."""

    format: str
    section: Mapping[str, Any]
    pack: Packer
    kept: str | None = None
    dtype: str = "float16"


CASES = {
    "awq": Case(
        "awq",
        {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
            "zero_point": True, "modules_to_not_convert": None,
        },
        pack_awq, "INT4_GROUPS",
    ),
    "awq-gptqmodel": Case(
        "awq",
        {
            "quant_method": "awq", "method": "awq", "bits": 4, "group_size": GROUP, "sym": False,
            "desc_act": True, "lm_head": False, "zero_point": True, "version": "gemm",
            "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:7.7.0"], "pack_impl": "cpu"},
        },
        pack_awq, "INT4_GROUPS",
    ),
    "gptq": Case(
        "gptq", describe_gptq(4), make_gptq(bits=4, is_symmetric=True, version=1), "W4A16_AWQ"
    ),
    "gptq-asymmetric": Case(
        "gptq", describe_gptq(4, sym=False),
        make_gptq(bits=4, is_symmetric=False, version=1), "INT4_GROUPS",
    ),
    "gptq-v2": Case(
        "gptq", describe_gptq(4, sym=False, checkpoint_format="gptq_v2"),
        make_gptq(bits=4, is_symmetric=False, version=2), "INT4_GROUPS",
    ),
    "gptq-act-order": Case(
        "gptq", describe_gptq(4, desc_act=True),
        make_gptq(bits=4, is_symmetric=True, version=1, acts=True), "INT4_GROUPS", "bfloat16",
    ),
    "gptq-whole-rows": Case(
        "gptq", describe_gptq(4, group_size=-1),
        make_gptq(bits=4, is_symmetric=True, version=1, group=-1), "W4A16_AWQ",
    ),
    "gptq-8-bits": Case(
        "gptq", describe_gptq(8, sym=False), make_gptq(bits=8, is_symmetric=False, version=1)
    ),
    "compressed": Case(
        "pack-quantized", describe_int(4),
        make_compressed(bits=4, is_symmetric=True, dtype=torch.bfloat16), "W4A16_AWQ", "bfloat16",
    ),
    "compressed-asymmetric": Case(
        "pack-quantized", describe_int(4, symmetric=False),
        make_compressed(bits=4, is_symmetric=False, dtype=torch.bfloat16), "INT4_GROUPS",
        "bfloat16",
    ),
    "compressed-act-order": Case(
        "pack-quantized", describe_int(4, actorder="group"),
        make_compressed(bits=4, is_symmetric=True, dtype=torch.float16, acts=True), "INT4_GROUPS",
    ),
    "compressed-channel": Case(
        "pack-quantized", describe_int(4, strategy="channel", group_size=None),
        make_compressed(bits=4, is_symmetric=True, dtype=torch.bfloat16, group=-1), "W4A16_AWQ",
        "bfloat16",
    ),
    "compressed-8-bits": Case(
        "pack-quantized", describe_int(8),
        make_compressed(bits=8, is_symmetric=True, dtype=torch.bfloat16), None, "bfloat16",
    ),
    "compressed-nvfp4": Case(
        "nvfp4-pack-quantized",
        describe_compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            input_activations={
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                "dynamic": "local", "symmetric": True,
            },
        ),
        pack_compressed_nvfp4, None, "bfloat16",
    ),
    "fp8-static": Case(
        "fp8-static", {"quant_method": "fp8", "activation_scheme": "static"}, pack_static, "FP8",
        "bfloat16",
    ),
    "fp8-dynamic": Case(
        "fp8-dynamic", {"quant_method": "fp8", "activation_scheme": "dynamic"},
        make_float8(by="tensor", dtype=torch.float32), FP8_ROWS, "bfloat16",
    ),
    "fp8-weights": Case(
        "fp8-weights",
        describe_compressed("float-quantized", {**FLOAT8_ARGS, "strategy": "tensor"}),
        make_float8(by="tensor", dtype=torch.bfloat16), None, "bfloat16",
    ),
    "fp8-channel": Case(
        "fp8-dynamic",
        describe_compressed(
            "float-quantized", {**FLOAT8_ARGS, "strategy": "channel"}, input_activations=TOKEN
        ),
        make_float8(by="channel", dtype=torch.bfloat16), FP8_ROWS, "bfloat16",
    ),
    "fp8-block": Case(
        "fp8-block",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40],
         "fmt": "e4m3"},
        make_float8(by="block", dtype=torch.float32, name="weight_scale_inv"), None, "bfloat16",
    ),
    "fp8-block-bfloat16": Case(
        "fp8-block",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40]},
        make_float8(by="block", dtype=torch.bfloat16, name="weight_scale_inv"), None, "bfloat16",
    ),
    "fp8-block-compressed": Case(
        "fp8-block",
        describe_compressed(
            "float-quantized",
            {**FLOAT8_ARGS, "strategy": "block", "block_structure": [24, 40]},
            input_activations={**FLOAT8_ARGS, "strategy": "group", "dynamic": True},
        ),
        make_float8(by="block", dtype=torch.bfloat16), None, "float32",
    ),
    "fp8-block-e8m0": Case(
        "fp8-block",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40],
         "scale_fmt": "ue8m0"},
        make_float8(by="block", dtype=torch.float8_e8m0fnu, name="weight_scale_inv"), None,
        "bfloat16",
    ),
    "modelopt-int4": Case(
        "modelopt-int4",
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP, **MODELOPT},
        pack_modelopt, "W4A16_AWQ", "bfloat16",
    ),
    "modelopt-nvfp4": Case(
        "modelopt-nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
         "exclude_modules": ["lm_head"]},
        pack_nvfp4, "NVFP4", "bfloat16",
    ),
    "modelopt-nvfp4-weights": Case(
        "modelopt-nvfp4-weights",
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16},
        pack_nvfp4, None, "bfloat16",
    ),
}  # fmt: skip


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a tiny model is the weight of a layer's linear.

    No router is one, nor are the biases of experts in one tensor, which have two dimensions.
    """
    in_layer = ".layers." in name or ".h." in name
    is_weight = name.endswith(".weight") and not name.endswith(ROUTERS)
    return in_layer and tensor.dim() == 2 and is_weight


def make_quantized(
    parent: Path, case: Case, *, family: str = "llama", name: str = "quantized", **sizes: Any
) -> tuple[Path, Tensors]:
    """Write a quantized model; return its folder, `parent / name`, and the plain model's tensors.

    Linears that read the same input have the same order of columns and the same input scale.
    """
    sizes = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "layers": 2} | sizes
    folder = make_family_model(parent, family, dtype=case.dtype, name=name, **sizes)
    plain = load_file(folder / "model.safetensors")
    tensors: Tensors = {}
    for key, weight in list(plain.items()):
        if not is_linear(key, weight):
            tensors[key] = weight
            continue
        module = key.removesuffix(".weight")
        is_turned = ".c_" in key  # GPT-2's matrices are [in, out], but not when they are quantized
        alike = next((names for names in ALIKE if module.endswith(names)), module[-7:])
        generator = torch.Generator().manual_seed(sum(map(ord, "".join(alike))))
        packed, restored = case.pack(weight.T if is_turned else weight, generator)
        plain[key] = restored.T.contiguous() if is_turned else restored
        tensors |= {f"{module}.{kind}": tensor for kind, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(case.section)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain


ALIKE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROUTERS = (
    "mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight",
    "mlp.router.weight", "feed_forward.gate.weight",
)  # fmt: skip


def change_folder(folder: Path, tensors: Mapping[str, torch.Tensor | None], **section: Any) -> None:
    """Replace tensors of a folder, or leave them out for None, and keys of its section."""
    stored: dict[str, Any] = load_file(folder / "model.safetensors") | dict(tensors)
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= section
    (folder / "config.json").write_text(json.dumps(config))
