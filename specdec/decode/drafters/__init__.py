"""Drafting methods at run time: one file each, under the method's name."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.decode.cost_table import TIMED_SECONDS, CostTable
from specdec.engine.integers import widen_integers
from specdec.engine.layout import EngineConfig, list_drafter_tensors
from specdec.engine.native_matrices import Weight
from specdec.errors import UsageError
from specdec.files.acceptance import read_acceptance
from specdec.methods import CHAIN_MEMBERS, LONE_MEMBERS, METHODS, Method
from specdec.methods.budget import DraftBudget, read_budget
from specdec.methods.chain import Chain, read_chain
from specdec.model.tensors import EMBEDDING, HEAD
from specdec.options import list_given, name_flag
from specdec.system import logs

from .base import DraftContext, Drafter, EngineHandle, check_draft_room
from .paced import PacedDrafter

logger = logs.get_logger(__name__)

# Groups of methods: the groups draft by turns, the methods of a group share a tree.
Methods = tuple[tuple[Method, ...], ...]
# Measures what drafts cost, or finds it in the engine's folder: of groups of drafters, and of the
# options, by method, that their drafts depend on. None where that is put off: nothing drafts yet.
FindCosts = Callable[[Sequence[Sequence[Drafter]], Mapping[str, str]], CostTable | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """Methods that are to draft, with their options.

    options: by method, what `Method.read` made of the settings. flags: by method, the first of its
    flags that was given. budget: whether to draft what gains time. chain: the methods that draft
    together, None for one alone. tokenizer: as in `DraftContext`. counts_own: whether drafts of the
    engine's own drafter are counted, beside which nothing else is to draft then. is_default:
    whether `add_suffixes` chose the methods.
    """

    options: Mapping[str, Any]
    flags: Mapping[str, str]
    budget: DraftBudget = DraftBudget()
    chain: Chain | None = None
    tokenizer: Any = None
    counts_own: bool = False
    is_default: bool = False

    @property
    def has_budget(self) -> bool:
        """Return whether of each draft only what is worth its time is verified."""
        return self.budget.mode != "fixed"

    @property
    def target_devices(self) -> tuple[int, ...] | None:
        """The devices that a method's options name for the target."""
        lists = (getattr(options, "target_devices", None) for options in self.options.values())
        return next((devices for devices in lists if devices is not None), None)


# Drafting by the drafter of an engine's checkpoint, as it is.
CHECKPOINT_DRAFTER_ONLY = Drafting(options={}, flags={}, budget=DraftBudget("fixed"))


def read_drafting(settings: Any, tokenizer: Any) -> Drafting:
    """Read all methods' options; raise UsageError for what is written wrong.

    settings: of a command that decodes, with the options that `list_options("draft")` names.
    """
    options_read = {name: method.read(settings) for name, method in METHODS.items()}
    options_given = {
        name: list_given(settings, method.options["draft"])
        for name, method in METHODS.items()
        if "draft" in method.options
    }
    return Drafting(
        options={name: options for name, options in options_read.items() if options is not None},
        flags={name: name_flag(flags[0]) for name, flags in options_given.items() if flags},
        budget=read_budget(settings),
        chain=read_chain(settings, CHAIN_MEMBERS, LONE_MEMBERS),
        tokenizer=tokenizer,
        counts_own=getattr(settings, "acceptance_output", None) is not None,
    )


def choose_methods(config: EngineConfig, drafting: Drafting | None) -> Methods:
    """Return the methods that draft for an engine; raise UsageError for options without effect.

    One group of one but for chains; none for plain decoding. drafting: None lets an engine with a
    drafter in its checkpoint use that, and no other draft.
    """
    checkpoint_method = config.checkpoint.method
    if drafting is None:
        return ((checkpoint_method,),) if checkpoint_method is not None else ()
    if drafting.chain is not None:
        is_named = config.has_fixed_drafts
        _check_chain(drafting.chain, drafting, checkpoint_method, is_named=is_named)
        methods = tuple(tuple(METHODS[name] for name in group) for group in drafting.chain)
    else:
        method = _choose_method(config, drafting)
        methods = ((method,),) if method is not None else ()
    refuse_others(drafting, methods)
    return methods


