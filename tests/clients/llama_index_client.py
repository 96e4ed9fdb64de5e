"""llama-index: OpenAILike as a chat model that calls functions."""

from common import BASE_URL, MODEL, PROMPT, check_arguments, check_city, check_stream, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from typed import City, get_weather


def make(**more):
    return OpenAILike(
        model=MODEL, api_base=BASE_URL, api_key="none", temperature=0, max_retries=0,
        is_function_calling_model=True, context_window=1024,
        **({"max_tokens": 40, "is_chat_model": True} | more),
    )  # fmt: skip


asked = [ChatMessage(role="user", content=PROMPT)]


def plain():
    assert make().chat(asked).message.content
    assert make(is_chat_model=False).complete(PROMPT).text


def streamed():
    text = make().chat(asked).message.content
    check_stream([part.delta or "" for part in make().stream_chat(asked)], text)


def tool():
    model, made = make(max_tokens=100), FunctionTool.from_defaults(get_weather)
    given = model.chat_with_tools([made], user_msg=PROMPT, tool_required=True)
    (call, *_) = model.get_tool_calls_from_response(given)
    check_arguments(call.tool_kwargs)


def schema():
    given = make(max_tokens=200).as_structured_llm(City).chat(asked)
    check_city(given.raw)


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
