"""Pages and page ranges: what tokens mean as ends of a range, and which token a page ends with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import InputError
from storage.ids import EventId, RoomId
from storage.queries.events import StoredEvent, served_at_once
from storage.queries.pagination.reordering import Reorderings, next_token, walking
from storage.queries.sync.changed_rooms import events_of, reached
from storage.streams import PaginationToken, VectorPosition
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import is_sync_token, read_positions

Direction = Literal["b", "f"]

BEGINNING: Final = PaginationToken(0, 0)
END: Final = PaginationToken(LARGEST_POSITION, LARGEST_POSITION)


@dataclass(frozen=True, slots=True)
class Gap:
    """Missing history within a page. Request the events of `backfill_from` over federation.

    These are parents of stored events, and are not stored themselves. The gap lies between the
    events ``after`` (the older one) and ``before`` (the newer one) of the page. None: it lies at
    that end of the page. A page backwards whose gap has ``after`` None stops there, and `Page.end`
    goes on with the backfilled events.
    """

    backfill_from: tuple[EventId, ...]
    after: EventId | None
    before: EventId | None


@dataclass(frozen=True, slots=True)
class Page:
    """A range of history in the direction of the request.

    ``end`` is where the next page begins; None: there are no more events. Forwards, each page of
    `messages` with events has an ``end``, unless the user may see no later ones or ``to`` ended it.

    `gaps` name missing events. Append those with origin "backfill" and request the page again, or
    go on. Backfill may reorder events: a walk still returns each of them once
    (`storage.queries.pagination.reordering`). A page backwards that reaches the oldest stored event
    above a gap is short and has an ``end``. Backfill first: until then the next pages are empty, at
    most one for each event at such a gap, and the last one has no ``end``.
    """

    chunk: list[StoredEvent]
    start: str
    end: str | None
    gaps: list[Gap]


class PageRange(NamedTuple):
    """A range of a room's topological order, with the direction and the limit of a page."""

    start: PaginationToken
    stop: PaginationToken
    direction: Direction
    limit: int
    synced: tuple[VectorPosition | None, VectorPosition | None] = (None, None)
    """Of sync tokens at start and stop: the position of each writer."""

    @property
    def upper(self) -> PaginationToken:
        """Return the end with the newer events."""
        return self.start if self.direction == "b" else self.stop

    @property
    def lower(self) -> PaginationToken:
        """Return the end with the older events."""
        return self.stop if self.direction == "b" else self.start


def between(
    from_: str | None, to: str | None, direction: Direction, limit: int, deployment: str
) -> PageRange:
    """Return the range between two tokens, of pages or of sync. `InvalidToken`, `InputError`."""
    if direction not in ("b", "f"):
        raise InputError(f"direction {direction!r}: b or f")
    default_tokens = (END, BEGINNING) if direction == "b" else (BEGINNING, END)
    start = default_tokens[0] if from_ is None else _parsed(from_, deployment)
    stop = default_tokens[1] if to is None else _parsed(to, deployment)
    synced = _synced(from_, deployment), _synced(to, deployment)
    return PageRange(walking(start, direction), stop, direction, limit, synced)


def _synced(token: str | None, deployment: str) -> VectorPosition | None:
    if token is None or not is_sync_token(token):
        return None
    return events_of(read_positions(token, deployment))


def _parsed(token: str, deployment: str) -> PaginationToken:
    """Return the position of a token. A sync token covers all that had arrived by then."""
    if not is_sync_token(token):
        return PaginationToken.parse(token, deployment)
    live = reached(read_positions(token, deployment))
    return PaginationToken(LARGEST_POSITION, LARGEST_POSITION, live)


async def page_of(
    events: Sequence[StoredEvent],
    page_range: PageRange,
    deployment: str,
    reorderings: Reorderings,
) -> Page:
    """Return the page for these events, without gaps. One beyond the limit: there are more.

    It ends before the limit where the events have too many values (`served_at_once`).
    """
    start = page_range.start
    limit = await served_at_once(events[: page_range.limit])
    chunk, more = list(events[:limit]), len(events) > limit
    if chunk and start in (BEGINNING, END):
        start = edge(
            chunk[0], page_range.direction, first=True, reorder_count=reorderings.reorder_count
        )
    end = end_of_page(chunk, page_range, reorderings).print(deployment) if more else None
    return Page(chunk, start.print(deployment), end, [])


