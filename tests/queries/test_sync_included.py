"""A sync with receipts, account data, to-device messages and unread counts.

`STORAGE_EXAMPLES` says how many random runs; the default is for every day.
"""

import os
import random
from collections import Counter
from typing import Any

import orjson
import pytest

import storage
from storage import Store, Sync, SyncFilter
from storage.errors import InputError
from storage.ids import RoomId, UserId
from storage.queries.sync import included
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, deliver, new_room

RUNS = int(os.environ.get("STORAGE_EXAMPLES", "12"))
ALL: Any = ("receipts", "account_data", "to_device", "unread")
USER, FRIEND = UserId(LOCAL), UserId(OTHER)
NEEDED = (
    "receipts",
    "private",
    "room data",
    "left",
    "data",
    "messages",
    "only facts",
    "unread",
    "nothing",
)


async def look(store: Store, since: str | None = None, include: Any = ALL, **how: Any) -> Sync:
    """Return a sync of the device "A" of the user."""
    return await store.sync(LOCAL, since=since, device_id="A", include=include, **how)


async def read(store: Store, user: str, event: BuiltEvent, kind: str = "m.read") -> int:
    """Set a receipt."""
    return await store.receipts.set(event.room_id, kind, UserId(user), event.event_id, {"ts": 1})


async def test_a_device_gets_everything_by_default(store: Store) -> None:
    await deliver(store, new_room(members=[LOCAL, OTHER]))
    await store.account_data.set(USER, "m.direct", {"a": 1})
    await store.to_device.send({USER: {"A": {"one": 1}}})
    for_device = await store.sync(LOCAL, device_id="A")
    assert (for_device.account_data, for_device.to_device) == ({"m.direct": {"a": 1}}, [{"one": 1}])
    assert all(room.unread is not None for room in for_device.join.values())
    for bare in (await store.sync(LOCAL), await store.sync(LOCAL, device_id="A", include=())):
        assert (bare.account_data, list(bare.to_device)) == ({}, [])
        assert all(room.unread is None for room in bare.join.values())


async def test_an_inbox_comes_in_parts(store: Store) -> None:
    """Each message once, also where the parts of an initial sync have the first ones."""
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    for room in rooms:
        await deliver(store, room)
    for number in range(7):
        await store.to_device.send({USER: {"A": {"n": number}}})
    found = await look(store, to_device_limit=2, rooms_limit=1)
    messages, room_ids = list(found.to_device), set(found.join)
    while found.next_rooms is not None:
        found = await look(store, found.next_rooms, to_device_limit=2, rooms_limit=1)
        assert not found.to_device
        room_ids |= found.join.keys()
    assert room_ids == {room.room_id for room in rooms}
    assert messages == [{"n": 0}, {"n": 1}]
    while not (found := await look(store, found.next_batch, to_device_limit=2)).is_empty:
        assert not found.join
        messages += found.to_device
        at = store.positions_of(found.next_batch)["to_device"]
        assert await store.to_device.delete(USER, "A", at) >= len(found.to_device)
        assert len(await store.to_device.inbox(USER, "A")) == 7 - len(messages)
    assert messages == [{"n": number} for number in range(7)]
    assert (await look(store, to_device_limit=1)).to_device == []
    for wrong in (0, -1, "2"):
        with pytest.raises(InputError):
            await look(store, to_device_limit=wrong)


