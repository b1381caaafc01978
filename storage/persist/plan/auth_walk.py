"""Find the auth difference and the conflicted subgraph by walking whole auth chains.

This is needed if an event of the search has no position in the chain cover: a rejected event in a
state that a caller gave. `storage.persist.plan.auth_difference` finds the same without the walk.

The module also computes the closures of events in memory (`closures`), for both ways.
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

PLACES_AT_ONCE: Final = 256  # limit per event of the first query of `asked`
WALKED_STATE: Final = 500  # a state with more entries is too large to walk its auth chain


class AuthChains(NamedTuple):
    """Two sets of nids that state resolution needs.

    ``difference`` has the events in the auth chain of some state but not of all. ``subgraph`` has
    the events on auth paths between two conflicted events.
    """

    difference: set[int]
    subgraph: set[int]


def walked(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
    """Return the auth difference of states that differ only in ``keys``, and the subgraph."""
    conflicted = [{state.entries[key] for key in keys if key in state.entries} for state in states]
    graph = auth_graph(change_set, set().union(*conflicted))
    chains = [reach(graph, nids) for nids in conflicted]
    difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
    difference -= _reached_by_common(change_set, states[0], keys, difference)
    return AuthChains(difference, _between(graph, set().union(*conflicted)))


def _reached_by_common(
    change_set: ChangeSet, state: Group, keys: set[int], nids: set[int]
) -> set[int]:
    """Return those of these events that the common entries of the states reach.

    A small state's common entries are walked, which costs less than a query. Of a large state only
    those new in this change set are walked; a query covers the committed ones.
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
            if key not in keys and nid in change_set.events.new_events
        ]
        if change_set.auth_graph.new_places
        else []
    )
    found = reach(auth_graph(change_set, new), new) & nids
    return found | asked(change_set, state, keys, nids - found)


def asked(
    change_set: ChangeSet, state: Group, keys: Collection[int], nids: Iterable[int]
) -> set[int]:
    """Return those of these events that the committed common entries reach.

    The query follows the chain cover upwards from ``nids`` to the events that reach them. It
    returns a limited number of those per event, because nearly always one of the first is in the
    state. Events without a hit at the limit are queried again with a larger limit.
    """
    found: set[int] = set()
    limit = PLACES_AT_ONCE
    left = frozenset(nids)
    while left:
        reaching = change_set.answers.answer(("reaching", left, limit))
        found |= {
            one for one, nid, key in reaching if key not in keys and state.entries.get(key) == nid
        }
        full = Counter(one for one, _, _ in reaching)
        left = frozenset(nid for nid in left - found if full[nid] == limit)
        limit *= 16
    return found


def auth_graph(change_set: ChangeSet, nids: Iterable[int]) -> Graph:
    """Return the auth events of these events and of all events that they reach.

    Rows in memory are used first; the rest is queried. Raise `StorageCorrupt` if an event is not
    stored.
    """
    graph: dict[int, tuple[int, ...]] = {}
    committed: set[int] = set()
    front = list(nids)
    while front:
        nid = front.pop()
        if nid in graph or nid in committed:
            continue
        row = change_set.events.known_row(nid)
        if row is None:
            committed.add(nid)
        else:
            graph[nid] = row.auth_events
            front.extend(row.auth_events)
    if committed:
        graph.update(change_set.answers.answer(("auth_graph", frozenset(committed))))
    if lost := {auth for auths in graph.values() for auth in auths if auth not in graph}.union(
        committed - graph.keys()
    ):
        raise StorageCorrupt(
            "events that the auth graph refers to are not stored", event_nids=sorted(lost)
        )
    return graph


def reach(graph: Graph, nids: Iterable[int]) -> set[int]:
    """Return the auth chain of these events: all events that they reach.

    One of ``nids`` is included only if another reaches it.
    """
    reached: set[int] = set()
    front = [parent for nid in nids for parent in graph[nid]]
    while front:
        nid = front.pop()
        if nid not in reached:
            reached.add(nid)
            front.extend(graph[nid])
    return reached


def _between(graph: Graph, conflicted: set[int]) -> set[int]:
    """Return the events on auth paths between two conflicted events, and the conflicted events.

    These are the events that a conflicted event reaches and that reach a conflicted event.
    """
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
    """Return the closures of these events; None if one has no position in the chain cover.

    Raise `MissingData` for closures that are not in memory and cannot be computed from it.
    """
    lacking: set[int] = set()
    found: dict[int, Closure] = {}
    for nid in nids:
        closure = known(change_set, nid)
        if closure is None:
            closure = _closure(change_set, nid, lacking)
        if closure is not None:
            found[nid] = closure
    if not lacking.isdisjoint(change_set.auth_graph.loose):
        return None
    if lacking:
        raise MissingData("closures", lacking)
    return found


def _closure(change_set: ChangeSet, nid: int, lacking: set[int]) -> Closure | None:
    """Compute and keep the closure of an event from those of its auth events.

    The walk is depth-first and iterative, because auth chains can be long. An event whose closure
    needs data that is not in memory is ``stuck``. Then the result is None, and ``lacking`` gets the
    events to load.
    """
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
            change_set.auth_graph.closures[one] = closure_of(
                [
                    (change_set.auth_graph.place(auth), own)
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
    """Return the closure of an event if it is in memory.

    None means only that it is not in memory.
    """
    closure = change_set.auth_graph.closures.get(nid)
    return change_set.caches.closures.get(nid) if closure is None else closure


def _placed_row(change_set: ChangeSet, nid: int) -> EventRow | None:
    """Return the row of an event that has a position in the chain cover or is about to get one.

    Then its auth events have positions, too. Return None if that is unknown here.
    """
    row = change_set.events.known_row(nid)
    if (
        row is change_set.events.pending
        or nid in change_set.auth_graph.places
        or nid in change_set.caches.places
    ):
        return row
    return None
