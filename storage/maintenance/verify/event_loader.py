"""Load events with their content, for checks that authorise them: in batches, with a cache."""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.arguments import is_text
from storage.codec import StoredBytes, decode, decode_unnamed, is_plain
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.errors import InvalidEvent, StorageCorrupt, UnknownRoom
from storage.event import ROOM_VERSIONS, Event, parse, peek
from storage.ids import EventId, RoomId, StateKey
from storage.maintenance.censor import AS_RECEIVED
from storage.maintenance.room_states import RoomStates

# --------------------------------------------------------------------------------------------------
# One difference between the tables and what follows from the received bytes and the flags.

REPAIRABLE: Final = frozenset(
    {
        "room_version",
        "row_rules",
        "doubled_events",
        "columns",
        "topological_ordering",
        "after_gap",
        "time_order",
        "rejected",
        "state_paths",
        "state_groups",
        "state_before",
        "state_after",
        "event_ids",
        "missing_events",
        "forward_extremities",
        "dropped_extremities",
        "reordered_events",
        "current_state_group",
        "current_state",
        "member_counts",
        "memberships",
        "state_deltas",
        "local_transactions",
        "auth_chains",
        "redacted_by",
        "ineffective",
        "waiting_redactions",
        "superseded",
        "relations",
        "audiences",
        "visibility",
        "visibility_counts",
        "rooms",
        "stream_positions",
        "sequences",
        "sliding_rooms",
        "names",
        "derived_orphans",
    }
)
"""The checks whose findings `storage.rebuild` mends: they check derived data."""

REMEDIES: Final = {
    "bytes": "restore a backup",
    "create_event": "none: the room keeps its version",
    "archive": "restore the files of the archive, or the database, from a backup",
    "orphans": "restore the row of the room in rooms, or the database, from a backup",
}
"""Remedies for findings that no repair mends; each finding of indexes names its `REINDEX`."""


ACCEPTED: Final = "accepted"
"""The auth result of an event that is not rejected."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference.

    ``subject`` are the ids it is about; ``found`` is the stored value, ``expected`` the correct
    one.
    """

    check: str
    room_id: RoomId | None
    subject: tuple[str, ...]
    found: str
    expected: str

    @property
    def repairable(self) -> bool:
        """Return whether `rebuild` mends it, or `repair_positions` if it has no room."""
        return self.check in REPAIRABLE

    @property
    def remedy(self) -> str:
        """Return the command that mends it, or what to do where there is none."""
        if not self.repairable:
            return REMEDIES.get(self.check, self.expected)
        room = "" if self.room_id is None else f" --room '{self.room_id}'"
        return f"room-storage verify --repair{room}"

    def __str__(self) -> str:
        where = f"{self.check} of {', '.join(self.subject)} in {self.room_id}"
        return f"{where}: found {self.found}, expected {self.expected}"


# --------------------------------------------------------------------------------------------------
# The room under verification: its row, the local server, and batches of its events.

SQL_ROOM: Final[LiteralString] = """
SELECT room_nid, room_id, room_version, next_audience, current_state_group, last_stream_ordering,
    max_topological_ordering,
    forward_extremities, current_audience,
    (SELECT max(j.topological_cut) FROM purge_jobs j
        WHERE j.room_nid = rooms.room_nid) AS purged_below,
    is_partial, completed_at, in_order_ts
FROM rooms
WHERE room_id = $1::text
"""

SQL_TIMELINE: Final[LiteralString] = compose(
    """
SELECT event_nid, event_id, stream_ordering, topological_ordering, state_group_before,
    state_group_after,
    state_key_nid, soft_failed, rejected, :prev_nids.call AS prev_events
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
ORDER BY topological_ordering, stream_ordering
LIMIT $4::bigint
""",
    PREV_NIDS,
).sql

SQL_EVENT_IDS: Final[LiteralString] = """
SELECT event_nid, event_id
FROM events
WHERE event_nid = ANY($1::bigint[])
UNION
SELECT event_nid, event_id
FROM missing_events
WHERE event_nid = ANY($1::bigint[])
"""

BATCH: Final = 1_000  # events read together
BEFORE_ALL: Final = -(1 << 63)


class VerifiedRoomRow(NamedTuple):
    """A row of `rooms`.

    ``purged_below``: the topological ordering below which history was purged, else None.
    """

    room_nid: int
    room_id: str
    room_version: str
    next_audience: int
    current_state_group: int | None
    last_stream_ordering: int | None
    max_topological_ordering: int
    forward_extremities: list[int]
    current_audience: int
    purged_below: int | None
    is_partial: bool
    completed_at: int | None
    in_order_ts: int


