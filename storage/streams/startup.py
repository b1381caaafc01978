"""Start-up: read streams and writers from the database, and repair sequences before any write.

A writer that starts has nothing in flight, so its position may equal the sequence. A sequence that
is behind its table (a restore lost its value) would return ids twice: it is set forward, with a
line in the log. A sequence behind the positions of its stream is set forward, too, even if the
facts were deleted (a device has received its messages). Readers are past them, and would never see
a smaller id.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.database.migrate import HEAD_REVISION
from storage.database.placeholders import fill
from storage.errors import DatabaseConflict, InstanceNameTaken, InvalidIdentifier
from storage.streams.published_facts import (
    SEQUENCE,
    SQL_DEFINE,
    SQL_DEFINED,
    declaration,
    sequences,
)
from storage.streams.registry import STREAMS, Streams
from storage.streams.restore_detection import (
    LostPositions,
    Mark,
    PreviousState,
    is_noticed,
    lost,
    mark,
    notice,
)

# --------------------------------------------------------------------------------------------------
# The lock under which a writer enters: running writes end, and none begins.
#
# A write that waits for a table lock waits behind every request for it that came earlier. So a
# process that enters while a long transaction writes would stop all other writers until its end. It
# therefore waits for a short time only, and lets the others pass before it tries again.

PAUSE_SECONDS: Final = 0.2
"""Pause between two tries, in which the writes that have queued up can run."""

SQL_LOCK: Final[LiteralString] = """
LOCK TABLE stream_positions IN SHARE ROW EXCLUSIVE MODE
"""

SQL_LOCK_TIMEOUT: Final[LiteralString] = """
SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout'
"""

SQL_SET_LOCK_TIMEOUT: Final[LiteralString] = """
SELECT set_config('lock_timeout', $1::text, true)
"""

SQL_BEGIN_TRY: Final[LiteralString] = "SAVEPOINT lock_positions"
SQL_END_TRY: Final[LiteralString] = "RELEASE SAVEPOINT lock_positions"
SQL_UNDO_TRY: Final[LiteralString] = "ROLLBACK TO SAVEPOINT lock_positions"

LOCK_TRY_MS: Final = 200
"""Longest time for which one try keeps other writers waiting."""


async def lock_positions(conn: Connection) -> None:
    """Lock `stream_positions` until the end of the transaction.

    Raise `DatabaseConflict` if a write has kept it locked for `Config.lock_timeout_ms`, 0 for ever.
    """
    most = int(await conn.fetchval(SQL_LOCK_TIMEOUT))
    deadline = time.monotonic() + most / 1000
    while True:
        left = int((deadline - time.monotonic()) * 1000) if most else LOCK_TRY_MS
        try:
            return await _try(conn, max(1, min(LOCK_TRY_MS, left)), most)
        except DatabaseConflict:
            if most and time.monotonic() + PAUSE_SECONDS >= deadline:
                raise
            await conn.execute(SQL_UNDO_TRY)
            await asyncio.sleep(PAUSE_SECONDS)


async def _try(conn: Connection, wait_ms: int, then_ms: int) -> None:
    """Lock within a time limit; ``then_ms`` is the one of later statements."""
    await conn.execute(SQL_BEGIN_TRY)
    await conn.execute(SQL_SET_LOCK_TIMEOUT, str(wait_ms))
    await conn.execute(SQL_LOCK)
    await conn.execute(SQL_SET_LOCK_TIMEOUT, str(then_ms))
    await conn.execute(SQL_END_TRY)


logger: logging.Logger = logging.getLogger(__name__)

INSTANCE_NAME: Final = re.compile(r"[!-~]{1,40}")
RECHECK_SECONDS: Final = 0.02

SQL_WRITER: Final[LiteralString] = """
INSERT INTO writers (instance_name)
VALUES ($1::text)
ON CONFLICT (instance_name) DO NOTHING
RETURNING writer_nid
"""

SQL_KNOWS: Final[LiteralString] = """
UPDATE writers
SET schema_revision = $2::text
WHERE instance_name = $1::text AND schema_revision <> $2::text
"""

SQL_FIND_WRITER: Final[LiteralString] = """
SELECT writer_nid
FROM writers
WHERE instance_name = $1::text
"""

SQL_LAGGING_SEQUENCES: Final[LiteralString] = fill("""
SELECT s.name, max(s.last) AS last, max(s.used) AS used
FROM (
    SELECT u.name, COALESCE(pg_sequence_last_value(u.name::regclass) + u.step - 1, 0) AS last,
        u.used
    FROM (
        -- a position is at or past each fact of its writer, also where the facts are gone by now;
        -- at 1 nobody has written yet
        SELECT d.sequence_name, 1, p.stream_id
        FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
        JOIN stream_positions p USING (stream_name)
        WHERE p.stream_id > 1
        UNION ALL
        VALUES
            ('events_stream', 1, GREATEST((SELECT max(stream_ordering) FROM events),
                (SELECT max(stream_id) FROM outlier_memberships))),
            ('account_data_stream', 1, (SELECT max(stream_id) FROM account_data)),
            ('to_device_stream', 1, (SELECT max(stream_id) FROM to_device)),
            ('receipts_stream', 1, (SELECT max(stream_id) FROM receipts)),
            ('caches_stream', 1, (SELECT max(stream_id) FROM cache_invalidations)),
            ('published_facts_stream', 1, (SELECT max(f.stream_id)
                FROM defined_streams d
                CROSS JOIN LATERAL (SELECT stream_id FROM published_facts
                    WHERE stream_name = d.stream_name ORDER BY stream_id DESC LIMIT 1) AS f)),
            ('writer_nids', 1, (SELECT max(writer_nid) FROM writers)),
            ('sliding_connection_nids', 1, (SELECT max(connection_nid) FROM sliding_connections)),
            ('event_nids', 1000, GREATEST((SELECT max(event_nid) FROM events),
                (SELECT max(event_nid) FROM missing_events))),
            ('state_group_nids', 1000, (SELECT max(state_group) FROM state_groups)),
            ('state_key_nids', 100, (SELECT max(state_key_nid) FROM state_keys
                WHERE state_key_nid >= {ASSIGNED_FROM})),
            ('principal_nids', 100, (SELECT max(principal_nid) FROM principals
                WHERE principal_nid >= {ASSIGNED_FROM})),
            ('type_nids', 10, (SELECT max(type_nid) FROM event_types
                WHERE type_nid >= {ASSIGNED_FROM})),
            ('room_nids', 10, (SELECT max(room_nid) FROM rooms))
    ) AS u (name, step, used)
) AS s
GROUP BY s.name
HAVING max(s.used) > max(s.last)
ORDER BY s.name
""")

SQL_SET_FORWARD: Final[LiteralString] = """
SELECT setval($1::text::regclass, $2::bigint)
"""

SQL_ENTER: Final[LiteralString] = """
INSERT INTO stream_positions (stream_name, instance_name, stream_id, entered_at, epoch)
SELECT s.stream_name, $1::text, COALESCE(pg_sequence_last_value(s.sequence_name::regclass), 1),
    COALESCE(pg_sequence_last_value(s.sequence_name::regclass), 1), $4::int
