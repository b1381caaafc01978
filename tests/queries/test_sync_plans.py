"""How much of a user's memberships a sync reads that knows where to look."""

from storage import Store
from storage.database.explained import ExplainingConnection
from storage.ids import UserId
from storage.queries.sync import rooms
from storage.streams import VectorPosition
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room

SQL_MULTIPLY = """
INSERT INTO memberships
SELECT made.*
FROM memberships m
JOIN principals p USING (principal_nid)
CROSS JOIN generate_series(1, $3::int) AS n
CROSS JOIN LATERAL jsonb_populate_record(m,
    jsonb_build_object('principal_nid', m.principal_nid + n * $2::int, 'room_nid',
        m.room_nid + n)) AS made
WHERE p.name = $1::text
"""


async def test_a_room_that_changed_is_looked_up_alone_among_all_that_the_user_is_in(
    store: Store,
) -> None:
    """Also where another writer is behind, and whatever Postgres estimates.

    Nearly all users are in one room, this one is in 401.
    """
    room = new_room(members=[LOCAL])
    message = room.message(ADMIN)
    await deliver(store, room)
    position = (await store.events([message.event_id]))[message.event_id].stream_ordering or 0
    async with store.database.transaction() as conn:
        room_nid = await conn.fetchval(
            "SELECT room_nid FROM rooms WHERE room_id = $1::text", room.room_id
        )
        await conn.execute(SQL_MULTIPLY, LOCAL, 10_000, 4_000)
        await conn.execute(SQL_MULTIPLY, LOCAL, 0, 400)
        await conn.execute("ANALYZE memberships")
        explaining = ExplainingConnection.over(conn, generic=True)
        since = VectorPosition.of(position - 3, {"main": position - 1})
        [told] = await rooms.rooms(
            explaining,
            UserId(LOCAL),
            rooms.SyncRange(since, VectorPosition(position), 10, room_nids=[room_nid]),
        )
        assert [event.event_id for event in told.events] == [message.event_id]
        assert explaining.plans[0].rows_of_tables()["memberships"] == 3, (
            "once for what a writer behind may have committed, once for whether it is forgotten"
        )
