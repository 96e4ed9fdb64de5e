"""Checks before trtllm-build of what it, the engine's reader or the run refuse or bend.

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
from specdec.trtllm.lacks import find_lack, find_layout_problems

from .plan import TensorRTPlan
from .record import deduce_max_seq_len

LOOKAHEAD, EXTERNAL, REDRAFTER = (
    "lookahead_decoding", "draft_tokens_external", "explicit_draft_tokens",
)  # fmt: skip
PLAIN_MODES = (EXTERNAL, LOOKAHEAD)  # of a checkpoint without a drafter
MAX_EAGLE_BATCH, MAX_EAGLE_DRAFT = 512, 256
NO_INTEGER_GPUS = ((10, 0), (12, 0))  # from, before: no INT8, INT4 or SmoothQuant


def find_checkpoint_problems(facts: Facts, checkpoint: CheckpointConfig) -> Problems:
    """List the keys of config.json that the line's loader refuses."""
    raw, label = checkpoint.raw, facts.label
    architecture = raw["architecture"]
    lack = find_lack(label, raw, checkpoint.model.architecture)
    problems = Problems() if lack is None else Problems([lack])
    again = f"convert it with --trtllm-version {label}"
    for section, known in (
        ("mapping", facts.mapping_keys), ("quantization", facts.quantization_keys),
        ("moe", facts.moe_keys),
    ):  # fmt: skip
        if unknown := sorted(set(raw.get(section) or {}) - set(known) - {"rank"}):
            problems.add(
                f"the checkpoint's {section} has {join_names(unknown)}, which the loader of"
                f" TensorRT-LLM {label} fails on",
                again,
            )
    experts = checkpoint.model.experts
    has_shared = experts is not None and bool(experts.shared_inner) and not raw.get(KEY)
    if experts is not None and has_shared and experts.shared_name != name_shared(label):
        problems.add(
            f"the checkpoint's shared experts are named {experts.shared_name}, which TensorRT-LLM"
            f" {label} does not read",
            again,
        )
    problems += find_layout_problems(label, checkpoint.quantization, checkpoint.model)
    problems += Problems.from_table(
        ("qwen" in architecture.lower() and not raw.get("qwen_type") and not raw.get(KEY),
         f"the checkpoint is {architecture} and its config.json has no qwen_type, without which"
         " the engine cannot be run", "convert it again, or add qwen_type"),
        (raw.get("logits_dtype", "float32") not in ("float16", "float32"),
         f"logits_dtype is {raw.get('logits_dtype')!r}, the engine's reader takes float16 and"
         " float32", "give --logits-dtype float32"),
    )  # fmt: skip
    return problems


def find_mode_problems(
    facts: Facts, checkpoint: CheckpointConfig, wanted: str | None, draft_len: int | None
) -> Problems:
    """List contradictions of speculation mode, draft length and checkpoint."""
    drafter, own, method = checkpoint.drafter, checkpoint.mode, checkpoint.method
    mode = own or wanted
    return Problems.from_table(
        (method is not None and wanted not in (None, own),
         f"--speculative-decoding-mode {wanted} does not fit a {method and method.name} checkpoint"
         f" ({own})", "leave the flag out"),
        (own is None and wanted not in (None, *PLAIN_MODES),
         f"--speculative-decoding-mode {wanted} needs a checkpoint with a drafter, this one is"
         " plain; trtllm-build would not notice",
         "convert the target with its drafter, or leave the flag out"),
        (mode is not None and mode not in facts.modes,
         f"TensorRT-LLM {facts.label} has no mode {mode}",
         "its modes are " + ", ".join(name for name in facts.modes if name != "none")),
        (drafter is not None and draft_len not in (None, drafter.max_draft_tokens),
         f"--max-draft-len {draft_len} contradicts the checkpoint:"
         f" {drafter and drafter.draft_len_source}; the engine would take one number to build and"
         " another to run", "leave the flag out"),
        (drafter is None and mode in PLAIN_MODES and not draft_len,
         f"--speculative-decoding-mode {mode} with max_draft_len 0: trtllm-build would build it,"
         " and the run refuse it",
         "give --max-draft-len, for example 10" if mode == EXTERNAL else
         "give --max-draft-len, for lookahead's [W,N,G] exactly (W + G) (N - 1) - 1"),
        (drafter is None and mode is None and draft_len,
         f"--max-draft-len {draft_len} without a mode: the engine would get inputs for drafts that"
         " nothing fills", f"leave it out, or add --speculative-decoding-mode {EXTERNAL}"),
    )  # fmt: skip


