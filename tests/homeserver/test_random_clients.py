"""The same random clients at the example and at Synapse: what each reader gets, over HTTP.

Both servers get the same requests of six users in six rooms, one after the other. Ids of both are
replaced by the same labels. `DIFFERENCES` are the differences that are intended. STORAGE_EXAMPLES
is the number of seeds, STORAGE_SEED the first of them.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pytest

from tests.homeserver.agreement import ClientSide, differences
from tests.homeserver.conftest import World
from tests.homeserver.scenario import RandomClients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("homeserver"),
    pytest.mark.asyncio(loop_scope="module"),
]

FIRST: Final = int(os.environ.get("STORAGE_SEED", "0"))
SEEDS: Final = int(os.environ.get("STORAGE_EXAMPLES", "2"))
ROUNDS: Final = 6


@dataclass
class Difference:
    """What differs in the answers to one request: the values at a path, and both answers."""

    read: str
    user: str
    path: str
    ours: Any
    theirs: Any
    answers: tuple[Any, Any]

    def __str__(self) -> str:
        values = (f"{one!r:.300}" for one in (self.ours, self.theirs))
        return " | ".join((self.read, self.user, self.path, *values))

    def within(self, side: int, *keys: str) -> Any:
        """Return the value at keys below the room of the path, or {}."""
        value = self.answers[side]
        for key in (*self.path.split("/")[1:4], *keys):
            value = (value or {}).get(key, {})
        return value

    @property
    def event(self) -> Any:
        """The innermost event that the path goes through."""
        found: Any = {}
        value = self.answers[0]
        for key in self.path.split("/")[1:]:
            found = value if "event_id" in value else found
            value = value.get(key)
            if not isinstance(value, dict):
                break
        return found


def _has_hidden_state(one: Difference) -> bool:
    """Synapse's timeline has state that the user may not see, and ours has not."""
    ours, theirs = (one.within(side, "timeline", "events") for side in (0, 1))
    hidden = [event for key, event in (theirs or {}).items() if key not in (ours or {})]
    return any("state_key" in event for event in hidden)


def _is_replaced(one: Difference) -> bool:
    """A later event of the timeline has the same key."""
    timeline = one.within(0, "timeline", "events") or {}
    keys = {(e["type"], e.get("state_key")) for key, e in timeline.items() if key != "order"}
    return one.theirs is None and (one.ours["type"], one.ours["state_key"]) in keys


def _is_own_join(one: Difference) -> bool:
    timeline = one.within(0, "timeline", "events") or {}
    return one.theirs is True and any(
        event["state_key"] == one.user
        for key, event in timeline.items()
        if key != "order" and _is_member(event)
    )


def _misses_own_leave(one: Difference) -> bool:
    return not one.within(0, "timeline", "events") and any(
        event["state_key"] == one.user
        for key, event in one.within(1, "timeline", "events").items()
        if key != "order" and _is_member(event)
    )


def _goes_back_before_leave(one: Difference) -> bool:
    """Synapse's timeline is the end of ours, which begins with events of before the user's leave.

    The user never joined, but may see the room: ours is whole, and Synapse's is not.
    """
    ours, theirs = (one.within(side, "timeline", "events") for side in (0, 1))
    order, their_order = (events.get("order", []) for events in (ours, theirs))
    earlier = order[: len(order) - len(their_order)]
    if not their_order or [*earlier, *their_order] != order:
        return False
    last, key = ours[order[-1]], one.path.rpartition("/")[2]
    is_expected = (
        (one.ours, one.theirs) == (True, False)
        if key == "limited"
        else key == "order" or key in earlier
    )
    return (
        is_expected
        and [_has_create(one, side) for side in (0, 1)] == [True, False]
        and _is_member(last)
        and last["state_key"] == one.user != last["sender"]
        and all(ours[event]["unsigned"]["membership"] == "leave" for event in earlier)
    )


