"""Model to checkpoint: read what is there, plan every tensor, check all of it, then write."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.errors import SpecDecError, UsageError, raise_problems
from specdec.schema import ModelConfig, parse_checkpoint_config
from specdec.settings import require, to_plain
from specdec.storage import (
    Array,
    check_output_dir,
    describe_file,
    list_local,
    measure_tensor_file,
    stage_folder,
    write_json,
    write_manifest,
    write_tensor_file,
)
from specdec.tensors import list_redrafter_tensors, list_target_tensors

from . import config as checkpoint_config
from .checkpoint import CheckpointFolder
from .families import find_family
from .families.base import Family, Layout
from .hf import HfFolder, open_model
from .methods import redrafter
from .plan import (
    CHUNK_BYTES,
    Plan,
    Problems,
    RankPlan,
    check_num_layers,
    collect,
    get_infos,
    merge_ranks,
    plan_tensors,
)
from .settings import ConvertSettings

logger = logs.get_logger(__name__)

METADATA = {"format": "pt"}  # safetensors readers ask for it
CHUNKS_AHEAD = 2


def convert_model(settings: ConvertSettings) -> dict[str, Any]:
    """Write a checkpoint and return what it is; with `dry_run`, only check and describe it."""
    began = time.monotonic()
    check_flags(settings)
    assert settings.output_dir is not None
    check_output_dir(settings.output_dir, force=settings.force, inputs=list_inputs(settings))
    plan = make_plan(settings)
    report = describe_plan(plan, settings)
    check_free_space(settings.output_dir, report["total_bytes"])
    if settings.dry_run:
        return {"dry_run": True, **report}
    with stage_folder(
        settings.output_dir, force=settings.force, inputs=list_inputs(settings)
    ) as staged:
        hashes, sources = write_ranks(plan, staged, workers=count_workers(settings))
        write_json(staged / "config.json", plan.config)
        write_manifest(
            staged, kind="checkpoint", settings=to_plain(settings), sources=sources, hashes=hashes
        )
    for file in report["files"]:
        file["bytes"] = (settings.output_dir / file["path"]).stat().st_size
    seconds = round(time.monotonic() - began, 2)
    logger.info(
        "checkpoint %s: %s, %s, tp_size %d, %d tensors, %.1f MB, %.1f s",
        settings.output_dir, report["architecture"], plan.dtype, len(plan.ranks),
        report["num_tensors"], report["total_bytes"] / 1e6, seconds,
    )  # fmt: skip
    return {"dry_run": False, **report, "convert_seconds": seconds}


def check_flags(settings: ConvertSettings) -> None:
    """Raise UsageError for flags that are missing, contradict one another, or have no effect."""
    require(settings, "output_dir")
    if settings.model_dir is not None and settings.base_model_checkpoint_dir is not None:
        raise UsageError(
            "--model-dir and --base-model-checkpoint-dir are both given", "give one of them"
        )
    if settings.model_dir is None and settings.base_model_checkpoint_dir is None:
        raise UsageError(
            "missing --model-dir",
            "give the target: --model-dir, or --base-model-checkpoint-dir for an existing"
            " checkpoint",
        )
    if settings.drafter_model_dir is None:
        if settings.base_model_checkpoint_dir is not None:
            raise UsageError(
                "--base-model-checkpoint-dir without --drafter-model-dir leaves nothing to convert",
                "give the drafter to add to the checkpoint",
            )
        for name in (
            "redrafter_num_beams", "redrafter_draft_len_per_beam", "redrafter_no_greedy_search",
        ):  # fmt: skip
            if getattr(settings, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect without --drafter-model-dir",
                    "give the drafter's folder, or leave the option out",
                )
    if settings.embedding_sharding_dim is not None:
        if settings.embedding_sharding_dim not in (0, 1):
            raise UsageError(
                f"--embedding-sharding-dim is {settings.embedding_sharding_dim}",
                "give 0 (vocabulary) or 1 (hidden size)",
            )
        if not settings.use_parallel_embedding:
            raise UsageError(
                "--embedding-sharding-dim has no effect without --use-parallel-embedding",
                "give both, or neither",
            )


def list_inputs(settings: ConvertSettings) -> list[Path]:
    """The local folders that are read."""
    return list_local(
        settings.model_dir, settings.base_model_checkpoint_dir, settings.drafter_model_dir
    )


def count_workers(settings: ConvertSettings) -> int:
    """Threads to use."""
    return settings.workers or os.cpu_count() or 1


def make_plan(settings: ConvertSettings) -> Plan:
    """Plan the whole conversion; raise one SpecDecError that names everything wrong with it."""
    problems: Problems = []
    if settings.base_model_checkpoint_dir is not None:
        target = plan_checkpoint(settings, problems)
    else:
        target = plan_target(settings, problems)
    config, ranks, files = target.config, target.ranks, target.files
    if settings.drafter_model_dir is not None:
        folder = open_model(settings.drafter_model_dir, "--drafter-model-dir", allow_torch=True)
        with collect(problems):
            config, drafter_ranks = plan_drafter(settings, folder, target, problems)
            ranks = merge_ranks(ranks, drafter_ranks)
        files = [*files, *folder.files]
    raise_problems(problems)
    return Plan(
        config=config,
        checkpoint=parse_checkpoint_config(config),
        dtype=target.model.dtype,
        ranks=tuple(ranks),
        source_files=tuple(files),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The planned target, to which a drafter may be added."""

    model: ModelConfig
    config: dict[str, Any]
    ranks: list[RankPlan]
    files: list[Path]
    is_head_quantized: bool = False


