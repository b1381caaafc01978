"""The versions of rooms, as the tasks of an import look them up.

A room that the store has keeps its version. For others the line says it, or else the first create
event of the archive, which may be in any file. So a first pass finds the create events, and stages
what they say in `import_events`, below the places of lines. Tasks that validate lines look up the
rooms of each chunk. No process has the versions of all rooms.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Final, LiteralString, NamedTuple

import orjson

from storage.arguments import is_text
from storage.database.arrow_results import ArrowConnection
from storage.database.connection import Connection
from storage.pipeline.imports import stage as stages

SQL_STAGE_VERSIONS: Final[LiteralString] = """
WITH staged AS (
    INSERT INTO import_events (place, import_number, json)
    SELECT created.place, $1::int, convert_to(created.line, 'UTF8')
    FROM unnest($2::bigint[], $3::text[]) AS created (place, line)
    ORDER BY created.place
    ON CONFLICT DO NOTHING
    RETURNING place
)
SELECT place FROM staged
"""

SQL_TAKEN_PLACES: Final[LiteralString] = """
SELECT place, json
FROM import_events
WHERE import_number = $1::int AND place = ANY($2::bigint[])
"""

SQL_STORED_VERSIONS: Final[LiteralString] = """
SELECT room_id, room_version
FROM rooms
WHERE room_id = ANY($1::text[])
"""

SQL_STAGED_VERSIONS: Final[LiteralString] = """
SELECT e.json AS created
FROM unnest($2::bigint[]) AS wanted (first)
JOIN import_events e ON e.import_number = $1::int AND e.place >= wanted.first
    AND e.place < wanted.first + $3::bigint
"""

PLACES: Final = 1 << 20
"""Places for what create events say of the rooms with one hash."""

REMEMBERED_MAX: Final = 50_000
"""Rooms in the memory of a task: some 10 MB."""


class StoredVersionRow(NamedTuple):
    """A room that the store has."""

    room_id: str
    room_version: str


class StagedVersionRow(NamedTuple):
    """A `CreatedRoom`, as JSON."""

    created: bytes


class CreatedRoom(NamedTuple):
    """A create event: the file and the range where it is, so that the first one counts."""

    file: int
    begin: int
    room_id: str
    version: str


def first_place(room_id: str) -> int:
    """Return the first of the `PLACES` below 0 for a room id. Rooms may share them."""
    return -(1 + _hash(room_id) % (1 << 43)) * PLACES


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def stage_versions(conn: ArrowConnection, number: int, rooms: Iterable[CreatedRoom]) -> None:
    """Stage what create events say. To do it twice changes nothing.

    Raise `DatabaseConflict` if the import ``number`` has ended.
    """
    left: dict[int, str] = {}
    for room in rooms:
        line = orjson.dumps(list(room)).decode()
        _put(left, first_place(room.room_id), _hash(line), line)
    with stages.working(conn, number):
        while left:
            left = _not_staged(conn, number, left)


def _put(lines: dict[int, str], first: int, offset: int, line: str) -> None:
    """Add a line at its place, or at the next free one."""
    while lines.setdefault(first + offset % PLACES, line) != line:
        offset += 1


def _not_staged(conn: ArrowConnection, number: int, lines: dict[int, str]) -> dict[int, str]:
    """Stage lines; return those whose places have another one, each with its next place."""
    staged = conn.rows(SQL_STAGE_VERSIONS, number, list(lines), list(lines.values()))
    others = lines.keys() - {row["place"] for row in staged}
    found = conn.rows(SQL_TAKEN_PLACES, number, list(others)) if others else []
    again: dict[int, str] = {}
    for row in found:
        place, line = row["place"], lines[row["place"]]
        if row["json"] != line.encode():
            _put(again, place - place % PLACES, place % PLACES + 1, line)
    return again


class RoomVersions:
    """The versions that a task knows, and the rooms that the store has.

    ``given`` is what it knows without the database.
    """

    def __init__(self, number: int, given: Mapping[str, str]) -> None:
        self._number = number
        self._given = given
        self._asked = set[str]()
        self.versions: dict[str, str] = dict(given)
        self.stored: dict[str, str] = {}

    async def learn(self, conn: Connection, room_ids: Iterable[object]) -> None:
        """Look up those of these rooms that were not looked up before."""
        wanted = {one for one in room_ids if is_text(one)}
        new = wanted - self._asked
        if not new:
            return
        if len(self._asked) + len(new) > REMEMBERED_MAX:
            self._forget()
            new = wanted
        self._asked |= new
        places = sorted({first_place(one) for one in new})
        staged = await conn.fetch(
            SQL_STAGED_VERSIONS, self._number, places, PLACES, row=StagedVersionRow
        )
        created = sorted(CreatedRoom(*orjson.loads(row.created)) for row in staged)
        for room in created:
            if room.room_id in new:
                self.versions.setdefault(room.room_id, room.version)
        for row in await conn.fetch(SQL_STORED_VERSIONS, list(new), row=StoredVersionRow):
            self.stored[row.room_id] = row.room_version

    def _forget(self) -> None:
        self._asked.clear()
        self.stored.clear()
        self.versions.clear()
        self.versions.update(self._given)
