"""Tokens in: a follow-up call is sent with the rollout's own ids, so that no template rewrites history.

    prompt ids = prompt ids of the call that is continued + ids that it sampled
                 + what the template puts behind that turn

A request continues an earlier call of its rollout if its messages are that call's, then its
reply, then something new, and model, tools and template settings are the same. What comes
behind the turn is found by having the engine render the conversation twice, with two replies
that differ in their last token: what both renderings end with is the rest of the turn and all
that follows it, whatever the template does to what comes before (drop thinking, say). A third
rendering, of the conversation up to the reply, tells where the turn's end ends.

Invariants:
* ids that were sampled stay as they were sampled; the end of a turn that was cut (token limit,
  stop string) is the template's and part of the prompt;
* where anything is not as described here the plain request has to do, for a reason that is told;
  nothing is guessed;
* what is remembered is bounded in bytes; the turn used longest ago makes way.

Pure functions and one table: knows messages and ids. Knows no HTTP, no spans and no tokenizer.
"""

import contextlib
import hashlib
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 * 2**20
"""Memory for remembered ids."""
SETTINGS = (
    "model",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
)
"""Request fields that a prompt depends on beside its messages."""
_TURN_BYTES = 300
"""What a remembered turn costs beside its ids."""
_SENTINELS = ("x", "y")
"""Replies that differ in their last token, in every tokenizer."""
_TEXT_PARTS = ("text", "refusal", None)
MAX_CLOSING = 64
"""Tokens that a template can take to end a turn."""
MIN_MOVED = 8
"""Fewer tokens that vanish from the history and stand behind it are chance: an empty thinking block, say."""

Owner = tuple[str, int]
"""Rollout and attempt."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """The plain request has to do."""

    reason: str
    """`kind: detail`; the kind is the same for all that are counted together."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that can be continued: what its reply ended with, and all ids up to there."""

    ids: "array[int]"
    """Prompt and sampled ids."""
    is_cut: bool
    """The turn has no end: it was cut by the token limit or by a stop string."""
    reasoning: bytes | None
    """Digest of its thinking; None if it had none."""
    is_ambiguous: bool = False
    """Another reply of the rollout to the same messages reads the same and has other ids."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request that continues a remembered turn."""

    turn: Turn
    reply_index: int
    """Where the turn's reply is in the request's messages."""


class Turns:
    """The turns that requests may continue."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Remember nothing yet."""
        self._max_bytes = max_bytes
        self._turns: OrderedDict[tuple[Owner, bytes], Turn] = OrderedDict()
        self._owners: Counter[Owner] = Counter()
        self._size = 0

    @property
    def size_bytes(self) -> int:
        """Memory that is taken."""
        return self._size

    def find(self, owner: Owner, request: Mapping[str, Any]) -> Continuation | Fallback:
        """The longest remembered turn that a request continues."""
        messages = request["messages"]
        found: Continuation | None = None
        for index, (prefix, message) in enumerate(zip(_prefixes(request), messages, strict=False)):
            if message.get("role") != "assistant":
                continue
            key = owner, _key(prefix, message)
            turn = self._turns.get(key)
            said = _reasoning(message)
            if turn is not None and (turn.is_ambiguous or said in (None, turn.reasoning)):
                self._turns.move_to_end(key)
                found = Continuation(turn, index)
        if found is None:
            known = owner in self._owners
            return Fallback("continues no earlier call" if known else "first call of the rollout")
        if found.turn.is_ambiguous:
            return Fallback("two replies read alike: it is not known which of them is continued")
        if found.reply_index == len(messages) - 1:
            return Fallback("nothing follows the earlier reply")
        return found

    def remember(
        self,
        owner: Owner,
        request: Mapping[str, Any],
        reply: Mapping[str, Any],
        ids: Sequence[int],
        *,
        is_cut: bool,
    ) -> None:
        """Keep a finished call.

        Args:
            owner: Whose call it was.
            request: What the client sent.
            reply: The message that it got.
            ids: All ids of the prompt and of the reply.
            is_cut: The reply was cut by the token limit or by a stop string.
        """
        *_, whole = _prefixes(request)
        key = owner, _key(whole, reply)
        known, packed = self._turns.get(key), array("i", ids)
        is_ambiguous = known is not None and (known.is_ambiguous or known.ids != packed)
        self._forget(key)
        turn = Turn(packed, is_cut, _reasoning(reply), is_ambiguous)
        self._turns[key] = turn
        self._owners[owner] += 1
        self._size += _size(turn)
        while self._size > self._max_bytes:
            self._forget(next(iter(self._turns)))

    def _forget(self, key: tuple[Owner, bytes]) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._size -= _size(turn)
            self._owners[key[0]] -= 1
            if not self._owners[key[0]]:
                del self._owners[key[0]]


def _size(turn: Turn) -> int:
    return _TURN_BYTES + len(turn.ids) * turn.ids.itemsize


