from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.gateway.gateway_setup import GatewayFactory, Setup, gateway_before
from tests.gateway.stub_engine import StubEngine, stub_engine


@pytest.fixture(scope="session")
def stub() -> Iterator[StubEngine]:
    with stub_engine() as running_stub:
        yield running_stub


@pytest.fixture
def engine(stub: StubEngine) -> Iterator[StubEngine]:
    stub.reset()
    yield stub
    stub.reset()


@pytest.fixture
def start_gateway(engine: StubEngine) -> Iterator[GatewayFactory]:
    with ExitStack() as stack:

        def start(**settings: Any) -> Setup:
            return stack.enter_context(gateway_before(engine, **settings))

        yield start
        engine.release.set()
        engine.tell_version.set()
        engine.tell_settings.set()


@pytest.fixture
def gateway(start_gateway: GatewayFactory) -> Setup:
    return start_gateway()
