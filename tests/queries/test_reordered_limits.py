"""A pagination token is refused once more events were reordered than a read may take.

The client begins again. Other tokens are read as before.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

import storage
from storage import InvalidToken, Store
from storage.queries.pagination.page import Direction
from storage.streams import PaginationToken
from storage.streams.tokens import CursorPosition
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, append, ids, new_room
from tests.queries.test_paging_under_repair import in_thread

MOVING = 5
QUESTIONS = ("messages", "relations", "recursive")


async def ask(
    store: Store, room: RoomBuilder, question: str, direction: Direction, token: str | None
) -> storage.Page:
    if question == "messages":
        return await store.messages(room.room_id, LOCAL, direction=direction, from_=token, limit=2)
    first = room.events[0].event_id
    return await store.relations(
        first, LOCAL, direction=direction, from_=token, limit=2, recurse=question == "recursive"
    )


@pytest.mark.parametrize("direction", ["b", "f"])
@pytest.mark.parametrize(
    "rows_max, places, refused", [(5, 1, False), (4, 1, True), (10, 2, False), (9, 2, True)]
)
async def test_each_move_is_read_for_each_place_of_a_token(
    dsn: str, direction: Direction, rows_max: int, places: int, refused: bool
) -> None:
    room = new_room(members=[LOCAL])
    held = list(room.events)
    missing = [room.message(ADMIN) for _ in range(20)]
    moving = [room.send(ADMIN, "m.room.message", in_thread(room, 0), depth=3)]
    moving += [
        room.send(ADMIN, "m.room.message", in_thread(room, number)) for number in range(1, MOVING)
    ]
    state = list(moving[0].state_before.values())
    async with storage.open(
        dsn, server_name="s1.test", config=storage.Config(traversal_rows_max=rows_max)
    ) as store:
        assert set(await append(store, *held)) == {"stored"}
        assert set(await append(store, *moving, state_before={moving[0].event_id: state})) == {
            "stored"
        }
        ends = {
            question: (await ask(store, room, question, direction, None)).end
            for question in QUESTIONS
        }
        backfilled = missing[10:]
        assert set(
            await append(
                store, *backfilled, origin="backfill", state_before={backfilled[0].event_id: state}
            )
        ) == {"stored"}
        async with store.database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM reordered_events") == MOVING
        for question, end in ends.items():
            assert end is not None
            token = PaginationToken.parse(end, store.deployment_id)
            if places > 1:
                token = replace(
                    token, direction=direction, earlier=(CursorPosition(1, 1, 0),) * (places - 1)
                )
            again = partial(ask, store, room, question, direction)
            with (
                pytest.raises(InvalidToken, match="begin the walk anew")
                if refused
                else nullcontext()
            ):
                await again(token.print(store.deployment_id))
            assert (await again((await again(None)).end)).chunk
        pages = [await store.messages(room.room_id, LOCAL, direction=direction, limit=100)]
        assert sorted(ids(pages[0].chunk)) == sorted(ids([*held, *missing[10:], *moving]))
