"""Engines that a run starts itself, as Ray actors: section `[cluster.engines]`.

    actor: start vLLM, wait until it answers -> wait until it has ended -> (started again by the run)
    run:   gateway, it is there -> (it died) gateway, its calls wait -> it is back: publish, then calls again

A thread of the run's process looks after them. Each is a process of Ray's, on its place, and vLLM below it.

Invariants:
* calls for an engine that died wait until it is back and has the current weights, two minutes at most;
* whatever ends the run, the actors end with it, and vLLM with them;
* no engine listens where other networks reach it.

Knows Ray, engines and the gateway's own routes. Does not know what is published.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import ray

from spangrad.errors import ClusterError, EngineError, PublishError
from spangrad.trainer.cluster import reserved, wait_for
from spangrad.trainer.cluster_config import OwnEnginesConfig, may_listen
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.places import Mark, Places, node_address
from spangrad.trainer.processes import free_port, require_free_port
from spangrad.trainer.serving.control import Control
from spangrad.trainer.serving.engine import Engine, EngineConfig, is_cpu_build
from spangrad.trainer.serving.served import ServedPolicy

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often the gateway is told that they are there."""
STAY_S: Final = 60.0
"""How long the gateway gives them calls without being told again."""
LONGEST_PAUSE_S: Final = 60.0
"""Between two tries to start one again."""


@contextmanager
def engines_and_places(config: TrainConfig, served: ServedPolicy, key: str | None) -> Iterator[None]:
    """Have what `[cluster]` says, for as long as the block lasts: places, and engines that serve.

    Args:
        config: Of the run.
        served: Publishes to its engines.
        key: The trainer's, for the gateway.

    Raises:
        ClusterError: The cluster has no places, or a machine of it does not see the run's folder.
        EngineError: An engine can't be started.
    """
    workers = config.agent.workers if config.production is None else 0
    with ExitStack() as held:
        mark = held.enter_context(reserved(config.cluster, config.learner, workers, config.folder))
        if config.cluster.engines is not None:
            held.enter_context(OwnEngines(config, config.cluster.engines, served, key, mark))
        yield


class EngineActor:
    """One vLLM server; the body of a Ray actor, whose process it ends with."""

    def __init__(self, config: EngineConfig, *, has_gpus: bool, is_local: bool, mark: Mark | None) -> None:
        """Start nothing yet.

        Args:
            config: How to serve; host and port are found here.
            has_gpus: Whether it was given any.
            is_local: It is asked from this machine alone.
            mark: What shows whether this machine sees the run's folder.
        """
        self._config = config
        self._has_gpus = has_gpus
        self._is_local = is_local
        self._mark = mark
        self._engine: Engine | None = None

    def serve(self, port: int | None) -> str:
        """Start the server, at that port if it is free, and wait until it answers; returns its address.

        Raises:
            ClusterError: This machine can't be one for engines.
            EngineError: It can't be started.
        """
        host = "127.0.0.1" if self._is_local else node_address()
        where = f"an engine at {host}"
        if not may_listen(host):
            raise ClusterError(
                f"{where} would take new weights from everybody who reaches that public address; start"
                " Ray's node with a private one (`ray start --node-ip-address`)"
            )
        if self._mark is not None:
            self._mark.check("an engine")
        if is_cpu_build() == self._has_gpus:
            built, given = ("CPUs", "a GPU") if self._has_gpus else ("GPUs", "none")
            raise EngineError(
                f"{where}: vLLM there is built for {built}, and cluster.engines.gpus gives it {given};"
                " install the other build, or set cluster.engines.gpus"
            )
        if self._engine is not None:
            self._engine.stop()
        self._engine = Engine(replace(self._config, host=host, port=_port(host, port)))
        self._engine.start().wait_ready()
        return self._engine.url

    def ended(self) -> str:
        """Wait until the server has ended; says how."""
        assert self._engine is not None
        return self._engine.wait_ended()


@dataclass(slots=True)
class _Own:
    """One engine, as the run sees it."""

    place: int
    actor: Any
    doing: Any
    """What is waited for: that it serves, or that it has ended."""
    url: str | None = None
    is_serving: bool = False
    failures: int = 0
    """Tries to start it again that failed, since it served."""
    not_before: float = 0.0
    """When it may be tried again, on the monotonic clock."""


