"""A membership that the whole state changes for a while has other positions after a completion.

The gap before the join is filled after the room was closed:

    extra <- question <- dora joins <- closed       extra: the profile of another user

With the whole answer, the extra event is accepted and is a forward extremity. The resolution with
it does not let dora join a closed room, until its child arrives and the extremity is gone. So dora
is out for one position. With the members omitted, the extra event is refused until the completion,
and dora stays in.

Both are right: the state deltas are what clients of each store have got, and a sync takes the
membership at its token from the first delta after the token. It looks for one if the position of
the membership is after the token. So that position has to be the one of the store's last delta. If
the completed store had the position of the other one, syncs would return the room as a new one.
"""

from contextlib import AsyncExitStack

import storage
from storage.testing import BuiltEvent, RoomBuilder, signing_key
from tests.federation.built_remote import BuiltRemote
from tests.federation.partial import omitted
from tests.federation.partial_worlds import OTHERS, SERVER, USER, Replica
from tests.maintenance.rooms import findings
from tests.persist.row_differences import differences
from tests.persist.whole_rows import rows_of


async def joined(replica: Replica, room: RoomBuilder, join: BuiltEvent, *, partly: bool) -> None:
    answer = BuiltRemote(room).send_join(join)
    answer = omitted(answer, room.version, list(OTHERS)) if partly else answer
    result = await replica.receiver.joined(OTHERS[0], join.json, answer, room.version)
    assert result.outcome == "joined", result


async def test_a_member_who_is_out_for_a_while_in_the_whole_state(
    dsn: str, another_dsn: str
) -> None:
    room = RoomBuilder("10", servers=OTHERS, seed=1)
    admin, other = room.user(1, OTHERS[0]), room.user(2, OTHERS[1])
    room.start(admin)
    room.join(other)
    extra, question = room.join(other, displayname="other"), room.message(admin, "?")
    join, closed = room.join(USER), room.join_rules(admin, "invite")
    remote, key = BuiltRemote(room), signing_key(SERVER)
    async with AsyncExitStack() as stack:
        replicas = [
            Replica.of(
                await stack.enter_async_context(
                    storage.open(one, server_name=SERVER, signing_key=key)
                ),
                remote,
            )
            for one in (dsn, another_dsn)
        ]
        tokens = []
        for replica in replicas:
            await joined(replica, room, join, partly=replica is replicas[0])
            await replica.receiver.transaction(OTHERS[0], [closed.json])
            tokens.append((await replica.store.sync(USER)).next_batch)
            await replica.receiver.transaction(OTHERS[0], [extra.json, question.json])
        await replicas[0].receiver.complete_partial_rooms()
        assert await findings(replicas[0].store) == []
        news = (await replicas[0].store.sync(USER, since=tokens[0])).join[room.room_id]
        assert [one.event_id for one in news.timeline.events][-1] == extra.event_id
        assert {one.type for one in news.state_after} == {"m.room.member"}  # not the whole state
    completed, full = await rows_of(dsn), await rows_of(another_dsn)
    assert completed.moved == [extra.event_id]
    changes = [
        [(at, row[user]) for at, row in rows.deltas if (user := ("m.room.member", USER)) in row]
        for rows in (full, completed)
    ]
    left = [(extra.event_id, None), (question.event_id, join.event_id)]
    assert changes == [[(join.event_id, join.event_id), *left], [(join.event_id, join.event_id)]]
    assert differences(full, completed, completed.moved) == []
