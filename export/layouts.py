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
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile
from specdec.gguf.folder import localize
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import EAGLE3_FIXED, Eagle3Params
from specdec.methods.medusa import MedusaParams
from specdec.methods.mtp import FORMS
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import FULL, SLIDING, ModelConfig
from specdec.model.tensors import DFLASH_NET, HEAD, OFFSETS

from .source import MODEL_TYPES, TITLES, Contents, Order, Part, list_entered
from .tokenizers import read_template

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
    """EAGLE-3's norms; all are written, since runtimes have different defaults."""
    return {name: getattr(eagle3, name) for name in ("norm_before_residual", *Eagle3Params.NEWER)}


def describe_dflash(order: Order, architecture: str) -> dict[str, Any]:
    """Layers and sizes of a DFlash drafter.

    Runtimes see a window only in `layer_types`; without `is_causal` they take layers with a window
    for causal ones.
    """
    params, model = order.dflash, order.source.model
    return describe_dflash_net(params, model.dtype, architecture) | {
        "is_causal": False,
        "num_target_layers": model.num_hidden_layers,
        "block_size": params.block_size,
        "draft_vocab_size": params.draft_vocab_size,
    }


def describe_dflash_net(params: DFlashParams, dtype: str, architecture: str) -> dict[str, Any]:
    """The layers' config.json, with the type of each."""
    net = params.net
    kind = FULL if net.sliding_window is None else SLIDING
    types = net.layer_types or (kind,) * net.num_hidden_layers
    return describe_net(net, dtype, architecture) | {"layer_types": list(types)}


def describe_reading(params: DFlashParams) -> dict[str, Any]:
    """What a DFlash drafter reads; the layers are those whose outputs are read."""
    told = {"mask_token_id": params.mask_token_id, "target_layer_ids": list(params.aux_layers)}
    scale = params.net.embedding_multiplier
    return told | ({"input_embedding_scale": scale} if scale != 1 else {})


def describe_markov(params: DFlashParams) -> dict[str, Any]:
    """DSpark's fields: no confidence head is kept."""
    return {
        "sample_from_anchor": params.sample_from_anchor,
        "markov_rank": params.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


# ---- A writer for each kind of drafter.


def write_medusa(order: Order) -> Contents:
    """FasterDecoding's names; vLLM takes the numbers out of any key like `*num*heads*`."""
    model, params = order.source.model, order.source.drafter
    assert isinstance(params, MedusaParams)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": order.target,
        "medusa_num_heads": params.num_heads,
        "medusa_num_layers": params.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "truncated_vocab_size": model.vocab_size,
        "original_lm_head": False,
        "medusa_fc_bias": True,
        "torch_dtype": model.dtype,
    }
    return Contents(config, order.list_tensors())


def write_redrafter(order: Order) -> Contents:
    """Apple's names, as specdec-train writes them."""
    model, params = order.source.model, order.source.drafter
    assert isinstance(params, ReDrafterParams)
    config = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": model.vocab_size,
        "hidden_size": params.hidden_size,
        "exit_dim": params.exit_dim,
        "num_draft_layers": params.num_layers,
        "num_lookback_tokens": -1,
        "rnn": params.is_rnn,
        "predict_n_tokens": params.draft_len_per_beam,
        "torch_dtype": model.dtype,
    }
    contents = Contents(config, order.list_tensors())
    if order.settings.to == "vllm":
        name = "redrafter_proposer.py"
        contents.texts[name] = Path(__file__).with_name(name).read_text()
    return contents


def write_eagle1(order: Order) -> Contents:
    """SafeAILab's names."""
    config = describe_net(order.eagle.net, order.source.model.dtype, "LlamaForCausalLM")
    config["bias"] = "fc.bias" in order.source.parts
    return Contents(config, order.list_tensors())


