"""One connection of a sliding sync at Synapse, and one at a store with the same events.

Both get the same requests. `DIFFERENCES` are the differences that are intended.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from storage import (
    RoomSubscription,
    SlidingFilter,
    SlidingList,
    SlidingRoom,
    SlidingSync,
    SlidingSyncRequest,
    Store,
)
from storage.ids import RoomId, StateKey
from tests.homeserver.processes import User

API: Final = "/_matrix/client/unstable/org.matrix.simplified_msc3575"
DEVICE: Final = "A"


@dataclass
class SlidingPair:
    """``user`` is logged in at Synapse. The request is in the form of the endpoint."""

    user: User
    store: Store
    conn_id: str
    body: dict[str, Any] = field(default_factory=dict)
    our_pos: str | None = None
    their_pos: str | None = None

    async def look(self) -> tuple[SlidingSync, Any]:
        """Send the request to both, from where the last one ended."""
        query = {} if self.their_pos is None else {"pos": self.their_pos}
        theirs = await self.user.call("POST", "/sync", self.body, api=API, timeout=0, **query)
        request = request_of(self.body)
        ours = await self.store.sliding_sync(
            self.user.user_id, request, device_id=DEVICE, pos=self.our_pos
        )
        self.our_pos, self.their_pos = ours.pos, theirs["pos"]
        return ours, theirs


def request_of(body: Mapping[str, Any]) -> SlidingSyncRequest:
    """Return the store's form of a request."""
    return SlidingSyncRequest(
        conn_id=body.get("conn_id", ""),
        lists={
            name: SlidingList(
                ranges=[(first, last) for first, last in one["ranges"]],
                timeline_limit=one["timeline_limit"],
                required_state=_pairs(one["required_state"]),
                filters=SlidingFilter(**{_ours(key): value for key, value in filters.items()}),
            )
            for name, one in body.get("lists", {}).items()
            for filters in [one.get("filters", {})]
        },
        room_subscriptions={
            RoomId(room): RoomSubscription(
                timeline_limit=one["timeline_limit"], required_state=_pairs(one["required_state"])
            )
            for room, one in body.get("room_subscriptions", {}).items()
        },
    )


