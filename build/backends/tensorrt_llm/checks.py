"""Checks before trtllm-build of what it bends in silence, and of engines that nothing would run.

Errors of trtllm-build itself are left to it, and `process` explains it.

Each function lists (fact, remedy) pairs, so that all of them are told at once.
"""

from __future__ import annotations

from specdec.checkpoint.config import CheckpointConfig
from specdec.checkpoint.inventory import compare_tensors, describe_rank
from specdec.engine.layout import count_positions
from specdec.errors import Problems, join_names
from specdec.files.tensor_file import TensorFile
from specdec.model.architectures import KEY
from specdec.model.experts import name_shared
from specdec.model.quantization import FLOAT8_STORAGE
from specdec.model.rotary_scaling import get_kind
from specdec.options import name_flag
from specdec.system.machine import Gpu
from specdec.trtllm.environment import MIN_CAPABILITY, MIN_CAPABILITY_FP8
from specdec.trtllm.facts import Facts
from specdec.trtllm.support import find_checkpoint_problems as find_loading_problems

from .plan import TensorRTPlan
from .record import deduce_max_seq_len

LOOKAHEAD, EXTERNAL, REDRAFTER = (
    "lookahead_decoding", "draft_tokens_external", "explicit_draft_tokens",
)  # fmt: skip
PLAIN_MODES = (EXTERNAL, LOOKAHEAD)  # of a checkpoint without a drafter


def find_checkpoint_problems(facts: Facts, checkpoint: CheckpointConfig) -> Problems:
    """List what of config.json the line does not read, or no engine of it can be run with."""
    raw, label = checkpoint.raw, facts.label
    problems = find_loading_problems(checkpoint, label) or Problems()
    experts, is_ours = checkpoint.model.experts, bool(raw.get(KEY))
    has_shared = experts is not None and bool(experts.shared_inner) and not is_ours
    shared_name = experts.shared_name if experts is not None and has_shared else None
    is_qwen = "qwen" in raw["architecture"].lower()
    problems += Problems.from_table(
        (shared_name not in (None, name_shared(label)),
         f"the checkpoint's shared experts are named {shared_name}, which TensorRT-LLM {label} does"
         " not read", f"convert it with --trtllm-version {label}"),
        (is_qwen and not raw.get("qwen_type") and not is_ours,
         f"the checkpoint is {raw['architecture']} and its config.json has no qwen_type, without"
         " which the engine cannot be run", "convert it again, or add qwen_type"),
        (raw.get("logits_dtype", "float32") not in ("float16", "float32"),
         f"logits_dtype is {raw.get('logits_dtype')!r}, the engine's reader takes float16 and"
         " float32", "give --logits-dtype float32"),
    )  # fmt: skip
    return problems


def find_mode_problems(
    checkpoint: CheckpointConfig, typed_mode: str | None, draft_len: int | None
) -> Problems:
    """List contradictions of speculation mode, draft length and checkpoint."""
    if checkpoint.drafter is None:
        return _find_plain_problems(typed_mode, draft_len)
    drafter, method = checkpoint.drafter, checkpoint.method
    return Problems.from_table(
        (typed_mode not in (None, checkpoint.mode),
         f"--speculative-decoding-mode {typed_mode} does not fit a {method and method.name}"
         f" checkpoint ({checkpoint.mode})", "leave the flag out"),
        (draft_len not in (None, drafter.max_draft_tokens),
         f"--max-draft-len {draft_len} contradicts the checkpoint: {drafter.draft_len_source}; the"
         " engine would take one number to build and another to run", "leave the flag out"),
    )  # fmt: skip


def _find_plain_problems(mode: str | None, draft_len: int | None) -> Problems:
    """List what makes an engine of a plain checkpoint that nothing drafts for, or none can run."""
    return Problems.from_table(
        (mode not in (None, *PLAIN_MODES),
         f"--speculative-decoding-mode {mode} needs a checkpoint with a drafter, this one is"
         " plain; trtllm-build would not notice",
         "convert the target with its drafter, or leave the flag out"),
        (mode in PLAIN_MODES and not draft_len,
         f"--speculative-decoding-mode {mode} with max_draft_len 0: trtllm-build would build it,"
         " and the run refuse it",
         "give --max-draft-len, for example 10" if mode == EXTERNAL else
         "give --max-draft-len, for lookahead's [W,N,G] exactly (W + G) (N - 1) - 1"),
        (mode is None and draft_len,
         f"--max-draft-len {draft_len} without a mode: the engine would get inputs for drafts that"
         " nothing fills", f"leave it out, or add --speculative-decoding-mode {EXTERNAL}"),
    )  # fmt: skip


