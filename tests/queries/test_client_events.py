"""Events for clients: the keys, each field of `unsigned`, and events that are left out."""

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

from storage import Store, StoredEvent
from storage.errors import InputError, StorageCorrupt
from storage.ids import EventId
from storage.testing import BuiltEvent, signing_key
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room
from tests.queries.test_lost_states import LOSSES, group_at
from tests.queries.test_relations import relate

Shown = dict[str, Any]
KEYS = {"event_id", "room_id", "type", "sender", "origin_server_ts", "content", "unsigned"}


async def listed(store: Store, events: Iterable[BuiltEvent | str]) -> list[StoredEvent]:
    wanted = [EventId(one if isinstance(one, str) else one.event_id) for one in events]
    found = await store.events(wanted)
    return [found[one] for one in wanted]


async def shown(
    store: Store, user: str, events: Iterable[BuiltEvent | str], **how: Any
) -> dict[str, Shown]:
    """The events that the user gets, by id."""
    found = await store.client_events(user, await listed(store, events), **how)
    json.dumps(found)
    return {one["event_id"]: one for one in found}


async def one(store: Store, event: BuiltEvent, user: str = LOCAL, **how: Any) -> Shown:
    [found] = (await shown(store, user, [event], **how)).values()
    return found


async def test_known_keys_only_and_no_unsigned_of_the_sender(store: Store) -> None:
    room = new_room(members=[LOCAL])
    claims = {"age": 1, "membership": "ban", "prev_content": {"a": 1}, "io.example": 1}
    said = room.message(ADMIN, extra={"unsigned": claims, "io.example.key": 1, "redacts": "$x"})
    topic = room.topic(ADMIN, "a topic")
    await deliver(store, room)
    before = time.time_ns() // 1_000_000
    found = await one(store, said)
    after = time.time_ns() // 1_000_000
    age = found["unsigned"].pop("age")
    assert before <= age + said.origin_server_ts <= after
    assert found == {
        "event_id": said.event_id,
        "room_id": room.room_id,
        "type": "m.room.message",
        "sender": ADMIN,
        "origin_server_ts": said.origin_server_ts,
        "content": said.content,
        "unsigned": {"membership": "join"},
    }
    found = await one(store, topic, with_room_id=False)
    assert found.keys() == KEYS - {"room_id"} | {"state_key"}
    assert found["state_key"] == ""


@pytest.mark.parametrize("version", ["1", "10", "11", "12"])
async def test_the_target_of_a_redaction_is_at_both_places(store: Store, version: str) -> None:
    room = new_room(members=[LOCAL], version=version)
    said, kept = room.message(ADMIN, "secret"), room.message(ADMIN)
    in_content = version in ("11", "12")
    redaction = room.redact(ADMIN, said, extra={"redacts": "$forged"} if in_content else {})
    other = room.send(
        ADMIN,
        "m.room.redaction",
        {"redacts": kept.event_id if in_content else "$forged"},
        redacts=kept,
    )
    await deliver(store, room)
    found = await shown(store, LOCAL, [said, redaction, other])
    for event, target in ((redaction, said), (other, kept)):
        assert found[event.event_id]["redacts"] == target.event_id
        assert found[event.event_id]["content"]["redacts"] == target.event_id
    pruned = found[said.event_id]
    assert pruned["content"] == {}
    because = pruned["unsigned"]["redacted_because"]
    assert because["unsigned"].pop("age") <= found[redaction.event_id]["unsigned"].pop("age")
    assert because == found[redaction.event_id]
    assert because["unsigned"] == {"membership": "join"}


async def test_every_way_to_a_redacted_event_is_pruned(store: Store) -> None:
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN, "secret")
    await deliver(store, room)
    [early] = await listed(store, [said])
    room.redact(ADMIN, said)
    await deliver(store, room)
    unredacted = await store.event(said.event_id, redact=False)
    assert unredacted is not None
    assert unredacted.content
    for event in (early, unredacted, *await listed(store, [said])):
        for as_state in (False, True):
            if event is not early or not as_state:
                [found] = await store.client_events(LOCAL, [event], as_state=as_state)
                assert found["content"] == {}
                assert found["unsigned"]["redacted_because"]["sender"] == ADMIN


