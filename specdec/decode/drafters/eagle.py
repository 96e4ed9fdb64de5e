"""EAGLE: decoder layers that draft from the target's features, level by level of a tree.

A pair is a feature of the target and the token after it (`specdec.engine.eagle`). The pairs of
committed tokens are run once each, from true features, and stay in the drafter's own cache; those
of a tree are written after them and are dropped with it. A P-EAGLE drafter has run the pairs of all
places of a tree by then, which know nothing of one another's tokens: any may follow any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import (
    ALL_LEVELS,
    DraftContext,
    FeatureDrafter,
    list_rows,
    make_net,
)
from specdec.decode.drafters.levels import (
    DynamicTree,
    Level,
    LevelDraft,
    TreeDraft,
    make_first,
    read_temperatures,
)
from specdec.decode.drafters.trees import (
    check_num_tokens,
    check_paths,
    get_cpu_tokens,
    grow_choices,
    lay_out_paths,
)
from specdec.decode.prefill import Follow, fill_cache
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.eagle import EagleNet
from specdec.engine.kv_cache import CachedTensor, KVCache
from specdec.engine.mtp import MtpNet
from specdec.engine.native_drafts import NewPairs, PackedEagle, PairDrafts, TreeLayout, pack_drafter
from specdec.engine.step import States, Step
from specdec.engine.transfers import make_zeros, to_device, to_host
from specdec.engine.tree import IntArray, Tree
from specdec.errors import SpecDecError
from specdec.methods.base import Choices
from specdec.methods.eagle import EagleOptions, EagleParams

FLAG = "--eagle-choices"
# The tree that EAGLE-1's authors measured with, `mc_sim_7b_63` in their code.
PUBLISHED_CHOICES: Choices = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
DEFAULT_CPU_TOP_K = 4
MAX_PASS_TOKENS = 8192  # of one pass over pairs of prompts
MAX_NEW_PAIRS = 64  # of a row that are run in the call that makes its draft


def check_choices(choices: Choices, params: EagleParams) -> None:
    """Raise SpecDecError that lists what is wrong with a tree, for this engine."""
    check_paths(
        choices,
        FLAG,
        max_depth=params.num_eagle_layers,
        depth_source=f"num_eagle_layers {params.num_eagle_layers}",
        max_tokens=params.max_draft_len,
        tokens_flag="--max-draft-len",
        vocab_size=params.draft_vocab_size,
    )
    inner = {path[:-1] for path in choices if len(path) > 1}
    levels = [len(path) for path in inner]
    for level in set(levels):
        if levels.count(level) > params.max_non_leaves_per_layer:
            raise SpecDecError(
                f"{FLAG} has {levels.count(level)} paths of {level} ranks that go on, the engine's"
                f" max_non_leaves_per_layer is {params.max_non_leaves_per_layer}",
                "let fewer go on, or convert with a larger --max-non-leaves-per-layer",
            )


def count_top_k(params: EagleParams) -> int:
    """Return the widest dynamic tree of an engine: nodes of a level that it goes on from."""
    return min(params.max_non_leaves_per_layer, params.draft_vocab_size)


def check_top_k(top_k: int, params: EagleParams) -> None:
    """Raise SpecDecError for a dynamic tree that is wider than the engine has room for."""
    max_top_k = count_top_k(params)
    if top_k > max_top_k:
        raise SpecDecError(
            f"--eagle-dynamic-tree-max-top-k is {top_k}, the engine's max_non_leaves_per_layer"
            f" is {params.max_non_leaves_per_layer}, of {params.draft_vocab_size} tokens",
            f"give at most {max_top_k}, or convert with a larger --max-non-leaves-per-layer",
        )


def grow_deepest(params: EagleParams) -> Choices:
    """Return the most probable static tree that is as deep and as wide as the engine.

    TensorRT-LLM wants a path of exactly num_eagle_layers. Empty where max_draft_len has no room.
    """
    depth, room = params.num_eagle_layers, params.max_draft_len
    spine = [(0,) * length for length in range(1, depth + 1)]
    if len(spine) > room:
        return ()
    tree_paths = dict.fromkeys(spine)
    inner = dict.fromkeys(((), *spine[:-1]))
    for path in grow_choices(depth, (depth + 1) * room, params.draft_vocab_size):
        parent = path[:-1]
        num_inner = sum(len(inner_path) == len(parent) for inner_path in inner)
        has_parent = not parent or parent in tree_paths
        if len(tree_paths) == room:
            break
        if has_parent and (parent in inner or num_inner < params.max_non_leaves_per_layer):
            inner[parent] = None
            tree_paths[path] = None
    return tuple(tree_paths)


class StaticTree:
    """Tree of ranks that is the same in every step, as EAGLE-1's."""

    def __init__(self, choices: Choices) -> None:
        paths = sorted(choices, key=lambda path: (len(path), path))
        self.num_tokens = len(paths)
        self.depth = len(paths[-1])
        self.parents, self.depths = lay_out_paths(paths)
        inner: list[list[tuple[int, ...]]] = [[()], *([] for _ in range(self.depth - 1))]
        for path in paths:
            if any(other_path[: len(path)] == path != other_path for other_path in paths):
                inner[len(path)].append(path)
        self._inner = inner
        self._children = [[p for p in paths if len(p) == d] for d in range(1, self.depth + 1)]
        self.num_run = sum(map(len, inner[1:]))
        self.max_width = 1 + max(map(max, paths))

    def lay_out(self) -> TreeLayout:
        """Return the tree as kernels draft it."""
        sizes, numbers = list[int](), list[int]()
        roots: list[tuple[int, ...]] = [()]
        above = inner_above = roots
        for inner, children in zip(self._inner, self._children, strict=True):
            sizes += len(inner), 1 + max(path[-1] for path in children), len(children)
            numbers += [above.index(path) for path in inner]
            numbers += [inner_above.index(path[:-1]) for path in inner]
            numbers += [inner.index(path[:-1]) for path in children]
            numbers += [path[-1] for path in children]
            above, inner_above = children, inner
        width = max(map(len, self._inner))
        layout = np.array([*sizes, *numbers], np.int64)
        return TreeLayout(layout, self.depth, width, self.num_tokens, self.num_run, self.max_width)

    def name_drafts(self, drafts: PairDrafts) -> list[Candidates]:
        """Return what kernels have drafted."""
        return [
            Candidates(Tree(tokens, self.parents, self.depths), None, chances)
            for tokens, chances in zip(drafts.nodes[0], np.exp(drafts.log_chances), strict=True)
        ]

    def grow(self, draft: LevelDraft) -> list[Candidates]:
        """Draft every level of the tree for all rows."""
        levels: list[IntArray] = []
        scores: list[np.ndarray] = []
        for depth, children in enumerate(self._children):
            inner = self._inner[depth]
            width = 1 + max(path[-1] for path in children)
            level = make_first(draft.roots, width)
            if depth:
                above = self._children[depth - 1]
                indices = np.array([above.index(path) for path in inner])
                inner_above = self._inner[depth - 1]
                parents = np.array([inner_above.index(path[:-1]) for path in inner])
                tokens = levels[-1][:, indices]
                level = Level(tokens, np.broadcast_to(parents, tokens.shape), width)
            ranked, level_scores = draft.rank(level)
            parents = np.array([inner.index(path[:-1]) for path in children])
            ranks = [path[-1] for path in children]
            levels.append(ranked[:, parents, ranks])
            scores.append(level_scores[:, parents, ranks])
        tokens = np.concatenate([draft.roots[:, None], *levels], axis=1)
        confidence = np.exp(np.concatenate([np.zeros((len(tokens), 1)), *scores], axis=1))
        return [
            Candidates(Tree(row, self.parents, self.depths), None, sure)
            for row, sure in zip(tokens, confidence, strict=True)
        ]


