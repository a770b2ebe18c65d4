"""The figures of the store: how fast spans are taken in, what they take on disk, and that neither grows.

All through a hub over HTTP, each request answered when it is on disk.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.store.client import HubClient
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.bench import agent_spans as agents
from tests.bench.capture_benches import FOLDER, cpu_s, rss_mb
from tests.bench.figures import Figure
from tests.bench.hub_load import dealt, hub, send, size_bytes

AGL_STORE = str(FOLDER / "agl_store.py")
BATCH = 50
"""Spans a request: of an agent's long calls, about 10 MB."""


def bench_ingest(agl_python: str | None = None, *, rollouts: int = 8, blocks: int = 3) -> list[Figure]:
    """Long calls, 50 a rollout, each with its whole history; beside DuckDB's append and Agent Lightning."""
    found: dict[str, list[float]] = {"1 writer": [], "8 writers": [], "append": [], "peer": []}
    stored, cpu, append_cpu, sent = [], [], [], 0.0
    for block in range(-1, blocks):
        runs = agents.rollouts(block + 1, rollouts, 50, agents.LONG)
        requests = [body for run in runs for body in agents.bodies(run, BATCH)]
        rates: dict[str, float] = {}
        count = sum(map(len, runs))
        sent = sum(map(len, requests)) / count
        with tempfile.TemporaryDirectory() as folder:
            for name, writers in (("1 writer", 1), ("8 writers", 8)):
                process, path = hub(folder, name)
                with process:
                    before = cpu_s(process.process.pid)
                    rates[name] = count / send(process.url, dealt(requests, writers))
                    cpu.append((cpu_s(process.process.pid) - before) / count)
                    process.terminate()
            rates["append"], size, used = _append_rate(path, folder)
            append_cpu.append(used)
            stored.append(size / count)
        if agl_python is not None:
            rates["peer"] = _peer_rate(agl_python, runs[0])
        if block >= 0:  # the first one warms up
            for name, rate in rates.items():
                found[name].append(rate)
    best = {name: max(values) for name, values in found.items() if values}
    note = f"{_spread(found['1 writer'])} calls/s, {_spread(found['8 writers'])} with 8 writers; "
    note += f"{sent / 1e3:.0f} kB a call sent, {statistics.mean(stored) / 1e3:.1f} kB stored"
    ours = [max(pair) for pair in zip(found["1 writer"], found["8 writers"], strict=True)]
    figures = [
        Figure("long calls through the hub", max(ours), "/s", note=note),
        Figure("long call, CPU of the hub", min(cpu) * 1e3, "ms"),
        Figure(
            "CPU of DuckDB's own Arrow append a call, of the hub's",
            min(append_cpu) / min(cpu),
            "of it",
            note=f"{min(append_cpu) * 1e3:.2f} and {min(cpu) * 1e3:.2f} ms, HTTP and protobuf included",
        ),
        Figure(
            "of DuckDB's own Arrow append of what is stored",
            statistics.median(a / b for a, b in zip(ours, found["append"], strict=True)),
            "of it",
            at_least=0.5,
            note=f"append: {_spread(found['append'])} calls/s",
        ),
    ]
    name = "long calls/s, of Agent Lightning's store"
    if "peer" not in best:
        return [*figures, Figure(name, None, "", at_least=20, note="not installed")]
    ratio = statistics.median(a / b for a, b in zip(ours, found["peer"], strict=True))
    theirs = f"{_spread(found['peer'])} /s, in memory"
    return [*figures, Figure(name, ratio, "times", at_least=20.0, note=theirs)]