def _pairs(listed: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    return [(kind, key) for kind, key in listed]


def _ours(name: str) -> str:
    """Return the name of a filter. The proposal has renamed one."""
    return {"is_invite": "is_invited"}.get(name, name)


def plain_of_ours(room: SlidingRoom) -> dict[str, Any]:
    return {
        "initial": room.initial,
        "limited": room.limited,
        "num_live": room.num_live,
        "expanded": room.expanded_timeline,
        "timeline": [event.event_id for event in room.timeline],
        "state": {(one.type, one.state_key or ""): one.event_id for one in room.required_state},
        "name": room.name,
        "avatar": room.avatar,
        "heroes": [hero.user_id for hero in room.heroes or ()],
        "is_dm": bool(room.is_dm),
        "joined_count": room.joined_count,
        "invited_count": room.invited_count,
        "stripped": stripped(room.stripped_state or ()),
    }


def plain_of_theirs(room: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "initial": room.get("initial", False),
        "limited": room.get("limited", False),
        "num_live": room.get("num_live", 0),
        "expanded": room.get("unstable_expanded_timeline", False),
        "timeline": [event["event_id"] for event in room.get("timeline", ())],
        "state": {
            (one["type"], one["state_key"]): one["event_id"]
            for one in room.get("required_state", ())
        },
        "name": room.get("name"),
        "avatar": room.get("avatar"),
        "heroes": [hero["user_id"] for hero in room.get("heroes", ())],
        "is_dm": room.get("is_dm", False),
        "joined_count": room.get("joined_count"),
        "invited_count": room.get("invited_count"),
        "stripped": stripped(room.get("invite_state", ())),
    }


def stripped(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    return {(one["type"], one["state_key"]): one["content"] for one in events}


KNOWN: Final = ("name", "avatar", "heroes", "joined_count", "invited_count", "is_dm")
EXACT: Final = ("initial", "limited", "num_live", "expanded", "timeline", "stripped")
DIFFERENCES: Final = {
    "direct": "Synapse returns no room because m.direct has changed.",
    "left": "Synapse lists rooms that a user left in one response only.",
    "grown state": "Synapse returns state of a grown required_state with the next event.",
    "grown timeline": "Synapse does not notice that a client has the whole timeline already.",
    "all rooms": "Synapse returns a room with a membership other than join each time.",
    "never joined": "Synapse lists a room with a ban or a kick of a user who never joined.",
    "lost events": "Synapse does not note news of rooms that no filter of a request passes.",
    "known members": "Synapse leaves out lazily loaded members that it sent before.",
}
"""The differences that are intended, by the word that the test counts them by."""


@dataclass
class SlidingComparison:
    """Looks at both, and compares. `lines` has a line for each difference without a reason."""

    pair: SlidingPair
    lines: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    ours: dict[str, dict[StateKey, str]] = field(default_factory=dict)
    theirs: dict[str, dict[StateKey, str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    looks: int = 0

    async def look(self) -> None:
        ours, theirs = await self.pair.look()
        self.looks += 1
        counts = {name: one["count"] for name, one in theirs.get("lists", {}).items()}
        our_rooms = {room: plain_of_ours(one) for room, one in ours.rooms.items()}
        their_rooms = {room: plain_of_theirs(one) for room, one in theirs["rooms"].items()}
        await self._find_refused(their_rooms.keys() - our_rooms.keys())
        for name, count in counts.items():
            self._count(name, ours.lists[name].count, count)
        for room in our_rooms.keys() | their_rooms.keys():
            self._room(room, our_rooms.get(room), their_rooms.get(room), ours)
        for known, rooms in ((self.ours, our_rooms), (self.theirs, their_rooms)):
            for room, one in rooms.items():
                known.setdefault(room, {}).update(one["state"])
        for room in our_rooms.keys() & their_rooms.keys():
            if ours.rooms[RoomId(room)].membership == "join":
                self._facts(room, our_rooms[room], their_rooms[room])

    async def _find_refused(self, only_there: Iterable[str]) -> None:
        """Find the rooms that the user was banned or kicked from, and that we do not list."""
        for room in only_there:
            membership = await self.pair.store.membership(RoomId(room), self.pair.user.user_id)
            if membership in ("leave", "ban") and room not in self.ours:
                self.refused.add(room)

    def _count(self, name: str, ours: int, theirs: int) -> None:
        if ours > theirs:
            self.reasons["left"] += 1
        elif ours < theirs <= ours + len(self.refused):
            self.reasons["never joined"] += 1
        else:
            self._differs(f"count of {name}", ours, theirs)

    def _room(
        self,
        room: str,
        ours: dict[str, Any] | None,
        theirs: dict[str, Any] | None,
        answer: SlidingSync,
    ) -> None:
        if ours is None and theirs is not None:
            self._only_there(room, theirs)
        elif theirs is None and ours is not None:
            self._only_here(room, ours, answer.rooms[RoomId(room)].membership)
        elif ours is not None and theirs is not None:
            if theirs["expanded"] and not ours["expanded"]:
                self.reasons["grown timeline"] += 1
            else:
                for name in EXACT:
                    self._differs(f"{room} {name}", ours[name], theirs[name])
            self._state(room, ours, theirs)

    def _only_here(self, room: str, ours: dict[str, Any], membership: str) -> None:
        """We return a room that Synapse does not return."""
        if membership == "leave":
            self.reasons["left"] += 1
        elif ours["expanded"] and not ours["num_live"]:
            self.reasons["grown timeline"] += 1
        elif ours["timeline"] and not ours["num_live"] and not ours["initial"]:
            self.reasons["lost events"] += 1
        elif ours["timeline"]:
            self.lines.append(f"look {self.looks}: {room} is only here: {ours}")
        elif ours["state"]:
            self.reasons["grown state"] += 1
        else:
            self.reasons["direct"] += 1

    def _only_there(self, room: str, theirs: dict[str, Any]) -> None:
        """Synapse returns a room without news."""
        if room in self.refused:
            self.reasons["never joined"] += 1
        elif theirs["num_live"] or room not in self.ours:
            self.lines.append(f"look {self.looks}: {room} is only there: {theirs}")
        else:
            self.reasons["grown timeline" if theirs["timeline"] else "all rooms"] += 1

    def _facts(self, room: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Both return the same name, counts and heroes, if both return some."""
        for name in KNOWN:
            if ours["initial"] or (ours[name] and theirs[name]):
                self._differs(f"{room} {name}", ours[name], theirs[name])

    def _state(self, room: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        """A side returns only what its client does not have, and both have the same then."""
        for known, told in ((self.ours, ours), (self.theirs, theirs)):
            if told["initial"]:
                known.pop(room, None)
        missing = dict(theirs["state"].items() - ours["state"].items())
        more = dict(ours["state"].items() - theirs["state"].items())
        if missing.items() <= self.ours.get(room, {}).items():
            self.reasons["grown state"] += bool(missing)
            missing = {}
        if more and all(key[0] == "m.room.member" for key in more):
            self.reasons["known members"] += 1
            more = {}
        elif more.items() <= self.theirs.get(room, {}).items() or not theirs["num_live"]:
            self.reasons["grown state"] += bool(more)
            more = {}
        self._differs(f"{room} state", (more, missing), ({}, {}))

    def _differs(self, what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            self.lines.append(f"look {self.looks}: {what}: {ours}, and there {theirs}")
