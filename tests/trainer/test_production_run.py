"""Whole updates from sessions of live agents: real learner and store, an engine that takes weights."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.adapters.building import span, text_attributes, token_attributes
from tests.trainer.small_policy import make_policy
from tests.trainer.stub_weights import stub_weights

from spangrad.adapters import account_unread
from spangrad.errors import ConfigError, EmptyBatchError, StoreError
from spangrad.store.base import Store
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, Update
from spangrad.tracer import conventions as c
from spangrad.trainer.config import load_config
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.loop import Run, train
from spangrad.trainer.production.harvest import Harvest

CONFIG = """
[run]
id = "live"
updates = 9
[hub]
url = "{store}"
[serving]
engine_url = "{engine}"
gateway_url = "{engine}"
model = "{model}"
[rollout]
max_staleness = 0
[credit]
episode = "running_baseline"
baseline_key = "all"
[production]
rollouts_per_update = 3
idle_s = 60.0
held_out = 0.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Makes runs on one store, whose learner is here instead of in an actor."""
    monkeypatch.setattr("spangrad.trainer.loop.call", lambda method, *given, **named: method(*given, **named))
    made: list[Run] = []
    with stub_weights() as engine:
        (tmp_path / "run.toml").write_text(
            CONFIG.format(store=tmp_path / "s.duckdb", engine=engine.url, model=model)
        )

        def make(*changes: str, notes: list[str] | None = None) -> Run:
            for run in made:
                run.store.close()
            run = Run(
                load_config(tmp_path / "run.toml", changes),
                on_note=None if notes is None else notes.append,
            )
            run.learner = Learner(LearnerConfig(model_path=str(model), lr=1e-2, threads=1))
            made.append(run)
            return run

        yield make
    for run in made:
        run.store.close()


def live(store: Store, names: Sequence[str], *, version: int, rewards: Sequence[float | None] = ()) -> None:
    """Agents that end sessions, of which some get feedback; all but the first tokens are the name's."""
    assert isinstance(store, FileStore)
    for index, name in enumerate(names):
        marks, trace = {c.ROLLOUT_ID: name, c.ATTEMPT: 0}, name.encode().hex()
        ids = token_attributes([1, 2], [3, *(byte % 100 + 5 for byte in name.encode())], version=version)
        told = text_attributes(**marks, **ids) | {c.RESPONSE_ID: name}
        root = span("r", trace=trace, attributes={**marks, c.SPAN_ROLE: "rollout"}, end_ns=100 + index)
        call = span("c", trace=trace, parent="r", start_ns=10 + index, attributes=told)
        store.put_otlp(encode_request([call, root]))
    account_unread(store)
    store.put_rewards(
        [Reward(name, value) for name, value in zip(names, rewards, strict=False) if value is not None]
    )


def asked_after(looks: int) -> Callable[[], bool]:
    """Somebody who asks to stop when the store was looked at so often."""
    left = iter(range(looks))
    return lambda: next(left, None) is None


def consumed(run: Run) -> dict[str, int | None]:
    return {one.rollout_id: one.consumed_by for one in run.store.rollouts()}


def test_an_update_consumes_what_was_rewarded_and_the_next_one_what_its_policy_did(make_run):
    run = make_run()
    with run.harvest():
        live(run.store, ["a0", "a1", "a2", "a3", "a4"], version=0, rewards=[1.0, None, 0.0, 1.0, 0.0])
        assert run.wait()
        metrics = run.learn(*run.collect())
        run.source.advance(update_index=run.update_index, policy_version=run.policy_version)
        assert consumed(run) == {"a0": 0, "a1": None, "a2": 0, "a3": 0, "a4": None}
        assert metrics["data/trained_tokens"] == 6  # two of three: the very first has no baseline
        assert (metrics["production/ready"], metrics["production/unrewarded"]) == (1, 1)
        live(run.store, ["b0", "b1", "b2"], version=1, rewards=[1.0, 0.0, 1.0])
        assert run.wait()
        run.learn(*run.collect())
        assert consumed(run) == {
            **{"a0": 0, "a1": None, "a2": 0, "a3": 0, "a4": None},
            **{"b0": 1, "b1": 1, "b2": 1},
        }
    assert [update.rollout_ids for update in run.store.updates("live")] == [
        ["a0", "a2", "a3"],
        ["b0", "b1", "b2"],
    ]


