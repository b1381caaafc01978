"""`python -m benchmarks report [--results FOLDER]`: write a page of all results.

The page loads nothing. It begins with the verdict of the comparison with Synapse, then has six
comparisons as bars and a list of contents. The other figures are folded, with their units.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.figures import (
    Figure,
    cells,
    figures,
    number,
    quantity,
    read,
    unit_of,
    written,
)
from benchmarks.harness import RESULTS, note


class Side(NamedTuple):
    """One engine in a scenario: a median over rounds, and the extremes."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """One scenario: ``factor`` is how many times as fast, or as small, this engine is."""

    title: str
    what: str
    unit: str
    more_is_better: bool
    ours: Side
    synapse: Side
    factor: float


STORED: Final = {
    "one at a time, small rooms": "Store events one at a time",
    "8 rooms at once": "Store events of 8 rooms at once",
    "batches of 100, one room": "Store batches of 100 events",
}
READ: Final = {
    "incremental sync, 10 of 100 rooms changed": "Sync: 10 of 100 rooms have changed",
    "a page of 100": "Read a page of 100 messages",
}
SIZES: Final = {"small rooms": "Disk: small rooms, per event"}


def comparisons(results: dict[str, Any]) -> list[Comparison]:
    """Return the six comparisons; fewer for a run that ended early."""
    found = [_stored(title, results["writes"][name]) for name, title in STORED.items()]
    if "reads" in results:
        found += [_read(title, results["reads"][name]) for name, title in READ.items()]
    if "disk" in results:
        found += [_size(title, results["disk"][name]) for name, title in SIZES.items()]
    return found


def _stored(title: str, one: dict[str, Any]) -> Comparison:
    ours, synapse = (_side(one[name]["events_per_second"]) for name in ("ours", "synapse"))
    factor = one["ratio"]["events_per_second"]["median"]
    return Comparison(title, "events per second", "/s", True, ours, synapse, factor)


def _read(title: str, one: dict[str, Any]) -> Comparison:
    ours, synapse = (_answers(one[name]["ms"]) for name in ("ours", "synapse_cold"))
    what = "time of the first response, caches of the engine emptied"
    return Comparison(title, what, "ms", False, ours, synapse, one["ratio_cold"]["median"])


def _size(title: str, one: dict[str, Any]) -> Comparison:
    ours, synapse = (Side(one[n]["bytes_per_event"], *[one[n]["bytes_per_event"]] * 2)
                     for n in ("ours", "synapse"))  # fmt: skip
    what = "tables and indexes, per event"
    return Comparison(title, what, "B", False, ours, synapse, one["ratio"]["bytes"])


def _side(spread: dict[str, float]) -> Side:
    return Side(spread["median"], spread["min"], spread["max"])


def _answers(percentiles: dict[str, float]) -> Side:
    return Side(percentiles["p50"], percentiles["p50"], percentiles["p95"])


def factors(results: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast this engine is, for each scenario of storing and reading."""
    found = {
        name: one["ratio"]["events_per_second"]["median"] for name, one in results["writes"].items()
    }
    for name, one in results.get("reads", {}).items():
        found[name] = one["ratio_cold"]["median"]
        found[f"{name}, caches warm"] = one["ratio_warm"]["median"]
    return found


def verdict(results: dict[str, Any]) -> str:
    """Return the result of the comparison in two or three sentences."""
    found = factors(results)
    faster = {name: factor for name, factor in found.items() if factor > 1}
    text = (
        f"In {len(faster)} of {len(found)} comparisons this engine is faster than Synapse: "
        f"{number(min(faster.values()))} to {number(max(faster.values()))} times,"
        f" {number(median(faster.values()))} times in the median."
    )
    slower = {name: factor for name, factor in found.items() if factor <= 1}
    if slower:
        listed = ", ".join(f"{name} ({quantity(factor, 'x')})" for name, factor in slower.items())
        text += f" It is slower in: {listed}."
    if "disk" in results:
        sizes = [one["ratio"]["bytes"] for one in results["disk"].values()]
        text += (
            f" Its tables and indexes take {number(min(sizes))} to {number(max(sizes))} times"
            " less space."
        )
    return text


SIDES: Final = {
    "ours": "here",
    "ours_again": "here, caches warm",
    "synapse": "Synapse",
    "synapse_cold": "Synapse",
    "synapse_warm": "Synapse, caches warm",
}
"""Names of engines in the results, and how the page calls them."""

TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip


