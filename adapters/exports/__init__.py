"""Exports of other systems: rows out of their files -> spans and scores. See ../README.md."""

from spangrad.adapters.exports.formats import FORMATS, Format, format_of
from spangrad.adapters.exports.score import Score

__all__ = ["FORMATS", "Format", "Score", "format_of"]
