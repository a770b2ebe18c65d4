import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spangrad.errors import EmptyBatchError
from spangrad.trainer.learning.losses import (
    bc_loss,
    entropy_bonus,
    kl_k3,
    kl_penalty,
    ppo_clip_loss,
    token_entropy,
    weighted_sum,
)

F64 = torch.float64


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def ppo_of(ratio: float, advantage: float, *, dual_clip: float | None = 3.0) -> float:
    loss, _ = ppo_clip_loss(
        vector(math.log(ratio)),
        vector(0.0),
        vector(advantage),
        torch.tensor([True]),
        vector(1.0),
        dual_clip=dual_clip,
    )
    return float(loss)


def test_ppo_gives_the_golden_numbers():
    # r = 1.5, A = 1: max(-1.5, -1.28) = -1.28
    assert ppo_of(1.5, 1.0) == pytest.approx(-1.28)
    # r = 5, A = -1: max(5, 1.28) = 5, dual clip at c = 3 makes it 3
    assert ppo_of(5.0, -1.0, dual_clip=3.0) == pytest.approx(3.0)
    assert ppo_of(5.0, -1.0, dual_clip=None) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (0.5, 1.0, -0.5),  # falling below the lower bound is never clipped where A > 0
        (0.5, -1.0, 0.8),  # max(0.5, 0.8): clipped at 1 - 0.2
        (1.2, 1.0, -1.2),  # inside (0.8, 1.28)
        (1.2, -1.0, 1.2),
    ],
)
def test_lower_and_upper_bound_are_separate(ratio, advantage, expected):
    assert ppo_of(ratio, advantage) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.5, 1.0, True), (0.5, -1.0, True), (1.5, -1.0, False), (0.5, 1.0, False)],
)
def test_a_clipped_token_gets_no_gradient_and_is_counted(ratio, advantage, clipped):
    logprob = vector(math.log(ratio)).requires_grad_()
    loss, monitors = ppo_clip_loss(logprob, vector(0.0), vector(advantage), torch.tensor([True]), vector(1.0))
    torch.autograd.backward(loss)
    assert logprob.grad is not None
    assert (float(logprob.grad) == 0.0) == clipped
    assert float(monitors["clip_low"]) == float(clipped and ratio < 1)
    assert float(monitors["clip_high"]) == float(clipped and ratio > 1)
    # k3 of KL(mu, pi) on tokens of mu: r - 1 - log r
    assert float(monitors["kl_behavior"]) == pytest.approx(ratio - 1 - math.log(ratio))
    assert float(monitors["ratio_max"]) == pytest.approx(ratio)


def test_weights_give_each_golden_aggregation():
    # Two rows: A = +1 on 2 tokens, A = -1 on 6; ratio 1, so the token loss is -A.
    losses = torch.cat([torch.full((2,), 1.0, dtype=F64), torch.full((6,), -1.0, dtype=F64)])
    mask = torch.ones(8, dtype=torch.bool)
    row_mean = torch.tensor([1 / 2] * 2 + [1 / 6] * 6, dtype=F64) / 2
    assert float(weighted_sum(losses, mask, torch.full((8,), 1 / 8, dtype=F64))) == pytest.approx(-0.5)
    assert float(weighted_sum(losses, mask, row_mean)) == pytest.approx(0.0)
    assert float(weighted_sum(losses, mask, torch.full((8,), 1 / 16, dtype=F64))) == pytest.approx(-0.25)


def test_k3_gives_the_golden_mean():
    # Ratios pi_ref / pi; k3 = r - 1 - log r, mean over [.4, .9, 1.1, 2.5, 6] is .823658
    log_ratios = vector(*np.log([0.4, 0.9, 1.1, 2.5, 6.0]))
    assert float(kl_k3(torch.zeros(5, dtype=F64), log_ratios).mean()) == pytest.approx(0.823658, abs=1e-6)


def test_k3_agrees_with_the_exact_divergence():
    p, q = vector(0.7, 0.2, 0.1), vector(0.5, 0.3, 0.2)
    exact = float((p * (p / q).log()).sum())
    assert float((p * kl_k3(p.log(), q.log())).sum()) == pytest.approx(exact)


