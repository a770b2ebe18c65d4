"""What `spangrad archive` moves, and that nobody who reads or writes notices."""

import random
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from spangrad.errors import StoreError, StoreFullError, StoreLockedError
from spangrad.store.archive import folder as files
from spangrad.store.archive.erase import Selection, erase, select_old
from spangrad.store.archive.move import Moved, move
from spangrad.store.archive.rewrite import rewrite
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs
from spangrad.store.reading import open_to_read
from spangrad.store.records import LogRecord, Reward, Rollout, Span, Update
from spangrad.tracer import conventions as names
from tests.store.building import conversation, new_trace, request, span

DAY_NS = 24 * 3600 * 10**9
ASKED = (
    "SELECT trace_id, span_id, rollout_id, name, attributes FROM spans ORDER BY ALL",
    "SELECT message_id, content FROM messages ORDER BY ALL",
    "SELECT trace_id, span_id, body FROM logs ORDER BY ALL",
    "SELECT * FROM tools ORDER BY ALL",
    "SELECT rollout_id, status, attempt FROM rollouts ORDER BY ALL",
    "SELECT rollout_id, count(*) AS n, sum(len(message_ids)) FROM spans GROUP BY ALL ORDER BY ALL",
)


def on_day(spans: Sequence[Span], day: int) -> list[Span]:
    return [replace(s, start_ns=day * DAY_NS + i, end_ns=day * DAY_NS + i + 5) for i, s in enumerate(spans)]


def log(of: Span, text: str, time_ns: int) -> LogRecord:
    return LogRecord(of.trace_id, of.span_id, time_ns, time_ns, "said", body=text)


def told(of: Sequence[Span]) -> list[LogRecord]:
    """Records of one moment, whose order only their arrival tells."""
    return [log(s, f"{word} {s.span_id}", of[0].end_ns) for s in of for word in ("one", "two", "three")]


def filled(
    path: Path, days: Sequence[int] = (1, 2, 3), turns: int = 4, note_bytes: int = 0
) -> dict[int, list[Span]]:
    """A rollout `r-<day>` a day, with log records and the use of a tool; notes that nothing makes shorter."""
    spans = {}
    with FileStore(path) as store:
        for day in days:
            trace = new_trace()
            tool = span(
                trace, rollout=f"r-{day}", attempt=0, attributes={names.OPERATION_NAME: "execute_tool"}
            )
            calls = conversation(trace, f"r-{day}", turns)
            noted = [
                replace(s, attributes={**s.attributes, "note": secrets.token_hex(note_bytes)}) for s in calls
            ]
            spans[day] = on_day([*noted, tool], day)
            store.put_otlp(request(spans[day]))
            store.put_logs(encode_logs(told(spans[day])))
    return spans


def archived(path: Path, day: int, **options: Any) -> Moved:
    with FileStore(path) as store:
        moved = move(store.database, day * DAY_NS, **options)
    rewrite(path)
    return moved


def all_of(path: Path) -> list[Any]:
    with FileStore(path, read_only=True) as store:
        return [list(store.spans()), list(store.logs()), *(store.query(sql) for sql in ASKED)]


def rows(path: Path, table: str) -> int:
    """Rows of a table of the database alone."""
    with duckdb.connect(str(path), read_only=True) as con:
        return int(con.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0])


