"""Score: what a foreign system says that a trace, or one span of it, was worth."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """One score, feedback or evaluation as it was exported."""

    trace_id: str | None
    """32 hex digits, as in the spans of the same export. None: for a whole session."""
    span_id: str | None
    """16 hex digits. None: for the whole trace."""
    name: str
    value: float | None
    """None: only a label was given."""
    label: str | None
    explanation: str | None
    author: str | None
    """Who gave it, as the export tells. The store goes by the key of whoever brings it in."""
    time_ns: int | None
    """Unix time, ns; None: not told."""
    source: str
    """Format that it came in."""
    session_id: str | None = None
    """The session that it is for, where it is for no trace."""
    project: str | None = None
    """The project that the session is of."""
