"""Audiences at persist time: which number a state gets, and whose ranges change by it.

The set of principals that an audience stands for is a function of a state: everybody joined, those invited where the
history visibility is "invited", and the two that stand for "shared" and "world readable" (`storage.visibility.numbers` tells how
numbers are chosen, design.md section 6 why). Only the keys in which two states differ are looked at.
"""

from collections.abc import Iterable
from typing import Final

from immutables import Map

from storage.database.names import INVITE, JOIN, KEY_HISTORY_VISIBILITY, PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED, TYPE_MEMBER
from storage.ids import server_name_of
from storage.persist.draft import Draft
from storage.persist.rows import AudienceRow, Counts, EventRow, Standing, VisibilityRow
from storage.persist.step import Step
from storage.state.groups import Group, changed_keys
from storage.visibility import numbers, places

RANKS: Final = {"joined": 0, "invited": 1, "shared": 2, "world_readable": 3}
MISSING: Final = "shared"  # what a room without the event, or with an unknown value, has


def history_visibility(draft: Draft, group: Group | None) -> str:
    """The history visibility of a state; "shared" if it has none that is known."""
    nid = None if group is None else group.entries.get(KEY_HISTORY_VISIBILITY)
    if nid is None:
        return MISSING
    value = draft.events_of((nid,))[nid].content.get("history_visibility")
    return value if isinstance(value, str) and value in RANKS else MISSING


def _visibilities(draft: Draft, base: Group | None, target: Group) -> tuple[str, str]:
    """The history visibilities of two states, which are mostly the same."""
    after = history_visibility(draft, target)
    same = base is not None and base.entries.get(KEY_HISTORY_VISIBILITY) == target.entries.get(KEY_HISTORY_VISIBILITY)
    return after if same else history_visibility(draft, base), after


def admits(visibility: str, counts: Counts) -> Standing:
    """How a principal with so many joined and invited users stands to the audience."""
    joined, invited = counts
    if joined > 0:
        return Standing.IN
    return Standing.INVITED if visibility == "invited" and invited > 0 else Standing.OUT


def advance(step: Step, target: Group) -> int | None:
    """The room's current state becomes ``target``: open and close ranges. The new number, or None if nobody's sight changes."""
    if step.main == target.state_group:
        return None
    main = step.main_group()
    before, after = _visibilities(step.draft, main, target)
    moved = _moved(step, main, target)
    changed: dict[int, VisibilityRow] = {}
    number = step.next_audience
    opened = False
    concerned = moved.keys() | _invited(step, main, target, before, after)
    step.ensure_visible({*concerned, PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED})
    for principal in concerned:
        row = step.visible(principal)
        counts = _sum(row, moved.get(principal, (0, 0)))
        standing = admits(after, counts)
        placed = row if standing is row.current else row.placed(number, None, standing)
        opened |= standing is not row.current
        if (moved_to := placed._replace(joined_count=counts[0], invited_count=counts[1])) != row:
            changed[principal] = moved_to
    for principal, standing in () if main is not None and before == after else _flags(after):
        row = step.visible(principal)
        if row.current is not standing:
            changed[principal] = row.placed(number, None, standing)
            opened = True
    step.set_visible(changed)
    step.main = target.state_group
    if not opened:
        return None
    step.current_audience = _next_main(step, max(step.room.max_order, step.order - 1))
    return step.current_audience


def branch(step: Step, base: Group, target: Group) -> int:
    """The number for a state that is not the current one and was derived from ``base``."""
    before, after = _visibilities(step.draft, base, target)
    differs: dict[int, Standing] = {}
    moved = _moved(step, base, target)
    concerned = moved.keys() | _invited(step, base, target, before, after)
    step.ensure_visible({*concerned, PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED})
    counts = _counts(step, base, concerned)
    reached = {principal: _plus(counts[principal], moved.get(principal, (0, 0))) for principal in concerned}
    step.draft.counts[target.state_group] = counts.update(reached)
    for principal in concerned:
        standing = admits(after, reached[principal])
        if standing is not admits(before, counts[principal]):
            differs[principal] = standing
    old = dict(_flags(before))
    differs.update((principal, standing) for principal, standing in _flags(after) if old[principal] is not standing)
    return _off(step, number_of(step, base), differs) if differs else number_of(step, base)


