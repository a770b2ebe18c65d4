"""What real recorders wrote: the files below `fixtures/`, read as spans with their log records."""

from pathlib import Path

from spangrad.adapters.log_events import with_logs
from spangrad.store.otlp import decode_logs, decode_request, json_logs_to_protobuf, json_to_protobuf
from spangrad.store.records import LogRecord, Span

FIXTURES = Path(__file__).parent / "fixtures"


def captured(name: str) -> list[Span]:
    """The spans of `fixtures/<name>.otlp.jsonl`; their log records are events of them."""
    spans: list[Span] = []
    records: list[LogRecord] = []
    for line in (FIXTURES / f"{name}.otlp.jsonl").read_bytes().splitlines():
        if b'"resourceSpans"' in line:
            spans += decode_request(json_to_protobuf(line))[0]
        elif b'"resourceLogs"' in line:
            records += decode_logs(json_logs_to_protobuf(line))
    return with_logs(spans, records)
