"""The public API: generate and stream are exact, streams may be left, misuse is an error."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec import (
    Engine,
    EngineBusyError,
    EngineLostError,
    Prompt,
    PromptError,
    SpecDecError,
    StepError,
    Stream,
    UsageError,
)
from specdec.decode import api
from specdec.decode.ranks import processes
from specdec.system import memory
from specdec.text.encoding import TEMPLATES
from specdec.text.text_stream import TextStream
from tests.conftest import change_tensors, make_llama, make_tokenizer
from tests.engines import call, continue_by_transformers
from tests.methods import build_methods, count_table

PROMPTS = [[5, 9, 77, 3], [64], list(range(20, 50)), [7, 7, 8], [100, 3, 55]]
LIMIT = 24
DECODE_FOLDER = str(Path(api.__file__).parent)
DRAFTERS_FOLDER = str(Path(api.__file__).parent / "drafters")
Line = tuple[str, int, bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("api"), seed=5)
    make_tokenizer(target)
    build_methods(target, "redrafter", build=["--max-batch-size", 2])
    build_methods(target, "pair", "draft", build=["--max-batch-size", 3])
    lookahead = ("--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 11)
    build_methods(target, "lookahead", build=["--max-batch-size", 3, *lookahead])
    build_methods(target, "medusa", "eagle", "dflash", "mtp")
    texts = continue_by_transformers(target, PROMPTS[:2], LIMIT)  # of the others it knows little
    count_table(texts, 128).write(target.parent / "table.safetensors")
    return target.parent


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return continue_by_transformers(folder / "target", PROMPTS, LIMIT)


def load(folder: Path, method: str = "redrafter", **options: Any) -> Engine:
    """An engine on the CPU; every method has the same target."""
    if method in ("draft_target", "draft_target, logits"):
        use_logits = method != "draft_target"
        options |= {"draft": folder / "draft-engine", "draft_len": 3, "use_logits": use_logits}
        method = "pair"
    elif method == "prompt_lookup":
        method, options = "pair", options | {"prompt_lookup_num_tokens": 4}
    elif method == "suffix":
        method, options = "pair", options | {"suffix_max_tokens": 4}
    elif method in ("ngram", "suffix+ngram"):
        options |= {"ngram_table": folder / "table.safetensors"}
        if method != "ngram":
            options |= {"draft_chain": method, "suffix_max_tokens": 4}
        method = "pair"
    elif method == "eagle, dynamic":
        method = "eagle"
        options |= {"eagle_use_dynamic_tree": True, "eagle_tree_tokens": 8}
    elif method == "chain":
        method = "medusa"
        options |= {"draft_chain": "suffix+medusa,prompt_lookup", "suffix_max_tokens": 4}
        options |= {"prompt_lookup_num_tokens": 4}
    elif method == "plain":
        method, options = "redrafter", options | {"speculation": False}
    if options.get("speculation", True):  # draft in every step, whether it pays or not
        options = {"draft_budget": "fixed"} | options
    return Engine.load(folder / f"{method}-engine", device="cpu", **options)


METHODS = [
    "plain", "redrafter", "medusa", "eagle", "eagle, dynamic", "dflash", "mtp", "draft_target",
    "draft_target, logits", "prompt_lookup", "suffix", "ngram", "suffix+ngram", "lookahead",
]  # fmt: skip


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with load(folder, tokenizer=folder / "target") as engine:
        yield engine


def test_the_public_names_are_there() -> None:
    assert all(hasattr(specdec, name) for name in specdec.__all__)
    assert set(specdec.__all__) <= set(dir(specdec))
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        specdec.__getattr__("Motor")


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_both_ways_give_what_transformers_gives(
    folder: Path, expected: list[list[int]], method: str
) -> None:
    """Also with prompts without drafts among them, of which the drafter never hears.

    Prefixes are taken from the rows of these, too.
    """
    with load(folder, method, kv_cache_enable_block_reuse=True) as engine:
        outputs = engine.generate(PROMPTS, max_output_len=LIMIT, end_ids=())
        assert [output.token_ids for output in outputs] == expected
        assert [output.prompt_ids for output in outputs] == PROMPTS
        for output in outputs:
            check_origins(output, is_plain=method == "plain")
        streams = [engine.stream(p, max_output_len=LIMIT, end_ids=()) for p in PROMPTS[:4]]
        found: list[list[int]] = [[] for _ in streams]
        while any(len(tokens) < LIMIT for tokens in found):
            for tokens, stream in zip(found, streams, strict=True):
                event = next(stream, None)
                if event is not None:
                    tokens += event.token_ids
                    assert len(event.origins) == len(event.token_ids)
        assert found == expected[:4]
        for stream, output in zip(streams, outputs[:4], strict=True):
            assert stream.output.token_ids == output.token_ids
            check_origins(stream.output, is_plain=method == "plain")
        mixed = [Prompt(token_ids=ids, speculation=n % 2 == 0) for n, ids in enumerate(PROMPTS)]
        outputs = engine.generate(mixed, max_output_len=LIMIT, end_ids=())
        assert [output.token_ids for output in outputs] == expected
        assert all(output.stats.num_draft_tokens == 0 for output in outputs[1::2])
        streams = [
            engine.stream(Prompt(token_ids=[*ids, *tokens[:5]], speculation=n % 2 == 1),
                          max_output_len=LIMIT - 5, end_ids=())
            for n, (ids, tokens) in enumerate(zip(PROMPTS, expected, strict=True))
        ]  # fmt: skip
        for stream, tokens in zip(streams, expected, strict=True):
            assert [t for event in stream for t in event.token_ids] == tokens[5:]


@pytest.mark.parametrize("method", ["redrafter", "medusa", "mtp", "draft_target, logits", "chain"])
def test_a_prompt_limits_its_drafts(folder: Path, expected: list[list[int]], method: str) -> None:
    """At most so many tokens a step, beside prompts without a limit: the text stays."""
    with load(folder, method) as engine:
        prompts = [
            Prompt(token_ids=ids, speculation={"max_tokens": 2} if n % 2 else None)
            for n, ids in enumerate(PROMPTS)
        ]
        outputs = engine.generate(prompts, max_output_len=LIMIT, end_ids=())
        assert [output.token_ids for output in outputs] == expected
        counts = [output.stats for output in outputs[1::2]]
        assert all(s.num_draft_tokens <= 2 * s.num_verify_steps for s in counts)
        assert sum(s.num_draft_tokens for s in counts) > 0
        assert any(o.stats.num_draft_tokens > 2 * o.stats.num_verify_steps for o in outputs[::2])
        sampled = [
            engine.generate(
                [Prompt(token_ids=PROMPTS[0], temperature=1.0, seed=5, speculation=speculation)],
                max_output_len=LIMIT,
            )[0].stats
            for speculation in ({"max_tokens": 1}, True)
        ]  # fmt: skip
        assert sampled[0].num_draft_tokens <= sampled[0].num_verify_steps


def test_a_prompt_chooses_its_drafter(folder: Path, expected: list[list[int]]) -> None:
    with load(folder, "chain") as engine:
        for name in ("suffix+medusa", "prompt_lookup"):
            prompts = [Prompt(token_ids=ids, speculation={"method": name}) for ids in PROMPTS]
            outputs = engine.generate(prompts, max_output_len=LIMIT, end_ids=())
            assert [output.token_ids for output in outputs] == expected
            assert sum(output.stats.num_draft_tokens for output in outputs) > 0
        with pytest.raises(PromptError, match=r"by 'eagle'.*by suffix\+medusa, prompt_lookup") as e:
            engine.generate([Prompt(token_ids=[5], speculation={"method": "eagle"})])
        assert e.value.field == "speculation"
        for wrong in ({"max_tokens": 0}, {"method": ""}, {"tokens": 3}, 3):
            with pytest.raises(PromptError, match="true, false or"):
                engine.generate([Prompt(token_ids=[5], speculation=wrong)])  # type: ignore[arg-type]
    with load(folder, "lookahead") as engine, pytest.raises(PromptError, match="whole or not"):
        engine.generate([Prompt(token_ids=[5], speculation={"max_tokens": 2})])
    with load(folder, "plain") as engine, pytest.raises(PromptError, match="drafts by nothing"):
        engine.generate([Prompt(token_ids=[5], speculation={"method": "redrafter"})])


def check_origins(output: specdec.Output, *, is_plain: bool) -> None:
    """One a token, as the statistics count them, the prompt's own token first."""
    assert len(output.origins) == len(output.token_ids)
    assert output.origins[0] == "plain"
    assert output.origins.count("draft") == output.stats.num_accepted
    num_target = output.origins.count("bonus") + output.origins.count("plain")
    assert num_target - 1 <= output.stats.num_verify_steps
    if is_plain:
        assert set(output.origins) == {"plain"}


