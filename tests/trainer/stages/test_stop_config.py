"""When the metric of `[stop]` ends a run."""

import math

import pytest

from spangrad.errors import ConfigError
from spangrad.trainer.stages.stop_config import StopConfig, stops


def of(**settings: object) -> StopConfig:
    return StopConfig(**{"metric": "loss/bc", **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "values", "is_end"),
    [
        (of(reaches=0.5), [], False),
        (of(reaches=0.5), [0.4, 0.6], False),  # the last one counts
        (of(reaches=0.5), [0.6, 0.5], True),
        (of(reaches=0.5, goal="higher"), [0.6], True),
        (of(reaches=0.5, goal="higher"), [0.4], False),
        (of(reaches=0.5, window=2), [0.4], False),  # no mean of two yet
        (of(reaches=0.5, window=2), [0.7, 0.3], True),  # (0.7 + 0.3) / 2
        (of(reaches=0.5, window=2), [0.3, 0.8], False),  # 0.55
        (of(patience=2), [3.0, 2.0, 2.0], False),  # one value that is no better than 2
        (of(patience=2), [3.0, 2.0, 2.0, 2.5], True),
        (of(patience=2), [3.0, 2.0, 2.0, 1.9], False),
        (of(patience=2, min_change=0.5), [3.0, 2.0, 1.9, 1.5], True),  # better by no more than 0.5
        (of(patience=2, min_change=0.5), [3.0, 2.0, 1.9, 1.4], False),
        (of(patience=1, goal="higher"), [0.1, 0.2], False),
        (of(patience=1, goal="higher"), [0.2, 0.2], True),
        (of(patience=1, window=2), [4.0, 2.0, 2.0], False),  # means 3, 2
        (of(patience=1, window=2), [4.0, 2.0, 2.0, 2.0], True),  # 3, 2, 2
        (of(patience=1), [1.0, math.nan], False),  # a NaN is no value
        (of(reaches=0.5), [0.4, math.nan], True),
    ],
)
def test_a_run_ends_where_the_metric_is_good_enough_or_gets_no_better(config, values, is_end):
    assert (stops(config, values) is not None) == is_end


def test_the_reason_says_the_metric_and_what_it_was():
    assert stops(of(reaches=0.5, window=2), [0.7, 0.3]) == (
        "loss/bc is 0.5, mean of 2, as good as stop.reaches, 0.5"
    )
    assert stops(of(patience=2, goal="higher"), [0.25, 0.1, 0.2]) == (
        "loss/bc was no better than 0.25 for 2 values"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": "", "reaches": 1.0}, "stop.reaches = 1.0 has no effect without stop.metric"),
        ({"metric": "", "goal": "higher"}, "stop.goal = 'higher' has no effect without"),
        ({}, "'loss/bc' ends nothing by itself"),
        ({"patience": 0}, "stop.patience is 0, expected 1 or more"),
        ({"patience": 1, "window": 0}, "stop.window is 0"),
        ({"patience": 1, "min_change": -1.0}, "stop.min_change is -1.0"),
        ({"reaches": 1.0, "min_change": 0.1}, "without stop.patience"),
        ({"reaches": math.inf}, "a finite number"),
        ({"reaches": 1.0, "goal": "low"}, "expected one of lower, higher"),
    ],
)
def test_settings_that_end_nothing_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        of(**settings)
