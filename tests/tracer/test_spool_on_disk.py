"""The spool's invariants, with real files, real processes and real signals."""

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spangrad.tracer.spool import KEEP, Spool
from tests.waiting import wait_until


def drained(spool: Spool) -> list[bytes]:
    records: list[bytes] = []
    assert spool.drain(records.append) == len(records)
    return records


def test_records_come_back_once_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    given = [b"", b"one", bytes(70_000), b"three"]
    assert all([spool.append(record) for record in given])
    assert drained(spool) == given
    assert drained(spool) == []
    assert spool.size_bytes() == 0
    assert spool.append(b"after")
    assert drained(Spool(tmp_path / "spool")) == [b"after"]


def test_a_reader_takes_what_a_living_writer_has_written(tmp_path: Path) -> None:
    writer, reader = Spool(tmp_path), Spool(tmp_path)
    for index in range(5):
        writer.append(b"%d" % index)
        assert drained(reader) == [b"%d" % index]


def test_a_failed_send_keeps_everything_from_there_on_and_nothing_else(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for record in (b"", b"a", b"b"):
        spool.append(record)

    def refuse(record: bytes) -> None:
        if record == b"b":
            raise ConnectionError("gone")

    for _ in range(2):
        with pytest.raises(ConnectionError):
            spool.drain(refuse)
    spool.append(b"c")
    assert drained(spool) == [b"b", b"c"]
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_to_stay_holds_up_none_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path)
    for record in (b"a", b"stubborn", b"b"):
        spool.append(record)
    spool.close()
    (segment,) = tmp_path.iterdir()
    segment.write_bytes(segment.read_bytes() + b"torn")
    sent: list[bytes] = []

    def choosy(record: bytes) -> object:
        if record == b"stubborn":
            return KEEP
        sent.append(record)
        return None

    assert [spool.drain(choosy) for _ in range(2)] == [2, 0]
    spool.append(b"c")
    assert spool.drain(choosy) == 1
    assert sent == [b"a", b"b", b"c"]
    assert drained(spool) == [b"stubborn"]
    assert [record.getMessage().partition(" bytes")[0][-2:] for record in caplog.records] == [" 4"]
    assert list(tmp_path.iterdir()) == []


def test_a_torn_tail_costs_only_the_torn_record(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(b"whole")
    spool.append(b"torn by a crash")
    spool.close()
    (segment,) = tmp_path.iterdir()
    whole = segment.read_bytes()
    for cut in (1, 10, 20):
        segment.write_bytes(whole[:-cut])
        assert drained(Spool(tmp_path)) == [b"whole"]
    segment.write_bytes(whole[:-1] + b"?")
    assert drained(Spool(tmp_path)) == [b"whole"]


def test_a_full_spool_drops_the_newest_and_counts(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=40)
    assert spool.append(b"a" * 20)
    assert not spool.append(b"b" * 20)
    assert spool.append(b"c" * 4)
    assert spool.dropped == 1
    assert drained(spool) == [b"a" * 20, b"c" * 4]


def test_a_disk_that_refuses_costs_the_record_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    spool = Spool(tmp_path / "file" / "spool")
    assert not spool.append(b"lost")
    assert spool.dropped == 1
    assert drained(spool) == []


def test_a_file_that_may_not_grow_is_followed_by_another(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        kept = [spool.append(bytes([number]) * size) for number, size in enumerate((60, 60, 200, 60))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept == [True, True, False, True]
    assert spool.is_disk_full and spool.problem == "File too large"
    assert len(list(tmp_path.iterdir())) == 3  # none without a record
    assert drained(spool) == [bytes([number]) * 60 for number in (0, 1, 3)]


def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.append(b"secret")
    (segment,) = (tmp_path / "spool").iterdir()
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_and_forks_write_beside_one_another(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(b"parent")

    def write(name: str) -> None:
        for index in range(50):
            assert spool.append(f"{name}-{index}".encode())

    threads = [threading.Thread(target=write, args=(f"t{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        write("child")
        os._exit(0)
    write("late")
    assert os.waitpid(child, 0)[1] == 0
    records = drained(spool)
    assert len(records) == len(set(records)) == 1 + 5 * 50


def test_what_was_appended_survives_sigkill(tmp_path: Path) -> None:
    code = """
import os, sys
from spangrad.tracer.spool import KEEP, Spool
spool = Spool(sys.argv[1])
for index in range(10**6):
    assert spool.append(b"%d" % index)
    os.write(1, b"%d\\n" % index)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(200)][-1]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    records = [int(record) for record in drained(Spool(tmp_path))]
    assert records == list(range(len(records)))
    assert len(records) > acknowledged


def test_two_drainers_never_take_the_same_record(tmp_path: Path) -> None:
    for number in range(20):
        writer = Spool(tmp_path)
        writer.append(b"%d" % number)
        writer.close()
    records: list[bytes] = []
    threads = [threading.Thread(target=lambda: Spool(tmp_path).drain(records.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: not list(tmp_path.iterdir()))
    assert sorted(records, key=int) == [b"%d" % number for number in range(20)]
