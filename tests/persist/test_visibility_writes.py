"""The cost of visibility per write: rows in proportion to the change, whatever the room's size."""

from collections.abc import AsyncIterator
from itertools import islice
from typing import NamedTuple

import pytest

import storage
from storage import Store
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, append, deliver, new_room

LOCALS = [f"@local{number}:s1.test" for number in range(60)]
REMOTES = [f"@remote{number}:h{number % 20}.test" for number in range(60)]

SQL_ROWS = """
SELECT 'visibility ' || principal_nid AS key, xmin::text AS written FROM visibility
UNION ALL
SELECT 'audience ' || audience, xmin::text FROM audiences
"""


class RowVersion(NamedTuple):
    """A row, and by which transaction it was written last."""

    key: str
    written: str


@pytest.fixture
async def store(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", observer=statements) as opened:
        yield opened


@pytest.fixture
def statements() -> StatementLog:
    return StatementLog()


async def rows(store: Store) -> set[RowVersion]:
    async with store.database.connection() as conn:
        return set(await conn.fetch(SQL_ROWS, row=RowVersion))


async def written(store: Store, *events: BuiltEvent) -> int:
    """How many rows of who may see what an append writes."""
    before = await rows(store)
    assert set(await append(store, *events)) == {"stored"}
    return len(await rows(store) - before)


async def filled(store: Store, size: int, *, seed: int = 0) -> RoomBuilder:
    room = new_room(visibility="shared", members=[*LOCALS[:size], *REMOTES[:size]], seed=seed)
    await deliver(store, room)
    return room


@pytest.mark.parametrize("size", [2, 60])
async def test_rows_do_not_grow_with_the_members(store: Store, size: int) -> None:
    room = await filled(store, size)
    room.invite(ADMIN, "@guest:s1.test")
    room.invite(ADMIN, "@guest:elsewhere.test")
    await deliver(store, room)
    steps: list[tuple[list[BuiltEvent], int]] = [
        ([room.message(ADMIN) for _ in range(10)], 0),
        ([room.topic(ADMIN, "no member, no visibility")], 0),
        ([room.join(ADMIN, displayname="another name")], 1),  # their last join
        ([room.join("@new:s1.test")], 3),  # the user, the server's count, the new number
        ([room.join("@new:new.test")], 2),  # the server, the new number
        ([room.join("@second:new.test")], 1),  # the server's count
        ([room.leave("@new:s1.test")], 3),
        ([room.history_visibility(ADMIN, "world_readable")], 2),  # everybody, the new number
        (
            [room.history_visibility(ADMIN, "joined")],
            3,
        ),  # everybody, whoever joined, the new number
        (
            [room.history_visibility(ADMIN, "invited")],
            3,
        ),  # the invited user and server, the new number
        (
            [room.history_visibility(ADMIN, "shared")],
            6,
        ),  # these, whoever joined, and for the event itself a number that branches off
    ]
    assert [await written(store, *events) for events, _ in steps] == [count for _, count in steps]


async def test_a_change_for_everybody_is_one_statement(
    store: Store, statements: StatementLog
) -> None:
    room = await filled(store, 60)
    for event, count in (
        (room.history_visibility(ADMIN, "world_readable"), 1),
        (room.message(ADMIN), 0),
    ):
        statements.sent.clear()
        await append(store, event)
        assert sum("INTO visibility" in statement for _, statement in statements.sent) == count


async def test_rows_grow_with_what_changed(store: Store) -> None:
    room, members = await filled(store, 60), iter(LOCALS)
    for count in (1, 10, 40):
        leaving = [room.kick(ADMIN, member) for member in islice(members, count)]
        assert count < await written(store, *leaving) <= 2 * count + 1
