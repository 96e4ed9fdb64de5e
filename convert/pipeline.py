"""Model to checkpoint: read what is there, plan every tensor, check all of it, then write."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig, parse_checkpoint_config
from specdec.command.settings import need, to_plain
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.acceptance import NAME as ACCEPTANCE_NAME
from specdec.files.acceptance import Acceptance, read_acceptance
from specdec.files.casts import FLOATS
from specdec.files.folders import MODEL, is_hub_id, refuse_adapter
from specdec.files.manifest import check_sources, write_manifest
from specdec.files.reading import write_json
from specdec.files.staging import (
    check_free_space,
    check_output_dir,
    list_local,
    name_final,
    stage_folder,
)
from specdec.files.tensor_file import TensorInfo, measure_tensor_file
from specdec.files.vocabulary import read_recorded, read_vocabulary
from specdec.gguf.folder import localize
from specdec.methods import place_drafter
from specdec.model.config import ModelConfig
from specdec.model.quantization import EXECUTED
from specdec.model.tensors import (
    EMBEDDING,
    HEAD,
    get_rank_shape,
    list_rank_names,
    list_target_tensors,
)
from specdec.options import name_flag
from specdec.system import logs
from specdec.system.threads import count_usable_cores
from specdec.text.pretrained import warn_of_other_ids
from specdec.trtllm.facts import DEFAULT_LABEL
from specdec.trtllm.lacks import find_lack, find_layout_problems

from . import config as checkpoint_config
from . import stream
from .checkpoint import CheckpointFolder
from .families import find_family
from .families.base import Layout, tie_head
from .flags import check_flags
from .hf import QUANTIZATION_NAME, GgufFolder, HfFolder, Target, open_model
from .lora import Adapter, merge_adapter
from .methods import FOLDERS, find_folder, load_converter
from .methods.base import DrafterConverter
from .methods.mtp import leave_head, prepare_head
from .origin import find_other_base, read_origin
from .plan import (
    CASTABLE,
    ConversionPlan,
    PlannedTensor,
    RankPlan,
    check_num_layers,
    collect,
    get_infos,
    merge_ranks,
    plan_tensors,
)
from .quantize import packed
from .quantize.blocks import keep_blocks
from .quantize.scales import Quantizer, name_kv_scales
from .quantize.sections import OWN_FILES, read_scheme, refuse_quantized
from .quantize.target import quantize_target
from .settings import ConvertSettings
from .wrappers import unwrap

logger = logs.get_logger(__name__)

# What transformers 5 calls the experts of a layer in one tensor.
FUSED = ("gate_up_proj", "down_proj")
MTP_FOLDER = "mtp_model_dir"  # mostly the target's own
MAX_WORKERS = 16  # if not told otherwise: every one has buffers


def convert_model(settings: ConvertSettings) -> dict[str, Any]:
    """Write a checkpoint and return what it is; with `dry_run`, only check and describe it."""
    began = time.monotonic()
    settings = complete_settings(settings)
    check_output_dir(settings.output_dir, force=settings.force, inputs=list_inputs(settings))
    plan = make_plan(settings)
    states = stream.get_states(plan)
    report = describe_plan(plan, settings)
    check_free_space(settings.output_dir, report["total_bytes"], "the checkpoint takes")
    if settings.dry_run:
        report["warnings"] = warn_of_other_base(plan)
        seconds = stream.measure_hash_seconds(plan, count_workers(settings))
        return {"dry_run": True, **report, "hash_seconds": round(seconds, 2)}
    if plan.measure is not None:
        report["quality"] = plan.measure(count_workers(settings))
    with stage_folder(
        settings.output_dir, force=settings.force, inputs=list_inputs(settings)
    ) as staged:
        written = stream.write_plan(
            plan, staged, workers=count_workers(settings), states=states,
            allow_nonfinite=settings.allow_nonfinite, allow_zeros=settings.allow_zeros,
        )  # fmt: skip
        check_sources(written.sources)
        write_json(staged / "config.json", plan.config)
        if plan.acceptance is not None:
            plan.acceptance.write(staged / ACCEPTANCE_NAME)
        hashes = {Path(entry["path"]): entry["sha256"] for entry in written.sources}
        report["warnings"] = warn_of_other_base(plan, hashes)
        write_manifest(
            staged,
            kind="checkpoint",
            settings=to_plain(settings),
            sources=written.sources,
            hashes=written.hashes,
            vocabulary=plan.vocabulary,
            warnings=report["warnings"],
            nonfinite={name: dataclasses.asdict(flaws) for name, flaws in written.flaws.items()},
        )
    for file in report["files"]:
        file["bytes"] = (settings.output_dir / file["path"]).stat().st_size
    seconds = round(time.monotonic() - began, 2)
    weights = f" with {report['quant_algo']} weights" if report["quant_algo"] else ""
    logger.info(
        "checkpoint %s: %s, %s%s, %s, %d tensors, %.1f MB, %.1f s",
        name_final(settings.output_dir), report["architecture"], plan.dtype, weights,
        _describe_ranks(report), report["num_tensors"], report["total_bytes"] / 1e6, seconds,
    )  # fmt: skip
    if report["lack"] is not None:
        takers = "other runtimes"
        if "torch" in report["backends"]:
            takers = "specdec's own backends, torch and (not every model) tensorrt"
        logger.info("%s: this checkpoint is for %s", report["lack"], takers)
    return {"dry_run": False, **report, "convert_seconds": seconds}


def complete_settings(settings: ConvertSettings) -> ConvertSettings:
    """Return settings that name the drafter by its kind; raise UsageError for contradictions."""
    settings = place_drafter(settings, fetch_drafter(settings))
    if settings.speculative_decoding_mode is not None and find_folder(settings) is None:
        own: dict[str, Any] = {MTP_FOLDER: settings.model_dir}
        settings = dataclasses.replace(settings, **own)
    check_flags(settings)
    return settings


def warn_of_other_base(plan: ConversionPlan, hashes: Mapping[Path, str] | None = None) -> list[str]:
    """Log and return what speaks against the drafter being this target's."""
    warning = find_other_base(plan.origin, hashes) if plan.origin is not None else None
    if warning is not None:
        logger.warning("warning: %s", warning)
    return [warning] if warning is not None else []


