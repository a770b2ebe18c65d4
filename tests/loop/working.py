"""A rollout worker of this process at work against a hub: what tests of workers do once or more."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spangrad.store import open_store
from spangrad.store.records import Rollout
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.rollouts.worker import RolloutWorker
from spangrad.trainer.up import Stack
from tests.gateway.stub_engine import StubEngine

HERE = Path(__file__).parent


def config_of(hub: Stack, tmp_path: Path, **settings: Any) -> WorkerConfig:
    """A worker's config without a gateway, for an odd agent; `settings` are others of it."""
    return replace(
        WorkerConfig(
            store=hub.hub_url,
            evaluator_key=hub.keys.evaluator,
            agent_key=hub.keys.agent,
            gateway_url=settings.get("gateway_url", "http://127.0.0.1:9"),
            engine_urls=(),
            model="none",
            reward="odd_agents.py:reward",
            base_dir=str(HERE),
            run_id=tmp_path.name,
            split="train",
            concurrency=4,
            timeout_s=60.0,
            temperature=1.0,
            log=str(tmp_path / "agent.log"),
            function="" if "command" in settings or "url" in settings else "odd_agents.py:run",
            has_gateway="gateway_url" in settings,
            turns_reply="Enough.",
        ),
        **settings,
    )


def work(
    hub: Stack,
    tmp_path: Path,
    tasks: Mapping[str, Any],
    *,
    turns: Mapping[str, int] | None = None,
    **settings: Any,
) -> tuple[dict[str, Rollout], dict[str, float], WorkerReport]:
    """Run tasks once, those in `turns` with so many; returns their rollouts and rewards by task name."""
    run_id = tmp_path.name
    store = open_store(hub.hub_url, hub.keys.trainer)
    rollouts = [
        Rollout(
            rollout_id=f"{run_id}-{name}",
            task_id=name,
            run_id=run_id,
            task=dict(task),
            max_attempts=2,
            turn_budget=(turns or {}).get(name),
        )
        for name, task in tasks.items()
    ]
    store.enqueue(rollouts)
    worker = RolloutWorker()
    try:
        report = worker.run(config_of(hub, tmp_path, **settings))
    finally:
        worker.stop()
        ids = [rollout.rollout_id for rollout in rollouts]
        found = {str(r.task_id): r for r in store.rollouts(rollout_ids=ids)}
        rewards = {r.rollout_id.removeprefix(f"{run_id}-"): r.value for r in store.rewards(ids)}
        store.close()
    return found, rewards, report


@contextmanager
def running_gateway(hub: Stack, engine: StubEngine) -> Iterator[str]:
    """A gateway with the hub's keys, as `spangrad gateway --keys` has them."""
    keys = hub.keys
    config = GatewayConfig(
        engine_url=engine.url,
        store=hub.hub_url,
        store_key=keys.evaluator,
        agent_key=keys.agent,
        operator_keys=[str(keys.evaluator), str(keys.trainer)],
        port=0,
    )
    with running(config) as url:
        yield url
