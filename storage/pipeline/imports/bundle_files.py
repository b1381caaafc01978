"""Bundles of slim events in files, beside Spark: they are written once, and read by the task that has their room.

What goes through Spark, to be sorted and dealt out, is where a bundle lies. Each attempt of a task writes files of its own, so what an
attempt left behind that came to nothing is read by nobody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self
from uuid import uuid4

import pyarrow as pa

from storage.errors import StorageError
from storage.pipeline.imports.lines import opened

FOLDER: Final = "bundles"
OPEN_MAX: Final = 64


class BundleLocation(NamedTuple):
    """Where a bundle lies."""

    file: str
    start: int
    length: int


@contextmanager
def _told(work: str, verb: str) -> Iterator[None]:
    """`StorageError`, so that nobody takes it for a fault of what is imported."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StorageError(
            f"{work}, which all executors have to reach, cannot be {verb}: {error}"
        ) from error


def cleared(work: str) -> None:
    """Make room for bundles in this folder; those of an import before go.

    `StorageError`, as below.
    """
    where, path = opened(f"{work}/{FOLDER}")
    with _told(work, "written to"):
        where.create_dir(path, recursive=True)
        where.delete_dir_contents(path)


class BundleWriter:
    """Writes bundles into one new file of the folder ``work``.

    A context manager. `StorageError` for whatever hinders it, a full disk too.
    """

    def __init__(self, work: str) -> None:
        self._name = uuid4().hex
        self._work = work
        self._where, self._path = opened(f"{work}/{FOLDER}/{self._name}")

    def __enter__(self) -> Self:
        with _told(self._work, "written to"):
            self._file = self._where.open_output_stream(self._path)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            with _told(self._work, "written to"):
                self._file.close()
        except StorageError:
            if kind is None:  # else what came first says more
                raise

    def put(self, bundle: bytes) -> BundleLocation:
        """Append one; to be read once the writer is closed."""
        with _told(self._work, "written to"):
            place = BundleLocation(self._name, self._file.tell(), len(bundle))
            self._file.write(bundle)
        return place


class BundleReader:
    """Reads bundles of the folder ``work``.

    Keeps some files open; a context manager. `StorageError` where one is not there, or not whole.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._where, self._path = opened(f"{work}/{FOLDER}")
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def get(self, place: BundleLocation) -> bytes:
        """What was put there."""
        with _told(self._work, "read"):
            if place.file not in self._files:
                if len(self._files) >= OPEN_MAX:
                    self.__exit__()
                self._files[place.file] = self._where.open_input_file(f"{self._path}/{place.file}")
            data: bytes = self._files[place.file].read_at(place.length, place.start)
            if len(data) != place.length:
                raise OSError(f"{place.file} ends at {place.start + len(data)}")
        return data
