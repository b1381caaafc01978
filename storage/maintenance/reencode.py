"""Encode stored events again: those of an earlier dictionary.

It is a background job (`storage.database.background`), run by `room-storage jobs`. It goes through
the events in the order of their nids, which is nearly that of the table. A row is written if its
new form is a tenth shorter at least: less is not worth a dead row. Before it is written, the new
form is decoded and compared with the bytes.

A batch locks the rows that it may change, and skips those that a writer or a purge has locked. It
replaces only what it has read under the lock, so it never undoes the work of a writer or of
`censor`. A skipped row keeps its form, which every reader knows. The next run takes it.

An event whose bytes cannot be decoded is left alone; `verify` reports it.
"""

import logging
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

from zstandard import ZstdError

from storage.codec import (
    Dictionary,
    StoredBytes,
    decode,
    encode,
    headers_of,
    is_plain,
    shipped_dictionary,
    train,
)
from storage.database.background import BatchRow, Job
from storage.database.connection import Connection, Database
from storage.database.placeholders import transposed
from storage.errors import InputError, StorageCorrupt
from storage.observability.counters import Counted, Report, silent
from storage.persist.write.streams import writers_dictionary
from storage.streams.caches import DICTIONARIES
from storage.streams.invalidate_caches import invalidate_caches, register_writer

logger: logging.Logger = logging.getLogger(__name__)

JOB_NAME: Final = "encode events"
WORTH_REENCODING: Final = 0.9
"""A new form is written if it is shorter than this share of the old one."""

SQL_EXPECTED: Final[LiteralString] = """
SELECT count(*)
FROM events
"""

SQL_PART: Final[LiteralString] = """
SELECT count(*)::int AS rows, max(event_nid)::bigint AS place
FROM (
    SELECT event_nid
    FROM events
    WHERE event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::int
) AS part
"""

SQL_OTHER_FORMS: Final[LiteralString] = r"""
SELECT e.event_nid, e.event_id, r.room_id, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint
    AND substring(e.json FOR 4) <> ALL ($3::bytea[])
    AND substring(e.json FOR 1) <> '\xa1'::bytea  -- it stays in the archive
ORDER BY e.event_nid
FOR NO KEY UPDATE OF e SKIP LOCKED
"""

SQL_SET_FORM: Final[LiteralString] = """
UPDATE events e
SET json = i.json
FROM unnest($1::bigint[], $2::bytea[]) AS i (event_nid, json)
WHERE e.event_nid = i.event_nid
"""


class FormedEventRow(NamedTuple):
    """An event in another form than the one that writers use."""

    event_nid: int
    event_id: str
    room_id: str
    json: StoredBytes


Form = tuple[int, StoredBytes]
"""A nid, and the new bytes."""


async def encode_batch(conn: Connection, after: int, rows: int) -> BatchRow:
    """Encode the next events again (`Job.batch`)."""
    part = await conn.fetchrow(SQL_PART, after, rows, row=BatchRow)
    if part is None or part.place is None:
        return part or BatchRow(0, None)
    dictionary = await writers_dictionary(conn)
    found = await conn.fetch(
        SQL_OTHER_FORMS, after, part.place, headers_of(dictionary), row=FormedEventRow
    )
    forms = [form for row in found if (form := _encoded_again(row, dictionary)) is not None]
    if forms:
        await conn.execute(SQL_SET_FORM, *transposed(forms, 2))
    return part


ENCODE_EVENTS: Final = Job(JOB_NAME, batch=encode_batch, expected=SQL_EXPECTED)
"""The job, which `room-storage jobs --re-encode` registers."""


def _encoded_again(row: FormedEventRow, dictionary: Dictionary) -> Form | None:
    """Return the form of an event to write, or None if it stays as it is."""
    try:
        raw = decode(row.json, row.event_id, row.room_id)
    except StorageCorrupt as error:
        logger.warning("%s: its bytes stay as they are, they cannot be decoded", error)
        return None
    new: Any = encode(raw, row.event_id, row.room_id, dictionary)
    old: Any = row.json
    if len(new) > WORTH_REENCODING * len(old):
        return None
    if decode(new, row.event_id, row.room_id) != raw:
        raise StorageCorrupt("an encoded event does not decode to its bytes", event_id=row.event_id)
    return row.event_nid, new


# --------------------------------------------------------------------------------------------------
# A sample of the stored events, decoded.
#
# It is of pages of the table that Postgres chooses at random. So it is spread over time, and over
# rooms as the events are; but of many rooms none has more than `ROOM_SHARE` of it. The cost follows
# from the size of the sample, not of the table.

ROOM_SHARE: Final = 0.1
ROWS_OF_PAGE: Final = 4
"""A quarter of the events in one page of the table: the sample is of more pages than it needs."""
PAGE_BYTES: Final = 8_192

