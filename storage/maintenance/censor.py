"""Censoring: some time after a redaction took effect, the content that it took away leaves the disk, too.

Until then reads show the redacted form of bytes that are still as received. Afterwards `events.json` holds the canonical JSON of the redacted
form, and `events.encoding` says so. The event keeps its id, as the reference hash is that of the redacted form, and its signatures, which cover
nothing else. The content hash fits no more, as everywhere else where the event is held redacted. Events whose content hash never fitted are
censored, too: nobody may be shown more than their redacted form. What the bytes say beside the form follows them: relations, `has_url`.

What is left as it is: a redacted event without which something could no longer be told. The auth rules of some room versions read what a
redaction takes away (`m.federate` of a create event, `invite` and `notifications` of power levels, the keys of a third-party invite), and so do
other servers, who judged by it; in versions up to 10 a redaction that is redacted itself no longer names its target. Readers get the redacted
form of these all the same.

Done in batches of bounded size, each a statement of its own. The table says what is left to do (the index `events_uncensored_idx` has just
that), so whatever interrupts it, it is simply run again. A row that somebody else has locked is passed over, and left for the next time.
Copies of the old bytes stay for a while where Postgres keeps such: in dead rows until vacuum, in the write-ahead log, in backups.

Source: client-server API, "Redactions"; the servers in the field do the same, mostly after seven days.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.array_text import transposed
from storage.database.connection import Database
from storage.errors import InputError, InvalidEvent
from storage.event import parse, redact
from storage.event.hashes import canonical
from storage.event.reading import read_trusted
from storage.event.versions import RoomVersion, version_of
from storage.maintenance.indexes import prove_indexes
from storage.maintenance.invalidate_caches import invalidate_caches, register_writer

logger = logging.getLogger(__name__)

AS_RECEIVED: Final = 0
"""`events.encoding`: the bytes as received."""
CENSORED: Final = 1
"""The canonical JSON of the redacted form."""

TABLES: Final = ("events", "rooms")
"""Where it looks up what is due: by an index that lies it would censor too early, or leave on disk what is to go."""

BATCH: Final = 200  # events read, and written, by one statement: 13 MB at the very most

SQL_REDACTED: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_version, age.is_due, CASE
    WHEN age.is_due THEN e.json END AS json
FROM (
    SELECT *
    FROM events
    WHERE encoding = 0 AND (redacted_by IS NOT NULL OR redacted_form) AND event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::bigint
) AS e
CROSS JOIN LATERAL (SELECT x.room_version FROM rooms x WHERE x.room_nid = e.room_nid OFFSET 0) AS r
LEFT JOIN LATERAL (SELECT x.received_ts FROM events x
    WHERE x.event_nid = e.redacted_by OFFSET 0) AS redaction ON true
CROSS JOIN LATERAL (  -- of both the redaction and its target, whichever came later
    SELECT CASE WHEN e.redacted_form THEN e.received_ts
        ELSE GREATEST(e.received_ts, redaction.received_ts) END <= $3::bigint AS is_due
) AS age
ORDER BY e.event_nid
"""

SQL_CENSOR: Final[LiteralString] = """
WITH free AS (  -- neither done nor in the hands of a writer, and redacted still
    SELECT event_nid
    FROM events
    WHERE event_nid = ANY($1::bigint[]) AND encoding = 0
        AND (redacted_by IS NOT NULL OR redacted_form)
    ORDER BY event_nid
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE events e
SET json = i.json,
    encoding = 1,
    has_url = i.has_url,
    relates_to = NULL,
    rel_type_nid = NULL,
    replaces = NULL
FROM free
JOIN unnest($1::bigint[], $2::bytea[], $3::boolean[]) AS i (event_nid, json, has_url)
    USING (event_nid)
WHERE e.event_nid = free.event_nid
RETURNING e.event_nid
"""


class CensoredEventRow(NamedTuple):
    """An event that may be shown redacted only, with its bytes if it is due."""

    event_nid: int
    event_id: str
    room_version: str
    is_due: bool
    json: bytes | None


