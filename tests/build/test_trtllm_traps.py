"""Each trap of trtllm-build that is known: what it refuses late or bends quietly is found first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specdec.build.backends.tensorrt_llm.pipeline import choose_facts, make_plan
from specdec.build.backends.tensorrt_llm.plan import TensorRTPlan
from specdec.build.backends.tensorrt_llm.record import predict_record
from specdec.build.settings import BuildSettings
from specdec.checkpoint.config import read_checkpoint_config
from specdec.command.settings import UnknownOption
from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.system.machine import Gpu
from specdec.trtllm.environment import Environment
from specdec.trtllm.facts import load_facts
from tests.conftest import make_drafter, make_eagle_drafter, make_llama
from tests.engines import call
from tests.families import make_family_model
from tests.trtllm.checkpoints import CheckpointStore, quantize_checkpoint
from tests.trtllm.double import H100

A100 = Gpu(name="NVIDIA A100", compute_capability="8.0", memory_bytes=40 << 30)
T4 = Gpu(name="Tesla T4", compute_capability="7.5", memory_bytes=16 << 30)
EXTERNAL: dict[str, Any] = {"speculative_decoding_mode": "draft_tokens_external"}
PAGED = "without paged context FMHA"
BECOMES = "--use-{}-context-fmha enable would quietly become disable"


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
        unknown_options={
            name: UnknownOption(words=tuple(text.split())) for name, text in (others or {}).items()
        },
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


Row = tuple[str, dict[str, Any], str, str]


def row(kind: str, match: str, hint: str = "", **options: Any) -> Row:
    """A refused build of a checkpoint, such as "redrafter 0.14" or "plain 1.2 x2", with options."""
    return kind, options, match, hint


REFUSED: list[Row] = [
    # Modes and draft lengths. trtllm-build builds what the run refuses, or what nothing fills.
    *(row("plain", f"--speculative-decoding-mode {mode} with max_draft_len 0",
          "give --max-draft-len", speculative_decoding_mode=mode, use_paged_context_fmha=True)
      for mode in ("draft_tokens_external", "lookahead_decoding")),
    row("plain", "--max-draft-len 10 without a mode", max_draft_len=10),
    *(row("plain", f"{mode} needs a checkpoint with a drafter", speculative_decoding_mode=mode)
      for mode in ("explicit_draft_tokens", "medusa", "eagle")),
    row("redrafter", "medusa does not fit a redrafter checkpoint",
        speculative_decoding_mode="medusa"),
    row("medusa", "--max-draft-len 7 contradicts the checkpoint", max_draft_len=7),
    row("redrafter", "--max-draft-len 7 contradicts the checkpoint", max_draft_len=7),
    row("eagle", "--use-paged-context-fmha disable with EAGLE", use_paged_context_fmha=False),
    row("plain", "--max-beam-width 4", "--max-beam-width 1", max_beam_width=4),
    row("redrafter", "--max-beam-width 4", "--max-beam-width 1", max_beam_width=4),
    # Lengths that it rewrites.
    row("redrafter", r"--max-num-tokens 100 would quietly become 208: .*max_batch_size=16 x"
        r" \(max_draft_len=12 \+ 1\)", "208", max_num_tokens=100, max_batch_size=16),
    row("plain", "--max-num-tokens 8192 would quietly become 2048", max_num_tokens=8192,
        max_batch_size=4),
    row("plain 0.14", "--max-num-tokens 16 would quietly become 64: it is raised to tokens_per_bl",
        max_num_tokens=16),
    row("plain", "--max-input-len 400 would quietly become 300", max_input_len=400,
        max_seq_len=300),
    row("plain", "max_seq_len=513 exceeds the model's 512 positions", max_seq_len=513),
    # Attention, caches, logits.
    row("plain 0.14", f"draft_tokens_external {PAGED}", max_draft_len=10, **EXTERNAL),
    row("plain", f"draft_tokens_external {PAGED}", max_draft_len=10,
        use_paged_context_fmha=False, **EXTERNAL),
    row("plain", f"{PAGED}: .*it needs context_fmha", others={"context_fmha": "disable"},
        max_draft_len=4, **EXTERNAL),
    *(row(kind, "does not go with speculation", "--gather-generation-logits", others={switch: ""})
      for kind in ("redrafter", "medusa")
      for switch in ("gather_context_logits", "gather_all_token_logits")),
    row("redrafter", "no in-flight batching", kv_cache_type="continuous"),
    row("redrafter", "no in-flight batching", others={"remove_input_padding": "disable"}),
    row("redrafter", "no in-flight batching", others={"gpt_attention_plugin": "disable"}),
    row("plain", BECOMES.format("fp8"), use_fp8_context_fmha=True),
    row("plain 0.14", BECOMES.format("fp8"), use_fp8_context_fmha=True),
    # Fusions that do not apply are dropped.
    *(row(kind, f"--{flag.replace('_', '-')} enable would quietly become disable",
          others={flag: "enable"})
      for flag, kind in (("reduce_fusion", "redrafter"), ("reduce_fusion", "plain"),
                         ("user_buffer", "plain"), ("norm_quant_fusion", "plain"))),
    # Flags without effect, or against each other.
    *(row("plain", match, others=others) for others, match in (
        ({"opt_num_tokens": "9999"}, "--opt-num-tokens 9999 would quietly become"),
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
    )),
    *(row("plain 0.14", match, others=others) for others, match in (
        ({"cluster_key": "H100-SXM"}, "--cluster-key without --auto-parallel"),
        ({"auto_parallel": "2"}, "--auto-parallel 2: the checkpoint decides"),
        ({"lookup_plugin": "auto"}, "--lookup-plugin is for models with prompt"),
    )),
    # Parts for quantized weights.
    *(row("plain", f"--gemm-plugin {name} for .* is not quantized", "--gemm-plugin float32",
          gemm_plugin=name) for name in ("fp8", "nvfp4")),
    *(row("plain", match, hint, others={name: value}) for name, value, match, hint in (
        ("low_latency_gemm_plugin", "fp8", "is not quantized: it is for FP8", "leave"),
        ("fp8_rowwise_gemm_plugin", "auto", "it is for FP8_PER_CHANNEL_PER_TOKEN", "leave"),
        ("fuse_fp4_quant", "enable", "it is for NVFP4", "leave"),
    )),
    row("plain", "--input-timing-cache .*absent.cache does not exist", gpus=(H100,),
        others={"input_timing_cache": "absent.cache"}),
    row("plain", "--quantization int8 is of the torch", "--quantization fp8", quantization="int8"),
    # The checkpoint against the line.
    row("redrafter 0.14 for 1.2", "1.2 has no ReDrafterForCausalLM",
        "--trtllm-version 1.2, or build it for 0.14"),
    row("redrafter 1.2 for 0.14", "0.14 has no ReDrafterForLLaMALM"),
    # The machine.
    row("redrafter", "Tesla T4 has compute capability 7.5", gpus=(T4,)),
    row("plain 1.2 x2", "--workers 2 with 1 GPU", gpus=(H100,), workers=2),
    row("plain 1.2 x2", r"--workers 3 for 2 rank\(s\)", workers=3),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "options", "match", "hint"), REFUSED)
def test_what_is_refused(
    store: CheckpointStore, kind: str, options: dict[str, Any], match: str, hint: str
) -> None:
    name, label, *more = (kind if " " in kind else f"{kind} 1.2").split()
    ranks = 2 if more == ["x2"] else 1
    wanted = more[1] if more[:1] == ["for"] else label
    expect(match, store.get(name, label, ranks), wanted, hint=hint, **options)


def test_what_is_taken(store: CheckpointStore) -> None:
    """The counterparts of some of these."""
    plain, redrafter, two = (
        store.get("plain"),
        store.get("redrafter"),
        store.get("plain", tp_size=2),
    )
    for checkpoint, own in ((store.get("medusa"), 63), (redrafter, 12)):
        assert plan(checkpoint, max_draft_len=own).record.values["max_draft_len"] == own
    assert plan(redrafter, max_num_tokens=208, max_batch_size=16)
    assert plan(plain, max_draft_len=10, **EXTERNAL), "1.x has paged context FMHA on"
    for switch in ("gather_context_logits", "gather_all_token_logits"):
        assert plan(plain, others={switch: ""})
    found = plan(plain, others={"context_fmha": "disable"})
    assert found.record.values["use_paged_context_fmha"] == "disable"
    found = plan(two, others={"reduce_fusion": "enable"})
    assert found.make_argv(Path("c"), Path("e"))[-2:] == ["--reduce_fusion", "enable"]
    assert plan(plain, others={"input_timing_cache": "absent.cache"}), "another machine may have it"
    assert plan(redrafter, gpus=(A100,))
    assert plan(two, gpus=(H100, H100), workers=2)
    # 2 x 2 layers x 4 heads x 16 x 4 bytes a token.
    assert plan(plain, max_seq_len=100).kv_cache_bytes == 1024 * 100


def test_eagle_3_is_not_in_the_engines(store: CheckpointStore, tmp_path: Path) -> None:
    drafter = make_eagle_drafter(tmp_path, version=3)
    call("convert", "--model-dir", store.target, "--eagle-model-dir", drafter, "--output-dir",
         tmp_path / "ckpt")  # fmt: skip
    expect("TensorRT-LLM 1.2 has no EAGLE-3", tmp_path / "ckpt", hint="--backend torch")


def test_defects_of_releases_are_told(store: CheckpointStore, tmp_path: Path) -> None:
    """Only the text shows ReDrafter's (issue 3125) and lookahead's (issue 2263)."""
    told = [note for note in plan(store.get("redrafter", "0.14"), "0.14").notes if "3125" in note]
    assert len(told) == 1
    assert "with 3 beams" in told[0]
    single = store.copy(tmp_path / "ckpt", "redrafter", "0.14", redrafter_num_beams=1)
    for checkpoint, label in ((single, "0.14"), (store.get("redrafter"), "1.2")):
        assert not any("3125" in note for note in plan(checkpoint, label).notes)
    window: dict[str, Any] = {
        "speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 11,
    }  # fmt: skip
    for label in ("0.14", "1.2"):
        notes = plan(store.get("plain", label), label, **window).notes
        assert any("issue 2263" in note for note in notes) == (label == "0.14")


def test_lengths_that_are_rewritten_are_told(store: CheckpointStore) -> None:
    found = plan(store.get("plain"), max_seq_len=300, max_draft_len=10, **EXTERNAL)
    assert found.record.values["max_seq_len"] == 310
    assert any("max_seq_len 310 = 300 + max_draft_len 10" in note for note in found.notes)
    argv = found.make_argv(Path("c"), Path("e"))
    assert argv[argv.index("--max_seq_len") + 1] == "300", "the command has the number before"
    found = plan(store.get("eagle"), max_seq_len=200)
    assert found.record.values["max_seq_len"] == 200 + 63 + 4
    assert "200 + max_draft_len 63 + num_eagle_layers 4" in found.notes[0]
    found = plan(store.get("medusa"), max_seq_len=40, max_batch_size=4)
    assert found.record.values["max_num_tokens"] == 4 * 64, "cut to 160, raised to 4 x (63 + 1)"


@pytest.mark.parametrize(("label", "kind"), [("0.14", "llama3"), ("1.2", "yarn")])
def test_deduced_max_seq_len_takes_the_rotary_factor_twice(
    store: CheckpointStore, tmp_path: Path, label: str, kind: str
) -> None:
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    checkpoint = store.copy(tmp_path / "ckpt", "plain", label, rotary_scaling=scaling)
    expect("trtllm-build takes 4096, the model has 512", checkpoint, label)
    assert plan(checkpoint, label, max_seq_len=512).record.values["max_seq_len"] == 512


def test_use_logits_needs_gathered_generation_logits(store: CheckpointStore) -> None:
    without = plan(store.get("plain"), max_draft_len=4, **EXTERNAL)
    assert any("--use-logits needs it" in note for note in without.notes)
    gathers = {"gather_generation_logits": ""}
    given = plan(store.get("plain"), max_draft_len=4, others=gathers, **EXTERNAL)
    assert "--gather_generation_logits" in given.make_argv(Path("c"), Path("e"))
    assert any("deprecated" in note for note in given.notes)


def make_fp8(
    store: CheckpointStore, folder: Path, kind: str = "redrafter", label: str = "1.2", *,
    with_cache: bool = False, names: tuple[str, ...] = (), excluded: list[str] | None = None,
) -> Path:  # fmt: skip
    """A checkpoint quantized to FP8; excluded: modules that are not, other than usual."""
    checkpoint = store.copy(folder, kind, label)
    quantize_checkpoint(checkpoint, with_cache=with_cache, names=names)
    if excluded is not None:
        config = read_json(checkpoint / "config.json")
        config["quantization"]["exclude_modules"] = excluded
        write_json(checkpoint / "config.json", config)
    return checkpoint


def test_fp8_attention_and_the_fp8_cache(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = make_fp8(store, tmp_path / "ckpt")
    expect("become disable: with paged context FMHA it needs an FP8 KV cache", checkpoint,
           use_fp8_context_fmha=True)  # fmt: skip
    quiet = plan(checkpoint)
    assert quiet.record.values["use_fp8_context_fmha"] == "disable"
    assert any("use_fp8_context_fmha disable" in note for note in quiet.notes)
    argv = plan(checkpoint, gemm_plugin="fp8").make_argv(Path("c"), Path("e"))
    assert argv[-2:] == ["--gemm_plugin", "fp8"], "the drafter keeps the model's type"
    expect("compute capability 8.0, FP8 needs 8.9", checkpoint, gpus=(A100,))
    assert plan(checkpoint, gpus=(H100,))
    with_cache = make_fp8(store, tmp_path / "cache", with_cache=True)
    assert plan(with_cache, use_fp8_context_fmha=True, gemm_plugin="fp8", gpus=(H100,))
    expect("--use-fp8-context-fmha disable would quietly become enable", with_cache,
           use_fp8_context_fmha=False)  # fmt: skip
    old = make_fp8(store, tmp_path / "old", "plain", "0.14", with_cache=True)
    found = plan(old, "0.14", use_paged_context_fmha=True)
    assert found.record.values["use_fp8_context_fmha"] == "enable"
    assert any("use_fp8_context_fmha enable" in note for note in found.notes)
    assert plan(old, "0.14").record.values["use_fp8_context_fmha"] == "disable"


def test_modules_that_are_excluded_and_output_heads(store: CheckpointStore, tmp_path: Path) -> None:
    excluded = ["*lm_head", "*vocab_embedding", "drafter.layers*", "drafter.rnn*"]
    expect("drafter.input_proj is float32, config.json says FP8",
           make_fp8(store, tmp_path / "drafter", excluded=excluded))  # fmt: skip
    for label in ("1.2", "0.14"):
        literal = make_fp8(store, tmp_path / f"none-{label}", "plain", label, excluded=[])
        head = make_fp8(
            store, tmp_path / f"head-{label}", "plain", label, names=("lm_head.weight",)
        )
        if label == "1.2":
            expect("exclude_modules is an empty list, .* lm_head.weight, which is float32", literal,
                   hint="set it to null")  # fmt: skip
            assert plan(head)
        else:
            assert plan(literal, label), "0.14 takes its default list"
            assert plan(head, label), "it asserts the head's type itself"


def rewrite(checkpoint: Path, change: dict[str, TensorInfo | None]) -> Path:
    """Change the types of a checkpoint's tensors, or leave some out."""
    path = checkpoint / "rank0.safetensors"
    file = TensorFile(path)
    infos = {name: change.get(name, info) for name, info in file.tensors.items()}
    kept = {name: info for name, info in infos.items() if info is not None}
    write_tensor_file(
        path.with_name("new"), kept,
        lambda n: file.read(n).astype("uint16") if kept[n].dtype == "bfloat16" else file.read(n),
    )  # fmt: skip
    path.with_name("new").replace(path)
    return checkpoint


