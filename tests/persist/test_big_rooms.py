"""The cost of a change in a big room, in counts, as times vary too much here.

benchmarks/state.py measures times and sizes.
"""

import sys
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

import storage
from storage import Config, Store
from storage.persist.load.chain_ancestors import ANCESTORS_MAX
from storage.testing import BuiltEvent, RoomBuilder

SERVER = "s1.test"
ALONE = Config(follow_ms=3_600_000)  # nothing is counted that is asked in the background
SQL_ENTRIES = """
SELECT sum(coalesce(cardinality(key_nids), 0) + coalesce(cardinality(member_key_nids), 0)
    + (event_nid IS NOT NULL)::int)::bigint
FROM state_groups
"""


class Work:
    """An observer that counts statements and, as trace function, the interpreter's steps."""

    def __init__(self) -> None:
        self.statements = self.steps = 0

    def before(self, statement: str) -> None:
        del statement
        self.statements += 1

    def after(self, statement: str, seconds: float) -> None:
        del statement, seconds

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if "/storage/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.steps += event == "opcode"
        return self.trace


def of_members(count: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=count, sign=False, checked=False, exact=False)
    room.start(room.user(1), join_rule="public")
    for number in range(2, count + 1):
        room.join(room.user(number))
    return room


async def deliver(store: Store, pdus: list[bytes]) -> None:
    for at in range(0, len(pdus), 500):
        assert {result.outcome for result in await store.append(pdus[at : at + 500])} == {"stored"}


async def cost(store: Store, work: Work, write: Callable[[int], BuiltEvent]) -> tuple[float, float]:
    """Return the median statements and steps of one change.

    A median, because now and then several changes are folded into one row.
    """
    costs = []
    for number in range(25):
        pdu = write(number).pdu
        work.statements = work.steps = 0
        before = sys.gettrace()
        sys.settrace(work.trace)
        try:
            await deliver(store, [pdu])
        finally:
            sys.settrace(before)
        costs.append((work.statements, work.steps))
    return median(one for one, _ in costs[5:]), median(one for _, one in costs[5:])


async def test_a_state_change_costs_the_same_whatever_the_number_of_members(dsn: str) -> None:
    """A topic, a name that a member gives itself, and a newcomer."""
    work = Work()
    found: dict[int, list[tuple[float, float]]] = {}
    async with storage.open(dsn, server_name=SERVER, observer=work) as store:
        for members in (20, 1_000):
            room = of_members(members)
            await deliver(store, room.pdus)
            admin, other = room.user(1), room.user(3)
            found[members] = [
                await cost(
                    store,
                    work,
                    lambda number: room.topic(admin, f"topic {number}"),  # noqa: B023
                ),
                await cost(
                    store,
                    work,
                    lambda number: room.join(other, displayname=f"{number}"),  # noqa: B023
                ),
                await cost(
                    store,
                    work,
                    lambda number: room.join(f"@new{number}:s9.test"),  # noqa: B023
                ),
            ]
    for small, big in zip(found[20], found[1_000], strict=True):
        # Nids come in blocks, so the median may lie beside a whole number.
        assert big[0] <= small[0] + 1
        assert big[1] <= 1.3 * small[1], found


async def test_joins_and_leaves_of_newcomers_grow_with_their_number_only(dsn: str) -> None:
    """Nobody stays and nothing repeats: three times as many take at most thrice the entries."""
    async with storage.open(dsn, server_name=SERVER) as store:
        room = of_members(50)
        await deliver(store, room.pdus)
        sent, entries = len(room.events), []
        for count in (0, 300, 600):
            for number in range(count):
                guest = f"@spam{count}-{number}:s9.test"
                room.join(guest)
                room.leave(guest)
            await deliver(store, room.pdus[sent:])
            sent = len(room.events)
            async with store.database.connection() as conn:
                entries.append(await conn.fetchval(SQL_ENTRIES))
    first, second = entries[1] - entries[0], entries[2] - entries[1]
    assert first <= 6 * 600
    assert second <= 1.5 * 2 * first


async def test_a_merge_asks_for_the_power_levels_since_the_fork_some_hundred_at_a_time(
    dsn: str,
) -> None:
    """The mainline goes through all of them: by a writer that remembers nothing."""
    statements: dict[int, int] = {}
    for levels in (20, 600):
        room = RoomBuilder("11", seed=levels, sign=False)
        admin = room.user(1)
        room.start(admin)
        (old,) = room.fork(1)
        for number in range(levels):
            room.power_levels(admin, {"events_default": number % 2})
        room.topic(admin, "new")
        old.topic(admin, "old")
        room.merge(old)
        merged = room.message(admin, "which topic?")
        async with storage.open(dsn, server_name=SERVER) as store:
            await deliver(store, room.pdus[:-1])
        work = Work()
        async with storage.open(dsn, server_name=SERVER, observer=work, config=ALONE) as store:
            before = work.statements
            await deliver(store, [merged.pdu])
            statements[levels] = work.statements - before
            assert await store.state_before(merged.event_id) == dict(merged.state_before)
    again = 1  # the lane of heavy rooms looks up the event once more
    assert statements[600] <= statements[20] + 2 * (600 // ANCESTORS_MAX) + again, statements