@pytest.mark.parametrize("version", ["10", "11"])
async def test_a_redaction_that_the_reader_may_not_see_has_no_reason(
    store: Store, version: str
) -> None:
    room = new_room(members=[LOCAL, OTHER], version=version)
    said = room.message(ADMIN, "secret")
    room.leave(LOCAL)
    redaction = room.redact(ADMIN, said, reason="for those who are here")
    await deliver(store, room)
    for user, reason in ((OTHER, "for those who are here"), (LOCAL, None)):
        because = (await one(store, said, user))["unsigned"]["redacted_because"]
        assert because["event_id"] == redaction.event_id
        assert because["redacts"] == because["content"]["redacts"] == said.event_id
        assert because["content"].get("reason") == reason


async def test_membership_includes_the_own_change(store: Store) -> None:
    room = new_room(visibility="world_readable")
    before = room.message(ADMIN)
    own = [room.invite(ADMIN, LOCAL)]
    invited = room.message(ADMIN)
    own.append(room.join(LOCAL))
    joined = room.message(ADMIN)
    own.append(room.leave(LOCAL))
    left = room.message(ADMIN)
    own.append(room.ban(ADMIN, LOCAL))
    banned = room.message(ADMIN)
    await deliver(store, room)
    found = await shown(store, LOCAL, [*own, before, invited, joined, left, banned])
    told = [one["unsigned"]["membership"] for one in found.values()]
    assert told[:4] == ["invite", "join", "leave", "ban"]
    assert told[4:] == ["leave", "invite", "join", "leave", "ban"]
    never = await shown(store, OTHER, [before, joined])
    assert {one["unsigned"]["membership"] for one in never.values()} == {"leave"}


async def test_membership_on_forks(store: Store) -> None:
    """A side that did not know of the join says so, also to one who has joined since."""
    room = new_room(visibility="world_readable")
    left, right = room.fork()
    left.join(LOCAL)
    there, elsewhere = left.message(ADMIN), right.message(ADMIN)
    room.merge(left, right)
    both = room.message(ADMIN)
    await deliver(store, room)
    found = await shown(store, LOCAL, [there, elsewhere, both])
    assert [one["unsigned"]["membership"] for one in found.values()] == ["join", "leave", "join"]


async def test_what_a_state_event_replaced(store: Store) -> None:
    room = new_room(members=[LOCAL])
    first = room.topic(ADMIN, "first")
    second = room.topic(ADMIN, "second")
    name = room.join(LOCAL, displayname="new")
    message = room.message(ADMIN)
    await deliver(store, room)
    found = await shown(store, LOCAL, [first, second, name, message])
    unsigned = [one["unsigned"] for one in found.values()]
    assert {"replaces_state", "prev_content", "prev_sender"}.isdisjoint(unsigned[0])
    assert unsigned[1]["replaces_state"] == first.event_id
    assert (unsigned[1]["prev_content"], unsigned[1]["prev_sender"]) == (first.content, ADMIN)
    assert unsigned[2]["prev_content"]["membership"] == "join"
    assert {"replaces_state", "prev_content", "prev_sender"}.isdisjoint(unsigned[3])
    room.redact(ADMIN, first)
    await deliver(store, room)
    assert (await one(store, second))["unsigned"]["prev_content"] == {}


async def test_the_replaced_event_on_a_fork_is_that_of_the_own_side(store: Store) -> None:
    room = new_room(members=[LOCAL])
    left, right = room.fork()
    ours, theirs = left.topic(ADMIN, "ours"), right.topic(ADMIN, "theirs")
    after = left.topic(ADMIN, "ours again")
    room.merge(left, right)
    await deliver(store, room)
    found = await shown(store, LOCAL, [ours, theirs, after])
    assert [one["unsigned"].get("replaces_state") for one in found.values()] == [
        None,
        None,
        ours.event_id,
    ]


