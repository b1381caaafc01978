"""The order in which a room's lines are stored: again and again the first line whose events it needs have all had their turn.

That is what a patient reader would do who appends line by line and comes back to a line that lacked something as soon as it can be stored.
So a room whose lines come in causal order is stored line by line as they stand, which is the usual case and costs a dictionary.
Only the slim graph is held: ids and places, never PDUs.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from storage.graph.topological_sort import topological_sort

PARENT: Final = "^"
"""Before the id of a needed event: an outlier is not enough (`storage.pipeline.imports.validate.needs`)."""


class LineWithoutPdu(NamedTuple):
    """A line without its PDU."""

    event_id: str
    outlier: bool
    needs: Sequence[str]


def order(lines: Sequence[LineWithoutPdu]) -> list[int] | None:
    """The indexes of the lines in the order in which to store them; None: as they stand.

    Lines of one event keep their order. In a circle, which the ids of versions 1 and 2 can form,
    the first line goes ahead.
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
