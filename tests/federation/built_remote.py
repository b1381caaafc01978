"""A `Remote` that answers from a built room in memory: every server has all of its events."""

import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from storage import EventId
from storage.event import parse
from storage.federation import RemoteError
from storage.testing import BuiltEvent, RoomBuilder
from storage.testing.assembly import reference_hash_text
from storage.testing.graph import merge
from storage.testing.model import State
from tests.federation.peers import published_keys

Json = dict[str, Any]
Fault = Callable[[Json], Awaitable[Json]]
GENERATIONS: Final = 3


class BuiltRemote:
    """The answers of all servers. ``faults`` change those of a (server, request).

    `get_missing_events` depends on the latest events alone, so that two stores with other forward
    extremities get the same.
    """

    def __init__(self, room: RoomBuilder) -> None:
        self.room = room
        self.faults: dict[tuple[str, str], Fault] = {}
        self.calls: Counter[tuple[str, str]] = Counter()

    async def _answer(self, server: str, request: str, body: Json) -> Json:
        self.calls[server, request] += 1
        fault = self.faults.get((server, request)) or self.faults.get(("*", request))
        return body if fault is None else await fault(body)

    def _node(self, event_id: str) -> BuiltEvent:
        try:
            return self.room.event(event_id)
        except KeyError as error:
            raise RemoteError(f"404: {event_id}") from error

    def _jsons(self, event_ids: Iterable[str]) -> list[Json]:
        nodes = sorted(map(self._node, event_ids), key=lambda one: (one.topological, one.event_id))
        return [one.json for one in nodes]

    def chain(self, event_ids: Iterable[EventId]) -> list[EventId]:
        return sorted(self.room.graph.auth_chain(event_ids))

    async def get_missing_events(
        self, server: str, room_id: str, *, latest: Sequence[EventId], limit: int, **_: Any
    ) -> Json:
        assert room_id
        front, found = set(latest), list[EventId]()
        for _generation in range(zlib.crc32("".join(sorted(latest)).encode()) % GENERATIONS):
            front = {one for event_id in front for one in self._node(event_id).prev_events}
            found += [one for one in sorted(front) if one not in found and one not in latest]
        return await self._answer(
            server, "get_missing_events", {"events": self._jsons(found[:limit])}
        )

    async def event(self, server: str, event_id: EventId) -> Json:
        return await self._answer(server, "event", {"pdus": self._jsons([event_id])})

    async def state_ids(self, server: str, room_id: str, event_id: EventId) -> Json:
        assert room_id
        ids = list(self._node(event_id).state_before.values())
        body = {"pdu_ids": sorted(ids), "auth_chain_ids": self.chain(ids)}
        return await self._answer(server, "state_ids", body)

    async def state(self, server: str, room_id: str, event_id: EventId) -> Json:
        assert room_id
        ids = list(self._node(event_id).state_before.values())
        body = {"pdus": self._jsons(ids), "auth_chain": self._jsons(self.chain(ids))}
        return await self._answer(server, "state", body)

    async def backfill(
        self, server: str, room_id: str, event_ids: Sequence[EventId], *, limit: int
    ) -> Json:
        assert room_id
        found, front = dict.fromkeys(event_ids), list(event_ids)
        while front and len(found) < limit:
            front = [one for event_id in front for one in self._node(event_id).prev_events]
            found |= dict.fromkeys(front)
        return await self._answer(
            server, "backfill", {"pdus": self._jsons(list(found)[:limit])[::-1]}
        )

    async def event_auth(self, server: str, room_id: str, event_id: EventId) -> Json:
        assert room_id
        body = {"auth_chain": self._jsons(self.chain([event_id]))}
        return await self._answer(server, "event_auth", body)

    async def server_keys(self, server: str) -> Json:
        return published_keys(server)

    def send_join(self, join: BuiltEvent) -> Json:
        """The whole answer."""
        state = list(join.state_before.values())
        return {
            "state": self._jsons(state),
            "auth_chain": self._jsons(self.chain([*state, join.event_id])),
            "event": join.json,
        }

    def servers(self, state: State) -> list[str]:
        """The servers with a joined user."""
        return sorted(
            {
                user.partition(":")[2]
                for (type_, user), _ in state.items()
                if type_ == "m.room.member" and self.room.graph.membership(state, user) == "join"
            }
        )


def adopt(room: RoomBuilder, pdu: bytes) -> BuiltEvent:
    """Add an event that a store has made to a built room, as a head."""
    event = parse(pdu, room.version)
    parents = tuple(event.prev_event_ids)
    before = merge(room.graph, parents, exact=True).state
    node = BuiltEvent(
        event_id=event.event_id,
        room_id=event.room_id,
        room_version=room.version,
        pdu=pdu,
        type=event.type,
        sender=event.sender,
        state_key=event.state_key,
        prev_events=parents,
        auth_events=tuple(event.auth_event_ids),
        depth=event.depth,
        topological=1 + max(room.event(one).topological for one in parents),
        origin_server_ts=event.origin_server_ts,
        state_before=before,
        state_after=before
        if event.state_key is None
        else before.update({event.key: event.event_id}),
    )
    room.graph.add(node, event.content)
    if int(room.version) <= 2:
        room.graph.reference_hashes[node.event_id] = reference_hash_text(node.json, room.version)
    room.heads = room.graph.maximal((*room.heads, node.event_id))
    return node


async def fail(_: Json) -> Json:
    raise RemoteError("500: out of order")
