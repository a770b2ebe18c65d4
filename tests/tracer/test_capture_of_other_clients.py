"""LangChain, LangGraph, LiteLLM and bare httpx: one place to record them all."""

import asyncio
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import httpx
import litellm
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
from pydantic import SecretStr

import spangrad
from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls, roots
from tests.tracer.stub_server import ARGUMENTS, PROMPT_IDS, ModelServer, reply_words, sampled_ids

Finish = Callable[[], list[Recorded]]


def chat_model(model: ModelServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=model.url,
        api_key=SecretStr("k"),
        model="policy",
        extra_body={"return_token_ids": True},
        **more,
    )


class Notes(TypedDict):
    notes: Annotated[list[str], operator.add]


def fan_out(model: ModelServer, width: int) -> Any:
    """A graph whose `width` middle nodes each ask the model, in parallel, then one more node does."""
    chat = chat_model(model)

    def ask(name: str) -> Any:
        return lambda state: {"notes": [str(chat.invoke(f"{name} please").content)]}

    graph = StateGraph(Notes)
    names = [f"branch{index}" for index in range(width)]
    for name in names:
        graph.add_node(name, ask(name))
        graph.add_edge(START, name)
        graph.add_edge(name, "join")
    graph.add_node("join", ask("join"))
    graph.add_edge("join", END)
    return graph.compile()


def test_parallel_langgraph_branches_belong_to_their_rollout_and_name_their_step(
    model: ModelServer, recorded: Finish
) -> None:
    graph = fan_out(model, 4)
    for index in range(2):
        with spangrad.rollout(rollout_id=f"r-{index}"):
            graph.invoke({"notes": []}, {"configurable": {"thread_id": f"t-{index}"}})
    spans = recorded()
    for index in range(2):
        (root,) = [span for span in roots(spans) if span[c.ROLLOUT_ID] == f"r-{index}"]
        found = [call for call in calls(spans) if call[c.ROLLOUT_ID] == f"r-{index}"]
        assert sorted(call[c.STEP_NAME] for call in found) == [
            "branch0",
            "branch1",
            "branch2",
            "branch3",
            "join",
        ]
        for call in found:
            assert call.prompt() == f"{call[c.STEP_NAME]} please"
            assert call.trace_id == root.trace_id
            assert call[c.CONVERSATION_ID] == f"t-{index}"
            assert call[c.STEP_INDEX] == (2 if call[c.STEP_NAME] == "join" else 1)


def test_the_server_is_told_of_trace_rollout_and_step(model: ModelServer, recorded: Finish) -> None:
    with spangrad.rollout(rollout_id="r-7", attempt=2):
        fan_out(model, 1).invoke({"notes": []})
    by_id = {span.span_id: span for span in recorded()}
    for seen in model.seen:
        version, trace_id, span_id, flags = seen.headers["traceparent"].split("-")
        assert (version, flags) == ("00", "01")
        assert by_id[span_id].trace_id == trace_id
        assert by_id[span_id].is_call
        assert seen.headers[c.HEADER_ROLLOUT] == "r-7"
        assert seen.headers[c.HEADER_ATTEMPT] == "2"
        assert seen.headers[c.HEADER_STEP] == by_id[span_id][c.STEP_NAME]


def test_async_langgraph_keeps_concurrent_rollouts_apart(model: ModelServer, recorded: Finish) -> None:
    chat = chat_model(model)

    async def ask(state: Notes) -> Notes:
        return {"notes": [str((await chat.ainvoke("async please")).content)]}

    graph = StateGraph(Notes)
    for name in ("left", "right"):
        graph.add_node(name, ask)
        graph.add_edge(START, name)
    compiled = graph.compile()

    @spangrad.rollout
    async def answer() -> None:
        await compiled.ainvoke({"notes": []})

    async def run() -> None:
        await asyncio.gather(*(answer() for _ in range(3)))

    asyncio.run(run())
    spans = recorded()
    assert len(roots(spans)) == 3
    for root in roots(spans):
        found = [call for call in calls(spans) if call.trace_id == root.trace_id]
        assert sorted(call[c.STEP_NAME] for call in found) == ["left", "right"]
        assert {call[c.ROLLOUT_ID] for call in found} == {root[c.ROLLOUT_ID]}


