"""Cut a state group off its ancestors: it stores its whole state, so the ancestors can go.

  before   R a g        g x        R a g x y          (paths; g is to be a root)
  after    g            g x        g x y

The result of every path stays the same. A path that contains g now starts with it, and g has all
entries of the groups before it.
"""

from collections.abc import Collection, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.state.delta_levels import pack, root, unpack

SQL_MAKE_ROOT: Final[LiteralString] = """
WITH entry AS (
    SELECT s.state_key_nid, s.event_nid, k.type_nid = 2 AS is_member
    FROM state_entries($1::bigint) AS s
    JOIN state_keys k USING (state_key_nid)
)
UPDATE state_groups
SET back = '{0}',
    runs = $2::int,
    key_nids = NULLIF(ARRAY(SELECT state_key_nid FROM entry WHERE NOT is_member
        ORDER BY state_key_nid), '{}'),
    event_nids = NULLIF(ARRAY(SELECT event_nid FROM entry WHERE NOT is_member
        ORDER BY state_key_nid), '{}'),
    member_key_nids = NULLIF(ARRAY(SELECT state_key_nid FROM entry WHERE is_member
        ORDER BY state_key_nid), '{}'),
    member_event_nids = NULLIF(ARRAY(SELECT event_nid FROM entry WHERE is_member
        ORDER BY state_key_nid), '{}')
WHERE state_group = $1::bigint
"""

SQL_SIZE: Final[LiteralString] = """
SELECT entry_count
FROM state_groups
WHERE state_group = $1::bigint
"""

SQL_DESCENDANTS: Final[LiteralString] = """
SELECT d.state_group, d.back, d.runs
FROM state_groups g
JOIN state_groups d USING (room_nid)
WHERE g.state_group = $1::bigint AND d.state_group <> $1::bigint
    AND d.state_group - $1::bigint = ANY(d.back)
"""

SQL_CUT: Final[LiteralString] = """
UPDATE state_groups g
SET back = i.back::int[], runs = i.runs
FROM unnest($1::bigint[], $2::text[], $3::int[]) AS i (state_group, back, runs)
WHERE g.state_group = i.state_group
"""


class DescendantRow(NamedTuple):
    """A group whose path contains the new root."""

    state_group: int
    back: list[int]
    runs: int


async def make_roots(conn: Connection, state_groups: Collection[int]) -> None:
    """Make each of these groups a root.

    All states stay as they are; their former ancestors may be garbage afterwards. Call it in a
    transaction that locks their room (`storage.maintenance.room_lock`). Raise `StorageCorrupt` for
    a missing group.
    """
    for state_group in state_groups:
        size: int | None = await conn.fetchval(SQL_SIZE, state_group)
        if size is None:
            raise StorageCorrupt(
                "a state group that is to become a root does not exist", state_group=state_group
            )
        await conn.execute(SQL_MAKE_ROOT, state_group, pack(root(size).runs))
        cut = [
            _cut(row, state_group)
            for row in await conn.fetch(SQL_DESCENDANTS, state_group, row=DescendantRow)
        ]
        await conn.execute(
            SQL_CUT,
            [row.state_group for row in cut],
            [_text(row.back) for row in cut],
            [row.runs for row in cut],
        )


def _cut(row: DescendantRow, state_group: int) -> DescendantRow:
    """Return the path from the new root on; rows before it leave the highest levels first."""
    place = row.back.index(row.state_group - state_group)
    return row._replace(back=row.back[place:], runs=pack(runs_after(unpack(row.runs), place)))


def runs_after(runs: Sequence[int], gone: int) -> tuple[int, ...]:
    """Return the runs of a path without its first ``gone`` rows after the root.

    The last of these rows has become the root.

    >>> runs_after([2, 1, 3], 3)(0, 0, 3)
    """
    left: list[int] = []
    for run in runs:
        taken = min(run, gone)
        gone -= taken
        left.append(run - taken)
    return tuple(left)


def _text(numbers: Sequence[int]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"
