"""Every setting of a run changes what it is for: each is changed alone, and what it is for is looked at.

A setting that nobody walks fails `test_every_setting_is_walked`; give it an entry in `WALKS`. Elsewhere
are `[credit]` (`tests/credit/test_assign.py`), `[learner]` (`test_objectives.py` and what it names),
`[monitor]`, `[curriculum]` and `[production]` (`test_every_section.py`), `[cluster]`
(`test_cluster_config.py`, `tests/loop/test_two_nodes.py`), `[stored]` and `[stop]` (`stages/`).
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.store.hub_process import HubProcess
from tests.trainer.json_server import Replying, serving
from tests.trainer.played_run import (
    OFF_BY,
    Played,
    PlayedServer,
    play,
    play_evaluation,
    played_server,
)
from tests.trainer.small_policy import make_model, make_policy

from spangrad.store.keys import Keys
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.evaluation import Evaluation
from spangrad.trainer.promotion.rule import Comparison, Verdict
from spangrad.trainer.rollouts.feeder import STRAGGLER

ELSEWHERE = {"credit", "learner", "curriculum", "monitor", "cluster", "stop"}
AGENT = """
import os, threading, time
def run(task): return _seen(task, "run")
def other(task): return _seen(task, "other")
def reward(task, output): return 1.0
def half(task, output): return 0.5
running, most, lock = 0, 0, threading.Lock()
def _seen(task, who):
    global running, most
    with lock:
        running += 1
        most = max(most, running)
    if task["file"] == "failing":
        raise ValueError("not today")
    deadline = time.monotonic() + 1.0
    while (task["file"] == "slow" or most < 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    with lock:
        running -= 1
    names = ("OPENAI_MODEL", "OPENAI_BASE_URL", "EXTRA")
    seen = {"who": who, "most": most, "temperature": task["temperature"]}
    return {**seen, **{name: os.environ.get(name) for name in names}}
"""
"""Says what it was given; `most` is how many of its rollouts were running at the same time."""
FILES = ("tasks", "others", "failing", "slow")


@dataclass
class Ground:
    """What the configs of a test name, by the words that `WALKS` has for it."""

    folder: Path
    names: dict[str, str]
    servers: dict[str, PlayedServer]
    hub: HubProcess
    runs: int = 0
    found: dict[str, Any] = field(default_factory=dict)
    """What equal configs led to."""

    def config(self, lines: list[str]) -> TrainConfig:
        """A run of its own, in a folder of its own; the last line of a name wins."""
        self.runs += 1
        folder = self.folder / f"run{self.runs}"
        folder.mkdir()
        tasks = [
            {"task_id": f"{split}{k}", "split": split, "rewards": [1.0, 0.0, 0.5]}
            for split in ("train", "eval")
            for k in range(9)
        ]
        for name in FILES:
            lines_ = [json.dumps({**one, "file": name}) for one in tasks]
            (folder / f"{name}.jsonl").write_text("\n".join(lines_))
        (folder / "agent.py").write_text(AGENT)
        file = folder / "run.toml"
        file.write_text(START.format_map(self.names))
        return load_config(file, [line.format_map(self.names) for line in lines])


START = """
[run]
id = "r"
updates = 1
[hub]
url = "store.duckdb"
[serving]
engine_url = "{engine}"
gateway_url = "{gateway}"
model = "{model}"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "agent.py:reward"
[rollout]
groups_per_update = 2
group_size = 2
max_staleness = 0
[learner]
threads = 1
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path_factory.mktemp("hub") / "store.duckdb")
    yield hub
    hub.terminate()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, hub: HubProcess) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("ground")
    make_policy(folder / "one")
    make_policy(folder / "two")
    make_model(seed=1).save_pretrained(folder / "two")
    Keys("a" * 32, "e" * 32, "t" * 32).save(folder / "keys.json")
    files = {"model": "one", "other_model": "two", "keys": "keys.json"}
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).chdir(folder)
        names = ("engine", "other_engine", "gateway", "other_gateway")
        servers = {name: stack.enter_context(played_server()) for name in names}
        known = {name: server.url for name, server in servers.items()}
        known |= {name: str(folder / file) for name, file in files.items()}
        known["agent"] = stack.enter_context(agent_server())
        yield Ground(folder, known, servers, hub)


@contextmanager
def agent_server() -> Iterator[str]:
    """A server that is an agent: says what it was asked for."""

    class Handler(Replying):
        def do_POST(self) -> None:
            self.content()
            self.reply(json.dumps({"path": self.path, "mine": self.headers.get("x-mine")}).encode())

    with serving(Handler) as url:
        yield url


