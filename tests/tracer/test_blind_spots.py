"""A client whose internals have changed is said, once, and counted; the agent goes on."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from spangrad.tracer import blind_spots, capture

AGENT = """
import spangrad
spangrad.init(store="store.duckdb")
import httpx_aiohttp, openai, openai
spangrad.flush()
spangrad.shutdown()
spangrad.init(store="store.duckdb")
from spangrad.tracer import blind_spots
print(len(blind_spots.found()))
"""


def write_package(folder: Path, name: str, version: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )


@pytest.mark.slow
def test_a_client_whose_internals_changed_is_said_once_and_counted_and_works_on(tmp_path: Path) -> None:
    write_package(tmp_path, "httpx_aiohttp", "9.1", "class AiohttpTransport:\n    pass\n")
    code = "class Other: pass\nclass DefaultHttpxClient(Other): pass\n"
    write_package(tmp_path, "openai", "99.0", code)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(tmp_path), str(root / "src")])
    done = subprocess.run(
        [sys.executable, "-c", AGENT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = (
        "httpx_aiohttp 9.1 has no AiohttpTransport.handle_async_request",
        "openai 99.0 sends DefaultHttpxClient with 'openai'",
        "openai 99.0 has no DefaultAsyncHttpxClient",
    )
    assert done.stdout == "3\n"
    for spot in expected:
        assert done.stderr.count(f"{spot}: calls through it are not recorded") == 1
    assert f"spangrad could not watch 3 places: {'; '.join(expected)}" in done.stderr


def test_installed_clients_have_no_blind_spot() -> None:
    assert capture.missing_targets(httpx) == []
    assert blind_spots.in_client(openai) == []
