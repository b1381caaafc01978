"""The state before or after events: whole, or of some types or keys; any number of events at once.

A state is read by folding the rows of its group's path (storage/state/paths.py). The request
decides how:

* For types without members, or a few keys, Postgres returns the entries. Without a member key it
  does not read the member arrays. It looks a key up inside the arrays, and does not unnest them for
  it.
* A whole state, or most of its members, is folded here from the rows of the path (at most 30). A
  second statement reads the texts, as lists in the order of their numbers. 20,000 rows cost more to
  send than to find, and folding in Postgres takes three times as long. States share rows and texts.

Neither changes for an event of the timeline, so two statements need no common snapshot. The content
of a group does not change, either. A caller may give a cache for whole states by group. The first
statement gets the cached groups, and leaves them out. If it finds no other, there is no second
statement. It checks each time that the event has this group.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Final, LiteralString, NamedTuple, TypeVar, cast

import orjson

from storage.database.columns import AUTH_NIDS, OWN_ENTRIES, OWN_OTHERS
from storage.database.connection import Connection, require_room
from storage.database.placeholders import compose, fill, long_int_array
from storage.errors import (
    InputError,
    PartialState,
    StateUnknown,
    StorageCorrupt,
    UnknownEvent,
)
from storage.ids import EventId, RoomId, StateKey, UserId
from storage.state.groups import REMOVED
from storage.state.paths import path_of
from storage.streams.caches import Cache, Ticket
from storage.turns import parts

# --------------------------------------------------------------------------------------------------
# The texts of state events: types, keys and ids for the numbers of a folded state.
#
# The rows of the chain cover have the id and the state key of an event. So one ordered pass over an
# index and dense rows reads both. They are requested in parts of a thousand, and each part returns
# the lines of one text. One row for each event would cost more to send than to find. One text of
# all events would be over a megabyte. Both sides would allocate that again each time, which takes a
# third of the time at 20,000 events. If a part has an event without a chain position, or a line
# break in an id or a user, it is requested again, by rows.

StateMap = dict[StateKey, EventId]
Items = Iterable[tuple[StateKey, EventId]]

MEMBER: Final = "m.room.member"
PART: Final = 1_000  # memberships in one text

SQL_TEXTS: Final[LiteralString] = """
SELECT part.number, lines.*, NULL AS others
FROM unnest($1::text[]) WITH ORDINALITY AS part (event_nids, number)
CROSS JOIN LATERAL (
    SELECT count(*) AS found, string_agg(event_id, E'\\n' ORDER BY event_nid) AS event_ids,
        string_agg(state_key, E'\\n' ORDER BY event_nid) AS users
    FROM auth_chains
    WHERE event_nid = ANY(part.event_nids::bigint[])
) AS lines
UNION ALL
SELECT NULL, count(*), NULL, NULL, json_agg(json_build_array(t.type, k.state_key, e.event_id)
    ORDER BY e.event_nid)::text
FROM events e
JOIN state_keys k USING (state_key_nid)
JOIN event_types t ON t.type_nid = k.type_nid
-- a subselect, so that the planner does not estimate each of the numbers
WHERE e.event_nid = ANY((SELECT $2::text::bigint[])::bigint[])
"""

SQL_TEXTS_OF_ANY: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, t.type, k.state_key
FROM events e
JOIN state_keys k USING (state_key_nid)
JOIN event_types t ON t.type_nid = k.type_nid
WHERE e.event_nid = ANY($1::bigint[])
"""


class EntryColumnsRow(NamedTuple):
    """How many state events were found, and their texts in the order of their numbers.

    ``number`` of a part: the ids and users of its memberships that have a chain position, a line
    each. None: all ``others``, as a JSON list of [type, state key, id]. Texts are None for no
    events.
    """

    number: int | None
    found: int
    event_ids: str | None
    users: str | None
    others: str | None

    def lines(self, size: int) -> tuple[list[str], list[EventId]] | None:
        """Return users and ids if there are ``size`` events, each of one line."""
        users, event_ids = (self.users or "").split("\n"), (self.event_ids or "").split("\n")
        return (
            (users, cast("list[EventId]", event_ids))
            if self.found == len(users) == len(event_ids) == size
            else None
        )


class EntryTextRow(NamedTuple):
    """The texts of a state event."""

    event_nid: int
    event_id: str
    type: str
    state_key: str


class FoldedState(NamedTuple):
    """A state as the numbers of its events, in order: memberships, and all others."""

    members: list[int]
    others: list[int]


