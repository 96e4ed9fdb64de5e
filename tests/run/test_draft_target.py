"""Draft-target: a second engine drafts, the text stays the target's own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.draft_target import ModelChainDrafter, attach_draft
from specdec.decode.drafters.draft_tree import DRAFT_MODEL_MIN_TEMPERATURE, ModelTreeDrafter
from specdec.decode.drafters.levels import DynamicTree
from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.engine import TorchEngine, load_engine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.methods import METHODS
from specdec.methods.draft_target import DraftOptions
from specdec.methods.draft_target import read_options as read_draft_options
from specdec.run.settings import RunSettings
from tests.conftest import make_llama, make_tokenizer, read_error_lines
from tests.costs import make_costs
from tests.engines import call, make_noisy_copy, run_cli_here

LIMIT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines: a target, a draft model alike but for noise, and a stranger of equal vocabulary."""
    parent = tmp_path_factory.mktemp("pair")
    make_llama(parent, seed=3, name="target-hf")
    make_noisy_copy(parent / "target-hf", parent / "draft-hf")
    make_llama(parent, seed=9, layers=1, hidden=32, name="stranger-hf")
    for name in ("target", "draft", "stranger"):
        make_tokenizer(parent / f"{name}-hf")
        build(parent, name)
    return parent


def build(parent: Path, name: str, *flags: object, source: str | None = None) -> Path:
    source = source or name
    checkpoint = parent / f"{source}-ckpt"
    if not checkpoint.exists():
        call("convert", "--model-dir", parent / f"{source}-hf", "--output-dir", checkpoint)
    if name == "target":
        flags = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6)
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", parent / name, *flags)
    return parent / name


@functools.cache
def load(
    folder: Path, draft: str = "", draft_len: int | None = 4, use_logits: bool = False,
    tree_tokens: int | None = None,
) -> TorchEngine:  # fmt: skip
    engine = TorchEngine(folder / "target", device="cpu")
    if draft:
        attach_draft(
            engine,
            TorchEngine(folder / draft, device="cpu"),
            draft_len=draft_len,
            use_logits=use_logits,
            tree_tokens=tree_tokens,
        )
    return engine


