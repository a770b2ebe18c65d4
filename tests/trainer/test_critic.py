"""The value head: where values are read, what it learns, and that the policy does not notice."""

import logging
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.reference import losses as reference
from tests.trainer.small_policy import make_row
from torch import Tensor
from transformers import AutoModelForCausalLM

from spangrad.credit.transition import CallSegment, Transition
from spangrad.errors import ConfigError, PolicyError
from spangrad.trainer.learning.checkpoint import latest
from spangrad.trainer.learning.corrections import CorrectionConfig
from spangrad.trainer.learning.critic import Critic, critic_metrics
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import CriticConfig, LearnerConfig
from spangrad.trainer.learning.losses import value_loss

Make = Callable[..., Learner]
PLACES = ((6, 10), (15, 20))
"""Two calls of each row."""


def row_of(seed: int, value: float = 0.0, target: float = 0.7, **more: Any) -> Transition:
    row = make_row(seed)
    segments = tuple(
        CallSegment(f"c{seed}-{t}", "s", t, *place, value, target) for t, place in enumerate(PLACES)
    )
    mask = np.zeros(24, dtype=np.bool_)
    for start, stop in PLACES:
        mask[start:stop] = True
    rng = np.random.default_rng(seed)
    behavior = np.where(mask, -rng.uniform(4.0, 7.0, 24), np.nan).astype(np.float32)
    advantages = np.where(mask, rng.normal(size=24), 0.0)
    told: dict[str, Any] = {
        "action_mask": mask,
        "behavior_logprobs": behavior,
        "advantages": advantages,
        "segments": segments,
    }
    return replace(row, **told, **more)


def rows_of(count: int = 4, **settings: Any) -> list[Transition]:
    return [row_of(seed, **settings) for seed in range(count)]


def critic_of(learner: Learner) -> Critic:
    assert learner._critic is not None
    return learner._critic


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def randomized(learner: Learner) -> Learner:
    """With a head that is not 0."""
    with torch.no_grad():
        critic_of(learner).weight_H.copy_(torch.linspace(-3.0, 5.0, len(critic_of(learner).weight_H)))
        critic_of(learner).bias.fill_(0.25)
    return learner


@pytest.mark.parametrize("packing", ["padded", "varlen", "tree"])
def test_a_value_is_read_before_the_first_token_of_a_call(policy, make_learner, packing):
    learner = randomized(make_learner(critic=CriticConfig(), packing=packing, max_tokens_per_microbatch=60))
    first = row_of(0)
    fork = replace(
        row_of(1), token_ids=np.r_[first.token_ids[:12], row_of(1).token_ids[12:]].astype(np.int32)
    )
    rows = [first, fork, replace(row_of(2), action_mask=np.zeros(24, dtype=np.bool_), segments=())]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    weight = critic_of(learner).weight_H.detach().double()
    expected = []
    for row in rows:
        with torch.no_grad():
            ids = torch.tensor(row.token_ids, dtype=torch.int64)[None]
            hidden = model.model(ids).last_hidden_state[0].double()
        before = [hidden[segment.start - 1] for segment in row.segments]
        expected.append([float(h @ weight) / len(weight) + 0.25 for h in before])
    found = learner.values(rows)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)  # the same tokens are before it


def test_the_loss_is_the_squared_error_and_no_better_beyond_the_clip():
    values, targets = torch.tensor([1.0, 0.2, -1.0]), torch.tensor([0.9, 1.0, -0.5])
    old = torch.tensor([0.0, 0.0, float("nan")])
    # .1^2, .8^2, .5^2
    assert float(value_loss(values, targets, old, clip=None)) == pytest.approx((0.01 + 0.64 + 0.25) / 3)
    # 1 is held at .5: .4^2; .2 is within; the last has no clip
    assert float(value_loss(values, targets, old, clip=0.5)) == pytest.approx((0.16 + 0.64 + 0.25) / 3)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_loss_and_its_gradient_agree_with_the_slow_one(clip):
    rng = np.random.default_rng(0)
    values, targets, old = (torch.from_numpy(rng.normal(size=40)) for _ in range(3))
    leaf = values.requires_grad_()
    loss = value_loss(leaf, targets, old, clip=clip)
    slow = [
        reference.value(*three, clip=clip)
        for three in zip(*map(Tensor.tolist, (values, targets, old)), strict=True)
    ]
    assert float(loss.detach()) == pytest.approx(np.mean([one for one, _ in slow]), abs=1e-12)
    gradient = torch.autograd.grad(loss, leaf)[0]
    np.testing.assert_allclose(gradient.numpy() * 40, [slope for _, slope in slow], atol=1e-12)