async def state_entries(conn: Connection, states: Sequence[FoldedState]) -> list[StateMap]:
    """Return the entries of these states, by one statement for all of their events."""
    members = _distinct([state.members for state in states])
    others = _distinct([state.others for state in states])
    parts = [members[at : at + PART] for at in range(0, len(members), PART)]
    arguments = list(map(long_int_array, parts)), long_int_array(others)
    column_rows = await conn.fetch(SQL_TEXTS, *arguments, row=EntryColumnsRow)
    rest, *rows = sorted(column_rows, key=lambda row: row.number or 0)
    if rest.found != len(others):
        raise StorageCorrupt(
            "a state refers to events that are not there", wanted=len(others), found=rest.found
        )
    lines = [row.lines(len(part)) for row, part in zip(rows, parts, strict=True)]
    odd = [nid for line, part in zip(lines, parts, strict=True) if line is None for nid in part]
    texts = await texts_of_any(conn, odd) if odd else {}
    named = (_members(line, part, texts) for line, part in zip(lines, parts, strict=True))
    items = chain(_others(rest), chain.from_iterable(named))
    if len(states) == 1:
        return [dict(items)]
    by_nid = dict(zip(chain(others, members), items, strict=True))
    return [dict(map(by_nid.__getitem__, chain(state.others, state.members))) for state in states]


def _distinct(numbers: Sequence[list[int]]) -> list[int]:
    """Return all these numbers in order, each once."""
    return numbers[0] if len(numbers) == 1 else sorted(set[int]().union(*numbers))


def _others(row: EntryColumnsRow) -> Items:
    return (
        ((kind, state_key), event_id)
        for kind, state_key, event_id in orjson.loads(row.others or "[]")
    )


def _members(
    lines: tuple[list[str], list[EventId]] | None,
    part: Sequence[int],
    texts: Mapping[int, EntryTextRow],
) -> Items:
    if lines is None:
        return (((MEMBER, texts[nid].state_key), EventId(texts[nid].event_id)) for nid in part)
    return zip(
        zip(repeat(MEMBER), lines[0], strict=False), lines[1], strict=True
    )  # repeat has no end


async def texts_of_any(conn: Connection, nids: Sequence[int]) -> dict[int, EntryTextRow]:
    """Return the texts of any state events.

    A state that came with an event may have rejected events, which have no chain position.
    """
    texts = {
        row.event_nid: row
        for row in await conn.fetch(SQL_TEXTS_OF_ANY, list(nids), row=EntryTextRow)
    }
    if len(texts) != len(nids):
        raise StorageCorrupt(
            "a state refers to events that are not there", wanted=len(nids), found=len(texts)
        )
    return texts


T = TypeVar("T")
States = Cache[StateMap]
"""Whole states by their groups."""

PICKED_MEMBERS_MAX: Final = 16  # with more member keys it is cheaper to read the whole state

SQL_PATHS: Final[LiteralString] = """
-- the requested groups, each with its events; NULL for outliers
WITH at AS MATERIALIZED (
    SELECT CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before)
        ELSE state_group_before END AS state_group,
        array_agg(event_id) AS at_event_ids,
        max((
            SELECT r.room_id
            FROM partial_rooms p
            JOIN rooms r USING (room_nid)
            JOIN events joined ON joined.event_id = p.join_event_id
            WHERE p.room_nid = e.room_nid AND e.stream_ordering >= joined.stream_ordering
        )) AS partial_room_id
    FROM events e
    WHERE event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($1::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
    GROUP BY 1
)
SELECT g.state_group, at.at_event_ids, at.partial_room_id, g.back, g.path, g.key_nids,
    g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid
FROM state_groups g
LEFT JOIN at USING (state_group)
WHERE g.state_group IN (
    SELECT step.part
    FROM at
    CROSS JOIN LATERAL state_path(at.state_group) AS step
    WHERE at.state_group <> ALL($3::bigint[])
)
UNION ALL
SELECT state_group, at_event_ids, partial_room_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL
FROM at
WHERE state_group IS NULL OR state_group = ANY($3::bigint[])
    OR NOT EXISTS (SELECT FROM state_groups g WHERE g.state_group = at.state_group)
"""

