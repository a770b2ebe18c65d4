"""LiteLLM: completion and acompletion, streams, Router with fallbacks, text completion, embeddings."""

from typing import Any

import litellm
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
from litellm.router import Router

from tests.tracer.conformance.case import (
    DRY,
    ONE_TOOL,
    THOUGHT,
    at_end,
    case,
    failed,
    ids,
    partial,
)
from tests.tracer.conformance.clients.openai_sdk import EMBEDDED, TOOL

litellm.suppress_debug_info = True


def asks(url: str, provider: str = "hosted_vllm", **more: Any) -> Any:
    return {
        "model": f"{provider}/policy",
        "api_base": url,
        "api_key": "k",
        "messages": [{"role": "user", "content": "The weather in Oslo?"}],
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
        "num_retries": 0,
        "max_retries": 0,
        **more,
    }


@case("litellm", "completion", "chat", ids(DRY))
@case("litellm", "completion, reasoning", "thoughts", ids(THOUGHT))
@case("litellm", "500", "error_500", failed("500"))
def completion(url: str) -> Any:
    return litellm.completion(**asks(url))


@case("litellm", "completion, openai provider", "chat", ids(DRY))
def completion_openai(url: str) -> Any:
    return litellm.completion(**asks(url, "openai"))


@case("litellm", "completion, stream", "chat_stream", ids(DRY))
def stream(url: str) -> Any:
    return list(litellm.completion(**asks(url, stream=True)))


@case("litellm", "completion, tools", "tools", ids(ONE_TOOL, finish="tool_calls"), ids(DRY))
def tools(url: str) -> Any:
    asked = asks(url, tools=[TOOL])
    first: Any = litellm.completion(**asked)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "dry in there"}
    asked["messages"] = [*asked["messages"], message, result]
    return first, litellm.completion(**asked)


@case("litellm", "acompletion", "chat", ids(DRY))
async def acompletion(url: str) -> Any:
    return await litellm.acompletion(**asks(url))


@case("litellm", "acompletion, openai provider", "chat", ids(DRY))
async def acompletion_openai(url: str) -> Any:
    return await litellm.acompletion(**asks(url, "openai"))


@case("litellm", "acompletion, stream", "chat_stream", ids(DRY))
@case("litellm", "acompletion, stream cut by the server", "stream_cut", partial(101, 102, error=""))
async def astream(url: str) -> Any:
    chunks: Any = await litellm.acompletion(**asks(url, stream=True))
    return [chunk async for chunk in chunks]


@case("litellm", "Router", "chat", ids(DRY))
def router(url: str) -> Any:
    return _router(url, "policy").completion(**_routed(url, "policy"))


@case("litellm", "Router, async", "chat", ids(DRY))
async def async_router(url: str) -> Any:
    return await _router(url, "policy").acompletion(**_routed(url, "policy"))


@case("litellm", "Router, fallback", "fallback", failed("500"), ids(DRY))
def fallback(url: str) -> Any:
    return _router(url, "first", "second").completion(**_routed(url, "first"))


def _router(url: str, *models: str) -> Any:
    entries: Any = [
        {
            "model_name": model,
            "litellm_params": {
                "model": f"hosted_vllm/{model}",
                "api_base": url,
                "api_key": "k",
                "max_retries": 0,
            },
        }
        for model in models
    ]
    fallbacks: Any = [{models[0]: [models[1]]}] if len(models) > 1 else []
    return Router(model_list=entries, fallbacks=fallbacks, num_retries=0)


def _routed(url: str, model: str) -> Any:
    asked = asks(url, model=model)
    return {key: asked[key] for key in ("model", "messages", "logprobs", "extra_body")}


@case("litellm", "text_completion", "completion", ids(DRY))
def text_completion(url: str) -> Any:
    asked = asks(url, "text-completion-openai", prompt="The weather:", logprobs=1)
    del asked["messages"]
    return litellm.text_completion(**asked)


@case("litellm", "aembedding", "embeddings", EMBEDDED)
async def aembedding(url: str) -> Any:
    return await litellm.aembedding(model="hosted_vllm/embedder", input=["Oslo"], api_base=url, api_key="k")


@at_end
async def close_clients() -> None:
    """LiteLLM keeps its async clients until it is told."""
    await close_litellm_async_clients()
