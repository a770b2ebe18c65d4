"""Estimators as one word."""

from dataclasses import fields
from typing import Any

import pytest

from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.spelling import parsed, spelled
from spangrad.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("grpo", CreditConfig()),
        ("grpo+gigpo", CreditConfig(step="gigpo")),
        ("gigpo", CreditConfig(episode="none", step="gigpo")),
        ("gigpo_as_published", CreditConfig(step="gigpo_as_published")),
        ("rloo+leave_one_out_to_go", CreditConfig(episode="rloo", step="leave_one_out_to_go")),
        ("grpo:scale_by_std=false", CreditConfig(scale_by_std=False)),
        ("grpo:singleton=raw:ddof=1", CreditConfig(singleton="raw", ddof=1)),
        ("leave_one_out_to_go:gamma=1", CreditConfig("none", "leave_one_out_to_go", gamma=1.0)),
        (
            "turn_credit:scores=s.py:f:gamma=1",
            CreditConfig("none", "turn_credit", scores="s.py:f", gamma=1.0),
        ),
        ("grpo:shaping=score_gain:scores=reward:p", CreditConfig(shaping="score_gain", scores="reward:p")),
    ],
)
def test_a_spelling_means_a_config(text: str, config: CreditConfig) -> None:
    assert parsed(text) == config
    assert parsed(spelled(config)) == config


def test_settings_of_a_config_hold_for_the_terms_that_use_them() -> None:
    base = {"gamma": 0.9, "eps": 1e-3}
    assert parsed("rloo", base) == CreditConfig("rloo")
    assert parsed("rloo+gigpo", base) == CreditConfig("rloo", "gigpo", gamma=0.9, eps=1e-3)
    assert parsed("rloo+gigpo:gamma=1", base) == CreditConfig("rloo", "gigpo", gamma=1.0, eps=1e-3)


def test_settings_that_need_each_other_are_inherited_together() -> None:
    shaping: dict[str, Any] = {"shaping": "potential", "scores": "reward:progress"}
    base = {**shaping, "anchors": "similar", "similarity": 0.9}
    assert parsed("gigpo", base) == CreditConfig("none", "gigpo", **base)
    assert parsed("leave_one_out_to_go", base) == CreditConfig("none", "leave_one_out_to_go", **shaping)
    gained = parsed(
        "grpo:shaping=score_gain", {"scores": "reward:progress", "top_p": 0.5, "filters": ("top_p",)}
    )
    assert (gained.shaping, gained.scores, gained.filters) == ("score_gain", "reward:progress", ("top_p",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grop", "there is no estimator 'grop'; known are .*did you mean 'grpo'"),
        ("grpo+gipgo", "no estimator 'gipgo' in 'grpo\\+gipgo'.*did you mean 'gigpo'"),
        ("gigpo+grpo", "'gigpo' compares steps, so it stands second"),
        ("grpo+rloo", "'rloo' compares whole rollouts, so it stands first"),
        ("grpo:gama=1", "'gama=1' is no setting.*did you mean 'gamma'"),
        ("grpo:gamma=1", "gamma = 1.0 has no effect"),
        ("grpo:eps=much", "eps is 'much', expected float"),
        ("", "there is no estimator ''"),
    ],
)
def test_what_is_misspelt_names_the_nearest(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(text)


def test_what_a_config_says_around_its_terms_is_kept_where_it_goes_together_with_others():
    around: dict[str, Any] = {
        "scores": "reward:p",
        "shaping": "potential",
        "filters": ("top_p",),
        "top_p": 0.5,
        "overlong": "penalize",
        "overlong_limit": 9,
        "overlong_buffer": 3,
    }
    config = CreditConfig(step="gigpo", **around)
    base = {field.name: getattr(config, field.name) for field in fields(CreditConfig)}
    assert parsed("rloo+leave_one_out_to_go", base) == CreditConfig("rloo", "leave_one_out_to_go", **around)
    plain = {name: value for name, value in around.items() if name not in ("scores", "shaping")}
    assert parsed("rloo", base) == CreditConfig("rloo", **plain)
    without_penalty: dict[str, Any] = {"filters": ("top_p",), "top_p": 0.5}
    assert parsed("gdpo", base) == CreditConfig("gdpo", **without_penalty)
    by_scores = CreditConfig("none", "turn_credit", scores="reward:p", **without_penalty)
    assert parsed("turn_credit", base) == by_scores
    with pytest.raises(ConfigError, match=r"estimator 'grpo\+turn_credit': step 'turn_credit' needs scores"):
        parsed("grpo+turn_credit")


@pytest.mark.parametrize("gamma", [0.5, 0.12345678, 0.1 + 0.2])
def test_numbers_that_differ_in_their_last_digit_are_spelled_differently(gamma: float) -> None:
    config = CreditConfig(step="gigpo", gamma=gamma)
    assert parsed(spelled(config)).gamma == gamma
