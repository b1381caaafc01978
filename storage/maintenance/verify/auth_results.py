"""Repeat the auth checks of receipt: by an event's auth events and by the state before it.

Soft failure is not repeated. It depended on the room's current state at that moment, and nothing
derives from it except the extremities.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.auth import check, check_auth_events, keys_needed, needed_events, resolve_conflicts
from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.model import implied_auth_ids
from storage.ids import EventId, StateKey
from storage.maintenance.room_states import PART_AUTHORISED_EVENTS, PART_ROOM_EVENTS
from storage.maintenance.verify.auth_graph import AuthGraph
from storage.maintenance.verify.event_loader import (
    ACCEPTED,
    EventLoader,
    Finding,
    StoredContent,
    VerifiedRoom,
    timeline,
)
from storage.state.groups import Group, State, changed_keys

# --------------------------------------------------------------------------------------------------
# Resolve states again, from the events' auth arrays, without chain cover and earlier merges.


class StateConflict(NamedTuple):
    """The conflict of several states: keys, values by key, and the auth difference, as ids.

    ``nids``: of the values and of all events in their auth chains.
    """

    nids: set[int]
    keys: set[int]
    conflicted: dict[StateKey, set[EventId]]
    difference: set[EventId]


class LoadedEvents(NamedTuple):
    """The loaded events, and the ids that are not stored."""

    stored: dict[EventId, StoredContent]
    absent: set[EventId]


class LoadedLookup(NamedTuple):
    """The events that count as rejected for an event whose stream position is ``before``.

    ``late``: also those that were rejected only after that.
    """

    before: int | None
    late: bool

    def see_rejected(self, stored: StoredContent) -> bool:
        """Return whether an event counts as rejected."""
        if stored.rejected is None:
            return False
        return (
            self.late
            or self.before is None
            or stored.stream_ordering is None
            or stored.stream_ordering < self.before
        )


class UnconflictedIds(Mapping[StateKey, EventId]):
    """The unconflicted state map, with ids instead of nids.

    `keys_to_load` and `nids_to_load` collect keys and nids that are not loaded yet.
    """

    def __init__(
        self, state: State, keys: set[int], contents: EventLoader, ids: dict[int, EventId]
    ) -> None:
        self._state = state
        self._keys = keys
        self._contents = contents
        self._ids = ids
        self.keys_to_load: set[StateKey] = set()
        self.nids_to_load: set[int] = set()

    def __getitem__(self, key: StateKey) -> EventId:
        if key not in self._contents.key_nids:
            self.keys_to_load.add(key)
            raise KeyError(key)
        number = self._contents.key_nids[key]
        if number is None or number in self._keys or number not in self._state:
            raise KeyError(key)
        nid = self._state[number]
        if nid not in self._ids:
            self.nids_to_load.add(nid)
            raise KeyError(key)
        return self._ids[nid]

    def __iter__(self) -> Iterator[StateKey]:
        raise TypeError("a whole state is never iterated here")

    def __len__(self) -> int:
        return len(self._state) - len(self._keys)


class Resolver:
    """Resolve states of one room."""

    def __init__(self, room_version: str, graph: AuthGraph, contents: EventLoader) -> None:
        self._room_version = room_version
        self._graph = graph
        self._contents = contents

    async def resolve(
        self, conn: Connection, groups: Sequence[Group], before: int | None
    ) -> list[dict[int, int]]:
        """Return the resolved values of the keys in which the states differ; 0 for a removed key.

        There is mostly one answer, sometimes two. The set of rejected events may have changed since
        the first resolution. An outlier may have been accepted then, and rejected by its state when
        it entered the timeline after position ``before``. Both answers are correct then. There is
        none if an event that may decide cannot be read.
        """
        keys = set[int]().union(*(changed_keys(groups[0], other) for other in groups[1:]))
        conflict = await self._conflict(conn, groups, keys)
        loaded = LoadedEvents({}, set())
        answers: list[dict[int, int]] = []
        for late in (True, False):
            eyes = LoadedLookup(before, late)
            answer = await self._resolve(conn, groups[0], conflict, loaded, eyes)
            if answer not in answers:
                answers.append(answer)
        decide = {*conflict.nids, *groups[0].entries.values()}
        return answers if self._contents.unreadable.isdisjoint(decide) else []

    async def _conflict(
        self, conn: Connection, groups: Sequence[Group], keys: set[int]
    ) -> StateConflict:
        values = [{group.entries[key] for key in keys if key in group.entries} for group in groups]
        chains = [self._graph.chain(nids) for nids in values]
        difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
        common = (
            {nid for key, nid in groups[0].entries.items() if key not in keys}
            if difference
            else set()
        )
        difference = {nid for nid in difference if not self._graph.reached_by(nid, common)}
        stored = await self._contents.load(conn, difference.union(*values))
        await self._contents.load_keys(conn, keys)
        ids = {nid: loaded.event.event_id for nid, loaded in stored.items()}
        conflicted = {
            self._contents.keys[key]: readable
            for key in keys
            if (
                readable := {ids[nid] for group in groups if (nid := group.entries.get(key)) in ids}
            )
        }
        return StateConflict(
            set().union(*values, *chains),
            keys,
            conflicted,
            {ids[nid] for nid in difference if nid in ids},
        )

    async def _resolve(
        self,
        conn: Connection,
        base: Group,
        conflict: StateConflict,
        loaded: LoadedEvents,
        eyes: LoadedLookup,
    ) -> dict[int, int]:
        stored, absent = loaded
        ids: dict[int, EventId] = {}
        while True:
            unconflicted = UnconflictedIds(base.entries, conflict.keys, self._contents, ids)
            events: dict[EventId, Event] = {
                event_id: content.event for event_id, content in stored.items()
            }
            rejected = {
                event_id for event_id, content in stored.items() if eyes.see_rejected(content)
            }
            arguments = (
                self._room_version,
                unconflicted,
                conflict.conflicted,
                conflict.difference,
                events,
            )
            needed = needed_events(*arguments, rejected=rejected, absent=absent)
            result = None if needed else resolve_conflicts(*arguments, rejected=rejected)
            if (
                result is not None
                and not unconflicted.keys_to_load
                and not unconflicted.nids_to_load
            ):
                return {
                    key: self._nid(stored, result.get(self._contents.keys[key]))
                    for key in conflict.keys
                }
            loaded_now = await self._contents.load_ids(conn, needed)
            absent |= needed - loaded_now.keys()
            stored.update(loaded_now)
            await self._contents.load_key_nids(conn, unconflicted.keys_to_load)
            state = await self._contents.load(conn, unconflicted.nids_to_load)
            ids |= {nid: content.event.event_id for nid, content in state.items()}
            ids |= {nid: EventId(f"nid {nid}") for nid in unconflicted.nids_to_load - ids.keys()}

    @staticmethod
    def _nid(stored: Mapping[EventId, StoredContent], event_id: EventId | None) -> int:
        return 0 if event_id is None else stored[event_id].nid


TEMPLATE_OUTLIERS: Final[LiteralString] = """
SELECT e.event_nid
FROM {events} AS e
WHERE e.outlier
ORDER BY e.event_nid
"""

SQL_OUTLIERS: Final[LiteralString] = fill(
    TEMPLATE_OUTLIERS,
    events=PART_AUTHORISED_EVENTS,
)

SQL_CREATES: Final[LiteralString] = fill("""
SELECT e.event_id
FROM (SELECT * FROM events WHERE room_nid = $1::int AND type_nid = {TYPE_CREATE} OFFSET 0) AS e
WHERE e.rejected IS NULL
ORDER BY e.event_id
""")

AUTHORISED_TOGETHER: Final = 500
CREATE: Final = "m.room.create"
CREATE_KEY: Final[StateKey] = (CREATE, "")
OF_ANOTHER_ROOM: Final = ("auth_events.other_room", "auth_events.rejected")
"""The rules by which an event that cites one of another room may be rejected."""


class AuthCase(NamedTuple):
    """An event to authorise, with its auth events and the room's create events.

    ``state``: the state to authorise it by, None for an outlier.
    """

    stored: StoredContent
    auth: Sequence[StoredContent]
    state: Mapping[StateKey, Event] | None
    creates: Sequence[str]


async def check_auth_results(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that exactly the events that the auth rules refuse are rejected ("rejected").

    The rule that refuses must be the same, too.
    """
    contents = EventLoader(room)
    creates: list[str] = await conn.fetchvals(SQL_CREATES, room.nid)
    if len(creates) > 1:
        yield room.finding("rejected", creates, "several create events accepted", "one")
    async for rows in timeline(conn, room.nid, AUTHORISED_TOGETHER):
        befores = {row.event_nid: row.state_group_before for row in rows}
        groups = await room.states.load(conn, befores.values())
        states = {nid: groups[group] for nid, group in befores.items() if group in groups}
        for finding in await _authorise(conn, room, contents, creates, states):
            yield finding
    outliers: list[int] = await conn.fetchvals(SQL_OUTLIERS, room.nid)
    for start in range(0, len(outliers), AUTHORISED_TOGETHER):
        batch: dict[int, Group | None] = dict.fromkeys(
            outliers[start : start + AUTHORISED_TOGETHER]
        )
        for finding in await _authorise(conn, room, contents, creates, batch):
            yield finding


