"""Packed numbers are what a list of them would be."""

import json
import pickle

import numpy as np
import pytest

from spangrad.adapters.packed import any_negative, as_ids, packed_floats, packed_ints
from spangrad.tracer.conventions import pack_floats, pack_ints

IDS = [5, -1, 2**31 - 1, 0]


def test_they_are_equal_to_a_list_of_the_same_numbers_and_to_nothing_else():
    ids = packed_ints(pack_ints(IDS))
    assert ids == IDS
    assert IDS == ids  # noqa: SIM300
    assert ids == tuple(IDS)
    assert ids == packed_ints(pack_ints(IDS))
    assert ids != IDS[:-1]
    assert ids != packed_ints(pack_ints([5]))
    assert ids != packed_floats(ids.packed)
    assert ids != "5"


def test_they_are_a_sequence_of_pythons_own_numbers():
    ids, logprobs = packed_ints(pack_ints(IDS)), packed_floats(pack_floats([-0.5, -1.25]))
    assert (len(ids), ids[0], ids[-1], ids[1:3], list(ids)) == (4, 5, 0, IDS[1:3], IDS)
    assert -1 in ids
    assert json.dumps([ids.tolist(), ids[0], logprobs[1]]) == f"[{json.dumps(IDS)}, 5, -1.25]"
    assert not packed_ints(b"")
    assert repr(logprobs) == "[-0.5, -1.25]"
    with pytest.raises(IndexError):
        ids[4]


def test_numpy_reads_them_where_they_are():
    ids = packed_ints(pack_ints(IDS))
    array = np.asarray(ids)
    assert array.tolist() == IDS
    assert array.base is not None
    assert np.asarray(ids, np.int64).dtype == np.int64
    values = np.zeros(4, np.int32)
    values[:] = ids
    assert values.tolist() == IDS


def test_other_processes_get_the_same_numbers():
    assert pickle.loads(pickle.dumps(packed_floats(pack_floats([-0.5])))) == [-0.5]


def test_ids_are_packed_once():
    ids = packed_ints(pack_ints(IDS))
    assert as_ids(ids) is ids.packed
    assert as_ids(IDS) == ids.packed


@pytest.mark.parametrize("size", [1, 7, 2_048, 2_049, 5_000])
def test_one_negative_number_is_seen_wherever_it_is(size):
    for number in (-1, -(2**31)):
        for place in (0, size // 2, size - 1):
            values = [2**31 - 1, 0, 128, 255] * (size // 4 + 1)
            values[place] = number
            assert any_negative(packed_ints(pack_ints(values[:size])))
            assert any_negative(values[:size])
    assert not any_negative(packed_ints(pack_ints(([2**31 - 1, 0, 128, 2**23] * size)[:size])))


def test_no_numbers_are_none_below_0():
    assert not any_negative(packed_ints(b""))
    assert not any_negative(())


@pytest.mark.parametrize(("value", "error"), [(b"12345", ValueError), ("1234", TypeError)])
def test_what_is_no_packed_numbers_is_refused(value, error):
    with pytest.raises(error):
        packed_ints(value)
