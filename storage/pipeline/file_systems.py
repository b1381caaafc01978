"""The one file-system layer of the pipeline: local paths, and URLs.

Driver and executors read and write files through pyarrow, never through Hadoop. So a URL works
without JARs, and means the same everywhere. pyarrow knows ``s3://``, ``gs://``, ``abfs://`` and
``hdfs://``; the package fsspec, where it is installed, opens all others. ``s3a://`` is Hadoop's
name for ``s3://``. Credentials and endpoints come from the environment, as those tools read them
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` and so on).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from storage.errors import InputError, StorageError

SAFE: Final = "/:=+,@!$&'()*;~"
"""Characters of names that URLs have as they are, besides letters and digits."""

HADOOP_NAMES: Final = {"s3a": "s3", "s3n": "s3"}
RENAMED_AT_ONCE: Final = 16
"""Files that the driver renames at once: an object store copies them."""


def opened(path: str) -> tuple[Any, str]:
    """Return the file system of a path, and the path in it. Raise `InputError`."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return fs.LocalFileSystem(), path
    url = f"{HADOOP_NAMES.get(scheme, scheme)}://{rest}"
    try:
        return _of_url(url)
    except (ValueError, ImportError, OSError) as error:
        raise InputError(f"{path}: {error}") from None


def _of_url(url: str) -> tuple[Any, str]:
    try:
        where, at = fs.FileSystem.from_uri(url)
    except pa.ArrowInvalid:
        if find_spec("fsspec") is None:
            raise
        import fsspec  # noqa: PLC0415  # of the extra `archive`

        file_system, at = fsspec.core.url_to_fs(url)
        where = fs.PyFileSystem(fs.FSSpecHandler(file_system))
    return where, str(at)


def below(path: str, name: str) -> str:
    """Return the path of a file below a path. The query of a URL, with its options, stays.

    ``name`` is as a file system gives it; in a URL, some of its characters are escaped.
    """
    if "://" not in path:
        return f"{path.rstrip('/')}/{name}"
    base, separator, query = path.partition("?")
    return f"{base.rstrip('/')}/{quote(name, safe=SAFE)}{separator}{query}"


@contextmanager
def io_errors(folder: str, verb: str) -> Iterator[None]:
    """Raise `StorageError` for I/O errors, so that they do not count as bad input."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StorageError(
            f"{folder}, which all executors must reach, cannot be {verb}: {error}"
        ) from error


def emptied(folder: str) -> None:
    """Create a folder, or remove its content. Raise `StorageError`."""
    where, inner = opened(folder)
    with io_errors(folder, "written to"):
        where.create_dir(inner, recursive=True)
        where.delete_dir_contents(inner)


def renamed(folder: str, names: Iterable[tuple[str, str]]) -> None:
    """Rename files below a folder; the pairs are relative to it. Raise `StorageError`."""
    where, inner = opened(folder)

    def move(pair: tuple[str, str]) -> None:
        where.move(f"{inner}/{pair[0]}", f"{inner}/{pair[1]}")

    with io_errors(folder, "written to"), ThreadPoolExecutor(RENAMED_AT_ONCE) as threads:
        for _ in threads.map(move, names):
            pass
