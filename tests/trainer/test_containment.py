"""What a bad rollout, a full disk, too little memory or a number that is none costs: itself, and no more."""

import dataclasses
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters.building import span, text_attributes, token_attributes
from tests.store.hub_process import HubProcess
from tests.trainer.made_updates import GROUPS, Training, config_of
from tests.trainer.small_policy import make_row

from spangrad.adapters import account_unread
from spangrad.errors import CreditError, HubUnreachableError, PolicyError, StoreError, StoreFullError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Rollout
from spangrad.tracer import conventions as c
from spangrad.trainer.learning import checkpoint
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.memory import running_out_told
from spangrad.trainer.replaying import replay
from spangrad.trainer.resuming import update_from_json
from spangrad.trainer.serving.weight_files import context_length

TEN_MB = 10 * 2**20


@pytest.fixture
def training(tmp_path: Path, policy: Path) -> Iterator[Training]:
    begun = Training(config_of(tmp_path, policy))
    yield begun
    begun.close()


def poisoned(rollout: Rollout, tokens: dict[str, Any], text: str = "fine") -> bytes:
    """One more call of a rollout, as an agent's key may send it."""
    said = [{"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}]
    told = text_attributes(**tokens, **{c.OUTPUT_MESSAGES: json.dumps(said), c.RESPONSE_ID: "poison"})
    names = {c.ROLLOUT_ID: rollout.rollout_id, c.ATTEMPT: 0}
    return encode_request([span("bad", trace="666", start_ns=50, attributes={**told, **names})])


@pytest.mark.parametrize(
    ("tokens", "text", "reason", "counted"),
    [
        (token_attributes((20,), (3, 320), version=0), "", "token ids of another vocabulary", 2),
        (token_attributes((2**31 - 1,), (3, 4), version=0), "", "token ids of another vocabulary", 2),
        (token_attributes((20,), (3, 4), logprobs=(-1.0, 0.5), version=0), "", "a logprob is no logprob", 2),
        (token_attributes((20,), (3, 4), logprobs=(-1.0, float("nan")), version=0), "", "no logprob", 2),
        (token_attributes((20,), (3, 4), logprobs=(-1.0, float("-inf")), version=0), "", "no logprob", 2),
        (token_attributes((20,), (-3, 4), version=0), "", "", 0),
        (
            token_attributes((20,), [4] * (TEN_MB // 4), version=0),
            "a" * TEN_MB,
            "longer than the model's context",
            TEN_MB // 4,
        ),
    ],
    ids=["unknown id", "huge id", "positive logprob", "NaN logprob", "-inf logprob", "negative id", "10 MB"],
)
def test_a_poisoned_call_is_refused_and_counted_and_all_others_are_trained(
    training: Training, tokens: dict[str, Any], text: str, reason: str, counted: int
) -> None:
    rollouts = training.collect()
    training.store.put_otlp(poisoned(rollouts[0], tokens, text))
    account_unread(training.store)
    update = training.update(rollouts)
    assert update.metrics["data/trained_tokens"] == 25
    assert update.metrics["data/sampled_tokens"] == 25 + counted
    dropped = {name: value for name, value in update.metrics.items() if name.startswith("dropped/")}
    assert sum(dropped.values()) == counted
    wanted = "".join(letter if letter.isalnum() else "_" for letter in reason.lower())
    assert all(wanted in name for name in dropped)


@pytest.mark.parametrize("value", [1e150, -1e308])
def test_a_reward_that_no_sum_can_hold_is_no_reward_and_its_rollout_is_counted(
    training: Training, value: float
) -> None:
    rollouts = training.collect()
    training.reward("u0-g0-m1", value)  # after a good one, which stands
    training.reward("u0-g1-m0", 0.5)
    update = training.update(rollouts)
    assert update.metrics["data/trained_tokens"] == 25
    alone = training.collect([*GROUPS, ((value, (3, 4)), (1.0, (3, 5)))])
    update = training.update(alone)
    assert update.metrics["dropped/reward_is_missing"] == 4
    assert update.metrics["data/trained_tokens"] == 25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_store_takes_no_reward_that_is_no_number(training: Training, value: float) -> None:
    training.collect()
    with pytest.raises(StoreError, match="a reward is a finite number"):
        training.reward("u0-g0-m0", value)


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def test_a_gradient_that_is_not_finite_takes_no_step_and_names_the_rollout(
    make_learner: Callable[..., Learner],
) -> None:
    learner, twin = make_learner(), make_learner()
    before = weights_of(learner)
    row = make_row(1)
    loud = dataclasses.replace(row, advantages=np.where(row.action_mask, 1e30, 0.0))
    said = (
        r"gradient norm is (inf|nan) on 2 rows, whose largest advantage is 1e\+30, of rollout 'r1'; the step"
    )
    with pytest.raises(PolicyError, match=said):
        learner.update([loud, make_row(2)], policy_version=1)
    assert all(map(torch.equal, weights_of(learner), before))
    endless = dataclasses.replace(row, advantages=np.where(row.action_mask, 1e60, 0.0))
    with pytest.raises(CreditError, match=r"'r1'.* an advantage is 1e\+60, infinite in float32"):
        learner.update([endless, make_row(2)], policy_version=1)
    rows = [make_row(3), make_row(4)]  # and goes on as if nothing had been
    learnt, expected = (one.update(rows, policy_version=1) for one in (learner, twin))
    assert learnt["loss/total"] == expected["loss/total"]
    assert all(map(torch.equal, weights_of(learner), weights_of(twin)))


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_learner_without_memory_says_what_needs_less_and_goes_on(
    make_learner: Callable[..., Learner],
) -> None:
    learner, twin = make_learner(max_tokens_per_microbatch=10**6, packing="padded"), make_learner()
    rows = [make_row(seed, tokens=500) for seed in range(400)]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with (
        limited(resource.RLIMIT_AS, pages * resource.getpagesize() + 16 * 2**20),
        pytest.raises(PolicyError, match=r"ran out of memory \(.*lower learner\.max_tokens_per_microbatch"),
    ):
        learner.update(rows, policy_version=1)
    few = [make_row(3), make_row(4)]
    learner.update(few, policy_version=1)
    twin.update(few, policy_version=1)
    for one, other in zip(weights_of(learner), weights_of(twin), strict=True):
        torch.testing.assert_close(one, other)


def test_errors_that_are_not_about_memory_go_on_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^a bug$") as caught, running_out_told():
        raise RuntimeError("a bug")
    assert not isinstance(caught.value, PolicyError)


def test_a_full_disk_costs_an_update_nothing_that_was_there(training: Training) -> None:
    first = training.update(training.collect())
    rollouts = training.collect()
    with (
        limited(resource.RLIMIT_FSIZE, 1 << 14),
        pytest.raises(StoreFullError, match=r"no room for a checkpoint under .* free some space"),
    ):
        training.learner.save(Path(training.config.base_dir) / "checkpoints", record=None, keep=1)
    assert checkpoint.latest(Path(training.config.base_dir) / "checkpoints") == Path(first.checkpoint)
    consumed = {
        one.consumed_by for one in training.store.rollouts(rollout_ids=[r.rollout_id for r in rollouts])
    }
    assert consumed == {None}
    weights = Path(training.config.base_dir) / "weights.safetensors"
    training.learner.export_weights(weights)
    before = weights.read_bytes()
    with (
        limited(resource.RLIMIT_FSIZE, 1 << 14),
        pytest.raises(
            StoreFullError, match=r"no room for the weights .* what was there is untouched, free some"
        ),
    ):
        training.learner.export_weights(weights)
    assert weights.read_bytes() == before
    assert [path.name for path in weights.parent.iterdir() if path.name.startswith(".tmp")] == []
    training.update(rollouts)


def test_an_update_that_the_store_had_no_room_for_is_committed_from_its_checkpoint(
    training: Training,
) -> None:
    training.update(training.collect())
    rollouts = training.collect()
    update = training.learn(rollouts)
    with limited(resource.RLIMIT_FSIZE, 1 << 12), pytest.raises(StoreFullError):
        training.commit(update)
    training.store.close()
    training.store = FileStore(training.path)
    ids = [rollout.rollout_id for rollout in rollouts]
    assert {one.consumed_by for one in training.store.rollouts(rollout_ids=ids)} == {None}
    recorded = update_from_json(checkpoint.load_record(update.checkpoint)["update"])
    recorded = dataclasses.replace(recorded, checkpoint=update.checkpoint)
    assert training.store.commit_update(recorded)
    (committed,) = training.store.updates("r", update_index=1)
    assert committed == recorded
    assert replay(training.store, committed).is_same
    assert {one.consumed_by for one in training.store.rollouts(rollout_ids=ids)} == {1}


@pytest.mark.slow
def test_a_hub_that_is_down_when_an_update_is_committed_gets_it_once_it_is_back(training: Training) -> None:
    rollouts = training.collect()
    training.store.close()
    with HubProcess(training.path) as hub:
        training.store = HubClient(hub.url, retry_s=0.0)
        update = training.learn(rollouts)
        hub.kill()
        with pytest.raises(
            HubUnreachableError, match=r"no hub at .* answers .*; start one with `spangrad hub`"
        ):
            training.commit(update)
        with HubProcess(training.path, port=hub.port):
            assert [training.store.commit_update(update) for _ in range(2)] == [True, False]
            assert {one.consumed_by for one in training.store.rollouts()} == {0}
            assert replay(training.store, training.store.updates()[0]).is_same


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"text_config": {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4}}}, 64),
        ({"max_position_embeddings": 8, "rope_parameters": {"full_attention": {"factor": 2.0}, "x": {}}}, 16),
        ({"d_state": 16}, None),
    ],
)
def test_a_models_folder_says_how_much_it_can_be_shown(config: dict[str, Any], tokens: int | None) -> None:
    assert context_length(config) == tokens
