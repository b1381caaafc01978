"""The state before or after events: whole, or of some types or keys; any number of events at once.

A state is read by folding the rows of its group's path (storage/state/delta_levels.py). The request
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
from typing import Final, LiteralString, NamedTuple, TypeVar

from storage.database.columns import OWN_ENTRIES, OWN_OTHERS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import (
    InputError,
    PartialState,
    StateUnknown,
    StorageCorrupt,
    UnknownEvent,
)
from storage.ids import EventId, RoomId, StateKey
from storage.queries.state_entries import MEMBER, FoldedState, StateMap, state_entries
from storage.state.groups import REMOVED
from storage.state.paths import path_of
from storage.streams.caches import Cache, Ticket

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
    SELECT k.state_key_nid, k.type_nid = 2 AS member
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

    ``partial_room_id``: their room, where the state lacks members (partial_rooms.py). ``back`` and
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
    wanted = list(dict.fromkeys(event_ids))
    if types is not None:
        only = set(types)
        if MEMBER not in only:
            return _by_event(
                wanted,
                await conn.fetch(SQL_STATE_OF_TYPES, wanted, after, list(only), row=EntryRow),
            )
        states = await _whole(conn, wanted, remembered, after=after)
        return {
            event_id: {key: one for key, one in state.items() if key[0] in only}
            for event_id, state in states.items()
        }
    if keys is not None:
        pairs = set(keys)
        if sum(kind == MEMBER for kind, _ in pairs) <= PICKED_MEMBERS_MAX:
            split = [kind for kind, _ in pairs], [state_key for _, state_key in pairs]
            return _by_event(
                wanted, await conn.fetch(SQL_STATE_OF_KEYS, wanted, after, *split, row=EntryRow)
            )
        states = await _whole(conn, wanted, remembered, after=after)
        return {
            event_id: {key: state[key] for key in pairs if key in state}
            for event_id, state in states.items()
        }
    return await _whole(conn, wanted, remembered, after=after)


def _by_event(wanted: Sequence[EventId], rows: Iterable[EntryRow]) -> dict[EventId, StateMap]:
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
    return {event_id: _known(states, event_id) for event_id in wanted}


async def event_nids_before(conn: Connection, event_id: EventId) -> list[int]:
    """Return the state before an event as numbers of events, in order.

    `UnknownEvent`, `StateUnknown` for an outlier, `PartialState` for a state that lacks members.
    """
    _, folded = await _groups_at(conn, [event_id], after=False, whole=True)
    [state] = folded.values()
    return [*state.members, *state.others]


async def _whole(
    conn: Connection, wanted: Sequence[EventId], remembered: States | None, *, after: bool
) -> dict[EventId, StateMap]:
    """Return whole states. The caller may change them."""
    states = (
        {}
        if remembered is None
        else {int(group): state for (group,), state in remembered.held().items()}
    )
    groups, folded = await _groups_at(conn, wanted, after=after, known=states)
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
    wanted: Sequence[EventId],
    *,
    after: bool,
    known: Collection[int] = (),
    whole: bool = False,
) -> tuple[dict[EventId, int], dict[int, FoldedState]]:
    """Return the groups at these events, and the folded state of each unknown group.

    `UnknownEvent`, `StateUnknown`. With ``whole``, `PartialState` for a state that lacks members.
    """
    rows = await conn.fetch(SQL_PATHS, wanted, after, list(known), row=StatePathRow)
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
        if row.state_group not in known:
            if not row.is_stored:
                raise lost(row.state_group, row.at_event_ids[0])
            folded[row.state_group] = _folded(row.state_group, parts)
    return {event_id: _known(groups, event_id) for event_id in wanted}, folded


def _known(states: Mapping[EventId, T], event_id: EventId) -> T:
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
