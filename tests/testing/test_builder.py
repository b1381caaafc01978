"""The builder: every version's shape, real hashes and signatures, heads and forks, comfort."""

import json

import pytest
from unpaddedbase64 import decode_base64

from storage import event as events
from storage.errors import InvalidSignature
from storage.testing import KEY_ID, RoomBuilder

VERSIONS = [str(number) for number in range(1, 13)]


def small_room(version: str, seed: int = 1) -> RoomBuilder:
    room = RoomBuilder(version, seed=seed)
    admin, second, third = (room.user(number) for number in (1, 2, 3))
    room.start(admin, name="A room")
    room.join(second)
    hello = room.message(second, "hello")
    room.invite(admin, third)
    room.join(third)
    room.redact(second, hello, reason="a slip")
    room.kick(admin, third)
    room.ban(admin, second)
    room.unban(admin, second)
    return room


def test_two_builders_make_two_rooms() -> None:
    """With one seed they make the same, on purpose."""
    for version in ("2", "11", "12"):
        made = [RoomBuilder(version) for _ in range(2)]
        for room in made:
            room.start(room.user(1))
        assert made[0].room_id != made[1].room_id
        assert not {one.event_id for one in made[0].events} & {
            one.event_id for one in made[1].events
        }
        same = [RoomBuilder(version, seed=7) for _ in range(2)]
        for room in same:
            room.start(room.user(1))
        assert same[0].pdus == same[1].pdus


@pytest.mark.parametrize("version", VERSIONS)
def test_events_parse_to_their_own_ids_and_are_signed(version: str) -> None:
    room = small_room(version)
    keys = room.keys
    for built in room.events:
        parsed = events.parse(built.pdu, version)
        assert (parsed.event_id, parsed.room_id) == (built.event_id, room.room_id)
        assert parsed.content_hash_valid
        assert parsed.prev_event_ids == built.prev_events
        assert parsed.auth_event_ids == built.auth_events
        for server in events.required_signers(parsed):
            events.verify(built.json, version, server, keys[server, KEY_ID])


@pytest.mark.parametrize("version", VERSIONS)
def test_same_calls_same_bytes(version: str) -> None:
    assert small_room(version).pdus == small_room(version).pdus


def test_another_seed_is_another_room() -> None:
    assert set(small_room("2", seed=1).pdus).isdisjoint(small_room("2", seed=2).pdus)


def test_state_follows_the_branch() -> None:
    room = RoomBuilder("11")
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    left, right = room.fork()
    left.leave(other)
    right.message(other)
    assert left.membership(other) == "leave"
    assert right.membership(other) == "join"
    assert room.membership(other) == "join"


def test_an_explicit_parent_makes_a_fork_that_the_next_event_merges() -> None:
    room = RoomBuilder("11")
    admin = room.user(1)
    room.start(admin)
    base = room.message(admin, "base")
    one = room.message(admin, "one")
    two = room.message(admin, "two", prev=[base])
    assert set(room.heads) == {one.event_id, two.event_id}
    merged = room.message(admin, "both")
    assert set(merged.prev_events) == {one.event_id, two.event_id}
    assert merged.topological == one.topological + 1
    assert room.heads == (merged.event_id,)


def test_merge_drops_heads_that_are_ancestors() -> None:
    room = RoomBuilder("11")
    admin = room.user(1)
    room.start(admin)
    left, right = room.fork()
    one = left.message(admin, "one")
    room.merge(left, right)
    assert room.heads == (one.event_id,)


def test_rejected_events_are_no_heads_and_change_no_state() -> None:
    room = RoomBuilder("11")
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    heads = room.heads
    bad = room.topic(other, "not mine to set", expected="rejected")
    assert room.heads == heads
    assert bad.state_after == bad.state_before
    on_top = room.message(admin, prev=[bad])
    assert on_top.state_before == bad.state_before
    assert room.heads == (on_top.event_id,)


def test_depth_may_lie_and_the_lie_is_carried_on() -> None:
    room = RoomBuilder("5")
    admin = room.user(1)
    room.start(admin)
    liar = room.message(admin, depth=2**63 - 2)
    after = room.message(admin)
    assert liar.depth == after.depth == 2**63 - 2
    assert after.topological == liar.topological + 1


def test_damage_is_what_it_says() -> None:
    room = RoomBuilder("11")
    admin = room.user(1)
    room.start(admin)
    tampered = room.message(admin, "tampered", damage="content_hash")
    assert tampered.expected == "redacted"
    parsed = events.parse(tampered.pdu, "11")
    assert not parsed.content_hash_valid
    assert parsed.event_id == tampered.event_id
    key = room.keys["s1.test", KEY_ID]
    events.verify(tampered.json, "11", "s1.test", key)
    forged = room.message(admin, "forged", damage="signature")
    with pytest.raises(InvalidSignature):
        events.verify(forged.json, "11", "s1.test", key)
    assert len(room.message(admin, damage="oversized").pdu) > 65_536