SQL_PAGES: Final[LiteralString] = """
SELECT pg_relation_size('events') / $1::bigint
"""

SQL_SAMPLE: Final[LiteralString] = """
SELECT e.event_id, r.room_id, e.json
FROM events e TABLESAMPLE SYSTEM ($1::real) REPEATABLE ($2::int)
JOIN rooms r USING (room_nid)
ORDER BY e.event_nid
"""


class SampledEventRow(NamedTuple):
    """An event of the sample."""

    event_id: str
    room_id: str
    json: StoredBytes


class SampledEvent(NamedTuple):
    """An event of the sample, decoded, and its stored form."""

    raw: bytes
    event_id: str
    room_id: str
    stored: StoredBytes


async def sample_events(conn: Connection, events: int, seed: int) -> list[SampledEvent]:
    """Return events of pages chosen at random, at most so many, in random order.

    The same ``seed`` chooses the same events of an unchanged table. Events that cannot be decoded
    are left out.
    """
    pages: int = await conn.fetchval(SQL_PAGES, PAGE_BYTES)
    percent = min(100.0, 100 * events / (ROWS_OF_PAGE * max(pages, 1)))
    rows = await conn.fetch(SQL_SAMPLE, percent, seed, row=SampledEventRow)
    random.Random(seed).shuffle(rows)  # noqa: S311  # no secret
    share = max(ROOM_SHARE, 1 / max(len({row.room_id for row in rows}), 1))
    most = max(1, int(share * min(events, len(rows))))
    rooms = Counter[str]()
    found: list[SampledEvent] = []
    for row in rows:
        if rooms[row.room_id] < most and len(found) < events:
            try:
                raw = decode(row.json, row.event_id, row.room_id)
            except StorageCorrupt:  # `verify` reports it
                continue
            rooms[row.room_id] += 1
            found.append(SampledEvent(raw, row.event_id, row.room_id, row.json))
    return found


# --------------------------------------------------------------------------------------------------
# Train a dictionary on events of this deployment, and keep it if it is better.
#
# Half of the rooms of a sample (`storage.maintenance.reencode`) are for training. The events of
# the others are encoded as a writer does, with the present dictionary and with the new one. So a
# dictionary is never compared by the events that it was made of.
#
# The new dictionary is stored if it saves `WORTH` at least. Writers use it from then on, and
# `room-storage jobs --re-encode` encodes older events with it.

EVENTS: Final = 20_000
EVENTS_MIN: Final = 200
WORTH: Final = 0.02
"""A dictionary is stored if it saves this share of the bytes."""

SQL_STORE: Final[LiteralString] = """
WITH added AS (
    INSERT INTO dictionaries (dictionary_id, events, trained_ts, data)
    VALUES ($1::int, $2::int, $3::bigint, $4::bytea)
    ON CONFLICT (dictionary_id) DO NOTHING
    RETURNING dictionary_id
)
SELECT EXISTS (SELECT FROM added)
    OR EXISTS (SELECT FROM dictionaries WHERE dictionary_id = $1::int AND data = $4::bytea)
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result: both dictionaries, and the bytes of an average event with each.

    ``received_bytes``: of such an event as it was received. ``is_better``: the new dictionary saves
    enough to be stored; ``is_stored``: it is stored.
    """

    events: int
    compared: int
    received_bytes: float
    present_id: int
    present_bytes: float
    trained_id: int
    trained_bytes: float
    is_better: bool
    is_stored: bool


async def train_dictionary(
    database: Database,
    *,
    events: int = EVENTS,
    dry_run: bool = False,
    seed: int | None = None,
    report: Report = silent,
) -> Trained:
    """Train a dictionary on about so many events, half of them; store it if it is better.

    Writers and readers may go on. ``dry_run`` stores nothing. The same ``seed`` chooses the same
    events. Raise `InputError` if there are too few.
    """
    if events < EVENTS_MIN:
        raise InputError(f"a dictionary is trained on {EVENTS_MIN} events at least, not {events}")
    seed = random.randrange(2**31) if seed is None else seed  # noqa: S311  # no secret
    async with database.connection() as conn:
        sample = await sample_events(conn, events, seed)
        present = await writers_dictionary(conn)
    training, compared = _halves(sample, seed)
    if len(training) < EVENTS_MIN // 2 or not compared:
        raise InputError(f"a dictionary needs more events: the sample has {len(sample)}")
    counted = Counted(report, "train", 2 * len(compared), "events")
    trained = _trained(training)
    sizes = [_encoded_bytes(compared, one, counted) for one in (present, trained)]
    is_better = sizes[1] <= (1 - WORTH) * sizes[0]
    is_stored = is_better and not dry_run
    if is_stored:
        await store_dictionary(database, trained, len(training))
    mean = [round(size / len(compared), 1) for size in sizes]
    received = round(sum(len(one.raw) for one in compared) / len(compared), 1)
    return Trained(
        *(len(training), len(compared), received, present.id, mean[0], trained.id, mean[1]),
        is_better=is_better,
        is_stored=is_stored,
    )


