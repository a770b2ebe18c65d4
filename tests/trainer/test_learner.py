import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.small_policy import make_model, make_policy, make_row
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from spangrad.credit.aggregation import weigh
from spangrad.credit.transition import Transition
from spangrad.errors import ConfigError, EmptyBatchError, GradeError, PolicyError
from spangrad.trainer.learning.checkpoint import latest
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig, scheduled_lr
from spangrad.trainer.learning.losses import bc_loss, ppo_clip_loss
from spangrad.trainer.learning.model import target_stats
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.learning.output_head import HeadForm
from spangrad.trainer.learning.packing import pack, whole_groups


def on_policy(learner: Learner, rows: Sequence[Transition]) -> list[Transition]:
    """The rows with the learner's present logprobs as behaviour logprobs."""
    updated = []
    for row, scores in zip(rows, learner.score(rows), strict=True):
        logprobs = np.full(len(row.token_ids), np.nan, dtype=np.float32)
        logprobs[row.action_mask] = scores
        updated.append(replace(row, behavior_logprobs=logprobs))
    return updated


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner.model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def double_model() -> PreTrainedModel:
    model = make_model()
    return model.double().eval()  # type: ignore[no-any-return]


def rows_of(count: int, **settings: Any) -> list[Transition]:
    return [make_row(seed, tokens=12 + 3 * seed, **settings) for seed in range(count)]


def naive_logprobs(policy: Path, row: Transition) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor(row.token_ids, dtype=torch.int64)[None]).logits[0] / row.temperature
    positions = np.flatnonzero(row.action_mask)
    return [float(logits[t - 1].log_softmax(-1)[int(row.token_ids[t])]) for t in positions]


def test_score_is_the_plain_forward_pass_under_the_rows_temperature(policy, make_learner):
    rows = [make_row(seed, tokens=12 + 5 * seed, temperature=t) for seed, t in enumerate((1.0, 0.7, 1.3))]
    empty = replace(make_row(9), action_mask=np.zeros(24, dtype=np.bool_))
    scores = make_learner().score([*rows, empty])
    for row, row_scores in zip(rows, scores, strict=False):
        assert row_scores.tolist() == pytest.approx(naive_logprobs(policy, row), abs=2e-5)
    assert scores[3].size == 0


@pytest.mark.parametrize("objective", [name for name, one in OBJECTIVES.items() if one.uses_ratio])
def test_an_update_raises_what_was_good_and_lowers_what_was_bad(make_learner, objective):
    learner = make_learner(objective=objective)
    signs = (1.0, -1.0, 1.0, -1.0)
    rows = [
        replace(row, advantages=np.where(row.action_mask, sign, 0.0))
        for row, sign in zip(rows_of(4), signs, strict=True)
    ]
    rows = on_policy(learner, rows)
    before = [scores.mean() for scores in learner.score(rows)]
    learner.update(rows)
    after = [scores.mean() for scores in learner.score(rows)]
    assert [np.sign(b - a) for a, b in zip(before, after, strict=True)] == list(signs)


def test_on_policy_rows_have_ratio_one_no_gap_and_no_distance_to_the_start(make_learner):
    learner = make_learner()
    rows = on_policy(learner, rows_of(6, temperature=0.8))
    first = learner.update(rows, policy_version=1)
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert first["gap/max"] < 1e-4
    assert first["gap/tokens"] == first["data/trained_tokens"] == sum(r.action_mask.sum() for r in rows)
    assert first["policy/kl_to_start"] == pytest.approx(0.0, abs=1e-7)
    assert first["policy/clip_low"] == first["policy/clip_high"] == 0.0
    assert 0.0 < first["policy/entropy"] < math.log(320)
    # The loss at ratio 1 is -sum w A.
    expected = -sum(r.loss_weight * r.advantages[r.action_mask].sum() for r in rows)
    assert first["loss/total"] == pytest.approx(expected, abs=1e-5)
    second = learner.update(rows, policy_version=2)
    assert second["policy/kl_to_start"] > 1e-6
    assert math.isnan(second["gap/mean"]) and second["gap/tokens"] == 0
    assert second["data/staleness_max"] == 1.0


