"""Monitors of numbers: a planted fault is found soon, noise and missing numbers are no fault.

Source of the rates: made-up runs with the seeds below; README.md of trainer/monitoring states them.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.trainer.histories import history, onsets

from spangrad.trainer.monitoring.history import History
from spangrad.trainer.monitoring.monitor_config import MONITOR_NAMES, MonitorConfig
from spangrad.trainer.monitoring.monitors import MONITORS, metrics_of
from spangrad.trainer.monitoring.statistics import deviation, trend

UPDATES = 60
FAULT = 30
"""Update at which a fault begins."""
DEFAULT = MonitorConfig()
VERIFIED = MonitorConfig(verifier="hidden_tests")
Series = dict[str, list[float | None]]


def quiet(rng: np.random.Generator, updates: int = UPDATES) -> Series:
    """A run in which nothing changes but by chance; rewards rise a little, as they should."""

    def around(center: float, relative: float) -> NDArray[np.float64]:
        return center * np.exp(relative * rng.standard_normal(updates))

    rising = 0.3 + 0.5 * np.arange(updates) / updates + 0.03 * rng.standard_normal(updates)
    made = {
        "reward/mean": rising,
        "reward/spread": around(0.35, 0.2),
        "policy/entropy": around(0.4, 0.05),
        "grad/norm": around(1.0, 0.4),
        "behavior/first_step_alike": np.clip(0.2 + 0.05 * rng.standard_normal(updates), 0, 1),
        "gap/mean": around(0.005, 0.3),
        "policy/sample_share": np.clip(0.95 + 0.02 * rng.standard_normal(updates), 0, 1),
        "policy/clip_low": around(0.02, 0.3),
        "policy/clip_high": around(0.02, 0.3),
        "behavior/verifier": 0.5 + 0.03 * rng.standard_normal(updates),
        "behavior/steps_mean": around(6.0, 0.08),
        "behavior/steps_median": np.round(around(6.0, 0.05)),
        "behavior/steps_low": np.round(around(5.0, 0.1)),
        "behavior/test_edits": rng.binomial(192, 0.01, updates) / 192,
    }
    return {name: [float(x) for x in numbers] for name, numbers in made.items()}


@pytest.mark.parametrize("name", MONITORS)
def test_noise_alarms_at_most_once_in_a_thousand_updates(name: str) -> None:
    rng = np.random.default_rng(20)
    alarms = sum(len(onsets(name, quiet(rng), VERIFIED)) for _ in range(50))
    assert alarms <= 3  # 50 runs of 60 updates


def fall(series: Series, name: str, to: float, after: int = 1) -> None:
    """From FAULT on a number goes to a multiple of what it was, in so many updates."""
    for u in range(FAULT, UPDATES):
        share = min(1.0, (u - FAULT + 1) / after)
        series[name][u] = (series[name][u] or 0.0) * (1 - share + share * to)


def cliff(series: Series) -> None:
    fall(series, "reward/spread", 0.02)
    series["reward/mean"] = [0.4] * UPDATES


def drifting(series: Series) -> None:
    series["behavior/verifier"][FAULT:] = [
        (x or 0.0) - 0.02 * (k + 1) for k, x in enumerate(series["behavior/verifier"][FAULT:])
    ]


def shortcut(series: Series) -> None:
    series["behavior/steps_low"][FAULT:] = [1.0] * (UPDATES - FAULT)
    drifting(series)


def template(series: Series) -> None:
    learned_to_begin_alike(series)
    series["reward/mean"][FAULT:] = series["reward/mean"][:1] * (UPDATES - FAULT)


def learned_to_begin_alike(series: Series) -> None:
    series["behavior/first_step_alike"][FAULT:] = [0.95] * (UPDATES - FAULT)


def edits(series: Series) -> None:
    series["behavior/test_edits"][FAULT:] = [0.3] * (UPDATES - FAULT)


PLANTED: dict[str, tuple[Callable[[Series], None], int]] = {
    "spread": (cliff, 2),
    "entropy": (lambda series: fall(series, "policy/entropy", 0.01, after=5), 5),
    "entropy_rise": (lambda series: fall(series, "policy/entropy", 5.0, after=3), 3),
    "gradient": (lambda series: fall(series, "grad/norm", 1000.0), 1),
    "first_steps": (template, 1),
    "gap": (lambda series: fall(series, "gap/mean", 80.0), 1),
    "sample_share": (lambda series: fall(series, "policy/sample_share", 0.3), 1),
    "clip": (lambda series: fall(series, "policy/clip_high", 30.0), 1),
    "drift": (drifting, 16),
    "steps": (lambda series: fall(series, "behavior/steps_mean", 0.2, after=4), 4),
    "early_exits": (shortcut, 2),
    "test_edits": (edits, 1),
}
"""Monitor -> what goes wrong from update FAULT on, and updates in which it is to be found."""


@pytest.mark.parametrize("name", MONITORS)
def test_a_planted_fault_is_found_once_within_some_updates(name: str) -> None:
    plant, within = PLANTED[name]
    for seed in range(10):
        series = quiet(np.random.default_rng(seed))
        before = [u for u in onsets(name, series, VERIFIED) if u < FAULT]
        plant(series)
        found = [u for u in onsets(name, series, VERIFIED) if u not in before]
        assert found and FAULT <= found[0] < FAULT + within, (seed, found)


def test_to_begin_alike_is_no_fault_where_the_reward_has_risen() -> None:
    series = quiet(np.random.default_rng(0))
    learned_to_begin_alike(series)
    assert onsets("first_steps", series, VERIFIED) == []


@pytest.mark.parametrize("name", MONITORS)
def test_numbers_that_are_missing_are_no_fault(name: str) -> None:
    plant, _ = PLANTED[name]
    series = quiet(np.random.default_rng(0))
    plant(series)
    assert onsets(name, series, VERIFIED)
    for metric in metrics_of(name, VERIFIED):
        others: Series = {**series, metric: [None] * UPDATES}
        if name == "clip":  # one bound may be there without the other
            others |= {"policy/clip_low": [None] * UPDATES, "policy/clip_high": [None] * UPDATES}
        assert onsets(name, others, VERIFIED) == []


WITHOUT_HISTORY = {"gap", "sample_share", "clip", "test_edits"}


@pytest.mark.parametrize("name", MONITORS)
def test_a_number_is_compared_when_there_are_enough_before_it(name: str) -> None:
    plant, _ = PLANTED[name]
    series = quiet(np.random.default_rng(1))
    plant(series)
    early = {metric: numbers[FAULT + 14 : FAULT + 14 + 8] for metric, numbers in series.items()}
    found = [MONITORS[name].find(history(early, last), VERIFIED) is not None for last in range(8)]
    assert any(found) == (name in WITHOUT_HISTORY)


@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_that_is_off_finds_nothing(name: str) -> None:
    plant, _ = PLANTED[name]
    series = quiet(np.random.default_rng(0))
    plant(series)
    off = MonitorConfig(**{"verifier": "hidden_tests", name: None})  # type: ignore[arg-type]
    assert onsets(name, series, off) == []


def test_every_monitor_has_its_fault_here_or_in_the_test_of_phrases() -> None:
    assert {*PLANTED, "flattery"} == {*MONITORS, "flattery"} == set(MONITOR_NAMES)


def test_rewards_that_all_agree_because_they_are_good_are_no_collapse() -> None:
    series = quiet(np.random.default_rng(0))
    fall(series, "reward/spread", 0.02)
    series["reward/mean"][FAULT:] = [0.99] * (UPDATES - FAULT)
    assert onsets("spread", series, DEFAULT) == []


def test_few_groups_of_hard_tasks_agree_by_chance_without_an_alarm() -> None:
    """Binary rewards of 4 groups of 8, tasks that are hardly ever solved; 4 more until one group differs."""
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(50):
        series: Series = {"reward/mean": [], "reward/spread": []}
        for _ in range(UPDATES):
            solved = np.zeros(0)
            while not ((solved > 0) & (solved < 1)).any():
                solved = np.concatenate([solved, rng.binomial(8, rng.beta(0.1, 1.0, 4)) / 8])
            series["reward/mean"].append(float(solved.mean()))
            series["reward/spread"].append(float(np.sqrt(solved * (1 - solved)).mean()))
        alarms += len(onsets("spread", series, DEFAULT))
    assert alarms <= 3  # 50 runs of 60 updates


def test_quick_rollouts_that_the_verifier_likes_are_no_early_exits() -> None:
    series = quiet(np.random.default_rng(0))
    series["behavior/steps_low"][FAULT:] = [1.0] * (UPDATES - FAULT)
    series["behavior/verifier"][FAULT:] = [0.9] * (UPDATES - FAULT)
    assert onsets("early_exits", series, VERIFIED) == []
    del series["behavior/verifier"]
    assert onsets("early_exits", series, DEFAULT) == [FAULT]


def test_a_held_out_success_is_compared_where_it_was_measured() -> None:
    """Evaluations after every third update: their points alone make the trend, and it is told once."""
    points = range(0, UPDATES, 3)
    series: Series = {
        "reward/mean": [0.3 + 0.01 * u for u in range(UPDATES)],
        "eval/success_greedy": [0.9 - 0.01 * u if u in points else None for u in range(UPDATES)],
    }
    # 8 points without an exception are the first to be compared: z is (28 - 1) / sqrt(65.3) = 3.34
    assert onsets("drift", series, DEFAULT) == [points[7]]
    assert onsets("drift", {**series, "reward/mean": [0.5] * UPDATES}, DEFAULT) == []


def test_gradients_that_were_all_equal_make_nothing_of_a_small_change() -> None:
    assert onsets("gradient", {"grad/norm": [1.0] * 20 + [1.5]}, DEFAULT) == []
    # log 2 / 0.05 = 13.9 deviations
    found = MONITORS["gradient"].find(history({"grad/norm": [1.0] * 20 + [2.0]}), DEFAULT)
    assert found is not None and found.value == pytest.approx(math.log(2) / 0.05)
    assert found.text == "gradient norm is 2, 1 was usual, 13.9 deviations above"


def test_deviations_are_of_the_median() -> None:
    # median 3, absolute deviations 2, 1, 0, 1, 97: median 1
    assert deviation(6.0, [1.0, 2.0, 3.0, 4.0, 100.0], floor=0.1) == pytest.approx(3 / 1.4826)
    assert deviation(6.0, [3.0, 3.0, 3.0], floor=1.5) == 2.0


def test_trends_are_those_of_mann_and_kendall() -> None:
    # n 4, all pairs rise: S 6, variance 4 * 3 * 13 / 18 = 8.667: (6 - 1) / 2.944
    assert trend([1.0, 2.0, 3.0, 4.0]) == pytest.approx(5 / math.sqrt(26 / 3))
    assert trend([4.0, 3.0, 2.0, 1.0]) == pytest.approx(-5 / math.sqrt(26 / 3))
    assert trend([1.0, 1.0, 1.0]) == 0.0
    assert trend([2.0, 1.0]) == 0.0  # S -1: one pair says nothing


def test_a_history_one_update_earlier_ends_there() -> None:
    now = history({"grad/norm": [1.0, 2.0, 3.0]})
    assert (now.now("grad/norm"), now.earlier().now("grad/norm")) == (3.0, 2.0)
    assert now.earlier().before("grad/norm", 2, least=1) == [1.0]
    assert now.before("grad/norm", 2, least=3) == []
    assert isinstance(now.earlier(), History)


def test_the_start_is_known_when_more_than_half_of_it_is() -> None:
    assert history({"x": [1.0, None, 3.0, 4.0]}).start("x", 3) == [1.0, 3.0]
    assert history({"x": [1.0, None, 3.0, 4.0]}).start("x", 2) == []
    assert history({"x": [1.0, 2.0, 3.0]}).start("x", 3) == []  # the last of them is looked at
