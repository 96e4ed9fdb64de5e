"""Features of a drafter that a runtime lacks, each with the error that names it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.reading import read_json
from specdec.gguf.folder import localize
from specdec.methods.medusa import MedusaParams
from specdec.model.tensors import HEAD, OFFSETS

from .layouts import describe_norms
from .runtimes import RUNTIMES, Writer
from .source import TITLES, Order, list_entered
from .tokenizers import read_template


def find_writer(order: Order) -> Writer:
    """Return the writer of a source for a runtime, or raise SpecDecError that names others."""
    kind, to = order.source.kind, order.settings.to
    writer = RUNTIMES[to].writers.get(kind)
    if writer is None:
        takers = [name for name, runtime in RUNTIMES.items() if kind in runtime.writers]
        raise SpecDecError(
            f"{RUNTIMES[to].title} does not take {TITLES[kind]}",
            f"those that do: --to {' or '.join(takers)}, and the torch backend of specdec-build",
        )
    find_lacks(order).raise_all()
    return writer


def find_lacks(order: Order) -> Problems:
    """List the features of a drafter that a runtime would drop silently."""
    problems, to = Problems(), order.settings.to
    for kinds, runtimes, find, fact, remedy in LACKS:
        if order.source.kind in kinds and to in runtimes and (lack := find(order)):
            values = {"title": RUNTIMES[to].title, **(lack if isinstance(lack, dict) else {})}
            problems.add(fact.format(**values), remedy.format(**values))
    return problems


def find_unread(order: Order) -> dict[str, str] | None:
    """Return the target's class where the runtime gives its layers to no drafter."""
    source, runtime = order.source, RUNTIMES[order.settings.to]
    target = source.model.architecture
    if runtime.targets is None or target in runtime.targets:
        return None
    takers = [
        name
        for name, other_runtime in RUNTIMES.items()
        if source.kind in other_runtime.writers and target in (other_runtime.targets or [target])
    ]
    return {
        "kind": TITLES[source.kind].removeprefix("an ").removeprefix("a "), "target": target,
        "read": ", ".join(runtime.targets), "takers": " and ".join(takers),
    }  # fmt: skip


def find_unread_head(order: Order) -> dict[str, str] | None:
    """Return an MTP head's form where runtimes do not read it beside this target."""
    model, form = order.source.model, order.source.head_form
    is_read = form == "qwen" and model.linear_attention is not None
    if form == "mimo" and order.settings.to != "gguf":
        config = read_json(Path(order.settings.model_dir or "") / "config.json")
        is_read = config.get("architectures") == ["MiMoForCausalLM"]
    layout = {"mimo": "MiMo", "qwen": "Qwen", "glm": "GLM"}[form]
    return None if is_read else {"layout": layout, "target": model.architecture}


def drafts_unread(order: Order) -> bool:
    """Return whether a block drafts from its first token without a Markov head.

    Only specdec can run such a drafter.
    """
    params = order.dflash
    return params.sample_from_anchor and not params.markov_rank and order.settings.to != "hf"


def find_excess(order: Order) -> dict[str, int] | None:
    """Return the numbers of draft tokens where a block has fewer."""
    number, max_tokens = order.num_draft_tokens, order.dflash.num_positions
    return (
        {"number": number, "most": max_tokens}
        if number > max_tokens and not drafts_unread(order)
        else None
    )


def find_missing_heads(order: Order) -> dict[str, int] | None:
    """Return the numbers of draft tokens where there are fewer Medusa heads.

    vLLM would make the others, of weights that no file has.
    """
    params = order.source.drafter
    assert isinstance(params, MedusaParams)
    number, num_heads = order.num_draft_tokens, params.num_heads
    return {"number": number, "most": num_heads} if number > num_heads else None


