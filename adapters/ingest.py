"""Files of traces, and of other systems' exports -> store, with an honest account of what they are good for.

Streams: messages are put into the store in small batches, and afterwards the calls
of every trace that was touched are read back and graded (`accounts.py`), because the
spans of a call and their log records may be spread over lines and files.

Invariants:
* a broken line is counted with its number and never stops the rest;
* nothing is left out in silence: calls in an unknown dialect, log records without a
  span, rows in an unknown format, scores that are no rewards, messages of other signals
  and unusable calls are counted;
* ingesting a file twice stores it once.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.accounts import Accounts, account_traces
from spangrad.adapters.exports.rewards import NO_NUMBER, put_scores
from spangrad.adapters.exports.rows import Broken, Row, rows
from spangrad.adapters.intake import Intake
from spangrad.adapters.otlp_files import Skipped, is_otlp, messages
from spangrad.adapters.row_intake import RowIntake
from spangrad.store.base import Store

_TOLD_BY_RECORDS: Final = "SELECT count(*) AS n FROM rewards WHERE reward_id IN (SELECT log_id FROM logs)"

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
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Messages of other signals: `metrics`, `profiles`."""
    broken: Sequence[Broken] = ()
    broken_files: int = 0
    """Files of which nothing could be read: all is broken, or in a format that nobody here knows."""

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def ingest(paths: Sequence[str | Path], store: Store, progress: Progress | None = None) -> IngestReport:
    """Put what files tell of calls into a store: OTLP, and other systems' exports; of a folder, all below it.

    Raises:
        DialectError: A file can't be opened.
        StoreError: The store refused; what was put before is stored.
    """
    files = [file for path in map(Path, paths) for file in (_files_below(path) if path.is_dir() else [path])]
    report = IngestReport(files=len(files))
    broken: list[Broken] = []
    skipped: Counter[str] = Counter()
    intake = Intake(store)
    row_intake = RowIntake(intake)
    total = sum(file.stat().st_size for file in files if file.is_file())
    before = unknown = 0
    told = _told_by_records(store)
    for path in files:
        position, good, bad = 0, False, 0
        for read, position in messages(path) if is_otlp(path) else rows(path):
            report.rows += isinstance(read, Row)
            message = row_intake.add(path, read) if isinstance(read, Row) else read
            is_bad = isinstance(message, Broken) or row_intake.unknown_rows > unknown
            unknown, good, bad = row_intake.unknown_rows, good or not is_bad, bad + is_bad
            if isinstance(message, Broken):
                broken.append(message)
            elif isinstance(message, Skipped):
                skipped[message.signal] += 1
            elif isinstance(message, ExportLogsServiceRequest):
                report.messages += 1
                intake.add_logs(message)
            elif isinstance(message, ExportTraceServiceRequest):
                report.messages += 1
                intake.add_spans(message)
            if progress is not None:
                progress(before + position, total)
        report.broken_files += bad > 0 and not good
        before += position
    intake.flush()
    report.spans, report.new_spans = intake.spans, intake.new_spans
    report.logs, report.new_logs, report.unclaimed_logs = intake.logs, intake.new_logs, intake.lone_logs
    report.traces, report.by_scope = intake.traces.with_spans(), dict(intake.by_scope)
    report.broken, report.skipped = tuple(broken), dict(skipped)
    report.by_format, report.unknown_rows = dict(row_intake.by_format), row_intake.unknown_rows
    report.unknown_row = row_intake.unknown_row
    _tell(report, account_traces(store, intake.traces))
    intake.traces.close()
    scored = put_scores(store, row_intake.scores)
    report.scores = len(row_intake.scores) + intake.evaluations
    report.new_rewards = scored.new_rewards + _told_by_records(store) - told
    left_out = scored.left_out + Counter({NO_NUMBER: intake.unnumbered})
    report.scores_left_out = dict(left_out)
    return report


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _told_by_records(store: Store) -> int:
    """How many rewards came as log records."""
    return int(store.query(_TOLD_BY_RECORDS)[0]["n"])


def _tell(report: IngestReport, told: Accounts) -> None:
    report.calls, report.embeddings = told.calls, told.embeddings
    report.unclaimed_logs += told.unclaimed_logs
    report.joined_by = {str(rule): count for rule, count in told.joined_by.items()}
    report.by_dialect, report.by_grade = dict(told.by_dialect), dict(told.by_grade)
    report.by_reason = dict(told.by_reason.most_common())
