"""Stored rollouts -> credited rows: the one place where store, adapters and credit meet.

Invariants:
* only the current attempt of a rollout that succeeded is trained: no half rollout is;
* a reward counts only from an author that the caller allows, and for this attempt;
* whatever is not trained is in `refused`, with its reason: sampled tokens = trained + refused, checked each
  time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast

from spangrad.adapters.call_tree import CallTree, build_tree, in_order
from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.adapters.purpose import NO_TURN_LEFT
from spangrad.credit.aggregation import Aggregation, weigh
from spangrad.credit.assign import assign
from spangrad.credit.books import check_books, dropped_tokens
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.critic import Critic, valued, with_values
from spangrad.credit.forks import parents_of
from spangrad.credit.history import baselines_of
from spangrad.credit.observations import observation_rows
from spangrad.credit.pairs import Preferred
from spangrad.credit.reads import RewardsNoted
from spangrad.credit.rendered import REWRITTEN, Render, count_rewritten, rendered, with_unknown_tools
from spangrad.credit.rewards import DEFAULT_AUTHORS, RolloutRewards, by_rollout, rewards_of, with_names
from spangrad.credit.samples import samples_of
from spangrad.credit.scoring import BY_REWARD, scorer, tell_unscored
from spangrad.credit.staleness import too_stale
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import (
    MISSING_REWARD,
    Refused,
    acts,
    require_grade,
    trajectory_of,
    transitions,
    untrained_because,
)
from spangrad.credit.types import Trajectory
from spangrad.errors import ConfigError
from spangrad.store.base import Store
from spangrad.store.records import Reward, Rollout, RolloutStatus, UpdateSample

Target = Literal["actions", "observations"]
OBSERVED_ONLY: Final = "what it was answered is trained, not what it sampled"
Prefer = Callable[[Sequence[Transition], Mapping[str, float | None]], Preferred]
"""Rows and the return of each rollout -> the rows that a preference loss, or cloning, learns from."""


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    """Everything an update needs to know about its data."""

    rows: Sequence[Transition]
    refused: Sequence[Refused]
    diagnostics: Mapping[str, float]
    """Names and meaning: `credit/README.md`."""
    samples: Sequence[UpdateSample]
    """One per trained call: the line from the update back to the span."""
    calls: Sequence[ModelCall] = ()
    """Every call that was read, trained or not, those of rollouts that did not succeed too."""
    rewards: Sequence[Reward] = ()
    """Every reward that was read, whether it counted or not; a running baseline reads earlier ones, too."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What rendering altered without harm to the reply: kind -> calls."""
    sampled_tokens: int = 0
    """Tokens of all replies whose ids are known, those of rollouts that did not succeed too; where rows train
    what the environment answered, these tokens besides."""


