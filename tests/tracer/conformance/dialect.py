"""What servers answer, as JSON: vLLM's chat, OpenAI's other routes, Anthropic's messages.

Shapes only; which of them make a session is `make.py`'s business. A token's logprob is -0.25 times its
place, counted from 1, and exact in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "policy"
PROMPT_IDS = [151644, 8, 70001, 151645, 198]

Json = dict[str, Any]


@dataclass(frozen=True)
class Token:
    """One sampled token, and what a stream's chunk shows of it: nothing, for a control token."""

    id: int
    text: str
    delta: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One choice."""

    tokens: Sequence[Token]
    message: Json
    finish: str = "stop"

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def says(*words: str, first_id: int = 101) -> Reply:
    """Plain text, and the end-of-turn token that nobody sees."""
    shown = [Token(first_id + index, word, {"content": word}) for index, word in enumerate(words)]
    end = Token(151645, "<|im_end|>")
    return Reply([*shown, end], {"role": "assistant", "content": "".join(words)})


def thinks(thoughts: Sequence[str], words: Sequence[str]) -> Reply:
    """Reasoning between two control tokens, then text."""
    inside = [Token(201 + index, word, {"reasoning": word}) for index, word in enumerate(thoughts)]
    after = says(*words)
    tokens = [Token(151667, "<think>"), *inside, Token(151668, "</think>"), *after.tokens]
    return Reply(tokens, {**after.message, "reasoning": "".join(thoughts)})


def calls_tools(*calls: tuple[str, str, Sequence[str]]) -> Reply:
    """Tool calls of (id, name, pieces of the arguments), each opened and closed by a control token."""
    tokens: list[Token] = []
    asked: list[Json] = []
    for index, (call_id, name, pieces) in enumerate(calls):
        opening = {"index": index, "id": call_id, "type": "function"}
        head = {"tool_calls": [{**opening, "function": {"name": name, "arguments": ""}}]}
        tokens += [Token(151657, "<tool_call>"), Token(300 + 20 * index, name, head)]
        for place, piece in enumerate(pieces):
            delta = {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            tokens.append(Token(301 + 20 * index + place, piece, delta))
        tokens.append(Token(151658, "</tool_call>"))
        function = {"name": name, "arguments": "".join(pieces)}
        asked.append({"id": call_id, "type": "function", "function": function})
    message = {"role": "assistant", "content": None, "tool_calls": asked}
    return Reply([*tokens, Token(151645, "<|im_end|>")], message, "tool_calls")


def chat(*replies: Reply, name: str, ids: bool = True, logprobs: bool = True) -> Json:
    """A whole chat completion; without `ids` as a server that is not vLLM sends it."""
    choices = []
    for index, reply in enumerate(replies):
        choice: Json = {"index": index, "message": reply.message, "finish_reason": reply.finish}
        choice["logprobs"] = {"content": _logprobs(reply.tokens, 0)} if logprobs else None
        if ids:
            choice |= {"stop_reason": None, "token_ids": reply.ids}
        choices.append(choice)
    body = {"id": f"chatcmpl-{name}", "object": "chat.completion", "created": 1, "model": MODEL}
    body |= {"choices": choices, "usage": _usage(replies)}
    return body | ({"prompt_token_ids": PROMPT_IDS, "prompt_logprobs": None} if ids else {})


def chat_chunks(
    *replies: Reply, name: str, ids: bool = True, logprobs: bool = True, with_usage: bool = True
) -> list[Json]:
    """The chunks of a streamed chat completion: the first of each choice has the prompt's ids."""
    base: Json = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    chunks = []
    for index in range(len(replies)):
        first: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunk = base | {"choices": [first | {"logprobs": None}]}
        chunks.append(chunk | ({"prompt_token_ids": PROMPT_IDS} if ids else {}))
    for place in range(max(len(reply.tokens) for reply in replies)):
        for index, reply in enumerate(replies):
            if place < len(reply.tokens):
                chunks.append(base | {"choices": [_delta(index, reply, place, ids=ids, logprobs=logprobs)]})
    return [*chunks, base | {"choices": [], "usage": _usage(replies)}] if with_usage else chunks


def completion(reply: Reply, *, name: str) -> Json:
    """vLLM's answer on the legacy route, where the prompt's ids are the choice's."""
    choice = {
        "index": 0,
        "text": reply.message["content"],
        "finish_reason": reply.finish,
        "stop_reason": None,
    }
    choice |= {"token_ids": reply.ids, "prompt_token_ids": PROMPT_IDS}
    choice |= {"logprobs": _text_logprobs(reply.tokens, 0), "prompt_logprobs": None}
    base = {"id": f"cmpl-{name}", "object": "text_completion", "created": 1, "model": MODEL}
    return base | {"choices": [choice], "usage": _usage([reply])}


