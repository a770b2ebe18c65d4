"""The learner with objectives that compare sequences, or weigh tokens without a ratio."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.small_policy import make_model, make_row
from torch import Tensor

from spangrad.credit.labels import labelled, mismatched
from spangrad.credit.pairs import paired
from spangrad.credit.transition import CallSegment, Transition
from spangrad.errors import ConfigError, CreditError, EmptyBatchError
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig

Make = Callable[..., Learner]


RETURNS = {f"r{k}": float(k % 2) for k in range(6)}


def rows_of(*, rows_each: int = 2, text: bool = True) -> list[Transition]:
    """Six rollouts of two tasks, several rows each, as stored traces have them: without logprobs."""
    made = []
    for k in range(6):
        for j in range(rows_each):
            row = make_row(10 * k + j, tokens=10 + k + 4 * j)
            made.append(
                replace(
                    row,
                    rollout_id=f"r{k}",
                    group_id="odd" if k < 3 else "even",
                    segments=(CallSegment(f"c{k}{j}", f"s{k}{j}", j, 1, len(row.token_ids)),),
                    behavior_logprobs=np.full(len(row.token_ids), np.nan, dtype=np.float32),
                    grade="text" if text else "ids",
                    temperature=0.7,
                )
            )
    return made


def gradient(learner: Learner) -> Tensor:
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


def kept_gradient(learner: Learner, rows: list[Transition]) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of one update that takes no step, in float64."""
    learner.model.double()
    if learner._reference is not None:
        learner._reference.double()
    kept: list[Tensor] = []
    learner._step = lambda lr, rows: kept.append(gradient(learner)) or 0.0  # type: ignore[func-returns-value, method-assign]
    metrics = learner.update(rows)
    return kept[0], metrics


def moved_model(learner: Learner) -> None:
    """Move the policy away from its start, as an earlier update would have."""
    with torch.no_grad():
        other = make_model(seed=5).state_dict()
        for name, value in learner.model.state_dict().items():
            value.add_(0.3 * (other[name] - value))


def plain_sums(model: Any, rows: list[Transition]) -> dict[str, Tensor]:
    """log pi of every rollout, from full logits, row by row."""
    sums: dict[str, Tensor] = {}
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        mine = logprobs[torch.from_numpy(row.action_mask[1:])].sum()
        sums[row.rollout_id] = sums.get(row.rollout_id, torch.zeros((), dtype=mine.dtype)) + mine
    return sums


def formula(learner: Learner, rows: list[Transition], objective: str) -> Tensor:
    """The loss of all rows at once, straight from its formula."""
    pi = plain_sums(learner.model, rows)
    with torch.no_grad():
        ref = plain_sums(learner._reference, rows)
    r = {name: pi[name] - ref[name] for name in pi}
    if objective == "dpo":
        pairs = [("r1", "r0"), ("r1", "r2"), ("r3", "r4"), ("r5", "r4")]
        return torch.stack([-torch.log(torch.sigmoid(0.1 * (r[w] - r[lo]))) for w, lo in pairs]).mean()
    others = mismatched(rows)
    with torch.no_grad():
        at, there = plain_sums(learner.model, others), plain_sums(learner._reference, others)
        z0 = torch.stack([at[name] - there[name] for name in at]).mean().clamp(min=0.0)
    v = [torch.sigmoid(0.1 * (r[n] - z0) * (1 if RETURNS[n] else -1)) for n in r]
    return 1.0 - torch.stack(v).mean()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize("microbatch", [1, 10**6])
