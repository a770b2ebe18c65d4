"""What is left out, how much the rest weighs, and that every objective goes with every correction."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import corrections as reference
from tests.trainer.small_policy import make_policy, make_row
from torch import Tensor

from spangrad.credit.aggregation import weigh
from spangrad.credit.samples import samples_of
from spangrad.credit.transition import CallSegment, Transition
from spangrad.errors import ConfigError, EmptyBatchError
from spangrad.trainer.crediting import as_trained
from spangrad.trainer.learning.corrections import CorrectionConfig, correct
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import TargetStats
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.objective import batch_loss
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.learning.packing import pack
from spangrad.trainer.update_metrics import checked_books

GOLDEN = (0.4, 0.9, 1.1, 2.5, 6.0)
RATIO_OBJECTIVES = sorted(name for name, objective in OBJECTIVES.items() if objective.uses_ratio)


def row_of(
    w: Sequence[float], *, advantages: Sequence[float] | float = 1.0, calls: Sequence[int] = (), name="r"
):
    """A row whose trained tokens have these ratios, in calls of so many tokens; its logprobs before."""
    count = len(w)
    stops = 1 + np.cumsum(calls or [count])
    segments = [
        CallSegment(f"{name}{stop}", "s", k, int(stop - size), int(stop))
        for k, (size, stop) in enumerate(zip(calls or [count], stops, strict=True))
    ]
    row = Transition(
        rollout_id=name,
        attempt=0,
        group_id="g",
        segments=segments,
        token_ids=np.arange(count + 1, dtype=np.int32),
        action_mask=np.arange(count + 1) > 0,
        behavior_logprobs=np.array([np.nan, *[-9.0] * count], dtype=np.float32),
        policy_versions=np.full(count + 1, 3, dtype=np.int32),
        advantages=np.array([0.0, *np.broadcast_to(advantages, count)]),
        loss_weight=0.0,
        grade="exact",
    )
    return row, -9.0 + np.log(np.asarray(w))


def corrected(rows: Sequence[tuple[Transition, Any]], sequence: Any = "call", others=(), **rules: Any):
    config = CorrectionConfig(**rules)
    weighed = weigh([*(row for row, _ in rows), *others], "token-mean")
    mine, silent = weighed[: len(rows)], weighed[len(rows) :]
    return correct(mine, [scores for _, scores in rows], config, sequence=sequence, others=silent)


def test_truncated_weights_and_icepop_give_the_golden_numbers():
    (tis,), metrics = corrected([row_of(GOLDEN)], proximal=True, token_tis=2.0)
    assert tis.advantages[1:] == pytest.approx([0.4, 0.9, 1.1, 2.0, 2.0])
    assert metrics["correction/capped"] == 0.4 and metrics["correction/weight_mean"] == pytest.approx(6.4 / 5)
    (icepop,), metrics = corrected([row_of(GOLDEN)], proximal=True, token_tis=5.0, token_band=(0.5, 5.0))
    assert np.where(icepop.action_mask, icepop.advantages, 0.0)[1:] == pytest.approx([0, 0.9, 1.1, 2.5, 0])
    assert metrics["correction/token_band"] == 0.4 and metrics["correction/dropped_tokens"] == 2


def test_a_masked_token_leaves_the_denominator():
    other, _ = row_of([1.0] * 5, advantages=0.0, name="silent")
    (icepop,), _ = corrected([row_of(GOLDEN)], token_band=(0.5, 5.0), others=[other])
    assert icepop.loss_weight == pytest.approx(1 / 8)  # 10 tokens without 2, where it was 1 / 10


def test_sequences_give_the_golden_product_and_mean():
    # product 5.94, geometric mean 1.428096; a second sequence holds the batch together
    good = row_of([1.0, 1.0], name="q")
    for rules, stays in (
        ({"sequence_max": 5.93}, False),
        ({"sequence_max": 5.95}, True),
        ({"geometric_band": (0.9, 1.42809)}, False),
        ({"geometric_band": (0.9, 1.42810)}, True),
    ):
        left, metrics = corrected([row_of(GOLDEN), good], **rules)
        assert [row.rollout_id for row in left] == (["r", "q"] if stays else ["q"])
        assert metrics["correction/dropped_rows"] == (0 if stays else 1)
    (row, _), _ = corrected([row_of(GOLDEN), good], proximal=True, sequence_tis=10.0)
    assert row.advantages[1:] == pytest.approx([5.94] * 5)
    (row, _), _ = corrected([row_of(GOLDEN), good], proximal=True, sequence_tis=3.0)
    assert row.advantages[1:] == pytest.approx([3.0] * 5)


def test_the_second_moment_gives_the_golden_number():
    (row,), metrics = corrected([row_of(GOLDEN)], m2_max=0.5)
    assert metrics["correction/m2"] == pytest.approx(0.981953, abs=1e-6)
    assert row.action_mask.tolist() == [False, True, True, True, True, False]  # .4249 over the first four
    # (.4 + .9 + 1.1 + 2.5)^2 / (4 (.16 + .81 + 1.21 + 6.25))
    assert metrics["correction/sample_share"] == pytest.approx(4.9**2 / 4 / 8.43)


def test_equal_second_moments_leave_together():
    # (log w)^2 is 0, 1, 1: the mean is .5 over two of them and .667 over all
    (row,), _ = corrected([row_of([1.0, math.e, 1 / math.e])], m2_max=0.6)
    assert row.action_mask.tolist() == [False, True, False, False]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(-60, 60), st.sampled_from([-1.0, 0.0, 0.5]), st.booleans()),
        min_size=1,
        max_size=9,
        unique_by=lambda token: abs(token[0]),  # no ties in m2
    ),
    st.sampled_from(
        ["token_band", "geometric_band", "sequence_max", "veto_band", "off_policy_max", "m2_max"]
    ),
)
def test_every_rule_is_the_one_of_its_paper(tokens, rule):
    log_w, advantages, ends = zip(*tokens, strict=True)
    w = [math.exp(each / 17.3) for each in log_w]  # on no bound
    cuts = [k for k in range(1, len(w)) if ends[k]]
    calls = [int(size) for size in np.diff([0, *cuts, len(w)])]
    ids = np.repeat(np.arange(len(calls)), calls).tolist()
    bound = {"sequence_max": 3.0, "off_policy_max": 0.5, "m2_max": 0.8}.get(rule, (0.3, 4.0))
    anchor = row_of([1.0], name="always")
    left, _ = corrected([row_of(w, advantages=advantages, calls=calls), anchor], **{rule: bound})
    found = {row.rollout_id: row for row in left}
    mask = found["r"].action_mask[1:].tolist() if "r" in found else [False] * len(w)
    if rule == "m2_max":  # the anchor's 0 is one of the values
        stays = reference.kept_by_m2([*w, 1.0], bound)[:-1]
    else:
        stays = reference.kept(w, advantages, ids, rule, bound)
    assert mask == stays
    for cap in ({"token_tis": 2.0}, {"sequence_tis": 2.0}):
        (weighed, _), _ = corrected(
            [row_of(w, advantages=advantages, calls=calls), anchor], proximal=True, **cap
        )
        wanted = [
            a * reference.weight(w, ids, k, token=cap.get("token_tis"), sequence=cap.get("sequence_tis"))
            for k, a in enumerate(advantages)
        ]
        assert weighed.advantages[1:] == pytest.approx(wanted, rel=1e-9)


def test_a_row_is_a_sequence_of_its_own_only_where_that_is_asked_for():
    row = row_of([1.0, 1.0, 200.0], calls=[2, 1])
    other = row_of([1.0], name="q")
    (by_call, _), metrics = corrected([row, other], "call", veto_band=(1e-4, 100.0))
    assert by_call.action_mask.tolist() == [False, True, True, False]
    assert metrics["correction/veto_band"] == 0.25
    left, metrics = corrected([row, other], "row", veto_band=(1e-4, 100.0))
    assert [one.rollout_id for one in left] == ["q"] and metrics["correction/veto_band"] == 0.75


def test_rows_of_one_rollout_cut_by_call_are_corrected_alike():
    row, scores = row_of(GOLDEN, calls=[2, 3], advantages=-1.0)
    apart = []
    for k, segment in enumerate(row.segments):
        inside = (np.arange(6) >= segment.start) & (np.arange(6) < segment.stop)
        part = replace(row, segments=[segment], action_mask=inside)
        apart.append((part, scores[:2] if k == 0 else scores[2:]))
    rules = {"proximal": True, "sequence_tis": 10.0, "off_policy_max": 0.1, "veto_band": (0.1, 5.0)}
    other = row_of([1.0], name="q")
    whole, _ = corrected([(row, scores), other], **rules)
    cut, _ = corrected([*apart, other], **rules)
    total = [sum((r.loss_weight * r.advantages * r.action_mask).sum() for r in rows) for rows in (whole, cut)]
    assert total[0] == pytest.approx(total[1])


def test_nothing_left_is_an_error_with_the_shares():
    with pytest.raises(EmptyBatchError, match=r"none of 5 trained tokens \(sequence_max 100%\)"):
        corrected([row_of(GOLDEN)], sequence_max=1.0)


CHANGED: dict[str, dict[str, Any]] = {
    "proximal": {"proximal": True},
    "token_tis": {"proximal": True, "token_tis": 1.05},
    "sequence_tis": {"proximal": True, "sequence_tis": 1.1},
    "token_band": {"token_band": (0.5, 2.0)},
    "geometric_band": {"geometric_band": (0.9, 1.3)},
    "sequence_max": {"sequence_max": 1.5},
    "veto_band": {"veto_band": (0.3, 4.0)},
    "off_policy_max": {"off_policy_max": 0.1},
    "m2_max": {"m2_max": 0.3},
}


def test_every_correction_is_walked():
    assert {field.name for field in fields(CorrectionConfig)} == set(CHANGED)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "policy", hidden=16, layers=1)


@pytest.fixture(scope="module")
def scored(policy: Path) -> tuple[list[Transition], list[Any]]:
    """Rows whose behaviour policy was another one, each call with one advantage; the learner's logprobs."""
    learner = Learner(LearnerConfig(model_path=str(policy), threads=1))
    rows = [make_row(seed, tokens=14 + seed) for seed in range(6)]
    rng = np.random.default_rng(0)
    found = learner.score(rows)
    for k, (row, scores) in enumerate(zip(rows, found, strict=True)):
        behavior = np.full(len(row.token_ids), np.nan, dtype=np.float32)
        behavior[row.action_mask] = scores + rng.normal(0.0, 0.8, len(scores))
        signs = np.where(row.action_mask, (-1.0) ** k, 0.0)
        rows[k] = replace(row, behavior_logprobs=behavior, advantages=signs)
    return weigh(rows, "token-mean"), list(found)


