"""Commands that decide how long history is kept, and where: `spangrad archive`, `spangrad gc`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from spangrad.commands.options import DEFAULT_STORE, JsonOption, is_hub
from spangrad.commands.output import note, print_json, print_rows, step_bar
from spangrad.errors import ConfigError, StoreError, StoreLockedError

if TYPE_CHECKING:
    from spangrad.store.archive.erase import Erased, Selection
    from spangrad.store.file_store import FileStore

FileOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="SPANGRAD_STORE", help="DuckDB file. No other process may have it open meanwhile."
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
_MIB: Final = 2**20
_NAMED: Final = 20
"""Of what else goes with a user, so many are named."""


def archive(
    before: Annotated[
        str,
        typer.Option(
            "--before", help="Move what ended before this UTC day (2026-01-31), or so long ago (30d)."
        ),
    ],
    store: FileOption = DEFAULT_STORE,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move old history into Parquet files beside the store, one folder a day, and shrink the store's file.

    Spans, log records and messages of rollouts that ended move to
    STORE.archive/day=.../; tasks, rewards, calls and updates stay. Every command
    and `spangrad sql` go on seeing all of it, and any Parquet reader can open the
    folder. A rollout moves whole, with all its traces. What workers or a training
    run wait for stays: queued, running, or succeeded and not yet consumed of a run
    that was alive on that day or later. It can be killed at any moment.
    """
    before_ns = _day(before)
    with _opened(store, "archive") as file:
        from spangrad.store.archive.move import move
        from spangrad.store.archive.rewrite import has_holes, rewrite

        with step_bar() as bar:
            moved = move(file.database, before_ns, dry_run=dry_run, progress=bar)
            shrinks = not dry_run and (moved.traces > 0 or has_holes(file.database))
            file.close()
            sizes = rewrite(file.path, progress=bar) if shrinks else (_size(store), _size(store))
    if as_json:
        print_json([asdict(moved) | {"dry_run": dry_run, "size_before": sizes[0], "size_after": sizes[1]}])
        return
    if moved.needed:
        note(f"{moved.needed} that are as old stay: a worker or a training run waits for them")
    if moved.undated:
        note(f"{moved.undated} that tell no time stay: they are older than no day")
    if not moved.traces:
        note(f"nothing to move in {store!r} ended before {_shown(before_ns)}")
    else:
        print(
            f"{'would move' if dry_run else 'moved'} {moved.rollouts} rollouts, {moved.traces} traces with"
            f" {moved.spans} spans and {moved.logs} log records of {moved.days} days"
        )
    if shrinks:
        print(f"{store} has {sizes[1] / _MIB:.1f} MiB now, {sizes[0] / _MIB:.1f} MiB before")


