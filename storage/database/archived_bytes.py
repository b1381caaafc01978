"""Replace references to the archive in rows by the stored forms that they refer to.

A connection does so after each statement whose rows have references in a `StoredBytes`
(`storage.database.dictionaries`). So no reader knows where the bytes are:

    rows of a statement ──> references, by pack ──> near ones joined ──> one read in a thread
      │                                                                        │
      └── the same rows, with stored forms in place of references <────────────┘

A reference whose record is missing or damaged becomes `LostBytes`: `decode` raises `StorageCorrupt`
with the event id. A store that cannot be reached raises `ArchiveUnavailable`
(`storage.database.archived_bytes`).
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from storage.codec import LostBytes, Reference
from storage.codec.pack import record_range, stored_form
from storage.config import Config
from storage.errors import ArchiveUnavailable, ExtraMissing, InputError
from storage.observability.counters import Outage

# --------------------------------------------------------------------------------------------------
# Packs of the archive as files: in a local folder, or in a store that fsspec knows by its URL.
#
#     read_ranges([("s3://bucket/rooms/pack-7-a1b2c3d4", 8, 282)])
#
# The functions block; call them in a thread. A file is written once as a whole, and nobody can see
# a part of it. Credentials are those that fsspec finds on its own.
#
# Two errors differ: a file that is missing, or too short, is lost (`LostRange`, FileNotFoundError).
# A store that cannot be reached, or is full, is `ArchiveUnavailable`: try again later.

PREFIX: Final = "pack-"
OWNER_FILE: Final = "room-storage-owner"
"""The file of a folder that names the database to which its packs belong."""
PART: Final = ".part"
"""The end of the name of a local file that is being written."""


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
    by_range = dict[ByteRange, bytes | LostRange]()
    for url, group in groupby(sorted(set(ranges)), key=lambda byte_range: byte_range.url):
        distinct = list(group)
        path = local_path(url)
        parts = (
            _remote_ranges(url, distinct) if path is None else _local_ranges(url, path, distinct)
        )
        by_range.update(zip(distinct, parts, strict=True))
    return [by_range[byte_range] for byte_range in ranges]


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
        for byte_range in ranges:
            data[byte_range.start : byte_range.end] = bytes(byte_range.end - byte_range.start)
        write_file(url, bytes(data))
        return
    with _reaching(url):
        file = os.open(path, os.O_WRONLY)
        try:
            for byte_range in ranges:
                os.pwrite(file, bytes(byte_range.end - byte_range.start), byte_range.start)
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
            names = [str(entry).rpartition("/")[2] for entry in store.ls(name, detail=False)]
        else:
            names = [entry.name for entry in path.iterdir()]
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
            return [
                os.pread(file, byte_range.end - byte_range.start, byte_range.start)
                for byte_range in ranges
            ]
    finally:
        os.close(file)


def _remote_ranges(url: str, ranges: Sequence[ByteRange]) -> list[bytes | LostRange]:
    with _reaching(url):
        store, name = _remote(url)
        parts = store.cat_ranges(
            [name] * len(ranges),
            [byte_range.start for byte_range in ranges],
            [byte_range.end for byte_range in ranges],
            on_error="return",
        )
    return [_remote_part(byte_range, part) for byte_range, part in zip(ranges, parts, strict=True)]


def _remote_part(byte_range: ByteRange, part: Any) -> bytes | LostRange:
    if isinstance(part, FileNotFoundError):
        return LostRange("the pack is missing")
    if isinstance(part, Exception):
        if "range" in str(part).lower() and _begins_after_the_end(byte_range):
            return LostRange("the pack is cut off")
        raise ArchiveUnavailable(str(part) or type(part).__name__, url=byte_range.url) from part
    return bytes(part)


def _begins_after_the_end(byte_range: ByteRange) -> bool:
    """Return whether a file ends before a range: S3 has an error for it, others return nothing.

    Call it only if the error is about a range: in an outage it would wait again.
    """
    try:
        return file_size(byte_range.url) <= byte_range.start
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


if TYPE_CHECKING:
    from storage.database.dictionaries import RowQueries

NEAR: Final = 16_384
"""Records that are so near to each other are read together: 60 events apart."""
JOINED_MAX: Final = 1 << 22

SQL_PACK_URLS: Final[LiteralString] = """
SELECT pack, url
FROM archive_packs
WHERE pack = ANY($1::bigint[])
"""


class PackUrlRow(NamedTuple):
    """Where a pack is."""

    pack: int
    url: str


Joined = tuple[ByteRange, list[Reference]]
"""Bytes to read, and the references to records in them."""


async def resolve(
    conn: "RowQueries", records: Sequence[Any], positions: Iterable[int]
) -> list[Any]:
    """Return the rows without references; ``positions`` are their columns of stored bytes.

    Raise `ArchiveUnavailable`.
    """
    columns = tuple(positions)
    cells = [
        (row, at, reference)
        for row, record in enumerate(records)
        for at in columns
        if record[at] is not None and (reference := Reference.parse(record[at])) is not None
    ]
    forms = await stored_forms(conn, {cell[2] for cell in cells})
    changed = dict[int, list[Any]]()
    for row, at, reference in cells:
        changed.setdefault(row, list(records[row]))[at] = forms[reference]
    return [tuple(changed[row]) if row in changed else record for row, record in enumerate(records)]


async def stored_forms(
    conn: "RowQueries", references: Iterable[Reference]
) -> dict[Reference, bytes]:
    """Return what references refer to: stored forms, or `LostBytes`."""
    requested = sorted(references)
    if not requested:
        return {}
    limits, urls = conn.archive
    if unknown := {reference.pack for reference in requested}.difference(urls):
        urls.update(await conn.fetch(SQL_PACK_URLS, list(unknown), row=PackUrlRow))
    forms, is_whole = dict[Reference, bytes](), False
    try:
        for folder, members in _by_folder(requested, urls).items():
            read = partial(read_forms, members, dict(urls))
            forms |= await limits.read(folder, read) if folder else read()
        is_whole = not any(isinstance(form, LostBytes) for form in forms.values())
    finally:
        if not is_whole:
            urls.clear()  # an operator may move a folder, and then corrects the table
    return forms


def _by_folder(references: Iterable[Reference], urls: dict[int, str]) -> dict[str, list[Reference]]:
    """Return sorted references by the folder of their pack, "" for packs that are not known."""
    by_folder = dict[str, list[Reference]]()
    for reference in references:
        by_folder.setdefault(folder_of(urls.get(reference.pack, "")), []).append(reference)
    return by_folder


def read_forms(references: Sequence[Reference], urls: dict[int, str]) -> dict[Reference, bytes]:
    """Read what sorted references refer to; blocks."""
    joined = list(_joined((reference for reference in references if reference.pack in urls), urls))
    parts = read_ranges([byte_range for byte_range, _ in joined])
    forms: dict[Reference, bytes] = {
        reference: LostBytes.of(reference, "no such pack is known", None)
        for reference in references
        if reference.pack not in urls
    }
    for (byte_range, members), part in zip(joined, parts, strict=True):
        for reference in members:
            forms[reference] = _form(reference, byte_range, part)
    return forms


def _form(reference: Reference, byte_range: ByteRange, part: bytes | LostRange) -> bytes:
    if isinstance(part, LostRange):
        return LostBytes.of(reference, part.reason, byte_range.url)
    start, end = record_range(reference)
    try:
        return stored_form(reference, part[start - byte_range.start : end - byte_range.start])
    except ValueError as error:
        return LostBytes.of(reference, str(error), byte_range.url)


def _joined(references: Iterable[Reference], urls: dict[int, str]) -> Iterator[Joined]:
    """Yield ranges of bytes that cover all records; near records share one."""
    byte_range: ByteRange | None = None
    members = list[Reference]()
    for reference in references:
        url, (start, end) = urls[reference.pack], record_range(reference)
        if (
            byte_range is not None
            and byte_range.url == url
            and start - byte_range.end <= NEAR
            and end - byte_range.start <= JOINED_MAX
        ):
            byte_range = byte_range._replace(end=max(end, byte_range.end))
            members.append(reference)
            continue
        if byte_range is not None:
            yield byte_range, members
        byte_range, members = ByteRange(url, start, end), [reference]
    if byte_range is not None:
        yield byte_range, members


# --------------------------------------------------------------------------------------------------
# Limits for reads of the archive, so that a store that does not answer stops nothing else.
#
# A read of archived events keeps its connection until the bytes are there. A store that hangs, such
# as a network file system without its server, would take one connection after the other. So
#
# * a read that takes longer than `Config.archive_timeout_ms` raises `ArchiveUnavailable`;
# * then all reads of the folder do so at once, and after PAUSE_S one of them tries it again;
# * half of the connections may wait as long as that, and further ones for SLOW_MS.
#
# Reads have threads of their own, since a thread that hangs cannot be ended. Those of the event
# loop are for the homeserver.

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_MS: Final = 1_000
"""A store answers within milliseconds; a failure that took longer is an outage."""
PAUSE_S: Final = 5.0
POOL_SMALL: Final = 2
"""All connections of such a pool may wait long: it is that of a command."""
MAINTENANCE_MS: Final = 300_000
"""The timeout of commands and jobs, which read many events at once and keep nobody waiting."""


class ArchiveLimits:
    """The limits of one pool of connections, and the reads that go on."""

    def __init__(self, config: Config) -> None:
        self._timeout_ms = config.archive_timeout_ms
        self._most = max(POOL_SMALL, config.pool_size_max // 2)
        self._numbers = count()
        self._waiting: dict[int, float] = {}
        """When each read that goes on began."""
        self._folders: dict[str, _Folder] = {}

    async def read(self, folder: str, work: Callable[[], T]) -> T:
        """Return the result of ``work``, a blocking read of this folder.

        Raise `ArchiveUnavailable`.
        """
        store = self._folders.get(folder)
        if store is None:
            store = self._folders[folder] = _Folder(folder, self._most)
        begun, limit_ms = time.monotonic(), self._limit_ms(folder)
        store.enter(begun, limit_ms)
        number = next(self._numbers)
        self._waiting[number] = begun
        try:
            result = await _read(store, work, limit_ms)
        except ArchiveUnavailable as error:
            if time.monotonic() - begun < SLOW_MS / 1000:
                store.try_again()
            elif limit_ms == self._timeout_ms:
                store.rest(error)
            raise
        finally:
            del self._waiting[number]
        store.answered()
        return result

    def _limit_ms(self, folder: str) -> int:
        """Return how long a new read may take. Raise `ArchiveUnavailable` if it may not begin."""
        if len(self._waiting) < self._most:
            return self._timeout_ms
        if time.monotonic() - min(self._waiting.values()) >= SLOW_MS / 1000:
            raise ArchiveUnavailable("too many reads wait for it", url=folder)
        return min(SLOW_MS, self._timeout_ms)


async def _read(store: "_Folder", work: Callable[[], T], limit_ms: int) -> T:
    try:
        async with asyncio.timeout(limit_ms / 1000):
            return await asyncio.get_running_loop().run_in_executor(store.threads, work)
    except TimeoutError as error:
        raise ArchiveUnavailable(f"no answer within {limit_ms} ms", url=store.url) from error


class _Folder:
    """A folder of the archive: its threads, and whether it answers."""

    def __init__(self, url: str, threads: int) -> None:
        self.url = url
        self.threads = ThreadPoolExecutor(threads, "archive")
        self._outage = Outage(logger, f"the archive {url}")
        self._rests_until: float | None = None

    def enter(self, now: float, limit_ms: int) -> None:
        """Raise `ArchiveUnavailable` while it rests; the first read after that tries it for all."""
        if self._rests_until is None:
            return
        if now < self._rests_until:
            raise ArchiveUnavailable("it did not answer a moment ago", url=self.url)
        self._rests_until = now + limit_ms / 1000

    def rest(self, error: ArchiveUnavailable) -> None:
        """Note an outage."""
        self._rests_until = time.monotonic() + PAUSE_S
        self._outage.failed(str(error))

    def try_again(self) -> None:
        """Note that it answers, if only with an error: nobody has to wait for it."""
        self._rests_until = None

    def answered(self) -> None:
        """Note the end of an outage, if there was one."""
        self.try_again()
        self._outage.recovered()


class ArchiveAccess(NamedTuple):
    """The knowledge of a session about the archive."""

    limits: ArchiveLimits
    urls: dict[int, str]
    """Where packs are; they never change, and a session has one database."""


def open_access(limits: ArchiveLimits | None = None) -> ArchiveAccess:
    """Return the access of a new session; without ``limits`` it shares nothing with others."""
    return ArchiveAccess(limits or ArchiveLimits(Config()), {})
