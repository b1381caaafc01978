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
from tests.homeserver.room_story import RoomStory
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
ROOM: Final = re.compile(r"!room\d")


@dataclass
class RoomOnClient:
    """A room as a client of the example has got it from /sync."""

    members: set[str] = field(default_factory=set)
    events: set[str] = field(default_factory=set)
    summary: dict[str, Any] = field(default_factory=dict)

    def take(self, room: Any) -> None:
        """Add what one response has."""
        for part in ("state", "timeline"):
            events = (room.get(part) or {}).get("events", {})
            self.members |= {
                key for key, one in events.items() if key != "order" and _is_member(one)
            }
            self.events |= events.keys() - {"order"}
        self.summary |= room.get("summary", {})


@dataclass
class Difference:
    """What differs in the answers to one request: the values at a path, and both answers.

    ``story`` is the history of the room. ``known`` is what the example's client has got of it
    before: the member events that it was sent, and the summary.
    """

    read: str
    user: str
    path: str
    ours: Any
    theirs: Any
    answers: tuple[Any, Any]
    story: RoomStory
    known: RoomOnClient

    def __str__(self) -> str:
        values = (f"{one!r:.300}" for one in (self.ours, self.theirs))
        return " | ".join((self.read, self.user, self.path, *values))

    def within(self, side: int, *keys: str) -> Any:
        """Return the value at keys below the room of the path, or {}."""
        value = self.answers[side]
        for key in (*self.path.split("/")[1:4], *keys):
            value = (value or {}).get(key, {})
        return value

    def events(self, side: int, part: str = "timeline") -> dict[str, Any]:
        """Return the events of a part of the room, by label, in their order."""
        found = self.within(side, part, "events") or {}
        return {key: found[key] for key in found.get("order", found.keys())}

    def sees(self, event_id: str) -> bool:
        return self.story.sees(self.user, event_id)

    @property
    def invite_states(self) -> list[Any]:
        return [self.within(side, "invite_state", "events") for side in (0, 1)]

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
    """Ours is the end of all that the user may see up to the leave, and Synapse's is the end of it.

    The user never joined. Where Synapse's timeline begins later, the rest may be in its state.
    """
    ours, theirs = ([*one.events(side)] for side in (0, 1))
    visible = one.story.visible(one.user)
    end = visible.index(ours[-1]) + 1 if ours and ours[-1] in visible else 0
    earlier = ours[: len(ours) - len(theirs)]
    key = one.path.rpartition("/")[2]
    is_expected = (
        (one.ours, one.theirs) == (True, False)
        if key == "limited"
        else key == "order" or key in earlier
    )
    return (
        is_expected
        and bool(theirs)
        and ours == [*earlier, *theirs] == visible[:end][-len(ours) :]
        and not one.story.was_joined(one.user)
        and one.events(0)[ours[-1]].get("state_key") == one.user
    )


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


def _is_visible(one: Difference) -> bool:
    """Only one side has the event: the example if the user may see it, and else Synapse.

    They may see each own membership: /sync gives it, so that clients read what it is about.
    """
    event_id = one.read.split()[0].partition("/")[2]
    event = one.story.events[one.story.place(event_id)]
    is_own = _is_member(event) and event["state_key"] == one.user
    return "status" in (one.theirs if is_own or one.sees(event_id) else one.ours)


def _is_what_is_visible(one: Difference) -> bool:
    """Ours are just the events that the user may see."""
    answer = one.answers[0]
    order = (answer.get("chunk") or {}).get("order", [])
    shown = order[::-1] if one.read.startswith("messages b") else order
    return bool(shown == one.story.visible(one.user))


def _is_readable_state(one: Difference) -> bool:
    """Ours is just what the user may read, or refused if there is nothing."""
    state = one.story.readable_state(one.user)
    if state is None:
        return bool(one.ours == REFUSED)
    if one.theirs != REFUSED:
        return False
    wanted, shown = list(state.values()), one.ours
    if one.read.startswith("members"):
        wanted, shown = list(filter(_is_member, wanted)), one.ours["chunk"]
    return {*shown} - {"order"} == {event["event_id"] for event in wanted}


def _is_first_and_replaced(one: Difference) -> bool:
    """Synapse's state has the first event of its timeline, and a later one has its key."""
    if one.ours is not None:
        return False
    timeline = [*one.events(1).values()]
    key = one.theirs["type"], one.theirs["state_key"]
    return one.theirs["event_id"] in [event["event_id"] for event in timeline[:1]] and key in [
        (event["type"], event.get("state_key")) for event in timeline[1:]
    ]


def _is_hidden_redaction(one: Difference) -> bool:
    because = one.answers[0]
    for key in one.path.split("/")[1:-2]:
        because = because[key]
    return one.ours is None and not one.sees(because["event_id"])


