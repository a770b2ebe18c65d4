"""`spangrad export --workers`, beside the same export without."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import ray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from spangrad.adapters import ingest
from spangrad.adapters.datasets.selecting import ROLLOUTS_AT_ONCE
from spangrad.cli import app
from spangrad.errors import ConfigError, EmptyBatchError, StoreError
from spangrad.store import open_store
from spangrad.store.records import Reward, Rollout
from tests.command_line import listed
from tests.test_cli_export import KEY, MULTI_TURN, export, recorded
from tests.trainer.small_policy import make_tokenizer

pytestmark = pytest.mark.slow
TASKS, EACH = 22, 5
HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray starts with the first export that wants it."""
    yield
    ray.shutdown()


def on_a_day(rollout_id: str, number: int, reply: str, asked: str) -> bytes:
    """As `recorded`, on one of three days of 1970."""
    request = ExportTraceServiceRequest.FromString(recorded(rollout_id, number, reply, asked))
    for one in request.resource_spans[0].scope_spans[0].spans:
        one.start_time_unix_nano += number % 3 * DAY_NS + HOUR_NS
        one.end_time_unix_nano += number % 3 * DAY_NS + HOUR_NS
    return bytes(request.SerializeToString())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tasks of five recorded rollouts, archived; a group of a run, which is not; and what can't go out."""
    path = str(tmp_path_factory.mktemp("bulk") / "store.duckdb")
    with open_store(path) as opened:
        for number in range(TASKS * EACH):
            rollout_id, task = f"r-{number:03}", number % TASKS
            reply = f"use {KEY}" if number == 7 else f"reply {number}"
            opened.put_otlp(on_a_day(rollout_id, number + 1, reply, f"question {task}"))
            if number != 11:
                opened.put_rewards([Reward(rollout_id, float(number % 7) / 7)])
    (moved,) = listed("archive", "--before", "30d", "--store", path, "--json")
    assert (moved["spans"], moved["days"]) == (2 * TASKS * EACH, 3)
    with open_store(path) as opened:
        for number in range(3):
            rollout_id = f"live-{number}"
            opened.enqueue([Rollout(rollout_id, task_id="t", group_id="g", run_id="run")])
            (claimed,) = opened.claim(worker="w")
            opened.put_otlp(recorded(rollout_id, 9000 + number, f"live {number}", "live question"))
            opened.finish(rollout_id, claimed.attempt)
            opened.put_rewards([Reward(rollout_id, float(number))])
        opened.enqueue([Rollout("queued", task_id="t", group_id="g", run_id="run")])
    return path


BASELINE = """
[run]
id = "r"
[agent]
function = "a.py:run"
tasks = "t.jsonl"
reward = "a.py:reward"
[credit]
episode = "running_baseline"
baseline_key = "all"
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--heldout", "0.3", "--min-reward", "0.2", "--per-task", "3"),
        ("--clone", "--keep-secrets"),
        ("--config", "baseline.toml"),
    ],
    ids=["plain", "chosen", "cloning", "running baseline"],
)
def test_files_and_card_are_those_of_one_process(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("baseline.toml").write_text(BASELINE)
    card = export(tmp_path / "one", "transitions", store, *options)
    assert export(tmp_path / "two", "transitions", store, *options, "--workers", "2") == card
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert card["rollouts_seen"] > ROLLOUTS_AT_ONCE, "of several parts"
    if not options:
        rows = pq.read_table(tmp_path / "two" / "train.parquet").to_pylist()
        assert len(rows) == TASKS * EACH - 2 + 3  # without that of the key, and that without a reward
        assert card["refused"]["rows"] and card["secrets_found"]
        assert any(advantage for row in rows for advantage in row["advantages"])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_text_is_rendered_by_workers_as_by_one_process(tmp_path: Path) -> None:
    path, tokenizer = str(tmp_path / "store.duckdb"), str(tmp_path / "tokenizer")
    make_tokenizer().save_pretrained(tokenizer)
    with open_store(path) as opened:
        ingest([MULTI_TURN], opened)
    options = ("--clone", "--tokenizer", tokenizer)
    card = export(tmp_path / "one", "transitions", path, *options)
    assert card["splits"]["train"]["grades"] == {"text": 4}
    export(tmp_path / "two", "transitions", path, *options, "--workers", "2")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_what_a_worker_raises_is_one_error_of_ours(store: str, tmp_path: Path) -> None:
    path = Path(shutil.copy(store, tmp_path / "store.duckdb"))
    archive = Path(shutil.copytree(f"{store}.archive", f"{path}.archive"))
    (file, *_) = sorted(archive.rglob("spans-*.parquet"))
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(StoreError, match="of the archive is damaged or cut short"):
        export(tmp_path / "out", "transitions", str(path), "--workers", "2")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["store.duckdb", "store.duckdb.archive"]


def test_nothing_to_write_is_said_as_ever(store: str, tmp_path: Path) -> None:
    with pytest.raises(EmptyBatchError, match="nothing can be exported as transitions"):
        export(tmp_path / "out", "transitions", store, "--min-reward", "9", "--workers", "2")


@pytest.mark.parametrize(
    ("form", "target", "says"),
    [
        ("messages", "store.duckdb", "--workers is for transitions only, not for messages"),
        ("transitions", "http://127.0.0.1:1", "is a hub, one process that has its file alone"),
    ],
)
def test_workers_that_could_do_nothing_are_refused(tmp_path: Path, form: str, target: str, says: str) -> None:
    order = ["export", str(tmp_path / "out"), "--format", form, "--store", target, "--workers", "2"]
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(app, order, catch_exceptions=False)
    assert not list(tmp_path.iterdir())
