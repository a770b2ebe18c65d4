import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest

from spangrad.errors import DatabaseFailedError, SchemaVersionError, StoreError, StoreLockedError
from spangrad.store import open_store
from spangrad.store.file_store import FileStore
from spangrad.store.migrations import MIGRATIONS, SCHEMA_VERSION, m001_initial, migrate
from spangrad.store.reading import open_to_read
from spangrad.store.schema import TABLES
from spangrad.store.tables import database
from spangrad.store.views import VIEWS
from spangrad.tracer.spool import Spool
from tests.store.building import conversation, new_trace, request, span
from tests.waiting import wait_until


def described(con: duckdb.DuckDBPyConnection) -> list[object]:
    columns = (
        "SELECT table_name, column_name, data_type, is_nullable, comment FROM duckdb_columns() "
        "WHERE table_name != 'schema_migrations' ORDER BY table_name, column_index"
    )
    keys = "SELECT table_name, constraint_type, constraint_column_names FROM duckdb_constraints() "
    keys += "WHERE constraint_type = 'PRIMARY KEY' AND table_name != 'schema_migrations' ORDER BY ALL"
    indexes = "SELECT table_name, index_name, expressions FROM duckdb_indexes() ORDER BY ALL"
    return [con.execute(sql).fetchall() for sql in (columns, keys, indexes)]


def test_migrations_lead_to_the_declared_schema() -> None:
    with duckdb.connect() as migrated, duckdb.connect() as declared:
        assert migrate(migrated, "m") == list(range(1, SCHEMA_VERSION + 1))
        assert migrate(migrated, "m") == []
        for table in TABLES:
            declared.execute(";".join([*table.ddl(), *table.comments()]))
        for view in VIEWS:
            declared.execute(";".join(view.ddl()))
        assert described(migrated) == described(declared)
        applied = migrated.execute("SELECT version, name FROM schema_migrations ORDER BY version").fetchall()
    assert applied == [(i + 1, step.__name__) for i, step in enumerate(MIGRATIONS)]


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_store_of_any_older_schema_comes_to_the_declared_one(version: int) -> None:
    with duckdb.connect() as con, duckdb.connect() as new:
        con.execute("CREATE TABLE schema_migrations (version INTEGER, name VARCHAR, applied_ns BIGINT)")
        for number, step in enumerate(MIGRATIONS[:version], start=1):
            step(con)
            con.execute("INSERT INTO schema_migrations VALUES (?, ?, 0)", [number, step.__name__])
        con.execute(
            "INSERT INTO rewards (reward_id, rollout_id, name, value, author, time_ns) "
            "VALUES ('w', 'r', 'reward', 0.5, 'operator', 7)"
        )
        assert migrate(con, "m") == list(range(version + 1, SCHEMA_VERSION + 1))
        migrate(new, "m")
        assert described(con) == described(new)
        assert con.execute("SELECT value FROM rewards").fetchall() == [(0.5,)]


