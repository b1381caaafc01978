"""Facts of rooms that the filters of lists look at: type, encryption, and name.

The facts of the current state are cached by room, for all users, until an event that can change
them is published here. One statement reads those of all rooms that lack them. A user who was kicked
or banned gets the facts as of that moment, which are not cached: a name that the room got later is
none of theirs. A room that this server knows by an invite alone has those of the stripped state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIPS
from storage.ids import RoomId
from storage.queries.events import StoredEvent, event_of_room
from storage.queries.sliding.list_changes import ListChanges
from storage.queries.sliding.user_rooms import ListedRoom
from storage.queries.sync.changed_rooms import News
from storage.queries.sync.stripped_state import stripped
from storage.turns import in_turns

KNOCK: Final = MEMBERSHIPS["knock"]
CREATE: Final = 1
NAME: Final = 9
ENCRYPTION: Final = 13

SQL_FACTS: Final[LiteralString] = """
WITH room AS MATERIALIZED (
    SELECT w.room_nid, e.event_nid, EXISTS (
            SELECT FROM current_state x WHERE x.room_nid = w.room_nid AND x.state_key_nid = 13
        ) AS is_encrypted,
        COALESCE(e.describes_room, false) AS has_type
    FROM unnest($1::int[]) AS w (room_nid)
    LEFT JOIN current_state c ON c.room_nid = w.room_nid AND c.state_key_nid = 1
    LEFT JOIN events e ON e.event_nid = c.event_nid
)
SELECT array_agg(room_nid) AS room_nids, event_nid IS NOT NULL AS is_known, is_encrypted,
    NULL AS room_version, NULL AS event_id, false AS is_redacted, NULL::bytea AS json
FROM room
WHERE NOT has_type
GROUP BY 2, 3
UNION ALL
SELECT ARRAY[r.room_nid], true, r.is_encrypted, i.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form, e.json
FROM room r
JOIN rooms i USING (room_nid)
JOIN events e USING (event_nid)
WHERE r.has_type
"""

SQL_NAMES: Final[LiteralString] = """
SELECT c.room_nid, r.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS is_redacted, e.json
FROM current_state c
JOIN rooms r USING (room_nid)
JOIN events e USING (event_nid)
WHERE c.room_nid = ANY($1::int[]) AND c.state_key_nid = 9
"""

# The state at a position is the current one, less what changed since.
SQL_FACTS_THEN: Final[LiteralString] = """
SELECT w.room_nid, r.room_version, k.state_key_nid, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS is_redacted, e.json,
    NULL AS stripped_state
FROM unnest($1::int[], $2::bigint[]) AS w (room_nid, activity)
JOIN rooms r USING (room_nid)
CROSS JOIN (VALUES (1), (9), (13)) AS k (state_key_nid)
JOIN events e ON e.event_nid = COALESCE((
    SELECT COALESCE(d.prev_event_nid, 0)
    FROM state_deltas d
    WHERE d.room_nid = w.room_nid AND d.state_key_nid = k.state_key_nid
        AND d.stream_ordering > w.activity
    ORDER BY d.stream_ordering
    LIMIT 1
), (
    SELECT c.event_nid
    FROM current_state c
    WHERE c.room_nid = w.room_nid AND c.state_key_nid = k.state_key_nid
))
UNION ALL  -- the membership events of rooms that are known by those alone
SELECT e.room_nid, r.room_version, 0, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form, e.json,
    (SELECT o.stripped_state FROM out_of_band_memberships o
        WHERE o.room_nid = e.room_nid AND o.event_nid = e.event_nid)