def _halves(sample: list[SampledEvent], seed: int) -> tuple[list[SampledEvent], list[SampledEvent]]:
    """Return the events of half of the rooms, and the others; of one room the halves."""
    rooms = sorted({one.room_id for one in sample})
    random.Random(seed).shuffle(rooms)  # noqa: S311  # no secret
    if len(rooms) == 1:
        return sample[::2], sample[1::2]
    first = set(rooms[::2])
    return (
        [one for one in sample if one.room_id in first],
        [one for one in sample if one.room_id not in first],
    )


def _trained(events: list[SampledEvent]) -> Dictionary:
    try:
        return Dictionary(train((one.raw, one.room_id) for one in events))
    except ZstdError as error:
        raise InputError(
            f"these events are too few or too much alike to train on: {error}"
        ) from error


def _encoded_bytes(events: list[SampledEvent], dictionary: Dictionary, counted: Counted) -> int:
    sizes = 0
    for one in events:
        form: Any = encode(one.raw, one.event_id, one.room_id, dictionary)
        sizes += len(form)
    counted.add(len(events))
    return sizes


async def store_dictionary(database: Database, dictionary: Dictionary, events: int) -> None:
    """Store it, and publish it to the writers of all processes. None uses it before the commit."""
    shipped = shipped_dictionary()
    await register_writer(database)
    async with database.transaction() as conn:
        now_ms, id_ = time.time_ns() // 1_000_000, dictionary.id
        is_stored = await conn.fetchval(SQL_STORE, id_, events, now_ms, dictionary.data)
        if not is_stored or (id_ == shipped.id and dictionary.data != shipped.data):
            raise InputError("another dictionary has this number by chance: train again")
        await invalidate_caches(conn, DICTIONARIES)


# --------------------------------------------------------------------------------------------------
# The bytes that stored forms of events take, and that encoding would save: by a sample.

STORED_FORM_EVENTS: Final = 2_000
SEED: Final = 1
"""The same events each time, as long as the table is the same."""


class StoredForms(NamedTuple):
    """The bytes of an average event of the sample, of so many events.

    ``received_bytes``: as received; ``stored_bytes``: as stored now; ``encoded_bytes``: as a writer
    encodes it today. ``plain_events``: stored as the bytes themselves.
    """

    events: int
    plain_events: int
    received_bytes: float
    stored_bytes: float
    encoded_bytes: float

    @property
    def saving(self) -> float:
        """Return the bytes of an event that encoding all events again would save."""
        return max(round(self.stored_bytes - self.encoded_bytes, 1), 0.0)


async def stored_forms(conn: Connection) -> StoredForms:
    """Measure a sample."""
    sample = await sample_events(conn, STORED_FORM_EVENTS, SEED)
    dictionary = await writers_dictionary(conn)
    sizes = [0, 0, 0]
    for one in sample:
        stored: Any = one.stored
        new: Any = encode(*one[:3], dictionary)
        for at, form in enumerate((one.raw, stored, min(stored, new, key=len))):
            sizes[at] += len(form)
    count = max(len(sample), 1)
    means = [round(size / count, 1) for size in sizes]
    return StoredForms(len(sample), sum(is_plain(one.stored) for one in sample), *means)


# --------------------------------------------------------------------------------------------------
# Ranges of so many events, for jobs that read all of them: by their numbers, or by arrival.
#
# The numbers have gaps of any length: a restore skips 2^30 stream positions and more. So a job goes
# from row to row, never from number to number.

SQL_END_OF_NIDS: Final[LiteralString] = """
SELECT max(e.event_nid)
FROM (
    SELECT event_nid
    FROM events
    WHERE event_nid > $1::bigint AND event_nid <= $2::bigint
    ORDER BY event_nid
    LIMIT $3::int
) AS e
"""

SQL_END_OF_POSITIONS: Final[LiteralString] = """
SELECT max(e.stream_ordering)
FROM (
    SELECT stream_ordering
    FROM events
    WHERE stream_ordering > $1::bigint AND stream_ordering <= $2::bigint
    ORDER BY stream_ordering
    LIMIT $3::int
) AS e
"""


async def end_of_nids(conn: Connection, after: int, last: int, count: int) -> int | None:
    """Return the nid of the ``count``-th event after a nid, or of the last one up to ``last``.

    None: there is no further event.
    """
    found: int | None = await conn.fetchval(SQL_END_OF_NIDS, after, last, count)
    return found


async def end_of_positions(conn: Connection, after: int, last: int, count: int) -> int | None:
    """Return the same for stream positions, of live and of backfilled events."""
    found: int | None = await conn.fetchval(SQL_END_OF_POSITIONS, after, last, count)
    return found
