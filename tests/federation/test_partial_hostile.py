"""False answers to a join with the members omitted, and to the request for the rest."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import asyncpg
import pytest

import storage
from storage import EventId, ServerName
from storage.event import parse, sign
from storage.federation import JoinResult, Receiver
from storage.persist import partial_marks
from storage.testing import RoomBuilder, signing_key
from tests.federation.built_remote import BuiltRemote, fail
from tests.federation.hanging import hang
from tests.federation.partial import omitted
from tests.federation.partial_worlds import SERVER, USER
from tests.federation.peers import QUICK
from tests.maintenance.rooms import findings

Json = dict[str, Any]
MEMBERS: Final = 6
ORIGIN: Final = "s1.test"


class FalseAnswers:
    """A public room of three servers, the join of a local user, and the receiver."""

    def __init__(self, store: storage.Store) -> None:
        self.room = build()
        self.remote = BuiltRemote(self.room)
        self.join = self.room.join(USER)
        self.store = store
        self.receiver = Receiver(store, self.remote, limits=QUICK)

    async def joined(self, change: Callable[[Json], object] = len) -> JoinResult:
        servers = self.remote.servers(self.join.state_before)
        answer = omitted(self.remote.send_join(self.join), self.room.version, servers)
        change(answer)
        return await self.receiver.joined(ORIGIN, self.join.json, answer, self.room.version)

    async def members(self) -> set[str]:
        return set(await self.store.member_ids(self.room.room_id))

    @property
    def everybody(self) -> set[str]:
        return {
            user
            for type_, user in self.join.state_after
            if type_ == "m.room.member"
            and self.room.graph.membership(self.join.state_after, user) == "join"
        }


def build(**content: str) -> RoomBuilder:
    """The room; with another content of the create event, another room of the same id."""
    room = RoomBuilder("11", seed=7)
    room.start(room.user(1), name="A room", content=content)
    for number in range(2, MEMBERS + 2):
        room.join(room.user(number))
    room.leave(room.user(3))
    return room


@pytest.fixture
async def here(dsn: str) -> AsyncIterator[FalseAnswers]:
    async with storage.open(dsn, server_name=SERVER, signing_key=signing_key(SERVER)) as store:
        yield FalseAnswers(store)


async def rows(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM events"))
    finally:
        await connection.close()


async def test_an_answer_without_an_auth_event_of_the_join_leaves_nothing(
    here: FalseAnswers, dsn: str
) -> None:
    for gone in parse(here.join.pdu, "11").auth_event_ids:

        def change(answer: Json, gone: EventId = gone) -> None:
            for name in ("state", "auth_chain"):
                kept = [one for one in answer[name] if parse(one, "11").event_id != gone]
                answer[name] = kept

        refused = await here.joined(change)
        assert (refused.outcome, refused.fault) == ("refused", "state_incomplete"), refused
        assert await rows(dsn) == 0
    assert (await here.joined()).is_partial


RUBBISH: Final[tuple[object, ...]] = (
    None,
    "s1.test",
    {},
    7,
    [7],
    ["no server!"],
    ["s1.test", None],
    [["s1.test"]],
)


async def test_servers_in_room_must_be_a_list_of_servers(here: FalseAnswers, dsn: str) -> None:
    for rubbish in RUBBISH:
        refused = await here.joined(lambda answer, one=rubbish: answer.update(servers_in_room=one))  # type: ignore[misc]
        assert (refused.outcome, refused.fault) == ("refused", "malformed_response"), rubbish
    refused = await here.joined(lambda answer: answer.pop("servers_in_room"))
    assert refused.fault == "malformed_response"
    assert await rows(dsn) == 0
    joined = await here.joined(lambda answer: answer.update(servers_in_room=[]))
    assert joined.is_partial
    assert await here.receiver.complete(here.room.room_id)
    assert await here.members() == here.everybody


async def another_create(body: Json) -> Json:
    """The state of another room with the same id."""
    del body
    other = build(topic="false")
    return {
        "pdu_ids": sorted(other.state.values()),
        "auth_chain_ids": sorted(other.graph.auth_chain(other.state.values())),
    }


async def false_event(body: Json) -> Json:
    """An event of another room with the same id, if there is one in its place."""
    del body
    other = build(topic="false")
    return {"pdus": [one.json for one in other.events]}


def twice(room: RoomBuilder) -> Callable[[Json], Any]:
    """Both memberships of a user who has left."""

    async def change(body: Json) -> Json:
        user = room.user(3)
        both = [one.event_id for one in room.events if one.state_key == user]
        return body | {"pdu_ids": [*{*body["pdu_ids"], *both}]}

    return change


async def nothing(_: Json) -> Json:
    return {}


@pytest.mark.parametrize(
    "fault", [another_create, twice(build()), nothing, fail, hang], ids=lambda one: one.__name__
)
async def test_after_a_false_answer_the_next_server_completes(
    here: FalseAnswers, fault: Callable[[Json], Any]
) -> None:
    """Alone, the false one completes nothing."""
    assert (await here.joined()).is_partial
    before = await here.store.sync(USER)
    here.remote.faults["*", "state_ids"] = fault
    if fault is another_create:
        here.remote.faults["*", "event"] = false_event
    assert not await here.receiver.complete(here.room.room_id)
    assert await here.members() == {USER}
    assert len(await here.store.partial_rooms()) == 1
    here.remote.faults.clear()
    here.remote.faults[ORIGIN, "state_ids"] = fault
    assert await here.receiver.complete(here.room.room_id)
    assert here.remote.calls["s2.test", "state_ids"] + here.remote.calls["s3.test", "state_ids"]
    assert await here.members() == here.everybody
    after = await here.store.sync(USER, since=before.next_batch)
    came = {one.state_key for one in after.join[here.room.room_id].state_after}
    assert came >= here.everybody - {USER}
    assert await findings(here.store) == []


async def test_half_of_the_members_make_a_state_that_later_events_extend(
    here: FalseAnswers,
) -> None:
    """No server can see that entries are left out: the rest comes with what the events cite."""
    assert (await here.joined()).is_partial
    state = here.join.state_before
    members = sorted(one for (type_, _), one in state.items() if type_ == "m.room.member")
    creator = state["m.room.member", here.room.user(1)]
    gone = {one for one in members[::2] if one != creator}

    async def half(body: Json) -> Json:
        return body | {"pdu_ids": [one for one in body["pdu_ids"] if one not in gone]}

    here.remote.faults["*", "state_ids"] = half
    assert await here.receiver.complete(here.room.room_id)
    lost = {str(here.room.event(one).state_key) for one in gone}
    assert await here.members() == here.everybody - lost
    assert await findings(here.store) == []


def wrong_auth_events(here: FalseAnswers) -> Json:
    """The join as a false template makes it: with an auth event that it may not have."""
    name = here.room.state["m.room.name", ""]
    odd = {**here.join.json, "auth_events": [*here.join.json["auth_events"], name]}
    return sign(odd, "11", SERVER, signing_key(SERVER))


async def test_a_join_that_its_own_auth_events_refuse_leaves_nothing(
    here: FalseAnswers, dsn: str
) -> None:
    join = wrong_auth_events(here)
    servers = here.remote.servers(here.join.state_before)
    answer = omitted(here.remote.send_join(here.join), "11", servers) | {"event": join}
    refused = await here.receiver.joined(ORIGIN, join, answer, "11")
    assert (refused.outcome, refused.fault) == ("refused", "not_allowed"), refused
    assert await rows(dsn) == 0
    assert (await here.joined()).is_partial
    assert await here.receiver.complete(here.room.room_id)
    assert await here.members() == here.everybody


async def test_the_mark_of_a_join_that_was_stored_as_rejected_is_taken_back(
    here: FalseAnswers,
) -> None:
    join, store = wrong_auth_events(here), here.store
    event_id, room_id = parse(join, "11").event_id, here.room.room_id
    await store.append(here.room.pdus, origin="outlier")
    async with store.database.transaction() as conn:
        assert await partial_marks.begin(conn, room_id, event_id, ServerName(ORIGIN), ())
    state = {event_id: here.join.state_before.values()}
    [result] = await store.append([join], room_version="11", state_before=state)
    assert result.outcome == "rejected"
    async with store.database.transaction() as conn:
        await partial_marks.abandon(conn, room_id, event_id)
    assert (await here.joined()).is_partial
    assert await here.receiver.complete(here.room.room_id)
    assert await here.members() == here.everybody
    assert await findings(store) == []
