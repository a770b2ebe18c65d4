"""The figures of reading: spans of one rollout -> model calls -> their tree.

A rollout has a root span, and a turn a span of the agent with a model call, a tool and a reward in it.
`agl_triplets.py` and `agl_aggregator.py` build one of the same sizes for Agent Lightning's adapters.
"""

import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from spangrad.adapters import build_tree, calls_from_spans
from spangrad.store.records import Span, SpanEvent
from spangrad.tracer import conventions as c
from tests.bench.agent_spans import Source
from tests.bench.capture_benches import FOLDER
from tests.bench.figures import Figure

LIMITS = {50: 2.0, 1_000: 60.0}
"""Turns -> ms of CPU: what else the machine does is in no figure here."""
ROOT = "f" * 16


def turn_sizes(turns: int) -> tuple[int, int]:
    """Ids that a turn adds to the prompt and samples: 300 in all, but no more than 100,000 at the end."""
    total = min(300, 100_000 // turns)
    return total * 2 // 3, total // 3


def rollout(turns: int) -> list[Span]:
    """Spans of a rollout whose prompts grow turn by turn."""
    source = Source(turns)
    trace_id, text = source.hex(16), source.text(300)
    step, reply = turn_sizes(turns)
    messages = json.dumps([_message("system", text), _message("user", text)])
    output = json.dumps([_message("assistant", text) | {"finish_reason": "stop"}])
    ids = np.empty(0, np.int32)
    spans = [_span(trace_id, ROOT, None, 0, "agent.run", {c.SPAN_ROLE: "rollout", c.ROLLOUT_ID: "r"})]
    for turn in range(turns):
        prompt, sampled = np.concatenate([ids, source.ids(step)]), source.ids(reply)
        ids = np.concatenate([prompt, sampled])
        now, agent = 10 * turn + 1, source.hex(8)
        call = {
            c.OPERATION_NAME: "chat",
            c.PROVIDER_NAME: "vllm",
            c.REQUEST_MODEL: "m",
            c.RESPONSE_ID: f"chatcmpl-{turn}",
            c.RESPONSE_FINISH_REASONS: ["stop"],
            c.INPUT_MESSAGES: messages,
            c.OUTPUT_MESSAGES: output,
            c.LOGPROBS_MODE: "processed",
            c.PROMPT_TOKEN_IDS: prompt.astype("<i4").tobytes(),
            c.SAMPLED_TOKEN_IDS: sampled.astype("<i4").tobytes(),
            c.SAMPLED_LOGPROBS: source.logprobs(reply).astype("<f4").tobytes(),
            c.POLICY_VERSIONS: np.full(reply, 3, "<i4").tobytes(),
        }
        tool = {c.OPERATION_NAME: c.EXECUTE_TOOL, c.TOOL_NAME: "search", c.TOOL_RESULT: text}
        reward = SpanEvent(c.REWARD_EVENT, now + 3, {c.REWARD_NAME: "primary", c.REWARD_VALUE: 0.5})
        named = {c.OPERATION_NAME: c.INVOKE_AGENT, c.AGENT_NAME: "worker"}
        spans += [
            _span(trace_id, source.hex(8), agent, now + 1, "chat m", call),
            _span(trace_id, source.hex(8), agent, now + 2, "tool.search", tool),
            _span(trace_id, source.hex(8), agent, now + 3, "reward", {}, (reward,)),
            _span(trace_id, agent, ROOT, now, f"turn.{turn}", named),
        ]
    return spans


def nested(depth: int) -> list[Span]:
    """A call below so many spans of agents, each in the one before."""
    source = Source(depth)
    trace_id, spans, parent = source.hex(16), list[Span](), None
    for level in range(depth):
        own = source.hex(8)
        spans.append(_span(trace_id, own, parent, level, f"agent.{level}", {c.AGENT_NAME: f"agent {level}"}))
        parent = own
    (call,) = [span for span in rollout(1) if span.name == "chat m"]
    return [*spans, _span(trace_id, call.span_id, parent, depth, call.name, dict(call.attributes))]


def bench_trees(
    triplets_python: str | None = None, aggregator_python: str | None = None, *, blocks: int = 7
) -> list[Figure]:
    """Spans to CallTree, and the same rollout through both generations of Agent Lightning."""
    figures, least = [], {}
    for turns in (10, 50, 200, 1_000):
        spans = rollout(turns)
        took = _seconds(partial(_tree, spans, turns), max(blocks, 2_000 // turns))
        least[turns] = min(took)
        note = f"median {statistics.median(took) * 1e3:.2f} of {len(took)}; {len(spans)} spans"
        name = f"spans to CallTree, {turns} turns, prompts growing to {turns * sum(turn_sizes(turns)):,} ids"
        figures.append(Figure(name, min(took) * 1e3, "ms of CPU", at_most=LIMITS.get(turns), note=note))
    spans = nested(10_000)
    figures.append(
        Figure("a call 10,000 spans deep", min(_seconds(partial(_tree, spans, 1), 3)) * 1e3, "ms of CPU")
    )
    for name, limit, program, python in (
        ("Agent Lightning 0.3's triplet adapter", 50.0, "agl_triplets.py", triplets_python),
        ("Agent Lightning 1.0's aggregator", 10.0, "agl_aggregator.py", aggregator_python),
    ):
        title = f"1,000 turns, of {name}"
        if python is None:
            figures.append(Figure(title, None, "", at_least=limit, note="not installed"))
            continue
        theirs = _peer(python, program, 1_000)
        note = f"{theirs * 1e3:.0f} ms"
        figures.append(Figure(title, theirs / least[1_000], "times faster", at_least=limit, note=note))
        if program == "agl_aggregator.py":  # it begins with calls, and reads no span
            calls = calls_from_spans(rollout(1_000))
            alone = min(_seconds(partial(build_tree, calls), 5))
            name = f"{title}: calls to CallTree alone"
            figures.append(Figure(name, theirs / alone, "times faster", note=f"{alone * 1e3:.1f} ms"))
    return figures


def _tree(spans: Sequence[Span], expected: int) -> None:
    tree = build_tree(calls_from_spans(spans))
    if len(tree.nodes) != expected or tree.left_out:
        raise SystemExit(f"{len(tree.nodes)} of {expected} calls came into the tree")


def _seconds(work: Callable[[], object], blocks: int) -> list[float]:
    found = []
    for block in range(-1, blocks):
        gc.collect()
        started = time.process_time()
        work()
        if block >= 0:
            found.append(time.process_time() - started)
    return found


def _peer(python: str, program: str, turns: int) -> float:
    step, reply = turn_sizes(turns)
    command = [python, str(FOLDER / program), str(turns), str(step), str(reply)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} failed: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def _span(
    trace_id: str,
    span_id: str,
    parent: str | None,
    start: int,
    name: str,
    attributes: dict[str, Any],
    events: Sequence[SpanEvent] = (),
) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent,
        name=name,
        kind=3,
        start_ns=start * 10**8,
        end_ns=start * 10**8 + 10**7,
        status_code=0,
        status_message="",
        scope=c.SCOPE_TRACER,
        attributes=attributes,
        events=events,
        rollout_id="r",
        attempt=0,
    )
