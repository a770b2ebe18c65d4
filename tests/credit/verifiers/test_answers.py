"""Answers: golden numbers of Search-R1's EM and F1, and what a policy may write instead of one."""

from collections.abc import Callable
from typing import Any

import pytest

from spangrad.credit.verifiers import contains_match, exact_match, f1_score
from spangrad.errors import CreditError


def test_golden_numbers() -> None:
    assert exact_match("The Eiffel Tower!", "eiffel tower") == 1.0
    assert f1_score("the big Eiffel Tower", "eiffel tower") == pytest.approx(0.8)


def test_the_best_of_several_right_answers_counts() -> None:
    assert exact_match("NYC", ["New York", "nyc"]) == 1.0
    assert f1_score("york", ["los angeles", "new york"]) == pytest.approx(2 / 3)


def test_words_count_as_often_as_they_occur() -> None:
    assert f1_score("paris paris paris", "paris") == pytest.approx(0.5)


def test_contained_are_whole_words_only() -> None:
    assert contains_match("It is in Paris, France.", "Paris") == 1.0
    assert contains_match("a comparison", "paris") == 0.0
    assert contains_match("anything", "the") == 0.0


@pytest.mark.parametrize("answer", [None, 3, ["paris"], {"a": 1}, ""])
def test_what_is_no_answer_is_wrong(answer: object) -> None:
    assert exact_match(answer, "paris") == contains_match(answer, "paris") == f1_score(answer, "paris") == 0.0


def test_nothing_against_nothing() -> None:
    assert f1_score("the", "a") == 1.0


@pytest.mark.parametrize(
    "golds", [[], [None], None, "", " ", ["x", ""], float("nan"), {"gold": "x"}, iter("x")]
)
@pytest.mark.parametrize("verifier", [exact_match, contains_match, f1_score])
def test_no_right_answer_is_the_operators_error(verifier: Callable[..., float], golds: Any) -> None:
    for answer in ("x", None):
        with pytest.raises(CreditError, match="right answers"):
            verifier(answer, golds)
