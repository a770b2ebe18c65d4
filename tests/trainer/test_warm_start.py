import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.building import call, span, text_attributes
from tests.trainer.small_policy import make_tokenizer

from spangrad.adapters.model_call import Choice, Grade
from spangrad.errors import EmptyBatchError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus
from spangrad.tracer import conventions as c
from spangrad.trainer.config import RunConfig, TrainConfig
from spangrad.trainer.policies.warm_start import (
    WarmStart,
    WarmStartConfig,
    cache_name,
    cloning_config,
    cloning_rows,
    install,
    read_expert,
    stamp_of,
)
from spangrad.trainer.rollouts.agent_config import AgentConfig

CONFIG = WarmStartConfig(expert="expert.py:serve")


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


@pytest.fixture
def train(tmp_path) -> TrainConfig:
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "agent.py").write_text("def run(task): ...\n")
    return TrainConfig(
        run=RunConfig(id="r"),
        agent=AgentConfig(function="agent.py:run", tasks="tasks.py:tasks", reward="reward.py:reward"),
        base_dir=str(tmp_path / "example"),
    )


def record(store: FileStore, name: str, reward: float | None, status: RolloutStatus) -> None:
    """One ended rollout with one call."""
    store.enqueue([Rollout(name, run_id="expert", task_id="t", max_attempts=1)])
    (claimed,) = store.claim(worker="w", limit=1)
    trace = f"{int.from_bytes(name.encode()):x}"
    told = {c.ROLLOUT_ID: name, c.ATTEMPT: 0}
    root = span("r", trace=trace, attributes={**told, c.SPAN_ROLE: "rollout"}, end_ns=100)
    store.put_otlp(
        encode_request([root, span("a", trace=trace, parent="r", attributes=text_attributes(**told))])
    )
    if status is RolloutStatus.FAILED:
        store.finish(name, claimed.attempt, status=status, error_type="ValueError", error="broken")
    else:
        store.finish(name, claimed.attempt)
    if reward is not None:
        store.put_rewards([Reward(name, reward, attempt=0)], author=RewardAuthor.EVALUATOR)


def test_only_rollouts_that_succeeded_are_cloned_and_the_others_count_against_the_expert(store):
    record(store, "right", 1.0, RolloutStatus.SUCCEEDED)
    record(store, "wrong", 0.0, RolloutStatus.SUCCEEDED)
    record(store, "unscored", None, RolloutStatus.SUCCEEDED)
    record(store, "failed", None, RolloutStatus.FAILED)
    names = ["right", "wrong", "unscored", "failed"]
    expert = read_expert(store, names, ["evaluator"], success_at=1.0)
    assert expert.success == 1 / 4  # not 1 of the 2 that have a reward
    assert expert.failed == 1
    assert {call.rollout_id for call in expert.calls} == {"right", "wrong", "unscored"}


def test_an_expert_whose_rollouts_all_failed_has_no_calls(store):
    record(store, "failed", None, RolloutStatus.FAILED)
    expert = read_expert(store, ["failed"], ["evaluator"], success_at=1.0)
    assert (expert.calls, expert.success, expert.failed) == ([], 0.0, 1)


def test_name_in_the_cache_changes_with_everything_that_makes_the_policy(train, monkeypatch):
    other_learner = dataclasses.replace(train.learner, betas=(0.9, 0.9))
    other_agent = dataclasses.replace(train.agent, reward="other.py:reward")
    other_credit = dataclasses.replace(train.credit, reward_weights={"other": 1.0})
    names = [
        cache_name(CONFIG, train, 0),
        cache_name(CONFIG, train, 1),
        cache_name(dataclasses.replace(CONFIG, steps=7), train, 0),
        cache_name(CONFIG, dataclasses.replace(train, learner=other_learner), 0),
        cache_name(CONFIG, dataclasses.replace(train, agent=other_agent), 0),
        cache_name(CONFIG, dataclasses.replace(train, credit=other_credit), 0),
    ]
    version = importlib.metadata.version
    for package in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.metadata,
                "version",
                lambda name, package=package: "0.0.0" if name == package else version(name),
            )
            names.append(cache_name(CONFIG, train, 0))
    (Path(train.base_dir) / "agent.py").write_text("def run(task): return 1\n")
    names.append(cache_name(CONFIG, train, 0))
    assert len(set(names)) == len(names)
    assert cache_name(CONFIG, train, 0) == names[-1]


