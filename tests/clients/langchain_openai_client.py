"""langchain-openai: ChatOpenAI, over chats and over responses."""

from common import BASE_URL, MODEL, PROMPT, check_arguments, check_city, check_stream, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI
from typed import City, get_weather

weather = as_tool(get_weather)


def make(**more):
    given = {"base_url": BASE_URL, "api_key": "none", "model": MODEL, "max_retries": 0}
    return ChatOpenAI(**given, temperature=0, **({"max_tokens": 40} | more))


def plain():
    text = make().invoke(PROMPT).content
    assert text
    assert make(use_responses_api=True).invoke(PROMPT).text == text


def streamed():
    text = make().invoke(PROMPT).content
    check_stream([chunk.text for chunk in make().stream(PROMPT)], text)
    chunks = make(use_responses_api=True).stream(PROMPT)
    check_stream([chunk.text for chunk in chunks], text)


def tool():
    for responses in (False, True):
        model = make(use_responses_api=responses, max_tokens=100)
        bound = model.bind_tools([weather], tool_choice="any")
        asked = HumanMessage(PROMPT)
        message = bound.invoke([asked])
        (call, *_) = message.tool_calls
        check_arguments(call["args"])
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        assert model.invoke([asked, message, result]).text
        merged = None
        for chunk in bound.stream([asked]):
            merged = chunk if merged is None else merged + chunk
        check_arguments(merged.tool_calls[0]["args"])


def schema():
    for method in ("json_schema", "function_calling"):
        made = make(max_tokens=200).with_structured_output(City, method=method)
        check_city(made.invoke(PROMPT))


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
