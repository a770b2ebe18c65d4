"""A server that is an agent, for tests of `agent.url`: does what the task says.

`python -m tests.loop.odd_server PORT` serves it.
"""

import asyncio
import os
import sys
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse
from starlette.routing import Route


async def run(request):
    asked = await request.json()
    task, headers = asked["task"], request.headers
    what = task["what"]
    marker = Path(task.get("marker", ""))
    if what == "call":
        names = ("x-spangrad-rollout", "x-spangrad-attempt", "traceparent", "x-mine")
        return JSONResponse(
            {"said": await call(asked), "headers": {name: headers.get(name) for name in names}, **asked}
        )
    if what == "call until told to stop":
        calls = 0
        while calls < 20 and await call(asked) != "Enough.":
            calls += 1
        return JSONResponse({"calls": calls})
    if what == "hang":
        while not await request.is_disconnected():
            await asyncio.sleep(0.05)
        marker.touch()
    if what == "end the server once" and not marker.exists():
        marker.touch()
        os._exit(9)
    if what == "busy once" and not marker.exists():
        marker.touch()
        return PlainTextResponse("later", 503, {"retry-after": "0"})
    if what == "busy":
        return PlainTextResponse("later", 429, {"retry-after": "0"})
    if what == "cut":
        return StreamingResponse(cut())
    if what == "redirect":
        return RedirectResponse("/elsewhere")
    if what == "large":
        return JSONResponse("x" * 2**21)
    if what == "no json":
        return PlainTextResponse("<html>")
    if what == "raise":
        raise ValueError("not today")
    if what == "refuse":
        return JSONResponse({"detail": "I don't do that"}, 422)
    return JSONResponse(what)


async def call(asked):
    """One call of the policy; returns what it said."""
    async with httpx.AsyncClient() as client:
        reply = await client.post(
            f"{asked['base_url']}/chat/completions",
            json={"model": asked["model"], "messages": [{"role": "user", "content": "hello"}]},
            headers={"authorization": f"Bearer {asked['api_key']}"},
            timeout=30,
        )
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]


async def cut():
    """The beginning of an answer."""
    yield b'{"answer": '
    raise RuntimeError("cut off")


def ready(request):
    return PlainTextResponse("ready")


app = Starlette(routes=[Route("/run", run, methods=["POST"]), Route("/ready", ready)])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
