"""The rooms that a page of the documentation finds in its database, and the file beside it."""

from pathlib import Path
from typing import Final

import storage
from storage.ids import EventId, RoomId
from storage.testing import RoomBuilder, assembly, write_ndjson

SERVER: Final = "example.org"
ALICE, BOB, REMOTE = "@alice:example.org", "@bob:example.org", "@carol:matrix.test"
ROOM: Final = RoomId("!room:example.org")
MESSAGES: Final = 120


def build(room_id: str, *, seed: int) -> RoomBuilder:
    """Make a room with two local users and one of another server, redactions and a thread."""
    room = RoomBuilder("11", servers=(SERVER, "matrix.test"), seed=seed)
    room.graph.room_id = RoomId(room_id)
    room.send(ALICE, "m.room.create", assembly.create("11", ALICE, {}), state_key="")
    room.join(ALICE)
    room.state_event(ALICE, "m.room.power_levels", assembly.power_levels("11", [ALICE], None))
    room.join_rules(ALICE, "public")
    room.history_visibility(ALICE, "shared")
    room.name(ALICE, "The pantry")
    for user in (BOB, REMOTE):
        room.join(user)
    talk(room)
    return room


def talk(room: RoomBuilder) -> None:
    """Send messages, and what relates to them."""
    sent = [
        room.message((ALICE, BOB, REMOTE)[number % 3], f"{number} jars")
        for number in range(MESSAGES)
    ]
    room.redact(BOB, sent[1], reason="a slip")
    room.edit(ALICE, sent[3], "three jars")
    room.react(BOB, sent[3])
    room.threaded(REMOTE, sent[3], "plum or quince?")
    left, right = room.fork(2)
    left.topic(ALICE, "Jam")
    right.message(REMOTE, "Who has the key?")
    room.merge(left, right)
    room.message(BOB, "It hangs behind the door.")


def middle_event(room: RoomBuilder) -> EventId:
    """Return the message that pages call `$event`."""
    messages = [event for event in room.events if event.type == "m.room.message"]
    return messages[MESSAGES // 2].event_id


async def fill(dsn: str) -> None:
    """Store the room that pages call `!room:example.org`."""
    room = build(ROOM, seed=1)
    async with storage.open(dsn, server_name=SERVER, instance_name="docs") as store:
        await store.append(room.pdus, verify_keys=room.keys)


def write_file(folder: Path) -> None:
    """Write `rooms.ndjson`, with a room that the database does not have."""
    write_ndjson(build("!other:example.org", seed=2).generated(), folder / "rooms.ndjson")
