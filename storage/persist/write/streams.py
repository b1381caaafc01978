"""The parts of the write for streams: facts of the stream "caches", and positions."""

from collections.abc import Sequence
from typing import Final, LiteralString

import orjson

from storage.database.columns import CACHE_INVALIDATIONS
from storage.database.placeholders import ColumnValues, InputValue
from storage.persist.write.invalidations import Invalidation
from storage.streams.in_flight import Author

NEW_INVALIDATION: Final = CACHE_INVALIDATIONS.rows(
    "new_invalidation", ("cache_name",), keys_json="text"
)
AUTHOR_INPUTS: Final = (
    InputValue("writer_nid", "smallint"),
    InputValue("instance_name", "text"),
    InputValue("epoch", "int"),
    InputValue("received_ts", "bigint"),
)

PART_STREAMS: Final[LiteralString] = """
new_invalidation AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), :received_ts, :writer_nid, i.cache_name,
        ARRAY(SELECT jsonb_array_elements_text(i.keys_json::jsonb))
    FROM :new_invalidation.rows AS i
    RETURNING stream_id
),
latest AS (  -- the positions this write takes, per stream
    SELECT CASE WHEN backfilled THEN 'backfill' ELSE 'events' END AS stream_name,
        max(stream_ordering) AS stream_id
    FROM positioned
    GROUP BY 1
    UNION ALL
    SELECT 'events', max(stream_id) FROM out_of_band HAVING count(*) > 0
    UNION ALL
    SELECT 'caches', max(stream_id) FROM new_invalidation HAVING count(*) > 0
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
        "epoch": author.epoch,
        "received_ts": received_ts,
    }


def invalidation_values(invalidated: Sequence[Invalidation]) -> dict[str, ColumnValues]:
    """Return the facts of the stream "caches"."""
    return {
        "new_invalidation": {
            "cache_name": [one.cache_name for one in invalidated],
            "keys_json": [orjson.dumps(one.keys).decode() for one in invalidated],
        }
    }