async def _authorise(
    conn: Connection,
    room: VerifiedRoom,
    contents: EventLoader,
    creates: Sequence[str],
    befores: Mapping[int, Group | None],
) -> list[Finding]:
    """Authorise the events given by nid, each with the state before it."""
    events = await contents.load(conn, befores)
    auth = await contents.load(
        conn, (nid for stored in events.values() for nid in stored.auth_nids)
    )
    named = await contents.load_ids(
        conn, {event_id for stored in events.values() for event_id in _implied(stored.event)}
    )
    needed = {
        nid: {CREATE_KEY, *keys_needed(stored.event)}
        for nid, stored in events.items()
        if befores[nid] is not None
    }
    numbers = await contents.load_key_nids(conn, (key for keys in needed.values() for key in keys))
    state_nids = {nid: _entries(befores[nid], keys, numbers) for nid, keys in needed.items()}
    states = await contents.load(
        conn, (event for entries in state_nids.values() for event in entries.values())
    )
    findings: list[Finding] = []
    for nid, stored in events.items():
        if not contents.unreadable.isdisjoint(
            (*stored.auth_nids, *state_nids.get(nid, {}).values())
        ):
            continue  # the check of the bytes reports the event that would decide
        cited = [auth[cited_nid] for cited_nid in stored.auth_nids if cited_nid in auth]
        implied = [named[event_id] for event_id in _implied(stored.event) if event_id in named]
        cited += [content for content in implied if content not in cited]
        entries = state_nids.get(nid)
        state = (
            None
            if entries is None
            else {key: states[event].event for key, event in entries.items() if event in states}
        )
        findings += _findings(room, AuthCase(stored, cited, state, creates))
    return findings