def make_requests(number: int, **sampling: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    requests = []
    for index in range(number):
        length = 1 + (index * 7) % 19
        requests.append(
            Request(
                index=index,
                input_ids=torch.randint(3, 128, (length,), generator=generator).tolist(),
                max_output_len=1 + (index * 5) % LIMIT,
                end_ids=frozenset([17]) if index % 3 == 0 else frozenset(),
                sampling=SamplingParams(seed=index, **sampling),
            )
        )
    return requests


@pytest.mark.thorough
@pytest.mark.parametrize("draft", ["draft", "stranger", "target-itself"])
@pytest.mark.parametrize("draft_len", [1, 3, 6, None])
@pytest.mark.parametrize("use_logits", [False, True])
def test_greedy_text_is_the_targets(
    folder: Path, draft: str, draft_len: int | None, use_logits: bool
) -> None:
    if draft == "target-itself" and not (folder / draft).exists():
        build(folder, draft, source="target")
    requests = make_requests(11)
    expected = [r.output_ids for r in load(folder).generate(requests)]
    engine = load(folder, draft, draft_len, use_logits)
    results = engine.generate(requests)
    assert [r.output_ids for r in results] == expected
    rates = [r.stats.acceptance_rate for r in results if r.stats.num_draft_depth]
    if draft == "target-itself":
        assert set(rates) == {1.0}, "it is always right"
        sampled = engine.generate(make_requests(11, temperature=0.9))
        kept = [r.stats.acceptance_rate for r in sampled if r.stats.num_draft_depth]
        # Its probabilities are those of other sums: a ratio of 1 - 1e-7 is seldom refused.
        assert set(kept) == {1.0}
    elif draft == "draft" and draft_len == 3:
        assert 0.2 < sum(rates) / len(rates) < 1.0
    for result in results:
        # Nothing is drafted beyond the limit: the last step's bonus token is always used.
        assert result.stats.num_draft_tokens <= max(0, 6 * result.stats.num_verify_steps)
        if result.finish_reason == "length" and draft == "target-itself":
            emitted = result.stats.num_accepted + result.stats.num_verify_steps + 1
            assert emitted == len(result.output_ids)


class Erratic(PacedDrafter):
    """Drafts as far, and reads as much of prompts, as dice fall."""

    dice: random.Random
    num_read: list[int]

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        (drafter,), dice = self.members, self.dice
        drafter.max_levels = dice.randint(0, drafter.max_draft_tokens)
        drafter.max_prefill = dice.choice((None, 0, 5, 9))
        before = drafter.count_unread(requests)
        found = drafter.propose(requests)
        self.num_read.append(drafter.num_prefilled)
        assert before - drafter.count_unread(requests) <= drafter.num_prefilled
        return found

    def note_verified(self, drafts: Sequence[Candidates]) -> None:
        """Nothing is learned of these drafts."""


@pytest.mark.parametrize("is_sampled", [False, True])
def test_texts_may_be_run_by_pieces(folder: Path, is_sampled: bool) -> None:
    """Whenever and however far the draft model catches up, its cache holds the text."""
    if not (folder / "target-itself").exists():
        build(folder, "target-itself", source="target")
    requests = make_requests(11, **({"temperature": 0.9, "top_k": 20} if is_sampled else {}))
    expected = [r.output_ids for r in load(folder).generate(requests)]
    engine = load(folder, "target-itself", 4)
    erratic = Erratic([[engine.drafter]], make_costs())
    erratic.dice, erratic.num_read = random.Random(2), []
    results = generate(engine.decoder, erratic, requests, Options(max_batch_size=3))
    assert [r.output_ids for r in results] == expected
    rates = [r.stats.acceptance_rate for r in results if r.stats.num_draft_depth]
    assert len(rates) > 5
    assert set(rates) == {1.0}
    assert 0 < sum(0 < n <= 9 for n in erratic.num_read) < len(erratic.num_read)


@pytest.mark.thorough
def test_a_long_prompt_joins_a_nearly_full_row(folder: Path) -> None:
    """The draft model runs the new prompt with one token of a row that is almost at its end."""
    requests = [
        Request(index=n, input_ids=[3 + n] * size, max_output_len=limit, end_ids=frozenset())
        for n, (size, limit) in enumerate([(30, 100), (5, 40), (120, 9), (90, 30)])
    ]
    expected = [r.output_ids for r in load(folder).generate(requests)]
    engine = load(folder, "draft")
    assert max(r.stats.num_verify_steps for r in engine.generate(requests)) > 9
    results = generate(engine.decoder, engine.drafter, requests, Options(max_batch_size=2))
    assert [r.output_ids for r in results] == expected


# --- trees ---


def load_tree(
    folder: Path, tree_tokens: int, draft: str = "draft", draft_len: int | None = None
) -> tuple[TorchEngine, ModelTreeDrafter]:
    engine = load(folder, draft, draft_len, tree_tokens=tree_tokens)
    assert isinstance(engine.drafter, ModelTreeDrafter)
    return engine, engine.drafter


@pytest.mark.thorough
@pytest.mark.parametrize("draft", ["draft", "stranger"])
@pytest.mark.parametrize(("tree_tokens", "draft_len"), [(1, None), (3, None), (6, None), (6, 2)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95}])
def test_trees_leave_the_text(
    folder: Path, draft: str, tree_tokens: int, draft_len: int | None, sampling: dict[str, Any]
) -> None:
    """Greedy, and sampled with the target's own draws; rows that are refilled, and one request."""
    requests = make_requests(11, **sampling)
    expected = [r.output_ids for r in load(folder).generate(requests)]
    engine, drafter = load_tree(folder, tree_tokens, draft, draft_len)
    assert drafter.max_draft_depth == (draft_len or tree_tokens)
    for limits in (Options(max_batch_size=3), Options(max_batch_size=1, reuse_blocks=True)):
        results = engine.generate(requests, limits)
        assert [r.output_ids for r in results] == expected
    numbers = [r.stats.num_draft_tokens for r in results]
    assert all(number % tree_tokens == 0 for number in numbers)
    assert sum(numbers) > 20 * tree_tokens
    if draft == "draft" and tree_tokens == 6:
        assert sum(r.stats.num_accepted for r in results) > 20