def test_origins_of_sampled_texts(folder: Path) -> None:
    with load(folder, "medusa", draft_budget="fixed") as engine:
        outputs = engine.generate(PROMPTS, max_output_len=LIMIT, temperature=1.2, seed=3)
        for output in outputs:
            check_origins(output, is_plain=False)
        assert all(len(output.token_ids) == LIMIT for output in outputs)


def test_prompts_have_their_own_settings(engine: Engine) -> None:
    """And get in a batch what they get alone."""
    ids: Any = np.array([5, 9])
    prompts: list[Any] = [
        Prompt(text="def a", max_output_len=5),
        Prompt(token_ids=ids, temperature=0.8, seed=7),
        "return",
        Prompt(text="x", temperature=1.0, top_k=5, top_p=0.9, seed=2**63, end_ids=[3, 4]),
    ]
    together = engine.generate(prompts, max_output_len=12)
    alone = [engine.generate(prompt, max_output_len=12)[0] for prompt in prompts]
    assert together == alone
    assert [len(output.token_ids) for output in together][:3] == [5, 12, 12]
    assert together[0].prompt == "def a"
    assert engine.generate([]) == []
    assert engine.generate([5, 9], temperature=0.8, seed=7, max_output_len=12)[0] == alone[1]


def test_of_equal_logits_the_lower_id_is_chosen_everywhere(tmp_path: Path) -> None:
    """Greedily with drafts and without, by narrow sampling, and in the order of what is told."""
    target = make_llama(tmp_path, seed=5)
    with change_tensors(target) as tensors:  # each token has a twin, whose logit is the same
        tensors["lm_head.weight"][64:] = tensors["lm_head.weight"][:64]
    build_methods(target, "medusa", "eagle")
    given: dict[str, Any] = {"max_output_len": LIMIT, "end_ids": ()}
    for method in ("medusa", "eagle"):
        with load(tmp_path, method, speculation=False) as engine:
            expected = [output.token_ids for output in engine.generate(PROMPTS, **given)]
        assert max(token for tokens in expected for token in tokens) < 64
        with load(tmp_path, method) as engine:
            prompts = [Prompt(token_ids=ids, logprobs=4) for ids in PROMPTS]
            outputs = engine.generate(prompts, **given)
            assert [output.token_ids for output in outputs] == expected
            for output in outputs:
                for token, told in zip(output.token_ids, output.logprobs, strict=True):
                    first, twin, second, other = (number for number, _ in told.top)
                    assert (first, twin, other) == (token, token + 64, second + 64)
            for kept in ({"top_p": 1e-4}, {"top_k": 2, "top_p": 1e-4}, {"top_k": 1}):
                outputs = engine.generate(PROMPTS, temperature=1.0, **kept, **given)
                assert [output.token_ids for output in outputs] == expected


