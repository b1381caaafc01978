"""The JSON of responses to clients: /sync, both forms of sliding sync, and rooms."""

import asyncio
import json
from typing import Any, Final, NamedTuple

import pytest

import storage
from storage import (
    EventId,
    Hero,
    InputError,
    RoomId,
    RoomSubscription,
    SlidingFilter,
    SlidingList,
    SlidingListResult,
    SlidingRoom,
    SlidingSync,
    SlidingSyncRequest,
    Store,
    SyncFilter,
    UserId,
    responses,
)
from storage.queries.unread import Unread
from storage.streams import SyncToken, VectorPosition
from storage.streams.account_data import AccountDataRow
from storage.streams.receipts import ReceiptRow
from storage.streams.to_device import MessageRow
from storage.streams.tokens import PosToken
from tests.queries.rooms import ADMIN, LOCAL, OTHER, deliver, new_room

DEVICE = "PHONE"
EVERYTHING: Final = ("receipts", "account_data", "to_device", "unread")
NAME = "m.room.name"


async def synced(store: Store, user: str, **how: Any) -> dict[str, Any]:
    found = await store.sync(user, device_id=DEVICE, include=EVERYTHING)
    made = await responses.sync(store, user, found, device_id=DEVICE, **how)
    json.dumps(made)
    return made


async def test_sync(store: Store) -> None:
    room = new_room(members=[LOCAL], name="The pantry")
    for number in range(12):
        room.message(ADMIN, f"message {number}")
    await deliver(store, room)
    room_id, read = room.room_id, room.events[-3].event_id
    user = UserId(LOCAL)
    await store.account_data.set(user, "m.direct", {"@a:b": [room_id]})
    await store.account_data.set(user, "m.tag", {"tags": {}}, room_id=room_id)
    await store.receipts.set(room_id, "m.read", user, read, {"ts": 5}, thread_id="main")
    await store.to_device.send({user: {DEVICE: {"type": "m.dummy", "content": {}}}})

    made = await synced(store, LOCAL)
    direct = {"type": "m.direct", "content": {"@a:b": [room_id]}}
    assert made["account_data"] == {"events": [direct]}
    assert made["to_device"] == {"events": [{"type": "m.dummy", "content": {}}]}
    joined = made["rooms"]["join"][room_id]
    events = joined["timeline"].pop("events")
    assert [one["content"]["body"] for one in events] == [f"message {one}" for one in range(2, 12)]
    assert joined["timeline"].keys() == {"limited", "prev_batch"}
    assert "room_id" not in events[0]
    assert events[0]["unsigned"]["membership"] == "join"
    state = {one["type"]: one["content"] for one in joined["state"]["events"]}
    assert state[NAME] == {"name": "The pantry"}
    assert joined["account_data"] == {"events": [{"type": "m.tag", "content": {"tags": {}}}]}
    receipts = {read: {"m.read": {LOCAL: {"ts": 5, "thread_id": "main"}}}}
    assert joined["ephemeral"] == {"events": [{"type": "m.receipt", "content": receipts}]}
    assert joined["summary"] == {"m.joined_member_count": 2, "m.invited_member_count": 0}
    assert joined["unread_notifications"] == {"notification_count": 2, "highlight_count": 0}
    assert "unread_thread_notifications" not in joined

    after = (await synced(store, LOCAL, use_state_after=True))["rooms"]["join"][room_id]
    assert "state" not in after
    assert NAME in {one["type"] for one in after["state_after"]["events"]}


async def test_sync_of_rooms_that_the_user_is_not_in(store: Store) -> None:
    left, invited = new_room(members=[LOCAL], seed=1), new_room(seed=2)
    await deliver(store, left)
    before = (await store.sync(LOCAL)).next_batch
    left.kick(ADMIN, LOCAL)
    invited.invite(ADMIN, LOCAL)
    for room in (left, invited):
        await deliver(store, room)
    found = await store.sync(LOCAL, since=before)
    rooms = (await responses.sync(store, LOCAL, found))["rooms"]
    assert rooms["join"] == rooms["knock"] == {}
    [kick] = rooms["leave"][left.room_id]["timeline"]["events"]
    assert kick["content"]["membership"] == "leave"
    stripped = rooms["invite"][invited.room_id]["invite_state"]["events"]
    assert LOCAL in {one["state_key"] for one in stripped}


