"""What `spangrad gc` deletes, and that no byte of it is left."""

import json
import random
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from spangrad.store.archive import leftovers
from spangrad.store.archive.erase import Erased, erase, select_by_attribute, select_old
from spangrad.store.archive.move import move
from spangrad.store.archive.rewrite import rewrite
from spangrad.store.file_store import FileStore, rejected_file, spool_folder
from spangrad.store.otlp import decode_request, encode_logs
from spangrad.store.records import (
    LogRecord,
    Reward,
    Rollout,
    RunEvent,
    Span,
    SpanEvent,
    Update,
    UpdateRead,
    UpdateSample,
)
from spangrad.tracer import conventions as names
from spangrad.tracer.spool import Spool
from tests.store.building import new_trace, request, span
from tests.store.test_store_archive import DAY_NS, all_of, archived, killed, on_day, rows

USER = [("enduser.id", "42")]
KEY_LISTS = ("reply_keys", "prefix_keys", "tool_calls_made", "tool_calls_answered")
SHARED = json.dumps({"role": "system", "content": "You help " + secrets.token_hex(40)})


def marker() -> str:
    """Text that no compression shortens, so that it stands in a file as it is."""
    return "MARK" + secrets.token_hex(64)


def of_user(
    day: int, user: object, mark: str, *, rollout: str | None, place: str = "attributes"
) -> list[Span]:
    """Two calls of a user, whose text, ids and attributes have the mark in them."""
    trace = new_trace()
    said = json.dumps({"role": "user", "content": f"I am {mark}"})
    attributes: dict[str, Any] = {
        names.OPERATION_NAME: "chat",
        names.INPUT_MESSAGES: f"[{SHARED},{said}]",
        "note": f"about {mark}",
    }
    first = span(trace, rollout=rollout, attempt=None if rollout is None else 0, attributes=attributes)
    second = replace(first, span_id=secrets.token_hex(8))
    change: dict[str, Any] = {place: {"enduser.id": user}}
    if place == "attributes":
        change[place] |= first.attributes
    if place == "events":
        change[place] = [SpanEvent("said", 5, {"enduser.id": user})]
    marked = replace(first, **change)
    return on_day([marked, second], day)


def fill(path: Path, marks: Sequence[str], user: object = "42") -> None:
    """A user's rollout of day 1 and one of day 5, with all that goes with them, and others'."""
    with FileStore(path) as store:
        for number, (day, mark) in enumerate(zip((1, 5), marks, strict=True)):
            name = f"r-{mark}"
            store.enqueue(
                [Rollout(name, run_id="run", task={"q": mark}), Rollout(f"other-{day}", task={"q": "x"})]
            )
            for rollout in store.claim(worker="w", limit=2):
                store.finish(rollout.rollout_id, 0, output={"a": rollout.rollout_id})
            spans = of_user(day, user, mark, rollout=name)
            others = of_user(day, "43", f"other{day}", rollout=f"other-{day}")
            store.put_otlp(request([*spans, *others]))
            record = LogRecord(
                spans[0].trace_id, spans[0].span_id, day * DAY_NS, 0, "said", body=f"log {mark}"
            )
            stray = LogRecord(
                None, None, day * DAY_NS, 0, "x", body=f"stray {mark}", attributes={"enduser.id": user}
            )
            store.put_logs(encode_logs([record, stray]))
            call = f"{spans[0].trace_id}-{spans[0].span_id}"
            store.put_rewards([Reward(name, 1.0, explanation=f"for {mark}"), Reward(f"other-{day}", 0.5)])
            row = {
                **{"call_id": call, "rollout_id": name, "attempt": 0, "trace_id": spans[0].trace_id},
                **{"span_id": spans[0].span_id, "dialect": "genai", "model": f"m {mark}", "grade": "text"},
                **{"grade_reasons": [], "purpose": "agent", "start_ns": 1, "end_ns": 2},
            }
            store.put_calls([row])
            store.put_call_keys(
                [
                    {
                        "call_id": call,
                        "trace_id": spans[0].trace_id,
                        "start_ns": 1,
                        "end_ns": 2,
                        "reply_keys": [],
                    }
                    | {"prefix_keys": [mark], "tool_calls_made": [], "tool_calls_answered": []}
                ]
            )
            sample = UpdateSample(name, call, 0, 0.5, 7, 0, 0)
            reads = [UpdateRead(name, call_id=call), UpdateRead(f"other-{day}", reward_id="w")]
            consumed = [name, f"other-{day}"]
            store.commit_update(
                Update("run", number, 1, consumed, [sample], {"loss": 0.25}, "c", reads=reads)
            )
            store.put_events([RunEvent("run", number, "flattery", 0.4, 0.3, "warn", f"said {mark}")])