def test_the_best_of_several_outputs(engine: Engine) -> None:
    given: dict[str, Any] = {"token_ids": [5, 9], "temperature": 1.5, "max_output_len": 5}
    several = [Prompt(**given, seed=seed, logprobs=0) for seed in range(3, 8)]
    sums = [sum(o.logprob for o in output.logprobs) for output in engine.generate(several)]
    best = Prompt(**given, seed=3, best_of=5)
    (output,) = engine.generate(best)
    assert sum(one.logprob for one in output.logprobs) == pytest.approx(max(sums), abs=1e-4)
    with pytest.raises(PromptError, match="the prompt has best_of 5") as caught:
        engine.stream(best)
    assert caught.value.field == "best_of"


def test_a_stream_gives_the_text_of_generate(engine: Engine) -> None:
    """Stop words held back and cut; the last event says how it ended."""
    (whole,) = engine.generate("def a", max_output_len=LIMIT, end_ids=())
    stop = whole.text[8:10]
    for settings in ({}, {"stop": stop}, {"end_ids": [whole.token_ids[6]]}):
        given: dict[str, Any] = {"max_output_len": LIMIT, "end_ids": (), **settings}
        (output,) = engine.generate("def a", **given)
        events = list(engine.stream("def a", **given))
        assert "".join(event.text for event in events) == output.text
        assert [token for event in events for token in event.token_ids] == output.token_ids
        assert [origin for event in events for origin in event.origins] == output.origins
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == output.finish_reason
        assert events[-1].stats == output.stats
        assert stop not in output.text or "stop" not in settings


