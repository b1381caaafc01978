"""A client of sliding sync: it keeps its `pos`, and merges the responses."""

from collections.abc import Iterable
from typing import Any

from storage import (
    RoomSubscription,
    SlidingFilter,
    SlidingList,
    SlidingRoom,
    SlidingSync,
    SlidingSyncRequest,
    Store,
)
from storage.ids import RoomId, StateKey, UserId

EVERYTHING: list[StateKey] = [("*", "*")]


class SlidingClient:
    """One connection of a device."""

    def __init__(
        self, store: Store, user_id: str, *, device_id: str = "DEVICE", conn_id: str = ""
    ) -> None:
        self.store = store
        self.user_id = user_id
        self.device_id = device_id
        self.conn_id = conn_id
        self.pos: str | None = None

    async def sync(
        self,
        *ranges: tuple[int, int],
        limit: int = 10,
        required: Iterable[StateKey] = (),
        excluded: Iterable[StateKey] = (),
        filters: SlidingFilter | None = None,
        subscriptions: Iterable[str] = (),
        timeout_ms: int = 0,
        ignored: Iterable[UserId] = (),
        **how: Any,
    ) -> SlidingSync:
        """Send a request with one list, unless there are no ranges, and with subscriptions."""
        state, without = tuple(required), tuple(excluded)
        lists = {}
        if ranges:
            lists["all"] = SlidingList(ranges, limit, state, filters or SlidingFilter(), without)
        request = SlidingSyncRequest(
            self.conn_id,
            lists,
            {RoomId(room): RoomSubscription(limit, state, without) for room in subscriptions},
            **how,
        )
        return await self.request(request, timeout_ms=timeout_ms, ignored=list(ignored))

    async def request(
        self, request: SlidingSyncRequest, *, timeout_ms: int = 0, **how: Any
    ) -> SlidingSync:
        """Send a request, and keep its `pos`."""
        found = await self.store.sliding_sync(
            self.user_id,
            request,
            device_id=self.device_id,
            pos=self.pos,
            timeout_ms=timeout_ms,
            **how,
        )
        self.pos = found.pos
        return found


def state_of(room: SlidingRoom) -> set[StateKey]:
    return {(event.type, event.state_key or "") for event in room.required_state}
