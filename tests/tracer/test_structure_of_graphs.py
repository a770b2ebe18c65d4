"""Agents, nodes, tools and retrievals of LangChain and LangGraph: the exact tree of spans."""

import asyncio
import copy
import operator
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnableParallel
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt

import spangrad
from spangrad.tracer import conventions as c
from spangrad.tracer.structure import place, spans
from tests.tracer.recording import Recorded, calls, roots
from tests.tracer.span_tree import named, tree
from tests.tracer.stub_server import ModelServer
from tests.tracer.test_capture_of_other_clients import chat_model

Finish = Callable[[], list[Recorded]]


class Chat(TypedDict):
    messages: Annotated[list[Any], add_messages]


class Notes(TypedDict):
    notes: Annotated[list[str], operator.add]


@tool
def get_weather(city: str, days: int) -> str:
    """Look up the weather."""
    return f"dry in {city} for {days} days"


def weather_agent(model: ModelServer, tools: Any, **compiled: Any) -> Any:
    chat = chat_model(model).bind_tools([get_weather])

    def think(state: Chat) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    graph = StateGraph(Chat)
    graph.add_node("think", think)
    graph.add_node("tools", tools)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "think")
    return graph.compile(**compiled)


def chain_of(names: dict[str, Any], **compiled: Any) -> Any:
    """A graph whose nodes run one after the other."""
    graph = StateGraph(Notes)
    before = START
    for name, node in names.items():
        graph.add_node(name, node)
        graph.add_edge(before, name)
        before = name
    return graph.compile(**compiled)


def asking(model: ModelServer, prompt: str = "Hello") -> Any:
    chat = chat_model(model)

    def node(state: Notes) -> Notes:
        return {"notes": [str(chat.invoke(prompt).content)]}

    return node


def test_a_tool_agent_is_an_agent_with_nodes_a_tool_and_its_calls(
    model: ModelServer, recorded: Finish
) -> None:
    agent = weather_agent(model, ToolNode([get_weather]), name="weather")
    with spangrad.rollout(rollout_id="r-1"):
        agent.invoke({"messages": [HumanMessage("TOOL please")]}, {"configurable": {"thread_id": "t-1"}})
    found = recorded()
    weather = [
        ("think", ["chat"]),
        ("think", ["chat"]),
        ("tools", ["execute_tool get_weather"]),
    ]
    assert tree(found) == [("rollout", [("invoke_agent weather", weather)])]
    agent_span, tool_span = named(found, "invoke_agent weather"), named(found, "execute_tool get_weather")
    assert agent_span[c.SPAN_ROLE] == "agent"
    assert agent_span[c.OPERATION_NAME] == "invoke_agent"
    assert (agent_span[c.AGENT_NAME], agent_span[c.CONVERSATION_ID]) == ("weather", "t-1")
    assert tool_span[c.SPAN_ROLE] == "tool"
    assert tool_span[c.OPERATION_NAME] == "execute_tool"
    assert (tool_span[c.TOOL_NAME], tool_span[c.TOOL_CALL_ID]) == ("get_weather", "call_1")
    assert tool_span.json(c.TOOL_ARGUMENTS) == {"city": "Zürich", "days": 2}
    assert tool_span.json(c.TOOL_RESULT) == "dry in Zürich for 2 days"
    steps = sorted((s for s in found if s.get(c.SPAN_ROLE) == "step"), key=lambda span: span.start_ns)
    assert [(s[c.STEP_NAME], s[c.STEP_INDEX]) for s in steps] == [("think", 1), ("tools", 2), ("think", 3)]
    assert {span[c.ROLLOUT_ID] for span in found} == {"r-1"}
    assert {span.kind for span in found if not span.is_call} == {1}
    for span in found:
        parent = next((other for other in found if other.span_id == span.parent_id), None)
        assert parent is None or parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns


def test_outside_of_any_rollout_the_agent_groups_its_calls_in_a_trace(
    model: ModelServer, recorded: Finish
) -> None:
    chain_of({"one": asking(model), "two": asking(model)}).invoke({"notes": []})
    found = recorded()
    assert tree(found) == [("invoke_agent LangGraph", [("one", ["chat"]), ("two", ["chat"])])]
    assert len({span.trace_id for span in found}) == 1
    assert {span.get(c.ROLLOUT_ID) for span in found} == {None}
    assert c.AGENT_NAME not in named(found, "invoke_agent LangGraph").attributes