@pytest.mark.parametrize(
    "part",
    [
        "adapters/messages.py",
        "credit/transitions.py",
        "trainer/learning/model.py",
        "trainer/learning/losses/cloning.py",
        "trainer/policies/scripted_model.py",
    ],
)
def test_name_in_the_cache_changes_with_the_source_of_what_makes_the_policy(train, monkeypatch, part):
    before = cache_name(CONFIG, train, 0)
    read_bytes = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda file: read_bytes(file) + (b"#" if str(file).endswith(part) else b"")
    )
    assert cache_name(CONFIG, train, 0) != before


def test_calls_whose_tools_nobody_recorded_are_cloned_only_if_asked():
    tokenizer = make_tokenizer()
    unknown = "tool definitions were not recorded"
    told: dict[str, Any] = {"grade": Grade.TEXT, "messages": [{"role": "user", "content": "How many?"}]}
    calls = [
        dataclasses.replace(
            call(name, [], [], rollout_id=name, **told),
            grade_reasons=reasons,
            choices=[Choice({"role": "assistant", "content": "12"}, "stop")],
        )
        for name, reasons in (("known", ("no token ids",)), ("unknown", (f"{unknown}: tools were used",)))
    ]
    rows, refused = cloning_rows(calls, tokenizer)
    assert ([row.rollout_id for row in rows], refused) == (["known"], {unknown: 1})
    rows, refused = cloning_rows(calls, tokenizer, keep_unknown_tools=True)
    assert ([row.rollout_id for row in rows], refused) == (["known", "unknown"], {})
    with pytest.raises(EmptyBatchError, match=f"none of 1 recorded calls can be cloned.*{unknown}"):
        cloning_rows(calls[1:], tokenizer)


def made(folder: Path, loss: float) -> tuple[WarmStart, Path]:
    """A warm start that is about to be installed as `folder`, and where its model is."""
    model = folder.with_name(f".private-{loss}") / "model"
    model.mkdir(parents=True)
    (model / "weights").write_text(str(loss))
    return WarmStart(folder, 0.5, 10, 0, 20, 0, 100, False, loss), model


def test_of_two_warm_starts_at_the_same_time_both_use_the_first_ones(tmp_path):
    folder = tmp_path / "name"
    (one, its_model), (other, other_model) = made(folder, 1.0), made(folder, 2.0)
    assert install(one, its_model, replaces=None) == one
    assert install(other, other_model, replaces=None) == dataclasses.replace(one, from_cache=True)
    assert (folder / "weights").read_text() == "1.0"
    assert json.loads((folder / "warm_start.json").read_text())["loss"] == 1.0


def test_a_fresh_warm_start_replaces_what_was_there_before_it_and_nothing_newer(tmp_path):
    folder = tmp_path / "name"
    first, model = made(folder, 1.0)
    install(first, model, replaces=None)
    before = stamp_of(folder)
    (second, second_model), (third, third_model) = made(folder, 2.0), made(folder, 3.0)
    assert install(second, second_model, replaces=before) == second
    assert install(third, third_model, replaces=before).loss == 2.0
    assert (folder / "weights").read_text() == "2.0"


def test_a_folder_that_was_left_unfinished_is_replaced(tmp_path):
    folder = tmp_path / "name"
    folder.mkdir()
    (folder / "weights").write_text("half")
    one, model = made(folder, 1.0)
    assert install(one, model, replaces=stamp_of(folder)) == one
    assert (folder / "weights").read_text() == "1.0"


def test_cloning_keeps_the_runs_learner_but_for_what_the_warm_start_says(train, tmp_path):
    config = cloning_config(train, CONFIG, tmp_path, seed=3)
    assert (config.objective, config.lr, config.dtype, config.seed) == ("bc", CONFIG.lr, CONFIG.dtype, 3)
    assert config.betas == train.learner.betas
    run = dataclasses.replace(train.learner, kl_coef=0.1, entropy_coef=0.1, lora_rank=4, lora_alpha=8.0)
    assert cloning_config(dataclasses.replace(train, learner=run), CONFIG, tmp_path, seed=3) == config
