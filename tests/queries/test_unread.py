"""Unread counts, compared with brute force; receipts of all kinds, readers, caps, and the work.

`STORAGE_EXAMPLES` says how many random rooms; the default is for every day.
"""

import os
from collections import Counter

import storage
from storage import Store
from storage.ids import EventId, RoomId, UserId
from storage.queries.unread import UNREAD_TYPES, Unread
from storage.testing import BuiltEvent
from tests.queries import thread_worlds as worlds
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, deliver, new_room

WORLDS = int(os.environ.get("STORAGE_EXAMPLES", "20"))
NEEDED = ("main", "threads", "private", "whole", "of a thread", "none", "capped", "related")


def place(store_rows: dict[EventId, storage.StoredEvent], event_id: str) -> int:
    """Return the position of an event in the order of /sync. All events of the rooms are live."""
    return store_rows[EventId(event_id)].stream_ordering or 0


class Reader:
    """A user with receipts that are set as the test goes on, and the counts by brute force."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.receipts: dict[tuple[str, str | None], str] = {}
        self.related = 0

    async def read(self, store: Store, world: worlds.ThreadWorld, seen: Counter[str]) -> None:
        """Set a random receipt."""
        rng = world.rng
        kind = rng.choice(("m.read", "m.read.private"))
        event = rng.choice(world.room.events)
        rows = await store.events([one.event_id for one in world.room.events])
        root = worlds.thread_around(world, rows, event)
        thread = rng.choice((None, "main" if root is None else root, root or "main"))
        await store.receipts.set(
            world.room.room_id, kind, UserId(self.user), event.event_id, {}, thread_id=thread
        )
        seen["private"] += kind == "m.read.private"
        seen["whole" if thread is None else "main only" if thread == "main" else "of a thread"] += 1
        before = self.receipts.get((kind, thread))
        if before is None or place(rows, before) <= place(rows, event.event_id):
            self.receipts[kind, thread] = event.event_id

    def sent(
        self, world: worlds.ThreadWorld, known: worlds.SeenRoom, root: str | None
    ) -> list[BuiltEvent]:
        """Return the user's own messages in the main timeline, or in a thread."""
        return [
            event
            for event in world.room.events
            if (event.sender, event.state_key) == (self.user, None)
            and not worlds.is_edit(event)
            and event.type != "m.reaction"
            and worlds.thread_around(world, known.rows, event) == root
        ]

    def is_there(self, world: worlds.ThreadWorld, event: BuiltEvent) -> bool:
        """Return whether the user is joined at an event."""
        own = event.state_before.get(("m.room.member", self.user))
        return own is not None and world.room.event(own).content["membership"] == "join"

    def expected(
        self, world: worlds.ThreadWorld, known: worlds.SeenRoom, most: int
    ) -> Unread | None:
        """Return the counts; None if the user is not in the room."""
        joined = last_join(world, known, self.user)
        if joined is None:
            return None
        main, threads = 0, Counter[str]()
        for event in world.room.events:
            if event.sender == self.user or worlds.is_edit(event) or not known.counts(event):
                continue
            if not self.is_there(world, event):
                continue
            root = worlds.thread_around(world, known.rows, event)
            given = [
                place(known.rows, upto)
                for (_, thread), upto in self.receipts.items()
                if thread in (None, root or "main")
            ]
            said = [place(known.rows, one.event_id) for one in self.sent(world, known, root)]
            if event.type not in UNREAD_TYPES or place(known.rows, event.event_id) <= max(
                max(given, default=joined), *said, 0
            ):
                continue
            if root is None:
                main += 1
            else:
                threads[root] += 1
            self.related += root is not None and worlds.thread_of(event) is None
        return Unread(
            min(main, most), {EventId(root): min(count, most) for root, count in threads.items()}
        )


