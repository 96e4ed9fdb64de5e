"""Targets with layers that keep a state: rejected drafts, shared prefixes, draft models, ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.engine import TorchEngine, load_engine
from specdec.decode.loop import Batch, Options, generate
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.timing import Timing
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.linear_states import MAX_SNAPSHOTS
from specdec.engine.step import States, pack_segments, place_tree
from specdec.engine.tree import pack_beams
from specdec.errors import UsageError
from specdec.run.settings import RunSettings
from tests.engine.kernels import needs_compiler
from tests.engines import OracleDrafter, call, list_requests, make_engine, make_noisy_copy
from tests.families import make_convolving, make_family_model, make_hybrid, make_mamba

EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 5)
LIMIT = 24
MAKERS = {"convolving": make_convolving, "mamba": make_mamba}


of_all_kinds = pytest.mark.parametrize("folder", ["linear", *MAKERS], indirect=True)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of a hybrid, of one rank and two, and of a draft model like it."""
    parent = tmp_path_factory.mktemp("hybrids")
    if (kind := getattr(request, "param", "linear")) in MAKERS:
        target = MAKERS[kind](parent)
    else:
        target = make_hybrid(parent, intermediate=128, linear_value_head_dim=32)
    make_noisy_copy(target, parent / "draft")
    for name, size, flags in (
        ("target", 1, EXTERNAL), ("target", 2, EXTERNAL), ("draft", 1, ()), ("draft", 2, ()),
    ):  # fmt: skip
        checkpoint = parent / f"{name}-ckpt{size}"
        call("convert", "--model-dir", parent / name, "--output-dir", checkpoint, "--tp-size", size)
        call(
            "build", "--checkpoint-dir", checkpoint, "--output-dir", parent / f"{name}-tp{size}",
            "--max-batch-size", 4, *flags,
        )  # fmt: skip
    return parent


@functools.cache
def load(folder: Path, size: int = 1) -> TorchEngine:
    return TorchEngine(folder / f"target-tp{size}", device="cpu")