async def test_an_initial_sync_has_everything(store: Store) -> None:
    room, other = new_room(members=[LOCAL, OTHER]), new_room(seed=1)
    said = room.message(ADMIN)
    await deliver(store, room)
    await deliver(store, other)
    await read(store, ADMIN, said)
    await read(store, OTHER, said, "m.read.private")
    await store.account_data.set(USER, "m.direct", {"a": 1})
    await store.account_data.set(USER, "m.tag", {"b": 1}, room_id=room.room_id)
    await store.account_data.set(USER, "m.tag", {"c": 1}, room_id=other.room_id)
    await store.account_data.set(FRIEND, "m.direct", {"d": 1})
    await store.to_device.send({USER: {"A": {"one": 1}, "B": {"two": 2}}, FRIEND: {"A": {}}})
    found = await look(store)
    assert (found.account_data, found.to_device) == ({"m.direct": {"a": 1}}, [{"one": 1}])
    assert found.join.keys() == {room.room_id}
    one = found.join[room.room_id]
    assert [(row.user_id, row.event_id) for row in one.receipts] == [(ADMIN, said.event_id)]
    assert one.account_data == {"m.tag": {"b": 1}}
    assert one.unread == storage.Unread(1)
    mine = (await store.sync(OTHER, include=["receipts"])).join[room.room_id]
    assert {row.receipt_type for row in mine.receipts} == {"m.read", "m.read.private"}
    assert (mine.account_data, mine.unread) == ({}, None)


async def test_by_default_nothing_is_added(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN)
    await deliver(store, room)
    first = await store.sync(LOCAL)
    await read(store, ADMIN, said)
    await store.account_data.set(USER, "m.direct", {})
    statements.take()
    found = await store.sync(LOCAL, since=first.next_batch)
    assert found.is_empty
    assert len(statements.take()) == 1


async def test_rooms_with_new_facts_alone_are_in_join(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL, OTHER]) for seed in range(4)]
    for room in rooms:
        room.message(ADMIN)
        await deliver(store, room)
    token = (await look(store)).next_batch
    assert (await look(store, token)).is_empty
    await read(store, OTHER, rooms[0].events[-1])
    await store.account_data.set(USER, "m.tag", {"b": 1}, room_id=rooms[1].room_id)
    await read(store, OTHER, rooms[2].events[-1], "m.read.private")
    found = await look(store, token)
    assert found.join.keys() == {rooms[0].room_id, rooms[1].room_id}
    one = found.join[rooms[0].room_id]
    assert ([row.user_id for row in one.receipts], one.unread) == ([OTHER], storage.Unread(1))
    assert (one.timeline.events, one.state, one.timeline.limited) == ([], [], False)
    page = await store.messages(rooms[0].room_id, LOCAL, from_=one.timeline.prev_batch, limit=1)
    assert page.chunk[0].event_id == rooms[0].events[-1].event_id
    assert (await look(store, found.next_batch)).is_empty
    some = SyncFilter(rooms=[rooms[0].room_id, rooms[1].room_id], not_rooms=[rooms[0].room_id])
    assert (await look(store, token, filter=some)).join.keys() == {rooms[1].room_id}
    await read(store, LOCAL, rooms[3].events[-1], "m.read.private")
    after = await look(store, found.next_batch, ["unread"])
    assert {room_id: room.unread for room_id, room in after.join.items()} == {
        rooms[3].room_id: storage.Unread(0)
    }
    assert after.join[rooms[3].room_id].receipts == []


