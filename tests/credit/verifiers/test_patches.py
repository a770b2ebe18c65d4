"""Patches: SWE-RL's golden number, and that no prediction can be long enough to cost or to gain."""

from typing import Any

import pytest

from spangrad.credit.verifiers import patch_similarity
from spangrad.errors import CreditError

_RIGHT = {"a.py": "-x=1\n+x=2"}


def test_golden_number() -> None:
    assert patch_similarity({"a.py": "-x=1\n+x=3"}, _RIGHT) == pytest.approx(0.888889, abs=1e-6)


def test_a_file_of_one_side_only_counts_as_zero() -> None:
    assert patch_similarity(_RIGHT | {"b.py": "+1"}, _RIGHT) == 0.5
    assert patch_similarity({"b.py": "+1"}, _RIGHT) == 0.0


@pytest.mark.parametrize("predicted", [None, "diff", {}, {"a.py": None}, {1: "x"}])
def test_malformed_patches(predicted: object) -> None:
    assert patch_similarity(predicted, _RIGHT) == -1.0


def test_a_long_prediction_is_cut_and_gains_nothing() -> None:
    padded = _RIGHT["a.py"] + "z" * 10_000_000
    assert 0.0 < patch_similarity({"a.py": padded}, _RIGHT) < 1e-5


def test_a_long_right_patch_is_refused() -> None:
    with pytest.raises(CreditError, match="max_characters"):
        patch_similarity(_RIGHT, {"a.py": "x" * 100}, max_characters=99)


@pytest.mark.parametrize("right", [None, "diff", {}, {"a.py": None}, {"a.py": ""}])
def test_a_right_patch_that_is_none_is_the_operators_error(right: Any) -> None:
    with pytest.raises(CreditError, match="the right patch"):
        patch_similarity(_RIGHT, right)
