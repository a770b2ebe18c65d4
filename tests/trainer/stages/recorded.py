"""Rollouts that are in a store before anybody trains: of an expert, in groups, with rewards."""

from collections.abc import Sequence

from tests.trainer.made_updates import GROUPS, Members, spans_of

from spangrad.adapters import account_unread
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus


def record(
    store: FileStore,
    groups: Sequence[Members] = GROUPS,
    *,
    split: str = "expert",
    run_id: str = "old",
    failed: int = 0,
) -> list[str]:
    """Rollouts `<run>-<split>-g0-m0`, ... of two calls each; the last `failed` of them did not succeed."""
    rollouts = [
        Rollout(
            f"{run_id}-{split}-g{g}-m{m}",
            task_id=f"t{g}",
            group_id=f"{run_id}-{split}-g{g}",
            run_id=run_id,
            split=split,
        )
        for g, members in enumerate(groups)
        for m in range(len(members))
    ]
    given = [member for members in groups for member in members]
    store.enqueue(rollouts)
    store.claim(worker="w", limit=len(rollouts), policy_version=7)
    for place, (rollout, (reward, sampled)) in enumerate(zip(rollouts, given, strict=True)):
        trace = rollout.rollout_id.encode().hex()[-32:]
        store.put_otlp(encode_request(spans_of(rollout, 7, sampled, trace)))
        if reward is not None:
            store.put_rewards([Reward(rollout.rollout_id, reward, attempt=0)], author=RewardAuthor.EVALUATOR)
        is_bad = place >= len(rollouts) - failed
        status = RolloutStatus.FAILED if is_bad else RolloutStatus.SUCCEEDED
        store.finish(rollout.rollout_id, 0, status=status, error_type="E" if is_bad else None)
    account_unread(store)
    return [rollout.rollout_id for rollout in rollouts]
