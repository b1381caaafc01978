"""The threads of a room, compared with brute force; pages, readers, and the work of a page.

`STORAGE_EXAMPLES` says how many random rooms; the default is for every day.
"""

import os
from collections import Counter
from collections.abc import Sequence

import pytest

import storage
from storage import Store
from storage.errors import InputError, InvalidToken, UnknownRoom
from storage.ids import RoomId, UserId
from storage.queries import threads as queries
from tests.queries import thread_worlds as worlds
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, deliver, ids, new_room

WORLDS = int(os.environ.get("STORAGE_EXAMPLES", "6"))
NEEDED = ("several pages", "participated differs", "ignored differs", "readers differ")


async def listed(store: Store, room_id: RoomId, user: str, limit: int, **how: object) -> list[str]:
    """Return the roots of all pages."""
    found: list[str] = []
    token = None
    while True:
        page = await store.threads(room_id, user, from_=token, limit=limit, **how)  # type: ignore[arg-type]
        found += ids(page.chunk)
        token = page.end
        if token is None:
            return found


async def test_random_rooms_agree_with_brute_force(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for number in range(WORLDS):
        monkeypatch.setattr(queries, "CHUNK", 1 + number % 4 * 8)
        monkeypatch.setattr(queries, "PARTICIPATED_ROWS_MAX", 1 + number % 3 * 6)
        world = worlds.new_world(number)
        for _ in range(3):
            worlds.grow(world, 16)
            await worlds.deliver(store, world)
        answers = []
        for user in worlds.LOCALS:
            for ignored in ((), (worlds.USERS[3],), (ADMIN,)):
                known = await worlds.seen_by(store, world, user, ignored)
                for participated in (False, True):
                    expected = worlds.threads(world, known, user, participated=participated)
                    for limit in (1, 3, 50):
                        found = await listed(
                            store,
                            world.room.room_id,
                            user,
                            limit,
                            include="participated" if participated else "all",
                            ignored=ignored,
                        )
                        assert found == expected, (number, user, ignored, participated, limit)
                    answers.append((user, ignored, participated, tuple(expected)))
        seen["several pages"] += any(len(answer[3]) > 3 for answer in answers)
        seen["participated differs"] += _differ(answers, 2)
        seen["ignored differs"] += _differ(answers, 1)
        seen["readers differ"] += _differ(answers, 0)
    assert all(seen[what] for what in NEEDED), seen


def _differ(answers: Sequence[tuple[object, ...]], field: int) -> bool:
    """Return whether two answers differ, of requests that differ in one field only."""
    rest = {tuple(one for place, one in enumerate(answer) if place != field) for answer in answers}
    requests = {
        tuple(one for place, one in enumerate(answer[:3]) if place != field) for answer in answers
    }
    return len(rest) > len(requests)


async def test_the_latest_reply_decides(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    roots = [room.message(ADMIN, f"root {number}") for number in range(3)]
    replies = [room.threaded(OTHER, root, "reply") for root in (*roots, *reversed(roots))]
    last = replies[-1]
    await deliver(store, room)
    page = await store.threads(room.room_id, LOCAL)
    assert (ids(page.chunk), page.end) == (ids(roots), None)
    shown = page.chunk[0].relations
    assert shown is not None
    assert shown.thread is not None
    assert (shown.thread.latest_event.event_id, shown.thread.count) == (last.event_id, 2)
    room.redact(OTHER, last)
    await deliver(store, room)
    assert ids((await store.threads(room.room_id, LOCAL)).chunk) == ids(
        [roots[1], roots[2], roots[0]]
    )
    assert (await store.threads(room.room_id, LOCAL, include="participated")).chunk == []
    room.threaded(LOCAL, roots[2], "me too")
    await deliver(store, room)
    mine = await store.threads(room.room_id, LOCAL, include="participated")
    assert ids(mine.chunk) == [roots[2].event_id]
    admin = await store.threads(room.room_id, ADMIN, include="participated")
    assert ids(admin.chunk) == ids([roots[2], roots[1], roots[0]])


async def test_a_reader_who_left_has_the_threads_of_then(store: Store) -> None:
    room = new_room(visibility="joined", members=[LOCAL])
    early, late = room.message(ADMIN), room.message(ADMIN)
    room.threaded(ADMIN, late, "one")
    room.threaded(ADMIN, early, "two")
    room.leave(LOCAL)
    for _ in range(150):
        room.threaded(ADMIN, late, "after")
    unseen = room.message(ADMIN)
    room.threaded(ADMIN, unseen, "hidden root")
    await deliver(store, room)
    assert ids((await store.threads(room.room_id, LOCAL)).chunk) == ids([early, late])
    assert ids((await store.threads(room.room_id, ADMIN)).chunk) == ids([unseen, late, early])


async def test_erased_and_redacted_roots(store: Store) -> None:
    room = new_room(members=[OTHER])
    root, other = room.message(OTHER), room.message(ADMIN)
    room.threaded(ADMIN, root, "one")
    room.threaded(ADMIN, other, "two")
    room.threaded(OTHER, other, "three")
    room.join(LOCAL)
    room.redact(ADMIN, other)
    await deliver(store, room)
    await store.erase_user(UserId(OTHER))
    page = await store.threads(room.room_id, LOCAL)
    assert [(one.event_id, one.content) for one in page.chunk] == [
        (other.event_id, {}),
        (root.event_id, {}),
    ]
    counts = [
        one.relations.thread.count for one in page.chunk if one.relations and one.relations.thread
    ]
    assert counts == [1, 1]


async def test_a_root_that_arrives_by_backfill(store: Store) -> None:
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    room.threaded(ADMIN, root, "reply")
    rest = [event.pdu for event in room.events if event.event_id != root.event_id]
    state = {room.events[-1].event_id: list(root.state_before.values())}
    await store.append(rest, room_version="11", state_before=state)
    assert (await store.threads(room.room_id, LOCAL)).chunk == []
    await store.append([root.pdu], origin="backfill")
    assert ids((await store.threads(room.room_id, LOCAL)).chunk) == [root.event_id]


async def test_a_page_is_five_statements_at_most(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    for _ in range(25):
        room.threaded(ADMIN, room.message(ADMIN), "reply")
    await deliver(store, room)
    statements.take()
    page = await store.threads(room.room_id, LOCAL)
    assert len(page.chunk) == 20
    assert len(statements.take()) == 3
    rest = await store.threads(room.room_id, LOCAL, from_=page.end)
    assert (len(rest.chunk), rest.end) == (5, None)
    assert len(statements.take()) == 3


async def test_a_busy_thread_is_read_in_growing_chunks(
    store: Store, dsn: str, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    quiet, busy = room.message(ADMIN), room.message(ADMIN)
    room.threaded(ADMIN, quiet, "one")
    for _ in range(300):
        room.threaded(ADMIN, busy, "again")
    await deliver(store, room)
    statements.take()
    page = await store.threads(room.room_id, LOCAL, limit=20)
    assert (ids(page.chunk), page.end) == (ids([busy, quiet]), None)
    assert len(statements.take()) == 5  # of each chunk two, and the aggregations
    config = storage.Config(traversal_rows_max=100)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=config
    ) as bounded:
        page = await bounded.threads(room.room_id, LOCAL, limit=20)
        assert ids(page.chunk) == [busy.event_id]
        assert page.end is not None
        assert await listed(bounded, room.room_id, LOCAL, 20) == ids([busy, quiet])


async def test_wrong_arguments(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    with pytest.raises(UnknownRoom):
        await store.threads(RoomId("!nowhere:s1.test"), LOCAL)
    with pytest.raises(InputError, match="all or participated"):
        await store.threads(room.room_id, LOCAL, include="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidToken):
        await store.threads(room.room_id, LOCAL, from_="p1~nothing")
    assert (await store.threads(room.room_id, "@stranger:s1.test")).chunk == []
    assert (await store.threads(room.room_id, LOCAL, limit=0)).chunk == []