class TimelineRow(NamedTuple):
    """A timeline event without its content."""

    event_nid: int
    event_id: str
    stream_ordering: int
    topological_ordering: int
    state_group_before: int
    state_group_after: int | None
    state_key_nid: int | None
    soft_failed: bool
    rejected: str | None
    prev_events: list[int]

    @property
    def after(self) -> int:
        """Return the state group after it."""
        return self.state_group_after or self.state_group_before


class NidRow(NamedTuple):
    """The id behind a nid."""

    event_nid: int
    event_id: str


@dataclass(frozen=True, slots=True)
class VerifiedRoom:
    """The input of every check. ``server_name``: its users are local.

    ``row.room_version`` is the version to check by, ``stored_version`` the one in the table.
    ``version_in_content`` is that of the create event ``create_id`` if it differs from that in
    the table.
    """

    row: VerifiedRoomRow
    server_name: str
    states: RoomStates = field(default_factory=RoomStates)
    stored_version: str = ""
    version_in_content: str | None = None
    create_id: str = ""

    @property
    def nid(self) -> int:
        return self.row.room_nid

    def finding(
        self, check: str, subject: Iterable[object], found: object, expected: object
    ) -> Finding:
        """Return a difference in this room."""
        return Finding(
            check, RoomId(self.row.room_id), tuple(map(str, subject)), str(found), str(expected)
        )


async def timeline(
    conn: Connection, room_nid: int, batch: int = BATCH
) -> AsyncIterator[list[TimelineRow]]:
    """Yield pages of the room's events that are no outliers, in topological order."""
    at = (BEFORE_ALL, BEFORE_ALL)
    while rows := await conn.fetch(SQL_TIMELINE, room_nid, *at, batch, row=TimelineRow):
        yield rows
        at = (rows[-1].topological_ordering, rows[-1].stream_ordering)


async def event_ids(conn: Connection, event_nids: Iterable[int]) -> dict[int, str]:
    """Return the ids of stored or missing events, by nid; for an unknown nid such as 7 "nid 7"."""
    nids = list(set(event_nids))
    ids = dict(await conn.fetch(SQL_EVENT_IDS, nids, row=NidRow)) if nids else {}
    return {nid: ids.get(nid, unknown(nid)) for nid in nids}


def unknown(event_nid: int) -> str:
    """Return the name of an event that is neither stored nor missing."""
    return f"nid {event_nid}"


