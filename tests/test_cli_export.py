"""`spangrad export`, run as a user runs it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

from spangrad.adapters import ingest
from spangrad.adapters.datasets.tables import TRANSITIONS, columns
from spangrad.cli import app
from spangrad.credit.rendered import REWRITTEN
from spangrad.errors import ConfigError, EmptyBatchError, StoreError
from spangrad.store import open_store
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, Rollout
from spangrad.tracer import conventions as c
from spangrad.trainer.learning.reading_back import DROPS_THOUGHTS
from tests.adapters.building import span, text_attributes, token_attributes
from tests.adapters.captured import FIXTURES
from tests.store.hub_process import HubProcess
from tests.trainer.small_policy import make_tokenizer
from tests.trainer.test_rendering_masks import THINKS

MULTI_TURN = FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"
FORMATS = (
    "transitions",
    "messages",
    "sharegpt",
    "trl-sft",
    "trl-dpo",
    "trl-grpo",
    "verl",
    "otlp",
    "otlp-proto",
)
KEY = "sk-proj-1234567890abcdef"


def said(role: str, text: str) -> str:
    message = {"role": role, "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}
    return json.dumps([message])


def recorded(rollout_id: str, number: int, reply: str, asked: str, model: str = "policy") -> bytes:
    """A rollout of one exact call: prompt 1 2 3, reply 4 5, logprobs -0.5, version 7."""
    attributes = text_attributes(**{c.ROLLOUT_ID: rollout_id, c.RESPONSE_ID: rollout_id}) | token_attributes()
    attributes |= {c.INPUT_MESSAGES: said("user", asked), c.OUTPUT_MESSAGES: said("assistant", reply)}
    attributes[c.REQUEST_MODEL] = model
    names = {c.ROLLOUT_ID: rollout_id, c.SPAN_ROLE: "rollout"}
    root = span("r", trace=str(number), attributes=names, end_ns=100)
    return encode_request([root, span("a", trace=str(number), parent="r", attributes=attributes)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two tasks of two rollouts each, rewarded 1 and 0; one of the last task says a key; and the picnic."""
    path = str(tmp_path_factory.mktemp("export") / "store.duckdb")
    with open_store(path) as opened:
        for number in range(4):
            task = f"task-{number // 2}"
            rollout_id = f"r-{number}"
            opened.enqueue([Rollout(rollout_id, task_id=task, group_id=task, run_id="run")])
            (claimed,) = opened.claim(worker="w")
            reply = f"use {KEY}" if number == 3 else f"reply {number}"
            opened.put_otlp(recorded(rollout_id, number + 1, reply, f"question of {task}"))
            opened.finish(rollout_id, claimed.attempt)
            opened.put_rewards([Reward(rollout_id, float(number % 2 == 0))])
        ingest([MULTI_TURN], opened)
    return path


