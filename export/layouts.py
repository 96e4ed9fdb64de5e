"""What each runtime reads: one writer for a kind of drafter, and what each runtime lacks.

Facts, as the runtimes' own loaders have them: vLLM 0.32.0 (model_executor/models/{medusa,
llama_eagle, llama_eagle3, qwen3_dflash, qwen3_dspark}.py, transformers_utils/configs/), SGLang
03d5a77 and 034b3be (srt/models/llama_eagle{3,}.py), 0.5.23 (srt/models/dflash.py, srt/speculative/
dflash_utils.py), speculators c05b95b and 0.9.0, DeepSpec afdfa7c (deepspec/modeling/dspark/),
TensorRT-LLM's llmapi/llm_args.py, tensorrt_edgellm 0.11.0.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.reading import Array, read_json
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import EAGLE3_FIXED, MASK_DEPTH, Eagle3Params, EagleParams
from specdec.methods.medusa import MedusaParams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import FULL, SLIDING, ModelConfig
from specdec.model.tensors import DFLASH_NET, HEAD, OFFSETS

from .settings import ExportSettings
from .source import MODEL_TYPES, TITLES, Part, Source

DEFAULT_DRAFT_TOKENS = 3


@dataclasses.dataclass(kw_only=True)
class Contents:
    """A folder to write: config.json, tensors, and texts by file name. command: what runs it."""

    config: dict[str, Any]
    tensors: dict[str, Part | Array]
    command: str
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    weights_name: str = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What is asked for. target: the name of the target in commands; place: of this folder."""

    settings: ExportSettings
    source: Source
    target: str
    place: str

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens a step."""
        if self.settings.num_draft_tokens is not None:
            return self.settings.num_draft_tokens
        drafter = self.source.drafter
        if isinstance(drafter, MedusaParams):
            return drafter.num_heads
        if isinstance(drafter, ReDrafterParams):
            return drafter.draft_len_per_beam
        if isinstance(drafter, DFlashParams):
            return drafter.num_positions
        if isinstance(drafter, EagleParams) and drafter.mask_token_id is not None:
            # A folder is converted here for one, since how many it was trained for is not told.
            return drafter.num_eagle_layers if drafter.num_eagle_layers > 1 else MASK_DEPTH
        return DEFAULT_DRAFT_TOKENS


# ---- The parts of a config.json.


def describe_net(net: ModelConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """A Hugging Face config.json of a Llama, Mistral, Qwen2 or Qwen3."""
    described = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[net.architecture],
        **net.describe_sizes(),
        "tie_word_embeddings": net.share_embedding_table,
        "torch_dtype": dtype,
    }
    if net.architecture == "LlamaForCausalLM":
        described |= {"attention_bias": net.attn_bias, "mlp_bias": net.mlp_bias}
    if net.architecture == "Qwen3ForCausalLM":
        described["attention_bias"] = net.attn_bias
    if net.sliding_window is not None:
        described["sliding_window"] = net.sliding_window
        if net.architecture != "MistralForCausalLM":
            described |= {"use_sliding_window": True, "max_window_layers": 0}
        if net.layer_types is not None:
            number = net.layer_types.count(FULL)
            described |= {"max_window_layers": number, "layer_types": list(net.layer_types)}
    elif net.architecture == "MistralForCausalLM":
        described["sliding_window"] = None
    return described


def describe_norms(eagle3: Eagle3Params) -> dict[str, bool]:
    """EAGLE-3's norms; all are told, since runtimes differ in what they take for an absent one."""
    names = ("norm_before_residual", *Eagle3Params.NEWER)
    return {name: getattr(eagle3, name) for name in names}


def get_eagle(source: Source) -> EagleParams:
    """The drafter's parameters."""
    assert isinstance(source.drafter, EagleParams)
    return source.drafter


def list_entered(params: Eagle3Params | DFlashParams) -> list[int]:
    """The layers that are entered by what is read; it comes out of the ones before them."""
    return [layer + 1 for layer in params.aux_layers]


def add_drafted(source: Source, tensors: dict[str, Part | Array]) -> dict[str, Part | Array]:
    """Add `t2d` [target's vocabulary] of a reduced vocabulary: which tokens are drafted."""
    if OFFSETS not in tensors:
        return tensors
    offsets = source.read(source.parts[OFFSETS])
    drafted = np.zeros(source.model.vocab_size, np.uint8)
    drafted[offsets + np.arange(len(offsets))] = 1
    return tensors | {"t2d": drafted}


