"""Composition of estimators over trajectories, and what is said about the batch."""

import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from spangrad import credit
from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.estimators import BOTH_TERMS, EPISODE_TERMS, STEP_TERMS
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError


def trajectory(
    name: str,
    reward: float | None,
    anchors: str = "ab",
    group: str | None = "g",
    rewards: list[float | None] | None = None,
    tokens: int | None = None,
    parent: str | None = None,
) -> Trajectory:
    given_rewards: list[float | None] = rewards or [None] * len(anchors)
    steps = [
        Step(
            f"{name}-{t}",
            t,
            anchor=None if a == "-" else a,
            reward=r,
            tokens=tokens,
            observation=SEEN.get({"b": "u", "c": "v"}.get(a, a)),
            role=("planner", "coder")[t % 2],
            action=name[-1],
            parent=None if t else parent,
        )
        for t, (a, r) in enumerate(zip(anchors, given_rewards, strict=True))
    ]
    scores = [0.5] * (len(steps) + 1)
    values = [reward] * (len(steps) + 1)
    return Trajectory(
        name, group, reward, steps, {"reward": reward}, scores=scores, values=values, baseline=reward
    )


def test_every_step_gets_the_advantage_of_its_rollout():
    result = assign([trajectory("a", 1.0), trajectory("b", 0.0)], CreditConfig(scale_by_std=False))
    assert result.of("a") == {"a-0": 0.5, "a-1": 0.5}
    assert result.of("b") == {"b-0": -0.5, "b-1": -0.5}


def test_a_missing_reward_is_not_zero():
    batch = [trajectory("a", 1.0), trajectory("b", 0.0), trajectory("c", None)]
    result = assign(batch, CreditConfig(scale_by_std=False))
    # 0.5 and not 2/3: the unscored rollout is no part of the mean.
    assert result.advantages["a", "a-0"] == 0.5
    assert result.advantages["c", "c-0"] is None
    assert result.of("c") == {}
    assert result.diagnostics.missing_reward == 1
    assert result.diagnostics.rollouts == 3


def test_step_rewards_alone_are_a_reward_only_if_every_step_has_one():
    assert trajectory("a", None, rewards=[0.0, 10.0]).total_reward == 10.0
    assert trajectory("a", None, rewards=[None, 10.0]).total_reward is None
    assert trajectory("a", 1.0, rewards=[None, 10.0]).total_reward == 11.0
    assert Trajectory("a", "g", None, []).total_reward is None


def test_the_golden_gigpo_example_comes_out_of_assign():
    batch = [trajectory("a", None, "01", rewards=[0.0, 10.0]), trajectory("b", 0.0, "0112")]
    result = assign(batch, CreditConfig(step="gigpo", ddof=1, eps=0.0))
    assert result.advantages["a", "a-0"] == pytest.approx(0.707107 + 0.707107, abs=1e-6)
    assert result.advantages["a", "a-1"] == pytest.approx(0.707107 + 1.154700, abs=1e-6)
    assert result.advantages["b", "b-2"] == pytest.approx(-0.707107 - 0.577350, abs=1e-6)
    assert result.advantages["b", "b-3"] == pytest.approx(-0.707107, abs=1e-6)


def test_the_published_gigpo_example_comes_out_of_assign():
    batch = [trajectory("a", 10.0, "01"), trajectory("b", 0.0, "0112")]
    result = assign(batch, CreditConfig(step="gigpo_as_published"))
    assert result.advantages["b", "b-3"] == pytest.approx(-0.645497, abs=1e-6)
    assert result.advantages["a", "a-0"] == pytest.approx(1.290994 + 0.707107, abs=1e-5)


def test_the_outcome_is_paid_at_the_last_step():
    batch = [trajectory("a", 1.0, "xy"), trajectory("b", 0.0, "xz")]
    config = CreditConfig(episode="none", step="gigpo", gamma=0.5, scale_by_std=False)
    # At x: 0.5 * 1 against 0, mean 0.25. y and z are alone in their pools.
    assert assign(batch, config).of("a") == {"a-0": 0.25, "a-1": 0.0}


def test_group_statistics_are_over_rollouts_and_not_over_rows_or_steps():
    # One success of 3 steps, one failure of 1: the mean is 1/2 whichever way the steps are counted.
    batch = [trajectory("a", 1.0, "abc"), trajectory("b", 0.0, "a")]
    result = assign(batch, CreditConfig(scale_by_std=False))
    assert set(result.of("a").values()) == {0.5}
    assert result.diagnostics.reward_mean == 0.5  # per row it would be 0.75


