"""A clock that goes back is noticed when events are written, also after a restart."""

import logging
import time

import pytest

import storage
from storage import Store
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER

ALICE = "@alice:s1.test"
NOW = 1_900_000_000_000


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage()
        for one in caplog.records
        if one.levelno == logging.WARNING and one.name == "storage.persist.commit.publish"
    ]


async def send_at(
    store: Store, room: RoomBuilder, monkeypatch: pytest.MonkeyPatch, clock: int
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: clock * 1_000_000)
    await store.append([room.message(ALICE, "hello").pdu])


async def test_a_clock_that_goes_back_is_logged_and_counted(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = RoomBuilder("11")
    room.start(ALICE)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        measures = store.measures
        for clock in (NOW, NOW - 59_000, NOW + 1, NOW + 86_400_000):
            await send_at(store, room, monkeypatch, clock)
        assert (measures.clock_steps_back, warnings(caplog)) == (0, [])
        await send_at(store, room, monkeypatch, 1_000)
        await send_at(store, room, monkeypatch, 2_000)  # it stays wrong: once is enough
        assert measures.clock_steps_back == 1
        assert "to 1970-01-01T00:00:01" in warnings(caplog)[0]
        await send_at(store, room, monkeypatch, NOW + 86_400_000)
        assert measures.clock_steps_back == 1
    caplog.clear()
    async with storage.open(dsn, server_name=SERVER) as store:
        await send_at(store, room, monkeypatch, NOW)
        assert store.measures.clock_steps_back == 1
        assert "went back by 86400 s" in warnings(caplog)[0]
