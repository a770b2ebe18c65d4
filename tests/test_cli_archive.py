"""`spangrad archive` and `spangrad gc`, run as a user runs them."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.reading import open_to_read
from tests.command_line import listed, recorded, spangrad
from tests.store.hub_process import HubProcess
from tests.store.test_store_erase import of_user


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = tmp_path / "shop.duckdb"
    with FileStore(path) as opened:
        opened.put_otlp(recorded("r-1", 1))
        opened.put_otlp(recorded("r-2", 2 + 3 * 24 * 3600))
        opened.put_otlp(encode_request(of_user(6, 42, "x", rollout="r-3")))
    return str(path)


def test_archived_history_is_listed_reported_and_exported_as_before(store: str, tmp_path: Path) -> None:
    def shown(number: int) -> list[object]:
        data = tmp_path / str(number) / "data"
        assert spangrad("export", str(data), "--format", "otlp", "--store", store).returncode == 0
        return [
            listed("calls", "--store", store, "--json"),
            listed("rollouts", "--store", store, "--json"),
            listed("report", "--store", store, "--json"),
            listed("sql", "SELECT trace_id, name FROM spans ORDER BY ALL", "--store", store, "--json"),
            {f.name: f.read_bytes() for f in data.iterdir() if f.name != "README.md"},
        ]

    before = shown(1)
    (dry,) = listed("archive", "--before", "1970-01-06", "--store", store, "--dry-run", "--json")
    (moved,) = listed("archive", "--before", "1970-01-06", "--store", store, "--json")
    assert (
        (dry["days"], dry["spans"], dry["dry_run"]) == (moved["days"], moved["spans"], True) == (2, 2, True)
    )
    assert shown(2) == before


def test_calls_that_nobody_had_read_are_read_out_of_the_archive(store: str, tmp_path: Path) -> None:
    copy = str(shutil.copy(store, tmp_path / "copy.duckdb"))
    listed("archive", "--before", "30d", "--store", store, "--json")
    for command in ("calls", "report", "rollouts"):
        assert listed(command, "--store", store, "--json") == listed(command, "--store", copy, "--json")


def test_days_and_ages_are_understood(store: str) -> None:
    done = spangrad("archive", "--before", "30d", "--store", store)
    assert done.returncode == 0, done.stderr
    assert "moved 3 rollouts, 3 traces with 4 spans and 0 log records of 3 days" in done.stdout
    for text in ("yesterday", "2026-02-30", "d", ""):
        done = spangrad("archive", "--before", text, "--store", store)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "give one such as 2026-01-31, or 30d" in done.stderr


def test_a_user_is_deleted_only_when_that_is_confirmed(store: str) -> None:
    refused = spangrad("gc", "--attribute", "enduser.id=42", "--store", store)
    assert refused.returncode == 1
    assert "spans\t2\t0" in refused.stdout
    assert "--yes" in refused.stderr
    (dry,) = listed("gc", "--attribute", "enduser.id=42", "--store", store, "--dry-run", "--json")
    assert (dry["database"]["spans"], dry["deleted"]) == (2, False)
    assert (dry["joined_rollouts"], dry["other_values"]) == ([], [])
    (done,) = listed("gc", "--attribute", "enduser.id=42", "--store", store, "--yes", "--json")
    assert (done["database"]["spans"], done["database"]["rollouts"], done["deleted"]) == (2, 1, True)
    with open_to_read(store) as opened:
        assert [rollout.rollout_id for rollout in opened.rollouts()] == ["r-1", "r-2"]


def test_whose_else_history_goes_with_a_user_is_said_before(store: str) -> None:
    with FileStore(store) as opened:
        joined = [*of_user(7, 43, "y", rollout="r-3"), *of_user(7, 44, "z", rollout="r-2")]
        opened.put_otlp(encode_request([replace(span, trace_id=joined[0].trace_id) for span in joined]))
    dry = spangrad("gc", "--attribute", "enduser.id=42", "--store", store, "--dry-run")
    assert dry.returncode == 0
    assert "also of enduser.id=43, enduser.id=44:" in dry.stderr
    assert "for they share a trace: r-2" in dry.stderr


def test_what_is_older_than_is_kept_is_deleted(store: str) -> None:
    days = time.time_ns() // (24 * 3600 * 10**9) - 4
    (done,) = listed("gc", "--keep", f"{days}d", "--store", store, "--yes", "--json")
    assert (done["database"]["rollouts"], done["deleted"]) == (2, True)
    (done,) = listed("gc", "--delete-before", "2020-01-01", "--store", store, "--yes", "--json")
    assert done["database"]["rollouts"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--keep", "30d", "--delete-before", "2026-01-01"),
        ("--keep", "30d", "--attribute", "a=b"),
        ("--attribute", "enduser.id"),
        ("--attribute", "=42"),
    ],
)
def test_what_gc_does_not_understand_deletes_nothing(store: str, arguments: tuple[str, ...]) -> None:
    done = spangrad("gc", *arguments, "--store", store, "--yes")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert len(listed("rollouts", "--store", store, "--json")) == 3


@pytest.mark.parametrize("kept_bytes", [0, 40, -40])
def test_a_damaged_file_of_the_archive_is_named_with_what_to_do(
    store: str, tmp_path: Path, kept_bytes: int
) -> None:
    listed("archive", "--before", "1970-01-06", "--store", store, "--json")
    [file, *_] = sorted(Path(f"{store}.archive").rglob("spans-*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:kept_bytes])
    for command in (
        ("sql", "SELECT attributes FROM spans"),
        ("sql", "SELECT attributes FROM spans", "--parquet", str(tmp_path / "x.parquet")),
        ("export", str(tmp_path / "out"), "--format", "otlp"),
    ):
        done = spangrad(*command, "--store", store)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert f"{str(file)!r} of the archive is damaged or cut short: put it back" in done.stderr
        assert "LINE" not in done.stderr
    file.write_bytes(whole)
    assert spangrad("sql", "SELECT attributes FROM spans", "--store", store).returncode == 0


def test_a_deletion_that_a_damaged_file_keeps_from_its_end_is_not_called_done(store: str) -> None:
    listed("archive", "--before", "1970-01-06", "--store", store, "--json")
    [file, *_] = sorted(Path(f"{store}.archive").rglob("spans-*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    request = ("gc", "--attribute", "enduser.id=42", "--store", store, "--yes", "--json")
    done = spangrad(*request)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"not all that was asked for is deleted: {str(file)!r} of the archive is gone or" in done.stderr
    assert "(1 traces) stays: put it back from a copy and run the same again" in done.stderr
    report = json.loads(done.stdout)
    assert (report["database"]["spans"], report["damaged"], report["deleted"]) == (2, [str(file)], False)
    file.write_bytes(whole)
    (report,) = listed(*request)
    assert (report["database"]["spans"], report["damaged"], report["deleted"]) == (0, [], True)


@pytest.mark.slow
def test_a_running_hub_is_named(store: str) -> None:
    with HubProcess(Path(store)) as hub:
        for command in (("archive", "--before", "30d"), ("gc", "--keep", "30d", "--yes")):
            done = spangrad(*command, "--store", store)
            assert done.returncode == 1
            assert f"process {hub.process.pid}" in done.stderr and "; stop that first" in done.stderr
            assert "--store" not in done.stderr
            done = spangrad(*command, "--store", hub.url)
            assert done.returncode == 1
            assert f"the hub at {hub.url} has it open: stop that hub" in done.stderr
    assert json.loads(spangrad("archive", "--before", "30d", "--store", store, "--json").stdout)["days"] == 3