def credited_rows(
    store: Store,
    rollouts: Sequence[Rollout],
    config: CreditConfig | None,
    *,
    min_grade: Grade | str = "exact",
    authors: Sequence[str] = DEFAULT_AUTHORS,
    reward_weights: Mapping[str, float] | None = None,
    aggregation: Aggregation = "rollout-token-mean",
    constant: float | None = None,
    policy_version: int | None = None,
    max_staleness: int | None = None,
    render: Render | None = None,
    prefer: Prefer | None = None,
    target: Target = "actions",
    base_dir: str = ".",
    critic: Critic | None = None,
) -> CreditedBatch:
    """Read the calls and rewards of rollouts and turn them into weighted, credited rows.

    Args:
        store: Where they are.
        rollouts: The batch; groups are formed by their `group_id`.
        config: Estimators. None: no rewards are needed and every call gets advantage 1 (cloning).
        min_grade: Calls with a worse grade are refused; they stay context.
        authors: Whose rewards count.
        reward_weights: Name -> weight of the rewards that are summed; by default those of `config`, without
            one the reward called `reward`.
        aggregation: As in `weigh`.
        constant: As in `weigh`.
        policy_version: Current version, for the staleness of samples.
        max_staleness: Refuse rollouts with a token that was sampled more updates before `policy_version`,
            or after it, or by nobody knows which version, beside others of the same model whose version is
            known: an engine that was restarted serves weights that nobody published. None: no limit.
        render: Gives text-grade calls their ids (for `min_grade` text) and checks those of others.
        prefer: What preference learning makes of rows and their rollouts' returns: `paired`, `labelled` or
            `best`, with their settings bound. Wants no estimators: `config` is None.
        target: What rows train: what the policy sampled, or (for cloning) what the environment answered.
        base_dir: Folder that a path in `config.scores` starts from.
        critic: Gives values to the terms that need some (`config.needs_values`).

    Raises:
        ConfigError: There are both estimators and preferences.
        CreditError: Rewards contradict each other. GradeError: `min_grade` is no grade.
        BooksError: A sampled token is neither trained nor refused, or both.
    """
    if config is not None and prefer is not None:
        raise ConfigError("preferences are made of returns, not of advantages; leave the estimators out")
    if config is not None and target == "observations":
        raise ConfigError("nobody is credited for what the environment answered; leave the estimators out")
    noted = RewardsNoted(store)
    store = cast(Store, noted)
    refused: list[Refused] = []
    ended, calls_by_rollout = ended_with_calls(store, rollouts, refused)
    lost = _calls_of_failed(store, refused)
    refused = _with_tokens(refused, lost)
    sampled = {call.call_id: _sampled_tokens(call) for calls in calls_by_rollout.values() for call in calls}
    if policy_version is not None and max_staleness is not None:
        stale = {
            rollout.rollout_id: too_stale(calls_by_rollout[rollout.rollout_id], policy_version, max_staleness)
            for rollout in ended
        }
        refused += [one for found in stale.values() for one in found]
        ended = [rollout for rollout in ended if not stale[rollout.rollout_id]]
    if config is not None and reward_weights is not None:
        config = replace(config, reward_weights=reward_weights)
    needs_rewards = config is not None or prefer is not None
    trajectories = trajectories_of(
        store,
        ended,
        calls_by_rollout,
        config,
        authors=authors,
        reward_weights=reward_weights,
        with_rewards=needs_rewards,
        base_dir=base_dir,
    )
    notes: Counter[str] = Counter()
    trees = [_tree(calls_by_rollout[rollout.rollout_id], render, notes, sampled) for rollout in ended]
    if critic is not None and config is not None and config.needs_values:
        trajectories = valued(trajectories, (tree for tree, _ in trees), critic)
    advantages, diagnostics, left_out, targets = _credit(trajectories, config, is_scored=needs_rewards)
    rows: list[Transition] = []
    for rollout, trajectory, (tree, unrendered) in zip(ended, trajectories, trees, strict=True):
        if not calls_by_rollout[rollout.rollout_id]:
            reason = f"no model call was recorded for attempt {rollout.attempt}"
            refused.append(Refused(rollout.rollout_id, None, reason))
            continue
        refused += unrendered
        assigned = {step.call_id: advantages[rollout.rollout_id, step.call_id] for step in trajectory.steps}
        why = left_out.get(rollout.rollout_id, MISSING_REWARD)
        rows += _rows(rollout, tree, assigned, why, min_grade, refused, target)
    if targets:
        rows = with_values(rows, trajectories, targets)
    shown = sum(int(row.action_mask.sum()) for row in rows) if target == "observations" else 0
    if prefer is not None:
        preferred = prefer(rows, {each.rollout_id: each.total_reward for each in trajectories})
        rows = list(preferred.rows)
        refused += preferred.refused
        diagnostics = {**diagnostics, **preferred.diagnostics}
    rows = weigh(rows, aggregation, constant=constant) if rows else []
    read = [call for calls in (lost, *calls_by_rollout.values()) for call in calls]
    total = shown + sum(sampled.values()) + sum(one.sampled_tokens for one in refused if one.call_id is None)
    refused = [
        replace(one, sampled_tokens=one.sampled_tokens or sampled.get(one.call_id or "", 0))
        for one in with_names(store, refused, ended, trajectories, authors)
    ]
    trained = sum(int(row.action_mask.sum()) for row in rows)
    check_books(total, trained, dropped_tokens(refused), where=f"{len(rollouts)} rollouts")
    samples = samples_of(rows, policy_version)
    rewards = list(noted.given.values())
    return CreditedBatch(rows, refused, diagnostics, samples, read, rewards, +notes, total)


