"""Stored rollouts -> datasets that trainers read, each with a card. See `adapters/README.md`."""

from spangrad.adapters.datasets.conversation import Conversation, Exported
from spangrad.adapters.datasets.formats import FORMATS, Format, Refusal
from spangrad.adapters.datasets.selecting import Filters, Selection, read, select

__all__ = [
    "FORMATS",
    "Conversation",
    "Exported",
    "Filters",
    "Format",
    "Refusal",
    "Selection",
    "read",
    "select",
]
