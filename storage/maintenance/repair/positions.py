"""What all rooms share: sequences are set past what the tables use, positions of writers up to their facts.

A store that opens sets the sequences forward as well (storage/streams/startup.py); this is for a store that goes on.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.maintenance.indexes import prove_indexes
from storage.maintenance.verify.positions import SQL_BEHIND, LaggingWriterRow
from storage.streams.startup import SQL_LOCK, set_sequences_forward

SQL_SET_POSITION: Final[LiteralString] = """
INSERT INTO stream_positions (stream_name, instance_name, stream_id)
VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (stream_name, instance_name)
    DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
"""


async def repair_positions(database: Database, *, indexes_proven: bool = False) -> None:
    """Set sequences and positions forward, in one transaction in which nobody writes.

    What an unknown writer wrote stays as it is.

    ``indexes_proven``: the caller has called `prove_indexes`. `StorageCorrupt` if an index lies:
    then nothing is changed.
    """

    async def work(conn: Connection) -> None:
        await conn.execute(SQL_LOCK)
        for row in await conn.fetch(SQL_BEHIND, row=LaggingWriterRow):
            if row.instance_name is not None:
                await conn.execute(SQL_SET_POSITION, row.stream_name, row.instance_name, row.latest)
        await set_sequences_forward(conn)

    if not indexes_proven:
        await prove_indexes(database, "a repair")
    await database.run(work)