class PassDraft:
    """A draft of all rows by one pass: tokens of each place, whatever stands before it."""

    min_gain = ALL_LEVELS  # one costs nothing

    def __init__(self, roots: IntArray, ranked: IntArray, scores: np.ndarray) -> None:
        """roots: [B]; ranked, scores: [B, P, width], best first, and log-probabilities."""
        self.roots, self._ranked, self._scores, self._depth = roots, ranked, scores, 0

    def rank(self, level: Level) -> tuple[IntArray, np.ndarray]:
        shape, depth = (*level.tokens.shape, level.width), self._depth
        self._depth += 1
        ranked = self._ranked[:, depth, None, : level.width]
        scores = self._scores[:, depth, None, : level.width]
        return np.broadcast_to(ranked, shape), np.broadcast_to(scores, shape)


def make_drafter(context: DraftContext) -> EagleDrafter:
    """Lay out the drafter, with the trees that are asked for, or others that are small on a CPU."""
    params, decoder = context.params, context.decoder
    assert isinstance(params, EagleParams)
    num_run = params.max_draft_len + params.num_eagle_layers * params.max_non_leaves_per_layer
    head = decoder.lm_head if decoder.group is None and decoder.lm_head.bias is None else None
    net = context.network or make_net(EagleNet, context, params, num_run, head)
    return EagleDrafter(net, decoder, context.options, has_budget=context.has_budget)


