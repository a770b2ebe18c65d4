"""Each `CASES.md` names tests that exist, for every case, and every test of the cases is in it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = {"tracer": 25, "adapters": 35}
"""Folder -> how many cases its list has at least."""


@cache
def names_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def index_of(folder: str) -> str:
    return (TESTS / folder / "CASES.md").read_text()


def named_in(folder: str) -> list[tuple[str, str]]:
    return re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", index_of(folder))


@pytest.mark.parametrize("folder", CASES)
def test_every_named_test_exists(folder: str) -> None:
    missing = [f"{file}::{name}" for file, name in named_in(folder) if name not in names_in(TESTS / file)]
    assert not missing


@pytest.mark.parametrize("folder", CASES)
def test_every_case_has_a_test(folder: str) -> None:
    rows = [row.split("|")[1:3] for row in index_of(folder).splitlines() if row.startswith("| ")][1:]
    cases = [(case.strip(), tests) for case, tests in rows if not case.strip().startswith("**")]
    bare = [case for case, tests in cases if "::test_" not in tests]
    assert len(cases) >= CASES[folder] and not bare


@pytest.mark.parametrize("folder", CASES)
def test_every_test_of_the_cases_is_named(folder: str) -> None:
    files = (TESTS / folder).glob("test_cases_*.py")
    found = {(f"{folder}/{file.name}", name) for file in files for name in names_in(file)}
    assert found and not found - set(named_in(folder))
