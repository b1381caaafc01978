"""The answer to send_join: whole, cut off, false, twice at once, and after a crash."""

import asyncio
import copy
from typing import Any, Final

import asyncpg
import pytest

import storage
from storage import RoomId
from storage.event import sign
from storage.federation import Receiver
from storage.federation.keys import KeyedLocks
from storage.testing import signing_key
from tests.federation.peers import QUICK, Homeserver, fail
from tests.federation.rooms import PUBLIC, agree, outcomes, shared_room

Json = dict[str, Any]


class Asked:
    """A join that was sent, and its answer."""

    def __init__(self, room_id: RoomId, join: Json, response: Json, version: str) -> None:
        self.room_id = room_id
        self.join = join
        self.response = response
        self.version = version


async def asked(one: Homeserver, other: Homeserver, version: str = "12") -> Asked:
    """A public room that was private at first; the other server has asked to join."""
    room_id = await one.store.create_room(one.user(), room_version=version)
    await one.do(room_id, "user", *PUBLIC[::2], state_key="")
    await one.do(room_id, "user", "m.room.name", {"name": "first"}, state_key="")
    await one.do(room_id, "user", "m.room.name", {"name": "second"}, state_key="")
    join = await other.make_join(room_id, one, "user")
    return Asked(room_id, join, await one.send_join(join), version)


