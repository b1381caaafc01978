"""Many writers, with delays between taking an id and committing, rollbacks, cut connections and killed processes.

Every committed fact is seen exactly once, in order per writer and by the linear view. A reader that asks for `id > last` misses
facts under the same load, so the load is hard enough.
"""

import asyncio
import random
import sys
from contextlib import AsyncExitStack, suppress

import asyncpg
import pytest

import storage
from storage import Store
from storage.streams.feed import Advance, Fact
from storage.streams.following import follow_once

WRITERS = 8
PROCESSES = 2
FACTS_EACH = 30

SLOW_AND_FAILING = """
CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(random() * 0.02);
    IF random() < 0.1 THEN
        RAISE EXCEPTION 'unlucky';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER be_slow BEFORE INSERT ON to_device FOR EACH ROW EXECUTE FUNCTION be_slow();
"""

COMMITTED = "SELECT a.stream_id, w.instance_name FROM to_device a JOIN writers w USING (writer_nid) ORDER BY a.stream_id"
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'room-storage w%' ORDER BY random() LIMIT 1
"""


class LinearReader:
    """Reads up to the linear position, whoever wrote."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.at = 0
        self.seen: list[int] = []

    async def read(self) -> None:
        stream = self.store.streams["to_device"]
        upto = stream.linear()
        facts = await stream.rows(self.at, upto, 1_000_000)
        self.seen += [fact.stream_id for fact in facts]
        self.at = upto


class NaiveReader:
    """What not to do: remembers the largest id it has seen, and asks for larger ones."""

    def __init__(self) -> None:
        self.last = 0
        self.seen: list[int] = []

    async def read(self, connection: asyncpg.Connection) -> None:
        rows = await connection.fetch("SELECT stream_id FROM to_device WHERE stream_id > $1 ORDER BY stream_id", self.last)
        self.seen += [row[0] for row in rows]
        self.last = max([self.last, *self.seen[-1:]])


async def _write(store: Store, writer: int, rng: random.Random) -> None:
    for number in range(FACTS_EACH):  # what failed may have been committed all the same
        with suppress(storage.DatabaseError):
            await store.to_device.send({storage.UserId(f"@u{writer}:s1.test"): {"device": {"n": number}}})
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.05)


async def _kill_and_restart(dsn: str, name: str, rng: random.Random) -> None:
    """A writer process that is killed in the middle of its work, three times, and comes back under its name."""
    number = 0
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.streams.writer_process", dsn, name, str(number), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(rng.randint(3, 10)):
            number = int(await process.stdout.readline()) + 1
        process.kill()
        await process.wait()
        number += 100  # those that were under way, or failed, may have been committed: their numbers are not used again


@pytest.mark.timeout(300)
async def test_every_fact_is_seen_exactly_once(dsn: str) -> None:
    rng = random.Random(1)
    admin = await asyncpg.connect(dsn)
    await admin.execute(SLOW_AND_FAILING)
    told: list[Fact] = []

    def listen(advance: Advance) -> None:
        told.extend(advance.facts)

    config = storage.Config(follow_ms=50, pool_size_max=2)
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(storage.open(dsn, server_name="s1.test", instance_name=f"w{number}", config=config))
            for number in range(WRITERS)
        ]
        reader = await stack.enter_async_context(storage.open(dsn, server_name="s1.test", instance_name="reader", config=config))
        reader.streams.feed.subscribe(listen)
        linear, naive = LinearReader(reader), NaiveReader()
        work = asyncio.gather(
            *(_write(store, number, random.Random(number)) for number, store in enumerate(stores)),
            *(_kill_and_restart(dsn, f"p{number}", random.Random(number)) for number in range(PROCESSES)),
        )
        while not work.done():
            await linear.read()
            await naive.read(admin)
            if rng.random() < 0.05:
                await admin.execute(CUT)
            await asyncio.sleep(rng.random() * 0.02)
        await work
        committed = [tuple(row) for row in await admin.fetch(COMMITTED)]
        while linear.at < committed[-1][0]:
            await follow_once(reader.database, reader.streams)
            await linear.read()
        await admin.close()
    missed = [fact for fact in committed if fact[0] not in linear.seen]
    assert missed == []
    assert linear.seen == [stream_id for stream_id, _ in committed]
    assert sorted((fact.stream_id, fact.instance_name) for fact in told) == committed
    for name in {name for _, name in committed}:
        ids = [fact.stream_id for fact in told if fact.instance_name == name]
        assert ids == sorted(ids)
    assert naive.seen != linear.seen, "the load was too easy: the naive reader missed nothing"
    assert set(naive.seen) < set(linear.seen)
