"""A hub that is killed again and again while several send to it: what it acknowledged is there, once.

SPANGRAD_KILLS: how often (`make kills`: 200). SPANGRAD_KILLS_SEED: which moments, and what is sent.

* Every span, log record and reward of an acknowledged request is in the file, as it was sent, and once,
  however often it was sent again; a request that was never acknowledged is there whole or not at all.
* A hub that is killed while it opens what another one left loses nothing either.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from spangrad.errors import HubUnreachableError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord, Reward, Span
from spangrad.trainer.processes import free_port
from tests.store.building import conversation, new_trace, request
from tests.waiting import wait_until

KILLS = int(os.environ.get("SPANGRAD_KILLS", "12"))
SEED = int(os.environ.get("SPANGRAD_KILLS_SEED", "0"))
SENDERS = 6
TURNS = 6
"""Model calls of a rollout; they come in several requests."""
AGAIN = 0.8
"""Share of the requests without an answer that their sender sends again, until they have one."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 20 * KILLS)]


@dataclass
class Sent:
    """One request."""

    spans: Sequence[Span] = ()
    logs: Sequence[LogRecord] = ()
    rewards: Sequence[Reward] = ()
    is_acknowledged: bool = False


@dataclass
class Sender:
    """Sends rollouts of its own, and remembers what was acknowledged."""

    number: int
    url: str
    stop: threading.Event
    sent: list[Sent] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)

    def work(self) -> None:
        rng = random.Random(f"{SEED}-{self.number}")
        try:
            with HubClient(self.url, retry_s=0.0) as client:
                for index in range(10**9):
                    for one in requests_of(f"w{self.number}-{index}", rng):
                        if self.stop.is_set():
                            return
                        self.sent.append(one)
                        self._send(client, one, rng)
        except BaseException as error:
            self.failed.append(error)

    def _send(self, client: HubClient, one: Sent, rng: random.Random) -> None:
        is_given_up = rng.random() > AGAIN
        while True:
            try:
                if one.spans:
                    client.put_otlp(request(one.spans))
                elif one.logs:
                    client.put_logs(encode_logs(one.logs))
                else:
                    client.put_rewards(one.rewards)
            except HubUnreachableError:
                if is_given_up:
                    return
                time.sleep(0.02)
            else:
                one.is_acknowledged = True
                return


def requests_of(rollout_id: str, rng: random.Random) -> Iterator[Sent]:
    """A rollout whose calls, records, verdicts and rewards come in requests of their own, in any order."""
    trace_id = new_trace()
    spans = conversation(trace_id, rollout_id, TURNS)
    cuts = sorted(rng.sample(range(1, TURNS), rng.randint(1, 3)))
    parts = [spans[start:stop] for start, stop in zip([0, *cuts], [*cuts, TURNS], strict=True)]
    requests = [Sent(spans=part) for part in parts]
    noted = [
        LogRecord(trace_id, span.span_id, n + 1, 0, "note", body=rollout_id) for n, span in enumerate(spans)
    ]
    verdict = {"gen_ai.evaluation.name": "verdict", "gen_ai.evaluation.score.value": 0.5}
    judged = LogRecord(trace_id, spans[-1].span_id, 9, 0, "gen_ai.evaluation.result", attributes=verdict)
    requests += [Sent(logs=noted), Sent(logs=[judged])]
    timed = [Reward(rollout_id, float(n), name=f"timed-{n}", time_ns=n + 1, attempt=0) for n in range(3)]
    now = [Reward(rollout_id, 1.0, name="now", attempt=0)]
    requests += [Sent(rewards=timed), Sent(rewards=now)]
    if rng.random() < 0.5:
        rng.shuffle(requests)
    yield from requests


class Hub:
    """`spangrad hub` on one file and one port."""

    def __init__(self, path: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._argv = [sys.executable, "-m", "spangrad", "hub", "--store", str(path), "--port", str(port)]
        self._log = path.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)

    def answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(60)


@contextmanager
def sending(senders: Sequence[Sender]) -> Iterator[None]:
    threads = [threading.Thread(target=sender.work) for sender in senders]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for sender in senders:
            sender.stop.set()
        for thread in threads:
            thread.join(120)


def kill_and_restart(hub: Hub, rng: random.Random, start_s: float) -> int:
    """Kill the hub `KILLS` times. Returns how often that was before it answered."""
    early = 0
    for number in range(KILLS):
        if number % 5 == 4:  # while it opens what the last one left
            time.sleep(rng.uniform(0.4, 1.0) * start_s)
            early += not hub.answers()
        else:
            wait_until(hub.answers, timeout_s=120)
            time.sleep(rng.uniform(0.0, 0.6))
        assert hub.end(signal.SIGKILL) == -signal.SIGKILL
        hub.start()
    return early


def test_what_a_hub_acknowledged_is_there_once_however_often_it_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.duckdb"
    hub, stop = Hub(path, free_port()), threading.Event()
    began = time.monotonic()
    hub.start()
    wait_until(hub.answers, timeout_s=120)
    start_s = time.monotonic() - began
    senders = [Sender(number, hub.url, stop) for number in range(SENDERS)]
    with sending(senders):
        early = kill_and_restart(hub, random.Random(SEED), start_s)
        wait_until(hub.answers, timeout_s=120)
        time.sleep(0.5)
    took_s = time.monotonic() - began
    assert hub.end(signal.SIGTERM) == 0
    assert [error for sender in senders for error in sender.failed] == []
    sent = [one for sender in senders for one in sender.sent]
    acknowledged = [one for one in sent if one.is_acknowledged]
    assert len(acknowledged) > KILLS and len(acknowledged) < len(sent)
    with FileStore(path, read_only=True) as store:
        check(sent, "spans", store.spans(), lambda span: digest(encode_request([span])))
        check(sent, "logs", store.logs(), lambda record: digest(encode_logs([record])))
        rewards = store.rewards()
        given = [reward for reward in rewards if reward.name != "verdict"]
        check(sent, "rewards", given, lambda reward: (reward.rollout_id, reward.name, reward.value))
        check_verdicts(sent, [reward for reward in rewards if reward.name == "verdict"])
        size_mb = store.stats()["size_bytes"] / 1e6
    with capsys.disabled():
        print(
            f"\nkills: {KILLS} in {took_s:.0f} s, {early} of them while it started, seed {SEED}: "
            f"{len(acknowledged)} of {len(sent)} requests acknowledged, {size_mb:.0f} MB"
        )


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def check(sent: Sequence[Sent], what: str, stored: Iterable[Any], key: Callable[[Any], object]) -> None:
    """Everything of acknowledged requests is stored as it was sent; nothing is stored twice, or in part."""
    found = Counter(key(thing) for thing in stored)
    assert set(found.values()) <= {1}
    known = 0
    for one in sent:
        keys = [key(thing) for thing in getattr(one, what)]
        there = sum(found[each] for each in keys)
        assert there == len(keys) or (there == 0 and not one.is_acknowledged), one
        known += there
    assert known == sum(found.values())


def check_verdicts(sent: Sequence[Sent], rewards: Sequence[Reward]) -> None:
    """A verdict is one reward of its rollout as soon as both it and the call that it judges are stored."""
    found = Counter(reward.rollout_id for reward in rewards)
    assert set(found.values()) <= {1}
    acknowledged = [one for one in sent if one.is_acknowledged]
    rollouts = {span.span_id: str(span.rollout_id) for one in acknowledged for span in one.spans}
    judged = [record.span_id for one in acknowledged for record in one.logs if record.attributes]
    assert all(found[rollouts[span_id]] == 1 for span_id in judged if span_id in rollouts)
