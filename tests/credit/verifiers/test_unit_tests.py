"""Unit tests as rewards: real runs of pytest in folders that an agent may have spoilt."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from spangrad.credit.verifiers import run_tests
from spangrad.errors import CreditError
from tests.credit.verifiers.deep_paths import make_deep

_TESTS = ["test_it.py::test_a", "test_it.py::TestB::test_c[1]"]
_TEST_FILE = """
import pytest, code_
def test_a(): assert code_.f() == 1
class TestB:
    @pytest.mark.parametrize("x", [1, 2])
    def test_c(self, x): assert code_.f() == x
"""


def _work(place: Path, code: str, tests: str = _TEST_FILE) -> Path:
    place.mkdir()
    (place / "code_.py").write_text(code)
    (place / "test_it.py").write_text(tests)
    return place


def test_listed_tests_pass_and_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    folder = _work(tmp_path / "w", "def f(): return 1")
    before = sorted(folder.rglob("*"))
    run = run_tests(folder, _TESTS, timeout_s=60)
    assert (run.score, run.share, run.passed) == (1.0, 1.0, sorted(_TESTS)), run.output
    assert sorted(folder.rglob("*")) == before


def test_one_failure_scores_zero_and_shares_half(tmp_path: Path) -> None:
    run = run_tests(
        _work(tmp_path / "w", "def f(): return 1"),
        ["test_it.py::test_a", "test_it.py::TestB::test_c[2]"],
        timeout_s=60,
    )
    assert (run.score, run.share, run.failed) == (0.0, 0.5, ["test_it.py::TestB::test_c[2]"])


def test_leaving_early_with_zero_passes_nothing(tmp_path: Path) -> None:
    run = run_tests(_work(tmp_path / "w", "import os; os._exit(0)"), _TESTS, timeout_s=60)
    assert (run.exit_code, run.score, run.passed) == (0, 0.0, [])


def test_changed_tests_are_laid_over_with_the_right_ones(tmp_path: Path) -> None:
    spoilt = "def test_a(): pass\nclass TestB:\n    def test_c(self): pass"
    folder = _work(tmp_path / "w", "def f(): return 0", spoilt)
    outside = tmp_path / "outside.py"
    outside.write_text(spoilt)
    (folder / "test_it.py").unlink()
    (folder / "test_it.py").symlink_to(outside)
    right = tmp_path / "right"
    right.mkdir()
    (right / "test_it.py").write_text(_TEST_FILE)
    assert run_tests(folder, ["test_it.py::test_a"], timeout_s=60).score == 1.0
    assert run_tests(folder, ["test_it.py::test_a"], timeout_s=60, overlay=right).score == 0.0
    assert outside.read_text() == spoilt


_PASSES = "open(sys.argv[1], 'w').write('<r><testcase classname=\"test_it\" name=\"test_a\"/></r>')"
_SPECIAL = """
import os, stat, sys
kinds = {stat.S_IFMT(os.lstat(name).st_mode) for name in os.listdir()}
if kinds == {stat.S_IFREG}: """


def test_pipes_and_sockets_that_the_agent_left_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _work(tmp_path / "w", "")
    monkeypatch.chdir(folder)  # the address of a socket is short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    command = [sys.executable, "-c", _SPECIAL + _PASSES, "{report}"]
    assert run_tests(folder, ["test_it.py::test_a"], timeout_s=10, command=command).score == 1.0


def test_pipes_and_closed_folders_are_no_shield_against_the_right_tests(tmp_path: Path) -> None:
    folder, right = _work(tmp_path / "w", "spoilt"), tmp_path / "right"
    right.mkdir()
    (right / "code_.py").write_text("right")
    (right / "sub").mkdir()
    (right / "sub" / "a").write_text("right")
    (folder / "code_.py").chmod(0o400)
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "a")
    (folder / "sub").chmod(0o500)
    script = "import sys; print(open('code_.py').read(), open('sub/a').read())"
    run = run_tests(folder, ["t"], timeout_s=10, command=[sys.executable, "-c", script], overlay=right)
    assert run.output == "right right\n"


def test_what_cant_be_read_fails_the_tests_if_the_agent_left_it_and_raises_if_the_operator_did(
    tmp_path: Path,
) -> None:
    folder, deep = _work(tmp_path / "w", ""), _work(tmp_path / "deep", "")
    make_deep(deep, is_folder=True)
    run = run_tests(deep, ["test_it.py::test_a"], timeout_s=10)
    assert (run.score, run.exit_code, run.failed) == (0.0, None, ["test_it.py::test_a"])
    assert "can't be read" in run.output
    with pytest.raises(OSError, match="too long"):
        run_tests(folder, ["t"], timeout_s=10, overlay=deep)


@pytest.mark.parametrize(
    "leave",
    ["os.mkfifo(sys.argv[1])", "os.symlink('/dev/zero', sys.argv[1])"]
    + [
        f"open(sys.argv[1], 'w').write('<?xml version=\"1.0\" encoding=\"{x}\"?><a/>')"
        for x in ("x", "utf-32")
    ],
)
def test_what_is_no_report_passes_nothing(tmp_path: Path, leave: str) -> None:
    command = [sys.executable, "-c", f"import os, sys; {leave}", "{report}"]
    assert run_tests(_work(tmp_path / "w", ""), ["t"], timeout_s=10, command=command).score == 0.0


def test_a_run_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    run = run_tests(_work(tmp_path / "w", ""), ["t"], timeout_s=2, command=[sys.executable, "-c", script])
    assert (run.timed_out, run.exit_code, run.score) == (True, None, 0.0)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_is_too_large_to_be_copied_passes_nothing(tmp_path: Path) -> None:
    folder = _work(tmp_path / "w", "")
    with (folder / "hole").open("wb") as file:
        file.truncate(1 << 40)  # takes no space here, and 1 TiB in a copy
    run = run_tests(folder, ["t"], timeout_s=60)
    assert (run.score, run.exit_code, run.timed_out) == (0.0, None, False)
    assert run.output.startswith("what the agent left takes 10995116") and "(max_bytes)" in run.output


_FILLS = """
import sys, time
for number in range(50):
    open(f"{number}", "wb").write(bytes(1 << 20))
    time.sleep(WAIT)
