"""Censoring: remove redacted content from disk some time after the redaction took effect.

Until then, reads show the redacted form of bytes that are still stored as received. Afterwards
`events.json` holds the canonical JSON of the redacted form, and `events.encoding` says so. The
event id stays valid because the reference hash is that of the redacted form. The signatures stay
valid because they cover only that form. The content hash no longer matches, as for every server
that stores the event redacted. Events whose content hash never matched are censored too, because
readers may only get their redacted form. Columns derived from the content follow the redacted form:
relations, `has_url`, `describes_room`.

Some redacted events keep their bytes, because the engine still needs the content. The auth rules of
some room versions read keys that a redaction removes. These are `m.federate` of a create event,
`invite` and `notifications` of power levels, and the keys of a third-party invite. Other servers
authorised events by these keys. In versions up to 10, a redaction that is redacted itself no longer
names its target. Readers get the redacted form of these events all the same.

The work is done in batches of bounded size, one statement each. The index `events_uncensored_idx`
holds exactly the events that are left to do. After any interruption, run it again. It skips rows
that another session has locked; the next run takes them. Copies of the old bytes remain for a while
in dead rows until vacuum, in the write-ahead log and in backups.

A clock that was or is wrong censors nothing early: a redaction is not older than the events that
arrived before it, and the earlier of the clocks of this process and of Postgres counts.

Source: client-server API, "Redactions". Other servers do the same, mostly after seven days.
"""

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import Dictionary, StoredBytes, decode, encode
from storage.database.connection import Connection, Database
from storage.database.deployment import TOLERANCE_MS, earlier_now_ms
from storage.database.pace import Pace
from storage.database.placeholders import fill, transposed
from storage.errors import InputError, InvalidEvent, StorageCorrupt, UnknownRoom
from storage.event import parse, redact
from storage.event.hashes import canonical
from storage.event.ndjson import describes_room
from storage.event.reading import read_trusted
from storage.event.versions import RoomVersion, version_of
from storage.ids import UserId
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.reencode import end_of_nids
from storage.observability.counters import Counted, Report, silent
from storage.persist.readmit import erase_user
from storage.persist.room_lock import lock_room
from storage.persist.write.streams import writers_dictionary
from storage.streams.invalidate_caches import invalidate_caches, register_writer

logger: logging.Logger = logging.getLogger(__name__)

AS_RECEIVED: Final = 0
"""`events.encoding`: the bytes as received."""
CENSORED: Final = 1
"""The canonical JSON of the redacted form."""

TABLES: Final = ("events", "rooms")
"""The tables in which it finds the events that are due.

With a corrupt index it would censor too early, or leave content on disk.
"""

BATCH: Final = 200  # events read, and written, by one statement: 13 MB at most

SQL_REDACTED: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, age.is_due, CASE
    WHEN age.is_due THEN e.json END AS json
FROM (
    SELECT *
    FROM events
    WHERE encoding = 0 AND (redacted_by IS NOT NULL OR redacted_form) AND event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::bigint
) AS e
CROSS JOIN LATERAL (
    SELECT x.room_id, x.room_version FROM rooms x WHERE x.room_nid = e.room_nid OFFSET 0
) AS r
LEFT JOIN LATERAL (SELECT x.received_ts FROM events x
    WHERE x.event_nid = e.redacted_by OFFSET 0) AS redaction ON true
CROSS JOIN LATERAL (  -- the later arrival counts, of the redaction and of its target
    SELECT CASE WHEN e.redacted_form THEN e.received_ts
        ELSE GREATEST(e.received_ts, redaction.received_ts) END <= $3::bigint AS is_due
) AS age
ORDER BY e.event_nid
"""

SQL_NOT_DUE: Final[LiteralString] = """
SELECT i.event_nid
FROM unnest($1::bigint[]) AS i (event_nid)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = i.event_nid OFFSET 0) AS e
LEFT JOIN LATERAL (SELECT x.stream_ordering FROM events x
    WHERE x.event_nid = e.redacted_by OFFSET 0) AS redaction ON true
