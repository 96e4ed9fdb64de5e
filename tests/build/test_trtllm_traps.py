"""Each trap of trtllm-build that is known: what it refuses late or bends quietly is found first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdec.build.backends.tensorrt_llm.plan import TensorRTPlan, choose_facts, make_plan
from specdec.build.backends.tensorrt_llm.record import predict_record
from specdec.build.settings import BuildSettings
from specdec.command.settings import Other
from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.model.checkpoint import read_checkpoint_config
from specdec.trtllm.environment import Environment, Gpu
from specdec.trtllm.facts import load_facts
from tests.conftest import make_drafter, make_eagle_drafter, make_llama
from tests.engines import call
from tests.families import make_family_model
from tests.trtllm.checkpoints import CheckpointStore, quantize_checkpoint
from tests.trtllm.double import H100

A100 = Gpu(name="NVIDIA A100", compute_capability="8.0", memory_bytes=40 << 30)
T4 = Gpu(name="Tesla T4", compute_capability="7.5", memory_bytes=16 << 30)
B200 = Gpu(name="NVIDIA B200", compute_capability="10.0", memory_bytes=192 << 30)
EXTERNAL: dict[str, Any] = {"speculative_decoding_mode": "draft_tokens_external"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return CheckpointStore(tmp_path_factory.mktemp("traps"))


def plan(
    checkpoint: Path, label: str = "1.2", *, gpus: tuple[Gpu, ...] | None = None,
    others: dict[str, str] | None = None, **settings: Any,
) -> TensorRTPlan:  # fmt: skip
    """Check a build; with `gpus`, as on a machine that has these."""
    chosen = BuildSettings(
        checkpoint_dir=checkpoint, output_dir=checkpoint.parent / "engine", trtllm_version=label,
        others={name: Other(words=tuple(text.split())) for name, text in (others or {}).items()},
        **settings,
    )  # fmt: skip
    here = None if gpus is None else Environment(tensorrt_llm=f"{label}.0", gpus=gpus)
    facts = choose_facts(chosen, here or Environment(), builds=here is not None)
    return make_plan(chosen, facts, read_checkpoint_config(checkpoint), here)


def expect(match: str, *args: Any, hint: str = "", **options: Any) -> SpecDecError:
    with pytest.raises(SpecDecError) as caught:
        plan(*args, **options)
    assert re.search(match, caught.value.message), caught.value.message
    assert hint in caught.value.hint
    return caught.value


# Modes and draft lengths


@pytest.mark.parametrize("mode", ["draft_tokens_external", "lookahead_decoding"])
def test_max_draft_len_0_builds_and_is_refused_by_the_run(
    store: CheckpointStore, mode: str
) -> None:
    expect(
        f"--speculative-decoding-mode {mode} with max_draft_len 0", store.get("plain"),
        speculative_decoding_mode=mode, use_paged_context_fmha=True, hint="give --max-draft-len",
    )  # fmt: skip


def test_max_draft_len_without_a_mode_makes_inputs_that_nothing_fills(
    store: CheckpointStore,
) -> None:
    expect("--max-draft-len 10 without a mode", store.get("plain"), max_draft_len=10)


@pytest.mark.parametrize("mode", ["explicit_draft_tokens", "medusa", "eagle"])
def test_drafter_mode_for_a_plain_checkpoint_is_not_refused_by_trtllm_build(
    store: CheckpointStore, mode: str
) -> None:
    expect(f"{mode} needs a checkpoint with a drafter", store.get("plain"),
           speculative_decoding_mode=mode)  # fmt: skip


def test_other_mode_than_the_checkpoints(store: CheckpointStore) -> None:
    expect("medusa does not fit a redrafter checkpoint", store.get("redrafter"),
           speculative_decoding_mode="medusa")  # fmt: skip


@pytest.mark.parametrize("label", ["1.2", "0.14"])
def test_medusa_must_be_named_in_1_x_and_is_forced_in_0_14(
    store: CheckpointStore, label: str
) -> None:
    argv = plan(store.get("medusa", label), label).make_argv(Path("c"), Path("e"))
    assert argv[argv.index("--speculative_decoding_mode") + 1] == "medusa"


@pytest.mark.parametrize("kind", ["medusa", "redrafter"])
def test_max_draft_len_of_a_drafter_is_overwritten_or_left_inconsistent(
    store: CheckpointStore, kind: str
) -> None:
    expect("--max-draft-len 7 contradicts the checkpoint", store.get(kind), max_draft_len=7)
    own = {"medusa": 63, "redrafter": 12}[kind]
    assert plan(store.get(kind), max_draft_len=own).record.values["max_draft_len"] == own


def test_0_14_has_no_eagle(store: CheckpointStore) -> None:
    expect(
        "TensorRT-LLM 0.14 has no mode eagle", store.get("plain", "0.14"), "0.14",
        speculative_decoding_mode="eagle", hint="medusa",
    )  # fmt: skip


def test_eagle_3_is_not_in_the_engines(store: CheckpointStore, tmp_path: Path) -> None:
    drafter = make_eagle_drafter(tmp_path, version=3)
    call("convert", "--model-dir", store.target, "--eagle-model-dir", drafter, "--output-dir",
         tmp_path / "ckpt")  # fmt: skip
    expect("TensorRT-LLM 1.2 has no EAGLE-3", tmp_path / "ckpt", hint="--backend torch")


def test_eagle_has_limits_of_its_own(store: CheckpointStore, tmp_path: Path) -> None:
    expect("max_batch_size=513 with EAGLE", store.get("eagle"), max_batch_size=513)
    deep = store.copy(tmp_path / "ckpt", "eagle", max_draft_len=257)
    expect("max_draft_len=257 with EAGLE", deep)
    expect("--use-paged-context-fmha disable with EAGLE", store.get("eagle"),
           use_paged_context_fmha=False)  # fmt: skip


def test_max_seq_len_of_eagle_grows_by_its_layers_again(store: CheckpointStore) -> None:
    found = plan(store.get("eagle"), max_seq_len=200)
    assert found.record.values["max_seq_len"] == 200 + 63 + 4
    assert "200 + max_draft_len 63 + num_eagle_layers 4" in found.notes[0]


def test_beam_width_must_be_1(store: CheckpointStore) -> None:
    for kind in ("plain", "redrafter"):
        expect("--max-beam-width 4", store.get(kind), max_beam_width=4, hint="--max-beam-width 1")


def test_redrafter_before_0_19_accepts_by_unnormalized_probabilities(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """Nothing shows it but the text: issue 3125 of TensorRT-LLM, fixed by pull request 3278."""
    told = [note for note in plan(store.get("redrafter", "0.14"), "0.14").notes if "3125" in note]
    assert len(told) == 1
    assert "with 3 beams" in told[0]
    single = store.copy(tmp_path / "ckpt", "redrafter", "0.14", redrafter_num_beams=1)
    for checkpoint, label in ((single, "0.14"), (store.get("redrafter"), "1.2")):
        assert not any("3125" in note for note in plan(checkpoint, label).notes)


def test_lookahead_before_1_0_is_wrong_from_the_second_call_on(store: CheckpointStore) -> None:
    for label in ("0.14", "1.2"):
        found = plan(
            store.get("plain", label), label, speculative_decoding_mode="lookahead_decoding",
            max_draft_len=11,
        )  # fmt: skip
        assert any("issue 2263" in note for note in found.notes) == (label == "0.14")


# Lengths that are rewritten


def test_max_seq_len_is_raised_by_the_drafts_and_it_is_said(store: CheckpointStore) -> None:
    found = plan(store.get("plain"), max_seq_len=300, max_draft_len=10, **EXTERNAL)
    assert found.record.values["max_seq_len"] == 310
    assert any("max_seq_len 310 = 300 + max_draft_len 10" in note for note in found.notes)
    argv = found.make_argv(Path("c"), Path("e"))
    assert argv[argv.index("--max_seq_len") + 1] == "300", "the command has the number before"


def test_max_num_tokens_below_tree_times_batch_is_raised(store: CheckpointStore) -> None:
    expect(
        r"--max-num-tokens 100 would quietly become 208: .*max_batch_size=16 x"
        r" \(max_draft_len=12 \+ 1\)", store.get("redrafter"), max_num_tokens=100,
        max_batch_size=16, hint="208",
    )  # fmt: skip
    assert plan(store.get("redrafter"), max_num_tokens=208, max_batch_size=16)


def test_max_num_tokens_is_cut_before_it_is_raised(store: CheckpointStore) -> None:
    found = plan(store.get("medusa"), max_seq_len=40, max_batch_size=4)
    assert found.record.values["max_num_tokens"] == 4 * 64, "cut to 160, raised to 4 x (63 + 1)"
    expect("--max-num-tokens 8192 would quietly become 2048", store.get("plain"),
           max_num_tokens=8192, max_batch_size=4)  # fmt: skip


def test_max_num_tokens_below_a_block_is_raised(store: CheckpointStore) -> None:
    expect("--max-num-tokens 16 would quietly become 64: it is raised to tokens_per_block",
           store.get("plain", "0.14"), "0.14", max_num_tokens=16)  # fmt: skip


def test_max_input_len_beyond_max_seq_len_is_cut(store: CheckpointStore) -> None:
    expect("--max-input-len 400 would quietly become 300", store.get("plain"), max_input_len=400,
           max_seq_len=300)  # fmt: skip


def test_max_seq_len_beyond_the_positions_is_only_warned_of(store: CheckpointStore) -> None:
    expect("max_seq_len=513 exceeds the model's 512 positions", store.get("plain"),
           max_seq_len=513)  # fmt: skip


@pytest.mark.parametrize(
    ("label", "kind", "taken"), [("0.14", "llama3", 4096), ("1.2", "yarn", 4096)]
)
def test_deduced_max_seq_len_takes_the_rotary_factor_twice(
    store: CheckpointStore, tmp_path: Path, label: str, kind: str, taken: int
) -> None:
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    checkpoint = store.copy(tmp_path / "ckpt", "plain", label, rotary_scaling=scaling)
    expect(f"trtllm-build takes {taken}, the model has 512", checkpoint, label)
    assert plan(checkpoint, label, max_seq_len=512).record.values["max_seq_len"] == 512


# Attention, caches, logits


def test_external_drafts_need_paged_context_fmha_for_block_reuse(store: CheckpointStore) -> None:
    needed = "draft_tokens_external without paged context FMHA"
    expect(needed, store.get("plain", "0.14"), "0.14", max_draft_len=10, **EXTERNAL)
    expect(needed, store.get("plain"), max_draft_len=10, use_paged_context_fmha=False, **EXTERNAL)
    assert plan(store.get("plain"), max_draft_len=10, **EXTERNAL), "1.x has it on"


@pytest.mark.parametrize("switch", ["gather_context_logits", "gather_all_token_logits"])
def test_context_logits_with_drafts_of_the_checkpoint_are_not_caught(
    store: CheckpointStore, switch: str
) -> None:
    for kind in ("redrafter", "medusa"):
        expect("does not go with speculation", store.get(kind), others={switch: ""},
               hint="--gather-generation-logits")  # fmt: skip
    assert plan(store.get("plain"), others={switch: ""})


def test_use_logits_needs_gathered_generation_logits(store: CheckpointStore) -> None:
    without = plan(store.get("plain"), max_draft_len=4, **EXTERNAL)
    assert any("--use-logits needs it" in note for note in without.notes)
    given = plan(
        store.get("plain"), max_draft_len=4, others={"gather_generation_logits": ""}, **EXTERNAL
    )
    assert "--gather_generation_logits" in given.make_argv(Path("c"), Path("e"))
    assert any("deprecated" in note for note in given.notes)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("kv_cache_type", "continuous"),
        ("remove_input_padding", "disable"),
        ("gpt_attention_plugin", "disable"),
    ],
)
def test_engine_without_in_flight_batching_falls_back_to_the_python_session(
    store: CheckpointStore, flag: str, value: str
) -> None:
    options: dict[str, Any] = {"others": {flag: value}}
    if flag == "kv_cache_type":
        options = {flag: value}
    expect("no in-flight batching", store.get("redrafter"), **options)


def test_fp8_attention_of_weights_that_are_not_is_turned_off(store: CheckpointStore) -> None:
    for label in ("1.2", "0.14"):
        expect("--use-fp8-context-fmha enable would quietly become disable",
               store.get("plain", label), label, use_fp8_context_fmha=True)  # fmt: skip


def test_fp8_attention_without_fp8_kv_cache_is_turned_off(
    store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "redrafter")
    quantize_checkpoint(checkpoint, with_cache=False)
    expect("become disable: with paged context FMHA it needs an FP8 KV cache", checkpoint,
           use_fp8_context_fmha=True)  # fmt: skip
    quiet = plan(checkpoint)
    assert quiet.record.values["use_fp8_context_fmha"] == "disable"
    assert any("use_fp8_context_fmha disable" in note for note in quiet.notes)
    with_cache = store.copy(tmp_path / "cache", "redrafter")
    quantize_checkpoint(with_cache, with_cache=True)
    assert plan(with_cache, use_fp8_context_fmha=True, gemm_plugin="fp8", gpus=(H100,))
    expect("--use-fp8-context-fmha disable would quietly become enable", with_cache,
           use_fp8_context_fmha=False)  # fmt: skip


def test_fp8_base_with_a_drafter_of_the_models_type(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "redrafter")
    quantize_checkpoint(checkpoint, with_cache=False)
    argv = plan(checkpoint, gemm_plugin="fp8").make_argv(Path("c"), Path("e"))
    assert argv[-2:] == ["--gemm_plugin", "fp8"]


def test_drafter_that_exclude_modules_leaves_out_would_be_built_as_fp8(
    store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "redrafter")
    quantize_checkpoint(checkpoint, with_cache=False)
    config = read_json(checkpoint / "config.json")
    config["quantization"]["exclude_modules"] = [
        "*lm_head", "*vocab_embedding", "drafter.layers*", "drafter.rnn*"
    ]  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps(config))
    expect("drafter.input_proj is float32, config.json says FP8", checkpoint)


@pytest.mark.parametrize(("label", "is_refused"), [("1.2", True), ("0.14", False)])
def test_empty_exclude_modules_quantize_the_output_head_in_1_x(
    store: CheckpointStore, tmp_path: Path, label: str, is_refused: bool
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "plain", label)
    quantize_checkpoint(checkpoint, with_cache=False)
    config = read_json(checkpoint / "config.json")
    config["quantization"]["exclude_modules"] = []
    (checkpoint / "config.json").write_text(json.dumps(config))
    if is_refused:
        expect("exclude_modules is an empty list, .* lm_head.weight, which is float32", checkpoint,
               label, hint="set it to null")  # fmt: skip
    else:
        assert plan(checkpoint, label), "0.14 takes its default list"


@pytest.mark.parametrize(("label", "is_refused"), [("1.2", False), ("0.14", True)])
def test_quantized_output_head_is_refused_by_0_14(
    store: CheckpointStore, tmp_path: Path, label: str, is_refused: bool
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "plain", label)
    quantize_checkpoint(checkpoint, with_cache=False, names=["lm_head.weight"])
    if is_refused:
        expect("0.14 takes it in the model's type alone, float32", checkpoint, label)
    else:
        assert plan(checkpoint, label)


def test_head_left_out_is_shared_by_1_x_alone(store: CheckpointStore, tmp_path: Path) -> None:
    for label in ("1.2", "0.14"):
        checkpoint = store.copy(tmp_path / label, "plain", label)
        file = TensorFile(checkpoint / "rank0.safetensors")
        kept = {n: i for n, i in file.tensors.items() if n != "lm_head.weight"}
        write_tensor_file(checkpoint / "new", kept, file.read)
        (checkpoint / "new").replace(checkpoint / "rank0.safetensors")
        if label == "1.2":
            assert plan(checkpoint, label)
        else:
            expect("lacks lm_head.weight", checkpoint, label)


@pytest.mark.parametrize(("cache", "match"), [("FP8", "needs FP8 weights"), ("INT8", "INT8 KV")])
def test_paged_attention_with_a_quantized_cache_raises_in_0_14(
    store: CheckpointStore, tmp_path: Path, cache: str, match: str
) -> None:
    quantization = read_json(store.get("plain", "0.14") / "config.json")["quantization"]
    checkpoint = store.copy(
        tmp_path / "ckpt", "plain", "0.14",
        quantization={**quantization, "kv_cache_quant_algo": cache},
    )  # fmt: skip
    expect(match, checkpoint, "0.14", use_paged_context_fmha=True)


def test_paged_attention_with_a_quantized_cache_is_turned_off_in_1_x(
    store: CheckpointStore, tmp_path: Path
) -> None:
    quantization = read_json(store.get("plain") / "config.json")["quantization"]
    for cache, reason in (("INT8", "INT8 KV cache"), ("FP8", "needs FP8 weights too")):
        checkpoint = store.copy(
            tmp_path / cache, "plain", quantization={**quantization, "kv_cache_quant_algo": cache}
        )
        expect(f"--use-paged-context-fmha enable would quietly become disable: .*{reason}",
               checkpoint, use_paged_context_fmha=True)  # fmt: skip
        expect(f"without paged context FMHA: .*{reason}", checkpoint, max_draft_len=4, **EXTERNAL)


def test_paged_attention_with_an_fp8_cache_turns_fp8_attention_on_in_0_14(
    store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "plain", "0.14")
    quantize_checkpoint(checkpoint, with_cache=True)
    found = plan(checkpoint, "0.14", use_paged_context_fmha=True)
    assert found.record.values["use_fp8_context_fmha"] == "enable"
    assert any("use_fp8_context_fmha enable" in note for note in found.notes)
    assert plan(checkpoint, "0.14").record.values["use_fp8_context_fmha"] == "disable"


def test_attention_without_context_fmha_loses_paged_context_too(store: CheckpointStore) -> None:
    others = {"context_fmha": "disable"}
    found = plan(store.get("plain"), others=others)
    assert found.record.values["use_paged_context_fmha"] == "disable"
    expect("without paged context FMHA: .*it needs context_fmha", store.get("plain"),
           others=others, max_draft_len=4, **EXTERNAL)  # fmt: skip


def test_quantization_turns_the_fused_mlp_off_in_0_14(
    store: CheckpointStore, tmp_path: Path
) -> None:
    quantization = read_json(store.get("plain", "0.14") / "config.json")["quantization"]
    changed = {**quantization, "quant_algo": "W8A16"}
    for label, value in (("0.14", "disable"), ("1.2", "enable")):
        checkpoint = store.copy(tmp_path / label, "plain", label, quantization=changed)
        facts = load_facts(label)
        record = predict_record(
            facts, read_checkpoint_config(checkpoint), None, {"max_batch_size": 8}, None
        )
        assert record.values["use_fused_mlp"] == value


@pytest.mark.parametrize(
    ("flag", "value", "kind"),
    [("reduce_fusion", "enable", "redrafter"), ("reduce_fusion", "enable", "plain"),
     ("user_buffer", "enable", "plain"), ("norm_quant_fusion", "enable", "plain")],
)  # fmt: skip
def test_fusion_that_does_not_apply_is_dropped(
    store: CheckpointStore, flag: str, value: str, kind: str
) -> None:
    shown = "--" + flag.replace("_", "-")
    expect(f"{shown} enable would quietly become disable", store.get(kind), others={flag: value})


def test_fusion_that_applies_is_passed_on(store: CheckpointStore) -> None:
    found = plan(store.get("plain", tp_size=2), others={"reduce_fusion": "enable"})
    assert found.make_argv(Path("c"), Path("e"))[-2:] == ["--reduce_fusion", "enable"]


@pytest.mark.parametrize(
    ("others", "match"),
    [
        ({"multiple_profiles": "enable", "opt_num_tokens": "64"}, "exclude each other"),
        ({"opt_num_tokens": "9999"}, "--opt-num-tokens 9999 would quietly become"),
        ({"streamingllm": "enable"}, "--streamingllm enable"),
        ({"pp_reduce_scatter": "enable"}, "for Mixtral alone"),
        ({"max_lora_rank": "8"}, "--max-lora-rank without --lora-plugin has no effect"),
        ({"lora_dir": "a b"}, "--lora-dir without --lora-plugin has no effect"),
        ({"gemm_swiglu_plugin": "fp8", "use_fused_mlp": "disable"}, "needs the fused MLP"),
        ({"dora_plugin": "enable"}, "--dora-plugin without --lora-plugin has no effect"),
        ({"moe_plugin": "auto"}, "--moe-plugin is for models with a mixture of experts"),
        ({"mamba_conv1d_plugin": "auto"}, "is for models with Mamba"),
        ({"bert_attention_plugin": "auto"}, "is for models with an encoder"),
        ({"max_encoder_input_len": "9"}, "is for models with an encoder and a decoder"),
        ({"gemm_allreduce_plugin": "float16"}, "--gemm-allreduce-plugin adds up what several"),
        ({"tokens_per_block": "48"}, "--tokens-per-block 48: the kernels take powers of two"),
        ({"tokens_per_block": "0"}, "--tokens-per-block 0"),
        ({"opt_num_tokens": "0"}, "--opt-num-tokens 0"),
        ({"max_prompt_embedding_table_size": "-4"}, "table-size -4"),
    ],
)
def test_flags_without_effect_or_against_each_other(
    store: CheckpointStore, others: dict[str, str], match: str
) -> None:
    expect(match, store.get("plain"), others=others)


def test_flags_of_0_14_that_do_nothing_or_split_the_model_again(store: CheckpointStore) -> None:
    checkpoint = store.get("plain", "0.14")
    expect("--cluster-key without --auto-parallel", checkpoint, "0.14",
           others={"cluster_key": "H100-SXM"})  # fmt: skip
    expect("--auto-parallel 2: the checkpoint decides", checkpoint, "0.14",
           others={"auto_parallel": "2"})  # fmt: skip
    expect("--lookup-plugin is for models with prompt", checkpoint, "0.14",
           others={"lookup_plugin": "auto"})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("gemm_plugin", "float16", "--gemm-plugin float16 for a float32"),
        ("gemm_plugin", "fp8", "--gemm-plugin fp8 for .* is not quantized"),
        ("gemm_plugin", "nvfp4", "--gemm-plugin nvfp4 for .* is not quantized"),
        ("gpt_attention_plugin", "bfloat16", "--gpt-attention-plugin bfloat16 for a float32"),
        ("nccl_plugin", "float16", "--nccl-plugin float16 for a float32"),
        ("low_latency_gemm_plugin", "fp8", "is not quantized: it is for FP8"),
        ("fp8_rowwise_gemm_plugin", "auto", "it is for FP8_PER_CHANNEL_PER_TOKEN"),
        ("fuse_fp4_quant", "enable", "it is for NVFP4"),
    ],
)
def test_plugin_of_another_type_than_the_checkpoint(
    store: CheckpointStore, name: str, value: str, match: str
) -> None:
    options: dict[str, Any] = {"others": {name: value}}
    hint = "leave" if name not in ("gpt_attention_plugin", "nccl_plugin") else "float32 or auto"
    if name == "gemm_plugin":
        options, hint = {name: value}, "--gemm-plugin float32"
    expect(match, store.get("plain"), hint=hint, **options)


def test_files_to_be_read_must_be_there(store: CheckpointStore) -> None:
    others = {"input_timing_cache": "absent.cache"}
    expect("--input-timing-cache .*absent.cache does not exist", store.get("plain"), gpus=(H100,),
           others=others)  # fmt: skip
    assert plan(store.get("plain"), others=others), "another machine may have it"


# Flags of the lines


@pytest.mark.parametrize(
    ("label", "name", "words", "match", "hint"),
    [
        ("1.2", "enable_xqa", "enable", "has --enable-xqa", "only the line 0.14 has it"),
        ("0.14", "dora_plugin", "enable", "has --dora-plugin", "only the line 1.2 has it"),
        ("1.2", "builder_force_num_profiles", "1", "has --builder", "BUILDER_FORCE_NUM_PROFILES"),
        ("1.2", "max_output_len", "1", "has --max-output-len", "--max-seq-len"),
        ("1.2", "tp_size", "2", "has --tp-size", "specdec-convert --tp-size"),
        ("1.2", "contxt_fmha", "enable", r"did you mean context-fmha\?", "check the name"),
        ("1.2", "context_fmha", "yes", "'yes' is not one of enable, disable", "choose"),
        ("1.2", "tokens_per_block", "x", "expected a whole number, got 'x'", "whole number"),
        ("1.2", "tokens_per_block", "", "takes one value", "one value"),
        ("1.2", "fast_build", "enable", "takes no value", "alone"),
        ("1.2", "logits_dtype", "bfloat16", "not one of float16, float32", "choose"),
        ("1.2", "build_config", "x.json", "replaces every other flag", "leave it out"),
        ("1.2", "paged_kv_cache", "enable", "deprecated: give --kv-cache-type", "leave it out"),
        ("1.2", "max_decoder_seq_len", "64", "another name of --max-seq-len", "--max-seq-len"),
        ("0.14", "visualize_network", "dir", "takes no value", "alone"),
        ("0.14", "low_latency_gemm_plugin", "fp16", "not one of fp8, disable", "choose"),
    ],
)
def test_flag_that_the_line_does_not_take(
    store: CheckpointStore, label: str, name: str, words: str, match: str, hint: str
) -> None:
    error = expect(match, store.get("plain", label), label, others={name: words}, hint=hint)
    assert isinstance(error, UsageError)


def test_gemm_plugin_nvfp4_is_of_1_x_alone(store: CheckpointStore) -> None:
    expect("'nvfp4' is not one of", store.get("plain", "0.14"), "0.14", gemm_plugin="nvfp4")


# The checkpoint against the line


def test_old_redrafter_name_is_gone_in_1_x(store: CheckpointStore) -> None:
    expect("1.2 has no ReDrafterForCausalLM", store.get("redrafter", "0.14"),
           hint="--trtllm-version 1.2, or build it for 0.14")  # fmt: skip
    expect("0.14 has no ReDrafterForLLaMALM", store.get("redrafter"), "0.14")


@pytest.mark.parametrize(
    ("section", "key"), [("mapping", "cp_config"), ("quantization", "use_meta_recipe")]
)
def test_checkpoint_written_by_1_x_does_not_load_in_0_14(
    store: CheckpointStore, tmp_path: Path, section: str, key: str
) -> None:
    values = read_json(store.get("plain") / "config.json")[section]
    changed: dict[str, Any] = {section: {**values, key: None}}
    checkpoint = store.copy(tmp_path / "ckpt", "plain", **changed)
    assert plan(checkpoint)
    expect(f"the checkpoint's {section} has {key}", checkpoint, "0.14")


def test_a_mixture_of_one_line_does_not_load_in_the_other(tmp_path: Path) -> None:
    """Each makes an object of `moe` and knows its own keys; the shared expert's name differs."""
    target = make_family_model(tmp_path, "qwen2_moe")
    for version, other in (("1.2", "0.14"), ("0.14", "1.2")):
        checkpoint = tmp_path / version
        call("convert", "--model-dir", target, "--output-dir", checkpoint,
             "--trtllm-version", version)  # fmt: skip
        assert plan(checkpoint, version)
        error = expect("shared experts are named", checkpoint, other,
                       hint=f"--trtllm-version {other}")  # fmt: skip
        told = "the checkpoint's moe has moe_intermediate_size, num_shared_experts"
        assert (told in error.message) == (other == "1.2")


