"""Joining defined streams: a process follows every stream of the database, whoever defines it.

A stream that this process defines is entered before its first use. One that another process has
defined is met in `stream_positions`, and is entered, too. So a process that only relays, such as
`room-storage serve`, relays all streams, and each restore leaves a gap in all of them.
"""

from collections.abc import Mapping

from storage.database.connection import Connection, Database
from storage.streams.published_facts import SQL_DEFINED, declaration
from storage.streams.registry import Streams
from storage.streams.startup import enter_defined, new_epoch, positions


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
        if names := sorted({*defined, *streams.wanted} - streams.keys()):
            epoch = new_epoch()

            async def enter(conn: Connection) -> Mapping[str, Mapping[str, int]]:
                return await enter_defined(conn, streams.instance_name, names, epoch=epoch)

            for name, entered in (await database.run(enter)).items():
                streams.add(declaration(name), entered, epoch)
        streams.wanted -= streams.keys()


async def _follow_defined(database: Database, streams: Streams) -> None:
    async with database.connection() as conn:
        found = await positions(conn)
    for name in found.keys() - streams.keys():
        streams.add(declaration(name), found[name], 0)
    streams.keep_up()
    streams.wanted -= streams.keys()
