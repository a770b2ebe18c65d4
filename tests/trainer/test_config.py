import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast, get_type_hints

import pytest

from spangrad.credit.credit_config import CreditConfig
from spangrad.errors import ConfigError
from spangrad.trainer.cluster_config import ClusterConfig
from spangrad.trainer.config import (
    STRAGGLER_S,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    load_config,
)
from spangrad.trainer.evaluation import check_only_between
from spangrad.trainer.learning.corrections import CorrectionConfig
from spangrad.trainer.learning.learner_config import CriticConfig, LearnerConfig
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.monitoring.monitor_config import MonitorConfig
from spangrad.trainer.policies.warm_start import WarmStartConfig
from spangrad.trainer.preference_config import PreferenceConfig
from spangrad.trainer.promotion.rule import PromotionConfig
from spangrad.trainer.rollouts.agent_config import AgentConfig
from spangrad.trainer.serving.serving_config import ServingConfig
from spangrad.trainer.stages.stop_config import StopConfig

MINIMAL = """
[run]
id = "r"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "reward.py:reward"
"""


def write(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def test_a_minimal_file_gets_defaults_and_its_own_folder(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert config.rollout.group_size == 8
    assert config.base_dir == str(tmp_path)
    assert config.folder == tmp_path / ".spangrad" / "runs" / "r"


def test_an_unknown_key_names_the_nearest_one(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'groupsize'; did you mean 'group_size'\?"):
        load_config(write(tmp_path, MINIMAL + "[rollout]\ngroupsize = 4\n"))


def test_engines_are_named_one_way_and_once(tmp_path):
    assert ServingConfig().engines == ("http://127.0.0.1:8000",)
    text = MINIMAL + '[serving]\nengine_urls = ["http://a:1", "http://b:1"]\npause_mode = "wait"\n'
    assert load_config(write(tmp_path, text)).serving.engines == ("http://a:1", "http://b:1")
    with pytest.raises(ConfigError, match=r"engine_url is 'http://c:1' beside serving\.engine_urls"):
        load_config(write(tmp_path, text + 'engine_url = "http://c:1"\n'))
    with pytest.raises(ConfigError, match=r"engine_urls .*expected each address once"):
        ServingConfig(engine_urls=("http://a:1", "http://a:1"))
    with pytest.raises(ConfigError, match=r"serving\.pause_mode is 'never'"):
        ServingConfig(pause_mode=cast(Any, "never"))


def test_adapters_are_published_only_where_one_is_trained_and_pause_nothing(tmp_path):
    file = write(tmp_path, MINIMAL + '[serving]\ntransfer = "lora"\n')
    with pytest.raises(ConfigError, match=r"transfer is 'lora', but no adapter is trained; set learner"):
        load_config(file)
    assert load_config(file, ["learner.lora_rank=8"]).serving.transfer == "lora"
    with pytest.raises(ConfigError, match=r"pause_mode = 'wait' has no effect with .* 'lora'"):
        load_config(file, ["learner.lora_rank=8", "serving.pause_mode=wait"])


SECTIONS = (
    "known are run, agent, hub, serving, rollout, curriculum, credit, preference, learner, eval,"
    " promotion, monitor, cluster, production, stored, stop"
)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[leaner]\nlr = 1e-4\n", "unknown section 'leaner'; did you mean 'learner'?"),
        ("[zzz]\nlr = 1e-4\n", f"unknown section 'zzz'; {SECTIONS}"),
        ('[base_dir]\nx = "/tmp"\n', f"unknown section 'base_dir'; {SECTIONS}"),
    ],
)
def test_an_unknown_section_names_the_nearest_one_or_all(tmp_path, more, says):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL + more))
    assert str(caught.value) == f"{tmp_path / 'run.toml'}: {says}"


@pytest.mark.parametrize("line", ["updates = 3", 'base_dir = "/tmp"'])
def test_a_key_in_no_section_is_called_that(tmp_path, line):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"{line}\n{MINIMAL}"))
    name = line.split()[0]
    assert str(caught.value) == f"{tmp_path / 'run.toml'}: key {name!r} is in no section; {SECTIONS}"


def test_sections_of_somebody_else_are_left_out_where_they_are_expected(tmp_path):
    file = write(tmp_path, MINIMAL + "[warm_start]\nsteps = 9\n")
    assert load_config(file, besides=("warm_start",)).run.id == "r"
    with pytest.raises(ConfigError, match="unknown section 'warm_start'"):
        load_config(file)