def of_own_store(config: TrainConfig) -> TrainConfig:
    return replace(config, hub=replace(config.hub, url=str(Path(config.base_dir, config.hub.url))))


def trained(ground: Ground, config: TrainConfig, **how: Any) -> Played:
    """A whole run with played agents."""
    return _played(ground, of_own_store(config), **how)


def worked(ground: Ground, config: TrainConfig, *, is_down: bool = False) -> Played:
    """A run up to its first rollouts, with a hub and the agent in processes of their own."""
    run_id = f"{ground.folder.name}-{ground.runs}"
    config = replace(config, run=replace(config.run, id=run_id), hub=replace(config.hub, url=ground.hub.url))
    return _played(ground, config, are_agents_real=True, is_down=is_down)


def _played(
    ground: Ground, config: TrainConfig, *, is_down: bool = False, slow_s: float = 0.0, **how: Any
) -> Played:
    for name, server in ground.servers.items():
        server.asked, server.keys, server.version = [], set(), "none"
        server.is_down, server.slow_s = is_down and "gateway" in name, slow_s
    seen = play(config, **how)
    seen.asked = {name: server.asked for name, server in ground.servers.items()}
    seen.keys = {name: server.keys for name, server in ground.servers.items()}
    return seen


def verdict(ground: Ground, config: TrainConfig) -> Verdict:
    """Of a candidate that solved six tasks of twenty, of which the promoted version solved none."""
    return Comparison(20, gained=6, lost=0, success=0.3, promoted_success=0.0).verdict(config.promotion)


def evaluated(ground: Ground, config: TrainConfig) -> Evaluation:
    """What a demo measures before and after."""
    return play_evaluation(of_own_store(config))


@dataclass(frozen=True)
class Walk:
    """One setting with two values, as `--set` takes them, and what they lead to."""

    before: str
    after: str
    look: Callable[[Any], Any]
    """At what `how` gives."""
    seen: tuple[Any, Any] | None = None
    """None: numbers that nobody knows by heart; they differ."""
    beside: tuple[str, ...] = ()
    """Lines that hold with both values."""
    how: Callable[..., Any] = trained


def error(seen: Played) -> str | None:
    """The words that matter of why the run ended early."""
    known = (
        "serves other weights",
        "got no answer",
        "nothing to learn",
        "not answered for 0 s",
        "not answered for 1 s",
    )
    return next((one for one in known if one in (seen.error or "")), seen.error)


def output(name: str) -> Callable[[Played], Any]:
    """What the agent of the first rollout was given."""
    return lambda seen: seen.rollouts[0].output[name]


def told(name: str) -> Callable[[Played], Any]:
    """A number of the first update."""
    return lambda seen: seen.metric(name)


def asked(path: str) -> Callable[[Played], Any]:
    """Who was asked for this."""
    return lambda seen: [name for name, paths in seen.asked.items() if path in paths]


def evaluations(seen: Played) -> list[tuple[int, float]]:
    """How many tasks each evaluation in between had, and its success."""
    assert seen.report is not None, seen.error
    return [(one.n, one.success) for one in seen.report.evaluations]


def status(seen: Played) -> Any:
    one = seen.rollouts[0]
    return (one.error_type, one.attempt)


ONE_GROUP = ("rollout.groups_per_update=1",)
DPO = (*ONE_GROUP, "learner.objective=dpo")
BC = (*ONE_GROUP, "learner.objective=bc")
THREE = ("rollout.group_size=3",)
trained_tokens = told("data/trained_tokens")
EVERY = ("promotion.every=1",)
JUDGED = (*EVERY, "promotion.tasks=5")
AT_ONCE = ["promoted", "rolled_back", "restored"]
worse = partial(trained, gets_worse=True)


def decisions(seen: Played) -> list[str]:
    """What became of the versions."""
    return [str(one.decision) for one in seen.decisions]


def temperature(seen: Played) -> float:
    """Of the first rollout by which a candidate was judged."""
    return float(seen.of_split("eval-promotion")[0].output["temperature"])


def candidates(seen: Played) -> int:
    """Rollouts by which candidates were judged."""
    return len(seen.of_split("eval-promotion"))


