"""Compute visibility from the states alone: admitted principals, moved from state to state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import INVITE, JOIN, KEY_HISTORY_VISIBILITY
from storage.database.sql_template import fill
from storage.ids import server_name_of
from storage.maintenance.room_events import PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import EventLoader
from storage.maintenance.verify.room import VerifiedRoom
from storage.state.groups import Group, changed_keys

TEMPLATE_MEMBERS: Final[LiteralString] = """
SELECT e.event_nid, e.membership, e.state_key_nid, k.state_key AS user_id
FROM {events} AS e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.type_nid = 2
"""

SQL_MEMBERS: Final[LiteralString] = fill(
    TEMPLATE_MEMBERS,
    events=PART_ROOM_EVENTS,
)

TEMPLATE_VISIBILITY_EVENTS: Final[LiteralString] = """
SELECT e.event_nid
FROM {events} AS e
WHERE e.state_key_nid = 5
"""

SQL_VISIBILITY_EVENTS: Final[LiteralString] = fill(
    TEMPLATE_VISIBILITY_EVENTS,
    events=PART_ROOM_EVENTS,
)

EVERYBODY: Final = "*everybody"
BY_INVITATION: Final = " (by an invitation alone)"
SHARED: Final = "*shared"


class MemberRow(NamedTuple):
    """A membership event."""

    event_nid: int
    membership: int
    state_key_nid: int
    user_id: str


@dataclass(frozen=True, slots=True)
class VisibilityFacts:
    """The facts that decide visibility: memberships, history visibilities and principals.

    The first two are by event, principals by state key.
    """

    memberships: Mapping[int, int]
    visibilities: Mapping[int, str]
    principals: Mapping[int, tuple[str, ...]]


async def read_facts(conn: Connection, room: VerifiedRoom) -> VisibilityFacts:
    """Return the facts of a room: one entry for each membership event in it."""
    rows = await conn.fetch(SQL_MEMBERS, room.nid, row=MemberRow)
    contents = EventLoader(room)
    held = await contents.load(conn, await conn.fetchvals(SQL_VISIBILITY_EVENTS, room.nid))
    return VisibilityFacts(
        {row.event_nid: row.membership for row in rows},
        {nid: known(one.event.content.get("history_visibility")) for nid, one in held.items()},
        {row.state_key_nid: principals_of(row.user_id, room.server_name) for row in rows},
    )


def known(visibility: object) -> str:
    """Return one of the four values; "shared" for anything else."""
    return (
        visibility
        if isinstance(visibility, str) and visibility in {"world_readable", "invited", "joined"}
        else "shared"
    )


def by_invitation(principal: str) -> str:
    """Return the name under which an audience by invitation alone is recorded for a principal."""
    return principal + BY_INVITATION


def principals_of(user_id: str, server_name: str) -> tuple[str, ...]:
    """Return the principals that a user's membership concerns: the server, and a local user."""
    server = server_name_of(user_id)
    names = (server, user_id) if server == server_name else (server,)
    return tuple(name for name in names if name)


@dataclass(slots=True)
class AdmittedPrincipals:
    """The principals in the audience of one state.

    `move` goes to another state by the difference.
    """

    facts: VisibilityFacts
    group: Group | None = None
    visibility: str = "shared"
    joined: dict[str, int] = field(default_factory=dict)
    invited: dict[str, int] = field(default_factory=dict)
    # before the last move, of the principals that it touched
    were_joined: set[str] = field(default_factory=set)

    def __contains__(self, principal: str) -> bool:
        if self.group is None:
            return False
        if principal == EVERYBODY:
            return self.visibility == "world_readable"
        if principal == SHARED:
            return self.visibility in {"world_readable", "shared"}
        name = principal.removesuffix(BY_INVITATION)
        joined = self.joined.get(name, 0) > 0
        invited = self.visibility == "invited" and self.invited.get(name, 0) > 0
        return joined or invited if name == principal else invited and not joined

    def either(self, principal: str) -> bool:
        """Return whether one admitted only before or only after the last move is so at the event.

        Joined takes precedence over invited.
        """
        name = principal.removesuffix(BY_INVITATION)
        return name == principal or not (name in self.were_joined or self.joined.get(name, 0) > 0)

    def move(self, target: Group) -> set[str]:
        """Go to a state; return the principals admitted in only one of the two."""
        old = self.group
        gains: list[tuple[dict[str, int], str, int]] = []
        for key in set(target.entries) if old is None else changed_keys(old, target):
            gains += self._gains(
                key, None if old is None else old.entries.get(key), target.entries.get(key)
            )
        visibility = self.facts.visibilities.get(
            target.entries.get(KEY_HISTORY_VISIBILITY, 0), "shared"
        )
        touched = {principal for _, principal, _ in gains}
        if old is None or visibility != self.visibility:
            touched |= {
                EVERYBODY,
                SHARED,
                *(principal for principal, count in self.invited.items() if count),
            }
        self.were_joined = {principal for principal in touched if self.joined.get(principal, 0) > 0}
        touched |= {by_invitation(principal) for principal in touched}
        before = {principal for principal in touched if principal in self}
        for counts, principal, gained in gains:
            counts[principal] = counts.get(principal, 0) + gained
        self.visibility = visibility
        self.group = target
        return {principal for principal in touched if (principal in self) != (principal in before)}

    def _gains(
        self, key: int, old: int | None, new: int | None
    ) -> list[tuple[dict[str, int], str, int]]:
        """Return the changes of counts by a new event under a key: counter, principal, change."""
        principals = self.facts.principals.get(key, ())
        was, becomes = self.facts.memberships.get(old or 0), self.facts.memberships.get(new or 0)
        gains = [
            (self.joined, (becomes == JOIN) - (was == JOIN)),
            (self.invited, (becomes == INVITE) - (was == INVITE)),
        ]
        return [
            (counts, principal, gained)
            for counts, gained in gains
            if gained
            for principal in principals
        ]
