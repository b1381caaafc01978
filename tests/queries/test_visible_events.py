"""Visibility as the store reports it: rules, leaving and rejoining, flags, servers, bad queries."""

from collections.abc import Mapping

import pytest

from storage import Store
from storage.errors import InvalidIdentifier, UnknownEvent
from storage.ids import UserId
from storage.testing import RoomBuilder
from tests.oracle.oracle import Oracle
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


async def seen(store: Store, user: str, named: Mapping[str, str]) -> set[str]:
    """The names of those events that a user sees."""
    found = await store.visible_to_user(user, named.values())
    return {name for name, event_id in named.items() if event_id in found}


@pytest.mark.parametrize(
    "visibility,expected",
    [
        ("world_readable", {"before", "invited", "in", "out", "again"}),
        ("shared", {"before", "invited", "in", "out", "again"}),
        ("invited", {"invited", "in", "again"}),
        ("joined", {"in", "again"}),
    ],
)
async def test_one_who_was_invited_joined_left_and_joined_again(
    store: Store, visibility: str, expected: set[str]
) -> None:
    room = new_room(visibility=visibility)
    named = {"before": room.message(ADMIN).event_id}
    room.invite(ADMIN, LOCAL)
    named["invited"] = room.message(ADMIN).event_id
    room.join(LOCAL)
    named["in"] = room.message(ADMIN).event_id
    room.leave(LOCAL)
    named["out"] = room.message(ADMIN).event_id
    room.join(LOCAL)
    named["again"] = room.message(ADMIN).event_id
    await deliver(store, room)
    assert await seen(store, LOCAL, named) == expected
    room.leave(LOCAL)
    named["gone"] = room.message(ADMIN).event_id
    await deliver(store, room)
    assert await seen(store, LOCAL, named) == expected | (
        {"gone"} if visibility == "world_readable" else set()
    )
    assert await seen(store, OTHER, named) == (
        set(named) if visibility == "world_readable" else set()
    )


async def test_one_who_left_keeps_what_was_shared_until_the_join_and_nothing_after_the_leave(
    store: Store,
) -> None:
    room = new_room()
    before = room.message(ADMIN).event_id
    room.join(LOCAL)
    room.leave(LOCAL)
    after = room.message(ADMIN).event_id
    await deliver(store, room)
    assert await store.visible_to_user(LOCAL, [before, after]) == {before}


async def test_own_membership_and_the_change_of_visibility_are_seen_under_either_state(
    store: Store,
) -> None:
    room = new_room(visibility="joined", members=[LOCAL])
    leave = room.leave(LOCAL)
    opened = room.history_visibility(ADMIN, "world_readable")
    closed = room.history_visibility(ADMIN, "joined")
    await deliver(store, room)
    assert await store.visible_to_user(LOCAL, ids([leave, opened, closed])) == set(
        ids([leave, opened, closed])
    )


async def test_soft_failed_rejected_and_outlying_events_are_seen_by_no_user(store: Store) -> None:
    room = new_room(visibility="world_readable", members=[LOCAL, REMOTE])
    ours, theirs = room.fork(2)
    ours.ban(ADMIN, REMOTE)
    soft = theirs.message(REMOTE)
    refused = ours.topic(LOCAL, "no", expected="rejected")
    outlier = ours.message(ADMIN)
    results = await store.append([event.pdu for event in room.events if event is not outlier])
    await append(store, outlier, origin="outlier")
    assert [result.outcome for result in results[-2:]] == ["soft_failed", "rejected"]
    asked = ids([soft, refused, outlier])
    assert await store.visible_to_user(ADMIN, asked) == set()
    assert await store.visible_to_server("s3.test", asked) == {soft.event_id}


