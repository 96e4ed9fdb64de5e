"""Target of a conversion: it is opened, the form of its weights is chosen, its tensors are planned.

The form is chosen once, by the folder and the flags (`WeightForm`); everything after that asks the
form, and nothing asks the folder again.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.command.settings import need
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.folders import refuse_adapter
from specdec.files.staging import list_local
from specdec.files.vocabulary import read_recorded, read_vocabulary
from specdec.gguf.folder import localize
from specdec.model.config import ModelConfig
from specdec.model.tensors import HEAD, list_rank_names, list_target_tensors
from specdec.options import name_flag
from specdec.system import logs
from specdec.text.pretrained import warn_of_other_ids

from . import config as checkpoint_config
from .checkpoint import CheckpointFolder
from .families import find_family
from .families.base import Family, Layout, tie_head
from .hf import QUANTIZATION_NAME, GgufFolder, HfFolder, TargetTensors
from .lora import Adapter, merge_adapter
from .methods import FOLDERS, find_folder, load_converter
from .methods.mtp import leave_head
from .plan import CASTABLE, RankPlan, check_num_layers
from .quantize import packed
from .quantize.blocks import keep_blocks
from .quantize.scales import Quantizer, name_kv_scales
from .quantize.sections import OWN_FILES, Scheme, holds_blocks, read_scheme
from .quantize.target import quantize_target
from .resolve import open_model
from .settings import ConvertSettings
from .wrappers import unwrap

logger = logs.get_logger(__name__)

# Names that transformers 5 gives the experts of a layer in one tensor.
FUSED = ("gate_up_proj", "down_proj")
MTP_FOLDER = "mtp_model_dir"  # mostly the target's own


class WeightForm(enum.Enum):
    """Form that the matrices of a target have in the checkpoint."""

    PLAIN = "plain"  # floats: dequantized, or with an adapter merged, where that is asked for
    STORED = "stored"  # the numbers of a quantized folder, as they are
    BLOCKS = "blocks"  # GGML's blocks of a GGUF file, or MXFP4 in a folder, as they are
    ROUNDED = "rounded"  # the numbers that --quantization rounds floats to


# Of the forms whose matrices are quantized by layout: why, for a message.
QUANTIZED_FORMS = {
    WeightForm.STORED: "it is quantized", WeightForm.ROUNDED: "--quantization is given",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTarget:
    """A planned target, to which a drafter may be added.

    plain_ranks: its tensors before they were quantized or kept in blocks, from which a drafter's
    copies are made. left_out: how many vision tensors of each module are not read.
    """

    model: ModelConfig
    config: dict[str, Any]
    ranks: list[RankPlan]
    plain_ranks: list[RankPlan]
    files: list[Path]
    vocabulary: dict[str, Any] | None
    is_head_quantized: bool = False
    quantizer: Quantizer | None = None
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedTarget:
    """A target's folder with the tensors that are read, and the form that they are written in.

    stored: the quantized matrices of a target of the form STORED.
    """

    folder: HfFolder
    family: Family
    form: WeightForm
    dtype: str
    files: list[Path]
    stored: packed.StoredMatrices | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedWeights:
    """Planned weights of a target in some form; section: keys of config.json's quantization."""

    ranks: list[RankPlan]
    plain_ranks: list[RankPlan]
    section: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantizer: Quantizer | None = None


def plan_target(settings: ConvertSettings, problems: Problems) -> PlannedTarget:
    """Plan the target from its Hugging Face folder."""
    opened = open_target(settings)
    model, is_tied = read_model(settings, opened)
    tensors = map_tensors(settings, opened, model, problems, is_tied=is_tied)
    config = checkpoint_config.describe_target(model, opened.family, settings.line)
    weights = PLANNERS[opened.form](settings, opened, tensors)
    if weights.section:
        config["quantization"] = {**config["quantization"], **weights.section}
    return PlannedTarget(
        model=model, config=config, ranks=split_stages(model, weights.ranks),
        plain_ranks=weights.plain_ranks, files=opened.files,
        vocabulary=read_tokens(opened.folder), quantizer=weights.quantizer,
        left_out=opened.folder.left_out,
    )  # fmt: skip


def plan_alone(settings: ConvertSettings) -> PlannedTarget:
    """Plan a target that is complete as it is; raise SpecDecError for everything wrong with it."""
    problems = Problems()
    target = plan_target(settings, problems)
    problems.raise_all()
    return target


# ---- Opening: the folder as it is read, and the form of its weights.


