"""Rewards for rollouts that are stored: out of files, and by a user's own function.

`StoredRollout` is what such a function gets. See "Rewards for what is stored" in `adapters/README.md`.
"""

from spangrad.adapters.scoring.stored_rollout import StoredRollout

__all__ = ["StoredRollout"]
