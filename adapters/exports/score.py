"""Score: what a person or program thought of a trace or span, as an export tells it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """One score, feedback, annotation or assessment. `None` means that the export does not say."""

    trace_id: str | None
    """As on the spans of the export; None where only the span is named."""
    span_id: str | None
    """None: it is about the whole trace."""
    name: str
    value: float | None
    """A boolean is 1 or 0."""
    label: str | None = None
    """What was said in place of a number, or beside it."""
    explanation: str | None = None
    author: str | None = None
    """Who, as the system names it: a person's id, a model, a program."""
    time_ns: int | None = None
    source: str = ""
    """System and kind of author: `mlflow HUMAN`."""
