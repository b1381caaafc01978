"""Allocate nids for the names of a load first, in one small transaction per kind.

So no other writer waits for a load because of a shared name.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, LiteralString, NamedTuple, Self
from uuid import uuid4

from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER, InternedNames
from storage.errors import StorageError
from storage.event import Event, relation_of
from storage.ids import server_name_of
from storage.persist.load.lookups import (
    SQL_PRINCIPALS,
    SQL_STATE_KEYS,
    SQL_TYPES,
    NameRow,
    StateKeyRow,
    fill_blocks,
)
from storage.persist.model.caches import NidBlocks
from storage.pipeline.file_systems import below, emptied, io_errors, opened

# --------------------------------------------------------------------------------------------------
# Store bundles of slim events in files; the task that loads their room reads them.
#
# Only the locations of bundles pass through Spark, to be sorted and partitioned. Each task attempt
# writes separate files, so no task reads the files of a failed attempt.
#
# Small rooms have small bundles: a file may have a million. A request for each would take hours on
# an object store. So the writer puts the bundles of a range in the order of `spread_number`, and
# the loading tasks take rooms in this order. The bundles of the next rooms then lie together in
# each range, and `BundleReader.fetch` reads them at once:
#
#   file of a range   a b c d | e f g h | i j k l        one letter: a bundle
#   task 0 reads      a b c d                            one request for each group of rooms
#   task 1 reads                e f g h

FOLDER: Final = "bundles"
OPEN_MAX: Final = 64
SMALL_BYTES_MAX: Final = 64 << 10
"""A larger bundle is read by itself, when it is needed."""

UNWANTED_BYTES_MAX: Final = 64 << 10
"""So many bytes between two bundles are read, rather than to make another request."""

REQUEST_BYTES_MAX: Final = 1 << 20
FETCHED_BYTES_MAX: Final = 16 << 20
"""The small bundles that a reader has in memory, at most."""


class BundleLocation(NamedTuple):
    """The location of a bundle."""

    file: str
    start: int
    length: int


def spread_number(room_id: str) -> int:
    """Return a number below 2^32 that is evenly distributed over rooms; Spark's `crc32`."""
    return zlib.crc32(room_id.encode())


def cleared(work: str) -> None:
    """Empty the folder for the bundles of a new import. Raise `StorageError`."""
    emptied(below(work, FOLDER))


class BundleWriter:
    """Writes bundles into one new file of the folder ``work``.

    A context manager. Raises `StorageError` for every failure, such as a full disk.
    """

    def __init__(self, work: str) -> None:
        self._name = uuid4().hex
        self._work = work
        self._where, self._path = opened(below(work, f"{FOLDER}/{self._name}"))

    def __enter__(self) -> Self:
        with io_errors(self._work, "written to"):
            self._file = self._where.open_output_stream(self._path)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            with io_errors(self._work, "written to"):
                self._file.close()
        except StorageError:
            if kind is None:  # else the first error says more
                raise

    def put(self, bundle: bytes) -> BundleLocation:
        """Append a bundle; readers may read it once the writer is closed."""
        with io_errors(self._work, "written to"):
            location = BundleLocation(self._name, self._file.tell(), len(bundle))
            self._file.write(bundle)
        return location