@pytest.fixture(scope="module")
def rows(scored: tuple[list[Transition], list[Any]]) -> list[Transition]:
    return scored[0]


@pytest.fixture(scope="module")
def updated(policy: Path, rows: list[Transition]) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    def update(**settings: Any) -> tuple[Tensor, dict[str, float]]:
        # Two steps, so that a ratio to the policy before the update is not 1 throughout.
        learner = Learner(
            LearnerConfig(model_path=str(policy), threads=1, lr=0.02, epochs_per_update=2, **settings)
        )
        metrics = learner.update(rows, policy_version=1)
        return torch.cat([p.detach().flatten() for p in learner.model.parameters()]), metrics

    return update


def test_a_learner_applies_every_correction(updated):
    base, without = updated()
    for name, rules in CHANGED.items():
        weights, metrics = updated(correction=CorrectionConfig(**rules))
        assert not torch.equal(weights, base), name
        if name == "proximal":
            base = weights
        # The gap is of all tokens, also of those that a rule left out.
        for key in ("gap/mean", "gap/max", "gap/tokens", "policy/sample_share"):
            assert metrics[key] == pytest.approx(without[key], rel=1e-4), (name, key)
        trained, dropped = metrics["data/trained_tokens"], metrics["correction/dropped_tokens"]
        assert trained + dropped == without["data/trained_tokens"]
        assert (dropped > 0) == (f"correction/{name}" in metrics)
        assert metrics.get("dropped/left_out_by_a_correction", 0) == dropped
        checked_books(metrics | {"data/sampled_tokens": without["data/trained_tokens"]}, where="here")
        if name == "token_tis":
            base, _ = updated()


