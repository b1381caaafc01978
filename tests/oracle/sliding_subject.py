"""The subjects of random sliding syncs: stores, or the oracle itself, perhaps with a mistake."""

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from storage import SlidingRoom, SlidingSync, SlidingSyncRequest, Store
from storage.errors import UnknownPos
from storage.ids import EventId, RoomId, StateKey, UserId
from tests.oracle.oracle import Oracle
from tests.oracle.sliding import (
    MEMBER,
    OUTSIDE,
    Membership,
    Personal,
    SlidingOracle,
    Snapshot,
    Wanted,
    is_lazy,
    matches,
    mentioned,
)
from tests.oracle.sliding_checks import expected, next_snapshot
from tests.oracle.sliding_client import FoundRoom, FoundSync
from tests.oracle.sliding_rooms import Delivery
from tests.oracle.store_subject import answer_of
from tests.oracle.syncing import Answer, OracleSyncRequest, RoomAnswer, sync
from tests.oracle.unread import unread

SQL_POSITIONS: Final = """
SELECT e.event_id, e.stream_ordering, o.stream_id AS outside
FROM rooms r
JOIN events e USING (room_nid)
LEFT JOIN outlier_memberships o USING (event_nid)
WHERE r.room_id = ANY($1::text[])
"""


class PositionOfEventRow(NamedTuple):
    """The position of an event: in the timeline, and as a membership outside of it."""

    event_id: str
    stream_ordering: int | None
    outside: int | None


class SlidingSubject(Protocol):
    async def append(self, delivery: Delivery) -> None:
        """Append what the oracle has. Raise AssertionError for another result."""

    async def account(self, user_id: str, kind: str, content: Any, room_id: RoomId | None) -> None:
        """Set account data."""

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        """Return a response. Raise `UnknownPos`."""

    async def sync(self, asked: OracleSyncRequest) -> Answer:
        """Return a response of /sync. ``since`` is what the last one has returned."""

    async def forget(self, user_id: str, room_id: RoomId) -> None:
        """Let a user forget a room that they have left."""

    async def receipt(self, user_id: str, room_id: RoomId, event_id: EventId) -> None:
        """Set a receipt."""

    async def unread(self, user_id: str, read: Mapping[RoomId, EventId]) -> dict[RoomId, int]:
        """Return the unread counts. ``read``: the events that have a receipt."""

    async def positions(self, room_ids: Sequence[RoomId]) -> dict[int, int]:
        """Return the subject's positions by the arrivals of the oracle."""


class StoreSliding:
    """Some stores on one database, any of which does what comes next."""

    def __init__(
        self,
        stores: Sequence[Store],
        oracle: Oracle,
        rng: random.Random,
        personal: Mapping[str, Personal],
    ) -> None:
        self.stores, self.oracle, self.rng, self.personal = stores, oracle, rng, personal

    @property
    def store(self) -> Store:
        return self.rng.choice(self.stores)

    async def append(self, delivery: Delivery) -> None:
        results = await self.store.append(
            delivery.pdus, origin=delivery.origin, state_before=delivery.given
        )
        assert [(result.event_id, result.outcome) for result in results] == delivery.expected

    async def account(self, user_id: str, kind: str, content: Any, room_id: RoomId | None) -> None:
        await self.store.account_data.set(UserId(user_id), kind, content, room_id=room_id)

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        how: dict[str, Any] = {"device_id": device_id, "pos": pos}
        ignored = list(map(UserId, self.personal[user_id].ignored))
        return plain(await self.store.sliding_sync(user_id, request, ignored=ignored, **how))

    async def sync(self, asked: OracleSyncRequest) -> Answer:
        found = await self.store.sync(
            UserId(asked.user_id),
            since=asked.since,  # type: ignore[arg-type]  # the token of the store
            timeline_limit=asked.limit,
            filter=asked.wanted,
            ignored=list(map(UserId, asked.ignored)),
        )
        return answer_of(found)

    async def forget(self, user_id: str, room_id: RoomId) -> None:
        await self.store.forget(user_id, room_id)

    async def receipt(self, user_id: str, room_id: RoomId, event_id: EventId) -> None:
        await self.store.receipts.set(room_id, "m.read", UserId(user_id), event_id, {})

    async def unread(self, user_id: str, read: Mapping[RoomId, EventId]) -> dict[RoomId, int]:
        del read  # it has them
        ignored = list(map(UserId, self.personal[user_id].ignored))
        found = await self.store.unread(user_id, ignored=ignored)
        return {room_id: one.total for room_id, one in found.items()}

    async def positions(self, room_ids: Sequence[RoomId]) -> dict[int, int]:
        async with self.stores[0].database.connection() as conn:
            rows = await conn.fetch(SQL_POSITIONS, list(room_ids), row=PositionOfEventRow)
        held = {EventId(row.event_id): self.oracle.held[EventId(row.event_id)] for row in rows}
        return {
            held[EventId(row.event_id)].arrival: (
                row.outside if held[EventId(row.event_id)].outlier else row.stream_ordering
            )
            or 0
            for row in rows
        }


