"""Write the files of a user's export.

  index.html      the rooms, for a person; rooms/N.html: the events of one, oldest first
  seen.ndjson     for programs: each event that the user may see, as they see it
  sent.ndjson     each event that they sent, with the stored bytes: also what nobody was shown
  account.ndjson  their account data and receipts

Each room is read in pages, and a page is a snapshot. The folder gets its name once it is complete.
"""

import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import IO, Any, Final, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.codec import StoredBytes, decode
from storage.database.connection import Connection, Database
from storage.database.deployment import deployment
from storage.database.placeholders import fill
from storage.errors import InputError, UnknownRoom
from storage.ids import RoomId, UserId
from storage.maintenance.reencode import end_of_nids
from storage.observability.counters import Counted, Report, silent
from storage.queries.events import StoredEvent
from storage.queries.messages import messages
from storage.queries.pagination.page import between
from storage.queries.room_info import rooms as room_info

# --------------------------------------------------------------------------------------------------
# Facts about a user in the database, beside the events that they may see.

SQL_USER_ROOMS: Final[LiteralString] = fill("""
SELECT r.room_id
FROM rooms r
WHERE r.room_nid IN (
        SELECT c.room_nid
        FROM current_state c
        JOIN state_keys k USING (state_key_nid)
        WHERE k.type_nid = {TYPE_MEMBER} AND k.state_key = $1::text
        UNION
        SELECT m.room_nid
        FROM memberships m
        JOIN principals p USING (principal_nid)
        WHERE p.name = $1::text
    )
ORDER BY r.room_id
""")

SQL_LAST_NID: Final[LiteralString] = """
SELECT COALESCE(max(event_nid), 0)
FROM events
"""

SQL_SENT_EVENTS: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.received_ts, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint
    AND e.sender_nid = (SELECT principal_nid FROM principals WHERE name = $3::text)