def test_the_gap_shows_how_far_the_engine_was_off(make_learner):
    learner = make_learner()
    rows = [
        replace(row, behavior_logprobs=row.behavior_logprobs - np.float32(0.25))
        for row in on_policy(learner, rows_of(4))
    ]
    metrics = learner.update(rows)
    assert metrics["gap/mean"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["gap/max"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["policy/sample_share"] == pytest.approx(1.0, abs=1e-6)  # all ratios are alike


def test_the_sample_share_shows_how_many_tokens_carry_the_weight(make_learner):
    learner = make_learner()
    first, *others = on_policy(learner, rows_of(4))
    rare = replace(first, behavior_logprobs=first.behavior_logprobs - np.float32(math.log(9)))
    metrics = learner.update([rare, *others], policy_version=3)
    many, few = (float(sum(row.action_mask.sum() for row in some)) for some in (others, [first]))
    # ratios 9 and 1: (9 few + many)^2 / ((few + many) (81 few + many)), also of tokens of other versions
    expected = (9 * few + many) ** 2 / ((few + many) * (81 * few + many))
    assert metrics["policy/sample_share"] == pytest.approx(expected, rel=1e-4)
    assert math.isnan(metrics["gap/mean"])


def test_cutting_a_step_into_microbatches_gives_the_same_gradient_in_float64():
    rows = rows_of(6)
    gradients = []
    for limit in (1, 60, 10**6):
        model = double_model()
        for batch in pack(rows, max_tokens_per_batch=limit, pad_token_id=0):
            stats = target_stats(model, batch, compute_dtype=torch.float32, head=HeadForm())
            mask = batch.target_mask_BT
            loss, _ = ppo_clip_loss(
                stats.logprobs_M,
                batch.behavior_logprobs_BT[mask].double(),
                batch.advantages_BT[mask].double(),
                mask[mask],
                batch.weights_BT[mask].double(),
            )
            torch.autograd.backward(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 0
    assert torch.allclose(gradients[0], gradients[2], rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradients[1], gradients[2], rtol=1e-9, atol=1e-12)


def test_the_selected_head_gives_the_gradient_of_full_logits():
    (batch,) = pack(rows_of(4), max_tokens_per_batch=10**6, pad_token_id=0)
    mask = batch.target_mask_BT
    gradients = []
    for head in (HeadForm(), None):
        model = double_model()
        stats = target_stats(model, batch, compute_dtype=torch.float32, head=head)
        torch.autograd.backward(bc_loss(stats.logprobs_M, mask[mask], batch.weights_BT[mask]))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_microbatch_size_changes_no_update(make_learner):
    rows = rows_of(6)
    results = []
    for limit in (20, 10**6):
        learner = make_learner(max_tokens_per_microbatch=limit, kl_coef=0.1, entropy_coef=0.01)
        metrics = learner.update(rows)
        results.append((metrics, weights_of(learner)))
    for name in ("loss/total", "grad/norm", "policy/entropy", "gap/mean", "policy/kl_behavior"):
        assert results[0][0][name] == pytest.approx(results[1][0][name], rel=1e-4, abs=1e-6), name
    for name, value in results[0][1].items():
        assert torch.allclose(value, results[1][1][name], atol=1e-5), name


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 5e-3},
        {"betas": (0.5, 0.9)},
        {"weight_decay": 0.5},
        {"max_grad_norm": 1e-3},
        {"warmup_updates": 10},
        {"objective": "bc"},
        {"clip_low": 0.9},
        {"clip_high": 3.0},
        {"dual_clip": None},
        {"entropy_coef": 0.5},
        {"kl_coef": 5.0},
        {"epochs_per_update": 2},
        {"minibatches_per_update": 3},
        {"decay_updates": 2},
        {"dtype": "bfloat16"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_setting_does_something(make_learner, settings):
    base, changed = make_learner(), make_learner(**settings)
    rows = on_policy(base, rows_of(6))
    rng = np.random.default_rng(0)
    # Ratios far from 1 on both sides, so that every bound has something to hold.
    noise = [rng.normal(0.0, 2.0, len(row.token_ids)).astype(np.float32) for row in rows]
    rows = [replace(r, behavior_logprobs=r.behavior_logprobs + n) for r, n in zip(rows, noise, strict=True)]
    for _ in range(2):
        base.update(rows)
        changed.update(rows)
    assert not same(weights_of(base), weights_of(changed))


def test_an_update_takes_epochs_times_minibatches_optimizer_steps(make_learner):
    learner = make_learner(epochs_per_update=2, minibatches_per_update=3)
    metrics = learner.update(rows_of(6))
    assert (learner.updates, learner.optimizer_steps) == (1, 6)
    assert metrics["data/rows"] == 6


def test_the_learning_rate_falls_linearly_to_a_tenth(make_learner):
    learner = make_learner(lr=1e-3, decay_updates=4)
    rates = [learner.update(rows_of(3))["optimizer/lr"] for _ in range(6)]
    # 1 - 0.9 * u / 4 for u = 0, 1, 2, 3, then a tenth
    assert rates == pytest.approx([1e-3, 0.775e-3, 0.55e-3, 0.325e-3, 1e-4, 1e-4])


def test_a_group_is_never_split_over_minibatches(make_learner):
    rows = [replace(row, group_id="one") for row in rows_of(6)]
    learner = make_learner(epochs_per_update=2, minibatches_per_update=3)
    learner.update(rows)
    assert learner.optimizer_steps == 2  # one group: one step a pass, however many minibatches are asked for
    mixed = [replace(row, group_id=f"g{i % 2}") for i, row in enumerate(rows_of(6))]
    assert [[row.group_id for row in group] for group in whole_groups(mixed)] == [["g0"] * 3, ["g1"] * 3]


def test_what_all_members_of_a_group_share_does_not_move_under_token_mean():
    """Shared tokens get the sum of their group's advantages times one weight: exactly 0."""
    rows = [
        replace(row, group_id="g", advantages=np.where(row.action_mask, advantage, 0.0))
        for row, advantage in zip(rows_of(4), (1.5, -0.5, -0.5, -0.5), strict=True)
    ]
    alike = weigh(rows, "token-mean")
    assert sum(row.advantages[row.action_mask][0] * row.loss_weight for row in alike) == pytest.approx(0.0)
    by_rollout = weigh(rows, "rollout-token-mean")
    assert abs(sum(row.advantages[row.action_mask][0] * row.loss_weight for row in by_rollout)) > 1e-3


def test_warmup_counts_updates_not_optimizer_steps(make_learner):
    learner = make_learner(lr=1e-3, warmup_updates=4, minibatches_per_update=3)
    rates = [learner.update(rows_of(6))["optimizer/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_a_resumed_learner_continues_bit_for_bit(make_learner, tmp_path):
    settings = {"minibatches_per_update": 2, "epochs_per_update": 2, "weight_decay": 0.1, "warmup_updates": 3}
    batches = [[make_row(10 * n + i, tokens=15 + i) for i in range(5)] for n in range(4)]
    straight = make_learner(**settings)
    expected = [straight.update(rows) for rows in batches]

    first = make_learner(**settings)
    for rows in batches[:2]:
        first.update(rows)
    first.save(tmp_path, record={"consumed": [1, 2]})

    second = make_learner(**settings)
    second.update(batches[3])  # whatever it did before is gone after the load
    newest = latest(tmp_path)
    assert newest is not None
    assert second.load(newest) == {"consumed": [1, 2]}
    resumed = [second.update(rows) for rows in batches[2:]]

    assert (second.updates, second.optimizer_steps) == (straight.updates, straight.optimizer_steps)
    assert same(weights_of(straight), weights_of(second))
    for a, b in zip(expected[2:], resumed, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith("time/")} == {
            k: v for k, v in b.items() if not k.startswith("time/")
        }


def test_a_checkpoint_of_another_model_is_refused(make_learner, tmp_path):
    other = make_policy(tmp_path / "other", hidden=64)
    folder = make_learner(model_path=str(other)).save(tmp_path / "checkpoints", record=None)
    learner = make_learner()
    before = weights_of(learner)
    with pytest.raises(PolicyError, match="the model needs"):
        learner.load(folder)
    assert same(before, weights_of(learner))


def test_hopeless_rows_change_nothing(make_learner):
    learner = make_learner()
    before = weights_of(learner)
    equal = [replace(row, advantages=np.zeros(len(row.token_ids))) for row in rows_of(3)]
    with pytest.raises(EmptyBatchError, match="none of 3 rows"):
        learner.update(equal)
    text = [
        replace(row, behavior_logprobs=np.full(len(row.token_ids), np.nan, np.float32)) for row in rows_of(3)
    ]
    with pytest.raises(GradeError, match="no behaviour logprob"):
        learner.update(text)
    with pytest.raises(PolicyError, match=r"knows 0\.\.319"):
        learner.update([make_row(1, vocab=10**6)])
    assert same(before, weights_of(learner)) and learner.updates == 0


def test_a_step_with_a_broken_gradient_is_not_taken(make_learner):
    learner = make_learner()
    before = weights_of(learner)
    rows = [replace(row, advantages=row.advantages * 1e38, loss_weight=1e30) for row in rows_of(3)]
    with pytest.raises(PolicyError, match=r"gradient norm is .* the step was not taken"):
        learner.update(rows)
    assert same(before, weights_of(learner))
    learner.update(rows_of(3))  # and nothing of it is left behind
    fresh = make_learner()
    fresh.update(rows_of(3))
    assert same(weights_of(fresh), weights_of(learner))


def test_cloning_learns_rows_by_heart_and_reports_progress(make_learner):
    learner = make_learner(lr=1e-2, seed=3)
    rows = [
        replace(row, behavior_logprobs=np.full(24, np.nan, np.float32)) for row in map(make_row, range(6))
    ]
    before = np.mean(np.concatenate(learner.score(rows)))
    seen: list[tuple[int, float]] = []
    metrics = learner.fit_bc(
        rows,
        steps=120,
        batch_rows=3,
        warmup_steps=5,
        progress=lambda step, m: seen.append((step, m["loss/bc"])),
    )
    after = np.mean(np.concatenate(learner.score(rows)))
    assert before < -4.0 and after > -0.3
    assert [step for step, _ in seen] == list(range(1, 121))
    assert metrics["loss/bc"] == pytest.approx(np.mean([loss for _, loss in seen[-12:]]))
    assert metrics["data/trained_tokens"] == 60 * sum(row.action_mask.sum() for row in rows)
    assert learner.optimizer_steps == 120 and learner.updates == 0


def test_cloning_does_not_depend_on_the_scale_of_the_weights(make_learner):
    losses = []
    for scale in (1.0, 1e-3):
        learner = make_learner()
        rows = [replace(row, loss_weight=row.loss_weight * scale) for row in rows_of(4)]
        losses.append(learner.fit_bc(rows, steps=5, batch_rows=2, warmup_steps=1)["loss/bc"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_schedules_rise_and_fall_where_they_should():
    rates = [scheduled_lr(1.0, s, 10, schedule="cosine", warmup_steps=2) for s in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[6] == pytest.approx(0.5) and rates[9] < 0.05
    assert scheduled_lr(1.0, 6, 10, schedule="linear", warmup_steps=2) == pytest.approx(0.5)
    assert scheduled_lr(1.0, 9, 10, schedule="constant", warmup_steps=2) == 1.0
    with pytest.raises(ConfigError, match="cosine, linear, constant"):
        scheduled_lr(1.0, 0, 10, schedule="step", warmup_steps=0)


def test_exports_hold_the_trained_weights_and_the_starting_tokenizer(policy, make_learner, tmp_path):
    learner = make_learner()
    learner.update(rows_of(4))
    learner.export_weights(tmp_path / "out" / "weights.safetensors")
    tensors = load_file(tmp_path / "out" / "weights.safetensors")
    assert same(weights_of(learner), tensors)
    for _ in range(2):  # the second time the folder exists
        learner.export_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same(dict(model.named_parameters()), weights_of(learner))
    messages = [{"role": "user", "content": "hi"}]
    templates = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
        for folder in (policy, tmp_path / "model")
    ]
    assert templates[0] == templates[1]
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]
    assert os.listdir(tmp_path / "out") == ["weights.safetensors"]


def test_bfloat16_exports_bfloat16_over_float32_weights(make_learner, tmp_path):
    learner = make_learner(dtype="bfloat16")
    learner.update(rows_of(4))
    learner.export_model(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in weights_of(learner).values()} == {torch.float32}


def break_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))


def add_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def drop_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_config, "has no config.json"),
        (break_config_json, "can't be loaded"),
        (truncate_weights, "can't be loaded"),
        (remove_weights, "can't be loaded"),
        (change_shape, "can't be loaded|another shape"),
        (add_layer, "no weights for"),
        (drop_layer, "unknown weights"),
    ],
)
def test_a_broken_model_folder_is_one_line(policy, tmp_path, damage, reason):
    folder = tmp_path / "broken"
    shutil.copytree(policy, folder)
    damage(folder)
    with pytest.raises(PolicyError, match=reason) as caught:
        Learner(LearnerConfig(model_path=str(folder)))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_model_path_must_be_given():
    with pytest.raises(PolicyError, match=r"learner\.model_path is empty"):
        Learner(LearnerConfig())


def test_settings_out_of_range_are_refused(policy):
    for name, value in (
        ("lr", 0.0),
        ("dtype", "float8"),
        ("objective", "ppp"),
        ("clip_low", 1.5),
        ("dual_clip", 0.5),
        ("epochs_per_update", 0),
    ):
        with pytest.raises(ConfigError, match=rf"learner\.{name} is {value!r}"):
            LearnerConfig(**{"model_path": "m", name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"learner\.device is 'cuda:99'"):
        Learner(LearnerConfig(model_path=str(policy), device="cuda:99"))
