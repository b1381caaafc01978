"""The lazily loaded members that a client has been sent.

Client-server API, "Lazy-loading room members". A response leaves out a member event that the client
has been sent up to its token, as far as this process knows. What was sent is kept by token: a
client that has lost a response comes back with the token before it, and gets the members again.
Another process does not know, and sends them again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from storage.ids import EventId, RoomId, UserId
from storage.queries.events import StoredEvent
from storage.queries.sync.types import JoinedRoom, Sync

MEMBER: Final = "m.room.member"
MEMBERS_MAX: Final = 200_000
"""So many members of all clients are kept, some 20 MB."""

Client = tuple[UserId, str]
"""A user and a device."""
Members = Mapping[tuple[RoomId, str], EventId]


class SentMembers:
    """The members that clients have, by their last tokens. The client used last comes last."""

    def __init__(self, most: int = MEMBERS_MAX) -> None:
        self._most = most
        self._size = 0
        self._clients: dict[Client, dict[str, Members]] = {}

    def leave_out(self, client: Client, since: str | None, found: Sync) -> Sync:
        """Return the response to a request without the members that the client has."""
        tokens = self._taken(client)
        known = {} if since is None else tokens.get(since, {})
        kept = {} if since is None else {since: known}
        gone = found.leave.keys()
        members = {key: one for key, one in known.items() if key[0] not in gone}
        joined = {
            room_id: self._room(client[0], room_id, room, members)
            for room_id, room in found.join.items()
        }
        # two responses to one token may have led to the next one: only what both had is known
        other = {**tokens, **kept}.get(found.next_batch)
        if other is not None:
            members = dict(members.items() & other.items())
        self._keep(client, {**kept, found.next_batch: members})
        return replace(found, join=joined)

    def _room(
        self,
        user_id: UserId,
        room_id: RoomId,
        room: JoinedRoom,
        known: dict[tuple[RoomId, str], EventId],
    ) -> JoinedRoom:
        """Return the room without known members, and change these to what the client has then."""
        lists = [dict(_members(one)) for one in (room.state, room.state_after)]
        timeline = dict(_members(room.timeline.events))
        if any(user_id in one for one in (*lists, timeline)):  # the room may be new to the client
            for key in [key for key in known if key[0] == room_id]:
                del known[key]
        before = {user: one for (room, user), one in known.items() if room == room_id}
        for user in {*lists[0], *lists[1], *timeline}:
            sent = {one.get(user, before.get(user)) for one in lists}
            last = timeline.get(user, sent.pop() if len(sent) == 1 else None)
            known.pop((room_id, user), None)
            if last is not None:
                known[room_id, user] = last
        if not before:
            return room
        return replace(
            room,
            state=list(_unknown(room.state, before)),
            state_after=list(_unknown(room.state_after, before)),
        )

    def _taken(self, client: Client) -> dict[str, Members]:
        tokens = self._clients.pop(client, {})
        self._size -= sum(map(len, tokens.values()))
        return tokens

    def _keep(self, client: Client, tokens: dict[str, Members]) -> None:
        self._clients[client] = tokens
        self._size += sum(map(len, tokens.values()))
        while self._size > self._most:
            self._taken(next(iter(self._clients)))


def _members(events: list[StoredEvent]) -> Iterator[tuple[str, EventId]]:
    for event in events:
        if event.type == MEMBER and event.state_key is not None:
            yield event.state_key, event.event_id


def _unknown(events: list[StoredEvent], known: Mapping[str, EventId]) -> Iterator[StoredEvent]:
    for event in events:
        if event.type != MEMBER or known.get(event.state_key or "") != event.event_id:
            yield event
