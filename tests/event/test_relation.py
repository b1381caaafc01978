"""The relation of an event: any content gives a relation or none, never an error."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.event import Relation, load, relation_of
from storage.event.hashes import canonical
from storage.event.model import target_key

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
)
RELATED = st.fixed_dictionaries(
    {},
    optional={
        "rel_type": JSON | st.just("m.replace"),
        "event_id": JSON | st.just("$other"),
        "key": JSON,
    },
)


def relation(content: dict[str, Any], event_id: str = "$this", **fields: Any) -> Relation | None:
    pdu = {
        "type": "m.room.message",
        "sender": "@a:x",
        "room_id": "!r:x",
        "content": content,
        "prev_events": [],
        "auth_events": [],
    }
    return relation_of(
        load(canonical({**pdu, "depth": 1, "origin_server_ts": 1, **fields}), "11", event_id)
    )


def to(rel_type: str, event_id: str = "$other", **more: Any) -> dict[str, Any]:
    return {"m.relates_to": {"rel_type": rel_type, "event_id": event_id}, **more}


@given(JSON | RELATED)
def test_any_content(relates_to: Any) -> None:
    found = relation({"m.relates_to": relates_to})
    if found is not None:
        assert (found.rel_type, found.event_id) == (relates_to["rel_type"], relates_to["event_id"])
        assert found.event_id.startswith("$")
        assert max(len(found.rel_type.encode()), len(found.event_id.encode())) <= 255


def test_what_replaces() -> None:
    new: dict[str, Any] = {"m.new_content": {}}
    assert relation(to("m.thread")) == Relation("m.thread", "$other", None)
    assert relation(to("m.replace")) == Relation("m.replace", "$other", replaces=False)
    assert relation(to("m.replace", **new)) == Relation("m.replace", "$other", replaces=True)
    assert relation(to("m.replace", **new), state_key="") == Relation(
        "m.replace", "$other", replaces=False
    )
    assert relation(to("m.replace"), type="m.room.encrypted") == Relation(
        "m.replace", "$other", replaces=True
    )


def test_neither_itself_nor_anything_of_a_create_event() -> None:
    assert relation(to("m.thread", "$this")) is None
    assert relation(to("m.thread"), type="m.room.create", state_key="") is None
    assert relation({}) is None


@pytest.mark.parametrize("event_id,key", [("$a", 8_795_226_930_288_677_712), ("$ä", None)])
def test_keys_are_numbers_of_64_bits(event_id: str, key: int | None) -> None:
    assert -(2**63) <= target_key(event_id) < 2**63
    assert key is None or target_key(event_id) == key


@pytest.mark.parametrize(
    "name,valid",
    [
        ("x", True),
        ("x" * 255, True),
        ("é" * 127, True),
        ("é" * 128, False),
        ("x" * 256, False),
        ("", False),
        ("a\0b", False),
    ],
)
def test_a_relation_type_has_1_to_255_bytes_and_no_nul(name: str, *, valid: bool) -> None:
    assert relation(to(name)) == (Relation(name, "$other", None) if valid else None)


@pytest.mark.parametrize(
    "event_id,valid",
    [
        ("$", True),
        ("$" + "x" * 254, True),
        ("$" + "x" * 255, False),
        ("other", False),
        ("", False),
        (5, False),
    ],
)
def test_a_relation_names_an_event_id(event_id: Any, *, valid: bool) -> None:
    assert relation(to("m.thread", event_id)) == (
        Relation("m.thread", event_id, None) if valid else None
    )
