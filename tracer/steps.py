"""Which LangChain run, and which LangGraph node, the calling code runs in.

Reads the config that langchain-core keeps in a context variable, if langchain-core is loaded; never
imports it. It knows the names LangGraph gives to metadata, and nothing else of LangGraph.
"""

import sys
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from spangrad.tracer import conventions as c

_CONFIG_MODULE = "langchain_core.runnables.config"
STEP = {"langgraph_node": (c.STEP_NAME, str), "langgraph_step": (c.STEP_INDEX, int)}
AGENT = {"lc_agent_name": (c.AGENT_NAME, str), "thread_id": (c.CONVERSATION_ID, str)}
_METADATA = STEP | AGENT


def current_config() -> Mapping[str, Any] | None:
    """The config that a runnable called here would inherit."""
    module = sys.modules.get(_CONFIG_MODULE)
    variable = getattr(module, "var_child_runnable_config", None)
    config = variable.get() if variable is not None else None
    return config if isinstance(config, Mapping) else None


def run_of(config: Mapping[str, Any] | None) -> UUID | None:
    """The run that a runnable called with this config would be a child of."""
    if config is None:
        return None
    return getattr(config.get("callbacks"), "parent_run_id", None)


def step_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes that name the step; empty outside a graph."""
    if config is None:
        return {}
    found = named(config.get("metadata"))
    if c.CONVERSATION_ID not in found:
        configurable = config.get("configurable")
        if isinstance(configurable, Mapping) and isinstance(configurable.get("thread_id"), str):
            found[c.CONVERSATION_ID] = configurable["thread_id"]
    return found


def named(metadata: object, names: Mapping[str, tuple[str, type]] = _METADATA) -> dict[str, Any]:
    """What the metadata of a run says, as attributes."""
    found: dict[str, Any] = {}
    if isinstance(metadata, Mapping):
        for key, (name, kind) in names.items():
            value = metadata.get(key)
            if isinstance(value, kind):
                found[name] = value
    return found


def current_step() -> dict[str, Any]:
    """Attributes that name the current step; empty outside a graph."""
    return step_of(current_config())