FROM unnest($2::text[], $3::text[]) AS s (stream_name, sequence_name)
ON CONFLICT (stream_name, instance_name) DO UPDATE
    SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id), epoch = EXCLUDED.epoch
"""

SQL_HAS_ENTERED: Final[LiteralString] = """
SELECT NOT pg_is_in_recovery()
    AND EXISTS (SELECT FROM writers WHERE instance_name = $1::text)
    AND cardinality($2::text[]) = (
        SELECT count(*)
        FROM stream_positions
        WHERE instance_name = $1::text AND stream_name = ANY($2::text[])
    )
"""

SQL_CONTINUE: Final[LiteralString] = """
WITH own AS (  -- locked in the order in which maintenance locks them
    SELECT p.stream_name, p.instance_name
    FROM stream_positions p
    WHERE p.instance_name = $1::text
    ORDER BY p.stream_name
    FOR UPDATE
)
UPDATE stream_positions p
SET epoch = $4::int,
    stream_id = GREATEST(p.stream_id,
        COALESCE(pg_sequence_last_value(s.sequence_name::regclass), 1))
FROM own
JOIN unnest($2::text[], $3::text[]) AS s (stream_name, sequence_name) USING (stream_name)
WHERE p.stream_name = own.stream_name AND p.instance_name = own.instance_name
"""

SQL_POSITIONS: Final[LiteralString] = """
SELECT stream_name, instance_name, stream_id
FROM stream_positions
"""


SQL_ELDER: Final[LiteralString] = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity a
    WHERE a.datname = current_database()
        AND starts_with(a.application_name, 'room-storage ' || $1::text || ' ')
        AND a.application_name <> current_setting('application_name')
        AND a.backend_start < (
            SELECT min(own.backend_start) FROM pg_stat_activity own
            WHERE own.datname = current_database()
                AND own.application_name = current_setting('application_name')
        )
)
"""

