"""The parts of the write for streams: facts of the stream "caches", and positions."""

from collections.abc import Sequence
from typing import Final, LiteralString

import orjson

from storage.codec import Dictionary, StoredBytes, encode, remember, shipped_dictionary
from storage.database.columns import CACHE_INVALIDATIONS, LOCAL_TRANSACTIONS
from storage.database.connection import Connection
from storage.database.dictionaries import newest_dictionary
from storage.database.placeholders import ColumnValues, InputValue, by_column
from storage.persist.model.cache_view import TransactionRow
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.write.dependencies import Invalidation
from storage.streams.stream_writer import Author

NEW_INVALIDATION: Final = CACHE_INVALIDATIONS.rows(
    "new_invalidation", ("cache_name",), keys_json="text"
)
AUTHOR_INPUTS: Final = (
    InputValue("writer_nid", "smallint"),
    InputValue("instance_name", "text"),
    InputValue("epoch", "int"),
    InputValue("received_ts", "bigint"),
)

PART_INVALIDATIONS: Final[LiteralString] = """
new_invalidation AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), :received_ts, :writer_nid, i.cache_name,
        ARRAY(SELECT jsonb_array_elements_text(i.keys_json::jsonb))
    FROM :new_invalidation.rows AS i
    RETURNING stream_id
),
"""

TEMPLATE_POSITIONS: Final[LiteralString] = """
latest AS (  -- the positions this write takes, per stream
    SELECT CASE WHEN backfilled THEN 'backfill' ELSE 'events' END AS stream_name,
        max(stream_ordering) AS stream_id
    FROM positioned
    GROUP BY 1
    {others}
),
set_position AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id)
    SELECT stream_name, :instance_name, max(stream_id) FROM latest GROUP BY 1
    ON CONFLICT (stream_name, instance_name)
        DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
    WHERE stream_positions.epoch = :epoch
    RETURNING stream_name
)"""


def author_values(author: Author, received_ts: int) -> dict[str, object]:
    """Return who writes, and when."""
    return {
        "writer_nid": author.writer_nid,
        "instance_name": author.instance_name,
        "epoch": author.writer_epoch,
        "received_ts": received_ts,
    }


def invalidation_values(invalidated: Sequence[Invalidation]) -> dict[str, ColumnValues]:
    """Return the facts of the stream "caches"."""
    return {
        "new_invalidation": {
            "cache_name": [invalidation.cache_name for invalidation in invalidated],
            "keys_json": [orjson.dumps(invalidation.keys).decode() for invalidation in invalidated],
        }
    }


# --------------------------------------------------------------------------------------------------
# The form in which new events are written.
#
# A writer encodes with the dictionary that was trained last, or with the shipped one. It looks it
# up before its first write. A new one is published in the stream "caches" (`DICTIONARIES`), and the
# next write looks it up.


async def learn_dictionary(conn: Connection, caches: WriterCaches) -> None:
    """Look up the dictionary, unless it is known."""
    if not caches.knows_dictionary:
        caches.dictionary = await writers_dictionary(conn)
        caches.knows_dictionary = True


async def writers_dictionary(conn: Connection) -> Dictionary:
    return await newest_dictionary(conn) or shipped_dictionary()


def new_bytes(change_set: ChangeSet) -> Sequence[StoredBytes]:
    """Return the column `json` of the new events, which this process need not decode."""
    dictionary, events = change_set.caches.dictionary, change_set.events
    column = []
    for nid, new in events.new_events.items():
        event_id, room_id = new.row.event_id, events.parsed[nid].room_id
        stored = encode(new.raw, event_id, room_id, dictionary)
        remember(stored, event_id, room_id, new.raw)
        column.append(stored)
    return column


# --------------------------------------------------------------------------------------------------
# The part of the write that stores the transactions of local users with their events.

NEW_TRANSACTION: Final = LOCAL_TRANSACTIONS.rows(
    "new_transaction", LOCAL_TRANSACTIONS.but("sent_ts")
)

PART_TRANSACTIONS: Final[LiteralString] = """
new_transaction AS (  -- refused by the primary key if another process has stored the request
    INSERT INTO local_transactions (:new_transaction.columns, sent_ts)
    SELECT :new_transaction.values, :received_ts
    FROM :new_transaction.rows AS i
),
"""


def transaction_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    return {"new_transaction": by_column(TransactionRow._fields, change_set.transactions.new)}
