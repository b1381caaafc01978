"""The declaration of columns says what the catalogue says."""

import asyncpg
import pytest

from storage.database import columns
from storage.database.columns import AUTH_NIDS, EVENTS, PREV_NIDS, STATE_GROUPS, VISIBILITY, Table
from storage.persist.model.cache_view import StoredColumns
from storage.persist.model.rows import (
    AudienceRow,
    EventRow,
    MembershipChange,
    MissingRow,
    RoomRow,
    StateDelta,
    VisibilityRow,
)
from storage.state.groups import GroupRow

TABLES = [value for value in vars(columns).values() if isinstance(value, Table)]
COLUMNS = (
    "SELECT a.attname, format_type(a.atttypid, NULL), a.attnum = ANY (k.conkey)"
    " FROM pg_attribute a"
    " JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'"
    " WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped"
    " ORDER BY a.attnum"
)


@pytest.mark.every_postgres
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.table)
async def test_a_table_is_declared_as_it_is(shared_dsn: str, table: Table) -> None:
    connection = await asyncpg.connect(shared_dsn)
    try:
        found = await connection.fetch(COLUMNS, table.table)
        types = [
            await connection.fetchval("SELECT to_regtype($1)::text", kind)
            for kind in table.types.values()
        ]
    finally:
        await connection.close()
    declared = [
        (name, kind, name in table.key) for name, kind in zip(table.columns, types, strict=True)
    ]
    assert declared == [tuple(record) for record in found]


def test_the_tables_that_the_write_fills_are_declared() -> None:
    assert {"events", "rooms", "state_groups", "visibility"} <= {one.table for one in TABLES}
    assert len(TABLES) > 15


def test_the_rows_of_the_model_have_declared_columns() -> None:
    assert set(EventRow._fields) | set(StoredColumns._fields) | {
        "after_gap",
        "in_order_ts",
        "json",
        *PREV_NIDS.columns,
        *AUTH_NIDS.columns,
    } == set(EVENTS.but("received_ts", "encoding", "writer_nid", "arrival_ordering"))
    assert GroupRow._fields == STATE_GROUPS.columns
    assert set(VisibilityRow._fields) == set(VISIBILITY.but("room_nid", "principal_nid"))
    assert set(MissingRow._fields) == set(columns.MISSING_EVENTS.columns)
    assert set(RoomRow._fields) <= set(columns.ROOMS.columns)
    assert set(AudienceRow._fields) == set(columns.AUDIENCES.but("room_nid", "audience"))
    assert set(StateDelta._fields) - {"cause_nid"} <= set(columns.STATE_DELTAS.columns)
    assert set(MembershipChange._fields) - {"cause_nid", "entered"} <= set(
        columns.MEMBERSHIPS.columns
    )


def test_a_column_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        EVENTS.but("nothing")
    with pytest.raises(ValueError, match="nothing"):
        EVENTS.rows("new_event", ("event_nid", "nothing"))
