"""MTP: the head of a folder, mostly the target's own -> the `mtp.*` tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec import logs
from specdec.errors import SpecDecError, join_names
from specdec.files.reading import Array
from specdec.methods.mtp import FORMS, METHOD, Form, MtpConvert, MtpParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import EMBEDDING, HEAD, HEAD_BIAS, MTP_NET
from specdec.options import as_options

from ..families import find_family
from ..families.base import ROTARY_BUFFERS
from ..hf import HfFolder
from ..plan import Computed, Part
from ..wrappers import unwrap
from .base import list_held, name_own_architecture

if TYPE_CHECKING:
    from ..settings import ConvertSettings

logger = logs.get_logger(__name__)

IN_TARGET: tuple[str, ...] = ()  # what is left out of a target is told by `list_head`

FINAL_NORM = "transformer.ln_f.weight"
FIRST = "model.layers.0."  # what the names of a layer begin with in every family that has a head
_LAYER, _GLM = (re.compile(rf"model\.layers\.(\d+)\.{rest}") for rest in ("", "eh_proj"))
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_DRAFTER = f"{MTP_NET}drafter."


def find_form(folder: HfFolder) -> tuple[Form, str] | None:
    """How a folder names its head, and what all its names begin with; None where it has none."""
    layers = [int(found[1]) for name in folder.tensors if (found := _GLM.match(name))]
    for form in FORMS.values():
        prefix = form.prefix.format(layer=min(layers, default=0))
        if f"{prefix}{form.names['fc']}.weight" in folder.tensors:
            return form, prefix
    return None


def list_head(folder: HfFolder) -> list[str]:
    """The tensors of a folder that are those of a head, of one layer or several."""
    found = find_form(folder)
    if found is None:
        return []
    form, prefix = found
    if form is not FORMS["glm"]:
        return [name for name in folder.tensors if name.startswith(prefix.removesuffix("0."))]
    layers = {name: _LAYER.match(name) for name in folder.tensors}
    first = int(prefix.split(".")[2])
    return [name for name, layer in layers.items() if layer and int(layer[1]) >= first]


def leave_head(folder: HfFolder, *, is_converted: bool) -> HfFolder:
    """Return a target's folder without its head; say so unless that is converted, too."""
    head = list_head(folder)
    if head and is_converted:
        logger.info("%s: it holds a head that drafts, of %d tensors", folder.path, len(head))
    elif head:
        logger.info(
            "%s: %d tensors of a head that drafts (%s) are left out: give %s to have it",
            folder.path, len(head), head[0], "--speculative-decoding-mode mtp",
        )  # fmt: skip
    return folder.select(folder.tensors.keys() - head) if head else folder