def _append_rate(path: Path, folder: str) -> tuple[float, float, float]:
    """Inserting the rows that the hub has stored, as many a commit: calls/s, bytes in all, CPU s a call."""
    with duckdb.connect(str(path), read_only=True) as stored:
        spans: Any = stored.sql("SELECT * FROM spans ORDER BY rowid").to_arrow_table()
        messages: Any = stored.sql("SELECT * FROM messages ORDER BY rowid").to_arrow_table()
    count = len(spans)
    share = len(messages) * BATCH // count
    with duckdb.connect(str(Path(folder, "plain.duckdb"))) as plain:
        plain.execute("SET threads = 2")
        for name, table in (("spans", spans), ("messages", messages)):
            plain.register("given", table.slice(0, 0))
            plain.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        parts = [
            (pa.table(spans.slice(i * BATCH, BATCH)), pa.table(messages.slice(i * share, share)))
            for i in range(count // BATCH)
        ]
        started, used = time.perf_counter(), time.process_time()
        for rows, texts in parts:
            plain.begin()
            plain.register("rows", rows)
            plain.register("texts", texts)
            plain.execute("INSERT INTO spans SELECT * FROM rows")
            plain.execute("INSERT INTO messages SELECT * FROM texts")
            plain.commit()
        seconds, used = time.perf_counter() - started, time.process_time() - used
    return count / seconds, float(spans.nbytes + messages.nbytes), used / count


def _peer_rate(python: str, spans: Sequence[Span]) -> float:
    """Calls/s of the same spans through `agl store`; ids as the lists that it knows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "spans.jsonl")
        with file.open("w") as lines:
            for span in spans:
                attributes = {key: _peer_value(key, value) for key, value in span.attributes.items()}
                told = {"trace_id": span.trace_id, "span_id": span.span_id, "attributes": attributes}
                lines.write(json.dumps(told) + "\n")
        done = subprocess.run(
            [python, AGL_STORE, str(file), str(BATCH)], capture_output=True, text=True, cwd=folder
        )
        if done.returncode:
            raise SystemExit(f"Agent Lightning's store failed: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return float(found["spans_per_s"])


def _peer_value(key: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    return c.unpack_floats(value) if key == c.SAMPLED_LOGPROBS else c.unpack_ints(value)


def bench_growth(*, rollouts: int = 40, turns: int = 200, part: int = 20) -> list[Figure]:
    """Rollouts of 200 turns side by side: time and bytes of a call in the first and the last tenth."""
    runs = agents.rollouts(100, rollouts, turns, agents.STEADY)
    content = [agents.new_content(run) for run in runs]
    unique = sum(map(len, content))
    packed = len(pa.compress(b"".join(content), codec="zstd", asbytes=True))
    took, sent = list[float](), list[float]()
    cpu, read = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        process, path = hub(folder, "growth")
        with process:
            pid = process.process.pid
            for first in range(0, turns, part):
                requests = [
                    body
                    for turn in range(first, first + part)
                    for body in agents.bodies([run[turn] for run in runs], rollouts)
                ]
                for spent in (cpu, read):  # the second time they are read, and known
                    used = cpu_s(pid)
                    seconds = send(process.url, [requests])
                    spent.append((cpu_s(pid) - used) / (part * rollouts))
                    if spent is cpu:
                        took.append(seconds / (part * rollouts))
                sent.append(sum(map(len, requests)) / (part * rollouts))
            process.terminate()
        total = size_bytes(path)
        size = _bytes_by_turn(path, turns, part)
    figures = [
        Figure(
            "bytes on disk a call, last tenth of the first",
            size[-1] / size[0],
            "of it",
            at_most=1.2,
            note=f"{size[0]:.0f} and {size[-1]:.0f} bytes; most {max(size):.0f}",
        ),
        Figure(
            "CPU to store a call, last tenth of the first",
            (cpu[-1] - read[-1]) / (cpu[0] - read[0]),
            "of it",
            at_most=1.2,
            note=f"{(cpu[0] - read[0]) * 1e3:.2f} and {(cpu[-1] - read[-1]) * 1e3:.2f} ms; reading it "
            f"{read[0] * 1e3:.2f} and {read[-1] * 1e3:.2f} ms ({sent[0] / 1e3:.0f}, {sent[-1] / 1e3:.0f} kB)",
        ),
        Figure(
            "time a call with reading it, last tenth of the first",
            took[-1] / took[0],
            "of it",
            at_most=1.2,
            note=f"{took[0] * 1e3:.2f} and {took[-1] * 1e3:.2f} ms",
        ),
        Figure("stored, of the unique content", total / unique, "of it", at_most=1.3, note=_mb(unique)),
        Figure("stored, of the unique content as zstd", total / packed, "of it", note=_mb(packed)),
        Figure("a rollout of 200 turns and 60,000 tokens", total / rollouts / 1e6, "MB", at_most=5.0),
    ]
    return figures


def _bytes_by_turn(path: Path, turns: int, part: int) -> list[float]:
    """Bytes a call of each part of the turns, every part written into a file of its own."""
    found = []
    with duckdb.connect() as con:
        con.execute(f"ATTACH '{path}' AS whole (READ_ONLY)")
        con.execute("CREATE TABLE turns AS SELECT DISTINCT start_ns FROM whole.spans ORDER BY start_ns")
        for first in range(0, turns, part):
            among = f"SELECT start_ns FROM turns WHERE rowid BETWEEN {first} AND {first + part - 1}"
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "part.duckdb")
                con.execute(f"ATTACH '{file}' AS part")
                con.execute(
                    f"CREATE TABLE part.spans AS SELECT * FROM whole.spans WHERE start_ns IN ({among})"
                )
                con.execute(
                    "CREATE TABLE part.messages AS SELECT * FROM whole.messages WHERE message_id IN "
                    "(SELECT unnest(message_ids) FROM part.spans)"
                )
                ((count,),) = con.execute("SELECT count(*) FROM part.spans").fetchall()
                con.execute("DETACH part")
                found.append(file.stat().st_size / count)
    return found


def bench_floor(*, small: int = 20_000, calls: int = 10_000) -> list[Figure]:
    """Batches of 100 from 1 and from 8 writers; what the calls take on disk and the hub in memory."""
    figures: list[Figure] = []
    source = agents.Source(1)
    rates: dict[str, dict[int, float]] = {"small": {}, "agent-size": {}}
    cpu: dict[str, list[float]] = {"small": [], "agent-size": []}
    for writers in (1, 8):
        for kind, count, make in (
            ("small", small, agents.small_spans),
            ("agent-size", calls, agents.agent_calls),
        ):
            requests = agents.bodies(make(source, count), 100)
            with tempfile.TemporaryDirectory() as folder:
                process, path = hub(folder, kind)
                with process, HubClient(process.url) as client:
                    seconds, memory, used = 0.0, list[float](), cpu_s(process.process.pid)
                    for fifth in range(5):
                        some = requests[fifth * len(requests) // 5 : (fifth + 1) * len(requests) // 5]
                        seconds += send(process.url, dealt(some, writers))
                        memory.append(rss_mb(process.process.pid))
                    cpu[kind].append((cpu_s(process.process.pid) - used) / count)
                    live = client.stats()["size_bytes"]
                    process.terminate()
                rates[kind][writers] = count / seconds
                marks = " ".join(f"{mark:.0f}" for mark in memory)
                if kind == "agent-size" and writers == 8:
                    figures += [
                        Figure(
                            f"{count} agent-size calls on disk",
                            live / 1e6,
                            "MB",
                            at_most=count / 100,
                            note=f"{size_bytes(path) / 1e6:.0f} MB when closed",
                        ),
                        Figure(
                            f"hub, grown over {count} agent-size calls",
                            memory[-1] - memory[0],
                            "MB",
                            at_most=32.0,
                            note=f"MB after each fifth: {marks}",
                        ),
                    ]
    for kind, floor in (("small", 5_000.0), ("agent-size", 1_000.0)):
        one, eight = rates[kind][1], rates[kind][8]
        figures += [
            Figure(f"{kind} spans through the hub, 1 writer", one, "/s", at_least=floor),
            Figure(f"{kind} spans through the hub, 8 writers", eight, "/s", at_least=floor),
            Figure(f"{kind} spans, 8 writers of 1", eight / one, "times", at_least=1.0),
            Figure(
                f"{kind} spans a CPU second of the hub",
                1 / min(cpu[kind]),
                "/s",
                at_least=floor,
                note=f"{min(cpu[kind]) * 1e3:.2f} to {max(cpu[kind]) * 1e3:.2f} ms each",
            ),
        ]
    return figures


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
