"""A plain OpenAI-SDK loop that walks across a frozen lake, a model call for each move.

A call shows the model what the walker sees now, nothing of the way so far. The loop talks to
whatever `OPENAI_BASE_URL` names, and knows nothing of training.

    OPENAI_BASE_URL=http://127.0.0.1:8100/v1 OPENAI_API_KEY=none \
        python agent.py S.O./..../.O../...G
"""

import os
import sys
from functools import lru_cache
from typing import Any

from lake import Lake
from openai import OpenAI

SYSTEM_PROMPT = "Cross the lake."
MAX_TOKENS = 4
"""Of one reply."""


@lru_cache(maxsize=8)
def _client(base_url: str | None) -> OpenAI:
    return OpenAI(base_url=base_url)


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Walk across `task["lake"]`.

    Returns:
        `moves`, those that were made. A reply that is no move is one that leads nowhere.
    """
    lake = Lake(task["lake"])
    cell, moves = lake.start, list[str]()
    while cell != lake.goal and len(moves) < lake.moves_allowed:
        completion = _client(os.environ.get("OPENAI_BASE_URL")).chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "policy"),
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": lake.look(cell)},
            ],
            temperature=float(task.get("temperature", 1.0)),
            max_completion_tokens=MAX_TOKENS,
        )
        move = (completion.choices[0].message.content or "").strip()
        moves.append(move)
        cell = lake.step(cell, move)
    return {"moves": moves}


if __name__ == "__main__":
    print(*run({"lake": sys.argv[1], "temperature": 0.0})["moves"])
