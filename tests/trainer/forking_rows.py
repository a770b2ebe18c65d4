"""Rows that fork off each other, as those of one rollout or group do."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from tests.trainer.small_policy import make_row

from spangrad.credit.transition import Transition

Fork = tuple[int | None, float, int]
"""Earlier row that a row begins like (None: none), up to which share of it, and how many tokens follow."""

forks = st.lists(
    st.tuples(st.none() | st.integers(0, 5), st.floats(0.0, 1.0), st.integers(0, 9)), min_size=1, max_size=7
)


def forking_rows(specification: Sequence[Fork], *, seed: int = 0, **settings: float) -> list[Transition]:
    """Rows of a specification; with few distinct tokens, so that some share more than was asked for."""
    rng = np.random.default_rng(seed)
    rows: list[Transition] = []
    for number, (parent, share, fresh) in enumerate(specification):
        ids = rng.integers(3, 6, fresh + 2).astype(np.int32)
        if parent is not None and parent < len(rows):
            kept = rows[parent].token_ids
            ids = np.concatenate([kept[: round(share * len(kept))], ids])
        temperature = (1.0, 0.5)[number % 2]
        row = make_row(seed + number, tokens=len(ids), temperature=temperature, **settings)  # type: ignore[arg-type]
        mask = row.action_mask.copy()
        mask[-1] = number % 3 > 0  # the rest is cut off in every third row
        logprobs = np.where(mask, -rng.uniform(0.5, 3.0, len(ids)), np.nan).astype(np.float32)
        advantages = np.where(mask, rng.normal(size=len(ids)), 0.0)
        rows.append(
            replace(row, token_ids=ids, action_mask=mask, behavior_logprobs=logprobs, advantages=advantages)
        )
    return rows
