"""Spans of LangGraph's agents and nodes, and of LangChain's tools and retrievers.

One callback handler, which langchain-core adds to every run because of a hook that it has for that
(`register_configure_hook`). Knows the names and tags that LangGraph gives to runs; imports langchain-core
only once the application has.

Invariants:
* Parents are found by run id. Runs that are no agent, node, tool or retrieval (the links of a chain) have no
  span; what is below them belongs to the nearest span above.
* A run is an agent if one of its children is a node of a graph: its span begins where the run did.
* Model calls make no span here: they are recorded where they reach the network, as children of the node,
  tool or retrieval whose code makes them.
* A run that fails or is cancelled has status ERROR; an interrupt is no error.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from uuid import UUID

from spangrad.tracer import conventions as c
from spangrad.tracer.current import current_rollout, rollout_attributes
from spangrad.tracer.hooks import when_imported
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.runtime import Runtime, active
from spangrad.tracer.steps import AGENT, STEP, named
from spangrad.tracer.structure.place import MARKS, RETRIEVAL, Run, forget, parent_of, remember, run
from spangrad.tracer.structure.spans import OpenSpan, begin_span

logger = logging.getLogger(__name__)

_HOOKS_MODULE = "langchain_core.tracers.context"
_NODE_TAG = "graph:step:"
_NAMESPACE = "langgraph_checkpoint_ns"
_HIDDEN_TAG = "langsmith:hidden"
_DEFAULT_NAME = "LangGraph"
_AGENT_NAMES = frozenset({"AgentExecutor"})
"""Runs that are agents though they are no graphs."""

_is_attached = False
_is_installed = False
_said = Periodically()


def install() -> None:
    """Attach to langchain-core as soon as it is imported."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        when_imported(_HOOKS_MODULE, _attach)


def _attach(module: ModuleType) -> None:
    global _is_attached
    if not _is_attached:
        _is_attached = True
        # The default makes it there in every context, also in threads that inherit none.
        handler: ContextVar[Any] = ContextVar("spangrad_langchain", default=_handler())  # noqa: B039
        module.register_configure_hook(handler, inheritable=True)


def _handler() -> Any:
    from langchain_core.callbacks.base import BaseCallbackHandler

    class SpangradHandler(BaseCallbackHandler):
        """Stateless: what is in progress is in `place.py`, by run id."""

        run_inline = True

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> Any:
            return _the_handler, ()

        def on_chain_start(
            self,
            serialized: Any,
            inputs: Any,
            *,
            run_id: UUID,
            parent_run_id: UUID | None = None,
            **more: Any,
        ) -> None:
            runtime = active()
            if runtime is not None:
                _guarded(_chain_start, runtime, run_id, parent_run_id, more)

        def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
            _guarded(_end, run_id, None)

        def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            _guarded(_end, run_id, error)

        def on_tool_start(
            self,
            serialized: Any,
            input_str: Any,
            *,
            run_id: UUID,
            parent_run_id: UUID | None = None,
            inputs: Any = None,
            **more: Any,
        ) -> None:
            runtime = active()
            if runtime is not None:
                given = input_str if inputs is None else inputs
                _guarded(_tool_start, runtime, run_id, parent_run_id, serialized, given, more)

        def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
            _guarded(_end, run_id, None, c.TOOL_RESULT, output)

        def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            _guarded(_end, run_id, error)

        def on_retriever_start(
            self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
        ) -> None:
            runtime = active()
            if runtime is not None:
                _guarded(_retriever_start, runtime, run_id, parent_run_id, serialized, query, more)

        def on_retriever_end(self, documents: Any, *, run_id: UUID, **_: Any) -> None:
            _guarded(_end, run_id, None, c.RETRIEVAL_DOCUMENTS, documents)

        def on_retriever_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
            _guarded(_end, run_id, error)

    for event in ("llm", "chat_model", "retry", "custom_event"):
        setattr(SpangradHandler, f"ignore_{event}", property(lambda _: True))
    handler = SpangradHandler()
    global _the_one
    _the_one = handler
    return handler


_the_one: Any = None


def _the_handler() -> Any:
    """What a pickled handler is in another process."""
    return _the_one or _handler()


