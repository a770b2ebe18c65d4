"""Commands that show what is in a store: rollouts, calls, transitions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.options import (
    DEFAULT_STORE,
    JsonOption,
    KeyOption,
    RolloutsOption,
    RunOption,
    StoreOption,
    opened,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.errors import StoreError

if TYPE_CHECKING:
    from spangrad.credit.assign import CreditConfig
    from spangrad.store.base import Store
    from spangrad.store.records import Reward, Rollout

SplitOption = Annotated[str | None, typer.Option("--split", help="Only this split: train, eval, expert, ...")]
LimitOption = Annotated[int, typer.Option("--limit", min=0, help="Only the last so many rollouts; 0: all.")]


def rollouts(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: SplitOption = None,
    limit: LimitOption = 50,
    sql: Annotated[str | None, typer.Option("--sql", help="Run this read-only SELECT instead.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List rollouts: task, status, attempt, reward, number of model calls, the update that trained on them.

    With --sql, ask the store anything: the tables are described in
    store/README.md.
    """
    with opened(store, key) as opened_store:
        if sql is not None:
            rows = opened_store.query(sql)
            columns: Sequence[str] = list(rows[0]) if rows else ()
        else:
            found = opened_store.rollouts(rollout_ids=rollout, run_id=run, split=split)
            shown = found[-limit:] if limit else found
            rows = _rollout_rows(opened_store, shown)
            columns = (
                "rollout",
                "task",
                "status",
                "attempt",
                "reward",
                "calls",
                "trained_by_update",
                "error",
            )
            if len(shown) < len(found):
                note(f"the last {len(shown)} of {len(found)} rollouts; --limit 0 lists all")
    if as_json:
        print_json(rows)
    else:
        print_rows(columns, rows, right=("attempt", "reward", "calls", "trained_by_update"))


