"""Facts of the stream "caches" about rows that changed after they were stored.

  events         an event whose row changed: redacted, reordered, no longer ineffective
  removed        what a purge has deleted from a room
  cs_cache_fake  a room whose current state changed by more than its new events say

A fact without a key means any room: the end of a purge, of a repair or a rebuild, or censoring.
Each of these raises `rooms.write_version` in its transaction, but for censoring, which changes no
column of a mirror. So the rooms to read again are those whose version is another one.
"""

from dataclasses import dataclass, field
from typing import Final, LiteralString

import orjson

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.positions import CacheBounds
from storage.streams.caches import CURRENT_STATE, REMOVED, Removed
from storage.streams.invalidate_caches import INSTANCE_NAME

SQL_CHANGE_FACTS: Final[LiteralString] = """
SELECT i.cache_name, array_to_json(i.keys)::text AS keys, w.instance_name
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS b (writer_nid, after_id, upto_id)
JOIN writers w ON w.writer_nid = b.writer_nid
JOIN cache_invalidations i ON i.writer_nid = b.writer_nid
    AND i.stream_id > b.after_id AND i.stream_id <= b.upto_id
WHERE i.stream_id > $4::bigint AND i.stream_id <= $5::bigint
    AND i.cache_name IN ('events', 'removed', 'cs_cache_fake')
"""

SQL_ROOM_NIDS: Final[LiteralString] = """
SELECT r.room_nid::bigint AS room_nid
FROM unnest($1::text[]) AS i (room_id)
JOIN rooms r ON r.room_id = i.room_id
"""


@dataclass(slots=True)
class ChangeFacts:
    """The changes between two positions.

    ``event_ids``: events whose rows changed. ``replaced``: rooms with rows that were deleted or
    derived again. ``states``: rooms whose current state changed. ``everywhere``: other rooms have
    changed as well.
    """

    event_ids: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    everywhere: bool = False

    def take(self, cache_name: str, keys: list[str] | None, writer: str) -> None:
        if not keys:
            self.everywhere = True
        elif cache_name == REMOVED:
            self.replaced.add(Removed.of(keys).room_id)
        elif cache_name == CURRENT_STATE:
            (self.replaced if writer == INSTANCE_NAME else self.states).add(keys[0])
        else:
            self.event_ids.add(keys[0])


def change_facts(conn: ArrowConnection, bounds: CacheBounds) -> ChangeFacts:
    found = ChangeFacts()
    if not bounds.writer_nids:
        return found
    for row in conn.rows(SQL_CHANGE_FACTS, *bounds, min(bounds.after), max(bounds.upto)):
        keys = None if row["keys"] is None else orjson.loads(row["keys"])
        found.take(row["cache_name"], keys, row["instance_name"])
    return found


def room_nids(conn: ArrowConnection, room_ids: set[str]) -> set[int]:
    """Return the nids of these rooms, as far as they are stored."""
    if not room_ids:
        return set()
    return {row["room_nid"] for row in conn.rows(SQL_ROOM_NIDS, sorted(room_ids))}
