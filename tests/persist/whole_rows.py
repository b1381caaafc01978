"""Every column of every table, in the terms of the protocol, so that two stores can be compared.

Numbers become names: an event its id, a state group its entries, an audience the principals in it,
a position of the stream the event that arrived there. Columns that two equal stores may differ in
are in the lists below with the reason. A column of a new table is in neither list, and the test of
this module fails.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import asyncpg

from storage.codec import decode
from tests.persist.delta_rows import disagreements

Row = dict[str, Any]

TABLES: Final[dict[str, dict[str, str]]] = {
    "rooms": {
        "room_nid": "key room",
        "room_version": "value",
        "current_state_group": "state",
        "last_stream_ordering": "position",
        "max_topological_ordering": "value",
        "current_audience": "audience",
        "joined_count": "value",
        "invited_count": "value",
        "forward_extremities": "event set",
        "is_partial": "value",
    },
    "partial_rooms": {
        "room_nid": "key room",
        "join_event_id": "value",
        "origin": "value",
        "servers": "value",
    },
    "events": {
        "event_nid": "key event",
        "topological_ordering": "value",
        "depth": "value",
        "origin_server_ts": "value",
        "state_group_before": "state",
        "state_group_after": "state",
        "audience": "audience",
        "redacted_by": "event",
        "relates_to": "value",
        "room_nid": "room",
        "sender_nid": "principal",
        "type_nid": "type",
        "state_key_nid": "state key",
        "rel_type_nid": "type",
        "encoding": "value",
        "membership": "value",
        "outlier": "value",
        "backfilled": "value",
        "soft_failed": "value",
        "redacted_form": "value",
        "ineffective": "value",
        "replaces": "value",
        "has_url": "value",
        "after_gap": "value",
        "event_id": "value",
        "rejected": "value",
        "refused": "value",
        "superseded": "value",
        "prev_events": "events",
        "auth_events": "events",
        "json": "bytes",
        "describes_room": "value",
    },
    "missing_events": {
        "event_nid": "key event",
        "room_nid": "room",
        "superseded": "value",
        "event_id": "value",
        "child_nids": "event set",
    },
    "gap_failures": {
        "event_nid": "key event",
        "failures": "value",
        "reason": "value",
        "servers": "value",
    },
    "dropped_extremities": {"event_nid": "key event", "room_nid": "room"},
    "waiting_redactions": {
        "redaction_nid": "key event",
        "room_nid": "room",
        "target_event_id": "value",
    },
    "current_state": {
        "event_nid": "event",
        "room_nid": "key room",
        "state_key_nid": "key state key",
        "membership": "value",
    },
    "memberships": {
        "stream_ordering": "position",
        "event_nid": "event",
        "principal_nid": "key principal",
        "room_nid": "key room",
        "membership": "value",
        "forgotten": "value",
    },
    "out_of_band_memberships": {
        "event_nid": "event",
        "room_nid": "key room",
        "principal_nid": "key principal",
        "stripped_state": "value",
    },
    "auth_chains": {"event_nid": "key event", "event_id": "value", "state_key": "value"},
    "visibility": {
        "last_join_topological": "value",
        "room_nid": "key room",
        "principal_nid": "key principal",
        "joined_count": "value",
        "invited_count": "value",
    },
    "purged_streams": {"stream_name": "key value", "purged_upto": "value"},
    "lost_positions": {"stream_name": "key value", "lost_upto": "key value"},
    "erased_users": {"principal_nid": "key principal"},
    "deployment": {"server_name": "key value"},
    "receipts": {
        "room_nid": "key room",
        "principal_nid": "key principal",
        "receipt_type": "key value",
        "thread_id": "key value",
        "event_id": "value",
        "data": "value",
    },
}
"""The columns that are compared, and how to read each. Those with "key" identify a row."""

COLUMNS_LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "rooms": {
        "room_id": "the key",
        "write_version": "counts the writes",
        "next_audience": "a number; the audiences are compared by the principals in them",
        "moves": "counts the writes that moved events, and those of a completion",
        "removals": "counts the transactions that deleted rows",
        "out_of_range": "a range of reads that may be too wide; verify checks it",
        "completed_at": "the position of the completion",
        "in_order_ts": "follows from positions; verify checks it",
    },
    "partial_rooms": {"began_ts": "a time of arrival"},
    "events": {
        "stream_ordering": "compared as an order (StoreRows.order)",
        "arrival_ordering": "the position before it was readmitted; no order depends on it here",
        "received_ts": "a time of arrival",
        "writer_nid": "the process that stored it",
        "prev_distance": "compared as prev_events",
        "auth_distance_1": "compared as auth_events",
        "auth_distance_2": "the same",
        "auth_distance_3": "the same",
        "auth_distance_4": "the same",
        "in_order_ts": "follows from positions; verify checks it",
    },
    "gap_failures": {"failed_ts": "a time", "retry_ts": "a time"},
    "memberships": {"writer_nid": "the process that stored it"},
    "auth_chains": {
        "chain_nid": "the chains follow the order of storing; the auth chains are compared",
        "sequence_number": "the same",
        "link_1": "the same",
        "link_2": "the same",
    },
    "visibility": {
        "audiences": "numbers; the principals of each event are compared",
        "invited_audiences": "the same",
        "first_audience": "the same",
    },
    "lost_positions": {
        "lost_after": "a position",
        "instance_names": "processes",
        "kept_upto": "positions",
    },
    "erased_users": {"erased_ts": "a time"},
    "deployment": {
        "deployment_id": "chosen at random",
        "created_ts": "a time",
        "singleton": "always true",
        "incarnation": "chosen at random",
    },
    "receipts": {"stream_id": "a position", "writer_nid": "the process that stored it"},
}

TABLES_LEFT_OUT: Final[dict[str, str]] = {
    "state_groups": "numbers and paths; the states of all events are compared as maps",
    "state_deltas": "compared as maps (StoreRows.deltas)",
    "reordered_events": "positions before a move, for tokens from before it",
    "outlier_memberships": "a completion publishes one fact, to wake syncs",
    "auth_chain_links": "as auth_chains; the auth chains are compared",
    "past_visibility": "numbers; the principals of each event are compared",
    "audiences": "numbers; the principals of each event are compared",
    "local_transactions": "an event is sent by one store and received by the other",
    "principals": "names that were read, perhaps without a row that has them",
    "event_types": "the same",
    "state_keys": "the same",
    "alembic_version": "the schema",
    "schema_compatibility": "the schema",
    "background_jobs": "the schema",
    "stream_positions": "the processes",
    "writers": "the processes",
    "cache_invalidations": "the processes",
    "account_data": "nothing of a room's events",
    "to_device": "nothing of a room's events",
    "defined_streams": "nothing of a room's events",
    "published_facts": "nothing of a room's events",
    "cursors": "nothing of a room's events",
    "sliding_connections": "nothing of a room's events",
    "sliding_rooms": "nothing of a room's events",
    "import_events": "nothing of a room's events",
    "dictionaries": "how bytes are stored; the decoded bytes are compared",
    "archive_packs": "where bytes are stored; the decoded bytes are compared",
    "archive_garbage": "where bytes were stored",
    "purge_jobs": "nothing of a room's events",
    "purge_retained_events": "nothing of a room's events",
}

COMPLETED: Final = "(the completion)"
"""The position of a completion."""

LEFT: Final = "(a position that an event has left)"
"""That of state deltas, and of what follows them, whose event has a new position since a
completion: a soft-failed event may end forward extremities, and so change the current state."""

SQL_COLUMNS: Final = """
SELECT c.relname AS table_name, a.attname AS column_name
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
"""
SQL_GROUPS: Final = """
WITH used AS (
    SELECT state_group_before AS number FROM events WHERE NOT outlier
    UNION SELECT state_group_after FROM events WHERE state_group_after IS NOT NULL
    UNION SELECT current_state_group FROM rooms WHERE current_state_group IS NOT NULL
)
SELECT u.number, x.state_key_nid, x.event_nid
FROM used u
CROSS JOIN LATERAL state_entries(u.number) AS x
"""
SQL_AUDIENCES: Final = """
WITH used AS (
    SELECT room_nid, audience FROM events WHERE audience IS NOT NULL
    UNION SELECT room_nid, current_audience FROM rooms
)
SELECT u.room_nid, u.audience, p.name, u.audience <@ v.invited_audiences AS is_invited
FROM used u
JOIN whole_visibility v USING (room_nid)
JOIN principals p USING (principal_nid)
WHERE u.audience <@ v.audiences
"""
SQL_EVENTS: Final = """
SELECT e.*, prev_nids(event_nid, prev_events, prev_distance) AS parents,
    auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2, auth_distance_3,
        auth_distance_4) AS auth,
    claimed_depth(depth, topological_ordering) AS claimed
