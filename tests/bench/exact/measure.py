"""Bias and variance of estimators against the true gradient.

Every estimator gets the same sampled groups. What it makes of one is the gradient estimate

    x = (1/n) sum_i sum_t A_{i,t} grad log pi(a_{i,t} | s_{i,t})

over the n rollouts of the group. Over M groups x has mean m and covariance S; the truth is g.

* scale c = m.g / g.g: many estimators promise the gradient up to a positive factor only.
* direction: r = m - c g should be 0; its expectation in squares, if it is, is tr(P S P) / M, where P takes
  the part along g away. Where g is 0, c is 0 and P takes nothing away.
* noise = sqrt(tr S) / (c |g|): standard deviation of one group's estimate in units of its own mean.

Shape letters: M groups, R rollouts, S steps, D = states x actions.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import cast

import numpy as np

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig, Episode, StepName
from spangrad.credit.groups import Floats, Ints
from spangrad.credit.reinforce_pp import reinforce_pp
from spangrad.credit.running import running_baselines
from spangrad.credit.spelling import EPISODES, NONE, STEPS, is_both, parsed, spelled
from spangrad.credit.turns import mt_grpo, per_turn_index
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError
from spangrad.store.records import DEFAULT_REWARD
from tests.bench.exact.mdps import END, Mdp, Sampled, sample, sample_second, true_gradient, values

SIZE = 4
"""Rollouts of a group."""
SCORES = "reward:expected"
"""Where configs that count scores are told that they come from: `draw` gives them."""
BIASED = 4.0
"""z from which a difference is called a bias: chance gives it once in 30,000."""


@dataclass(frozen=True)
class Held:
    """One estimator held against the truth."""

    scale: float
    """c; 0 where the gradient is 0."""
    cosine: float
    """Between m and g; NaN where the gradient is 0."""
    bias: float
    """|r|, in units of the estimate (of its own mean along g, where there is one)."""
    z_direction: float
    """How sure it is that r is not 0, in standard deviations."""
    z_scale: float
    """How sure it is that c is not 1; NaN where the gradient is 0."""
    noise: float
    """NaN where the gradient is 0, or the scale is not positive."""

    @property
    def is_biased(self) -> bool:
        """Not even the direction is right."""
        return self.z_direction >= BIASED or (not math.isnan(self.cosine) and self.scale <= 0)

    @property
    def is_exact(self) -> bool:
        """Right in direction and, as far as can be told, in size."""
        return not self.is_biased and not abs(self.z_scale) >= BIASED


def hold(estimates_MD: Floats, truth_D: Floats) -> Held:
    """Hold the estimates of M independent groups against the truth."""
    count = len(estimates_MD)
    mean_D = estimates_MD.mean(axis=0)
    apart_MD = estimates_MD - mean_D
    square = float(truth_D @ truth_D)
    if square == 0.0:
        bias, z = _apart(mean_D, apart_MD)
        return Held(0.0, math.nan, bias, z, math.nan, math.nan)
    scale = float(mean_D @ truth_D) / square
    along_M = apart_MD @ truth_D / square
    bias, z = _apart(mean_D - scale * truth_D, apart_MD - along_M[:, None] * truth_D)
    length, deviation = float(np.linalg.norm(mean_D)), float(along_M.std()) / math.sqrt(count)
    own = scale * math.sqrt(square)
    return Held(
        scale=scale,
        cosine=own / length if length else 0.0,
        bias=bias / own if scale > 0 else math.inf,
        z_direction=z,
        z_scale=(scale - 1) / deviation if deviation else 0.0 if scale == 1 else math.inf,
        noise=math.sqrt(float((apart_MD**2).sum()) / count) / own if scale > 0 else math.nan,
    )


def _apart(residual_D: Floats, noise_MD: Floats) -> tuple[float, float]:
    """|r|, and how surely r is not 0 as a z.

    |r|^2 M / tr S is, if r is 0, a chi-square with nu = (tr S)^2 / tr S^2 degrees of freedom over nu
    (Satterthwaite); its cube root is nearly normal (Wilson, Hilferty).
    """
    count = len(noise_MD)
    # einsum: these products are small, and BLAS would wait for threads of others
    covariance_DD = np.einsum("mi,mj->ij", noise_MD, noise_MD) / count
    trace, length = float(np.trace(covariance_DD)), float(np.linalg.norm(residual_D))
    if trace < 1e-24:
        return length, 0.0 if length < 1e-12 else math.inf
    free = trace**2 / float((covariance_DD**2).sum())
    spread = 2 / (9 * free)
    return length, ((length**2 * count / trace) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@dataclass(frozen=True)
class Data:
    """Groups of rollouts in the forms that estimators take."""

    mdp: Mdp
    sampled: Sampled
    trajectories: Sequence[Trajectory]
    rollout_index_S: Ints
    step_index_S: Ints
    group_ids_N: Ints

    @property
    def rewards_S(self) -> Floats:
        """Reward of each step."""
        return self.sampled.rewards_RT[self.rollout_index_S, self.step_index_S]

    @property
    def returns_S(self) -> Floats:
        """Undiscounted return from each step on."""
        return _to_go(self.sampled.rewards_RT)[self.rollout_index_S, self.step_index_S]

    def estimates(self, advantages_S: Floats) -> Floats:
        """x of every group, shape (M, D)."""
        states, actions = self.mdp.logits_XA.shape
        group_S = self.group_ids_N[self.rollout_index_S]
        state_S = self.sampled.states_RT[self.rollout_index_S, self.step_index_S]
        action_S = self.sampled.actions_RT[self.rollout_index_S, self.step_index_S]
        groups = len(self.group_ids_N) // SIZE
        place_S = (group_S * states + state_S) * actions + action_S
        weights = np.bincount(place_S, weights=advantages_S, minlength=groups * states * actions)
        weights_MXA = weights.reshape(groups, states, actions)
        # grad log pi(a | x) = 1[a] - pi(x)
        scores_MXA = weights_MXA - weights_MXA.sum(axis=2, keepdims=True) * self.mdp.policy_XA
        return np.asarray(scores_MXA.reshape(groups, -1) / SIZE)


def draw_branched(mdp: Mdp, groups: int, seed: int) -> Data:
    """Sample groups of two-step rollouts of which `mdp.branches` share their first step.

    The first of them has the step, the others go on from it: it is trained once.
    """
    count, each = groups * SIZE, mdp.branches
    sampled = sample(mdp, groups, SIZE, np.random.default_rng(seed))
    trunk_R = np.arange(count) // each * each
    states_RT, actions_RT, rewards_RT = sampled.states_RT, sampled.actions_RT, sampled.rewards_RT
    again = sample_second(mdp, states_RT[trunk_R, 1], np.random.default_rng((seed, 1)))
    states_RT[:, 1] = states_RT[trunk_R, 1]
    actions_RT[:, 1], rewards_RT[:, 1] = again
    is_own_RT = np.ones((count, 2), dtype=np.bool_)
    is_own_RT[:, 0] = trunk_R == np.arange(count)
    rollout_index_S, step_index_S = np.nonzero(is_own_RT)
    trajectories = []
    for n in range(count):
        first = Step(f"{n}-0", 0, reward=float(rewards_RT[n, 0]), tokens=1)
        parent = None if is_own_RT[n, 0] else f"{trunk_R[n]}-0"
        steps = [*([first] if parent is None else []), Step(f"{n}-1", 1, tokens=1, parent=parent)]
        trajectories.append(Trajectory(str(n), str(n // SIZE), float(rewards_RT[n, 1]), steps))
    return Data(mdp, sampled, trajectories, rollout_index_S, step_index_S, np.arange(count) // SIZE)


def _to_go(rewards_RT: Floats) -> Floats:
    return np.asarray(rewards_RT[:, ::-1].cumsum(axis=1)[:, ::-1])


def draw(mdp: Mdp, groups: int, seed: int) -> Data:
    """Sample groups; what the last step of a rollout earns is its outcome, and a critic knows V exactly.

    Scores are what was earned so far and, by V, is to be expected, in the end the return.
    """
    sampled = sample(mdp, groups, SIZE, np.random.default_rng(seed))
    rollout_index_S, step_index_S = np.nonzero(sampled.states_RT != END)
    is_last_S = np.r_[rollout_index_S[1:] != rollout_index_S[:-1], True]
    known: dict[tuple[int, int, int, float | None], Step] = {}
    steps: list[list[Step]] = [[] for _ in range(groups * SIZE)]
    outcomes = np.zeros(groups * SIZE)
    outcomes[rollout_index_S[is_last_S]] = sampled.rewards_RT[rollout_index_S, step_index_S][is_last_S]
    is_outcome = bool((outcomes == sampled.rewards_RT.sum(axis=1)).all())
    places = zip(rollout_index_S.tolist(), step_index_S.tolist(), is_last_S.tolist(), strict=True)
    for rollout, t, is_last in places:
        state, action = int(sampled.states_RT[rollout, t]), int(sampled.actions_RT[rollout, t])
        reward = None if is_last or is_outcome else float(sampled.rewards_RT[rollout, t])
        if (step := known.get((t, state, action, reward))) is None:
            step = Step(
                call_id=str(t),
                step_index=t,
                anchor=f"state {state}",
                reward=reward,
                tokens=1,
                observation=mdp.texts[state] if mdp.texts else None,
                role="agent",
                action=f"action {action}",
            )
            known[t, state, action, reward] = step
        steps[rollout].append(step)
    baselines = running_baselines(sampled.rewards_RT.sum(axis=1), sampled.states_RT[:, 0])
    expected = [None if np.isnan(baseline) else float(baseline) for baseline in baselines]
    ahead_TX = np.array(values(mdp))
    earned_RT = np.pad(sampled.rewards_RT.cumsum(axis=1), ((0, 0), (1, 0)))
    states_RT = sampled.states_RT
    critic = [
        [*ahead_TX[np.arange(len(own)), states_RT[n, : len(own)]].tolist(), 0.0]
        for n, own in enumerate(steps)
    ]
    trajectories = [
        Trajectory(
            rollout_id=str(n),
            group_id=str(n // SIZE),
            reward=float(outcomes[n]),
            steps=own,
            components={DEFAULT_REWARD: float(outcomes[n])} if is_outcome else {},
            baseline=expected[n],
            values=critic[n],
            scores=(earned_RT[n, : len(own) + 1] + critic[n]).tolist(),
        )
        for n, own in enumerate(steps)
    ]
    group_ids_N = np.arange(groups * SIZE) // SIZE
    return Data(mdp, sampled, trajectories, rollout_index_S, step_index_S, group_ids_N)


def composable() -> dict[str, CreditConfig]:
    """Every pair of terms that `CreditConfig` takes, with and without division, undiscounted.

    Terms alone also shrunk by evidence, `gigpo` also by similar states, `gae` also where it trusts returns
    alone, and what counts scores.
    """
    found: dict[str, CreditConfig] = {}
    for episode, step in product((NONE, *EPISODES), (NONE, *STEPS)):
        try:
            config = CreditConfig(episode=cast(Episode, episode), step=cast(StepName, step))
        except ConfigError:
            continue
        if "gamma" in config.settings_used():
            config = replace(config, gamma=1.0)
        variants = [config]
        if "scale_by_std" in config.settings_used():
            variants.append(replace(config, scale_by_std=False))
        if "evidence_prior" in config.settings_used() and episode == NONE:
            variants += [replace(variant, evidence_prior=2.0) for variant in variants]
        if (episode, step) == (NONE, "gigpo"):
            variants += [replace(variant, anchors="similar") for variant in variants[:2]]
        if "gae_lambda" in config.settings_used() and episode == NONE:
            variants.append(replace(config, gae_lambda=1.0))
        found |= {name_of(variant): variant for variant in variants}
    by_turn = CreditConfig(episode=NONE, step="turn_credit", gamma=1.0, scores=SCORES)
    to_go = replace(by_turn, step="leave_one_out_to_go", shaping="potential")
    by_gain = replace(to_go, shaping="score_gain")
    variants = [by_turn, replace(by_turn, gamma=0.0), to_go, by_gain, replace(by_gain, step="igpo")]
    return found | {name_of(variant): variant for variant in variants}


def name_of(config: CreditConfig) -> str:
    """Its spelling, but for gamma, which is 1 in all, and where scores come from."""
    return spelled(config).replace(":gamma=1", "").replace(f":scores={SCORES}", "")


def is_single(config: CreditConfig) -> bool:
    """Whether one term does it all."""
    return NONE in (config.episode, config.step) or is_both(config.step)


def assigned(data: Data, config: CreditConfig) -> Floats:
    """Advantages as users get them, shape (S,)."""
    found = assign(data.trajectories, config).advantages
    keys = [(one.rollout_id, step.call_id) for one in data.trajectories for step in one.steps]
    return np.array([found[key] for key in keys], dtype=np.float64)


def terms_of(config: CreditConfig) -> list[str]:
    """Names of its terms alone, with the settings that each of them uses."""
    if is_single(config):
        return [name_of(config)]
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    return [name_of(parsed(term, settings)) for term in (config.episode, config.step)]


def composed(singles: Mapping[str, Floats], config: CreditConfig) -> Floats:
    """A = A_episode + lambda A_step out of what the terms give alone, as `assign` composes them."""
    first, *second = (singles[name] for name in terms_of(config))
    return first + config.step_weight * second[0] if second else first


def _mt_grpo(data: Data) -> Floats:
    if data.mdp.horizon != 2 or (data.sampled.states_RT == END).any():
        raise CreditError("mt_grpo needs two turns in every rollout")
    first_N, second_N = data.sampled.rewards_RT.T
    before_N, after_N = mt_grpo(second_N, first_N, data.group_ids_N)
    return np.stack([before_N, after_N], axis=1).reshape(-1)


def _per_turn(data: Data, *, scale_by_std: bool) -> Floats:
    """Normalised per turn number, summed from the turn on, so that a turn has credit for what follows."""
    rewards_S = per_turn_index(
        data.rewards_S,
        data.rollout_index_S,
        data.step_index_S,
        data.group_ids_N,
        scale_by_std=scale_by_std,
    )
    rewards_RT = np.zeros_like(data.sampled.rewards_RT)
    rewards_RT[data.rollout_index_S, data.step_index_S] = rewards_S
    return _to_go(rewards_RT)[data.rollout_index_S, data.step_index_S]


FUNCTIONS: Mapping[str, Callable[[Data], Floats]] = {
    "per_turn_index": lambda data: _per_turn(data, scale_by_std=False),
    "per_turn_index:scale_by_std=true": lambda data: _per_turn(data, scale_by_std=True),
    "mt_grpo": _mt_grpo,
    "reinforce_pp": lambda data: reinforce_pp(data.returns_S, np.ones(len(data.returns_S), dtype=np.int64)),
}
"""Estimators that are functions only. Raise CreditError for rollouts that they are not for."""


def functions() -> dict[str, Callable[[Data], Floats]]:
    """`FUNCTIONS` that no config can name yet."""
    return {name: function for name, function in FUNCTIONS.items() if name not in (*EPISODES, *STEPS)}


def measure(mdp: Mdp, groups: int, seed: int, names: Collection[str] | None = None) -> dict[str, Held | None]:
    """Every estimator (or those named) on one problem; None: it is not for such rollouts."""
    data = draw(mdp, groups, seed) if mdp.branches == 1 else draw_branched(mdp, groups, seed)
    truth_D = true_gradient(mdp).reshape(-1)
    configs = {name: config for name, config in composable().items() if names is None or name in names}
    if mdp.branches > 1:  # what compares whole rollouts does not know that they share a step
        fit = {name for name, config in configs.items() if is_single(config) and config.needs_branches}
        held: dict[str, Held | None] = dict.fromkeys([*(configs.keys() - fit), *functions()])
        configs = {name: config for name, config in configs.items() if name not in held}
    else:
        held = {}
    singles: dict[str, Floats] = {}
    for name, config in configs.items():
        if is_single(config) and (mdp.texts or config.anchors == "exact"):
            with suppress(CreditError):
                estimates_MD = data.estimates(assigned(data, config))
                if np.isfinite(estimates_MD).all():  # elsewhere a part of the reward is missing
                    singles[name] = estimates_MD
    for name, config in configs.items():
        terms = terms_of(config)
        held[name] = hold(composed(singles, config), truth_D) if singles.keys() >= set(terms) else None
    for name, function in functions().items():
        if name not in held and (names is None or name in names):
            try:
                held[name] = hold(data.estimates(function(data)), truth_D)
            except CreditError:
                held[name] = None
    return held
