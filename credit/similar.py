"""Anchors of observations that are nearly equal: MinHash finds candidates, their shingles decide.

Near-linear: an observation is compared with those that share a bucket with it, never with all. The pools
depend on the observations and on how often each occurs, not on their order, and not on chance: all
constants are fixed.

No chaining: every member of a pool is similar to the pool's leader itself. (Pools of whatever a chain of
similar pairs connects would be as independent of order, but an agent's observations drift from step to
step, and a chain of small steps makes one state of a whole rollout.)

Knows texts and numbers of groups. Shape letters: U different observations of all groups, B bands of a
signature, K shingles of a text, P pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.gigpo import NO_ANCHOR, pool_ids
from spangrad.credit.groups import Floats, Ints
from spangrad.errors import CreditError

Keys = NDArray[np.uint64]

SHINGLE: Final = 4
"""Characters of a shingle."""
BINS: Final = 128
"""Values of a signature."""
HASH_BITS: Final = 40
"""Of a shingle's hash; the text's number in its chunk stands above them."""
RECALL: Final = 0.99
"""Least probability that two texts, just as similar as is asked for, share a bucket."""
ROUNDS: Final = 256
"""Leaders that an observation is compared with at most, times the bands: what bounds the cost."""
CHUNK: Final = 1 << 19
"""Characters that are worked on at once, few enough for a cache; a group is never cut."""
DEVIATIONS: Final = 3.0
"""So many standard deviations below what is asked for, a signature's estimate is believed."""
_WEIGHTS: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)
_MASK: Final = np.uint64((1 << HASH_BITS) - 1)
_SHIFT: Final = np.uint64(HASH_BITS)


def similar_leaders(
    texts: Sequence[str],
    names: Sequence[str],
    group_ids_U: Ints,
    counts_U: Ints,
    *,
    similarity: float,
) -> Ints:
    """Give every observation the leader of its pool; equal leader = same state.

        sim(x, y) = 2 |X n Y| / (|X| + |Y|),   X: multiset of x's character 4-grams

    In every group, in order of rank (how often it occurs, then name): an observation that no leader has
    taken leads, and takes those without a leader that share a bucket with it and have sim >= `similarity`;
    of several leaders at once the first in rank. Two members of a pool have Jaccard similarities of at least
    2 J - 1, J = similarity / (2 - similarity), as Jaccard distance is a metric.

    Source: MinHash, Broder 1997; one permutation with rotation, Shrivastava and Li 2014, arXiv:1406.4784;
    sim is Dice's coefficient, the counterpart for sets of difflib's `ratio`, which GiGPO's similarity mode
    (arXiv:2505.10978) compares with a cluster's first member, so that its pools depend on the order.

    Args:
        texts: Observations, all different in a group.
        names: A name for each, by which ranks are decided.
        group_ids_U: Group of each; others are never compared.
        counts_U: How often each occurs.
        similarity: 0.5 to 1.

    Returns:
        Position of the leader of each, shape (U,); its own for a leader.

    Raises:
        CreditError: Lengths differ.

    Two observations that are just as similar as asked for share a bucket with a probability of 0.99, more
    similar ones almost surely. An observation that 256 leaders in a row did not take stays alone, so the
    cost is at most O(characters + 256 * U) comparisons.
    """
    if not len(texts) == len(names) == len(group_ids_U) == len(counts_U):
        lengths = (len(texts), len(names), len(group_ids_U), len(counts_U))
        raise CreditError(f"texts, names, groups and counts have lengths {lengths}; they must be equal")
    ranked = np.array([name.encode("utf-8", "surrogatepass") for name in names], dtype=np.bytes_)
    if not len(texts):
        return np.zeros(0, dtype=np.int64)
    order_U = np.lexsort((ranked, -counts_U, group_ids_U))
    lengths_U = np.array([len(text) for text in texts], dtype=np.int64)
    leaders_U = np.arange(len(texts))
    for chunk in _chunks(group_ids_U[order_U], lengths_U[order_U]):
        members = order_U[chunk]
        shingles = _shingles([texts[i] for i in members])
        leaders_U[members] = members[_leaders(shingles, group_ids_U[members], similarity)]
    return leaders_U


