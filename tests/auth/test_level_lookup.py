"""Numbers as power levels, by room version, and who has which."""

import pytest

from storage.auth import check, redaction_allowed
from storage.auth.power_levels import CREATOR_LEVEL, PowerLevels, read_level
from storage.errors import AuthDenied, UnknownRoomVersion
from storage.event import ROOM_VERSIONS, Event
from storage.ids import StateKey
from tests.auth.events import CREATOR, make_create, make_event, member, state_of

TEXTS = {
    "50": 50,
    "000100": 100,
    "+100": 100,
    "-100": -100,
    " -0100 ": -100,
    "\t7\n": 7,
    "0": 0,
    "": None,
    "5.0": None,
    "5e1": None,
    "1_000": None,
    "\u0665\u0660": None,
    "+ 5": None,
    "--5": None,
    "0x10": None,
    "9" * 308: int("9" * 308),
    "0" * 5000 + "5": 5,
    "9" * 309: None,
    "9" * 100_000: None,
}
FLOATS = {
    50.57: 50,
    -50.57: -50,
    5.114698e4: 51146,
    1e300: int(1e300),
    float("inf"): None,
    float("-inf"): None,
}


@pytest.mark.parametrize("number", range(1, 13))
def test_forms_by_version(number: int) -> None:
    version = ROOM_VERSIONS[str(number)]
    assert [read_level(text, version) for text in TEXTS] == [
        level if number <= 9 else None for level in TEXTS.values()
    ]
    assert [read_level(value, version) for value in FLOATS] == [
        level if number <= 5 else None for level in FLOATS.values()
    ]
    assert read_level(float("nan"), version) is None
    others: tuple[object, ...] = (True, False, None, [], {})
    assert [read_level(other, version) for other in others] == [None] * 5
    for integer in (0, -5, 2**53, 2**70):
        assert read_level(integer, version) == integer


def power_state(
    version: str, power: dict[str, object] | None, *users: str
) -> dict[StateKey, Event]:
    create = make_create(version)
    events = [
        create,
        *(member(version, user, "join", room_id=create.room_id) for user in (CREATOR, *users)),
    ]
    if power is not None:
        events.append(
            make_event(
                version, "$power", "m.room.power_levels", CREATOR, "", power, room_id=create.room_id
            )
        )
    return state_of(*events)


@pytest.mark.parametrize("version", ["1", "10", "11"])
def test_without_power_levels_the_creator_has_100(version: str) -> None:
    levels = PowerLevels.of(power_state(version, None), ROOM_VERSIONS[version])
    assert (levels.user(CREATOR), levels.user("@x:a")) == (100, 0)
    assert [
        levels.named(n)
        for n in (
            "ban",
            "kick",
            "redact",
            "invite",
            "state_default",
            "events_default",
            "users_default",
        )
    ] == [
        *(50, 50, 50, 0, 50, 0, 0),
    ]


def test_the_creator_is_the_sender_from_version_11_on() -> None:
    for version, expected in (("10", (100, 0)), ("11", (0, 100))):
        create = make_create(version, {"creator": "@other:a"})
        levels = PowerLevels(None, create, ROOM_VERSIONS[version])
        assert (levels.user("@other:a"), levels.user(CREATOR)) == expected


def test_creators_of_version_12_are_above_every_number() -> None:
    create = make_create("12", {"additional_creators": ["@second:b"]})
    power = make_event(
        "12",
        "$p",
        "m.room.power_levels",
        CREATOR,
        "",
        {"users": {"@x:a": 2**53}, "users_default": 100},
    )
    for event in (power, None):
        levels = PowerLevels(event, create, ROOM_VERSIONS["12"])
        assert levels.user(CREATOR) == levels.user("@second:b") == CREATOR_LEVEL > 2**53
    assert PowerLevels(None, create, ROOM_VERSIONS["12"]).user("@x:a") == 0
    assert (
        PowerLevels(power, make_create("11", create.content), ROOM_VERSIONS["11"]).user("@second:b")
        == 100
    )


def test_unreadable_levels_count_as_absent() -> None:
    content = {
        "users": {"@x:a": "50", "@y:a": None},
        "users_default": 5,
        "ban": "7",
        "events": [],
        "state_default": True,
    }
    power = make_event("10", "$p", "m.room.power_levels", CREATOR, "", content)
    levels = PowerLevels(power, None, ROOM_VERSIONS["10"])
    assert (levels.user("@x:a"), levels.user("@y:a"), levels.named("ban")) == (5, 5, 50)
    assert levels.required(make_event("10", "$t", "m.room.topic", "@x:a", "")) == 50
    older = PowerLevels(power, None, ROOM_VERSIONS["9"])
    assert (older.user("@x:a"), older.named("ban")) == (50, 7)