SQL_LOADED: Final[LiteralString] = compose(
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


class LoadedEventRow(NamedTuple):
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

    An event that cannot be read is omitted, and listed in `unreadable`. Events may name events of
    other rooms, which are read by the versions of their rooms.
    """

    def __init__(self, room: VerifiedRoom) -> None:
        self._room = room.row
        self._loaded: dict[int, StoredContent] = {}
        self._nids: dict[EventId, int] = {}
        self.unreadable = set[int]()
        self.keys: dict[int, StateKey] = {}
        self.key_nids: dict[StateKey, int | None] = {}

    async def load(self, conn: Connection, event_nids: Iterable[int]) -> dict[int, StoredContent]:
        nids = set(event_nids)
        if len(self._loaded) > REMEMBERED_MAX:
            self._loaded.clear()
            self._nids.clear()
        lacking = [nid for nid in nids if nid not in self._loaded]
        for row in await conn.fetch(SQL_LOADED, lacking, row=LoadedEventRow) if lacking else ():
            self._keep(row)
        return {nid: self._loaded[nid] for nid in nids if nid in self._loaded}

    async def load_ids(
        self, conn: Connection, ids: Iterable[EventId]
    ) -> dict[EventId, StoredContent]:
        event_ids = set(ids)
        lacking = [event_id for event_id in event_ids if event_id not in self._nids]
        nids = dict(await conn.fetch(SQL_NIDS_OF, lacking, row=IdRow)) if lacking else {}
        stored = await self.load(
            conn,
            [
                *nids.values(),
                *(self._nids[event_id] for event_id in event_ids if event_id in self._nids),
            ],
        )
        return {content.event.event_id: content for content in stored.values()}

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

    def _keep(self, row: LoadedEventRow) -> None:
        try:
            event = parse(
                decode(row.json, row.event_id, row.room_id),
                self._room.room_version
                if row.room_nid == self._room.room_nid
                else row.room_version,
            )
        except (InvalidEvent, StorageCorrupt):  # the check of the bytes reports it
            self.unreadable.add(row.event_nid)
            return
        self._loaded[row.event_nid] = StoredContent(
            event, row.event_nid, row.stream_ordering, row.rejected, tuple(row.auth_events)
        )
        self._nids[event.event_id] = row.event_nid


# --------------------------------------------------------------------------------------------------
# Check the version of a room: its row against its create event, and event ids.
#
# A store of an earlier release read events by the version of another room of their batch. No other
# check compares the two.

SQL_CREATE_EVENTS: Final[LiteralString] = fill("""
SELECT event_id, rejected, encoding, json
FROM events
WHERE room_nid = $1::int AND type_nid = {TYPE_CREATE} AND state_key_nid = {KEY_CREATE}
ORDER BY event_id
""")


class CreateRow(NamedTuple):
    """A create event of a room."""

    event_id: str
    rejected: str | None
    encoding: int
    json: StoredBytes


async def read_room(conn: Connection, room_id: str, server_name: str) -> VerifiedRoom:
    """Return a room with the version of its create event, if that can be the room's.

    Raise `UnknownRoom`.
    """
    row = await conn.fetchrow(SQL_ROOM, room_id, row=VerifiedRoomRow)
    if row is None:
        raise UnknownRoom(room_id)
    create = _create_event(row, await conn.fetch(SQL_CREATE_EVENTS, row.room_nid, row=CreateRow))
    raw = b"" if create is None else _bytes_of(create, row.room_id)
    named_version = version_in_content(raw) if raw else None
    if create is None or named_version is None or named_version == row.room_version:
        return VerifiedRoom(row, server_name, stored_version=row.room_version)
    right = (
        row._replace(room_version=named_version)
        if _may_be(named_version, raw, row.room_id)
        else row
    )
    return VerifiedRoom(
        right,
        server_name,
        stored_version=row.room_version,
        version_in_content=named_version,
        create_id=create.event_id,
    )


async def check_version(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the room's version ("room_version"), and its create event ("create_event")."""
    del conn
    if room.row.room_version != room.stored_version:
        yield room.finding(
            "room_version", [room.row.room_id], room.stored_version, room.row.room_version
        )
    elif room.version_in_content is not None:
        found = (
            f"says room version {room.version_in_content}, by which it does not create this room"
        )
        yield room.finding(
            "create_event",
            [room.create_id],
            found,
            f"a create event of version {room.stored_version}",
        )


def version_of_id(raw: bytes, event_id: str) -> str | None:
    """Return the room version by which these bytes have this id; None if no version gives it."""
    return next(
        (
            version
            for version in ROOM_VERSIONS
            if (event := _read(raw, version)) is not None and event.event_id == event_id
        ),
        None,
    )


def id_of_bytes(stored: StoredBytes, room_id: str, room_version: str) -> EventId | None:
    """Return the id that the stored bytes of an event have, whatever its row says.

    Return None if the bytes are damaged or of another room, and if nothing confirms them: bytes
    without a checksum must fit their content hash.
    """
    try:
        event = parse(decode_unnamed(stored, room_id), room_version)
        if not is_plain(stored):
            decode(stored, event.event_id, room_id)
            return event.event_id
    except (InvalidEvent, StorageCorrupt):
        return None
    return event.event_id if event.content_hash_valid else None


def version_in_content(raw: bytes) -> str | None:
    """Return the room version in a create event's content; None where it is not a string."""
    content = (peek(raw) or {}).get("content")
    version = content.get("room_version", "1") if isinstance(content, dict) else "1"
    return version if is_text(version) else None


def _bytes_of(create: CreateRow, room_id: str) -> bytes:
    """Return the bytes of a create event, none if they are damaged: another check reports it."""
    try:
        return decode(create.json, create.event_id, room_id)
    except StorageCorrupt:
        return b""


def _create_event(row: VerifiedRoomRow, creates: list[CreateRow]) -> CreateRow | None:
    """Return the create event whose bytes give the version.

    It is the one that the room id names, or the only one. Censored bytes do not give it.
    """
    named = [create for create in creates if create.event_id == "$" + row.room_id[1:]]
    candidates = named or [create for create in creates if create.rejected is None] or creates
    return candidates[0] if len(candidates) == 1 and candidates[0].encoding == AS_RECEIVED else None


def _may_be(version: str, raw: bytes, room_id: str) -> bool:
    event = _read(raw, version) if version in ROOM_VERSIONS else None
    return event is not None and event.room_id == room_id


def _read(raw: bytes, version: str) -> Event | None:
    try:
        return parse(raw, version)
    except InvalidEvent:
        return None
