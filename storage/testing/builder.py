"""`RoomBuilder`: a signed room, written in a few lines.

    room = RoomBuilder("11", seed=1)
    admin, other = room.user(1), room.user(2)
    # create, join, power levels, join rules, history visibility
    room.start(admin)
    room.join(other)
    left, right = room.fork(2)  # two servers that are cut off from each other
    left.topic(admin, "one")
    right.ban(admin, other)
    room.merge(left, right)
    last = room.message(admin, "hello")  # has both tips as parents
    await store.append(room.pdus, verify_keys=room.keys)
    assert await store.state_before(last.event_id) == dict(last.state_before)

Every verb returns the `BuiltEvent` it made. The builder's heads are its parents, unless
``prev=[…]`` is given. The rules choose the auth events from the true state before the event. With
`checked` (the default) an event that its own state does not allow is an error, unless it has
``expected="rejected"``.

It does nothing that a server does on receipt: a builder's current state is that of its heads.
"""

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Unpack

from signedjson.types import VerifyKey

from storage.ids import EventId, RoomId
from storage.testing import assembly
from storage.testing.assembly import (
    EventOptions,
    Reference,
    Request,
    Settings,
    build,
    id_of,
    number_of,
    server_of,
    verify_keys,
)
from storage.testing.graph import RoomGraph, merge
from storage.testing.model import BuiltEvent, GeneratedRoom, State

PREV_EVENTS_MAX: Final = 20
DEFAULT_SERVERS: Final = ("s1.test", "s2.test", "s3.test")
_unseeded = itertools.count(1_000_000)
"""The seeds of builders without one, above those that callers choose."""