def test_a_tree_is_what_the_draft_model_says(folder: Path) -> None:
    """Every node against the draft model's own words after its path, by a pass of its own."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "draft-hf").eval()
    engine, drafter = load_tree(folder, 6)
    requests = make_requests(5)
    seen: list[tuple[list[int], Candidates]] = []
    honest = drafter.propose

    def watch(active: Sequence[ActiveRequest]) -> list[Candidates]:
        found = honest(active)
        texts = [[*r.request.input_ids, *r.output_ids] for r in active]
        seen.extend(zip(texts, found, strict=True))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", watch)
        engine.generate(requests, Options(max_batch_size=2))
    trees = [(text, c) for text, c in seen if c.tree.num_draft_tokens]
    assert len(trees) > 10
    assert len({tuple(c.tree.parents) for _, c in trees}) > 3, "trees are of many shapes"
    with torch.inference_mode():
        for text, candidates in trees[::3]:
            tree, confidence = candidates.tree, candidates.confidence
            assert confidence is not None
            totals = {0: 1.0}
            words = {}  # by node, of what may follow it
            for node in range(tree.num_nodes):
                path: list[int] = []
                at = node
                while at:
                    path.insert(0, int(tree.tokens[at]))
                    at = int(tree.parents[at])
                logits = model(torch.tensor([[*text, *path]])).logits[0, -1].double()
                words[node] = (logits / DRAFT_MODEL_MIN_TEMPERATURE).softmax(-1)
                if node:
                    parent = int(tree.parents[node])
                    chance = float(words[parent][int(tree.tokens[node])])
                    assert confidence[node] == pytest.approx(chance, rel=1e-3)
                    totals[node] = totals[parent] * chance
            # None that was left out is likelier than those that are in.
            inside = {(int(p), int(t)) for p, t in zip(tree.parents, tree.tokens, strict=True)}
            outside = max(
                totals[node] * float(chance)
                for node in words for token, chance in enumerate(words[node])
                if (node, token) not in inside
            )  # fmt: skip
            assert outside <= min(totals.values()) * 1.001


def test_levels_end_where_none_could_enter_the_tree(folder: Path) -> None:
    """The trees are those of all levels, by fewer passes of the draft model."""
    _, drafter = load_tree(folder, 6)
    engine, _ = load_tree(folder, 6)
    requests = make_requests(6)
    found: list[list[Any]] = []
    num_levels = []
    for ends in (True, False):
        trees: list[Any] = []
        honest, settled = drafter.propose, DynamicTree._is_settled

        def watch(active: Sequence[ActiveRequest]) -> list[Candidates]:
            drafted = honest(active)  # noqa: B023
            trees.extend((c.tree.tokens.tolist(), c.tree.parents.tolist()) for c in drafted)  # noqa: B023
            num_levels.append(drafter.num_levels)
            return drafted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter, "propose", watch)
            if not ends:
                patch.setattr(DynamicTree, "_is_settled", lambda *_: False)
            engine.generate(requests)
        assert DynamicTree._is_settled is settled
        found.append(trees)
    assert found[0] == found[1]
    half = len(num_levels) // 2
    assert sum(num_levels[:half]) < 0.9 * sum(num_levels[half:])


@pytest.mark.thorough
def test_trees_of_the_end_of_the_draft_models_positions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text up to the last position that both models have; deeper nodes are of no use."""
    engine, drafter = load_tree(folder, 6)
    room = engine.config.build.max_seq_len
    request = Request(index=0, input_ids=[5, 6, 7], max_output_len=room - 3, end_ids=frozenset())
    monkeypatch.setattr(drafter.decoder, "num_positions", room)
    positions = []
    honest = drafter.decoder.forward

    def forward(step: Any, cache: Any, *tokens: Any) -> torch.Tensor:
        positions.append(int(step.positions.max()))
        return honest(step, cache, *tokens)

    monkeypatch.setattr(drafter.decoder, "forward", forward)
    (result,) = engine.generate([request])
    (expected,) = load(folder).generate([request])
    assert result.output_ids == expected.output_ids
    assert len(result.output_ids) == room - 3
    assert max(positions) == room - 1


