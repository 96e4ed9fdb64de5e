"""Mixtral 8x7B, 8x22B: Mistral with a mixture of experts in place of the MLP."""

from __future__ import annotations

from typing import Any

from specdec.model.config_reader import ConfigReader

from ..hf import HfFolder
from . import llama
from .base import Family, Layout, get_window, read_decoder, read_experts, read_windows

_SELF = "model.layers.{layer}.block_sparse_moe."
_OURS = "transformer.layers.{layer}."
_EXPERT = _SELF + "experts.{expert}."

MODULES = {name: own for name, own in llama.MODULES.items() if ".mlp." not in name} | {
    _OURS + "mlp.router": (_SELF + "gate",),
    # Of each expert what is multiplied, then what is activated.
    _OURS + "mlp.fc": (_EXPERT + "w3", _EXPERT + "w1"),
    _OURS + "mlp.proj": (_EXPERT + "w2",),
}


def restore_names(folder: HfFolder, dtype: str) -> HfFolder:
    """Undo what transformers 5 calls the experts' module in memory, and where it fuses them."""
    names = {name: name.replace(".mlp.", ".block_sparse_moe.") for name in folder.tensors}
    folder.rename(names, left_out=())
    return folder


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a Mixtral config.json; an absent optional field has the value transformers gives it."""
    values = read_decoder(
        reader, norm_epsilon=("rms_norm_eps", 1e-5), max_positions=131072, num_kv_heads=8,
        rotary_base=1e6,
    )  # fmt: skip
    window = get_window(reader, None)
    values |= read_windows(reader, values["num_hidden_layers"], window)
    return values | read_experts(reader, layout, values, num=8, top_k=2, renormalizes=True)


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    modules=MODULES,
    prepare=restore_names,
    read_config=read_config,
    describe=llama.describe,
)
