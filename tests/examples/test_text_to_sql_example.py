import ast
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spangrad.trainer.policies.scripted_model import serve_model
from tests.examples.loading import EXAMPLES, from_example, module_of

EXAMPLE = "01_text_to_sql"
run = from_example(EXAMPLE, "agent:run")
tasks = from_example(EXAMPLE, "tasks:tasks")
questions = from_example(EXAMPLE, "tasks:questions")
databases = from_example(EXAMPLE, "tasks:databases")
reward = from_example(EXAMPLE, "reward:reward")
right_sql = from_example(EXAMPLE, "reward:right_sql")
reply = from_example(EXAMPLE, "expert:reply")
serve_expert = from_example(EXAMPLE, "expert:serve_expert")
Habits: Any = from_example(EXAMPLE, "expert:Habits")
shop_database = module_of(EXAMPLE, "shop_database")
shop_questions = module_of(EXAMPLE, "shop_questions")
EASY = {"orders_of_customer", "orders_of_product", "city_of_customer"}


@pytest.fixture
def openai_key(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return monkeypatch


def ask_for(tool: str, arguments: str) -> dict[str, Any]:
    function = {"name": tool, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


def test_agent_imports_no_spangrad():
    for name in ("agent", "shop_database"):
        tree = ast.parse((EXAMPLES / EXAMPLE / f"{name}.py").read_text())
        imported = [
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        ]
        imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in imported if module.startswith("spangrad")]


def test_agent_answers_through_the_expert_and_the_expert_is_as_good_as_designed(openai_key):
    todo = tasks("train", 200, 5)
    with serve_expert(0, 5) as base_url, ThreadPoolExecutor(8) as pool:
        openai_key.setenv("OPENAI_BASE_URL", base_url)
        outputs = list(pool.map(run, todo))
    scores = [reward(task, output) for task, output in zip(todo, outputs, strict=True)]
    # 0.576 over 1,600 rollouts; three standard errors of 200 are 0.105.
    assert 0.47 <= sum(scores) / len(scores) <= 0.68
    assert {output["calls"] for output in outputs} == {2, 3, 4}


def test_expert_gives_the_same_answers_in_every_run(openai_key):
    todo = tasks("train", 20, 6) * 2
    answers = []
    for _ in range(2):
        with serve_expert(0, 1) as base_url:
            openai_key.setenv("OPENAI_BASE_URL", base_url)
            answers.append([run(task)["answer"] for task in todo])
    assert answers[0] == answers[1]
    assert answers[0][:20] != answers[0][20:]  # asked again, it may do otherwise


def success_by_intent(habits: Any) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for number, task in enumerate(tasks("train", 250, 7)):
        messages = [{"role": "user", "content": task["question"]}]
        while (message := reply(messages, number, habits=habits)).get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            arguments = json.loads(function["arguments"])
            if function["name"] == "schema":
                seen = shop_database.describe(task["database"], arguments["table"])
            else:
                try:
                    seen = shop_database.show(shop_database.run_sql(task["database"], arguments["sql"]))
                except shop_database.QueryError as error:
                    seen = str(error)
            messages += [message, {"role": "tool", "tool_call_id": "c", "content": seen}]
        intent = shop_questions.read_question(task["question"]).intent.name
        scores.setdefault(intent, []).append(reward(task, {"answer": message["content"]}))
    assert set(scores) == {intent.name for intent in shop_questions.INTENTS}
    return {intent: sum(values) / len(values) for intent, values in scores.items()}


def test_choices_that_the_expert_makes_most_often_fail_every_hard_intent():
    most_often = Habits(
        *(float(round(getattr(Habits(), field.name))) for field in dataclasses.fields(Habits))
    )
    rates = success_by_intent(most_often)
    assert all((rate == 1.0) if intent in EASY else (rate < 0.35) for intent, rate in rates.items()), rates
    hard = [rate for intent, rate in rates.items() if intent not in EASY]
    assert sum(hard) / len(hard) < 0.15


def test_choices_that_the_expert_also_makes_answer_every_question():
    best = Habits(look_first=1, forget_filter=0, forget_filter_elsewhere=0, forget_distinct=0, slip=0)
    usual = Habits()
    assert usual.look_first >= 0.2 and usual.forget_filter <= 0.8 and usual.forget_distinct <= 0.8
    assert set(success_by_intent(best).values()) == {1.0}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "<tool_call>\n{broken"},
        ask_for("schema", '{"table": "orders"}'),  # asked for again and again, until the last call
        ask_for("schema", '{"no": 1}'),
        ask_for("query", "not JSON"),
        ask_for("query", '["SELECT 1"]'),
        ask_for("query", '{"sql": 7}'),
        ask_for("unknown", "{}"),
    ],
)
def test_agent_that_is_told_nonsense_ends_without_a_right_answer(openai_key, message):
    task = tasks("train", 1)[0]
    with serve_model(lambda messages, asked_before: message) as base_url:
        openai_key.setenv("OPENAI_BASE_URL", base_url)
        output = run(task)
    assert reward(task, output) == 0.0
    assert output["calls"] <= 5