# ---- A writer for each kind of drafter.


def write_medusa(order: Order) -> Contents:
    """FasterDecoding's names; vLLM takes the numbers out of any key like `*num*heads*`."""
    source, params = order.source, order.source.drafter
    assert isinstance(params, MedusaParams)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": order.target,
        "medusa_num_heads": params.num_heads,
        "medusa_num_layers": params.num_layers,
        "hidden_size": source.model.hidden_size,
        "vocab_size": source.model.vocab_size,
        "truncated_vocab_size": source.model.vocab_size,
        "original_lm_head": False,
        "medusa_fc_bias": True,
        "torch_dtype": source.model.dtype,
    }
    return Contents(config=config, tensors=dict(source.parts), command=serve(order, "medusa"))


def write_redrafter(order: Order) -> Contents:
    """Apple's names, as specdec-train writes them."""
    source, params = order.source, order.source.drafter
    assert isinstance(params, ReDrafterParams)
    config = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": source.model.vocab_size,
        "hidden_size": params.hidden_size,
        "exit_dim": params.exit_dim,
        "num_draft_layers": params.num_layers,
        "num_lookback_tokens": -1,
        "rnn": params.is_rnn,
        "predict_n_tokens": params.draft_len_per_beam,
        "torch_dtype": source.model.dtype,
    }
    contents = Contents(
        config=config, tensors=dict(source.parts), command=serve(order, "redrafter")
    )
    if order.settings.to == "vllm":
        contents.texts["redrafter_proposer.py"] = (
            Path(__file__).with_name("redrafter_proposer.py").read_text()
        )
    return contents


def write_eagle1(order: Order) -> Contents:
    """SafeAILab's names."""
    source, params = order.source, get_eagle(order.source)
    config = describe_net(params.net, source.model.dtype, "LlamaForCausalLM")
    config["bias"] = "fc.bias" in source.parts
    return Contents(config=config, tensors=dict(source.parts), command=serve(order, "eagle"))


def write_eagle1_sglang(order: Order) -> Contents:
    """The same; SGLang's fc has a bias always, of random numbers where none is stored."""
    contents = write_eagle1(order)
    contents.config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    bias = Part("eagle_nets.0.drafter.fc.bias")
    order.source.left_out.pop("fc.bias", None)
    contents.tensors["fc.bias"] = bias
    return contents


def write_eagle3(order: Order) -> Contents:
    """ModelOpt's and SafeAILab's fields and names.

    eagle_config counts the layers whose outputs are read, as SGLang and TensorRT-LLM do; the list
    at the top those that are entered, which vLLM and llama.cpp's converter take first.
    """
    source, params = order.source, get_eagle(order.source)
    eagle3 = params.eagle3
    assert eagle3 is not None
    norms = describe_norms(eagle3)
    newer = {name: norms[name] for name in Eagle3Params.NEWER}
    config = describe_net(params.net, source.model.dtype, "LlamaForCausalLMEagle3") | {
        "draft_vocab_size": params.draft_vocab_size,
        "target_hidden_size": source.model.hidden_size,
        "num_aux_hidden_states": len(eagle3.aux_layers),
        "eagle_aux_hidden_state_layer_ids": list_entered(eagle3),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers),
            **EAGLE3_FIXED,
            **newer,
        },
        **norms,
    }
    if (token := params.mask_token_id) is not None:  # vLLM before 0.32 knows the second name alone
        config |= {"parallel_drafting": True, "mask_token_id": token, "pard_token": token}
    tensors = add_drafted(source, dict(source.parts))
    return Contents(config=config, tensors=tensors, command=serve(order, "eagle3"))


def write_eagle3_sglang(order: Order) -> Contents:
    """SpecForge's: the only layer is `midlayer`."""
    contents = write_eagle3(order)
    contents.tensors = {
        name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: part
        for name, part in contents.tensors.items()
    }
    return contents


