"""Eight agents record into a hub that is stopped and killed at random, and some of them are too.

SPANGRAD_CHAOS_S: how long, in seconds (`make chaos`: 120). SPANGRAD_CHAOS_SEED: which events.

* No call is lost that had finished, none is there twice, each belongs to its rollout and holds the reply
  that the agent got, whichever signal ended the agent.
* What every agent saw is what an untraced run of it sees.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from spangrad.adapters import Grade, ModelCall, calls_of
from spangrad.store.file_store import FileStore
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.chaos.agents import KINDS, key_of
from tests.waiting import wait_until

SECONDS = float(os.environ.get("SPANGRAD_CHAOS_S", "20"))
SEED = int(os.environ.get("SPANGRAD_CHAOS_SEED", "0"))
ROOT = Path(__file__).parents[2]
PACE_S = 0.05
SPANGRAD = [sys.executable, "-c", "from spangrad.cli import main; main()"]
AGENTS = [sys.executable, str(Path(__file__).with_name("agents.py"))]
NEXT_PROCESS = "import spangrad; spangrad.init(); assert spangrad.flush(60)"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 1800)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def program(argv: list[str], folder: Path, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A process in a folder of its own, that is ended with the block; what it says goes to `log`."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def start(argv: list[str], folder: Path, stack: ExitStack, **environment: str) -> "subprocess.Popen[str]":
    return stack.enter_context(program(argv, folder, **environment))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Hub:
    """A hub that can be started again at the same address, on the same file."""

    folder: Path
    stack: ExitStack
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[str] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = [*SPANGRAD, "hub", "--store", "store.duckdb", "--port", str(self.port)]
        self.process = start(argv, self.folder, self.stack)
        wait_until(lambda: answers(f"{self.url}/healthz"), timeout_s=120)

    def end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)


@dataclass
class Agent:
    """An agent that can be started again: it goes on with its next rollout."""

    kind: str
    name: str
    folder: Path
    url: str
    hub_url: str
    stack: ExitStack
    process: "subprocess.Popen[str]" = field(init=False)
    killed: list[tuple[int, int]] = field(default_factory=list)
    """(rollout that was in progress, time) of every SIGKILL."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        argv = [*AGENTS, self.url, f"{self.kind}:{self.name}", "--pace", str(PACE_S)]
        self.process = start(argv, self.folder, self.stack, SPANGRAD_STORE=self.hub_url)
        self._results = len(self.results())

    def begun(self) -> list[int]:
        return [int(line) for line in self.lines("begun")]

    def results(self) -> dict[int, str]:
        return results_of(self.folder, self.name)

    def calls(self) -> dict[str, tuple[dict[str, Any], int]]:
        """Reply and time of each finished call, by its key."""
        lines = [json.loads(line) for line in self.lines("calls")]
        assert len({key for key, _, _ in lines}) == len(lines)
        return {key: (reply, time_ns) for key, reply, time_ns in lines}

    def lines(self, what: str) -> list[str]:
        path = self.folder / f"{self.name}.{what}"
        return path.read_text().splitlines() if path.exists() else []

    def is_at_work(self) -> bool:
        """Whether its present process has finished a rollout."""
        return len(self.results()) > self._results

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.killed.append((0, time.monotonic_ns()))
        assert self.process.wait(60) == -number
        if number == signal.SIGKILL:
            self.killed[-1] = (self.begun()[-1], self.killed[-1][1])


def disturb(hub: Hub, agents: list[Agent], rng: random.Random) -> Counter[str]:
    """End hub and agents at random, and start them again, until the time is over."""
    done: Counter[str] = Counter()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.2, 2.0))
        number = rng.choice((signal.SIGTERM, signal.SIGKILL))
        at_work = [agent for agent in agents if agent.is_at_work()]
        if at_work and rng.random() < 0.4:
            agent = rng.choice(at_work)
            agent.end(number)
            agent.start()
            done[f"agent {number.name}"] += 1
        else:
            hub.end(number)
            time.sleep(rng.uniform(0.0, 2.0))
            hub.start()
            done[f"hub {number.name}"] += 1
    return done


def untraced_results(agents: list[Agent], url: str, folder: Path) -> list[dict[int, str]]:
    """What a program that knows of no tracer sees in the same rollouts."""
    plan = [f"{agent.kind}:{agent.name}:{max(agent.results()) + 1}" for agent in agents]
    with program([*AGENTS, url, *plan], folder) as process:
        assert process.wait(900) == 0, (folder / "log").read_text()
    return [results_of(folder, agent.name) for agent in agents]


def results_of(folder: Path, name: str) -> dict[int, str]:
    path = folder / f"{name}.results"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(index): seen for index, seen in map(str.split, lines)}


