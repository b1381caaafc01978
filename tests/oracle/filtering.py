"""Filters read aloud: client-server API, "Filtering".

One event at a time, by its words; the store decides in numbers, in SQL.
"""

from collections.abc import Mapping
from typing import Any

from storage import EventFilter


def passes(wanted: EventFilter, kind: str, sender: str, content: Mapping[str, Any]) -> bool:
    """Return whether the filter wants this type, sender and content (redacted, if the event is)."""
    if wanted.types is not None and not any(matches(pattern, kind) for pattern in wanted.types):
        return False
    if wanted.not_types is not None and any(matches(pattern, kind) for pattern in wanted.not_types):
        return False
    if wanted.senders is not None and sender not in wanted.senders:
        return False
    if wanted.not_senders is not None and sender in wanted.not_senders:
        return False
    return wanted.contains_url is None or wanted.contains_url == ("url" in content)


def matches(pattern: str, kind: str) -> bool:
    """A star stands for any characters, also none; everything else for itself."""
    beginning, star, rest = pattern.partition("*")
    if not star:
        return pattern == kind
    return kind.startswith(beginning) and any(
        matches(rest, kind[at:]) for at in range(len(beginning), len(kind) + 1)
    )
