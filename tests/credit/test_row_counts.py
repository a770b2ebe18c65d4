"""Rows and tokens of agents' shapes: the cases that Agent Lightning 1.0's aggregator was measured on.

Each step shows 200 new tokens and samples 100. Its own numbers, with the limits that it ships with: 40 rows
and 113,344 tokens for two interleaved agents, 40 and 58,072 with a side call, one kept of four samples of a
prompt, and 1,000 of 3,000 and 2,792 of 6,000 sampled tokens trained of a compacted and of a long agent.
"""

import random
from collections import Counter

import pytest

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.model_call import ModelCall
from spangrad.credit.transitions import transitions
from tests.adapters.building import call

RNG = random.Random(5)
Turn = tuple[list[int], list[int]]


def fresh(count: int) -> list[int]:
    return [RNG.randrange(150_000) for _ in range(count)]


def agent(turns: int, ids: list[int] | None = None) -> list[Turn]:
    """Prompt and reply of every turn; a prompt holds all that went before."""
    ids, found = ids or [], []
    for _ in range(turns):
        found.append((ids + fresh(200), fresh(100)))
        ids = found[-1][0] + found[-1][1]
    return found


def interleaved() -> list[Turn]:
    return [turn for pair in zip(agent(20), agent(20), strict=True) for turn in pair]


def with_side_calls() -> list[Turn]:
    return [each for turn in agent(20) for each in (turn, (fresh(50), fresh(20)))]


def four_samples(*, alike: bool = False) -> list[Turn]:
    prompt, reply = fresh(200), fresh(100)
    return [(prompt, reply if alike else fresh(100)) for _ in range(4)]


def compacted() -> list[Turn]:
    """Every ten turns the history is replaced by a summary of 3,000 tokens."""
    return [turn for part in range(3) for turn in agent(10, fresh(3000) if part else None)]


def drifting() -> list[Turn]:
    """A token of an earlier reply comes back as another one, three times."""
    turns = agent(20)
    for k in (5, 10, 15):
        for prompt, _ in turns[k:]:
            prompt[k * 300 - 40] = (prompt[k * 300 - 40] + 1) % 150_000
    return turns


@pytest.mark.parametrize(
    ("turns", "rows", "tokens", "sampled"),
    [
        (agent(20), 1, 6_000, 2_000),
        (interleaved(), 2, 12_000, 4_000),
        (with_side_calls(), 21, 7_400, 2_400),
        (four_samples(), 4, 1_200, 400),
        (four_samples(alike=True), 4, 1_200, 400),
        (compacted(), 3, 15_000, 3_000),
        (agent(60), 1, 18_000, 6_000),
        (drifting(), 4, 1_500 + 3_000 + 4_500 + 6_000, 2_000),
    ],
    ids=["one", "interleaved", "side-calls", "samples", "same-samples", "compacted", "long", "drifting"],
)
def test_every_sampled_token_is_trained_in_as_few_rows_as_there_are_contexts(turns, rows, tokens, sampled):
    calls: list[ModelCall] = [
        call(f"c{k}", prompt, reply, start_ns=k) for k, (prompt, reply) in enumerate(turns)
    ]
    made = transitions(build_tree(calls), None, group_id=None)
    assert len(made) == rows
    assert sum(len(row.token_ids) for row in made) == tokens
    assert sum(int(row.action_mask.sum()) for row in made) == sampled
    trained = Counter(segment.call_id for row in made for segment in row.segments)
    assert trained == Counter(each.call_id for each in calls)


def test_choices_of_one_call_are_rows_of_their_own():
    turns = four_samples()
    one = call("c", turns[0][0], *(reply for _, reply in turns))
    made = transitions(build_tree([one]), None, group_id=None)
    assert (len(made), sum(int(row.action_mask.sum()) for row in made)) == (4, 400)