def _choose_method(config: EngineConfig, drafting: Drafting) -> Method | None:
    """Return the one method that options name, else the engine's default."""
    starters = (method for method in METHODS.values() if method.source != "checkpoint")
    started_methods = [method for method in starters if method.name in drafting.options]
    if len(started_methods) > 1:
        flags = [drafting.flags[method.name] for method in started_methods]
        raise UsageError(
            f"{' and '.join(flags)} are both given",
            "let one or the other draft, or both with --draft-chain",
        )
    return started_methods[0] if started_methods else config.default_method


def _check_chain(
    chain: Chain, drafting: Drafting, checkpoint_method: Method | None, *, is_named: bool
) -> None:
    """Raise UsageError for a chain whose members cannot draft here.

    checkpoint_method: the method of the drafter in the engine's checkpoint. is_named: whether the
    chain has to name it.
    """
    names = [name for group in chain for name in group]
    for name in names:
        _check_member(METHODS[name], drafting, checkpoint_method)
    if is_named and checkpoint_method is not None and checkpoint_method.name not in names:
        raise UsageError(
            f"the engine has a drafter for {checkpoint_method.name}, which --draft-chain does not"
            " name",
            "name it, or build an engine of the target alone",
        )
    if "draft_target" in names:
        _check_chained_model(drafting)


def _check_member(member: Method, drafting: Drafting, checkpoint_method: Method | None) -> None:
    """Raise UsageError for a method in a chain that has no weights, or no option, to draft by."""
    if member.source != "checkpoint":
        if member.name not in drafting.options:
            flag = name_flag(member.starter or "")
            raise UsageError(f"--draft-chain names {member.name}", f"add {flag}")
    elif member is not checkpoint_method:
        drafter = "no drafter of its own"
        if checkpoint_method is not None:
            drafter = f"a drafter for {checkpoint_method.name}"
        raise UsageError(
            f"--draft-chain names {member.name}, and the engine has {drafter}",
            f"leave {member.name} out, or use an engine of a checkpoint with its weights",
        )


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


def refuse_others(drafting: Drafting, methods: Methods) -> None:
    """Raise UsageError for options of methods that do not draft."""
    drafters = [method for group in methods for method in group]
    name = name_methods(methods)
    for method_name in drafting.options:
        if all(method.name != method_name for method in drafters):
            raise UsageError(
                f"{drafting.flags[method_name]} has no effect with an engine that runs {name}",
                "leave it out",
            )
    budget = drafting.budget
    if budget.mode is not None and not drafters:
        raise UsageError(
            f"{budget.flag} has no effect with {name} decoding",
            "leave it out; it is for engines that draft",
        )


def name_methods(methods: Methods) -> str:
    """Return the name that statistics have for an engine's drafting methods."""
    return ",".join("+".join(method.name for method in group) for group in methods) or "plain"


def check_draft_sizes(config: EngineConfig, methods: Methods, drafting: Drafting) -> None:
    """Raise SpecDecError where an engine has no room for what its options let a step draft."""
    is_in_chain = drafting.chain is not None
    for method in (method for group in methods for method in group):
        options = drafting.options.get(method.name)
        if method.source != "checkpoint" and options is not None:
            num_tokens = options.max_draft_tokens
            check_draft_room(config, method, num_tokens, is_in_chain=is_in_chain)


def uses_drafter(methods: Methods) -> bool:
    """Return whether the drafter in the engine's checkpoint is among those who draft."""
    return any(method.source == "checkpoint" for group in methods for method in group)


def load_module(method: Method) -> Any:
    """Return the module of a method's drafter."""
    return importlib.import_module(f"{__name__}.{method.name}")


