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
from storage.queries.sliding.user_rooms import BriefRoom

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
        found: set[str] = set(self.children ^ other.children)
        if mine.direct is not theirs.direct:
            found |= mine.direct ^ theirs.direct
        if mine.tags is not theirs.tags:
            ids = mine.tags.keys() | theirs.tags.keys()
            found.update(one for one in ids if mine.tags.get(one) != theirs.tags.get(one))
        return found


def needs_facts(wanted: SlidingFilter) -> bool:
    """Return whether the filter looks at facts of rooms."""
    return (
        wanted.is_encrypted is not None
        or wanted.room_types is not None
        or wanted.not_room_types is not None
        or wanted.room_name_like is not None
    )


def needs_personal_data(wanted: SlidingFilter) -> bool:
    """Return whether the filter looks at the account data of the user."""
    return not (wanted.is_dm is None and wanted.tags is None and wanted.not_tags is None)


def passing(
    wanted: SlidingFilter, data: FilterData, facts: Facts, rooms: Iterable[BriefRoom]
) -> list[BriefRoom]:
    """Return the rooms that meet all conditions.

    ``facts`` returns those of each room, if the filter looks at any.
    """
    found = list(rooms)
    for meets in _conditions(wanted, data, facts):
        found = [room for room in found if meets(room[1], room[2])]
    return found


def _conditions(wanted: SlidingFilter, known: FilterData, facts: Facts) -> Iterable[Condition]:
    """Yield the conditions of a filter, the cheapest first."""
    if (is_invited := wanted.is_invited) is not None:
        yield lambda _, membership: (membership == INVITE) == is_invited
    if (is_dm := wanted.is_dm) is not None:
        direct = known.personal.direct
        yield lambda room_id, _: (room_id in direct) == is_dm
    if wanted.spaces is not None:
        yield lambda room_id, _: room_id in known.children
    tags = known.personal.tags
    if wanted.tags is not None:
        yield _tagged(tags, frozenset(wanted.tags), is_wanted=True)
    if wanted.not_tags is not None:
        yield _tagged(tags, frozenset(wanted.not_tags), is_wanted=False)
    if needs_facts(wanted):
        yield _with_facts(wanted, facts)


def _tagged(
    tags: Mapping[str, frozenset[str]], some: frozenset[str], *, is_wanted: bool
) -> Condition:
    rooms = {room_id for room_id, given in tags.items() if not some.isdisjoint(given)}
    return lambda room_id, _: (room_id in rooms) == is_wanted


def _with_facts(wanted: SlidingFilter, facts: Facts) -> Condition:
    """Return the condition on the facts of a room. Rooms share them, but for names."""
    text = None if wanted.room_name_like is None else wanted.room_name_like.lower()
    results: dict[RoomFacts, bool] = {}

    def condition(room_id: str, _: int) -> bool:
        of_room = facts(room_id)
        if of_room is None:
            raise KeyError(room_id)
        result = results.get(of_room)
        if result is None:
            result = results[of_room] = _has_facts(wanted, text, of_room)
        return result

    return condition


def _has_facts(wanted: SlidingFilter, text: str | None, facts: RoomFacts) -> bool:
    if wanted.is_encrypted not in (None, facts.is_encrypted):
        return False
    if wanted.room_types is not None and facts.room_type not in wanted.room_types:
        return False
    if wanted.not_room_types is not None and facts.room_type in wanted.not_room_types:
        return False
    return text is None or (facts.name is not None and text in facts.name.lower())