def unfit(request: Mapping[str, Any]) -> Fallback | None:
    """Why vLLM would not take ids with a request, or why its prompt is the client's own; None if it would."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return Fallback("no messages")
    for field in ("kv_transfer_params", "echo", "truncate_prompt_tokens"):
        if request.get(field) is not None and request[field] is not False:
            return Fallback(f"the client sets {field}")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not all(_is_text(part) for part in content):
            return Fallback("content that is not text")
    return None


def renderings(request: Mapping[str, Any], reply_index: int) -> list[dict[str, Any]]:
    """What to have rendered: the conversation with each of two other replies, and its part up to the reply.

    Each is the body of a `POST /tokenize`.
    """
    messages = request["messages"]
    replies = [_other_reply(messages[reply_index], sentinel) for sentinel in _SENTINELS]
    before, after = messages[:reply_index], messages[reply_index + 1 :]
    whole = {
        name: request[name]
        for name in ("add_generation_prompt", "continue_final_message")
        if request.get(name) is not None
    }
    return [
        _tokenize(request, [*before, replies[0], *after], whole),
        _tokenize(request, [*before, replies[1], *after], whole),
        _tokenize(request, [*before, replies[0]], {"add_generation_prompt": False}),
    ]


def prompt_ids(
    turn: Turn, whole: Sequence[int], other: Sequence[int], earlier: Sequence[int], ends: Collection[int]
) -> list[int] | Fallback:
    """The prompt of a follow-up call.

    Args:
        turn: The turn that it continues.
        whole: The first of `renderings`, as ids.
        other: The second.
        earlier: The third.
        ends: Ids that are known to end a turn: those that replies ended with by themselves.
    """
    behind = _common_end(whole, other)
    if len(behind) == len(whole):
        return Fallback("the template leaves the reply out")
    closing = _overlap(earlier, behind)
    if not closing:
        return Fallback("the template ends a turn otherwise once another follows")
    moved = _moved(whole[: len(whole) - len(behind)], earlier[: len(earlier) - closing], behind)
    if moved:
        return Fallback(f"the template moves history behind the turn: {moved} tokens")
    if not turn.is_cut:
        end = turn.ids[-1]
        if end not in behind[:closing]:
            return Fallback(f"the turn's last token does not end a turn: {end}")
        return [*turn.ids, *behind[behind.index(end) + 1 :]]
    known = next((at for at in range(closing) if behind[at] in ends), None)
    if known is None:
        return Fallback("the turn was cut, and the token that ends a turn is not known")
    return [*turn.ids, *behind[known:]]


def _tokenize(
    request: Mapping[str, Any], messages: list[dict[str, Any]], more: Mapping[str, Any]
) -> dict[str, Any]:
    body = {name: request[name] for name in SETTINGS if request.get(name) is not None}
    # /tokenize knows these only as the template's variables, which is what the chat route makes of them.
    variables = dict(body.pop("chat_template_kwargs", ()))
    documents, effort = body.pop("documents", None), body.pop("reasoning_effort", None)
    if documents is not None:
        variables["documents"] = documents
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    if variables:
        body["chat_template_kwargs"] = variables
    return {**body, "messages": messages, **more}


def _other_reply(reply: Mapping[str, Any], sentinel: str) -> dict[str, Any]:
    """`reply` with another text, and with other arguments of its last tool call."""
    other = {**reply, "content": sentinel}
    calls = reply.get("tool_calls")
    if calls:
        last = dict(calls[-1])
        last["function"] = {**last.get("function", {}), "arguments": json.dumps({sentinel: sentinel})}
        other["tool_calls"] = [*calls[:-1], last]
    return other


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return list(one[len(one) - length :])


def _overlap(earlier: Sequence[int], behind: Sequence[int]) -> int:
    """How many ids the end of `earlier` and the start of `behind` share, at most."""
    for length in range(min(len(earlier), len(behind), MAX_CLOSING), 0, -1):
        if list(earlier[-length:]) == list(behind[:length]):
            return length
    return 0


def _moved(now: Sequence[int], before: Sequence[int], behind: Sequence[int]) -> int:
    """How many tokens vanish from the history and stand behind the turn instead (a list of tools, say)."""
    start = next(
        (at for at, (one, other) in enumerate(zip(now, before, strict=False)) if one != other),
        min(len(now), len(before)),
    )
    end = 0
    while end < min(len(now), len(before)) - start and now[-1 - end] == before[-1 - end]:
        end += 1
    gone = array("i", before[start : len(before) - end])
    is_moved = len(gone) >= MIN_MOVED and gone.tobytes() in array("i", behind).tobytes()
    return len(gone) if is_moved else 0


def _prefixes(request: Mapping[str, Any]) -> list[bytes]:
    """Digests of the settings with no, one, two, ... of the messages: one more than there are messages."""
    digest = hashlib.blake2b(_json([request.get(name) for name in SETTINGS]), digest_size=16)
    prefixes = [digest.digest()]
    for message in request["messages"]:
        digest.update(_json(message))
        prefixes.append(digest.digest())
    return prefixes


def _key(prefix: bytes, reply: Mapping[str, Any]) -> bytes:
    """Digest of a conversation and its reply, in whatever form a client sends the reply back."""
    calls = [_call(call) for call in reply.get("tool_calls") or ()]
    content = reply.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return hashlib.blake2b(prefix + _json([content, calls]), digest_size=16).digest()


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a policy can write `[[[[...` to the end
            arguments = json.loads(arguments)  # clients write them anew
    return [call.get("id"), function.get("name"), arguments]


def _reasoning(message: Mapping[str, Any]) -> bytes | None:
    said = message.get("reasoning") or message.get("reasoning_content")
    return hashlib.blake2b(_json(said), digest_size=16).digest() if said else None


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXT_PARTS)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
