"""The process that a verifier runs in: `python -m` this, with the function, a folder, a name and a socket.

Knows the protocol of `verifier_pool.py`: a pickled rollout comes, a JSON object goes. It has no store and no
key. What the verifier prints goes to standard error.

Invariants: whatever the verifier raises is an answer; when the process that started it ends, however it
ends, this one and its own children do too.
"""

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

from spangrad.adapters.scoring.verifier import Verifier
from spangrad.errors import ConfigError

_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
LONGEST_ERROR: Final = 2000
"""Characters of an error that are told."""


def main(spec: str, base_dir: str, name: str, socket: int) -> None:
    """Serve until the other end closes."""
    os.set_inheritable(socket, False)  # nothing that the verifier starts can answer for it
    _end_with_parent()
    with Connection(socket) as connection:
        try:
            verifier = Verifier(spec, base_dir)
        except (Exception, SystemExit) as error:
            is_ours = isinstance(error, ConfigError)  # it names the function
            why = str(error) if is_ours else f"{spec!r} can't be loaded: {_told(error)}"
            _answer(connection, {"broken": why})
            return
        _answer(connection, {"ready": True})
        with verifier:
            while True:
                try:
                    rollout = connection.recv()
                except (EOFError, OSError):
                    return
                try:
                    answer: dict[str, Any] = {"values": verifier(rollout, name)}
                except (Exception, SystemExit) as error:  # boundary: it costs this rollout alone
                    answer = {"raised": _told(error)}
                _answer(connection, answer)


def _answer(connection: Connection, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # nobody listens any more
        connection.send_bytes(json.dumps(answer).encode())


def _told(error: BaseException) -> str:
    """Type, text and the line of the user's code that raised it."""
    try:
        text = str(error)
    except Exception:  # its __str__ may be the user's, too
        text = ""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen"))]
    where = f" ({os.path.basename(theirs[-1].filename)}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {text[:LONGEST_ERROR]}{where}"


def _end_with_parent() -> None:
    """Watch standard input, whose other end only the parent holds, and give the verifier an empty one."""
    lifeline = os.dup(0)
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the pool starts it as the leader of a group

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


if __name__ == "__main__":
    function, folder, reward, descriptor = sys.argv[1:]
    main(function, folder, reward, int(descriptor))
