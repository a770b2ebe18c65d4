"""What `counting_agent.run` does, as a program of plain Python."""

import json
import os
import sys
import urllib.request

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["question"]}]
texts = []
for _ in range(2):
    asked = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": messages,
        "max_tokens": 12,
        "temperature": task["temperature"],
    }
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(asked).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        texts.append(json.load(reply)["choices"][0]["message"]["content"] or "")
    messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "again"}]
print(json.dumps({"text": "".join(texts)}))
