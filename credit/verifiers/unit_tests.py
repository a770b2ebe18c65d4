"""Unit tests as a reward: run in a copy of the folder that an agent left.

Invariants:
* the folder is not changed; nothing of the run outlives it, however it ends;
* a test passed only if the report says so by name: a run that exits early with 0 has passed nothing;
* pipes, sockets and devices are not copied; where what the agent left can't be read, or takes too much space,
  no test has passed, nor where a run fills the disk: it is stopped;
* what runs sees none of the caller's environment but `PATH` and `LANG`: no keys.

This is no sandbox: tests run what the policy wrote, as this user. Who must not trust it runs verifiers in a
container. Tests and the code under test share a process, so hostile code can write a report that lies.
"""

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from xml.etree import ElementTree

from spangrad.credit.verifiers.arguments import strings
from spangrad.errors import CreditError

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={report}")
MAX_BYTES: Final = 8 << 30
"""Space that a folder may take, and again a run of its tests: few repositories need as much."""
_BLOCK = 4096
"""What a file or folder takes at least."""
_GLANCE_S = 0.1
_TAIL = 4000
_MAX_REPORT = 32 << 20


@dataclass(frozen=True, slots=True)
class TestRun:
    """What became of the tests."""

    __test__ = False  # pytest: no class of tests

    passed: Sequence[str]
    failed: Sequence[str]
    """Wanted, and not reported as passed: failed, skipped, or never run."""
    timed_out: bool
    exit_code: int | None
    """None: it was stopped, or never began: what the agent left can't be read, or is too large."""
    output: str
    """The end of what it printed, and why it was stopped or never began."""

    @property
    def score(self) -> float:
        """1.0 if all passed, else 0.0: the reward of R2E and SWE-Gym."""
        return float(not self.failed)

    @property
    def share(self) -> float:
        """Passed of all wanted: a softer reward, that pays for half a repair."""
        return len(self.passed) / (len(self.passed) + len(self.failed))


def run_tests(
    folder: str | Path,
    tests: Collection[str],
    *,
    timeout_s: float,
    command: Sequence[str] = PYTEST,
    overlay: str | Path | None = None,
    max_bytes: int = MAX_BYTES,
) -> TestRun:
    """Run tests in a copy of a folder.

    Args:
        folder: What the agent left.
        tests: Names as pytest gives them, `tests/test_a.py::TestB::test_c[1]`; all must pass.
        timeout_s: The run is stopped after so long, with all that it started; its tests have not passed.
        command: What runs them; the names are appended. `{report}` stands for the JUnit XML file that it must
            write.
        overlay: Folder that is laid over the copy: the right tests, which the agent must not have changed.
        max_bytes: Space that what the agent left may take, and again what the run writes to its copy: who
            takes more has passed nothing, and the run is stopped.

    Raises:
        CreditError: There is no folder, no test, the tests or the command are no list of strings, the copy
            can't be written or the command can't be started: nothing is known then.
        OSError: The overlay can't be read.
    """
    wanted = sorted(set(strings(tests, "tests")))
    command = strings(command, "words of the command")
    if not wanted or not timeout_s > 0 or not max_bytes > 0:
        raise CreditError(
            f"{len(wanted)} tests, timeout_s {timeout_s!r}, max_bytes {max_bytes!r}; expected one or more,"
            " and above 0"
        )
    for one in (folder, overlay):
        if one is not None and not Path(one).is_dir():
            raise CreditError(f"{str(one)!r} is no folder")
    with tempfile.TemporaryDirectory(prefix="spangrad-tests-", ignore_cleanup_errors=True) as place:
        work, report = Path(place, "work"), Path(place, "report.xml")
        if (left := _bytes(Path(folder), of_blocks=False)) > max_bytes:
            told = f"what the agent left takes {left} bytes; at most {max_bytes} are copied (max_bytes)"
            return TestRun([], wanted, False, None, told)
        work.mkdir()
        try:
            shutil.copytree(
                *(folder, work), symlinks=True, ignore=_special, copy_function=_copy, dirs_exist_ok=True
            )
        except OSError as error:
            return TestRun([], wanted, False, None, f"what the agent left can't be read: {error}"[:_TAIL])
        _open_folders(work)
        if overlay is not None:
            _lay_over(Path(overlay), work)
        line = [part.replace("{report}", str(report)) for part in command]
        exit_code, output, timed_out = _run([*line, *wanted], work, timeout_s, max_bytes)
        reported = frozenset[tuple[str, str]]() if exit_code is None else _passed(report)
    passed = [name for name in wanted if _junit_name(name) in reported]
    failed = [name for name in wanted if _junit_name(name) not in reported]
    return TestRun(passed, failed, timed_out, exit_code, output)