FROM unnest($3::bigint[]) AS w (event_nid)
JOIN events e USING (event_nid)
JOIN rooms r USING (room_nid)
"""


class FactsRow(NamedTuple):
    """Rooms with equal facts and no type; or one room with its create event.

    ``is_known``: the room has a current state here.
    """

    room_nids: list[int]
    is_known: bool
    is_encrypted: bool
    room_version: str | None
    event_id: str | None
    is_redacted: bool
    json: StoredBytes | None


class RoomNameRow(NamedTuple):
    """The name event of a room."""

    room_nid: int
    room_version: str
    event_id: str
    is_redacted: bool
    json: StoredBytes


class FactThenRow(NamedTuple):
    """A state event as of a membership; or the membership event (key 0), with stripped state."""

    room_nid: int
    room_version: str
    state_key_nid: int
    event_id: str
    is_redacted: bool
    json: StoredBytes
    stripped_state: str | None


class RoomFacts(NamedTuple):
    """``room_type`` None: none. ``has_name``: the name was read, and None means none.

    ``is_known``: the room has a current state here.
    """

    room_type: str | None = None
    is_encrypted: bool = False
    name: str | None = None
    has_name: bool = False
    is_known: bool = True


class RoomFactsCache:
    """The facts of the current states of rooms, by room id. It drops those it had longest."""

    def __init__(self, limit: int, changes: ListChanges) -> None:
        self.limit = limit
        self.hits: int = 0
        self.misses: int = 0
        self._changes = changes
        self._facts: dict[str, RoomFacts] = {}

    def __len__(self) -> int:
        return len(self._facts)

    def forget(self, room_id: str | None) -> None:
        if room_id is None:
            self._facts.clear()
        else:
            self._facts.pop(room_id, None)

    def changed_since(self, news: News) -> set[str] | None:
        """Return the rooms whose facts changed after these news. None: any can have changed."""
        changes = self._changes.facts
        return None if news.time < changes.floor else set(changes.since(news.time))

    def all(self) -> Mapping[str, RoomFacts]:
        return self._facts

    def add(self, facts: Mapping[str, RoomFacts], news: News) -> None:
        """Store facts that were read in the snapshot of these news, but for those changed since."""
        changed = self.changed_since(news)
        if changed is None:
            return
        self._facts.update(
            (room_id, one) for room_id, one in facts.items() if room_id not in changed
        )
        while len(self._facts) > self.limit:
            del self._facts[next(iter(self._facts))]


async def read_facts(
    conn: Connection, rooms: Sequence[ListedRoom], known: Mapping[str, RoomFacts], *, names: bool
) -> tuple[dict[str, RoomFacts], dict[str, RoomFacts]]:
    """Return the facts of current states, and the facts that are the user's own, by room id.

    ``known`` are facts that were read before. ``names``: also the names.
    """
    present = [room for room in rooms if room.membership >= KNOCK]
    lacking = [room for room in present if room.room_id not in known]
    facts = await _present(conn, lacking) if lacking else {}
    known = {room.room_id: known.get(room.room_id) or facts[room.room_id] for room in present}
    shown = [room for room in present if not known[room.room_id].is_known]
    past = [room for room in rooms if room.membership < KNOCK]
    own = await _own(conn, past, shown) if shown or past else {}
    if names and len(shown) < len(present):
        facts.update(await _with_names(conn, present, known))
    return facts, own


async def _present(conn: Connection, rooms: Sequence[ListedRoom]) -> dict[str, RoomFacts]:
    """Return the types and encryption of the current states."""
    id_of = {room.room_nid: room.room_id for room in rooms}
    found: dict[str, RoomFacts] = {}
    async for row in in_turns(await conn.fetch(SQL_FACTS, list(id_of), row=FactsRow)):
        room_type = None
        if row.json is not None:
            event = _event(id_of[row.room_nids[0]], row)
            room_type = text_in(event.content, "type")
        facts = RoomFacts(room_type, row.is_encrypted, is_known=row.is_known)
        found.update((id_of[nid], facts) for nid in row.room_nids)
    return found


async def _with_names(
    conn: Connection, rooms: Sequence[ListedRoom], known: Mapping[str, RoomFacts]
) -> dict[str, RoomFacts]:
    id_of = {room.room_nid: room.room_id for room in rooms if known[room.room_id].is_known}
    rows = await conn.fetch(SQL_NAMES, list(id_of), row=RoomNameRow)
    names = {
        row.room_nid: text_in(_event(id_of[row.room_nid], row).content, "name")
        async for row in in_turns(rows)
    }
    return {
        room_id: known[room_id]._replace(name=names.get(nid), has_name=True)
        for nid, room_id in id_of.items()
    }


async def _own(
    conn: Connection, past: Sequence[ListedRoom], shown: Sequence[ListedRoom]
) -> dict[str, RoomFacts]:
    """Return the facts of ``past`` memberships as of then, and of rooms by stripped state."""
    rows = await conn.fetch(
        SQL_FACTS_THEN,
        [room.room_nid for room in past],
        [room.activity for room in past],
        [room.member_nid for room in shown],
        row=FactThenRow,
    )
    found: dict[str, RoomFacts] = {
        room.room_id: RoomFacts(has_name=True, is_known=False) for room in (*past, *shown)
    }
    id_of = {room.room_nid: room.room_id for room in (*past, *shown)}
    async for row in in_turns(rows):
        event = _event(id_of[row.room_nid], row)
        states = {(event.type, event.state_key): event.content}
        if row.state_key_nid == 0:
            brought = stripped((), event, orjson.loads(row.stripped_state or "[]"))
            states = {(one["type"], one["state_key"]): one["content"] for one in brought}
        found[event.room_id] = _with_states(found[event.room_id], states)
    return found


def _with_states(facts: RoomFacts, states: Mapping[Any, Mapping[str, Any]]) -> RoomFacts:
    create, name = states.get(("m.room.create", "")), states.get(("m.room.name", ""))
    return facts._replace(
        room_type=facts.room_type if create is None else text_in(create, "type"),
        is_encrypted=facts.is_encrypted or ("m.room.encryption", "") in states,
        name=facts.name if name is None else text_in(name, "name"),
    )


def _event(room_id: RoomId, row: FactsRow | RoomNameRow | FactThenRow) -> StoredEvent:
    flags = None, False, False, row.is_redacted
    columns = row.event_id, None, None, None, *flags, row.json
    return event_of_room(room_id, row.room_version or "", columns)


def text_in(content: Mapping[str, Any], key: str) -> str | None:
    value = content.get(key)
    return value if isinstance(value, str) else None
