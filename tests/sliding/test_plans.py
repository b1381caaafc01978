"""The statements read rooms by index, among many names, rooms, states, receipts and users."""

from storage import RoomSubscription, SlidingList, SlidingSyncRequest, Store
from storage.database.explained import ExplainingConnection, QueryPlan
from storage.ids import StateKey, UserId
from storage.queries.sliding.response import poll
from storage.queries.sliding.selection import PreparedRequest
from tests.queries.rooms import ADMIN, LOCAL, append
from tests.sliding.client import SlidingClient
from tests.sliding.test_timelines import many_rooms

EXTENSIONS = ("account_data", "receipts", "to_device")
REQUIRED: list[StateKey] = [("m.room.name", ""), ("m.room.member", "$LAZY"), ("*", "")]

FILL = """
INSERT INTO principals
SELECT 100000000 + n, '@other' || n || ':s9.test' FROM generate_series(1, 20000) AS n;
INSERT INTO state_keys (state_key_nid, type_nid, state_key)
SELECT 100000000 + n, 2, '@other' || n || ':s9.test' FROM generate_series(1, 20000) AS n;
INSERT INTO rooms (write_version, room_nid, next_audience, max_topological_ordering, room_id,
    room_version, forward_extremities)
SELECT 1, 100000000 + n, 0, 0, '!other' || n || ':s9.test', '11', '{}'
FROM generate_series(1, 20000) AS n;
INSERT INTO current_state (event_nid, room_nid, state_key_nid, membership)
SELECT n, 100000000 + n % 100, 100000000 + n, 5 FROM generate_series(1, 20000) AS n;
INSERT INTO state_deltas (stream_ordering, event_nid, room_nid, state_key_nid, writer_nid)
SELECT n, n, 100000000 + n % 100, 100000000 + n, 1 FROM generate_series(1, 20000) AS n;
INSERT INTO memberships (stream_ordering, event_nid, principal_nid, room_nid, writer_nid,
    membership)
SELECT n, n, 100000000 + n, 100000000 + n % 100, 1, 5 FROM generate_series(1, 20000) AS n;
INSERT INTO receipts (stream_id, room_nid, principal_nid, writer_nid, receipt_type, thread_id,
    event_id, data)
SELECT 1000 + n, 100000000 + n % 100, 100000000 + n, 1, 'm.read', '', '$e', '{}'
FROM generate_series(1, 20000) AS n;
INSERT INTO account_data (stream_id, principal_nid, room_nid, type_nid, writer_nid, content)
SELECT 1000 + n, 100000000 + n, 0, 8, 1, '{}' FROM generate_series(1, 20000) AS n;
INSERT INTO to_device (stream_id, principal_nid, writer_nid, device_id, content)
SELECT 1000 + n, 100000000 + n, 1, 'D', '{}' FROM generate_series(1, 20000) AS n;
INSERT INTO sliding_rooms
SELECT n, 1, NULL, NULL, NULL, n, 1, 1, false FROM generate_series(1, 20000) AS n;
ANALYZE;
"""
BIG = {
    "current_state",
    "memberships",
    "principals",
    "receipts",
    "rooms",
    "sliding_rooms",
    "state_deltas",
    "state_keys",
    "to_device",
    "account_data",
}


async def test_a_response_reads_its_rooms_by_index(store: Store) -> None:
    """The first response of a connection and a later one, with generic plans and with others."""
    rooms = await many_rooms(store, 12)
    client = SlidingClient(store, LOCAL)
    lists = {"all": SlidingList([(0, 4)], 5, REQUIRED)}
    subscribed = {room.room_id: RoomSubscription(5, [("*", "*")]) for room in rooms[8:11]}
    request = SlidingSyncRequest("", lists, subscribed, EXTENSIONS)
    await client.request(request)
    for room in rooms[3:8]:
        await append(store, room.message(ADMIN, "new"), room.name(ADMIN, "named"))
    await append(store, rooms[8].kick(ADMIN, LOCAL), rooms[8].name(ADMIN, "named"))
    reset = rooms[10].at(rooms[10].events[-1].prev_events[0])
    await append(store, reset.join_rules(ADMIN, "invite"))
    await append(store, reset.ban(ADMIN, LOCAL), rooms[10].name(ADMIN, "named"))
    invited = rooms[11]
    await append(store, invited.kick(ADMIN, LOCAL), invited.invite(ADMIN, LOCAL))
    event_id = rooms[4].events[-1].event_id
    await store.receipts.set(rooms[4].room_id, "m.read", UserId(ADMIN), event_id, {})
    async with store.database.transaction() as conn:
        for statement in FILL.split(";\n"):
            if statement.strip():
                await conn.execute(statement)
        for generic in (True, False):
            for pos in (None, client.pos):
                explaining = ExplainingConnection.over(conn, generic=generic)
                prepared = prepare(store, client, request, pos)
                assert (await poll(explaining, prepared, store.sliding)).rooms
                check(explaining.plans)


def prepare(
    store: Store, client: SlidingClient, request: SlidingSyncRequest, pos: str | None
) -> PreparedRequest:
    return PreparedRequest.of(
        client.user_id,
        request,
        device_id=client.device_id,
        pos=pos,
        ignored=[],
        server_name=store.server_name,
        deployment=store.deployment_id,
        config=store.database.config,
        defined=frozenset(),
    )


def check(plans: list[QueryPlan]) -> None:
    """No table is read whole, and of none many rows."""
    for plan in plans:
        assert not plan.sequential & BIG, (plan.sql[:200], plan.sequential)
        read = {name: rows for name, rows in plan.rows_of_tables().items() if name in BIG}
        assert max(read.values(), default=0) <= 400, (plan.sql[:200], read)