SQL_STATE_OF_TYPES: Final[LiteralString] = compose(
    """
WITH
at AS MATERIALIZED (  -- the requested groups
    SELECT event_id,
        CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before)
            ELSE state_group_before END AS state_group
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($1::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
),
kind AS MATERIALIZED (  -- once: the types would else be read for each entry
    SELECT type_nid, type FROM event_types WHERE type = ANY($3::text[])
),
-- the rows of their paths without members; a lost row has no part
step AS MATERIALIZED (
    SELECT one.state_group, p.place, g.state_group AS part, :own_others.of(g)
    FROM (SELECT DISTINCT state_group FROM at) AS one
    LEFT JOIN LATERAL state_path(one.state_group) AS p ON true
    LEFT JOIN state_groups g ON g.state_group = p.part
),
entry AS (  -- their entries
    SELECT s.state_group, s.place, e.state_key_nid, e.event_nid
    FROM step s
    CROSS JOIN LATERAL :own_others.call(s) AS e
),
folded AS (  -- the last row of the path wins
    SELECT DISTINCT ON (state_group, state_key_nid) state_group, state_key_nid, event_nid
    FROM entry
    ORDER BY state_group, state_key_nid, place DESC
),
named AS (
    SELECT f.state_group, t.type, k.state_key, e.event_id
    FROM folded f
    CROSS JOIN LATERAL (  -- one by one: a state has few keys that are no members
        SELECT type_nid, state_key FROM state_keys WHERE state_key_nid = f.state_key_nid OFFSET 0
    ) AS k
    JOIN kind t USING (type_nid)
    LEFT JOIN events e USING (event_nid)
    WHERE f.event_nid <> 0
)
SELECT at.event_id AS at_event_id, at.state_group,
    at.state_group IN (SELECT state_group FROM step WHERE part IS NULL) AS is_lost,
    n.type, n.state_key, n.event_id
FROM at
LEFT JOIN named n USING (state_group)
""",
    OWN_OTHERS,
).sql

SQL_STATE_OF_KEYS: Final[LiteralString] = compose(
    """
WITH
at AS MATERIALIZED (  -- the requested groups
    SELECT event_id,
        CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before)
            ELSE state_group_before END AS state_group
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($1::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
),
wanted AS MATERIALIZED (
    SELECT k.state_key_nid, k.type_nid = {TYPE_MEMBER} AS member
    FROM unnest($3::text[], $4::text[]) AS w (type, state_key)
    JOIN event_types t USING (type)
    CROSS JOIN LATERAL (  -- one by one: a join could read the keys of all members
        SELECT state_key_nid, type_nid FROM state_keys
        WHERE type_nid = t.type_nid AND state_key = w.state_key OFFSET 0
    ) AS k
),
-- the rows of their paths, by position; without a part where the group is lost
step AS MATERIALIZED (
    SELECT one.state_group, p.part, p.place
    FROM (SELECT DISTINCT state_group FROM at) AS one
    LEFT JOIN LATERAL state_path(one.state_group) AS p ON true
),
stored AS MATERIALIZED (  -- each of these rows once
    SELECT g.state_group AS part, :own_entries.of(g)
    FROM (SELECT DISTINCT part FROM step) AS parts
    JOIN state_groups g ON g.state_group = parts.part
),
entry AS MATERIALIZED (  -- their entries for the keys
    SELECT g.part, w.state_key_nid,
        own_entry(w.state_key_nid, w.member, :own_entries.of(g)) AS event_nid
    FROM stored g
    CROSS JOIN wanted w
),
folded AS (  -- the last row of the path wins
    SELECT DISTINCT ON (s.state_group, e.state_key_nid) s.state_group, e.state_key_nid, e.event_nid
    FROM step s
    JOIN entry e USING (part)
    WHERE e.event_nid IS NOT NULL
    ORDER BY s.state_group, e.state_key_nid, s.place DESC
),
named AS (
    SELECT f.state_group, t.type, k.state_key, e.event_id
    FROM folded f
    CROSS JOIN LATERAL (
        SELECT type_nid, state_key FROM state_keys WHERE state_key_nid = f.state_key_nid OFFSET 0
    ) AS k
    JOIN event_types t USING (type_nid)
    LEFT JOIN events e USING (event_nid)
    WHERE f.event_nid <> 0
)
SELECT at.event_id AS at_event_id, at.state_group,
    at.state_group IN (SELECT s.state_group FROM step s LEFT JOIN stored g USING (part)
        WHERE g.part IS NULL) AS is_lost,
    n.type, n.state_key, n.event_id
FROM at
LEFT JOIN named n USING (state_group)
""",
    OWN_ENTRIES,
).sql


