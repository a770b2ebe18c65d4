"""Commands that lead from an update back to its spans, and make it again: `spangrad why`, `spangrad replay`.

Knows what an update keeps. What a replay does: `trainer/replaying.py`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.options import (
    DEFAULT_STORE,
    JsonOption,
    KeyOption,
    RolloutsOption,
    StoreOption,
    opened,
    require,
)
from spangrad.commands.output import cell, note, print_json, print_rows
from spangrad.errors import StoreError

if TYPE_CHECKING:
    from spangrad.adapters.model_call import ModelCall
    from spangrad.credit.rewards import RolloutRewards
    from spangrad.store.base import Store
    from spangrad.store.records import Update, UpdateSample
    from spangrad.trainer.replaying import Check, Replay

UpdateOption = Annotated[int, typer.Option("--update", "-u", min=0, help="Index of the update, from 0.")]
RunOfUpdateOption = Annotated[
    str | None, typer.Option("--run", help="Training run; needed where the store has several.")
]
SAID: Final = 80
"""Characters of a reply that are shown; `spangrad calls --json` has all."""
_SHOWN: Final = 12
"""Numbers of calls that differ, one by one, before the others are only counted."""
_WHY: Final = ("rollout", "call", "advantage", "weight", "tokens", "staleness", "versions", "reward", "said")
_HEAD: Final = (
    "loss/total",
    "grad/norm",
    "data/sampled_tokens",
    "data/trained_tokens",
    "data/dropped_tokens",
)


def why(
    update: UpdateOption,
    run: RunOfUpdateOption = None,
    rollout: RolloutsOption = None,
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the calls that an update trained, down to their spans, with advantage, weight and versions.

    The last line is the update's books: all tokens that were sampled are
    trained, or dropped for a reason. Rewards are those that the update knew.
    `weight` is that of each trained token in the loss, after corrections;
    `versions` are those that sampled the tokens, with how many each.
    """
    with opened(store, key) as asked:
        found = _update(asked, store, update, run)
        samples = _samples(found, rollout)
        rows = _why_rows(asked, found, samples)
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(_WHY, [_brief(row) for row in rows], right=_WHY[2:6])
    if len(samples) < len(found.samples):
        note(f"{len(samples)} of the update's {len(found.samples)} calls; the books are of all")
    if not samples:
        note("the store has none of the calls that it trained: they were deleted, or there were none")
    books, is_balanced = _books(found)
    (note if as_json else print)(books)
    if not is_balanced:
        raise typer.Exit(1)


