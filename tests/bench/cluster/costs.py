"""What the parts of the design cost, measured here and now."""

import tempfile
import time
from pathlib import Path

from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.pipeline import credited_rows
from spangrad.store.file_store import FileStore
from spangrad.store.records import Ending, Reward, RewardAuthor, Rollout
from spangrad.tracer import conventions as c
from tests.bench import agent_spans as agents
from tests.bench.capture_benches import bench_gateway
from tests.bench.cluster.model import Costs
from tests.bench.queue_benches import bench_queue
from tests.bench.store_benches import bench_ingest


def measured() -> Costs:
    """All costs, in CPU time; a few minutes."""
    figures = [*bench_gateway(None), *bench_ingest(), *bench_queue(largest=2_000)]
    of = {figure.name: (figure.value or 0.0) / 1e3 for figure in figures if figure.unit == "ms"}
    return Costs(
        gateway_call_s=of["gateway, CPU a call"],
        hub_call_s=of["long call, CPU of the hub"],
        hub_rollout_s=of["books of a rollout, CPU of the hub"],
        credit_call_s=credit_of_a_call(),
    )


def credit_of_a_call(*, groups: int = 4, size: int = 4, turns: int = 20) -> float:
    """CPU seconds from the spans in a store to credited rows, of one call."""
    runs = agents.rollouts(0, groups * size, turns, agents.STEADY)
    names = [str(run[0].attributes[c.ROLLOUT_ID]) for run in runs]
    asked = [Rollout(name, f"task-{i // size}", f"group-{i // size}", "run") for i, name in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder, FileStore(Path(folder, "s.duckdb")) as store:
        store.enqueue(asked)
        store.claim(worker="bench", limit=len(asked))
        for run in runs:
            for body in agents.bodies(run, 50):
                store.put_otlp(body)
        rewards = [Reward(name, float(i % 2)) for i, name in enumerate(names)]
        store.put_rewards(rewards, author=RewardAuthor.EVALUATOR)
        store.finish_many([Ending(name, 0) for name in names])
        ended = store.rollouts(rollout_ids=names)
        spent = []
        for _ in range(3):
            started = time.process_time()
            batch = credited_rows(store, ended, CreditConfig(), policy_version=0)
            spent.append(time.process_time() - started)
        if not batch.rows:
            raise SystemExit(f"nothing was credited: {batch.refused[:1]}")
    return min(spent) / (len(runs) * turns)