class StatePathRow(NamedTuple):
    """A row to fold.

    ``at_event_ids``: the requested events with this group, if any. ``state_group`` None: outliers.

    ``partial_room_id``: their room, where the state lacks members. ``back`` and
    ``path`` are None where there is nothing to fold: of outliers, cached groups and lost groups.
    """

    state_group: int | None
    at_event_ids: list[str] | None
    partial_room_id: str | None
    back: list[int] | None
    path: bytes | None
    key_nids: list[int] | None
    event_nids: list[int] | None
    member_key_nids: list[int] | None
    member_event_nids: list[int] | None
    key_nid: int | None
    member_key_nid: int | None
    event_nid: int | None

    @property
    def is_stored(self) -> bool:
        return self.back is not None or self.path is not None


class EntryRow(NamedTuple):
    """A requested event (``state_group`` None: an outlier), and one entry of its state, if any.

    ``is_lost``: the group, or a row of its path, is missing. An entry without ``event_id``: its
    event is missing.
    """

    at_event_id: str
    state_group: int | None
    is_lost: bool | None
    type: str | None
    state_key: str | None
    event_id: str | None


async def states_at(
    conn: Connection,
    event_ids: Iterable[EventId],
    *,
    after: bool,
    types: Iterable[str] | None = None,
    keys: Iterable[StateKey] | None = None,
    remembered: States | None = None,
) -> dict[EventId, StateMap]:
    """Return the state before or after each of these events: whole, of some types, or of some keys.

    ``remembered``: a cache of whole states. `UnknownEvent` for an id that is not stored,
    `StateUnknown` for an outlier, `StorageCorrupt` for a state that cannot be read, `InputError`
    for types and keys at once.
    """
    if types is not None and keys is not None:
        message = "state is filtered by types or by keys, not by both"
        raise InputError(message)
    requested = list(dict.fromkeys(event_ids))
    if types is not None:
        only = set(types)
        if MEMBER not in only:
            return _by_event(
                requested,
                await conn.fetch(SQL_STATE_OF_TYPES, requested, after, list(only), row=EntryRow),
            )
        states = await _whole(conn, requested, remembered, after=after)
        return {
            event_id: {key: value for key, value in state.items() if key[0] in only}
            for event_id, state in states.items()
        }
    if keys is not None:
        pairs = set(keys)
        if sum(kind == MEMBER for kind, _ in pairs) <= PICKED_MEMBERS_MAX:
            split = [kind for kind, _ in pairs], [state_key for _, state_key in pairs]
            return _by_event(
                requested,
                await conn.fetch(SQL_STATE_OF_KEYS, requested, after, *split, row=EntryRow),
            )
        states = await _whole(conn, requested, remembered, after=after)
        return {
            event_id: {key: state[key] for key in pairs if key in state}
            for event_id, state in states.items()
        }
    return await _whole(conn, requested, remembered, after=after)


def _by_event(event_ids: Sequence[EventId], rows: Iterable[EntryRow]) -> dict[EventId, StateMap]:
    """Return the states that Postgres folded."""
    states: dict[EventId, StateMap] = {}
    for row in rows:
        if row.state_group is None:
            raise StateUnknown(row.at_event_id)
        if row.is_lost or (row.type is not None and row.event_id is None):
            raise lost(row.state_group, row.at_event_id)
        state = states.setdefault(EventId(row.at_event_id), {})
        if row.type is not None and row.state_key is not None and row.event_id is not None:
            state[row.type, row.state_key] = EventId(row.event_id)
    return {event_id: _value_at(states, event_id) for event_id in event_ids}


async def event_nids_before(conn: Connection, event_id: EventId) -> list[int]:
    """Return the state before an event as numbers of events, in order.

    `UnknownEvent`, `StateUnknown` for an outlier, `PartialState` for a state that lacks members.
    """
    _, folded = await _groups_at(conn, [event_id], after=False, whole=True)
    [state] = folded.values()
    return [*state.members, *state.others]


async def _whole(
    conn: Connection, event_ids: Sequence[EventId], remembered: States | None, *, after: bool
) -> dict[EventId, StateMap]:
    """Return whole states. The caller may change them."""
    states = (
        {}
        if remembered is None
        else {int(group): state for (group,), state in remembered.entries().items()}
    )
    groups, folded = await _groups_at(conn, event_ids, after=after, cached_groups=states)
    if folded:
        states.update(zip(folded, await state_entries(conn, list(folded.values())), strict=True))
    if remembered is not None:
        _remember(remembered, {group: states[group] for group in groups.values()})
    return {event_id: dict(states[group]) for event_id, group in groups.items()}


