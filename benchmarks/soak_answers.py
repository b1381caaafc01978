"""The answers of the stores of the soak (benchmarks/soak.py) in the end, and where two differ.

The store that was open all the time answers from warm caches. A new one on the same database has
none. A third one has imported an export. All give the same answers about each room.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import storage
from benchmarks.soak_rooms import SERVER
from storage import EventId, RoomId, Store, UserId
from storage.config import Config
from storage.database.migrate import migrate
from tests.failover import ask
from tests.postgres import with_database

Answers = dict[str, Any]
IMPORTED: Final = "imported"
SAMPLE: Final = 10
"""Events of a room of which the states and the servers are compared."""
PAGE: Final = 500
CONFIG: Final = Config(pool_size_max=4, instance_name="answers")


async def answers(
    store: Store, room_id: RoomId, users: Sequence[UserId], sample: Sequence[EventId]
) -> Answers:
    """Return what a store answers about a room, without positions and ages."""
    found: Answers = {
        "current state": await store.current_state(room_id),
        "forward extremities": sorted(await store.forward_extremities(room_id)),
        "backward extremities": sorted(await store.backward_extremities(room_id)),
        "servers": sorted(await store.joined_servers(room_id)),
        "members": sorted(await store.member_ids(room_id)),
    }
    for event_id in sample:
        found[f"state before {event_id}"] = await store.state_before(event_id)
        found[f"chain of {event_id}"] = sorted(await store.auth_chain_ids([event_id]))
    for server in (SERVER, "s2.test"):
        found[f"visible to {server}"] = sorted(await store.visible_to_server(server, sample))
    for user in users:
        found[f"pages of {user}"] = [event async for event in _walk(store, room_id, user)]
    return found


async def _walk(
    store: Store, room_id: RoomId, user: UserId
) -> AsyncIterator[tuple[EventId, dict[str, Any]]]:
    """Yield a user's history of a room, newest first: each event as a client gets it."""
    place: str | None = None
    while True:
        page = await store.messages(room_id, user, from_=place, limit=PAGE)
        for served in await store.client_events(user, page.chunk):
            yield EventId(served["event_id"]), _ageless(served)
        place = page.end
        if place is None:
            return


def _ageless(value: Any) -> Any:
    """Return a served event without the ages in it, which depend on the time of the request."""
    if isinstance(value, dict):
        return {key: _ageless(one) for key, one in value.items() if key != "age"}
    return [_ageless(one) for one in value] if isinstance(value, list) else value


def differences(name: str, room_id: RoomId, first: Answers, second: Answers) -> list[str]:
    """Return the answers that differ, in one line each."""
    return [
        f"{name}: {room_id}: {what}: {_apart(answer, second[what])}"
        for what, answer in first.items()
        if answer != second[what]
    ]


def _apart(first: Any, second: Any) -> str:
    if isinstance(first, dict):
        first, second = list(first.items()), list(second.items())
    only = [one for one in first if one not in second], [one for one in second if one not in first]
    if not any(only):
        return "another order"
    return f"only warm {only[0][:2]}, only there {only[1][:2]}"


@asynccontextmanager
async def imported(dsn: str, folder: Path, forgotten: Sequence[UserId]) -> AsyncIterator[Store]:
    """Open a store on a new database that has imported an export; it forgets the same users."""
    archive, target = folder / "export.ndjson", with_database(dsn, IMPORTED)
    await ask(dsn, f"CREATE DATABASE {IMPORTED} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'")
    await migrate(target)
    await _command("export", str(archive), "--dsn", dsn)
    await _command("import", str(archive), "--dsn", target, "--server-name", SERVER)
    async with storage.open(target, server_name=SERVER, config=CONFIG) as store:
        for user in forgotten:
            await store.erase_user(user)
        yield store


async def _command(*arguments: str) -> None:
    """Run `room-storage`; raise RuntimeError with its output unless it ends with 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "storage", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"room-storage {arguments[0]}: {output.decode()[-2_000:]}")