def write_eagle3_trtllm(order: Order) -> Contents:
    """The Hugging Face folder and the YAML of the PyTorch backend, by the version's key names."""
    contents = write_eagle3(order)
    eagle3, number = get_eagle(order.source).eagle3, order.num_draft_tokens
    assert eagle3 is not None
    key = "speculative_model_dir" if order.settings.trtllm_version == "1.2" else "speculative_model"
    layers = ", ".join(map(str, eagle3.aux_layers))
    contents.texts["extra_llm_api_options.yaml"] = (
        "speculative_config:\n  decoding_type: Eagle3\n"
        f"  max_draft_len: {number}\n  {key}: {order.place}\n"
        f"  eagle3_layers_to_capture: [{layers}]\n"
    )
    return contents


def write_eagle3_edge(order: Order) -> Contents:
    """SpecForge's names; a list at the top counts the layers that are entered."""
    contents = write_eagle3_sglang(order)
    eagle3 = get_eagle(order.source).eagle3
    assert eagle3 is not None
    contents.config["target_layer_ids"] = list_entered(eagle3)
    return contents


def write_dflash(order: Order) -> Contents:
    """z-lab's: it counts the layers whose outputs are read.

    is_causal is told, as are the types of the layers: absent, it is true for layers with a window.
    """
    source, params = order.source, get_dflash(order.source)
    if params.markov_rank or params.sample_from_anchor:
        return write_dspark(order)
    told = {"mask_token_id": params.mask_token_id, "target_layer_ids": list(params.aux_layers)}
    if params.net.embedding_multiplier != 1:
        told["input_embedding_scale"] = params.net.embedding_multiplier
    config = describe_dflash_net(params, source.model.dtype, "DFlashDraftModel") | {
        "is_causal": False,
        "num_target_layers": source.model.num_hidden_layers,
        "block_size": params.block_size,
        "draft_vocab_size": params.draft_vocab_size,
        "dflash_config": told,
    }
    tensors = add_drafted(source, dict(source.parts))
    return Contents(config=config, tensors=tensors, command=serve(order, "dflash"))


def write_dspark(order: Order) -> Contents:
    """DeepSpec's, of blocks that draft from the anchor too; a rank of 0 is its DFlash.

    DeepSpec's loader wants embedding and head, the target's among them; num_anchors is of training.
    """
    source, params = order.source, get_dflash(order.source)
    config = describe_dflash_net(params, source.model.dtype, "Qwen3DSparkModel") | {
        "is_causal": False,
        "num_target_layers": source.model.num_hidden_layers,
        "block_size": params.block_size,
        "draft_vocab_size": params.draft_vocab_size,
        "mask_token_id": params.mask_token_id,
        "target_layer_ids": list(params.aux_layers),
        "num_anchors": 512,
        **describe_markov(params),
    }
    if params.net.embedding_multiplier != 1:
        config["input_embedding_scale"] = params.net.embedding_multiplier
    parts: dict[str, Part | Array] = dict(source.parts)
    if order.settings.to == "hf":
        for name, own in (("embed_tokens.weight", "drafter.vocab_embedding.weight"), (HEAD, HEAD)):
            parts[name] = Part(f"{DFLASH_NET}{own}")
            source.left_out.pop(name, None)
    tensors = add_drafted(source, parts)
    return Contents(config=config, tensors=tensors, command=serve(order, "dspark"))