def changed(version: str, old: dict[str, object], new: dict[str, object]) -> str | None:
    """Return the rule that refuses the change when a user with level 50 makes it."""
    mod = "@mod:a"
    state = power_state(version, {"users": {mod: 50}, "state_default": 0} | old, mod)
    room_id = state["m.room.create", ""].room_id
    event = make_event(
        version,
        "$new",
        "m.room.power_levels",
        mod,
        "",
        {"users": {mod: 50}, "state_default": 0} | new,
        room_id=room_id,
    )
    try:
        check(event, state, version)
    except AuthDenied as denial:
        return denial.rule
    return None


@pytest.mark.parametrize("version", ["1", "6", "10", "12"])
def test_who_may_change_what(version: str) -> None:
    assert changed(version, {}, {}) is None
    assert changed(version, {"ban": 50}, {"ban": 0}) is None
    assert changed(version, {"ban": 51}, {"ban": 0}) == "power_levels.current"
    assert changed(version, {"ban": 50}, {"ban": 51}) == "power_levels.new"
    assert changed(version, {"ban": 51}, {}) == "power_levels.current"
    assert changed(version, {"ban": 51}, {"ban": 51}) is None
    assert changed(version, {}, {"ban": 51}) == "power_levels.new"
    assert changed(version, {"events": {"m.x": 51}}, {}) == "power_levels.current"
    assert changed(version, {}, {"events": {"m.x": 51}}) == "power_levels.new"
    assert changed(version, {"events": {"m.x": 50}}, {"events": {"m.x": 1}}) is None


@pytest.mark.parametrize("version", ["1", "12"])
def test_who_may_change_whom(version: str) -> None:
    mod = {"@mod:a": 50}
    assert changed(version, {"users": mod | {"@x:a": 49}}, {"users": mod}) is None
    assert (
        changed(version, {"users": mod | {"@x:a": 50}}, {"users": mod})
        == "power_levels.users_current"
    )
    assert changed(version, {"users": mod | {"@x:a": 50}}, {"users": mod | {"@x:a": 50}}) is None
    assert changed(version, {}, {"users": mod | {"@x:a": 50}}) is None
    assert changed(version, {}, {"users": mod | {"@x:a": 51}}) == "power_levels.users_new"
    assert changed(version, {}, {"users": {"@mod:a": 10}}) is None
    assert changed(version, {}, {"users": {}}) is None
    assert changed(version, {}, {"users": {"@mod:a": 51}}) == "power_levels.users_new"


def test_notifications_are_watched_from_version_6_on() -> None:
    assert changed("5", {}, {"notifications": {"room": 51}}) is None
    assert changed("5", {}, {"notifications": "x"}) is None
    assert changed("6", {}, {"notifications": {"room": 51}}) == "power_levels.new"
    assert changed("6", {"notifications": {"room": 51}}, {}) == "power_levels.current"
    assert changed("6", {}, {"notifications": "x"}) == "power_levels.malformed"


def test_the_same_level_in_another_form_is_no_change() -> None:
    assert changed("9", {"ban": "100"}, {"ban": 100}) is None
    assert changed("5", {"ban": 100.9}, {"ban": " +0100"}) is None
    assert changed("10", {}, {"ban": "0"}) == "power_levels.malformed"
    assert changed("6", {}, {"ban": 0.5}) == "power_levels.malformed"


def test_redactions_apply_by_level_or_server() -> None:
    state = power_state("10", {"users": {CREATOR: 50}, "redact": 50})
    for sender, target, expected in (
        (CREATOR, "@x:far", True),
        ("@x:b", "@y:b", True),
        ("@x:b", "@y:b:8448", False),
        ("@x:b", "@y:a", False),
        ("@x:b", "no server", False),
    ):
        redaction = make_event("10", "$r", "m.room.redaction", sender)
        assert redaction_allowed(redaction, target, state, "10") is expected


def test_redactions_of_versions_1_and_2_go_by_the_server_of_the_event_ids() -> None:
    state = power_state("2", {"redact": 50})
    for event_id, redacts, expected in (
        ("$r:b", "$t:b", True),
        ("$r:b", "$t:a", False),
        ("$r", "$t", False),
        ("$r:b", None, False),
    ):
        redaction = make_event("2", event_id, "m.room.redaction", "@x:b", redacts=redacts)
        assert redaction_allowed(redaction, "@y:b", state, "2") is expected


def test_redaction_without_power_levels_or_create_event() -> None:
    assert redaction_allowed(
        make_event("12", "$r", "m.room.redaction", CREATOR), "@x:b", power_state("12", None), "12"
    )
    assert not redaction_allowed(
        make_event("10", "$r", "m.room.redaction", CREATOR), "@x:b", {}, "10"
    )


def test_an_unknown_room_version() -> None:
    with pytest.raises(UnknownRoomVersion):
        check(make_create("10"), {}, "13")
