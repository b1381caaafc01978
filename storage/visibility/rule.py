"""The visibility rule, pure: from the history visibility and the membership at the event.

Specification: client-server API, "Room History Visibility"; for servers, server-server API, the
reads of events (backfill, /event, /state). The table of audiences must give the same answers for
every event; it is tested against this rule.

The state at an event is the state before it. But an event that itself changes the history
visibility, or the requester's membership, is visible under the more permissive of before and after.
So both are arguments. For any other event they are equal, and None means a missing event.
"""

from itertools import product


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
