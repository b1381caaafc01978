"""Two servers in a room must agree on its events and state."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from storage import EventId, StoredEvent
from storage.database import Database
from storage.queries.events import events
from tests.homeserver.processes import ErrorResponse, ServerProcess, User

WAIT_S: Final = 60.0
POLL_S: Final = 0.05
EVENT_ID: Final = re.compile(r"\$[A-Za-z0-9_-]{43}")
SECTIONS: Final = ("/rooms", "/leave", "/state", "/events", "/summary", "/unsigned")
"""Where an absent value is as an empty one, so that its parts are compared."""

ERROR: Final = re.compile(r": (\d{3}) .*'errcode': '(\w+)'")
LABEL: Final = re.compile(r"@user\d\.\d+|!room\d|\$\d\.\d+")
OWN: Final = frozenset(
    {
        "origin_server_ts",
        "age",
        "ts",
        "next_batch",
        "prev_batch",
        "redacted_by",
        "start",
        "end",
        "hashes",
    }
)
"""Keys whose values are those of one server."""

OLD: Final = ("user_id", "prev_content", "replaces_state", "redacted_because", "invite_room_state")
"""Keys of `unsigned` that Synapse repeats in the event, as the first clients had them."""

NEW_LEVELS: Final = re.compile(r"\$\d\.2")
"""The levels that a server gives to a new room."""


async def until(condition: Callable[..., Awaitable[bool]], *args: Any) -> None:
    """Wait for a condition of these arguments."""
    async with asyncio.timeout(WAIT_S):
        while not await condition(*args):  # noqa: ASYNC110  # it is in another process
            await asyncio.sleep(POLL_S)


async def until_membership(user: User, room: str, other: User, membership: str) -> None:
    """Wait until a user's server has the membership of another user."""
    path = f"/rooms/{room}/state/m.room.member/{other.user_id}"

    async def is_there() -> bool:
        return bool((await user.call("GET", path))["membership"] == membership)

    await until(is_there)


async def has(user: User, room: str, event_id: str) -> None:
    """Wait until the user can read an event."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            path = f"/rooms/{room}/context/{quote(event_id, safe='')}"
            await user.call("GET", path, limit=0)
        except ErrorResponse:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(POLL_S)
        else:
            return


async def settled(room: str, *users: User) -> None:
    """Wait until each server has what the others have sent before."""
    for user in users:
        event_id = await user.send(room, f"a marker of {user.user_id}")
        for other in users:
            await has(other, room, event_id)


async def state_of(user: User, room: str) -> dict[tuple[str, str], str]:
    found = await user.call("GET", f"/rooms/{room}/state")
    return {(one["type"], one["state_key"]): one["event_id"] for one in found}


async def history(user: User, room: str) -> dict[str, Any]:
    """Return all events that the user may see, by id, oldest first."""
    found: list[Any] = []
    start: dict[str, str] = {}
    while True:
        path = f"/rooms/{room}/messages"
        page = await user.call("GET", path, dir="b", limit=100, **start)
        found += page["chunk"]
        if "end" not in page or (not page["chunk"] and page["end"] == page["start"]):
            return {one["event_id"]: one for one in reversed(found)}
        start = {"from": page["end"]}


async def agree(dsn: str, room: str, one: User, other: User) -> None:
    """Both have the same state, and see the same events in an order that fits the graph."""
    assert await state_of(one, room) == await state_of(other, room)
    ours, theirs = await history(one, room), await history(other, room)
    assert ours.keys() == theirs.keys(), difference(ours, theirs)
    # Not as a store: the outbox of the example would wait for the positions of another writer.
    async with await Database.open(dsn) as database, database.connection() as conn:
        stored = await events(conn, list(map(EventId, ours)))
    assert stored.keys() == ours.keys()
    for listed in (ours, theirs):
        assert_in_order(listed, stored)
    assert by_depth(ours, stored) == by_depth(theirs, stored)
    for event_id, event in ours.items():
        for key in ("type", "sender", "origin_server_ts"):
            assert event[key] == theirs[event_id][key]
        assert content(event) == content(theirs[event_id])


def content(event: Any) -> Any:
    """The content of an event. For clients, Synapse adds the target of a redaction to it."""
    return {key: value for key, value in event["content"].items() if key != "redacts"}


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return what only one of them has."""
    lines = [
        f"only {name}: {event['type']} {event['sender']} {event['content']}"
        for name, listed, others in (("ours", ours, theirs), ("theirs", theirs, ours))
        for event_id, event in listed.items()
        if event_id not in others
    ]
    return "\n".join(lines)


