"""`spangrad COMMAND`, in a process or in this one, and calls for it to show."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from typer.testing import CliRunner

from spangrad.cli import app
from spangrad.tracer import conventions as c

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


def listen_to_ctrl_c() -> None:
    """For a process before it starts: a shell's background jobs are deaf to it, and so is what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
