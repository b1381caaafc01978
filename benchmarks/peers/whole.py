"""Whole rooms, stored here and in Synapse: the disk usage and the WAL of an event.

Sizes are those of all tables and indexes, less those before; nothing is vacuumed. "Like for like"
leaves out the peer's tables for search, and those whose rows it deletes after some time. The
write-ahead log is counted while a side stores, with the page images that follow a checkpoint. It
cannot be divided. The peer's background work afterwards is awaited, and counts.

Both get batches of 100. Of each, the peer stores the first event as if it came alone, the others as
a chain. In a chain alone it would never write a whole state again, as it does at every hundredth
change of single events, and finding states would be slow.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from benchmarks.harness import append_all
from benchmarks.peers.writes import BATCH, SQL_WAL, Sides
from storage.testing import RoomBuilder


class Whole(NamedTuple):
    """A room, with all its events in order."""

    room_id: str
    pdus: list[bytes]

    def batches(self) -> list[list[bytes]]:
        return [self.pdus[at : at + BATCH] for at in range(0, len(self.pdus), BATCH)]


STAYS: Final = "@stays:s1.test"


def storm(users: int) -> Whole:
    """Return a room that users join and leave one after the other.

    One user of this server stays: Synapse would leave a room without any.
    """
    room = RoomBuilder("11", seed=40_000, checked=False, exact=False)
    room.start(STAYS)
    for number in range(users):
        user = f"@spam{number}:s{number % 20}.test"
        room.join(user)
        room.leave(user)
    return Whole(room.room_id, room.pdus)


async def store(sides: Sides, rooms: Sequence[Whole]) -> dict[str, Any]:
    """Store the rooms on both sides, one after the other; return the cost per event."""
    assert sides.peer is not None
    events, before = sum(len(room.pdus) for room in rooms), await sides.sizes()
    extras = await sides.extras()
    for room in rooms:
        await sides.peer.ask("room", room_id=room.room_id, room_version="11")
    log = [int(await sides.looks["ours"].fetchval(SQL_WAL))]
    for room in rooms:
        await append_all(sides.store, room.pdus, BATCH)
    log.append(int(await sides.looks["ours"].fetchval(SQL_WAL)))
    for room in rooms:
        await sides.peer.load([room.batches()])
        await sides.peer.ask("persist", how="steps")
    await sides.peer.ask("settle", quiet_seconds=1.0, timeout_seconds=30.0)
    log.append(int(await sides.looks["ours"].fetchval(SQL_WAL)))
    after, extras = await sides.sizes(), await sides.extras() - extras
    told: dict[str, Any] = {
        "events": events,
        "raw_bytes_per_event": round(sum(len(pdu) for room in rooms for pdu in room.pdus) / events),
    }
    for at, name in enumerate(("ours", "synapse")):
        size, written = (after[name] - before[name]) / events, (log[at + 1] - log[at]) / events
        told[name] = {"bytes_per_event": round(size), "wal_bytes_per_event": round(written)}
    ratios = {
        of: round(told["synapse"][key] / told["ours"][key], 2)
        for of, key in (("bytes", "bytes_per_event"), ("wal", "wal_bytes_per_event"))
    }
    like = told["synapse"]["bytes_per_event"] - round(extras / events)
    told["synapse"]["like_for_like_bytes_per_event"] = like
    ratios["like_for_like"] = round(like / told["ours"]["bytes_per_event"], 2)
    return told | {"ratio": ratios}
