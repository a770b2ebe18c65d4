"""Agents, gateway, engines, hub and trainer as a discrete-event model.

    agent:   lease -> turns of (environment, gateway, engine; the span goes to the hub) -> end
    trainer: wait for groups as `Pace` says -> credit -> learn -> publish

Hub and gateway are one process each: they do one thing at a time, as DuckDB's writer and an event loop do.
An engine slows down with the calls that it has. `Costs` were measured, a `Cluster` is assumed.
"""

import math
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from spangrad.trainer.rollouts.admission import Group, Pace

PARTS = ("agents", "engines", "gateway", "hub", "learner")
Events = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Costs:
    """CPU seconds of one core, as `python -m tests.bench.run NAME` measures them."""

    gateway_call_s: float = 0.36e-3
    """`gateway`: a call of 10 messages."""
    hub_call_s: float = 0.95e-3
    """`ingest`: a long call, its whole history sent, HTTP and protobuf included."""
    hub_rollout_s: float = 1.4e-3
    """`queue`: all books of a rollout."""
    credit_call_s: float = 0.30e-3
    """`cluster --measure`: a call read from the store, in its tree, credited."""


@dataclass(frozen=True)
class Cluster:
    """A cluster and its agents."""

    agents: int
    engines: int = 64
    environment_s: float = 5.0
    """Mean time of a turn outside the model; lognormal with sigma 1."""
    turns: int = 20
    call_tokens: int = 200
    """Sampled in a call."""
    token_s: float = 0.015
    """A token of an engine that has one call; with `slowing` more for each further one."""
    slowing: float = 0.01
    learner_tokens_per_s: float = 100_000
    publish_s: float = 4.0
    group_size: int = 8
    max_staleness: int = 1

    @property
    def pace(self) -> Pace:
        """Updates that keep all agents at work: as many rollouts as there are agents."""
        groups = math.ceil(self.agents / self.group_size)
        return Pace(groups_per_update=groups, max_staleness=self.max_staleness, updates=10**9)


@dataclass
class Outcome:
    """What the model did between its first update and its end."""

    seconds: float = 0.0
    calls: int = 0
    rollouts: int = 0
    updates: int = 0
    stalest: int = 0
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """By part; of the engines the time that calls spent there, of the agents the time at work."""
    hub_wait_s: float = 0.0
    """Longest wait for the hub."""

    def share(self, part: str, of: float = 1.0) -> float:
        """Utilisation of a part that there are `of`."""
        return self.busy_s[part] / (self.seconds * of)


class Model:
    """One run of the model."""

    def __init__(self, cluster: Cluster, costs: Costs, seed: int = 0) -> None:
        """Everything idle."""
        self._cluster, self._costs = cluster, costs
        self._random = random.Random(seed)
        self._env = simpy.Environment()
        self._hub = simpy.Resource(self._env)
        self._gateway = simpy.Resource(self._env)
        self._load = [0] * cluster.engines
        self._pace = cluster.pace
        self._queue: deque[str] = deque()
        """A group's name, once for each of its rollouts that no agent has."""
        self._groups: dict[str, Group] = {}
        self._queued = self._env.event()
        self._ended = self._env.event()
        self._admitted = self._learned = self._version = 0
        self._serving = self._env.event()
        self._serving.succeed()
        self._all, self._begun = Outcome(), Outcome()

    def run(self, updates: int) -> Outcome:
        """Go on until so many updates after the first are made."""
        self._admit()
        for _ in range(self._cluster.agents):
            self._env.process(self._agent())
        self._env.run(self._env.process(self._trainer(updates)))
        whole, begun = self._all, self._begun
        return Outcome(
            self._env.now - begun.seconds,
            whole.calls - begun.calls,
            whole.rollouts - begun.rollouts,
            whole.updates - begun.updates,
            whole.stalest,
            {part: whole.busy_s[part] - begun.busy_s[part] for part in PARTS},
            whole.hub_wait_s,
        )

    def _admit(self) -> None:
        room = self._pace.room(
            admitted=self._admitted, learned=self._learned, update_index=self._version, refills=0
        )
        for number in range(self._admitted, self._admitted + room):
            name = str(number)
            self._groups[name] = Group(name, self._cluster.group_size)
            self._queue.extend([name] * self._cluster.group_size)
        self._admitted += room
        if room:
            self._queued.succeed()
            self._queued = self._env.event()

    def _agent(self) -> Events:
        while True:
            while not self._queue:
                yield self._queued
            name = self._queue.popleft()
            started = self._env.now
            yield from self._served_by(self._hub, "hub", self._costs.hub_rollout_s / 2)
            self._begin(name)
            engine = min(range(self._cluster.engines), key=self._load.__getitem__)
            for _ in range(self._cluster.turns):
                mean = self._cluster.environment_s
                yield self._env.timeout(self._random.lognormvariate(math.log(mean) - 0.5, 1.0))
                yield from self._call(engine)
            yield from self._served_by(self._hub, "hub", self._costs.hub_rollout_s / 2)
            self._all.rollouts += 1
            self._all.busy_s["agents"] += self._env.now - started
            group = self._groups[name]
            self._groups[name] = replace(group, unfinished=group.unfinished - 1)
            if group.unfinished == 1:
                self._ended.succeed()
                self._ended = self._env.event()

    def _begin(self, name: str) -> None:
        group = self._groups[name]
        if group.oldest_version is None:  # versions only grow
            self._groups[name] = replace(group, oldest_version=self._version)

    def _call(self, engine: int) -> Events:
        yield from self._served_by(self._gateway, "gateway", self._costs.gateway_call_s)
        yield self._serving
        self._load[engine] += 1
        cluster = self._cluster
        slower = 1 + cluster.slowing * (self._load[engine] - 1)
        yield self._spent("engines", cluster.call_tokens * cluster.token_s * slower)
        self._load[engine] -= 1
        self._all.calls += 1
        self._env.process(self._served_by(self._hub, "hub", self._costs.hub_call_s))

    def _served_by(self, part: simpy.Resource, name: str, seconds: float) -> Events:
        asked = self._env.now
        with part.request() as turn:
            yield turn
            if name == "hub":
                self._all.hub_wait_s = max(self._all.hub_wait_s, self._env.now - asked)
            yield self._spent(name, seconds)

    def _spent(self, part: str, seconds: float) -> simpy.Event:
        self._all.busy_s[part] += seconds
        return self._env.timeout(seconds)

    def _trainer(self, updates: int) -> Events:
        cluster = self._cluster
        for number in range(updates + 1):
            while (taken := self._pace.taken(list(self._groups.values()), self._version)) is None:
                yield self._ended
            rollouts = len(taken) * cluster.group_size
            calls = rollouts * cluster.turns
            for group in taken:
                self._all.stalest = max(self._all.stalest, self._version - (group.oldest_version or 0))
                del self._groups[group.group_id]
            yield self._env.timeout(calls * self._costs.credit_call_s)
            yield self._spent("learner", calls * cluster.call_tokens / cluster.learner_tokens_per_s)
            self._serving = self._env.event()
            yield self._env.timeout(cluster.publish_s)
            self._serving.succeed()
            self._version += 1
            self._learned += len(taken)
            self._all.updates += 1
            self._admit()
            if number == 0:
                self._begun = Outcome(
                    self._env.now, self._all.calls, self._all.rollouts, 1, 0, dict(self._all.busy_s)
                )
