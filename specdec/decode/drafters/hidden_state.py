"""Drafters that draft from the target's last hidden state of each row's newest token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter
from specdec.decode.requests import ActiveRequest
from specdec.engine.graphs import Graphs
from specdec.engine.step import States
from specdec.engine.transfers import Array, to_device, to_host
from specdec.engine.tree import Tree


class HiddenStateDrafter(Drafter):
    """Drafter that reads the target's last hidden state of each row's newest token, and no more.

    graphs: `DraftContext.graphs`; a draft is recorded among them, and run by `replay`.
    Where `drafts_ahead`, the loop lets a draft be computed before the host knows what it follows:
    drafts and accepted tokens then come to the host together, and it waits once a step.
    """

    def __init__(self, graphs: Graphs | None) -> None:
        self.drafts_ahead = graphs is not None
        self._graphs = graphs
        # By row, the newest step's states, and where in them the newest token's is.
        self._newest: dict[int, tuple[Tensor, int, int]] = {}
        self._drafts: dict[int, tuple[int, Array]] = {}  # by row: the root, and what follows it

    def replay(
        self, net: object, key: Hashable, inputs: list[Tensor], compute: Callable[..., Tensor]
    ) -> Tensor:
        """Run `compute(*inputs)`, by a recorded graph where there is one; see `Graphs.call`."""
        if self._graphs is not None:
            outputs = self._graphs.call(net, key, inputs, lambda *arguments: (compute(*arguments),))
            if outputs is not None:
                return outputs[0]
        return compute(*inputs)

    def make_tree(self, root: int, draft: Array) -> Tree:
        """Return the tree of a row's part of what `compute_drafts` returned."""
        raise NotImplementedError

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget all states and drafts."""
        self._newest, self._drafts = {}, {}

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Forget what was drafted for the rows' former requests; the state comes later."""
        for request in requests:
            self._drafts.pop(request.row, None)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Draft for all rows at once that were not drafted for ahead."""
        new_requests = [r for r in requests if r.row not in self._drafts]
        if new_requests:
            roots = [request.output_ids[-1] for request in new_requests]
            hidden = self.get_hidden(new_requests)
            (drafts,) = to_host(self.compute_drafts(hidden, to_device(roots, hidden.device)))
            self.take_drafts(new_requests, roots, drafts)
        candidates = []
        for request in requests:
            root, draft = self._drafts.pop(request.row)
            assert root == request.output_ids[-1]
            candidates.append(Candidates(self.make_tree(root, draft)))
        return candidates

    def get_hidden(self, requests: Sequence[ActiveRequest]) -> Tensor:
        """Return the states [B, D] that requests are drafted from."""
        newest_states = [self._newest[request.row] for request in requests]
        states = newest_states[0][0]
        # Where a prompt has ended meanwhile, they are of several steps.
        if any(step_states is not states for step_states, *_ in newest_states):
            return torch.stack([states[line, node] for states, line, node in newest_states])
        _, lines, nodes = zip(*newest_states, strict=True)
        newest: Tensor = states[to_device(lines, states.device), to_device(nodes, states.device)]
        return newest

    def take_drafts(
        self, requests: Sequence[ActiveRequest], roots: Sequence[int], drafts: Array
    ) -> None:
        """Keep what was computed for the next `propose`."""
        for request, root, draft in zip(requests, roots, drafts, strict=True):
            self._drafts[request.row] = root, draft

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Keep the hidden state of each row's newest committed token: it is drafted from next."""
        for line, (request, path) in enumerate(zip(requests, paths, strict=True)):
            self._newest[request.row] = states.hidden, line, path[-1]