def test_a_missing_section_is_named(tmp_path):
    with pytest.raises(ConfigError, match="section 'agent' is missing"):
        load_config(write(tmp_path, '[run]\nid = "r"\n'))


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match="run: 'id' is missing"):
        load_config(write(tmp_path, "[run]\n[agent]\n"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[rollout]\ngroup_size = 1\n", "rollout.group_size is 1, expected 2 or more"),
        ('[rollout]\ngroup_size = "8"\n', "group_size is '8', expected int"),
        ("[rollout]\ngroup_size = true\n", "group_size is True, expected int"),
        ("[hub]\nurl = 3\n", "url is 3, expected str"),
        ('[rollout]\nreward_authors = ["evaluatr"]\n', "'evaluatr', expected one of 'agent', 'evaluator', "),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_expected(tmp_path, line, says):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL + line))
    assert says in str(caught.value)


KINDS: dict[str, Any] = {
    "function": "a.py:run",
    "command": ("sh", "a.sh"),
    "url": "http://127.0.0.1:9000/run",
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_is_a_function_a_program_or_a_server(tmp_path, kind):
    file = write(
        tmp_path, MINIMAL.replace('function = "agent.py:run"', f"{kind} = {json.dumps(KINDS[kind])}")
    )
    assert getattr(load_config(file).agent, kind) == KINDS[kind]
    others = {name: value for name, value in KINDS.items() if name != kind}
    for name, value in others.items():
        with pytest.raises(ConfigError, match=r"agent\.\w+ and agent\.\w+ are an agent each"):
            AgentConfig(**{kind: KINDS[kind], name: value})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": KINDS["url"], "env": {"A": "b"}}, "agent.env has no effect with agent.url"),
        ({"function": KINDS["function"], "headers": {"a": "b"}}, "agent.headers has no effect without"),
        ({"command": KINDS["command"], "headers": {"a": "b"}}, "agent.headers has no effect without"),
        ({"command": ("", "x")}, "agent.command is ('', 'x'), expected a program and its arguments"),
        ({"url": "127.0.0.1:9000"}, "agent.url is '127.0.0.1:9000', expected an address like http://"),
        ({"url": "ftp://host/x"}, "agent.url is 'ftp://host/x', expected an address like http://"),
    ],
)
def test_settings_that_an_agent_has_no_use_for_are_refused(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        AgentConfig(**settings)


def test_an_agent_that_is_named_in_no_way_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="agent: 'function' is missing, or 'command' or 'url'"):
        load_config(write(tmp_path, MINIMAL.replace('function = "agent.py:run"', "")))


def test_weights_of_rewards_are_numbers_by_name(tmp_path):
    weighted = MINIMAL + "[credit]\nreward_weights = {{reward = 1, format = {}}}\n"
    config = load_config(write(tmp_path, weighted.format("0.5")))
    assert config.credit.reward_weights == {"reward": 1.0, "format": 0.5}
    with pytest.raises(ConfigError, match=r"reward_weights\.format is 'half', expected float"):
        load_config(write(tmp_path, weighted.format('"half"')))