def test_loading_leaves_imports_out_of_searches_for_garbage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [0]
    memory.leave_out_objects.cache_clear()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts[-1])
    monkeypatch.setattr(gc, "freeze", lambda: counts.append(len(counts)))
    for _ in range(2):
        load(folder).close()
    assert counts == [0, 1], "the first load alone"


def test_an_abandoned_stream_frees_its_row(engine: Engine, expected: list[list[int]]) -> None:
    """Two rows: a third stream gets one as soon as another is closed or forgotten."""
    assert engine.max_batch_size == 2
    settings: dict[str, Any] = {"max_output_len": LIMIT, "end_ids": ()}
    first, second, third, fourth = (engine.stream(p, **settings) for p in PROMPTS[:4])
    assert next(first).token_ids + next(first).token_ids == first.output.token_ids
    assert third.take() is None
    first.close()
    assert list(first) == []
    assert first.output.finish_reason == "cancelled"
    assert engine.step()
    assert third.take() is not None
    del second
    gc.collect()
    assert engine.step()
    assert fourth.take() is not None
    third.close()
    list(fourth)
    assert fourth.output.token_ids == expected[3]
    assert not engine.step()
    # One that is left before its turn, and one after its end.
    streams = [engine.stream(p, **settings) for p in PROMPTS[:3]]
    streams.pop().close()
    assert [t for s in streams for e in s for t in e.token_ids] == expected[0] + expected[1]
    streams[0].close()
    assert streams[0].output.finish_reason == "length"


def test_generate_between_the_events_of_a_stream(engine: Engine, expected: list[list[int]]) -> None:
    """The drafter is shared: neither spoils the other's drafts."""
    stream = engine.stream(PROMPTS[0], max_output_len=LIMIT, end_ids=())
    tokens = next(stream).token_ids
    outputs = engine.generate(PROMPTS[1:], max_output_len=LIMIT, end_ids=())
    assert [output.token_ids for output in outputs] == expected[1:]
    tokens = tokens + [token for event in stream for token in event.token_ids]
    assert tokens == expected[0]


def test_several_ranks_are_started_and_ended(folder: Path, tmp_path: Path) -> None:
    target = folder / "target"
    call("convert", "--model-dir", target, "--output-dir", tmp_path / "ckpt", "--tp-size", 2)
    call(
        "build", "--checkpoint-dir", tmp_path / "ckpt", "--output-dir", tmp_path / "engine",
    )  # fmt: skip
    with load(folder, "plain") as one:
        expected = [o.token_ids for o in one.generate(PROMPTS, max_output_len=9, end_ids=())]
    first = Engine.load(tmp_path / "engine", device="cpu")
    with Engine.load(tmp_path / "engine", device="cpu") as second:
        outputs = second.generate(PROMPTS, max_output_len=9, end_ids=())
        assert [output.token_ids for output in outputs] == expected
        ranks = processes._ranks
        assert ranks is not None
    assert not ranks.is_ended  # another engine has them
    tokens = [
        t for e in first.stream(PROMPTS[0], max_output_len=9, end_ids=()) for t in e.token_ids
    ]
    assert tokens == expected[0]
    first.close()
    assert ranks.is_ended
    assert all(child.poll() is not None for child in ranks._children)


# --- leaving in the middle of a step, and looking on ---


class Leaver:
    """Closes a stream before each line of a step that has not had one closed; a trace function.

    Lines are told by file, number, and whether the stream had begun to write.
    """

    def __init__(self, passed: Iterable[Line]) -> None:
        self.streams: list[Stream] = []  # to be closed
        self.lines: set[Line] = set()  # that have had one closed before them
        self.passed = frozenset(passed)  # that need none

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not self.streams:
            sys.settrace(None)  # which makes the rest of the step faster
        if not self.streams or DECODE_FOLDER not in name:
            return None
        if event == "line" and self.streams:
            line = name, frame.f_lineno, bool(self.streams[-1]._active.output_ids)
            if line not in self.lines and line not in self.passed:
                self.lines.add(line)
                self.streams.pop().close()
        return self.trace