def test_parallel_branches_and_links_of_chains_belong_to_their_node(
    model: ModelServer, recorded: Finish
) -> None:
    chat = chat_model(model)
    left: Any = RunnableLambda(lambda _: "Left please") | chat
    both: Any = RunnableParallel(left=left, right=chat)

    def fan(state: Notes) -> Notes:
        both.invoke("Right please")
        return {"notes": []}

    graph = StateGraph(Notes)
    for name in ("a", "b", "c"):
        graph.add_node(name, fan)
        graph.add_edge(START, name)
    with spangrad.rollout():
        graph.compile().invoke({"notes": []})
    nodes = [(name, ["chat", "chat"]) for name in "abc"]
    assert tree(recorded()) == [("rollout", [("invoke_agent LangGraph", nodes)])]


def test_tasks_of_the_functional_api_and_sent_nodes_are_steps(model: ModelServer, recorded: Finish) -> None:
    chat = chat_model(model)

    @task
    def look(word: str) -> str:
        return str(chat.invoke(f"{word} please").content)

    @entrypoint()
    def flow(words: list[str]) -> list[str]:
        return [found.result() for found in [look(word) for word in words]]

    graph = StateGraph(Notes)
    graph.add_node("plan", lambda state: {"notes": []})
    graph.add_node("work", asking(model))
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", lambda _: [Send("work", {"notes": []})] * 2, ["work"])
    assert flow.invoke(["Left", "Right"]) == ["You said Left.", "You said Right."]
    graph.compile().invoke({"notes": []})
    found = recorded()
    looks = [("invoke_agent LangGraph", [("flow", [("look", ["chat"])] * 2)])]
    works = [("invoke_agent LangGraph", ["plan", ("work", ["chat"]), ("work", ["chat"])])]
    assert tree(found) == works + looks
    assert {call[c.STEP_NAME] for call in calls(found)} == {"look", "work"}


def test_a_chain_outside_of_a_graph_has_no_span(model: ModelServer, recorded: Finish) -> None:
    with spangrad.rollout():
        polite: Any = RunnableLambda(lambda word: f"{word} please") | chat_model(model)
        polite.invoke("Hello")
    assert tree(recorded()) == [("rollout", ["chat"])]


def test_subgraphs_are_agents_in_their_node_whether_called_or_added(
    model: ModelServer, recorded: Finish
) -> None:
    inner = chain_of({"look": asking(model)}, name="helper")

    def call(state: Notes) -> Notes:
        inner.invoke({"notes": []})
        return {"notes": []}

    with spangrad.rollout():
        chain_of({"called": call, "added": inner}, name="boss").invoke({"notes": []})
    found = recorded()
    helper = ("invoke_agent helper", [("look", ["chat"])])
    by_node = [("added", [helper]), ("called", [helper])]
    assert tree(found) == [("rollout", [("invoke_agent boss", by_node)])]
    assert [call.get(c.STEP_NAME) for call in calls(found)] == ["look", "look"]


def test_a_call_in_a_conditional_edge_belongs_to_the_node_before_it(
    model: ModelServer, recorded: Finish
) -> None:
    chat = chat_model(model)
    graph = StateGraph(Notes)
    graph.add_node("start", lambda state: {"notes": []})
    graph.add_edge(START, "start")
    graph.add_conditional_edges(
        "start", lambda state: END if chat.invoke("Route please").content else "start"
    )
    graph.compile().invoke({"notes": []})
    assert tree(recorded()) == [("invoke_agent LangGraph", [("start", ["chat"])])]


@pytest.mark.parametrize("mode", ["values", "updates", "messages"])
def test_an_async_stream_has_the_same_tree(model: ModelServer, recorded: Finish, mode: Any) -> None:
    chat = chat_model(model)

    async def ask(state: Notes) -> Notes:
        return {"notes": [str((await chat.ainvoke("Hello")).content)]}

    async def run() -> list[Any]:
        graph = chain_of({"one": ask, "two": ask})
        return [item async for item in graph.astream({"notes": []}, stream_mode=mode)]

    assert asyncio.run(run())
    assert tree(recorded()) == [("invoke_agent LangGraph", [("one", ["chat"]), ("two", ["chat"])])]


