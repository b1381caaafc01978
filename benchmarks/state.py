"""State groups by growing size: disk usage of a state change, rows that a read folds, read times.

Users join one after the other. Then random users change their names, some of them on two branches
that are merged; or new users join and leave, as in a wave of spam. Events are not signed. Postgres
is warm, and the store is opened again, so each read of a state is the first one of its process.
Other load affects the clock, so the minimum and the CPU time are given with the median.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import storage
from benchmarks.harness import Bench, Trips, append_all, timed
from storage import Config, EventId, Store
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
SERVERS: Final = 100
BATCH: Final = 100
READS: Final = 60
GROUPS_AT_ONCE: Final = 100
FORKS: Final = 0.02
SIDES: Final = 3  # most changes on each side of a fork
OTHER_TYPES: Final = ("m.room.power_levels", "m.room.join_rules", "m.room.create")
SQL_GROUPS: Final = """
SELECT count(*) AS changes,
    avg(coalesce(cardinality(key_nids), 0) + coalesce(cardinality(member_key_nids), 0)
        + (event_nid IS NOT NULL)::int)::float8 AS entries,
    max(cardinality(path_of(state_group))) AS rows_max,
    avg(cardinality(path_of(state_group)))::float8 AS rows_mean,
    count(*) FILTER (WHERE cardinality(path_of(state_group)) = 1) AS roots,
    pg_total_relation_size('state_groups') AS bytes
FROM state_groups
"""


class StateGroupSizes(NamedTuple):
    """The state groups of a room: entries of a row, rows of a path, and their bytes."""

    changes: int
    entries: float
    rows_max: int
    rows_mean: float
    roots: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BigRoomHistory:
    """A room: its members, then changes of theirs, or joins and leaves of newcomers."""

    members: int
    changes: int
    newcomers: bool = False

    def smaller(self) -> "BigRoomHistory":
        """Return a hundredth of it, for a quick run."""
        return BigRoomHistory(
            max(self.members // 100, 10), max(self.changes // 100, 100), self.newcomers
        )

    def build(self) -> RoomBuilder:
        room = RoomBuilder(
            "11",
            servers=[f"s{number + 1}.test" for number in range(SERVERS)],
            sign=False,
            checked=False,
            exact=False,
        )
        room.start(user_name(0))
        for user in range(1, self.members):
            room.join(user_name(user))
        rng, user, start = random.Random(1), self.members, len(room.events)
        while len(room.events) - start < self.changes:
            if self.newcomers:
                room.join(user_name(user))
                room.leave(user_name(user))
                user += 1
            elif rng.random() < FORKS:
                branches = room.fork(2)
                users = iter(rng.sample(range(1, self.members), 2 * SIDES))
                for branch in branches:
                    for _ in range(rng.randint(1, SIDES)):
                        branch.join(user_name(next(users)), displayname=str(len(room.events)))
                room.merge(*branches)
            else:
                changed = user_name(rng.randrange(1, self.members))
                room.join(changed, displayname=str(len(room.events)))
        return room


SIZES: Final = {
    "500 members": BigRoomHistory(500, 5_500),
    "5,000 members": BigRoomHistory(5_000, 55_000),
    "50,000 members": BigRoomHistory(50_000, 60_000),
    "spam, 1,000 joins and leaves": BigRoomHistory(100, 1_000, newcomers=True),
    "spam, 10,000": BigRoomHistory(100, 10_000, newcomers=True),
    "spam, 100,000": BigRoomHistory(100, 100_000, newcomers=True),
}


def user_name(number: int) -> str:
    """Return a user of a hundred servers, with a name as in `storage.testing`."""
    return f"@user{number + 1}:s{number % SERVERS + 1}.test"


async def run(bench: Bench) -> None:
    """Measure sizes and reads."""
    for name, history in SIZES.items():
        bench.results[name] = await _measure(bench, history.smaller() if bench.quick else history)


async def _measure(bench: Bench, history: BigRoomHistory) -> dict[str, Any]:
    room = history.build()
    async with bench.database() as dsn:
        async with storage.open(dsn, server_name=SERVER) as store:
            await append_all(store, room.pdus, BATCH)
            async with store.database.connection() as conn:
                await conn.execute("VACUUM ANALYZE")  # as autovacuum does after so many rows
                [sizes] = await conn.fetch(SQL_GROUPS, row=StateGroupSizes)
        found: dict[str, Any] = {
            "changes": sizes.changes,
            "entries_per_change": round(sizes.entries, 2),
            "rows_max": sizes.rows_max,
            "rows_mean": round(sizes.rows_mean, 1),
            "roots": sizes.roots,
            "mb": round(sizes.bytes / 1e6, 1),
            "bytes_per_change": round(sizes.bytes / sizes.changes),
        }
        if not history.newcomers:
            found["reads"] = await _reads(bench, dsn, room)
    return found


async def _reads(bench: Bench, dsn: str, room: RoomBuilder) -> dict[str, Any]:
    trips, rng = Trips(), random.Random(2)
    late = [event.event_id for event in room.events[len(room.events) // 2 :]]
    member = ("m.room.member", user_name(7))
    async with storage.open(
        dsn, server_name=SERVER, config=Config(cache_mb=1), observer=trips
    ) as store:
        trips.opened()
        reads = bench.size(READS, 5)
        return {
            name: await timed(question, trips, reads, server=bench.server)
            for name, question in _questions(store, rng, late, member).items()
        }


def _questions(
    store: Store, rng: random.Random, late: list[EventId], member: tuple[str, str]
) -> dict[str, Callable[[], Awaitable[Any]]]:
    def ids() -> list[EventId]:
        return rng.sample(late, min(GROUPS_AT_ONCE, len(late)))

    levels = ("m.room.power_levels", "")
    return {
        "whole state": lambda: store.state_before(rng.choice(late)),
        "one member at 100 groups": lambda: store.states_before(ids(), keys=[member]),
        "power levels at 100 groups": lambda: store.states_before(ids(), keys=[levels]),
        "all but members": lambda: store.state_before(rng.choice(late), types=OTHER_TYPES),
    }
