"""The state in a response: required state, name, avatar, heroes, counts, stripped state.

One statement reads it for all rooms that have some. The keys to read are chosen first (`needed`):
those of patterns where the client does not have them, members that the timeline needs, the name,
the avatar, and the heroes. Their values are those of the current state, or, for a user who is not
in the room any more, those with the later deltas taken back. `changed` are the keys that changed
since the client has the room. The range of the user's own membership ends later than that of the
rest, where state resolution took the user out of the room.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIPS
from storage.database.placeholders import compose, fill
from storage.ids import RoomId, StateKey, UserId
from storage.queries.events import StoredEvent, event_of_room
from storage.queries.sliding.checks import LAZY
from storage.queries.sliding.types import ANY, ME
from storage.queries.sliding.user_rooms import ListChanges, ListedRoom
from storage.queries.sync.changed_rooms import ChangeSnapshot
from storage.queries.sync.state import (
    PART_ENTRY_ROWS,
    PART_SHOWN,
    TEMPLATE_HEROES,
    TEMPLATE_IS_NAMED,
    StateRow,
    SyncedRoom,
    SyncedUser,
    lost_state,
    stripped,
)
from storage.turns import in_turns

# --------------------------------------------------------------------------------------------------
# Facts of rooms that the filters of lists look at: type, encryption, and name.
#
# The facts of the current state are cached by room, for all users, until an event that can change
# them is published here. One statement reads those of all rooms that lack them. A user who was
# kicked or banned gets the facts as of that moment, which are not cached: a name that the room got
# later is none of theirs. A room that this server knows by an invite alone has those of the
# stripped state.

KNOCK: Final = MEMBERSHIPS["knock"]
CREATE: Final = 1
NAME: Final = 9
ENCRYPTION: Final = 13

SQL_FACTS: Final[LiteralString] = fill("""
WITH room AS MATERIALIZED (
    SELECT w.room_nid, e.event_nid, EXISTS (
            SELECT FROM current_state x WHERE x.room_nid = w.room_nid
                AND x.state_key_nid = {KEY_ENCRYPTION}
        ) AS is_encrypted,
        COALESCE(e.describes_room, false) AS has_type
    FROM unnest($1::int[]) AS w (room_nid)
    LEFT JOIN current_state c ON c.room_nid = w.room_nid AND c.state_key_nid = {KEY_CREATE}
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
""")

SQL_NAMES: Final[LiteralString] = fill("""
SELECT c.room_nid, r.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS is_redacted, e.json
FROM current_state c
JOIN rooms r USING (room_nid)
JOIN events e USING (event_nid)
WHERE c.room_nid = ANY($1::int[]) AND c.state_key_nid = {KEY_NAME}
""")

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

    def changed_since(self, snapshot: ChangeSnapshot) -> set[str] | None:
        """Return the rooms whose facts changed after the snapshot. None: any can have changed."""
        changes = self._changes.facts
        return None if snapshot.time < changes.floor else set(changes.since(snapshot.time))

    def all(self) -> Mapping[str, RoomFacts]:
        return self._facts

    def add(self, facts: Mapping[str, RoomFacts], snapshot: ChangeSnapshot) -> None:
        """Store facts that were read in this snapshot, but for those changed since."""
        changed = self.changed_since(snapshot)
        if changed is None:
            return
        self._facts.update(
            (room_id, room_facts) for room_id, room_facts in facts.items() if room_id not in changed
        )
        while len(self._facts) > self.limit:
            del self._facts[next(iter(self._facts))]


async def read_facts(
    conn: Connection, rooms: Sequence[ListedRoom], cached: Mapping[str, RoomFacts], *, names: bool
) -> tuple[dict[str, RoomFacts], dict[str, RoomFacts]]:
    """Return the facts of current states, and the facts that are the user's own, by room id.

    ``cached`` are facts that were read before. ``names``: also the names.
    """
    present = [room for room in rooms if room.membership >= KNOCK]
    lacking = [room for room in present if room.room_id not in cached]
    facts = await _present(conn, lacking) if lacking else {}
    cached = {room.room_id: cached.get(room.room_id) or facts[room.room_id] for room in present}
    shown = [room for room in present if not cached[room.room_id].is_known]
    past = [room for room in rooms if room.membership < KNOCK]
    own = await _own(conn, past, shown) if shown or past else {}
    if names and len(shown) < len(present):
        facts.update(await _with_names(conn, present, cached))
    return facts, own


async def _present(conn: Connection, rooms: Sequence[ListedRoom]) -> dict[str, RoomFacts]:
    """Return the types and encryption of the current states."""
    id_of = {room.room_nid: room.room_id for room in rooms}
    by_room: dict[str, RoomFacts] = {}
    async for row in in_turns(await conn.fetch(SQL_FACTS, list(id_of), row=FactsRow)):
        room_type = None
        if row.json is not None:
            event = _event(id_of[row.room_nids[0]], row)
            room_type = text_in(event.content, "type")
        facts = RoomFacts(room_type, row.is_encrypted, is_known=row.is_known)
        by_room.update((id_of[nid], facts) for nid in row.room_nids)
    return by_room


async def _with_names(
    conn: Connection, rooms: Sequence[ListedRoom], cached: Mapping[str, RoomFacts]
) -> dict[str, RoomFacts]:
    id_of = {room.room_nid: room.room_id for room in rooms if cached[room.room_id].is_known}
    rows = await conn.fetch(SQL_NAMES, list(id_of), row=RoomNameRow)
    names = {
        row.room_nid: text_in(_event(id_of[row.room_nid], row).content, "name")
        async for row in in_turns(rows)
    }
    return {
        room_id: cached[room_id]._replace(name=names.get(nid), has_name=True)
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
    by_room: dict[str, RoomFacts] = {
        room.room_id: RoomFacts(has_name=True, is_known=False) for room in (*past, *shown)
    }
    id_of = {room.room_nid: room.room_id for room in (*past, *shown)}
    async for row in in_turns(rows):
        event = _event(id_of[row.room_nid], row)
        states = {(event.type, event.state_key): event.content}
        if row.state_key_nid == 0:
            brought = stripped((), event, orjson.loads(row.stripped_state or "[]"))
            states = {
                (stripped["type"], stripped["state_key"]): stripped["content"]
                for stripped in brought
            }
        by_room[event.room_id] = _with_states(by_room[event.room_id], states)
    return by_room


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


# --------------------------------------------------------------------------------------------------
# Which state a client wants: pairs of a type and a state key, and how two sets of them differ.
#
# A wildcard for both has no members if the set has ``$LAZY``: the timeline says which ones are
# sent. A wildcard for the type alone is of all types, m.room.member as well. Excluded pairs are not
# part of the statement: their state is read and left out.

MEMBER: Final = "m.room.member"
EVERYTHING: Final = (ANY, ANY)
ALL_MEMBERS: Final = (MEMBER, ANY)
LAZY_MEMBERS: Final = (MEMBER, LAZY)

Pairs = frozenset[StateKey]
NO_PAIRS: Final[Pairs] = frozenset()


class Required(NamedTuple):
    """The state that a client wants: what an included pair matches and no excluded one.

    Members that are loaded lazily are sent in any case.
    """

    included: Pairs = NO_PAIRS
    excluded: Pairs = NO_PAIRS

    @property
    def explicit(self) -> Pairs:
        """Return the included pairs, with all members where a wildcard stands for them."""
        if EVERYTHING in self.included and LAZY_MEMBERS not in self.included:
            return self.included | {ALL_MEMBERS}
        return self.included

    def excludes(self, state_key: StateKey, user_id: UserId) -> bool:
        """Return whether an excluded pair matches this type and state key."""
        kind, key = state_key
        return any(
            excluded_type in (ANY, kind) and (user_id if other == ME else other) in (ANY, key)
            for excluded_type, other in self.excluded
        )


NOTHING: Final = Required()


def beyond(required: Required, sent: Required) -> Pairs:
    """Return the included pairs that may match state which ``sent`` does not have.

    State that was excluded may be in it with other state that matches the same pair.
    """
    if required == sent:
        return NO_PAIRS
    old = sent.explicit
    lifted = sent.excluded - required.excluded
    return frozenset(
        pair
        for pair in required.explicit
        if pair != LAZY_MEMBERS
        and (not _is_in(pair, old) or any(_overlap(pair, lifted_pair) for lifted_pair in lifted))
    )


def _overlap(first: StateKey, other: StateKey) -> bool:
    """Return whether two pairs may match the same state. ``$ME`` may be any state key."""
    return all(
        mine == its or ANY in (mine, its) or ME in (mine, its)
        for mine, its in zip(first, other, strict=True)
    )


def _is_in(pair: StateKey, pairs: Pairs) -> bool:
    """Return whether ``pairs`` matches all that the pair matches."""
    kind, key = pair
    if pair in pairs:
        return True
    if kind == ANY:  # members as well, unless the key is a wildcard too
        members = ALL_MEMBERS in pairs or (MEMBER, key) in pairs
        return key != ANY and EVERYTHING in pairs and members
    if (kind, ANY) in pairs or (key != ANY and (ANY, key) in pairs):
        return True
    return EVERYTHING in pairs and kind != MEMBER


class Pattern(NamedTuple):
    """A pair of one set, by the number of the set. None: any."""

    number: int
    type: str | None
    state_key: str | None


class Patterns:
    """The distinct sets of a statement, by number."""

    def __init__(self, user_id: UserId) -> None:
        self._user_id = user_id
        self._numbers: dict[Pairs, int] = {}

    def number(self, pairs: Pairs) -> int | None:
        """Return the number of a set as `Required.explicit` returns it. None for an empty one."""
        explicit = pairs - {LAZY_MEMBERS}
        return self._numbers.setdefault(explicit, len(self._numbers)) if explicit else None

    def columns(self) -> tuple[list[int], list[str | None], list[str | None]]:
        """Return the patterns of all sets: their numbers, types and state keys."""
        rows = list(self._rows())
        return (
            [row.number for row in rows],
            [row.type for row in rows],
            [row.state_key for row in rows],
        )

    def _rows(self) -> Iterator[Pattern]:
        for pairs, number in self._numbers.items():
            for kind, key in sorted(pairs):
                own = self._user_id if key == ME else key
                yield Pattern(number, None if kind == ANY else kind, None if own == ANY else own)
                if kind == ANY and own != ANY:  # the wildcard reads no members
                    yield Pattern(number, MEMBER, own)


def printed(required: Required) -> str:
    """Return a set as text. Equal sets have the same text."""
    included, excluded = sorted(required.included), sorted(required.excluded)
    return orjson.dumps(
        {"include": included, "exclude": excluded} if excluded else included
    ).decode()


def read(text: str) -> Required:
    """Return the set of a text of `printed`."""
    value = orjson.loads(text)
    parts = value if isinstance(value, dict) else {"include": value, "exclude": ()}
    return Required(*(frozenset((kind, key) for kind, key in part) for part in parts.values()))


def union(sets: Iterable[Required]) -> Required:
    """Return a set that matches all that one of the sets matches.

    ``$LAZY`` of one set takes no members away from the wildcard of another. A pair stays excluded
    if no other set includes state that it matches, or if that set excludes it as well.
    """
    distinct = list(dict.fromkeys(sets))
    if len(distinct) == 1:
        return distinct[0]
    included = NO_PAIRS.union(*(required.explicit for required in distinct))
    excluded = (
        pair
        for required in distinct
        for pair in required.excluded
        if not any(_includes(other, pair) for other in distinct)
    )
    return Required(included, frozenset(excluded))


def _includes(required: Required, pair: StateKey) -> bool:
    """Return whether the set may match state that the pair matches."""
    return pair not in required.excluded and any(
        _overlap(pair, included) for included in required.explicit if included != LAZY_MEMBERS
    )


PART_MATCH: Final[LiteralString] = """
    (p.type_nid = k.type_nid OR (p.is_any_type AND k.type_nid <> {TYPE_MEMBER}))
        AND (p.state_key IS NULL OR p.state_key = k.state_key)
"""
"""Whether the pattern `p` matches the state key `k`. Members have patterns of their own."""

TEMPLATE_CHANGES: Final[LiteralString] = """
room AS MATERIALIZED (
    SELECT r.*, own.state_key_nid AS own_key_nid
    FROM unnest(:room_nids, :whole, :lower, :upper, :own_upper, :is_joined,
            :wanted, :grown, :dropped, :all_members)
        AS r (room_nid, whole, lower, upper, own_upper, is_joined, wanted, grown, dropped,
            all_members)
    LEFT JOIN state_keys own ON own.type_nid = {TYPE_MEMBER} AND own.state_key = :user_id
),
pattern AS MATERIALIZED (  -- sets of patterns, by number
    SELECT p.number, t.type_nid, p.state_key, p.type IS NULL AS is_any_type
    FROM unnest(:pattern_numbers, :pattern_types, :pattern_keys) AS p (number, type, state_key)
    LEFT JOIN event_types t USING (type)
    WHERE p.type IS NULL OR t.type_nid IS NOT NULL
),
changed AS MATERIALIZED (  -- each key, with its values before and after the range
    SELECT r.room_nid, k.type_nid, k.state_key, k.state_key_nid, d.before_nid, d.end_nid, EXISTS (
            SELECT FROM pattern p WHERE p.number = r.wanted AND {match}
        ) OR (r.all_members AND k.type_nid = {TYPE_MEMBER}) AS is_wanted, EXISTS (
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
            THEN {heroes} END AS heroes
    FROM room r
    CROSS JOIN LATERAL (
        SELECT r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = {KEY_NAME}) AS name,
            r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = {KEY_AVATAR}) AS avatar,
            r.whole OR EXISTS (SELECT FROM changed c
                WHERE c.room_nid = r.room_nid AND c.type_nid = {TYPE_MEMBER}) AS members
        OFFSET 0
    ) AS has
),
"""

TEMPLATE_STATE: Final[LiteralString] = """
WITH
-- More than 150 lines: the required state, names, heroes and counts share the deltas that are read
-- once.
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
    WHERE p.is_any_type OR (p.state_key IS NULL AND p.type_nid <> {TYPE_MEMBER})
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
    JOIN pattern p ON p.number = s.number AND p.type_nid = {TYPE_MEMBER} AND p.state_key IS NULL
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM current_state
        WHERE room_nid = s.room_nid AND membership IS NOT NULL
        UNION ALL
        SELECT state_key_nid FROM later JOIN state_keys k USING (state_key_nid)
        WHERE later.room_nid = s.room_nid AND k.type_nid = {TYPE_MEMBER}
    ) AS c
    UNION
    SELECT 'state', i.room_nid, k.state_key_nid
    FROM unnest(:member_rooms, :member_ids) AS i (room_nid, user_id)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = {TYPE_MEMBER} AND state_key = i.user_id OFFSET 0
    ) AS k
    UNION
    SELECT 'hero', d.room_nid, k.state_key_nid
    FROM due d
    CROSS JOIN LATERAL unnest(d.heroes) AS hero (user_id)
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = {TYPE_MEMBER} AND state_key = hero.user_id OFFSET 0
    ) AS k
    UNION
    SELECT 'name', room_nid, {KEY_NAME} FROM due WHERE name
    UNION
    SELECT 'avatar', room_nid, {KEY_AVATAR} FROM due WHERE avatar
),
shown AS (  -- rooms that the user is not in, with the membership event
    SELECT *
    FROM unnest(:shown_rooms, :shown_members) AS s (room_nid, member_nid)
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

SQL_SLIDING_STATE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_STATE,
        changes=fill(
            TEMPLATE_CHANGES,
            match=PART_MATCH,
            is_named=fill(TEMPLATE_IS_NAMED, keys="({KEY_NAME})"),
            heroes=fill(TEMPLATE_HEROES, user=":user_id"),
        ),
        match=PART_MATCH,
        shown=PART_SHOWN,
        rows=PART_ENTRY_ROWS,
    ),
    room_nids="int[]",
    whole="boolean[]",
    lower="bigint[]",
    upper="bigint[]",
    own_upper="bigint[]",
    is_joined="boolean[]",
    wanted="int[]",
    grown="int[]",
    dropped="int[]",
    all_members="boolean[]",
    member_rooms="int[]",
    member_ids="text[]",
    pattern_numbers="int[]",
    pattern_types="text[]",
    pattern_keys="text[]",
    user_id="text",
    shown_rooms="int[]",
    shown_members="bigint[]",
).sql


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
    rooms = (*(request.room for request in requested), *(request.room for request in shown))
    states = {room.room_nid: SlidingState(room) for room in rooms}
    if not states:
        return states
    pairs = list(members)
    rows = await conn.fetch(
        SQL_SLIDING_STATE,
        [request.room.room_nid for request in requested],
        *([request[at] for request in requested] for at in range(1, len(RequiredRequest._fields))),
        [room_nid for room_nid, _ in pairs],
        [user for _, user in pairs],
        *patterns.columns(),
        user_id,
        [request.room.room_nid for request in shown],
        [request.member_nid for request in shown],
        row=StateRow,
    )
    async for row in in_turns(rows):
        _add(states[row.room_nid], row)
    return states


def _add(state: SlidingState, row: StateRow) -> None:
    """Add a row. `StorageCorrupt` for lost ones."""
    if row.kind == "lost":
        raise lost_state(state.room.room_id)
    if row.event is not None:
        room = state.room
        _add_event(state, row, event_of_room(room.room_id, room.room_version, row.event))
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