def test_a_stream_that_is_left_ends_its_spans_without_an_error(model: ModelServer, recorded: Finish) -> None:
    stream = chain_of({"one": asking(model), "two": asking(model)}).stream({"notes": []})
    next(stream)
    stream.close()
    found = recorded()
    assert tree(found) == [("invoke_agent LangGraph", [("one", ["chat"])])]
    assert not any(span.is_error for span in found)
    assert not place._runs


def test_an_interrupt_is_no_error_and_the_thread_joins_the_two_runs(
    model: ModelServer, recorded: Finish
) -> None:
    ask = asking(model)

    def approve(state: Notes) -> Notes:
        return {"notes": [interrupt("may I?")]}

    graph = chain_of({"plan": ask, "approve": approve, "act": ask}, checkpointer=MemorySaver(), name="clerk")
    config: Any = {"configurable": {"thread_id": "t-9"}}
    with spangrad.rollout(rollout_id="before"):
        graph.invoke({"notes": []}, config)
    with spangrad.rollout(rollout_id="after"):
        result = graph.invoke(Command(resume="yes"), config)
    assert "yes" in result["notes"]
    found = recorded()
    first = ("invoke_agent clerk", ["approve", ("plan", ["chat"])])
    second = ("invoke_agent clerk", [("act", ["chat"]), "approve"])
    assert tree(found) == [("rollout", [first]), ("rollout", [second])]
    assert not any(span.is_error for span in found)
    stopped, resumed = [span for span in found if span.name == "approve"]
    assert (stopped.get(c.INTERRUPTED), resumed.get(c.INTERRUPTED)) == (True, None)
    joined = [span for span in found if span.name.startswith("invoke_agent") or span.is_call]
    assert {span[c.CONVERSATION_ID] for span in joined} == {"t-9"}


def test_an_error_in_a_tool_is_an_error_of_the_tool_and_of_what_it_stops(
    model: ModelServer, recorded: Finish
) -> None:
    @tool
    def get_weather(city: str, days: int) -> str:
        """Look up the weather."""
        raise LookupError("no such city")

    strict = weather_agent(model, ToolNode([get_weather], handle_tool_errors=False))
    lenient = weather_agent(model, ToolNode([get_weather], handle_tool_errors=True))
    with pytest.raises(LookupError):
        strict.invoke({"messages": [HumanMessage("TOOL please")]})
    lenient.invoke({"messages": [HumanMessage("TOOL please")]})
    found = recorded()
    failed = {span.name: (span.message, span.get(c.ERROR_TYPE)) for span in found if span.is_error}
    assert failed == {
        "execute_tool get_weather": ("no such city", "LookupError"),
        "tools": ("no such city", "LookupError"),
        "invoke_agent LangGraph": ("no such city", "LookupError"),
    }
    assert sum(span.is_error for span in found) == 4  # the second run's tool failed, and nothing else of it


class Shelf(BaseRetriever):
    """Finds what it is asked for, with the help of a model."""

    chat: Any

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.chat.invoke(f"{query} rewritten")
        return [Document(id="d-1", page_content=f"about {query}", metadata={"page": 3})]


def test_a_retrieval_holds_its_query_its_documents_and_its_calls(
    model: ModelServer, recorded: Finish
) -> None:
    shelf = Shelf(chat=chat_model(model))
    chat = chat_model(model)

    def search(state: Notes) -> Notes:
        shelf.invoke("Whales")
        chat.invoke("Answer please")
        return {"notes": []}

    async def search_async(state: Notes) -> Notes:
        await shelf.ainvoke("Whales")
        await chat.ainvoke("Answer please")
        return {"notes": []}

    chain_of({"search": search}).invoke({"notes": []})
    asyncio.run(chain_of({"search": search_async}).ainvoke({"notes": []}))
    shelf.invoke("Alone")
    found = recorded()
    one = ("invoke_agent LangGraph", [("search", ["chat", ("retrieval Shelf", ["chat"])])])
    assert tree(found) == [one, one, ("retrieval Shelf", ["chat"])]
    retrieval = next(span for span in found if span.name == "retrieval Shelf")
    assert (retrieval[c.SPAN_ROLE], retrieval[c.OPERATION_NAME]) == ("retrieval", "retrieval")
    assert retrieval[c.RETRIEVAL_QUERY] == "Whales"
    document = {"id": "d-1", "page_content": "about Whales", "metadata": {"page": 3}}
    assert retrieval.json(c.RETRIEVAL_DOCUMENTS) == [document]