def test_microbatches_have_the_gradient_of_the_formula(make_learner, objective, microbatch):
    made = rows_of()
    rows = list((paired if objective == "dpo" else labelled)(made, RETURNS).rows)
    learner = make_learner(objective=objective, max_tokens_per_microbatch=microbatch)
    moved_model(learner)
    got, metrics = kept_gradient(learner, rows)
    learner.model.zero_grad()
    loss = formula(learner, rows, objective)
    torch.autograd.backward(loss)
    expected = gradient(learner)
    assert (
        metrics[f"loss/{objective}"] == metrics["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-6)
    )
    assert expected.norm() > 0
    # Factors travel with the rows in float32.
    assert float((got - expected).norm() / expected.norm()) < 1e-6


def test_awr_weighs_tokens_by_their_advantage_and_needs_no_logprobs(make_learner):
    rows = rows_of(rows_each=1)
    rows[0].advantages[rows[0].action_mask] = 100.0
    rows[1] = replace(rows[1], advantages=np.where(rows[1].action_mask, np.nan, 0.0))
    learner = make_learner(objective="awr", awr_beta=0.5)
    got, metrics = kept_gradient(learner, rows)
    learner.model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows[:1] + rows[2:]:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        logprobs = learner.model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        factors = np.minimum(np.exp(row.advantages / 0.5), 20.0) * row.loss_weight * row.action_mask
        loss = loss - (torch.tensor(factors[1:]) * logprobs).sum()
    torch.autograd.backward(loss)
    assert metrics["loss/awr"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert float((got - gradient(learner)).norm() / got.norm()) < 1e-6
    assert metrics["data/tokens_without_advantage"] == rows[1].action_mask.sum()
    assert metrics["data/rows_without_signal"] == 1
    assert metrics["policy/awr_clipped"] > 0


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2, "lr": 1e-2}], ids=["full", "lora"])
def test_what_is_preferred_becomes_more_likely_and_the_rest_less(make_learner, settings):
    rows = list(paired(rows_of(), RETURNS).rows)
    learner = make_learner(objective="dpo", epochs_per_update=4, minibatches_per_update=2, **settings)
    first = learner.update(rows)
    second = learner.update(rows)
    assert learner.optimizer_steps == 16
    assert second["policy/preference_margin"] > first["policy/preference_margin"] > 0
    assert second["policy/preference_accuracy"] == 1.0
    assert second["loss/dpo"] < first["loss/dpo"] < np.log(2)
    assert second["policy/kl_to_start"] > 0


@pytest.mark.parametrize(
    ("objective", "setting"),
    [
        ("dpo", {"preference_beta": 0.5}),
        ("dpo", {"label_smoothing": 0.2}),
        ("dpo", {"kl_monitor_rows": 1}),
        ("kto", {"preference_beta": 0.5}),
        ("kto", {"good_weight": 1.5}),
        ("kto", {"bad_weight": 1.5}),
        ("awr", {"awr_beta": 0.2}),
        ("awr", {"awr_max_weight": 1.0}),
        ("awr", {"kl_coef": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_every_setting_changes_what_is_learned_or_told(make_learner, objective, setting):
    rows = rows_of(rows_each=1)
    if objective != "awr":
        rows = list((paired if objective == "dpo" else labelled)(rows, RETURNS).rows)
    found = []
    for changed in (False, True):
        learner = make_learner(objective=objective, **(setting if changed else {}))
        moved_model(learner)
        metrics = learner.update(rows)
        found.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("objective", "setting"),
    [
        ("ppo", {"awr_beta": 2.0}),
        ("bc", {"preference_beta": 0.2}),
        ("dpo", {"good_weight": 2.0}),
        ("kto", {"label_smoothing": 0.1}),
        ("awr", {"label_smoothing": 0.1}),
        ("awr", {"kl_monitor_rows": 3}),
        ("dpo", {"clip_low": 0.1}),
    ],
)
def test_a_setting_of_another_objective_is_refused(objective, setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"learner.{name} = .* has no effect with objective '{objective}'"):
        LearnerConfig(objective=objective, **setting)


def test_rows_without_a_preference_are_left_out_and_counted(make_learner):
    rows = rows_of(rows_each=1)
    judged = list(paired(rows, RETURNS).rows)
    metrics = make_learner(objective="dpo").update([*judged, replace(rows[0], preferences=())])
    assert (metrics["data/rows"], metrics["data/rows_without_signal"]) == (6, 1)
    with pytest.raises(EmptyBatchError, match="6 have zero weight, no preference or"):
        make_learner(objective="kto").update(rows)
    half = [row for row in judged if row.rollout_id != "r4"]
    with pytest.raises(CreditError, match=r"pair 'r3 > r4' has no rejected side"):
        make_learner(objective="dpo").update(half)
