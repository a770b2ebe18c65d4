"""Call trees + advantages -> masked training rows, with weights that make every rollout count equally.

Knows where sampled tokens are by provenance: a node's reply begins where its prompt
ends. Never searches text or ids for markers.

Invariants:
* every sampled token of a trained call is trained in exactly one row, and nothing else is;
* a row's tokens are the engine's, unchanged; what is not trained is context;
* cutting a rollout into other rows changes neither its weight nor its weighted sum.

Shape letters: T token positions of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from spangrad.adapters.call_tree import CallNode, CallTree, in_order
from spangrad.adapters.grading import MISSING_LOGPROB, at_least, reason_kind, worst
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.credit.actions import action_of
from spangrad.credit.aggregation import weigh
from spangrad.credit.anchors import anchor_of, observation_of
from spangrad.credit.observations import observation_mask
from spangrad.credit.transition import CallSegment, Transition
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import GradeError

MISSING_REWARD: Final = "reward is missing"
"""Why a call is refused whose rollout nobody scored."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A call, or a whole rollout, that is not trained."""

    rollout_id: str | None
    call_id: str | None
    """None: the whole rollout."""
    reason: str
    sampled_tokens: int = 0
    """Tokens of its replies, as far as their ids are known."""
    kind: str | None = None
    """What the reason has in common with others; None: all of it."""

    @property
    def counted_as(self) -> str:
        """What it is counted as."""
        return self.kind or self.reason


def untrained_because(call: ModelCall) -> str | None:
    """Why a call is not the trained policy acting; None if it is."""
    if call.purpose is not Purpose.AGENT:
        return f"purpose is not to act: {call.purpose}"
    return None if call.is_trained_policy else "frozen policy"


def acts(call: ModelCall) -> bool:
    """Whether it is a step: the trained policy acting, to an end."""
    return untrained_because(call) is None and call.grade is not Grade.UNUSABLE


def require_grade(
    calls: Sequence[ModelCall], grade: Grade | str, *, otherwise: Literal["refuse", "raise"] = "refuse"
) -> tuple[list[ModelCall], list[Refused]]:
    """Split calls into those with at least that grade and those refused, with the reasons of their grade.

    Raises:
        GradeError: A call has a worse grade and `otherwise` is 'raise', or there is no such grade.
    """
    if grade not in ("exact", "ids", "text"):
        raise GradeError(f"no grade that can be asked for is called {grade!r}; expected exact, ids or text")
    wanted = Grade(grade)
    kept: list[ModelCall] = []
    refused: list[Refused] = []
    for call in calls:
        if at_least(call.grade, wanted):
            kept.append(call)
            continue
        what = f"grade {call.grade}, {wanted} is needed"
        kinds = sorted({reason_kind(reason) for reason in call.grade_reasons})
        told = (f"{what}: {'; '.join(reasons)}" for reasons in (call.grade_reasons, kinds))
        refused.append(Refused(call.rollout_id, call.call_id, next(told), kind=next(told)))
    if refused and otherwise == "raise":
        first = refused[0]
        raise GradeError(
            f"{len(refused)} of {len(calls)} calls can't be used; call {first.call_id!r}: {first.reason}"
        )
    return kept, refused


def trajectory_of(
    calls: Sequence[ModelCall],
    reward: float | None,
    *,
    rollout_id: str | None = None,
    group_id: str | None = None,
    step_rewards: Mapping[str, float] | None = None,
    with_observations: bool = False,
    with_actions: bool = True,
    components: Mapping[str, float | None] | None = None,
    parents: Mapping[str, str] | None = None,
    is_truncated: bool = False,
) -> Trajectory:
    """The steps of one rollout: its calls by the trained policy that came to an end, in order.

    Args:
        calls: All calls of the rollout.
        reward: Of the outcome; None if nobody gave one.
        rollout_id: Needed only where no call names it.
        group_id: Rollouts that it is compared with.
        step_rewards: call_id -> reward of that step.
        with_observations: Whether steps know what the policy saw, for anchors by similarity.
        with_actions: Whether steps know what was done, for terms that compare actions.
        components: The outcome's parts by name.
        parents: call_id -> call that it goes on from, where that is not the one before it.
        is_truncated: Whether it was cut off.
    """
    given = step_rewards or {}
    steps = [
        Step(
            call.call_id,
            index,
            anchor=anchor_of(call),
            reward=given.get(call.call_id),
            tokens=_sampled_tokens(call),
            observation=observation_of(call) if with_observations else None,
            role=call.agent_name,
            action=action_of(call) if with_actions else None,
            parent=(parents or {}).get(call.call_id),
        )
        for index, call in enumerate(in_order(calls))
        if acts(call)
    ]
    name = rollout_id or next((_rollout_of(call) for call in calls), "")
    return Trajectory(name, group_id, reward, steps, components or {}, is_truncated=is_truncated)


def _sampled_tokens(call: ModelCall) -> int | None:
    ids = [choice.sampled_token_ids for choice in call.choices]
    return sum(len(each) for each in ids if each is not None) if ids and None not in ids else None