time.sleep(1000 * WAIT)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_a_run_that_fills_the_disk_is_stopped_and_passes_nothing(tmp_path: Path, wait_s: float) -> None:
    script = _FILLS.replace("WAIT", str(wait_s)) + _PASSES
    command = [sys.executable, "-c", script, "{report}"]
    folder, tests = _work(tmp_path / "w", ""), ["test_it.py::test_a"]
    run = run_tests(folder, tests, timeout_s=60, command=command, max_bytes=8 << 20)
    assert (run.score, run.exit_code, run.timed_out) == (0.0, None, False)
    assert "no test has passed: it wrote more than 8388608 bytes" in run.output
    if not wait_s:
        assert run_tests(folder, tests, timeout_s=60, command=command).score == 1.0


def test_no_key_of_the_caller_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    run = run_tests(
        _work(tmp_path / "w", ""),
        ["t"],
        timeout_s=60,
        command=[sys.executable, "-c", "import os; print(sorted(os.environ))"],
    )
    assert "PATH" in run.output
    assert "OPENAI_API_KEY" not in run.output
    assert "OPENAI_API_KEY" in os.environ


def test_much_output_keeps_its_end(tmp_path: Path) -> None:
    run = run_tests(
        _work(tmp_path / "w", ""),
        ["t"],
        timeout_s=60,
        command=[sys.executable, "-c", "print('x' * 5_000_000); print('the end')"],
    )
    assert run.output.endswith("the end\n")
    assert len(run.output) <= 4000


def test_what_the_operator_got_wrong_raises(tmp_path: Path) -> None:
    folder = _work(tmp_path / "w", "")
    with pytest.raises(CreditError, match="no folder"):
        run_tests(tmp_path / "nowhere", ["t"], timeout_s=1)
    with pytest.raises(CreditError, match="0 tests"):
        run_tests(folder, [], timeout_s=1)
    with pytest.raises(CreditError, match=r"tests are 'test_it\.py::test_a'; expected a list of strings"):
        run_tests(folder, "test_it.py::test_a", timeout_s=1)
    with pytest.raises(CreditError, match="words of the command are 'pytest'"):
        run_tests(folder, ["t"], timeout_s=1, command="pytest")
    with pytest.raises(CreditError, match="can't be started"):
        run_tests(folder, ["t"], timeout_s=1, command=["/no/such/program"])
