"""Files of traces, and of other systems' exports -> store, with an honest account of what they are good for.

Streams: messages are put into the store in small batches, and afterwards the calls
of every trace that was touched are read back and graded (`accounts.py`), because the
spans of a call and their log records may be spread over lines and files.

Invariants:
* a broken line, message or span is counted by kind, with an example, and never stops the rest;
* nothing is left out in silence: calls in an unknown dialect, log records without a
  span, rows in an unknown format, scores that are no rewards, messages of other signals
  and unusable calls are counted;
* ingesting a file twice stores it once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.accounts import Accounts, account_traces
from spangrad.adapters.exports.rewards import NO_NUMBER, SAME_SCORE, put_scores
from spangrad.adapters.exports.rows import Broken, Row, rows
from spangrad.adapters.file_kinds import Framing, framing
from spangrad.adapters.intake import Intake
from spangrad.adapters.otlp_files import Message, Skipped, messages
from spangrad.adapters.row_intake import RowIntake
from spangrad.adapters.sessions import GUESSED, Rule
from spangrad.errors import DialectError
from spangrad.store.base import Store
from spangrad.store.faults import Fault, Faults, Outcome

_TOLD_BY_RECORDS: Final = "SELECT count(*) AS n FROM rewards WHERE reward_id IN (SELECT log_id FROM logs)"
BROKEN_LISTED: Final = 1000
REPEATED: Final = "duplicate ids with the same content, stored once"
REPEATED_LOGS: Final = "log records with the same content, stored once"
NOT_TRACES: Final = "not traces but"

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


@dataclass(slots=True)
class IngestReport:
    """What was read, stored, and what it can train."""

    files: int = 0
    messages: int = 0
    """Export requests with spans or log records."""
    spans: int = 0
    new_spans: int = 0
    """Spans that the store did not have."""
    logs: int = 0
    """Log records: recorders keep messages and evaluations there."""
    new_logs: int = 0
    """Log records that the store did not have."""
    unclaimed_logs: int = 0
    """Log records of the traces that were touched, and of none, that no span in the store claims."""
    traces: int = 0
    calls: int = 0
    """Model calls in these traces, those in an unknown dialect not included."""
    embeddings: int = 0
    """Calls that made embeddings. They have no grade to speak of, and count nowhere else."""
    by_scope: Mapping[str, int] = field(default_factory=dict)
    """Spans by instrumentation scope: which libraries recorded them."""
    by_dialect: Mapping[str, int] = field(default_factory=dict)
    """Calls by dialect; `no dialect` counts call spans that nobody here reads."""
    by_grade: Mapping[str, int] = field(default_factory=dict)
    by_reason: Mapping[str, int] = field(default_factory=dict)
    """Calls by what keeps them from a better grade; a call may have several reasons."""
    joined_by: Mapping[str, int] = field(default_factory=dict)
    """Traces that go on from another one and are one rollout with it, by the rule that says so."""
    kept_apart: Mapping[str, int] = field(default_factory=dict)
    """Traces that something hinted to be part of an earlier rollout, by what kept them from it."""
    rows: int = 0
    """Rows of exports, those in an unknown format included."""
    by_format: Mapping[str, int] = field(default_factory=dict)
    """Rows of exports by format."""
    unknown_rows: int = 0
    """Rows in a format that nobody here reads. They are not stored."""
    unknown_row: str | None = None
    """The first of them."""
    scores: int = 0
    """Scores, feedback and evaluations of exports, and evaluations in log records."""
    new_rewards: int = 0
    """Rewards that they gave and the store did not have."""
    scores_left_out: Mapping[str, int] = field(default_factory=dict)
    """Scores that gave no reward, by reason."""
    scores_of_parts: int = 0
    """Scores of traces inside longer rollouts: they are rewards of the trace's last call."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Messages of other signals: `metrics`, `profiles`."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """What is wrong by kind: how many, what became of them (left out, mended, kept), and the first one.

    Of times, parents and sizes: in all that the store has of the traces that were touched.
    """
    broken: Sequence[Broken] = ()
    """The first thousand lines, messages and files that could not be read; `faults` counts all."""
    broken_files: int = 0
    """Files of which nothing could be read: all is broken, or in a format that nobody here knows."""

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def ingest(
    paths: Sequence[str | Path],
    store: Store,
    progress: Progress | None = None,
    *,
    join: Sequence[Rule] = GUESSED,
) -> IngestReport:
    """Put what files tell of calls into a store: OTLP, and other systems' exports; of a folder, all below it.

    Args:
        paths: Files and folders.
        store: Where to.
        progress: Told how far it is.
        join: Rules that may make one rollout of several of these traces, now and when others come later.

    Raises:
        DialectError: A file that was named can't be opened.
        StoreError: The store refused; what was put before is stored.
    """
    files = [file for path in map(Path, paths) for file in (_files_below(path) if path.is_dir() else [path])]
    named = frozenset(map(Path, paths))
    total = sum(file.stat().st_size for file in files if file.is_file())
    run = _Run(store, join)
    before = 0
    with closing(run):
        for path in files:
            position = 0
            for position in run.read(path, is_named=path in named):
                if progress is not None:
                    progress(before + position, total)
            before += position
        report = run.finish()
    report.files = len(files)
    return report


class _Run:
    """What has been read so far."""

    def __init__(self, store: Store, join: Sequence[Rule]) -> None:
        self._store = store
        self._join = join
        self._told_before = _told_by_records(store)
        self._report = IngestReport()
        self._intake = Intake(store)
        self._rows = RowIntake(self._intake)
        self._faults = self._intake.faults
        self._broken: list[Broken] = []
        self._skipped: Counter[str] = Counter()

    def read(self, path: Path, *, is_named: bool) -> Iterator[int]:
        """Take in a file. Gives the position after each message."""
        before, is_usable = self._left_out(), False
        for message, position in _content(path, self._faults, is_named=is_named):
            is_usable |= self._take(path, message)
            yield position
        self._report.broken_files += self._left_out() > before and not is_usable

    def finish(self) -> IngestReport:
        """Store what waits, read the calls of all traces that were touched, and say what there was."""
        intake, rows, report = self._intake, self._rows, self._report
        intake.flush()
        report.spans, report.new_spans = intake.spans, intake.new_spans
        report.logs, report.new_logs, report.unclaimed_logs = intake.logs, intake.new_logs, intake.lone_logs
        report.traces, report.by_scope = intake.traces.with_spans(), dict(intake.by_scope)
        report.broken, report.skipped = tuple(self._broken), dict(self._skipped)
        report.by_format, report.unknown_rows = dict(rows.by_format), rows.unknown_rows
        report.unknown_row = rows.unknown_row
        if repeated := intake.spans - intake.new_spans - intake.refused_spans:
            self._faults.add(REPEATED, Outcome.KEPT, count=repeated)
        if repeated := intake.logs - intake.new_logs - intake.refused_logs:
            self._faults.add(REPEATED_LOGS, Outcome.KEPT, count=repeated)
        told = account_traces(self._store, intake.traces, self._join)
        _tell(report, told)
        self._faults.merge(told.faults)
        report.faults = self._faults
        report.scores = len(rows.scores) + intake.evaluations
        scored = put_scores(self._store, rows.scores)
        report.new_rewards = scored.new_rewards + _told_by_records(self._store) - self._told_before
        of_records = {NO_NUMBER: intake.unnumbered, SAME_SCORE: intake.repeated_evaluations()}
        report.scores_left_out = dict(scored.left_out + Counter(of_records))
        report.scores_of_parts = scored.kept_at_last_call
        return report

    def close(self) -> None:
        """Remove what was kept aside."""
        self._intake.traces.close()
        self._rows.scores.close()

    def _left_out(self) -> int:
        return self._faults.count(Outcome.LEFT_OUT) + self._rows.unknown_rows

    def _take(self, path: Path, read: Message) -> bool:
        """Take in a message. Returns whether anything of it is usable."""
        unknown = self._rows.unknown_rows
        self._report.rows += isinstance(read, Row)
        message = self._rows.add(path, read) if isinstance(read, Row) else read
        if isinstance(message, Broken):
            example = f"{message.path}:{message.line}{f': {message.detail}' if message.detail else ''}"
            self._faults.add(message.kind, Outcome.LEFT_OUT, example)
            if len(self._broken) < BROKEN_LISTED:
                self._broken.append(message)
            return False
        if isinstance(message, Skipped):
            self._skipped[message.signal] += 1
        elif isinstance(message, ExportLogsServiceRequest):
            self._report.messages += 1
            self._intake.add_logs(message)
            return bool(message.resource_logs)
        elif isinstance(message, ExportTraceServiceRequest):
            self._report.messages += 1
            self._intake.add_spans(message)
            return bool(message.resource_spans)
        return self._rows.unknown_rows == unknown


def _content(path: Path, faults: Faults, *, is_named: bool) -> Iterable[tuple[Message, int]]:
    try:
        kind, looks = framing(path)
    except DialectError as error:
        if is_named:
            raise
        return [(Broken(str(path), 1, f"not opened: {error}"), 0)]
    if kind is Framing.UNREAD:
        return [(Broken(str(path), 1, f"{NOT_TRACES} {looks}"), path.stat().st_size)]
    return messages(path, faults) if kind is Framing.OTLP else rows(path)


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _told_by_records(store: Store) -> int:
    """How many rewards came as log records."""
    return int(store.query(_TOLD_BY_RECORDS)[0]["n"])


def _tell(report: IngestReport, told: Accounts) -> None:
    report.calls, report.embeddings = told.calls, told.embeddings
    report.unclaimed_logs += told.unclaimed_logs
    report.joined_by, report.kept_apart = told.joined_by, told.kept_apart
    report.by_dialect, report.by_grade = dict(told.by_dialect), dict(told.by_grade)
    report.by_reason = dict(told.by_reason.most_common())
