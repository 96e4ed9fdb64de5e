"""A case for each hint of the converter: what raises it, and where it leads who follows it."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.methods.base import USE_ITS_DRAFTER
from tests.conftest import make_llama
from tests.convert.hint_scenes import (
    FILE,
    Case,
    Change,
    Scene,
    again,
    copy_in,
    document,
    flags,
    keys,
    lose_record,
    move,
    put,
    remake,
    remove,
    save_again,
    section,
    split,
    swell,
    take_entry,
    tensors,
    use_torch,
    write,
)
from tests.families import make_family_model

Q = "model.layers.0.self_attn.q_proj"
DRAFTER = f"drafter/{FILE}"
SAME_MODEL = "its config.json and tensors disagree: take both from the same model"
FOR_1_2 = flags(trtllm_version="1.2")
CHECKPOINT = flags(model_dir=None, base_model_checkpoint_dir=Path("checkpoint"))
INT4 = flags(quantization="int4_awq", calibration_data=Path("data.jsonl"))
FP8 = flags(quantization="fp8", calibration_data=Path("data.jsonl"))
ROWS = write("data.jsonl", '{"input_ids": [1, 2, 3]}\n' * 4)
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
YARN = ROTARY | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
UNROUNDED = YARN | {"truncate": False}


def plain_is(**values: object) -> dict[str, object]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **values}


def put_into_cache(scene: Scene) -> None:
    """Put the model's folder into one as the Hub's cache has them."""
    model, snapshot = scene["model"], scene["cache/snapshots/abc"]
    for name in ("blobs", "refs", "snapshots"):
        scene[f"cache/{name}"].mkdir(parents=True)
    model.rename(snapshot)
    scene["cache"].rename(model)


def link_to_nothing(scene: Scene) -> None:
    """Put a link of the Hub's cache whose file is not there in the place of the weights."""
    scene[f"model/{FILE}"].unlink()
    scene[f"model/{FILE}"].symlink_to("../../blobs/abc")


