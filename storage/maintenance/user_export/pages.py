"""Pages that a person reads without a program but a browser: no script, nothing from elsewhere."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final, NamedTuple

from storage.queries.events import StoredEvent

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
    return f"<tr{own}><td>{sent}</td><td>{escape(event.sender)}</td><td>{said(event)}</td></tr>\n"


def said(event: StoredEvent) -> str:
    """Return what an event says, in HTML: a text where it has one, else its type."""
    content: dict[str, Any] = event.content
    if event.pruned:
        return f'<span class="quiet">{escape(event.type)}: removed</span>'
    texts = [content.get(key) for key in ("body", "name", "topic", "membership", "reason")]
    text = "\n".join(one for one in texts if isinstance(one, str))
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
