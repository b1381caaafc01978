"""The topological ranges of a room's audiences, so that reads skip hidden events.

A number of the main line stores the maximum of the topological order before the event that opened
it. That grows with the numbers. So the events of a range of numbers lie between the stored maximum
of its first number and that of the number after its last. A reader's ranges thus become topological
ranges (`topological_ranges_of` in the schema), found by two probes each. Nothing has to be written
when an audience closes, or for a message.

    opened       0          40         90
    number       1          2          3 (current)
    order        1 … 40     41 … 90    91 …        a reader of number 2 alone: 41 … 90

Forks cross these bounds. They cross them by a little where servers send at the same time, which
`SLACK` allows for. They sometimes cross them by much, as where a server was cut off, or where
history is backfilled. Such events are out of range: the room's row stores the range around them,
and every reader scans it. These ranges only say where to scan; the audience alone decides
visibility. Events that no local user may ever see are not marked: their server is not in the
audience, and the history is neither shared nor world readable. So history that was hidden from the
start costs no reader anything, however long it is.
"""

from typing import Final

from storage.visibility import multirange
from storage.visibility.multirange import Ranges

SLACK: Final = 100  # as order_slack() in the schema
# an out-of-range event marks the whole aligned range of this length, so that similar ones are
# mostly marked already
AROUND: Final = 256
OUT_OF_RANGE_MAX: Final = (
    64  # out-of-range ranges in a room; above that, the nearest ones are joined
)


def expected(order: int, opened: int, closed: int | None) -> bool:
    """Return whether reads scan this topological position for an audience with these bounds.

    ``closed`` None means that the audience is current.
    """
    return opened - SLACK <= order and (closed is None or order <= closed + SLACK)


def with_out_of_range(out_of_range: Ranges, order: int) -> Ranges:
    """Return the out-of-range ranges of a room with this position added."""
    if multirange.contains(out_of_range, order):
        return out_of_range
    low = order - order % AROUND
    return multirange.coarser(multirange.add(out_of_range, low, low + AROUND), OUT_OF_RANGE_MAX)
