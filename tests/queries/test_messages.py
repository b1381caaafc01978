"""Pages of history: order, exact limits, tokens, gaps, context, and the event nearest to a time."""

import pytest

from storage import Page, Store
from storage.errors import InputError, InvalidIdentifier, InvalidToken, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId
from storage.queries.pagination.page import Direction
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import (
    ADMIN,
    LOCAL,
    OTHER,
    REMOTE,
    append,
    deliver,
    ids,
    messages_in,
    new_room,
)


async def pages(
    store: Store, room: RoomBuilder, user: str, limit: int, direction: Direction = "b"
) -> list[Page]:
    found = [await store.messages(room.room_id, user, direction=direction, limit=limit)]
    while found[-1].end is not None:
        found.append(
            await store.messages(
                room.room_id, user, from_=found[-1].end, direction=direction, limit=limit
            )
        )
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
async def test_pages_of_any_size_make_up_the_room_in_both_directions(
    store: Store, limit: int
) -> None:
    room = new_room(members=[LOCAL])
    for number in range(4):
        room.message(ADMIN, str(number))
    await deliver(store, room)
    for direction, expected in (("b", ids(room.events)[::-1]), ("f", ids(room.events))):
        found = await pages(store, room, LOCAL, limit, direction)  # type: ignore[arg-type]
        assert [event_id for page in found for event_id in ids(page.chunk)] == expected
        if direction == "f":  # the last event had a token to go on with
            assert found.pop().chunk == []
        assert {len(page.chunk) for page in found[:-1]} <= {limit}
        assert found[-1].chunk


async def test_the_limit_is_exact_under_visibility(store: Store) -> None:
    """Of every ten events the user sees one, and still gets three a page."""
    room = new_room(visibility="joined")
    seen = []
    for _ in range(7):
        for _ in range(9):
            room.message(ADMIN, "unseen")
        room.join(LOCAL)
        seen.append(room.message(ADMIN, "seen"))
        room.leave(LOCAL)
    await deliver(store, room)
    found = await pages(store, room, LOCAL, 3)
    assert {len(page.chunk) for page in found[:-1]} == {3}
    assert [body for page in found for body in messages_in(page.chunk)] == ["seen"] * 7
    assert [
        event.event_id for page in found for event in page.chunk if event.type == "m.room.message"
    ] == ids(seen)[::-1]


async def test_branches_come_in_topological_order(store: Store) -> None:
    room = new_room(members=[LOCAL])
    left, right = room.fork(2)
    for number in range(3):
        left.message(ADMIN, f"left {number}")
    for number in range(2):
        right.message(ADMIN, f"right {number}", depth=9_000)
    room.merge(left, right)
    room.message(ADMIN, "merged")
    await deliver(store, room)
    page = await store.messages(room.room_id, LOCAL, limit=6)
    assert messages_in(page.chunk) == ["merged", "left 2", "right 1", "left 1", "right 0", "left 0"]


async def test_a_page_can_be_turned_back(store: Store) -> None:
    room = new_room(members=[LOCAL])
    for number in range(6):
        room.message(ADMIN, str(number))
    await deliver(store, room)
    first = await store.messages(room.room_id, LOCAL, limit=2)
    second = await store.messages(room.room_id, LOCAL, from_=first.end, limit=2)
    assert (messages_in(first.chunk), messages_in(second.chunk)) == (["5", "4"], ["3", "2"])
    back = await store.messages(room.room_id, LOCAL, from_=second.end, direction="f", limit=2)
    assert messages_in(back.chunk) == ["2", "3"]
    back = await store.messages(room.room_id, LOCAL, from_=back.end, direction="f", limit=100)
    assert messages_in(back.chunk) == ["4", "5"]
    between = await store.messages(room.room_id, LOCAL, from_=first.start, to=second.end, limit=100)
    assert messages_in(between.chunk) == ["5", "4", "3", "2"]
    between = await store.messages(
        room.room_id, LOCAL, from_=second.end, to=first.end, direction="f", limit=100
    )
    assert messages_in(between.chunk) == ["2", "3"]