def open_target(settings: ConvertSettings) -> OpenedTarget:
    """Open the target's folder and choose the form of its weights."""
    folder = open_text_model(settings)
    family = find_family(folder)
    sections = [folder.path / name for name in (QUANTIZATION_NAME, *OWN_FILES)]
    files = [*folder.files, *list_local(*sections, settings.calibration_data)]
    scheme = read_scheme(folder)
    form = choose_form(settings, folder, scheme)
    weights, stored = open_weights(folder, scheme, form)
    dtype = weights.find_dtype() if settings.dtype == "auto" else settings.dtype
    if settings.lora_dir is not None:
        adapter = Adapter(settings.lora_dir)
        files += adapter.files
        weights = merge_adapter(weights, adapter, family, is_quantized=stored is not None)
    return OpenedTarget(
        folder=family.prepare(weights, dtype), family=family, form=form, dtype=dtype, files=files,
        stored=stored,
    )  # fmt: skip


def open_text_model(settings: ConvertSettings) -> HfFolder:
    """Open the target's folder without its vision tower and without a head that drafts."""
    folder = open_model(need(settings.model_dir), "--model-dir")
    if settings.lora_dir is None:
        merge = f"specdec-convert --lora-dir {folder.path} merges it"
        refuse_adapter(folder.path, f"--model-dir {folder.path}", merge)
    return leave_head(unwrap(folder), is_converted=takes_own_head(settings))


def takes_own_head(settings: ConvertSettings) -> bool:
    """Return whether the head that drafts is to be in the target's own folder."""
    head = getattr(settings, MTP_FOLDER)
    return None not in (head, settings.model_dir) and Path(head) == Path(settings.model_dir or "")


def choose_form(settings: ConvertSettings, folder: HfFolder, scheme: Scheme | None) -> WeightForm:
    """Choose the form of a target's weights; raise SpecDecError for flags that do not suit it.

    scheme: how the folder's weights are quantized; None where they are not.
    """
    has_blocks = isinstance(folder, GgufFolder) or holds_blocks(folder)
    if scheme is None and settings.dequantize and not has_blocks:
        raise SpecDecError(
            f"--dequantize has no effect: {folder.path} does not say that it is quantized",
            "leave it out",
        )
    if scheme is not None:
        refuse_quantized_experts(folder)
        if settings.quantization is not None:
            raise SpecDecError(
                f"{folder.path} is quantized already ({scheme.description})",
                "leave --quantization and its options out",
            )
        return WeightForm.PLAIN if settings.dequantize else WeightForm.STORED
    if settings.quantization is not None:
        return WeightForm.ROUNDED
    keeps_blocks = has_blocks and not settings.dequantize and settings.lora_dir is None
    return WeightForm.BLOCKS if keeps_blocks else WeightForm.PLAIN


def refuse_quantized_experts(folder: HfFolder) -> None:
    """Raise SpecDecError where experts in one tensor are quantized."""
    for name, info in folder.tensors.items():
        if name.rpartition(".experts.")[2] in FUSED and info.dtype not in CASTABLE:
            raise SpecDecError(
                f"{folder.path}: {name} is {info.dtype}: experts in one tensor are read unquantized"
                " only",
                "convert the unquantized model; or let transformers 5 save this one with"
                " save_original_format=True, its default, and give --dequantize",
            )


def open_weights(
    folder: HfFolder, scheme: Scheme | None, form: WeightForm
) -> tuple[HfFolder, packed.StoredMatrices | None]:
    """Return the folder to plan from, and the quantized matrices of the form STORED."""
    if scheme is None:
        return folder, None
    if form is WeightForm.STORED:
        return packed.open_stored(folder, scheme)
    return packed.dequantize(folder, scheme), None


# ---- The model: its configuration, and the rows that make each of its tensors.


