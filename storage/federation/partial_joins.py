"""Joins with the members omitted (MSC3706), and the request for the rest.

The answer to send_join has the state without most members, and the servers in the room. The room
can be used at once; its state is partial until the members are fetched from another server.

Source: server-server API, `PUT /_matrix/federation/v2/send_join`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from storage import arguments as args
from storage.errors import InvalidIdentifier
from storage.event import Event
from storage.federation.remote import RemoteError
from storage.federation.room_task import RoomTask
from storage.federation.state_fetch import state_before
from storage.ids import EventId, ServerName, StateKey
from storage.maintenance import partial_state
from storage.persist import AppendResult, partial_marks
from storage.persist.plan.partial_state import MARK_IS_GONE
from storage.queries import partial_rooms
from storage.queries.partial_rooms import PartialRoom
from storage.streams.position_poller import follow_once

logger: Final = logging.getLogger(__name__)

MEMBER: Final = "m.room.member"
SERVERS_MAX: Final = 100_000


class OmittedMembers(NamedTuple):
    """The server that answered without the members, and the servers in the room."""

    origin: ServerName
    servers: Collection[ServerName]


def servers_of(response: Mapping[str, Any]) -> frozenset[ServerName] | None:
    """Return the servers in the room if the members are omitted, else None. `RemoteError`."""
    if not response.get("members_omitted"):
        return None
    found = response.get("servers_in_room")
    if not isinstance(found, list) or len(found) > SERVERS_MAX:
        raise RemoteError("the members are omitted, and the response has no list servers_in_room")
    try:
        return frozenset(map(args.server, found))
    except InvalidIdentifier as error:
        raise RemoteError(f"servers_in_room: {error}") from error


def cited_members(join: Event, events: Mapping[EventId, Event]) -> dict[StateKey, EventId]:
    """Return the memberships that a join names as auth events: the state before it has them."""
    return {
        events[one].key: one
        for one in join.auth_event_ids
        if one in events and events[one].type == MEMBER and events[one].state_key is not None
    }


async def left_before(task: RoomTask) -> dict[StateKey, EventId]:
    """Return the memberships of local users from an earlier stay: the state before the join."""
    async with task.store.database.connection() as conn:
        return await partial_rooms.own_members(conn, task.room_id, task.own_name)


class MarkLost(Exception):  # noqa: N818  # control flow, not an error
    """The mark of a join was dropped before the join was stored. Make it again."""


@dataclass(slots=True)
class JoinMark:
    """Whether a room is marked as partial for a join, and the append of that join."""

    is_set: bool
    appending: asyncio.Task[AppendResult] | None = None

    async def append(self, task: RoomTask, join: Event, state: Iterable[EventId]) -> AppendResult:
        """Store the join. If it is marked, a cancelled caller does not cancel it: see `marked`.

        `MarkLost` if another process has dropped the mark.
        """
        if not self.is_set:
            return (await task.append([join], state_before={join.event_id: state}))[join.event_id]
        self.appending = asyncio.create_task(task.append_partial(join, state))
        result = await asyncio.shield(self.appending)
        if result.reason == MARK_IS_GONE:
            raise MarkLost
        return result


@asynccontextmanager
async def marked(
    task: RoomTask, join: Event, mark: OmittedMembers | None
) -> AsyncIterator[JoinMark]:
    """Mark the room as partial while a join is stored; take it back if that fails.

    A cancelled append may still be written, so the mark stays until the append has ended. It also
    stays if a second cancellation ends that wait. Without ``mark``, the room is not marked.
    """
    if mark is None:
        yield JoinMark(is_set=False)
        return
    database = task.store.database
    async with database.transaction() as conn:
        is_marked = await partial_marks.begin(conn, task.room_id, join.event_id, *mark)
    made = JoinMark(is_marked)
    try:
        yield made
    except BaseException:
        if made.appending is not None:
            await asyncio.wait([made.appending])
        async with database.transaction() as conn:
            await partial_marks.abandon(conn, task.room_id, join.event_id)
        raise


async def complete(task: RoomTask, room: PartialRoom) -> bool:
    """Fetch the members of a partial room, and complete it; return whether that was possible.

    Its origin is asked first, then the other servers in the room.
    """
    join = (await task.loaded([room.join_event_id])).get(room.join_event_id)
    if join is None:
        return False
    found = await state_before(task, await task.servers(room.origin), join)
    if found is None or not found.allows:
        logger.info(
            "the members of a room are still missing: %s",
            task.requests.reason(),
            extra={"room_id": task.room_id},
        )
        return False
    store = task.store
    is_complete = await partial_state.complete(
        store.database, task.room_id, found.ids, server_name=task.own_name
    )
    await follow_once(store.database, store.streams)  # wakes the syncs of this process now
    return is_complete
