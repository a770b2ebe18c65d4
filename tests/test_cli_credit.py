"""`spangrad credit compare` on a stored batch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spangrad.adapters import account_unread
from spangrad.cli import app
from spangrad.commands import crediting, exporting, training_rows
from spangrad.commands.crediting import compare
from spangrad.commands.options import DEFAULT_STORE
from spangrad.errors import ConfigError
from spangrad.store import open_store
from spangrad.store.records import Reward, Rollout
from spangrad.trainer.config import load_config
from tests.command_line import listed, recorded

README = Path(__file__).resolve().parents[1] / "credit" / "README.md"
EVIL = "<img src=x onerror=alert(1)>"
REWARDS: dict[str, tuple[float | None, ...]] = {
    "mixed": (1.0, 0.0, 0.0, 1.0),
    "equal": (0.0, 0.0),
    EVIL: (1.0, None),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three groups; rollouts have one call, every other one a second."""
    path = str(tmp_path_factory.mktemp("store") / "store.duckdb")
    opened = open_store(path)
    rewards = {f"{group}-{n}": reward for group, given in REWARDS.items() for n, reward in enumerate(given)}
    opened.enqueue([Rollout(name, group_id=name.rsplit("-", 1)[0], run_id="run-a") for name in rewards])
    number = 0
    for rollout in opened.claim(worker="w", limit=20):
        for _ in range(2 if rollout.rollout_id.endswith(("0", "2")) else 1):
            number += 1
            opened.put_otlp(recorded(rollout.rollout_id, number))
        opened.finish(rollout.rollout_id, rollout.attempt)
    opened.put_rewards([Reward(name, reward) for name, reward in rewards.items() if reward is not None])
    account_unread(opened)
    opened.close()
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["credit", "compare", *arguments])


def test_as_json_has_everything(store: str) -> None:
    (found,) = listed("credit", "compare", "--store", store, "-e", "grpo,rloo,grpo+gigpo", "--json")
    assert [one["name"] for one in found["estimators"]] == ["grpo", "rloo", "grpo+gigpo"]
    assert [one["informative_groups"] for one in found["estimators"]] == [1, 1, 1]
    assert found["rank_correlation"]["grpo"]["rloo"] == pytest.approx(1.0)
    wasted = {one["group"]: set(one["wasted"].values()) for one in found["groups"]}
    assert wasted["mixed"] == set()
    assert wasted["equal"] == {"all returns are equal"}
    assert wasted[EVIL] == {"one rollout has a reward: nothing to compare it with"}
    # 4 + 2 rollouts and the scored one of the third group, three of them and that one with a second call
    assert len(found["steps"]) == 11
    by_call = {step["call_id"]: step["advantages"]["rloo"] for step in found["steps"]}
    assert sorted(by_call.values())[:3] == pytest.approx([-2 / 3] * 3)


def test_the_first_example_of_credits_readme_runs_as_pasted(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".spangrad").mkdir()
    shutil.copy(store, tmp_path / DEFAULT_STORE)
    monkeypatch.chdir(tmp_path)
    exec(README.read_text().split("```python\n")[1].split("```")[0], {})
    first, *refused = capsys.readouterr().out.splitlines()
    assert first == f"11 {1 / 3}"
    assert len(refused) == 1 and refused[0].startswith(f"{EVIL}-1 ")


def test_tables_name_the_estimators_and_what_is_wasted(store: str) -> None:
    done = run("--store", store, "--limit", "1")
    assert done.exit_code == 0, done.output
    assert "leave_one_out_to_go\t33% (1/3)\t" in done.stdout
    assert "Wasted groups (2 of 3)" in done.stdout
    assert "equal\t2\t0 2x\tall returns are equal\tall" in done.stdout
    assert "1 of 11 steps" in done.stderr