def edge(
    event: StoredEvent, direction: Direction, *, first: bool, reorder_count: int = 0
) -> PaginationToken:
    """Return the position just before the first event of a page, or just after its last one.

    Before and after are in this direction. ``reorder_count``: how many moves the room had then.
    """
    topological, stream = event.topological_ordering or 0, event.stream_ordering or 0
    return PaginationToken(
        topological, stream if (direction == "b") == first else stream - 1, moves=reorder_count
    )


def end_of_page(
    chunk: Sequence[StoredEvent], page_range: PageRange, reorderings: Reorderings
) -> PaginationToken:
    """Return where a full page ends. With a limit of 0 that is where it begins.

    The token keeps the timeline position that the walk started from.
    """
    if not chunk:
        return page_range.start
    end = edge(chunk[-1], page_range.direction, first=False)
    return next_token(end, page_range.start, page_range.direction, reorderings)


# --------------------------------------------------------------------------------------------------
# Sync tokens as ends of a page range, of a time when some writers were behind others.
#
# The furthest position of such a token covers too much. Within a room stream orderings are in the
# order of commits. So the token covers the events before the first one that it does not cover.

SQL_COVERED: Final[LiteralString] = compose(
    """
WITH
room AS MATERIALIZED (
    SELECT room_nid FROM rooms WHERE room_id = :room_id
    UNION ALL
    SELECT room_nid FROM events WHERE event_id = :event_id
),
writer AS MATERIALIZED (  -- of each token, the writers that are further than the others
    SELECT *
    FROM unnest(:writer_tokens, :writers, :writer_positions) AS p (token, instance_name, stream_id)
)
SELECT t.token, COALESCE(late.before, late.last, t.least) AS live
FROM unnest(:tokens, :least, :furthest) AS t (token, least, furthest)
CROSS JOIN room r
-- the last event that it covers, not its furthest position: events that commit later come after it
CROSS JOIN LATERAL (
    SELECT min(e.stream_ordering)
        FILTER (WHERE e.stream_ordering > COALESCE(p.stream_id, t.least)) - 1 AS before,
            max(e.stream_ordering) AS last
    FROM events e
    JOIN writers w USING (writer_nid)
    LEFT JOIN writer p ON p.token = t.token AND p.instance_name = w.instance_name
    -- so that only an index by room fits (sync/rooms.py)
    WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, t.least)
        AND (e.room_nid, e.stream_ordering) <= (r.room_nid, t.furthest)
        AND e.room_nid BETWEEN r.room_nid AND r.room_nid
        AND NOT e.outlier AND NOT e.backfilled
) AS late
""",
    room_id="text",
    event_id="text",
    tokens="int[]",
    least="bigint[]",
    furthest="bigint[]",
    writer_tokens="int[]",
    writers="text[]",
    writer_positions="bigint[]",
).sql


class TokenPositionsRow(NamedTuple):
    """The last stream ordering of the room that a token covers. ``token``: 0 start, 1 stop."""

    token: int
    live: int


async def exact(
    conn: Connection,
    page_range: PageRange,
    *,
    room_id: RoomId | None = None,
    event_id: EventId | None = None,
) -> PageRange:
    """Return the range with its sync tokens as they are in this room, or in the event's room.

    Send one statement, or none where no writer was behind.
    """
    lagging = [
        (token, position)
        for token, position in enumerate(page_range.synced)
        if position is not None and position.items
    ]
    if not lagging:
        return page_range
    bounds = [(token, position.min, position.furthest()) for token, position in lagging]
    writers = [(token, writer, at) for token, position in lagging for writer, at in position.items]
    columns = *map(list, zip(*bounds, strict=True)), *map(list, zip(*writers, strict=True))
    rows = await conn.fetch(SQL_COVERED, room_id, event_id, *columns, row=TokenPositionsRow)
    live = {row.token: row.live for row in rows}
    start, stop = (
        replace(end, live=live.get(token, end.live))
        for token, end in enumerate((page_range.start, page_range.stop))
    )
    return page_range._replace(start=start, stop=stop)
