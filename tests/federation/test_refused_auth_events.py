"""An event that cites a refused event as auth event is rejected, and not missing for ever."""

from typing import Any

import pytest

from storage.event import event_id, sign
from storage.ids import EventId, RoomId
from storage.testing import signing_key
from storage.testing.assembly import foreign_signing_key, reference_hash_text
from tests.federation.peers import Homeserver
from tests.federation.rooms import agree, outcomes, shared_room
from tests.maintenance.rooms import findings

Json = dict[str, Any]
VERSIONS = ["1", "6", "12"]
LEVELS = "m.room.power_levels"


def signed(one: Homeserver, version: str, pdu: Json, **changes: Any) -> Json:
    pdu = {**pdu, **changes, "hashes": {}, "signatures": {}}
    if "event_id" in pdu:
        pdu["event_id"] = f"${changes['type']}{len(str(changes))}:{one.name}"
    return sign(pdu, version, one.name, signing_key(one.name))


def cited(version: str, pdu: Json) -> Any:
    if version == "1":
        return [pdu["event_id"], {"sha256": reference_hash_text(pdu, version)}]
    return event_id(pdu, version)


async def bad_pair(one: Homeserver, room_id: RoomId, version: str) -> tuple[Json, Json]:
    """Power levels by a user without power, and a message that cites them."""
    content = {"membership": "join"}
    await one.do(room_id, "mallory", "m.room.member", content, state_key=one.user("mallory"))
    base = await one.say(room_id, "honest", "mallory")
    kinds = {}
    for key in base["auth_events"]:
        named = EventId(key if isinstance(key, str) else key[0])
        kinds[(await one.store.events([named]))[named].type] = key
    levels = signed(
        one,
        version,
        base,
        type=LEVELS,
        state_key="",
        content={"users": {one.user("mallory"): 100}},
    )
    others = [key for kind, key in kinds.items() if kind != LEVELS]
    bad = signed(
        one,
        version,
        base,
        type="m.room.message",
        content={"body": "bad"},
        auth_events=[*others, cited(version, levels)],
    )
    return levels, bad


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_below_gap", [False, True])
async def test_it_is_rejected_and_its_children_ask_nobody(
    two: list[Homeserver], version: str, is_below_gap: bool
) -> None:
    one, other = two
    room_id = await shared_room(one, other, version=version)
    levels, bad = await bad_pair(one, room_id, version)

    async def chain(body: Json) -> Json:
        return {"auth_chain": [*body.get("auth_chain", ()), levels]}

    async def one_event(body: Json) -> Json:
        return body or {"pdus": [levels]}

    async def state_ids(body: Json) -> Json:
        if body:
            return body
        found = await one.store.state_ids((await one.store.forward_extremities(room_id)).pop())
        return {"pdu_ids": [*found.state_ids], "auth_chain_ids": [*found.auth_chain_ids]}

    one.network.faults[one.name, "event_auth"] = chain
    one.network.faults[one.name, "event"] = one_event
    one.network.faults[one.name, "state_ids"] = state_ids
    if not is_below_gap:
        await other.fill(room_id)
        [last] = (await one.store.events(await one.store.forward_extremities(room_id))).values()
        assert await outcomes(other, one, last.json) == ["stored"]
    results = await other.receive(one, [bad])
    bad_id = event_id(bad, version)
    assert results[bad_id].outcome == "rejected", results
    assert "auth_events.rejected" in str(results[bad_id].reason)
    kept = await other.store.event(event_id(levels, version))
    assert kept is not None
    assert kept.rejected is not None
    one.network.calls.clear()
    base = await one.say(room_id, "after")
    child = signed(
        one,
        version,
        base,
        type="m.room.message",
        prev_events=[cited(version, bad)],
        content={"body": "child"},
    )
    assert (await other.receive(one, [child]))[event_id(child, version)].outcome == "stored"
    assert one.network.calls["state_ids"] == one.network.calls["get_missing_events"] == 0
    assert await findings(other.store) == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_refused_event_that_nothing_depends_on_is_not_stored(
    two: list[Homeserver], version: str
) -> None:
    """Nor is one whose signature is wrong: another server may return the right one."""
    one, other = two
    room_id = await shared_room(one, other, version=version)
    levels, bad = await bad_pair(one, room_id, version)
    forged = sign(levels | {"signatures": {}}, version, one.name, foreign_signing_key(one.name))
    beside = signed(one, version, levels, type=LEVELS, content={"users": {}})

    async def chain(_: Json) -> Json:
        return {"auth_chain": [forged, beside]}

    one.network.faults[one.name, "event_auth"] = chain
    [last] = (await one.store.events(await one.store.forward_extremities(room_id))).values()
    await other.receive(one, [last.json])
    results = await other.receive(one, [bad])
    assert results[event_id(bad, version)].outcome == "missing_parents"
    for pdu in (levels, beside):
        assert await other.store.event(event_id(pdu, version)) is None
    await agree(room_id, one, other)
