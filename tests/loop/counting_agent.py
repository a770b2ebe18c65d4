"""An agent over plain HTTP, its tasks and rewards: any random policy gets mixed ones."""

import os

import httpx


def run(task):
    """Two calls; the second sees the first's reply."""
    return {"text": "".join(talk(task, lambda texts: len(texts) < 2))}


def run_on(task):
    """One to four calls, more or less by chance: rollouts differ in length."""
    return {"text": "".join(talk(task, lambda texts: len(texts) < 4 and sum(texts[-1].encode()) % 2))}


def talk(task, goes_on):
    """Replies of the model, each after those before it, for as long as `goes_on(replies)`."""
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    messages = [{"role": "user", "content": task["question"]}]
    texts: list[str] = []
    while not texts or goes_on(texts):
        reply = httpx.post(
            url,
            headers=headers,
            timeout=60,
            json={
                "model": os.environ["OPENAI_MODEL"],
                "messages": messages,
                "max_tokens": 12,
                "temperature": task["temperature"],
            },
        )
        reply.raise_for_status()
        texts.append(reply.json()["choices"][0]["message"]["content"] or "")
        messages += [
            {"role": "assistant", "content": texts[-1]},
            {"role": "user", "content": "again"},
        ]
    return texts


def tasks(split, n, seed):
    """Questions that differ."""
    return [{"task_id": f"{split}-{seed}-{i}", "question": f"question {i} {seed % 97}"} for i in range(n)]


def reward(task, output):
    """1 for about half of all texts."""
    return float(sum(output["text"].encode()) % 2)


def equal_reward(task, output):
    """The same for everybody: a batch that says nothing."""
    return 1.0


def soon_equal_reward(task, output):
    """Another one for each of the first eight rollouts, then 1: what a policy that has learned all gets."""
    with open(os.environ["GRADED_FILE"], "a+") as graded:
        graded.write("x")
        graded.flush()
        return min(1.0, graded.tell() / 9)


def broken_reward(task, output):
    """A grader with a bug."""
    raise RuntimeError("the grader is broken")
