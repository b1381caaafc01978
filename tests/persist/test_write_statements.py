"""The small statements of the write store what the whole one stores, in every column."""

from collections import Counter

import pytest

import storage
from storage.database.placeholders import NumberedStatement
from storage.persist.write import all_tables, messages_only
from storage.testing import SHAPES, RoomBuilder, generate_room
from tests.persist.whole_rows import rows_of

SERVER = "s1.test"


NAMES = {
    all_tables.SQL_WRITE: "whole",
    all_tables.SQL_WRITE_STATE_EVENT: "state event",
    messages_only.SQL_WRITE_ONE_MESSAGE: "message",
}


class Statements(Counter[str]):
    """Counts the statements of the write by name."""

    def before(self, statement: str) -> None:
        if name := NAMES.get(statement):
            self[name] += 1

    def after(self, statement: str, seconds: float) -> None: ...


def visits() -> list[bytes]:
    """Members of this server and of others come, go, are invited, kicked and banned."""
    room = RoomBuilder("11", seed=3)
    admin = room.user(1)
    room.start(admin)
    for number, server in enumerate((SERVER, "s2.test", "s3.test") * 3):
        guest = f"@guest{number}:{server}"
        room.join(guest)
        room.leave(guest)
        room.invite(admin, guest)
        room.join(guest)
        room.ban(admin, guest)
        room.topic(admin, f"after {guest}")
    return room.pdus


@pytest.mark.parametrize("shape", ["visits", "small_chat", "fork_heavy"])
async def test_the_small_statements_store_what_the_whole_one_stores(
    dsn: str, another_dsn: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    pdus = (
        visits()
        if shape == "visits"
        else [event.pdu for event in generate_room(SHAPES[shape], 120, seed=5)]
    )
    stored, counts = [], []
    for database in (dsn, another_dsn):
        if database == another_dsn:
            monkeypatch.setattr(NumberedStatement, "takes", lambda *_: False)
            monkeypatch.setattr(messages_only, "has_messages_only", lambda _: False)
        used = Statements()
        async with storage.open(database, server_name=SERVER, observer=used) as store:
            for pdu in pdus:
                await store.append([pdu], room_version="11")
        stored.append(await rows_of(database))
        counts.append(used)
    assert stored[0] == stored[1]
    assert counts[0]["state event"] > 10
    assert counts[1].keys() == {"whole"}
    assert counts[0].total() == counts[1].total()