def make_drafter(
    engine: EngineHandle,
    methods: Methods,
    weights: Mapping[str, Weight],
    drafting: Drafting | None,
    find_costs: FindCosts,
) -> Drafter:
    """Make what drafts for an engine: the one place where drafters of engines are made.

    find_costs: for drafters with a budget, or in a chain.
    """
    if not methods:
        return Drafter()
    drafting = drafting or CHECKPOINT_DRAFTER_ONLY
    refuse_trees(methods, engine.config)
    context = DraftContext(
        decoder=engine.decoder,
        params=engine.config.checkpoint.drafter,
        weights=_widen_weights(engine, weights) if uses_drafter(methods) else weights,
        engine=engine,
        tokenizer=drafting.tokenizer,
        is_in_chain=drafting.chain is not None,
        has_budget=drafting.has_budget,
        network=engine.drafter_network,
    )
    groups = [
        [_make_member(method, context, drafting.options.get(method.name)) for method in group]
        for group in methods
    ]
    if drafting.has_budget or drafting.chain is not None:
        return _pace_groups(engine, methods, groups, drafting, find_costs)
    return groups[0][0]


def _make_member(method: Method, context: DraftContext, options: Any) -> Drafter:
    """Make the drafter of one method, with what `Method.read` made of its options."""
    drafter: Drafter = load_module(method).make_drafter(
        dataclasses.replace(context, options=options)
    )
    return drafter


def _widen_weights(engine: EngineHandle, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Return a drafter's weights, with numbers in the place of integers that it cannot read."""
    config, decoder = engine.config, engine.decoder
    checkpoint = config.checkpoint
    if config.drafter_weights is not None and decoder.kernels is None:
        logger.info(
            "%s: no native kernels run here: the drafter's weights are widened, and as large and"
            " slow as those of --drafter-weights same",
            config.drafter_weights,
        )
        names = list_drafter_tensors(checkpoint.model, checkpoint.drafter)
        weights = widen_integers(weights, names, decoder.dtype)
    # It may compute with the target's own.
    return widen_integers(weights, (EMBEDDING, HEAD), decoder.dtype)


def _pace_groups(
    engine: EngineHandle, methods: Methods, groups: Sequence[Sequence[Drafter]],
    drafting: Drafting, find_costs: FindCosts,
) -> Drafter:  # fmt: skip
    """Let groups draft by turns and by a budget, with the acceptance that a trainer recorded."""
    options = {name: repr(options) for name, options in drafting.options.items()}
    costs = find_costs(groups, options)
    if costs is None:
        return Drafter()
    has_weights = [uses_drafter((group,)) for group in methods]
    record = read_acceptance(engine.folder) if any(has_weights) else None
    return PacedDrafter(
        groups, costs, is_fixed=not drafting.has_budget, record=record,
        recorded_drafter=has_weights.index(True) if any(has_weights) else 0,
        names=[name_methods((group,)) for group in methods],
        clock=time.perf_counter if _is_timed(engine, costs) else None,
    )  # fmt: skip


def _is_timed(engine: EngineHandle, costs: CostTable) -> bool:
    """Return whether memory sets the time of an engine's steps: they are held against the table."""
    return engine.device.type == "cpu" and costs.steps.estimate_one(1, 1) > TIMED_SECONDS


def refuse_trees(methods: Methods, config: EngineConfig) -> None:
    """Raise UsageError for a method that needs trees with a hybrid; say what becomes of others'."""
    if config.checkpoint.model.recurrence is None:
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
    if drafter is None or not uses_drafter(methods):
        return
    if drafter.max_draft_tokens > drafter.max_draft_depth:
        logger.info(
            "%s is a hybrid, whose states follow one text: of each tree that %s drafts, the"
            " likeliest path is verified",
            architecture, name_methods(methods),
        )  # fmt: skip
