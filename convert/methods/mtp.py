"""MTP: the head of a folder, mostly the target's own -> the `mtp.*` tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from specdec.errors import SpecDecError, join_names
from specdec.methods.mtp import FORMS, METHOD, MODULES, NORMS, Form, MtpConvert, MtpParams
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, count_experts, read_rotary
from specdec.model.tensors import HEAD, HEAD_BIAS, MTP_NET
from specdec.options import as_options
from specdec.system import logs

from ..families import find_family
from ..families.base import ROTARY_BUFFERS
from ..hf import HfFolder
from ..plan import SourceRows
from ..quantize import packed
from ..quantize.sections import read_scheme
from ..wrappers import unwrap
from .base import NetConverter, name_tensors

logger = logs.get_logger(__name__)

_LAYER, _GLM = (re.compile(rf"model\.layers\.(\d+)\.{end}") for end in ("", "eh_proj"))
# `prepare_head` gives every head Qwen's names, and notes whether its `fc` is MiMo's.
QWEN, IS_REVERSED = FORMS["qwen"], "mtp_is_reversed"
STEMS = {module: f"{QWEN.prefix}{QWEN.names.get(module, module)}." for module in MODULES}


def find_form(folder: HfFolder) -> tuple[Form, str] | None:
    """Return the form of a folder's head and the prefix of its names; None where it has none."""
    layers = [int(match[1]) for name in folder.tensors if (match := _GLM.match(name))]
    for form in FORMS.values():
        prefix = form.prefix.format(layer=min(layers, default=0))
        if f"{prefix}{form.names['fc']}.weight" in folder.tensors:
            return form, prefix
    return None


def list_head(folder: HfFolder) -> list[str]:
    """Return the tensors of a folder that are those of a head, of one layer or several."""
    form_and_prefix = find_form(folder)
    if form_and_prefix is None:
        return []
    form, prefix = form_and_prefix
    if form is not FORMS["glm"]:
        return [name for name in folder.tensors if name.startswith(prefix.removesuffix("0."))]
    layers = {name: _LAYER.match(name) for name in folder.tensors}
    first_layer = int(prefix.split(".")[2])
    return [name for name, layer in layers.items() if layer and int(layer[1]) >= first_layer]


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
    """Return a folder of the head's tensors alone, by Qwen's names."""
    folder = _dequantize_head(unwrap(folder))
    folder = find_family(folder).prepare(folder, model.dtype)
    form_and_prefix = find_form(folder)
    if form_and_prefix is None:
        signs = [f"{f.prefix}{f.names['fc']}.weight" for f in FORMS.values()]
        raise SpecDecError(
            f"{folder.path} holds no head for multi-token prediction, which has one of"
            f" {', '.join(signs).format(layer='N')}; it holds {name_tensors(folder)}",
            "give a model that was published with its head; or train one with specdec-train"
            " --method mtp, and give its folder as --mtp-model-dir",
        )
    form, prefix = form_and_prefix
    stems = {f"{prefix}{name}.": STEMS[module] for module, name in form.names.items()}
    stems[prefix + form.layer] = QWEN.prefix + QWEN.layer
    names, unknown_names = {}, []
    for name in list_head(folder):
        start = next((start for start in stems if name.startswith(start)), None)
        if start is None:
            unknown_names.append(name)
        else:
            names[name] = stems[start] + name.removeprefix(start)
    if unknown_names:
        raise SpecDecError(
            f"{folder.path} holds a head of more than one layer:"
            f" {join_names(sorted(unknown_names))}",
            "only heads of one layer are supported, which is applied again for each token",
        )
    folder = folder.select(names)
    folder.rename(names, left_out=())
    folder.config = folder.config | {IS_REVERSED: form.is_reversed}
    return folder


def _dequantize_head(folder: HfFolder) -> HfFolder:
    """Return a folder whose head has plain weights, where those of the model are quantized."""
    scheme = read_scheme(folder)
    head = folder.select(list_head(folder))
    if scheme is None or not scheme.find_modules(head):
        return folder
    return packed.dequantize(head, scheme)


class MtpConverter(NetConverter):
    """Converter of a folder with a head; `list_head` names what is left out of a target."""

    METHOD, NET, PREFIX = METHOD, MTP_NET, QWEN.prefix

    def read_params(self) -> MtpParams:
        """Return the head's parameters; raise SpecDecError where the target can have no head."""
        arithmetic = self.model.arithmetic
        if (
            arithmetic.norm != "rms"
            or arithmetic.positions != "rotary"
            or arithmetic.is_parallel
            or arithmetic.is_post_norm
        ):
            raise SpecDecError(
                f"{self.model.architecture} has layer norms, learned positions, or attention and"
                " MLP side by side, and no head for multi-token prediction is known for it",
                "use another method",
            )
        reader = ConfigReader(self.folder.config, self.folder.path)
        base = read_rotary(reader).base
        if base not in (None, self.model.rotary_base):
            raise SpecDecError(
                f"{self.folder.path / 'config.json'}: the head's rope_theta is {base:g}, the"
                f" target's {self.model.rotary_base:g}, by which it would draft",
                "give the head that was trained for this target",
            )
        return MtpParams(
            max_draft_len=as_options(self.settings, MtpConvert).mtp_max_draft_len or 8,
            is_reversed=self.folder.config[IS_REVERSED],
        )

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the folder's; those of the layer are its family's."""
        folder = self.folder
        extras = {name: QWEN.prefix + name for name in (HEAD, HEAD_BIAS)}
        extras |= {f"drafter.{name}.weight": f"{STEMS[name]}weight" for name in ("fc", *NORMS)}
        family = dataclasses.replace(find_family(folder), prefixes=("model.", QWEN.prefix))
        num_experts = count_experts(ConfigReader(folder.config, folder.path), 1)
        sources = self.find_net_source_rows(family, canonical, extras, folder, num_experts)
        (norm,) = sources[f"{MTP_NET}drafter.ln_f.weight"]
        for name in NORMS:  # stored as the target's
            norm_name = f"{MTP_NET}drafter.{name}.weight"
            sources[norm_name] = (dataclasses.replace(*sources[norm_name], addend=norm.addend),)
        return sources

    def list_ignored(self) -> Sequence[str]:
        """Return patterns of rotary tables, which follow from other values."""
        return ROTARY_BUFFERS


CONVERTER = MtpConverter
