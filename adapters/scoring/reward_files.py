"""Files of rewards -> rewards in a store, with an account of every row that gave none.

A row names what it is about (`rollout_id`, or `trace_id` as its own system names it, or `call_id`; closer
with `span_id` or `response_id`) and a `value`, perhaps a `name`, an `explanation`, `attempt` and `time_ns`.

Invariants:
* everything is read and checked before the first reward is written;
* a row that gives no reward is counted with its reason and shown with its line, and stops no other;
* the same file twice stores once: of rows about the same thing that tell no time, only the last one counts;
* the author is whoever's key it comes with; a column `author` is not believed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from spangrad.adapters.exports.rows import Broken, rows
from spangrad.adapters.file_kinds import Framing, framing
from spangrad.adapters.scoring.reward_places import place_rows
from spangrad.adapters.scoring.reward_rows import COLUMNS, LeftOut, RewardRow, parse
from spangrad.errors import DialectError
from spangrad.store.base import Store
from spangrad.store.records import Reward

PLACED_AT_ONCE: Final = 1000
WRITTEN_AT_ONCE: Final = 10_000
WRITTEN_CHARACTERS: Final = 8 * 2**20
"""A transaction, and a request to a hub, has at most so many rewards and characters of explanation."""
BROKEN: Final = "broken row"


@dataclass(slots=True)
class RewardFilesReport:
    """What became of the rows."""

    files: int = 0
    rows: int = 0
    rewards: int = 0
    """Rows that gave one."""
    new_rewards: int = 0
    """Rewards that the store did not have."""
    corrected: int = 0
    """Rows that a later row about the same thing replaces."""
    by_name: Mapping[str, int] = field(default_factory=dict)
    left_out_by_reason: Mapping[str, int] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()
    """Rows that gave none, by file and line."""
    unread_columns: Mapping[str, int] = field(default_factory=dict)
    """Columns that say nothing here, with the rows that have them."""

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def put_reward_files(paths: Sequence[str | Path], store: Store, *, name: str = "reward") -> RewardFilesReport:
    """Store the rewards of files: JSON lines, one JSON array, Parquet; packed with gzip or zstd, too.

    Args:
        paths: The files.
        store: Where the rollouts are.
        name: Of rewards that name none.

    Raises:
        DialectError: A file can't be opened, or is of comma-separated values.
        StoreError: The store refused; rewards that were put before are stored.
    """
    report = RewardFilesReport(files=len(paths))
    left_out: list[LeftOut] = []
    unread: Counter[str] = Counter()
    rewards: list[Reward] = []
    chunk: list[tuple[str, RewardRow]] = []
    for path, line, row in _rows(paths):
        report.rows += 1
        if isinstance(row, Broken):
            left_out.append(LeftOut(path, line, BROKEN, row.reason))
            continue
        unread.update(key for key in row if key not in COLUMNS)
        said = parse(path, line, row, name)
        if isinstance(said, LeftOut):
            left_out.append(said)
            continue
        chunk.append((path, said))
        if len(chunk) >= PLACED_AT_ONCE:
            rewards += _placed(store, chunk, left_out)
            chunk = []
    rewards += _placed(store, chunk, left_out)
    kept = _last_ones(rewards)
    report.rewards, report.corrected = len(rewards), len(rewards) - len(kept)
    report.by_name = dict(Counter(reward.name for reward in kept))
    report.left_out = tuple(sorted(left_out, key=lambda one: (one.path, one.line)))
    report.left_out_by_reason = dict(Counter(one.reason for one in report.left_out).most_common())
    report.unread_columns = dict(unread)
    for part in _parts(kept):
        report.new_rewards += store.put_rewards(part)
    return report


def _rows(paths: Sequence[str | Path]) -> Iterator[tuple[str, int, Mapping[str, Any] | Broken]]:
    for path in map(Path, paths):
        try:
            kind, looks = framing(path)
            if kind is Framing.UNREAD and "separated values" in looks:  # else a broken row for each line
                raise DialectError(f"it looks like {looks}")
            for row, _ in rows(path):
                yield str(path), row.line, row if isinstance(row, Broken) else row.value
        except DialectError as error:
            raise DialectError(
                f"can't read rewards from {str(path)!r}: {getattr(error.__cause__, 'strerror', error)};"
                " expected JSON lines, a JSON array or Parquet, a row a reward"
            ) from error


def _placed(
    store: Store, chunk: Sequence[tuple[str, RewardRow]], left_out: list[LeftOut]
) -> Iterator[Reward]:
    places = place_rows(store, [row for _, row in chunk])
    for (path, row), place in zip(chunk, places, strict=True):
        if isinstance(place, str):
            about = (row.rollout_id, row.trace_id, row.span_id, row.response_id)
            left_out.append(LeftOut(path, row.line, place, " ".join(filter(None, about))))
            continue
        yield Reward(
            place.rollout_id,
            row.value,
            name=row.name,
            call_id=place.call_id,
            explanation=row.explanation,
            attempt=place.attempt,
            time_ns=row.time_ns,
            trace_id=place.trace_id,
        )


def _last_ones(rewards: Sequence[Reward]) -> list[Reward]:
    """Rewards without those that a later one about the same thing replaces; one with a time replaces none."""
    last: dict[tuple[str, int | None, str | None, str, str | None], int] = {}
    for number, reward in enumerate(rewards):
        if reward.time_ns is None:
            last[reward.rollout_id, reward.attempt, reward.call_id, reward.name, reward.trace_id] = number
    kept = set(last.values())
    return [reward for number, reward in enumerate(rewards) if reward.time_ns is not None or number in kept]


def _parts(rewards: Sequence[Reward]) -> Iterator[list[Reward]]:
    part: list[Reward] = []
    characters = 0
    for reward in rewards:
        part.append(reward)
        characters += len(reward.explanation or "")
        if len(part) >= WRITTEN_AT_ONCE or characters >= WRITTEN_CHARACTERS:
            yield part
            part, characters = [], 0
    if part:
        yield part