async def test_a_sync_token_is_a_place(store: Store) -> None:
    room = new_room(members=[LOCAL])
    room.message(ADMIN, "before")
    await deliver(store, room)
    token = (await store.sync(LOCAL)).next_batch
    room.message(ADMIN, "after")
    await deliver(store, room)
    assert messages_in((await store.messages(room.room_id, LOCAL, from_=token, limit=1)).chunk) == [
        "before"
    ]
    assert messages_in(
        (await store.messages(room.room_id, LOCAL, from_=token, direction="f")).chunk
    ) == ["after"]
    assert messages_in((await store.messages(room.room_id, LOCAL, to=token)).chunk) == ["after"]


async def walk(
    store: Store, room: RoomBuilder, direction: Direction, from_: str | None, to: str | None = None
) -> list[str]:
    """Return the bodies of the messages, by pages of one event."""
    found: list[str] = []
    while True:
        page = await store.messages(
            room.room_id, LOCAL, direction=direction, from_=from_, to=to, limit=1
        )
        found += messages_in(page.chunk)
        if page.end is None:
            return found
        from_ = page.end


async def two_branches(store: Store) -> tuple[RoomBuilder, str]:
    """Return a room and a sync token that includes its long branch.

    After the token come events of a short branch below the end of the long one, and one above both.
    """
    room = new_room(members=[LOCAL])
    short = room.fork(1)[0]
    for number in range(4):
        room.message(ADMIN, f"old {number}")
    await deliver(store, room)
    token = (await store.sync(LOCAL)).next_batch
    for number in range(3):
        short.message(ADMIN, f"new {number}")
    room.merge(short)
    room.message(ADMIN, "last")
    await deliver(store, room)
    return room, token


async def test_a_walk_from_a_sync_token_leaves_out_what_the_token_covers_on_every_page(
    store: Store,
) -> None:
    room, token = await two_branches(store)
    assert await walk(store, room, "f", token) == ["new 0", "new 1", "new 2", "last"]
    earlier = (await store.sync(LOCAL, timeline_limit=2)).join[room.room_id].timeline
    assert messages_in(earlier.events) == ["new 2", "last"]
    assert await walk(store, room, "f", earlier.prev_batch) == ["new 2", "last"]
    upto = (await store.sync(LOCAL)).next_batch
    room.message(ADMIN, "later")
    await deliver(store, room)
    assert await walk(store, room, "f", token, upto) == ["new 0", "new 1", "new 2", "last"]


async def test_events_that_are_backfilled_during_a_walk_from_a_sync_token_are_left_out(
    store: Store,
) -> None:
    """They are as little after the token as those that were backfilled before."""
    room = new_room(members=[LOCAL])
    held = list(room.events)
    missing = [room.message(ADMIN, f"missing {number}") for number in range(5)]
    last = room.message(ADMIN, "held")
    await append(store, *held)
    await append(store, last, state_before={last.event_id: list(last.state_before.values())})
    token = (await store.sync(LOCAL)).next_batch
    short = room.at(held[-1])
    new = [short.message(ADMIN, f"new {number}") for number in range(2)]
    await append(store, *new)
    first = await store.messages(room.room_id, LOCAL, direction="f", from_=token, limit=1)
    assert messages_in(first.chunk) == ["new 0"]
    await append(store, *missing, origin="backfill")
    assert await walk(store, room, "f", first.end) == ["new 1"]


async def test_walks_from_and_to_the_pages_of_such_a_walk_share_nothing_and_lack_nothing(
    store: Store,
) -> None:
    room, token = await two_branches(store)
    new = ["new 0", "new 1", "new 2", "last"]
    at = token
    for count in (1, 2, 3):
        page = await store.messages(room.room_id, LOCAL, direction="f", from_=at, limit=1)
        assert page.end is not None
        at = page.end
        assert await walk(store, room, "f", token, at) == new[:count]
        assert await walk(store, room, "f", at) == new[count:]
        assert await walk(store, room, "b", None, at) == new[count:][::-1]
        assert await walk(store, room, "b", at, token) == new[:count][::-1]
    turned = ["new 2", "old 2", "new 1", "old 1", "new 0", "old 0"]
    assert await walk(store, room, "b", at) == turned, (
        "all that is below the place of the last page"
    )