def plain(answer: SlidingSync) -> FoundSync:
    counts = {name: one.count for name, one in answer.lists.items()}
    return FoundSync(
        answer.pos, counts, {room_id: plain_room(one) for room_id, one in answer.rooms.items()}
    )


def plain_room(room: SlidingRoom) -> FoundRoom:
    """Return the room with the facts that it says to have."""
    facts: dict[str, Any] = {}
    for name in room.changed:
        if name == "counts":
            facts["joined_count"] = room.joined_count
            facts["invited_count"] = room.invited_count
        elif name == "heroes":
            heroes = room.heroes
            facts[name] = None if heroes is None else tuple(hero.user_id for hero in heroes)
        else:
            facts[name] = getattr(room, name)
    return FoundRoom(
        initial=room.initial,
        expanded=room.expanded_timeline,
        limited=room.limited,
        membership=room.membership,
        timeline=[event.event_id for event in room.timeline],
        num_live=room.num_live,
        bump=room.bump_stamp,
        state={(one.type, one.state_key or ""): one.event_id for one in room.required_state},
        removed=set(room.removed_state),
        facts=facts,
        stripped=list(room.stripped_state or ()),
        lists=frozenset(room.lists),
    )


class OracleSliding:
    """The oracle's own responses. Classes derived from this one make a mistake each."""

    def __init__(self, oracle: Oracle, personal: Mapping[str, Personal]) -> None:
        self.oracle, self.personal = oracle, personal
        self.snapshots: dict[str, Snapshot] = {}
        self.numbers = itertools.count(1)

    async def append(self, delivery: Delivery) -> None:
        """It has the events already."""

    async def account(self, user_id: str, kind: str, content: Any, room_id: RoomId | None) -> None:
        """It has the account data already."""

    async def positions(self, room_ids: Sequence[RoomId]) -> dict[int, int]:
        del room_ids
        return {held.arrival: held.arrival for held in self.oracle.held.values()}

    async def forget(self, user_id: str, room_id: RoomId) -> None:
        """It has forgotten the room already."""

    async def receipt(self, user_id: str, room_id: RoomId, event_id: EventId) -> None:
        """It has the receipt already."""

    async def unread(self, user_id: str, read: Mapping[RoomId, EventId]) -> dict[RoomId, int]:
        ignored = self.personal[user_id].ignored
        return {
            room_id: unread(self.oracle, room_id, user_id, self.receipts(room_id, read), ignored)
            for room_id in self.oracle.versions
            if self.oracle.membership_in(self.oracle.current_state(room_id), user_id) == "join"
        }

    def receipts(self, room_id: RoomId, read: Mapping[RoomId, EventId]) -> list[EventId]:
        return [read[room_id]] if room_id in read else []

    async def sync(self, asked: OracleSyncRequest) -> Answer:
        how: dict[str, Any] = {"limit": asked.limit, "wanted": asked.wanted}
        return sync(self.oracle, asked.user_id, asked.since, ignored=asked.ignored, **how)

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        del device_id
        if pos is not None and pos not in self.snapshots:
            raise UnknownPos(pos, "it is not kept")
        sent = Snapshot() if pos is None else self.snapshots[pos]
        oracle = SlidingOracle(self.oracle, user_id, self.personal[user_id])
        due = expected(oracle, request, sent)
        rooms = {
            room_id: room
            for room_id, wanted in due.wanted.items()
            if (room := self.room(oracle, room_id, wanted, sent)) is not None
        }
        rooms |= {room_id: self.ended(oracle, room_id) for room_id in due.ended}
        found = FoundSync(f"{next(self.numbers)}", due.counts, rooms)
        self.snapshots[found.pos] = next_snapshot(oracle, due, found, sent)
        return found

    def room(
        self, oracle: SlidingOracle, room_id: RoomId, wanted: Wanted, sent: Snapshot
    ) -> FoundRoom | None:
        """Return what is new of a room; None: nothing."""
        own, before = oracle.membership(room_id), sent.rooms.get(room_id)
        if own is None or oracle.hides(own):
            return None
        initial = before is None or (before.membership != "join" and own.stay > before.upto)
        found = FoundRoom(
            initial=initial,
            expanded=False,
            limited=False,
            membership=own.name,
            timeline=[],
            num_live=0,
            bump=oracle.bump(room_id, own),
            state={},
            removed=(),
            facts={},
            stripped=["stripped"] if own.name in OUTSIDE else [],
            lists=frozenset(),
        )
        if own.name not in OUTSIDE and own.was_joined:
            found = self.inside(oracle, room_id, own, wanted, sent, found)
        elif not initial and before is not None and own.position <= before.upto:
            return None
        moved = before is not None and before.membership != own.name
        return found if found.has_news or moved else None

    def ended(self, oracle: SlidingOracle, room_id: RoomId) -> FoundRoom:
        """Return the end of a forgotten room."""
        own = oracle.membership(room_id)
        assert own is not None
        state = {} if own.event_id is None else {(MEMBER, oracle.user_id): own.event_id}
        return FoundRoom(
            initial=True,
            expanded=False,
            limited=False,
            membership=own.name,
            timeline=[],
            num_live=0,
            bump=None,
            state=state,
            removed=(),
            facts={},
            stripped=[],
            lists=frozenset(),
        )

    def inside(
        self,
        oracle: SlidingOracle,
        room_id: RoomId,
        own: Membership,
        wanted: Wanted,
        sent: Snapshot,
        found: FoundRoom,
    ) -> FoundRoom:
        before, end = sent.rooms.get(room_id), oracle.end(own)
        upto = 0 if before is None or found.initial else before.upto
        grown = before is not None and wanted.limit > before.wanted.limit
        rows = oracle.timeline(room_id, 0 if grown else upto, end, wanted.limit, sent.upto)
        then, now = oracle.state(room_id, min(upto, end)), oracle.state(room_id, end)
        user, held = oracle.user_id, oracle.oracle
        people = mentioned(held, rows.events) if is_lazy(wanted.patterns) else set()
        is_dm = room_id in oracle.personal.direct
        is_due = before is None or found.initial or then != now or is_dm != before.is_dm
        old = frozenset() if before is None or found.initial else before.wanted.patterns
        limited = rows.limited or found.initial
        state = {
            key: event_id
            for key, event_id in now.items()
            if (key[0] == MEMBER and key[1] in people)
            or (then.get(key) != event_id and self._is_due(key, wanted, user, limited))
            or (matches(wanted.patterns, key, user) and not matches(old, key, user))
        }
        return replace(
            found,
            timeline=rows.events,
            limited=rows.limited,
            num_live=rows.live,
            expanded=any(held.get(one).arrival <= upto for one in rows.events),
            state=state,
            removed=set() if found.initial else self.removed(then, now),
            facts=oracle.facts(room_id) if is_due else {},
        )

    def _is_due(self, key: StateKey, wanted: Wanted, user: str, limited: bool) -> bool:
        lazily = key[0] == MEMBER and is_lazy(wanted.patterns)
        return matches(wanted.patterns, key, user) or (lazily and not limited)

    def removed(
        self, then: Mapping[StateKey, EventId], now: Mapping[StateKey, EventId]
    ) -> Collection[StateKey]:
        return set(then) - set(now)