class BundleReader:
    """Reads bundles of the folder ``work``.

    A context manager that keeps some files open. Raises `StorageError` for a missing or truncated
    bundle. ``requests``: how often it has read from a file.
    """

    def __init__(self, work: str) -> None:
        self.requests = 0
        self._work = work
        self._where, self._path = opened(below(work, FOLDER))
        self._files: dict[str, Any] = {}
        self._fetched: dict[BundleLocation, bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._fetched.clear()

    def fetch(self, locations: Iterable[BundleLocation]) -> None:
        """Read the small ones of these bundles, neighbours at once.

        `get` returns them without a request, until the next call. Those beyond
        `FETCHED_BYTES_MAX` are left out.
        """
        self._fetched.clear()
        left = FETCHED_BYTES_MAX
        for some in neighbours(
            location for location in locations if location.length <= SMALL_BYTES_MAX
        ):
            first = some[0].start
            length = some[-1].start + some[-1].length - first
            left -= length
            if left < 0:
                return
            data = self._read(BundleLocation(some[0].file, first, length))
            for one in some:
                at = one.start - first
                self._fetched[one] = data[at : at + one.length]

    def get(self, location: BundleLocation) -> bytes:
        fetched = self._fetched.get(location)
        return self._read(location) if fetched is None else fetched

    def _read(self, location: BundleLocation) -> bytes:
        with io_errors(self._work, "read"):
            if location.file not in self._files:
                if len(self._files) >= OPEN_MAX:
                    self._close()
                self._files[location.file] = self._where.open_input_file(
                    f"{self._path}/{location.file}"
                )
            self.requests += 1
            data: bytes = self._files[location.file].read_at(location.length, location.start)
            if len(data) != location.length:
                raise OSError(f"{location.file} ends at {location.start + len(data)}")
        return data

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def neighbours(locations: Iterable[BundleLocation]) -> Iterator[list[BundleLocation]]:
    """Yield the bundles of each request, in order of files and positions."""
    some: list[BundleLocation] = []
    for location in sorted(locations):
        if some and not _is_near(some, location):
            yield some
            some = []
        some.append(location)
    if some:
        yield some


def _is_near(some: list[BundleLocation], location: BundleLocation) -> bool:
    first, last = some[0], some[-1]
    return (
        location.file == last.file
        and location.start - last.start - last.length <= UNWANTED_BYTES_MAX
        and location.start + location.length - first.start <= REQUEST_BYTES_MAX
    )


SQL_NEW_PRINCIPALS: Final[LiteralString] = """
INSERT INTO principals (principal_nid, name)
SELECT * FROM unnest($1::int[], $2::text[])
ON CONFLICT (name) DO NOTHING
"""

SQL_NEW_TYPES: Final[LiteralString] = """
INSERT INTO event_types (type_nid, type)
SELECT * FROM unnest($1::int[], $2::text[])
ON CONFLICT (type) DO NOTHING
"""

SQL_NEW_STATE_KEYS: Final[LiteralString] = """
INSERT INTO state_keys (state_key_nid, type_nid, state_key)
SELECT * FROM unnest($1::int[], $2::int[], $3::text[])
ON CONFLICT (type_nid, state_key) DO NOTHING
"""


async def intern(
    conn: Connection,
    blocks: NidBlocks,
    names: InternedNames,
    events: Iterable[Event],
    server_name: str,
) -> None:
    """Load or allocate the nids of the principals, types and state keys of these events.

    ``conn``: in autocommit.
    """
    principals, types = {server_name}, set[str]()
    keys = set[tuple[str, str]]()
    for event in events:
        principals.add(event.sender)
        types.add(event.type)
        if event.state_key is not None:
            keys.add((event.type, event.state_key))
            if event.type == "m.room.member":
                server = server_name_of(event.state_key)
                principals.update((server, event.state_key) if server == server_name else (server,))
        if event.content and (relation := relation_of(event)) is not None:
            types.add(relation.rel_type)
    await _types(conn, blocks, names, sorted(types - names.types.keys()))
    await _principals(
        conn, blocks, names, sorted(name for name in principals - names.principals.keys() if name)
    )
    pairs = {(names.types[type_name], state_key) for type_name, state_key in keys}
    await _state_keys(conn, blocks, names, sorted(pairs - names.state_keys.keys()))


async def missing_members(
    conn: Connection, names: InternedNames, senders: Iterable[str]
) -> list[tuple[int, str]]:
    """Return the member state keys of these senders that have no nid, and cache the others."""
    members = [
        (TYPE_MEMBER, sender) for sender in senders if (TYPE_MEMBER, sender) not in names.state_keys
    ]
    if members:
        await _find_state_keys(conn, names, members)
    return [key for key in members if key not in names.state_keys]


async def _types(
    conn: Connection, blocks: NidBlocks, names: InternedNames, type_names: Sequence[str]
) -> None:
    if not type_names:
        return
    names.learn(types=await conn.fetch(SQL_TYPES, list(type_names), [], row=NameRow))
    new = [name for name in type_names if name not in names.types]
    if new:
        await fill_blocks(conn, blocks, {"type_nids": len(new)})
        await conn.execute(SQL_NEW_TYPES, [blocks.take("type_nids") for _ in new], new)
        names.learn(types=await conn.fetch(SQL_TYPES, new, [], row=NameRow))


async def _principals(
    conn: Connection, blocks: NidBlocks, names: InternedNames, readers: Sequence[str]
) -> None:
    if not readers:
        return
    names.learn(principals=await conn.fetch(SQL_PRINCIPALS, list(readers), row=NameRow))
    new = [name for name in readers if name not in names.principals]
    if new:
        await fill_blocks(conn, blocks, {"principal_nids": len(new)})
        await conn.execute(SQL_NEW_PRINCIPALS, [blocks.take("principal_nids") for _ in new], new)
        names.learn(principals=await conn.fetch(SQL_PRINCIPALS, new, row=NameRow))


async def _state_keys(
    conn: Connection, blocks: NidBlocks, names: InternedNames, pairs: Sequence[tuple[int, str]]
) -> None:
    if not pairs:
        return
    await _find_state_keys(conn, names, pairs)
    new = [key for key in pairs if key not in names.state_keys]
    if new:
        await fill_blocks(conn, blocks, {"state_key_nids": len(new)})
        nids = [blocks.take("state_key_nids") for _ in new]
        await conn.execute(
            SQL_NEW_STATE_KEYS, nids, [key[0] for key in new], [key[1] for key in new]
        )
        await _find_state_keys(conn, names, new)


async def _find_state_keys(
    conn: Connection, names: InternedNames, pairs: Sequence[tuple[int, str]]
) -> None:
    rows = await conn.fetch(
        SQL_STATE_KEYS, [key[0] for key in pairs], [key[1] for key in pairs], row=StateKeyRow
    )
    names.learn(state_keys=(((row.type_nid, row.state_key), row.state_key_nid) for row in rows))