async def test_facts_of_rooms_that_the_user_is_not_in(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, left, strange = (new_room(seed=seed, members=[OTHER]) for seed in range(3))
    for one in (room, left):
        one.join(LOCAL)
    left.leave(LOCAL)
    for one in (room, left, strange):
        await deliver(store, one)
    token = (await look(store)).next_batch
    for one in (room, left, strange):
        await read(store, OTHER, one.events[-1])
        await store.account_data.set(USER, "m.tag", {}, room_id=one.room_id)
    for by_position in (included.BY_POSITION, 0):
        monkeypatch.setattr(included, "BY_POSITION", by_position)
        found = await look(store, token)
        assert found.join.keys() == {room.room_id}
        assert {one: part.account_data for one, part in found.leave.items()} == {
            left.room_id: {"m.tag": {}}
        }
        assert [part.receipts for part in found.leave.values()] == [[]]


@pytest.mark.parametrize("end", ["leave", "kick", "ban", "forget", "reset", "invite", "knock"])
async def test_account_data_of_a_room_that_the_user_left(store: Store, end: str) -> None:
    room = new_room(join_rule="knock" if end == "knock" else "public")
    branch = room.at(room.events[-1].event_id)
    if end != "knock":
        room.join(LOCAL)
    await deliver(store, room)
    match end:
        case "kick":
            room.kick(ADMIN, LOCAL)
        case "ban":
            room.ban(ADMIN, LOCAL)
        case "reset":
            assert await append(store, branch.join_rules(ADMIN, "invite")) == ["stored"]
            assert await store.membership(room.room_id, LOCAL) is None
        case "knock":
            room.member(LOCAL, LOCAL, "knock")
        case _:
            room.leave(LOCAL)
    if end == "invite":
        room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    if end == "forget":
        await store.forget(LOCAL, room.room_id)
    token = (await look(store)).next_batch
    await store.account_data.set(USER, "m.tag", {"b": 1}, room_id=room.room_id)
    found = await look(store, token)
    assert (found.join, found.invite, found.knock) == ({}, {}, {})
    if end in ("forget", "invite", "knock"):
        assert found.leave == {}
        return
    one = found.leave[room.room_id]
    assert (one.account_data, one.timeline.events, one.state) == ({"m.tag": {"b": 1}}, [], [])
    form = await storage.responses.sync(store, LOCAL, found)
    assert form["rooms"]["leave"][room.room_id]["account_data"] == {
        "events": [{"type": "m.tag", "content": {"b": 1}}]
    }
    assert (await look(store, found.next_batch)).is_empty
    other = SyncFilter(not_rooms=[room.room_id])
    assert (await look(store, token, filter=other)).is_empty


async def test_a_left_room_has_all_account_data_if_the_client_has_none(store: Store) -> None:
    """Of a stay between two syncs, of a refused invite, and of old leaves that a filter adds."""
    stayed, refused, known = (new_room(seed=seed, members=[OTHER]) for seed in range(3))
    refused.invite(ADMIN, LOCAL)
    known.join(LOCAL)
    for one in (stayed, refused, known):
        await deliver(store, one)
        await store.account_data.set(USER, "m.tag", {"b": 1}, room_id=one.room_id)
        await read(store, OTHER, one.events[-1])
    token = (await look(store)).next_batch
    stayed.join(LOCAL)
    for one in (stayed, refused, known):
        one.leave(LOCAL)
        await deliver(store, one)
    tag = {"m.tag": {"b": 1}}
    found = await look(store, token)
    assert {one: part.account_data for one, part in found.leave.items()} == {
        stayed.room_id: tag,
        refused.room_id: tag,
        known.room_id: {},
    }
    assert (await look(store)).leave == {}
    whole = await look(store, filter=SyncFilter(include_leave=True))
    assert whole.leave.keys() >= {stayed.room_id, known.room_id}
    assert all((part.account_data, part.receipts) == (tag, []) for part in whole.leave.values())


async def test_a_message_alone_with_facts(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL, OTHER])
    await deliver(store, room)
    token = (await look(store)).next_batch
    for include in (("unread",), ("receipts",)):
        for _ in range(2):  # the caches are filled by the first sync
            said = room.message(ADMIN)
            await deliver(store, room)
            if "receipts" in include:
                await read(store, OTHER, said)
            found = await look(store, token, include)
            token = found.next_batch
            one = found.join[room.room_id]
            assert [event.event_id for event in one.timeline.events] == [said.event_id]
            assert (one.unread is not None) == ("unread" in include)
            assert len(one.receipts) == ("receipts" in include)
    room.message(ADMIN)
    await deliver(store, room)
    statements.take()
    assert (await look(store, token, ("receipts",))).join[room.room_id].timeline.events
    assert len(statements.take()) == 1  # no receipts are new