def test_on_a_terminal_estimators_are_headed_as_they_are_typed(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    compare(store=store, estimators="grpo,leave_one_out_to_go")
    shown = capsys.readouterr().out
    assert "effective steps" in shown
    # two rows and two headings
    assert shown.count("leave_one_out_to_go") == 4


def test_the_page_is_whole_and_trusts_no_trace(store: str, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "credit.html"
    done = run("--store", store, "--html", str(page))
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "<img" not in text and "&lt;img src=x" in text
    assert "<script" not in text and "default-src 'none'" in text and "http" not in text.split("<body>")[1]
    assert [path.name for path in page.parent.iterdir()] == ["credit.html"]


def test_a_place_where_no_page_can_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for place, message in (
        (".", "'.' is a folder; name a file"),
        ("file/a/b.html", "is no folder that takes"),
    ):
        done = run("--store", "nowhere.duckdb", "--html", place)
        assert done.exit_code == 1
        with pytest.raises(ConfigError, match=message):
            raise done.exception
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_estimator_is_told_where_its_scores_come_from(store: str, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def f(task, calls): return range(len(calls) + 1)\n")
    spelling = f"turn_credit:scores={tmp_path}/score.py:f:gamma=0.5"
    (found,) = listed(
        "credit", "compare", "--store", store, "-e", f"turn_credit:scores=reward:p,{spelling}", "--json"
    )
    by_reward, by_function = found["estimators"]
    assert by_reward["name"] == "turn_credit:scores=reward:p"
    assert (by_function["settings"]["scores"], by_function["settings"]["gamma"]) == (
        f"{tmp_path}/score.py:f",
        0.5,
    )
    # Nobody gave a reward p; the function's scores rise by 1 in every step of all eight rollouts.
    assert (by_reward["nonzero_share"], by_function["nonzero_share"]) == (0.0, 1.0)
    done = run("--store", store, "-e", "turn_credit")
    with pytest.raises(
        ConfigError, match=r"needs scores; set them to a function, 'file.py:name', or to 'rew"
    ):
        raise done.exception


@pytest.mark.parametrize("objective", ["dpo", "kto", "bc"])
def test_a_config_that_needs_no_advantages_says_so_and_adds_none(
    store: str, tmp_path: Path, objective: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nid = "x"\n[agent]\nfunction = "a.py:f"\ntasks = "a.py:t"\nreward = "a.py:r"\n'
        f'[learner]\nobjective = "{objective}"\n'
    )
    done = run("--store", store, "-e", "rloo", "--config", str(config), "--json")
    assert done.exit_code == 0, done.output
    assert f"objective '{objective}'" in done.stderr and "needs no advantages" in done.stderr
    assert [one["name"] for one in json.loads(done.stdout)["estimators"]] == ["rloo"]


def test_a_config_brings_its_estimator_and_settings(store: str, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nid = "x"\n[agent]\nfunction = "a.py:f"\ntasks = "a.py:t"\nreward = "a.py:r"\n'
        '[credit]\nepisode = "rloo"\nstep = "gigpo"\ngamma = 0.5\n'
    )
    estimators = ("-e", "grpo,leave_one_out_to_go", "--config", str(config))
    (found,) = listed("credit", "compare", "--store", store, *estimators, "--json")
    names = [one["name"] for one in found["estimators"]]
    assert names == ["rloo+gigpo:gamma=0.5", "grpo", "leave_one_out_to_go:gamma=0.5"]


@pytest.mark.parametrize(
    ("option", "weights"), [((), {"tests": 0.5}), (("--reward", "reward"), {"reward": 1.0})]
)
def test_a_reward_that_is_asked_for_counts_also_where_it_is_the_usual_one(
    tmp_path: Path, option: tuple[str, ...], weights: dict[str, float]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nid = "x"\n[agent]\nfunction = "a.py:f"\ntasks = "a.py:t"\nreward = "a.py:r"\n'
        "[credit]\nreward_weights = {tests = 0.5}\n"
    )
    reward = option[-1] if option else None
    found, _, _ = crediting._configs("grpo,rloo", config, reward)
    assert [one.reward_weights for one in found.values()] == [weights] * 2
    assert training_rows._settings(config, clone=False, reward=reward)["reward_weights"] == weights
    settings = load_config(config)
    credit = exporting._credit(
        settings, None, reward, None, clone=False, renders=False, keep_unknown_tools=False
    )
    assert credit.weights == weights


def test_an_estimator_that_is_named_twice_is_compared_once_and_said(store: str) -> None:
    done = run("--store", store, "-e", "grpo,gigpo:gamma=0.50,rloo,gigpo:gamma=0.5")
    assert "--estimators has 'gigpo:gamma=0.5' twice; it is compared once" in done.stderr


def test_filters_choose_whole_groups(store: str) -> None:
    (found,) = listed("credit", "compare", "--store", store, "--rollout", "mixed-0", "--json")
    assert [(one["group"], one["rollouts"]) for one in found["groups"]] == [("mixed", 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-e", "grop"), "there is no estimator 'grop'; known are .*did you mean 'grpo'"),
        (("-e", ","), "--estimators names none"),
        (("--reward", "style"), "none of 8 rollouts has a reward 'style'"),
        (("--author", "agent"), "none of 8 rollouts has a reward 'reward' of an author that counts"),
        (("--sql", "SELECT 'x' AS rollout_id"), "no rollout that succeeded fits"),
        (("--run", "run-b"), "there is no rollout of run 'run-b'"),
    ],
)
def test_what_can_not_be_compared_is_one_line(store: str, arguments: tuple[str, ...], message: str) -> None:
    done = run("--store", store, *arguments)
    assert done.exit_code == 1
    with pytest.raises(type(done.exception), match=message):
        raise done.exception
