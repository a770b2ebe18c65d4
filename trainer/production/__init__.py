"""A run without tasks: what live agents did is trained on once somebody has said how good it was."""