PREFIXED = {f"{Q}.weight": f"module.{Q}.weight"}
MODELS = [
    # ---- Which model it is.
    Case("give one of them: {}", "llama", put_into_cache,
         flags(model_dir=Path("model/snapshots/abc"))),
    Case("download or copy the file itself again: a link of the Hub's cache leads to it in the"
         " cache alone", "llama", link_to_nothing, again),
    Case("download {} too, which says which file has a tensor", "llama",
         [split, remove(f"model/{FILE}.index.json")], again),
    Case("save the model again without {} in its tensors' names: wrappers for training put it"
         " there, which an unwrapped model's save_pretrained() does not", "llama",
         tensors(PREFIXED), tensors({name: own for own, name in PREFIXED.items()})),
    Case("correct architectures in its config.json", "llama",
         keys(architectures="LlamaForCausalLM"), keys(architectures=["LlamaForCausalLM"])),
    Case("correct the wrong one in its config.json: transformers goes by model_type", "llama",
         keys(model_type="mistral"), keys(model_type="llama")),
    Case("the supported architectures are {}", "llama",
         keys(architectures=["FooForCausalLM"]), keys(architectures=["LlamaForCausalLM"])),
    Case("save its text model alone; the wrappers that are opened here are {}; {}", "llama",
         keys(architectures=["FooVLForConditionalGeneration"], text_config=plain_is()),
         again),
    Case("keep one of them: which holds the model's weights cannot be known", "llama",
         tensors({"norm.weight": torch.ones(64)}), tensors({"norm.weight": None})),
    Case(SAME_MODEL, "llama", keys(intermediate_size=96), again),
    Case("its config.json must describe every tensor, as an unread one would be lost: correct it;"
         " where the model does without them, load it with transformers and save_pretrained()",
         "llama", tensors({"model.layers.0.extra.weight": torch.ones(4, 4)}), save_again),
    Case("copy or download the folder again, and check its config.json", "llama",
         tensors({f"{Q}.weight": None}), again),
    Case("give a folder with {} weights", "llama",
         tensors({f"{Q}.weight": lambda t: t.to(torch.int32)}), again),
    # ---- What config.json says.
    Case("give head_dim", "llama", [remake(lambda root: make_family_model(
        root, "mistral", heads=3, kv_heads=3, head_dim=16, name="model")), keys(head_dim="ABSENT")],
         keys(head_dim=16)),
    Case("models of this family rotate whole heads: remove the field if it was copied from another"
         " config.json, as drafters have it from their targets; if this one was trained so, it is"
         " not supported", "llama", keys(partial_rotary_factor=0.5),
         keys(partial_rotary_factor="ABSENT")),
    Case("models of this family rotate alike in all layers; this one is not supported", "llama",
         keys(rope_parameters={"full_attention": ROTARY, "sliding_attention": ROTARY}), None),
    Case("models of this family scale full layers only; this one is not supported", "gemma3",
         keys(rope_parameters={
             "full_attention": ROTARY,
             "sliding_attention": ROTARY | {"rope_type": "linear", "factor": 2.0},
         }), None),
    Case("remove truncate, and the bounds are rounded here, too", "gemma3",
         keys(rope_parameters={"full_attention": UNROUNDED, "sliding_attention": ROTARY}),
         keys(rope_parameters={"full_attention": YARN, "sliding_attention": ROTARY})),
    Case("experts are supported with silu", "mixtral", keys(hidden_act="gelu"), None),
    Case("correct {}", "gpt2", keys(n_head=7), keys(n_head=8)),
    Case("give {} beside the scaling", "phi3",
         keys(rope_scaling={
             "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
             "original_max_position_embeddings": 32}, rope_parameters="ABSENT",
             original_max_position_embeddings="ABSENT"),
         keys(original_max_position_embeddings=32)),
    Case("models of this family are supported whose layers are all {}", "qwen2_moe",
         keys(layer_types=["full_attention", "sliding_attention"]), None),
    Case("remove the wrong one", "llama",
         keys(rope_theta=10000.0, rope_parameters=ROTARY | {"rope_theta": 20000.0}),
         keys(rope_parameters="ABSENT")),
    Case("models that read text in both directions write none, and are not supported", "gemma3",
         keys(use_bidirectional_attention=True), None),
    Case("give a model of text; if this is one, set is_causal to true", "llama",
         keys(is_causal=False), keys(is_causal=True)),
    Case("models of this family are supported whose layers are alike, but for layer_types", "llama",
         keys(per_layer_config={"1": {"rms_norm_eps": 0.5}}), None),
    Case("Gemma's activation is the tanh form of gelu, gelu_pytorch_tanh", "gemma2",
         keys(hidden_activation="gelu"), keys(hidden_activation="gelu_pytorch_tanh")),
    Case("no Gemma 3 caps its scores, and transformers takes no notice of it: give null",
         "gemma3", keys(attn_logit_softcapping=50.0), keys(attn_logit_softcapping=None)),
    Case("this variant of GPT-2 is not supported; the usual ones scale scores by the head's size",
         "gpt2",
         keys(scale_attn_weights=False), None),
    Case("this variant of OPT is not supported; the usual ones have all norms, with weights",
         "opt", keys(layer_norm_elementwise_affine=False), None),
    Case("OPT without biases (Galactica) is not supported", "opt", keys(enable_bias=False), None),
    Case("Phi models that normalize queries and keys are not supported", "phi",
         keys(qk_layernorm=True), None),
    Case("models are supported whose layers all have experts, and no sliding window", "qwen2_moe",
         keys(mlp_only_layers=[0]), None),
    Case("Qwen2-MoE without attention biases is not supported", "qwen2_moe",
         keys(qkv_bias=False), None),
    Case("hybrids are supported with silu", "qwen3_5", keys(hidden_act="gelu"), None),
    Case("hybrids are supported whose layers are {} or {}", "qwen3_5",
         keys(layer_types=["full_attention", "sliding_attention"]), None),
    Case("give rope_parameters an object for {} and {}", "gemma4",
         keys(rope_scaling={"rope_type": "linear", "factor": 2.0}), keys(rope_scaling="ABSENT")),
    Case("copy or download the model's config.json again", "gemma4",
         keys(rope_parameters=ROTARY), again),
    Case("give the model's {}", "granitemoehybrid",
         keys(embedding_multiplier=None), keys(embedding_multiplier=12.0)),
    Case("Granite is supported with layers of {}", "granitemoehybrid",
         keys(layer_types=["full_attention", "sliding_attention"]), None),
    Case("correct the wrong one of these sizes of Mamba-2", "granitemoehybrid",
         keys(mamba_n_heads=4), keys(mamba_n_heads=8)),
    Case("steps are supported that nothing limits", "granitemoehybrid",
         keys(time_step_limit=[0.0, 1.0]), None),
    Case("Granite is supported with rotary positions (rope) or without (nope)",
         "granitemoehybrid", keys(position_embedding_type="alibi"), None),
    Case("Qwen3.5's mixtures always normalize the weights of the chosen experts: remove"
         " norm_topk_prob", "qwen3_5_moe", keys(norm_topk_prob=False),
         keys(norm_topk_prob="ABSENT")),
    Case("correct no_rope_layers", "smollm3", keys(no_rope_layers=[2, 2]), again),
    Case("SmolLM3 with a window in some layers is not supported", "smollm3",
         keys(use_sliding_window=True, sliding_window=8), None),
    Case("StableLM has heads of {} dimensions: remove head_dim", "stablelm", keys(head_dim=4),
         keys(head_dim="ABSENT")),
    Case("StableLM that normalizes queries and keys (StableLM 2 12B) is not supported",
         "stablelm", keys(qk_layernorm=True), None),
    Case("convert for 1.2", "phi3",
         [keys(partial_rotary_factor=0.5, rope_parameters="ABSENT"), flags(trtllm_version="0.14")],
         FOR_1_2),
    Case("leave --trtllm-version out: the checkpoint is then for the torch backend", "stablelm",
         flags(trtllm_version="0.14"), flags(trtllm_version=None)),
    # ---- Which files there are.
    Case("keep one of them: which is the trained one cannot be known", "redrafter",
         tensors({"lm_heads.2.weight": torch.ones(128, 96)}, DRAFTER),
         tensors({"lm_heads.2.weight": None}, DRAFTER)),
    Case("choose one of {} with --dtype", "llama", keys(dtype="float24"), flags(dtype="float32")),
    Case("finish the download of the folder", "llama",
         [split, move("model/model-00001-of-00002.safetensors", "elsewhere")],
         move("elsewhere", "model/model-00001-of-00002.safetensors")),
    Case("download the file and the index again", "llama",
         [split, tensors({f"{Q}.weight": "other.weight"},
                         "model/model-00002-of-00002.safetensors")], again),
    Case("copy or download the folder again", "llama",
         [split, write(f"model/{FILE}.index.json", "{}")], again),
    Case("do not trust this folder; get it from its origin", "llama",
         [split, document(f"model/{FILE}.index.json", weight_map={"a.weight": "../a"})], again),
    Case("add them to the index's weight_map, or download the index again", "llama",
         [split, take_entry], again),
    Case("finish the download of {}", "llama", move(f"model/{FILE}", f"model/{FILE}.part"),
         move(f"model/{FILE}.part", f"model/{FILE}")),
    Case("{}give the folder that holds the model's weights; other formats are first loaded with"
         " transformers and saved with save_pretrained, which writes {}", "llama",
         move(f"model/{FILE}", "model/gptq_model.safetensors"),
         move("model/gptq_model.safetensors", f"model/{FILE}")),
    Case("give a folder or Hub id", "llama", flags(model_dir=""), flags(model_dir=Path("model"))),
    Case("specdec-convert --lora-dir {} merges it", "llama",
         [put("lora", "adapter"), copy_in("adapter", "model")],
         flags(lora_dir=Path("model"))),
    # ---- Files of torch.save.
    Case("save the model's state_dict() alone, best as model.safetensors", "llama",
         use_torch(lambda state: {"model": state}), again),
    Case("save the model with dense tensors on the CPU", "llama",
         use_torch(lambda state: state | {"a": torch.ones(2, 2).to_sparse()}), again),
    Case("store it as one of {}", "llama",
         use_torch(lambda state: state | {"a": torch.ones(2, dtype=torch.complex128)}), again),
    Case("the file is truncated, damaged or not a file of torch.save: copy or download it again",
         "llama", [remove(f"model/{FILE}"), write("model/pytorch_model.bin", b"no file")], again),
    Case("the file is damaged or an unfinished download: copy or download it again", "llama",
         [use_torch(), lose_record], again),
    Case("do not trust the file; get the model from its origin", "llama",
         [remove(f"model/{FILE}"), swell], again),
    # ---- Weights.
    Case("choose a --dtype of wider range, or let specdec-convert --allow-nonfinite write them",
         "llama", [tensors({f"{Q}.weight": lambda t: t + 1e6}), flags(dtype="float16")],
         flags(dtype="bfloat16")),
    Case("get the model again, or let specdec-convert --allow-nonfinite write them", "llama",
         tensors({f"{Q}.weight": lambda t: t / 0}), flags(allow_nonfinite=True)),
    Case("finish or repeat the download: a file may have its full size from the beginning, with"
         " zeros where nothing has come; if they are meant, specdec-convert --allow-zeros writes"
         " them", "llama", tensors({"lm_head.weight": torch.zeros_like}), flags(allow_zeros=True)),
]  # fmt: skip