def test_the_head_learns_constant_returns_and_the_policy_does_not_notice(make_learner):
    plain, learner = make_learner(), make_learner(critic=CriticConfig())
    found: dict[str, float] = {}
    for _ in range(3):
        expected, found = plain.update(rows_of()), learner.update(rows_of())
        assert same(weights_of(plain.model), weights_of(learner.model))
        assert {name for name in found if name not in expected} == {
            "value/states", "value/mean", "value/loss", "value/loss_fitted"
        }  # fmt: skip
        kept = {name for name in expected if not name.startswith("time/") and not math.isnan(expected[name])}
        assert {name: found[name] for name in kept} == {name: expected[name] for name in kept}
    assert found["value/loss"] == pytest.approx(0.49)  # the rows say that it expected 0
    for _ in range(5):
        found = learner.update(rows_of())
    assert found["value/loss_fitted"] < 0.01
    assert np.concatenate(learner.values(rows_of())) == pytest.approx(0.7, abs=0.1)


def test_the_head_tells_states_apart(make_learner):
    learner = make_learner(critic=CriticConfig(steps=200), lr=1e-6)
    rows = [replace(row, rollout_id=f"r{k}") for k, row in enumerate(rows_of(6))]
    told = [
        replace(row, segments=tuple(replace(one, value_target=float(one.step_index)) for one in row.segments))
        for row in rows
    ]
    learner.update(told)
    before, after = np.array(learner.values(rows)).T
    assert before.mean() < 0.25 and after.mean() > 0.75


def test_rows_without_an_advantage_teach_the_critic_all_the_same(make_learner):
    learner = make_learner(critic=CriticConfig())
    silent = replace(row_of(1, target=-0.7), advantages=np.zeros(24))
    metrics = learner.update([row_of(0), silent])
    assert (metrics["value/states"], metrics["data/rows"]) == (4.0, 2.0)
    assert metrics["value/explained_variance"] == 0.0  # 0 for all: nothing is explained
    good, bad = learner.values([row_of(0), silent])
    assert np.mean(good) > np.mean(bad)


def test_in_its_first_updates_the_critic_can_learn_alone(make_learner):
    learner = make_learner(critic=CriticConfig(warmup_updates=2))
    start = weights_of(learner.model)
    for _ in range(2):
        before = weights_of(critic_of(learner))
        metrics = learner.update(rows_of())
        assert same(start, weights_of(learner.model)) and not same(before, weights_of(critic_of(learner)))
        assert (metrics["optimizer/lr"], "grad/norm" in metrics) == (0.0, False)
    assert (learner.updates, learner.optimizer_steps) == (2, 0)
    metrics = learner.update(rows_of())
    assert not same(start, weights_of(learner.model)) and metrics["grad/norm"] > 0
    assert learner.optimizer_steps == 1


CHANGED: dict[str, Any] = {"lr": 0.2, "steps": 3, "clip": 0.05, "warmup_updates": 1}


@pytest.mark.parametrize("name", [field.name for field in fields(CriticConfig)])
def test_every_setting_of_the_critic_does_something(make_learner, name):
    learners = [make_learner(critic=CriticConfig(**more)) for more in ({}, {name: CHANGED[name]})]
    for learner in learners:
        learner.update(rows_of())
    kinds = [weights_of(one.model) | weights_of(critic_of(one)) for one in learners]
    assert not same(*kinds)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("lr", 0.0, "more than 0"), ("steps", 0, "1 or more"), ("clip", 0.0, "more than 0"),
     ("warmup_updates", -1, "0 or more")],
)  # fmt: skip
def test_settings_of_the_critic_have_ranges(name, value, expected):
    with pytest.raises(ConfigError, match=rf"learner\.critic\.{name} is {value!r}, expected {expected}"):
        CriticConfig(**{name: value})


def test_settings_of_the_critic_that_change_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"learner\.critic = .* has no effect with objective 'bc'"):
        LearnerConfig(objective="bc", critic=CriticConfig())
    one_step = CriticConfig(steps=1, clip=0.5)
    with pytest.raises(ConfigError, match=r"learner\.critic\.clip = 0\.5 has no effect"):
        LearnerConfig(critic=one_step)
    assert LearnerConfig(critic=one_step, minibatches_per_update=2).critic == one_step


