"""`specdec audit --agent`: a sound server is not accused, and mutants of ours are all found."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from specdec.audit import agent, agent_client
from specdec.audit.agent import FALSE_ALARM, NUM_SAMPLED, Session, find_excess
from specdec.audit.agent_client import (
    SALT,
    AgentClient,
    AgentRequest,
    Doubt,
    Score,
    StepAnswer,
    Unjudged,
)  # fmt: skip
from specdec.audit.answers import AnyPrompt, Completion, Token, read_tokens
from specdec.audit.checks import FAILED, SUSPECT, Audit, Check
from specdec.audit.pipeline import audit_server
from specdec.audit.server import LateAnswer, Offer, Refused
from specdec.audit.settings import AuditSettings
from specdec.decode import accept
from specdec.engine.kv_cache import KVCache
from specdec.engine.linear_states import LinearStates
from specdec.engine.tree import Tree
from specdec.errors import UsageError
from specdec.text.grammar import Grammar, GrammarState
from tests.audit.test_doubles import find_wrong, get
from tests.conftest import make_llama, make_tokenizer
from tests.engines import make_engine
from tests.families import make_hybrid
from tests.serve.servers import CALLING_TEMPLATE, MODEL, serve_here

pytest.importorskip("llguidance")
SIZES = ["--max-batch-size", 4, "--max-seq-len", 1000]
TEMPLATE = CALLING_TEMPLATE + "{# <tool_call> #}"


def make_served(parent: Path, target: Path) -> Path:
    make_tokenizer(target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return make_engine(parent, target, build=[*SIZES, "--tokenizer-dir", target])


@pytest.fixture(scope="module")
def url(lasting_dir: Path) -> Iterator[str]:
    """A server that drafts by its prompts, all it can."""
    parent = lasting_dir / "agent"
    folder = make_served(parent, make_llama(parent, seed=5, max_position_embeddings=1024))
    with serve_here(folder, prompt_lookup_num_tokens=4, draft_budget="fixed") as (_, address):
        yield address


@pytest.fixture(scope="module")
def hybrid_url(lasting_dir: Path) -> Iterator[str]:
    parent = lasting_dir / "agent-hybrid"
    folder = make_served(parent, make_hybrid(parent, max_position_embeddings=1024))
    with serve_here(folder, prompt_lookup_num_tokens=4, draft_budget="fixed") as (_, address):
        yield address


def audit(url: str, **settings: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": 12, "agent_context": 500, "near_tie": 0.001}
    return audit_server(
        AuditSettings(base_url=url, model=MODEL, agent=True, **(options | settings))
    )


def test_a_sound_server_is_not_accused(url: str) -> None:
    report = audit(url)
    assert find_wrong(report) == {}, [check["faults"] for check in report["checks"]]
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts == dict.fromkeys(agent.CHECKS, "ok")
    summary = get(report, "turns")["summary"]
    assert "the server without its cache and its own scores of the texts" in summary
    longest = int(summary.split("prompts up to ")[1].split()[0])
    assert 300 <= longest <= 1000
    assert get(report, "sampled")["evidence"]["tokens"] >= NUM_SAMPLED * 4


@contextlib.contextmanager
def poison_blocks() -> Iterator[None]:
    """Keys that are taken from the cache have another text's numbers at one position."""
    original = KVCache.copy_prefix

    def copy(self: KVCache, source: int, row: int, length: int) -> None:
        original(self, source, row, length)
        if length > 60:
            self.blocks[:, :, row, :, length - 20] = self.blocks[:, :, row, :, 3]

    with mock.patch.object(KVCache, "copy_prefix", copy):
        yield


@contextlib.contextmanager
def keep_draft_keys() -> Iterator[None]:
    """Now and then a rejected token's keys and values stay behind the accepted ones."""
    original, count = KVCache.commit, 0

    def commit(self: KVCache, row: int, path: list[int]) -> None:
        nonlocal count
        original(self, row, path)
        count += 1
        if len(path) == 1 and count % 11 == 0:
            self.past_lens[row] += 1

    with mock.patch.object(KVCache, "commit", commit):
        yield


@contextlib.contextmanager
def keep_states() -> Iterator[None]:
    """The updates of all drafted tokens are applied to a state, of rejected ones too."""
    original = LinearStates.begin

    def begin(self: LinearStates, *arguments: Any) -> Any:
        runs = original(self, *arguments)
        wrong = np.maximum(runs.folded, self.num_logged[runs.rows])
        self.table = np.ascontiguousarray(np.stack(runs._replace(folded=wrong), axis=1), np.int64)
        return runs

    with mock.patch.object(LinearStates, "begin", begin):
        yield


