"""Local users join, knock, leave and invite through other servers; and servers that lie to them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from signedjson.types import SigningKey

from storage import (
    AuthDenied,
    EventId,
    InputError,
    InvalidEvent,
    InvalidIdentifier,
    RoomId,
    responses,
)
from storage.event import sign
from storage.federation import RemoteError
from storage.testing import KEY_ID, signing_key
from storage.testing.assembly import foreign_signing_key
from tests.federation.hanging import hang
from tests.federation.partial import omitted
from tests.federation.peers import Homeserver, as_json, fail
from tests.federation.rooms import PUBLIC, agree, shared_room

Json = dict[str, Any]
KNOCK: Final = ("m.room.join_rules", "", {"join_rule": "knock"})
NAMED: Final = ("m.room.name", "", {"name": "The pantry"})
VERSIONS: Final = ("1", "3", "6", "10", "11", "12")


def changed(change: Callable[[Json], None]) -> Callable[[Json], Awaitable[Json]]:
    """A fault that changes a response."""

    async def fault(body: Json) -> Json:
        change(body)
        return body

    return fault


def lies(key: str, value: Any) -> Callable[[Json], Awaitable[Json]]:
    """A fault that changes a field of a template."""
    return changed(lambda body: body["event"].update({key: value}))


def signed_with(signatures: Json) -> Callable[[Json], Awaitable[Json]]:
    """A fault that changes the signatures on an invite."""
    return changed(lambda body: body["event"]["signatures"].update({"s2.test": signatures}))


async def json_of(server: Homeserver, event_id: EventId | None) -> Json:
    assert event_id is not None
    event = await server.store.event(event_id)
    assert event is not None
    return as_json(event)


async def membership(server: Homeserver, room_id: RoomId, user: Homeserver) -> str | None:
    return await server.store.membership(room_id, user.user())


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_user_joins_a_room_of_another_server(two: list[Homeserver], version: str) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=[PUBLIC])
    content = {"displayname": "Dora", "membership": "ban"}
    joined = await other.memberships.join(other.user(), room_id, ["s1.test"], content=content)
    assert (joined.outcome, joined.room_id, joined.user_id) == ("joined", room_id, other.user())
    join = await json_of(other, joined.event_id)
    assert join["content"] == {"displayname": "Dora", "membership": "join"}
    await agree(room_id, one, other)
    second = await other.memberships.join(other.user("second"), room_id)
    assert second.outcome == "joined"
    assert other.network.calls["send_join"] == 1  # the second join is made here
    await one.receive(other, [await json_of(other, second.event_id)])
    await agree(room_id, one, other)


def renamed(body: Json) -> None:
    """The same event id, and the same signatures, but another content."""
    event = body["event"]
    event["content"] = {**event["content"], "displayname": "Eve", "membership": "join"}
    event["unsigned"] = {"age": 5}
    event["signatures"] = {**event["signatures"], "s9.test": {"ed25519:1": "junk"}}


@pytest.mark.parametrize(
    "version,kind",
    [
        ("3", "whole"),
        ("6", "whole"),
        ("12", "whole"),
        ("11", "members omitted"),
        ("10", "restricted"),
        ("12", "restricted"),
    ],
)
async def test_the_answer_does_not_change_the_join(
    two: list[Homeserver], version: str, kind: str
) -> None:
    """The event id covers no name, so the name of a local user could be anything for ever."""
    one, other = two
    rules: tuple[str, str, Json] = PUBLIC
    if kind == "restricted":
        space = await shared_room(one, other, version=version)
        allowed = {"type": "m.room_membership", "room_id": space}
        rules = ("m.room.join_rules", "", {"join_rule": "restricted", "allow": [allowed]})
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=[rules])

    async def answer(body: Json) -> Json:
        renamed(body)
        return omitted(body, version, ["s1.test"]) if kind == "members omitted" else body

    other.network.faults["s1.test", "send_join"] = answer
    content = {"displayname": "Dora"}
    joined = await other.memberships.join(other.user(), room_id, ["s1.test"], content=content)
    stored = await other.store.event(joined.event_id or EventId(""))
    assert stored is not None
    assert (stored.content["displayname"], stored.pruned) == ("Dora", False)
    signers = {"s1.test", "s2.test"} if kind == "restricted" else {"s2.test"}
    assert stored.json["signatures"].keys() == signers
    assert "unsigned" not in stored.json
    members = await other.store.members(room_id)
    names = [one.content["displayname"] for one in members if one.state_key == other.user()]
    assert names == ["Dora"]


async def test_a_leave_and_an_invite_keep_their_contents(two: list[Homeserver]) -> None:
    """Whatever their answers have."""
    one, other = two
    room_id = await shared_room(one)

    def foreign(body: Json) -> None:
        if "event" not in body:
            body["event"] = {"content": {}, "signatures": {}}
        body["event"]["content"] = {"membership": "invite", "reason": "of Eve"}

    for request in ("invite", "send_leave"):
        for server in ("s1.test", "s2.test"):
            other.network.faults[server, request] = changed(foreign)
    invite = await one.memberships.invite(
        one.user(), room_id, other.user(), content={"reason": "of Ada"}
    )
    assert (await json_of(one, invite.event_id))["content"]["reason"] == "of Ada"
    left = await other.memberships.leave(
        other.user(), room_id, ["s1.test"], content={"reason": "of Dora"}
    )
    assert (await json_of(other, left.event_id))["content"]["reason"] == "of Dora"


async def test_two_users_that_join_at_once_request_one_state(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    users = [other.user(), other.user("second")]
    joins = [other.memberships.join(user, room_id, ["s1.test"]) for user in users]
    assert [joined.outcome for joined in await asyncio.gather(*joins)] == ["joined", "joined"]
    assert other.network.calls["send_join"] == 1
    assert set(await other.store.member_ids(room_id)) == {*users, one.user()}


def signed_by(key: SigningKey, **changes: Any) -> Callable[[Json], Awaitable[Json]]:
    """A fault: the second server signs an invite with this key, after it has changed it."""

    def change(body: Json) -> None:
        bare = {key: value for key, value in body["event"].items() if key != "signatures"}
        body["event"] = sign(bare | changes, "12", "s2.test", key)

    return changed(change)


LIES: Final = {
    "another room": lies("room_id", "!elsewhere:s1.test"),
    "another user": lies("sender", "@eve:s2.test"),
    "another target": lies("state_key", "@eve:s2.test"),
    "another type": lies("type", "m.room.name"),
    "another membership": lies("content", {"membership": "ban"}),
    "no content": lies("content", "join"),
    "no parents": lies("prev_events", {"$parent": 1}),
    "a depth that is no JSON": lies("depth", float("nan")),
    "no template": changed(lambda body: body.pop("event")),
    "a list": changed(lambda body: body.update(event=["m.room.member"])),
    "an unknown version": changed(lambda body: body.update(room_version="org.none")),
    "no version": changed(lambda body: body.pop("room_version")),
    "a list as version": changed(lambda body: body.update(room_version=["12"])),
    "an error": fail,
}


@pytest.mark.parametrize("request_name", ["make_join", "make_knock"])
async def test_a_false_template_is_not_signed(two: list[Homeserver], request_name: str) -> None:
    one, other = two
    rule = PUBLIC if request_name == "make_join" else KNOCK
    room_id = await one.store.create_room(one.user(), initial_state=[rule])
    members = other.memberships
    change = members.join if request_name == "make_join" else members.knock
    for name, fault in LIES.items():
        other.network.faults["s1.test", request_name] = fault
        with pytest.raises(RemoteError, match=r"^s1\.test: "):
            await change(other.user(), room_id, ["s1.test"])
        assert other.network.calls[request_name.replace("make", "send")] == 0, name
    other.network.faults.clear()
    await change(other.user(), room_id, ["s1.test"])
    assert await membership(one, room_id, other) == request_name.removeprefix("make_")


async def test_a_template_without_a_version_is_of_version_1(two: list[Homeserver]) -> None:
    """So are those of servers that are older than room versions."""
    one, other = two
    for request_name in ("make_join", "make_leave", "make_knock"):
        fault = changed(lambda body: body.pop("room_version"))
        other.network.faults["s1.test", request_name] = fault
    how: Json = {"room_version": "1", "initial_state": [PUBLIC]}
    room_id = await one.store.create_room(one.user(), **how)
    joined = await other.memberships.join(other.user(), room_id, ["s1.test"])
    assert (await other.receiver.version_of(joined.room_id or room_id)) == "1"
    await agree(room_id, one, other)
    private = await one.store.create_room(one.user(), room_version="1")
    await one.memberships.invite(one.user(), private, other.user("guest"))
    left = await other.memberships.leave(other.user("guest"), private)
    assert left.outcome == "stored"
    assert await one.store.membership(private, other.user("guest")) == "leave"


async def test_nothing_of_a_template_but_its_place_is_signed(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])

    def add(body: Json) -> None:
        body["event"] |= {"origin_server_ts": 5, "unsigned": {"age": 1}, "surprise": True}
        body["event"]["content"]["displayname"] = "I was here"

    other.network.faults["s1.test", "make_join"] = changed(add)
    joined = await other.memberships.join(other.user(), room_id, ["s1.test"])
    join = await json_of(other, joined.event_id)
    assert join["content"] == {"membership": "join"}
    assert not join.keys() & {"surprise", "unsigned"}
    assert join["origin_server_ts"] > 5


async def test_the_version_of_another_room_is_refused_after_send_join(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), room_version="10", initial_state=[PUBLIC])
    faults = other.network.faults
    faults["s1.test", "make_join"] = changed(lambda body: body.update(room_version="11"))
    with pytest.raises(RemoteError):
        await other.memberships.join(other.user(), room_id, ["s1.test"])
    assert await other.store.rooms_of(other.user()) == []


async def test_the_second_of_three_servers_works(three: list[Homeserver]) -> None:
    one, resident, other = three
    room_id = await shared_room(one, resident)
    network = other.network
    for request_name, fault in (
        ("make_join", fail),
        ("make_join", hang),
        ("make_join", lies("sender", "@eve:s3.test")),
        ("send_join", fail),
        ("send_join", changed(lambda body: body["state"].clear())),
    ):
        network.faults = {("s1.test", request_name): fault}
        network.calls.clear()
        servers = ["s1.test", "s2.test", "s9.test"]
        joined = await other.memberships.join(other.user(), room_id, servers)
        assert joined.outcome == "joined"
        assert network.calls["make_join"] == 2
        await resident.receive(other, [await json_of(other, joined.event_id)])
        left = await other.memberships.leave(other.user(), room_id)
        gone = await json_of(other, left.event_id)
        for server in (one, resident):
            await server.receive(other, [await json_of(other, joined.event_id), gone])
            assert await membership(server, room_id, other) == "leave"


async def test_the_failures_of_all_servers_are_named(two: list[Homeserver]) -> None:
    _, other = two
    servers = [f"s{number}.test" for number in range(5, 15)]
    with pytest.raises(RemoteError) as failed:
        await other.memberships.join(other.user(), RoomId("!none"), servers)
    assert str(failed.value).count("no such server") == 5
    assert failed.value.status is None
    with pytest.raises(RemoteError) as unknown:
        await other.memberships.join(other.user(), RoomId("!none:s2.test"))
    assert (unknown.value.status, unknown.value.errcode) == (404, "M_NOT_FOUND")


async def test_the_status_of_the_last_response_is_kept(two: list[Homeserver]) -> None:
    _, other = two

    async def incompatible(_: Json) -> Json:
        errcode = "M_INCOMPATIBLE_ROOM_VERSION"
        raise RemoteError("it is new", status=400, errcode=errcode, room_version="org.new")

    other.network.faults["s1.test", "make_join"] = incompatible
    with pytest.raises(RemoteError) as refused:
        await other.memberships.join(other.user(), RoomId("!room"), ["s1.test", "s9.test"])
    assert responses.error(refused.value)[1]["room_version"] == "org.new"

    async def forbidden(_: Json) -> Json:
        raise RemoteError("you are banned", status=403, errcode="M_FORBIDDEN")

    other.network.faults["s1.test", "make_join"] = forbidden
    with pytest.raises(RemoteError, match=r"you are banned.*no such server") as refused:
        await other.memberships.join(other.user(), RoomId("!room"), ["s1.test", "s9.test"])
    assert (refused.value.status, refused.value.errcode) == (403, "M_FORBIDDEN")


async def test_an_invite_is_signed_by_both_servers_and_accepted(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[NAMED])
    content = {"reason": "come in"}
    sent = await one.memberships.invite(one.user(), room_id, other.user(), content=content)
    invite = await json_of(one, sent.event_id)
    assert invite["signatures"].keys() == {"s1.test", "s2.test"}
    assert invite["content"] == {"reason": "come in", "membership": "invite"}
    shown = (await other.store.sync(other.user())).invite[room_id].invite_state
    assert {"m.room.create", "m.room.name", "m.room.member"} <= {one["type"] for one in shown}
    joined = await other.memberships.join(other.user(), room_id)  # the inviter's server is tried
    assert joined.outcome == "joined"
    await agree(room_id, one, other)
    again = await one.memberships.invite(one.user(), room_id, other.user("second"))
    assert again.outcome == "stored"
    assert one.network.calls["invite"] == 2  # also of a server that is in the room
    assert (await json_of(one, again.event_id))["signatures"].keys() == {"s1.test", "s2.test"}


async def test_an_invite_that_its_server_does_not_sign_is_not_stored(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    for fault in (
        fail,
        hang,
        changed(lambda body: body.clear()),
        changed(lambda body: body.update(event="invite")),
        changed(lambda body: body["event"].update(signatures=["s2.test"])),
        changed(lambda body: body["event"]["signatures"].pop("s2.test")),
        signed_with({"ed25519:1": 1}),
        signed_with({}),
        signed_with({"ed25519:1": "\ud800"}),
        signed_with({"ed25519:1": "A" * 70_000}),
        signed_with({KEY_ID: "A" * 86}),
        signed_by(signing_key("s1.test")),
        signed_by(foreign_signing_key("s2.test")),
        signed_by(signing_key("s2.test"), content={"membership": "leave"}),
        signed_by(signing_key("s2.test"), content={"membership": "invite", "reason": "changed"}),
    ):
        one.network.faults["s2.test", "invite"] = fault
        with pytest.raises(RemoteError):
            await one.memberships.invite(one.user(), room_id, other.user())
        assert await membership(one, room_id, other) is None
    shared = await shared_room(one, other)
    with pytest.raises(RemoteError):
        await one.memberships.invite(one.user(), shared, other.user("guest"))
    assert await one.store.membership(shared, other.user("guest")) is None


async def test_a_server_cannot_change_an_invite_that_it_signs(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())

    def change(body: Json) -> None:
        body["event"]["content"] = {"membership": "invite", "reason": "changed"}

    one.network.faults["s2.test", "invite"] = changed(change)
    sent = await one.memberships.invite(one.user(), room_id, other.user())
    assert (await json_of(one, sent.event_id))["content"] == {"membership": "invite"}


async def test_an_invite_is_rejected_through_the_inviter(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    await one.memberships.invite(one.user(), room_id, other.user())
    left = await other.memberships.leave(other.user(), room_id, content={"reason": "no"})
    assert left.outcome == "stored"
    assert (await other.store.sync(other.user())).invite == {}
    assert await membership(one, room_id, other) == "leave"
    assert (await json_of(one, left.event_id))["content"]["reason"] == "no"


async def test_a_user_knocks_and_takes_it_back(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[KNOCK, NAMED])
    with pytest.raises(RemoteError):
        await other.memberships.join(other.user(), room_id, ["s1.test"])
    await other.memberships.knock(other.user(), room_id, ["s1.test"])
    shown = (await other.store.sync(other.user())).knock[room_id].knock_state
    assert "m.room.name" in {one["type"] for one in shown}
    assert await membership(one, room_id, other) == "knock"
    await other.memberships.leave(other.user(), room_id, ["s1.test"])
    assert (await other.store.sync(other.user())).knock == {}
    assert await membership(one, room_id, other) == "leave"


async def test_a_restricted_join_has_the_signature_of_its_authoriser(
    two: list[Homeserver],
) -> None:
    one, other = two
    space = await shared_room(one, other, version="11")
    allowed = {"type": "m.room_membership", "room_id": space}
    rule = ("m.room.join_rules", "", {"join_rule": "restricted", "allow": [allowed]})
    room_id = await one.store.create_room(one.user(), room_version="11", initial_state=[rule])
    joined = await other.memberships.join(other.user(), room_id, ["s1.test"])
    join = await json_of(other, joined.event_id)
    assert join["content"]["join_authorised_via_users_server"] == one.user()
    assert join["signatures"].keys() == {"s1.test", "s2.test"}
    await agree(room_id, one, other)


async def test_only_local_users_change_their_memberships(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    for change in (other.memberships.join, other.memberships.knock, other.memberships.leave):
        with pytest.raises(InvalidIdentifier):
            await change(one.user(), room_id, ["s1.test"])
    with pytest.raises(InvalidIdentifier):
        await one.memberships.invite(other.user(), room_id, one.user("guest"))
    with pytest.raises(InputError):
        await other.memberships.join(other.user(), room_id, "s1.test")
    with pytest.raises(AuthDenied):
        await one.memberships.join(one.user("guest"), room_id)


async def test_a_content_that_no_event_can_have_is_not_sent(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    own = await other.store.create_room(other.user())
    deep: list[Any] = []
    for _ in range(2_000):
        deep = [deep]
    for name in ("x" * 70_000, "\ud800", float("inf"), deep, object()):
        content = {"displayname": name}
        for call in (
            other.memberships.join(other.user(), room_id, ["s1.test"], content=content),
            other.memberships.invite(other.user(), own, one.user(), content=content),
        ):
            with pytest.raises(InvalidEvent):
                await call
    with pytest.raises(InputError, match="mapping"):
        await other.memberships.invite(other.user(), own, one.user(), content=[])  # type: ignore[arg-type]
    assert other.network.calls.total() == 0