@pytest.mark.parametrize(
    "visibility,whole",
    [("world_readable", "abcd"), ("shared", "abcd"), ("invited", "bc"), ("joined", "c")],
)
async def test_a_server_sees_what_its_users_may(store: Store, visibility: str, whole: str) -> None:
    room = new_room(visibility=visibility)
    named = {"a": room.message(ADMIN).event_id}
    room.invite(ADMIN, REMOTE)
    named["b"] = room.message(ADMIN).event_id
    room.join(REMOTE)
    named["c"] = room.message(ADMIN).event_id
    room.leave(REMOTE)
    named["d"] = room.message(ADMIN).event_id
    await deliver(store, room)
    found = await store.visible_to_server("s2.test", named.values())
    assert {name for name, event_id in named.items() if event_id in found} == set(whole)


async def test_forks_agree_with_the_rules_read_aloud(store: Store) -> None:
    room = new_room(visibility="joined", members=[LOCAL])
    left, right = room.fork(2)
    left.message(ADMIN, "left, seen")
    left.leave(LOCAL)
    left.message(ADMIN, "left, unseen")
    right.message(ADMIN, "right, seen")
    right.history_visibility(ADMIN, "invited")
    right.invite(ADMIN, OTHER)
    right.message(ADMIN, "right, seen by two")
    room.merge(left, right)
    room.message(ADMIN, "merged")
    oracle = Oracle()
    for event in room.events:
        await append(store, event)
        oracle.append([event.pdu])
    asked = ids(room.events)
    oracle.positions = {
        event_id: (event.topological_ordering or 0, event.stream_ordering or 0)
        for event_id, event in (await store.events(asked)).items()
    }
    for user in (ADMIN, LOCAL, OTHER):
        assert await store.visible_to_user(user, asked) == oracle.visible_to_user(user, asked), user
    for server in ("s1.test", "s2.test", "s3.test"):
        assert await store.visible_to_server(server, asked) == oracle.visible_to_server(
            server, asked
        ), server


async def test_unknown_events_are_not_visible_and_one_statement_answers(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[REMOTE])
    await deliver(store, room)
    statements.take()
    asked = [*ids(room.events), "$unknown"]
    assert await store.visible_to_user(ADMIN, asked) == set(asked[:-1])
    assert len(statements.take()) == 1
    assert await store.visible_to_server("s2.test", asked) == set(asked[:-1])
    assert len(statements.take()) == 1


@pytest.mark.parametrize("user", ["user", "@user", "", "@user:other.test", "s1.test"])
async def test_what_is_no_local_user_is_refused(store: Store, user: str) -> None:
    with pytest.raises(InvalidIdentifier) as caught:
        await store.visible_to_user(user, [])
    assert caught.value.identifier == user


async def test_malformed_ids_are_refused(store: Store) -> None:
    for wrong in ("", "event", "$nul\0"):
        with pytest.raises(InvalidIdentifier):
            await store.visible_to_user(ADMIN, [wrong])
    for wrong in ("", "@user:s1.test", "two words"):
        with pytest.raises(InvalidIdentifier):
            await store.visible_to_server(wrong, [])


async def test_a_change_between_shared_and_invited_is_seen_by_those_who_see_either_side(
    store: Store,
) -> None:
    room = new_room(visibility="shared")
    room.invite(ADMIN, LOCAL)
    closed = room.history_visibility(ADMIN, "invited")
    between = room.message(ADMIN)
    opened = room.history_visibility(ADMIN, "shared")
    after = room.message(ADMIN)
    room.join(REMOTE)
    await deliver(store, room)
    asked = ids([closed, between, opened, after])
    assert await store.visible_to_user(LOCAL, asked) == set(ids([closed, between, opened]))
    assert await store.visible_to_user(OTHER, asked) == set()
    assert await store.visible_to_server("s2.test", asked) == set(ids([closed, opened, after]))
    room.join(OTHER)
    await deliver(store, room)
    assert await store.visible_to_user(OTHER, asked) == set(ids([closed, opened, after]))


