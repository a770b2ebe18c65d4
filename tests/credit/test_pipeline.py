"""From a real store to credited rows."""

import dataclasses
import json
from functools import partial
from typing import Any

import pytest

from spangrad.adapters.model_call import Choice, ModelCall
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.labels import best, labelled
from spangrad.credit.pipeline import credited_rows, is_truncated
from spangrad.credit.rewards import rewards_of
from spangrad.errors import ConfigError, GradeError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, Span
from spangrad.tracer import conventions as c
from tests.adapters.building import call, span, text_attributes, token_attributes

PLAIN = CreditConfig(scale_by_std=False)


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def chat(*texts: str) -> str:
    roles = ["user", "assistant"]
    return json.dumps(
        [
            {"role": roles[k % 2], "parts": [{"type": "text", "content": content}]}
            for k, content in enumerate(texts)
        ]
    )


def spans_of(rollout_id: str, trace: str, *, attempt: int = 0, exact: bool = True) -> list[Span]:
    """A rollout of two calls, the second continues the first; observations are equal in every rollout."""
    names = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT: attempt}
    root = span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)
    turns = [
        ("a", {c.INPUT_MESSAGES: chat("q"), **token_attributes((1, 2), (3, 4), version=5)}),
        (
            "b",
            {c.INPUT_MESSAGES: chat("q", "x", "obs"), **token_attributes((1, 2, 3, 4, 5), (6,), version=6)},
        ),
    ]
    calls = []
    for k, (name, attributes) in enumerate(turns):
        if not exact:
            attributes = {c.INPUT_MESSAGES: attributes[c.INPUT_MESSAGES]}
        told = text_attributes(**names, **attributes) | {c.RESPONSE_ID: f"{rollout_id}-{name}"}
        calls.append(span(name, trace=trace, parent="r", start_ns=10 + k, attributes=told))
    return [root, *calls]


def filled(store: FileStore, rewards: dict[str, float | None], **options: Any) -> list[Rollout]:
    """Finished rollouts of one group, by their rewards."""
    store.enqueue([Rollout(name, group_id="g", run_id="run", task_id="t") for name in rewards])
    for index, (name, reward) in enumerate(rewards.items()):
        (claimed,) = store.claim(worker="w", limit=1)
        store.put_otlp(encode_request(spans_of(name, str(index + 1), **options)))
        store.finish(name, claimed.attempt)
        if reward is not None:
            store.put_rewards([Reward(name, reward, attempt=0)], author=RewardAuthor.EVALUATOR)
    return store.rollouts(run_id="run")


def test_a_group_becomes_credited_rows(store):
    batch = credited_rows(store, filled(store, {"good": 1.0, "bad": 0.0}), PLAIN)
    good, bad = batch.rows
    assert good.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert good.action_mask.tolist() == [False, False, True, True, False, True]
    assert good.advantages[good.action_mask].tolist() == [0.5] * 3
    assert bad.advantages[bad.action_mask].tolist() == [-0.5] * 3
    assert good.policy_versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert (good.loss_weight, good.group_id, good.grade) == (1 / 6, "g", "exact")
    assert batch.refused == []
    assert batch.diagnostics["groups/informative"] == 1
    assert batch.diagnostics["anchors/coverage"] == 1.0


def test_samples_lead_from_the_update_back_to_the_call(store):
    batch = credited_rows(store, filled(store, {"good": 1.0, "bad": 0.0}), PLAIN, policy_version=8)
    first = batch.samples[0]
    (called,) = (found for found in store.spans(["good"]) if found.start_ns == 10)
    assert first.call_id == f"{called.trace_id}-{called.span_id}"
    assert (first.rollout_id, first.advantage, first.trained_tokens) == ("good", 0.5, 2)
    assert (first.policy_version, first.staleness) == (5, 3)
    assert len(batch.samples) == 4


def test_gigpo_compares_steps_with_equal_observations(store):
    config = CreditConfig(episode="none", step="gigpo", gamma=0.5, scale_by_std=False)
    rows = credited_rows(store, filled(store, {"good": 1.0, "bad": 0.0}), config).rows
    # First step: 0.5 against 0; second: 1 against 0.
    assert rows[0].advantages[rows[0].action_mask].tolist() == [0.25, 0.25, 0.5]