def _is_read_by_own_event(one: Difference) -> bool:
    return bool(one.ours == one.story.unread_by(one.user) < one.theirs)


def _is_without_news(one: Difference) -> bool:
    """The client knows the count or the heroes that Synapse sends again."""
    known = one.known.summary.get(one.path.rpartition("/")[2])
    if isinstance(known, list):
        return one.ours is None and sorted(known) == sorted(one.theirs)
    return one.ours is None and known == one.theirs


def _has_bundles_of_a_join(one: Difference) -> bool:
    """Synapse has bundles in a timeline that it calls limited because the user has just joined."""
    limits = [one.within(side, "timeline", "limited") for side in (0, 1)]
    return one.ours is None and limits == [False, True] and _joins(one)


def _joins(one: Difference) -> bool:
    return any(
        _is_member(event) and event["state_key"] == one.user
        for part in ("timeline", "state")
        for event in one.events(0, part).values()
    )


def _has_hidden_edit(one: Difference) -> bool:
    """All that Synapse bundles is an edit that the user may not see."""
    return (
        one.ours is None
        and one.theirs.keys() == {"m.replace"}
        and not one.sees(one.theirs["m.replace"]["event_id"])
    )


def _is_of_the_moment(one: Difference) -> bool:
    """Ours is the state of now, and Synapse's that of the invite, if it was not redacted."""
    place, _ = one.story.memberships(one.user)[-1]
    now, then = ({key[0]: e for key, e in one.story.state(end).items()} for end in (None, place))
    invite = one.story.events[place]["event_id"]
    is_redacted = any(e.get("content", {}).get("redacts") == invite for e in one.story.events)
    then = {} if is_redacted else then
    kind = one.path.split("/")[6].split(" ")[0]
    if kind != "order":
        return [_content(events, kind) for events in one.invite_states] == [
            _content(state, kind) for state in (now, then)
        ]
    return [{name.split(" ")[0] for name in order} for order in (one.ours, one.theirs)] == [
        {kind for kind in STRIPPED if kind in state} | {"m.room.member"} for state in (now, then)
    ]


def _content(events: Any, kind: str) -> Any:
    return (events.get(kind) or events.get(f"{kind} ") or {}).get("content")


def _is_redundant_member(one: Difference) -> bool:
    """Only one side has it: Synapse more than is wanted, or the example one that is wanted.

    Wanted are the members who sent an event of the timeline, and whom the client has not got yet.
    """
    event = one.ours or one.theirs
    if None not in (one.ours, one.theirs) or not _is_member(event):
        return False
    timeline = one.events(0)
    wanted = {e["sender"] for e in timeline.values()} | {one.user}
    if one.ours is None:
        return (
            event["event_id"] in one.known.members
            or event["event_id"] in timeline
            or event["state_key"] not in wanted
        )
    changed = {e["state_key"] for e in timeline.values() if _is_member(e)}
    return event["state_key"] in wanted | changed | {*one.within(0, "summary", "m.heroes")}