class PlotBar(NamedTuple):
    """One bar; widths are percent of the room for bars."""

    label: str
    side: str
    width: str
    low: str
    spread: str
    text: str


def main(arguments: list[str]) -> int:
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
    listed = list(documents)
    peer = next((one for one in listed if one["benchmark"] == "peer" and not one["quick"]), None)
    return TEMPLATES.get_template("report.html.j2").render(
        peer=None if peer is None else _peer(peer), sections=[section(one) for one in listed]
    )


def _peer(document: dict[str, Any]) -> dict[str, Any]:
    results = document["results"]
    return {
        "verdict": verdict(results),
        "where": where(document),
        "comparisons": [_comparison(one) for one in comparisons(results)],
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    sides = [("here", "ours", one.ours), ("Synapse", "synapse", one.synapse)]
    top = max(side.high for _, _, side in sides)
    better = "as small" if one.unit == "B" else "as fast"
    return {
        "title": one.title,
        "what": one.what,
        "direction": "more" if one.more_is_better else "less",
        "factor": f"{quantity(one.factor, '')} times {better}",
        "bars": [bar(label, name, side, top, one.unit) for label, name, side in sides],
    }


def bar(label: str, name: str, side: Side, top: float, unit: str) -> PlotBar:
    """Return a bar for a value, on a scale from zero to ``top``."""
    width, low, high = (
        100 * max(value, 0) / (top or 1) for value in (side.value, side.low, side.high)
    )
    spread = f"{high - low:.2f}" if side.low != side.high else ""
    return PlotBar(label, name, f"{width:.2f}", f"{low:.2f}", spread, quantity(side.value, unit))


def section(document: dict[str, Any]) -> dict[str, Any]:
    """Return the part of one file."""
    name = document["benchmark"] + (", quick" if document["quick"] else "")
    found = list(figures(document).values())
    return {
        "name": name,
        "anchor": name.replace(", ", "-").replace("_", "-"),
        "about": about(document["benchmark"]),
        "where": where(document),
        "plots": [plot(title, bars) for title, bars in shared(found)],
        "figures": [_row(one) for one in found],
    }


def about(name: str) -> str:
    """Return the first sentence of a benchmark's module; "" if there is no such module."""
    path = Path(__file__).with_name(f"{name}.py")
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path.exists() else None
    sentence = " ".join((text or "").split("\n\n", maxsplit=1)[0].split())
    return (
        sentence.removeprefix(f"`python -m benchmarks {name}`: ")
        .split(". ", maxsplit=1)[0]
        .rstrip(".")
    )


def where(document: dict[str, Any]) -> str:
    """Describe the time, the commit and the environment."""
    on, machine = document["on"], document["on"]["machine"]
    changed = " with changes" if on["changed_since"] else ""
    return (
        f"{document['when'][:10]}, commit {on['commit']}{changed},"
        f" Python {on['python']}, {on['postgres']}, "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB,"
        f" load {machine['load'][0]:.1f} at the end"
    )


def shared(found: list[Figure]) -> list[tuple[str, list[tuple[str, str, Figure]]]]:
    """Return the plots: title and bars (label, side, figure) of figures of two or more scenarios.

    The sides (ours, synapse) share one plot.
    """
    plots: dict[str, list[tuple[str, str, Figure]]] = defaultdict(list)
    for one in found:
        side = next((name for name in one.path if name in SIDES), "")
        names = [name for name in one.path if name != side]
        if one.better and len(names) > 1:
            group = names[0] if len(names) > 2 else ""
            title = written(filter(None, (group, names[-1])))
            plots[title + (", ratio" if unit_of(one.path) == "x" else "")].append(
                (written(names[1 if group else 0 : -1]), side, one)
            )
    return [
        (title, bars) for title, bars in plots.items() if len({label for label, _, _ in bars}) > 1
    ]


def plot(title: str, bars: Sequence[tuple[str, str, Figure]]) -> dict[str, Any]:
    """Return horizontal bars from zero, with a line for the spread over rounds."""
    top = max(one.high for _, _, one in bars)
    return {
        "title": title,
        "direction": "more" if bars[0][2].better > 0 else "less",
        "bars": [
            bar(
                f"{label}, {SIDES[side]}" if side else label,
                side or "ours",
                Side(one.value, one.low, one.high),
                top,
                unit_of(one.path),
            )
            for label, side, one in bars
        ],
    }


def _row(one: Figure) -> dict[str, str]:
    value, spread = cells(one)
    name = written(SIDES.get(name, name) for name in one.path)
    return {"name": name, "value": value, "spread": spread}
