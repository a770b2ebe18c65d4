"""What SDKs and Collectors send to a real `spangrad hub` is counted and exported as if it was ingested."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from spangrad.store.client import HubClient
from spangrad.store.keys import Keys
from spangrad.store.otlp import json_logs_to_protobuf, json_to_protobuf
from tests.adapters.captured import FIXTURES
from tests.command_line import listed, spangrad
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

COLLECTOR = FIXTURES / "exports" / "otel_collector"
README = Path(__file__).parents[1] / "store" / "README.md"
Send = Callable[[str, bytes], httpx.Response]


class Hub:
    """`spangrad hub` on a new store, which reads traces as soon as they are there."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.store, self.keys_file = folder / "store.duckdb", folder / "keys.json"
        command = [sys.executable, "-m", "spangrad", "hub", "--store", str(self.store), "--port", "0"]
        command += ["--keys", str(self.keys_file), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        said = iter(self.process.stderr.readline, "")
        found = next(filter(None, (re.search(r"hub at (http://\S+),", line) for line in said)))
        self.url, self.keys = found[1], Keys.load(self.keys_file)

    def send(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        given = {"authorization": f"Bearer {self.keys.agent}", "content-type": "application/x-protobuf"}
        answer = httpx.post(f"{self.url}{path}", content=body, headers={**given, **headers})
        assert answer.status_code == 200, answer.text
        return answer

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    running = Hub(tmp_path, "--read-after", "0")
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def lines(*names: str) -> Iterator[tuple[str, bytes]]:
    """Path and JSON of each line that a Collector's file exporter wrote."""
    for name in names:
        for line in (COLLECTOR / f"{name}.jsonl").read_bytes().splitlines():
            yield ("/v1/logs" if b'"resourceLogs"' in line else "/v1/traces"), line


def counted(hub: Hub) -> dict[str, Any]:
    (found,) = listed("report", "--store", hub.url, "--key", hub.keys.trainer, "--json")
    return found


@pytest.mark.parametrize("form", ["protobuf", "gzip", "deflate", "json"])
def test_what_a_collector_sends_is_in_the_report_and_in_an_export(
    hub: Hub, tmp_path: Path, form: str
) -> None:
    for path, line in lines("traces", "evaluation_results.logs"):
        body = (json_to_protobuf if path == "/v1/traces" else json_logs_to_protobuf)(line)
        if form == "json":
            hub.send(path, line, **{"content-type": "application/json"})
        elif form == "protobuf":
            hub.send(path, body)
        else:
            packed = gzip.compress(body) if form == "gzip" else zlib.compress(body)
            hub.send(path, packed, **{"content-encoding": form})
    wait_until(lambda: counted(hub)["unread_traces"] == 0)
    found = counted(hub)
    assert found["rollouts"] > 0
    assert found["calls"] > 0
    with HubClient(hub.url, hub.keys.trainer) as client:
        judged = {reward.rollout_id for reward in client.rewards()}
        assert len(client.rewards()) == 2
        assert judged <= {rollout.rollout_id for rollout in client.rollouts()}
    written = (
        "export",
        str(tmp_path / "out"),
        "-f",
        "messages",
        "--store",
        hub.url,
        "--key",
        hub.keys.trainer,
    )
    assert listed(*written, "--json")[0]["splits"]["train"]["rollouts"] > 0


def test_a_report_says_what_is_not_read_yet_and_a_hub_that_ends_reads_it(tmp_path: Path) -> None:
    hub = Hub(tmp_path, "--read-after", "3600")
    for path, line in lines("traces"):
        hub.send(path, line, **{"content-type": "application/json"})
    waiting = counted(hub)
    assert waiting["calls"] == 0
    assert waiting["unread_traces"] > 0
    said = spangrad("report", "--store", hub.url, "--key", hub.keys.trainer).stderr
    assert f"{waiting['unread_traces']} traces got spans that are not counted yet" in said
    assert hub.stop() == 0
    (found,) = listed("report", "--store", str(hub.store), "--json")
    assert (found["unread_traces"], found["calls"] > 0) == (0, True)


def test_what_a_killed_hub_left_is_read_by_the_next_command(tmp_path: Path) -> None:
    hub = Hub(tmp_path, "--read-after", "3600")
    for path, line in lines("traces"):
        hub.send(path, line, **{"content-type": "application/json"})
    hub.process.kill()
    hub.process.communicate()
    (found,) = listed("report", "--store", str(hub.store), "--json")
    assert (found["unread_traces"], found["calls"] > 0) == (0, True)
    assert listed("rollouts", "--store", str(hub.store), "--json")


_SDK = """
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
import json, sys
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(compression=Compression(sys.argv[1]))))
tracer = provider.get_tracer("opentelemetry.util.genai.handler")
with tracer.start_as_current_span("chat m") as span:
    said = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    reply = [{"role": "assistant", "parts": [{"type": "text", "content": "hello"}], "finish_reason": "stop"}]
    span.set_attributes({
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps(said), "gen_ai.output.messages": json.dumps(reply),
        "gen_ai.response.finish_reasons": ["stop"],
    })
provider.shutdown()
"""


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
def test_an_sdk_sends_with_its_environment_alone(hub: Hub, compression: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the SDK's own exporter")
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": hub.url,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {hub.keys.agent}",
    }
    subprocess.run([sys.executable, "-c", _SDK, compression], env=environment, check=True)
    wait_until(lambda: counted(hub)["calls"] == 1)
    found = counted(hub)
    assert (found["rollouts"], found["grades"]) == (1, {"text": 1})


KNOWN = {
    "receivers": {"otlp"},
    "exporters": {"otlp_http", "file"},
    "otlp_http": {"endpoint", "headers", "compression", "timeout", "retry_on_failure", "sending_queue"},
    "file": {"path", "format", "rotation", "compression", "flush_interval", "append"},
    "retry_on_failure": {"enabled", "initial_interval", "max_interval", "max_elapsed_time", "multiplier"},
    "sending_queue": {
        "enabled",
        "num_consumers",
        "sizer",
        "queue_size",
        "storage",
        "batch",
        "block_on_overflow",
    },
    "batch": {"sizer", "flush_timeout", "min_size", "max_size"},
}
"""Keys that a Collector takes; it refuses to start for any other."""


def test_the_documented_collector_has_settings_that_exist_and_fit_the_hub() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    (text,) = re.findall(r"```yaml\n(receivers:.*?)```", README.read_text(), re.DOTALL)
    config = yaml.safe_load(text)
    assert set(config) == {"receivers", "exporters", "service"}
    for name, settings in config["exporters"].items():
        kind = name.partition("/")[0]
        assert kind in KNOWN["exporters"]
        assert set(settings) <= KNOWN[kind]
        for part in ("retry_on_failure", "sending_queue"):
            assert set(settings.get(part, ())) <= KNOWN[part]
    hub = config["exporters"]["otlp_http/spangrad"]
    batch = hub["sending_queue"]["batch"]
    assert set(batch) <= KNOWN["batch"]
    assert hub["endpoint"].endswith(":4318")
    assert batch["min_size"] < batch["max_size"] <= 64 * 2**20
    assert batch["max_size"] < hub["sending_queue"]["queue_size"]
    for pipeline in config["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= set(config["receivers"])
        assert set(pipeline["exporters"]) <= set(config["exporters"])
    assert json.dumps(config)
