"""`import spangrad` is small and light, and headers go where they may."""

import subprocess
import sys

import pytest

import spangrad
from spangrad.tracer.propagation import Destinations


def test_a_mistyped_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'inti'"):
        spangrad.inti  # noqa: B018


def test_importing_and_setting_up_loads_nothing_heavy() -> None:
    code = """
import sys
heavy = {"torch", "ray", "vllm", "duckdb", "starlette", "numpy", "httpx", "httpx2", "langchain_core"}
heavy |= {"asyncio", "multiprocessing.pool", "concurrent.futures.process", "requests", "pydantic"}
import spangrad
assert not {"opentelemetry", *heavy} & set(sys.modules)
spangrad.init(store=sys.argv[1])
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, "store.duckdb"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("10.1.2.3", True),
        ("192.168.0.9", True),
        ("gateway.example.org", True),
        ("a.internal.example", True),
        ("internal.example", True),
        ("api.openai.com", False),
        ("8.8.8.8", False),
        ("notinternal.example", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_headers_go_only_to_private_and_named_hosts(host: str, allowed: bool) -> None:
    destinations = Destinations(["https://gateway.example.org:8443/v1", "*.internal.example"])
    assert destinations.allow(host) is allowed
