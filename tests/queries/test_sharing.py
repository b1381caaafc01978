"""Compare shared rooms, and every read of members, with brute force.

`STORAGE_EXAMPLES` says how many worlds of four random rooms with forks; the default is for every
day. A thousand rooms are 250 worlds.
"""

import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product

import pytest

import storage
from storage import Store
from storage.errors import InvalidToken, ResyncNeeded
from storage.ids import server_name_of
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.membership_worlds import (
    MembershipWorld,
    advance,
    deliver,
    joined,
    new_world,
    sharing,
)
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, new_room
from tests.queries.rooms import deliver as deliver_room

WORLDS = int(os.environ.get("STORAGE_EXAMPLES", "4"))
FIRST = 5  # the seventh has a member whom state resolution takes away
ROUNDS = 6
NEEDED = ("gained", "again", "lost", "several writers", "reset", "other servers then")
"""What the worlds must have, so that the comparison says something."""


async def test_random_worlds_agree_with_brute_force(dsn: str) -> None:
    seen: Counter[str] = Counter()
    async with (
        storage.open(dsn, server_name="s1.test") as store,
        storage.open(dsn, server_name="s1.test", instance_name="second") as second,
    ):
        for number in range(FIRST, FIRST + WORLDS):
            world = new_world(number)
            for _ in range(ROUNDS):
                await deliver(world, [store, second])
                advance(world)
            await deliver(world, [store, second])
            await check_changes(store, world, seen)
            await check_now(store, world)
            await check_then(store, world, seen)
            await check_servers(store, world, seen)
    assert all(seen[what] for what in NEEDED), seen


async def check_changes(store: Store, world: MembershipWorld, seen: Counter[str]) -> None:
    """Compare `sharing_changes` between any two tokens, in both directions."""
    for user in world.local:
        truths = [sharing(truth, user) for truth in world.truths]
        always = [
            set.intersection(before, *(sharing(truth, user) for truth in life))
            for before, life in zip(truths, world.lives[1:], strict=False)
        ]
        for (one, earlier), (two, later) in product(enumerate(truths), repeat=2):
            found = await store.sharing_changes(user, world.tokens[one], world.tokens[two])
            held = set.intersection(earlier, *always[min(one, two) : max(one, two)])
            assert found.gained == later - held, (world.number, user, one, two)
            assert found.lost == earlier - later, (world.number, user, one, two)
            seen.update({"gained": len(found.gained), "lost": len(found.lost)})
            seen["again"] += len(found.gained & earlier)
    seen["several writers"] += any("-" in token for token in world.tokens)
    for before, after in pairwise(world.truths):
        seen["reset"] += sum(len(before[room].keys() - after[room].keys()) for room in before)


async def check_now(store: Store, world: MembershipWorld) -> None:
    """Compare what is true now."""
    now = world.truths[-1]
    for user in world.users:
        assert await store.users_sharing(user) == sharing(now, user), (world.number, user)
        assert await store.memberships_of(user, ["join", "invite", "leave", "ban"]) == {
            room_id: members[user] for room_id, members in now.items() if user in members
        }
        for other in world.users:
            both = {room_id for room_id in now if {user, other} <= joined(now, room_id)}
            assert await store.shared_rooms(user, other) == both
    for room_id in now:
        assert set(await store.member_ids(room_id)) == joined(now, room_id)
        assert await store.joined_servers(room_id) == set(map(server_name_of, joined(now, room_id)))


async def check_then(store: Store, world: MembershipWorld, seen: Counter[str]) -> None:
    """Compare the members at each token."""
    for token, truth in zip(world.tokens, world.truths, strict=True):
        for room_id, members in truth.items():
            found = await store.members(room_id, at=token)
            assert {event.state_key: event.content["membership"] for event in found} == members
            user = world.rng.choice(world.users)
            assert await store.membership(room_id, user, at=token) == members.get(user)
            seen["members"] += len(members)


async def check_servers(store: Store, world: MembershipWorld, seen: Counter[str]) -> None:
    """Compare the servers at each event, by its state."""
    contents = {event.event_id: event.json["content"] for event in world.events()}
    for branches in world.rooms:
        room_id, events = branches[0].room_id, [event.event_id for event in branches[0].events]
        now = await store.joined_servers(room_id)
        for event_id, state in (await store.states_before(events)).items():
            servers = {
                server_name_of(user)
                for (kind, user), member in state.items()
                if kind == "m.room.member" and contents[member]["membership"] == "join"
            }
            found = await store.joined_servers(room_id, at_event=event_id)
            assert found == servers, (world.number, event_id)
            seen["other servers then"] += found != now


