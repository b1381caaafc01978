"""Reading state groups: one index scan over the rows of their paths, folded by position."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, LiteralString, TypeAlias

from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.persistent_map import Map
from storage.state import delta_levels
from storage.state.groups import DeltaRow, Group, State, applied, digest_after
from storage.state.rows import GroupRow, entries_of

SQL_GROUPS: Final[LiteralString] = """
SELECT state_group, digest, audience, room_nid, entry_count, runs, back, key_nids, event_nids,
    member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path
FROM state_groups
WHERE state_group = ANY(ARRAY(
    SELECT DISTINCT step.part
    FROM unnest($1::bigint[]) AS wanted (state_group)
    CROSS JOIN LATERAL state_path(wanted.state_group) AS step
))
"""

Prefixes: TypeAlias = dict[tuple[int, ...], tuple[tuple[DeltaRow, ...], State, int]]
"""Beginnings of paths: their rows, the state that they fold to, and its digest."""


async def read_groups(conn: Connection, state_groups: Collection[int]) -> dict[int, Group]:
    """Read these groups with their whole states.

    Raise `StorageCorrupt` if one, or a row of its path, is missing.
    """
    rows = {
        row.state_group: row
        for row in await conn.fetch(SQL_GROUPS, list(state_groups), row=GroupRow)
    }
    absent = [wanted for wanted in state_groups if wanted not in rows]
    if absent:
        raise StorageCorrupt("a referenced state group is missing", state_groups=absent)
    return groups_of(state_groups, rows)


def groups_of(state_groups: Iterable[int], rows: Mapping[int, GroupRow]) -> dict[int, Group]:
    """Build these groups with their whole states; raise `StorageCorrupt` as `group_of`.

    The common part of their paths is in memory once.
    """
    known: Prefixes = {}
    return {wanted: group_of(wanted, rows, known) for wanted in state_groups}


def group_of(
    state_group: int, rows: Mapping[int, GroupRow], known: Prefixes | None = None
) -> Group:
    """Build a group with its whole state, from its row and those of its path.

    Raise `StorageCorrupt` if a row of the path is missing. ``known`` has the folded rows of other
    paths; it is used and extended.
    """
    row = rows[state_group]
    path = row.path_in(rows)
    lost = [part for part in path if part not in rows]
    if lost:
        raise StorageCorrupt(
            "a state group misses rows of its path", state_group=row.state_group, lost=lost
        )
    known = {} if known is None else known
    steps, entries, digest = _folded(path, rows, known)
    return Group(
        row.state_group,
        row.room_nid,
        entries,
        steps,
        delta_levels.unpack(row.runs),
        digest,
        row.audience,
    )


def _folded(
    path: list[int], rows: Mapping[int, GroupRow], known: Prefixes
) -> tuple[tuple[DeltaRow, ...], State, int]:
    """Fold the rows of a path; a row without a digest changes that of the row before it."""
    entries: State = Map()
    steps: tuple[DeltaRow, ...] = ()
    digest = 0
    for end in range(1, len(path) + 1):
        prefix = tuple(path[:end])
        if prefix not in known:
            row = rows[path[end - 1]]
            step = DeltaRow(row.state_group, entries_of(row))
            known_digest = row.digest
            digest = (
                digest_after(digest, entries, step.delta) if known_digest is None else known_digest
            )
            entries = applied(entries, step.delta) if steps else Map(step.delta)
            steps = (*steps, step)
            known[prefix] = (steps, entries, digest)
        steps, entries, digest = known[prefix]
    return steps, entries, digest
