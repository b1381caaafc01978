"""Conditions on the rooms of a list.

A filter is compiled into few functions, because a list may have 10,000 rooms. The facts and the
account data that it looks at are those of one snapshot (`FilterData`). If they differ from the ones
that a filtered list was made with, `FilterData.differing` returns the rooms to look at again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from storage.database.names import INVITE
from storage.queries.sliding.personal_data import NO_DATA, PersonalData
from storage.queries.sliding.room_state import RoomFacts
from storage.queries.sliding.types import SlidingFilter
from storage.queries.sliding.user_rooms import CompactRoom

Facts = Callable[[str], RoomFacts | None]
Condition = Callable[[str, int], bool]
"""Takes the id of a room, and the membership of the user."""


class FilterData(NamedTuple):
    """The data of a snapshot that conditions look at: of the user, and the children of spaces."""

    personal: PersonalData = NO_DATA
    children: frozenset[str] = frozenset()

    def differing(self, other: "FilterData") -> set[str]:
        """Return the ids of rooms for which a condition may give another result."""
        mine, theirs = self.personal, other.personal
        room_ids: set[str] = set(self.children ^ other.children)
        if mine.direct is not theirs.direct:
            room_ids |= mine.direct ^ theirs.direct
        if mine.tags is not theirs.tags:
            ids = mine.tags.keys() | theirs.tags.keys()
            room_ids.update(
                room_id for room_id in ids if mine.tags.get(room_id) != theirs.tags.get(room_id)
            )
        return room_ids


def needs_facts(filters: SlidingFilter) -> bool:
    """Return whether the filter looks at facts of rooms."""
    return (
        filters.is_encrypted is not None
        or filters.room_types is not None
        or filters.not_room_types is not None
        or filters.room_name_like is not None
    )


def needs_personal_data(filters: SlidingFilter) -> bool:
    """Return whether the filter looks at the account data of the user."""
    return not (filters.is_dm is None and filters.tags is None and filters.not_tags is None)


def passing(
    filters: SlidingFilter, data: FilterData, facts: Facts, rooms: Iterable[CompactRoom]
) -> list[CompactRoom]:
    """Return the rooms that meet all conditions.

    ``facts`` returns those of each room, if the filter looks at any.
    """
    passed = list(rooms)
    for meets in _conditions(filters, data, facts):
        passed = [room for room in passed if meets(room[1], room[2])]
    return passed


def _conditions(filters: SlidingFilter, data: FilterData, facts: Facts) -> Iterable[Condition]:
    """Yield the conditions of a filter, the cheapest first."""
    if (is_invited := filters.is_invited) is not None:
        yield lambda _, membership: (membership == INVITE) == is_invited
    if (is_dm := filters.is_dm) is not None:
        direct = data.personal.direct
        yield lambda room_id, _: (room_id in direct) == is_dm
    if filters.spaces is not None:
        yield lambda room_id, _: room_id in data.children
    tags = data.personal.tags
    if filters.tags is not None:
        yield _tagged(tags, frozenset(filters.tags), expected=True)
    if filters.not_tags is not None:
        yield _tagged(tags, frozenset(filters.not_tags), expected=False)
    if needs_facts(filters):
        yield _with_facts(filters, facts)


def _tagged(
    tags: Mapping[str, frozenset[str]], some: frozenset[str], *, expected: bool
) -> Condition:
    rooms = {room_id for room_id, room_tags in tags.items() if not some.isdisjoint(room_tags)}
    return lambda room_id, _: (room_id in rooms) == expected


def _with_facts(filters: SlidingFilter, facts: Facts) -> Condition:
    """Return the condition on the facts of a room. Rooms share them, but for names."""
    text = None if filters.room_name_like is None else filters.room_name_like.lower()
    results: dict[RoomFacts, bool] = {}

    def condition(room_id: str, _: int) -> bool:
        of_room = facts(room_id)
        if of_room is None:
            raise KeyError(room_id)
        result = results.get(of_room)
        if result is None:
            result = results[of_room] = _has_facts(filters, text, of_room)
        return result

    return condition


def _has_facts(filters: SlidingFilter, text: str | None, facts: RoomFacts) -> bool:
    if filters.is_encrypted not in (None, facts.is_encrypted):
        return False
    if filters.room_types is not None and facts.room_type not in filters.room_types:
        return False
    if filters.not_room_types is not None and facts.room_type in filters.not_room_types:
        return False
    return text is None or (facts.name is not None and text in facts.name.lower())
