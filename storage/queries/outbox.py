"""The outbox: events of local users in stream order, each with the servers to send it to.

It ends at the linear position of the stream "events": all writers have completed every smaller id.
So an event that commits late never appears behind a position that was returned.

    writer a has committed 5, and 8 is in flight; b has committed 6      the outbox ends at 5
    a has committed 8                                                    it ends at 6: b may have 7
    b reports that it is idle, up to 8, or it has closed                 it ends at 8

The servers are those in the event's audience (storage/visibility): the remote servers that are
joined before or after the event. The server of the target of a membership event is added, so that
it learns of an invite, a kick or a ban. It is left out if it has signed an invite, as it got that
by a request of its own (server-server API, "Inviting to a room"). While the state of the room is
partial, the servers that were in the room before the join are added.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode_recent
from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.errors import StorageCorrupt
from storage.ids import EventId, RoomId, ServerName, server_name_of
from storage.queries.events import event_json

SQL_OUTBOX: Final[LiteralString] = fill("""
WITH
reached AS (
    SELECT COALESCE(min(stream_id), 0) AS position, max(stream_id) AS furthest
    FROM stream_positions
    WHERE stream_name = 'events'
),
-- so few positions that they have at most so many events
bounds AS MATERIALIZED (
    SELECT LEAST(r.position, (SELECT min(stream_ordering) FROM events
        WHERE stream_ordering > $1::bigint) + $4::bigint - 1) AS upto
    FROM reached r
),
-- a writer without a session, or this one, is behind the others. Its position must be moved before
-- a snapshot: one that committed after this snapshot, and ended, is not visible here
held AS (
    SELECT EXISTS (
        SELECT
        FROM reached r
        JOIN stream_positions p ON p.stream_name = 'events' AND p.stream_id < r.furthest
        WHERE p.instance_name = $5::text OR NOT EXISTS (
            SELECT FROM pg_stat_activity a
                WHERE a.datname = current_database()
                    AND is_session_of(a.application_name, p.instance_name)
        )
    ) AS is_held
),
event AS MATERIALIZED (
    SELECT e.stream_ordering, e.event_id, e.room_nid, e.audience, e.membership, e.state_key_nid,
        CASE WHEN e.membership = {INVITE} THEN e.json END AS invite
    FROM events e
    JOIN principals p ON p.principal_nid = e.sender_nid
    WHERE e.stream_ordering > $1::bigint AND e.stream_ordering <= (SELECT upto FROM bounds)
        AND NOT e.backfilled AND NOT e.soft_failed AND e.rejected IS NULL
        AND substr(p.name, strpos(p.name, ':') + 1) = $3::text
    ORDER BY e.stream_ordering
    LIMIT $2::bigint
),
remote AS MATERIALIZED (  -- once a room
    SELECT v.room_nid, v.principal_nid, v.first_audience, p.name,
        v.audiences - COALESCE(v.invited_audiences, '{}') AS joined_audiences
    FROM (SELECT DISTINCT room_nid FROM event) AS r
    JOIN visibility v USING (room_nid)
    JOIN principals p USING (principal_nid)
    -- no local user: theirs is the topological ordering of a join, and a name with @
    WHERE v.last_join_topological IS NULL AND NOT starts_with(p.name, '@')
        -- not everybody, not the shared audiences
        AND v.principal_nid > {PRINCIPAL_SHARED}
        AND p.name <> $3::text
),
joined AS MATERIALIZED (  -- once an audience
    SELECT a.room_nid, a.audience, array_agg(s.name ORDER BY s.name) AS servers
    FROM (SELECT DISTINCT room_nid, audience FROM event) AS a
    JOIN remote s USING (room_nid)
    WHERE s.joined_audiences @> a.audience
        OR (a.audience < s.first_audience
            AND joined_before(a.room_nid, s.principal_nid, a.audience))
    GROUP BY a.room_nid, a.audience
)
SELECT CASE
        WHEN (SELECT count(*) FROM event) < $2::bigint THEN bounds.upto
        ELSE (SELECT max(stream_ordering) FROM event)
    END AS upto,
    e.stream_ordering AS position, e.event_id, r.room_id, e.audience,
    -- once an audience: there may be thousands
    CASE WHEN e.is_first THEN COALESCE(j.servers, '{}') || COALESCE(CASE WHEN r.is_partial THEN (
        SELECT array_remove(p.servers, $3::text)
        FROM partial_rooms p
        WHERE p.room_nid = r.room_nid
    ) END, '{}') END AS servers,
    CASE WHEN e.membership IS NOT NULL THEN k.state_key END AS target,
    r.room_version, e.invite, held.is_held
