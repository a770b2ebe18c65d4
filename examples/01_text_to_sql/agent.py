"""An ordinary LangGraph agent that answers questions about a shop with a SQL query.

It may look at the schema and try queries before it answers; its last message is the
answer. It talks to whatever `OPENAI_BASE_URL` names, and knows nothing of training.

    OPENAI_BASE_URL=http://127.0.0.1:8100/v1 OPENAI_API_KEY=none \
        python agent.py cost/done "How much did ann spend in may?"
"""

import os
import sys
from functools import lru_cache
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from pydantic import ValidationError
from shop_database import QueryError, describe, run_sql, show

SYSTEM_PROMPT = "Answer with SQL."
MAX_CALLS = 5
"""Model calls that a question may take; a run that needs more has no answer."""
MAX_TOKENS = 64
"""Of one reply."""


def _database(config: RunnableConfig) -> str:
    return str(config.get("configurable", {})["database"])


@tool
def schema(table: str, config: RunnableConfig) -> str:
    """Columns of a table (orders or customers), and the status code of a valid sale."""
    return describe(_database(config), table)


@tool
def query(sql: str, config: RunnableConfig) -> str:
    """Run a SELECT and return its rows, or the error."""
    try:
        return show(run_sql(_database(config), sql))
    except QueryError as error:
        return str(error)


@lru_cache(maxsize=8)
def build_agent(
    model: str, base_url: str | None, temperature: float
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Model and tools in a loop."""
    tools = [schema, query]
    chat = ChatOpenAI(
        model=model, base_url=base_url, temperature=temperature, max_completion_tokens=MAX_TOKENS
    ).bind_tools(tools)

    def ask_model(state: MessagesState) -> dict[str, Any]:
        try:
            return {"messages": [chat.invoke(state["messages"])]}
        except ValidationError:  # LangChain has no message for arguments that are no object
            return {"messages": [AIMessage("")]}

    def next_node(state: MessagesState) -> str:
        calls = [message for message in state["messages"] if isinstance(message, AIMessage)]
        return "tools" if calls[-1].tool_calls and len(calls) < MAX_CALLS else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask_model)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors="error: wrong arguments"))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", next_node, ["tools", END])
    graph.add_edge("tools", "model")
    return graph.compile()


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Answer `task["question"]` about the shop `task["database"]`.

    Returns:
        `answer`, the SQL of the last message ("" if there is none), and `calls`, the
        number of model calls.
    """
    agent = build_agent(
        os.environ.get("OPENAI_MODEL", "policy"),
        os.environ.get("OPENAI_BASE_URL"),
        float(task.get("temperature", 1.0)),
    )
    messages = [SystemMessage(SYSTEM_PROMPT), HumanMessage(task["question"])]
    end = agent.invoke({"messages": messages}, {"configurable": {"database": task["database"]}})
    replies = [message for message in end["messages"] if isinstance(message, AIMessage)]
    answer = "" if replies[-1].tool_calls else replies[-1].text
    return {"answer": answer, "calls": len(replies)}


if __name__ == "__main__":
    print(run({"database": sys.argv[1], "question": sys.argv[2], "temperature": 0.0})["answer"])