async def test_previous_content_only_for_those_who_may_see_it(store: Store) -> None:
    """The readers of the state before an event may, and those of the earlier event."""
    room = new_room(visibility="joined", members=[OTHER])
    hidden = room.topic(ADMIN, "hidden")
    room.history_visibility(ADMIN, "world_readable")
    opened = room.topic(ADMIN, "opened")
    again = room.topic(ADMIN, "again")
    await deliver(store, room)
    for user in (OTHER, LOCAL):
        found = await shown(store, user, [opened, again])
        assert found[again.event_id]["unsigned"]["prev_content"] == opened.content
        may = user == OTHER
        assert ("prev_content" in found[opened.event_id]["unsigned"]) == may
        assert ("prev_sender" in found[opened.event_id]["unsigned"]) == may
        assert (found[opened.event_id]["unsigned"].get("replaces_state") is not None) == may
    assert (await one(store, opened, OTHER))["unsigned"]["replaces_state"] == hidden.event_id


async def test_the_own_membership_before_is_always_there(store: Store) -> None:
    room = new_room(visibility="joined", join_rule="invite")
    invite = room.invite(ADMIN, LOCAL)
    join = room.join(LOCAL)
    await deliver(store, room)
    unsigned = (await one(store, join))["unsigned"]
    assert unsigned["replaces_state"] == invite.event_id
    assert unsigned["prev_content"]["membership"] == "invite"
    assert unsigned["membership"] == "join"


