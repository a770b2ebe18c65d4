"""Which recorded sessions an update may take: a slow reading of the rules against the SQL, on a real file."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.building import span, text_attributes, token_attributes

from spangrad.adapters import account_unread
from spangrad.adapters.model_call import Grade
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Span, Update, UpdateRead
from spangrad.tracer import conventions as c
from spangrad.trainer.production.eligibility import STATES, Moment, Rules, held_out, ready, states

S = 10**9
NOW = Moment(policy_version=5, now_ns=10_000 * S)
RULES = Rules(
    idle_s=100.0,
    reward_wait_s=0.0,
    held_out=0.0,
    min_grade=Grade.EXACT,
    max_staleness=1,
    authors=("evaluator", "operator"),
    names=("reward", "style"),
)
Kind = Literal["root", "foreign", "running", "told", "reopened"]


@dataclass(frozen=True)
class Made:
    """A session as a test wants it."""

    kind: Kind = "foreign"
    """`root`: the tracer says that it ended. `running`: it has not said so yet. `told`: its agent told the
    gateway that it ended. `reopened`: it did, and a span came behind."""
    ended_s: int = 9_000
    is_failed: bool = False
    grade: Grade = Grade.EXACT
    version: int = 5
    rewards: tuple[tuple[str, RewardAuthor, int | None, float], ...] = (
        ("reward", RewardAuthor.EVALUATOR, None, 1.0),
        ("style", RewardAuthor.OPERATOR, 0, 0.5),
    )
    """Name, author, attempt, value."""
    is_consumed: bool = False

    @property
    def state(self) -> str:
        if self.kind == "running" or (self.kind in ("foreign", "reopened") and self.ended_s > 9_900):
            return "unended"
        if self.is_failed and self.kind != "told":
            return "failed"
        if self.grade is not Grade.EXACT:
            return "no_grade"
        if not 4 <= self.version <= 5:
            return "too_old"
        counted = {
            name
            for name, author, attempt, value in self.rewards
            if author is not RewardAuthor.AGENT and attempt in (None, 0) and value < 1e100
        }
        return "ready" if counted >= {"reward", "style"} else "unrewarded"

    def spans(self, name: str) -> list[Span]:
        names, trace = {c.ROLLOUT_ID: name, c.ATTEMPT: 0}, name.encode().hex()
        scope = c.SCOPE_TRACER if self.kind in ("root", "running") else c.SCOPE_GATEWAY
        code = 2 if self.is_failed else 0
        ids = token_attributes(version=self.version) if self.grade is Grade.EXACT else {}
        told = text_attributes(**names, **ids) | {c.RESPONSE_ID: name}
        at_ns = self.ended_s * S - 20
        bad = 2 if self.grade is Grade.UNUSABLE else 0
        call = span(
            "c", trace=trace, parent="r", start_ns=at_ns, scope=scope, attributes=told, status_code=bad
        )
        role = {c.SPAN_ROLE: "rollout"} if self.kind == "root" else {}
        root = span(
            "r",
            trace=trace,
            start_ns=at_ns - 20,
            end_ns=self.ended_s * S,
            kind=1,
            scope=scope,
            status_code=code,
            attributes={**names, **role},
        )
        if self.kind in ("told", "reopened"):
            root = replace(root, end_ns=self.ended_s * S - (10 if self.kind == "told" else 0))
            at_ns = self.ended_s * S - (0 if self.kind == "told" else 5)
            end = span(
                "e",
                trace=trace,
                start_ns=at_ns,
                end_ns=at_ns,
                scope=scope,
                attributes={**names, c.SPAN_ROLE: c.ROLE_END},
            )
            return [call, root, end]
        return [call] if self.kind == "running" else [call, root]


def fill(store: FileStore, made: dict[str, Made]) -> None:
    store.put_otlp(encode_request([one for name, session in made.items() for one in session.spans(name)]))
    account_unread(store)
    for name, session in made.items():
        for reward, author, attempt, value in session.rewards:
            store.put_rewards([Reward(name, value, reward, attempt=attempt)], author=author)
    consumed = [name for name, session in made.items() if session.is_consumed]
    store.commit_update(Update("other", 0, 1, consumed, [], {}, "", time_ns=1))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


reward = st.tuples(
    st.sampled_from(["reward", "style", "other"]),
    st.sampled_from(list(RewardAuthor)),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([0.0, 1.0, 1e200]),
)
sessions = st.builds(
    Made,
    kind=st.sampled_from(["root", "root", "foreign", "foreign", "running", "told", "reopened"]),
    ended_s=st.sampled_from([8_000, 9_000, 9_000, 9_899, 9_901, 11_000]),
    is_failed=st.sampled_from([False, False, False, True]),
    grade=st.sampled_from([Grade.EXACT] * 4 + [Grade.TEXT, Grade.UNUSABLE]),
    version=st.sampled_from([3, 4, 5, 5, 6]),
    rewards=st.one_of(st.just(Made().rewards), st.lists(reward, max_size=4).map(tuple)),
    is_consumed=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=15, deadline=None)
@given(
    made=st.lists(sessions, min_size=1, max_size=12),
    waits_s=st.sampled_from([0.0, 500.0, 5_000.0]),
    most=st.integers(1, 6),
)
def test_sessions_are_in_the_state_that_a_slow_reading_finds(
    made: list[Made], waits_s: float, most: int
) -> None:
    named = {f"s{index:02d}": session for index, session in enumerate(made)}
    rules = replace(RULES, reward_wait_s=waits_s)
    with (
        tempfile.TemporaryDirectory() as folder,
        FileStore(Path(folder) / "s.duckdb") as store,
    ):
        fill(store, named)
        left = {name: session for name, session in named.items() if not session.is_consumed}
        counts = Counter(session.state for session in left.values())
        assert states(store, rules, NOW) == {state: counts[state] for state in STATES} | {"held_out": 0}
        expected = []
        for name, session in sorted(left.items(), key=lambda item: (item[1].ended_s, item[0])):
            if session.state == "unrewarded" and session.ended_s > 10_000 - waits_s:
                break  # what ended after it waits for it
            if session.state == "ready":
                expected.append(name)
        assert ready(store, rules, NOW, most=most) == expected[:most]
        rest = ready(store, rules, replace(NOW, taken=expected[:most]), most=99)
        assert rest == expected[most:]


def test_late_feedback_makes_a_session_ready_that_others_have_passed_by(store: FileStore) -> None:
    fill(store, {"early": Made(ended_s=8_000, rewards=()), "late": Made()})
    assert ready(store, RULES, NOW, most=9) == ["late"]
    store.put_rewards([Reward("early", 1.0), Reward("early", 0.0, "style")])
    assert ready(store, RULES, NOW, most=9) == ["early", "late"]


def test_what_is_held_out_is_never_ready_and_stays_held_out_in_a_larger_share(store: FileStore) -> None:
    names = [f"s{index:03d}" for index in range(300)]
    fill(store, {name: Made() for name in names})
    before: set[str] = set()
    for share, low, high in ((0.0, 0, 0), (0.1, 15, 45), (0.5, 120, 180)):
        rules = replace(RULES, held_out=share)
        kept, trained = held_out(store, rules, NOW), ready(store, rules, NOW, most=999)
        assert sorted([*kept, *trained]) == names
        assert low <= len(kept) <= high and before <= set(kept)
        assert states(store, rules, NOW)["held_out"] == len(kept)
        before = set(kept)


def test_imitation_takes_text_and_a_policy_gradient_does_not(store: FileStore) -> None:
    fill(store, {"text": Made(grade=Grade.TEXT), "broken": Made(grade=Grade.UNUSABLE)})
    assert ready(store, RULES, NOW, most=9) == []
    assert ready(store, replace(RULES, min_grade=Grade.TEXT), NOW, most=9) == ["text"]


def test_a_session_is_not_ready_while_spans_of_it_are_unread(store: FileStore) -> None:
    fill(store, {"s": Made(kind="root")})
    told = text_attributes(**{c.ROLLOUT_ID: "s", c.ATTEMPT: 0}, **token_attributes(version=5))
    late = span("d", trace=b"s".hex(), parent="r", start_ns=1, attributes=told)
    store.put_otlp(encode_request([late]))
    assert states(store, RULES, NOW)["unended"] == 1
    account_unread(store)
    assert ready(store, RULES, NOW, most=9) == ["s"]


def test_no_call_is_trained_twice_when_its_session_is_found_to_be_part_of_an_earlier_one(
    store: FileStore,
) -> None:
    def unnamed(trace: str, ended_s: int) -> Span:
        told = text_attributes(**token_attributes(version=5)) | {c.RESPONSE_ID: trace}
        return span("c", trace=trace, start_ns=ended_s * S, scope=c.SCOPE_GATEWAY, attributes=told)

    late, early = unnamed("2", 9_000), unnamed("1", 8_000)
    store.put_otlp(encode_request([late]))
    account_unread(store)
    store.put_rewards([Reward(late.trace_id, 1.0), Reward(late.trace_id, 0.0, "style")])
    assert ready(store, RULES, NOW, most=9) == [late.trace_id]
    read = [UpdateRead(late.trace_id, f"{late.trace_id}-{late.span_id}")]
    store.commit_update(Update("r", 0, 6, [late.trace_id], [], {}, "", time_ns=1, reads=read))
    store.put_otlp(encode_request([early]))
    account_unread(store)
    store.set_sessions([{early.trace_id: None, late.trace_id: "conversation id"}])
    store.put_rewards([Reward(early.trace_id, 1.0), Reward(early.trace_id, 0.0, "style")])
    assert [(one.rollout_id, one.consumed_by) for one in store.rollouts()] == [(early.trace_id, None)]
    assert ready(store, RULES, NOW, most=9) == []
    assert states(store, RULES, NOW)["trained"] == 1


def test_a_session_that_an_update_only_read_is_still_ready(store: FileStore) -> None:
    fill(store, {"s": Made(kind="root")})
    (call,) = store.query("SELECT call_id FROM calls")
    read = [UpdateRead("s", call["call_id"])]
    stored = Update("clone", 0, 1, ["s"], [], {}, "", time_ns=1, reads=read, consumes=False)
    store.commit_update(stored)
    assert ready(store, RULES, NOW, most=9) == ["s"]
    store.commit_update(Update("r", 0, 6, ["s"], [], {}, "", time_ns=1, reads=read))
    assert ready(store, RULES, NOW, most=9) == []
