"""The oracle on rooms written by hand, where the right answer can be seen by looking.

The state before and after every event is also compared with what the builder of the room knows of
it, whatever order the room arrives in.
"""

import itertools
import random

import pytest

from storage.errors import StateUnknown, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId
from storage.testing import RoomBuilder
from storage.visibility import server_may_see, user_may_see
from tests.oracle.handmade import filled, ids, new_room, outcomes
from tests.oracle.oracle import Oracle
from tests.oracle.visibility_rule import Sight, server_sees, user_sees

VISIBILITIES = ["world_readable", "shared", "invited", "joined", None, "friends"]
MEMBERSHIPS = ["join", "invite", "knock", "leave", "ban", None]


# --------------------------------------------------------------------------------------------------
# receiving


@pytest.mark.parametrize("version", ["1", "2", "3", "5", "6", "8", "10", "11", "12"])
def test_a_forked_room_in_any_order_has_the_states_that_its_builder_knows(version: str) -> None:
    room, admin, other = new_room(version)
    left, right = room.fork(2)
    left.topic(admin, "left")
    left.message(other)
    right.topic(admin, "right")
    right.power_levels(admin, users={other: 50})
    right.topic(other, "by the other")
    room.merge(left, right)
    room.message(admin)
    for seed in range(4):
        pdus = room.pdus
        random.Random(seed).shuffle(pdus)
        oracle = Oracle()
        assert set(outcomes(oracle.append(pdus))) == {"stored"}
        for event in room.events:
            assert oracle.state_before(event.event_id) == dict(event.state_before)
            assert oracle.state_after(event.event_id) == dict(event.state_after)
            assert oracle.topological_ordering(event.event_id) == event.topological
        assert oracle.current_state(room.room_id) == dict(room.state)
        assert oracle.forward_extremities(room.room_id) == set(room.heads)
        assert oracle.backward_extremities(room.room_id) == set()


def test_appending_again_is_a_duplicate_and_changes_nothing() -> None:
    room, admin, _ = new_room()
    room.message(admin)
    oracle = filled(room)
    before = (list(oracle.held.values()), oracle.current_state(room.room_id))
    assert set(outcomes(oracle.append(room.pdus))) == {"duplicate"}
    assert (list(oracle.held.values()), oracle.current_state(room.room_id)) == before


def test_twice_in_one_batch() -> None:
    room, _, _ = new_room()
    oracle = Oracle()
    assert outcomes(oracle.append([*room.pdus, *room.pdus])) == ["stored"] * len(room.pdus) + [
        "duplicate"
    ] * len(room.pdus)


def test_what_cannot_be_read_is_invalid_and_harms_nothing_else() -> None:
    room, _, _ = new_room()
    oracle = Oracle()
    bad: list[bytes] = [
        b"",
        b"[]",
        b"{",
        b'{"type": 5}',
        b'"m.room.create"',
        b'{"type":"m.room.message","room_id":"!unknown:s1.test"}',
    ]
    answers = oracle.append([*bad, *room.pdus])
    assert outcomes(answers)[: len(bad)] == ["invalid"] * len(bad)
    assert set(outcomes(answers)[len(bad) :]) == {"stored"}


def test_a_missing_parent_makes_its_descendants_wait() -> None:
    room, admin, _ = new_room()
    lost = room.message(admin, "lost")
    child, grandchild = room.message(admin, "child"), room.message(admin, "grandchild")
    oracle = Oracle()
    oracle.append(
        [
            event.pdu
            for event in room.events
            if event is not lost and event is not child and event is not grandchild
        ]
    )
    assert outcomes(oracle.append([child.pdu, grandchild.pdu])) == [
        "missing_parents",
        "missing_parents",
    ]
    assert oracle.missing == {
        child.event_id: {lost.event_id},
        grandchild.event_id: {child.event_id},
    }
    assert outcomes(oracle.append([grandchild.pdu, child.pdu, lost.pdu])) == ["stored"] * 3
    with pytest.raises(UnknownEvent):
        oracle.state_before(EventId("$nothing"))
    with pytest.raises(UnknownRoom):
        oracle.current_state(RoomId("!nothing:s1.test"))


