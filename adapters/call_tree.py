"""The calls of one rollout as a tree over token ids.

Knows token ids and the order of calls; knows no text, no tags, no agents and no
rewards. Sub-agents, context compaction, retries, parallel branches and template
drift need no case of their own: they fork.

Invariants:
* a node continues the earlier node whose prompt + reply is the longest prefix of its
  own prompt, or it begins a branch of its own;
* every sampled token of every call with ids belongs to exactly one node;
* no token is changed, dropped or tokenised again;
* iterative, and linear in the number of tokens where calls continue calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.adapters.packed import as_ids
from spangrad.adapters.sequences import Ids, Sequences, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class CallNode:
    """One choice of one call, as a place in the tree."""

    index: int
    """Position in `CallTree.nodes`."""
    call: ModelCall
    choice_index: int
    step_index: int
    """0, 1, ...: order of the call inside its rollout, calls without ids counted too."""
    ids: Ids
    """Prompt and reply, packed."""
    parent: int | None
    """Node that this one continues: its whole `token_ids` begin this prompt."""
    shared_with: int | None
    """An earlier node with the longest common beginning; the parent, unless this node shares more with
    another one."""
    shared_length: int
    """How many tokens that beginning has: a fork differs at this position."""

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and reply, as an array that is made each time."""
        return self.ids.array()

    @property
    def prompt_length(self) -> int:
        """How many of the ids are the prompt's."""
        return self.ids.prompt_length

    @property
    def length(self) -> int:
        """How many ids it has."""
        return len(self.ids)

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
    known = Sequences()
    nodes: list[CallNode] = []
    left_out: list[ModelCall] = []
    for step_index, call in enumerate(in_order(calls)):
        replies = _replies(call)
        if not replies or call.prompt_token_ids is None:
            left_out.append(call)
            continue
        prompt = as_ids(call.prompt_token_ids)
        found = known.find(prompt)
        parent = known.beginning(found)
        for number, (choice_index, reply) in enumerate(replies):
            ids = Ids(prompt, reply)
            shared_with, shared_length = known.add(ids, len(nodes), known.find(prompt) if number else found)
            if parent is not None and shared_length == nodes[parent].length:
                shared_with = parent
            nodes.append(
                CallNode(len(nodes), call, choice_index, step_index, ids, parent, shared_with, shared_length)
            )
    return CallTree(nodes, left_out)


def _replies(call: ModelCall) -> list[tuple[int, bytes]]:
    if call.grade is Grade.UNUSABLE or not call.prompt_token_ids:
        return []
    return [
        (index, as_ids(choice.sampled_token_ids))
        for index, choice in enumerate(call.choices)
        if choice.sampled_token_ids
    ]