async def test_a_transaction_id_only_for_the_device_that_sent_it(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    key, content, first = signing_key("s1.test"), {"body": "hello"}, ("FIRST", "m1")
    sent = await store.send(
        room.room_id, ADMIN, "m.room.message", content, transaction=first, signing_key=key
    )
    for user, device, expected in (
        (ADMIN, "FIRST", "m1"),
        (ADMIN, "SECOND", None),
        (ADMIN, None, None),
        (LOCAL, "FIRST", None),
    ):
        [event] = await listed(store, [sent.event_id])
        for as_state in (False, True):
            [found] = await store.client_events(user, [event], device_id=device, as_state=as_state)
            assert found["unsigned"].get("transaction_id") == expected


async def test_aggregations_are_events_for_clients_too(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    said = room.message(ADMIN, "hello")
    edit = room.edit(ADMIN, said, "better", extra={"unsigned": {"age": 1, "io.example": 1}})
    room.threaded(OTHER, said, "why")
    reply = room.threaded(LOCAL, said, "because")
    better = room.edit(LOCAL, reply, "just because")
    reference = relate(room, ADMIN, said)
    topic = room.topic(ADMIN, "a topic")
    room.threaded(OTHER, topic, "state has no aggregations")
    await deliver(store, room)
    relations = (await one(store, said, with_room_id=False))["unsigned"]["m.relations"]
    assert relations["m.reference"] == {"chunk": [{"event_id": reference.event_id}]}
    replacement = relations["m.replace"]
    assert replacement["event_id"] == edit.event_id
    assert replacement["unsigned"].keys() == {"age", "membership"}
    assert "room_id" not in replacement
    thread = relations["m.thread"]
    assert (thread["count"], thread["current_user_participated"]) == (2, True)
    latest = thread["latest_event"]
    assert latest["event_id"] == reply.event_id
    assert latest["unsigned"]["m.relations"]["m.replace"]["event_id"] == better.event_id
    assert "m.relations" not in (await one(store, topic))["unsigned"]
    without = await one(store, said, ignored=[LOCAL])
    assert without["unsigned"]["m.relations"]["m.thread"]["count"] == 1
    assert "m.relations" not in (await one(store, said, as_state=True))["unsigned"]


async def test_events_in_aggregations_have_facts_of_their_own(store: Store) -> None:
    """The reader was joined at the original, and not at the edit; the reply is the device's."""
    room = new_room(visibility="world_readable", members=[LOCAL, OTHER])
    said = room.message(ADMIN)
    room.leave(OTHER)
    room.edit(ADMIN, said, "better")
    await deliver(store, room)
    reply = {"body": "r", "m.relates_to": {"rel_type": "m.thread", "event_id": said.event_id}}
    sent = await store.send(
        room.room_id,
        LOCAL,
        "m.room.message",
        reply,
        transaction=("FIRST", "m1"),
        signing_key=signing_key("s1.test"),
    )
    for user, device, membership, transaction in (
        (LOCAL, "FIRST", "join", "m1"),
        (LOCAL, None, "join", None),
        (OTHER, "FIRST", "leave", None),
    ):
        unsigned = (await one(store, said, user, device_id=device))["unsigned"]
        edit = unsigned["m.relations"]["m.replace"]["unsigned"]
        latest = unsigned["m.relations"]["m.thread"]["latest_event"]
        assert (unsigned["membership"], edit["membership"]) == ("join", membership)
        assert latest["event_id"] == sent.event_id
        assert latest["unsigned"]["membership"] == membership
        assert latest["unsigned"].get("transaction_id") == transaction


async def test_a_page_of_a_joined_reader_takes_one_statement(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    said, secret = room.message(ADMIN), room.message(ADMIN, "secret")
    room.edit(ADMIN, said, "better")
    room.redact(ADMIN, secret)
    await deliver(store, room)
    events = await listed(store, [said, secret])
    statements.take()
    for user, device, expected in ((LOCAL, "PHONE", 1), (ADMIN, None, 1), (ADMIN, "PHONE", 2)):
        found = await store.client_events(user, events, device_id=device)
        assert len(statements.take()) == expected
        assert [{*one["unsigned"]} - {"age", "membership"} for one in found] == [
            {"m.relations"},
            {"redacted_because"},
        ]


async def test_what_the_user_may_not_see_is_left_out(store: Store) -> None:
    room = new_room(visibility="joined")
    secret, topic = room.message(ADMIN), room.topic(ADMIN, "before the join")
    room.join(LOCAL)
    said = room.message(ADMIN)
    refused = room.send(REMOTE, "m.room.message", {"body": "not here"}, expected="rejected")
    await append(store, *room.events)
    own = room.events[-3]
    events = [secret, topic, own, said, refused]
    assert [*await shown(store, LOCAL, events)] == [own.event_id, said.event_id]
    # state that is not visible as history is still a part of the state
    found = await shown(store, LOCAL, [topic], as_state=True)
    assert found[topic.event_id]["content"] == topic.content
    assert await shown(store, OTHER, room.events) == {}


async def test_state_is_left_out_like_other_events(store: Store) -> None:
    """Of each user who may see anything of the room, now or earlier, only what they may see."""
    never, invited = "@never:s1.test", "@invited:s1.test"
    room = new_room(visibility="world_readable", members=[LOCAL, OTHER])
    public = room.topic(ADMIN, "public")
    room.history_visibility(ADMIN, "joined")
    room.invite(ADMIN, invited)
    events = [public, room.topic(ADMIN, "for members")]
    kick = room.kick(ADMIN, LOCAL)
    ban = room.ban(ADMIN, OTHER)
    events += [room.topic(ADMIN, "after"), kick, ban]
    await deliver(store, room)
    for user in (ADMIN, LOCAL, OTHER, never, invited):
        visible = await store.visible_to_user(user, ids(events))
        assert {*await shown(store, user, events)} == visible, user
        assert len(visible) == {ADMIN: 5, LOCAL: 3, OTHER: 4}.get(user, 1)
    await store.forget(LOCAL, room.room_id)
    assert [*await shown(store, LOCAL, events)] == [public.event_id, kick.event_id]


async def test_state_that_soft_failed_is_left_out(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    room.power_levels(ADMIN, users={ADMIN: 100, OTHER: 50})
    [late] = room.fork(1)
    room.ban(ADMIN, OTHER)
    await deliver(store, room)
    topic = late.topic(OTHER, "of a banned user")
    assert await append(store, topic) == ["soft_failed"]
    for user in (ADMIN, LOCAL, OTHER):
        assert await shown(store, user, [topic]) == {}


async def test_state_and_messages_of_a_room_that_was_forgotten(store: Store) -> None:
    room = new_room(members=[LOCAL])
    said, topic = room.message(ADMIN), room.topic(ADMIN, "a topic")
    leave = room.leave(LOCAL)
    await deliver(store, room)
    assert len(await shown(store, LOCAL, [said, topic, leave])) == 3
    await store.forget(LOCAL, room.room_id)
    assert [*await shown(store, LOCAL, [said, topic, leave])] == [leave.event_id]


async def test_an_event_that_was_purged_meanwhile_is_left_out(store: Store) -> None:
    room = new_room(members=[LOCAL])
    said, kept = room.message(ADMIN), room.message(ADMIN)
    await deliver(store, room)
    events = await listed(store, [said, kept])
    async with store.database.connection() as conn:
        await conn.execute("DELETE FROM events WHERE event_id = $1::text", said.event_id)
    assert ids_of(await store.client_events(LOCAL, events)) == [kept.event_id]


async def test_an_invite_out_of_band(store: Store) -> None:
    room = new_room()
    invite = room.invite(ADMIN, LOCAL)
    await append(store, invite, origin="out_of_band")
    found = await one(store, invite)
    assert found["unsigned"].keys() == {"age", "membership"}
    assert found["unsigned"]["membership"] == "invite"
    assert await shown(store, OTHER, [invite]) == {}


async def test_events_of_an_erased_sender(store: Store) -> None:
    room = new_room(members=[OTHER])
    said, name = room.message(OTHER, "secret"), room.join(OTHER, displayname="O")
    room.join(LOCAL)
    await deliver(store, room)
    await store.erase_user(OTHER)
    for user, content in ((ADMIN, said.content), (LOCAL, {})):
        assert (await one(store, said, user))["content"] == content
    assert (await one(store, name))["content"] == {"membership": "join"}
    assert (await one(store, name, as_state=True))["content"]["displayname"] == "O"


def ids_of(found: list[Shown]) -> list[str]:
    return [one["event_id"] for one in found]


async def test_events_of_every_read_in_two_statements(
    store: Store, statements: StatementLog
) -> None:
    rooms = [new_room(members=[LOCAL], seed=seed, version=str(10 + seed)) for seed in range(3)]
    for room in rooms:
        said = room.message(ADMIN)
        for number in range(30):
            said = room.message(ADMIN)
            room.react(LOCAL, said)
            room.topic(ADMIN, str(number))
            room.edit(ADMIN, said, "better")
        room.redact(ADMIN, said)
        await deliver(store, room)
    said = next(event for event in rooms[0].events if event.type == "m.room.message")
    sync = await store.sync(LOCAL, timeline_limit=40)
    state = await store.current_state(rooms[0].room_id)
    reads: dict[str, Iterable[StoredEvent]] = {
        "sync": [event for room in sync.join.values() for event in room.timeline.events],
        "state of sync": [event for room in sync.join.values() for event in room.state],
        "state after": [event for room in sync.join.values() for event in room.state_after],
        "messages": (await store.messages(rooms[0].room_id, LOCAL, limit=100)).chunk,
        "relations": (await store.relations(said.event_id, LOCAL)).chunk,
        "members": await store.members(rooms[0].room_id),
        "state": (await store.events(state.values())).values(),
    }
    context = await store.context(said.event_id, LOCAL, limit=20)
    reads["context"] = [*context.events_before, context.event, *context.events_after]
    for name, events in reads.items():
        asked = list(events)
        assert asked or name == "relations"
        statements.take()
        found = await store.client_events(LOCAL, iter(asked))
        assert len(statements.take()) <= 2, name
        assert ids_of(found) == ids(asked), name
        assert {one["room_id"] for one in found} == {event.room_id for event in asked}
        light = await store.client_events(LOCAL, asked, as_state=True)
        assert len(statements.take()) <= 1, name
        assert ids_of(light) == ids(asked), name
    assert await store.client_events(LOCAL, []) == []
    assert statements.take() == []


async def test_only_events_are_taken(store: Store) -> None:
    wrongs: list[Any] = ["$one", [7], ["$one"], [{}], None]
    for wrong in wrongs:
        with pytest.raises(InputError):
            await store.client_events(LOCAL, wrong)


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_state_that_lost_a_row_is_corrupt(store: Store, loss: str) -> None:
    room = new_room(visibility="world_readable", members=[f"@c{n}:s2.test" for n in range(30)])
    for number in range(5):
        room.topic(ADMIN, str(number))
    said, first = room.message(ADMIN), room.name(ADMIN, "the first name")
    await deliver(store, room)
    events = await listed(store, [said, first])
    group = await group_at(store, said)
    assert len(await store.client_events(OTHER, events)) == 2
    async with store.database.connection() as conn:
        assert await conn.execute(LOSSES[loss], group) == "DELETE 1"
    for user in (ADMIN, OTHER):
        with pytest.raises(StorageCorrupt):
            await store.client_events(user, events)
