from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.small_policy import make_model, make_row, make_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from spangrad.credit.transition import Transition
from spangrad.errors import ConfigError, PolicyError
from spangrad.trainer.learning.checkpoint import latest, load_checkpoint
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.lora import base_digest
from spangrad.trainer.learning.model import checkpoint_layers

ROWS = [make_row(seed, tokens=12 + 3 * seed) for seed in range(4)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input and output embedding are one matrix."""
    folder = tmp_path_factory.mktemp("models") / "policy"
    model = make_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make_learner(policy: Path) -> Callable[..., Learner]:
    def make(**settings: Any) -> Learner:
        base: dict[str, Any] = {"model_path": str(policy), "lr": 1e-2, "threads": 1, "lora_rank": 2}
        return Learner(LearnerConfig(**base | settings))

    return make


def scores(learner: Learner) -> Tensor:
    return torch.from_numpy(np.concatenate(learner.score(ROWS)))


def trained(learner: Learner, updates: int = 2) -> Learner:
    for _ in range(updates):
        learner.update(ROWS)
    return learner


def test_an_adapter_starts_as_the_model_and_trains_alone(policy, make_learner):
    learner = make_learner()
    start = make_learner(lora_rank=0)
    assert torch.allclose(scores(learner), scores(start), atol=1e-6)
    before = {name: value.detach().clone() for name, value in learner.model.named_parameters()}
    trained(learner)
    assert not torch.allclose(scores(learner), scores(start), atol=1e-2)
    moved = {name for name, value in learner.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    # 2 layers x 7 linear layers x (A, B); the output layer has none
    assert len(moved) == 28 and not any("lm_head" in name for name in moved)


def test_the_reference_is_the_model_with_the_adapter_off(make_learner):
    learner = make_learner(kl_coef=1.0)
    assert learner._reference is learner.model  # no second copy
    first = learner.update(ROWS)
    assert first["policy/kl_to_start"] == pytest.approx(0.0, abs=1e-9)
    moved = learner.update(ROWS)
    # What the distance must be: to the scores of a learner that never trained.
    learner_2 = trained(make_learner(kl_coef=1.0), 1)
    difference = scores(make_learner(lora_rank=0)) - scores(learner_2)
    expected = (difference.exp() - 1 - difference).mean()  # k3
    assert moved["policy/kl_to_start"] == pytest.approx(float(expected), rel=1e-3)
    assert moved["policy/kl_to_start"] > 1e-4 and moved["loss/kl"] > 0
    # Losses over sequences ask for sums under both policies.
    own, reference = (learner._passes.sums(ROWS, of_reference=of_reference) for of_reference in (False, True))
    start = make_learner(lora_rank=0)._passes.sums(ROWS, of_reference=False)
    assert reference == pytest.approx(start, rel=1e-6) and own != pytest.approx(start, rel=1e-3)


def test_exports_are_merged_and_have_the_names_and_shapes_of_the_start(policy, make_learner, tmp_path):
    learner = trained(make_learner())
    before = scores(learner)
    learner.export_weights(tmp_path / "weights.safetensors")
    start = load_file(policy / "model.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    assert {n: v.shape for n, v in weights.items()} == {n: v.shape for n, v in start.items()}
    changed = {name for name, value in weights.items() if not torch.equal(value, start[name])}
    assert changed == {name for name in start if "_proj" in name}
    learner.export_model(tmp_path / "model")
    reloaded = make_learner(model_path=str(tmp_path / "model"), lora_rank=0)
    assert torch.allclose(scores(reloaded), before, atol=1e-5)
    assert torch.equal(scores(learner), before)  # merging touched nothing
    tied = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_resumed_adapter_continues_bit_for_bit(make_learner, tmp_path):
    settings = {"minibatches_per_update": 2, "weight_decay": 0.1, "gradient_checkpointing": True}
    straight = trained(make_learner(**settings), 2)
    folder = straight.save(tmp_path, record=7)
    # The adapters alone, not the model.
    assert all(".lora_" in name for name in load_file(folder / "weights.safetensors"))
    second = trained(make_learner(**settings, seed=0), 1)
    newest = latest(tmp_path)
    assert newest is not None and second.load(newest) == 7
    for learner in (straight, second):
        trained(learner, 2)
    found = dict(second.model.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in straight.model.named_parameters())


@pytest.mark.parametrize(
    "settings",
    [{"lora_rank": 3}, {"lora_alpha": 8.0}, {"lora_targets": ("q_proj",)}, {"lora_rank": 0}],
    ids=lambda settings: next(iter(settings)) + str(next(iter(settings.values()))),
)
def test_every_setting_changes_the_training_and_no_checkpoint_crosses_it(make_learner, tmp_path, settings):
    base, other = trained(make_learner()), trained(make_learner(**settings))
    assert not torch.allclose(scores(base), scores(other), atol=1e-4)
    folder = base.save(tmp_path, record=None)
    before = scores(other)
    with pytest.raises(PolicyError, match="can't change in the middle"):
        other.load(folder)
    assert torch.equal(scores(other), before)


def test_no_adapter_is_resumed_beside_other_weights_than_it_was_trained_with(make_learner, tmp_path):
    learner = trained(make_learner(), 1)
    folder = learner.save(tmp_path / "checkpoints", record=None)
    assert load_checkpoint(folder).counters["adapter_base"] == base_digest(make_learner().model)
    learner.export_model(tmp_path / "merged")  # same names, same shapes
    other = make_learner(model_path=str(tmp_path / "merged"))
    before = scores(other)
    with pytest.raises(PolicyError, match=r"adapters to weights with hash '\w+', those of '.*merged' have"):
        other.load(folder)
    assert torch.equal(scores(other), before)
    full = make_learner(lora_rank=0)  # its checkpoints hold every weight
    assert load_checkpoint(full.save(tmp_path / "full", record=None)).counters["adapter_base"] is None


def test_what_makes_no_sense_is_refused(make_learner):
    with pytest.raises(ConfigError, match=r"'qproj', which is no linear layer .* expected some of .*q_proj"):
        make_learner(lora_targets=("k_proj", "qproj"))
    with pytest.raises(ConfigError, match="the output layer"):
        make_learner(lora_targets=("lm_head",))
    settings: dict[str, Any] = {"lora_alpha": 8.0, "lora_targets": ("q_proj",)}
    for name, value in settings.items():
        with pytest.raises(ConfigError, match=f"learner.{name} = .* has no effect with lora_rank 0"):
            LearnerConfig(**{name: value})


def gradient_and_kept(learner: Learner, rows: list[Transition]) -> tuple[Tensor, int]:
    """Gradient of a step, and bytes that its forward passes keep for the backward passes."""
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        learner.update(rows)
    return scores(learner), sum(kept.values())


@pytest.mark.parametrize("rank", [0, 2])
def test_gradient_checkpointing_keeps_less_and_changes_no_number(make_learner, rank):
    rows = [replace(make_row(seed, tokens=200), loss_weight=0.01) for seed in range(4)]
    found = [
        gradient_and_kept(make_learner(lora_rank=rank, gradient_checkpointing=on), rows)
        for on in (False, True)
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] < 0.5 * found[0][1]


def test_a_model_whose_layers_cannot_be_computed_twice_is_refused():
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Linear has no layer that transformers can compute twice"):
        checkpoint_layers(model)