def list_texts(requests: Sequence[ActiveRequest]) -> tuple[IntArray, list[list[int]], IntArray]:
    """Return the cache rows [B], each pair's second token, and the texts' last ones [B]."""
    texts = [[*r.request.input_ids[1:], *r.output_ids] for r in requests]
    return list_rows(requests), texts, np.array([text[-1] for text in texts], np.int64)


def _list_tokens(request: ActiveRequest, num_pairs: int) -> list[int]:
    """List the second tokens of a text's pairs after the first `num_pairs`."""
    prompt, output = request.request.input_ids, request.output_ids
    start = num_pairs + 1 - len(prompt)  # in the output
    return output[start:] if start >= 0 else [*prompt[start:], *output]


class PairDrafter(FeatureDrafter):
    """Proposes what a drafter of pairs does; keeps the features of all committed tokens."""

    net: EagleNet | MtpNet
    tree: StaticTree | DynamicTree
    _packed: PackedEagle | None = None  # where kernels make a whole draft in one call

    def _use(self, tree: StaticTree | DynamicTree) -> None:
        self.tree, self._num_run, self._layout = tree, tree.num_run, tree.lay_out()
        self.max_draft_tokens, self.max_draft_depth = tree.num_tokens, tree.depth

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make room for a feature a position, too."""
        super().allocate(num_rows, num_positions)
        shape = (num_rows, self._cache.num_positions, self.net.hidden_size)
        decoder = self.net.decoder
        self._features = make_zeros(shape, decoder.dtype, decoder.device)

    def list_cached_tensors(self) -> list[CachedTensor]:
        """List the features that pairs are made of, and the pairs' keys and values."""
        return [
            CachedTensor("features", self._features, 0, 1, self._num_read),
            self._cache.get_cached_tensor("pairs", 1, is_needed=False),
        ]

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        super().copy_prefix(source, row, length)
        if source != row and length:
            self._features[row, :length] = self._features[source, :length]

    def _go_back(self, row: int, length: int) -> None:
        super()._go_back(row, length)
        # The pair of the token before has another token now, and a prefix that was to be reused may
        # have been dropped.
        past = int(self._cache.past_lens[row])
        self._cache.copy_prefix(row, row, min(past, max(0, length - 1)))

    def _read_and_draft(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        if self._packed is None:
            return super()._read_and_draft(requests)
        rows, past = [request.row for request in requests], self._cache.past_lens
        tokens: Sequence[Sequence[int]] = [_list_tokens(r, int(past[r.row])) for r in requests]
        most, new_states = max(map(len, tokens)), None
        if most > MAX_NEW_PAIRS or past[rows].max() + most > self._cache.num_positions:
            self._read(rows)
            tokens = self._run_pairs_but_last(requests, tokens)
        elif (new_states := self._take_newest(rows)) is None:
            self._read(rows)
        pairs = NewPairs(rows, tokens, read_temperatures(requests))
        drafts = self._packed.draft(
            self._cache, self._features, new_states, pairs, self._layout, self.min_gain
        )
        self.num_levels = drafts.num_levels
        return self.tree.name_drafts(drafts)

    def _draft(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Run the new pairs, then the levels of a tree below the last of each row."""
        rows, texts, roots = list_texts(requests)
        hidden = self._run_pairs(rows, texts)
        draft = TreeDraft(
            self.net, self._cache, rows, roots, hidden, read_temperatures(requests), self.min_gain
        )
        candidates = self.tree.grow(draft)
        self.num_levels = draft.num_levels
        return candidates

    def _run_pairs_but_last(
        self, requests: Sequence[ActiveRequest], tokens: Sequence[Sequence[int]]
    ) -> list[Sequence[int]]:
        """Run all new pairs but each row's last one, whose second token alone is returned.

        tokens: the second tokens of each row's new pairs. A call that drafts runs new pairs of all
        rows side by side, each row padded to the longest.
        """
        pairs = zip(requests, tokens, strict=True)
        behind = [request for request, row_tokens in pairs if len(row_tokens) > 1]
        if behind:
            rows, texts, _ = list_texts(behind)
            self._run_pairs(rows, [text[:-1] for text in texts])
        return [row_tokens[-1:] for row_tokens in tokens]

    def _run_pairs(
        self, rows: IntArray, texts: Sequence[Sequence[int]], follow: Follow | None = None
    ) -> Tensor:
        """Run pairs of committed tokens, after the features that are kept of the target."""

        def run(step: Step, cache: KVCache) -> Tensor:
            device = self._features.device
            indices = to_device(step.rows, device)[:, None], to_device(step.positions, device)
            return self.net.forward(step, self._features[indices], cache)

        return fill_cache(
            self.net.decoder, self._cache, rows.tolist(), texts, MAX_PASS_TOKENS, follow, run
        )

    def _read_chunk(self, request: ActiveRequest, count: int) -> None:
        """Run so many more pairs of a prompt, whose features are all made."""
        self._read([request.row])
        rows, (text,), _ = list_texts([request])
        self._run_pairs(rows, [text[: int(self._cache.past_lens[request.row]) + count]])

    def _keep(self, rows: IntArray, positions: IntArray, states: Tensor) -> None:
        """Keep the features of some tokens."""
        device = self._features.device
        indices = to_device(rows, device), to_device(positions, device)
        self._features[indices] = self.net.make_features(states)


class EagleDrafter(PairDrafter):
    """Proposes a static or a dynamic tree."""

    net: EagleNet

    def __init__(
        self, net: EagleNet, decoder: Decoder, options: EagleOptions | None = None, *,
        has_budget: bool = False,
    ) -> None:  # fmt: skip
        """has_budget: only the part worth its time is verified: a larger tree on a CPU."""
        self.params, self._packed = net.params, pack_drafter(net)
        self._is_on_cpu = decoder.device.type == "cpu"
        self._most_tokens = get_cpu_tokens(has_budget=has_budget)
        eagle3 = self.params.eagle3
        layers = None if eagle3 is None else eagle3.aux_layers
        super().__init__(net, decoder, layers, "EAGLE-3")
        if options is None:
            choices = None if eagle3 is not None else self._choose_static()
            options = EagleOptions(choices=choices)
        if options.choices is None:
            self.use_dynamic_tree(options.top_k, options.num_tokens)
        else:
            self.use_choices(options.choices)

    def use_choices(self, choices: Choices) -> None:
        """Propose this tree of ranks from now on; raise SpecDecError if the engine has no room."""
        check_choices(choices, self.params)
        self._use(StaticTree(choices))

    def use_dynamic_tree(self, top_k: int | None = None, num_tokens: int | None = None) -> None:
        """Grow trees as EAGLE-2 does from now on; raise SpecDecError beyond the engine's limits."""
        params = self.params
        max_top_k = count_top_k(params)
        if top_k is None:
            top_k = min(max_top_k, DEFAULT_CPU_TOP_K) if self._is_on_cpu else max_top_k
        if num_tokens is None:
            num_tokens = params.max_draft_len
            num_tokens = min(num_tokens, self._most_tokens) if self._is_on_cpu else num_tokens
        check_top_k(top_k, params)
        check_num_tokens("--eagle-tree-tokens", num_tokens, params.max_draft_len, "--max-draft-len")
        self._use(DynamicTree(top_k=top_k, depth=params.max_draft_depth, num_tokens=num_tokens))

    def _choose_static(self) -> Choices:
        params = self.params
        if self._is_on_cpu:
            num_tokens = min(self._most_tokens, params.max_draft_len)
            return grow_choices(params.num_eagle_layers, num_tokens, params.draft_vocab_size)
        paths = [
            path for path in PUBLISHED_CHOICES
            if len(path) <= params.num_eagle_layers and max(path) < params.draft_vocab_size
        ]  # fmt: skip
        return tuple(paths[: params.max_draft_len])

    def _draft(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        if self.params.mask_token_id is None:
            return super()._draft(requests)
        rows, texts, roots = list_texts(requests)
        hidden = self._run_masked(rows, texts)
        ranked = to_host(*self.net.rank_tokens(hidden, self.tree.max_width))
        return self.tree.grow(PassDraft(roots, *ranked))

    def _run_masked(self, rows: IntArray, texts: Sequence[Sequence[int]]) -> Tensor:
        """Run new pairs and masked ones after them; what the head reads of the last places.

        That is [B, P, D], of the last true pair of each row first. Masked pairs are then dropped.
        """
        mask_token_id, feature = self.params.mask_token_id, self.net.mask_feature
        assert mask_token_id is not None
        assert feature is not None
        size, ends = self.tree.depth, [len(text) for text in texts]
        device = self._features.device
        positions = np.array(ends)[:, None] + np.arange(size - 1)
        self._features[to_device(rows, device)[:, None], to_device(positions, device)] = feature
        hidden = self._features.new_zeros((len(rows), size, len(feature)))
        lines = {int(row): line for line, row in enumerate(rows)}

        def keep(
            read: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: States
        ) -> None:
            for row_hidden, row, start, count in zip(
                states.hidden, read, starts, counts, strict=True
            ):
                line = lines[row]
                offset = start - (ends[line] - 1)  # from the last true pair
                skipped = max(0, -offset)
                if skipped < count:
                    hidden[line, offset + skipped : offset + count] = row_hidden[skipped:count]

        self._run_pairs(rows, [[*text, *[mask_token_id] * (size - 1)] for text in texts], keep)
        for row, end in zip(rows.tolist(), ends, strict=True):
            self._cache.copy_prefix(row, row, end)
        return hidden
