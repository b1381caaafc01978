"""A soak test: `python -m benchmarks.soak --minutes 30`.

Neither `python -m benchmarks` nor CI runs it. Several writer processes append the same random
rooms, each its share: rooms of all versions mixed in one batch, with gaps and with joins over
federation. A bridge flaps, and another process joins rooms with the members omitted
(benchmarks/soak_processes.py). Clients in this process sync, page and get messages for their
devices. Meanwhile rooms are purged, collected, verified and archived, users are forgotten and
redacted events censored (benchmarks/soak_checks.py). Writers are killed
(SIGKILL). Postgres is restarted, alternately in fast mode and as in a crash. Rooms are attacked
(benchmarks/attack.py). Halfway, a standby that lacks the last seconds takes over behind the same
address, and no store is opened again.

In the end `verify` must find nothing. Each client knows only what its syncs returned, and must have
the state and the timelines of a new initial sync. The store that was open all the time, a new one,
and one that imports an export give equal answers. No event may be
rejected that its room's version allows. The exit code is 1 otherwise.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

import storage
from benchmarks.attack import ATTACKS, TOGETHER
from benchmarks.soak_checks import (
    SAMPLE,
    SoakClient,
    Upkeep,
    answer_differences,
    answers,
    differences,
    imported,
    say,
)
from benchmarks.soak_processes import CREATOR, FLAPPER, SERVER, join, quiet, room_of
from storage import RoomId, Store, UserId
from storage.config import Config
from storage.database.embedded import EmbeddedPostgres
from storage.maintenance.verify import verify
from tests.failover import ReplicatedPair, value

KILL_SECONDS: Final = 20.0
RESTART_SECONDS: Final = 60.0
UPKEEP_SECONDS: Final = 5.0
ATTACK_SECONDS: Final = 2.0  # between two transactions of an attack
ATTACK_EVENTS: Final = 300
LOST_SECONDS: Final = 3.0  # the time that the standby lacks
CLIENTS: Final = 4
SERVER_CONFIG: Final = Config(embedded_shared_buffers_mb=256, embedded_connections_max=100)
CONFIG: Final = Config(pool_size_max=10, follow_ms=100, connect_timeout_ms=5_000)
SQL_EVENTS: Final = "SELECT count(*) FROM events"
SQL_WHOLE_ROOMS: Final = """
SELECT room_id FROM rooms WHERE room_nid NOT IN (SELECT room_nid FROM partial_rooms) ORDER BY 1
"""
SQL_SAMPLE: Final = """
SELECT event_id
FROM events
JOIN rooms USING (room_nid)
WHERE room_id = $1 AND NOT outlier
ORDER BY random()
LIMIT $2
"""


@dataclass(slots=True)
class Soak:
    """The run: its Postgres, its processes, and its counts."""

    pair: ReplicatedPair
    writers: int
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    users: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    over: bool = False
    has_failed_over: bool = False
    switching: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def server(self) -> EmbeddedPostgres:
        """Return the server behind the address."""
        return self.pair.standby if self.has_failed_over else self.pair.primary

    @property
    def joiner(self) -> int:
        """Return the index of the process that joins rooms, the last one."""
        return self.writers + 1

    # ---------------------------------------------------------------------------------------------
    # writers

    def start(self, index: int) -> None:
        """Start a writer at its last pair of rooms; then come the bridge and the joiner."""
        dsn, at = self.pair.dsn, self.at.get(index, 0)
        if index == self.writers:
            given = ["flapper", dsn, *self.users]
        elif index == self.joiner:
            given = ["joiner", dsn, str(at)]
        else:
            given = ["writer", dsn, f"writer{index}", *map(str, (at, self.writers, index))]
        command = [sys.executable, "-m", "benchmarks.soak_processes", *given]
        self.killed.discard(index)
        self.processes[index] = subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
        )

    async def listen(self, index: int) -> None:
        """Record a writer's pair of rooms, over its restarts, and its reported failures."""
        while not self.over:
            process = self.processes[index]
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            if line.startswith(b"rejected"):
                self.wrong.append(line.decode().strip())
            elif line:
                self.at[index] = int(line)
            elif process is not self.processes[index] or index in self.killed:
                await asyncio.sleep(0.05)
            else:
                self.wrong.append(
                    f"writer {index} ended by itself with {await asyncio.to_thread(process.wait)}"
                )
                self.start(index)

    async def kill(self) -> None:
        """Kill a writer, and start it again."""
        index = self.chance.randrange(self.joiner + 1)
        self.end(index)
        self.counts["writers killed"] += 1
        await asyncio.sleep(self.chance.random())
        if not self.over:
            self.start(index)

    def end(self, index: int) -> None:
        """Kill a writer."""
        self.killed.add(index)
        self.processes[index].send_signal(signal.SIGKILL)
        self.processes[index].wait()

    # ---------------------------------------------------------------------------------------------
    # Postgres

    async def restart(self) -> None:
        """Stop Postgres, alternately in fast mode and as in a crash, and start it again."""
        crash = self.counts["Postgres restarts"] % 2 == 1
        async with self.switching:
            assert self.server.pid is not None
            process = psutil.Process(self.server.pid)
            process.send_signal(signal.SIGQUIT if crash else signal.SIGINT)
            # polled, because it is another program's process
            while (  # noqa: ASYNC110
                process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            ):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(self.server.start)
        self.counts["Postgres restarts"] += 1
        self.counts["of them as a crash"] += crash

    async def fail_over(self, minutes: float, clients: list[SoakClient]) -> None:
        """After so many minutes, let a standby take over that lacks the last seconds."""
        await self.rest(minutes * 60)
        async with self.switching:
            sent = [client.sent for client in clients]
            await self.pair.caught_up()
            await self.pair.detach()
            before = await value(self.pair.rooms(self.pair.primary), SQL_EVENTS)
            await asyncio.sleep(LOST_SECONDS)
            written = await value(self.pair.rooms(self.pair.primary), SQL_EVENTS)
            await self.pair.fail_over()
            self.has_failed_over = True
            for client, first in zip(clients, sent, strict=True):
                client.unsure.update(range(first, client.sent))
        self.counts["events lost by a failover, at least"] = written - before

    async def rest(self, seconds: float) -> None:
        """Wait, but not beyond the end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.over:  # noqa: ASYNC110  # others set `over`
            await asyncio.sleep(0.2)

    # ---------------------------------------------------------------------------------------------
    # attack

    async def attack(self, store: Store) -> None:
        """Attack one room after another; every client has a user in each."""
        for seed, (make, _) in enumerate(itertools.cycle(ATTACKS.values()), 1):
            beginning, attack = await asyncio.to_thread(
                make, ATTACK_EVENTS, seed=seed, joined=self.users
            )
            pdus = [*beginning, *attack]
            at = 0
            while at < len(pdus):
                await self.rest(ATTACK_SECONDS)
                if self.over:
                    return
                try:
                    results = await store.append(pdus[at : at + TOGETHER], room_version="11")
                except storage.DatabaseError as error:
                    self.counts[f"attack errors: {type(error).__name__}"] += 1
                    continue
                lost = any(result.outcome == "missing_parents" for result in results)
                at = 0 if lost else at + TOGETHER
                self.counts["transactions of an attack"] += 1
            self.counts["rooms attacked to the end"] += 1

    # ---------------------------------------------------------------------------------------------
    # clients

    async def sync(self, store: Store, client: SoakClient) -> bool:
        """Sync once; return whether there was nothing new."""
        try:
            answer = await store.sync(
                client.user_id, since=client.since, timeline_limit=self.chance.choice((5, 20, 100))
            )
        except storage.ResyncNeeded:
            self.counts["resyncs"] += 1
            client.forget()
            return False
        client.hear(answer)
        self.counts["syncs"] += 1
        for message in await store.to_device.inbox(client.user_id, "device", limit=1000):
            number = int(json.loads(message.content)["n"])
            # it was received before, and could not be deleted then
            if number not in client.messages[-1000:]:
                client.messages.append(number)
            await store.to_device.delete(client.user_id, "device", message.stream_id)
        return answer.is_empty

    async def page(self, store: Store, client: SoakClient) -> None:
        """Page back from the start of a timeline. Raise RuntimeError if an event comes twice."""
        if not client.starts:
            return
        room_id = self.chance.choice(list(client.starts))
        place: str | None = client.starts[room_id]
        met = set(client.timelines[room_id])
        while place is not None:
            page = await store.messages(room_id, client.user_id, from_=place, limit=30)
            self.counts["pages"] += 1
            new = [event.event_id for event in page.chunk]
            if met & set(new):
                raise RuntimeError(
                    f"{client.user_id} met events of {room_id} twice: {met & set(new)}"
                )
            met.update(new)
            place = page.end

    async def tell(self, store: Store, client: SoakClient) -> None:
        """Send a message to the client's device, and set account data."""
        number = client.sent
        client.sent += 1
        try:
            await store.to_device.send({client.user_id: {"device": {"n": number}}})
        except storage.CommitUnknown:
            client.unsure.add(number)
            raise
        except storage.DatabaseError:
            client.failed.add(number)
            raise
        await store.account_data.set(client.user_id, "m.soak", {"n": number})

    async def live(self, store: Store, client: SoakClient) -> None:
        """Run a client until the end: syncs, pages, messages."""
        while not self.over:
            try:
                await self.sync(store, client)
                await self.chance.choice([self.page, self.tell])(store, client)
            except storage.DatabaseError as error:
                self.counts[f"client errors: {type(error).__name__}"] += 1
                await asyncio.sleep(0.2)
            except storage.UnknownRoom:
                self.counts["pages of purged rooms"] += 1
            except storage.ResyncNeeded:
                self.counts["pages of the lost time"] += 1
            await asyncio.sleep(0.1 * self.chance.random())

    async def every(
        self, seconds: float, what: Callable[..., Awaitable[None]], *given: Any
    ) -> None:
        """Call a function repeatedly; skip calls while Postgres is down."""
        due = time.monotonic() + seconds
        while not self.over:
            if time.monotonic() < due:
                await asyncio.sleep(0.2)
                continue
            due = time.monotonic() + seconds * (0.5 + self.chance.random())
            try:
                await what(*given)
            except storage.DatabaseError as error:
                self.counts[f"upkeep errors: {type(error).__name__}"] += 1


