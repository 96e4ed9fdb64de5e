"""A checked build for TensorRT-LLM: its command, what the engine will record, what it takes."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.tensor_file import DTYPES, TensorFile, TensorInfo
from specdec.methods import find_mode
from specdec.model.checkpoint import CheckpointConfig
from specdec.model.config import ModelConfig
from specdec.model.inventory import find_rank_files
from specdec.trtllm.environment import BUILD_COMMAND, Environment
from specdec.trtllm.facts import DEFAULT_LABEL, Facts, find_label, load_facts
from specdec.trtllm.lacks import list_defects

from ...settings import BuildSettings
from . import checks
from .flags import collect_flags, find_flag_problems, find_path_problems, list_words
from .record import Record, predict_record

# Recorded by the engine and worth telling, as an answer to "what did it make of my flags".
TOLD = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len",
    "max_beam_width", "speculative_decoding_mode", "gemm_plugin", "tokens_per_block",
    "use_paged_context_fmha", "use_fp8_context_fmha", "gather_generation_logits",
)  # fmt: skip
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}  # lines reach the log as they are printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRTPlan:
    """A build. given: the flags that were typed; record: what comes of it.

    files: the checkpoint's, one a rank. notes: what the user should know although nothing is wrong.
    """

    facts: Facts
    checkpoint: CheckpointConfig
    checkpoint_dir: Path
    output_dir: Path
    mode: str | None
    given: dict[str, Any]
    record: Record
    files: list[TensorFile]
    notes: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=lambda: dict(ENVIRONMENT))

    @property
    def label(self) -> str:
        return self.facts.label

    @property
    def num_ranks(self) -> int:
        return self.checkpoint.model.tp_size * self.checkpoint.model.pp_size

    @property
    def gpus_per_node(self) -> int:
        count = (self.checkpoint.raw.get("mapping") or {}).get("gpus_per_node", 8)
        return count if isinstance(count, int) and count > 0 else 8

    @property
    def method(self) -> str:
        method = self.checkpoint.method or find_mode(self.mode)
        return method.name if method is not None else "plain"

    @property
    def weights_bytes(self) -> list[int]:
        return [sum(info.num_bytes for info in file.tensors.values()) for file in self.files]

    @property
    def kv_cache_bytes(self) -> int:
        """One sequence of max_seq_len tokens, on one rank."""
        model, cache = self.checkpoint.model, self.checkpoint.quantization.kv_cache_quant_algo
        dtype = "uint8" if cache in ("FP8", "INT8") else model.dtype
        return count_cache_bytes(model, dtype) * int(self.record.values["max_seq_len"])

    def make_argv(self, checkpoint_dir: Path, output_dir: Path) -> list[str]:
        """Return trtllm-build's command line for these folders."""
        mode = ["--speculative_decoding_mode", self.mode] if self.mode else []
        return [
            BUILD_COMMAND, "--checkpoint_dir", str(checkpoint_dir), "--output_dir", str(output_dir),
            *mode, *list_words(self.given),
        ]  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return what `--dry-run` and `--json` report."""
        argv = self.make_argv(self.checkpoint_dir, self.output_dir)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        shell = " ".join([*variables, shlex.join(argv)])
        return {
            "engine_dir": str(self.output_dir), "method": self.method, "backend": "tensorrt-llm",
            "trtllm_version": self.label, "tp_size": self.checkpoint.model.tp_size,
            "pp_size": self.checkpoint.model.pp_size,
            "commands": [{"argv": argv, "shell": shell, "env": dict(self.environment)}],
            "engine_records": {name: self.record.values[name] for name in TOLD},
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes_per_sequence": self.kv_cache_bytes, "notes": list(self.notes),
        }  # fmt: skip


def count_cache_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the KV cache that one token takes on one rank."""
    assert dtype in DTYPES
    shape = (2, model.num_hidden_layers // model.pp_size, model.get_num_kv_heads(), model.head_size)
    return TensorInfo(dtype, shape).num_bytes


def choose_facts(settings: BuildSettings, here: Environment, *, builds: bool) -> Facts:
    """Return the line that the command is for: as stated, as installed, or 1.2."""
    stated, installed = settings.trtllm_version, here.tensorrt_llm
    if installed is not None and (builds or stated is None):
        label = find_label(installed)
        if stated not in (None, label):
            raise SpecDecError(
                f"--trtllm-version {stated}, but TensorRT-LLM {installed} is installed here",
                "leave the flag out, or add --dry-run or --emit-script",
            )
        return load_facts(label)
    return load_facts(stated or DEFAULT_LABEL)


def make_plan(
    settings: BuildSettings, facts: Facts, checkpoint: CheckpointConfig, here: Environment | None
) -> TensorRTPlan:
    """Check everything and return the build; raise SpecDecError that lists all that is wrong.

    here: this machine, where it is to build; None where another will.
    """
    given = collect_flags(settings, facts)
    mode = checkpoint.mode or settings.speculative_decoding_mode
    problems = checks.find_checkpoint_problems(facts, checkpoint)
    problems += checks.find_mode_problems(
        facts, checkpoint, settings.speculative_decoding_mode, given.get("max_draft_len")
    )
    gpus = here.gpus if here is not None else ()
    capability = gpus[0].capability if gpus else None
    record = predict_record(facts, checkpoint, mode, given, capability)
    model = checkpoint.model
    because = f"tp_size {model.tp_size}"
    if model.pp_size > 1:
        because += f" x pp_size {model.pp_size}"
    num_ranks = model.tp_size * model.pp_size
    paths, missing = find_rank_files(settings.checkpoint_dir, num_ranks, because)
    plan = TensorRTPlan(
        facts=facts, checkpoint=checkpoint, checkpoint_dir=settings.checkpoint_dir,
        output_dir=settings.output_dir, mode=mode, given=given, record=record,
        files=[TensorFile(path) for path in paths],
    )  # fmt: skip
    for find in (
        find_flag_problems, checks.find_method_problems, checks.find_quantization_problems,
        checks.find_length_problems, checks.find_bent,
    ):  # fmt: skip
        problems += find(plan)
    problems += missing
    problems += checks.find_tensor_problems(checkpoint, plan.files)
    problems += checks.find_head_problems(facts, checkpoint, plan.files)
    if settings.quantization is not None:
        problems.add(
            f"--quantization {settings.quantization} is of the torch backend: TensorRT-LLM builds"
            " checkpoints that are quantized already",
            "leave it out and convert with --quantization fp8, or build with --backend torch",
        )
    plan.notes.extend(list_notes(plan, here))
    if here is not None:
        problems += find_path_problems(plan)
        needed = max(plan.weights_bytes, default=0) + plan.kv_cache_bytes
        problems += checks.find_gpu_problems(plan, gpus, needed)
    problems.raise_all()
    return plan


def list_notes(build: TensorRTPlan, here: Environment | None) -> list[str]:
    """What the user should know although nothing is wrong."""
    notes = []
    record, values = build.record, build.record.values
    if record.growth is not None:
        notes.append(
            f"the engine will record max_seq_len {values['max_seq_len']} = {record.growth};"
            " prompt plus output stay within the first number"
        )
    is_quantized = build.checkpoint.quantization.is_quantized
    for name, reason in record.reasons.items():
        # Nobody expects FP8 attention where the weights are not quantized.
        if name not in build.given and (is_quantized or name != "use_fp8_context_fmha"):
            notes.append(f"the engine will record {name} {values[name]}: {reason}")
    if build.mode == checks.EXTERNAL and not values["gather_generation_logits"]:
        notes.append(
            "without --gather-generation-logits on both engines, drafts are accepted token by"
            " token: --use-logits needs it"
        )
    if build.label == "1.2" and build.given.get("gather_generation_logits"):
        notes.append("trtllm-build calls --gather_generation_logits deprecated on every run")
    version = (here.tensorrt_llm if here is not None else None) or build.label
    notes += list_defects(version, build.mode, build.checkpoint.raw)
    if here is None:
        notes.append("not checked: the GPU, its memory and the version of the machine that builds")
    return notes
