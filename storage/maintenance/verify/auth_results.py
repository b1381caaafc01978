"""Repeat the auth checks of receipt: by an event's auth events and by the state before it.

Soft failure is not repeated. It depended on the room's current state at that moment, and nothing
derives from it except the extremities.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.auth import check, check_auth_events, keys_needed
from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.references import implied_auth_ids
from storage.ids import EventId, StateKey
from storage.maintenance.room_events import PART_AUTHORISED_EVENTS, PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import EventLoader, StoredContent
from storage.maintenance.verify.finding import ACCEPTED, Finding
from storage.maintenance.verify.room import VerifiedRoom, timeline
from storage.maintenance.verify.state_resolution import LoadedLookup
from storage.state.groups import Group

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

SQL_CREATES: Final[LiteralString] = """
SELECT e.event_id
FROM (SELECT * FROM events WHERE room_nid = $1::int AND type_nid = 1 OFFSET 0) AS e
WHERE e.rejected IS NULL
ORDER BY e.event_id
"""

TEMPLATE_REJECTED: Final[LiteralString] = """
SELECT e.event_nid, e.state_group_before
FROM {events} AS e
WHERE e.rejected IS NOT NULL
ORDER BY e.event_nid
"""

SQL_REJECTED: Final[LiteralString] = fill(
    TEMPLATE_REJECTED,
    events=PART_ROOM_EVENTS,
)

JUDGED_TOGETHER: Final = 500
CREATE: Final = "m.room.create"
CREATE_KEY: Final[StateKey] = (CREATE, "")
OF_ANOTHER_ROOM: Final = ("auth_events.other_room", "auth_events.rejected")
"""The rules by which an event that cites one of another room may be rejected."""


class RejectedRow(NamedTuple):
    """A rejected event, and the state before it; None for an outlier."""

    event_nid: int
    state_group_before: int | None


class AuthCase(NamedTuple):
    """An event to authorise, with its auth events and the room's create events.

    ``state``: the state to authorise it by, None for an outlier.
    """

    held: StoredContent
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
    async for rows in timeline(conn, room.nid, JUDGED_TOGETHER):
        befores = {row.event_nid: row.state_group_before for row in rows}
        groups = await room.states.load(conn, befores.values())
        states = {nid: groups[group] for nid, group in befores.items() if group in groups}
        for finding in await _judge(conn, room, contents, creates, states):
            yield finding
    outliers: list[int] = await conn.fetchvals(SQL_OUTLIERS, room.nid)
    for start in range(0, len(outliers), JUDGED_TOGETHER):
        batch: dict[int, Group | None] = dict.fromkeys(outliers[start : start + JUDGED_TOGETHER])
        for finding in await _judge(conn, room, contents, creates, batch):
            yield finding


async def wrongly_rejected(conn: Connection, room: VerifiedRoom) -> set[int]:
    """Return the nids of the rejected events that the auth rules accept, by the stored data."""
    contents = EventLoader(room)
    creates: list[str] = await conn.fetchvals(SQL_CREATES, room.nid)
    rows = await conn.fetch(SQL_REJECTED, room.nid, row=RejectedRow)
    found = set[int]()
    for start in range(0, len(rows), JUDGED_TOGETHER):
        batch = rows[start : start + JUDGED_TOGETHER]
        groups = await room.states.load(
            conn, {row.state_group_before for row in batch if row.state_group_before is not None}
        )
        states = {
            row.event_nid: groups.get(row.state_group_before or 0)
            for row in batch
            if not _is_lost(row, groups)
        }
        findings = await _judge(conn, room, contents, creates, states)
        accepted = {finding.subject[0] for finding in findings if finding.is_wrongly_rejected}
        found |= {
            nid
            for nid, held in (await contents.load(conn, states)).items()
            if held.event.event_id in accepted
        }
    return found


def _is_lost(row: RejectedRow, groups: Mapping[int, Group]) -> bool:
    return row.state_group_before is not None and row.state_group_before not in groups


async def _judge(
    conn: Connection,
    room: VerifiedRoom,
    contents: EventLoader,
    creates: Sequence[str],
    befores: Mapping[int, Group | None],
) -> list[Finding]:
    """Authorise the events given by nid, each with the state before it."""
    judged = await contents.load(conn, befores)
    auth = await contents.load(conn, (nid for held in judged.values() for nid in held.auth_nids))
    named = await contents.load_ids(
        conn, {one for held in judged.values() for one in _implied(held.event)}
    )
    needed = {
        nid: {CREATE_KEY, *keys_needed(held.event)}
        for nid, held in judged.items()
        if befores[nid] is not None
    }
    numbers = await contents.load_key_nids(conn, (key for keys in needed.values() for key in keys))
    state_nids = {nid: _entries(befores[nid], keys, numbers) for nid, keys in needed.items()}
    states = await contents.load(
        conn, (event for entries in state_nids.values() for event in entries.values())
    )
    findings: list[Finding] = []
    for nid, held in judged.items():
        cited = [auth[one] for one in held.auth_nids if one in auth]
        implied = [named[one] for one in _implied(held.event) if one in named]
        cited += [one for one in implied if one not in cited]
        entries = state_nids.get(nid)
        state = (
            None
            if entries is None
            else {key: states[event].event for key, event in entries.items() if event in states}
        )
        findings += _findings(room, AuthCase(held, cited, state, creates))
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
        _verdict(case, LoadedLookup(case.held.stream_ordering, late)) for late in (True, False)
    ]
    found = case.held.rejected
    if _rule(found) in OF_ANOTHER_ROOM and _rule(verdicts[0]) == "auth_events.missing":
        return  # the other room was purged
    if all(_rule(verdict) != _rule(found) for verdict in verdicts):
        expected = verdicts[0] or ACCEPTED
        yield room.finding("rejected", [case.held.event.event_id], found or ACCEPTED, expected)


def _rule(reason: str | None) -> str | None:
    return None if reason is None else reason.partition(":")[0]


def _verdict(case: AuthCase, eyes: LoadedLookup) -> str | None:
    """Return why an event is rejected, or None."""
    event = case.held.event
    others = [one for one in case.creates if one != event.event_id]
    if event.type == CREATE and others and (case.held.rejected or "").startswith("create.second"):
        return f"create.second: the room has the create event {others[0]}"
    rejected = {one.event.event_id for one in case.auth if eyes.see_rejected(one)}
    try:
        check_auth_events(event, {one.event.event_id: one.event for one in case.auth}, rejected)
        if case.state is not None and event.type != CREATE:
            check(event, case.state, event.room_version)
    except AuthDenied as denied:
        return f"{denied.rule}: {denied.reason}"
    return None