def _bytes(folder: Path, *, of_blocks: bool) -> int:
    """Space that a folder takes; not of blocks: what its copy takes, in which files have no holes."""
    total = 0
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):  # it is gone, or can't be read: then it can't be copied
                found = os.lstat(os.path.join(place, name))
                total += max(_BLOCK, found.st_blocks * 512 if of_blocks else found.st_size)
    return total


def _special(folder: str, names: Sequence[str]) -> list[str]:
    """What of a folder is no file, folder or link: to open a pipe may take forever, to read a device, too."""
    modes = {name: os.lstat(Path(folder, name)).st_mode for name in names}
    known = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return [name for name, mode in modes.items() if stat.S_IFMT(mode) not in known]


def _copy(source: str, target: str) -> None:
    with open(source, "rb"):  # what fails here is the agent's, all else is ours
        pass
    try:
        shutil.copy2(source, target)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise
        raise CreditError(f"{source!r} can't be copied to {target!r}: {error.strerror}") from error


def _open_folders(work: Path) -> None:
    """Make folders of the copy writable, whatever the agent left: tests are laid over them."""
    work.chmod(work.stat().st_mode | stat.S_IRWXU)
    for place, folders, _ in os.walk(work):
        for path in (Path(place, name) for name in folders):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IRWXU)


def _lay_over(overlay: Path, work: Path) -> None:
    """Copy files over; what the agent put in their way, links and pipes too, goes."""
    for place, folders, files in os.walk(overlay, onerror=_raise):
        for source in (Path(place, name) for name in sorted([*folders, *files])):
            target = work / source.relative_to(overlay)
            is_folder = target.is_dir() and not target.is_symlink()
            if is_folder and not source.is_dir():
                shutil.rmtree(target)
            elif not is_folder:
                target.unlink(missing_ok=True)
            if source.is_dir():
                target.mkdir(exist_ok=True)
            else:
                shutil.copy2(source, target)


def _raise(error: OSError) -> None:
    raise error


def _run(line: Sequence[str], work: Path, timeout_s: float, max_bytes: int) -> tuple[int | None, str, bool]:
    """Exit code (None: stopped), the end of what it printed, and whether its time was over."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment |= {"HOME": str(work.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    before, free = _bytes(work.parent, of_blocks=True), shutil.disk_usage(work).free
    deadline = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(
            line,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise CreditError(f"{line[0]!r} can't be started: {error.strerror}") from error
    assert process.stdout is not None
    tail = bytearray()
    reader = threading.Thread(target=_keep_tail, args=(process.stdout, tail), daemon=True)
    reader.start()
    exit_code: int | None = None
    too_much = False
    try:
        while exit_code is None and not too_much and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(min(left_s, _GLANCE_S))
            # How full the disk is costs nothing to ask, but others write to it, too.
            free = max(free, left := shutil.disk_usage(work).free)
            if exit_code is not None or free - left > max_bytes:
                too_much = _bytes(work.parent, of_blocks=True) - before > max_bytes
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it left running
        process.wait()
        reader.join(timeout=1.0)  # a process that left the group may hold the pipe
    told = f"\nno test has passed: it wrote more than {max_bytes} bytes (max_bytes)" if too_much else ""
    output = bytes(tail[-_TAIL + len(told) :]).decode("utf-8", "replace") + told
    return None if too_much else exit_code, output, exit_code is None and not too_much


def _keep_tail(stream: IO[bytes], tail: bytearray) -> None:
    with stream:
        while block := stream.read1(65536):  # type: ignore[attr-defined]
            tail += block
            del tail[: -2 * _TAIL]


def _passed(report: Path) -> frozenset[tuple[str, str]]:
    """(class name, name) of every test that the report calls passed; none if it is no report."""
    try:
        told = report.lstat()
        if not stat.S_ISREG(told.st_mode) or told.st_size > _MAX_REPORT:
            return frozenset()
        cases = ElementTree.parse(report).iter("testcase")  # size bounded, and expat bounds expansion
        return frozenset(
            (case.get("classname", ""), case.get("name", ""))
            for case in cases
            if not any(child.tag in ("failure", "error", "skipped") for child in case)
        )
    except (OSError, ElementTree.ParseError, LookupError, ValueError):  # the last two: odd encodings
        return frozenset()


def _junit_name(test: str) -> tuple[str, str]:
    """pytest's name of a test as its report has it: `a/test_b.py::C::d` -> (`a.test_b.C`, `d`)."""
    file, *names = test.split("::")
    module = file.removesuffix(".py").replace("/", ".")
    return ".".join([module, *names[:-1]]), names[-1] if names else ""
