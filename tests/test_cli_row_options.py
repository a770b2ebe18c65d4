"""Each option of `transitions`, `credit compare` and `export` changes what comes out, or is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from spangrad.adapters import ingest
from spangrad.cli import app
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, RewardAuthor, Rollout
from tests.adapters.captured import FIXTURES
from tests.command_line import recorded as recorded_text
from tests.test_cli_export import KEY, recorded
from tests.trainer.small_policy import make_tokenizer

CONFIG = """
[run]
id = "run"
[agent]
function = "a:run"
tasks = "a:tasks"
reward = "a:reward"
[rollout]
aggregation = "token-mean"
reward_authors = ["agent"]
[credit]
step = "leave_one_out_to_go"
reward_weights = {style = 2.0}
[learner]
objective = "awr"
"""


class Ground:
    """A store in which each option can make a difference, and what options name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = {
            name: str(folder / name) for name in ("store", "config", "tokenizer", "html", "nowhere")
        }
        self.found: dict[tuple[str, ...], Any] = {}
        (folder / "config").write_text(CONFIG)
        make_tokenizer().save_pretrained(self.names["tokenizer"])
        with FileStore(self.names["store"]) as opened:
            said = {
                "a0": "yes",
                "a1": "no",
                "a2": "no",
                "b0": f"use {KEY}",
                "b1": "yes",
                "b2": "no",
                "x0": "yes",
            }
            for number, (name, reply) in enumerate(said.items(), start=1):
                split, run = ("expert", "run") if name == "x0" else ("train", f"run-{name[0]}")
                opened.enqueue([Rollout(name, task_id=name[0], group_id=name[0], run_id=run, split=split)])
                (claimed,) = opened.claim(worker="w")
                model = "other" if name == "b2" else "policy"
                opened.put_otlp(recorded(name, number, reply, f"question {name[0]}", model))
                opened.finish(name, claimed.attempt)
                opened.put_rewards([Reward(name, float(number % 2)), Reward(name, number / 7, name="style")])
                of_agent = [Reward(name, float(number)), Reward(name, number / 3, name="style")]
                opened.put_rewards(of_agent, author=RewardAuthor.AGENT)
            for number, name in enumerate(("t0", "t1"), start=90):
                opened.enqueue([Rollout(name, task_id="t", group_id="t", run_id="run-t")])
                opened.claim(worker="w")
                opened.put_otlp(recorded_text(name, number, ids=False))
                opened.finish(name, 0)
                opened.put_rewards([Reward(name, float(number % 2))])
            ingest([FIXTURES / "openai_v2_legacy" / "multi_turn.otlp.jsonl"], opened)

    def come_out(self, arguments: Iterable[str]) -> Any:
        """What is printed and written, or the words of the refusal."""
        asked = tuple(arguments)
        if asked not in self.found:
            command = [argument.format(**self.names) for argument in asked]
            command += ["--store", self.names["store"]]
            out = self.folder / f"out{len(self.found)}"
            if command[0] == "export":
                command += [str(out)]
            done = CliRunner().invoke(app, command)
            files = sorted(out.iterdir()) if out.exists() else []
            self.found[asked] = (
                str(done.exception) if done.exit_code == 1 else None,
                done.stdout.replace(str(out), ""),
                done.stderr.replace(str(out), ""),
                [file.read_bytes() for file in files],
            )
            assert done.exit_code in (0, 1), done.output
        return self.found[asked]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("options"))