def _has_create(one: Difference, side: int) -> bool:
    parts = (one.within(side, name, "events") for name in ("timeline", "state"))
    events = (event for part in parts for key, event in part.items() if key != "order")
    return any(event["type"] == "m.room.create" for event in events)


def _is_of_receipts_alone(one: Difference) -> bool:
    if one.path.endswith("/ephemeral"):
        return one.theirs is None and one.ours["events"].keys() == {"m.receipt ", "order"}
    return one.theirs is None


def _was_removed(one: Difference) -> bool:
    parts = [one.within(1, *keys) for keys in (("timeline", "events"), ("state", "events"))]
    return one.ours is None and any(
        event["state_key"] == one.user != event["sender"]
        for part in parts
        for key, event in part.items()
        if key != "order" and _is_member(event)
    )


def _is_member(event: Any) -> bool:
    return bool(event["type"] == "m.room.member")


def _is_cut_by_filter(one: Difference) -> bool:
    """Synapse has fewer events: it takes a page, and then leaves out what is hidden."""
    parts = ("events_before", "events_after")
    pairs = [
        [(one.answers[side].get(part) or {}).get("order", []) for side in (0, 1)] for part in parts
    ]
    return all(set(theirs) <= set(ours) for ours, theirs in pairs) and any(
        len(theirs) < len(ours) for ours, theirs in pairs
    )


def _is_own_event(one: Difference) -> bool:
    event = one.answers[0].get("event", one.answers[0])
    return "status" in one.theirs and event.get("state_key") == one.user


def _is_of_a_stranger(one: Difference) -> bool:
    chunk = dict(one.ours.get("chunk") or {})
    chunk.pop("order", None)
    return one.theirs == REFUSED and all(
        event["unsigned"]["membership"] != "join" for event in chunk.values()
    )


PREVIOUS: Final = ".*/unsigned/(prev_content|prev_sender|replaces_state)"
REFUSED: Final = {"status": "403", "errcode": "M_FORBIDDEN"}
NOT_FOUND: Final = {"status": "404", "errcode": "M_NOT_FOUND"}


class IntendedDifference(NamedTuple):
    """A difference that is intended: where it is, when, and the text that decides it."""

    read: str
    path: str
    applies: Callable[[Difference], bool]
    text: str

    def explains(self, one: Difference) -> bool:
        return bool(
            re.match(self.read, one.read)
            and re.fullmatch(self.path, one.path)
            and self.applies(one)
        )


