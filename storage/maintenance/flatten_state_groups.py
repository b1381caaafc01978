"""Cut a state group off its ancestors: it stores its whole state, so the ancestors can go.

  before   R a g        g x        R a g x y          (paths; g is to be a root)
  after    g            g x        g x y

The result of every path stays the same. A path that contains g now starts with it, and g has all
entries of the groups before it.
"""

from collections.abc import Collection, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.array_text import int_array, transposed
from storage.database.connection import Connection
from storage.state.delta_levels import pack, root, unpack
from storage.state.paths import PathColumns, path_columns
from storage.state.read import read_groups

SQL_MAKE_ROOT: Final[LiteralString] = """
WITH entry AS (
    SELECT s.state_key_nid, s.event_nid, k.type_nid = 2 AS is_member
    FROM state_entries($1::bigint) AS s
    JOIN state_keys k USING (state_key_nid)
)
UPDATE state_groups
SET back = '{0}',
    path = NULL,
    runs = $2::int,
    digest = $3::bigint,
    key_nid = NULL,
    member_key_nid = NULL,
    event_nid = NULL,
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

SQL_DESCENDANTS: Final[LiteralString] = """
SELECT d.state_group, path_of(d.state_group) AS path, d.runs, d.path IS NOT NULL AS is_narrow
FROM state_groups g
JOIN state_groups d USING (room_nid)
WHERE g.state_group = $1::bigint AND d.state_group <> $1::bigint
    AND $1::bigint = ANY(path_of(d.state_group))
"""

SQL_CUT: Final[LiteralString] = """
UPDATE state_groups g
SET back = i.back::int[], path = i.path, runs = i.runs
FROM unnest($1::bigint[], $2::text[], $3::bytea[], $4::int[]) AS i (state_group, back, path, runs)
WHERE g.state_group = i.state_group
"""


class DescendantRow(NamedTuple):
    """A group whose path contains the new root."""

    state_group: int
    path: list[int]
    runs: int
    is_narrow: bool


async def make_roots(conn: Connection, state_groups: Collection[int]) -> None:
    """Make each of these groups a root.

    All states stay as they are; their former ancestors may be garbage afterwards. Call it in a
    transaction that locks their room (`storage.persist.room_lock`). Raise `StorageCorrupt` for
    a missing group.
    """
    for state_group in state_groups:
        group = (await read_groups(conn, [state_group]))[state_group]
        cut = [
            _cut(row, state_group)
            for row in await conn.fetch(SQL_DESCENDANTS, state_group, row=DescendantRow)
        ]
        packed = pack(root(len(group.entries)).runs)
        await conn.execute(SQL_MAKE_ROOT, state_group, packed, group.digest)
        await conn.execute(SQL_CUT, *transposed(cut, 4))


def _cut(row: DescendantRow, state_group: int) -> tuple[int, str | None, bytes | None, int]:
    """Return the path from the new root on; rows before it leave the highest levels first."""
    place = row.path.index(state_group)
    runs = runs_after(unpack(row.runs), place)
    path = row.path[place:]
    columns = (
        path_columns(path, runs[-1])
        if row.is_narrow
        else PathColumns([row.state_group - part for part in path], None)
    )
    back = None if columns.back is None else int_array(columns.back)
    return row.state_group, back, columns.path, pack(runs)


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
