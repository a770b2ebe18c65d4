"""Which call goes on from which, where that is not simply the one before it: what makes rollouts a tree.

A rollout was branched off another one of its group if its first call continues a call of it: its prompt
begins with that call's prompt and reply, token by token. Nothing else begins so: another's reply is in no
first prompt by chance. A call that is a second continuation of one call of its own rollout is a branch, too
(a retry, a search). Calls that begin anew (a sub-agent, a summary, a template that drops thinking) are no
branches: they follow the call before them. Where there are no ids, the task can say it:
`task["forked_from"]` is the id of the call that the rollout goes on from, and counts before the tokens.

Knows calls; knows no rewards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from spangrad.adapters.call_tree import build_tree, in_order
from spangrad.adapters.model_call import ModelCall
from spangrad.credit.transitions import acts
from spangrad.store.records import Rollout

FORKED_FROM: Final = "forked_from"
"""Key of a rollout's task that names the call it goes on from."""


def parents_of(
    rollouts: Sequence[Rollout], calls_by_rollout: Mapping[str, Sequence[ModelCall]]
) -> dict[str, str]:
    """call_id -> call_id of the acting call that it goes on from, of calls that begin a branch."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id or rollout.rollout_id, []).append(rollout)
    found: dict[str, str] = {}
    for members in groups.values():
        calls = {one.rollout_id: _acting(calls_by_rollout[one.rollout_id]) for one in members}
        found |= _by_tokens(calls)
        for one in members:
            named = one.task.get(FORKED_FROM) if isinstance(one.task, Mapping) else None
            if named is not None and calls[one.rollout_id]:
                found[calls[one.rollout_id][0].call_id] = str(named)
    return found


def _acting(calls: Sequence[ModelCall]) -> list[ModelCall]:
    return [call for call in in_order(calls) if acts(call)]


def _by_tokens(calls: Mapping[str, Sequence[ModelCall]]) -> dict[str, str]:
    """Of one group, whose acting calls are given by rollout."""
    first = {own[0].call_id: rollout_id for rollout_id, own in calls.items() if own}
    owner = {call.call_id: rollout_id for rollout_id, own in calls.items() for call in own}
    found = {
        child: parent
        for child, parent, _ in _continuations([call for own in calls.values() for call in own])
        if child in first and owner[parent] != first[child]
    }
    for own in calls.values():
        found |= {child: parent for child, parent, number in _continuations(own) if number}
    return found


def _continuations(calls: Sequence[ModelCall]) -> Iterator[tuple[str, str, int]]:
    """Call, the call that it continues, and how many continued that one before."""
    tree = build_tree(calls)
    continued: Counter[int] = Counter()
    for node in tree.nodes:
        if node.parent is not None and not node.choice_index:
            yield node.call.call_id, tree.nodes[node.parent].call.call_id, continued[node.parent]
            continued[node.parent] += 1
