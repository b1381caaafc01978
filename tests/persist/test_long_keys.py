"""Types and state keys of more than 255 bytes, but at most 255 characters.

Up to version 10, other servers store such an event as rejected, so the room goes on.
"""

from collections.abc import AsyncIterator
from typing import Final

import pytest

import storage
from storage import Store
from storage.persist import Origin
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import SERVER, findings

LONG: Final = "é" * 200
CASES: Final = {
    "type": ("org." + LONG, None),
    "state type": ("org." + LONG, ""),
    "state key": ("org.state", LONG),
    "user id": ("m.room.member", "@" + LONG + ":s1.test"),
    "both": (LONG, "日" * 255),
}


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


def room_with(version: str, case: str) -> tuple[RoomBuilder, BuiltEvent]:
    room = RoomBuilder(version, seed=1, sign=False, checked=False)
    room.start(room.user(1))
    kind, state_key = CASES[case]
    content = {"membership": "invite"} if kind == "m.room.member" else {"a": 1}
    long = room.send(room.user(1), kind, content, state_key=state_key, expected="rejected")
    room.message(room.user(1), "child", prev=[long])
    room.message(room.user(1), "after")
    return room, long


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("origin", ["live", "backfill", "outlier"])
@pytest.mark.parametrize("version", ["1", "6", "10"])
async def test_up_to_version_10_it_is_rejected_and_the_room_goes_on(
    store: Store, version: str, origin: Origin, case: str
) -> None:
    room, long = room_with(version, case)
    results = await store.append(room.pdus, origin=origin)
    assert {one.event_id: one.outcome for one in results} == {
        event.event_id: "rejected" if event is long else "stored" for event in room.events
    }
    kept = await store.event(long.event_id)
    assert kept is not None
    assert "longer than 255 bytes" in str(kept.rejected)
    assert long.event_id not in (await store.current_state(room.room_id)).values()
    assert await findings(store) == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", ["11", "12"])
async def test_from_version_11_on_it_is_invalid(store: Store, version: str, case: str) -> None:
    room, long = room_with(version, case)
    results = await store.append(room.pdus)
    assert [one.outcome for one in results[-3:]] == [
        "invalid",
        "missing_parents",
        "missing_parents",
    ]
    assert results[-3].event_id == long.event_id


@pytest.mark.parametrize("version", ["1", "10"])
@pytest.mark.parametrize("place", ["type", "state_key"])
async def test_more_than_255_characters_are_invalid(store: Store, version: str, place: str) -> None:
    room = RoomBuilder(version, seed=1, sign=False, checked=False)
    room.start(room.user(1))
    kind, key = ("t" * 256, "") if place == "type" else ("t", "k" * 256)
    room.state_event(room.user(1), kind, {}, key)
    results = await store.append(room.pdus)
    assert (results[-1].outcome, results[-1].reason) == (
        "invalid",
        f"{place} is longer than 255 bytes",
    )


@pytest.mark.parametrize("membership", ["invite", "knock", "leave"])
async def test_out_of_band_it_is_invalid(store: Store, membership: str) -> None:
    room = RoomBuilder("7", seed=1, sign=False, checked=False)
    room.start("@admin:s9.test")
    user = "@" + LONG + ":" + SERVER
    sender = "@admin:s9.test" if membership == "invite" else user[:60] + ":" + SERVER
    event = room.member(sender, user, membership)
    [result] = await store.append([event.pdu], origin="out_of_band", room_version="7")
    assert (result.outcome, result.reason) == ("invalid", "state_key is longer than 255 bytes")