def list_inputs(settings: ConvertSettings) -> list[Path]:
    """The local folders that are read."""
    return list_local(
        settings.model_dir, settings.base_model_checkpoint_dir, settings.calibration_data,
        settings.lora_dir, *(getattr(settings, folder) for folder in FOLDERS),
    )  # fmt: skip


def count_workers(settings: ConvertSettings) -> int:
    """Threads that write, and as many that hash."""
    if settings.workers is not None:
        return settings.workers
    return min(count_usable_cores(), MAX_WORKERS)


def make_plan(settings: ConvertSettings) -> ConversionPlan:
    """Plan the whole conversion; raise one SpecDecError that names everything wrong with it."""
    problems = Problems()
    plan = plan_target if settings.base_model_checkpoint_dir is None else plan_checkpoint
    target = plan(settings, problems)
    config, ranks, files, origin = target.config, target.ranks, target.files, None
    acceptance: Acceptance | None = None
    if (option := find_folder(settings)) is not None:
        place, kind = getattr(settings, option), FOLDERS[option].name
        kind = MODEL if takes_own_head(settings) else kind
        folder = open_model(place, name_flag(option), kind)
        if kind != MODEL:
            refuse_quantized(folder)
        shapes = (spec.shape for spec in list_target_tensors(target.model).values())
        origin = read_origin(
            folder.path, folder.config, files, settings.model_dir, sum(map(math.prod, shapes))
        )
        with collect(problems):
            acceptance = read_acceptance(folder.path)
            if option == MTP_FOLDER:
                folder = prepare_head(folder, target.model)
            converter = load_converter(FOLDERS[option])(folder, settings, target.model)
            config, drafter_ranks = plan_drafter(converter, target, problems)
            ranks = merge_ranks(ranks, drafter_ranks)
        files = [*files, *(path for path in folder.files if path not in files)]
    problems.raise_all()
    checkpoint = parse_checkpoint_config(
        config | {"share_embedding_table": target.model.share_embedding_table}
    )
    if settings.trtllm_version != DEFAULT_LABEL:  # which was not asked for: see list_backends
        find_layout_problems(
            settings.trtllm_version, checkpoint.quantization, checkpoint.model
        ).raise_all()
    return ConversionPlan(
        config=config, checkpoint=checkpoint, dtype=target.model.dtype, ranks=tuple(ranks),
        source_files=tuple(files), vocabulary=target.vocabulary, origin=origin,
        acceptance=acceptance,
        measure=target.quantizer.measure if target.quantizer is not None else None,
    )  # fmt: skip


