"""`spangrad sql` and `spangrad report`, run as a user runs them."""

import json
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from spangrad.adapters import ingest
from spangrad.commands.output import print_rows
from spangrad.store import open_store
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward
from spangrad.store.tables.query import TIMEOUT_S
from tests.command_line import ingested, listed, listen_to_ctrl_c, recorded, spangrad
from tests.waiting import wait_until

MULTI_TURN = Path(__file__).parent / "adapters" / "fixtures" / "genai_openai" / "multi_turn.otlp.jsonl"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("sql") / "store.duckdb"
    opened = open_store(str(path))
    ingest([MULTI_TURN], opened)
    opened.close()
    return str(path)


def sql(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spangrad", "sql", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_a_statement_it_says_what_can_be_asked(store):
    rows = [json.loads(line) for line in sql("--store", store, "--json").stdout.splitlines()]
    assert {"steps", "outcomes", "calls", "spans"} <= {row["name"] for row in rows}
    assert all(row["what"] for row in rows)


def test_an_answer_is_a_table_json_or_parquet(store, tmp_path):
    ask = "SELECT step, finish_reason FROM steps ORDER BY step"
    assert sql(ask, "--store", store).stdout.splitlines()[:2] == ["step\tfinish_reason", "0\ttool_calls"]
    rows = [json.loads(line) for line in sql(ask, "--store", store, "--json").stdout.splitlines()]
    file = tmp_path / "steps.parquet"
    assert sql(ask, "--store", store, "--parquet", str(file)).returncode == 0
    assert pq.read_table(file).to_pylist() == rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_columns_of_one_name_are_told_apart(store, tmp_path):
    ask = "SELECT 1 AS a, 2 AS a, 3 AS A, 4 AS a_1, 5 AS a"
    expected = {"a": 1, "a_1": 2, "A_2": 3, "a_1_1": 4, "a_3": 5}  # as DuckDB's own COPY names them
    assert sql(ask, "--store", store).stdout.splitlines() == ["a\ta_1\tA_2\ta_1_1\ta_3", "1\t2\t3\t4\t5"]
    assert json.loads(sql(ask, "--store", store, "--json").stdout) == expected
    assert sql("SELECT 1 AS a, 2 AS a WHERE false", "--store", store).stdout == "a\ta_1\n"
    file = tmp_path / "a.parquet"
    assert sql(ask, "--store", store, "--parquet", str(file)).returncode == 0
    assert pq.read_table(file).to_pylist() == [expected]


def test_numbers_that_json_does_not_have_are_words_in_it(store):
    ask = "SELECT 'nan'::DOUBLE AS n, ['inf'::FLOAT, '-inf'::FLOAT, NULL] AS i, NULL::DOUBLE AS none"
    done = sql(ask, "--store", store, "--json")
    assert json.loads(done.stdout) == {"n": "NaN", "i": ["Infinity", "-Infinity", None], "none": None}


def test_a_terminal_too_narrow_for_a_table_gets_a_line_for_each_value(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    wide = {f"column_{number}": f"[bold]value {number}" for number in range(12)}
    print_rows(list(wide), [wide, {"column_0": 1}], may_be_blocks=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["\x1b[1mrow 1\x1b[0m", "column_0: [bold]value 0"]
    assert shown[12:16] == [
        "column_11: [bold]value 11",
        "\x1b[1mrow 2\x1b[0m",
        "column_0: 1",
        "column_1: -",
    ]
    fits = dict(list(wide.items())[:10])
    print_rows(list(fits), [fits], may_be_blocks=True)
    assert "row 1" not in capsys.readouterr().out


def test_parquet_takes_any_number_of_rows_and_keeps_types(store, tmp_path):
    file = tmp_path / "big.parquet"
    ask = (
        "SELECT i::UBIGINT AS i, (i / 3)::DECIMAL(9, 2) AS d, [i] AS l, NULL::INT AS n FROM range(30000) t(i)"
    )
    done = sql(ask, "--store", store, "--parquet", str(file))
    assert (done.returncode, done.stderr) == (0, f"30000 rows in {file}\n")
    found = pq.read_table(file)
    assert found.slice(29_999).to_pylist() == [
        {"i": 29_999, "d": Decimal("9999.67"), "l": [29_999], "n": None}
    ]
    assert pq.ParquetFile(file).num_row_groups == 1
    late = "SELECT CASE WHEN i = 29999 THEN error('boom') ELSE 'x' END AS x FROM range(30000) t(i)"
    for statement, target in ((late, file), ("SELECT 1", tmp_path), ("SELECT 1", file / "below")):
        done = sql(statement, "--store", store, "--parquet", str(target))
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["big.parquet"]  # as it was, and nothing beside it
    assert pq.read_table(file).num_rows == 30_000


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--parquet", "x.parquet")])
def test_ctrl_c_ends_a_question_without_a_word(store, tmp_path, more):
    endless = "SELECT count(*) FROM range(10000000) a, range(10000000) b"
    command = [sys.executable, "-m", "spangrad", "sql", endless, "--store", store, *more]
    with subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, cwd=tmp_path, preexec_fn=listen_to_ctrl_c
    ) as asking:
        try:
            wait_until(lambda: is_open(store, asking.pid), 60)
            asking.send_signal(signal.SIGINT)
            out, err = asking.communicate(timeout=TIMEOUT_S - 5)  # it is Ctrl-C that ends it, not its time
        finally:
            asking.kill()
    assert (asking.returncode, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def is_open(file: str, pid: int) -> bool:
    return any(link.resolve() == Path(file) for link in Path(f"/proc/{pid}/fd").iterdir())


def test_an_answer_without_rows_has_its_heading(store):
    done = sql("SELECT step, model FROM steps WHERE step > 100", "--store", store)
    assert (done.returncode, done.stdout) == (0, "step\tmodel\n")


@pytest.mark.parametrize(
    "statement", ["DELETE FROM spans", "SELECT 1; SELECT 2", "selct", "SELECT * FROM nosuch"]
)
def test_what_is_no_question_is_refused_in_one_line(store, statement):
    done = sql(statement, "--store", store)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


def test_a_report_says_what_can_be_trained_and_what_to_change(store):
    command = [sys.executable, "-m", "spangrad", "report", "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "behaviour cloning\texact/ids/text\t1\t4\t187 by usage" in done.stdout
    assert "4\tno token ids\trecord below the SDK" in done.stdout


def test_a_report_counts_the_reward_that_is_asked_for_and_names_the_others(tmp_path):
    target = ingested(tmp_path, recorded(None, 7))
    with FileStore(target) as opened:
        [rollout] = opened.rollouts()
        opened.put_rewards([Reward(rollout.rollout_id, 1.0, name="style")])
    done = spangrad("report", "--store", target)
    assert "0 with the trusted reward 'reward'" in done.stdout
    assert "others that were given: 'style' (1 rollouts); --reward NAME asks for one" in done.stderr
    asked = spangrad("report", "--store", target, "--reward", "style")
    assert "1 with the trusted reward 'style'" in asked.stdout
    assert asked.stderr == ""
    (row,) = listed("transitions", "--store", target, "--reward", "style", "--json")
    assert row["rollout_id"] == rollout.rollout_id
    unrewarded = spangrad("transitions", "--store", target)
    assert "others that were given: 'style'" in unrewarded.stderr
    out = (
        "export",
        str(tmp_path / "out"),
        "-f",
        "messages",
        "--store",
        target,
        "--min-reward",
        "1",
        "--json",
    )
    (card,) = listed(*out, "--reward", "style")
    assert (card["splits"]["train"]["rollouts"], card["filters"]["reward"]) == (1, "style")