WALKS: dict[str, Walk] = {
    "run.id": Walk(
        "r", "s", lambda seen: seen.rollouts[0].rollout_id, ("r-u00000-g000-m00", "s-u00000-g000-m00")
    ),
    "run.folder": Walk(
        "a",
        "b",
        lambda seen: [file.parts[-3] for file in Path(seen.config.base_dir).glob("*/r/config.json")],
        (["a"], ["b"]),
    ),
    "run.updates": Walk("1", "2", lambda seen: len(seen.updates), (1, 2)),
    "run.seed": Walk("0", "1", lambda seen: seen.tasks("train")),
    "run.keep_checkpoints": Walk(
        "2", "1", lambda seen: len([*seen.config.folder.glob("checkpoints/*")]), (2, 1), ("run.updates=2",)
    ),
    "hub.url": Walk(
        "a.duckdb",
        "b.duckdb",
        lambda seen: [file.name for file in Path(seen.config.base_dir).glob("*.duckdb")],
        (["a.duckdb"], ["b.duckdb"]),
    ),
    "hub.keys": Walk("none", "{keys}", lambda seen: seen.keys["gateway"], ({None}, {f"Bearer {'t' * 32}"})),
    "serving.engine_url": Walk(
        "{engine}", "{other_engine}", asked("/update_weights"), (["engine"], ["other_engine"])
    ),
    "serving.engine_urls": Walk(
        '["{engine}"]',
        '["{engine}", "{other_engine}"]',
        asked("/update_weights"),
        (["engine"], ["engine", "other_engine"]),
        ("serving.engine_url=http://127.0.0.1:8000",),
    ),
    "serving.transfer": Walk(
        "file",
        "lora",
        asked("/v1/load_lora_adapter"),
        ([], ["engine"]),
        ("learner.lora_rank=4",),
    ),
    "serving.pause_mode": Walk("keep", "wait", asked("/pause?mode=wait"), ([], ["engine"])),
    "serving.publish_timeout_s": Walk(
        "60", "0.1", error, (None, "got no answer"), how=partial(trained, slow_s=0.5)
    ),
    "serving.gateway_url": Walk(
        "{gateway}",
        "{other_gateway}",
        lambda seen: [name for name in seen.asked if "gateway" in name and seen.asked[name]],
        (["gateway"], ["other_gateway"]),
    ),
    "serving.model": Walk(
        "{model}", "{other_model}", lambda seen: Path(seen.policies[0].path).name, ("one", "two")
    ),
    "serving.served_name": Walk("policy", "mine", output("OPENAI_MODEL"), ("policy", "mine"), how=worked),
    "serving.publish_tolerance": Walk(
        str(2 * OFF_BY), str(OFF_BY / 2), error, (None, "serves other weights")
    ),
    "serving.engine_wait_s": Walk(
        "0", "1", error, ("not answered for 0 s", "not answered for 1 s"), how=partial(worked, is_down=True)
    ),
    "agent.function": Walk("agent.py:run", "agent.py:other", output("who"), ("run", "other"), how=worked),
    "agent.command": Walk(
        '["echo", "one"]',
        '["echo", "two"]',
        lambda seen: seen.rollouts[0].output,
        ("one", "two"),
        ('agent.function=""',),
        worked,
    ),
    "agent.url": Walk(
        "{agent}/one",
        "{agent}/two",
        lambda seen: seen.rollouts[0].output["path"],
        ("/one", "/two"),
        ('agent.function=""',),
        worked,
    ),
    "agent.headers": Walk(
        "{{}}",
        '{{x-mine = "yes"}}',
        lambda seen: seen.rollouts[0].output["mine"],
        (None, "yes"),
        ('agent.function=""', "agent.url={agent}"),
        worked,
    ),
    "agent.tasks": Walk(
        "tasks.jsonl", "others.jsonl", lambda seen: seen.rollouts[0].task["file"], ("tasks", "others")
    ),
    "agent.reward": Walk(
        "agent.py:reward",
        "agent.py:half",
        lambda seen: {one.value for one in seen.rewards},
        ({1.0}, {0.5}),
        how=worked,
    ),
    "agent.concurrency": Walk("1", "2", output("most"), (1, 2), ONE_GROUP, worked),
    "agent.workers": Walk("1", "2", lambda seen: seen.workers[0], (1, 2)),
    "agent.timeout_s": Walk(
        "60",
        "0.2",
        status,
        ((None, 0), ("TimeoutError", 0)),
        (*ONE_GROUP, "agent.tasks=slow.jsonl", "agent.max_attempts=1"),
        worked,
    ),
    "agent.max_attempts": Walk(
        "1",
        "2",
        status,
        (("ValueError", 0), ("ValueError", 1)),
        (*ONE_GROUP, "agent.tasks=failing.jsonl"),
        worked,
    ),
    "agent.env": Walk("{{}}", '{{EXTRA = "x"}}', output("EXTRA"), (None, "x"), how=worked),
    "rollout.groups_per_update": Walk("2", "3", lambda seen: len(set(seen.tasks("train"))), (2, 3)),
    "rollout.group_size": Walk("2", "3", lambda seen: len(seen.tasks("train")), (2, 3), ONE_GROUP),
    "rollout.temperature": Walk("1.0", "0.5", output("temperature"), (1.0, 0.5), how=worked),
    "rollout.max_staleness": Walk(
        "0",
        "1",
        lambda seen: seen.updates[1].metrics["data/staleness_max"],
        (0, 1),
        ("run.updates=2",),
    ),
    "rollout.straggler_s": Walk(
        "0.1",
        "0.3",
        lambda seen: [
            re.findall(r"waited [0-9.]+ s", one.error)[0]
            for one in seen.rollouts
            if one.error_type == STRAGGLER
        ],
        (["waited 0.1 s"], ["waited 0.3 s"]),
        THREE,
        partial(trained, is_late=True),
    ),
    "rollout.aggregation": Walk("token-mean", "rollout-token-mean", told("loss/total")),
    "rollout.aggregation_tokens": Walk(
        "100", "200", told("loss/total"), beside=("rollout.aggregation=constant",)
    ),
    "rollout.informative_groups": Walk("1", "2", lambda seen: len(seen.tasks("train")), (2, 4), ONE_GROUP),
    "rollout.refills": Walk("0", "1", error, ("nothing to learn", None), how=partial(trained, dull=4)),
    "rollout.reward_authors": Walk('["evaluator"]', '["agent"]', error, (None, "nothing to learn")),
    "preference.level": Walk("rollout", "step", trained_tokens, (10, 4), DPO),
    "preference.min_gap": Walk("0", "0.6", told("credit/preference_pairs"), (3, 1), (*DPO, *THREE)),
    "preference.pairs_per_group": Walk("0", "1", told("credit/preference_pairs"), (3, 1), (*DPO, *THREE)),
    "preference.good_at": Walk("1", "0.5", trained_tokens, (4, 12), (*BC, *THREE)),
    "preference.target": Walk("actions", "observations", trained_tokens, (4, 1), BC),
    "preference.per_group": Walk("0", "1", trained_tokens, (18, 4), (*BC, *THREE, "preference.good_at=0")),
    "promotion.every": Walk("1", "2", candidates, (15, 10), ("run.updates=2", "promotion.tasks=5")),
    "promotion.tasks": Walk("5", "6", candidates, (10, 12), EVERY),
    "promotion.temperature": Walk("0", "0.5", temperature, (0.0, 0.5), JUDGED, worked),
    "promotion.margin": Walk(
        "0", "0.35", str, ("better", "undecided"), (*EVERY, "promotion.tasks=20"), verdict
    ),
    "promotion.confidence": Walk("0.98", "0.99", str, ("better", "undecided"), EVERY, verdict),
    "promotion.rollback_after": Walk("1", "2", decisions, (AT_ONCE, ["promoted", "kept"]), JUDGED, worse),
    "promotion.rollback_drop": Walk("none", "0.5", decisions, (["promoted", "kept"], AT_ONCE), JUDGED, worse),
    "promotion.engine_url": Walk(
        "none", "{other_engine}", asked("/update_weights"), (["engine"], ["engine", "other_engine"]), JUDGED
    ),
    "eval.every": Walk("0", "1", evaluations, ([], [(9, 1.0)])),
    "eval.tasks": Walk("2", "3", lambda seen: seen.n, (2, 3), how=evaluated),
    "eval.tasks_between": Walk("2", "3", evaluations, ([(2, 1.0)], [(3, 1.0)]), ("eval.every=1",)),
    "eval.success_at": Walk("1", "2", evaluations, ([(9, 1.0)], [(9, 0.0)]), ("eval.every=1",)),
    "eval.seed": Walk(
        "1", "2", lambda seen: seen.tasks("eval"), beside=("eval.every=1", "eval.tasks_between=2")
    ),
}


def test_every_setting_is_walked() -> None:
    sections = {name: kind for name, kind in get_type_hints(TrainConfig).items() if is_dataclass(kind)}
    assert set(sections) > ELSEWHERE
    assert set(WALKS) == {
        f"{section}.{one.name}"
        for section, kind in sections.items()
        if section not in ELSEWHERE
        for one in fields(kind)
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if w.how is not trained else []) for n, w in WALKS.items()],
)
def test_a_setting_changes_what_it_is_for(name: str, ground: Ground) -> None:
    walk = WALKS[name]

    def seen_with(value: str) -> Any:
        config = ground.config([*walk.beside, f"{name}={value}"])
        key = f"{walk.how} {replace(config, base_dir='')}"
        if key not in ground.found:
            ground.found[key] = walk.how(ground, config)
        return walk.look(ground.found[key])

    before, after = seen_with(walk.before), seen_with(walk.after)
    assert before != after
    if walk.seen is not None:
        assert (before, after) == walk.seen
