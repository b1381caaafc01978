"""Write the files of a user's export.

  index.html      the rooms, for a person; rooms/N.html: the events of one, oldest first
  seen.ndjson     for programs: each event that the user may see, as they see it
  sent.ndjson     each event that they sent, with the stored bytes: also what nobody was shown
  account.ndjson  their account data and receipts

Each room is read in pages, and a page is a snapshot. The folder gets its name once it is complete.
"""

import shutil
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import orjson

from storage import arguments as args
from storage.database.connection import Database
from storage.database.deployment import deployment
from storage.errors import InputError, UnknownRoom
from storage.ids import RoomId, UserId
from storage.maintenance.user_export import facts, pages
from storage.observability.progress import Counted, Report, silent
from storage.queries.events import StoredEvent
from storage.queries.messages import messages
from storage.queries.pagination.page import between
from storage.queries.room_info import rooms as room_info

PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class UserExport:
    """Numbers of what was written. ``seen``: events that the user may see; ``sent``: by them."""

    rooms: int
    seen: int
    sent: int
    account: int


async def export_user(
    database: Database,
    user_id: str,
    folder: Path,
    *,
    server_name: str,
    report: Report = silent,
) -> UserExport:
    """Write all that a local user has sent and could see into a new folder.

    Raise `InputError` if the folder exists or cannot be written, or the user is of another server.
    """
    user = args.local_user(user_id, server_name)
    if folder.exists():  # noqa: ASYNC240  # as all files here, in a command with no other work
        raise InputError(f"{folder} exists: choose another name")
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / "rooms").mkdir(parents=True)
        done = await UserWriter(database, user, part, report).write()
        part.replace(folder)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return done


@dataclass(frozen=True, slots=True)
class UserWriter:
    """Writes the files of one export."""

    database: Database
    user: UserId
    folder: Path
    report: Report

    async def write(self) -> UserExport:
        async with self.database.connection() as conn:
            found = await deployment(conn)
            rooms = await facts.rooms_of(conn, self.user)
        token = "" if found is None else found.deployment_id
        counted = Counted(self.report, "export", len(rooms), "rooms")
        shown: list[pages.ExportedRoom] = []
        with (self.folder / "seen.ndjson").open("wb") as seen:
            for room_id in rooms:
                shown.append(await self._room(room_id, len(shown) + 1, token, seen))
                counted.add()
        taken = datetime.now(UTC)
        (self.folder / "index.html").write_text(pages.index(self.user, shown, taken), "utf-8")
        async with self.database.connection() as conn:
            sent = await self._lines("sent.ndjson", facts.sent_by(conn, self.user))
            account = await self._lines("account.ndjson", facts.account_of(conn, self.user, rooms))
        return UserExport(len(rooms), sum(room.events for room in shown), sent, account)

    async def _room(
        self, room_id: RoomId, number: int, token: str, seen: IO[bytes]
    ) -> pages.ExportedRoom:
        """Write the page and the lines of a room."""
        async with self.database.connection() as conn:
            info = (await room_info(conn, [room_id])).get(room_id)
        name = None if info is None else info.name
        file = f"rooms/{number}.html"
        events = sent = 0
        with (self.folder / file).open("w", encoding="utf-8") as page:
            page.write(pages.head(name or room_id) + "<table>\n")
            async for chunk in self._pages(room_id, token):
                seen.writelines(map(_line, chunk))
                page.writelines(pages.row(event, self.user) for event in chunk)
                events += len(chunk)
                sent += sum(event.sender == self.user for event in chunk)
            page.write('</table>\n<p><a href="../index.html">All rooms</a></p>\n</body>\n</html>\n')
        return pages.ExportedRoom(room_id, name, file, events, sent)

    async def _pages(self, room_id: RoomId, token: str) -> AsyncIterator[list[StoredEvent]]:
        """Yield the visible events of a room, oldest first. A purged room has none."""
        after: str | None = None
        while True:
            async with self.database.connection() as conn:
                try:
                    found = await messages(
                        conn,
                        room_id,
                        self.user,
                        between(after, None, "f", PAGE, token),
                        token,
                        rows_max=self.database.config.traversal_rows_max,
                    )
                except UnknownRoom:
                    return
            yield found.chunk
            after = found.end
            if after is None:
                return

    async def _lines(self, name: str, objects: AsyncIterator[dict[str, Any]]) -> int:
        """Write a file with an object on each line; return their number."""
        count = 0
        with (self.folder / name).open("wb") as file:
            async for one in objects:
                file.write(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE))
                count += 1
        return count


def _line(event: StoredEvent) -> bytes:
    shown: Iterable[str] = ("type", "state_key", "sender", "origin_server_ts", "content", "redacts")
    json = {key: event.json[key] for key in shown if key in event.json}
    return orjson.dumps(
        {"event_id": event.event_id, "room_id": event.room_id, **json},
        option=orjson.OPT_APPEND_NEWLINE,
    )
