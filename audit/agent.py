"""Audit as an agent uses a server: turns over a growing prefix, tools, grammars, temperature 1.

The session's requests come first, one after another, as an agent sends them; only then are their
answers judged. A fault that hurts an agent shows in a later request than the one that caused it: a
block of the cache that holds another text's numbers, a state that was not rolled back, a drafted
token's keys that stayed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import shorten
from specdec.system.logs import get_logger, show_progress
from specdec.text.samples import TEXTS

from .agent_client import SALT, AgentClient, AgentRequest, Doubt, Failure, StepAnswer, Unjudged
from .answers import AnyPrompt, BadAnswer
from .checks import FAILED, OK, SKIPPED, SUSPECT, Audit, Check
from .server import LateAnswer, Refused, ServerClient
from .settings import DEFAULT_CONTEXT

logger = get_logger(__name__)
NUM_TURNS = 6
# Shares of a question's length: the next one where a server refuses it.
QUESTION_LENGTHS = (1.0, 0.9, 0.5)
NUM_SAMPLED = 16
FALSE_ALARM = 1e-4  # of `sampled`, for a server whose log-probabilities are right
NUM_SCALES = 20  # of variances that its bound holds for at once: up to 2 ** 19 tokens
LEAST_CHARACTERS = 24  # of a question
SHORT_TOKENS = 80  # for an output of one of the grammars
CHECKS = ("probes", "turns", "forks", "grammar", "tools", "sampled")
Json = Mapping[str, Any]
# Grammars of few texts, one of which is often the beginning of another, and what holds of them.
GRAMMARS: tuple[tuple[Json, Callable[[Any], bool]], ...] = (
    ({"type": "object", "properties": {"word": {"enum": ["a", "ab", "abc"]},
                                       "is_so": {"type": "boolean"}},
      "required": ["word", "is_so"], "additionalProperties": False},
     lambda v: {*v} == {"word", "is_so"} and v["word"] in ("a", "ab", "abc")
     and isinstance(v["is_so"], bool)),
    ({"type": "array", "items": {"enum": [1, 11, 111]}, "minItems": 3, "maxItems": 3},
     lambda v: len(v) == 3 and all(n in (1, 11, 111) for n in v)),
)  # fmt: skip
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look_up", "description": "Look a word up.",
        "parameters": {
            "type": "object", "properties": {"key": {"enum": ["up", "upon", "down"]}},
            "required": ["key"], "additionalProperties": False,
        },
    },
}  # fmt: skip


@dataclasses.dataclass
class Session:
    """The requests of a session so far, by the check that judges them, and what else was wrong."""

    client: AgentClient
    max_tokens: int
    answers: dict[str, list[StepAnswer]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in CHECKS}
    )
    faults: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in CHECKS}
    )
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)  # why a check is skipped
    num_prompt_tokens: int = 0  # of the longest prompt

    def ask(self, name: str, prompt: AnyPrompt, max_tokens: int = 0, **fields: Any) -> StepAnswer:
        """Ask for an answer that a check will judge."""
        step = AgentRequest(prompt, max_tokens or self.max_tokens, fields)
        answer = self.client.ask(step)
        self.answers[name].append(answer)
        self.num_prompt_tokens = max(self.num_prompt_tokens, answer.completion.num_prompt_tokens)
        return answer

    def try_ask(
        self, name: str, prompt: AnyPrompt, max_tokens: int, **fields: Any
    ) -> StepAnswer | None:
        """Ask for what a server may refuse; None where it does, which skips the check."""
        if name in self.reasons:
            return None
        try:
            return self.ask(name, prompt, max_tokens, **fields)
        except Refused as refusal:
            if refusal.is_fault:
                self.faults[name].append(f"the server failed: {refusal}")
            else:
                self.reasons[name] = f"the server does not take such requests: {refusal}"
            return None


def audit_agent(audit: Audit) -> list[Check]:
    """Run a session and judge it."""
    settings, reference = audit.settings, audit.reference
    assert reference is None or isinstance(reference, ServerClient)
    client = AgentClient(audit.server, settings.near_tie, reference)
    session = Session(client, settings.max_tokens)
    probes = [_make_probe(session, index) for index in range(3)]
    for probe in (*probes, *probes[2:]):
        probe()
    context = settings.agent_context or DEFAULT_CONTEXT
    parts: dict[str, Callable[[], Any]] = {
        "turns": lambda: _run_turns(session, context, probes),
        "sampled": lambda: _sample(session),
        "probes": lambda: [probe() for probe in probes],
    }
    for name, ask in parts.items():
        try:
            ask()
        except LateAnswer as late:  # what came in time is judged
            fault = Unjudged(f"request {len(client.steps)}: {late.message}; {late.hint}")
            session.faults[name].append(fault)
        except (Refused, BadAnswer) as error:
            session.faults["turns"].append(f"request {len(client.steps)}: {error}")
            break
    return _judge(session)


def _make_probe(session: Session, index: int) -> Callable[[], StepAnswer]:
    """Make a request that is sent before, in between and after: two greedy ones, one drawn."""
    client = session.client
    prompt = client.make_prompt(f"{SALT}. {TEXTS[index % len(TEXTS)]}")
    fields = {"temperature": 1.0, "seed": 11} if index == 2 else {}
    return lambda: session.ask("probes", prompt, 0, **fields)


def _run_turns(
    session: Session, context: int, probes: list[Callable[[], StepAnswer]]
) -> None:  # fmt: skip
    """Send turns whose prompts grow up to `context` tokens, or to what the server takes."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"{SALT}. You look words up."}
    ]  # fmt: skip
    room = context - max(session.max_tokens, SHORT_TOKENS)
    num_characters, num_tokens = 1, 1  # of the turn before
    for turn in range(NUM_TURNS):
        num_new = room * (turn + 1) // NUM_TURNS - num_tokens
        room_characters = num_characters + num_new * num_characters // num_tokens
        asked = _ask_turn(session, messages, turn, room_characters)
        if asked is None:
            return
        turn_messages, answer = asked
        question = turn_messages[-1]["content"]
        if turn % 2:
            fork = [*messages, {"role": "user", "content": question[: len(question) // 2] + " No."}]
            session.ask("forks", _render(session, fork))
            session.ask("forks", _render(session, turn_messages))
        _ask_constrained(session, turn_messages, turn)
        messages = [*turn_messages, {"role": "assistant", "content": answer.completion.text}]
        messages += _call_tool(session, turn_messages)
        probes[turn % len(probes)]()
        num_tokens = answer.completion.num_prompt_tokens or num_tokens
        num_characters = _count_characters(turn_messages)
        logger.info("turn %d of %d: a prompt of %d tokens", turn + 1, NUM_TURNS, num_tokens)


def _ask_turn(
    session: Session, messages: list[dict[str, Any]], turn: int, room: int
) -> tuple[list[dict[str, Any]], StepAnswer] | None:
    """Ask a turn's question, which fills the prompt up to `room` characters.

    A shorter one is asked where the server does not take it; None is returned where it takes none.
    """
    question = f"Turn {turn}. {TEXTS[turn % len(TEXTS)]}"
    num_characters = room - _count_characters(messages)
    for share in QUESTION_LENGTHS:
        text = _fill(question, int(share * num_characters))
        turn_messages = [*messages, {"role": "user", "content": text}]
        try:
            return turn_messages, session.ask("turns", _render(session, turn_messages))
        except Refused as refusal:
            if refusal.is_fault or not turn:
                raise
            session.reasons["turns"] = f"longer ones are not taken: {refusal}"
    return None


def _count_characters(messages: list[dict[str, Any]]) -> int:
    """Count the characters of messages and calls, without what a template puts around them."""
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    return sum(len(message["content"]) for message in messages) + len(json.dumps(calls))


def _fill(text: str, num_characters: int) -> str:
    """Return a text with numbered lines after it, of about so many characters."""
    lines, length, number = [text], len(text), 0
    while length < num_characters:
        number += 1
        line = f"{number * 7919 % 1000}: {TEXTS[number % len(TEXTS)]}"
        lines.append(line[: num_characters - length])
        length += len(lines[-1]) + 1
    return "\n".join(lines)[: max(num_characters, LEAST_CHARACTERS)]


def _render(session: Session, messages: list[dict[str, Any]]) -> AnyPrompt:
    """Return messages as a chat, or as a text where the server has no chats."""
    if session.client.has_chat:
        return messages
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def _ask_constrained(session: Session, messages: list[dict[str, Any]], turn: int) -> None:
    """Ask for an output of a grammar after the turn's prompt, greedily and drawn."""
    schema, holds = GRAMMARS[turn % len(GRAMMARS)]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    drawing: tuple[Json, ...] = ({}, {"temperature": 1.0, "seed": 5 + turn})
    for fields in drawing:
        answer = session.try_ask(
            "grammar", _render(session, messages), SHORT_TOKENS, response_format=form, **fields
        )
        if answer is None:
            return
        completion = answer.completion
        fault = _find_json_fault(completion.text, holds)
        if completion.finish_reason == "length":
            fault = None  # it is cut: white space alone may fill it, or the context ended
        if fault is not None:
            session.faults["grammar"].append(f"request {answer.number}: {fault}")


def _find_json_fault(text: str, holds: Callable[[Any], bool]) -> str | None:
    try:
        is_right = holds(json.loads(text))
    except (ValueError, TypeError, LookupError):
        is_right = False
    return None if is_right else f"{shorten(text)} is not of the grammar that was asked for"


def _call_tool(session: Session, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Require a call; return the messages of the call and of its result."""
    if not session.client.has_chat:
        session.reasons["tools"] = "the server has no chats"
        return []
    fields = {"tools": [TOOL], "tool_choice": "required"}
    answer = session.try_ask("tools", messages, SHORT_TOKENS, **fields)
    if answer is None:
        return []
    call, fault = _read_call(answer)
    if fault is not None:
        session.faults["tools"].append(type(fault)(f"request {answer.number}: {fault}"))
    if call is None:
        return []
    text = call["function"]["arguments"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": f"{text} is found."}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


def _read_call(answer: StepAnswer) -> tuple[dict[str, Any] | None, str | None]:
    """Return the call that was required, and what is wrong with it; neither where it is cut.

    Text without a call is no certain fault where it is cut: llama-server lets it come before one.
    """
    is_cut = answer.completion.finish_reason == "length"
    try:
        (call,) = answer.document["choices"][0]["message"]["tool_calls"][:1]
        name, text = call["function"]["name"], call["function"]["arguments"]
    except (LookupError, TypeError, ValueError):
        if not is_cut:
            return None, "no call, where one is required"
        return None, _describe_start(answer.completion.text.strip())
    fault = _find_json_fault(text, lambda v: {*v} == {"key"} and v["key"] in ("up", "upon", "down"))
    if name != "look_up":
        fault = fault or shorten(name)
    if fault is None:
        return call, None
    return None, None if is_cut else fault


def _describe_start(text: str) -> Unjudged | None:
    """Describe an output that is cut before its call; white space alone says nothing."""
    if not text:
        return None
    start = shorten(text, 40)
    return Unjudged(f"no call in {SHORT_TOKENS} tokens, where one is required, but {start}")


def _sample(session: Session) -> None:
    """Draw answers at temperature 1, one seed each, after the session's longest prompts."""
    prompts = [answer.step.prompt for answer in session.answers["turns"]]
    for number in range(NUM_SAMPLED):
        prompt = prompts[number % len(prompts)]
        fields = {"temperature": 1.0, "seed": 100 + number, **session.client.uncut_fields}
        session.ask("sampled", prompt, 0, **fields)


def find_excess(answers: list[StepAnswer]) -> tuple[int, float, float]:
    """Count drawn tokens, and by how much the likeliest came too often; and the most by chance.

    The likeliest token of a place comes with its probability, so the sum of (came - probability)
    is a martingale. By Freedman's inequality it passes the bound in one of 1 / FALSE_ALARM audits
    at most, whatever the texts; the bound holds for all powers of two of the variance at once.
    """
    total, variance, num_tokens = 0.0, 0.0, 0
    for answer in answers:
        for token in answer.completion.tokens or ():
            tops = [top.logprob for top in token.top if top.logprob is not None]
            if not tops or token.logprob is None:
                continue
            probability = min(1.0, math.exp(max(tops)))
            total += (token.logprob >= max(tops)) - probability
            variance += probability * (1 - probability)
            num_tokens += 1
    scale = 2.0 ** max(0, math.ceil(math.log2(max(variance, 1.0))))
    log = math.log(2 * NUM_SCALES / FALSE_ALARM)
    most = log / 3 + math.sqrt(log * log / 9 + 2 * scale * log)
    return num_tokens, total, most


def _judge(session: Session) -> list[Check]:
    """Judge all answers; find a short sequence of requests for the first fault."""
    _compare_probes(session)
    evidence: dict[str, dict[str, Any]] = {name: {} for name in CHECKS}
    faulty_answers: list[tuple[str, StepAnswer]] = []
    pairs = [(name, answer) for name in CHECKS for answer in session.answers[name]]
    for name, answer in show_progress(pairs, label="answers compared", total=len(pairs)):
        fault = session.client.find_fault(answer)
        if fault is not None:
            session.faults[name].append(fault)
            if not isinstance(fault, (Doubt, Failure)):
                faulty_answers.append((name, answer))
    evidence["sampled"] |= _judge_draws(session)
    if faulty_answers:
        name, answer = min(faulty_answers, key=lambda entry: entry[1].number)
        evidence[name] |= _shorten(session, name, answer)
    return [_make_check(session, name, evidence[name]) for name in CHECKS]


def _judge_draws(session: Session) -> dict[str, Any]:
    """Judge how often the likeliest token was drawn; return the evidence."""
    num_tokens, excess, most = find_excess(session.answers["sampled"])
    if abs(excess) > most:
        session.faults["sampled"].append(
            f"of {num_tokens} drawn tokens {excess:+.1f} more are the likeliest than their"
            f" probabilities say, {most:.1f} by chance at most"
        )
    return {"tokens": num_tokens, "excess": excess, "most": most, "false_alarm": FALSE_ALARM}


def _shorten(session: Session, name: str, answer: StepAnswer) -> dict[str, Any]:
    """Tell with a fault how few requests bring it about; return these as evidence."""
    client, faults = session.client, session.faults[name]
    steps = client.shorten(answer)
    comment = (
        "it does not come again after another text" if steps is None
        else f"{len(steps)} of {answer.number + 1} requests bring it about"
    )  # fmt: skip
    index = next(i for i, text in enumerate(faults) if text.startswith(f"request {answer.number}:"))
    faults.insert(0, f"{faults.pop(index)}; {comment}")
    sequence = client.steps[: answer.number + 1] if steps is None else steps
    requests = [step.to_json() for step in sequence]
    return {"requests": requests, "is_short": steps is not None}


def _compare_probes(session: Session) -> None:
    """Compare equal prompts' answers; of the drawn ones, if the first two are equal."""
    by_step: dict[str, list[StepAnswer]] = {}
    for answer in session.answers["probes"]:
        by_step.setdefault(json.dumps(answer.step.to_json()), []).append(answer)
    for answers in by_step.values():
        first, is_greedy = answers[0], answers[0].step.is_greedy
        if not is_greedy and answers[0].completion.text != answers[1].completion.text:
            continue  # seeds have no effect
        for answer in answers[1:]:
            fault = session.client.compare(answer, first)
            if fault is not None:
                label = f"request {answer.number}: another answer than at first"
                session.faults["probes"].append(type(fault)(f"{label}: {fault}"))


def _judge_faults(faults: list[str]) -> str:
    """Return the verdict of a check with these faults, doubts after the certain ones."""
    if not faults:
        return OK
    return SUSPECT if isinstance(faults[0], Doubt) else FAILED


def _make_check(session: Session, name: str, evidence: dict[str, Any]) -> Check:
    answers, faults, client = session.answers[name], session.faults[name], session.client
    if not answers and not faults:
        return Check(name, SKIPPED, session.reasons.get(name, "nothing was asked"))
    faults = sorted(faults, key=lambda fault: isinstance(fault, Doubt))
    summary, verdict = f"{len(answers)} answers", _judge_faults(faults)
    summary += _count_doubts(faults, is_referenced=client.reference is not None)
    if name == "turns":
        kinds = _list_comparisons(client)
        summary += f", prompts up to {session.num_prompt_tokens} tokens; compared with "
        summary += " and ".join(kinds) or "nothing but repeats"
        summary += f"; {session.reasons[name]}" if name in session.reasons else ""
        if not kinds and not faults:
            verdict = SUSPECT
            faults = ["there is nothing to compare these answers with: give --reference-url"]
    if name == "sampled" and not evidence["tokens"]:
        summary += ", without log-probabilities that tell how likely each token was"
    return Check(name, verdict, summary, faults, evidence)


def _count_doubts(faults: list[str], *, is_referenced: bool) -> str:
    """Return how many faults of a check are no certain ones, as its summary has it."""
    num_unjudged = sum(isinstance(fault, Unjudged) for fault in faults)
    num_doubts = sum(isinstance(fault, Doubt) for fault in faults) - num_unjudged
    text = f", {num_unjudged} not judged" if num_unjudged else ""
    if num_doubts:
        text += f", {num_doubts} differences without a margin"
        text += "" if is_referenced else ": give --reference-url"
    return text


def _list_comparisons(client: AgentClient) -> list[str]:
    """Name what the answers were compared with."""
    kinds = []
    if client.reference is not None:
        kinds.append("a reference")
    if client.fresh_fields is not None:
        kinds.append("the server without its cache")
    if client.num_scored:
        kinds.append("its own scores of the texts")
    return kinds
