"""Where in a room's topological order the events of an audience lie, so that reads pass over what is hidden.

A number of the main line remembers how far the order reached before the event that opened it. That grows with the numbers: so the events of
a stretch of numbers lie between what its first number remembers and what the number after its last does. A reader's ranges
are thereby stretches of the order (`topological_ranges_of` in the schema), found by two probes each, and nothing has to be written when an
audience ends, nor for any message.

    opened       0          40         90
    number       1          2          3 (current)
    order        1 … 40     41 … 90    91 …        a reader of number 2 alone: 41 … 90

Forks cross these bounds: by a little where servers send at the same time, which `SLACK` allows for; and sometimes by much, as where a
server was cut off, or where history is filled in. Such events are strays: the stretch around them is remembered in the room's row,
and every reader looks through it. What a stretch holds is only where to look; who sees what is decided by audience alone. Events that no
local user may ever see (their server is not in the audience, nor is it shared or world readable) are no strays: history that was hidden
from before the first of them came costs no reader anything, however long it is.
"""

from typing import Final

from storage.visibility import multirange
from storage.visibility.multirange import Ranges

SLACK: Final = 100  # as order_slack() in the schema
AROUND: Final = 256  # a stray marks the whole aligned stretch of this length: of its like, most are then marked already
STRETCHES_MAX: Final = 64  # of strays, in a room; where there are more, the nearest ones are joined


def expected(order: int, opened: int, closed: int | None) -> bool:
    """Whether reads look at this place for an audience that was opened and closed (None: is current) at these."""
    return opened - SLACK <= order and (closed is None or order <= closed + SLACK)


def with_out_of_range(out_of_range: Ranges, order: int) -> Ranges:
    """The stretches of strays with one at this place."""
    if multirange.contains(out_of_range, order):
        return out_of_range
    low = order - order % AROUND
    return multirange.coarser(multirange.add(out_of_range, low, low + AROUND), STRETCHES_MAX)