def make_requests(count: int = 7, **values: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    return [
        Request(
            index=index,
            input_ids=torch.randint(3, 128, (1 + index * 13 % 47,), generator=generator).tolist(),
            max_output_len=LIMIT - index, end_ids=frozenset([17] if index % 3 == 0 else []),
            sampling=SamplingParams(seed=index, temperature=0.8 if index % 3 == 2 else 0.0),
            **values,
        )
        for index in range(count)
    ]  # fmt: skip


@functools.cache
def generate_plain(folder: Path) -> list[list[int]]:
    return [r.output_ids for r in load(folder).generate(make_requests())]


def run_chain(decoder: Decoder, cache: KVCache, row: int, tokens: list[int], kept: int) -> States:
    """A step over a root and a chain after it, of which some are then committed."""
    chain = pack_beams(tokens[0], np.array([tokens[1:]], np.int64).reshape(1, -1))
    step = pack_segments([place_tree(chain, row, cache)], cache)
    last = decoder.forward(step, cache)
    cache.commit(row, list(range(kept)))
    return States(last)


@pytest.mark.thorough
@needs_compiler
@of_all_kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimize", ["none", "auto"])
@torch.inference_mode()
def test_states_after_drafts_are_those_of_plain_decoding(
    folder: Path, tmp_path: Path, optimize: str, dtype: str
) -> None:
    """Whatever was drafted and how much of it was right: by our kernels to the last bit."""
    engine = make_engine(tmp_path, folder / "target", optimize=optimize, dtype=dtype)
    decoder = TorchEngine(engine, device="cpu").decoder
    text = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plain, drafted = decoder.make_cache(1, 64), decoder.make_cache(3, 64)

    def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
        if optimize == "auto":
            assert torch.equal(found, expected)
        else:  # torch's products have other bits alone than beside others
            close = 1e-5 if dtype == "float32" else 0.1
            numbers = expected.abs().flatten().tolist()
            largest = max([1.0, *numbers])  # of Mamba-2's states, 44; a convolution has none
            assert torch.allclose(found.float(), expected.float(), atol=close * largest, rtol=close)

    hidden = [run_chain(decoder, plain, 0, [token], 1).hidden[0, 0] for token in text]
    at = 0
    for size, right in ((1, 1), (5, 5), (5, 1), (4, 3), (6, 2), (2, 2), (7, 7), (5, 4), (9, 9)):
        wrong = [(token + 1) % 100 + 3 for token in text[at + right : at + size]]
        wrong += [3] * (size - right - len(wrong))
        states = run_chain(decoder, drafted, 1, [*text[at : at + right], *wrong], right)
        compare(states.hidden[0, :right], torch.stack(hidden[at : at + right]))
        at += right
    assert plain.states is not None
    assert drafted.states is not None
    for token in text[at : at + 2]:  # a step in which what was accepted is applied
        run_chain(decoder, drafted, 1, [token], 1)
        at += 1
    plain = decoder.make_cache(1, 64)
    for token in text[:at]:
        run_chain(decoder, plain, 0, [token], 1)
    assert plain.states is not None
    compare(drafted.states.state[:, 1], plain.states.state[:, 0])
    compare(drafted.states.window[:, 1], plain.states.window[:, 0])
    assert not drafted.states.state[:, [0, 2]].any(), "other rows"


@of_all_kinds
@pytest.mark.parametrize("prompt_chunk", [None, 5, "auto"])
@pytest.mark.parametrize("quality", [1.0, 0.6])
def test_rows_come_and_go(folder: Path, quality: float, prompt_chunk: Any) -> None:
    """Greedy and sampled, more requests than rows, prompts in pieces beside drafts."""
    expected = generate_plain(folder)
    drafter = OracleDrafter(expected, beams=1, length=4, quality=quality, seed=3)
    options = Options(max_batch_size=3, max_num_tokens=16, prompt_chunk=prompt_chunk)
    results = generate(load(folder).decoder, drafter, make_requests(), options)
    assert [r.output_ids for r in results] == expected
    assert sum(r.stats.num_accepted for r in results) > LIMIT


def test_a_cancelled_request_leaves_nothing_behind(folder: Path) -> None:
    expected, decoder = generate_plain(folder), load(folder).decoder
    drafter = OracleDrafter(expected, beams=1, length=4, quality=0.7, seed=3)
    options = Options(prompt_chunk=4, reuse_blocks=True)
    batch = Batch(decoder, drafter, options, Timing(), num_rows=2, max_seq_len=80)
    requests = make_requests()
    doomed = [batch.submit(request) for request in requests[4:6]]
    for at in range(4):  # one in its prompt, one after it
        batch.step()
        if at > 1:
            batch.cancel(doomed[at - 2])
    active = [batch.submit(request) for request in (*requests, *requests)]
    while batch.is_busy:
        batch.step()
    assert [list(r.output_ids) for r in active] == expected * 2


# Ranks keep their parts of a state by the same code, of whichever kind it is.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("folder", "size"), [("linear", 1), ("linear", 2), *((kind, 1) for kind in MAKERS)],
    indirect=["folder"],
)  # fmt: skip
def test_shared_prefixes_are_gone_on_behind_where_a_state_is_kept(folder: Path, size: int) -> None:
    """At the end of a text, before the last token of a prompt, and where prompts have parted."""
    engine, generator = load(folder, size), torch.Generator().manual_seed(2)
    system, first, second, third = (
        torch.randint(3, 128, (n,), generator=generator).tolist() for n in (40, 9, 7, 8)
    )

    def run(
        prompts: list[list[int]], num_rows: int = 1, *, reuses: bool = False
    ) -> tuple[list[list[int]], int]:
        requests = list_requests(prompts, 6)
        timing, options = Timing(), Options(max_batch_size=num_rows, reuse_blocks=reuses)
        results = generate(engine.decoder, Drafter(), requests, options, timing)
        return [r.output_ids for r in results], timing.num_reused_tokens

    def check(prompts: list[list[int]], reused: int, num_rows: int = 1) -> None:
        expected, _ = run(prompts)
        assert run(prompts, num_rows, reuses=True) == (expected, reused)

    check([system + first, system + second], 0)  # the place is not known before the second
    check([system + first, system + second, system + third], len(system))
    check([system + first, system + second], len(system), num_rows=2)  # known while it is read
    check([system + first] * 2, len(system + first) - 1)
    (answer,), _ = run([system + first])
    turn = [*system, *first, *answer, *second]
    check([system + first, turn], len(system + first + answer) - 1)
    # A row that starts over has the places of its new text only.
    check([system + first, system + second, system[:20], system + third], 19)