AGENT = {"function": "a.py:run", "tasks": "t.jsonl", "reward": "r.py:reward"}
REQUIRED = {RunConfig: {"id": "r"}, AgentConfig: AGENT, WarmStartConfig: {"expert": "e.py:serve"}}
OUT_OF_RANGE = [
    (ClusterConfig, "wait_s", 0.0, "more than 0"),
    (RunConfig, "updates", 0, "1 or more"),
    (RunConfig, "seed", -1, "0 or more"),
    (RunConfig, "keep_checkpoints", 0, "1 or more"),
    (ServingConfig, "publish_tolerance", 0.0, "more than 0"),
    (ServingConfig, "engine_wait_s", -1.0, "0 or more"),
    (ServingConfig, "publish_timeout_s", 0.0, "more than 0"),
    (AgentConfig, "concurrency", 0, "1 or more"),
    (AgentConfig, "workers", 0, "1 or more"),
    (AgentConfig, "timeout_s", 0.0, "more than 0"),
    (AgentConfig, "max_attempts", 0, "1 or more"),
    (RolloutConfig, "groups_per_update", 0, "1 or more"),
    (RolloutConfig, "group_size", 0, "1 or more"),
    (RolloutConfig, "temperature", 0.0, "more than 0"),
    (RolloutConfig, "max_staleness", -1, "0 or more"),
    (RolloutConfig, "straggler_s", 0.0, "more than 0, or none"),
    (RolloutConfig, "aggregation_tokens", 0.0, "more than 0"),
    (RolloutConfig, "refills", -1, "0 or more"),
    (StopConfig, "min_change", -1.0, "0 or more"),
    (StopConfig, "window", 0, "1 or more"),
    (StopConfig, "patience", 0, "1 or more"),
    (PreferenceConfig, "min_gap", -1.0, "0 or more"),
    (PreferenceConfig, "pairs_per_group", -1, "0 or more"),
    (PreferenceConfig, "per_group", -1, "0 or more"),
    (RolloutConfig, "informative_groups", 0, "1 or more"),
    (RolloutConfig, "informative_groups", 65, "at most 64: groups_per_update with all refills"),
    (CreditConfig, "step_weight", -1.0, "0 or more"),
    (CreditConfig, "gamma", 1.5, "0 to 1"),
    (CreditConfig, "gae_lambda", 1.5, "0 to 1"),
    (CreditConfig, "ddof", 2, "0 or 1"),
    (CreditConfig, "eps", -1.0, "0 or more"),
    (CreditConfig, "history", -1, "0 to 1000"),
    (CreditConfig, "history_weight", -1.0, "0 or more"),
    (CreditConfig, "similarity", 0.4, "0.5 to 1"),
    (CreditConfig, "evidence_prior", -1.0, "0 or more"),
    (CreditConfig, "top_share", 0.0, "above 0, at most 1"),
    (CreditConfig, "top_p", 1.5, "above 0, at most 1"),
    (CreditConfig, "overlong_limit", -1, "0 or more"),
    (CreditConfig, "overlong_buffer", -1, "0 or more"),
    (CreditConfig, "shaping_weight", 0.0, "above 0"),
    (CreditConfig, "overlong_factor", 0.0, "above 0"),
    (CreditConfig, "value_prior", -1.0, "0 or more"),
    (CreditConfig, "baseline_decay", 1.0, "0 to below 1"),
    (LearnerConfig, "dtype", "float16", "one of float32, bfloat16"),
    (LearnerConfig, "device", "gpu", "cpu, cuda or cuda:N"),
    (LearnerConfig, "lr", -1.0, "more than 0"),
    (LearnerConfig, "betas", (0.9, 1.0), "two of 0 to below 1"),
    (LearnerConfig, "weight_decay", -1.0, "0 or more"),
    (LearnerConfig, "max_grad_norm", 0.0, "more than 0"),
    (LearnerConfig, "lora_targets", ("q_proj", "q_proj"), "each once"),
    (RolloutConfig, "reward_authors", ("agent", "agent"), "one or more, each once"),
    (LearnerConfig, "warmup_updates", -1, "0 or more"),
    (LearnerConfig, "decay_updates", -1, "0 or more"),
    (LearnerConfig, "objective", "ppp", f"one of {', '.join(OBJECTIVES)}"),
    (LearnerConfig, "clip_low", 1.0, "more than 0 and less than 1"),
    (LearnerConfig, "clip_high", 0.0, "more than 0"),
    (LearnerConfig, "dual_clip", 1.0, "more than 1"),
    (LearnerConfig, "tau_positive", 0.0, "more than 0"),
    (LearnerConfig, "tau_negative", 0.0, "more than 0"),
    (LearnerConfig, "max_ratio", 1.0, "more than 1"),
    (LearnerConfig, "log_ratio_coef", -1.0, "0 or more"),
    (LearnerConfig, "awr_beta", 0.0, "more than 0"),
    (LearnerConfig, "awr_max_weight", 0.0, "more than 0"),
    (LearnerConfig, "preference_beta", 0.0, "more than 0"),
    (LearnerConfig, "label_smoothing", 0.5, "0 to below 0.5"),
    (LearnerConfig, "good_weight", 0.0, "more than 0"),
    (LearnerConfig, "bad_weight", 0.0, "more than 0"),
    (LearnerConfig, "echo_coef", -1.0, "0 or more"),
    (LearnerConfig, "entropy_coef", -1.0, "0 or more"),
    (LearnerConfig, "kl_coef", -1.0, "0 or more"),
    (LearnerConfig, "lora_rank", -1, "0 or more"),
    (LearnerConfig, "lora_alpha", 0.0, "more than 0"),
    (LearnerConfig, "epochs_per_update", 0, "1 or more"),
    (LearnerConfig, "minibatches_per_update", 0, "1 or more"),
    (LearnerConfig, "max_tokens_per_microbatch", 0, "1 or more"),
    (LearnerConfig, "kl_monitor_rows", -1, "0 or more"),
    (LearnerConfig, "workers", 0, "1 or more"),
    (LearnerConfig, "seed", -1, "0 or more"),
    (LearnerConfig, "threads", -1, "0 or more"),
    (RolloutConfig, "reward_authors", (), "one or more, each once"),
    (EvalConfig, "every", -1, "0 or more"),
    (EvalConfig, "tasks", 0, "1 or more"),
    (EvalConfig, "tasks_between", 0, "1 or more"),
    (PromotionConfig, "every", -1, "0 or more"),
    (PromotionConfig, "tasks", 4, "5 or more: fewer can't show anything with confidence 0.95"),
    (PromotionConfig, "temperature", -0.1, "0 or more"),
    (PromotionConfig, "margin", 1.0, "0 or more, below 1"),
    (PromotionConfig, "confidence", 1.0, "0.5 or more, below 1"),
    (PromotionConfig, "rollback_after", -1, "0 or more"),
    (PromotionConfig, "rollback_drop", 0.0, "above 0, at most 1"),
    *(
        (MonitorConfig, name, value, "more than 0, less than 1, or none")
        for name in (
            "spread",
            "entropy",
            "first_steps",
            "sample_share",
            "clip",
            "early_exits",
            "test_edits",
            "flattery",
        )
        for value in (0.0, 1.0)
    ),
    *((MonitorConfig, name, 0.0, "more than 0, or none") for name in ("gradient", "gap", "drift")),
    *((MonitorConfig, name, 1.0, "more than 1, or none") for name in ("entropy_rise", "steps")),
    (MonitorConfig, "max_rollbacks", 0, "1 or more"),
    (MonitorConfig, "min_history", 3, "4 or more"),
    (MonitorConfig, "window", 7, "min_history, 8, or more"),
    *(
        (WarmStartConfig, name, 0, "1 or more")
        for name in ("rollouts", "steps", "batch_rows", "hidden", "layers", "heads", "vocab", "max_length")
    ),
    (WarmStartConfig, "warmup_steps", -1, "0 or more"),
    (WarmStartConfig, "lr", 0.0, "more than 0"),
    (WarmStartConfig, "dtype", "float16", "one of float32, bfloat16"),
]
WITHOUT_A_RANGE = {
    *((EvalConfig, "seed"), (EvalConfig, "success_at"), (PreferenceConfig, "good_at")),
    (StopConfig, "reaches"),
}