def test_samples_tell_the_tokens_that_were_trained(policy: Path, rows: list[Transition]) -> None:
    rules = CorrectionConfig(**CHANGED["token_band"])
    learner = Learner(LearnerConfig(model_path=str(policy), threads=1, correction=rules))
    metrics = learner.update(rows, policy_version=1)
    samples = as_trained(samples_of(rows, 1), learner.trained_calls())
    assert [one.call_id for one in samples] == [row.segments[0].call_id for row in rows]
    trained = sum(one.trained_tokens for one in samples)
    assert trained == metrics["data/trained_tokens"]
    dropped = sum(int(row.action_mask.sum()) for row in rows) - trained
    assert dropped == sum(value for name, value in metrics.items() if name.startswith("dropped/")) > 0


@pytest.mark.parametrize("objective", RATIO_OBJECTIVES)
def test_every_correction_changes_every_objective_with_a_ratio(scored, objective):
    def gradient(rules: dict[str, Any], policy: Tensor | None = None) -> tuple[dict[str, float], Tensor]:
        """-> row and position -> gradient of each token that is left; and the policy."""
        config = LearnerConfig(objective=objective, correction=CorrectionConfig(**rules))
        left, _ = correct(rows, scores, config.correction, sequence=config.sequence)
        (batch,) = pack(left, max_tokens_per_batch=10**6, pad_token_id=0)
        mask = batch.target_mask_BT
        if policy is None:  # close to what the ratio is taken to: no bound of the objective holds a token
            moved = 1e-4 * torch.sin(batch.target_ids_BT[mask].double())
            policy = batch.behavior_logprobs_BT[mask].double() + moved
        leaf = policy.clone().requires_grad_()
        loss = batch_loss(config, batch, TargetStats(leaf, None), None, Totals())
        names = [
            f"{left[index].rollout_id} {t}"
            for b, index in enumerate(batch.row_indices)
            for t in np.flatnonzero(mask[b].numpy())
        ]
        return dict(zip(names, torch.autograd.grad(loss, leaf)[0].tolist(), strict=True)), policy

    rows, scores = scored
    plain, proximal = gradient({}), gradient({"proximal": True})
    assert gradient({}, proximal[1])[0] != proximal[0]
    for name, rules in CHANGED.items():
        if objective == "gspo" and name == "token_tis":
            with pytest.raises(ConfigError, match="choose sequence_tis, or objective 'gspo_token'"):
                gradient(rules)
        elif name != "proximal":
            assert gradient(rules)[0] != (proximal if "proximal" in rules else plain)[0], name


