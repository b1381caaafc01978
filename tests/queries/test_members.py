"""Who is in a room: now, at a token, by membership; and which servers are joined."""

from collections.abc import Callable

import pytest

from storage import Store, responses
from storage.errors import (
    InputError,
    InvalidToken,
    ResyncNeeded,
    StateUnknown,
    UnknownEvent,
    UnknownRoom,
)
from storage.ids import RoomId
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room

NOWHERE = RoomId("!nowhere:s1.test")
THIRD = "@user3:s3.test"


async def memberships(store: Store, room: RoomBuilder, at: str | None = None) -> dict[str, str]:
    """The membership of each user by the member events at a token."""
    found = await store.members(room.room_id, at=at)
    return {str(event.state_key): event.content["membership"] for event in found}


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    """One user of each membership."""
    room = new_room(members=[LOCAL, REMOTE])
    room.join_rules(ADMIN, "knock")
    room.invite(ADMIN, OTHER)
    room.knock("@user5:s2.test")
    room.ban(ADMIN, THIRD)
    room.leave(REMOTE)
    await deliver(store, room)
    return room


async def test_each_membership(store: Store, room: RoomBuilder, statements: StatementLog) -> None:
    expected = {
        ADMIN: "join",
        LOCAL: "join",
        OTHER: "invite",
        "@user5:s2.test": "knock",
        THIRD: "ban",
        REMOTE: "leave",
    }
    for user, membership in expected.items():
        statements.take()
        assert await store.membership(room.room_id, user) == membership
        assert len(statements.take()) == 1
    assert await store.membership(room.room_id, "@nobody:s9.test") is None
    assert await memberships(store, room) == expected
    for membership in ("join", "invite", "knock", "ban", "leave"):
        users = {user for user, one in expected.items() if one == membership}
        statements.take()
        assert set(await store.member_ids(room.room_id, membership)) == users
        assert len(statements.take()) == 1
        picked = await store.members(room.room_id, membership=membership)
        assert {event.state_key for event in picked} == users
        others = await store.members(room.room_id, not_membership=membership)
        assert {event.state_key for event in others} == expected.keys() - users
        assert len(statements.take()) == 2
    assert await store.members(room.room_id, membership="join", not_membership="join") == []


async def test_member_events_are_those_of_the_state(store: Store, room: RoomBuilder) -> None:
    state = await store.current_state(room.room_id, types=["m.room.member"])
    found = await store.members(room.room_id)
    assert {event.event_id for event in found} == set(state.values())
    stored = await store.events(state.values())
    assert {event.event_id: event for event in found} == stored


async def test_unknown_rooms_are_refused(store: Store) -> None:
    for call in (store.member_ids, store.members, store.joined_servers):
        with pytest.raises(UnknownRoom):
            await call(NOWHERE)
    with pytest.raises(UnknownRoom):
        await store.membership(NOWHERE, LOCAL)
    with pytest.raises(UnknownRoom):
        await store.joined_servers(NOWHERE, at_event="$one")


async def test_a_membership_out_of_band_counts(store: Store) -> None:
    """This server is not in the room, so no state has the invite."""
    room = new_room()
    invite = room.invite(ADMIN, LOCAL)
    assert await append(store, invite, origin="out_of_band") == ["stored"]
    token = (await store.sync(LOCAL)).next_batch
    assert await store.membership(room.room_id, LOCAL) == "invite"
    assert await store.memberships_of(LOCAL, ["invite", "join"]) == {room.room_id: "invite"}
    assert await store.member_ids(room.room_id, "invite") == []
    assert await store.joined_servers(room.room_id) == set()
    leave = room.leave(LOCAL)
    assert await append(store, leave, origin="out_of_band") == ["stored"]
    assert await store.membership(room.room_id, LOCAL) == "leave"
    assert await store.membership(room.room_id, LOCAL, at=token) is None, "only the last is known"


