"""What of deleted history lies beside the store's file: spans put aside, journals nobody could read.

Knows `<store>.rejected` and the spool folder. Spooled records are in the store by then: opening it takes
them in.

Invariants: of a file that can be read only what goes is removed; one that can't be is removed whole if the
attribute's name and value stand in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spangrad.errors import StoreError
from spangrad.store.archive.erase import Selection
from spangrad.store.archive.folder import sync
from spangrad.store.archive.units import UNDATED_NS
from spangrad.store.encoding import encode_json
from spangrad.store.file_store import rejected_file, spool_folder
from spangrad.store.otlp import decode_request, encode_request
from spangrad.store.records import Span

Attributes = Sequence[tuple[str, str]]


def clean(store: Path, selection: Selection, attributes: Attributes, before_ns: int) -> int:
    """Remove what was put aside of deleted traces, of this attribute, or before this time (0: none).

    Returns how many spans, and files that can't be read, are gone.
    """
    count = _clean_rejected(rejected_file(store), selection, attributes, before_ns)
    for file in sorted(spool_folder(store).glob("*.bad")):
        if _stands_in(file.read_bytes(), attributes) or file.stat().st_mtime_ns < before_ns:
            file.unlink()
            count += 1
    return count


def waiting_files(store: Path) -> int:
    """How many files of processes that are recording now wait in the spool: nobody else can read those."""
    return sum(file.suffix in (".seg", ".journal") for file in spool_folder(store).glob("*"))


def _clean_rejected(file: Path, selection: Selection, attributes: Attributes, before_ns: int) -> int:
    if not file.exists():
        return 0
    content = file.read_bytes()
    try:
        spans, _ = decode_request(content)
    except StoreError:
        if _stands_in(content, attributes) or file.stat().st_mtime_ns < before_ns:
            file.unlink()
            return 1
        return 0
    gone = set(selection.traces)
    kept = [
        span
        for span in spans
        if span.trace_id not in gone
        and not UNDATED_NS <= max(span.start_ns, span.end_ns) < before_ns
        and not _has_any(span, attributes)
    ]
    if len(kept) < len(spans):
        new = file.with_name(file.name + ".tmp")
        new.write_bytes(encode_request(kept))
        sync(new)
        new.replace(file)
        if not kept:
            file.unlink()
        sync(file.parent)
    return len(spans) - len(kept)


def _stands_in(content: bytes, attributes: Attributes) -> bool:
    return any(name.encode() in content and value.encode() in content for name, value in attributes)


def _has_any(span: Span, attributes: Attributes) -> bool:
    places = (span.attributes, span.resource, span.scope_attributes, *(e.attributes for e in span.events))
    return any(_text(place[name]) == value for name, value in attributes for place in places if name in place)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else encode_json(value)
