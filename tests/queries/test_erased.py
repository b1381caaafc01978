"""Only readers who were in the room then get more of an erased sender than the redacted form."""

import orjson
import pytest

from storage import SlidingList, SlidingSyncRequest, Store, responses
from storage.errors import InvalidIdentifier
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, deliver, new_room


async def test_users_who_were_not_there_get_the_redacted_form_in_every_read(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[OTHER])
    said = room.message(OTHER, "my name is Rose")
    room.join(LOCAL)
    again = room.message(OTHER, "to all of you")
    await deliver(store, room)
    await store.erase_user(OTHER)
    await store.erase_user(OTHER)
    for user, whole in (
        (ADMIN, {said.event_id, again.event_id}),
        (OTHER, {said.event_id, again.event_id}),
        (LOCAL, {again.event_id}),
    ):
        statements.take()
        pages = [
            (await store.messages(room.room_id, user, direction=way, limit=100)).chunk
            for way in ("b", "f")
        ]
        around = await store.context(said.event_id, user, limit=20)
        timeline = (await store.sync(user, timeline_limit=100)).join[room.room_id].timeline.events
        near = await store.event_near(room.room_id, user, said.origin_server_ts, "f")
        assert len(statements.take()) <= 2 + 2 + 4 + 1
        assert not any(event.withheld for event in pages[0] if event.sender != OTHER)
        for found in (
            *pages,
            [*around.events_before, around.event, *around.events_after],
            timeline,
        ):
            shown = {event.event_id: event for event in found}
            for event_id in (said.event_id, again.event_id):
                assert shown[event_id].withheld == (event_id not in whole)
                assert ("body" in shown[event_id].content) == (event_id in whole)
                assert (b"Rose" in shown[event_id].raw) == (
                    event_id in whole and event_id == said.event_id
                )
        assert near is not None
        assert near.withheld == (near.event_id not in whole)
    assert (await store.events([said.event_id]))[said.event_id].content["body"] == "my name is Rose"


async def test_servers_that_were_not_there_get_the_redacted_form(store: Store) -> None:
    room = new_room(members=[OTHER])
    before = room.message(OTHER)
    room.join(REMOTE)
    after = room.message(OTHER)
    room.join("@late:s3.test")
    await deliver(store, room)
    await store.erase_user(OTHER)
    for server, withheld in (
        ("s2.test", {before.event_id}),
        ("s3.test", {before.event_id, after.event_id}),
    ):  # s3 came after both
        sent = await store.backfill(room.room_id, [after.event_id], 100, server_name=server)
        sent += await store.missing_events(
            room.room_id, [], [after.event_id], limit=100, server_name=server
        )
        assert {
            event.event_id for event in sent if event.withheld and event.type == "m.room.message"
        } == withheld
        assert all("body" not in event.content for event in sent if event.withheld)
    assert not any(
        event.withheld for event in await store.backfill(room.room_id, [after.event_id], 100)
    )


async def test_who_is_no_user_cannot_be_erased(store: Store) -> None:
    await store.erase_user("@never:seen.test")
    for wrong in ("user", "@user", "s1.test", "@nul\0:s1.test"):
        with pytest.raises(InvalidIdentifier):
            await store.erase_user(wrong)


@pytest.mark.parametrize("joins", [False, True])
async def test_an_invitation_shows_history_but_who_was_invited_only_was_not_there(
    store: Store, joins: bool
) -> None:
    room = new_room(visibility="invited", members=[OTHER])
    room.invite(ADMIN, LOCAL)
    room.invite(ADMIN, REMOTE)
    said = room.message(OTHER, "before they came")
    if joins:
        room.join(LOCAL)
        room.join(REMOTE)
    again = room.message(OTHER, "after")
    if not joins:
        room.join("@late:s2.test")  # a server gets nothing by an invitation alone
    await deliver(store, room)
    await store.erase_user(OTHER)
    page = await store.messages(room.room_id, LOCAL, limit=100)
    shown = {event.event_id: event.withheld for event in page.chunk}
    assert (shown[said.event_id], shown[again.event_id]) == (True, not joins)
    sent = await store.backfill(room.room_id, [again.event_id], 100, server_name="s2.test")
    assert {event.event_id: event.withheld for event in sent if event.type == "m.room.message"} == {
        said.event_id: True,
        again.event_id: not joins,
    }


async def test_every_other_read_that_knows_its_reader_follows(store: Store) -> None:
    """Also in relations, aggregations and first syncs.

    State events are returned whole, because they belong to the room: its name does not vanish.
    """
    room = new_room(members=[OTHER])
    root = room.message(ADMIN)
    threaded = room.threaded(OTHER, root, "my name is Rose")
    room.power_levels(ADMIN, users={OTHER: 100})
    named = room.name(OTHER, "Rose's room")
    room.join(LOCAL)
    await deliver(store, room)
    await store.erase_user(OTHER)
    for user, shown in ((ADMIN, True), (LOCAL, False)):
        related = (await store.relations(root.event_id, user)).chunk
        assert [event.event_id for event in related] == ([threaded.event_id] if shown else [])
        [event] = [
            event
            for event in (
                await store.messages(room.room_id, user, limit=100, aggregations=True)
            ).chunk
            if event.event_id == root.event_id
        ]
        assert (event.relations is not None) == shown
        assert (root.event_id in await store.aggregations(user, [root.event_id])) == shown
        first = (await store.sync(user, timeline_limit=100)).join[room.room_id]
        assert {one.event_id for one in first.timeline.events if one.withheld} == (
            set() if shown else {one.event_id for one in room.events if one.sender == OTHER}
        )
        around = await store.context(root.event_id, user, limit=0)
        assert [one.content["name"] for one in around.state if one.event_id == named.event_id] in (
            [],
            ["Rose's room"],
        )
        state = (await store.sync(user, timeline_limit=1)).join[room.room_id].state
        assert [one.content["name"] for one in state if one.event_id == named.event_id] == [
            "Rose's room"
        ]


