"""Agent Lightning 0.3's store over HTTP: spans/s of the spans in a file. Runs in an environment of its own.

`python agl_store.py spans.jsonl BATCH`: starts `agl store`, sends the spans in batches, prints JSON.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("AGENTOPS_LOGGING_LEVEL", "ERROR")


def main() -> None:
    file, batch = sys.argv[1], int(sys.argv[2])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    agl = os.path.join(os.path.dirname(sys.executable), "agl")
    server = subprocess.Popen(
        [agl, "store", "--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(f"http://127.0.0.1:{port}/v1/agl/health")
        print(json.dumps(asyncio.run(_send(f"http://127.0.0.1:{port}", file, batch))))
    finally:
        server.terminate()


async def _send(url: str, file: str, batch: int) -> dict[str, float]:
    import agentlightning as agl  # type: ignore[import-not-found]
    from agentlightning.types import Span  # type: ignore[import-not-found]

    store = agl.LightningStoreClient(url)
    rollout = await store.start_rollout(input={})
    spans = []
    with open(file) as lines:
        for number, line in enumerate(lines):
            told = json.loads(line)
            spans.append(
                Span.from_attributes(
                    attributes=told["attributes"],
                    rollout_id=rollout.rollout_id,
                    attempt_id=rollout.attempt.attempt_id,
                    sequence_id=number + 1,
                    name="openai.chat.completion",
                    trace_id=told["trace_id"],
                    span_id=told["span_id"],
                    start_time=time.time(),
                    end_time=time.time() + 0.01,
                )
            )
    started = time.perf_counter()
    for first in range(0, len(spans), batch):
        await store.add_many_spans(spans[first : first + batch])
    seconds = time.perf_counter() - started
    await store.close()
    return {"spans_per_s": len(spans) / seconds}


def _wait(url: str) -> None:
    deadline = time.time() + 90
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            if time.time() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    main()
