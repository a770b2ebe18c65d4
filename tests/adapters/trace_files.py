"""Files of traces, taken apart, changed and written anew: OTLP's JSON lines, as a collector writes them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.model_call import ModelCall
from spangrad.store.file_store import FileStore
from tests.adapters.captured import FIXTURES

Line = dict[str, Any]
"""One export request."""


def lines_of(name: str) -> list[Line]:
    """The requests of `fixtures/<name>`, spans and log records."""
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines() if line]


def apart(lines: Iterable[Line]) -> Iterator[Line]:
    """The same, a request for each span and log record."""
    for line in lines:
        for signal, scopes, things in (
            ("resourceSpans", "scopeSpans", "spans"),
            ("resourceLogs", "scopeLogs", "logRecords"),
        ):
            for resource in line.get(signal, ()):
                for scope in resource[scopes]:
                    for thing in scope[things]:
                        yield {signal: [{**resource, scopes: [{**scope, things: [thing]}]}]}


def spans_in(lines: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """The spans of requests, to look at or to change."""
    for line in lines:
        for resource in line.get("resourceSpans", ()):
            for scope in resource["scopeSpans"]:
                yield from scope["spans"]


def attributes_of(thing: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> the one value of each attribute."""
    return {pair["key"]: next(iter(pair["value"].values()), None) for pair in thing.get("attributes", ())}


def written(file: Path, lines: Iterable[Line]) -> Path:
    """A file with these requests."""
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def calls_through(store: Path, *runs: Sequence[Path]) -> list[ModelCall]:
    """The calls of a new store into which the files of each run were ingested."""
    with FileStore(store) as opened:
        for files in runs:
            ingest(files, opened)
        return calls_of(opened)
