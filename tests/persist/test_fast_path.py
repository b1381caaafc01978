"""The fast path of ordinary messages: its results equal those of the whole plan.

The fast path is in storage/persist/plan/fast_path.py.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

import storage
from storage.database import Connection
from storage.event import parse
from storage.persist.load.on_demand import load
from storage.persist.load.prefetch import prefetch
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import EventRow
from storage.persist.plan import fast_path
from storage.persist.plan.event import plan_whole
from storage.persist.receive import in_order
from storage.testing import SHAPES, RoomBuilder, generate_room
from storage.testing.world import Odd

T = TypeVar("T")
SERVER = "s1.test"
VIEWS = ("names", "rooms", "events", "states", "auth_graph", "visibility", "members")
SHARED = {"caches", "blocks", "names", "rooms", "events", "answers"}
"""Attributes of a view that refer to another object of the change set."""
NOT_DECIDED = SHARED | {"allowed", "pending", "pending_event", "reserved", "room_changes"}
ODD = Odd(content_hash=0.05, rejected=0.05, soft_failed=0.03, early_redaction=0.03, late=0.1)


def copied(change_set: ChangeSet) -> ChangeSet:
    """A change set that can go its own way from here."""
    new = copy.copy(change_set)
    new.blocks = copy.deepcopy(change_set.blocks)
    new.answers = copied_view(change_set.answers)
    for name in VIEWS:
        setattr(new, name, copied_view(getattr(change_set, name)))
    for name in VIEWS:
        view = getattr(new, name)
        for shared in SHARED & vars(view).keys():
            setattr(view, shared, getattr(new, shared))
    new.rooms.room_changes = {
        room_id: replace(
            room,
            extremities=dict(room.extremities),
            merged=dict(room.merged),
            group_digests=copy.deepcopy(room.group_digests),
        )
        for room_id, room in change_set.rooms.room_changes.items()
    }
    return new


def copied_view(view: T) -> T:
    new = copy.copy(view)
    for name, value in vars(view).items():
        if name not in SHARED:
            setattr(new, name, copy.copy(value))
    return new


def decided(change_set: ChangeSet) -> dict[str, Any]:
    """All that a change set would write or pass on, in comparable form."""
    found = {
        f"{view}.{name}": value
        for view in VIEWS
        for name, value in vars(getattr(change_set, view)).items()
        if name not in NOT_DECIDED
    }
    # A repeated resolution is not a decision.
    rooms = {
        room_id: replace(room, merged={}) for room_id, room in change_set.rooms.room_changes.items()
    }
    return found | {
        "rooms": rooms,
        "left": {name: change_set.blocks.left(name) for name in ("event_nids", "state_group_nids")},
    }


async def decide(
    conn: Connection, change_set: ChangeSet, incoming: IncomingEvent
) -> tuple[ChangeSet, bool]:
    """Return the change set after the event, and whether the fast path decided.

    If it did, check that the whole plan decides the same.
    """
    while True:
        whole, short = copied(change_set), copied(change_set)
        try:
            expected = plan_whole(whole, incoming)
            found = fast_path.plan_message(short, incoming.event)
        except MissingData as needs:
            await load(conn, change_set, needs)
            continue
        if found is None:
            return whole, False
        assert found == expected
        assert decided(short) == decided(whole)
        return short, True


async def decide_all(
    store: storage.Store, pdus: Iterable[bytes], version: str, *, assume_new: bool
) -> int:
    """Plan a batch that is not written; how many of it the short plan decided about."""
    events = [parse(pdu, version) for pdu in pdus]
    incoming = [IncomingEvent(events[at], "live") for at in in_order(events)]
    change_set = ChangeSet(store.writer.caches, NidBlocks(), SERVER)
    count = 0
    async with store.database.connection() as conn:
        await (
            await prefetch(partial(load, conn), change_set, incoming, assume_new=assume_new)
        ).finished()
        for one in incoming:
            change_set, short = await decide(conn, change_set, one)
            count += short
    return count


@pytest.mark.parametrize("version", ["2", "11", "12"])
@pytest.mark.parametrize(
    "name,odd,least",
    [("small_chat", False, 200), ("small_chat", True, 30), ("fork_heavy", True, 1)],
)
async def test_the_short_plan_decides_as_the_whole_one(
    dsn: str, version: str, name: str, odd: bool, least: int
) -> None:
    shape = SHAPES[name].replaced(version=version, **({"odd": ODD} if odd else {}))
    room = generate_room(shape, 300, seed=int(version))
    short = 0
    async with storage.open(dsn, server_name=SERVER) as store:
        for at in range(0, 300, 25):
            batch = [event.pdu for event in room.events[at : at + 25]]
            short += await decide_all(store, batch, version, assume_new=at % 50 == 0)
            await store.append(batch, room_version=version)
    assert short >= least


async def test_what_an_auth_event_allowed_is_forgotten_when_it_is_rejected(dsn: str) -> None:
    """An auth event that is an outlier is allowed by its own auth events.

    Then it arrives in the timeline, where it is not allowed.
    """
    room = RoomBuilder("11", seed=1, checked=False)
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    cited = [
        room.state[key]
        for key in (("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.join_rules", ""))
    ]
    before = room.pdus
    side = room.fork(1)[0]
    ban = side.ban(admin, other)
    banned = list(side.state.values())
    profile = side.join(other, displayname="x", auth=[*cited, room.state["m.room.member", other]])
    messages = [
        room.message(other, f"{number}", auth=[*cited[:2], profile.event_id]) for number in range(3)
    ]
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(before)
        await store.append([ban.pdu, profile.pdu], origin="outlier")
        for message in messages[:2]:
            [result] = await store.append([message.pdu])
            assert result.outcome == "stored"
        [result] = await store.append([profile.pdu], state_before={profile.event_id: banned})
        assert result.outcome == "rejected"
        [result] = await store.append([messages[2].pdu])
        assert (result.outcome, (result.reason or "").partition(":")[0]) == (
            "rejected",
            "auth_events.rejected",
        )


async def test_a_message_by_nobody_in_the_room_is_left_to_the_whole_plan(dsn: str) -> None:
    room = RoomBuilder("11", seed=1, checked=False)
    room.start(room.user(1))
    before = room.pdus
    stranger = room.message(room.user(2))
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(before)
        assert await decide_all(store, [stranger.pdu], "11", assume_new=True) == 0


def test_a_row_with_other_values_is_as_replaced() -> None:
    row = EventRow._make(range(len(EventRow._fields)))
    assert row.at(-1) == row._replace(stream_ordering=-1)
    assert row.with_state(-1, -2) == row._replace(state_group_after=-1, audience=-2)
