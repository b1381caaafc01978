"""Events that stand elsewhere in the order than their audience: pages find them all the same, as they are remembered as strays."""

import pytest

from storage import Store
from storage.persist import audience
from storage.visibility import places
from tests.queries.rooms import ADMIN, LOCAL, append, new_room


async def paged(store: Store) -> tuple[set[str], set[str]]:
    """What one who left sees by pages, and by the filter, of a room in which a server was cut off for longer than the slack."""
    room = new_room(visibility="joined", members=[LOCAL])
    main, cut_off = room.fork(2)
    main.leave(LOCAL)
    late = [cut_off.message(ADMIN) for _ in range(2 * places.SLACK)]
    for _ in range(3 * places.SLACK):
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
            return pages, {*await store.visible_to_user(LOCAL, [event.event_id for event in room.events])}


async def test_a_server_that_was_cut_off(store: Store) -> None:
    pages, visible = await paged(store)
    assert pages == visible
    assert len(visible) > 2 * places.SLACK


async def test_the_comparison_sees_strays_that_were_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience, "note_place", lambda *_: None)
    pages, visible = await paged(store)
    assert pages < visible
