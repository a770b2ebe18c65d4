"""LangChain's ChatOpenAI, which drops token ids before anybody above the transport sees them."""

from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

from tests.tracer.conformance.case import DRY, ONE_TOOL, TWO_TOOLS, WET, case, exact, failed, ids, text
from tests.tracer.conformance.clients.openai_sdk import EMBEDDED, Forecast

ASKED = "The weather in Oslo?"


def chat_model(url: str, **more: Any) -> ChatOpenAI:
    """One that asks for ids and logprobs."""
    return plain_model(url, logprobs=True, extra_body={"return_token_ids": True}, **more)


def plain_model(url: str, **more: Any) -> ChatOpenAI:
    settings: Any = {"max_retries": 0, **more}
    return ChatOpenAI(base_url=url, api_key=SecretStr("k"), model="policy", **settings)


@tool
def get_weather(city: str, days: int) -> str:
    """Look up the weather."""
    return f"dry in {city} for {days} days"


@case("langchain", "invoke", "chat", ids(DRY))
@case("langchain", "500", "error_500", failed("500"))
def invoke(url: str) -> Any:
    return chat_model(url).invoke(ASKED)


@case("langchain", "invoke, nothing asked for", "chat_plain", text())
@case("langchain", "invoke", "gateway_chat", exact(DRY), through_gateway=True)
def invoke_plain(url: str) -> Any:
    return plain_model(url).invoke(ASKED)


@case("langchain", "ainvoke", "chat", ids(DRY))
async def ainvoke(url: str) -> Any:
    return await chat_model(url).ainvoke(ASKED)


@case("langchain", "stream", "chat_stream", ids(DRY))
def stream(url: str) -> Any:
    return list(chat_model(url).stream(ASKED))


@case("langchain", "astream", "chat_stream", ids(DRY))
async def astream(url: str) -> Any:
    return [chunk async for chunk in chat_model(url).astream(ASKED)]


@case("langchain", "astream", "gateway_stream", exact(DRY), through_gateway=True)
async def astream_plain(url: str) -> Any:
    return [chunk async for chunk in plain_model(url).astream(ASKED)]


@case("langchain", "batch", "batch", ids(DRY), ids(WET), is_parallel=True)
def batch(url: str) -> Any:
    return chat_model(url).batch([ASKED, "The weather in Bergen?"])


@case("langchain", "abatch", "batch", ids(DRY), ids(WET), is_parallel=True)
async def abatch(url: str) -> Any:
    return await chat_model(url).abatch([ASKED, "The weather in Bergen?"])


@case("langchain", "bind_tools", "tools", ids(ONE_TOOL, finish="tool_calls"), ids(DRY))
def bind_tools(url: str) -> Any:
    bound = chat_model(url).bind_tools([get_weather])
    first = bound.invoke(ASKED)
    results = [
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls
    ]
    return first, bound.invoke([("user", ASKED), first, *results])


@case("langchain", "stream, bind_tools", "tools_stream", ids(TWO_TOOLS, finish="tool_calls"), ids(DRY))
def stream_tools(url: str) -> Any:
    bound = chat_model(url).bind_tools([get_weather])
    first: Any = None
    for chunk in bound.stream(ASKED):
        first = chunk if first is None else first + chunk
    results = [
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls
    ]
    return first, list(bound.stream([("user", ASKED), first, *results]))


@case("langchain", "with_structured_output", "structured", ids((141, 142, 143, 151645)))
def structured(url: str) -> Any:
    return chat_model(url).with_structured_output(Forecast, method="json_schema").invoke(ASKED)


@case("langchain", "retries 429, 429, 200", "retries", failed("429"), failed("429"), ids(DRY))
def retries(url: str) -> Any:
    return chat_model(url, max_retries=2).invoke(ASKED)


@case("langchain", "Responses API", "response", text())
def responses(url: str) -> Any:
    return plain_model(url, use_responses_api=True).invoke(ASKED)


@case("langchain", "OpenAIEmbeddings", "embeddings_base64", EMBEDDED)
def embeddings(url: str) -> Any:
    embedder = OpenAIEmbeddings(
        base_url=url, api_key=SecretStr("k"), model="embedder", check_embedding_ctx_length=False
    )
    return embedder.embed_documents(["Oslo", "Bergen"])
