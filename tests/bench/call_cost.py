"""CPU that recording adds to one chat call of the OpenAI SDK, as a program that prints one line of JSON.

    python tests/bench/call_cost.py TRACER KIND [--rounds N]

It imports nothing of this repository but spangrad, and that only for the tracers `spangrad` and
`spangrad-hub`: so it runs in an environment that has a peer's tracer instead.

Method: short blocks of calls with no tracer, with a hand-written OpenTelemetry span around each call, and
with TRACER take turns in one process; class methods that a tracer patched are swapped in and out. The
network is replaced below httpx. What is waiting in a tracer's queue is flushed within its own block, and
counts for the process; the first call after it is not counted for the thread, which finds its caches cold.
"""

import argparse
import importlib
import json
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import openai._base_client as base_client
from openai.resources.chat.completions import Completions
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

http: Any = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")

KINDS = ("small", "agent")
CALLS = 25
"""In a block, 0.06 s of an agent's: the tracer by itself looks into its queue every 0.2 s."""
PEERS = {
    "openinference": "openinference.instrumentation.openai",
    "genai": "opentelemetry.instrumentation.genai.openai",
    "openllmetry": "opentelemetry.instrumentation.openai",
}
PATCHED = (openai.OpenAI, base_client.SyncAPIClient, Completions, http.HTTPTransport)
Switch = Callable[[bool], object]
Flush = Callable[[], object]


def requests() -> dict[str, dict[str, Any]]:
    """Arguments of a small call, and of an agent's: 12 messages of 6 kB and 3 tools."""
    small = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the time?"}]
    agent: list[dict[str, Any]] = [{"role": "system", "content": "You plan journeys with the tools. " * 12}]
    agent.append({"role": "user", "content": "Plan a weekend in Lyon for two. " * 6})
    for turn in range(5):
        function = {"name": "search", "arguments": json.dumps({"query": f"hotel {turn}", "limit": 3})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        agent.append({"role": "assistant", "content": "Let me look. " * 8, "tool_calls": [call]})
        agent.append(
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "A room for 80 euros. " * 40}
        )
    place = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": name, "description": "Looks up.", "parameters": place}}
        for name in ("search", "weather", "book")
    ]
    common = {"model": "stub-7b", "temperature": 0.7, "max_tokens": 256}
    return {"small": {**common, "messages": small}, "agent": {**common, "messages": agent, "tools": tools}}


def reply(tokens: int, prompt: int) -> bytes:
    """What vLLM answers: `tokens` tokens with their ids and logprobs, and the prompt's ids, if any."""
    words = [f" word{index}" for index in range(tokens)]
    content = [
        {"token": word, "logprob": -0.0625 * (index % 9), "bytes": list(word.encode()), "top_logprobs": []}
        for index, word in enumerate(words)
    ]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "".join(words)},
        "logprobs": {"content": content} if prompt else None,
        "token_ids": [1000 + 7 * index for index in range(tokens)] if prompt else None,
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "stub-7b", "usage": usage}
    ids = [(index * 7919) % 151_000 for index in range(prompt)]
    return json.dumps(body | {"choices": [choice], "prompt_token_ids": ids or None}).encode()


class Pool:
    """In the place of a transport's connection pool: every request is answered at once."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def handle_request(self, request: Any) -> Any:
        b"".join(request.stream)
        return _Answer(self.body)

    def close(self) -> None:
        pass


class _Answer:
    def __init__(self, body: bytes) -> None:
        length = str(len(body)).encode()
        self.status = 200
        self.headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        self.stream = [body]
        self.extensions: dict[str, Any] = {}


def client(pool: Pool) -> openai.OpenAI:
    """A client of the SDK whose calls end at `pool`."""
    transport = http.HTTPTransport(trust_env=False)
    transport._pool = pool
    return openai.OpenAI(
        api_key="none",
        base_url="http://127.0.0.1:9/v1",
        max_retries=0,
        http_client=http.Client(transport=transport),
    )


class Nowhere(SpanExporter):
    """Drops every span."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def provider() -> TracerProvider:
    """A provider as applications set it up, whose spans go nowhere."""
    made = TracerProvider()
    made.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=1 << 14))
    return made


