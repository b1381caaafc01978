"""One row damaged by hand: the right check finds it, and no other complains.

A repair mends derived data.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import NamedTuple

import pytest

import storage
from storage import StorageCorrupt, UserId
from storage.database import Database
from storage.maintenance.verify import Finding, verify
from storage.rebuild import rebuild, repair
from storage.testing import Odd, RoomBuilder, build_room, deliver_with_gap
from tests.long_run import long_run
from tests.maintenance.rooms import LIVELY, SERVER, deliver
from tests.persist.tables import logical_tables

LOCAL = UserId("@user1:s1.test")


class Damage(NamedTuple):
    sql: str
    found: set[str]  # the checks that must find it, and no others
    mended: bool
    stays: frozenset[str] = frozenset()
    """Checks of other events that cannot be repaired while the bytes of this one are lost."""


ONE_MESSAGE = (
    "(SELECT event_nid FROM events WHERE type_nid = 8 AND NOT outlier AND rejected IS NULL "
    "ORDER BY event_nid DESC LIMIT 1)"
)
ONE_TOPIC = (
    "(SELECT event_nid FROM events WHERE type_nid = 10 AND state_group_after IS NOT NULL "
    "ORDER BY event_nid LIMIT 1)"
)
ONE_MEMBER = (
    "(SELECT event_nid FROM events WHERE membership = 5 AND state_group_after IS NOT NULL "
    "ORDER BY event_nid LIMIT 1 OFFSET 3)"
)
ONE_LOCAL = (
    "(SELECT principal_nid FROM principals WHERE name LIKE '@%:s1.test' ORDER BY name LIMIT 1)"
)

ONE_MEMBER_ID = "@user1:s1.test"

FLIPPED_BIT = "set_byte(json, 20, get_byte(json, 20) # 4)"

DAMAGES = {
    "bytes": Damage(
        f"UPDATE events SET json = {FLIPPED_BIT} WHERE event_nid = {ONE_MESSAGE}",
        {"bytes"},
        mended=False,
    ),
    "bytes of another form": Damage(
        f"UPDATE events SET json = '\\x00' || json WHERE event_nid = {ONE_MESSAGE}",
        {"bytes"},
        mended=False,
    ),
    "bytes of another dictionary": Damage(
        "UPDATE events SET json = set_byte(json, 2, get_byte(json, 2) # 1) "
        f"WHERE event_nid = {ONE_MESSAGE}",
        {"bytes"},
        mended=False,
    ),
    "bytes of another event": Damage(
        "UPDATE events e SET json = o.json FROM events o "
        f"WHERE e.event_nid = {ONE_MESSAGE} AND o.event_nid = {ONE_TOPIC}",
        {"bytes"},
        mended=False,
    ),
    "what a create event says of the room": Damage(
        "UPDATE events SET describes_room = NOT describes_room WHERE type_nid = 1",
        {"columns"},
        mended=True,
    ),
    "flag of a wrong hash": Damage(
        f"UPDATE events SET redacted_form = NOT redacted_form WHERE event_nid = {ONE_MESSAGE}",
        {"columns"},
        mended=True,
    ),
    "event id": Damage(
        f"UPDATE events SET event_id = '$x' WHERE event_nid = {ONE_MESSAGE}",
        {"event_ids", "columns"},
        mended=True,
    ),
    "event id of another event": Damage(
        f"UPDATE events SET event_id = (SELECT event_id FROM events WHERE event_nid = {ONE_TOPIC}) "
        f"WHERE event_nid = {ONE_MESSAGE}",
        {"event_ids", "doubled_events", "columns"},
        mended=True,
    ),
    "event ids exchanged": Damage(
        f"WITH pair AS (SELECT {ONE_MESSAGE} AS one, {ONE_TOPIC} AS other) "
        "UPDATE events e SET event_id = o.event_id FROM pair JOIN events o "
        "ON o.event_nid IN (one, other) WHERE e.event_nid = one + other - o.event_nid",
        {"event_ids", "columns", "auth_chains"},
        mended=True,
    ),
    "bytes of power levels": Damage(
        f"UPDATE events SET json = {FLIPPED_BIT} WHERE event_nid = "
        "(SELECT min(event_nid) FROM events WHERE type_nid = 3)",
        {"bytes"},
        mended=False,
    ),
    "sender": Damage(
        f"UPDATE events SET sender_nid = sender_nid + 1 WHERE event_nid = {ONE_MESSAGE}",
        {"columns"},
        mended=True,
    ),
    "type": Damage(
        f"UPDATE events SET type_nid = 9 WHERE event_nid = {ONE_MESSAGE}", {"columns"}, mended=True
    ),
    "claimed depth": Damage(
        "UPDATE events SET depth = claimed_depth(depth, topological_ordering) + 1 "
        f"WHERE event_nid = {ONE_MESSAGE}",
        {"columns"},
        mended=True,
    ),
    "order": Damage(
        "UPDATE events SET topological_ordering = topological_ordering - 1, "
        f"depth = claimed_depth(depth, topological_ordering) WHERE event_nid = {ONE_TOPIC}",
        {"topological_ordering"},
        mended=True,
    ),
    "latest position": Damage("UPDATE rooms SET last_stream_ordering = 1", {"rooms"}, mended=True),
    "move of nothing": Damage(
        "INSERT INTO reordered_events (room_nid, moves, event_nid, topological_before) "
        "SELECT room_nid, 1, 999999, 1 FROM rooms",
        {"reordered_events", "rooms"},
        mended=True,
    ),
    "move down": Damage(
        f"INSERT INTO reordered_events (room_nid, moves, event_nid, topological_before) "
        "SELECT room_nid, 1, event_nid, topological_ordering FROM events "
        f"WHERE event_nid = {ONE_TOPIC}",
        {"reordered_events", "rooms"},
        mended=True,
    ),
    "moves below zero": Damage("UPDATE rooms SET moves = -1", {"rooms"}, mended=True),
    "latest order": Damage("UPDATE rooms SET max_topological_ordering = 1", {"rooms"}, mended=True),
    "gap lost": Damage("DELETE FROM missing_events", {"missing_events", "columns"}, mended=True),
    "gap without a child": Damage(
        "UPDATE missing_events SET child_nids = '{}'", {"missing_events"}, mended=True
    ),
    "gap not covered": Damage(
        "UPDATE missing_events SET superseded = NOT superseded", {"missing_events"}, mended=True
    ),
    "gap invented": Damage(
        "INSERT INTO missing_events SELECT 999999, room_nid, false, '$y', '{1}' FROM rooms",
        {"missing_events", "sequences"},
        mended=True,
    ),
    "extremities": Damage(
        f"UPDATE rooms SET forward_extremities = forward_extremities || {ONE_MEMBER}",
        {"forward_extremities"},
        mended=True,
    ),
    "extremities lost": Damage(
        "UPDATE rooms SET forward_extremities = forward_extremities[2:]",
        {"forward_extremities"},
        mended=True,
    ),
    "dropped what was no extremity": Damage(
        "INSERT INTO dropped_extremities SELECT event_nid, room_nid FROM events "
        "WHERE rejected IS NOT NULL LIMIT 1",
        {"dropped_extremities"},
        mended=True,
    ),
    "digest": Damage(
        "UPDATE state_groups SET digest = digest + 1 WHERE state_group = "
        "(SELECT max(state_group) FROM state_groups WHERE digest IS NOT NULL)",
        {"state_groups"},
        mended=True,
    ),
    "entry count": Damage(
        "UPDATE state_groups SET entry_count = entry_count + 1 WHERE state_group = "
        "(SELECT max(state_group) FROM state_groups)",
        {"state_groups"},
        mended=True,
    ),
    "single member not apart": Damage(
        "UPDATE state_groups SET key_nid = member_key_nid, member_key_nid = NULL "
        "WHERE state_group = "
        "(SELECT max(state_group) FROM state_groups WHERE member_key_nid IS NOT NULL)",
        {"state_groups"},
        mended=True,
    ),
    "path": Damage(
        "UPDATE state_groups SET path = set_byte(path, 1, get_byte(path, 1) + 1) "
        "WHERE state_group = "
        "(SELECT max(state_group) FROM state_groups WHERE octet_length(path) > 1)",
        {"state_groups", "state_after"},
        mended=True,
    ),
    "path that cannot be read": Damage(
        "UPDATE state_groups SET path = '\\x05' WHERE state_group = "
        "(SELECT max(state_group) FROM state_groups WHERE octet_length(path) > 1)",
        {"state_paths"},
        mended=True,
    ),
    "members not apart": Damage(
        "UPDATE state_groups SET key_nids = key_nids || member_key_nids, "
        "event_nids = event_nids || member_event_nids, "
        "member_key_nids = '{}', member_event_nids = '{}' WHERE state_group = "
        "(SELECT state_group FROM state_groups WHERE cardinality(member_key_nids) > 0 "
        "ORDER BY 1 LIMIT 1)",
        {"state_groups"},
        mended=True,
    ),
    "state group of no room": Damage(
        "UPDATE state_groups SET room_nid = room_nid + 1 WHERE state_group = "
        f"(SELECT state_group_before FROM events WHERE event_nid = {ONE_MESSAGE})",
        {"state_groups", "derived_orphans"},
        mended=True,
    ),
    "state before": Damage(
        "UPDATE events SET state_group_before = (SELECT state_group_before FROM events "
        f"WHERE event_nid = {ONE_TOPIC}) "
        f"WHERE event_nid = {ONE_MESSAGE}",
        {"state_before", "visibility"},
        mended=True,
    ),
    "state after": Damage(
        f"UPDATE events SET state_group_after = NULL WHERE event_nid = {ONE_TOPIC}",
        {"state_after", "state_before"},
        mended=True,
    ),
    "rejected": Damage(
        f"UPDATE events SET rejected = 'event.level: x' WHERE event_nid = {ONE_MESSAGE}",
        {"rejected"},
        mended=True,
    ),
    "accepted": Damage(
        "UPDATE events SET rejected = NULL WHERE event_nid = (SELECT max(event_nid) FROM events "
        "WHERE rejected IS NOT NULL)",
        {"rejected", "forward_extremities"},
        mended=True,
    ),
    "current group": Damage(
        "UPDATE rooms SET current_state_group = (SELECT state_group_before FROM events "
        f"WHERE event_nid = {ONE_TOPIC})",
        {
            *("current_state_group", "current_state", "memberships", "visibility"),
            *("visibility_counts", "state_deltas"),
        },
        mended=True,
    ),
    "current state lost": Damage(
        "DELETE FROM current_state WHERE state_key_nid = 3", {"current_state"}, mended=True
    ),
    "current state changed": Damage(
        "UPDATE current_state SET membership = 1 WHERE membership = 5",
        {"current_state", "member_counts"},
        mended=True,
    ),
    "joined members miscounted": Damage(
        "UPDATE rooms SET joined_count = joined_count + 1", {"member_counts"}, mended=True
    ),
    "invited members miscounted": Damage(
        "UPDATE rooms SET invited_count = invited_count + 1", {"member_counts"}, mended=True
    ),
    "late events in time order": Damage(
        "UPDATE events SET in_order_ts = origin_server_ts + 1000000000 "
        f"WHERE event_nid = {ONE_TOPIC}",
        {"time_order"},
        mended=True,
    ),
    "history in time order": Damage(
        "UPDATE events SET in_order_ts = NULL WHERE backfilled", {"time_order"}, mended=True
    ),
    "time reached too early": Damage(
        "UPDATE events SET in_order_ts = DEFAULT "
        "WHERE in_order_ts IS NOT NULL AND NOT backfilled AND NOT outlier",
        {"time_order"},
        mended=True,
    ),
    "time reached forgotten": Damage(
        "UPDATE rooms SET in_order_ts = DEFAULT", {"rooms"}, mended=True
    ),
    "gap forgotten": Damage("UPDATE events SET after_gap = NULL", {"after_gap"}, mended=True),
    "URL invented": Damage(
        f"UPDATE events SET has_url = true WHERE event_nid = {ONE_MESSAGE}",
        {"columns"},
        mended=True,
    ),
    "membership lost": Damage("DELETE FROM memberships", {"memberships"}, mended=True),
    "membership changed": Damage(
        "UPDATE memberships SET membership = 1 WHERE membership = 5", {"memberships"}, mended=True
    ),
    "place lost": Damage(
        f"DELETE FROM auth_chains WHERE event_nid = {ONE_MEMBER}", {"auth_chains"}, mended=True
    ),
    "place of another name": Damage(
        f"UPDATE auth_chains SET event_id = '$other' WHERE event_nid = {ONE_MEMBER}",
        {"auth_chains"},
        mended=True,
    ),
    "place of another key": Damage(
        f"UPDATE auth_chains SET state_key = '@x:y' WHERE event_nid = {ONE_MEMBER}",
        {"auth_chains"},
        mended=True,
    ),
    "place of a message": Damage(
        f"UPDATE auth_chains SET event_nid = {ONE_MESSAGE}, "
        "chain_nid = COALESCE(chain_nid, -event_nid) "
        "WHERE event_nid = (SELECT min(event_nid) FROM auth_chains)",
        {"auth_chains"},
        mended=True,
    ),
    "links lost": Damage(
        "UPDATE auth_chains SET link_1 = NULL, link_2 = NULL", {"auth_chains"}, mended=True
    ),
    "link too far": Damage(
        "UPDATE auth_chains SET link_1 = link_1 + 1 WHERE link_1 IS NOT NULL",
        {"auth_chains"},
        mended=True,
    ),
    "redaction forgotten": Damage(
        "UPDATE events SET redacted_by = NULL WHERE redacted_by IS NOT NULL",
        {"redacted_by"},
        mended=True,
    ),
    "redaction invented": Damage(
        f"UPDATE events SET redacted_by = {ONE_TOPIC} WHERE event_nid = {ONE_MEMBER}",
        {"redacted_by"},
        mended=True,
    ),
    "redaction that took effect": Damage(
        "UPDATE events SET ineffective = NOT ineffective "
        "WHERE type_nid = 7 AND rejected IS NULL AND NOT outlier",
        {"ineffective"},
        mended=True,
    ),
    "message marked as a redaction": Damage(
        f"UPDATE events SET ineffective = true WHERE event_nid = {ONE_MESSAGE}",
        {"ineffective"},
        mended=True,
    ),
    "redaction waits for nothing": Damage(
        f"INSERT INTO waiting_redactions SELECT {ONE_MESSAGE}, room_nid, '$z' FROM rooms",
        {"waiting_redactions"},
        mended=True,
    ),
    "relations lost": Damage(
        "UPDATE events SET relates_to = NULL, rel_type_nid = NULL, replaces = NULL",
        {"relations"},
        mended=True,
    ),
    "relation to something else": Damage(
        "UPDATE events SET relates_to = relates_to + 1, rel_type_nid = 22, replaces = NULL "
        "WHERE relates_to IS NOT NULL",
        {"relations"},
        mended=True,
    ),
    "relation invented": Damage(
        "UPDATE events SET relates_to = 7, rel_type_nid = 19, replaces = true "
        f"WHERE event_nid = {ONE_TOPIC}",
        {"relations"},
        mended=True,
    ),
    "nobody sees it": Damage(
        f"UPDATE events SET audience = 0 WHERE event_nid = {ONE_MESSAGE}",
        {"audiences", "visibility"},
        mended=True,
    ),
    "audience of a state": Damage(
        "UPDATE state_groups SET audience = 1::bigint << 40 WHERE state_group = "
        f"(SELECT state_group_before FROM events WHERE event_nid = {ONE_MESSAGE})",
        {"visibility"},
        mended=True,
    ),
    "audience forgotten": Damage("DELETE FROM audiences", {"audiences"}, mended=True),
    "all is seen": Damage(
        f"UPDATE visibility SET audiences = '{{[0,)}}' WHERE principal_nid = {ONE_LOCAL}",
        {"visibility"},
        mended=True,
    ),
    "nothing is seen": Damage(
        f"UPDATE visibility SET audiences = '{{}}' WHERE principal_nid = {ONE_LOCAL}",
        {"visibility"},
        mended=True,
    ),
    "seen by an invitation alone": Damage(
        f"UPDATE visibility SET invited_audiences = audiences WHERE principal_nid = {ONE_LOCAL}",
        {"visibility"},
        mended=True,
    ),
    "what is shared": Damage(
        "UPDATE visibility SET audiences = '{}' WHERE principal_nid = 2",
        {"visibility"},
        mended=True,
    ),
    "row of visibility lost": Damage(
        f"DELETE FROM visibility WHERE principal_nid = {ONE_LOCAL}",
        {"visibility", "visibility_counts"},
        mended=True,
    ),
    "count of the joined": Damage(
        "UPDATE visibility SET joined_count = joined_count + 1 WHERE principal_nid = "
        "(SELECT max(principal_nid) FROM visibility)",
        {"visibility_counts"},
        mended=True,
    ),
    "last join": Damage(
        f"UPDATE visibility SET last_join_topological = 1000000 WHERE principal_nid = {ONE_LOCAL}",
        {"visibility_counts"},
        mended=True,
    ),
    "visibility in no room": Damage(
        "INSERT INTO visibility SELECT (jsonb_populate_record(v, "
        "jsonb_build_object('room_nid', v.room_nid + 1))).* FROM visibility v",
        {"derived_orphans"},
        mended=True,
    ),
    "name of a type": Damage(
        "UPDATE event_types SET type = 'm.room.messages' WHERE type_nid = 8",
        {"names", "columns"},
        mended=True,
    ),
    "name of a type under another number": Damage(
        "UPDATE event_types SET type_nid = 999 WHERE type_nid = 17",
        {"names", "columns"},
        mended=True,
    ),
    "position": Damage(
        "UPDATE stream_positions SET stream_id = 2", {"stream_positions"}, mended=True
    ),
    "position lost": Damage(
        "DELETE FROM stream_positions WHERE stream_name = 'events'",
        {"stream_positions"},
        mended=True,
    ),
    "position of account data": Damage(
        "UPDATE stream_positions SET stream_id = 1 WHERE stream_name = 'account_data'",
        {"stream_positions"},
        mended=True,
    ),
    "position of a defined stream": Damage(
        "UPDATE stream_positions SET stream_id = 1 WHERE stream_name = 'typing'",
        {"stream_positions"},
        mended=True,
    ),
    "position of receipts lost": Damage(
        "DELETE FROM stream_positions WHERE stream_name = 'receipts'",
        {"stream_positions"},
        mended=True,
    ),
    "connection of sliding sync": Damage(
        "DELETE FROM sliding_connections", {"sliding_rooms"}, mended=True
    ),
    "state of a connection": Damage(
        "UPDATE sliding_rooms SET number = number + 5", {"sliding_rooms"}, mended=True
    ),
    "required state of a connection": Damage(
        "UPDATE sliding_connections SET required_states = '{}'", {"sliding_rooms"}, mended=True
    ),
    **{
        f"sequence {name}": Damage(f"SELECT setval('{name}', 1, false)", {"sequences"}, mended=True)
        for name in (
            "event_nids",
            "events_stream",
            "account_data_stream",
            "to_device_stream",
            "receipts_stream",
            "published_facts_stream",
            "sliding_connection_nids",
            "writer_nids",
        )
    },
    "index of an interrupted build": Damage(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'events_gap_idx'::regclass",
        {"indexes"},
        mended=False,
    ),
}


REFUSED = {"bytes of power levels"}
"""They decide about other events, so the bytes are needed: they are restored from a backup."""


@pytest.fixture(scope="module")
def room() -> RoomBuilder:
    return build_room(
        LIVELY.replaced(odd=Odd(rejected=0.03, early_redaction=0.02)), 260, seed=11, sign=False
    )


@pytest.fixture
async def database(dsn: str, room: RoomBuilder) -> AsyncIterator[Database]:
    """A lively room with a gap in its history.

    No store is open: one would take damaged positions for those of a restored backup.
    """
    delivery = deliver_with_gap(room, 60, 70)
    live = delivery.events[: len(delivery.events) - 5]
    async with storage.open(dsn, server_name=SERVER) as opened:
        await deliver(opened, replace(delivery, events=live), batch=40)
        await opened.account_data.set(LOCAL, "m.direct", {})
        await opened.to_device.send({LOCAL: {"device": {"n": 1}}})
        await opened.receipts.set(room.room_id, "m.read", LOCAL, room.events[0].event_id, {})
        request = storage.SlidingSyncRequest(lists={"all": storage.SlidingList()})
        await opened.sliding_sync(ONE_MEMBER_ID, request, device_id="DEVICE")
        await opened.define_stream("typing").publish(room.room_id, {})
    async with await Database.open(dsn) as database:
        yield database


async def findings(database: Database) -> list[Finding]:
    return [finding async for finding in verify(database, server_name=SERVER)]


SOME = {frozenset(damage.found): name for name, damage in DAMAGES.items()}.values()
"""One for each set of checks that finds it."""


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=long_run) for name in DAMAGES]
)
async def test_damage_is_found_and_mended(database: Database, room: RoomBuilder, name: str) -> None:
    damage = DAMAGES[name]
    assert await findings(database) == []
    async with database.connection() as conn:
        done = await conn.execute(damage.sql)
    assert done.rpartition(" ")[2] != "0", "nothing to damage: the test says nothing"
    found = await findings(database)
    assert {finding.check for finding in found} == damage.found, "\n".join(map(str, found))
    if name in REFUSED:
        with pytest.raises(StorageCorrupt):
            await rebuild(database, room.room_id, server_name=SERVER)
    await repair(database, found, server_name=SERVER)
    left = [] if damage.mended else [finding for finding in found if not finding.repairable]
    after = await findings(database)
    stays = {finding.check for finding in left} | damage.stays
    assert {finding.check for finding in after} <= stays, "\n".join(map(str, after))
    assert damage.mended == (not after)


async def test_a_state_key_without_its_name_gets_another_number(
    database: Database, room: RoomBuilder
) -> None:
    async with database.connection() as conn:
        await conn.execute(
            "DELETE FROM state_keys WHERE state_key_nid = (SELECT state_key_nid FROM events "
            f"WHERE event_nid = {ONE_MEMBER})"
        )
    found = await findings(database)
    assert any("without a row in state_keys" in finding.found for finding in found)
    await rebuild(database, room.room_id, server_name=SERVER)
    assert await findings(database) == []


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_a_state_group_of_another_room_goes_back(
    database: Database, dsn: str, *, is_reversed: bool
) -> None:
    """No other row has a state that a caller gave: a repair of the other room keeps it."""
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(build_room(LIVELY, 30, seed=12, sign=False).pdus)
    sound = await logical_tables(database)
    async with database.connection() as conn:
        await conn.execute(
            "UPDATE state_groups SET room_nid = (SELECT sum(room_nid) FROM rooms) - room_nid "
            "WHERE state_group IN (SELECT state_group_before FROM events WHERE after_gap UNION "
            "(SELECT state_group_before FROM events ORDER BY event_nid DESC LIMIT 1))"
        )
    found = await findings(database)
    rooms = sorted({finding.room_id or "" for finding in found})
    assert len(rooms) == 2
    assert "state_groups" in {finding.check for finding in found}
    found.sort(key=lambda finding: rooms.index(finding.room_id or ""), reverse=is_reversed)
    await repair(database, found, server_name=SERVER)
    assert await findings(database) == []
    assert await logical_tables(database) == sound


async def test_events_of_no_room_stay_and_say_what_to_do(database: Database) -> None:
    async with database.connection() as conn:
        await conn.execute("DELETE FROM rooms")
        count = await conn.fetchval("SELECT count(*) FROM current_state")
    found = await findings(database)
    orphans = [finding for finding in found if finding.check == "orphans"]
    assert not any(finding.repairable for finding in orphans)
    assert {finding.remedy for finding in orphans} == {
        "restore the row of the room in rooms, or the database, from a backup"
    }
    await repair(database, found, server_name=SERVER)
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM current_state") == count


async def test_a_room_that_cannot_be_rebuilt_leaves_the_others_to_be_repaired(
    database: Database, dsn: str, room: RoomBuilder
) -> None:
    """An event has the number of another room: neither has all of its events."""
    others = [build_room(LIVELY, 20, seed=seed, sign=False) for seed in (12, 13)]
    async with storage.open(dsn, server_name=SERVER) as store:
        for other in others:
            await store.append(other.pdus)
    async with database.connection() as conn:
        await conn.execute(
            "UPDATE events SET room_nid = "
            "(SELECT room_nid FROM rooms ORDER BY room_nid LIMIT 1 OFFSET 1) WHERE event_nid = "
            "(SELECT event_nid FROM events WHERE room_nid = (SELECT min(room_nid) FROM rooms) "
            "AND membership = 5 ORDER BY event_nid LIMIT 1 OFFSET 3)"
        )
        await conn.execute("DELETE FROM current_state")
    await repair(database, await findings(database), server_name=SERVER)
    left = await findings(database)
    assert {finding.room_id for finding in left} <= {room.room_id, others[0].room_id}