def test_the_penalty_has_the_gradient_of_the_exact_divergence():
    logits = vector(0.3, -1.2, 0.8).requires_grad_()
    reference = vector(0.5, 0.3, 0.2).log()
    every = torch.ones(3, dtype=torch.bool)
    exact = (logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    # Each token weighs what the policy gives it: an expectation over the policy's own samples.
    loss = kl_penalty(logits.log_softmax(-1), reference, every, logits.softmax(-1).detach(), 1.0)
    (got,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(got, wanted, atol=1e-12)


def test_an_outlier_pulls_no_harder_than_its_distance():
    logprob = vector(-30.0).requires_grad_()
    loss = kl_penalty(logprob, vector(-1.0), torch.tensor([True]), vector(1.0), 0.5)
    torch.autograd.backward(loss)
    assert logprob.grad is not None and float(logprob.grad) == pytest.approx(0.5 * -29.0)


def test_entropy_is_the_sum_of_minus_p_log_p():
    p = torch.tensor([[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3]], dtype=F64)
    expected = -(p * p.log()).sum(-1)
    assert torch.allclose(token_entropy(p.log() + 4.0), expected)


def test_an_empty_mask_is_an_error():
    nothing, ones = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3)
    for call in (
        lambda: bc_loss(ones, nothing, ones),
        lambda: ppo_clip_loss(ones, ones, ones, nothing, ones),
        lambda: entropy_bonus(ones, nothing, ones, 0.1),
        lambda: kl_penalty(ones, ones, nothing, ones, 0.1),
    ):
        with pytest.raises(EmptyBatchError, match=r"\(2, 3\).*at least one"):
            call()


def test_extreme_ratios_give_a_finite_gradient():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    behavior = torch.tensor([-200.0, 200.0])
    loss, _ = ppo_clip_loss(logprobs, behavior, torch.tensor([1.0, -1.0]), torch.ones(2) > 0, torch.ones(2))
    torch.autograd.backward(loss)
    assert torch.isfinite(loss) and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()


def all_losses(policy: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    ppo, _ = ppo_clip_loss(policy, behavior, advantages, mask, weights)
    return (
        ppo
        + bc_loss(policy, mask, weights)
        + entropy_bonus(policy * 0.3, mask, weights, 0.1)
        + kl_penalty(policy, behavior, mask, weights, 0.2)
    )


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 9)))
    mask = rng.random(shape) < 0.5
    mask[0, 0] = True
    policy = torch.tensor(-rng.uniform(0.0, 3.0, shape), dtype=F64)
    behavior = torch.tensor(-rng.uniform(0.0, 3.0, shape), dtype=F64)
    advantages = torch.tensor(rng.normal(size=shape), dtype=F64)
    weights = torch.tensor(rng.uniform(0.1, 1.0, shape), dtype=F64)
    return policy, behavior, advantages, torch.tensor(mask), weights


def value_and_gradient(policy: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    leaf = policy.clone().requires_grad_()
    loss = all_losses(leaf, *others)
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
def test_tokens_outside_the_mask_change_neither_loss_nor_gradient(seed, junk):
    policy, behavior, advantages, mask, weights = random_case(seed)
    expected = value_and_gradient(policy, behavior, advantages, mask, weights)
    spoiled = [torch.where(mask, t, torch.tensor(junk, dtype=F64)) for t in (behavior, advantages, weights)]
    loss, gradient = value_and_gradient(
        torch.where(mask, policy, torch.tensor(-50.0, dtype=F64)), spoiled[0], spoiled[1], mask, spoiled[2]
    )
    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])
    assert (gradient[~mask] == 0).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_splitting_into_parts_changes_neither_loss_nor_gradient(seed):
    case = random_case(seed)
    expected_loss, expected_gradient = value_and_gradient(*case)
    flat = [tensor.flatten() for tensor in case]
    leaf = flat[0].clone().requires_grad_()
    total = torch.zeros((), dtype=F64)
    for index in range(leaf.numel()):  # the finest split there is: one token at a time
        part = slice(index, index + 1)
        if flat[3][index]:
            total = total + all_losses(leaf[part], *(tensor[part] for tensor in flat[1:]))
    torch.autograd.backward(total)
    assert leaf.grad is not None
    assert torch.allclose(total, expected_loss, atol=1e-12)
    assert torch.allclose(leaf.grad, expected_gradient.flatten(), atol=1e-12)
