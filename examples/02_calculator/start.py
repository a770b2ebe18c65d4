"""Records the expert and makes a policy that knows nothing: what `recipe.toml` starts from.

What you will see: how many rollouts of the expert are in the store, and how many of them were right.
"""

import argparse
import os
from pathlib import Path

from agent import run
from expert import serve_expert
from reward import reward
from tasks import tasks

import spangrad
from spangrad.adapters import account_unread, calls_of
from spangrad.store import open_store
from spangrad.store.records import Reward
from spangrad.trainer.policies.policy import conversation_of, make_policy

FOLDER = Path(__file__).parent / ".spangrad"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=800, help="rollouts of the expert (default: 800)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="store and model folder go here")
    options = parser.parse_args()
    store_file = options.folder / "store.duckdb"

    # The agent as it is, the expert in the place of a model, and the tracer beside them.
    spangrad.init(store=store_file)
    rewards = []
    with serve_expert() as base_url:
        os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
        for index, task in enumerate(tasks("train", options.rollouts, seed=1)):
            rollout_id = f"expert-{index:05d}"
            with spangrad.rollout(rollout_id=rollout_id, task_id=task["task_id"]):
                output = run(task)
            rewards.append(Reward(rollout_id, reward(task, output)))
    spangrad.shutdown()

    store = open_store(store_file)
    account_unread(store)  # spans -> model calls
    store.put_rewards(rewards)
    recorded = calls_of(store, [one.rollout_id for one in rewards])
    store.close()
    make_policy(options.folder / "start", [conversation_of(call) for call in recorded], vocab=512)
    right = sum(one.value == 1.0 for one in rewards)
    print(f"{len(rewards)} rollouts of the expert in {store_file}, {right} of them right")
    print(f"a policy with random weights in {options.folder / 'start'}")


if __name__ == "__main__":
    main()
