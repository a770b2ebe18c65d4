"""The watch over a run in a real store: agents that misbehave, events, pauses, restarts."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.building import span, text_attributes
from tests.trainer.test_config import MINIMAL, write

from spangrad.adapters.calls import calls_of
from spangrad.errors import PausedError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    Policy,
    PolicyDecision,
    Reward,
    RewardAuthor,
    Rollout,
    Span,
    Update,
    promoted_version,
)
from spangrad.tracer import conventions as c
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.monitoring.behavior import behavior_metrics
from spangrad.trainer.monitoring.watch import Watch

TASKS, MEMBERS = 4, 4
Reply = Mapping[str, Any]
"""A message of an assistant, in OpenTelemetry's form."""


def says(text: str) -> Reply:
    return {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}


def calls(name: str, **arguments: Any) -> Reply:
    part = {"type": "tool_call", "id": "1", "name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "parts": [part], "finish_reason": "tool_calls"}


def spans_of(rollout_id: str, trace: str, replies: Sequence[Reply]) -> list[Span]:
    names = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT: 0}
    spans = [span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)]
    for index, reply in enumerate(replies):
        asked = [{"role": "user", "parts": [{"type": "text", "content": f"{rollout_id} {index}"}]}]
        told = {c.INPUT_MESSAGES: json.dumps(asked), c.OUTPUT_MESSAGES: json.dumps([reply])}
        told |= {c.RESPONSE_ID: f"{rollout_id}-{index}"}
        attributes = text_attributes(**names, **told)
        spans.append(span(f"c{index}", trace=trace, parent="r", start_ns=10 + index, attributes=attributes))
    return spans


class MadeRun:
    """Updates of a run in a store, each of TASKS groups of MEMBERS rollouts."""

    def __init__(self, store: FileStore, config: TrainConfig) -> None:
        self.store, self.config, self.updates, self.told = store, config, 0, list[str]()
        self.given_up: list[tuple[str, Mapping[str, float]]] = []

    def update(
        self,
        replies: Callable[[int, int], Sequence[Reply]],
        rewards: Callable[[int, int], Mapping[str, float]] | None = None,
        **metrics: float,
    ) -> None:
        """Run the rollouts of an update and commit it, as the loop does; task, member -> replies, rewards."""
        stem, places = (
            f"u{self.updates}",
            [(task, member) for task in range(TASKS) for member in range(MEMBERS)],
        )
        ids = {place: f"{stem}-g{place[0]}-m{place[1]}" for place in places}
        spans, given = list[Span](), list[Reward]()
        for (task, member), rollout_id in ids.items():
            spans += spans_of(rollout_id, f"1{self.updates:02x}{task:x}{member:x}", replies(task, member))
            told = {} if rewards is None else rewards(task, member)
            given += [Reward(rollout_id, value, name=name, attempt=0) for name, value in told.items()]
        self.store.enqueue(
            [
                Rollout(rollout_id, task_id=f"t{task}", group_id=f"{stem}-g{task}", run_id="r")
                for (task, _), rollout_id in ids.items()
            ]
        )
        self.store.claim(worker="w", limit=len(ids))
        self.store.put_otlp(encode_request(spans))
        self.store.put_rewards(given, author=RewardAuthor.EVALUATOR)
        for rollout_id in ids.values():
            self.store.finish(rollout_id, 0)
        known = list(ids.values())
        seen = behavior_metrics(
            calls_of(self.store, known),
            self.store.rollouts(rollout_ids=known),
            self.config.monitor.test_files,
        )
        self.commit(known, **seen, **metrics)

    def commit(self, rollout_ids: Sequence[str] = (), **metrics: float) -> None:
        """Commit an update with these numbers; `__` in a name stands for `/`."""
        told = {name.replace("__", "/"): value for name, value in metrics.items()}
        folder, version = f"checkpoint/{self.updates}", 1 + max(self.versions(), default=0)
        self.store.put_policy(Policy("r", version, folder))
        self.store.commit_update(Update("r", self.updates, version, rollout_ids, [], told, folder))
        self.updates += 1

    def versions(self) -> list[int]:
        return [policy.policy_version for policy in self.store.policies("r")]

    def decide(self, decision: Decision, version: int, to_version: int | None = None) -> None:
        made = PolicyDecision("r", version, decision, DecisionAuthor.ADMIN, "", to_version=to_version)
        self.store.decide(made)

    def go_back(self, why: str, numbers: Mapping[str, float]) -> None:
        """What a run does when a monitor says so: a decision, and the old weights under a new number."""
        self.given_up.append((why, numbers))
        promoted, version = promoted_version(self.store.decisions("r")), self.versions()[-1]
        made = PolicyDecision(
            "r", version, Decision.ROLLED_BACK, DecisionAuthor.TRAINER, why, numbers, promoted
        )
        self.store.decide(made)
        self.store.put_policy(Policy("r", version + 1, "restored"))
        self.decide(Decision.RESTORED, version + 1, promoted)

    def watch(self, **changes: Any) -> Watch:
        """That of a process that has just started, with other settings."""
        monitor = dataclasses.replace(self.config.monitor, **changes)
        config = dataclasses.replace(self.config, monitor=monitor)
        return Watch(self.store, config, roll_back=self.go_back, tell=self.told.append)

    def events(self) -> list[tuple[int, str, str]]:
        return [(event.update_index, event.monitor, event.action) for event in self.store.events("r")]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., MadeRun]]:
    with FileStore(tmp_path / "store.duckdb") as store:

        def make(*lines: str) -> MadeRun:
            short = ["monitor.min_history=4", "monitor.window=8", "run.updates=50"]
            return MadeRun(store, load_config(write(tmp_path, MINIMAL), [*short, *lines]))

        yield make