class ForgetsRemovedState(OracleSliding):
    def removed(
        self, then: Mapping[StateKey, EventId], now: Mapping[StateKey, EventId]
    ) -> Collection[StateKey]:
        del then, now
        return ()


class HidesGaps(OracleSliding):
    """A timeline with a gap before it is not limited."""

    def inside(self, *given: Any) -> FoundRoom:
        return replace(super().inside(*given), limited=False)


class LosesAnEvent(OracleSliding):
    """The first of several new ones."""

    def inside(self, *given: Any) -> FoundRoom:
        found = super().inside(*given)
        return found if found.initial else replace(found, timeline=found.timeline[-1:])


class ForgetsReplays(OracleSliding):
    """A connection has its last response only."""

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        found = await super().look(user_id, device_id, request, pos)
        if pos is not None:
            self.snapshots[pos] = self.snapshots[found.pos]
        return found


class KeepsTheName(OracleSliding):
    """Of a room whose name has changed."""

    def inside(self, *given: Any) -> FoundRoom:
        found = super().inside(*given)
        facts = {name: value for name, value in found.facts.items() if name != "name"}
        return found if found.initial else replace(found, facts=facts)


class ReturnsEverything(OracleSliding):
    """Rooms are returned again and again, from the beginning."""

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        del pos
        return await super().look(user_id, device_id, request, None)


