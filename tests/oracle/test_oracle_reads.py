"""The oracle's federation reads and its sync, on rooms written by hand."""

from storage.ids import EventId
from storage.testing import BuiltEvent
from tests.oracle.handmade import filled, ids, new_room, outcomes
from tests.oracle.oracle import Oracle
from tests.oracle.syncing import OracleClient, sync

# --------------------------------------------------------------------------------------------------
# federation reads


def test_traversal_of_a_fork() -> None:
    room, admin, other = new_room()
    base = room.message(admin, "base")
    ours, theirs = room.fork(2)
    a1, a2 = ours.message(admin, "a1"), ours.message(admin, "a2")
    b1 = theirs.message(other, "b1")
    room.merge(ours, theirs)
    top = room.message(admin, "top")
    oracle = filled(room)
    assert oracle.backfill(room.room_id, ids(top), 5) == ids(top, a2, b1, a1, base)
    assert oracle.backfill(room.room_id, ids(b1), 2) == ids(b1, base)
    assert oracle.missing_events(room.room_id, ids(base), ids(top)) == ids(a1, b1, a2)
    assert oracle.missing_events(room.room_id, [EventId("$unknown")], ids(top), limit=2) == ids(
        b1, a2
    )
    assert oracle.missing_events(room.room_id, ids(base), ids(top, a1)) == ids(b1, a2)
    assert oracle.missing_events(room.room_id, [], ids(top), limit=3) == ids(a1, b1, a2)
    assert oracle.missing_events(room.room_id, ids(base), ids(top), min_depth=a2.depth) == ids(a2)


def test_traversal_passes_through_rejected_events() -> None:
    room, admin, other = new_room()
    base = room.message(admin, "base")
    refused = room.topic(other, "no", expected="rejected")
    top = room.at(refused).message(admin, "top")
    oracle = Oracle()
    oracle.append(room.pdus)
    assert oracle.backfill(room.room_id, ids(top), 2) == ids(top, base)
    assert oracle.missing_events(room.room_id, ids(room.events[0]), ids(top), limit=1) == ids(base)


def test_auth_chains_and_state_ids() -> None:
    room, _, other = new_room()
    create, join, power, rules, *_ = room.events
    message = room.message(other)
    oracle = filled(room)
    own = {
        message.state_before[key]
        for key in [("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", other)]
    }
    assert oracle.auth_chain(ids(message)) == own | set(ids(create, join, power, rules))
    assert oracle.auth_chain(ids(create)) == set()
    state, chain = oracle.state_ids(message.event_id)
    assert state == set(message.state_before.values())
    assert chain == oracle.auth_chain(state)
    topic = room.topic(room.user(1), "a state event")
    oracle.append([topic.pdu])
    assert oracle.state_ids(topic.event_id)[0] == set(topic.state_before.values())
    assert oracle.auth_chain_difference([ids(join), ids(power)]) == set(ids(join))


# --------------------------------------------------------------------------------------------------
# sync


def test_a_client_that_only_syncs_knows_the_state_and_every_event() -> None:
    room, admin, other = new_room()
    oracle = Oracle()
    client = OracleClient(admin)
    ours, theirs = room.fork(2)
    ours.topic(admin, "ours")
    ours.ban(admin, other)
    theirs.topic(admin, "theirs")
    room.merge(ours, theirs)
    room.message(admin)
    for event in room.events:
        oracle.append([event.pdu])
        client.hear(sync(oracle, admin, client.since))
        if room.room_id in client.states:
            assert client.states[room.room_id] == oracle.current_state(room.room_id)
    assert client.timelines[room.room_id] == ids(*room.events)
    assert sync(oracle, admin, client.since).join == {}