def test_tensors_that_lack_or_are_of_another_type(store: CheckpointStore, tmp_path: Path) -> None:
    for label in ("1.2", "0.14"):
        shared = rewrite(store.copy(tmp_path / label, "plain", label), {"lm_head.weight": None})
        if label == "1.2":
            assert plan(shared, label), "a head that is left out is shared by 1.x alone"
        else:
            expect("lacks lm_head.weight", shared, label)
    checkpoint = store.copy(tmp_path / "drafter", "redrafter")
    tensors = TensorFile(checkpoint / "rank0.safetensors").tensors.items()
    rewrite(checkpoint, {
        name: TensorInfo("bfloat16", info.shape) for name, info in tensors if "drafter." in name
    })  # fmt: skip
    expect("the drafter is bfloat16, the model float32", checkpoint, hint="--dtype float32")
    checkpoint = store.copy(tmp_path / "ckpt", "plain")
    expect("lacks transformer.ln_f.weight", rewrite(checkpoint, {"transformer.ln_f.weight": None}))
    (checkpoint / "rank0.safetensors").unlink()
    expect("lacks rank0.safetensors", checkpoint)


def copy_quantized(
    store: CheckpointStore, folder: Path, label: str = "1.2", **algorithms: str
) -> Path:
    """A plain checkpoint whose config.json names other algorithms; its tensors stay."""
    quantization = read_json(store.get("plain", label) / "config.json")["quantization"]
    return store.copy(folder, "plain", label, quantization={**quantization, **algorithms})