def test_task_sets_the_temperature_and_the_prompt_holds_no_answer(openai_key):
    seen = []

    def remember(messages, asked_before):
        seen.append(messages)
        return {"role": "assistant", "content": "SELECT 1"}

    task = tasks("eval", 1)[0]
    with serve_model(remember) as base_url:
        openai_key.setenv("OPENAI_BASE_URL", base_url)
        run({**task, "temperature": 0.0})
    assert set(task) == {"task_id", "question", "database"}
    text = json.dumps(seen)
    assert "cost" not in text and "SELECT" not in text and task["question"] in text


def test_reward_accepts_the_right_query_in_any_spelling():
    for task in tasks("eval", 30, 3):
        assert reward(task, {"answer": right_sql(task)}) == 1.0
    task = next(t for t in tasks("train", 50) if "count(*)" in right_sql(t))
    assert reward(task, {"answer": f"with x as ({right_sql(task)}) select * from x"}) == 1.0


def test_the_number_that_the_tool_returned_is_never_an_answer():
    for task in tasks("train", 400, 5) + tasks("eval", 200, 1_000_003):
        ((result,),) = shop_database.run_sql(task["database"], right_sql(task))
        assert reward(task, {"answer": f"SELECT {result!r}"}) == 0.0, task


def test_right_query_that_fails_gives_no_reward_instead_of_0(monkeypatch):
    task = tasks("train", 1)[0]

    def run_sql(database, sql, *, twin=False):
        if sql == right_sql(task):
            raise shop_database.QueryError("INTERRUPT Error: Interrupted!")
        return shop_database.run_sql(database, sql, twin=twin)

    monkeypatch.setitem(reward.__globals__, "run_sql", run_sql)
    with pytest.raises(shop_database.QueryError, match="Interrupted"):
        reward(task, {"answer": f"WITH x AS ({right_sql(task)}) SELECT * FROM x"})


def test_reward_refuses_wrong_and_dangerous_answers(tmp_path):
    task = next(t for t in tasks("train", 50) if "count(*)" in right_sql(t))
    result = shop_database.run_sql(task["database"], right_sql(task))[0][0]
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    refused = [
        None,
        7,
        "",
        "no SQL",
        f"SELECT {result}",  # right number, but not in the twin
        f"{right_sql(task)}; {right_sql(task)}",
        "INSERT INTO orders VALUES ('ann', 'tea', 'may', 1, 'paid')",
        "WITH x AS (DELETE FROM orders RETURNING 1) SELECT count(*) FROM x",
        "DROP TABLE orders",
        f"COPY orders TO '{tmp_path}/out.csv'",
        f"ATTACH '{tmp_path}/other.duckdb'",
        f"SELECT count(*) FROM read_csv('{secret}')",
        f"SELECT count(*) FROM '{secret}'",
        "SET threads = 8",
        "PRAGMA database_list",
        "SELECT * FROM orders a, orders b",
    ]
    assert [reward(task, {"answer": answer}) for answer in refused] == [0.0] * len(refused)
    assert reward(task, {}) == 0.0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["secret.csv"]
    assert shop_database.run_sql(task["database"], right_sql(task)) == [(result,)]  # nothing was written