def export(out: Path, form: str, store: str, *options: str) -> dict[str, Any]:
    """The card of an export, run in this process."""
    done = CliRunner().invoke(
        app,
        ["export", str(out), "--format", form, "--store", store, "--json", *options],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    card: dict[str, Any] = json.loads(done.stdout)
    return card


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_transitions_have_masks_and_the_advantages_of_whole_groups(store: str, tmp_path: Path) -> None:
    export(tmp_path / "out", "transitions", store, "--min-reward", "1")
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.schema.equals(TRANSITIONS)
    assert all(field.metadata[b"doc"] for field in table.schema)
    rows = table.to_pylist()
    assert [(row["rollout_id"], row["task_key"]) for row in rows] == [
        ("r-0", "task:task-0"),
        ("r-2", "task:task-1"),
    ]
    first = rows[0]
    assert (first["token_ids"], first["action_mask"]) == ([1, 2, 3, 4, 5], [False] * 3 + [True] * 2)
    assert first["behavior_logprobs"] == [None] * 3 + [-0.5] * 2
    assert first["policy_versions"] == [None] * 3 + [7] * 2
    # Rewards 1 and 0: (1 - 0.5) / (0.5 + 1e-6), though the rollout with 0 is not written.
    assert first["advantages"] == [None] * 3 + [pytest.approx(1.0, abs=1e-5)] * 2
    assert (first["loss_weight"], first["reward"], first["grade"]) == (0.5, 1.0, "exact")
    assert first["segments"][0]["start"] == 3


def test_rollouts_of_no_group_are_compared_with_those_of_the_same_task(tmp_path: Path) -> None:
    path = str(tmp_path / "recorded.duckdb")
    with open_store(path) as opened:
        for number, rollout_id in enumerate(("good", "bad", "lone"), start=1):
            asked = "other" if rollout_id == "lone" else "the same"
            opened.put_otlp(recorded(rollout_id, number, f"reply {number}", asked))
        assert [one.group_id for one in opened.rollouts()] == [None] * 3
        opened.put_rewards([Reward("good", 1.0), Reward("bad", 0.0), Reward("lone", 1.0)])
    export(tmp_path / "out", "transitions", path)
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    found = {row["rollout_id"]: row["advantages"][-1] for row in rows}
    assert found == {"good": pytest.approx(1, abs=1e-5), "bad": pytest.approx(-1, abs=1e-5), "lone": 0.0}
    assert {row["group_id"] == row["task_key"] for row in rows} == {True}


def test_a_runs_config_says_what_counts(store: str, tmp_path: Path) -> None:
    config = Path(__file__).parents[1] / "examples" / "02_calculator" / "run.toml"
    card = export(tmp_path / "out", "transitions", store, "--config", str(config))
    assert (card["filters"]["min_grade"], card["splits"]["train"]["grades"]) == ("exact", {"exact": 3})


def config_of(folder: Path, objective: str) -> str:
    file = folder / "run.toml"
    agent = '[agent]\nfunction = "a:run"\ntasks = "a:tasks"\nreward = "a:reward"\n'
    file.write_text(f'[run]\nid = "run"\n{agent}[learner]\nobjective = "{objective}"\n')
    return str(file)


def test_a_config_that_trains_text_has_text_exported(tokenizer: str, tmp_path: Path) -> None:
    path = str(tmp_path / "picnic.duckdb")
    with open_store(path) as opened:
        ingest([MULTI_TURN], opened)
        opened.put_rewards([Reward(one.rollout_id, 1.0) for one in opened.rollouts()])
    awr = ("--config", config_of(tmp_path, "awr"), "--tokenizer", tokenizer)
    card = export(tmp_path / "out", "transitions", path, *awr)
    assert (card["filters"]["min_grade"], card["filters"]["clone"]) == ("text", False)
    assert card["splits"]["train"]["grades"] == {"text": 4}


@pytest.mark.parametrize("objective", ["bc", "dpo", "kto"])
def test_a_config_whose_rows_are_preferences_is_refused_for_transitions_alone(
    store: str, tmp_path: Path, objective: str
) -> None:
    config = ("--config", config_of(tmp_path, objective))
    with pytest.raises(
        ConfigError, match=f"'{objective}' takes no advantages .* --format trl-dpo writes pairs"
    ):
        export(tmp_path / "out", "transitions", store, *config)
    assert not (tmp_path / "out").exists()
    export(tmp_path / "cloned", "transitions", store, *config, "--clone")
    export(tmp_path / "pairs", "trl-dpo", store, *config)


@pytest.mark.slow
def test_a_hub_gives_the_same_bytes_as_its_file(store: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.duckdb"
    shutil.copy(store, copy)
    with HubProcess(copy) as hub:
        for form in ("transitions", "messages", "otlp"):
            export(tmp_path / f"hub-{form}", form, hub.url)
    for form in ("transitions", "messages", "otlp"):
        export(tmp_path / form, form, str(copy))
        for file in (tmp_path / form).iterdir():
            assert (tmp_path / f"hub-{form}" / file.name).read_bytes() == file.read_bytes()


def test_the_columns_of_transitions_are_documented() -> None:
    page = (Path(__file__).parents[1] / "adapters" / "README.md").read_text()
    for name, _, meaning in columns():
        assert f"| `{name}` | " in page and f"| {meaning}" in page
    for form in FORMATS:
        assert f"`{form}`" in page


def test_transitions_can_be_cloned_without_rewards(store: str, tmp_path: Path) -> None:
    card = export(tmp_path / "out", "transitions", store, "--clone")
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["rollout_id"] for row in rows] == ["r-0", "r-1", "r-2"]  # the picnic has no ids, r-3 a key
    assert {value for row in rows for value in row["advantages"]} == {None, 1.0}
    assert card["splits"]["train"]["trained_tokens"] == 6
    assert card["refused"]["calls"] == {"grade text: arguments were re-serialised; no token ids": 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("policy"))
    make_tokenizer().save_pretrained(folder)
    return folder


def test_text_is_cloned_with_a_tokenizer_and_ids_that_are_not_its_own_are_refused(
    store: str, tokenizer: str, tmp_path: Path
) -> None:
    card = export(tmp_path / "out", "transitions", store, "--clone", "--tokenizer", tokenizer)
    train = card["splits"]["train"]
    assert (train["grades"], list(train["row_models"])) == ({"text": 4}, ["rendered from text"])
    assert train["reasons"] == {"no token ids": 4, "arguments were re-serialised": 4}
    assert card["refused"]["calls"] == {"token ids of another vocabulary": 4}


def test_calls_whose_tools_nobody_recorded_are_rendered_only_if_asked(tokenizer: str, tmp_path: Path) -> None:
    path = str(tmp_path / "store.duckdb")
    with open_store(path) as opened:
        ingest([FIXTURES / "openai_v2_legacy" / "multi_turn.otlp.jsonl"], opened)
    what = "tool definitions were not recorded"
    clone = ("--clone", "--tokenizer", tokenizer)
    with pytest.raises(EmptyBatchError, match=rf"can't be rendered: {what} \(4\)"):
        export(tmp_path / "out", "transitions", path, *clone)
    note = "4 calls used tools that nobody recorded: the model was shown more than their rows tell"
    card = export(tmp_path / "kept", "transitions", path, *clone, "--keep-unknown-tools")
    assert (card["refused"]["calls"], card["filters"]["keep_unknown_tools"]) == ({}, True)
    assert card["splits"]["train"]["calls"] == 4 and note in card["notes"]
    for form in ("messages", "sharegpt", "trl-sft"):
        card = export(tmp_path / form, form, path)
        assert card["splits"]["train"]["reasons"][what] == 4 and note in card["notes"]
        assert f"| {what} | 4 |" in (tmp_path / form / "card.md").read_text()


def test_a_card_tells_what_the_chat_template_rewrites(tmp_path: Path) -> None:
    said = [("user", "How many?"), ("assistant", "12"), ("user", "Sure?"), ("assistant", "Yes.")]
    messages = [{"role": role, "content": text} for role, text in said]
    messages[1]["reasoning_content"] = "Count them."
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    thinking = make_tokenizer()
    thinking.chat_template = THINKS
    thinking.save_pretrained(str(tmp_path / "policy"))
    path = str(tmp_path / "store.duckdb")
    with open_store(path) as opened:
        ingest([tmp_path / "chat.jsonl"], opened)
    clone = ("--clone", "--tokenizer", str(tmp_path / "policy"))
    card = export(tmp_path / "out", "transitions", path, *clone)
    assert (card["splits"]["train"]["rows"], card["refused"]["calls"]) == (2, {})
    assert card["splits"]["train"]["altered"] == {DROPS_THOUGHTS: 1, REWRITTEN: 1}
    assert f"| {REWRITTEN} | 1 |" in (tmp_path / "out" / "card.md").read_text()
    done = CliRunner().invoke(app, ["transitions", "--store", path, *clone])
    for what in (DROPS_THOUGHTS, REWRITTEN):
        assert f"rendered, 1x: {what}" in done.stderr


def test_a_card_warns_of_ids_of_several_models(tmp_path: Path) -> None:
    path = str(tmp_path / "store.duckdb")
    with open_store(path) as opened:
        for number, model in enumerate(("qwen", "qwen", "llama"), start=1):
            opened.put_otlp(recorded(f"r-{number}", number, f"reply {number}", "q", model))
    card = export(tmp_path / "out", "transitions", path, "--clone")
    assert card["splits"]["train"]["row_models"] == {"llama": 1, "qwen": 2}
    cloned, warning = card["notes"]
    assert cloned == "cloned: every reply has advantage 1, whatever rewards and estimators say"
    assert warning.startswith("warning: token ids of several models are mixed")
    assert warning.endswith("llama in 1 rows, qwen in 2 rows")
    assert export(tmp_path / "one", "transitions", path, "--clone", "--policy", "qwen")["notes"] == [cloned]


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_command_twice_gives_the_same_bytes(store: str, tmp_path: Path, form: str) -> None:
    split = () if form.startswith("otlp") else ("--heldout", "0.4")
    for name in ("one", "two"):
        export(tmp_path / name, form, store, *split)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"card.json", "card.md"} < set(files)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_card_says_what_is_in_it_and_what_was_left_out(store: str, tmp_path: Path) -> None:
    card = export(tmp_path / "out", "messages", store, "--licence", "CC-BY-4.0", "--min-grade", "ids")
    assert card == json.loads((tmp_path / "out" / "card.json").read_text())
    train = card["splits"]["train"]
    assert {name: train[name] for name in ("rows", "rollouts", "tasks", "calls")} == {
        "rows": 3, "rollouts": 3, "tasks": 2, "calls": 3,
    }  # fmt: skip
    assert (train["grades"], train["models"]) == ({"exact": 3}, {"policy": 3})
    assert train["dialects"] == {"spangrad": 3}
    assert train["rewards"] == {
        "given": 3,
        "missing": 0,
        "lowest": 0.0,
        "mean": pytest.approx(2 / 3),
        "highest": 1.0,
    }
    assert (card["licence"], card["rollouts_seen"]) == ("CC-BY-4.0", 5)
    assert card["refused"]["rollouts"] == {"no usable call": 1}
    assert card["refused"]["rows"] == {"a key or token is in it; --keep-secrets keeps such rows": 1}
    assert card["secrets_found"] == {"api key": 1}
    page = (tmp_path / "out" / "card.md").read_text()
    assert "Licence: CC-BY-4.0." in page and "| no usable call | 1 |" in page
    assert KEY not in page and KEY not in (tmp_path / "out" / "train.jsonl").read_text()


