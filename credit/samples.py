"""What an update trained of each call, as the store keeps it: the line from the update back to the span.

Knows rows. Does not know: stores, how advantages were made.
"""

from collections.abc import Sequence

from spangrad.credit.transition import Transition
from spangrad.store.records import UpdateSample


def samples_of(rows: Sequence[Transition], policy_version: int | None = None) -> list[UpdateSample]:
    """What each call contributed: mean advantage, trained tokens, the oldest version that sampled it."""
    parts: dict[tuple[str, int, str], list[tuple[float, int, int]]] = {}
    for row in rows:
        for segment in row.segments:
            place = slice(segment.start, segment.stop)
            summed = float(row.advantages[place].sum())
            part = (summed, segment.stop - segment.start, int(row.policy_versions[place].min()))
            parts.setdefault((row.rollout_id, row.attempt, segment.call_id), []).append(part)
    samples = []
    for (rollout_id, attempt, call_id), found in parts.items():
        tokens = sum(count for _, count, _ in found)
        oldest = min(version for _, _, version in found)
        known = oldest >= 0
        samples.append(
            UpdateSample(
                rollout_id=rollout_id,
                call_id=call_id,
                attempt=attempt,
                advantage=sum(summed for summed, _, _ in found) / tokens,
                trained_tokens=tokens,
                policy_version=oldest if known else None,
                staleness=policy_version - oldest if known and policy_version is not None else None,
            )
        )
    return samples
