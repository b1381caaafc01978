"""`rooms`: what clients show of a room, however hostile its content is."""

from typing import Any

import pytest

from storage import RoomInfo, Store, responses
from storage.errors import StorageCorrupt
from storage.ids import RoomId, UserId
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, new_room

CONTENTS: dict[str, dict[str, Any]] = {
    "m.room.name": {"name": "Kitchen"},
    "m.room.topic": {"topic": "Food"},
    "m.room.avatar": {"url": "mxc://s1.test/one"},
    "m.room.canonical_alias": {"alias": "#kitchen:s1.test"},
    "m.room.join_rules": {
        "join_rule": "restricted",
        "allow": [{"type": "m.room_membership", "room_id": "!house:s1.test"}],
    },
    "m.room.guest_access": {"guest_access": "can_join"},
    "m.room.encryption": {"algorithm": "m.megolm.v1.aes-sha2"},
    "m.room.tombstone": {"body": "moved", "replacement_room": "!newer:s1.test"},
}
TEXTS = {
    "m.room.name": "name",
    "m.room.topic": "topic",
    "m.room.avatar": "url",
    "m.room.canonical_alias": "alias",
    "m.room.guest_access": "guest_access",
    "m.room.encryption": "algorithm",
    "m.room.tombstone": "replacement_room",
}
NO_TEXTS: list[Any] = [None, 7, True, [], ["a"], {}, {"name": "a"}, "", "nul\0", "\0"]


def described(version: str = "11", seed: int = 0) -> RoomBuilder:
    """A space with everything that a room can have."""
    room = RoomBuilder(version, seed=seed, sign=False)
    content = {
        "type": "m.space",
        "predecessor": {"room_id": "!older:s1.test", "event_id": "$last"},
    }
    if version == "12":
        content["additional_creators"] = [OTHER, ADMIN, OTHER]
    room.start(ADMIN, content=content, history_visibility="world_readable")
    room.join(LOCAL)
    room.invite(ADMIN, REMOTE)
    for type_, one in CONTENTS.items():
        room.state_event(ADMIN, type_, one)
    return room


def bare(room: RoomBuilder, **other: Any) -> RoomInfo:
    """The description of a room that says nothing of itself."""
    known: dict[str, Any] = {
        "room_id": room.room_id, "version": room.version, "type": None, "name": None,
        "topic": None, "avatar": None, "alias": None, "join_rule": None, "allowed_rooms": (),
        "visibility": None, "guest_access": None, "encryption": None, "creators": (),
        "predecessor": None, "successor": None, "joined_count": 0, "invited_count": 0,
    }  # fmt: skip
    return RoomInfo(**{**known, **other})


async def info(store: Store, room: RoomBuilder) -> RoomInfo:
    return (await store.rooms([room.room_id]))[room.room_id]


@pytest.mark.parametrize("version", ["8", "10", "11", "12"])
async def test_all_facts_of_a_room(store: Store, version: str) -> None:
    room = described(version)
    await deliver(store, room)
    assert await info(store, room) == RoomInfo(
        room_id=room.room_id,
        version=version,
        type="m.space",
        name="Kitchen",
        topic="Food",
        avatar="mxc://s1.test/one",
        alias="#kitchen:s1.test",
        join_rule="restricted",
        allowed_rooms=(RoomId("!house:s1.test"),),
        visibility="world_readable",
        guest_access="can_join",
        encryption="m.megolm.v1.aes-sha2",
        creators=(UserId(ADMIN), *([UserId(OTHER)] if version == "12" else [])),
        predecessor=RoomId("!older:s1.test"),
        successor=RoomId("!newer:s1.test"),
        joined_count=2,
        invited_count=1,
    )


async def test_one_statement_for_any_number_of_rooms(
    store: Store, statements: StatementLog
) -> None:
    rooms = [new_room(seed=seed, name=f"room {seed}") for seed in range(5)]
    for room in rooms:
        await deliver(store, room)
    wanted = [room.room_id for room in reversed(rooms)]
    statements.take()
    found = await store.rooms([*wanted, RoomId("!nowhere:s1.test"), wanted[0]])
    assert len(statements.take()) == 1
    assert list(found) == wanted, "in the order of the request, without the unknown one"
    assert [one.name for one in found.values()] == [f"room {seed}" for seed in (4, 3, 2, 1, 0)]
    assert await store.rooms([]) == {}


