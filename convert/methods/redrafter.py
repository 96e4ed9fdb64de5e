"""ReDrafter: a drafter folder -> the `drafter.*` tensors and `redrafter_*` keys of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import SpecDecError, raise_problems
from specdec.methods import ReDrafterParams

from ..config import MOE_014, drop_default_keys
from ..hf import ConfigReader, HfFolder
from ..plan import join_names

# How the published trainers name the residual layers and the head, `HEADS.0.linear`, ...,
# `HEADS.N`, and with which name of the input projection each goes together. The first is Apple's.
NAMINGS: dict[str, tuple[str, ...]] = {
    "lm_head": ("input_proj",),
    "lm_heads": ("input_projs",),
    "0": ("input_proj", "input_projs"),
}
# Fields in which a trainer records how many tokens the drafter learned to predict.
TRAINED_LENGTH_FIELDS = ("predict_n_tokens", "num_draft_tokens")

ARCHITECTURES_1X = {"LlamaForCausalLM": "ReDrafterForLLaMALM"}
ARCHITECTURE_014 = "ReDrafterForCausalLM"

# What TensorRT-LLM excludes from quantization where a checkpoint lists nothing.
DEFAULT_EXCLUDED = (
    "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding",
    "*shared_expert_gate",
)  # fmt: skip


def read_params(
    folder: HfFolder,
    *,
    num_beams: int | None,
    draft_len_per_beam: int | None,
    greedy_search: bool,
    target_hidden_size: int,
    target_vocab_size: int,
) -> ReDrafterParams:
    """Read the drafter's config.json; raise SpecDecError where it does not suit the target."""
    reader = ConfigReader(folder.config, folder.path)
    params = ReDrafterParams(
        num_layers=reader.get_int("num_draft_layers", minimum=0),
        hidden_size=reader.get_int("hidden_size"),
        exit_dim=reader.get_int("exit_dim"),
        is_rnn=reader.get_bool("rnn"),
        num_beams=num_beams or 5,
        draft_len_per_beam=draft_len_per_beam or 5,
        greedy_search=greedy_search,
    )
    vocab_size = reader.get_int("vocab_size", target_vocab_size)
    trained_lengths = {
        name: reader.get_int(name)
        for name in TRAINED_LENGTH_FIELDS
        if reader.config.get(name) is not None
    }
    reader.finish()
    sizes = (
        ("hidden_size", params.hidden_size, target_hidden_size),
        ("vocab_size", vocab_size, target_vocab_size),
    )
    for name, ours, targets in sizes:
        if ours != targets:
            reader.refuse(
                f"the drafter's {name} is {ours}, the target's {targets}",
                "use the drafter that was trained for this target",
            )
    for name, trained in trained_lengths.items():
        if params.draft_len_per_beam > trained:
            reader.refuse(
                f"draft_len_per_beam is {params.draft_len_per_beam}, but the drafter was trained"
                f" to predict {trained} tokens ({name})",
                f"give --redrafter-draft-len-per-beam {trained} or less",
            )
    reader.finish()
    return params