SQL_WRITER_EPOCHS: Final[LiteralString] = """
SELECT stream_name, epoch
FROM stream_positions
WHERE instance_name = $1::text
"""


class WriterEpochRow(NamedTuple):
    """The epoch of a writer in a stream."""

    stream_name: str
    epoch: int


class LaggingSequenceRow(NamedTuple):
    """A sequence that is behind the ids in its table."""

    name: str
    last: int
    used: int


class StartPositionRow(NamedTuple):
    """The position of a writer in a stream."""

    stream_name: str
    instance_name: str
    stream_id: int


def check_name(instance_name: str) -> None:
    """Raise `InvalidIdentifier` for a name that does not fit the wire or a session name."""
    if not INSTANCE_NAME.fullmatch(instance_name):
        raise InvalidIdentifier(
            instance_name, "an instance name has 1 to 40 printable ASCII characters, and no space"
        )


async def be_alone(conn: Connection, instance_name: str, *, wait_ms: int) -> None:
    """Raise `InstanceNameTaken` if another process is live under this name until the timeout.

    A process that has just ended, or was killed, may have left sessions that Postgres ends in a
    moment. The check only prevents mistakes: the epoch protects against a process that it cannot
    see.
    """
    deadline = time.monotonic() + wait_ms / 1000
    while await conn.fetchval(SQL_ELDER, instance_name):
        if time.monotonic() > deadline:
            raise InstanceNameTaken(
                f"another process is at work under the name {instance_name}: "
                "give each an instance_name of its own"
            )
        await asyncio.sleep(RECHECK_SECONDS)


class Entered(NamedTuple):
    """The values that a process reads when it enters.

    They are its writer nid and epochs, the positions of all writers, the lost positions, and the
    mark of the database. ``defined`` are the names of the streams that homeservers have defined.
    """

    writer_nid: int
    writer_epochs: Mapping[str, int]
    positions: Mapping[str, Mapping[str, int]]
    lost: Mapping[str, LostPositions]
    mark: Mark
    defined: Collection[str] = ()


async def entered(
    conn: Connection,
    instance_name: str,
    *,
    previous: PreviousState | None = None,
    defined: Collection[str] = (),
) -> Entered:
    """Enter as `enter`, and read the values that a process needs."""
    writer_nid = await enter(conn, instance_name, previous=previous, defined=defined)
    return Entered(
        writer_nid,
        await writer_epochs(conn, instance_name),
        await positions(conn),
        await lost(conn),
        await mark(conn),
        sorted((await sequences(conn)).keys() - STREAMS.keys()),
    )


async def enter(
    conn: Connection,
    instance_name: str,
    *,
    previous: PreviousState | None = None,
    defined: Collection[str] = (),
) -> int:
    """Register this process as a writer of every stream, at the sequences' positions.

    Return its writer nid. Run it in a transaction.

    ``previous`` is that of a process that enters again, as in
    `storage.streams.restore_detection.notice`. ``defined`` are its streams beside the built-in
    ones.

    A new name waits for running writes, and lets none begin. So
    each write sees every writer that may have taken a smaller id than its own.
    """
    if previous is None and not defined and await _is_continued(conn, instance_name):
        return await _writer_nid(conn, instance_name)
    await lock_positions(conn)
    await conn.execute(SQL_DEFINE, list(defined))
    declared = await sequences(conn)
    await set_sequences_forward(conn)
    await notice(conn, declared.items(), previous=previous)
    await conn.execute(
        SQL_ENTER, instance_name, list(declared), list(declared.values()), new_writer_epoch()
    )
    return await _writer_nid(conn, instance_name)


