"""The command `spangrad export`: a store's rollouts as a dataset that a trainer reads.

Knows options, which of them go together, and what is told at the end; `dataset_folder.py` writes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spangrad.commands.filters import check_authors
from spangrad.commands.options import (
    DEFAULT_STORE,
    AuthorOption,
    JsonOption,
    KeepUnknownToolsOption,
    KeyOption,
    RewardOption,
    RolloutsOption,
    RunOption,
    SqlOption,
    StoreOption,
    is_hub,
    opened,
    require,
    stop_on_sigterm,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.errors import ConfigError

if TYPE_CHECKING:
    from spangrad.adapters.datasets.card import Card
    from spangrad.commands.transition_files import Credit
    from spangrad.trainer.config import TrainConfig


class ExportFormat(StrEnum):
    """What can be written."""

    TRANSITIONS = "transitions"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    TRL_SFT = "trl-sft"
    TRL_DPO = "trl-dpo"
    TRL_GRPO = "trl-grpo"
    VERL = "verl"
    OTLP = "otlp"
    OTLP_PROTO = "otlp-proto"


class MinGrade(StrEnum):
    """Worst grade that goes out."""

    EXACT = "exact"
    IDS = "ids"
    TEXT = "text"


def export(
    out: Annotated[Path, typer.Argument(help="Folder to write: data files, card.md and card.json.")],
    form: Annotated[ExportFormat, typer.Option("--format", "-f", help="What to write.")],
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    sql: SqlOption = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Only rollouts with at least this reward.")
    ] = None,
    min_grade: Annotated[
        MinGrade | None,
        typer.Option("--min-grade", help="Worst grade of a call; text, for transitions ids, if not given."),
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Only calls of this model.")] = None,
    per_task: Annotated[
        int | None, typer.Option("--per-task", min=1, help="Only so many rollouts of a task, the best.")
    ] = None,
    keep_repeats: Annotated[
        bool, typer.Option("--keep-repeats", help="Keep rollouts of a task that say the same.")
    ] = False,
    heldout: Annotated[
        float, typer.Option("--heldout", min=0.0, help="Share of the tasks to keep apart, by their hash.")
    ] = 0.0,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Config of a run, TOML, or demo.toml of a demo: its reward weights and authors, and for"
            " transitions the grade that its objective needs and, without --clone, its estimators.",
        ),
    ] = None,
    author: AuthorOption = None,
    reward: RewardOption = None,
    clone: Annotated[
        bool, typer.Option("--clone", help="Transitions without rewards: advantage 1 everywhere.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="Of transitions: model folder whose tokenizer token ids are checked against; with --clone,"
            " --min-grade text, or a --config that trains text, it gives calls of text theirs.",
        ),
    ] = None,
    keep_unknown_tools: KeepUnknownToolsOption = False,
    licence: Annotated[
        str | None, typer.Option("--licence", help="Licence of the data, for the card.")
    ] = None,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="Keep rows in which a key or a token was found.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            help="Of transitions: processes that read the store's file with its archive, and credit (Ray).",
        ),
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if an export wrote it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write rollouts as a dataset: for TRL, verl, OpenAI fine-tuning, LLaMA-Factory, or as OTLP.

    OUT gets train.jsonl (or .parquet), with --heldout also heldout.jsonl, and
    a card that says what is in it and what was left out, with reasons. It is
    written whole or not at all; the same command gives the same bytes.

    transitions is Parquet: token ids, masks, behaviour logprobs, advantages;
    with --workers several processes make it out of a long history.
    otlp (JSON lines) and otlp-proto give back the spans and log records as
    they came; only --sql, --rollout and --run choose among them.
    """
    from spangrad.adapters.datasets.formats import FORMATS
    from spangrad.adapters.datasets.selecting import Filters
    from spangrad.adapters.datasets.writing import check_target, whole_folder
    from spangrad.adapters.model_call import Grade
    from spangrad.commands.dataset_folder import TRANSITIONS, Order, write_dataset

    check_target(out, force=force)
    check_authors(author or ())
    known = FORMATS.get(form.value)
    is_rows, drops_repeats = form.value == TRANSITIONS, known is not None and known.drops_repeats
    given = {
        "--clone": clone,
        "--tokenizer": tokenizer,
        "--min-reward": min_reward is not None,
        "--min-grade": min_grade,
        "--policy": policy,
        "--per-task": per_task,
        "--keep-repeats": keep_repeats,
        "--heldout": heldout,
        "--config": config,
        "--author": author,
        "--reward": reward,
        "--keep-secrets": keep_secrets,
    }
    _check_given(form.value, [option for option, value in given.items() if value], drops_repeats)
    if workers > 1:
        _check_workers(form, store)
    settings = None
    if config is not None:
        from spangrad.trainer.config import load_config

        settings = load_config(config, besides=("warm_start",))
        if is_rows and not clone:
            _check_objective(config, settings.learner.objective)
    grade = min_grade or _default_grade(settings, is_text=not is_rows or (clone and tokenizer is not None))
    renders = clone or grade is MinGrade.TEXT
    credit = _credit(
        settings,
        author,
        reward,
        tokenizer,
        clone=clone,
        renders=renders,
        keep_unknown_tools=keep_unknown_tools,
    )
    filters = Filters(
        min_grade=Grade(grade.value),
        min_reward=min_reward,
        policy=policy,
        per_task=per_task,
        drop_repeats=drops_repeats and not keep_repeats,
        heldout=heldout,
    )
    order = Order(form.value, filters, credit, sql, rollout or None, run, keep_secrets, licence)
    if workers > 1:
        from spangrad.commands.parallel_export import Workers

        path = str(Path(store).absolute())
        order = replace(order, workers=Workers(path, workers, filters, credit, keep_secrets))
    with stop_on_sigterm(), opened(store, key) as source, whole_folder(out, force=force) as folder:
        card = write_dataset(folder, source, order)
    _tell(out, card, as_json=as_json)