def test_a_gap_with_the_state_given_and_filled_later() -> None:
    room, admin, other = new_room()
    start = len(room.events)
    topic = room.topic(admin, "in the gap")
    room.message(other, "in the gap too")
    after = room.message(admin, "after the gap")
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events[:start]])
    assert outcomes(oracle.append([topic.pdu], origin="outlier")) == ["stored"]
    with pytest.raises(StateUnknown):
        oracle.state_before(topic.event_id)
    given = {after.event_id: [*after.state_before.values()]}
    too_much = {after.event_id: [*given[after.event_id], EventId("$nowhere")]}
    assert outcomes(oracle.append([after.pdu], state_before=too_much)) == ["missing_parents"]
    assert oracle.missing == {after.event_id: {"$nowhere"}}
    assert outcomes(oracle.append([after.pdu], state_before=given)) == ["stored"]
    assert oracle.state_before(after.event_id) == dict(after.state_before)
    assert oracle.backward_extremities(room.room_id) == set(after.prev_events)
    assert oracle.forward_extremities(room.room_id) == {
        room.events[start - 1].event_id,
        after.event_id,
    }
    assert outcomes(
        oracle.append([event.pdu for event in room.events[start:-1]], origin="backfill")
    ) == ["stored", "stored"]
    assert oracle.backward_extremities(room.room_id) == set()
    assert oracle.state_before(topic.event_id) == dict(topic.state_before)
    assert [oracle.topological_ordering(event.event_id) for event in room.events] == list(
        range(1, len(room.events) + 1)
    )


def test_rejected_by_the_state_before_it() -> None:
    room, admin, other = new_room()
    refused = room.topic(other, "not allowed", expected="rejected")
    child = room.at(refused).message(admin, "on its own merits")
    oracle = Oracle()
    assert outcomes(oracle.append(room.pdus))[-2:] == ["rejected", "stored"]
    assert oracle.state_after(refused.event_id) == dict(refused.state_before)
    assert oracle.forward_extremities(room.room_id) == {child.event_id}


def test_an_event_that_cites_a_rejected_one_is_rejected() -> None:
    room, admin, other = new_room()
    refused = room.power_levels(other, users={other: 100}, expected="rejected")
    cites = [room.state[key] for key in [("m.room.create", ""), ("m.room.member", admin)]]
    child = room.message(admin, auth=[*cites, refused], expected="rejected")
    oracle = Oracle()
    assert outcomes(oracle.append(room.pdus))[-2:] == ["rejected", "rejected"]
    assert not oracle.get(child.event_id).accepted


def test_soft_failed_after_a_ban_on_another_branch() -> None:
    room, admin, other = new_room()
    ours, theirs = room.fork(2)
    ban = ours.ban(admin, other)
    late = theirs.topic(admin, "before the ban")
    evading = theirs.join(other, displayname="did not hear of the ban")
    next_one = theirs.message(admin, "on both")
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events if event not in (late, evading, next_one)])
    assert outcomes(oracle.append([late.pdu, evading.pdu])) == ["stored", "soft_failed"]
    assert oracle.forward_extremities(room.room_id) == {ban.event_id, late.event_id}
    assert outcomes(oracle.append([next_one.pdu])) == ["stored"]
    assert oracle.state_before(next_one.event_id)["m.room.member", other] == evading.event_id
    assert oracle.forward_extremities(room.room_id) == {ban.event_id, next_one.event_id}
    assert oracle.visible_to_user(admin, ids(evading, next_one)) == {next_one.event_id}
    assert oracle.visible_to_server("s1.test", ids(evading)) == {evading.event_id}
    assert oracle.backfill(room.room_id, [next_one.event_id], 2) == ids(next_one, evading)


def test_backfill_is_checked_but_not_soft_failed_and_moves_no_extremity() -> None:
    room, admin, other = new_room()
    ours, theirs = room.fork(2)
    ban = ours.ban(admin, other)
    old = theirs.message(other, "before the ban")
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events if event is not old])
    assert outcomes(oracle.append([old.pdu], origin="backfill")) == ["stored"]
    assert oracle.forward_extremities(room.room_id) == {ban.event_id}


def test_what_a_backfilled_parent_stands_on_is_no_extremity_any_more() -> None:
    room, admin, _ = new_room()
    _, second, third = (room.message(admin, str(number)) for number in range(3))
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events if event not in (second, third)])
    oracle.append([second.pdu], origin="backfill")
    oracle.append([third.pdu])
    assert oracle.forward_extremities(room.room_id) == {third.event_id}


def test_a_parent_that_is_an_outlier_is_missing_and_keeps_its_bytes_when_it_comes() -> None:
    room, admin, _ = new_room()
    parent, child = room.message(admin, "parent"), room.message(admin, "child")
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events[:-2]])
    oracle.append([parent.pdu], origin="outlier")
    assert outcomes(oracle.append([parent.pdu], origin="outlier")) == ["duplicate"]
    assert outcomes(oracle.append([child.pdu])) == ["missing_parents"]
    assert oracle.missing == {child.event_id: {parent.event_id}}
    assert outcomes(oracle.append([b" " + parent.pdu, child.pdu])) == ["stored", "stored"]
    assert oracle.get(parent.event_id).event.raw == parent.pdu
    assert oracle.get(parent.event_id).arrival < oracle.get(child.event_id).arrival


