"""`CASES.md` names tests that exist, for every case, and every test of the cases is in it."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
INDEX = Path(__file__).with_name("CASES.md").read_text()
NAMED = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", INDEX)


@cache
def names_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_every_named_test_exists() -> None:
    assert NAMED
    missing = [f"{file}::{name}" for file, name in NAMED if name not in names_in(TESTS / file)]
    assert not missing


def test_every_case_has_a_test() -> None:
    rows = [row.split("|")[1:3] for row in INDEX.splitlines() if row.startswith("| ")][1:]
    bare = [
        case.strip() for case, tests in rows if "::test_" not in tests and not case.strip().startswith("**")
    ]
    assert len(rows) > 25 and not bare


def test_every_test_of_the_cases_is_named() -> None:
    files = sorted(Path(__file__).parent.glob("test_cases_*.py"))
    found = {
        (f"tracer/{file.name}", name) for file in files if file != Path(__file__) for name in names_in(file)
    }
    assert not found - set(NAMED)
