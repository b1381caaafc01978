"""A client that applies `state`, then the timeline, where the user may not see a change of state.

Such a change came while the user was away. It is in no timeline, but the timeline begins before it.
"""

import pytest

from storage import EventFilter, Store, SyncFilter, responses
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, bodies, deliver, ids, new_room

State = dict[tuple[str, str], str]


class ClassicClient:
    """It believes the JSON of /sync without ``use_state_after``."""

    def __init__(self, store: Store, room: RoomBuilder) -> None:
        self.store, self.room_id = store, room.room_id
        self.since: str | None = None
        self.state: State = {}
        self.timeline: list[str] = []
        self.limited, self.prev_batch = False, ""

    async def sync(self, limit: int = 100) -> None:
        found = await self.store.sync(LOCAL, since=self.since, timeline_limit=limit)
        made = await responses.sync(self.store, LOCAL, found)
        self.since = found.next_batch
        if self.room_id in made["rooms"]["leave"]:
            self.state = {}
        room = made["rooms"]["join"].get(self.room_id)
        if room is not None:
            timeline = room["timeline"]
            events = [*room["state"]["events"], *timeline["events"]]
            changes = [one for one in events if "state_key" in one]
            self.state |= {(one["type"], one["state_key"]): one["event_id"] for one in changes}
            self.timeline = [one["event_id"] for one in timeline["events"]]
            self.limited, self.prev_batch = timeline["limited"], timeline["prev_batch"]

    async def agrees(self) -> bool:
        """Return whether the client has the state of the room, and pages back without a hole."""
        page = await self.store.messages(self.room_id, LOCAL, from_=self.prev_batch, limit=100)
        whole = await self.store.messages(self.room_id, LOCAL, limit=100)
        known = [*ids(page.chunk), *self.timeline[::-1]]
        assert sorted(known) == sorted(ids(whole.chunk)), bodies(page.chunk)
        return self.state == await self.store.current_state(self.room_id)


@pytest.mark.parametrize("synced", ["first", "before", "while away"])
@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_changes_while_the_user_was_away(store: Store, synced: str, limit: int) -> None:
    room = new_room(visibility="joined", members=[LOCAL])
    await deliver(store, room)
    client = ClassicClient(store, room)
    if synced != "first":
        await client.sync()
    room.leave(LOCAL)
    room.name(ADMIN, "hidden")
    room.join(OTHER)
    await deliver(store, room)
    if synced == "while away":
        await client.sync()
    room.join(LOCAL)
    room.message(ADMIN, "after")
    await deliver(store, room)
    await client.sync(limit)
    assert await client.agrees()


@pytest.mark.parametrize("synced", [False, True])
async def test_a_key_that_changed_before_and_while_the_user_was_away(
    store: Store, *, synced: bool
) -> None:
    """The timeline would end with the topic that the user saw: it begins after that."""
    room = new_room(visibility="joined", members=[LOCAL, OTHER])
    await deliver(store, room)
    client = ClassicClient(store, room)
    if synced:
        await client.sync()
    seen = room.topic(ADMIN, "seen")
    room.leave(LOCAL)
    room.topic(ADMIN, "hidden")
    room.leave(OTHER)
    room.join(LOCAL)
    last = room.topic(ADMIN, "last") if synced else room.message(ADMIN, "last")
    await deliver(store, room)
    await client.sync()
    assert await client.agrees()
    assert last.event_id == client.timeline[-1]
    assert (seen.event_id in client.timeline, client.limited) == (synced, not synced)


async def test_a_value_from_before_the_join_whose_event_comes_afterwards(store: Store) -> None:
    """The state at the join has a kick. It arrives later than the join that it ended."""
    room = new_room()
    came, kicked = room.join(OTHER), room.kick(ADMIN, OTHER)
    state = list(room.state.values())
    own = room.join(LOCAL)
    others = [event for event in room.events if event is not own]
    await append(store, *others, origin="outlier")
    await append(store, own, state_before={own.event_id: state})
    since = (await store.sync(LOCAL)).next_batch
    await append(store, *others)
    timeline = (await store.sync(LOCAL, since=since)).join[room.room_id].timeline
    assert ids(timeline.events)[-2:] == [came.event_id, kicked.event_id]
    # without the kick, a client would keep the join
    chosen = SyncFilter(timeline=EventFilter(senders=[OTHER]))
    timeline = (await store.sync(LOCAL, since=since, filter=chosen)).join[room.room_id].timeline
    assert (timeline.events, timeline.limited) == ([], True)
