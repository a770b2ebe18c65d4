"""Spans out of rows: undoes `compact.py`, byte for byte.

Knows how rows refer to other rows and to messages; gets both through two functions.
Invariant: the work for a rollout is linear in the size of what is returned.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import StoreError
from spangrad.store.encoding import decode_json, is_tag, untagged
from spangrad.store.records import Span, SpanEvent
from spangrad.store.tables.other import with_other

Row = Mapping[str, Any]
Ints = NDArray[np.int32]

BASE_COLUMNS: Final = (
    "trace_id",
    "span_id",
    "attributes",
    "prompt_base",
    "prompt_keep",
    "new_prompt_token_ids",
    "sampled_token_ids",
    "message_ids",
)


class Expander:
    """Rebuilds the attributes of a set of rows."""

    def __init__(
        self,
        rows: Sequence[Row],
        fetch_rows: Callable[[Sequence[str]], Iterable[Row]],
        fetch_messages: Callable[[Sequence[str]], Mapping[str, str]],
    ) -> None:
        """Load what the rows refer to, directly or through others."""
        self._rows: dict[str, Row] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        self._prompts: dict[str, Ints] = {}
        self._lists: dict[tuple[str, str], list[str]] = {}
        missing = self._add(rows)
        while missing:
            found = list(fetch_rows(sorted(missing)))
            if len(found) < len(missing):
                raise StoreError(
                    f"spans refer to spans that are gone: {sorted(missing)[:3]}; the file is damaged"
                )
            missing = self._add(found)
        wanted = {
            key
            for row in rows
            for name in self._arrays_of(row_key(row))
            for key in self._list(row_key(row), name)
        }
        self._messages = fetch_messages(sorted(wanted)) if wanted else {}

    def attributes(self, row: Row) -> dict[str, Any]:
        """All attributes of a span, as they came."""
        key = row_key(row)
        return {name: self._value(key, name, value) for name, value in self._documents[key].items()}

    def _add(self, rows: Iterable[Row]) -> set[str]:
        bases: set[str] = set()
        for row in rows:
            key = row_key(row)
            self._rows[key] = row
            document = self._documents[key] = json.loads(row["attributes"])
            if row["prompt_base"]:
                bases.add(row["prompt_base"])
            bases |= {
                value["$messages"]["base"]
                for value in document.values()
                if _has_tag(value, "$messages") and "base" in value["$messages"]
            }
        return bases - self._rows.keys()

    def _value(self, key: str, name: str, value: Any) -> Any:
        if _has_tag(value, "$messages"):
            separator = value["$messages"]["sep"]
            contents = self._messages
            return "[" + separator.join(contents[item] for item in self._list(key, name)) + "]"
        if _has_tag(value, "$column"):
            column = value["$column"]
            if column == "new_prompt_token_ids":
                return self._prompt(key).astype("<i4").tobytes()
            dtype = "<f4" if column == "sampled_logprobs" else "<i4"
            return np.asarray(self._rows[key][column], dtype).tobytes()
        return untagged(value)

    def _arrays_of(self, key: str) -> list[str]:
        return [name for name, value in self._documents[key].items() if _has_tag(value, "$messages")]

    def _prompt(self, key: str) -> Ints:
        for link in self._chain(key, lambda k: self._rows[k]["prompt_base"], self._prompts.__contains__):
            row = self._rows[link]
            new = np.asarray(row["new_prompt_token_ids"] or (), np.int32)  # None: only sampled ids known
            if base := row["prompt_base"]:
                sampled = self._rows[base]["sampled_token_ids"]
                whole = self._prompts[base]
                if row["prompt_keep"] > whole.size:
                    whole = np.concatenate([whole, np.asarray(sampled, np.int32)])
                new = np.concatenate([whole[: row["prompt_keep"]], new])
            self._prompts[link] = new
        return self._prompts[key]

    def _list(self, key: str, name: str) -> list[str]:
        def reference(link: str) -> dict[str, Any]:
            found: dict[str, Any] = self._documents[link][name]["$messages"]
            return found

        for link in self._chain(key, lambda k: reference(k).get("base"), lambda k: (k, name) in self._lists):
            found = reference(link)
            ids = list(self._rows[link]["message_ids"][found["from"] : found["from"] + found["new"]])
            if base := found.get("base"):
                ids = self._lists[base, name][: found["keep"]] + ids
            self._lists[link, name] = ids
        return self._lists[key, name]

    @staticmethod
    def _chain(key: str, base_of: Callable[[str], str | None], is_done: Callable[[str], bool]) -> list[str]:
        """Keys to rebuild, bases first."""
        chain: list[str] = []
        link: str | None = key
        while link and not is_done(link):
            chain.append(link)
            link = base_of(link)
        return chain[::-1]


def row_key(row: Row) -> str:
    """`trace_id-span_id`."""
    return f"{row['trace_id']}-{row['span_id']}"


def span_from_row(row: Row, attributes: Mapping[str, Any]) -> Span:
    """A span from its row and its rebuilt attributes."""
    span = Span(
        trace_id=row["trace_id"],
        span_id=row["span_id"],
        parent_span_id=row["parent_span_id"],
        name=row["name"],
        kind=row["kind"],
        start_ns=row["start_ns"],
        end_ns=row["end_ns"],
        status_code=row["status_code"],
        status_message=row["status_message"],
        scope=row["scope"],
        scope_version=row["scope_version"],
        attributes=attributes,
        resource=decode_json(row["resource"]),
        events=events_from_json(row["events"]),
        links=tuple(decode_json(row["links"])),
        trace_state=row["trace_state"],
        flags=row["flags"],
        dropped_attributes=row["dropped_attributes"],
        rollout_id=row["rollout_id"],
        attempt=row["attempt"],
        dropped_events=row["dropped_events"],
        dropped_links=row["dropped_links"],
        scope_attributes=decode_json(row["scope_attributes"]),
        schema_url=row["schema_url"],
        resource_schema_url=row["resource_schema_url"],
    )
    return span if row["other"] is None else with_other(span, row["other"])


def events_from_json(text: str) -> tuple[SpanEvent, ...]:
    """Events of a span from their column."""
    return tuple(SpanEvent(e["name"], e["time_ns"], e["attributes"], e["dropped"]) for e in decode_json(text))


def _has_tag(value: Any, tag: str) -> bool:
    return isinstance(value, dict) and is_tag(value) and tag in value