def test_an_objective_without_a_ratio_refuses_corrections():
    with pytest.raises(ConfigError, match=r"learner\.correction = .* has no effect with objective 'bc'"):
        LearnerConfig(objective="bc", correction=CorrectionConfig(token_band=(0.5, 5.0)))
    assert "sequence" in LearnerConfig(correction=CorrectionConfig(m2_max=1.0)).settings_unused()
    assert LearnerConfig(correction=CorrectionConfig(sequence_max=1.0), sequence="row").sequence == "row"


@pytest.mark.parametrize(
    "settings", [{"kl_coef": 0.1, "kl_estimator": "k3_unbiased"}, {"log_ratio_coef": 0.1}]
)
def test_a_term_that_needs_the_policy_that_sampled_is_refused_where_proximal_replaces_it(settings):
    LearnerConfig(**settings, correction=CorrectionConfig(token_band=(0.5, 5.0)))
    with pytest.raises(ConfigError, match=r"needs the policy that sampled, .* puts .* in its place"):
        LearnerConfig(**settings, correction=CorrectionConfig(proximal=True, token_tis=2.0))


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"token_tis": 2.0}, "token_tis needs proximal"),
        ({"sequence_tis": 2.0}, "sequence_tis needs proximal"),
        ({"proximal": True, "token_tis": 2.0, "sequence_tis": 2.0}, "a token has one weight"),
        ({"proximal": True, "token_tis": 0.0}, r"token_tis is 0\.0, expected more than 0"),
        ({"sequence_max": math.nan}, "sequence_max is nan"),
        ({"off_policy_max": -1.0}, r"off_policy_max is -1\.0"),
        ({"m2_max": 0.0}, r"m2_max is 0\.0"),
        ({"token_band": (5.0, 0.5)}, r"token_band is \(5\.0, 0\.5\), expected two ratios"),
        ({"geometric_band": (0.0, 1.0)}, "geometric_band is"),
        ({"veto_band": (1.0,)}, "veto_band is"),
    ],
)
def test_bounds_out_of_range_are_refused(rules, reason):
    with pytest.raises(ConfigError, match=reason):
        CorrectionConfig(**rules)


def test_untruncated_weights_give_back_the_ratio_to_the_behaviour_policy(policy, rows):
    """pi / mu = (pi / pi_before) (pi_before / mu): at the first step the gradients are the same."""
    found = []
    for correction in (CorrectionConfig(), CorrectionConfig(proximal=True, token_tis=math.inf)):
        learner = Learner(
            LearnerConfig(
                model_path=str(policy), threads=1, objective="importance_sampling", correction=correction
            )
        )
        found.append(learner.update(rows))
    assert found[0]["grad/norm"] == pytest.approx(found[1]["grad/norm"], rel=1e-5)
    assert found[1]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert found[0]["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-2)
