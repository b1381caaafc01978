"""Audiences, and the rows that say which of them a principal belongs to.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Iterable

from storage.persist.model.caches import WriterCaches
from storage.persist.model.database_answers import Answers
from storage.persist.model.missing_data import MissingData, ensure
from storage.persist.model.name_view import NameView
from storage.persist.model.room_view import RoomView
from storage.persist.model.rows import (
    UNSEEN,
    AudienceRow,
    PastRow,
    VisibilityRow,
)
from storage.visibility import past_visibility


class VisibilityView:
    """Audiences, and the rows that say which of them a principal belongs to."""

    def __init__(
        self, caches: WriterCaches, names: NameView, rooms: RoomView, answers: Answers
    ) -> None:
        self.caches = caches
        self.names = names
        self.rooms = rooms
        self.answers = answers
        self.current: dict[tuple[int, int], VisibilityRow] = {}
        self.past: dict[tuple[int, int], dict[int, PastRow]] = {}  # keyed by the lowest audience
        self.audiences: dict[tuple[int, int], AudienceRow] = {}
        self.new_visibility: dict[tuple[int, int], VisibilityRow] = {}
        self.new_past: dict[tuple[int, int, int], PastRow] = {}
        self.new_audiences: dict[tuple[int, int], AudienceRow] = {}
        self.absent_visibility: set[tuple[int, int]] = set()
        """Those of `new_visibility` that have no row in the table."""
        self.absent_audiences: set[tuple[int, int]] = set()

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        key = (room_nid, principal_nid)
        row = self.current.get(key) or self.caches.visibility.row(key)
        if row is None:
            if principal_nid in self.names.newcomers or room_nid in self.rooms.fresh_rooms:
                return UNSEEN
            raise MissingData("visibility", (key,))
        return row

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the visibility rows of these principals are loaded."""
        if room_nid in self.rooms.fresh_rooms:
            return
        keys = (
            (room_nid, principal)
            for principal in principal_nids
            if principal not in self.names.newcomers
        )
        ensure("visibility", keys, self.current, self.caches.visibility)

    def knows_visibility(self, room_nid: int, principal_nid: int) -> bool:
        """Return whether a principal's row is available without loading."""
        key = (room_nid, principal_nid)
        return (
            principal_nid in self.names.newcomers
            or key in self.current
            or key in self.caches.visibility
        )

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        key = (room_nid, number)
        row = self.audiences.get(key) or self.caches.audiences.row(key)
        if row is None:
            raise MissingData("audiences", (key,))
        return row

    def ensure_audiences(self, room_nid: int, audiences: Iterable[int]) -> None:
        """Raise `MissingData` unless the rows of these audiences are loaded."""
        ensure(
            "audiences",
            ((room_nid, number) for number in audiences),
            self.audiences,
            self.caches.audiences,
        )

    def past_row(self, room_nid: int, principal_nid: int, number: int) -> PastRow:
        """Return the `past_visibility` row that covers an audience of a principal.

        Such an audience is lower than `first_audience` in the principal's `visibility` row.
        """
        for row in self.past.get((room_nid, principal_nid), {}).values():
            if row.tells_of(number):
                return row
        raise MissingData("past", ((room_nid, principal_nid, number),))

    def cuts(self, row: VisibilityRow) -> bool:
        """Return whether a row has so many ranges that older ones move to `past_visibility`."""
        return past_visibility.boundary(row.audiences, row.invited_audiences) is not None

    def set_visibility(self, key: tuple[int, int], row: VisibilityRow) -> None:
        if key not in self.new_visibility and not self._has_visibility(key):
            self.absent_visibility.add(key)
        self.current[key] = self.new_visibility[key] = row

    def set_past(self, key: tuple[int, int], row: PastRow) -> None:
        """Set a `past_visibility` row of a principal, new or changed."""
        self.past.setdefault(key, {})[row.first_audience] = self.new_past[
            (*key, row.first_audience)
        ] = row

    def set_audience(self, key: tuple[int, int], row: AudienceRow) -> None:
        """Set the row of an audience. One that was not looked up before is new."""
        if key not in self.audiences and key not in self.caches.audiences:
            self.absent_audiences.add(key)
        self.audiences[key] = self.new_audiences[key] = row

    def _has_visibility(self, key: tuple[int, int]) -> bool:
        """Return whether the table may have a row of a principal that was looked up.

        A stored row may equal `UNSEEN`, but is another object. A cached one may not be stored.
        """
        known = self.current.get(key)
        return key in self.caches.visibility if known is None else known is not UNSEEN
