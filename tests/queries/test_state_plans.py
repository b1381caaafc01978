"""Plans of states and auth chains among many other states: their index and rows read.

A filter without members reads no member array.
"""

import json

import pytest

from storage import Store
from storage.database.placeholders import long_int_array, text_array
from storage.ids import EventId
from storage.queries import auth_chain, state_at
from tests.queries.rooms import LOCAL
from tests.queries.test_plans import Filled, MeasuredPlan, fill, plan_of

SQL_CROWD = """
WITH
other_group AS (
    INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, runs, back)
    SELECT 1000000 + n, n, 1, 999, 0, 1, '{0}' FROM generate_series(1, 5000) AS n
),
other_key AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT 1000000 + n, 2, '@crowd' || n || ':s9.test' FROM generate_series(1, 5000) AS n
),
other_place AS (
    INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key)
    SELECT -n, 1000000 + n, 1, '$crowd' || n, '' FROM generate_series(1, 5000) AS n
)
INSERT INTO auth_chain_links (chain_nid, target_chain_nid, sequence_number, target_sequence_number)
SELECT 1000000 + n, 1000001, 1, 1 FROM generate_series(2, 5000) AS n
"""


SQL_MANY_MEMBERS = """
UPDATE state_groups
SET key_nid = NULL,
    member_key_nid = NULL,
    event_nid = NULL,
    member_key_nids = (SELECT array_agg(1000000 + n) FROM generate_series(1, 20000) AS n),
    member_event_nids = (SELECT array_agg(1000000000::bigint + n)
        FROM generate_series(1, 20000) AS n)
WHERE state_group = (SELECT state_group_before FROM events WHERE event_id = $1::text)
"""


@pytest.fixture
async def crowded(store: Store) -> Filled:
    """The large room among thousands of other states, keys and chains."""
    filled = await fill(store)
    async with filled.store.database.connection() as conn:
        await conn.execute(SQL_CROWD)
        for table in (
            "state_groups",
            "state_keys",
            "auth_chains",
            "auth_chain_links",
            "event_types",
        ):
            await conn.execute(f"VACUUM ANALYZE {table}")
    return filled


async def test_the_state_at_an_event(crowded: Filled) -> None:
    plan = await plan_of(crowded.store, state_at.SQL_PATHS, [crowded.last_event_id], False, [])
    assert {"events_event_id_idx", "state_groups_pkey"} <= plan.indexes
    assert plan.event_rows <= 2
    async with crowded.store.database.connection() as conn:
        nids = await state_at.event_nids_before(conn, EventId(crowded.last_event_id))
        group = await conn.fetchval(
            "SELECT state_group_before FROM events WHERE event_id = $1::text", crowded.last_event_id
        )
        rows = await conn.fetch(
            state_at.SQL_PATHS, [crowded.last_event_id], False, [group], row=state_at.StatePathRow
        )
    assert [(row.state_group, row.is_stored) for row in rows] == [(group, False)], (
        "of a state that is remembered nothing is sent"
    )
    plan = await plan_of(crowded.store, state_at.SQL_TEXTS, [long_int_array(nids)], "{}")
    assert {"auth_chains_pkey"} <= plan.indexes
    assert plan.event_rows == 0
    keys = ["m.room.member", "m.room.name"], [LOCAL, ""]
    plan = await plan_of(
        crowded.store, state_at.SQL_STATE_OF_KEYS, [crowded.last_event_id], False, *keys
    )
    assert {
        "events_event_id_idx",
        "state_groups_pkey",
        "state_keys_type_nid_state_key_key",
    } <= plan.indexes
    assert plan.event_rows <= 4
    plan = await plan_of(
        crowded.store,
        state_at.SQL_STATE_OF_TYPES,
        [crowded.last_event_id],
        False,
        ["m.room.create"],
    )
    assert {"events_event_id_idx", "state_groups_pkey"} <= plan.indexes
    assert plan.event_rows <= 20


async def test_the_members_of_a_large_state_are_left_alone(crowded: Filled) -> None:
    """40,000 out-of-line numbers take dozens of pages.

    A query without members reads none of them.
    """
    event_id = crowded.last_event_id

    async def looked_at() -> tuple[int, int, int]:
        asked = [event_id], False
        types = await plan_of(crowded.store, state_at.SQL_STATE_OF_TYPES, *asked, ["m.room.create"])
        key = await plan_of(
            crowded.store, state_at.SQL_STATE_OF_KEYS, *asked, ["m.room.create"], [""]
        )
        member = await plan_of(
            crowded.store,
            state_at.SQL_STATE_OF_KEYS,
            *asked,
            ["m.room.member"],
            ["@crowd1:s9.test"],
        )
        return pages(types), pages(key), pages(member)

    before = await looked_at()
    async with crowded.store.database.connection() as conn:
        await conn.execute(SQL_MANY_MEMBERS, event_id)
    after = await looked_at()
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4
    assert after[2] > before[2] + 30


def pages(plan: MeasuredPlan) -> int:
    """Pages that a statement looked at."""
    node = json.loads(plan.text)[0]["Plan"]
    return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])


async def test_auth_chains(crowded: Filled) -> None:
    async with crowded.store.database.connection() as conn:
        nids = await state_at.event_nids_before(conn, EventId(crowded.last_event_id))
        state = await conn.fetchvals(
            "SELECT event_id FROM events WHERE event_nid = ANY($1::bigint[])", nids
        )
    plan = await plan_of(crowded.store, auth_chain.SQL_AUTH_CHAIN, text_array(state), "{}")
    assert {
        "events_event_id_idx",
        "auth_chains_pkey",
        "auth_chains_position_key",
    } <= plan.indexes
    assert plan.event_rows <= 3 * len(state)
    plan = await plan_of(
        crowded.store,
        auth_chain.SQL_DIFFERENCE,
        state,
        [number % 2 for number in range(len(state))],
        2,
        256,
    )
    assert {
        "events_event_id_idx",
        "auth_chains_pkey",
        "auth_chain_links_pkey",
        "auth_chain_links_target_idx",
    } <= plan.indexes
    assert plan.event_rows <= 3 * len(state)
