"""What can be asked of a hub besides sending spans: one function an operation.

Knows `FileStore` and the wire form; knows no HTTP. `OPERATIONS` is the whole API.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spangrad.errors import PermissionDeniedError, StoreError
from spangrad.store.checking import check_arguments
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Role
from spangrad.store.records import (
    DecisionAuthor,
    Ending,
    Policy,
    PolicyDecision,
    Reward,
    RewardAuthor,
    Rollout,
    RunEvent,
    Update,
)
from spangrad.store.wire import record_from_wire, record_to_wire, records_from_wire, status_from_wire

Arguments = dict[str, Any]

AUTHORS: Final = {
    Role.AGENT: RewardAuthor.AGENT,
    Role.EVALUATOR: RewardAuthor.EVALUATOR,
    Role.TRAINER: RewardAuthor.OPERATOR,
    Role.ADMIN: RewardAuthor.OPERATOR,
}
"""Who is the author of what came with a key."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation and the least role that may use it."""

    role: Role
    run: Callable[[FileStore, Arguments, Role], Any]


def _enqueue(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.enqueue(records_from_wire(Rollout, arguments.get("rollouts")))


def _claim(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(rollout) for rollout in store.claim(**arguments)]


def _heartbeat(store: FileStore, arguments: Arguments, role: Role) -> list[str]:
    pairs = [(rollout_id, attempt) for rollout_id, attempt in arguments.pop("rollouts", ())]
    return store.heartbeat(pairs, **arguments)


def _finish(store: FileStore, arguments: Arguments, role: Role) -> None:
    store.finish(**_with_status(arguments))


def _finish_many(store: FileStore, arguments: Arguments, role: Role) -> list[str]:
    return store.finish_many(records_from_wire(Ending, arguments.get("endings")))


def _give_up(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.give_up(**arguments)


def _requeue(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.requeue(**arguments)


def _put_rewards(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.put_rewards(records_from_wire(Reward, arguments.get("rewards")), author=AUTHORS[role])


def _reward_author(store: FileStore, arguments: Arguments, role: Role) -> str:
    return str(AUTHORS[role])


def _rollouts(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(rollout) for rollout in store.rollouts(**_with_status(arguments))]


def _rewards(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(reward) for reward in store.rewards(**arguments)]


def _commit_update(store: FileStore, arguments: Arguments, role: Role) -> bool:
    return store.commit_update(record_from_wire(Update, arguments.get("update")))


def _last_update(store: FileStore, arguments: Arguments, role: Role) -> dict[str, Any] | None:
    found = store.last_update(**arguments)
    return None if found is None else record_to_wire(found)


def _updates(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(update) for update in store.updates(**arguments)]


def _put_policy(store: FileStore, arguments: Arguments, role: Role) -> None:
    store.put_policy(record_from_wire(Policy, arguments.get("policy")))


def _policies(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(policy) for policy in store.policies(**arguments)]


def _decide(store: FileStore, arguments: Arguments, role: Role) -> bool:
    decision = record_from_wire(PolicyDecision, arguments.get("decision"))
    if decision.decided_by is DecisionAuthor.ADMIN and role < Role.ADMIN:
        raise PermissionDeniedError(
            f"decisions of an admin need the admin key, this is the {role.name.lower()} key"
        )
    return store.decide(decision)


def _decisions(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(decision) for decision in store.decisions(**arguments)]


def _put_metrics(store: FileStore, arguments: Arguments, role: Role) -> None:
    store.put_metrics(**arguments)


def _put_events(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.put_events(records_from_wire(RunEvent, arguments.get("events")))


def _events(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(event) for event in store.events(**arguments)]


def _put_calls(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.put_calls(**arguments)


def _set_sessions(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.set_sessions(**arguments)


def _put_call_keys(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.put_call_keys(**arguments)


def _related_accounts(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return store.related_accounts(**arguments)


def _related_call_keys(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return store.related_call_keys(**arguments)


def _unread_traces(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return [record_to_wire(trace) for trace in store.unread_traces(**arguments)]


def _mark_read(store: FileStore, arguments: Arguments, role: Role) -> int:
    return store.mark_read(**arguments)


def _query(store: FileStore, arguments: Arguments, role: Role) -> list[dict[str, Any]]:
    return store.query(**arguments)


def _stats(store: FileStore, arguments: Arguments, role: Role) -> dict[str, int]:
    return store.stats()


def _with_status(arguments: Arguments) -> Arguments:
    status = arguments.get("status")
    return arguments if status is None else arguments | {"status": status_from_wire(status)}


OPERATIONS: Final[Mapping[str, Operation]] = {
    "claim": Operation(Role.EVALUATOR, _claim),
    "commit_update": Operation(Role.TRAINER, _commit_update),
    "decide": Operation(Role.TRAINER, _decide),
    "decisions": Operation(Role.EVALUATOR, _decisions),
    "enqueue": Operation(Role.TRAINER, _enqueue),
    "events": Operation(Role.EVALUATOR, _events),
    "finish": Operation(Role.EVALUATOR, _finish),
    "finish_many": Operation(Role.EVALUATOR, _finish_many),
    "give_up": Operation(Role.TRAINER, _give_up),
    "heartbeat": Operation(Role.EVALUATOR, _heartbeat),
    "last_update": Operation(Role.EVALUATOR, _last_update),
    "mark_read": Operation(Role.TRAINER, _mark_read),
    "policies": Operation(Role.EVALUATOR, _policies),
    "put_events": Operation(Role.TRAINER, _put_events),
    "put_metrics": Operation(Role.TRAINER, _put_metrics),
    "put_call_keys": Operation(Role.TRAINER, _put_call_keys),
    "put_calls": Operation(Role.TRAINER, _put_calls),
    "put_policy": Operation(Role.TRAINER, _put_policy),
    "put_rewards": Operation(Role.EVALUATOR, _put_rewards),
    "query": Operation(Role.EVALUATOR, _query),
    "related_accounts": Operation(Role.EVALUATOR, _related_accounts),
    "related_call_keys": Operation(Role.EVALUATOR, _related_call_keys),
    "requeue": Operation(Role.TRAINER, _requeue),
    "reward_author": Operation(Role.EVALUATOR, _reward_author),
    "rewards": Operation(Role.EVALUATOR, _rewards),
    "rollouts": Operation(Role.EVALUATOR, _rollouts),
    "set_sessions": Operation(Role.TRAINER, _set_sessions),
    "stats": Operation(Role.EVALUATOR, _stats),
    "unread_traces": Operation(Role.EVALUATOR, _unread_traces),
    "updates": Operation(Role.EVALUATOR, _updates),
}


def run_operation(store: FileStore, name: str, arguments: Any, role: Role) -> Any:
    """Run an operation that the role may use. Raises StoreError if the arguments do not fit."""
    if not isinstance(arguments, dict):
        raise StoreError(f"{name}: an object of arguments was expected, got {arguments!r:.80}")
    check_arguments(name, getattr(FileStore, name), arguments)
    try:
        return OPERATIONS[name].run(store, arguments, role)
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"{name}: the arguments do not fit: {error}") from error
