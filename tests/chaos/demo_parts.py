"""The parts of a demo, each in a process of its own: a warm start, a trainer, an evaluation.

python -m tests.chaos.demo_parts warm FOLDER CACHE                   prints the policy's folder
python -m tests.chaos.demo_parts train SECTION.KEY=VALUE ...         as `spangrad train`
python -m tests.chaos.demo_parts evaluate VERSION SECTION.KEY=VALUE ...   prints {"success", "ci", "n"}
"""

import json
import sys
from pathlib import Path
from typing import Final

from spangrad.store import open_store
from spangrad.trainer.cluster import start_learner, start_ray
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.demo import EXAMPLE, DemoOptions, prepare
from spangrad.trainer.evaluation import evaluate
from spangrad.trainer.loop import train
from spangrad.trainer.policies.warm_start import warm_start
from spangrad.trainer.resuming import load_keys

DEMO: Final = Path(__file__).parents[2] / "examples" / EXAMPLE / "demo.toml"


def warm(folder: str, cache: str) -> Path:
    """The policy that `spangrad demo` begins with."""
    prepared = prepare(DemoOptions(example=str(DEMO.parent), folder=folder, cache=cache))
    with prepared.stack as stack:
        stack.start_hub()
        start_ray()
        store = open_store(stack.hub_url, stack.keys.trainer)
        begun = warm_start(
            store,
            prepared.unchanged,
            prepared.warm,
            prepared.keys,
            learner=start_learner,
            cache=Path(cache),
            seed=0,
            on_progress=lambda *_: None,
        )
        store.close()
    return begun.folder


def config_of(changes: list[str]) -> TrainConfig:
    """The demo's training, with these settings."""
    return load_config(DEMO, changes, besides=("warm_start",))


def success(version: int, changes: list[str]) -> str:
    """Of held-out tasks that are sampled as rollouts are."""
    config = config_of(changes)
    keys = load_keys(config)
    start_ray()
    with open_store(config.hub.url, keys.trainer) as store:
        found = evaluate(
            store,
            config,
            keys,
            label="after",
            policy_version=version,
            temperature=config.rollout.temperature,
        )
    return json.dumps(found.to_json())


def main() -> None:
    """See above."""
    match sys.argv[1:]:
        case ["warm", folder, cache]:
            print(warm(folder, cache))
        case ["train", *changes]:
            report = train(config_of(changes), evaluate_after=False, on_note=print)
            print(f"{report.updates} updates, policy version {report.policy_version}")
        case ["evaluate", version, *changes]:
            print(success(int(version), changes))
        case other:
            raise SystemExit(f"what is {other!r}? {__doc__}")


if __name__ == "__main__":
    main()