def plan_target(settings: ConvertSettings, problems: Problems) -> Target:
    """Plan the target from its Hugging Face folder."""
    assert settings.model_dir is not None
    folder = open_model(settings.model_dir, "--model-dir")
    family = find_family(folder)
    if folder.config.get("quantization_config") is not None:
        raise SpecDecError(
            f"{folder.path} is quantized (its config.json has quantization_config)",
            "convert the unquantized model",
        )
    layout = Layout(
        dtype=folder.find_dtype() if settings.dtype == "auto" else settings.dtype,
        tp_size=settings.tp_size or 1,
        use_parallel_embedding=settings.use_parallel_embedding,
        embedding_sharding_dim=settings.embedding_sharding_dim or 0,
    )
    model, is_tied = family.read_model(folder, layout)
    raise_problems(model.find_problems())
    check_num_layers(model.num_hidden_layers, folder)
    specs = list_target_tensors(model)
    names, ignored = tie_head(family, folder, family.find_sources(specs), is_tied=is_tied)
    ranks = plan_tensors(
        specs, names, folder, model=model, dtype=model.dtype, ignored=ignored, problems=problems
    )
    config = checkpoint_config.describe_target(model, family, settings.trtllm_version)
    return Target(model=model, config=config, ranks=ranks, files=folder.files)


def tie_head(
    family: Family, folder: HfFolder, names: dict[str, tuple[str, ...]], *, is_tied: bool
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Let a tied head come from the embedding; return the names and what may stay unread."""
    ignored = list(family.ignored)
    if not is_tied:
        return names, ignored
    embedding = names["transformer.vocab_embedding.weight"]
    head = names["lm_head.weight"]
    if embedding[0] not in folder.tensors and head[0] in folder.tensors:
        embedding = head  # some writers keep the other name of a shared tensor
    # transformers lets the embedding stand for a head that is stored as well, and so must we.
    both = {"transformer.vocab_embedding.weight": embedding, "lm_head.weight": embedding}
    return names | both, [*ignored, *head]


def plan_checkpoint(settings: ConvertSettings, problems: Problems) -> Target:
    """Plan to pass an existing checkpoint's tensors on."""
    assert settings.base_model_checkpoint_dir is not None
    folder = CheckpointFolder(settings.base_model_checkpoint_dir)
    model = folder.model
    if settings.tp_size is not None and settings.tp_size != model.tp_size:
        raise SpecDecError(
            f"--tp-size is {settings.tp_size}, but {folder.path} has tp_size {model.tp_size}",
            "leave --tp-size out, or convert the target again with the one you want",
        )
    has = (model.use_parallel_embedding, model.embedding_sharding_dim)
    wanted = (True, settings.embedding_sharding_dim or 0)
    if settings.use_parallel_embedding and wanted != has:
        raise SpecDecError(
            f"--use-parallel-embedding with dimension {wanted[1]} is asked for, but {folder.path}"
            f" has use_parallel_embedding {str(has[0]).lower()}, embedding_sharding_dim {has[1]}",
            "leave the options out, or convert the target again with them",
        )
    return Target(
        model=model,
        config=checkpoint_config.adapt_config(folder.config, settings.trtllm_version),
        ranks=folder.plan(problems),
        files=folder.files,
        is_head_quantized=folder.is_head_quantized,
    )


def plan_drafter(
    settings: ConvertSettings, folder: HfFolder, target: Target, problems: Problems
) -> tuple[dict[str, Any], list[RankPlan]]:
    """Plan the drafter's tensors; return the configuration of both and each rank's tensors."""
    model = target.model
    params = redrafter.read_params(
        folder,
        num_beams=settings.redrafter_num_beams,
        draft_len_per_beam=settings.redrafter_draft_len_per_beam,
        greedy_search=not settings.redrafter_no_greedy_search,
        target_hidden_size=model.hidden_size,
        target_vocab_size=model.vocab_size,
    )
    config = redrafter.add_to_config(
        target.config, params, settings.trtllm_version, is_head_quantized=target.is_head_quantized
    )
    with collect(problems):
        parse_checkpoint_config(config)  # whether tp_size divides the drafter's sizes
    dtype = settings.dtype
    if settings.base_model_checkpoint_dir is None or dtype == "auto":
        dtype = model.dtype
    if dtype != model.dtype:
        logger.warning(
            "the drafter is written as %s beside a %s target; TensorRT-LLM and the torch engine"
            " need one dtype: leave --dtype out to have it",
            dtype, model.dtype,
        )  # fmt: skip
    redrafter.check_disagreements(folder, params)
    check_num_layers(params.num_layers, folder)
    specs = list_redrafter_tensors(params, model.vocab_size)
    names = redrafter.find_sources(folder, params, list(specs))
    ranks = plan_tensors(
        specs, names, folder, model=model, dtype=dtype, ignored=(), problems=problems
    )
    return config, ranks


def describe_plan(plan: Plan, settings: ConvertSettings) -> dict[str, Any]:
    """Return the plan as JSON-ready values: files, bytes, dtype, configuration, memory."""
    assert settings.output_dir is not None
    files = [
        {
            "path": f"rank{rank}.safetensors",
            "bytes": measure_tensor_file(get_infos(tensors), METADATA),
        }
        for rank, tensors in enumerate(plan.ranks)
    ]
    total = sum(int(str(file["bytes"])) for file in files)
    checkpoint = plan.checkpoint
    model = checkpoint.model
    summary: dict[str, Any] = {
        name: getattr(model, name)
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_size", "intermediate_size", "max_position_embeddings",
            "use_parallel_embedding", "embedding_sharding_dim",
        )
    }  # fmt: skip
    if checkpoint.drafter is not None:
        summary |= checkpoint.drafter.to_checkpoint()
    return {
        "output_dir": str(settings.output_dir),
        "architecture": plan.config["architecture"],
        "method": checkpoint.method.name if checkpoint.method else "plain",
        "trtllm_version": settings.trtllm_version,
        "dtype": plan.dtype,
        "tp_size": model.tp_size,
        "num_tensors": len(plan.ranks[0]),
        "files": [*files, {"path": "config.json"}, {"path": "manifest.json"}],
        "total_bytes": total,
        "buffer_bytes": estimate_buffers(plan, count_workers(settings)),
        "sources": [str(path) for path in plan.source_files],
        "config": summary,
    }


