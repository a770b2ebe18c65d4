"""What an engine's own span says of a call, for the account that lacks it.

Knows readings, and which spans are an engine's; it does not know grades.

Invariants:
* a server's span is no call and changes no text, id or logprob;
* it is joined to a call only if both name the same response, or if the call names none
  and it is the one server span right below it; of two, neither;
* what the call's own span says stays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from spangrad.adapters.dialects.vllm_server import VLLM_SERVER
from spangrad.adapters.reading import Reading
from spangrad.store.records import Span

SERVERS: Final = (VLLM_SERVER,)


def with_server_spans(readings: Sequence[Reading], spans: Iterable[Span]) -> list[Reading]:
    """The readings, each with what the span of the engine that served it adds."""
    told = [server.read(span) for span in spans for server in SERVERS if server.wrote(span)]
    if not told:
        return list(readings)
    by_parent: dict[tuple[str, str | None], list[Reading]] = {}
    by_response: dict[tuple[str, str], list[Reading]] = {}
    for each in told:
        by_parent.setdefault((each.span.trace_id, each.span.parent_span_id), []).append(each)
        if each.response_id is not None:
            by_response.setdefault((each.span.trace_id, each.response_id), []).append(each)
    joined = []
    for reading in readings:
        place = reading.span.trace_id
        if reading.response_id is not None:
            found = by_response.get((place, reading.response_id), [])
        else:
            found = by_parent.get((place, reading.span.span_id), [])
        joined.append(_with(reading, found[0]) if len(found) == 1 else reading)
    return joined


def _with(reading: Reading, server: Reading) -> Reading:
    return replace(
        reading,
        response_id=reading.response_id or server.response_id,
        sampling={**server.sampling, **reading.sampling},
        usage={**server.usage, **reading.usage},
    )
