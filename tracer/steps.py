"""Which LangGraph node the calling code runs in.

Reads the config that langchain-core keeps in a context variable, if langchain-core is loaded; never
imports it. It knows the names LangGraph gives to metadata, and nothing else of LangGraph.
"""

import sys
from collections.abc import Mapping
from typing import Any

from spangrad.tracer import conventions as c

_CONFIG_MODULE = "langchain_core.runnables.config"
_METADATA = {
    "langgraph_node": (c.STEP_NAME, str),
    "langgraph_step": (c.STEP_INDEX, int),
    "lc_agent_name": (c.AGENT_NAME, str),
    "thread_id": (c.CONVERSATION_ID, str),
}


def current_step() -> dict[str, Any]:
    """Attributes that name the current step; empty outside a graph."""
    module = sys.modules.get(_CONFIG_MODULE)
    variable = getattr(module, "var_child_runnable_config", None)
    config = variable.get() if variable is not None else None
    if not isinstance(config, Mapping):
        return {}
    metadata = config.get("metadata")
    found: dict[str, Any] = {}
    if isinstance(metadata, Mapping):
        for key, (name, kind) in _METADATA.items():
            value = metadata.get(key)
            if isinstance(value, kind):
                found[name] = value
    if c.CONVERSATION_ID not in found:
        configurable = config.get("configurable")
        if isinstance(configurable, Mapping) and isinstance(configurable.get("thread_id"), str):
            found[c.CONVERSATION_ID] = configurable["thread_id"]
    return found
