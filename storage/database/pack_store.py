"""Packs of the archive as files: in a local folder, or in a store that fsspec knows by its URL.

    read_ranges([("s3://bucket/rooms/pack-7-a1b2c3d4", 8, 282)])

The functions block; call them in a thread. A file is written once as a whole, and nobody can see a
part of it. Credentials are those that fsspec finds on its own.

Two errors differ: a file that is missing, or too short, is lost (`LostRange`, FileNotFoundError). A
store that cannot be reached, or is full, is `ArchiveUnavailable`: try again later.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from storage.errors import ArchiveUnavailable, ExtraMissing, InputError

PREFIX: Final = "pack-"
OWNER_FILE: Final = "room-storage-owner"
"""The file of a folder that names the database to which its packs belong."""
PART: Final = ".part"
"""The end of the name of a local file that is being written."""

TAIL_BYTES: Final = 1 << 16


class ByteRange(NamedTuple):
    """Bytes of a file, from ``start`` to before ``end``."""

    url: str
    start: int
    end: int


class LostRange(NamedTuple):
    """Bytes that are not there."""

    reason: str


def pack_url(folder: str, pack: int) -> str:
    """Return the URL of a new pack: its number, and a part that no other one has."""
    return f"{folder.rstrip('/')}/{PREFIX}{pack}-{secrets.token_hex(4)}"


def checked_folder(folder: str) -> str:
    """Return the URL of a folder; a local path becomes absolute.

    Raise `InputError`, or `ArchiveUnavailable` for a local folder that is not there.
    """
    if not folder:
        raise InputError("give the folder of the archive: --to URL, or STORAGE_ARCHIVE_URL")
    local = local_path(folder)
    if local is None:
        _remote(folder)
        return folder
    _expect_folder(local.absolute())
    return local.absolute().as_uri()


def local_path(url: str) -> Path | None:
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes | LostRange]:
    """Return the bytes of each range, in order; many of one store are read at once.

    Raise `ArchiveUnavailable`, or `ExtraMissing` for a store that needs fsspec.
    """
    found = dict[ByteRange, bytes | LostRange]()
    for url, group in groupby(sorted(set(ranges)), key=lambda one: one.url):
        wanted = list(group)
        path = local_path(url)
        parts = _remote_ranges(url, wanted) if path is None else _local_ranges(url, path, wanted)
        found.update(zip(wanted, parts, strict=True))
    return [found[one] for one in ranges]


def read_file(url: str) -> bytes:
    """Return a whole file. Raise FileNotFoundError or `ArchiveUnavailable`."""
    path = local_path(url)
    with _reaching(url):
        if path is None:
            store, name = _remote(url)
            store.invalidate_cache()
            data: bytes = store.cat_file(name)
            return data
        return path.read_bytes()


def file_size(url: str) -> int:
    """Return the length of a file. Raise FileNotFoundError or `ArchiveUnavailable`."""
    path = local_path(url)
    with _reaching(url):
        if path is None:
            store, name = _remote(url)
            store.invalidate_cache()  # an earlier listing may lack a file that came back
            return int(store.size(name))
        return path.stat().st_size


def erase_ranges(ranges: Sequence[ByteRange]) -> None:
    """Put zeros in place of ranges of one file, and sync it; again where it was interrupted.

    A file in another store than a local folder is replaced as a whole, at once. Raise
    FileNotFoundError or `ArchiveUnavailable`.
    """
    url = ranges[0].url
    path = local_path(url)
    if path is None:
        data = bytearray(read_file(url))
        for one in ranges:
            data[one.start : one.end] = bytes(one.end - one.start)
        write_file(url, bytes(data))
        return
    with _reaching(url):
        file = os.open(path, os.O_WRONLY)
        try:
            for one in ranges:
                os.pwrite(file, bytes(one.end - one.start), one.start)
            os.fsync(file)
        finally:
            os.close(file)


def write_file(url: str, data: bytes) -> None:
    """Write a file as a whole, and sync it; it may replace one. Raise `ArchiveUnavailable`."""
    path = local_path(url)
    with _reaching(url):
        if path is None:
            store, name = _remote(url)
            try:
                store.pipe_file(name, data)
            except FileNotFoundError as error:  # the bucket
                raise ArchiveUnavailable(str(error), url=url) from error
            return
        part = path.with_name(path.name + PART)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def remove_file(url: str) -> None:
    """Remove a file and what is left of its writing; one that is not there is no error."""
    path = local_path(url)
    with _reaching(url):
        if path is None:
            store, name = _remote(url)
            store.invalidate_cache()
            if store.exists(name):
                store.rm_file(name)
            return
        _expect_folder(path.parent)
        path.with_name(path.name + PART).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        _sync_folder(path.parent)


def list_files(folder: str) -> list[str]:
    """Return the URLs of the packs in a folder, with parts of them. Raise `ArchiveUnavailable`."""
    path = local_path(folder)
    with _reaching(folder):
        if path is None:
            store, name = _remote(folder)
            store.invalidate_cache()
            if not store.exists(name):  # an object store has no empty folders
                return []
            names = [str(one).rpartition("/")[2] for one in store.ls(name, detail=False)]
        else:
            names = [one.name for one in path.iterdir()]
    base = folder.rstrip("/")
    return sorted(f"{base}/{name}" for name in names if name.startswith(PREFIX))


def folder_of(url: str) -> str:
    return url.rpartition("/")[0]


def _local_ranges(url: str, path: Path, ranges: Sequence[ByteRange]) -> list[bytes | LostRange]:
    try:
        with _reaching(url):
            file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return [LostRange("the pack is missing")] * len(ranges)
    try:
        with _reaching(url):
            return [os.pread(file, one.end - one.start, one.start) for one in ranges]
    finally:
        os.close(file)


def _remote_ranges(url: str, ranges: Sequence[ByteRange]) -> list[bytes | LostRange]:
    with _reaching(url):
        store, name = _remote(url)
        parts = store.cat_ranges(
            [name] * len(ranges),
            [one.start for one in ranges],
            [one.end for one in ranges],
            on_error="return",
        )
    return [_remote_part(one, part) for one, part in zip(ranges, parts, strict=True)]


def _remote_part(place: ByteRange, part: Any) -> bytes | LostRange:
    if isinstance(part, FileNotFoundError):
        return LostRange("the pack is missing")
    if isinstance(part, Exception):
        if "range" in str(part).lower() and _begins_behind_the_end(place):
            return LostRange("the pack is cut off")
        raise ArchiveUnavailable(str(part) or type(part).__name__, url=place.url) from part
    return bytes(part)


def _begins_behind_the_end(place: ByteRange) -> bool:
    """Return whether a file ends before a range: S3 has an error for it, others return nothing.

    Call it only if the error is about a range: in an outage it would wait again.
    """
    try:
        return file_size(place.url) <= place.start
    except (FileNotFoundError, ArchiveUnavailable):
        return False


def _remote(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the name there."""
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ExtraMissing(f"the archive {url}", "archive") from error
    try:
        store, name = url_to_fs(url)
    except (ValueError, ImportError) as error:  # an unknown scheme; a package of it is missing
        raise InputError(f"the archive {url} cannot be used: {error}") from error
    return store, str(name)


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Translate errors of a file or store. FileNotFoundError passes if its folder is there."""
    try:
        yield
    except FileNotFoundError:
        path = local_path(url)
        if path is not None:
            _expect_folder(path.parent)
            if path.name != OWNER_FILE and not path.name.startswith(PREFIX):
                raise ArchiveUnavailable("the folder is not there", url=url) from None
        raise
    except (ArchiveUnavailable, InputError):
        raise
    except Exception as error:  # each store of fsspec has errors of its own
        raise ArchiveUnavailable(str(error) or type(error).__name__, url=url) from error


def _expect_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ArchiveUnavailable("the folder is not there", url=folder.as_uri())


def _sync_folder(folder: Path) -> None:
    """Make a new or removed name survive a crash of the machine."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
