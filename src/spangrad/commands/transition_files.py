"""The format `transitions` of `spangrad export`: credited rows as Parquet.

Knows how credit's rows become columns, and that a rollout is compared with its whole group, also with what
is left out. Knows no command line.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from spangrad.adapters.datasets.card import Side
from spangrad.adapters.datasets.conversation import Exported
from spangrad.adapters.datasets.export import HAS_SECRET
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.datasets.selecting import (
    Chosen,
    Filters,
    Outcomes,
    Progress,
    Refused,
    Selection,
    usable_calls,
)
from spangrad.adapters.datasets.tables import TRANSITIONS
from spangrad.adapters.datasets.writing import write_parquet
from spangrad.adapters.model_call import ModelCall
from spangrad.credit.aggregation import weigh
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.pipeline import credited_rows
from spangrad.credit.rendered import Render, row_models
from spangrad.credit.rewards import by_rollout, total_reward
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import row_to_json
from spangrad.store.base import Store
from spangrad.store.records import Rollout

ROLLOUTS_AT_ONCE: Final = 100
MIXED: Final = "it trains replies of another model, too"


@dataclass(frozen=True, slots=True)
class Credit:
    """How transitions get their numbers."""

    config: CreditConfig | None
    """None: no rewards are needed, every reply has advantage 1."""
    authors: Sequence[str]
    """Whose rewards count."""
    weights: Mapping[str, float]
    """Rewards that count, by name, with their weights."""
    render: Render | None = None
    """Gives calls of grade text their ids, and checks those of others."""
    base_dir: str = "."
    """Folder that paths in the config start from."""
    keep_unknown_tools: bool = False
    """Whether it renders calls whose tools nobody recorded."""


def outcomes_by(store: Store, authors: Sequence[str], weights: Mapping[str, float] | None = None) -> Outcomes:
    """What rollouts got of the rewards that count, by the authors that count."""

    def outcomes(
        rollouts: Sequence[Rollout], calls: Mapping[str, Sequence[ModelCall]]
    ) -> dict[str, float | None]:
        given = by_rollout(store.rewards([one.rollout_id for one in rollouts]) if rollouts else ())
        return {
            one.rollout_id: total_reward(
                one,
                given.get(one.rollout_id, ()),
                calls[one.rollout_id],
                authors=authors,
                weights=weights,
            )
            for one in rollouts
        }

    return outcomes


@dataclass(frozen=True, slots=True)
class Part:
    """Chosen rollouts of some tasks, and all that they are compared with."""

    chosen: Sequence[Chosen]
    members: Sequence[Rollout]
    """Of their groups, each with the id of its group."""


@dataclass(slots=True)
class PartWritten:
    """What there is to say of the rows of a part."""

    side: Side = field(default_factory=lambda: Side("", trained_tokens=0))
    refused: Refused = field(default_factory=Refused)


Rows = Callable[[Sequence[Part]], Iterable[tuple[Iterable[Mapping[str, Any]], PartWritten]]]
"""Of each part in its order: its rows, and what is known of them when all are taken."""


class TransitionWriter:
    """Writes credited rows. A rollout is compared with its whole group, also with what is left out."""

    def __init__(self, store: Store, selection: Selection, filters: Filters, rows: Rows) -> None:
        """Of `selection`, which was made with these filters; `rows` makes those of a part."""
        self._store, self._selection, self._filters, self._make_rows = store, selection, filters, rows
        self._groups: dict[str, list[Rollout]] = {}

    def write(self, folder: Path, seen: Sequence[Rollout], progress: Progress | None) -> dict[str, Side]:
        """Write `train.parquet` and, with a share held out, `heldout.parquet`; `seen`: all rollouts."""
        self._groups = self._group(seen)
        sides: dict[str, Side] = {}
        done = 0
        for name in ("train", "heldout") if self._filters.heldout else ("train",):
            chosen = self._selection.side(self._filters.heldout, is_heldout=name == "heldout")
            side = sides[name] = Side(f"{name}.parquet", trained_tokens=0)
            rows = self._rows(chosen, side, done, progress)
            side.rows = write_parquet(folder / side.file, rows, TRANSITIONS)
            done += len(chosen)
        return sides

    def _group(self, seen: Sequence[Rollout]) -> dict[str, list[Rollout]]:
        """Members by group; rollouts of no group are compared with those of the same task."""
        named = sorted({one.group_id for one in seen if one.group_id is not None})
        members = {one.rollout_id: one for one in seen}
        for start in range(0, len(named), ROLLOUTS_AT_ONCE):
            part = self._store.rollouts(group_ids=named[start : start + ROLLOUTS_AT_ONCE])
            members |= {one.rollout_id: one for one in part}
        groups: dict[str, list[Rollout]] = {}
        for rollout_id in sorted(members):
            one = members[rollout_id]
            group_id = one.group_id or self._selection.tasks.get(rollout_id)
            if group_id is not None:
                groups.setdefault(group_id, []).append(replace(one, group_id=group_id))
        return groups

    def _rows(
        self, chosen: Sequence[Chosen], side: Side, done: int, progress: Progress | None
    ) -> Iterator[Mapping[str, Any]]:
        parts = list(self._parts(chosen))
        for part, (rows, written) in zip(parts, self._make_rows(parts), strict=True):
            yield from rows
            side.merge(written.side)
            self._selection.refused.add(written.refused)
            done += len(part.chosen)
            if progress is not None:
                progress(done, len(self._selection.chosen))

    def _parts(self, chosen: Sequence[Chosen]) -> Iterator[Part]:
        tasks = [list(members) for _, members in groupby(chosen, key=lambda one: one.task_key)]
        waiting: list[Chosen] = []
        for number, members in enumerate(tasks, start=1):
            waiting += members
            if len(waiting) >= ROLLOUTS_AT_ONCE or number == len(tasks):
                groups = sorted({one.rollout.group_id or one.task_key for one in waiting})
                yield Part(waiting, [one for group in groups for one in self._groups[group]])
                waiting = []


class PartRows:
    """Makes the rows of parts out of a store."""

    def __init__(
        self, store: Store, filters: Filters, credit: Credit, scanner: Scanner, *, keep_secrets: bool
    ) -> None:
        """As `spangrad export` was told."""
        self._store, self._filters, self._credit = store, filters, credit
        self._scanner, self._keep_secrets = scanner, keep_secrets

    def __call__(self, parts: Iterable[Part]) -> Iterator[tuple[Iterator[dict[str, Any]], PartWritten]]:
        """Rows of each part, and what is known of them when all are taken."""
        for part in parts:
            written = PartWritten()
            yield self._batch(part, written), written

    def _batch(self, part: Part, written: PartWritten) -> Iterator[dict[str, Any]]:
        side, refused = written.side, written.refused
        by_id = {one.rollout.rollout_id: one for one in part.chosen}
        members = list(part.members)
        if self._credit.config is None:
            members = [one for one in members if one.rollout_id in by_id]
        batch = credited_rows(
            self._store,
            members,
            self._credit.config,
            min_grade=str(self._filters.min_grade),
            authors=self._credit.authors,
            render=self._credit.render,
            base_dir=self._credit.base_dir,
        )
        calls = {call.call_id: call for call in batch.calls if call.rollout_id in by_id}
        usable = {call.call_id for call in usable_calls(list(calls.values()), self._filters)}
        for one in batch.refused:  # by credit, of what the filters let pass
            if one.call_id in usable:
                refused.calls[one.counted_as] += 1
        side.altered.update(batch.notes)
        rows = [
            row for row in batch.rows if row.rollout_id in by_id and self._may_go(row, calls, refused.rows)
        ]
        rows.sort(key=lambda row: (by_id[row.rollout_id].task_key, row.rollout_id))
        for rollout_id, own in groupby(weigh(rows, n_rollouts=1), key=lambda row: row.rollout_id):
            source, told = by_id[rollout_id], list(own)
            trained = [calls[segment.call_id] for row in told for segment in row.segments]
            trained = list({call.call_id: call for call in trained}.values())
            side.add(Exported(rollout_id, source.task_key, trained, source.reward))
            side.row_models.update(row_models(told, calls))
            for row in told:
                side.trained_tokens = (side.trained_tokens or 0) + int(row.action_mask.sum())
                yield _row(row, source, calls)

    def _may_go(self, row: Transition, calls: Mapping[str, ModelCall], refused: Counter[str]) -> bool:
        own = [calls[segment.call_id] for segment in row.segments]
        if self._filters.policy is not None and any(call.model != self._filters.policy for call in own):
            refused[MIXED] += 1
            return False

        texts = [[call.messages, call.tools, [choice.message for choice in call.choices]] for call in own]
        if self._scanner.has_secret(texts) and not self._keep_secrets:
            refused[HAS_SECRET] += 1
            return False
        return True


def _row(row: Transition, one: Chosen, calls: Mapping[str, ModelCall]) -> dict[str, Any]:
    model = calls[row.segments[0].call_id].model
    return {**row_to_json(row), "task_key": one.task_key, "model": model, "reward": one.reward}
