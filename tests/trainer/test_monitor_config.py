"""The section [monitor]: what is refused, what is taken, and what the README says of it."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.test_config import MINIMAL, write

from spangrad.errors import ConfigError
from spangrad.trainer.config import load_config
from spangrad.trainer.monitoring.monitor_config import MONITOR_NAMES, OF_HISTORY, MonitorConfig
from spangrad.trainer.stages.recipe import is_recipe, load_recipe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_thresholds_and_actions_are_set_by_name(tmp_path):
    lines = ["monitor.gradient=6", "monitor.entropy=none", "monitor.actions.gradient=pause"]
    config = load_config(write(tmp_path, MINIMAL), lines).monitor
    assert (config.threshold("gradient"), config.threshold("entropy")) == (6.0, None)
    assert (config.action("gradient"), config.action("gap")) == ("pause", "warn")
    assert config.threshold("flattery") is None  # nobody judges
    assert MonitorConfig(judge="style").threshold("flattery") == 0.3


OFF: dict[str, Any] = dict.fromkeys(OF_HISTORY)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"continue_after": -1, "actions": {"gap": "pause"}}, "monitor.continue_after is -1, expected 0 or"),
        ({"actions": {"gradiend": "warn"}}, "monitor.actions names 'gradiend', expected one of spread, .*"),
        ({"actions": {"gap": "stop"}}, "monitor.actions is 'stop', expected one of warn, pause, rollback"),
        ({"actions": {"gap": "rollback"}, "max_rollbacks": 0}, "monitor.max_rollbacks is 0, expected 1 or"),
        ({"max_rollbacks": 3}, "monitor.max_rollbacks = 3 has no effect where no monitor rolls back"),
        (
            {"actions": {"gap": "pause"}, "gap": None},
            "monitor.actions.gap = 'pause' has no effect with monitor.gap none",
        ),
        (
            {"actions": {"flattery": "warn"}},
            "monitor.actions.flattery = 'warn' has no effect with monitor.judge",
        ),
        ({"flattery": 0.5}, "monitor.flattery = 0.5 has no effect with judge none; name the judge's reward"),
        ({"judge": "style", "flattery": None}, "monitor.judge = 'style' has no effect with flattery none"),
        ({"test_edits": None, "test_files": ("a",)}, "monitor.test_files = .* has no effect with test_edits"),
        ({"verifier": "v", "drift": None, "early_exits": None}, "monitor.verifier = 'v' has no effect with"),
        ({"continue_after": 3}, "monitor.continue_after = 3 has no effect where no monitor pauses or"),
        (
            {**OFF, "window": 32},
            "monitor.window = 32 has no effect with spread, entropy_rise, .*",
        ),
        (
            {**OFF, "min_history": 9},
            "monitor.min_history = 9 has no effect with spread, .*, early_exits",
        ),
    ],
)
def test_settings_out_of_range_or_without_effect_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MonitorConfig(**settings)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["monitor.verifier=reward"], "monitor.verifier is 'reward', which credit.reward_weights trains"),
        (
            ["learner.objective=bc", "monitor.gap=0.2"],
            "monitor.gap has no effect with learner.objective 'bc'",
        ),
        (["learner.objective=bc", "monitor.actions.clip=pause"], "monitor.clip has no effect with learner"),
        (["monitor.drift=2"], "monitor.drift has no effect with monitor.verifier none and eval.every 0"),
        (["monitor.gapp=2"], "unknown key 'gapp'; did you mean 'gap'"),
    ],
)
def test_monitors_of_what_a_run_does_not_have_are_refused(tmp_path, lines, says):
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, MINIMAL), lines)


def test_monitors_of_what_a_run_has_are_taken(tmp_path):
    file = write(tmp_path, MINIMAL)
    assert load_config(file, ["monitor.drift=2", "eval.every=3"]).monitor.drift == 2.0
    assert load_config(file, ["monitor.drift=2", "monitor.verifier=v"]).monitor.verifier == "v"
    assert load_config(file, ["learner.objective=bc", "monitor.gap=none"]).monitor.gap is None


def test_the_readme_has_every_monitor_in_order_with_its_default() -> None:
    page = (EXAMPLES.parent / "trainer" / "monitoring" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+)\. ", page, flags=re.MULTILINE)
    assert [(name, float(value)) for name, value in rows] == [
        (name, getattr(MonitorConfig(), name)) for name in MONITOR_NAMES
    ]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.toml")), ids=lambda file: file.parent.name)
def test_examples_take_the_defaults(file: Path) -> None:
    stages = load_recipe(file).stages if is_recipe(file) else ()
    configs = [stage.config for stage in stages] or [load_config(file, besides=("warm_start",))]
    assert all(config.monitor == MonitorConfig() for config in configs)