def _remember(remembered: States, states: Mapping[int, StateMap]) -> None:
    """Cache these states, but for one that is larger than the whole cache may be."""
    for group, state in states.items():
        entry = remembered.get(str(group))
        if isinstance(entry, Ticket) and len(state) <= remembered.limit:
            remembered.fill(entry, state)


async def _groups_at(
    conn: Connection,
    event_ids: Sequence[EventId],
    *,
    after: bool,
    cached_groups: Collection[int] = (),
    whole: bool = False,
) -> tuple[dict[EventId, int], dict[int, FoldedState]]:
    """Return the groups at these events, and the folded state of each unknown group.

    `UnknownEvent`, `StateUnknown`. With ``whole``, `PartialState` for a state that lacks members.
    """
    rows = await conn.fetch(SQL_PATHS, event_ids, after, list(cached_groups), row=StatePathRow)
    parts = {row.state_group: row for row in rows if row.state_group and row.is_stored}
    groups: dict[EventId, int] = {}
    folded: dict[int, FoldedState] = {}
    for row in rows:
        if not row.at_event_ids:
            continue
        if row.state_group is None:
            raise StateUnknown(row.at_event_ids[0])
        if whole and row.partial_room_id is not None:
            raise PartialState(RoomId(row.partial_room_id))
        groups.update(dict.fromkeys(map(EventId, row.at_event_ids), row.state_group))
        if row.state_group not in cached_groups:
            if not row.is_stored:
                raise lost(row.state_group, row.at_event_ids[0])
            folded[row.state_group] = _folded(row.state_group, parts)
    return {event_id: _value_at(groups, event_id) for event_id in event_ids}, folded


def _value_at(states: Mapping[EventId, T], event_id: EventId) -> T:
    if event_id not in states:
        raise UnknownEvent(event_id)
    return states[event_id]


def lost(state_group: int, event_id: str) -> StorageCorrupt:
    """Return the error for a state that cannot be read.

    A damaged index looks the same as a lost row, so the text names both.
    """
    lost_rows = "rows of state_groups or events are lost, or an index does not find them"
    reason = f"the state at an event cannot be read: {lost_rows} (`room-storage verify`)"
    return StorageCorrupt(reason, event_id=event_id, state_group=state_group)


def _folded(state_group: int, rows: Mapping[int, StatePathRow]) -> FoldedState:
    """Return the folded rows of a path: later ones win, and 0 removes a key."""
    members: dict[int, int] = {}
    others: dict[int, int] = {}
    for part in path_of(state_group, rows[state_group], rows):
        step = rows.get(part)
        if step is None:
            raise StorageCorrupt(
                "a state group misses rows of its path", state_group=state_group, lost=[part]
            )
        if step.event_nid is None:
            members.update(
                zip(step.member_key_nids or (), step.member_event_nids or (), strict=True)
            )
            others.update(zip(step.key_nids or (), step.event_nids or (), strict=True))
        elif step.member_key_nid is not None:
            members[step.member_key_nid] = step.event_nid
        elif step.key_nid is not None:
            others[step.key_nid] = step.event_nid
    return FoldedState(_events(members), _events(others))


def _events(entries: dict[int, int]) -> list[int]:
    nids = sorted(entries.values())
    return nids if not nids or nids[0] != REMOVED else [nid for nid in nids if nid != REMOVED]


# --------------------------------------------------------------------------------------------------
# The current state of a room, its extremities, and the rooms that a user is in.

SQL_CURRENT_STATE: Final[LiteralString] = """
SELECT t.type, k.state_key, e.event_id
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = $1::text AND ($2::text[] IS NULL OR t.type = ANY($2::text[]))
"""

SQL_FORWARD_EXTREMITIES: Final[LiteralString] = """
SELECT e.event_id
FROM rooms r
JOIN events e ON e.event_nid = ANY(r.forward_extremities)
WHERE r.room_id = $1::text
"""

SQL_BACKWARD_EXTREMITIES: Final[LiteralString] = """
SELECT m.event_id
FROM rooms r
JOIN missing_events m USING (room_nid)
WHERE r.room_id = $1::text
"""

SQL_ROOMS_OF: Final[LiteralString] = fill("""
SELECT r.room_id
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND m.membership = {JOIN}
ORDER BY r.room_id
""")


class CurrentStateRow(NamedTuple):
    """One entry of a current state."""

    type: str
    state_key: str
    event_id: str