def ended_with_calls(
    store: Store, rollouts: Sequence[Rollout], refused: list[Refused]
) -> tuple[list[Rollout], dict[str, list[ModelCall]]]:
    """Those that succeeded, and their calls by rollout id; adds the others to `refused`."""
    ended = _ended(rollouts, refused)
    ids = [rollout.rollout_id for rollout in ended]
    calls_by_rollout: dict[str, list[ModelCall]] = {rollout_id: [] for rollout_id in ids}
    for call in calls_of(store, ids) if ids else ():
        if call.rollout_id in calls_by_rollout:
            calls_by_rollout[call.rollout_id].append(call)
    return ended, calls_by_rollout


def trajectories_of(
    store: Store,
    rollouts: Sequence[Rollout],
    calls_by_rollout: Mapping[str, Sequence[ModelCall]],
    config: CreditConfig | None,
    *,
    authors: Sequence[str] = DEFAULT_AUTHORS,
    reward_weights: Mapping[str, float] | None = None,
    with_rewards: bool = True,
    base_dir: str = ".",
) -> list[Trajectory]:
    """The rollouts as the estimators of `config` take them; the arguments are those of `credited_rows`."""
    ids = [rollout.rollout_id for rollout in rollouts]
    if reward_weights is None and config is not None:
        reward_weights = config.reward_weights
    given = by_rollout(store.rewards(ids) if ids and with_rewards else ())
    parents = parents_of(rollouts, calls_by_rollout) if config is not None and config.needs_branches else {}
    score = None if config is None else scorer(config, base_dir)
    scores_from = "" if config is None or config.scores is None else config.scores
    wanted = scores_from.removeprefix(BY_REWARD)
    is_told = wanted == scores_from or not rollouts
    found: list[Trajectory] = []
    for rollout in rollouts:
        calls = calls_by_rollout[rollout.rollout_id]
        mine = given.get(rollout.rollout_id, ())
        rewards = rewards_of(rollout, mine, calls, authors=authors, weights=reward_weights)
        scores = None
        if score is not None:
            steps = [call for call in in_order(calls) if acts(call)]
            named = rewards_of(rollout, mine, calls, authors=authors, weights={wanted: 1.0}).steps
            scores = score(rollout, steps, named)
            is_told |= bool(named)
        found.append(replace(_trajectory(rollout, calls, rewards, config, parents), scores=scores))
    if not is_told:
        names = (one.name for mine in given.values() for one in mine if one.call_id is not None)
        tell_unscored(wanted, names, rollouts=len(rollouts))
    if config is None or config.episode != "running_baseline" or not found:
        return found
    totals = {one.rollout_id: one.total_reward for one in found}
    known = {name: total for name, total in totals.items() if total is not None}
    expected = baselines_of(store, known, rollouts, config, authors=authors, weights=reward_weights)
    return [replace(one, baseline=expected.get(one.rollout_id)) for one in found]


def _calls_of_failed(store: Store, refused: Sequence[Refused]) -> list[ModelCall]:
    ids = [one.rollout_id for one in refused if one.rollout_id is not None]
    return calls_of(store, ids) if ids else []


def _with_tokens(refused: Sequence[Refused], calls: Sequence[ModelCall]) -> list[Refused]:
    """Rollouts that did not succeed, with the tokens that were sampled in them for nothing."""
    lost: Counter[str | None] = Counter()
    for call in calls:
        lost[call.rollout_id] += _sampled_tokens(call)
    return [replace(one, sampled_tokens=lost[one.rollout_id]) for one in refused]


def _sampled_tokens(call: ModelCall) -> int:
    if call.purpose is Purpose.EMBEDDING:
        return 0
    return sum(len(choice.sampled_token_ids or ()) for choice in call.choices)


def _ended(rollouts: Sequence[Rollout], refused: list[Refused]) -> list[Rollout]:
    ended = []
    for rollout in rollouts:
        if rollout.status is RolloutStatus.SUCCEEDED:
            ended.append(rollout)
        else:
            because = f" ({rollout.brief_failure})" if rollout.failure else ""
            what = f"rollout did not succeed: {rollout.status}"
            refused.append(Refused(rollout.rollout_id, None, f"{what}{because}", kind=what))
    return ended


