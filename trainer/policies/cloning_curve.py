"""What cloning alone reaches when it goes on for longer: the curve beside the demo's.

The demo's own cloning, from the same recorded expert and the same random start, with its schedule
stretched to several lengths; each is evaluated through the same engine, gateway and agent as the
demo. `python -m spangrad.trainer.policies.cloning_curve`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from spangrad.store import open_store
from spangrad.trainer.cluster import call, start_learner, start_ray
from spangrad.trainer.demo import DemoOptions, prepare
from spangrad.trainer.evaluation import evaluate
from spangrad.trainer.policies.warm_start import SCHEDULE, cloning_config, record_expert, start_policy
from spangrad.trainer.reporting.clock import Clock
from spangrad.trainer.serving.fleet import Fleet

LENGTHS = (0.5, 1.0, 2.0, 3.0)
"""Lengths that are evaluated, in units of the demo's own cloning."""


def cloning_curve(options: DemoOptions, *, console: Console) -> dict[str, Any]:
    """Clone for each of LENGTHS anew, and evaluate what comes of it."""
    prepared = prepare(options)
    clock = Clock(console)
    points: list[dict[str, float]] = []
    with prepared.stack as stack:
        stack.start_hub()
        start_ray()
        store = open_store(stack.hub_url, stack.keys.trainer)
        with clock("the expert is recorded"):
            expert = record_expert(
                store, prepared.config, prepared.warm, prepared.keys, run_id="expert", seed=options.seed
            )
        folder = prepared.folder / "cloning"
        rows, _ = start_policy(folder, expert.calls, prepared.warm, seed=options.seed)
        stack.start_engine(str(folder))
        stack.start_gateway()
        for version, length in enumerate(LENGTHS, 1):
            steps = round(length * prepared.warm.steps)
            learner = start_learner(cloning_config(prepared.config, prepared.warm, folder, seed=options.seed))
            with clock(f"cloning for {steps} steps"):
                call(
                    learner.fit_bc,
                    rows,
                    steps,
                    prepared.warm.batch_rows,
                    schedule=SCHEDULE,
                    warmup_steps=prepared.warm.warmup_steps,
                )
            points.append(_measure(prepared, store, learner, version, steps, clock))
            console.print(points[-1])
            del learner  # ends its process
        store.close()
    return {
        "command": f"python -m spangrad.trainer.policies.cloning_curve --seed {options.seed}",
        "seed": options.seed,
        "date": time.strftime("%Y-%m-%d"),
        "schedule": f"{SCHEDULE} over the length of each point",
        "points": points,
    }


def _measure(
    prepared: Any, store: Any, learner: Any, version: int, steps: int, clock: Clock
) -> dict[str, float]:
    weights = Path(prepared.folder) / "cloning.safetensors"
    call(learner.export_weights, str(weights))
    stack = prepared.stack
    fleet = Fleet([stack.engine_url], gateway_url=stack.gateway_url, gateway_key=stack.keys.trainer)
    fleet.publish(weights, version)
    found = {"clone/step": float(steps)}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        with clock(f"held-out tasks, {name}"):
            evaluated = evaluate(
                store,
                prepared.config,
                prepared.keys,
                label=f"cloning-{name}",
                policy_version=version,
                temperature=temperature,
            )
        found[f"eval/success_{name}"] = evaluated.success
    return found


def main() -> None:
    """Entry point of `python -m spangrad.trainer.policies.cloning_curve`."""
    parser = argparse.ArgumentParser(description="What cloning alone reaches when it goes on for longer.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--example", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    curve = cloning_curve(
        DemoOptions(seed=options.seed, example=options.example), console=Console(stderr=options.json)
    )
    print(json.dumps(curve), flush=True)


if __name__ == "__main__":
    main()