def test_a_resumed_critic_continues_bit_for_bit_and_is_in_no_export(make_learner: Make, tmp_path: Path):
    settings = {"critic": CriticConfig(clip=0.5, warmup_updates=2), "minibatches_per_update": 2}
    batches = [[row_of(10 * n + k, target=0.3 * k) for k in range(4)] for n in range(4)]
    straight, first, second = (make_learner(**settings) for _ in range(3))
    for rows in batches:
        straight.update(rows)
    for rows in batches[:2]:
        first.update(rows)
    first.save(tmp_path / "checkpoints", record=None)
    second.update(batches[3])  # whatever it did before is gone after the load
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None
    second.load(newest)
    for rows in batches[2:]:
        second.update(rows)
    assert same(weights_of(critic_of(straight)), weights_of(critic_of(second)))
    assert same(weights_of(straight.model), weights_of(second.model))
    assert straight.values(batches[0]) == second.values(batches[0])
    second.export_weights(tmp_path / "weights.safetensors")
    make_learner().export_weights(tmp_path / "plain.safetensors")
    names = [set(load_file(tmp_path / f"{name}.safetensors")) for name in ("weights", "plain")]
    assert names[0] == names[1]


def test_a_critic_that_begins_or_ends_in_the_middle_of_a_run_is_said(make_learner, tmp_path, caplog):
    plain, learner = make_learner(), make_learner(critic=CriticConfig())
    plain.update(rows_of())
    learner.update(rows_of())
    without = plain.save(tmp_path / "without", record=None)
    saved = learner.save(tmp_path / "with", record=None)
    with caplog.at_level(logging.WARNING):
        plain.load(saved)
        learner.load(without)
    assert [line for line in caplog.messages if "critic" in line] == [
        f"checkpoint {str(saved)!r} has a critic that nothing asks any more: it is left out",
        "the checkpoint has no critic: it begins at 0",
    ]
    assert np.concatenate(learner.values(rows_of())).tolist() == [0.0] * 8


def test_a_call_without_its_first_token_has_no_value_and_teaches_nothing(make_learner):
    learner = make_learner(critic=CriticConfig())
    rows = rows_of()
    cut = [replace(row, action_mask=row.action_mask & (np.arange(24) > 6)) for row in rows]
    with pytest.raises(PolicyError, match=r"the first token of call 'c0-0' \(place 6\) is not in the action"):
        learner.values(cut)
    told = [
        replace(
            row, segments=tuple(replace(one, value_target=float(1 - one.step_index)) for one in row.segments)
        )
        for row in cut
    ]
    learner.update(told)  # what is left teaches 0: nothing changes
    assert not weights_of(critic_of(learner))["weight_H"].any()
    with pytest.raises(PolicyError, match="the learner has no critic to ask"):
        make_learner().values(rows)


def test_corrections_and_models_that_make_their_own_logits_leave_the_critic_its_states(make_learner):
    band = CorrectionConfig(token_band=(1e-30, math.inf))
    found = []
    for settings in ({}, {"correction": band}):
        learner = make_learner(critic=CriticConfig(), **settings)
        learner.update(rows_of())
        found.append(weights_of(critic_of(learner)))
    own = make_learner(critic=CriticConfig())
    own._passes.head = None
    own.update(rows_of())
    for one in (found[1], weights_of(critic_of(own))):
        for name, value in found[0].items():
            assert torch.allclose(value, one[name], atol=1e-5)


def test_explained_variance_is_of_what_was_said_before():
    def told(*pairs: tuple[float, float]) -> dict[str, float]:
        segments = tuple(CallSegment("c", "s", t, 1, 2, *pair) for t, pair in enumerate(pairs))
        return critic_metrics([replace(row_of(0), segments=segments)])

    # Errors -.5 and .5, returns 0 and 2: 1 - .25 / 1
    assert told((0.5, 0.0), (1.5, 2.0))["value/explained_variance"] == pytest.approx(0.75)
    assert told((0.3, 0.0), (2.3, 2.0))["value/explained_variance"] == pytest.approx(1.0)  # off by a constant
    assert "value/explained_variance" not in told((0.5, 1.0), (0.7, 1.0))
    assert told() == {"value/states": 0.0}