FLAGS = [
    Case("give one of them", "llama", flags(base_model_checkpoint_dir=Path("model")),
         flags(base_model_checkpoint_dir=None)),
    Case("give the target: --model-dir, or --base-model-checkpoint-dir for an existing checkpoint",
         "llama", flags(model_dir=None), flags(model_dir=Path("model"))),
    Case("a checkpoint holds one drafter: give one of them", "redrafter",
         flags(medusa_model_dir=Path("model")), flags(medusa_model_dir=None)),
    Case("leave one of them out", "redrafter", flags(speculative_decoding_mode="mtp"),
         flags(speculative_decoding_mode=None)),
    Case("give the drafter's folder, or leave the option out", "llama",
         flags(redrafter_num_beams=3), flags(redrafter_num_beams=None)),
    Case("give the drafter to add to the checkpoint: {}", "checkpoint",
         flags(drafter_model_dir=None), flags(drafter_model_dir=Path("drafter"))),
    Case("give the model as --model-dir", "checkpoint",
         [put("lora", "adapter"), flags(lora_dir=Path("adapter"))],
         flags(base_model_checkpoint_dir=None, model_dir=Path("model"))),
    Case("quantize with specdec-build --quantization int8|int4; or merge the adapter with PEFT's"
         " merge_and_unload, and convert what its save_pretrained writes", "lora",
         [ROWS, FP8], flags(quantization=None, calibration_data=None)),
    Case("give --quantization fp8, or leave the option out", "llama", flags(calib_size=3),
         flags(calib_size=None)),
    Case("give the target as --model-dir: the calibration runs it with transformers", "checkpoint",
         [ROWS, FP8], flags(base_model_checkpoint_dir=None, model_dir=Path("model"))),
    Case("leave it out", "llama", flags(dequantize=True), flags(dequantize=False)),
    Case("give {}, or leave it out", "llama", [
        ROWS, INT4, flags(group_size=16)],
         flags(group_size=128), error="give --group-size 64"),
    Case("leave it out, or give --kv-cache-dtype fp8, which does", "llama",
         flags(quantization="fp8_pc_pt", calib_size=3), flags(calib_size=None)),
    Case("give a .txt, .jsonl or .json file of texts like those to be decoded: the scales come"
         " from them", "llama", [ROWS, FP8, flags(calibration_data=None)], FP8),
    Case("use --tp-size, or leave --pp-size out", "redrafter", flags(pp_size=2),
         flags(pp_size=None, tp_size=2)),
    Case("leave it out, or convert for 0.14", "llama", flags(use_embedding_sharing=True),
         flags(trtllm_version="0.14")),
    Case("leave them out: the checkpoint's experts stay as they are split", "checkpoint",
         flags(moe_tp_size=1), flags(moe_tp_size=None)),
    Case("give 0 (vocabulary) or 1 (hidden size)", "llama",
         flags(use_parallel_embedding=True, embedding_sharding_dim=2),
         flags(embedding_sharding_dim=1)),
    Case("give both, or neither", "llama", flags(embedding_sharding_dim=1),
         flags(use_parallel_embedding=True)),
    Case("leave --quantization and its options out", "fp8-static", flags(quantization="fp8_pc_pt"),
         flags(quantization=None)),
    Case("leave --quantization out, or give --dequantize: specdec-build --quantization rounds the"
         " layers of such models", "qwen3_5", flags(quantization="fp8_pc_pt"),
         flags(quantization=None)),
    Case("leave --quantization out, or give --dequantize: quantized experts are not supported yet",
         "mixtral", flags(quantization="fp8_pc_pt"), flags(quantization=None)),
    # ---- Calibration.
    Case("give texts like those to be decoded", "llama", [write("data.jsonl", "\n"), FP8], ROWS),
    Case("give more texts, or --calib-size {}", "llama", [ROWS, FP8, flags(calib_size=9)],
         flags(calib_size=4)),
    Case("{}; or give rows of input_ids", "llama",
         [write("data.jsonl", '{"text": "A text."}\n'), FP8], ROWS),
    Case("use --calib-device cpu", "llama", [ROWS, FP8, flags(calib_device="cuda")],
         flags(calib_device="cpu")),
    Case("use --dtype bfloat16 or float32 if the model overflows float16; else its weights are"
         " damaged", "llama", [ROWS, FP8, flags(dtype="float16"), tensors(
             {"model.embed_tokens.weight": lambda t: t * 1e4, f"{Q}.weight": lambda t: t,
              "model.layers.0.mlp.down_proj.weight": lambda t: t * 6e4})],
         flags(dtype="float32")),
    Case("use a smaller --tp-size, or another --quantization", "llama",
         [remake(lambda root: make_llama(root, intermediate=96, name="model")), ROWS, INT4,
          flags(tp_size=2, group_size=32)], flags(tp_size=1)),
    Case("use another --quantization", "llama", [ROWS, INT4, flags(group_size=32)],
         flags(quantization="fp8", group_size=None)),
    Case("give --group-size {}", "llama",
         [remake(lambda root: make_llama(root, intermediate=96, name="model")), ROWS,
          INT4],
         flags(group_size=64), error="give --group-size 32"),
]  # fmt: skip

