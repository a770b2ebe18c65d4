import os
import signal
import socket
import subprocess
import sys

import pytest
from tests.waiting import wait_until

from spangrad.errors import EngineError, PortInUseError
from spangrad.trainer.processes import Service, free_port, last_line, own_command, require_free_port

SERVER = r"""
import http.server, sys
handler = http.server.SimpleHTTPRequestHandler
http.server.test(handler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def http_service(tmp_path, port):
    return Service(
        "files",
        [sys.executable, "-c", SERVER, str(port)],
        log=tmp_path / "log",
        ready_url=f"http://127.0.0.1:{port}/",
    )


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split()[2] != "Z"


def test_a_taken_port_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"hub: 127.0.0.1:{port} is taken"):
            require_free_port("127.0.0.1", port, what="hub")


def test_a_service_starts_answers_and_ends(tmp_path):
    with http_service(tmp_path, free_port()) as service:
        pid = service.pid
        assert service.is_alive() and pid is not None
    assert not alive(pid)


def test_a_child_that_ends_at_once_is_reported_with_its_last_words(tmp_path):
    service = Service(
        "hub",
        [sys.executable, "-c", "raise SystemExit('no such thing')"],
        log=tmp_path / "log",
        ready_url="http://127.0.0.1:1/",
    )
    with pytest.raises(EngineError, match="hub ended at once: no such thing"), service:
        pass


def test_a_child_dies_with_a_killed_parent(tmp_path):
    code = (
        "import sys, pathlib, time\n"
        "from spangrad.trainer.processes import Service\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"s = Service('x', sleeper, log=pathlib.Path({str(tmp_path / 'log')!r}), ready_url='')\n"
        "s.start(); print(s.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(child), 10)


def test_last_line_skips_blank_lines_and_missing_files(tmp_path):
    (tmp_path / "log").write_text("one\ntwo\n\n  \n")
    assert last_line(tmp_path / "log") == "two"
    assert last_line(tmp_path / "none") == ""


def test_a_command_that_is_told_works_when_it_is_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "en v" / "bin" / "spangrad"
    other = tmp_path / "other" / "spangrad"
    for file in (program, other):
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\necho $0\n")
        file.chmod(0o755)
    for argv, path, told, answers in (
        ("en v/bin/spangrad", "/usr/bin:/bin", "'en v/bin/spangrad'", "en v/bin/spangrad"),
        ("en v/bin/spangrad", f"{other.parent}:/usr/bin:/bin", "'en v/bin/spangrad'", "en v/bin/spangrad"),
        (str(program), f"{program.parent}:/usr/bin:/bin", "spangrad", str(program)),
    ):
        monkeypatch.setenv("PATH", path)
        monkeypatch.setattr(sys, "argv", [argv])
        assert own_command() == told
        pasted = subprocess.run(["sh", "-c", told], capture_output=True, text=True, check=True)
        assert pasted.stdout.strip() == answers
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["en v/bin/spangrad"])
    assert own_command(from_anywhere=True) == f"'{program}'"
    monkeypatch.chdir(program.parent)
    monkeypatch.setattr(sys, "argv", ["spangrad"])
    assert own_command() == "./spangrad"
    monkeypatch.setattr(sys, "argv", ["/site/spangrad/__main__.py"])
    version = subprocess.run(f"{own_command()} --version", shell=True, capture_output=True, text=True)
    assert version.stdout.startswith("spangrad ")
