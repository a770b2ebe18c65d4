"""Runs that follow one another, each from the weights of the one before, and runs on stored rollouts."""
