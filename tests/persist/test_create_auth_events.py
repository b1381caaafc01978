"""A create event that lists auth events: the rules ignore them, so they are no part of its graph.

Else whoever creates a room could put the events of any other room into its auth chains, which
servers in the new room may read.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

import storage
from storage import Store
from storage.event import Event, parsing
from storage.event.model import make_event
from storage.persist import Origin
from storage.rebuild import rebuild
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import findings

SERVER = "s1.test"
UNKNOWN = "$" + "x" * 43


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def cited(store: Store, kind: str, version: str) -> list[str]:
    """Return the ids of events of another room, which is stored."""
    room = RoomBuilder(version, seed=1, checked=False)
    room.start(room.user(1), join_rule="invite")
    rejected = room.fork(1)[0].join(room.user(3))
    message = room.message(room.user(1), "hello")
    results = await store.append(room.pdus, room_version=version)
    refused = [result.event_id for result in results if result.outcome != "stored"]
    assert refused == [rejected.event_id]
    kinds: dict[str, list[str]] = {
        "create": [room.events[0].event_id],
        "state": [event.event_id for event in room.events[:4]],
        "rejected": [rejected.event_id],
        "message": [message.event_id],
        "not held": [UNKNOWN + ":s1.test" if version in ("1", "2") else UNKNOWN],
    }
    return kinds[kind]


def second_room(version: str, ids: list[str]) -> RoomBuilder:
    room = RoomBuilder(version, seed=2, checked=False)
    user = room.user(2)
    created = room.create(user, auth=ids)
    assert created.json["auth_events"]
    room.join(user)
    room.topic(user, "ours")
    return room


@pytest.mark.parametrize("kind", ["create", "state", "rejected", "message", "not held"])
@pytest.mark.parametrize(
    "version, origin",
    [("1", "live"), ("3", "outlier"), ("11", "backfill"), ("12", "live"), ("12", "outlier")],
)
async def test_they_are_ignored(store: Store, version: str, kind: str, origin: Origin) -> None:
    room = second_room(version, await cited(store, kind, version))
    created = room.events[0]
    results = await store.append([created.pdu], origin=origin, room_version=version)
    assert [result.outcome for result in results] == ["stored"]
    results = await store.append(room.pdus, room_version=version)
    assert {result.outcome for result in results} <= {"stored", "duplicate"}
    assert await store.current_state(room.room_id) == dict(room.state)
    await has_own_chains(store, room.events)
    assert await findings(store) == []


async def has_own_chains(store: Store, events: list[BuiltEvent]) -> None:
    own = {event.event_id for event in events}
    for event in events:
        assert await store.auth_chain_ids([event.event_id]) <= own
        assert {one.event_id for one in await store.event_auth(event.event_id)} <= own
    assert await store.auth_chain_difference([[events[0].event_id], [events[-1].event_id]]) <= own
    state = await store.state_ids(events[-1].event_id)
    assert {*state.state_ids, *state.auth_chain_ids} <= own


@pytest.mark.parametrize("version", ["3", "12"])
async def test_repair_takes_them_out(
    store: Store, dsn: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases stored them, and continued the chains of the other room."""
    room = second_room(version, await cited(store, "state", version))

    def with_all(*values: Any) -> Event:
        listed = values[13]["auth_events"]  # the event as JSON
        return make_event(*values[:10], tuple(listed), *values[11:])

    with monkeypatch.context() as earlier:
        earlier.setattr(parsing, "make_event", with_all)
        async with storage.open(dsn, server_name=SERVER, instance_name="earlier") as other:
            results = await other.append(room.pdus, room_version=version)
            assert {result.outcome for result in results} == {"stored"}
    assert await store.auth_chain_ids([room.events[0].event_id]) != set()
    assert {finding.check for finding in await findings(store)} >= {"columns", "auth_chains"}
    await rebuild(store.database, room.room_id, server_name=SERVER)
    assert await findings(store) == []
    await has_own_chains(store, room.events)
