"""A model family that nobody has met before: one file more, and it runs as transformers runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.engines import continue_greedily
from tests.parity.models import VOCAB
from tests.parity.test_families import load_reference, make_prompts
from tests.test_packaging import SOURCES

LIMIT = 24
SIZES = {"vocab": VOCAB, "width": 64, "depth": 2, "heads": 4, "kv_heads": 2, "inner": 112}
# What transformers calls the same; and its tensors under the toy's names.
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 112, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
NAMES = {
    "model.layers.": "net.blocks.", "model.embed_tokens": "net.words", "model.norm": "net.last",
    "self_attn.q_proj": "look.q", "self_attn.k_proj": "look.k", "self_attn.v_proj": "look.v",
    "self_attn.o_proj": "look.out", "post_attention_layernorm": "norm_b",
    "input_layernorm": "norm_a", "mlp.c_fc": "think.up", "mlp.c_proj": "think.down",
    "lm_head": "say",
}  # fmt: skip
FILE = """
from specdec.model.architectures import Architecture

from .base import Family

OURS, ITS = "transformer.layers.{layer}.", "net.blocks.{layer}."
MODULES = {
    "transformer.vocab_embedding": ("net.words",),
    OURS + "input_layernorm": (ITS + "norm_a",),
    OURS + "attention.qkv": (ITS + "look.q", ITS + "look.k", ITS + "look.v"),
    OURS + "attention.dense": (ITS + "look.out",),
    OURS + "post_layernorm": (ITS + "norm_b",),
    OURS + "mlp.proj": (ITS + "think.down",),
    "transformer.ln_f": ("net.last",),
    "lm_head": ("say",),
    OURS + "mlp.fc": (ITS + "think.up",),
}
# Flags in a combination that no family has.
ARITHMETIC = Architecture(
    norm="layer", mlp="plain", qkv_bias=True, dense_bias=True, mlp_bias=True,
    activations=("gelu_new",),
)


def read_config(reader, layout):
    width, heads = reader.get_int("width"), reader.get_int("heads")
    return {
        "vocab_size": reader.get_int("vocab"), "hidden_size": width,
        "num_hidden_layers": reader.get_int("depth"), "num_attention_heads": heads,
        "num_key_value_heads": reader.get_int("kv_heads"), "head_size": width // heads,
        "intermediate_size": reader.get_int("inner"), "max_position_embeddings": 256,
        "norm_epsilon": 0.1, "hidden_act": "gelu_new", "own_arithmetic": ARITHMETIC,
    }


FAMILY = Family(
    name="toy", architectures=("ToyForCausalLM",), modules=MODULES, prefixes=("net.",),
    read_config=read_config,
)
"""
SCRIPT = """
import sys
from specdec.command.stages import group

target, folder, tp_size, prompts = sys.argv[1:]
for words in (
    ["convert", "--model-dir", target, "--output-dir", f"{folder}/ckpt", "--tp-size", tp_size],
    ["build", "--checkpoint-dir", f"{folder}/ckpt", "--output-dir", f"{folder}/engine",
     "--backend", "torch", "--optimize", "none"],
    ["run", "--engine-dir", f"{folder}/engine", "--input-file", prompts, "--max-output-len", "24",
     "--json"],
):
    group.main(words, standalone_mode=False)
"""


def make_toy(folder: Path) -> list[list[int]]:
    """Write a model under the toy's names; return what transformers' class says to the prompts."""
    import torch
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    torch.manual_seed(5)
    model = Starcoder2ForCausalLM(Starcoder2Config(**CONFIG, norm_epsilon=0.1))
    with torch.no_grad():
        for weight in model.parameters():
            spread = 2.0 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.3
            weight.add_(torch.randn(weight.shape) * spread)
    model.save_pretrained(folder)
    expected = continue_greedily(load_reference(folder), make_prompts((5, 1, 30)), LIMIT)
    tensors = load_file(folder / "model.safetensors")
    for old, new in NAMES.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    document = {"architectures": ["ToyForCausalLM"], "torch_dtype": "float32", **SIZES}
    (folder / "config.json").write_text(json.dumps(document))
    return expected


@pytest.mark.thorough
def test_one_file_is_a_family(tmp_path: Path) -> None:
    """Into a copy of what a wheel installs one file is put; convert, build and run do the rest."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "specdec", site / "specdec")  # with byte code, which takes 2 s to make
    for stage in SOURCES[1:]:
        shutil.copytree(ROOT / stage, site / "specdec" / stage)
    (site / "specdec/convert/families/toy.py").write_text(FILE)
    expected = make_toy(tmp_path / "target")
    assert sum(len(set(output)) for output in expected) > LIMIT, "the text varies"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"input_ids": p}) + "\n" for p in make_prompts((5, 1, 30)))
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "target", tmp_path, "2", prompts],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])["outputs"]
    assert [output["output_ids"] for output in outputs] == expected
    written_config = json.loads((tmp_path / "ckpt/config.json").read_text())
    assert written_config["architecture"] == "ToyForCausalLM"
    assert "arithmetic" in written_config
