"""The exact gradients are right, estimators keep what the page says of them, and the page is of today's."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spangrad.credit.groups import Floats
from spangrad.credit.similar import similar_leaders
from spangrad.errors import CreditError
from tests.bench.exact.mdps import (
    MDPS,
    Mdp,
    bandit,
    branched,
    chain,
    expected_return,
    risky_stop,
    sample,
    stop_or_continue,
    true_gradient,
    two_turns,
)
from tests.bench.exact.measure import (
    Held,
    assigned,
    composable,
    composed,
    draw,
    draw_branched,
    functions,
    hold,
    measure,
)
from tests.bench.exact.page import named_in, pairs, singles, tables, unfit_in

CREDIT = Path(__file__).resolve().parents[3] / "credit"
GROUPS = 600
GIGPO = "gigpo:scale_by_std=false"
OURS = ("rloo", "leave_one_out_to_go", GIGPO)
VALUED = ("value_baseline", "gae:gae_lambda=1", "gae")
"""With the exact values as critic, from the noisiest."""
SCORED = ("turn_credit", "turn_credit:gamma=0", "leave_one_out_to_go:shaping=potential")
INDEXED = "per_turn_index"
IGPO, AS_PUBLISHED = "igpo", "igpo_as_published"
SIMILAR = "gigpo:anchors=similar"
TREES = ("tree_grpo", "tree_grpo_as_published", "tree_edges", "treerl")
PLAIN = [mdp for mdp in (make() for make in MDPS) if mdp.branches == 1]


@pytest.mark.parametrize("make", MDPS)
def test_true_gradient_is_the_slope_of_the_expected_return(make) -> None:
    mdp: Mdp = make()
    slope_XA = np.zeros_like(mdp.logits_XA)
    for place in np.argwhere(np.isfinite(mdp.logits_XA)):
        sides = []
        for step in (1e-5, -1e-5):
            logits_XA = mdp.logits_XA.copy()
            logits_XA[tuple(place)] += step
            sides.append(expected_return(replace(mdp, logits_XA=logits_XA)))
        slope_XA[tuple(place)] = (sides[0] - sides[1]) / 2e-5
    np.testing.assert_allclose(true_gradient(mdp), slope_XA, atol=1e-9)


@pytest.mark.parametrize("make", MDPS)
def test_rollouts_earn_the_expected_return(make) -> None:
    mdp: Mdp = make()
    returns_R = sample(mdp, 4000, 1, np.random.default_rng(0)).rewards_RT.sum(axis=1)
    error = returns_R.std() / np.sqrt(len(returns_R))
    assert abs(returns_R.mean() - expected_return(mdp)) <= 4 * error


def test_hold_tells_factor_from_bias() -> None:
    truth_D, aside_D = np.array([3.0, 4.0, 0.0]), np.array([-4.0, 3.0, 0.0])
    noise_MD = np.random.default_rng(0).normal(size=(4000, 3))
    exact = hold(truth_D + noise_MD, truth_D)
    factor = hold(0.5 * truth_D + noise_MD, truth_D)
    tilted = hold(truth_D + 0.1 * aside_D + noise_MD, truth_D)
    against = hold(-truth_D + noise_MD, truth_D)
    assert exact.is_exact and not exact.is_biased
    assert not factor.is_exact and not factor.is_biased and factor.scale == pytest.approx(0.5, abs=0.02)
    # |0.1 (-4, 3, 0)| = 0.5 beside a length of 5
    assert tilted.is_biased and tilted.bias == pytest.approx(0.1, abs=0.02)
    assert against.is_biased
    # three independent normals beside a length of 5, and of 2.5
    assert exact.noise == pytest.approx(3**0.5 / 5, rel=0.05)
    assert factor.noise == pytest.approx(3**0.5 / 2.5, rel=0.05)


def test_z_is_standard_where_nothing_is_biased() -> None:
    rng = np.random.default_rng(0)
    truth_D = np.array([1.0, 0.0, 0.0])
    zs = [hold(truth_D + rng.normal(size=(200, 3)) * (1, 5, 1), truth_D).z_direction for _ in range(400)]
    assert np.mean(zs) == pytest.approx(0, abs=0.2)
    assert np.std(zs) == pytest.approx(1, abs=0.2)


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, Held | None]]:
    names = (*OURS, *VALUED, *SCORED, INDEXED, IGPO, AS_PUBLISHED, "gigpo", SIMILAR)
    found = {mdp.name: measure(mdp, GROUPS, 0, names) for mdp in PLAIN}
    return found | {"branched": measure(branched(), 4 * GROUPS, 0, TREES)}


@pytest.mark.parametrize("problem", ["stop", "risky stop", "chain", "grid", "lake"])
def test_normalising_per_turn_index_is_biased_where_an_action_ends_a_rollout(held, problem: str) -> None:
    assert held[problem][INDEXED].is_biased


@pytest.mark.parametrize("problem", ["two turns", "bandit"])
def test_normalising_per_turn_index_is_not_biased_with_a_fixed_number_of_turns(held, problem: str) -> None:
    assert not held[problem][INDEXED].is_biased


@pytest.mark.parametrize("problem", ["risky stop", "chain", "grid"])
def test_normalising_all_turns_together_is_biased_where_an_action_ends_a_rollout(held, problem: str) -> None:
    assert held[problem][IGPO].is_biased and (problem != "chain" or held[problem][IGPO].cosine < 0)


def test_passing_over_rewards_of_nothing_makes_actions_decide_how_many_turns_there_are(held) -> None:
    assert held["two turns"][AS_PUBLISHED].is_biased and not held["two turns"][IGPO].is_biased


def test_texts_of_states_are_similar_along_rows_and_columns() -> None:
    for mdp in PLAIN:
        if not mdp.texts:
            assert mdp.name not in ("grid", "lake")
            continue
        side = {"grid": 3, "lake": 4}[mdp.name]
        count, group = len(mdp.texts), np.zeros(len(mdp.texts), dtype=np.int64)
        names = [f"{n:02}" for n in range(count)]  # the first one leads
        leaders = similar_leaders(mdp.texts, names, group, np.ones(count, dtype=np.int64), similarity=0.95)
        first = [n for n in range(count) if leaders[n] == 0]
        assert first == [n for n in range(side * side) if n // side == 0 or n % side == 0]


@pytest.mark.parametrize("problem", ["grid", "lake"])
def test_states_that_are_similar_make_larger_pools_with_less_noise(held, problem: str) -> None:
    assert held[problem][SIMILAR].noise < held[problem]["gigpo"].noise
    assert held["chain"][SIMILAR] is None


@pytest.mark.parametrize("problem", [mdp.name for mdp in PLAIN])
@pytest.mark.parametrize("name", ["rloo", "leave_one_out_to_go", *VALUED, SCORED[1]])
def test_leaving_one_out_and_values_of_states_are_exact(held, problem: str, name: str) -> None:
    assert held[problem][name].is_exact


@pytest.mark.parametrize("problem", ["stop", "risky stop", "bandit"])
def test_gigpo_is_not_biased_where_all_rollouts_pass_the_same_states(held, problem: str) -> None:
    assert not held[problem][GIGPO].is_biased


@pytest.mark.parametrize("problem", ["chain", "two turns"])
def test_a_critic_that_knows_each_state_is_less_noisy_the_more_it_is_trusted(held, problem: str) -> None:
    noises = [held[problem][name].noise for name in VALUED]
    assert noises == sorted(noises, reverse=True) and noises[0] < held[problem]["rloo"].noise


@pytest.mark.parametrize("problem", ["stop", "risky stop", "chain", "two turns", "bandit"])
def test_a_potential_leaves_the_gradient_where_few_groups_have_equal_rewards(held, problem: str) -> None:
    assert held[problem][SCORED[2]].is_exact


@pytest.mark.parametrize("problem", ["chain", "two turns", "grid", "lake"])
def test_changes_of_scores_that_are_spread_over_earlier_steps_tilt(held, problem: str) -> None:
    spread, own = held[problem]["turn_credit"], held[problem]["turn_credit:gamma=0"]
    assert spread.is_biased and own.noise < held[problem]["value_baseline"].noise


@pytest.mark.parametrize("name", TREES)
def test_a_shared_step_that_is_trained_once_weighs_too_little(held, name: str) -> None:
    assert held["branched"][name].is_biased


def test_differences_of_node_values_are_right_where_a_step_weighs_as_its_leaves() -> None:
    data = draw_branched(branched(), 4 * GROUPS, seed=0)
    advantages_S = assigned(data, composable()["tree_edges"])
    leaves_S = np.where(data.step_index_S == 0, data.mdp.branches, 1)
    assert not hold(data.estimates(advantages_S * leaves_S), true_gradient(data.mdp).reshape(-1)).is_biased


def test_a_critic_that_is_wrong_biases_what_trusts_it_alone() -> None:
    data = draw(chain(), GROUPS, seed=1)
    wrong = [replace(one, values=[3.0 - t for t in range(len(one.steps) + 1)]) for one in data.trajectories]
    known, truth_D = composable(), true_gradient(data.mdp).reshape(-1)
    configs = [known["value_baseline"], known["gae:gae_lambda=1"], replace(known["gae"], gae_lambda=0.0)]
    found = [assigned(replace(data, trajectories=wrong), config) for config in configs]
    held = [hold(data.estimates(advantages_S), truth_D) for advantages_S in found]
    assert [(one.is_exact, one.is_biased) for one in held] == [(True, False), (True, False), (False, True)]


def test_leave_one_out_to_go_is_less_noisy_than_rloo_on_long_rollouts(held) -> None:
    assert held["chain"]["leave_one_out_to_go"].noise < held["chain"]["rloo"].noise


def test_terms_add_up_as_assign_composes_them() -> None:
    data = draw(chain(), 10, seed=0)
    configs = composable()
    whole: dict[str, Floats] = {}
    for name, config in configs.items():
        with suppress(CreditError):  # it is not for such rollouts
            whole[name] = data.estimates(assigned(data, config))
    assert len(whole) > 40
    for name, found in whole.items():
        np.testing.assert_allclose(composed(whole, configs[name]), found, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("make", [bandit, two_turns, stop_or_continue, risky_stop, branched])
def test_cells_of_the_page_are_what_is_measured(make) -> None:
    page, mdp = (CREDIT / "EXACT.md").read_text(), make()
    names = (*OURS, "grpo", "maxrl", *SCORED, *TREES, IGPO, AS_PUBLISHED)
    (told,) = re.findall(r"^Groups of \d+ rollouts, ([\d,]+) of", page, flags=re.MULTILINE)
    groups = int(told.replace(",", ""))
    found = measure(mdp, groups, 0, names)
    fresh = tables(
        [mdp], {mdp.name: {**dict.fromkeys([*composable(), *functions()]), **found}}, groups=groups
    )
    for part in ("bias", "noise"):
        written = cells_in(page, part)
        for name, cell in cells_in(f"<!-- {part}: begin -->\n{fresh[part]}\n<!-- {part}: end", part).items():
            if name[0] in names:
                assert written[name] == cell, f"{part} of {name}; run `make exact`"


def cells_in(page: str, part: str) -> dict[tuple[str, str], str]:
    """(estimator, problem) -> cell."""
    table = page.split(f"<!-- {part}: begin")[1].split(f"<!-- {part}: end")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {
        (row[0].strip("`"), name): cell for row in rows for name, cell in zip(head[1:], row[1:], strict=True)
    }


def test_page_and_picture_are_of_the_estimators_that_there_are() -> None:
    page, picture = (CREDIT / "EXACT.md").read_text(), (CREDIT / "exact.svg").read_text()
    assert named_in(page, "bias") == singles(), "run `make exact`"
    assert named_in(page, "pairs") == pairs(unfit_in(page)), "run `make exact`"
    assert all(f">{name}</text>" in picture for name in singles()), "run `make exact`"
    assert all(f"| {make().name} |" in page for make in MDPS), "run `make exact`"
