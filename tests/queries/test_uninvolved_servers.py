"""Reads for servers that were never joined to the room return only world-readable events.

No copy contains an event that it must not.
"""

import pytest

from storage import Store
from storage.errors import InvalidIdentifier, UnknownRoom
from storage.ids import RoomId
from storage.queries.events import StoredEvent
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, append, deliver, ids, new_room

STRANGER = "stranger.test"
NOWHERE = RoomId("!nowhere:s1.test")
OTHERS = "@user3:s3.test"


async def sent(store: Store, room: RoomBuilder, server_name: str) -> list[StoredEvent]:
    """Everything that both walks give to a server."""
    latest = ids(room.events[-1:])
    found = await store.backfill(room.room_id, latest, 100, server_name=server_name)
    return found + await store.missing_events(
        room.room_id, [], latest, limit=100, server_name=server_name
    )


@pytest.mark.parametrize("visibility", ["shared", "invited", "joined"])
async def test_a_server_that_was_never_in_the_room_gets_nothing(
    store: Store, visibility: str
) -> None:
    room = new_room(visibility=visibility, members=[LOCAL])
    room.message(ADMIN, "secret")
    await deliver(store, room)
    assert await store.visible_to_server(STRANGER, ids(room.events)) == set()
    assert await sent(store, room, STRANGER) == []


@pytest.mark.parametrize("visibility", ["shared", "invited", "joined"])
async def test_an_invitation_alone_gives_a_server_nothing(store: Store, visibility: str) -> None:
    room = new_room(visibility=visibility)
    room.invite(ADMIN, REMOTE)
    room.message(ADMIN, "secret")
    room.leave(REMOTE)
    room.message(ADMIN, "secret")
    await deliver(store, room)
    assert await store.visible_to_server("s2.test", ids(room.events)) == set()
    assert await sent(store, room, "s2.test") == []


async def test_a_stranger_gets_what_the_world_may_read_whole(store: Store) -> None:
    room = new_room(visibility="shared")
    before = room.message(ADMIN, "before")
    opened = room.history_visibility(ADMIN, "world_readable")
    said = room.message(ADMIN, "to the world")
    closed = room.history_visibility(ADMIN, "shared")
    after = room.message(ADMIN, "after")
    await deliver(store, room)
    readable = set(ids([opened, said, closed]))
    assert (
        await store.visible_to_server(STRANGER, ids([before, opened, said, closed, after]))
        == readable
    )
    found = await sent(store, room, STRANGER)
    assert set(ids(found)) == readable
    assert not any(event.withheld for event in found)


async def test_the_rule_decides_for_a_server_that_has_left(store: Store) -> None:
    room = new_room(visibility="shared")
    before = room.message(ADMIN, "before")
    room.join(REMOTE)
    room.leave(REMOTE)
    after = room.message(ADMIN, "after")
    room.history_visibility(ADMIN, "joined")
    hidden = room.message(ADMIN, "hidden")
    await deliver(store, room)
    assert await store.visible_to_server("s2.test", ids([before, after, hidden])) == set(
        ids([before, after])
    )
    assert {event.event_id: event.withheld for event in await sent(store, room, "s2.test")}[
        hidden.event_id
    ]


async def test_the_membership_of_one_who_came_back_as_invited_is_not_forgotten(
    store: Store,
) -> None:
    room = new_room(visibility="invited", members=[REMOTE])
    room.leave(REMOTE)
    hidden = room.message(ADMIN, "hidden")
    room.invite(ADMIN, REMOTE)
    shown = room.message(ADMIN, "shown")
    await deliver(store, room)
    assert await store.visible_to_server("s2.test", ids([hidden, shown])) == {shown.event_id}


async def test_a_join_in_a_state_that_was_given_counts(store: Store) -> None:
    """As where this server came later: the other's join is in no timeline here."""
    room = new_room(members=[REMOTE])
    auth = room.events
    joined = room.join(LOCAL)
    assert set(await append(store, *auth, origin="outlier")) == {"stored"}
    [result] = await store.append(
        [joined.pdu], room_version="11", state_before={joined.event_id: ids(auth)}
    )
    assert result.outcome == "stored"
    assert await store.visible_to_server("s2.test", [joined.event_id]) == {joined.event_id}
    assert await store.visible_to_server("s3.test", [joined.event_id]) == set()


async def test_a_join_that_was_refused_is_none(store: Store) -> None:
    room = new_room(visibility="shared")
    room.join_rules(ADMIN, "invite")
    room.join(OTHERS, expected="rejected")
    said = room.message(ADMIN)
    await store.append(room.pdus, room_version="11")
    assert await store.visible_to_server("s3.test", [said.event_id]) == set()


async def test_a_copy_for_a_server_holds_nothing_of_what_was_redacted(store: Store) -> None:
    room = new_room(members=[REMOTE])
    said = room.message(ADMIN, "secret")
    damaged = room.message(ADMIN, "secret", damage="content_hash")
    redaction = room.redact(ADMIN, said, reason="mistake")
    outcomes = {result.outcome for result in await store.append(room.pdus, room_version="11")}
    assert outcomes == {"stored", "redacted"}
    for event in await sent(store, room, "s2.test"):
        assert b"secret" not in event.raw
        assert not event.withheld
    copies = {event.event_id: event for event in await sent(store, room, "s2.test")}
    assert copies[said.event_id].redacted_by == redaction.event_id
    assert copies[said.event_id].content == copies[damaged.event_id].content == {}
    kept = (await store.backfill(room.room_id, ids(room.events[-1:]), 100))[1:3]
    assert [event.raw for event in kept] == [damaged.pdu, said.pdu]


async def test_is_resident_means_joined_now(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[REMOTE])
    room.invite(ADMIN, OTHERS)
    await deliver(store, room)
    statements.take()
    assert await store.is_resident("s2.test", room.room_id)
    assert len(statements.take()) == 1
    assert await store.is_resident("s1.test", room.room_id)
    assert not await store.is_resident("s3.test", room.room_id)
    assert not await store.is_resident(STRANGER, room.room_id)
    room.leave(REMOTE)
    await deliver(store, room)
    assert not await store.is_resident("s2.test", room.room_id)


async def test_is_resident_refuses_what_is_no_server_or_room(store: Store) -> None:
    with pytest.raises(UnknownRoom):
        await store.is_resident("s2.test", NOWHERE)
    with pytest.raises(InvalidIdentifier):
        await store.is_resident("s2.test", RoomId("room"))
    with pytest.raises(InvalidIdentifier):
        await store.is_resident("@user:s2.test", NOWHERE)


async def test_the_explanation_says_that_a_server_was_never_there(store: Store) -> None:
    room = new_room()
    room.invite(ADMIN, REMOTE)
    said = room.message(ADMIN)
    await deliver(store, room)
    for server in (STRANGER, "s2.test"):
        told = await store.explain_visibility(said.event_id, server)
        assert not told.visible
        assert "was never joined" in told.sentence
        assert "redacted form" not in told.sentence
        assert "table says otherwise" not in told.sentence
    room.join(REMOTE)
    await deliver(store, room)
    told = await store.explain_visibility(said.event_id, "s2.test")
    assert told.visible
    assert "table says otherwise" not in told.sentence