CROSS JOIN LATERAL (
    SELECT CASE WHEN e.redacted_form THEN e.stream_ordering
        ELSE GREATEST(e.stream_ordering, redaction.stream_ordering) END AS position
) AS arrival
WHERE EXISTS (
    SELECT
    FROM generate_series(0, 61) AS n
    CROSS JOIN LATERAL (
        SELECT x.received_ts
        FROM events x
        WHERE x.stream_ordering <= arrival.position - (1::bigint << n)
        ORDER BY x.stream_ordering DESC
        LIMIT 1
    ) AS before
    WHERE before.received_ts > $2::bigint + $4::bigint AND before.received_ts <= $3::bigint
)
"""
"""Those of these that arrived after an event that is younger: a clock was wrong.

It looks at some events before each, at growing distances, as few arrived by a wrong clock.
"""

SQL_UNCENSORED: Final[LiteralString] = """
SELECT count(*)
FROM events
WHERE encoding = 0 AND (redacted_by IS NOT NULL OR redacted_form)
"""

SQL_CENSOR: Final[LiteralString] = """
WITH free AS (  -- not censored yet, not locked by a writer, and still redacted
    SELECT event_nid
    FROM events
    WHERE event_nid = ANY($1::bigint[]) AND encoding = 0
        AND (redacted_by IS NOT NULL OR redacted_form)
        -- the whole state may refuse a redaction, and a completion has read the bytes
        AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = events.room_nid)
    ORDER BY event_nid
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE events e
SET json = i.json,
    encoding = 1,
    has_url = i.has_url,
    describes_room = i.describes_room,
    relates_to = NULL,
    rel_type_nid = NULL,
    replaces = NULL
FROM free
JOIN unnest($1::bigint[], $2::bytea[], $3::boolean[], $4::boolean[])
    AS i (event_nid, json, has_url, describes_room) USING (event_nid)
WHERE e.event_nid = free.event_nid
RETURNING e.event_nid
"""


SQL_REMOVE: Final[LiteralString] = """
UPDATE events e
SET json = i.json,
    encoding = 1,
    redacted_form = true,
    has_url = i.has_url,
    describes_room = i.describes_room,
    relates_to = NULL,
    rel_type_nid = NULL,
    replaces = NULL
FROM unnest($1::bigint[], $2::bytea[], $3::boolean[], $4::boolean[])
    AS i (event_nid, json, has_url, describes_room)
