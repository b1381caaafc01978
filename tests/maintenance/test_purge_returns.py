"""What comes back after a purge, and what is remembered of who could see what is gone."""

import pytest

from storage import Config, Store
from storage.testing import RoomBuilder
from tests.maintenance.purging import ALICE, BOB, chat, purge, value
from tests.maintenance.rooms import SERVER, findings
from tests.small_limits import purges_in_batches

CONFIG = Config(purge_pause_ms=0)
small_batches = purges_in_batches(5)


@pytest.fixture
def config() -> Config:
    return CONFIG


async def test_what_was_purged_comes_back_under_its_number(store: Store) -> None:
    room = chat(20)
    await store.append(room.pdus)
    parent, child = room.events[14], room.events[15]
    nid = await value(
        store, "SELECT event_nid FROM events WHERE event_id = $1::text", parent.event_id
    )
    await purge(store, room, 15, local=True)
    assert (
        await value(store, "SELECT event_id FROM events WHERE event_id = $1::text", parent.event_id)
        is None
    )
    given = {event.event_id: sorted(event.state_before.values()) for event in room.events[10:15]}
    results = await store.append(
        [event.pdu for event in room.events[10:15]], origin="backfill", state_before=given
    )
    assert {result.outcome for result in results} == {"stored"}
    assert (
        await value(
            store, "SELECT event_nid FROM events WHERE event_id = $1::text", parent.event_id
        )
        == nid
    )
    assert await value(
        store,
        "SELECT prev_nids(event_nid, prev_events, prev_distance) FROM events"
        " WHERE event_id = $1::text",
        child.event_id,
    ) == [nid]
    assert await findings(store) == []
    chunk = (await store.messages(room.room_id, ALICE, limit=100)).chunk
    assert [event.event_id for event in chunk] == [
        event.event_id for event in reversed(room.events[10:])
    ]


async def test_a_redaction_of_what_was_purged_is_done_again(store: Store) -> None:
    room = chat(20)
    target = room.events[12]
    redaction = room.redact(ALICE, target.event_id)
    room.message(ALICE, "after")
    await store.append(room.pdus)
    await purge(store, room, 15, local=True)
    assert await findings(store) == []
    assert redaction.event_id in {
        event.event_id for event in (await store.messages(room.room_id, ALICE, limit=100)).chunk
    }
    given = {event.event_id: sorted(event.state_before.values()) for event in room.events[12:15]}
    await store.append(
        [event.pdu for event in room.events[12:15]], origin="backfill", state_before=given
    )
    back = await store.event(target.event_id)
    assert back is not None
    assert "body" not in back.content
    assert await findings(store) == []


@pytest.mark.parametrize("number", [0, 3, 14])
async def test_a_redaction_names_an_event_of_another_room_that_is_purged(
    store: Store, number: int
) -> None:
    """The create event and state stay as outliers, a message goes."""
    room, other = chat(20), RoomBuilder("11", seed=8)
    other.start(ALICE)
    await store.append(room.pdus)
    other.redact(ALICE, room.events[number].event_id)
    await store.append(other.pdus)
    assert await findings(store) == []
    await purge(store, room, 18, local=True)
    assert await findings(store) == []