DIFFERENCES: Final = {
    "previous": IntendedDifference(
        "",
        PREVIOUS,
        lambda one: (
            one.ours is None and one.event.get("unsigned", {}).get("membership", "join") != "join"
        ),
        "UnsignedData.prev_content: if the client may see it. Synapse always gives it.",
    ),
    "previous in state": IntendedDifference(
        "",
        PREVIOUS,
        lambda one: one.ours is None and "membership" not in one.event.get("unsigned", {}),
        "UnsignedData.prev_content: with an event. A state is read from its events alone.",
    ),
    "inner membership": IntendedDifference(
        "",
        r".*/(redacted_because|m\.replace|latest_event)/unsigned/membership",
        lambda one: one.theirs is None,
        "Room events, unsigned.membership: of each event. Synapse leaves it out in inner ones.",
    ),
    "inner transaction": IntendedDifference(
        "",
        r".*/(redacted_because|m\.replace|latest_event)/unsigned/transaction_id",
        lambda one: one.ours is None,
        "Transaction identifiers: for the local echo, which the inner event is not.",
    ),
    "summary": IntendedDifference(
        "sync",
        r"/rooms/join/[^/]+/summary/.*",
        lambda one: one.theirs is None and ("lazy" not in one.read or "first" not in one.read),
        "GET /sync, RoomSummary: with no condition. Synapse sends it to lazy clients, at changes.",
    ),
    "heroes": IntendedDifference(
        "sync",
        r"/rooms/join/[^/]+/summary/m.heroes",
        lambda one: bool(one.theirs) and sorted(one.ours) == sorted(one.theirs),
        "GET /sync, RoomSummary: in the order of the stream. Synapse sorts them by name.",
    ),
    "create": IntendedDifference(
        "sync",
        r".*/events/\$\d\.0/room_id",
        lambda one: one.ours is None,
        "GET /sync, ClientEventWithoutRoomID. Synapse has it in create events of version 12.",
    ),
    "banned": IntendedDifference(
        "sync (first|next.*full)",
        r"/rooms/leave/[^/]+",
        _was_removed,
        "Filtering, include_leave: false. Synapse has rooms with a kick or a ban all the same.",
    ),
    "replaced": IntendedDifference(
        "sync",
        r"/rooms/join/[^/]+/state/events/[^/]+",
        _is_replaced,
        "GET /sync, state: that at the start of the timeline. Synapse leaves out what changes.",
    ),
    "hidden state": IntendedDifference(
        "sync",
        r"/rooms/join/[^/]+/(timeline|state)/.*",
        _has_hidden_state,
        "m.room.history_visibility. Synapse's timelines have current state that is hidden.",
    ),
    "limited": IntendedDifference(
        "sync next",
        r"/rooms/join/[^/]+/timeline/limited",
        _is_own_join,
        "GET /sync, limited: if the limit left events out. Synapse: in each room just joined.",
    ),
    "inviter": IntendedDifference(
        "sync",
        r"/rooms/invite/[^/]+/invite_state/events/(order|m\.room\.member .*)",
        lambda one: one.ours is None or len(one.ours) + 1 == len(one.theirs),
        "Stripped state lists types, without m.room.member. Synapse adds the inviter's.",
    ),
    "unknown": IntendedDifference(
        "context",
        "",
        lambda one: (one.ours, one.theirs) == (NOT_FOUND, REFUSED),
        "GET /context names no error. As GET /event: 404, which does not tell that it is there.",
    ),
    "page": IntendedDifference(
        "context",
        r"/(events_before|events_after|state)/.*",
        _is_cut_by_filter,
        "GET /context, limit: of events that are returned. Synapse counts hidden ones.",
    ),
    "own": IntendedDifference(
        "(event|context)",
        "",
        _is_own_event,
        "m.room.history_visibility: a user may see the own membership.",
    ),
    "stranger": IntendedDifference(
        "messages",
        "",
        _is_of_a_stranger,
        "m.room.history_visibility: world_readable events stay so. Synapse asks today's state.",
    ),
    "invited": IntendedDifference(
        "(state|members)",
        "",
        lambda one: one.theirs == REFUSED and "'membership': 'invite'" in str(one.ours),
        "m.room.history_visibility, invited: from the invite on. Synapse wants a join.",
    ),
    "whole state of a leave": IntendedDifference(
        "sync next",
        r"/rooms/leave/[^/]+/state/events/[^/]+",
        lambda one: one.theirs is None,
        "GET /sync, leave, state: up to the timeline. Synapse has none for who never joined.",
    ),
    "whole timeline of a leave": IntendedDifference(
        "sync next",
        r"/rooms/leave/[^/]+/timeline/(events/.*|limited)",
        _goes_back_before_leave,
        "GET /sync, leave, timeline: up to the leave. Synapse begins at the last sync.",
    ),
    "never joined": IntendedDifference(
        "sync next",
        r"/rooms/leave/.*",
        _misses_own_leave,
        "GET /sync, leave",
    ),
    "receipts again": IntendedDifference(
        "sync next.*full_state",
        r"/rooms/join/[^/]+/ephemeral(/events/m\.receipt /content(/[^/]+){1,3})?",
        _is_of_receipts_alone,
        "GET /sync, ephemeral: events in the room. Synapse does not repeat them with full_state.",
    ),
    "members again": IntendedDifference(
        "sync.*lazy",
        r"/rooms/join/[^/]+/state/events/[^/]+",
        lambda one: None in (one.ours, one.theirs) and _is_member(one.ours or one.theirs),
        "Lazy-loading room members",
    ),
}


