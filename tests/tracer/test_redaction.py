"""What must not leave the process does not: rules, places, and what becomes of the call."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import spangrad
from spangrad.adapters.model_call import Grade
from spangrad.errors import ConfigError
from spangrad.tracer import conventions as c
from spangrad.tracer.redaction import (
    FAILED,
    IDS,
    RULES,
    Remembered,
    default,
    emails,
    remembering,
    rule_of,
    secrets,
)
from spangrad.tracer.runtime import active
from spangrad.tracer.span_size import cut
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer
from tests.tracer.wire.exchange import HI, choice, completion, exchange, model_call, model_calls, written

KEY = "sk-proj-abcdefghijklmnop1234567890"
Finish = Callable[[], list[Recorded]]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"use {KEY}.", "use [redacted: api key]."),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted: api key]"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "[redacted: api key]"),
        ("AIzaSyA-abcdefghijklmnopqrstuvwxyz01234", "[redacted: api key]"),
        ("Authorization: Bearer abc.def-0123456789", "Authorization: Bearer [redacted: token]"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl", "[redacted: token]"),
        ("https://h/v1?api-key=0123456789abcdef&x=1", "https://h/v1?api-key=[redacted: secret]&x=1"),
        ('{"password": "correct horse"}', '{"password": "[redacted: secret]"}'),
        ("https://h/a.png?x=1&sig=abcdefgh%3D", "https://h/a.png?x=1&sig=[redacted: secret]"),
        (r"{\"api_key\": \"0123456789\"}", r"{\"api_key\": \"[redacted: secret]\"}"),
        ("postgres://me:hunter2@db/x", "postgres://[redacted: password]@db/x"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nbye",
            "[redacted: private key]\nbye",
        ),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut", "[redacted: private key]"),
    ],
)
def test_what_looks_like_a_key_is_taken_out(text: str, clean: str) -> None:
    assert secrets(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "the sk-learn-compatible-estimators package",
        "risk-based-decision-1234567890",
        "the bearer of this letter",
        "    sig = inspect.signature(function)",
        '    api_key = os.environ["THE_KEY"]',
        "the password: somebody else has it",
        "tokens: 12345678",
        "see https://h/a?page=12345678",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert default(text) == text


@pytest.mark.parametrize("piece", ["sk-", "eyJ" + "a-" * 10, "-----BEGIN ", "password ", "://a", "x@a."])
def test_text_that_begins_like_a_key_again_and_again_takes_no_longer(piece: str) -> None:
    text = piece * (60_000 // len(piece))
    start = time.process_time()
    default(text)
    assert time.process_time() - start < 1.0  # 60 KB; 0.02 s of prose


def test_addresses_are_taken_out() -> None:
    assert emails("mail a.b+c@mail.example.org now") == "mail [redacted: e-mail] now"


def test_a_setting_means_a_rule_or_is_refused() -> None:
    own: Callable[[str], str] = str.upper
    assert [rule_of(given) for given in (None, False, "0", "", "off")] == [None] * 5
    assert [rule_of(given) for given in (True, "1", "default")] == [default] * 3
    assert [rule_of(name) for name in RULES] == list(RULES.values())
    assert rule_of(own) is own
    for wrong in ("everything", 7):
        with pytest.raises(ConfigError, match="is no rule"):
            rule_of(wrong)  # type: ignore[arg-type]


def hide(text: str) -> str:
    return text.replace("Oslo", "[city]")


TOOL = {"type": "function", "function": {"name": "Oslo", "parameters": {"title": "Oslo"}}}
CALL = {"id": "Oslo-1", "type": "function", "function": {"name": "Oslo", "arguments": '{"city":  "Oslo"}'}}
ASK = {
    "model": "policy",
    "tools": [TOOL],
    "user": "Oslo's mayor",
    "stop": ["Oslo"],
    "messages": [
        {"role": "system", "content": "You live in Oslo."},
        {"role": "user", "content": [{"type": "text", "text": "Oslo?"}]},
        {"role": "assistant", "content": None, "reasoning": "Oslo!", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "Oslo-1", "content": "Oslo is dry"},
    ],
}
REPLY = completion(choice("In Oslo.", token_ids=[4, 5]), prompt_token_ids=[1, 2])


def redacted(request: Any, reply: Any, rule: Callable[[str], str] = hide, **more: Any) -> dict[str, Any]:
    from spangrad.tracer.redaction import redacted_span

    return written(redacted_span(exchange(request, reply, **more), rule))


def test_every_text_of_request_and_reply_goes_through_the_rule_and_names_stay() -> None:
    attributes = redacted(ASK, REPLY)
    assert "Oslo" not in json.dumps([attributes[c.OUTPUT_MESSAGES], attributes[c.REQUEST_EXTRA]])
    assert list(attributes[c.REQUEST_STOP]) == ["[city]"]
    assert attributes[c.TOOL_DEFINITIONS] == [TOOL]
    system, user, assistant, result = attributes[c.INPUT_MESSAGES]
    assert system["parts"] == [{"type": "text", "content": "You live in [city]."}]
    assert user["parts"] == [{"type": "text", "content": "[city]?"}]
    reasoning, called = assistant["parts"]
    assert reasoning["content"] == "[city]!"
    assert called == {"type": "tool_call", "id": "Oslo-1", "name": "Oslo", "arguments": '{"city":  "[city]"}'}
    assert result["parts"][0]["response"] == "[city] is dry"
    assert set(attributes[c.REDACTED]) >= {c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.REQUEST_EXTRA}


def test_ids_that_would_spell_the_text_out_again_are_dropped_and_named() -> None:
    attributes = redacted(ASK, REPLY)
    assert not [name for name in attributes if "token_ids" in name or "logprobs" in name]
    assert set(attributes[c.DROPPED]) == {c.PROMPT_TOKEN_IDS, c.SAMPLED_TOKEN_IDS}


def test_ids_beside_which_there_is_no_text_are_dropped() -> None:
    request = {"model": "policy", "prompt": [1, 2]}
    reply = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop", "token_ids": [4]}]}
    attributes = redacted(request, reply | {"prompt_token_ids": [1, 2]}, route="completions")
    assert c.PROMPT_TOKEN_IDS not in attributes
    assert "no text to look at" in attributes[c.DROPPED][c.PROMPT_TOKEN_IDS]


def test_a_prompt_of_ids_is_dropped_from_the_request_too() -> None:
    reply = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
    alone = redacted({"model": "policy", "prompt": [1, 2]}, reply, route="completions")
    assert alone[c.REQUEST_EXTRA] == {"prompt": IDS}
    beside_text = redacted(ASK | {"prompt_token_ids": [1, 2]}, REPLY)
    assert beside_text[c.REQUEST_EXTRA]["prompt_token_ids"] == IDS
    nothing_found = redacted(HI | {"prompt_token_ids": [1, 2]}, completion())
    assert nothing_found[c.REQUEST_EXTRA] == {"prompt_token_ids": [1, 2]}


def test_objects_inside_of_a_part_are_all_text() -> None:
    found = {"type": "Oslo", "id": "Oslo", "role": "mayor of Oslo", "signature": "Oslo"}
    search = {"type": "file_search_call", "id": "fs-1", "results": [found]}
    request = {"model": "policy", "input": [search]}
    reply = {"status": "completed", "output": [search]}
    attributes = redacted(request, reply, route="responses")
    for name in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        (part,) = attributes[name][0]["parts"]
        assert (part["type"], part["id"]) == ("file_search_call", "fs-1")
        assert "Oslo" not in json.dumps(part)


def test_a_redacted_call_trains_nothing_and_says_why() -> None:
    call = model_call(ASK, REPLY, rule=hide)
    assert call.grade is Grade.UNUSABLE
    assert f"text was redacted: {c.INPUT_MESSAGES}" in call.grade_reasons
    assert call.prompt_token_ids is None


def test_a_call_in_which_nothing_is_found_is_as_it_was() -> None:
    span = exchange(HI, completion(choice(token_ids=[4]), prompt_token_ids=[1, 2]))
    (call,) = model_calls(span, rule=hide)
    assert call.grade is Grade.IDS
    assert c.REDACTED not in redacted(HI, completion())


@pytest.mark.parametrize("rule", [lambda text: 1 / 0, lambda text: None])
def test_text_that_a_rule_fails_on_is_replaced_and_never_sent(
    rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        attributes = redacted(ASK, REPLY, rule)
    assert attributes[c.OUTPUT_MESSAGES][0]["parts"] == [{"type": "text", "content": FAILED}]
    assert "mayor" not in json.dumps(attributes, default=str)


def test_a_key_that_a_server_repeats_in_its_error_is_blanked_without_any_rule() -> None:
    body = {"error": {"message": f"Incorrect API key provided: {KEY}", "type": "invalid"}}
    span = exchange(HI, body, status=401)
    assert span.status.description is not None
    assert KEY not in span.status.description
    assert "[redacted: api key]" in span.status.description


def test_a_key_in_the_reason_of_a_failure_is_blanked_without_any_rule(tmp_path: Path) -> None:
    spangrad.init(store=tmp_path / "store.duckdb")
    with spangrad.rollout() as rollout:
        rollout.fail(f"refused with {KEY}")
    spangrad.shutdown()
    (root,) = roots(spans_of_store(tmp_path / "store.duckdb"))
    assert KEY not in json.dumps([root.attributes, root.message])
    assert root[c.ERROR_TYPE] == "refused with [redacted: api key]"


def test_arguments_and_results_of_tool_spans_go_through_the_rule(tmp_path: Path) -> None:
    spangrad.init(store=tmp_path / "store.duckdb", redact=hide)
    running = active()
    assert running is not None
    given = {
        c.TOOL_NAME: "Oslo",
        "gen_ai.tool.call.arguments": '{"Oslo": ["Oslo", 1]}',
        "gen_ai.tool.call.result": "Oslo is dry",
    }
    running.start_span("execute_tool", None, given).end()
    spangrad.shutdown()
    (span,) = spans_of_store(tmp_path / "store.duckdb")
    assert span[c.TOOL_NAME] == "Oslo"
    assert span.json("gen_ai.tool.call.arguments") == {"[city]": ["[city]", 1]}
    assert span["gen_ai.tool.call.result"] == "[city] is dry"


def ask(model: ModelServer, text: str) -> None:
    with openai.OpenAI(base_url=model.url, api_key=KEY, max_retries=0) as agent:
        agent.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": text}],
            extra_body={"return_token_ids": True},
        )


def raw_spool(tmp_path: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (tmp_path / "store.duckdb.spool").iterdir())


def test_nothing_is_written_in_clear(model: ModelServer, tmp_path: Path) -> None:
    spangrad.init(store=tmp_path / "store.duckdb", redact=lambda text: text.replace("Oslo", "-"))
    with pytest.raises(RuntimeError), spangrad.rollout() as rollout:
        ask(model, "Hello Oslo")
        rollout.reward(1.0, explanation="Oslo was named")
        raise RuntimeError("Oslo is closed")
    spangrad.shutdown()
    assert b"Oslo" not in raw_spool(tmp_path)
    spans = spans_of_store(tmp_path / "store.duckdb")
    (call,), (root,) = calls(spans), roots(spans)
    assert call.prompt() == "Hello -"
    assert c.PROMPT_TOKEN_IDS not in call.attributes
    assert root.message == "- is closed"
    named = root.json(c.REDACTED)
    assert {c.REWARD_EXPLANATION, "exception.message", "exception.stacktrace", "status"} <= set(named)


def test_keys_of_headers_urls_and_exceptions_are_not_recorded_without_any_rule(
    model: ModelServer, recorded: Finish, tmp_path: Path
) -> None:
    import httpx

    url = f"{model.url}/chat/completions?api-key={KEY}"
    body = {"model": "policy", "messages": [{"role": "user", "content": "FAIL"}]}
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
    with pytest.raises(httpx.HTTPStatusError), spangrad.rollout(), httpx.Client() as agent:
        agent.post(url, json=body, headers=headers).raise_for_status()
    assert spangrad.flush()
    assert KEY.encode() not in raw_spool(tmp_path)
    (root,) = roots(recorded())
    assert "[redacted: " in root.message


def test_the_environment_turns_it_on(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANGRAD_REDACT", "1")
    spangrad.init(store=tmp_path / "store.duckdb")
    ask(model, f"Hello a@b.example and {KEY}")
    spangrad.shutdown()
    (call,) = calls(spans_of_store(tmp_path / "store.duckdb"))
    assert call.prompt() == "Hello [redacted: e-mail] and [redacted: api key]"


def test_a_rule_that_nobody_knows_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAD_REDACT", "sometimes")
    with pytest.raises(ConfigError, match="sometimes"):
        spangrad.init(store=tmp_path / "store.duckdb")
    assert not (tmp_path / "store.duckdb.spool").exists()


def test_a_program_under_spangrad_run_can_still_say_what_to_redact(
    model: ModelServer, recorded: Finish
) -> None:
    spangrad.init(redact=lambda text: text.replace("Oslo", "-"))  # the launcher's init came first
    ask(model, "Hello Oslo")
    (call,) = calls(recorded())
    assert call.prompt() == "Hello -"


def test_a_rule_is_asked_once_about_texts_that_come_again() -> None:
    asked: list[str] = []

    def rule(text: str) -> str:
        asked.append(text)
        return text.replace("secret", "***")

    texts = [f"{number} secret " * 20 for number in range(4)]
    remembered = Remembered(rule, max_chars=2 * len(texts[0]) * 3)
    assert [remembered(text) for text in [*texts[:3], *texts[:3]]] == [rule(text) for text in texts[:3] * 2]
    assert asked == texts[:3] * 3  # once by `remembered`, twice above
    asked.clear()
    remembered(texts[3])  # no room for four
    remembered(texts[0])
    assert asked == [texts[3], texts[0]]


def test_texts_are_cut_between_words() -> None:
    assert cut("one two", 7) == "one two"
    assert cut("one two", 6) == cut("one two", 4) == cut("one two", 3) == "one"
    assert cut("one", 2) == ""
    assert cut("x" * 1000, 600) == "x" * 400
    secret = "sk-" + "a1b2c3d4" * 4
    for limit in range(5, 60):
        assert "sk-" not in cut(f"the key is {secret} and more", limit) or limit >= 11 + len(secret)


def test_a_rule_of_ones_own_is_asked_each_time() -> None:
    hidden: set[str] = set()

    def rule(text: str) -> str:
        return "***" if hidden else text

    asked = remembering(rule)
    assert asked is rule and remembering(None) is None
    assert isinstance(remembering(default), Remembered)


def test_a_rule_that_wants_to_end_the_process_costs_only_the_text(model: ModelServer, tmp_path: Path) -> None:
    def rule(text: str) -> str:
        raise SystemExit(text)

    spangrad.init(store=tmp_path / "s", redact=rule)
    with spangrad.rollout():
        openai.OpenAI(base_url=model.url, api_key="none").chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a secret"}]
        )
    assert spangrad.shutdown()
    (call,) = calls(spans_of_store(tmp_path / "s"))
    assert FAILED in str(call.attributes) and "secret" not in str(call.attributes)
