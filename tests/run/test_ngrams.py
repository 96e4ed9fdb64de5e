"""Prompt lookup and lookahead: what they draft, that it never shows, and the flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.drafters.lookahead import (
    Lookahead,
    LookaheadDrafter,
    NgramPool,
    choose_lookahead,
    fit_lookahead,
)
from specdec.decode.drafters.prompt_lookup import NgramIndex, PromptLookupDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import ActiveRequest, Request
from specdec.engine.step import States
from specdec.engine.tree import TreeBuilder, build_tree_mask, pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.methods import METHODS
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.prompt_lookup import read_options as read_lookup_options
from specdec.run.pipeline import check_settings, run_engine
from specdec.run.settings import RunSettings
from tests.conftest import make_llama, make_tokenizer
from tests.engines import call, list_path_tokens, list_paths, list_requests, make_engine

# ---- Prompt lookup.


def find_by_force(text: Sequence[int], max_size: int, num_tokens: int) -> list[int]:
    """The longest end of the text that occurred before, its last occurrence, what followed."""
    for size in range(min(max_size, len(text) - 1), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                copied = list(text)
                for at in range(num_tokens):
                    copied.append(copied[start + size + at])
                return copied[len(text) :]
    return []


@hypothesis.given(
    st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5), st.integers(0, 6), st.data()
)
def test_the_index_finds_what_a_search_finds(
    text: list[int], max_size: int, num_tokens: int, data: st.DataObject
) -> None:
    """However the text came in."""
    index = NgramIndex(max_size)
    cut = data.draw(st.integers(0, len(text)))
    index.extend(text[:cut])
    index.draft(num_tokens)
    index.extend(text[cut:])
    assert len(index) == len(text)
    assert index.draft(num_tokens) == find_by_force(text, max_size, num_tokens)


def test_what_is_copied() -> None:
    """The longest end wins over a later shorter one, the last of equals, and copies go on."""
    index = NgramIndex(2)
    index.extend([1, 2, 8, 1, 2, 9, 5, 2, 7, 1, 2])
    assert index.draft(2) == [9, 5], "[1, 2] at its last place, not [2]"
    index.extend([6])
    assert index.draft(3) == [], "6 is new"
    index.extend([4, 4, 4])
    assert index.draft(5) == [4] * 5


# ---- Lookahead.


@pytest.mark.parametrize(
    ("config", "expected"),
    [((7, 7, 7), 83), ((4, 4, 4), 23), ((5, 2, 3), 7), ((2, 2, 1), 2), ((1, 3, 1), 3)],
)
def test_the_budget_is_tensorrt_llms(config: tuple[int, int, int], expected: int) -> None:
    w, n, g = config
    assert LookaheadConfig(*config).max_draft_tokens == expected
    assert (n - 2) + (w - 1 + g) * (n - 1) == expected


def test_a_pool_keeps_the_newest() -> None:
    pool = NgramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 0, 0)):
        pool.add(ngram)
    assert list(pool.find(1)) == [(6, 7), (2, 3)]
    assert list(pool.find(9)) == []


def test_the_window_is_the_papers() -> None:
    """W=3, N=4: each token sees row 0 up to its column, then its column's rows above it."""
    lookahead = Lookahead(LookaheadConfig(3, 4, 1), [50, 51, 52])
    lookahead.window = [[0, 11, 12], [20, 21, 22], [30, 31, 32]]
    tree = lookahead.grow([7])
    seen = {}
    mask = build_tree_mask(tree)
    for node, token in enumerate(tree.tokens.tolist()):
        seen[token] = [t for t, sees in zip(tree.tokens, mask[node], strict=True) if sees]
    assert seen == {
        7: [7], 11: [7, 11], 12: [7, 11, 12],
        20: [7, 20], 21: [7, 11, 21], 22: [7, 11, 12, 22],
        30: [7, 20, 30], 31: [7, 11, 21, 31], 32: [7, 11, 12, 22, 32],
    }  # fmt: skip
    depths = dict(zip(tree.tokens.tolist(), tree.depths.tolist(), strict=True))
    assert {t: depths[t] for t in (7, 12, 20, 22, 32)} == {7: 0, 12: 2, 20: 1, 22: 3, 32: 4}
    assert [int(tree.tokens[node]) for node in lookahead.ends] == [30, 31, 32]
    lookahead.advance([40, 41, 42])
    assert lookahead.window == [[20, 21, 22], [30, 31, 32], [40, 41, 42]]


