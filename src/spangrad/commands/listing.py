"""Commands that show what is in a store: rollouts and their calls."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spangrad.commands.filters import check_authors, rollouts_that_fit
from spangrad.commands.options import (
    DEFAULT_STORE,
    AuthorOption,
    JsonOption,
    KeyOption,
    RolloutsOption,
    RunOption,
    SplitOption,
    StoreOption,
    opened,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.store.records import DEFAULT_REWARD

if TYPE_CHECKING:
    from spangrad.adapters.model_call import ModelCall
    from spangrad.store.base import Store
    from spangrad.store.records import Rollout

LimitOption = Annotated[int, typer.Option("--limit", min=0, help="Only the last so many rollouts; 0: all.")]


def rollouts(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: SplitOption = None,
    author: AuthorOption = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List rollouts: task, status, attempt, reward, number of model calls, the update that trained on them.

    The reward is the one that trains: of authors that a trainer trusts. Where rollouts have a number of
    turns, it is shown, and which were cut off by it. Of a traceback the last line is shown; --json has all
    of it.
    `spangrad sql` asks the store anything else.
    """
    from spangrad.credit.rewards import DEFAULT_AUTHORS

    check_authors(author or ())
    with opened(store, key) as opened_store:
        found = rollouts_that_fit(opened_store, store, rollouts=rollout, run=run, split=split)
        shown = found[-limit:] if limit else found
        rows = _rollout_rows(opened_store, shown, author or DEFAULT_AUTHORS)
        if len(shown) < len(found):
            note(f"the last {len(shown)} of {len(found)} rollouts; --limit 0 lists all")
    if as_json:
        print_json(rows)
    elif rows:
        columns = ["rollout", "task", "status", "attempt", "reward", "calls", "trained_by_update", "error"]
        brief = [
            row | {"error": one.brief_failure, "turns": _turns(row)}
            for row, one in zip(rows, shown, strict=True)
        ]
        if any(row["turns"] for row in brief):
            columns.insert(6, "turns")
        print_rows(columns, brief, right=columns[3:-1])


def calls(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: SplitOption = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Only the newest so many calls; 0: all.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List model calls with the grade that says what each may train, and why not more.

    With --json: messages, tools, token ids, logprobs and policy version of
    each call.
    """
    from spangrad.adapters.calls import call_to_json

    with opened(store, key) as opened_store:
        shown, known = _calls(opened_store, store, rollout, run, split, limit)
    found = [call_to_json(call) for call in shown]
    if left_out := known - len(found):
        note(f"the newest {len(found)} of {known} calls, {left_out} left out; --limit 0 lists all")
    if as_json:
        print_json(found)
        return
    rows = [
        {
            "call": call["call_id"],
            "rollout": call["rollout_id"],
            "agent": call["agent_name"],
            "step": call["step_name"],
            "purpose": call["purpose"],
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


def _calls(
    store: "Store",
    target: str,
    rollout: Sequence[str] | None,
    run: str | None,
    split: str | None,
    limit: int,
) -> "tuple[list[ModelCall], int]":
    """The newest calls of the rollouts that fit (of the store, without a filter), and how many there are."""
    from spangrad.adapters.listing import newest_calls

    if rollout or run is not None or split is not None:
        found = rollouts_that_fit(store, target, rollouts=rollout, run=run, split=split)
        if not found:
            return [], 0
        calls, known = newest_calls(store, [one.rollout_id for one in found], limit=limit)
        if not known:
            note(f"no model call was recorded of the {len(found)} rollouts that fit")
        return calls, known
    calls, known = newest_calls(store, limit=limit)
    if not known:
        note(f"no model call is in {target!r}")
    return calls, known


def _rollout_rows(store: "Store", found: "Sequence[Rollout]", authors: Sequence[str]) -> list[dict[str, Any]]:
    from spangrad.adapters.listing import calls_by_rollout, out_of_turns
    from spangrad.credit.rewards import by_rollout, rewards_of

    if not found:
        return []
    ids = [rollout.rollout_id for rollout in found]
    given = by_rollout(store.rewards(ids))
    counts = calls_by_rollout(store, ids)
    held = [rollout.rollout_id for rollout in found if rollout.turn_budget is not None]
    cut = out_of_turns(store, held) if held else set()
    rows: list[dict[str, Any]] = []
    idle: Counter[str] = Counter()
    for rollout in found:
        rewards = given.get(rollout.rollout_id, ())
        outcome = rewards_of(rollout, rewards, (), authors=authors).outcome
        row = _rollout_row(rollout, outcome, counts[rollout.rollout_id])
        rows.append(row | {"out_of_turns": rollout.rollout_id in cut})
        if outcome is None:
            current = [one for one in rewards if one.attempt in (None, rollout.attempt) and not one.call_id]
            idle.update({f"{one.name!r} of author {one.author}" for one in current})
    for what, count in idle.most_common():
        note(
            f"{count} rollouts have a reward {what}, which trains nothing: what counts is {DEFAULT_REWARD!r}"
            f" of {' or '.join(authors)} (--author); `transitions` and `export` take another name, --reward"
        )
    return rows


def _rollout_row(rollout: "Rollout", reward: float | None, calls: int) -> dict[str, Any]:
    return {
        "rollout": rollout.rollout_id,
        "task": rollout.task_id,
        "run": rollout.run_id,
        "split": rollout.split,
        "group": rollout.group_id,
        "status": rollout.status.value,
        "attempt": rollout.attempt,
        "reward": reward,
        "calls": calls,
        "turn_budget": rollout.turn_budget,
        "trained_by_update": rollout.consumed_by,
        "error_type": rollout.error_type,
        "error": rollout.failure,
    }


def _turns(row: dict[str, Any]) -> str | None:
    budget = row["turn_budget"]
    return None if budget is None else f"{budget}, cut off" if row["out_of_turns"] else str(budget)


def _length(values: Sequence[Any] | None) -> int | None:
    return None if values is None else len(values)
