"""Rows of queries, folders and forms of answers."""

import os
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from spangrad.credit.verifiers import has_json_keys, has_tags, same_files, same_rows
from spangrad.errors import CreditError
from tests.credit.verifiers.deep_paths import make_deep


def test_rows_are_compared_as_often_as_they_occur_in_any_order() -> None:
    assert same_rows([(1, "a"), (2, None)], [(2, None), (1, "a")]) == 1.0
    assert same_rows([(1,), (1,), (2,)], [(1,), (2,), (2,)]) == 0.0
    assert same_rows([(1,), (2,)], [(2,), (1,)], ordered=True) == 0.0


def test_types_of_numbers_do_not_matter_and_other_types_do() -> None:
    assert same_rows([(2, 0.1 + 0.2, -0.0)], [(Decimal(2), 0.3, 0)]) == 1.0
    assert same_rows([(1,)], [("1",)]) == same_rows([(1,)], [(True,)]) == same_rows([(0,)], [(None,)]) == 0.0
    assert same_rows([(date(2024, 1, 2),)], [("2024-01-02",)]) == 1.0
    assert same_rows([(float("nan"),)], [(float("nan"),)]) == 1.0
    assert same_rows([(1.000000001,)], [(1.0,)], significant_digits=12) == 0.0


@pytest.mark.parametrize(
    "expected", [None, "ab", 3, [1, 2], ["ab"], [{"name": 1}], {"name": [1]}], ids=lambda given: repr(given)
)
def test_right_rows_that_are_none_are_the_operators_error_and_the_agents_are_wrong(expected: Any) -> None:
    given: list[Any] = [[(1,)], None]
    for found in given:
        with pytest.raises(CreditError, match="the right rows are"):
            same_rows(found, expected)
    assert same_rows(expected, [(1,)]) == same_rows(expected, []) == 0.0


def test_rows_of_odd_values_are_compared_and_do_not_raise() -> None:
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    assert same_rows([(nested,)], [(1,)]) == 0.0
    assert same_rows([(10**9999,)], [(1,)]) == 0.0
    odd = [(10**400,), (Decimal("sNaN"),)]
    assert same_rows(odd, [(1,), (2,)]) == 0.0
    assert same_rows(odd, odd) == 1.0
    with pytest.raises(CreditError, match="significant_digits is 16; expected 1 to 15"):
        same_rows([(1,)], [(1,)], significant_digits=16)


def _folder(place: Path, **files: str) -> Path:
    for name, text in files.items():
        path = place / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


def test_share_of_files_that_are_as_they_should_be(tmp_path: Path) -> None:
    expected = _folder(tmp_path / "e", a="1", b="2", sub__c="3")
    found = _folder(tmp_path / "f", a="1", b="x", sub__c="3", added="4")
    assert same_files(expected, expected) == 1.0
    assert same_files(found, expected) == 0.5
    assert same_files(found, expected, ignore=["b", "added", "sub/*"]) == 1.0


def test_a_link_equals_nothing(tmp_path: Path) -> None:
    expected = _folder(tmp_path / "e", a="1", sub__c="3")
    found = tmp_path / "f"
    found.mkdir()
    (found / "a").symlink_to(expected / "a")
    (found / "sub").symlink_to(expected / "sub")
    assert same_files(found, expected) == 0.0


def test_a_pipe_equals_nothing_and_is_not_waited_for(tmp_path: Path) -> None:
    expected, found = _folder(tmp_path / "e", a="1", b="2"), _folder(tmp_path / "f", b="2")
    os.mkfifo(found / "a")
    assert same_files(found, expected) == 0.5


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_cant_be_read_equals_nothing_if_the_agent_left_it_and_raises_if_the_operator_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = _folder(tmp_path / "one", a="1"), _folder(tmp_path / "other", a="1")
    make_deep(one, is_folder=is_folder)
    if not is_folder:
        make_deep(other, is_folder=False)
    assert same_files(one, "other") == 0.5
    assert same_files(one, "other", ignore=["d*/*x", "d*/*x/*"]) == 1.0
    with pytest.raises(OSError, match="too long"):
        same_files("other", one)


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CreditError, match="no file"):
        same_files(tmp_path / "empty", tmp_path / "empty")
    with pytest.raises(CreditError, match="no folder"):
        same_files(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think> <answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think>", 0.0),
        (None, 0.0),
    ],
)
def test_tags_occur_once_and_in_order(text: object, score: float) -> None:
    assert has_tags(text, ["think", "answer"]) == score


def test_tags_that_are_no_names_are_refused() -> None:
    with pytest.raises(CreditError, match="tags"):
        has_tags("x", ["<think>"])


def test_a_string_where_several_are_wanted_is_refused(tmp_path: Path) -> None:
    for verifier in (has_tags, has_json_keys):
        with pytest.raises(CreditError, match="are 'ab'; expected a list of strings"):
            verifier("<a></a><b></b>", "ab")
    folder = _folder(tmp_path, a="1")
    with pytest.raises(CreditError, match=r"patterns in `ignore` are '\.git/\*'; expected a list"):
        same_files(folder, folder, ignore=".git/*")


@pytest.mark.parametrize(
    ("text", "score"),
    [('{"a": 1, "b": 2}', 1.0), ('{"b": 2}', 0.0), ("[1]", 0.0), ("[" * 10**5, 0.0), (3, 0.0)],
)
def test_json_with_keys(text: object, score: float) -> None:
    assert has_json_keys(text, ["a"]) == score