@pytest.fixture(scope="module")
def shared_lines() -> Counter[Line]:
    """Number of methods at each of whose lines a stream was closed, outside of the drafters."""
    return Counter()


@pytest.mark.thorough
@pytest.mark.parametrize("method", [*METHODS, "chain"])
def test_a_stream_may_be_closed_at_every_line_of_a_step(
    folder: Path, expected: list[list[int]], method: str, shared_lines: Counter[Line]
) -> None:
    """No other stream hears of it, by whatever method, as no step of a server may fail by it.

    Every method's own lines; those that methods share by the first two that come to them.
    """
    settings: dict[str, Any] = {"max_output_len": LIMIT, "end_ids": ()}
    leaver = Leaver(line for line, count in shared_lines.items() if count == 2)
    num_idle = 0
    with load(folder, method) as engine:
        size = engine.max_batch_size
        staying = engine.stream(PROMPTS[0], **settings)
        while num_idle < 3:
            num_before = len(leaver.lines)
            while len(leaver.streams) < size - 1:
                prompt = PROMPTS[1 + num_before % 4]
                leaver.streams.append(engine.stream(prompt, **settings))
            for _ in range(3):  # a prompt's pass, and steps with drafts
                sys.settrace(leaver.trace)
                try:
                    engine.step()
                finally:
                    sys.settrace(None)
            num_idle = 0 if len(leaver.lines) > num_before else num_idle + 1
            if staying.output.finish_reason is not None:
                assert staying.output.token_ids == expected[0]
                staying = engine.stream(PROMPTS[0], **settings)
        list(staying)
        assert staying.output.token_ids == expected[0]
    assert len(leaver.lines | leaver.passed) > 300
    shared_lines.update(line for line in leaver.lines if DRAFTERS_FOLDER not in line[0])


@pytest.mark.parametrize("stop", [None, "later"])
def test_who_looks_at_a_streams_output_changes_nothing(engine: Engine, stop: str | None) -> None:
    """The output has the text of all events so far, and what is held back is not lost."""
    settings: dict[str, Any] = {"max_output_len": LIMIT, "end_ids": ()}
    if stop is not None:
        (whole,) = engine.generate("def a", **settings)
        settings["stop"] = whole.text[9:11]
    (whole,) = engine.generate("def a", **settings)
    stream, text = engine.stream("def a", **settings), ""
    assert stream.output.text == ""
    for event in stream:
        text += event.text
        for _ in range(2):
            assert stream.output.text == text
            assert stream.output.finish_reason == event.finish_reason
    assert dataclasses.replace(stream.output, logits=None) == whole


def test_a_closed_stream_stays_closed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although another thread closes it while its newest tokens are being taken."""
    stream = engine.stream(PROMPTS[0], max_output_len=LIMIT, end_ids=())
    next(stream)
    engine.step()
    take = TextStream.take

    def close_and_take(text: TextStream) -> str:
        stream.close()
        return take(text)

    monkeypatch.setattr(TextStream, "take", close_and_take)
    assert stream.take() is not None
    assert list(stream) == []
    assert stream.output.finish_reason == "cancelled"


# --- misuse ---


def test_a_closed_engine(folder: Path) -> None:
    engine = load(folder)
    stream = engine.stream(PROMPTS[0])
    next(stream)
    engine.close()
    engine.close()
    uses: list[Callable[[], object]] = [
        lambda: engine.generate([1]), lambda: engine.stream([1]), lambda: next(stream),
        engine.step, engine.describe, lambda: engine.max_seq_len, lambda: engine.encode([1]),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(EngineLostError, match="this engine is closed"):
            use()


def test_a_request_of_an_engine_with_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Token ids mean something else there: streamed, they are another text."""
    target = make_llama(tmp_path, seed=5)
    make_tokenizer(target, vocab=120)
    build_methods(target, "draft")
    folders = [parent / "draft-engine" for parent in (folder, tmp_path)]
    with Engine.load(folders[0], device="cpu") as engine, Engine.load(folders[1]) as other:
        request = other.prepare([5, 6, 7], max_output_len=2)
        assert len(list(other.stream(request))) == 2
        with pytest.raises(PromptError, match="prepared by an engine with another tokenizer"):
            engine.stream(request)


