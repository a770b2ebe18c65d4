"""The command `spangrad credit compare`: estimators side by side on stored rollouts.

Knows options and what is told; `credit.compare` computes, `comparison_page.py` writes the page.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.critic_option import CheckpointOption, critic_of
from spangrad.commands.filters import check_authors, rollouts_named_by, rollouts_that_fit, trained_on
from spangrad.commands.options import (
    DEFAULT_STORE,
    AuthorOption,
    JsonOption,
    KeyOption,
    RewardOption,
    RolloutsOption,
    RunOption,
    SqlOption,
    StoreOption,
    opened,
    other_names,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.errors import ConfigError, CreditError

if TYPE_CHECKING:
    from spangrad.credit.compare import Comparison
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.transitions import Refused
    from spangrad.store.base import Store
    from spangrad.store.records import Rollout

DEFAULT_ESTIMATORS: Final = "grpo,rloo,grpo+gigpo,leave_one_out_to_go"
_SHOWN: Final = 10

app = typer.Typer(no_args_is_help=True, help="Look at credit assignment without training.")


def compare(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    estimators: Annotated[
        str,
        typer.Option(
            "--estimators",
            "-e",
            help="Separated by commas: a term, or episode+step, with settings behind colons:"
            " grpo, grpo:scale_by_std=false, rloo+gigpo:gamma=1. What needs scores of states is told where"
            " they come from: turn_credit:scores=reward:NAME, turn_credit:scores=file.py:name.",
        ),
    ] = DEFAULT_ESTIMATORS,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Only this split: train, recorded, ...")
    ] = None,
    sql: SqlOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Config of a run: its own estimator is compared, too, and its credit settings and reward"
            " authors hold where they apply.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    author: AuthorOption = None,
    reward: RewardOption = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=0, help=f"Groups and steps in a table; {_SHOWN} if not given, 0: all."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that needs no network to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give the same stored rollouts to several estimators and show where they differ.

    Needs no model, but for what asks a critic: gae and value_baseline take
    values from --checkpoint of the run in --config.

    Terms for episodes: grpo, rloo, maxrl, opo, reinforce_pp_baseline,
    best_of_group, ...; for steps: gigpo, hgpo, leave_one_out_to_go, ... A wrong
    name lists all. `gigpo` alone is its step term, grpo+gigpo the method.

    informative: groups that get any credit, beside what 1 - p^G - (1-p)^G
    predicts if all tasks were equally hard. noise: standard error that an
    advantage has from who else is in its group, of its size; lower is
    steadier. effective steps: how many would weigh the same. Whole groups are
    compared, of rollouts that succeeded.
    """
    from spangrad.adapters.report import other_rewards
    from spangrad.credit.compare import Entry
    from spangrad.credit.compare import compare as compared
    from spangrad.credit.critic import valued_calls
    from spangrad.credit.pipeline import ended_with_calls, trajectories_of
    from spangrad.credit.rewards import DEFAULT_AUTHORS

    check_authors(author or ())
    if as_json and limit is not None:
        raise ConfigError("--limit is about tables, and --json has everything; leave one out")
    if html is not None:
        from spangrad.commands.comparison_page import check_place

        check_place(html)
    configs, authors, base_dir = _configs(estimators, config, reward)
    critic = critic_of(checkpoint, config, configs.values())
    names = sorted({name for credit in configs.values() for name in credit.reward_weights})
    refused: list[Refused] = []
    with opened(store, key) as opened_store:
        wanted = rollouts_that_fit(opened_store, store, rollouts=rollout, run=run, split=split)
        if sql is not None:
            named = rollouts_named_by(opened_store, sql)
            wanted = [one for one in wanted if one.rollout_id in named]
        if not (rollout or split):
            wanted = trained_on(wanted, clone=False)
        ended, calls = ended_with_calls(opened_store, _whole_groups(opened_store, wanted), refused)
        entries: dict[str, Entry] = {}
        for name, credit in configs.items():
            trajectories = trajectories_of(
                opened_store,
                ended,
                calls,
                credit,
                authors=author or authors or DEFAULT_AUTHORS,
                base_dir=base_dir,
            )
            if critic is not None and credit.needs_values:
                trajectories = valued_calls(trajectories, calls, critic)
            entries[name] = (credit, trajectories)
        others = other_rewards(opened_store, *names)
    for reason, count in Counter(one.counted_as for one in refused).most_common():
        note(f"left out, {count}x: {reason}")
    if others:
        note(other_names(names, others))
    if critic is None and any(credit.needs_values for credit in configs.values()):
        note("values of states are a run's critic's: --config and --checkpoint of one name it")
    found = compared(entries)
    if not found.steps:
        raise CreditError(_nothing(found, wanted, names))
    _tell_lone(ended)
    if html is not None:
        from spangrad.commands.comparison_page import write_page

        write_page(html, found, store)
    if as_json:
        print_json([found.to_json()])
    else:
        _show(found, _SHOWN if limit is None else limit)
    if html is not None:
        note(f"page written to {html}")