def removed(path: Path, attributes: list[tuple[str, str]]) -> Erased:
    with FileStore(path) as store:
        selection = select_by_attribute(store.database, attributes)
        erased = erase(store.database, selection)
        leftovers.clean(store.path, selection, attributes, 0)
    rewrite(path)
    return erased


def bytes_with(folder: Path, mark: str) -> set[str]:
    """Files in which a mark stands: as bytes, or in the pages of a Parquet file."""
    found = set()
    for file in (f for f in folder.rglob("*") if f.is_file()):
        content = file.read_bytes()
        if file.suffix == ".parquet":
            content += str(pq.read_table(file).to_pydict()).encode()
        if mark.encode() in content:
            found.add(file.name.rsplit("-", 1)[0])
    return found


@pytest.mark.parametrize("user", ["42", 42])
def test_a_user_is_gone_from_database_log_and_archive(tmp_path: Path, user: object) -> None:
    path = tmp_path / "s.duckdb"
    marks = [marker(), marker()]
    fill(path, marks, user)
    archived(path, 3)
    assert bytes_with(tmp_path, marks[0]) == {"s.duckdb", "spans", "logs", "messages"}
    assert "s.duckdb" in bytes_with(tmp_path, marks[1])

    erased = removed(path, USER)

    assert [bytes_with(tmp_path, mark) for mark in marks] == [set(), set()]
    assert erased.archive == {"spans": 2, "logs": 1}
    assert {name: count for name, count in erased.database.items() if count} == {
        **{"spans": 2, "logs": 3, "messages": 1, "calls": 2, "call_keys": 2, "rollouts": 2, "tasks": 2},
        **{"rewards": 2, "updates": 2, "update_samples": 2, "update_reads": 2, "unread_traces": 4},
    }
    assert sorted(f.name for f in tmp_path.iterdir()) == ["s.duckdb", "s.duckdb.archive"]
    with FileStore(path) as store:
        assert [s.attributes["enduser.id"] for s in store.spans() if "enduser.id" in s.attributes] == [
            "43",
            "43",
        ]
        assert all(SHARED in str(s.attributes[names.INPUT_MESSAGES]) for s in store.spans())
        assert [rollout.rollout_id for rollout in store.rollouts()] == ["other-1", "other-5"]
        assert [reward.rollout_id for reward in store.rewards()] == ["other-1", "other-5"]
        updates = store.updates()
        assert [(u.update_index, u.rollout_ids, u.samples, u.metrics) for u in updates] == [
            (0, ["other-1"], [], {"loss": 0.25}),
            (1, ["other-5"], [], {"loss": 0.25}),
        ]
        assert [(event.value, event.text) for event in store.events()] == [(0.4, ""), (0.4, "")]


def test_without_the_rewrite_bytes_would_be_left(tmp_path: Path) -> None:
    """The test above can fail: deleting alone leaves the marks in the file."""
    path = tmp_path / "s.duckdb"
    marks = [marker(), marker()]
    fill(path, marks)
    with FileStore(path) as store:
        erase(store.database, select_by_attribute(store.database, USER))
        assert not list(select_by_attribute(store.database, USER).traces)
    assert bytes_with(tmp_path, marks[0]) == {"s.duckdb"}