async def test_texts_that_are_none_are_none(store: Store) -> None:
    """Each field, with each value that is no text to show."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    expected = await info(store, room)
    for value in NO_TEXTS:
        for type_, name in TEXTS.items():
            room.state_event(ADMIN, type_, {name: value})
        await deliver(store, room)
        assert await info(store, room) == expected, value
    for type_ in TEXTS:
        room.state_event(ADMIN, type_, {})
    room.state_event(ADMIN, "m.room.canonical_alias", {"alias": "kitchen"})
    room.state_event(ADMIN, "m.room.tombstone", {"replacement_room": "#kitchen:s1.test"})
    room.history_visibility(ADMIN, "everybody")
    await deliver(store, room)
    found = await info(store, room)
    assert (found.alias, found.successor, found.visibility) == (None, None, None)


@pytest.mark.parametrize(
    "content",
    [
        {"type": 7, "predecessor": "!older:s1.test", "additional_creators": [ADMIN]},
        {"type": {"m.space": True}, "predecessor": {"room_id": ["!older:s1.test"]}},
        {"type": "", "predecessor": {"room_id": "older"}, "additional_creators": {"a": 1}},
        {"type": "nul\0", "predecessor": [{"room_id": "!older:s1.test"}]},
    ],
)
async def test_a_create_event_with_odd_content(store: Store, content: dict[str, Any]) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN, content=content)
    await deliver(store, room)
    found = await info(store, room)
    assert (found.type, found.predecessor, found.creators) == (None, None, (ADMIN,))


@pytest.mark.parametrize(
    "allow",
    [
        "!house:s1.test",
        {"room_id": "!house:s1.test"},
        [["!house:s1.test"], None, 7],
        [{"type": "m.room_membership"}, {"room_id": "!house:s1.test"}],
        [{"type": "m.room_membership", "room_id": room} for room in ("house", 7, None, "!\0")],
        [{"type": ["m.room_membership"], "room_id": "!house:s1.test"}],
    ],
)
async def test_join_rules_with_odd_conditions(store: Store, allow: Any) -> None:
    room = new_room()
    room.state_event(ADMIN, "m.room.join_rules", {"join_rule": "restricted", "allow": allow})
    await deliver(store, room)
    found = await info(store, room)
    assert (found.join_rule, found.allowed_rooms) == ("restricted", ())


@pytest.mark.parametrize(
    "version, rule, restricted",
    [
        ("7", "restricted", False),
        ("8", "restricted", True),
        ("9", "knock_restricted", False),
        ("10", "knock_restricted", True),
        ("11", "public", False),
        ("11", "invite", False),
        ("11", "knock", False),
        ("11", None, False),
        ("11", ["restricted"], False),
    ],
)
async def test_conditions_count_under_a_restricted_rule_of_the_version(
    store: Store, version: str, rule: Any, restricted: bool
) -> None:
    """Client-server API, `allowed_room_ids`: empty or omitted where the room is not restricted."""
    room = new_room(version=version)
    allow = [{"type": "m.room_membership", "room_id": "!house:s1.test"}]
    content = {"allow": allow} | ({} if rule is None else {"join_rule": rule})
    room.state_event(ADMIN, "m.room.join_rules", content)
    await deliver(store, room)
    found = await info(store, room)
    assert found.allowed_rooms == (("!house:s1.test",) if restricted else ())
    listed = responses.room_summary(found).get("allowed_room_ids")
    assert listed == (["!house:s1.test"] if restricted else None)


async def test_a_room_without_a_join_rule_is_shown_as_by_invitation(store: Store) -> None:
    """Client-server API, GET /publicRooms: a room without a `join_rule` is taken for public."""
    room = RoomBuilder("11", sign=False)
    room.create(ADMIN)
    room.join(ADMIN)
    await deliver(store, room)
    assert responses.room_summary(await info(store, room))["join_rule"] == "invite"
    for value in NO_TEXTS:
        room.state_event(ADMIN, "m.room.join_rules", {"join_rule": value})
        await deliver(store, room)
        assert responses.room_summary(await info(store, room))["join_rule"] == "invite", value
    room.join_rules(ADMIN, "public")
    await deliver(store, room)
    assert responses.room_summary(await info(store, room))["join_rule"] == "public"


async def test_conditions_are_listed_once_in_order(store: Store) -> None:
    room = new_room()
    houses = [f"!house{n}:s1.test" for n in (2, 1, 2)]
    allow = [{"type": "m.room_membership", "room_id": one} for one in houses]
    content = {"join_rule": "restricted", "allow": [*allow, {"type": "other", "room_id": "!no"}]}
    room.state_event(ADMIN, "m.room.join_rules", content)
    await deliver(store, room)
    assert list((await info(store, room)).allowed_rooms) == houses[:2]


async def test_large_texts(store: Store) -> None:
    room = new_room()
    text = "é\\u0000\n" * 5_000  # a backslash, not a NUL
    room.topic(ADMIN, text)
    room.name(ADMIN, "[" * 400)
    await deliver(store, room)
    found = await info(store, room)
    assert (found.topic, found.name) == (text, "[" * 400)


async def test_numbers_that_only_old_rooms_have(store: Store) -> None:
    room = new_room(version="3")
    content = {"name": "old", "huge": 10**400, "half": 0.5}
    room.state_event(ADMIN, "m.room.name", content)
    await deliver(store, room)
    assert (await info(store, room)).name == "old"
    assert (await info(store, room)).creators == (ADMIN,)


@pytest.mark.parametrize("version", ["10", "11"])
async def test_redacted_events_say_what_redaction_keeps(store: Store, version: str) -> None:
    room = described(version)
    await deliver(store, room)
    state = await store.current_state(room.room_id)
    for (type_, _), event_id in state.items():
        if type_ not in ("m.room.member", "m.room.power_levels"):
            room.redact(ADMIN, event_id)
    await deliver(store, room)
    kept: dict[str, Any] = {"type": "m.space", "predecessor": RoomId("!older:s1.test")}
    assert await info(store, room) == bare(
        room,
        join_rule="restricted",
        allowed_rooms=(RoomId("!house:s1.test"),),
        visibility="world_readable",
        creators=(UserId(ADMIN),),
        joined_count=2,
        invited_count=1,
        **(kept if version == "11" else {}),
    )


async def test_an_event_with_a_wrong_content_hash_counts_as_redacted(store: Store) -> None:
    room = new_room()
    room.state_event(ADMIN, "m.room.name", {"name": "false"}, damage="content_hash")
    results = await store.append(room.pdus)
    assert results[-1].outcome == "redacted"
    assert (await info(store, room)).name is None


async def test_a_room_that_is_known_by_an_invite_has_a_version(store: Store) -> None:
    room = RoomBuilder("11", seed=4, sign=False)
    room.start(REMOTE)
    invite = room.invite(REMOTE, LOCAL)
    assert await append(store, invite, origin="out_of_band") == ["stored"]
    assert await info(store, room) == bare(room)


async def test_state_that_resolution_takes_away(store: Store) -> None:
    """It is the resolved state, not the newest events."""
    room = new_room(members=[LOCAL])
    room.power_levels(ADMIN, users={ADMIN: 100, LOCAL: 50})
    room.topic(LOCAL, "before")
    cut, main = room.fork(2)
    cut.topic(LOCAL, "after")
    await deliver(store, room)
    assert (await info(store, room)).topic == "after"
    main.power_levels(ADMIN, users={ADMIN: 100, LOCAL: 0})
    await deliver(store, room)
    room.merge(main, cut)
    room.message(ADMIN)
    await deliver(store, room)
    assert (await info(store, room)).topic is None


async def test_a_lost_event_is_an_error(store: Store) -> None:
    room = new_room(name="Kitchen")
    await deliver(store, room)
    async with store.database.connection() as conn:
        await conn.execute("DELETE FROM events WHERE type_nid = 9")
    with pytest.raises(StorageCorrupt, match="missing"):
        await store.rooms([room.room_id])
