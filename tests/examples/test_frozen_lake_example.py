from collections import Counter, defaultdict
from typing import Any

import pytest

from spangrad.trainer.policies.scripted_model import serve_model
from tests.examples.loading import from_example, module_of

EXAMPLE = "05_frozen_lake"
run = from_example(EXAMPLE, "agent:run")
tasks = from_example(EXAMPLE, "tasks:tasks")
reward = from_example(EXAMPLE, "reward:reward")
reply = from_example(EXAMPLE, "expert:reply")
serve_expert = from_example(EXAMPLE, "expert:serve_expert")
lake_module = module_of(EXAMPLE, "lake")

SMALL = lake_module.Lake("S.O/O../..G")


def walk(monkeypatch, base_url, task):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    return run(task)


def test_moves_go_where_they_say_stop_at_the_shore_and_begin_again_after_a_hole():
    assert SMALL.start == (0, 0) and SMALL.goal == (2, 2)
    assert SMALL.shortest == 4 and SMALL.moves_allowed == 12
    assert SMALL.step((0, 0), "right") == (0, 1)
    assert SMALL.step((0, 0), "up") == (0, 0)
    assert SMALL.step((0, 1), "right") == (0, 0)  # a hole at (0, 2)
    assert SMALL.look((0, 1)) == (
        "row 1 column 2; goal 2 down, 1 right; up shore, right hole, down ice, left ice"
    )
    assert SMALL.look((1, 2)) == "row 2 column 3; goal 1 down; up hole, right shore, down goal, left ice"


def test_a_fall_shows_the_start_as_it_was_at_first(monkeypatch):
    """The same state reads the same, so that steps of a group can be compared."""
    script = ["right", "right", "right", "down", "down", "right"]
    seen = []

    def follow(messages, asked_before):
        seen.append(messages)
        return {"role": "assistant", "content": script[len(seen) - 1]}

    with serve_model(follow) as base_url:
        output = walk(monkeypatch, base_url, {"lake": SMALL.text})
    assert output == {"moves": script} and reward({"lake": SMALL.text}, output) == 1.0
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert [message["role"] for message in seen[-1]] == ["system", "user"]


def test_reward_makes_the_moves_again():
    task = {"lake": SMALL.text}
    way = ["right", "down", "down", "right"]
    assert reward(task, {"moves": way}) == 1.0
    assert reward(task, {"moves": ["up", "left", *["up"] * 6, *way]}) == 1.0
    assert reward(task, {"moves": ["up"] * 9 + way}) == 0.0  # one move too many
    assert reward(task, {"moves": ["right", "right", "down", "right"]}) == 0.0  # fell
    nonsense: list[Any] = [None, ["goal"], way[:3], [*way[:3], 4], [*way, 4], [[]]]
    assert [reward(task, {"moves": moves}) for moves in nonsense] == [0.0] * 6
    assert reward(task, {}) == 0.0


@pytest.mark.parametrize("content", ["", "right right"])
def test_a_reply_that_is_no_move_leads_nowhere(monkeypatch, content):
    with serve_model(lambda messages, asked_before: {"role": "assistant", "content": content}) as base_url:
        assert walk(monkeypatch, base_url, {"lake": SMALL.text}) == {"moves": [content] * 12}


def test_every_lake_has_holes_and_is_crossed_by_whoever_looks_where_they_step():
    for task in tasks("train", 60, 4):
        lake = lake_module.Lake(task["lake"])
        assert lake.text.count("O") > 0.2 * len(lake.rows) ** 2
        cell, moves = lake.start, []
        while cell != lake.goal:
            move = next(move for move in lake.ways(cell) if lake.step(cell, move) != lake.start)
            moves.append(move)
            cell = lake.step(cell, move)
        assert len(moves) == lake.shortest == task["shortest"]


def test_hasty_expert_crosses_short_lakes_sometimes_and_long_ones_more_seldom():
    scores = defaultdict(list)
    for task in tasks("train", 240, 1):
        lake = lake_module.Lake(task["lake"])
        cell, moves, asked = lake.start, list[str](), Counter[Any]()
        while cell != lake.goal and len(moves) < lake.moves_allowed:
            messages = [{"role": "user", "content": lake.look(cell)}]
            moves.append(reply(messages, asked_before=asked[cell])["content"])
            asked[cell] += 1
            cell = lake.step(cell, moves[-1])
        scores[lake.shortest].append(reward(task, {"moves": moves}))
    rates = {length: sum(found) / len(found) for length, found in scores.items()}
    assert 0.1 < rates[10] < rates[6] < 0.6


def test_agent_and_expert_talk_to_each_other(monkeypatch):
    (task,) = tasks("train", 1, 2)
    with serve_expert(0, 1) as base_url:
        output = walk(monkeypatch, base_url, task)
    lake = lake_module.Lake(task["lake"])
    assert lake.shortest <= len(output["moves"]) <= lake.moves_allowed
    assert (reward(task, output) == 1.0) == lake.is_crossed(output["moves"])


def test_splits_are_disjoint_sizes_come_in_turn_and_no_lake_comes_twice():
    drawn = {split: [task["lake"] for task in tasks(split, 90, 2)] for split in ("train", "eval")}
    assert not set(drawn["train"]) & set(drawn["eval"])
    for lakes in drawn.values():
        assert len(set(lakes)) == 90
        assert [len(lake.split("/")) for lake in lakes[:6]] == [4, 5, 6, 4, 5, 6]
    assert tasks("eval", 20, 3) == tasks("eval", 40, 3)[:20] != tasks("eval", 20, 4)
