"""`RoomTask`: one piece of work in one room, with its budget of requests.

It reads PDUs of other servers into checked events, stores them, and knows which servers to ask.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from storage.auth import check_auth_events
from storage.errors import AuthDenied
from storage.event import Event, parse
from storage.event.model import auth_ids_of
from storage.federation.keys import KeyRing
from storage.federation.remote import ReceiverLimits
from storage.federation.requests import TaskRequests
from storage.ids import EventId, RoomId, ServerName
from storage.persist import AppendResult, Origin, receive
from storage.persist.append import AppendOptions, append
from storage.persist.receive import Pdu
from storage.queries.events import size_of
from storage.queries.federation import StoredKey, servers_by_size, stored_keys
from storage.store.facade import Store
from storage.turns import Turns, in_turns


class ReadEvents(NamedTuple):
    """Events that passed a check, and the results of those that did not, by id.

    ``foreign`` are those of the refused that are of another room.
    """

    events: dict[EventId, Event]
    refused: dict[EventId, AppendResult]
    foreign: frozenset[EventId] = frozenset()

    def restricted(self, event_ids: Collection[EventId]) -> "ReadEvents":
        return ReadEvents(
            {event_id: event for event_id, event in self.events.items() if event_id in event_ids},
            {
                event_id: refusal
                for event_id, refusal in self.refused.items()
                if event_id in event_ids
            },
        )


class Authorised(NamedTuple):
    """Events that their auth events allow, and why the others are left out."""

    events: dict[EventId, Event]
    left_out: dict[EventId, str]


class RoomTask:
    """A task in a room of a version; the room need not be stored yet."""

    def __init__(
        self,
        store: Store,
        room: tuple[RoomId, str],
        keys: KeyRing,
        requests: TaskRequests,
        limits: ReceiverLimits,
    ) -> None:
        self.store = store
        self.room_id, self.room_version = room
        self.requests = requests
        self.limits = limits
        self._keys = keys

    async def parse(self, pdus: Sequence[Pdu]) -> ReadEvents:
        """Parse PDUs; those without a readable id are dropped. They may be of another room."""
        read = ReadEvents({}, {})
        turns = Turns()
        for pdu in pdus:
            event = receive.read(pdu, receive.header_of(pdu), self.room_version)
            await turns.took(receive.work_of(pdu, event))
            if isinstance(event, Event):
                read.events[event.event_id] = event
            elif event.event_id is not None:
                read.refused[event.event_id] = event
        return read

    async def verify(self, events: Mapping[EventId, Event]) -> dict[EventId, AppendResult]:
        """Return a refusal for each event that is not signed as it must be."""
        return await self._keys.check(events.values(), self.requests.seconds_left)

    def lacks_keys_of(self, event: Event) -> bool:
        """Return whether a signature could not be checked, as its server could not be asked."""
        return self._keys.lacks_keys_of(event)

    async def read(
        self, pdus: Sequence[Pdu], *, only: Collection[EventId] | None = None
    ) -> ReadEvents:
        """Parse PDUs, and check that they are of this room and signed; ``only`` these ids."""
        parsed = await self.parse(pdus)
        if only is not None:
            parsed = parsed.restricted(only)
        foreign = {
            event_id: self._of_other_room(event)
            for event_id, event in parsed.events.items()
            if event.room_id != self.room_id
        }
        here = {
            event_id: event for event_id, event in parsed.events.items() if event_id not in foreign
        }
        refused = foreign | await self.verify(here)
        events = {event_id: event for event_id, event in here.items() if event_id not in refused}
        return ReadEvents(events, parsed.refused | refused, frozenset(foreign))

    def _of_other_room(self, event: Event) -> AppendResult:
        return AppendResult(
            event.event_id, "invalid", f"it is of room {event.room_id}, not {self.room_id}"
        )

    async def append(
        self,
        events: Iterable[Event],
        *,
        origin: Origin = "live",
        state_before: Mapping[EventId, Iterable[EventId]] | None = None,
    ) -> dict[EventId, AppendResult]:
        """Store events that `read` has checked; return their results by id."""
        batch = list(events)
        results = await self.store.append(
            [event.raw for event in batch],
            room_version=self.room_version,
            origin=origin,
            state_before=state_before,
            room_versions={self.room_id: self.room_version},
        )
        return {event.event_id: result for event, result in zip(batch, results, strict=True)}

    async def append_chain(
        self, events: Mapping[EventId, Event], of: Event
    ) -> dict[EventId, AppendResult]:
        """Store events of an auth chain as outliers; return their results by id.

        Nothing is stored that the auth rules refuse, unless ``of`` depends on it: it is rejected
        then, and so is ``of``. Without it, ``of`` would miss it for ever, and its children ``of``.
        """
        allowed = (await self.authorise(events)).events
        chosen = {**allowed, **_chain_of(of, events)}
        return await self.append(chosen.values(), origin="outlier") if chosen else {}

    async def append_partial(self, join: Event, state_before: Iterable[EventId]) -> AppendResult:
        """Store a join whose state lacks members, if its mark makes the room partial."""
        options = AppendOptions(
            self.room_version,
            "live",
            {join.event_id: list(state_before)},
            None,
            None,
            room_versions={self.room_id: self.room_version},
            partial_join=join.event_id,
        )
        with self.store.reads.writing():
            [result] = await append(self.store.database, self.store.writer, [join.raw], options)
        return result

    async def stored(self, event_ids: Iterable[EventId]) -> dict[EventId, StoredKey]:
        ids = list(event_ids)
        if not ids:
            return {}
        async with self.store.database.connection() as conn:
            return await stored_keys(conn, ids)

    async def loaded(self, event_ids: Iterable[EventId]) -> dict[EventId, Event]:
        """Return those of the events that are stored in this room, parsed."""
        stored_events = await self.store.events(list(event_ids))
        return {
            event.event_id: parse(event.raw, self.room_version)
            async for event in in_turns(stored_events.values(), size_of)
            if event.room_id == self.room_id
        }

    async def servers(self, *first: ServerName) -> list[ServerName]:
        """Return the servers to ask: these first, then those with the most users in the room."""
        async with self.store.database.connection() as conn:
            joined = await servers_by_size(conn, self.room_id, self.limits.servers_max + 1)
        ordered = [server for server in dict.fromkeys([*first, *joined]) if server != self.own_name]
        return ordered[: self.limits.servers_max]

    @property
    def own_name(self) -> str:
        return self.store.server_name

    async def authorise(self, events: Mapping[EventId, Event]) -> Authorised:
        """Check events by their auth events, which are among them or stored and accepted.

        So nothing is stored that the auth rules refuse, and no event without its auth chain.
        """
        ordered = list(events.values())
        cited = {event_id for event in ordered for event_id in auth_ids_of(event)} - events.keys()
        stored = await self.stored(cited)
        usable = [event_id for event_id, key in stored.items() if key.is_authorised]
        auth_events = await self.loaded(usable)
        done = Authorised({}, {})
        async for index in in_turns(receive.in_order(ordered)):
            event = ordered[index]
            try:
                check_auth_events(event, auth_events, frozenset())
            except AuthDenied as denied:
                done.left_out[event.event_id] = f"{denied.rule}: {denied.reason}"
            else:
                auth_events[event.event_id] = done.events[event.event_id] = event
        return done


def _chain_of(event: Event, events: Mapping[EventId, Event]) -> dict[EventId, Event]:
    chain: dict[EventId, Event] = {}
    queue = [*auth_ids_of(event)]
    while queue:
        event_id = queue.pop()
        if event_id in events and event_id not in chain:
            chain[event_id] = events[event_id]
            queue.extend(auth_ids_of(events[event_id]))
    return chain