@pytest.mark.parametrize(
    ("cache", "reason"),
    [("FP8", "needs FP8 weights too"), ("INT8", "INT8 KV cache")],
)
def test_paged_attention_with_a_quantized_cache(
    store: CheckpointStore, tmp_path: Path, cache: str, reason: str
) -> None:
    """1.x turns it off without an error; 0.14 raises by itself."""
    checkpoint = copy_quantized(store, tmp_path / "new", kv_cache_quant_algo=cache)
    expect(f"{BECOMES.format('paged')}: .*{reason}", checkpoint, use_paged_context_fmha=True)
    expect(f"{PAGED}: .*{reason}", checkpoint, max_draft_len=4, **EXTERNAL)


def test_quantization_turns_the_fused_mlp_off_in_0_14(
    store: CheckpointStore, tmp_path: Path
) -> None:
    for label, value in (("0.14", "disable"), ("1.2", "enable")):
        folder = copy_quantized(store, tmp_path / label, label, quant_algo="W8A16")
        checkpoint, given = read_checkpoint_config(folder), {"max_batch_size": 8}
        record = predict_record(load_facts(label), checkpoint, None, given, None)
        assert record.values["use_fused_mlp"] == value


@pytest.mark.parametrize(
    ("label", "name", "words", "match", "hint"),
    [
        ("1.2", "enable_xqa", "enable", "has --enable-xqa", "only the line 0.14 has it"),
        ("0.14", "dora_plugin", "enable", "has --dora-plugin", "only the line 1.2 has it"),
        ("1.2", "builder_force_num_profiles", "1", "has --builder", "BUILDER_FORCE_NUM_PROFILES"),
        ("1.2", "max_output_len", "1", "has --max-output-len", "--max-seq-len"),
        ("1.2", "tp_size", "2", "has --tp-size", "specdec-convert --tp-size"),
        ("1.2", "contxt_fmha", "enable", r"did you mean context-fmha\?", "check the name"),
        ("1.2", "tokens_per_block", "x", "expected a whole number, got 'x'", "whole number"),
        ("1.2", "tokens_per_block", "", "takes one value", "one value"),
        ("1.2", "fast_build", "enable", "takes no value", "alone"),
        ("1.2", "build_config", "x.json", "replaces every other flag", "leave it out"),
        ("1.2", "paged_kv_cache", "enable", "deprecated: give --kv-cache-type", "leave it out"),
        ("1.2", "max_decoder_seq_len", "64", "another name of --max-seq-len", "--max-seq-len"),
        ("0.14", "visualize_network", "dir", "takes no value", "alone"),
    ],
)
def test_flag_that_the_line_does_not_take(
    store: CheckpointStore, label: str, name: str, words: str, match: str, hint: str
) -> None:
    error = expect(match, store.get("plain", label), label, others={name: words}, hint=hint)
    assert isinstance(error, UsageError)