def hand_written(call: Callable[[], Any]) -> tuple[Callable[[], Any], Flush]:
    """`call` in a span with 15 attributes."""
    spans = provider()
    tracer = spans.get_tracer("bench")

    def traced() -> None:
        with tracer.start_as_current_span("chat stub-7b") as span:
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "openai",
                    "gen_ai.request.model": "stub-7b",
                    "gen_ai.request.temperature": 0.7,
                    "gen_ai.request.max_tokens": 256,
                    "server.address": "stub",
                    "server.port": 80,
                    "session.id": "s1",
                }
            )
            answer = call()
            span.set_attributes(
                {
                    "gen_ai.response.id": answer.id,
                    "gen_ai.response.model": answer.model,
                    "gen_ai.response.finish_reasons": ("stop",),
                    "gen_ai.usage.input_tokens": 10,
                    "gen_ai.usage.output_tokens": 10,
                    "gen_ai.input.messages": "x" * 400,
                    "gen_ai.output.messages": "y" * 200,
                }
            )

    return traced, spans.force_flush


def set_up(tracer: str, stack: ExitStack) -> Flush:
    """Start `tracer`; returns how its queue is flushed."""
    if tracer == "none":
        return lambda: None
    if tracer in PEERS:
        os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
        os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"
        spans = provider()
        importlib.import_module(PEERS[tracer]).OpenAIInstrumentor().instrument(tracer_provider=spans)
        return spans.force_flush
    import spangrad

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    if tracer == "spangrad-hub":
        spangrad.init(store=stack.enter_context(discarding_hub()), spool_dir=folder)
    else:
        spangrad.init(store=os.path.join(folder, "store.duckdb"))
    stack.callback(spangrad.shutdown)
    stack.enter_context(spangrad.rollout(task_id="bench"))
    return spangrad.flush


@contextmanager
def discarding_hub() -> Iterator[str]:
    """A hub in a child process, whose CPU time is not this one's, that takes everything and keeps nothing."""

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    child = os.fork()
    if child == 0:
        server.serve_forever()
    server.socket.close()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def snapshot() -> dict[tuple[type, str], Any]:
    """Every method of the classes that tracers patch."""
    return {
        (owner, name): value for owner in PATCHED for name, value in vars(owner).items() if callable(value)
    }


def switch(before: dict[tuple[type, str], Any]) -> tuple[Switch, list[str]]:
    """A function that takes the patches made since `before` off and puts them on again, and their names."""
    after = snapshot()
    patched = [key for key in after if before.get(key) is not after[key]]

    def turn(on: bool) -> None:
        for owner, name in patched:
            value = (after if on else before).get((owner, name))
            if value is not None:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)

    return turn, [f"{owner.__name__}.{name}" for owner, name in patched]


def measure(tracer: str, kind: str, rounds: int) -> dict[str, Any]:
    """Seconds of CPU a call, of its thread and of the process: without a tracer, and what each adds."""
    before = snapshot()
    arguments = requests()[kind]
    chat = client(Pool(reply(24, 0) if kind == "small" else reply(96, 1200)))

    def plain() -> Any:
        return chat.chat.completions.create(**arguments)

    manual, flush_manual = hand_written(plain)
    with ExitStack() as stack:
        flush = set_up(tracer, stack)
        turn, patched = switch(before)
        if tracer != "none" and not patched:
            raise SystemExit(f"{tracer} patched none of {[owner.__name__ for owner in PATCHED]}")
        modes: dict[str, tuple[bool, Callable[[], Any], Flush]] = {
            "off": (False, plain, lambda: None),
            "span": (False, manual, flush_manual),
            "on": (True, plain, flush),
        }
        found: dict[str, list[Cost]] = {name: [] for name in modes}
        for number in range(-2, rounds):
            for name in modes if number % 2 else reversed(modes):
                on, call, flush_it = modes[name]
                turn(on)
                cost = _cost([call] * (CALLS + 1), flush_it)
                if number >= 0:
                    found[name].append(cost)
        turn(True)
    return {"tracer": tracer, "kind": kind, "patched": patched} | {
        whose: {
            "off": statistics.median(cost[position] for cost in found["off"]),
            "span": _added(found["span"], found["off"], position),
            "on": _added(found["on"], found["off"], position),
            "span, minima": _least(found["span"], position) - _least(found["off"], position),
            "on, minima": _least(found["on"], position) - _least(found["off"], position),
        }
        for position, whose in enumerate(("thread", "process"))
    }


