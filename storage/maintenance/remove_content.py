"""Remove the content of all that a user sent from the database, for good.

As `storage.maintenance.censor` does for redacted events, the bytes are replaced by the canonical
JSON of the redacted form. The event id and the signatures stay valid. The content hash does not
match any more, so `events.redacted_form` is set: only the redacted form is ever shown, and an
export or a rebuild finds the same. Membership events about the user go, too, because they have a
display name and an avatar, whoever sent them.

The events are found by reading all rows once, because no index has the sender. Outliers and rooms
that the user has left are included. Some bytes stay, see the list in
`storage.maintenance.censor`. Stripped state that came with invites and knocks keeps the redacted
form of what the user sent, and of membership events about them. The user's account data become
empty, and messages that wait for their devices are deleted.

Copies remain for a while: in dead rows until vacuum, in the write-ahead log and in backups. Packs
of the archive have them until the next sweep. A mirror has them until its old versions are deleted.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.connection import Connection, Database
from storage.errors import UnknownRoom
from storage.event import redact
from storage.event.versions import version_of
from storage.ids import UserId
from storage.maintenance.censor import CensoredEventRow, censored_form, keep_redacted_form
from storage.maintenance.event_ranges import end_of_nids
from storage.maintenance.indexes import prove_indexes
from storage.observability.progress import Counted, Report, silent
from storage.persist.room_lock import lock_room
from storage.persist.user_erasure import erase_user
from storage.persist.write.stored_form import writers_dictionary
from storage.streams.invalidate_caches import invalidate_caches, register_writer

logger: logging.Logger = logging.getLogger(__name__)

TABLES: Final = ("events", "rooms", "principals", "state_keys")
"""The tables in which it finds the events: a corrupt index would leave content on disk."""

SQL_IS_ERASED: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM erased_users u
    JOIN principals p USING (principal_nid)
    WHERE p.name = $1::text
)
"""

SQL_LAST_EVENT: Final[LiteralString] = """
SELECT COALESCE(max(event_nid), 0)
FROM events
"""

SQL_SENT: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, true AS is_due, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint AND e.encoding = 0
    AND (e.sender_nid = (SELECT principal_nid FROM principals WHERE name = $3::text)
        OR e.state_key_nid = (SELECT state_key_nid FROM state_keys
            WHERE type_nid = 2 AND state_key = $3::text))
ORDER BY e.event_nid
LIMIT $4::bigint
"""

SQL_EMPTY_ACCOUNT: Final[LiteralString] = """
UPDATE account_data
SET content = '{}'
WHERE principal_nid = (SELECT principal_nid FROM principals WHERE name = $1::text)
    AND content <> '{}'