def either(step: Step, one: Group, other: Group) -> int:
    """The number for an event that changes the history visibility: who may see it under either value."""
    values = [history_visibility(step.draft, one), history_visibility(step.draft, other)]
    ranks = [RANKS[value] for value in values]
    if RANKS["invited"] in ranks and max(ranks) > RANKS["invited"]:
        invited = one if values[0] == "invited" else other
        flags = _flags(values[1] if invited is one else values[0])
        return _off(step, number_of(step, invited), {principal: standing for principal, standing in flags if standing is Standing.IN})
    return number_of(step, one if ranks[0] > ranks[1] else other)


def _off(step: Step, base: int, differs: dict[int, Standing]) -> int:
    """A new number off ``base``'s, at which these principals' sight is as told and everybody else's as at ``base``."""
    row = step.audience(base)
    continues = None if row.continued or numbers.depth(base) == 0 else numbers.following(base)
    new = continues or numbers.branching(base, row.branches)
    if new is None:
        return _alone(step, base, differs)
    step.audiences[base] = row._replace(continued=True) if continues else row._replace(branches=row.branches + 1)
    step.audiences[new.number] = AudienceRow(0, continued=False, opened_topological=None)
    for principal, standing in differs.items():
        step.place(principal, new.number, new.end, standing)
    return new.number


def _alone(step: Step, base: int, differs: dict[int, Standing]) -> int:
    """No room left near ``base``: a number of the main line for one state alone, told for every principal of the room."""
    number = _next_main(step, None)
    end = number + numbers.UNIT[0]
    written = {principal for room, principal in step.draft.new_visibility if room == step.room_nid}
    for principal in {*step.draft.answer(("principals", step.room_nid)), *written, *step.visibility, *differs}:
        standing = differs.get(principal) or step.standing(principal, base)
        if standing is not step.visible(principal).current:
            step.place(principal, number, end, standing)
    return number


def _next_main(step: Step, opened: int | None) -> int:
    number = step.next_audience
    step.audiences[number] = AudienceRow(0, continued=False, opened_topological=opened)
    step.next_audience = number + numbers.UNIT[0]
    return number


def _flags(visibility: str) -> tuple[tuple[int, Standing], tuple[int, Standing]]:
    everybody, shared = visibility == "world_readable", RANKS[visibility] >= RANKS["shared"]
    return (PRINCIPAL_EVERYBODY, Standing.IN if everybody else Standing.OUT), (PRINCIPAL_SHARED, Standing.IN if shared else Standing.OUT)


def _moved(step: Step, base: Group | None, target: Group) -> dict[int, Counts]:
    """By how much the joined and invited users of each principal grow from one state to another; no entry where nothing moves."""
    keys = set(target.entries) if base is None else changed_keys(base, target)
    moved: dict[int, Counts] = {}
    for user, old, new in _memberships(step.draft, base, target, keys):
        gained = ((new == JOIN) - (old == JOIN), (new == INVITE) - (old == INVITE))
        if gained != (0, 0):
            for principal in principals_of(step.draft, user):
                total = moved.get(principal, (0, 0))
                moved[principal] = (total[0] + gained[0], total[1] + gained[1])
    return moved


def _memberships(draft: Draft, base: Group | None, target: Group, keys: Iterable[int]) -> list[tuple[str, int | None, int | None]]:
    """(user, membership in one state, in the other) for the member keys among these."""
    keys = list(keys)
    draft.ensure_state_key_names(keys)
    members = {key: name[1] for key in keys if (name := draft.state_key_name(key))[0] == TYPE_MEMBER}
    if not members:
        return []
    entries = [target.entries] if base is None else [base.entries, target.entries]
    draft.ensure_rows(nid for key in members for state in entries if (nid := state.get(key)))
    draft.ensure_principals(name for user in members.values() for name in _principal_names(draft, user))
    return [
        (user, None if base is None else _membership(draft, base.entries.get(key)), _membership(draft, target.entries.get(key)))
        for key, user in members.items()
    ]


def _membership(draft: Draft, nid: int | None) -> int | None:
    return None if nid is None else draft.row_of(nid).membership


def principals_of(draft: Draft, user: str) -> list[int]:
    """Whose rows a user's membership concerns: the server's, and the user's own if it is local."""
    return [draft.principal_nid(name) for name in _principal_names(draft, user)]


def _principal_names(draft: Draft, user: str) -> list[str]:
    server = server_name_of(user)
    names = [server] if server != draft.server_name else [server, user]
    return [name for name in names if name]