@pytest.mark.parametrize(
    "endless",
    [
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r",
        "SELECT count(*) FROM range(1000000000) a, range(1000000000) b",
    ],
)
def test_endless_query_is_stopped(endless):
    with pytest.raises(shop_database.QueryError):
        shop_database.run_sql("cost/done", endless)
    assert shop_database.run_sql("cost/done", "SELECT 1") == [(1,)]


def test_held_out_questions_and_databases_are_never_trained_on():
    assert not set(databases("train")) & set(databases("eval"))
    train, held_out = (
        {q.key for found in questions(split).values() for q in found} for split in ("train", "eval")
    )
    assert train and held_out and not train & held_out
    asked = {split: {task["question"] for task in tasks(split, 200)} for split in ("train", "eval")}
    assert not asked["train"] & asked["eval"]
    words = {
        split: {word for name in databases(split) for word in name.split("/")} for split in ("train", "eval")
    }
    assert words["eval"] <= words["train"]


def test_tasks_are_drawn_the_same_way_every_time():
    assert tasks("train", 30, 4) == tasks("train", 30, 4) == tasks("train", 60, 4)[:30]
    assert tasks("train", 30, 4) != tasks("train", 30, 5)
    ids = [
        task["task_id"] for split in ("train", "eval") for seed in (0, 1) for task in tasks(split, 30, seed)
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("seed", [1_000_003, 1_000_004])
def test_held_out_tasks_are_drawn_without_replacement(seed):
    drawn = tasks("eval", 128, seed)
    asked = [shop_questions.read_question(task["question"]) for task in drawn]
    times = Counter(question.key for question in asked)
    # 114 questions are held out; 3 of them are telling in no held-out shop.
    assert len(times) == 111 and max(times.values()) == 2
    assert len({task["question"] for task in drawn}) == 128
    assert len({(q.key, task["database"]) for q, task in zip(asked, drawn, strict=True)}) == 128
    assert 0.2 < sum(question.intent.name in EASY for question in asked) / 128 < 0.35
    first = {question.key for question in asked[:64]}
    assert len(first) == 64 and tasks("eval", 64, seed) == drawn[:64]


def test_seeds_have_their_own_held_out_tasks():
    pairs = [{(t["question"], t["database"]) for t in tasks("eval", 128, seed)} for seed in (7, 8)]
    assert len(pairs[0] & pairs[1]) < 32


def test_more_held_out_tasks_than_there_are_is_an_error_that_says_how_many():
    with pytest.raises(ValueError, match=r"500 tasks .* there are 2\d\d; ask for fewer"):
        tasks("eval", 500)


def test_training_tasks_of_an_update_are_distinct():
    drawn = [(shop_questions.read_question(t["question"]).key, t["database"]) for t in tasks("train", 600, 9)]
    for start in range(0, 600, 10):
        assert len(set(drawn[start : start + 100])) == len(drawn[start : start + 100])


def test_every_wording_is_read_back():
    for split in ("train", "eval"):
        for found in questions(split).values():
            for question in found:
                for wording in range(len(question.intent.wordings)):
                    assert shop_questions.read_question(question.word(wording)).key == question.key
    with pytest.raises(ValueError, match="fits none"):
        shop_questions.read_question("Who are you?")


def test_agent_script_runs_by_itself(openai_key):
    with serve_expert() as base_url:
        openai_key.setenv("OPENAI_BASE_URL", base_url)
        done = subprocess.run(
            [sys.executable, "agent.py", "cost/done", "Where does ann live?"],
            cwd=EXAMPLES / EXAMPLE,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout.startswith("SELECT city FROM customers"), done.stderr
