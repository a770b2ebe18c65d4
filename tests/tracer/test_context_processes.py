"""The rollout follows work to processes: fork, spawn, forkserver, pools of them, and programs."""

import asyncio
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import spangrad
from spangrad.tracer import children
from spangrad.tracer import conventions as c
from spangrad.tracer.current import ENVIRONMENT
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.stub_server import HubServer, ModelServer

Finish = Callable[[], list[Recorded]]

PRELUDE = """
import asyncio, multiprocessing, os, signal, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import httpx
import spangrad

def ask(prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    httpx.post(sys.argv[1] + "/chat/completions", json=body)
    return prompt

def in_both(work):
    '''Run `work(name)` in two threads, each in a rollout of its own, that are open at once.'''
    barrier = threading.Barrier(2)
    failed = []
    def agent(name):
        try:
            with spangrad.rollout(rollout_id=name, task_id="t-" + name):
                barrier.wait(60)
                work(name)
                barrier.wait(60)
        except BaseException as error:
            failed.append(error)
            barrier.abort()
            raise
    threads = [threading.Thread(target=agent, args=(name,)) for name in ("a", "b")]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failed
"""


@pytest.fixture
def run(model: ModelServer, tmp_path: Path) -> Callable[..., list[Recorded]]:
    """Runs a program that calls `spangrad.init()` itself, and gives its spans."""

    def run_it(main: str, *, definitions: str = "") -> list[Recorded]:
        script = tmp_path / "program.py"
        body = "\n".join("    " + line for line in main.strip().splitlines())
        start = "if __name__ == '__main__':\n    spangrad.init(store='s', service_name='program')\n"
        script.write_text(PRELUDE + definitions + start + body + "\n")
        ended = subprocess.run(
            [sys.executable, str(script), model.url],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
        assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
        return spans_of_store(tmp_path / "s")

    return run_it


def owners(spans: list[Recorded]) -> dict[str, object]:
    """Who each call belongs to; and that it hangs under that one's root."""
    root_ids = {root[c.ROLLOUT_ID]: (root.trace_id, root.span_id) for root in roots(spans)}
    for call in calls(spans):
        if call.get(c.ROLLOUT_ID) in root_ids:
            assert (call.trace_id, call.parent_id) == root_ids[call[c.ROLLOUT_ID]]
            assert call[c.TASK_ID] == "t-" + call[c.ROLLOUT_ID]
            assert call.resource["service.name"] == "program"
    prompts = [call.prompt() for call in calls(spans)]
    assert len(prompts) == len(set(prompts))
    return {call.prompt(): call.get(c.ROLLOUT_ID) for call in calls(spans)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_belong_to_the_rollout_that_started_them(
    run: Callable[..., list[Recorded]], method: str
) -> None:
    spans = run(
        f"""
context = multiprocessing.get_context("{method}")
def work(name):
    process = context.Process(target=ask, args=("process of " + name,))
    process.start()
    process.join()
    assert process.exitcode == 0 and "_spangrad_arrival" not in vars(process)
in_both(work)
process = context.Process(target=ask, args=("outside",))
process.start()
process.join()
"""
    )
    expected: dict[str, object] = {"process of a": "a", "process of b": "b"}
    if method == "fork":  # a spawned one is only recorded if a rollout or `spangrad run` asks for it
        expected["outside"] = None
    assert owners(spans) == expected
    assert len(roots(spans)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tasks_of_process_pools_belong_to_the_rollout_that_submitted_them(
    run: Callable[..., list[Recorded]], method: str
) -> None:
    spans = run(
        f"""
context = multiprocessing.get_context("{method}")
with ProcessPoolExecutor(1, mp_context=context) as executor, context.Pool(1) as pool:
    def work(name):
        assert executor.submit(ask, "submit " + name).result() == "submit " + name
        assert list(executor.map(ask, ["map " + name])) == ["map " + name]
        assert pool.apply(ask, ("apply " + name,)) == "apply " + name
        assert pool.map(ask, ["pool map " + name]) == ["pool map " + name]
        assert list(pool.imap_unordered(ask, ["imap " + name])) == ["imap " + name]
    in_both(work)
    executor.submit(ask, "outside executor").result()
    pool.apply(ask, ("outside pool",))
    pool.close()
    pool.join()
"""
    )
    expected: dict[str, object] = {"outside executor": None, "outside pool": None}
    for kind in ("submit", "map", "apply", "pool map", "imap"):
        expected |= {f"{kind} {name}": name for name in ("a", "b")}
    assert owners(spans) == expected


@pytest.mark.slow
def test_errors_of_process_pools_stay_as_they_are(run: Callable[..., list[Recorded]]) -> None:
    run(
        """
import pickle
def said(context, followed):
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        try:
            executor.submit(lambda: 1).result()
        except Exception as error:
            return type(error), str(error)
context = multiprocessing.get_context("fork")
outside = said(context, False)
with spangrad.rollout():
    assert said(context, True) == outside
    executor = ProcessPoolExecutor(1, mp_context=context)
    executor.shutdown()
    try:
        executor.submit(ask)
    except RuntimeError as error:
        assert "after shutdown" in str(error)
"""
    )


@pytest.mark.slow
def test_a_reward_and_a_rollout_of_its_own_in_a_forked_child_are_kept(
    run: Callable[..., list[Recorded]],
) -> None:
    spans = run(
        """
def child():
    spangrad.reward(0.5)
    ask("child")
    with spangrad.rollout(rollout_id="own", task_id="t-own"):
        ask("own")
with spangrad.rollout(rollout_id="parent", task_id="t-parent"):
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    )
    assert owners(spans) == {"child": "parent", "own": "own"}
    (rewarded,) = [span for span in spans if span.events]
    assert (rewarded[c.ROLLOUT_ID], rewarded.events[0][1][c.REWARD_VALUE]) == ("parent", 0.5)
    assert sorted(root[c.ROLLOUT_ID] for root in roots(spans)) == ["own", "parent"]


@pytest.mark.slow
def test_a_forked_child_that_returns_through_its_parents_code_does_not_end_its_parents_rollout(
    run: Callable[..., list[Recorded]],
) -> None:
    spans = run(
        """
with spangrad.rollout(rollout_id="r", task_id="t-r"):
    child = os.fork()
    if child == 0:
        ask("child")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    )
    assert owners(spans) == {"child": "r"}
    (root,) = roots(spans)
    assert not root.is_error


@pytest.mark.slow
def test_programs_belong_to_the_rollout_that_started_them(run: Callable[..., list[Recorded]]) -> None:
    child = (
        "import os, sys, httpx; messages = [{'role': 'user', 'content': sys.argv[2]}];"
        "httpx.post(sys.argv[1] + '/chat/completions', json={'model': 'policy', 'messages': messages})"
    )
    spans = run(
        f"""
child = {child!r}
command = [sys.executable, "-c", child, sys.argv[1]]
def work(name):
    subprocess.run([*command, "env " + name], env={{"PATH": os.environ["PATH"]}}, check=True)
    async def start():
        process = await asyncio.create_subprocess_exec(*command, "asyncio " + name)
        assert await process.wait() == 0
    asyncio.run(start())
    assert subprocess.run("echo $SPANGRAD_STORE", shell=True, capture_output=True).stdout.strip()
in_both(work)
subprocess.run([*command, "outside"], check=True)
assert "SPANGRAD_ROLLOUT" not in os.environ
"""
    )
    expected = {f"{kind} {name}": name for kind in ("env", "asyncio") for name in ("a", "b")}
    prompts = {call.prompt(): call.get(c.ROLLOUT_ID) for call in calls(spans)}
    assert prompts == expected
    root_ids = {root[c.ROLLOUT_ID]: (root.trace_id, root.span_id) for root in roots(spans)}
    for call in calls(spans):
        assert (call.trace_id, call.parent_id) == root_ids[call[c.ROLLOUT_ID]]


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    spangrad.shutdown()


def environment_of_child(**arguments: Any) -> dict[str, str]:
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    ended = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, **arguments)
    assert ended.stderr == ""
    return dict(json.loads(ended.stdout))


def test_a_child_gets_only_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    outside = environment_of_child()
    spangrad.init(store=tmp_path / "s")
    assert environment_of_child() == outside
    with spangrad.rollout(rollout_id="r & 1"):
        inside = environment_of_child()
        given = environment_of_child(env={"THEIRS": "1", "PYTHONPATH": "/theirs"})
        as_bytes = environment_of_child(env={b"PYTHONPATH": b"/theirs"})
    added = {name: value for name, value in inside.items() if outside.get(name) != value}
    assert set(added) == {"SPANGRAD_ROLLOUT", "SPANGRAD_STORE", "PYTHONPATH"}
    assert added["SPANGRAD_ROLLOUT"].startswith("r%20%26%201&attempt=0&traceparent=00-")
    assert (added["SPANGRAD_STORE"], added["PYTHONPATH"]) == (str(tmp_path / "s"), children.AUTOSTART)
    assert given["THEIRS"] == "1"
    assert given["PYTHONPATH"] == as_bytes["PYTHONPATH"] == f"{children.AUTOSTART}:/theirs"
    assert set(given) - {"LC_CTYPE"} == {"THEIRS", *added}


def test_the_key_goes_to_children_if_this_process_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    spangrad.init(store=tmp_path / "s", key="given")
    with spangrad.rollout():
        assert environment_of_child()["SPANGRAD_KEY"] == "given"
        assert environment_of_child(env={"SPANGRAD_KEY": "theirs"})["SPANGRAD_KEY"] == "theirs"
    spangrad.shutdown()
    monkeypatch.setenv("SPANGRAD_KEY", "inherited")
    spangrad.init(store=tmp_path / "s")
    with spangrad.rollout():
        assert environment_of_child(env={})["SPANGRAD_KEY"] == "inherited"


def test_what_this_process_was_told_of_recording_its_children_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    monkeypatch.setenv("SPANGRAD_REDACT", "secrets")
    spangrad.init(store=tmp_path / "s")
    with spangrad.rollout():
        assert environment_of_child(env={})["SPANGRAD_REDACT"] == "secrets"
        assert environment_of_child(env={"SPANGRAD_REDACT": "more"})["SPANGRAD_REDACT"] == "more"


@pytest.mark.parametrize(("redact", "told"), [(True, "1"), (False, "0"), ("emails", "emails")])
def test_children_redact_as_this_process_does(
    tmp_path: Path, clean: None, redact: bool | str, told: str
) -> None:
    spangrad.init(store=tmp_path / "s")
    spangrad.init(redact=redact)
    with spangrad.rollout():
        assert environment_of_child(env={})["SPANGRAD_REDACT"] == told


def test_children_that_cannot_be_given_the_rule_are_not_recorded(tmp_path: Path, clean: None) -> None:
    spangrad.init(store=tmp_path / "s", redact=lambda text: text.replace("Acme", "[customer]"))
    with spangrad.rollout():
        assert ENVIRONMENT not in environment_of_child(env={})


def test_a_rollout_that_the_caller_names_for_a_child_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    spangrad.init(store=tmp_path / "s")
    with spangrad.rollout(rollout_id="mine"):
        theirs = {"SPANGRAD_ROLLOUT": "theirs", "SPANGRAD_STORE": "/theirs"}
        assert {k: v for k, v in environment_of_child(env=theirs).items() if k != "LC_CTYPE"} == theirs
    monkeypatch.setenv(ENVIRONMENT, "process&attempt=1")
    with spangrad.rollout(rollout_id="mine"):
        copied = environment_of_child(env=dict(os.environ))
    assert copied[ENVIRONMENT].startswith("mine&")
    assert environment_of_child(env={})[ENVIRONMENT] == "process&attempt=1"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_programs_that_an_event_loop_starts_get_it_too(tmp_path: Path, clean: None, loop: str) -> None:
    code = "import os; print(os.environ.get('SPANGRAD_ROLLOUT', 'none').partition('&')[0])"

    async def agent(name: str, barrier: asyncio.Barrier) -> list[str]:
        async with spangrad.rollout(rollout_id=name):
            await barrier.wait()
            program = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", code, stdout=subprocess.PIPE
            )
            shell = await asyncio.create_subprocess_shell(
                f'{shlex.quote(sys.executable)} -S -c "{code}"', env={}, stdout=subprocess.PIPE
            )
            return [(await child.communicate())[0].decode().strip() for child in (program, shell)]

    async def both() -> list[list[str]]:
        barrier = asyncio.Barrier(2)
        return list(await asyncio.gather(agent("a", barrier), agent("b", barrier)))

    spangrad.init(store=tmp_path / "s")
    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(both()) == [["a", "a"], ["b", "b"]]


def test_children_are_left_alone_if_that_is_asked_for(tmp_path: Path, clean: None) -> None:
    before = environment_of_child()
    spangrad.init(store=tmp_path / "s", record_children=False)
    with spangrad.rollout():
        assert environment_of_child() == before


def test_arguments_of_popen_pass_unchanged(tmp_path: Path, clean: None) -> None:
    spangrad.init(store=tmp_path / "s")

    class Theirs(subprocess.Popen):  # type: ignore[type-arg]
        pass

    with spangrad.rollout():
        echo = [sys.executable, "-c", "import os; print(os.environ['X'])"]
        with Theirs(
            echo, -1, None, None, subprocess.PIPE, None, None, True, False, None, {"X": "7"}
        ) as child:
            assert child.communicate()[0] == b"7\n"
        with pytest.raises(FileNotFoundError):
            subprocess.Popen(["no-such-command-here"])
        with pytest.raises(TypeError):
            subprocess.Popen()  # type: ignore[call-overload]
        with pytest.raises(AttributeError, match="'list' object has no attribute 'items'"):
            subprocess.Popen(echo, env=[1])  # type: ignore[call-overload]


def test_a_child_that_can_not_record_says_nothing_unless_the_launcher_started_it(tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({children.AUTOSTART + '/sitecustomize.py'!r})"
    command = [sys.executable, "-S", "-c", code]
    for rollout, is_said in (("r&attempt=0", True), (f"r&attempt=0&{children.QUIET}", False)):
        environment = {ENVIRONMENT: rollout}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert ("is not recorded" in ended.stderr) is is_said


@pytest.mark.slow
def test_a_settings_object_that_can_not_be_pickled_starts_processes_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from spangrad.tracer import following

    spangrad.init(store=tmp_path / "s")
    following.install({"store": str(tmp_path / "s"), "redact": lambda text: text})
    assert "are not recorded" in caplog.text
    with spangrad.rollout():
        process = multiprocessing.get_context("spawn").Process(target=os.getpid)
        process.start()
        process.join()
        assert process.exitcode == 0
    spangrad.shutdown()


def test_only_tasks_that_came_from_another_process_wait_for_the_hub(hub: HubServer) -> None:
    hub.hold = threading.Event()
    spangrad.init(store=hub.url)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        with spangrad.step("on its way to the hub, which hangs"):
            pass
        start = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(abs, -1).result()
        there.send(time.monotonic() - start)

    with spangrad.rollout():
        process = context.Process(target=child)
        process.start()
        took_s = here.recv()
    hub.hold.set()
    process.join()
    assert took_s < 0.4  # such a task waits for 0.5 s