def test_secrets_are_kept_if_asked(store: str, tmp_path: Path) -> None:
    card = export(tmp_path / "out", "messages", store, "--keep-secrets")
    assert KEY in (tmp_path / "out" / "train.jsonl").read_text()
    assert (card["secrets_found"], card["refused"]["rows"]) == ({"api key": 1}, {})


def test_rollouts_are_chosen_by_sql_reward_model_and_task(store: str, tmp_path: Path) -> None:
    ask = "SELECT rollout_id FROM outcomes WHERE task_id = 'task-0' -- mine"
    export(tmp_path / "sql", "trl-sft", store, "--sql", ask)
    assert {row["rollout_id"] for row in lines(tmp_path / "sql" / "train.jsonl")} == {"r-0", "r-1"}
    export(tmp_path / "best", "trl-sft", store, "--policy", "policy", "--per-task", "1")
    assert {row["rollout_id"] for row in lines(tmp_path / "best" / "train.jsonl")} == {"r-0", "r-2"}
    export(tmp_path / "model", "trl-sft", store, "--policy", "stub-7b")
    assert len(lines(tmp_path / "model" / "train.jsonl")) == 4


def test_pairs_are_of_one_task(store: str, tmp_path: Path) -> None:
    export(tmp_path / "out", "trl-dpo", store)
    (pair,) = lines(tmp_path / "out" / "train.jsonl")  # the other pair holds the key
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("reply 0", "reply 1")


