"""`spangrad export --format transitions --workers N`: calls are read and rows credited by several processes.

Each opens the store's file for reading, with the days in its archive, and works on parts that are those of an
export without workers: the same rollouts together, groups whole. Knows what goes to a worker and comes back.

Invariant: files and card are those of an export without workers, byte for byte.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.adapters.datasets.card import Side
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.datasets.selecting import (
    ROLLOUTS_AT_ONCE,
    Chosen,
    Filters,
    Looked,
    Progress,
    Refused,
    Selection,
    choose,
    in_parts,
    look,
)
from spangrad.adapters.datasets.tables import TRANSITIONS
from spangrad.commands.transition_files import Credit, Part, PartRows, PartWritten, outcomes_by
from spangrad.store.base import Store
from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout
from spangrad.trainer.bulk import Work, done_in_parallel


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that read one store's file."""

    path: str
    count: int
    filters: Filters
    credit: Credit
    keep_secrets: bool

    def select(self, rollouts: Sequence[Rollout], progress: Progress | None = None) -> Selection:
        """As `spangrad.adapters.datasets.selecting.select`."""
        parts = list(in_parts(rollouts, ROLLOUTS_AT_ONCE))
        told = (json.dumps([one.rollout_id for one in part]).encode() for part in parts)
        known = {one.rollout_id: one for one in rollouts}
        looked = done_in_parallel(self._looking, list(told), workers=self.count)
        return choose((_looked(one, known) for one in looked), rollouts, self.filters, progress)

    def rows(
        self, parts: Sequence[Part], scanner: Scanner
    ) -> Iterator[tuple[Iterable[Mapping[str, Any]], PartWritten]]:
        """As `PartRows`; secrets are counted in `scanner`."""
        told = [_part_told(part) for part in parts]
        for done in done_in_parallel(self._crediting, told, workers=self.count):
            with pa.ipc.open_stream(done) as stream:
                meta = json.loads(stream.schema.metadata[b"told"])
                table = stream.read_all()
            scanner.found.update(meta["secrets"])
            yield table.to_pylist(), PartWritten(_side(meta["side"]), Refused(**_counters(meta["refused"])))

    def _looking(self) -> Work:
        """In a worker: what `look` says of some rollouts."""
        store = FileStore(self.path, read_only=True)
        outcomes = outcomes_by(store, self.credit.authors, self.credit.weights)

        def work(part: bytes) -> bytes:
            ids = json.loads(part)
            looked = look(store, _in_order(store, ids), self.filters, outcomes)
            found = [
                (one.rollout.rollout_id, one.task_key, one.reward, one.fingerprint) for one in looked.found
            ]
            return json.dumps([found, looked.tasks, _told(looked.refused)]).encode()

        return work

    def _crediting(self) -> Work:
        """In a worker: rows of a part, with what there is to say of them in the schema."""
        store = FileStore(self.path, read_only=True)

        def work(told: bytes) -> bytes:
            scanner = Scanner()
            make = PartRows(store, self.filters, self.credit, scanner, keep_secrets=self.keep_secrets)
            ((rows, written),) = make([_part(store, told)])
            table = pa.Table.from_pylist(list(rows), schema=TRANSITIONS)
            side = {**_told(written.side), "tasks": sorted(written.side.tasks)}
            meta = {"side": side, "refused": _told(written.refused), "secrets": scanner.found}
            sink = pa.BufferOutputStream()
            schema = TRANSITIONS.with_metadata({b"told": json.dumps(meta).encode()})
            with pa.ipc.new_stream(sink, schema) as stream:
                stream.write_table(table.cast(schema))
            return bytes(sink.getvalue())

        return work


def _part_told(part: Part) -> bytes:
    """A part as ids: its worker reads the rollouts."""
    chosen = [(one.rollout.rollout_id, one.task_key, one.reward) for one in part.chosen]
    return json.dumps([chosen, [(one.rollout_id, one.group_id) for one in part.members]]).encode()


def _part(store: Store, told: bytes) -> Part:
    chosen, members = json.loads(told)
    groups = dict(members)
    known = {
        one.rollout_id: one for one in store.rollouts(rollout_ids=[*groups, *(one[0] for one in chosen)])
    }
    return Part(
        [Chosen(known[rollout_id], key, reward, "") for rollout_id, key, reward in chosen],
        [replace(known[rollout_id], group_id=group_id) for rollout_id, group_id in members],
    )


def _in_order(store: Store, ids: Sequence[str]) -> list[Rollout]:
    known = {one.rollout_id: one for one in store.rollouts(rollout_ids=ids)}
    return [known[rollout_id] for rollout_id in ids]


def _looked(done: bytes, known: Mapping[str, Rollout]) -> Looked:
    found, tasks, refused = json.loads(done)
    return Looked(
        [Chosen(known[rollout_id], *others) for rollout_id, *others in found],
        Refused(**_counters(refused)),
        tasks,
    )


def _side(told: Mapping[str, Any]) -> Side:
    return Side(**{**_counters(told), "tasks": set(told["tasks"])})


def _told(counted: Side | Refused) -> dict[str, Any]:
    return {one.name: getattr(counted, one.name) for one in fields(counted)}


def _counters(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Counter(value) if isinstance(value, dict) else value for name, value in told.items()}
