"""pydantic-ai: agents over chats and over responses."""

from typing import Literal

from common import BASE_URL, MODEL, PROMPT, check_city, check_stream, run
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from typed import City

KINDS = (OpenAIChatModel, OpenAIResponsesModel)
called = []


def make(kind, max_tokens=40, **more):
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": max_tokens}, **more)


def plain():
    for kind in KINDS:
        assert make(kind).run_sync(PROMPT).output


async def streamed():
    for kind in KINDS:
        async with make(kind).run_stream(PROMPT) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        check_stream(pieces)


def tool():
    """The output is a tool of its own; the other one is called with it or is not."""
    for kind in KINDS:
        agent = make(kind, 200, output_type=City)

        @agent.tool_plain
        def get_weather(city: Literal["Paris", "London"]) -> str:
            called.append(city)
            return "rain"

        check_city(agent.run_sync(PROMPT).output)


def schema():
    for kind in KINDS:
        check_city(make(kind, 200, output_type=City).run_sync(PROMPT).output)
        native = make(kind, 200, output_type=NativeOutput(City))
        check_city(native.run_sync(PROMPT).output)


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
