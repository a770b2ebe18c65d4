"""Patches: SWE-RL's golden number, and that no prediction can be long enough to cost or to gain."""

from difflib import SequenceMatcher
from typing import Any

import pytest

from spangrad.credit.verifiers import patch_similarity, patches
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


def test_repeated_characters_are_compared_by_lines() -> None:
    # 2 * 10,000^2 pairs of equal characters, and one line of each, that differ
    assert patch_similarity({"a.py": "ab" * 10_000}, {"a.py": "ba" * 10_000}) == 0.0
    assert patch_similarity({"a.py": "ab" * 10_000}, {"a.py": "ab" * 10_000}) == 1.0


@pytest.mark.parametrize(("most", "matched"), [(10_000, None), (60, 3 * len("+b=2\n")), (10, 0)])
def test_the_work_for_a_file_is_bounded(
    monkeypatch: pytest.MonkeyPatch, most: int, matched: int | None
) -> None:
    predicted, right = "+a=1\n+b=2\n" * 3, "+b=2\n+a=3\n" * 3
    by_characters = SequenceMatcher(None, predicted, right, autojunk=False).ratio()
    looked: list[int] = []
    find = SequenceMatcher.find_longest_match

    def counted(self: Any, alo: int, ahi: int, blo: int, bhi: int) -> Any:
        looked.append(sum(len(self.b2j.get(part, ())) for part in self.a[alo:ahi]))
        return find(self, alo, ahi, blo, bhi)

    monkeypatch.setattr(SequenceMatcher, "find_longest_match", counted)
    monkeypatch.setattr(patches, "MAX_PAIRS", most)
    expected = by_characters if matched is None else 2 * matched / 60
    assert patch_similarity({"a.py": predicted}, {"a.py": right}) == pytest.approx(expected)
    assert sum(looked) <= 2 * most


def test_a_long_right_patch_is_refused() -> None:
    with pytest.raises(CreditError, match="max_characters"):
        patch_similarity(_RIGHT, {"a.py": "x" * 100}, max_characters=99)


@pytest.mark.parametrize("right", [None, "diff", {}, {"a.py": None}, {"a.py": ""}])
def test_a_right_patch_that_is_none_is_the_operators_error(right: Any) -> None:
    with pytest.raises(CreditError, match="the right patch"):
        patch_similarity(_RIGHT, right)
