"""What a process keeps of state events. tests/auth compares what the auth rules decide with it."""

import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from storage.event import Event, parse
from storage.event.model import relation_of
from storage.event.reading import WORD_MAX, as_written, for_auth_checks, without_json
from storage.ids import EventId, interning
from tests.event.building import PAIRED, VERSIONS, signed_pdu

FIELDS = set(Event.__dataclass_fields__)


def member(version: str = "11", **content: Any) -> Event:
    return parse(
        signed_pdu(version, type="m.room.member", state_key="@alice:example.org", content=content),
        version,
    )


def test_an_event_loses_its_json_unless_it_is_a_create_event() -> None:
    event = parse(signed_pdu("11"), "11")
    kept = without_json(event)
    assert (kept.json, kept.signed) == ({}, None)
    for name in FIELDS - {"json", "signed"}:
        assert getattr(kept, name) == getattr(event, name)
    assert without_json(kept) is kept
    create = parse(signed_pdu("11", type="m.room.create", state_key=""), "11")
    assert without_json(create) is create
    assert for_auth_checks(create).json == create.json


@pytest.mark.parametrize(
    "relates_to",
    [
        None,
        [],
        {},
        {"rel_type": "m.replace", "event_id": "$target", "more": [[]]},
        {"rel_type": "m.thread", "event_id": "$root", "is_falling_back": True},
        {"rel_type": ["m.thread"], "event_id": "$root"},
        {"rel_type": "m.thread", "event_id": {}},
    ],
)
@pytest.mark.parametrize("named", [{}, {"m.new_content": {"body": [[]]}}, {"url": "mxc://a/b"}])
def test_a_long_message_is_written_without_its_values(relates_to: Any, named: Any) -> None:
    content = {"body": "x" * 5_000, "lists": [[]] * 10, "m.relates_to": relates_to, **named}
    for version in ("1", "11"):
        event = parse(signed_pdu(version, type="m.room.message", content=content), version)
        written = as_written(event)
        assert (written.raw, written.json) == (event.raw, {})
        assert relation_of(written) == relation_of(event)
        assert ("url" in written.content) == ("url" in event.content)
        assert "[]" not in str(written.content)
        for name in FIELDS - {"content", "json", "signed"}:
            assert getattr(written, name) == getattr(event, name)


def test_short_events_and_state_keep_their_values() -> None:
    for given in ({"content": {"body": "x"}}, {"content": {"body": "x" * 5_000}, "state_key": ""}):
        event = parse(signed_pdu("11", type="m.room.message", **given), "11")
        assert as_written(event) is event


@pytest.mark.parametrize("version", sorted(set(VERSIONS) - set(PAIRED)))
def test_an_accepted_event_loses_its_bytes_and_what_no_rule_reads(version: str) -> None:
    event = member(version, membership="join", displayname="Alice", avatar_url="mxc://a/b")
    kept = for_auth_checks(event)
    assert (kept.raw, kept.json, kept.content) == (b"", {}, {"membership": "join"})
    for name in FIELDS - {"raw", "json", "content", "signed"}:
        assert getattr(kept, name) == getattr(event, name)
    assert for_auth_checks(kept).content is kept.content


@pytest.mark.parametrize("version", PAIRED)
def test_an_event_whose_reference_hash_is_cited_keeps_its_bytes(version: str) -> None:
    event = member(version, membership="join", displayname="Alice")
    assert for_auth_checks(event) == without_json(event) == event
    assert for_auth_checks(event).content == event.content


def test_equal_strings_and_contents_are_one_object() -> None:
    first, second = (for_auth_checks(member(membership="join", at=at)) for at in "ab")
    assert first.event_id != second.event_id
    assert first.content is second.content
    assert (first.room_id is second.room_id, first.sender is second.sender) == (True, True)
    assert all(a is b for a, b in zip(first.auth_event_ids, second.auth_event_ids, strict=True))


def test_a_long_word_is_not_shared() -> None:
    long = "j" * (WORD_MAX + 1)
    first, second = (for_auth_checks(member(membership=long)) for _ in range(2))
    assert first.content == second.content == {"membership": long}
    assert first.content is not second.content


def test_what_a_rule_reads_of_a_membership_is_kept() -> None:
    content: dict[str, Any] = {
        "membership": "join",
        "join_authorised_via_users_server": "@alice:example.org",
        "third_party_invite": {"signed": {}},
    }
    assert for_auth_checks(member(**content, displayname="Alice")).content == content


def test_the_ids_of_dropped_events_are_freed() -> None:
    event, text = member(membership="join"), "$" + "i" * 50_000
    tracemalloc.start()
    try:
        for at in range(1_000):
            for_auth_checks(replace(event, event_id=EventId(f"{text}{at}")))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 25_000_000  # of 50


def test_strings_are_not_interned_where_that_keeps_them_for_ever() -> None:
    assert interning((3, 11)) is interning((3, 13)) is sys.intern
    first, second = (b"$event".decode() for _ in range(2))
    assert interning((3, 12))(first) is not interning((3, 12))(second)
