"""Following the positions of all writers through the database, which is what there is where no replication connects them.

Now and then each process looks at `stream_positions`: where another writer has moved, it reads that writer's facts between and
passes them on. And it moves the positions of those who write nothing, so that they hold no reader back: its own in streams in
which it has nothing in flight, and those of writers whose process is gone and has left no session behind. All ids that a sequence
has given so far are another's then, or came to nothing. The sequence is read before anything is looked at, so whoever begins to
write in between takes an id above.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import DatabaseError
from storage.streams.feed import Fact, whole_ids
from storage.streams.registry import STREAMS, Streams

logger = logging.getLogger(__name__)

FACTS_AT_ONCE: Final = 1_000
EVERYTHING: Final = (1 << 63) - 1

SQL_SEQUENCES: Final[LiteralString] = """
SELECT s.stream_name, COALESCE(pg_sequence_last_value(s.sequence_name::regclass), 1) AS stream_id
FROM unnest($1::text[], $2::text[]) AS s (stream_name, sequence_name)
"""

SQL_MOVE_IDLE: Final[LiteralString] = """
UPDATE stream_positions p
SET stream_id = s.stream_id
FROM unnest($2::text[], $3::bigint[], $4::int[]) AS s (stream_name, stream_id, idle_epoch)
WHERE p.stream_name = s.stream_name AND p.stream_id < s.stream_id
    AND (
        (p.instance_name = $1::text AND p.epoch = s.idle_epoch)
        OR NOT EXISTS (
            SELECT FROM pg_stat_activity a
                WHERE a.datname = current_database()
                    AND is_session_of(a.application_name, p.instance_name)
        )
    )
"""

SQL_POSITIONS: Final[LiteralString] = """
SELECT stream_name, instance_name, stream_id, entered_at
FROM stream_positions
"""


class LastIdRow(NamedTuple):
    """The last id that the sequence of a stream has given."""

    stream_name: str
    stream_id: int


class FollowedPositionRow(NamedTuple):
    """How far a writer is in a stream, and where it began."""

    stream_name: str
    instance_name: str
    stream_id: int
    entered_at: int


async def follow(
    database: Database,
    streams: Streams,
    *,
    every_ms: int,
    told_of: Collection[str] = STREAMS.keys(),
) -> None:
    """Do so until cancelled. A database that does not answer is asked again the next time.

    ``told_of``: streams whose facts are read; of the others the positions alone.
    """
    while True:
        await asyncio.sleep(every_ms / 1000)
        try:
            await follow_once(database, streams, told_of)
        except DatabaseError as error:
            logger.warning("the positions of the streams could not be followed: %s", error)


async def follow_once(
    database: Database, streams: Streams, told_of: Collection[str] = STREAMS.keys()
) -> None:
    """Move those who are idle, and catch up with the others; find out what became of own writes whose answers were lost."""
    for settle in list(streams.unsettled):
        await settle()
    async with database.connection() as conn:
        await _move_idle(conn, streams)
        found = await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow)
        _meet(streams, found)
        for row in found:
            if row.stream_name not in streams:
                continue
            if row.stream_name in told_of and row.instance_name != streams.instance_name:
                await _catch_up(conn, streams, row)
            else:
                _move(streams, row)


async def learn_writers(
    database: Database, streams: Streams, stream_name: str, writers: int
) -> None:
    """Make the writers known that a stream has besides those that this process knows; ``writers`` is how many there are.

    To be called after a write and before its position is told: a write sees every writer that may have taken a smaller id, as
    nobody becomes one while a write is under way (`storage.streams.startup`). So the linear position never passes one unknown.
    """
    if writers <= len(streams[stream_name].positions()):
        return
    async with database.connection() as conn:
        _meet(streams, await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow))


async def missed_facts(
    conn: Connection, streams: Streams, names: Sequence[str]
) -> dict[str, tuple[int, list[Fact]]]:
    """What this process committed and was never told of: by stream its position in the table, and its facts up to there.

    Makes all writers known, so that the positions may be told.
    """
    found = await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow)
    _meet(streams, found)
    missed: dict[str, tuple[int, list[Fact]]] = {}
    for row in found:
        if row.stream_name in names and row.instance_name == streams.instance_name:
            stream = streams[row.stream_name]
            known = stream.positions()[row.instance_name]
            facts = await stream.declaration.read(
                conn, known, row.stream_id, row.instance_name, EVERYTHING
            )
            missed[row.stream_name] = row.stream_id, facts
    return missed


def _meet(streams: Streams, found: Iterable[FollowedPositionRow]) -> None:
    """Take in the writers that are new, before anything moves on past what they may have in flight."""
    for row in found:
        if (
            row.stream_name in streams
            and row.instance_name not in streams[row.stream_name].positions()
        ):
            streams.meet(row.stream_name, row.instance_name, row.entered_at)


async def _move_idle(conn: Connection, streams: Streams) -> None:
    names = list(STREAMS)
    given = await conn.fetch(
        SQL_SEQUENCES, names, [STREAMS[name].sequence for name in names], row=LastIdRow
    )
    behind = [
        row
        for row in given
        if any(at < row.stream_id for at in streams[row.stream_name].positions().values())
    ]
    if behind:
        idle = [
            None if streams.is_writing(row.stream_name) else streams.epochs.get(row.stream_name, 0)
            for row in behind
        ]
        names, numbers = [row.stream_name for row in behind], [row.stream_id for row in behind]
        await conn.execute(SQL_MOVE_IDLE, streams.instance_name, names, numbers, idle)


async def _catch_up(conn: Connection, streams: Streams, row: FollowedPositionRow) -> None:
    """Pass on the facts of another writer up to where the table says it is."""
    stream = streams[row.stream_name]
    known = stream.positions().get(row.instance_name, 0)
    limit = FACTS_AT_ONCE
    while known < row.stream_id:
        page = await stream.declaration.read(conn, known, row.stream_id, row.instance_name, limit)
        whole = whole_ids(page, limit)
        if whole is None:
            whole, known = page, row.stream_id
        elif whole:
            known = whole[-1].stream_id
        else:
            limit *= 2
            continue
        streams.advance(row.stream_name, row.instance_name, known, whole, local=False)


def _move(streams: Streams, row: FollowedPositionRow) -> None:
    """To where the table says that a writer is, whatever it wrote."""
    own = row.instance_name == streams.instance_name
    if not (own and streams.is_writing(row.stream_name)):
        streams.advance(row.stream_name, row.instance_name, row.stream_id, (), local=own)
