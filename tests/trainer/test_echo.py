"""Cross-entropy on observations beside the objective."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.adapters.building import call
from torch import Tensor

from spangrad.adapters.call_tree import build_tree
from spangrad.credit.aggregation import weigh
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import transitions
from spangrad.errors import CreditError
from spangrad.trainer.learning.learner import Learner


def conversations(*, spoken: int = 7) -> list[Transition]:
    """Two rollouts of two steps: observations at positions 5 to 7."""
    rows = []
    for k in range(2):
        first, second = [3 + k, 4, 5], [3 + k, 4, 5, 20, 21, spoken, 31 + k, 32]
        calls = [
            call(f"a{k}", first, [20, 21], start_ns=0, rollout_id=f"r{k}"),
            call(f"b{k}", second, [40, 41], start_ns=1, rollout_id=f"r{k}"),
        ]
        advantages = {f"a{k}": 1.0 - 2 * k, f"b{k}": 0.5 - k}
        rows += transitions(build_tree(calls), advantages, group_id="g")
    return weigh(rows, "token-mean")


def gradient_of(learner: Learner, rows: list[Transition]) -> tuple[Tensor, dict[str, float]]:
    kept: list[Tensor] = []

    def keep(lr: float, rows: Sequence[Transition]) -> float:
        kept.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))
        return 0.0

    learner.model.double()
    learner._step = keep  # type: ignore[method-assign]
    metrics = learner.update(rows)
    return kept[0], metrics


@pytest.mark.parametrize("objective", ["ppo", "awr"])
@pytest.mark.parametrize("microbatch", [1, 10**6])
def test_echo_adds_the_gradient_of_predicting_observations(make_learner, objective, microbatch):
    rows = conversations()
    plain, without = gradient_of(make_learner(objective=objective, kl_monitor_rows=0) if objective == "ppo"
                                 else make_learner(objective=objective), rows)  # fmt: skip
    settings = {"kl_monitor_rows": 0} if objective == "ppo" else {}
    learner = make_learner(
        objective=objective, echo_coef=0.1, max_tokens_per_microbatch=microbatch, **settings
    )
    both, with_echo = gradient_of(learner, rows)
    learner.model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        logprobs = learner.model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        loss = loss - row.loss_weight * logprobs[4:7].sum()
    torch.autograd.backward(loss)
    echo = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])
    assert float((both - plain - 0.1 * echo).norm() / both.norm()) < 1e-6
    assert with_echo["loss/echo"] == pytest.approx(0.1 * float(loss.detach()), rel=1e-6)
    assert (with_echo["data/observation_tokens"], with_echo["data/trained_tokens"]) == (6, 8)
    assert with_echo["policy/observation_logprob"] == pytest.approx(-float(loss.detach()) * 8 / 6, rel=1e-6)
    # What is told of the objective is of the sampled tokens alone, as without.
    for name, value in without.items():
        if name.startswith(("policy/", "gap/")) or name in ("loss/policy", "loss/awr"):
            assert with_echo[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_without_echo_observations_change_nothing(make_learner):
    masked = [replace(row, observation_mask=None) for row in conversations()]
    found = [make_learner().update(rows)["grad/norm"] for rows in (conversations(), masked)]
    assert found[0] == found[1]


def test_rollouts_without_an_advantage_still_teach_what_is_observed(make_learner):
    rows = [replace(row, advantages=np.zeros(len(row.token_ids))) for row in conversations()]
    metrics = make_learner(echo_coef=0.1).update(rows)
    assert metrics["loss/policy"] == 0.0 < metrics["loss/echo"]
    assert metrics["grad/norm"] > 0


def test_rows_that_do_not_know_their_observations_are_refused(make_learner):
    row = conversations()[0]
    with pytest.raises(CreditError, match="nothing says which tokens are observations"):
        make_learner(echo_coef=0.1).update([replace(row, observation_mask=None)])
    with pytest.raises(CreditError, match="4 trained tokens are of no call of the row, and 0 are"):
        make_learner(echo_coef=0.1).update([replace(row, segments=())])
    with pytest.raises(CreditError, match="0 trained tokens are of no call of the row, and 4 are"):
        make_learner(echo_coef=0.1).update([replace(row, observation_mask=row.action_mask)])
