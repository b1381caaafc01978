"""An event that was read: its bytes are parsed on demand, otherwise it is a plain value."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

import storage
from storage import StorageCorrupt, Store, StoredEvent
from storage import arguments as args
from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.event import redact
from storage.ids import EventId, RoomId
from storage.queries import events as event_queries
from storage.queries.events import StoredEventRow, stored_of
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, append, new_room

RAW = b'{"content":{"body":"Hi"},"depth":7,"sender":"@user:s1.test","state_key":"","type":"m.test"}'
ROW = StoredEventRow(
    5,
    EventId("$event"),
    RoomId("!room:s1.test"),
    "11",
    3,
    2,
    7,
    None,
    None,
    soft_failed=False,
    outlier=False,
    redacted_form=False,
    encoding=0,
    json=StoredBytes(RAW),
)


def test_it_tells_what_the_bytes_say() -> None:
    event = stored_of(ROW)
    assert (event.type, event.sender, event.state_key, event.depth, event.content) == (
        "m.test",
        "@user:s1.test",
        "",
        7,
        {"body": "Hi"},
    )
    assert event.json is event.json
    assert repr(event) == "<StoredEvent $event m.test state_key='' sender=@user:s1.test at 2/3>"


def test_it_is_equal_to_one_that_was_not_asked_yet_also_after_pickling() -> None:
    event, other = stored_of(ROW), stored_of(ROW)
    assert event.type == "m.test"
    assert event == other
    assert hash(event) == hash(other)
    for copied in (
        pickle.loads(pickle.dumps(event)),
        pickle.loads(pickle.dumps(other)),
        copy.deepcopy(other),
        replace(event),
    ):
        assert type(copied) is StoredEvent
        assert copied == event
        assert copied.json == event.json
    assert stored_of(ROW._replace(redacted_by="$redaction")) != event
    assert replace(event, withheld=True) != event


def test_nothing_of_it_can_be_changed() -> None:
    event = stored_of(ROW)
    with pytest.raises(FrozenInstanceError):
        event.event_id = EventId("$other")  # type: ignore[misc]
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        event.raw = b""  # type: ignore[misc]
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        event.type = "m.other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "row, redacted, withheld, body",
    [
        (ROW, True, False, "Hi"),
        (ROW._replace(redacted_by="$redaction"), True, False, None),
        (ROW._replace(redacted_by="$redaction"), False, False, "Hi"),
        (ROW._replace(redacted_form=True), False, False, None),
        (ROW, False, True, None),
        (ROW._replace(redacted_by="$redaction"), True, True, None),
    ],
)
def test_the_form_that_is_shown(
    row: StoredEventRow, body: str | None, *, redacted: bool, withheld: bool
) -> None:
    event = stored_of(row, redacted=redacted, withheld=withheld)
    assert event.content.get("body") == body
    assert (event.json == redact(event.json, "11")) == (body is None)
    assert (b"Hi" in event.raw) == (not withheld)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b"{}",
        b'{"type":1,"sender":"@a:b","depth":1}',
        b'{"type":"m.test","sender":"@a:b"}',
    ],
)
def test_bytes_that_are_no_event_any_more_are_named(raw: bytes) -> None:
    event = stored_of(ROW._replace(json=StoredBytes(raw)))
    with pytest.raises(StorageCorrupt, match=r"\$event") as caught:
        assert event.type
    assert caught.value.ids == {"event_id": "$event"}
    assert repr(event) == "<StoredEvent $event unreadable at 2/3>"
    with pytest.raises(StorageCorrupt):
        stored_of(ROW._replace(json=StoredBytes(raw)), withheld=True)


async def test_one_bad_event_does_not_keep_the_others_from_being_read(store: Store) -> None:
    room = new_room(members=[LOCAL])
    good, bad = room.message(ADMIN), room.message(ADMIN)
    await append(store, *room.events)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE events SET json = 'x' WHERE event_id = $1::text", bad.event_id)
    chunk = (await store.messages(room.room_id, LOCAL, limit=2)).chunk
    assert chunk[1].raw == good.pdu
    with pytest.raises(StorageCorrupt):
        assert chunk[0].json


@pytest.mark.parametrize("redact", [True, False])
async def test_each_id_is_read_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, redact: bool
) -> None:
    read: list[list[EventId]] = []
    events = event_queries.events

    async def noted(conn: Connection, ids: list[EventId], **how: Any) -> dict[EventId, StoredEvent]:
        read.append(ids)
        return await events(conn, ids, **how)

    monkeypatch.setattr(event_queries, "events", noted)
    ids = [EventId("$one"), EventId("$two")]
    assert await store.events(ids * 1_000, redact=redact) == {}
    assert read == [ids]


@pytest.mark.parametrize(
    "check, values",
    [
        (args.events, ["$a", "$b"]),
        (args.rooms, ["!a:s1.test", "!b:s1.test"]),
        (args.users, ["@a:s1.test", "@b:s1.test"]),
        (args.texts, ["a", "\u00e4"]),
        (args.keys, [("a", ""), ("a", "b")]),
        (args.memberships, ["join", "ban"]),
        (lambda given: list(args.filtered(given, "types") or ()), ["b", "a"]),
    ],
)
def test_repeated_values_of_a_list_count_once(check: Callable[[Any], Any], values: Any) -> None:
    assert check(values * 3) == values


async def test_a_state_key_is_found_however_it_is_spelled(dsn: str) -> None:
    room = RoomBuilder("11", sign=False)
    admin = room.user(1)
    room.start(admin)
    topic, message = room.topic(admin, "new"), room.message(admin, "state_key and \\u0061")
    spelled = topic.pdu.replace(b'"state_key"', b'"state\\u005fkey"')
    assert spelled != topic.pdu
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append([spelled if event is topic else event.pdu for event in room.events])
    async with storage.open(dsn, server_name="s1.test") as store:
        stored = await store.events([topic.event_id, message.event_id])
        assert stored[topic.event_id].raw == spelled
        assert [event.state_key for event in stored.values()] == ["", None]