def gc(
    keep: Annotated[
        str | None, typer.Option("--keep", help="Delete what ended longer ago than this: 90d, 12w.")
    ] = None,
    delete_before: Annotated[
        str | None, typer.Option("--delete-before", help="Delete what ended before this UTC day: 2026-01-31.")
    ] = None,
    attribute: Annotated[
        list[str] | None,
        typer.Option(
            "--attribute",
            help="NAME=VALUE, enduser.id=42 say: delete each rollout with it in a span or log record, whole;"
            " several times: any of them.",
        ),
    ] = None,
    store: FileOption = DEFAULT_STORE,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete history for good: what is older than you keep, or all that a user had to do with.

    Goes from the store's file, its log and its archive, with calls, rewards, tasks
    and messages that nothing else uses; updates keep their numbers. The file is
    written anew, so that no deleted byte is left in it. Counts are shown and
    confirmed before; without a terminal only --yes deletes. Old rollouts that a
    worker or a training run waits for are kept, those of a user are not. What is
    joined to a user's rollouts goes whole: of which other users, and which other
    rollouts, is said before. Where a file of the archive is damaged, all else goes,
    and the exit code is 1.
    """
    before_ns = _before(keep, delete_before)
    attributes = [_attribute(text) for text in attribute or ()]
    if (before_ns is None) == (not attributes):
        raise ConfigError(
            "say what is to be deleted: one of --keep, --delete-before, or --attribute NAME=VALUE"
        )
    with _opened(store, "gc") as file:
        from spangrad.store.archive import erase, leftovers
        from spangrad.store.archive.rewrite import rewrite

        if before_ns is not None:
            selection = erase.select_old(file.database, before_ns)
        else:
            selection = erase.select_by_attribute(file.database, attributes)
        erased = erase.erase(file.database, selection, dry_run=True)
        if not as_json:
            _show(erased, selection, store)
        rejected, sizes, goes = 0, (_size(store), _size(store)), not dry_run and _confirmed(yes, as_json)
        if goes:
            erased = erase.erase(file.database, selection)
            rejected = leftovers.clean(file.path, selection, attributes, before_ns or 0)
            file.close()
            with step_bar() as bar:
                sizes = rewrite(file.path, progress=bar)
            if waiting := leftovers.waiting_files(file.path):
                note(
                    f"{waiting} files in {store}.spool are of processes that are recording now and could not"
                    " be looked at; run the same again when those have ended"
                )
    if as_json:
        report = asdict(erased) | {
            "rejected": rejected,
            "kept_for_runs": selection.needed,
            "kept_undated": selection.undated,
            "joined_rollouts": selection.joined,
            "other_values": [f"{name}={value}" for name, value in selection.others],
            "damaged": selection.damaged,
            "deleted": goes and not selection.damaged,
        }
        print_json([report | {"size_before": sizes[0], "size_after": sizes[1]}])
    elif goes:
        what = "deleted what can be read" if selection.damaged else "deleted"
        print(f"{what}; {store} has {sizes[1] / _MIB:.1f} MiB now, {sizes[0] / _MIB:.1f} MiB before")
    if not goes and not dry_run:
        raise StoreError("nothing was deleted: answer y, or give --yes where nobody can be asked")
    if selection.damaged:
        raise StoreError(
            f"not all that was asked for {'would be' if dry_run else 'is'} deleted: {selection.damaged[0]!r}"
            f"{_others(selection.damaged)} of the archive is gone or damaged, and what it is part of"
            f" ({selection.hidden} traces) stays: put it back from a copy and run the same again"
        )


def _show(erased: "Erased", selection: "Selection", store: str) -> None:
    tables = sorted(name for name in {*erased.database, *erased.archive} if _rows(erased, name))
    rows = [
        {"table": name, "rows": erased.database.get(name, 0), "archived": erased.archive.get(name, 0)}
        for name in tables
    ]
    if rows:
        print_rows(("table", "rows", "archived"), rows, right=("rows", "archived"))
    else:
        note(f"nothing in {store!r} is to be deleted; its file is written anew all the same")
    if selection.others:
        told = [f"{name}={value}" for name, value in selection.others]
        note(f"what goes is also of {_listed(told)}: in the same rollout, session or trace")
    if selection.joined:
        note(f"rollouts without the attribute go along, for they share a trace: {_listed(selection.joined)}")
    if selection.needed:
        note(f"{selection.needed} that are as old stay: a worker or a training run waits for them")
    if selection.undated:
        note(f"{selection.undated} that tell no time stay: they are older than no day")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _others(files: Sequence[str]) -> str:
    return f" (and {len(files) - 1} more)" if len(files) > 1 else ""


def _rows(erased: "Erased", name: str) -> int:
    return erased.database.get(name, 0) + erased.archive.get(name, 0)


def _confirmed(yes: bool, as_json: bool) -> bool:
    if yes or as_json or not sys.stdin.isatty():
        return yes
    return typer.confirm("Delete this for good?", err=True)


@contextmanager
def _opened(store: str, command: str) -> "Iterator[FileStore]":
    """The store's file, for this process alone."""
    if is_hub(store):
        raise StoreError(
            f"`spangrad {command}` works on the store's file, and the hub at {store} has it open: stop that"
            " hub, then give the file with --store; agents keep their spans meanwhile"
        )
    if not Path(store).exists():
        raise StoreError(f"there is no store at {store!r}; name another with --store")
    from spangrad.store.file_store import FileStore

    try:
        file = FileStore(store)
    except StoreLockedError as error:
        holder, _, _ = str(error).rpartition("; ")  # behind it is what helps other commands: a hub's address
        raise StoreLockedError(
            f"`spangrad {command}` needs the file for itself, and {holder}; stop that first (agents keep"
            " their spans while a hub is stopped)"
        ) from error
    try:
        yield file
    finally:
        file.close()


def _day(text: str) -> int:
    """Midnight UTC of a day, or of the day so long ago, in ns."""
    units: dict[str, str] = {"d": "days", "w": "weeks"}
    try:
        if text[:-1].isdigit() and text[-1] in units:
            day = datetime.now(UTC) - timedelta(**{units[text[-1]]: int(text[:-1])})
        else:
            day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except (ValueError, OverflowError, IndexError):
        raise ConfigError(
            f"{text!r} is no day; give one such as 2026-01-31, or 30d or 4w for so long ago"
        ) from None
    return int(day.replace(hour=0, minute=0, second=0, microsecond=0).timestamp()) * 10**9


def _before(keep: str | None, delete_before: str | None) -> int | None:
    if keep is not None and delete_before is not None:
        raise ConfigError("--keep and --delete-before say the same in two ways; give one")
    text = keep if keep is not None else delete_before
    return None if text is None else _day(text)


def _attribute(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ConfigError(f"--attribute {text!r} is not NAME=VALUE, such as enduser.id=42")
    return name, value


def _shown(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).date().isoformat()


def _size(store: str) -> int:
    return Path(store).stat().st_size
