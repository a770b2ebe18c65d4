"""What the engine is asked is what the client asked, and the fields that were added."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.tracer.gateway.rewrite import Route, renamed_request, upstream_request
from spangrad.tracer.wire.repeated import Readers

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(["model", "messages", "logprobs", "return_token_ids", "n"]), VALUES)


@given(
    BODIES, st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-8-sig"]), st.sampled_from(["", " \n"])
)
def test_only_what_is_added_differs(body: dict[str, Any], encoding: str, space: str) -> None:
    raw = (space + json.dumps(body) + space).encode(encoding)
    request = upstream_request(raw, Route.CHAT, {"*": "served"})
    sent = json.loads(request.content)
    assert request.body == body
    assert sent["model"] == "served" and sent["return_token_ids"] is True
    kept = body.keys() - {"model", "return_token_ids", "logprobs"}
    assert {name: sent[name] for name in kept} == {name: body[name] for name in kept}
    assert sent["logprobs"] == (body.get("logprobs") or True)


def test_the_clients_bytes_stay_where_only_new_fields_come() -> None:
    raw = b'{ "messages" : [{"role":"user","content":"\\u00e9 1E5"}],"big":123456789012345678901234 }\n'
    content = upstream_request(raw, Route.CHAT, {}).content
    assert content == raw.rstrip()[:-1] + b',"return_token_ids":true,"logprobs":true}'
    assert renamed_request(raw, {}).content is raw


@pytest.mark.parametrize("raw", [b"", b"no json", b"[1]", b'"text"', b"7", b"[" * 100_000, b"{}"])
def test_what_is_no_request_is_passed_on(raw: bytes) -> None:
    content = upstream_request(raw, Route.CHAT, {}).content
    assert content == (b'{"return_token_ids":true,"logprobs":true}' if raw == b"{}" else raw)
    assert upstream_request(raw, Route.CHAT, {}, Readers().of(None).read).content == content


def test_readers_are_bounded_and_each_rollout_has_its_own() -> None:
    readers = Readers()
    first = readers.of("r-0")
    assert readers.of("r-0") is first
    for number in range(1, 200):
        readers.of(f"r-{number}")
    assert readers.of("r-0") is not first
