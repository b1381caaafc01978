"""Check which redaction took effect on which event, and which redactions wait for a target."""

from collections.abc import AsyncIterator, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.auth import keys_needed, redaction_allowed
from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.event import Event
from storage.ids import StateKey
from storage.maintenance.room_events import PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import EventLoader
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom, event_ids

SQL_REDACTIONS: Final[LiteralString] = """
SELECT event_nid, event_id, state_group_before, origin_server_ts, ineffective
FROM (SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier OFFSET 0) AS e
WHERE type_nid = 7 AND rejected IS NULL AND NOT soft_failed
ORDER BY event_nid
"""

SQL_TARGETS: Final[LiteralString] = """
SELECT e.event_id, p.name AS sender, e.refused IS NOT NULL AS is_refused,
    (e.rejected IS NULL AND NOT e.soft_failed)
        OR (e.encoding = 1 AND NOT e.redacted_form) AS accepted
FROM unnest($1::text[]) AS one (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = one.id OFFSET 0) AS e
CROSS JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = e.sender_nid OFFSET 0
) AS p
WHERE e.room_nid = $2::int AND NOT e.outlier
"""

SQL_REDACTED: Final[LiteralString] = """
SELECT e.event_id, r.event_id AS redaction_id, e.redacted_by
FROM events e
LEFT JOIN LATERAL (
    SELECT * FROM events WHERE event_nid = e.redacted_by OFFSET 0
) AS r ON true
-- a purge removed the redaction
LEFT JOIN LATERAL (
    SELECT event_nid FROM purge_retained_events
    WHERE room_nid = e.room_nid AND event_nid = r.event_nid AND r.outlier
    OFFSET 0
) AS l ON true
WHERE e.room_nid = $1::int AND NOT e.outlier AND l.event_nid IS NULL
    -- a subquery, because Postgres hashes it and would not hash an array parameter
    AND (e.redacted_by IS NOT NULL OR e.event_id IN (SELECT unnest($2::text[])))
"""

TEMPLATE_INEFFECTIVE: Final[LiteralString] = """
SELECT e.event_id
FROM {events} AS e
WHERE e.ineffective AND (e.type_nid <> 7 OR e.outlier OR e.rejected IS NOT NULL OR e.soft_failed)
"""

SQL_INEFFECTIVE: Final[LiteralString] = fill(
    TEMPLATE_INEFFECTIVE,
    events=PART_ROOM_EVENTS,
)

SQL_WAITING: Final[LiteralString] = """
SELECT redaction_nid, target_event_id
FROM waiting_redactions
WHERE room_nid = $1::int
"""

TOGETHER: Final = 500


class RedactionRow(NamedTuple):
    """A redaction that is neither an outlier, rejected nor soft-failed."""

    event_nid: int
    event_id: str
    state_group_before: int
    origin_server_ts: int
    ineffective: bool


class TargetRow(NamedTuple):
    """The target of a redaction, if it is in the timeline of the same room.

    ``accepted`` is also true if an earlier release redacted it and it was censored since.
    """

    event_id: str
    sender: str
    is_refused: bool
    accepted: bool


class NamedRedactionRow(NamedTuple):
    """An event with the redaction in its column."""

    event_id: str
    redaction_id: str | None
    redacted_by: int | None


class WaitingRow(NamedTuple):
    """A redaction that waits for its target."""

    redaction_nid: int
    target_event_id: str


class ExpectedRedactions(NamedTuple):
    """The correct result: target -> rank and id of the effective redaction; waiting nid -> target.

    ``mistaken`` are the redactions whose flag is wrong: id -> whether the redaction is ineffective.
    """

    effective: dict[str, tuple[int, str]]
    waiting: dict[int, str]
    mistaken: dict[str, bool]


