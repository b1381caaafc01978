"""Members that a partial state lacks: those that an event cites stand in for them.

This server may join a room with the members omitted (MSC3706). Until they are stored, a member key
that is absent from a state is unknown; it does not mean that the user was never there. An event
names the memberships that allow it among its auth events. So these are added to the state before
it, and to the current state against which it is checked:

    state before    create, levels, rules, @ours:here        @theirs:there is unknown
    message         of @theirs:there, auth events: create, levels, the join of @theirs:there
    supplemented    create, levels, rules, @ours:here, the join of @theirs:there

A key that the state has is never changed. No membership of a local user is added: this server had
no member before the join. A state that the caller gave is complete, and stays as it is.

Two kinds of membership are not added, because the whole state might refuse the event, which would
then vanish. One is a membership from after the join: it is none of the omitted ones, and its depth
is at least that of the join. The other concerns an event of a fork from before the join. Its user
may have been banned since, and that ban may have been omitted. So nothing is added to the current
state for it, and it is soft-failed until the state is complete.

When the members are stored, these events are planned again (storage/maintenance/partial_state).
"""

from collections.abc import Iterable, Mapping, Sequence

from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow, PrincipalStanding
from storage.persist.plan import audience
from storage.persist.plan.state_merge import same_state
from storage.persist.plan.topology import ParentEvents
from storage.state.groups import Group, derive
from storage.visibility.audience_numbering import NOTHING


def supplemented(
    changes: EventChanges,
    parents: ParentEvents,
    auth_rows: Sequence[EventRow],
    before: Group,
    current: Group | None,
) -> tuple[Group, Group | None]:
    """Return the state before an event, and the current state to check it against.

    In a partial room both have the members that the event cites and that they lack. A new state
    before the event is stored; the current state is for the check alone.
    """
    if not changes.room.row.is_partial:
        return before, current
    cited = _omitted_members(changes, auth_rows)
    if not parents.missing:
        before = _stored(changes, before, _absent(cited, before))
    if current is not None and _is_inside(changes, before):
        lacking = _absent(cited, current)
        current = derive(current, lacking, 0, NOTHING) if lacking else current
    return before, current


def _is_inside(changes: EventChanges, group: Group) -> bool:
    """Return whether this server is in the room in a state.

    If so, the state follows the join, and with it all that led to the state before the join.
    """
    own = changes.change_set.names.principal_nid(changes.change_set.server_name)
    return changes.standing(own, group.audience) is PrincipalStanding.IN


def _stored(changes: EventChanges, group: Group, lacking: dict[int, int]) -> Group:
    """Return the group of a state with these keys added."""
    if not lacking:
        return group
    known = same_state(changes, derive(group, lacking, 0, NOTHING))
    if known is not None:
        return known
    new = changes.change_set.states.derive(group, lacking)
    changes.change_set.names.ensure_state_key_names(new.steps[-1].delta)
    number = audience.branch(changes, group, new)
    return changes.add_group(new._replace(audience=number, is_sought=True))


def _omitted_members(changes: EventChanges, auth_rows: Iterable[EventRow]) -> dict[int, int]:
    """Return the cited memberships that may be among the omitted ones, by key.

    Their users are of other servers, and their depth is below that of the join.
    """
    name, own = changes.change_set.names.state_key_name, ":" + changes.change_set.server_name
    depth = changes.change_set.answers.answer(("partial_join", changes.room_nid))
    return {
        row.state_key_nid: row.event_nid
        for row in auth_rows
        if row.membership is not None
        and row.rejected is None
        and row.state_key_nid is not None
        and depth is not None
        and row.depth < depth
        and not name(row.state_key_nid)[1].endswith(own)
    }


def _absent(members: Mapping[int, int], group: Group) -> dict[int, int]:
    """Return those of the members whose key a state lacks."""
    return {key: nid for key, nid in members.items() if key not in group.entries}
