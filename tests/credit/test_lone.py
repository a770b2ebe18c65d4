"""Where every rollout is alone in its group, each setting of credit says something, or is said not to."""

from dataclasses import fields, replace
from typing import Any

import pytest

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.estimators import BOTH_TERMS, EPISODE_TERMS, STEP_TERMS
from spangrad.credit.types import Trajectory
from spangrad.errors import ConfigError
from tests.credit.test_assign import CHANGED, OF_THE_PIPELINE, RICH


def alone(one: Trajectory) -> Trajectory:
    """In no group; the longer ones fork after their first step, and their ends earn something else."""
    if len(one.steps) < 3:
        return replace(one, group_id=None, scores=[0.5] * (len(one.steps) + 1))
    last = replace(one.steps[-1], parent=one.steps[0].call_id, reward=0.75)
    return replace(one, group_id=None, steps=[*one.steps[:-1], last], is_truncated=one.rollout_id == "c")


LONE = [alone(one) for one in RICH]
ONE_REWARD = [
    replace(
        one, steps=[replace(step, reward=None if t else 0.5, parent=None) for t, step in enumerate(one.steps)]
    )
    for one in LONE
]
"""As `mt_grpo` wants it."""
WALKED: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in CHANGED.items() if name != "reward_weights"},
    "anchors": ("similar",),
    "filters": (("zero_spread",), ("top_share",), ("top_p",), ("zero_spread", "top_p")),
    "top_share": (0.5,),
    "top_p": (0.3,),
    "overlong": ("mask", "penalize"),
    "overlong_limit": (5,),
    "overlong_buffer": (3,),
    "overlong_factor": (2.0,),
    "shaping": ("potential", "score_gain"),
    "shaping_weight": (0.5,),
}
GOES_WITH = {
    "shaping": {"shaping", "scores", "shaping_weight"},
    "overlong": {"overlong", "overlong_limit", "overlong_buffer", "overlong_factor"},
    "filters": {"filters", "top_share", "top_p"},
}
"""What is left out with a setting."""
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"singleton": "raw"},
    {"step_weight": 0.0},
    {"scale_by_std": False},
    {"scores": "reward:p", "shaping": "score_gain"},
    {"scores": "reward:p", "shaping": "potential"},
    {"overlong": "mask", "overlong_limit": 20},
    {"overlong": "penalize", "overlong_limit": 20, "overlong_buffer": 20},
    {"anchors": "similar"},
    {"filters": ("zero_spread",)},
    {"filters": ("top_p",)},
)
"""What is walked with each pair of terms."""


def test_every_setting_is_walked():
    assert {one.name for one in fields(CreditConfig)} == {
        *WALKED,
        "episode",
        "step",
        "reward_weights",
        "scores",
    }


def config_of(**settings: Any) -> CreditConfig | None:
    """None: it is refused, whatever the groups are."""
    try:
        if settings["step"] == "turn_credit":
            settings.setdefault("scores", "reward:p")
        return CreditConfig(**settings)
    except ConfigError:
        return None


def credited(config: CreditConfig) -> list[float | None]:
    batch = ONE_REWARD if config.step == "mt_grpo" else LONE
    if config.episode == "gdpo" and not config.counts_step_rewards:
        bare = [[replace(step, reward=None) for step in one.steps] for one in LONE]
        batch = [replace(one, steps=steps) for one, steps in zip(LONE, bare, strict=True)]
    found = assign(batch, config).advantages.values()
    return [None if a is None else round(a, 9) + 0.0 for a in found]


@pytest.mark.parametrize("step", ["none", *STEP_TERMS, *BOTH_TERMS])
@pytest.mark.parametrize("episode", EPISODE_TERMS)
def test_every_setting_changes_lone_rollouts_or_needs_groups(episode, step):
    terms = {"episode": episode, "step": step}
    for beside in BESIDE:
        config = config_of(**terms, **beside)
        if config is None:
            continue
        before = credited(config)
        if "filters" in config.needs_groups:
            assert set(before) == {None}
            continue
        if step not in BOTH_TERMS:  # whose code, as published, keeps the raw return of a single step
            assert config.counts_lone == any(before), config
        for name, value in ((name, value) for name, values in WALKED.items() for value in values):
            settings = {**terms, **beside, name: value}
            changed = config_of(**settings)
            without = config_of(
                **{key: settings[key] for key in settings if key not in GOES_WITH.get(name, {name})}
            )
            if changed is None or without is None or changed == without or not changed.counts_lone:
                continue
            if "filters" in changed.needs_groups:
                assert set(credited(changed)) == {None}, (beside, name, value)
            elif name not in OF_THE_PIPELINE:
                has_changed = credited(changed) != credited(without)
                assert has_changed == (name not in changed.needs_groups), (beside, name, value)


@pytest.mark.parametrize("step", ["none", *STEP_TERMS])
@pytest.mark.parametrize("episode", EPISODE_TERMS)
def test_terms_that_need_groups_are_named_and_could_be_left_out(episode, step):
    config = config_of(episode=episode, step=step)
    if config is None or not config.counts_lone:
        return
    for name, other in (("episode", "none"), ("step", "none")):
        without = config_of(**{"episode": episode, "step": step, name: other})
        if without is None or getattr(config, name) == other:
            continue
        assert (credited(without) == credited(config)) == (
            name in config.needs_groups or (name, episode) == ("episode", "grpo")
        )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"episode": "running_baseline", "step": "gigpo", "gamma": 0.5}, ("step", "gamma")),
        ({"episode": "value_baseline", "step": "hgpo", "history": 1}, ("step", "history")),
        ({"episode": "rloo", "step": "gae", "gae_lambda": 0.5}, ("episode",)),
        ({"step": "gae", "scale_by_std": False}, ("scale_by_std",)),
        ({"step": "gae", "filters": ("top_p",), "top_p": 0.5}, ("filters",)),
        ({"singleton": "raw", "ddof": 1, "step": "reinforce_pp", "eps": 0.1}, ("ddof",)),
        ({"episode": "tree_grpo", "ddof": 1, "filters": ("zero_spread",)}, ()),
        ({"step": "turn_credit", "scores": "reward:p", "filters": ("zero_spread",)}, ()),
    ],
)
def test_each_setting_that_needs_groups_is_named_by_itself(settings, named):
    found = CreditConfig(**settings).needs_groups
    assert found[: len(named)] == named and set(found[len(named) :]) <= {"top_p"}


def test_a_group_whose_returns_are_equal_and_whose_branches_differ_is_no_zero_spread():
    one = replace(LONE[0], group_id="g")
    batch = [one, replace(one, rollout_id="z")]
    batch[1] = replace(
        batch[1], steps=[replace(step, call_id=f"z{t}", parent=None) for t, step in enumerate(one.steps)]
    )
    config = CreditConfig(episode="tree_grpo", filters=("zero_spread",))
    assert assign(batch, config).advantages == assign(batch, replace(config, filters=())).advantages
    assert any(assign(batch, config).of("a").values())