def describe_markov(params: DFlashParams) -> dict[str, Any]:
    """DSpark's fields: no confidence head is kept."""
    return {
        "sample_from_anchor": params.sample_from_anchor,
        "markov_rank": params.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


def get_dflash(source: Source) -> DFlashParams:
    """The drafter's parameters."""
    assert isinstance(source.drafter, DFlashParams)
    return source.drafter


def describe_dflash_net(params: DFlashParams, dtype: str, architecture: str) -> dict[str, Any]:
    """The layers' config.json; runtimes see a window in `layer_types` alone."""
    net = params.net
    types = net.layer_types or (FULL if net.sliding_window is None else SLIDING,) * (
        net.num_hidden_layers
    )
    return describe_net(net, dtype, architecture) | {"layer_types": list(types)}


def write_speculators(order: Order) -> Contents:
    """speculators' own: layers count as those that are entered, the layer has a config inside."""
    source, drafter = order.source, order.source.drafter
    method = {
        "proposal_type": "greedy", "speculative_tokens": order.num_draft_tokens,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    if isinstance(drafter, DFlashParams):
        name, architecture = "dflash", "DFlashSpeculator"
        net = describe_dflash_net(drafter, source.model.dtype, "Qwen3ForCausalLM")
        own = {
            "block_size": drafter.block_size, "mask_token_id": drafter.mask_token_id,
            "aux_hidden_state_layer_ids": list_entered(drafter), "sample_from_anchor": False,
            "sliding_window_non_causal": True,  # else vLLM hides a block's later tokens everywhere
        }  # fmt: skip
        if drafter.markov_rank:
            name, architecture = "dspark", "DSparkSpeculator"
            own |= describe_markov(drafter) | {"confidence_head_with_markov": False}
    else:
        drafter = get_eagle(source)
        assert drafter.eagle3 is not None
        name, architecture = "eagle3", "Eagle3Speculator"
        net = describe_net(drafter.net, source.model.dtype, "LlamaForCausalLM")
        own = {
            "eagle_aux_hidden_state_layer_ids": list_entered(drafter.eagle3),
            **describe_norms(drafter.eagle3),
        }
        if (token := drafter.mask_token_id) is not None:
            name, architecture = "peagle", "PEagleSpeculator"
            own["mask_token_id"] = token
    config = {
        "architectures": [architecture],
        "speculators_model_type": name,
        "speculators_version": "0.9.0",
        "draft_vocab_size": drafter.draft_vocab_size,
        "target_hidden_size": source.model.hidden_size,
        **own,
        "transformer_layer_config": net,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": order.target, "architectures": [source.model.architecture],
            },
        },
        "torch_dtype": source.model.dtype,
    }  # fmt: skip
    tensors = add_drafted(source, dict(source.parts))
    return Contents(config=config, tensors=tensors, command=f"vllm serve {order.place}")


def write_model(order: Order) -> Contents:
    """A whole model, as transformers reads it: a draft model for any runtime, or a target."""
    model = order.source.model
    config = describe_net(model, model.dtype, model.architecture)
    return Contents(
        config=config, tensors=dict(order.source.parts), command=serve(order, "draft_model")
    )


# ---- The command that uses a folder.


def serve(order: Order, method: str) -> str:
    """The command line of the runtime, for a chain of draft tokens."""
    target, place, number = order.target, order.place, order.num_draft_tokens
    if method == "draft_model" and target == place:
        target = "TARGET"
    if order.settings.to == "vllm":
        speculative = {"method": method, "model": place, "num_speculative_tokens": number}
        words = f"vllm serve {target} --speculative-config"
        drafter = order.source.drafter
        if isinstance(drafter, EagleParams) and drafter.mask_token_id is not None:
            speculative["parallel_drafting"] = True
        if method == "redrafter":
            speculative |= {"method": "custom_class", "model": "redrafter_proposer.ReDrafter"}
            words = f"PYTHONPATH={place} vllm serve {target} --enforce-eager --speculative-config"
        return f"{words} '{json.dumps(speculative)}'"
    if order.settings.to == "sglang":
        name = {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH",
                "draft_model": "STANDALONE"}[method]  # fmt: skip
        steps = f" --speculative-num-steps {number} --speculative-eagle-topk 1"
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {name}"
            f" --speculative-draft-model-path {place}{'' if method == 'dflash' else steps}"
            f" --speculative-num-draft-tokens {number + 1}"
        )
    if order.settings.to == "trtllm-pytorch":
        return (
            f"trtllm-serve {target} --backend pytorch --extra_llm_api_options"
            f" {place}/extra_llm_api_options.yaml"
        )
    if order.settings.to == "edge-llm":
        return (
            f"tensorrt-edgellm-export {target} out/base --eagle-base"
            f" && tensorrt-edgellm-export {place} out/draft"
        )
    flags = {"eagle": "--eagle-model-dir", "eagle3": "--eagle-model-dir",
             "medusa": "--medusa-model-dir", "redrafter": "--drafter-model-dir",
             "dflash": "--dflash-model-dir", "dspark": "--dflash-model-dir",
             "draft_model": "--draft-model-dir"}  # fmt: skip
    return f'specdec generate --model-dir {target} {flags[method]} {place} "def main():"'