STRIPPED: Final = (
    *("m.room.create", "m.room.name", "m.room.avatar", "m.room.topic", "m.room.join_rules"),
    *("m.room.canonical_alias", "m.room.encryption"),
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
        lambda one: sorted(one.ours or ()) == sorted(one.theirs or ()),
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
        r"/(events_before|events_after|state)(/.*)?",
        _is_cut_by_filter,
        "GET /context, limit: of events that are returned. Synapse counts hidden ones.",
    ),
    "visible event": IntendedDifference(
        "(event|context)",
        "",
        _is_visible,
        "m.room.history_visibility. Synapse asks for the membership of now, and hides own ones.",
    ),
    "visible events": IntendedDifference(
        "messages",
        r"(/chunk(/(order|\$[^/]+))?)?",
        _is_what_is_visible,
        "m.room.history_visibility: shared is for those who join later. Synapse: or who left.",
    ),
    "readable state": IntendedDifference(
        "(state|members)",
        "",
        _is_readable_state,
        "GET /state, 403: never a member. Synapse: an unbanned user was one, a banned one was not.",
    ),
    "whole state of a leave": IntendedDifference(
        "sync next",
        r"/rooms/leave/[^/]+/state/events/[^/]+",
        lambda one: one.theirs is None,
        "GET /sync, leave, state: up to the timeline. Synapse has none for who never joined.",
    ),
    "whole timeline of a leave": IntendedDifference(
        "sync next",
        r"/rooms/leave/[^/]+/(timeline/(events/.*|limited)|state/events/[^/]+)",
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
    "receipts of a join": IntendedDifference(
        "sync next",
        r"/rooms/join/[^/]+/ephemeral(/events/m\.receipt /content(/[^/]+){1,3})?",
        lambda one: _is_of_receipts_alone(one) and _joins(one),
        "GET /sync, ephemeral: events in the room. Synapse has those since the last sync.",
    ),
    "state again": IntendedDifference(
        "sync next",
        r"/rooms/join/[^/]+/state/events/[^/]+",
        lambda one: (
            one.ours is None and _joins(one) and one.path.rpartition("/")[2] in one.known.events
        ),
        "Syncing, state: what changed. Synapse sends the whole state to a user who joins again.",
    ),
    "members again": IntendedDifference(
        "sync.*lazy",
        r"/rooms/(join|leave)/[^/]+/state/events/[^/]+",
        _is_redundant_member,
        "Lazy-loading room members: those of the timeline's senders, and none again.",
    ),
    "first of the timeline": IntendedDifference(
        "sync",
        r"/rooms/(join|leave)/[^/]+/state/events/[^/]+",
        _is_first_and_replaced,
        "GET /sync, state: up to the start of the timeline. Synapse: and its first event.",
    ),
    "summary again": IntendedDifference(
        "sync next.*lazy",
        r"/rooms/join/[^/]+/summary/m\.(joined_member_count|invited_member_count|heroes)",
        _is_without_news,
        "GET /sync, RoomSummary: may be omitted if it has not changed since the last sync.",
    ),
    "read by an own event": IntendedDifference(
        "sync",
        r"/rooms/join/[^/]+/unread_notifications/notification_count",
        _is_read_by_own_event,
        "Receiving notifications: read by sending an event. Synapse counts up to the receipt.",
    ),
    "hidden redaction": IntendedDifference(
        "",
        ".*/unsigned/redacted_because/content/reason",
        _is_hidden_redaction,
        "m.room.history_visibility: of the redaction. Synapse always gives it.",
    ),
    "bundles of a join": IntendedDifference(
        "sync next",
        r"/rooms/join/[^/]+/timeline/events/[^/]+/unsigned/m\.relations",
        _has_bundles_of_a_join,
        "Aggregations of child events: in /sync where limited is true.",
    ),
    "hidden edit": IntendedDifference(
        "",
        r".*/unsigned/m\.relations",
        _has_hidden_edit,
        "m.room.history_visibility: of the edit. Synapse gives it to users who left.",
    ),
    "moment of an invite": IntendedDifference(
        "sync",
        r"/rooms/invite/[^/]+/invite_state/events/(order|m\.room\.[a-z_]+ (/content/.*)?)",
        _is_of_the_moment,
        "Stripped state names no moment, and has m.room.create. Synapse: that in the invite.",
    ),
}


def is_known(one: Difference) -> bool:
    return any(known.explains(one) for known in DIFFERENCES.values())


@dataclass
class ReadingClients(RandomClients):
    """Random clients, and all differences between what both servers answer."""

    found: list[Difference] = field(default_factory=list)
    compared: int = 0
    known: dict[tuple[str, str], RoomOnClient] = field(default_factory=dict)
    forgotten: dict[str, dict[str, int]] = field(default_factory=dict)

    async def act(self, user: str, method: str, path: str, body: Any) -> bool:
        done = await super().act(user, method, path, body)
        if done and path.endswith("/forget"):
            room = path.split("/")[2]
            self.forgotten.setdefault(room, {})[user] = len(self.events[room])
        return done

    def note(self, what: str, user: str, ours: Any, theirs: Any) -> None:
        if "status" in ours or "status" in theirs:
            one, other = ours.get("status"), theirs.get("status")
            if one != other or ours["errcode"] != theirs["errcode"]:
                self._add(what, user, ("", ours, theirs), (ours, theirs))
            return
        self.compared += 1
        for found in differences(ours, theirs):
            self._add(what, user, found, (ours, theirs))

    def _add(
        self, what: str, user: str, found: tuple[str, Any, Any], answers: tuple[Any, Any]
    ) -> None:
        """Add a difference that is not intended, judged by the events of now."""
        room = next(iter(ROOM.findall(f"{found[0]} {what}")), "")
        story = RoomStory([*self.events.get(room, [])], {**self.forgotten.get(room, {})})
        known = self.known.get((user, room), RoomOnClient())
        one = Difference(what, user, *found, answers, story, known)
        if not is_known(one):
            self.found.append(one)

    def _take(self, user: str, answer: Any, *, is_first: bool) -> None:
        """Remember what the client of the example has got."""
        if is_first:
            self.known = {key: room for key, room in self.known.items() if key[0] != user}
        for kind in ("join", "leave"):
            for label, room in answer.get("rooms", {}).get(kind, {}).items():
                self.known.setdefault((user, label), RoomOnClient()).take(room)

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
        if is_first:
            self._take(user, {}, is_first=True)
        self.note(f"sync {' '.join(how)}", user, *answers)
        self._take(user, answers[0], is_first=False)

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
    lines = [str(one) for one in clients.found]

    assert not lines, clients.story(*lines)
