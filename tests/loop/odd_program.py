"""A program that is an agent, for tests of `agent.command`: plain Python that imports nothing of anybody's.

It reads its task from standard input and does what that says.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request


def main():
    task = json.load(sys.stdin)
    assert json.loads(os.environ["SPANGRAD_TASK"]) == task
    what = task["what"]
    if what == "call":
        print("asking", flush=True)
        print(json.dumps({"said": call("hello"), "temperature": task["temperature"], "cwd": os.getcwd()}))
    elif what == "call until told to stop":
        calls = 0
        while calls < 20 and call(f"go {calls}") != "Enough.":
            calls += 1
        print(json.dumps({"calls": calls}))
    elif what == "exit":
        print("no luck today", file=sys.stderr)
        sys.exit(3)
    elif what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "take a while":
        time.sleep(task["seconds"])
    elif what == "hang" and not (task.get("is_once") and os.path.exists(task["pids"])):
        child = subprocess.Popen(["sleep", "600"])
        with open(task["pids"], "a") as pids:
            pids.write(f"{os.getpid()} {child.pid} ")
        print("waiting for nobody", file=sys.stderr, flush=True)
        time.sleep(600)
    elif what == "wait":
        deadline = time.monotonic() + 30
        while not os.path.exists(task["marker"]) and time.monotonic() < deadline:
            time.sleep(0.02)
    elif what == "leave a child behind":
        print(json.dumps({"pid": subprocess.Popen(["sleep", "600"]).pid}))
    elif what == "say much":
        print("word " * 300_000)
    elif what == "say much and then the result":
        print("word " * 300_000)
        print('{"done": true}')
    else:
        print(f"I was told:\n{what}")


def call(text):
    """One call of the policy; returns what it said."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(
            {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
        ).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


main()