def test_qwen_engine_without_qwen_type_cannot_be_run(
    store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "redrafter", architecture="ReDrafterForQWenLM",
                            base_model_architecture="LlamaForCausalLM")  # fmt: skip
    expect("has no qwen_type", checkpoint)


def test_logits_dtype_that_the_engines_reader_does_not_take(
    store: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "plain", logits_dtype="bfloat16")
    expect("logits_dtype is 'bfloat16'", checkpoint)


def test_vocabulary_that_does_not_divide_by_tp(store: CheckpointStore, tmp_path: Path) -> None:
    target = make_llama(tmp_path, kv_heads=4, vocab=127)
    drafter = make_drafter(tmp_path, vocab=127, exit_dim=96)
    call("convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
         tmp_path / "ckpt", "--tp-size", 2)  # fmt: skip
    expect("vocab_size=127 does not divide by tp_size=2", tmp_path / "ckpt")


def test_drafter_of_another_type_than_the_model(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "redrafter")
    path = checkpoint / "rank0.safetensors"
    file = TensorFile(path)
    tensors = {
        name: TensorInfo("bfloat16", info.shape) if name.startswith("drafter.") else info
        for name, info in file.tensors.items()
    }
    write_tensor_file(
        path.with_name("new"), tensors,
        lambda n: file.read(n).astype("uint16") if n.startswith("drafter.") else file.read(n),
    )  # fmt: skip
    path.with_name("new").replace(path)
    expect("the drafter is bfloat16, the model float32", checkpoint, hint="--dtype float32")


