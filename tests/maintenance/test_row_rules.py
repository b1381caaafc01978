"""Rules within one row, which no constraint holds: each is found, and mended."""

import pytest

from storage import Store
from storage.database import Database
from storage.rebuild import rebuild
from storage.testing import RoomBuilder, build_room
from tests.maintenance.rooms import LIVELY, SERVER, findings

MESSAGE = "event_nid = (SELECT max(event_nid) FROM events WHERE type_nid = 8 AND NOT outlier)"
STATE = (
    "event_nid = (SELECT max(event_nid) FROM events "
    "WHERE membership IS NULL AND state_key_nid IS NOT NULL)"
)
GROUP = "state_group = (SELECT max(state_group) FROM state_groups WHERE event_nid IS NOT NULL)"

BROKEN = {
    f"UPDATE events SET outlier = true WHERE {MESSAGE}": "an outlier has no position",
    f"UPDATE events SET audience = NULL WHERE {MESSAGE}": "an outlier has no position",
    f"UPDATE events SET depth = NULL, topological_ordering = NULL WHERE {MESSAGE}": (
        "an outlier has a depth"
    ),
    f"UPDATE events SET state_group_after = state_group_before WHERE {MESSAGE}": (
        "only an accepted state event"
    ),
    f"UPDATE events SET membership = 5 WHERE {STATE}": "a member event has a membership",
    f"UPDATE events SET rel_type_nid = 19, relates_to = NULL WHERE {MESSAGE}": (
        "a relation has a type"
    ),
    f"UPDATE events SET refused = 'by hand' WHERE {MESSAGE}": "a refused event is soft-failed",
    f"UPDATE events SET superseded = true WHERE {MESSAGE}": "only a refused event is superseded",
    f"UPDATE events SET prev_events = '{{1}}' WHERE {MESSAGE} AND prev_distance = 1": (
        "edges have one of two forms"
    ),
    f"UPDATE events SET auth_events = '{{1}}' WHERE {MESSAGE}": "edges have one of two forms",
    f"UPDATE state_groups SET key_nids = '{{1}}', event_nids = '{{1}}' WHERE {GROUP}": (
        "entries have one of two forms"
    ),
    f"UPDATE state_groups SET key_nid = NULL, member_key_nid = NULL WHERE {GROUP}": (
        "entries have one of two forms"
    ),
    f"UPDATE state_groups SET member_key_nids = '{{1}}' WHERE {GROUP}": "each key has an event",
    f"UPDATE state_groups SET back = '{{0}}' WHERE {GROUP}": "a path has one of two forms",
    "UPDATE rooms SET current_state_group = NULL": "a room with extremities has a state",
    "UPDATE visibility SET joined_count = -1": "no count is below 0",
}


@pytest.mark.parametrize("change", BROKEN)
async def test_a_row_that_breaks_a_rule_is_found_and_mended(
    store: Store, database: Database, change: str
) -> None:
    room: RoomBuilder = build_room(LIVELY, 40, seed=1)
    await store.append(room.pdus)
    async with database.connection() as conn:
        done = await conn.execute(change)
    assert done.rpartition(" ")[2] != "0", "nothing to damage: the test says nothing"
    found = [finding for finding in await findings(store) if finding.check == "row_rules"]
    assert any(finding.expected.startswith(BROKEN[change]) for finding in found), found
    await rebuild(database, room.room_id, server_name=SERVER)
    assert await findings(store) == []


async def test_moves_are_counted_from_1(store: Store, database: Database) -> None:
    room: RoomBuilder = build_room(LIVELY, 40, seed=1)
    await store.append(room.pdus)
    async with database.connection() as conn:
        await conn.execute(
            "INSERT INTO reordered_events (room_nid, moves, event_nid, topological_before) "
            "SELECT room_nid, 0, min(event_nid), 1 FROM events GROUP BY 1"
        )
    assert "row_rules" in {finding.check for finding in await findings(store)}
    await rebuild(database, room.room_id, server_name=SERVER)
    assert await findings(store) == []