@pytest.mark.parametrize(("kind", "name", "value", "expected"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_shown_with_the_range(kind, name, value, expected):
    with pytest.raises(ConfigError) as caught:
        kind(**{**REQUIRED.get(kind, {}), name: value})
    said = str(caught.value)
    assert f"{name} is {value!r}" in said and said.partition("; did you mean")[0].endswith(
        f"expected {expected}"
    )


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("learner.objective=pppo", "ppo"),
        ("learner.packing=tre", "tree"),
        ("learner.dtype=bfloat", "bfloat16"),
        ("learner.kl_estimator=k3_unbias", "k3_unbiased"),
    ],
)
def test_a_misspelt_name_is_shown_with_the_nearest(tmp_path, setting, near):
    name, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=f"{value}', expected one of .*; did you mean '{near}'"):
        load_config(write(tmp_path, MINIMAL), [setting])
    wrong: Any = {name.removeprefix("learner."): value}
    with pytest.raises(ConfigError, match=f"{name} is '{value}', .*; did you mean '{near}'"):
        LearnerConfig(**wrong)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("preference.level = 'step'", "preference.level"),
        ("learner.objective = 'dpo'\npreference.good_at = 0.5", "preference.good_at"),
        ("learner.objective = 'kto'\npreference.min_gap = 0.5", "preference.min_gap"),
        ("learner.objective = 'bc'\npreference.pairs_per_group = 3", "preference.pairs_per_group"),
        ("learner.objective = 'dpo'\npreference.target = 'observations'", "preference.target"),
        ("learner.objective = 'awr'\npreference.per_group = 3", "preference.per_group"),
        ("learner.objective = 'dpo'\ncredit.step = 'gigpo'", "credit.step"),
        ("learner.objective = 'bc'\ncredit.gamma = 0.5\ncredit.step = 'gigpo'", "credit.step"),
        ("learner.objective = 'kto'\nrollout.aggregation = 'rollout-token-mean'", "rollout.aggregation"),
    ],
)
def test_a_setting_that_the_objective_does_not_use_is_refused(tmp_path, lines, name):
    with pytest.raises(ConfigError, match=f"{name} has no effect with learner.objective"):
        load_config(write(tmp_path, MINIMAL), lines.replace(" = ", "=").replace("'", '"').split("\n"))


