"""Cases of hints that the core gives while a model, a checkpoint or a GGUF file is converted."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.conftest import make_llama
from tests.convert.hint_scenes import (
    FILE,
    Case,
    again,
    copy_in,
    cut,
    flags,
    keys,
    move,
    patch,
    put,
    put_gguf,
    put_tensors,
    remake,
    remove,
    section,
    tensors,
    write,
)
from tests.families import make_family_model
from tests.parity.models import make_model

Q = "model.layers.0.self_attn.q_proj.weight"
SHARING = flags(
    trtllm_version="0.14", use_embedding_sharing=True, use_parallel_embedding=True,
    embedding_sharding_dim=1, tp_size=2,
)  # fmt: skip
make_gemma4 = remake(lambda root: make_model(root / "model", "Gemma4ForCausalLM-equal_values"))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip

CONFIGS = [
    Case("{} must be at least {}", "checkpoint", keys("checkpoint", num_hidden_layers=0),
         keys("checkpoint", num_hidden_layers=2)),
    Case("no model has that: copy its config.json again", "llama",
         keys(num_hidden_layers=10**7), again),
    Case("{} must be positive", "checkpoint", keys("checkpoint", norm_epsilon=-1.0), again),
    Case("use one of {}", "checkpoint", keys("checkpoint", dtype="float24"),
         keys("checkpoint", dtype="float32")),
    Case("use 0 or 1", "checkpoint", keys("checkpoint", embedding_sharding_dim=3),
         keys("checkpoint", embedding_sharding_dim=0)),
    Case("give a number above 0, at most 1", "stablelm", keys(partial_rotary_factor=2.0,
                                                              rope_parameters="ABSENT"),
         keys(partial_rotary_factor=0.5)),
    Case("use embedding_sharding_dim 0, or store the head", "llama",
         [remake(lambda root: make_llama(root, tied=True, name="model")), SHARING],
         flags(embedding_sharding_dim=0)),
    Case("store the head, or use pp_size 1", "llama",
         [remake(lambda root: make_llama(root, tied=True, name="model")),
          flags(trtllm_version="0.14", use_embedding_sharing=True, pp_size=2)], flags(pp_size=1)),
    Case("store the head, or use pp_size 1", "llama",
         [remake(lambda root: make_llama(root, tied=True, name="model")),
          flags(trtllm_version="0.14", use_embedding_sharing=True, pp_size=2)],
         flags(use_embedding_sharing=False)),
    Case("give one of {} for each layer", "gemma2", keys(layer_types=["full_attention"]),
         again),
    Case("check the source model's config.json", "llama", keys(num_key_value_heads=3), again),
    Case("use a tp_size of {}", "llama", flags(tp_size=3), flags(tp_size=2)),
    Case("correct head_dim or the rotated share of it: rotary embedding needs pairs", "stablelm",
         keys(partial_rotary_factor=0.39, rope_parameters="ABSENT"),
         keys(partial_rotary_factor=0.5)),
    Case("copy the model's config.json again: queries that are scaled by their positions need that"
         " length, and heads that are rotated whole", "checkpoint",
         keys("checkpoint", query_scaling_beta=0.1), again),
    Case("the known ones are {}", "llama", keys(hidden_act="tanh9"), keys(hidden_act="silu")),
    Case("use a pp_size that divides it", "llama", flags(pp_size=3), flags(pp_size=2)),
    Case("up to position original_max_position_embeddings that scale is 1: for texts as short, set"
         " max_position_embeddings to that ({}) and remove {}", "llama",
         keys(rope_parameters=YARN | {"llama_4_scaling_beta": 0.1}, max_position_embeddings=128),
         keys(rope_parameters=YARN, max_position_embeddings=32)),
    Case("write {} into rope_scaling, with the length that the model was trained with before it"
         " was scaled", "llama",
         keys(rope_parameters="ABSENT", rope_scaling={"type": "yarn", "factor": 4.0},
              original_max_position_embeddings=32),
         keys(rope_scaling={"type": "yarn", "factor": 4.0,
                            "original_max_position_embeddings": 32})),
    Case("give {}, {}", "llama", keys(hidden_size="ABSENT"), keys(hidden_size=64)),
    Case("the supported kinds are {}", "llama", keys(rope_parameters=YARN | {"rope_type": "yarm"}),
         keys(rope_parameters=YARN, max_position_embeddings=128)),
    Case("its keys are {}; copy the model's config.json again, or correct it", "llama",
         keys(rope_parameters=YARN | {"factor": -1.0}),
         keys(rope_parameters=YARN, max_position_embeddings=128)),
    Case("check the source model's config.json, and the flags of the ranks", "mixtral",
         flags(moe_tp_size=2), flags(moe_tp_size=1)),
    Case("give one of the two; the other follows from it and --tp-size", "mixtral",
         flags(tp_size=2, moe_tp_size=2, moe_ep_size=2), flags(moe_ep_size=None)),
    Case("use a --moe-ep-size that divides them", "mixtral",
         [remake(lambda root: make_family_model(root, "mixtral", name="model",
                                                num_local_experts=3)),
          flags(tp_size=2, moe_ep_size=2)], flags(moe_ep_size=1)),
    Case("use a --moe-tp-size that divides it; --moe-ep-size gives ranks whole experts", "mixtral",
         [remake(lambda root: make_family_model(root, "mixtral", name="model", intermediate=49)),
          flags(tp_size=2)], flags(moe_ep_size=2)),
    Case("use a tp_size that divides them", "qwen3_5",
         [remake(lambda root: make_family_model(
             root, "qwen3_5", name="model", linear_num_key_heads=3, linear_num_value_heads=6)),
          flags(tp_size=2)], flags(tp_size=1)),
]  # fmt: skip

CHECKPOINTS = [
    Case("convert it again", "checkpoint", keys("checkpoint", arithmetic=3), again),
    Case("use the release that wrote it; this one knows {}", "checkpoint",
         keys("checkpoint", arithmetic={"newer": True}), again),
    Case("remove {}, or give the architecture another name", "checkpoint",
         keys("checkpoint", arithmetic={"norm": "layer"}),
         keys("checkpoint", arithmetic="ABSENT")),
    Case("correct the key", "checkpoint", keys("checkpoint", quantization=[]), again),
    Case("convert it without pipeline parallelism: speculative engines have none", "checkpoint",
         [put("redrafter", "checkpoint", converts=True),
          section("checkpoint", name="mapping", pp_size=2)], again),
    Case("the supported ones are {}", "checkpoint", keys("checkpoint", architecture="Foo"),
         keys("checkpoint", architecture="LlamaForCausalLM")),
    Case("give it as a whole number", "checkpoint",
         section("checkpoint", name="mapping", tp_size="1"),
         section("checkpoint", name="mapping", tp_size=1)),
    Case("give {} as {}", "checkpoint", keys("checkpoint", hidden_size="64"),
         keys("checkpoint", hidden_size=64)),
    Case("give an int", "checkpoint", keys("checkpoint", _sliding_window_pattern="2"),
         keys("checkpoint", _sliding_window_pattern="ABSENT")),
    Case("add rotary_base and rotary_scaling to the checkpoint's config.json: rope_theta and"
         " rope_scaling of the model's own config.json (null where it has none)", "checkpoint",
         keys("checkpoint", producer={"name": "modelopt"}, rotary_base="ABSENT"),
         keys("checkpoint", rotary_base=10000.0, rotary_scaling=None)),
    Case("add sliding_window to the checkpoint's config.json, that of the model's own config.json"
         " (null where it has none)", "checkpoint",
         [put("gemma2", "checkpoint", converts=True), put("redrafter67", "drafter"),
          keys("checkpoint", sliding_window="ABSENT")],
         keys("checkpoint", sliding_window=4096)),
    Case("give a whole number", "checkpoint",
         [put("mixtral", "checkpoint", converts=True), put("redrafter67", "drafter"),
          section("checkpoint", name="moe", top_k="2")],
         section("checkpoint", name="moe", top_k=2)),
    Case("known are {} (softmax over all experts) and {} (over the chosen)", "checkpoint",
         [put("mixtral", "checkpoint", converts=True), put("redrafter67", "drafter"),
          section("checkpoint", name="moe", normalization_mode=7)],
         section("checkpoint", name="moe", normalization_mode=1)),
    Case("give one in float16, bfloat16 or float32: quantized experts are not supported yet",
         "checkpoint",
         [put("mixtral", "checkpoint", converts=True), put("redrafter67", "drafter"),
          section("checkpoint", name="quantization", quant_algo="FP8")],
         [put("mixtral", "checkpoint", converts=True)]),
    Case("remove it", "checkpoint",
         [put("qwen3_5", "checkpoint", converts=True), put("redrafter67", "drafter"),
          section("checkpoint", name="linear_attention", extra=1)],
         section("checkpoint", name="linear_attention", extra="ABSENT")),
]  # fmt: skip

GEMMA4 = [
    Case(hint, "llama", [make_gemma4, keys(**values)], None)
    for hint, values in (
        ("Gemma 4 is supported without biases", {"attention_bias": True}),
        ("layers of {} are supported as default, of {} as proportional", {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}}),
        ("models are supported whose layers of {} have heads of their own, all alike",
         {"per_layer_config": {"0": {"head_dim": 8}}}),
    )
]  # fmt: skip
GEMMA4 += [
    Case("use pp_size 1", "llama", [make_gemma4, flags(pp_size=2)], flags(pp_size=1)),
    Case("check the source model's config.json", "llama",
         [make_gemma4, keys(num_kv_shared_layers=9)], keys(num_kv_shared_layers=0)),
    Case("use a tp_size of {}", "llama", [make_gemma4, flags(tp_size=3)], flags(tp_size=2)),
]  # fmt: skip

FILES = [
    Case("check the path{}", "llama", flags(model_dir=Path("modle/")),
         flags(model_dir=Path("model"))),
    Case("give the folder that holds it", "llama", flags(model_dir=Path("model/config.json")),
         flags(model_dir=Path("model"))),
    Case("check that {} is the folder you mean", "llama", remove("model/config.json"), again),
    Case("correct or replace the file", "llama", write("model/config.json", "{"), again),
    Case("run `git lfs pull` in its folder, or download the file itself", "llama",
         write(f"model/{FILE}", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
         again),
    Case("put the file itself in its place", "llama",
         [remove(f"model/{FILE}"), lambda scene: scene[f"model/{FILE}"].mkdir()], again),
    Case("the file is truncated or damaged: copy or download it again", "llama",
         cut(f"model/{FILE}"), again),
    Case("finish the download (aria2c --continue), or remove {} if the file is whole", "llama",
         write(f"model/{FILE}.aria2", "x"), remove(f"model/{FILE}.aria2")),
    Case("specdec-convert --lora-dir {} merges it", "lora",
         [copy_in("adapter", "model"), flags(lora_dir=None)], flags(lora_dir=Path("model"))),
    Case("{}; for the weights alone move {} elsewhere", "lora",
         [copy_in("adapter", "model"), flags(lora_dir=None)],
         move("model/adapter_config.json", "elsewhere.json")),
    # ---- Drafters of an unknown kind.
    Case("keep one of them, or give it by the flag of its method: {}", "redrafter",
         tensors({"fc.weight": torch.ones(64, 128), "hidden_norm.weight": torch.ones(64)},
                 f"drafter/{FILE}"),
         tensors({"fc.weight": None, "hidden_norm.weight": None}, f"drafter/{FILE}")),
    Case("a drafter of each method has: {}", "redrafter",
         [write("drafter/config.json", "{}"),
          remove(f"drafter/{FILE}"), put_tensors(f"drafter/{FILE}", "unheard.of")], again),
    Case("give a drafter that has {}", "redrafter",
         tensors({"speculator.emb.0.weight": torch.ones(2, 2)}, f"drafter/{FILE}"), again),
    # ---- The output.
    Case("name a folder for the output", "llama",
         [write("out", "x"), flags(output_dir=Path("out"))], flags(output_dir=Path("other"))),
    Case("choose another folder for the output", "llama", flags(output_dir=Path("model")),
         flags(output_dir=Path("other"))),
    Case("choose another folder, or replace it with --force", "llama",
         [write("out/notes.txt", "x"), flags(output_dir=Path("out"))], flags(force=True)),
    Case("choose another folder", "llama",
         [copy_in("model", "out"), flags(output_dir=Path("out"))],
         flags(output_dir=Path("other"))),
    Case("choose another folder, or move away what is there; --force replaces no model and no work"
         " tree", "llama",
         [copy_in("model", "out"), flags(output_dir=Path("out"), force=True)],
         flags(output_dir=Path("other"))),
    Case("choose another folder, or check the permissions", "llama",
         [write("out", "x"), flags(output_dir=Path("out/inner"))], flags(output_dir=Path("other"))),
]  # fmt: skip

PARTS = ("part-00001-of-00002.gguf", "part-00002-of-00002.gguf")
GGUF = [
    Case("check the path", "gguf", write("model.gguf", b"no GGUF file"), again),
    Case("versions {} are read, in little-endian order", "gguf", patch("model.gguf", 4, b"\1"),
         patch("model.gguf", 4, b"\3")),
    Case("take a file of a whole model", "gguf", put_gguf(without="token_embd.weight"), again),
    Case("these are: {}", "gguf", put_gguf(architecture="mamba"), put_gguf()),
    Case("give that folder as specdec-convert's --mtp-assistant-model-dir; llama.cpp's converter"
         " leaves out the centroids of E2B's and E4B's", "gguf",
         put_gguf(architecture="gemma4-assistant"), put_gguf()),
    Case("give the Hugging Face folder that the drafter was published as", "mtp_assistant",
         [write("drafter.gguf", b"GGUF"), flags(mtp_assistant_model_dir=Path("drafter.gguf"))],
         flags(mtp_assistant_model_dir=Path("drafter"))),
    Case("take the model's own file; specdec-convert --lora-dir merges a LoRA adapter as PEFT"
         " writes it", "gguf", put_gguf(general__type="adapter"), again),
    Case("take the Hugging Face folder that it was made from", "gguf",
         put_gguf(llama__unheard__of=3), [put("llama", "model"), flags(model_dir=Path("model"))]),
    Case("take a file of these types: {}", "gguf", put_gguf(kind="TQ1_0"), put_gguf()),
    Case("give one of the files", "gguf",
         [lambda scene: scene["model"].mkdir(), copy_in("model.gguf", "model/a.gguf"),
          copy_in("model.gguf", "model/b.gguf"), flags(model_dir=Path("model"))],
         flags(model_dir=Path("model/a.gguf"))),
    Case("give the first: {}-00001-of-{}.gguf", "gguf",
         [put_gguf(name=PARTS[0], split__no=0, split__count=2),
          put_gguf(name=PARTS[1], split__no=1, split__count=2, without="all"),
          flags(model_dir=Path(PARTS[1]))], flags(model_dir=Path(PARTS[0]))),
    Case("finish the download of all of them into one folder", "gguf",
         [put_gguf(name=PARTS[0], split__no=0, split__count=2), flags(model_dir=Path(PARTS[0]))],
         put_gguf(name=PARTS[1], split__no=1, split__count=2, without="all")),
    Case("give the files the names that gguf-split gave them, NAME-00001-of-0000N.gguf", "gguf",
         [put_gguf(name=PARTS[0], split__no=1, split__count=2),
          put_gguf(name=PARTS[1], split__no=0, split__count=2, without="all"),
          flags(model_dir=Path(PARTS[0]))],
         [move(PARTS[0], "third"), move(PARTS[1], PARTS[0]), move("third", PARTS[1])]),
    Case("download all parts again", "gguf",
         [put_gguf(name=PARTS[0], split__no=0, split__count=2),
          put_gguf(name=PARTS[1], split__no=1, split__count=2), flags(model_dir=Path(PARTS[0]))],
         put_gguf(name=PARTS[1], split__no=1, split__count=2, without="all")),
]  # fmt: skip