async def test_heroes_of_a_room_without_a_name(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    await deliver(store, room)
    joined = (await synced(store, LOCAL))["rooms"]["join"][room.room_id]
    assert joined["summary"]["m.heroes"] == [ADMIN, OTHER]


INVITED = RoomId("!invited:s1.test")


class SlidingAnswer(NamedTuple):
    """A response with a room that the user has joined, and an invite."""

    found: SlidingSync
    room_id: RoomId
    message: EventId
    name: EventId


@pytest.fixture
async def answer(store: Store) -> SlidingAnswer:
    room = new_room(members=[LOCAL], name="The pantry")
    message = room.message(ADMIN, "hello")
    await deliver(store, room)
    stored = await store.events([one.event_id for one in room.events])
    [name] = [one for one in stored.values() if one.type == NAME]
    shown = SlidingRoom(
        membership="join",
        initial=True,
        name="The pantry",
        heroes=[Hero(UserId(LOCAL), displayname="Me")],
        required_state=[name],
        removed_state=[("m.room.topic", "")],
        timeline=[stored[message.event_id]],
        prev_batch="p",
        expanded_timeline=True,
        num_live=1,
        bump_stamp=7,
        joined_count=2,
        lists=["all"],
        changed=frozenset({"name", "avatar"}),
        unread=Unread(main=4),
    )
    invited = SlidingRoom(membership="invite", stripped_state=[{"type": "m.room.member"}])
    receipt = ReceiptRow(3, "m.read", LOCAL, None, message.event_id, b'{"ts":5}')
    upto = SyncToken.of({"to_device": VectorPosition(7)})
    found = SlidingSync(
        pos=PosToken(1, 1, upto).print(store.deployment_id),
        lists={"all": SlidingListResult(2)},
        rooms={room.room_id: shown, INVITED: invited},
        to_device=[MessageRow(7, b'{"type":"m.dummy"}')],
        account_data=[
            AccountDataRow(1, None, "m.direct", b"{}"),
            AccountDataRow(2, room.room_id, "m.tag", b'{"tags":{}}'),
        ],
        receipts={room.room_id: [receipt]},
    )
    return SlidingAnswer(found, room.room_id, message.event_id, name.event_id)


async def test_the_stable_form_of_a_sliding_sync(store: Store, answer: SlidingAnswer) -> None:
    made = await responses.sliding_sync(store, LOCAL, SlidingSyncRequest(), answer.found)
    json.dumps(made)
    assert (made["pos"], made["lists"]) == (answer.found.pos, {"all": {"count": 2}})
    room = made["rooms"][answer.room_id]
    [event] = room.pop("timeline")
    assert (event["content"]["body"], event["unsigned"]["membership"]) == ("hello", "join")
    state, stub = room.pop("required_state")
    assert state["content"] == {"name": "The pantry"}
    assert stub == {"type": "m.room.topic", "state_key": ""}
    assert room == {
        "membership": "join",
        "initial": True,
        "limited": False,
        "expanded_timeline": True,
        "name": "The pantry",
        "avatar": None,  # it was removed
        "heroes": [{"user_id": LOCAL, "displayname": "Me"}],
        "prev_batch": "p",
        "num_live": 1,
        "bump_stamp": 7,
        "joined_count": 2,
        "lists": ["all"],
        "notification_count": 4,
        "highlight_count": 0,
    }
    assert made["rooms"][INVITED] == {
        "membership": "invite",
        "initial": False,
        "limited": False,
        "num_live": 0,
        "stripped_state": [{"type": "m.room.member"}],
        "required_state": [],
        "timeline": [],
    }


async def test_the_unstable_form_of_a_sliding_sync(store: Store, answer: SlidingAnswer) -> None:
    request = SlidingSyncRequest()
    old = await responses.sliding_sync(store, LOCAL, request, answer.found, unstable=True)
    assert old["extensions"] == {}
    room = old["rooms"][answer.room_id]
    assert [one["event_id"] for one in room["timeline"]] == [answer.message]
    assert [one["event_id"] for one in room["required_state"]] == [answer.name]
    assert room["unstable_expanded_timeline"] is True
    assert old["rooms"][INVITED]["invite_state"] == [{"type": "m.room.member"}]
    assert not {"expanded_timeline", "stripped_state"} & room.keys()


@pytest.mark.parametrize("form", ["stable", "unstable"])
def test_a_request_has_at_most_100_subscriptions(form: str) -> None:
    state: Any = {"include": [{}]} if form == "stable" else [["*", "*"]]
    one = {"timeline_limit": 1, "required_state": state}
    rooms = {f"!{number}:s1.test": one for number in range(101)}
    with pytest.raises(InputError, match="101 entries, more than 100"):
        responses.sliding_request({"room_subscriptions": rooms})
    rooms.popitem()
    assert responses.sliding_request({"room_subscriptions": rooms}).room_subscriptions.keys() == (
        rooms.keys()
    )


async def test_extensions_of_a_sliding_sync(store: Store, answer: SlidingAnswer) -> None:
    request = SlidingSyncRequest(extensions=["to_device", "account_data", "receipts"])
    made = await responses.sliding_sync(store, LOCAL, request, answer.found)
    receipts = {answer.message: {"m.read": {LOCAL: {"ts": 5}}}}
    assert made["extensions"] == {
        "to_device": {"next_batch": "7", "events": [{"type": "m.dummy"}]},
        "account_data": {
            "global": [{"type": "m.direct", "content": {}}],
            "rooms": {answer.room_id: [{"type": "m.tag", "content": {"tags": {}}}]},
        },
        "receipts": {"rooms": {answer.room_id: {"type": "m.receipt", "content": receipts}}},
    }


@pytest.mark.parametrize("threads", [["main", None], [None, "main"]], ids=["last", "first"])
async def test_a_receipt_without_a_thread_comes_first(
    store: Store, threads: list[str | None]
) -> None:
    """The event has a place for one of them: the other would leave the room unread."""
    room = new_room(members=[LOCAL])
    read = room.message(ADMIN).event_id
    await deliver(store, room)
    for thread in threads:
        user = UserId(LOCAL)
        await store.receipts.set(room.room_id, "m.read", user, read, {"ts": 5}, thread_id=thread)
    joined = (await synced(store, LOCAL))["rooms"]["join"][room.room_id]
    [shown] = joined["ephemeral"]["events"]
    assert shown["content"] == {read: {"m.read": {LOCAL: {"ts": 5}}}}


async def test_each_thread_has_a_receipt_for_one_event(store: Store) -> None:
    """An m.receipt has a place for one of them: the other one is in a second m.receipt."""
    room = new_room(members=[LOCAL, OTHER])
    root = room.message(ADMIN)
    read = room.threaded(ADMIN, root, "reply").event_id
    await deliver(store, room)
    for user, threads in ((LOCAL, ("main", root.event_id)), (OTHER, ("main",))):
        for thread in threads:
            await store.receipts.set(
                room.room_id, "m.read", UserId(user), read, {"ts": 5}, thread_id=thread
            )
    joined = (await synced(store, LOCAL))["rooms"]["join"][room.room_id]
    found = sorted(
        (user, data["thread_id"])
        for one in joined["ephemeral"]["events"]
        for user, data in one["content"][read]["m.read"].items()
    )
    assert found == [(LOCAL, root.event_id), (LOCAL, "main"), (OTHER, "main")]


async def test_only_a_limited_timeline_has_aggregations(store: Store) -> None:
    """Client-server API, "Server-side aggregation of m.* relationships": /sync."""
    room = new_room(members=[LOCAL])
    said = room.message(ADMIN)
    room.threaded(ADMIN, said, "reply")
    await deliver(store, room)
    for limit in (100, 2):
        found = await store.sync(LOCAL, timeline_limit=limit)
        timeline = (await responses.sync(store, LOCAL, found))["rooms"]["join"][room.room_id][
            "timeline"
        ]
        assert timeline["limited"] is (limit == 2)
        [shown] = [one for one in timeline["events"] if one["event_id"] == said.event_id]
        assert ("m.relations" in shown["unsigned"]) is (limit == 2)


@pytest.mark.parametrize("wanted", [None, False, True])
async def test_unread_threads_are_for_clients_that_request_them(
    store: Store, wanted: bool | None
) -> None:
    """Client-server API, RoomEventFilter: `unread_thread_notifications` is false by default."""
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    for _ in range(3):
        room.threaded(ADMIN, root, "reply")
    await deliver(store, room)
    for in_filter in (False, True):
        asks = SyncFilter(unread_thread_notifications=in_filter)
        found = await store.sync(LOCAL, device_id=DEVICE, filter=asks)
        assert found.join[room.room_id].unread == Unread(1, {root.event_id: 3})
        made = await responses.sync(store, LOCAL, found, unread_thread_notifications=wanted)
        joined = made["rooms"]["join"][room.room_id]
        by_thread = in_filter if wanted is None else wanted
        count = joined["unread_notifications"]["notification_count"]
        assert count == (1 if by_thread else 4)
        threads = {root.event_id: {"notification_count": 3, "highlight_count": 0}}
        assert joined.get("unread_thread_notifications") == (threads if by_thread else None)


def test_what_a_device_has_received() -> None:
    given = {"extensions": {"to_device": {"enabled": True, "since": "7"}}}
    assert responses.received_upto(given) == 7
    given["extensions"]["to_device"]["since"] = "5.w__2-9"
    assert responses.received_upto(given) == VectorPosition(5, (("w_2", 9),))
    for without in ({}, {"extensions": {"to_device": {"enabled": True}}}):
        assert responses.received_upto(without) == 0
    numbers = ("x", [7], 1e999, "9" * 5_000, -1, "-1", 2**63, 7.5, True, "5.w-5", "07", "5.", "")
    bad: list[Any] = [{"extensions": {"to_device": {"since": one}}} for one in numbers]
    for malformed in ({"extensions": []}, [], None, *bad):
        with pytest.raises(InputError):
            responses.received_upto(malformed)


async def test_a_message_that_is_still_being_written_is_not_deleted(dsn: str) -> None:
    """The other writer has committed a later message, and the client has got that one."""
    user = UserId(LOCAL)

    async def answer(store: Store, body: dict[str, Any], pos: str | None) -> Any:
        await store.to_device.delete(user, DEVICE, responses.received_upto(body))
        request = responses.sliding_request(body)
        found = await store.sliding_sync(user, request, device_id=DEVICE, pos=pos)
        made = await responses.sliding_sync(store, user, request, found, device_id=DEVICE)
        return made["pos"], made["extensions"]["to_device"]

    def message(body: str) -> dict[UserId, dict[str, dict[str, str]]]:
        return {user: {DEVICE: {"body": body}}}

    async with (
        storage.open(dsn, server_name="s1.test") as one,
        storage.open(dsn, server_name="s1.test", instance_name="other") as two,
    ):
        await one.to_device.send(message("first"))
        async with two.database.transaction() as conn:
            await conn.execute(SQL_HOLD_MAIN)
            slow = asyncio.create_task(one.to_device.send(message("slow")))
            await waits_for_a_lock(two)
            last = await two.to_device.send(message("fast"))
            body: dict[str, Any] = {"extensions": {"to_device": {"enabled": True}}}
            pos, inbox = await answer(two, body, None)
            assert [one["body"] for one in inbox["events"]] == ["first", "fast"]
        assert await slow < last
        body["extensions"]["to_device"]["since"] = inbox["next_batch"]
        _, inbox = await answer(two, body, pos)
        assert [one["body"] for one in inbox["events"]] == ["slow"]


SQL_HOLD_MAIN: Final = """
SELECT FROM stream_positions
WHERE stream_name = 'to_device' AND instance_name = 'main'
FOR UPDATE
"""


SQL_WAITING: Final = """
SELECT count(*)
FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


async def waits_for_a_lock(store: Store) -> None:
    """Return when a statement of another session waits for a row that this one has locked."""
    while True:
        async with store.database.connection() as conn:
            if await conn.fetchval(SQL_WAITING):
                return


STABLE = {
    "conn_id": "main",
    "lists": {
        "all": {
            "range": [0, 19],
            "timeline_limit": 3,
            "required_state": {
                "include": [{"type": NAME, "state_key": ""}, {"type": "m.space.child"}, {}],
                "exclude": [{"type": "m.room.topic"}, {"state_key": "k"}],
                "lazy_members": True,
            },
            "filters": {"is_invited": False, "room_types": [None]},
        },
        "whole": {"timeline_limit": 1},
    },
    "room_subscriptions": {
        "!a:s1.test": {"timeline_limit": 20, "required_state": {"include": [{"state_key": "k"}]}}
    },
    "extensions": {"receipts": {"enabled": True}, "to_device": {"enabled": False}, "typing": {}},
}
UNSTABLE = {
    "conn_id": "main",
    "lists": {
        "all": {
            "ranges": [[0, 19]],
            "timeline_limit": 3,
            "required_state": [
                [NAME, ""],
                ["m.space.child", "*"],
                ["*", "*"],
                ["m.room.member", "$LAZY"],
            ],
            "filters": {"is_invite": False, "room_types": [None], "unknown": 1},
            "sort": ["by_recency"],
        },
        "whole": {"timeline_limit": 1, "filters": None},
    },
    "room_subscriptions": {
        "!a:s1.test": {"timeline_limit": 20, "required_state": [["*", "k"]]},
    },
    "extensions": {"receipts": {"enabled": True}},
}


@pytest.mark.parametrize(
    "body, excluded",
    [(STABLE, [("m.room.topic", "*"), ("*", "k")]), (UNSTABLE, [])],
    ids=["stable", "unstable"],
)
def test_both_forms_of_a_sliding_request(
    body: dict[str, Any], excluded: list[tuple[str, str]]
) -> None:
    state = [(NAME, ""), ("m.space.child", "*"), ("*", "*"), ("m.room.member", "$LAZY")]
    filters = SlidingFilter(is_invited=False, room_types=[None])
    assert responses.sliding_request(body) == SlidingSyncRequest(
        conn_id="main",
        lists={
            "all": SlidingList([(0, 19)], 3, state, filters, excluded),
            "whole": SlidingList(timeline_limit=1),
        },
        room_subscriptions={RoomId("!a:s1.test"): RoomSubscription(20, [("*", "k")])},
        extensions=["receipts"],
    )
    assert responses.sliding_request({}) == SlidingSyncRequest()


@pytest.mark.parametrize(
    "body",
    [
        {"lists": []},
        {"lists": {"a": {"ranges": [[1]]}}},
        {"lists": {"a": {"ranges": [["x", "y"]]}}},
        {"lists": {"a": {"required_state": [["m.room.name"]]}}},
        {"lists": {"a": {"required_state": {"include": ["m.room.name"]}}}},
        {"lists": {"a": {"required_state": {"exclude": ["m.room.name"]}}}},
        {"lists": {"a": {"filters": [1]}}},
        {"lists": {"a": {"filters": {"is_dm": "yes"}}}},
        {"room_subscriptions": {"!a:s1.test": []}},
        {"extensions": {"receipts": True}},
        {"conn_id": 5},
        {"lists": None},
        {"lists": {"a": {"range": None}}},
        {"lists": {"a": {"required_state": {"include": None}}}},
        {"lists": {"a": {"timeline_limit": "many"}}},
    ],
)
def test_a_malformed_sliding_request(body: dict[str, Any]) -> None:
    with pytest.raises(InputError) as malformed:
        responses.sliding_request(body)
    for text_of_python in ("object", "not enough", "to unpack", "iterable", "argument", "sequence"):
        assert text_of_python not in str(malformed.value).replace("are objects", "")


async def test_rooms(store: Store) -> None:
    room = new_room(name="The pantry", visibility="world_readable")
    child = new_room(seed=3)
    via = {"via": ["s1.test"]}
    room.state_event(ADMIN, "m.space.child", via, child.room_id)
    for one in (room, child):
        await deliver(store, one)
    infos = await store.rooms([room.room_id, child.room_id])
    summary = responses.room_summary(infos[room.room_id])
    assert summary == {
        "room_id": room.room_id,
        "name": "The pantry",
        "join_rule": "public",
        "num_joined_members": 1,
        "world_readable": True,
        "guest_can_join": False,
    }
    children = await store.space_children(room.room_id)
    entry = responses.hierarchy_room(infos[room.room_id], children)
    [state] = entry.pop("children_state")
    assert entry == summary | {"room_version": "11"}
    assert state.keys() == {"type", "state_key", "sender", "content", "origin_server_ts"}
    assert (state["state_key"], state["content"]) == (child.room_id, via)
    assert "name" not in responses.room_summary(infos[child.room_id])