def test_missing_rank_and_missing_tensor(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = store.copy(tmp_path / "ckpt", "plain")
    file = TensorFile(checkpoint / "rank0.safetensors")
    kept = {n: i for n, i in file.tensors.items() if n != "transformer.ln_f.weight"}
    write_tensor_file(checkpoint / "new", kept, file.read)
    (checkpoint / "new").replace(checkpoint / "rank0.safetensors")
    expect("lacks transformer.ln_f.weight", checkpoint)
    (checkpoint / "rank0.safetensors").unlink()
    expect("lacks rank0.safetensors", checkpoint)


# The machine


def test_compute_capability_8_0_and_8_9_for_fp8(store: CheckpointStore, tmp_path: Path) -> None:
    expect("Tesla T4 has compute capability 7.5", store.get("redrafter"), gpus=(T4,))
    assert plan(store.get("redrafter"), gpus=(A100,))
    checkpoint = store.copy(tmp_path / "ckpt", "redrafter")
    quantize_checkpoint(checkpoint, with_cache=False)
    expect("compute capability 8.0, FP8 needs 8.9", checkpoint, gpus=(A100,))
    assert plan(checkpoint, gpus=(H100,))


def test_integer_quantization_is_refused_on_blackwell_by_1_x(
    store: CheckpointStore, tmp_path: Path
) -> None:
    quantization = read_json(store.get("plain") / "config.json")["quantization"]
    checkpoint = store.copy(
        tmp_path / "ckpt", "plain", quantization={**quantization, "kv_cache_quant_algo": "INT8"}
    )
    expect("INT8 is not supported on NVIDIA B200", checkpoint, gpus=(B200,))


def test_no_gpu_makes_workers_0_and_the_build_fail(store: CheckpointStore) -> None:
    expect("no GPU is visible", store.get("plain"), gpus=(), hint="--dry-run")


def test_workers_are_cut_to_the_gpus(store: CheckpointStore) -> None:
    expect("--workers 2 with 1 GPU", store.get("plain", tp_size=2), gpus=(H100,), workers=2)
    expect(r"--workers 3 for 2 rank\(s\)", store.get("plain", tp_size=2), workers=3)
    assert plan(store.get("plain", tp_size=2), gpus=(H100, H100), workers=2)


def test_weights_and_one_sequence_must_fit_the_gpu(store: CheckpointStore) -> None:
    small = Gpu(name="toy", compute_capability="9.0", memory_bytes=500_000)
    expect("toy has 0.0 GB", store.get("plain"), gpus=(small,), hint="--tp-size")
    # 2 x 2 layers x 4 heads x 16 x 4 bytes a token.
    assert plan(store.get("plain"), max_seq_len=100).kv_cache_bytes == 1024 * 100


def test_every_problem_is_told_at_once(store: CheckpointStore) -> None:
    error = expect(
        "^4 problems: ", store.get("plain"), max_beam_width=2, gemm_plugin="float16",
        max_seq_len=600, max_draft_len=3,
    )  # fmt: skip
    assert error.hint.count("(4)") == 1


def test_optimize_is_of_the_torch_backend(store: CheckpointStore) -> None:
    expect("--optimize native has no meaning", store.get("plain"), optimize="native")


def test_int8_is_of_the_torch_backend(store: CheckpointStore) -> None:
    error = expect("--quantization int8 is of the torch", store.get("plain"), quantization="int8")
    assert "--quantization fp8" in error.hint
