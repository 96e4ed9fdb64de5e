"""Layouts of the runtimes: one writer for each kind of drafter.

Facts, as the runtimes' own loaders have them: vLLM 0.32.0 (model_executor/models/{medusa,
llama_eagle, llama_eagle3, qwen3_dflash, qwen3_dspark}.py, transformers_utils/configs/), SGLang
03d5a77 and 034b3be (srt/models/llama_eagle{3,}.py), 0.5.23 (srt/models/dflash.py, srt/speculative/
dflash_utils.py), speculators c05b95b and 0.9.0, DeepSpec afdfa7c (deepspec/modeling/dspark/),
TensorRT-LLM's llmapi/llm_args.py, tensorrt_edgellm 0.11.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, join_names
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import EAGLE3_FIXED, Eagle3Params
from specdec.methods.medusa import MedusaParams
from specdec.methods.mtp import FORMS
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import FULL, SLIDING, ModelConfig
from specdec.model.tensors import DFLASH_NET, HEAD

from .source import MODEL_TYPES, Contents, Order, TensorRows, list_entered

# ---- The parts of a config.json.


def describe_net(net: ModelConfig, dtype: str, architecture: str) -> dict[str, Any]:
    """Return a Hugging Face config.json of a Llama, Mistral, Qwen2 or Qwen3."""
    config = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[net.architecture],
        **net.describe_sizes(),
        "tie_word_embeddings": net.share_embedding_table,
        "torch_dtype": dtype,
    }
    if net.architecture == "LlamaForCausalLM":
        config |= {"attention_bias": net.attn_bias, "mlp_bias": net.mlp_bias}
    if net.architecture == "Qwen3ForCausalLM":
        config["attention_bias"] = net.attn_bias
    if net.sliding_window is not None:
        config["sliding_window"] = net.sliding_window
        if net.architecture != "MistralForCausalLM":
            config |= {"use_sliding_window": True, "max_window_layers": 0}
        if net.layer_types is not None:
            number = net.layer_types.count(FULL)
            config |= {"max_window_layers": number, "layer_types": list(net.layer_types)}
    elif net.architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    return config


def describe_norms(eagle3: Eagle3Params) -> dict[str, bool]:
    """Return EAGLE-3's norms; all are written, since runtimes have different defaults."""
    return {name: getattr(eagle3, name) for name in ("norm_before_residual", *Eagle3Params.NEWER)}


def describe_dflash(order: Order, architecture: str) -> dict[str, Any]:
    """Return layers and sizes of a DFlash drafter.

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
    """Return the layers' config.json, with the type of each."""
    net = params.net
    kind = FULL if net.sliding_window is None else SLIDING
    types = net.layer_types or (kind,) * net.num_hidden_layers
    return describe_net(net, dtype, architecture) | {"layer_types": list(types)}


def describe_reading(params: DFlashParams) -> dict[str, Any]:
    """Return the fields of a DFlash drafter's inputs; target layers count by their outputs."""
    fields = {"mask_token_id": params.mask_token_id, "target_layer_ids": list(params.aux_layers)}
    scale = params.net.embedding_multiplier
    return fields | ({"input_embedding_scale": scale} if scale != 1 else {})


