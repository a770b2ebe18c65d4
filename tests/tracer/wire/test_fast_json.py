"""`loads` gives what the standard library gives."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.tracer.wire.fast_json import loads

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(VALUES, st.booleans())
def test_it_gives_what_the_standard_library_gives(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert repr(loads(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", [b"", b"{", b"[1,]", b'"\xff"', b"nul", b"[" * 100_000])
def test_what_is_no_json_fails_as_it_does(text: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        loads(text)
