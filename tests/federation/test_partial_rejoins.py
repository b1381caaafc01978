"""A partial join of a room with a forward extremity of an earlier stay: the join stays current.

X is an event that no other event has as prev_event:

    closed <- other is invited <- other joins <- opened <- early joins <- early leaves <- dora joins
                                                                ^---- X

With the whole answer, both states have the join of the other user, and so the old join rules in
their auth chains. The partial state lacks the other user. A resolution with the state after X would
take the old join rules for a part of the conflict, and they do not let dora in.
"""

from contextlib import AsyncExitStack

import pytest

import storage
from storage import Store, UserId
from storage.rebuild import rebuild
from storage.testing import BuiltEvent, RoomBuilder, signing_key
from tests.federation.built_remote import BuiltRemote
from tests.federation.partial import omitted
from tests.federation.partial_worlds import OTHERS, READERS, SERVER, USER, Replica
from tests.maintenance.rooms import findings
from tests.persist.row_differences import differences
from tests.persist.whole_rows import rows_of

EARLY = READERS[2]


async def joined(replica: Replica, room: RoomBuilder, join: BuiltEvent, *, partly: bool) -> None:
    answer = BuiltRemote(room).send_join(join)
    answer = omitted(answer, room.version, list(OTHERS)) if partly else answer
    result = await replica.receiver.joined(OTHERS[0], join.json, answer, room.version)
    assert result.outcome == "joined", result


async def received(replica: Replica, *events: BuiltEvent) -> set[str]:
    results = await replica.receiver.transaction(OTHERS[0], [one.json for one in events])
    return {one.outcome for one in results.values()}


@pytest.mark.parametrize("kind", ["before", "after", "merged"])
async def test_an_old_extremity_does_not_undo_the_join(
    dsn: str, another_dsn: str, kind: str
) -> None:
    """``kind``: X arrives before the join or after it, or the next event has it as prev_event."""
    room = RoomBuilder("10", servers=OTHERS, seed=1)
    admin, other = room.user(1, OTHERS[0]), room.user(2, OTHERS[1])
    room.start(admin)
    room.join_rules(admin, "invite")
    room.invite(admin, other)
    room.join(other)
    room.join_rules(admin, "public")
    first = room.join(EARLY)
    side = room.fork(1)[0]
    old, leave = side.message(admin, "X"), room.leave(EARLY)
    room.message(admin, "this server is out")
    join = room.join(USER)
    if kind == "merged":
        room.merge(side)
    question = room.message(other, "?")
    remote, key = BuiltRemote(room), signing_key(SERVER)
    async with AsyncExitStack() as stack:
        for one in (dsn, another_dsn):
            store = await stack.enter_async_context(
                storage.open(one, server_name=SERVER, signing_key=key)
            )
            replica = Replica.of(store, remote)
            await joined(replica, room, first, partly=False)
            await received(replica, *([leave] if kind == "after" else [old, leave]))
            await joined(replica, room, join, partly=one == dsn)
            if kind == "after":
                assert await received(replica, old) == {"stored"}
            members = set[UserId](await store.member_ids(room.room_id))
            assert USER in members
            assert await received(replica, question) == {"stored"}
            await look(store, room, other)
            await rebuild(store.database, room.room_id, server_name=SERVER)
            await look(store, room, other)
            assert await replica.receiver.complete(room.room_id)
            assert await findings(store) == []
    completed, full = await rows_of(dsn), await rows_of(another_dsn)
    assert completed.moved == []
    assert differences(full, completed) == []


async def look(store: Store, room: RoomBuilder, other: str) -> None:
    assert {USER, other} <= {*await store.member_ids(room.room_id)}
    assert await findings(store) == []
