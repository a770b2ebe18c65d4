"""`tests/bench/cluster/README.md` and `saturation.svg` out of what the model did."""

import math
import re
from collections.abc import Mapping, Sequence

from tests.bench.cluster.model import PARTS, Cluster, Costs, Outcome

Results = Mapping[str, Sequence[tuple[Cluster, Outcome]]]
"""Scenario -> its clusters, smallest first, and what became of each."""

_COLORS = {
    "agents": "#888888",
    "engines": "#3d7fd9",
    "gateway": "#8e44ad",
    "hub": "#c62828",
    "learner": "#2e7d32",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 220, 50, 40, 60


def shares(cluster: Cluster, outcome: Outcome) -> dict[str, float]:
    """How busy each part was; an engine counts as full with 64 calls."""
    of = {"agents": float(cluster.agents), "engines": 64.0 * cluster.engines}
    return {part: outcome.share(part, of.get(part, 1.0)) for part in PARTS}


def table(results: Results) -> str:
    """A row for each cluster."""
    titles = ["agents and their work", "rollouts/s", "calls/s", *PARTS, "longest wait for the hub", "stalest"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, found in results.items():
        for cluster, outcome in found:
            busy = " | ".join(f"{share:.0%}" for share in shares(cluster, outcome).values())
            rate, calls = outcome.rollouts / outcome.seconds, outcome.calls / outcome.seconds
            work = f"{cluster.agents:,}, {name} | {rate:.2f} | {calls:,.0f}"
            lines.append(f"| {work} | {busy} | {outcome.hub_wait_s:.1f} s | {outcome.stalest} |")
    return "\n".join(lines)


def costs_told(costs: Costs) -> str:
    """The measured costs, as a table."""
    rows = [
        ("gateway, a call", costs.gateway_call_s, "gateway"),
        ("hub, a long call's span", costs.hub_call_s, "ingest"),
        ("hub, all books of a rollout", costs.hub_rollout_s, "queue"),
        ("trainer, a call from the store to credited rows", costs.credit_call_s, "cluster/costs.py"),
    ]
    lines = ["| what | CPU, ms | measured by |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {seconds * 1e3:.2f} | `{by}` |" for what, seconds, by in rows)])


def svg(results: Results) -> str:
    """How busy each part is over the number of agents, a panel for each scenario."""
    width = _LEFT + len(results) * (_WIDTH + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + 80}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, found) in enumerate(results.items()):
        lines += _panel(_LEFT + number * (_WIDTH + _GAP), name, found)
    for number, part in enumerate(PARTS):
        x, y = _LEFT + number * 110, _TOP + _HEIGHT + 60
        lines.append(
            f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" stroke="{_COLORS[part]}" stroke-width="2"/>'
        )
        lines.append(f'<text x="{x + 30}" y="{y + 4}">{part}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(left: int, name: str, found: Sequence[tuple[Cluster, Outcome]]) -> list[str]:
    first, last = (math.log10(cluster.agents) for cluster, _ in (found[0], found[-1]))

    def x(agents: int) -> float:
        return left + (math.log10(agents) - first) / (last - first) * _WIDTH

    def y(share: float) -> float:
        return _TOP + _HEIGHT * (1 - min(share, 1.05) / 1.05)

    lines = [f'<text x="{left}" y="{_TOP - 16}" font-size="13">{re.sub("[<>&]", "", name)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level = f'y1="{y(share):.1f}" y2="{y(share):.1f}"'
        lines.append(f'<line x1="{left}" x2="{left + _WIDTH}" {level} stroke="#ddd"/>')
        lines.append(f'<text x="{left - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for cluster, _ in found:
        place = f'x="{x(cluster.agents):.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle"'
        lines.append(f"<text {place}>{cluster.agents:,}</text>")
    middle = f'x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle"'
    lines.append(f"<text {middle}>agents</text>")
    busy = [(cluster.agents, shares(cluster, outcome)) for cluster, outcome in found]
    for part in PARTS:
        points = " ".join(f"{x(agents):.1f},{y(share[part]):.1f}" for agents, share in busy)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{_COLORS[part]}" stroke-width="2"/>')
    return lines
