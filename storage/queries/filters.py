"""The filters of the client-server API, as typed arguments. Client-server API, "Filtering".

A filter is a part of the statement, and is never applied afterwards. So limits stay exact. The
schema has the condition: `filter_of` turns the names into numbers, `is_wanted` checks an event.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, LiteralString

from storage import arguments as args
from storage.database.placeholders import fill
from storage.ids import RoomId


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Events of these types and senders, without the excluded ones. Exclusion wins.

    None: any; an empty collection: none at all.

    In types ``*`` stands for any characters. ``contains_url``: only events whose content has a key
    "url", or only those without. `InputError` for a single text in place of a collection.
    """

    types: Collection[str] | None = None
    not_types: Collection[str] | None = None
    senders: Collection[str] | None = None
    not_senders: Collection[str] | None = None
    contains_url: bool | None = None

    def __post_init__(self) -> None:
        for name in ("types", "not_types", "senders", "not_senders"):
            object.__setattr__(self, name, args.filtered(getattr(self, name), name))
        if self.contains_url is not None:
            args.flag(self.contains_url, "contains_url")

    @property
    def values(self) -> dict[str, list[str] | bool | None]:
        """Return the values of `FILTER_VALUES`."""
        return {
            "types": _list(self.types),
            "not_types": _list(self.not_types),
            "senders": _list(self.senders),
            "not_senders": _list(self.not_senders),
            "contains_url": self.contains_url,
        }

    @property
    def arguments(self) -> tuple[list[str] | bool | None, ...]:
        """Return the arguments of `filter_of`."""
        return tuple(self.values.values())


ANY_EVENT: Final = EventFilter()

FILTER_VALUES: Final = {
    "types": "text[]",
    "not_types": "text[]",
    "senders": "text[]",
    "not_senders": "text[]",
    "contains_url": "boolean",
}
"""The parameters that `EventFilter.values` has the values of: those of `filter_of`."""

PART_IGNORED: Final[LiteralString] = """
ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE(:ignored, ARRAY(
    -- clients can store anything there, also the one character that jsonb cannot have
    SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\\u0000', '\\ufffd')::jsonb,
        '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
    FROM principals p
    CROSS JOIN event_types t
    JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
        AND d.type_nid = t.type_nid
    WHERE p.name = :user_id AND t.type = 'm.ignored_user_list'
))))
"""
"""The users in `:ignored`; where none are given, those that `:user_id` ignores by account data.

Client-server API, "Ignoring Users": m.ignored_user_list.
"""

TEMPLATE_READER: Final[LiteralString] = """
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = :user_id),
        0) AS principal_nid,
        {ignored} AS ignored
)
"""

PART_READER: Final[LiteralString] = fill(TEMPLATE_READER, ignored=PART_IGNORED)
"""The user who reads, and whom they ignore."""

PART_IS_REQUESTED: Final[LiteralString] = """
user_sees(e, :user_sees.of(r))
AND not_ignored(e, r.ignored)
AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
"""
"""Whether the reader `r` may see the event `e`, and it passes the filter (`filter_of`) beside it.
"""

TEMPLATE_RELATION_IS_VISIBLE: Final[LiteralString] = """
    user_sees_relation(e, :user_sees.of({reader}), {reader}.ignored)
    AND :whole.of({reader})
"""
"""Whether a user sees that the event `e`, shown whole, relates to another one.

A relation is a part of the content, which erasure removes.
"""

FLAGS: Final = (
    "lazy_load_members",
    "include_redundant_members",
    "include_leave",
    "unread_thread_notifications",
)


@dataclass(frozen=True, slots=True)
class SyncFilter:
    """The filter of a sync: which rooms, and which events of their timelines and states.

    ``rooms`` None: all; ``not_rooms`` wins. Removed state keys are returned whatever ``state`` is.

    ``lazy_load_members``: the response has the members of a timeline and the heroes of a summary.
    Those of a timeline are its senders, those whose membership it changes, and with a whole room
    the user. The other members of a whole room are left out. Members that a response has sent to
    the ``device_id`` before are not repeated, as far as this process knows.
    ``include_redundant_members``: all of them are in each response.

    ``include_leave``: a first sync, and one with ``full_state``, also have the rooms that the user
    left or was banned from before, if they have not forgotten them. A later sync has each leave
    once in any case.

    ``unread_thread_notifications``: the response (`storage.responses.sync`) has a count for each
    thread. Otherwise it has one number for all events of a room.
    """

    rooms: Collection[RoomId] | None = None
    not_rooms: Collection[RoomId] = ()
    timeline: EventFilter = ANY_EVENT
    state: EventFilter = ANY_EVENT
    lazy_load_members: bool = False
    include_redundant_members: bool = False
    include_leave: bool = False
    unread_thread_notifications: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rooms", args.filtered(self.rooms, "rooms"))
        object.__setattr__(
            self, "not_rooms", args.filtered(args.listed(self.not_rooms, "not_rooms"), "not_rooms")
        )
        for name in ("timeline", "state"):
            args.instance(getattr(self, name), EventFilter, name)
        for name in FLAGS:
            args.flag(getattr(self, name), name)


ANY_ROOM: Final = SyncFilter()


def _list(names: Collection[str] | None) -> list[str] | None:
    return None if names is None else list(names)
