"""Choose the audience number of a state, and update the ranges of the principals it changes.

An audience is a set of principals, and a function of a state. Its members are the principals with
joined users and, if the history visibility is "invited", those with invited users. Two special
principals stand for "shared" and "world readable". `storage.visibility.multirange` says how
numbers are chosen, and why.

There are two ways to a number: `advance` when the current state changes, and `branch` for any other
state. Both compare two states only in the keys in which they differ.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from storage.database.names import (
    INVITE,
    JOIN,
    KEY_HISTORY_VISIBILITY,
    MEMBERSHIPS,
    PRINCIPAL_EVERYBODY,
    PRINCIPAL_SHARED,
    TYPE_MEMBER,
)
from storage.ids import server_name_of
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import (
    AudienceRow,
    Counts,
    EventRow,
    MembershipChange,
    PrincipalStanding,
    RoomChanges,
    StateDelta,
    VisibilityRow,
)
from storage.persist.plan.out_of_band import OverruledMembership
from storage.persist.plan.topology import ExtremityChange
from storage.persistent_map import Map
from storage.state.groups import Group, changed_keys
from storage.visibility import multirange

RANKS: Final = {"joined": 0, "invited": 1, "shared": 2, "world_readable": 3}
MISSING: Final = "shared"  # of a room without the event or with an unknown value


def history_visibility(change_set: ChangeSet, group: Group | None) -> str:
    """Return the history visibility of a state; "shared" if it has no known value."""
    nid = None if group is None else group.entries.get(KEY_HISTORY_VISIBILITY)
    if nid is None:
        return MISSING
    value = change_set.events.events_of((nid,))[nid].content.get("history_visibility")
    return value if isinstance(value, str) and value in RANKS else MISSING


def _visibilities(change_set: ChangeSet, base: Group | None, target: Group) -> tuple[str, str]:
    """Return the history visibilities of two states, reading one event if both have the same."""
    after = history_visibility(change_set, target)
    same = base is not None and base.entries.get(KEY_HISTORY_VISIBILITY) == target.entries.get(
        KEY_HISTORY_VISIBILITY
    )
    return after if same else history_visibility(change_set, base), after


def admits(visibility: str, counts: Counts) -> PrincipalStanding:
    """Return whether a principal with these counts is in the audience, and if only by invitation.

    The counts are those of its joined and invited users.
    """
    joined, invited = counts
    if joined > 0:
        return PrincipalStanding.IN
    return (
        PrincipalStanding.INVITED
        if visibility == "invited" and invited > 0
        else PrincipalStanding.OUT
    )


def advance(changes: EventChanges, target: Group) -> int | None:
    """Make ``target`` the room's current state: open and close the ranges of principals.

    Return the new audience number on the main line, or None if the audience stays the same.
    """
    if changes.main == target.state_group:
        return None
    main = changes.main_group()
    before, after = _visibilities(changes.change_set, main, target)
    growths = _growths(changes, main, target)
    changed: dict[int, VisibilityRow] = {}
    number = changes.next_audience
    opened = False
    concerned = growths.keys() | _invited(changes, main, target, before, after)
    changes.ensure_visible({*concerned, PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED})
    for principal in concerned:
        row = changes.visible(principal)
        counts = _sum(row, growths.get(principal, (0, 0)))
        standing = admits(after, counts)
        placed = row if standing is row.current else row.placed(number, None, standing)
        opened |= standing is not row.current
        if (updated := placed._replace(joined_count=counts[0], invited_count=counts[1])) != row:
            changed[principal] = updated
    for principal, standing in () if main is not None and before == after else _flags(after):
        row = changes.visible(principal)
        if row.current is not standing:
            changed[principal] = row.placed(number, None, standing)
            opened = True
    changes.set_visible(changed)
    changes.main = target.state_group
    if not opened:
        return None
    changes.current_audience = _next_main(changes, max(changes.room.max_order, changes.order - 1))
    return changes.current_audience


def branch(changes: EventChanges, base: Group, target: Group) -> int:
    """Return the number for a state that is not the current one and was derived from ``base``.

    It is the number of ``base`` if both have the same audience.
    """
    before, after = _visibilities(changes.change_set, base, target)
    differs: dict[int, PrincipalStanding] = {}
    growths = _growths(changes, base, target)
    concerned = growths.keys() | _invited(changes, base, target, before, after)
    changes.ensure_visible({*concerned, PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED})
    counts = _counts(changes, base, concerned)
    reached = {
        principal: _plus(counts[principal], growths.get(principal, (0, 0)))
        for principal in concerned
    }
    changes.change_set.states.counts[target.state_group] = counts.update(reached)
    for principal in concerned:
        standing = admits(after, reached[principal])
        if standing is not admits(before, counts[principal]):
            differs[principal] = standing
    old = dict(_flags(before))
    differs.update(
        (principal, standing)
        for principal, standing in _flags(after)
        if old[principal] is not standing
    )
    return _off(changes, number_of(changes, base), differs) if differs else number_of(changes, base)


def either(changes: EventChanges, group: Group, other: Group) -> int:
    """Return the number for an event that changes the history visibility.

    The event is visible to everyone to whom either of the two values shows it. Usually that is the
    audience of the more open value. But "invited" has members that "shared" and "world readable"
    do not imply, so those get a number of their own that joins both.
    """
    values = [
        history_visibility(changes.change_set, group),
        history_visibility(changes.change_set, other),
    ]
    ranks = [RANKS[value] for value in values]
    if RANKS["invited"] in ranks and max(ranks) > RANKS["invited"]:
        invited = group if values[0] == "invited" else other
        flags = _flags(values[1] if invited is group else values[0])
        return _off(
            changes,
            number_of(changes, invited),
            {
                principal: standing
                for principal, standing in flags
                if standing is PrincipalStanding.IN
            },
        )
    return number_of(changes, group if ranks[0] > ranks[1] else other)


def _off(changes: EventChanges, base: int, differs: dict[int, PrincipalStanding]) -> int:
    """Return a new number that branches off ``base`` and differs from it for these principals.

    For all other principals it equals ``base``, without a row being written.
    """
    row = changes.audience(base)
    continues = None if row.continued or multirange.depth(base) == 0 else multirange.following(base)
    new = continues or multirange.branching(base, row.branches)
    if new is None:
        return _alone(changes, base, differs)
    changes.audiences[base] = (
        row._replace(continued=True) if continues else row._replace(branches=row.branches + 1)
    )
    changes.audiences[new.number] = AudienceRow(0, continued=False, opened_topological=None)
    for principal, standing in differs.items():
        changes.set_standing(principal, new.number, new.end, standing)
    return new.number


def _alone(changes: EventChanges, base: int, differs: dict[int, PrincipalStanding]) -> int:
    """Return a main line number for one state alone, because there is no room left near ``base``.

    By default a main line number has the audience of the current state. So every principal of the
    room is compared with ``base``, and a range is written where it differs.
    """
    number = _next_main(changes, None)
    end = number + multirange.UNIT[0]
    written = {
        principal
        for room, principal in changes.change_set.visibility.new_visibility
        if room == changes.room_nid
    }
    for principal in {
        *changes.change_set.answers.answer(("principals", changes.room_nid)),
        *written,
        *changes.visibility,
        *differs,
    }:
        standing = differs.get(principal) or changes.standing(principal, base)
        if standing is not changes.visible(principal).current:
            changes.set_standing(principal, number, end, standing)
    return number


def _next_main(changes: EventChanges, opened: int | None) -> int:
    """Return the next number of the main line; ``opened`` is its ``opened_topological``."""
    number = changes.next_audience
    changes.audiences[number] = AudienceRow(0, continued=False, opened_topological=opened)
    changes.next_audience = number + multirange.UNIT[0]
    return number


def _flags(visibility: str) -> tuple[tuple[int, PrincipalStanding], tuple[int, PrincipalStanding]]:
    """Return whether the two special principals are in an audience of this history visibility."""
    everybody, shared = visibility == "world_readable", RANKS[visibility] >= RANKS["shared"]
    return (PRINCIPAL_EVERYBODY, PrincipalStanding.IN if everybody else PrincipalStanding.OUT), (
        PRINCIPAL_SHARED,
        PrincipalStanding.IN if shared else PrincipalStanding.OUT,
    )


def _growths(changes: EventChanges, base: Group | None, target: Group) -> Mapping[int, Counts]:
    """Return the growth of each principal's joined and invited users from ``base`` to ``target``.

    Principals without a change have no entry. The result is kept until the event is planned.
    """
    kept = changes.change_set.states.growths
    key = None if base is None else base.state_group, target.state_group
    if key not in kept:
        kept[key] = _growth(changes, base, target)
    return kept[key]


def _growth(changes: EventChanges, base: Group | None, target: Group) -> dict[int, Counts]:
    keys = set(target.entries) if base is None else changed_keys(base, target)
    growths: dict[int, Counts] = {}
    for user, old, new in _memberships(changes.change_set, base, target, keys):
        gained = ((new == JOIN) - (old == JOIN), (new == INVITE) - (old == INVITE))
        if gained != (0, 0):
            for principal in principals_of(changes.change_set, user):
                total = growths.get(principal, (0, 0))
                growths[principal] = (total[0] + gained[0], total[1] + gained[1])
    return growths


def _memberships(
    change_set: ChangeSet, base: Group | None, target: Group, keys: Iterable[int]
) -> list[tuple[str, int | None, int | None]]:
    """Return (user, membership in ``base``, membership in ``target``) for the member keys."""
    keys = list(keys)
    change_set.names.ensure_state_key_names(keys)
    members = {
        key: name[1]
        for key in keys
        if (name := change_set.names.state_key_name(key))[0] == TYPE_MEMBER
    }
    if not members:
        return []
    entries = [target.entries] if base is None else [base.entries, target.entries]
    change_set.events.ensure_rows(
        nid for key in members for state in entries if (nid := state.get(key))
    )
    change_set.names.ensure_principals(
        name for user in members.values() for name in _principal_names(change_set, user)
    )
    return [
        (
            user,
            None if base is None else _membership(change_set, base.entries.get(key)),
            _membership(change_set, target.entries.get(key)),
        )
        for key, user in members.items()
    ]


def _membership(change_set: ChangeSet, nid: int | None) -> int | None:
    return None if nid is None else change_set.events.row_of(nid).membership


def principals_of(change_set: ChangeSet, user: str) -> list[int]:
    """Return the principals that a user's membership counts for.

    They are the user's server and, for a local user, the user as well.
    """
    return [change_set.names.principal_nid(name) for name in _principal_names(change_set, user)]


def _principal_names(change_set: ChangeSet, user: str) -> list[str]:
    server = server_name_of(user)
    names = [server] if server != change_set.server_name else [server, user]
    return [name for name in names if name]


def _counts(changes: EventChanges, group: Group, principals: Iterable[int]) -> "Map[int, Counts]":
    """Return the joined and invited users in a state, of these principals and maybe of others.

    The counts are kept per state. The state of a branch's next event differs from its parent's by
    one key, while it may differ from the current state by many.
    """
    main = changes.main_group()
    is_current = main is None or main.state_group == group.state_group
    counts: Map[int, Counts] = (
        Map() if is_current else changes.change_set.states.counts_of(group.state_group)
    )
    lacking = [principal for principal in principals if principal not in counts]
    if lacking:
        offset = {} if is_current else _growths(changes, main, group)
        counts = counts.update(
            {
                principal: _sum(changes.visible(principal), offset.get(principal, (0, 0)))
                for principal in lacking
            }
        )
        changes.change_set.states.counts[group.state_group] = counts
    return counts


def _sum(row: VisibilityRow, gained: Counts) -> Counts:
    """Return a principal's users in a state that differs from the current one by ``gained``."""
    return _plus((row.joined_count, row.invited_count), gained)


