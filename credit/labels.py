"""Which rollouts are good by their return alone: labels for KTO, and what is worth cloning.

Knows rows and the returns of their rollouts.

Invariants:
* a rollout without a return is neither good nor bad; its calls are in `refused`;
* a rollout is judged as a whole, in however many rows it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from spangrad.credit.pairs import Place, Preferred, check_returns, left_out, with_preferences
from spangrad.credit.transition import Preference, Transition
from spangrad.credit.transitions import MISSING_REWARD
from spangrad.errors import ConfigError


def labelled(
    rows: Sequence[Transition], returns: Mapping[str, float | None], *, good_at: float = 1.0
) -> Preferred:
    """Call every scored rollout good (return >= `good_at`) or bad, each with weight 1 / N.

    For KTO, arXiv:2402.01306, which needs no pairs.

    Args:
        rows: Of one attempt of every rollout.
        returns: rollout_id -> return, reward units; None or absent: nobody scored it.
        good_at: Reward units.

    Returns:
        Rows with one preference each, whose id is the rollout's.

    Raises:
        CreditError: A rollout has two attempts, or a return is not finite.
    """
    check_returns(rows, returns)
    known = {row.rollout_id: value for row in rows if (value := returns.get(row.rollout_id)) is not None}
    judged: dict[Place, list[Preference]] = {
        (r, s): [Preference(row.rollout_id, known[row.rollout_id] >= good_at, 1.0 / len(known))]
        for r, row in enumerate(rows)
        if row.rollout_id in known
        for s in range(len(row.segments))
    }
    why = {row.rollout_id: MISSING_REWARD for row in rows}
    good = sum(value >= good_at for value in known.values())
    counts = {"preference/good": float(good), "preference/bad": float(len(known) - good)}
    return with_preferences(rows, judged, why, counts)


def best(
    rows: Sequence[Transition],
    returns: Mapping[str, float | None],
    *,
    good_at: float | None = None,
    per_group: int = 0,
) -> Preferred:
    """Keep what is worth cloning: good rollouts, without repetitions, the best of each task.

    Rejection sampling (RFT, arXiv:2308.01825).

    Args:
        rows: Of one attempt of every rollout.
        returns: rollout_id -> return, reward units; None or absent: nobody scored it.
        good_at: Keep rollouts with at least this return; None: all, scored or not.
        per_group: Most rollouts of a group, those with the highest return first, then in order of the rows;
            0: all. A rollout without a group is a group of its own.

    Returns:
        The rows of the kept rollouts, unchanged; they want to be weighed again.

    Raises:
        ConfigError: `per_group` is below 0.
        CreditError: A rollout has two attempts, or a return is not finite.

    Of rollouts of a group whose tokens are all the same one is kept.
    """
    if per_group < 0:
        raise ConfigError(f"per_group is {per_group!r}; expected 0 or more")
    check_returns(rows, returns)
    said: dict[str, bytes] = {}
    group_of: dict[str, str] = {}
    for row in rows:
        mine = blake2b(said.get(row.rollout_id, b""), digest_size=16)
        mine.update(row.token_ids.tobytes())
        mine.update(row.action_mask.tobytes())
        said[row.rollout_id] = mine.digest()
        group_of[row.rollout_id] = f"rollout {row.rollout_id}" if row.group_id is None else row.group_id
    why: dict[str, str] = {}
    taken: dict[str, list[bytes]] = {}
    in_order = sorted(said, key=lambda rollout: -(returns.get(rollout) or 0.0))
    for rollout in in_order:
        value, kept = returns.get(rollout), taken.setdefault(group_of[rollout], [])
        if good_at is not None and value is None:
            why[rollout] = MISSING_REWARD
        elif good_at is not None and value is not None and value < good_at:
            why[rollout] = f"its return is below {good_at!r}"
        elif said[rollout] in kept:
            why[rollout] = "another rollout of its group says the same"
        elif per_group and len(kept) == per_group:
            why[rollout] = f"{per_group} rollouts of its group are kept already"
        else:
            kept.append(said[rollout])
    refused = [
        left_out(row, segment, why[row.rollout_id])
        for row in rows
        if row.rollout_id in why
        for segment in row.segments
    ]
    kept_rows = [row for row in rows if row.rollout_id not in why]
    return Preferred(kept_rows, refused, {"preference/left_out": float(len(refused))})


def mismatched(rows: Sequence[Transition]) -> list[Transition]:
    """What each row's rollout said, behind the first prompt of a row of another task.

    KTO measures on such sequences how far the policy is from its reference where neither was asked for it:
    the reference point of its value function (arXiv:2402.01306).

    Returns:
        A row for each one, masked where its own tokens are; empty where all rows are of one task.
    """
    names = [f"rollout {row.rollout_id}" if row.group_id is None else f"group {row.group_id}" for row in rows]
    others = [_next_of_another(names, r) for r in range(len(rows))]
    return [_behind(rows[other], row) for row, other in zip(rows, others, strict=True) if other is not None]


def _next_of_another(names: Sequence[str], r: int) -> int | None:
    later = ((r + k) % len(names) for k in range(1, len(names)))
    return next((other for other in later if names[other] != names[r]), None)


def _behind(prompt_of: Transition, row: Transition) -> Transition:
    prompt = prompt_of.token_ids[: prompt_of.segments[0].start]
    start = row.segments[0].start
    mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), row.action_mask[start:]])
    return replace(
        row,
        segments=(),
        token_ids=np.concatenate([prompt, row.token_ids[start:]]),
        action_mask=mask,
        behavior_logprobs=np.full(len(mask), np.nan, dtype=np.float32),
        policy_versions=np.full(len(mask), -1, dtype=np.int32),
        advantages=np.zeros(len(mask)),
    )