def test_a_rollout_without_a_reward_is_refused_and_left_out_of_the_mean(store):
    batch = credited_rows(store, filled(store, {"good": 1.0, "bad": 0.0, "unscored": None}), PLAIN)
    assert {row.rollout_id for row in batch.rows} == {"good", "bad"}
    assert batch.rows[0].advantages.max() == 0.5
    assert [(r.rollout_id, r.reason) for r in batch.refused] == [
        ("unscored", "reward is missing: 'reward'")
    ] * 2
    assert batch.diagnostics["rollouts/missing_reward"] == 1


def test_rewards_add_up_by_the_weights_of_the_config_and_gdpo_keeps_them_apart(store):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0, "half": 1.0})
    lengths = [Reward("good", 10.0, "brief"), Reward("bad", 10.0, "brief")]
    store.put_rewards(lengths, author=RewardAuthor.EVALUATOR)
    weights = {"reward": 2.0, "brief": -0.1}
    batch = credited_rows(store, rollouts, dataclasses.replace(PLAIN, reward_weights=weights))
    assert [row.advantages.max() for row in batch.rows] == [1.0, 0.0]  # 2 - 1 and 0 - 1
    assert [r.reason for r in batch.refused] == ["reward is missing: 'brief'; there is 'reward'"] * 2
    apart = credited_rows(store, rollouts, CreditConfig(episode="gdpo", reward_weights=weights, eps=0.0))
    assert [row.advantages.max() for row in apart.rows] == [1.0, 0.0]  # brief says nothing: +1, -1 in std


def test_a_missing_reward_is_named_with_what_was_given_instead(store):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0})
    store.put_rewards([Reward("good", 1.0, "stile")], author=RewardAuthor.AGENT)
    settings: dict[str, Any] = {"reward_weights": {"reward": 1.0, "style": 1.0}}
    why = {
        "good": "reward is missing: 'style'; there is 'reward', 'stile' by agent, who does not count",
        "bad": "reward is missing: 'style'; there is 'reward'",
    }
    for prefer in (partial(labelled, good_at=1.0), None):
        config = None if prefer else CreditConfig()
        refused = credited_rows(store, rollouts, config, prefer=prefer, **settings).refused
        assert {one.rollout_id: one.reason for one in refused} == why
        assert {one.counted_as for one in refused} == {"reward is missing"}


@pytest.mark.parametrize(("name", "warns"), [("progres", True), ("progress", False)])
def test_scores_that_nobody_gave_are_told_with_what_was_given(store, caplog, name, warns):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0})
    (first,) = (one for one in store.spans(["good"]) if one.start_ns == 10)
    step = Reward("good", 0.5, "progress", attempt=0, call_id=f"{first.trace_id}-{first.span_id}")
    store.put_rewards([step], author=RewardAuthor.EVALUATOR)
    credited_rows(store, rollouts, CreditConfig(step="turn_credit", scores=f"reward:{name}"))
    says = (
        "no step of 2 rollouts has a reward 'progres' of an author that counts, which credit.scores names:"
        " there are no scores; rewards that steps were given: 'progress'"
    )
    assert caplog.messages == [says] * warns


def test_a_rollout_that_goes_on_from_a_call_of_another_one_is_a_branch_of_it(store):
    filled(store, {"trunk": 1.0})
    store.enqueue([Rollout("branch", group_id="g", run_id="run", task_id="t")])
    (claimed,) = store.claim(worker="w", limit=1)
    names = {c.ROLLOUT_ID: "branch", c.ATTEMPT: 0}
    told = {c.INPUT_MESSAGES: chat("q", "x", "obs"), **token_attributes((1, 2, 3, 4, 5), (9,), version=5)}
    root = span("r", trace="9", attributes={**names, c.SPAN_ROLE: "rollout"})
    own = span("z", trace="9", parent="r", start_ns=90, attributes=text_attributes(**names, **told))
    store.put_otlp(encode_request([root, own]))
    store.finish("branch", claimed.attempt)
    store.put_rewards([Reward("branch", 0.0, attempt=0)], author=RewardAuthor.EVALUATOR)
    config = CreditConfig(episode="none", step="tree_edges", value_prior=0.0)
    rows = credited_rows(store, store.rollouts(run_id="run"), config).rows
    found = {row.rollout_id: row.advantages[row.action_mask].tolist() for row in rows}
    # The first call of the trunk leads to 1 and to 0; what follows it decides.
    assert found == {"trunk": [0.0, 0.0, 0.5], "branch": [-0.5]}


