"""Get rollouts done: scheduling, the worker, the agent in its own process."""