def test_ngrams_are_verified_once_the_rows_are_the_targets() -> None:
    """Row by row the first guesses leave; then each column is an n-gram, and so is the text."""
    lookahead = Lookahead(LookaheadConfig(2, 3, 4), [5, 6])
    lookahead.window = [[5, 90], [91, 92]]
    for step, tokens in enumerate(([11, 12], [21, 22], [31, 32])):
        lookahead.grow([5] * (step + 1))
        assert list(lookahead.pool.find(11)) == []
        lookahead.advance(tokens)
    assert list(lookahead.pool.find(90)) == [], "what follows a first guess is nobody's choice"
    lookahead.grow([5, 5, 5, 5, 12])
    assert list(lookahead.pool.find(12)) == [(22, 32)], "a column of the window"
    assert list(lookahead.pool.find(6)) == [(5, 5)], "the prompt's end and the output"
    tree = lookahead.grow([5, 5, 5, 5, 12])
    assert [12, 22, 32] in [tree.tokens[path].tolist() for path in list_paths(tree)]


@hypothesis.given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 4), st.randoms())
def test_trees_stay_within_the_budget(w: int, n: int, g: int, random: Any) -> None:
    """With few tokens, so that paths coincide; siblings always differ."""
    config = LookaheadConfig(w, n, g)
    output = [random.randrange(4)]
    lookahead = Lookahead(config, [random.randrange(4) for _ in range(5)])
    for _ in range(6):
        tree = lookahead.grow(output)
        assert tree.num_draft_tokens <= config.max_draft_tokens
        assert tree.depth <= config.max_draft_depth
        edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
        assert len(set(edges)) == len(edges)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        lookahead.advance([random.randrange(4) for _ in range(w)])
        output += [random.randrange(4) for _ in range(random.randrange(1, 4))]


@hypothesis.given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1))
def test_a_grown_tree_is_the_packed_one(beams: list[list[int]]) -> None:
    """The same paths from the root, whatever the order of the nodes."""
    builder = TreeBuilder(9)
    for beam in beams:
        node = 0
        for token in beam:
            node = builder.add(node, token)
    grown, packed = builder.build(), pack_beams(9, np.array(beams))

    assert list_path_tokens(grown) == list_path_tokens(packed)
    assert grown.num_nodes == packed.num_nodes
    assert sorted(grown.depths.tolist()) == sorted(packed.depths.tolist())


# ---- The engine.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one target for each mode."""
    parent = tmp_path_factory.mktemp("ngrams")
    make_llama(parent, seed=3)
    make_tokenizer(parent / "target")
    checkpoint = parent / "checkpoint"
    call("convert", "--model-dir", parent / "target", "--output-dir", checkpoint)
    for mode, length in (("draft_tokens_external", 6), ("lookahead_decoding", 23), ("plain", 0)):
        flags = ["--speculative-decoding-mode", mode, "--max-draft-len", length] if length else []
        call(
            "build", "--checkpoint-dir", checkpoint, "--output-dir", parent / mode,
            *flags,
        )  # fmt: skip
    return parent


PROMPTS = [[7, 30, 7, 31, 7, 30, 7, 31], [9, 10], [40], [5] * 30]


def run(engine: TorchEngine, drafter: Any = None, limit: int = 120) -> list[ActiveRequest]:
    requests = list_requests(PROMPTS, limit)
    if drafter is None:
        return engine.generate(requests)
    return generate(engine.decoder, drafter, requests, Options(max_batch_size=3))


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[TorchEngine, list[list[int]]]:
    engine = TorchEngine(folder / "draft_tokens_external", device="cpu")
    return engine, [r.output_ids for r in run(engine)]


PERIOD = 10


