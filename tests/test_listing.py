"""What the listing commands show, and how they say that there is nothing."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spangrad.adapters import account_unread, ingest
from spangrad.cli import app
from spangrad.store import open_store
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, Rollout, RolloutStatus
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes
from tests.adapters.captured import FIXTURES
from tests.command_line import PROMPT, SAMPLED, ingested, listed, recorded, spangrad


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two finished rollouts of one task, rewarded 1 and 0."""
    path = str(tmp_path_factory.mktemp("store") / "store.duckdb")
    opened = open_store(path)
    ids = ("r-1", "r-2")
    opened.enqueue([Rollout(rollout_id, task_id="sum", group_id="g", run_id="run-a") for rollout_id in ids])
    for number, rollout in enumerate(opened.claim(worker="w", limit=2), start=1):
        opened.put_otlp(recorded(rollout.rollout_id, number))
        opened.finish(rollout.rollout_id, rollout.attempt, output="4")
    opened.put_rewards([Reward("r-1", 1.0), Reward("r-2", 0.0)])
    account_unread(opened)
    opened.close()
    return path


def test_rollouts_as_json_lines(store: str) -> None:
    first, second = listed("rollouts", "--store", store, "--json")
    assert first["rollout"] == "r-1"
    assert first["task"] == "sum"
    assert first["status"] == "succeeded"
    assert (first["reward"], second["reward"]) == (1.0, 0.0)
    assert first["calls"] == 1
    assert first["trained_by_update"] is None


@pytest.mark.parametrize("is_read", [False, True])
def test_rollouts_show_their_turns_and_which_were_cut_off(tmp_path: Path, is_read: bool) -> None:
    path = str(tmp_path / "store.duckdb")
    with FileStore(path) as opened:
        opened.enqueue([Rollout("r-1", turn_budget=1), Rollout("r-2", turn_budget=1), Rollout("r-3")])
        for number, rollout in enumerate(opened.claim(worker="w", limit=3), start=1):
            opened.put_otlp(recorded(rollout.rollout_id, number))
        own = {**text_attributes(), c.ROLLOUT_ID: "r-2", c.SYNTHETIC: c.NO_TURN_LEFT}
        opened.put_otlp(encode_request([span("x", trace="9", scope=c.SCOPE_GATEWAY, attributes=own)]))
        if is_read:
            account_unread(opened)
    rows = listed("rollouts", "--store", path, "--json")
    assert [(row["turn_budget"], row["out_of_turns"]) for row in rows] == [
        (1, False),
        (1, True),
        (None, False),
    ]
    done = CliRunner().invoke(app, ["rollouts", "--store", path])
    head, *lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[head.index("turns")] for line in lines] == ["1", "1, cut off", "-"]


def test_a_listing_into_a_pipe_is_plain_tab_separated(store: str) -> None:
    done = spangrad("rollouts", env={"SPANGRAD_STORE": store})
    head, first, _ = done.stdout.splitlines()
    assert head.split("\t")[:3] == ["rollout", "task", "status"]
    assert first.split("\t")[:7] == ["r-1", "sum", "succeeded", "0", "1", "1", "-"]


def test_calls_show_the_engines_ids_and_the_grade(store: str) -> None:
    (call,) = listed("calls", "--store", store, "--rollout", "r-1", "--json")
    assert call["grade"] == "exact", call["grade_reasons"]
    assert call["prompt_token_ids"] == PROMPT
    assert call["sampled_token_ids"] == SAMPLED


def test_transitions_mask_exactly_the_sampled_ids(store: str) -> None:
    (row,) = listed("transitions", "--store", store, "--rollout", "r-1", "--json")
    assert row["token_ids"] == PROMPT + SAMPLED
    assert [i for i, m in zip(row["token_ids"], row["action_mask"], strict=True) if m] == SAMPLED
    (segment,) = row["segments"]
    assert (segment["start"], segment["stop"]) == (4, 7)
    # Compared with the whole group, though only one member was asked for: 1 beats 0.
    assert all(value > 0 for value in row["advantages"][4:])
    assert row["advantages"][:4] == [None] * 4
    assert row["loss_weight"] > 0


def test_calls_show_the_newest_and_say_how_many_are_left_out(store: str) -> None:
    done = spangrad("calls", "--store", store, "--limit", "1", "--json")
    (call,) = map(json.loads, done.stdout.splitlines())
    assert call["rollout_id"] == "r-2"
    assert done.stderr.splitlines() == ["the newest 1 of 2 calls, 1 left out; --limit 0 lists all"]
    assert len(listed("calls", "--store", store, "--limit", "0", "--json")) == 2


