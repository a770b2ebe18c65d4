"""The figures of capture: what recording costs the agent, what the gateway costs a call, what both hold.

Each function gives figures with their limits; CPU time and ratios within one run wherever a limit allows it.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.call_cost import PEERS
from tests.bench.figures import Figure

FOLDER = Path(__file__).parent
CALL_COST, GATEWAY_LOAD, MEMORY = (
    str(FOLDER / f"{name}.py") for name in ("call_cost", "gateway_load", "tracer_memory")
)
GATEWAY = """import sys
from spangrad.tracer.gateway import GatewayConfig, serve
engine, store, spool, port = sys.argv[1:]
serve(GatewayConfig(engine_url=engine, store=store, spool_dir=spool, port=int(port)))
"""
TRACERS = ("spangrad", "spangrad-hub")


def bench_calls(pythons: Sequence[str] = (), *, rounds: int = 60) -> list[Figure]:
    """CPU that recording adds to a call, in hand-written spans; peers where they are installed."""
    figures: list[Figure] = []
    for kind in ("small", "agent"):
        for tracer in (*TRACERS, *PEERS):
            python = sys.executable if tracer in TRACERS else _python_with(PEERS[tracer], pythons)
            if python is None:
                figures.append(Figure(f"{tracer}, {kind} call", None, "", note="not installed"))
                continue
            found = program(python, CALL_COST, tracer, kind, "--rounds", rounds)
            for whose, limit in (("thread", 1.0), ("process", 4.0)):
                added, span = found[whose]["on"], found["thread"]["span"]
                figures.append(
                    Figure(
                        f"{tracer}, {kind} call, {whose}",
                        added / span,
                        "hand-written spans",
                        at_most=limit if tracer in TRACERS else None,
                        note=f"{added * 1e6:.0f} µs; the span {span * 1e6:.0f} µs; "
                        f"minima {found[whose]['on, minima'] * 1e6:.0f} and "
                        f"{found['thread']['span, minima'] * 1e6:.0f} µs",
                    )
                )
    found = program(sys.executable, CALL_COST, "spangrad", "long", "--rounds", max(4, rounds // 6))
    allowed = 1.3 * found["first"] + found["reading"]
    note = (
        f"{found['last'] * 1e6:.0f} µs; 1st {found['first'] * 1e6:.0f} µs, reading {found['bytes']:,} bytes "
    )
    note += f"{found['reading'] * 1e6:.0f} µs"
    name = "200th call of an agent, of 1.3 times its 1st + reading its bytes"
    return [*figures, Figure(name, found["last"] / allowed, "of it", at_most=1.0, note=note)]


def _python_with(module: str, pythons: Sequence[str]) -> str | None:
    for python in (sys.executable, *pythons):
        check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
            return python
    return None


def bench_gateway(agl_server: str | None = None, *, calls: int = 640, blocks: int = 5) -> list[Figure]:
    """Direct calls, calls through the gateway and, if it is there, through Agent Lightning's, in turns."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served(GATEWAY_LOAD, "engine") as engine,
        gateway_process(engine, folder) as (gateway, pid),
    ):
        return _gateway_figures(engine, gateway, pid, agl_server, folder, calls, blocks)