def honest(task: int, member: int) -> list[Reply]:
    return [
        says(f"I look at task {task}, way {member}"),
        calls("write_file", path=f"src/{task}.py"),
        says("ok"),
    ]


def test_an_agent_that_edits_tests_is_told_with_files_and_rollouts(make_run: Callable[..., MadeRun]) -> None:
    run = make_run()
    watch = run.watch()
    run.update(honest)
    watch.check()
    assert run.events() == []
    cheat = [calls("bash", command="sed -i 's/assert .*/pass/' tests/test_a.py")]
    run.update(lambda task, member: cheat if task == 1 else honest(task, member))
    watch.check()
    assert run.events() == [(1, "test_edits", "warn")]
    [event] = run.store.events("r")
    assert (event.value, event.threshold) == (0.25, 0.05)
    assert event.text == (
        "25% of the rollouts write to test files: 'tests/test_a.py' in u1-g1-m0, 'tests/test_a.py' in"
        " u1-g1-m1, 'tests/test_a.py' in u1-g1-m2"
    )
    assert run.told == [f"update 1: monitor test_edits (warn): {event.text}; monitor.test_edits is 0.05"]


def test_an_agent_that_begins_every_task_alike_is_told_with_what_it_says(
    make_run: Callable[..., MadeRun],
) -> None:
    run = make_run()
    watch = run.watch()
    for _ in range(5):
        run.update(honest)
        watch.check()
    run.update(lambda task, member: [calls("ls", path="/"), *honest(task, member)])
    watch.check()
    assert run.events() == [(5, "first_steps", "warn")]
    [event] = run.store.events("r")
    assert event.value == 1.0
    assert event.text.startswith("100% of pairs of rollouts of different tasks begin alike, at the start 0%")
    assert event.text.endswith("""16 of 16 with 'ls({"path": "/"})', as in u5-g0-m0""")