def test_options_are_checked(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no option 'draft_length' \(did you mean draft_len\?\)"):
        load(folder, draft_length=4)
    with pytest.raises(UsageError, match="no option 'temperature'"):
        load(folder, temperature=0.5)
    with pytest.raises(UsageError, match="eagle_tree_tokens: expected a whole number"):
        load(folder, "eagle", eagle_tree_tokens="many")
    with pytest.raises(UsageError, match="device: 'gpu' is not one of"):
        Engine.load(folder / "redrafter-engine", device="gpu")
    with pytest.raises(UsageError, match="--medusa-choices has no effect"):
        load(folder, medusa_choices=[[0], [0, 0]])
    with pytest.raises(UsageError, match="no option 'acceptance'"):
        load(folder, "plain", acceptance="typical")
    with pytest.raises(UsageError, match="max_batch_size is 3, the engine was built for 1 to 2"):
        load(folder, max_batch_size=3)
    with pytest.raises(SpecDecError, match="does not exist"):
        Engine.load(folder / "nothing")
    for nothing in ("", None):
        with pytest.raises(UsageError, match="engine_dir: expected a path"):
            Engine.load(nothing)  # type: ignore[arg-type]
    for limit in (2.0, "2"):
        with pytest.raises(UsageError, match="max_batch_size is .*, the engine was built for"):
            load(folder, max_batch_size=limit)
    with pytest.raises(UsageError, match="engine_dir: expected a text, got True"):
        Engine.load(True)  # type: ignore[arg-type]
    with pytest.raises(SpecDecError, match="5 does not exist"):
        Engine.load(5)  # type: ignore[arg-type]
    for draft in (None, "x" * 300):
        with pytest.raises(UsageError, match="cannot be read: File name too long"):
            Engine.load(folder / "redrafter-engine" if draft else "x" * 300, draft=draft)
    with pytest.raises(UsageError, match="prompt_chunk is array"):
        load(folder, "redrafter", prompt_chunk=np.array([1, 2]))
    with pytest.raises(UsageError, match="speculation is 'no'"):
        Engine.load(folder / "redrafter-engine", speculation="no")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tokenizer is 5, of the type int"):
        load(folder, tokenizer=5)
    with load(folder, "medusa", medusa_choices=[[0], [0, 0]]) as engine:
        (output,) = engine.generate([5, 9], max_output_len=9)
        assert output.stats.num_draft_tokens == 2 * output.stats.num_verify_steps


def test_prompts_are_checked_before_anything_is_decoded(folder: Path) -> None:
    with load(folder, max_seq_len=40) as engine:
        assert engine.max_seq_len == 40
        with pytest.raises(PromptError, match=r"3 problems: .*prompt 0 is empty.*prompt 1 has 50"):
            engine.generate([[], [5] * 50])
        with pytest.raises(PromptError, match="^the prompt has 3 tokens and asks for 100 more"):
            engine.stream([5, 6, 7])
        with load(folder, "medusa") as longer:
            foreign = longer.prepare([5, 6, 7], max_output_len=50)
        with pytest.raises(PromptError, match="^the prompt has 3 tokens and asks for 50 more"):
            engine.stream(foreign)
        with pytest.raises(UsageError, match="^max_output_len has no effect on what prepare"):
            engine.stream(engine.prepare([5, 6, 7], max_output_len=5), max_output_len=9)
        cut = engine.prepare([5, 6, 7], max_output_len=50, cuts_output=True)
        assert engine.stream(cut).output.prompt_ids == [5, 6, 7]
        assert (cut.max_output_len, len(cut.input_ids)) == (37, 3)
        with pytest.raises(PromptError, match="^the prompt has 40 tokens and asks for 50 more"):
            engine.prepare([5] * 40, max_output_len=50, cuts_output=True)
        with pytest.raises(UsageError, match="text prompts need"):
            engine.generate("text")
        with pytest.raises(UsageError, match="stop words need"):
            engine.generate([5], stop="a")
        with pytest.raises(PromptError, match="temperature is -1, not a number of at least 0"):
            engine.generate([5], temperature=-1)
        with pytest.raises(PromptError, match="prompt 0: token_ids is .* not a list of token ids"):
            engine.generate(b"ab")
        for wrong in ({"input_ids": [5]}, None, 5):  # a dict as of a tokenizer is no list of texts
            with pytest.raises(PromptError, match="prompt 0 is .*, of the type (dict|None|int)"):
                engine.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="not a text of whole characters"):
            engine.generate("a\ud800")
        for field in ("bad_words", "stop"):
            with pytest.raises(PromptError, match=f"{field} is .*, not a"):
                engine.generate(Prompt(token_ids=[5], **{field: ["\ud800"]}))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="'max_new_tokens' .did you mean max_output_len"):
            engine.generate([5], max_new_tokens=3)  # type: ignore[call-arg]