def test_the_membership_of_each_room_decides_where_it_is_told() -> None:
    room, admin, other = new_room()
    guest = room.user(3)
    oracle = filled(room)
    seen = {"since": sync(oracle, guest, None)}
    client = OracleClient(guest)
    assert (seen["since"].join, seen["since"].invite) == ({}, set())

    def step(event: BuiltEvent) -> None:
        since = seen["since"].next_batch
        oracle.append([event.pdu])
        seen["since"] = sync(oracle, guest, since)
        client.hear(seen["since"])

    step(room.invite(admin, guest))
    assert seen["since"].invite == {room.room_id}
    step(room.message(admin))
    assert seen["since"].invite == set()
    step(room.join(guest))
    assert (
        seen["since"].join[room.room_id].timeline == [event.event_id for event in room.events][-10:]
    )
    assert seen["since"].join[room.room_id].state_after == oracle.current_state(room.room_id)
    last = room.message(other)
    step(last)
    assert seen["since"].join[room.room_id].timeline == ids(last)
    kick = room.kick(admin, guest)
    step(kick)
    assert seen["since"].leave[room.room_id].timeline == ids(kick)
    assert client.states == {}
    assert sync(oracle, guest, None).leave == {}
    step(room.message(admin))
    assert seen["since"].leave == {}
    assert seen["since"].join == {}


def test_a_limited_timeline_starts_where_its_state_ends() -> None:
    room, admin, _ = new_room()
    oracle = filled(room)
    since = sync(oracle, admin, None).next_batch
    events = [
        room.topic(admin, "one"),
        room.message(admin),
        room.topic(admin, "two"),
        room.message(admin),
    ]
    oracle.append([event.pdu for event in events])
    told = sync(oracle, admin, since, limit=2).join[room.room_id]
    assert told.limited
    assert not sync(oracle, admin, since, limit=4).join[room.room_id].limited
    assert told.timeline == ids(*events[2:])
    assert told.state == {("m.room.topic", ""): events[0].event_id}
    assert told.state_after == {("m.room.topic", ""): events[2].event_id}


def test_a_key_that_resolution_took_away_is_told() -> None:
    room, admin, _ = new_room()
    oracle = filled(room)
    client = OracleClient(admin)
    client.hear(sync(oracle, admin, None))
    smaller = oracle.current_state(room.room_id)
    del smaller["m.room.join_rules", ""]
    message = room.message(admin)
    oracle.append([message.pdu])
    oracle.current_states.append((oracle.get(message.event_id).arrival, room.room_id, smaller))
    answer = sync(oracle, admin, client.since)
    assert answer.join[room.room_id].removed == {("m.room.join_rules", "")}
    client.hear(answer)
    assert client.states[room.room_id] == smaller


def test_backfill_is_never_in_a_sync() -> None:
    room, admin, _ = new_room()
    start = len(room.events)
    for number in range(3):
        room.message(admin, str(number))
    oracle = Oracle()
    oracle.append([event.pdu for event in room.events[:start]])
    last = room.events[-1]
    oracle.append([last.pdu], state_before={last.event_id: [*last.state_before.values()]})
    since = sync(oracle, admin, None).next_batch
    oracle.append([event.pdu for event in room.events[start:-1]], origin="backfill")
    assert sync(oracle, admin, since).join == {}
    assert [event.event_id for event in room.events[start:]] == oracle.messages(
        room.room_id, admin
    )[2::-1]


def test_an_invite_from_another_server_comes_as_an_outlier() -> None:
    room, admin, _ = new_room()
    guest = room.user(3)
    invite = room.invite(admin, guest)
    oracle = Oracle()
    state = [
        room.event(event_id)
        for event_id in (*invite.auth_events, *room.graph.auth_chain([invite.event_id]))
    ]
    answers = oracle.append(
        [*(event.pdu for event in state), invite.pdu], room_version="11", origin="outlier"
    )
    assert set(outcomes(answers)) == {"stored", "duplicate"}
    assert sync(oracle, guest, None).invite == {room.room_id}
    assert oracle.current_state(room.room_id) == {}
