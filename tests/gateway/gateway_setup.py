"""A gateway in front of a stub, with spans kept in memory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig, running
from tests.gateway.stub_engine import StubEngine


@dataclass
class Setup:
    """One gateway, its engine and what it exported."""

    url: str
    engine: StubEngine
    exporter: InMemorySpanExporter

    def flush(self) -> None:
        httpx.post(f"{self.url}/spangrad/flush", timeout=30).raise_for_status()

    def spans(self) -> Sequence[ReadableSpan]:
        """Every span so far, flushed first, oldest start first."""
        self.flush()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the only span."""
        spans = self.spans()
        assert len(spans) == 1, [span.name for span in spans]
        assert spans[0].attributes is not None
        return spans[0].attributes

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/spangrad/health").json()
        return answer


GatewayFactory = Callable[..., Setup]


@contextmanager
def gateway_before(engine: StubEngine, **settings: Any) -> Iterator[Setup]:
    exporter = InMemorySpanExporter()
    config = GatewayConfig(**{"engine_url": engine.url, "store": "unused", "port": 0, **settings})
    with running(config, exporter=exporter) as url:
        yield Setup(url, engine, exporter)


def body(text: str, **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "stub", "messages": [{"role": "user", "content": text}], **more}


def ids(attributes: Mapping[str, Any], choice: int = 0) -> list[int]:
    return names.unpack_ints(attributes[names.choice_key(names.SAMPLED_TOKEN_IDS, choice)])


def versions(attributes: Mapping[str, Any], choice: int = 0) -> list[int]:
    return names.unpack_ints(attributes[names.choice_key(names.POLICY_VERSIONS, choice)])


def logprobs(attributes: Mapping[str, Any], choice: int = 0) -> list[float]:
    return names.unpack_floats(attributes[names.choice_key(names.SAMPLED_LOGPROBS, choice)])


def dropped(attributes: Mapping[str, Any]) -> dict[str, str]:
    notes: dict[str, str] = json.loads(attributes.get(names.DROPPED, "{}"))
    return notes