class Chat(TypedDict):
    messages: Annotated[list[Any], add_messages]


@tool
def get_weather(city: str, days: int) -> str:
    """Look up the weather."""
    return f"dry in {city} for {days} days"


def tool_agent(model: ModelServer) -> Any:
    """An ordinary agent loop: ask, run the tool, ask again."""
    chat = chat_model(model).bind_tools([get_weather])

    def agent(state: Chat) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    def tools(state: Chat) -> dict[str, Any]:
        requested = state["messages"][-1].tool_calls
        return {
            "messages": [
                ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in requested
            ]
        }

    graph = StateGraph(Chat)
    graph.add_node("agent", agent)
    graph.add_node("tools", tools)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "agent")
    return graph.compile()


def test_a_langgraph_tool_agent_is_recorded_whole_with_ids_and_raw_arguments(
    model: ModelServer, recorded: Finish
) -> None:
    with spangrad.rollout():
        state = tool_agent(model).invoke({"messages": [HumanMessage("TOOL please")]})
    assert state["messages"][-1].content == "You said TOOL."
    first, second = calls(recorded())
    assert c.unpack_ints(first[c.SAMPLED_TOKEN_IDS]) == sampled_ids(reply_words("TOOL"))
    assert c.unpack_ints(second[c.PROMPT_TOKEN_IDS]) == PROMPT_IDS
    assert first.json(c.OUTPUT_MESSAGES)[0]["parts"][-1]["arguments"] == ARGUMENTS
    assert [message["role"] for message in second.json(c.INPUT_MESSAGES)] == ["user", "assistant", "tool"]
    assert (first[c.STEP_NAME], first[c.STEP_INDEX], second[c.STEP_INDEX]) == ("agent", 1, 3)
    assert first.json(c.TOOL_DEFINITIONS)[0]["function"]["name"] == "get_weather"


def test_a_chatopenai_stream_keeps_its_ids(model: ModelServer, recorded: Finish) -> None:
    text = "".join(str(chunk.content) for chunk in chat_model(model).stream("Hello please"))
    assert text == "You said Hello."
    (call,) = calls(recorded())
    assert c.unpack_ints(call[c.SAMPLED_TOKEN_IDS]) == sampled_ids(reply_words("Hello"))
    assert call[c.STREAM_COMPLETE] is True


@pytest.mark.filterwarnings("ignore:.*:UserWarning:pydantic.*", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_calls_keep_their_ids(
    model: ModelServer, recorded: Finish, litellm_loop: asyncio.Runner, provider: str
) -> None:
    request: dict[str, Any] = {
        "model": f"{provider}/policy",
        "api_base": model.url,
        "api_key": "k",
        "messages": [{"role": "user", "content": "Hello please"}],
        "extra_body": {"return_token_ids": True},
        "num_retries": 0,
    }

    async def ask() -> None:
        await litellm.acompletion(**request)
        stream: Any = await litellm.acompletion(**request, stream=True)
        async for _ in stream:
            pass
        await close_litellm_async_clients()

    litellm.completion(**request)
    streamed: Any = litellm.completion(**request, stream=True)
    list(streamed)
    litellm_loop.run(ask())
    found = calls(recorded())
    assert len(found) == 4
    for call in found:
        assert call[c.REQUEST_MODEL] == "policy"
        assert c.unpack_ints(call[c.PROMPT_TOKEN_IDS]) == PROMPT_IDS
        assert c.unpack_ints(call[c.SAMPLED_TOKEN_IDS]) == sampled_ids(reply_words("Hello"))


def test_only_posts_to_model_routes_are_recorded(model: ModelServer, recorded: Finish) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    with httpx.Client() as agent:
        agent.post(f"{model.url}/chat/completions?beta=true", json=body)
        agent.post(f"{model.url}/tokenize", json=body)
        agent.get(f"{model.url}/chat/completions")
    assert len(recorded()) == 1
