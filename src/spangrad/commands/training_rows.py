"""The command `spangrad transitions`: training rows of stored rollouts, and why others are none."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.critic_option import CheckpointOption, critic_of
from spangrad.commands.filters import check_authors, is_measured, rollouts_that_fit, trained_on
from spangrad.commands.options import (
    DEFAULT_STORE,
    AuthorOption,
    JsonOption,
    KeepUnknownToolsOption,
    KeyOption,
    RewardOption,
    RolloutsOption,
    RunOption,
    SplitOption,
    StoreOption,
    opened,
    other_names,
    require,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.commands.rendering import KEEPS_WITHOUT_RENDERING, mixed_ids, renderer
from spangrad.errors import ConfigError

if TYPE_CHECKING:
    from spangrad.adapters.model_call import ModelCall
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.pipeline import CreditedBatch
    from spangrad.credit.rendered import Render
    from spangrad.credit.transition import Transition
    from spangrad.store.base import Store
    from spangrad.store.records import Rollout
    from spangrad.trainer.row_settings import RowSettings


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
            help="Config of a run, or demo.toml of a demo: its objective, estimators, reward authors, grade"
            " and weights; without, GRPO.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    author: AuthorOption = None,
    reward: RewardOption = None,
    min_grade: Annotated[
        str | None,
        typer.Option(
            "--min-grade",
            help="Worst grade to train: exact, ids (default; text with --clone and --tokenizer) or text; with"
            " --config, as its objective needs.",
        ),
    ] = None,
    clone: Annotated[
        bool,
        typer.Option(
            "--clone",
            help="Without rewards: advantage 1 everywhere, as cloning has it. What a run clones (objective"
            " bc), --config shows.",
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="Model folder whose tokenizer token ids are checked against; with --clone, --min-grade text,"
            " or a --config that trains text, its chat template gives calls of grade text theirs.",
        ),
    ] = None,
    keep_unknown_tools: KeepUnknownToolsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the training rows of rollouts: token ids, action mask, advantages, loss weight, segments.

    Without --split or --rollout, of rollouts that a trainer learns from: split
    train, with --clone expert; in a store without any, all but evaluations.
    Advantages compare a rollout with its whole group, and weights are those
    in the update that trained on it, also where only one rollout is asked for.
    The action mask is true exactly where the policy
    sampled the token. What is not trained is counted with its reason.
    """
    from spangrad.adapters.report import other_rewards
    from spangrad.credit import row_to_json
    from spangrad.credit.pipeline import credited_rows
    from spangrad.credit.rendered import models_of_row

    check_authors(author or ())
    if clone:
        _check_clone(config=config, checkpoint=checkpoint, author=author, reward=reward)
    settings = _settings(config, clone=clone, reward=reward)
    if author:
        settings["authors"] = author
    if min_grade is not None:
        settings["min_grade"] = min_grade
    elif clone and tokenizer is not None:
        settings["min_grade"] = "text"
    renders = clone or settings["min_grade"] == "text"
    render = _render(tokenizer, renders=renders, keep_unknown_tools=keep_unknown_tools)
    weights = settings["reward_weights"] or {}
    credit = settings["config"]
    critic = critic_of(checkpoint, config, () if credit is None else (credit,))
    if critic is None and credit is not None and credit.needs_values:
        raise ConfigError(
            f"credit.episode {credit.episode!r} with credit.step {credit.step!r} needs values of states,"
            " which a run's critic gives: name a checkpoint of it with --checkpoint"
        )
    with opened(store, key) as opened_store:
        wanted = rollouts_that_fit(opened_store, store, rollouts=rollout, run=run, split=split)
        if not (rollout or split):
            wanted = trained_on(wanted, clone=clone)
        compared = [wanted] if clone else _with_groups(opened_store, wanted)
        batches = [
            credited_rows(opened_store, part, render=render, critic=critic, **settings) for part in compared
        ]
        others = {} if clone else other_rewards(opened_store, *weights)
    every = [row for one in batches for row in one.rows]
    splits = {found.rollout_id: found.split for found in wanted}
    shown = [row for row in every if row.rollout_id in splits]
    calls = {call.call_id: call for one in batches for call in one.calls}
    rows = [
        {
            "split": splits[row.rollout_id],
            "model": ", ".join(models_of_row(row, calls)),
            **row_to_json(row),
            **({"preferences": [asdict(one) for one in row.preferences]} if row.preferences else {}),
        }
        for row in shown
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(_TRANSITION_COLUMNS, [_summary(row) for row in rows], right=_TRANSITION_COLUMNS[2:-2])
    _tell_shaping(batches)
    _tell_baselines(batches, compared, credit)
    _tell_ids(batches, shown, calls, is_checked=render is not None)
    _tell_measured([found for found in wanted if is_measured(found)])
    _tell_preferences(shown)
    _tell_refused(batches, splits, render, renders=renders)
    if others:
        note(other_names(weights, others))


_REASONS_SHOWN: Final = 10
_TRANSITION_COLUMNS: Final = (
    "rollout",
    "split",
    "attempt",
    "tokens",
    "trained",
    "calls",
    "advantage",
    "loss_weight",
    "grade",
    "model",
)


def _check_clone(**given: object) -> None:
    """Refuse options that say how rollouts are compared where nothing is.

    Raises:
        ConfigError: Names one.
    """
    if named := [f"--{name}" for name, value in given.items() if value]:
        raise ConfigError(
            f"{named[0]} has no effect with --clone, which needs no rewards and compares nothing; leave one"
            " out (--config alone shows what a run with learner.objective 'bc' clones)"
        )


def _render(tokenizer: Path | None, *, renders: bool, keep_unknown_tools: bool) -> "Render | None":
    if keep_unknown_tools and not (tokenizer and renders):
        raise ConfigError(KEEPS_WITHOUT_RENDERING)
    if tokenizer is None:
        return None
    require("`spangrad transitions --tokenizer`", "train")
    return renderer(tokenizer, clone=renders, keep_unknown_tools=keep_unknown_tools)


def _tell_measured(measured: "Sequence[Rollout]") -> None:
    if measured:
        splits = ", ".join(sorted({rollout.split for rollout in measured}))
        note(
            f"no update trains on these {len(measured)} rollouts of split {splits}, which only measure:"
            " advantage and loss weight are what they would be"
        )


def _tell_preferences(rows: "Sequence[Transition]") -> None:
    """Say of what kind the rows of a preference loss are: each row says it with --json."""
    judged = {(row.rollout_id, one.id, one.is_good) for row in rows for one in row.preferences}
    if judged:
        good = sum(is_good for _, _, is_good in judged)
        note(f"the objective compares: {good} good and {len(judged) - good} bad (--json: preferences)")


def _tell_shaping(batches: "Sequence[CreditedBatch]") -> None:
    failed = [one.diagnostics for one in batches if one.diagnostics.get("shaping/passes") == 0]
    if failed:
        gain = max(found["shaping/farming_gain"] for found in failed)
        note(
            f"going in a circle earned up to {gain:.3g} from what credit.shaping adds: it is a new objective,"
            " and one that an agent can farm"
        )


def _tell_baselines(
    batches: "Sequence[CreditedBatch]",
    compared: "Sequence[Sequence[Rollout]]",
    credit: "CreditConfig | None",
) -> None:
    from spangrad.credit.history import nothing_before

    for batch, rollouts in zip(batches, compared, strict=True):
        if credit is not None and (alone := nothing_before(batch.diagnostics, rollouts, credit)) is not None:
            note(alone)


def _tell_ids(
    batches: "Sequence[CreditedBatch]",
    rows: "Sequence[Transition]",
    calls: "Mapping[str, ModelCall]",
    *,
    is_checked: bool,
) -> None:
    """Say whose token ids the rows hold, and what rendering altered."""
    from spangrad.credit.rendered import row_models

    if (warning := mixed_ids(row_models(rows, calls), is_checked=is_checked)) is not None:
        note(warning)
    altered = sum((Counter(batch.notes) for batch in batches), Counter[str]())
    for kind, count in sorted(altered.items()):
        note(f"rendered, {count}x: {kind}")


def _tell_refused(
    batches: "Sequence[CreditedBatch]", ids: Collection[str], render: "Render | None", *, renders: bool
) -> None:
    """Say what is not trained, and what would make rows of calls that are only text."""
    from spangrad.adapters.grading import TOOLS_UNKNOWN
    from spangrad.adapters.model_call import Grade
    from spangrad.credit.transitions import MISSING_REWARD

    refused = [one for batch in batches for one in batch.refused if one.rollout_id in ids]
    told: dict[str, set[str]] = {}
    for one in refused:
        told.setdefault(one.counted_as, set()).add(one.reason)
    reasons = Counter(one.counted_as for one in refused).most_common()
    for reason, count in reasons[:_REASONS_SHOWN]:
        note(f"not trained, {count}x: {min(told[reason]) if len(told[reason]) == 1 else reason}")
    if others := reasons[_REASONS_SHOWN:]:
        note(f"not trained, {sum(count for _, count in others)}x: {len(others)} other reasons")
    if refused and all(one.counted_as == MISSING_REWARD for one in refused):
        note(
            "--clone needs no rewards: `spangrad transitions --clone` shows what behaviour cloning trains on;"
            " `spangrad score` gives rewards"
        )
    if any(one.counted_as.endswith(TOOLS_UNKNOWN) for one in refused):
        note("--keep-unknown-tools renders such calls without their tools: another prompt than the model saw")
    names = {one.call_id for one in refused}
    read = [call for batch in batches for call in batch.calls if call.call_id in names]
    texts = sum(call.grade is Grade.TEXT for call in read)
    if texts and render is None:
        note(
            f"{texts} calls have no token ids, and only a tokenizer can make rows of them:"
            f" {'' if renders else '--clone '}--tokenizer MODEL_FOLDER renders them with the chat template in"
            " that folder"
        )


def _settings(config: Path | None, *, clone: bool, reward: str | None) -> "RowSettings":
    """As a run with this config has them, but for what other options ask for."""
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.rewards import DEFAULT_AUTHORS, DEFAULT_WEIGHTS

    settings: RowSettings = {
        "config": CreditConfig(),
        "min_grade": "ids",
        "reward_weights": DEFAULT_WEIGHTS,
        "authors": DEFAULT_AUTHORS,
        "aggregation": "rollout-token-mean",
        "constant": None,
        "target": "actions",
        "prefer": None,
        "base_dir": ".",
    }
    if config is not None:
        from spangrad.trainer.config import load_config
        from spangrad.trainer.row_settings import row_settings

        settings = row_settings(load_config(config, besides=("warm_start",)))
    if clone:
        settings["config"] = None
    if reward is not None:
        settings["reward_weights"] = {reward: 1.0}
    return settings


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    trained = [a for a, sampled in zip(row["advantages"], row["action_mask"], strict=True) if sampled]
    return {
        "rollout": row["rollout_id"],
        "split": row["split"],
        "attempt": row["attempt"],
        "tokens": len(row["token_ids"]),
        "trained": len(trained),
        "calls": len(row["segments"]),
        "advantage": sum(trained) / len(trained) if trained else None,
        "loss_weight": row["loss_weight"],
        "grade": row["grade"],
        "model": row["model"],
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