def test_rollouts_without_a_group_are_not_compared():
    batch = [trajectory("a", 1.0, group=None), trajectory("b", 0.0, group=None)]
    result = assign(batch, CreditConfig())
    assert set(result.of("a").values()) | set(result.of("b").values()) == {0.0}
    assert result.diagnostics.singleton_groups == 2


def test_diagnostics_count_what_says_nothing():
    batch = [
        trajectory("a", 1.0, "s-", group="mixed"),
        trajectory("b", 0.0, "st", group="mixed"),
        trajectory("c", 1.0, "s-", group="easy"),
        trajectory("d", 1.0, "u-", group="easy"),
        trajectory("e", 1.0, "s", group="alone"),
    ]
    found = assign(batch, CreditConfig()).diagnostics
    assert (found.groups, found.informative_groups, found.singleton_groups) == (3, 1, 1)
    assert found.anchor_coverage == 2 / 9  # the two s of `mixed`
    assert found.reward_mean == pytest.approx((0.5 + 1 + 1) / 3)
    assert found.reward_std_in_groups == pytest.approx(0.5 / 3)
    # p = 4/5; G = 2, 2, 1: 1 - .64 - .04 = .32, .32, 0
    assert found.expected_informative_share == pytest.approx(0.64 / 3)
    assert found.metrics()["groups/informative"] == 1.0


def test_an_empty_batch_has_no_means():
    found = assign([], CreditConfig()).diagnostics
    assert found.groups == 0
    assert "reward/mean" not in found.metrics()


def test_a_rollout_that_occurs_twice_is_an_error():
    with pytest.raises(CreditError, match="'a' occurs twice"):
        assign([trajectory("a", 1.0), trajectory("a", 0.0)], CreditConfig())


def test_a_reward_that_is_not_finite_is_an_error_that_names_the_rollout():
    with pytest.raises(CreditError, match="'a' has reward nan"):
        assign([trajectory("a", float("nan"))], CreditConfig())
    with pytest.raises(CreditError, match="'a' has reward '1'; expected a finite number"):
        assign([trajectory("a", cast(float, "1"))], CreditConfig())


@pytest.mark.parametrize("episode", ["grpo", "best_of_group", "running_baseline"])
def test_a_reward_that_is_too_large_to_be_squared_is_an_error_that_names_the_rollout(episode):
    config = CreditConfig(episode=episode)
    with pytest.raises(CreditError, match=r"'b' has reward -1e\+308; expected a finite number of size"):
        assign([trajectory("a", 1.0), trajectory("b", -1e308)], config)
    with pytest.raises(CreditError, match=r"'b' has reward 1\.1e\+100"):
        assign([trajectory("a", 1.0), trajectory("b", 0.0, rewards=[1.1e100, None])], config)
    found = assign([trajectory("a", 1e100), trajectory("b", -1e100)], config).advantages
    assert all(a is None or np.isfinite(a) for a in found.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"episode": "none"},
        {"episode": "none", "step": "gigpo", "step_weight": 0.0},
        {"gamma": 1.5},
        {"ddof": 2},
        {"eps": -1.0},
        {"step_weight": -1.0},
        {"episode": "rloo", "step": "gigpo_as_published"},
        {"episode": "grpp"},
        {"step": "gigp"},
        {"step": "hgpo", "history": -1},
        {"step": "hgpo", "history": 1001},
        {"filters": ("zero_sprad",)},
        {"shaping": "potental", "scores": "reward:p"},
        {"step": "turn_credit"},
        {"shaping": "terms"},
        {"shaping": "potential", "scores": "reward:p"},
        {"step": "treerl", "shaping": "potential", "scores": "reward:p"},
        {"step": "mt_grpo", "shaping": "terms", "scores": "reward:p"},
        {"episode": "gdpo", "shaping": "score_gain", "scores": "reward:p"},
        {"shaping": "terms", "scores": "reward:reward"},
        {"scores": "reward:p"},
        {"shaping_weight": 0.5},
        {"filters": ("top_p", "top_p")},
        {"step": "reinforce_pp", "filters": ("zero_spread",)},
        {"overlong": "penalise"},
        {"overlong": "penalize", "overlong_limit": 4, "overlong_buffer": 5},
        {"episode": "gdpo", "overlong": "penalize", "overlong_limit": 4, "overlong_buffer": 4},
        {"episode": "maxrl", "overlong": "penalize", "overlong_limit": 4, "overlong_buffer": 4},
        {"episode": "maxrl", "shaping": "score_gain", "scores": "reward:p"},
        {"episode": "maxrl", "shaping": "terms", "scores": "reward:p"},
        {"step": "gigpo", "anchors": "fuzzy"},
        {"episode": "running_baseline", "baseline_decay": 1.0},
        {"episode": "running_baseline", "baseline_key": "task."},
        {"step": "gigpo", "anchors": "similar", "similarity": 1.5},
    ],
)
def test_a_config_out_of_range_is_an_error(wrong):
    with pytest.raises(ConfigError):
        CreditConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"episode": "grop"}, "episode is 'grop', expected one of grpo, .*; did you mean 'grpo'"),
        ({"step": "gigpp"}, "step is 'gigpp', expected one of .*; did you mean 'gigpo'"),
        ({"singleton": "row"}, "singleton is 'row', expected one of zero, raw; did you mean 'raw'"),
        ({"anchors": "simlar"}, "did you mean 'similar'"),
        ({"overlong": "penalise"}, "did you mean 'penalize'"),
        ({"filters": ("top_share", "zero_spred")}, "filters is 'zero_spred', .*; did you mean 'zero_spread'"),
        ({"shaping": "potental", "scores": "reward:p"}, "did you mean 'potential'"),
    ],
)
def test_a_misspelt_name_is_shown_with_the_nearest(wrong, says):
    with pytest.raises(ConfigError, match=says):
        CreditConfig(**wrong)