FROM events e
"""
COMPUTED: Final = {"prev_events": "parents", "auth_events": "auth", "depth": "claimed"}
SQL_CHAINS: Final = f"""
WITH RECURSIVE edge AS MATERIALIZED ({SQL_EVENTS}),
reached AS (
    SELECT event_nid AS root, unnest(auth) AS event_nid FROM edge
    UNION
    SELECT r.root, unnest(e.auth) FROM reached r JOIN edge e USING (event_nid)
)
SELECT root, event_nid FROM reached
"""
SQL_MOVED: Final = """
SELECT e.event_id
FROM events e
JOIN writers w USING (writer_nid)
WHERE NOT e.outlier AND w.instance_name = 'maintenance'
"""
"""A completion gives all others back to their writers."""


class StoreRows(NamedTuple):
    """The rows of a store. ``order``: its timeline in the order of arrival.

    ``deltas``: the changes of the current state, in order: the position, and the new values.
    ``moved``: the events that a completion has accepted, and given new positions.
    ``disagreements``: what is wrong in this store alone.
    """

    tables: Mapping[str, Mapping[tuple[Any, ...], Row]]
    order: list[str]
    completed_after: int
    """The number of events that arrived before the last completion; 0 for none."""
    deltas: list[tuple[str, dict[Any, str | None]]]
    moved: list[str]
    disagreements: list[str]

    @property
    def before_completion(self) -> set[str]:
        """The positions of which only the state that the deltas lead to is compared."""
        return {*self.order[: self.completed_after], COMPLETED, LEFT}


async def uncovered(conn: asyncpg.Connection) -> set[tuple[str, str]]:
    """Return the columns in neither list, and those in the lists that do not exist."""
    found = {(row["table_name"], row["column_name"]) for row in await conn.fetch(SQL_COLUMNS)}
    named = {(table, column) for table, columns in TABLES.items() for column in columns}
    named |= {(table, column) for table, names in COLUMNS_LEFT_OUT.items() for column in names}
    whole = {(table, column) for table, column in found if table in TABLES_LEFT_OUT}
    return (found - whole) ^ named


async def rows_of(dsn: str) -> StoreRows:
    """Read a store."""
    conn = await asyncpg.connect(dsn)
    try:
        async with conn.transaction(isolation="repeatable_read", readonly=True):
            names = await Names.read(conn)
            tables = {table: await _table(conn, names, table) for table in TABLES}
            return StoreRows(
                tables,
                [names.at[position] for position in sorted(names.at) if names.is_event(position)],
                names.completed_after,
                await _deltas(conn, names),
                [row["event_id"] for row in await conn.fetch(SQL_MOVED)],
                await disagreements(conn),
            )
    finally:
        await conn.close()


class Names:
    """The names that the numbers of a store stand for."""

    def __init__(self) -> None:
        self.events: dict[int, str] = {}
        self.rooms: dict[int, str] = {}
        self.principals: dict[int, str] = {}
        self.types: dict[int, str] = {}
        self.keys: dict[int, tuple[str, str]] = {}
        self.groups: dict[int, dict[tuple[str, str], str]] = {}
        self.audiences: dict[tuple[int, int], set[tuple[str, bool]]] = {}
        self.at: dict[int, str] = {}

    @classmethod
    async def read(cls, conn: asyncpg.Connection) -> "Names":
        self = cls()
        for sql in (
            "SELECT event_nid, event_id FROM missing_events",
            "SELECT event_nid, event_id FROM events",
        ):
            self.events.update(map(tuple, await conn.fetch(sql)))
        self.rooms = dict(map(tuple, await conn.fetch("SELECT room_nid, room_id FROM rooms")))
        self.principals = dict(map(tuple, await conn.fetch("SELECT * FROM principals")))
        self.types = dict(map(tuple, await conn.fetch("SELECT * FROM event_types")))
        for nid, type_nid, key in await conn.fetch("SELECT * FROM state_keys"):
            self.keys[nid] = (self.types[type_nid], key)
        for number, key, event in await conn.fetch(SQL_GROUPS):
            self.groups.setdefault(number, {})[self.keys[key]] = self.events[event]
        for room, audience, name, invited in await conn.fetch(SQL_AUDIENCES):
            self.audiences.setdefault((room, audience), set()).add((name, bool(invited)))
        self.at.update(
            await conn.fetch(
                "SELECT stream_ordering, event_id FROM events WHERE stream_ordering IS NOT NULL"
            )
        )
        self.at.update(
            (position, COMPLETED)
            for (position,) in await conn.fetch(
                "SELECT completed_at FROM rooms WHERE completed_at IS NOT NULL"
            )
        )
        return self

    def is_event(self, position: int) -> bool:
        return self.at[position] != COMPLETED

    @property
    def completed_after(self) -> int:
        completed = [position for position in self.at if not self.is_event(position)]
        return sum(map(self.is_event, (one for one in self.at if one < max(completed, default=0))))

    def reader(self, kind: str) -> Callable[[Any, Row], Any]:
        """Return the function that reads a column of this kind."""
        simple: dict[str, Callable[[Any, Row], Any]] = {
            "value": lambda value, _: value,
            "bytes": lambda value, row: decode(value, row["event_id"], self.rooms[row["room_nid"]]),
            "room": lambda value, _: self.rooms[value],
            "event": lambda value, _: self.events.get(value, value),
            "events": lambda value, _: [self.events[one] for one in value],
            "event set": lambda value, _: {self.events[one] for one in value},
            "principal": lambda value, _: self.principals[value],
            "type": lambda value, _: self.types[value],
            "state key": lambda value, _: self.keys[value],
            "state": lambda value, _: self.groups.get(value, {}),
            "position": lambda value, _: self.at.get(value, LEFT),
            "audience": lambda value, row: self.audiences.get((row["room_nid"], value), set()),
        }
        read = simple[kind]
        return lambda value, row: None if value is None else read(value, row)


async def _table(conn: asyncpg.Connection, names: Names, table: str) -> dict[tuple[Any, ...], Row]:
    kinds = TABLES[table]
    readers = {column: names.reader(kind.removeprefix("key ")) for column, kind in kinds.items()}
    keys = [column for column, kind in kinds.items() if kind.startswith("key ")]
    found = {}
    for record in map(
        dict, await conn.fetch(SQL_EVENTS if table == "events" else f"TABLE {table}")
    ):
        record |= {column: record[name] for column, name in COMPUTED.items() if name in record}
        row = {column: read(record[column], record) for column, read in readers.items()}
        found[tuple(row[column] for column in keys)] = row
    if table == "auth_chains":
        for root, event in await conn.fetch(SQL_CHAINS):
            if (names.events[root],) in found:
                chain = found[names.events[root],].setdefault("auth chain", set())
                chain.add(names.events[event])
    return found


async def _deltas(
    conn: asyncpg.Connection, names: Names
) -> list[tuple[str, dict[Any, str | None]]]:
    found: dict[int, dict[Any, str | None]] = {}
    for row in await conn.fetch("SELECT * FROM state_deltas ORDER BY stream_ordering"):
        event = None if row["event_nid"] is None else names.events[row["event_nid"]]
        found.setdefault(row["stream_ordering"], {})[names.keys[row["state_key_nid"]]] = event
    return [(names.at.get(position, LEFT), changes) for position, changes in found.items()]
