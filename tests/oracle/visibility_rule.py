"""The rule of history visibility for the oracle: the specification's sentences, in their order.

storage/visibility/rule.py makes one query over all combinations of before and after. This module
looks at an event's own change only where it changes the subject of the query. A test checks that
both agree.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sight:
    """Inputs of the rule: (before, after) of history visibility and reader's membership."""

    changes_visibility: bool
    changes_membership: bool
    visibility: tuple[str | None, str | None]
    membership: tuple[str | None, str | None]

    def cases(self) -> list[tuple[str, str | None]]:
        """Return (visibility, membership) before the event, and after it if it changes one."""
        at = [(self.visibility[0], self.membership[0])]
        if self.changes_visibility:
            at.append((self.visibility[1], self.membership[0]))
        if self.changes_membership:
            at.append((self.visibility[0], self.membership[1]))
        return [(_known(visibility), membership) for visibility, membership in at]


def _known(visibility: object) -> str:
    if visibility == "world_readable":
        return "world_readable"
    if visibility == "invited":
        return "invited"
    if visibility == "joined":
        return "joined"
    return "shared"


def user_sees(sight: Sight, *, joined_later: bool) -> bool:
    return any(
        _user_allowed(visibility, membership, joined_later)
        for visibility, membership in sight.cases()
    )


def _user_allowed(visibility: str, membership: str | None, joined_later: bool) -> bool:
    """Client-server API, "Server behaviour" of room history visibility, rules 1 to 5."""
    if visibility == "world_readable":
        return True
    if membership == "join":
        return True
    if visibility == "shared" and joined_later:
        return True
    if membership == "invite" and visibility == "invited":  # noqa: SIM103  (one sentence, one line)
        return True
    return False


def server_sees(sight: Sight, *, ever_joined: bool = True) -> bool:
    """A server that was never joined gets what the world gets, whatever its memberships."""
    if not ever_joined:
        return any(visibility == "world_readable" for visibility, _ in sight.cases())
    return any(_server_allowed(visibility, membership) for visibility, membership in sight.cases())


def _server_allowed(visibility: str, membership: str | None) -> bool:
    if visibility in {"world_readable", "shared"}:
        return True
    if visibility == "invited":
        return membership in {"invite", "join"}
    return membership == "join"