def _check_workers(form: ExportFormat, store: str) -> None:
    """Refuse --workers where they could do nothing.

    Raises:
        ConfigError: The format or the store is not one for them.
    """
    if form is not ExportFormat.TRANSITIONS:
        raise ConfigError(f"--workers is for transitions only, not for {form.value}")
    if is_hub(store):
        raise ConfigError(
            f"--workers read a store's file, and {store!r} is a hub, one process that has its file alone;"
            " stop the hub and give the file with --store, or leave --workers out"
        )
    require("`spangrad export --workers`", "train")


def _check_given(form: str, given: Sequence[str], drops_repeats: bool) -> None:
    """Refuse options that do nothing in a format.

    Raises:
        ConfigError: Names the first.
    """
    from spangrad.commands.dataset_folder import COPIES, TRANSITIONS

    for option in given:
        if option in ("--clone", "--tokenizer") and form != TRANSITIONS:
            raise ConfigError(f"{option} is for transitions only, not for {form}")
        if form in COPIES:
            raise ConfigError(
                f"{option} has no effect: {form} copies what came in; only --sql, --rollout and --run choose"
                " among it"
            )
        if option == "--keep-repeats" and not drops_repeats:
            raise ConfigError(f"{option} has no effect: {form} keeps them anyway; leave it out")


def _check_objective(config: Path, name: str) -> None:
    """Refuse a config whose rows transitions have no columns for.

    Raises:
        ConfigError: The objective learns from preferences, not from advantages.
    """
    from spangrad.trainer.learning.objectives import OBJECTIVES

    if not OBJECTIVES[name].needs_credit:
        raise ConfigError(
            f"--config {str(config)!r}: learner.objective {name!r} takes no advantages but better and worse"
            " rollouts, for which transitions have no column; `spangrad transitions --config` shows its rows,"
            " --format trl-dpo writes pairs, and --clone --min-reward what is good enough to be cloned"
        )


def _credit(
    settings: "TrainConfig | None",
    author: list[str] | None,
    reward: str | None,
    tokenizer: Path | None,
    *,
    clone: bool,
    renders: bool,
    keep_unknown_tools: bool,
) -> "Credit":
    from spangrad.commands.rendering import KEEPS_WITHOUT_RENDERING, renderer
    from spangrad.commands.transition_files import Credit
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.rewards import DEFAULT_AUTHORS

    authors: Sequence[str] = DEFAULT_AUTHORS
    credit, base_dir = CreditConfig(), "."
    if settings is not None:
        credit, authors = settings.credit, settings.rollout.reward_authors
        base_dir = settings.base_dir
    weights = credit.reward_weights if reward is None else {reward: 1.0}
    if keep_unknown_tools and not (tokenizer and renders):
        raise ConfigError(KEEPS_WITHOUT_RENDERING)
    render = None
    if tokenizer is not None:
        require("`spangrad export --tokenizer`", "train")
        render = renderer(tokenizer, clone=renders, keep_unknown_tools=keep_unknown_tools)
    estimators = None if clone else replace(credit, reward_weights=weights)
    return Credit(estimators, author or authors, weights, render, base_dir, keep_unknown_tools)


def _default_grade(settings: "TrainConfig | None", *, is_text: bool) -> MinGrade:
    if is_text:
        return MinGrade.TEXT
    if settings is None:
        return MinGrade.IDS
    from spangrad.trainer.learning.objectives import OBJECTIVES

    return MinGrade(OBJECTIVES[settings.learner.objective].min_grade)


def _tell(out: Path, card: "Card", *, as_json: bool) -> None:
    told = card.to_json()
    if as_json:
        print_json([told])
        return
    shown = ("split", "file", "rows", "rollouts", "tasks", "calls")
    rows = [{"split": name, **side} for name, side in told["splits"].items()]
    print_rows(shown, [{name: row.get(name) for name in shown} for row in rows], right=shown[2:])
    for heading, unit, name in (("token ids of", "rows", "row_models"), ("altered", "calls", "altered")):
        counts = sum((Counter(side[name]) for side in told["splits"].values()), Counter[str]())
        for what, count in sorted(counts.items()):
            note(f"{heading}, {count} {unit}: {what}")
    for kind, counts in told["refused"].items():
        for reason, count in counts.items():
            note(f"left out, {count} {kind}: {reason}")
    for kind, count in told["secrets_found"].items():
        note(f"secrets: {kind} in {count} rows")
    for text in card.notes:
        note(text)
    note(f"{out}/card.md says what is in it")