batches = st.lists(
    st.tuples(
        st.sampled_from([None, 0.0, 0.3, 1.0]), st.integers(0, 2), st.text("abc-", min_size=0, max_size=4)
    ),
    max_size=10,
)
configs = st.sampled_from(
    [
        CreditConfig(),
        CreditConfig(episode="rloo"),
        CreditConfig(step="gigpo"),
        CreditConfig(episode="none", step="gigpo", scale_by_std=False),
        CreditConfig(episode="maxrl", step="hgpo"),
        CreditConfig(step="gigpo", anchors="similar", similarity=0.5),
        CreditConfig(episode="running_baseline", step="gigpo"),
        CreditConfig(episode="reinforce_pp_baseline", step="leave_one_out_to_go"),
    ]
)


@given(batches, configs, st.integers(0, 99))
def test_order_does_not_matter_and_unscored_rollouts_change_nothing(members, config, seed):
    batch = [trajectory(f"r{i}", r, anchors, f"g{g}") for i, (r, g, anchors) in enumerate(members)]
    result = assign(batch, config)
    scored = [t for t in batch if t.total_reward is not None]
    random.Random(seed).shuffle(scored)
    again = assign(scored, config)
    for key, advantage in again.advantages.items():
        assert advantage == pytest.approx(result.advantages[key], abs=1e-9)
    assert {key[0] for key, a in result.advantages.items() if a is None} <= {
        t.rollout_id for t in batch if t.total_reward is None
    }


@given(batches)
def test_episode_advantages_sum_to_zero_in_every_group(members):
    batch = [trajectory(f"r{i}", r, "s", f"g{g}") for i, (r, g, _) in enumerate(members)]
    result = assign(batch, CreditConfig())
    for group in {t.group_id for t in batch}:
        parts = [result.advantages[t.rollout_id, f"{t.rollout_id}-0"] for t in batch if t.group_id == group]
        assert abs(sum(a for a in parts if a is not None)) < 1e-9


def test_equal_rewards_paid_sooner_or_later_are_equal():
    batch = [trajectory("a", 1.0, "sxx"), trajectory("b", 1.0, "sx")]
    config = CreditConfig(step="gigpo", gamma=0.95)
    # At s the discounted returns are .9025 and .95: that is length alone.
    result = assign(batch, config)
    assert set(result.advantages.values()) == {0.0}
    assert (result.diagnostics.informative_groups, result.diagnostics.equal_groups) == (0, 1)
    one_failed = assign([*batch, trajectory("c", 0.0, "sx")], config)
    assert one_failed.of("b")["b-0"] > one_failed.of("a")["a-0"] > 0
    assert one_failed.diagnostics.equal_groups == 0