def test_what_waits_is_said_and_waiting_ends_when_somebody_asks(make_run):
    notes: list[str] = []
    run = make_run(notes=notes)
    run.policy_version = 1
    with run.harvest():
        live(run.store, ["a0", "a1"], version=1, rewards=[1.0])
        live(run.store, ["old"], version=0, rewards=[1.0])
        assert not run.wait(asked_after(1))
    assert notes == [
        "1 sessions are ready of 3 that an update takes; waiting: 0 have not ended, 1 have no reward;"
        " left out: 0 failed, 0 by their grade, 1 too old, 0 trained in another session; 0 held out"
    ]


def test_sessions_that_say_nothing_are_passed_by_and_stay_in_the_store(make_run):
    run = make_run()
    with run.harvest():
        live(run.store, ["a0", "a1", "a2"], version=0, rewards=[1.0, 1.0, 1.0])
        assert run.wait()
        with pytest.raises(EmptyBatchError, match="looked at again after the next update"):
            run.collect()
        assert not run.wait(asked_after(1))
        live(run.store, ["b0", "b1", "b2"], version=0, rewards=[1.0, 0.0, 1.0])
        assert run.wait()
        run.learn(*run.collect())
    assert consumed(run) == {"a0": None, "a1": None, "a2": None, "b0": 0, "b1": 0, "b2": 0}