def last_join(world: worlds.ThreadWorld, known: worlds.SeenRoom, user: str) -> int | None:
    """Return the position of the join of the current stay: not of a change of the profile."""
    state = world.room.fork(1)[0]
    for branch in world.branches:
        state.merge(branch)
    found = state.state.get(("m.room.member", user))
    if found is None or world.room.event(found).content["membership"] != "join":
        return None
    event: BuiltEvent = world.room.event(found)
    at = place(known.rows, event.event_id)
    while True:
        before = [
            one
            for one in map(world.room.event, event.auth_events)
            if (one.type, one.state_key) == ("m.room.member", user)
            and one.content["membership"] == "join"
        ]
        if not before:
            return at
        event = before[0]
        at = min(at, place(known.rows, event.event_id))


async def test_random_rooms_agree_with_brute_force(store: Store) -> None:
    seen: Counter[str] = Counter()
    for number in range(WORLDS):
        world = worlds.new_world(number)
        readers = [Reader(user) for user in worlds.LOCALS]
        for _ in range(6):
            worlds.grow(world, 10)
            await worlds.deliver(store, world)
            for reader in world.rng.sample(readers, 2):
                if world.rng.random() < 0.7:
                    await reader.read(store, world, seen)
            for reader in readers:
                ignored = world.rng.choice(((), (), (UserId(worlds.USERS[3]),)))
                most = world.rng.choice((1, 3, 100))
                known = await worlds.seen_by(store, world, reader.user, ignored)
                found = await store.unread(
                    reader.user, [world.room.room_id], ignored=ignored, count_max=most
                )
                expected = reader.expected(world, known, most)
                assert found.get(world.room.room_id) == expected, (number, reader.user)
                if expected is not None:
                    seen["main"] += expected.main > 0
                    seen["threads"] += len(expected.threads) > 1
                    seen["none"] += not reader.receipts and expected.total > 0
                    seen["capped"] += expected.main == most
        seen["related"] += sum(reader.related for reader in readers)
    assert all(seen[what] for what in NEEDED), seen


async def unread_of(store: Store, room_id: RoomId, user: str = LOCAL, **how: object) -> Unread:
    """Return the counts of one room."""
    return (await store.unread(user, [room_id], **how))[room_id]  # type: ignore[arg-type]


async def test_without_a_receipt_all_since_the_join_is_unread(store: Store) -> None:
    room = new_room()
    room.message(ADMIN, "before")
    room.join(LOCAL)
    room.message(ADMIN)
    room.message(LOCAL, "my own")
    room.join(LOCAL, displayname="a change of the profile is no join")
    room.join(LOCAL, displayname="nor is the next one")
    said = room.message(ADMIN)
    room.edit(ADMIN, said, "an edit")
    room.react(ADMIN, said)
    room.topic(ADMIN, "state")
    gone = room.message(ADMIN)
    room.redact(ADMIN, gone)
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(1), "the own message is a receipt"
    assert await unread_of(store, room.room_id, types=["m.reaction"]) == Unread(1)
    assert await unread_of(store, room.room_id, ignored=[ADMIN]) == Unread(0)
    assert await unread_of(store, room.room_id, count_max=1) == Unread(1)
    room.leave(LOCAL)
    await deliver(store, room)
    assert await store.unread(LOCAL) == {}
    room.message(ADMIN, "while away")
    room.join(LOCAL)
    room.message(ADMIN)
    await deliver(store, room)
    assert await store.unread(LOCAL) == {room.room_id: Unread(1)}


async def test_an_own_message_is_a_receipt(store: Store) -> None:
    """As the specification demands. Clients send none for their own events."""
    room = new_room(members=[LOCAL, OTHER])
    root = room.message(ADMIN)
    room.threaded(ADMIN, root, "reply")
    await deliver(store, room)
    thread = {root.event_id: 1}
    assert await unread_of(store, room.room_id) == Unread(1, thread)
    room.react(LOCAL, root)
    room.join(LOCAL, displayname="a new name")
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(1, thread), "these say nothing"
    own = room.message(LOCAL, "an answer")
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(0, thread)
    said = [room.message(ADMIN) for _ in range(3)]
    room.edit(LOCAL, own, "an edit")
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(3, thread)
    assert await unread_of(store, room.room_id, count_max=2) == Unread(2, thread)
    room.threaded(LOCAL, root, "in the thread")
    room.threaded(ADMIN, root, "another reply")
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(3, thread)
    user, read = UserId(LOCAL), said[0].event_id
    await store.receipts.set(room.room_id, "m.read", user, read, {}, thread_id="main")
    assert await unread_of(store, room.room_id) == Unread(2, thread)
    assert (await unread_of(store, room.room_id, OTHER)).main == 5