def measure_long(tracer: str, rounds: int) -> dict[str, Any]:
    """Seconds of CPU of the process that recording adds to the first and to the last calls of a long agent.

    `reading` is what decoding the JSON of the last calls' requests and replies takes once.
    """
    before = snapshot()
    pool = Pool(b"")
    chat = client(pool)
    turns: list[dict[str, Any]] = [*requests()["agent"]["messages"][:2]]
    calls: list[tuple[bytes, dict[str, Any]]] = []
    for number in range(LONG):
        prompt = reply(96, 200 + 100 * number)
        calls.append((prompt, {**requests()["agent"], "messages": list(turns)}))
        turns.append({"role": "assistant", "content": f"Thought {number}. " * 12})
        turns.append({"role": "user", "content": f"What came of it, part {number}. " * 10})

    def made(body: bytes, arguments: dict[str, Any]) -> Callable[[], Any]:
        def call() -> Any:
            pool.body = body
            return chat.chat.completions.create(**arguments)

        return call

    work = [made(*call) for call in calls]
    last_calls = calls[LONG - 10 :]
    texts = [text for body, arguments in last_calls for text in (body, json.dumps(arguments).encode())]
    reads: list[float] = []
    with ExitStack() as stack:
        flush = set_up(tracer, stack)
        turn, _ = switch(before)
        found: dict[tuple[bool, str], list[Cost]] = {}
        for number in range(-1, rounds):
            for on in (True, False) if number % 2 else (False, True):
                turn(on)
                first = _cost(work[:10], flush)
                for call in work[LONG - 20 : LONG - 10]:  # what is repeated of them is known by now
                    call()
                flush()
                last = _cost(work[LONG - 10 :], flush)
                read = _cost([lambda: [json.loads(text) for text in texts]])
                if number >= 0:
                    reads.append(read[1] / len(last_calls))
                    found.setdefault((on, "first"), []).append(first)
                    found.setdefault((on, "last"), []).append(last)
        turn(True)
    return {
        "tracer": tracer,
        "kind": "long",
        "first": _added(found[True, "first"], found[False, "first"], 1),
        "last": _added(found[True, "last"], found[False, "last"], 1),
        "reading": statistics.median(reads),
        "bytes": len(texts[-1]) + len(texts[-2]),
    }


LONG = 200
"""Calls of a long agent."""
Cost = tuple[float, float]
"""Seconds of CPU a call: of its thread, of the process."""


def _cost(calls: Sequence[Callable[[], Any]], flush: Flush = lambda: None) -> Cost:
    """Its thread's without the first call, the process's with it and with flushing."""
    process = time.process_time()
    calls[0]()
    thread = time.thread_time()
    for call in calls[1:]:
        call()
    thread = time.thread_time() - thread
    flush()
    return thread / max(1, len(calls) - 1), (time.process_time() - process) / len(calls)


def _added(costs: Sequence[Cost], without: Sequence[Cost], position: int) -> float:
    """Median difference of blocks that ran one after the other."""
    return statistics.median(a[position] - b[position] for a, b in zip(costs, without, strict=True))


def _least(costs: Sequence[Cost], position: int) -> float:
    return min(cost[position] for cost in costs)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tracer", choices=["none", "spangrad", "spangrad-hub", *PEERS])
    parser.add_argument("kind", choices=[*KINDS, "long"])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.kind == "long":
        result = measure_long(options.tracer, options.rounds)
    else:
        result = measure(options.tracer, options.kind, options.rounds)
    print(json.dumps(result), flush=True)
    if threading.active_count() > 1:
        os._exit(0)  # some peers leave threads behind


if __name__ == "__main__":
    main()