def completion_chunks(reply: Reply, *, name: str) -> list[Json]:
    """The same, streamed."""
    base = {"id": f"cmpl-{name}", "object": "text_completion", "created": 1, "model": MODEL}
    chunks: list[Json] = []
    for place, token in enumerate(reply.tokens):
        is_last = place == len(reply.tokens) - 1
        choice: Json = {"index": 0, "text": token.delta.get("content", ""), "token_ids": [token.id]}
        choice |= {"finish_reason": reply.finish if is_last else None, "stop_reason": None}
        choice |= {"logprobs": _text_logprobs([token], place)}
        if place == 0:
            choice["prompt_token_ids"] = PROMPT_IDS
        chunks.append(base | {"choices": [choice], "usage": None})
    return [*chunks, base | {"choices": [], "usage": _usage([reply])}]


def embeddings(*vectors: Sequence[float]) -> Json:
    data = [{"object": "embedding", "index": i, "embedding": list(v)} for i, v in enumerate(vectors)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return {"object": "list", "model": "embedder", "data": data, "usage": usage, "id": "embd-1"}


def response(*output: Json, status: str = "completed") -> Json:
    """A Responses API answer."""
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "model": MODEL,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 5, "output_tokens": 4, "total_tokens": 9, **details},
    }


def response_text(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def response_events(whole: Json) -> list[tuple[str, Json]]:
    """The events of a streamed answer that has one text message first, then maybe function calls."""
    events: list[Json] = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}}
    ]
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            opened = {**item, "status": "in_progress", "content": []}
            events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
            where = place | {"content_index": 0}
            empty = {**part, "text": ""}
            events.append({"type": "response.content_part.added", **where, "part": empty})
            words = part["text"].split(" ")
            pieces = [word + " " for word in words[:-1]] + words[-1:]
            events += [
                {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
                for piece in pieces
            ]
            ended = {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
            events += [ended, {"type": "response.content_part.done", **where, "part": part}]
        else:
            opened = {**item, "arguments": "", "status": "in_progress"}
            events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
            written = item["arguments"]
            for piece in (written[:6], written[6:]):
                delta = {"type": "response.function_call_arguments.delta", **place, "delta": piece}
                events.append(delta)
            done = {"type": "response.function_call_arguments.done", **place, "arguments": written}
            events.append({**done, "name": item["name"]})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": whole})
    return [(event["type"], event | {"sequence_number": n}) for n, event in enumerate(events)]


def message(*content: Json, name: str, stop_reason: str = "end_turn") -> Json:
    """An Anthropic answer."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": list(content),
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 7},
    }


def message_events(whole: Json, *, argument_pieces: Sequence[str] = ()) -> list[tuple[str, Json]]:
    """The events of a streamed answer; `argument_pieces` are the last tool call's, as written."""
    usage = {"input_tokens": 5, "output_tokens": 1}
    start = {**whole, "content": [], "stop_reason": None, "usage": usage}
    events: list[Json] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(whole["content"]):
        deltas: list[Json]
        if block["type"] == "thinking":
            opened: Json = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            opened = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in argument_pieces]
        else:
            opened = {"type": "text", "text": ""}
            half = len(block["text"]) // 2
            pieces = (block["text"][:half], block["text"][half:])
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
        events.append({"type": "content_block_start", "index": index, "content_block": opened})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": 7}})
    events.append({"type": "message_stop"})
    return [(event["type"], event) for event in events]


def _delta(index: int, reply: Reply, place: int, *, ids: bool, logprobs: bool) -> Json:
    token, is_last = reply.tokens[place], place == len(reply.tokens) - 1
    choice: Json = {"index": index, "delta": token.delta, "finish_reason": reply.finish if is_last else None}
    choice["logprobs"] = {"content": _logprobs([token], place)} if logprobs else None
    return choice | ({"token_ids": [token.id]} if ids else {}) | ({"stop_reason": None} if is_last else {})


def _logprobs(tokens: Sequence[Token], first: int) -> list[Json]:
    return [
        {
            "token": token.text,
            "logprob": -0.25 * (first + place + 1),
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for place, token in enumerate(tokens)
    ]


def _text_logprobs(tokens: Sequence[Token], first: int) -> Json:
    values = [item["logprob"] for item in _logprobs(tokens, first)]
    words = [token.text for token in tokens]
    return {"text_offset": [], "token_logprobs": values, "tokens": words, "top_logprobs": []}


def _usage(replies: Sequence[Reply]) -> Json:
    sampled = sum(len(reply.tokens) for reply in replies)
    prompt = len(PROMPT_IDS)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
