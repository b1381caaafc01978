"""Find the new states that the room has already, so that the swap leaves their events alone.

The states before and after an event have a state group among the shadow tables, and one among the
live ones. The two are equal if they have the same entries, and if the live group and each group on
its path are sound, and of this room.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from storage.database.connection import Connection
from storage.maintenance.room_states import RoomStates
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow
from storage.rebuild.arrivals import ArrivalRow


class Size(NamedTuple):
    """The key of a state: the digest of its entries, and their number."""

    digest: int
    entries: int


class Matching:
    """The shadow groups that are equal to live ones.

    ``wrong``: live groups with corrupt rows.
    """

    def __init__(self, room_nid: int, wrong: frozenset[int]) -> None:
        self.wrong = wrong
        self._room_nid = room_nid
        self.same: dict[int, int] = {}
        self._left: dict[int, Size] = {}
        self._states = RoomStates()

    async def match(
        self, reader: Connection, change_set: ChangeSet, arrived: Mapping[int, ArrivalRow]
    ) -> None:
        """Compare the states of a change set before it is written.

        ``arrived``: its events in the live tables.
        """
        self._left.update(
            (number, Size(group.digest, len(group.entries)))
            for number, group in change_set.states.new_groups.items()
        )
        rows = [new.row for new in change_set.events.new_events.values()] + list(
            change_set.events.changed_events.values()
        )
        await self._compare(reader, _pairs(rows, arrived))

    async def match_current(self, reader: Connection, planned_group: int, live: int) -> None:
        """Compare the current states."""
        await self._compare(reader, [(planned_group, live)])

    async def _compare(self, reader: Connection, pairs: Iterable[tuple[int, int]]) -> None:
        wanted: dict[int, set[int]] = defaultdict(set)
        for planned_group, live in pairs:
            if planned_group in self._left:
                wanted[planned_group].add(live)
        groups = await self._states.load(
            reader, {live for candidates in wanted.values() for live in candidates}
        )
        for planned_group, candidates in wanted.items():
            for live in sorted(candidates & groups.keys()):
                group = groups[live]
                is_sound = self.wrong.isdisjoint(
                    step.state_group for step in group.steps
                ) and self._states.is_of_room(group, self._room_nid)
                if is_sound and self._left[planned_group] == (group.digest, len(group.entries)):
                    self.same[planned_group] = live
                    del self._left[planned_group]
                    break


def _pairs(
    rows: Iterable[EventRow], arrived: Mapping[int, ArrivalRow]
) -> Iterable[tuple[int, int]]:
    for row in rows:
        live = arrived.get(row.event_nid)
        if live is None or live.state_group_before is None or row.state_group_before is None:
            continue
        yield row.state_group_before, live.state_group_before
        if row.state_group_after is not None and live.state_group_after is not None:
            yield row.state_group_after, live.state_group_after