@pytest.mark.parametrize(
    ("objective", "setting", "size", "most"),
    [("dpo", "pairs_per_group", 2, 1), ("dpo", "pairs_per_group", 8, 28), ("bc", "per_group", 1, 1)],
)
def test_as_many_as_a_group_has_is_no_limit(tmp_path, objective, setting, size, most):
    file = write(tmp_path, MINIMAL)
    changes = [f"learner.objective={objective}", f"rollout.group_size={size}"]
    with pytest.raises(ConfigError, match=rf"{setting} = {most} has no effect: a group of {size}"):
        load_config(file, [*changes, f"preference.{setting}={most}"])
    load_config(file, [*changes, f"preference.{setting}={most - 1}"])


@pytest.mark.parametrize("objective", ["bc", "dpo", "kto"])
@pytest.mark.parametrize("weights", ["", 'reward_weights = {"all tests" = 0.5}\n'])
def test_the_refusal_says_how_a_section_gets_its_defaults_back(tmp_path, objective, weights):
    file = write(tmp_path, MINIMAL + f'[credit]\n{weights}step = "gigpo"\ngamma = 0.9\n')
    overrides = [f"learner.objective={objective}"]
    with pytest.raises(ConfigError, match=r"credit\.step has no effect .* resets the section\)") as refused:
        load_config(file, overrides)
    overrides += re.findall(r"--set '(credit=.*)' resets", str(refused.value))
    wanted = {"all tests": 0.5} if weights else {"reward": 1.0}
    assert load_config(file, overrides).credit == CreditConfig(reward_weights=wanted)


def test_a_section_can_be_overridden_whole(tmp_path):
    file = write(tmp_path, MINIMAL + "[rollout]\ngroup_size = 4\nrefills = 1\n")
    assert load_config(file, ["rollout={}"]).rollout == RolloutConfig()
    found = load_config(file, ["rollout={refills = 2}", "rollout.temperature=0.5"]).rollout
    assert found == RolloutConfig(refills=2, temperature=0.5)
    for wrong in ("rollout=default", "rollout", "rollout=3"):
        with pytest.raises(
            ConfigError, match=f"--set '{wrong}': expected section.key=value, or section={{}}"
        ):
            load_config(file, [wrong])
    with pytest.raises(ConfigError, match="unknown section 'rolout'; did you mean 'rollout'"):
        load_config(file, ["rolout={}"])


def test_what_may_be_none_is_none_in_toml_and_in_overrides(tmp_path):
    file = write(tmp_path, MINIMAL + '[learner]\ndual_clip = "none"\n')
    assert load_config(file).learner.dual_clip is None
    assert load_config(file, ["learner.dual_clip=2"]).learner.dual_clip == 2.0
    for text in ("none", '"none"'):
        assert (
            load_config(file, ["learner.dual_clip=2", f"learner.dual_clip={text}"]).learner.dual_clip is None
        )
    critic = write(tmp_path, MINIMAL + "[learner]\ncritic = {lr = 0.02}\n")
    assert load_config(critic, ["learner.critic=none"]).learner.critic is None
    assert load_config(critic, ["learner.critic=none", "credit.step=none"]).credit.step == "none"
    with pytest.raises(ConfigError, match="lr is 'none', expected float"):
        load_config(file, ["learner.lr=none"])


def test_every_preference_setting_has_an_objective_that_takes_it():
    changed: dict[str, Any] = {
        "level": "step",
        "min_gap": 0.5,
        "pairs_per_group": 3,
        "good_at": 0.5,
        "per_group": 2,
    }
    names = {field.name for field in fields(PreferenceConfig)}
    assert names == {*changed, "target"}  # what `target` does: test_loop.py
    taken = {
        "dpo": ("level", "min_gap", "pairs_per_group"),
        "kto": ("good_at",),
        "bc": ("good_at", "per_group"),
    }
    config = PreferenceConfig(**changed)
    for objective, own in taken.items():
        prefer = config.prefer(objective)
        assert isinstance(prefer, partial) and prefer.keywords == {name: changed[name] for name in own}
    assert {config.prefer(name) for name in OBJECTIVES if name not in taken} == {None}


def test_observations_are_not_trained_twice(tmp_path):
    lines = ["learner.objective=bc", "preference.target=observations", "learner.echo_coef=0.1"]
    with pytest.raises(ConfigError, match=r"learner.echo_coef is 0\.1 and preference.target 'observations'"):
        load_config(write(tmp_path, MINIMAL), lines)


