"""Parsing: what is kept, and the table of what is refused."""

import pickle
from typing import Any

import pytest

from storage.errors import InvalidEvent, UnknownRoomVersion
from storage.event import ROOM_VERSIONS, Event, event_id, load, parse, redact
from storage.event.hashes import canonical, content_hash_fits
from storage.event.model import make_event
from storage.event.reading import peek
from tests.event.building import (
    PAIRED,
    VERSIONS,
    encoded,
    signed_pdu,
    unsigned_pdu,
)

ID = "$" + "a" * 43


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fields_of_an_event(version: str) -> None:
    pdu = signed_pdu(version, state_key="", extra={"kept": [None, True]})
    raw = encoded(pdu)
    event = parse(raw, version)
    assert event.raw == raw
    assert event.json == pdu
    assert event.content_hash_valid
    assert event.event_id == event_id(pdu, version)
    assert event.room_version is ROOM_VERSIONS[version]
    assert (event.room_id, event.type, event.sender) == (
        "!room:example.org",
        "m.room.message",
        "@alice:example.org",
    )
    assert (event.depth, event.origin_server_ts) == (7, 1_700_000_000_000)
    assert event.content == pdu["content"]
    parent = "$parent:example.org" if version in PAIRED else "$" + "p" * 43
    assert event.prev_event_ids == event.auth_event_ids == (parent,)
    assert event.is_state
    assert event.key == ("m.room.message", "")
    assert event.redacts is None


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dict_is_stored_as_canonical_json(version: str) -> None:
    pdu = signed_pdu(version)
    event = parse(pdu, version)
    assert event.raw == canonical(pdu)
    assert event == parse(event.raw, version)
    assert parse(bytearray(event.raw), version) == event  # type: ignore[arg-type]


def test_an_event_without_state_key_has_no_key() -> None:
    event = parse(signed_pdu("11"), "11")
    assert event.state_key is None
    assert not event.is_state
    with pytest.raises(ValueError, match="not a state event") as caught:
        _ = event.key
    assert str(caught.value) == f"{event.event_id} (m.room.message) is not a state event"


def test_events_are_values() -> None:
    pdu = signed_pdu("11")
    one, same, other = parse(pdu, "11"), parse(pdu, "11"), parse(signed_pdu("11", depth=8), "11")
    assert one == same
    assert one != other
    assert one != "something else"
    assert {one, same, other} == {one, other}
    assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(pickle.dumps(one)).room_version is one.room_version
    assert hash(one) == hash(same) != hash(other)
    assert (
        repr(one)
        == f"<Event {one.event_id} m.room.message sender=@alice:example.org room=!room:example.org>"
    )
    named = parse(signed_pdu("11", state_key="x"), "11")
    assert (
        repr(named) == f"<Event {named.event_id} m.room.message state_key='x'"
        " sender=@alice:example.org room=!room:example.org>"
    )
    with pytest.raises(AttributeError):
        one.depth = 3  # type: ignore[misc]
    assert one != load(one.raw, "11", one.event_id, redacted=True)


def test_the_fast_constructor_fills_every_field_in_order() -> None:
    event = parse(signed_pdu("11"), "11")
    values = [getattr(event, name) for name in Event.__dataclass_fields__]
    slow = Event(*values)
    fast = make_event(*values)
    assert type(fast) is Event
    assert all(getattr(fast, name) is getattr(slow, name) for name in Event.__dataclass_fields__)


@pytest.mark.parametrize(
    "raw,value",
    [(b'{"a":1}', {"a": 1}), (b"[{}]", None), (b"7", None), (b"{", None), (b"\xff", None)],
)
def test_a_glance_finds_an_object_or_none(raw: bytes, value: object) -> None:
    assert peek(raw) == value


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrong_content_hash_gives_the_redacted_form(version: str) -> None:
    pdu = signed_pdu(version, type="m.room.topic", state_key="", content={"topic": "a"}, extra=1)
    pdu["content"] = {"topic": "b"}
    raw = encoded(pdu)
    event = parse(raw, version)
    assert not event.content_hash_valid
    assert event.raw == raw
    assert event.content == {}
    assert event.json == redact(pdu, version)
    assert event.event_id == event_id(pdu, version)
    assert load(raw, version, event.event_id, redacted=True) == event


@pytest.mark.parametrize(
    "given", [{}, {"sha256": 5}, {"sha256": "not base64: é"}, {"sha256": ""}, {"md5": "x" * 22}]
)
def test_a_content_hash_that_is_none(given: dict[str, Any]) -> None:
    assert not parse({**signed_pdu("11"), "hashes": given}, "11").content_hash_valid


def test_the_content_hash_may_be_padded_or_stand_beside_others() -> None:
    pdu = signed_pdu("11")
    right = pdu["hashes"]["sha256"]
    assert parse({**pdu, "hashes": {"sha256": right + "="}}, "11").content_hash_valid
    assert parse({**pdu, "hashes": {"sha256": right, "sha512": "?"}}, "11").content_hash_valid


