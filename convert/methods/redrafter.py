"""ReDrafter: a drafter folder -> the `drafter.*` tensors and `redrafter_*` keys of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import Problems, SpecDecError, join_names
from specdec.methods.redrafter import METHOD, ReDrafterConvert, ReDrafterParams
from specdec.model.config_reader import ConfigReader
from specdec.options import as_options

from ..config import PLAIN_DEFAULTS, drop_default_keys
from ..hf import HfFolder
from ..plan import SourceRows, check_num_layers
from .base import Config, DrafterConverter, check_sizes, exclude_modules, take_naming

# The published trainers' names of the residual layers and the head, `HEADS.0.linear`, ...,
# `HEADS.N`, and the names of the input projection that each goes with. The first is Apple's.
NAMINGS: dict[str, tuple[str, ...]] = {
    "lm_head": ("input_proj",),
    "lm_heads": ("input_projs",),
    "0": ("input_proj", "input_projs"),
}
# Fields in which a trainer records how many tokens the drafter learned to predict.
TRAINED_LENGTH_FIELDS = ("predict_n_tokens", "num_draft_tokens")


def _find_root(folder: HfFolder, roots: Sequence[str], description: str) -> str:
    """Return the one name out of `roots` that the folder's tensors begin with."""
    present_roots = {name.split(".")[0] for name in folder.tensors}
    patterns = {root: f"{root}.*" for root in roots}
    return take_naming(
        folder, present_roots, patterns, f"the drafter's {description}", "a ReDrafter drafter"
    )


def check_disagreements(folder: HfFolder, params: ReDrafterParams) -> None:
    """Raise SpecDecError where tensors contradict a field of config.json by being there or not."""
    problems = Problems()
    rnn_tensors = sorted(
        name for name in folder.tensors if name.split(".")[0] in ("rnn_u", "rnn_w")
    )
    if rnn_tensors and not params.is_rnn:
        problems.add(
            f"{folder.path}: config.json says rnn is false, but there is {join_names(rnn_tensors)}",
            "set rnn to true, or remove the tensors",
        )
    names = {name for inputs in NAMINGS.values() for name in inputs}
    projections = sorted(name for name in folder.tensors if name.split(".")[0] in names)
    if projections and not params.has_input_proj:
        problems.add(
            f"{folder.path}: exit_dim {params.exit_dim} is twice hidden_size"
            f" {params.hidden_size}, which needs no input projection, but there is"
            f" {join_names(projections)}",
            "correct exit_dim, or remove the tensors",
        )
    problems.raise_all()


def list_modules(params: ReDrafterParams, *, is_quantized: bool) -> list[str]:
    """Return the drafter's modules for a list of excluded ones.

    The input projection, which NVIDIA's converter forgets, matters to a quantized target only.
    """
    modules = ["drafter", "drafter.layers", "drafter.lm_head"]
    if params.is_rnn:
        modules += ["drafter.rnn_u", "drafter.rnn_w"]
    for layer in range(params.num_layers):
        modules += [f"drafter.layers.{layer}", f"drafter.layers.{layer}.linear"]
    if is_quantized and params.has_input_proj:
        modules.append("drafter.input_proj")
    return modules


class ReDrafterConverter(DrafterConverter):
    """Converter of a drafter's folder, of which every tensor counts."""

    METHOD = METHOD
    params: ReDrafterParams

    def read_params(self) -> ReDrafterParams:
        """Return the drafter's parameters; raise SpecDecError where they do not suit the target."""
        folder, model = self.folder, self.model
        options = as_options(self.settings, ReDrafterConvert)
        reader = ConfigReader(folder.config, folder.path)
        params = ReDrafterParams(
            num_layers=reader.get_int("num_draft_layers", minimum=0),
            hidden_size=reader.get_int("hidden_size"),
            exit_dim=reader.get_int("exit_dim"),
            is_rnn=reader.get_bool("rnn"),
            num_beams=options.redrafter_num_beams or 5,
            draft_len_per_beam=options.redrafter_draft_len_per_beam or 5,
            greedy_search=not options.redrafter_no_greedy_search,
        )
        vocab_size = reader.get_int("vocab_size", model.vocab_size)
        trained_lengths = {
            name: reader.get_int(name)
            for name in TRAINED_LENGTH_FIELDS
            if reader.config.get(name) is not None
        }
        reader.finish()
        sizes = {"hidden_size": params.hidden_size, "vocab_size": vocab_size}
        check_sizes(reader, "the drafter's", sizes, model)
        for name, trained in trained_lengths.items():
            if params.draft_len_per_beam > trained:
                reader.refuse(
                    f"draft_len_per_beam is {params.draft_len_per_beam}, but the drafter was"
                    f" trained to predict {trained} tokens ({name})",
                    f"give --redrafter-draft-len-per-beam {trained} or less",
                )
        reader.finish()
        check_num_layers(params.num_layers, folder)
        return params

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the folder's; more than one naming there is an error."""
        folder, params = self.folder, self.params
        check_disagreements(folder, params)
        heads = _find_root(folder, tuple(NAMINGS), "layers and head")
        inputs = NAMINGS[heads]
        foreign = {name for names in NAMINGS.values() for name in names} - set(inputs)
        mixed = [name for name in folder.tensors if name.split(".")[0] in foreign]
        if mixed:
            raise SpecDecError(
                f"{folder.path} mixes two namings: {heads}.* and {join_names(mixed)}",
                f"name the input projection {' or '.join(inputs)}, or remove what is not the"
                " drafter's",
            )
        input_proj = inputs[0]
        if params.has_input_proj and len(inputs) > 1:
            input_proj = _find_root(folder, inputs, "input projection")
        roots = {"input_proj": input_proj, "layers": heads, "rnn_u": "rnn_u", "rnn_w": "rnn_w"}
        sources: dict[str, tuple[SourceRows, ...]] = {}
        for name in canonical:
            root, _, inner_name = name.removeprefix("drafter.").partition(".")
            if root == "lm_head":
                sources[name] = (SourceRows(f"{heads}.{params.num_layers}.{inner_name}"),)
            else:
                sources[name] = (SourceRows(f"{roots[root]}.{inner_name}"),)
        return sources

    def add_to_config(self, config: Config, *, is_head_quantized: bool) -> Config:
        """Return a target's config.json with the drafter's keys and architecture."""
        target = config["architecture"]
        pair = self.choose_pair(target)
        base, architecture = pair or (target, *METHOD.own_architectures)
        combined = dict(config)
        if (
            self.settings.line == "0.14"
        ):  # whose ReDrafter config knows no more than these by default
            combined = drop_default_keys(combined, PLAIN_DEFAULTS)
        combined |= {
            "architecture": architecture,
            "base_model_architecture": base,
            **self.params.to_checkpoint(),
        }
        quantization = combined.get("quantization") or {}
        modules = list_modules(self.params, is_quantized=quantization.get("quant_algo") is not None)
        return exclude_modules(combined, modules, is_head_quantized=is_head_quantized)


CONVERTER = ReDrafterConverter
