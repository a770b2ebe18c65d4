"""A frozen lake: a square of ice with holes, a start and a goal in opposite corners.

Nothing is random once a lake is drawn. A move goes where it says; against the shore, and where it is no
move at all, it goes nowhere; who falls into a hole is pulled out and begins again at the start. A walk has
three times the moves of the shortest way, and whatever is tried is one of them.

A walker sees the four cells around and knows where the goal lies, no more. `draw_lake` makes lakes where
that is enough: from every cell that a careful walk towards the goal reaches, some move towards the goal
is safe.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

START, GOAL, HOLE, ICE = "S", "G", "O", "."
MOVES = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
HOLE_SHARE = 0.35
"""Holes per cell that a lake has at most; there are fewer where more would shut the way."""

Cell = tuple[int, int]
"""Row and column, from 0."""


@dataclass(frozen=True)
class Lake:
    """A lake; `text` has a letter for each cell, rows divided by `/`."""

    text: str

    @cached_property
    def rows(self) -> list[str]:
        """A text for each row."""
        return self.text.split("/")

    @cached_property
    def start(self) -> Cell:
        """Where every walk begins."""
        return self._find(START)

    @cached_property
    def goal(self) -> Cell:
        """Where it should end."""
        return self._find(GOAL)

    @property
    def shortest(self) -> int:
        """Moves of the shortest way; a careful walk towards the goal has as many."""
        return sum(self.ways(self.start).values())

    @property
    def moves_allowed(self) -> int:
        """A walk that needs more has failed."""
        return self.shortest * 3

    def kind(self, cell: Cell) -> str:
        """`ice`, `hole` or `goal`; `shore` outside."""
        row, column = cell
        if not (0 <= row < len(self.rows) and 0 <= column < len(self.rows)):
            return "shore"
        return {HOLE: "hole", GOAL: "goal"}.get(self.rows[row][column], "ice")

    def ways(self, cell: Cell) -> dict[str, int]:
        """Moves towards the goal -> how many of them are needed; the most first."""
        return _ways(cell, self.goal)

    def step(self, cell: Cell, move: str) -> Cell:
        """The cell where a move ends."""
        if move not in MOVES:
            return cell
        there = _beside(cell, move)
        return {"shore": cell, "hole": self.start}.get(self.kind(there), there)

    def look(self, cell: Cell) -> str:
        """What a walker reads; a cell of a lake always reads the same."""
        goal = ", ".join(f"{n} {move}" for move, n in self.ways(cell).items())
        around = ", ".join(f"{move} {self.kind(_beside(cell, move))}" for move in MOVES)
        return f"row {cell[0] + 1} column {cell[1] + 1}; goal {goal}; {around}"

    def is_crossed(self, moves: Sequence[str]) -> bool:
        """Whether moves lead from the start to the goal before too many are made."""
        cell = self.start
        for move in moves[: self.moves_allowed]:
            cell = self.step(cell, move)
            if cell == self.goal:
                return True
        return False

    def _find(self, letter: str) -> Cell:
        return divmod(self.text.replace("/", "").index(letter), len(self.rows))


def draw_lake(size: int, rng: random.Random) -> Lake:
    """A random lake of `size` times `size` cells that a careful walk towards the goal always crosses."""
    last = size - 1
    corners = [(0, 0), (0, last), (last, last), (last, 0)]
    corner = rng.randrange(4)
    start, goal = corners[corner], corners[corner - 2]
    others = [(row, column) for row in range(size) for column in range(size)]
    others = [cell for cell in others if cell not in (start, goal)]
    rng.shuffle(others)
    holes = set[Cell]()
    for cell in others:
        if len(holes) < int(HOLE_SHARE * size * size) and _is_crossable(start, goal, {*holes, cell}):
            holes.add(cell)
    letters = {**dict.fromkeys(holes, HOLE), start: START, goal: GOAL}
    rows = ["".join(letters.get((row, column), ICE) for column in range(size)) for row in range(size)]
    return Lake("/".join(rows))


def _is_crossable(start: Cell, goal: Cell, holes: set[Cell]) -> bool:
    todo, seen = [start], {start, goal}
    while todo:
        cell = todo.pop()
        safe = {_beside(cell, move) for move in _ways(cell, goal)} - holes
        if not safe:
            return False
        todo += safe - seen
        seen |= safe
    return True


def _ways(cell: Cell, goal: Cell) -> dict[str, int]:
    down, right = goal[0] - cell[0], goal[1] - cell[1]
    needed = {"down": down, "up": -down, "right": right, "left": -right}
    return {move: n for move, n in sorted(needed.items(), key=lambda way: -way[1]) if n > 0}


def _beside(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
