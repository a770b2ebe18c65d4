"""`spangrad.feedback`: give a rollout a number later, from another process.

Not on the agent's path: it raises. Knows stores; knows nothing of agents.
"""

import os
from pathlib import Path

from spangrad.errors import ConfigError, PermissionDeniedError, StoreError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Reward
from spangrad.tracer.exporter import spool_of_store
from spangrad.tracer.setup import is_hub, resolve_target


def feedback(
    value: float,
    *,
    rollout_id: str | None = None,
    trace_id: str | None = None,
    call_id: str | None = None,
    name: str = "reward",
    explanation: str | None = None,
    store: str | os.PathLike[str] | None = None,
    key: str | None = None,
) -> None:
    """Reward a rollout, or one call of it, after the fact: a user's thumb, a grader, a bill.

    The author is what the key says: `evaluator`, or `operator` with the trainer's key or the store's file.
    Another value for the same name later counts instead; the same again changes nothing.

    Args:
        value: A finite number.
        rollout_id: The rollout. Either this or `trace_id`.
        trace_id: 32 hex digits: the trace that the rollout is in.
        call_id: For one call, named by `spangrad calls` (`trace-span`); default: the whole rollout.
        name: Which reward; a trainer asks for `reward` unless it is told otherwise.
        explanation: Why.
        store: URL of a hub, or path of a store's file. Default: SPANGRAD_STORE, or `.spangrad/store.duckdb`.
        key: The hub's evaluator or trainer key. Default: SPANGRAD_KEY.

    Raises:
        ConfigError: Not exactly one of `rollout_id` and `trace_id` is given.
        PermissionDeniedError: The key is the agent's, or none.
        HubUnreachableError: No hub answers.
        StoreError: There is no such rollout or no such call in it, or the value is no finite number.
    """
    if (rollout_id is None) == (trace_id is None):
        raise ConfigError(
            f"feedback was given rollout_id {rollout_id!r} and trace_id {trace_id!r}; give one of them"
        )
    target = resolve_target(store)
    if not is_hub(target) and not Path(target).exists() and not spool_of_store(target).exists():
        raise StoreError(f"there is no store at {target!r}; name one with store=... or SPANGRAD_STORE")
    try:
        with open_store(target, key or os.environ.get("SPANGRAD_KEY")) as opened:
            rollout = _rollout_of_trace(opened, trace_id) if rollout_id is None else rollout_id
            if not opened.rollouts(rollout_ids=[rollout]):
                raise StoreError(
                    f"there is no rollout {rollout!r} in {target!r}; `spangrad rollouts` lists them"
                )
            if call_id is not None:
                _check_call(opened, rollout, call_id)
            reward = Reward(rollout, value, name=name, call_id=call_id, explanation=explanation)
            opened.put_rewards([reward])
    except PermissionDeniedError as error:
        raise PermissionDeniedError(
            "feedback needs the hub's evaluator or trainer key, for an agent may not reward itself:"
            f" {error}; give that key with key=... or SPANGRAD_KEY"
        ) from error


def _check_call(store: Store, rollout_id: str, call_id: str) -> None:
    trace_id, _, span_id = call_id.partition("-")
    rows = store.query("SELECT rollout_id FROM spans WHERE trace_id = ? AND span_id = ?", [trace_id, span_id])
    if not any(row["rollout_id"] in (None, rollout_id) for row in rows):  # it may have it from a span above
        raise StoreError(
            f"there is no call {call_id!r} in rollout {rollout_id!r}; `spangrad calls --rollout` lists them"
        )


def _rollout_of_trace(store: Store, trace_id: str | None) -> str:
    rows = store.query(
        "SELECT DISTINCT rollout_id FROM spans WHERE trace_id = ? AND rollout_id IS NOT NULL",
        [(trace_id or "").lower()],
    )
    found = sorted(str(row["rollout_id"]) for row in rows)
    if len(found) != 1:
        raise StoreError(
            f"trace {trace_id!r} belongs to {len(found)} rollouts {found[:5]!r}; exactly one was expected:"
            " name it with rollout_id=..."
        )
    return found[0]