def find_method_problems(build: TensorRTPlan) -> Problems:
    """List what a mode of speculation needs and lacks."""
    values, given, mode = build.record.values, build.given, build.mode
    model = build.checkpoint.model
    paged = "use_paged_context_fmha"
    why = build.record.reasons.get(paged, f"the line {build.label} has it off by default")
    return Problems.from_table(
        (mode == EXTERNAL and not build.record.is_on(paged),
         "draft_tokens_external without paged context FMHA: the KV cache's blocks cannot be"
         f" reused, and each step would compute the whole prompt again ({why})",
         "give --use-paged-context-fmha enable, for the draft model's engine too"),
        (mode == REDRAFTER and model.vocab_size % model.tp_size,
         f"vocab_size={model.vocab_size} does not divide by tp_size={model.tp_size}: the runtime"
         " pads the drafts' logits, the engine does not",
         "convert with a tp_size that divides it"),
        *((mode == "eagle" and values[name] > limit,
           f"{name}={values[name]} with EAGLE", f"use {name_flag(name)} {limit} or less")
          for name, limit in (("max_batch_size", MAX_EAGLE_BATCH),
                              ("max_draft_len", MAX_EAGLE_DRAFT))),
        (mode == "eagle" and given.get(paged) == "disable",
         f"{name_flag(paged)} disable with EAGLE, which trtllm-build would turn on again",
         f"leave {name_flag(paged)} out"),
    )  # fmt: skip


def find_quantization_problems(build: TensorRTPlan) -> Problems:
    """List combinations of quantization and attention that 0.14 refuses; 1.x bends them instead."""
    quantization = build.checkpoint.quantization
    algorithm, cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    if build.label != "0.14" or not build.record.is_on("use_paged_context_fmha"):
        return Problems()
    return Problems.from_table(
        (cache == "FP8" and algorithm != "FP8",
         "paged context FMHA with an FP8 KV cache needs FP8 weights, these are"
         f" {algorithm or 'not quantized'}",
         "quantize the weights too, or leave the KV cache unquantized"),
        (cache == "INT8",
         "paged context FMHA does not work with an INT8 KV cache",
         "leave --use-paged-context-fmha out, or quantize the cache to FP8"),
    )  # fmt: skip


def find_bent(build: TensorRTPlan) -> Problems:
    """Typed flags that the engine would record otherwise."""
    return Problems(
        (f"{name_flag(name)} {build.given[name]} would quietly become {build.record.values[name]}:"
         f" {reason}",
         f"leave {name_flag(name)} out, or give {name_flag(name)} {build.record.values[name]}")
        for name, reason in build.record.reasons.items()
        if name in build.given and name != "max_seq_len"
    )  # fmt: skip


def find_length_problems(build: TensorRTPlan) -> Problems:
    """Lengths beyond what the model is for."""
    model, asked = build.checkpoint.model, build.given.get("max_seq_len")
    positions, deduced = count_positions(model), deduce_max_seq_len(model, build.label)
    return Problems.from_table(
        (asked is not None and asked > positions,
         f"max_seq_len={asked} exceeds the model's {positions} positions",
         f"use --max-seq-len {positions} or less"),
        (asked is None and deduced > positions,
         f"without --max-seq-len trtllm-build takes {deduced}, the model has {positions} positions"
         f" (the line {build.label} multiplies by the factor of"
         f" {get_kind(model.rotary_scaling or {})!r} scaling)",
         f"give --max-seq-len {positions} or less"),
    )  # fmt: skip


