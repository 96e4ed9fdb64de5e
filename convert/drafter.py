"""Drafter of a conversion: its folder is opened, its tensors are planned beside the target's."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import parse_checkpoint_config
from specdec.errors import Problems
from specdec.files.acceptance import Acceptance, read_acceptance
from specdec.files.casts import FLOATS
from specdec.files.folders import MODEL, is_hub_id
from specdec.files.origin import Origin, read_origin
from specdec.files.tensor_file import TensorInfo
from specdec.methods.base import USE_ITS_DRAFTER
from specdec.model.tensors import (
    EMBEDDING,
    HEAD,
    get_rank_shape,
    list_target_tensors,
)
from specdec.options import name_flag
from specdec.system import logs

from .flags import check_settings
from .methods import FOLDERS, load_converter
from .methods.base import DrafterConverter
from .methods.mtp import prepare_head
from .plan import PlannedTensor, RankPlan, collect, plan_tensors
from .quantize.sections import refuse_quantized
from .resolve import open_model
from .settings import ConvertSettings
from .target import MTP_FOLDER, PlannedTarget, takes_own_head

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedDrafter:
    """A planned drafter: the config.json of both models, its tensors for each rank, its files.

    acceptance: the acceptance that was counted of it before, as its folder has it.
    """

    config: dict[str, Any]
    ranks: list[RankPlan]
    files: list[Path]
    origin: Origin
    acceptance: Acceptance | None


def fetch_drafter(settings: ConvertSettings) -> Path | None:
    """Fetch the drafter of a Hub id whose method is not given; return its folder."""
    names = [getattr(settings, option) for option in FOLDERS if getattr(settings, option)]
    name = settings.drafter_model_dir  # type: ignore[attr-defined]
    if names != [name] or Path(name).exists() or not is_hub_id(name):
        return None
    check_settings(settings)  # before anything is fetched
    return open_model(name, "--drafter-model-dir", kind=None).path


def plan_drafter(
    settings: ConvertSettings, option: str, target: PlannedTarget, problems: Problems
) -> PlannedDrafter:
    """Plan the drafter whose folder an option names; append what is wrong to `problems`."""
    kind = MODEL if takes_own_head(settings) else FOLDERS[option].name
    folder = open_model(getattr(settings, option), name_flag(option), kind)
    if kind != MODEL:
        refuse_quantized(folder)
    shapes = (spec.shape for spec in list_target_tensors(target.model).values())
    num_parameters = sum(map(math.prod, shapes))
    origin = read_origin(
        folder.path, folder.config, target.files, settings.model_dir, num_parameters
    )
    config = target.config
    ranks: list[RankPlan] = [{} for _ in target.ranks]
    acceptance = None
    with collect(problems):
        acceptance = read_acceptance(folder.path)
        if option == MTP_FOLDER:
            folder = prepare_head(folder, target.model)
        converter = load_converter(FOLDERS[option])(folder, settings, target.model)
        config = converter.add_to_config(target.config, is_head_quantized=target.is_head_quantized)
        # Raises where the drafter is not of this target, or tp_size does not divide its sizes:
        # else each of its tensors would be reported again.
        parse_checkpoint_config(config)
        ranks = _plan_ranks(converter, target, problems)
    return PlannedDrafter(
        config=config, ranks=ranks, files=folder.files, origin=origin, acceptance=acceptance
    )


def _plan_ranks(
    converter: DrafterConverter, target: PlannedTarget, problems: Problems
) -> list[RankPlan]:
    """Plan the drafter's tensors for each rank: from its own folder, or shared with the target."""
    folder, model = converter.folder, target.model
    dtype = _choose_dtype(converter.settings, model.dtype)
    specs = converter.params.list_tensors(model)
    shared_names = converter.share_tensors(list(specs))
    folder_specs = {name: spec for name, spec in specs.items() if name not in shared_names}
    ranks = plan_tensors(
        folder_specs, converter.find_source_rows(list(folder_specs)), folder, model=model,
        dtype=dtype, ignored=converter.list_ignored(), problems=problems,
    )  # fmt: skip
    for rank, target_rank in zip(ranks, target.plain_ranks, strict=True):
        for name, target_name in shared_names.items():
            info = TensorInfo(dtype, get_rank_shape(specs[name], model))
            if target_name == HEAD and model.share_embedding_table:
                target_name = EMBEDDING
            tensor = share_tensor(target_rank, target_name, info)
            if tensor is not None:
                rank[name] = tensor
            else:
                problems.add(
                    f"{folder.path} does not hold what makes {name}, and the target has no"
                    f" {target_name} {list(info.shape)} to take its place",
                    USE_ITS_DRAFTER,
                )
    return ranks


def _choose_dtype(settings: ConvertSettings, target_dtype: str) -> str:
    """Return the type of the drafter's weights; warn where it is not the target's."""
    dtype = settings.dtype
    if settings.base_model_checkpoint_dir is None or dtype == "auto":
        return target_dtype
    if dtype != target_dtype:
        logger.warning(
            "the drafter is written as %s beside a %s target; engines need one dtype: leave --dtype"
            " out to have it",
            dtype, target_dtype,
        )  # fmt: skip
    return dtype


def share_tensor(target_rank: RankPlan, name: str | None, info: TensorInfo) -> PlannedTensor | None:
    """Return a drafter's tensor made from a target's, or of zeros where `name` is None.

    None where the target has no such tensor of the drafter's shape and of a float type.
    """
    if name is None:
        return PlannedTensor(info, ())
    tensor = target_rank.get(name)
    if tensor is None or tensor.info.shape != info.shape or tensor.info.dtype not in FLOATS:
        return None
    return PlannedTensor(info, tensor.slices)
