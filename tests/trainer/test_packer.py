import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.trainer.forking_rows import forking_rows
from tests.trainer.small_policy import make_model
from transformers import AutoModelForCausalLM, BloomConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from spangrad.errors import ConfigError
from spangrad.trainer.learning import packer, tree_attention
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.packable import Packable, packable
from spangrad.trainer.learning.tree_attention import Tree

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ROWS = forking_rows([(None, 0, 30), (0, 0.8, 9), (0, 0.5, 12), (None, 0, 6)])


def folder_of(config: PreTrainedConfig, folder: Path) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    make_model().save_pretrained(folder)
    return str(folder)


def learner(folder: str, **settings) -> Learner:
    return Learner(LearnerConfig(model_path=folder, lr=1e-3, threads=1, **settings))


def test_a_decoder_of_transformers_takes_packs_and_keeps_its_own_attention_beside_them():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, **HEADS)).eval()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert packable(model).masking == "segments"
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_model_that_takes_no_packs_is_padded_with_a_warning_and_refuses_what_it_can_not(tmp_path, caplog):
    bloom = folder_of(BloomConfig(**SIZES, n_layer=1, n_head=4), tmp_path)
    with caplog.at_level(logging.WARNING):
        padded = learner(bloom)
    assert "BloomForCausalLM) takes no packs: its attention is 'eager'" in caplog.text
    assert padded.update(ROWS)["packing/padded"] == 1.0
    for packing in ("tree", "varlen"):
        with pytest.raises(ConfigError, match=rf"learner\.packing is '{packing}', but .* takes no packs"):
            learner(bloom, packing=packing)


def test_packs_whose_gradient_is_not_that_of_separate_rows_are_refused(monkeypatch):
    whole = tree_attention._part_backward
    monkeypatch.setattr(
        tree_attention, "_part_backward", lambda *parts: tuple(1.5 * part for part in whole(*parts))
    )
    assert packable(make_model()).masking == "mask"  # the next way to tell who sees whom
    monkeypatch.setattr(Tree, "mask_PP", lambda self: torch.ones(12, 12, dtype=torch.bool).tril())
    reason = packable(make_model()).reason
    assert "segments: the gradient of packed rows is off by 0." in reason
    assert "mask: logits of packed rows are off by" in reason


def test_packs_are_tried_in_the_type_that_is_trained_in(monkeypatch, llama):
    whole = tree_attention._part

    def no_bfloat16(query, *more):
        if query.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for bfloat16")
        return whole(query, *more)

    monkeypatch.setattr(tree_attention, "_part", no_bfloat16)
    model = make_model()
    assert packable(model).masking == "segments"
    assert packable(make_model(), torch.bfloat16).masking == "mask"
    assert all(weights.grad is None for weights in model.parameters())
    learner(llama, packing="tree", dtype="bfloat16").update(ROWS)  # with the mask


def test_auto_pads_on_a_gpu_where_packs_were_never_run_and_says_so(monkeypatch, caplog):
    tried: list[Any] = []

    def found(*asked):
        tried.append(asked)
        return Packable("flex")

    monkeypatch.setattr(packer, "packable", found)
    model: Any = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(pad_token_id=0))
    with caplog.at_level(logging.WARNING):
        chosen = packer.Packer(LearnerConfig(device="cuda"), model)
    assert "not proven on a GPU; learner.packing = 'tree' tries them" in caplog.text
    assert {batch.layout for batch in chosen.batches(ROWS)} == {"padded"} and not tried
    asked = packer.Packer(LearnerConfig(device="cuda", packing="tree", dtype="bfloat16"), model)
    assert {batch.layout for batch in asked.batches(ROWS)} == {"tree"} and tried == [(model, torch.bfloat16)]


def test_rows_beyond_a_sliding_window_are_padded(tmp_path, caplog):
    mistral = folder_of(MistralConfig(**SIZES, **HEADS, sliding_window=24), tmp_path)
    chosen = learner(mistral)
    short = [row for row in ROWS if len(row.token_ids) <= 24]
    with caplog.at_level(logging.WARNING):
        chosen.score(short)
        assert caplog.text == ""
        assert chosen.update(ROWS)["packing/padded"] == 1.0
    assert "see 24: the window is not cut out of packs" in caplog.text
    with pytest.raises(ConfigError, match=r"learner\.packing is 'tree', but a row has \d+ tokens"):
        learner(mistral, packing="tree").score(ROWS)


def test_layouts_agree_and_count_what_they_compute(llama, caplog):
    metrics, weights = {}, {}
    for packing in ("padded", "varlen", "tree", "auto"):
        with caplog.at_level(logging.INFO):
            one = learner(llama, packing=packing, epochs_per_update=2)
            metrics[packing] = one.update(ROWS)
        weights[packing] = torch.cat([p.detach().flatten() for p in one.model.parameters()])
        assert torch.allclose(weights[packing], weights["padded"], atol=2e-5)
    tokens = {name: found["data/forward_tokens"] for name, found in metrics.items()}
    assert tokens["padded"] == tokens["varlen"] > tokens["tree"] == tokens["auto"]
    for found in metrics.values():
        assert found["data/forward_tokens"] + found["data/shared_tokens"] == tokens["padded"]
        assert found["loss/total"] == pytest.approx(metrics["padded"]["loss/total"], rel=1e-4, abs=1e-7)
    assert metrics["padded"]["data/padding_tokens"] > 0 == metrics["tree"]["data/padding_tokens"]
    assert {name for name, share in metrics["auto"].items() if name.startswith("packing/") and share} == {
        "packing/tree"
    }
    assert "tokens computed (100% tree)" in caplog.text


def test_cloning_packs_too(llama):
    found = {packing: learner(llama, packing=packing).fit_bc(ROWS, 3, 4) for packing in ("padded", "tree")}
    assert found["tree"]["loss/bc"] == pytest.approx(found["padded"]["loss/bc"], rel=1e-4)
    assert found["tree"]["data/forward_tokens"] < found["padded"]["data/forward_tokens"]


@pytest.mark.parametrize("more", [{"gradient_checkpointing": True}, {"lora_rank": 2}, {"dtype": "bfloat16"}])
def test_packs_go_with_what_saves_memory(llama, more):
    norms = [
        learner(llama, packing=packing, **more).update(ROWS)["grad/norm"] for packing in ("tree", "padded")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.05 if "dtype" in more else 1e-4)
