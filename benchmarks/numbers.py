"""Figures as people write them: a unit for each name, three digits, thousands separated."""

from collections.abc import Sequence
from typing import Final

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
