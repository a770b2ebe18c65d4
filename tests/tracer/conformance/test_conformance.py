"""Recorded wire sessions through real clients: what the agent gets, and what is recorded of it."""

import tomllib
from collections.abc import Sequence

import pytest

from spangrad.adapters import ModelCall
from spangrad.adapters.grading import LEFT_EARLY
from spangrad.tracer import blind_spots
from tests.tracer.conformance import expected_files, make, table
from tests.tracer.conformance.case import Case, Want
from tests.tracer.conformance.cases import ALL
from tests.tracer.conformance.engine import SESSIONS
from tests.tracer.conformance.running import Player, as_json, in_order

pytestmark = [  # the last filter that fits counts: clients may warn as they like
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:::spangrad"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def parametrized(case: Case) -> object:
    marks = [pytest.mark.slow] if case.through_gateway else []
    if case.broken:
        marks.append(pytest.mark.xfail(reason=case.broken, strict=True, raises=AssertionError))
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [parametrized(case) for case in ALL])
def test_a_session_gives_exactly_the_expected_calls_and_disturbs_nobody(case: Case, player: Player) -> None:
    untraced = player.play(case)
    traced, calls = player.record(case)
    assert traced.result == untraced.result
    assert traced.sent == untraced.sent
    calls = in_order(case, calls)
    assert len(calls) == len(case.wants)
    for call, want in zip(calls, case.wants, strict=True):
        check(call, want)
    assert [as_json(call) for call in calls] == expected_files.read(case)


def test_nothing_of_these_clients_goes_unwatched(player: Player) -> None:
    player.record(ALL[0])  # they are all imported
    assert blind_spots.found() == ()


def check(call: ModelCall, want: Want) -> None:
    """What was written by hand, which no regenerated file can hide."""
    assert str(call.grade) == want.grade
    assert [choice.finish_reason for choice in call.choices] == list(want.finish)
    assert any(reason.startswith(LEFT_EARLY) for reason in call.grade_reasons) == (not want.is_complete)
    assert (want.error or "") in (call.error or "")
    assert want.error == "" or (call.error is None) == (want.error is None)
    assert len(call.span_ids) == want.spans
    assert sampled(call) == [list(token_ids) for token_ids in want.sampled]
    for choice in call.choices:
        if choice.sampled_token_ids:
            assert list(choice.logprobs or ()) == [
                -0.25 * (n + 1) for n in range(len(choice.sampled_token_ids))
            ]
    versions = {version for choice in call.choices for version in choice.policy_versions or ()}
    assert versions == ({7} if want.grade == "exact" else set())
    if want.is_complete:
        assert bool(call.prompt_token_ids) == bool(want.sampled)


def sampled(call: ModelCall) -> Sequence[Sequence[int]]:
    return [list(choice.sampled_token_ids) for choice in call.choices if choice.sampled_token_ids]


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)


def test_sessions_are_what_their_maker_writes() -> None:
    made = {f"{name}.json": make.as_text(session) for name, session in make.sessions()}
    assert {path.name: path.read_text() for path in SESSIONS.glob("*.json")} == made


def test_no_session_and_no_expected_file_is_left_over() -> None:
    assert {path.stem for path in SESSIONS.glob("*.json")} == {case.session for case in ALL}
    files = {path.name.split(".")[0] for path in expected_files.FOLDER.glob("*.json")}
    assert files == {case.name for case in ALL if not case.broken}


def test_the_table_in_the_docs_is_current() -> None:
    assert table.PAGE.read_text() == table.page(), "run `python -m tests.tracer.conformance.table`"


def test_the_oldest_versions_are_the_lower_bounds_of_the_package() -> None:
    project = tomllib.loads((table.ROOT / "pyproject.toml").read_text())["project"]
    bounds = project["dependencies"] + project["optional-dependencies"]["agents"]
    pins = table.pins(expected_files.OLDEST_PINS)
    for name, bound in (requirement.partition(";")[0].split(">=") for requirement in bounds):
        assert (pins[name] + ".").startswith(bound + "."), (
            f"{name}: {pins[name]} is not the {bound} of pyproject.toml"
        )
