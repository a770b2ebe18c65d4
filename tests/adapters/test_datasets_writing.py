"""A folder that is there whole or not at all."""

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from spangrad.adapters.datasets.tables import VERL
from spangrad.adapters.datasets.writing import CARD, MADE_BY, json_line, whole_folder, write_parquet
from spangrad.errors import HubUnreachableError, StoreError


def write(target, text="{}", **options):
    with whole_folder(target, **options) as folder:
        (folder / "train.jsonl").write_text(text)
        (folder / CARD).write_text(f'{{"made_by": "{MADE_BY}"}}')


def test_a_folder_is_there_when_all_is_written(tmp_path):
    target = tmp_path / "deep" / "out"
    with whole_folder(target) as folder:
        (folder / "train.jsonl").write_text("1")
        assert not target.exists()
    assert (target / "train.jsonl").read_text() == "1"
    assert list(target.parent.iterdir()) == [target]


def test_after_an_error_there_is_what_was_there_before(tmp_path):
    target = tmp_path / "out"
    write(target, "old")
    with pytest.raises(KeyError), whole_folder(target, force=True) as folder:
        (folder / "train.jsonl").write_text("new")
        raise KeyError
    assert (target / "train.jsonl").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    write(target, "new", force=True)
    assert (target / "train.jsonl").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_of_the_disk_is_named_and_another_one_is_left_alone(tmp_path):
    with pytest.raises(StoreError, match=r"out' can't be written: No space left"):  # noqa: SIM117
        with whole_folder(tmp_path / "out"):
            raise OSError(28, "No space left on device")
    with pytest.raises(HubUnreachableError, match="no hub"), whole_folder(tmp_path / "out"):
        raise HubUnreachableError("no hub")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't be written"):
        write(tmp_path / "file" / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud83d"])
def test_what_json_has_no_form_for_is_an_error(value):
    with pytest.raises(ValueError):
        json_line({"value": value})


def test_more_rows_than_are_held_at_a_time_are_all_written(tmp_path):
    def row(number):
        told = {"data_source": "here", "prompt": [], "ability": "", "reward_model": {}}
        return {**told, "extra_info": {"index": number}}

    file = tmp_path / "rows.parquet"
    assert write_parquet(file, map(row, range(1201)), VERL) == 1201
    assert pq.ParquetFile(file).metadata.num_row_groups == 3
    told = pq.read_table(file).column("extra_info").to_pylist()
    assert [one["index"] for one in told] == list(range(1201))
