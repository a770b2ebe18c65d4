"""Small problems whose policy gradient is known exactly, and rollouts of them.

Knows states, actions and chances; does not know estimators. The policy is a softmax with one logit for every
state and action, and knows no time.

Shape letters: X states, A actions, K outcomes of an action, R rollouts, T times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from spangrad.credit.groups import Floats, Ints

END = -1
"""Next state where a rollout ends."""


@dataclass(frozen=True)
class Mdp:
    """States with actions that end in one of K outcomes. Cut off after `horizon` steps."""

    name: str
    what: str
    logits_XA: Floats
    """-inf: there is no such action."""
    chance_XAK: Floats
    next_XAK: Ints
    reward_XAK: Floats
    starts: Sequence[int] = (0,)
    """One task each, drawn evenly; all rollouts of a group are of one."""
    horizon: int = 8
    texts: Sequence[str] = ()
    """What the agent sees in each state, where states can be compared by it."""
    branches: int = 1
    """Of two steps: so many second ones go on from each first one."""

    @property
    def policy_XA(self) -> Floats:
        """pi(a | x)."""
        odds_XA = np.exp(self.logits_XA - self.logits_XA.max(axis=1, keepdims=True))
        return np.asarray(odds_XA / odds_XA.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Sampled:
    """Rollouts, padded with state `END`."""

    states_RT: Ints
    actions_RT: Ints
    rewards_RT: Floats


def expected_return(mdp: Mdp) -> float:
    """J = mean over tasks of E[sum of rewards]."""
    return float(values(mdp)[0][list(mdp.starts)].mean())


def values(mdp: Mdp) -> list[Floats]:
    """V_t(x) for t = 0 .. horizon: what is still to come, by backward induction. V_horizon = 0."""
    ahead_X = np.zeros(len(mdp.logits_XA))
    found = [ahead_X]
    for _ in range(mdp.horizon):
        ahead_X = (mdp.policy_XA * _action_values(mdp, ahead_X)).sum(axis=1)
        found.append(ahead_X)
    return found[::-1]


def true_gradient(mdp: Mdp) -> Floats:
    """dJ / dlogits, shape (X, A).

    dJ/dl(x, a) = sum_t d_t(x) pi(a|x) (Q_t(x, a) - V_t(x)),   d_t: chance to be in x at time t
    """
    policy_XA = mdp.policy_XA
    gradient_XA = np.zeros_like(policy_XA)
    here_X: Floats = np.bincount(mdp.starts, minlength=len(policy_XA)) / len(mdp.starts)
    goes_on = mdp.next_XAK != END
    ahead = values(mdp)
    for t in range(mdp.horizon):
        action_values_XA = _action_values(mdp, ahead[t + 1])
        gradient_XA += here_X[:, None] * policy_XA * (action_values_XA - ahead[t][:, None])
        flow_XAK = here_X[:, None, None] * policy_XA[:, :, None] * mdp.chance_XAK
        flow, to = flow_XAK[goes_on], mdp.next_XAK[goes_on]
        here_X = np.bincount(to, weights=flow, minlength=len(policy_XA)).astype(np.float64)
    return gradient_XA


def _action_values(mdp: Mdp, ahead_X: Floats) -> Floats:
    behind_XAK = np.where(mdp.next_XAK == END, 0.0, ahead_X[mdp.next_XAK])
    return np.asarray((mdp.chance_XAK * (mdp.reward_XAK + behind_XAK)).sum(axis=2))


def sample(mdp: Mdp, groups: int, size: int, rng: np.random.Generator) -> Sampled:
    """Rollouts of `groups` groups, those of a group one after the other."""
    count = groups * size
    cumulated_XA, cumulated_XAK = mdp.policy_XA.cumsum(axis=1), mdp.chance_XAK.cumsum(axis=2)
    state_R = np.repeat(rng.choice(mdp.starts, groups), size)
    states_RT = np.full((count, mdp.horizon), END)
    actions_RT, rewards_RT = np.zeros_like(states_RT), np.zeros(states_RT.shape)
    for t in range(mdp.horizon):
        goes = np.flatnonzero(state_R != END)
        here = state_R[goes]
        action = _drawn(cumulated_XA[here], rng)
        outcome = _drawn(cumulated_XAK[here, action], rng)
        states_RT[goes, t], actions_RT[goes, t] = here, action
        rewards_RT[goes, t] = mdp.reward_XAK[here, action, outcome]
        state_R[goes] = mdp.next_XAK[here, action, outcome]
    return Sampled(states_RT, actions_RT, rewards_RT)


def sample_second(mdp: Mdp, states_R: Ints, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """A last action in each of these states, and what it earns."""
    actions_R = _drawn(mdp.policy_XA.cumsum(axis=1)[states_R], rng)
    outcomes_R = _drawn(mdp.chance_XAK.cumsum(axis=2)[states_R, actions_R], rng)
    return actions_R, np.asarray(mdp.reward_XAK[states_R, actions_R, outcomes_R])


def _drawn(cumulated: Floats, rng: np.random.Generator) -> Ints:
    below = rng.random((len(cumulated), 1)) * cumulated[:, -1:] >= cumulated
    return np.asarray(below.sum(axis=1))


Outcome = tuple[float, int, float]
"""Chance, next state, reward."""


def _mdp(
    name: str, what: str, outcomes: Sequence[Sequence[Sequence[Outcome]]], logits: Floats, **options: object
) -> Mdp:
    """From outcomes[state][action]; missing actions and outcomes are filled up."""
    actions = max(map(len, outcomes))
    most = max(len(ends) for of_state in outcomes for ends in of_state)
    shape = (len(outcomes), actions, most)
    chance, following, reward = np.zeros(shape), np.full(shape, END), np.zeros(shape)
    chance[:, :, 0] = 1.0
    there = np.full(shape[:2], -np.inf)
    for x, of_state in enumerate(outcomes):
        for a, ends in enumerate(of_state):
            there[x, a] = logits[x, a]
            for k, (p, state, paid) in enumerate(ends):
                chance[x, a, k], following[x, a, k], reward[x, a, k] = p, state, paid
    return Mdp(name, what, there, chance, following, reward, **options)  # type: ignore[arg-type]


def bandit() -> Mdp:
    """An easy and a hard task of one step."""
    easy: list[list[Outcome]] = [[(0.9, END, 1.0), (0.1, END, 0.0)], [(1.0, END, 0.5)], [(1.0, END, 0.0)]]
    hard: list[list[Outcome]] = [[(0.3, END, 1.0), (0.7, END, 0.0)], [(1.0, END, 0.1)], [(1.0, END, 0.0)]]
    logits = np.array([[0.5, 0.0, -0.5], [-0.5, 0.5, 0.0]])
    return _mdp(
        "bandit", "two tasks of one step, an easy and a hard one", [easy, hard], logits, starts=(0, 1)
    )


def chain() -> Mdp:
    """Go on for more, at a risk, or leave with what there is."""
    outcomes: list[list[list[Outcome]]] = [
        [[(0.9, x + 1, 0.2), (0.1, END, 0.0)], [(1.0, END, 0.3)]] for x in range(3)
    ]
    outcomes.append([[(0.6, END, 1.0), (0.4, END, 0.0)], [(1.0, END, 0.3)]])
    logits = np.array([[0.8, 0.0], [0.4, 0.0], [0.4, 0.0], [0.0, 0.0]])
    return _mdp(
        "chain", "4 states; go on for more at a risk, or leave with a little", outcomes, logits, horizon=4
    )


def two_turns() -> Mdp:
    """Search or guess, then answer: every rollout has two steps."""
    search: list[Outcome] = [(0.8, 1, 0.3), (0.2, 2, 0.0)]
    outcomes: list[list[list[Outcome]]] = [[search, [(1.0, 2, 0.0)]]]
    for chances in ((0.9, 0.2, 0.1), (0.4, 0.3, 0.1)):
        outcomes.append([[(p, END, 1.0), (1 - p, END, 0.0)] for p in chances])
    logits = np.array([[0.0, 0.3, 0.0], [0.4, 0.0, 0.0], [0.0, 0.2, 0.0]])
    return _mdp("two turns", "search (pays when it finds) or guess, then answer", outcomes, logits, horizon=2)


def grid() -> Mdp:
    """3x3 cells, a coin in one corner, the goal in another, a pit in the middle."""
    outcomes: list[list[list[Outcome]]] = []
    for has_coin, row, column in product((0, 1), range(3), range(3)):
        of_state: list[list[Outcome]] = []
        for down, right in ((1, 0), (0, 1), (-1, 0), (0, -1)):
            to = (min(max(row + down, 0), 2), min(max(column + right, 0), 2))
            finds = to == (0, 2) and not has_coin
            state = 9 * int(has_coin or finds) + 3 * to[0] + to[1]
            ends = to in ((2, 2), (1, 1))
            of_state.append([(1.0, END if ends else state, 0.3 * finds + 1.0 * (to == (2, 2)))])
        outcomes.append(of_state)
    logits = np.tile([0.6, 0.6, 0.0, 0.0], (18, 1))
    what = "3x3 cells, a goal, a pit, a coin that pays once; states are seen again"
    texts = [
        f"{_cell(row, column)} The coin {('lies in its corner', 'is in your bag')[has_coin]}."
        for has_coin, row, column in product((0, 1), range(3), range(3))
    ]
    return _mdp("grid", what, outcomes, logits, texts=texts)


def _cell(row: int, column: int) -> str:
    """Cells of one row or column differ in one character, which is similar; others in two, which is not."""
    return (
        f"You stand on a board of square fields, in row {row}, column {column}, and may go down, right, up"
        " or left by one field."
    )


LAKE = "SFFFFHFHFFFHHFFG"


def lake() -> Mdp:
    """FrozenLake 4x4 where two of ten moves slip aside."""
    outcomes: list[list[list[Outcome]]] = []
    steps = ((0, -1), (1, 0), (0, 1), (-1, 0))
    for row, column in product(range(4), range(4)):
        of_state: list[list[Outcome]] = []
        for a in range(4):
            ends: list[Outcome] = []
            for chance, turn in ((0.1, -1), (0.8, 0), (0.1, 1)):
                down, right = steps[(a + turn) % 4]
                state = 4 * min(max(row + down, 0), 3) + min(max(column + right, 0), 3)
                ends.append((chance, END if LAKE[state] in "HG" else state, float(LAKE[state] == "G")))
            of_state.append(ends)
        outcomes.append(of_state)
    what = "FrozenLake 4x4, two of ten moves slip; 1 at the goal within 16 steps"
    plain = _mdp("lake", what, outcomes, np.zeros((16, 4)), horizon=16)
    best_X = np.zeros(16)
    for _ in range(100):
        best_X = _action_values(plain, 0.9 * best_X).max(axis=1)
    logits = 8.0 * _action_values(plain, 0.9 * best_X)
    texts = [_cell(row, column) for row, column in product(range(4), range(4))]
    return _mdp("lake", what, outcomes, logits, horizon=16, texts=texts)


def stop_or_continue() -> Mdp:
    """FORMULAS 6.1: both ways pay 1 in all, so the gradient is 0."""
    outcomes: list[list[list[Outcome]]] = [[[(1.0, END, 1.0)], [(1.0, 1, 0.5)]], [[(1.0, END, 0.5)]]]
    return _mdp(
        "stop", "stop pays 1, continue pays 0.5 and 0.5: gradient 0", outcomes, np.zeros((2, 2)), horizon=2
    )


def risky_stop() -> Mdp:
    """The same in expectation: continuing pays 0.5, then 2 or nothing."""
    second: list[Outcome] = [(0.25, END, 2.0), (0.75, END, 0.0)]
    outcomes: list[list[list[Outcome]]] = [[[(1.0, END, 1.0)], [(1.0, 1, 0.5)]], [second]]
    what = "stop pays 1, continue 0.5 and then 2 once in four: gradient 0"
    return _mdp("risky stop", what, outcomes, np.zeros((2, 2)), horizon=2)


def branched() -> Mdp:
    """Two turns, with two answers to each search."""
    what = "two turns; half as many first steps, two answers to each: for what needs branches"
    return replace(two_turns(), name="branched", what=what, branches=2)


MDPS = (bandit, chain, two_turns, grid, lake, stop_or_continue, risky_stop, branched)