def _implied(event: Event) -> tuple[EventId, ...]:
    return implied_auth_ids(event.room_version, event.type, event.room_id)


def _entries(
    group: Group | None, keys: set[StateKey], numbers: Mapping[StateKey, int | None]
) -> dict[StateKey, int]:
    entries = {} if group is None else {key: group.entries.get(numbers[key] or 0) for key in keys}
    return {key: nid for key, nid in entries.items() if nid is not None}


def _findings(room: VerifiedRoom, case: AuthCase) -> Iterator[Finding]:
    verdicts = [
        _verdict(case, LoadedLookup(case.stored.stream_ordering, late)) for late in (True, False)
    ]
    found = case.stored.rejected
    if _rule(found) in OF_ANOTHER_ROOM and _rule(verdicts[0]) == "auth_events.missing":
        return  # the other room was purged
    if all(_rule(verdict) != _rule(found) for verdict in verdicts):
        expected = verdicts[0] or ACCEPTED
        yield room.finding("rejected", [case.stored.event.event_id], found or ACCEPTED, expected)


def _rule(reason: str | None) -> str | None:
    return None if reason is None else reason.partition(":")[0]


def _verdict(case: AuthCase, eyes: LoadedLookup) -> str | None:
    """Return why an event is rejected, or None."""
    event = case.stored.event
    others = [event_id for event_id in case.creates if event_id != event.event_id]
    if event.type == CREATE and others and (case.stored.rejected or "").startswith("create.second"):
        return f"create.second: the room has the create event {others[0]}"
    rejected = {content.event.event_id for content in case.auth if eyes.see_rejected(content)}
    try:
        check_auth_events(
            event, {content.event.event_id: content.event for content in case.auth}, rejected
        )
        if case.state is not None and event.type != CREATE:
            check(event, case.state, event.room_version)
    except AuthDenied as denied:
        return f"{denied.rule}: {denied.reason}"
    return None


# --------------------------------------------------------------------------------------------------
# Check which refused events are superseded, and so are no extremities once readmitted.

TEMPLATE_HAS_REFUSED: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM {events} AS e WHERE e.refused IS NOT NULL)
"""

SQL_HAS_REFUSED: Final[LiteralString] = fill(
    TEMPLATE_HAS_REFUSED,
    events=PART_ROOM_EVENTS,
)

TEMPLATE_SUPERSEDED: Final[LiteralString] = """
WITH RECURSIVE
named AS (  -- by an accepted live event, also through events that can be no extremity
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND NOT e.backfilled
    UNION
    SELECT n.event_nid
    FROM named
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = named.event_nid OFFSET 0) AS e
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
)
SELECT e.event_id, e.superseded IS TRUE AS found, n.event_nid IS NOT NULL AS expected
FROM {events} AS e
LEFT JOIN named n USING (event_nid)
WHERE e.refused IS NOT NULL
    AND e.superseded IS TRUE <> (n.event_nid IS NOT NULL)
    AND NOT (e.superseded IS TRUE  -- the events that superseded it may be purged
        AND EXISTS (SELECT FROM purge_jobs j WHERE j.room_nid = $1::int))
ORDER BY e.event_id
"""

SQL_SUPERSEDED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_SUPERSEDED,
        events=PART_ROOM_EVENTS,
    ),
    PREV_NIDS,
).sql


class SupersededRow(NamedTuple):
    """A refused event whose flag is wrong: as stored, and as it should be."""

    event_id: str
    found: bool
    expected: bool


async def wrongly_superseded(conn: Connection, room_nid: int) -> list[SupersededRow]:
    """Return the refused events whose flag is wrong. Most rooms have none, and one scan ends it."""
    if not await conn.fetchval(SQL_HAS_REFUSED, room_nid):
        return []
    return await conn.fetch(SQL_SUPERSEDED, room_nid, row=SupersededRow)


async def check_verdicts(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that a refused event is marked once an accepted live event descends from it.

    The verdict itself is the caller's, and nothing else in the tables says it ("superseded").
    """
    for row in await wrongly_superseded(conn, room.nid):
        yield room.finding("superseded", [row.event_id], row.found, row.expected)