def describe_markov(params: DFlashParams) -> dict[str, Any]:
    """Return DSpark's fields; checkpoints have no confidence head."""
    return {
        "sample_from_anchor": params.sample_from_anchor,
        "markov_rank": params.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


# ---- A writer for each kind of drafter.


def write_medusa(order: Order) -> Contents:
    """Write FasterDecoding's names; vLLM reads any key like `*num*heads*` as its number."""
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
    """Write Apple's names, as specdec-train writes them."""
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
    """Write SafeAILab's names."""
    config = describe_net(order.eagle.net, order.source.model.dtype, "LlamaForCausalLM")
    config["bias"] = "fc.bias" in order.source.tensors
    return Contents(config, order.list_tensors())


def write_eagle1_sglang(order: Order) -> Contents:
    """Write SafeAILab's names; SGLang's fc always has a bias, random if the file has none."""
    contents = write_eagle1(order)
    contents.config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    order.source.left_out.pop("fc.bias", None)
    contents.tensors["fc.bias"] = TensorRows("eagle_nets.0.drafter.fc.bias")
    return contents


def write_eagle3(order: Order) -> Contents:
    """Write ModelOpt's and SafeAILab's fields and names.

    eagle_config numbers the layers by the outputs that are read, as SGLang and TensorRT-LLM do. The
    list at the top numbers them by their inputs; vLLM and llama.cpp's converter prefer it.
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
    """Write SpecForge's names: the only layer is `midlayer`."""
    contents = write_eagle3(order)
    contents.tensors = {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: rows
        for name, rows in contents.tensors.items()
    }
    return contents


def write_eagle3_trtllm(order: Order) -> Contents:
    """Write the folder, and the YAML of the PyTorch backend by the version's key names."""
    contents = write_eagle3(order)
    key = "speculative_model_dir" if order.settings.trtllm_version == "1.2" else "speculative_model"
    contents.texts["extra_llm_api_options.yaml"] = (
        "speculative_config:\n  decoding_type: Eagle3\n"
        f"  max_draft_len: {order.num_draft_tokens}\n  {key}: {order.output_path}\n"
        f"  eagle3_layers_to_capture: [{', '.join(map(str, order.eagle3.aux_layers))}]\n"
    )
    return contents


def write_eagle3_edge(order: Order) -> Contents:
    """Write SpecForge's names; a list at the top numbers layers by their inputs."""
    contents = write_eagle3_sglang(order)
    contents.config["target_layer_ids"] = list_entered(order.eagle3)
    return contents


def write_dflash(order: Order) -> Contents:
    """Write z-lab's form, or DeepSpec's for blocks that draft from the anchor too.

    A Markov rank of 0 gives DeepSpec's DFlash. DeepSpec's loader needs embedding and head, even if
    they are the target's. num_anchors has an effect in training only.
    """
    source, params, tensors = order.source, order.dflash, order.list_tensors()
    if not order.is_dspark:
        config = describe_dflash(order, "DFlashDraftModel")
        return Contents(config | {"dflash_config": describe_reading(params)}, tensors)
    config = describe_dflash(order, "Qwen3DSparkModel")
    config |= {**describe_reading(params), "num_anchors": 512, **describe_markov(params)}
    if order.settings.to == "hf":
        for name, stored_name in (
            ("embed_tokens.weight", "drafter.vocab_embedding.weight"),
            (HEAD, HEAD),
        ):
            tensors[name] = TensorRows(f"{DFLASH_NET}{stored_name}")
            source.left_out.pop(name, None)
    return Contents(config, tensors)


def write_speculators(order: Order) -> Contents:
    """Write speculators' form: layers count by their inputs, and the layer has a config inside."""
    source, drafter = order.source, order.source.drafter
    method_fields: dict[str, Any]
    if isinstance(drafter, DFlashParams):
        name, architecture, size = "dflash", "DFlashSpeculator", drafter.draft_vocab_size
        net = describe_dflash_net(drafter, source.model.dtype, "Qwen3ForCausalLM")
        method_fields = {
            "block_size": drafter.block_size, "mask_token_id": drafter.mask_token_id,
            "aux_hidden_state_layer_ids": list_entered(drafter), "sample_from_anchor": False,
            "sliding_window_non_causal": True,  # vLLM would else hide a block's later tokens
        }  # fmt: skip
        if drafter.markov_rank:
            name, architecture = "dspark", "DSparkSpeculator"
            method_fields |= describe_markov(drafter) | {"confidence_head_with_markov": False}
    else:
        eagle3 = order.eagle3
        name, architecture, size = "eagle3", "Eagle3Speculator", eagle3.draft_vocab_size
        net = describe_net(order.eagle.net, source.model.dtype, "LlamaForCausalLM")
        method_fields = {
            "eagle_aux_hidden_state_layer_ids": list_entered(eagle3),
            **describe_norms(eagle3),
        }
        if (token := eagle3.mask_token_id) is not None:
            name, architecture = "peagle", "PEagleSpeculator"
            method_fields["mask_token_id"] = token
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
        **method_fields,
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
    """Write the target's own folder with the head as its last shard; as hf the head alone."""
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
    target_shards = sorted(folder.glob("*.safetensors"))
    names = [
        f"model-{n:05}-of-{len(target_shards) + 1:05}.safetensors"
        for n in range(1, len(target_shards) + 2)
    ]
    contents.files, contents.weights_name = dict(zip(names, target_shards, strict=False)), names[-1]
    shard_names = {key: n for n, path in contents.files.items() for key in TensorFile(path).tensors}
    if head_tensors := [name for name in shard_names if name.startswith(form.prefix)]:
        raise SpecDecError(
            f"{folder} holds a head already: {join_names(head_tensors)}",
            "give a target without one",
        )
    shard_names |= dict.fromkeys(contents.tensors, contents.weights_name)
    index = {"metadata": {}, "weight_map": shard_names}
    contents.texts["model.safetensors.index.json"] = json.dumps(index, indent=2)
    return contents


def write_model(order: Order) -> Contents:
    """Write a whole model in transformers' form: a draft model for any runtime, or a target."""
    model = order.source.model
    return Contents(describe_net(model, model.dtype, model.architecture), order.list_tensors())


def write_gguf(order: Order) -> Contents:
    """Plan one file, which the gguf package writes."""
    from .gguf import plan_file

    return plan_file(order)