def _plus(counts: Counts, other: Counts) -> Counts:
    return counts[0] + other[0], counts[1] + other[1]


def _invited(
    changes: EventChanges, base: Group | None, target: Group, before: str, after: str
) -> set[int]:
    """Return the principals with invited users if invitations begin or cease to matter.

    That is so if the history visibility changes from or to "invited"; else the set is empty.
    """
    if before == after or "invited" not in (before, after):
        return set()
    keys = set[int]()
    for group in (base, target):
        if group is not None:
            keys |= _invited_keys(changes.change_set, group)
    return {
        principal
        for key in keys
        for principal in principals_of(
            changes.change_set, changes.change_set.names.state_key_name(key)[1]
        )
    }


def _invited_keys(change_set: ChangeSet, group: Group) -> set[int]:
    """Return the state keys of the invited users of a state: new, cached and stored ones."""
    new = {
        nid: change_set.events.new_events[nid].row
        for nid in group.entries.values()
        if nid in change_set.events.new_events
    }
    stored = frozenset(nid for nid in group.entries.values() if nid not in new)
    in_memory = {
        nid: row for nid in stored if (row := change_set.events.row_in_memory(nid)) is not None
    }
    keys = {
        row.state_key_nid
        for row in in_memory.values()
        if row.membership == INVITE and row.state_key_nid is not None
    }
    stored = frozenset(nid for nid in stored if nid not in in_memory)
    keys |= set(change_set.answers.answer(("invited", stored))) if stored else set()
    return keys | {
        row.state_key_nid
        for row in new.values()
        if row.membership == INVITE and row.state_key_nid is not None
    }


