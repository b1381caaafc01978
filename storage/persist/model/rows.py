"""What the planner knows of the tables: one NamedTuple per kind of row, as loaded and as written."""

from enum import Enum
from typing import NamedTuple, Self

from storage.database.names import JOIN
from storage.errors import StorageCorrupt
from storage.visibility import past
from storage.visibility.multirange import EMPTY, Ranges, add, contains, remove, unending


class EventRow(NamedTuple):
    """One row of `events` without the bytes.

    Outliers have None in orderings, groups and audience.
    """

    event_nid: int
    event_id: str
    room_nid: int
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int
    origin_server_ts: int
    state_group_before: int | None
    state_group_after: int | None
    audience: int | None
    redacted_by: int | None
    sender_nid: int
    type_nid: int
    state_key_nid: int | None
    membership: int | None
    outlier: bool
    backfilled: bool
    soft_failed: bool
    redacted_form: bool
    rejected: str | None
    prev_events: tuple[int, ...]
    auth_events: tuple[int, ...]
    ineffective: bool

    def at(self, stream_ordering: int) -> "EventRow":
        """The row with its position.

        As `_replace`, in a fifth of the time: every event comes through here.
        """
        return EventRow._make(self[:3] + (stream_ordering,) + self[4:])  # noqa: RUF005  # in half the time of what it wants

    def with_state(self, state_group_after: int | None, audience: int) -> "EventRow":
        """The row with the state after the event, and its audience; likewise."""
        return EventRow._make(self[:8] + (state_group_after, audience) + self[10:])  # noqa: RUF005  # likewise

    @property
    def after(self) -> int:
        """The state group after the event; only for events that are no outliers."""
        group = self.state_group_after or self.state_group_before
        if group is None:
            raise StorageCorrupt("an outlier has no state", event_id=self.event_id)
        return group

    @property
    def order(self) -> int:
        """The topological ordering; only for events that are no outliers."""
        if self.topological_ordering is None:
            raise StorageCorrupt("an outlier has no place in the order", event_id=self.event_id)
        return self.topological_ordering

    @property
    def is_out_of_band(self) -> bool:
        """A membership that came out of band, and was not authorised yet.

        The rules want auth events for each of these; it has none here.

        As is_out_of_band in the schema.
        """
        return (
            self.outlier
            and not self.auth_events
            and self.rejected is None
            and self.membership is not None
            and self.membership != JOIN
        )

    @property
    def accepted(self) -> bool:
        """Passed all checks on arrival: neither rejected nor soft-failed."""
        return self.rejected is None and not self.soft_failed


class RoomRow(NamedTuple):
    """One row of `rooms`. ``write_version`` 0 is a room that is not in the table yet."""

    room_nid: int
    room_id: str
    room_version: str
    write_version: int
    next_audience: int
    current_state_group: int | None
    max_topological_ordering: int
    forward_extremities: tuple[int, ...]
    current_audience: int
    out_of_range: Ranges
    removals: int = 0


class MissingRow(NamedTuple):
    """One row of `missing_events`: an event that others name as parent and that is not held in the timeline."""

    event_nid: int
    event_id: str
    room_nid: int
    superseded: bool
    child_nids: tuple[int, ...]


Counts = tuple[int, int]
"""Users of a principal that are joined, and invited."""


class PrincipalStanding(Enum):
    """How a principal stands to an audience: not in it, in it by an invitation alone, or joined."""

    OUT = 0
    INVITED = 1
    IN = 2