def similar_anchors(
    observations_S: Sequence[str | None],
    names_S: Sequence[str | None],
    group_ids_S: Ints,
    anchor_ids_S: Ints,
    *,
    similarity: float,
) -> Ints:
    """Anchor ids in which a step has the id of its pool's leader, as `similar_leaders` finds it.

    Args:
        observations_S: Text of each step's state; None: it keeps its own anchor.
        names_S: The anchor's name; equal names in a group have equal texts.
        group_ids_S: Group of each step's rollout.
        anchor_ids_S: Number of the anchor; `NO_ANCHOR` stays.
        similarity: As in `similar_leaders`.
    """
    _, first_U, state_S, counts_U = np.unique(
        pool_ids(group_ids_S, anchor_ids_S), return_index=True, return_inverse=True, return_counts=True
    )
    texts = [observations_S[i] for i in first_U]
    can_match_U = np.array([text is not None for text in texts], dtype=np.bool_)
    can_match_U &= anchor_ids_S[first_U] != NO_ANCHOR
    matched = np.flatnonzero(can_match_U)
    leaders = similar_leaders(
        [texts[i] or "" for i in matched],
        [names_S[first_U[i]] or "" for i in matched],
        group_ids_S[first_U[matched]],
        counts_U[matched],
        similarity=similarity,
    )
    ids_U = anchor_ids_S[first_U]
    ids_U[matched] = ids_U[matched][leaders]
    return ids_U[state_S]


def _chunks(group_ids_U: Ints, lengths_U: Ints) -> Iterator[slice]:
    """Runs of whole groups with about CHUNK characters."""
    ends = np.append(np.flatnonzero(np.diff(group_ids_U)) + 1, len(group_ids_U))
    characters = np.append(0, np.cumsum(lengths_U))
    start = 0
    for end, following in zip(ends, np.append(ends[1:], 0), strict=True):
        if not following or characters[following] - characters[start] > CHUNK:
            yield slice(start, int(end))
            start = int(end)


@dataclass(frozen=True, slots=True, eq=False)
class _Shingles:
    """Shingles of the texts of a chunk, by text and hash; the n-th of equal ones has a hash of its own."""

    keys: Keys
    """Number of the text, above HASH_BITS bits of hash."""
    starts_U: Ints
    sizes_U: Ints
    signatures: NDArray[np.uint32]
    """(U, BINS)."""


def _shingles(texts: Sequence[str]) -> _Shingles:
    padded = [(text or "\0") + "\0" * (SHINGLE - 1) for text in texts]
    codes = np.frombuffer("".join(padded).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    sizes_U = np.array([len(text) - SHINGLE + 1 for text in padded], dtype=np.int64)
    starts_U = np.cumsum(sizes_U) - sizes_U
    texts_K = np.repeat(np.arange(len(texts)), sizes_U)
    places_K = np.arange(len(texts_K)) + texts_K * (SHINGLE - 1)
    hashes_K = np.zeros(len(places_K), dtype=np.uint64)
    for offset, weight in enumerate(_WEIGHTS):
        hashes_K += codes[places_K + offset].astype(np.uint64) * weight
    above_K = texts_K.astype(np.uint64) << _SHIFT
    keys = np.sort(above_K | _mixed(hashes_K))
    is_first = np.append(True, keys[1:] != keys[:-1])
    if not is_first.all():
        places = np.arange(len(keys))
        nth = (places - np.maximum.accumulate(np.where(is_first, places, 0))).astype(np.uint64)
        again = _mixed((keys & _MASK) + nth * _WEIGHTS[0])
        keys = np.sort(np.where(is_first, keys, above_K | again))
    return _Shingles(keys, starts_U, sizes_U, _signatures(keys, len(texts)))


def _mixed(numbers: Keys) -> Keys:
    """HASH_BITS bits that depend on all 64 (the finalizer of splitmix64)."""
    z = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) >> np.uint64(64 - HASH_BITS)


def _signatures(keys: Keys, count: int) -> NDArray[np.uint32]:
    """The least hash in each of BINS parts of its range; an empty part borrows from the next one."""
    bits = BINS.bit_length() - 1
    cells = (keys >> np.uint64(HASH_BITS - bits)).astype(np.int64)  # text * BINS + part
    is_first = np.append(True, cells[1:] != cells[:-1])
    values = np.zeros(count * BINS, dtype=np.uint32)
    is_there = np.zeros(count * BINS, dtype=np.bool_)
    values[cells[is_first]] = keys[is_first].astype(np.uint32)
    is_there[cells[is_first]] = True
    parts = np.arange(BINS, dtype=np.int16)
    own = np.where(is_there.reshape(count, BINS), parts, 2 * BINS).astype(np.int16)
    twice = np.concatenate([own, own + np.int16(BINS)], axis=1)
    lender = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1][:, :BINS]
    borrowed = np.take_along_axis(values.reshape(count, BINS), (lender % BINS).astype(np.int64), axis=1)
    return borrowed + (lender - parts).astype(np.uint32) * np.uint32(0x9E3779B1)