def note_join(changes: EventChanges, user: str, order: int) -> None:
    """Record the topological position of an accepted join of a local user, if it is the highest.

    Events with "shared" history before that position are visible to the user.
    """
    if server_name_of(user) != changes.change_set.server_name:
        return
    principal = changes.change_set.names.principal_nid(user)
    row = changes.visible(principal)
    if row.last_join_topological is None or row.last_join_topological < order:
        changes.visibility[principal] = row._replace(last_join_topological=order)


def of_event(changes: EventChanges, row: EventRow, before: Group, after: Group) -> int:
    """Return the audience of an event: that of the state before it or after it.

    For a change of the history visibility it is the union of both (`either`). For a membership it
    is the state with the higher one: join, then invite, then any other. So a user's own join and
    own leave are both visible to the user.
    """
    number = number_of(changes, before)
    if before.state_group == after.state_group or number == number_of(changes, after):
        return number
    if row.state_key_nid == KEY_HISTORY_VISIBILITY:
        return either(changes, before, after)
    old = before.entries.get(row.state_key_nid or 0)
    rank = {JOIN: 2, INVITE: 1}
    was = rank.get(_membership(changes.change_set, old) or 0, 0)
    return number_of(changes, after) if rank.get(row.membership or 0, 0) >= was else number


