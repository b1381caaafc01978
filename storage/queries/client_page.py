"""The aggregations of a page, and the facts of its usual events, by one statement.

Most readers were joined at most events. Then the audience of a message says all: it is visible,
whole, and the membership is "join". `SQL_CLIENT_PAGE` finds these events while it reads the page
for the aggregations. The reason of a redaction is in it, too. Everything else is left to
`SQL_CLIENT_FACTS`: state events, events without the reader, and the transactions of a device.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.columns import OWN_ENTRIES, USER_SEES, WHOLE
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIP_NAMES, MEMBERSHIPS
from storage.database.placeholders import compose, fill, text_array
from storage.event import redact
from storage.event.versions import version_of
from storage.ids import EventId, UserId
from storage.persist.model.results import transaction_id_of
from storage.queries.events import Aggregations, StoredEvent, StoredEventRow, size_of, stored_of
from storage.queries.filters import PART_READER
from storage.queries.relations import PART_BUNDLES, REFERENCES_MAX, AggregationRow, combined
from storage.queries.state_at import lost
from storage.turns import in_turns

# --------------------------------------------------------------------------------------------------
# The parts of `unsigned` that depend on the reader and on other events.
#
# One statement serves events of any number and of any rooms. The reader's membership at an event is
# usually known from its audience alone (`was_there`): then the reader was joined. Otherwise, and
# for the state event that an event replaced, one key is looked up in the state before the event.
# The rows of the state group's path are searched from the latest on, and the search ends at the
# first that has the key.

SQL_CLIENT_FACTS: Final[LiteralString] = compose(
    """
WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :user_id),
        0) AS principal_nid,
        COALESCE((SELECT state_key_nid FROM state_keys WHERE type_nid = {TYPE_MEMBER}
            AND state_key = :user_id),
            0) AS own_key_nid
),
named AS MATERIALIZED (
    SELECT event_nid, room_nid, redacted_by
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest(:event_ids) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
),
chosen AS (  -- with the redactions that took effect on them
    SELECT event_nid, room_nid, false AS is_redaction
    FROM named
    UNION ALL
    SELECT DISTINCT redacted_by, room_nid, true
    FROM named
    WHERE redacted_by IS NOT NULL
),
room AS MATERIALIZED (
    SELECT one.room_nid, reader.principal_nid, reader.own_key_nid, v.*
    FROM (SELECT DISTINCT room_nid FROM named) AS one
    CROSS JOIN reader
    CROSS JOIN LATERAL visibility_of(one.room_nid, reader.principal_nid) AS v
),
about AS MATERIALIZED (
    SELECT e.event_nid, e.event_id, e.room_nid, e.redacted_by, e.sender_nid, e.state_key_nid,
        e.state_group_before, e.membership, e.outlier, c.is_redaction, room.own_key_nid,
        room.principal_nid,
        COALESCE(e.state_key_nid = room.own_key_nid, false) AS is_own_membership,
        form.is_visible, form.was_there,
        form.was_there OR NOT EXISTS (SELECT FROM erased_users u
            WHERE u.principal_nid = e.sender_nid) AS is_whole,
        form.is_visible OR COALESCE(e.state_key_nid = room.own_key_nid, false)
            AND e.rejected IS NULL AND NOT e.soft_failed AS is_shown
    FROM chosen c
    JOIN room USING (room_nid)
    JOIN events e USING (event_nid)
    CROSS JOIN LATERAL (
        SELECT COALESCE(user_sees(e, :user_sees.of(room)),
                false) AS is_visible,
            NOT e.outlier AND (was_there(e, room.joined_since, room.joined_audiences)
                OR was_there_before(e, room.reader_nid, room.unread)) AS was_there
    ) AS form
),
sought AS MATERIALIZED (  -- keys of the states before the events
    SELECT state_group_before AS state_group, own_key_nid AS state_key_nid, true AS is_member
    FROM about
    WHERE NOT was_there AND NOT is_own_membership AND own_key_nid > 0 AND NOT outlier AND is_shown
    UNION
    SELECT state_group_before, state_key_nid, membership IS NOT NULL
    FROM about
    WHERE state_key_nid IS NOT NULL AND NOT outlier AND NOT is_redaction AND is_shown
),
entry AS MATERIALIZED (  -- the last row of the path that has the key
    SELECT s.state_group, s.state_key_nid, last.event_nid, last.is_lost
    FROM sought s
    CROSS JOIN LATERAL (
        SELECT part.event_nid, part.state_group IS NULL AS is_lost
        FROM (
            SELECT step.part AS state_group, step.place
            FROM state_path(s.state_group) AS step
            ORDER BY step.place DESC
        ) AS path
        LEFT JOIN LATERAL (
            SELECT p.state_group,
                own_entry(s.state_key_nid, s.is_member, :own_entries.of(p)) AS event_nid
            FROM state_groups p
            WHERE p.state_group = path.state_group
        ) AS part ON true
        WHERE part.state_group IS NULL OR part.event_nid IS NOT NULL
        ORDER BY path.place DESC
        LIMIT 1
    ) AS last
    WHERE last.is_lost OR last.event_nid <> 0  -- 0 removes the key
)
SELECT a.event_id AS about, a.is_redaction, a.is_visible, a.is_shown, a.is_whole,
    (SELECT b.event_id FROM events b WHERE b.event_nid = a.redacted_by) AS redaction_id,
    CASE
        WHEN a.is_own_membership THEN a.membership
        WHEN a.was_there THEN {JOIN}
        WHEN NOT a.outlier THEN COALESCE((SELECT m.membership FROM events m
            WHERE m.event_nid = own.event_nid), 0)
    END AS membership,
    (
        SELECT t.transaction_id
        FROM local_transactions t
        WHERE a.sender_nid = a.principal_nid AND t.event_nid = a.event_nid
            AND t.sender_nid = a.principal_nid AND t.device_id = :device_id
    ) AS transaction_id,
    CASE
        WHEN own.is_lost OR replaced.is_lost OR replaced.event_nid <> 0 AND e.event_nid IS NULL
            THEN a.state_group_before
    END AS lost_group,
    -- a reader of the state before the event, or of the own membership, may see what it replaced
    a.was_there OR a.is_own_membership
        OR COALESCE(user_sees(e, :user_sees.of(room)), false) AS may_see_other,
    -- whoever was joined at the event had that state, whole
    a.was_there OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        OR NOT e.outlier AND (was_there(e, room.joined_since, room.joined_audiences)
            OR was_there_before(e, room.reader_nid, room.unread)) AS is_other_whole,
    other.*
FROM about a
JOIN room USING (room_nid)
LEFT JOIN entry own ON own.state_group = a.state_group_before
    AND own.state_key_nid = a.own_key_nid AND NOT a.was_there AND NOT a.is_own_membership
LEFT JOIN entry replaced ON replaced.state_group = a.state_group_before
    AND replaced.state_key_nid = a.state_key_nid AND NOT a.is_redaction