async def rows(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM events"))
    finally:
        await connection.close()


def of_type(response: Json, kind: str) -> Json:
    found: Json = next(one for one in response["state"] if one["type"] == kind)
    return found


def without(response: Json, kind: str) -> None:
    for name in ("state", "auth_chain"):
        response[name] = [one for one in response[name] if one["type"] != kind]


def no_state(response: Json) -> None:
    del response["state"]


def no_chain(response: Json) -> None:
    response["auth_chain"] = None


def half_an_event(response: Json) -> None:
    response["state"][-1] = "{"


def no_members(response: Json) -> None:
    response["members_omitted"] = True


def no_create(response: Json) -> None:
    without(response, "m.room.create")


def no_levels(response: Json) -> None:
    without(response, "m.room.power_levels")


def no_rules(response: Json) -> None:
    without(response, "m.room.join_rules")


def forged_rules(response: Json) -> None:
    for name in ("state", "auth_chain"):
        for one in response[name]:
            if one["type"] == "m.room.join_rules":
                one["signatures"] = {"s1.test": {"ed25519:1": "A" * 86}}


def a_message(response: Json) -> None:
    name = of_type(response, "m.room.name")
    message = {key: value for key, value in name.items() if key != "state_key"}
    response["state"].append(sign(message, "11", "s1.test", signing_key("s1.test")))


def other_room(response: Json) -> None:
    name = of_type(response, "m.room.name") | {"room_id": "!elsewhere:s1.test"}
    response["state"].append(sign(name, "11", "s1.test", signing_key("s1.test")))


def two_names(response: Json) -> None:
    name = of_type(response, "m.room.name") | {"content": {"name": "another"}}
    response["state"].append(sign(name, "11", "s1.test", signing_key("s1.test")))


FALSE_ANSWERS: Final = (
    (no_state, "malformed_response"),
    (no_chain, "malformed_response"),
    (half_an_event, "malformed_response"),
    (no_members, "malformed_response"),
    (a_message, "malformed_response"),
    (no_create, "state_incomplete"),
    (no_levels, "state_incomplete"),
    (no_rules, "state_incomplete"),
    (forged_rules, "state_incomplete"),
    (other_room, "wrong_room"),
    (two_names, "two_events_of_one_key"),
)


async def test_a_false_answer_leaves_nothing_and_the_right_one_joins(
    two: list[Homeserver], another_dsn: str
) -> None:
    one, other = two
    sent = await asked(one, other, "11")
    for change, fault in FALSE_ANSWERS:
        false = copy.deepcopy(sent.response)
        change(false)
        refused = await other.receiver.joined("s1.test", sent.join, false, "11")
        assert (refused.outcome, refused.fault) == ("refused", fault), (change, refused)
        assert await rows(another_dsn) == 0, change
    assert await other.store.rooms_of(other.user()) == []
    joined = await other.receiver.joined("s1.test", sent.join, sent.response, "11")
    assert joined.outcome == "joined", joined
    again = await other.receiver.joined("s1.test", sent.join, sent.response, "11")
    assert again.outcome == "duplicate"
    await agree(sent.room_id, one, other)


@pytest.mark.parametrize("version", ["1", "6", "12"])
async def test_a_join_shows_the_room(two: list[Homeserver], version: str) -> None:
    one, other = two
    sent = await asked(one, other, version)
    result = await other.receiver.joined("s1.test", sent.join, sent.response, version)
    assert (result.outcome, result.left_out) == ("joined", {})
    answer = await other.store.sync(other.user())
    assert list(answer.join) == [sent.room_id]
    assert await outcomes(one, other, await other.say(sent.room_id, "hello")) == ["stored"]
    await agree(sent.room_id, one, other)


async def test_an_old_state_does_not_allow_the_join(
    two: list[Homeserver], another_dsn: str
) -> None:
    """The server returns the join rules from before the room was public."""
    one, other = two
    room_id = await one.store.create_room(
        one.user(),
        room_version="11",
        initial_state=[("m.room.join_rules", "", {"join_rule": "invite"})],
    )
    state = await one.store.current_state(room_id)
    old = (await one.store.events([state["m.room.join_rules", ""]])).popitem()[1].json
    await one.do(room_id, "user", *PUBLIC[::2], state_key="")
    join = await other.make_join(room_id, one, "user")
    response = await one.send_join(join)
    new = of_type(response, "m.room.join_rules")
    response["state"] = [old if event is new else event for event in response["state"]]
    response["auth_chain"].append(new)
    result = await other.receiver.joined("s1.test", join, response, "11")
    assert (result.outcome, result.fault) == ("refused", "not_allowed")
    assert await rows(another_dsn) == 0


async def test_another_room_version_is_refused(two: list[Homeserver], another_dsn: str) -> None:
    one, other = two
    sent = await asked(one, other, "11")
    for version in ("10", "12", "99"):
        result = await other.receiver.joined("s1.test", sent.join, sent.response, version)
        assert result.outcome == "refused"
        assert result.fault in ("wrong_version", "malformed_join"), version
        assert await rows(another_dsn) == 0


async def test_a_member_whose_key_cannot_be_had_is_left_out(three: list[Homeserver]) -> None:
    one, other, third = three
    room_id = await shared_room(one, third)
    one.network.faults["s3.test", "server_keys"] = fail
    result = await other.join(room_id, one)
    assert result.outcome == "joined"
    assert len(result.left_out) == 1
    [reason] = result.left_out.values()
    assert "the keys of s3.test cannot be had: 500" in reason
    state = await other.store.current_state(room_id)
    assert ("m.room.member", third.user()) not in state
    assert ("m.room.member", one.user()) in state


async def test_two_processes_join_at_once(two: list[Homeserver], another_dsn: str) -> None:
    """Each is the first of its server, with its own answer."""
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    async with storage.open(
        another_dsn,
        server_name="s2.test",
        instance_name="second",
        signing_key=signing_key("s2.test"),
    ) as store:
        receivers = {"user": other.receiver, "guest": Receiver(store, other.remote, limits=QUICK)}
        joins = {user: await other.make_join(room_id, one, user) for user in receivers}
        answers = {user: await one.send_join(join) for user, join in joins.items()}
        results = await asyncio.gather(
            *(
                receiver.joined("s1.test", joins[user], answers[user], "12")
                for user, receiver in receivers.items()
            )
        )
        assert [result.outcome for result in results] == ["joined", "joined"]
        merged = await one.say(room_id, "hello")
        assert await outcomes(other, one, merged) == ["stored"]
    await agree(room_id, one, other)


async def test_a_crash_between_state_and_join_is_repaired_by_the_same_call(
    two: list[Homeserver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    sent = await asked(one, other)
    append = other.store.append

    async def crash(*args: Any, **how: Any) -> Any:
        if how["origin"] == "live":
            raise asyncio.CancelledError
        return await append(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(other.store, "append", crash)
        with pytest.raises(asyncio.CancelledError):
            await other.receiver.joined("s1.test", sent.join, sent.response, "12")
    assert await other.store.rooms_of(other.user()) == []
    assert (await other.store.sync(other.user())).join == {}
    result = await other.receiver.joined("s1.test", sent.join, sent.response, "12")
    assert result.outcome == "joined"
    await agree(sent.room_id, one, other)


async def test_a_restricted_join_has_the_signature_of_its_authoriser(
    two: list[Homeserver],
) -> None:
    """The other server adds it, and returns the join with both signatures."""
    one, other = two
    space = await shared_room(one, other)
    rule = {"join_rule": "restricted", "allow": [{"type": "m.room_membership", "room_id": space}]}
    room_id = await one.store.create_room(
        one.user(), initial_state=[("m.room.join_rules", "", rule)]
    )
    template = await one.store.template(
        room_id,
        other.user(),
        "m.room.member",
        {"membership": "join", "join_authorised_via_users_server": one.user()},
        state_key=other.user(),
    )
    join = sign(template, "12", "s2.test", signing_key("s2.test"))
    whole = sign(join, "12", "s1.test", signing_key("s1.test"))
    response = await one.send_join(whole)
    alone = await other.receiver.joined("s1.test", join, {**response, "event": join}, "12")
    assert (alone.outcome, alone.fault) == ("refused", "unsigned_join")
    joined = await other.receiver.joined("s1.test", join, response, "12")
    assert joined.outcome == "joined", joined
    await agree(room_id, one, other)


async def test_a_join_that_does_not_end_holds_up_no_transaction() -> None:
    locks = KeyedLocks()
    async with locks.lock("a room"):
        await locks.released(["a room", "another"], 0)
    await locks.released(["a room"], 60)
