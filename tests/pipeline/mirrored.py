"""What a mirror must have, read from the store in the simplest way, and what it has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg
import canonicaljson
import orjson
from deltalake import DeltaTable

import storage.event
from storage.codec import decode

SQL_EVENTS = """
    SELECT COALESCE(e.arrival_ordering, e.stream_ordering) AS arrived, e.event_nid, e.room_nid,
        e.event_id, r.room_id, r.room_version, t.type, k.state_key, p.name AS sender,
        CASE WHEN e.backfilled THEN 'backfill' ELSE 'live' END AS origin, e.stream_ordering,
        e.topological_ordering, COALESCE(e.depth, e.topological_ordering) AS depth,
        cardinality(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS prev_count,
        e.origin_server_ts, e.received_ts, e.audience, e.soft_failed, e.refused, e.rejected,
        e.redacted_by IS NOT NULL AS redacted,
        (SELECT x.event_id FROM events x WHERE x.event_nid = e.redacted_by) AS redacted_by,
        e.sender_nid IN (SELECT principal_nid FROM erased_users) AS erased,
        e.redacted_form, e.json,
        (timestamptz 'epoch' AT TIME ZONE 'UTC' + e.received_ts * interval '1 ms')::date AS day
    FROM events e
    JOIN rooms r USING (room_nid)
    JOIN event_types t USING (type_nid)
    JOIN principals p ON p.principal_nid = e.sender_nid
    LEFT JOIN state_keys k USING (state_key_nid)
    WHERE NOT e.outlier"""
SQL_OTHERS = {
    "state_changes": """
        SELECT d.room_nid, r.room_id, d.stream_ordering, t.type, k.state_key,
            (SELECT event_id FROM events e WHERE e.event_nid = d.event_nid) AS event_id,
            (SELECT event_id FROM events e WHERE e.event_nid = d.prev_event_nid) AS prev_event_id
        FROM state_deltas d
        JOIN rooms r USING (room_nid)
        JOIN state_keys k USING (state_key_nid)
        JOIN event_types t USING (type_nid)""",
    "memberships": """
        SELECT c.room_nid, r.room_id, k.state_key AS user_id, c.membership, e.event_id
        FROM current_state c
        JOIN rooms r USING (room_nid)
        JOIN state_keys k USING (state_key_nid)
        JOIN events e USING (event_nid)
        WHERE k.type_nid = 2
        UNION ALL
        SELECT m.room_nid, r.room_id, p.name, m.membership, e.event_id
        FROM memberships m
        JOIN rooms r USING (room_nid)
        JOIN principals p USING (principal_nid)
        JOIN events e USING (event_nid)
        WHERE e.outlier AND NOT EXISTS (
            SELECT FROM current_state c JOIN state_keys k USING (state_key_nid)
            WHERE c.room_nid = m.room_nid AND k.type_nid = 2 AND k.state_key = p.name)""",
    "visibility": """
        SELECT v.room_nid, r.room_id, p.name AS principal, lower(s.span) AS first_audience,
            upper(s.span) AS end_audience, v.last_join_topological
        FROM whole_visibility v
        JOIN rooms r USING (room_nid)
        JOIN principals p USING (principal_nid)
        CROSS JOIN unnest(v.audiences) AS s (span)""",
    "rooms": """
        SELECT room_nid, room_id, room_version, joined_count, invited_count,
            cardinality(forward_extremities) AS forward_extremities, last_stream_ordering,
            max_topological_ordering, is_partial, write_version, removals
        FROM rooms""",
}
MEMBERSHIP = ("other", "ban", "leave", "knock", "invite", "join")
Rows = set[tuple[tuple[str, Any], ...]]


async def differences(
    dsn: str, folder: Path, archived: Mapping[str, bytes] | None = None
) -> dict[str, tuple[Rows, Rows]]:
    """Both anti-joins of each table that differs: rows of the store alone, and of the mirror.

    ``archived``: the bytes of events, where the table has references to an archive.
    """
    connection = await asyncpg.connect(dsn)
    try:
        stored = {
            "events": {
                _event(dict(row), archived or {}) for row in await connection.fetch(SQL_EVENTS)
            }
        }
        for name, sql in SQL_OTHERS.items():
            stored[name] = {_other(dict(row)) for row in await connection.fetch(sql)}
    finally:
        await connection.close()
    found = {}
    for name, rows in stored.items():
        listed = _mirrored(folder, name)
        assert len(listed) == len(set(listed)), f"{name} has a row twice"
        if rows != set(listed):
            found[name] = (rows - set(listed), set(listed) - rows)
    return found


def _mirrored(folder: Path, name: str) -> list[tuple[tuple[str, Any], ...]]:
    table = DeltaTable(folder / name).to_pyarrow_table()
    if name == "events":
        table = table.drop_columns(["digest"])
    return [tuple(sorted(row.items())) for row in table.to_pylist()]


def _event(row: dict[str, Any], archived: Mapping[str, bytes]) -> tuple[tuple[str, Any], ...]:
    stored = row.pop("json")
    raw = archived.get(row["event_id"]) or decode(stored, row["event_id"], row["room_id"])
    if row.pop("redacted_form") or row["redacted"] or row["erased"]:
        kept = storage.event.redact(orjson.loads(raw), row["room_version"])
        raw = canonicaljson.encode_canonical_json(kept)
    return tuple(sorted({**row, "pdu": raw}.items()))


def _other(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    if "membership" in row:
        row["membership"] = MEMBERSHIP[row["membership"]]
    return tuple(sorted(row.items()))


def versions(folder: Path) -> dict[str, int]:
    """The last commit of each table."""
    return {one.name: DeltaTable(one).version() for one in sorted(folder.iterdir())}
