"""`state_after` of /sync (MSC4222): a test for each rule about the response, and the examples."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from storage import Store, responses
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room

Json = dict[str, Any]
State = dict[tuple[str, str], str]
TOPIC = ("m.room.topic", "")


class SyncingClient(NamedTuple):
    """A client, and the token up to which it has synced."""

    store: Store
    since: str | None = None
    section: str = "state_after"

    async def sync(self, *, limit: int = 10) -> tuple["SyncingClient", Json]:
        """Return the client after a sync, and the ``rooms`` of the response."""
        found = await self.store.sync(LOCAL, since=self.since, timeline_limit=limit)
        made = await responses.sync(
            self.store, LOCAL, found, use_state_after=self.section == "state_after"
        )
        return self._replace(since=found.next_batch), made["rooms"]


def listed(room: Json, section: str) -> list[str]:
    return [one["event_id"] for one in room[section]["events"]]


def state_of(events: Iterable[Json]) -> State:
    return {(one["type"], one["state_key"]): one["event_id"] for one in events}


def timeline_state(room: Json) -> State:
    return state_of(one for one in room["timeline"]["events"] if "state_key" in one)


async def current(store: Store, room: RoomBuilder) -> State:
    return {
        key: str(event_id) for key, event_id in (await store.current_state(room.room_id)).items()
    }


@pytest.fixture
def room() -> RoomBuilder:
    return new_room(members=[LOCAL])


@pytest.mark.parametrize("section, other", [("state_after", "state"), ("state", "state_after")])
async def test_the_parameter_replaces_the_section_in_all_rooms(
    store: Store, room: RoomBuilder, section: str, other: str
) -> None:
    """With the parameter a room has no `state`, and without it no `state_after`."""
    left = new_room(members=[LOCAL], seed=1)
    for one in (room, left):
        await deliver(store, one)
    client, rooms = await SyncingClient(store, section=section).sync()
    assert rooms["join"].keys() == {room.room_id, left.room_id}
    left.leave(LOCAL)
    room.message(ADMIN)
    for one in (room, left):
        await deliver(store, one)
    _, later = await client.sync()
    assert [*later["join"], *later["leave"]] == [room.room_id, left.room_id]
    answered = (*rooms["join"].values(), *later["join"].values(), *later["leave"].values())
    for one in answered:
        assert section in one
        assert other not in one


async def test_an_empty_section_shows_the_support(store: Store, room: RoomBuilder) -> None:
    """Clients recognise a server with support by the name of the section. So it is always there."""
    await deliver(store, room)
    client, _ = await SyncingClient(store).sync()
    room.message(ADMIN)
    await deliver(store, room)
    _, rooms = await client.sync()
    assert rooms["join"][room.room_id]["state_after"] == {"events": []}


async def test_a_first_sync_has_the_whole_state_at_the_end(store: Store, room: RoomBuilder) -> None:
    """After nothing, the changes up to the end of the timeline are the current state."""
    for number in range(15):
        room.topic(ADMIN, str(number))
    await deliver(store, room)
    _, rooms = await SyncingClient(store).sync(limit=5)
    found = rooms["join"][room.room_id]
    assert found["timeline"]["limited"]
    assert state_of(found["state_after"]["events"]) == await current(store, room)


@pytest.mark.parametrize("is_gappy", [False, True])
async def test_changes_up_to_the_end_of_the_timeline(
    store: Store, room: RoomBuilder, is_gappy: bool
) -> None:
    """`state` ends before the timeline, `state_after` at its end."""
    await deliver(store, room)
    clients = [await SyncingClient(store, section=name).sync() for name in ("state", "state_after")]
    early, name = room.topic(ADMIN, "early"), room.name(ADMIN, "the name")
    for _ in range(3):
        room.message(ADMIN)
    late = room.topic(ADMIN, "late")
    await deliver(store, room)
    limit = 2 if is_gappy else 10
    old, new = [(await one.sync(limit=limit))[1]["join"][room.room_id] for one, _ in clients]
    assert old["timeline"]["limited"] == new["timeline"]["limited"] == is_gappy
    assert set(listed(old, "state")) == ({early.event_id, name.event_id} if is_gappy else set())
    assert set(listed(new, "state_after")) == {late.event_id, name.event_id}


async def test_example_1_a_state_event_is_in_both_sections(store: Store, room: RoomBuilder) -> None:
    """A change without a gap is in the timeline and in `state_after`."""
    await deliver(store, room)
    clients = [await SyncingClient(store, section=name).sync() for name in ("state", "state_after")]
    event = room.send(ADMIN, "org.matrix.example", {}, state_key="")
    await deliver(store, room)
    for (client, _), expected in zip(clients, ([], [event.event_id]), strict=True):
        _, rooms = await client.sync()
        found = rooms["join"][room.room_id]
        assert listed(found, "timeline") == [event.event_id]
        assert not found["timeline"]["limited"]
        assert listed(found, client.section) == expected


class ForkedTopics(NamedTuple):
    """A topic that takes effect, and one of a fork that arrives later and does not."""

    kept: BuiltEvent
    outdated: BuiltEvent


async def forked(store: Store, room: RoomBuilder) -> tuple[ForkedTopics, SyncingClient, State]:
    """Return the topics, the client as of between their arrivals, and its state."""
    old, new = room.fork()
    outdated, kept = old.topic(ADMIN, "outdated"), new.topic(ADMIN, "kept")
    await store.append(
        [event.pdu for event in room.events if event is not outdated], room_version=room.version
    )
    client, rooms = await SyncingClient(store).sync()
    state = state_of(rooms["join"][room.room_id]["state_after"]["events"])
    assert state[TOPIC] == kept.event_id
    await store.append([outdated.pdu])
    room.merge(old, new)
    return ForkedTopics(kept, outdated), client, state


async def test_example_2_outdated_state_is_in_the_timeline_only(
    store: Store, room: RoomBuilder
) -> None:
    """An event of a fork that does not take effect is not in `state_after`."""
    topics, client, _ = await forked(store, room)
    _, rooms = await client.sync()
    found = rooms["join"][room.room_id]
    assert listed(found, "timeline") == [topics.outdated.event_id]
    assert listed(found, "state_after") == []


async def test_a_client_that_applies_state_after_alone_has_the_state(
    store: Store, room: RoomBuilder
) -> None:
    """A client that also applies the timeline gets another state, so it must not."""
    topics, client, state = await forked(store, room)
    naive = dict(state)
    for step in range(3):
        if step:
            room.name(ADMIN, str(step))
            await deliver(store, room)
        client, rooms = await client.sync(limit=2)
        found = rooms["join"][room.room_id]
        state |= state_of(found["state_after"]["events"])
        naive |= timeline_state(found)
        assert state == await current(store, room)
    assert naive[TOPIC] == topics.outdated.event_id != state[TOPIC]