def test_a_rollout_that_was_cut_off_is_masked_and_stays_in_the_books(store):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0, "cut": 0.0})
    rollouts[2] = dataclasses.replace(rollouts[2], output={"truncated": True})
    assert [one.rollout_id for one in rollouts] == ["good", "bad", "cut"]
    batch = credited_rows(store, rollouts, dataclasses.replace(PLAIN, overlong="mask"))
    assert [row.advantages.max() for row in batch.rows] == [0.5, 0.0]
    assert {r.reason for r in batch.refused} == {
        "overlong: it was cut off, or sampled more tokens than credit.overlong_limit"
    }
    assert sum(r.sampled_tokens for r in batch.refused) == 3
    assert batch.diagnostics["dropped/overlong"] == 1


def test_a_last_reply_that_ran_into_its_length_cuts_a_rollout_off():
    whole, cut = call("a", [1], [2]), call("b", [1, 2], [3])
    assert cut.choices[0].finish_reason != "length"
    ended = dataclasses.replace(cut, start_ns=9, choices=[Choice({}, finish_reason="length")])
    assert not is_truncated(ROLLOUT, [whole, cut])
    assert is_truncated(ROLLOUT, [ended, whole])
    assert not is_truncated(ROLLOUT, [dataclasses.replace(ended, is_trained_policy=False), whole])


def test_a_reward_from_the_agents_own_key_does_not_count_unless_asked(store):
    rollouts = filled(store, {"good": None, "bad": None})
    store.put_rewards([Reward("good", 1.0), Reward("bad", 0.0)], author=RewardAuthor.AGENT)
    assert credited_rows(store, rollouts, PLAIN).rows == []
    assert len(credited_rows(store, rollouts, PLAIN, authors=("agent",)).rows) == 2


def test_preferences_are_made_of_the_returns_and_weighed_afterwards(store):
    rollouts = filled(store, {"good": 1.0, "copy": 1.0, "bad": 0.0, "unscored": None})
    batch = credited_rows(store, rollouts, None, prefer=partial(labelled, good_at=0.5))
    assert [(row.rollout_id, row.preferences[0].is_good) for row in batch.rows] == [
        ("good", True),
        ("copy", True),
        ("bad", False),
    ]
    assert [refused.rollout_id for refused in batch.refused] == ["unscored", "unscored"]
    assert [refused.sampled_tokens for refused in batch.refused] == [2, 1]
    assert [sample.advantage for sample in batch.samples] == [1.0] * 4 + [-1.0] * 2
    assert batch.diagnostics["preference/good"] == 2.0
    (row,) = credited_rows(store, rollouts, None, prefer=partial(best, per_group=1)).rows
    assert row.loss_weight == 1 / 3
    with pytest.raises(ConfigError, match="leave the estimators out"):
        credited_rows(store, rollouts, PLAIN, prefer=partial(best, per_group=1))


def test_cloning_needs_no_reward(store):
    batch = credited_rows(store, filled(store, {"one": None}), None)
    (row,) = batch.rows
    assert row.advantages[row.action_mask].tolist() == [1.0] * 3


def test_text_calls_are_refused_unless_text_is_enough_and_somebody_renders_them(store):
    rollouts = filled(store, {"one": None}, exact=False)

    def render(told: ModelCall) -> ModelCall:
        if len(told.messages) > 1:
            raise GradeError("too long")
        choice = dataclasses.replace(told.choices[0], sampled_token_ids=[8, 9])
        return dataclasses.replace(told, prompt_token_ids=[7], choices=[choice])

    refused = credited_rows(store, rollouts, None).refused
    assert [r.reason for r in refused] == ["grade text, exact is needed: no token ids"] * 2
    refused = credited_rows(store, rollouts, None, min_grade="text").refused
    assert [r.reason for r in refused] == ["no token ids, and nothing renders them"] * 2
    batch = credited_rows(store, rollouts, None, min_grade="text", render=render)
    assert [row.token_ids.tolist() for row in batch.rows] == [[7, 8, 9]]
    assert [r.reason for r in batch.refused] == ["can't be rendered: too long"]