def transitions(
    tree: CallTree, advantages: Mapping[str, float | None] | None, *, group_id: str | None
) -> list[Transition]:
    """Rows of one rollout: one for every path from root to leaf that has something to train.

    Args:
        tree: Of one attempt of one rollout.
        advantages: call_id -> advantage; a call that is absent or None is context only. None: every call of
            the trained policy is trained with advantage 1, which is plain cloning.
        group_id: Copied to the rows.

    Returns:
        Rows whose `loss_weight` is 1 / (trained tokens of the rollout): right for this rollout alone.
        `weigh` sets it for a batch.

    A path whose calls were sampled at different temperatures gives one row per temperature; a token that
    several paths share is trained in the first of them. Tokens behind the last trained one are cut off.
    """
    rows: list[Transition] = []
    done: set[int] = set()
    acting, shown = acting_nodes(tree), set[int]()
    for path in tree.paths():
        fresh = [node for node in path if node.index not in done and _advantage(node, advantages) is not None]
        done.update(node.index for node in fresh)
        by_temperature: dict[float, list[CallNode]] = {}
        for node in fresh:
            by_temperature.setdefault(_temperature(node.call), []).append(node)
        for temperature, nodes in by_temperature.items():
            observations = observation_mask(tree, path, acting, nodes[-1].length, shown)
            rows.append(_row(nodes, advantages, group_id, temperature, observations))
    return weigh(rows)


def acting_nodes(tree: CallTree) -> frozenset[int]:
    """Nodes in which the trained policy acts."""
    return frozenset(node.index for node in tree.nodes if untrained_because(node.call) is None)


def informative(rows: Sequence[Transition]) -> list[Transition]:
    """Rows with an advantage other than 0; others say nothing. Weigh again if N should shrink with them."""
    return [row for row in rows if np.any(row.advantages[row.action_mask] != 0.0)]


def row_to_json(row: Transition) -> dict[str, Any]:
    """A row as a JSON object; null where a value has no meaning (context) or is not known."""
    mask = row.action_mask.tolist()
    logprobs = [value if np.isfinite(value) else None for value in row.behavior_logprobs.tolist()]
    versions = [version if version >= 0 else None for version in row.policy_versions.tolist()]
    return {
        "rollout_id": row.rollout_id,
        "attempt": row.attempt,
        "group_id": row.group_id,
        "grade": row.grade,
        "temperature": row.temperature,
        "loss_weight": row.loss_weight,
        "segments": [
            {
                "call_id": segment.call_id,
                "span_id": segment.span_id,
                "step_index": segment.step_index,
                "start": segment.start,
                "stop": segment.stop,
            }
            for segment in row.segments
        ],
        "token_ids": row.token_ids.tolist(),
        "action_mask": mask,
        "behavior_logprobs": logprobs,
        "policy_versions": versions,
        "advantages": [
            a if trained else None for a, trained in zip(row.advantages.tolist(), mask, strict=True)
        ],
    }


def _advantage(node: CallNode, advantages: Mapping[str, float | None] | None) -> float | None:
    if untrained_because(node.call) is not None:
        return None
    return 1.0 if advantages is None else advantages.get(node.call.call_id)


def _temperature(call: ModelCall) -> float:
    temperature = call.sampling.get("temperature")
    return 1.0 if temperature is None else float(temperature)


def _rollout_of(call: ModelCall) -> str:
    return call.rollout_id or call.trace_id


def _row(
    nodes: Sequence[CallNode],
    advantages: Mapping[str, float | None] | None,
    group_id: str | None,
    temperature: float,
    observations: NDArray[np.bool_],
) -> Transition:
    """One row that trains these nodes of one path; the last of them holds all the tokens."""
    token_ids = nodes[-1].token_ids
    length = len(token_ids)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    values = np.zeros(length, dtype=np.float64)
    segments = []
    for node in nodes:
        start, stop = node.prompt_length, node.length
        mask[start:stop] = True
        values[start:stop] = _advantage(node, advantages)
        behavior = node.choice.logprobs
        if behavior is not None and len(behavior) == stop - start:
            given = np.asarray(behavior, dtype=np.float32)
            logprobs[start:stop] = np.where(given == MISSING_LOGPROB, np.nan, given)
        if node.choice.policy_versions is not None and len(node.choice.policy_versions) == stop - start:
            versions[start:stop] = node.choice.policy_versions
        segments.append(CallSegment(node.call.call_id, node.call.span_id, node.step_index, start, stop))
    call = nodes[0].call
    return Transition(
        rollout_id=_rollout_of(call),
        attempt=call.attempt,
        group_id=group_id,
        segments=tuple(segments),
        token_ids=token_ids,
        action_mask=mask,
        behavior_logprobs=logprobs,
        policy_versions=versions,
        advantages=values,
        loss_weight=0.0,
        grade=str(worst(node.call.grade for node in nodes)),
        temperature=temperature,
        observation_mask=observations,
    )