def test_what_a_tokenizer_returns_is_a_prompt(engine: Engine, expected: list[list[int]]) -> None:
    made: list[Any] = [
        torch.tensor([PROMPTS[0]]), np.array([PROMPTS[0]]), torch.tensor(PROMPTS[0]),
    ]  # fmt: skip
    for ids in made:
        (output,) = engine.generate(ids, max_output_len=len(expected[0]), end_ids=())
        assert output.token_ids == expected[0]
        with pytest.raises(PromptError, match="not exactly one of text, token_ids and messages"):
            engine.generate(Prompt(text="a", token_ids=[1]))
        with pytest.raises(PromptError, match=r"token_ids is \[5, 'a'\]"):
            engine.generate(Prompt(token_ids=[5, "a"]))  # type: ignore[list-item]
        assert len(engine.generate([5], max_output_len=3)[0].token_ids) == 3


def test_half_a_character_in_a_message(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATES["raw"])
    messages = [{"role": "user", "content": "a\ud800"}]
    with pytest.raises(PromptError, match="half a character") as caught:
        engine.generate(Prompt(messages=messages))
    assert caught.value.field == "messages"


def test_contents_of_messages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of text are joined, for a template would show a list as Python does."""
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATES["raw"])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (output,) = engine.generate(Prompt(messages=[{"role": "user", "content": parts}]))
    assert output.prompt == "ab"
    for wrong in ([{"type": "image", "url": "x"}], 5):
        with pytest.raises(PromptError, match="not a list of .*as contents"):
            engine.generate(Prompt(messages=[{"role": "user", "content": wrong}]))
    no_contents: list[Any] = [[{"type": "image", "url": "x"}], [None], 5, b"x", {"text": "x"}]
    for content in no_contents:
        with pytest.raises(PromptError, match="message 1: content is ") as caught:
            engine.chat([{"role": "user", "content": "a"}, {"role": "user", "content": content}])
        assert caught.value.field == "messages"
    output = engine.chat([{"role": "user", "content": ("a", {"text": "b"})}], max_output_len=2)
    assert output.prompt == "ab"


def test_a_second_thread_is_refused(engine: Engine) -> None:
    """While the first is in a step; afterwards it may use the engine."""
    entered, leave, found = threading.Event(), threading.Event(), []
    core = engine._core
    assert core is not None
    forward: Any = core.decoder.forward

    def wait(*arguments: Any, **named: Any) -> Any:
        entered.set()
        assert leave.wait(600)
        return forward(*arguments, **named)

    stream = engine.stream(PROMPTS[1], max_output_len=5, end_ids=())
    core.decoder.forward = wait
    thread = threading.Thread(
        target=lambda: found.append(engine.generate(PROMPTS[0], max_output_len=5, end_ids=()))
    )
    thread.start()
    assert entered.wait(600)
    uses: list[Callable[[], object]] = [
        lambda: engine.generate(PROMPTS[1]), lambda: next(stream), engine.step, engine.close,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(EngineBusyError, match="another thread is using this engine"):
            use()
    leave.set()
    thread.join(600)
    del core.decoder.forward
    assert found == [engine.generate(PROMPTS[0], max_output_len=5, end_ids=())]
    assert len([t for e in stream for t in e.token_ids]) == 5


def test_a_failing_step_ends_its_streams_and_no_others(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [engine.stream(p, max_output_len=LIMIT, end_ids=()) for p in PROMPTS[:2]]
    next(streams[0])
    core = engine._core
    assert core is not None
    with monkeypatch.context() as patch:
        patch.setattr(core.drafter, "propose", lambda requests: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(streams[0])
    for stream in streams:
        with pytest.raises(StepError, match=r"a step of the engine failed.*after [1-9]"):
            list(stream)
        assert list(stream) == []
    later = engine.stream(PROMPTS[2], max_output_len=LIMIT, end_ids=())
    assert [t for e in later for t in e.token_ids] == expected[2]
