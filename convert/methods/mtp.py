"""MTP: the head of a folder, mostly the target's own -> the `mtp.*` tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from specdec.errors import SpecDecError, join_names
from specdec.methods.mtp import FORMS, METHOD, MODULES, NORMS, Form, MtpConvert, MtpParams
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, count_experts
from specdec.model.tensors import HEAD, HEAD_BIAS, MTP_NET
from specdec.options import as_options
from specdec.system import logs

from ..families import find_family
from ..families.base import ROTARY_BUFFERS
from ..hf import HfFolder
from ..plan import SourceRows
from ..wrappers import unwrap
from .base import NetConverter, list_held

logger = logs.get_logger(__name__)

_LAYER, _GLM = (re.compile(rf"model\.layers\.(\d+)\.{rest}") for rest in ("", "eh_proj"))
# `prepare_head` gives every head Qwen's names, and notes whether its `fc` is MiMo's.
QWEN, IS_REVERSED = FORMS["qwen"], "mtp_is_reversed"
STEMS = {ours: f"{QWEN.prefix}{QWEN.names.get(ours, ours)}." for ours in MODULES}


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
    """Return the head's tensors alone by Qwen's names."""
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
    known = {f"{prefix}{own}.": STEMS[ours] for ours, own in form.names.items()}
    known[prefix + form.layer] = QWEN.prefix + QWEN.layer
    names, others = {}, []
    for name in list_head(folder):
        start = next((start for start in known if name.startswith(start)), None)
        if start is None:
            others.append(name)
        else:
            names[name] = known[start] + name.removeprefix(start)
    if others:
        raise SpecDecError(
            f"{folder.path} holds a head of more than one layer: {join_names(sorted(others))}",
            "only heads of one layer are supported, which is applied again for each token",
        )
    folder = folder.select(names)
    folder.rename(names, left_out=())
    folder.config = folder.config | {IS_REVERSED: form.is_reversed}
    return folder


class Converter(NetConverter):
    """A head's folder; what is left out of a target is told by `list_head`."""

    METHOD, NET, PREFIX = METHOD, MTP_NET, QWEN.prefix

    def read_params(self) -> MtpParams:
        own = self.model.arithmetic
        if own.norm != "rms" or own.positions != "rotary" or own.is_parallel or own.is_post_norm:
            raise SpecDecError(
                f"{self.model.architecture} has layer norms, learned positions, or attention and"
                " MLP side by side, and no head for multi-token prediction is known for it",
                "use another method",
            )
        return MtpParams(
            max_draft_len=as_options(self.settings, MtpConvert).mtp_max_draft_len or 8,
            is_reversed=self.folder.config[IS_REVERSED],
        )

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        """The same; the names of the layer are its family's."""
        folder = self.folder
        extras = {name: QWEN.prefix + name for name in (HEAD, HEAD_BIAS)}
        extras |= {f"drafter.{ours}.weight": f"{STEMS[ours]}weight" for ours in ("fc", *NORMS)}
        family = dataclasses.replace(find_family(folder), prefixes=("model.", QWEN.prefix))
        num_experts = count_experts(ConfigReader(folder.config, folder.path), 1)
        sources = self.find_net_source_rows(family, canonical, extras, folder, num_experts)
        (norm,) = sources[f"{MTP_NET}drafter.ln_f.weight"]
        for name in NORMS:  # stored as the target's
            own = f"{MTP_NET}drafter.{name}.weight"
            sources[own] = (dataclasses.replace(*sources[own], added=norm.added),)
        return sources

    def list_ignored(self) -> Sequence[str]:
        """Rotary tables, which follow from the rest."""
        return ROTARY_BUFFERS
