"""Check the rows of state groups: paths, entries, sizes and digests."""

from collections.abc import AsyncIterator, Iterator
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import BATCH, VerifiedRoom
from storage.state import delta_levels
from storage.state.groups import Group

SQL_GROUPS: Final[LiteralString] = """
SELECT state_group
FROM state_groups
WHERE room_nid = $1::int
ORDER BY path_of(state_group)
"""

SQL_GROUP_FACTS: Final[LiteralString] = """
SELECT g.state_group, g.digest, g.entry_count, path.parts AS path, g.runs,
    path_of(p.state_group) AS ancestor_path, p.room_nid AS ancestor_room_nid
FROM state_groups g
CROSS JOIN LATERAL (SELECT path_of(g.state_group) AS parts) AS path
LEFT JOIN state_groups p ON p.state_group = path.parts[cardinality(path.parts) - 1]
WHERE g.state_group = ANY($1::bigint[])
"""

SQL_WRONG_ENTRIES: Final[LiteralString] = compose(
    """
SELECT g.state_group, x.state_key_nid, x.event_nid, x.is_member, e.event_id,
    e.event_id IS NULL AND x.event_nid <> 0 AS is_lost,
    COALESCE(e.room_nid <> g.room_nid OR e.state_key_nid IS DISTINCT FROM x.state_key_nid,
        false) AS is_other,
    k.state_key_nid IS NULL AS is_nameless,
        (k.type_nid = 2) IS DISTINCT FROM x.is_member AS is_misplaced,
    x.occurrences > 1 AS is_repeated
FROM state_groups g
CROSS JOIN LATERAL (
    SELECT own.*, count(*) OVER (PARTITION BY own.state_key_nid) AS occurrences
    FROM :own_entries.call(g) AS own
) AS x
LEFT JOIN state_keys k ON k.state_key_nid = x.state_key_nid
LEFT JOIN events e ON e.event_nid = x.event_nid
WHERE g.state_group = ANY($1::bigint[])
    AND (
        (e.event_id IS NULL AND x.event_nid <> 0)
        OR e.room_nid <> g.room_nid
        OR (e.event_id IS NOT NULL AND e.state_key_nid IS DISTINCT FROM x.state_key_nid)
        OR (k.type_nid = 2) IS DISTINCT FROM x.is_member
        OR x.occurrences > 1
    )
""",
    OWN_ENTRIES,
).sql


# the first byte has the width of a difference, 1 to 4, and a bit: there is at least one
SQL_BROKEN_PATHS: Final[LiteralString] = """
SELECT state_group, encode(path, 'hex') AS path
FROM state_groups
WHERE room_nid = $1::int AND path IS NOT NULL
    AND CASE
        WHEN octet_length(path) = 0 OR get_byte(path, 0) & 7 NOT BETWEEN 1 AND 4 THEN true
        WHEN get_byte(path, 0) > 4 AND octet_length(path) = 1 THEN true
        ELSE (octet_length(path) - 1) % (get_byte(path, 0) & 7) <> 0
    END
ORDER BY state_group
"""


class BrokenPathRow(NamedTuple):
    """A group whose path has no right form, in hexadecimal."""

    state_group: int
    path: str


class GroupFactsRow(NamedTuple):
    """The columns of a group, and the path of the group that precedes it on its own path."""

    state_group: int
    digest: int | None
    entry_count: int
    path: list[int]
    runs: int
    ancestor_path: list[int] | None
    ancestor_room_nid: int | None


class WrongEntryRow(NamedTuple):
    """An invalid entry of a group's row, and why it is invalid."""

    state_group: int
    state_key_nid: int
    event_nid: int
    is_member: bool
    event_id: str | None
    is_lost: bool
    is_other: bool
    is_nameless: bool
    is_misplaced: bool
    is_repeated: bool


async def broken_paths(conn: Connection, room: VerifiedRoom) -> list[Finding]:
    """Return the groups whose paths cannot be read at all ("state_paths").

    Every statement that reads such a path fails.
    """
    return [
        room.finding("state_paths", [f"state group {row.state_group}"], row.path, "a path")
        for row in await conn.fetch(SQL_BROKEN_PATHS, room.nid, row=BrokenPathRow)
    ]


async def check_groups(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that every state group is readable and has correct columns ("state_groups")."""
    numbers: list[int] = await conn.fetchvals(SQL_GROUPS, room.nid)
    for start in range(0, len(numbers), BATCH):
        batch = numbers[start : start + BATCH]
        groups = await room.states.load(conn, batch)
        for row in await conn.fetch(SQL_GROUP_FACTS, batch, row=GroupFactsRow):
            for found, expected in (*_path(room, row), *_facts(row, groups.get(row.state_group))):
                yield room.finding(
                    "state_groups", [f"state group {row.state_group}"], found, expected
                )
        for entry in await conn.fetch(SQL_WRONG_ENTRIES, batch, row=WrongEntryRow):
            found, expected = _entry(entry)
            yield room.finding(
                "state_groups",
                [f"state group {entry.state_group}", entry.event_id or f"nid {entry.event_nid}"],
                found,
                expected,
            )


def _path(room: VerifiedRoom, row: GroupFactsRow) -> Iterator[tuple[str, str]]:
    """Check that a path continues the path of the group before it, so that no row is missing."""
    before = row.path[:-1]
    if before and row.ancestor_path is None:
        yield f"path {row.path}", f"a row for state group {before[-1]}"
    elif before and row.ancestor_path != before:
        yield f"path {row.path}", f"{[*(row.ancestor_path or []), row.state_group]}"
    elif before and row.ancestor_room_nid != room.nid:
        yield f"path {row.path}", "groups of the same room"
    if 1 + sum(delta_levels.unpack(row.runs)) != len(row.path):
        yield f"runs {delta_levels.unpack(row.runs)}", f"{len(row.path) - 1} rows after the root"


def _facts(row: GroupFactsRow, group: Group | None) -> Iterator[tuple[str, str]]:
    if group is None:
        return  # it cannot be read: its path says why
    if row.digest is not None and row.digest != group.digest:
        yield f"digest {row.digest}", str(group.digest)
    if row.entry_count != len(group.entries):
        yield f"entry_count {row.entry_count}", str(len(group.entries))


def _entry(row: WrongEntryRow) -> tuple[str, str]:
    if row.is_repeated:
        return f"state key {row.state_key_nid} more than once", "once"
    if row.is_nameless:
        return (
            f"state key {row.state_key_nid} without a row in state_keys",
            "a type and a state key",
        )
    if row.is_lost:
        return f"state key {row.state_key_nid} with an event that is not stored", "a stored event"
    if row.is_other:
        return f"state key {row.state_key_nid}", "the event's own state key, in this room"
    return (
        f"state key {row.state_key_nid} among {'members' if row.is_member else 'the others'}",
        "members apart",
    )
