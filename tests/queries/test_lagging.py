"""Sync tokens of a time when a writer was behind.

In a room they cover what lies up to that writer's position, for pages as for relations.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

import storage
from storage import Store
from storage.ids import EventId, RoomId
from storage.queries.pagination.page import Direction, between, exact
from storage.streams import SyncToken, VectorPosition
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room

ALONE = storage.Config(follow_ms=3_600_000)


class LaggingRelations(NamedTuple):
    """A root and what relates to it, said by one writer, while another one wrote elsewhere.

    ``earlier`` covers none of those, ``later`` the first; each has the other writer beyond the next
    of them.
    """

    store: Store
    room_id: RoomId
    root: EventId
    said: list[EventId]
    earlier: str
    later: str


@pytest.fixture
async def store(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name="s1.test", observer=statements, config=ALONE
    ) as opened:
        yield opened


@pytest.fixture
async def scene(dsn: str, store: Store) -> AsyncIterator[LaggingRelations]:
    room, elsewhere = new_room(members=[LOCAL]), new_room(seed=1)
    root = room.message(ADMIN)
    await deliver(store, room)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=ALONE
    ) as other:
        await deliver(other, elsewhere)
        said, tokens = [], []
        for _ in range(4):
            before = await _reached(store)
            relation = {"m.relates_to": {"rel_type": "m.reference", "event_id": root.event_id}}
            said.append(room.send(ADMIN, "m.room.message", {"body": "*"} | relation))
            await append(store, said[-1])
            await append(other, elsewhere.message(ADMIN))
            position = VectorPosition.of(
                before.position("main"), {"other": (await _reached(store)).position("other")}
            )
            assert position.items, "a writer is behind"
            tokens.append(SyncToken.of({"events": position}).print(store.deployment_id))
        yield LaggingRelations(store, room.room_id, root.event_id, ids(said), *tokens[:2])


async def _reached(store: Store) -> VectorPosition:
    return store.positions_of((await store.sync(LOCAL)).next_batch)["events"]


@pytest.mark.parametrize("direction", ["b", "f"])
async def test_pages_between_them_take_two_statements_and_are_exact(
    scene: LaggingRelations, statements: StatementLog, direction: Direction
) -> None:
    from_, to = (scene.later, scene.earlier) if direction == "b" else (scene.earlier, scene.later)
    statements.take()
    page = await scene.store.messages(scene.room_id, LOCAL, from_=from_, to=to, direction=direction)
    assert len(statements.take()) == 2
    assert ids(page.chunk) == scene.said[:1]
    newer = await scene.store.messages(scene.room_id, LOCAL, to=scene.later)
    assert ids(newer.chunk) == scene.said[:0:-1]


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("direction", ["b", "f"])
async def test_relations_between_them_are_exact(
    scene: LaggingRelations, statements: StatementLog, direction: Direction, recurse: bool
) -> None:
    from_, to = (scene.later, scene.earlier) if direction == "b" else (scene.earlier, scene.later)
    statements.take()
    page = await scene.store.relations(
        scene.root, LOCAL, from_=from_, to=to, direction=direction, recurse=recurse
    )
    assert len(statements.take()) == 2
    assert ids(page.chunk) == scene.said[:1]
    older = await scene.store.relations(scene.root, LOCAL, from_=scene.later, recurse=recurse)
    assert ids(older.chunk) == scene.said[:1]


async def test_what_may_still_be_committed_is_not_covered(scene: LaggingRelations) -> None:
    """A page is read after the positions were found.

    By then the writer that is behind may have committed below the other one's position.
    """
    position = scene.store.positions_of(scene.later)["events"]
    asked = between(scene.later, None, "b", 10, scene.store.deployment_id)
    async with scene.store.database.connection() as conn:
        held = await scene.store.events(scene.said)
        first, second = (held[event_id].stream_ordering or 0 for event_id in scene.said[:2])
        assert (
            first
            <= (await exact(conn, asked, event_id=scene.root)).start.live
            < second
            < position.furthest()
        )
        nothing_since = VectorPosition(
            scene.store.positions_of((await scene.store.sync(LOCAL)).next_batch)["events"].min,
            (("other", 2**40),),
        )
        token = SyncToken.of({"events": nothing_since}).print(scene.store.deployment_id)
        late = await exact(
            conn, between(token, None, "b", 10, scene.store.deployment_id), room_id=scene.room_id
        )
        assert late.start.live == nothing_since.min
