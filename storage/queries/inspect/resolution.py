"""A resolution of the room's states, replayed: which states met, each check, and the result.

The states are those after the parents of an event, or after the forward extremities of a room. They
are read whole, once for each distinct state, and split, as the specification says. The writer
resolves incrementally over the chain cover; this replay uses neither. So it also shows whether the
stored state is right.

An event may have been rejected only after the resolution (`storage.maintenance.verify`). If the
stored state differs, the events that were rejected later count as accepted in a second replay.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.auth import Replay, needed_events, replay_conflicts, split_conflicts
from storage.codec import StoredBytes, decode
from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.database.rooms import require_room
from storage.errors import InputError, InvalidEvent, UnknownEvent
from storage.event import Event, load
from storage.ids import EventId, RoomId, StateKey
from storage.queries.auth_chain import auth_chain_ids
from storage.queries.auth_difference import auth_chain_difference
from storage.queries.state_at import states_at
from storage.queries.state_entries import StateMap

EVENTS_MAX: Final = 20_000
"""Events that a replay loads: auth chains of the conflicted ones, and what the checks need."""

ROUNDS_MAX: Final = 100

SQL_PARENTS: Final[LiteralString] = compose(
    """
SELECT r.room_id, r.room_version, e.stream_ordering AS before,
    COALESCE(p.event_id, m.event_id) AS event_id,
    COALESCE(p.state_group_after, p.state_group_before) AS state_group,
    p.event_nid IS NOT NULL AS is_stored
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN LATERAL unnest(:prev_nids.call(e)) WITH ORDINALITY AS parent (event_nid, place) ON true
LEFT JOIN events p ON p.event_nid = parent.event_nid
LEFT JOIN missing_events m ON m.event_nid = parent.event_nid
WHERE e.event_id = $1::text
ORDER BY parent.place
""",
    PREV_NIDS,
).sql

SQL_EXTREMITIES: Final[LiteralString] = """
SELECT r.room_id, r.room_version, NULL::bigint AS before, p.event_id,
    COALESCE(p.state_group_after, p.state_group_before) AS state_group, true AS is_stored
FROM rooms r
CROSS JOIN unnest(r.forward_extremities) WITH ORDINALITY AS tip (event_nid, place)
JOIN events p ON p.event_nid = tip.event_nid
WHERE r.room_id = $1::text
ORDER BY tip.place
"""

SQL_LOADED: Final[LiteralString] = """
SELECT e.event_id, r.room_id, r.room_version, e.stream_ordering,
    e.rejected IS NOT NULL AS is_rejected, e.redacted_form, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
