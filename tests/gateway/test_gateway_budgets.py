"""A rollout's turns: counted by the gateway, ended by an ordinary reply, out of the agent's reach."""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.adapters.purpose import NO_TURN_LEFT
from spangrad.credit.pipeline import is_truncated
from spangrad.credit.transitions import acts
from spangrad.errors import ConfigError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import EngineConfig, GatewayConfig, running
from spangrad.tracer.gateway.budgets import Budgets
from tests.gateway.gateway_setup import GatewayFactory, Setup, body
from tests.gateway.stub_engine import StubEngine

TEXT = "I have no turns left."
OPERATOR = "sk-operator-0123456789"
CHAT = "/v1/chat/completions"
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def give(url: str, turns: int, *, rollout: str = "r-1", attempt: int = 0, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {more.pop('key')}"} if "key" in more else {}
    entry = {"rollout_id": rollout, "attempt": attempt, "turns": turns}
    asked = {"rollouts": [entry], "reply": TEXT, **more}
    return httpx.post(f"{url}/spangrad/budgets", json=asked, headers=headers)


def ask(url: str, prefix: str = "/rollout/r-1", headers: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}{prefix}{CHAT}", json=body("a b", **more), headers=headers)


def is_beyond(answer: httpx.Response) -> bool:
    answer.raise_for_status()
    return bool(answer.json()["choices"][0]["message"]["content"] == TEXT)


@contextmanager
def clients(url: str, prefix: str = "/rollout/r-1") -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    with (
        openai.OpenAI(base_url=f"{url}{prefix}/v1", api_key="k", max_retries=0) as gpt,
        anthropic.Anthropic(base_url=f"{url}{prefix}", api_key="k", max_retries=0) as claude,
    ):
        yield gpt, claude


def chat(gpt: openai.OpenAI, claude: anthropic.Anthropic, is_stream: bool) -> str:
    messages: Any = [{"role": "user", "content": "TOOL now"}]
    if is_stream:
        with gpt.chat.completions.stream(model="stub", messages=messages, tools=[TOOL]) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = (
            gpt.chat.completions.create(model="stub", messages=messages, tools=[TOOL]).choices[0].message
        )
    return "calls a tool" if message.tool_calls else str(message.content)


def completion(gpt: openai.OpenAI, claude: anthropic.Anthropic, is_stream: bool) -> str:
    if is_stream:  # the stub streams no text completions
        pieces = gpt.completions.create(model="stub", prompt="a b", stream=True)
        return "".join(piece.choices[0].text for piece in pieces)
    return gpt.completions.create(model="stub", prompt="a b").choices[0].text


def responses(gpt: openai.OpenAI, claude: anthropic.Anthropic, is_stream: bool) -> str:
    if is_stream:
        with gpt.responses.stream(model="stub", input="a b") as stream:
            return stream.get_final_response().output_text
    return gpt.responses.create(model="stub", input="a b").output_text


def messages(gpt: openai.OpenAI, claude: anthropic.Anthropic, is_stream: bool) -> str:
    asked: Any = {"model": "stub", "max_tokens": 9, "messages": [{"role": "user", "content": "a b"}]}
    if is_stream:
        with claude.messages.stream(**asked) as stream:
            return stream.get_final_text()
    (block,) = claude.messages.create(**asked).content
    return str(block.text)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", [chat, completion, responses, messages])
def test_real_clients_get_an_ordinary_reply_beyond_the_budget(
    gateway: Setup, route: Callable[..., str], is_stream: bool
) -> None:
    give(gateway.url, 0 if route is completion and is_stream else 1).raise_for_status()
    with clients(gateway.url) as sdks:
        said = [route(*sdks, is_stream) for _ in range(3)]
    reached = len(gateway.engine.requests)
    assert said[reached:] == [TEXT] * (3 - reached)
    assert TEXT not in said[:reached] and reached == (0 if route is completion and is_stream else 1)
    told = [span.attributes or {} for span in gateway.spans()]
    assert [names.SYNTHETIC in one for one in told] == [False] * reached + [True] * (3 - reached)
    for one in told[reached:]:
        assert one[names.SYNTHETIC] == names.NO_TURN_LEFT and one[names.PURPOSE] == "other"
        assert one[names.POLICY] == "frozen" and TEXT in one[names.OUTPUT_MESSAGES]  # type: ignore[operator]
        assert names.ENGINE not in one and names.SAMPLED_TOKEN_IDS not in one
        assert one[names.ROLLOUT_ID] == "r-1" and names.ERROR_TYPE not in one
        assert one.get(names.STREAM_COMPLETE) is (True if is_stream else None)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", [chat, completion, responses, messages])
def test_without_a_text_real_clients_get_an_error_that_they_do_not_try_again(
    gateway: Setup, route: Callable[..., str], is_stream: bool
) -> None:
    give(gateway.url, 0, reply=None).raise_for_status()
    with (
        clients(gateway.url) as (gpt, claude),
        pytest.raises((openai.PermissionDeniedError, anthropic.PermissionDeniedError)) as caught,
    ):
        route(gpt.with_options(max_retries=2), claude.with_options(max_retries=2), is_stream)
    assert "rollout 'r-1' has taken its 0 turns" in str(caught.value)
    (span,) = gateway.spans()
    assert span.attributes is not None and span.attributes[names.SYNTHETIC] == names.NO_TURN_LEFT
    assert gateway.engine.requests == []


def test_a_reply_has_as_many_choices_and_the_usage_that_are_asked_for(gateway: Setup) -> None:
    give(gateway.url, 0)
    assert len(ask(gateway.url, n=3).json()["choices"]) == 3
    assert len(ask(gateway.url, n=10**9).json()["choices"]) == 128
    streamed = ask(gateway.url, n=2, stream=True, stream_options={"include_usage": True}).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]" and chunks[-1]["usage"]["total_tokens"] == 0
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}


