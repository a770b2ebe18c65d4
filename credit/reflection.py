"""Self-reflection: why an expert's action beats what else was tried in the same state.

Of early experience, arXiv:2510.08558: a model is shown the state, the expert's action and sampled
alternatives with what each of them led to; its rationale is put before the expert's action, and both are
cloned.

Knows calls and their messages; ids come from whoever renders the result (`credited_rows`'s `render`, or
`spangrad.trainer.learning.rendering`). Does not know which model thinks: a function is given.

Invariants:
* an alternative was sampled after the same messages (ids of tool calls aside) and did something else;
* what is reflected has no ids, logprobs or versions of its own, is of grade `text`, and says who wrote it;
* an expert's call without a reflection is in `left_out`, with its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from spangrad.adapters.call_tree import in_order
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.credit.anchors import history_keys
from spangrad.credit.transitions import Refused, untrained_because
from spangrad.errors import CreditError

REFLECTED: Final = "a rationale was put before the reply"
"""Beginning of the reason that a reflected call bears: `<this>: by <model>, frozen`."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What was done in a state, and what came of it."""

    call: ModelCall
    reply: Mapping[str, Any]
    """The message, OpenAI chat form."""
    next_messages: Sequence[Mapping[str, Any]]
    """What the environment answered; empty where the rollout ended, or nobody recorded it."""
    outcome: float | None
    """Return of its rollout; None: nobody scored it."""


@dataclass(frozen=True, slots=True)
class Rationale:
    """What a model says about a choice."""

    text: str
    model: str
    """Who wrote it: a frozen model, never the policy being trained."""


Reflect = Callable[[Tried, Sequence[Tried]], Rationale | None]
"""(the expert's, alternatives) -> why the first is better; None: nothing worth learning."""


@dataclass(frozen=True, slots=True)
class Reflections:
    """Expert calls whose replies begin with a rationale."""

    calls: Sequence[ModelCall]
    left_out: Sequence[Refused]


def reflected(
    experts: Mapping[str, Sequence[ModelCall]],
    others: Mapping[str, Sequence[ModelCall]],
    outcomes: Mapping[str, float | None],
    reflect: Reflect,
    *,
    place: Literal["reasoning", "content"] = "content",
    most: int = 3,
) -> Reflections:
    """Put a rationale before every expert action that has alternatives.

    Args:
        experts: rollout_id -> calls of rollouts to learn from.
        others: rollout_id -> calls of rollouts that were sampled in the same states; an expert's may be among
            them, and is no alternative to itself.
        outcomes: rollout_id -> return, reward units.
        reflect: Writes the rationales; called once for each state.
        place: Where the rationale goes: before the content, or into `reasoning`, for templates that have it.
        most: Alternatives that are shown for a state, those with the lowest outcomes first; 1 or more.

    Returns:
        Calls in the order of `experts`, to be rendered and cloned.

    Raises:
        CreditError: `most` is below 1, or a rationale says nothing or not who wrote it.
    """
    if most < 1:
        raise CreditError(f"most is {most!r}; expected 1 or more alternatives")
    tried: dict[bytes, list[Tried]] = {}
    for rollout, calls in others.items():
        for state, one in _tried(calls, outcomes.get(rollout)):
            tried.setdefault(state, []).append(one)
    made: list[ModelCall] = []
    left_out: list[Refused] = []
    for rollout, calls in experts.items():
        actions = _tried(calls, outcomes.get(rollout))
        acted = {one.call.call_id for _, one in actions}
        for call in calls:
            if call.call_id not in acted:
                why = untrained_because(call) or "no messages or no reply of it can be read"
                left_out.append(Refused(rollout, call.call_id, why))
        for state, one in actions:
            alternatives = _alternatives(one, tried.get(state, ()))[:most]
            rationale = reflect(one, alternatives) if alternatives else None
            if rationale is None:
                why = (
                    "nothing was written about it" if alternatives else "nothing else was tried in its state"
                )
                left_out.append(Refused(rollout, one.call.call_id, why))
            else:
                made.append(_with_rationale(one, rationale, place))
    return Reflections(made, left_out)


def _tried(calls: Sequence[ModelCall], outcome: float | None) -> list[tuple[bytes, Tried]]:
    """The policy's actions by state; the answer is what the first call that goes on from one was shown."""
    found = []
    acting = [
        call
        for call in in_order(calls)
        if untrained_because(call) is None and call.grade is not Grade.UNUSABLE
    ]
    keys = [history_keys(call.messages) for call in acting]
    for k, call in enumerate(acting):
        if not call.choices or not call.messages:
            continue
        reply = {**call.choices[0].message, "role": "assistant"}
        at, said = len(call.messages), history_keys([*call.messages, reply])[-1]
        following = (
            later.messages[at + 1 :]
            for later, its_keys in zip(acting[k + 1 :], keys[k + 1 :], strict=True)
            if len(its_keys) > at and its_keys[at] == said
        )
        found.append((keys[k][-1], Tried(call, reply, next(following, ()), outcome)))
    return found


def _alternatives(expert: Tried, tried: Sequence[Tried]) -> list[Tried]:
    """What else was done, each thing once, the worst first."""
    known = {history_keys([expert.reply])[-1]}
    found = []
    for one in tried:
        if (said := history_keys([one.reply])[-1]) not in known:
            known.add(said)
            found.append(one)
    return sorted(found, key=lambda one: float("-inf") if one.outcome is None else one.outcome)


def _with_rationale(expert: Tried, rationale: Rationale, place: Literal["reasoning", "content"]) -> ModelCall:
    call = expert.call
    if not rationale.text.strip() or not rationale.model:
        raise CreditError(
            f"call {call.call_id!r}: the rationale is {rationale.text!r} by {rationale.model!r}; expected "
            "some text and the model that wrote it"
        )
    message = dict(call.choices[0].message)
    if place == "reasoning":
        message["reasoning"] = rationale.text
    else:
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise CreditError(
                f"call {call.call_id!r}: the reply's content is not text; use place='reasoning'"
            )
        message["content"] = f"{rationale.text}\n\n{content}" if content else rationale.text
    choice = Choice(message, finish_reason=call.choices[0].finish_reason)
    return replace(
        call,
        grade=Grade.TEXT,
        grade_reasons=(*call.grade_reasons, f"{REFLECTED}: by {rationale.model}, frozen"),
        choices=(choice,),
        prompt_token_ids=None,
    )