async def current_state(
    conn: Connection, room_id: RoomId, *, types: Iterable[str] | None = None
) -> StateMap:
    """Return the resolved current state of a room.

    `UnknownRoom`; {} for a room that is only known by outliers.
    """
    rows = await conn.fetch(
        SQL_CURRENT_STATE, room_id, None if types is None else list(types), row=CurrentStateRow
    )
    if not rows:
        await require_room(conn, room_id)
    state: StateMap = {}
    async for part in parts(rows):
        state |= {(row.type, row.state_key): EventId(row.event_id) for row in part}
    return state


async def forward_extremities(conn: Connection, room_id: RoomId) -> set[EventId]:
    """Return the forward extremities: the prev_events of the next event."""
    ids = await conn.fetchvals(SQL_FORWARD_EXTREMITIES, room_id)
    if not ids:
        await require_room(conn, room_id)
    return set(ids)


async def backward_extremities(conn: Connection, room_id: RoomId) -> set[EventId]:
    """Return the ids of missing events: stored events name them as parent."""
    ids = await conn.fetchvals(SQL_BACKWARD_EXTREMITIES, room_id)
    if not ids:
        await require_room(conn, room_id)
    return set(ids)


async def rooms_of(conn: Connection, user_id: UserId) -> list[RoomId]:
    """Return the rooms that a local user is joined to, by id."""
    return await conn.fetchvals(SQL_ROOMS_OF, user_id)


# --------------------------------------------------------------------------------------------------
# The state before a join, without most members: the response to send_join may omit them (MSC3706).
#
# The members that stay are those that the join cites, and the heroes of a room without a name and
# an alias. The other entries come from the rows of the state group, whose members are not read.
#
# Source: server-server API, `PUT /_matrix/federation/v2/send_join`, `omit_members`.

SQL_STATE_BEFORE_JOIN: Final[LiteralString] = compose(
    """
WITH
joined AS MATERIALIZED (
    SELECT e.room_nid, e.stream_ordering, e.state_group_before,
        :auth_nids.call AS auth_nids, k.state_key AS user_id
    FROM events e
    JOIN state_keys k USING (state_key_nid)
    WHERE e.event_id = $1::text
),
entry AS MATERIALIZED (
    SELECT s.state_key_nid, e.event_nid, e.event_id
    FROM joined
    CROSS JOIN LATERAL state_but_members(joined.state_group_before) AS s
    LEFT JOIN events e USING (event_nid)
)
SELECT COALESCE(j.state_group_before, 0) AS state_group,
    ARRAY(SELECT event_id FROM entry) AS event_ids,
    EXISTS (SELECT FROM entry WHERE event_nid IS NULL) AS is_lost,
    ARRAY(
        SELECT k.state_key
        FROM events e
        JOIN state_keys k USING (state_key_nid)
        WHERE e.event_nid = ANY(j.auth_nids) AND k.type_nid = {TYPE_MEMBER}
    ) AS cited,
    CASE WHEN EXISTS (
            SELECT FROM entry WHERE state_key_nid IN ({KEY_NAME}, {KEY_CANONICAL_ALIAS})
        ) THEN '{}'
        ELSE heroes_of(j.room_nid, j.stream_ordering - 1, ARRAY[{INVITE}, {JOIN}]::smallint[],
            j.user_id) END AS heroes
FROM joined j
""",
    AUTH_NIDS,
).sql


class StateBeforeJoinRow(NamedTuple):
    """The entries of a state without members, and the users whose membership is wanted as well.

    ``state_group`` is 0 for an outlier.
    """

    state_group: int
    event_ids: list[str]
    is_lost: bool
    cited: list[str]
    heroes: list[str]


async def reduced_state(conn: Connection, join: EventId) -> frozenset[EventId]:
    """Return the ids of the state before a join, with the members that a server needs first.

    `UnknownEvent`, `StateUnknown` for an outlier, `StorageCorrupt`.

    A state never changes, so two statements need no common snapshot.
    """
    row = await conn.fetchrow(SQL_STATE_BEFORE_JOIN, join, row=StateBeforeJoinRow)
    if row is None:
        raise UnknownEvent(join)
    if not row.state_group:
        raise StateUnknown(join)
    if row.is_lost:
        raise lost(row.state_group, join)
    keys = [(MEMBER, user) for user in {*row.cited, *row.heroes}]
    members = (await states_at(conn, [join], after=False, keys=keys))[join]
    return frozenset({*map(EventId, row.event_ids), *members.values()})
