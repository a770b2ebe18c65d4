"""Rewards that a program gives: parts for reward functions and for `spangrad score --with`.

    from spangrad.credit.verifiers import exact_match

    def reward(task, output):
        return exact_match(output["answer"], task["gold"])

Each is a function of plain values and knows no store, no rollout and no model (but `rubric.py`, which asks
one). What the policy wrote is never trusted: it can be wrong, of any type and of any length, and then scores
low; only what the operator got wrong raises.
"""

from spangrad.credit.verifiers.answers import contains_match, exact_match, f1_score
from spangrad.credit.verifiers.files import same_files
from spangrad.credit.verifiers.formats import has_json_keys, has_tags
from spangrad.credit.verifiers.patches import patch_similarity
from spangrad.credit.verifiers.rubric import Criterion, Judge, Judgement
from spangrad.credit.verifiers.sql_rows import same_rows
from spangrad.credit.verifiers.unit_tests import TestRun, run_tests

__all__ = [
    "Criterion",
    "Judge",
    "Judgement",
    "TestRun",
    "contains_match",
    "exact_match",
    "f1_score",
    "has_json_keys",
    "has_tags",
    "patch_similarity",
    "run_tests",
    "same_files",
    "same_rows",
]
