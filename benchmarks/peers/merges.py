"""Storing an event that merges two branches of a large room, here and in Synapse."""

from functools import partial
from typing import Any, Final

from benchmarks.harness import percentiles, spent, spread, stored
from benchmarks.peers import limits
from benchmarks.peers.reads import (
    ME,
    PeerRooms,
    ReadCost,
    ask_here,
    note_cost,
    settled,
    share_of_limit,
    store_on_both,
)
from benchmarks.peers.writes import Sides, still

BRANCH: Final = 10  # state events on each branch of a fork


async def merges(sides: Sides, world: PeerRooms, rounds: int) -> dict[str, Any]:
    """Measure storing an event that merges two branches of the hall, ten changes each.

    Half of the changes have the same keys. Its limit is the durable insert of one bare row. The
    peer's caches are emptied before every other round; the other rounds are its warm ones.
    """
    assert sides.peer is not None
    asked = {name: ReadCost() for name in ("ours", "synapse_cold", "synapse_warm")}
    ours, bare = {"cold": list[float](), "warm": list[float]()}, list[float]()
    for number in range(2 * rounds + 2):
        last = await _fork(sides, world, number)
        name = "warm" if number % 2 else "cold"
        into = asked if number >= 2 else {side: ReadCost() for side in asked}
        await settled(sides)
        still()
        await sides.peer.ask("still")
        await ask_here(sides, partial(stored, sides.store, [last]), into["ours"])
        if number >= 2:
            ours[name].append(into["ours"].clock[-1])
            bare.append(1 / await limits.bare_inserts(sides.raw, [[[last]]]))
        if name == "cold":
            await sides.peer.ask("forget")
        await sides.peer.load([[[last]]])
        with spent(sides.bench.server) as used:
            told = await sides.peer.ask("persist", how="single")
        note_cost(into[f"synapse_{name}"], told, used.backends)
        world.hall.message(ME, f"merged {number}")
        await store_on_both(sides, world.unsent(world.hall))
    told = {name: side.told() for name, side in asked.items()} | {
        "rounds": rounds,
        "limit": {"ms": percentiles(bare, factor=1_000)},
    }
    told |= share_of_limit(bare, asked["ours"])
    for name, own in ours.items():
        theirs = asked[f"synapse_{name}"].clock
        told[f"ratio_{name}"] = spread(
            [other / mine for mine, other in zip(own, theirs, strict=True)], digits=2
        )
        told[f"cpu_ratio_{name}"] = round(asked[f"synapse_{name}"].cpu() / asked["ours"].cpu(), 2)
    return told


async def _fork(sides: Sides, world: PeerRooms, number: int) -> bytes:
    """Create two branches; store all but the last event."""
    room = world.hall
    (other,) = room.fork(1)
    for branch, first in ((room, 0), (other, BRANCH // 2)):
        for key in range(first, first + BRANCH):
            branch.state_event(ME, "m.test", {"turn": number, "from": first}, f"key {key}")
    room.merge(other)
    *before, last = world.unsent(room)
    await store_on_both(sides, before)
    return last
