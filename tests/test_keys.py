"""Who may ask what of a hub and a gateway with keys: every route of both, by every key, over HTTP.

A route that is not in the lists below fails `test_every_route_is_listed`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.routing import Route

from spangrad.errors import ConfigError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.hub import create_app as create_hub
from spangrad.store.keys import Keys, Role
from spangrad.store.records import Policy, Reward, Rollout
from spangrad.store.serve import serve
from spangrad.store.wire import record_to_wire
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.tracer.gateway.app import create_app as create_gateway
from spangrad.tracer.gateway.routes import ROUTES
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.store.hub_process import HubProcess

KEYS: Final = Keys(agent="a" * 20, evaluator="e" * 20, trainer="t" * 20, admin="d" * 20)
CALLERS: Final[dict[str, str | None]] = {
    "none": None,
    "wrong": "w" * 20,
    "agent": KEYS.agent,
    "evaluator": KEYS.evaluator,
    "trainer": KEYS.trainer,
    "admin": KEYS.admin,
}
ROLES: Final = {str(role.name).lower(): role for role in Role}

HUB: Final[dict[str, Role | None]] = {
    "/healthz": None,
    "/v1/traces": Role.AGENT,
    "/v1/logs": Role.AGENT,
    "/api/spans": Role.EVALUATOR,
    "/api/logs": Role.EVALUATOR,
    "/api/claim": Role.EVALUATOR,
    "/api/commit_update": Role.TRAINER,
    "/api/decide": Role.TRAINER,
    "/api/decisions": Role.EVALUATOR,
    "/api/enqueue": Role.TRAINER,
    "/api/events": Role.EVALUATOR,
    "/api/finish": Role.EVALUATOR,
    "/api/finish_many": Role.EVALUATOR,
    "/api/give_up": Role.TRAINER,
    "/api/heartbeat": Role.EVALUATOR,
    "/api/last_update": Role.EVALUATOR,
    "/api/mark_read": Role.TRAINER,
    "/api/policies": Role.EVALUATOR,
    "/api/put_events": Role.TRAINER,
    "/api/put_metrics": Role.TRAINER,
    "/api/put_call_keys": Role.TRAINER,
    "/api/put_calls": Role.TRAINER,
    "/api/put_policy": Role.TRAINER,
    "/api/put_rewards": Role.EVALUATOR,
    "/api/query": Role.EVALUATOR,
    "/api/related_accounts": Role.EVALUATOR,
    "/api/related_call_keys": Role.EVALUATOR,
    "/api/requeue": Role.TRAINER,
    "/api/reward_author": Role.EVALUATOR,
    "/api/rewards": Role.EVALUATOR,
    "/api/rollouts": Role.EVALUATOR,
    "/api/set_sessions": Role.TRAINER,
    "/api/stats": Role.EVALUATOR,
    "/api/unread_traces": Role.EVALUATOR,
    "/api/updates": Role.EVALUATOR,
}
"""Route -> the least role that may use it; None: everybody."""

EVERYBODY: Final = frozenset(CALLERS)
OPERATORS: Final = frozenset({"evaluator", "trainer", "admin"})
AGENTS: Final = frozenset({"agent"})
PREFIXES: Final = ("", "/rollout/{rollout_id}", "/rollout/{rollout_id}/{attempt}")
BELOW_A_ROLLOUT: Final = (
    "/v1/{path:path}",
    "/v1/end",
    "/v1/messages/count_tokens",
    "/v1/responses/{response_id}/cancel",
    *(route.path for route in ROUTES),
)
GATEWAY: Final[dict[str, frozenset[str]]] = {
    "/spangrad/health": EVERYBODY,
    "/spangrad/engines": EVERYBODY,
    "/spangrad/flush": OPERATORS,
    "/spangrad/refresh": OPERATORS,
    "/spangrad/budgets": OPERATORS,
    "/spangrad/engines/join": OPERATORS,
    "/spangrad/engines/leave": OPERATORS,
    "/spangrad/engines/drain": OPERATORS,
    "/spangrad/engines/undrain": OPERATORS,
    "/spangrad/engines/swap": OPERATORS,
    "/spangrad/engines/swapped": OPERATORS,
    "/health": AGENTS,
    "/ping": AGENTS,
    "/version": AGENTS,
    **{prefix + path: AGENTS for prefix in PREFIXES for path in BELOW_A_ROLLOUT},
}
"""Route -> who may use it."""


@dataclass
class Served:
    """A hub and a gateway with the same keys, in front of one engine."""

    hub: str
    gateway: str
    engine: StubEngine
    client: httpx.Client

    def ask(self, url: str, caller: str, method: str = "POST", json: Any = None) -> httpx.Response:
        key = CALLERS[caller]
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.client.request(method, url, headers=headers, json={} if json is None else json)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    KEYS.save(folder / "keys.json")
    with HubProcess(folder / "s.duckdb", keys=folder / "keys.json") as hub, stub_engine() as engine:
        config = GatewayConfig(
            engine.url,
            store=hub.url,
            store_key=KEYS.evaluator,
            agent_key=KEYS.agent,
            operator_keys=KEYS.operators,
            spool_dir=folder / "spool",
            port=0,
        )
        with running(config) as gateway, httpx.Client(timeout=30) as client:
            yield Served(hub.url, gateway, engine, client)


def table(app: Starlette) -> dict[str, set[str]]:
    """Path -> methods of an app's routes."""
    assert all(isinstance(route, Route) for route in app.routes)
    return {route.path: set(route.methods or ()) for route in app.routes if isinstance(route, Route)}


@pytest.fixture(scope="module")
def hub_table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    with FileStore(tmp_path_factory.mktemp("table") / "s.duckdb") as store:
        return table(create_hub(store, keys=KEYS))


