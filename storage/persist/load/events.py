"""Load events: their rows, their contents, and what waits for one that is missing."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode_recent
from storage.database.columns import Table
from storage.database.connection import Connection
from storage.database.placeholders import LoadedColumns, compose, transposed
from storage.errors import StorageCorrupt
from storage.event import load as load_event
from storage.graph.chains import Chain, ChainPosition
from storage.persist.load.chain_ancestors import (
    ChainPositionRow,
    load_chain_ancestors,
    powers,
    without_content,
)
from storage.persist.load.lookups import EVENT_ROW, NameRow, keep_rows
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import (
    UNSEEN,
    AudienceRow,
    EventRow,
    MissingRow,
    PastRow,
    VisibilityRow,
)
from storage.visibility import multirange

SQL_EVENTS_BY_ID: Final[LiteralString] = compose(
    """
SELECT :event.columns
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
""",
    EVENT_ROW,
).sql

SQL_EVENTS_BY_NID: Final[LiteralString] = compose(
    """
SELECT :event.columns
FROM events
WHERE event_nid = ANY($1::bigint[])
""",
    EVENT_ROW,
).sql

SQL_GAPS: Final[LiteralString] = """
SELECT 'missing' AS kind, event_nid, event_id, room_nid, superseded, child_nids
FROM missing_events
WHERE event_id = ANY($1::text[])
UNION ALL
SELECT 'waiting', redaction_nid, target_event_id, room_nid, NULL, NULL
FROM waiting_redactions
WHERE target_event_id = ANY($1::text[])
"""

SQL_GAP_IDS: Final[LiteralString] = """
SELECT event_id AS name, event_nid AS nid
FROM missing_events
WHERE event_nid = ANY($1::bigint[])
"""

SQL_CONTENT: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, e.encoding, e.redacted_form, e.json, r.room_id, r.room_version
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY($1::bigint[])
"""

SQL_PLACES: Final[LiteralString] = """
SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
FROM auth_chains
WHERE event_nid = ANY($1::bigint[])
"""

SQL_CHAINS: Final[LiteralString] = """
WITH wanted AS MATERIALIZED (SELECT DISTINCT unnest($1::bigint[]) AS chain_nid)
SELECT w.chain_nid, NULL::bigint AS target_chain_nid, max(a.sequence_number) AS number
FROM wanted w
CROSS JOIN LATERAL chain_rows(w.chain_nid, 2147483647) AS a
GROUP BY w.chain_nid
UNION ALL
SELECT w.chain_nid, l.chain_nid_reached, l.upto
FROM wanted w
CROSS JOIN LATERAL reached_from(w.chain_nid, 2147483647) AS l
"""


class AwaitedEventRow(NamedTuple):
    """A gap, or a redaction, that waits for an event."""

    kind: str
    event_nid: int
    event_id: str
    room_nid: int
    superseded: bool | None
    child_nids: list[int] | None


class ContentRow(NamedTuple):
    """The bytes of an event, and how to read them."""

    event_nid: int
    event_id: str
    encoding: int
    redacted_form: bool
    json: StoredBytes
    room_id: str
    room_version: str


class ChainReachRow(NamedTuple):
    """The length of a chain (no target), or how far it reaches into another."""

    chain_nid: int
    target_chain_nid: int | None
    number: int


