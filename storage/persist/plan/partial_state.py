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

A state that follows the join may meet one that does not: of a forward extremity of an earlier stay,
or of an old fork. That one has members that the partial state lacks, and to a resolution an absent
key is a conflict. So old events of their auth chains take part in it, and an old join rule among
them may refuse the join. Then only the states that follow the join are resolved
(`keeping_the_join`):

    first stay      closed <- an invite of @theirs:there <- their join <- opened <- X, an extremity
    partial state   create, levels, opened, @ours:here
    with X          the auth difference has "closed", which was in both auth chains otherwise

When the members are stored, these events are planned again (storage/maintenance/partial_state).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import EventRow, PrincipalStanding, RoomChanges
from storage.persist.plan import audience
from storage.persist.plan.state_resolution import resolution, same_state
from storage.persist.plan.topology import ParentEvents
from storage.state.groups import REMOVED, Group, derive
from storage.visibility.multirange import NOTHING

NOT_MARKED: Final = "the room is not marked as partial by this join any more"


def unmarked(
    change_set: ChangeSet, room: RoomChanges, incoming: IncomingEvent
) -> AppendResult | None:
    """Return the refusal of a join whose state lacks members if it does not mark its room.

    The cached row of the room may be older than the mark. A refusal is not written, so nothing
    would notice that; the mark itself is read.
    """
    if not incoming.is_partial:
        return None
    join = incoming.event.event_id
    marking = change_set.answers.answer(("partial_join", room.row.room_nid))
    return None if marking == join else AppendResult(join, "invalid", NOT_MARKED)


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


def keeping_the_join(changes: EventChanges, states: Sequence[Group]) -> Sequence[Group]:
    """Return those of the states that are to be resolved, after parents or extremities.

    They are all, unless the join of a partial room is lost in their resolution.
    """
    join = _join(changes) if changes.room.row.is_partial and len(states) > 1 else None
    if join is None:
        return states
    after_join = _after_join(changes, join, states)
    if not after_join or len(after_join) == len(states):
        return states
    distinct = {state.state_group: state for state in states}
    resolved = resolution(changes, [distinct[number] for number in sorted(distinct)])
    key = join.state_key_nid or 0
    nid = resolved.get(key, after_join[0].entries[key])
    return states if _is_after_join(changes, join, nid) else after_join


def _after_join(changes: EventChanges, join: EventRow, states: Iterable[Group]) -> list[Group]:
    """Return those of the states that follow the join: they have it, or a later membership."""
    key = join.state_key_nid or 0
    return [
        state for state in states if _is_after_join(changes, join, state.entries.get(key, REMOVED))
    ]


def _is_after_join(changes: EventChanges, join: EventRow, nid: int) -> bool:
    """Return whether a membership of the user who joined is the join, or from after it."""
    if nid in (REMOVED, join.event_nid):
        return nid != REMOVED
    changes.change_set.events.ensure_rows([nid])
    return changes.change_set.events.row_of(nid).depth > join.depth


def _join(changes: EventChanges) -> EventRow | None:
    """Return the join of a partial room; None if it is not in the timeline yet."""
    events = changes.change_set.events
    event_id = changes.change_set.answers.answer(("partial_join", changes.room_nid))
    if event_id is None:
        return None
    events.ensure_ids([event_id])
    row = events.row(event_id)
    return None if row is None or row.outlier else row


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
    existing = same_state(changes, derive(group, lacking, 0, NOTHING))
    if existing is not None:
        return existing
    new = changes.change_set.states.derive(group, lacking)
    changes.change_set.names.ensure_state_key_names(new.steps[-1].delta)
    number = audience.branch(changes, group, new)
    return changes.add_group(new._replace(audience=number, is_sought=True))


def _omitted_members(changes: EventChanges, auth_rows: Iterable[EventRow]) -> dict[int, int]:
    """Return the cited memberships that may be among the omitted ones, by key.

    Their users are of other servers, and their depth is below that of the join.
    """
    name, own = changes.change_set.names.state_key_name, ":" + changes.change_set.server_name
    join = _join(changes)
    return {
        row.state_key_nid: row.event_nid
        for row in auth_rows
        if row.membership is not None
        and row.rejected is None
        and row.state_key_nid is not None
        and join is not None
        and row.depth < join.depth
        and not name(row.state_key_nid)[1].endswith(own)
    }


def _absent(members: Mapping[int, int], group: Group) -> dict[int, int]:
    """Return those of the members whose key a state lacks."""
    return {key: nid for key, nid in members.items() if key not in group.entries}