async def test_a_walk_backwards_from_a_timeline_turns_around_at_its_place(store: Store) -> None:
    """Timeline events below that position, and events that arrived later, are after the token, too.

    Any other event is not.
    """
    room, _ = await two_branches(store)
    timeline = (await store.sync(LOCAL, timeline_limit=4)).join[room.room_id].timeline
    assert messages_in(timeline.events) == ["new 0", "new 1", "new 2", "last"]
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, limit=1)
    assert messages_in(page.chunk) == ["old 3"]
    assert await walk(store, room, "f", page.end) == ["new 0", "new 1", "new 2", "old 3", "last"]


async def test_a_walk_forwards_goes_on_from_the_live_end(store: Store) -> None:
    """Each page with events has a token, whatever its limit. Only an empty one ends the walk."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    token = (await store.sync(LOCAL)).next_batch
    for start in (None, token):
        room.message(ADMIN, "last")
        await deliver(store, room)
        page = await store.messages(room.room_id, LOCAL, direction="f", from_=start, limit=100)
        full = await store.messages(
            room.room_id, LOCAL, direction="f", from_=start, limit=len(page.chunk)
        )
        assert (messages_in(page.chunk)[-1], page.end) == ("last", full.end)
        assert page.end is not None
        nothing = await store.messages(room.room_id, LOCAL, direction="f", from_=page.end)
        assert (nothing.chunk, nothing.start, nothing.end) == ([], page.end, None)
        room.message(ADMIN, "new")
        await deliver(store, room)
        assert await walk(store, room, "f", page.end) == ["new"]
        upto = await store.messages(
            room.room_id, LOCAL, direction="f", from_=start, to=page.end, limit=100
        )
        assert (messages_in(upto.chunk)[-1], upto.end) == ("last", None)
    assert (await store.messages(room.room_id, LOCAL, limit=100)).end is None


async def test_events_that_arrive_later_do_not_shift_a_page(store: Store) -> None:
    room = new_room(members=[LOCAL])
    for number in range(4):
        room.message(ADMIN, str(number))
    await deliver(store, room)
    first = await store.messages(room.room_id, LOCAL, limit=2)
    room.message(ADMIN, "new")
    await deliver(store, room)
    assert messages_in(
        (await store.messages(room.room_id, LOCAL, from_=first.end, limit=2)).chunk
    ) == ["1", "0"]


async def with_gap(store: Store) -> tuple[RoomBuilder, list[EventId]]:
    """A room of which messages 1 and 2 of 0 to 4 are missing; their ids."""
    room = new_room(members=[LOCAL])
    said = [room.message(ADMIN, str(number)) for number in range(5)]
    await append(store, *[event for event in room.events if event not in said[1:]])
    outcome = await append(
        store, *said[3:], state_before={said[3].event_id: list(said[3].state_before.values())}
    )
    assert outcome == ["stored", "stored"]
    return room, ids(said)


async def test_a_gap_is_told_where_it_lies_and_can_be_filled(store: Store) -> None:
    room, said = await with_gap(store)
    page = await store.messages(room.room_id, LOCAL, limit=3)
    assert messages_in(page.chunk) == ["4", "3", "0"]
    [gap] = page.gaps
    assert (gap.backfill_from, gap.after, gap.before) == ((said[2],), said[0], said[3])
    [forward] = (await store.messages(room.room_id, LOCAL, direction="f", limit=100)).gaps
    assert forward == gap
    await append(store, *[room.event(event_id) for event_id in said[1:3]], origin="backfill")
    page = await store.messages(room.room_id, LOCAL, limit=5)
    assert messages_in(page.chunk) == ["4", "3", "2", "1", "0"]
    assert page.gaps == []


async def test_a_gap_belongs_to_one_page(store: Store) -> None:
    room, said = await with_gap(store)
    for direction, limit in (("b", 2), ("b", 1), ("f", 1), ("f", len(room.events) - 4)):
        found = await pages(store, room, LOCAL, limit, direction)  # type: ignore[arg-type]
        gaps = [gap for page in found for gap in page.gaps]
        assert [gap.backfill_from for gap in gaps] == [(said[2],)]
        assert gaps[0].before == said[3] or gaps[0].after == said[0]


async def only_the_last(store: Store) -> tuple[RoomBuilder, list[EventId]]:
    """Return a room and its missing messages.

    Only the last event is stored, as after a federated join.
    """
    room = new_room(members=[LOCAL])
    missing = [room.message(ADMIN, str(number)) for number in range(3)]
    last = room.message(ADMIN, "last")
    outliers = [event for event in room.events if event not in (*missing, last)]
    await append(store, *outliers, origin="outlier")
    await append(store, last, state_before={last.event_id: list(last.state_before.values())})
    return room, ids(missing)


async def test_a_page_that_ends_at_a_gap_goes_on_once_it_is_filled(store: Store) -> None:
    room, missing = await only_the_last(store)
    page = await store.messages(room.room_id, LOCAL)
    assert messages_in(page.chunk) == ["last"]
    assert [(gap.backfill_from, gap.after, gap.before) for gap in page.gaps] == [
        ((missing[-1],), None, room.events[-1].event_id)
    ]
    assert page.end is not None
    unfilled = await store.messages(room.room_id, LOCAL, from_=page.end)
    assert (unfilled.chunk, unfilled.end, unfilled.gaps) == ([], None, [])
    await deliver(store, room, origin="backfill")
    older = await store.messages(room.room_id, LOCAL, from_=page.end, limit=100)
    assert (ids(older.chunk), older.end, older.gaps) == (ids(room.events)[-2::-1], None, [])


async def test_a_page_before_a_timeline_that_begins_at_a_gap_goes_on_once_it_is_filled(
    store: Store,
) -> None:
    """Nothing is held before the timeline, so the page is empty."""
    room, missing = await only_the_last(store)
    timeline = (await store.sync(LOCAL)).join[room.room_id].timeline
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch)
    assert (page.chunk, [(gap.backfill_from, gap.after) for gap in page.gaps]) == (
        [],
        [((missing[-1],), None)],
    )
    assert page.end is not None
    assert (await store.messages(room.room_id, LOCAL, from_=page.end)).end is None
    await deliver(store, room, origin="backfill")
    for token in (timeline.prev_batch, page.end):
        older = await store.messages(room.room_id, LOCAL, from_=token, limit=100)
        assert (ids(older.chunk), older.end, older.gaps) == (ids(room.events)[-2::-1], None, [])


async def test_a_walk_past_gaps_of_hidden_events_ends(store: Store) -> None:
    """One empty page for each of them; each leads to all that is filled in."""
    room = new_room(visibility="joined")
    start = ids(room.events)
    hidden = [room.message(ADMIN, str(number)) for number in range(4)]
    new = [room.join(LOCAL), room.message(ADMIN, "seen")]
    await append(
        store, *[event for event in room.events if event not in (*hidden, *new)], origin="outlier"
    )
    await append(
        store,
        *hidden[1::2],
        *new,
        state_before={event.event_id: list(event.state_before.values()) for event in hidden[1::2]},
    )
    found = await pages(store, room, LOCAL, 100)
    assert [ids(page.chunk) for page in found] == [ids(new[::-1]), [], [], []]
    below = [{event_id for gap in page.gaps for event_id in gap.backfill_from} for page in found]
    assert below == [set(ids(hidden[::2])), set(ids(hidden[::2])), {hidden[0].event_id}, set()]
    await deliver(store, room, origin="backfill")
    shared = [
        event_id
        for event_id in start[::-1]
        if event_id in await store.visible_to_user(LOCAL, start)
    ]
    for page in found[:-1]:
        assert (
            ids((await store.messages(room.room_id, LOCAL, from_=page.end, limit=100)).chunk)
            == shared
            != []
        )


async def test_forwards_the_newest_event_is_beyond_its_gap(store: Store) -> None:
    room, _ = await only_the_last(store)
    page = await store.messages(room.room_id, LOCAL, direction="f")
    assert (messages_in(page.chunk), len(page.gaps)) == (["last"], 1)
    beyond = await store.messages(room.room_id, LOCAL, direction="f", from_=page.end)
    assert (beyond.chunk, beyond.end, beyond.gaps) == ([], None, [])


async def test_gaps_are_told_also_where_nothing_is_visible(store: Store) -> None:
    room, said = await with_gap(store)
    page = await store.messages(room.room_id, OTHER, limit=3)
    assert page.chunk == []
    assert [gap.backfill_from for gap in page.gaps] == [(said[2],)]


async def test_one_statement_a_page(store: Store, statements: StatementLog) -> None:
    room, _ = await with_gap(store)
    statements.take()
    await store.messages(room.room_id, LOCAL)
    await store.messages(room.room_id, LOCAL, direction="f")
    assert len(statements.take()) == 2


async def test_bad_questions_are_refused(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    with pytest.raises(UnknownRoom):
        await store.messages(RoomId("!none:s1.test"), LOCAL)
    with pytest.raises(InvalidToken):
        await store.messages(room.room_id, LOCAL, from_="nonsense")
    with pytest.raises(InvalidIdentifier):
        await store.messages(room.room_id, REMOTE)
    with pytest.raises(InputError, match="direction"):
        await store.messages(room.room_id, LOCAL, direction="up")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="negative"):
        await store.messages(room.room_id, LOCAL, limit=-1)
    nothing = await store.messages(room.room_id, LOCAL, limit=0)
    assert (nothing.chunk, nothing.end is None) == ([], False)
    assert len((await store.messages(room.room_id, LOCAL, limit=10**9)).chunk) == len(room.events)


# --------------------------------------------------------------------------------------------------
# context


async def test_context_is_what_lies_around_an_event(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    said = [room.message(ADMIN, str(number)) for number in range(3)]
    room.topic(ADMIN, "now")
    said += [room.message(ADMIN, str(number)) for number in range(3, 6)]
    await deliver(store, room)
    statements.take()
    found = await store.context(said[2].event_id, LOCAL, limit=5)
    assert len(statements.take()) == 2
    assert ids(found.events_before) == ids([said[1], said[0]])
    assert found.event.event_id == said[2].event_id
    assert messages_in(found.events_after) == ["3", "4"]
    assert found.events_after[0].type == "m.room.topic"
    assert {event.event_id for event in found.state} == set(room.state.values())
    before = await store.messages(room.room_id, LOCAL, from_=found.start, limit=1)
    after = await store.messages(room.room_id, LOCAL, from_=found.end, direction="f", limit=1)
    assert ids(before.chunk) == list(said[0].prev_events)
    assert ids(after.chunk) == ids([said[5]])


async def test_context_of_what_one_may_not_see_is_unknown(store: Store) -> None:
    room = new_room()
    hidden = room.message(ADMIN, "hidden")
    await deliver(store, room)
    for event_id in (hidden.event_id, EventId("$none")):
        with pytest.raises(UnknownEvent):
            await store.context(event_id, LOCAL)
    assert (await store.context(hidden.event_id, ADMIN, limit=0)).events_before == []


# --------------------------------------------------------------------------------------------------
# nearest event


async def test_the_event_nearest_to_a_time(store: Store) -> None:
    room = new_room(visibility="joined", members=[LOCAL])
    times = {ts: room.message(ADMIN, str(ts), ts=ts).event_id for ts in (10, 20, 30)}
    room.leave(LOCAL, ts=5_000_000_000_000)
    hidden = room.message(ADMIN, "25", ts=25)
    await deliver(store, room)

    async def near(timestamp_ms: int, direction: Direction, user: str = LOCAL) -> str | None:
        found = await store.event_near(room.room_id, user, timestamp_ms, direction)
        return None if found is None else found.event_id

    assert [await near(ts, "f") for ts in (0, 10, 11, 21)] == [
        times[10],
        times[10],
        times[20],
        times[30],
    ]
    assert [await near(ts, "b") for ts in (9, 10, 29, 30)] == [
        None,
        times[10],
        times[20],
        times[30],
    ]
    assert await near(21, "f", ADMIN) == hidden.event_id
    assert await near(6_000_000_000_000, "f") is None
    with pytest.raises(UnknownRoom):
        await store.event_near(RoomId("!none:s1.test"), LOCAL, 0, "f")
    with pytest.raises(InputError):
        await store.event_near(room.room_id, LOCAL, 0, "up")  # type: ignore[arg-type]