Writer = Callable[[Order], Contents]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime: how it is written for, and what it lacks of EAGLE-3.

    writers: by a source's kind; gguf's are elsewhere. norms: those of EAGLE-3 that it computes.
    targets: those whose layers EAGLE-3 can read, None where nothing is known of that.
    is_usual: whether it reads three layers of the target's by one layer of the drafter's alone.
    keeps_embedding: whether it takes an embedding of the drafter's own.
    """

    title: str
    writers: Mapping[str, Writer]
    norms: tuple[str, ...] = ("norm_before_residual", *Eagle3Params.NEWER)
    targets: tuple[str, ...] | None = None
    is_usual: bool = False
    keeps_embedding: bool = True


EVERY = {
    "medusa": write_medusa, "redrafter": write_redrafter, "eagle1": write_eagle1,
    "eagle3": write_eagle3, "dflash": write_dflash, "plain": write_model,
}  # fmt: skip


def write_gguf(order: Order) -> Contents:
    """One file; the gguf package writes it."""
    from .gguf import write_gguf as write

    return write(order)


AUX_KINDS = ("eagle3", "dflash")  # those that read the target's inner layers
# The classes that say so: vLLM's SupportsEagle3, llama.cpp's with t_layer_inp.
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
# Files of a target's folder that hold its chat template, the last as one of their keys.
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
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
            "plain": write_model,
        },
        norms=(), is_usual=True, keeps_embedding=False,
    ),
    "gguf": Runtime(
        title="llama.cpp", writers={"eagle3": write_gguf, "plain": write_gguf},
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


def find_writer(order: Order) -> Writer:
    """Return what writes a source for a runtime, or raise SpecDecError that names others."""
    source, name = order.source, order.settings.to
    runtime = RUNTIMES[name]
    writer = runtime.writers.get(source.kind)
    if writer is None:
        takers = [name for name, other in RUNTIMES.items() if source.kind in other.writers]
        engines = " and TensorRT-LLM's engines" if source.kind in ("medusa", "redrafter") else ""
        raise SpecDecError(
            f"{runtime.title} does not take {TITLES[source.kind]}",
            f"those that do: --to {' or '.join(takers)}, and the torch backend{engines} of"
            " specdec-build",
        )
    find_lacks(order, runtime).raise_all()
    return writer


def find_lacks(order: Order, runtime: Runtime) -> Problems:
    """List what a runtime has no room for; it would leave that out without a word."""
    source, name = order.source, order.settings.to
    problems = find_unread(source, runtime) if source.kind in AUX_KINDS else Problems()
    if isinstance(source.drafter, DFlashParams):
        problems.extend(find_dflash_lacks(order, source.drafter))
    if not isinstance(source.drafter, EagleParams):
        return problems
    params, eagle3 = source.drafter, source.drafter.eagle3
    others = "vllm, speculators and hf write all of EAGLE-3"
    if not runtime.keeps_embedding and "embed_tokens.weight" in source.parts:
        problems.add(
            f"{runtime.title} drafts with the target's embedding, the drafter has its own",
            "export it for another runtime, or train it with the target's",
        )
    if eagle3 is None:
        if name in ("vllm", "sglang") and "lm_head.weight" in source.parts:
            problems.add(
                f"{runtime.title} drafts with the target's head, this EAGLE-1 drafter has its own",
                "export it as hf, which specdec runs",
            )
        if name == "vllm" and "fc.bias" in source.parts:
            bias = source.parts["fc.bias"].name
            problems.add(
                f"vLLM's EAGLE-1 has no fc.bias, and {bias} is not zero",
                "export it for sglang or as hf; or train one with specdec-train --no-eagle-bias",
            )
        return problems
    if name == "edge-llm":
        problems.extend(find_edge_lacks(order, eagle3))
    if eagle3.mask_token_id is not None:
        if name not in ("vllm", "speculators", "hf"):
            problems.add(f"{runtime.title} drafts a token a pass, this drafter all in one", others)
        if name == "speculators" and eagle3.fc_norm:
            problems.add(
                "vLLM drops fc_norm of a P-EAGLE drafter of speculators'", "use --to vllm, or hf"
            )
    lost = [key for key, value in describe_norms(eagle3).items() if value]
    if lost := [key for key in lost if key not in runtime.norms]:
        problems.add(
            f"{runtime.title} is not known to compute {', '.join(lost)}, which the drafter has",
            others,
        )
    if runtime.is_usual and (len(eagle3.aux_layers) != 3 or params.net.num_hidden_layers != 1):
        problems.add(
            f"{runtime.title} reads three layers of the target with a drafter of one layer; this"
            f" one reads {len(eagle3.aux_layers)} with {params.net.num_hidden_layers}",
            others,
        )
    return problems


def find_edge_lacks(order: Order, eagle3: Eagle3Params) -> Problems:
    """List what TensorRT Edge-LLM's exporter ignores, or refuses only when the target is given."""
    problems, depth = Problems(), order.source.model.num_hidden_layers
    usual, entered = [2, depth // 2, depth - 3], list_entered(eagle3)
    if entered != usual:
        problems.add(
            f"TensorRT Edge-LLM gives a drafter what enters layers {usual} of this target, whatever"
            f" config.json says; the drafter was trained on {entered}",
            "train it on the usual layers, or export it for vllm or trtllm-pytorch",
        )
    folder = Path(order.settings.model_dir or "")
    if order.settings.model_dir and folder.is_dir() and not has_template(folder):
        problems.add(
            f"{folder} has no chat template, and TensorRT Edge-LLM refuses such a target",
            "add chat_template.jinja, which may be no more than the messages' contents",
        )
    return problems


def has_template(folder: Path) -> bool:
    """Whether a model's folder has a chat template of its own."""
    found = [folder / name for name in TEMPLATES if (folder / name).is_file()]
    return any(
        path.suffix == ".jinja" or read_json(path).get("chat_template") is not None
        for path in found
    )


def find_unread(source: Source, runtime: Runtime) -> Problems:
    """List a target whose layers the runtime hands to no drafter."""
    problems, target = Problems(), source.model.architecture
    if runtime.targets is not None and target not in runtime.targets:
        takers = [
            each
            for each, other in RUNTIMES.items()
            if source.kind in other.writers and target in (other.targets or [target])
        ]
        title = TITLES[source.kind].removeprefix("an ").removeprefix("a ")
        problems.add(
            f"{runtime.title} lets no {title} read the layers of a {target}",
            f"it does of {', '.join(runtime.targets)}; for this target there are --to"
            f" {' and '.join(takers)}",
        )
    return problems


def find_dflash_lacks(order: Order, params: DFlashParams) -> Problems:
    """List what a runtime has no room for of a DFlash drafter, or computes in another way."""
    problems, source, to = Problems(), order.source, order.settings.to
    title, vllm = RUNTIMES[to].title, to in ("vllm", "speculators")
    if params.markov_rank and to == "sglang":
        problems.add(
            f"{title} is not known to read the Markov head that the drafter has",
            "export it for vllm or speculators, or as hf",
        )
    if params.markov_rank and to == "hf" and not params.sample_from_anchor:
        problems.add(
            "DeepSpec's layout drafts from the first token of a block, this drafter does not",
            "export it for vllm or speculators",
        )
    if params.sample_from_anchor and not params.markov_rank and to != "hf":
        problems.add(
            f"{title} drafts from the masks of a block, this drafter from its first token too",
            "specdec runs it from the folder that it came in, or from that of --to hf",
        )
    elif order.num_draft_tokens > params.num_positions:
        problems.add(
            f"--num-draft-tokens is {order.num_draft_tokens}, a block of this drafter drafts"
            f" {params.num_positions}",
            f"give 1 to {params.num_positions}; fewer than {params.num_positions} are other blocks"
            " than it was trained with",
        )
    if to != "speculators" and params.aux_layers[-1] == source.model.num_hidden_layers - 1:
        problems.add(
            f"the drafter reads the last layer, {params.aux_layers[-1]}, whose output z-lab's"
            " layout takes behind the final norm",
            "export it as speculators, or as hf with a drafter that reads inner layers",
        )
    absent = {"embed_tokens.weight", HEAD, OFFSETS}
    if to == "hf" and params.sample_from_anchor:  # DeepSpec's layout holds a whole vocabulary's
        absent = {OFFSETS}
    if not vllm and (own := absent & set(source.parts)):
        problems.add(
            f"{title} drafts with the target's embedding and head, the drafter has"
            f" {join_names(sorted(own))} of its own",
            "export it for vllm or speculators; hf and sglang have no room for them",
        )
    if to != "hf" and params.net.embedding_multiplier != 1:
        problems.add(
            f"{title} gives the drafter the rows of the embedding as they are, this one was trained"
            f" with them multiplied by {params.net.embedding_multiplier:g}",
            "export it as hf, which specdec runs",
        )
    if to != "hf" and source.model.arithmetic.head_bias and HEAD not in source.parts:
        problems.add(
            f"{title} drafts without the bias of the target's head",
            "export it as hf, which specdec runs",
        )
    return problems
