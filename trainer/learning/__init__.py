"""Rows in, better weights out: losses, packing, the learner and its checkpoints."""