def test_no_half_rollout_is_trained(store):
    store.enqueue([Rollout("x", group_id="g", run_id="run", max_attempts=2)])
    store.claim(worker="w", limit=1)
    store.put_otlp(encode_request(spans_of("x", "1")))
    store.finish("x", 0, status="failed", error_type="EngineError", error="killed", retry=True)
    (queued,) = store.rollouts(run_id="run")
    batch = credited_rows(store, [queued], None)
    assert (batch.rows, [r.reason for r in batch.refused]) == (
        [],
        ["rollout did not succeed: queued (EngineError: killed)"],
    )
    store.claim(worker="w", limit=1)
    store.put_otlp(encode_request(spans_of("x", "2", attempt=1)))
    store.finish("x", 1)
    batch = credited_rows(store, store.rollouts(run_id="run"), None)
    assert [row.attempt for row in batch.rows] == [1]
    assert {sample.attempt for sample in batch.samples} == {1}


def test_a_rollout_without_calls_is_counted(store):
    store.enqueue([Rollout("x", run_id="run")])
    store.claim(worker="w", limit=1)
    store.finish("x", 0)
    batch = credited_rows(store, store.rollouts(run_id="run"), None)
    assert [r.reason for r in batch.refused] == ["no model call was recorded for attempt 0"]


def test_an_empty_batch_is_no_error(store):
    batch = credited_rows(store, [], PLAIN)
    assert (batch.rows, batch.samples, batch.refused) == ([], [], [])


ROLLOUT = Rollout("r", attempt=1)


def reward(value: float, author: RewardAuthor = RewardAuthor.EVALUATOR, **more: Any) -> Reward:
    return Reward("r", value, author=author, **more)


def outcome(*given: Reward, **options: Any) -> float | None:
    return rewards_of(ROLLOUT, given, [], **options).outcome


def test_of_one_author_the_last_reward_wins():
    assert outcome(reward(1.0), reward(0.25)) == 0.25


def test_an_operator_beats_an_evaluator_whoever_came_last():
    operator = reward(0.0, RewardAuthor.OPERATOR)
    assert outcome(operator, reward(1.0)) == outcome(reward(1.0), operator) == 0.0


def test_rewards_of_another_attempt_or_rollout_do_not_count():
    assert outcome(reward(1.0, attempt=0)) is None
    assert outcome(Reward("other", 1.0, author=RewardAuthor.EVALUATOR)) is None
    assert outcome(reward(1.0, attempt=1)) == 1.0


def test_named_rewards_add_up_by_weight_and_one_that_is_missing_is_not_zero():
    weights = {"reward": 1.0, "format": 0.5}
    assert outcome(reward(1.0), reward(2.0, name="format"), weights=weights) == 2.0
    assert outcome(reward(1.0), weights=weights) is None
    assert outcome(reward(1.0), reward(5.0, name="latency")) == 1.0


def test_a_reward_may_name_its_call_by_call_or_by_span():
    step = dataclasses.replace(call("a", [1], [2]), call_id="t-c", span_ids=("c", "g"))
    for name in ("t-c", "c", "t-g", "g"):
        found = rewards_of(ROLLOUT, [reward(0.5, call_id=name)], [step])
        assert (found.outcome, found.steps) == (None, {"t-c": 0.5})


def test_embeddings_are_not_among_the_calls_that_were_refused(store):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0})
    names = {c.ROLLOUT_ID: "good", c.ATTEMPT: 0, c.OPERATION_NAME: "embeddings", c.PROVIDER_NAME: "openai"}
    store.put_otlp(encode_request([span("e", trace="1", parent="r", start_ns=50, attributes=names)]))
    batch = credited_rows(store, rollouts, PLAIN)
    assert len(batch.rows) == 2
    assert batch.refused == []
