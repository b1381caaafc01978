"""The auth difference and the conflicted subgraph by walking whole auth chains: where an event in question has no place in the chain cover.

That is so of a rejected event in a state that somebody gave. `storage.persist.chains` answers the same without the walk.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from storage.errors import StorageCorrupt
from storage.persist.draft import Draft
from storage.state.groups import Group

Graph = Mapping[int, tuple[int, ...]]

PLACES_AT_ONCE: Final = 256
WALKED_STATE: Final = 500  # entries of a state whose auth chain is walked


class Chains(NamedTuple):
    """Nids: of events in the auth chain of some state but not of all, and of those on a path between two conflicted events."""

    difference: set[int]
    subgraph: set[int]


def walked(draft: Draft, states: Sequence[Group], keys: set[int]) -> Chains:
    """The auth difference of states that differ in these keys only, and the conflicted subgraph."""
    conflicted = [{state.entries[key] for key in keys if key in state.entries} for state in states]
    graph = auth_graph(draft, set().union(*conflicted))
    chains = [reach(graph, nids) for nids in conflicted]
    difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
    difference -= _reached_by_common(draft, states[0], keys, difference)
    return Chains(difference, _between(graph, set().union(*conflicted)))


def _reached_by_common(draft: Draft, state: Group, keys: set[int], nids: set[int]) -> set[int]:
    """Which of these events the auth chain of what the states have in common holds.

    What the states have in common is never walked, unless it is so little that walking it here costs less than asking.
    """
    if not nids:
        return set()
    common = [nid for key, nid in state.entries.items() if key not in keys] if len(state.entries) <= WALKED_STATE else []
    if common:
        return reach(auth_graph(draft, common), common) & nids
    new = [nid for key, nid in state.entries.items() if key not in keys and nid in draft.new_events] if draft.new_places else []
    found = reach(auth_graph(draft, new), new) & nids
    return found | asked(draft, state, keys, nids - found)


def asked(draft: Draft, state: Group, keys: Collection[int], nids: Iterable[int]) -> set[int]:
    """Which of these events what is committed of the common state reaches.

    Found from these upwards by the chain cover, a few places at a time, as nearly always one of the first is in the state.
    """
    found: set[int] = set()
    limit = PLACES_AT_ONCE
    left = frozenset(nids)
    while left:
        reaching = draft.answer(("reaching", left, limit))
        found |= {one for one, nid, key in reaching if key not in keys and state.entries.get(key) == nid}
        full = Counter(one for one, _, _ in reaching)
        left = frozenset(nid for nid in left - found if full[nid] == limit)
        limit *= 16
    return found


def auth_graph(draft: Draft, nids: Iterable[int]) -> Graph:
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
        row = draft.known_row(nid)
        if row is None:
            committed.add(nid)
        else:
            graph[nid] = row.auth_events
            front.extend(row.auth_events)
    if committed:
        graph.update(draft.answer(("auth_graph", frozenset(committed))))
    if lost := {auth for auths in graph.values() for auth in auths if auth not in graph}.union(committed - graph.keys()):
        raise StorageCorrupt("events that the auth graph refers to are not held", event_nids=sorted(lost))
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
