"""Drafting methods at run time: one file each, under the method's name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from specdec.decode.cost_table import CostTable
from specdec.engine.integers import widen_integers
from specdec.engine.layout import EngineConfig, list_drafter_tensors
from specdec.errors import UsageError
from specdec.files.acceptance import read_acceptance
from specdec.methods import METHODS, Method, find_mode
from specdec.methods.budget import DraftBudget, read_budget
from specdec.methods.chain import Chain, read_chain
from specdec.model.tensors import EMBEDDING, HEAD
from specdec.options import list_given, name_flag
from specdec.system import logs

from .base import DraftContext, Drafter, EngineHandle
from .paced import PacedDrafter

logger = logs.get_logger(__name__)

# Those that draft by turns, of each those that share a tree.
Methods = tuple[tuple[Method, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """Who is to draft, and how.

    options: by method, what `Method.read` made of the settings. flags: by method, the first of its
    flags that was given. budget: whether to draft what gains time. chain: the methods that draft
    together, None for one alone. tokenizer: as in `DraftContext`.
    """

    options: Mapping[str, Any]
    flags: Mapping[str, str]
    budget: DraftBudget = DraftBudget()
    chain: Chain | None = None
    tokenizer: Any = None

    @property
    def target_devices(self) -> tuple[int, ...] | None:
        """The devices that a method's options name for the target."""
        named = (getattr(options, "target_devices", None) for options in self.options.values())
        return next((devices for devices in named if devices is not None), None)


def read_drafting(settings: Any, tokenizer: Any) -> Drafting:
    """Read all methods' options; raise UsageError for what is written wrong.

    settings: of a command that decodes, with the options that `list_options("draft")` names.
    """
    found = {name: method.read(settings) for name, method in METHODS.items()}
    given = {
        name: list_given(settings, method.options["draft"])
        for name, method in METHODS.items()
        if "draft" in method.options
    }
    return Drafting(
        options={name: options for name, options in found.items() if options is not None},
        flags={name: name_flag(flags[0]) for name, flags in given.items() if flags},
        budget=read_budget(settings),
        chain=read_chain(settings, [m.name for m in METHODS.values() if m.joins_chains]),
        tokenizer=tokenizer,
    )


def choose_methods(config: EngineConfig, drafting: Drafting | None) -> Methods:
    """Return the methods that draft for an engine; raise UsageError for options without effect.

    One group of one but for chains; none for plain decoding. drafting: None lets an engine with a
    drafter in its checkpoint use that, and no other draft.
    """
    own = config.checkpoint.method
    if drafting is None:
        return ((own,),) if own is not None else ()
    if drafting.chain is not None:
        _check_chain(drafting, own)
        chosen = tuple(tuple(METHODS[name] for name in group) for group in drafting.chain)
        refuse_others(drafting, chosen)
        return chosen
    asked = [m for m in METHODS.values() if m.source != "checkpoint" and m.name in drafting.options]
    if len(asked) > 1:
        flags = [drafting.flags[method.name] for method in asked]
        raise UsageError(
            f"{' and '.join(flags)} are both given",
            "let one or the other draft, or both with --draft-chain",
        )
    method = asked[0] if asked else own or find_mode(config.build.speculative_decoding_mode)
    refuse_others(drafting, chosen := ((method,),) if method is not None else ())
    return chosen


def _check_chain(drafting: Drafting, own: Method | None) -> None:
    """Raise UsageError for a chain whose members cannot draft here.

    own: the method of the engine's own drafter.
    """
    assert drafting.chain is not None
    names = [name for group in drafting.chain for name in group]
    for name in names:
        method = METHODS[name]
        if method.source == "checkpoint" and method is not own:
            raise UsageError(
                f"--draft-chain names {name}, and the engine has"
                f" {f'a drafter for {own.name}' if own else 'no drafter of its own'}",
                f"leave {name} out, or use an engine of a checkpoint with its weights",
            )
        if method.source != "checkpoint" and name not in drafting.options:
            raise UsageError(
                f"--draft-chain names {name}", f"add {name_flag(method.starter or '')}"
            )
    if own is not None and own.name not in names:
        raise UsageError(
            f"the engine has a drafter for {own.name}, which --draft-chain does not name",
            "name it, or build an engine of the target alone",
        )
    if "draft_target" in names:
        _check_chained_model(drafting)


