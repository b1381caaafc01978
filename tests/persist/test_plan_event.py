"""The plan of an event: its result and row, gaps, extremities, current state, memberships."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.database.names import JOIN, MEMBERSHIPS
from storage.event import parse
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import AppendResult
from storage.testing import RoomBuilder
from tests.persist.planning import SERVER, SQL_MEMBERSHIPS, begun, fetch, planned, rows, take

SQL_DELTAS = """
SELECT c.event_id AS cause, e.event_id AS event, p.event_id AS previous
FROM state_deltas d
JOIN events c ON c.stream_ordering = d.stream_ordering
LEFT JOIN events e ON e.event_nid = d.event_nid
LEFT JOIN events p ON p.event_nid = d.prev_event_nid
ORDER BY d.stream_ordering, e.event_nid
"""
SQL_MISSING = (
    "SELECT event_id, superseded, cardinality(child_nids) FROM missing_events ORDER BY event_id"
)
SQL_LAST_JOINS = """
SELECT p.name, v.last_join_topological
FROM visibility v JOIN principals p USING (principal_nid) WHERE v.last_join_topological IS NOT NULL
    ORDER BY p.name
"""
SQL_MOVED = """
SELECT e.event_id, m.topological_before, e.topological_ordering FROM reordered_events m
    JOIN events e USING (event_nid) ORDER BY e.topological_ordering