async def test_who_saw_what_is_gone_is_forgotten(store: Store) -> None:
    """Audiences and ranges are deleted with their events; all other visibility stays as it was.

    This also holds for events that arrive later, or come back.
    """
    room = RoomBuilder("11")
    room.start(ALICE, name="The pantry")
    room.history_visibility(ALICE, "joined")
    for number in range(2, 20):  # each is there for a while only
        user = room.user(number, SERVER)
        room.join(user)
        room.message(user, "hello")
        room.leave(user)
    room.join(BOB)
    room.message(BOB, "I am late")
    guest = room.user(20, SERVER)
    room.join(guest)
    room.message(ALICE, "welcome")
    await store.append(room.pdus)
    await store.sync(ALICE)
    point = len(room.events) - 4
    read = [event.event_id for event in (await store.messages(room.room_id, guest, limit=2)).chunk]
    rows = (
        "SELECT count(*) FROM visibility JOIN principals USING (principal_nid) WHERE name ~ '^@u'"
    )
    assert await value(store, rows) == 19
    assert await purge(store, room, point, local=True) > 50
    assert await value(store, rows) < 5, (
        "but for whom a state group's audience is seen by that stays"
    )
    assert await findings(store) == []
    assert [
        event.event_id for event in (await store.messages(room.room_id, guest, limit=2)).chunk
    ] == read
    back = room.events[point - 1]
    [answer] = await store.append(
        [back.pdu],
        origin="backfill",
        state_before={back.event_id: sorted(back.state_before.values())},
    )
    assert answer.outcome == "stored"
    room.leave(guest)
    room.message(BOB, "still here")
    assert {one.outcome for one in await store.append(room.pdus[-2:])} == {"stored"}
    assert await findings(store) == []
    assert await purge(store, room, len(room.events) - 1, local=True) > 3
    assert await findings(store) == []


async def test_a_server_that_left_before_the_cut_is_still_no_stranger(store: Store) -> None:
    """Its stay is purged; under "shared" the rest remains visible to it.

    One that was invited only stays a stranger.
    """
    room = RoomBuilder("11")
    room.start(ALICE)
    room.history_visibility(ALICE, "invited")
    for server in ("left.test", "invited.test"):
        room.invite(ALICE, f"@guest:{server}")
    room.join("@guest:left.test")
    for server in ("left.test", "invited.test"):
        room.leave(f"@guest:{server}")
    room.history_visibility(ALICE, "shared")
    for _ in range(30):
        room.message(ALICE)
    await store.append(room.pdus)
    last = room.events[-1].event_id
    assert await purge(store, room, len(room.events) - 2, local=True) > 10
    for server, seen in (("left.test", {last}), ("invited.test", set())):
        assert await store.visible_to_server(server, [last]) == seen
        assert (await store.explain_visibility(last, server)).visible == bool(seen)
    assert await findings(store) == []


async def test_what_came_back_and_is_an_extremity_stays(store: Store) -> None:
    """A purge set the event aside, and it was sent again: now it is a forward extremity.

    The next purge must not take it for a retained event of the first.
    """
    room = RoomBuilder("11")
    room.start(ALICE, name="The pantry")
    back = room.message(ALICE, "jam")
    for number in range(10):
        room.message(ALICE, f"message {number}")
    await store.append(room.pdus)
    await purge(store, room, len(room.events) - 1, local=False)
    assert await value(
        store, "SELECT outlier FROM events WHERE event_id = $1::text", back.event_id
    ), "a local user sent it"
    [answer] = await store.append(
        [back.pdu], state_before={back.event_id: sorted(back.state_before.values())}
    )
    assert answer.outcome == "stored"
    assert back.event_id in await store.forward_extremities(room.room_id)
    new = [room.message(ALICE, f"more {number}") for number in range(5)]
    assert {one.outcome for one in await store.append([event.pdu for event in new])} == {"stored"}
    await purge(store, room, len(room.events) - 1, local=True)
    assert await findings(store) == []
    assert {back.event_id, new[-1].event_id} == set(await store.forward_extremities(room.room_id))
    assert await store.event(back.event_id) is not None


async def test_what_came_back_under_what_is_gone_is_no_extremity(store: Store) -> None:
    """Only what was not accepted names it still; what was, and covered it, has been purged."""
    room = chat(10)
    target = room.events[8]
    rejected = room.at(target.event_id).topic(BOB, "mine", expected="rejected")
    await store.append(room.pdus)
    assert await purge(store, room, len(room.events) - 2, local=True) > 5
    gaps = {gap.event_id for gap in await store.gaps(room.room_id)}
    assert (target.event_id in gaps) is (await store.event(rejected.event_id) is not None)
    [answer] = await store.append(
        [target.pdu], state_before={target.event_id: sorted(target.state_before.values())}
    )
    assert answer.outcome == "stored"
    assert await findings(store) == []
    assert target.event_id not in await store.forward_extremities(room.room_id)
