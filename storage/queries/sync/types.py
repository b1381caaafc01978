"""The response of /sync. Client-server API, "Syncing": the parts that are room events."""

from dataclasses import dataclass, field
from typing import Any

from storage import arguments as args
from storage.ids import RoomId, StateKey, UserId
from storage.queries.events import StoredEvent
from storage.queries.unread import Unread
from storage.streams.receipts import ReceiptRow


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in the order of their arrival, the latest last.

    ``limited``: there may be more events between the last token and the first event. A gap lies
    there, or `Config.traversal_rows_max` events were read, and the hidden and filtered ones among
    them left no room. It is also limited where a state event of it was replaced later, by a change
    that the user may not see: then it begins after that event. The timeline of a room that the user
    joined and left since the last token is limited as well, because the client may have a timeline
    of an earlier stay. ``prev_batch`` pages back from there (`store.messages`). It returns every
    event that is not in the timeline, and none that is.
    """

    events: list[StoredEvent]
    limited: bool
    prev_batch: str


@dataclass(frozen=True, slots=True)
class RoomSummary:
    """The counts of joined and invited members, and the heroes of a room without a name.

    The `heroes` are up to five members, without the user, in the order of their membership events:
    joined or invited ones, else those who left. None: the room has a name or a canonical alias.
    """

    joined_count: int
    invited_count: int
    heroes: tuple[UserId, ...] | None


@dataclass(frozen=True, slots=True)
class JoinedRoom:
    """One room that the user is in.

    ``state`` leads from what the client knows to the start of the timeline, ``state_after`` to its
    end: state events that are new or changed, or all of them where the client knows nothing. A
    change inside a gap before the timeline is in ``state``. So is one during the timeline of which
    the timeline has no event: it was hidden from the user, or came with a merge. ``state_removed``
    are the keys that state resolution took away altogether, as of the end. ``summary`` is None
    where it has not changed.

    The others are for a sync that includes them. ``receipts`` are the new ones, private ones of the
    user only. ``account_data`` has the new contents by type. ``unread`` are the counts.
    """

    timeline: Timeline
    state: list[StoredEvent]
    state_after: list[StoredEvent]
    state_removed: list[StateKey]
    summary: RoomSummary | None = None
    receipts: list[ReceiptRow] = field(default_factory=list)
    account_data: dict[str, dict[str, Any]] = field(default_factory=dict)
    unread: Unread | None = None


class LeftRoom(JoinedRoom):
    """A room that the user has left, or was banned from, since the last sync; as of then.

    A user who joined and left since then gets the whole state, and a ``limited`` timeline. So does
    one who never joined, if they may see the event that ended it. Otherwise their state is that
    event alone.

    A sync with account data also has a room that was left before, if its ``account_data`` is new.
    There are no receipts and no ``unread``.

    With `SyncFilter.include_leave` also a room that was left before. Its whole state is that at the
    end of the last stay. There is none if state changes of that time are purged.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class InvitedRoom:
    """A new invite. ``invite_state`` are stripped events: type, state_key, sender and content."""

    invite_state: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class KnockedRoom:
    """A new knock. ``knock_state`` are stripped events: type, state_key, sender and content."""

    knock_state: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sync:
    """A response of `store.sync`. ``next_batch`` is the next ``since``.

    ``next_rooms``: there are more rooms than ``rooms_limit``. Give it as ``since`` for the next
    ones, as of the same position: every part has the same ``next_batch``. None after the last part.

    ``account_data`` (global, by type) and ``to_device`` (messages, oldest first) are for a sync
    that includes them.
    """

    next_batch: str
    join: dict[RoomId, JoinedRoom] = field(default_factory=dict)
    invite: dict[RoomId, InvitedRoom] = field(default_factory=dict)
    knock: dict[RoomId, KnockedRoom] = field(default_factory=dict)
    leave: dict[RoomId, LeftRoom] = field(default_factory=dict)
    next_rooms: str | None = None
    account_data: dict[str, dict[str, Any]] = field(default_factory=dict)
    to_device: list[dict[str, Any]] = field(default_factory=list)
    unread_thread_notifications: bool = False
    """As the filter of the request has it."""
    ignored: args.Ignored = args.ACCOUNT_DATA
    """As the request has it, for `storage.responses.sync`."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing new."""
        rooms = self.join or self.invite or self.knock or self.leave
        return not (rooms or self.account_data or self.to_device)