def test_a_mixture_of_one_line_does_not_load_in_the_other(tmp_path: Path) -> None:
    """The shared expert's name differs, and neither line reads the other's."""
    target = make_family_model(tmp_path, "qwen2_moe")
    for version, other in (("1.2", "0.14"), ("0.14", "1.2")):
        checkpoint = tmp_path / version
        call("convert", "--model-dir", target, "--output-dir", checkpoint,
             "--trtllm-version", version)  # fmt: skip
        assert plan(checkpoint, version)
        expect("shared experts are named", checkpoint, other, hint=f"--trtllm-version {other}")


def test_what_the_engine_or_its_reader_cannot_take(store: CheckpointStore, tmp_path: Path) -> None:
    qwen = store.copy(tmp_path / "qwen", "redrafter", architecture="ReDrafterForQWenLM",
                      base_model_architecture="LlamaForCausalLM")  # fmt: skip
    expect("has no qwen_type", qwen)
    logits = store.copy(tmp_path / "logits", "plain", logits_dtype="bfloat16")
    expect("logits_dtype is 'bfloat16'", logits)
    target = make_llama(tmp_path, kv_heads=4, vocab=127)
    drafter = make_drafter(tmp_path, vocab=127, exit_dim=96)
    call("convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
         tmp_path / "ckpt", "--tp-size", 2)  # fmt: skip
    expect("vocab_size=127 does not divide by tp_size=2", tmp_path / "ckpt")


def test_every_problem_is_told_at_once(store: CheckpointStore) -> None:
    error = expect(
        "^4 problems: ", store.get("plain"), max_beam_width=2, gemm_plugin="fp8",
        max_seq_len=600, max_draft_len=3,
    )  # fmt: skip
    assert error.hint.count("(4)") == 1
