"""spangrad.adapters: foreign formats -> graded model calls -> call trees. See README.md in this folder."""

from spangrad.adapters.accounts import account_unread
from spangrad.adapters.call_tree import CallNode, CallTree, build_tree, in_order
from spangrad.adapters.calls import call_to_json, calls_from_spans, calls_of
from spangrad.adapters.ingest import IngestReport, ingest
from spangrad.adapters.model_call import Choice, Grade, ModelCall, Purpose

__all__ = [
    "CallNode",
    "CallTree",
    "Choice",
    "Grade",
    "IngestReport",
    "ModelCall",
    "Purpose",
    "account_unread",
    "build_tree",
    "call_to_json",
    "calls_from_spans",
    "calls_of",
    "in_order",
    "ingest",
]
