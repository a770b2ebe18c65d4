"""Whether a rollout is of weights that an update may still learn from: of a known version, and not too old.

Knows calls and version numbers. Does not know: stores, who publishes.
"""

from collections.abc import Sequence
from typing import Final

from spangrad.adapters.model_call import Choice, ModelCall
from spangrad.credit.transitions import Refused

TOO_STALE: Final = "too stale"
"""Kind of the reason of calls in a rollout with a token that is too old."""
UNKNOWN_VERSION: Final = "a version in the rollout is unknown"
"""Kind of the reason of calls in a rollout that other weights than published ones took part in."""


def too_stale(calls: Sequence[ModelCall], policy_version: int, max_staleness: int) -> list[Refused]:
    """All calls of one rollout, if one of them is too old, of a later version than the learner's, or of none.

    A call without a version counts if others of its model have one: an engine that was restarted serves
    weights that nobody published. Where no call has a version, their grades say it.
    """
    sampled = [(call, choice) for call in calls for choice in call.choices if choice.sampled_token_ids]
    versions = [version for _, choice in sampled for version in choice.policy_versions or () if version >= 0]
    wrong = [version for version in versions if not 0 <= policy_version - version <= max_staleness]
    if wrong:
        reason = (
            f"sampled by version {min(wrong)}, the learner's is {policy_version};"
            f" at most {max_staleness} updates of staleness are allowed"
        )
        return [Refused(call.rollout_id, call.call_id, reason, kind=TOO_STALE) for call in calls]
    models = {call.model for call, choice in sampled if _has_versions(choice)}
    unknown = [call for call, choice in sampled if call.model in models and not _has_versions(choice)]
    if unknown:
        reason = (
            f"it is not known which version sampled call {unknown[0].call_id!r}, and others of its rollout"
            f" are of version {min(versions)}: the engine may have been restarted"
        )
        return [Refused(call.rollout_id, call.call_id, reason, kind=UNKNOWN_VERSION) for call in calls]
    return []


def _has_versions(choice: Choice) -> bool:
    return bool(choice.policy_versions) and min(choice.policy_versions or ()) >= 0