def _leaders(shingles: _Shingles, group_ids_U: Ints, similarity: float) -> Ints:
    """Leaders of texts in order of rank."""
    count = len(group_ids_U)
    buckets_BU = _buckets(shingles.signatures, group_ids_U, similarity)
    leaders_U = np.arange(count)
    first = np.empty(int(buckets_BU.max()) + 1, dtype=np.int64)
    leads_U = np.zeros(count, dtype=np.bool_)
    waiting = np.arange(count)
    for _ in range(ROUNDS):
        own = buckets_BU[:, waiting]
        first[own] = count
        np.minimum.at(first, own, np.broadcast_to(waiting, own.shape))
        firsts = first[own]
        is_leader = (firsts == waiting).all(axis=0)
        leads_U[waiting[is_leader]] = True
        is_pair = leads_U[firsts] & ~is_leader
        pairs = np.unique(np.broadcast_to(waiting, own.shape)[is_pair] * count + firsts[is_pair])
        members, candidates = pairs // count, pairs % count
        found = _is_similar(shingles, members, candidates, similarity)
        taken, nth = np.unique(members[found], return_index=True)
        leaders_U[taken] = candidates[found][nth]
        waiting = waiting[~is_leader]
        waiting = waiting[leaders_U[waiting] == waiting]
        if not len(waiting):
            break
    return leaders_U


def _buckets(signatures: NDArray[np.uint32], group_ids_U: Ints, similarity: float) -> Ints:
    """Numbers of the buckets that each text is in, shape (B, U): one a band, none in two bands."""
    rows = _rows_of_a_band(similarity / (2.0 - similarity))
    hashes = []
    for band in range(BINS // rows):
        hash_U = group_ids_U.astype(np.uint64) * _WEIGHTS[1] + np.uint64(band)
        for row in range(band * rows, (band + 1) * rows):
            hash_U = (hash_U ^ signatures[:, row]) * _WEIGHTS[0]
            hash_U ^= hash_U >> np.uint64(29)
        hashes.append(hash_U)
    stacked = np.stack(hashes)
    return np.unique(stacked, return_inverse=True)[1].reshape(stacked.shape).astype(np.int64)


def _rows_of_a_band(jaccard: float) -> int:
    """Most values that a band may have: the fewest candidates that still give RECALL at this similarity."""
    fitting = [rows for rows in range(1, BINS + 1) if (1 - jaccard**rows) ** (BINS // rows) <= 1 - RECALL]
    return max(fitting)


def _is_similar(shingles: _Shingles, a_P: Ints, b_P: Ints, similarity: float) -> NDArray[np.bool_]:
    """Whether the texts of each pair are: exact, but for pairs whose signatures are far below it."""
    sizes_P = shingles.sizes_U[a_P] + shingles.sizes_U[b_P]
    least_P = np.minimum(shingles.sizes_U[a_P], shingles.sizes_U[b_P])
    jaccard = similarity / (2.0 - similarity)
    margin_P = DEVIATIONS * np.sqrt(jaccard * (1.0 - jaccard) / np.minimum(least_P, BINS))
    is_similar_P = 2.0 * least_P >= similarity * sizes_P
    for part in _parts(np.full(len(a_P), BINS)):
        equal = shingles.signatures[a_P[part]] == shingles.signatures[b_P[part]]
        is_similar_P[part] &= equal.mean(axis=1) >= jaccard - margin_P[part]
    left = np.flatnonzero(is_similar_P)
    for part in _parts(sizes_P[left]):
        pairs = left[part]
        dice_P = 2.0 * _common(shingles, a_P[pairs], b_P[pairs]) / sizes_P[pairs]
        is_similar_P[pairs] = dice_P >= similarity
    return is_similar_P


def _parts(sizes_P: Ints) -> Iterator[slice]:
    """Runs of pairs with about CHUNK numbers in all."""
    total_P = np.cumsum(sizes_P)
    start = 0
    while start < len(sizes_P):
        before = total_P[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(total_P, before + CHUNK, side="right")))
        yield slice(start, stop)
        start = stop


def _common(shingles: _Shingles, a_P: Ints, b_P: Ints) -> Floats:
    """How many shingles the texts of each pair have in common."""
    both = np.stack([a_P, b_P], axis=1).reshape(-1)
    sizes = shingles.sizes_U[both]
    pair = np.repeat(np.arange(len(both)) // 2, sizes)
    ends = np.cumsum(sizes)
    places = np.arange(len(pair)) + np.repeat(shingles.starts_U[both] - (ends - sizes), sizes)
    keys = np.sort((pair.astype(np.uint64) << _SHIFT) | (shingles.keys[places] & _MASK))
    twice = keys[1:][keys[1:] == keys[:-1]]
    return np.bincount((twice >> _SHIFT).astype(np.int64), minlength=len(a_P)).astype(np.float64)