async def test_a_membership_out_of_band_counts_where_the_state_has_an_older_one(
    store: Store,
) -> None:
    """All local users have left, so the state here stays as it was."""
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE)
    room.join(LOCAL)
    room.leave(LOCAL)
    await deliver(store, room)
    left = (await store.sync(LOCAL)).next_batch
    invite = room.invite(REMOTE, LOCAL)
    assert await append(store, invite, origin="out_of_band") == ["stored"]
    invited = (await store.sync(LOCAL)).next_batch
    assert await store.membership(room.room_id, LOCAL) == "invite"
    assert await store.membership(room.room_id, LOCAL, at=left) == "leave"
    assert await store.membership(room.room_id, LOCAL, at=invited) == "invite"
    assert await store.memberships_of(LOCAL, ["invite", "leave"]) == {room.room_id: "invite"}
    room.join(LOCAL)
    await deliver(store, room)
    assert await store.membership(room.room_id, LOCAL) == "join"


async def test_the_members_at_tokens(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    before = (await store.sync(LOCAL)).next_batch
    then = await memberships(store, room)
    room.join(REMOTE)
    room.invite(ADMIN, OTHER)
    room.ban(ADMIN, REMOTE)
    said = [room.message(ADMIN) for _ in range(3)]
    await deliver(store, room)
    sync = await store.sync(LOCAL, since=before, timeline_limit=2)
    room.leave(OTHER)
    room.unban(ADMIN, REMOTE)
    await deliver(store, room)
    joined = sync.join[room.room_id]
    between = then | {REMOTE: "ban", OTHER: "invite"}
    assert ids(joined.timeline.events) == ids(said[1:])
    page = await store.messages(room.room_id, LOCAL, from_=joined.timeline.prev_batch, limit=3)
    assert ids(page.chunk) == ids([said[0], *reversed(room.events[-7:-5])])
    for token, expected in (
        (before, then),
        (joined.timeline.prev_batch, between),
        (sync.next_batch, between),
        (page.start, between),
        (page.end, then | {REMOTE: "join"}),
        (None, between | {REMOTE: "leave", OTHER: "leave"}),
    ):
        statements.take()
        assert await memberships(store, room, token) == expected
        assert len(statements.take()) == 1
        for user in (ADMIN, LOCAL, REMOTE, OTHER, THIRD):
            found = await store.membership(room.room_id, user, at=token)
            assert found == expected.get(user), (token, user)
        assert len(statements.take()) == 5


async def test_before_the_first_event_nobody_is_there(store: Store) -> None:
    room = new_room()
    await deliver(store, room)
    page = await store.messages(room.room_id, ADMIN, direction="f", limit=1)
    assert await store.members(room.room_id, at=page.start) == []
    assert await store.membership(room.room_id, ADMIN, at=page.start) is None


async def test_a_token_from_before_a_purge_is_refused(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    token = (await store.sync(LOCAL)).next_batch
    room.join(REMOTE)
    await deliver(store, room)
    async with store.database.connection() as conn:
        await conn.execute("INSERT INTO purged_streams VALUES ('events', 1000000)")
    for read in (
        store.members(room.room_id, at=token),
        store.membership(room.room_id, LOCAL, at=token),
    ):
        with pytest.raises(ResyncNeeded, match="not kept"):
            await read
    assert len(await store.members(room.room_id)) == 3


async def test_wrong_arguments(store: Store, room: RoomBuilder) -> None:
    with pytest.raises(InputError, match=r"^membership is 'joined': one of ban, invite"):
        await store.members(room.room_id, membership="joined")
    with pytest.raises(InputError, match=r"^not_membership is 'left'"):
        await store.members(room.room_id, not_membership="left")
    with pytest.raises(InputError, match="a list is wanted"):
        await store.memberships_of(LOCAL, "join")
    with pytest.raises(InvalidToken):
        await store.members(room.room_id, at="s1~nonsense")


async def test_the_ids_of_members_follow_the_state(store: Store, statements: StatementLog) -> None:
    """They are remembered with the state group, and compared with that of the room."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    first = await store.member_ids(room.room_id)
    first.append("changed by the caller")  # type: ignore[arg-type]
    assert set(await store.member_ids(room.room_id)) == {ADMIN, LOCAL}
    rates = store.caches.hit_rates()["members"]
    assert rates == 0.5
    changes: dict[str, Callable[[], BuiltEvent]] = {
        "join": lambda: room.join(REMOTE),
        "message": lambda: room.message(ADMIN),
        "leave": lambda: room.leave(LOCAL),
    }
    for name, change in changes.items():
        change()
        await deliver(store, room)
        expected = {ADMIN, REMOTE} if name == "leave" else {ADMIN, LOCAL, REMOTE}
        statements.take()
        assert set(await store.member_ids(room.room_id)) == expected
        assert set(await store.member_ids(room.room_id, "leave")) == (
            set() if LOCAL in expected else {LOCAL}
        )
        assert len(statements.take()) == 2


async def test_an_id_with_a_line_break_is_one_id(store: Store) -> None:
    odd = "@line\nbreak:s2.test"
    room = new_room(members=[LOCAL, odd])
    await deliver(store, room)
    for _ in range(2):
        assert set(await store.member_ids(room.room_id)) == {ADMIN, LOCAL, odd}
    room.leave(odd)
    await deliver(store, room)
    assert set(await store.member_ids(room.room_id)) == {ADMIN, LOCAL}


async def test_the_rooms_of_a_user_by_membership(store: Store, statements: StatementLog) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    rooms[1].leave(LOCAL)
    rooms[2].ban(ADMIN, LOCAL)
    for one in rooms:
        await deliver(store, one)
    joined, left, banned = (one.room_id for one in rooms)
    statements.take()
    assert await store.memberships_of(LOCAL) == {joined: "join"}
    assert await store.memberships_of(LOCAL, ["leave", "ban"]) == {left: "leave", banned: "ban"}
    assert len(statements.take()) == 2
    assert await store.memberships_of(LOCAL, []) == {}


async def test_the_joined_servers(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    room.invite(ADMIN, THIRD)
    await deliver(store, room)
    statements.take()
    assert await store.joined_servers(room.room_id) == {"s1.test", "s2.test"}
    assert len(statements.take()) == 1
    room.leave(REMOTE)
    await deliver(store, room)
    assert await store.joined_servers(room.room_id) == {"s1.test"}


@pytest.mark.parametrize("visibility", ["world_readable", "shared", "invited", "joined"])
async def test_the_servers_to_send_an_event_to(
    store: Store, statements: StatementLog, visibility: str
) -> None:
    """Those of the state before it: a leave goes to the server of the user who leaves."""
    room = new_room(visibility=visibility)
    said = {room.message(ADMIN): {"s1.test"}}
    said[room.invite(ADMIN, REMOTE)] = {"s1.test"}
    said[room.message(ADMIN)] = {"s1.test"}
    said[room.join(REMOTE)] = {"s1.test"}
    said[room.message(ADMIN)] = {"s1.test", "s2.test"}
    said[room.join(THIRD)] = {"s1.test", "s2.test"}
    said[room.kick(ADMIN, REMOTE)] = {"s1.test", "s2.test", "s3.test"}
    said[room.message(ADMIN)] = {"s1.test", "s3.test"}
    said[room.invite(ADMIN, REMOTE)] = {"s1.test", "s3.test"}
    said[room.leave(THIRD)] = {"s1.test", "s3.test"}
    said[room.message(ADMIN)] = {"s1.test"}
    await deliver(store, room)
    for event, expected in said.items():
        statements.take()
        found = await store.joined_servers(room.room_id, at_event=event.event_id)
        assert found == expected, event
        assert len(statements.take()) == 1


async def test_servers_at_an_event_that_has_no_state(store: Store) -> None:
    room, other = new_room(), new_room(seed=1)
    outlier = room.join(REMOTE)
    await deliver(store, other)
    await store.append(room.pdus[:-1], room_version=room.version)
    assert await append(store, outlier, origin="outlier") == ["stored"]
    with pytest.raises(StateUnknown):
        await store.joined_servers(room.room_id, at_event=outlier.event_id)
    for event_id in ("$unknown", other.events[-1].event_id):
        with pytest.raises(UnknownEvent):
            await store.joined_servers(room.room_id, at_event=event_id)


@pytest.mark.parametrize("version", ["1", "11", "12"])
@pytest.mark.parametrize("how", ["leave", "kick", "ban"])
async def test_one_who_left_gets_the_state_of_that_moment(
    store: Store, statements: StatementLog, how: str, version: str
) -> None:
    room = new_room(version=version, members=[LOCAL, THIRD], name="before")
    await deliver(store, room)
    early = (await store.sync(LOCAL)).next_batch
    room.join(OTHER)
    await deliver(store, room)
    with_other = (await store.sync(LOCAL)).next_batch
    own = room.leave(LOCAL) if how == "leave" else getattr(room, how)(ADMIN, LOCAL)
    expected = {**own.state_before, ("m.room.member", LOCAL): own.event_id}
    room.name(ADMIN, "after")
    room.topic(ADMIN, "after")
    room.leave(THIRD)
    room.join(REMOTE)
    await deliver(store, room)
    late = (await store.sync(LOCAL)).next_batch
    page = await store.messages(room.room_id, ADMIN, limit=1)
    if how == "ban":
        room.kick(ADMIN, LOCAL)
    for again in (lambda: None, lambda: room.invite(ADMIN, LOCAL), lambda: room.ban(ADMIN, LOCAL)):
        again()
        await deliver(store, room)
        statements.take()
        found = await store.state_at_leave(LOCAL, room.room_id)
        assert len(statements.take()) == 2
        assert {(one.type, one.state_key): one.event_id for one in found} == expected
        assert await responses.room_state(store, LOCAL, room.room_id) == expected
        members = {one for (kind, _), one in expected.items() if kind == "m.room.member"}
        for at in (None, late, page.start, page.end):
            read = await store.members(room.room_id, at=at, reader=LOCAL)
            assert set(ids(read)) == members, at
        inside = await store.members(room.room_id, membership="join", reader=LOCAL)
        assert {one.state_key for one in inside} == {ADMIN, OTHER, THIRD}
        for at, more in ((early, {LOCAL, THIRD}), (with_other, {LOCAL, OTHER, THIRD})):
            read = await store.members(room.room_id, at=at, membership="join", reader=LOCAL)
            assert {one.state_key for one in read} == {ADMIN, *more}
        everyone = await store.members(room.room_id, reader=ADMIN)
        assert ids(everyone) == ids(await store.members(room.room_id))
    assert await store.state_at_leave(ADMIN, room.room_id) == []
    assert await store.state_at_leave("@nobody:s9.test", room.room_id) == []
    await store.forget(LOCAL, room.room_id)
    assert await store.state_at_leave(LOCAL, room.room_id) == []
    room.kick(ADMIN, LOCAL)
    room.join(LOCAL)
    await deliver(store, room)
    assert await store.state_at_leave(LOCAL, room.room_id) == []
    read = await store.members(room.room_id, reader=LOCAL)
    assert {one.state_key for one in read} >= {LOCAL, REMOTE}
    with pytest.raises(UnknownRoom):
        await store.state_at_leave(LOCAL, NOWHERE)


async def test_an_invite_that_was_rejected_has_no_state_of_a_leave(store: Store) -> None:
    room = new_room()
    room.invite(ADMIN, LOCAL)
    room.leave(LOCAL)
    await deliver(store, room)
    assert await store.state_at_leave(LOCAL, room.room_id) == []


async def test_the_state_of_a_leave_goes_with_its_changes(store: Store) -> None:
    """It is not replaced by a later one."""
    room = new_room(members=[LOCAL])
    room.leave(LOCAL)
    room.name(ADMIN, "after")
    await deliver(store, room)
    assert await store.state_at_leave(LOCAL, room.room_id)
    async with store.database.connection() as conn:
        await conn.execute("INSERT INTO purged_streams VALUES ('events', 1000000)")
    assert await store.state_at_leave(LOCAL, room.room_id) == []
    assert await store.members(room.room_id, reader=LOCAL) == []
    assert await store.members(room.room_id, reader=ADMIN)