def find_tensor_problems(checkpoint: CheckpointConfig, files: list[TensorFile]) -> Problems:
    """Compare every rank's tensors, and a drafter's type, with config.json."""
    problems = Problems()
    dtype = checkpoint.model.dtype
    for rank, file in enumerate(files):
        drafter = {
            info.dtype for name, info in file.tensors.items()
            if name.startswith(("drafter.", "medusa_heads.", "eagle_nets."))
            and info.dtype not in (dtype, *FLOAT8_STORAGE)
        }  # fmt: skip
        if drafter:
            problems.add(
                f"{file.path}: the drafter is {join_names(sorted(drafter))}, the model {dtype};"
                " an engine computes both in one type",
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
    """List the forms of an FP8 checkpoint's output head that a line misreads."""
    quantization, head = checkpoint.quantization, "lm_head.weight"
    stored = {file.tensors[head].dtype for file in files if head in file.tensors}
    if quantization.quant_algo is None or not stored:
        return Problems()
    is_quantized, is_old = bool(stored & set(FLOAT8_STORAGE)), facts.label == "0.14"
    found = join_names(sorted(stored))
    return Problems.from_table(
        (is_quantized and is_old,
         f"{head} is {found}: TensorRT-LLM 0.14 takes it in the model's type alone,"
         f" {checkpoint.model.dtype}", "quantize without the output head, or build for 1.2"),
        (not is_quantized and not is_old and quantization.exclude_modules == (),
         "quantization.exclude_modules is an empty list, which TensorRT-LLM"
         f" {facts.label} takes literally: it would read {head}, which is {found}, as"
         f" {quantization.quant_algo}",
         'set it to null, which excludes the output head, or to ["lm_head"]'),
    )  # fmt: skip


def find_gpu_problems(build: TensorRTPlan, gpus: tuple[Gpu, ...], rank_bytes: int) -> Problems:
    """Return whether the GPUs that are here can build the engine."""
    if not gpus:
        return Problems().add(
            "no GPU is visible, and trtllm-build needs one",
            "build where nvidia-smi lists a GPU; --dry-run and --emit-script need none",
        )
    gpu, algorithm = gpus[0], build.checkpoint.quantization.quant_algo
    cache = build.checkpoint.quantization.kv_cache_quant_algo
    is_fp8 = "FP8" in (algorithm, cache)
    needed = MIN_CAPABILITY_FP8 if is_fp8 else MIN_CAPABILITY
    what = "FP8" if is_fp8 else "TensorRT-LLM's speculation"
    integers = [a for a in (algorithm, cache) if a and ("W8A" in a or "W4A16" in a or a == "INT8")]
    first, end = NO_INTEGER_GPUS
    workers = build.given.get("workers", 1)
    return Problems.from_table(
        (gpu.capability < needed,
         f"{gpu.name} has compute capability {gpu.compute_capability},"
         f" {what} needs {needed[0]}.{needed[1]}",
         f"build on a newer GPU{', or from an unquantized checkpoint' if is_fp8 else ''}"),
        (build.label != "0.14" and integers and first <= gpu.capability < end,
         f"{''.join(integers[:1])} is not supported on {gpu.name} (compute capability"
         f" {gpu.compute_capability})", "use FP8, or another GPU"),
        (workers > len(gpus),
         f"--workers {workers} with {len(gpus)} GPU(s), to which it would be cut",
         f"use --workers {len(gpus)} or fewer"),
        (0 < gpu.memory_bytes < rank_bytes,
         f"a rank's weights are {rank_bytes / 1e9:.1f} GB, {gpu.name} has"
         f" {gpu.memory_bytes / 1e9:.1f} GB", "convert with a larger --tp-size, or quantize"),
    )  # fmt: skip
