"""`space_children`: the children of a space, in the order of the specification."""

from typing import Any

import pytest

from storage import Store
from storage.errors import StorageCorrupt, UnknownRoom
from storage.ids import RoomId
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room

CHILD = "m.space.child"
VIA = {"via": ["s1.test", "s2.test"]}


def space() -> RoomBuilder:
    return new_room(members=[LOCAL], content={"type": "m.space"})


async def children(store: Store, room: RoomBuilder) -> list[str]:
    return [child.room_id for child in await store.space_children(room.room_id)]


async def test_a_child_has_its_event(store: Store, statements: StatementLog) -> None:
    room = space()
    content = {**VIA, "order": "a", "suggested": True}
    event = room.state_event(ADMIN, CHILD, content, "!one:s1.test", ts=12_345)
    await deliver(store, room)
    statements.take()
    [child] = await store.space_children(room.room_id)
    assert len(statements.take()) == 1
    assert (child.room_id, child.via) == ("!one:s1.test", ("s1.test", "s2.test"))
    assert (child.suggested, child.order, child.origin_server_ts) == (True, "a", 12_345)
    assert child.event == (await store.event(event.event_id))
    assert child.event.json["content"] == content


async def test_the_order_is_that_of_the_specification(store: Store) -> None:
    room = space()
    for name, ts, order in (
        ("late", 3, None),
        ("early", 2, None),
        ("same-b", 1, None),
        ("same-a", 1, None),
        ("upper", 9, "B"),
        ("lower", 1, "a"),
        ("lower-too", 9, "a"),
        ("space", 9, " "),
        ("tilde", 9, "~"),
        ("longest", 9, "b" * 50),
        ("long", 4, "b" * 51),
        ("other-letter", 5, "é"),
        ("control", 6, "a\n"),
        ("number", 7, 7),
        ("empty", 8, ""),
    ):
        content: dict[str, Any] = dict(VIA) if order is None else {**VIA, "order": order}
        room.state_event(ADMIN, CHILD, content, f"!{name}", ts=ts)
    await deliver(store, room)
    assert await children(store, room) == [
        *("!space", "!upper", "!lower", "!lower-too", "!longest", "!tilde"),
        *("!same-a", "!same-b", "!early", "!late"),
        *("!long", "!other-letter", "!control", "!number", "!empty"),
    ]


@pytest.mark.parametrize("via", [None, "s1.test", {}, {"s1.test": 1}, [], [7], ["s1.test", None]])
async def test_without_via_it_is_no_child(store: Store, via: Any) -> None:
    room = space()
    room.state_event(ADMIN, CHILD, VIA, "!kept:s1.test")
    room.state_event(ADMIN, CHILD, VIA, "!one:s1.test")
    room.state_event(ADMIN, CHILD, {"via": via}, "!one:s1.test")
    room.state_event(ADMIN, CHILD, {"order": "a"}, "!two:s1.test")
    await deliver(store, room)
    assert await children(store, room) == ["!kept:s1.test"]


async def test_other_odd_events(store: Store) -> None:
    room = space()
    room.state_event(ADMIN, CHILD, VIA, "one")
    room.state_event(ADMIN, CHILD, VIA, "")
    room.state_event(ADMIN, CHILD, {"via": ["nul\0"]}, "!nul:s1.test")
    room.state_event(ADMIN, CHILD, {**VIA, "suggested": "true"}, "!kept:s1.test")
    room.state_event(ADMIN, "m.space.parent", VIA, "!parent:s1.test")
    redacted = room.state_event(ADMIN, CHILD, VIA, "!gone:s1.test")
    room.redact(ADMIN, redacted)
    await deliver(store, room)
    [child] = await store.space_children(room.room_id)
    assert (child.room_id, child.suggested) == ("!kept:s1.test", False)


async def test_rooms_without_children(store: Store) -> None:
    room = new_room()
    await deliver(store, room)
    assert await store.space_children(room.room_id) == []
    with pytest.raises(UnknownRoom):
        await store.space_children(RoomId("!nowhere:s1.test"))


async def test_a_lost_state_is_an_error(store: Store) -> None:
    room = space()
    await deliver(store, room)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE rooms SET current_state_group = 10000000")
    with pytest.raises(StorageCorrupt, match="cannot be read"):
        await store.space_children(room.room_id)
