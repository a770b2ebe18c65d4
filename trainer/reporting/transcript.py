"""A rollout as text that a person can read."""

from spangrad.adapters.calls import calls_of
from spangrad.store.base import Store


def transcript(store: Store, rollout_id: str) -> str:
    """The conversation of a rollout's last call, with its reply; '' if it has no call."""
    calls = sorted(calls_of(store, [rollout_id]), key=lambda call: call.start_ns)
    if not calls:
        return ""
    last = calls[-1]
    messages = [*last.messages, *(choice.message for choice in last.choices)]
    lines = []
    for message in messages:
        lines.append(f"{message.get('role')}: {message.get('content') or ''}".rstrip())
        for call in message.get("tool_calls") or []:
            lines.append(f"    -> {call['function']['name']}({call['function']['arguments']})")
    return "\n".join(lines)
