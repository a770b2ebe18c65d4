import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.trainer.small_policy import make_policy
from tests.vllm_fixture import learner_logprobs

from spangrad.errors import ConfigError, EngineError, PolicyError, PortInUseError, PublishError
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.engine import (
    Engine,
    EngineConfig,
    decisive_line,
    server_command,
    server_environment,
)
from spangrad.trainer.serving.publish import publish, served_version

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "query",
            "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}},
        },
    }
]


def config_for(folder: Path, log: Path, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(folder), port=free_port(), log=str(log), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "can't be read as JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
            "not a complete safetensors file",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a complete safetensors file"),
        (lambda f: [file.unlink() for file in f.glob("tokenizer*.json")], "no tokenizer"),
    ],
)
def test_a_broken_model_folder_is_refused_before_anything_starts(
    damage: Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    folder = make_policy(tmp_path / "policy")
    damage(folder)
    engine = Engine(config_for(folder, tmp_path / "engine.log"))
    with pytest.raises(PolicyError, match=expected):
        engine.start()
    assert not engine.is_alive() and not (tmp_path / "engine.log").exists()


def test_a_missing_model_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere' does not exist$"):
        Engine(config_for(tmp_path / "nowhere", tmp_path / "engine.log")).start()


def test_a_taken_port_is_reported_before_anything_starts(policy: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = Engine(EngineConfig(model=str(policy), port=port, log=str(tmp_path / "engine.log")))
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
            engine.start()
    assert not engine.is_alive()


def test_a_missing_vllm_is_named_with_the_command_that_installs_it(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="pip install 'spangrad\\[vllm\\]'"):
        Engine(config_for(policy, tmp_path / "engine.log")).start()


def test_values_out_of_range_are_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.threads is 0; expected 1 or more"):
        config_for(policy, tmp_path / "engine.log", threads=0)


@pytest.mark.parametrize(("rank", "reserved"), [(1, "1"), (4, "8"), (16, "16"), (400, "512")])
def test_an_engine_for_adapters_reserves_what_vllm_has_for_their_rank(
    policy: Path, tmp_path: Path, rank: int, reserved: str
) -> None:
    config = config_for(policy, tmp_path / "engine.log", lora_rank=rank)
    argv = server_command(config, on_cpu=True)
    assert argv[argv.index("--max-lora-rank") + 1] == reserved and "--enable-lora" in argv
    assert server_environment(config, on_cpu=True)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    plain = config_for(policy, tmp_path / "engine.log")
    assert "--enable-lora" not in server_command(plain, on_cpu=True)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_environment(plain, on_cpu=True)
    with pytest.raises(ConfigError, match=r"engine\.lora_rank is 513; expected 0 to 512"):
        config_for(policy, tmp_path / "engine.log", lora_rank=513)


def test_the_decisive_line_of_a_log_is_the_root_cause() -> None:
    log = """(APIServer pid=1) INFO 11-29 17:56:41 [api_utils.py:286] non-default args: {'error': 1}
(EngineCore pid=2) ERROR 11-29 17:56:55 [core.py:1] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 17:56:55 [core.py:1]   File "loader.py", line 69, in load
(EngineCore pid=2) ERROR 11-29 17:56:55 [core.py:1] ValueError: size mismatch for lm_head
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}
"""
    assert decisive_line(log) == "ValueError: size mismatch for lm_head"
    assert decisive_line("starting\nalmost there\n\n") == "almost there"
    assert decisive_line("") == ""


@pytest.mark.vllm
def test_an_engine_that_can_not_start_says_why(policy: Path, tmp_path: Path) -> None:
    engine = Engine(config_for(policy, tmp_path / "engine.log", extra_args=("--dtype", "float7")))
    engine.start()
    with pytest.raises(EngineError, match=r"ended with exit code \d.*float7.*log: ") as caught:
        engine.wait_ready()
    assert "\n" not in str(caught.value)
    engine.stop()


@pytest.mark.vllm
def test_a_killed_engine_is_noticed(policy: Path, tmp_path: Path) -> None:
    engine = Engine(config_for(policy, tmp_path / "engine.log")).start()
    assert engine.is_alive() and engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        engine.wait_ready()
    assert not engine.is_alive()
    with pytest.raises(
        PublishError, match=r"GET http://.*/weight_info got no answer.*is the engine at http.* running"
    ):
        served_version(engine.url)
    engine.stop()
    assert engine.pid is None


@pytest.mark.vllm
def test_the_chat_route_returns_ids_and_the_logprobs_that_the_learner_computes(
    engine: Engine, served_model: Path
) -> None:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "How many orders does ann have?"}],
        "tools": TOOLS,
        "temperature": 1.0,
        "max_tokens": 40,
        "n": 4,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    weights = served_model / "model.safetensors"
    publish(engine.url, weights, 1)
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60.0).json()
    prompt = reply["prompt_token_ids"]
    sampled = [choice["token_ids"] for choice in reply["choices"]]
    served = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in reply["choices"]]
    assert [len(ids) for ids in sampled] == [len(values) for values in served] == [40] * 4
    learner = learner_logprobs(served_model, weights, [prompt + ids for ids in sampled])
    gaps = np.concatenate([np.abs(a[len(prompt) - 1 :] - b) for a, b in zip(learner, served, strict=True)])
    print(f"engine-to-learner gap: mean {gaps.mean():.2e}, max {gaps.max():.2e} nats over {gaps.size} tokens")
    assert gaps.mean() < 1e-4 and gaps.max() < 1e-3
