"""The order in which the lines of a room are stored.

Each step takes the first line whose dependencies are all stored. This is the order of a reader who
appends line by line, and returns to a deferred line as soon as it can be stored. A room whose lines
come in causal order is stored in that order. This is the usual case and costs a dictionary. Only
the slim graph is in memory: ids and positions, never PDUs.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from storage.graph.topological_sort import topological_sort

PARENT: Final = "^"
"""Prefix of a required id that must not be an outlier (`slim_event.needs`)."""


class LineWithoutPdu(NamedTuple):
    """A line without its PDU."""

    event_id: str
    outlier: bool
    needs: Sequence[str]


def order(lines: Sequence[LineWithoutPdu]) -> list[int] | None:
    """Return the indexes of the lines in the order in which to store them; None: as they are.

    Lines of one event keep their order. In a cycle, which the ids of versions 1 and 2 allow, the
    first line goes first.
    """
    first: dict[str, int] = {}
    first_parent: dict[str, int] = {}
    previous: list[int | None] = []
    last: dict[str, int] = {}
    for index, line in enumerate(lines):
        previous.append(last.get(line.event_id))
        last[line.event_id] = index
        first.setdefault(line.event_id, index)
        if not line.outlier:
            first_parent.setdefault(line.event_id, index)
    waits: list[set[int]] = []
    for index, line in enumerate(lines):
        named = {
            first_parent.get(one[1:]) if one.startswith(PARENT) else first.get(one)
            for one in line.needs
        }
        named.add(previous[index])
        waits.append({one for one in named if one is not None and one != index})
    if all(max(befores, default=-1) < index for index, befores in enumerate(waits)):
        return None
    return topological_sort(waits)
