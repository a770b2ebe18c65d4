"""Turns of conversations as spans, a trace each, and what a store makes of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spangrad.store.base import Store
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes

SECOND = 10**9
START = 1_700_000_000 * SECOND


def turn(
    number: int,
    asked: Sequence[str],
    reply: str = "ok",
    *,
    conversation: str | None = None,
    service: str | None = "shop",
    start: float = 0.0,
    response: str | None = None,
    **attributes: Any,
) -> Span:
    """A call in a trace of its own; user and assistant take turns in `asked`. `start` is in seconds."""
    roles = ("user", "assistant")
    told = [
        {"role": roles[i % 2], "parts": [{"type": "text", "content": text}]} for i, text in enumerate(asked)
    ]
    answer = {"role": "assistant", "parts": [{"type": "text", "content": reply}], "finish_reason": "stop"}
    more: dict[str, Any] = {c.INPUT_MESSAGES: json.dumps(told), c.OUTPUT_MESSAGES: json.dumps([answer])}
    more[c.RESPONSE_ID] = response or f"resp-{number}"
    if conversation is not None:
        more[c.CONVERSATION_ID] = conversation
    began = START + round((start or number) * SECOND)
    return replace(
        span(
            f"s{number}",
            trace=f"{number:x}",
            scope="opentelemetry.util.genai.handler",
            start_ns=began,
            end_ns=began + SECOND // 2,
            attributes=text_attributes(**more, **attributes),
        ),
        resource={} if service is None else {"service.name": service},
    )


def traces_of(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans, trace by trace."""
    by_trace: dict[str, list[Span]] = {}
    for each in spans:
        by_trace.setdefault(each.trace_id, []).append(each)
    return list(by_trace.values())


def written(folder: Path, *pieces: Iterable[Span]) -> list[Path]:
    """A file a piece."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, spans in enumerate(pieces):
        files.append(folder / f"{number:04}.pb")
        files[-1].write_bytes(encode_request(list(spans)))
    return files


def joined(store: Store) -> list[list[int]]:
    """The numbers of the traces of each rollout."""
    sql = "SELECT list(trace_id ORDER BY trace_id) AS traces FROM sessions GROUP BY rollout_id"
    return sorted([int(trace_id, 16) for trace_id in row["traces"]] for row in store.query(sql))


def state(store: Store) -> dict[str, Any]:
    """All that ingesting says of spans, but for times of insertion."""
    return {
        "calls": store.query("SELECT * FROM calls ORDER BY call_id"),
        "call_keys": store.query("SELECT * FROM call_keys ORDER BY call_id"),
        "sessions": store.query("SELECT * FROM sessions ORDER BY trace_id"),
        "rollouts": store.query(
            "SELECT rollout_id, status, error, started_ns, ended_ns FROM rollouts ORDER BY rollout_id"
        ),
        "rewards": store.query("SELECT * FROM rewards ORDER BY reward_id"),
    }
