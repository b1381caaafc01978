"""The aggregations of a page, and the facts of its usual events, by one statement.

Most readers were joined at most events. Then the audience of a message says all: it is visible,
whole, and the membership is "join". `SQL_CLIENT_PAGE` finds these events while it reads the page
for the aggregations. The reason of a redaction is in it, too. Everything else is left to
client_facts.py: state events, events without the reader, and the transactions of a device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.array_text import text_array
from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.ids import EventId, UserId
from storage.queries.aggregations import (
    PART_BUNDLES,
    REFERENCES_MAX,
    AggregationRow,
    combined,
)
from storage.queries.client_facts import ClientFacts
from storage.queries.events import Aggregations, StoredEvent, stored_of
from storage.queries.filters import TEMPLATE_IGNORED

TEMPLATE_CLIENT_PAGE: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid,
        {ignored} AS ignored,
        $6::boolean AS has_device
),
-- the rooms come first: so the visibility is checked while the events are read
room AS MATERIALIZED (
    SELECT r.room_nid, reader.principal_nid, reader.ignored, v.*
    FROM rooms r
    CROSS JOIN reader
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = ANY($5::text::text[])
),
named AS MATERIALIZED (
    SELECT e.event_id, e.room_nid, e.sender_nid, e.type_nid, e.rel_type_nid, e.redacted_by,
        e.state_key_nid IS NULL AND e.redacted_by IS NULL
            AND (was_there(e, room.joined_since, room.joined_audiences)
                OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                OR was_there_before(e, room.reader_nid, room.unread)) AS whole,
        -- the reader was joined, and no transaction id can be missing
        e.state_key_nid IS NULL AND was_there(e, room.joined_since, room.joined_audiences)
            AND NOT (reader.has_device AND e.sender_nid = room.principal_nid) AS is_usual
    FROM room
    CROSS JOIN reader
    JOIN events e USING (room_nid)
    WHERE e.event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($2::text::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
        AND user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences,
            room.world_audiences, room.shared_before, room.reader_nid, room.unread)
),
-- events that others relate to: a probe for each, never a join with all relations
parent AS MATERIALIZED (
    SELECT n.event_id, n.key, n.sender_nid, n.type_nid, n.whole,
        CASE WHEN n.whole THEN n.rel_type_nid END AS rel_type_nid, room.*
    FROM (SELECT *, relation_key(event_id) AS key FROM named OFFSET 0) AS n
    JOIN room USING (room_nid)
    WHERE (SELECT true FROM events c WHERE c.relates_to = n.key AND NOT c.outlier
        ORDER BY c.rel_type_nid LIMIT 1)
),
{bundles},
part AS (
    SELECT about, kind, event_nid, events, participated, ids
    FROM found
    UNION ALL
    SELECT event_id, 'redaction', redacted_by, NULL, NULL, NULL
    FROM named
    WHERE is_usual AND redacted_by IS NOT NULL
    UNION ALL
    SELECT '', 'usual', NULL, NULL, NULL, array_agg(event_id)
    FROM named
    WHERE is_usual AND redacted_by IS NULL
)
SELECT COALESCE(user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences,
            room.world_audiences, room.shared_before, room.reader_nid, room.unread)
        AND was_there(e, room.joined_since, room.joined_audiences)
        AND e.state_key_nid IS NULL
        AND NOT (reader.has_device AND e.sender_nid = room.principal_nid), false) AS is_usual,
    t.about, t.kind, t.events, t.participated, t.ids, s.*
FROM part t
CROSS JOIN reader
LEFT JOIN stored_events s USING (event_nid)
LEFT JOIN events e USING (event_nid)
LEFT JOIN room ON room.room_nid = e.room_nid
"""

SQL_CLIENT_PAGE: Final[LiteralString] = fill(
    TEMPLATE_CLIENT_PAGE,
    bundles=PART_BUNDLES,
    ignored=fill(TEMPLATE_IGNORED, reader="$1", named="$3::text"),
)


class ClientPageRow(NamedTuple):
    """One part of what a page needs: `kind` says which columns it has.

    "replacement", "thread" and "references": as in `AggregationRow`. "redaction": the redaction of
    the event ``about``, which is usual otherwise. "usual": the ids of such events.

    ``is_usual``: the event of the row is usual itself. The other columns are those of
    `AggregationRow`.
    """

    is_usual: bool
    about: str
    kind: str
    events: int | None
    participated: bool | None
    ids: list[str] | None
    event_nid: int | None
    event_id: str | None
    room_id: str | None
    room_version: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool | None
    outlier: bool | None
    redacted_form: bool | None
    encoding: int | None
    json: StoredBytes | None


EVENT: Final = ClientPageRow._fields.index("event_nid")
"""The first column of the event."""
USUAL: Final = ClientFacts(is_shown=True, is_whole=True, membership="join", transaction_id=None)
"""The facts of a visible message at which the reader was joined."""


@dataclass(frozen=True, slots=True)
class ClientPage:
    """Aggregations by event, and the facts of the usual ones of the events and of their parts."""

    bundles: dict[EventId, Aggregations]
    facts: dict[EventId, ClientFacts]


async def client_page(
    conn: Connection,
    user_id: UserId,
    messages: Sequence[StoredEvent],
    *,
    ignored: list[UserId] | None,
    has_device: bool,
) -> ClientPage:
    """Return what is known of events that are no state.

    ``has_device``: the transactions of the reader's own events matter, so these are not usual.
    """
    rows = await conn.fetch(
        SQL_CLIENT_PAGE,
        user_id,
        text_array([event.event_id for event in messages]),
        None if ignored is None else text_array(ignored),
        REFERENCES_MAX,
        text_array({event.room_id for event in messages}),
        has_device,
        row=ClientPageRow,
    )
    related = [
        AggregationRow._make(row[1:])  # NamedTuple's public method
        for row in rows
        if row.kind not in ("redaction", "usual")
    ]
    return ClientPage(combined(related), _facts(rows))


def _facts(rows: Iterable[ClientPageRow]) -> dict[EventId, ClientFacts]:
    found: dict[EventId, ClientFacts] = {}
    for row in rows:
        if row.kind == "usual":
            found |= dict.fromkeys(map(EventId, row.ids or ()), USUAL)
        elif row.is_usual and row.event_id is not None:
            if row.kind == "redaction":
                redaction = (stored_of(row[EVENT:]), USUAL)
                found[EventId(row.about)] = ClientFacts(True, True, "join", None, redaction)
            else:
                found[EventId(row.event_id)] = USUAL
    return found
