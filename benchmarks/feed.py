"""An alternative to find a user's new rooms: a list per user, written together with events.

benchmarks/sync_feeds.py measures it; no other module uses it. A row of `sync_feed` says that an
event happened in a room of the user at a position. It is written in the transaction of the event (a
trigger on the events of a write) for each local member of the room, and for the user whose
membership changes. A list has a maximum number of rows. The position of the last dropped row is its
floor, and a client from below it must sync again (`ResyncNeeded`).

Rooms with more than ``members_max`` local members are left out of the lists. Readers check all of
these rooms that they are in.
"""

from typing import Final, NamedTuple

from storage.database.connection import Connection
from storage.errors import ResyncNeeded
from storage.ids import UserId
from storage.queries.sync.changed_rooms import STREAMS, ChangeSnapshot, SyncMemory, vector
from storage.store.facade import Store
from storage.streams import SyncToken, VectorPosition
from storage.streams.caches import LastChange, RoomsOf

SQL_CREATE: Final = """
CREATE TABLE sync_feed (
    stream_ordering bigint NOT NULL,
    principal_nid int NOT NULL,
    room_nid int NOT NULL,
    CONSTRAINT sync_feed_pkey PRIMARY KEY (principal_nid, stream_ordering) INCLUDE (room_nid)
);
CREATE TABLE sync_feed_floors (principal_nid int PRIMARY KEY, floor bigint NOT NULL);
CREATE TABLE sync_feed_large (room_nid int PRIMARY KEY);
CREATE INDEX memberships_room_idx ON memberships (room_nid) INCLUDE (principal_nid)
    WHERE membership = 5;
CREATE FUNCTION feed_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sync_feed (principal_nid, stream_ordering, room_nid)
    SELECT m.principal_nid, n.stream_ordering, n.room_nid
    FROM (
        SELECT room_nid, max(stream_ordering) AS stream_ordering
        FROM new_events
        WHERE NOT outlier AND NOT backfilled
        GROUP BY room_nid
    ) AS n
    JOIN memberships m USING (room_nid)
    WHERE m.membership = 5
        AND NOT EXISTS (SELECT FROM sync_feed_large l WHERE l.room_nid = n.room_nid)
    UNION
    SELECT m.principal_nid, n.stream_ordering, n.room_nid
    FROM new_events n
    JOIN state_keys k USING (state_key_nid)
    JOIN principals p ON p.name = k.state_key
    JOIN memberships m ON m.principal_nid = p.principal_nid AND m.room_nid = n.room_nid
    WHERE n.membership IS NOT NULL AND m.membership <> 5
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;
CREATE TRIGGER feed_events AFTER INSERT
    ON events REFERENCING NEW TABLE AS new_events FOR EACH STATEMENT EXECUTE FUNCTION feed_events()
"""

SQL_DROP: Final = """
DROP TRIGGER IF EXISTS feed_events ON events;
DROP FUNCTION IF EXISTS feed_events();
DROP TABLE IF EXISTS sync_feed, sync_feed_floors, sync_feed_large;
DROP INDEX IF EXISTS memberships_room_idx
"""

SQL_LARGE: Final = """
INSERT INTO sync_feed_large
SELECT room_nid FROM memberships WHERE membership = 5 GROUP BY room_nid HAVING count(*) > $1::bigint
"""

SQL_TRIM: Final = """
WITH beyond AS (
    SELECT m.principal_nid, (
        SELECT f.stream_ordering FROM sync_feed f WHERE f.principal_nid = m.principal_nid
            ORDER BY f.stream_ordering DESC OFFSET $2::int LIMIT 1
    ) AS stream_ordering
    FROM memberships m
    JOIN rooms r USING (room_nid)
    WHERE r.room_id = $1::text AND m.membership = 5
),
gone AS (
    DELETE FROM sync_feed f
    USING beyond b
    WHERE f.principal_nid = b.principal_nid AND f.stream_ordering <= b.stream_ordering
    RETURNING 1
),
floor AS (
    INSERT INTO sync_feed_floors
    SELECT principal_nid, stream_ordering FROM beyond WHERE stream_ordering IS NOT NULL
    ON CONFLICT (principal_nid) DO UPDATE SET floor = EXCLUDED.floor
)
SELECT count(*) FROM gone
"""

SQL_FEED: Final = """
SELECT stream_name AS what, instance_name, stream_id AS position, NULL::int[] AS room_nids
FROM stream_positions
WHERE stream_name IN ('events', 'account_data', 'receipts', 'to_device')
UNION ALL
SELECT 'feed', NULL, (SELECT floor FROM sync_feed_floors WHERE principal_nid = p.principal_nid),
    ARRAY(
    SELECT room_nid FROM sync_feed f
        WHERE f.principal_nid = p.principal_nid AND f.stream_ordering > $2::bigint
    UNION
    SELECT l.room_nid
    FROM sync_feed_large l
    CROSS JOIN LATERAL (SELECT FROM memberships m
        WHERE m.room_nid = l.room_nid AND m.principal_nid = p.principal_nid OFFSET 0) AS m
    CROSS JOIN LATERAL (SELECT FROM rooms r
        WHERE r.room_nid = l.room_nid AND r.last_stream_ordering > $2::bigint OFFSET 0) AS r
)
FROM principals p
WHERE p.name = $1::text
"""


class FeedRow(NamedTuple):
    """The position of a writer; or the floor of the user's list, and the rooms in it."""

    what: str
    instance_name: str | None
    position: int | None
    room_nids: list[int] | None


class FeedMemory(SyncMemory):
    """Replaces the process' cache: the user's list, read with the positions in one statement."""

    def __init__(self, store: Store, since: VectorPosition) -> None:
        super().__init__(
            lambda name: store.streams[name].positions(),
            store.caches.rooms_of,
            store.caches.room_changes,
            store.caches.state_changes,
        )
        self._since = since

    async def snapshot(
        self, conn: Connection, user_id: UserId, *, reread: bool = False
    ) -> ChangeSnapshot:
        """Return the news. Raise `ResyncNeeded` where the list does not reach back as far."""
        del reread
        rows = await conn.fetch(SQL_FEED, user_id, self._since.min, row=FeedRow)
        found = {
            name: {row.instance_name or "": row.position or 0 for row in rows if row.what == name}
            for name in STREAMS
        }
        nids: list[int] = []
        for row in rows:
            if row.what == "feed":
                if row.position is not None and self._since.min < row.position:
                    raise ResyncNeeded(
                        str(self._since), f"the list of {user_id} begins after {row.position}"
                    )
                nids = row.room_nids or []
        token = SyncToken.of({name: vector(writers) for name, writers in found.items()})
        return ChangeSnapshot(token, RoomsOf({}, 0), frozenset(nids), LastChange(1, 0))
