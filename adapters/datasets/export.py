"""Chosen rollouts -> the data files of one format, and what the card says of them.

Knows formats, the split and secrets; knows no command line and no credit.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spangrad.adapters.datasets.card import Side
from spangrad.adapters.datasets.formats import Format, Refusal, Told
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.datasets.selecting import Filters, Progress, Refused, Selection, read
from spangrad.adapters.datasets.tables import SCHEMAS
from spangrad.adapters.datasets.writing import json_line, write_jsonl, write_parquet
from spangrad.store.base import Store

HAS_SECRET = "a key or token is in it; --keep-secrets keeps such rows"
NO_JSON = "it holds what JSON has no form for: NaN, or half a character"


def write_sides(
    folder: Path,
    store: Store,
    selection: Selection,
    form: Format,
    filters: Filters,
    scanner: Scanner,
    *,
    keep_secrets: bool = False,
    progress: Progress | None = None,
) -> dict[str, Side]:
    """Write `train` and, where a share is held out, `heldout`; a side without rollouts is an empty file."""
    sides: dict[str, Side] = {}
    done = 0
    for name in ("train", "heldout") if filters.heldout else ("train",):
        chosen = selection.side(filters.heldout, is_heldout=name == "heldout")
        side = sides[name] = Side(f"{name}.{form.suffix}")
        rollouts = _counted(read(store, chosen, filters), done, len(selection.chosen), progress)
        rows = _rows(form.rows(rollouts), side, scanner, selection.refused, keep_secrets=keep_secrets)
        if form.suffix == "parquet":
            side.rows = write_parquet(folder / side.file, rows, SCHEMAS[form.name])
        else:
            side.rows = write_jsonl(folder / side.file, rows)
        done += len(chosen)
    return sides


def _rows(
    told: Iterable[Told | Refusal], side: Side, scanner: Scanner, refused: Refused, *, keep_secrets: bool
) -> Iterator[dict[str, Any]]:
    """The rows that may be written; each of their rollouts is counted once."""
    counted: set[str] = set()
    for one in told:
        if isinstance(one, Refusal):
            refused.rows[one.reason] += 1
            continue
        if scanner.has_secret(one.row) and not keep_secrets:
            refused.rows[HAS_SECRET] += 1
            continue
        try:
            json_line(one.row)
        except ValueError:
            refused.rows[NO_JSON] += 1
            continue
        for rollout in one.rollouts:
            if rollout.rollout_id not in counted:
                counted.add(rollout.rollout_id)
                side.add(rollout)
        yield one.row


def _counted(rollouts: Iterable[Any], done: int, total: int, progress: Progress | None) -> Iterator[Any]:
    for number, rollout in enumerate(rollouts, start=done + 1):
        yield rollout
        if progress is not None:
            progress(number, total)