def test_calls_of_a_split(store: str) -> None:
    assert len(listed("calls", "--store", store, "--split", "train", "--json")) == 2
    assert len(listed("calls", "--store", store, "--run", "run-a", "--rollout", "r-1", "--json")) == 1


def test_ingested_calls_have_a_rollout_and_can_be_cloned_without_a_reward(tmp_path: Path) -> None:
    target = ingested(tmp_path, recorded(None, 7))
    unrewarded = spangrad("transitions", "--store", target)
    assert unrewarded.returncode == 0
    assert "not trained, 1x: reward is missing" in unrewarded.stderr
    assert "`spangrad transitions --clone`" in unrewarded.stderr
    (row,) = listed("transitions", "--store", target, "--clone", "--json")
    assert row["rollout_id"] == (7).to_bytes(16, "big").hex()


def test_spans_that_came_live_are_listed_like_ingested_ones(tmp_path: Path) -> None:
    target = str(tmp_path / "live.duckdb")
    with FileStore(target) as live:  # as spans come in at a hub
        live.put_otlp(recorded(None, 7))
    (row,) = listed("transitions", "--store", target, "--clone", "--json")
    assert row["rollout_id"] == (7).to_bytes(16, "big").hex()
    assert row["token_ids"] == PROMPT + SAMPLED
    assert row["advantages"][4:] == [1.0] * 3
    (rollout,) = listed("rollouts", "--store", target, "--json")
    assert (rollout["split"], rollout["calls"]) == ("recorded", 1)


def test_calls_that_are_text_need_a_tokenizer_to_be_cloned(tmp_path: Path) -> None:
    from tests.trainer.small_policy import make_tokenizer

    target = ingested(tmp_path, recorded(None, 8, ids=False))
    done = spangrad("transitions", "--store", target, "--clone", "--json")
    assert (done.returncode, done.stdout) == (0, "")
    assert "not trained, 1x: grade text, ids is needed" in done.stderr
    assert "1 calls have no token ids, and only a tokenizer can make rows of them" in done.stderr
    make_tokenizer().save_pretrained(str(tmp_path / "policy"))
    rendered = ["--clone", "--tokenizer", str(tmp_path / "policy")]
    (row,) = listed("transitions", "--store", target, *rendered, "--json")
    assert row["grade"] == "text"
    assert 0 < sum(row["action_mask"]) < len(row["token_ids"])
    wrong = spangrad("transitions", "--store", target, "--clone", "--tokenizer", str(tmp_path / "no"))
    assert wrong.returncode == 1
    assert len(wrong.stderr.splitlines()) == 1
    credited = spangrad("transitions", "--store", target, *rendered[1:])  # it only checks ids
    assert (credited.returncode, credited.stdout) == (0, "")
    assert "not trained, 1x: grade text, ids is needed" in credited.stderr


def test_transitions_tell_what_no_tokenizer_can_make_rows_of(tmp_path: Path) -> None:
    from tests.trainer.small_policy import make_tokenizer

    make_tokenizer().save_pretrained(str(tmp_path / "policy"))
    target = str(tmp_path / "store.duckdb")
    with FileStore(target) as opened:
        ingest([FIXTURES / "openai_v2_legacy" / "multi_turn.otlp.jsonl"], opened)
        opened.put_otlp(recorded(None, 7))
        account_unread(opened)
    clone = ("transitions", "--store", target, "--clone", "--tokenizer", str(tmp_path / "policy"))
    done = spangrad(*clone)
    assert (done.returncode, done.stdout) == (0, "")
    assert "not trained, 4x: can't be rendered: tool definitions were not recorded" in done.stderr
    assert "--keep-unknown-tools renders such calls without their tools" in done.stderr
    assert "not trained, 1x: token ids of another vocabulary: the reply of call" in done.stderr
    kept = spangrad(*clone, "--keep-unknown-tools", "--json")
    rows = [json.loads(line) for line in kept.stdout.splitlines()]
    assert sum(len(row["segments"]) for row in rows) == 4
    assert {row["model"] for row in rows} == {"rendered from text"}
    assert spangrad(*clone[:3], "--keep-unknown-tools").returncode == 1