ORDER BY e.event_nid
LIMIT $4::bigint
"""

SQL_USER_ACCOUNT_DATA: Final[LiteralString] = """
SELECT r.room_id, t.type, a.content
FROM account_data a
JOIN principals p USING (principal_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE p.name = $1::text
ORDER BY r.room_id NULLS FIRST, t.type
"""

SQL_USER_RECEIPTS: Final[LiteralString] = """
SELECT r.room_id, c.receipt_type, c.thread_id, c.event_id, c.data
FROM rooms r
JOIN receipts c USING (room_nid)
JOIN principals p USING (principal_nid)
WHERE r.room_id = ANY($2::text[]) AND p.name = $1::text
ORDER BY r.room_id, c.receipt_type, c.thread_id
"""

PAGE: Final = 500
RANGE: Final = 100_000
"""Events that a statement goes through."""


class SentEventRow(NamedTuple):
    """An event that the user sent, with the bytes that are stored."""

    event_nid: int
    event_id: str
    room_id: str
    room_version: str
    received_ts: int
    json: StoredBytes


class UserAccountDataRow(NamedTuple):
    """Account data of one type; no room: global."""

    room_id: str | None
    type: str
    content: bytes


class UserReceiptRow(NamedTuple):
    """A receipt of the user."""

    room_id: str
    receipt_type: str
    thread_id: str
    event_id: str
    data: bytes


async def rooms_of(conn: Connection, user_id: UserId) -> list[RoomId]:
    """Return the rooms in which the user has or had a membership."""
    room_ids: list[str] = await conn.fetchvals(SQL_USER_ROOMS, user_id)
    return [RoomId(room_id) for room_id in room_ids]


async def sent_by(conn: Connection, user_id: UserId) -> AsyncIterator[dict[str, Any]]:
    """Yield all that the user sent, as stored: also what was rejected, and outliers.

    All rows of events are read, because no index has the sender.
    """
    last: int = await conn.fetchval(SQL_LAST_NID)
    after = 0
    while (upto := await end_of_nids(conn, after, last, RANGE)) is not None:
        rows = await conn.fetch(SQL_SENT_EVENTS, after, upto, user_id, PAGE, row=SentEventRow)
        for row in rows:
            yield {
                "event_id": row.event_id,
                "room_id": row.room_id,
                "room_version": row.room_version,
                "received_ts": row.received_ts,
                "pdu": orjson.Fragment(decode(row.json, row.event_id, row.room_id)),
            }
        after = rows[-1].event_nid if len(rows) == PAGE else upto


async def account_of(
    conn: Connection, user_id: UserId, room_ids: list[RoomId]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the user's account data and receipts."""
    for data in await conn.fetch(SQL_USER_ACCOUNT_DATA, user_id, row=UserAccountDataRow):
        yield {
            "kind": "account_data",
            "room_id": data.room_id,
            "type": data.type,
            "content": orjson.Fragment(data.content),
        }
    for receipt in await conn.fetch(SQL_USER_RECEIPTS, user_id, room_ids, row=UserReceiptRow):
        yield {
            "kind": "receipt",
            "room_id": receipt.room_id,
            "type": receipt.receipt_type,
            "thread_id": receipt.thread_id or None,
            "event_id": receipt.event_id,
            "data": orjson.Fragment(receipt.data),
        }


# --------------------------------------------------------------------------------------------------
# Pages that a person reads without a program but a browser: no script, nothing from elsewhere.

STYLE: Final = """
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1b1f; background: #fff; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .5rem; border-top: 1px solid #ddd; }
td { overflow-wrap: anywhere; }
tr.own { background: #eef4ff; }
.quiet { color: #57575f; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8ee; background: #17171b; } td, th { border-color: #3a3a42; }
  tr.own { background: #1e2a44; } .quiet { color: #a9a9b4; } a { color: #9db7ff; }
}
"""


class ExportedRoom(NamedTuple):
    """A line of the index."""

    room_id: str
    name: str | None
    file: str
    events: int
    sent: int


def head(title: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
    )


def index(user_id: str, rooms: Sequence[ExportedRoom], taken: datetime) -> str:
    lines = [
        f'<tr><td><a href="{escape(room.file)}">{escape(room.name or room.room_id)}</a>'
        f'<br><span class="quiet">{escape(room.room_id)}</span></td>'
        f"<td>{room.events:,}</td><td>{room.sent:,}</td></tr>\n"
        for room in rooms
    ]
    return (
        head(f"Data of {user_id}")
        + f'<p class="quiet">Taken on {taken:%Y-%m-%d %H:%M} UTC. The files seen.ndjson,'
        " sent.ndjson and account.ndjson have the same for programs.</p>\n"
        "<table>\n<tr><th>Room</th><th>Events you could see</th>"
        "<th>of these sent by you</th></tr>\n" + "".join(lines) + "</table>\n</body>\n</html>\n"
    )


def row(event: StoredEvent, user_id: str) -> str:
    """Return an event as a row of a room's table."""
    own = ' class="own"' if event.sender == user_id else ""
    sent = time_of(event.json.get("origin_server_ts"))
    return (
        f"<tr{own}><td>{sent}</td><td>{escape(event.sender)}</td><td>{html_of(event)}</td></tr>\n"
    )


def html_of(event: StoredEvent) -> str:
    """Return what an event says, in HTML: a text where it has one, else its type."""
    content: dict[str, Any] = event.content
    if event.pruned:
        return f'<span class="quiet">{escape(event.type)}: removed</span>'
    texts = [content.get(key) for key in ("body", "name", "topic", "membership", "reason")]
    text = "\n".join(value for value in texts if isinstance(value, str))
    if event.type == "m.room.message":
        return escape(text).replace("\n", "<br>")
    of_key = "" if not event.state_key else f" {escape(event.state_key)}"
    shown = f": {escape(text)}" if text else ""
    return f'<span class="quiet">{escape(event.type)}{of_key}</span>{shown}'


def time_of(milliseconds: object) -> str:
    """Return a sender's time as text; empty for one that no calendar has."""
    if not isinstance(milliseconds, int):
        return ""
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1_000, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return ""


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
            rooms = await rooms_of(conn, self.user)
        token = "" if found is None else found.deployment_id
        counted = Counted(self.report, "export", len(rooms), "rooms")
        shown: list[ExportedRoom] = []
        with (self.folder / "seen.ndjson").open("wb") as seen:
            for room_id in rooms:
                shown.append(await self._room(room_id, len(shown) + 1, token, seen))
                counted.add()
        taken = datetime.now(UTC)
        (self.folder / "index.html").write_text(index(self.user, shown, taken), "utf-8")
        async with self.database.connection() as conn:
            sent = await self._lines("sent.ndjson", sent_by(conn, self.user))
            account = await self._lines("account.ndjson", account_of(conn, self.user, rooms))
        return UserExport(len(rooms), sum(room.events for room in shown), sent, account)

    async def _room(
        self, room_id: RoomId, number: int, token: str, seen: IO[bytes]
    ) -> ExportedRoom:
        """Write the page and the lines of a room."""
        async with self.database.connection() as conn:
            info = (await room_info(conn, [room_id])).get(room_id)
        name = None if info is None else info.name
        file = f"rooms/{number}.html"
        events = sent = 0
        with (self.folder / file).open("w", encoding="utf-8") as page:
            page.write(head(name or room_id) + "<table>\n")
            async for chunk in self._pages(room_id, token):
                seen.writelines(map(_line, chunk))
                page.writelines(row(event, self.user) for event in chunk)
                events += len(chunk)
                sent += sum(event.sender == self.user for event in chunk)
            page.write('</table>\n<p><a href="../index.html">All rooms</a></p>\n</body>\n</html>\n')
        return ExportedRoom(room_id, name, file, events, sent)

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
