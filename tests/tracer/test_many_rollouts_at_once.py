"""64 rollouts at once in one process, threads and asyncio mixed: each call is its own rollout's."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import AsyncOpenAI, OpenAI

import spangrad
from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls, roots
from tests.tracer.stub_server import ModelServer

THREADS = TASKS = 32


class Agents:
    """Agents that ask `rollout_id/n`, so that each call says whose it is."""

    def __init__(self, url: str) -> None:
        self.client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        self.all_open = threading.Barrier(THREADS + 1)
        self.shared: ThreadPoolExecutor

    def ask(self, prompt: str) -> str:
        reply = self.client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}]
        )
        return str(reply.choices[0].message.content)

    def in_thread(self, name: str) -> None:
        with spangrad.rollout(rollout_id=name):
            self.all_open.wait(120)
            self.ask(f"{name}/own")
            with ThreadPoolExecutor(2) as pool:
                said = list(pool.map(self.ask, [f"{name}/pool{n}" for n in range(2)]))
            assert said == [f"You said {name}/pool{n}." for n in range(2)]
            inner = threading.Thread(target=self.ask, args=(f"{name}/thread",))
            inner.start()
            inner.join()
            shared = self.shared.submit(self.ask, f"{name}/shared")
            assert shared.result() == f"You said {name}/shared."

    async def in_task(self, name: str, client: AsyncOpenAI, all_begun: asyncio.Barrier) -> None:
        async def ask(prompt: str) -> str:
            reply = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": prompt}]
            )
            return str(reply.choices[0].message.content)

        async def words() -> AsyncIterator[str]:
            yield await ask(f"{name}/generator0")
            yield await ask(f"{name}/generator1")
            yield await ask(f"{name}/never")

        async with spangrad.rollout(rollout_id=name):
            await all_begun.wait()
            await asyncio.gather(*(ask(f"{name}/gather{n}") for n in range(2)))
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.shared, self.ask, f"{name}/executor")
            async for word in words():
                if word.endswith("1."):
                    break

    async def tasks(self, names: list[str], url: str) -> None:
        all_begun = asyncio.Barrier(len(names))
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            running = [asyncio.create_task(self.in_task(name, client, all_begun)) for name in names]
            await asyncio.to_thread(self.all_open.wait, 120)
            await asyncio.gather(*running)

    def run(self, url: str) -> list[str]:
        threaded = [f"thread{n}" for n in range(THREADS)]
        tasked = [f"task{n}" for n in range(TASKS)]
        with ThreadPoolExecutor(4) as self.shared, ThreadPoolExecutor(THREADS) as outer:
            running = [outer.submit(self.in_thread, name) for name in threaded]
            asyncio.run(self.tasks(tasked, url))
            for future in running:
                future.result()
        self.client.close()
        return threaded + tasked


@pytest.mark.slow
def test_64_rollouts_at_once_and_no_call_under_the_wrong_one(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    names = Agents(model.url).run(model.url)
    spans = recorded()
    owner = {root[c.ROLLOUT_ID]: (root.trace_id, root.span_id) for root in roots(spans)}
    assert sorted(owner) == sorted(names)
    assert max(root.start_ns for root in roots(spans)) < min(root.end_ns for root in roots(spans))
    found = calls(spans)
    for call in found:
        name = call.prompt().partition("/")[0]
        assert call[c.ROLLOUT_ID] == name
        assert (call.trace_id, call.parent_id) == owner[name]
    expected = Counter(
        prompt
        for name in names
        for prompt in (
            [f"{name}/{kind}" for kind in ("own", "pool0", "pool1", "thread", "shared")]
            if name.startswith("thread")
            else [f"{name}/{kind}" for kind in ("gather0", "gather1", "executor", "generator0", "generator1")]
        )
    )
    assert Counter(call.prompt() for call in found) == expected
    assert len(found) == 64 * 5
    assert len(model.seen) == len(found)