def test_a_store_of_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    FileStore(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute("INSERT INTO schema_migrations VALUES (?, 'm_future', 0)", [SCHEMA_VERSION + 6])
    for read_only in (False, True):
        with pytest.raises(
            SchemaVersionError, match=f"schema {SCHEMA_VERSION + 6}, .* up to {SCHEMA_VERSION}; upgrade"
        ):
            FileStore(path, read_only=read_only)


HOLDER = """
import sys
from spangrad.store.file_store import FileStore
with FileStore(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_store_held_by_another_process_is_refused_naming_it(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "open\n"
        for read_only in (False, True):
            with pytest.raises(StoreLockedError, match=f"held by process {holder.pid}; .*hub's URL"):
                FileStore(path, read_only=read_only)
    FileStore(path).close()


def test_a_second_opening_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s.duckdb"), pytest.raises(StoreLockedError, match=str(os.getpid())):
        FileStore(tmp_path / "x" / ".." / "s.duckdb")
    FileStore(tmp_path / "s.duckdb").close()


def test_paths_that_hold_no_store_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        FileStore(tmp_path / "none.duckdb", read_only=True)
    with pytest.raises(StoreError, match="is a folder"):
        FileStore(tmp_path)
    garbage = tmp_path / "garbage.duckdb"
    garbage.write_bytes(b"not a database " * 1000)
    with pytest.raises(StoreError, match=r"garbage\.duckdb") as raised:
        FileStore(garbage)
    assert "\n" not in str(raised.value)
    assert garbage.read_bytes() == b"not a database " * 1000


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_database_or_a_damaged_one_is_said_to_be_that(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "s.duckdb"
    FileStore(path).close()
    whole = path.read_bytes()
    for content, says in (
        (
            b"not a database " * 1000,
            r"s\.duckdb' is no DuckDB database, so no spangrad store; check the path",
        ),
        (b"SQLite format 3\0" + bytes(8000), r"s\.duckdb' is no DuckDB database"),
        (whole[:5000], r"s\.duckdb' is damaged or cut short; put a copy in its place"),
        (whole[:4096] + bytes(100) + whole[4196:], r"s\.duckdb' is damaged or cut short"),
    ):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=says):
            FileStore(path, read_only=read_only)
        assert path.read_bytes() == content


def test_a_damaged_part_is_the_same_error_as_rows_and_as_arrow(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with FileStore(path) as store:
        for number in range(40):
            store.put_otlp(request(conversation(new_trace(), f"r-{number}", 20)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with FileStore(path, read_only=True) as store:
        with pytest.raises(DatabaseFailedError, match="is damaged or cut short"):
            store.query("SELECT * FROM spans")
        with (
            pytest.raises(DatabaseFailedError, match="is damaged or cut short"),
            store.query_arrow("SELECT * FROM spans") as answer,
        ):
            answer.read_all()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE t(a INTEGER)",
        "CREATE VIEW v AS SELECT 1",
        "CREATE SCHEMA s",
        "CREATE SEQUENCE q",
        "CREATE MACRO m(a) AS a + 1",
        "CREATE TABLE schema_migrations(version VARCHAR); INSERT INTO schema_migrations VALUES ('20240101')",
    ],
)
def test_somebody_elses_database_is_refused_and_left_as_it_is(
    tmp_path: Path, made: str, read_only: bool
) -> None:
    path = tmp_path / "foreign.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute(made)
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=r"foreign\.duckdb' is a database, but no spangrad store; check the path"
    ):
        FileStore(path, read_only=read_only)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_in_which_nothing_was_made_becomes_a_store(tmp_path: Path) -> None:
    duckdb.connect(str(tmp_path / "s.duckdb")).close()
    with FileStore(tmp_path / "s.duckdb") as store:
        assert store.rollouts() == []


def test_a_file_without_a_byte_becomes_a_store(tmp_path: Path) -> None:
    empty, link, logged = tmp_path / "s.duckdb", tmp_path / "link.duckdb", tmp_path / "logged.duckdb"
    empty.touch()
    link.symlink_to(empty)
    with pytest.raises(StoreError):
        FileStore(empty, read_only=True)
    assert empty.stat().st_size == 0
    with FileStore(link) as store:
        store.put_otlp(request(conversation(new_trace(), "r", 2)))
    assert link.is_symlink()
    with FileStore(empty, read_only=True) as store:
        assert store.stats()["spans"] == 2
    logged.touch()
    logged.with_name("logged.duckdb.wal").write_bytes(b"somebody's data")
    with pytest.raises(StoreError):
        FileStore(logged)
    assert logged.with_name("logged.duckdb.wal").read_bytes() == b"somebody's data"


LOCKS_AN_EMPTY_FILE = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_an_empty_file_that_another_process_is_about_to_fill_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with subprocess.Popen(
        [sys.executable, "-c", LOCKS_AN_EMPTY_FILE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "locked\n"
        inode = path.stat().st_ino
        with pytest.raises(StoreLockedError, match=str(holder.pid)):
            FileStore(path)
        assert path.stat().st_ino == inode


LEAVES_A_LOG = """
import os, sys
from spangrad.store.file_store import FileStore
from tests.store.building import conversation, new_trace, request
store = FileStore(sys.argv[1])
for i in range(4):
    store.put_otlp(request(conversation(new_trace(), f"r{i}", 5)))
os._exit(0)
"""


@pytest.mark.slow
def test_a_damaged_log_is_named_with_the_way_out(tmp_path: Path) -> None:
    path, log = tmp_path / "s.duckdb", tmp_path / "s.duckdb.wal"
    FileStore(path).close()
    subprocess.run([sys.executable, "-c", LEAVES_A_LOG, str(path)], check=True)
    data = bytearray(log.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    log.write_bytes(data)
    with pytest.raises(StoreError, match=r"log .* is damaged; move .*\.wal' aside"):
        FileStore(path)
    log.rename(tmp_path / "aside")
    with FileStore(path) as store:
        assert store.stats()["spans"] == 0


def test_closing_stops_a_question_that_is_running(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s.duckdb")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(store.query, "SELECT count(*) FROM range(10000000) a, range(10000000) b")
        wait_until(lambda: asking.running())
        store.close()
        with pytest.raises(StoreError):
            asking.result(20)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "deep" / "folder" / "s.duckdb")
    store.put_otlp(request(conversation(new_trace(), "r", 2)))
    half_read = iter(store.spans())
    next(half_read)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.rollouts()
    with pytest.raises(StoreError):
        list(half_read)


FILLER = """
import resource, sys
from spangrad.errors import StoreFullError
from spangrad.store.file_store import FileStore
from tests.store.building import conversation, new_trace, request
store = FileStore(sys.argv[1])
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for i in range(1000):
    trace_id = new_trace()
    try:
        store.put_otlp(request(conversation(trace_id, f"r{i}", 12)))
    except StoreFullError as error:
        print("full", str(error).replace("\\n", " "))
        break
    print(trace_id)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
last = new_trace()
store.put_otlp(request(conversation(trace_id, f"r{i}", 12)))
print("after", trace_id)
print("read", store.query("SELECT count(DISTINCT trace_id) AS n FROM spans")[0]["n"])
store.close()
"""


@pytest.mark.slow
def test_a_full_disk_is_named_and_what_was_acknowledged_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    limit = 3_500_000  # above the size of an empty store
    ran = subprocess.run(
        [sys.executable, "-c", FILLER, str(path), str(limit)], capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    full = next(i for i, line in enumerate(lines) if line.startswith("full"))
    assert full > 0
    assert "free space" in lines[full]
    acknowledged = {*lines[:full], lines[full + 1].split()[1]}
    assert lines[full + 2] == f"read {len(acknowledged)}"
    with FileStore(path) as store:
        stored: dict[str, int] = {}
        for one in store.spans():
            stored[one.trace_id] = stored.get(one.trace_id, 0) + 1
    assert stored == dict.fromkeys(acknowledged, 12)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileStore]:
    with FileStore(tmp_path_factory.mktemp("query") / "s.duckdb") as store:
        store.put_otlp(request(conversation(new_trace(), "r", 3)))
        yield store


def test_questions_take_parameters_and_return_plain_values(asked: FileStore) -> None:
    assert asked.query("SELECT count(*) AS n FROM spans WHERE rollout_id = ?", ["r"]) == [{"n": 3}]
    assert asked.query("SELECT $a AS a, 1.5::DECIMAL(4, 2) AS d, DATE '2026-01-02' AS day", {"a": "x"}) == [
        {"a": "x", "d": 1.5, "day": "2026-01-02"}
    ]
    assert asked.query("WITH x AS (SELECT 1 AS a) SELECT * FROM x") == [{"a": 1}]
    assert "spans" in [row["name"] for row in asked.query("SHOW TABLES")]
    assert asked.query("DESCRIBE spans")[0]["column_name"] == "trace_id"
    assert asked.query("SELECT attributes->>'gen_ai.operation.name' AS o FROM spans LIMIT 1") == [
        {"o": "chat"}
    ]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM spans",
        "INSERT INTO rewards SELECT 'x', 'r', 0, NULL, 'reward', 1, 'evaluator', NULL, 0",
        "WITH x AS (DELETE FROM spans RETURNING *) SELECT * FROM x",
        "EXPLAIN ANALYZE DELETE FROM spans",
        "SELECT 1; DELETE FROM spans",
        "UPDATE rollouts SET consumed_by = NULL",
        "DROP TABLE spans",
        "CREATE TEMP TABLE t AS SELECT 1",
        "CREATE MACRO f(x) AS x",
        "COPY spans TO 'stolen.csv'",
        "COPY rewards FROM '/etc/passwd'",
        "ATTACH 'other.duckdb'",
        "EXPORT DATABASE 'out'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_parquet('http://127.0.0.1:1/x.parquet')",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "LOAD httpfs",
        "BEGIN",
        "CHECKPOINT",
        "PRAGMA disable_checkpoint_on_shutdown",
        "CALL pragma_version()",
        "",
        "SELECT * FROM nowhere",
        "SELEC 1",
    ],
)
def test_statements_that_do_more_than_read_the_store_are_refused(
    asked: FileStore, sql: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError):
        asked.query(sql)
    assert asked.stats()["spans"] == 3
    assert asked.stats()["rewards"] == 0
    assert asked.query("SELECT 1 AS a") == [{"a": 1}]


def test_questions_that_run_too_long_or_return_too_much_are_stopped(asked: FileStore) -> None:
    with pytest.raises(StoreError, match=r"longer than 0\.2 s"):
        asked.query("SELECT count(*) FROM range(10000000) a, range(10000000) b", timeout_s=0.2)
    with pytest.raises(StoreError, match="more than 10000 rows"):
        asked.query("SELECT * FROM range(10001)")
    assert len(asked.query("SELECT * FROM range(10000)")) == 10_000
    assert len(asked.query("SELECT * FROM range(10001)", row_limit=20_000)) == 10_001


def test_importing_the_store_loads_neither_duckdb_nor_http() -> None:
    code = (
        "import sys, spangrad.store; print([m for m in ('duckdb', 'httpx', 'pyarrow') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_open_store_takes_a_path_or_a_url(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as store:
        assert type(store).__name__ == "FileStore"
    with open_store("http://127.0.0.1:9", key="k") as client:
        assert type(client).__name__ == "HubClient"


def test_of_what_was_written_little_stays_in_memory_and_seldom_is_any_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "KEPT", "2MB")
    monkeypatch.setattr(database, "MERGING_FOLD", 2)
    asked = (
        "SELECT current_setting('memory_limit') AS memory, current_setting('max_vacuum_tasks') AS merges, "
        "(SELECT sum(memory_usage_bytes) FROM duckdb_memory() WHERE tag = 'BASE_TABLE') AS bytes"
    )

    def write(store: FileStore, size: int) -> None:
        for _ in range(database.WRITES_TENDED):
            store.put_otlp(request([span(new_trace(), attributes={"text": os.urandom(size // 2).hex()})]))

    with FileStore(tmp_path / "s.duckdb") as store:
        before = store.query(asked)[0]
        write(store, 10)
        assert store.query(asked)[0] | {"bytes": 0} == before | {"bytes": 0}  # who writes little merges
        for merges in (0, before["merges"], 0):
            write(store, 3_000_000)  # more than the log holds
            write(store, 10)
            after = store.query(asked)[0]
            assert (after["memory"], after["merges"]) == (before["memory"], merges)
            assert after["bytes"] < 4_000_000
        assert len(list(store.spans())) == 7 * database.WRITES_TENDED


def test_a_spool_folder_is_taken_in_at_opening_and_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    first, second = conversation(new_trace(), "r", 3), conversation(new_trace(), "q", 2)
    spool = Spool(f"{path}.spool")
    assert spool.append(request(first))
    with FileStore(path) as store:
        assert store.stats()["spans"] == 3
        assert spool.append(b"no span at all")
        assert spool.append(request(second))
        assert spool.append(request(first))
        assert store.drain() == 3
        assert store.drain() == 0
        assert store.stats()["spans"] == 5
    assert path.with_name("s.duckdb.rejected").read_bytes() == b"no span at all"


READER = """
import sys
from spangrad.store.reading import open_to_read
with open_to_read(sys.argv[1]) as store:
    print(store.stats()["spans"], flush=True)
    sys.stdin.read()
"""


def reading(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_readers_read_at_the_same_time_and_leave_the_file_and_a_log_as_they_are(tmp_path: Path) -> None:
    path, log = tmp_path / "s.duckdb", tmp_path / "s.duckdb.wal"
    subprocess.run([sys.executable, "-c", LEAVES_A_LOG, str(path)], check=True)
    before = path.read_bytes(), log.read_bytes()
    with reading(path) as first, reading(path) as second:
        assert first.stdout and second.stdout
        assert (first.stdout.readline(), second.stdout.readline()) == ("20\n", "20\n")
        with pytest.raises(StoreLockedError, match=f"held by process ({first.pid}|{second.pid})"):
            FileStore(path)
    assert (path.read_bytes(), log.read_bytes()) == before
    with FileStore(path) as store:
        assert store.stats()["spans"] == 20


@pytest.mark.slow
def test_many_readers_take_in_a_spool_once_and_none_locks_another_out(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    Spool(f"{path}.spool").append(request(conversation(new_trace(), "r", 3)))
    readers = [reading(path) for _ in range(4)]
    said = [reader.communicate("") for reader in readers]
    assert said == [("3\n", "")] * 4


@pytest.mark.slow
def test_what_comes_while_another_reads_waits_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.duckdb"
    spool = Spool(f"{path}.spool")
    spool.append(request(conversation(new_trace(), "r", 3)))
    with reading(path) as first:
        assert first.stdout and first.stdout.readline() == "3\n"
        spool.append(request(conversation(new_trace(), "q", 2)))
        with open_to_read(path) as store:
            assert store.stats()["spans"] == 3
        assert "the newest spans wait" in caplog.text
    with open_to_read(path) as store:
        assert store.stats()["spans"] == 5


def test_a_reader_makes_no_store(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty.duckdb", tmp_path / "notes.txt"
    empty.touch()
    foreign.write_text("not a database")
    for path, message in ((empty, "an empty file, no spangrad store"), (foreign, r"notes\.txt")):
        before = path.read_bytes()
        with pytest.raises(StoreError, match=message):
            open_to_read(path)
        assert path.read_bytes() == before
    with pytest.raises(StoreError, match="no store at"):
        open_to_read(tmp_path / "none.duckdb")
    assert sorted(tmp_path.iterdir()) == [empty, foreign]


def test_a_store_of_an_older_schema_is_brought_up_to_date_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as con:
        m001_initial(con)
        con.execute("CREATE TABLE schema_migrations (version INTEGER, name VARCHAR, applied_ns BIGINT)")
        con.execute("INSERT INTO schema_migrations VALUES (1, 'm001_initial', 0)")
    with pytest.raises(SchemaVersionError, match=r"has schema 1, .* open it once without read_only"):
        FileStore(path, read_only=True)
    with open_to_read(path) as store:
        assert store.query("SELECT step_index FROM calls") == []