CHECKPOINTS = [
    Case("give the checkpoint of the target alone", "checkpoint",
         put("redrafter", "checkpoint", converts=True), again),
    Case("convert the target again without --pp-size", "checkpoint",
         put("llama", "checkpoint", converts=True, pp_size=2),
         put("llama", "checkpoint", converts=True)),
    Case("convert the model that it was made from; taken are unquantized checkpoints and those of"
         " {}", "checkpoint",
         section("checkpoint", name="quantization", quant_algo="W4A16_GPTQ"), again),
    Case("take both from the same conversion", "checkpoint",
         keys("checkpoint", intermediate_size=96), again),
    Case("convert for 1.2, or make the checkpoint without it", "checkpoint",
         [section("checkpoint", name="mapping", pp_partition=[2]), flags(trtllm_version="0.14")],
         flags(trtllm_version="1.2")),
    Case("convert the target again with --trtllm-version {}", "checkpoint",
         [put("qwen2_moe", "checkpoint", converts=True), flags(trtllm_version="0.14"),
          put("redrafter67", "drafter")],
         put("qwen2_moe", "checkpoint", converts=True, trtllm_version="0.14"),
         error="TensorRT-LLM 0.14 has no ReDrafter"),
    Case("leave --tp-size out, or convert the target again with the one you want", "checkpoint",
         flags(tp_size=2), put("llama", "checkpoint", converts=True, tp_size=2)),
    Case("leave the options out, or convert the target again with them", "checkpoint",
         flags(use_parallel_embedding=True),
         put("llama", "checkpoint", converts=True, use_parallel_embedding=True)),
]  # fmt: skip


