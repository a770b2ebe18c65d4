"""A folder of data files that is there whole or not at all.

Knows files and rows; knows no formats. Invariants:
* files are written to a folder of another name beside the target, which is renamed when all is written;
* what is there already is left alone; with `force` it is replaced if an export wrote all that is in it;
* the same rows give the same bytes.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import parquet

from spangrad.errors import ConfigError, SpangradError, StoreError

CARD: Final = "card.json"
MADE_BY: Final = "spangrad export"
DATA_FILES: Final = ("train", "heldout", "otlp")
SUFFIXES: Final = ("jsonl", "parquet", "pb")
_OWN: Final = frozenset(
    {CARD, "card.md", *(f"{name}.{suffix}" for name in DATA_FILES for suffix in SUFFIXES)}
)
ROWS_AT_ONCE: Final = 500
"""Rows of a row group: what is in memory at a time."""


@contextmanager
def whole_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to write to, which becomes `target` at the end; nothing is left of it after an error.

    Raises:
        ConfigError: `target` is there and may not be replaced.
        StoreError: It can't be written.
    """
    check_target(target, force=force)
    beside = target.parent / f".{target.name}.{os.getpid()}.part"
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    try:
        beside.mkdir(parents=True)
        yield beside
        if target.exists():
            target.rename(old)
        beside.rename(target)
    except SpangradError:  # some are OSErrors, and none is about this folder
        raise
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise StoreError(f"{str(target)!r} can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def check_target(target: Path, *, force: bool) -> None:
    """Raise ConfigError if `target` is there and may not be replaced."""
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise ConfigError(f"{str(target)!r} is there already; name another folder, or replace it: --force")
    if not target.is_dir() or target.is_symlink():
        raise ConfigError(f"{str(target)!r} is no folder, so --force does not replace it; name another one")
    others = sorted(entry.name for entry in target.iterdir() if entry.name not in _OWN)
    if others or not _is_export(target):
        what = f"holds {others[0]!r}" if others else "was not written by `spangrad export`"
        raise ConfigError(f"{str(target)!r} {what}, so --force does not replace it; name another folder")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines; returns how many."""
    count = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(json_line(row))
            count += 1
    return count


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], schema: Any) -> int:
    """Write rows as Parquet with this schema; returns how many."""
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        waiting: list[Mapping[str, Any]] = []
        for row in rows:
            waiting.append(row)
            count += 1
            if len(waiting) == ROWS_AT_ONCE:
                writer.write_table(_table(waiting, schema))
                waiting = []
        if waiting:
            writer.write_table(_table(waiting, schema))
    return count


def json_line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON.

    Raises:
        ValueError: It holds what JSON has no form for: NaN, or half a surrogate pair.
    """
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _table(rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def _is_export(folder: Path) -> bool:
    try:
        card = json.loads((folder / CARD).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(card, dict) and card.get("made_by") == MADE_BY
