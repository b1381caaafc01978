"""The visibility rule, pure: from the history visibility and the membership at the event.

Specification: client-server API, "Room History Visibility"; for servers, server-server API, the
reads of events (backfill, /event, /state). The table of audiences must give the same answers for
every event; it is tested against this rule.

The state at an event is the state before it. But an event that itself changes the history
visibility, or the requester's membership, is visible under the more permissive of before and after.
So both are arguments. For any other event they are equal, and None means a missing event.
"""

from itertools import product
from typing import Final

from storage.visibility.multirange import Ranges, remove

# --------------------------------------------------------------------------------------------------
# Cut a principal's ranges into rows: the cost of a user who leaves and rejoins does not grow.
#
# The row in `visibility` holds the latest ranges, at most ``2 * RANGES_MAX``. When it gets one
# more, its oldest `RANGES_MAX` ranges move to a row of `past_visibility`. Only a fork or a late
# event that starts from such an old state writes that row again. So a join writes one short row,
# and a read takes only the rows near its position.
#
# With RANGES_MAX = 2, for a user who has joined and left four times, and joins again at number 10
# of the main line:
#
#     before    visibility        {[1,2) [3,4) [5,6) [7,8)}    first_audience NULL
#     after     visibility        {[5,6) [7,8) [10,)}          first_audience 5
#               past_visibility   {[1,2) [3,4)}                first_audience 0, for audiences 0 to
#               4
#
# Why writes are exact. A row describes the audiences from its first one up to the next row's first
# one, and no other. So each audience is in exactly one row, and a cut at any number preserves the
# content. A change must not span a cut. Cuts are beginnings of ranges, hence numbers in use. A
# change is one of three:
#
# * ``[number, None)``: the current state changes. The number is new and above all others, so the
#   change is in the last row.
# * A whole block, for a state that has a number of the main line for itself: as above.
# * ``[number, end)``: a new number and the rest of its line. A number in use between them would be
#   on
#   the same line after the new one, or on a line that leaves from there. There is none yet
#   (`storage.visibility.multirange`). So the change is in one row.
#
# Why reads are exact. `user_sees` first decides by the ranges in memory. They are those of
# `visibility`, and for a page also those of the rows near its start. For an audience that these do
# not cover (``unread``), `saw_before` looks up the one row that does. A page scans topological
# ranges. A past row stores its own: `audiences.opened_topological` of old numbers never changes.
# Unread audiences add one range, up to where the nearest unread number was opened or closed. It is
# scanned only if the page is not full before. In the example, a page of the last events:
#
#     read      visibility {[5,6) [7,8) [10,)}, opened at 40, 50, 60, 70, 90
#     ranges    90 and after, 60 to 70, 40 to 50, and 40 and before (unread: the audiences below 5)
#
# A principal that is a server, everybody, or those that join later has rows like a user.
# Maintenance and exports read the view `whole_visibility`, which combines the rows.

RANGES_MAX: Final = 8
"""Ranges in a past row; the row in use has up to twice as many.

`visibility_near` in the schema relies on it for its cost only.
"""


def boundary(audiences: Ranges, invited: Ranges) -> int | None:
    """Return the number at which a row is to be cut.

    Return None while both kinds of ranges are few enough.
    """
    if len(audiences) <= 2 * RANGES_MAX and len(invited) <= 2 * RANGES_MAX:
        return None
    kinds = audiences, invited
    long = [ranges[RANGES_MAX][0] for ranges in kinds if len(ranges) > 2 * RANGES_MAX]
    return min(long)


def below(number: int, audiences: Ranges, invited: Ranges) -> tuple[Ranges, Ranges]:
    """Return both kinds of ranges below a number."""
    return remove(audiences, number, None), remove(invited, number, None)


def beginning(number: int, audiences: Ranges, invited: Ranges) -> tuple[Ranges, Ranges]:
    """Return both kinds of ranges from a number on."""
    return remove(audiences, 0, number), remove(invited, 0, number)


def user_may_see(
    visibility_before: str | None,
    visibility_after: str | None,
    membership_before: str | None,
    membership_after: str | None,
    joined_later: bool,
) -> bool:
    """Return whether a user may see an event, given their own membership.

    `joined_later` means that they joined at any time after it. Rejected, soft-failed and outlier
    events, redactions and ignored senders are not considered here.
    """
    return any(
        visibility == "world_readable"
        or membership == "join"
        or (visibility == "invited" and membership == "invite")
        or (_is_shared(visibility) and joined_later)
        for visibility, membership in product(
            (visibility_before, visibility_after), (membership_before, membership_after)
        )
    )


def server_may_see(
    visibility_before: str | None,
    visibility_after: str | None,
    membership_before: str | None,
    membership_after: str | None,
    *,
    ever_joined: bool = True,
) -> bool:
    """Return whether a remote server may have an event whole, else redacted.

    The membership is the highest of the server's users. `ever_joined`: a user of the server was
    joined in some state of the room. A server without one gets world-readable events only, and no
    redacted form of the others. That goes beyond the specification, which refuses all reads of a
    server that is not in the room.
    """
    if not ever_joined:
        return "world_readable" in (visibility_before, visibility_after)
    return any(
        visibility == "world_readable"
        or _is_shared(visibility)
        or membership == "join"
        or (visibility == "invited" and membership == "invite")
        for visibility, membership in product(
            (visibility_before, visibility_after), (membership_before, membership_after)
        )
    )


def _is_shared(visibility: str | None) -> bool:
    """Return whether it is the default: no history visibility event, or an unknown value."""
    return visibility not in ("world_readable", "invited", "joined")
