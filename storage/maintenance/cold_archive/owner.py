"""The owner of a folder of packs: the one database that may change its files.

A copy of a database refers to the same packs. A purge there, or the return of events, would remove
bytes that the original needs. So a file in each folder names the database by the system identifier
of its cluster and its oid. A standby that takes over has both, so it stays the owner. A restored
dump is another database.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.pack_store import OWNER_FILE, list_files, local_path, read_file, write_file
from storage.errors import ArchiveNotOwned

SQL_DATABASE: Final[LiteralString] = """
SELECT format('%s.%s', (SELECT system_identifier FROM pg_control_system()), oid) AS identity,
    datname::text AS name
FROM pg_database
WHERE datname = current_database()
"""


class ArchiveOwnerRow(NamedTuple):
    """A database; the name is for people only."""

    identity: str
    name: str


async def own_folders(
    conn: Connection,
    folders: Iterable[str],
    *,
    take_over: bool = False,
    for_packs: bool = False,
    claim: bool = True,
) -> None:
    """Own these folders. Call it under the lock, unless it is not to ``claim`` any.

    Claim those that have packs and no owner; ``for_packs``: also those that have no packs yet;
    ``take_over``: those of another owner. Raise `ArchiveNotOwned` or `ArchiveUnavailable`, before
    any claim if a folder has another owner.
    """
    row = await conn.fetchrow(SQL_DATABASE, row=ArchiveOwnerRow)
    assert row is not None  # noqa: S101  # for the types
    claims = await asyncio.to_thread(_claims, row, sorted(set(folders)), take_over, for_packs)
    if claim:
        await asyncio.to_thread(_own, row, claims)


def _claims(
    database: ArchiveOwnerRow, folders: Iterable[str], take_over: bool, for_packs: bool
) -> list[str]:
    """Return the folders to claim. Raise `ArchiveNotOwned`."""
    claims = list[str]()
    for folder in folders:
        path = local_path(folder)
        if path is not None and not path.is_dir() and not take_over:
            continue  # it has nothing to change
        owner = _owner(folder)
        if owner is None:
            # a folder without packs may be a file system that is not mounted
            if for_packs or list_files(folder):
                claims.append(folder)
        elif owner.identity != database.identity:
            if not take_over:
                raise _refusal(folder, owner, database)
            claims.append(folder)
    return claims


def _own(database: ArchiveOwnerRow, claims: Iterable[str]) -> None:
    for folder in claims:
        write_file(f"{folder}/{OWNER_FILE}", f"{database.identity} {database.name}\n".encode())
        owner = _owner(folder)
        if owner is None or owner.identity != database.identity:  # another one claims it, too
            raise _refusal(folder, owner, database)


def _owner(folder: str) -> ArchiveOwnerRow | None:
    try:
        text = read_file(f"{folder}/{OWNER_FILE}").decode(errors="replace")
    except FileNotFoundError:
        return None
    identity, _, name = text.strip().partition(" ")
    return ArchiveOwnerRow(identity, name)


def _refusal(
    folder: str, owner: ArchiveOwnerRow | None, database: ArchiveOwnerRow
) -> ArchiveNotOwned:
    owned = " ".join(owner or ()).strip() or "unknown"
    return ArchiveNotOwned(folder, owner=owned, database=" ".join(database))
