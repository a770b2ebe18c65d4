"""What a tokenizer makes of calls before they become rows: ids of text, and a word on ids that are there.

Knows that something gives calls their ids, and what it tells of them; knows no tokenizer.

Invariants:
* a call that it refuses has no row, and is refused with its reason;
* whatever rendering altered is counted by kind, calls and not rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from spangrad.adapters.call_tree import CallNode, CallTree
from spangrad.adapters.datasets.conversation import running_keys
from spangrad.adapters.grading import TOOLS_UNKNOWN, reason_kind
from spangrad.adapters.model_call import Grade, ModelCall
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import Refused, untrained_because

REWRITTEN: Final = "the chat template rewrites history: calls go on from earlier ones in words, not tokens"
RENDERED: Final = "rendered from text"
"""Whose ids those of a text-grade call are: the tokenizer's that rendered it."""
Render = Callable[[ModelCall], ModelCall]
"""Gives a text-grade call its token ids and checks those of others; raises GradeError (a ValueError) where
it can't. What it altered is in the `grade_reasons` of what it returns, beside those that were there."""


def rendered(
    call: ModelCall, render: Render | None, refused: list[Refused], notes: Counter[str]
) -> ModelCall | None:
    """The call with ids that may be trained; None: it is refused."""
    if render is None or call.grade is Grade.UNUSABLE or untrained_because(call) is not None:
        return call
    try:
        found = render(call)
    except ValueError as error:
        what = "can't be rendered: " if call.grade is Grade.TEXT else ""
        reason = f"{what}{error}"
        refused.append(
            Refused(call.rollout_id, call.call_id, reason, kind=f"{what}{reason_kind(str(error))}")
        )
        return None
    notes.update({reason_kind(why) for why in found.grade_reasons if why not in call.grade_reasons})
    return found


def with_unknown_tools(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls of a rollout; a recorder that left tools out of one is taken to have left them out of all."""
    left_out = {call.dialect for call in calls if _lacks_tools(call)}
    why = f"{TOOLS_UNKNOWN}: other calls of its rollout used some"
    return [
        replace(call, grade_reasons=(*call.grade_reasons, why))
        if call.dialect in left_out and call.grade is Grade.TEXT and not call.tools and not _lacks_tools(call)
        else call
        for call in calls
    ]


def count_rewritten(tree: CallTree) -> int:
    """Text-grade calls whose messages begin with an earlier one's and its reply, and whose tokens do not."""
    replies: dict[bytes, set[int]] = {}
    forked: set[str] = set()
    for node in tree.nodes:
        if node.call.grade is not Grade.TEXT:
            continue
        keys = running_keys([*node.call.messages, {**node.choice.message, "role": "assistant"}])
        known = next((replies[key] for key in reversed(keys[:-1]) if key in replies), None)
        if known is not None and known.isdisjoint(_above(tree, node)):
            forked.add(node.call.call_id)
        replies.setdefault(keys[-1], set()).add(node.index)
    return len(forked)


def models_of_row(row: Transition, calls: Mapping[str, ModelCall]) -> list[str]:
    """Whose token ids the trained calls of a row hold: models, or `RENDERED`."""
    own = (calls[segment.call_id] for segment in row.segments)
    return sorted({RENDERED if c.grade is Grade.TEXT else c.model or "not known" for c in own})


def row_models(rows: Iterable[Transition], calls: Mapping[str, ModelCall]) -> Counter[str]:
    """`models_of_row` -> rows. Several: ids are mixed, which is right only in one vocabulary."""
    return Counter(model for row in rows for model in models_of_row(row, calls))


def _lacks_tools(call: ModelCall) -> bool:
    return any(reason_kind(reason) == TOOLS_UNKNOWN for reason in call.grade_reasons)


def _above(tree: CallTree, node: CallNode) -> list[int]:
    above: list[int] = []
    while (parent := node.parent) is not None:
        above.append(parent)
        node = tree.nodes[parent]
    return above
