"""Agent Lightning 1.0's trace aggregator on one rollout whose prompts grow; in an environment of its own.

`python agl_aggregator.py TURNS PROMPT_IDS REPLY_IDS`: prints the seconds of the fastest of three as JSON.
"""

import contextlib
import io
import json
import random
import sys
import time

import torch
from agentlightning.verl.agl_rollout_manager import (  # type: ignore[import-not-found]
    CompletedRollout,
    Triplet,
)
from agentlightning.verl.rollout_adapter import RolloutAdapter  # type: ignore[import-not-found]

RANDOM = random.Random(5)


def main() -> None:
    turns, step, reply = map(int, sys.argv[1:])
    ids, triplets = list[int](), []
    for _ in range(turns):
        prompt = ids + [RANDOM.randrange(150_000) for _ in range(step)]
        response = [RANDOM.randrange(150_000) for _ in range(reply)]
        ids = prompt + response
        told = {"token_ids": response, "log_probs": [-0.1] * reply}
        triplets.append(Triplet(prompt={"token_ids": prompt}, response=told))
    took = []
    for _ in range(3):
        rollout = CompletedRollout(
            rollout_id="r",
            data_id="d",
            step=1,
            sample_idx_in_step=0,
            enqueue_time=0.0,
            final_reward=1.0,
            triplets=[triplet.model_copy(deep=True) for triplet in triplets],
            rollout_state="succeeded",
        )
        adapter = RolloutAdapter(
            max_prompt_length=4096,
            max_response_length=(step + reply) * turns + 1000,
            device=torch.device("cpu"),
            pad_token_id=0,
            trace_aggregator_level="trajectory",
        )
        started = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            batch, _ = adapter.get_train_data_batch([rollout])
        took.append(time.process_time() - started)
        assert len(batch) == 1, len(batch)
    print(json.dumps({"seconds": min(took)}))


if __name__ == "__main__":
    main()