@pytest.mark.parametrize("value", ["everybody", 7, None, ["joined"], {"joined": True}])
async def test_an_unknown_value_counts_as_shared(store: Store, value: object) -> None:
    room = new_room(visibility="joined", members=[LOCAL])
    room.send(ADMIN, "m.room.history_visibility", {"history_visibility": value}, state_key="")
    said = room.message(ADMIN)
    room.join(OTHER)
    room.join(REMOTE)
    await deliver(store, room)
    assert await store.visible_to_user(OTHER, [said.event_id]) == {said.event_id}
    assert await store.visible_to_server("s2.test", [said.event_id]) == {said.event_id}
    told = await store.explain_visibility(said.event_id, OTHER)
    assert told.visible
    assert "table says otherwise" not in told.sentence


async def test_a_room_without_a_history_visibility_is_shared(store: Store) -> None:
    """As one that a server has made with the fewest events."""
    room = RoomBuilder("11", sign=False)
    room.create(ADMIN)
    room.join(ADMIN)
    room.join_rules(ADMIN, "public")
    said = room.message(ADMIN)
    room.history_visibility(ADMIN, "joined")
    hidden = room.message(ADMIN)
    asked = ids([said, hidden])
    await deliver(store, room)
    assert await store.visible_to_user(LOCAL, asked) == set()
    room.join(LOCAL)
    room.join(REMOTE)
    await deliver(store, room)
    assert await store.visible_to_user(LOCAL, asked) == {said.event_id}
    assert await store.visible_to_server("s2.test", asked) == {said.event_id}
    told = await store.explain_visibility(said.event_id, LOCAL)
    assert (told.visible, told.history_visibility) == (True, (None, None))


@pytest.mark.parametrize("visibility", ["world_readable", "shared", "invited", "joined"])
async def test_who_knocks_sees_no_more_than_a_stranger_and_is_shown_stripped_state(
    store: Store, visibility: str
) -> None:
    room = new_room(visibility=visibility, join_rule="knock", name="the name")
    before = room.message(ADMIN)
    knock = room.knock(LOCAL)
    after = room.message(ADMIN)
    await deliver(store, room)
    asked = ids([before, knock, after])
    everything = set(asked) if visibility == "world_readable" else set()
    assert (
        await store.visible_to_user(LOCAL, asked)
        == await store.visible_to_user(OTHER, asked)
        == everything
    )
    shown = (await store.sync(LOCAL)).knock[room.room_id].knock_state
    assert {event["type"] for event in shown} == {
        "m.room.create",
        "m.room.join_rules",
        "m.room.name",
        "m.room.member",
    }
    room.invite(ADMIN, LOCAL)
    invited = room.message(ADMIN)
    await deliver(store, room)
    more = {invited.event_id} if visibility in ("world_readable", "invited") else set()
    assert await store.visible_to_user(LOCAL, [*asked, invited.event_id]) == everything | more


async def test_peekers_see_what_is_world_readable_and_page_through_it(store: Store) -> None:
    room = new_room(visibility="world_readable")
    seen = [room.message(ADMIN) for _ in range(3)]
    closed = room.history_visibility(ADMIN, "shared")
    hidden = room.message(ADMIN)
    await deliver(store, room)
    stranger = "@never-heard-of:s1.test"
    assert await store.visible_to_user(stranger, ids([*seen, closed, hidden])) == set(
        ids([*seen, closed])
    )
    page = await store.messages(room.room_id, stranger, limit=4)
    assert [event.event_id for event in page.chunk] == ids([closed, *reversed(seen)])
    assert (await store.context(seen[1].event_id, stranger, limit=2)).event.event_id == seen[
        1
    ].event_id
    with pytest.raises(UnknownEvent):
        await store.context(hidden.event_id, stranger)