LEFT JOIN events e ON e.event_nid = replaced.event_nid
LEFT JOIN LATERAL (
    SELECT * FROM stored_events s
    WHERE s.event_nid = CASE WHEN a.is_redaction THEN a.event_nid ELSE replaced.event_nid END
) AS other ON true
""",
    OWN_ENTRIES,
    USER_SEES,
    user_id="text",
    event_ids="text[]",
    device_id="text",
).sql


class ClientFactsRow(NamedTuple):
    """The event ``about``, or the redaction of one of the events.

    ``is_shown``: it is visible, or an own membership of the reader.
    ``is_whole`` False: its sender was erased, and the reader was not there. ``membership``: the
    reader's at the event, 0 for none, None for an outlier. ``is_other_whole`` is that of the state
    event that the event replaced. ``other`` is the redaction itself, or the state event that the
    event replaced.
    """

    about: str
    is_redaction: bool
    is_visible: bool
    is_shown: bool
    is_whole: bool
    redaction_id: str | None
    membership: int | None
    transaction_id: str | None
    lost_group: int | None
    may_see_other: bool
    is_other_whole: bool
    other: StoredEventRow | None


LEAVE: Final = MEMBERSHIP_NAMES[MEMBERSHIPS["leave"]]


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """The parts of an event's ``unsigned`` for one reader, and whether the reader gets the event.

    ``membership`` None: it is not known. ``redaction`` has facts of its own. ``replaced``: the
    state event that it replaced, if the reader may see that.
    """

    is_shown: bool
    is_whole: bool
    membership: str | None
    transaction_id: str | None
    redaction: "tuple[StoredEvent, ClientFacts] | None" = None
    replaced: StoredEvent | None = None


async def client_facts(
    conn: Connection, user_id: UserId, event_ids: Collection[EventId], device_id: str | None
) -> dict[EventId, ClientFacts]:
    """Return the facts of the stored ones among these events, by id.

    `StorageCorrupt` for a state that cannot be read.
    """
    rows = await conn.fetch(
        SQL_CLIENT_FACTS, user_id, list(event_ids), device_id, row=ClientFactsRow
    )
    for row in rows:
        if row.lost_group is not None:
            raise lost(row.lost_group, row.about)
    redactions = {
        row.about: (
            stored_of(row.other, withheld=not (row.is_visible and row.is_whole)),
            _of(row),
        )
        for row in rows
        if row.is_redaction and row.other is not None
    }
    return {
        EventId(row.about): _of(
            row,
            redactions.get(row.redaction_id or ""),
            stored_of(row.other, withheld=not row.is_other_whole)
            if row.other is not None and row.may_see_other
            else None,
        )
        for row in rows
        if not row.is_redaction
    }


def _of(
    row: ClientFactsRow,
    redaction: tuple[StoredEvent, ClientFacts] | None = None,
    replaced: StoredEvent | None = None,
) -> ClientFacts:
    membership = None if row.membership is None else MEMBERSHIP_NAMES.get(row.membership, LEAVE)
    sent = None if row.transaction_id is None else transaction_id_of(row.transaction_id)
    return ClientFacts(row.is_shown, row.is_whole, membership, sent, redaction, replaced)


TEMPLATE_CLIENT_PAGE: Final[LiteralString] = """
WITH
{reader},
-- the rooms come first: so the visibility is checked while the events are read
room AS MATERIALIZED (
    SELECT r.room_nid, reader.principal_nid, reader.ignored, v.*
    FROM rooms r
    CROSS JOIN reader
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = ANY(:room_ids)
),
named AS MATERIALIZED (
    SELECT e.event_id, e.room_nid, e.sender_nid, e.type_nid, e.rel_type_nid, e.redacted_by,
        e.state_key_nid IS NULL AND e.redacted_by IS NULL
            AND :whole.of(room) AS whole,
        -- the reader was joined, and no transaction id can be missing
        e.state_key_nid IS NULL AND was_there(e, room.joined_since, room.joined_audiences)
            AND NOT (:has_device AND e.sender_nid = room.principal_nid) AS is_usual
    FROM room
    CROSS JOIN reader
    JOIN events e USING (room_nid)
    WHERE e.event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest(:event_ids) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
        AND user_sees(e, :user_sees.of(room))
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
SELECT COALESCE(user_sees(e, :user_sees.of(room))
        AND was_there(e, room.joined_since, room.joined_audiences)
        AND e.state_key_nid IS NULL
        AND NOT (:has_device AND e.sender_nid = room.principal_nid), false) AS is_usual,
    t.about, t.kind, t.events, t.participated, t.ids, s.*
FROM part t
CROSS JOIN reader
LEFT JOIN stored_events s USING (event_nid)
LEFT JOIN events e USING (event_nid)
LEFT JOIN room ON room.room_nid = e.room_nid
"""

SQL_CLIENT_PAGE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_CLIENT_PAGE,
        reader=PART_READER,
        bundles=PART_BUNDLES,
    ),
    USER_SEES,
    WHOLE,
    user_id="text",
    event_ids="text::text[]",
    ignored="text::text[]",
    references_max="bigint",
    room_ids="text::text[]",
    has_device="boolean",
).sql


class ClientPageRow(NamedTuple):
    """One part of what a page needs: `kind` says which columns it has.

    "replacement", "thread" and "references": as in `AggregationRow`. "redaction": the redaction of
    the event ``about``, which is usual otherwise. "usual": the ids of such events.

    ``is_usual``: the event of the row is usual itself.
    """

    is_usual: bool
    part: AggregationRow


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
    related = (row.part for row in rows if row.part.kind not in ("redaction", "usual"))
    return ClientPage(combined(related), _facts(rows))


def _facts(rows: Iterable[ClientPageRow]) -> dict[EventId, ClientFacts]:
    facts: dict[EventId, ClientFacts] = {}
    for is_usual, part in rows:
        if part.kind == "usual":
            facts |= dict.fromkeys(map(EventId, part.ids or ()), USUAL)
        elif is_usual and part.event is not None:
            if part.kind == "redaction":
                redaction = (stored_of(part.event), USUAL)
                facts[EventId(part.about)] = ClientFacts(True, True, "join", None, redaction)
            else:
                facts[part.event.event_id] = USUAL
    return facts


# --------------------------------------------------------------------------------------------------
# Events in the form that the client-server API serves.
#
# Client-server API, "Room event format": `ClientEvent`. The keys and ``unsigned`` are built here.
# Nothing of the sender's own ``unsigned`` is in them. A page takes one statement if the reader was
# joined at all its events. `SQL_CLIENT_FACTS` has the facts of the other events, of state events,
# and of events that the reader's device may have sent.

REDACTION: Final = "m.room.redaction"
Facts = Mapping[EventId, ClientFacts]
Bundles = Mapping[EventId, Aggregations]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """The reader, and the form.

    ``with_room_id`` False leaves the room id out, as /sync does. ``now_ms`` is the time from which
    ``age`` counts.
    """

    user_id: UserId
    device_id: str | None = None
    ignored: list[UserId] | None = None
    with_room_id: bool = True
    now_ms: int = 0


async def client_events(
    conn: Connection, request: ClientRequest, events: Sequence[StoredEvent]
) -> list[dict[str, Any]]:
    """Return those of the events that the reader may get, in the same order."""
    # parsed here, in turns, because all of them are shown
    messages = [event async for event in in_turns(events, size_of) if "state_key" not in event.json]
    bundles: Bundles = {}
    facts: dict[EventId, ClientFacts] = {}
    if messages:
        page = await client_page(
            conn,
            request.user_id,
            messages,
            ignored=request.ignored,
            has_device=request.device_id is not None,
        )
        bundles, facts = page.bundles, page.facts
    listed = [event.event_id for event in (*events, *_bundled(bundles.values()))]
    unknown = {event_id for event_id in listed if event_id not in facts}
    if unknown:
        facts |= await client_facts(conn, request.user_id, unknown, request.device_id)
    shown = [event for event in events if _is_shown(event, facts)]
    return [
        _with_relations(request, event, facts, bundles.get(event.event_id))
        async for event in in_turns(shown)
    ]


async def client_state(
    conn: Connection, request: ClientRequest, events: Sequence[StoredEvent]
) -> list[dict[str, Any]]:
    """Return the events of a state that the reader may have, in the same order.

    It reads nothing but the redactions, and the transactions of the reader's own events.
    """
    event_ids = [
        event.event_id
        async for event in in_turns(events, size_of)
        if event.redacted_by or (request.device_id and event.sender == request.user_id)
    ]
    facts: Facts = {}
    if event_ids:
        facts = await client_facts(conn, request.user_id, event_ids, request.device_id)
    nothing = ClientFacts(is_shown=True, is_whole=True, membership=None, transaction_id=None)
    formatted: list[dict[str, Any]] = []
    async for event in in_turns(events, size_of):
        event_facts = facts.get(event.event_id, nothing)
        own_facts = ClientFacts(True, True, None, event_facts.transaction_id, event_facts.redaction)
        formatted.append(_formatted(request, event, own_facts))
    return formatted


def _bundled(bundles: Iterable[Aggregations]) -> Iterator[StoredEvent]:
    for bundle in bundles:
        if bundle.replacement is not None:
            yield bundle.replacement
        if bundle.thread is not None:
            latest = bundle.thread.latest_event
            yield latest
            if latest.relations is not None:
                yield from _bundled([latest.relations])


def _is_shown(event: StoredEvent, facts: Facts) -> bool:
    event_facts = facts.get(event.event_id)
    return event_facts is not None and event_facts.is_shown


def _with_relations(
    request: ClientRequest, event: StoredEvent, facts: Facts, bundle: Aggregations | None
) -> dict[str, Any]:
    """Return an event with its aggregations, whose events are in the same form."""
    shown = _formatted(request, event, facts[event.event_id])
    if bundle is not None:
        relations = bundle.bundle(
            lambda related: _with_relations(request, related, facts, related.relations)
        )
        if relations:
            shown["unsigned"]["m.relations"] = relations
    return shown


def _formatted(request: ClientRequest, event: StoredEvent, facts: ClientFacts) -> dict[str, Any]:
    """Return an event without aggregations."""
    json = _served(event, facts)
    shown = {
        "event_id": event.event_id,
        "type": json["type"],
        "sender": json["sender"],
        "origin_server_ts": json["origin_server_ts"],
        "content": json["content"],
        "unsigned": _unsigned(request, event.event_id, json, facts),
    }
    if request.with_room_id:
        shown["room_id"] = event.room_id
    if "state_key" in json:
        shown["state_key"] = json["state_key"]
    if json["type"] == REDACTION:
        _add_target(shown, json, event.room_version)
    return shown


def _served(event: StoredEvent, facts: ClientFacts) -> dict[str, Any]:
    """Return the whole event, or the redacted form."""
    is_redacted = facts.redaction is not None or event.redacted_by is not None
    hides = is_redacted or not facts.is_whole
    return redact(event.json, event.room_version) if hides and not event.pruned else event.json


def _unsigned(
    request: ClientRequest, event_id: EventId, json: Mapping[str, Any], facts: ClientFacts
) -> dict[str, Any]:
    unsigned: dict[str, Any] = {"age": request.now_ms - json["origin_server_ts"]}
    if facts.membership is not None:
        unsigned["membership"] = facts.membership
    if facts.transaction_id is not None:
        unsigned["transaction_id"] = facts.transaction_id
    if facts.replaced is not None:
        unsigned["replaces_state"] = facts.replaced.event_id
        unsigned["prev_content"] = facts.replaced.content
        unsigned["prev_sender"] = facts.replaced.sender
    if facts.redaction is not None:
        unsigned["redacted_because"] = because = _formatted(request, *facts.redaction)
        if facts.redaction[0].withheld:  # older room versions take the target away, too
            because |= {"redacts": event_id, "content": {"redacts": event_id}}
    return unsigned


def _add_target(shown: dict[str, Any], json: Mapping[str, Any], room_version: str) -> None:
    """Write the target of a redaction at both places, where clients of any age look for it."""
    in_content = version_of(room_version).redacts_in_content
    target = (json["content"] if in_content else json).get("redacts")
    if isinstance(target, str):
        shown["redacts"] = target
        shown["content"] = {**json["content"], "redacts": target}
