"""What `spangrad export` writes into its folder: the data files of one format, and their card.

Knows which part writes which format; knows no command line. Loaded by the command when it runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spangrad.adapters.datasets.card import Card, Side
from spangrad.adapters.datasets.export import write_sides
from spangrad.adapters.datasets.formats import FORMATS
from spangrad.adapters.datasets.otlp import write_copy
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.datasets.selecting import Filters, Refused, Selection, select
from spangrad.adapters.datasets.tables import columns
from spangrad.adapters.grading import TOOLS_UNKNOWN
from spangrad.adapters.report import other_rewards
from spangrad.commands.filters import rollouts_named_by
from spangrad.commands.options import other_names
from spangrad.commands.output import progress_bar
from spangrad.commands.rendering import mixed_ids
from spangrad.commands.transition_files import Credit, PartRows, Rows, TransitionWriter, outcomes_by
from spangrad.errors import EmptyBatchError
from spangrad.store.base import Store
from spangrad.store.records import Rollout

if TYPE_CHECKING:
    from spangrad.commands.parallel_export import Workers

TRANSITIONS: Final = "transitions"
COPIES: Final = ("otlp", "otlp-proto")
"""JSON lines, and protobuf."""
READERS: Final[Mapping[str, str]] = {
    TRANSITIONS: "pyarrow, Hugging Face `datasets`",
    "otlp": "any OpenTelemetry backend: OTLP, JSON lines",
    "otlp-proto": "any OpenTelemetry backend: OTLP, protobuf with lengths",
    **{name: form.reader for name, form in FORMATS.items()},
}
_STRAYS_SQL: Final = """
SELECT count(*) AS traces FROM (SELECT trace_id FROM spans GROUP BY trace_id HAVING count(rollout_id) = 0)
WHERE trace_id NOT IN (SELECT trace_id FROM sessions)
"""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written."""

    form: str
    """A key of `READERS`."""
    filters: Filters
    credit: Credit
    sql: str | None = None
    """A SELECT with a column `rollout_id`."""
    rollouts: Sequence[str] | None = None
    run: str | None = None
    keep_secrets: bool = False
    licence: str | None = None
    workers: "Workers | None" = None
    """Who reads the calls of transitions and credits them; None: this process."""

    @property
    def is_copy(self) -> bool:
        """Whether it is spans and log records as they came."""
        return self.form in COPIES

    @property
    def is_of_everything(self) -> bool:
        """Whether nobody said which rollouts."""
        return self.sql is None and self.rollouts is None and self.run is None


def write_dataset(folder: Path, store: Store, order: Order) -> Card:
    """Write the data files and their card.

    Raises:
        EmptyBatchError: There is nothing to write; the reasons are in it.
        StoreError: The store failed, or the SELECT names no rollouts.
    """
    scanner = Scanner()
    wanted = _wanted(store, order)
    if order.is_copy:
        ids = None if order.is_of_everything else [one.rollout_id for one in wanted]
        with progress_bar("copying") as progress:
            as_json = order.form == "otlp"
            side = write_copy(folder, store, ids, scanner, as_json=as_json, progress=progress)
        sides, refused = {"all": side}, Refused()
    else:
        with progress_bar("choosing") as progress:
            outcomes = outcomes_by(store, order.credit.authors, order.credit.weights)
            if order.workers is not None:
                selection = order.workers.select(wanted, progress)
            else:
                selection = select(store, wanted, order.filters, outcomes, progress)
        sides, refused = _write(folder, store, order, selection, wanted, scanner), selection.refused
    card = Card(
        format=order.form,
        reader=READERS[order.form],
        version=version("spangrad"),
        licence=order.licence,
        filters=_told(order),
        sides=sides,
        refused=refused,
        secrets=scanner.found,
        seen=len(wanted),
        notes=_notes(store, order, sides),
        columns=tuple(columns()) if order.form == TRANSITIONS else (),
    )
    if not any(side.rows for side in sides.values()):
        raise EmptyBatchError(_nothing(card))
    card.write(folder)
    return card


def _write(
    folder: Path,
    store: Store,
    order: Order,
    selection: Selection,
    wanted: Sequence[Rollout],
    scanner: Scanner,
) -> dict[str, Side]:
    keep = order.keep_secrets
    with progress_bar("writing") as progress:
        if order.form == TRANSITIONS:
            rows: Rows = PartRows(store, order.filters, order.credit, scanner, keep_secrets=keep)
            if order.workers is not None:
                rows = partial(order.workers.rows, scanner=scanner)
            writer = TransitionWriter(store, selection, order.filters, rows)
            return writer.write(folder, wanted, progress)
        form = FORMATS[order.form]
        return write_sides(
            folder, store, selection, form, order.filters, scanner, keep_secrets=keep, progress=progress
        )


def _wanted(store: Store, order: Order) -> list[Rollout]:
    ids = None if order.rollouts is None else list(order.rollouts)
    if order.sql is not None:
        named = rollouts_named_by(store, order.sql)
        ids = sorted(named if ids is None else named.intersection(ids))
    found = store.rollouts(rollout_ids=ids, run_id=order.run)
    return sorted(found, key=lambda one: one.rollout_id)


def _told(order: Order) -> dict[str, Any]:
    """The options, as the card has them."""
    filters = {} if order.is_copy else asdict(order.filters)
    return {
        "sql": order.sql,
        "rollout": None if order.rollouts is None else list(order.rollouts),
        "run": order.run,
        **filters,
        "authors": list(order.credit.authors),
        "reward": ", ".join(order.credit.weights),
        "clone": order.credit.config is None,
        "keep_unknown_tools": order.credit.keep_unknown_tools,
        "keep_secrets": order.keep_secrets or order.is_copy,
    }


def _notes(store: Store, order: Order, sides: Mapping[str, Side]) -> tuple[str, ...]:
    if order.is_copy:
        return ("a copy of what was recorded: nothing is left out, secrets included",)
    notes = []
    form = FORMATS.get(order.form)
    thought = sum(side.with_reasoning for side in sides.values())
    if thought and form is not None and form.drops_reasoning:
        notes.append(f"reasoning of {thought} calls is left out: the format has no place for it")
    if order.credit.config is None:
        notes.append("cloned: every reply has advantage 1, whatever rewards and estimators say")
    elif others := other_rewards(store, *order.credit.weights):
        notes.append(other_names(order.credit.weights, others))
    unknown = sum(side.reasons[TOOLS_UNKNOWN] for side in sides.values())
    if unknown and (form is not None or order.credit.keep_unknown_tools):
        notes.append(
            f"{unknown} calls used tools that nobody recorded: the model was shown more than their rows tell"
        )
    models = sum((side.row_models for side in sides.values()), Counter[str]())
    if (warning := mixed_ids(models, is_checked=order.credit.render is not None)) is not None:
        notes.append(warning)
    if "heldout" in sides:
        notes.append("tasks are held out by the hash of their key; a task never changes its side")
    if order.is_of_everything:
        (row,) = store.query(_STRAYS_SQL)
        if row["traces"]:
            notes.append(f"{row['traces']} traces belong to no rollout; only otlp has them")
    return tuple(notes)


def _nothing(card: Card) -> str:
    counts = card.to_json()["refused"]
    reasons = [f"{reason} ({count})" for kind in counts.values() for reason, count in kind.items()]
    why = f"left out: {'; '.join(reasons[:4])}" if reasons else "`spangrad rollouts` lists what is there"
    return f"nothing can be exported as {card.format} ({card.seen} rollouts looked at); {why}"