async def test_what_relates_to_a_thread_is_in_it(store: Store) -> None:
    """Client-server API, "Threaded read receipts": up to three relations are followed."""
    room = new_room(members=[LOCAL, OTHER])
    root = room.message(ADMIN)
    chain = [room.threaded(OTHER, root, "reply")]
    for number in range(4):
        target = {"rel_type": "m.reference", "event_id": chain[-1].event_id}
        content = {"msgtype": "m.text", "body": str(number), "m.relates_to": target}
        chain.append(room.send(OTHER, "m.room.message", content))
    to_root = {"rel_type": "m.reference", "event_id": root.event_id}
    room.send(OTHER, "m.sticker", {"m.relates_to": to_root})
    room.react(OTHER, chain[1])
    last = room.message(ADMIN)
    await deliver(store, room)
    user, reacted = UserId(LOCAL), [*UNREAD_TYPES, "m.reaction"]
    main, thread = 1 + 1 + 1 + 1, 1 + 3  # the root, the sticker, the fourth, the last one
    assert await unread_of(store, room.room_id) == Unread(main, {root.event_id: thread})
    found = await unread_of(store, room.room_id, types=reacted)
    assert found == Unread(main, {root.event_id: thread + 1})
    await store.receipts.set(room.room_id, "m.read", user, last.event_id, {}, thread_id="main")
    assert await unread_of(store, room.room_id) == Unread(0, {root.event_id: thread})
    found = await unread_of(store, room.room_id, types=reacted)
    assert found == Unread(0, {root.event_id: thread + 1})
    await store.receipts.set(
        room.room_id, "m.read", user, chain[2].event_id, {}, thread_id=root.event_id
    )
    assert await unread_of(store, room.room_id) == Unread(0, {root.event_id: 1})
    of_reply = {"rel_type": "m.reference", "event_id": chain[0].event_id}
    room.send(LOCAL, "m.poll.response", {"m.relates_to": of_reply})
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(0), "it says that the thread was read"
    room.redact(ADMIN, chain[1])
    room.send(OTHER, "m.sticker", {"m.relates_to": {**of_reply, "event_id": chain[2].event_id}})
    await deliver(store, room)
    assert await unread_of(store, room.room_id) == Unread(1), "a redacted event relates to nothing"


async def test_what_came_while_the_user_was_away_does_not_count(store: Store) -> None:
    room = new_room(members=[OTHER])
    before = room.message(ADMIN, "before the join")
    room.join(LOCAL)
    first = room.message(ADMIN)
    root = room.message(ADMIN, "unread as the user leaves")
    room.leave(LOCAL)
    room.message(ADMIN, "while away")
    room.threaded(ADMIN, root, "while away")
    room.invite(ADMIN, LOCAL)
    room.message(ADMIN, "while invited")
    room.join(LOCAL)
    room.join(LOCAL, displayname="a change of the profile")
    room.message(ADMIN)
    room.threaded(ADMIN, root, "reply")
    await deliver(store, room)
    user, thread = UserId(LOCAL), {root.event_id: 1}
    assert await unread_of(store, room.room_id) == Unread(1, thread)
    for kind, event, thread_id, main in (
        ("m.read.private", before, "main", 3),  # the two of the first stay, one of the second
        ("m.read", first, "main", 2),
        ("m.read", before, None, 2),
    ):
        await store.receipts.set(room.room_id, kind, user, event.event_id, {}, thread_id=thread_id)
        assert await unread_of(store, room.room_id) == Unread(main, thread), kind


