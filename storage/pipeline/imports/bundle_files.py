"""Store bundles of slim events in files; the task that loads their room reads them.

Only the locations of bundles pass through Spark, to be sorted and partitioned. Each task attempt
writes separate files, so no task reads the files of a failed attempt.
"""

from typing import Any, Final, NamedTuple, Self
from uuid import uuid4

from storage.errors import StorageError
from storage.pipeline.file_systems import below, emptied, io_errors, opened

FOLDER: Final = "bundles"
OPEN_MAX: Final = 64


class BundleLocation(NamedTuple):
    """The location of a bundle."""

    file: str
    start: int
    length: int


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
            place = BundleLocation(self._name, self._file.tell(), len(bundle))
            self._file.write(bundle)
        return place


class BundleReader:
    """Reads bundles of the folder ``work``.

    A context manager that keeps some files open. Raises `StorageError` for a missing or truncated
    bundle.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._where, self._path = opened(below(work, FOLDER))
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def get(self, place: BundleLocation) -> bytes:
        """Return the bundle at a location."""
        with io_errors(self._work, "read"):
            if place.file not in self._files:
                if len(self._files) >= OPEN_MAX:
                    self.__exit__()
                self._files[place.file] = self._where.open_input_file(f"{self._path}/{place.file}")
            data: bytes = self._files[place.file].read_at(place.length, place.start)
            if len(data) != place.length:
                raise OSError(f"{place.file} ends at {place.start + len(data)}")
        return data
