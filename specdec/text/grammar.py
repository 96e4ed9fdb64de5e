"""Structured output: a grammar masks the logits at every node of a draft tree.

The emitted text is distributed as plain decoding with the mask is, since a node's mask follows from
the very text that its path means. Drafts that leave the grammar are not verified.
Legend: T tree nodes, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.transfers import to_device
from specdec.engine.tree import BoolArray, Tree
from specdec.errors import SpecDecError, cut_middle, name_extra, shorten
from specdec.system import logs
from specdec.text.encoding import SpecialNames, find_names
from specdec.text.schemas import describe_faults, fit_schema

logger = logs.get_logger(__name__)

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
# White space of a JSON text: at most what json.dumps writes. Small models otherwise fill their
# output with it. In a schema's "x-guidance", these keys are llguidance's own.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Grammar:
    """A grammar, ready to be followed by any number of requests."""

    def __init__(self, matcher: Any, end_ids: Collection[int]) -> None:
        """matcher: an LLMatcher of llguidance."""
        self._matcher, self._end_ids = matcher, frozenset(end_ids)

    def follow(self, output_ids: Sequence[int]) -> GrammarState:
        """Begin a request; output_ids: its own list, which grows."""
        return GrammarState(self._matcher.deep_copy(), self._end_ids, output_ids)


class GrammarState:
    """State of a request in its grammar, which shapes the request's logits."""

    def __init__(self, matcher: Any, end_ids: frozenset[int], output_ids: Sequence[int]) -> None:
        self._matcher, self._end_ids, self._output_ids = matcher, end_ids, output_ids
        self._num_read = 0
        self.is_cut = False  # before its end, for being too complex to follow

    def shape(self, tree: Tree, logits: Tensor) -> Tensor:
        """Return float32 logits [T, V], those of tokens that the grammar forbids at -inf."""
        shaped = logits[: tree.num_nodes].float().clone()
        masks = self._walk(tree)
        for node, mask in masks.items():
            if mask is None:
                continue
            size = min(len(mask), shaped.shape[1])
            shaped[node, size:] = -torch.inf
            shaped[node, :size].masked_fill_(to_device(~mask[:size], shaped.device), -torch.inf)
        return shaped

    def list_kept(self, tree: Tree, *, is_drawn: bool) -> list[int]:
        """List a tree's nodes without the tokens that the grammar forbids, and all after them.

        is_drawn: the tree is one path, drawn token by token. Then the first such token stays: it is
        rejected for certain, and what takes its place has to be drawn from what the draft leaves of
        the target's distribution.
        """
        valid_nodes = self._walk(tree)
        return [
            node
            for node in range(tree.num_nodes)
            if node in valid_nodes or (is_drawn and int(tree.parents[node]) in valid_nodes)
        ]

    def _walk(self, tree: Tree) -> dict[int, BoolArray | None]:
        """Return the mask [V] after each node whose path is in the grammar; None after an end."""
        for token in self._output_ids[self._num_read :]:
            self._matcher.consume_token(token)
        self._num_read = len(self._output_ids)
        children: dict[int, list[int]] = {}
        for node in range(1, tree.num_nodes):
            children.setdefault(int(tree.parents[node]), []).append(node)
        masks: dict[int, BoolArray | None] = {}

        def visit(node: int) -> None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").astype(np.bool_)
            if self._matcher.is_error():  # the grammar has become too complex: the text ends
                self.is_cut = True
                allowed[:] = False
                allowed[list(self._end_ids)] = True
            masks[node] = allowed
            for child in children.get(node, ()):
                token = int(tree.tokens[child])
                if token in self._end_ids:
                    if allowed[token]:
                        masks[child] = None
                elif self._matcher.validate_tokens([token]):
                    self._matcher.consume_token(token)
                    visit(child)
                    self._matcher.rollback(1)

        visit(0)
        return masks


