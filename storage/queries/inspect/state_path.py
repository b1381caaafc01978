"""The path of a state group: the rows that a read folds, each with its level and its entries.

`storage.state.delta_levels` explains levels. A group stores how many rows of its path are on each
level, the highest first. So the level of each row follows from the last row alone.
"""

from collections.abc import Iterator, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.state.delta_levels import unpack

SQL_PATH: Final[LiteralString] = compose(
    """
SELECT g.state_group, g.entry_count, g.runs, g.audience,
    (SELECT count(*) FROM :own_entries.call(g) AS own) AS entries
FROM state_path($1::bigint) AS step
JOIN state_groups g ON g.state_group = step.part
ORDER BY step.place
""",
    OWN_ENTRIES,
).sql

SQL_GROUPS_OF: Final[LiteralString] = """
SELECT state_group_before, COALESCE(state_group_after, state_group_before) AS state_group_after,
    audience
FROM events
WHERE event_id = $1::text
"""


class PathRow(NamedTuple):
    """A row of a path. ``entry_count`` is the size of its state, ``entries`` what it stores."""

    state_group: int
    entry_count: int
    runs: int
    audience: int
    entries: int


class EventGroupsRow(NamedTuple):
    """The state groups of an event, and its audience. None: an outlier."""

    state_group_before: int | None
    state_group_after: int | None
    audience: int | None


class PathStep(NamedTuple):
    """A row of a path, and its level: None for the root, else 0 for the lowest."""

    state_group: int
    level: int | None
    entry_count: int
    entries: int


async def groups_of(conn: Connection, event_id: str) -> EventGroupsRow | None:
    """Return the state groups of an event, None if it is not stored."""
    return await conn.fetchrow(SQL_GROUPS_OF, event_id, row=EventGroupsRow)


async def state_path(conn: Connection, state_group: int) -> list[PathStep]:
    """Return the path of a state group, root first; empty if it is not stored."""
    rows = await conn.fetch(SQL_PATH, state_group, row=PathRow)
    if not rows:
        return []
    levels = _levels(unpack(rows[-1].runs))
    return [
        PathStep(row.state_group, level, row.entry_count, row.entries)
        for row, level in zip(rows, levels, strict=False)
    ]


def _levels(runs: Sequence[int]) -> Iterator[int | None]:
    """Yield the level of each row of a path: the root, then the levels from high to low."""
    yield None
    for level, count in zip(reversed(range(len(runs))), runs, strict=True):
        for _ in range(count):
            yield level
