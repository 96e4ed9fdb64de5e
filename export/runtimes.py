"""Runtimes: the writers of each one's formats, and the command that uses the folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from specdec.methods.eagle import Eagle3Params

from .layouts import (
    write_dflash,
    write_eagle1,
    write_eagle1_sglang,
    write_eagle3,
    write_eagle3_edge,
    write_eagle3_sglang,
    write_eagle3_trtllm,
    write_gguf,
    write_medusa,
    write_model,
    write_mtp,
    write_redrafter,
    write_speculators,
)
from .source import Contents, Order

# ---- The command that uses a folder.

COMMANDS = {
    "vllm": "{path}vllm serve {target} {eager}--speculative-config '{speculative}'",
    "speculators": "vllm serve {output_path}",
    "sglang": "python -m sglang.launch_server --model-path {target} --speculative-algorithm"
    " {algorithm} --speculative-draft-model-path {output_path}{steps}"
    " --speculative-num-draft-tokens {more}",
    "gguf": "llama-server --model TARGET.gguf --spec-type draft-{method} --spec-draft-model"
    " {output_path}/model.gguf --spec-draft-n-max {number}",
    "trtllm-pytorch": "trtllm-serve {target} --backend pytorch --extra_llm_api_options"
    " {output_path}/extra_llm_api_options.yaml",
    "edge-llm": "tensorrt-edgellm-export {target} out/base --eagle-base && tensorrt-edgellm-export"
    " {output_path} out/draft",
    "hf": 'specdec generate --model-dir {target} {flag} {output_path} "def main():"',
}
# Kind -> vLLM's name of the method, SGLang's name, and the option of specdec.
METHOD_NAMES = {
    "medusa": ("medusa", "", "--medusa-model-dir"),
    "redrafter": ("redrafter", "", "--drafter-model-dir"),
    "eagle1": ("eagle", "EAGLE", "--eagle-model-dir"),
    "eagle3": ("eagle3", "EAGLE3", "--eagle-model-dir"),
    "dflash": ("dflash", "DFLASH", "--dflash-model-dir"),
    "mtp": ("mtp", "NEXTN", "--mtp-model-dir"),
    "plain": ("draft_model", "STANDALONE", "--draft-model-dir"),
}


def make_command(order: Order) -> str:
    """Return the command line of the runtime, for a chain of draft tokens."""
    output_path, number, kind = order.output_path, order.num_draft_tokens, order.source.kind
    if order.settings.to == "gguf" and kind == "plain":
        return f"llama-server --model {output_path}/model.gguf"
    method, algorithm, flag = METHOD_NAMES[kind]
    target = output_path if kind == "mtp" and order.settings.to != "hf" else order.target
    steps = f" --speculative-num-steps {number} --speculative-eagle-topk 1"
    return COMMANDS[order.settings.to].format(
        target=target, output_path=output_path, number=number, more=number + 1, flag=flag,
        algorithm=algorithm, method=method, speculative=json.dumps(configure_vllm(order)),
        path=f"PYTHONPATH={output_path} " if kind == "redrafter" else "",
        eager="--enforce-eager " if kind == "redrafter" else "",
        steps="" if kind == "dflash" else steps,
    )  # fmt: skip


def configure_vllm(order: Order) -> dict[str, Any]:
    """Return vLLM's `--speculative-config` for the exported folder."""
    kind = order.source.kind
    config: dict[str, Any] = {
        "method": "dspark" if order.is_dspark else METHOD_NAMES[kind][0],
        "model": order.output_path, "num_speculative_tokens": order.num_draft_tokens,
    }  # fmt: skip
    if kind == "eagle3" and order.eagle3.mask_token_id is not None:
        config["parallel_drafting"] = True
    if kind == "mtp":
        del config["model"]
    if kind == "redrafter":
        config |= {"method": "custom_class", "model": "redrafter_proposer.ReDrafter"}
    return config


# ---- Kinds of drafters that runtimes read, and features that they lack.

Writer = Callable[[Order], Contents]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """Runtime with its writers, and the features of EAGLE-3 that it has.

    writers: by a source's kind. norms: norms of EAGLE-3 that it computes. targets: classes whose
    layers a drafter can read, None where they are unknown. is_usual: whether it only reads three
    layers of the target with one layer of the drafter. keeps_embedding: whether it reads a
    drafter's embedding.
    """

    title: str
    writers: Mapping[str, Writer]
    norms: tuple[str, ...] = ("norm_before_residual", *Eagle3Params.NEWER)
    targets: tuple[str, ...] | None = None
    is_usual: bool = False
    keeps_embedding: bool = True


EVERY: Mapping[str, Writer] = {
    "medusa": write_medusa, "redrafter": write_redrafter, "eagle1": write_eagle1,
    "eagle3": write_eagle3, "dflash": write_dflash, "mtp": write_mtp, "plain": write_model,
}  # fmt: skip
# Classes of vLLM with SupportsEagle3, and of llama.cpp with t_layer_inp.
READ_BY_VLLM = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "GraniteForCausalLM",
    "SmolLM3ForCausalLM", "SeedOssForCausalLM",
)  # fmt: skip
READ_BY_LLAMA_CPP = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # fmt: skip
READ_BY_EDGE_LLM = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
RUNTIMES: Mapping[str, Runtime] = {
    "vllm": Runtime(title="vLLM", writers=EVERY, targets=READ_BY_VLLM),
    "speculators": Runtime(
        title="speculators", writers={"eagle3": write_speculators, "dflash": write_speculators},
        targets=READ_BY_VLLM,
    ),
    "sglang": Runtime(
        title="SGLang",
        writers={
            "eagle1": write_eagle1_sglang, "eagle3": write_eagle3_sglang, "dflash": write_dflash,
            "mtp": write_mtp, "plain": write_model,
        },
        norms=(), is_usual=True, keeps_embedding=False,
    ),
    "gguf": Runtime(
        title="llama.cpp", writers=dict.fromkeys(("eagle3", "mtp", "plain"), write_gguf),
        norms=("norm_before_residual", "norm_before_fc"), targets=READ_BY_LLAMA_CPP,
        is_usual=True,
    ),
    "trtllm-pytorch": Runtime(
        title="TensorRT-LLM's PyTorch backend", writers={"eagle3": write_eagle3_trtllm},
        norms=(), is_usual=True,
    ),
    "edge-llm": Runtime(
        title="TensorRT Edge-LLM", writers={"eagle3": write_eagle3_edge}, norms=(), is_usual=True,
        keeps_embedding=False, targets=READ_BY_EDGE_LLM,
    ),
    "hf": Runtime(title="specdec and its origin", writers=EVERY),
}  # fmt: skip
