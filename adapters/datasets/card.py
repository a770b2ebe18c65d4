"""What is in a dataset, where it came from and what was left out: `card.json`, and `card.md` for people.

Knows counts; reads no store. Holds no time of day: the same export gives the same card.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spangrad.adapters.datasets.conversation import Exported
from spangrad.adapters.datasets.selecting import Refused
from spangrad.adapters.datasets.writing import CARD, MADE_BY
from spangrad.adapters.grading import reason_kind

_LIST_OF: Mapping[str, tuple[str, str]] = {
    "grades": ("Grades of the calls", "calls"),
    "reasons": ("Why calls have no better grade", "calls"),
    "dialects": ("Recorded by (dialect)", "calls"),
    "models": ("Models", "calls"),
    "row_models": ("Whose token ids the rows hold", "rows"),
    "altered": ("What the chat template altered", "calls"),
}
"""Field of a side -> its title, and what is counted."""
_REFUSED: Mapping[str, str] = {
    "rollouts": "Rollouts",
    "calls": "Calls of rollouts that were looked at",
    "rows": "Rows",
}


@dataclass(slots=True)
class Side:
    """What one data file holds."""

    file: str
    rows: int = 0
    rollouts: int = 0
    calls: int = 0
    tasks: set[str] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    unrewarded: int = 0
    grades: Counter[str] = field(default_factory=Counter)
    dialects: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Kind of reason for a grade -> calls."""
    row_models: Counter[str] = field(default_factory=Counter)
    """Of transitions: whose token ids rows hold; a row with those of several counts for each."""
    altered: Counter[str] = field(default_factory=Counter)
    """Of transitions: what rendering altered of prompts -> calls."""
    trained_tokens: int | None = None
    """Tokens with a loss; None: the format is text."""
    with_reasoning: int = 0
    """Calls that tell what the model thought."""

    def add(self, rollout: Exported) -> None:
        """Count a rollout that rows are made of."""
        self.rollouts += 1
        self.calls += len(rollout.calls)
        self.tasks.add(rollout.task_key)
        if rollout.reward is None:
            self.unrewarded += 1
        else:
            self.rewards.append(rollout.reward)
        for call in rollout.calls:
            self.grades[str(call.grade)] += 1
            self.dialects[call.dialect] += 1
            self.models[call.model or "not known"] += 1
            self.reasons.update({reason_kind(reason) for reason in call.grade_reasons})
            self.with_reasoning += any(choice.message.get("reasoning") for choice in call.choices)

    def merge(self, other: "Side") -> None:
        """Count what another part of the same file holds, but for its rows."""
        for name in ("rollouts", "calls", "unrewarded", "with_reasoning", "rewards"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("tasks", *_LIST_OF):
            getattr(self, name).update(getattr(other, name))
        if other.trained_tokens is not None:
            self.trained_tokens = (self.trained_tokens or 0) + other.trained_tokens

    def to_json(self) -> dict[str, Any]:
        """The side as a JSON object."""
        rewards: dict[str, Any] = {"given": len(self.rewards), "missing": self.unrewarded}
        if self.rewards:
            mean = sum(sorted(self.rewards)) / len(self.rewards)
            rewards |= {"lowest": min(self.rewards), "mean": mean, "highest": max(self.rewards)}
        return {
            "file": self.file,
            "rows": self.rows,
            "rollouts": self.rollouts,
            "calls": self.calls,
            "tasks": len(self.tasks),
            **({} if self.trained_tokens is None else {"trained_tokens": self.trained_tokens}),
            "rewards": rewards,
            **{name: dict(sorted(getattr(self, name).items())) for name in _LIST_OF},
        }


@dataclass(frozen=True, slots=True)
class Card:
    """Everything that is said about a dataset."""

    format: str
    reader: str
    """What reads the format."""
    version: str
    """Of spangrad."""
    licence: str | None
    filters: Mapping[str, Any]
    """The options that chose what is in it."""
    sides: Mapping[str, Side]
    """`train`, and `heldout` where there is a split."""
    refused: Refused
    secrets: Mapping[str, int]
    """Kind -> rows in which it was found."""
    seen: int
    """Rollouts that were looked at."""
    notes: tuple[str, ...] = ()
    columns: tuple[tuple[str, str, str], ...] = ()
    """Name, type and meaning, where the format is not another project's."""

    def to_json(self) -> dict[str, Any]:
        """The card as a JSON object."""
        return {
            "made_by": MADE_BY,
            "spangrad": self.version,
            "format": self.format,
            "reader": self.reader,
            "licence": self.licence,
            "filters": dict(self.filters),
            "splits": {name: side.to_json() for name, side in self.sides.items()},
            "rollouts_seen": self.seen,
            "refused": {name: _ordered(getattr(self.refused, name)) for name in _REFUSED},
            "secrets_found": dict(sorted(self.secrets.items())),
            "notes": list(self.notes),
            "columns": {name: {"type": kind, "meaning": doc} for name, kind, doc in self.columns},
        }

    def to_markdown(self) -> str:
        """The card as a page."""
        lines = [f"# Dataset: {self.format}", ""]
        lines += [f"Written by `{MADE_BY}` (spangrad {self.version}) for {self.reader}.", ""]
        lines += [f"Licence: {_cell(self.licence) if self.licence else 'not stated'}.", ""]
        lines += _table(
            ("split", "file", "rows", "rollouts", "tasks", "calls", "mean reward", "without reward"),
            [_side_row(name, side.to_json()) for name, side in self.sides.items()],
        )
        chosen = {name: value for name, value in self.filters.items() if value not in (None, False)}
        lines += ["## Chosen by", "", *(f"* `{name}`: {_cell(value)}" for name, value in chosen.items()), ""]
        for name, (title, unit) in _LIST_OF.items():
            total: Counter[str] = Counter()
            for side in self.sides.values():
                total.update(getattr(side, name))
            if total:
                lines += [f"## {title}", "", *_table((name.replace("_", " "), unit), sorted(total.items()))]
        lines += ["## Left out", "", f"{self.seen} rollouts were looked at.", ""]
        for name, title in _REFUSED.items():
            counts = _ordered(getattr(self.refused, name))
            if counts:
                lines += _table((title, "count"), list(counts.items()))
        if self.secrets:
            lines += ["## Secrets found", "", *_table(("kind", "rows"), sorted(self.secrets.items()))]
        if self.notes:
            lines += ["## Notes", "", *(f"* {note}" for note in self.notes), ""]
        if self.columns:
            lines += ["## Columns", "", *_table(("column", "type", "meaning"), self.columns)]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: Path) -> None:
        """Write both forms."""
        text = json.dumps(self.to_json(), ensure_ascii=True, indent=2) + "\n"
        (folder / CARD).write_text(text, encoding="utf-8")
        (folder / "card.md").write_bytes(self.to_markdown().encode("utf-8", "backslashreplace"))


def _ordered(counts: Counter[str]) -> dict[str, int]:
    """The most frequent first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _side_row(name: str, side: Mapping[str, Any]) -> tuple[Any, ...]:
    rewards = side["rewards"]
    mean = f"{rewards['mean']:.4g}" if "mean" in rewards else "-"
    counts = (side["rows"], side["rollouts"], side["tasks"], side["calls"])
    return (name, f"`{side['file']}`", *counts, mean, rewards["missing"])


def _table(heads: tuple[str, ...], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*lines, *(f"| {' | '.join(_cell(value) for value in row)} |" for row in rows), ""]


def _cell(value: Any) -> str:
    """A value that breaks no table: what a trace says is text."""
    text = str(value).replace("|", "\\|").replace("<", "&lt;")
    return "".join(character if character.isprintable() else " " for character in text)