WHERE e.event_nid = i.event_nid AND e.encoding = 0
RETURNING e.event_nid
"""


class CensoredEventRow(NamedTuple):
    """An event that readers may only get redacted, with its bytes if it is due."""

    event_nid: int
    event_id: str
    room_id: str
    room_version: str
    is_due: bool
    json: StoredBytes | None


class Deadline(NamedTuple):
    """Redactions received up to ``before_ms`` are due; no event arrived later than ``now_ms``."""

    before_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class Censored:
    """Result for the redacted events that had not been censored.

    ``censored``: censored now (with ``dry_run``: would be). ``left``: bytes still needed, see the
    module docstring. ``busy``: due, but locked by a writer at that moment. ``waiting``: not due
    yet.
    """

    censored: int = 0
    left: int = 0
    busy: int = 0
    waiting: int = 0

    def __add__(self, other: "Censored") -> "Censored":
        return Censored(
            self.censored + other.censored,
            self.left + other.left,
            self.busy + other.busy,
            self.waiting + other.waiting,
        )


async def censor(
    database: Database,
    *,
    older_than_ms: int | None = None,
    dry_run: bool = False,
    batch: int = BATCH,
    now_ms: int | None = None,
    report: Report = silent,
) -> Censored:
    """Censor events redacted longer ago than ``older_than_ms`` (None: `Config.censor_after_ms`).

    Writers and readers may go on. Between batches it pauses for as long as the last one took. At
    the end, one row invalidates the caches of all processes.

    Raise `InputError` where no time is given and censoring is switched off. Raise `StorageCorrupt`
    where an index is corrupt, before any change. Raise `DatabaseError`, or `PermissionRefused` for
    a role that may not change events; batches that are committed stay.
    """
    deadline = await _deadline(database, older_than_ms, now_ms)
    if dry_run:
        counted = await _counted(database, report)
        parts = _batches(database, deadline, batch, counted, dry_run=True)
        return sum([part async for part in parts], Censored())
    await refuse_corrupt_indexes(database, "censoring", TABLES, report=report)
    await register_writer(database)
    counted = await _counted(database, report)
    done = Censored()
    try:
        async for part in _batches(database, deadline, batch, counted, dry_run=False):
            done += part
    finally:  # also after an interruption: the batches before it are committed
        if done.censored:
            async with database.transaction() as conn:
                await invalidate_caches(conn, "events")
    logger.info(
        "censored %s events",
        done.censored,
        extra={"censored": done.censored, "left": done.left, "busy": done.busy},
    )
    return done


async def _counted(database: Database, report: Report) -> Counted:
    """Count the events to look at, by the index of those that are not censored."""
    async with database.connection() as conn:
        total: int = await conn.fetchval(SQL_UNCENSORED)
    return Counted(report, "censor", total, "redacted events")


async def _batches(
    database: Database, deadline: Deadline, batch: int, counted: Counted, *, dry_run: bool
) -> AsyncIterator[Censored]:
    """Yield the result of each batch, in ascending order of nids."""
    async with database.connection() as conn:
        dictionary = await writers_dictionary(conn)
    pace = Pace(0 if dry_run else None)
    after = 0
    rows: list[CensoredEventRow] = []
    while not rows or len(rows) == batch:
        with pace.batch():
            async with database.connection() as conn:
                rows = await _redacted(conn, after, batch, deadline)
                wanted = _censored_forms(rows, dictionary)
                changed = (
                    len(wanted)
                    if dry_run or not wanted
                    else len(await conn.fetchvals(SQL_CENSOR, *transposed(wanted, 4)))
                )
        if not rows:
            return
        due = sum(row.is_due for row in rows)
        yield Censored(changed, due - len(wanted), len(wanted) - changed, len(rows) - due)
        after = rows[-1].event_nid
        counted.add(len(rows))
        await pace.rest()


async def _redacted(
    conn: Connection, after: int, batch: int, deadline: Deadline
) -> list[CensoredEventRow]:
    """Return the next redacted events, with the bytes of those that are due."""
    rows = await conn.fetch(SQL_REDACTED, after, batch, deadline.before_ms, row=CensoredEventRow)
    due = [row.event_nid for row in rows if row.is_due]
    young = set(await conn.fetchvals(SQL_NOT_DUE, due, *deadline, TOLERANCE_MS) if due else ())
    return [
        row._replace(is_due=False, json=None) if row.event_nid in young else row for row in rows
    ]


def _censored_forms(
    rows: Sequence[CensoredEventRow], dictionary: Dictionary | None
) -> list[tuple[int, StoredBytes, bool | None, bool | None]]:
    """Return what `censored_form` returns of the rows that have bytes, without None."""
    return [
        form
        for row in rows
        if row.json is not None and (form := censored_form(row, row.json, dictionary)) is not None
    ]


def censored_form(
    row: CensoredEventRow, stored: StoredBytes, dictionary: Dictionary | None
) -> tuple[int, StoredBytes, bool | None, bool | None] | None:
    """Return (nid, new bytes, has_url, describes_room) of an event.

    Return None if it must stay as it is. It never writes bytes that would be another event.
    """
    version = version_of(row.room_version)
    try:
        raw = decode(stored, row.event_id, row.room_id)
        json = read_trusted(raw, strict=version.strict_canonical_json)
        redacted = redact(json, version)
        if says_less(json, redacted, version):
            return None
        new = canonical(redacted)
        event = parse(new, version)
        if event.event_id != row.event_id:
            return None
    except (InvalidEvent, KeyError, StorageCorrupt):  # `verify` reports it
        return None
    has_url = True if "url" in redacted["content"] else None
    form = encode(new, row.event_id, row.room_id, dictionary)
    return row.event_nid, form, has_url, describes_room(event)


async def keep_redacted_form(
    conn: Connection, forms: Sequence[tuple[int, StoredBytes, bool | None, bool | None]]
) -> int:
    """Replace the bytes of events that nobody has redacted, for good; return their number.

    ``forms``: as `censored_form` returns them. Events that are censored already stay as they are.
    """
    return len(await conn.fetchvals(SQL_REMOVE, *transposed(forms, 4))) if forms else 0


def says_less(json: Mapping[str, Any], redacted: Mapping[str, Any], version: RoomVersion) -> bool:
    """Return whether redaction removes a key that authorises events or names a target."""
    if json["type"] == "m.room.redaction" and not version.redacts_in_content:
        return "redacts" in json
    if "state_key" not in json:
        return False
    return any(
        key in json["content"] and key not in redacted["content"]
        for key in _read_of(json["type"], version)
    )


def _read_of(event_type: str, version: RoomVersion) -> Sequence[str]:
    """Return content keys that the auth rules read and that some version's redaction removes."""
    if event_type == "m.room.power_levels":
        return ("invite", "notifications") if version.limit_notifications_power else ("invite",)
    return READ.get(event_type, ())