def test_a_critic_is_there_where_the_credit_asks_one_and_refused_elsewhere(tmp_path):
    file = write(tmp_path, MINIMAL)
    assert load_config(file, ["credit.step=gigpo"]).critic is None
    for asks in (["credit.episode=value_baseline"], ["credit.step=gae", "credit.episode=none"]):
        assert load_config(file, asks).critic == CriticConfig()
        named = load_config(file, [*asks, "learner.critic={lr = 0.02, clip = 0.5}"])
        assert named.critic == CriticConfig(lr=0.02, clip=0.5)
    with pytest.raises(ConfigError, match=r"learner\.critic has no effect with credit\.episode 'grpo' and"):
        load_config(file, ["learner.critic.lr=0.02"])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        load_config(file, ["credit.step=gae", "learner.critic.step=3"])
    with pytest.raises(ConfigError, match=r"credit\.step has no effect with learner\.objective 'kto'"):
        load_config(file, ["credit.step=gae", "learner.objective=kto"])


def test_what_the_objective_uses_is_taken(tmp_path):
    lines = ["learner.objective=awr", "credit.step=gigpo"]
    assert load_config(write(tmp_path, MINIMAL), lines).credit.step == "gigpo"
    file = write(tmp_path, MINIMAL + "[credit]\nreward_weights = {tests = 1.0}\n")
    assert load_config(file, ["learner.objective=dpo"]).credit.reward_weights == {"tests": 1.0}
    lines = ["learner.objective=kto", "learner.kl_coef=0.1", "rollout.aggregation=rollout-token-mean"]
    assert load_config(write(tmp_path, MINIMAL), lines).learner.kl_coef == 0.1


def kinds_of_configs() -> list[Any]:
    return [*(hint for hint in get_type_hints(TrainConfig).values() if is_dataclass(hint)), WarmStartConfig]


UNBOUNDED = {"token_tis", "sequence_tis", "token_band", "geometric_band", "veto_band"}


def test_every_number_of_a_config_is_finite():
    walked = 0
    for kind in [*kinds_of_configs(), CorrectionConfig, CriticConfig]:
        for name, hint in get_type_hints(kind).items():
            for number in (float("inf"), float("nan")):
                value: Any = {
                    float: number,
                    float | None: number,
                    tuple[float, float]: (0.5, number),
                    tuple[float, float] | None: (0.5, number),
                    Mapping[str, float]: {"reward": number},
                }.get(hint)
                if value is None or name in UNBOUNDED:
                    continue
                with pytest.raises(
                    ConfigError, match=rf"{name} is .*{number}.*, expected (a )?finite number"
                ):
                    kind(**{**REQUIRED.get(kind, {}), name: value})
                walked += 1
    assert walked > 60


def test_a_cap_without_a_bound_is_taken_and_no_number_is_not():
    assert CorrectionConfig(proximal=True, token_tis=float("inf")).token_tis == float("inf")
    assert CorrectionConfig(token_band=(0.5, float("inf"))).token_band == (0.5, float("inf"))
    bad: list[dict[str, Any]] = [
        {"proximal": True, "token_tis": float("nan")},
        {"token_band": (0.5, float("nan"))},
    ]
    for wrong in bad:
        with pytest.raises(ConfigError, match=r"learner\.correction\.token"):
            CorrectionConfig(**wrong)


def test_the_seed_of_the_learner_is_that_of_the_run(tmp_path):
    file = write(tmp_path, MINIMAL)
    with pytest.raises(
        ConfigError, match=r"learner.seed is 3, expected none: run.seed, 0, seeds the learner"
    ):
        load_config(file, ["learner.seed=3"])
    with pytest.raises(
        ConfigError, match=r"learner.seed is 0, expected none: run.seed, 3, seeds the learner"
    ):
        load_config(file, ["learner.seed=0", "run.seed=3"])
    assert load_config(file, ["learner.seed=3", "run.seed=3"]).run.seed == 3
    assert load_config(file, ["learner.seed=none", "run.seed=3"]).learner.seed is None