def test_a_cancelled_run_ends_every_span_with_an_error(model: ModelServer, recorded: Finish) -> None:
    started = asyncio.Event()

    class Stuck(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            raise NotImplementedError

        async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            started.set()
            await asyncio.Event().wait()
            return []

    async def wait(state: Notes) -> Notes:
        await Stuck().ainvoke("never")
        return {"notes": []}

    async def run() -> None:
        task = asyncio.create_task(chain_of({"wait": wait}).ainvoke({"notes": []}))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    found = recorded()
    assert tree(found) == [("invoke_agent LangGraph", [("wait", ["retrieval Stuck"])])]
    assert {span.get(c.ERROR_TYPE) for span in found} == {"asyncio.exceptions.CancelledError"}
    assert not place._runs


def test_agents_in_parallel_threads_and_tasks_keep_their_own_trees(
    model: ModelServer, recorded: Finish
) -> None:
    agent = weather_agent(model, ToolNode([get_weather]), name="weather")
    together = threading.Barrier(3)
    question = {"messages": [HumanMessage("TOOL please")]}

    def in_thread(number: int) -> None:
        together.wait(30)
        with spangrad.rollout(rollout_id=f"thread-{number}"):
            agent.invoke(question)

    @spangrad.rollout
    async def in_task() -> None:
        await agent.ainvoke(question)

    async def tasks() -> None:
        await asyncio.gather(in_task(), in_task(), in_task())

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(in_thread, range(3)))
    asyncio.run(tasks())
    found = recorded()
    weather = [("think", ["chat"]), ("think", ["chat"]), ("tools", ["execute_tool get_weather"])]
    inside = [("invoke_agent weather", weather)]
    assert tree(found) == [("in_task", inside)] * 3 + [("rollout", inside)] * 3
    for root in roots(found):
        of_trace = [span for span in found if span.trace_id == root.trace_id]
        assert {span[c.ROLLOUT_ID] for span in of_trace} == {root[c.ROLLOUT_ID]}
        assert len(of_trace) == 8


def test_two_graphs_at_once_under_one_rollout_are_two_agents(model: ModelServer, recorded: Finish) -> None:
    left, right = (chain_of({"ask": asking(model)}, name=name) for name in ("left", "right"))

    async def run() -> None:
        with spangrad.rollout():
            await asyncio.gather(left.ainvoke({"notes": []}), right.ainvoke({"notes": []}))

    asyncio.run(run())
    agents = [(f"invoke_agent {name}", [("ask", ["chat"])]) for name in ("left", "right")]
    assert tree(recorded()) == [("rollout", agents)]


def test_a_rollout_in_a_node_is_not_below_the_graph_of_another_rollout(
    model: ModelServer, recorded: Finish
) -> None:
    inner = chain_of({"ask": asking(model)}, name="inner")

    def node(state: Notes) -> Notes:
        with spangrad.rollout(rollout_id="mine"):
            inner.invoke({"notes": []})
        return {"notes": []}

    with spangrad.rollout(rollout_id="outer"):
        chain_of({"node": node}, name="outer").invoke({"notes": []})
    mine = ("rollout", [("invoke_agent inner", [("ask", ["chat"])])])
    assert tree(recorded()) == [mine, ("rollout", [("invoke_agent outer", ["node"])])]