async def test_a_room_that_the_user_joined_has_all_of_it(store: Store) -> None:
    room = new_room(members=[OTHER])
    said = room.message(ADMIN)
    await deliver(store, room)
    await read(store, OTHER, said)
    await store.account_data.set(USER, "m.tag", {"b": 1}, room_id=room.room_id)
    token = (await look(store)).next_batch
    await read(store, ADMIN, said)
    await store.account_data.set(USER, "m.new", {}, room_id=room.room_id)
    room.join(LOCAL)
    await deliver(store, room)
    one = (await look(store, token)).join[room.room_id]
    assert [row.user_id for row in one.receipts] == [OTHER, ADMIN]
    assert one.account_data == {"m.tag": {"b": 1}, "m.new": {}}


async def test_parts_of_an_initial_sync(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    for room in rooms:
        await deliver(store, room)
        await read(store, ADMIN, room.events[-1])
    await store.account_data.set(USER, "m.direct", {"a": 1})
    await store.to_device.send({USER: {"A": {"one": 1}}})
    part = await look(store, rooms_limit=2)
    assert (len(part.join), part.account_data, part.to_device) == (
        2,
        {"m.direct": {"a": 1}},
        [{"one": 1}],
    )
    rest = await look(store, part.next_rooms, rooms_limit=2)
    assert (len(rest.join), rest.account_data, rest.to_device) == (1, {}, [])
    assert all(len(one.receipts) == 1 for one in (*part.join.values(), *rest.join.values()))


async def test_the_number_of_statements_is_constant(
    store: Store, statements: StatementLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for by_position in (included.BY_POSITION, 0):
        monkeypatch.setattr(included, "BY_POSITION", by_position)
        counts = set[int]()
        for many in (1, 6):
            rooms = [
                new_room(seed=10 * many + seed + by_position, members=[LOCAL])
                for seed in range(many)
            ]
            for room in rooms:
                await deliver(store, room)
            token = (await look(store)).next_batch
            for room in rooms:
                room.topic(ADMIN, "new")
                await deliver(store, room)
                await read(store, ADMIN, room.events[-1])
                await store.account_data.set(USER, "m.tag", {}, room_id=room.room_id)
                await store.to_device.send({USER: {"A": {"one": 1}}})
            statements.take()
            found = await look(store, token)
            counts.add(len(statements.take()))
            assert len(found.join) == len(found.to_device) == many
        assert counts == {5}


async def test_a_long_poll_returns_the_news(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    token = (await look(store)).next_batch
    await store.to_device.send({USER: {"A": {"one": 1}}})
    found = await look(store, token, timeout_ms=60_000)
    assert found.to_device == [{"one": 1}]
    await read(store, ADMIN, room.events[-1])
    found = await look(store, found.next_batch, timeout_ms=60_000)
    assert len(found.join[room.room_id].receipts) == 1
    assert found.to_device == []


async def test_wrong_parts(store: Store) -> None:
    with pytest.raises(InputError, match="device_id"):
        await store.sync(LOCAL, include=["to_device"])
    with pytest.raises(InputError, match="typing"):
        await store.sync(LOCAL, include=["typing"])  # type: ignore[list-item]


class IncludedWorld:
    """Rooms, a log of facts, and by brute force what a sync has to include."""

    def __init__(self, rng: random.Random, rooms: list[RoomBuilder], stores: list[Store]) -> None:
        self.rng = rng
        self.rooms = rooms
        self.stores = stores
        self.left = {room.room_id for room in rooms if room.membership(LOCAL) == "leave"}
        self.sent: list[tuple[int, str, int]] = []

    async def step(self) -> None:
        """Write one fact, by one of the stores."""
        rng, store, room = self.rng, self.rng.choice(self.stores), self.rng.choice(self.rooms)
        user = rng.choice((ADMIN, LOCAL, OTHER))
        match rng.randrange(5):
            case 0:
                room.message(ADMIN)
                await store.append([room.events[-1].pdu])
            case 1 | 2:
                kind = rng.choice(("m.read", "m.read.private"))
                await read(store, user, rng.choice(room.events), kind)
            case 3:
                place = rng.choice((None, room.room_id))
                content = {"n": rng.random()}
                await store.account_data.set(
                    UserId(user), f"m.{rng.randrange(3)}", content, room_id=place
                )
            case _:
                number = len(self.sent)
                at = await store.to_device.send({UserId(user): {"A": {"n": number}}})
                self.sent.append((number, user, at))

    async def check(self, since: str, seen: Counter[str]) -> str:
        """Compare a sync since a token; return the next one."""
        store = self.stores[0]
        found = await look(store, since)
        before, after = store.positions_of(since), store.positions_of(found.next_batch)
        receipts: dict[RoomId, list[tuple[str, str]]] = {}
        for fact in await store.streams["receipts"].rows(0, 1 << 40, 10_000):
            room_id, kind, user, event_id, *_ = fact.row
            if before["receipts"].covers(fact.instance_name, fact.stream_id):
                continue
            assert after["receipts"].covers(fact.instance_name, fact.stream_id)
            is_left = room_id in self.left
            if (user == LOCAL or kind == "m.read") and not is_left:
                receipts.setdefault(RoomId(room_id), []).append((user, event_id))
                seen["private"] += kind != "m.read"
        data: dict[str | None, dict[str, Any]] = {}
        for fact in await store.streams["account_data"].rows(0, 1 << 40, 10_000):
            user, place, kind = fact.row
            new = not before["account_data"].covers(fact.instance_name, fact.stream_id)
            if user == LOCAL and new:
                contents = await store.account_data.get(USER, room_id=place)
                data.setdefault(place, {})[kind] = contents[kind]
        assert found.account_data == data.pop(None, {})
        assert found.leave.keys() == data.keys() & self.left
        assert {
            one: room.account_data
            for one, room in (*found.join.items(), *found.leave.items())
            if room.account_data
        } == data
        assert receipts == {
            one: [(row.user_id, row.event_id) for row in room.receipts]
            for one, room in found.join.items()
            if room.receipts
        }
        waiting = await store.to_device.inbox(USER, "A", after=before["to_device"])
        assert found.to_device == [orjson.loads(row.content) for row in waiting]
        counts = await store.unread(LOCAL)
        assert all(room.unread == counts[one] for one, room in found.join.items())
        _note(found, seen)
        return found.next_batch


def _note(found: Sync, seen: Counter[str]) -> None:
    rooms = found.join.values()
    seen["receipts"] += any(room.receipts for room in rooms)
    seen["room data"] += any(room.account_data for room in rooms)
    seen["left"] += bool(found.leave)
    seen["data"] += bool(found.account_data)
    seen["messages"] += bool(found.to_device)
    seen["only facts"] += any(not room.timeline.events for room in rooms)
    seen["unread"] += any(room.unread and room.unread.total for room in rooms)
    seen["nothing"] += found.is_empty


async def test_random_facts_of_two_writers_agree_with_brute_force(
    store: Store, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    async with storage.open(dsn, server_name="s1.test", instance_name="second") as second:
        for number in range(RUNS):
            monkeypatch.setattr(included, "BY_POSITION", (2_000, 0)[number % 2])
            rng = random.Random(number)
            rooms = [new_room(seed=100 * number + one, members=[LOCAL, OTHER]) for one in range(3)]
            rooms[number % 2].leave(LOCAL)
            for room in rooms:
                await deliver(store, room)
            world = IncludedWorld(rng, rooms, [store, second])
            tokens = [(await look(store)).next_batch]
            for _ in range(12):
                for _ in range(rng.randrange(4)):
                    await world.step()
                since = rng.choice((tokens[-1], tokens[-1], tokens[0]))
                tokens.append(await world.check(since, seen))
    assert all(seen[what] for what in NEEDED), seen
