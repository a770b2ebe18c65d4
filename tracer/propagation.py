"""Which servers are told of rollouts, and how.

Headers that name rollouts and traces leave the machine or its private network only for hosts that the
user named. Names are never resolved: a host is private if it is `localhost` or an IP address that says so.
"""

import functools
import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.trace import SpanContext, TraceFlags

SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
"""Of every span of ours."""
_IDS: Final = "00-%032x-%016x-"
SAMPLED_TRACEPARENT: Final = f"{_IDS}{SAMPLED:02x}".encode()
"""The W3C header of a span of ours, for `%` with its trace id and span id."""


class Destinations:
    """Hosts that may get our headers: loopback, private addresses, and those that were named."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        """`hosts`: host names, URLs, or `*.domain` for a domain and everything below it."""
        self._exact: set[str] = set()
        self._domains: tuple[str, ...] = ()
        for host in hosts:
            name = (urlsplit(host if "//" in host else f"//{host}").hostname or "").lower()
            if name.startswith("*."):
                self._exact.add(name[2:])
                self._domains += (name[1:],)
            elif name:
                self._exact.add(name)
        self._known: dict[str, bool] = {}

    def allow(self, host: str) -> bool:
        """Whether `host` may be told."""
        known = self._known.get(host)
        if known is None:
            if len(self._known) > 1000:
                self._known.clear()
            known = self._known[host] = self._decide(host.lower().rstrip("."))
        return known

    def _decide(self, host: str) -> bool:
        if host in self._exact or host.endswith(self._domains):
            return True
        if host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or address.is_private


def traceparent(context: SpanContext) -> str:
    """The W3C header that makes `context` the parent of what the server does."""
    return f"{_IDS % (context.trace_id, context.span_id)}{context.trace_flags:02x}"


def parse_traceparent(value: str) -> SpanContext | None:
    """Undo `traceparent`; None if `value` is not one."""
    parts = value.split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return None
    try:
        flags = TraceFlags(int(parts[3], 16))
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), is_remote=True, trace_flags=flags)
    except ValueError:
        return None
    return context if context.is_valid else None


@functools.lru_cache(maxsize=256)
def header_value(text: str) -> str:
    """`text` as a header can hold it: printable ASCII, the rest as `?`."""
    return "".join(char if " " <= char <= "~" else "?" for char in text).strip()
