"""Filters: which events, of which rooms; limits stay exact under them."""

from collections.abc import Iterable

import pytest

import storage
from storage import EventFilter, Store, SyncFilter
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, append, deliver, ids, new_room


async def filled(store: Store) -> tuple[storage.RoomId, dict[str, str]]:
    """A room with ten events of each of some types, in turn; their ids with what they are."""
    room = new_room(members=[LOCAL, REMOTE])
    kinds: dict[str, str] = {}
    for number in range(10):
        kinds[room.message(ADMIN, f"{number}").event_id] = "ADMIN"
        kinds[room.message(REMOTE, f"{number}").event_id] = "REMOTE"
        kinds[
            room.send(
                LOCAL, "m.room.message", {"body": "picture", "url": "mxc://s1.test/x"}
            ).event_id
        ] = "url"
        kinds[room.send(LOCAL, "org.test_a.one", {"nested": {"url": ""}}).event_id] = "a"
        kinds[room.send(LOCAL, "org.testXa.two", {}).event_id] = "x"
    await deliver(store, room)
    return room.room_id, kinds


def in_order(kinds: dict[str, str], wanted: str) -> list[str]:
    return [event_id for event_id, kind in kinds.items() if kind in wanted.split()]


CASES = {
    "types": (EventFilter(types=["org.test_a.one"]), "a"),
    "a pattern": (EventFilter(types=["org.test_a.*"]), "a"),
    "a pattern that begins with a star": (EventFilter(types=["*.two"]), "x"),
    "a star amid": (EventFilter(types=["org.*a.*"]), "a x"),
    "two types": (EventFilter(types=["org.test_a.one", "org.testXa.two", "unknown"]), "a x"),
    "without types": (EventFilter(not_types=["m.*"]), "a x"),
    "what is left out wins": (EventFilter(types=["org.*"], not_types=["*.one"]), "x"),
    "senders": (EventFilter(types=["m.room.message"], senders=[ADMIN, "@nobody:s1.test"]), "ADMIN"),
    "without senders": (
        EventFilter(types=["m.room.message"], not_senders=[ADMIN, LOCAL]),
        "REMOTE",
    ),
    "with a URL": (EventFilter(contains_url=True), "url"),
    "without a URL": (
        EventFilter(types=["m.room.message", "org.*"], senders=[LOCAL], contains_url=False),
        "a x",
    ),
    "no types": (EventFilter(types=[]), ""),
    "an unknown type": (EventFilter(types=["%", "_rg.test_a.one", "org.test\0"]), ""),
}


@pytest.mark.parametrize("case", CASES)
async def test_filters_of_events(store: Store, case: str) -> None:
    room_id, kinds = await filled(store)
    wanted, kind = CASES[case]
    expected = in_order(kinds, kind)
    told = (
        (await store.sync(LOCAL, filter=SyncFilter(timeline=wanted), timeline_limit=7))
        .join[room_id]
        .timeline
    )
    assert (ids(told.events), told.limited) == (expected[-7:], len(expected) > 7)
    assert await paged(store, room_id, wanted, "b") == expected[::-1]
    assert await paged(store, room_id, wanted, "f") == expected
    middle = list(kinds)[25]
    around = await store.context(storage.EventId(middle), LOCAL, limit=6, filter=wanted)
    earlier, later = (
        [one for one in expected if one in part] for part in (list(kinds)[:25], list(kinds)[26:])
    )
    assert (ids(around.events_before), around.event.event_id, ids(around.events_after)) == (
        earlier[::-1][:3],
        middle,
        later[:3],
    )


async def test_the_filter_of_a_context_applies_to_its_state(store: Store) -> None:
    """Client-server API, GET /context: a RoomEventFilter of the events that it returns."""
    _, kinds = await filled(store)
    middle = storage.EventId(list(kinds)[25])
    whole = (await store.context(middle, LOCAL)).state
    cases = {
        EventFilter(types=["m.room.member"]): [one for one in whole if one.type == "m.room.member"],
        EventFilter(not_types=["m.room.*"]): [],
        EventFilter(not_senders=[ADMIN]): [one for one in whole if one.sender != ADMIN],
        EventFilter(senders=[LOCAL], types=["m.room.*"]): [
            one for one in whole if one.sender == LOCAL
        ],
        EventFilter(contains_url=True): [],
        EventFilter(contains_url=False): whole,
    }
    for wanted, expected in cases.items():
        assert (await store.context(middle, LOCAL, filter=wanted)).state == expected
    assert 0 < len([one for one in whole if one.sender == LOCAL]) < len(whole)


async def paged(
    store: Store, room_id: storage.RoomId, wanted: EventFilter, direction: str
) -> list[str]:
    """The whole room, by pages of four."""
    found: list[str] = []
    at = None
    while True:
        page = await store.messages(
            room_id,
            LOCAL,
            from_=at,
            limit=4,
            filter=wanted,
            direction="b" if direction == "b" else "f",
        )
        if len(page.chunk) < 4:  # the last one, but that a page forwards has a token to go on
            assert (page.end is None) == (direction == "b" or not page.chunk)
            if page.end is not None:
                beyond = await store.messages(
                    room_id, LOCAL, from_=page.end, filter=wanted, direction="f"
                )
                assert (beyond.chunk, beyond.end) == ([], None)
            return [*found, *ids(page.chunk)]
        found += ids(page.chunk)
        at = page.end
        if at is None:
            return found


async def test_a_redacted_event_has_no_url(store: Store) -> None:
    room = new_room(members=[LOCAL])
    picture = room.send(LOCAL, "m.room.message", {"body": "picture", "url": "mxc://s1.test/x"})
    room.redact(ADMIN, picture)
    await deliver(store, room)
    page = await store.messages(room.room_id, LOCAL, filter=EventFilter(contains_url=True))
    assert page.chunk == []


async def test_filters_of_rooms(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    invited = new_room(seed=7)
    invited.invite(ADMIN, LOCAL)
    for room in (*rooms, invited):
        await deliver(store, room)
    one, two, three, four = (room.room_id for room in (*rooms, invited))

    async def told(
        since: str | None,
        chosen: Iterable[storage.RoomId] | None,
        left_out: Iterable[storage.RoomId] = (),
    ) -> set[str]:
        wanted = SyncFilter(
            rooms=None if chosen is None else list(chosen), not_rooms=list(left_out)
        )
        answer = await store.sync(LOCAL, since=since, filter=wanted)
        return {*answer.join, *answer.invite}

    since = (await store.sync(ADMIN)).next_batch
    for at in (None, since):
        if at is not None:
            await append(store, *(room.message(ADMIN) for room in rooms))
        everything = {one, two, three, four} if at is None else {one, two, three}
        assert await told(at, None) == everything
        assert await told(at, [one, two]) == {one, two}
        assert await told(at, [one, two], [two]) == {one}
        assert await told(at, None, [two]) == everything - {two}
        assert await told(at, []) == set()
        assert await told(at, [storage.RoomId("!unknown:s1.test")]) == set()