def test_version_12_misses_the_create_event() -> None:
    room, _, _ = new_room("12")
    create, join = room.events[:2]
    oracle = Oracle()
    assert outcomes(oracle.append([join.pdu], room_version="12", origin="outlier")) == [
        "missing_parents"
    ]
    assert oracle.missing == {join.event_id: {create.event_id}}
    assert outcomes(oracle.append([join.pdu, create.pdu], origin="outlier")) == ["stored", "stored"]


def test_in_a_batch_of_version_12_the_create_event_comes_first() -> None:
    room, admin, _ = new_room("12")
    bare = room.message(admin, auth=[], expected="rejected")
    answers = Oracle().append([bare.pdu, room.pdus[0]], origin="outlier")
    assert outcomes(answers) == ["rejected", "stored"]


def test_a_given_state_holds_state_events_of_the_room_only() -> None:
    room, admin, _ = new_room()
    message = room.message(admin)
    room.message(admin, "lost")
    child = room.message(admin)
    elsewhere = RoomBuilder("11", seed=1, sign=False)
    foreign = elsewhere.start(admin)
    oracle = Oracle()
    oracle.append([*elsewhere.pdus, *room.pdus[:-2]])
    given = {child.event_id: [*child.state_before.values(), message.event_id, foreign.event_id]}
    assert outcomes(oracle.append([child.pdu], state_before=given)) == ["missing_parents"]
    assert oracle.missing == {child.event_id: {message.event_id, foreign.event_id}}


def test_a_late_parent_is_no_extremity_if_its_child_is_there() -> None:
    room, admin, _ = new_room()
    parent = room.message(admin, "parent")
    child = room.message(admin, "child")
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events if event not in (parent, child)])
    oracle.append([child.pdu], state_before={child.event_id: [*child.state_before.values()]})
    assert outcomes(oracle.append([parent.pdu])) == ["stored"]
    assert oracle.forward_extremities(room.room_id) == {child.event_id}


def test_a_wrong_content_hash_shows_the_redacted_form() -> None:
    room, admin, other = new_room()
    damaged = room.message(other, "secret", damage="content_hash")
    oracle = Oracle()
    assert outcomes(oracle.append(room.pdus))[-1] == "redacted"
    assert oracle.get(damaged.event_id).event.content == {}
    assert oracle.visible_to_user(admin, ids(damaged)) == set(ids(damaged))


# --------------------------------------------------------------------------------------------------
# redactions


@pytest.mark.parametrize("version", ["1", "6", "11", "12"])
@pytest.mark.parametrize("redaction_first", [False, True])
def test_redactions_in_any_order_the_first_by_time_wins(
    version: str, redaction_first: bool
) -> None:
    room, admin, other = new_room(version)
    target = room.message(other, "oops")
    ours, theirs = room.fork(2)
    second = ours.redact(admin, target, ts=target.origin_server_ts + 9)
    first = theirs.redact(admin, target, ts=target.origin_server_ts + 5)
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events[:-3]])
    if redaction_first:
        oracle.append([target.pdu], origin="outlier")
    oracle.append([target.pdu, second.pdu])
    assert oracle.redacted_by(target.event_id) == second.event_id
    oracle.append([first.pdu])
    assert oracle.redacted_by(target.event_id) == first.event_id
    assert oracle.redacted_by(first.event_id) is None


def test_who_may_redact() -> None:
    room, admin, _ = new_room("11")
    neighbour, stranger = room.user(7, "s1.test"), room.user(8, "s3.test")
    for user in (neighbour, stranger):
        room.join(user)
    target = room.message(neighbour, "mine")
    by_stranger = room.redact(stranger, target)
    oracle = filled(room)
    assert oracle.get(by_stranger.event_id).accepted
    assert oracle.redacted_by(target.event_id) is None
    by_server = room.redact(admin, target)
    oracle.append([by_server.pdu])
    assert oracle.redacted_by(target.event_id) == by_server.event_id


def test_a_soft_failed_redaction_does_not_apply() -> None:
    room, admin, other = new_room()
    target = room.message(other, "mine")
    ours, theirs = room.fork(2)
    ours.ban(admin, other)
    redaction = theirs.redact(other, target)
    oracle = Oracle()
    assert outcomes(oracle.append(room.pdus))[-1] == "soft_failed"
    assert oracle.get(redaction.event_id).event.redacts == target.event_id
    assert oracle.redacted_by(target.event_id) is None


# --------------------------------------------------------------------------------------------------
# visibility


