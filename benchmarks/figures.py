"""The figures of a results file by path, with direction and spread."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
        yield Figure(path, value["p50"], value["p50"], value["p50"], timed=True)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk((*path, name), inner)
    elif isinstance(value, list):
        for name, inner in _named(value):
            yield from _walk((*path, name), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        timed = any(part in path[-1].split("_") for part in ("second", "ms", "us"))
        yield Figure(path, value, value, value, timed=timed)