async def test_receipts_of_threads(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    root = room.message(ADMIN)
    replies = [room.threaded(OTHER, root, "reply") for _ in range(3)]
    last = room.message(ADMIN)
    await deliver(store, room)

    async def read(event: BuiltEvent, thread_id: str | None, kind: str = "m.read") -> Unread:
        await store.receipts.set(
            room.room_id, kind, UserId(LOCAL), event.event_id, {}, thread_id=thread_id
        )
        return await unread_of(store, room.room_id)

    assert await unread_of(store, room.room_id) == Unread(2, {root.event_id: 3})
    assert await read(last, "main") == Unread(0, {root.event_id: 3})
    assert await read(replies[0], root.event_id) == Unread(0, {root.event_id: 2})
    private = await read(replies[1], root.event_id, "m.read.private")
    assert private == Unread(0, {root.event_id: 1})
    assert await read(replies[1], None) == Unread(0, {root.event_id: 1})
    assert await read(last, None) == Unread(0)
    assert (await unread_of(store, room.room_id, OTHER)).total == 2
    room.threaded(ADMIN, root, "new")
    room.message(ADMIN)
    await deliver(store, room)
    found = await unread_of(store, room.room_id)
    assert (found, found.total) == (Unread(1, {root.event_id: 1}), 2)


async def test_a_receipt_for_a_backfilled_event(store: Store) -> None:
    room = new_room(members=[LOCAL])
    old = [room.message(ADMIN, f"old {number}") for number in range(2)]
    bridge = room.message(ADMIN, "live")
    room.message(ADMIN, "after")
    rest = [event.pdu for event in room.events if event not in old]
    state = {bridge.event_id: list(bridge.state_before.values())}
    await store.append(rest, room_version="11", state_before=state)
    await store.append([event.pdu for event in old], origin="backfill")
    assert (await store.events([old[0].event_id]))[old[0].event_id].stream_ordering is not None
    await store.receipts.set(room.room_id, "m.read", UserId(LOCAL), old[1].event_id, {})
    assert await unread_of(store, room.room_id) == Unread(2)
    await store.receipts.set(room.room_id, "m.read", UserId(LOCAL), bridge.event_id, {})
    assert await unread_of(store, room.room_id) == Unread(1)
    again = await store.receipts.set(room.room_id, "m.read", UserId(LOCAL), old[0].event_id, {})
    assert [one.event_id for one in await store.receipts.of_room(room.room_id)] == [bridge.event_id]
    assert again == (await store.receipts.of_room(room.room_id))[0].stream_id


async def test_hidden_and_erased_events_do_not_count(store: Store) -> None:
    rooms = [
        new_room(seed=seed, visibility=visibility, members=[OTHER])
        for seed, visibility in enumerate(("joined", "shared"))
    ]
    for room in rooms:
        room.message(OTHER, "before the join")
        room.join(LOCAL)
        room.message(OTHER)
        await deliver(store, room)
        assert await unread_of(store, room.room_id) == Unread(1)
        first = room.events[0].event_id
        await store.receipts.set(room.room_id, "m.read", UserId(LOCAL), first, {})
        assert await unread_of(store, room.room_id) == Unread(1), "the reader was not there"
    await store.erase_user(OTHER)
    assert await unread_of(store, rooms[1].room_id) == Unread(1)


async def test_many_rooms_are_one_statement(store: Store, statements: StatementLog) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(5)]
    for count, room in enumerate(rooms):
        for _ in range(count):
            room.message(ADMIN)
        await deliver(store, room)
    statements.take()
    assert await store.unread(LOCAL) == {
        room.room_id: Unread(count) for count, room in enumerate(rooms)
    }
    assert len(statements.take()) == 1
    some = [room.room_id for room in rooms[:2]]
    assert (await store.unread(LOCAL, some)).keys() == set(some)
    assert await store.unread(LOCAL, []) == {}
    assert await store.unread("@nobody:s1.test") == {}
