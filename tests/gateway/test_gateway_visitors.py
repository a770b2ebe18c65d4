"""Engines that join a running gateway: calls while somebody speaks for them, and not by an agent's word."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.gateway.gateway_setup import Setup, gateway_before
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.gateway.test_gateway_engines import ask, counts, free_port, held_call, listed
from tests.waiting import wait_until

TRAINER = "t" * 32


@contextmanager
def gateway_without_engines(**settings: Any) -> Iterator[Setup]:
    """The engine of its own settings is never there."""
    with gateway_before(StubEngine(url=f"http://127.0.0.1:{free_port()}"), **settings) as gateway:
        yield gateway


def tell(gateway: Setup, action: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.url}/spangrad/engines/{action}", json=body, headers=headers, timeout=10)


def test_an_engine_gets_calls_while_it_has_joined_and_none_when_it_has_left() -> None:
    with stub_engine() as one, gateway_without_engines() as gateway:
        assert ask(gateway).status_code == 502
        answer = tell(gateway, "join", engine=f"{one.url}/v1", for_s=60)
        assert answer.json()["engine"]["healthy"] is True
        assert ask(gateway).status_code == 200
        assert gateway.health()["engine"]["reachable"] is True
        assert tell(gateway, "swap", engine=one.url).status_code == 200  # as to any other
        assert tell(gateway, "swapped", engine=one.url).status_code == 200
        with held_call(gateway, one) as answers:
            assert tell(gateway, "leave", engine=one.url).status_code == 200
        assert [answer.status_code for answer in answers] == [200]
        assert ask(gateway).status_code == 502
        assert counts([one]) == [2]
        assert one.url not in listed(gateway)
        assert tell(gateway, "leave", engine=one.url).status_code == 404


def test_an_engine_for_which_nobody_speaks_leaves_and_one_that_joins_again_stays_as_it_is() -> None:
    with stub_engine() as one, stub_engine() as other, gateway_without_engines() as gateway:
        tell(gateway, "join", engine=one.url, for_s=60)
        tell(gateway, "swapped", engine=one.url, stale="it broke")
        tell(gateway, "join", engine=other.url, for_s=60)
        again = tell(gateway, "join", engine=one.url, for_s=0.1)
        assert again.json()["engine"]["stale"] == "it broke"
        tell(gateway, "join", engine=other.url, for_s=0.1)
        wait_until(lambda: not {one.url, other.url} & set(listed(gateway)))
        assert ask(gateway).status_code == 502


def test_an_engine_that_joined_is_asked_how_it_is() -> None:
    with stub_engine() as one, gateway_without_engines(health_interval_s=0.05) as gateway:
        one.health_status = 500
        assert tell(gateway, "join", engine=one.url, for_s=60).json()["engine"]["healthy"] is False
        one.health_status = 200
        wait_until(lambda: listed(gateway)[one.url]["healthy"])


def test_only_an_operators_key_lets_engines_in_where_there_are_keys() -> None:
    """An agent on the gateway's machine would else answer the calls of all others itself."""
    with stub_engine() as one, gateway_without_engines(operator_keys=[TRAINER], agent_key="agent") as gateway:
        for action, more in (("join", {"for_s": 60}), ("leave", {})):
            for key in (None, "agent"):
                assert tell(gateway, action, key, engine=one.url, **more).status_code == 403
        assert list(listed(gateway)) == [gateway.engine.url]
        assert tell(gateway, "join", TRAINER, engine=one.url, for_s=60).status_code == 200
        assert tell(gateway, "leave", TRAINER, engine=one.url).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"engine": "http://127.0.0.1:9"},
        {"engine": "http://127.0.0.1:9", "for_s": 0},
        {"engine": "http://127.0.0.1:9", "for_s": True},
        {"engine": "http://127.0.0.1:9", "for_s": 1e9},
        {"engine": "127.0.0.1:9", "for_s": 60},
        {"engine": None, "for_s": 60},
    ],
)
def test_what_lets_no_engine_in_is_refused(body: dict[str, Any]) -> None:
    with gateway_without_engines() as gateway:
        assert tell(gateway, "join", **body).status_code == 400
        assert len(listed(gateway)) == 1


def test_an_engine_of_the_gateways_own_settings_can_neither_join_for_a_time_nor_leave() -> None:
    with gateway_without_engines() as gateway:
        own = gateway.engine.url
        assert tell(gateway, "join", engine=own, for_s=0.05).status_code == 200
        assert tell(gateway, "leave", engine=own).status_code == 409
        assert list(listed(gateway)) == [own]