class OwnEngines:
    """All engines of a run; `with` starts them, waits until they serve, and ends them."""

    def __init__(
        self,
        config: TrainConfig,
        engines: OwnEnginesConfig,
        served: ServedPolicy,
        key: str | None,
        mark: Mark | None,
    ) -> None:
        """Start nothing yet."""
        self._config = config
        self._engines = engines
        self._served = served
        self._key = key
        self._mark = mark
        self._own: list[_Own] = []
        self._is_ending = threading.Event()

    def __enter__(self) -> "OwnEngines":
        """Start them all, and have the gateway know them."""
        self._check_keys()
        with ExitStack() as begun:
            self._places = begun.enter_context(
                Places(
                    *("engines", self._needs(), self._engines.count, self._engines.placement),
                    within_s=self._config.cluster.wait_s,
                )
            )
            begun.callback(self._end)
            self._own = [self._hired(place) for place in range(self._engines.count)]
            for own in self._own:
                own.url, own.is_serving = wait_for(own.doing), True
                own.doing = own.actor.ended.remote()
            self._refuse_others()
            self._served.use(self._urls())
            self._speak_for()
            for work in (self._look_after, self._keep_speaking):
                threading.Thread(target=work, daemon=True, name="engines").start()
            self._begun = begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._begun.close()

    def _needs(self) -> dict[str, float]:
        engines = self._engines
        gpus = {"GPU": float(engines.gpus)} if engines.gpus else {}
        return {"CPU": float(engines.cpus), **gpus, **engines.resources}

    def _hired(self, place: int, port: int | None = None) -> _Own:
        engines, config = self._engines, self._config
        hired = cast(Any, ray.remote)(EngineActor).options(
            num_cpus=engines.cpus,
            num_gpus=engines.gpus,
            resources=dict(engines.resources),
            **self._places.options(place),
        )
        actor = hired.remote(
            engine_config(config, engines, place),
            has_gpus=engines.gpus > 0,
            is_local=config.cluster.is_local,
            mark=self._mark,
        )
        return _Own(place, actor, actor.serve.remote(port))

    def _look_after(self) -> None:
        while not self._is_ending.is_set():
            for own in self._own:
                if own.doing is None and time.monotonic() >= own.not_before:
                    self._start_again(own)
            waited_for = [own.doing for own in self._own if own.doing is not None]
            came = ray.wait(waited_for, timeout=1.0)[0] if waited_for else []
            if not waited_for:
                self._is_ending.wait(1.0)
            for own in self._own:
                if own.doing in came and not self._is_ending.is_set():
                    self._happened(own)

    def _happened(self, own: _Own) -> None:
        """It serves, has ended, or its actor is gone."""
        try:
            said = wait_for(own.doing)
        except Exception as error:  # boundary: the others must be looked after whatever happened to one
            said, has_failed = str(error), True
        else:
            has_failed = False
        was_serving, own.doing = own.is_serving, None
        if was_serving or has_failed:
            own.is_serving = False
            pause_s = 0.0 if was_serving else min(2.0**own.failures, LONGEST_PAUSE_S)
            own.failures += not was_serving
            own.not_before = time.monotonic() + pause_s
            logger.warning("the engine at %s %s; starting it again in %g s", own.url, said, pause_s)
            if was_serving:
                self._tell("swap", own)
            return
        if said != own.url:  # its place is on another node now
            self._tell("leave", own)
        own.url, own.is_serving, own.failures = said, True, 0
        own.doing = own.actor.ended.remote()
        self._served.use(self._urls())
        self._tell("join", own, for_s=STAY_S)
        self._tell("swap", own)  # the publish ends it
        try:
            self._served.ensure()
        except (EngineError, PublishError) as error:
            logger.warning("the engine at %s is back without the current weights: %s", own.url, error)
        else:
            logger.warning("the engine at %s is back", own.url)

    def _start_again(self, own: _Own) -> None:
        port = int(str(own.url).rpartition(":")[2])
        own.doing = own.actor.serve.remote(port)
        if ray.wait([own.doing], timeout=0.5)[0]:  # at once: its actor is gone, or it can't be started
            ray.kill(own.actor)
            new = self._hired(own.place, port)
            own.actor, own.doing = new.actor, new.doing

    def _urls(self) -> list[str]:
        return [own.url for own in self._own if own.url is not None]

    def _keep_speaking(self) -> None:
        while not self._is_ending.wait(LOOK_S):
            self._speak_for()

    def _speak_for(self) -> None:
        """Have the gateway know all; also those that are being started again, which it finds to be away."""
        for own in self._own:
            self._tell("join", own, for_s=STAY_S)

    def _tell(self, action: str, own: _Own, **more: Any) -> None:
        with self._gateway() as gateway:
            try:
                gateway.post(f"/spangrad/engines/{action}", {"engine": own.url, **more})
            except PublishError as error:
                logger.warning("the gateway was not told of the engine at %s: %s", own.url, error)

    def _refuse_others(self) -> None:
        """An engine that the run does not publish to would answer its agents with other weights."""
        with self._gateway() as gateway:
            known = gateway.get("/spangrad/engines").get("engines", [])
        for one in known:
            if one["healthy"] and one["policy"] == "trained" and not one["models"]:
                raise EngineError(
                    f"the gateway at {self._config.serving.gateway_url} has an engine at {one['url']},"
                    " which would answer calls of this run and is not one of cluster.engines; stop it, or"
                    " give the run a gateway of its own"
                )

    def _check_keys(self) -> None:
        if self._key is None and not self._config.cluster.is_local:
            raise ClusterError(
                "cluster.engines would listen where other machines reach them, beside a hub without keys;"
                " start the hub with keys and set hub.keys"
            )

    def _gateway(self) -> Control:
        return Control(self._config.serving.gateway_url, timeout_s=30.0, key=self._key, who="gateway")

    def _end(self) -> None:
        self._is_ending.set()
        for own in self._own:
            if own.url is not None:
                self._tell("leave", own)
            ray.kill(own.actor)


def engine_config(config: TrainConfig, engines: OwnEnginesConfig, place: int) -> EngineConfig:
    """How an engine of the run serves; its address is found where it runs.

    Raises:
        ConfigError: A setting can't be.
    """
    split = ("--tensor-parallel-size", str(engines.gpus)) if engines.gpus > 1 else ()
    return EngineConfig(
        model=str(config.start_model),
        served_model_name=config.serving.served_name,
        dtype=engines.dtype,
        max_model_len=engines.max_model_len,
        max_num_seqs=engines.max_num_seqs,
        threads=engines.cpus,
        lora_rank=config.learner.lora_rank if config.serving.transfer == "lora" else 0,
        log=str(Path(config.folder) / "logs" / f"engine-{place}.log"),
        extra_args=(*split, *engines.extra_args),
        startup_timeout_s=engines.startup_timeout_s,
        device="gpu" if engines.gpus else "cpu",
    )


def _port(host: str, wanted: int | None) -> int:
    if wanted is not None:
        with contextlib.suppress(EngineError):
            require_free_port(host, wanted, what="engine")
            return wanted
    return free_port(host)
