"""Out-of-range events: their topological position lies outside the range of their audience.

Pages find them all the same, because the room's `out_of_range` records them.
"""

import pytest

from storage import Store
from storage.persist.plan import audience
from storage.testing import BuiltEvent, RoomBuilder
from storage.visibility import multirange
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, new_room
from tests.queries.test_plans import WHOLE, page_query, plan_of


async def paged(store: Store) -> tuple[set[str], set[str]]:
    """A server was cut off from the room for longer than the slack.

    A user who left gets the same events by pages as by the filter.
    """
    room = new_room(visibility="joined", members=[LOCAL])
    main, cut_off = room.fork(2)
    main.leave(LOCAL)
    late = [cut_off.message(ADMIN) for _ in range(2 * multirange.SLACK)]
    for _ in range(3 * multirange.SLACK):
        main.message(ADMIN)
    held = [event for event in room.events if event not in late]
    await append(store, *held)
    await append(store, *late)
    pages = set[str]()
    at = None
    while True:
        page = await store.messages(room.room_id, LOCAL, from_=at, limit=50)
        pages |= {event.event_id for event in page.chunk}
        at = page.end
        if at is None:
            return pages, {
                *await store.visible_to_user(LOCAL, [event.event_id for event in room.events])
            }


async def test_a_server_that_was_cut_off(store: Store) -> None:
    pages, visible = await paged(store)
    assert pages == visible
    assert len(visible) > 2 * multirange.SLACK


async def test_the_comparison_sees_strays_that_were_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audience, "note_out_of_range", lambda *_: None)
    pages, visible = await paged(store)
    assert pages < visible


SQL_STRAYS = """
SELECT COALESCE(sum(upper(part) - lower(part)), 0)
FROM rooms CROSS JOIN unnest(out_of_range) AS part
WHERE room_id = $1::text
"""


async def joined_over_a_gap(store: Store, visibility: str) -> tuple[RoomBuilder, list[BuiltEvent]]:
    """Return a room and its history, which is backfilled after a local user has joined."""
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, history_visibility=visibility)
    history = [room.message(REMOTE) for _ in range(3 * multirange.AROUND)]
    for number in range(10):
        history += [
            room.join(f"@passing{number}:s2.test"),
            room.message(REMOTE),
            room.leave(f"@passing{number}:s2.test"),
        ]
    state = list(room.state.values())
    join = room.join(LOCAL)
    await append(
        store,
        *(event for event in room.events if event.state_key is not None and event is not join),
        origin="outlier",
    )
    await append(store, join, state_before={join.event_id: state})
    await append(store, *(room.message(REMOTE) for _ in range(3)))
    await append(store, *room.events, origin="backfill")
    return room, history


@pytest.mark.parametrize("visibility", ["joined", "invited"])
async def test_history_that_no_local_user_may_see_costs_no_reader_anything(
    store: Store, visibility: str
) -> None:
    room, history = await joined_over_a_gap(store, visibility)
    page = await store.messages(room.room_id, LOCAL, limit=100)
    assert [event.type for event in page.chunk[:4]] == ["m.room.message"] * 3 + ["m.room.member"]
    async with store.database.connection() as conn:
        assert await conn.fetchval(SQL_STRAYS, room.room_id) <= multirange.AROUND
    plan = await plan_of(store, *page_query(room.room_id, LOCAL, WHOLE[0]))
    assert plan.event_rows < len(history) / 2


async def test_shared_history_is_paged_through_and_not_by_those_who_were_never_there(
    store: Store,
) -> None:
    room, history = await joined_over_a_gap(store, "shared")
    page = await store.messages(room.room_id, LOCAL, limit=1000)
    assert {event.event_id for event in page.chunk} == {event.event_id for event in room.events}
    plan = await plan_of(store, *page_query(room.room_id, OTHER, WHOLE[0]))
    assert plan.event_rows < len(history) / 2
