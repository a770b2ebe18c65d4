from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.small_policy import make_row

from spangrad.errors import CreditError, EmptyBatchError, GradeError, PolicyError
from spangrad.trainer.learning.packing import bucketed_batches, pack, trimmed_length
from spangrad.trainer.learning.selection import check_vocabulary, data_metrics, select_rows


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    limit=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_packing_keeps_every_trained_token_exactly_once(lengths, limit, seed):
    rows = [make_row(seed + i, tokens=length) for i, length in enumerate(lengths)]
    batches = pack(rows, max_tokens_per_batch=limit, pad_token_id=0)
    seen: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        assert batch.input_ids_BT.numel() <= limit or len(batch.row_indices) == 1
        for b, index in enumerate(batch.row_indices):
            row = rows[index]
            for t in torch.nonzero(batch.target_mask_BT[b]).flatten().tolist():
                seen[index, t + 1] += 1
                assert batch.input_ids_BT[b, : t + 1].tolist() == row.token_ids[: t + 1].tolist()
                assert batch.target_ids_BT[b, t] == row.token_ids[t + 1]
                assert batch.behavior_logprobs_BT[b, t] == row.behavior_logprobs[t + 1]
                assert batch.advantages_BT[b, t] == np.float32(row.advantages[t + 1])
                assert batch.versions_BT[b, t] == row.policy_versions[t + 1]
                assert batch.weights_BT[b, t] == np.float32(row.loss_weight)
    expected = {(i, int(t)) for i, row in enumerate(rows) for t in np.flatnonzero(row.action_mask)}
    assert seen == Counter(dict.fromkeys(expected, 1))


def test_packing_is_deterministic_and_pads_on_the_right_only():
    rows = [make_row(i, tokens=5 + i) for i in range(6)]
    first, second = (pack(rows, max_tokens_per_batch=40, pad_token_id=7) for _ in range(2))
    assert [b.row_indices for b in first] == [b.row_indices for b in second]
    for batch in first:
        lengths = [trimmed_length(rows[i]) - 1 for i in batch.row_indices]
        assert lengths == sorted(lengths, reverse=True)
        for b, length in enumerate(lengths):
            assert batch.attention_mask_BT[b].tolist() == [t < length for t in range(max(lengths))]
            assert (batch.input_ids_BT[b, length:] == 7).all()


def test_tokens_behind_the_last_trained_one_are_not_sent():
    row = make_row(1, tokens=30)
    row = replace(row, action_mask=np.arange(30) == 9)
    (batch,) = pack([row], max_tokens_per_batch=1000, pad_token_id=0)
    assert batch.input_ids_BT.shape == (1, 9)


def test_greedy_rows_are_scored_at_temperature_one():
    (batch,) = pack([make_row(1, temperature=0.0)], max_tokens_per_batch=1000, pad_token_id=0)
    assert (batch.temperatures_BT == 1.0).all()


def test_rows_that_cannot_train_are_left_out_and_counted():
    good = make_row(0)
    no_tokens = replace(make_row(1), action_mask=np.zeros(24, dtype=np.bool_))
    no_signal = replace(make_row(2), advantages=np.zeros(24))
    no_weight = replace(make_row(3), loss_weight=0.0)
    unassigned = replace(make_row(4), advantages=np.full(24, np.nan))
    rows = [good, no_tokens, no_signal, no_weight, unassigned]
    selection = select_rows(rows, objective="ppo", needs_all_tokens=False)
    assert selection.rows == (good,)
    assert (selection.rows_without_tokens, selection.rows_without_signal) == (1, 3)
    assert selection.tokens_without_advantage == int(unassigned.action_mask.sum())
    assert selection.dropped_tokens == {
        "no advantage other than 0": int(no_signal.action_mask.sum()),
        "loss weight is 0": int(no_weight.action_mask.sum()),
        "advantage not assigned": int(unassigned.action_mask.sum()),
    }
    # A KL or entropy term trains on tokens without an advantage too, on unassigned ones never.
    kept = select_rows(rows, objective="ppo", needs_all_tokens=True).rows
    assert [row.rollout_id for row in kept] == ["r0", "r2"]
    cloned = select_rows(rows, objective="bc", needs_all_tokens=False).rows
    assert [row.rollout_id for row in cloned] == ["r0", "r2", "r4"]


def test_a_single_unassigned_advantage_takes_out_its_token_only():
    row = make_row(0)
    advantages = row.advantages.copy()
    advantages[3] = np.nan
    (kept,) = select_rows([replace(row, advantages=advantages)], objective="ppo", needs_all_tokens=False).rows
    assert not kept.action_mask[3]
    assert int(kept.action_mask.sum()) == int(row.action_mask.sum()) - 1


def test_a_hopeless_batch_is_an_error_with_counts():
    rows = [replace(make_row(i), advantages=np.zeros(24)) for i in range(3)]
    with pytest.raises(EmptyBatchError, match=r"none of 3 rows.*0 have no trained token, 3 have zero weight"):
        select_rows(rows, objective="ppo", needs_all_tokens=False)
    with pytest.raises(EmptyBatchError, match="none of 0 rows"):
        select_rows([], objective="bc", needs_all_tokens=False)


def test_ppo_refuses_rows_that_lack_what_it_needs():
    text = replace(make_row(0, grade="text"), behavior_logprobs=np.full(24, np.nan, dtype=np.float32))
    with pytest.raises(GradeError, match=r"'r0'.*grade 'text'.*no behaviour logprob.*objective 'bc'"):
        select_rows([text], objective="ppo", needs_all_tokens=False)
    assert select_rows([text], objective="bc", needs_all_tokens=False).rows == (text,)
    with pytest.raises(GradeError, match=r"temperature 0\.0"):
        select_rows([make_row(0, temperature=0.0)], objective="ppo", needs_all_tokens=False)


def test_rows_that_contradict_themselves_are_refused():
    row = make_row(0)
    first = row.action_mask.copy()
    first[0] = True
    for bad, message in (
        (replace(row, advantages=row.advantages[:-1]), "advantages has 23 values, token_ids has 24"),
        (replace(row, action_mask=first), "nothing precedes it"),
        (replace(row, loss_weight=float("nan")), "loss_weight is nan"),
        (replace(row, advantages=np.full(24, np.inf)), "infinite"),
    ):
        with pytest.raises(CreditError, match=message):
            select_rows([bad], objective="ppo", needs_all_tokens=False)
    with pytest.raises(PolicyError, match=r"knows 0\.\.9"):
        check_vocabulary([row], size=10, model="policy")


def test_data_metrics_report_staleness_against_the_given_version():
    selection = select_rows([make_row(0), make_row(1)], objective="ppo", needs_all_tokens=False)
    metrics = data_metrics(selection, policy_version=3)
    assert metrics["data/rows"] == 2
    assert metrics["data/trained_tokens"] == sum(row.action_mask.sum() for row in selection.rows)
    assert (metrics["data/staleness_mean"], metrics["data/staleness_max"]) == (2.0, 2.0)


def test_bucketed_batches_visit_every_row_once_a_pass_in_similar_lengths():
    lengths = np.random.default_rng(0).integers(10, 300, 64)
    batches = list(bucketed_batches(lengths, batch_rows=8, steps=16, seed=5))
    again = list(bucketed_batches(lengths, batch_rows=8, steps=16, seed=5))
    assert len(batches) == 16
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    for one_pass in (batches[:8], batches[8:]):
        assert sorted(np.concatenate(one_pass).tolist()) == list(range(64))
    padded = sum(len(batch) * lengths[batch].max() for batch in batches[:8])
    assert padded < 1.25 * lengths.sum()