class RoomBuilder:
    """A branch of a room under construction: the shared graph, and the heads for the next event."""

    def __init__(
        self,
        version: str = "11",
        *,
        servers: Sequence[str] = DEFAULT_SERVERS,
        seed: int | None = None,
        sign: bool = True,
        checked: bool = True,
        exact: bool = True,
    ) -> None:
        """Start an empty room of `version`.

        The same calls with the same `seed` give the same bytes, so two such builders make one room.
        Without a seed, each builder of a process makes a room of its own.

        `servers` are those of `user`; others may take part. Without `sign` events are hashed only,
        and have a placeholder for a signature. `exact` resolves merges over the whole state; see
        `storage.testing.graph`.
        """
        number = next(_unseeded) if seed is None else seed
        self.settings: Settings = Settings(version, tuple(servers), number, sign, checked, exact)
        self.graph: RoomGraph = RoomGraph(version)
        self.heads: tuple[EventId, ...] = ()

    # The room and its branches

    @property
    def version(self) -> str:
        """Return the room version."""
        return self.settings.version

    @property
    def room_id(self) -> RoomId:
        """Return the room id; raise ValueError before `create`."""
        if self.graph.room_id is None:
            raise ValueError("the room has no create event yet")
        return self.graph.room_id

    @property
    def events(self) -> list[BuiltEvent]:
        """Return every event of all branches in order of creation: parents before children."""
        return list(self.graph.nodes.values())

    @property
    def pdus(self) -> list[bytes]:
        """Return the bytes of `events`, for ``store.append``."""
        return [event.pdu for event in self.graph.nodes.values()]

    @property
    def keys(self) -> dict[tuple[str, str], VerifyKey]:
        """Return (server, key id) -> verify key of all servers in the settings or with events."""
        senders = {server_of(event.sender) for event in self.graph.nodes.values()}
        return verify_keys(sorted(senders.union(self.settings.servers)))

    def generated(self) -> GeneratedRoom:
        """Return the whole room, live, in order of creation."""
        return GeneratedRoom(
            self.room_id, self.version, tuple(event.generated() for event in self.events), self.keys
        )

    def user(self, number: int, server: str | None = None) -> str:
        """Return ``@user<number>:<server>``.

        Without `server` the numbers cycle through the room's servers, from 1.
        """
        names = self.settings.servers
        return f"@user{number}:{server or names[(number - 1) % len(names)]}"

    def event(self, event_id: str) -> BuiltEvent:
        """Return the event of that id; raise KeyError."""
        return self.graph.node(event_id)

    def fork(self, count: int = 2) -> "tuple[RoomBuilder, ...]":
        """Return `count` branches from the current heads, each a builder on the same graph."""
        return tuple(copy.copy(self) for _ in range(count))

    def at(self, *events: Reference) -> "RoomBuilder":
        """Return a branch whose heads are these events, however old."""
        branch = copy.copy(self)
        branch.heads = tuple(id_of(event) for event in events)
        return branch

    def merge(self, *branches: "RoomBuilder") -> "RoomBuilder":
        """Add the heads of `branches` to the own ones: the next event has them all as parents."""
        heads = (*self.heads, *(head for branch in branches for head in branch.heads))
        self.heads = self.graph.maximal(heads)
        return self

    # The state at the heads

    @property
    def state(self) -> State:
        """Return the state before the next event."""
        return merge(self.graph, self.heads[-PREV_EVENTS_MAX:], exact=self.settings.exact).state

    def membership(self, user_id: str) -> str | None:
        """Return a user's membership at the heads, None if there never was one."""
        return self.graph.membership(self.state, user_id)

    def content(self, type_: str, state_key: str = "") -> Mapping[str, Any]:
        """Return the content of a state event at the heads, {} if there is none.

        It does not work for member events.
        """
        return self.graph.content(self.state, (type_, state_key))

    # Any event

    def send(
        self,
        sender: str,
        type_: str,
        content: Mapping[str, Any],
        *,
        state_key: str | None = None,
        redacts: Reference | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Send any event.

        All verbs call it, and take the keyword arguments of `EventOptions` as well.

        Raise ValueError if the builder is `checked` and the event's own state does not allow it.
        """
        prev = how.get("prev")
        parents = (
            self.heads[-PREV_EVENTS_MAX:] if prev is None else tuple(id_of(event) for event in prev)
        )
        target = None if redacts is None else id_of(redacts)
        node = build(
            self.graph,
            self.settings,
            Request(sender, type_, content, state_key, target, parents, how),
        )
        self._move_heads(node)
        return node

    def state_event(
        self,
        sender: str,
        type_: str,
        content: Mapping[str, Any],
        state_key: str = "",
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Send any state event."""
        return self.send(sender, type_, content, state_key=state_key, **how)

    def _move_heads(self, node: BuiltEvent) -> None:
        if node.expected in ("rejected", "soft_failed", "invalid"):
            return
        replaced: set[EventId] = set()
        todo = list(node.prev_events)
        while todo:
            parent = todo.pop()
            replaced.add(parent)
            if self.graph.nodes[parent].expected in ("rejected", "soft_failed"):
                todo.extend(self.graph.nodes[parent].prev_events)
        self.heads = (*(head for head in self.heads if head not in replaced), node.event_id)

    # Beginnings

    def create(
        self, creator: str, content: Mapping[str, Any] | None = None, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Send m.room.create alone; `content` is added to what the version requires."""
        if number_of(self.version) < 12:
            self.graph.room_id = RoomId(f"!room{self.settings.seed}:{server_of(creator)}")
        created = self.send(
            creator,
            "m.room.create",
            assembly.create(self.version, creator, content or {}),
            state_key="",
            **how,
        )
        self.graph.room_id = created.room_id
        return created

    def start(
        self,
        creator: str,
        *,
        join_rule: str = "public",
        history_visibility: str = "shared",
        users: Mapping[str, int] | None = None,
        name: str | None = None,
        content: Mapping[str, Any] | None = None,
    ) -> BuiltEvent:
        """Send the usual first events; return the create event.

        They are create, join, power levels, join rules, history visibility, and a name if given.
        `users` get power levels besides the creator's; `content` goes to the create event.
        """
        created = self.create(creator, content)
        self.join(creator)
        self.state_event(
            creator, "m.room.power_levels", assembly.power_levels(self.version, [creator], users)
        )
        self.join_rules(creator, join_rule)
        self.history_visibility(creator, history_visibility)
        if name is not None:
            self.name(creator, name)
        return created

    # Members

    def member(
        self,
        sender: str,
        target: str,
        membership: str,
        more: Mapping[str, Any] | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Send any membership of `target`, by `sender`."""
        return self.send(
            sender,
            "m.room.member",
            assembly.member(membership, more or {}),
            state_key=target,
            **how,
        )

    def join(
        self,
        user_id: str,
        *,
        via: str | None = None,
        displayname: str | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Join a user, or change the profile of a joined one.

        `via` is the user whose server authorises a restricted join.
        """
        return self.member(
            user_id,
            user_id,
            "join",
            {"displayname": displayname, "join_authorised_via_users_server": via},
            **how,
        )

    def leave(self, user_id: str, **how: Unpack[EventOptions]) -> BuiltEvent:
        """Leave: the room, or reject an invite, or retract a knock."""
        return self.member(user_id, user_id, "leave", **how)

    def invite(self, sender: str, target: str, **how: Unpack[EventOptions]) -> BuiltEvent:
        """Invite a user."""
        return self.member(sender, target, "invite", **how)

    def third_party_invite(
        self, sender: str, token: str, *, name: str = "u…@h…", **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Invite somebody of whom only an address is known."""
        return self.state_event(
            sender, "m.room.third_party_invite", assembly.third_party_invite(name), token, **how
        )

    def third_party_member(
        self,
        sender: str,
        target: str,
        token: str,
        *,
        name: str = "u…@h…",
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Invite the user `target` whom the address turned out to be."""
        return self.member(
            sender, target, "invite", assembly.third_party_member(token, target, name), **how
        )

    def knock(
        self, user_id: str, *, reason: str | None = None, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Knock (version 7 and later, join rule ``knock``)."""
        return self.member(user_id, user_id, "knock", {"reason": reason}, **how)

    def kick(
        self, sender: str, target: str, *, reason: str | None = None, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Kick a user, or withdraw an invite."""
        return self.member(sender, target, "leave", {"reason": reason}, **how)

    def ban(
        self, sender: str, target: str, *, reason: str | None = None, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Ban a user."""
        return self.member(sender, target, "ban", {"reason": reason}, **how)

    def unban(self, sender: str, target: str, **how: Unpack[EventOptions]) -> BuiltEvent:
        """Lift a ban: the target has left."""
        return self.member(sender, target, "leave", **how)

    # Other state

    def power_levels(
        self,
        sender: str,
        changes: Mapping[str, Any] | None = None,
        *,
        users: Mapping[str, int] | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Change the power levels at the heads.

        `changes` replace top-level keys; `users` are added to the present ones.
        """
        present = self.content("m.room.power_levels") or assembly.power_levels(
            self.version, [], None
        )
        content = {**present, **(changes or {})}
        content["users"] = {**content.get("users", {}), **(users or {})}
        return self.state_event(sender, "m.room.power_levels", content, **how)

    def join_rules(
        self, sender: str, rule: str, *, allow: Iterable[str] = (), **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Set the join rule; `allow` names the rooms of a restricted one."""
        return self.state_event(
            sender, "m.room.join_rules", assembly.join_rules(rule, allow), **how
        )

    def history_visibility(
        self, sender: str, value: str, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Set ``world_readable``, ``shared``, ``invited`` or ``joined``."""
        return self.state_event(
            sender, "m.room.history_visibility", {"history_visibility": value}, **how
        )

    def name(self, sender: str, name: str, **how: Unpack[EventOptions]) -> BuiltEvent:
        """Set the room's name."""
        return self.state_event(sender, "m.room.name", {"name": name}, **how)

    def topic(self, sender: str, topic: str, **how: Unpack[EventOptions]) -> BuiltEvent:
        """Set the room's topic."""
        return self.state_event(sender, "m.room.topic", {"topic": topic}, **how)

    # Messages and what relates to them

    def message(self, sender: str, body: str = "hello", **how: Unpack[EventOptions]) -> BuiltEvent:
        """Send a text message."""
        return self.send(sender, "m.room.message", assembly.text(body), **how)

    def redact(
        self,
        sender: str,
        target: Reference,
        *,
        reason: str | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Redact an event.

        ``redacts`` is a top-level key up to version 10, and in the content from 11 on.
        """
        content = {} if reason is None else {"reason": reason}
        if number_of(self.version) >= 11:
            content["redacts"] = id_of(target)
        return self.send(sender, "m.room.redaction", content, redacts=target, **how)

    def react(
        self, sender: str, target: Reference, key: str = "👍", **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Send an annotation."""
        return self.send(sender, "m.reaction", assembly.reaction(id_of(target), key), **how)

    def edit(
        self, sender: str, target: Reference, body: str, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Replace a message."""
        return self.send(sender, "m.room.message", assembly.edit(id_of(target), body), **how)

    def reply(
        self, sender: str, target: Reference, body: str, **how: Unpack[EventOptions]
    ) -> BuiltEvent:
        """Send a rich reply."""
        return self.send(sender, "m.room.message", assembly.reply(id_of(target), body), **how)

    def threaded(
        self,
        sender: str,
        root: Reference,
        body: str,
        *,
        latest: Reference | None = None,
        **how: Unpack[EventOptions],
    ) -> BuiltEvent:
        """Send a message in the thread of `root`, after `latest`."""
        return self.send(
            sender,
            "m.room.message",
            assembly.threaded(id_of(root), id_of(latest or root), body),
            **how,
        )
