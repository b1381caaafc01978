"""Repair what all rooms share: sequences, and the stream positions of writers.

Connections of sliding sync with mistaken rows are deleted: their clients begin new ones. Sequences
are set past the values in the tables, and positions up to the facts of each writer. A store that
opens also sets the sequences forward (storage/streams/startup.py). This is for a running store.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.maintenance.expiry import delete_connections
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.verify.graph import (
    SQL_CONNECTIONS,
    SQL_LAGGING_POSITIONS,
    LaggingWriterRow,
    MistakenConnectionRow,
)
from storage.streams.startup import lock_positions, set_sequences_forward

SQL_SET_POSITION: Final[LiteralString] = """
INSERT INTO stream_positions (stream_name, instance_name, stream_id)
VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (stream_name, instance_name)
    DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
"""


async def repair_positions(database: Database, *, indexes_compared: bool = False) -> None:
    """Set sequences and positions forward, in one transaction that blocks writers.

    Delete connections with mistaken rows.

    Facts of an unknown writer stay as they are. ``indexes_compared``: the caller has called
    `refuse_corrupt_indexes`. Raise `StorageCorrupt` if an index is corrupt; nothing has changed
    then.
    """

    async def work(conn: Connection) -> None:
        await lock_positions(conn)
        for row in await conn.fetch(SQL_LAGGING_POSITIONS, row=LaggingWriterRow):
            if row.instance_name is not None:
                await conn.execute(SQL_SET_POSITION, row.stream_name, row.instance_name, row.latest)
        await set_sequences_forward(conn)
        mistaken = await conn.fetch(SQL_CONNECTIONS, row=MistakenConnectionRow)
        await delete_connections(conn, [row.connection_nid for row in mistaken])

    if not indexes_compared:
        await refuse_corrupt_indexes(database, "a repair")
    await database.run(work)