def takes_own_head(settings: ConvertSettings) -> bool:
    """Whether the head that drafts is to be in the target's own folder."""
    head = getattr(settings, MTP_FOLDER)
    return None not in (head, settings.model_dir) and Path(head) == Path(settings.model_dir or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTarget:
    """The planned target, to which a drafter may be added.

    plain: the same before matrices were kept in blocks, which a drafter's copies are made from.
    """

    model: ModelConfig
    config: dict[str, Any]
    ranks: list[RankPlan]
    files: list[Path]
    vocabulary: dict[str, Any] | None
    is_head_quantized: bool = False
    quantizer: Quantizer | None = None
    plain: list[RankPlan] | None = None


def plan_target(settings: ConvertSettings, problems: Problems) -> PlannedTarget:
    """Plan the target from its Hugging Face folder."""
    folder = open_target(settings)
    family = find_family(folder)
    sections = [folder.path / name for name in (QUANTIZATION_NAME, *OWN_FILES)]
    files = [*folder.files, *list_local(*sections, settings.calibration_data)]
    folder, held = open_quantized(settings, folder)
    dtype = folder.find_dtype() if settings.dtype == "auto" else settings.dtype
    if settings.lora_dir is not None:
        adapter = Adapter(settings.lora_dir)
        files += adapter.files
        folder = merge_adapter(folder, adapter, family, is_quantized=held is not None)
    folder = family.prepare(folder, dtype)
    layout = Layout(
        dtype=dtype,
        tp_size=settings.tp_size or 1,
        pp_size=settings.pp_size or 1,
        use_parallel_embedding=settings.use_parallel_embedding,
        embedding_sharding_dim=settings.embedding_sharding_dim or 0,
        share_embedding_table=settings.use_embedding_sharing,
        moe_tp_size=settings.moe_tp_size,
        moe_ep_size=settings.moe_ep_size,
        trtllm_version=settings.trtllm_version,
    )
    model, is_tied = family.read_model(folder, layout)
    is_plain = settings.dequantize or settings.quantization or settings.lora_dir
    keeps = isinstance(folder, GgufFolder) and not is_plain  # the blocks of a GGUF file
    if keeps and is_tied and model.pp_size == 1:
        is_split = model.tp_size > 1 and model.embedding_sharding_dim == 1
        model = dataclasses.replace(model, share_embedding_table=not is_split)
    model.find_problems().raise_all()
    check_experts(settings, folder, model, is_quantized=held is not None)
    if model.linear_attention is not None and (settings.quantization is not None or held):
        kind = "it is quantized" if held else "--quantization is given"
        raise SpecDecError(
            f"{folder.path} is a hybrid of linear and full attention, and {kind}",
            "leave --quantization out, or give --dequantize: specdec-build --quantization rounds"
            " the layers of hybrids",
        )
    check_num_layers(model.num_hidden_layers, folder)
    specs = list_target_tensors(model)
    num_experts = model.experts.num if model.experts is not None else 1
    parts, ignored = family.find_source_rows(specs, folder, num_experts), list(family.ignored)
    parts = packed.turn_parts(folder, parts)
    ignored += ignore_drafter(settings, folder)
    if settings.dequantize or held is not None:
        ignored += packed.find_empty_biases(folder, parts)
    if is_tied:
        parts = tie_head(family, folder, parts)
        ignored.append(HEAD)
    config = checkpoint_config.describe_target(model, family, settings.trtllm_version)
    target = Target(
        folder=folder,
        model=model,
        specs=specs,
        source_rows=parts,
        ignored=ignored,
        problems=problems,
    )
    section: dict[str, Any] = {}
    quantizer = None
    if held is not None:
        ranks, section = packed.plan_held(target, held, name_kv_scales(settings.trtllm_version))
    else:
        ranks = target.plan(specs)
    plain = ranks
    if keeps and not problems:
        assert isinstance(folder, GgufFolder)
        ranks, section = keep_blocks(ranks, folder, model)
    if settings.quantization is not None and not problems:
        ranks, section, quantizer = quantize_target(settings, target, ranks)
    if section:
        config["quantization"] = {**config["quantization"], **section}
    return PlannedTarget(
        model=model, config=config, ranks=split_stages(model, ranks), plain=plain, files=files,
        vocabulary=read_tokens(folder), quantizer=quantizer,
    )  # fmt: skip


def open_target(settings: ConvertSettings) -> HfFolder:
    """Open the target's folder without what is beside its text model and no part of it."""
    folder = open_model(need(settings.model_dir), "--model-dir")
    if settings.lora_dir is None:
        merge = f"specdec-convert --lora-dir {folder.path} merges it"
        refuse_adapter(folder.path, f"--model-dir {folder.path}", merge)
    unwrap(folder)
    return leave_head(folder, is_converted=takes_own_head(settings))


def read_tokens(folder: HfFolder) -> dict[str, Any] | None:
    """Return what `read_vocabulary` does of a target; None, with a warning, where it cannot."""
    try:
        path = Path(localize(folder.path))
        vocabulary = read_vocabulary(path)
        if vocabulary is not None and not isinstance(folder, GgufFolder):
            warn_of_other_ids(path)
    except SpecDecError as error:  # the weights can be read
        logger.warning("%s; weights are converted: give --tokenizer-dir when you build", error)
        return None
    return vocabulary


def check_experts(
    settings: ConvertSettings, folder: HfFolder, model: ModelConfig, *, is_quantized: bool
) -> None:
    """Raise for flags about experts of a model without, and for what is not done with experts."""
    sizes = [name for name in ("moe_tp_size", "moe_ep_size") if getattr(settings, name) is not None]
    if model.experts is None and sizes:
        raise SpecDecError(
            f"{folder.path} is no mixture of experts: {name_flag(sizes[0])} has no effect",
            "leave it out",
        )
    if model.experts is None:
        return
    if is_quantized or settings.quantization is not None:
        kind = "it is quantized" if is_quantized else "--quantization is given"
        raise SpecDecError(
            f"{folder.path} is a mixture of experts, and {kind}",
            "leave --quantization out, or give --dequantize: quantized experts are not supported"
            " yet",
        )
    # Before that many names are listed.
    num_matrices = sum(math.prod(info.shape[:-2]) for info in folder.tensors.values())
    if model.experts.num > num_matrices:
        raise SpecDecError(
            f"{folder.path} is said to have {model.experts.num} experts a layer, but holds"
            f" {num_matrices} matrices",
            "its config.json and tensors disagree: take both from the same model",
        )


def open_quantized(
    settings: ConvertSettings, folder: HfFolder
) -> tuple[HfFolder, packed.Held | None]:
    """Open a target that may be quantized; return the folder to plan from.

    It has plain weights where they are asked for; else, what a checkpoint holds of it.
    """
    scheme = read_scheme(folder)
    if scheme is None:
        if settings.dequantize and not isinstance(folder, GgufFolder):
            raise SpecDecError(
                f"--dequantize has no effect: {folder.path} does not say that it is quantized",
                "leave it out",
            )
        return folder, None
    for name, info in folder.tensors.items():
        if name.rpartition(".experts.")[2] in FUSED and info.dtype not in CASTABLE:
            raise SpecDecError(
                f"{folder.path}: {name} is {info.dtype}: experts in one tensor are read unquantized"
                " only",
                "convert the unquantized model; or let transformers 5 save this one with"
                " save_original_format=True, its default, and give --dequantize",
            )
    if settings.quantization is not None:
        raise SpecDecError(
            f"{folder.path} is quantized already ({scheme.description})",
            "leave --quantization and its options out",
        )
    if settings.dequantize:
        return packed.dequantize(folder, scheme), None
    return packed.open_held(folder, scheme)


def split_stages(model: ModelConfig, ranks: list[RankPlan]) -> list[RankPlan]:
    """Divide each tensor rank's plan into pipeline stages, whose layers count from 0."""
    stages = []
    for rank in range(model.tp_size * model.pp_size):
        names = {own: name for name, own in list_rank_names(model, rank).items()}
        layers = {_cut_layer(own): _cut_layer(name) for own, name in names.items()}
        stage: RankPlan = {}
        for own, tensor in ranks[rank % model.tp_size].items():
            layer = _cut_layer(own)
            if own in names:
                stage[names[own]] = tensor
            elif layer in layers:  # a scale goes with its layer
                stage[layers[layer] + own.removeprefix(layer)] = tensor
            elif f"{own.rpartition('.')[0]}.weight" in names:  # types of an embedding's rows
                stage[own] = tensor
        stages.append(stage)
    return stages


def _cut_layer(name: str) -> str:
    """`transformer.layers.1` of `transformer.layers.1.mlp.fc.weight`."""
    return ".".join(name.split(".")[:3])


def plan_checkpoint(settings: ConvertSettings, problems: Problems) -> PlannedTarget:
    """Plan to pass an existing checkpoint's tensors on."""
    folder = CheckpointFolder(need(settings.base_model_checkpoint_dir))
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
    if folder.is_head_quantized and settings.trtllm_version == "0.14":
        raise SpecDecError(
            f"{folder.path} has a quantized lm_head, which TensorRT-LLM 0.14 cannot load",
            "convert for 1.2, or quantize the target again without its head",
        )
    return PlannedTarget(
        model=model,
        config=checkpoint_config.adapt_config(folder.config, settings.trtllm_version),
        ranks=folder.plan(problems),
        files=folder.files,
        vocabulary=read_recorded(folder.path),
        is_head_quantized=folder.is_head_quantized,
    )


def ignore_drafter(settings: ConvertSettings, target: HfFolder) -> Sequence[str]:
    """Patterns of a drafter's tensors in the target's own folder, which its converter reads."""
    chosen = find_folder(settings)
    for option, method in FOLDERS.items():
        patterns = load_converter(method).IN_TARGET
        present = [
            name for name in target.tensors
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]  # fmt: skip
        flag = name_flag(option)
        if present and option != chosen:
            raise SpecDecError(
                f"{target.path} holds a drafter besides the target: {join_names(present)}",
                f"give the folder as {flag} too, to convert both",
            )
        if present and getattr(settings, option) != settings.model_dir:
            logger.warning(
                "the drafter saved with %s is left out: the one of %s is converted",
                target.path, flag,
            )  # fmt: skip
    return load_converter(FOLDERS[chosen]).IN_TARGET if chosen else ()


def fetch_drafter(settings: ConvertSettings) -> Path | None:
    """Fetch the drafter of a Hub id whose method is not told; return its folder."""
    given = [getattr(settings, option) for option in FOLDERS if getattr(settings, option)]
    name = settings.drafter_model_dir  # type: ignore[attr-defined]
    if given != [name] or Path(name).exists() or not is_hub_id(name):
        return None
    check_flags(settings)  # before anything is fetched
    return open_model(name, "--drafter-model-dir", kind=None).path


def plan_drafter(
    converter: DrafterConverter, target: PlannedTarget, problems: Problems
) -> tuple[dict[str, Any], list[RankPlan]]:
    """Plan the drafter's tensors; return the configuration of both and each rank's tensors."""
    folder, settings, model = converter.folder, converter.settings, target.model
    config = converter.add_to_config(target.config, is_head_quantized=target.is_head_quantized)
    # Whether the drafter is of this target, and tp_size divides its sizes. If not, every one of its
    # tensors would be told again.
    parse_checkpoint_config(config)
    dtype = settings.dtype
    if settings.base_model_checkpoint_dir is None or dtype == "auto":
        dtype = model.dtype
    if dtype != model.dtype:
        logger.warning(
            "the drafter is written as %s beside a %s target; engines need one dtype: leave --dtype"
            " out to have it",
            dtype, model.dtype,
        )  # fmt: skip
    specs = converter.params.list_tensors(model)
    shared = converter.share_tensors(list(specs))
    own = {name: spec for name, spec in specs.items() if name not in shared}
    ranks = plan_tensors(
        own, converter.find_source_rows(list(own)), folder, model=model, dtype=dtype,
        ignored=converter.list_ignored(), problems=problems,
    )  # fmt: skip
    for rank, targets in zip(ranks, target.plain or target.ranks, strict=True):
        for name, other in shared.items():
            info = TensorInfo(dtype, get_rank_shape(specs[name], model))
            if other == HEAD and model.share_embedding_table:
                other = EMBEDDING
            found = targets.get(other or "")
            if other is None:
                rank[name] = PlannedTensor(info, ())
            elif found and found.info.shape == info.shape and found.info.dtype in FLOATS:
                rank[name] = PlannedTensor(info, found.slices)
            else:
                problems.add(
                    f"{folder.path} does not hold what makes {name}, and the target has no"
                    f" {other} {list(info.shape)} to take its place",
                    "use the drafter that was trained for this target",
                )
    return config, ranks


def _describe_ranks(report: Mapping[str, Any]) -> str:
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
    label = settings.trtllm_version
    lacks = [find_lack(label, plan.config, model.architecture)]
    lacks += find_layout_problems(label, checkpoint.quantization, model)
    lack = next(filter(None, lacks), None)
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
        "backends": list_backends(checkpoint, is_lacking=lack is not None),
        "lack": lack[0] if lack is not None else None,
        "dtype": plan.dtype,
        "quant_algo": checkpoint.quantization.quant_algo,
        "kv_cache_quant_algo": checkpoint.quantization.kv_cache_quant_algo,
        "tp_size": model.tp_size,
        "pp_size": model.pp_size,
        "num_tensors": len(plan.ranks[0]),
        "files": [*files, {"path": "config.json"}, {"path": "manifest.json"}],
        "total_bytes": total,
        "buffer_bytes": stream.measure_buffers(plan, count_workers(settings)),
        "sources": [str(path) for path in plan.source_files],
        "config": summary,
    }


def list_backends(checkpoint: CheckpointConfig, *, is_lacking: bool) -> list[str]:
    """The backends of specdec-build that take a checkpoint, but tensorrt, whose build tells.

    is_lacking: whether TensorRT-LLM has no class for it, or loads no such matrices.
    """
    is_executed = checkpoint.quantization.quant_algo in EXECUTED
    backends = ["torch"] if checkpoint.model.pp_size == 1 and is_executed else []
    return backends if is_lacking else [*backends, "tensorrt-llm"]


def format_report(report: dict[str, Any]) -> str:
    """Return a dry run's plan as lines of text."""
    algorithms = {"linears": report["quant_algo"], "K/V cache": report["kv_cache_quant_algo"]}
    quantized = "".join(f", {what} {name}" for what, name in algorithms.items() if name)
    lines = [
        f"{report['architecture']} ({report['method']}) for TensorRT-LLM"
        f" {report['trtllm_version']} -> {report['output_dir']}",
        f"backends that take it: {', '.join(report['backends'])}"
        + (f" ({report['lack']})" if report["lack"] else ""),
        f"dtype {report['dtype']}{quantized}, {_describe_ranks(report)},"
        f" {report['num_tensors']} tensors a rank",
    ]
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