def _counts(step: Step, group: Group, principals: Iterable[int]) -> Map[int, Counts]:
    """The users of these principals, and of others, in a state.

    Kept for each state: that of the next event of a branch differs by one key, while the current state may be far away.
    """
    main = step.main_group()
    is_current = main is None or main.state_group == group.state_group
    known: Map[int, Counts] = Map() if is_current else step.draft.counts_of(group.state_group)
    lacking = [principal for principal in principals if principal not in known]
    if lacking:
        offset = {} if is_current else _moved(step, main, group)
        known = known.update({principal: _sum(step.visible(principal), offset.get(principal, (0, 0))) for principal in lacking})
        step.draft.counts[group.state_group] = known
    return known


def _sum(row: VisibilityRow, gained: Counts) -> Counts:
    """The users of a principal in another state than the current one, of which ``gained`` tells the difference."""
    return _plus((row.joined_count, row.invited_count), gained)


def _plus(one: Counts, other: Counts) -> Counts:
    return one[0] + other[0], one[1] + other[1]


def _invited(step: Step, base: Group | None, target: Group, before: str, after: str) -> set[int]:
    """The principals with invited users, where the visibility changes so that invitations begin or cease to matter."""
    if before == after or "invited" not in (before, after):
        return set()
    keys = set[int]()
    for group in (base, target):
        if group is not None:
            keys |= _invited_keys(step.draft, group)
    return {principal for key in keys for principal in principals_of(step.draft, step.draft.state_key_name(key)[1])}


def _invited_keys(draft: Draft, group: Group) -> set[int]:
    new = {nid: draft.new_events[nid].row for nid in group.entries.values() if nid in draft.new_events}
    held = frozenset(nid for nid in group.entries.values() if nid not in new)
    known = {nid: row for nid in held if (row := draft.known_row(nid)) is not None}
    found = {row.state_key_nid for row in known.values() if row.membership == INVITE and row.state_key_nid is not None}
    held = frozenset(nid for nid in held if nid not in known)
    found |= set(draft.answer(("invited", held))) if held else set()
    return found | {row.state_key_nid for row in new.values() if row.membership == INVITE and row.state_key_nid is not None}


def note_join(step: Step, user: str, order: int) -> None:
    """An accepted join of a local user stands at this place of the order: what is "shared" and before it becomes the user's."""
    if server_name_of(user) != step.draft.server_name:
        return
    principal = step.draft.principal_nid(user)
    row = step.visible(principal)
    if row.last_join_topological is None or row.last_join_topological < order:
        step.visibility[principal] = row._replace(last_join_topological=order)


def of_event(step: Step, row: EventRow, before: Group, after: Group) -> int:
    """The audience of an event: of the state before it, or after it where that shows more to those concerned."""
    number = number_of(step, before)
    if before.state_group == after.state_group or number == number_of(step, after):
        return number
    if row.state_key_nid == KEY_HISTORY_VISIBILITY:
        return either(step, before, after)
    old = before.entries.get(row.state_key_nid or 0)
    rank = {JOIN: 2, INVITE: 1}
    was = rank.get(_membership(step.draft, old) or 0, 0)
    return number_of(step, after) if rank.get(row.membership or 0, 0) >= was else number


def number_of(step: Step, group: Group) -> int:
    """The audience of a state. The current one has that of the main line, though its group may have got another number on a fork."""
    if group.state_group == step.main:
        return step.current_audience
    return step.room.audience if group.state_group == step.room.current else group.audience


def note_place(step: Step, number: int, order: int) -> None:
    """An event of this audience stands at this place of the order: a stray where reads would not look for it, but somebody sees it."""
    block = numbers.main(number)
    if block == step.current_audience and order > step.room.max_order:
        return
    opened = step.audience(block).opened_topological
    closed = None if block >= step.current_audience else step.closed(block + 1)
    if (opened is None or not places.expected(order, opened, closed)) and _seen_here(step, number):
        step.strays = places.with_stray(step.strays, order)


def _seen_here(step: Step, number: int) -> bool:
    """Whether any local user may ever see this audience: their server is in it where they are. Who is in one is settled with its number."""
    concerned = (step.draft.principal_nid(step.draft.server_name), PRINCIPAL_EVERYBODY, PRINCIPAL_SHARED)
    step.ensure_visible(concerned)
    return any(step.standing(principal, number) is not Standing.OUT for principal in concerned)
