"""The calls of one rollout as a tree over token ids.

Knows token ids and the order of calls; knows no text, no tags, no agents and no
rewards. Sub-agents, context compaction, retries, parallel branches and template
drift need no case of their own: they fork.

Invariants:
* a node continues the earlier node whose prompt + reply is the longest prefix of its
  own prompt, or it begins a branch of its own;
* every sampled token of every call with ids belongs to exactly one node;
* no token is changed, dropped or tokenised again;
* iterative, and near-linear in the number of tokens: sequences are kept sorted, and a
  lookup compares a sequence with its neighbours.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spangrad.adapters.model_call import Choice, Grade, ModelCall

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CallNode:
    """One choice of one call, as a place in the tree."""

    index: int
    """Position in `CallTree.nodes`."""
    call: ModelCall
    choice_index: int
    step_index: int
    """0, 1, ...: order of the call inside its rollout, calls without ids counted too."""
    token_ids: TokenIds
    """Prompt and reply."""
    prompt_length: int
    parent: int | None
    """Node that this one continues: its whole `token_ids` begin this prompt."""
    shared_with: int | None
    """An earlier node with the longest common beginning; the parent, unless this node shares more with
    another one."""
    shared_length: int
    """How many tokens that beginning has: a fork differs at this position."""

    @property
    def choice(self) -> Choice:
        """The reply that this node stands for."""
        return self.call.choices[self.choice_index]

    @property
    def is_fork(self) -> bool:
        """It shares its beginning with an earlier node without continuing any."""
        return self.parent is None and self.shared_length > 0


@dataclass(frozen=True, slots=True)
class CallTree:
    """Nodes in order of time; a node's parent always has a smaller index."""

    nodes: Sequence[CallNode]
    left_out: Sequence[ModelCall]
    """Calls that have no place: unusable, or without ids."""

    def children(self) -> list[list[int]]:
        """For every node, the nodes that continue it."""
        below: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            if node.parent is not None:
                below[node.parent].append(node.index)
        return below

    def paths(self) -> Iterator[list[CallNode]]:
        """Chains from a root to a leaf, in order of their leaves. The leaf's ids hold the whole chain's."""
        for node, below in zip(self.nodes, self.children(), strict=True):
            if below:
                continue
            chain = [node]
            while (parent := chain[-1].parent) is not None:
                chain.append(self.nodes[parent])
            yield chain[::-1]


def in_order(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Calls by start time; the position is a call's step index."""
    return sorted(calls, key=lambda call: (call.start_ns, call.call_id))


def build_tree(calls: Sequence[ModelCall]) -> CallTree:
    """Build the tree of one rollout's calls.

    Each choice of a call (`n > 1`) is a branch of its own. Where two earlier nodes hold the same ids, the
    first of them is continued.
    """
    known = _Sequences()
    nodes: list[CallNode] = []
    left_out: list[ModelCall] = []
    for step_index, call in enumerate(in_order(calls)):
        replies = _replies(call)
        if not replies or call.prompt_token_ids is None:
            left_out.append(call)
            continue
        prompt = np.asarray(call.prompt_token_ids, dtype=np.int32)
        parent = known.longest_beginning(prompt)
        for choice_index, reply in replies:
            token_ids = np.concatenate([prompt, reply])
            shared_with, shared_length = known.most_in_common(token_ids)
            known.insert(token_ids, len(nodes))
            nodes.append(
                CallNode(
                    index=len(nodes),
                    call=call,
                    choice_index=choice_index,
                    step_index=step_index,
                    token_ids=token_ids,
                    prompt_length=len(prompt),
                    parent=parent,
                    shared_with=_prefer_parent(nodes, parent, shared_with, shared_length),
                    shared_length=shared_length,
                )
            )
    return CallTree(nodes, left_out)


def _prefer_parent(
    nodes: Sequence[CallNode], parent: int | None, shared_with: int | None, shared_length: int
) -> int | None:
    if parent is not None and shared_length == len(nodes[parent].token_ids):
        return parent
    return shared_with


def _replies(call: ModelCall) -> list[tuple[int, TokenIds]]:
    if call.grade is Grade.UNUSABLE or not call.prompt_token_ids:
        return []
    return [
        (index, np.asarray(choice.sampled_token_ids, dtype=np.int32))
        for index, choice in enumerate(call.choices)
        if choice.sampled_token_ids
    ]


class _Sequences:
    """Token sequences of nodes in lexicographic order of their bytes.

    In that order everything between a sequence and one that it begins has that beginning too, so the
    longest common beginning is always with a neighbour.
    """

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._nodes: list[int] = []

    def insert(self, token_ids: TokenIds, node: int) -> None:
        """Add a node's sequence; the first node of equal ones stands for them."""
        key = token_ids.tobytes()
        at = bisect_left(self._sorted, key)
        if at == len(self._sorted) or self._sorted[at] != key:
            self._sorted.insert(at, key)
            self._nodes.insert(at, node)

    def longest_beginning(self, token_ids: TokenIds) -> int | None:
        """The node with the longest sequence that begins `token_ids`."""
        length = len(token_ids)
        while length > 0:
            at = bisect_right(self._sorted, token_ids[:length].tobytes()) - 1
            if at < 0:
                return None
            before = _from_bytes(self._sorted[at])
            common = _common(before, token_ids[:length])
            if common == len(before):
                return self._nodes[at]
            length = common
        return None

    def most_in_common(self, token_ids: TokenIds) -> tuple[int | None, int]:
        """A node with the longest beginning in common with `token_ids`, and its length."""
        at = bisect_left(self._sorted, token_ids.tobytes())
        best, longest = None, 0
        for neighbour in range(max(at - 1, 0), min(at + 1, len(self._sorted))):
            common = _common(_from_bytes(self._sorted[neighbour]), token_ids)
            if common > longest:
                best, longest = self._nodes[neighbour], common
        return best, longest


def _from_bytes(key: bytes) -> TokenIds:
    return np.frombuffer(key, dtype=np.int32)


def _common(left: TokenIds, right: TokenIds) -> int:
    """Length of the common beginning."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    position = int(different.argmax()) if length else 0
    return position if length and different[position] else length
