from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.forking_rows import forking_rows, forks
from tests.trainer.small_policy import make_model, make_row
from torch import Tensor
from transformers import PreTrainedModel

from spangrad.credit.transition import Transition
from spangrad.trainer.learning.layouts import lay_out, padded_tokens
from spangrad.trainer.learning.losses import ppo_clip_loss
from spangrad.trainer.learning.model import target_stats
from spangrad.trainer.learning.output_head import HeadForm
from spangrad.trainer.learning.packable import packable
from spangrad.trainer.learning.packing import Batch, pack, trimmed_length


def a_model(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model: Any = make_model()
    model = model.to(dtype).eval()
    assert packable(model).masking == "segments"
    return cast(PreTrainedModel, model)


torch.set_num_threads(1)
MODEL = a_model()


def laid_out(rows: list[Transition], layout: str = "tree", limit: int = 10**6, **settings) -> list[Batch]:
    return lay_out(rows, layout=layout, max_tokens_per_batch=limit, pad_token_id=0, **settings)


def one_by_one(rows: list[Transition]) -> list[Batch]:
    return pack(rows, max_tokens_per_batch=1, pad_token_id=0)


def gradient(batches: list[Batch], model: PreTrainedModel = MODEL) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the policy term, row weights and temperatures included."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=model.dtype)
    for batch in batches:
        stats = target_stats(model, batch, compute_dtype=torch.float32, head=HeadForm())
        mask = batch.target_mask_BT
        loss, _ = ppo_clip_loss(
            stats.logprobs_M,
            batch.behavior_logprobs_BT[mask].to(model.dtype),
            batch.advantages_BT[mask].to(model.dtype),
            mask[mask],
            batch.weights_BT[mask].to(model.dtype),
        )
        torch.autograd.backward(loss)
        total += loss.detach()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def logprobs(rows: list[Transition], batches: list[Batch]) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in rows]
    with torch.no_grad():
        for batch in batches:
            stats = target_stats(MODEL, batch, compute_dtype=torch.float32, head=HeadForm())
            counts = batch.target_mask_BT.sum(dim=1).tolist()
            for index, piece in zip(batch.row_indices, stats.logprobs_M.split(counts), strict=True):
                found[index] = piece.tolist()
    return found


@settings(max_examples=15)
@given(specification=forks, seed=st.integers(0, 1000), limit=st.sampled_from([1, 12, 25, 10**6]))
@pytest.mark.parametrize("layout", ["tree", "varlen", "auto"])
def test_every_layout_has_the_gradient_of_separate_rows(layout, specification, seed, limit):
    rows = [row for row in forking_rows(specification, seed=seed) if row.action_mask.any()]
    if not rows:
        return
    expected, of_rows = gradient(one_by_one(rows))
    found, of_packs = gradient(laid_out(rows, layout, limit))
    # transformers' norms and rotations compute in float32 whatever the weights are.
    assert float(found) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)
    assert float((of_packs - of_rows).abs().max()) <= 1e-6 * float(of_rows.abs().max())


@pytest.mark.parametrize("masking", ["segments", "mask"])
def test_float32_gradients_differ_by_rounding_alone(masking):
    model = a_model(torch.float32)
    rows = forking_rows([(None, 0, 200), (0, 0.7, 50), (1, 0.9, 60), (0, 0.4, 80), (None, 0, 90)])
    _, of_rows = gradient(one_by_one(rows), model)
    for limit in (10**6, 300):
        _, of_packs = gradient(laid_out(rows, limit=limit, masking=masking), model)
        assert float((of_packs - of_rows).abs().max()) <= 1e-5 * float(of_rows.abs().max())


@settings(max_examples=40)
@given(specification=forks, seed=st.integers(0, 1000), limit=st.integers(1, 60))
def test_a_token_sees_its_own_row_alone_and_every_target_is_there_once(specification, seed, limit):
    rows = forking_rows(specification, seed=seed)
    seen: Counter[tuple[int, int]] = Counter()
    for batch in laid_out(rows, limit=limit):
        assert batch.pack is not None
        ids, sources = batch.input_ids_BT[0], batch.pack.sources_M.split(batch.target_mask_BT.sum(1).tolist())
        sees_PP, by_segment_PP = batch.pack.tree.mask_PP(), torch.zeros(len(ids), len(ids), dtype=torch.bool)
        for segment in batch.pack.tree.segments:
            for start, stop in segment.context:
                by_segment_PP[segment.start : segment.stop, start:stop] = True
            own = slice(segment.start, segment.stop)
            by_segment_PP[own, own] = torch.ones_like(by_segment_PP[own, own]).tril()
        assert torch.equal(sees_PP, by_segment_PP)
        for b, (index, places) in enumerate(zip(batch.row_indices, sources, strict=True)):
            row, mask = rows[index], batch.target_mask_BT[b]
            targets = np.flatnonzero(row.action_mask)
            seen.update((index, int(t)) for t in targets)
            for t, place in zip(targets, places, strict=True):
                path = torch.nonzero(sees_PP[place]).flatten()  # in depth-first order: the row up to here
                assert ids[path].tolist() == row.token_ids[:t].tolist()
                assert batch.pack.position_ids_BT[0, path].tolist() == list(range(t))
            assert batch.target_ids_BT[b][mask].tolist() == row.token_ids[targets].tolist()
            assert np.array_equal(batch.advantages_BT[b][mask], row.advantages[targets].astype(np.float32))
            assert (batch.temperatures_BT[b] == row.temperature).all()
        assert batch.forward_tokens <= max(limit, *(trimmed_length(rows[i]) - 1 for i in batch.row_indices))
    assert seen == Counter(
        {(i, int(t)): 1 for i, row in enumerate(rows) for t in np.flatnonzero(row.action_mask)}
    )