def assert_same_reply(call: ModelCall, reply: dict[str, Any]) -> None:
    """What was recorded is what the agent got; of a stream that it left, at least that."""
    if "refused" in reply:
        assert call.error is not None
        return
    message = call.choices[0].message
    calls = message.get("tool_calls") or []
    arguments = calls[0]["function"]["arguments"] if calls else ""
    content = message.get("content") or ""
    assert arguments == reply["arguments"], call
    if reply.get("is_whole", True):
        assert content == reply["content"], call
    else:
        assert content.startswith(reply["content"]), call


def key_of_span(span: Span) -> str | None:
    """The key of the call that a span tells of."""
    if c.INPUT_MESSAGES not in span.attributes:
        return None
    messages = json.loads(span.attributes[c.INPUT_MESSAGES])
    return key_of([{"role": m["role"], "content": m["parts"][0].get("content")} for m in messages])


def waiting_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".seg", ".journal", ".bad")]


def send_what_is_left(folders: list[Path], hub_url: str) -> int:
    """Start a next process where a dead one left spans. Returns in how many folders that was so."""
    left = [folder for folder in folders if waiting_in(folder)]
    for folder in left:
        with program([sys.executable, "-c", NEXT_PROCESS], folder, SPANGRAD_STORE=hub_url) as process:
            assert process.wait(90) == 0, (folder / "log").read_text()
    assert not [path for folder in folders for path in waiting_in(folder)]
    return len(left)


def send_what_a_gateway_left(folder: Path, argv: list[str]) -> int:
    """Start a next gateway where one could not send all before it had to end. Returns in how many folders."""
    if not waiting_in(folder):
        return 0
    with program(argv, folder) as gateway:
        wait_until(lambda: not waiting_in(folder), timeout_s=90)
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(60)
    return 1


def check_calls(agents: list[Agent], calls: list[ModelCall]) -> None:
    """Each finished call is there, once."""
    by_key = {key_of(list(call.messages)): call for call in calls}
    assert len(by_key) == len(calls)
    for agent in agents:
        finished = agent.calls()
        for key, (reply, time_ns) in finished.items():
            ages_ns = [killed_ns - time_ns for _, killed_ns in agent.killed]
            assert key in by_key, f"{agent.name} lost {key}, which had ended {ages_ns} ns before SIGKILLs"
            call = by_key[key]
            assert call.rollout_id is not None and key.startswith(call.rollout_id)
            assert_same_reply(call, reply)
            if agent.name.endswith("gateway") and call.error is None and reply.get("is_whole", True):
                assert call.grade is Grade.EXACT, call.grade_reasons
        cut_short = {f"{agent.name}-{index}" for index in set(agent.begun()) - agent.results().keys()}
        for key, call in by_key.items():
            if call.rollout_id in cut_short:
                continue
            assert key in finished or not key.startswith(f"{agent.name}-"), key


def test_no_call_is_lost_or_doubled_and_no_result_changes_while_hub_and_agents_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        engine = start([sys.executable, "-m", "tests.gateway.stub_engine"], tmp_path / "engine", stack)
        assert engine.stdout is not None
        engine_url = f"http://127.0.0.1:{engine.stdout.readline().strip()}"
        hub = Hub(tmp_path / "hub", stack)
        hub.start()
        port = free_port()
        argv = [*SPANGRAD, "gateway", "--engine", engine_url, "--store", hub.url, "--port", str(port)]
        gateway = start(argv, tmp_path / "gateway", stack)
        gateway_url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{gateway_url}/spangrad/health"))
        agents = [
            Agent(kind, f"{kind}-{way}", tmp_path / f"{kind}-{way}", f"{url}/v1", hub.url, stack)
            for way, url in (("direct", engine_url), ("gateway", gateway_url))
            for kind in KINDS
        ]
        wait_until(lambda: all(agent.is_at_work() for agent in agents), timeout_s=200)
        done = disturb(hub, agents, random.Random(SEED))
        assert done, "nothing was ended: give it more time with SPANGRAD_CHAOS_S"
        for agent in agents:
            (agent.folder / "stop").touch()
        for agent in agents:
            assert agent.process.wait(60) == 0, (agent.folder / "log").read_text()
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(60)
        left = send_what_is_left([agent.folder for agent in agents], hub.url)
        left += send_what_a_gateway_left(tmp_path / "gateway", argv)
        hub.end(signal.SIGTERM)
        untraced = untraced_results(agents, f"{engine_url}/v1", tmp_path / "untraced")
    for agent, expected in zip(agents, untraced, strict=True):
        traced = agent.results()
        assert traced == {index: expected[index] for index in traced}
    with FileStore(tmp_path / "hub" / "store.duckdb") as store:
        calls = calls_of(store)
        told = Counter((span.scope, key) for span in store.spans() if (key := key_of_span(span)))
    assert set(told.values()) == {1}
    check_calls(agents, calls)
    with capsys.disabled():
        print(
            f"\nchaos: {SECONDS:.0f} s, seed {SEED}, {dict(sorted(done.items()))}: {len(calls)} calls, "
            f"{left} folders with spans of dead processes"
        )