async def check_redactions(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the earliest of the allowed redactions takes effect ("redacted_by").

    A redaction waits while its target is missing or refused ("waiting_redactions"). One without
    effect is marked ("ineffective").
    """
    expected = await redactions(conn, room)
    for event_id, (found, wanted) in (await misnamed(conn, room, expected)).items():
        yield room.finding("redacted_by", [event_id], found, wanted)
    for event_id in await conn.fetchvals(SQL_INEFFECTIVE, room.nid):
        yield room.finding("ineffective", [event_id], "ineffective", "no redaction in force")
    for event_id, ineffective in expected.mistaken.items():
        yield room.finding("ineffective", [event_id], not ineffective, ineffective)
    waiting = dict(await conn.fetch(SQL_WAITING, room.nid, row=WaitingRow))
    ids = await event_ids(conn, waiting.keys() | expected.waiting.keys())
    for nid in sorted(waiting.keys() | expected.waiting.keys()):
        if waiting.get(nid) != expected.waiting.get(nid):
            pair = waiting.get(nid, "does not wait"), expected.waiting.get(nid, "does not wait")
            yield room.finding("waiting_redactions", [ids[nid]], *pair)


async def misnamed(
    conn: Connection, room: VerifiedRoom, expected: ExpectedRedactions
) -> dict[str, tuple[str | None, str | None]]:
    """Return events whose stored redaction is wrong: id -> (stored, expected)."""
    rows = await conn.fetch(SQL_REDACTED, room.nid, list(expected.effective), row=NamedRedactionRow)
    pairs = {
        row.event_id: (_named(row), expected.effective.get(row.event_id, (0, None))[1])
        for row in rows
    }
    return {event_id: pair for event_id, pair in pairs.items() if pair[0] != pair[1]}


def _named(row: NamedRedactionRow) -> str | None:
    return row.redaction_id or (None if row.redacted_by is None else f"nid {row.redacted_by}")


async def redactions(conn: Connection, room: VerifiedRoom) -> ExpectedRedactions:
    """Return the effects of a room's redactions."""
    contents = EventLoader(room)
    rows = await conn.fetch(SQL_REDACTIONS, room.nid, row=RedactionRow)
    result = ExpectedRedactions({}, {}, {})
    for start in range(0, len(rows), TOGETHER):
        batch = rows[start : start + TOGETHER]
        events = await contents.load(conn, (row.event_nid for row in batch))
        targets = await _targets(
            conn,
            room,
            {held.event.redacts for held in events.values() if held.event.redacts is not None},
        )
        for row in batch:
            held = events.get(row.event_nid)
            if held is None:
                continue
            names_itself = held.event.redacts == held.event.event_id
            wanted = None if names_itself else held.event.redacts
            target = targets.get(wanted or "")
            applies = (
                target is not None
                and target.accepted
                and redaction_allowed(
                    held.event,
                    target.sender,
                    await _auth_state(conn, room, contents, held.event, row.state_group_before),
                    room.row.room_version,
                )
            )
            if target is not None and applies:
                rank = (row.origin_server_ts, held.event.event_id)
                result.effective[target.event_id] = min(
                    rank, result.effective.get(target.event_id, rank)
                )
            is_hidden = target is None or target.is_refused
            if is_hidden and wanted is not None:
                result.waiting[row.event_nid] = wanted
            purged = (
                target is None
                and row.event_nid in result.waiting
                and room.row.purged_below is not None
            )
            if row.ineffective == applies and not (purged and not row.ineffective):
                result.mistaken[row.event_id] = not applies
    return result


async def _targets(conn: Connection, room: VerifiedRoom, ids: set[str]) -> Mapping[str, TargetRow]:
    rows = await conn.fetch(SQL_TARGETS, list(ids), room.nid, row=TargetRow)
    return {row.event_id: row for row in rows}


async def _auth_state(
    conn: Connection, room: VerifiedRoom, contents: EventLoader, event: Event, state_group: int
) -> dict[StateKey, Event]:
    """Return the entries of a state that authorise the event."""
    group = (await room.states.load(conn, [state_group])).get(state_group)
    keys = keys_needed(event)
    numbers = await contents.load_key_nids(conn, keys)
    nids = {} if group is None else {key: group.entries.get(numbers[key] or 0) for key in keys}
    held = await contents.load(conn, (nid for nid in nids.values() if nid is not None))
    return {key: held[nid].event for key, nid in nids.items() if nid in held}
