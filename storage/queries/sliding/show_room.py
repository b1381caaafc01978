"""One room of a response, from its timeline and its state."""

from collections.abc import Collection
from typing import Any, Final

from storage.database.names import INVITE, JOIN, MEMBERSHIP_NAMES, MEMBERSHIPS
from storage.ids import UserId
from storage.queries.events import StoredEvent
from storage.queries.sliding.read_room import ReadRoom
from storage.queries.sliding.room_state import SlidingState
from storage.queries.sliding.types import Hero, SlidingRoom
from storage.queries.sync.response import BESIDE_TIMELINE
from storage.queries.sync.stripped_state import stripped
from storage.streams import PaginationToken

KNOCK: Final = MEMBERSHIPS["knock"]


def show_inside(
    room: ReadRoom,
    state: SlidingState | None,
    deployment: str,
    *,
    is_direct: bool,
    is_first: bool,
) -> SlidingRoom | None:
    """Return a room that the user is in or was. None: there is nothing new.

    ``is_first``: the connection is new, so no event is live.
    """
    row, events = room.timeline.row, room.events
    found = state or SlidingState(room.room)
    is_new = room.is_new
    changed = dict(_summary(found, is_new=is_new))
    if is_direct if is_new or room.known is None else is_direct != room.known.is_direct:
        changed["is_dm"] = is_direct
    if found.counts is not None:
        changed["joined_count"], changed["invited_count"] = found.counts
    shows_timeline = is_new or room.reason.expands or bool(events) or room.limited
    if not (shows_timeline or changed or found.required or found.removed or room.is_member_changed):
        return None
    start = (events[0].stream_ordering or 0) - 1 if events else _end(room)
    live = [event for event in events if (event.stream_ordering or 0) > row.reached]
    return SlidingRoom(
        membership=MEMBERSHIP_NAMES.get(row.membership, "leave"),
        initial=is_new,
        required_state=found.required,
        removed_state=found.removed,
        timeline=events,
        prev_batch=PaginationToken(BESIDE_TIMELINE, 0, live=start).print(deployment),
        limited=room.limited,
        expanded_timeline=not is_new
        and any((event.stream_ordering or 0) <= row.lower for event in events),
        num_live=0 if is_first else len(live),
        bump_stamp=_bump(room),
        lists=room.wanted.lists,
        changed=frozenset("counts" if name.endswith("_count") else name for name in changed),
        **changed,
    )


def _end(room: ReadRoom) -> int:
    """Return the position where an empty timeline ends."""
    row = room.timeline.row
    if row.membership != JOIN:
        return row.member_ordering
    return max(room.wanted.listed.activity, row.lower)


def _bump(room: ReadRoom) -> int:
    row = room.timeline.row
    return (row.bump if row.membership == JOIN else None) or row.member_ordering


def _summary(state: SlidingState, is_new: bool) -> dict[str, Any]:
    """Return the name, the avatar and the heroes, where they are set or have changed."""
    values: dict[str, Any] = {
        "name": _text(state.named.get("name"), "name"),
        "avatar": _text(state.named.get("avatar"), "url"),
        "heroes": None
        if state.heroes is None
        else tuple(_hero(user, state.members.get(user)) for user in state.heroes),
    }
    due = state.due if state.heroes is not None else state.due - {"heroes"}
    return {name: values[name] for name in due if not is_new or values[name] is not None}


def _text(event: StoredEvent | None, key: str) -> str | None:
    value = None if event is None else event.content.get(key)
    return value if isinstance(value, str) and value else None


def _hero(user_id: str, event: StoredEvent | None) -> Hero:
    return Hero(UserId(user_id), _text(event, "displayname"), _text(event, "avatar_url"))


def show_outside(
    room: ReadRoom,
    state: SlidingState | None,
    ignored: Collection[UserId],
    *,
    is_direct: bool,
) -> SlidingRoom | None:
    """Return a room that the user was never in: an invite, a knock, or how it ended.

    Of a forgotten room it has the leave alone. None: there is nothing new, or the invite is by an
    ignored user.
    """
    row = room.timeline.row
    if state is None or (state.own is None and not room.is_reset):
        return None
    if row.membership == INVITE and state.own is not None and state.own.sender in ignored:
        return None
    shown = state.shown if row.membership in (INVITE, KNOCK) else []
    was_joined = room.wanted.listed.is_forgotten and room.wanted.listed.was_joined
    return SlidingRoom(
        membership=MEMBERSHIP_NAMES.get(row.membership, "leave"),
        initial=True,
        is_dm=is_direct if is_direct or room.reason.is_direct_changed else None,
        required_state=[state.own] if was_joined and state.own is not None else (),
        removed_state=state.removed,
        bump_stamp=row.member_ordering,
        stripped_state=None if was_joined else stripped(shown, state.own, state.brought) or None,
        lists=room.wanted.lists,
        changed=frozenset({"is_dm"} if is_direct or room.reason.is_direct_changed else ()),
    )
