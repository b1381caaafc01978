"""`python -m benchmarks report [--results FOLDER]`: write a static page of all results, with plots.

The page has no scripts and loads nothing. For each file it has the environment, a plot for each
figure that several scenarios share, and all figures in a table.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, figures, read
from benchmarks.harness import RESULTS, note

WIDTH: Final = 900
LABELS: Final = 340
BAR: Final = 16
COLOURS: Final = {
    "ours": "#2a6f97",
    "ours_again": "#89b4cf",
    "synapse": "#c9742e",
    "synapse_cold": "#c9742e",
    "synapse_warm": "#e3b07c",
}
PLAIN: Final = "#2a6f97"
STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 940px; margin: 2em auto; padding: 0 1em;
  color: #222 }
h2 { margin-top: 2.5em; border-top: 1px solid #ccc; padding-top: 1em }
h3 { margin: 1.6em 0 .3em; font-size: 1em }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: 1px 10px 1px 0; text-align: left } td.n { text-align: right }
p.on { color: #666; font-size: 13px } svg text { font: 12px system-ui, sans-serif; fill: #222 }
"""


def main(arguments: list[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="the folder of results (benchmarks/results)",
    )
    folder = parser.parse_args(arguments).results
    documents = [read(path) for path in sorted(folder.glob("*.json"))]
    if not documents:
        parser.error(f"there are no results in {folder}")
    path = folder / "report.html"
    path.write_text(page(documents), encoding="utf-8")
    note(f"written to {path}")
    return 0


def page(documents: Iterable[dict[str, Any]]) -> str:
    """Return the whole page."""
    parts = [section(document) for document in documents]
    head = f'<meta charset="utf-8"><title>Benchmarks</title><style>{STYLE}</style>'
    body = f"<body>\n<h1>Benchmarks</h1>\n{''.join(parts)}</body>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'


def section(document: dict[str, Any]) -> str:
    """Return the section of one file."""
    name = document["benchmark"] + (", quick" if document["quick"] else "")
    found = list(figures(document).values())
    plots = "".join(plot(title, bars) for title, bars in shared(found))
    return f"<h2>{escape(name)}</h2>\n{told_on(document)}\n{plots}{table(found)}\n"


def told_on(document: dict[str, Any]) -> str:
    """Describe the time, the commit and the environment."""
    on, machine = document["on"], document["on"]["machine"]
    changed = ", with changes" if on["changed_since"] else ""
    text = (
        f"{document['when']}; commit {on['commit']}{changed};"
        f" Python {on['python']}, {on['postgres']}; "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB;"
        f" load {machine['load'][0]} at the end"
    )
    return f'<p class="on">{escape(text)}</p>'


def shared(found: list[Figure]) -> list[tuple[str, list[tuple[str, str, Figure]]]]:
    """Return the plots: title and bars (label, side, figure) of figures of two or more scenarios.

    The sides (ours, synapse) share one plot.
    """
    plots: dict[str, list[tuple[str, str, Figure]]] = defaultdict(list)
    for one in found:
        side = next((name for name in one.path if name in COLOURS), "")
        names = [name for name in one.path if name != side]
        if one.better and len(names) > 1:
            group = names[0] if len(names) > 2 else ""
            plots[" / ".join(filter(None, (group, names[-1])))].append(
                (" / ".join(names[1 if group else 0 : -1]), side, one)
            )
    return [
        (title, bars) for title, bars in plots.items() if len({label for label, _, _ in bars}) > 1
    ]


def plot(title: str, bars: list[tuple[str, str, Figure]]) -> str:
    """Draw horizontal bars from zero, with a line for the spread over rounds."""
    top = max(one.high for _, _, one in bars) or 1
    room = WIDTH - LABELS - 90
    rows, at, last = [], 4, ""
    for label, side, one in bars:
        at += 5 if label != last else 0
        middle = at + BAR - 4
        text = label if label != last else ""
        width, low, high = (
            LABELS + room * max(value, 0) / top for value in (one.value, one.low, one.high)
        )
        rows.append(
            f'<text x="{LABELS - 8}" y="{middle}" text-anchor="end">{escape(_short(text))}</text>'
        )
        rows.append(
            f'<rect x="{LABELS}" y="{at}" width="{width - LABELS:.1f}" height="{BAR - 3}"'
            f' fill="{COLOURS.get(side, PLAIN)}"/>'
        )
        if one.low != one.high:
            rows.append(f'<path d="M{low:.1f} {at + BAR // 2 - 1}H{high:.1f}" stroke="#222"/>')
        rows.append(
            f'<text x="{max(width, high) + 6:.1f}" y="{middle}">'
            f"{one.value:,.4g}{escape(f' {side}' if side else '')}</text>"
        )
        at, last = at + BAR, label
    drawn = "\n".join(rows)
    svg = f'<svg width="{WIDTH}" height="{at + 6}" role="img">\n{drawn}\n</svg>'
    return f"<h3>{escape(title)}</h3>\n{svg}\n"


def _short(text: str) -> str:
    return text if len(text) <= 52 else text[:50] + "…"


def table(found: list[Figure]) -> str:
    """Return a table of all figures."""
    rows = []
    for one in found:
        spread = "" if one.low == one.high else f"{one.low:,.6g} to {one.high:,.6g}"
        rows.append(
            f'<tr><td>{escape(" / ".join(one.path))}</td><td class="n">{one.value:,.6g}</td>'
            f'<td class="n">{spread}</td></tr>'
        )
    return f"<details><summary>All figures</summary><table>{''.join(rows)}</table></details>"