def test_only_answered_calls_of_the_trained_policy_that_act_take_a_turn(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    teacher = EngineConfig(f"{engine.url}/v1/", models=["teacher"], policy="frozen")
    gateway = start_gateway(
        engine_url=None, engines=[EngineConfig(engine.url.replace("127.0.0.1", "localhost")), teacher]
    )
    give(gateway.url, 1)
    embed = {"model": "stub", "input": "a"}
    httpx.post(f"{gateway.url}/rollout/r-1/v1/embeddings", json=embed).raise_for_status()
    assert not is_beyond(ask(gateway.url, headers={names.HEADER_PURPOSE: "title"}))
    assert not is_beyond(ask(gateway.url, model="teacher"))
    assert not is_beyond(ask(gateway.url, prefix=""))  # nobody's
    assert ask(gateway.url, messages=[{"role": "user", "content": "FAIL"}]).status_code == 400
    assert not is_beyond(ask(gateway.url, headers={names.HEADER_PURPOSE: "agent"}))
    assert is_beyond(ask(gateway.url))
    assert not is_beyond(ask(gateway.url, model="teacher"))
    assert gateway.health()["budgets"] == {"rollouts": 1, "beyond": 1}


def test_a_call_that_no_engine_took_gives_its_turn_back(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(engine_url="http://127.0.0.1:9", version_timeout_s=0.5)
    give(gateway.url, 1)
    assert [ask(gateway.url).status_code for _ in range(2)] == [502, 502]


def test_a_stream_that_broke_off_gives_its_turn_back_and_one_that_was_left_does_not(gateway: Setup) -> None:
    give(gateway.url, 1)
    url = f"{gateway.url}/rollout/r-1{CHAT}"
    broken, left = (body(text, stream=True) for text in ("a b BREAK", "a b LONG"))
    with pytest.raises(httpx.RemoteProtocolError), httpx.stream("POST", url, json=broken) as answer:
        answer.read()
    with httpx.stream("POST", url, json=left) as answer:
        next(answer.iter_raw())
    assert len(gateway.engine.requests) == 2
    gateway.flush()
    assert is_beyond(ask(gateway.url))


def test_calls_at_once_take_no_more_turns_than_there_are(gateway: Setup) -> None:
    give(gateway.url, 3)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(is_beyond(ask(gateway.url)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 3 + [True] * 5


def test_a_budget_can_be_lowered_and_never_raised(gateway: Setup) -> None:
    give(gateway.url, 3)
    give(gateway.url, 100)
    give(gateway.url, 1)
    give(gateway.url, 2)
    assert [is_beyond(ask(gateway.url)) for _ in range(2)] == [False, True]


def test_a_new_attempt_has_turns_of_its_own_and_another_one_has_none(gateway: Setup) -> None:
    give(gateway.url, 1, attempt=1)
    give(gateway.url, 9, attempt=0)  # a worker that is late
    for attempt in ("", "/0", "/2"):
        assert is_beyond(ask(gateway.url, prefix=f"/rollout/r-1{attempt}")), attempt
    assert [is_beyond(ask(gateway.url, prefix="/rollout/r-1/1")) for _ in range(2)] == [False, True]
    give(gateway.url, 1, attempt=2)
    assert [is_beyond(ask(gateway.url, prefix="/rollout/r-1/2")) for _ in range(2)] == [False, True]


def test_however_a_call_names_its_rollout_it_takes_a_turn(gateway: Setup) -> None:
    give(gateway.url, 2)
    by_header = {names.HEADER_ROLLOUT: "r-1"}
    assert not is_beyond(ask(gateway.url))
    assert not is_beyond(ask(gateway.url, prefix="", headers=by_header))
    assert is_beyond(ask(gateway.url, prefix="", headers={"authorization": "Bearer k~r-1"}))


def test_an_agent_on_this_machine_gives_no_turns_where_there_are_keys(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(agent_key="sk-agents-0123456789", operator_keys=[OPERATOR])
    mine = {"authorization": "Bearer sk-agents-0123456789"}
    give(gateway.url, 1, key=OPERATOR).raise_for_status()
    keys: tuple[dict[str, Any], ...] = ({}, {"key": "sk-agents-0123456789"}, {"key": "other"})
    for key in keys:
        assert give(gateway.url, 100, **key).status_code == 403
        assert give(gateway.url, 100, attempt=1, **key).status_code == 403
    assert [is_beyond(ask(gateway.url, headers=mine)) for _ in range(2)] == [False, True]


def turns(**fields: Any) -> Any:
    return {"rollouts": [{"rollout_id": "r", "attempt": 0, "turns": 1} | fields], "reply": TEXT}


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([], "list indices"),
        ({"rollouts": []}, "'reply'"),
        ({"rollouts": [{"rollout_id": "r", "turns": 1}], "reply": TEXT}, "'attempt'"),
        ({"rollouts": [], "reply": " "}, "'reply' is ' '"),
        (turns(rollout_id=""), "'rollout_id' is ''"),
        (turns(rollout_id="\ud800"), "surrogates"),
        (turns(turns=-1), "'turns' of 'r' is -1, expected 0 to 1000000"),
        (turns(attempt=True), "'attempt' of 'r' is True, expected 0 to 999999"),
    ],
)
def test_what_gives_no_turns_is_refused_and_says_why(gateway: Setup, sent: Any, says: str) -> None:
    answer = httpx.post(f"{gateway.url}/spangrad/budgets", content=json.dumps(sent))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert gateway.health()["budgets"]["rollouts"] == 0


def test_a_gateway_that_was_killed_left_budgets_and_taken_turns_to_the_next(tmp_path: Path) -> None:
    file = tmp_path / "spool.budgets"
    first = Budgets(file)
    first.give("r-1", 0, 3, TEXT)
    first.give("r-2", 1, 1, None)
    assert [first.take("r-1", 0) for _ in range(3)] == [None] * 3
    first.give_back("r-1", 0)
    # Nothing is closed: as after SIGKILL.
    second = Budgets(file)
    assert second.take("r-1", 0) is None
    spent = second.take("r-1", 0)
    assert spent is not None and (spent.turns, spent.taken, spent.reply) == (3, 3, TEXT)
    assert second.take("r-2", 1) is None and second.take("r-2", 1) is not None
    assert second.take("r-3", 0) is None


def test_a_restarted_gateway_goes_on_with_a_rollout(engine: StubEngine, tmp_path: Path) -> None:
    config = GatewayConfig(engine.url, store=str(tmp_path / "store.duckdb"), port=0)
    with running(config) as url:
        give(url, 2)
        assert not is_beyond(ask(url))
    with running(config) as url:
        assert [is_beyond(ask(url)) for _ in range(2)] == [False, True]


def test_a_disk_that_fails_costs_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "no" / "spool.budgets"
    (tmp_path / "no").write_text("a file where the folder would be")
    budgets = Budgets(file)
    budgets.give("r-1", 0, 1, TEXT)
    assert budgets.take("r-1", 0) is None and budgets.take("r-1", 0) is not None
    assert len(caplog.records) == 1 and "kept in memory alone" in caplog.text


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "spool.budgets"
    file.write_bytes(b"nothing that SQLite wrote" * 100)
    with pytest.raises(ConfigError, match=r"spool\.budgets' can't be read"):
        Budgets(file)


def test_the_rollout_whose_turns_were_asked_for_longest_ago_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spangrad.tracer.gateway.budgets.MAX_ROLLOUTS", 2)
    file = tmp_path / "spool.budgets"
    budgets = Budgets(file)
    for name in ("a", "b"):
        budgets.give(name, 0, 5, TEXT)
    budgets.take("a", 0)
    budgets.give("c", 0, 5, TEXT)
    budgets.close()
    with sqlite3.connect(file) as database:
        kept = database.execute("SELECT rollout_id FROM budgets ORDER BY used_ns").fetchall()
    database.close()
    assert kept == [("a",), ("c",)]
    assert len(Budgets(file)) == 2


def test_a_rollout_beyond_its_budget_is_truncated_in_the_store_and_trains_no_reply_of_the_gateway(
    engine: StubEngine, tmp_path: Path
) -> None:
    path = tmp_path / "store.duckdb"
    with FileStore(path) as store:
        store.enqueue([Rollout("r-1", turn_budget=1), Rollout("r-2", turn_budget=1)])
        assert len(store.claim(worker="w", limit=2)) == 2
    with running(GatewayConfig(engine.url, store=str(path), port=0)) as url:
        for rollout, calls in (("r-1", 2), ("r-2", 1)):
            give(url, 1, rollout=rollout)
            for _ in range(calls):
                ask(url, prefix=f"/rollout/{rollout}").raise_for_status()
    with FileStore(path) as store:
        cut, whole = store.rollouts()
        assert (cut.turn_budget, whole.turn_budget) == (1, 1)
        by_rollout: dict[str, list[ModelCall]] = {name: calls_of(store, [name]) for name in ("r-1", "r-2")}
    sampled, said = by_rollout["r-1"]
    assert acts(sampled) and not acts(said)
    assert (said.purpose, said.purpose_reason, said.grade) == (Purpose.OTHER, NO_TURN_LEFT, Grade.UNUSABLE)
    assert said.grade_reasons[0] == "the gateway answered, no model did: turn budget"
    assert is_truncated(cut, by_rollout["r-1"]) and not is_truncated(whole, by_rollout["r-2"])


def test_a_client_that_says_that_its_call_acts_changes_nothing(gateway: Setup) -> None:
    give(gateway.url, 0)
    assert is_beyond(ask(gateway.url, headers={names.HEADER_PURPOSE: "agent"}))
    (span,) = gateway.spans()
    assert span.attributes is not None and span.attributes[names.PURPOSE] == "other"
