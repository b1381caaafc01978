"""The state before or after events: whole, or only of some types, or only under some keys; any number of events at once.

A state is read by folding the rows of its group's path (storage/state/levels.py). Which way is taken depends on what is asked:

* Types other than members, or a few keys: entries. Without a member among them the member arrays are not read at all; a key is
  looked for inside the arrays, which are never taken apart for it.
* A whole state, and whatever needs most of the members, is folded here from the rows of the path (at most 30), and its texts come by
  a second statement, as lists in the order of their numbers: 20,000 rows cost more to send than to find, and folding
  them in Postgres takes three times as long. States that have rows in common share these, and their texts.

Neither ever changes for an event of the timeline, so two statements need no common snapshot.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final, LiteralString, NamedTuple, TypeVar

from storage.database.connection import Connection
from storage.errors import InputError, StateUnknown, StorageCorrupt, UnknownEvent
from storage.ids import EventId, StateKey
from storage.queries.state_texts import MEMBER, Folded, StateMap, in_words
from storage.state.groups import REMOVED

T = TypeVar("T")

PICKED_MEMBERS_MAX: Final = 16  # more member keys than this are cheaper picked from the whole

SQL_PATHS: Final[LiteralString] = """
WITH at AS MATERIALIZED (  -- the groups wanted, each with the events that want it; NULL for outliers
    SELECT CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before) ELSE state_group_before END AS state_group,
        array_agg(event_id) AS at_event_ids
    FROM events
    WHERE event_id = ANY($1::text[])
    GROUP BY 1
)
SELECT g.state_group, at.at_event_ids, g.back, g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids
FROM state_groups g
LEFT JOIN at USING (state_group)
WHERE g.state_group IN (SELECT state_group - unnest(back) FROM at JOIN state_groups USING (state_group))
UNION ALL
SELECT NULL, at_event_ids, '{}', NULL, NULL, NULL, NULL
FROM at
WHERE state_group IS NULL
"""

SQL_STATE_OF_TYPES: Final[LiteralString] = """
WITH
at AS MATERIALIZED (  -- the groups wanted
    SELECT event_id,
        CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before) ELSE state_group_before END AS state_group
    FROM events
    WHERE event_id = ANY($1::text[])
),
entry AS (  -- what the rows of their paths say, members left out
    SELECT w.state_group, p.place, e.state_key_nid, e.event_nid
    FROM (SELECT DISTINCT state_group FROM at) AS wanted
    JOIN state_groups w USING (state_group)
    CROSS JOIN unnest(w.back) WITH ORDINALITY AS p (back, place)
    JOIN state_groups g ON g.state_group = w.state_group - p.back
    CROSS JOIN unnest(g.key_nids, g.event_nids) AS e (state_key_nid, event_nid)
),
folded AS (  -- the last row of the path wins
    SELECT DISTINCT ON (state_group, state_key_nid) state_group, state_key_nid, event_nid
    FROM entry
    ORDER BY state_group, state_key_nid, place DESC
),
named AS (
    SELECT f.state_group, t.type, k.state_key, e.event_id
    FROM folded f
    JOIN state_keys k USING (state_key_nid)
    JOIN event_types t USING (type_nid)
    JOIN events e USING (event_nid)
    WHERE t.type = ANY($3::text[])
)
SELECT at.event_id AS at_event_id, at.state_group, n.type, n.state_key, n.event_id
FROM at
LEFT JOIN named n USING (state_group)
"""

SQL_STATE_OF_KEYS: Final[LiteralString] = """
WITH
at AS MATERIALIZED (  -- the groups wanted
    SELECT event_id,
        CASE WHEN $2::boolean THEN COALESCE(state_group_after, state_group_before) ELSE state_group_before END AS state_group
    FROM events
    WHERE event_id = ANY($1::text[])
),
wanted AS MATERIALIZED (
    SELECT k.state_key_nid, k.type_nid = 2 AS member
    FROM unnest($3::text[], $4::text[]) AS w (type, state_key)
    JOIN event_types t USING (type)
    JOIN state_keys k USING (type_nid, state_key)
),
step AS MATERIALIZED (  -- the rows of their paths, by position
    SELECT w.state_group, w.state_group - p.back AS part, p.place
    FROM (SELECT DISTINCT state_group FROM at) AS one
    JOIN state_groups w USING (state_group)
    CROSS JOIN unnest(w.back) WITH ORDINALITY AS p (back, place)
),
entry AS MATERIALIZED (  -- what each of these rows says of the keys, each row looked at once
    SELECT g.state_group AS part, w.state_key_nid,
        CASE
            WHEN w.member THEN g.member_event_nids[array_position(g.member_key_nids, w.state_key_nid)]
            ELSE g.event_nids[array_position(g.key_nids, w.state_key_nid)]
        END AS event_nid
    FROM (SELECT DISTINCT part FROM step) AS parts
    JOIN state_groups g ON g.state_group = parts.part
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
    JOIN state_keys k USING (state_key_nid)
    JOIN event_types t USING (type_nid)
    JOIN events e USING (event_nid)
)
SELECT at.event_id AS at_event_id, at.state_group, n.type, n.state_key, n.event_id
FROM at
LEFT JOIN named n USING (state_group)
"""


class PathRow(NamedTuple):
    """A row to fold. ``at_event_ids``: the events whose state the group is, if any asks for it; ``state_group`` None: outliers."""

    state_group: int | None
    at_event_ids: list[str] | None
    back: list[int]
    key_nids: list[int] | None
    event_nids: list[int] | None
    member_key_nids: list[int] | None
    member_event_nids: list[int] | None


class EntryRow(NamedTuple):
    """An event asked for (``state_group`` None: an outlier), and one entry of its state, if it has any."""

    at_event_id: str
    state_group: int | None
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
) -> dict[EventId, StateMap]:
    """The state before or after each of these events: whole, or only of some types, or only under some (type, state key).

    `UnknownEvent` for an id that is not held, `StateUnknown` for an outlier, `InputError` for types and keys at once.
    """
    if types is not None and keys is not None:
        message = "state is filtered by types or by keys, not by both"
        raise InputError(message)
    wanted = list(dict.fromkeys(event_ids))
    if types is not None:
        only = set(types)
        if MEMBER not in only:
            return _told(wanted, await conn.fetch(SQL_STATE_OF_TYPES, wanted, after, list(only), row=EntryRow))
        states = await _whole(conn, wanted, after=after)
        return {event_id: {key: one for key, one in state.items() if key[0] in only} for event_id, state in states.items()}
    if keys is not None:
        pairs = set(keys)
        if sum(kind == MEMBER for kind, _ in pairs) <= PICKED_MEMBERS_MAX:
            split = [kind for kind, _ in pairs], [state_key for _, state_key in pairs]
            return _told(wanted, await conn.fetch(SQL_STATE_OF_KEYS, wanted, after, *split, row=EntryRow))
        states = await _whole(conn, wanted, after=after)
        return {event_id: {key: state[key] for key in pairs if key in state} for event_id, state in states.items()}
    return await _whole(conn, wanted, after=after)


def _told(wanted: Sequence[EventId], rows: Iterable[EntryRow]) -> dict[EventId, StateMap]:
    """The states that were folded by Postgres."""
    states: dict[EventId, StateMap] = {}
    for row in rows:
        if row.state_group is None:
            raise StateUnknown(row.at_event_id)
        state = states.setdefault(EventId(row.at_event_id), {})
        if row.type is not None and row.state_key is not None and row.event_id is not None:
            state[row.type, row.state_key] = EventId(row.event_id)
    return {event_id: _known(states, event_id) for event_id in wanted}


async def event_nids_before(conn: Connection, event_id: EventId) -> list[int]:
    """The state before an event as numbers of events, in order. `UnknownEvent`, `StateUnknown` for an outlier."""
    [state] = (await _folded_at(conn, [event_id], after=False)).values()
    return [*state.members, *state.others]


async def _whole(conn: Connection, wanted: Sequence[EventId], *, after: bool) -> dict[EventId, StateMap]:
    """Whole states."""
    folded = await _folded_at(conn, wanted, after=after)
    distinct = list({id(state): state for state in folded.values()}.values())
    named = dict(zip(map(id, distinct), await in_words(conn, distinct), strict=True))
    states: dict[EventId, StateMap] = {}
    for event_id in wanted:
        state = named[id(folded[event_id])]
        states[event_id] = dict(state) if len(distinct) < len(wanted) else state
    return states


async def _folded_at(conn: Connection, wanted: Sequence[EventId], *, after: bool) -> dict[EventId, Folded]:
    """The states at these events; events with the same state share the value. `UnknownEvent`, `StateUnknown`."""
    rows = await conn.fetch(SQL_PATHS, wanted, after, row=PathRow)
    by_group = {row.state_group: row for row in rows}
    states: dict[EventId, Folded] = {}
    for row in rows:
        if row.at_event_ids:
            if row.state_group is None:
                raise StateUnknown(row.at_event_ids[0])
            states.update(zip(map(EventId, row.at_event_ids), repeat(_folded(row, by_group)), strict=False))
    return {event_id: _known(states, event_id) for event_id in wanted}


def _known(states: Mapping[EventId, T], event_id: EventId) -> T:
    if event_id not in states:
        raise UnknownEvent(event_id)
    return states[event_id]


def _folded(row: PathRow, rows: Mapping[int | None, PathRow]) -> Folded:
    """The rows of a path, later ones winning; 0 removes a key."""
    members: dict[int, int] = {}
    others: dict[int, int] = {}
    for back in row.back:
        part = (row.state_group or 0) - back
        step = rows.get(part)
        if step is None:
            raise StorageCorrupt("a state group misses rows of its path", state_group=row.state_group, lost=[part])
        members.update(zip(step.member_key_nids or (), step.member_event_nids or (), strict=True))
        others.update(zip(step.key_nids or (), step.event_nids or (), strict=True))
    return Folded(_events(members), _events(others))


def _events(entries: dict[int, int]) -> list[int]:
    nids = sorted(entries.values())
    return nids if not nids or nids[0] != REMOVED else [nid for nid in nids if nid != REMOVED]