DRAFTERS = [
    # ---- Of every method.
    Case(USE_ITS_DRAFTER, "redrafter",
         keys("drafter", vocab_size=64), again),
    Case("give the folder of {}", "redrafter", tensors({
        name: None for name in (
            "lm_head.0.linear.weight", "lm_head.0.linear.bias", "lm_head.1.linear.weight",
            "lm_head.1.linear.bias", "lm_head.2.weight")}, DRAFTER), again),
    Case("convert for {}", "eagle1", flags(trtllm_version="0.14"), FOR_1_2),
    # ---- ReDrafter.
    Case("set rnn to true, or remove the tensors", "redrafter", keys("drafter", rnn=False),
         keys("drafter", rnn=True)),
    Case("correct exit_dim, or remove the tensors", "redrafter", keys("drafter", exit_dim=128),
         keys("drafter", exit_dim=96)),
    Case("name the input projection {}, or remove what is not the drafter's", "redrafter",
         tensors({"input_proj.weight": "input_projs.weight", "input_proj.bias": "input_projs.bias"},
                 DRAFTER),
         tensors({"input_projs.weight": "input_proj.weight", "input_projs.bias": "input_proj.bias"},
                 DRAFTER)),
    Case("give --redrafter-draft-len-per-beam {} or less", "redrafter",
         keys("drafter", predict_n_tokens=3), flags(redrafter_draft_len_per_beam=3)),
    # ---- Medusa.
    Case("give --num-medusa-heads, at most {}: config.json may be out of date", "medusa",
         keys("drafter", medusa_num_heads=2), flags(num_medusa_heads=3)),
    Case("give --num-medusa-layers, the residual layers of each head", "medusa",
         keys("drafter", medusa_num_layers="ABSENT"), flags(num_medusa_layers=1)),
    Case("leave the flag out", "medusa", flags(num_medusa_layers=2),
         flags(num_medusa_layers=None)),
    Case("give {} or less", "medusa", flags(num_medusa_heads=4), flags(num_medusa_heads=3)),
    # ---- EAGLE.
    Case("give the folder of an EAGLE drafter", "eagle1", tensors({"fc.weight": None}, DRAFTER),
         again),
    Case("keep one of them", "eagle1", tensors(
        {"eagle_module.fc.weight": torch.ones(64, 128)}, DRAFTER),
         tensors({"eagle_module.fc.weight": None}, DRAFTER)),
    Case("export it with ModelOpt's export_speculative_decoding and give that folder", "eagle1",
         tensors({"fc.weight": "eagle_module.fc.weight",
                  "eagle_module.hidden_norm.weight": torch.ones(64)}, DRAFTER), again),
    Case("train it with use_input_layernorm_in_first_layer and use_last_layernorm false", "eagle1",
         tensors({"fc.weight": "eagle_module.fc.weight",
                  "eagle_module.norm.weight": torch.ones(64)}, DRAFTER), again),
    Case("only {} can be converted: {} {}", "eagle1", keys("drafter", attention_bias=True),
         keys("drafter", attention_bias=False)),
    Case("EAGLE drafters are supported with silu", "eagle1", keys("drafter", hidden_act="gelu"),
         None),
    Case("use a drafter with half-split pairs (is_neox_style true); correct the field only if it is"
         " wrong", "eagle1", keys("drafter", is_neox_style=False),
         keys("drafter", is_neox_style=True)),
    Case("set it to false for the target's head, or add the lm_head.weight of the training",
         "eagle3", [keys("drafter", tie_word_embeddings=True),
                    tensors({"lm_head.weight": None, "d2t": None, "t2d": None}, DRAFTER),
                    keys("drafter", draft_vocab_size=128)],
         keys("drafter", tie_word_embeddings=False)),
    Case("set to true the one that the drafter was trained with", "eagle3",
         [keys("drafter", norm_before_fc=True, fc_norm=True),
          tensors({"input_norm.weight": torch.ones(128)}, DRAFTER)],
         keys("drafter", fc_norm=False)),
    Case("give the list of the target's layers", "eagle3",
         section("drafter", name="eagle_config", eagle_aux_hidden_state_layer_ids="0, 1"),
         section("drafter", name="eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1])),
    Case("{}; {} of its config.json tells its layers, rising", "eagle3",
         section("drafter", name="eagle_config", eagle_aux_hidden_state_layer_ids=[0, 9]),
         section("drafter", name="eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1])),
    Case("{}, and correct {}", "eagle3",
         section("drafter", name="eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
         section("drafter", name="eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1])),
    Case("its config.json and tensors disagree: take both from the same drafter, or correct"
         " draft_vocab_size, which is vocab_size where it is absent", "eagle3",
         keys("drafter", draft_vocab_size=32), keys("drafter", draft_vocab_size=64)),
    Case("store {} as int64", "eagle3", tensors({"d2t": lambda t: t.int()}, DRAFTER),
         tensors({"d2t": lambda t: t.long()}, DRAFTER)),
    Case("of speculators' EAGLE drafters eagle3 and peagle are read", "eagle3",
         keys("drafter", speculators_model_type="eagle"), again),
    Case("set it to zeros", "peagle", tensors({"d2t": torch.arange(128) % 2}, DRAFTER),
         tensors({"d2t": torch.zeros(128, dtype=torch.int64)}, DRAFTER)),
    Case("{}; its offsets are added to the number",
         "eagle3", tensors({"d2t": lambda t: t + 100}, DRAFTER), again),
    Case("take a P-EAGLE drafter with all its tensors, or remove the field", "peagle",
         tensors({"mask_hidden": None}, DRAFTER),
         keys("drafter", pard_token="ABSENT", parallel_drafting="ABSENT",
              eagle_aux_hidden_state_layer_ids="ABSENT")),
    Case("remove the wrong ones", "peagle", keys("drafter", mask_token_id=4),
         keys("drafter", mask_token_id="ABSENT")),
    Case("give the token that stands for those that are not known, as the drafter was trained",
         "peagle", keys("drafter", pard_token="ABSENT"), keys("drafter", pard_token=3)),
    # ---- DFlash.
    Case("give the folder of a DFlash drafter", "dflash", tensors({"fc.weight": None}, DRAFTER),
         again),
    Case("use a drafter whose blocks see all of themselves in every layer", "dflash",
         keys("drafter", is_causal=True), again),
    Case("{}; where this one's do, as SpecForge's, add {}", "dflash",
         keys("drafter", use_sliding_window=True, sliding_window=8, max_window_layers=0),
         keys("drafter", is_causal=False)),
    Case("DSpark drafters are read as DeepSpec, speculators and specdec-train write them", "dflash",
         section("drafter", name="dflash_config", projector_type="domino"), again),
    Case("add {} to dflash_config: {} if it was, else 1", "dflash",
         remake(lambda root: make_family_model(
             root, "gemma", vocab=128, layers=4, name="model")),
         section("drafter", name="dflash_config", input_embedding_scale=1.0)),
    Case("only {} are; if it changes nothing, remove it", "dflash",
         section("drafter", name="dflash_config", extra=3),
         section("drafter", name="dflash_config", extra="ABSENT")),
    Case("give the list that it was trained with", "spec-dflash",
         keys("drafter", aux_hidden_state_layer_ids="ABSENT"), again),
    Case("use a drafter that reads inner layers", "dflash",
         section("drafter", name="dflash_config", target_layer_ids=[0, 3]), again),
    Case("give 2 to {}", "dflash", [
        keys("drafter", block_size=1), section("drafter", name="dflash_config",
                                               block_size="ABSENT")],
         keys("drafter", block_size=5)),
    # ---- MTP.
    Case("give a model that was published with its head; or train one with specdec-train --method"
         " mtp, and give its folder as --mtp-model-dir", "llama",
         flags(speculative_decoding_mode="mtp"),
         [put("mtp", "drafter"), flags(speculative_decoding_mode=None,
                                       mtp_model_dir=Path("drafter"))]),
    Case("only heads of one layer are supported, which is applied again for each token", "mtp",
         tensors({"mtp.layers.1.input_layernorm.weight": torch.ones(64)}, DRAFTER), None),
    Case("give the head that was trained for this target", "mtp",
         keys("drafter", rope_parameters=ROTARY | {"rope_theta": 5e5}, rope_theta="ABSENT"),
         keys("drafter", rope_parameters=ROTARY)),
    Case("use another method", "opt", [flags(mtp_model_dir=Path("drafter")), put("mtp", "drafter")],
         [put("redrafter67", "drafter"),
          flags(mtp_model_dir=None, drafter_model_dir=Path("drafter"))]),
    Case("assistants are supported whose layers are of {}", "mtp_assistant",
         section("drafter", name="text_config", model_type="llama"), again),
    Case("give the folder as {} too, to convert both", "medusa",
         [copy_in("drafter", "model", prefix="medusa_heads."), flags(medusa_model_dir=None),
          keys(medusa_num_heads=3, medusa_num_layers=1)],
         flags(medusa_model_dir=Path("model"))),
    # ---- Adapters.
    Case("give the base model that the adapter was trained on, and all of the adapter", "lora",
         put("narrow", "model"), again),
    Case("give --dequantize, too", "fp8-static",
         [put("lora", "adapter"), flags(lora_dir=Path("adapter"))], flags(dequantize=True)),
    Case("copy or download the adapter again", "lora",
         document("adapter/adapter_config.json", rank_pattern={"(": 3}), again),
    Case("give the folder that PEFT's save_pretrained wrote", "lora",
         remove("adapter/adapter_config.json"), again),
    Case("merge it with PEFT's merge_and_unload, save that with save_pretrained, and convert it",
         "lora", document("adapter/adapter_config.json", use_dora=True), flags(lora_dir=None)),
    Case("take both files from the same training", "lora",
         document("adapter/adapter_config.json", r=8), again),
    Case("give the number that it had", "lora",
         document("adapter/adapter_config.json", lora_alpha="8"),
         document("adapter/adapter_config.json", lora_alpha=8)),
]  # fmt: skip


COMPRESSED_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
UNQUANTIZED = "convert the unquantized model instead"
PLAIN_MODEL = put("llama", "model")
DEQUANTIZE = flags(dequantize=True)
KV_INT4 = section(kv_cache_scheme={"num_bits": 4, "type": "int", "dynamic": False})
FP8_HEAD = [
    remove("checkpoint/manifest.json"),
    section("checkpoint", name="quantization", exclude_modules=[]),
    tensors({
        "lm_head.weight": lambda t: t.to(torch.float8_e4m3fn),
        "lm_head.weights_scaling_factor": torch.ones(1),
        "lm_head.activation_scaling_factor": torch.ones(1),
    }, "checkpoint/rank0.safetensors"),
]  # fmt: skip


def groups(**group: object) -> Change:
    """Set the one group of a compressed-tensors section."""
    group = {"targets": ["Linear"], "weights": COMPRESSED_WEIGHTS, **group}
    return section(config_groups={"group_0": group})


QUANTIZED = [
    Case(UNQUANTIZED, "compressed", section(transform_config={"R1": {}}), PLAIN_MODEL),
    Case(UNQUANTIZED, "compressed", section(sparsity_config={"format": "sparse-24"}), PLAIN_MODEL),
    Case(UNQUANTIZED, "compressed", section(config_groups={}), PLAIN_MODEL),
    Case(UNQUANTIZED, "compressed", groups(output_activations={"num_bits": 8}), PLAIN_MODEL),
    Case(UNQUANTIZED, "gptq", section(rotation="hadamard"), PLAIN_MODEL),
    Case("{}; {}", "gptq", section(quant_method="bitsandbytes"), PLAIN_MODEL),
    Case("pack-quantized of 4 or 8 bits by channel or group, NVFP4 and FP8 are read; {}",
         "compressed", section(format="marlin-24"), PLAIN_MODEL),
    Case("4-bit weights with plain inputs and FP8 are read; {}", "compressed",
         groups(input_activations={"num_bits": 8, "type": "int"}), PLAIN_MODEL),
    Case("FP8, FP8_PER_CHANNEL_PER_TOKEN, W4A16_AWQ, NVFP4 and W4A16_NVFP4 of ModelOpt are read;"
         " {}", "modelopt-nvfp4", section(quant_algo="W4A8"), PLAIN_MODEL),
    Case("{} may be {}; {}", "gptq", section(bits=3), section(bits=4)),
    Case("give a whole number, or -1 for whole rows", "gptq", section(group_size="32"),
         section(group_size=32)),
    Case("give rows and columns", "fp8-block", section(weight_block_size=[24]),
         section(weight_block_size=[24, 40]), error="add --dequantize"),
    Case("copy the folder again", "modelopt-int4",
         section(group_size="ABSENT", config_groups={"group_0": {"weights": {}}}), again),
    Case("correct {} or quantization_config of config.json", "fp8-static",
         document("model/hf_quant_config.json", quantization={"quant_algo": "NVFP4"}),
         document("model/hf_quant_config.json", quantization={"quant_algo": "FP8"})),
    Case("take the drafter that it was made from; specdec-build --drafter-weights int8 or int4"
         " rounds its matrices", "eagle1",
         tensors({"fc.weight": lambda t: t.to(torch.float8_e4m3fn)}, DRAFTER), again),
    Case("copy or download the folder again; where its weights were made plain, remove"
         " quantization_config from its config.json, and hf_quant_config.json", "llama",
         keys(quantization_config={"quant_method": "gptq", "bits": 4}),
         keys(quantization_config="ABSENT")),
    Case("{}; they take the bytes of an unquantized model", "fp8-block", [], DEQUANTIZE),
    Case("its config.json and tensors disagree, or a file is damaged: copy the folder again",
         "gptq", tensors({f"{Q}.scales": lambda t: t[:-1]}), again),
    Case("a file is damaged: copy or download the folder again", "fp8-channel",
         tensors({f"{Q}.weight_scale": lambda t: t / 0}), again),
    Case("the file is damaged: copy or download the folder again", "gptq-act-order",
         tensors({f"{Q}.g_idx": lambda t: 0 * t}), again),
    Case("copy or download the folder again; a tool that wrote it without that tensor has lost the"
         " order: get the model from its origin", "gptq-act-order",
         tensors({f"{Q}.g_idx": None}), again),
    Case("correct group_size of its config.json, or convert the unquantized model", "gptq",
         section(group_size=48), section(group_size=32)),
    Case("get the model in checkpoint_format gptq_v2, or convert the unquantized model",
         "gptq-asymmetric", tensors({f"{Q}.qzeros": lambda t: t | -1}),
         put("gptq-v2", "model")),
    Case("correct quantization_config, or add --dequantize", "fp8-static",
         section(activation_scheme="dynamic"), section(activation_scheme="static")),
    Case("correct quantization_config, or add --dequantize", "fp8-static",
         section(activation_scheme="dynamic"), DEQUANTIZE),
    Case("use --tp-size 1, or add --dequantize", "gptq-act-order", flags(tp_size=2),
         flags(tp_size=1)),
    Case("use --tp-size 1, or add --dequantize", "gptq-act-order", flags(tp_size=2), DEQUANTIZE),
    Case("add --dequantize, which writes plain weights in --dtype", "gptq", tensors(
        {f"{Q}.{kind}": None for kind in ("qweight", "qzeros", "scales", "g_idx")}
        | {f"{Q}.weight": torch.ones(64, 64)}), DEQUANTIZE),
    Case("remove kv_cache_scheme from its config.json, or {}", "fp8-static", KV_INT4,
         section(kv_cache_scheme="ABSENT")),
    Case("remove kv_cache_scheme from its config.json, or {}", "fp8-static", KV_INT4, DEQUANTIZE),
    Case("give an FP8 model with one static, positive scale per tensor", "fp8-static",
         tensors({f"{Q}.input_scale": lambda t: 0 * t}), again),
    Case("convert the unquantized model; or let transformers 5 save this one with"
         " save_original_format=True, its default, and give --dequantize", "fp8-dynamic",
         tensors({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(
             2, 4, 4, dtype=torch.float8_e4m3fn)}), PLAIN_MODEL),
    Case("convert for 1.2, or quantize the target again without its head", "checkpoint",
         [put("fp8-static", "checkpoint", converts=True), *FP8_HEAD, flags(trtllm_version="0.14")],
         flags(trtllm_version="1.2")),
    Case("quantize the target without its head", "eagle1",
         [put("fp8-static", "checkpoint", converts=True), *FP8_HEAD, CHECKPOINT],
         put("fp8-static", "checkpoint", converts=True)),
    Case("use a smaller --tp-size, or add --dequantize", "compressed-98", flags(tp_size=2),
         flags(tp_size=1)),
    Case("use a smaller --tp-size, or add --dequantize", "compressed-98", flags(tp_size=2),
         DEQUANTIZE),
    # ---- GGUF.
    Case("use --pp-size 1, or {}", "gguf", flags(pp_size=2), flags(pp_size=1)),
    Case("use --pp-size 1, or {}", "gguf", flags(pp_size=2), DEQUANTIZE),
    Case("use a smaller --tp-size, or {}", "gguf-k", flags(tp_size=2), flags(tp_size=1)),
    Case("use a smaller --tp-size, or {}", "gguf-k", flags(tp_size=2), DEQUANTIZE),
]  # fmt: skip