async def _is_continued(conn: Connection, instance_name: str) -> bool:
    """Begin a new epoch of a writer that has entered all streams before; return whether it has.

    It waits for no other writer: each running write sees this one, which has nothing in flight, and
    is moved like an idle one. If something has to be repaired, it returns False.
    """
    declared = await sequences(conn)
    names, own_sequences = list(declared), list(declared.values())
    if (
        not await conn.fetchval(SQL_HAS_ENTERED, instance_name, names)
        or not await is_noticed(conn)
        or await conn.fetch(SQL_LAGGING_SEQUENCES, names, own_sequences, row=LaggingSequenceRow)
    ):
        return False
    tag = await conn.execute(SQL_CONTINUE, instance_name, names, own_sequences, new_writer_epoch())
    return int(tag.rpartition(" ")[2]) == len(names)


async def _writer_nid(conn: Connection, instance_name: str) -> int:
    writer_nid: int | None = await conn.fetchval(SQL_FIND_WRITER, instance_name)
    if writer_nid is None:
        writer_nid = await conn.fetchval(SQL_WRITER, instance_name)
    await conn.execute(SQL_KNOWS, instance_name, HEAD_REVISION)
    return int(writer_nid or 0)


async def enter_defined(
    conn: Connection, instance_name: str, names: Collection[str], *, writer_epoch: int
) -> Mapping[str, Mapping[str, int]]:
    """Register a process that has entered as a writer of further streams, and define these.

    Return the positions of their writers. Run it in a transaction.
    """
    await lock_positions(conn)
    await conn.execute(SQL_DEFINE, list(names))
    await conn.execute(SQL_ENTER, instance_name, list(names), [SEQUENCE] * len(names), writer_epoch)
    by_stream = await positions(conn)
    return {name: by_stream[name] for name in names}


async def set_sequences_forward(conn: Connection) -> None:
    """Set sequences forward that are behind their tables or their streams' positions.

    Run it under the lock of `enter`.
    """
    declared = await sequences(conn)
    for sequence in await conn.fetch(
        SQL_LAGGING_SEQUENCES, list(declared), list(declared.values()), row=LaggingSequenceRow
    ):
        logger.warning("the sequence %s was at %d, its table uses %d: set forward", *sequence)
        await conn.fetchval(SQL_SET_FORWARD, sequence.name, sequence.used)


def new_writer_epoch() -> int:
    """Return a number that no other process has for the writer it enters as."""
    return secrets.randbelow(2**31 - 1) + 1


async def writer_epochs(conn: Connection, instance_name: str) -> Mapping[str, int]:
    """Return the epoch of a writer in each stream, in the transaction in which it entered."""
    return {
        row.stream_name: row.epoch
        for row in await conn.fetch(SQL_WRITER_EPOCHS, instance_name, row=WriterEpochRow)
    }


async def positions(conn: Connection) -> Mapping[str, Mapping[str, int]]:
    """Return the position of each writer in each stream."""
    by_stream: dict[str, dict[str, int]] = {name: {} for name in STREAMS}
    for row in await conn.fetch(SQL_POSITIONS, row=StartPositionRow):
        by_stream.setdefault(row.stream_name, {})[row.instance_name] = row.stream_id
    return by_stream


# --------------------------------------------------------------------------------------------------
# Joining defined streams: a process follows every stream of the database, whoever defines it.
#
# A stream that this process defines is entered before its first use. One that another process has
# defined is met in `stream_positions`, and is entered, too. So a process that only relays, such as
# `room-storage serve`, relays all streams, and each restore leaves a gap in all of them.


async def join(database: Database, streams: Streams) -> None:
    """Enter the streams that were defined here or elsewhere since this process entered.

    A process that does not write follows those that writers have entered.
    """
    if streams.read_only:
        await _follow_defined(database, streams)
        return
    async with streams.joining:
        async with database.connection() as conn:
            defined = await conn.fetchvals(SQL_DEFINED)
        if names := sorted({*defined, *streams.to_enter} - streams.keys()):
            writer_epoch = new_writer_epoch()

            async def enter(conn: Connection) -> Mapping[str, Mapping[str, int]]:
                return await enter_defined(
                    conn, streams.instance_name, names, writer_epoch=writer_epoch
                )

            for name, entered in (await database.run(enter)).items():
                streams.add(declaration(name), entered, writer_epoch)
        streams.to_enter -= streams.keys()


async def _follow_defined(database: Database, streams: Streams) -> None:
    async with database.connection() as conn:
        by_stream = await positions(conn)
    for name in by_stream.keys() - streams.keys():
        streams.add(declaration(name), by_stream[name], 0)
    streams.keep_up()
    streams.to_enter -= streams.keys()
