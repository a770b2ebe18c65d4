"""Score an answer by executing it: a program, not a judge.

The answer is right when its SQL gives the rows of the right SQL, in the shop that was
asked about and in its twin with other rows. Anything else (no SQL, SQL that fails, writes,
reads files, runs too long or returns too much) is wrong, never an error. Only a failure of
the right SQL itself raises.
"""

from collections.abc import Mapping
from typing import Any

from shop_database import QueryError, run_sql
from shop_questions import read_question


def right_sql(task: Mapping[str, Any]) -> str:
    """The query that answers a task. Not part of the task: the agent never sees it."""
    return read_question(task["question"]).right_sql(*task["database"].split("/"))


def reward(task: Mapping[str, Any], output: Mapping[str, Any]) -> float:
    """1.0 if the answer is right, else 0.0.

    Args:
        task: One of `tasks.tasks`.
        output: What `agent.run` returned; `answer` is the SQL.

    Raises:
        QueryError: The right query failed; nothing is known about the answer.
    """
    answer = output.get("answer")
    if not isinstance(answer, str):
        return 0.0
    for twin in (False, True):
        # Outside `try`: if the right query is stopped (a loaded machine), there is no reward, not 0.
        expected = run_sql(task["database"], right_sql(task), twin=twin)
        try:
            result = run_sql(task["database"], answer, twin=twin)
        except QueryError:
            return 0.0
        if sorted(result, key=repr) != sorted(expected, key=repr):
            return 0.0
    return 1.0