@pytest.mark.parametrize("version", VERSIONS)
def test_load_gives_what_parse_gave(version: str) -> None:
    event = parse(
        encoded(signed_pdu(version, type="m.room.member", content={"membership": "join", "x": 0})),
        version,
    )
    assert load(event.raw, version, event.event_id) == event
    assert load(event.raw, version, event.event_id).json == event.json
    assert load(event.raw, version, event.event_id, redacted=True).content == {"membership": "join"}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_redaction_redacts(version: str) -> None:
    top = parse(signed_pdu(version, type="m.room.redaction", redacts=ID), version)
    inside = parse(signed_pdu(version, type="m.room.redaction", content={"redacts": ID}), version)
    new = ROOM_VERSIONS[version].redacts_in_content
    assert (top.redacts, inside.redacts) == ((None, ID) if new else (ID, None))
    assert parse(signed_pdu(version, redacts=ID, content={"redacts": ID}), version).redacts is None


@pytest.mark.parametrize("target", [5, "", "not an id", "$nul\0", "$" + "é" * 200, None, [ID]])
def test_a_redaction_of_no_event_names_none(target: object) -> None:
    assert parse(signed_pdu("10", type="m.room.redaction", redacts=target), "10").redacts is None
    assert (
        parse(signed_pdu("11", type="m.room.redaction", content={"redacts": target}), "11").redacts
        is None
    )


def test_the_room_id_of_version_12_is_the_id_of_its_create_event() -> None:
    create = signed_pdu(
        "12", type="m.room.create", state_key="", room_id=..., prev_events=[], auth_events=[]
    )
    event = parse(create, "12")
    assert event.room_id == "!" + event.event_id[1:]
    assert load(event.raw, "12", event.event_id).room_id == event.room_id
    with pytest.raises(InvalidEvent, match="room_id is in a create event"):
        parse(signed_pdu("12", type="m.room.create", state_key=""), "12")
    with pytest.raises(InvalidEvent, match="room_id is missing"):
        parse(signed_pdu("12", room_id=...), "12")
    with pytest.raises(InvalidEvent, match="room_id is missing"):
        parse(signed_pdu("11", type="m.room.create", state_key="", room_id=...), "11")


@pytest.mark.parametrize("version", VERSIONS)
def test_of_two_equal_keys_the_last_one_counts(version: str) -> None:
    pdu = signed_pdu(version)
    raw = b'{"depth": "no number", "content": {"body": "first"},' + canonical(pdu)[1:]
    event = parse(raw, version)
    assert event.json == pdu
    assert event.content_hash_valid
    assert event.raw == raw


def test_nul_is_data_in_content_and_nowhere_else() -> None:
    event = parse(encoded(signed_pdu("11", content={"\0": "\0"})), "11")
    assert event.content == {"\0": "\0"}
    assert event.content_hash_valid


def test_repeated_parents_are_kept_as_given() -> None:
    assert parse(signed_pdu("11", prev_events=[ID, ID]), "11").prev_event_ids == (ID, ID)


def test_an_empty_type_is_a_type() -> None:
    assert parse(signed_pdu("11", type=""), "11").type == ""


# --------------------------------------------------------------------------------------------------
# refused

WANTED = {
    **dict.fromkeys(("type", "room_id", "sender", "state_key"), "a string"),
    **dict.fromkeys(("content", "hashes", "signatures"), "an object"),
    **dict.fromkeys(("depth", "origin_server_ts"), "an integer"),
    **dict.fromkeys(("prev_events", "auth_events"), "a list"),
}

