"""Writes the table of clients into `tracer/README.md`: `python -m tests.tracer.conformance.table`.

It is made of the declared cases and their expected calls, and of the versions that CI runs them with.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.tracer.conformance import expected_files
from tests.tracer.conformance.case import Case
from tests.tracer.conformance.cases import ALL

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tracer" / "README.md"
BEGIN = "<!-- conformance: written by `python -m tests.tracer.conformance.table` -->\n"
END = "<!-- /conformance -->\n"
SHOWN = (
    "openai",
    "anthropic",
    "litellm",
    "langchain-core",
    "langchain-openai",
    "langgraph",
    "httpx",
    "opentelemetry-sdk",
)


def table() -> str:
    """What stands between the marks."""
    lines = ["| package | oldest | newest |", "|---|---|---|"]
    oldest, newest = pins(expected_files.OLDEST_PINS), pins(ROOT / "constraints.txt")
    lines += [f"| {name} | {oldest[name]} | {newest[name]} |" for name in SHOWN]
    lines += ["", "| client | modes | token ids | logprobs | grade |", "|---|---|---|---|---|"]
    for client in dict.fromkeys(_client(case) for case in ALL):
        cases = [case for case in ALL if _client(case) == client]
        outcomes = {case.name: _outcome(case) for case in cases}
        rank = sorted(dict.fromkeys(outcomes.values()), key=lambda outcome: outcome[2] == "unusable")
        cases.sort(key=lambda case: rank.index(outcomes[case.name]))
        for outcome, group in groupby(cases, key=lambda case: outcomes[case.name]):
            modes = "; ".join(case.mode for case in group)
            lines.append(f"| {client} | {modes} | " + " | ".join(outcome) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text()
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    assert found and closed, f"{PAGE} has lost the marks of the table"
    return before + BEGIN + table() + END + after


def pins(path: Path) -> dict[str, str]:
    """Package -> version of a file of `name==version` lines."""
    return dict(line.split("==") for line in path.read_text().split())


def _client(case: Case) -> str:
    return f"{case.client}, through the gateway" if case.through_gateway else case.client


def _outcome(case: Case) -> tuple[str, str, str]:
    if case.broken:
        return "", "", f"known fault: {case.broken}"
    calls = json.loads(expected_files.path_of(case, oldest=False).read_text())
    if all(call["purpose"] == "embedding" for call in calls):
        return "", "", "none: nothing is sampled"
    choices = [choice for call in calls for choice in call.get("choices", ())]
    has_ids = any("sampled_token_ids" in choice for choice in choices)
    has_logprobs = any("logprobs" in choice for choice in choices)
    return "yes" if has_ids else "", "yes" if has_logprobs else "", _grades(calls)


def _grades(calls: Sequence[dict[str, Any]]) -> str:
    """One grade, or those of failed attempts before it; calls of one grade are not counted."""
    kinds = [(call["grade"], "error" in call and not call.get("choices")) for call in calls]
    failures = sum(is_failure for _, is_failure in kinds)
    grades = dict.fromkeys(grade for grade, is_failure in kinds if not is_failure)
    if failures and not grades:
        return "unusable"
    return (f"{failures} failed, then " if failures else "") + ", ".join(grades)


if __name__ == "__main__":
    PAGE.write_text(page())
