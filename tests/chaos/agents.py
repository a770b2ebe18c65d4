"""Four kinds of agents, for the chaos test: ordinary programs that do the same with and without tracing.

    python agents.py URL KIND:NAME[:END] ... [--pace SECONDS]

An agent runs rollout after rollout, until the file `stop` appears or rollout END is reached; started again,
it goes on with the next one. It writes, in the working directory, each line with one `write`, so that it
survives SIGKILL:

* `NAME.calls`: a call that has finished, as JSON: its key, its reply, the time (system-wide clock);
* `NAME.results`: a rollout that has finished: its index, a digest of everything that the agent saw.

Replies depend only on the conversation, so results depend only on NAME and index. The key of a call is
the first word of its conversation and the number of messages: see `key_of`.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import operator
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

Message = dict[str, Any]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def key_of(messages: list[Any]) -> str:
    """Names a call among all calls of all agents."""
    first = next(message["content"] for message in messages if message["role"] == "user")
    return f"{first.split()[0]}/{len(messages)}"


class Notes:
    """What an agent writes down."""

    def __init__(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._calls = os.open(f"{name}.calls", flags, 0o600)
        self._results = os.open(f"{name}.results", flags, 0o600)

    def call(self, messages: list[Any], reply: Any) -> Any:
        """Note that a call has finished; gives its reply."""
        line = json.dumps([key_of(messages), reply, time.monotonic_ns()])
        os.write(self._calls, f"{line}\n".encode())
        return reply

    def result(self, index: int, seen: Any) -> None:
        os.write(self._results, f"{index} {digest(seen)}\n".encode())


def start_of(folder: Path, name: str) -> int:
    """First rollout that no earlier process of this agent has begun."""
    path = folder / f"{name}.begun"
    begun = path.read_text().split() if path.exists() else []
    return int(begun[-1]) + 1 if begun else 0


Run = Callable[[str], Any]
"""Runs one rollout that begins with this word; gives what the agent saw."""


def openai_streams(url: str, notes: Notes, pace: float) -> Run:
    """A tool loop over streams; one is left early, one call is refused."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def streamed(messages: list[Any], *, leave: bool = False) -> Message:
        time.sleep(pace)
        content, arguments = "", ""
        stream: Any = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, stream=True
        )
        with stream:
            for chunk in stream:
                delta = chunk.choices[0].delta if chunk.choices else None
                content += (delta and delta.content) or ""
                for call in (delta and delta.tool_calls) or ():
                    arguments += call.function.arguments or ""
                if leave and content:
                    break
        reply = {"content": content, "arguments": arguments}
        notes.call(messages, reply | {"is_whole": not leave})
        return reply

    def run(word: str) -> Any:
        messages: list[Message] = [{"role": "user", "content": f"{word} please TOOL it"}]
        seen: list[Any] = [word]
        for turn in range(5):
            reply = streamed(messages, leave=turn == 3)
            seen.append(reply)
            if reply["arguments"]:
                function = {"name": "look", "arguments": reply["arguments"]}
                call = {"id": "call_1", "type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": "call_1", "content": "dry and warm"})
            else:
                messages.append({"role": "assistant", "content": reply["content"]})
                messages.append({"role": "user", "content": f"then {digest(seen)}"})
        messages.append({"role": "user", "content": "FAIL"})
        refused: Any = messages
        try:
            client.chat.completions.create(model="policy", messages=refused)
        except openai.BadRequestError as error:
            seen.append(notes.call(messages, {"refused": error.status_code, "why": error.code}))
        return seen

    return run


def openai_async(url: str, notes: Notes, pace: float) -> Run:
    """Three conversations at once on one event loop, whole and streamed."""
    import openai

    async def whole(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
        await asyncio.sleep(pace)
        reply = await client.chat.completions.create(model="policy", messages=messages)
        content = reply.choices[0].message.content or ""
        notes.call(messages, {"content": content, "arguments": ""})
        return content

    async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
        await asyncio.sleep(pace)
        stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        notes.call(messages, {"content": "".join(parts), "arguments": ""})
        return "".join(parts)

    async def branch(client: openai.AsyncOpenAI, word: str) -> list[str]:
        messages: list[Message] = [{"role": "user", "content": f"{word} some words"}]
        seen: list[str] = []
        for ask in (whole, streamed, whole):
            seen.append(await ask(client, messages))
            messages += [
                {"role": "assistant", "content": seen[-1]},
                {"role": "user", "content": digest(seen)},
            ]
        return seen

    async def branches(word: str) -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(branch(client, f"{word}-{letter}") for letter in "abc"))

    return lambda word: asyncio.run(branches(word))


class State(TypedDict):
    seen: Annotated[list[Any], operator.add]