class Guesses(Drafter):
    """Proposes the same two tokens after any, each followed by one."""

    max_draft_tokens, max_draft_depth = 4, 2

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        beams = np.array([[40, 9], [5, 9]])
        return [Candidates(pack_beams(r.output_ids[-1], beams)) for r in requests]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "draft", ["sharp", "draft", "padded", "short", "int8", "sharp, in a chain"]
)
def test_ratio_keeps_the_first_tokens_distribution(
    folder: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real engines, with logits: three tokens after one prompt, over many seeds.

    The sharp draft model is surer than the target of the same tokens: much of what it draws is
    replaced by one of several others. Others have more or fewer tokens, both padding, or rounded
    weights: what is drawn from is what is compared. In a chain,
    every other request has drafts that are not drawn.
    """

    from tests.run.statistics import FALSE_ALARM_RATE, check_first_tokens

    draft, _, chain = draft.partition(", ")
    if draft == "int8" and not (folder / draft).exists():
        build(folder, draft, "--quantization", "int8", source="draft")
    if not (folder / draft).exists():
        make_padded(folder, draft) if draft in PADDED else make_sharp(folder)
    engine = load(folder, draft, 2, True)
    drafter: Drafter = engine.drafter
    if chain:
        drafter = PacedDrafter([[Guesses()], [drafter]], make_costs(2), is_fixed=True)
        turns = itertools.cycle([True, False])
        monkeypatch.setattr(Pace, "is_best", lambda *_: next(turns))
    p_value, kept = check_first_tokens(engine, drafter, [5, 9, 40])
    assert 150 < kept < 2850, "some drafts are kept, some are not"
    if draft == "sharp":
        assert kept < 1500
    assert p_value > FALSE_ALARM_RATE / 5


def make_sharp(parent: Path) -> Path:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(parent / "target-hf")
    with torch.no_grad():
        model.lm_head.weight *= 4
    model.save_pretrained(parent / "sharp-hf")
    return build(parent, "sharp")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_caches_are_rolled_back_and_never_recomputed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Forward tokens are counted: each model runs a token once, and again only if it was rejected.

    Of the target: every prompt, then a newest token and its draft a step. Of the draft model: every
    prompt with the first token, then a newest token a pass, and once a step the last drafted token
    where that was accepted.
    """
    from specdec.engine.decoder import Decoder
    from specdec.engine.step import Step

    engine = load(folder, "draft", 4)
    assert isinstance(engine.drafter, ModelChainDrafter)
    draft = engine.drafter.decoder
    fed: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by whether it is the draft's
    honest = Decoder.forward

    def count(self: Decoder, step: Step, cache: Any) -> torch.Tensor:
        fed[self is draft].append(step.tokens.shape)
        return honest(self, step, cache)

    monkeypatch.setattr(Decoder, "forward", count)
    requests = [
        Request(
            index=n, input_ids=list(range(3 + n, 43 + n)), max_output_len=20, end_ids=frozenset()
        )
        for n in range(batch_size)
    ]
    results = engine.generate(requests)
    assert any(r.stats.num_accepted < r.stats.num_draft_depth for r in results), "some are rejected"
    assert any(r.stats.num_accepted for r in results)
    assert fed[True][0] == (batch_size, 41), "the prompts and the first tokens, once"
    assert max(size for _, size in fed[True][1:]) <= 2
    steps = max(r.stats.num_verify_steps for r in results)
    assert len(fed[True]) <= 4 * steps
    assert fed[False][0] == (batch_size, 40), "the prompts, once"
    assert len(fed[False]) == 1 + steps
    assert max(size for _, size in fed[False][1:]) <= 5


# --- options and refusals ---


def read(**flags: Any) -> DraftOptions | None:
    return read_draft_options(RunSettings(engine_dir=Path("e"), **flags))


def test_both_ways_of_writing_the_options() -> None:
    draft = {"draft_engine_dir": Path("d")}
    assert read() is None
    engine: dict[str, Any] = {"engine_dir": Path("d"), "tokenizer_dir": None}
    assert read(**draft) == DraftOptions(
        draft_len=None, draft_devices=None, target_devices=None, use_logits=False, **engine
    )
    joined = read(**draft, draft_target_model_config="[4,[0],[1,2],True]")
    named = read(**draft, draft_len="4", draft_devices="0", target_devices="1,2", use_logits=True)
    assert joined == named
    assert joined == DraftOptions(
        draft_len=4, draft_devices=(0,), target_devices=(1, 2), use_logits=True, **engine
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"draft_len": "4"}, "--draft-len without --draft-engine-dir"),
        ({"draft_tokenizer_dir": "x"}, "--draft-tokenizer-dir without"),
        ({"draft_tree_tokens": 4}, "--draft-tree-tokens without --draft-engine-dir"),
        (
            {"draft_engine_dir": Path("d"), "draft_tree_tokens": 4, "use_logits": True},
            "--draft-tree-tokens with --use-logits",
        ),
        (
            {
                "draft_engine_dir": Path("d"),
                "draft_tree_tokens": 4,
                "draft_target_model_config": "[4,[0],[1],True]",
            },
            "--draft-tree-tokens with --use-logits",
        ),
        ({"draft_target_model_config": "[4,[0],[1],True]"}, "without --draft-engine-dir"),
        ({"draft_engine_dir": Path("d"), "draft_len": "0"}, "--draft-len is '0'"),
        ({"draft_engine_dir": Path("d"), "draft_len": "four"}, "--draft-len is 'four'"),
        ({"draft_engine_dir": Path("d"), "draft_devices": "a"}, "--draft-devices is 'a'"),
        (
            {
                "draft_engine_dir": Path("d"),
                "draft_len": "4",
                "draft_target_model_config": "[4,[0],[1],True]",
            },
            "and --draft-len are both given",
        ),
        *(
            ({"draft_engine_dir": Path("d"), "draft_target_model_config": text}, "write it as")
            for text in (
                "", "4", "[4]", "[4,[0],[1]]", "[0,[0],[1],True]", "[4,0,[1],True]",
                "[4,[0],[],True]", "[4,[0],[-1],True]", "[4,[0],[1],1]", "[True,[0],[1],True]",
                "__import__('os')", "[" * 500,
            )
        ),
    ],
)  # fmt: skip
def test_wrong_options(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(**flags)
    assert message in caught.value.message + caught.value.hint


def test_engines_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    target, draft = TorchEngine(folder / "target"), TorchEngine(folder / "draft")
    with pytest.raises(SpecDecError, match="drafts 1024 tokens a step, the engine has room for"):
        attach_draft(target, draft, draft_len=1024, use_logits=False)
    draft.config = dataclasses.replace(
        draft.config,
        build=dataclasses.replace(draft.config.build, speculative_decoding_mode="medusa"),
        checkpoint=dataclasses.replace(draft.config.checkpoint, method=METHODS["medusa"]),
    )
    with pytest.raises(SpecDecError, match="the draft engine was built with .*_mode medusa"):
        attach_draft(target, draft, draft_len=4, use_logits=False)


@pytest.mark.parametrize(
    ("mode", "flags", "message"),
    [
        (True, (), "needs the most tokens"),
        (False, ("--max-draft-len", 4), "add --speculative-decoding-mode draft_tokens_external"),
    ],
)
def test_build_wants_both_flags(
    folder: Path, tmp_path: Path, mode: bool, flags: tuple[object, ...], message: str
) -> None:
    if mode:
        flags = ("--speculative-decoding-mode", "draft_tokens_external", *flags)
    with pytest.raises(SpecDecError) as caught:
        call(
            "build", "--checkpoint-dir", folder / "target-ckpt", "--output-dir", tmp_path / "e",
            *flags,
        )  # fmt: skip
    assert message in caught.value.message + caught.value.hint


def test_vocabularies_are_compared(folder: Path, tmp_path: Path) -> None:
    """By what the engines' manifests record, and by the tokenizers themselves."""
    from specdec.text.vocabulary_check import ModelTokens, check_vocabularies, compare_tokenizers

    def describe(engine: Path) -> ModelTokens:
        config = TorchEngine(engine).config
        return ModelTokens(engine, config.checkpoint.model.vocab_size, config.vocabulary)

    target, draft = describe(folder / "target"), describe(folder / "draft")
    assert target.manifest_vocabulary == draft.manifest_vocabulary
    assert target.manifest_vocabulary is not None
    assert target.manifest_vocabulary["num_tokens"] == 128
    make_llama(tmp_path, vocab=160, name="other-hf")
    make_tokenizer(tmp_path / "other-hf", vocab=150)
    other = describe(build(tmp_path, "other"))
    with pytest.raises(SpecDecError, match="tokenizers differ: .* of 128 tokens, .* of 150"):
        check_vocabularies(target, other, None, None)
    failed = run_cli_here(
        "run", "--engine-dir", folder / "target", "--draft-engine-dir", tmp_path / "other",
        "--tokenizer-dir", folder / "target-hf", "--input-text", "a",
    )  # fmt: skip
    assert failed.returncode == 1
    assert "the tokenizers differ" in read_error_lines(failed.stderr)[0]
    recorded = {"num_tokens": 128, "sha256": "0"}
    same_size = dataclasses.replace(draft, manifest_vocabulary=recorded)
    with pytest.raises(SpecDecError, match="both of 128 tokens, some of which have other ids"):
        check_vocabularies(target, same_size, None, None)
    make_tokenizer(tmp_path / "padded-hf", vocab=128)
    make_llama(tmp_path, vocab=160, name="padded-hf")
    padded = describe(build(tmp_path, "padded"))
    check_vocabularies(target, padded, None, None)
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(folder / "target-hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "other-hf")
    with pytest.raises(SpecDecError, match=r"differ in 22 tokens .*is absent and 128"):
        compare_tokenizers(ours, theirs)
    compare_tokenizers(ours, ours)


PADDED = {"padded": 160, "short": 120}  # sizes of draft models' tables; the target's is 128


def make_padded(parent: Path, name: str) -> Path:
    """A draft model that is the target's but for rows that are padding."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(parent / "draft-hf")
    model.resize_token_embeddings(PADDED[name], mean_resizing=False)
    model.save_pretrained(parent / f"{name}-hf")
    return build(parent, name)


@pytest.mark.parametrize("name", list(PADDED))
def test_padded_draft_vocabulary_gives_the_same_text(folder: Path, name: str) -> None:
    if not (folder / name).exists():
        make_padded(folder, name)
    requests = make_requests(6, temperature=0.9) + make_requests(6)
    expected = [r.output_ids for r in load(folder).generate(requests)]
    results = load(folder, name, 3).generate(requests)
    assert [r.output_ids for r in results] == expected
    assert sum(r.stats.num_accepted for r in results) > 10
    results = load(folder, name, 3, True).generate(requests)
    assert [r.output_ids for r in results[6:]] == expected[6:]


def test_the_command(folder: Path) -> None:
    common = [
        "run", "--engine-dir", folder / "target", "--tokenizer-dir", folder / "target-hf",
        "--input-text", "def a", "x", "--max-output-len", 9, "--json",
    ]  # fmt: skip
    draft = ["--draft-engine-dir", folder / "draft"]
    joined = "--draft_target_model_config"
    plain = run_cli_here(*common, "--no-speculation")
    assert plain.returncode == 0, plain.stderr
    for flags in (
        [joined, "[4,[0],[1],True]"], [joined, "[4,[0],[1],False]"],
        ["--draft-len", 4, "--draft-devices", 0, "--target-devices", 1, "--use-logits"],
    ):  # fmt: skip
        done = run_cli_here(*common, *draft, *flags, "--draft-budget", "fixed")
        assert done.returncode == 0, done.stderr
        assert "draft devices [0]: running on the CPU" in done.stderr
        assert "target devices [1]: running on the CPU" in done.stderr
        report, baseline = json.loads(done.stdout), json.loads(plain.stdout)
        assert report["stats"]["method"] == "draft_target"
        for ours, theirs in zip(report["outputs"], baseline["outputs"], strict=True):
            assert ours["output_ids"] == theirs["output_ids"]
            assert len(ours["stats"]["accepted_histogram"]) == 5
            assert ours["stats"]["num_draft_tokens"] > 0
    for flags, status, message in (
        ([*draft, "--draft-devices", "0,1"], 1, "the draft's device list [0, 1] has 2 entries"),
        ([*draft, "--target-devices", "0,1"], 1, "the target's device list [0, 1] has 2 entries"),
        ([*draft, joined, "[4,[0,1],[1],True]"], 1, "the draft's device list [0, 1] has 2"),
        ([*draft, joined, "[1024,[0],[1],True]"], 1, "the engine has room for 1023: max_num"),
    ):
        failed = run_cli_here(*common, *flags)
        assert failed.returncode == status, failed.stderr
        assert message in read_error_lines(failed.stderr)[0]
        assert failed.stdout == ""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "is_tree", "is_bound"),
    [
        ({}, True, True),
        ({"draft_len": "auto"}, True, True),
        ({"use_logits": True}, False, True),
        ({"draft_len": "4"}, True, True),
        ({"draft_len": "4", "draft_budget": "fixed"}, False, False),
        ({"draft_len": "4", "use_logits": True}, False, True),
        ({"draft_len": "4", "draft_budget": "auto", "use_logits": True}, False, True),
        ({"draft_tree_tokens": 4}, True, True),
        ({"draft_tree_tokens": 4, "draft_budget": "fixed"}, True, False),
    ],
)
def test_what_drafts_by_default(
    folder: Path, flags: dict[str, Any], is_tree: bool, is_bound: bool
) -> None:
    """What pays of a tree, or of a chain where drawn tokens are asked for, unless it is fixed."""
    pair: dict[str, Any] = {"engine_dir": folder / "target", "draft_engine_dir": folder / "draft"}
    engine = load_engine(DecodeSettings(device="cpu", **pair, **flags), None)
    drafter: Any = engine.drafter
    assert isinstance(drafter, PacedDrafter) == is_bound
    if is_bound:
        (drafter,) = drafter.members
    assert isinstance(drafter, ModelTreeDrafter if is_tree else ModelChainDrafter)
    if is_tree:
        given = flags.get("draft_tree_tokens", flags.get("draft_len", "auto"))
        assert drafter.max_draft_tokens == (6 if given == "auto" else int(given)), (
            "as it was built for"
        )
    requests = make_requests(5)
    expected = [r.output_ids for r in load(folder).generate(requests)]
    assert [r.output_ids for r in engine.generate(requests)] == expected
    engine.close()