def test_who_reads_sees_archived_history_as_before(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    spans = filled(path)
    before = all_of(path)
    moved = archived(path, 3)
    assert (moved.days, moved.rollouts, moved.traces, moved.spans, moved.logs) == (2, 2, 2, 10, 30)
    assert all_of(path) == before
    assert rows(path, "spans") == rows(path, "logs") / 3 == 5
    with open_to_read(path) as store:
        for day, some in spans.items():
            assert len(list(store.spans([f"r-{day}"]))) == len(some)
            assert [s.span_id for s in store.spans(trace_ids=[some[0].trace_id])] == [s.span_id for s in some]
            expected = [record for record in before[1] if record.trace_id == some[0].trace_id]
            assert (
                list(store.logs([f"r-{day}"])) == list(store.logs(trace_ids=[some[0].trace_id])) == expected
            )
        assert not list(store.spans(["r-9"]))


def test_a_session_moves_whole_and_a_rollout_of_two_traces_with_its_later_one(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    first, second, third, fourth = (new_trace() for _ in range(4))
    with FileStore(path) as store:
        store.put_otlp(request(on_day([span(first)], 1) + on_day([span(second)], 3)))
        store.set_sessions([{first: None, second: "conversation id"}])
        store.put_otlp(
            request(on_day([span(third, rollout="r")], 1) + on_day([span(fourth, rollout="r")], 3))
        )
    assert archived(path, 3).traces == 0
    assert archived(path, 4).traces == 4
    assert rows(path, "spans") == 0
    with open_to_read(path) as store:
        assert {s.trace_id for s in store.spans([first])} == {first, second}
        assert {s.trace_id for s in store.spans(["r"])} == {third, fourth}


def test_what_workers_or_a_living_run_wait_for_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    now_day = time.time_ns() // DAY_NS
    with FileStore(path) as store:
        for name, run in (("queued", "a"), ("running", "a"), ("waits", "a"), ("done", "a"), ("over", "b")):
            store.enqueue([Rollout(name, run_id=run, task={"n": name})])
        for rollout in store.claim(worker="w", limit=9, lease_s=3600):
            if rollout.rollout_id not in ("running", "queued"):
                store.finish(rollout.rollout_id, rollout.attempt)
        store.commit_update(Update("a", 0, 1, ["done"], [], {}, "c"))
        for name in ("queued", "running", "waits", "done", "over"):
            store.put_otlp(request(on_day([span(new_trace(), rollout=name, attempt=0)], 1)))
    with duckdb.connect(str(path)) as con:  # run b ended long ago
        con.execute("UPDATE rollouts SET enqueued_ns = 5, started_ns = 6, ended_ns = 7 WHERE run_id = 'b'")
    with FileStore(path) as store:
        moved = move(store.database, now_day * DAY_NS)
        assert (moved.rollouts, moved.needed) == (2, 3)
    with duckdb.connect(str(path), read_only=True) as con:
        found = con.execute("SELECT DISTINCT rollout_id FROM spans ORDER BY 1").fetchall()
    assert found == [("queued",), ("running",), ("waits",)]


def test_what_is_archived_is_stored_once_and_late_spans_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    spans = filled(path)
    archived(path, 4)
    late = replace(
        span(spans[1][0].trace_id, parent=spans[1][0].span_id), start_ns=9 * DAY_NS, end_ns=9 * DAY_NS
    )
    with FileStore(path) as store:
        for day in spans:
            assert store.put_otlp(request(spans[day])) == 0
            assert store.put_logs(encode_logs(told(spans[day]))) == 0
        assert store.put_otlp(request([late])) == 1
        assert store.put_logs(encode_logs([log(late, "late", late.end_ns)])) == 1
        (found,) = [s for s in store.spans(["r-1"]) if s.span_id == late.span_id]
        assert found.rollout_id == "r-1"
        assert len(list(store.spans(["r-1"]))) == 6
        assert len(list(store.logs(["r-1"]))) == 16
    before = all_of(path)
    assert archived(path, 10).spans == 1
    assert all_of(path) == before


def test_an_ancestor_that_comes_late_gives_archived_spans_their_rollout(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    trace = new_trace()
    root = on_day([span(trace, rollout="r", attempt=2)], 1)[0]
    middle = on_day([span(trace, parent=root.span_id)], 1)[0]
    below, other = on_day([span(trace, parent=middle.span_id), span(trace)], 1)
    with FileStore(path) as store:
        store.put_otlp(request([below, middle, other]))
    assert archived(path, 3).spans == 3

    def seen(rollout: str) -> dict[str, tuple[str | None, int | None]]:
        with open_to_read(path) as store:
            return {s.span_id: (s.rollout_id, s.attempt) for s in store.spans([rollout])}

    assert seen("r") == {}
    with FileStore(path) as store:
        assert store.put_otlp(request([root])) == 1
    of_rollout = {one.span_id: ("r", 2) for one in (root, middle, below)}
    assert seen("r") == of_rollout
    assert archived(path, 3).spans == 1
    assert seen("r") == of_rollout
    with FileStore(path) as store:
        assert {s.span_id for s in store.spans()} == {*of_rollout, other.span_id}
        sql = "SELECT count(*) AS n FROM spans WHERE rollout_id = 'r' AND attempt = 2"
        assert store.query(sql) == [{"n": 3}]
        selection = select_old(store.database, 3 * DAY_NS)
        assert (selection.rollouts, selection.traces) == (["r"], [trace])
        erase(store.database, selection)
        assert store.query("SELECT * FROM archived_owners") == []


def test_late_evaluations_and_joins_find_what_is_archived(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    spans = filled(path)
    first, second = new_trace(), new_trace()
    with FileStore(path) as store:
        store.put_otlp(request(on_day([span(first)], 1)))
        store.set_sessions([{first: None}])
    archived(path, 4)
    attributes = {names.REWARD_NAME: "right", names.REWARD_VALUE: 0.5}
    judged = spans[1][0]
    evaluation = LogRecord(judged.trace_id, judged.span_id, 5, 5, names.REWARD_EVENT, attributes=attributes)
    with FileStore(path) as store:
        store.put_logs(encode_logs([evaluation]))
        (reward,) = store.rewards(["r-1"])
        assert (reward.name, reward.value, reward.call_id) == (
            "right",
            0.5,
            f"{judged.trace_id}-{judged.span_id}",
        )
        store.put_otlp(request(on_day([span(second)], 9)))
        store.set_sessions([{first: None, second: "conversation id"}])
        (session,) = store.rollouts(rollout_ids=[first])
        assert (session.started_ns, session.ended_ns) == (DAY_NS, 9 * DAY_NS + 5)
        assert {s.trace_id for s in store.spans([first])} == {first, second}
        assert store.put_otlp(request(on_day([span(new_trace())], 9))) == 1  # spans can be written to again


def test_a_reward_of_an_archived_trace_is_at_the_last_of_its_spans(tmp_path: Path) -> None:
    """The trace tells only of calls that other traces of its rollout have."""
    path = tmp_path / "s.duckdb"
    first, second, third = (new_trace() for _ in range(3))
    told_again = on_day([span(first), span(first)], 1)
    told_again[1] = replace(told_again[1], start_ns=told_again[1].start_ns + 1)
    with FileStore(path) as store:
        store.put_otlp(request(told_again))
        store.set_sessions([{first: None}])
        store.put_rewards([Reward(first, 1.0, trace_id=first)])
    archived(path, 4)
    with FileStore(path) as store:
        later = on_day([span(second), span(third)], 9)
        call = {"attempt": 0, "dialect": "x", "grade": "text", "grade_reasons": [], "purpose": "agent"}
        call |= {"start_ns": 1, "end_ns": 2}
        store.put_otlp(request(later))
        store.put_calls(
            [
                {"call_id": f"{s.trace_id}-{s.span_id}", "trace_id": s.trace_id, "span_id": s.span_id} | call
                for s in later
            ]
        )
        store.set_sessions([dict.fromkeys((first, second, third))])
        store.put_rewards([Reward(first, 0.5, name="late", trace_id=first)])
        last = f"{first}-{told_again[1].span_id}"
        found = [(r.name, r.rollout_id, r.call_id, r.trace_id) for r in store.rewards()]
        assert found == [("reward", first, last, first), ("late", first, last, first)]


def test_messages_that_others_use_are_in_both(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path, (1, 5))
    before = all_of(path)
    archived(path, 3)
    shared = "The tools and the system prompt are said in both rollouts: 5 + 1 messages."
    with duckdb.connect() as con:
        con.execute(f"ATTACH '{path}' AS s (READ_ONLY)")
        parquet = f"read_parquet('{path}.archive/*/messages-*.parquet', hive_partitioning = true)"
        in_both = con.execute(f"SELECT count(*) FROM {parquet} JOIN s.messages USING (message_id)").fetchall()
        assert in_both == [(6,)], shared
        assert con.execute(f"SELECT DISTINCT day::VARCHAR FROM {parquet}").fetchall() == [("1970-01-02",)]
    assert all_of(path) == before


def test_the_file_shrinks_and_keeps_schema_comments_views_and_order(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path, range(1, 8), turns=10, note_bytes=100_000)

    def described() -> list[Any]:
        with duckdb.connect(str(path), read_only=True) as con:
            return [
                con.execute(sql).fetchall()
                for sql in (
                    "SELECT table_name, column_name, data_type, is_nullable, comment FROM duckdb_columns() "
                    "WHERE NOT internal ORDER BY ALL",
                    "SELECT table_name, constraint_type, constraint_column_names FROM duckdb_constraints() "
                    "ORDER BY ALL",
                    "SELECT table_name, index_name FROM duckdb_indexes() ORDER BY ALL",
                    "SELECT table_name, comment FROM duckdb_tables() ORDER BY ALL",
                    "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal ORDER BY ALL",
                    "SELECT * FROM schema_migrations ORDER BY ALL",
                    "SELECT rollout_id FROM rollouts",
                    "SELECT count(*) FROM tools",
                )
            ]

    size, before, seen = path.stat().st_size, described(), all_of(path)
    with FileStore(path) as store:
        move(store.database, 7 * DAY_NS)
    grown = path.stat().st_size
    rewrite(path)
    assert path.stat().st_size < 0.6 * size
    assert grown > 0.9 * size, "moving alone shrinks nothing: the rewrite does"
    assert described()[:-1] == before[:-1]
    assert all_of(path) == seen
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.duckdb", "s.duckdb.archive"]


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    path, copy = tmp_path / "s.duckdb", tmp_path / "t.duckdb"
    filled(path)
    shutil.copy(path, copy)
    for one in (path, copy):
        archived(one, 4)
    files = sorted((tmp_path / "s.duckdb.archive").rglob("*.parquet"))
    assert len(files) == 9
    for file in files:
        other = tmp_path / "t.duckdb.archive" / file.relative_to(tmp_path / "s.duckdb.archive")
        assert file.read_bytes() == other.read_bytes()


def test_a_full_disk_leaves_all_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path, note_bytes=100_000)
    before = all_of(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FileStore(path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(StoreFullError):
                move(store.database, 3 * DAY_NS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "s.duckdb.archive").exists()
    assert all_of(path) == before
    assert archived(path, 3).spans == 10
    assert all_of(path) == before


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path)
    with FileStore(path) as store:
        assert move(store.database, 3 * DAY_NS, dry_run=True).spans == 10
        assert store.database.partitions.is_empty
    assert rows(path, "spans") == 15
    assert not (tmp_path / "s.duckdb.archive").exists()


def test_a_base_in_another_trace_moves_along(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    spans = filled(path, (1, 2))
    with duckdb.connect(str(path)) as con:  # no spangrad writes that; it must not be torn apart all the same
        base = f"{spans[2][0].trace_id}-{spans[2][0].span_id}"
        con.execute(
            "UPDATE spans SET prompt_base = ?, prompt_keep = 5 WHERE span_id = ?", [base, spans[1][0].span_id]
        )
    assert archived(path, 2).traces == 0
    assert archived(path, 3).traces == 2


def test_sql_reaches_the_archive_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path)
    archived(path, 3)
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with open_to_read(path) as store:
        assert store.query(f"SELECT count(*) AS n FROM read_parquet('{path}.archive/*/spans-*.parquet')") == [
            {"n": 10}
        ]
        for place in (tmp_path / "secret.csv", Path(f"{path}.archive/../secret.csv"), Path("/etc/passwd")):
            with pytest.raises(StoreError, match=r"(?i)permission|disabled|access"):
                store.query(f"SELECT * FROM read_text('{place}')")
        with pytest.raises(StoreError):
            store.query("SET enable_external_access = true")


def test_an_archive_that_is_not_beside_the_store_is_missed_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path)
    archived(path, 3)
    (tmp_path / "s.duckdb.archive").rename(tmp_path / "elsewhere")
    with open_to_read(path) as store:
        assert len(list(store.spans(["r-3"]))) == 5
        with pytest.raises(StoreError, match=r"s\.duckdb\.archive' beside it: put it back"):
            list(store.spans())
    path.rename(tmp_path / "odd [1] name.duckdb")
    (tmp_path / "elsewhere").rename(tmp_path / "odd [1] name.duckdb.archive")
    with open_to_read(tmp_path / "odd [1] name.duckdb") as store:
        assert len(list(store.spans())) == 15


def test_files_of_an_older_schema_are_read_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    spans = filled(path)
    archived(path, 3)
    folder = tmp_path / "s.duckdb.archive"
    with duckdb.connect(str(path)) as con:
        for day in (1, 2):
            (old,) = folder.glob(f"day=1970-01-0{day + 1}/spans-*.parquet")
            con.execute(f"COPY (SELECT * EXCLUDE (other) FROM '{old}') TO '{old}'")
            name = str(old.relative_to(folder))
            given = [files.checksum(old), name]
            con.execute("UPDATE archives SET schema_version = 5, checksum = ? WHERE file = ?", given)
    with FileStore(path) as store:
        assert len(store.query("SELECT trace_id FROM spans")) == 15
        found = store.query(
            "SELECT rollout_id, count(*) AS n, count(other) AS others FROM spans GROUP BY ALL ORDER BY 1"
        )
        assert found == [{"rollout_id": f"r-{n}", "n": 5, "others": 0} for n in (1, 2, 3)]
        assert store.put_otlp(request(spans[1])) == 0
        erase(store.database, Selection([spans[2][0].trace_id], ["r-2"], []))
        assert len(store.query("SELECT trace_id FROM spans")) == 10


HOLDER = """
import sys
from spangrad.store.file_store import FileStore
with FileStore(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_file_that_another_process_writes_to_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    filled(path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreLockedError, match=f"process {holder.pid}"):
            rewrite(path)
        holder.communicate()
    with FileStore(path), pytest.raises(StoreLockedError):
        rewrite(path)


MOVER = """
import sys
from pathlib import Path
from spangrad.store.archive.move import move
from spangrad.store.archive.rewrite import rewrite
from spangrad.store.file_store import FileStore
print("go", flush=True)
with FileStore(sys.argv[1]) as store:
    move(store.database, int(sys.argv[2]))
rewrite(sys.argv[1])
print("done", flush=True)
"""


def killed(program: str, arguments: Sequence[str], after_s: float) -> float:
    """Run a program and kill it so long after its "go". Returns how long it ran."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "go\n"
        started = time.monotonic()
        try:
            child.wait(after_s)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
        return time.monotonic() - started


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    origin = tmp_path / "origin.duckdb"
    filled(origin, range(1, 7), turns=10)
    before = all_of(origin)
    whole = tmp_path / "whole.duckdb"
    shutil.copy(origin, whole)
    lasts_s = killed(MOVER, [str(whole), str(6 * DAY_NS)], 120)
    assert all_of(whole) == before
    chance = random.Random(4)
    found = set()
    for round_ in range(10):
        path = tmp_path / f"{round_}.duckdb"
        shutil.copy(origin, path)
        killed(MOVER, [str(path), str(6 * DAY_NS)], chance.uniform(0, lasts_s))
        with FileStore(path) as store:
            found.add(store.query("SELECT count(DISTINCT part) AS n FROM archives")[0]["n"])
            named = {row["file"] for row in store.query("SELECT file FROM archives")}
            assert all(len(list(store.spans([f"r-{day}"]))) == 11 for day in range(1, 7))
        assert all_of(path) == before
        folder = tmp_path / f"{round_}.duckdb.archive"
        assert {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} == named
        archived(path, 6)
        assert all_of(path) == before
        assert rows(path, "spans") == 11
    assert len(found) > 1, "every kill came before or after the moves"
