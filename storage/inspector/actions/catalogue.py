"""The actions that an operator needs while looking at a room. Each calls the library.

An action returns a sentence, or starts a task. To add one, add a function and an entry of ACTIONS.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from starlette.responses import RedirectResponse, Response

from storage import arguments as args
from storage.database.background import run_jobs
from storage.errors import InputError, StorageError
from storage.inspector import rendering
from storage.inspector.access import data_headers
from storage.inspector.visit import Page, Visit
from storage.maintenance.known_jobs import known_jobs
from storage.maintenance.verify.run import verify_room
from storage.store.facade import Store
from storage.streams.invalidate_caches import (
    INSTANCE_NAME,
    invalidate_caches,
    register_writer,
)
from storage.streams.position_poller import follow_writer

# --------------------------------------------------------------------------------------------------
# Actions that take long: one at a time, in the background, with a result to look at later.

logger: logging.Logger = logging.getLogger(__name__)

LINES_MAX: Final = 200
TASKS_KEPT: Final = 10

Work = AsyncGenerator[str, None]
"""Yields lines of a result while it works."""


@dataclass(slots=True)
class BackgroundTask:
    """A running or finished action: its title, the last lines, and how it ended."""

    title: str
    started_ms: int
    lines: list[str] = field(default_factory=list)
    line_count: int = 0
    state: str = "running"


class Tasks:
    """The tasks of one inspector."""

    def __init__(self) -> None:
        self.latest: list[BackgroundTask] = []
        self._running: asyncio.Task[None] | None = None

    def start(self, title: str, work: Work) -> BackgroundTask:
        """Start a task. `InputError` while another one runs."""
        if self._running is not None and not self._running.done():
            raise InputError("another action is running: wait for its end")
        task = BackgroundTask(title, time.time_ns() // 1_000_000)
        self.latest = [task, *self.latest[: TASKS_KEPT - 1]]
        self._running = asyncio.create_task(_run(task, work), name=f"inspector: {title}")
        return task

    async def ended(self) -> None:
        """Wait for the end of the running task, if there is one."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def close(self) -> None:
        """Cancel the running task and wait for its end."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


async def _run(task: BackgroundTask, work: Work) -> None:
    try:
        async with aclosing(work) as lines:
            async for line in lines:
                task.line_count += 1
                task.lines = [*task.lines[-LINES_MAX + 1 :], line]
    except StorageError as error:
        task.state = f"failed: {error}"
    except asyncio.CancelledError:
        task.state = "cancelled"
        raise
    except Exception:
        logger.exception("the action %s failed", task.title)
        task.state = "failed: see the log"
    else:
        task.state = "done"


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


# --------------------------------------------------------------------------------------------------
# The pages of actions: the list, a confirmation, and the request that runs one.
#
# A form carries a signature of the viewer, the action and its fields, which only the confirmation
# page gets. So a form of another site cannot run an action, and no one action can be turned into
# another. Where the browser says that a request comes from another site, it is refused as well.

if TYPE_CHECKING:
    from storage.inspector.application import Inspector

BODY_MAX: Final = 16_384
SIGNATURE: Final = "signature"


class ActionRefusedError(InputError):
    """The request does not come from a confirmation page of this viewer."""


def signature_of(inspector: "Inspector", viewer: str, name: str, fields: Fields) -> str:
    signed = "\0".join([viewer, name, *(f"{key}={fields[key]}" for key in sorted(fields))])
    return hmac.new(inspector.secret, signed.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _check_viewer(visit: Visit) -> None:
    if not visit.viewer.write:
        raise ActionRefusedError("you may look, and not change anything")


def _action(name: str | None) -> Action:
    action = ACTIONS.get(name or "")
    if action is None:
        raise InputError(f"no action is named {name!r}: {', '.join(ACTIONS)}")
    return action


async def listed(visit: Visit) -> Response:
    """Show the actions, and the tasks that they have started."""
    _check_viewer(visit)
    return visit.render(
        "actions.html",
        actions=ACTIONS,
        tasks=visit.inspector.tasks.latest,
        result=visit.text("result"),
    )


async def confirm(visit: Visit) -> Response:
    """Ask once more, with the effect in a sentence."""
    _check_viewer(visit)
    name = visit.required("action")
    action = _action(name)
    fields = {field: visit.required(field) for field in action.fields}
    signature = signature_of(visit.inspector, visit.viewer.name, name, fields)
    return visit.render(
        "confirm.html", name=name, action=action, fields=fields, signature=signature
    )


async def run(visit: Visit) -> Response:
    """Run an action, and return to the list."""
    _check_viewer(visit)
    form = await _body(visit)
    name = form.pop("action", "")
    action, signature = _action(name), form.pop(SIGNATURE, "")
    fields = {field: form.get(field, "") for field in action.fields}
    expected = signature_of(visit.inspector, visit.viewer.name, name, fields)
    if _is_foreign(visit) or not hmac.compare_digest(signature.encode(), expected.encode()):
        raise ActionRefusedError("the form is not from this page: open the action again")
    rendering.log_action(visit.viewer, name, fields)
    result = await action.run(visit.inspector, fields)
    return RedirectResponse(visit.links("/actions", result=result), 303, data_headers())


def _is_foreign(visit: Visit) -> bool:
    """Return whether the browser says that another site made the request."""
    headers = visit.request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_other_origin = origin is not None and origin.partition("://")[2] != headers.get("host")
    return site not in {None, "same-origin"} or is_other_origin


async def _body(visit: Visit) -> dict[str, str]:
    """Return the fields of a form. `InputError` for a large one."""
    body = bytearray()
    async for part in visit.request.stream():
        body += part
        if len(body) > BODY_MAX:
            raise InputError(f"the form has more than {BODY_MAX} bytes")
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


ACTION_ROUTES: Final[Mapping[str, Page]] = {"/actions": listed, "/actions/confirm": confirm}
POST_ROUTES: Final[Mapping[str, Page]] = {"/actions/run": run}
