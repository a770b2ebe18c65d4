import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from spangrad.errors import (
    ConfigError,
    PermissionDeniedError,
    StoreError,
)
from spangrad.store.client import HubClient
from spangrad.store.keys import Keys
from spangrad.store.records import (
    Policy,
    Reward,
    RewardAuthor,
    Rollout,
    SpanEvent,
    Update,
)
from spangrad.store.serve import serve
from spangrad.tracer import conventions as names
from spangrad.tracer.access import is_loopback
from tests.store.building import new_trace, request, span
from tests.store.hub_process import HubProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keys, Path]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = Keys.generate()
    made.save(path)
    return made, path


@pytest.fixture(scope="module")
def locked_hub(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Keys, Path]) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("locked") / "s.duckdb", keys=keys[1]) as process:
        yield process


def test_an_agent_can_send_spans_and_nothing_else(locked_hub: HubProcess, keys: tuple[Keys, Path]) -> None:
    event = SpanEvent(names.REWARD_EVENT, 5, {names.REWARD_VALUE: 1.0})
    with (
        HubClient(locked_hub.url, keys[0].agent) as agent,
        HubClient(locked_hub.url, keys[0].evaluator) as evaluator,
        HubClient(locked_hub.url, keys[0].trainer) as trainer,
    ):
        trainer.enqueue([Rollout("a")])
        assert agent.put_otlp(request([span(new_trace(), rollout="a", attempt=0, events=(event,))])) == 1
        for refused in (
            lambda: agent.put_rewards([Reward("a", 1.0)]),
            lambda: agent.claim(worker="me"),
            lambda: agent.heartbeat([("a", 0)], worker="me"),
            lambda: agent.finish("a", 0),
            lambda: agent.enqueue([Rollout("b")]),
            lambda: agent.rollouts(),
            lambda: agent.rewards(),
            lambda: agent.reward_author(),
            lambda: list(agent.spans()),
            lambda: agent.query("SELECT 1"),
            lambda: agent.query("INSERT INTO rewards VALUES ('x','a',0,NULL,'reward',1,'evaluator',NULL,0)"),
            lambda: agent.stats(),
            lambda: agent.put_policy(Policy("run", 1, "p")),
            lambda: agent.policies(),
            lambda: agent.updates(),
            lambda: agent.events(),
            lambda: evaluator.put_events([]),
            lambda: evaluator.enqueue([Rollout("b")]),
            lambda: evaluator.requeue(["a"]),
            lambda: evaluator.give_up(["a"], error_type="E", error="e"),
            lambda: evaluator.put_policy(Policy("run", 1, "p")),
            lambda: evaluator.commit_update(Update("run", 0, 1, [], [], {}, "c")),
            lambda: evaluator.put_calls([]),
            lambda: evaluator.mark_read({}),
            lambda: agent.unread_traces(),
        ):
            with pytest.raises(PermissionDeniedError, match="key"):
                refused()
        (claimed,) = evaluator.claim(worker="w")
        forged = Reward(claimed.rollout_id, 0.25, author=RewardAuthor.OPERATOR)
        assert evaluator.put_rewards([forged]) == 1
        assert trainer.put_rewards([Reward("a", 0.5, author=RewardAuthor.AGENT)]) == 1
        authors = {reward.value: reward.author for reward in evaluator.rewards(["a"])}
        assert authors == {1.0: RewardAuthor.AGENT, 0.25: RewardAuthor.EVALUATOR, 0.5: RewardAuthor.OPERATOR}
        assert evaluator.reward_author() is RewardAuthor.EVALUATOR
        assert trainer.reward_author() is RewardAuthor.OPERATOR
        with pytest.raises(StoreError, match="only reading"):
            evaluator.query("DELETE FROM rewards")
        evaluator.finish("a", 0)


def test_an_agent_can_not_vouch_for_calls_as_a_gateway_does(
    locked_hub: HubProcess, keys: tuple[Keys, Path]
) -> None:
    def send(key: str) -> ExportTraceServiceResponse:
        own, forged = span(new_trace()), replace(span(new_trace()), scope=names.SCOPE_GATEWAY)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/x-protobuf"}
        answer = httpx.post(f"{locked_hub.url}/v1/traces", content=request([own, forged]), headers=headers)
        assert answer.status_code == 200
        reply: ExportTraceServiceResponse = ExportTraceServiceResponse.FromString(answer.content)
        with HubClient(locked_hub.url, keys[0].trainer) as trainer:
            stored = {s.trace_id for s in trainer.spans(trace_ids=[own.trace_id, forged.trace_id])}
        is_refused = bool(reply.partial_success.rejected_spans)
        assert (own.trace_id in stored, forged.trace_id in stored) == (True, not is_refused)
        return reply

    with (
        HubClient(locked_hub.url, keys[0].agent) as agent,
        pytest.raises(PermissionDeniedError, match="evaluator key"),
    ):
        agent.put_otlp(request([replace(span(new_trace()), scope=names.SCOPE_GATEWAY)]))
    refused = send(keys[0].agent).partial_success
    assert refused.rejected_spans == 1
    assert "1 spans of a gateway came with the agent key" in refused.error_message
    assert send(keys[0].evaluator).partial_success.rejected_spans == 0


def test_a_missing_or_wrong_key_is_refused(locked_hub: HubProcess, keys: tuple[Keys, Path]) -> None:
    for key in (None, "wrong", keys[0].trainer[:-1], keys[0].trainer + "x", "ü" * 20):
        header = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        for path in ("/v1/traces", "/api/rollouts"):
            answer = httpx.post(locked_hub.url + path, content=b"", headers=header)
            assert (answer.status_code, answer.json()["error"]) == (401, "PermissionDeniedError")
    assert httpx.get(locked_hub.url + "/healthz").status_code == 200


def test_an_open_address_needs_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="keys"):
            serve(tmp_path / "s.duckdb", host=host)
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4


def test_keys_are_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = Keys.generate()
    path.write_text("{}")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.load(path)
    keys.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.load(path) == keys
    path.write_text(json.dumps({"agent": "a" * 20}))
    with pytest.raises(ConfigError, match="no key file"):
        Keys.load(path)
    with pytest.raises(ConfigError, match=r"there is no key file .*`spangrad hub --keys .*none` makes one"):
        Keys.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="can't be read"):
        Keys.load(tmp_path / "keys.json" / "none")
    with pytest.raises(ConfigError, match="differ"):
        Keys("a" * 20, "a" * 20, "b" * 20)
