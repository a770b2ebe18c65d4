"""The work that `make bench` times, each beside what it is held against."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import openai
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from transformers.utils.logging import disable_progress_bar

import spangrad
from spangrad.adapters import build_tree, calls_from_spans
from spangrad.credit import Transition, transitions
from spangrad.store.encoding import encode_json
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import decode_request
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import load_model
from spangrad.trainer.learning.packing import pack, trimmed_length
from tests.bench.pairs import Pair, paired
from tests.store.bench_store import requests, timed
from tests.store.building import conversation, new_trace
from tests.tracer.recording import calls, spans_of_store
from tests.trainer.small_policy import make_model, make_row

SERVE = """import sys
from tests.tracer.stub_server import model_server
with model_server() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def _model_process() -> Iterator[str]:
    """The stub of a model in a process of its own: its CPU time is not the client's."""
    command, pipe = [sys.executable, "-c", SERVE], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        with process.stdin:
            yield process.stdout.readline().strip()


def _requests() -> dict[str, dict[str, Any]]:
    """Arguments of a small call, and of one late in an agent's run: 40 messages and 8 tools, 45 kB."""
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10)}}
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": parameters}} for i in range(8)]
    turn = [{"role": "user", "content": "rows? " * 150}, {"role": "assistant", "content": "SELECT " * 150}]
    small = {"messages": [{"role": "user", "content": "Hello there"}]}
    return {"small": small, "agent-sized": {"messages": turn * 20, "tools": tools}}


def _cpu_of_calls(url: str, request: dict[str, Any], count: int) -> tuple[float, float]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        client.chat.completions.create(model="policy", **request)
        thread, process = time.thread_time(), time.process_time()
        for _ in range(count):
            client.chat.completions.create(model="policy", **request)
        thread = time.thread_time() - thread
        spangrad.flush()
        return thread / count, (time.process_time() - process) / count


def bench_tracer(*, count: int = 30, blocks: int = 8) -> list[Pair]:
    """CPU time of a chat call of the OpenAI SDK, recorded and not; the process's includes the flush."""
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder, _model_process() as url:
        store = Path(folder) / "store.duckdb"

        def captured(request: dict[str, Any]) -> tuple[float, float]:
            spangrad.init(store=store)
            found = _cpu_of_calls(url, request, count)
            spangrad.shutdown()
            return found

        for size, request in _requests().items():
            names = [f"tracer: {size} call, CPU of {whose}" for whose in ("its thread", "the process")]
            plain = partial(_cpu_of_calls, url, request, count)
            pairs += paired(names, ("ms", partial(captured, request)), ("capture off", plain), blocks)
            recorded, expected = len(calls(spans_of_store(store))), (blocks + 1) * (count + 1)
            if recorded != expected:
                raise SystemExit(f"{recorded} of {expected} calls were recorded; is OTEL_SDK_DISABLED set?")
    return pairs