def _trajectory(
    rollout: Rollout,
    calls: Sequence[ModelCall],
    rewards: RolloutRewards,
    config: CreditConfig | None,
    parents: Mapping[str, str],
) -> Trajectory:
    return trajectory_of(
        calls,
        rewards.outcome,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        step_rewards=rewards.steps,
        with_observations=config is not None and config.anchors == "similar",
        with_actions=config is not None and config.needs_actions,
        components=rewards.components,
        parents=parents,
        is_truncated=is_truncated(rollout, calls),
    )


def is_truncated(rollout: Rollout, calls: Sequence[ModelCall]) -> bool:
    """Whether a rollout was cut off.

    Its turns did not suffice, its last acting call ran into its length, or the agent says so by returning a
    dictionary with `truncated` true, as Gymnasium's environments do.
    """
    if any(call.purpose_reason == NO_TURN_LEFT for call in calls):
        return True
    if isinstance(rollout.output, Mapping) and rollout.output.get("truncated"):
        return True
    last = next((call for call in reversed(in_order(calls)) if untrained_because(call) is None), None)
    return last is not None and any(choice.finish_reason == "length" for choice in last.choices)


def _credit(
    trajectories: Sequence[Trajectory], config: CreditConfig | None, *, is_scored: bool
) -> tuple[
    Mapping[tuple[str, str], float | None],
    Mapping[str, float],
    Mapping[str, str],
    Mapping[tuple[str, str], float],
]:
    """Advantages, metrics, what is left out, and targets of values."""
    if config is not None:
        result = assign(trajectories, config)
        return result.advantages, result.diagnostics.metrics(), result.left_out, result.value_targets
    ones: dict[tuple[str, str], float | None] = {
        (trajectory.rollout_id, step.call_id): 1.0 for trajectory in trajectories for step in trajectory.steps
    }
    if not is_scored:
        return ones, {"rollouts/all": float(len(trajectories))}, {}, {}
    metrics = assign(trajectories, CreditConfig()).diagnostics.metrics()
    return ones, {name: value for name, value in metrics.items() if not name.startswith("advantage/")}, {}, {}


def _tree(
    calls: Sequence[ModelCall], render: Render | None, notes: Counter[str], sampled_tokens: dict[str, int]
) -> tuple[CallTree, list[Refused]]:
    """The calls of one rollout as a tree, and those that can't be rendered.

    `sampled_tokens`, by call, gets the count of replies that are rendered.
    """
    refused: list[Refused] = []
    sampled = [call for call in calls if call.purpose is not Purpose.EMBEDDING]
    if render is not None:
        sampled = with_unknown_tools(sampled)
    with_ids = [rendered(call, render, refused, notes) for call in sampled]
    sampled_tokens.update((call.call_id, _sampled_tokens(call)) for call in with_ids if call is not None)
    tree = build_tree([call for call in with_ids if call is not None])
    if render is not None:
        notes[REWRITTEN] += count_rewritten(tree)
    return tree, refused


def _rows(
    rollout: Rollout,
    tree: CallTree,
    assigned: Mapping[str, float | None],
    unassigned_because: str,
    min_grade: Grade | str,
    refused: list[Refused],
    target: Target,
) -> list[Transition]:
    """Rows of one rollout; every call that none of them trains is refused."""
    acting: list[ModelCall] = []
    for call in {node.call.call_id: node.call for node in tree.nodes}.values():
        if (reason := untrained_because(call)) is not None:
            refused.append(Refused(rollout.rollout_id, call.call_id, reason))
        else:
            acting.append(call)
    kept, too_bad = require_grade(acting, min_grade)
    refused += too_bad
    for call in tree.left_out:
        _, too_bad = require_grade([call], min_grade)
        refused += too_bad or [
            Refused(rollout.rollout_id, call.call_id, "no token ids, and nothing renders them")
        ]
    if target == "observations":
        refused += [Refused(rollout.rollout_id, call.call_id, OBSERVED_ONLY) for call in kept]
        known = {call.call_id for call in kept}
        acts = frozenset(node.index for node in tree.nodes if node.call.call_id in known)
        return observation_rows(tree, acts, group_id=rollout.group_id)
    trained = {call.call_id: assigned.get(call.call_id) for call in kept}
    missing = [call_id for call_id, advantage in trained.items() if advantage is None]
    refused += [Refused(rollout.rollout_id, call_id, unassigned_because) for call_id in missing]
    return transitions(tree, trained, group_id=rollout.group_id)