def _guarded(function: Any, *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception:  # the boundary: the agent must run
        if _said.due():
            logger.warning("a LangChain run could not be recorded", exc_info=True)


def _begin(run_id: UUID, parent_id: UUID | None, name: str, metadata: Any) -> Run:
    """A run below its parent, without a span so far."""
    rollout = current_rollout()
    anchor, step = parent_of(rollout, parent_id, MARKS.get())
    return Run(run_id, parent_id, name, time.time_ns(), rollout, anchor, step, metadata)


def _start_span(
    runtime: Runtime, new: Run, label: str, role: str, attributes: dict[str, Any], start_ns: int | None = None
) -> OpenSpan:
    attributes[c.SPAN_ROLE] = role
    if new.rollout is not None:
        attributes |= rollout_attributes(new.rollout)
    new.span = begin_span(runtime, label, new.anchor, attributes, start_ns)
    new.anchor = new.span.context
    return new.span


def _chain_start(runtime: Runtime, run_id: UUID, parent_id: UUID | None, more: dict[str, Any]) -> None:
    name = str(more.get("name") or "")
    metadata = more.get("metadata")
    parent = run(parent_id)
    is_node, is_hidden = _tags(more.get("tags"))
    is_node = is_node or _is_task(name, metadata, parent)
    if is_node and parent is not None and parent.span is None:
        _is_agent(runtime, parent)
    new = _begin(run_id, parent_id, name, metadata)
    if is_node and not is_hidden:
        new.step = named(metadata, STEP) or new.step
        _start_span(runtime, new, name, "step", dict(new.step))
    elif name in _AGENT_NAMES:
        _is_agent(runtime, new)
    remember(new)


def _tags(tags: Any) -> tuple[bool, bool]:
    is_node = is_hidden = False
    for tag in tags or ():
        if tag == _HIDDEN_TAG:
            is_hidden = True
        elif isinstance(tag, str) and tag.startswith(_NODE_TAG):
            is_node = True
    return is_node, is_hidden


def _is_task(name: str, metadata: Any, parent: Run | None) -> bool:
    """Whether it is a task of LangGraph's functional API: it has no tag, but a namespace of its own."""
    if parent is None or not isinstance(metadata, Mapping) or metadata.get("langgraph_node") != name:
        return False
    above = parent.metadata if isinstance(parent.metadata, Mapping) else {}
    own = metadata.get(_NAMESPACE)
    return isinstance(own, str) and own != above.get(_NAMESPACE)


def _is_agent(runtime: Runtime, found: Run) -> None:
    """Give the run of a graph its span."""
    attributes: dict[str, Any] = {c.OPERATION_NAME: c.INVOKE_AGENT} | _agent_names(found)
    _start_span(runtime, found, f"{c.INVOKE_AGENT} {found.name}".strip(), "agent", attributes, found.start_ns)


def _agent_names(found: Run) -> dict[str, Any]:
    names = named(found.metadata, AGENT)
    if c.AGENT_NAME not in names and found.name not in ("", _DEFAULT_NAME):
        names[c.AGENT_NAME] = found.name
    return names


def _tool_start(
    runtime: Runtime, run_id: UUID, parent_id: UUID | None, serialized: Any, given: Any, more: dict[str, Any]
) -> None:
    name = _name(serialized, more, "tool")
    new = _begin(run_id, parent_id, name, more.get("metadata"))
    attributes: dict[str, Any] = {c.OPERATION_NAME: c.EXECUTE_TOOL, c.TOOL_NAME: name}
    call_id = more.get("tool_call_id")
    if isinstance(call_id, str) and call_id:
        attributes[c.TOOL_CALL_ID] = call_id
    _start_span(runtime, new, f"{c.EXECUTE_TOOL} {name}", "tool", attributes).set_json(
        c.TOOL_ARGUMENTS, given
    )
    remember(new)


def _retriever_start(
    runtime: Runtime, run_id: UUID, parent_id: UUID | None, serialized: Any, query: Any, more: dict[str, Any]
) -> None:
    name = _name(serialized, more, "retriever")
    new = _begin(run_id, parent_id, name, more.get("metadata"))
    attributes: dict[str, Any] = {c.OPERATION_NAME: c.RETRIEVAL, c.RETRIEVAL_QUERY: str(query)[:65_536]}
    _start_span(runtime, new, f"{c.RETRIEVAL} {name}", "retrieval", attributes)
    parent = run(parent_id)
    if parent is not None:
        parent.retrievals[run_id] = None
    remember(new)
    RETRIEVAL.set(run_id)


def _name(serialized: Any, more: Mapping[str, Any], default: str) -> str:
    name = more.get("name") or (serialized.get("name") if isinstance(serialized, Mapping) else None)
    return str(name or default)


def _end(
    run_id: UUID, error: BaseException | None, output_name: str | None = None, output: Any = None
) -> None:
    ended = forget(run_id)
    if ended is None:
        return
    for retrieval in list(ended.retrievals):
        _end(retrieval, error)
    if ended.span is None:
        return
    if ended.span.attributes[c.SPAN_ROLE] == "retrieval" and (parent := run(ended.parent_id)) is not None:
        parent.retrievals.pop(run_id, None)
    if output_name == c.RETRIEVAL_DOCUMENTS:
        ended.span.set_json(output_name, _documents(output))
    elif output_name is not None:
        ended.span.set_json(output_name, getattr(output, "content", output))
    ended.span.end(error)


def _documents(documents: Any) -> list[Any]:
    if not isinstance(documents, Sequence):
        return []
    kept = ("id", "page_content", "metadata")
    return [{name: vars(one).get(name) for name in kept} for one in documents if hasattr(one, "__dict__")]