def test_equal_returns_earned_in_different_steps_are_a_signal_of_the_step_term_alone():
    # From s both earn 1; from x on, a earns 1 and b nothing.
    batch = [trajectory("a", 0.0, "sx", rewards=[0.0, 1.0]), trajectory("b", 0.0, "sx", rewards=[1.0, 0.0])]
    with_steps = assign(batch, CreditConfig(step="gigpo", gamma=1.0, scale_by_std=False))
    assert with_steps.of("a") == {"a-0": 0.0, "a-1": 0.5}
    assert with_steps.diagnostics.informative_groups == 1
    for config in (CreditConfig(), CreditConfig(step="gigpo", step_weight=0.0)):
        alone = assign(batch, config)
        assert set(alone.advantages.values()) == {0.0}
        assert (alone.diagnostics.informative_groups, alone.diagnostics.equal_groups) == (0, 1)


def test_equal_rewards_in_another_order_are_no_signal_of_rounding():
    # From left to right 0.1 + 0.2 + 0.3 is 0.6000000000000001, 0.3 + 0.2 + 0.1 is 0.6.
    batch = [
        trajectory("a", 0.0, "---", rewards=[0.1, 0.2, 0.3]),
        trajectory("b", 0.0, "---", rewards=[0.3, 0.2, 0.1]),
    ]
    result = assign(batch, CreditConfig(step="gigpo"))
    assert set(result.advantages.values()) == {0.0}


def test_a_lone_rollout_that_comes_back_to_a_state_gets_zero():
    result = assign([trajectory("a", 1.0, "sts", rewards=[0.0, 0.5, 0.0])], CreditConfig(step="gigpo"))
    assert set(result.advantages.values()) == {0.0}
    assert (result.diagnostics.singleton_groups, result.diagnostics.equal_groups) == (1, 0)


TERMS: list[dict[str, Any]] = [
    *(
        {"episode": episode, "step": step}
        for episode in EPISODE_TERMS
        for step in ("none", *(name for name in STEP_TERMS if name != "turn_credit"))
        if (episode, step) != ("none", "none")
    ),
    *({"episode": "grpo", "step": step, "anchors": "similar"} for step in ("gigpo", "hgpo")),
    *({"episode": "grpo", "step": both} for both in BOTH_TERMS),
    *({"episode": e, "step": "turn_credit", "scores": "reward:p"} for e in ("grpo", "none")),
    {"episode": "grpo", "step": "leave_one_out_to_go", "scores": "reward:p", "shaping": "potential"},
]
CHANGED: dict[str, Any] = {
    "step_weight": 0.25,
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "scale_by_std": False,
    "ddof": 1,
    "eps": 0.3,
    "singleton": "raw",
    "history": 0,
    "history_weight": 3.0,
    "anchors": "similar",
    "similarity": 0.5,
    "evidence_prior": 1.0,
    "value_prior": 0.5,
    "filters": ("top_share",),
    "overlong": "mask",
    "reward_weights": {"reward": 1.0, "format": 2.0},
    "baseline_decay": 0.5,
    "baseline_key": "all",
}
OF_THE_PIPELINE = {"baseline_decay", "baseline_key"}
"""Used before `assign`: `test_running.py`."""
LONG = "You are in a room with a door to the north, a lamp, a rusty key and a letter on the table."
SEEN = {"u": f"{LONG} It is 10:01.", "v": f"{LONG} It is 10:02.", "s": f"{LONG[:60]} {'Nothing. ' * 4}"}
"""u and v are similar, s has half of its text in common with them."""
PARENTS = {"b0": "a0", "c0": "a1", "e0": "d0", "k1": "i0"}
"""What goes on from another call than the one before it."""
RICH = [
    Trajectory(
        name,
        group,
        reward,
        [
            Step(
                f"{name}{t}",
                t,
                a,
                r,
                n,
                SEEN.get(a, a),
                ("planner", "coder")[n % 2],
                "xyz"[t],
                PARENTS.get(f"{name}{t}"),
            )
            for t, (a, r, n) in enumerate(steps)
        ],
        {"reward": reward, "format": float("adik".find(name) % 3)},
        baseline=reward / 3,
        is_truncated=name == "b",
        scores=[0.1 * ord(name) + 0.25 * t * t for t in range(len(steps) + 1)],
        values=[0.1 * (ord(name) % 4) + 0.05 * t for t in range(len(steps) + 1)],
    )
    for name, group, reward, steps in (
        ("a", "g", 1.0, [("s", 0.0, 3), ("t", 0.5, 1), ("u", 0.0, 2)]),
        ("b", "g", 0.0, [("s", 0.0, 1), ("t", 0.0, 9)]),
        ("c", "g", 0.25, [("s", 0.0, 2), ("v", 0.5, 2), ("t", 0.0, 2)]),
        ("d", "h", 1.0, [("s", 0.0, 1), ("s", 0.0, 1)]),
        ("e", "h", 3.0, [("s", 0.25, 4), ("s", 0.0, 1)]),
        ("f", "alone", 2.0, [("s", 0.0, 1)]),
        # j is exactly average at w, and not among those that came to it from y.
        ("i", "m", 0.0, [("y", 0.0, 1), ("w", 0.0, 1)]),
        ("j", "m", 1.0, [("y", 0.0, 1), ("w", 0.0, 1)]),
        ("k", "m", 2.0, [("x", 0.0, 1), ("w", 0.0, 1)]),
    )
]