app.command(
    "compare",
    epilog="Example: spangrad credit compare -e grpo,grpo+gigpo,rloo+leave_one_out_to_go --html credit.html",
)(compare)


def _configs(
    estimators: str, config: Path | None, reward: str | None
) -> "tuple[dict[str, CreditConfig], Sequence[str] | None, str]":
    """Name -> estimator, whose rewards count (None: not said), and where paths in the estimators start from.

    Raises:
        ConfigError: An estimator is unknown, or there are none.

    A config whose objective needs no advantages has no estimator of its own: that is said.
    """
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.spelling import parsed, spelled

    found: dict[str, CreditConfig] = {}
    base: dict[str, Any] = {}
    authors: Sequence[str] | None = None
    base_dir = "."
    if config is not None:
        from spangrad.trainer.config import load_config
        from spangrad.trainer.learning.objectives import OBJECTIVES

        settings = load_config(config, besides=("warm_start",))
        authors, base_dir = settings.rollout.reward_authors, settings.base_dir
        objective = settings.learner.objective
        if OBJECTIVES[objective].needs_credit:
            found[spelled(settings.credit)] = settings.credit
        else:
            what = "preferences" if OBJECTIVES[objective].compares_sequences else "good rollouts"
            note(
                f"objective {objective!r} of {str(config)!r} learns from {what} and needs no advantages, so"
                " none of its own are compared; `spangrad transitions --config` shows what it trains"
            )
        base = {one.name: getattr(settings.credit, one.name) for one in fields(CreditConfig)}
    typed: dict[str, CreditConfig] = {}
    for text in filter(None, re.split(r"[,\s]+", estimators.strip().strip(","))):
        one = parsed(text, base)
        if spelled(one) in typed:
            note(f"--estimators has {spelled(one)!r} twice; it is compared once")
        typed[spelled(one)] = one
    found |= typed
    if reward is not None:
        found = {name: replace(one, reward_weights={reward: 1.0}) for name, one in found.items()}
    if not found:
        raise ConfigError(f"--estimators names none; for example {DEFAULT_ESTIMATORS}")
    return found, authors, base_dir


def _whole_groups(store: "Store", wanted: "Sequence[Rollout]") -> "list[Rollout]":
    """These rollouts, and the others of their groups."""
    groups = sorted({one.group_id for one in wanted if one.group_id is not None})
    members = {one.rollout_id: one for one in wanted}
    if groups:
        members |= {one.rollout_id: one for one in store.rollouts(group_ids=groups)}
    return list(members.values())


def _nothing(found: "Comparison", wanted: "Sequence[Rollout]", rewards: Sequence[str]) -> str:
    rollouts = sum(one.rollouts for one in found.groups)
    if not wanted or not rollouts:
        return "there is nothing to compare: no rollout that succeeded fits; `spangrad rollouts` lists all"
    if not any(one.returns for one in found.groups):
        told = " and ".join(map(repr, rewards))
        return (
            f"there is nothing to compare: none of {rollouts} rollouts has a reward {told} of an author"
            " that counts; `spangrad score` gives rewards, --reward and --author take others"
        )
    return (
        f"there is nothing to compare: no scored one of {rollouts} rollouts has a call of the trained policy;"
        " `spangrad calls` says what each may train"
    )


def _tell_lone(ended: "Sequence[Rollout]") -> None:
    if lone := sum(one.group_id is None for one in ended):
        note(
            f"{lone} of {len(ended)} rollouts name no group, so there is nobody to compare them with;"
            " rollouts of one task share a group_id when they are enqueued"
        )


def _show(found: "Comparison", limit: int) -> None:
    from spangrad.commands.comparison_page import COLUMNS, estimator_rows, wasted_rows

    columns = tuple(COLUMNS)
    print_rows(columns, estimator_rows(found), right=columns[1:])
    for one in found.estimators:
        if one.refused is not None:
            note(f"{one.name} can't take this batch: {one.refused}")
    names = list(found.rank_correlation)
    if len(names) > 1:
        print("\nRank correlation of advantages")
        rows = [{"": name, **found.rank_correlation[name]} for name in names]
        print_rows(("", *names), rows, right=names, names=names)
    wasted = wasted_rows(found)
    if wasted:
        print(f"\nWasted groups ({len(wasted)} of {len(found.groups)})")
        shown = wasted[:limit] if limit else wasted
        print_rows(("group", "rollouts", "returns", "why", "on"), shown, right=("rollouts",))
        _tell_more(len(wasted), len(shown), "wasted groups")
    apart = found.disagreements()
    if apart:
        print("\nAdvantages, where the ranks are farthest apart first")
        steps = apart[:limit] if limit else apart
        listed = [
            {"rollout": step.rollout_id, "step": step.step_index, "return": step.return_, **step.advantages}
            for _, step in steps
        ]
        columns = ("rollout", "step", "return", *names)
        print_rows(columns, listed, right=columns[1:], names=names)
        _tell_more(len(apart), len(steps), "steps")


def _tell_more(there: int, shown: int, what: str) -> None:
    if shown < there:
        note(f"{shown} of {there} {what}; --limit 0 shows all")
