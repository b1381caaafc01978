"""The state in a response: required state, name, avatar, heroes, counts, stripped state.

One statement reads it for all rooms that have some. The keys to read are chosen first (`needed`):
those of patterns where the client does not have them, members that the timeline needs, the name,
the avatar, and the heroes. Their values are those of the current state, or, for a user who is not
in the room any more, those with the later deltas taken back. `changed` are the keys that changed
since the client has the room. The range of the user's own membership ends later than that of the
rest, where state resolution took the user out of the room.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.ids import StateKey, UserId
from storage.queries.events import StoredEvent, event_of_room
from storage.queries.sliding.required_state import Patterns
from storage.queries.sync.state import SyncedRoom, SyncedUser
from storage.queries.sync.state_rows import (
    EVENT,
    EVENT_END,
    PART_ENTRY_ROWS,
    PART_SHOWN,
    StateRow,
    lost_state,
)
from storage.queries.sync.summary import TEMPLATE_IS_NAMED
from storage.turns import in_turns

PART_MATCH: Final[LiteralString] = """
    (p.type_nid = k.type_nid OR (p.is_any_type AND k.type_nid <> 2))
        AND (p.state_key IS NULL OR p.state_key = k.state_key)
"""
"""Whether the pattern `p` matches the state key `k`. Members have patterns of their own."""

TEMPLATE_CHANGES: Final[LiteralString] = """
room AS MATERIALIZED (
    SELECT r.*, own.state_key_nid AS own_key_nid
    FROM unnest($1::int[], $2::boolean[], $3::bigint[], $4::bigint[], $5::bigint[], $6::boolean[],
            $7::int[], $8::int[], $9::int[], $10::boolean[])
        AS r (room_nid, whole, lower, upper, own_upper, is_joined, wanted, grown, dropped,
            all_members)
    LEFT JOIN state_keys own ON own.type_nid = 2 AND own.state_key = $16::text
),
pattern AS MATERIALIZED (  -- sets of patterns, by number
    SELECT p.number, t.type_nid, p.state_key, p.type IS NULL AS is_any_type
    FROM unnest($13::int[], $14::text[], $15::text[]) AS p (number, type, state_key)
    LEFT JOIN event_types t USING (type)
    WHERE p.type IS NULL OR t.type_nid IS NOT NULL
),
changed AS MATERIALIZED (  -- each key, with its values before and after the range
    SELECT r.room_nid, k.type_nid, k.state_key, k.state_key_nid, d.before_nid, d.end_nid, EXISTS (
            SELECT FROM pattern p WHERE p.number = r.wanted AND {match}
        ) OR (r.all_members AND k.type_nid = 2) AS is_wanted, EXISTS (
            SELECT FROM pattern p WHERE p.number = r.dropped AND {match}
        ) AS is_dropped
    FROM room r
    CROSS JOIN LATERAL (
        SELECT d.state_key_nid,
            (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS before_nid,
            (array_agg(d.event_nid ORDER BY d.stream_ordering DESC))[1] AS end_nid
        FROM state_deltas d
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= r.own_upper
            AND (d.stream_ordering <= r.upper OR d.state_key_nid = r.own_key_nid)
            AND NOT r.whole
        GROUP BY d.state_key_nid
    ) AS d
    JOIN state_keys k USING (state_key_nid)
    WHERE d.before_nid IS DISTINCT FROM d.end_nid
),
later AS MATERIALIZED (  -- rooms that the user has left: keys that changed after that
    SELECT DISTINCT ON (d.room_nid, d.state_key_nid) d.room_nid, d.state_key_nid,
        d.prev_event_nid AS event_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.upper
    WHERE NOT r.is_joined
        AND (d.stream_ordering > r.own_upper OR d.state_key_nid IS DISTINCT FROM r.own_key_nid)
    ORDER BY d.room_nid, d.state_key_nid, d.stream_ordering
),
due AS MATERIALIZED (  -- what may have changed of the summary of a room
    SELECT r.room_nid, r.is_joined, has.name, has.avatar, has.members,
        CASE WHEN (has.name OR has.members) AND NOT {is_named}
            THEN COALESCE(NULLIF(heroes_of(r.room_nid, r.upper, '{4,5}', $16::text), '{}'),
                heroes_of(r.room_nid, r.upper, '{1,2}', $16::text)) END AS heroes
    FROM room r
    CROSS JOIN LATERAL (
        SELECT r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = 9) AS name,
            r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = 12) AS avatar,
            r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.type_nid = 2) AS members
        OFFSET 0
    ) AS has
),
"""

TEMPLATE_STATE: Final[LiteralString] = """
WITH
{changes}
selected AS MATERIALIZED (  -- the state to read whether it has changed or not
    SELECT room_nid, CASE WHEN whole THEN wanted ELSE grown END AS number
    FROM room
),
wild AS MATERIALIZED (  -- and its keys but for members, where patterns name them by wildcards
    SELECT DISTINCT s.room_nid, s.number, c.state_key_nid
    FROM selected s
    JOIN pattern p USING (number)
    JOIN rooms USING (room_nid)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_but_members(rooms.current_state_group)
        UNION ALL
        SELECT state_key_nid FROM later WHERE later.room_nid = s.room_nid
    ) AS c
    WHERE p.is_any_type OR (p.state_key IS NULL AND p.type_nid <> 2)
),
needed AS (
    SELECT 'state' AS kind, s.room_nid, k.state_key_nid
    FROM selected s
    JOIN pattern p USING (number)
    CROSS JOIN LATERAL (  -- one by one, also below: a join could read the keys of all members
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = p.type_nid AND state_key = p.state_key OFFSET 0
    ) AS k
    UNION
    SELECT 'state', w.room_nid, w.state_key_nid
    FROM wild w
    JOIN state_keys k USING (state_key_nid)
    WHERE EXISTS (SELECT FROM pattern p WHERE p.number = w.number AND {match})
    UNION
    SELECT 'state', s.room_nid, c.state_key_nid
    FROM selected s
    JOIN pattern p ON p.number = s.number AND p.type_nid = 2 AND p.state_key IS NULL
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM current_state
        WHERE room_nid = s.room_nid AND membership IS NOT NULL
        UNION ALL
        SELECT state_key_nid FROM later JOIN state_keys k USING (state_key_nid)
        WHERE later.room_nid = s.room_nid AND k.type_nid = 2
    ) AS c
    UNION
    SELECT 'state', i.room_nid, k.state_key_nid
    FROM unnest($11::int[], $12::text[]) AS i (room_nid, user_id)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 AND state_key = i.user_id OFFSET 0
    ) AS k
    UNION
    SELECT 'hero', d.room_nid, k.state_key_nid
    FROM due d
    CROSS JOIN LATERAL unnest(d.heroes) AS hero (user_id)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 AND state_key = hero.user_id OFFSET 0
    ) AS k
    UNION
    SELECT 'name', room_nid, 9 FROM due WHERE name
    UNION
    SELECT 'avatar', room_nid, 12 FROM due WHERE avatar
),
shown AS (  -- rooms that the user is not in, with the membership event
    SELECT *
    FROM unnest($17::int[], $18::bigint[]) AS s (room_nid, member_nid)
),
entry AS (
    SELECT n.kind, n.room_nid, n.state_key_nid,
        CASE WHEN l.room_nid IS NULL THEN c.event_nid ELSE l.event_nid END AS event_nid
    FROM needed n
    LEFT JOIN current_state c USING (room_nid, state_key_nid)
    LEFT JOIN later l USING (room_nid, state_key_nid)
    UNION
    -- a removal is sent to a client that has the key, even if it no longer wants it
    SELECT CASE WHEN end_nid IS NULL THEN 'removed' WHEN is_wanted THEN 'state' ELSE 'dropped' END,
        room_nid, state_key_nid, end_nid
    FROM changed
    WHERE is_wanted OR is_dropped
    UNION ALL
    SELECT 'lost', room_nid, NULL, NULL FROM wild WHERE state_key_nid IS NULL
    UNION ALL
    SELECT 'own', room_nid, NULL, member_nid FROM shown
    UNION ALL
    {shown}
)
{rows}
WHERE n.event_nid IS NOT NULL OR n.kind <> 'state'
UNION ALL
SELECT 'summary', d.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, CASE WHEN d.is_joined AND d.members THEN i.joined_count END,
    CASE WHEN d.is_joined AND d.members THEN i.invited_count END, d.heroes