class ForgetfulMatcher:
    """A matcher that does not go back after a draft, so that what is accepted counts twice."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def rollback(self, count: int) -> None:
        """Stay."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@contextlib.contextmanager
def advance_grammars_twice() -> Iterator[None]:
    """A request's grammar follows its drafts, and the accepted tokens after them."""
    original = Grammar.follow

    def follow(self: Grammar, output_ids: Sequence[int]) -> GrammarState:
        state = original(self, output_ids)
        state._matcher = ForgetfulMatcher(state._matcher)
        return state

    with mock.patch.object(Grammar, "follow", follow):
        yield


@contextlib.contextmanager
def accept_too_much() -> Iterator[None]:
    """Now and then the first drafted token is taken, whatever the target says."""
    original, count = accept.accept, 0

    def take(tree: Tree, choices: Sequence[int]) -> tuple[list[int], int]:
        nonlocal count
        count += 1
        if tree.num_nodes > 1 and count % 7 == 0:
            return [0, 1], int(choices[1])
        return original(tree, choices)

    with mock.patch.object(accept, "accept", take):
        yield


MUTANTS: dict[str, tuple[str, Callable[[], Any], set[str]]] = {
    "a poisoned block": ("url", poison_blocks, {"turns", "probes", "forks"}),
    "a draft's keys left": ("url", keep_draft_keys, {"turns", "probes", "forks"}),
    "a grammar advanced twice": ("url", advance_grammars_twice, {"grammar", "tools"}),
    "a lossy accept rule": ("url", accept_too_much, {"turns", "probes", "forks"}),
    "a state not rolled back": ("hybrid_url", keep_states, {"turns", "probes", "forks"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_our_server_are_found(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, plant, checks = MUTANTS[name]
    monkeypatch.setattr(agent_client, "MAX_TRIALS", 12 if name == "a poisoned block" else 1)
    monkeypatch.setattr(agent, "NUM_SAMPLED", 2)
    monkeypatch.setattr(agent, "NUM_TURNS", 3)
    with plant():
        report = audit(request.getfixturevalue(server))
    assert report["verdict"] == "failed"
    assert checks & set(find_wrong(report)), report["checks"]
    if name == "a poisoned block":
        short = [check["evidence"] for check in report["checks"] if "requests" in check["evidence"]]
        assert len(short) == 1
        assert short[0]["is_short"]
        assert 2 <= len(short[0]["requests"]) <= 4, "what fills the cache, and what takes from it"


def make_draws(seed: int, excess: float) -> list[StepAnswer]:
    """Answers whose likeliest token comes more often than its probability says, by `excess`."""
    generator, answers = random.Random(seed), list[StepAnswer]()
    for _ in range(NUM_SAMPLED):
        tokens = []
        for _ in range(64):
            probability = generator.uniform(0.1, 0.9)
            top = Token(1, "a", math.log(probability))
            is_likeliest = generator.random() < min(1.0, probability + excess)
            other = Token(2, "b", math.log(probability) - 1.0, (top,))
            tokens.append(Token(1, "a", top.logprob, (top,)) if is_likeliest else other)
        completion = Completion(prompt="x", text="", max_tokens=64, tokens=tokens)
        answers.append(StepAnswer(AgentRequest("x", 64), 0, completion, {}))
    return answers


def test_a_difference_is_a_doubt_where_no_log_probabilities_tell_its_margin() -> None:
    """llama-server writes 0 and no likeliest tokens for tokens of a step that drafted."""

    def make_answer(tokens: list[dict[str, Any]]) -> StepAnswer:
        completion = Completion(
            prompt="x", text="".join(token["token"] for token in tokens), max_tokens=2,
            ids=[token["id"] for token in tokens], tokens=read_tokens({"content": tokens}),
        )  # fmt: skip
        return StepAnswer(AgentRequest("x", 2), 3, completion, {})

    def write(token_id: int, *tops: float) -> dict[str, Any]:
        listed = [{"id": 7 + i, "token": "ab"[i], "logprob": top} for i, top in enumerate(tops)]
        logprob = tops[token_id - 7] if tops else 0
        return {"id": token_id, "token": "ab"[token_id - 7], "logprob": logprob,
                "top_logprobs": listed}  # fmt: skip

    client = mock.Mock(bound=0.5)
    session = Session(client, 2)
    for expected, verdict in ((write(8), SUSPECT), (write(8, -3.0, -0.1), FAILED)):
        first, second = make_answer([write(7)] * 2), make_answer([write(7), expected])
        fault = AgentClient.compare(client, first, second)
        assert fault is not None
        assert isinstance(fault, Doubt) == (verdict == SUSPECT)
        session.answers["forks"], session.faults["forks"] = [first], [fault]
        assert agent._make_check(session, "forks", {}).verdict == verdict
    assert AgentClient.compare(client, first, make_answer([write(7, -0.2, -1.8)] * 2)) is None


@pytest.mark.parametrize(("logprob", "is_fault"), [(0.0, (True, False)), (-4.0, (True, True))])
def test_a_grammar_may_raise_log_probabilities(logprob: float, is_fault: tuple[bool, bool]) -> None:
    """The score of the text in a prompt is -2; a grammar explains what is above it alone."""
    client = mock.Mock(bound=0.5)
    requests: tuple[dict[str, Any], ...] = ({}, {"response_format": {}})
    for fields, expected in zip(requests, is_fault, strict=True):
        tokens = [Token(1, "a", logprob)]
        step = AgentRequest("p", 1, {"temperature": 0, **fields})
        completion = Completion(prompt="p", text="a", max_tokens=1, tokens=tokens)
        answer = StepAnswer(step, 1, completion, {})
        fault = AgentClient._find_score_fault(client, answer, [Score(-2.0, -2.0)])
        assert (fault is not None and "other log-probabilities" in fault) == expected


def test_scores_tell_whether_greedy_tokens_are_the_likeliest() -> None:
    """Nothing else is asked for then: a fresh answer would cost the whole prompt once more."""
    client = mock.Mock(bound=0.5, reference=None, fresh_fields={"prompt_logprobs": 0})
    client._find_score_fault = functools.partial(AgentClient._find_score_fault, client)
    tokens = [Token(1, "a", None), Token(2, "b", None)]
    completion = Completion(prompt="p", text="ab", max_tokens=2, ids=[1, 2], tokens=tokens)
    answer = StepAnswer(AgentRequest("p", 2), 1, completion, {})
    for highest, expected in ((-1.8, False), (-0.2, True)):
        client._score.return_value = [Score(-0.1, -0.1), Score(-2.0, highest)]
        fault = AgentClient._compare_with_fresh(client, answer)
        assert (fault is not None) == expected
        assert fault is None or "token 1 is 2 'b', where without a cache" in fault
    client._compare_with.assert_not_called()
    short = dataclasses.replace(answer, step=AgentRequest("p", 3))  # why it ended is to be compared
    client._score.return_value = [Score(-0.1, -0.1)] * 2
    AgentClient._compare_with_fresh(client, short)
    client._compare_with.assert_called_once()


LATE = LateAnswer("no answer within 9 s", "a slow one needs a longer --timeout")


class LongServer:
    """Server without log-probabilities that can leave its cache aside, and has limits.

    Four characters are a token. most: tokens that it takes. slow: tokens of a prompt that it reads
    with its cache only, else it raises error. poison: text of a request after which one with an
    equal beginning is answered wrongly.
    """

    offer = Offer(False)

    def __init__(
        self, most: int = 10**9, slow: int = 10**9, poison: str = "", error: Exception = LATE
    ) -> None:
        self.most, self.slow, self.poison, self.error = most, slow, poison, error
        self.sizes: list[int] = []
        self.num_late = self.num_uncut = 0
        self.poisoned: set[str] = set()

    def ask(
        self, prompt: AnyPrompt, body: dict[str, Any]
    ) -> tuple[Completion, dict[str, Any]]:  # fmt: skip
        text = "".join(m["content"] for m in prompt) if isinstance(prompt, list) else prompt
        size, limit = len(text) // 4, body["max_tokens"]
        if body.get("seed", 0) >= 100 and body.get("top_k") == -1 and body.get("min_p") == 0.0:
            self.num_uncut += 1
        if "prompt_logprobs" in body or size + limit > self.most:
            raise Refused(400, f"{size + limit} tokens, {self.most} at most")
        is_fresh = body.get("cache_prompt") is False
        if is_fresh and size > self.slow:
            self.num_late += 1
            raise self.error
        self.sizes.append(len(text))
        is_wrong = not is_fresh and text[:16] in self.poisoned
        if self.poison and self.poison in text:
            self.poisoned.add(text[:16])
        is_constrained = "response_format" in body or "tools" in body
        output = '{"wo' if is_constrained else "yes!" if is_wrong else "yes"
        count = 1 if is_constrained else limit  # cut, as at a context's end
        calls = [{"id": "1", "function": {"name": "look_up", "arguments": output}}]
        usage = {"prompt_tokens": size, "completion_tokens": count}
        completion = Completion(
            prompt=prompt, text=output, max_tokens=limit, finish_reason="length", usage=usage
        )
        return completion, {"choices": [{"message": {"tool_calls": calls}}]}


def audit_long(server: LongServer, context: int) -> dict[str, Check]:
    settings = AuditSettings(base_url="", model="", agent=True, agent_context=context, max_tokens=8)
    double: Any = server
    checks = agent.audit_agent(Audit(settings, double, mock.Mock(), [], None))
    return {check.name: check for check in checks}


def test_a_context_that_ends_is_filled_and_accuses_nobody() -> None:
    """The last turn is shortened until it fits; outputs that the end cuts are no fault."""
    server = LongServer(most=8100)
    checks = audit_long(server, 8192)
    assert {check.verdict for check in checks.values()} == {"ok"}, checks
    assert 7500 < int(checks["turns"].summary.split("prompts up to ")[1].split()[0]) <= 8100
    assert "longer ones are not taken: HTTP 400" in checks["turns"].summary
    assert server.num_uncut == 2 * NUM_SAMPLED, "drawn and compared, from all of the distribution"


def test_what_is_too_slow_without_a_cache_is_told_and_not_asked_again() -> None:
    server = LongServer(slow=5000)
    checks = audit_long(server, 8192)
    assert server.num_late == 1
    assert checks["turns"].verdict == SUSPECT
    assert "6 answers, 3 not judged" in checks["turns"].summary
    assert "no answer within 9 s; a slow one needs a longer --timeout" in checks["turns"].faults[0]
    assert all("not compared, since a shorter one" in fault for fault in checks["forks"].faults)


def test_a_server_that_fails_when_it_is_asked_again_has_failed() -> None:
    """As vLLM's engine on a CPU does by a seed, where it reads a prompt in several chunks."""
    server = LongServer(slow=5000, error=Refused(500, "the engine is dead"))
    checks = audit_long(server, 8192)
    assert checks["turns"].verdict == FAILED
    assert "asked again: HTTP 500, 'the engine is dead'" in checks["turns"].faults[0]
    assert "requests" not in checks["turns"].evidence


def test_a_short_sequence_of_a_long_session_has_few_requests_and_short_texts() -> None:
    """It is found by few replays: not by all requests of the session, again and again."""
    server = LongServer(poison="VENOM")
    double: Any = server
    client = AgentClient(double, 0.5)
    texts = [f"{SALT}: {number % 7} {'filling ' * 4000}" for number in range(40)]
    texts[30] = texts[30].replace("filling", "VENOM", 1)
    answers = [client.ask(AgentRequest(text, 8)) for text in texts]
    with pytest.raises(Refused):
        client.ask(AgentRequest("x", 8, {"prompt_logprobs": 0}))
    assert len(client.steps) == 40, "one that was refused is no part of a sequence"
    faulty = [answer.number for answer in answers if client.find_fault(answer) is not None]
    assert faulty == [37], "the next one with an equal beginning"
    del server.sizes[:]
    steps = client.shorten(answers[37])
    assert steps is not None
    assert [str(step.prompt)[:21] for step in steps] == [f"{SALT}: 2 VENO", f"{SALT}: 2 fill"]
    assert max(len(step.prompt) for step in steps) < 300
    assert sum(server.sizes) < 2 * sum(map(len, texts)), "the session itself is one time that"


def test_text_before_a_required_call_is_no_certain_fault_where_it_is_cut() -> None:
    """llama-server writes such text; one that ends without a call is a fault."""
    calls = [{"function": {"name": "look_up", "arguments": '{"key": "up"}'}}]
    wrong = [{"function": {"name": "look_up", "arguments": '{"key": "in"}'}}]
    for text, tool_calls, reason, kind in (
        ("Hm", None, "length", Unjudged), (" ", None, "length", None), ("Hm", None, "stop", str),
        ("", wrong, "length", None), ("", wrong, "tool_calls", str), ("", calls, "stop", None),
    ):  # fmt: skip
        completion = Completion(prompt="x", text=text, max_tokens=80, finish_reason=reason)
        document = {"choices": [{"message": {"tool_calls": tool_calls}}]}
        call, fault = agent._read_call(StepAnswer(AgentRequest("x", 80), 0, completion, document))
        assert type(fault) is (kind or type(None))
        assert (call is None) == (tool_calls is not calls)


@pytest.mark.thorough
def test_draws_are_judged_by_a_bound() -> None:
    """No fair server of 300 is accused; one that takes a seventh more drafts is, each time."""
    for seed in range(300):
        _, excess, most = find_excess(make_draws(seed, 0.0))
        assert abs(excess) < most
    for seed in range(10):
        num_tokens, excess, most = find_excess(make_draws(seed, 0.15))
        assert num_tokens == NUM_SAMPLED * 64
        assert excess > most
    assert FALSE_ALARM <= 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent": False, "agent_context": 100}, "--agent-context without --agent"),
        ({"agent": True, "checks": ["greedy"]}, "--checks has no effect with --agent"),
    ],
)
def test_options_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        audit_server(AuditSettings(base_url="http://127.0.0.1:1", model=MODEL, **settings))