def find_method_problems(build: TensorRTPlan) -> Problems:
    """List what a mode of speculation needs and lacks."""
    mode, model = build.mode, build.checkpoint.model
    paged = "use_paged_context_fmha"
    reason = build.record.reasons.get(paged, f"the line {build.label} has it off by default")
    return Problems.from_table(
        (mode == EXTERNAL and not build.record.is_on(paged),
         "draft_tokens_external without paged context FMHA: the KV cache's blocks cannot be"
         f" reused, and each step would compute the whole prompt again ({reason})",
         "give --use-paged-context-fmha enable, for the draft model's engine too"),
        (mode == REDRAFTER and model.vocab_size % model.tp_size,
         f"vocab_size={model.vocab_size} does not divide by tp_size={model.tp_size}: the runtime"
         " pads the drafts' logits, the engine does not",
         "convert with a tp_size that divides it"),
        (mode == "eagle" and build.given_flags.get(paged) == "disable",
         f"{name_flag(paged)} disable with EAGLE, which trtllm-build would turn on again",
         f"leave {name_flag(paged)} out"),
    )  # fmt: skip


def find_bent_flags(build: TensorRTPlan) -> Problems:
    """List typed flags that the engine would record otherwise."""
    return Problems(
        (f"{name_flag(name)} {build.given_flags[name]} would quietly become"
         f" {build.record.values[name]}: {reason}",
         f"leave {name_flag(name)} out, or give {name_flag(name)} {build.record.values[name]}")
        for name, reason in build.record.reasons.items()
        if name in build.given_flags and name != "max_seq_len"
    )  # fmt: skip


def find_length_problems(build: TensorRTPlan) -> Problems:
    """List lengths beyond what the model is for."""
    model, typed_len = build.checkpoint.model, build.given_flags.get("max_seq_len")
    positions, deduced_len = count_positions(model), deduce_max_seq_len(model, build.label)
    return Problems.from_table(
        (typed_len is not None and typed_len > positions,
         f"max_seq_len={typed_len} exceeds the model's {positions} positions",
         f"use --max-seq-len {positions} or less"),
        (typed_len is None and deduced_len > positions,
         f"without --max-seq-len trtllm-build takes {deduced_len}, the model has {positions}"
         " positions"
         f" (the line {build.label} multiplies by the factor of"
         f" {get_kind(model.rotary_scaling or {})!r} scaling)",
         f"give --max-seq-len {positions} or less"),
    )  # fmt: skip


def find_tensor_problems(checkpoint: CheckpointConfig, files: list[TensorFile]) -> Problems:
    """Compare every rank's tensors, and a drafter's type, with config.json."""
    problems = Problems()
    dtype = checkpoint.model.dtype
    for rank, file in enumerate(files):
        drafter_types = {
            info.dtype for name, info in file.tensors.items()
            if name.startswith(("drafter.", "medusa_heads.", "eagle_nets."))
            and info.dtype not in (dtype, *FLOAT8_STORAGE)
        }  # fmt: skip
        if drafter_types:
            problems.add(
                f"{file.path}: the drafter is {join_names(sorted(drafter_types))}, the model"
                f" {dtype}; an engine computes both in one type",
                f"convert the drafter with --dtype {dtype}",
            )
            continue
        expected = describe_rank(checkpoint, rank)
        for fault in compare_tensors(file.tensors, expected, checkpoint.quantization).list_faults():
            problems.add(
                f"{file.path} {fault}",
                "config.json and the tensors must come from one run: convert again",
            )
    return problems


def find_head_problems(
    facts: Facts, checkpoint: CheckpointConfig, files: list[TensorFile]
) -> Problems:
    """List a quantized checkpoint's output head that a line reads as what it is not."""
    quantization, head = checkpoint.quantization, "lm_head.weight"
    head_types = {file.tensors[head].dtype for file in files if head in file.tensors}
    if quantization.quant_algo is None or not head_types or facts.label == "0.14":
        return Problems()
    is_quantized = bool(head_types & set(FLOAT8_STORAGE))
    return Problems.from_table(
        (not is_quantized and quantization.exclude_modules == (),
         "quantization.exclude_modules is an empty list, which TensorRT-LLM"
         f" {facts.label} takes literally: it would read {head}, which is"
         f" {join_names(sorted(head_types))}, as {quantization.quant_algo}",
         'set it to null, which excludes the output head, or to ["lm_head"]'),
    )  # fmt: skip


def find_gpu_problems(build: TensorRTPlan, gpus: tuple[Gpu, ...]) -> Problems:
    """List what of the visible GPUs an engine would be built for that they cannot run."""
    if not gpus:
        return Problems()
    gpu, quantization = gpus[0], build.checkpoint.quantization
    is_fp8 = "FP8" in (quantization.quant_algo, quantization.kv_cache_quant_algo)
    capability = MIN_CAPABILITY_FP8 if is_fp8 else MIN_CAPABILITY
    feature = "FP8" if is_fp8 else "TensorRT-LLM's speculation"
    workers = build.given_flags.get("workers", 1)
    return Problems.from_table(
        (gpu.capability < capability,
         f"{gpu.name} has compute capability {gpu.compute_capability},"
         f" {feature} needs {capability[0]}.{capability[1]}",
         f"build on a newer GPU{', or from an unquantized checkpoint' if is_fp8 else ''}"),
        (workers > len(gpus),
         f"--workers {workers} with {len(gpus)} GPU(s), to which it would be cut",
         f"use --workers {len(gpus)} or fewer"),
    )  # fmt: skip
