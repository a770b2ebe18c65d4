"""Who is an operator: callers on this machine, and nobody who only says so."""

import asyncio

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.errors import ConfigError
from spangrad.tracer.gateway import GatewayConfig
from spangrad.tracer.gateway.app import create_app
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


@pytest.mark.parametrize(
    ("key", "status"), [(None, 403), ("agents-key", 403), ("stores-key", 403), ("the-operators-key", 200)]
)
def test_from_other_machines_only_operators_keys_count(key: str | None, status: int) -> None:
    config = GatewayConfig(
        engine_url="http://127.0.0.1:9",
        store="unused",
        store_key="stores-key",
        agent_key="agents-key",
        operator_keys=["the-other-ones-key", "the-operators-key"],
    )
    asked: list[bool] = []

    async def ask() -> tuple[int, int]:
        app = create_app(config, exporter=InMemorySpanExporter())
        transport = httpx.ASGITransport(app, client=("10.0.0.9", 4711))
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        ):
            refreshed = await client.post("/spangrad/refresh", headers=headers)
            health = await client.get("/spangrad/health", headers=headers)
        asked.append(health.json()["engine"]["reachable"])
        return refreshed.status_code, health.status_code

    assert asyncio.run(ask()) == (status, 200)
    # Only for operators the engine, which is not there, was asked.
    assert asked == [status == 403]


def test_the_agents_key_can_not_be_an_operators() -> None:
    key = "k" * 16
    with pytest.raises(ConfigError, match="operator_keys has the agents' key"):
        GatewayConfig(engine_url="http://h:1", store="s", agent_key=key, operator_keys=[key])
    for keys in (key, [""], ["short"]):
        with pytest.raises(ConfigError, match="a list of keys of 16 characters or more"):
            GatewayConfig(engine_url="http://h:1", store="s", operator_keys=keys)
