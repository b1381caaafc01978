"""Replace references to the archive in rows by the stored forms that they refer to.

A connection does so after each statement whose rows have references in a `StoredBytes`
(`storage.database.dictionaries`). So no reader knows where the bytes are:

    rows of a statement ──> references, by pack ──> near ones joined ──> one read in a thread
      │                                                                        │
      └── the same rows, with stored forms in place of references <────────────┘

A reference whose record is missing or damaged becomes `LostBytes`: `decode` raises `StorageCorrupt`
with the event id. A store that cannot be reached raises `ArchiveUnavailable`
(`storage.database.archive_limits`).
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

from storage.codec import LostBytes, Reference
from storage.codec.pack import record_range, stored_form
from storage.database.pack_store import ByteRange, LostRange, folder_of, read_ranges

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
    places = [
        (row, at, reference)
        for row, record in enumerate(records)
        for at in columns
        if record[at] is not None and (reference := Reference.parse(record[at])) is not None
    ]
    forms = await stored_forms(conn, {place[2] for place in places})
    changed = dict[int, list[Any]]()
    for row, at, reference in places:
        changed.setdefault(row, list(records[row]))[at] = forms[reference]
    return [tuple(changed[row]) if row in changed else record for row, record in enumerate(records)]


async def stored_forms(
    conn: "RowQueries", references: Iterable[Reference]
) -> dict[Reference, bytes]:
    """Return what references refer to: stored forms, or `LostBytes`."""
    wanted = sorted(references)
    if not wanted:
        return {}
    limits, urls = conn.archive
    if unknown := {one.pack for one in wanted}.difference(urls):
        urls.update(await conn.fetch(SQL_PACK_URLS, list(unknown), row=PackUrlRow))
    forms, is_whole = dict[Reference, bytes](), False
    try:
        for folder, members in _by_folder(wanted, urls).items():
            read = partial(read_forms, members, dict(urls))
            forms |= await limits.read(folder, read) if folder else read()
        is_whole = not any(isinstance(form, LostBytes) for form in forms.values())
    finally:
        if not is_whole:
            urls.clear()  # an operator may move a folder, and then corrects the table
    return forms


def _by_folder(references: Iterable[Reference], urls: dict[int, str]) -> dict[str, list[Reference]]:
    """Return sorted references by the folder of their pack, "" for packs that are not known."""
    found = dict[str, list[Reference]]()
    for one in references:
        found.setdefault(folder_of(urls.get(one.pack, "")), []).append(one)
    return found


def read_forms(references: Sequence[Reference], urls: dict[int, str]) -> dict[Reference, bytes]:
    """Read what sorted references refer to; blocks."""
    joined = list(_joined((one for one in references if one.pack in urls), urls))
    parts = read_ranges([one for one, _ in joined])
    forms: dict[Reference, bytes] = {
        one: LostBytes.of(one, "no such pack is known", None)
        for one in references
        if one.pack not in urls
    }
    for (place, members), part in zip(joined, parts, strict=True):
        for reference in members:
            forms[reference] = _form(reference, place, part)
    return forms


def _form(reference: Reference, place: ByteRange, part: bytes | LostRange) -> bytes:
    if isinstance(part, LostRange):
        return LostBytes.of(reference, part.reason, place.url)
    start, end = record_range(reference)
    try:
        return stored_form(reference, part[start - place.start : end - place.start])
    except ValueError as error:
        return LostBytes.of(reference, str(error), place.url)


def _joined(references: Iterable[Reference], urls: dict[int, str]) -> Iterator[Joined]:
    """Yield ranges of bytes that cover all records; near records share one."""
    place: ByteRange | None = None
    members = list[Reference]()
    for one in references:
        url, (start, end) = urls[one.pack], record_range(one)
        if (
            place is not None
            and place.url == url
            and start - place.end <= NEAR
            and end - place.start <= JOINED_MAX
        ):
            place = place._replace(end=max(end, place.end))
            members.append(one)
            continue
        if place is not None:
            yield place, members
        place, members = ByteRange(url, start, end), [one]
    if place is not None:
        yield place, members
