"""Who is an operator: callers on this machine, and nobody who only says so."""

import asyncio

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.tracer.gateway import GatewayConfig
from spangrad.tracer.gateway.serve import _server


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "status"),
    [
        ("127.0.0.1", None, 200),
        ("10.0.0.9", None, 403),
        ("10.0.0.9", "127.0.0.1", 403),
        ("127.0.0.1", "10.0.0.9", 403),  # a proxy on this machine speaks for somebody else
        ("127.0.0.1", "127.0.0.1, 10.0.0.9", 403),
    ],
)
def test_no_header_and_no_environment_make_a_caller_an_operator(
    peer: str, forwarded_for: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    config = GatewayConfig(engine_url="http://127.0.0.1:9", store="unused")
    server = _server(config, InMemorySpanExporter())
    server.config.load()

    async def refresh() -> int:
        transport = httpx.ASGITransport(server.config.loaded_app, client=(peer, 4711))
        headers = {} if forwarded_for is None else {"x-forwarded-for": forwarded_for}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return (await client.post("/spangrad/refresh", headers=headers)).status_code

    assert asyncio.run(refresh()) == status
