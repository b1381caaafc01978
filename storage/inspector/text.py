"""Text from other servers, made safe to look at, and values in the form that people read.

Escaping keeps text from becoming markup. It does not keep text from lying: a control character may
hide a part of it, a bidirectional one may reverse its neighbours, and a pile of accents may cover
the lines around it. `visible` replaces each of these by its code point: ⟦U+202E⟧.
"""

import re
import unicodedata
from datetime import UTC, datetime
from math import inf
from typing import Final

MARKS_MAX: Final = 4
"""Combining marks in a row that are shown as they are: some scripts need three."""

SHOWN_AS_IS: Final = frozenset("\n\t")

HIDDEN_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control, format, surrogate, private, unassigned; separators of lines and paragraphs."""

BLANKS: Final = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
"""Letters and marks without a form."""

ODD: Final = re.compile(r"[^\x20-\x7e\n\t]")


def visible(text: str) -> str:
    """Return text in which no character hides, reverses or covers another one."""
    if ODD.search(text) is None:
        return text
    shown: list[str] = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        marks = marks + 1 if category in {"Mn", "Me"} else 0
        is_plain = (
            (category not in HIDDEN_CATEGORIES or character in SHOWN_AS_IS)
            and marks <= MARKS_MAX
            and character not in BLANKS
            and not 0xFE00 <= ord(character) <= 0xFE0F  # variation selectors
            and not 0xE0100 <= ord(character) <= 0xE01EF
        )
        shown.append(character if is_plain else f"⟦U+{ord(character):04X}⟧")
    return "".join(shown)


def one_line(text: str) -> str:
    """Return visible text without line breaks, as for a line of a log."""
    return visible(text).replace("\n", "⟦U+000A⟧").replace("\t", "⟦U+0009⟧")


def shortened(text: str, length: int = 14) -> str:
    """Return the beginning of an id, for a place where the whole one is near."""
    return text if len(text) <= length else f"{text[:length]}…"


def sentence(text: str) -> str:
    """Return text with a capital, and a full stop if it has no end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def number(value: float) -> str:
    """Return a number with thousands separators."""
    return f"{value:,.0f}"


def size(bytes_: float) -> str:
    """Return a size: 512 B, 1.5 kB, 2.0 MB. Rounded down."""
    value = float(bytes_)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{int(value * 10) / 10} {unit}"
        value /= 1000
    return f"{int(value * 10) / 10} TB"


def moment(ms: int | None) -> str:
    """Return a time in UTC to the second. A time that no calendar has is shown as a number."""
    if ms is None:
        return ""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"{ms} ms"


def day(ms: int) -> str:
    """Return the day of a time in UTC."""
    return moment(ms)[:10]


def percent(part: float, whole: float) -> str:
    """Return a share with one decimal, rounded down: 12.3 %."""
    return f"{int(1000 * part / whole) / 10 if whole else 0.0} %"


def duration(ms: float) -> str:
    """Return a length of time in its largest unit: 3 days, 2 hours, 1 minute."""
    seconds = int(ms / 1000)
    for name, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            return counted(seconds // length, name)
    return counted(seconds, "second")


def ago(ms: int | None, now_ms: int) -> str:
    """Return how long ago a time was, as received; empty for none."""
    if ms is None:
        return ""
    return f"{duration(now_ms - ms)} ago" if ms <= now_ms else f"in {duration(ms - now_ms)}"


def level(value: float, infinite: str = "creator") -> str:
    """Return a power level, or a position that may be infinite."""
    return infinite if value == inf else f"{value:g}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 event, 2,000 events."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