"""
SQL_DROPPED = "SELECT e.event_id FROM dropped_extremities d JOIN events e USING (event_nid)"
SQL_EXTREMITIES = (
    "SELECT e.event_id FROM rooms r, unnest(r.forward_extremities) AS n "
    "JOIN events e ON e.event_nid = n"
)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def test_the_answers(store: Store) -> None:
    room, admin, other = begun()
    size = len(room.events)
    message, refused = (
        room.message(admin),
        room.send(other, "m.room.topic", {"topic": "x"}, state_key="", expected="rejected"),
    )
    await take(store, *room.events[:size])
    [stored] = await take(store, message)
    assert (stored.event_id, stored.outcome, stored.reason, stored.topological_ordering) == (
        message.event_id,
        "stored",
        None,
        size + 1,
    )
    assert stored.stream_ordering is not None
    assert await take(store, message) == [
        AppendResult(
            message.event_id, "duplicate", None, stored.stream_ordering, stored.topological_ordering
        )
    ]
    [rejected] = await take(store, refused)
    assert (rejected.event_id, rejected.outcome, rejected.topological_ordering) == (
        refused.event_id,
        "rejected",
        size + 2,
    )
    assert rejected.reason == f"event.level: {other} has level 0, m.room.topic takes 50"


async def test_a_soft_failed_event_changes_nothing(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    side = room.fork(1)[0]
    room.ban(admin, other)
    await take(store, room.events[-1])
    before = (await fetch(store, SQL_EXTREMITIES), await fetch(store, SQL_DELTAS))
    late = side.message(other, "late")
    [result] = await take(store, late)
    assert (result.event_id, result.outcome, result.topological_ordering) == (
        late.event_id,
        "soft_failed",
        7,
    )
    assert result.reason is not None
    assert (await rows(store))[late.event_id]["soft_failed"] is True
    assert (await fetch(store, SQL_EXTREMITIES), await fetch(store, SQL_DELTAS)) == before


async def test_the_row_of_each_kind_of_event(store: Store) -> None:
    room, admin, _ = begun()
    message = room.message(admin)
    await take(store, *room.events)
    found = await rows(store)
    create, joined, said = (found[room.events[at].event_id] for at in (0, 1, -1))
    flags = dict.fromkeys(
        ("outlier", "backfilled", "soft_failed", "redacted_form", "ineffective", "after_gap"), False
    )
    assert create == create | flags | {
        "topological_ordering": 1,
        "membership": None,
        "rejected": None,
        "changes_state": True,
        "parents": 0,
    }
    assert joined == joined | flags | {
        "topological_ordering": 2,
        "membership": JOIN,
        "changes_state": True,
        "parents": 1,
    }
    assert said["event_id"] == message.event_id
    assert said == said | flags | {"membership": None, "changes_state": False, "parents": 1}


async def test_an_outlier_has_no_place_until_it_is_in_the_timeline(store: Store) -> None:
    room, _, other = begun()
    [last] = room.events[-1:]
    results = await take(store, *room.events, origin="outlier")
    assert {(one.outcome, one.stream_ordering, one.topological_ordering) for one in results} == {
        ("stored", None, None)
    }
    assert [one.outcome for one in await take(store, last, origin="outlier")] == ["duplicate"]
    assert (await rows(store))[last.event_id]["parents"] == 0
    await take(store, *room.events)
    found = (await rows(store))[last.event_id]
    assert (
        found["outlier"],
        found["topological_ordering"],
        found["membership"],
        found["parents"],
    ) == (False, len(room.events), JOIN, 1)
    assert await fetch(store, SQL_EXTREMITIES) == [(last.event_id,)]
    assert not any(name == other for name, *_ in await fetch(store, SQL_MEMBERSHIPS))


async def test_what_is_lacking_is_named_and_counted_once(store: Store) -> None:
    """Parents and auth events alike, also where an event is both."""
    room, admin, _ = begun()
    before = list(room.events)
    power = room.send(admin, "m.room.power_levels", {"users": {admin: 100}}, state_key="")
    message = room.message(admin)
    child = room.message(admin)
    await take(store, *before)
    for event, lacking in (
        (message, (power.event_id,)),
        (child, (power.event_id, message.event_id)),
    ):
        [result] = await take(store, event)
        reason = f"{len(lacking)} events that it depends on are not stored"
        assert result == AppendResult(event.event_id, "missing_parents", reason, missing=lacking)


async def test_a_gap_is_remembered_and_filled(store: Store) -> None:
    room, admin, _ = begun()
    before = list(room.events)
    state = list(room.state.values())
    lost, child = room.message(admin), room.message(admin)
    await take(store, *before)
    [result] = await take(store, child, state_before={child.event_id: state})
    assert result.outcome == "stored"
    assert await fetch(store, SQL_MISSING) == [(lost.event_id, True, 1)]
    assert (await rows(store))[child.event_id]["after_gap"] is True
    assert {one for (one,) in await fetch(store, SQL_EXTREMITIES)} == {
        before[-1].event_id,
        child.event_id,
    }
    [filled] = await take(store, lost, origin="backfill")
    assert filled.outcome == "stored"
    assert await fetch(store, SQL_MISSING) == []
    found = await rows(store)
    assert (found[lost.event_id]["backfilled"], found[lost.event_id]["after_gap"]) == (True, False)
    assert (
        found[lost.event_id]["topological_ordering"] < found[child.event_id]["topological_ordering"]
    )


async def test_the_state_of_a_gap_is_held_state_of_the_room(store: Store) -> None:
    room, admin, _ = begun()
    before, message = list(room.events), room.message(admin)
    lost, child = room.message(admin), room.message(admin)
    other = RoomBuilder("11", seed=2, sign=False)
    other.start(admin)
    topic = other.send(admin, "m.room.topic", {"topic": "elsewhere"}, state_key="")
    await take(store, *before, message)
    await take(store, *other.events)
    for given in (message, topic, lost):
        [result] = await take(
            store, child, state_before={child.event_id: [*room.state.values(), given.event_id]}
        )
        assert (result.outcome, result.missing) == ("missing_parents", (given.event_id,))


async def test_changes_of_the_current_state_name_what_was_before(store: Store) -> None:
    room, admin, _ = begun()
    first = room.send(admin, "m.room.topic", {"topic": "1"}, state_key="")
    second = room.send(admin, "m.room.topic", {"topic": "2"}, state_key="")
    for event in room.events:
        await take(store, event)
    deltas = await fetch(store, SQL_DELTAS)
    assert deltas[-2:] == [
        (first.event_id, first.event_id, None),
        (second.event_id, second.event_id, first.event_id),
    ]
    assert deltas[0] == (room.events[0].event_id, room.events[0].event_id, None)
    assert len(deltas) == len(room.events)


async def test_memberships_of_local_users_follow_the_current_state(store: Store) -> None:
    room, admin, other = begun()
    guest = room.user(3, SERVER)
    joined = room.join(guest)
    await take(store, *room.events)
    assert await fetch(store, SQL_MEMBERSHIPS) == [
        (admin, JOIN, room.events[1].event_id),
        (guest, JOIN, joined.event_id),
    ]
    banned = room.ban(admin, guest)
    room.ban(admin, other)
    await take(store, *room.events[-2:])
    assert await fetch(store, SQL_MEMBERSHIPS) == [
        (admin, JOIN, room.events[1].event_id),
        (guest, MEMBERSHIPS["ban"], banned.event_id),
    ]
    assert await fetch(store, "SELECT event_nid FROM out_of_band_memberships") == []


async def test_an_event_of_another_version_than_its_room_is_invalid(store: Store) -> None:
    room, admin, _ = begun()
    await take(store, *room.events)
    [result] = await store.append([room.message(admin).pdu], room_version="11")
    assert result.outcome == "stored"
    assert result.topological_ordering == len(room.events)


async def test_extremities_follow_forks_and_merges(store: Store) -> None:
    room, admin, _ = begun()
    await take(store, *room.events)
    left, right = room.fork(2)
    one, two = left.message(admin, "left"), right.message(admin, "right")
    await take(store, one, two)
    assert {event for (event,) in await fetch(store, SQL_EXTREMITIES)} == {
        one.event_id,
        two.event_id,
    }
    room.merge(left, right)
    room.heads = room.graph.maximal((one.event_id, two.event_id))
    merged = room.message(admin, "both")
    await take(store, merged)
    assert await fetch(store, SQL_EXTREMITIES) == [(merged.event_id,)]


async def test_history_is_not_soft_failed_and_what_is_rejected_changes_nothing(
    store: Store,
) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    side = room.fork(1)[0]
    ban = room.ban(admin, other)
    await take(store, ban)
    late = side.message(other, "late")
    [result] = await take(store, late, origin="backfill")
    assert result.outcome == "stored"
    refused = room.send(other, "m.room.topic", {"topic": "x"}, state_key="", expected="rejected")
    [result] = await take(store, refused)
    assert result.outcome == "rejected"
    found = await rows(store)
    assert [found[event.event_id]["changes_state"] for event in (ban, late, refused)] == [
        True,
        False,
        False,
    ]
    assert await fetch(store, SQL_EXTREMITIES) == [(ban.event_id,)]


async def test_a_message_is_stored_as_what_it_came_as(store: Store) -> None:
    """Also where it stands on the only extremity, as a live one would."""
    room, admin, _ = begun()
    before = list(room.events)
    old, outlier = (
        branch.message(admin, str(number)) for number, branch in enumerate(room.fork(2))
    )
    await take(store, *before)
    await take(store, old, origin="backfill")
    await take(store, outlier, origin="outlier")
    found = await rows(store)
    assert [
        (found[one.event_id]["backfilled"], found[one.event_id]["outlier"])
        for one in (old, outlier)
    ] == [(True, False), (False, True)]
    assert await fetch(store, SQL_EXTREMITIES) == [(before[-1].event_id,)]


async def test_an_event_after_a_gap_is_soft_failed_by_the_current_state(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    side, state = room.fork(1)[0], list(room.state.values())
    await take(store, room.ban(admin, other))
    side.message(other, "lost")
    late = side.message(other, "late")
    [result] = await take(store, late, state_before={late.event_id: state})
    assert result.outcome == "soft_failed"


async def test_what_a_merge_takes_out_of_the_current_state(store: Store) -> None:
    """On one branch a moderator sets a topic and invites a local user.

    On the other the moderator is banned.
    """
    room = RoomBuilder("11", seed=1, sign=False)
    admin, moderator, guest = room.user(1, SERVER), room.user(2, "s2.test"), room.user(3, SERVER)
    room.start(admin, users={moderator: 50})
    room.join(moderator)
    await take(store, *room.events)
    left, right = room.fork(2)
    topic, invite = left.topic(moderator, "gone"), left.invite(moderator, guest)
    await take(store, topic, invite)
    assert await fetch(store, SQL_MEMBERSHIPS) == [
        (admin, JOIN, room.events[1].event_id),
        (guest, MEMBERSHIPS["invite"], invite.event_id),
    ]
    ban = right.ban(admin, moderator)
    await take(store, ban)
    assert await store.current_state(room.room_id) == dict(ban.state_after)
    assert (await fetch(store, SQL_MEMBERSHIPS))[1:] == [(guest, 0, None)]
    deltas = {tuple(row) for row in await fetch(store, SQL_DELTAS)}
    assert {(ban.event_id, None, topic.event_id), (ban.event_id, None, invite.event_id)} <= deltas


async def test_an_extremity_beyond_the_limit_is_dropped_and_remembered(dsn: str) -> None:
    room, admin, _ = begun()
    before = list(room.events)
    forks = [branch.message(admin, str(number)) for number, branch in enumerate(room.fork(3))]
    async with storage.open(
        dsn, server_name=SERVER, config=storage.Config(forward_extremities_max=2)
    ) as store:
        await take(store, *before)
        for event in forks:
            await take(store, event)
        assert {one for (one,) in await fetch(store, SQL_EXTREMITIES)} == {
            forks[1].event_id,
            forks[2].event_id,
        }
        assert await fetch(store, SQL_DROPPED) == [(forks[0].event_id,)]


async def test_an_event_with_another_content_hash_is_stored_as_redacted(store: Store) -> None:
    room, admin, _ = begun()
    message = room.message(admin, damage="content_hash")
    await take(store, *room.events)
    assert [event_id for event_id, row in (await rows(store)).items() if row["redacted_form"]] == [
        message.event_id
    ]


async def test_a_gap_is_covered_once_an_event_that_came_live_stands_on_it(store: Store) -> None:
    room, admin, _ = begun()
    before, state = list(room.events), list(room.state.values())
    lost = room.message(admin)
    children = [branch.message(admin, str(number)) for number, branch in enumerate(room.fork(3))]
    await take(store, *before)
    for child, origin, superseded in zip(
        children, ("backfill", "live", "backfill"), (False, True, True), strict=True
    ):
        [result] = await take(store, child, origin=origin, state_before={child.event_id: state})
        assert result.outcome == "stored"
        assert (await fetch(store, SQL_MISSING))[0][:2] == (lost.event_id, superseded)
    found = await rows(store)
    assert [found[child.event_id]["after_gap"] for child in children] == [False, True, False]
    assert {one for (one,) in await fetch(store, SQL_EXTREMITIES)} == {
        before[-1].event_id,
        children[1].event_id,
    }


async def test_a_gap_behind_history_is_covered_by_the_first_live_event_after_it(
    store: Store,
) -> None:
    room, admin, _ = begun()
    before, state = list(room.events), list(room.state.values())
    lost, child = room.message(admin), room.message(admin)
    await take(store, *before)
    size = await fetch(store, "SELECT max_topological_ordering FROM rooms")
    await take(store, child, origin="backfill", state_before={child.event_id: state})
    assert await fetch(store, SQL_MISSING) == [(lost.event_id, False, 1)]
    live = room.message(admin)
    await take(store, live)
    assert await fetch(store, SQL_MISSING) == [(lost.event_id, True, 1)]
    late = room.at(before[1]).message(admin, "late")
    place = (await take(store, late, origin="backfill"))[0].topological_ordering
    assert place is not None
    assert place < size[0][0]
    assert (await fetch(store, "SELECT max_topological_ordering FROM rooms"))[0][0] >= size[0][0]


async def test_what_moves_up_takes_the_last_joins_with_it(store: Store) -> None:
    """A join that claims to be the first event stands there until its parent comes.

    Only accepted joins of local users count.
    """
    room, admin, _ = begun()
    guest, friend, banned = (room.user(number, SERVER) for number in (3, 4, 5))
    room.ban(admin, banned)
    before, state = list(room.events), list(room.state.values())
    lost = room.message(admin)
    joined = room.join(guest, depth=1)
    moved = [
        joined,
        room.message(guest),
        room.invite(admin, friend),
        room.join(banned, expected="rejected"),
    ]
    await take(store, *before)
    results = await take(store, *moved, state_before={joined.event_id: state})
    assert [(one.outcome, one.topological_ordering) for one in results] == [
        ("stored", 1),
        ("stored", 2),
        ("stored", 3),
        ("rejected", 4),
    ]
    assert await fetch(store, SQL_LAST_JOINS) == [(admin, 2), (guest, 1)]
    [result] = await take(store, lost, origin="backfill")
    place = len(before) + 1
    assert result.topological_ordering == place
    assert await fetch(store, SQL_MOVED) == [
        (event.event_id, at, place + at) for at, event in enumerate(moved, 1)
    ]
    assert await fetch(store, SQL_LAST_JOINS) == [(admin, 2), (guest, place + 1)]
    assert await fetch(store, "SELECT max_topological_ordering FROM rooms") == [
        (place + len(moved),)
    ]
    assert await fetch(store, SQL_EXTREMITIES) == [(moved[2].event_id,)]
    assert await fetch(store, SQL_DROPPED) == []


async def test_a_duplicate_has_its_orderings_at_once(store: Store) -> None:
    """The caches may have lost its row by the time at which the batch is written."""
    room, admin, _ = begun()
    message = room.message(admin)
    [*_, result] = await take(store, *room.events)
    change_set = ChangeSet(store.writer.caches, NidBlocks(), SERVER)
    again = await planned(store, change_set, IncomingEvent(parse(message.pdu, "11"), "live"))
    assert again == result._replace(outcome="duplicate")
    assert again.stream_ordering is not None
