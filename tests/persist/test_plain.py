"""The short plan of ordinary messages: wherever it decides, it decides as the whole one does (storage/persist/plain.py)."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import storage
from storage.database import Connection
from storage.event import parse
from storage.persist import plain
from storage.persist.context import Needs
from storage.persist.draft import Blocks, Draft
from storage.persist.intake import in_order
from storage.persist.load import load
from storage.persist.plan import Incoming, plan_whole
from storage.persist.prefetch import prefetch
from storage.persist.rows import EventRow
from storage.testing import SHAPES, RoomBuilder, generate_room
from storage.testing.shapes import Odd

SERVER = "s1.test"
NOT_DECIDED = {"caches", "allowed", "pending", "pending_event", "reserved", "answers", "blocks", "room_drafts"}
ODD = Odd(content_hash=0.05, rejected=0.05, soft_failed=0.03, early_redaction=0.03, late=0.1)


def copied(draft: Draft) -> Draft:
    """A draft that can go its own way from here."""
    new = copy.copy(draft)
    for name, value in vars(draft).items():
        if name != "caches" and isinstance(value, (dict, list)):
            setattr(new, name, copy.copy(value))
    new.blocks = copy.deepcopy(draft.blocks)
    new.room_drafts = {
        room_id: replace(
            room, extremities=dict(room.extremities), merged=dict(room.merged), group_digests=copy.deepcopy(room.group_digests)
        )
        for room_id, room in draft.room_drafts.items()
    }
    return new


def decided(draft: Draft) -> dict[str, Any]:
    """All that a draft would write or pass on, in comparable form."""
    found = {name: value for name, value in vars(draft).items() if name not in NOT_DECIDED}
    rooms = {room_id: replace(room, merged={}) for room_id, room in draft.room_drafts.items()}  # what was resolved once more is no decision
    return found | {"rooms": rooms, "left": {name: draft.blocks.left(name) for name in ("event_nids", "state_group_nids")}}


async def decide(conn: Connection, draft: Draft, incoming: Incoming) -> tuple[Draft, bool]:
    """The draft after the event, and whether the short plan decided about it; then both have decided the same."""
    while True:
        whole, short = copied(draft), copied(draft)
        try:
            expected = plan_whole(whole, incoming)
            found = plain.plan(short, incoming.event)
        except Needs as needs:
            await load(conn, draft, needs)
            continue
        if found is None:
            return whole, False
        assert found == expected
        assert decided(short) == decided(whole)
        return short, True


async def decide_all(store: storage.Store, pdus: Iterable[bytes], version: str, *, assume_new: bool) -> int:
    """Plan a batch that is not written; how many of it the short plan decided about."""
    events = [parse(pdu, version) for pdu in pdus]
    incoming = [Incoming(events[at], "live") for at in in_order(events)]
    draft = Draft(store.writer.caches, Blocks(), SERVER)
    count = 0
    async with store.database.connection() as conn:
        await (await prefetch(partial(load, conn), draft, incoming, assume_new=assume_new)).landed()
        for one in incoming:
            draft, short = await decide(conn, draft, one)
            count += short
    return count


@pytest.mark.parametrize("version", ["2", "11", "12"])
@pytest.mark.parametrize("name,odd,least", [("small_chat", False, 200), ("small_chat", True, 30), ("fork_heavy", True, 1)])
async def test_the_short_plan_decides_as_the_whole_one(dsn: str, version: str, name: str, odd: bool, least: int) -> None:
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
    """An outlier that its own auth events allow is named as auth event; then it arrives in the timeline, where it is not allowed."""
    room = RoomBuilder("11", seed=1, checked=False)
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    cited = [room.state[key] for key in (("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.join_rules", ""))]
    before = room.pdus
    side = room.fork(1)[0]
    ban = side.ban(admin, other)
    banned = list(side.state.values())
    profile = side.join(other, displayname="x", auth=[*cited, room.state["m.room.member", other]])
    messages = [room.message(other, f"{number}", auth=[*cited[:2], profile.event_id]) for number in range(3)]
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(before)
        await store.append([ban.pdu, profile.pdu], origin="outlier")
        for message in messages[:2]:
            [result] = await store.append([message.pdu])
            assert result.outcome == "stored"
        [result] = await store.append([profile.pdu], state_before={profile.event_id: banned})
        assert result.outcome == "rejected"
        [result] = await store.append([messages[2].pdu])
        assert (result.outcome, (result.reason or "").partition(":")[0]) == ("rejected", "auth_events.rejected")


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