async def test_history_from_before_the_first_local_user_and_after_the_last(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, history_visibility="shared")
    shared = room.message(REMOTE)
    room.history_visibility(REMOTE, "joined")
    closed = room.message(REMOTE)
    join = room.join(LOCAL)
    inside = room.message(REMOTE)
    await deliver(store, room)
    asked = ids([shared, closed, join, inside])
    assert await store.visible_to_user(LOCAL, asked) == set(ids([shared, join, inside]))
    assert await store.visible_to_user(OTHER, asked) == set()
    leave = room.leave(LOCAL)
    after = room.message(REMOTE)
    await deliver(store, room)
    assert await store.visible_to_user(LOCAL, [*asked, leave.event_id, after.event_id]) == set(
        ids([shared, join, inside, leave])
    )
    assert await store.visible_to_server("s1.test", [after.event_id]) == set()
    page = await store.messages(room.room_id, LOCAL, limit=100)
    assert {closed.event_id, after.event_id}.isdisjoint(event.event_id for event in page.chunk)
    assert page.chunk[0].event_id == leave.event_id


@pytest.mark.parametrize(
    "visibility, sees_what_was_missed", [("shared", True), ("invited", False), ("joined", False)]
)
async def test_a_room_that_all_local_users_leave_and_come_back_to(
    store: Store, visibility: str, *, sees_what_was_missed: bool
) -> None:
    """While no local user is in the room, the store keeps no visibility beyond the rule.

    History that is backfilled then also follows the rule.
    """
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, history_visibility=visibility)
    room.join(LOCAL)
    room.join(OTHER)
    inside = room.message(REMOTE)
    room.leave(OTHER)
    room.leave(LOCAL)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    missed = [room.message(REMOTE), room.topic(REMOTE, "nobody there"), room.message(REMOTE)]
    await deliver(store, room)
    assert await store.visible_to_user(LOCAL, ids([inside, *missed])) == {inside.event_id}
    assert await store.visible_to_server("s1.test", ids(missed)) == (
        set(ids(missed)) if sees_what_was_missed else set()
    )
    back = room.join(LOCAL)
    said = room.message(REMOTE)
    await deliver(store, room)
    asked = ids([inside, *missed, back, said])
    assert await store.visible_to_user(LOCAL, asked) == set(ids([inside, back, said])) | (
        set(ids(missed)) if sees_what_was_missed else set()
    )
    assert await store.visible_to_user(OTHER, asked) == {inside.event_id}
    assert await store.visible_to_server("s1.test", [said.event_id]) == {said.event_id}
    page = await store.messages(room.room_id, LOCAL, limit=100)
    assert {event.event_id for event in page.chunk} & set(asked) == await store.visible_to_user(
        LOCAL, asked
    )
    again = await store.sync(LOCAL, since=since)
    assert said.event_id in {event.event_id for event in again.join[room.room_id].timeline.events}
    assert (await store.rooms_of(UserId(LOCAL))) == [room.room_id]


async def test_pages_and_syncs_are_refused_to_users_of_other_servers(store: Store) -> None:
    room = new_room()
    said = room.message(ADMIN)
    await deliver(store, room)
    for wrong in (REMOTE, "user", ""):
        for asked in (
            store.sync(wrong),
            store.messages(room.room_id, wrong),
            store.context(said.event_id, wrong),
        ):
            with pytest.raises(InvalidIdentifier):
                await asked


async def test_a_late_event_of_a_branch_is_seen_by_those_who_were_in_that_branch(
    store: Store,
) -> None:
    """Another server goes on as if nobody had left.

    Its late events make nothing visible of what is sent now.
    """
    room = new_room(visibility="joined", members=[LOCAL, OTHER])
    ours, theirs = room.fork(2)
    ours.leave(LOCAL)
    secret = ours.message(ADMIN)
    late = theirs.message(OTHER)
    held = [event for event in room.events if event is not late]
    await append(store, *held)
    await append(store, late)
    after = room.merge(ours, theirs).message(ADMIN)
    await append(store, after)
    asked = ids([secret, late, after])
    assert await store.visible_to_user(LOCAL, asked) == {late.event_id}
    assert await store.visible_to_user(OTHER, asked) == set(asked)


