"""Adapters of a real learner in a real vLLM server: what it serves is what the learner computes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.gateway.gateway_setup import versions
from tests.trainer.small_policy import make_row
from tests.vllm_fixture import make_served_model, random_rows

from spangrad.credit.transition import Transition
from spangrad.errors import ConfigError
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.lora import adapter_tensors
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.adapter_transfer import AdapterTransfer
from spangrad.trainer.serving.engine import Engine, EngineConfig
from spangrad.trainer.serving.fleet import Fleet, Probe


def whole(token_ids: list[int]) -> Transition:
    """A row of which every token but the first is scored, at temperature 1."""
    mask = np.ones(len(token_ids), dtype=np.bool_)
    mask[0] = False
    row = make_row(0, tokens=len(token_ids))
    return dataclasses.replace(row, token_ids=np.array(token_ids, np.int32), action_mask=mask)


def move(learner: Learner, seed: int) -> None:
    """Give the adapter weights of which none is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter_tensors(learner.model).values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    folder = make_served_model(tmp_path_factory.mktemp("base"), is_tied=True)
    return Learner(LearnerConfig(model_path=str(folder), lora_rank=4, lora_alpha=8.0))


def test_peft_reads_the_exported_adapter_as_the_learner_has_it(learner: Learner, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import Qwen3ForCausalLM

    move(learner, 1)
    folder = learner.export_adapter(tmp_path, model="policy", version=3)
    base = Qwen3ForCausalLM.from_pretrained(learner.config.model_path, dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(base, folder)
    ids = torch.tensor(random_rows(1, 20))
    with torch.no_grad():
        gap = (theirs(ids).logits - learner.model(ids).logits).abs().max()
    assert gap < 1e-5
    assert learner.export_adapter(tmp_path, model="policy", version=3) == folder  # equal names, equal weights
    move(learner, 2)
    assert learner.export_adapter(tmp_path, model="policy", version=3) != folder


def test_without_an_adapter_there_is_none_to_export(tmp_path: Path) -> None:
    folder = make_served_model(tmp_path / "base", is_tied=True)
    with pytest.raises(ConfigError, match="lora_rank is 0"):
        Learner(LearnerConfig(model_path=str(folder))).export_adapter(tmp_path, model="policy", version=0)


@pytest.fixture(scope="module")
def adapter_engine(learner: Learner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    config = EngineConfig(
        model=learner.config.model_path, port=free_port(), log=str(log), lora_rank=learner.config.lora_rank
    )
    with Engine(config) as engine:
        yield engine


@pytest.mark.vllm
def test_every_version_is_served_under_its_own_name_and_is_the_learners(
    learner: Learner, adapter_engine: Engine, tmp_path: Path
) -> None:
    exporter = InMemorySpanExporter()
    config = GatewayConfig(adapter_engine.url, store="unused", port=0)
    rows = random_rows(2, 60)
    prompt = random_rows(1, 200, seed=3)[0]

    def ask(url: str) -> dict[str, Any]:
        body = {"model": "policy", "prompt": prompt, "max_tokens": 4, "temperature": 0.0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    with running(config, exporter=exporter) as url:
        fleet = Fleet([adapter_engine.url], gateway_url=url, transfer=AdapterTransfer("policy"))
        before = None
        names_served = []
        for number in (1, 2):
            move(learner, 10 + number)
            now = learner.score([whole(row) for row in rows])
            probe = Probe(rows, now, tolerance_nats=1e-3, learner_before=before)
            folder = learner.export_adapter(tmp_path, model="policy", version=number)
            report = fleet.publish(folder, number, probe=probe)
            (proof,) = report.proofs.values()
            print(f"version {number}: {report.seconds:.3f} s, {proof}")
            assert proof.mean_gap < 1e-4
            ask(url)
            reply = ask(url)
            details = reply["usage"]["prompt_tokens_details"] or {}
            assert (details.get("cached_tokens") or 0) >= 160  # its own blocks
            assert reply["model"] == Path(folder).name
            names_served.append(reply["model"])
            before = now
        assert len(set(names_served)) == 2
        listed = httpx.get(f"{adapter_engine.url}/v1/models").json()["data"]
        assert [entry["id"] for entry in listed] == ["policy", names_served[1]]
        httpx.post(f"{url}/spangrad/flush", timeout=30).raise_for_status()
    told = [versions(span.attributes or {}) for span in exporter.get_finished_spans()]
    assert [set(each) for each in told] == [{1}, {1}, {2}, {2}]
