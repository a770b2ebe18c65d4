"""Names of a run's groups and rollouts follow from run, set and place: asking again adds nothing."""


def group_id(run_id: str, set_index: int, place: int) -> str:
    """Name of the group at a place of a set of tasks."""
    return f"{run_id}-u{set_index:05d}-g{place:03d}"


def rollout_id(group: str, member: int) -> str:
    """Name of a member of a group."""
    return f"{group}-m{member:02d}"
