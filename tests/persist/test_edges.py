"""The facts that docs/internals/state-dags.md relies on."""

import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

import storage
from storage import Store
from storage.auth import auth_event_keys
from storage.event import ROOM_VERSIONS, event_id, parse, redact, sign
from storage.testing import KEY_ID, build_room, signing_key, verify_key
from tests.maintenance.rooms import LIVELY, findings

# a version whose events have one more key, as a row of the table that only this file knows
STATE_DAG = replace(
    ROOM_VERSIONS["12"],
    identifier="test.state_dag",
    redaction_keys=ROOM_VERSIONS["12"].redaction_keys | {"prev_state_events"},
)
ALICE, SERVER = "@alice:s1.test", "s1.test"
MEMBER, TOPIC = "m.room.member", "m.room.topic"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


@pytest.mark.parametrize("version", ["2", "12"])
async def test_auth_events_can_be_computed_from_the_stored_state(
    store: Store, version: str
) -> None:
    """The builder's servers list what the auth rules read of the state before their event."""
    room = build_room(LIVELY, 120, seed=3, version=version, sign=False)
    await store.append(room.pdus, room_version=version)
    assert sum(len(event.prev_events) > 1 for event in room.events) > 3
    for built in room.events:
        event = parse(built.pdu, version)
        state = await store.state_before(event.event_id)
        computed = {state[key] for key in auth_event_keys(event) if key in state}
        assert computed == set(event.auth_event_ids), event


def add_version(patch: pytest.MonkeyPatch) -> None:
    """Add the row of the version to the table, in each module that reads it."""
    table = MappingProxyType({**ROOM_VERSIONS, STATE_DAG.identifier: STATE_DAG})
    for module in [*sys.modules.values()]:
        if vars(module).get("ROOM_VERSIONS") is ROOM_VERSIONS:
            patch.setattr(module, "ROOM_VERSIONS", table)


def signed(
    kind: str, state_key: str | None, content: dict[str, Any], before: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a PDU after these. It names the latest state event as `prev_state_events`."""
    ids = {event_id(pdu, STATE_DAG): pdu for pdu in before}
    state = [one for one, pdu in ids.items() if "state_key" in pdu]
    pdu = {
        "type": kind,
        "sender": ALICE,
        "content": content,
        "depth": len(ids) + 1,
        "origin_server_ts": 1_700_000_000_000 + len(ids),
        "prev_events": [*ids][-1:],
        "auth_events": [one for one, pdu in ids.items() if pdu["type"] == MEMBER],
        "prev_state_events": state[-1:],
    }
    pdu |= {} if state_key is None else {"state_key": state_key}
    pdu |= {"room_id": "!" + state[0][1:]} if state else {}
    return sign(pdu, STATE_DAG, SERVER, signing_key(SERVER))


def small_room() -> list[dict[str, Any]]:
    room: list[dict[str, Any]] = []
    for kind, state_key, content in (
        ("m.room.create", "", {"room_version": STATE_DAG.identifier}),
        (MEMBER, ALICE, {"membership": "join"}),
        (TOPIC, "", {"topic": "one"}),
        ("m.room.message", None, {"body": "hello"}),
        (TOPIC, "", {"topic": "two"}),
    ):
        room.append(signed(kind, state_key, content, room))
    return room


def test_the_event_id_covers_a_key_of_the_version_and_redaction_keeps_it() -> None:
    *_, pdu = small_room()
    other = {**pdu, "prev_state_events": ["$" + "x" * 43]}
    assert event_id(pdu, STATE_DAG) != event_id(other, STATE_DAG)
    assert event_id(pdu, "12") == event_id(other, "12")
    assert redact(pdu, STATE_DAG)["prev_state_events"] == pdu["prev_state_events"]


async def test_a_row_of_the_table_is_enough_to_store_the_bytes_of_edges(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state still comes from `prev_events`: other edges are kept, and decide nothing."""
    room = small_room()
    keys = {(SERVER, KEY_ID): verify_key(SERVER)}
    refused = await store.append(room, verify_keys=keys)
    assert {result.outcome for result in refused} == {"invalid"}
    with monkeypatch.context() as patch:
        add_version(patch)
        results = await store.append(room, verify_keys=keys)
        assert [result.outcome for result in results] == ["stored"] * len(room)
        for pdu in room:
            held = await store.event(event_id(pdu, STATE_DAG))
            assert held is not None
            assert parse(held.raw, STATE_DAG).json == pdu
        room_id = room[-1]["room_id"]
        assert len(await store.current_state(room_id)) == 3
        assert await findings(store, room_id) == []
    later = signed("m.room.message", None, {"body": "later"}, room)
    (result,) = await store.append([later], verify_keys=keys)
    assert result.outcome == "invalid"
    assert STATE_DAG.identifier in (result.reason or "")