def is_known(one: Difference) -> bool:
    return any(known.explains(one) for known in DIFFERENCES.values())


@dataclass
class ReadingClients(RandomClients):
    """Random clients, and all differences between what both servers answer."""

    found: list[Difference] = field(default_factory=list)
    compared: int = 0

    def note(self, what: str, user: str, ours: Any, theirs: Any) -> None:
        if "status" in ours or "status" in theirs:
            one, other = ours.get("status"), theirs.get("status")
            if one != other or ours["errcode"] != theirs["errcode"]:
                self.found.append(Difference(what, user, "", ours, theirs, (ours, theirs)))
            return
        self.compared += 1
        for path, one, other in differences(ours, theirs):
            self.found.append(Difference(what, user, path, one, other, (ours, theirs)))

    async def look(self) -> None:
        """Let every user read all that a client reads."""
        self.log.append("look")
        for user in self.users:
            await self._sync(user)
            for room in self.rng.sample([*self.events], 2):
                await self._read(user, room)

    async def _sync(self, user: str) -> None:
        room = {"timeline": {"limit": self.rng.choice((1, 3, 10, 20))}}
        if self.rng.random() < 0.3:
            room["state"] = {"lazy_load_members": True}
        query: dict[str, Any] = {"filter": json.dumps({"room": room})}
        if self.rng.random() < 0.1:
            query["full_state"] = "true"
        is_first = self.rng.random() < 0.15 or user not in self.sides[0].since
        answers = []
        for side in self.sides:
            since = {} if is_first else {"since": side.since[user]}
            answer = await side.ask(user, "GET", "/sync", **query, **since)
            side.since[user] = answer["next_batch"]
            answers.append(side.plain({"rooms": answer.get("rooms", {})}))
        how = ["first" if is_first else "next", *(["lazy"] if "state" in room else []), *query]
        self.note(f"sync {' '.join(how)}", user, *answers)

    async def _read(self, user: str, room: str) -> None:
        for direction in ("b", "f"):
            walks = [await self._walk(side, user, room, direction) for side in self.sides]
            self.note(f"messages {direction} {room}", user, *walks)
        event = self.rng.choice(self.events[room])["event_id"]
        limit = self.rng.choice((0, 1, 4, 10))
        for path, query in (
            ("state", {}),
            ("members", {}),
            (f"event/{event}", {}),
            (f"context/{event}", {"limit": limit}),
        ):
            answers = await self.both(user, "GET", f"/rooms/{room}/{path}", **query)
            ordered = path.startswith("context")
            plain = [
                side.plain(one, ordered=ordered)
                for side, one in zip(self.sides, answers, strict=True)
            ]
            self.note(f"{path} {room} {query}", user, *plain)

    async def _walk(self, side: ClientSide, user: str, room: str, direction: str) -> Any:
        chunk: list[Any] = []
        start: dict[str, str] = {}
        while True:
            how = {"dir": direction, "limit": 15, **start}
            page = await side.ask(user, "GET", f"/rooms/{room}/messages", **how)
            if "status" in page:
                return page
            chunk += page["chunk"]
            if "end" not in page or (not page["chunk"] and page["end"] == start.get("from")):
                return side.plain({"chunk": chunk})
            start = {"from": page["end"]}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
async def test_as_synapse(world: World, seed: int) -> None:
    clients = ReadingClients(world, seed)
    await clients.begin()
    for _ in range(ROUNDS):
        for _ in range(clients.rng.randint(2, 7)):
            await clients.step()
        await clients.look()
    assert clients.compared > 100
    lines = [str(one) for one in clients.found if not is_known(one)]
    assert not lines, clients.story(*lines)
