"""Rows of other systems' exports -> spans and scores; a file for each system. See ../README.md.

Every module has three pure functions of one row: `is_row` (is it of that system?), `spans_of` (the spans that
it tells of) and `scores_of` (what somebody thought of them). Nothing of a row is thrown away: what a span has
no field for is in its attributes.
"""