READ: Final[Mapping[str, Sequence[str]]] = {
    "m.room.create": ("creator", "m.federate", "room_version", "additional_creators"),
    "m.room.member": ("membership", "third_party_invite", "join_authorised_via_users_server"),
    "m.room.third_party_invite": ("public_key", "public_keys"),
}


async def _deadline(database: Database, older_than_ms: int | None, now_ms: int | None) -> Deadline:
    age_ms = _age(database, older_than_ms)
    if now_ms is None:
        async with database.connection() as conn:
            now_ms = await earlier_now_ms(conn)
    return Deadline(now_ms - age_ms, now_ms)


def _age(database: Database, older_than_ms: int | None) -> int:
    age = database.config.censor_after_ms if older_than_ms is None else older_than_ms
    if age < 0:
        raise InputError(
            "censoring is switched off (STORAGE_CENSOR_AFTER_MS is negative):"
            " give the age of a redaction: --older-than DAYS, older_than_ms in Python"
        )
    return age


# --------------------------------------------------------------------------------------------------
# Remove the content of all that a user sent from the database, for good.
#
# As `storage.maintenance.censor` does for redacted events, the bytes are replaced by the canonical
# JSON of the redacted form. The event id and the signatures stay valid. The content hash does not
# match any more, so `events.redacted_form` is set: only the redacted form is ever shown, and an
# export or a rebuild finds the same. Membership events about the user go, too, because they have a
# display name and an avatar, whoever sent them.
#
# The events are found by reading all rows once, because no index has the sender. Outliers and rooms
# that the user has left are included. Some bytes stay, see the list in
# `storage.maintenance.censor`. Stripped state that came with invites and knocks keeps the redacted
# form of what the user sent, and of membership events about them. The user's account data become
# empty, and messages that wait for their devices are deleted.
#
# Copies remain for a while: in dead rows until vacuum, in the write-ahead log and in backups. Packs
# of the archive have them until the next sweep. A mirror has them until its old versions are
# deleted.

CONTENT_TABLES: Final = ("events", "rooms", "principals", "state_keys")
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

SQL_SENT: Final[LiteralString] = fill("""
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, true AS is_due, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint AND e.encoding = 0
    AND (e.sender_nid = (SELECT principal_nid FROM principals WHERE name = $3::text)
        OR e.state_key_nid = (SELECT state_key_nid FROM state_keys
            WHERE type_nid = {TYPE_MEMBER} AND state_key = $3::text))
ORDER BY e.event_nid
LIMIT $4::bigint
""")

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
    await refuse_corrupt_indexes(database, "removing content", CONTENT_TABLES, report=report)
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
            wanted = _censored_forms(rows, dictionary)
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
