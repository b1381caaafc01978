"""Events that come again: which are authorised again, which stay, and their visibility.

And guests.
"""

import pytest

from storage import Store
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, ids, new_room


async def test_an_outlier_is_shown_once_it_is_accepted_in_the_timeline(store: Store) -> None:
    """An outlier is authorised by its auth events alone and visible to nobody.

    In the timeline it is authorised by the state, and visible.
    """
    room = new_room(members=[LOCAL])
    await append(store, *room.events)
    join = room.join(OTHER)
    assert await append(store, join, origin="outlier") == ["stored"]
    for user in (LOCAL, OTHER):
        assert await store.visible_to_user(user, [join.event_id]) == set()
    assert await append(store, join) == ["stored"]
    assert await append(store, join) == ["duplicate"]
    for user in (LOCAL, OTHER):
        assert await store.visible_to_user(user, [join.event_id]) == {join.event_id}


@pytest.mark.parametrize("again", ["live", "backfill", "outlier"])
async def test_a_rejected_outlier_is_judged_again_in_the_timeline_by_the_same_auth_events(
    store: Store, again: str
) -> None:
    """Auth events are part of the event, so the event is rejected again.

    It stays hidden, and so does the history that it would have opened.
    """
    room = new_room(visibility="shared", members=[LOCAL])
    said = room.message(ADMIN)
    room.ban(ADMIN, OTHER)
    refused = room.join(OTHER, expected="rejected")
    await append(store, *(event for event in room.events if event is not refused))
    assert await append(store, refused, origin="outlier") == ["rejected"]
    assert await append(store, refused, origin=again) == [
        "duplicate" if again == "outlier" else "rejected"
    ]
    assert await append(store, refused) == ["duplicate" if again != "outlier" else "rejected"]
    assert await append(store, refused) == ["duplicate"]
    for user in (LOCAL, OTHER):
        assert await store.visible_to_user(user, [refused.event_id]) == set()
    assert await store.visible_to_user(OTHER, [said.event_id]) == set()


async def test_a_rejected_event_of_the_timeline_stays_rejected_whatever_the_room_comes_to(
    store: Store,
) -> None:
    """After the pardon the same event is a duplicate and stays hidden.

    A new join is accepted and makes visible what a join makes visible.
    """
    room = new_room(visibility="shared", members=[LOCAL])
    said = room.message(ADMIN)
    room.ban(ADMIN, OTHER)
    refused = room.join(OTHER, expected="rejected")
    await append(store, *room.events)
    room.unban(ADMIN, OTHER)
    joined = room.join(OTHER)
    asked = ids([said, refused, joined])
    assert await store.visible_to_user(OTHER, asked) == set()
    assert await append(store, *room.events[-2:]) == ["stored", "stored"]
    assert await append(store, refused) == ["duplicate"]
    for user in (LOCAL, OTHER):
        assert await store.visible_to_user(user, asked) == set(ids([said, joined]))


@pytest.mark.parametrize("guest_access", ["can_join", "forbidden", None])
async def test_a_guest_sees_what_is_world_readable_until_they_join(
    store: Store, guest_access: str | None
) -> None:
    """A guest is a user id like any other: `guest_access` does not change visibility."""
    room = new_room(visibility="world_readable")
    guest = "@123:s1.test"
    if guest_access is not None:
        room.state_event(ADMIN, "m.room.guest_access", {"guest_access": guest_access})
    opened = room.message(ADMIN)
    room.history_visibility(ADMIN, "joined")
    closed = room.message(ADMIN)
    await append(store, *room.events)
    assert await store.visible_to_user(guest, ids([opened, closed])) == {opened.event_id}
    assert (await store.sync(guest)).is_empty
    page = await store.messages(room.room_id, guest, limit=100)
    assert opened.event_id in ids(page.chunk)
    assert closed.event_id not in ids(page.chunk)
    join, later = room.join(guest), room.message(ADMIN)
    await append(store, join, later)
    assert await store.visible_to_user(guest, ids([opened, closed, join, later])) == set(
        ids([opened, join, later])
    )
