"""An agent with an HTTP client that the tracer knows; it marks nothing and imports nothing of spangrad."""

import json
import os

import httpx

reply = httpx.post(
    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    json={"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hello"}]},
    headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    timeout=30,
).raise_for_status()
print(json.dumps({"said": reply.json()["choices"][0]["message"]["content"]}))