async def finished(soak: Soak, store: Store, clients: list[SoakClient]) -> list[str]:
    """Wait until everything is idle; then return the failures."""
    await join(soak.pair.dsn, soak.at.get(soak.joiner, 0))  # it was killed on the way
    told = list(soak.wrong)
    for room_id, user_id in {
        room_id: client.user_id for client in clients for room_id in client.states
    }.items():
        soak.counts["rooms with a last message"] += await say(store, room_id, user_id)
    for client in clients:
        quiet = 0
        while quiet < 3:
            quiet = quiet + 1 if await soak.sync(store, client) else 0
            await asyncio.sleep(0.2)
        told += await differences(store, client)
        soak.counts["rooms of clients compared"] += len(client.states)
        soak.counts["timeline events compared"] += sum(map(len, client.timelines.values()))
        heard = set(client.messages)
        soak.counts["messages to devices"] += len(heard)
        if lost := set(range(client.sent)) - heard - client.failed - client.unsure:
            told.append(f"{client.user_id}: messages to the device lost: {lost}")
        if heard & client.failed:
            told.append(
                f"{client.user_id}: messages came whose write had failed: {heard & client.failed}"
            )
    async with store.database.connection() as conn:
        await conn.execute("ANALYZE")  # a crash of Postgres loses the statistics for autovacuum
    told += [str(finding) async for finding in verify(store.database, server_name=SERVER)]
    async with store.database.connection() as conn:
        soak.counts["rooms"], soak.counts["events"] = (
            await conn.fetchval("SELECT count(*) FROM rooms"),
            await conn.fetchval("SELECT count(*) FROM events"),
        )
    return told


