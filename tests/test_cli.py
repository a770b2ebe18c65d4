"""The command line: what it prints, how it ends, what it loads."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from typer.testing import CliRunner

from spangrad.cli import app
from spangrad.errors import ConfigError
from spangrad.store import open_store
from spangrad.store.records import Reward, Rollout
from spangrad.tracer import conventions as c
from spangrad.trainer.processes import free_port
from tests.waiting import wait_until

COMMANDS = (
    "run",
    "ingest",
    "rollouts",
    "calls",
    "transitions",
    "hub",
    "gateway",
    "serve",
    "up",
    "train",
    "demo",
    "doctor",
)
PROMPT = [1, 2, 3, 4]
SAMPLED = [5, 6, 7]


def spangrad(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPANGRAD_")}
    return subprocess.run(
        [sys.executable, "-m", "spangrad", *arguments],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "100", **(env or {})},
        cwd=cwd,
    )


def listed(*arguments: str) -> list[dict[str, Any]]:
    """JSON lines of a command, run in this process."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def recorded(rollout_id: str | None, number: int, *, ids: bool = True) -> bytes:
    """One call as the gateway records it; without `ids`, as text alone."""
    attributes: dict[str, Any] = {
        c.OPERATION_NAME: "chat",
        c.PROVIDER_NAME: "vllm",
        c.REQUEST_MODEL: "policy",
        c.REQUEST_TEMPERATURE: 1.0,
        c.ATTEMPT: 0,
        c.INPUT_MESSAGES: json.dumps([{"role": "user", "parts": [{"type": "text", "content": "2 + 2?"}]}]),
        c.OUTPUT_MESSAGES: json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "stop"}]
        ),
        c.PROMPT_TOKEN_IDS: c.pack_ints(PROMPT),
        c.SAMPLED_TOKEN_IDS: c.pack_ints(SAMPLED),
        c.SAMPLED_LOGPROBS: c.pack_floats([-0.5, -0.25, -0.125]),
        c.POLICY_VERSIONS: c.pack_ints([0, 0, 0]),
        c.LOGPROBS_MODE: "processed",
    }
    if rollout_id is not None:
        attributes[c.ROLLOUT_ID] = rollout_id
    if not ids:
        for name in (c.PROMPT_TOKEN_IDS, c.SAMPLED_TOKEN_IDS, c.SAMPLED_LOGPROBS, c.POLICY_VERSIONS):
            del attributes[name]
    span = OtlpSpan(
        trace_id=number.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        name="chat policy",
        kind=OtlpSpan.SPAN_KIND_SERVER,
        start_time_unix_nano=number * 10**9,
        end_time_unix_nano=(number + 1) * 10**9,
        attributes=[KeyValue(key=key, value=_value(value)) for key, value in attributes.items()],
    )
    span.attributes.append(_finish_reasons())
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = c.SCOPE_GATEWAY
    scope.spans.append(span)
    return bytes(request.SerializeToString())


def _finish_reasons() -> KeyValue:
    attribute = KeyValue(key=c.RESPONSE_FINISH_REASONS)
    attribute.value.array_value.values.add().string_value = "stop"
    return attribute


def _value(value: Any) -> AnyValue:
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(string_value=value)


