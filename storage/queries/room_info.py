"""Facts about rooms that clients show: name, topic, join rule, creators, and the like.

One statement serves any number of rooms. It reads a few keys of each current state by their
numbers, and never the members: `rooms` has the counts. The content comes from other servers, so
every value is checked here. Postgres does not parse it: its JSON functions fail on a NUL.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

from storage import arguments as args
from storage.codec import StoredBytes, decode_recent
from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.errors import ResyncNeeded, StorageCorrupt
from storage.event.versions import version_of
from storage.ids import RoomId, UserId
from storage.queries.events import event_json
from storage.queries.sync.changed_rooms import events_of
from storage.queries.sync.response import SYNC_CURSOR_TOPOLOGICAL
from storage.streams import PaginationToken, VectorPosition
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import is_sync_token, read_positions
from storage.turns import in_turns, parts

SQL_ROOM_INFO: Final[LiteralString] = fill("""
SELECT r.room_id, r.room_version, r.joined_count, r.invited_count, entry.state_key_nid,
    entry.event_id, entry.redacted_by, entry.redacted_form, entry.json
FROM rooms r
LEFT JOIN LATERAL (
    SELECT c.state_key_nid, e.event_id, e.redacted_by, e.redacted_form, e.json
    FROM current_state c
    LEFT JOIN events e USING (event_nid)
    WHERE c.room_nid = r.room_nid
        AND c.state_key_nid = ANY(ARRAY[
            {KEY_CREATE}, {KEY_JOIN_RULES}, {KEY_HISTORY_VISIBILITY}, {KEY_NAME}, {KEY_TOPIC},
            {KEY_CANONICAL_ALIAS}, {KEY_AVATAR}, {KEY_ENCRYPTION}, {KEY_GUEST_ACCESS},
            {KEY_TOMBSTONE}
        ])
    OFFSET 0  -- room by room: otherwise the states of all rooms could be read
) AS entry ON true
WHERE r.room_id = ANY($1::text[])
""")


ROOMS_MAX: Final = 2_000
"""Rooms of one statement."""


class RoomInfoRow(NamedTuple):
    """A room with one event of its state. The columns of the event are None if it has none."""

    room_id: str
    room_version: str
    joined_count: int
    invited_count: int
    state_key_nid: int | None
    event_id: str | None
    redacted_by: int | None
    redacted_form: bool | None
    json: StoredBytes | None


CREATE: Final = 1
JOIN_RULES: Final = 4
VISIBILITY: Final = 5
NAME: Final = 9
TOPIC: Final = 10
ALIAS: Final = 11
AVATAR: Final = 12
ENCRYPTION: Final = 13
GUEST_ACCESS: Final = 14
TOMBSTONE: Final = 16

VISIBILITIES: Final = frozenset({"world_readable", "shared", "invited", "joined"})

Contents = Mapping[int, Mapping[str, Any]]
"""The contents of a current state, by the number of the state key."""


class DescribedRoom(NamedTuple):
    """A room: its columns, the sender of its create event, and the contents of its state.

    No event is kept beside its content. With the events of 1,000 rooms the garbage collector would
    take longer than the parser.
    """

    version: str
    joined_count: int
    invited_count: int
    creators: list[Any]
    contents: dict[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RoomInfo:
    """A room as its current state describes it.

    A text is None if its event is missing or redacted, or if the content is malformed. A room that
    is known only by outliers, such as an invite from another server, has a version and no more.
    """

    room_id: RoomId
    version: str
    type: str | None
    """`m.space` for a space."""
    name: str | None
    topic: str | None
    avatar: str | None
    """The URL, an mxc:// URI if the sender was honest."""
    alias: str | None
    """The canonical alias."""
    join_rule: str | None
    """None counts as `invite`."""
    allowed_rooms: tuple[RoomId, ...]
    """The rooms whose members may join, by a restricted join rule of the room's version."""
    visibility: str | None
    """The history visibility. None counts as `shared`."""
    guest_access: str | None
    """None counts as `forbidden`."""
    encryption: str | None
    """The algorithm. None: not encrypted, or malformed."""
    creators: tuple[UserId, ...]
    """The creator; from room version 12 on also `additional_creators`."""
    predecessor: RoomId | None
    successor: RoomId | None
    """The room that replaces this one, of its tombstone."""
    joined_count: int
    invited_count: int


async def rooms(conn: Connection, room_ids: Iterable[RoomId]) -> dict[RoomId, RoomInfo]:
    """Return the stored ones of these rooms, by id, in their order. `StorageCorrupt`."""
    requested = list(room_ids)
    infos: dict[RoomId, RoomInfo] = {}
    async for part in parts(requested, ROOMS_MAX):
        infos |= await _some_rooms(conn, part)
    return infos


async def _some_rooms(conn: Connection, room_ids: Sequence[RoomId]) -> dict[RoomId, RoomInfo]:
    rows = await conn.records(SQL_ROOM_INFO, room_ids, row=RoomInfoRow)
    states: dict[RoomId, DescribedRoom] = {}
    async for room_id, version, joined_count, invited_count, *event in in_turns(rows, _size_of):
        state = states.get(room_id)
        if state is None:
            state = states[room_id] = DescribedRoom(version, joined_count, invited_count, [], {})
        if event[0] is not None:
            _add_event(state, room_id, event)
    return {
        room_id: _room_info(room_id, states[room_id]) for room_id in room_ids if room_id in states
    }


def _size_of(row: Sequence[Any]) -> int:
    return 0 if row[-1] is None else len(row[-1])