async def compared(soak: Soak, warm: Store, upkeep: Upkeep) -> list[str]:
    """Return where the answers of the warm store, of a new one and of an import differ.

    An export leaves out rooms that are partial at the end.
    """
    async with warm.database.connection() as conn:
        rooms = [RoomId(room_id) for room_id in await conn.fetchvals(SQL_WHOLE_ROOMS)]
        samples = [await conn.fetchvals(SQL_SAMPLE, room_id, SAMPLE) for room_id in rooms]
    dsn, users = ReplicatedPair.rooms(soak.server), [UserId(user) for user in soak.users]
    told = list[str]()
    async with (
        storage.open(soak.pair.dsn, server_name=SERVER, config=CONFIG) as cold,
        imported(dsn, upkeep.folder, sorted(upkeep.forgotten)) as copy,
    ):
        for room_id, sample in zip(rooms, samples, strict=True):
            now = await answers(warm, room_id, users, sample)
            for name, other in (("cold", cold), ("imported", copy)):
                there = await answers(other, room_id, users, sample)
                told += answer_differences(name, room_id, now, there)
                soak.counts["answers compared"] += len(there)
    return told


@asynccontextmanager
async def tasks(*work: Any) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run tasks and await them at the end, so that their exceptions appear."""
    started = [asyncio.create_task(one) for one in work]
    yield started
    await asyncio.gather(*started)


async def run_soak(*, minutes: float, writers: int, seed: int) -> int:
    """Run the whole test; return the number of failures."""
    users = sorted(
        {event.sender for event in room_of(0).events if event.sender.endswith(f":{SERVER}")}
    )
    clients = [SoakClient(UserId(user)) for user in users[:CLIENTS]]
    async with ReplicatedPair(SERVER_CONFIG) as pair, AsyncExitStack() as stack:
        soak = Soak(
            pair, writers, random.Random(seed), users=[client.user_id for client in clients]
        )
        store = await stack.enter_async_context(
            storage.open(pair.dsn, server_name=SERVER, instance_name="clients", config=CONFIG)
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept = [*soak.users, CREATOR, FLAPPER]
        upkeep = Upkeep(pair.dsn, soak.chance, soak.counts, folder, kept)
        await run_for(soak, store, clients, upkeep, minutes)
        wrong = await finished(soak, store, clients)
        wrong += await compared(soak, store, upkeep)
    print(json.dumps(soak.counts, indent=1))
    print("\n".join(wrong) or "nothing is wrong")
    return len(wrong) + soak.counts["findings meanwhile"]


async def run_for(
    soak: Soak, store: Store, clients: list[SoakClient], upkeep: Upkeep, minutes: float
) -> None:
    """Run everything for a number of minutes."""
    processes = range(soak.joiner + 1)
    for index in processes:
        soak.start(index)
    work = [soak.live(store, client) for client in clients] + [
        soak.listen(index) for index in processes
    ]
    work += [soak.every(KILL_SECONDS, soak.kill), soak.every(RESTART_SECONDS, soak.restart)]
    work += [soak.attack(store), soak.fail_over(minutes / 2, clients)]
    async with tasks(*work, soak.every(UPKEEP_SECONDS, upkeep)) as started:
        await asyncio.wait(started, timeout=minutes * 60, return_when=asyncio.FIRST_EXCEPTION)
        soak.over = True
        for index in processes:
            soak.end(index)


def main() -> int:
    """Run the command."""
    quiet()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.monotonic()
    wrong = asyncio.run(run_soak(minutes=given.minutes, writers=given.writers, seed=given.seed))
    print(f"{(time.monotonic() - start) / 60:.1f} minutes, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