def test_both_statements_of_the_rule_agree() -> None:
    visibilities, memberships = (
        list(itertools.product(VISIBILITIES, VISIBILITIES)),
        list(itertools.product(MEMBERSHIPS, MEMBERSHIPS)),
    )
    for visibility, membership, later in itertools.product(
        visibilities, memberships, [False, True]
    ):
        if visibility[0] != visibility[1] and membership[0] != membership[1]:
            continue  # no event changes both
        sight = Sight(
            visibility[0] != visibility[1], membership[0] != membership[1], visibility, membership
        )
        assert user_sees(sight, joined_later=later) == user_may_see(*visibility, *membership, later)
        assert server_sees(sight) == server_may_see(*visibility, *membership)


@pytest.mark.parametrize(
    "visibility, seen",
    [
        ("world_readable", ["before", "invite", "invited", "join", "joined", "leave", "after"]),
        ("shared", ["before", "invite", "invited", "join", "joined", "leave"]),
        ("invited", ["invite", "invited", "join", "joined", "leave"]),
        ("joined", ["join", "joined", "leave"]),
    ],
)
def test_a_user_who_is_invited_joins_and_leaves(visibility: str, seen: list[str]) -> None:
    room, admin, _ = new_room(visibility=visibility)
    guest = room.user(3)
    events = {
        "before": room.message(admin),
        "invite": room.invite(admin, guest),
        "invited": room.message(admin),
        "join": room.join(guest),
        "joined": room.message(admin),
        "leave": room.leave(guest),
        "after": room.message(admin),
    }
    oracle = filled(room)
    assert oracle.visible_to_user(guest, ids(*events.values())) == {
        events[name].event_id for name in seen
    }
    assert oracle.visible_to_user(admin, ids(*events.values())) == set(ids(*events.values()))
    page = oracle.messages(room.room_id, guest)
    assert [event_id for event_id in page if event_id in set(ids(*events.values()))] == [
        events[name].event_id for name in reversed(seen)
    ]
    assert oracle.messages(room.room_id, guest, direction="f", limit=3) == page[::-1][:3]
    at = [oracle.position(event_id) for event_id in page]
    assert oracle.messages(room.room_id, guest, after=at[2], upto=at[0]) == page[:2]


def test_a_change_of_visibility_and_servers() -> None:
    room, admin, other = new_room(visibility="joined")
    closed = room.message(admin)
    opening = room.history_visibility(admin, "shared")
    opened = room.message(admin)
    oracle = filled(room)
    everything = ids(closed, opening, opened)
    assert oracle.visible_to_server("s2.test", everything) == set(everything)
    assert oracle.visible_to_server("s3.test", everything) == set()
    room.join("@visitor:s3.test")
    room.leave("@visitor:s3.test")
    oracle = filled(room)
    assert oracle.visible_to_server("s3.test", everything) == set(ids(opening, opened))
    assert not oracle.is_resident("s3.test", room.room_id)
    assert oracle.is_resident("s2.test", room.room_id)
    assert oracle.visible_to_user(room.user(3), everything) == set()
    assert oracle.visible_to_user(other, everything) == set(everything)


def test_joined_now_counts_as_joined_later_wherever_the_join_lies() -> None:
    """The join is on another branch, and its topological order is no later than that message's."""
    room, admin, _ = new_room()
    guest = room.user(3)
    ours, theirs = room.fork(2)
    ours.join(guest)
    theirs.message(admin, "one")
    deep = theirs.message(admin, "two")
    oracle = filled(room)
    assert oracle.visible_to_user(guest, ids(deep)) == set(ids(deep))
    leave = ours.leave(guest)
    oracle.append([leave.pdu])
    assert oracle.visible_to_user(guest, ids(deep)) == set()


def test_a_server_sees_as_its_user_of_the_highest_membership() -> None:
    room, admin, other = new_room(visibility="joined")
    for number in range(10, 16):
        room.invite(admin, room.user(number, "s2.test"))
    room.leave(other)
    unseen = room.message(admin)
    room.join(other)
    for number in range(10, 13):
        room.leave(room.user(number, "s2.test"))
    seen = room.message(admin)
    assert filled(room).visible_to_server("s2.test", ids(unseen, seen)) == set(ids(seen))


def test_rejected_events_and_outliers_are_seen_by_nobody() -> None:
    room, admin, other = new_room(visibility="world_readable")
    refused = room.topic(other, "no", expected="rejected")
    outlier = room.message(admin)
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events if event is not outlier])
    oracle.append([outlier.pdu], origin="outlier")
    assert oracle.visible_to_user(admin, ids(refused, outlier)) == set()
    assert oracle.visible_to_server("s1.test", ids(refused, outlier)) == set()
