"""Losses that compare sequences, and cloning weighted by advantages."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import preference_losses as reference
from tests.trainer.small_policy import make_row
from torch import Tensor

from spangrad.credit.transition import Preference, Transition
from spangrad.errors import CreditError
from spangrad.trainer.learning.losses import awr_loss, bc_loss, dpo_loss, kto_loss, kto_reference_point
from spangrad.trainer.learning.preference import Scores, by_rollout, with_coefficients

F64 = torch.float64
NONE = Scores(np.zeros(0), np.zeros(0))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def test_dpo_by_hand():
    # beta h = 0.1 * ((-5 + 10) - (-20 + 25 - 10 ln 3)) = ln 3: sigmoid = 3/4, loss = -ln 0.75
    chosen = vector(-5.0).requires_grad_()
    rejected = vector(-20.0 - 10 * math.log(3)).requires_grad_()
    loss, monitors = dpo_loss(
        chosen, rejected, vector(-10.0), vector(-25.0), vector(1.0), preference_beta=0.1
    )
    torch.autograd.backward(loss)
    assert float(loss.detach()) == pytest.approx(0.287682, abs=1e-6)
    # dL / dS_w = -beta (1 - 3/4), dL / dS_l = +beta (1 - 3/4)
    assert chosen.grad is not None and rejected.grad is not None
    assert (float(chosen.grad), float(rejected.grad)) == pytest.approx((-0.025, 0.025))
    assert float(monitors["preference_margin"]) == pytest.approx(math.log(3))
    assert float(monitors["preference_accuracy"]) == 1.0
    # A tenth of the labels wrong: 0.9 * 0.287682 + 0.1 * ln 4
    smoothed, _ = dpo_loss(chosen, rejected, vector(-10.0), vector(-25.0), vector(1.0), label_smoothing=0.1)
    assert float(smoothed.detach()) == pytest.approx(0.9 * 0.287682 + 0.1 * math.log(4), abs=1e-6)


def test_kto_by_hand():
    # z0 = max(0, mean(1, 3)) = 2; beta = 1: good r - z0 = ln 3: 1 - 3/4; bad z0 - r = ln 3: 1 - 3/4
    point = kto_reference_point(vector(-9.0, -7.0), vector(-10.0, -10.0))
    assert float(point) == 2.0
    policy = vector(-8.0 + math.log(3), -8.0 - math.log(3)).requires_grad_()
    good = torch.tensor([True, False])
    loss, monitors = kto_loss(
        policy,
        vector(-10.0, -10.0),
        good,
        vector(1.0, 1.0),
        point,
        preference_beta=1.0,
        good_weight=1.0,
        bad_weight=2.0,
    )
    torch.autograd.backward(loss)
    assert float(loss.detach()) == pytest.approx(0.25 + 2 * 0.25)
    assert policy.grad is not None
    # -beta lambda v (1 - v), with the other sign where bad
    assert policy.grad.tolist() == pytest.approx([-0.1875, 2 * 0.1875])
    assert float(monitors["kto_good"]) == pytest.approx(math.log(3))
    assert float(monitors["kto_bad"]) == pytest.approx(-math.log(3))
    assert float(kto_reference_point(vector(-12.0), vector(-10.0))) == 0.0
    assert float(kto_reference_point(vector(), vector())) == 0.0


def test_awr_by_hand():
    # factors exp(ln 2 / 0.5) = 4, exp(0) = 1, min(exp(10 / 0.5), 20) = 20
    logprobs = vector(-1.0, -2.0, -3.0, math.nan).requires_grad_()
    mask = torch.tensor([True, True, True, False])
    advantages = vector(math.log(2), 0.0, 10.0, math.nan)
    weights = vector(0.5, 0.5, 0.5, math.nan)
    loss, monitors = awr_loss(logprobs, advantages, mask, weights, awr_beta=0.5, awr_max_weight=20.0)
    torch.autograd.backward(loss)
    assert float(loss.detach()) == pytest.approx(0.5 * (4 * 1 + 1 * 2 + 20 * 3))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -0.5, -10.0, 0.0])
    assert float(monitors["awr_weight"]) == pytest.approx(25 / 3)
    assert float(monitors["awr_clipped"]) == pytest.approx(1 / 3)
    plain, _ = awr_loss(logprobs, torch.zeros(4, dtype=F64), mask, weights)
    assert float(plain.detach()) == float(bc_loss(logprobs, mask, weights).detach())
    listed = [(-1.0, math.log(2), 0.5), (-2.0, 0.0, 0.5), (-3.0, 10.0, 0.5)]
    assert float(loss.detach()) == pytest.approx(reference.awr(listed, beta=0.5, max_weight=20.0))


def judged(rollout: str, tokens: int, *preferences: Preference, seed: int = 0) -> Transition:
    return replace(make_row(seed, tokens=tokens), rollout_id=rollout, preferences=preferences)


@st.composite
def batches(draw):
    """Rollouts of one to three rows, pairs between any two of them, a preference of each alone."""
    count = draw(st.integers(2, 4))
    rows_each = [draw(st.integers(1, 3)) for _ in range(count)]
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] != p[1]),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    seed = draw(st.integers(0, 1000))
    return rows_each, pairs, seed


@settings(max_examples=25, deadline=None)
@given(batches(), st.sampled_from(["dpo", "kto"]))
def test_coefficients_have_the_gradient_of_the_formula_however_rollouts_are_cut_into_rows(batch, objective):
    rows_each, pairs, seed = batch
    rng = np.random.default_rng(seed)
    owners = [k for k, count in enumerate(rows_each) for _ in range(count)]
    rows = []
    for b, k in enumerate(owners):
        if objective == "kto":
            mine = [Preference(f"r{k}", k % 2 == 0, 1 / len(rows_each))]
        else:
            mine = [Preference(f"{p}", k == p[0], 1 / len(pairs)) for p in pairs if k in p]
        if mine:
            rows.append(replace(make_row(b, tokens=8), rollout_id=f"r{k}", preferences=tuple(mine)))
    token_logprobs = [
        torch.tensor(rng.normal(-2, 1, int(row.action_mask.sum())), dtype=F64).requires_grad_()
        for row in rows
    ]
    of_reference = rng.normal(-10, 3, len(rows))
    mismatched = Scores(rng.normal(-10, 3, 3), rng.normal(-10, 3, 3)) if objective == "kto" else NONE
    given_settings = (
        {"preference_beta": 0.3, "label_smoothing": 0.1}
        if objective == "dpo"
        else {"preference_beta": 0.3, "good_weight": 1.0, "bad_weight": 1.3}
    )
    scores = Scores(np.array([float(one.detach().sum()) for one in token_logprobs]), of_reference)
    told, value, _ = with_coefficients(rows, scores, mismatched, objective=objective, settings=given_settings)

    # What the learner does: a weighted sum of token logprobs, row by row.
    for row, logprobs in zip(told, token_logprobs, strict=True):
        factors = torch.tensor(row.advantages[row.action_mask] * row.loss_weight)
        torch.autograd.backward(-(factors * logprobs).sum())
    got = [one.grad.clone() for one in token_logprobs if one.grad is not None]

    # The formula, in one go.
    for one in token_logprobs:
        one.grad = None
    sums: dict[str, Tensor] = {}
    refs: dict[str, float] = {}
    for row, logprobs, ref in zip(rows, token_logprobs, of_reference, strict=True):
        sums[row.rollout_id] = sums.get(row.rollout_id, torch.zeros((), dtype=F64)) + logprobs.sum()
        refs[row.rollout_id] = refs.get(row.rollout_id, 0.0) + float(ref)
    floats = {name: float(value.detach()) for name, value in sums.items()}
    if objective == "dpo":
        h = [0.3 * (sums[f"r{w}"] - refs[f"r{w}"] - sums[f"r{lo}"] + refs[f"r{lo}"]) for w, lo in pairs]
        losses = [-0.9 * torch.log(torch.sigmoid(x)) - 0.1 * torch.log(torch.sigmoid(-x)) for x in h]
        quads = [(floats[f"r{w}"], refs[f"r{w}"], floats[f"r{lo}"], refs[f"r{lo}"]) for w, lo in pairs]
        by_hand = reference.dpo(quads, beta=0.3, label_smoothing=0.1)
    else:
        z0 = max(0.0, float((mismatched.policy - mismatched.reference).mean()))
        losses = []
        for k in range(len(rows_each)):
            gain = 0.3 * (sums[f"r{k}"] - refs[f"r{k}"] - z0)
            losses.append(1 - torch.sigmoid(gain) if k % 2 == 0 else 1.3 * (1 - torch.sigmoid(-gain)))
        singles = [(floats[f"r{k}"], refs[f"r{k}"], k % 2 == 0) for k in range(len(rows_each))]
        both = list(zip(mismatched.policy.tolist(), mismatched.reference.tolist(), strict=True))
        by_hand = reference.kto(singles, both, beta=0.3, good_weight=1.0, bad_weight=1.3)
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    assert value == pytest.approx(float(loss.detach())) == pytest.approx(sum(by_hand) / len(by_hand))
    for one, grad in zip(token_logprobs, got, strict=True):
        assert one.grad is not None
        assert torch.allclose(grad, one.grad, rtol=1e-9, atol=1e-12)


def coefficients(rows: Sequence[Transition]) -> None:
    scores = Scores(np.zeros(len(rows)), np.zeros(len(rows)))
    with_coefficients(rows, scores, NONE, objective="dpo", settings={"preference_beta": 0.1})


def test_half_a_pair_and_two_weights_are_refused():
    with pytest.raises(CreditError, match="pair 'a > b' has no rejected side among the rows"):
        coefficients([judged("a", 8, Preference("a > b", True, 1.0))])
    with pytest.raises(CreditError, match=r"preference 'a > b' has weight 0\.5 in one row"):
        coefficients(
            [judged("a", 8, Preference("a > b", True, 1.0)), judged("a", 8, Preference("a > b", True, 0.5))]
        )


def test_sums_of_a_rollout_are_over_all_its_rows():
    rows = [judged("a", 8), judged("b", 8), judged("a", 8)]
    assert by_rollout(rows, np.array([1.0, 2.0, 4.0])).tolist() == [5.0, 2.0]
