"""Cursors: how far a consumer of the homeserver has processed a stream, by name.

A consumer such as the sender to other servers reads from its cursor, does its work, and then sets
the cursor. A crash in between repeats the work, and never skips any. A cursor is stored in the
database of the events, so a restored backup has the cursor of its own state.
"""

from typing import Final, LiteralString

from storage import arguments as args
from storage.database.connection import Connection, Database
from storage.errors import InputError
from storage.streams.reads import Reads

NAME_BYTES_MAX: Final = 255

SQL_GET: Final[LiteralString] = """
SELECT position
FROM cursors
WHERE name = $1::text
"""

SQL_SET: Final[LiteralString] = """
INSERT INTO cursors (name, position)
VALUES ($1::text, $2::bigint)
ON CONFLICT (name) DO UPDATE
    SET position = CASE
        WHEN $3::boolean THEN EXCLUDED.position
        ELSE GREATEST(cursors.position, EXCLUDED.position)
    END
RETURNING position
"""


class Cursors:
    """The cursors of the database (``store.cursors``)."""

    def __init__(self, database: Database, reads: Reads) -> None:
        self._database = database
        self._reads = reads

    async def get(self, name: str) -> int:
        """Return the position of a cursor; 0 for one that was never set. `InputError`."""
        cursor = _name(name)
        return int(await self._reads.of_primary(lambda conn: conn.fetchval(SQL_GET, cursor)) or 0)

    async def set(self, name: str, position: int, *, rewind: bool = False) -> int:
        """Store the position of a cursor, and return the position that it has then.

        A smaller position than the stored one changes nothing, so a late call cannot undo a newer
        one. With ``rewind`` it is stored. `InputError`.
        """
        arguments = _name(name), args.position(position, "position"), args.flag(rewind, "rewind")

        async def write(conn: Connection) -> int:
            return int(await conn.fetchval(SQL_SET, *arguments))

        return await self._database.run(write)


def _name(name: str) -> str:
    """Return it; raise `InputError` for a name that is empty or too long."""
    if not 1 <= len(args.text(name).encode()) <= NAME_BYTES_MAX:
        raise InputError(f"the name of a cursor has 1 to {NAME_BYTES_MAX} bytes, not {name[:99]!r}")
    return name
