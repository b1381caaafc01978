"""Load events with their content, for checks that authorise them: in batches, with a cache."""

from collections.abc import Iterable, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import Event, parse
from storage.ids import EventId, StateKey
from storage.maintenance.verify.room import VerifiedRoom

SQL_JUDGED: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.event_id, e.stream_ordering, e.outlier, e.rejected,
    :auth_nids.call(e) AS auth_events, e.json,
    e.room_nid, r.room_id, r.room_version
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY($1::bigint[])
""",
    AUTH_NIDS,
).sql

SQL_NIDS_OF: Final[LiteralString] = """
SELECT event_id, event_nid
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
"""

SQL_KEYS: Final[LiteralString] = """
SELECT k.state_key_nid, t.type, k.state_key
FROM state_keys k
JOIN event_types t USING (type_nid)
WHERE k.state_key_nid = ANY($1::int[])
"""

SQL_KEY_NIDS: Final[LiteralString] = """
SELECT k.state_key_nid, t.type, k.state_key
FROM unnest($1::text[], $2::text[]) AS wanted (type, state_key)
CROSS JOIN LATERAL (
    SELECT type_nid, type FROM event_types WHERE type = wanted.type OFFSET 0
) AS t
CROSS JOIN LATERAL (
    SELECT * FROM state_keys
    WHERE type_nid = t.type_nid AND state_key = wanted.state_key
    OFFSET 0
) AS k
"""

REMEMBERED_MAX: Final = 20_000


class JudgedRow(NamedTuple):
    """An event as the checks need it."""

    event_nid: int
    event_id: str
    stream_ordering: int | None
    outlier: bool
    rejected: str | None
    auth_events: list[int]
    json: StoredBytes
    room_nid: int
    room_id: str
    room_version: str


class KeyRow(NamedTuple):
    """A state key and its nid."""

    state_key_nid: int
    type: str
    state_key: str


class IdRow(NamedTuple):
    """An event id and its nid."""

    event_id: str
    event_nid: int


class StoredContent(NamedTuple):
    """An event, and its auth result."""

    event: Event
    nid: int
    stream_ordering: int | None
    rejected: str | None
    auth_nids: tuple[int, ...]


class EventLoader:
    """The events of one room, by nid and by id, and its state keys by nid and name.

    An event that cannot be read is omitted. Events may name events of other rooms, which are read
    by the versions of their rooms.
    """

    def __init__(self, room: VerifiedRoom) -> None:
        self._room = room.row
        self._held: dict[int, StoredContent] = {}
        self._nids: dict[EventId, int] = {}
        self.keys: dict[int, StateKey] = {}
        self.key_nids: dict[StateKey, int | None] = {}

    async def load(self, conn: Connection, event_nids: Iterable[int]) -> dict[int, StoredContent]:
        wanted = set(event_nids)
        if len(self._held) > REMEMBERED_MAX:
            self._held.clear()
            self._nids.clear()
        lacking = [nid for nid in wanted if nid not in self._held]
        for row in await conn.fetch(SQL_JUDGED, lacking, row=JudgedRow) if lacking else ():
            self._keep(row)
        return {nid: self._held[nid] for nid in wanted if nid in self._held}

    async def load_ids(
        self, conn: Connection, ids: Iterable[EventId]
    ) -> dict[EventId, StoredContent]:
        wanted = set(ids)
        lacking = [one for one in wanted if one not in self._nids]
        nids = dict(await conn.fetch(SQL_NIDS_OF, lacking, row=IdRow)) if lacking else {}
        held = await self.load(
            conn, [*nids.values(), *(self._nids[one] for one in wanted if one in self._nids)]
        )
        return {one.event.event_id: one for one in held.values()}

    async def load_keys(self, conn: Connection, state_key_nids: Iterable[int]) -> None:
        """Load the names of these state keys into `keys`.

        A key whose row is lost gets its nid as name (`verify.groups` reports it).
        """
        lacking = list({nid for nid in state_key_nids if nid not in self.keys})
        self.keys.update((nid, (f"state key {nid}", "")) for nid in lacking)
        for row in await conn.fetch(SQL_KEYS, lacking, row=KeyRow) if lacking else ():
            self.keys[row.state_key_nid] = (row.type, row.state_key)
            self.key_nids[row.type, row.state_key] = row.state_key_nid

    async def load_key_nids(
        self, conn: Connection, keys: Iterable[StateKey]
    ) -> Mapping[StateKey, int | None]:
        """Return the nids of these state keys, None for one that no event has used."""
        lacking = list({key for key in keys if key not in self.key_nids})
        self.key_nids.update(dict.fromkeys(lacking))
        types, names = [key[0] for key in lacking], [key[1] for key in lacking]
        for row in await conn.fetch(SQL_KEY_NIDS, types, names, row=KeyRow) if lacking else ():
            self.key_nids[row.type, row.state_key] = row.state_key_nid
            self.keys[row.state_key_nid] = (row.type, row.state_key)
        return self.key_nids

    def _keep(self, row: JudgedRow) -> None:
        try:
            event = parse(
                decode(row.json, row.event_id, row.room_id),
                self._room.room_version
                if row.room_nid == self._room.room_nid
                else row.room_version,
            )
        except (InvalidEvent, StorageCorrupt):  # the check of the bytes reports it
            return
        self._held[row.event_nid] = StoredContent(
            event, row.event_nid, row.stream_ordering, row.rejected, tuple(row.auth_events)
        )
        self._nids[event.event_id] = row.event_nid