def test_unsigned_rooms_have_true_hashes() -> None:
    room = RoomBuilder("11", sign=False)
    room.start(room.user(1))
    assert all(events.parse(built.pdu, "11").content_hash_valid for built in room.events)


def test_twelve_names_the_room_after_its_create_event() -> None:
    room = RoomBuilder("12")
    created = room.start(room.user(1))
    assert room.room_id == "!" + created.event_id[1:]
    assert "room_id" not in created.json
    assert not any(created.event_id in built.auth_events for built in room.events)


def test_old_versions_cite_by_id_and_hash() -> None:
    room = small_room("1")
    last = room.events[-1]
    assert [entry[0] for entry in last.json["prev_events"]] == list(last.prev_events)
    parent = room.event(last.prev_events[0])
    wanted = events.reference_hash(json.loads(parent.pdu), "1")
    assert decode_base64(last.json["prev_events"][0][1]["sha256"]) == wanted


def test_what_the_state_does_not_allow_is_an_error() -> None:
    room = RoomBuilder("11")
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    count = len(room.events)
    with pytest.raises(ValueError, match="would be rejected"):
        room.message(other)
    with pytest.raises(ValueError, match="would not be rejected"):
        room.message(admin, expected="rejected")
    assert len(room.events) == count
    assert room.message(other, expected="rejected").expected == "rejected"


def test_restricted_joins_are_signed_by_the_authorising_server_too() -> None:
    room = RoomBuilder("10")
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join_rules(admin, "restricted", allow=["!space:s1.test"])
    joined = room.join(other, via=admin)
    assert set(joined.json["signatures"]) == {"s1.test", "s2.test"}
    assert joined.auth_events.count(room.state["m.room.member", admin]) == 1
    assert room.membership(other) == "join"


def test_knocks_invites_and_their_ends() -> None:
    room = RoomBuilder("11")
    admin, other, third = (room.user(number) for number in (1, 2, 3))
    room.start(admin, join_rule="knock")
    room.knock(other, reason="please")
    room.invite(admin, other)
    room.join(other)
    room.invite(other, third)
    room.leave(third)
    room.knock(third)
    room.kick(admin, third, reason="no")
    assert (room.membership(other), room.membership(third)) == ("join", "leave")


@pytest.mark.parametrize("version", ["1", "11", "12"])
def test_third_party_invites_pass_the_rules(version: str) -> None:
    room = RoomBuilder(version)
    admin, other = room.user(1), room.user(2)
    room.start(admin, join_rule="invite")
    room.third_party_invite(admin, "token")
    invited = room.third_party_member(admin, other, "token")
    assert room.state["m.room.third_party_invite", "token"] in invited.auth_events
    room.join(other)


def test_power_levels_are_changed_and_not_replaced() -> None:
    room = RoomBuilder("11")
    admin, other, third = (room.user(number) for number in (1, 2, 3))
    room.start(admin)
    room.power_levels(admin, users={other: 50})
    room.power_levels(admin, {"invite": 50}, users={third: 10})
    content = room.content("m.room.power_levels")
    assert content["users"] == {admin: 100, other: 50, third: 10}
    assert (content["invite"], content["ban"]) == (50, 50)


def test_creators_of_twelve_stand_above_the_levels() -> None:
    room = RoomBuilder("12")
    admin, other = room.user(1), room.user(2)
    room.start(admin, content={"additional_creators": [other]})
    room.join(other)
    room.history_visibility(other, "joined")
    assert room.content("m.room.power_levels")["users"] == {}


def test_relations_name_their_targets() -> None:
    room = RoomBuilder("11")
    admin = room.user(1)
    room.start(admin)
    said = room.message(admin)
    relations = [
        room.react(admin, said).content["m.relates_to"],
        room.edit(admin, said, "better").content["m.relates_to"],
        room.reply(admin, said, "yes").content["m.relates_to"]["m.in_reply_to"],
        room.threaded(admin, said, "more").content["m.relates_to"],
    ]
    assert {relation["event_id"] for relation in relations} == {said.event_id}


def test_redactions_name_their_target_where_the_version_wants_it() -> None:
    for version in ("10", "11"):
        room = RoomBuilder(version)
        admin = room.user(1)
        room.start(admin)
        said = room.message(admin)
        redaction = room.redact(admin, said)
        assert events.parse(redaction.pdu, version).redacts == said.event_id
        assert ("redacts" in redaction.json) == (version == "10")


def test_a_view_at_an_old_event_leaves_the_room_alone() -> None:
    room = RoomBuilder("11")
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    before = room.message(other)
    room.ban(admin, other)
    heads = room.heads
    stale = room.at(before).message(other, "still here", expected="soft_failed")
    assert stale.prev_events == (before.event_id,)
    assert room.heads == heads
