"""A run as a table in the terminal, as an HTML page, a rollout as text."""