def prepare_head(folder: HfFolder, model: ModelConfig) -> HfFolder:
    """Return the head's tensors alone, `fc` with the columns of the embedding first."""
    unwrap(folder)
    folder = find_family(folder).prepare(folder, model.dtype)
    found = find_form(folder)
    if found is None:
        signs = [f"{f.prefix}{f.names['fc']}.weight" for f in FORMS.values()]
        raise SpecDecError(
            f"{folder.path} holds no head for multi-token prediction, which has one of"
            f" {', '.join(signs).format(layer='N')}; it holds {list_held(folder)}",
            "give a model that was published with its head; or train one with specdec-train"
            " --method mtp, and give its folder as --mtp-model-dir",
        )
    form, prefix = found
    folder = folder.select(list_head(folder))
    start, names = prefix + form.layer, form.names.values()
    own = [f"{prefix}{name}." for name in names] + [start]
    if others := sorted(name for name in folder.tensors if not name.startswith(tuple(own))):
        raise SpecDecError(
            f"{folder.path} holds a head of more than one layer: {join_names(others)}",
            "only heads of one layer are supported, which is applied again for each token",
        )
    if not form.is_reversed:
        return folder
    name, source = f"{prefix}{form.names['fc']}.weight", folder

    def swap(_: str, first: int, last: int, columns: tuple[int, int] | None) -> Array:
        rows = source.read_block(name, first, last)
        rows = np.roll(rows, rows.shape[1] // 2, axis=1)
        return rows if columns is None else rows[:, slice(*columns)]

    return folder.substitute(Computed(folder, {name: folder.tensors[name]}, swap), [name])


def read_params(folder: HfFolder, settings: ConvertSettings, model: ModelConfig) -> MtpParams:
    """Return the head's parameters; raise SpecDecError for a target that has no such layers."""
    own = model.arithmetic
    if own.norm != "rms" or own.positions != "rotary" or own.is_parallel or own.is_post_norm:
        raise SpecDecError(
            f"{model.architecture} has layer norms, learned positions, or attention and MLP side by"
            " side, and no head for multi-token prediction is known for it",
            "use another method",
        )
    found = find_form(folder)
    assert found is not None
    return MtpParams(
        max_draft_len=as_options(settings, MtpConvert).mtp_max_draft_len or 8,
        blanks_first=found[0].is_reversed,
    )


def _name_modules(folder: HfFolder) -> dict[str, str]:
    """Our names of what is not in the layer -> the folder's."""
    found = find_form(folder)
    assert found is not None
    form, prefix = found
    named = {
        f"{_DRAFTER}{ours}.weight": f"{prefix}{own}.weight" for ours, own in form.names.items()
    }
    head = named.pop(f"{_DRAFTER}lm_head.weight", "")
    return named | {f"{MTP_NET}{HEAD}": head, f"{MTP_NET}{HEAD_BIAS}": ""}


def share_tensors(
    folder: HfFolder, params: MtpParams, canonical: Sequence[str]
) -> dict[str, str | None]:
    """What the folder does not hold: the target's embedding and head."""
    named = _name_modules(folder)
    targets = {
        f"{_DRAFTER}vocab_embedding.weight": EMBEDDING,
        f"{MTP_NET}{HEAD}": HEAD,
        f"{MTP_NET}{HEAD_BIAS}": HEAD_BIAS,
    }
    return {name: targets[name] for name in canonical
            if name in targets and named.get(name) not in folder.tensors}  # fmt: skip


def find_sources(
    folder: HfFolder, params: MtpParams, canonical: Sequence[str]
) -> dict[str, tuple[Part, ...]]:
    """Map canonical tensor names to the folder's; those of the layer are its family's."""
    named, family = _name_modules(folder), find_family(folder)
    (norm,) = family.find_sources([FINAL_NORM])[FINAL_NORM]
    sources: dict[str, tuple[Part, ...]] = {  # norms are stored as the target's
        name: (Part(named[name], added=norm.added if "norm" in name or "ln_f" in name else 0.0),)
        for name in canonical
        if name in named
    }
    form, prefix = find_form(folder) or (FORMS["qwen"], "")
    start = prefix + form.layer
    view = folder.select(())
    view.tensors = {
        FIRST + name.removeprefix(start): info
        for name, info in folder.tensors.items() if name.startswith(start)
    }  # fmt: skip
    layer = {
        name: f"transformer.{name.removeprefix(_DRAFTER)}"
        for name in canonical if name not in named
    }  # fmt: skip
    numbers = [int(number[1]) for name in view.tensors if (number := _EXPERT.search(name))]
    fused = [info.shape[0] for name, info in view.tensors.items() if name.endswith("gate_up_proj")]
    num_experts = 1 + max(numbers) if numbers else max(fused, default=1)
    found = family.find_sources(layer.values(), view, num_experts)
    for name, own in layer.items():
        sources[name] = tuple(
            dataclasses.replace(part, name=start + part.name.removeprefix(FIRST))
            for part in found[own]
        )
    return sources


def list_ignored(folder: HfFolder, params: MtpParams) -> Sequence[str]:
    """Rotary tables, which follow from the rest."""
    return ROTARY_BUFFERS


add_to_config = functools.partial(name_own_architecture, METHOD, MTP_NET)