class HearsTheIgnored(OracleSliding):
    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        everybody = {user: replace(one, ignored=()) for user, one in self.personal.items()}
        self.personal, kept = everybody, self.personal
        try:
            return await super().look(user_id, device_id, request, pos)
        finally:
            self.personal = kept


class ForgetsLeaves(OracleSliding):
    """The other sync has no rooms that the user has left, or was removed from."""

    async def sync(self, asked: OracleSyncRequest) -> Answer:
        return replace(await super().sync(asked), leave={})


class SyncsFromTheLastStay(OracleSliding):
    """The other sync has nothing from between two tokens if the user came back in between."""

    async def sync(self, asked: OracleSyncRequest) -> Answer:
        found = await super().sync(asked)
        back = [room_id for room_id, room in found.join.items() if self._is_back(room, asked)]
        return replace(found, join={one: found.join[one] for one in found.join if one not in back})

    def _is_back(self, room: RoomAnswer, asked: OracleSyncRequest) -> bool:
        own = [
            event.content.get("membership")
            for one in room.timeline
            if (event := self.oracle.get(one).event).is_state
            and event.key == (MEMBER, asked.user_id)
        ]
        return asked.since is not None and "join" in own and {"leave", "ban"} & {*own} != set()


class KeepsForgottenRooms(OracleSliding):
    """A room that the user has forgotten does not end."""

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        found = await super().look(user_id, device_id, request, pos)
        gone = {room_id for room_id, own in self.oracle.forgotten if own == user_id}
        rooms = {one: room for one, room in found.rooms.items() if one not in gone}
        return replace(found, rooms=rooms)


class CountsTheIgnored(OracleSliding):
    """A list counts the invites by ignored users."""

    async def look(
        self, user_id: str, device_id: str, request: SlidingSyncRequest, pos: str | None
    ) -> FoundSync:
        found = await super().look(user_id, device_id, request, pos)
        oracle = SlidingOracle(self.oracle, user_id, self.personal[user_id])
        own = (oracle.membership(room_id) for room_id in self.oracle.versions)
        hidden = sum(one is not None and oracle.hides(one) for one in own)
        counts = {name: count + hidden for name, count in found.counts.items()}
        return replace(found, counts=counts)


class ForgetsReceipts(OracleSliding):
    def receipts(self, room_id: RoomId, read: Mapping[RoomId, EventId]) -> list[EventId]:
        del room_id, read
        return []


MISTAKES: Final = (
    KeepsForgottenRooms,
    CountsTheIgnored,
    ForgetsReceipts,
    HearsTheIgnored,
    ForgetsLeaves,
    SyncsFromTheLastStay,
    ForgetsRemovedState,
    HidesGaps,
    LosesAnEvent,
    ForgetsReplays,
    KeepsTheName,
    ReturnsEverything,
)