def calls(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """List model calls with the grade that says what each may train, and why not more.

    With --json: messages, tools, token ids, logprobs and policy version of
    each call.
    """
    from spangrad.adapters.calls import call_to_json, calls_of

    with opened(store, key) as opened_store:
        wanted = (
            rollout if rollout or run is None else [r.rollout_id for r in opened_store.rollouts(run_id=run)]
        )
        found = [call_to_json(call) for call in calls_of(opened_store, wanted)]
    if as_json:
        print_json(found)
        return
    rows = [
        {
            "call": call["call_id"],
            "rollout": call["rollout_id"],
            "agent": call["agent_name"],
            "step": call["step_name"],
            "model": call["model"],
            "prompt": _length(call["prompt_token_ids"]),
            "sampled": _length(call["sampled_token_ids"]),
            "finish": call["finish_reason"],
            "grade": call["grade"],
            "because": "; ".join(call["grade_reasons"]) or None,
        }
        for call in found
    ]
    print_rows(tuple(rows[0]) if rows else (), rows, right=("prompt", "sampled"))


def transitions(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: SplitOption = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Config of a run, TOML: estimators and reward authors.")
    ] = None,
    author: Annotated[
        list[str] | None,
        typer.Option("--author", help="Whose rewards count: evaluator, operator, agent; several times."),
    ] = None,
    min_grade: Annotated[
        str, typer.Option("--min-grade", help="Worst grade to train: exact or ids.")
    ] = "ids",
    clone: Annotated[
        bool, typer.Option("--clone", help="Without rewards: advantage 1 everywhere, as cloning has it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the training rows of rollouts: token ids, action mask, advantages, loss weight, segments.

    Advantages compare a rollout with its whole group, also where only one
    member is asked for. The action mask is true exactly where the policy
    sampled the token. What is not trained is counted with its reason.
    """
    from spangrad.credit import row_to_json
    from spangrad.credit.pipeline import credited_rows

    credit, authors = _credit_settings(config)
    with opened(store, key) as opened_store:
        wanted = opened_store.rollouts(rollout_ids=rollout, run_id=run, split=split)
        if not wanted:
            raise StoreError(f"no such rollout in {store!r}; `spangrad rollouts` lists what is there")
        batch = credited_rows(
            opened_store,
            wanted if clone else _with_groups(opened_store, wanted),
            None if clone else credit,
            min_grade=min_grade,
            authors=author or authors,
        )
    ids = {found.rollout_id for found in wanted}
    rows = [row_to_json(row) for row in batch.rows if row.rollout_id in ids]
    if as_json:
        print_json(rows)
    else:
        print_rows(_TRANSITION_COLUMNS, [_summary(row) for row in rows], right=_TRANSITION_COLUMNS[1:-1])
    reasons = Counter(refused.reason for refused in batch.refused if refused.rollout_id in ids)
    for reason, count in reasons.most_common():
        note(f"not trained, {count}x: {reason}")


_TRANSITION_COLUMNS: Final = (
    "rollout",
    "attempt",
    "tokens",
    "trained",
    "calls",
    "advantage",
    "loss_weight",
    "grade",
)


def _credit_settings(config: Path | None) -> "tuple[CreditConfig, Sequence[str]]":
    from spangrad.credit.assign import CreditConfig
    from spangrad.credit.rewards import DEFAULT_AUTHORS

    if config is None:
        return CreditConfig(), DEFAULT_AUTHORS
    from spangrad.trainer.config import load_config

    settings = load_config(config)
    return settings.credit, settings.rollout.reward_authors


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    trained = [a for a, sampled in zip(row["advantages"], row["action_mask"], strict=True) if sampled]
    return {
        "rollout": row["rollout_id"],
        "attempt": row["attempt"],
        "tokens": len(row["token_ids"]),
        "trained": len(trained),
        "calls": len(row["segments"]),
        "advantage": sum(trained) / len(trained) if trained else None,
        "loss_weight": row["loss_weight"],
        "grade": row["grade"],
    }


def _with_groups(store: "Store", wanted: "Sequence[Rollout]") -> "list[Rollout]":
    """These rollouts and all others of their groups."""
    groups = sorted({found.group_id for found in wanted if found.group_id is not None})
    members = store.rollouts(group_ids=groups) if groups else []
    known = {member.rollout_id for member in members}
    return [*members, *(found for found in wanted if found.rollout_id not in known)]


def _rollout_rows(store: "Store", found: "Sequence[Rollout]") -> list[dict[str, Any]]:
    from spangrad.adapters.calls import calls_of

    if not found:
        return []
    ids = [rollout.rollout_id for rollout in found]
    given: dict[str, list[Reward]] = {}
    for reward in store.rewards(ids):
        if reward.call_id is None:
            given.setdefault(reward.rollout_id, []).append(reward)
    counts = Counter(call.rollout_id for call in calls_of(store, ids))
    return [
        _rollout_row(rollout, given.get(rollout.rollout_id, ()), counts[rollout.rollout_id])
        for rollout in found
    ]


def _rollout_row(rollout: "Rollout", given: "Sequence[Reward]", calls: int) -> dict[str, Any]:
    current = [reward for reward in given if reward.attempt in (None, rollout.attempt)]
    trusted = [reward for reward in current if reward.author != "agent"]
    reward = next(iter((trusted or current)[-1:]), None)
    return {
        "rollout": rollout.rollout_id,
        "task": rollout.task_id,
        "run": rollout.run_id,
        "split": rollout.split,
        "group": rollout.group_id,
        "status": rollout.status.value,
        "attempt": rollout.attempt,
        "reward": None if reward is None else reward.value,
        "reward_author": None if reward is None or reward.author is None else reward.author.value,
        "calls": calls,
        "trained_by_update": rollout.consumed_by,
        "error_type": rollout.error_type,
        "error": rollout.error,
    }


def _length(values: Sequence[Any] | None) -> int | None:
    return None if values is None else len(values)