def rich_for(terms: dict[str, Any]) -> list[Trajectory]:
    """The rich batch with those step rewards that the terms take."""
    kept: list[list[float | None]]
    if terms["step"] == "mt_grpo":
        kept = [[0.25 * (n % 3), *[None] * (len(one.steps) - 1)] for n, one in enumerate(RICH)]
    elif terms["episode"] == "gdpo" and not CreditConfig(**terms).counts_step_rewards:
        kept = [[None] * len(one.steps) for one in RICH]
    else:
        return RICH
    return [
        replace(one, steps=[replace(step, reward=r) for step, r in zip(one.steps, rewards, strict=True)])
        for one, rewards in zip(RICH, kept, strict=True)
    ]


SHAPED: list[tuple[str, str]] = [
    (shaping, step)
    for shaping, steps in (
        ("potential", ("gigpo", "hgpo", "rtmc", "leave_one_out_to_go", "reinforce_pp")),
        ("score_gain", ("none", "gigpo", "treerl", "per_turn_index_biased", "igpo", "igpo_as_published")),
    )
    for step in steps
]
FILTERING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"filters": ("top_share",)}, {"top_share": 0.5}),
    ({"filters": ("top_p",)}, {"top_p": 0.3}),
    ({"overlong": "mask"}, {"overlong_limit": 5}),
    (
        {"overlong": "penalize", "overlong_limit": 10, "overlong_buffer": 4},
        {"overlong_limit": 8, "overlong_buffer": 8, "overlong_factor": 2.0},
    ),
]
"""What uses them, and settings of filters that are walked there."""


def test_every_setting_is_walked():
    filtering = {name for _, changed in FILTERING for name in changed}
    walked = {*CHANGED, *filtering, "scores", "shaping", "shaping_weight"}
    assert {field.name for field in fields(CreditConfig)} == {"episode", "step", *walked}


@pytest.mark.parametrize(("shaping", "step"), SHAPED)
def test_shaping_and_its_weight_change_something(shaping, step):
    plain = CreditConfig(step=step)
    config = replace(plain, shaping=shaping, scores="reward:p")
    found = [assign(RICH, one).advantages for one in (plain, config, replace(config, shaping_weight=0.5))]
    assert found[0] != found[1] != found[2] != found[0]
    with pytest.raises(ConfigError, match=r"shaping_weight is 0\.0; expected above 0"):
        replace(config, shaping_weight=0.0)


@pytest.mark.parametrize(("used", "changed"), FILTERING)
def test_every_setting_of_a_filter_changes_something_and_is_refused_elsewhere(used, changed):
    config = CreditConfig(**used)
    before = assign(RICH, config).advantages
    for name, value in changed.items():
        assert assign(RICH, replace(config, **{name: value})).advantages != before, name
        with pytest.raises(ConfigError, match=rf"^{name} = .* has no effect .*; leave it out"):
            CreditConfig(**{name: value})


OFF: list[dict[str, Any]] = [
    {**terms, name: off}
    for terms in TERMS
    if terms["episode"] == "grpo" or terms["step"] in ("none", "gigpo")
    for name, off in (("step_weight", 0.0), ("scale_by_std", False), ("history", 0), ("gamma", 0.0))
    if name in CreditConfig(**terms).settings_used()
    if name != "step_weight" or (terms["episode"] != "none" and not terms.keys() & {"anchors", "shaping"})
]
"""Terms with a setting that switches others off."""


