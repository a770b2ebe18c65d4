"""LangGraph over ChatOpenAI: tool loop, parallel branches, sub-graph, stream, interrupt and resume."""

import operator
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

from tests.tracer.conformance.case import DRY, ONE_TOOL, TWO_TOOLS, WET, case, exact, ids
from tests.tracer.conformance.clients.langchain_chat import chat_model, get_weather, plain_model

THREAD: Any = {"configurable": {"thread_id": "t-1"}}
BOTH = (101, 102, 151645)


class Notes(TypedDict):
    notes: Annotated[list[str], operator.add]


def _agent(chat: Any, *, is_async: bool) -> Any:
    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    async def async_agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    return async_agent if is_async else agent


def tool_loop(chat: Any, *, is_async: bool = False) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("agent", _agent(chat.bind_tools([get_weather]), is_async=is_async))
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


def _asker(url: str, words: str) -> Any:
    chat = chat_model(url)
    return lambda state: {"notes": [str(chat.invoke(words).content)]}


def _async_asker(url: str, words: str) -> Any:
    chat = chat_model(url)

    async def ask(state: Notes) -> Notes:
        return {"notes": [str((await chat.ainvoke(words)).content)]}

    return ask


@case("langgraph", "ToolNode loop", "graph_tools", ids(TWO_TOOLS, finish="tool_calls"), ids(DRY))
def loop(url: str) -> Any:
    return _shown(tool_loop(chat_model(url)).invoke({"messages": [("user", "The weather in Oslo?")]}))


@case(
    "langgraph",
    "ToolNode loop",
    "gateway_tools",
    exact(ONE_TOOL, finish="tool_calls"),
    exact(DRY),
    through_gateway=True,
)
def loop_plain(url: str) -> Any:
    return _shown(tool_loop(plain_model(url)).invoke({"messages": [("user", "The weather in Oslo?")]}))


@case("langgraph", "ToolNode loop, async", "graph_tools", ids(TWO_TOOLS, finish="tool_calls"), ids(DRY))
async def async_loop(url: str) -> Any:
    graph = tool_loop(chat_model(url), is_async=True)
    return _shown(await graph.ainvoke({"messages": [("user", "The weather in Oslo?")]}))


def _shown(state: Any) -> Any:
    """Messages without the ids that LangGraph makes up."""
    return [(m.type, m.content, getattr(m, "tool_calls", None)) for m in state["messages"]]


@case("langgraph", "parallel branches", "graph_branches", ids(DRY), ids(WET), ids(BOTH), is_parallel=True)
def branches(url: str) -> Any:
    return _branches(url, _asker).invoke({"notes": []})


@case(
    "langgraph", "parallel branches, async", "graph_branches", ids(DRY), ids(WET), ids(BOTH), is_parallel=True
)
async def async_branches(url: str) -> Any:
    return await _branches(url, _async_asker).ainvoke({"notes": []})


def _branches(url: str, asker: Any) -> Any:
    graph = StateGraph(Notes)
    for name in ("left", "right"):
        graph.add_node(name, asker(url, name))
        graph.add_edge(START, name)
        graph.add_edge(name, "join")
    graph.add_node("join", asker(url, "join"))
    graph.add_edge("join", END)
    return graph.compile()


@case("langgraph", "sub-graph", "graph_inner", ids(DRY), ids(WET))
def inner(url: str) -> Any:
    below = StateGraph(Notes)
    below.add_node("inner", _asker(url, "inner"))
    below.add_edge(START, "inner")
    graph = StateGraph(Notes)
    graph.add_node("outer", _asker(url, "outer"))
    graph.add_node("helper", below.compile())
    graph.add_edge(START, "outer")
    graph.add_edge("outer", "helper")
    return graph.compile().invoke({"notes": []}, THREAD)


@case("langgraph", "stream of messages", "graph_stream", ids(DRY))
def streamed(url: str) -> Any:
    pieces = _one_node(url).stream({"messages": [("user", "Hello")]}, stream_mode="messages")
    return [(piece.content, metadata["langgraph_node"]) for piece, metadata in pieces]


@case("langgraph", "astream of messages", "graph_stream", ids(DRY))
async def astreamed(url: str) -> Any:
    graph = _one_node(url, is_async=True)
    pieces = graph.astream({"messages": [("user", "Hello")]}, stream_mode="messages")
    return [(piece.content, metadata["langgraph_node"]) async for piece, metadata in pieces]


def _one_node(url: str, *, is_async: bool = False) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("agent", _agent(chat_model(url), is_async=is_async))
    graph.add_edge(START, "agent")
    return graph.compile()


@case("langgraph", "interrupt and resume", "graph_resume", ids(DRY), ids(WET))
def resumed(url: str) -> Any:
    def wait(state: Notes) -> Notes:
        return {"notes": [str(interrupt("go on?"))]}

    graph = StateGraph(Notes)
    graph.add_node("before", _asker(url, "before"))
    graph.add_node("wait", wait)
    graph.add_node("after", _asker(url, "after"))
    graph.add_edge(START, "before")
    graph.add_edge("before", "wait")
    graph.add_edge("wait", "after")
    compiled: Any = graph.compile(checkpointer=InMemorySaver())
    first = compiled.invoke({"notes": []}, THREAD)
    return first["notes"], compiled.invoke(Command(resume="yes"), THREAD)
