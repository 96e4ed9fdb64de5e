"""openai-agents: an agent over /v1/responses, its default, and over chats."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)  # fmt: skip
from common import BASE_URL, MODEL, PROMPT, check_city, check_stream, run
from openai import AsyncOpenAI
from typed import City

set_tracing_disabled(True)
KINDS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
called = []


@function_tool
def get_weather(city: Literal["Paris", "London"]) -> str:
    """The weather."""
    called.append(city)
    return "rain"


def make(kind, **more):
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    # It takes no answer that a limit ends.
    settings = {"temperature": 0, "extra_body": {"stop": ["\n\n", "("]}} | more.pop("settings", {})
    return Agent(
        name="a", instructions="Answer.", model=kind(MODEL, client),
        model_settings=ModelSettings(**settings), **more,
    )  # fmt: skip


async def plain():
    texts = [(await Runner.run(make(kind), PROMPT)).final_output for kind in KINDS]
    assert texts[0] == texts[1] != ""


async def streamed():
    for kind in KINDS:
        result = Runner.run_streamed(make(kind), PROMPT)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        check_stream(pieces, result.final_output)


async def tool():
    for kind in KINDS:
        called.clear()
        agent = make(
            kind,
            tools=[get_weather],
            settings={"tool_choice": "required", "parallel_tool_calls": False},
        )
        result = await Runner.run(agent, PROMPT)
        assert called, result
        assert isinstance(result.final_output, str)


async def schema():
    for kind in KINDS:
        agent = make(kind, output_type=City)
        check_city((await Runner.run(agent, PROMPT)).final_output)


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
