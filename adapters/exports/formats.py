"""Which format a row of an export is in: the first of the list that knows it.

A format is one file in this folder and one row here. Its three functions are pure functions of one row;
they don't raise: a row that can't be read gives nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spangrad.adapters.exports import agent_lightning, langfuse, langsmith, mlflow, phoenix, plain_chat
from spangrad.adapters.exports.score import Score
from spangrad.store.records import Span

Row = Mapping[str, Any]
"""One row: a JSON object, or a line of a table."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format of exports."""

    name: str
    """What reports call it: `plain_chat`."""
    is_row: Callable[[Row], bool]
    """Whether a row is of this format."""
    spans_of: Callable[[Row], Iterator[Span]]
    """Spans that a row tells of; none for a row of scores."""
    scores_of: Callable[[Row], Iterator[Score]]
    """Scores that a row tells of."""


FORMATS: Final[tuple[Format, ...]] = (
    Format("langfuse", langfuse.is_row, langfuse.spans_of, langfuse.scores_of),
    Format("langsmith", langsmith.is_row, langsmith.spans_of, langsmith.scores_of),
    Format("mlflow", mlflow.is_row, mlflow.spans_of, mlflow.scores_of),
    Format("phoenix", phoenix.is_row, phoenix.spans_of, phoenix.scores_of),
    Format("agent_lightning", agent_lightning.is_row, agent_lightning.spans_of, agent_lightning.scores_of),
    Format("plain_chat", plain_chat.is_row, plain_chat.spans_of, plain_chat.scores_of),
)
"""A row of a system that wraps others, before those: plain chat is what is left."""


def format_of(row: Row) -> Format | None:
    """The format of a row; None if nobody here knows it."""
    return next((each for each in FORMATS if each.is_row(row)), None)