def write_eagle1_sglang(order: Order) -> Contents:
    """The same; SGLang's fc has a bias always, of random numbers where none is stored."""
    contents = write_eagle1(order)
    contents.config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    order.source.left_out.pop("fc.bias", None)
    contents.tensors["fc.bias"] = Part("eagle_nets.0.drafter.fc.bias")
    return contents


def write_eagle3(order: Order) -> Contents:
    """ModelOpt's and SafeAILab's fields and names.

    eagle_config counts the layers whose outputs are read, as SGLang and TensorRT-LLM do. The list
    at the top counts those that are entered; vLLM and llama.cpp's converter take it first.
    """
    model, eagle3 = order.source.model, order.eagle3
    norms = describe_norms(eagle3)
    config = describe_net(order.eagle.net, model.dtype, "LlamaForCausalLMEagle3") | {
        "draft_vocab_size": eagle3.draft_vocab_size,
        "target_hidden_size": model.hidden_size,
        "num_aux_hidden_states": len(eagle3.aux_layers),
        "eagle_aux_hidden_state_layer_ids": list_entered(eagle3),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers),
            **EAGLE3_FIXED,
            **{name: norms[name] for name in Eagle3Params.NEWER},
        },
        **norms,
    }
    if (token := eagle3.mask_token_id) is not None:  # vLLM before 0.32 knows only the second name
        config |= {"parallel_drafting": True, "mask_token_id": token, "pard_token": token}
    return Contents(config, order.list_tensors())


def write_eagle3_sglang(order: Order) -> Contents:
    """SpecForge's: the only layer is `midlayer`."""
    contents = write_eagle3(order)
    contents.tensors = {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: part
        for name, part in contents.tensors.items()
    }
    return contents


def write_eagle3_trtllm(order: Order) -> Contents:
    """The Hugging Face folder and the YAML of the PyTorch backend, by the version's key names."""
    contents = write_eagle3(order)
    key = "speculative_model_dir" if order.settings.trtllm_version == "1.2" else "speculative_model"
    contents.texts["extra_llm_api_options.yaml"] = (
        "speculative_config:\n  decoding_type: Eagle3\n"
        f"  max_draft_len: {order.num_draft_tokens}\n  {key}: {order.place}\n"
        f"  eagle3_layers_to_capture: [{', '.join(map(str, order.eagle3.aux_layers))}]\n"
    )
    return contents


def write_eagle3_edge(order: Order) -> Contents:
    """SpecForge's names; a list at the top counts the layers that are entered."""
    contents = write_eagle3_sglang(order)
    contents.config["target_layer_ids"] = list_entered(order.eagle3)
    return contents


def write_dflash(order: Order) -> Contents:
    """z-lab's, or DeepSpec's for blocks that draft from the anchor too (a rank of 0: its DFlash).

    DeepSpec's loader wants embedding and head, even if they are the target's. num_anchors only
    matters in training.
    """
    source, params, tensors = order.source, order.dflash, order.list_tensors()
    if not order.is_dspark:
        config = describe_dflash(order, "DFlashDraftModel")
        return Contents(config | {"dflash_config": describe_reading(params)}, tensors)
    config = describe_dflash(order, "Qwen3DSparkModel")
    config |= {**describe_reading(params), "num_anchors": 512, **describe_markov(params)}
    if order.settings.to == "hf":
        for name, own in (("embed_tokens.weight", "drafter.vocab_embedding.weight"), (HEAD, HEAD)):
            tensors[name] = Part(f"{DFLASH_NET}{own}")
            source.left_out.pop(name, None)
    return Contents(config, tensors)


