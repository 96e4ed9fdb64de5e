"""Interface of a drafter to the loop: it proposes candidates and observes the result.

Drafters derive from `Drafter`, or from one of two classes that keep what they draft from:
`HiddenStateDrafter` of hidden_state.py the target's last state of each row's newest token, for
Medusa, ReDrafter and MTP assistants; `FeatureDrafter` features of all committed tokens, for EAGLE,
MTP and DFlash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.pace import Pace
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.draft_net import DraftNet
from specdec.engine.graphs import Graphs, StepGraphs
from specdec.engine.kv_cache import POSITION_BLOCK, CachedTensor, KVCache
from specdec.engine.layout import EngineConfig
from specdec.engine.linear import Linear
from specdec.engine.native_drafts import NewStates
from specdec.engine.native_matrices import Weight
from specdec.engine.step import States
from specdec.engine.transfers import Array, to_device
from specdec.engine.tree import IntArray, make_root
from specdec.errors import Problems, SpecDecError
from specdec.methods import DrafterParams, Method
from specdec.methods.base import USE_ITS_DRAFTER

N = TypeVar("N", bound=DraftNet)
ALL_LEVELS = -np.inf  # a `min_gain` that every level has
# Tokens of a row whose states may wait to be read. The states of a token take a sixth of the memory
# of its keys and values for a model of 8B, half of it for one of 1B.
MAX_WAITING_STATES = 512


class Drafter:
    """Drafter for a target; this base class drafts nothing, which is plain decoding.

    The attributes say what it needs and does, so that nobody asks for its class:

    max_draft_tokens, max_draft_depth: most tokens of a step's draft, and of a path of it.
    chains_only: set by the loop: of a tree, one path is verified.
    follows_prompts: whether `follow` wants the target's states of all tokens of prompts.
    reads_hidden: whether it reads the target's hidden states, behind all layers, instead of only
    those of the layers that the decoder observes. is_indivisible: whether drafts are verified whole
    or not at all, since it reads the states of nodes that it has placed itself. drafts_ahead:
    whether `compute_drafts` may run before the host knows what was accepted. is_planned: whether a
    draft is a chain of tokens, a pass each, whose number is told before the first. pace: what
    chooses how much it drafts.

    Set by the loop, of a step: num_prompt_tokens, about how many prompt tokens the step reads, too;
    max_prefill, most tokens of prompts that it may itself read for a step of several requests, None
    for all; min_gain, how many tokens another level of a draft must promise, see
    `Pace.price_level`; max_levels, where `is_planned`, passes at most, None for all; seed, where a
    runtime of its own draws. Set by the drafter, of its newest draft: num_prefilled, prompt tokens
    that it read; num_levels, passes that it took.
    members: drafters that draft for it; groups: those of them that share a tree, in the order in
    which the groups are asked. A drafter without members drafts by itself.
    """

    max_draft_tokens = 0
    max_draft_depth = 0
    chains_only = False
    follows_prompts = False
    reads_hidden = False
    is_indivisible = False
    drafts_ahead = False
    is_planned = False
    pace: Pace | None = None
    num_prompt_tokens = 0
    max_prefill: int | None = None
    min_gain = ALL_LEVELS
    max_levels: int | None = None
    seed = 0
    num_prefilled = 0
    num_levels = 1
    members: Sequence[Drafter] = ()
    groups: Sequence[Sequence[Drafter]] = ()

    def plan_step(self, num_prompt_tokens: int, max_prefill: int | None) -> None:
        """Take what is known of the next step before its drafts; see the class."""
        self.num_prompt_tokens, self.max_prefill = num_prompt_tokens, max_prefill

    def fit_budget(self) -> Drafter:
        """Return the drafter to use where a budget chooses the verified part of a draft."""
        return self

    def make_twin(self) -> Drafter:
        """Return a drafter of the same cost for texts of random tokens, of which it keeps none."""
        return self

    def take_cache(self, cache: KVCache) -> None:
        """Take the target's cache, which at a `propose` holds all of a text but the last token."""

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget all requests; rows 0 ... num_rows - 1 of that many tokens will be in use.

        What was learned of acceptance may be kept: it is the same drafter.
        """

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Begin requests in their rows; `observe` follows with the last state of each prompt."""

    def count_unread(self, requests: Sequence[ActiveRequest]) -> int:
        """Count the prompt tokens that it has to read before it can draft for all of these."""
        return 0

    def _plan_prefill(self, unread_counts: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Return the indices of requests to draft for, and by index the tokens to read of others.

        unread_counts: prompt tokens that each request lacks. The drafter catches up with one
        request after another, within `max_prefill`, those first that lack least.
        """
        room: float = np.inf
        if self.max_prefill is not None and len(unread_counts) > 1:
            room = self.max_prefill
        self.num_prefilled = int(min(sum(unread_counts), room))
        ready, chunk_sizes = [], {}
        for index in sorted(range(len(unread_counts)), key=unread_counts.__getitem__):
            if unread_counts[index] <= room:
                ready.append(index)
            elif room:
                chunk_sizes[index] = int(room)
            room -= min(unread_counts[index], room)
        return sorted(ready), chunk_sizes

    def rests(self, num_requests: int) -> bool:
        """Return whether the next step of so many requests is known to have no drafts."""
        return not self.max_draft_tokens

    def skip(self, num_requests: int) -> None:
        """Take note of a step of so many requests, for which `propose` is not called."""

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Return what is proposed for each request, rooted at the last of its emitted tokens.

        Or an empty list, where nothing is proposed for any of them. In a chain, others may draft
        for some requests of a step, or for all.
        """
        return []

    def note_verified(self, drafts: Sequence[Candidates]) -> None:
        """Take what is verified of the newest drafts: grammars may have left some tokens out."""

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Take the target's states of a step, [B, T, D], and each row's accepted nodes.

        After the prompts, T is 1 and the only node is each prompt's last token.
        """

    def follow(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: States
    ) -> None:
        """Take the states [B, T, D] of a pass: of row rows[b], counts[b] tokens from starts[b]."""

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Let `row` start over with what is known of the first `length` tokens of row `source`."""

    def list_cached_tensors(self) -> list[CachedTensor]:
        """List what is kept for each row's text, and by which it can go on, since `allocate`.

        A drafter that lists nothing makes what it needs from the text.
        """
        return []

    def settle(self, row: int) -> None:
        """Complete a row's values in `list_cached_tensors`, as far as its text is known."""

    def resume(self, row: int, length: int) -> None:
        """Go on after so many tokens of a row, whose needed values were put in their place."""

    def compute_drafts(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Compute drafts [B, ...] after tokens [B] and their states [B, D]; if `drafts_ahead`."""
        raise NotImplementedError

    def take_drafts(
        self, requests: Sequence[ActiveRequest], roots: Sequence[int], drafts: Array
    ) -> None:
        """Keep computed drafts for the next `propose`; if `drafts_ahead`."""

    def keep(self) -> None:
        """Write what the drafter has learned into its file, where it has one."""


class EngineHandle(Protocol):
    """An engine, as far as those who draft for it deal with it."""

    folder: Path
    config: EngineConfig
    device: torch.device
    decoder: Decoder
    load_seconds: float
    drafter_network: Any

    def open_draft_engine(self, folder: Path, devices: Sequence[int] | None) -> EngineHandle:
        """Load the engine folder of a draft model, on the kind of device that this engine uses."""

    def check_whole(self) -> None:
        """Wait until the engine's files are compared; SpecDecError where one is damaged."""

    def use_method(self, name: str, drafter: Drafter, draft: EngineHandle | None = None) -> None:
        """Let a method that has no weights in the checkpoint draft for this engine."""

    def close(self) -> None:
        """End what runs for the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftContext:
    """Engine and options that a drafter's `make_drafter` works with.

    decoder: the target's. params, weights: of the drafter in the target's checkpoint, by canonical
    name, the target's own with them. options: what `Method.read` made of the settings, None where
    nothing is asked for. engine: the target's, for drafters without weights in its checkpoint.
    tokenizer: the target's, to be compared with a draft model's; None where there is none.
    is_in_chain: whether others draft for the engine too. has_budget: whether of what is
    drafted only what is worth its time is verified. network: what stands for the drafter's layers
    where another runtime computes them; there are no weights then.
    """

    decoder: Decoder
    params: DrafterParams | None = None
    weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    options: Any = None
    engine: EngineHandle | None = None
    tokenizer: Any = None
    is_in_chain: bool = False
    has_budget: bool = False
    network: Any = None

    @property
    def graphs(self) -> Graphs | None:
        """Passes that a GPU has recorded for the engine, its drafter's among them; None on a CPU.

        A recorded pass runs by one call, however many kernels it has.
        """
        return self.decoder.graphs.graphs if self.decoder.graphs is not None else None

    def check_room(self, method: Method, num_tokens: int) -> None:
        """Raise SpecDecError where the engine has no room for drafts of so many tokens."""
        assert self.engine is not None
        check_draft_room(self.engine.config, method, num_tokens, is_in_chain=self.is_in_chain)


def check_draft_room(
    config: EngineConfig, method: Method, num_tokens: int, *, is_in_chain: bool
) -> None:
    """Raise SpecDecError where an engine has no room for a method's drafts of so many tokens.

    Caches are as large as the longest draft needs, so a step of all requests alone sets a limit;
    where the build fixed the drafts, and no other drafter's room is shared, its mode and length do.
    """
    build = config.build
    is_shared = is_in_chain and build.speculative_decoding_mode != method.mode
    if config.has_fixed_drafts and not is_shared:
        check_room(method, num_tokens, build.speculative_decoding_mode, build.max_draft_len)
    else:
        find_room_problems(config, method, num_tokens).raise_all()


def find_room_problems(config: EngineConfig, method: Method, num_tokens: int) -> Problems:
    """Return the problem of drafts that a step of all requests has no room for, if it has none."""
    build, room = config.build, config.draft_room
    return Problems.from_table(
        (num_tokens > room,
         f"{method.title.lower()} drafts {num_tokens} tokens a step, the engine has room for"
         f" {room}: max_num_tokens {build.max_num_tokens} over max_batch_size"
         f" {build.max_batch_size}",
         f"draft {room} or fewer, or build with a smaller --max-batch-size or a larger"
         " --max-num-tokens"),
    )  # fmt: skip


def check_room(method: Method, num_tokens: int, mode: str | None, max_draft_len: int) -> None:
    """Raise SpecDecError where an engine was not built for a method's drafts of so many tokens.

    mode, max_draft_len: the engine's.
    """
    drafts = f"{method.title.lower()} drafts {num_tokens} tokens a step"
    if mode != method.mode:
        raise SpecDecError(
            f"{drafts}, and the engine was built with speculative_decoding_mode {mode}",
            f"build it from a plain checkpoint with --speculative-decoding-mode {method.mode}"
            f" --max-draft-len {num_tokens}",
        )
    if num_tokens > max_draft_len:
        raise SpecDecError(
            f"{drafts}, the engine was built with max_draft_len {max_draft_len}",
            f"draft {max_draft_len} or fewer, or build with --max-draft-len {num_tokens}",
        )


def make_net(
    kind: Callable[..., N], context: DraftContext, params: DrafterParams, num_run: int,
    head: Linear | None,
) -> N:  # fmt: skip
    """Lay out a drafter's layers as the target's are, with its graphs where it has any.

    num_run: most tokens of a draft that are run after a text. head: the target's, to be shared.
    """
    decoder = context.decoder
    net = kind(
        params, context.weights, decoder.model,
        num_positions=decoder.num_positions + num_run + POSITION_BLOCK,
        device=decoder.device, prepack=decoder.is_prepacked or decoder.is_fused,
        kernels=decoder.kernels, head=head,
    )  # fmt: skip
    if context.graphs is not None:
        net.decoder.graphs = StepGraphs(context.graphs)
    return net


def list_roots(requests: Sequence[ActiveRequest]) -> list[Candidates]:
    """Return the candidates of requests without a draft: each one's root alone."""
    return [Candidates(make_root(request.output_ids[-1])) for request in requests]


def list_rows(requests: Sequence[ActiveRequest]) -> np.ndarray:
    """Return the cache rows of requests, [B]."""
    return np.array([request.row for request in requests], np.int64)


class FeatureDrafter(Drafter):
    """Drafter that reads the target's states of every committed token into a cache of its own.

    States are read when the row is drafted for, so that a row that is never drafted for costs
    nothing: until then they wait, up to `MAX_WAITING_STATES` of each row.

    `_num_known`, `_num_read`: [R], tokens of each row whose states have come, and that were read.
    The states of a prompt come by `follow`, and its last one by `observe` a second time.

    net: the drafter's layers, whose cache has `_num_run` positions for a draft after a text.
    """

    follows_prompts = True
    net: DraftNet
    _num_run: int

    def __init__(
        self, net: DraftNet, decoder: Decoder, layers: tuple[int, ...] | None, title: str
    ) -> None:
        """Take the target's decoder. layers: whose outputs are read; None: the last state."""
        self.net, self._decoder, self.reads_hidden = net, decoder, layers is None
        self._num_known: IntArray = np.zeros(0, np.int64)
        self._num_read: IntArray = np.zeros(0, np.int64)
        # By row, the newest states in order, [N, F].
        self._waiting_states: dict[int, list[Tensor]] = {}
        # The newest steps, whose states were not sorted by rows yet: rows, nodes, all states.
        self._steps: list[tuple[Sequence[int], Sequence[Sequence[int]], Tensor]] = []
        self._num_unsorted = 0  # states of these
        self._started_rows: set[int] = set()  # rows whose prompts have just ended
        if layers is None:
            return
        num_layers = decoder.model.num_hidden_layers
        if layers[-1] >= num_layers:
            raise SpecDecError(
                f"the {title} drafter reads the target's layer {layers[-1]}, of {num_layers}"
                " from 0",
                f"convert again: {USE_ITS_DRAFTER}",
            )
        decoder.observed_layers = layers

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make a cache of the drafter's own, and know of no token of so many rows."""
        vars(self).pop("_cache", None)  # what it has is free for the next
        self._cache = self.net.decoder.make_cache(num_rows, num_positions + self._num_run)
        self._num_known, self._num_read = np.zeros((2, num_rows), np.int64)
        self._waiting_states, self._started_rows = {}, set()
        self._steps, self._num_unsorted = [], 0

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Start a row over with what is kept; `follow` then says where its prompt goes on."""
        if length:
            self._read([source])
        num_cached = int(self._cache.past_lens[source])
        self._cache.copy_prefix(source, row, min(num_cached, length))
        self._start_over(row, length)

    def settle(self, row: int) -> None:
        self._read([row])

    def resume(self, row: int, length: int) -> None:
        self._start_over(row, length)

    def count_unread(self, requests: Sequence[ActiveRequest]) -> int:
        """Count the tokens of the texts that are not in the drafter's cache."""
        return sum(self._list_unread(requests))

    def _list_unread(self, requests: Sequence[ActiveRequest]) -> list[int]:
        """Count the tokens that its cache lacks of each text, but those that a step has brought."""
        step_size = self.max_draft_depth + 1
        lengths = [len(r.request.input_ids) + len(r.output_ids) - 1 for r in requests]
        past = self._cache.past_lens[list_rows(requests)].tolist()
        return [max(0, length - n - step_size) for length, n in zip(lengths, past, strict=True)]

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Read what is new of the texts, and draft.

        Nothing is drafted for those of whose prompts a part is left for later steps.
        """
        ready, chunk_sizes = self._plan_prefill(self._list_unread(requests))
        for index, count in chunk_sizes.items():
            self._read_chunk(requests[index], count)
        candidates = list_roots(requests)
        if ready:
            ready_requests = [requests[index] for index in ready]
            for index, draft in zip(ready, self._read_and_draft(ready_requests), strict=True):
                candidates[index] = draft
        return candidates

    def _read_chunk(self, request: ActiveRequest, count: int) -> None:
        """Read the next `count` tokens of a prompt."""
        self._read([request.row], count)

    def _read_and_draft(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Read what waits of some requests, and draft for them."""
        self._read([request.row for request in requests])
        return self._draft(requests)

    def _draft(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for requests whose texts are known."""
        raise NotImplementedError

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Note that the prompts' states are known, so that `observe` brings nothing new of them."""
        self._started_rows |= {request.row for request in requests}

    def follow(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: States
    ) -> None:
        """Keep the states of a pass over prompts."""
        self._sort()
        for row, start in zip(rows, starts, strict=True):
            self._go_back(row, start)
        self._append(rows, [range(count) for count in counts], states)

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Keep the states of the accepted tokens."""
        rows = [request.row for request in requests]
        if self._started_rows.issuperset(rows):  # the prompts' own pass
            self._started_rows.difference_update(rows)
            return
        self._append(rows, paths, states)

    def _append(self, rows: Sequence[int], paths: Sequence[Sequence[int]], states: States) -> None:
        """Keep the states of some nodes of a step after those that are known of each row."""
        observed_states = states.hidden if self.reads_hidden else states.layers
        assert observed_states is not None
        self._steps.append((rows, paths, observed_states))
        self._num_unsorted += observed_states.shape[0] * observed_states.shape[1]
        if self._num_unsorted <= MAX_WAITING_STATES:
            return
        self._sort()
        full = [
            row for row in rows if self._num_known[row] - self._num_read[row] > MAX_WAITING_STATES
        ]
        if full:
            self._read(full)

    def _sort(self) -> None:
        """Let the states of the newest steps wait by rows, all at once."""
        if not self._steps:
            return
        nodes: dict[int, list[int]] = {}
        begin = 0
        for rows, paths, states in self._steps:
            for row, path in zip(rows, paths, strict=True):
                nodes.setdefault(row, []).extend([begin + node for node in path])
                begin += states.shape[1]
        flat = torch.cat([states.flatten(0, 1) for *_, states in self._steps])
        self._steps, self._num_unsorted = [], 0
        order = [node for row_nodes in nodes.values() for node in row_nodes]
        sorted_states = flat[to_device(order, flat.device)]
        for (row, row_nodes), row_states in zip(
            nodes.items(), sorted_states.split_with_sizes([*map(len, nodes.values())]), strict=True
        ):
            self._waiting_states.setdefault(row, []).append(row_states)
            self._num_known[row] += len(row_nodes)

    def _go_back(self, row: int, length: int) -> None:
        """Forget what waits of a row's tokens from `length` on."""
        read = min(length, int(self._num_read[row]))
        waiting_states = self._waiting_states.pop(row, None)
        if waiting_states is not None and read < length:
            self._waiting_states[row] = [torch.cat(waiting_states)[: length - read]]
        else:
            read = length
        self._num_known[row], self._num_read[row] = length, read

    def _start_over(self, row: int, length: int) -> None:
        """Note that a row has another text, of which so many tokens are known, and none wait."""
        self._sort()
        self._waiting_states.pop(row, None)
        self._num_known[row] = self._num_read[row] = length

    def _read(self, rows: Sequence[int], max_tokens: int | None = None) -> None:
        """Read the states that wait of some rows, at most the first `max_tokens` of each."""
        self._sort()
        row_blocks = []
        for row in rows:
            if row not in self._waiting_states:
                continue
            states, start = torch.cat(self._waiting_states.pop(row)), int(self._num_read[row])
            size = len(states) if max_tokens is None else min(max_tokens, len(states))
            self._num_read[row] += size
            if size < len(states):
                self._waiting_states[row] = [states[size:]]
            row_blocks.append((np.full(size, row), np.arange(start, start + size), states[:size]))
        # Several rows at once, unless there is much of each.
        is_short = sum(len(states) for *_, states in row_blocks) <= MAX_WAITING_STATES
        for group in [row_blocks] if row_blocks and is_short else [[block] for block in row_blocks]:
            line_blocks, position_blocks, state_blocks = zip(*group, strict=True)
            rows_read, positions = np.concatenate(line_blocks), np.concatenate(position_blocks)
            self._keep(rows_read, positions, torch.cat(state_blocks))

    def _take_newest(self, rows: Sequence[int]) -> NewStates | None:
        """Take the newest step's states as read, where they are all that waits of these rows.

        None where it is otherwise, and nothing is taken.
        """
        if len(self._steps) != 1:
            return None
        step_rows, paths, states = self._steps[0]
        is_all = [*step_rows] == [*rows] and states.is_contiguous()
        if not is_all or any(row in self._waiting_states for row in rows):
            return None
        self._steps, self._num_unsorted = [], 0
        lines, state_rows, positions = list[int](), list[int](), list[int]()
        for index, (row, path) in enumerate(zip(rows, paths, strict=True)):
            start, first_line = int(self._num_known[row]), index * states.shape[1]
            lines += [first_line + node for node in path]
            state_rows += [row] * len(path)
            positions += range(start, start + len(path))
            self._num_known[row] = self._num_read[row] = start + len(path)
        return NewStates(states, lines, state_rows, positions)

    def _keep(self, rows: IntArray, positions: IntArray, states: Tensor) -> None:
        """Keep states [N, F] of the tokens at `positions` of `rows`, [N], the next they lack."""
        raise NotImplementedError