def _add_event(state: DescribedRoom, room_id: RoomId, columns: Sequence[Any]) -> None:
    """Add the event of a row. `StorageCorrupt` if it is lost."""
    key_nid, event_id, redacted_by, redacted_form, stored = columns
    if event_id is None:
        raise StorageCorrupt("an event of the current state is missing", room_id=room_id)
    redacted = redacted_form or redacted_by is not None
    raw = decode_recent(stored, event_id, room_id)
    json = event_json(event_id, raw, state.version, redacted=redacted)
    content = json.get("content")
    state.contents[key_nid] = content if isinstance(content, dict) else {}
    if key_nid == CREATE:
        state.creators.append(json["sender"])


def _room_info(room_id: RoomId, state: DescribedRoom) -> RoomInfo:
    contents = state.contents
    return RoomInfo(
        room_id=room_id,
        version=state.version,
        type=_text(contents, CREATE, "type"),
        name=_text(contents, NAME, "name"),
        topic=_text(contents, TOPIC, "topic"),
        avatar=_text(contents, AVATAR, "url"),
        alias=text_of(_value(contents, ALIAS, "alias"), "#"),
        join_rule=_text(contents, JOIN_RULES, "join_rule"),
        allowed_rooms=_allowed_rooms(state),
        visibility=_visibility(contents),
        guest_access=_text(contents, GUEST_ACCESS, "guest_access"),
        encryption=_text(contents, ENCRYPTION, "algorithm"),
        creators=_creators(state),
        predecessor=_room(_part(_value(contents, CREATE, "predecessor"), "room_id")),
        successor=_room(_value(contents, TOMBSTONE, "replacement_room")),
        joined_count=state.joined_count,
        invited_count=state.invited_count,
    )


def _value(contents: Contents, key_nid: int, name: str) -> Any:
    """Return a value of the content of an event; None if it is not there."""
    content = contents.get(key_nid)
    return None if content is None else content.get(name)


def _part(value: Any, name: str) -> Any:
    """Return an entry of a JSON object; None for another value."""
    return value.get(name) if isinstance(value, dict) else None


def text_of(value: Any, sigil: str = "") -> str | None:
    """Return a text that is not empty, can be stored, and begins with the sigil; else None."""
    return value if value and args.is_text(value) and value.startswith(sigil) else None


def _text(contents: Contents, key_nid: int, name: str) -> str | None:
    return text_of(_value(contents, key_nid, name))


def _room(value: Any) -> RoomId | None:
    room_id = text_of(value, "!")
    return None if room_id is None else RoomId(room_id)


def _visibility(contents: Contents) -> str | None:
    visibility = _text(contents, VISIBILITY, "history_visibility")
    return visibility if visibility in VISIBILITIES else None


def _allowed_rooms(state: DescribedRoom) -> tuple[RoomId, ...]:
    """Return the rooms in the `allow` of restricted join rules, each once."""
    rule = _text(state.contents, JOIN_RULES, "join_rule")
    conditions = _value(state.contents, JOIN_RULES, "allow")
    restricted = rule is not None and version_of(state.version).is_restricted(rule)
    if not restricted or not isinstance(conditions, list):
        return ()
    rooms = [
        _room(_part(condition, "room_id"))
        for condition in conditions
        if _part(condition, "type") == "m.room_membership"
    ]
    return tuple(dict.fromkeys(room_id for room_id in rooms if room_id is not None))


def _creators(state: DescribedRoom) -> tuple[UserId, ...]:
    """Return the users who made the room, each once."""
    if not state.creators:
        return ()
    version, content = version_of(state.version), state.contents[CREATE]
    users = state.creators if version.creator_is_sender else [content.get("creator")]
    more = content.get("additional_creators")
    if version.privileged_creators and isinstance(more, list):
        users = users + more
    texts = [text_of(user, "@") for user in users]
    return tuple(dict.fromkeys(UserId(user) for user in texts if user is not None))


# --------------------------------------------------------------------------------------------------
# Positions in a room at which members are read: from tokens of sync and of pages.
#
# A sync token, and a page token next to a timeline, cover a part of the room's stream: the current
# state of that time is today's without the later changes (`state_deltas`). Any other page token is
# a position in the topological order. The state there is the one after the last event before it.


class RoomPosition(NamedTuple):
    """A position in a room.

    ``covered``: the facts of the stream that come before it. ``below``: it is also at this
    (topological, stream) position. None: at the end of what is covered.
    """

    covered: VectorPosition
    below: tuple[int, int] | None = None
    text: str = ""

    @property
    def vector(self) -> tuple[int, list[str], list[int]]:
        """Return the least position of all writers, and the writers that are further."""
        return (
            self.covered.min,
            [writer for writer, _ in self.covered.items],
            [position for _, position in self.covered.items],
        )

    def refuse_purged(self, purged_upto: int | None) -> None:
        """Raise `ResyncNeeded` for a position from before the purged state changes."""
        if self.covered.min < (purged_upto or 0):
            raise ResyncNeeded(self.text, "the state changes since then are not kept any more")


NOW = RoomPosition(VectorPosition(LARGEST_POSITION))


def position_at(token: str | None, deployment: str) -> RoomPosition:
    """Return the position of a token of sync or of a page; None is now. `InvalidToken`."""
    if token is None:
        return NOW
    if is_sync_token(token):
        return RoomPosition(events_of(read_positions(token, deployment)), text=token)
    page = PaginationToken.parse(token, deployment)
    if page.topological >= SYNC_CURSOR_TOPOLOGICAL:
        return RoomPosition(VectorPosition(page.live), text=token)
    return RoomPosition(VectorPosition(page.live), (page.topological, page.stream), token)