async def test_a_join_that_is_refused_or_unplaced_shows_nothing(store: Store) -> None:
    """Rejected, soft-failed and outlier joins are no joins.

    Shared history stays hidden from their senders.
    """
    room = new_room(visibility="shared", members=[LOCAL])
    said = room.message(ADMIN)
    ours, theirs = room.fork(2)
    ours.ban(ADMIN, OTHER)
    soft = theirs.join(OTHER)
    await append(store, *(event for event in room.events if event is not soft))
    assert await append(store, soft) == ["soft_failed"]
    refused = ours.join(OTHER, expected="rejected")
    assert await append(store, refused) == ["rejected"]
    unplaced = new_room(visibility="shared", seed=5)
    hidden = unplaced.message(ADMIN)
    await deliver(store, unplaced)
    outlier = unplaced.join(OTHER)
    assert await append(store, outlier, origin="outlier") == ["stored"]
    for events in ([said, soft, refused], [hidden, outlier]):
        assert await store.visible_to_user(OTHER, ids(events)) == set()
    page = await store.messages(room.room_id, OTHER, limit=100)
    assert page.chunk == []
    await append(store, outlier)
    assert await store.visible_to_user(OTHER, ids([hidden, outlier])) == set(ids([hidden, outlier]))


async def test_a_redacted_change_of_visibility_counts_as_it_did(store: Store) -> None:
    """Redaction keeps the value, so that nothing hidden opens when somebody redacts what hid it."""
    room = new_room(visibility="joined", members=[LOCAL])
    closed = room.history_visibility(ADMIN, "joined")
    said = room.message(ADMIN)
    await deliver(store, room)
    room.redact(ADMIN, closed)
    later = room.message(ADMIN)
    await deliver(store, room)
    assert await store.visible_to_user(OTHER, ids([said, later])) == set()
    assert await store.visible_to_server("s3.test", ids([said, later])) == set()
    room.join(OTHER)
    await deliver(store, room)
    assert await store.visible_to_user(OTHER, ids([said, later])) == set()


async def test_a_reset_that_takes_a_leave_back_shows_only_what_is_said_from_then_on(
    store: Store,
) -> None:
    """The state at an event decides, not what the room's state became afterwards."""
    room = new_room(visibility="joined", members=[LOCAL, OTHER], users={OTHER: 50})
    ours, theirs = room.fork(2)
    ours.kick(OTHER, LOCAL)
    secret = ours.message(ADMIN)
    theirs.power_levels(ADMIN, users={OTHER: 0})
    await append(store, *room.events)
    merged = room.merge(ours, theirs)
    after = merged.message(ADMIN)
    await append(store, after)
    oracle = Oracle()
    for event in room.events:
        oracle.append([event.pdu])
    oracle.append([after.pdu])
    asked = ids([secret, after])
    assert await store.visible_to_user(LOCAL, asked) == oracle.visible_to_user(LOCAL, asked)
    assert secret.event_id not in await store.visible_to_user(LOCAL, asked)


async def test_a_walk_forwards_ends_at_the_last_event_that_its_reader_may_see(
    store: Store,
) -> None:
    """Client-server API, GET /messages: no `end` where the user may see no more."""
    room = new_room(members=[LOCAL, OTHER])
    room.leave(LOCAL)
    room.message(ADMIN, "hidden")
    await deliver(store, room)
    left = await store.messages(room.room_id, LOCAL, direction="f", limit=100)
    assert left.chunk[-1].state_key == LOCAL
    assert left.end is None
    assert (await store.messages(room.room_id, OTHER, direction="f", limit=100)).end is not None
    room.send(
        ADMIN, "m.room.history_visibility", {"history_visibility": "world_readable"}, state_key=""
    )
    room.message(ADMIN, "for everybody")
    await deliver(store, room)
    peeked = await store.messages(room.room_id, LOCAL, direction="f", limit=100)
    assert messages_in(peeked.chunk)[-1] == "for everybody"
    assert peeked.end is not None
