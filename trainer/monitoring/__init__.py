"""Monitors: what in a run's numbers and rollouts should make a person look, and what is done about it."""