async def test_what_changes_for_whom(store: Store, statements: StatementLog) -> None:
    """A user who shares another room is neither gained nor lost."""
    one, two = new_room(members=[LOCAL, REMOTE]), new_room(seed=1, members=[LOCAL])
    await deliver_room(store, one)
    await deliver_room(store, two)
    first = (await store.sync(LOCAL)).next_batch
    two.join(REMOTE)
    two.join(OTHER)
    await deliver_room(store, two)
    second = (await store.sync(LOCAL)).next_batch
    one.ban(ADMIN, REMOTE)
    two.leave(LOCAL)
    await deliver_room(store, one)
    await deliver_room(store, two)
    third = (await store.sync(LOCAL)).next_batch
    statements.take()
    for since, to, gained, lost in (
        (first, second, {OTHER}, set()),
        (second, third, set(), {OTHER, REMOTE}),
        (first, third, set(), {REMOTE}),
        (third, first, {REMOTE}, set()),
        (third, third, set(), set()),
    ):
        found = await store.sharing_changes(LOCAL, since, to)
        assert set[str](found.gained) == gained
        assert set[str](found.lost) == lost
        assert len(statements.take()) == 1
    for call in (
        store.users_sharing(LOCAL),
        store.users_sharing(REMOTE),
        store.shared_rooms(LOCAL, REMOTE),
    ):
        await call
        assert len(statements.take()) == 1
    assert await store.users_sharing(REMOTE) == {ADMIN, OTHER}
    assert await store.memberships_of(REMOTE) == {two.room_id: "join"}
    assert await store.memberships_of(REMOTE, ["ban"]) == {one.room_id: "ban"}
    assert len(statements.take()) == 3


@pytest.mark.parametrize("together", [True, False], ids=["one append", "an append each"])
async def test_who_left_and_joined_again_is_gained(store: Store, together: bool) -> None:
    """It holds for both sides, in the same room and in another, unless a room was shared always."""
    one, two = new_room(members=[LOCAL, REMOTE]), new_room(seed=1, members=[LOCAL])
    steps: dict[str, tuple[RoomBuilder, list[Callable[[], object]], set[str]]] = {
        "the same room": (one, [lambda: one.leave(REMOTE), lambda: one.join(REMOTE)], {REMOTE}),
        "a kick": (one, [lambda: one.kick(ADMIN, REMOTE), lambda: one.join(REMOTE)], {REMOTE}),
        "own leave": (one, [lambda: one.leave(LOCAL), lambda: one.join(LOCAL)], {REMOTE}),
        "only a name": (one, [lambda: one.join(REMOTE), lambda: one.join(REMOTE)], set()),
        "shared before": (two, [lambda: two.join(REMOTE)], set()),
        "still another": (one, [lambda: one.leave(REMOTE)], set()),
        "left the last": (two, [lambda: two.leave(REMOTE)], {REMOTE}),
    }
    await deliver_room(store, one)
    await deliver_room(store, two)
    tokens = [(await store.sync(LOCAL)).next_batch]
    for room, deeds, _ in steps.values():
        for deed in deeds:
            deed()
            if not together:
                await deliver_room(store, room)
        await deliver_room(store, room)
        tokens.append((await store.sync(LOCAL)).next_batch)
    for (since, to), (what, (_, _, gained)) in zip(pairwise(tokens), steps.items(), strict=True):
        changes = await store.sharing_changes(LOCAL, since, to)
        lost = set(gained) if what == "left the last" else set[str]()
        assert set[str](changes.gained) == gained - lost, what
        assert set[str](changes.lost) == lost, what
    one.join(REMOTE)  # from a room to another, with a time without any
    await deliver_room(store, one)
    again = (await store.sync(LOCAL)).next_batch
    assert (await store.sharing_changes(LOCAL, tokens[-2], again)).gained == {REMOTE}


async def test_a_membership_that_resolution_takes_away_is_lost(store: Store) -> None:
    """The room was closed on the other side, so two joins are undone without an event."""
    room = new_room(members=[LOCAL])
    closed, open_room = room.fork(2)
    open_room.join(REMOTE)
    open_room.join(OTHER)
    await deliver_room(store, room)
    before = (await store.sync(LOCAL)).next_batch
    assert await store.users_sharing(LOCAL) == {ADMIN, REMOTE, OTHER}
    closed.join_rules(ADMIN, "invite")
    await deliver_room(store, room)
    after = (await store.sync(LOCAL)).next_batch
    assert await store.users_sharing(LOCAL) == {ADMIN}
    assert await store.membership(room.room_id, REMOTE) is None
    assert await store.membership(room.room_id, REMOTE, at=before) == "join"
    assert (await store.sharing_changes(LOCAL, before, after)).lost == {REMOTE, OTHER}
    assert (await store.sharing_changes(LOCAL, after, before)).gained == {REMOTE, OTHER}
    assert (await store.sharing_changes(OTHER, before, after)).lost == {ADMIN, LOCAL, REMOTE}
    assert (await store.sharing_changes(OTHER, after, after)).lost == set()


async def test_a_user_of_no_room_shares_nothing(store: Store) -> None:
    token = (await store.sync(LOCAL)).next_batch
    assert await store.users_sharing(LOCAL) == set()
    assert await store.shared_rooms(LOCAL, REMOTE) == set()
    assert (await store.sharing_changes(LOCAL, token, token)).gained == set()


async def test_tokens_that_cannot_be_compared(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver_room(store, room)
    token = (await store.sync(LOCAL)).next_batch
    page = await store.messages(room.room_id, LOCAL)
    with pytest.raises(InvalidToken, match="where a sync token is needed"):
        await store.sharing_changes(LOCAL, page.start, token)
    async with store.database.connection() as conn:
        await conn.execute("INSERT INTO purged_streams VALUES ('events', 1000000)")
    with pytest.raises(ResyncNeeded, match="not kept"):
        await store.sharing_changes(LOCAL, token, token)