@pytest.fixture(scope="module")
def repeater(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """A target that counts: after token 20 + n comes 20 + (n + 1) % PERIOD, after others 20."""
    from transformers import AutoModelForCausalLM

    folder = make_llama(tmp_path_factory.mktemp("repeater"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        head.zero_()
        head[20] = embedding.sum(0) / 100
        for n in range(PERIOD):
            head[20 + (n + 1) % PERIOD] = embedding[20 + n]
    model.save_pretrained(folder)
    return TorchEngine(make_engine(folder.parent, folder), device="cpu")


def test_a_text_that_repeats_itself_is_drafted_in_full(repeater: TorchEngine) -> None:
    """Once a period has been written, a step emits all that it can."""
    request = Request(index=0, input_ids=[3, 25], max_output_len=61, end_ids=frozenset())
    expected = [20 + (6 + n) % PERIOD for n in range(61)]
    lookup = PromptLookupDrafter(LookupOptions(num_tokens=4, max_ngram_size=2))
    (result,) = generate(repeater.decoder, lookup, [request], Options())
    assert result.output_ids == expected
    # 26 comes with the prompt, up to the next 25 are nine, then 50 by fives; the last one alone.
    assert result.stats.accepted_histogram == [10, 0, 0, 0, 10]
    window = LookaheadDrafter(LookaheadConfig(4, 4, 4), repeater.decoder)
    (result,) = generate(repeater.decoder, window, [request], Options())
    assert result.output_ids == expected
    # Until the window has gone by a token that the text has reached, one at a time; then by fours.
    histogram = result.stats.accepted_histogram
    assert histogram[0] < 10
    assert histogram[1:3] == [0, 0]
    assert histogram[3] > 10


def test_window_rows_are_the_targets_own_choices(
    plain: tuple[TorchEngine, list[list[int]]],
) -> None:
    """Each new row holds the argmax after the path above it, computed from the text alone."""
    engine, _ = plain
    drafter = LookaheadDrafter(LookaheadConfig(3, 3, 2), engine.decoder)
    checked: list[tuple[list[int], int]] = []  # what a path's last token ends, the token after it
    observe = drafter.observe

    def watch(requests: Any, states: States, paths: Any) -> None:
        state = drafter._states[0]
        before, is_drafted = list(state.window), bool(state.ends)
        observe(requests, states, paths)
        if not is_drafted:
            return
        text = [*PROMPTS[0], *requests[0].output_ids[: -len(paths[0])]]
        for column, token in enumerate(state.window[-1]):
            path = [*before[0][1 : column + 1], *(row[column] for row in before[1:])]
            checked.append(([*text, *path], token))

    drafter.observe = watch  # type: ignore[method-assign]
    request = Request(index=0, input_ids=PROMPTS[0], max_output_len=12, end_ids=frozenset())
    # Not the last step: there the output is cut.
    generate(engine.decoder, drafter, [request], Options())
    requests = [
        Request(index=i, input_ids=text, max_output_len=1, end_ids=frozenset())
        for i, (text, _) in enumerate(checked[:-3])
    ]
    assert len(requests) > 12
    own = [r.output_ids for r in engine.generate(requests)]
    assert own == [[token] for _, token in checked[:-3]]


# ---- Flags.


def settings(**values: Any) -> RunSettings:
    return RunSettings(engine_dir=Path("e"), input_text=["a"], **values)


def test_flags_of_prompt_lookup() -> None:
    assert read_lookup_options(settings()) is None
    assert read_lookup_options(settings(prompt_lookup_config="[10,2,[0,1]]")) == LookupOptions(
        num_tokens=10, max_ngram_size=2, target_devices=(0, 1)
    )
    named = settings(prompt_lookup_num_tokens=8)
    assert read_lookup_options(named) == LookupOptions(num_tokens=8, max_ngram_size=4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_matching_ngram_size": 2}, "without --prompt-lookup-num-tokens"),
        *(
            ({"prompt_lookup_config": text}, "--prompt-lookup-config is")
            for text in ("", "4", "[4,2]", "[0,2,[0]]", "[4,2,0]", "[4,True,[0]]", "[4,2,[]]")
        ),
        *(
            ({"lookahead_config": text}, "--lookahead-config is")
            for text in ("", "7", "[7,7]", "[7,1,7]", "[0,7,7]", "[7,7,7.0]", "[7,7,0]")
        ),
    ],
)
def test_wrong_flags(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_settings(settings(**flags))


def test_the_default_window_is_the_largest_that_fits() -> None:
    mode = METHODS["lookahead"].mode
    sizes = {83: 7, 84: 7, 82: 6, 23: 4, 22: 3, 3: 2}
    for length, size in sizes.items():
        assert choose_lookahead(None, mode, length) == LookaheadConfig(size, size, size)
    assert choose_lookahead(None, None, 83) is None
    with pytest.raises(SpecDecError, match=r"\[2,2,2\] drafts 3 tokens .* max_draft_len 2"):
        choose_lookahead(None, mode, 2)


@pytest.mark.parametrize(
    ("length", "expected"), [(83, (7, 7, 7)), (11, (3, 3, 3)), (1, (1, 2, 1)), (82, (42, 2, 41))]
)
def test_a_window_that_fills_the_engine_exactly(length: int, expected: tuple[int, ...]) -> None:
    assert fit_lookahead(length) == LookaheadConfig(*expected)
    for other in range(1, 200):
        assert fit_lookahead(other).max_draft_tokens == other


def run_command(folder: Path, mode: str, **flags: Any) -> dict[str, Any]:
    return run_engine(
        RunSettings(
            engine_dir=folder / mode, tokenizer_dir=str(folder / "target"), device="cpu",
            input_text=["aba aba aba aba"], max_output_len=24, **flags,
        )
    )  # fmt: skip


def test_the_command(folder: Path) -> None:
    lookup, lookahead = "draft_tokens_external", "lookahead_decoding"
    reports = [
        run_command(folder, lookup, prompt_lookup_config="[6,3,[0]]"),
        run_command(folder, lookahead),
        run_command(folder, lookahead, lookahead_config="[3,3,3]"),
        run_command(folder, lookahead, no_speculation=True),
    ]
    methods = [report["stats"]["method"] for report in reports]
    assert methods == ["prompt_lookup", "lookahead", "lookahead", "plain"]
    assert len({tuple(report["outputs"][0]["output_ids"]) for report in reports}) == 1
    widths = [len(report["outputs"][0]["stats"]["accepted_histogram"]) for report in reports]
    assert widths == [7, 6, 4, 1], "the most that a step can accept, and none"


MODES = ("draft_tokens_external", "lookahead_decoding", "plain")


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_of_any_mode_takes_every_method(folder: Path, mode: str) -> None:
    """Who drafts, and how much, is chosen by the run; the mode of the build is its default."""
    default = "lookahead" if mode == "lookahead_decoding" else "suffix"
    longer = 9  # than what the engines were built for, where the modes have a length
    runs: list[tuple[str, dict[str, Any]]] = [
        (default, {}),
        ("plain", {"no_speculation": True}),
        ("prompt_lookup", {"prompt_lookup_num_tokens": longer}),
        ("suffix", {"suffix_max_tokens": 4}),
        ("suffix", {"suffix_max_tokens": longer}),
        ("lookahead", {"lookahead_config": "[5,5,5]"}),
        ("draft_target", {"draft_engine_dir": folder / "plain", "draft_len": "9"}),
        ("draft_target", {"draft_engine_dir": folder / "draft_tokens_external"}),
        ("prompt_lookup,suffix",
         {"draft_chain": "prompt_lookup,suffix", "prompt_lookup_num_tokens": longer,
          "suffix_max_tokens": longer}),
    ]  # fmt: skip
    texts = set()
    for method, flags in runs:
        report = run_command(folder, mode, **flags)
        assert report["stats"]["method"] == method
        texts.add(tuple(report["outputs"][0]["output_ids"]))
    assert len(texts) == 1


def test_a_draft_model_has_a_length_of_its_own(folder: Path) -> None:
    """The build's where it has one, else the usual one."""
    lengths = {}
    for mode in MODES:
        engine = TorchEngine(folder / mode, device="cpu")
        draft = TorchEngine(folder / "plain", device="cpu")
        drafter = attach_draft(engine, draft, draft_len=None, use_logits=False)
        lengths[mode] = drafter.max_draft_tokens
        engine.close()
    assert lengths == {"draft_tokens_external": 6, "lookahead_decoding": 23, "plain": 8}


@pytest.mark.parametrize(
    ("mode", "flags", "message"),
    [
        ("plain", {"prompt_lookup_num_tokens": 1024}, "has room for 1023: max_num_tokens 8192"),
        ("plain", {"suffix_max_tokens": 1024}, "draft 1023 or fewer, or build with a smaller"),
        ("lookahead_decoding", {"lookahead_config": "[30,30,30]"}, "drafts 1739 tokens a step"),
        ("plain", {"draft_engine_dir": "plain", "draft_len": "1024"}, "drafts 1024 tokens a step"),
        ("plain", {"draft_engine_dir": "plain", "draft_tree_tokens": 1024}, "has room for 1023"),
        ("plain", {"prompt_lookup_config": "[4,2,[0,1]]"}, "device list [0, 1] has 2 entries"),
    ],
)
def test_what_an_engine_refuses(
    folder: Path, mode: str, flags: dict[str, Any], message: str
) -> None:
    if "draft_engine_dir" in flags:
        flags = flags | {"draft_engine_dir": folder / flags["draft_engine_dir"]}
    with pytest.raises(SpecDecError) as caught:
        run_command(folder, mode, **flags)
    assert message in caught.value.message + caught.value.hint
