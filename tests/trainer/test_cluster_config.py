"""The section `[cluster]`: what is refused, and what an engine and the learner make of it."""

import os
from pathlib import Path

import pytest

from spangrad.errors import ClusterError, ConfigError
from spangrad.trainer import places
from spangrad.trainer.cluster import start_ray
from spangrad.trainer.cluster_config import ClusterConfig, may_listen
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.places import Mark
from spangrad.trainer.serving.engine import server_command
from spangrad.trainer.serving.own_engines import engine_config

FILE = """
[run]
id = "r"
[serving]
model = "m"
[agent]
function = "a.py:f"
tasks = "t.jsonl"
reward = "a.py:r"
"""
JOINED = "cluster.address=10.0.0.1:6379"
PRODUCTION = (
    *("production={}", "agent={}", "credit.episode=running_baseline", "credit.baseline_key=all"),
    "rollout.max_staleness=4",
)

STORED = ("stored={}", "agent={}", "learner.objective=bc", "credit={}")


def config_of(tmp_path: Path, *changes: str) -> TrainConfig:
    (tmp_path / "run.toml").write_text(FILE)
    (tmp_path / "m").mkdir(exist_ok=True)
    return load_config(tmp_path / "run.toml", changes)


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "head.example:6379", "[fd00::1]:6379"])
def test_an_address_is_of_a_cluster(tmp_path: Path, address: str) -> None:
    assert config_of(tmp_path, f"cluster.address='{address}'").cluster.is_local == (address == "local")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["cluster.address=ray://10.0.0.1:10001"], "cluster.address is 'ray://10.0.0.1:10001', expected"),
        (["cluster.address=10.0.0.1"], "expected 'local', 'auto' or 'host:port'"),
        (["cluster.learner.resources={a = 1}"], "no effect with cluster.address 'local'"),
        (["cluster.learner.placement=spread"], "no effect with cluster.address 'local'"),
        (["cluster.workers.cpus=1"], "no effect with cluster.address 'local'"),
        (["cluster.workers.resources={a = 1}"], "no effect with cluster.address 'local'"),
        (["cluster.engines.resources={a = 1}"], "no effect with cluster.address 'local'"),
        (["cluster.wait_s=5"], "no effect with cluster.address 'local'"),
        ([JOINED, "cluster.wait_s=0"], "cluster.wait_s is 0.0, expected more than 0"),
        ([JOINED, "cluster.workers.cpus=-1"], "cluster.workers.cpus is -1.0, expected 0 or more"),
        ([JOINED, "cluster.learner.resources={GPU = 1}"], "not a resource of one's own"),
        ([JOINED, "cluster.learner.resources={a = 0}"], "resources.a is 0.0, expected a share of 1"),
        ([JOINED, "cluster.learner.resources={a = 1.5}"], "resources.a is 1.5, expected a share of 1"),
        ([JOINED, "cluster.learner.placement=spread"], "no effect with learner.workers 1"),
        ([JOINED, "cluster.learner.placement=apart"], "'apart', expected one of"),
        ([JOINED, "cluster.workers.placement=spread"], "no effect with agent.workers 1"),
        ([JOINED, "agent.workers=2", "cluster.workers.placement=spread"], "need nothing of a node"),
        ([JOINED, *PRODUCTION, "cluster.workers.cpus=1"], "cluster.workers has no effect with [production]"),
        ([*STORED, "cluster.engines={}"], "cluster.engines has no effect with [stored]"),
        ([*STORED, JOINED, "cluster.workers.cpus=1"], "cluster.workers has no effect with [production] and"),
        (["cluster.engines.count=0"], "cluster.engines.count is 0, expected 1 or more"),
        (["cluster.engines.gpus=-1"], "cluster.engines.gpus is -1, expected 0 or more"),
        (["cluster.engines.cpus=0"], "cluster.engines.cpus is 0, expected 1 or more"),
        (["cluster.engines.max_model_len=1"], "expected 2 or more"),
        (["cluster.engines.startup_timeout_s=0"], "expected more than 0"),
        (["cluster.engines.placement=spread"], "no effect with cluster.engines.count 1"),
        (["cluster.engines={}", "serving.engine_url=http://10.0.0.1:8000"], "beside cluster.engines"),
        (["cluster.engines={}", 'serving.engine_urls=["http://10.0.0.1:8000"]'], "beside cluster.engines"),
    ],
)
def test_what_can_not_be_or_has_no_effect_is_refused(tmp_path: Path, changes: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, *changes)
    assert says in str(caught.value)


def test_engines_wait_for_places_also_in_a_cluster_of_ones_own(tmp_path: Path) -> None:
    assert config_of(tmp_path, "cluster.engines={}", "cluster.wait_s=5").cluster.wait_s == 5


def test_an_engine_serves_as_the_run_says(tmp_path: Path) -> None:
    changes = [
        *("cluster.engines.count=2", "cluster.engines.gpus=2", "cluster.engines.cpus=3"),
        *("cluster.engines.dtype=bfloat16", "cluster.engines.max_model_len=77", "serving.served_name=mine"),
        *("cluster.engines.max_num_seqs=5", 'cluster.engines.extra_args=["--seed", "4"]'),
        *("serving.transfer=lora", "learner.lora_rank=8", "cluster.engines.startup_timeout_s=9"),
    ]
    config = config_of(tmp_path, *changes)
    engines = config.cluster.engines
    assert engines is not None
    one = engine_config(config, engines, 1)
    assert (one.threads, one.startup_timeout_s, one.device) == (3, 9.0, "gpu")
    assert one.log == str(config.folder / "logs" / "engine-1.log")
    command = " ".join(server_command(one, on_cpu=False))
    for said in (
        *(f"--model {tmp_path / 'm'}", "--served-model-name mine", "--dtype bfloat16", "--max-model-len 77"),
        *("--max-num-seqs 5", "--max-lora-rank 8", "--tensor-parallel-size 2", "--seed 4"),
    ):
        assert said in command
    plain = config_of(tmp_path, "cluster.engines={}")
    assert plain.cluster.engines is not None
    alone = engine_config(plain, plain.cluster.engines, 0)
    assert (alone.lora_rank, alone.extra_args, alone.device) == (0, (), "cpu")


@pytest.mark.parametrize(
    ("host", "may"),
    [
        *[("127.0.0.1", True), ("10.1.2.3", True), ("192.168.0.2", True), ("fd00::1", True)],
        *[("0.0.0.0", False), ("8.8.8.8", False), ("::", False), ("2600::1", False)],
    ],
)
def test_an_engine_listens_at_private_addresses_alone(host: str, may: bool) -> None:
    assert may_listen(host) is may


def test_a_folder_that_another_machine_does_not_see_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Mark.put(tmp_path)
    mark.check("an engine")
    monkeypatch.setattr(places, "SEEN_WITHIN_S", 0.0)
    Path(mark.path).write_text("that of another machine")
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"an engine at .* does not see .* set run\.folder to a disk"):
            mark.check("an engine")
        Path(mark.path).unlink(missing_ok=True)


def test_a_cluster_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ClusterError, match=r"the Ray cluster at '127.0.0.1:9' .* can't be joined"):
        start_ray(1, ClusterConfig(address="127.0.0.1:9"))
    assert "RAY_AUTH_MODE" not in os.environ, "a local cluster of this process would ask for the token"
