"""Parsing: what is kept, and the table of what is refused."""

import json
import pickle
from typing import Any

import pytest

from storage.errors import InvalidEvent, UnknownRoomVersion
from storage.event import ROOM_VERSIONS, Event, content_hash, event_id, load, parse, redact
from storage.event.hashes import canonical, content_hash_fits
from storage.event.hashes import encoded as encode
from storage.event.model import make_event, without_json
from storage.event.reading import glance
from tests.event.building import (
    LENIENT,
    PAIRED,
    STRICT,
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
        repr(named)
        == f"<Event {named.event_id} m.room.message state_key='x' sender=@alice:example.org room=!room:example.org>"
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


def test_an_event_is_kept_without_its_json_unless_it_is_a_create_event() -> None:
    event = parse(signed_pdu("11"), "11")
    kept = without_json(event)
    assert kept.json == {}
    for name in set(Event.__dataclass_fields__) - {"json"}:
        assert getattr(kept, name) is getattr(event, name)
    assert without_json(kept) is kept
    create = parse(signed_pdu("11", type="m.room.create", state_key=""), "11")
    assert without_json(create) is create


@pytest.mark.parametrize(
    "raw,value",
    [(b'{"a":1}', {"a": 1}), (b"[{}]", None), (b"7", None), (b"{", None), (b"\xff", None)],
)
def test_a_glance_finds_an_object_or_none(raw: bytes, value: object) -> None:
    assert glance(raw) == value


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


# --------------------------------------------------------------------------------------------------------------
# refused

WANTED = {
    **dict.fromkeys(("type", "room_id", "sender", "state_key"), "a string"),
    **dict.fromkeys(("content", "unsigned", "hashes", "signatures"), "an object"),
    **dict.fromkeys(("depth", "origin_server_ts"), "an integer"),
    **dict.fromkeys(("prev_events", "auth_events"), "a list"),
}

SIGILS = (("room_id", "!"), ("sender", "@"))
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((f"{key} missing", {key: ...}, f"{key} is missing") for key in unsigned_pdu("11")),
    *((f"{key} null", {key: None}, f"{key} is not {wanted}") for key, wanted in WANTED.items()),
    *((f"{key} list", {key: [[]]}, f"{key} is not {wanted}") for key, wanted in WANTED.items() if wanted != "a list"),
    *((f"{key} number", {key: 5}, f"{key} is not a string") for key in ("type", "room_id", "sender", "state_key")),
    *((f"{key} text", {key: "5"}, f"{key} is not an integer") for key in ("depth", "origin_server_ts")),
    *((f"{key} true", {key: True}, f"{key} is not an integer") for key in ("depth", "origin_server_ts")),
    *((f"{key} empty", {key: ""}, f"{key} is not an id that starts with {sigil}") for key, sigil in SIGILS),
    *((f"{key} only sigil", {key: sigil}, f"{key} is not an id that starts with {sigil}") for key, sigil in SIGILS),
    *((f"{key} other sigil", {key: "#x:y"}, f"{key} is not an id that starts with {sigil}") for key, sigil in SIGILS),
    ("sender without server", {"sender": "@alice"}, "sender has no server name"),
    ("sender with empty server", {"sender": "@alice:"}, "sender has no server name"),
    *((f"{key} NUL", {key: value}, f"{key} holds a NUL") for key, value in
      (("type", "a\0"), ("state_key", "\0"), ("room_id", "!a\0:b"), ("sender", "@a\0:b"))),
    *((f"{key} long", {key: value}, f"{key} is longer than 255 bytes") for key, value in
      (("type", "t" * 256), ("state_key", "é" * 128), ("room_id", "!" + "r" * 255), ("sender", "@a:" + "日" * 85))),
    ("21 prev_events", {"prev_events": [ID] * 21}, "21 prev_events, more than 20"),
    ("11 auth_events", {"auth_events": [ID] * 11}, "11 auth_events, more than 10"),
    *((f"{key} of {name}", {key: [ID, bad]}, f"{key} holds something else than event ids") for key in ("prev_events", "auth_events") for name, bad in
      (("number", 1), ("null", None), ("empty", ""), ("NUL", "$a\0"), ("long", "$" + "a" * 255), ("no sigil", "abc"), ("pair", [ID, {}]))),
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


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b" ",
            b"\xff\xfe",
            b"null",
            b"[]",
            b"5",
            b'"text"',
            b"{",
            b"{}{}",
            b"{}",
            b'{"a":}',
            b'{"a":1,}',
            b"{'a':1}",
            b"{a:1}",
        ),
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"type":"\xc3\x28"}',
        b'{"type":"\n"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 1_000_000 + b"]" * 1_000_000,
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_refused_bytes(version: str, raw: bytes) -> None:
    with pytest.raises(InvalidEvent):
        parse(raw, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("where", ["content", "unsigned", "state_key", "type"])
def test_lone_surrogates_are_refused_everywhere(version: str, where: str) -> None:
    value: Any = "@x@" if where in ("state_key", "type") else {"@x@": "@x@"}
    raw = encoded({**signed_pdu(version), where: value}, x='"\\ud800"')
    with pytest.raises(InvalidEvent):
        parse(raw, version)
    with pytest.raises(InvalidEvent, match="surrogate"):
        parse(
            {**signed_pdu(version), where: "\ud800" if isinstance(value, str) else {"a": "\ud800"}},
            version,
        )
    # The second reader must refuse it as well.
    with pytest.raises(InvalidEvent):
        parse(
            encoded(
                {**signed_pdu(version), "content": {"n": "@n@", "s": "@x@"}},
                n="1" * 400,
                x='"\\udc00"',
            ),
            version,
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_nesting_is_limited_and_its_limit_does_not_depend_on_the_stack(version: str) -> None:
    def pdu(levels: int) -> bytes:  # of the whole event: the event is one, content another
        return encoded(signed_pdu(version)).replace(
            b'"hello"', b"[" * (levels - 2) + b"]" * (levels - 2)
        )

    assert not parse(pdu(500), version).content_hash_valid
    with pytest.raises(InvalidEvent, match="nested more than 500"):
        parse(pdu(501), version)
    wide = signed_pdu(version, content={"many": [[]] * 5_000})
    assert parse(wide, version).content_hash_valid


@pytest.mark.parametrize("version", LENIENT)
def test_nesting_is_limited_for_the_second_reader(version: str) -> None:
    raw = encoded(signed_pdu(version)).replace(b'"hello"', b"[" * 600 + b"1.5" + b"]" * 600)
    with pytest.raises(InvalidEvent, match="nested"):
        parse(raw, version)
    with pytest.raises(InvalidEvent, match="not JSON"):
        parse(raw.replace(b"1.5", b"1" * 400), version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_size_limit_counts_canonical_bytes_with_unsigned(version: str) -> None:
    def sized(size: int) -> dict[str, Any]:
        pdu = signed_pdu(version, unsigned={"pad": ""})
        pdu["unsigned"]["pad"] = "x" * (size - len(canonical(pdu)))
        return pdu

    fits = sized(65_536)
    assert len(parse(fits, version).raw) == 65_536
    with pytest.raises(InvalidEvent, match="65537 bytes") as caught:
        parse(sized(65_537), version)
    assert caught.value.event_id is None
    # Spaces and escapes do not count, up to the limit of what is read at all.
    assert parse(json.dumps(fits, indent=10).encode() + b" " * 10_000, version).content_hash_valid
    with pytest.raises(InvalidEvent, match="more than 1048576"):
        parse(canonical(fits) + b" " * 1_000_000, version)


def test_floats_that_grow_in_canonical_json_count_as_they_are_written() -> None:
    raw = canonical(signed_pdu("5", content={"n": ["@n@"] * 10_000})).replace(
        b'"@n@"', b"1e15"
    )  # 4 bytes, canonical 18
    assert len(raw) < 65_536
    with pytest.raises(InvalidEvent, match="bytes of canonical JSON"):
        parse(raw, "5")


@pytest.mark.parametrize("version", VERSIONS)
def test_depth_and_time_have_the_range_of_their_column(version: str) -> None:
    def outcome(key: str, value: int) -> bool:
        try:
            return bool(
                getattr(
                    parse(
                        {**unsigned_pdu(version), "hashes": {}, "signatures": {}, key: value},
                        version,
                    ),
                    key,
                )
                == value
            )
        except InvalidEvent:
            return False

    largest = 2**53 - 1 if version in STRICT else 2**63 - 2
    assert outcome("depth", largest)
    assert outcome("depth", 0)
    assert outcome("depth", -largest)
    assert not outcome("depth", largest + 1)
    assert outcome("origin_server_ts", largest)
    assert not outcome("origin_server_ts", largest + 2)


def test_an_error_names_the_event_where_it_can() -> None:
    pdu = signed_pdu("11")
    with pytest.raises(InvalidEvent) as caught:
        parse({**pdu, "depth": "x"}, "11")
    assert caught.value.event_id == event_id({**pdu, "depth": "x"}, "11")
    assert caught.value.reason == "depth is not an integer"
    assert str(caught.value) == f"{caught.value.event_id}: depth is not an integer"
    with pytest.raises(InvalidEvent) as caught:
        parse({**signed_pdu("1"), "event_id": 5}, "1")
    assert caught.value.event_id is None


def test_an_id_is_missing_or_not_a_string() -> None:
    with pytest.raises(InvalidEvent) as caught:
        event_id({}, "1")
    assert caught.value.reason == "event_id is missing"
    with pytest.raises(InvalidEvent) as caught:
        event_id({"event_id": 5}, "2")
    assert caught.value.reason == "event_id is not a string"


def test_what_cannot_be_written_as_canonical_json_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, reason in (
        (["\ud800"], "a string holds a lone surrogate"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises(InvalidEvent) as caught:
            canonical(value)
        assert caught.value.reason == reason


def test_both_encoders_write_the_same() -> None:
    nested: list[Any] = [1]
    for _ in range(300):
        nested = [nested]
    for value in ({"b": "é", "a": [1, None]}, {"deep": nested}):
        assert encode(value, exact=True) == encode(value, exact=False) == canonical(value)
    assert encode({"float": 1e16}, exact=False) == b'{"float":1e+16}'


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object(), b"bytes"])
def test_a_dict_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidEvent, match="not JSON"):
        parse({**signed_pdu("11"), "content": {"a": value}}, "11")
    with pytest.raises(InvalidEvent, match="not JSON"):
        content_hash({"a": value})


def test_a_dict_that_holds_itself_is_refused() -> None:
    pdu = signed_pdu("11")
    pdu["content"]["self"] = pdu
    with pytest.raises(InvalidEvent):
        parse(pdu, "11")


def test_a_dict_nested_beyond_python_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidEvent, match="nested too deeply"):
        parse({**signed_pdu("11"), "content": {"a": deep}}, "11")


@pytest.mark.parametrize("pdu", ["{}", 5, None])
def test_what_is_neither_bytes_nor_dict_is_a_programming_error(pdu: Any) -> None:
    with pytest.raises(TypeError):
        parse(pdu, "11")