async def test_state_of_a_read_without_a_reader_is_redacted_for_clients(store: Store) -> None:
    """As /event serves it, and as in each read that knows its reader. Served as state it is whole.

    The memberships of the reader are no exception.
    """
    room = new_room(members=[OTHER], users={OTHER: 50})
    made = [
        room.name(OTHER, "Rose's room"),
        room.topic(OTHER, "Rose"),
        room.state_event(OTHER, "m.room.avatar", {"url": "mxc://s1.test/Rose"}),
        room.join(OTHER, displayname="Rose"),
        room.member(OTHER, LOCAL, "invite", {"reason": "Rose asks you"}),
    ]
    room.join(LOCAL)
    await deliver(store, room)
    await store.erase_user(OTHER)
    for user in (ADMIN, LOCAL):
        page = (await store.messages(room.room_id, user, limit=100)).chunk
        known = {one["event_id"]: one for one in await store.client_events(user, page)}
        for event in made:
            found = await store.event(event.event_id)
            assert found is not None
            shown = await store.client_events(user, [found])
            assert [one["content"] for one in shown] == [known[event.event_id]["content"]]
            assert (b"Rose" in orjson.dumps(shown)) == (user == ADMIN)
            whole = await store.client_events(user, [found], as_state=True)
            assert [one["content"] for one in whole] == [event.content]


async def test_a_response_has_the_state_whole_and_the_timeline_redacted(store: Store) -> None:
    """Also where one event is in both."""
    room = new_room(members=[OTHER], users={OTHER: 50})
    named = room.name(OTHER, "Rose's room")
    room.join(LOCAL)
    await deliver(store, room)
    await store.erase_user(OTHER)
    found = await store.sync(LOCAL, timeline_limit=100)
    form = await responses.sync(store, LOCAL, found, use_state_after=True)
    in_sync = form["rooms"]["join"][room.room_id]
    wanted = SlidingList([(0, 1)], required_state=[("m.room.name", "")], timeline_limit=100)
    request = SlidingSyncRequest(lists={"all": wanted})
    sliding = await store.sliding_sync(LOCAL, request, device_id="PHONE")
    in_list = (await responses.sliding_sync(store, LOCAL, request, sliding))["rooms"][room.room_id]
    for state, events in (
        (in_sync["state_after"]["events"], in_sync["timeline"]["events"]),
        (in_list["required_state"], in_list["timeline"]),
    ):
        [as_state], [as_event] = (
            [one["content"] for one in part if one["event_id"] == named.event_id]
            for part in (state, events)
        )
        assert (as_state, as_event) == ({"name": "Rose's room"}, {})


async def test_no_server_has_whole_what_it_was_not_there_for(store: Store) -> None:
    """`visible_to_server` decides who gets `store.event` as it is."""
    room = new_room(members=[OTHER], users={OTHER: 50})
    events = [room.message(OTHER), room.name(OTHER, "Rose's room")]
    room.join(REMOTE)
    events.append(room.message(OTHER))
    await deliver(store, room)
    ids = [event.event_id for event in events]
    assert await store.visible_to_server("s2.test", ids) == set(ids)
    await store.erase_user(OTHER)
    assert await store.visible_to_server("s2.test", ids) == {ids[-1]}
    assert "erased" in (await store.explain_visibility(ids[0], "s2.test")).sentence


async def test_what_a_state_event_replaced_is_redacted_too(store: Store) -> None:
    """The user who joins next had the last topic as state. The others are history to them."""
    room = new_room(members=[OTHER], users={OTHER: 50})
    room.topic(OTHER, "by Rose")
    hidden = room.topic(ADMIN, "by the admin")
    room.topic(OTHER, "by Rose again")
    room.join(LOCAL)
    last = room.topic(ADMIN, "the last one")
    await deliver(store, room)
    await store.erase_user(OTHER)
    for user, before in ((ADMIN, {"topic": "by Rose"}), (LOCAL, {})):
        page = await store.messages(room.room_id, user, limit=100)
        shown = {one["event_id"]: one for one in await store.client_events(user, page.chunk)}
        assert shown[hidden.event_id]["unsigned"]["prev_content"] == before
        assert shown[hidden.event_id]["unsigned"]["prev_sender"] == OTHER
        assert shown[last.event_id]["unsigned"]["prev_content"] == {"topic": "by Rose again"}


async def test_what_was_taken_back_is_shown_again(store: Store) -> None:
    room = new_room(members=[OTHER])
    said = room.message(OTHER, "my name is Rose")
    room.join(LOCAL)
    await deliver(store, room)
    await store.restore_user(OTHER)
    for change, withheld in (
        (store.erase_user, True),
        (store.restore_user, False),
        (store.restore_user, False),
    ):
        await change(OTHER)
        [event] = [
            one
            for one in (await store.messages(room.room_id, LOCAL, limit=100)).chunk
            if one.event_id == said.event_id
        ]
        assert event.withheld == withheld
    with pytest.raises(InvalidIdentifier):
        await store.restore_user("Rose")