ROWS, CLONED = ("transitions", "--json"), ("transitions", "--json", "--clone")
RENDERED = (*CLONED, "--split", "recorded", "--tokenizer", "{tokenizer}")
TEXTS = (*CLONED, "--rollout", "t0", "--tokenizer", "{tokenizer}")
COMPARED = ("credit", "compare", "-e", "grpo,gigpo")
ROWS_OUT, CLONED_OUT = ("export", "-f", "transitions"), ("export", "-f", "transitions", "--clone")
CHATS, PAIRS, TASKS, COPY = (("export", "-f", form) for form in ("messages", "trl-dpo", "trl-grpo", "otlp"))
OUT = (ROWS_OUT, CLONED_OUT, CHATS, PAIRS, TASKS)
ANY_OF_ROLLOUTS = (ROWS, CLONED, COMPARED, *OUT, COPY)
CHANGES: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "--rollout": (ANY_OF_ROLLOUTS, ("a0",)),
    "--run": (ANY_OF_ROLLOUTS, ("run-a",)),
    "--split": ((ROWS, CLONED, COMPARED), ("recorded",)),
    "--sql": ((COMPARED, *OUT, COPY), ("SELECT rollout_id FROM rollouts WHERE rollout_id LIKE 'a%'",)),
    "--config": ((ROWS, COMPARED, *OUT), ("{config}",)),
    "--author": ((ROWS, COMPARED, *OUT), ("agent",)),
    "--reward": ((ROWS, COMPARED, *OUT), ("style",)),
    "--min-grade": ((ROWS, TEXTS, *OUT), ("exact",)),
    "--clone": ((ROWS, ROWS_OUT), ()),
    "--tokenizer": ((ROWS, CLONED, ROWS_OUT, CLONED_OUT), ("{tokenizer}",)),
    "--keep-unknown-tools": ((RENDERED, (*CLONED_OUT, "--tokenizer", "{tokenizer}")), ()),
    "--json": ((("transitions",), COMPARED, *OUT, COPY), ()),
    "--estimators": ((("credit", "compare"),), ("rloo",)),
    "--limit": ((COMPARED,), ("1",)),
    "--html": ((COMPARED,), ("{html}",)),
    "--min-reward": (OUT, ("1",)),
    "--policy": (OUT, ("policy",)),
    "--per-task": (OUT, ("1",)),
    "--keep-repeats": ((CHATS,), ()),
    "--heldout": (OUT, ("0.5",)),
    "--licence": ((*OUT, COPY), ("CC0",)),
    "--keep-secrets": ((*OUT[:3], PAIRS), ()),
}
"""Option -> commands whose outcome it changes, and its value."""
REFUSED: dict[str, tuple[tuple[tuple[tuple[str, ...], str], ...], tuple[str, ...]]] = {
    "--config": (((CLONED, "no effect with --clone"), (COPY, "copies what came in")), ("{config}",)),
    "--author": (((CLONED, "no effect with --clone"), (COPY, "copies what came in")), ("agent",)),
    "--reward": (((CLONED, "no effect with --clone"), (COPY, "copies what came in")), ("style",)),
    "--checkpoint": (
        (
            (ROWS, "needs --config"),
            (CLONED, "no effect with --clone"),
            (COMPARED, "needs --config"),
            ((*ROWS, "--config", "{config}"), "has no effect: no estimator here asks a critic"),
        ),
        ("{nowhere}",),
    ),
    "--clone": (tuple((form, "is for transitions only") for form in (CHATS, PAIRS, TASKS, COPY)), ()),
    "--tokenizer": (
        tuple((form, "is for transitions only") for form in (CHATS, PAIRS, TASKS, COPY)),
        ("{tokenizer}",),
    ),
    "--keep-unknown-tools": (
        tuple((form, "is about calls that are rendered") for form in (ROWS, CLONED, *OUT)),
        (),
    ),
    "--limit": ((((*COMPARED, "--json"), "--json has everything"),), ("1",)),
    "--min-grade": (((COPY, "copies what came in"),), ("exact",)),
    "--min-reward": (((COPY, "copies what came in"),), ("0",)),
    "--policy": (((COPY, "copies what came in"),), ("policy",)),
    "--per-task": (((COPY, "copies what came in"),), ("1",)),
    "--heldout": (((COPY, "copies what came in"),), ("0.5",)),
    "--keep-secrets": (((COPY, "copies what came in"),), ()),
    "--keep-repeats": (
        (
            *((form, "keeps them anyway") for form in (ROWS_OUT, CLONED_OUT, TASKS)),
            (COPY, "copies what came in"),
        ),
        (),
    ),
}
"""Option -> commands that refuse it, and what is said."""
ELSEWHERE = {"--store", "--key", "--force", "--help", "--format", "--workers"}
"""Where it is, who may read it, what may be overwritten, how many read it: in the tests of each command."""


def test_every_option_is_walked() -> None:
    group: Any = typer.main.get_command(app)
    commands = (group.commands[name] for name in ("transitions", "export"))
    options = {
        option
        for command in (*commands, group.commands["credit"].commands["compare"])
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    assert options - ELSEWHERE == CHANGES.keys() | REFUSED.keys()


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, name) for name, (commands, _) in CHANGES.items() for command in commands],
)
def test_an_option_changes_what_comes_out(ground: Ground, command: tuple[str, ...], option: str) -> None:
    before = ground.come_out(command)
    after = ground.come_out((*command, option, *CHANGES[option][1]))
    assert before[0] is None and after != before
    assert after[0] is None or after[0].startswith(("nothing can be", "there is nothing to"))


@pytest.mark.parametrize(
    ("command", "option", "says"),
    [(command, name, says) for name, (commands, _) in REFUSED.items() for command, says in commands],
)
def test_an_option_that_does_nothing_is_refused(
    ground: Ground, command: tuple[str, ...], option: str, says: str
) -> None:
    refusal, shown, _, files = ground.come_out((*command, option, *REFUSED[option][1]))
    assert refusal is not None and says in refusal and option in refusal
    assert (shown, files) == ("", [])
