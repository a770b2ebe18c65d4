"""The command line: what it prints, how it ends, what it loads."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from spangrad.cli import app
from spangrad.errors import ConfigError
from spangrad.store import open_store
from spangrad.store.records import Rollout
from spangrad.trainer.processes import free_port
from tests.command_line import listed, recorded, spangrad
from tests.waiting import wait_until

MULTI_TURN = Path(__file__).parent / "adapters/fixtures/genai_openai/multi_turn.otlp.jsonl"

COMMANDS = (
    "run",
    "ingest",
    "score",
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


def test_ingest_names_what_it_can_not_read(tmp_path: Path) -> None:
    request = ExportTraceServiceRequest.FromString(recorded("r-1", 9))
    scope = request.resource_spans[0].scope_spans[0]
    scope.scope.name = "acme.tracing"
    kept = [pair for pair in scope.spans[0].attributes if pair.key == "gen_ai.operation.name"]
    del scope.spans[0].attributes[:]
    scope.spans[0].attributes.extend(kept)
    (tmp_path / "traces.pb").write_bytes(request.SerializeToString())
    done = spangrad("ingest", "traces.pb", "--store", "new.duckdb", cwd=tmp_path)
    assert done.returncode == 1
    assert "scope\tacme.tracing\t1" in done.stdout
    fault, line = done.stderr.splitlines()
    assert fault.startswith("model calls in an unknown dialect: 1 kept; span ")
    assert "of scope 'acme.tracing', with the attributes gen_ai.operation.name" in fault
    assert "no model call could be read from 1 spans" in line
    assert "acme.tracing (1); 1 of them are model calls" in line
    assert "openinference" in line
    said = spangrad("report", "--store", "new.duckdb", cwd=tmp_path).stdout
    assert "Model calls in an unknown dialect, which no count above has\ncalls\tscope\texample\n" in said
    assert "1\tacme.tracing\tspan 0000000000000009 of trace " in said


def test_ingest_of_scores_alone_fails_only_where_none_is_of_a_stored_trace(tmp_path: Path) -> None:
    told = {
        "trace_id": "ab" * 16,
        "observation_id": None,
        "name": "reward",
        "value": 1,
        "data_type": "NUMERIC",
    }
    (tmp_path / "scores.jsonl").write_text(json.dumps(told) + "\n")
    done = spangrad("ingest", "scores.jsonl", "--store", "new.duckdb", cwd=tmp_path)
    assert (done.returncode, "scores_left_out\tno such trace\t1" in done.stdout) == (1, True)
    assert done.stderr == (
        "none of 1 scores is stored: no such trace (1); ingest the traces that they are of, and then these"
        " scores again\n"
    )
    with open_store(tmp_path / "new.duckdb") as store:
        store.put_otlp(recorded("r-1", 9))
        [trace_id] = {span.trace_id for span in store.spans()}
    (tmp_path / "scores.jsonl").write_text(json.dumps(told | {"trace_id": trace_id}) + "\n")
    for new in (1, 0):  # once more: the same score again
        done = spangrad("ingest", "scores.jsonl", "--store", "new.duckdb", cwd=tmp_path)
        assert (done.returncode, done.stderr, f"new_rewards\t-\t{new}\n" in done.stdout) == (0, "", True)


def test_ingest_fails_only_if_every_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"resourceSpans": [\n{"a": 1}\n')
    done = spangrad("ingest", "broken.jsonl", "--store", "new.duckdb", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "nothing could be read from broken.jsonl: broken.jsonl:1: " in line
    (tmp_path / "good.pb").write_bytes(recorded("r-1", 1))
    both = spangrad("ingest", "broken.jsonl", "good.pb", "--store", "new.duckdb", cwd=tmp_path)
    assert both.returncode == 0
    assert "cut short: 1 left out; broken.jsonl:1: " in both.stderr
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


def test_ingest_joins_by_the_rules_that_are_named(tmp_path: Path) -> None:
    target, traces = str(tmp_path / "new.duckdb"), str(MULTI_TURN)
    for options, joined in (
        (["--no-join"], {}),
        (["--join", "conversation, response"], {}),
        (["--join", "prefix"], {"message prefix": 3}),
        ([], {"message prefix": 3}),
    ):
        (found,) = listed("ingest", traces, "--store", target, "--json", *options)
        assert found["joined_by"] == joined
        rollouts = listed("rollouts", "--store", target, "--json")
        assert len(rollouts) == (1 if joined else 4)
    wrong = spangrad("ingest", traces, "--store", target, "--join", "prefixes")
    assert wrong.returncode == 1
    (line,) = wrong.stderr.splitlines()
    assert "'prefixes' is no rule; did you mean 'prefix'?" in line
    assert "conversation, prefix, response, tool-call" in line
    both = spangrad("ingest", traces, "--store", target, "--join", "prefix", "--no-join")
    assert (both.returncode, len(both.stderr.splitlines())) == (1, 1)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "model folder 'no-such-model' does not exist"),
        (["--engine", "ftp://host"], "'ftp://host'; expected http://host:port"),
        (["--engine", "http://127.0.0.1:9", "--store", "."], "is a folder; a store is one file"),
        (["--engine", "http://127.0.0.1:9", "--hub-port", "7", "--gateway-port", "7"], "port 7, both"),
    ],
)
def test_up_writes_and_starts_nothing_if_something_can_not_be(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    ports = ("--hub-port", str(free_port()), "--gateway-port", str(free_port()))
    done = spangrad("up", *ports, *arguments, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


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
    assert row["error"] == "exit code 3"


@pytest.mark.slow
def test_a_run_that_is_recorded_into_another_ones_rollout_says_so(tmp_path: Path) -> None:
    command = ("run", "--rollout", "r-1", "--", sys.executable, "-c", "pass")
    first, second = spangrad(*command, cwd=tmp_path), spangrad(*command, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert second.returncode == 0
    (line,) = second.stderr.splitlines()
    assert "rollout 'r-1' is in .spangrad/store.duckdb already, and this run is recorded into" in line


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