def find_own_tables(order: Order) -> dict[str, str] | None:
    """Return a DFlash drafter's tables, unless DeepSpec's layout has room for them."""
    is_deepspec = order.settings.to == "hf" and order.dflash.sample_from_anchor
    names = {OFFSETS} if is_deepspec else {"embed_tokens.weight", HEAD, OFFSETS}
    drafter_tables = names & set(order.source.tensors)
    return {"own": join_names(sorted(drafter_tables))} if drafter_tables else None


def find_other_layers(order: Order) -> dict[str, Any] | None:
    """Return the drafter's layers where TensorRT Edge-LLM would read others."""
    depth, entered_layers = order.source.model.num_hidden_layers, list_entered(order.eagle3)
    usual_layers = [2, depth // 2, depth - 3]
    return (
        {"usual": usual_layers, "entered": entered_layers}
        if entered_layers != usual_layers
        else None
    )


def find_no_template(order: Order) -> dict[str, Any] | None:
    """Return the target's folder where it has no chat template."""
    folder = Path(localize(order.settings.model_dir or ""))
    if not order.settings.model_dir or not folder.is_dir():
        return None
    return {"folder": folder} if read_template(folder) is None else None


def find_lost_norms(order: Order) -> dict[str, str] | None:
    """Return the norms of EAGLE-3 that the runtime does not compute."""
    runtime_norms = RUNTIMES[order.settings.to].norms
    lost_norms = [name for name, is_on in describe_norms(order.eagle3).items() if is_on]
    lost_norms = [name for name in lost_norms if name not in runtime_norms]
    return {"lost": ", ".join(lost_norms)} if lost_norms else None


def find_unusual(order: Order) -> dict[str, int] | None:
    """Return the numbers of layers, unless three of the target's and one of the drafter's."""
    read, num_drafter_layers = len(order.eagle3.aux_layers), order.eagle.net.num_hidden_layers
    is_bad = RUNTIMES[order.settings.to].is_usual and (read, num_drafter_layers) != (3, 1)
    return {"read": read, "own": num_drafter_layers} if is_bad else None


EVERY_RUNTIME = tuple(RUNTIMES)
BUT_HF = tuple(name for name in RUNTIMES if name != "hf")
BUT_VLLM = tuple(name for name in RUNTIMES if name not in ("vllm", "speculators"))
BUT_BOTH = tuple(name for name in BUT_VLLM if name != "hf")
AS_HF = "export it as hf, which specdec runs"
ALL_OF_EAGLE3 = "vllm, speculators and hf write all of EAGLE-3"
# Kinds of drafters, runtimes, a function that finds the feature (its result is true, or values for
# the texts), and the error: fact and remedy.
LACKS: tuple[tuple[Collection[str], Collection[str], Callable[[Order], Any], str, str], ...] = (
    (
        ("eagle3", "dflash"), EVERY_RUNTIME, find_unread,
        "{title} lets no {kind} read the layers of a {target}",
        "it does of {read}; for this target there are --to {takers}",
    ),
    (
        ("mtp",), BUT_HF, find_unread_head,
        "{title} reads no head of {layout}'s layout beside a {target}",
        "it reads Qwen's beside Qwen3.5, Qwen3.6 and Qwen3-Next, MiMo's beside MiMo 7B; hf is for"
        " specdec",
    ),
    (
        ("dflash",), ("sglang",), lambda order: order.dflash.markov_rank,
        "{title} is not known to read the Markov head that the drafter has",
        "export it for vllm or speculators, or as hf",
    ),
    (
        ("dflash",), ("hf",),
        lambda order: order.dflash.markov_rank and not order.dflash.sample_from_anchor,
        "DeepSpec's layout drafts from the first token of a block, this drafter does not",
        "export it for vllm or speculators",
    ),
    (
        ("dflash",), EVERY_RUNTIME, drafts_unread,
        "{title} drafts from the masks of a block, this drafter from its first token too",
        "specdec runs it from the folder that it came in, or from that of --to hf",
    ),
    (
        ("dflash",), EVERY_RUNTIME, find_excess,
        "--num-draft-tokens is {number}, a block of this drafter drafts {most}",
        "give 1 to {most}; fewer than {most} are other blocks than it was trained with",
    ),
    (
        ("medusa",), EVERY_RUNTIME, find_missing_heads,
        "--num-draft-tokens is {number}, there are {most} Medusa heads, of a token each",
        "give 1 to {most}",
    ),
    (
        ("dflash",), tuple(name for name in EVERY_RUNTIME if name != "speculators"),
        lambda order: order.dflash.aux_layers[-1] == order.source.model.num_hidden_layers - 1
        and {"last": order.dflash.aux_layers[-1]},
        "the drafter reads the last layer, {last}, whose output z-lab's layout takes after the"
        " final norm",
        "export it as speculators, or as hf with a drafter that reads inner layers",
    ),
    (
        ("dflash",), BUT_VLLM, find_own_tables,
        "{title} drafts with the target's embedding and head, the drafter has {own} of its own",
        "export it for vllm or speculators; hf and sglang have no room for them",
    ),
    (
        ("dflash",), BUT_HF,
        lambda order: order.dflash.net.embedding_multiplier != 1
        and {"scale": order.dflash.net.embedding_multiplier},
        "{title} gives the drafter the rows of the embedding as they are, this one was trained"
        " with them multiplied by {scale:g}",
        AS_HF,
    ),
    (
        ("dflash",), BUT_HF,
        lambda order: order.source.model.arithmetic.head_bias and HEAD not in order.source.tensors,
        "{title} drafts without the bias of the target's head", AS_HF,
    ),
    (
        ("eagle1", "eagle3"), EVERY_RUNTIME,
        lambda order: not RUNTIMES[order.settings.to].keeps_embedding
        and "embed_tokens.weight" in order.source.tensors,
        "{title} drafts with the target's embedding, the drafter has its own",
        "export it for another runtime, or train it with the target's",
    ),
    (
        ("eagle1",), ("vllm", "sglang"), lambda order: "lm_head.weight" in order.source.tensors,
        "{title} drafts with the target's head, this EAGLE-1 drafter has its own", AS_HF,
    ),
    (
        ("eagle1",), ("vllm",),
        lambda order: "fc.bias" in order.source.tensors
        and {"bias": order.source.tensors["fc.bias"].name},
        "vLLM's EAGLE-1 has no fc.bias, and {bias} is not zero",
        "export it for sglang or as hf; or train one with specdec-train --no-eagle-bias",
    ),
    (
        ("eagle3",), ("edge-llm",), find_other_layers,
        "TensorRT Edge-LLM gives a drafter what enters layers {usual} of this target, whatever"
        " config.json says; the drafter was trained on {entered}",
        "train it on the usual layers, or export it for vllm or trtllm-pytorch",
    ),
    (
        ("eagle3",), ("edge-llm",), find_no_template,
        "{folder} has no chat template, and TensorRT Edge-LLM refuses such a target",
        "add chat_template.jinja, which may be no more than the messages' contents",
    ),
    (
        ("eagle3",), BUT_BOTH, lambda order: order.eagle3.mask_token_id is not None,
        "{title} drafts a token a pass, this drafter all in one", ALL_OF_EAGLE3,
    ),
    (
        ("eagle3",), ("speculators",),
        lambda order: order.eagle3.mask_token_id is not None and order.eagle3.fc_norm,
        "vLLM drops fc_norm of a P-EAGLE drafter of speculators'", "use --to vllm, or hf",
    ),
    (
        ("eagle3",), EVERY_RUNTIME, find_lost_norms,
        "{title} is not known to compute {lost}, which the drafter has", ALL_OF_EAGLE3,
    ),
    (
        ("eagle3",), EVERY_RUNTIME, find_unusual,
        "{title} reads three layers of the target with a drafter of one layer; this one reads"
        " {read} with {own}",
        ALL_OF_EAGLE3,
    ),
)  # fmt: skip