def langgraph(url: str, notes: Notes, pace: float) -> Run:
    """A tool agent, then three parallel nodes, then one that joins them."""
    from langchain_core.messages import AIMessage, HumanMessage, convert_to_openai_messages
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode
    from pydantic import SecretStr

    chat = ChatOpenAI(base_url=url, api_key=SecretStr("none"), model="policy", max_retries=0)

    @tool
    def look(city: str) -> str:
        """Look at a city."""
        return f"{city} is dry"

    with_tools = chat.bind_tools([look])

    def noted(messages: list[Any], reply: AIMessage) -> AIMessage:
        arguments = json.dumps(reply.tool_calls[0]["args"], ensure_ascii=False) if reply.tool_calls else ""
        sent = convert_to_openai_messages(messages)
        assert isinstance(sent, list)
        notes.call(sent, {"content": reply.text, "arguments": arguments})
        return reply

    def model(state: MessagesState) -> Any:
        time.sleep(pace)
        return {"messages": [noted(state["messages"], with_tools.invoke(state["messages"]))]}

    def next_node(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else END

    agent: Any = StateGraph(MessagesState)
    agent.add_node("model", model)
    agent.add_node("tools", ToolNode([look]))
    agent.add_edge(START, "model")
    agent.add_conditional_edges("model", next_node, ["tools", END])
    agent.add_edge("tools", "model")
    tool_agent = agent.compile()

    def asker(letter: str) -> Callable[[State], Any]:
        def ask(state: State) -> Any:
            time.sleep(pace)
            messages = [HumanMessage(f"{state['seen'][0]}-{letter} {digest(state['seen'][1:2])}")]
            parts: Any = None
            for part in chat.stream(messages):
                parts = part if parts is None else parts + part
            reply = noted(list(messages), AIMessage(parts.text))
            return {"seen": [[letter, reply.text]]}

        return ask

    graph: Any = StateGraph(State)
    for letter in "abc":
        graph.add_node(letter, asker(letter))
        graph.add_edge(START, letter)
        graph.add_edge(letter, "end")
    graph.add_node("end", asker("end"))
    graph.add_edge("end", END)
    fan = graph.compile()

    def run(word: str) -> Any:
        done = tool_agent.invoke({"messages": [HumanMessage(f"{word} please TOOL it")]})
        texts = [str(message.text) for message in done["messages"]]
        return texts, sorted(map(str, fan.invoke({"seen": [word, digest(texts)]})["seen"]))

    return run


def litellm(url: str, notes: Notes, pace: float) -> Run:
    """Plain, streamed and asynchronous calls through LiteLLM."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm as library

    library.suppress_debug_info = True
    settings: dict[str, Any] = {
        "model": "openai/policy",
        "api_base": url,
        "api_key": "none",
        "max_retries": 0,
    }

    def run(word: str) -> Any:
        messages: list[Message] = [{"role": "user", "content": f"{word} several more words"}]
        seen: list[str] = []
        for way in ("plain", "stream", "async"):
            time.sleep(pace)
            if way == "plain":
                content = library.completion(messages=messages, **settings).choices[0].message.content
            elif way == "stream":
                chunks = library.completion(messages=messages, stream=True, **settings)
                content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                reply = asyncio.run(library.acompletion(messages=messages, **settings))
                content = reply.choices[0].message.content
            seen.append(content)
            notes.call(messages, {"content": content, "arguments": ""})
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": digest(seen)}]
        return seen

    return run


KINDS = {
    "openai_streams": openai_streams,
    "openai_async": openai_async,
    "langgraph": langgraph,
    "litellm": litellm,
}


@contextlib.contextmanager
def traced(rollout_id: str) -> Iterator[None]:
    """One rollout, if this process is recorded."""
    if not os.environ.get("SPANGRAD_STORE"):
        yield
        return
    import spangrad

    with spangrad.rollout(rollout_id=rollout_id):
        yield


def work(kind: str, name: str, url: str, pace: float, *, end: int | None = None) -> None:
    """Run rollouts until the file `stop` is there, or up to rollout `end`."""
    index = start_of(Path(), name)
    run = KINDS[kind](url, notes := Notes(name), pace)
    while index != end and not Path("stop").exists():
        with open(f"{name}.begun", "a") as begun:
            begun.write(f"{index}\n")
        word = f"{name}-{index}"
        with traced(word):
            seen = run(word)
        notes.result(index, seen)
        index += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("plan", nargs="+", help="KIND:NAME or KIND:NAME:END, one after the other")
    parser.add_argument("--pace", type=float, default=0.0)
    given = parser.parse_args()
    if os.environ.get("SPANGRAD_STORE"):
        import spangrad

        spangrad.init()
    for kind, name, *end in (agent.split(":") for agent in given.plan):
        work(kind, name, given.url, given.pace, end=int(end[0]) if end else None)


if __name__ == "__main__":
    main()