def trained(ids: list[int], *places: int, **changes) -> Transition:
    """A row that trains these places."""
    row = make_row(len(ids), tokens=len(ids))
    mask = np.isin(np.arange(len(ids)), places)
    return replace(row, token_ids=np.array(ids, dtype=np.int32), action_mask=mask, **changes)


def test_the_last_token_before_a_fork_predicts_the_first_token_of_every_branch():
    rows = [trained([5, 6, 7, 8, 9], 3, 4), trained([5, 6, 7, 4, 3], 3, 4)]
    (batch,) = laid_out(rows)
    assert batch.pack is not None
    assert batch.row_indices == (1, 0)  # in order of their tokens
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 4, 8]]
    assert batch.pack.position_ids_BT.tolist() == [[0, 1, 2, 3, 3]]
    assert batch.pack.sources_M.tolist() == [2, 3, 2, 4]
    assert batch.target_ids_BT.tolist() == [[4, 3], [8, 9]]
    assert batch.pack.tree.subtree_end_P.tolist() == [5, 5, 5, 4, 5]
    assert (batch.forward_tokens, batch.shared_tokens) == (5, 3)


def test_a_token_that_one_of_two_rows_trains_is_trained_once():
    rows = [trained([5, 6, 7, 8, 9], 1, 4), trained([5, 6, 7, 4, 3], 3)]
    (batch,) = laid_out(rows)
    assert batch.trained_tokens == 3
    assert batch.pack is not None
    assert batch.pack.sources_M.tolist() == [2, 0, 3]  # 4 after 7; 6 after 5, and 9 after 8


def test_a_tree_beyond_the_budget_is_cut_and_repeats_its_prefix():
    rows = [trained([5, 6, 7, 3, 9], 4), trained([5, 6, 7, 4, 9], 4), trained([5, 6, 7, 8, 9], 4)]
    first, second = laid_out(rows, limit=5)
    assert first.input_ids_BT.tolist() == [[5, 6, 7, 3, 4]]
    assert second.input_ids_BT.tolist() == [[5, 6, 7, 8]]


def test_no_tree_sees_anything_of_another():
    rows = forking_rows([(None, 0, 9), (0, 0.5, 8), (None, 0, 9), (2, 0.5, 8)])
    for number, row in enumerate(rows):
        row.token_ids[0] = 3 + number // 2
    changed = [replace(row, token_ids=row.token_ids + 20 * (i // 2)) for i, row in enumerate(rows)]
    before, after = (logprobs(given, laid_out(given)) for given in (rows, changed))
    assert before[:2] == after[:2]
    assert before[2:] != after[2:]


def test_what_is_not_trained_changes_no_loss_and_no_gradient():
    rows = forking_rows([(None, 0, 20), (0, 0.6, 8), (0, 0.3, 12)])
    spoiled = []
    for row in rows:
        junk = np.where(row.action_mask, 0.0, np.nan)
        behind = np.arange(len(row.token_ids)) >= trimmed_length(row)
        spoiled.append(
            replace(
                row,
                token_ids=np.where(behind, 9, row.token_ids).astype(np.int32),
                advantages=row.advantages + junk,
                behavior_logprobs=(row.behavior_logprobs + junk).astype(np.float32),
            )
        )
    (loss, of_rows), (same_loss, of_spoiled) = (gradient(laid_out(given)) for given in (rows, spoiled))
    assert loss == same_loss
    assert torch.equal(of_rows, of_spoiled)


def test_the_layout_is_chosen_by_the_tokens_that_each_computes():
    sharing = [make_row(1, tokens=40), replace(make_row(1, tokens=40), rollout_id="other")]
    alike = [trained([*range(3 + number, 43 + number)], 39) for number in range(4)]
    ragged = [make_row(seed, tokens=tokens) for seed, tokens in enumerate((90, 20, 22, 24))]
    for rows, layout in ((sharing, "tree"), (alike, "padded"), (ragged, "varlen")):
        assert {batch.layout for batch in laid_out(rows, "auto")} == {layout}
        for forced in ("tree", "varlen", "padded"):
            assert {batch.layout for batch in laid_out(rows, forced)} == {forced}
    assert laid_out([], "auto") == []


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=9), limit=st.integers(1, 99))
def test_padding_is_counted_as_it_is_packed(lengths, limit):
    rows = [make_row(seed, tokens=tokens) for seed, tokens in enumerate(lengths)]
    inputs = np.array([trimmed_length(row) - 1 for row in rows])
    batches = pack(rows, max_tokens_per_batch=limit, pad_token_id=0)
    assert padded_tokens(inputs, limit) == sum(batch.input_ids_BT.numel() for batch in batches)


def test_flex_attention_gets_the_same_mask():
    (batch,) = laid_out(forking_rows([(None, 0, 9), (0, 0.5, 8), (0, 0.2, 3), (None, 0, 4)]))
    assert batch.pack is not None
    tree, size = batch.pack.tree, batch.forward_tokens
    seen = torch.nn.attention.flex_attention.create_mask(
        tree.block_mask().mask_mod, None, None, size, size, device="cpu"
    )
    assert torch.equal(seen[0, 0], tree.mask_PP())