def test_a_run_has_one_model_to_start_from(tmp_path):
    file = write(tmp_path, MINIMAL + '[serving]\nmodel = "a"\n')
    with pytest.raises(ConfigError, match=r"learner.model_path is 'b', expected none: .* serving.model, 'a'"):
        load_config(file, ["learner.model_path=b"])
    assert load_config(file, ["learner.model_path=a"]).serving.model == "a"
    assert load_config(file, ["learner.model_path=b", "serving.model="]).learner.model_path == "b"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["credit.episode=running_baseline"], None),
        (["credit.episode=none", "credit.step=reinforce_pp"], None),
        (["learner.objective=bc"], None),
        (["credit.episode=value_baseline"], None),
        (["credit.step=gae"], None),
        (["credit.episode=tree_grpo"], None),
        ([], "credit.episode 'grpo' compares .*'running_baseline'"),
        (["credit.episode=rloo", "credit.step=gigpo"], "credit.episode 'rloo' compares"),
        (["learner.objective=dpo"], "learner.objective 'dpo' compares .* choose learner.objective 'kto' or"),
        (
            ["credit.episode=running_baseline", "credit.step=gigpo", "credit.gamma=0.5"],
            "credit.step = 'gigpo' and credit.gamma = 0.5 can change nothing: .* leave that out, or .* gae",
        ),
        (["credit.episode=rloo", "credit.step=gae"], "credit.episode = 'rloo' can change nothing: "),
        (["credit.singleton=raw", "credit.scale_by_std=false"], "credit.scale_by_std = False can change"),
        (["credit.step=gae", 'credit.filters=["top_p"]'], r"credit.filters = \['top_p'\] would leave out"),
    ],
)
@pytest.mark.parametrize("is_production", [False, True])
def test_where_rollouts_are_alone_what_compares_them_is_refused(tmp_path, lines, says, is_production):
    alone = "[production]\n" if is_production else "[rollout]\ngroup_size = 1\n"
    first = '[run]\nid = "r"\n' if is_production else MINIMAL
    if is_production and "credit.episode=running_baseline" in lines:
        lines = [*lines, "credit.baseline_key=all"]
    file = write(tmp_path, first + alone)
    if says is None:
        load_config(file, lines)
        return
    because = (
        "there are no tasks, and every rollout is alone in its group: " if is_production else "2 or more: "
    )
    with pytest.raises(ConfigError, match=because + says):
        load_config(file, lines)


@pytest.mark.parametrize("lines", [["monitor.spread=0.5"], ["monitor.actions.spread=pause"]])
def test_where_rollouts_are_alone_no_monitor_looks_at_their_spread(tmp_path, lines):
    file = write(tmp_path, MINIMAL + '[rollout]\ngroup_size = 1\n[credit]\nepisode = "running_baseline"\n')
    with pytest.raises(ConfigError, match=r"monitor\.spread has no effect where every rollout is alone"):
        load_config(file, lines)
    load_config(file, ["monitor.spread=none"])
    load_config(file, [*lines, "rollout.group_size=2"])


@pytest.mark.parametrize("credit", [["credit.step=gigpo"], ["credit.episode=tree_grpo"]])
def test_gspo_takes_no_credit_of_steps_where_a_row_is_the_sequence(tmp_path, credit):
    file = write(tmp_path, MINIMAL)
    rows = ["learner.objective=gspo", "learner.sequence=row"]
    with pytest.raises(
        ConfigError, match=r"'gspo' takes one advantage .*; choose learner.sequence 'call', or"
    ):
        load_config(file, [*rows, *credit])
    for fine in (rows, [*credit, *rows[:1]], [*credit, "learner.objective=gspo_token", *rows[1:]]):
        load_config(file, fine)


def test_corrections_and_a_critic_are_configs_and_no_mappings():
    wrong: Any = {"token_tis": 2.0}
    with pytest.raises(ConfigError, match=r"learner.correction is .*, expected a CorrectionConfig"):
        LearnerConfig(correction=wrong)
    with pytest.raises(ConfigError, match=r"learner.critic is .*, expected a CriticConfig"):
        LearnerConfig(critic=wrong)


def test_tasks_of_evaluations_that_are_not_made_are_refused():
    assert EvalConfig(every=4, tasks_between=7).tasks_between == 7
    with pytest.raises(ConfigError, match=r"eval\.tasks_between = 7 has no effect with eval\.every 0"):
        EvalConfig(tasks_between=7)


def test_the_only_rollout_of_an_update_is_never_late():
    assert RolloutConfig(groups_per_update=1, group_size=2, straggler_s=7.0).straggler_s == 7.0
    assert RolloutConfig(groups_per_update=1, group_size=1, informative_groups=1).straggler_s == STRAGGLER_S
    with pytest.raises(ConfigError, match=r"straggler_s = None has no effect with one rollout an update"):
        RolloutConfig(groups_per_update=1, group_size=1, straggler_s=None)