def number_of(changes: EventChanges, group: Group) -> int:
    """Return the audience number of a state.

    The current state has the main line's number, even if its group got another one on a fork.
    """
    if group.state_group == changes.main:
        return changes.current_audience
    return changes.room.audience if group.state_group == changes.room.current else group.audience


def note_out_of_range(changes: EventChanges, number: int, order: int) -> None:
    """Record an event with this audience as out of range if reads would not scan its position.

    Reads scan the positions that ``opened_topological`` predicts for an audience
    (`storage.visibility.multirange`). Events that no local user may ever see are not recorded.
    """
    block = multirange.main(number)
    if block == changes.current_audience and order > changes.room.max_order:
        return
    opened = changes.audience(block).opened_topological
    closed = None if block >= changes.current_audience else changes.closed(block + 1)
    if (opened is None or not multirange.expected(order, opened, closed)) and _seen_here(
        changes, number
    ):
        changes.out_of_range = multirange.with_out_of_range(changes.out_of_range, order)


def _seen_here(changes: EventChanges, number: int) -> bool:
    """Return whether events with this audience may be visible to any local user.

    A local user is in an audience only if the server is. The members of a number never change.
    """
    concerned = (
        changes.change_set.names.principal_nid(changes.change_set.server_name),
        PRINCIPAL_EVERYBODY,
        PRINCIPAL_SHARED,
    )
    changes.ensure_visible(concerned)
    return any(
        changes.standing(principal, number) is not PrincipalStanding.OUT for principal in concerned
    )


# --------------------------------------------------------------------------------------------------
# Write what an accepted event changes of its room: extremities, current state, memberships.

LEAVE = MEMBERSHIPS["leave"]


def store_membership(change_set: ChangeSet, change: MembershipChange) -> None:
    """Set a local user's membership; stripped state that came out of band goes."""
    key = change.principal_nid, change.room_nid
    change_set.members.stripped.pop(key, None)
    previous = change_set.members.memberships.get(key)
    entered = change.membership > LEAVE or (previous is not None and previous.entered)
    change_set.members.memberships[key] = change._replace(entered=entered)


def store_extremities(change_set: ChangeSet, room: RoomChanges, change: ExtremityChange) -> None:
    """Set the forward extremities, and mark what is superseded now: gaps and refused events."""
    room.extremities = change.extremities
    change_set.rooms.dropped.update(dict.fromkeys(change.dropped, room.row.room_nid))
    for gap in change.superseded:
        change_set.events.add_missing(gap)
    for row in change.refused:
        now = change_set.events.row_of(row.event_nid)
        change_set.events.change_event(now._replace(superseded=True))


def store_overruled(
    change_set: ChangeSet, row: EventRow, overruled: Iterable[OverruledMembership]
) -> None:
    """Replace out-of-band memberships by those of the current state. ``row`` is the cause."""
    for replaced in overruled:
        store_membership(change_set, replaced.membership)
        change_set.members.overruled.append((row.room_nid, replaced.state_key_nid, replaced.user))


def store_current(
    change_set: ChangeSet, room: RoomChanges, cause_nid: int, old: Group | None, new: Group
) -> None:
    """Add the differences of the current state, and with them local users' memberships."""
    room_nid = room.row.room_nid
    for key in sorted(set(new.entries) if old is None else changed_keys(old, new)):
        before = None if old is None else old.entries.get(key)
        nid = new.entries.get(key)
        membership = None if nid is None else change_set.events.row_of(nid).membership
        change_set.states.change_current(
            StateDelta(room_nid, cause_nid, key, nid, before), membership
        )
        type_nid, user = change_set.names.state_key_name(key)
        if type_nid == TYPE_MEMBER and user.endswith(":" + change_set.server_name):
            principal = change_set.names.principal_nid(user)
            store_membership(
                change_set,
                MembershipChange(principal, room_nid, membership or 0, nid or 0, cause_nid),
            )