def find_sources(
    folder: HfFolder, params: ReDrafterParams, canonical: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Map canonical tensor names to the folder's; more than one naming in it is an error."""
    heads = _find_root(folder, tuple(NAMINGS), "layers and head")
    inputs = NAMINGS[heads]
    foreign = {name for names in NAMINGS.values() for name in names} - set(inputs)
    mixed = [name for name in folder.tensors if name.split(".")[0] in foreign]
    if mixed:
        raise SpecDecError(
            f"{folder.path} mixes two namings: {heads}.* and {join_names(mixed)}",
            f"name the input projection {' or '.join(inputs)}, or remove what is not the drafter's",
        )
    input_proj = inputs[0]
    if params.has_input_proj and len(inputs) > 1:
        input_proj = _find_root(folder, inputs, "input projection")
    roots = {"input_proj": input_proj, "layers": heads, "rnn_u": "rnn_u", "rnn_w": "rnn_w"}
    sources: dict[str, tuple[str, ...]] = {}
    for name in canonical:
        root, _, rest = name.removeprefix("drafter.").partition(".")
        if root == "lm_head":
            sources[name] = (f"{heads}.{params.num_layers}.{rest}",)
        else:
            sources[name] = (f"{roots[root]}.{rest}",)
    return sources


def _find_root(folder: HfFolder, known: Sequence[str], what: str) -> str:
    """Return the one name out of `known` that the folder's tensors begin with."""
    present = {name.split(".")[0] for name in folder.tensors}
    found = [root for root in known if root in present]
    if len(found) > 1:
        raise SpecDecError(
            f"{folder.path} holds the drafter's {what} under {len(found)} names:"
            f" {', '.join(root + '.*' for root in found)}",
            "keep one of them: which is the trained one cannot be known",
        )
    if not found:
        names = sorted(folder.tensors)
        raise SpecDecError(
            f"{folder.path} holds no tensor of the drafter's {what},"
            f" {' or '.join(root + '.*' for root in known)}; it holds"
            f" {join_names(names) if names else 'no tensors'}",
            "give the folder of a ReDrafter drafter",
        )
    return found[0]


def check_disagreements(folder: HfFolder, params: ReDrafterParams) -> None:
    """Raise SpecDecError where tensors contradict a field of config.json by being there or not."""
    problems = []
    present = sorted(name for name in folder.tensors if name.split(".")[0] in ("rnn_u", "rnn_w"))
    if present and not params.is_rnn:
        problems.append(
            (
                f"{folder.path}: config.json says rnn is false, but there is {join_names(present)}",
                "set rnn to true, or remove the tensors",
            )
        )
    names = {name for inputs in NAMINGS.values() for name in inputs}
    present = sorted(name for name in folder.tensors if name.split(".")[0] in names)
    if present and not params.has_input_proj:
        problems.append(
            (
                f"{folder.path}: exit_dim {params.exit_dim} is twice hidden_size"
                f" {params.hidden_size}, which needs no input projection, but there is"
                f" {join_names(present)}",
                "mend exit_dim, or remove the tensors",
            )
        )
    raise_problems(problems)


def add_to_config(
    config: Mapping[str, Any], params: ReDrafterParams, version: str, *, is_head_quantized: bool
) -> dict[str, Any]:
    """Return a target's config.json with the drafter added."""
    base = config["architecture"]
    if base not in ARCHITECTURES_1X:
        raise SpecDecError(
            f"TensorRT-LLM has no ReDrafter for {base}",
            f"the targets it has one for are {', '.join(ARCHITECTURES_1X)}",
        )
    combined = dict(config)
    if version == "0.14":
        # That line's ReDrafter config knows no more than these by default.
        combined = drop_default_keys(
            combined,
            {
                "mlp_bias": False,
                "attn_bias": False,
                "residual_mlp": False,
                "disable_weight_only_quant_plugin": False,
                "moe": MOE_014,
                "remove_duplicated_kv_heads": False,
            },
        )
    combined |= {
        "architecture": ARCHITECTURE_014 if version == "0.14" else ARCHITECTURES_1X[base],
        "base_model_architecture": base,
        **params.to_checkpoint(),
    }
    quantization = dict(combined.get("quantization") or {})
    excluded = _list_excluded(quantization, params, is_head_quantized=is_head_quantized)
    if excluded is not None:
        combined["quantization"] = quantization | {"exclude_modules": excluded}
    return combined


def _list_excluded(
    quantization: Mapping[str, Any], params: ReDrafterParams, *, is_head_quantized: bool
) -> list[str] | None:
    """Return the modules to leave unquantized, the drafter's among them; None where nothing is.

    A quantized target needs every drafter module in the list, and where its own list is null or
    empty, the defaults that the list then replaces.
    """
    listed = quantization.get("exclude_modules")
    is_quantized = quantization.get("quant_algo") is not None
    if listed is None and not is_quantized:
        return None
    excluded = list(listed or ())
    if is_quantized and not excluded:
        skipped = "*lm_head" if is_head_quantized else None
        excluded = [name for name in DEFAULT_EXCLUDED if name != skipped]
    modules = ["drafter", "drafter.layers", "drafter.lm_head"]
    if params.is_rnn:
        modules += ["drafter.rnn_u", "drafter.rnn_w"]
    for layer in range(params.num_layers):
        modules += [f"drafter.layers.{layer}", f"drafter.layers.{layer}.linear"]
    if is_quantized and params.has_input_proj:
        modules.append("drafter.input_proj")
    return excluded + [name for name in modules if name not in excluded]