def test_a_run_that_only_evaluates_in_between_refuses_what_that_needs_not():
    check_only_between(EvalConfig(), has_promotions=False)
    check_only_between(EvalConfig(every=4, tasks_between=7, success_at=0.5, seed=1), has_promotions=False)
    check_only_between(EvalConfig(success_at=0.5, seed=1), has_promotions=True)
    check_only_between(EvalConfig(every=4), has_promotions=False, updates=4)
    with pytest.raises(ConfigError, match=r"eval\.every = 5 has no effect with run\.updates 4"):
        check_only_between(EvalConfig(every=5), has_promotions=False, updates=4)
    for changed in ({"tasks": 9, "every": 4}, {"tasks": 9}, {"success_at": 0.5}, {"seed": 1}):
        with pytest.raises(ConfigError, match=rf"eval\.{next(iter(changed))} = .* has no effect: a training"):
            check_only_between(EvalConfig(**changed), has_promotions=False)


def test_without_refills_no_number_of_informative_groups_has_an_effect():
    with pytest.raises(ConfigError, match="informative_groups is 2, expected 1 with refills 0"):
        RolloutConfig(refills=0, informative_groups=2)


def test_every_number_of_a_config_has_a_range():
    kinds = kinds_of_configs()
    numbers = {
        (kind, name)
        for kind in kinds
        for name, hint in get_type_hints(kind).items()
        if hint in (int, float, float | None)
    }
    assert numbers - WITHOUT_A_RANGE <= {(kind, name) for kind, name, _, _ in OUT_OF_RANGE}


def test_overrides_win_and_take_toml_or_plain_text(tmp_path):
    config = load_config(
        write(tmp_path, MINIMAL), ["rollout.group_size=4", "run.id=other", "rollout.temperature=1"]
    )
    assert (config.rollout.group_size, config.run.id, config.rollout.temperature) == (4, "other", 1.0)


def test_only_a_constant_aggregation_has_a_number_of_tokens(tmp_path):
    file = write(tmp_path, MINIMAL + '[rollout]\naggregation = "constant"\naggregation_tokens = 512\n')
    assert load_config(file).rollout.aggregation_tokens == 512.0
    for override in ("rollout.aggregation=row-token-mean", "rollout.aggregation_tokens=0"):
        with pytest.raises(ConfigError, match="aggregation"):
            load_config(file, [override])
    with pytest.raises(ConfigError, match="'constant' needs the number of tokens"):
        load_config(write(tmp_path, MINIMAL + '[rollout]\naggregation = "constant"\n'))


def test_a_table_inside_a_section_can_be_overridden_whole_or_by_key(tmp_path):
    file = write(tmp_path, MINIMAL + "[learner]\ncorrection = {token_band = [0.5, 5]}\n")
    assert load_config(file).learner.correction.token_band == (0.5, 5.0)
    found = load_config(file, ["learner.correction.m2_max=0.04"]).learner.correction
    assert (found.token_band, found.m2_max) == ((0.5, 5.0), 0.04)
    found = load_config(file, ["learner.correction={proximal = true, token_tis = 2}"]).learner.correction
    assert (found.token_band, found.token_tis) == (None, 2.0)
    with pytest.raises(ConfigError, match="did you mean 'token_band'"):
        load_config(file, ["learner.correction.token_bnd=[0.5, 5.0]"])
    with pytest.raises(ConfigError, match="'lr' is not a table"):
        load_config(write(tmp_path, MINIMAL + "[learner]\nlr = 1e-4\n"), ["learner.lr.x=1"])


def test_an_override_with_an_unknown_key_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'temprature'; did you mean 'temperature'"):
        load_config(write(tmp_path, MINIMAL), ["rollout.temprature=1"])
    with pytest.raises(ConfigError, match=r"unknown key 'nope'; known are .*, lr,"):  # nothing is near
        load_config(write(tmp_path, MINIMAL), ["learner.nope=1"])


def test_a_file_that_is_not_toml_or_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(write(tmp_path, "[run"))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "none.toml")


def test_a_critic_that_learns_alone_to_the_end_is_refused(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL)
    critic = ["credit.episode=none", "credit.step=gae", "run.updates=3"]
    assert load_config(file, [*critic, "learner.critic={warmup_updates=2}"]).learner.critic is not None
    with pytest.raises(ConfigError, match=r"learner\.critic\.warmup_updates is 3, expected fewer than run\."):
        load_config(file, [*critic, "learner.critic={warmup_updates=3}"])