def _check_chained_model(drafting: Drafting) -> None:
    """Raise UsageError for options of a draft model that it cannot follow in a chain."""
    options = drafting.options.get("draft_target")
    if options is None:
        return
    assert drafting.chain is not None
    if options.draft_len is None and options.tree_tokens is None:
        raise UsageError(
            "--draft-chain with a draft model of adaptive length",
            "give --draft-len N: the chain itself decides who drafts",
        )
    shares_tree = any("draft_target" in group and len(group) > 1 for group in drafting.chain)
    if options.use_logits and shares_tree:
        raise UsageError(
            "--use-logits with draft_target in one tree with other drafts: theirs are not drawn"
            " from its probabilities",
            "leave --use-logits out, or let them draft by turns, with a comma",
        )


def refuse_others(drafting: Drafting, chosen: Methods, *, speculates: bool = True) -> None:
    """Raise UsageError for options of methods that do not draft."""
    drafters = [method for group in chosen for method in group]
    name = name_methods(chosen)
    for other in drafting.options:
        if all(method.name != other for method in drafters):
            raise UsageError(
                f"{drafting.flags[other]} has no effect with an engine that runs {name}",
                "leave it out",
            )
    budget = drafting.budget
    if budget.mode == "fixed" and not drafters:
        raise UsageError(f"{budget.flag} has no effect with {name} decoding", "leave it out")
    if budget.mode == "auto" and not drafters:
        raise UsageError(
            f"{budget.flag} has no effect with"
            f" {f'{name} decoding' if speculates else '--no-speculation'}",
            "leave it out; it is for engines that draft",
        )


def name_methods(methods: Methods) -> str:
    """Return the name that statistics have for an engine's drafting methods."""
    return ",".join("+".join(method.name for method in group) for group in methods) or "plain"


def load_module(method: Method) -> Any:
    """Return the module of a method's drafter."""
    return importlib.import_module(f"{__name__}.{method.name}")


def make_drafter(
    engine: EngineHandle,
    methods: Methods,
    weights: Mapping[str, Tensor],
    drafting: Drafting | None,
    find_costs: Callable[[Sequence[Sequence[Drafter]], Mapping[str, str]], CostTable],
) -> Drafter:
    """Return what drafts for an engine: the one place where drafters of engines are made.

    find_costs: of the groups that draft by turns, and of what else their drafts depend on.
    """
    if not methods:
        return Drafter()
    is_chain = drafting is not None and drafting.chain is not None
    is_bound = drafting is not None and drafting.budget.mode != "fixed"
    config, decoder = engine.config, engine.decoder
    refuse_trees(methods, config)
    if config.drafter_weights is not None and decoder.kernels is None:
        logger.info(
            "%s: no native kernels run here: the drafter's weights are widened, and as large and"
            " slow as those of --drafter-weights same",
            config.drafter_weights,
        )
        own = list_drafter_tensors(config.checkpoint.model, config.checkpoint.drafter)
        weights = widen_integers(weights, own, decoder.dtype)
    if config.checkpoint.drafter is not None:  # it may compute with the target's own
        weights = widen_integers(weights, (EMBEDDING, HEAD), decoder.dtype)
    groups: list[list[Drafter]] = [
        [
            load_module(method).make_drafter(
                DraftContext(
                    decoder=decoder,
                    params=config.checkpoint.drafter,
                    weights=weights,
                    options=drafting.options.get(method.name) if drafting is not None else None,
                    engine=engine,
                    tokenizer=drafting.tokenizer if drafting is not None else None,
                    is_in_chain=is_chain,
                    has_budget=is_bound,
                    network=engine.drafter_network,
                )
            )
            for method in group
        ]
        for group in methods
    ]
    if not (is_bound or is_chain):
        return groups[0][0]
    assert drafting is not None
    options = {name: repr(options) for name, options in drafting.options.items()}
    owners = [any(m.source == "checkpoint" for m in group) for group in methods]
    record = read_acceptance(engine.folder) if any(owners) else None
    return PacedDrafter(
        groups, find_costs(groups, options), is_fixed=not is_bound, record=record,
        recorded=owners.index(True) if any(owners) else 0,
    )  # fmt: skip


def refuse_trees(methods: Methods, config: EngineConfig) -> None:
    """Raise UsageError for a method that needs trees with a hybrid; say what becomes of others'."""
    if config.checkpoint.model.linear_attention is None:
        return
    names = [method.name for group in methods for method in group]
    architecture = config.checkpoint.model.architecture
    if "lookahead" in names:
        raise UsageError(
            f"lookahead verifies several texts in one step, and {architecture} is a hybrid whose"
            " states follow one",
            "use another method: prompt lookup, suffix and draft models draft chains",
        )
    drafter = config.checkpoint.drafter
    if drafter is not None and drafter.max_draft_tokens > drafter.max_draft_depth:
        logger.info(
            "%s is a hybrid, whose states follow one text: of each tree that %s drafts, the"
            " likeliest path is verified",
            architecture, name_methods(methods),
        )  # fmt: skip
