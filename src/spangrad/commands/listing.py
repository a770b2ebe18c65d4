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
    require,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.commands.traces import calls_without_rollout, clone_traces, renderer
from spangrad.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from spangrad.adapters.model_call import ModelCall
    from spangrad.credit.pipeline import CreditedBatch, Render
    from spangrad.store.base import Store
    from spangrad.store.records import Reward, Rollout
    from spangrad.trainer.config import TrainConfig

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
        every = _calls(opened_store, rollout, run, split)
    found = [call_to_json(call) for call in (every[-limit:] if limit else every)]
    if left_out := len(every) - len(found):
        note(f"the newest {len(found)} of {len(every)} calls, {left_out} left out; --limit 0 lists all")
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


def transitions(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: SplitOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Config of a run, TOML: its estimators, reward authors, grade and weights; without, GRPO.",
        ),
    ] = None,
    author: Annotated[
        list[str] | None,
        typer.Option("--author", help="Whose rewards count: evaluator, operator, agent; several times."),
    ] = None,
    min_grade: Annotated[
        str | None,
        typer.Option("--min-grade", help="Worst grade to train: exact (as a run does) or ids (default)."),
    ] = None,
    clone: Annotated[
        bool, typer.Option("--clone", help="Without rewards: advantage 1 everywhere, as cloning has it.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="With --clone: model folder whose chat template gives calls of grade text their token ids.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the training rows of rollouts: token ids, action mask, advantages, loss weight, segments.

    Advantages compare a rollout with its whole group, and weights are those
    in the update that trained on it, also where only one rollout is asked for.
    The action mask is true exactly where the policy
    sampled the token. What is not trained is counted with its reason. Calls
    that name no rollout, such as ingested ones, can be cloned: with --clone,
    each of their traces counts as a rollout, if no rollouts are asked for.
    """
    from spangrad.credit import row_to_json
    from spangrad.credit.assign import CreditConfig
    from spangrad.credit.pipeline import credited_rows
    from spangrad.credit.rewards import DEFAULT_AUTHORS
    from spangrad.credit.transitions import weigh

    render = _render(tokenizer, clone=clone)
    settings = None if config is None else _settings(config)
    grade = "text" if render is not None else min_grade or ("ids" if settings is None else "exact")
    with opened(store, key) as opened_store:
        wanted = opened_store.rollouts(rollout_ids=rollout, run_id=run, split=split)
        stray: list[ModelCall] = []
        if not (rollout or run or split) and (clone or not wanted):
            stray = calls_without_rollout(opened_store)
        if not wanted and not (stray and clone):
            raise StoreError(_nothing_to_show(store, stray))
        credit = CreditConfig() if settings is None else settings.credit
        authors = DEFAULT_AUTHORS if settings is None else settings.rollout.reward_authors
        compared = [wanted] if clone else _with_groups(opened_store, wanted)
        batches = [
            credited_rows(
                opened_store,
                part,
                None if clone else credit,
                min_grade=grade,
                authors=author or authors,
                aggregation="rollout-token-mean" if settings is None else settings.rollout.aggregation,
                render=render,
            )
            for part in compared
        ]
        if stray:
            batches.append(clone_traces(opened_store, stray, min_grade=grade, render=render))
    every = [row for one in batches for row in one.rows]
    if stray:
        every = weigh(every)
    ids = {found.rollout_id for found in wanted} | {call.trace_id for call in stray}
    rows = [row_to_json(row) for row in every if row.rollout_id in ids]
    if as_json:
        print_json(rows)
    else:
        print_rows(_TRANSITION_COLUMNS, [_summary(row) for row in rows], right=_TRANSITION_COLUMNS[1:-1])
    _tell_refused(batches, ids, render)


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


def _calls(
    store: "Store", rollout: Sequence[str] | None, run: str | None, split: str | None
) -> "list[ModelCall]":
    """Calls of the rollouts that fit, oldest first; without a filter, all calls of the store."""
    from spangrad.adapters.calls import calls_of

    wanted = rollout
    if run is not None or split is not None:
        found = store.rollouts(rollout_ids=rollout, run_id=run, split=split)
        wanted = [one.rollout_id for one in found]
        if not wanted:
            return []
    return calls_of(store, wanted)


def _render(tokenizer: Path | None, *, clone: bool) -> "Render | None":
    if tokenizer is None:
        return None
    if not clone:
        raise ConfigError("--tokenizer is for --clone only: calls without the engine's ids can't be credited")
    require("`spangrad transitions --tokenizer`", "train")
    return renderer(tokenizer)


def _nothing_to_show(store: str, stray: "Sequence[ModelCall]") -> str:
    if stray:
        return (
            f"{len(stray)} model calls in {store!r} belong to no rollout and have no reward;"
            " `spangrad transitions --clone` takes each of their traces as a rollout"
        )
    return f"no such rollout in {store!r}; `spangrad rollouts` lists what is there"


def _tell_refused(batches: "Sequence[CreditedBatch]", ids: set[str], render: "Render | None") -> None:
    """Say what is not trained, and what would make rows of calls that are only text."""
    from spangrad.adapters.model_call import Grade

    refused = [one for batch in batches for one in batch.refused if one.rollout_id in ids]
    for reason, count in Counter(one.reason for one in refused).most_common():
        note(f"not trained, {count}x: {reason}")
    names = {one.call_id for one in refused}
    read = [call for batch in batches for call in batch.calls if call.call_id in names]
    texts = sum(call.grade is Grade.TEXT for call in read)
    if texts and render is None:
        note(
            f"{texts} calls have no token ids, and only a tokenizer can make rows of them:"
            " --clone --tokenizer MODEL_FOLDER renders them with the chat template in that folder"
        )


def _settings(config: Path) -> "TrainConfig":
    from spangrad.trainer.config import load_config

    return load_config(config)


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


def _with_groups(store: "Store", wanted: "Sequence[Rollout]") -> "list[list[Rollout]]":
    """These rollouts with all others of their groups and updates: a batch an update, one for the rest."""
    groups = sorted({found.group_id for found in wanted if found.group_id is not None})
    members = {found.rollout_id: found for found in wanted}
    members |= {found.rollout_id: found for found in (store.rollouts(group_ids=groups) if groups else ())}
    updates = {(found.run_id, found.consumed_by) for found in wanted if found.consumed_by is not None}
    for run_id in sorted({str(run_id) for run_id, _ in updates}):
        of_run = store.rollouts(run_id=run_id)
        members |= {found.rollout_id: found for found in of_run if (run_id, found.consumed_by) in updates}
    batches: dict[tuple[str | None, int | None], list[Rollout]] = {}
    for found in members.values():
        key = (None, None) if found.consumed_by is None else (found.run_id, found.consumed_by)
        batches.setdefault(key, []).append(found)
    return list(batches.values())


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
