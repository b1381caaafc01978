"""A database with the Synapse tables that an import reads, and generated rooms in them."""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg

from storage.testing import GeneratedEvent
from tests.conftest import _fresh_database

TABLES = """
CREATE TABLE rooms (
    room_id text PRIMARY KEY, is_public boolean, creator text, room_version text,
    has_auth_chain_index boolean
);
CREATE TABLE events (
    topological_ordering bigint NOT NULL, event_id text NOT NULL UNIQUE, type text NOT NULL,
    room_id text NOT NULL, content text, unrecognized_keys text, processed boolean NOT NULL,
    outlier boolean NOT NULL, depth bigint DEFAULT 0 NOT NULL, origin_server_ts bigint,
    received_ts bigint, sender text, contains_url boolean, instance_name text,
    stream_ordering bigint UNIQUE, state_key text, rejection_reason text
);
CREATE TABLE event_json (
    event_id text NOT NULL UNIQUE, room_id text NOT NULL, internal_metadata text NOT NULL,
    json text NOT NULL, format_version int
);
CREATE TABLE event_edges (
    event_id text NOT NULL, prev_event_id text NOT NULL, room_id text,
    is_state boolean DEFAULT false NOT NULL
);
CREATE TABLE rejections (
    event_id text NOT NULL UNIQUE, reason text NOT NULL, last_check text NOT NULL
);
CREATE TABLE redactions (
    event_id text NOT NULL UNIQUE, redacts text NOT NULL,
    have_censored boolean DEFAULT false NOT NULL, received_ts bigint
);
CREATE TABLE event_to_state_groups (event_id text NOT NULL UNIQUE, state_group bigint NOT NULL);
CREATE TABLE state_group_edges (state_group bigint NOT NULL, prev_state_group bigint NOT NULL);
CREATE TABLE state_groups_state (
    state_group bigint NOT NULL, room_id text NOT NULL, type text NOT NULL,
    state_key text NOT NULL, event_id text NOT NULL
);
CREATE TABLE ex_outlier_stream (
    event_stream_ordering bigint PRIMARY KEY, event_id text NOT NULL, state_group bigint NOT NULL,
    instance_name text
);
"""


@asynccontextmanager
async def synapse_database(
    server_dsn: str, worker_id: str
) -> AsyncIterator[tuple[str, asyncpg.Connection]]:
    """Its DSN, and a connection."""
    async with _fresh_database(server_dsn, "template1", worker_id) as dsn:
        connection = await asyncpg.connect(dsn)
        await connection.execute(TABLES)
        try:
            yield dsn, connection
        finally:
            await connection.close()


async def persist(
    connection: asyncpg.Connection,
    events: Iterable[GeneratedEvent],
    first: int = 1,
    *,
    step: int = 1,
) -> int:
    """The events at stream orderings from ``first`` on; the next one.

    With ``step`` -1 they are history.
    """
    at = first
    for event in events:
        pdu = json.loads(event.pdu)
        prev = [one if isinstance(one, str) else one[0] for one in pdu["prev_events"]]
        await connection.execute(
            "INSERT INTO rooms VALUES ($1, false, '', $2) ON CONFLICT DO NOTHING",
            event.room_id,
            event.room_version,
        )
        values = (
            event.event_id,
            pdu["type"],
            event.room_id,
            event.origin == "outlier",
            pdu["depth"],
            at,
            pdu.get("state_key"),
        )
        await connection.execute(
            "INSERT INTO events (topological_ordering, event_id, type, room_id, processed, "
            "outlier, depth, stream_ordering, state_key)"
            " VALUES ($5, $1, $2, $3, true, $4, $5, $6, $7)",
            *values,
        )
        await connection.execute(
            "INSERT INTO event_json VALUES ($1, $2, '{}', $3, 3)",
            event.event_id,
            event.room_id,
            event.pdu.decode(),
        )
        edges = [(event.event_id, one, event.room_id) for one in prev]
        await connection.executemany("INSERT INTO event_edges VALUES ($1, $2, $3)", edges)
        if event.state_before is not None:
            await _state_group(connection, event, at, pdu)
        at += step
    return at


async def _state_group(
    connection: asyncpg.Connection, event: GeneratedEvent, at: int, pdu: dict[str, object]
) -> None:
    """Store the state after the event.

    Its group has half of the state, and a value for the event's own key, on top of a group with the
    rest.
    """
    group = abs(at) * 10
    rows = await connection.fetch(
        "SELECT event_id, type, state_key FROM events WHERE event_id = ANY($1)",
        list(event.state_before or ()),
    )
    entries = [
        (group + index % 2, event.room_id, row["type"], row["state_key"], row["event_id"])
        for index, row in enumerate(rows)
    ]
    if "state_key" in pdu:
        entries.append((group + 2, event.room_id, pdu["type"], pdu["state_key"], event.event_id))
    await connection.executemany(
        "INSERT INTO state_groups_state VALUES ($1, $2, $3, $4, $5)", entries
    )
    await connection.executemany(
        "INSERT INTO state_group_edges VALUES ($1, $2)",
        [(group + 1, group), (group + 2, group + 1)],
    )
    await connection.execute(
        "INSERT INTO event_to_state_groups VALUES ($1, $2)", event.event_id, group + 2
    )