@pytest.mark.parametrize("place", ["attributes", "resource", "scope_attributes", "events"])
def test_whatever_names_the_user_takes_its_whole_rollout_along(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s.duckdb"
    with FileStore(path) as store:
        named = of_user(1, 42, "a", rollout="r", place=place)
        store.put_otlp(request([*named, *of_user(2, 1, "b", rollout="r"), *of_user(3, 1, "c", rollout="s")]))
        foreign = [
            of_user(1, 42 if number == 0 else 1, "d", rollout=None, place=place) for number in range(3)
        ]
        store.put_otlp(request([s for some in foreign for s in some]))
        store.set_sessions([dict.fromkeys((foreign[0][0].trace_id, foreign[1][0].trace_id))])
        selection = select_by_attribute(store.database, USER)
        assert selection.rollouts == sorted(["r", min(foreign[0][0].trace_id, foreign[1][0].trace_id)])
        assert len(selection.traces) == 4
        gone, stays = foreign[0][0].trace_id, foreign[2][0].trace_id
        key: dict[str, Any] = {"start_ns": 1, "end_ns": 2} | {name: [] for name in KEY_LISTS}
        store.put_call_keys(
            [
                {"call_id": f"{t}-{'0' * 16}", "trace_id": t, "trace_ids": [stays, gone]} | key
                for t in (gone, stays)
            ]
        )
        store.put_rewards([Reward("t", 1.0, call_id=f"{gone}-{'0' * 16}"), Reward("t", 1.0, trace_id=gone)])
        erase(store.database, selection)
        assert {s.rollout_id for s in store.spans()} == {"s", None}
        assert len(list(store.spans())) == 4
        assert store.query("SELECT trace_id, trace_ids FROM call_keys") == [
            {"trace_id": stays, "trace_ids": [stays]}
        ]
        assert not store.rewards()


@pytest.mark.parametrize("place", ["attributes", "resource", "scope_attributes", "events"])
def test_what_else_goes_with_a_user_is_named(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s.duckdb"
    with FileStore(path) as store:
        shared = of_user(2, 43, "b", rollout="r", place=place)
        elsewhere = dict(shared[1].attributes) | {names.ROLLOUT_ID: "joined"}
        shared.append(replace(shared[1], span_id=secrets.token_hex(8), attributes=elsewhere))
        named, other = of_user(1, 42, "a", rollout="r", place=place), of_user(1, 44, "c", rollout="s")
        store.put_otlp(request([*named, *shared, *other]))
        told = LogRecord(shared[0].trace_id, None, 5, 5, "x", attributes={"enduser.id": "45"})
        store.put_logs(encode_logs([told]))
        selection = select_by_attribute(store.database, USER)
        assert selection.rollouts == ["joined", "r"]
        assert selection.joined == ["joined"]
        assert selection.others == [("enduser.id", "43"), ("enduser.id", "45")]
        alone = select_by_attribute(store.database, [("enduser.id", "44")])
        assert (alone.rollouts, alone.joined, alone.others) == (["s"], [], [])


def test_what_is_too_old_goes_and_what_is_needed_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [marker(), marker()])
    archived(path, 3)
    with FileStore(path) as store:
        store.enqueue([Rollout("waits")])
        store.put_otlp(request(of_user(1, 1, "w", rollout="waits")))
        selection = select_old(store.database, 4 * DAY_NS)
        assert (len(selection.traces), len(selection.logs), selection.needed) == (2, 1, 1)
        erased = erase(store.database, selection)
        assert erased.archive == {"spans": 4, "logs": 1}
        assert not list((tmp_path / "s.duckdb.archive").rglob("*.parquet"))
        assert {s.rollout_id for s in store.spans()} > {"waits", "other-5"}
    assert rows(path, "archives") == rows(path, "archived_traces") == 0
    assert not (tmp_path / "s.duckdb.archive").exists()


@pytest.mark.parametrize("by_age", [False, True])
def test_what_is_in_a_damaged_partition_stays_whole_and_all_else_goes(tmp_path: Path, by_age: bool) -> None:
    path = tmp_path / "s.duckdb"
    marks = [marker(), marker(), marker()]
    with FileStore(path) as store:
        store.enqueue([Rollout(f"r-{day}", task={"q": marks[day]}) for day in range(3)])
        for rollout in store.claim(worker="w", limit=3):
            store.finish(rollout.rollout_id, 0)
        for day, mark in enumerate(marks):
            store.put_otlp(request(of_user(day or 2, "42", mark, rollout=f"r-{day}")))
    archived(path, 3)
    with duckdb.connect(str(path)) as con:
        con.execute("UPDATE rollouts SET enqueued_ns = 1, started_ns = 2, ended_ns = 3")
    with FileStore(path) as store:  # of the one that will be damaged, and says whose it is
        store.put_otlp(request(of_user(1, "42", marks[1], rollout="r-1")))
    (broken,) = (tmp_path / "s.duckdb.archive").glob("day=1970-01-02/messages-*.parquet")
    broken.rename(tmp_path / "away")

    def deleted() -> tuple[Sequence[str], Sequence[str], int]:
        with FileStore(path) as store:
            database = store.database
            selection = select_old(database, 9 * DAY_NS) if by_age else select_by_attribute(database, USER)
            erase(database, selection)
        rewrite(path)
        return selection.rollouts, selection.damaged, selection.hidden

    assert deleted() == (["r-0", "r-2"], [str(broken)], 1)
    assert [bytes_with(tmp_path, mark) for mark in (marks[0], marks[2])] == [set(), set()]
    (tmp_path / "away").rename(broken)
    with FileStore(path) as store:
        assert (len(list(store.spans())), [r.rollout_id for r in store.rollouts()]) == (4, ["r-1"])
    assert deleted() == (["r-1"], [], 0)
    assert bytes_with(tmp_path, marks[1]) == set()


def test_a_rollout_without_spans_goes_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with FileStore(path) as store:
        store.enqueue([Rollout("old"), Rollout("new"), Rollout("queued")])
        for rollout in store.claim(worker="w", limit=2):
            store.finish(rollout.rollout_id, 0)
    with duckdb.connect(str(path)) as con:
        con.execute(
            "UPDATE rollouts SET enqueued_ns = 1, started_ns = 2, ended_ns = 3 WHERE rollout_id <> 'new'"
        )
    with FileStore(path) as store:
        assert select_old(store.database, DAY_NS).rollouts == ["old"]


def test_a_dry_run_counts_the_same_and_deletes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [marker(), marker()])
    archived(path, 3)
    before = all_of(path)
    with FileStore(path) as store:
        selection = select_by_attribute(store.database, USER)
        expected = erase(store.database, selection, dry_run=True)
    assert all_of(path) == before
    assert removed(path, USER) == expected


