"""Report of a conversion: the plan as JSON-ready values, and as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems
from specdec.files.backends import BACKENDS, list_worth_telling
from specdec.files.tensor_file import measure_tensor_file
from specdec.system.threads import count_usable_cores

from . import stream
from .plan import ConversionPlan, get_infos
from .settings import ConvertSettings

MAX_WORKERS = 16  # threads where --workers is not given: each of them has buffers


def count_workers(settings: ConvertSettings) -> int:
    """Return the number of threads that write, and of as many that hash."""
    if settings.workers is not None:
        return settings.workers
    return min(count_usable_cores(), MAX_WORKERS)


def describe_ranks(report: Mapping[str, Any]) -> str:
    """Return the number of ranks, and of pipeline stages where there are several, as text."""
    stages = f", pp_size {report['pp_size']}" if report["pp_size"] > 1 else ""
    return f"tp_size {report['tp_size']}{stages}"


def describe_plan(plan: ConversionPlan, settings: ConvertSettings) -> dict[str, Any]:
    """Return the plan as JSON-ready values: files, bytes, dtype, configuration, memory."""
    files = [
        {
            "path": stream.name_rank(rank),
            "bytes": measure_tensor_file(get_infos(tensors), stream.METADATA),
        }
        for rank, tensors in enumerate(plan.ranks)
    ]
    total = sum(int(str(file["bytes"])) for file in files)
    checkpoint = plan.checkpoint
    model = checkpoint.model
    problems = find_backend_problems(checkpoint, settings.line)
    lacks = [fact for name, facts in problems.items() for fact, _ in facts or ()
             if BACKENDS[name].is_separate]  # fmt: skip
    return {
        "output_dir": str(settings.output_dir),
        "architecture": plan.config["architecture"],
        "method": checkpoint.method.name if checkpoint.method else "plain",
        "trtllm_version": settings.line,
        "backends": [name for name, facts in problems.items() if facts == []],
        "lack": lacks[0] if lacks else None,
        "dtype": plan.dtype,
        "quant_algo": checkpoint.quantization.quant_algo,
        "kv_cache_quant_algo": checkpoint.quantization.kv_cache_quant_algo,
        "tp_size": model.tp_size,
        "pp_size": model.pp_size,
        "num_tensors": len(plan.ranks[0]),
        "left_out": dict(plan.left_out),
        "files": [*files, {"path": "config.json"}, {"path": "manifest.json"}],
        "total_bytes": total,
        "buffer_bytes": stream.measure_buffers(plan, count_workers(settings)),
        "sources": [str(path) for path in plan.source_files],
        "config": _summarize(checkpoint),
    }


def _summarize(checkpoint: CheckpointConfig) -> dict[str, Any]:
    """Return the sizes of a checkpoint's target, and its drafter's keys."""
    summary: dict[str, Any] = {
        name: getattr(checkpoint.model, name)
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_size", "intermediate_size", "max_position_embeddings",
            "use_parallel_embedding", "embedding_sharding_dim",
        )
    }  # fmt: skip
    drafter = checkpoint.drafter
    return summary if drafter is None else summary | drafter.to_checkpoint()


def find_backend_problems(checkpoint: CheckpointConfig, line: str) -> dict[str, Problems | None]:
    """Find why each backend of specdec-build does not take a checkpoint; None where its build says.

    line: whose names the checkpoint has.
    """
    return {
        name: backend.load("support").find_checkpoint_problems(checkpoint, line)
        for name, backend in BACKENDS.items()
    }


def tells_backends(settings: ConvertSettings) -> bool:
    """Return whether separate backends are spoken of: one is asked for, or installed here."""
    told_backends = list_worth_telling(is_asked=settings.trtllm_version is not None)
    return any(backend.is_separate for backend in told_backends)


def format_report(report: dict[str, Any], *, tells_backends: bool) -> str:
    """Return a dry run's plan as lines of text.

    tells_backends: of `tells_backends`; else only backends are named that are always here.
    """
    algorithms = {"linears": report["quant_algo"], "K/V cache": report["kv_cache_quant_algo"]}
    quantized = "".join(f", {use} {name}" for use, name in algorithms.items() if name)
    line, backends = _format_backends(report, tells_backends=tells_backends)
    lines = [
        f"{report['architecture']} ({report['method']}){line} -> {report['output_dir']}",
        backends,
        f"dtype {report['dtype']}{quantized}, {describe_ranks(report)},"
        f" {report['num_tensors']} tensors a rank",
    ]
    if report["left_out"]:
        groups = ", ".join(f"{group} {count}" for group, count in report["left_out"].items())
        lines.append(f"vision tensors that are left out: {groups}")
    lines += [f"warning: {warning}" for warning in report.get("warnings", ())]
    lines += [f"  read  {path}" for path in report["sources"]]
    for file in report["files"]:
        size = f"{file['bytes']:>16,} bytes" if "bytes" in file else ""
        lines.append(f"  write {file['path']:<22}{size}")
    lines.append(
        f"total {report['total_bytes'] / 1e6:,.1f} MB; buffers up to"
        f" {report['buffer_bytes'] / 1e6:,.0f} MB; at least {report['hash_seconds']:,.1f} s, the"
        " hashes alone at this machine's speed; nothing was written"
    )
    return "\n".join(lines)


def _format_backends(report: Mapping[str, Any], *, tells_backends: bool) -> tuple[str, str]:
    """Return what the names of a checkpoint are for, and which backends take it, as text."""
    separate = [name for name, backend in BACKENDS.items() if backend.is_separate]
    names = [name for name in report["backends"] if tells_backends or name not in separate]
    backends = f"backends that take it: {', '.join(names) or 'none of this machine'}"
    if not tells_backends:
        return "", backends
    line = f" for {BACKENDS[separate[0]].title} {report['trtllm_version']}" if separate else ""
    return line, backends + (f" ({report['lack']})" if report["lack"] else "")