def read_model(settings: ConvertSettings, opened: OpenedTarget) -> tuple[ModelConfig, bool]:
    """Return the model's configuration and whether its head is tied to the embedding.

    Raises SpecDecError where it has problems, or cannot have the form that was chosen.
    """
    layout = Layout(
        dtype=opened.dtype,
        tp_size=settings.tp_size or 1,
        pp_size=settings.pp_size or 1,
        use_parallel_embedding=settings.use_parallel_embedding,
        embedding_sharding_dim=settings.embedding_sharding_dim or 0,
        share_embedding_table=settings.use_embedding_sharing,
        moe_tp_size=settings.moe_tp_size,
        moe_ep_size=settings.moe_ep_size,
        trtllm_version=settings.line,
    )
    model, is_tied = opened.family.read_model(opened.folder, layout)
    if opened.form is WeightForm.BLOCKS and is_tied and model.pp_size == 1:
        is_split = model.tp_size > 1 and model.embedding_sharding_dim == 1
        model = dataclasses.replace(model, share_embedding_table=not is_split)
    model.find_problems().raise_all()
    check_experts(settings, opened, model)
    kinds = {
        "a hybrid of linear and full attention": model.linear_attention,
        "a hybrid of convolutions and attention": model.short_conv,
        "a hybrid of Mamba-2 and attention": model.mamba2,
        "a model whose layers have several sizes": model.layer_sizes,
    }
    kind = next((name for name, sizes in kinds.items() if sizes is not None), None)
    if kind is not None and opened.form in QUANTIZED_FORMS:
        raise SpecDecError(
            f"{opened.folder.path} is {kind}, and {QUANTIZED_FORMS[opened.form]}",
            "leave --quantization out, or give --dequantize: specdec-build --quantization rounds"
            " the layers of such models",
        )
    check_num_layers(model.num_hidden_layers, opened.folder)
    return model, is_tied


