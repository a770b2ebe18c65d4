"""Advantages in rarely seen states are believed less."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.evidence import evidence_weights
from spangrad.credit.gigpo import NO_ANCHOR, step_advantages
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import CreditError

steps = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-1, 3), st.sampled_from([0.0, 0.3, 1.0])),
    min_size=1,
    max_size=20,
)


def test_a_state_counts_by_the_rollouts_that_came_through_it():
    pools = np.array([5, 5, 5, 7, 7, 9, NO_ANCHOR])
    rollouts = np.array([0, 1, 2, 0, 0, 1, 2])
    # Three rollouts, one (twice), one, and no state.
    assert_allclose(evidence_weights(pools, rollouts, prior=1.0), [0.75] * 3 + [0.5] * 3 + [1.0])
    assert_allclose(evidence_weights(pools, rollouts, prior=0.0), np.ones(7))


@settings(max_examples=30)
@given(steps, st.sampled_from([0.5, 2.0]))
def test_shrunk_advantages_sum_to_zero_in_every_pool_and_keep_their_sign(found, prior):
    rollouts, anchors, returns = (np.array(column) for column in zip(*found, strict=True))
    plain = step_advantages(returns, np.zeros_like(anchors), anchors)
    shrunk = plain * evidence_weights(anchors, rollouts, prior=prior)
    for anchor in set(anchors.tolist()):
        assert abs(shrunk[anchors == anchor].sum()) < 1e-9
    assert (np.sign(shrunk) == np.sign(plain)).all()
    assert (np.abs(shrunk) <= np.abs(plain)).all()


@pytest.mark.parametrize("step", ["gigpo", "hgpo"])
def test_a_config_line_shrinks_the_step_term_alone(step):
    batch = [
        Trajectory(name, "g", reward, [Step("0", 0, "s"), Step("1", 1, state)])
        for name, reward, state in (("a", 1.0, "t"), ("b", 0.0, "t"), ("c", 0.0, "u"))
    ]
    config = CreditConfig(episode="none", step=step, gamma=1.0, eps=0.0)
    if step == "hgpo":
        config = replace(config, history=0)
    before = assign(batch, config).advantages
    after = assign(batch, replace(config, evidence_prior=2.0)).advantages
    for (rollout, call), value in before.items():
        assert value is not None
        # All three came through s, two through t.
        expected = value * (3 / 5 if call == "0" else 2 / 4)
        assert after[rollout, call] == pytest.approx(expected)
    assert before["a", "1"] == pytest.approx(1.0)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(CreditError, match="shapes"):
        evidence_weights(np.array([1]), np.array([1, 2]), prior=1.0)
    with pytest.raises(CreditError, match="0 or more"):
        evidence_weights(np.array([1]), np.array([1]), prior=-1.0)
