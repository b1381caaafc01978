"""Store bundles of slim events in files; the task that loads their room reads them.

Only the locations of bundles pass through Spark, to be sorted and partitioned. Each task attempt
writes separate files, so no task reads the files of a failed attempt.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, Self
from uuid import uuid4

from storage.errors import StorageError
from storage.pipeline.file_systems import below, emptied, io_errors, opened

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
