"""Exports of other systems: rows out of their files -> spans and scores. See ../README.md."""
