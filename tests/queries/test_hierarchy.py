"""`responses.hierarchy` reads level by level: the same rooms as room by room, in few statements."""

import random
from typing import Any

import pytest

from storage import RoomId, Store, responses
from storage.queries import space_walk
from storage.queries.room_info import rooms
from storage.queries.space_walk import may_see
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, deliver

CHILD = "m.space.child"


def a_room(seed: int, *, space: bool, rule: str = "public") -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(ADMIN, join_rule=rule, content={"type": "m.space"} if space else {})
    return room


def adopt(space: RoomBuilder, *children: str, suggested: bool = False) -> None:
    for child in children:
        content = {"via": ["s1.test"], "suggested": suggested}
        space.state_event(ADMIN, CHILD, content, child)


async def room_by_room(
    store: Store, room_id: RoomId, *, max_depth: int = 50, suggested_only: bool = False
) -> list[str]:
    """The rooms of a space, with a request for each."""
    own = await store.memberships_of(LOCAL, ("join", "invite"))
    found, seen, stack = list[str](), set[str](), [(room_id, 0)]
    while stack:
        here, depth = stack.pop()
        room = None if here in seen else (await store.rooms([here])).get(here)
        seen.add(here)
        if room is None or not may_see(room, own):
            continue
        children = await store.space_children(here) if room.type == "m.space" else []
        children = [one for one in children if one.suggested or not suggested_only]
        found.append(here)
        if depth < max_depth:
            stack += [(one.room_id, depth + 1) for one in reversed(children)]
    return found


async def pages(store: Store, room_id: RoomId, limit: int, **how: Any) -> list[str]:
    found, token = list[str](), None
    while True:
        page = await responses.hierarchy(store, LOCAL, room_id, from_=token, limit=limit, **how)
        found += [one["room_id"] for one in page["rooms"]]
        token = page.get("next_batch")
        if token is None:
            return found


@pytest.mark.parametrize(
    "rule, first",
    [("public", 1), ("knock", 7), ("restricted", 8), ("knock_restricted", 10), ("invite", 99)],
)
async def test_a_rule_that_the_version_lacks_hides_the_room(
    store: Store, rule: str, first: int
) -> None:
    """The auth rules of the version let nobody in by it, so the room is by invitation."""
    space = a_room(0, space=True)
    space.join(LOCAL)
    allow = [{"type": "m.room_membership", "room_id": space.room_id}]
    expected = [space.room_id]
    for number in (1, 6, 7, 8, 9, 10, 11):
        room = RoomBuilder(str(number), seed=number, sign=False)
        room.start(ADMIN)
        room.state_event(ADMIN, "m.room.join_rules", {"join_rule": rule, "allow": allow})
        adopt(space, room.room_id)
        expected += [room.room_id] if number >= first else []
        await deliver(store, room)
    await deliver(store, space)
    assert await pages(store, RoomId(space.room_id), 50) == expected


@pytest.mark.parametrize("seed", range(5))
async def test_random_spaces(store: Store, seed: int) -> None:
    """With circles, hidden rooms, rooms that are not stored, and children of several spaces."""
    rng = random.Random(seed)
    built = [
        a_room(number, space=number == 0 or rng.random() < 0.6, rule=rule)
        for number in range(14)
        for rule in [rng.choice(["public", "public", "knock", "invite"]) if number else "public"]
    ]
    ids = [*(room.room_id for room in built), "!lost:s2.test", "!gone:s2.test"]
    for room in built:
        adopt(room, *rng.sample(ids, rng.randrange(6)), suggested=rng.random() < 0.7)
    adopt(built[0], *rng.sample(ids, 5), suggested=True)
    for room in built:
        await deliver(store, room)
    root = RoomId(built[0].room_id)
    requests: list[dict[str, Any]] = [{}, {"max_depth": 1}, {"suggested_only": True}]
    for how in requests:
        expected = await room_by_room(store, root, **how)
        assert len(expected) > 1
        for limit in (1, 3, 50):
            assert await pages(store, root, limit, **how) == expected


async def test_a_level_takes_two_statements(store: Store, statements: StatementLog) -> None:
    root, number = a_room(0, space=True), 1
    level, built = [root], [root]
    for _ in range(3):
        below = []
        for space in level:
            for _ in range(3):
                below.append(a_room(number, space=True))
                number += 1
                adopt(space, below[-1].room_id)
        level, built = below, built + below
    for room in built:
        await deliver(store, room)
    statements.take()
    found = await responses.hierarchy(store, LOCAL, RoomId(root.room_id), limit=50)
    assert len(found["rooms"]) == len(built) == 40
    # the own memberships, the root, and for each of four levels of spaces
    assert len(statements.take()) <= 2 + 2 * 4


async def test_children_that_are_not_stored_are_looked_up_together(
    store: Store, statements: StatementLog
) -> None:
    root, last = a_room(0, space=True), a_room(1, space=False)
    adopt(root, *(f"!{number:04}:s2.test" for number in range(1_000)), last.room_id)
    for room in (root, last):
        await deliver(store, room)
    statements.take()
    found = await responses.hierarchy(store, LOCAL, RoomId(root.room_id), limit=5)
    assert [one["room_id"] for one in found["rooms"]] == [root.room_id, last.room_id]
    assert len(statements.take()) <= 12  # 6, 12, 24, … rooms


async def test_a_page_reads_no_more_than_its_limit_needs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = a_room(0, space=True)
    spaces = [a_room(number, space=True) for number in range(1, 30)]
    adopt(root, *(space.room_id for space in spaces))
    for room in (root, *spaces):
        await deliver(store, room)
    read = list[int]()

    async def noted(conn: Any, room_ids: Any) -> Any:
        read.append(len(room_ids))
        return await rooms(conn, room_ids)

    monkeypatch.setattr(space_walk, "rooms", noted)
    found = await responses.hierarchy(store, LOCAL, RoomId(root.room_id), limit=2)
    assert len(found["rooms"]) == 2
    assert read[0] == 1
    assert sum(read) <= 8