def _gateway_figures(
    engine: str, gateway: str, pid: int, agl_server: str | None, folder: str, calls: int, blocks: int
) -> list[Figure]:
    url = f"{gateway}/rollout/bench/0"
    found: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, url: str, pid: int, *options: object) -> None:
        before = cpu_s(pid)
        measured = program(sys.executable, GATEWAY_LOAD, "load", url, *options)
        measured["cpu_ms"] = (cpu_s(pid) - before) / measured["calls"] * 1e3
        found.setdefault(name, []).append(measured)

    with _agent_lightning(agl_server, engine, folder) as other:
        for block in range(-1, blocks):
            if block == 0:
                found.clear()  # all are warm now
            count = calls if block >= 0 else 200
            run("fast", url, pid, "--calls", count)
            if other is not None:
                run("other", other[0], other[1], "--calls", count // 4)
            for name, where in (("direct", engine), ("gateway", url)):
                run(name, where, pid, "--calls", count, "--delay-s", 0.25)
                run(f"{name} stream", where, pid, "--calls", count // 2, "--delay-s", 0.25, "--stream")

    def best(name: str, key: str) -> float:
        values = [one[key] for one in found[name]]
        return float(max(values) if key == "per_s" else min(values))

    def added(name: str, key: str) -> float:
        both = zip(found[name], found[name.replace("gateway", "direct")], strict=True)
        return float(min(ours[key] - direct[key] for ours, direct in both))

    rate, cpu = best("fast", "per_s"), best("fast", "cpu_ms")
    slow = f"32 clients, engine takes 0.125 to 0.375 s; best of {blocks} blocks"
    figures = [
        Figure("gateway, added latency, p50", added("gateway", "p50"), "ms", at_most=1.5, note=slow),
        Figure("gateway, added latency, p99", added("gateway", "p99"), "ms", at_most=5.0, note=slow),
        Figure("gateway, first streamed byte later, p50", added("gateway stream", "p50"), "ms", at_most=2.0),
        Figure("gateway, first streamed byte later, p99", added("gateway stream", "p99"), "ms"),
        Figure("gateway, CPU a call", cpu, "ms", note="saturated"),
        Figure("gateway, CPU a call of 16 chunks", best("gateway stream", "cpu_ms"), "ms"),
        Figure("gateway, calls/s", rate, "/s", note="saturated, 32 clients"),
    ]
    if other is None:
        note = "not installed; recorded on this machine: 2.7 to 4.0 ms of CPU a call"
        return [*figures, Figure("calls/s, of Agent Lightning's gateway", None, "", at_least=5, note=note)]
    theirs, their_cpu = best("other", "per_s"), best("other", "cpu_ms")
    return [
        *figures,
        Figure(
            "calls/s, of Agent Lightning's", rate / theirs, "times", at_least=5.0, note=f"{theirs:.0f} /s"
        ),
        Figure("CPU a call, of Agent Lightning's", cpu / their_cpu, "of it", note=f"{their_cpu:.2f} ms"),
    ]


@contextmanager
def _agent_lightning(server: str | None, engine: str, folder: str) -> Iterator[tuple[str, int] | None]:
    """Its gateway (1.0.2) before the same engine: base URL of an agent, and process id."""
    if server is None:
        yield None
        return
    port = free_port()
    arguments = [
        server,
        "host=127.0.0.1",
        f"port={port}",
        "default_proxy.model_name=stub",
        "hydra.run.dir=run",
    ]
    with subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            base = f"http://127.0.0.1:{port}"
            wait_for(f"{base}/healthz")
            _post(f"{base}/api/models", [{"model": "stub", "endpoint": f"{engine}/v1"}])
            rollout_id = _post(f"{base}/api/rollouts", [{"input": {}}])[0]["rollout_id"]
            yield f"{base}/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai", process.pid
        finally:
            process.terminate()


def bench_memory(*, calls: int = 100_000) -> list[Figure]:
    """Growth of the gateway and of the tracer (hub down, small spool) after the first fifth of many calls."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, served(GATEWAY_LOAD, "engine") as engine:
        with served(GATEWAY_LOAD, "hub") as hub, gateway_process(engine, folder, store=hub) as (gateway, pid):
            marks = []
            for _ in range(5):
                program(sys.executable, GATEWAY_LOAD, "load", f"{gateway}/rollout/m/0", "--calls", calls // 5)
                marks.append(rss_mb(pid))
        note = "MB after each fifth: " + " ".join(f"{mark:.0f}" for mark in marks)
        grown = marks[-1] - marks[0]
        figures.append(Figure(f"gateway, grown over {calls} calls", grown, "MB", at_most=8.0, note=note))
    found = program(sys.executable, MEMORY, "--calls", calls)
    grown = found["rss_mb"][-1] - found["rss_mb"][0]
    note = "MB after each fifth: " + " ".join(f"{mark:.0f}" for mark in found["rss_mb"])
    note += f"; spool {found['spool_mb']:.1f} of {found['bound_mb']:.0f} MB, {found['lost']} spans lost"
    return [
        *figures,
        Figure(f"tracer, grown over {calls} calls, hub down", grown, "MB", at_most=8.0, note=note),
        Figure("tracer, spool, of its bound", found["spool_mb"] / found["bound_mb"], "of it", at_most=1.0),
    ]


IMPORT = """import json, os, time
started = time.process_time()
{code}
took = time.process_time() - started
rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
print(json.dumps({{"s": took, "mb": rss}}))
os._exit(0)
"""


def bench_imports(*, rounds: int = 7) -> list[Figure]:
    """CPU seconds and memory beyond the interpreter's, beside those of `import httpx`."""
    works = {
        "nothing": "pass",
        "import spangrad": "import spangrad",
        "spangrad.init()": "import spangrad, tempfile; spangrad.init(store=tempfile.mkdtemp() + '/s')",
        "import httpx": "import httpx",
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, code in works.items():
            found[name].append(program(sys.executable, "-c", IMPORT.format(code=code)))
    least = {
        name: {key: min(one[key] for one in values) for key in ("s", "mb")} for name, values in found.items()
    }
    bare, httpx = least["nothing"], least["import httpx"]
    figures: list[Figure] = []
    for name in ("import spangrad", "spangrad.init()"):
        own = {key: least[name][key] - bare[key] for key in ("s", "mb")}
        beside = {key: httpx[key] - bare[key] for key in ("s", "mb")}
        for key, unit, limit in (("s", "s", 0.5), ("mb", "MB", 40.0)):
            note = f"{own[key] / beside[key]:.2f} of `import httpx`"
            figures.append(Figure(f"{name}, {unit}", own[key], unit, at_most=limit, note=note))
    return figures


def program(python: str, *arguments: object) -> dict[str, Any]:
    """Run a program that prints one line of JSON."""
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _ROOT})
    if done.returncode:
        raise SystemExit(f"{command} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_ROOT = str(FOLDER.parent.parent)


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """A program that prints its URL and serves until its stdin ends."""
    command, pipe = [sys.executable, *arguments], subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": _ROOT}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin and process.stdout
        with process.stdin:
            yield process.stdout.readline().strip()


@contextmanager
def gateway_process(engine: str, folder: str, *, store: str | None = None) -> Iterator[tuple[str, int]]:
    """A gateway in a process of its own: URL and process id."""
    port = free_port()
    target = store or str(Path(folder, "store.duckdb"))
    arguments = [engine, target, str(Path(folder, "spool")), str(port)]
    with subprocess.Popen([sys.executable, "-c", GATEWAY, *arguments]) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/spangrad/health")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(url: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _post(url: str, data: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(data).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no VmRSS")
