"""When a candidate is better: hand-worked numbers, and the sign test against simulated coins."""

import math
from itertools import product

import numpy as np
import pytest

from spangrad.errors import ConfigError, CreditError
from spangrad.trainer.promotion.rule import Comparison, PromotionConfig, Verdict, compare, sign_test


def test_only_tasks_that_differ_speak() -> None:
    candidate = {"a": True, "b": True, "c": False, "d": False, "e": True, "only": True}
    promoted = {"a": True, "b": False, "c": True, "d": False, "e": False, "other": True}
    found = compare(candidate, promoted)
    # Both have a, b, c, d, e. Gained: b, e. Lost: c. 3 of 5 against 2 of 5.
    assert found == Comparison(tasks=5, gained=2, lost=1, success=0.6, promoted_success=0.4)
    assert found.p_value == 4 / 8  # C(3,2) + C(3,3) of 2^3
    assert found.drop == -0.2
    assert compare(candidate, {"other": True}) is None


@pytest.mark.parametrize(
    ("gained", "lost", "expected"),
    [
        (0, 0, 1.0),
        (5, 0, 1 / 32),
        (0, 5, 1.0),
        (1, 1, 3 / 4),  # TH, HT, HH of 4
        (4, 1, 6 / 32),  # C(5,4) + C(5,5) of 2^5
        (9, 2, 67 / 2048),  # C(11,9) + C(11,10) + C(11,11) = 55 + 11 + 1
    ],
)
def test_sign_test_of_hand_worked_counts(gained: int, lost: int, expected: float) -> None:
    assert sign_test(gained, lost) == expected


@pytest.mark.parametrize(("gained", "lost"), list(product(range(5), range(5))))
def test_sign_test_is_the_share_of_all_throws(gained: int, lost: int) -> None:
    throws = list(product((0, 1), repeat=gained + lost))
    assert sign_test(gained, lost) == sum(sum(throw) >= gained for throw in throws) / len(throws)


def test_sign_test_of_many_pairs_is_the_normal_tail() -> None:
    # 5,000 pairs: mean 2,500, standard deviation sqrt(5000)/2 = 35.36; 2,570 is 1.966 of them above.
    z = (2570 - 0.5 - 2500) / math.sqrt(5000 / 4)
    assert sign_test(2570, 2430) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), rel=1e-3)


def test_sign_test_refuses_negative_counts() -> None:
    with pytest.raises(CreditError, match="-1 pairs gained"):
        sign_test(-1, 0)


@pytest.mark.parametrize(
    ("gained", "lost", "margin", "verdict"),
    [
        (5, 0, 0.0, Verdict.BETTER),  # p = 1/32
        (4, 0, 0.0, Verdict.UNDECIDED),  # p = 1/16 > 0.05
        (0, 0, 0.0, Verdict.UNDECIDED),
        (3, 3, 0.0, Verdict.UNDECIDED),
        (0, 1, 0.0, Verdict.WORSE),
        (9, 2, 0.0, Verdict.BETTER),  # p = 0.0327
        (9, 2, 0.35, Verdict.BETTER),  # 7 of 20 tasks
        (9, 2, 0.36, Verdict.UNDECIDED),
    ],
)
def test_verdicts(gained: int, lost: int, margin: float, verdict: Verdict) -> None:
    found = Comparison(20, gained, lost, (3 + gained) / 20, (3 + lost) / 20)
    assert found.verdict(PromotionConfig(every=1, margin=margin)) is verdict


def test_of_equal_policies_at_most_one_in_twenty_is_promoted() -> None:
    generator = np.random.default_rng(0)
    rule = PromotionConfig(every=1)
    solved = generator.random((2, 4000, 64)) < 0.5
    promoted = 0
    for candidate, before in zip(*solved, strict=True):
        found = compare(dict(enumerate(candidate)), dict(enumerate(before)))
        assert found is not None
        promoted += found.verdict(rule) is Verdict.BETTER
    assert 0 < promoted / 4000 <= 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": -1}, "promotion.every is -1"),
        ({"every": 1, "margin": 1.0}, "promotion.margin is 1.0"),
        ({"every": 1, "confidence": 1.0}, "promotion.confidence is 1.0"),
        ({"every": 1, "confidence": 0.4}, "promotion.confidence is 0.4"),
        ({"every": 1, "temperature": -0.1}, "promotion.temperature is -0.1"),
        ({"every": 1, "temperature": math.nan}, "promotion.temperature is nan"),
        ({"every": 1, "tasks": 4}, "promotion.tasks is 4, expected 5 or more"),
        ({"every": 1, "rollback_drop": 0.0}, "promotion.rollback_drop is 0.0"),
        ({"every": 1, "rollback_after": -1}, "promotion.rollback_after is -1"),
        (
            {"every": 1, "rollback_after": 1, "rollback_drop": 0.5},
            "promotion.rollback_drop is 0.5, expected none",
        ),
        (
            {"every": 1, "tasks": 50, "margin": 0.1},
            "expected 0, or more than 0.1: .* by 5 of 50 tasks at least",
        ),
        ({"margin": 0.1, "tasks": 7}, "without it promotion.tasks, promotion.margin has no effect"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromotionConfig(**settings)  # type: ignore[arg-type]


def test_as_few_tasks_as_can_show_anything_are_taken() -> None:
    rule = PromotionConfig(every=1, tasks=5)
    assert Comparison(5, 5, 0, 1.0, 0.0).verdict(rule) is Verdict.BETTER
