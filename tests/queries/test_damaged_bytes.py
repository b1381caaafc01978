"""A damaged row is `StorageCorrupt` with the event id in every read, and never other bytes."""

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final

import orjson
import pytest

import storage
from storage import SlidingList, SlidingSyncRequest, StorageCorrupt, Store, StoredEvent
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room
from tests.stored_bytes import forms_of

FLIP_A_BIT = "UPDATE events SET json = set_byte(json, 20, get_byte(json, 20) # 4)"
UNKNOWN_DICTIONARY = "UPDATE events SET json = set_byte(json, 2, get_byte(json, 2) # 4)"
ANOTHER_FORM = "UPDATE events SET json = set_byte(json, 0, get_byte(json, 0) # 4)"
ANOTHER_EVENT = """
UPDATE events e
SET json = o.json
FROM (SELECT event_nid, COALESCE(lead(json) OVER w, first_value(json) OVER w) AS json
    FROM events WINDOW w AS (ORDER BY event_nid)) AS o
WHERE e.event_nid = o.event_nid
"""

Scene = tuple[RoomBuilder, BuiltEvent, BuiltEvent]
"""A room, a message with relations, and the last event."""

Read = Callable[[Store, Scene], Awaitable[object]]

READS: Final[dict[str, Read]] = {
    "event": lambda s, w: s.event(w[1].event_id),
    "events": lambda s, w: s.events([one.event_id for one in w[0].events]),
    "messages": lambda s, w: s.messages(w[0].room_id, LOCAL, limit=50),
    "messages forwards": lambda s, w: s.messages(w[0].room_id, LOCAL, direction="f", limit=50),
    "messages with aggregations": lambda s, w: s.messages(
        w[0].room_id, LOCAL, limit=50, aggregations=True
    ),
    "context": lambda s, w: s.context(w[1].event_id, LOCAL),
    "relations": lambda s, w: s.relations(w[1].event_id, LOCAL),
    "aggregations": lambda s, w: s.aggregations(LOCAL, [w[1].event_id]),
    "threads": lambda s, w: s.threads(w[0].room_id, LOCAL),
    "event_near": lambda s, w: s.event_near(w[0].room_id, LOCAL, 0, "f"),
    "unread": lambda s, _: s.unread(LOCAL),
    "sync": lambda s, _: s.sync(LOCAL),
    "sliding_sync": lambda s, _: s.sliding_sync(
        LOCAL,
        SlidingSyncRequest(
            lists={"all": SlidingList([(0, 9)], timeline_limit=9, required_state=[("*", "*")])}
        ),
        device_id="DEVICE",
    ),
    "rooms": lambda s, w: s.rooms([w[0].room_id]),
    "space_children": lambda s, w: s.space_children(w[0].room_id),
    "members": lambda s, w: s.members(w[0].room_id),
    "backfill": lambda s, w: s.backfill(w[0].room_id, [w[2].event_id], 50),
    "backfill for a server": lambda s, w: s.backfill(
        w[0].room_id, [w[2].event_id], 50, server_name="s1.test"
    ),
    "missing_events": lambda s, w: s.missing_events(
        w[0].room_id, [w[0].events[0].event_id], [w[2].event_id], limit=50
    ),
    "timestamp_to_event": lambda s, w: s.timestamp_to_event(w[0].room_id, 0, "f"),
    "event_auth": lambda s, w: s.event_auth(w[2].event_id),
    "an append that needs their contents": lambda s, w: s.append(
        [w[0].topic(ADMIN, "another").pdu]
    ),
}


def scene() -> Scene:
    room = new_room(members=[LOCAL])
    room.name(ADMIN, "A room")
    room.send(ADMIN, "m.space.child", {"via": ["s1.test"]}, state_key="!child:s1.test")
    said = room.message(ADMIN)
    room.edit(ADMIN, said, "better")
    room.threaded(ADMIN, said, "a reply")
    last = room.message(LOCAL)
    return room, said, last


def stored_events(value: object) -> Iterator[StoredEvent]:
    """All events in the answer of a read."""
    if isinstance(value, StoredEvent):
        yield value
        yield from stored_events(value.relations)
    elif isinstance(value, dict):
        for one in value.values():
            yield from stored_events(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from stored_events(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from stored_events(getattr(value, field.name))


async def read(store: Store, given: Scene, name: str) -> tuple[int, list[StorageCorrupt]]:
    """Read, and look at each event; return how many were right, and the errors."""
    pdus = {one.event_id: one.pdu for one in given[0].events}
    right, errors = 0, list[StorageCorrupt]()
    try:
        answer = await READS[name](store, given)
    except StorageCorrupt as error:
        return 0, [error]
    for event in stored_events(answer):
        for name_, wanted in (
            ("raw", pdus[event.event_id]),
            ("json", orjson.loads(pdus[event.event_id])),
        ):
            try:
                assert getattr(event, name_) == wanted
            except StorageCorrupt as error:
                errors.append(error)
            else:
                right += 1
    return right, errors


@pytest.mark.parametrize(
    "damage", [FLIP_A_BIT, UNKNOWN_DICTIONARY, ANOTHER_FORM, ANOTHER_EVENT], ids=str.split
)
async def test_no_read_returns_the_bytes_of_a_damaged_row(dsn: str, damage: str) -> None:
    given = scene()
    async with storage.open(dsn, server_name="s1.test") as store:
        await deliver(store, given[0])
        for name in list(READS)[:-1]:
            right, errors = await read(store, given, name)
            assert (right > 0 or name in {"unread", "rooms"}, errors) == (True, []), name
        async with store.database.connection() as conn:
            await conn.execute(damage)
    ids = {one.event_id for one in given[0].events}
    async with storage.open(dsn, server_name="s1.test") as store:  # without caches
        for name in READS:
            right, errors = await read(store, given, name)
            assert right == 0, name
            assert errors, name
            assert {error.ids["event_id"] for error in errors} <= ids, name


async def test_random_bits(dsn: str) -> None:
    """Either the bytes are those that were received, or the read fails."""
    given, rng = scene(), random.Random(6)
    async with storage.open(dsn, server_name="s1.test") as store:
        await deliver(store, given[0])
        async with store.database.connection() as conn:
            forms = await forms_of(conn._driver)
            noticed = 0
            for _ in range(20):
                changes = [
                    (one, _flipped(form, rng.randrange(8 * len(form))))
                    for one, form in forms.items()
                ]
                await conn._driver.executemany(
                    "UPDATE events SET json = $2 WHERE event_id = $1", changes
                )
                noticed += len((await read(store, given, "messages"))[1])
    assert noticed > 300


def _flipped(form: bytes, bit: int) -> bytes:
    damaged: Any = bytearray(form)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
