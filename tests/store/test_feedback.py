"""`spangrad.feedback`: a reward days later, from another process."""

from pathlib import Path

import pytest

import spangrad
from spangrad.errors import ConfigError, PermissionDeniedError, StoreError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys
from spangrad.store.records import RewardAuthor
from tests.store.building import new_trace, request, span
from tests.store.hub_process import HubProcess


def test_feedback_rewards_a_rollout_of_a_file_by_its_id_or_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trace = tmp_path / "s.duckdb", new_trace()
    root = span(trace, rollout="r-1")
    with FileStore(path) as store:
        store.put_otlp(request([root]))
    monkeypatch.setenv("SPANGRAD_STORE", str(path))
    spangrad.feedback(1, rollout_id="r-1", explanation="the customer came back")
    spangrad.feedback(0.5, trace_id=trace, name="thumb", call_id=f"{trace}-{root.span_id}")
    with FileStore(path) as store:
        first, second = store.rewards(["r-1"])
    assert (first.name, first.value, first.explanation) == ("reward", 1.0, "the customer came back")
    assert (first.author, first.call_id, first.attempt) == (RewardAuthor.OPERATOR, None, 0)
    assert (second.name, second.value, second.call_id) == ("thumb", 0.5, f"{trace}-{root.span_id}")


def test_feedback_takes_in_what_still_waits_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spangrad.init()
    with spangrad.rollout(rollout_id="r-1"):
        pass
    assert spangrad.shutdown()
    spangrad.feedback(0.25, rollout_id="r-1")
    with FileStore(tmp_path / ".spangrad" / "store.duckdb") as store:
        assert [reward.value for reward in store.rewards(["r-1"])] == [0.25]


def test_feedback_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPANGRAD_STORE", raising=False)
    path, trace = tmp_path / "s.duckdb", new_trace()
    with FileStore(path) as store:
        first, second = span(trace, rollout="r-1"), span(trace, rollout="r-2")
        store.put_otlp(request([first, second, span(new_trace())]))
    with pytest.raises(ConfigError, match="rollout_id None and trace_id None; give one"):
        spangrad.feedback(1, store=path)
    with pytest.raises(ConfigError, match="rollout_id 'r-1' and trace_id 'x'; give one"):
        spangrad.feedback(1, rollout_id="r-1", trace_id="x", store=path)
    with pytest.raises(StoreError, match=r"there is no rollout 'r-9' in .*; `spangrad rollouts` lists"):
        spangrad.feedback(1, rollout_id="r-9", store=path)
    with pytest.raises(StoreError, match=r"belongs to 2 rollouts \['r-1', 'r-2'\]; exactly one"):
        spangrad.feedback(1, trace_id=trace, store=path)
    with pytest.raises(StoreError, match=r"belongs to 0 rollouts \[\]"):
        spangrad.feedback(1, trace_id="f" * 32, store=path)
    with pytest.raises(StoreError, match=r"there is no call 'x-y' in rollout 'r-1'; `spangrad calls"):
        spangrad.feedback(1, rollout_id="r-1", call_id="x-y", store=path)
    with pytest.raises(StoreError, match="there is no call"):
        spangrad.feedback(1, rollout_id="r-1", call_id=f"{trace}-{second.span_id}", store=path)
    with pytest.raises(StoreError, match="a reward is a finite number"):
        spangrad.feedback(float("nan"), rollout_id="r-1", store=path)
    with pytest.raises(StoreError, match="there is no store at"):
        spangrad.feedback(1, rollout_id="r-1", store=tmp_path / "mistyped.duckdb")
    assert not (tmp_path / "mistyped.duckdb").exists()


@pytest.mark.slow
def test_feedback_to_a_hub_needs_a_key_that_may_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    with HubProcess(tmp_path / "s.duckdb", keys=tmp_path / "keys.json") as hub:
        with HubClient(hub.url, keys.agent) as agent:
            trace = new_trace()
            call = span(trace, rollout="r-1")
            agent.put_otlp(request([call]))
        for key, whose in ((keys.agent, "this is the agent key"), (None, "this hub needs a key")):
            with pytest.raises(PermissionDeniedError, match=f"evaluator or trainer key.*{whose}"):
                spangrad.feedback(1, rollout_id="r-1", store=hub.url, key=key)
        monkeypatch.setenv("SPANGRAD_KEY", keys.evaluator)
        spangrad.feedback(1, rollout_id="r-1", store=hub.url)
        spangrad.feedback(2, trace_id=trace.upper(), call_id=f"{trace}-{call.span_id}", store=hub.url)
        spangrad.feedback(0, rollout_id="r-1", store=hub.url, key=keys.trainer)
        with HubClient(hub.url, keys.evaluator) as evaluator:
            given = [(reward.value, str(reward.author)) for reward in evaluator.rewards(["r-1"])]
    assert given == [(1.0, "evaluator"), (2.0, "evaluator"), (0.0, "operator")]