def ingested(folder: Path, request: bytes) -> str:
    """A store with one ingested file."""
    (folder / "traces.pb").write_bytes(request)
    target = str(folder / "new.duckdb")
    listed("ingest", str(folder / "traces.pb"), "--store", target, "--json")
    return target


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two finished rollouts of one task, rewarded 1 and 0."""
    path = str(tmp_path_factory.mktemp("store") / "store.duckdb")
    opened = open_store(path)
    ids = ("r-1", "r-2")
    opened.enqueue([Rollout(rollout_id, task_id="sum", group_id="g", run_id="run-a") for rollout_id in ids])
    for number, rollout in enumerate(opened.claim(worker="w", limit=2), start=1):
        opened.put_otlp(recorded(rollout.rollout_id, number))
        opened.finish(rollout.rollout_id, rollout.attempt, output="4")
    opened.put_rewards([Reward("r-1", 1.0), Reward("r-2", 0.0)])
    opened.close()
    return path


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A hub with keys in a process of its own."""
    folder = tmp_path_factory.mktemp("hub")
    port = free_port()
    command = [sys.executable, "-m", "spangrad", "hub", "--store", str(folder / "hub.duckdb")]
    command += ["--port", str(port), "--keys", str(folder / "keys.json")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx.get(f"{url}/healthz").is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(answers)
        yield url, folder / "keys.json"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM), (folder / "log").read_text()


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from spangrad.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    print(sorted({'torch', 'ray', 'vllm', 'duckdb', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"
    assert not [command for command in COMMANDS if f" {command} " not in done.stdout]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert f"Example: spangrad {command}" in done.stdout


def test_version() -> None:
    assert spangrad("--version").stdout.startswith("spangrad 0.")


def test_wrong_command_line_is_2() -> None:
    assert spangrad("rollout").returncode == 2
    assert spangrad("rollouts", "--no-such-option").returncode == 2
    assert spangrad("run").returncode == 2


def test_an_error_is_one_line_and_1(tmp_path: Path) -> None:
    done = spangrad("rollouts", "--store", "nowhere.duckdb", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("spangrad: there is no store at 'nowhere.duckdb'")
    assert list(tmp_path.iterdir()) == []  # a command that reads makes no file


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = spangrad("--debug", "rollouts", "--store", "nowhere.duckdb", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("spangrad.errors.StoreError: there is no store")


def test_a_missing_extra_is_one_line_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'ray' else find(name, package)\n"
    )
    done = spangrad("train", "run.toml", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("spangrad: `spangrad train` needs ray, which is not installed")
    assert "pip install 'spangrad[train]'" in line


def test_train_names_the_nearest_key(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[run]\nid = 'a'\nupdatez = 3\n[agent]\nfunction='f'\ntasks='t'\nreward='r'\n"
    )
    done = spangrad("train", "run.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert "unknown key 'updatez'; did you mean 'updates'?" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_rollouts_as_json_lines(store: str) -> None:
    first, second = listed("rollouts", "--store", store, "--json")
    assert first["rollout"] == "r-1"
    assert first["task"] == "sum"
    assert first["status"] == "succeeded"
    assert (first["reward"], second["reward"]) == (1.0, 0.0)
    assert first["calls"] == 1
    assert first["trained_by_update"] is None


def test_a_listing_into_a_pipe_is_plain_tab_separated(store: str) -> None:
    done = spangrad("rollouts", env={"SPANGRAD_STORE": store})
    head, first, _ = done.stdout.splitlines()
    assert head.split("\t")[:3] == ["rollout", "task", "status"]
    assert first.split("\t")[:7] == ["r-1", "sum", "succeeded", "0", "1", "1", "-"]


def test_rollouts_answer_sql(store: str) -> None:
    rows = listed("rollouts", "--store", store, "--json", "--sql", "SELECT count(*) AS n FROM rollouts")
    assert rows == [{"n": 2}]
    done = spangrad("rollouts", "--store", store, "--sql", "DROP TABLE rollouts")
    assert done.returncode == 1
    assert done.stderr.startswith("spangrad: ")


def test_calls_show_the_engines_ids_and_the_grade(store: str) -> None:
    (call,) = listed("calls", "--store", store, "--rollout", "r-1", "--json")
    assert call["grade"] == "exact", call["grade_reasons"]
    assert call["prompt_token_ids"] == PROMPT
    assert call["sampled_token_ids"] == SAMPLED


def test_transitions_mask_exactly_the_sampled_ids(store: str) -> None:
    (row,) = listed("transitions", "--store", store, "--rollout", "r-1", "--json")
    assert row["token_ids"] == PROMPT + SAMPLED
    assert [i for i, m in zip(row["token_ids"], row["action_mask"], strict=True) if m] == SAMPLED
    (segment,) = row["segments"]
    assert (segment["start"], segment["stop"]) == (4, 7)
    # Compared with the whole group, though only one member was asked for: 1 beats 0.
    assert all(value > 0 for value in row["advantages"][4:])
    assert row["advantages"][:4] == [None] * 4
    assert row["loss_weight"] > 0


def test_listing_no_such_rollout(store: str) -> None:
    assert spangrad("calls", "--store", store, "--rollout", "r-9", "--json").stdout == ""
    done = spangrad("transitions", "--store", store, "--rollout", "r-9")
    assert done.returncode == 1
    assert "spangrad rollouts" in done.stderr


def test_calls_show_the_newest_and_say_how_many_are_left_out(store: str) -> None:
    done = spangrad("calls", "--store", store, "--limit", "1", "--json")
    (call,) = map(json.loads, done.stdout.splitlines())
    assert call["rollout_id"] == "r-2"
    assert done.stderr.splitlines() == ["the newest 1 of 2 calls, 1 left out; --limit 0 lists all"]
    assert len(listed("calls", "--store", store, "--limit", "0", "--json")) == 2


def test_calls_of_a_split(store: str) -> None:
    assert len(listed("calls", "--store", store, "--split", "train", "--json")) == 2
    assert listed("calls", "--store", store, "--split", "eval", "--json") == []
    assert len(listed("calls", "--store", store, "--run", "run-a", "--rollout", "r-1", "--json")) == 1


def test_calls_without_a_rollout_are_cloned_by_trace(tmp_path: Path) -> None:
    target = ingested(tmp_path, recorded(None, 7))
    refused = spangrad("transitions", "--store", target)
    assert refused.returncode == 1
    assert "1 model calls" in refused.stderr
    assert "`spangrad transitions --clone`" in refused.stderr
    (row,) = listed("transitions", "--store", target, "--clone", "--json")
    assert row["rollout_id"] == (7).to_bytes(16, "big").hex()
    assert row["token_ids"] == PROMPT + SAMPLED
    assert row["advantages"][4:] == [1.0] * 3


def test_calls_that_are_text_need_a_tokenizer_to_be_cloned(tmp_path: Path) -> None:
    from tests.trainer.small_policy import make_tokenizer

    target = ingested(tmp_path, recorded(None, 8, ids=False))
    done = spangrad("transitions", "--store", target, "--clone", "--json")
    assert (done.returncode, done.stdout) == (0, "")
    assert "not trained, 1x: grade text, ids is needed" in done.stderr
    assert "1 calls have no token ids, and only a tokenizer can make rows of them" in done.stderr
    make_tokenizer().save_pretrained(str(tmp_path / "policy"))
    rendered = ["--clone", "--tokenizer", str(tmp_path / "policy")]
    (row,) = listed("transitions", "--store", target, *rendered, "--json")
    assert row["grade"] == "text"
    assert 0 < sum(row["action_mask"]) < len(row["token_ids"])
    wrong = spangrad("transitions", "--store", target, "--clone", "--tokenizer", str(tmp_path / "no"))
    assert wrong.returncode == 1
    assert len(wrong.stderr.splitlines()) == 1
    assert spangrad("transitions", "--store", target, *rendered[1:]).returncode == 1


def test_ingest_names_what_it_can_not_read(tmp_path: Path) -> None:
    request = ExportTraceServiceRequest.FromString(recorded("r-1", 9))
    request.resource_spans[0].scope_spans[0].scope.name = "vllm.tracing"
    (tmp_path / "traces.pb").write_bytes(request.SerializeToString())
    done = spangrad("ingest", "traces.pb", "--store", "new.duckdb", cwd=tmp_path)
    assert done.returncode == 0
    assert "scope\tvllm.tracing\t1" in done.stdout
    (line,) = done.stderr.splitlines()
    assert "no model call could be read from 1 spans" in line
    assert "vllm.tracing (1); 1 of them are model calls" in line
    assert "1.37 and later" in line


def test_ingest_fails_only_if_every_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"resourceSpans": [\n{"a": 1}\n')
    done = spangrad("ingest", "broken.jsonl", "--store", "new.duckdb", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "nothing could be read from broken.jsonl: broken.jsonl:1: " in line
    (tmp_path / "good.pb").write_bytes(recorded("r-1", 1))
    both = spangrad("ingest", "broken.jsonl", "good.pb", "--store", "new.duckdb", cwd=tmp_path)
    assert both.returncode == 0
    assert "broken: broken.jsonl:1: " in both.stderr
    assert 'unknown: 1 rows in a format that is not read, kept out; broken.jsonl:2: {"a": 1}' in both.stderr


def test_ingest_says_what_the_calls_are_good_for(tmp_path: Path) -> None:
    file = tmp_path / "traces.pb"
    file.write_bytes(recorded("r-7", 7))
    target = str(tmp_path / "new.duckdb")
    (found,) = listed("ingest", str(file), "--store", target, "--json")
    assert (found["new_spans"], found["by_grade"]) == (1, {"exact": 1})
    again = spangrad("ingest", str(file), "--store", target)
    assert "new_spans\t-\t0" in again.stdout
    assert "grade\texact\t1" in again.stdout


@pytest.mark.slow
def test_hub_serves_with_keys_and_listings_read_through_it(hub: tuple[str, Path]) -> None:
    url, keys_file = hub
    keys = json.loads(keys_file.read_text())
    assert keys_file.stat().st_mode & 0o077 == 0
    opened = open_store(url, keys["trainer"])
    opened.enqueue([Rollout("r-hub", task_id="sum")])
    opened.put_otlp(recorded("r-hub", 3))
    opened.close()
    (row,) = listed("rollouts", "--store", url, "--key", keys["trainer"], "--json")
    assert (row["rollout"], row["status"], row["calls"]) == ("r-hub", "queued", 1)
    refused = spangrad("rollouts", "--store", url, "--key", "wrong")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_taken_port_is_one_line(hub: tuple[str, Path], tmp_path: Path) -> None:
    port = hub[0].rsplit(":", 1)[1]
    done = spangrad("hub", "--store", str(tmp_path / "other.duckdb"), "--port", port)
    assert done.returncode == 1
    assert port in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    gateway = spangrad("gateway", "--store", str(tmp_path / "other.duckdb"), "--port", port)
    assert gateway.returncode == 1
    assert port in gateway.stderr.splitlines()[-1]


def test_no_hub_is_one_line() -> None:
    done = spangrad("rollouts", "--store", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_run_ends_as_the_agent_does(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    done = spangrad("run", "--", sys.executable, "agent.py", "--json", "-x", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.strip() == "['--json', '-x']"
    store = tmp_path / ".spangrad" / "store.duckdb"
    (row,) = listed("rollouts", "--store", str(store), "--json")
    assert (row["status"], row["calls"], row["split"]) == ("failed", 0, "recorded")


def test_a_reader_that_has_enough_is_no_error(store: str) -> None:
    program = f"{sys.executable} -m spangrad calls --store {store} --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_doctor_prints_what_it_found() -> None:
    found = listed("doctor", "--json")
    assert {"area", "name", "state", "found", "fix"} == set(found[0])
    assert {"python", "duckdb", "store"} <= {line["name"] for line in found}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosted", "teacher"], "--hosted has an entry without a name or a value"),
        (["--hosted", "teacher={"], "no JSON object"),
        (["--hosted", "t=openai/a", "--hosted", "t=openai/b"], "names 't' twice"),
        (["--frozen", "=http://127.0.0.1:1"], "expected NAME=ADDRESS"),
        (["--engine", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:1/v1"], "twice"),
    ],
)
def test_models_that_a_gateway_can_not_serve_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["gateway", *arguments], catch_exceptions=False)