def test_places_are_bounded(folder: Path) -> None:
    decoder = load(folder).decoder
    cache = decoder.make_cache(2, 64)
    cache.request_prefixes(0, range(1, 30, 2))
    with torch.inference_mode():
        for token in range(3, 33):
            run_chain(decoder, cache, 0, [token], 1)
    assert cache.states is not None
    assert len(cache.states._snapshots[0]) == MAX_SNAPSHOTS
    assert cache.find_prefix(0, 30) == 30
    assert cache.find_prefix(0, 29) == 29
    assert cache.find_prefix(0, 20) == 0, "its state is kept no longer"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("folder", "size", "use_logits"),
    [("linear", 1, False), ("linear", 1, True), ("linear", 2, False),
     *((kind, 1, True) for kind in MAKERS)],
    indirect=["folder"],
)  # fmt: skip
def test_a_hybrid_drafts_for_a_hybrid(folder: Path, size: int, use_logits: bool) -> None:
    engine = TorchEngine(folder / f"target-tp{size}", device="cpu")
    draft = TorchEngine(folder / f"draft-tp{size}", device="cpu")
    attach_draft(engine, draft, draft_len=4, use_logits=use_logits, fits_budget=True)
    requests = make_requests()
    results = engine.generate(requests, Options(max_batch_size=3, reuse_blocks=True))
    greedy = [at for at, r in enumerate(requests) if r.sampling.is_greedy or not use_logits]
    expected = generate_plain(folder)
    assert [results[at].output_ids for at in greedy] == [expected[at] for at in greedy]
    assert sum(r.stats.num_accepted for r in results) > 10


def test_methods_that_need_trees_are_refused(folder: Path, tmp_path: Path) -> None:
    checkpoint, engine = folder / "target-ckpt1", tmp_path / "engine"
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine,
        "--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 20,
    )  # fmt: skip
    with pytest.raises(UsageError, match="Qwen3_5ForCausalLM is a hybrid whose states follow one"):
        load_engine(RunSettings(engine_dir=engine, lookahead_config="[3,3,3]"), None)
    target, draft = load(folder), TorchEngine(folder / "draft-tp1", device="cpu")
    with pytest.raises(Exception, match="--draft-tree-tokens is given, and Qwen3_5ForCausalLM is"):
        attach_draft(target, draft, draft_len=4, use_logits=False, tree_tokens=4)


@of_all_kinds
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights(folder: Path, tmp_path: Path, kind: str) -> None:
    """The matrices of linear attention are rounded, too, but for the small one of its gates.

    A mixture has no int4, so that of convolutions is seen in a dense model.
    """
    is_mixture = load(folder).decoder.model.experts is not None
    target = folder / "target"
    if is_mixture and kind == "int4":
        types = ["conv", "full_attention", "conv", "conv"]
        target = make_family_model(
            tmp_path, "lfm2", vocab=128, heads=4, intermediate=128, layers=4, layer_types=types,
            max_position_embeddings=256, norm_eps=0.1, tie_word_embeddings=False,
        )  # fmt: skip
    flags = ["--quantization", kind, *(["--group-size", 32] if kind == "int4" else [])]
    engine = TorchEngine(make_engine(tmp_path, target, build=flags), device="cpu")
    expected = [r.output_ids for r in engine.generate(make_requests())]
    drafter = OracleDrafter(expected, beams=1, length=4, quality=0.7, seed=3)
    results = generate(engine.decoder, drafter, make_requests(), Options(max_batch_size=2))
    assert [r.output_ids for r in results] == expected
