"""The actions that an operator needs while looking at a room. Each calls the library.

An action returns a sentence, or starts a task. To add one, add a function and an entry of ACTIONS.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from storage import arguments as args
from storage.database.background import run_jobs
from storage.inspector.actions.tasks import Work
from storage.maintenance.known_jobs import known_jobs
from storage.maintenance.verify.run import verify_room
from storage.store.facade import Store
from storage.streams.invalidate_caches import (
    INSTANCE_NAME,
    invalidate_caches,
    register_writer,
)
from storage.streams.position_poller import follow_writer

if TYPE_CHECKING:
    from storage.inspector.application import Inspector

Fields = Mapping[str, str]
CACHES: Final = ("events", "current_state", "rooms_of")


@dataclass(frozen=True, slots=True)
class Action:
    """An action: what it does, in a sentence for the confirmation, and its fields with labels."""

    title: str
    effect: str
    fields: Mapping[str, str]
    run: "Callable[[Inspector, Fields], Awaitable[str]]"


async def readmit(inspector: "Inspector", fields: Fields) -> str:
    """Accept an event that this server refused."""
    result = await inspector.store.readmit(args.event(fields["event"]))
    return f"{result.event_id} is {result.outcome} at position {result.stream_ordering}."


async def retry_gaps(inspector: "Inspector", fields: Fields) -> str:
    """End the pauses of the missing events that a server did not return."""
    server = args.server(fields["server"])
    await inspector.store.server_up(server)
    return f"Missing events that {server} did not return may be requested again now."


async def drop_caches(inspector: "Inspector", _: Fields) -> str:
    """Empty the caches of reads in every process."""
    store = inspector.store
    with store.reads.writing():
        await register_writer(store.database)
        async with store.database.transaction() as conn:
            for name in CACHES:
                await invalidate_caches(conn, name)
        async with store.database.connection() as conn:
            await follow_writer(conn, store.streams, "caches", INSTANCE_NAME)
    return f"The caches {', '.join(CACHES)} are emptied in every process."


async def begin_verify(inspector: "Inspector", fields: Fields) -> str:
    """Compute what is derived from the events of a room again, and compare."""
    room_id = args.room(fields["room"])
    inspector.tasks.start(f"verify {room_id}", _findings(inspector.store, room_id))
    return "The verification has begun. Its findings are listed below."


async def _findings(store: Store, room_id: str) -> Work:
    snapshot = store.database.transaction(isolation="repeatable_read", readonly=True)
    async with snapshot as conn:
        async for finding in verify_room(conn, room_id, server_name=store.server_name):
            yield str(finding)


async def redo_jobs(inspector: "Inspector", _: Fields) -> str:
    """Run the background jobs of migrations that are not done."""
    inspector.tasks.start("background jobs", _batches(inspector.store))
    return "The jobs have begun. Their progress is listed below."


async def _batches(store: Store) -> Work:
    async with aclosing(run_jobs(store.database, known_jobs())) as rows:
        async for row in rows:
            yield f"{row.name}: {row.rows_done:,} rows done"


ACTIONS: Final[Mapping[str, Action]] = {
    "readmit": Action(
        "Readmit an event",
        "The event that this server refused becomes visible, at a new position. Clients get it.",
        {"event": "Event id"},
        readmit,
    ),
    "retry-gaps": Action(
        "Retry missing events",
        "The pauses after failed requests to the server end. The homeserver requests them again.",
        {"server": "Server name"},
        retry_gaps,
    ),
    "drop-caches": Action(
        "Drop caches",
        "Each process reads events, current states and rooms of users from the database again.",
        {},
        drop_caches,
    ),
    "verify": Action(
        "Verify a room",
        "All derived data of the room is computed again and compared. It reads the room in one"
        " long transaction, and changes nothing.",
        {"room": "Room id"},
        begin_verify,
    ),
    "jobs": Action(
        "Run background jobs",
        "The data steps that migrations have deferred run in small batches, until they are done.",
        {},
        redo_jobs,
    ),
}