def test_a_run_goes_on_behind_sessions_that_say_nothing_and_ends_when_asked(make_run, monkeypatch):
    monkeypatch.setattr("spangrad.trainer.loop.start_ray", lambda workers, cluster: None)
    monkeypatch.setattr("spangrad.trainer.loop.start_learner", Learner)
    monkeypatch.setattr(  # the engine of this test tells no logprobs
        Run,
        "_publish_weights",
        lambda run: run.served.publish(run.policy_version, run.learner.export_weights).metrics(),
    )
    run = make_run()
    names, rewards = ["a0", "a1", "a2", "b0", "b1", "b2", "c0"], [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    live(run.store, names, version=0, rewards=rewards)
    run.store.close()
    notes: list[str] = []
    report = train(run.config, on_note=notes.append, is_asked_to_stop=asked_after(2))
    assert (report.updates, report.policy_version) == (1, 1)
    assert report.history[0]["data/rollouts"] == 2  # b0 is as good as those before it
    assert notes[0].startswith(
        "update 0: nothing to learn from 3 rollouts: 9 trainable tokens, 0 of 3 groups"
    )
    with FileStore(Path(run.config.hub.url)) as store:
        found = {one.rollout_id: one.consumed_by for one in store.rollouts()}
    assert found == {"a0": None, "a1": None, "a2": None, "b0": 0, "b1": 0, "b2": 0, "c0": None}


def test_a_trainer_that_dies_before_the_commit_trains_no_session_twice(make_run, monkeypatch):
    def die(update: Update) -> bool:
        raise StoreError("the machine is gone")

    run = make_run()
    live(run.store, ["a0", "a1", "a2"], version=0, rewards=[1.0, 0.0, 1.0])
    with run.harvest():
        assert run.wait()
        monkeypatch.setattr(run.store, "commit_update", die)
        with pytest.raises(StoreError, match="gone"):
            run.learn(*run.collect())
    run = make_run()
    assert consumed(run) == {"a0": None, "a1": None, "a2": None}
    monkeypatch.setattr(run, "_publish_weights", dict)  # the engine of this test tells no logprobs
    run._resume()
    assert consumed(run) == {"a0": 0, "a1": 0, "a2": 0}
    with run.harvest():
        assert (run.update_index, run.policy_version) == (1, 1)
        assert not run.wait(asked_after(1))


def raw_session(store: Store, trace: str, *, start_ns: int, reward: float | None = None) -> str:
    """A session that nobody named, of one call through a gateway. Returns its name, which is its trace's."""
    assert isinstance(store, FileStore)
    told = text_attributes(**token_attributes([1, 2], [3, int(trace, 16) % 100 + 5], version=0))
    made = span("c", trace=trace, scope=c.SCOPE_GATEWAY, start_ns=start_ns, attributes=told)
    store.put_otlp(encode_request([made]))
    account_unread(store)
    if reward is not None:
        store.put_rewards([Reward(made.trace_id, reward)])
    return made.trace_id


def join(store: Store, early: str, late: str) -> None:
    """What the hub does that learns that one session goes on from the other."""
    assert isinstance(store, FileStore)
    store.set_sessions([{early: None, late: "conversation id"}])


@pytest.mark.parametrize("dies", [False, True], ids=["commits", "commits after a restart"])
def test_a_session_that_becomes_a_part_of_another_one_meanwhile_is_trained_once(make_run, monkeypatch, dies):
    run = make_run()
    late = [raw_session(run.store, f"a{n}", start_ns=100 + n, reward=n % 2) for n in range(3)]
    with run.harvest():
        assert run.wait()
        batch, rollouts, metrics = run.collect()
        assert [one.rollout_id for one in rollouts] == late
        early = raw_session(run.store, "b0", start_ns=1)
        join(run.store, early, late[1])
        with monkeypatch.context() as patch:
            if dies:
                patch.setattr(run.store, "commit_update", lambda update: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    run.learn(batch, rollouts, metrics)
            else:
                run.learn(batch, rollouts, metrics)
    run = make_run()
    monkeypatch.setattr(run, "_publish_weights", dict)  # the engine of this test tells no logprobs
    run._resume()
    assert consumed(run) == {late[0]: 0, early: 0, late[2]: 0}
    (update,) = run.store.updates("live")
    assert update.rollout_ids == late
    with run.harvest():
        assert set(run.source.waiting().values()) == {0}


def test_a_session_that_was_joined_before_its_calls_were_read_stays_for_later(make_run):
    run = make_run()
    late = [raw_session(run.store, f"a{n}", start_ns=100 + n, reward=n % 2) for n in range(3)]
    early = raw_session(run.store, "b0", start_ns=1)
    with run.harvest():
        assert run.wait()
        taken = run.source.take()
        join(run.store, early, late[1])
        batch = run._crediting.rows(run.store, taken.rollouts, 0)
        run.learn(batch, taken.rollouts, {})
    assert consumed(run) == {late[0]: 0, early: None, late[2]: 0}


def test_a_session_that_never_was_is_no_joined_one(make_run):
    run = make_run()
    with pytest.raises(StoreError, match="there is no rollout 'nobody'"):
        run.store.commit_update(Update("live", 0, 1, ["nobody"], [], {}, "c"))


def test_waiting_and_a_looser_grade_are_as_the_config_says(make_run):
    changes = ["production.idle_s=1e15", "production.reward_wait_s=1e15", "credit={}", "learner.objective=bc"]
    run = make_run(*changes)
    with run.harvest():
        assert isinstance(run.source, Harvest)
        live(run.store, ["a0", "a1", "a2", "a3"], version=0, rewards=[1.0, None, 1.0, 1.0])
        assert run.source.waiting()["ready"] == 3  # an own root span ends a session at once
        assert not run.wait(asked_after(1))  # a1 holds up what ended after it
        run.store.put_rewards([Reward("a1", 0.0)])
        assert run.wait()
        _, rollouts, _ = run.collect()
        assert [one.rollout_id for one in rollouts] == ["a0", "a1", "a2"]
        text = span("t", trace="f", scope=c.SCOPE_GATEWAY, attributes=text_attributes())
        assert isinstance(run.store, FileStore)
        run.store.put_otlp(encode_request([text]))
        account_unread(run.store)
        assert run.source.waiting()["unended"] == 1
    run = make_run(*changes[1:])
    with run.harvest():
        assert isinstance(run.source, Harvest)
        assert run.source.waiting()["unrewarded"] == 1  # it is old enough, and its grade will do
    run = make_run()
    with run.harvest():
        assert isinstance(run.source, Harvest)
        assert run.source.waiting()["no_grade"] == 1


def test_held_out_sessions_are_measured_and_never_consumed(make_run):
    run = make_run("production.held_out=0.5")
    names = [f"s{index}" for index in range(20)]
    with run.harvest():
        live(run.store, names, version=0, rewards=[index % 2 for index in range(20)])
        assert run.wait()
        _, rollouts, metrics = run.collect()
        kept = int(metrics["eval/held_out_sessions"])
        assert kept == metrics["production/held_out"] and 3 <= kept <= 17
        assert metrics["production/ready"] == 20 - kept - len(rollouts)
        assert 0 < metrics["eval/held_out_reward"] < 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("agent.function=a.py:run", "agent.function has no effect with"),
        ("rollout.group_size=4", "rollout.group_size has no effect with"),
        ("eval.every=2", "eval.every has no effect with"),
        ("credit={}", "there are no tasks, .* compares rollouts of a task"),
        ("credit.baseline_key=task_id", "expected 'all'"),
        ("production.idle_s=0", "production.idle_s"),
        ("production.held_out=1.0", "0, or 0.000001 to 0.999999"),
        ("production.held_out=1e-7", "0, or 0.000001 to 0.999999"),
        ("production.reward_wait_s=-1", "0 or more"),
        ("production.rollouts_per_update=0", "1 or more"),
    ],
)
def test_settings_that_do_not_go_with_live_sessions_are_refused(make_run, change, said):
    with pytest.raises(ConfigError, match=said):
        make_run(change)
