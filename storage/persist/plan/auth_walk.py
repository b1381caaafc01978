"""The auth difference and the conflicted subgraph by walking whole auth chains: where an event in question has no place in the chain cover.

That is so of a rejected event in a state that somebody gave. `storage.persist.plan.auth_difference` answers the same without the walk.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from storage.errors import StorageCorrupt
from storage.graph.chains import Closure, closure_of
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import EventRow
from storage.state.groups import Group

Graph = Mapping[int, tuple[int, ...]]

PLACES_AT_ONCE: Final = 256
WALKED_STATE: Final = 500  # entries of a state whose auth chain is walked


class AuthChains(NamedTuple):
    """Nids: of events in the auth chain of some state but not of all, and of those on a path between two conflicted events."""

    difference: set[int]
    subgraph: set[int]


def walked(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
    """The auth difference of states that differ in these keys only, and the conflicted subgraph."""
    conflicted = [{state.entries[key] for key in keys if key in state.entries} for state in states]
    graph = auth_graph(change_set, set().union(*conflicted))
    chains = [reach(graph, nids) for nids in conflicted]
    difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
    difference -= _reached_by_common(change_set, states[0], keys, difference)
    return AuthChains(difference, _between(graph, set().union(*conflicted)))


def _reached_by_common(
    change_set: ChangeSet, state: Group, keys: set[int], nids: set[int]
) -> set[int]:
    """Which of these events the auth chain of what the states have in common holds.

    What the states have in common is never walked, unless it is so little that walking it here
    costs less than asking.
    """
    if not nids:
        return set()
    common = (
        [nid for key, nid in state.entries.items() if key not in keys]
        if len(state.entries) <= WALKED_STATE
        else []
    )
    if common:
        return reach(auth_graph(change_set, common), common) & nids
    new = (
        [
            nid
            for key, nid in state.entries.items()
            if key not in keys and nid in change_set.new_events
        ]
        if change_set.new_places
        else []
    )
    found = reach(auth_graph(change_set, new), new) & nids
    return found | asked(change_set, state, keys, nids - found)


def asked(
    change_set: ChangeSet, state: Group, keys: Collection[int], nids: Iterable[int]
) -> set[int]:
    """Which of these events what is committed of the common state reaches.

    Found from these upwards by the chain cover, a few places at a time, as nearly always one of the
    first is in the state.
    """
    found: set[int] = set()
    limit = PLACES_AT_ONCE
    left = frozenset(nids)
    while left:
        reaching = change_set.answer(("reaching", left, limit))
        found |= {
            one for one, nid, key in reaching if key not in keys and state.entries.get(key) == nid
        }
        full = Counter(one for one, _, _ in reaching)
        left = frozenset(nid for nid in left - found if full[nid] == limit)
        limit *= 16
    return found


def auth_graph(change_set: ChangeSet, nids: Iterable[int]) -> Graph:
    """The auth events of these events and of all that they reach: from the rows at hand, and of the others from the database.

    `StorageCorrupt` if one of them is not held.
    """
    graph: dict[int, tuple[int, ...]] = {}
    committed: set[int] = set()
    front = list(nids)
    while front:
        nid = front.pop()
        if nid in graph or nid in committed:
            continue
        row = change_set.known_row(nid)
        if row is None:
            committed.add(nid)
        else:
            graph[nid] = row.auth_events
            front.extend(row.auth_events)
    if committed:
        graph.update(change_set.answer(("auth_graph", frozenset(committed))))
    if lost := {auth for auths in graph.values() for auth in auths if auth not in graph}.union(
        committed - graph.keys()
    ):
        raise StorageCorrupt(
            "events that the auth graph refers to are not held", event_nids=sorted(lost)
        )
    return graph


def reach(graph: Graph, nids: Iterable[int]) -> set[int]:
    """The auth chain of these events: all that they reach, themselves only if another one reaches them."""
    reached: set[int] = set()
    front = [parent for nid in nids for parent in graph[nid]]
    while front:
        nid = front.pop()
        if nid not in reached:
            reached.add(nid)
            front.extend(graph[nid])
    return reached


def _between(graph: Graph, conflicted: set[int]) -> set[int]:
    """What lies on an auth path between two of these, the ends included: reached by one, and reaching one."""
    down = reach(graph, conflicted) | conflicted
    children: dict[int, list[int]] = {}
    for nid in down:
        for parent in graph[nid]:
            children.setdefault(parent, []).append(nid)
    up = set(conflicted)
    front = list(conflicted)
    while front:
        for child in children.get(front.pop(), ()):
            if child not in up:
                up.add(child)
                front.append(child)
    return down & up


def closures(change_set: ChangeSet, nids: Iterable[int]) -> dict[int, Closure] | None:
    """The closures of these events; None if one of them has no place in the cover, and so none."""
    lacking: set[int] = set()
    found: dict[int, Closure] = {}
    for nid in nids:
        closure = known(change_set, nid)
        if closure is None:
            closure = _closure(change_set, nid, lacking)
        if closure is not None:
            found[nid] = closure
    if not lacking.isdisjoint(change_set.loose):
        return None
    if lacking:
        raise MissingData("closures", lacking)
    return found


def _closure(change_set: ChangeSet, nid: int, lacking: set[int]) -> Closure | None:
    """The closure of an event, kept for later; None if it builds on what is not at hand, which is added to ``lacking``."""
    stuck: set[int] = set()
    front = [nid]
    while front:
        one = front[-1]
        row = None if known(change_set, one) is not None else _placed_row(change_set, one)
        if row is not None and (
            ahead := [
                auth
                for auth in row.auth_events
                if auth not in stuck and known(change_set, auth) is None
            ]
        ):
            front += ahead
            continue
        front.pop()
        if row is not None and stuck.isdisjoint(row.auth_events):
            change_set.closures[one] = closure_of(
                [
                    (change_set.place(auth), own)
                    for auth in row.auth_events
                    if (own := known(change_set, auth)) is not None
                ]
            )
        elif known(change_set, one) is None:
            stuck.add(one)
            if row is None:
                lacking.add(one)
    return known(change_set, nid)


def known(change_set: ChangeSet, nid: int) -> Closure | None:
    """The closure of an event if it is at hand; None says nothing about the event."""
    closure = change_set.closures.get(nid)
    return change_set.caches.closures.get(nid) if closure is None else closure


def _placed_row(change_set: ChangeSet, nid: int) -> EventRow | None:
    """The row of an event whose auth events have places, as far as is known here: it has one itself, or is about to get it."""
    row = change_set.known_row(nid)
    if row is change_set.pending or nid in change_set.places or nid in change_set.caches.places:
        return row
    return None