def test_marks_for_a_thread_that_has_no_config_name_the_node(model: ModelServer, recorded: Finish) -> None:
    chat = chat_model(model)

    def work(marks: Any) -> None:
        place.MARKS.set(marks)
        chat.invoke("Hello")

    def node(state: Notes) -> Notes:
        thread = threading.Thread(target=work, args=(place.marks_here(),))
        thread.start()
        thread.join()
        return {"notes": []}

    with spangrad.rollout():
        assert place.marks_here() is None
        chain_of({"node": node}).invoke({"notes": []})
    found = recorded()
    assert tree(found) == [("rollout", [("invoke_agent LangGraph", [("node", ["chat"])])])]
    assert calls(found)[0][c.STEP_NAME] == "node"


def test_steps_and_graphs_nest_in_each_other(model: ModelServer, recorded: Finish) -> None:
    chat = chat_model(model)
    polite: Any = RunnableLambda(lambda word: f"{word} please") | chat

    def node(state: Notes) -> Notes:
        with spangrad.step("inside"):
            chat.invoke("Bare please")
            polite.invoke("Chained")
        chat.invoke("After please")
        return {"notes": []}

    with spangrad.rollout(), spangrad.step("around"):
        chain_of({"node": node}).invoke({"notes": []})
        chat.invoke("Outer please")
    found = recorded()
    graph = ("invoke_agent LangGraph", [("node", ["chat", ("inside", ["chat", "chat"])])])
    assert tree(found) == [("rollout", [("around", ["chat", graph])])]
    assert {call.prompt(): (call[c.STEP_NAME], call[c.STEP_INDEX]) for call in calls(found)} == {
        "Bare please": ("inside", 1),
        "Chained please": ("inside", 1),
        "After please": ("node", 1),
        "Outer please": ("around", 0),
    }


def test_a_tool_that_langchain_and_we_know_is_one_span(model: ModelServer, recorded: Finish) -> None:
    @tool
    @spangrad.tool
    def search(query: str) -> str:
        """Look it up."""
        chat_model(model).invoke("Deep please")
        return again(query)

    @spangrad.tool
    def again(query: str) -> str:
        return query

    mark: Any = spangrad.tool
    assert mark(search) is search
    assert search.invoke({"query": "whales"}) == "whales"
    assert tree(recorded()) == [("execute_tool search", ["chat", "execute_tool again"])]


def test_results_and_errors_of_a_graph_are_the_same_without_us(model: ModelServer, recorded: Finish) -> None:
    def fails(state: Notes) -> Notes:
        raise KeyError("mine")

    answers = chain_of({"one": lambda state: {"notes": ["x"]}})
    assert answers.invoke({"notes": []}) == {"notes": ["x"]}
    with pytest.raises(KeyError) as caught:
        chain_of({"fails": fails}).invoke({"notes": []})
    assert caught.value.args == ("mine",)
    assert len(recorded()) == 4
    assert answers.invoke({"notes": []}) == {"notes": ["x"]}  # recording is over, the handler is still there


def test_the_handler_survives_what_applications_do_to_configs(recorded: Finish) -> None:
    seen: list[Any] = []

    def node(state: Notes, config: RunnableConfig) -> Notes:
        seen.extend(getattr(config.get("callbacks"), "handlers", ()))
        return {"notes": []}

    chain_of({"node": node}).invoke({"notes": []})
    (handler,) = [one for one in seen if type(one).__name__ == "SpangradHandler"]
    assert copy.deepcopy([handler]) == [handler]
    assert copy.copy(handler) is handler
    assert pickle.loads(pickle.dumps(handler)) is handler
    assert len(recorded()) == 2


def test_runs_and_spans_that_never_end_are_forgotten(
    recorded: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "MAX_RUNS", 10)
    monkeypatch.setattr(spans, "MAX_OPEN", 10)
    graph = chain_of({"one": lambda state: {"notes": []}, "two": lambda state: {"notes": []}})
    left = [graph.stream({"notes": []}) for _ in range(30)]
    for stream in left:
        next(stream)
    assert len(place._runs) <= 10
    assert len(spans._open) <= 10
    found = recorded()  # every agent that was begun, though none has ended
    assert sum(span.name == "invoke_agent LangGraph" for span in found) == 30
    assert {span.json(c.DROPPED)["end"] for span in found if span.get(c.DROPPED)} == {"it was still open"}
    for stream in left:
        stream.close()
    assert not spans._open
