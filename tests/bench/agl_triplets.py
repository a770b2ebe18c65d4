"""Agent Lightning 0.3's triplet adapter on one rollout whose prompts grow. Runs in an environment of its own.

`python agl_triplets.py TURNS PROMPT_IDS REPLY_IDS`: prints the seconds of the fastest of three as JSON.
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("AGENTOPS_LOGGING_LEVEL", "ERROR")

from agentlightning.adapter import TracerTraceToTriplet  # type: ignore[import-not-found]
from agentlightning.types import Span  # type: ignore[import-not-found]

RANDOM = random.Random(7)


def main() -> None:
    turns, step, reply = map(int, sys.argv[1:])
    spans = _rollout(turns, step, reply)
    took = []
    for _ in range(3):
        started = time.process_time()
        triplets = TracerTraceToTriplet().adapt(spans)
        took.append(time.process_time() - started)
        assert len(triplets) == turns, len(triplets)
    print(json.dumps({"seconds": min(took)}))


def _rollout(turns: int, step: int, reply: int) -> list[Span]:
    root, ids, now = _id(), list[int](), 1000.0
    text = "word " * 60
    spans = [_span("agent.run", {"agent.name": "main"}, 0, 999.0, 1000.0 + 2.0 * turns, None, root)]
    for turn in range(turns):
        prompt = ids + [RANDOM.randrange(150_000) for _ in range(step)]
        response = [RANDOM.randrange(150_000) for _ in range(reply)]
        ids = prompt + response
        agent = _id()
        call = {
            "gen_ai.request.model": "m",
            "gen_ai.response.id": f"chatcmpl-{turn}",
            "gen_ai.prompt.0.role": "system",
            "gen_ai.prompt.0.content": text,
            "gen_ai.prompt.1.role": "user",
            "gen_ai.prompt.1.content": text,
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": text,
            "prompt_token_ids": prompt,
            "response_token_ids": response,
        }
        reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
        first = 4 * turn + 1
        spans += [
            _span("openai.chat.completion", call, first, now + 0.1, now + 1, agent),
            _span("tool.search", {"tool.result": text}, first + 1, now + 1.1, now + 1.5, agent),
            _span("agentlightning.annotation", reward, first + 2, now + 1.6, now + 1.6, agent),
            _span(f"turn.{turn}", {"agent.name": "worker"}, first + 3, now, now + 2, root, agent),
        ]
        now += 2.0
    return spans


def _span(name, attributes, number, start, end, parent, span_id=None):
    return Span.from_attributes(
        attributes=attributes,
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=number,
        name=name,
        trace_id="0" * 31 + "1",
        span_id=span_id or _id(),
        parent_id=parent,
        start_time=start,
        end_time=end,
    )


def _id() -> str:
    return f"{RANDOM.getrandbits(64) or 1:016x}"


if __name__ == "__main__":
    main()