@dataclass(frozen=True, slots=True)
class Censored:
    """What became of the redacted events that had not been censored.

    ``censored``: done now (with ``dry_run``, to be done). ``left``: still needed as they are, see
    above. ``busy``: due, but locked by a writer just then. ``waiting``: their time has not come.
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
) -> Censored:
    """Censor what was redacted longer ago than ``older_than_ms`` (None: `Config.censor_after_ms`).

    Writers and readers may go on.

    One row tells the caches of all processes, at the end. Between batches it rests for as long as
    the last one took. `InputError` where no time is given and censoring is switched off;
    `StorageCorrupt` where an index lies, before anything is changed; `DatabaseError`,
    `PermissionRefused` for a role that may not change events: what is done stays done.
    """
    before_ms = _now(now_ms) - _age(database, older_than_ms)
    if dry_run:
        return sum(
            [part async for part in _batches(database, before_ms, batch, dry_run=True)], Censored()
        )
    await prove_indexes(database, "censoring", TABLES)
    await register_writer(database)
    done = Censored()
    async for part in _batches(database, before_ms, batch, dry_run=False):
        done += part
    if done.censored:
        async with database.transaction() as conn:
            await invalidate_caches(conn, "events")
    logger.info(
        "censored %s events",
        done.censored,
        extra={"censored": done.censored, "left": done.left, "busy": done.busy},
    )
    return done


async def _batches(
    database: Database, before_ms: int, batch: int, *, dry_run: bool
) -> AsyncIterator[Censored]:
    """What became of each batch, in ascending order of the events' numbers."""
    after = 0
    rows: list[CensoredEventRow] = []
    while not rows or len(rows) == batch:
        began = time.monotonic()
        async with database.connection() as conn:
            rows = await conn.fetch(SQL_REDACTED, after, batch, before_ms, row=CensoredEventRow)
            if not rows:
                return
            wanted = [
                one
                for row in rows
                if row.json is not None and (one := _censored(row, row.json)) is not None
            ]
            changed = (
                len(wanted)
                if dry_run or not wanted
                else len(await conn.fetchvals(SQL_CENSOR, *transposed(wanted, 3)))
            )
        due = sum(row.is_due for row in rows)
        yield Censored(changed, due - len(wanted), len(wanted) - changed, len(rows) - due)
        after = rows[-1].event_nid
        await asyncio.sleep(0 if dry_run else time.monotonic() - began)


def _censored(row: CensoredEventRow, raw: bytes) -> tuple[int, bytes, bool | None] | None:
    """(number, new bytes, has_url) of an event; None where it has to stay as it is.

    Bytes that would be another event are never written.
    """
    version = version_of(row.room_version)
    try:
        json = read_trusted(raw, strict=version.strict_canonical_json)
        redacted = redact(json, version)
        if says_less(json, redacted, version):
            return None
        new = canonical(redacted)
        if parse(new, version).event_id != row.event_id:
            return None
    except (InvalidEvent, KeyError):  # verification tells of it
        return None
    return row.event_nid, new, True if "url" in redacted["content"] else None


def says_less(json: Mapping[str, Any], redacted: Mapping[str, Any], version: RoomVersion) -> bool:
    """Whether the redacted form of an event lacks something that is read to judge events, or to apply a redaction."""
    if json["type"] == "m.room.redaction" and not version.redacts_in_content:
        return "redacts" in json
    if "state_key" not in json:
        return False
    return any(
        key in json["content"] and key not in redacted["content"]
        for key in _read_of(json["type"], version)
    )


def _read_of(event_type: str, version: RoomVersion) -> Sequence[str]:
    """Keys of the content of a state event that the auth rules read, and that some version's redaction takes away."""
    if event_type == "m.room.power_levels":
        return ("invite", "notifications") if version.limit_notifications_power else ("invite",)
    return READ.get(event_type, ())


READ: Final[Mapping[str, Sequence[str]]] = {
    "m.room.create": ("creator", "m.federate", "room_version", "additional_creators"),
    "m.room.member": ("membership", "third_party_invite", "join_authorised_via_users_server"),
    "m.room.third_party_invite": ("public_key", "public_keys"),
}


def _now(now_ms: int | None) -> int:
    return time.time_ns() // 1_000_000 if now_ms is None else now_ms


def _age(database: Database, older_than_ms: int | None) -> int:
    age = database.config.censor_after_ms if older_than_ms is None else older_than_ms
    if age < 0:
        raise InputError(
            "censoring is switched off (STORAGE_CENSOR_AFTER_MS is negative): say how old a redaction must be"
        )
    return age
