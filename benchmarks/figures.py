"""The figures of a results file by path, with direction and spread, and as people write them."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

MORE_IS_BETTER: Final = ("per_second", "share")
LESS_IS_BETTER: Final = ("ms", "us", "bytes", "statements", "transactions", "trips")
SPREAD: Final = {"median", "min", "max"}
PERCENTILES: Final = {"p50", "p95", "p99", "max"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: a median over rounds with minimum and maximum, a median of many, or a count.

    For the last two `low` and `high` are the value itself.
    """

    path: tuple[str, ...]
    value: float
    low: float
    high: float
    timed: bool
    """A timing: it depends on other load of the machine."""
    p99: float | None = None
    """The 99th percentile, of a median of many."""

    @property
    def ours(self) -> bool:
        """Return whether it is neither of a peer nor a limit of the database."""
        return not any(name.startswith(("synapse", "limit", "raw", "bare")) for name in self.path)

    @property
    def better(self) -> int:
        """Return 1 if more is better, -1 if less is, and 0 if unknown."""
        if any("ratio" in name for name in self.path):
            return 1
        for name in reversed(self.path):
            words = name.split()
            if any(word in name for word in MORE_IS_BETTER):
                return 1
            if any(part in LESS_IS_BETTER for word in words for part in (word, *word.split("_"))):
                return -1
        return 0


def read(path: Path) -> dict[str, Any]:
    """Read a results file."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def figures(document: dict[str, Any]) -> dict[tuple[str, ...], Figure]:
    """Return all figures of a results file, by path."""
    return {one.path: one for one in _walk((), document["results"])}


def _named(rows: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a list by their name; a second row of the same name is "… (2)".

    Elements that are no rows have no name, and are left out.
    """
    met: Counter[str] = Counter()
    for row in rows:
        if isinstance(row, dict):
            name = str(row.get("what", row.get("name", ""))).strip()
            met[name] += 1
            yield (f"{name} ({met[name]})".strip() if met[name] > 1 or not name else name), row


def _walk(path: tuple[str, ...], value: Any) -> Iterator[Figure]:
    if isinstance(value, dict) and value.keys() == SPREAD:
        yield Figure(path, value["median"], value["min"], value["max"], timed=True)
    elif isinstance(value, dict) and value.keys() == PERCENTILES:
        median = value["p50"]
        yield Figure(path, median, median, median, timed=True, p99=value["p99"])
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk((*path, name), inner)
    elif isinstance(value, list):
        for name, inner in _named(value):
            yield from _walk((*path, name), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        timed = any(part in path[-1].split("_") for part in ("second", "ms", "us"))
        yield Figure(path, value, value, value, timed=timed)


UNITS: Final = {
    "second": "/s",
    "ratio": "x",
    "share": "%",
    "seconds": "s",
    "ms": "ms",
    "us": "µs",
    "bytes": "B",
    "wal": "B",
    "mb": "MB",
    "megabytes": "MB",
}
"""A word of a figure's name, and the unit that it stands for."""

LARGER: Final = {
    "µs": (1_000, "ms"),
    "ms": (1_000, "s"),
    "s": (60, "min"),
    "B": (1_000, "kB"),
    "kB": (1_000, "MB"),
    "MB": (1_000, "GB"),
}
"""From which value on a unit is replaced by the next one."""

KEPT: Final = 10_000
"""Bytes below this are written in full: sizes of rows compare best so."""


def unit_of(path: Sequence[str]) -> str:
    """Return the unit of a figure, from the words of its path; "" for a count."""
    words = [_words(name) for name in reversed(path)]
    for word in ("ratio", "share"):
        if any(word in found for found in words):
            return UNITS[word]
    for found in words:
        for word in reversed(found):
            if word in UNITS:
                return UNITS[word]
    return ""


def _words(name: str) -> list[str]:
    return name.lower().replace("_", " ").replace(",", " ").split()


def number(value: float) -> str:
    """Return a number with three digits, or all digits of a whole number above them."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: 2.71 ms, 3.65 s, 8,037/s, 22 %, 1.46 kB."""
    if unit == "%":
        return f"{value * 100:.0f} %"
    if unit in ("/s", "x"):
        return number(value) + unit  # "3.2x", "724/s"
    while unit in LARGER and abs(value) >= LARGER[unit][0] and not (unit == "B" and value < KEPT):
        factor, unit = LARGER[unit]
        value /= factor
    return f"{number(value)} {unit}".strip()


def cells(one: Figure) -> tuple[str, str]:
    """Return the value and its spread as text; the latter is empty if there is one value."""
    unit = unit_of(one.path)
    if one.p99 is not None:
        return quantity(one.value, unit), f"p99 {quantity(one.p99, unit)}"
    spread = f"{quantity(one.low, unit)} to {quantity(one.high, unit)}"
    return quantity(one.value, unit), "" if one.low == one.high else spread


def written(names: Iterable[str]) -> str:
    """Return the names of a path as text."""
    return ": ".join(name.replace("_", " ") for name in names)


class FigureTable(NamedTuple):
    """Figures by name, with a column for each of the scenarios that have them."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(document: dict[str, Any]) -> Iterator[FigureTable]:
    """Yield tables of all figures. Scenarios with the same figures stand in one."""
    return _tables((), figures(document))


def _tables(above: tuple[str, ...], found: dict[tuple[str, ...], Figure]) -> Iterator[FigureTable]:
    scenarios: dict[str, dict[tuple[str, ...], Figure]] = defaultdict(dict)
    for path, one in found.items():
        scenarios[path[0]][path[1:]] = one
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
    for name, own in scenarios.items():
        alike[tuple(own)].append(name)
    for paths, names in alike.items():
        if paths == ((),):
            rows = [[written([name]), _cell(scenarios[name][()])] for name in names]
            yield FigureTable(written(above), [""], rows)
        elif len(names) == 1:
            yield from _tables((*above, *names), scenarios[names[0]])
        else:
            rows = [
                [written(path), *(_cell(scenarios[name][path]) for name in names)] for path in paths
            ]
            yield FigureTable(written(above), [written([name]) for name in names], rows)


def _cell(one: Figure) -> str:
    value, spread = cells(one)
    return f"{value} ({spread})" if spread else value