async def load_event_ids(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    """Load events by id, and what waits for those that are missing."""
    rows = await conn.fetch(SQL_EVENTS_BY_ID, list(keys), row=EventRow)
    gaps = await conn.fetch(SQL_GAPS, list(keys), row=AwaitedEventRow)
    for key in keys:
        change_set.events.rows.setdefault(key, None)
        change_set.events.missing.setdefault(key, None)
        change_set.events.waiting.setdefault(key, ())
    keep_rows(change_set, rows)
    for gap in gaps:
        if gap.kind == "waiting":
            change_set.events.waiting[gap.event_id] = (
                *change_set.events.waiting[gap.event_id],
                gap.event_nid,
            )
        elif (
            gap.event_id not in change_set.events.new_missing
            and gap.event_id not in change_set.events.deleted_missing
        ):
            change_set.events.missing[gap.event_id] = MissingRow(
                *gap[1:4], superseded=bool(gap.superseded), child_nids=tuple(gap.child_nids or ())
            )


async def load_gap_nids(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    """Load the ids of missing events."""
    change_set.events.gap_ids.update(
        (nid, event_id) for event_id, nid in await conn.fetch(SQL_GAP_IDS, list(keys), row=NameRow)
    )


async def load_event_nids(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    rows = await conn.fetch(SQL_EVENTS_BY_NID, list(keys), row=EventRow)
    for key in keys:
        change_set.events.row_ids.setdefault(key, "")
    keep_rows(change_set, rows)


async def load_events(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    for row in await conn.fetch(SQL_CONTENT, list(keys), row=ContentRow):
        raw = decode_recent(row.json, row.event_id, row.room_id)
        change_set.events.parsed[row.event_nid] = load_event(
            raw, row.room_version, row.event_id, redacted=row.redacted_form
        )


async def load_cited(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    """Load the auth events of an event: rows, contents, and the ancestors on their chains."""
    if unknown := [
        key
        for key in keys
        if key not in change_set.events.rows and key not in change_set.caches.rows
    ]:
        await load_event_ids(conn, change_set, unknown)
    rows = [
        row
        for key in keys
        if (row := change_set.events.rows.get(key) or change_set.caches.rows.row(key)) is not None
    ]
    nids = {row.event_nid for row in rows}.union(
        await load_chain_ancestors(conn, change_set, powers(rows), load_event_nids)
    )
    if lacking := without_content(change_set, nids):
        await load_events(conn, change_set, lacking)


async def load_ancestors(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    await load_chain_ancestors(conn, change_set, keys, load_event_nids)
    _check_places(change_set, keys)
    for key in keys:
        change_set.events.row_of(key)


async def load_chain_positions(
    conn: Connection, change_set: ChangeSet, keys: Collection[int]
) -> None:
    for row in await conn.fetch(SQL_PLACES, list(keys), row=ChainPositionRow):
        change_set.auth_graph.places[row.event_nid] = ChainPosition(
            row.chain_nid, row.sequence_number
        )
    _check_places(change_set, keys)


def _check_places(change_set: ChangeSet, keys: Collection[int]) -> None:
    lost = [key for key in keys if key not in change_set.auth_graph.places]
    if lost:
        raise StorageCorrupt("auth events have no place in the chain cover", event_nids=lost)


async def load_chains(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    """Load the lengths and the links of chains."""
    rows = await conn.fetch(SQL_CHAINS, list(keys), row=ChainReachRow)
    for row in rows:
        if row.target_chain_nid is None:
            links = {
                link.target_chain_nid: link.number
                for link in rows
                if link.chain_nid == row.chain_nid and link.target_chain_nid is not None
            }
            change_set.auth_graph.chains[row.chain_nid] = Chain(row.number, links)


# --------------------------------------------------------------------------------------------------
# Load audiences, and the principals that belong to them.

SQL_VISIBILITY: Final[LiteralString] = """
SELECT v.room_nid, v.principal_nid, v.audiences::text AS audiences, v.last_join_topological,
    v.joined_count, v.invited_count,
    COALESCE(v.invited_audiences, '{}')::text AS invited_audiences, v.first_audience
FROM unnest($1::int[], $2::int[]) AS wanted (room_nid, principal_nid)
CROSS JOIN LATERAL (
    SELECT * FROM visibility
    WHERE room_nid = wanted.room_nid AND principal_nid = wanted.principal_nid
    OFFSET 0
) AS v
"""

SQL_PAST: Final[LiteralString] = """
SELECT wanted.room_nid, wanted.principal_nid, p.first_audience, COALESCE((
        SELECT min(o.first_audience)
        FROM past_visibility o
        WHERE o.room_nid = wanted.room_nid AND o.principal_nid = wanted.principal_nid
            AND o.first_audience > p.first_audience
    ), v.first_audience) AS end_audience, p.audiences::text AS audiences,
        COALESCE(p.invited_audiences, '{}')::text AS invited_audiences
FROM unnest($1::int[], $2::int[], $3::bigint[]) AS wanted (room_nid, principal_nid, audience)
CROSS JOIN LATERAL (
    SELECT *
    FROM past_visibility o
    WHERE o.room_nid = wanted.room_nid AND o.principal_nid = wanted.principal_nid
        AND o.first_audience <= wanted.audience
    ORDER BY o.first_audience DESC
    LIMIT 1
) AS p
CROSS JOIN LATERAL (
    SELECT first_audience
    FROM visibility
    WHERE room_nid = wanted.room_nid AND principal_nid = wanted.principal_nid
    OFFSET 0
) AS v
"""

SQL_AUDIENCES: Final[LiteralString] = """
SELECT a.room_nid, a.audience, a.branches, a.continued, a.opened_topological
FROM unnest($1::int[], $2::bigint[]) AS wanted (room_nid, audience)
CROSS JOIN LATERAL (
    SELECT * FROM audiences
    WHERE room_nid = wanted.room_nid AND audience = wanted.audience
    OFFSET 0
) AS a
"""


class LoadedVisibilityRow(NamedTuple):
    """A row of `visibility`."""

    room_nid: int
    principal_nid: int
    audiences: str
    last_join_topological: int | None
    joined_count: int
    invited_count: int
    invited_audiences: str
    first_audience: int | None


class LoadedPastRow(NamedTuple):
    """A row of `past_visibility`, and where the next one begins."""

    room_nid: int
    principal_nid: int
    first_audience: int
    end_audience: int
    audiences: str
    invited_audiences: str


class AudienceNumberRow(NamedTuple):
    """A row of `audiences`."""

    room_nid: int
    audience: int
    branches: int
    continued: bool | None
    opened_topological: int | None


async def load_visibility(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int]]
) -> None:
    for key in keys:
        change_set.visibility.current.setdefault(key, UNSEEN)
    for row in await conn.fetch(
        SQL_VISIBILITY, [key[0] for key in keys], [key[1] for key in keys], row=LoadedVisibilityRow
    ):
        if (row.room_nid, row.principal_nid) not in change_set.visibility.new_visibility:
            change_set.visibility.current[row.room_nid, row.principal_nid] = VisibilityRow(
                multirange.from_text(row.audiences),
                row.last_join_topological,
                row.joined_count,
                row.invited_count,
                multirange.from_text(row.invited_audiences),
                row.first_audience,
            )


async def load_past(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int, int]]
) -> None:
    """Load rows of old audiences.

    Without a row the principal is in none of them: a purge has deleted the row.
    """
    for row in await conn.fetch(SQL_PAST, *transposed(keys, 3), row=LoadedPastRow):
        seen = multirange.from_text(row.audiences), multirange.from_text(row.invited_audiences)
        _keep_past(change_set, row[:2], PastRow(row.first_audience, row.end_audience, *seen))
    for room_nid, principal_nid, _ in keys:
        if not change_set.visibility.past.get((room_nid, principal_nid)):
            end = change_set.visibility.visible(room_nid, principal_nid).first_audience or 0
            _keep_past(
                change_set,
                (room_nid, principal_nid),
                PastRow(0, end, multirange.EMPTY, multirange.EMPTY),
            )


def _keep_past(change_set: ChangeSet, key: tuple[int, int], row: PastRow) -> None:
    """Keep a row of the table, unless the change set has a newer one."""
    change_set.visibility.past.setdefault(key, {}).setdefault(row.first_audience, row)


async def load_audiences(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int]]
) -> None:
    for row in await conn.fetch(
        SQL_AUDIENCES, [key[0] for key in keys], [key[1] for key in keys], row=AudienceNumberRow
    ):
        if (row.room_nid, row.audience) not in change_set.visibility.new_audiences:
            change_set.visibility.audiences[row.room_nid, row.audience] = AudienceRow(
                row.branches, bool(row.continued), row.opened_topological
            )


# --------------------------------------------------------------------------------------------------
# Rows of several tables in one result: how their columns are packed, and unpacked again.
#
# The statements of `storage.persist.load.prefetch` return rows of every kind in the same
# columns. Each kind puts its texts into one array and its numbers into another; flags become 0 and
# 1. The SQL that packs a row and the function that unpacks it follow from the types that
# `storage.database.columns` declares.

PART_COLUMNS: Final[LiteralString] = """
SELECT NULL::text AS kind, NULL::text[] AS texts, NULL::bigint[] AS numbers,
    NULL::bigint[] AS longs_1, NULL::bigint[] AS longs_2,
    NULL::int[] AS ints_1, NULL::int[] AS ints_2, NULL::int[] AS ints_3, NULL::bytea AS data
WHERE false
"""
"""The beginning of a statement: the names and types of the columns, and no row."""


class PackedRow(NamedTuple):
    """A row of any kind."""

    kind: str
    texts: list[Any]
    numbers: list[Any]
    longs_1: list[int] | None
    longs_2: list[int] | None
    ints_1: list[int] | None
    ints_2: list[int] | None
    ints_3: list[int] | None
    data: StoredBytes
    """The bytes of an event; NULL for other kinds."""


ARRAY_FIELDS: Final = PackedRow._fields[3:8]


@dataclass(frozen=True)
class PackedColumns(LoadedColumns):
    """Columns of a table in the form of a `PackedRow`: `:name.packed`, `:name.packed(alias)`."""

    types: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The columns that go into the array of texts."""
        return [name for name in self.columns if self.types[name] in ("text", "int8multirange")]

    @property
    def numbers(self) -> list[str]:
        """The columns that go into the array of numbers."""
        kinds = ("bigint", "int", "smallint", "boolean")
        return [name for name in self.columns if self.types[name] in kinds]

    @property
    def arrays(self) -> dict[str, str]:
        """The columns that are arrays, by the field of `PackedRow` that each has."""
        of_type = {
            "longs": [name for name in self.columns if self.types[name] == "bigint[]"],
            "ints": [name for name in self.columns if self.types[name] == "int[]"],
        }
        return {
            f"{prefix}_{number}": name
            for prefix, names in of_type.items()
            for number, name in enumerate(names, 1)
        }

    @property
    def data(self) -> str | None:
        """The column of bytes, of which there is one at most."""
        return next((name for name in self.columns if self.types[name] == "bytea"), None)

    def text(self, member: str, alias: str) -> str | None:
        """Return what stands for a placeholder."""
        if member != "packed":
            return super().text(member, alias)
        prefix = f"{alias}." if alias else ""
        arrays = [
            prefix + self.arrays[field] if field in self.arrays else "NULL"
            for field in ARRAY_FIELDS
        ]
        lists = [self._list(names, prefix) for names in (self.texts, self.numbers)]
        data = "NULL" if self.data is None else prefix + self.data
        return ", ".join([*lists, *arrays, data])

    def _list(self, names: Sequence[str], prefix: str) -> str:
        casts = {"int8multirange": "::text", "boolean": "::int"}
        values = [f"{prefix}{name}{casts.get(self.types[name], '')}" for name in names]
        return f"ARRAY[{', '.join(values)}]" if values else "NULL"

    def unpacker(self) -> Callable[[PackedRow], list[Any]]:
        """Return the function that takes a row apart: its values in the order of the columns."""
        arrays = [self.arrays.get(field) for field in ARRAY_FIELDS]
        flat = [*self.texts, *self.numbers, *arrays, self.data]
        take = itemgetter(*(flat.index(name) for name in self.columns))
        flags = [at for at, name in enumerate(self.columns) if self.types[name] == "boolean"]

        def unpack(row: PackedRow) -> list[Any]:
            values = list(take((*(row.texts or ()), *(row.numbers or ()), *row[3:])))
            for at in flags:
                values[at] = bool(values[at])
            return values

        return unpack


def packed(name: str, table: Table, columns: Sequence[str]) -> PackedColumns:
    loaded = table.loaded(name, columns)
    return PackedColumns(
        name,
        loaded.columns,
        functions=loaded.functions,
        types={column: table.types[column] for column in columns},
    )
