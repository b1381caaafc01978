"""Auth graphs of any shape, valid by the auth rules or not, with their chain cover positions."""

from collections.abc import Collection, Mapping, Sequence
from random import Random

from storage.persist.model.cache_view import NewEvent
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow
from storage.persist.plan.auth_difference import cover_event
from storage.rebuild.planner import NewRoomAnswers

SERVER = "s1.test"
KEYS = 8
"""State keys of the graphs below.

1 is the create event's, 2 the power levels', the others are those of members and their state.
"""

Graph = Mapping[int, Sequence[int]]


def caches() -> WriterCaches:
    return WriterCaches(events=10_000, groups=1_000, state_entries=100_000, rooms=100, names=10_000)


def chain(graph: Graph, nids: Collection[int]) -> set[int]:
    reached: set[int] = set()
    front = [auth for nid in nids for auth in graph[nid]]
    while front:
        nid = front.pop()
        if nid not in reached:
            reached.add(nid)
            front += graph[nid]
    return reached


class AuthGraphWorld:
    """A change set with events of any auth events, and the events by state key, older ones first.

    Nothing is in the database.
    """

    def __init__(self) -> None:
        self.change_set = ChangeSet(
            caches(), NidBlocks(), SERVER, answers=NewRoomAnswers(is_first=True)
        )
        self.graph: dict[int, tuple[int, ...]] = {}
        self.of_key: dict[int, list[int]] = {key: [] for key in range(1, KEYS + 1)}
        self.cited: list[int] = []

    def add(self, nid: int, key: int, auth: Collection[int], *, rejected: bool = False) -> None:
        row = EventRow(nid, f"${nid}", 1, None, 1, 1, 1, 1, None, None, None, 1, 1, key,
                       None, False, False, False, False, "no" if rejected else None, (),
                       tuple(auth), False)  # fmt: skip
        self.change_set.events.rows[row.event_id], self.change_set.events.row_ids[nid] = (
            row,
            row.event_id,
        )
        self.change_set.names.state_key_names[key] = (1, str(key))
        self.change_set.events.new_events[nid] = NewEvent(row, b"")
        entry = cover_event(self.change_set, row)
        if entry is not None:
            self.change_set.auth_graph.add_chain_position(nid, entry)
            self.cited.append(nid)
        else:
            self.change_set.auth_graph.loose.add(nid)  # as the database says of it
        self.graph[nid] = row.auth_events
        self.of_key[key].append(nid)


def world_of(rng: Random, runs: int, *, rejected: bool) -> AuthGraphWorld:
    """Return a graph of events that cite any earlier ones.

    Events come in runs, each cites the one before it, and nids are in any order.
    """
    world = AuthGraphWorld()
    nids = iter(rng.sample(range(1, 100 * runs), 14 * runs + 1))
    world.add(next(nids), 1, ())
    for _ in range(runs):
        key = rng.randint(2, KEYS)
        placed = [nid for nid in world.of_key[key] if nid in world.change_set.auth_graph.places]
        last = rng.choice(placed[-3:]) if placed and rng.random() < 0.6 else None
        for _ in range(rng.choice((1, 1, 2, 12))):
            auth = set(rng.sample(world.cited[-20:], min(len(world.cited), rng.randint(0, 3))))
            auth |= {rng.choice(world.cited)} if rng.random() < 0.3 else set()
            auth |= {last} if last else set()
            last = next(nids)
            world.add(last, key, auth)
        if rejected and rng.random() < 0.5:
            world.add(
                next(nids),
                key,
                rng.sample(list(world.graph), min(3, len(world.graph))),
                rejected=True,
            )
    return world
