"""Rows that engine and learner are compared by."""

import dataclasses

import numpy as np

from spangrad.credit.transition import Transition


def probe_row() -> Transition:
    """Token ids that every tokenizer has, to compare engine and learner with before there is any rollout."""
    ids = np.random.default_rng(0).integers(3, 256, 64).astype(np.int32)
    nothing = np.zeros(len(ids), dtype=np.bool_)
    return Transition(
        rollout_id="probe",
        attempt=0,
        group_id=None,
        segments=(),
        token_ids=ids,
        action_mask=nothing,
        behavior_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        policy_versions=np.full(len(ids), -1, dtype=np.int32),
        advantages=np.zeros(len(ids)),
        loss_weight=0.0,
        grade="exact",
    )


def scored_whole(row: Transition) -> Transition:
    """The same tokens with every one but the first to be scored, at temperature 1."""
    mask = np.ones(len(row.token_ids), dtype=np.bool_)
    mask[0] = False
    return dataclasses.replace(row, action_mask=mask, temperature=1.0)