def estimate_buffers(plan: Plan, workers: int) -> int:
    """Bytes of tensor data in memory at once; a cast holds up to four copies of its chunk."""
    writers = min(workers, len(plan.ranks))
    return writers * (CHUNKS_AHEAD + 1) * CHUNK_BYTES + workers * 4 * CHUNK_BYTES


def check_free_space(output_dir: Path, num_bytes: int) -> None:
    """Raise SpecDecError when the disk cannot hold the output."""
    folder = output_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SpecDecError(
            f"the checkpoint takes {num_bytes / 1e6:.1f} MB, {folder} has {free / 1e6:.1f} MB free",
            "free some space, or choose another folder",
        )


def write_ranks(
    plan: Plan, folder: Path, *, workers: int
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Write every rank's file; return their sha256 by name and the sources' manifest entries."""
    # Cutters make chunks and wait for nobody, so the writers that wait for them cannot lock up.
    with ThreadPoolExecutor(workers) as writers, ThreadPoolExecutor(workers) as cutters:
        ranks = {
            f"rank{rank}.safetensors": writers.submit(
                write_rank, folder / f"rank{rank}.safetensors", tensors, cutters
            )
            for rank, tensors in enumerate(plan.ranks)
        }
        sources = [writers.submit(describe_file, path) for path in plan.source_files]
        done: Iterable[Future[Any]] = [*ranks.values(), *sources]
        for task in logs.show_progress(done, label="converting", total=len(ranks) + len(sources)):
            try:
                task.result()
            except BaseException:
                writers.shutdown(wait=False, cancel_futures=True)
                raise
    return (
        {name: task.result() for name, task in ranks.items()},
        [task.result() for task in sources],
    )


def write_rank(path: Path, tensors: RankPlan, cutters: Executor) -> str:
    """Write one rank's file and return its sha256."""

    def produce(name: str) -> Iterator[Array]:
        # Mapped pages count as this process's memory for as long as they are not let go.
        for chunk in run_ahead(tensors[name].list_chunks(), cutters):
            yield chunk
            tensors[name].release()

    return write_tensor_file(path, get_infos(tensors), produce, METADATA)


def run_ahead(tasks: Iterable[Callable[[], Array]], executor: Executor) -> Iterator[Array]:
    """Yield the tasks' results in order while the next few are being computed."""
    waiting: deque[Future[Array]] = deque()
    for task in tasks:
        waiting.append(executor.submit(task))
        if len(waiting) > CHUNKS_AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def format_report(report: dict[str, Any]) -> str:
    """Return a dry run's plan as lines of text."""
    lines = [
        f"{report['architecture']} ({report['method']}) for TensorRT-LLM"
        f" {report['trtllm_version']} -> {report['output_dir']}",
        f"dtype {report['dtype']}, tp_size {report['tp_size']}, {report['num_tensors']} tensors a"
        " rank",
    ]
    lines += [f"  read  {path}" for path in report["sources"]]
    for file in report["files"]:
        size = f"{file['bytes']:>16,} bytes" if "bytes" in file else ""
        lines.append(f"  write {file['path']:<22}{size}")
    lines.append(
        f"total {report['total_bytes'] / 1e6:,.1f} MB; buffers up to"
        f" {report['buffer_bytes'] / 1e6:,.0f} MB; nothing was written"
    )
    return "\n".join(lines)
