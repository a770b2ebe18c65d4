"""`credit/EXACT.md` and `credit/exact.svg` out of what was measured."""

import html
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from tests.bench.exact.mdps import Mdp, expected_return
from tests.bench.exact.measure import SIZE, Held, composable, functions, is_single, terms_of

Results = Mapping[str, Mapping[str, Held | None]]
"""problem -> estimator -> what was found."""

_COLORS = {"exact": "#2e7d32", "factor": "#3d7fd9", "biased": "#c62828"}


def singles() -> list[str]:
    """Names of the estimators of one term, then of those that are functions only."""
    return [*(name for name, config in composable().items() if is_single(config)), *functions()]


def pairs(unfit: Collection[str]) -> list[str]:
    """Names of episode and step terms together, but of those that no problem is for."""
    return [
        name
        for name, config in composable().items()
        if not is_single(config) and not set(terms_of(config)) & set(unfit)
    ]


def named_in(page: str, part: str) -> list[str]:
    """Estimators in the first column of a table of the page, in their order."""
    table = page.split(f"<!-- {part}: begin")[1].split(f"<!-- {part}: end")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)


def unfit_in(page: str) -> list[str]:
    """Those with nothing in their row of the table of bias, but for the last problem, the branched one."""
    return re.findall(r"^\| `([^`]+)`(?: \| -)+ \| [^|]+ \|$", page, flags=re.MULTILINE)


def tables(problems: Sequence[Mdp], results: Results, *, groups: int) -> dict[str, str]:
    """What stands between the markers of the page, by their names."""
    told = [f"| {mdp.name} | {mdp.what} | {expected_return(mdp):.3f} | {mdp.horizon} |" for mdp in problems]
    bias = _table(problems, results, singles(), _bias)
    plain = [mdp for mdp in problems if mdp.branches == 1]
    with_gradient = [mdp for mdp in problems if _has_gradient(results[mdp.name])]
    return {
        "setup": f"Groups of {SIZE} rollouts, {groups:,} of each problem.",
        "problems": "\n".join(
            ["| problem | what | expected return | steps at most |", "|---|---|---|---|", *told]
        ),
        "bias": bias,
        "noise": _table(with_gradient, results, singles(), _noise),
        "pairs": _table(plain, results, pairs(unfit_in(bias)), _bias),
    }


def _has_gradient(found: Mapping[str, Held | None]) -> bool:
    return any(held is not None and not math.isnan(held.cosine) for held in found.values())


def _table(
    problems: Sequence[Mdp], results: Results, names: Sequence[str], cell: Callable[[Held | None], str]
) -> str:
    head = f"| estimator | {' | '.join(mdp.name for mdp in problems)} |"
    rows = [
        f"| `{name}` | {' | '.join(cell(results[mdp.name][name]) for mdp in problems)} |" for name in names
    ]
    return "\n".join([head, "|---" * (len(problems) + 1) + "|", *rows])


def _bias(held: Held | None) -> str:
    if held is None:
        return "-"
    z = "" if math.isinf(held.z_direction) else f" (z {held.z_direction:.0f})"
    if math.isnan(held.cosine):
        return f"**{held.bias:.3f}**{z}" if held.is_biased else "0"
    if held.is_biased:
        return f"**{math.degrees(math.acos(max(-1.0, min(1.0, held.cosine)))):.0f}°**{z}"
    return "exact" if held.is_exact else f"x {held.scale:.2f}"


def _noise(held: Held | None) -> str:
    return "-" if held is None or math.isnan(held.noise) else f"{held.noise:.2f}"


def verdict(held: Held) -> str:
    """exact, factor or biased."""
    if held.is_biased:
        return "biased"
    return "exact" if held.is_exact else "factor"


_WIDE, _ROW, _TOP, _LETTER = 118, 20, 64, 7


def svg(problems: Sequence[Mdp], results: Results) -> str:
    """A bar for every estimator and problem: its length is the noise, its color says whether it is biased."""
    names = singles()
    left = _LETTER * max(map(len, names)) + 20
    width, height = left + _WIDE * len(problems) + 10, _TOP + _ROW * len(names) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
    ]
    for row, name in enumerate(names):
        y = _TOP + _ROW * row
        if row % 2 == 0:
            parts.append(f'<rect y="{y}" width="{width}" height="{_ROW}" fill="#f4f6f8"/>')
        parts.append(_text(left - 10, y + 14, name, anchor="end"))
    for column, mdp in enumerate(problems):
        parts += _panel(left + _WIDE * column, mdp, results[mdp.name], names)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    told = {"exact": "exact", "factor": "right up to a positive factor", "biased": "biased"}
    parts, x = [], 12.0
    for kind, text in told.items():
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" rx="2" fill="{_COLORS[kind]}"/>')
        parts.append(_text(x + 17, 20, text))
        x += 34 + 7.0 * len(text)
    parts.append(_text(x + 10, 20, "length: noise of one group; of stop and risky stop, gradient 0: bias"))
    return parts


def _panel(x: int, mdp: Mdp, found: Mapping[str, Held | None], names: Sequence[str]) -> list[str]:
    has_gradient = _has_gradient(found)
    lengths = [_length(found[name], has_gradient) for name in names]
    finite = sorted(length for length in lengths if math.isfinite(length))
    longest = (1.6 * finite[len(finite) // 2] if has_gradient else finite[-1]) or 1.0
    parts = [
        _text(x, _TOP - 22, mdp.name, weight="600"),
        _text(x, _TOP - 7, f"{'noise' if has_gradient else 'bias'}, to {longest:.2g}", color="#5b6472"),
    ]
    room = _WIDE - 46
    for row, (name, length) in enumerate(zip(names, lengths, strict=True)):
        held, y = found[name], _TOP + _ROW * row
        if held is None:
            parts.append(_text(x, y + 14, "-", color="#5b6472"))
            continue
        reach = room * min(length / longest, 1.0) if math.isfinite(length) else room
        label = f"{length:.2f}" if math.isfinite(length) else "wrong way"
        color = _COLORS[verdict(held)]
        drawn = max(reach, 2.0)
        size = f'width="{drawn:.1f}" height="{_ROW - 8}" rx="2"'
        parts.append(f'<rect x="{x}" y="{y + 4}" {size} fill="{color}"/>')
        is_inside = not math.isfinite(length)
        at, ink = (x + 5, "#ffffff") if is_inside else (x + drawn + 4, "#5b6472")
        parts.append(_text(at, y + 14, label, color=ink))
    return parts


def _length(held: Held | None, has_gradient: bool) -> float:
    if held is None:
        return math.nan
    return held.noise if has_gradient else held.bias


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400", color: str = "#1d2330"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}">'
        f"{html.escape(text)}</text>"
    )