SIGILS = (("room_id", "!"), ("sender", "@"))
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((f"{key} missing", {key: ...}, f"{key} is missing") for key in unsigned_pdu("11")),
    *((f"{key} null", {key: None}, f"{key} is not {wanted}") for key, wanted in WANTED.items()),
    *((f"{key} list", {key: [[]]}, f"{key} is not {wanted}")
      for key, wanted in WANTED.items() if wanted != "a list"),
    *((f"{key} number", {key: 5}, f"{key} is not a string")
      for key in ("type", "room_id", "sender", "state_key")),
    *((f"{key} text", {key: "5"}, f"{key} is not an integer")
      for key in ("depth", "origin_server_ts")),
    *((f"{key} true", {key: True}, f"{key} is not an integer")
      for key in ("depth", "origin_server_ts")),
    *((f"{key} empty", {key: ""}, f"{key} is not an id that starts with {sigil}")
      for key, sigil in SIGILS),
    *((f"{key} only sigil", {key: sigil}, f"{key} is not an id that starts with {sigil}")
      for key, sigil in SIGILS),
    *((f"{key} other sigil", {key: "#x:y"}, f"{key} is not an id that starts with {sigil}")
      for key, sigil in SIGILS),
    ("sender without server", {"sender": "@alice"}, "sender has no server name"),
    ("sender with empty server", {"sender": "@alice:"}, "sender has no server name"),
    *((f"{key} NUL", {key: value}, f"{key} holds a NUL") for key, value in
      (("type", "a\0"), ("state_key", "\0"), ("room_id", "!a\0:b"), ("sender", "@a\0:b"))),
    *((f"{key} long", {key: value}, f"{key} is longer than 255 bytes") for key, value in
      (("type", "t" * 256), ("state_key", "é" * 128),
       ("room_id", "!" + "r" * 255), ("sender", "@a:" + "日" * 85))),
    ("21 prev_events", {"prev_events": [ID] * 21}, "21 prev_events, more than 20"),
    ("11 auth_events", {"auth_events": [ID] * 11}, "11 auth_events, more than 10"),
    *((f"{key} of {name}", {key: [ID, bad]}, f"{key} holds something else than event ids")
      for key in ("prev_events", "auth_events") for name, bad in
      (("number", 1), ("null", None), ("empty", ""), ("NUL", "$a\0"),
       ("long", "$" + "a" * 255), ("no sigil", "abc"), ("pair", [ID, {}]))),
    ("prev_events object", {"prev_events": {}}, "prev_events is not a list"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes,reason", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    pdu = {**signed_pdu("11"), **changes}
    raw = encoded({key: value for key, value in pdu.items() if value is not ...})
    with pytest.raises(InvalidEvent) as caught:
        parse(raw, "11")
    assert caught.value.reason == reason


@pytest.mark.parametrize("key", ["hashes", "signatures"])
@pytest.mark.parametrize("value", [..., None, [], "x"])
def test_refused_hashes_and_signatures(key: str, value: object) -> None:
    pdu = {**signed_pdu("11"), key: value}
    with pytest.raises(InvalidEvent) as caught:
        parse(encoded({k: v for k, v in pdu.items() if v is not ...}), "11")
    assert caught.value.reason == f"{key} is {'missing' if value is ... else 'not an object'}"


def test_ids_may_have_255_bytes_and_references_as_well() -> None:
    for text in ("t" * 255, "é" * 127 + "t", "日" * 85):
        event = parse(
            signed_pdu("11", type=text, state_key=text, prev_events=["$" + text[1:]]), "11"
        )
        assert (event.type, event.state_key, event.prev_event_ids) == (
            text,
            text,
            ("$" + text[1:],),
        )
    with pytest.raises(InvalidEvent, match="event ids"):
        parse(signed_pdu("11", prev_events=["$" + "é" * 128]), "11")
    for text, target in (
        ("$" + "a" * 254, "$" + "a" * 254),
        ("$" + "a" * 255, None),
        ("$" + "é" * 127, "$" + "é" * 127),
        ("$" + "é" * 128, None),
    ):
        assert (
            parse(
                signed_pdu("11", type="m.room.redaction", content={"redacts": text}), "11"
            ).redacts
            == target
        )


@pytest.mark.parametrize("version", PAIRED)
@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"event_id": ...}, "event_id is missing"),
        ({"event_id": 5}, "event_id is not a string"),
        ({"event_id": "$no_server"}, "event_id has no server name"),
        ({"event_id": "own:example.org"}, "event_id is not an id that starts with $"),
        ({"event_id": "$" + "a" * 255 + ":b"}, "event_id is longer than 255 bytes"),
        ({"event_id": "$a\0:b"}, "event_id holds a NUL"),
        ({"prev_events": ["$a:b"]}, "prev_events holds something else than [id, hashes] pairs"),
        ({"prev_events": [["$a:b"]]}, "prev_events holds something else than [id, hashes] pairs"),
        (
            {"prev_events": [["$a:b", {}, {}]]},
            "prev_events holds something else than [id, hashes] pairs",
        ),
        (
            {"auth_events": [["$a:b", "hash"]]},
            "auth_events holds something else than [id, hashes] pairs",
        ),
        ({"auth_events": [[["$a:b"], {}]]}, "auth_events holds something else than event ids"),
    ],
)
def test_refused_in_versions_1_and_2(version: str, changes: dict[str, Any], reason: str) -> None:
    pdu = {**signed_pdu(version), **changes}
    with pytest.raises(InvalidEvent) as caught:
        parse({key: value for key, value in pdu.items() if value is not ...}, version)
    assert caught.value.reason == reason


def test_a_content_hash_fits_or_not() -> None:
    pdu = signed_pdu("11")
    assert content_hash_fits(pdu) is True
    assert content_hash_fits({**pdu, "depth": 8}) is False
    assert content_hash_fits({**pdu, "hashes": [pdu["hashes"]["sha256"]]}) is False
    assert content_hash_fits(unsigned_pdu("11")) is False


@pytest.mark.parametrize("version", ["", "0", "13", "org.matrix.msc", None, 11, []])
def test_unknown_room_versions(version: Any) -> None:
    for call in (
        lambda: parse(signed_pdu("11"), version),
        lambda: event_id({}, version),
        lambda: redact({}, version),
    ):
        with pytest.raises(UnknownRoomVersion) as caught:
            call()
        assert caught.value.room_version == version
