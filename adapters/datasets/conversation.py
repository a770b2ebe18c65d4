"""What a dataset is made of: one rollout's usable calls, with its reward and where it came from.

Knows ModelCalls and messages; knows no file format. A conversation is a reply that no other call goes on
from, with everything before it.

Invariants:
* a reply counts as the policy's only if a usable call made it: messages of an assistant that came with the
  prompt (examples, another model's words) are context;
* every reply of a usable call is in at least one conversation of its rollout, and is `new` in exactly one:
  where conversations fork, what they share is trained with the first;
* a reply of the policy is told as it was sampled, also where the agent sent it back written differently.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.sessions import message_key

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Exported:
    """One rollout on its way out."""

    rollout_id: str
    task_key: str
    """The same for rollouts of the same task; see `task_key`."""
    calls: Sequence[ModelCall]
    """Usable and the agent's own, in order of time; at least one."""
    reward: float | None = None
    task: Any = None
    """What the agent was asked, where somebody enqueued it."""

    @cached_property
    def conversations(self) -> "list[Conversation]":
        """The replies that nothing goes on from, each with everything before it, in order of time."""
        return list(_conversations(self))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for rollouts whose conversations say the same."""
        key = blake2b(digest_size=16)
        for said in sorted(conversation.key for conversation in self.conversations):
            key.update(said)
        return key.hexdigest()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages up to a last reply, and which of them the policy wrote."""

    rollout: Exported
    call: ModelCall
    """The last."""
    messages: Sequence[Message]
    """Request and reply of the last call."""
    own: Sequence[bool]
    """One a message: a usable call of the rollout made it."""
    new: Sequence[bool]
    """One a message: the policy's own, and in no earlier conversation of the rollout."""
    key: bytes
    """Of all that is said in it."""


@dataclass(frozen=True, slots=True)
class _Reply:
    call: ModelCall
    messages: Sequence[Message]
    """Of request and reply."""
    keys: Sequence[bytes]
    """A key of the messages up to and with each."""


def task_key(task_id: str | None, group_id: str | None, first: ModelCall | None) -> str:
    """The name of a task: its id, else its group's, else a hash of what the agent was first shown."""
    if task_id is not None or group_id is not None:
        return f"task:{task_id}" if task_id is not None else f"group:{group_id}"
    return f"prompt:{running_keys(first.messages)[-1].hex() if first and first.messages else ''}"


def running_keys(messages: Sequence[Message], key: Callable[[Message], bytes] = message_key) -> list[bytes]:
    """A key of the messages up to and with each; `key` makes bytes of one."""
    running = blake2b(digest_size=16)
    keys: list[bytes] = []
    for message in messages:
        running.update(key(message))
        keys.append(running.digest())
    return keys


def _conversations(rollout: Exported) -> Iterator[Conversation]:
    replies = [_reply(call, choice.message) for call in rollout.calls for choice in call.choices]
    made = {reply.keys[-1]: reply.messages[-1] for reply in replies}
    continued = {key for reply in replies for key in reply.keys[:-1]}
    last = {reply.keys[-1]: index for index, reply in enumerate(replies)}
    seen: set[bytes] = set()
    for index, reply in enumerate(replies):
        if reply.keys[-1] in continued or last[reply.keys[-1]] != index:
            continue
        sampled = [made.get(key) for key in reply.keys]
        messages = [
            message if own is None else _as_sampled(message, own)
            for message, own in zip(reply.messages, sampled, strict=True)
        ]
        new = [own is not None and key not in seen for own, key in zip(sampled, reply.keys, strict=True)]
        seen.update(reply.keys)
        yield Conversation(
            rollout, reply.call, messages, [own is not None for own in sampled], new, reply.keys[-1]
        )


def _reply(call: ModelCall, reply: Message) -> _Reply:
    messages = (*call.messages, {**reply, "role": "assistant"})
    return _Reply(call, messages, running_keys(messages))


def _with_function(call: Any, sampled: Any) -> Any:
    if isinstance(call, Mapping) and isinstance(sampled, Mapping) and "function" in sampled:
        return {**call, "function": sampled["function"]}
    return call


def _as_sampled(shown: Message, sampled: Message) -> Message:
    """A reply with the text of its arguments and its reasoning from the call that made it.

    Ids stay those of the conversation: tool messages name them.
    """
    told = dict(shown)
    if "reasoning" in sampled:
        told["reasoning"] = sampled["reasoning"]
    calls, made = shown.get("tool_calls"), sampled.get("tool_calls")
    if isinstance(calls, list | tuple) and isinstance(made, list | tuple) and len(calls) == len(made):
        told["tool_calls"] = [_with_function(call, own) for call, own in zip(calls, made, strict=True)]
    return told