class GrammarCompiler:
    """Compiler of grammars for one tokenizer."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int]) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise SpecDecError(
                "structured output needs llguidance", f"install it: {name_extra('grammar')}"
            )
        if tokenizer is None or not end_ids:
            raise SpecDecError(
                "structured output needs a tokenizer and a token that ends a text",
                "load the engine with the model's tokenizer, and leave the end tokens as they are",
            )
        import llguidance.hf

        self._guidance, self._end_ids = llguidance, sorted(end_ids)
        self._names: SpecialNames | None = find_names(tokenizer)
        try:
            # A text that a grammar forces may have the name of a special token, which would be
            # that token to the tokenizer, and no text of the grammar.
            renamed_tokenizer = self._names.rename()
            if renamed_tokenizer is not None:
                self._tokenizer = llguidance.LLTokenizer(renamed_tokenizer, eos_token=self._end_ids)
            else:
                self._names = None
                self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=self._end_ids)
        except Exception as error:  # noqa: BLE001 - of a tokenizer it does not know it raises any
            raise SpecDecError(
                f"llguidance cannot use this tokenizer: {error}", "leave structured output out"
            ) from None

    def compile(self, spec: Mapping[str, Any]) -> Grammar:
        """Return the grammar of {kind: what it is}; SpecDecError for one that is wrong."""
        if len(spec) != 1 or not set(spec) <= set(KINDS):
            raise SpecDecError(
                f"grammar is {shorten(dict(spec))}, not one of {', '.join(KINDS)}", "give one"
            )
        ((kind, text),) = spec.items()
        matcher_class = self._guidance.LLMatcher
        try:
            if kind in ("json_object", "json_schema"):
                schema = space_schema(text if kind == "json_schema" else {"type": "object"})
                grammar = matcher_class.grammar_from_json_schema(json.dumps(schema))
            elif kind in ("regex", "choice"):
                pattern = text if kind == "regex" else write_choice(text)
                grammar = matcher_class.grammar_from_regex(pattern)
            else:
                lark = text if self._names is None else self._names.write_ids(text)
                grammar = matcher_class.grammar_from_lark(lark)
        except (TypeError, ValueError) as error:
            raise _refuse(kind, str(error)) from None
        # A mask of a grammar with many readings would otherwise take seconds, of everybody's step.
        limits = self._guidance.LLParserLimits(step_max_items=10_000, max_items_in_row=500)
        matcher = matcher_class(self._tokenizer, grammar, limits=limits, log_level=0)
        if matcher.is_error() and kind == "json_schema":
            return self._compile_fitted(schema, matcher.get_error())
        if matcher.is_error():
            raise _refuse(kind, matcher.get_error())
        return Grammar(matcher, self._end_ids)

    def _compile_fitted(self, schema: Any, reason: str) -> Grammar:
        """Return the grammar of a schema without its annotations; SpecDecError for what is left."""
        fitted = fit_schema(schema)
        if fitted.faults:
            raise _refuse("json_schema", describe_faults(fitted))
        if fitted.schema == schema:
            raise _refuse("json_schema", reason)
        if fitted.left_out:
            logger.warning(
                "no grammar keeps to %s of the json_schema: left out", ", ".join(fitted.left_out)
            )
        return self.compile({"json_schema": fitted.schema})


def space_schema(schema: Any, spacing: Mapping[str, Any] = SPACING) -> Any:
    """Add to a JSON schema the white space that a text may have, if it does not say so itself."""
    guidance = schema.get("x-guidance") or {} if isinstance(schema, Mapping) else None
    if not isinstance(guidance, Mapping) or {*SPACING, "whitespace_pattern"} & guidance.keys():
        return schema
    return {**schema, "x-guidance": {**spacing, **guidance}}


def write_choice(texts: Any) -> str:
    """Return the regular expression of one of several texts; SpecDecError where there are none."""
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts or not all(
        isinstance(text, str) and text for text in texts
    ):  # fmt: skip
        raise _refuse("choice", f"{shorten(texts)} is not a list of texts, none empty")
    return "|".join(re.sub(r"[][\\.^$*+?(){}|]", r"\\\g<0>", text) for text in texts)


def _refuse(kind: str, reason: str) -> SpecDecError:
    return SpecDecError(
        f"the {kind} is refused: {cut_middle(' '.join(reason.split()), 600)}", "correct it"
    )