def assert_in_order(listed: Iterable[str], stored: Mapping[EventId, StoredEvent]) -> None:
    """Every event comes after its parents."""
    seen: set[str] = set()
    known = set(listed)
    for event_id in listed:
        parents = set(prev_events(stored[EventId(event_id)])) & known
        assert parents <= seen, stored[EventId(event_id)]
        seen.add(event_id)


def by_depth(listed: Iterable[str], stored: Mapping[EventId, StoredEvent]) -> list[list[str]]:
    """Return the order with events of one depth as sets: they are concurrent."""
    levels: dict[int, list[str]] = {}
    for event_id in listed:
        levels.setdefault(stored[EventId(event_id)].depth, []).append(event_id)
    return [sorted(level) for level in levels.values()]


def prev_events(event: StoredEvent) -> list[str]:
    return [one if isinstance(one, str) else one[0] for one in event.json["prev_events"]]


@dataclass
class ClientSide:
    """One of the servers: its users, and its ids by label."""

    server: ServerProcess
    users: dict[str, User] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    since: dict[str, str] = field(default_factory=dict)

    def learn(self, label: str, known: str) -> None:
        self.ids[label] = known
        self.labels.setdefault(known, label)

    async def ask(self, user: str, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Send a request with labels. Return the answer as it is, or its status and its code."""
        path, text = self._real(path), self._real(json.dumps(body))
        try:
            return await self.users[user].call(method, path, json.loads(text), **query)
        except ErrorResponse as error:
            [(status, code)] = ERROR.findall(str(error))
            return {"status": status, "errcode": code}

    def _real(self, text: str) -> str:
        return LABEL.sub(lambda found: self.ids[found[0]], text)

    def plain(self, answer: Any, *, ordered: bool = True) -> Any:
        """Return an answer with labels, without what is empty or of one server alone.

        Events are by id. Those that have an order have it in `order`.
        """
        text = json.dumps(answer, ensure_ascii=False)
        for room, label in self.labels.items():
            if room.startswith("!"):
                text = text.replace(f'"{room}"', f'"{label}"')
        text = EVENT_ID.sub(lambda found: self.labels.get(found[0], found[0]), text)
        return _plain(json.loads(text.replace(f":{self.server.name}", "")), ordered)


def _plain(value: Any, ordered: bool) -> Any:
    if isinstance(value, dict):
        kept = {
            key: _plain(one, ordered and key != "state")
            for key, one in value.items()
            if key not in OWN
        }
        kept = {key: one for key, one in kept.items() if one not in ({}, [])}
        if _is_event(value) and "sender" in value:
            kept = {key: one for key, one in kept.items() if key not in OLD}
            if NEW_LEVELS.fullmatch(value.get("event_id", "")):
                kept.pop("content", None)
            if kept.get("unsigned", {}).get("replaces_state", "").endswith(".2"):
                kept["unsigned"].pop("prev_content", None)
        return kept
    if isinstance(value, list) and value and all(_is_event(one) for one in value):
        order = {"order": list(map(_name, value))} if ordered else {}
        return {_name(one): _plain(one, ordered) for one in value} | order
    return [_plain(one, ordered) for one in value] if isinstance(value, list) else value


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and "type" in value and "content" in value


def _name(event: Any) -> str:
    return str(event.get("event_id") or f"{event['type']} {event.get('state_key', '')}")


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths of what differs, and both values."""
    if path.endswith(SECTIONS):
        ours, theirs = ours or {}, theirs or {}
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differences(ours.get(key), theirs.get(key), f"{path}/{key}")
    elif ours != theirs:
        yield path, ours, theirs