def gateway_table() -> dict[str, set[str]]:
    config = GatewayConfig("http://127.0.0.1:9", store="unused")
    found = table(create_gateway(config, exporter=InMemorySpanExporter()))
    return found | {prefix + route.path: {"POST"} for prefix in PREFIXES for route in ROUTES}


def example(path: str) -> str:
    """A path that a route answers."""
    named = {"rollout_id": "r", "attempt": "0", "response_id": "x", "path:path": "models"}
    for name, value in named.items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path
    return path


def test_every_route_is_listed(hub_table: dict[str, set[str]]) -> None:
    assert hub_table.keys() == HUB.keys()
    assert gateway_table().keys() == GATEWAY.keys()


@pytest.mark.parametrize("caller", CALLERS)
def test_a_hub_answers_a_key_what_its_role_may(
    served: Served, hub_table: dict[str, set[str]], caller: str
) -> None:
    role = ROLES.get(caller)
    for path, methods in hub_table.items():
        least = HUB[path]
        for method in methods:
            status = served.ask(served.hub + path, caller, method).status_code
            if least is None or (role is not None and role >= least):
                assert status not in (401, 403), (path, status)
            else:
                assert status == (401 if role is None else 403), (path, status)
        for method in {"GET", "PUT", "PATCH", "DELETE", "OPTIONS"} - methods:
            assert served.ask(served.hub + path, caller, method).status_code == 405, (method, path)


@pytest.mark.parametrize("caller", CALLERS)
def test_a_gateway_answers_whom_a_route_is_for(served: Served, caller: str) -> None:
    served.engine.reset()
    for path, methods in gateway_table().items():
        for method in methods:
            status = served.ask(served.gateway + example(path), caller, method).status_code
            if caller in GATEWAY[path]:
                assert status not in (401, 403), (method, path, status)
            else:
                assert status == (401 if GATEWAY[path] is AGENTS else 403), (method, path, status)
    if caller not in AGENTS:
        assert served.engine.headers == [], "a call without the agents' key reached the engine"


def written(served: Served) -> list[dict[str, Any]]:
    """What is in the tables that roles above the agent's write."""
    told = (
        "SELECT 'rollout' AS kind, rollout_id || status || coalesce(worker, '') AS what FROM rollouts"
        " UNION ALL SELECT 'reward', rollout_id || value || author FROM rewards"
        " UNION ALL SELECT 'policy', run_id || policy_version FROM policies"
        " UNION ALL SELECT 'decision', run_id || decision FROM policy_decisions ORDER BY ALL"
    )
    with HubClient(served.hub, KEYS.admin) as admin:
        return list(admin.query(told))


def asked_of_others(rollout_id: str) -> dict[str, dict[str, Any]]:
    """Operations with arguments that fit: what an agent would gain by."""
    policy = record_to_wire(Policy("run", 1, "elsewhere"))
    decision = {
        "run_id": "run",
        "policy_version": 1,
        "decision": "promoted",
        "decided_by": "admin",
        "reason": "",
    }
    return {
        "claim": {"worker": "me", "limit": 9},
        "heartbeat": {"rollouts": [[rollout_id, 0]], "worker": "me"},
        "finish": {"rollout_id": rollout_id, "attempt": 0},
        "give_up": {"rollout_ids": [rollout_id], "error_type": "E", "error": "e"},
        "requeue": {"rollout_ids": [rollout_id]},
        "put_rewards": {"rewards": [record_to_wire(Reward(rollout_id, 1.0, attempt=0))]},
        "put_policy": {"policy": policy},
        "decide": {"decision": decision},
        "rollouts": {},
        "rewards": {"rollout_ids": [rollout_id]},
        "query": {"sql": "SELECT * FROM spans"},
        "spans": {},
    }


def test_an_agents_key_changes_nothing_of_others_and_reads_nothing(served: Served) -> None:
    with HubClient(served.hub, KEYS.admin) as admin:
        admin.enqueue([Rollout("held"), Rollout("queued")])
        admin.claim(worker="somebody", limit=1)
        admin.put_policy(Policy("run", 1, "here"))
    before = written(served)
    assert {row["kind"] for row in before} == {"rollout", "policy"}
    for name, arguments in asked_of_others("held").items():
        answer = served.ask(f"{served.hub}/api/{name}", "agent", json=arguments)
        assert answer.status_code == 403 and "the agent key" in answer.text, name
    assert written(served) == before
    for name, arguments in asked_of_others("held").items():  # they would have been something
        assert served.ask(f"{served.hub}/api/{name}", "admin", json=arguments).status_code != 403, name
    assert written(served) != before


@pytest.mark.parametrize("action", ["drain", "swap", "swapped"])
def test_an_agents_key_keeps_no_engine_from_its_calls(served: Served, action: str) -> None:
    for caller in ("none", "wrong", "agent"):
        body = {"engine": served.engine.url, "stale": "so I say"}
        assert served.ask(f"{served.gateway}/spangrad/engines/{action}", caller, json=body).status_code == 403
    (engine,) = served.ask(f"{served.gateway}/spangrad/engines", "agent", "GET").json()["engines"]
    assert (engine["draining"], engine["swapping"], engine["stale"]) == (False, False, None)


@pytest.mark.parametrize(
    "listen",
    [
        lambda folder: serve(folder / "s.duckdb", host="0.0.0.0", port=0),
        lambda folder: GatewayConfig("http://127.0.0.1:9", store="unused", host="0.0.0.0"),
    ],
    ids=["hub", "gateway"],
)
def test_without_keys_nobody_listens_for_other_machines(
    tmp_path: Path, listen: Callable[[Path], object]
) -> None:
    with pytest.raises(ConfigError, match="key"):
        listen(tmp_path)
