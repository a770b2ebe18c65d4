"""Every objective against its paper, and every setting of the loss against every objective."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.reference import losses as reference
from tests.trainer.small_policy import make_row
from torch import Tensor

from spangrad.credit.transition import CallSegment, Preference, Transition
from spangrad.errors import ConfigError, CreditError, EmptyBatchError
from spangrad.trainer.learning import losses
from spangrad.trainer.learning.corrections import CorrectionConfig
from spangrad.trainer.learning.echo import with_observations
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import TargetStats
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.objective import RATIO_LOSSES, batch_loss
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.learning.packing import pack
from spangrad.trainer.learning.preference import Comparison

F64 = torch.float64
RATIO_OBJECTIVES = sorted(name for name, objective in OBJECTIVES.items() if objective.uses_ratio)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def random_tokens(seed: int, count: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, behaviour logprobs, advantages of one value a sequence, and sequence ids."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 4, count))
    behavior = -rng.uniform(0.05, 3.0, count)
    policy = np.minimum(behavior + rng.normal(0.0, 1.0, count), -0.01)
    return tuple(torch.tensor(x) for x in (policy, behavior, rng.normal(size=4)[ids], ids))  # type: ignore[return-value]


def run(objective: str, policy: Tensor, behavior: Tensor, advantages: Tensor, ids: Tensor, weights: Tensor):
    """-> (loss, gradient, monitors) of tokens, all trained."""
    leaf = policy.clone().requires_grad_()
    names = LearnerConfig(objective=objective).loss_settings()
    if names.pop("sequence", None):
        names["sequence_ids_BT"] = ids
    mask = torch.ones(policy.shape, dtype=torch.bool)
    loss, monitors = RATIO_LOSSES[objective](leaf, behavior, advantages, mask, weights, **names)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient, monitors


def by_reference(objective: str, policy: Tensor, behavior: Tensor, advantages: Tensor, ids: Tensor):
    """-> (token losses, gradient of their sum)."""
    columns = [policy.tolist(), behavior.tolist(), advantages.tolist()]
    if objective.startswith("gspo"):
        return getattr(reference, objective)(*columns, ids.tolist())
    call: Any = {
        "ppo": reference.ppo,
        "dapo": lambda *token: reference.ppo(*token, dual=None),
        "cispo": reference.cispo,
        "sapo": reference.sapo,
        "dppo_tv": lambda *token: reference.dppo(*token, low=0.2, high=0.2, by_kl=False),
        "dppo_kl": lambda *token: reference.dppo(*token, low=0.05, high=0.05, by_kl=True),
        "importance_sampling": reference.importance_sampling,
    }[objective]
    return zip(*(call(*token) for token in zip(*columns, strict=True)), strict=True)


@pytest.mark.parametrize("objective", RATIO_OBJECTIVES)
def test_each_objective_is_the_one_of_its_paper(objective):
    for seed in range(4):
        tokens = random_tokens(seed)
        weights = torch.full((12,), 0.25, dtype=F64)
        loss, gradient, _ = run(objective, *tokens, weights)
        wanted, slopes = by_reference(objective, *tokens)
        assert loss == pytest.approx(0.25 * sum(wanted))
        assert gradient.tolist() == pytest.approx([0.25 * slope for slope in slopes])


@pytest.mark.parametrize("objective", RATIO_OBJECTIVES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
def test_tokens_outside_the_mask_change_nothing(objective, seed, junk):
    policy, behavior, advantages, ids = random_tokens(seed)
    mask = torch.tensor(np.random.default_rng(seed).random(12) < 0.5)
    mask[0] = True
    weights = torch.full((12,), 0.25, dtype=F64)
    loss, gradient, _ = run(
        objective, *(column[mask] for column in (policy, behavior, advantages, ids, weights))
    )
    names = LearnerConfig(objective=objective).loss_settings()
    if names.pop("sequence", None):
        names["sequence_ids_BT"] = ids
    spoiled = [torch.where(mask, c, torch.tensor(junk, dtype=F64)) for c in (behavior, advantages, weights)]
    leaf = torch.where(mask, policy, torch.tensor(-50.0, dtype=F64)).requires_grad_()
    got, monitors = RATIO_LOSSES[objective](leaf, spoiled[0], spoiled[1], mask, spoiled[2], **names)
    (slopes,) = torch.autograd.grad(got, leaf)
    assert float(got.detach()) == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(slopes[mask], gradient, atol=1e-14) and (slopes[~mask] == 0).all()
    assert all(torch.isfinite(value) for value in monitors.values())
    with pytest.raises(EmptyBatchError):
        RATIO_LOSSES[objective](leaf, spoiled[0], spoiled[1], mask & ~mask, spoiled[2], **names)


@pytest.mark.parametrize("objective", RATIO_OBJECTIVES)
def test_extreme_ratios_give_a_finite_gradient(objective):
    policy = torch.tensor([-1e-9, -200.0, -0.0, -30.0])
    behavior = torch.tensor([-200.0, -1e-9, -30.0, -0.0])
    for sign in (1.0, -1.0):
        ids, weights = torch.arange(4), torch.ones(4)
        loss, gradient, _ = run(objective, policy, behavior, torch.full((4,), sign), ids, weights)
        assert math.isfinite(loss) and torch.isfinite(gradient).all()


def test_sapo_gives_the_golden_gates():
    # r = 1.5: (4 / 1) sigmoid(.5) = 2.489837; (4 / 1.05) sigmoid(.525) = 2.393585
    one, ratio = vector(1.0), vector(math.log(1.5))
    for advantage, gate in ((1.0, 2.489837), (-1.0, 2.393585)):
        loss, _, _ = run("sapo", ratio, vector(0.0), vector(advantage), torch.tensor([0]), one)
        assert loss == pytest.approx(-advantage * gate, abs=1e-6)
    # ... in the precision of what it is given: 4 / 1.05 to all digits of float64
    exact = 4.0 / 1.05 / (1.0 + math.exp(-1.05 * (math.exp(math.log(1.5)) - 1.0)))
    assert run("sapo", ratio, vector(0.0), vector(-1.0), torch.tensor([0]), one)[0] == pytest.approx(
        exact, rel=1e-14
    )
    # at r = 1 the gate is 4 / tau / 2 and its slope 1: the gradient of REINFORCE
    _, slope, monitors = run("sapo", vector(-1.0), vector(-1.0), one, torch.tensor([0]), one)
    assert float(slope) == pytest.approx(-1.0) and float(monitors["gate_mean"]) == pytest.approx(1.0)


def test_dapo_is_ppo_without_dual_clip():
    far = (vector(math.log(5.0)), vector(0.0), vector(-1.0), torch.tensor([0]), vector(1.0))
    assert (run("dapo", *far)[0], run("ppo", *far)[0]) == pytest.approx((5.0, 3.0))


@pytest.mark.parametrize("objective", sorted(set(RATIO_OBJECTIVES) - {"sapo"}))
def test_on_policy_every_objective_has_the_gradient_of_reinforce(objective):
    policy, _, advantages, ids = random_tokens(0)
    # One weight a sequence; whatever the objective, d/dlog pi = -w A.
    loss, gradient, monitors = run(
        objective, policy, policy, advantages, ids, torch.full((12,), 0.5, dtype=F64)
    )
    assert gradient.tolist() == pytest.approx((-0.5 * advantages).tolist())
    assert float(monitors["ratio_mean"]) == 1.0 and math.isfinite(loss)


def test_what_a_bound_held_is_counted():
    # Ratios 0.5 and 2 (and 6), good and bad.
    policy, behavior = vector(-2.0, -2.0, -2.0, -2.0), vector(-2.0, -2.0, -2.0, -2.0)
    policy = policy + vector(*np.log([0.5, 0.5, 2.0, 6.0]))
    advantages, ids, weights = vector(1.0, -1.0, 1.0, 1.0), torch.arange(4), vector(1.0, 1.0, 1.0, 1.0)
    shares = {
        name: tuple(float(run(name, policy, behavior, advantages, ids, weights)[2][key]) for key in KEYS)
        for name in ("ppo", "gspo", "cispo", "dppo_tv")
    }
    assert shares["ppo"] == shares["gspo"] == (0.25, 0.5)
    assert shares["cispo"] == (0.0, 0.25)  # 6 > 5
    # mu = .1353: pi - mu = -.068, -.068, .135, .677; only the last moved by more than .2 upwards
    assert shares["dppo_tv"] == (0.0, 0.25)


KEYS = ("clip_low", "clip_high")


def test_gspo_refuses_advantages_that_differ_inside_a_sequence():
    policy, behavior, _, _ = random_tokens(1)
    ids = torch.zeros(12, dtype=torch.int64)
    mixed, weights = torch.linspace(-1.0, 1.0, 12, dtype=F64), torch.ones(12, dtype=F64)
    with pytest.raises(CreditError, match=r"from -1\.0 to 1\.0.*'gspo_token'"):
        run("gspo", policy, behavior, mixed, ids, weights)
    assert run("gspo_token", policy, behavior, mixed, ids, weights)[1].abs().sum() > 0


def test_gspo_and_its_token_form_agree_where_a_sequence_has_one_advantage():
    tokens = random_tokens(3)
    weights = torch.full((12,), 0.1, dtype=F64)
    whole, token = run("gspo", *tokens, weights), run("gspo_token", *tokens, weights)
    assert whole[0] == pytest.approx(token[0])
    # The same pull on the sequence as a whole.
    for sequence in tokens[3].unique():
        where = tokens[3] == sequence
        assert float(whole[1][where].sum()) == pytest.approx(float(token[1][where].sum()))
    assert torch.allclose(whole[1], token[1])


def test_a_probability_of_one_has_a_divergence():
    one = vector(1.0)
    for policy, behavior, advantage, held in (
        (0.0, -1.0, 1.0, True),  # only the behaviour policy allowed another token: infinitely far
        (-1.0, 0.0, -1.0, True),  # KL(1, e^-1) = 1 nat
        (0.0, 0.0, 1.0, False),
        (-0.01, 0.0, -1.0, False),  # KL(1, .99) = .01 nats
    ):
        _, slope, _ = run(
            "dppo_kl", vector(policy), vector(behavior), vector(advantage), torch.tensor([0]), one
        )
        assert (float(slope) == 0.0) == held


# --- the penalty towards the start ---------------------------------------------------------------


def divergences(logits: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """-> gradients of KL(pi, other) and KL(other, pi) by the logits."""
    leaf = logits.clone().requires_grad_()
    log_pi = leaf.log_softmax(-1)
    forward = torch.autograd.grad((log_pi.exp() * (log_pi - other)).sum(), leaf, retain_graph=True)[0]
    return forward, torch.autograd.grad((other.exp() * (other - log_pi)).sum(), leaf)[0]


def expected_gradient(estimator: Any, logits: Tensor, other: Tensor, behavior: Tensor) -> Tensor:
    """Over tokens that `behavior` sampled."""
    leaf = logits.clone().requires_grad_()
    every = torch.ones(3, dtype=torch.bool)
    loss = losses.kl_penalty(
        leaf.log_softmax(-1),
        other,
        every,
        behavior.exp(),
        1.0,
        estimator=estimator,
        behavior_logprobs_BT=behavior,
    )
    return torch.autograd.grad(loss, leaf)[0]


def test_each_estimator_pulls_where_its_docstring_says():
    logits, other = vector(0.3, -1.2, 0.8), vector(0.5, 0.3, 0.2).log()
    own, foreign = logits.log_softmax(-1), vector(0.2, 0.5, 0.3).log()
    reverse, forward = divergences(logits, other)
    assert torch.allclose(expected_gradient("k1", logits, other, own), torch.zeros(3, dtype=F64), atol=1e-12)
    for name in ("k2", "k3_straight_through", "k3_unbiased"):
        assert torch.allclose(expected_gradient(name, logits, other, own), reverse, atol=1e-12), name
    assert torch.allclose(expected_gradient("k3", logits, other, own), forward, atol=1e-12)
    # Sampled by another policy, only one of them is still right.
    assert torch.allclose(expected_gradient("k3_unbiased", logits, other, foreign), reverse, atol=1e-12)
    for name in ("k2", "k3", "k3_straight_through"):
        assert not torch.allclose(expected_gradient(name, logits, other, foreign), reverse, atol=1e-2), name


def test_estimators_have_the_values_of_their_formulas():
    policy, other, behavior = vector(-1.0, -2.0), vector(-1.5, -1.0), vector(-1.2, -2.2)
    mask, weights = torch.tensor([True, True]), vector(0.5, 0.5)
    d = np.array([-0.5, 1.0])
    k3, ratio = np.exp(d) - 1 - d, np.exp([0.2, 0.2])
    wanted = {"k1": -d, "k2": d**2 / 2, "k3": k3, "k3_straight_through": k3, "k3_unbiased": ratio * k3}
    for name, values in wanted.items():
        loss = losses.kl_penalty(
            policy,
            other,
            mask,
            weights,
            2.0,
            estimator=cast(Any, name),
            behavior_logprobs_BT=behavior,
        )
        assert float(loss) == pytest.approx(2.0 * values.mean()), name


# --- every setting of the loss -------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "clip_low": 0.9,
    "clip_high": 3.0,
    "dual_clip": None,
    "sequence": "row",
    "tau_positive": 2.0,
    "tau_negative": 2.0,
    "max_ratio": 1.5,
    "log_ratio_coef": 0.1,
    "awr_beta": 0.5,
    "awr_max_weight": 1.5,
    "preference_beta": 0.3,
    "label_smoothing": 0.1,
    "good_weight": 1.5,
    "bad_weight": 1.5,
    "echo_coef": 0.1,
    "entropy_coef": 0.1,
    "kl_coef": 0.2,
    "kl_estimator": "k3",
}
ELSEWHERE = {
    "model_path", "dtype", "device", "lr", "betas", "weight_decay", "max_grad_norm", "warmup_updates",
    "decay_updates", "objective", "epochs_per_update", "minibatches_per_update",
    "max_tokens_per_microbatch", "gradient_checkpointing", "lora_rank", "lora_alpha", "lora_targets",
    "packing", "kl_monitor_rows", "seed", "threads", "correction", "workers", "sharding",
    "critic",
}  # fmt: skip
"""Settings that are not of the loss: `test_learner.py`, `test_lora.py`, `test_corrections.py`,
`test_critic.py`, `test_ranks.py` walk them."""


def two_calls(seed: int) -> Transition:
    """A row of two calls with one advantage, so that a call is not the row."""
    row = make_row(seed, tokens=30)
    shown = np.arange(34) >= 30
    segments = (CallSegment(f"a{seed}", "a", 0, 1, 14), CallSegment(f"b{seed}", "b", 1, 14, 30))
    advantage = (-1.0) ** seed * (1 + seed)
    behavior = -np.random.default_rng(seed).uniform(0.05, 3.0, 30)
    row = replace(
        row,
        segments=segments,
        advantages=np.where(row.action_mask, advantage, 0.0),
        behavior_logprobs=np.where(row.action_mask, behavior, np.nan).astype(np.float32),
    )
    return replace(
        row,
        token_ids=np.append(row.token_ids, row.token_ids[:4]),
        action_mask=np.append(row.action_mask, [False] * 4),
        behavior_logprobs=np.append(row.behavior_logprobs, np.full(4, np.nan, dtype=np.float32)),
        policy_versions=np.append(row.policy_versions, np.full(4, -1, dtype=np.int32)),
        advantages=np.append(row.advantages, np.zeros(4)),
        observation_mask=shown,
    )


def compared(rows: list[Transition], config: LearnerConfig, totals: Totals) -> list[Transition]:
    """The rows as sequences of pairs (or of their own), with what their tokens are worth in the loss."""
    rows = [
        replace(
            row, preferences=(Preference(str(k // 2 if config.objective == "dpo" else k), k % 2 == 0, 0.5),)
        )
        for k, row in enumerate(rows)
    ]

    def policy(rows: Sequence[Transition]) -> NDArray[np.float64]:
        return np.array([-3.0 * k for k in range(1, len(rows) + 1)])

    def start(rows: Sequence[Transition]) -> NDArray[np.float64]:
        return np.array([-2.0 * k * k for k in range(1, len(rows) + 1)])

    seconds = {"reference": 0.0}
    return Comparison(rows, config, policy, start, seconds).weighed(rows, totals, seconds)


def outcome(
    config: LearnerConfig, rows: list[Transition] | None = None, *, moved: float = 3.0
) -> tuple[float, Tensor]:
    """Loss and gradient on rows whose ratios reach every bound; with `moved` 0 they are all 1."""
    rows = rows or [two_calls(seed) for seed in range(4)]
    totals = Totals()
    if OBJECTIVES[config.objective].compares_sequences:
        rows = compared(rows, config, totals)
    if config.echo_coef > 0:
        rows = with_observations(rows)
    (batch,) = pack(rows, max_tokens_per_batch=10**6, pad_token_id=0)
    mask = batch.target_mask_BT
    ids = batch.target_ids_BT[mask].double()
    policy = batch.behavior_logprobs_BT[mask].double() + moved * torch.sin(
        ids
    )  # the same wherever the token is
    leaf = policy.clamp(max=-0.01).requires_grad_()
    stats = TargetStats(leaf, leaf * 0.5)
    loss = batch_loss(config, batch, stats, policy.detach() - ids % 3.0, totals)
    return totals.metrics()["loss/total"], torch.autograd.grad(loss, leaf)[0]


def test_a_call_has_the_same_ratio_however_its_rollout_is_cut_into_rows():
    whole = two_calls(0)
    apart = [
        replace(whole, segments=(segment,), action_mask=whole.action_mask & (np.arange(34) // 14 == place))
        for place, segment in enumerate(whole.segments)
    ]
    assert sum(row.action_mask.sum() for row in apart) == whole.action_mask.sum()
    for objective in RATIO_OBJECTIVES:
        config = LearnerConfig(objective=objective)
        assert outcome(config, apart)[0] == pytest.approx(outcome(config, [whole])[0], rel=1e-12), objective
    by_row = LearnerConfig(objective="gspo", sequence="row", clip_low=0.5, clip_high=3.0)
    assert outcome(by_row, apart)[0] != pytest.approx(outcome(by_row, [whole])[0], rel=1e-3)


def test_every_setting_of_the_loss_is_walked():
    assert {field.name for field in fields(LearnerConfig)} == set(CHANGED) | ELSEWHERE


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_setting_changes_something_or_is_refused(objective):
    for name, value in CHANGED.items():
        config = LearnerConfig(objective=objective, kl_coef=0.1 if name.startswith("kl") else 0.0)
        if name in config.settings_unused():
            with pytest.raises(ConfigError, match=rf"learner\.{name} = .* has no effect with objective"):
                replace(config, **{name: value})
        else:
            before, after = outcome(config), outcome(replace(config, **{name: value}))
            assert before[0] != after[0] or not torch.equal(before[1], after[1]), name


@pytest.mark.parametrize("objective", RATIO_OBJECTIVES)
def test_what_only_a_ratio_other_than_one_reaches_is_refused_where_it_is_one(objective):
    plain, proximal = LearnerConfig(objective=objective), CorrectionConfig(proximal=True)
    for name in OBJECTIVES[objective].names:
        changed = {name: CHANGED[name]}
        before, after = (outcome(each, moved=0.0)[1] for each in (plain, replace(plain, **changed)))
        assert torch.allclose(before, after, rtol=1e-12), name
        with pytest.raises(ConfigError, match=rf"learner\.{name} = .* one optimizer step an update"):
            replace(plain, correction=proximal, **changed)
        replace(plain, correction=proximal, minibatches_per_update=2, **changed)


def test_every_objective_gives_something_else():
    found = {name: tuple(outcome(LearnerConfig(objective=name))[1].tolist()) for name in OBJECTIVES}
    # One advantage a sequence: the two forms of GSPO have one gradient, to the last bit or so.
    assert found.pop("gspo_token") == pytest.approx(found["gspo"], abs=1e-12)
    assert len(set(found.values())) == len(OBJECTIVES) - 1


def test_settings_that_depend_on_others_are_refused_with_the_reason():
    for settings_, reason in (
        ({"kl_estimator": "k1"}, "with kl_coef 0"),
        ({"objective": "bc", "kl_coef": 0.1, "kl_estimator": "k3_unbiased"}, "has no ratio"),
        ({"kl_coef": 0.1, "kl_monitor_rows": 5}, "compares every row"),
        ({"objective": "bc", "kl_monitor_rows": 5}, "'bc' and kl_coef 0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LearnerConfig(**settings_)


def test_clip_bounds_are_the_objectives_own_unless_named():
    for name, objective in OBJECTIVES.items():
        found = LearnerConfig(objective=name).loss_settings()
        assert (found.get("clip_low"), found.get("clip_high")) == (objective.clip or (None, None))
    named = LearnerConfig(objective="gspo", clip_high=0.1)
    assert [named.loss_settings()[key] for key in KEYS] == [3e-4, 0.1]
    # Another objective brings its own.
    assert [replace(LearnerConfig(), objective="gspo").loss_settings()[key] for key in KEYS] == [3e-4, 4e-4]