"""

SQL_DROP_MESSAGES: Final[LiteralString] = """
DELETE FROM to_device
WHERE principal_nid = (SELECT principal_nid FROM principals WHERE name = $1::text)
"""

SQL_STRIPPED_STATES: Final[LiteralString] = """
SELECT o.room_nid, o.principal_nid, r.room_id, r.room_version, o.stripped_state
FROM out_of_band_memberships o
JOIN rooms r USING (room_nid)
WHERE strpos(o.stripped_state, $1::text) > 0
"""

SQL_REPLACE_STRIPPED_STATE: Final[LiteralString] = """
UPDATE out_of_band_memberships
SET stripped_state = $4::text
WHERE room_nid = $1::int AND principal_nid = $2::int AND stripped_state = $3::text
"""

BATCH: Final = 200
RANGE: Final = 100_000
"""Events that a statement goes through."""


@dataclass(frozen=True, slots=True)
class RemovedContent:
    """The result: events without content now, and those whose content is still needed.

    ``account_data`` and ``to_device``: rows that were emptied and deleted. ``stripped_states``:
    those of invites and knocks that had content of the user.
    """

    removed: int = 0
    left: int = 0
    account_data: int = 0
    to_device: int = 0
    stripped_states: int = 0


class StrippedStateRow(NamedTuple):
    """Stripped state that names the user, and whose membership it came with."""

    room_nid: int
    principal_nid: int
    room_id: str
    room_version: str
    stripped_state: str


@dataclass(slots=True)
class ChangedRooms:
    """The counts so far, and the rooms with such events."""

    removed: int = 0
    left: int = 0
    room_ids: set[str] = field(default_factory=set)


async def remove_content(
    database: Database, user_id: UserId, *, report: Report = silent
) -> RemovedContent:
    """Erase a user, and remove the content of their events; run it again after an interruption.

    Writers and readers may go on. Raise `StorageCorrupt` where an index is corrupt, before any
    change. Raise `DatabaseError`, or `PermissionRefused` for a role that may not change events;
    batches that are committed stay.
    """
    await prove_indexes(database, "removing content", TABLES, report=report)
    await register_writer(database)
    async with database.connection() as conn:
        # the role for maintenance may not erase, only a writer
        if not await conn.fetchval(SQL_IS_ERASED, user_id):
            await erase_user(conn, user_id, time.time_ns() // 1_000_000)
        account, messages = [
            _count(await conn.execute(sql, user_id))
            for sql in (SQL_EMPTY_ACCOUNT, SQL_DROP_MESSAGES)
        ]
        stripped = await _stripped_states(conn, user_id)
    changed = ChangedRooms()
    changed.room_ids.update(stripped)
    try:
        await _events(database, user_id, changed, report)
    finally:  # also after an interruption: the batches before it are committed
        await _publish(database, changed.room_ids)
    done = RemovedContent(changed.removed, changed.left, account, messages, len(stripped))
    logger.info("removed the content of a user", extra={"removed": done.removed, "left": done.left})
    return done


async def _stripped_states(conn: Connection, user_id: UserId) -> list[str]:
    """Redact the user's events in stripped state; return the room of each that has changed."""
    named = orjson.dumps(user_id).decode()
    changed = []
    for row in await conn.fetch(SQL_STRIPPED_STATES, named, row=StrippedStateRow):
        version = version_of(row.room_version)
        events: list[dict[str, Any]] = orjson.loads(row.stripped_state)
        kept = orjson.dumps(
            [redact(one, version) if _is_of(one, user_id) else one for one in events]
        ).decode()
        if orjson.loads(kept) != events and _count(
            await conn.execute(
                SQL_REPLACE_STRIPPED_STATE,
                row.room_nid,
                row.principal_nid,
                row.stripped_state,
                kept,
            )
        ):
            changed.append(row.room_id)
    return changed


def _is_of(event: dict[str, Any], user_id: UserId) -> bool:
    """Return whether the user sent an event, or it is their membership."""
    is_theirs = event["type"] == "m.room.member" and event["state_key"] == user_id
    return is_theirs or bool(event["sender"] == user_id)


async def _events(
    database: Database, user_id: UserId, changed: ChangedRooms, report: Report
) -> None:
    async with database.connection() as conn:
        dictionary = await writers_dictionary(conn)
        last: int = await conn.fetchval(SQL_LAST_EVENT)
    counted = Counted(report, "forget", last, "event numbers")
    after = 0
    while after < last:
        async with database.connection() as conn:
            upto = await end_of_nids(conn, after, last, RANGE) or last
            rows = await conn.fetch(SQL_SENT, after, upto, user_id, BATCH, row=CensoredEventRow)
            wanted = [
                one
                for row in rows
                if row.json is not None
                and (one := censored_form(row, row.json, dictionary)) is not None
            ]
            changed.removed += await keep_redacted_form(conn, wanted)
        changed.left += len(rows) - len(wanted)
        changed.room_ids.update(row.room_id for row in rows)
        before, after = after, rows[-1].event_nid if len(rows) == BATCH else upto
        counted.add(after - before)


async def _publish(database: Database, room_ids: set[str]) -> None:
    """Raise the versions of these rooms, so that a mirror compares them, and empty the caches."""
    for room_id in sorted(room_ids):
        with suppress(UnknownRoom):  # purged meanwhile
            await database.run(partial(lock_room, room_id=room_id))
    if room_ids:
        async with database.transaction() as conn:
            await invalidate_caches(conn, "events")


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])
