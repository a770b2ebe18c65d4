"""Span dialects: each file reads the model calls of one family of recorders. See ../README.md."""

from spangrad.adapters.dialects.recognition import DIALECTS, NO_DIALECT, recognise

__all__ = ["DIALECTS", "NO_DIALECT", "recognise"]