FROM bounds
CROSS JOIN held
LEFT JOIN (
    SELECT *, row_number() OVER (PARTITION BY room_nid, audience
        ORDER BY stream_ordering) = 1 AS is_first
    FROM event
) AS e ON true
LEFT JOIN rooms r USING (room_nid)
LEFT JOIN joined j ON j.room_nid = e.room_nid AND j.audience = e.audience
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
ORDER BY e.stream_ordering
""")


class OutboxRow(NamedTuple):
    """An event, or a row of NULLs but for ``upto`` and ``is_held`` where there is none.

    ``servers`` are those of its audience. None: as in the first row of the room and audience.
    ``invite`` are the bytes of an invite.
    """

    upto: int | None
    position: int | None
    event_id: str | None
    room_id: str | None
    audience: int | None
    servers: list[str] | None
    target: str | None
    room_version: str | None
    invite: StoredBytes | None
    is_held: bool


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An event of a local user, and the other servers to send it to (none if all are local)."""

    position: int
    event_id: EventId
    room_id: RoomId
    servers: frozenset[ServerName]


class Outbox(list[Outgoing]):
    """Outgoing events in order. There are no others up to ``upto``: go on from there."""

    def __init__(self, events: Iterable[Outgoing], upto: int) -> None:
        super().__init__(events)
        self.upto: int = upto


class OutboxRead(NamedTuple):
    """An outbox. ``is_blocked``: a writer that is idle for certain holds it back.

    Then move the idle writers (`storage.streams.position_poller`), and read again.
    """

    events: Outbox
    is_blocked: bool


async def outbox(
    conn: Connection,
    after: int,
    limit: int,
    *,
    server_name: str,
    instance_name: str,
    rows_max: int,
) -> OutboxRead:
    """Return at most ``limit`` events of users of ``server_name`` after a position.

    The range has at most ``rows_max`` positions with events of all users. ``instance_name`` is that
    of the process.
    """
    if limit == 0:
        return OutboxRead(Outbox([], after), False)
    rows = await conn.fetch(
        SQL_OUTBOX, after, limit, server_name, rows_max, instance_name, row=OutboxRow
    )
    events = Outbox(_outgoing(rows, server_name), max(after, rows[0].upto or 0))
    return OutboxRead(events, rows[0].is_held and len(events) < limit)


def _outgoing(rows: Iterable[OutboxRow], own: str) -> Iterator[Outgoing]:
    joined: dict[tuple[str, int | None], frozenset[ServerName]] = {}
    for row in rows:
        if row.position is None or row.event_id is None or row.room_id is None:
            continue
        if row.servers is not None:
            joined[row.room_id, row.audience] = frozenset(map(ServerName, row.servers))
        servers = joined[row.room_id, row.audience]
        target = server_name_of(row.target or "")
        if target not in {*servers, own, ""} and not _has_signed(target, row):
            servers |= {target}
        yield Outgoing(row.position, EventId(row.event_id), RoomId(row.room_id), servers)


def _has_signed(server: ServerName, row: OutboxRow) -> bool:
    """Return whether a server has signed an invite. False if its bytes are damaged."""
    event_id, room_id = EventId(row.event_id or ""), row.room_id or ""
    if row.invite is None:
        return False
    try:
        raw = decode_recent(row.invite, event_id, room_id)
        invite = event_json(event_id, raw, row.room_version or "", redacted=False)
    except StorageCorrupt:  # raised again where the event is read to be sent
        return False
    signatures = invite.get("signatures")
    return isinstance(signatures, dict) and bool(signatures.get(server))