def test_the_split_leaks_no_task_in_any_format(store: str, tmp_path: Path) -> None:
    export(tmp_path / "out", "trl-grpo", store, "--heldout", "0.5")
    sides = [
        {row["task_key"] for row in lines(tmp_path / "out" / f"{side}.jsonl")}
        for side in ("train", "heldout")
    ]
    assert len(sides[0]) + len(sides[1]) == 3
    assert not sides[0] & sides[1]
    export(tmp_path / "rows", "transitions", store, "--heldout", "0.5")
    for side, tasks in zip(("train", "heldout"), sides, strict=True):
        assert {
            row["task_key"] for row in pq.read_table(tmp_path / "rows" / f"{side}.parquet").to_pylist()
        } <= tasks


def test_verl_gets_parquet(store: str, tmp_path: Path) -> None:
    export(tmp_path / "out", "verl", store)
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["extra_info"]["task_key"][:5] for row in rows] == ["promp", "task:", "task:"]
    assert rows[1]["prompt"] == [{"role": "user", "content": "question of task-0"}]


def test_what_is_there_is_replaced_only_if_asked_and_only_an_export(store: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(out, "messages", store)
    before = (out / "train.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        export(out, "sharegpt", store)
    assert (out / "train.jsonl").read_bytes() == before
    export(out, "verl", store, "--force")
    assert sorted(path.name for path in out.iterdir()) == ["card.json", "card.md", "train.parquet"]
    (out / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds 'mine\.txt'"):
        export(out, "messages", store, "--force")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="was not written by"):
        export(other, "messages", store, "--force")
    assert (out / "mine.txt").read_text() == "precious"


def test_nothing_is_left_of_an_export_that_failed(store: str, tmp_path: Path) -> None:
    with pytest.raises(EmptyBatchError, match=r"reward below 2 \(4\); no reward \(1\)"):
        export(tmp_path / "out", "messages", store, "--min-reward", "2")
    with pytest.raises(StoreError, match="column rollout_id"):
        export(tmp_path / "out", "messages", store, "--sql", "SELECT 1 AS x")
    with pytest.raises(EmptyBatchError):
        export(tmp_path / "out", "messages", store, "--sql", "SELECT rollout_id FROM rollouts WHERE false")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("otlp", "--heldout", "0.1"),
        ("otlp", "--min-reward", "1"),
        ("messages", "--clone"),
        ("messages", "--tokenizer", "folder"),
        ("transitions", "--clone", "--keep-unknown-tools"),
        ("messages", "--heldout", "1.5"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    store: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    command = [
        sys.executable,
        "-m",
        "spangrad",
        "export",
        str(tmp_path / "out"),
        "--store",
        store,
        "--format",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


def test_a_copy_can_be_ingested_again(store: str, tmp_path: Path) -> None:
    for form, name in (("otlp", "otlp.jsonl"), ("otlp-proto", "otlp.pb")):
        card = export(tmp_path / form, form, store)
        with open_store(str(tmp_path / f"{form}.duckdb")) as again:
            report = ingest([tmp_path / form / name], again)
        assert (report.new_spans, report.calls) == (12, 8)
        assert card["splits"]["all"]["rows"] == 12 + report.logs
        assert card["secrets_found"] == {"api key": 1}