FROM due d
JOIN rooms i USING (room_nid)
WHERE d.name OR d.avatar OR d.members
"""
"""The kinds of rows beside those of `StateRow`: "state", "hero", "name" and "avatar" have an event,
the last two none if it is not set. "dropped": state has changed that the client no longer wants."""

SQL_SLIDING_STATE: Final[LiteralString] = fill(
    TEMPLATE_STATE,
    changes=fill(
        TEMPLATE_CHANGES,
        match=PART_MATCH,
        is_named=fill(TEMPLATE_IS_NAMED, keys="(9)"),
    ),
    match=PART_MATCH,
    shown=PART_SHOWN,
    rows=PART_ENTRY_ROWS,
)


class RequiredRequest(NamedTuple):
    """The state to read of a room: whole, or changes after `lower`; up to `upper`.

    ``own_upper``: the user's own membership is read up to there. It is not before `upper`.
    ``wanted``, ``grown`` and ``dropped`` are numbers of sets of patterns: those of the request, of
    state that the client does not have, and of state that it has and no longer wants.
    ``all_members``: each changed membership.
    """

    room: SyncedRoom
    whole: bool
    lower: int
    upper: int
    own_upper: int
    is_joined: bool
    wanted: int | None
    grown: int | None
    dropped: int | None
    all_members: bool


@dataclass(slots=True)
class SlidingState:
    """The state of one room. A name or an avatar in ``due`` without an event is not set."""

    room: SyncedRoom
    required: list[StoredEvent] = field(default_factory=list)
    removed: list[StateKey] = field(default_factory=list)
    named: dict[str, StoredEvent] = field(default_factory=dict)
    due: set[str] = field(default_factory=set)
    heroes: list[str] | None = None
    members: dict[str, StoredEvent] = field(default_factory=dict)
    counts: tuple[int, int] | None = None
    has_dropped: bool = False
    own: StoredEvent | None = None
    shown: list[StoredEvent] = field(default_factory=list)
    brought: list[dict[str, Any]] = field(default_factory=list)

    def remove(self, key: StateKey) -> None:
        """Add a removed key, unless it is there."""
        if key not in self.removed:
            self.removed.append(key)


async def sliding_states(
    conn: Connection,
    user_id: UserId,
    requested: Sequence[RequiredRequest],
    *,
    members: Iterable[tuple[int, str]],
    patterns: Patterns,
    shown: Sequence[SyncedUser],
) -> dict[int, SlidingState]:
    """Return the state of each of these rooms, by nid; no statement where there are none.

    ``members``: pairs of a room nid and a user whose membership is read. `StorageCorrupt`.
    """
    rooms = (*(one.room for one in requested), *(one.room for one in shown))
    found = {room.room_nid: SlidingState(room) for room in rooms}
    if not found:
        return found
    pairs = list(members)
    rows = await conn.records(
        SQL_SLIDING_STATE,
        [one.room.room_nid for one in requested],
        *([one[at] for one in requested] for at in range(1, len(RequiredRequest._fields))),
        [room_nid for room_nid, _ in pairs],
        [user for _, user in pairs],
        *patterns.columns(),
        user_id,
        [one.room.room_nid for one in shown],
        [one.member_nid for one in shown],
        row=StateRow,
    )
    async for row in in_turns(rows):
        _add(found[row[1]], StateRow._make(row))
    return found


def _add(state: SlidingState, row: StateRow) -> None:
    """Add a row. `StorageCorrupt` for lost ones."""
    if row.kind == "lost":
        raise lost_state(state.room.room_id)
    if row.event_id is not None:
        columns = row[EVENT:EVENT_END]
        _add_event(state, row, event_of_room(state.room.room_id, state.room.room_version, columns))
    elif row.kind in ("name", "avatar"):
        state.due.add(row.kind)
    elif row.kind == "removed":
        state.removed.append((row.removed_type or "", row.removed_key or ""))
    elif row.kind == "dropped":
        state.has_dropped = True
    elif row.kind == "summary":
        state.due.add("heroes")
        state.heroes = row.heroes
        if row.joined_count is not None:
            state.counts = row.joined_count, row.invited_count or 0


def _add_event(state: SlidingState, row: StateRow, event: StoredEvent) -> None:
    if row.kind == "state":
        state.required.append(event)
    elif row.kind == "hero":
        state.members[event.state_key or ""] = event
    elif row.kind == "own":
        state.own = event
        state.brought.extend(orjson.loads(row.stripped_state or "[]"))
    elif row.kind == "shown":
        state.shown.append(event)
    elif row.kind == "dropped":
        state.has_dropped = True
    else:
        state.due.add(row.kind)
        state.named[row.kind] = event