def check_experts(settings: ConvertSettings, opened: OpenedTarget, model: ModelConfig) -> None:
    """Raise for flags about experts of a model without, and for a form that experts cannot have."""
    folder = opened.folder
    sizes = [name for name in ("moe_tp_size", "moe_ep_size") if getattr(settings, name) is not None]
    if model.experts is None and sizes:
        raise SpecDecError(
            f"{folder.path} is no mixture of experts: {name_flag(sizes[0])} has no effect",
            "leave it out",
        )
    if model.experts is None:
        return
    if opened.form in QUANTIZED_FORMS:
        raise SpecDecError(
            f"{folder.path} is a mixture of experts, and {QUANTIZED_FORMS[opened.form]}",
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


def map_tensors(
    settings: ConvertSettings,
    opened: OpenedTarget,
    model: ModelConfig,
    problems: Problems,
    *,
    is_tied: bool,
) -> TargetTensors:
    """Find the rows of the folder's tensors that make each tensor of the model."""
    folder, family = opened.folder, opened.family
    specs = list_target_tensors(model)
    num_experts = model.experts.num if model.experts is not None else 1
    source_rows = packed.turn_parts(folder, family.find_source_rows(specs, folder, num_experts))
    ignored = [*family.ignored, *ignore_drafter(settings, folder)]
    if settings.dequantize or opened.form is WeightForm.STORED:
        ignored += packed.find_empty_biases(folder, source_rows)
    if is_tied:
        source_rows = tie_head(family, folder, source_rows)
        ignored.append(HEAD)
    return TargetTensors(
        folder=folder, model=model, specs=specs, source_rows=source_rows, ignored=ignored,
        problems=problems,
    )  # fmt: skip


def ignore_drafter(settings: ConvertSettings, target: HfFolder) -> Sequence[str]:
    """Return patterns of a drafter's tensors in the target's folder, which its converter reads."""
    drafter_option = find_folder(settings)
    for option, method in FOLDERS.items():
        patterns = load_converter(method).IN_TARGET
        drafter_names = [
            name for name in target.tensors
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]  # fmt: skip
        flag = name_flag(option)
        if drafter_names and option != drafter_option:
            raise SpecDecError(
                f"{target.path} holds a drafter besides the target: {join_names(drafter_names)}",
                f"give the folder as {flag} too, to convert both",
            )
        if drafter_names and getattr(settings, option) != settings.model_dir:
            logger.warning(
                "the drafter saved with %s is left out: the one of %s is converted",
                target.path, flag,
            )  # fmt: skip
    return load_converter(FOLDERS[drafter_option]).IN_TARGET if drafter_option else ()


# ---- The weights, by form.

Planner = Callable[[ConvertSettings, OpenedTarget, TargetTensors], PlannedWeights]


def _plan_plain(_: ConvertSettings, __: OpenedTarget, tensors: TargetTensors) -> PlannedWeights:
    """Plan weights of a float type."""
    ranks = tensors.plan(tensors.specs)
    return PlannedWeights(ranks=ranks, plain_ranks=ranks)


def _plan_stored(
    settings: ConvertSettings, opened: OpenedTarget, tensors: TargetTensors
) -> PlannedWeights:
    """Plan the quantized matrices that the folder has, as they are stored."""
    assert opened.stored is not None
    kv_scales = name_kv_scales(settings.line)
    ranks, section = packed.plan_stored(tensors, opened.stored, kv_scales)
    return PlannedWeights(ranks=ranks, plain_ranks=ranks, section=section)


def _plan_blocks(
    settings: ConvertSettings, opened: OpenedTarget, tensors: TargetTensors
) -> PlannedWeights:
    """Plan blocks in the place of the plain weights that they stand for."""
    plain = _plan_plain(settings, opened, tensors)
    if tensors.problems:
        return plain
    ranks, section = keep_blocks(plain.ranks, opened.folder, tensors.model)
    return dataclasses.replace(plain, ranks=ranks, section=section)


def _plan_rounded(
    settings: ConvertSettings, opened: OpenedTarget, tensors: TargetTensors
) -> PlannedWeights:
    """Plan the numbers that --quantization rounds plain weights to."""
    plain = _plan_plain(settings, opened, tensors)
    if tensors.problems:
        return plain
    ranks, section, quantizer = quantize_target(settings, tensors, plain.ranks)
    return dataclasses.replace(plain, ranks=ranks, section=section, quantizer=quantizer)


PLANNERS: Mapping[WeightForm, Planner] = {
    WeightForm.PLAIN: _plan_plain,
    WeightForm.STORED: _plan_stored,
    WeightForm.BLOCKS: _plan_blocks,
    WeightForm.ROUNDED: _plan_rounded,
}


def split_stages(model: ModelConfig, ranks: list[RankPlan]) -> list[RankPlan]:
    """Divide each tensor rank's plan into pipeline stages, whose layers count from 0."""
    stages = []
    for rank in range(model.tp_size * model.pp_size):
        stage_names = {
            name: stage_name for stage_name, name in list_rank_names(model, rank).items()
        }
        layers = {
            _cut_layer(name): _cut_layer(stage_name) for name, stage_name in stage_names.items()
        }
        stage: RankPlan = {}
        for name, tensor in ranks[rank % model.tp_size].items():
            layer = _cut_layer(name)
            if name in stage_names:
                stage[stage_names[name]] = tensor
            elif layer in layers:  # a scale goes with its layer
                stage[layers[layer] + name.removeprefix(layer)] = tensor
            elif f"{name.rpartition('.')[0]}.weight" in stage_names:  # types of an embedding's rows
                stage[name] = tensor
        stages.append(stage)
    return stages


def _cut_layer(name: str) -> str:
    """Return `transformer.layers.1` of `transformer.layers.1.mlp.fc.weight`."""
    return ".".join(name.split(".")[:3])


def read_tokens(folder: HfFolder) -> dict[str, Any] | None:
    """Return a target's vocabulary as `read_vocabulary` does; None, with a warning, if it fails."""
    try:
        path = Path(localize(folder.path))
        vocabulary = read_vocabulary(path)
        if vocabulary is not None and not isinstance(folder, GgufFolder):
            warn_of_other_ids(path)
    except SpecDecError as error:  # the weights can be read
        logger.warning("%s; weights are converted: give --tokenizer-dir when you build", error)
        return None
    return vocabulary


# ---- Checkpoints as targets.


def plan_checkpoint(settings: ConvertSettings, problems: Problems) -> PlannedTarget:
    """Plan to pass an existing checkpoint's tensors on."""
    folder = CheckpointFolder(need(settings.base_model_checkpoint_dir))
    model = folder.model
    if settings.tp_size is not None and settings.tp_size != model.tp_size:
        raise SpecDecError(
            f"--tp-size is {settings.tp_size}, but {folder.path} has tp_size {model.tp_size}",
            "leave --tp-size out, or convert the target again with the one you want",
        )
    is_parallel, sharding_dim = model.use_parallel_embedding, model.embedding_sharding_dim
    asked_dim = settings.embedding_sharding_dim or 0
    if settings.use_parallel_embedding and (True, asked_dim) != (is_parallel, sharding_dim):
        raise SpecDecError(
            f"--use-parallel-embedding with dimension {asked_dim} is asked for, but {folder.path}"
            f" has use_parallel_embedding {str(is_parallel).lower()}, embedding_sharding_dim"
            f" {sharding_dim}",
            "leave the options out, or convert the target again with them",
        )
    if folder.is_head_quantized and settings.line == "0.14":
        raise SpecDecError(
            f"{folder.path} has a quantized lm_head, which TensorRT-LLM 0.14 cannot load",
            "convert for 1.2, or quantize the target again without its head",
        )
    ranks = folder.plan(problems)
    return PlannedTarget(
        model=model,
        config=checkpoint_config.adapt_config(folder.config, settings.line),
        ranks=ranks,
        plain_ranks=ranks,
        files=folder.files,
        vocabulary=read_recorded(folder.path),
        is_head_quantized=folder.is_head_quantized,
    )
