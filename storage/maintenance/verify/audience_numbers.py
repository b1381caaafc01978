"""Check the rows of `audiences`: the lines of numbers, from which new numbers are taken.

A number that seems to be free would be given to a second audience, and show events to others.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom
from storage.visibility.audience_numbering import LINE, UNIT, depth, following, main

SQL_NUMBERS: Final[LiteralString] = """
SELECT audience, opened_topological, branches, COALESCE(continued, false) AS continued
FROM audiences
WHERE room_nid = $1::int
ORDER BY audience
"""

SQL_HAS_PURGES: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM purge_jobs WHERE room_nid = $1::int)
"""

SQL_PAST_WITHOUT_USE: Final[LiteralString] = """
SELECT COALESCE(p.name, 'principal ' || o.principal_nid) AS name, o.first_audience
FROM past_visibility o
LEFT JOIN principals p USING (principal_nid)
LEFT JOIN visibility v USING (room_nid, principal_nid)
WHERE o.room_nid = $1::int AND (v.first_audience > o.first_audience) IS NOT TRUE
ORDER BY 1, 2
"""


class NumberRow(NamedTuple):
    """A number in use, and what has left from it."""

    audience: int
    opened_topological: int | None
    branches: int
    continued: bool


class PastAudienceRow(NamedTuple):
    """A row of past visibility that no row of visibility refers to."""

    name: str
    first_audience: int


async def check_audience_numbers(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check lines of audiences, and that past visibility continues a row ("audiences")."""
    is_cut = await conn.fetchval(SQL_HAS_PURGES, room.nid)
    rows = {row.audience: row for row in await conn.fetch(SQL_NUMBERS, room.nid, row=NumberRow)}
    for number, found, expected in _faults(rows, is_cut=is_cut):
        yield room.finding("audiences", [f"audience {number}"], found, expected)
    opened = [row.audience for row in rows.values() if row.opened_topological is not None]
    current = opened[-1] if opened else 0
    if room.row.current_audience != current:
        found = f"current_audience {room.row.current_audience}"
        yield room.finding("audiences", [room.row.room_id], found, current)
    if room.row.next_audience % UNIT[0]:
        found = f"next_audience {room.row.next_audience}"
        yield room.finding("audiences", [room.row.room_id], found, "a number of the main line")
    for past in await conn.fetch(SQL_PAST_WITHOUT_USE, room.nid, row=PastAudienceRow):
        subject = [past.name, f"audiences from {past.first_audience} on"]
        yield room.finding("audiences", subject, "a row of the past", "a row that it continues")


def _faults(rows: Mapping[int, NumberRow], *, is_cut: bool) -> Iterator[tuple[int, str, str]]:
    """Yield number, found and expected value; a purge may have deleted numbers of lines."""
    branches: dict[int, int] = {}
    for number in rows:
        if depth(number):
            base, place = _origin(number)
            branches[base] = max(place, branches.get(base, 0))
            if place < 1:
                yield number, "a number of no line", "a line that branches off"
    highest = -1
    for number, row in rows.items():
        wanted = branches.get(number, 0)
        if row.branches < wanted or (row.branches > wanted and not is_cut):
            yield number, f"{row.branches} branches", str(wanted)
        after = following(number)
        continued = depth(number) > 0 and after is not None and after.number in rows
        if row.continued < continued or (row.continued > continued and not is_cut):
            yield number, f"continued {row.continued}", str(continued)
        if row.opened_topological is not None:
            if depth(number):
                yield number, f"opened at {row.opened_topological}", "only on the main line"
            elif row.opened_topological < highest:
                yield number, f"opened at {row.opened_topological}", f"{highest} or more"
            highest = max(highest, row.opened_topological)


def _origin(number: int) -> tuple[int, int]:
    """Return the number from which the line of this one leaves, and which line it is, from 1."""
    level = depth(number)
    length = LINE[level] or 0
    base = main(number) if level == 1 else number - number % UNIT[1]
    return base, (number - base) // length