"""


class MeetingRow(NamedTuple):
    """A parent of an event, or a forward extremity, and the group of the state after it.

    ``before`` is the position of the event: None for an outlier, and for extremities.
    """

    room_id: RoomId
    room_version: str
    before: int | None
    event_id: EventId | None
    state_group: int | None
    is_stored: bool


class LoadedEventRow(NamedTuple):
    """An event with its bytes, for the checks."""

    event_id: EventId
    room_id: RoomId
    room_version: str
    stream_ordering: int | None
    is_rejected: bool
    redacted_form: bool
    json: StoredBytes


@dataclass(frozen=True, slots=True)
class ReplayedResolution:
    """A resolution of the states after some events.

    ``tips`` are these events, ``missing`` those that are not stored, or whose state is not: then
    the state was given by the caller of `append`, and nothing can be replayed. ``states`` has the
    state after each tip, and is empty where all tips have one state: then nothing was resolved.
    ``replay`` is None where there was no conflict.

    ``resolved`` has the values of the conflicted keys, None for a key without one. ``stored`` has
    the same keys as they are stored.
    """

    room_id: RoomId
    room_version: str
    tips: tuple[EventId, ...]
    missing: tuple[EventId, ...]
    states: Mapping[EventId, StateMap]
    replay: Replay | None
    resolved: Mapping[StateKey, EventId | None]
    stored: Mapping[StateKey, EventId | None]
    events: Mapping[EventId, Event]

    @property
    def is_confirmed(self) -> bool:
        """Return whether the stored state has the resolved values."""
        return self.resolved == self.stored


async def resolution_at(conn: Connection, event_id: EventId) -> ReplayedResolution:
    """Replay the resolution that made the state before an event.

    `UnknownEvent`; `InputError` for one that needs too many events.
    """
    rows = await conn.fetch(SQL_PARENTS, event_id, row=MeetingRow)
    if not rows:
        raise UnknownEvent(event_id)
    tips = [row for row in rows if row.event_id is not None]
    return await _replayed(conn, rows[0], tips, at=event_id)


async def resolution_now(conn: Connection, room_id: RoomId) -> ReplayedResolution:
    """Replay the resolution that makes the current state of a room.

    `UnknownRoom`; `InputError` as `resolution_at`, and for a room without extremities.
    """
    rows = await conn.fetch(SQL_EXTREMITIES, room_id, row=MeetingRow)
    if not rows:
        await require_room(conn, room_id)
        raise InputError(f"{room_id} has no forward extremity, so it has no state to resolve")
    return await _replayed(conn, rows[0], rows, at=None)


async def _replayed(
    conn: Connection, room: MeetingRow, tips: Sequence[MeetingRow], *, at: EventId | None
) -> ReplayedResolution:
    missing = [row.event_id for row in tips if row.state_group is None]
    by_group = {row.state_group: row.event_id for row in tips}
    states: dict[EventId, StateMap] = {}
    if not missing and len(by_group) > 1:
        of_groups = await states_at(conn, _ids(by_group.values()), after=True)
        states = {
            row.event_id: of_groups[by_group[row.state_group] or row.event_id]
            for row in tips
            if row.event_id is not None
        }
    distinct = [states[one] for one in _ids(by_group.values()) if one in states]
    conflict = Conflict(room, at, distinct, *split_conflicts(distinct))
    outcome = await _resolved(conn, conflict) if conflict.conflicted else NOTHING
    return ReplayedResolution(
        room.room_id,
        room.room_version,
        tuple(_ids(row.event_id for row in tips)),
        tuple(_ids(missing)),
        states,
        *outcome,
    )


class Conflict(NamedTuple):
    """The states that meet, split. ``at`` is the event that merges them, None for extremities."""

    room: MeetingRow
    at: EventId | None
    states: Sequence[StateMap]
    unconflicted: StateMap
    conflicted: Mapping[StateKey, set[EventId]]


class Outcome(NamedTuple):
    """The last fields of `ReplayedResolution`."""

    replay: Replay | None
    resolved: Mapping[StateKey, EventId | None]
    stored: Mapping[StateKey, EventId | None]
    events: Mapping[EventId, Event]


NOTHING: Final = Outcome(None, {}, {}, {})


async def _resolved(conn: Connection, conflict: Conflict) -> Outcome:
    """Resolve with the events that are rejected now; if that differs, with those of back then."""
    difference = await auth_chain_difference(conn, [state.values() for state in conflict.states])
    loader = ReplayLoader()
    values = set[EventId]().union(*conflict.conflicted.values())
    await loader.load(conn, values | difference | await auth_chain_ids(conn, values))
    first = None
    for before in (None, conflict.room.before):
        if first is not None and loader.rejected(before) == loader.rejected(None):
            break
        replay = await _replay(conn, conflict, difference, loader, before)
        keys = [*dict.fromkeys([*conflict.conflicted, *replay.decided])]
        stored = await _stored(conn, conflict, keys)
        resolved = {key: replay.decided.get(key) for key in keys}
        outcome = Outcome(replay, resolved, stored, loader.events)
        if resolved == stored:
            return outcome
        first = first or outcome
    return first or NOTHING


async def _replay(
    conn: Connection,
    conflict: Conflict,
    difference: set[EventId],
    loader: "ReplayLoader",
    before: int | None,
) -> Replay:
    """Load what the checks need, and replay. ``before``: see `ReplayLoader.rejected`."""
    for _ in range(ROUNDS_MAX):
        arguments = (
            conflict.room.room_version,
            conflict.unconflicted,
            conflict.conflicted,
            difference,
            loader.events,
        )
        rejected = loader.rejected(before)
        wanted = needed_events(*arguments, rejected=rejected, absent=loader.absent)
        if not wanted:
            return replay_conflicts(*arguments, rejected=rejected)
        await loader.load(conn, wanted)
    raise InputError(f"the chain of power levels is too long to replay: {ROUNDS_MAX} rounds")


async def _stored(
    conn: Connection, conflict: Conflict, keys: Sequence[StateKey]
) -> dict[StateKey, EventId | None]:
    """Return the stored values of these keys: in the state before the event, or now."""
    if conflict.at is None:
        state = await current_values(conn, conflict.room.room_id, keys)
    else:
        state = (await states_at(conn, [conflict.at], after=False, keys=keys))[conflict.at]
    return {key: state.get(key) for key in keys}


SQL_CURRENT_VALUES: Final[LiteralString] = """
SELECT t.type, k.state_key, e.event_id
FROM unnest($2::text[], $3::text[]) AS w (type, state_key)
JOIN event_types t ON t.type = w.type
JOIN state_keys k ON k.type_nid = t.type_nid AND k.state_key = w.state_key
JOIN current_state c ON c.state_key_nid = k.state_key_nid
    AND c.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
JOIN events e ON e.event_nid = c.event_nid
"""


class CurrentValueRow(NamedTuple):
    """A key of a current state, and its value."""

    type: str
    state_key: str
    event_id: EventId


async def current_values(
    conn: Connection, room_id: RoomId, keys: Sequence[StateKey]
) -> dict[StateKey, EventId]:
    types, state_keys = [key[0] for key in keys], [key[1] for key in keys]
    rows = await conn.fetch(SQL_CURRENT_VALUES, room_id, types, state_keys, row=CurrentValueRow)
    return {(row.type, row.state_key): row.event_id for row in rows}


class ReplayLoader:
    """The loaded events, and the ids that are not stored, or cannot be read."""

    def __init__(self) -> None:
        self.events: dict[EventId, Event] = {}
        self.absent: set[EventId] = set()
        self._rejected: dict[EventId, int | None] = {}

    async def load(self, conn: Connection, event_ids: Collection[EventId]) -> None:
        """Load these events. `InputError` for too many."""
        wanted = [one for one in event_ids if one not in self.events and one not in self.absent]
        if len(self.events) + len(wanted) > EVENTS_MAX:
            raise InputError(f"the resolution needs more than {EVENTS_MAX} events to replay")
        for row in await conn.fetch(SQL_LOADED, wanted, row=LoadedEventRow):
            raw = decode(row.json, row.event_id, row.room_id)
            try:
                event = load(raw, row.room_version, row.event_id, redacted=row.redacted_form)
            except InvalidEvent:  # `verify` reports it
                continue
            self.events[row.event_id] = event
            if row.is_rejected:
                self._rejected[row.event_id] = row.stream_ordering
        self.absent.update(one for one in wanted if one not in self.events)

    def rejected(self, before: int | None) -> set[EventId]:
        """Return the rejected events: all, or without those of a position from ``before`` on."""
        return {
            event_id
            for event_id, position in self._rejected.items()
            if before is None or position is None or position < before
        }


def _ids(event_ids: Iterable[EventId | None]) -> list[EventId]:
    return [one for one in event_ids if one is not None]