def test_spans_put_aside_and_spooled_go_too(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    mark, other = marker(), marker()
    FileStore(path).close()
    Spool(spool_folder(path)).append(request(of_user(1, 42, mark, rollout="r")))
    mine, others = of_user(1, 42, mark, rollout="x"), of_user(1, 43, other, rollout="y")
    rejected_file(path).write_bytes(request(mine) + request(others))
    (spool_folder(path) / "1-1-1.journal.bad").write_bytes(b"enduser.id \x00 42 " + mark.encode())
    attributes = [("enduser.id", "42"), ("note", f"about {mark}")]
    with FileStore(path) as store:
        selection = select_by_attribute(store.database, attributes)
        assert selection.rollouts == ["r"]
        erase(store.database, selection)
        assert leftovers.clean(store.path, selection, attributes, 0) == 3
    rewrite(path)
    assert not bytes_with(tmp_path, mark)
    assert [s.span_id for s in decode_request(rejected_file(path).read_bytes())[0]] == [
        s.span_id for s in others
    ]


ERASER = """
import sys
from spangrad.store.archive.erase import erase, select_by_attribute
from spangrad.store.archive.move import move
from spangrad.store.archive.rewrite import rewrite
from spangrad.store.file_store import FileStore
print("go", flush=True)
with FileStore(sys.argv[1]) as store:
    erase(store.database, select_by_attribute(store.database, [("enduser.id", "42")]))
rewrite(sys.argv[1])
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_all_of_a_user_or_nothing_and_the_next_run_ends_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "origin"
    folder.mkdir()
    marks = [marker(), marker()]
    fill(folder / "s.duckdb", marks)
    archived(folder / "s.duckdb", 3)
    before = all_of(folder / "s.duckdb")
    whole = shutil.copytree(folder, tmp_path / "whole")
    lasts_s = killed(ERASER, [str(whole / "s.duckdb")], 120)
    after = all_of(whole / "s.duckdb")
    assert after != before
    chance = random.Random(4)
    for round_ in range(10):
        copy = shutil.copytree(folder, tmp_path / str(round_))
        killed(ERASER, [str(copy / "s.duckdb")], chance.uniform(0, lasts_s))
        FileStore(copy / "s.duckdb").close()
        assert all_of(copy / "s.duckdb") in (before, after)
        removed(copy / "s.duckdb", USER)
        assert all_of(copy / "s.duckdb") == after
        assert [bytes_with(copy, mark) for mark in marks] == [set(), set()]


def test_what_tells_no_time_is_older_than_no_day(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with FileStore(path) as store:
        store.put_otlp(request(of_user(0, 42, "x", rollout="undated") + of_user(1, 42, "y", rollout="old")))
        store.put_logs(encode_logs([LogRecord(None, None, 0, 0, "x", body="undated")]))
        selection = select_old(store.database, 9 * DAY_NS)
        assert (selection.rollouts, list(selection.logs), selection.undated) == (["old"], [], 1)
        moved = move(store.database, 9 * DAY_NS, dry_run=True)
        assert (moved.rollouts, moved.undated) == (1, 1)
        assert select_by_attribute(store.database, USER).rollouts == ["old", "undated"]