def test_a_reader_that_has_enough_is_no_error(store: str) -> None:
    program = (
        f"{shlex.quote(sys.executable)} -m spangrad calls --store {shlex.quote(store)} --json | head -c 10"
    )
    done = subprocess.run(["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True)
    assert len(done.stdout) == 10
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


LISTINGS = ("rollouts", "calls", "transitions")


@pytest.mark.slow
@pytest.mark.parametrize("command", LISTINGS)
def test_a_listing_reads_beside_another_reader(store: str, command: str) -> None:
    with open_store(store, read_only=True):
        done = spangrad(command, "--store", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("command", LISTINGS)
def test_a_listing_makes_no_store_of_an_empty_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty.duckdb").touch()
    done = spangrad(command, "--store", "empty.duckdb", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "empty.duckdb' is an empty file, no spangrad store" in line
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("empty.duckdb", 0)]


@pytest.mark.slow
@pytest.mark.parametrize("command", LISTINGS)
@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("--rollout", "r-22", "no rollout 'r-22' in .*; `spangrad rollouts` lists .*; did you mean 'r-2'"),
        ("--run", "run-b", "no rollout of run 'run-b' in .*; known are run-a; did you mean 'run-a'"),
        ("--split", "zzz", "no rollout of split 'zzz' in .*; known are train$"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_that_names_the_nearest(
    store: str, command: str, option: str, name: str, says: str
) -> None:
    done = spangrad(command, "--store", store, option, name, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.search(says, line), line


def test_one_unknown_rollout_among_known_ones_is_an_error(store: str) -> None:
    done = spangrad("calls", "--store", store, "-r", "r-1", "-r", "nosuch", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no rollout 'nosuch'" in done.stderr


@pytest.mark.parametrize("command", ["rollouts", "transitions"])
def test_an_author_that_nobody_is_is_an_error(store: str, command: str) -> None:
    done = spangrad(command, "--store", store, "--author", "evaluatr", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected one of agent, evaluator, operator; did you mean 'evaluator'?" in done.stderr


@pytest.mark.parametrize("command", LISTINGS)
def test_an_empty_store_says_so(tmp_path: Path, command: str) -> None:
    target = str(tmp_path / "s.duckdb")
    open_store(target).close()
    done = spangrad(command, "--store", target, "--json")
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert re.search(r"s\.duckdb' is empty|no model call is in", line), line


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rollouts of every split: each group has one that is worth 1 and one that is worth 0, one failed."""
    path = str(tmp_path_factory.mktemp("mixed") / "store.duckdb")
    with open_store(path) as opened:
        names = [f"{split}-{n}" for split in ("train", "eval-after", "expert") for n in (0, 1)]
        rollouts = [
            Rollout(name, group_id=name[:-2], run_id="run", split=name[:-2], max_attempts=1)
            for name in (*names, "train-2")
        ]
        opened.enqueue(rollouts)
        for number, rollout in enumerate(opened.claim(worker="w", limit=9), start=1):
            opened.put_otlp(recorded(rollout.rollout_id, number))
            if rollout.rollout_id == "train-2":
                status = RolloutStatus.FAILED
                opened.finish("train-2", 0, status=status, error_type="ValueError", error="oh\nno")
            else:
                opened.finish(rollout.rollout_id, 0)
                opened.put_rewards([Reward(rollout.rollout_id, float(rollout.rollout_id[-1]))])
        opened.put_rewards([Reward("train-0", 7.0, name="style"), Reward("train-2", 7.0, name="style")])
    return path


def test_training_rows_are_of_what_a_trainer_learns_from(mixed: str) -> None:
    done = spangrad("transitions", "--store", mixed, "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["rollout_id"], row["split"]) for row in rows] == [("train-0", "train"), ("train-1", "train")]
    assert "left out: rollouts of split eval-after (2), expert (2)" in done.stderr
    assert rows == listed("transitions", "--store", mixed, "--split", "train", "--json")
    cloned = listed("transitions", "--store", mixed, "--clone", "--json")
    assert {row["split"] for row in cloned} == {"expert"}


def test_rows_of_an_evaluation_are_marked(mixed: str) -> None:
    done = spangrad("transitions", "--store", mixed, "--split", "eval-after")
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert {row[head.index("split")] for row in rows} == {"eval-after"}
    assert "no update trains on these 2 rollouts of split eval-after" in done.stderr


def test_a_failure_has_one_form_and_one_line(mixed: str) -> None:
    (row,) = listed("rollouts", "--store", mixed, "--rollout", "train-2", "--json")
    assert (row["error_type"], row["error"]) == ("ValueError", "ValueError: oh\nno")
    shown = spangrad("rollouts", "--store", mixed, "--rollout", "train-2")
    assert shown.stdout.splitlines()[1].split("\t")[-1] == "ValueError: oh no"
    refused = spangrad("transitions", "--store", mixed)
    assert "not trained, 1x: rollout did not succeed: failed (ValueError: oh no)\n" in refused.stderr


TRACEBACK = """Traceback (most recent call last):
  File "agent.py", line 3, in answer
    return table[name]
           ~~~~~^^^^^^
KeyError: 'orders'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "agent.py", line 5, in answer
    raise ValueError("no such table: orders")
ValueError: no such table: orders
  ask for `tables` first
"""


def test_of_a_traceback_the_line_that_says_what_it_was_is_shown(tmp_path: Path) -> None:
    path = str(tmp_path / "store.duckdb")
    with open_store(path) as opened:
        opened.enqueue([Rollout("r", max_attempts=1)])
        opened.claim(worker="w")
        opened.finish("r", 0, status=RolloutStatus.FAILED, error_type="ValueError", error=TRACEBACK)
    shown = spangrad("rollouts", "--store", path)
    assert shown.stdout.splitlines()[1].split("\t")[-1] == "ValueError: no such table: orders"
    (row,) = listed("rollouts", "--store", path, "--json")
    assert row["error"] == f"ValueError: {TRACEBACK}"
    refused = spangrad("transitions", "--store", path)
    assert "rollout did not succeed: failed (ValueError: no such table: orders)\n" in refused.stderr


def test_the_reward_that_is_shown_is_the_one_that_trains(mixed: str) -> None:
    done = spangrad("rollouts", "--store", mixed, "--split", "train", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 1.0, None]  # not 7: no trainer asks for `style`
    assert "1 rollouts have a reward 'style' of author operator, which trains nothing" in done.stderr


def config_of(folder: Path, more: str) -> str:
    file = folder / "run.toml"
    agent = '[agent]\nfunction = "a:run"\ntasks = "a:tasks"\nreward = "a:reward"\n'
    file.write_text(f'[run]\nid = "run"\n{agent}{more}')
    return str(file)


def test_transitions_of_a_config_are_what_its_objective_trains(mixed: str, tmp_path: Path) -> None:
    def of(objective: str, more: str = "") -> list[tuple[str, list[bool], float]]:
        config = config_of(tmp_path, f'[learner]\nobjective = "{objective}"\n{more}')
        rows = listed("transitions", "--store", mixed, "--config", config, "--json")
        return [
            (row["rollout_id"], [one["is_good"] for one in row.get("preferences", [])], row["advantages"][-1])
            for row in rows
        ]

    assert of("bc") == [("train-1", [], 1.0)]  # worth 1; the other is worth 0
    assert of("bc", "[preference]\ngood_at = 2.0\n") == []
    assert of("kto") == [("train-0", [False], -1.0), ("train-1", [True], 1.0)]
    assert of("dpo") == []  # they say the same
    grpo: list[Any] = [
        ("train-0", [], pytest.approx(-1.0, abs=1e-5)),
        ("train-1", [], pytest.approx(1.0, abs=1e-5)),
    ]
    assert of("ppo") == of("awr") == grpo


def test_transitions_of_a_config_that_trains_text_render_it(tmp_path: Path) -> None:
    from tests.trainer.small_policy import make_tokenizer

    path = str(tmp_path / "store.duckdb")
    with open_store(path) as opened:
        opened.enqueue([Rollout(name, group_id="g", run_id="run", max_attempts=1) for name in "ab"])
        for number, rollout in enumerate(opened.claim(worker="w", limit=2), start=1):
            opened.put_otlp(recorded(rollout.rollout_id, number, ids=False))
            opened.finish(rollout.rollout_id, 0)
        opened.put_rewards([Reward("a", 1.0), Reward("b", 0.0)])
    awr = ("transitions", "--store", path, "--config", config_of(tmp_path, '[learner]\nobjective = "awr"\n'))
    done = CliRunner().invoke(app, awr, catch_exceptions=False)
    assert "2 calls have no token ids" in done.stderr and ": --tokenizer MODEL_FOLDER renders" in done.stderr
    make_tokenizer().save_pretrained(str(tmp_path / "policy"))
    rows = listed(*awr, "--tokenizer", str(tmp_path / "policy"), "--json")
    assert [(row["rollout_id"], row["grade"], row["advantages"][-1] > 0) for row in rows] == [
        ("a", "text", True),
        ("b", "text", False),
    ]
    ppo = config_of(tmp_path, "")
    done = CliRunner().invoke(app, ("transitions", "--store", path, "--config", ppo), catch_exceptions=False)
    assert "not trained, 2x: grade text, exact is needed" in done.stderr


def test_transitions_take_the_config_of_a_demo(mixed: str) -> None:
    config = Path(__file__).parents[1] / "examples" / "01_text_to_sql" / "demo.toml"
    rows = listed("transitions", "--store", mixed, "--config", str(config), "--json")
    assert [row["rollout_id"] for row in rows] == ["train-0", "train-1"]
