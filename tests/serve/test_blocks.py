"""An answer is the same whatever blocks its tokens come in, and however many are taken at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec import Event
from specdec.decode.requests import Request
from specdec.serve.answers import ChatAnswer, Choice, EndpointAnswer
from specdec.serve.response_body import ResponseBody
from specdec.serve.responses import ResponseAnswer
from specdec.serve.schema import ChatBody
from specdec.serve.tokens import TokenTable
from specdec.text.answer_parser import Parser
from specdec.text.call_formats import REASONING_FORMATS, TOOL_FORMATS
from specdec.text.text_stream import TextStream
from tests.conftest import ROOT
from tests.serve.test_tools import join, without_ids

SCHEMAS: Any = {"add": {"properties": {"n": {"type": "array"}}}, "f": {}}
ARGUMENTS = '{"t": "é🙂\\\\\\" </tool_call> \\n", "n": [1, {"x": "}"}]}'
ADD, F = f'{{"name": "add", "arguments": {ARGUMENTS}}}', '{"name": "f", "arguments": {}}'
# By format, reasoning, content and two calls, with characters of several tokens.
TEXTS = {
    "hermes": f"so 🙂\n\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{F}\n</tool_call> é",
    "qwen3_coder": "s🙂 <tool_call>\n<function=add>\n<parameter=t>\né🙂\n</parameter>\n"
    f"<parameter=n>\n[1]\n</parameter>\n</function>\n</tool_call>\n<tool_call>{F}</tool_call>",
    "mistral": f"é [TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]f[ARGS]{{}}",
    "mistral_list": f"é[TOOL_CALLS][{ADD}, {F}]",
    "llama3_json": f"{ADD.replace('arguments', 'parameters')}; {F}",
    "json": f"```json\n[{ADD}, {F}]\n```",
}
Blocks = list[tuple[int, bool]]  # where each ends, and whether its events are taken at once


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "examples" / "pycode" / "target")


def make_events(tokenizer: Any, ids: list[int], stop: list[str], blocks: Blocks) -> Any:
    """Lists of the events that are taken at once."""
    stream, events, start = TextStream(tokenizer, stop), list[Event](), 0
    for end, is_taken in blocks:
        is_stopped = any(stream.add(token) for token in ids[start:end])  # what is after it is lost
        is_over, number = is_stopped or end == len(ids), len(stream.ends)
        if is_over:
            stream.finish()
        reason: Any = ("stop" if is_stopped else "eos") if is_over else None
        events.append(
            Event(
                text=stream.take(), token_ids=ids[start:number], origins=[], logprobs=[],
                ends=stream.ends[start:], finish_reason=reason,
            )
        )  # fmt: skip
        start = end
        if is_taken or is_over:
            yield events
            events = []
        if is_over:
            return


def tell(kind: type[EndpointAnswer], name: str, tokenizer: Any, events: Any) -> tuple[Any, ...]:
    """What a stream tells, its deltas joined, which the whole answer is."""
    parser = Parser(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], schemas=SCHEMAS)
    request = Request(index=0, input_text="", input_ids=[1], max_output_len=9, end_ids=frozenset())
    choice = Choice(0, request, parser=parser)
    body = ChatBody(return_token_ids=True) if kind is ChatAnswer else ResponseBody(input="x")
    answer = kind(body, "toy", [choice], TokenTable(tokenizer))
    told = [one for taken in events for one in answer.add(choice, taken)]
    whole: Any = answer.to_json()
    if kind is ChatAnswer:
        message = join(told, 0)
        assert without_ids(message) == without_ids(whole["choices"][0]["message"])
        ids = [token for one in told for token in one["choices"][0].get("token_ids", [])]
        assert ids == [token.id for token in choice.tokens]
        return without_ids(message), message["finish_reason"], ids, choice.num_reasoning_tokens
    names = [one["type"] for one in told]
    items = [{key: one[key] for key in one if "id" not in key} for one in whole["output"]]
    streamed = ["" for _ in items]
    for one in told:
        if one["type"].endswith("delta"):
            streamed[one["output_index"]] += one["delta"]
    assert streamed == [one.get("arguments") or one["content"][0]["text"] for one in items]
    return items, [n for at, n in enumerate(names) if "delta" not in n or n != names[at - 1]]


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [[], ["}}"], ["f[", "🙂x", "} é"]], ids=["whole", "cut", "other"])
@pytest.mark.parametrize("kind", [ChatAnswer, ResponseAnswer])
@pytest.mark.parametrize("name", TEXTS)
def test_an_answer_does_not_depend_on_blocks(
    tokenizer: Any, name: str, kind: type[EndpointAnswer], stop: list[str]
) -> None:
    text = f"<think>\nhm é🙂 <tool_call>\n</think>\n\n{TEXTS[name]}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    last = len(ids), True
    expected = tell(kind, name, tokenizer, make_events(tokenizer, ids, stop, [last]))
    if not stop and kind is ChatAnswer:
        assert [call["name"] for call in expected[0]["calls"]] == ["add", "f"]
        assert expected[0]["reasoning_content"] == "hm é🙂 <tool_call>"
    dice = random.Random(name)
    cuts = [range(1, len(ids)), *((at,) for at in range(1, len(ids), 9))]
    cuts += [sorted(dice.sample(range(1, len(ids)), dice.choice([3, 9, 40]))) for _ in range(9)]
    for ends in cuts:
        blocks = [*((end, dice.random() < 0.7) for end in ends), last]
        events = make_events(tokenizer, ids, stop, blocks)
        assert tell(kind, name, tokenizer, events) == expected, blocks