@pytest.mark.parametrize("terms", [*TERMS, *OFF])
def test_every_setting_changes_something_or_is_refused(terms):
    config = CreditConfig(**terms)
    batch = rich_for(terms)
    before = assign(batch, config).advantages
    for name, changed in CHANGED.items():
        value: Any = changed if changed != terms.get(name) else getattr(CreditConfig(), name)
        if name == "reward_weights" and terms["episode"] != "gdpo":
            continue  # They are in `Trajectory.reward`: tests/credit/test_pipeline.py
        if name in ("filters", "overlong", "shaping_weight") and "scores" in terms:
            continue  # Walked without scores, and in SHAPED
        if name not in config.settings_used():
            with pytest.raises(ConfigError, match=f"^{name} = .* has no effect with episode"):
                replace(config, **{name: value})
        elif name not in OF_THE_PIPELINE:
            assert assign(batch, replace(config, **{name: value})).advantages != before, name


def test_the_readme_names_the_settings_of_each_term():
    text = (Path(credit.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", settings)) for name, settings in rows}
    terms: dict[str, Any] = {**EPISODE_TERMS, **STEP_TERMS, **BOTH_TERMS}
    del terms["turn_credit"]  # told of beside the scores that it needs
    assert {name: told.get(name) for name in terms} == {
        name: set(term.settings - {"step_weight"}) for name, term in terms.items()
    }


def test_every_combination_gives_something_else():
    found = [tuple(assign(rich_for(terms), CreditConfig(**terms)).advantages.values()) for terms in TERMS]
    assert len(set(found)) == len(TERMS)


def test_terms_that_need_lengths_say_so():
    batch = [trajectory("a", 1.0), trajectory("b", 0.0)]
    for episode in ("opo", "reinforce_pp_baseline_as_published"):
        with pytest.raises(CreditError, match="token ids"):
            assign(batch, CreditConfig(episode=episode))


TREES = {"tree_grpo", "tree_grpo_as_published", "tree_edges", "treerl"}
anchors_of_groups = st.lists(st.lists(st.text("abc-", max_size=5), min_size=2, max_size=5), max_size=4)
credits = st.sampled_from([terms for terms in TERMS if terms["step"] != "gae"])
"""Those that compare rewards with each other; `gae` holds them against values."""


@example([["", "a"]], 0.3, {"episode": "grpo", "step": "gigpo_as_published"}, 0.0, False, 0)
@given(
    anchors_of_groups,
    st.sampled_from([0.0, 0.3, 1.0, -2.5]),
    credits,
    st.floats(0.0, 1.0),
    st.booleans(),
    st.sampled_from([0, 1]),
)
def test_equal_rewards_give_zero_for_every_estimator_and_discount(groups, reward, credit, gamma, scale, ddof):
    if credit["episode"] == "maxrl":
        reward = abs(reward)
    used = CreditConfig(**credit).settings_used()
    wanted = {"gamma": gamma, "scale_by_std": scale, "ddof": ddof}
    wanted = {name: value for name, value in wanted.items() if name in used}
    if "ddof" not in CreditConfig(**credit, **wanted | {"ddof": 0}).settings_used():
        wanted.pop("ddof", None)
    config = CreditConfig(**credit, **wanted)
    if credit["step"] == "mt_grpo" or TREES & set(credit.values()):
        groups = [["aa" + anchors for anchors in members] for members in groups]
        assume(groups or credit["step"] == "mt_grpo")
    one_reward: list[float | None] = [0.5] if credit["step"] == "mt_grpo" else [None]
    batch = [
        trajectory(
            f"r{g}-{i}",
            reward,
            anchors,
            f"g{g}",
            rewards=(one_reward + [None] * len(anchors))[: len(anchors)],
            tokens=1,
            parent=f"r{g}-0-0" if i else None,
        )
        for g, members in enumerate(groups)
        for i, anchors in enumerate(members)
    ]
    result = assign(batch, config)
    assert all(advantage == 0.0 for advantage in result.advantages.values())
    assert (result.diagnostics.informative_groups, result.diagnostics.equal_groups) == (0, len(groups))