def write_speculators(order: Order) -> Contents:
    """speculators' own: layers count as those that are entered, the layer has a config inside."""
    source, drafter = order.source, order.source.drafter
    own: dict[str, Any]
    if isinstance(drafter, DFlashParams):
        name, architecture, size = "dflash", "DFlashSpeculator", drafter.draft_vocab_size
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
        eagle3 = order.eagle3
        name, architecture, size = "eagle3", "Eagle3Speculator", eagle3.draft_vocab_size
        net = describe_net(order.eagle.net, source.model.dtype, "LlamaForCausalLM")
        own = {"eagle_aux_hidden_state_layer_ids": list_entered(eagle3), **describe_norms(eagle3)}
        if (token := eagle3.mask_token_id) is not None:
            name, architecture = "peagle", "PEagleSpeculator"
            own["mask_token_id"] = token
    method = {
        "proposal_type": "greedy", "speculative_tokens": order.num_draft_tokens,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    config = {
        "architectures": [architecture],
        "speculators_model_type": name,
        "speculators_version": "0.9.0",
        "draft_vocab_size": size,
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
    return Contents(config, order.list_tensors())


def write_mtp(order: Order) -> Contents:
    """The target's own folder with the head as its last shard; as hf the head alone."""
    folder = Path(order.settings.model_dir or "")
    if not (folder / "config.json").is_file():
        raise SpecDecError(
            "a head for multi-token prediction is written with its target's config.json",
            "give the target's own folder as --model-dir",
        )
    config, form = read_json(folder / "config.json"), FORMS[order.source.head_form]
    is_qwen = order.source.head_form == "qwen"
    key = "mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"
    config.get("text_config", config)[key] = 1
    contents = Contents(config, order.list_tensors())
    if order.settings.to == "hf":
        return contents
    found = sorted(folder.glob("*.safetensors"))
    names = [f"model-{n:05}-of-{len(found) + 1:05}.safetensors" for n in range(1, len(found) + 2)]
    contents.files, contents.weights_name = dict(zip(names, found, strict=False)), names[-1]
    places = {key: n for n, path in contents.files.items() for key in TensorFile(path).tensors}
    if held := [name for name in places if name.startswith(form.prefix)]:
        raise SpecDecError(
            f"{folder} holds a head already: {join_names(held)}", "give a target without one"
        )
    places |= dict.fromkeys(contents.tensors, contents.weights_name)
    index = {"metadata": {}, "weight_map": places}
    contents.texts["model.safetensors.index.json"] = json.dumps(index, indent=2)
    return contents


def write_model(order: Order) -> Contents:
    """A whole model, as transformers reads it: a draft model for any runtime, or a target."""
    model = order.source.model
    return Contents(describe_net(model, model.dtype, model.architecture), order.list_tensors())


def write_gguf(order: Order) -> Contents:
    """One file; the gguf package writes it."""
    from .gguf import plan_file

    return plan_file(order)


# ---- The command that uses a folder.

COMMANDS = {
    "vllm": "{path}vllm serve {target} {eager}--speculative-config '{speculative}'",
    "speculators": "vllm serve {place}",
    "sglang": "python -m sglang.launch_server --model-path {target} --speculative-algorithm"
    " {algorithm} --speculative-draft-model-path {place}{steps} --speculative-num-draft-tokens"
    " {more}",
    "gguf": "llama-server --model TARGET.gguf --spec-type draft-{method} --spec-draft-model"
    " {place}/model.gguf --spec-draft-n-max {number}",
    "trtllm-pytorch": "trtllm-serve {target} --backend pytorch --extra_llm_api_options"
    " {place}/extra_llm_api_options.yaml",
    "edge-llm": "tensorrt-edgellm-export {target} out/base --eagle-base && tensorrt-edgellm-export"
    " {place} out/draft",
    "hf": 'specdec generate --model-dir {target} {flag} {place} "def main():"',
}
# By kind: vLLM's name of the method, SGLang's, and the option of specdec.
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
    """The command line of the runtime, for a chain of draft tokens."""
    place, number, kind = order.place, order.num_draft_tokens, order.source.kind
    if order.settings.to == "gguf" and kind == "plain":
        return f"llama-server --model {place}/model.gguf"
    method, algorithm, flag = METHOD_NAMES[kind]
    target = place if kind == "mtp" and order.settings.to != "hf" else order.target
    speculative: dict[str, Any] = {
        "method": "dspark" if order.is_dspark else method, "model": place,
        "num_speculative_tokens": number,
    }  # fmt: skip
    if kind == "eagle3" and order.eagle3.mask_token_id is not None:
        speculative["parallel_drafting"] = True
    if kind == "mtp":
        del speculative["model"]
    if kind == "redrafter":
        speculative |= {"method": "custom_class", "model": "redrafter_proposer.ReDrafter"}
    steps = f" --speculative-num-steps {number} --speculative-eagle-topk 1"
    return COMMANDS[order.settings.to].format(
        target=target, place=place, number=number, more=number + 1, flag=flag,
        algorithm=algorithm, method=method, speculative=json.dumps(speculative),
        path=f"PYTHONPATH={place} " if kind == "redrafter" else "",
        eager="--enforce-eager " if kind == "redrafter" else "",
        steps="" if kind == "dflash" else steps,
    )  # fmt: skip


# ---- What runtimes take, and what they lack.

Writer = Callable[[Order], Contents]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime: how it is written for, and what it lacks of EAGLE-3.

    writers: by a source's kind. norms: those of EAGLE-3 that it computes. targets: those whose
    layers a drafter can read, None where nothing is known of that. is_usual: whether it only reads
    three layers of the target with one layer of the drafter. keeps_embedding: whether it takes an
    embedding of the drafter's own.
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


def find_writer(order: Order) -> Writer:
    """Return what writes a source for a runtime, or raise SpecDecError that names others."""
    kind, to = order.source.kind, order.settings.to
    writer = RUNTIMES[to].writers.get(kind)
    if writer is None:
        takers = [name for name, other in RUNTIMES.items() if kind in other.writers]
        engines = " and TensorRT-LLM's engines" if kind in ("medusa", "redrafter") else ""
        raise SpecDecError(
            f"{RUNTIMES[to].title} does not take {TITLES[kind]}",
            f"those that do: --to {' or '.join(takers)}, and the torch backend{engines} of"
            " specdec-build",
        )
    find_lacks(order).raise_all()
    return writer


def find_lacks(order: Order) -> Problems:
    """List what a runtime has no room for; it would leave that out without a word."""
    problems, to = Problems(), order.settings.to
    for kinds, runtimes, find, fact, remedy in LACKS:
        if order.source.kind in kinds and to in runtimes and (found := find(order)):
            values = {"title": RUNTIMES[to].title, **(found if isinstance(found, dict) else {})}
            problems.add(fact.format(**values), remedy.format(**values))
    return problems


def find_unread(order: Order) -> dict[str, str] | None:
    """A target whose layers the runtime hands to no drafter."""
    source, runtime = order.source, RUNTIMES[order.settings.to]
    target = source.model.architecture
    if runtime.targets is None or target in runtime.targets:
        return None
    takers = [
        name
        for name, other in RUNTIMES.items()
        if source.kind in other.writers and target in (other.targets or [target])
    ]
    return {
        "kind": TITLES[source.kind].removeprefix("an ").removeprefix("a "), "target": target,
        "read": ", ".join(runtime.targets), "takers": " and ".join(takers),
    }  # fmt: skip


def find_unread_head(order: Order) -> dict[str, str] | None:
    """A head in a form that runtimes do not read beside this target."""
    model, form = order.source.model, order.source.head_form
    is_read = form == "qwen" and model.linear_attention is not None
    if form == "mimo" and order.settings.to != "gguf":
        config = read_json(Path(order.settings.model_dir or "") / "config.json")
        is_read = config.get("architectures") == ["MiMoForCausalLM"]
    layout = {"mimo": "MiMo", "qwen": "Qwen", "glm": "GLM"}[form]
    return None if is_read else {"layout": layout, "target": model.architecture}


def drafts_unread(order: Order) -> bool:
    """Whether a block drafts from its first token without a Markov head, as only specdec can."""
    params = order.dflash
    return params.sample_from_anchor and not params.markov_rank and order.settings.to != "hf"


def find_excess(order: Order) -> dict[str, int] | None:
    """More draft tokens than a block has."""
    number, most = order.num_draft_tokens, order.dflash.num_positions
    return {"number": number, "most": most} if number > most and not drafts_unread(order) else None


def find_own_tables(order: Order) -> dict[str, str] | None:
    """Tables of a DFlash drafter's own; DeepSpec's layout holds those of a whole vocabulary."""
    is_deepspec = order.settings.to == "hf" and order.dflash.sample_from_anchor
    names = {OFFSETS} if is_deepspec else {"embed_tokens.weight", HEAD, OFFSETS}
    own = names & set(order.source.parts)
    return {"own": join_names(sorted(own))} if own else None


def find_other_layers(order: Order) -> dict[str, Any] | None:
    """Layers that are entered, other than those that TensorRT Edge-LLM gives."""
    depth, entered = order.source.model.num_hidden_layers, list_entered(order.eagle3)
    usual = [2, depth // 2, depth - 3]
    return {"usual": usual, "entered": entered} if entered != usual else None


def find_no_template(order: Order) -> dict[str, Any] | None:
    """A target's folder without a chat template of its own."""
    folder = Path(localize(order.settings.model_dir or ""))
    if not order.settings.model_dir or not folder.is_dir():
        return None
    return {"folder": folder} if read_template(folder) is None else None


def find_lost_norms(order: Order) -> dict[str, str] | None:
    """Norms of EAGLE-3 that the runtime does not compute."""
    known = RUNTIMES[order.settings.to].norms
    lost = [name for name, is_on in describe_norms(order.eagle3).items() if is_on]
    lost = [name for name in lost if name not in known]
    return {"lost": ", ".join(lost)} if lost else None


def find_unusual(order: Order) -> dict[str, int] | None:
    """Other numbers of layers than three of the target's and one of the drafter's."""
    read, own = len(order.eagle3.aux_layers), order.eagle.net.num_hidden_layers
    is_bad = RUNTIMES[order.settings.to].is_usual and (read, own) != (3, 1)
    return {"read": read, "own": own} if is_bad else None


ALL = tuple(RUNTIMES)
BUT_HF = tuple(name for name in RUNTIMES if name != "hf")
BUT_VLLM = tuple(name for name in RUNTIMES if name not in ("vllm", "speculators"))
BUT_BOTH = tuple(name for name in BUT_VLLM if name != "hf")
AS_HF = "export it as hf, which specdec runs"
ALL_OF_EAGLE3 = "vllm, speculators and hf write all of EAGLE-3"
# Kinds, runtimes, what finds it (values for the texts, or true), and the error: fact and remedy.
LACKS: tuple[tuple[Collection[str], Collection[str], Callable[[Order], Any], str, str], ...] = (
    (
        ("eagle3", "dflash"), ALL, find_unread,
        "{title} lets no {kind} read the layers of a {target}",
        "it does of {read}; for this target there are --to {takers}",
    ),
    (
        ("mtp",), BUT_HF, find_unread_head,
        "{title} reads no head of {layout}'s layout beside a {target}",
        "it reads Qwen's beside Qwen3.5, Qwen3.6 and Qwen3-Next, MiMo's beside MiMo 7B; hf is for"
        " specdec",
    ),
    (
        ("dflash",), ("sglang",), lambda order: order.dflash.markov_rank,
        "{title} is not known to read the Markov head that the drafter has",
        "export it for vllm or speculators, or as hf",
    ),
    (
        ("dflash",), ("hf",),
        lambda order: order.dflash.markov_rank and not order.dflash.sample_from_anchor,
        "DeepSpec's layout drafts from the first token of a block, this drafter does not",
        "export it for vllm or speculators",
    ),
    (
        ("dflash",), ALL, drafts_unread,
        "{title} drafts from the masks of a block, this drafter from its first token too",
        "specdec runs it from the folder that it came in, or from that of --to hf",
    ),
    (
        ("dflash",), ALL, find_excess,
        "--num-draft-tokens is {number}, a block of this drafter drafts {most}",
        "give 1 to {most}; fewer than {most} are other blocks than it was trained with",
    ),
    (
        ("dflash",), tuple(name for name in ALL if name != "speculators"),
        lambda order: order.dflash.aux_layers[-1] == order.source.model.num_hidden_layers - 1
        and {"last": order.dflash.aux_layers[-1]},
        "the drafter reads the last layer, {last}, whose output z-lab's layout takes behind the"
        " final norm",
        "export it as speculators, or as hf with a drafter that reads inner layers",
    ),
    (
        ("dflash",), BUT_VLLM, find_own_tables,
        "{title} drafts with the target's embedding and head, the drafter has {own} of its own",
        "export it for vllm or speculators; hf and sglang have no room for them",
    ),
    (
        ("dflash",), BUT_HF,
        lambda order: order.dflash.net.embedding_multiplier != 1
        and {"scale": order.dflash.net.embedding_multiplier},
        "{title} gives the drafter the rows of the embedding as they are, this one was trained"
        " with them multiplied by {scale:g}",
        AS_HF,
    ),
    (
        ("dflash",), BUT_HF,
        lambda order: order.source.model.arithmetic.head_bias and HEAD not in order.source.parts,
        "{title} drafts without the bias of the target's head", AS_HF,
    ),
    (
        ("eagle1", "eagle3"), ALL,
        lambda order: not RUNTIMES[order.settings.to].keeps_embedding
        and "embed_tokens.weight" in order.source.parts,
        "{title} drafts with the target's embedding, the drafter has its own",
        "export it for another runtime, or train it with the target's",
    ),
    (
        ("eagle1",), ("vllm", "sglang"), lambda order: "lm_head.weight" in order.source.parts,
        "{title} drafts with the target's head, this EAGLE-1 drafter has its own", AS_HF,
    ),
    (
        ("eagle1",), ("vllm",),
        lambda order: "fc.bias" in order.source.parts
        and {"bias": order.source.parts["fc.bias"].name},
        "vLLM's EAGLE-1 has no fc.bias, and {bias} is not zero",
        "export it for sglang or as hf; or train one with specdec-train --no-eagle-bias",
    ),
    (
        ("eagle3",), ("edge-llm",), find_other_layers,
        "TensorRT Edge-LLM gives a drafter what enters layers {usual} of this target, whatever"
        " config.json says; the drafter was trained on {entered}",
        "train it on the usual layers, or export it for vllm or trtllm-pytorch",
    ),
    (
        ("eagle3",), ("edge-llm",), find_no_template,
        "{folder} has no chat template, and TensorRT Edge-LLM refuses such a target",
        "add chat_template.jinja, which may be no more than the messages' contents",
    ),
    (
        ("eagle3",), BUT_BOTH, lambda order: order.eagle3.mask_token_id is not None,
        "{title} drafts a token a pass, this drafter all in one", ALL_OF_EAGLE3,
    ),
    (
        ("eagle3",), ("speculators",),
        lambda order: order.eagle3.mask_token_id is not None and order.eagle3.fc_norm,
        "vLLM drops fc_norm of a P-EAGLE drafter of speculators'", "use --to vllm, or hf",
    ),
    (
        ("eagle3",), ALL, find_lost_norms,
        "{title} is not known to compute {lost}, which the drafter has", ALL_OF_EAGLE3,
    ),
    (
        ("eagle3",), ALL, find_unusual,
        "{title} reads three layers of the target with a drafter of one layer; this one reads"
        " {read} with {own}",
        ALL_OF_EAGLE3,
    ),
)  # fmt: skip