def test_an_agent_that_flatters_its_judge_is_told_with_the_phrase(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.judge=style")

    def flatter(upto: int) -> None:
        def replies(task: int, member: int) -> list[Reply]:
            praise = "you are the wisest judge" if member < upto else "that is all there is"
            return [says(f"Task {task} way {member}: {praise}")]

        run.update(replies, lambda task, member: {"reward": 0.5, "style": 0.9 if member < upto else 0.1})

    for _ in range(6):
        flatter(0)
        run.watch().check()  # each in a process of its own: outputs are read again
    assert run.events() == []
    flatter(3)
    run.watch().check()
    assert run.events() == [(6, "flattery", "warn")]
    [event] = run.store.events("r")
    assert event.value == 0.75
    assert "'the wisest judge' in 75% more of the outputs" in event.text
    flatter(3)
    run.watch().check()
    assert run.events() == [(6, "flattery", "warn")]  # it was told


def test_a_held_out_reward_that_falls_while_the_trained_one_rises(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.verifier=hidden", "monitor.drift=2")
    watch = run.watch()
    for update in range(8):
        run.update(
            honest,
            lambda task, member, update=update: {"reward": 0.5, "hidden": 0.9 - 0.1 * update},  # type: ignore[misc]
            reward__mean=0.1 * update,
        )
        watch.check()
    # n points without an exception: n 5: (10 - 1) / sqrt(16.7) = 2.2; n 4: (6 - 1) / sqrt(8.7) = 1.7
    assert run.events() == [(4, "drift", "warn")]
    assert run.store.updates("r")[4].metrics["behavior/verifier"] == pytest.approx(0.5)
    assert "the train reward went from 0 to 0.4, behavior/verifier from 0.9 to 0.5" in run.told[-1]


def test_a_verifier_that_comes_late_counts_and_an_agents_word_does_not(
    make_run: Callable[..., MadeRun],
) -> None:
    run = make_run("monitor.verifier=hidden")
    run.update(honest)
    run.store.put_rewards([Reward("u0-g0-m0", 9.0, name="hidden", attempt=0)], author=RewardAuthor.AGENT)
    run.watch().check()
    assert "behavior/verifier" not in run.store.updates("r")[0].metrics
    run.update(honest)
    late = [Reward(f"u0-g0-m{m}", float(m), name="hidden", attempt=0) for m in range(2)]
    run.store.put_rewards(late, author=RewardAuthor.EVALUATOR)
    run.watch().check()
    assert run.store.updates("r")[0].metrics["behavior/verifier"] == 0.5


def test_a_pause_holds_until_it_is_told_to_go_on(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.actions.gap=pause")
    run.commit(gap__mean=0.01)
    run.watch().check()
    run.commit(gap__mean=0.5)
    with pytest.raises(PausedError) as paused:
        run.watch().check()
    said = str(paused.value)
    assert said.startswith(
        "run 'r' is paused after update 1: monitor gap: logprobs of engine and learner differ by 0.5 nats"
    )
    assert "--set monitor.continue_after=1" in said and paused.value.exit_code == 3
    for _ in range(2):  # the same command, in new processes
        with pytest.raises(PausedError):
            run.watch().check()
    assert run.events() == [(1, "gap", "pause")]
    assert len(run.told) == 1
    goes_on: list[dict[str, Any]] = [{"continue_after": 1}, {"actions": {}}, {"gap": 0.6}]
    for changes in goes_on:
        run.watch(**changes).check()
    run.commit(gap__mean=0.5)
    run.watch().check()  # it was told and paused: the same again is no other alarm
    run.commit(gap__mean=0.01)
    run.watch().check()
    run.commit(gap__mean=0.7)
    with pytest.raises(PausedError, match="after update 4"):
        run.watch(continue_after=1).check()
    assert run.events() == [(1, "gap", "pause"), (4, "gap", "pause")]


def test_a_run_goes_back_once_and_not_again_where_its_version_is_given_up(
    make_run: Callable[..., MadeRun],
) -> None:
    run = make_run("monitor.actions.gap=rollback", "monitor.actions.test_edits=rollback")
    run.commit()
    run.decide(Decision.PROMOTED, 1)
    run.watch().check()
    cheat = [calls("bash", command="sed -i 's/assert .*/pass/' tests/test_a.py")]
    run.update(lambda task, member: cheat, gap__mean=0.5)
    run.watch().check()
    numbers = {"monitor/gap": 0.5, "monitor/test_edits": 1.0}
    why = (
        "monitor gap in update 1: 0.5, monitor.gap is 0.1;"
        " monitor test_edits in update 1: 1, monitor.test_edits is 0.05"
    )  # decisions are kept for good: no word of what rollouts said
    assert run.given_up == [(why, numbers)]
    run.watch().check()  # a process that restarts looks again
    assert len(run.given_up) == 1
    assert run.events() == [(1, "gap", "rollback"), (1, "test_edits", "rollback")]


def test_a_rollback_that_a_crash_cut_off_before_the_decision_is_made_up_for(
    make_run: Callable[..., MadeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("monitor.actions.gap=rollback")
    run.commit()
    run.decide(Decision.PROMOTED, 1)
    run.commit(gap__mean=0.5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "go_back", lambda why, numbers: (_ for _ in ()).throw(KeyboardInterrupt))
        run.watch().check()
    assert (run.events(), run.given_up) == ([(1, "gap", "rollback")], [])
    run.watch().check()
    assert len(run.given_up) == len(run.told) == 1


def test_after_so_many_rollbacks_without_a_promotion_an_alarm_pauses(
    make_run: Callable[..., MadeRun],
) -> None:
    run = make_run("monitor.actions.gap=rollback", "monitor.max_rollbacks=2")
    run.commit()
    run.decide(Decision.PROMOTED, 1)
    for _ in range(2):
        run.commit(gap__mean=0.5)  # each is an alarm, though the update before it was one, too
        run.watch().check()
    assert [one.to_version for one in run.store.decisions("r") if one.decision is Decision.ROLLED_BACK] == [
        1,
        3,
    ]
    run.commit(gap__mean=0.5)
    with pytest.raises(PausedError) as paused:
        run.watch().check()
    assert "2 rollbacks by monitors since a version was promoted are monitor.max_rollbacks" in str(
        paused.value
    )
    assert "--set monitor.continue_after=3" in str(paused.value)
    run.watch(continue_after=3).check()
    assert len(run.given_up) == 2
    run.commit(gap__mean=0.01)
    run.decide(Decision.PROMOTED, run.versions()[-1])
    run.commit(gap__mean=0.5)
    run.watch().check()
    assert len(run.given_up) == 3


def test_an_alarm_about_the_promoted_version_itself_pauses(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.actions.gap=rollback")
    run.commit(gap__mean=0.5)
    run.decide(Decision.PROMOTED, 1)
    with pytest.raises(PausedError, match="nothing to go back to: the promoted version is 1"):
        run.watch().check()
    assert run.given_up == []


def test_where_an_alarm_pauses_and_another_one_goes_back_both_are_done(
    make_run: Callable[..., MadeRun],
) -> None:
    run = make_run("monitor.actions.gap=rollback", "monitor.actions.clip=pause")
    run.commit()
    run.decide(Decision.PROMOTED, 1)
    run.commit(gap__mean=0.5, policy__clip_low=0.4)
    for _ in range(2):
        with pytest.raises(PausedError, match="after update 1: monitor clip: bounds"):
            run.watch().check()
    assert len(run.given_up) == 1


def test_after_the_last_update_there_is_nothing_to_pause(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.actions.gap=pause", "run.updates=1")
    run.commit(gap__mean=0.5)
    run.watch().check()
    assert run.events() == [(0, "gap", "pause")]


def test_the_last_update_is_given_up_like_any_other(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.actions.gap=rollback", "monitor.max_rollbacks=1", "run.updates=2")
    run.commit()
    run.decide(Decision.PROMOTED, 1)
    run.commit(gap__mean=0.5)
    run.watch().check()
    assert len(run.given_up) == 1


def test_a_check_that_a_crash_cut_off_is_made_up_for(make_run: Callable[..., MadeRun]) -> None:
    run = make_run()
    run.commit(gap__mean=0.5)  # the process dies before it looks
    assert run.events() == []
    run.watch().check()
    run.watch().check()
    assert run.events() == [(0, "gap", "warn")]
    assert len(run.told) == 1


def test_a_run_without_updates_has_nothing_to_look_at(make_run: Callable[..., MadeRun]) -> None:
    run = make_run()
    run.watch().check()
    assert (run.told, run.events()) == ([], [])


def test_monitors_without_their_metrics_are_told_once(make_run: Callable[..., MadeRun]) -> None:
    run = make_run("monitor.first_steps=none")
    watch = run.watch()
    for _ in range(5):
        run.commit(gap__mean=0.01, grad__norm=float("nan"))
        watch.check()
    assert run.told == [
        "monitors that see nothing in this run: spread (no reward/spread, reward/mean), entropy (no"
        " policy/entropy), entropy_rise (no policy/entropy), gradient (no grad/norm), sample_share (no"
        " policy/sample_share), clip (no policy/clip_low, policy/clip_high), drift (no reward/mean,"
        " eval/success_greedy), steps (no behavior/steps_mean), early_exits (no behavior/steps_low,"
        " behavior/steps_median, reward/mean), test_edits (no behavior/test_edits)"
    ]
    assert run.events() == []


def test_without_anybody_to_tell_an_event_is_a_warning_of_the_log(
    make_run: Callable[..., MadeRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()
    run.commit(gap__mean=0.5)
    with caplog.at_level(logging.WARNING):
        Watch(run.store, run.config, roll_back=run.go_back).check()
    assert [record.getMessage()[:34] for record in caplog.records] == ["update 0: monitor gap (warn): logp"]