class VisibilityRow(NamedTuple):
    """One row of `visibility`, without its key. A principal without a row is `UNSEEN`."""

    audiences: Ranges
    last_join_topological: int | None
    joined_count: int
    invited_count: int
    invited_audiences: Ranges = EMPTY
    first_audience: int | None = None
    """The row tells of the audiences from this one on; a `PastRow` each of those below.

    None: there are none.
    """

    def tells_of(self, number: int) -> bool:
        """Return whether the row itself says how the principal stands to an audience."""
        return self.first_audience is None or number >= self.first_audience

    @property
    def current(self) -> PrincipalStanding:
        """How the principal stands to the audience of the current state."""
        return _standing(unending(self.audiences), unending(self.invited_audiences))

    def at(self, number: int) -> PrincipalStanding:
        """How the principal stands to an audience."""
        return _standing(contains(self.audiences, number), contains(self.invited_audiences, number))

    def placed(self, low: int, high: int | None, standing: PrincipalStanding) -> Self:
        """The row with the principal standing so to the audiences in ``[low, high)``."""
        audiences, invited = _placed(self.audiences, self.invited_audiences, low, high, standing)
        return self._replace(audiences=audiences, invited_audiences=invited)

    def cut(self) -> "tuple[list[PastRow], Self]":
        """Return the row with the newer ranges only, and rows for the older ones, where it has too many (`storage.visibility.past`)."""
        *gone, last = PastRow(
            self.first_audience or 0, None, self.audiences, self.invited_audiences
        ).cut()
        if not gone:
            return [], self
        return gone, self._replace(
            audiences=last.audiences,
            invited_audiences=last.invited_audiences,
            first_audience=last.first_audience,
        )


class PastRow(NamedTuple):
    """One row of `past_visibility`, without the room and the principal.

    It tells of the audiences in ``[first_audience, end)``.
    """

    first_audience: int
    end: int | None
    audiences: Ranges
    invited_audiences: Ranges
    opened_topological: int = 0
    topological_ranges: Ranges = EMPTY

    def tells_of(self, number: int) -> bool:
        """Return whether the row says how the principal stands to an audience."""
        return self.first_audience <= number and (self.end is None or number < self.end)

    def at(self, number: int) -> PrincipalStanding:
        """Return how the principal stands to an audience."""
        return _standing(contains(self.audiences, number), contains(self.invited_audiences, number))

    def placed(self, low: int, high: int | None, standing: PrincipalStanding) -> Self:
        """Return the row with the principal standing so to the audiences in ``[low, high)``."""
        audiences, invited = _placed(self.audiences, self.invited_audiences, low, high, standing)
        return self._replace(audiences=audiences, invited_audiences=invited)

    def cut(self) -> "list[PastRow]":
        """Return the row, in several where it has too many ranges."""
        rows, row = [], self
        while (number := past.boundary(row.audiences, row.invited_audiences)) is not None:
            rows.append(
                PastRow(
                    row.first_audience,
                    number,
                    *past.below(number, row.audiences, row.invited_audiences),
                )
            )
            row = PastRow(
                number, row.end, *past.beginning(number, row.audiences, row.invited_audiences)
            )
        return [*rows, row]


def _placed(
    audiences: Ranges, invited: Ranges, low: int, high: int | None, standing: PrincipalStanding
) -> tuple[Ranges, Ranges]:
    """Return the audiences that a principal is in, and those by an invitation alone, when it stands so to ``[low, high)``."""
    return (
        (remove if standing is PrincipalStanding.OUT else add)(audiences, low, high),
        (add if standing is PrincipalStanding.INVITED else remove)(invited, low, high),
    )


def _standing(included: bool, by_invitation: bool) -> PrincipalStanding:
    if not included:
        return PrincipalStanding.OUT
    return PrincipalStanding.INVITED if by_invitation else PrincipalStanding.IN


UNSEEN = VisibilityRow(EMPTY, None, 0, 0)


class AudienceRow(NamedTuple):
    """One row of `audiences`, without its key."""

    branches: int
    continued: bool
    opened_topological: int | None


class AuthorisedBefore(NamedTuple):
    """What was found out of an event that is allowed by its auth events and by a state (`storage.persist.plan.fast_path`).

    ``member_key`` is the state key of the sender's membership; ``state`` are the nids of that, the power levels and the create event.
    """

    sender_nid: int
    type_nid: int
    auth_events: tuple[int, ...]
    member_key: int
    state: tuple[int | None, int | None, int | None]