def replay(
    update: UpdateOption,
    run: RunOfUpdateOption = None,
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Largest distance of equal numbers, as a share; 1e-4 if not given."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda or cuda:N; where the run computed, if not given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make an update again from the store and the checkpoint before it, and compare every number.

    Reads rewards and spans as the update read them, with the config of then;
    changes nothing, and needs neither an engine nor Ray. Exits with 0 if all
    that was recomputed is the same, else with 1. Without the weights before
    the update, credit and the choice of rows are compared alone.
    """
    require("`spangrad replay`", "train")
    from spangrad.trainer.replaying import TOLERANCE
    from spangrad.trainer.replaying import replay as replayed

    if tolerance is not None and not 0 < tolerance < 1:
        raise typer.BadParameter(f"{tolerance!r} is not between 0 and 1", param_hint="--tolerance")
    with opened(store, key) as asked:
        found = replayed(
            asked, _update(asked, store, update, run), tolerance=tolerance or TOLERANCE, device=device
        )
    if as_json:
        print_json(_check_row(check) for check in found.checks)
    else:
        _print_replay(found)
    for line in found.notes:
        note(line)
    if not found.is_same:
        raise typer.Exit(1)


def _update(store: "Store", target: str, index: int, run: str | None) -> "Update":
    rows = store.query(
        "SELECT run_id, max(update_index) AS last, bool_or(update_index = ?) AS is_there FROM updates"
        " GROUP BY run_id ORDER BY run_id",
        [index],
    )
    runs = {row["run_id"]: row for row in rows}
    if not runs:
        raise StoreError(f"{target!r} has no update of any run; `spangrad train` makes them")
    if run is None and len(runs) > 1:
        raise StoreError(f"{target!r} has updates of {len(runs)} runs; name one: {', '.join(runs)} (--run)")
    name = next(iter(runs)) if run is None else run
    if name not in runs:
        raise StoreError(f"{target!r} has no update of run {name!r}; it has some of {', '.join(runs)}")
    if not runs[name]["is_there"]:
        raise StoreError(f"run {name!r} has no update {index}; its last one is {runs[name]['last']}")
    return store.updates(name, update_index=index)[0]


def _samples(update: "Update", rollouts: Sequence[str] | None) -> "list[UpdateSample]":
    for name in rollouts or ():
        if name not in update.rollout_ids:
            raise StoreError(
                f"update {update.update_index} of run {update.run_id!r} consumed no rollout {name!r};"
                " `spangrad rollouts` says which update consumed one"
            )
    return [one for one in update.samples if not rollouts or one.rollout_id in rollouts]


def _why_rows(store: "Store", update: "Update", samples: "Sequence[UpdateSample]") -> list[dict[str, Any]]:
    """One row a sample; what the store no longer has of it is None."""
    from spangrad.adapters.calls import calls_of
    from spangrad.credit.reads import as_read

    ids = list(dict.fromkeys(sample.rollout_id for sample in samples))
    then = as_read(store, update.reads) if update.reads else store
    calls = calls_of(then, ids) if ids else []
    rewards = _rewards(then, update, ids, calls) if ids else {}
    known = {call.call_id: call for call in calls}
    rows = []
    for sample in samples:
        trace_id, _, span_id = sample.call_id.partition("-")
        rewarded, call = rewards.get(sample.rollout_id), known.get(sample.call_id)
        rows.append(
            {
                "run": update.run_id,
                "update": update.update_index,
                "rollout": sample.rollout_id,
                "attempt": sample.attempt,
                "call": sample.call_id,
                "trace_id": trace_id,
                "span_id": span_id,
                "agent": None if call is None else call.agent_name,
                "step": None if call is None else call.step_name,
                "advantage": sample.advantage,
                "weight": sample.loss_weight,
                "tokens": sample.trained_tokens,
                "policy_version": sample.policy_version,
                "staleness": sample.staleness,
                "versions": _versions(call),
                "reward": None if rewarded is None else rewarded.outcome,
                "step_reward": None if rewarded is None else rewarded.steps.get(sample.call_id),
                "said": None if call is None else _said(call),
            }
        )
    return rows


def _rewards(
    store: "Store", update: "Update", ids: Sequence[str], calls: "Sequence[ModelCall]"
) -> "dict[str, RolloutRewards]":
    """What each rollout had got when it was trained, as the config of then counted it."""
    from spangrad.credit.rewards import DEFAULT_AUTHORS, by_rollout, rewards_of

    config = update.config or {}
    authors = config.get("rollout", {}).get("reward_authors", DEFAULT_AUTHORS)
    weights = config.get("credit", {}).get("reward_weights")
    given = by_rollout(store.rewards(ids))
    return {
        rollout.rollout_id: rewards_of(
            rollout,
            given.get(rollout.rollout_id, ()),
            [call for call in calls if call.rollout_id == rollout.rollout_id],
            authors=authors,
            weights=weights,
        )
        for rollout in store.rollouts(rollout_ids=ids)
    }


def _versions(call: "ModelCall | None") -> list[dict[str, int]] | None:
    """Versions that sampled the call's tokens, in their order; None: nobody told."""
    if call is None:
        return None
    found = Counter(version for choice in call.choices for version in choice.policy_versions or ())
    return [{"version": version, "tokens": count} for version, count in found.items()] or None


def _said(call: "ModelCall") -> str:
    said = []
    for message in (choice.message for choice in call.choices):
        parts = [str(message.get("content") or "")]
        for made in message.get("tool_calls") or ():
            function = made.get("function", {})
            parts.append(f"{function.get('name')}({function.get('arguments')})")
        said.append(" ".join(part for part in parts if part) or str(message.get("reasoning") or ""))
    text = " ".join(" | ".join(said).split())
    return text if len(text) <= SAID else f"{text[: SAID - 1]}…"


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    versions = row["versions"] or ()
    told = ", ".join(f"{one['version']} ({one['tokens']})" for one in versions)
    return {**row, "versions": told or row["policy_version"]}


def _books(update: "Update") -> tuple[str, bool]:
    """The update in one line, and whether its tokens add up."""
    numbers = {name: int(value) for name, value in update.metrics.items() if _is_of_books(name)}
    trained = sum(sample.trained_tokens for sample in update.samples)
    what = (
        f"update {update.update_index} of run {update.run_id!r}, to version {update.policy_version}:"
        f" {len(update.rollout_ids)} rollouts, {len(update.samples)} calls, "
    )
    if "data/sampled_tokens" not in numbers or "data/trained_tokens" not in numbers:
        return f"{what}{trained} tokens trained; an older spangrad kept no books of it", True
    sampled, booked = numbers.pop("data/sampled_tokens"), numbers.pop("data/trained_tokens")
    dropped = sum(numbers.values())
    reasons = [
        f"{count} {name.removeprefix('dropped/').replace('_', ' ')}" for name, count in numbers.items()
    ]
    told = f"{sampled} tokens sampled = {booked} trained + {dropped} dropped"
    if reasons:
        told += f" ({', '.join(sorted(reasons))})"
    if sampled == booked + dropped and booked == trained:
        return what + told, True
    return f"{what}THE BOOKS DO NOT BALANCE: {told}, and the calls add up to {trained} trained", False


def _is_of_books(name: str) -> bool:
    return name in ("data/sampled_tokens", "data/trained_tokens") or name.startswith("dropped/")


def _check_row(check: "Check") -> dict[str, Any]:
    return {
        "what": check.what,
        "rollout": check.rollout,
        "call": check.call,
        "recorded": check.recorded,
        "replayed": check.replayed,
        "same": check.is_same,
    }


def _print_replay(found: "Replay") -> None:
    """What matters most, what of each call is the same, and whatever differs."""
    rows = [_check_row(check) for check in found.checks if check.what in _HEAD]
    others = [check for check in found.checks if check.what not in _HEAD]
    per_call = [check for check in others if check.call is not None]
    for name in dict.fromkeys(check.what for check in per_call):
        mine = [check for check in per_call if check.what == name]
        same = sum(check.is_same for check in mine)
        told = f"{same} of {len(mine)} the same"
        rows.append({"what": f"{name} of calls", "replayed": told, "same": same == len(mine)})
    alone = [check for check in others if check.call is None]
    same = sum(check.is_same for check in alone)
    rows.append(
        {"what": "other numbers", "replayed": f"{same} of {len(alone)} the same", "same": same == len(alone)}
    )
    differing = [check for check in others if not check.is_same]
    rows += [_check_row(check) for check in differing[:_SHOWN]]
    columns = ("what", "recorded", "replayed", "same", "call")
    shown = [row | {"same": "yes" if row["same"] else "NO"} for row in rows]
    for row in shown:
        row |= {name: _exactly(row.get(name)) for name in ("recorded", "replayed")}
    print_rows(columns, shown, right=columns[1:3])
    if len(differing) > _SHOWN:
        note(f"{len(differing) - _SHOWN} more differ; --json lists all")
    update = found.update
    what = f"update {update.update_index} of run {update.run_id!r}"
    if not found.is_same:
        print(f"{what} is not what the store and its config make of it")
    elif found.has_loss:
        print(f"{what} was made again: all {len(found.checks)} numbers are the same")
    else:
        print(f"{what}: the {len(found.checks)} numbers that could be made again are the same; no loss was")


def _exactly(value: Any) -> str | None:
    """A number with the digits that tell two float32 apart."""
    return f"{value:.9g}" if isinstance(value, float) else None if value is None else cell(value)
