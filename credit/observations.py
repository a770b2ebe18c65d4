"""What the environment answered: tokens of a prompt behind the reply that it goes on from.

Knows the call tree: an observation is what a following prompt holds beyond its parent's prompt and reply. By
provenance, never by searching text for tags.

Invariants:
* an observation follows a call in which the trained policy acted, and is shown to one in which it acts;
* a token that several calls were shown alike is an observation once;
* no sampled token is one.

Shape letters: T token positions of a row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spangrad.adapters.call_tree import CallNode, CallTree
from spangrad.adapters.grading import worst
from spangrad.credit.transition import CallSegment, Transition


def observed(tree: CallTree, node: CallNode, acting: frozenset[int]) -> slice:
    """Positions of what this call was shown since the reply that it goes on from; empty if there is none.

    Args:
        tree: The calls of the rollout.
        node: The call that was shown it.
        acting: Nodes in which the trained policy acts.

    What an earlier call was shown alike behind the same reply is that call's.
    """
    if node.parent is None or node.parent not in acting or node.index not in acting:
        return slice(0, 0)
    start = tree.nodes[node.parent].length
    earlier = tree.nodes[node.shared_with] if node.shared_with is not None else None
    if earlier is not None and earlier.index != node.parent and earlier.index in acting:
        start = max(start, min(node.shared_length, earlier.prompt_length))
    return slice(start, max(start, node.prompt_length))


def observation_mask(
    tree: CallTree, path: Sequence[CallNode], acting: frozenset[int], length: int, done: set[int]
) -> NDArray[np.bool_]:
    """Where the first `length` tokens of a path hold observations that are not `done`; then they are."""
    mask: NDArray[np.bool_] = np.zeros(length, dtype=np.bool_)
    for node in path:
        if node.index not in done and node.prompt_length <= length:
            mask[observed(tree, node, acting)] = True
            done.add(node.index)
    return mask


def observation_rows(tree: CallTree, acting: frozenset[int], *, group_id: str | None) -> list[Transition]:
    """Rows that train the next observation, given state and action: an implicit world model.

    Stage one of early experience, arXiv:2510.08558: cloning these rows, then the expert's actions. The masks
    say what is trained, as in any row; what is True in them was not sampled but shown.

    Args:
        tree: Of one attempt of one rollout.
        acting: Nodes in which the trained policy acts.
        group_id: Copied to the rows.

    Returns:
        One row for every path that ends in an observation nobody else has, with a segment for every
        observation, named after the call that it answers. `loss_weight` is 0: `weigh` sets it.
    """
    rows: list[Transition] = []
    done: set[int] = set()
    for path in tree.paths():
        fresh = [
            (node, place)
            for node in path
            if node.index not in done and (place := observed(tree, node, acting)).stop > place.start
        ]
        done.update(node.index for node, _ in fresh)
        if fresh:
            rows.append(_row(tree, fresh, group_id))
    return rows


def _row(tree: CallTree, shown: list[tuple[CallNode, slice]], group_id: str | None) -> Transition:
    last, place = shown[-1]
    length = place.stop
    mask: NDArray[np.bool_] = np.zeros(length, dtype=np.bool_)
    segments = []
    for node, where in shown:
        mask[where] = True
        assert node.parent is not None
        before = tree.nodes[node.parent]
        segments.append(
            CallSegment(before.call.call_id, before.call.span_id, before.step_index, where.start, where.stop)
        )
    return Transition(
        rollout_id=last.call.rollout_id or last.call.trace_id,
        attempt=last.call.attempt,
        group_id=group_id,
        segments=tuple(segments),
        token_ids=last.token_ids[:length],
        action_mask=mask,
        behavior_logprobs=np.full(length, np.nan, dtype=np.float32),
        policy_versions=np.full(length, -1, dtype=np.int32),
        advantages=mask.astype(np.float64),
        loss_weight=0.0,
        grade=str(worst(node.call.grade for node, _ in shown)),
    )