def bench_store(*, rollouts: int = 25, blocks: int = 5) -> list[Pair]:
    """Batches of 100 spans with ids and messages, against inserting their ids and attributes as they are."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FileStore(Path(folder) / "store.duckdb") as store,
        duckdb.connect(str(Path(folder) / "plain.duckdb")) as plain,
    ):
        plain.execute("CREATE TABLE spans (trace_id VARCHAR, span_id VARCHAR, attributes VARCHAR)")

        def through_the_store() -> tuple[float]:
            bodies = requests(rollouts, 100)
            return (timed(lambda: [store.put_otlp(body) for body in bodies]) / (rollouts * 12),)

        def as_they_are() -> tuple[float]:
            batches = [_raw_rows(body) for body in requests(rollouts, 100)]
            insert = "INSERT INTO spans SELECT * FROM new_rows"
            seconds = timed(lambda: [plain.register("new_rows", rows).execute(insert) for rows in batches])
            return (seconds / (rollouts * 12),)

        name = "store: put_otlp, 100 spans a batch"
        return paired([name], ("spans/s", through_the_store), ("plain Arrow INSERT", as_they_are), blocks)


def _raw_rows(body: bytes) -> Any:
    spans, _ = decode_request(body)
    rows = zip(*((s.trace_id, s.span_id, encode_json(s.attributes)) for s in spans), strict=True)
    return pa.table([list(column) for column in rows], names=["trace_id", "span_id", "attributes"])


def bench_credit(*, blocks: int = 5) -> list[Pair]:
    """Cost of a call in rollouts of 100 and of 10 calls.

    The short rollouts are the middle of long ones, so the prompts are equally long: a ratio near 1 says
    that cost grows with calls and tokens, and with nothing else.
    """
    long, short = [_rollout("long")], [_rollout(f"short-{i}")[45:55] for i in range(10)]
    pairs: list[Pair] = []
    for name, cost in (("adapters: calls_from_spans", _read), ("credit: build_tree + transitions", _rows)):
        measured, baseline = ("µs", partial(cost, long)), ("10 calls a rollout", partial(cost, short))
        pairs += paired([f"{name}, 100 calls a rollout"], measured, baseline, blocks)
    return pairs


def _read(rollouts: Sequence[Sequence[Span]]) -> tuple[float]:
    return (timed(lambda: [calls_from_spans(spans) for spans in rollouts]) / sum(map(len, rollouts)),)


def _rows(rollouts: Sequence[Sequence[Span]]) -> tuple[float]:
    given = [calls_from_spans(spans) for spans in rollouts]
    made: list[list[Transition]] = []
    seconds = timed(lambda: made.extend(transitions(build_tree(one), None, group_id=None) for one in given))
    trained, expected = sum(len(row.segments) for rows in made for row in rows), sum(map(len, rollouts))
    if trained != expected:
        raise SystemExit(f"only {trained} of {expected} calls came into rows")
    return (seconds / expected,)


def _rollout(name: str) -> list[Span]:
    """A conversation of 100 calls, as the tracer writes it."""
    spans = conversation(new_trace(), name, 100)
    for span in spans:
        own: Any = span.attributes
        for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
            messages = json.loads(own[key])
            for message in messages:
                message["parts"] = [{"type": "text", "content": message.pop("content")}]
            own[key] = json.dumps(messages)
        own[c.LOGPROBS_MODE] = "processed"
    return [replace(span, scope=c.SCOPE_TRACER, kind=3) for span in spans]


def bench_learner(*, rows: int = 24, blocks: int = 3) -> list[Pair]:
    """One update on one thread, against the model's forward and backward pass alone over the same batches."""
    data = [make_row(seed, tokens=64 + 8 * seed) for seed in range(rows)]
    pairs: list[Pair] = []
    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(hidden=128, layers=4).save_pretrained(folder)
        model: Any = load_model(folder, device=torch.device("cpu"))
        for name, compared in (("no KL", 0), ("KL of every row", rows)):
            learner = Learner(LearnerConfig(model_path=folder, kl_monitor_rows=compared, lr=1e-6))
            update = partial(_seconds_per_token, learner.update, data)
            alone = partial(_seconds_per_token, partial(_pass, model), data)
            measured, baseline = ("tokens/s", update), ("forward + backward", alone)
            pairs += paired([f"learner: update, {name}"], measured, baseline, blocks)
    return pairs


def _seconds_per_token(work: Callable[[list[Transition]], object], rows: list[Transition]) -> tuple[float]:
    return (timed(lambda: work(rows)) / sum(trimmed_length(row) - 1 for row in rows),)


def _pass(model: Any, rows: Sequence[Transition]) -> None:
    for batch in pack(rows, max_tokens_per_batch=LearnerConfig().max_tokens_per_microbatch, pad_token_id=0):
        logits = model(input_ids=batch.input_ids_BT, use_cache=False).logits
        mask = batch.target_mask_BT
        torch.nn.functional.cross_entropy(logits[mask], batch.target_ids_BT[mask]).backward()
    model.zero_grad(set_to_none=True)


BENCHES = {"tracer": bench_tracer, "store": bench_store, "credit": bench_credit, "learner": bench_learner}
