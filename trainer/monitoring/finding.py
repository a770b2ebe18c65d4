"""What a monitor found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A threshold that was passed."""

    value: float
    """In the unit of the threshold."""
    text: str
    """What was seen, as one part of a sentence, with its numbers."""
