"""The first sync of many users at once, over HTTP: the example homeserver and Synapse, in turns.

The workload is that of "A Comparative Performance Study of the Matrix /sync Endpoint on Synapse and
Tuwunel" (SBRC 2026, doi 10.5753/sbrc.2026.19722). There, 200 users request their first sync at the
same time. Each is in 300 rooms of 300 members. The profiles have timelines of 1, 5 or 20
events with lazily loaded members, and timelines of 10 events with the whole state. Two profiles of
sliding sync are not of the study: the window that a client opens with, and all rooms. This run is
scaled down for two cores: "scale" in the results has the sizes. "published" in the results has the
response times of the study, as the documentation of Tuwunel reports them. They are of the whole
load, of Synapse with 18 workers, and of other machines: do not compare them with these.

Both servers store the same signed events on one Postgres, and have one process each. "call" is
`store.sync` or `store.sliding_sync` alone, in the process of the benchmark. The responses of both
servers must have the same timelines and the same state. Both keep their caches from round to round;
only Synapse's cache of whole responses is off.

The two differ: Synapse's sync also reads push counts, presence and device lists, of which there are
none. The example homeserver does not have them.
"""

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import aiohttp
import psutil

import storage
from benchmarks.harness import Bench, note, spent, spread, stored
from benchmarks.peers.process import SynapseProcess, synapse
from benchmarks.peers.writes import BATCH
from benchmarks.ports import free_port
from storage import SlidingList, SlidingSyncRequest, Store, SyncFilter
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
VERSION: Final = "11"
MESSAGES: Final = 25
"""Messages of a room after the joins."""
CLIENT: Final = "/_matrix/client/v3"
SLIDING: Final = "/_matrix/client/unstable/org.matrix.simplified_msc3575/sync"
REQUIRED: Final = (
    ("m.room.create", ""),
    ("m.room.name", ""),
    ("m.room.power_levels", ""),
    ("m.room.member", "$LAZY"),
    ("m.room.member", "$ME"),
)
"""The state of each room in a sliding sync."""
PASSWORD: Final = "of a benchmark"
START_SECONDS: Final = 60
UNLIMITED: Final = aiohttp.ClientTimeout(total=None)


class FirstSyncProfile(NamedTuple):
    """The request of each user. ``window``: a sliding sync of so many rooms."""

    name: str
    timeline_limit: int
    lazy: bool = True
    window: int | None = None

    @property
    def request(self) -> tuple[str, str, dict[str, Any]]:
        """Return method, path, and arguments of the HTTP client."""
        if self.window is not None:
            room = {"required_state": REQUIRED, "timeline_limit": self.timeline_limit}
            body = {"lists": {"rooms": room | {"ranges": [[0, self.window - 1]]}}}
            return "POST", SLIDING, {"json": body}
        timeline, state = {"limit": self.timeline_limit}, {"lazy_load_members": self.lazy}
        query = {"filter": json.dumps({"room": {"timeline": timeline, "state": state}})}
        return "GET", f"{CLIENT}/sync", {"params": query}

    async def call(self, store: Store, user: str) -> None:
        """Make the same request of the library."""
        limit = self.timeline_limit
        if self.window is None:
            chosen = SyncFilter(lazy_load_members=self.lazy)
            await store.sync(user, timeline_limit=limit, filter=chosen)
            return
        state = [(kind, key) for kind, key in REQUIRED]
        rooms = SlidingList([(0, self.window - 1)], timeline_limit=limit, required_state=state)
        request = SlidingSyncRequest(lists={"rooms": rooms})
        await store.sliding_sync(user, request, device_id="CALL")


PROFILES: Final = (
    FirstSyncProfile("1 event, lazy members", 1),
    FirstSyncProfile("5 events, lazy members", 5),
    FirstSyncProfile("10 events, whole state", 10, lazy=False),
    FirstSyncProfile("20 events, lazy members", 20),
    FirstSyncProfile("sliding sync, 20 rooms, 1 event", 1, window=20),
    FirstSyncProfile("sliding sync, all rooms, 20 events", 20, window=1_000),
)
PUBLISHED: Final = {
    "1 event, lazy members": (80.1, 8.6),
    "5 events, lazy members": (74.3, 14.0),
    "10 events, whole state": (465.3, 725.9),
    "20 events, lazy members": (117.5, 33.8),
}
"""Average seconds of the study: of Synapse with 18 workers, and of Tuwunel."""


class Burst(NamedTuple):
    """The first syncs of all users at once."""

    seconds: list[float]
    response_bytes: int
    server_cpu: float
    postgres_cpu: float


class FirstSyncSide(Protocol):
    """A way to get the first syncs."""

    async def respond(self, user: int, profile: FirstSyncProfile) -> int:
        """Return the bytes of a user's response."""

    def cpu(self) -> float:
        """Return the CPU seconds of its process so far."""


@dataclass(frozen=True, slots=True)
class OverHttp:
    """A server's process, and the access tokens of its users."""

    session: aiohttp.ClientSession
    url: str
    pid: int
    tokens: list[str]

    async def respond(self, user: int, profile: FirstSyncProfile) -> int:
        return len(await self.body(user, profile))

    async def body(self, user: int, profile: FirstSyncProfile) -> bytes:
        headers = {"Authorization": f"Bearer {self.tokens[user]}"}
        method, path, given = profile.request
        url = self.url + path
        async with self.session.request(method, url, headers=headers, **given) as response:
            body = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status} {body[:500]!r}")
            return body

    def cpu(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class CallAlone:
    """`store.sync` in this process; nothing is encoded."""

    store: Store
    users: list[str]

    async def respond(self, user: int, profile: FirstSyncProfile) -> int:
        await profile.call(self.store, self.users[user])
        return 0

    def cpu(self) -> float:
        return time.process_time()


async def run(bench: Bench, *, alone: bool = False) -> None:
    """Measure each profile on all sides; `alone`: without Synapse, to check that ours works."""
    users, rooms, members = bench.size(20, 2), bench.size(100, 3), bench.size(100, 5)
    scale = {"users": users, "rooms": rooms, "members": members, "messages": MESSAGES}
    bench.results["scale"] = scale
    names = [f"@user{number}:{SERVER}" for number in range(1, users + 1)]
    async with _sides(bench, names, (rooms, members), alone=alone) as sides:
        for profile in PROFILES:
            note(profile.name)
            await _agree([one for one in sides.values() if isinstance(one, OverHttp)], profile)
            bursts = await _in_turns(bench, sides, users, profile)
            told = _told(bursts)
            if profile.name in PUBLISHED:
                keys = ("synapse_seconds", "tuwunel_seconds")
                told["published"] = dict(zip(keys, PUBLISHED[profile.name], strict=True))
            bench.results.setdefault("profiles", {})[profile.name] = told


async def _in_turns(
    bench: Bench, sides: dict[str, FirstSyncSide], users: int, profile: FirstSyncProfile
) -> dict[str, list[Burst]]:
    bursts: dict[str, list[Burst]] = {name: [] for name in sides}
    for number in range(bench.size(3, 1)):
        for name in sorted(sides, reverse=bool(number % 2)):
            bursts[name].append(await _burst(bench, sides[name], users, profile))
    return bursts


async def _burst(bench: Bench, side: FirstSyncSide, users: int, profile: FirstSyncProfile) -> Burst:
    async def timed(user: int) -> tuple[float, int]:
        start = time.perf_counter()
        size = await side.respond(user, profile)
        return time.perf_counter() - start, size

    before = side.cpu()
    with spent(bench.server) as cost:
        found = await asyncio.gather(*map(timed, range(users)))
    seconds = [one for one, _ in found]
    size = sum(one for _, one in found) // users
    return Burst(seconds, size, side.cpu() - before, cost.backends)


async def _agree(sides: list[OverHttp], profile: FirstSyncProfile) -> None:
    """Raise if the servers' responses to a user have other timelines or another state."""
    first, *others = [_content(await side.body(0, profile)) for side in sides]
    for other in others:
        differing = {one for one in first.keys() | other.keys() if first.get(one) != other.get(one)}
        for room in sorted(differing)[:1]:
            both = f"{first.get(room)}, {other.get(room)}"
            raise RuntimeError(f"{profile.name}: {len(differing)} rooms differ; {room}: {both}")


def _content(body: bytes) -> dict[str, Any]:
    """Return the event ids of each room's timeline, and those of its state."""
    response = json.loads(body)
    if "join" not in response["rooms"]:
        return {
            room_id: (_ids(room["timeline"]), sorted(_ids(room["required_state"])))
            for room_id, room in response["rooms"].items()
        }
    return {
        room_id: (
            _ids(room["timeline"]["events"]),
            sorted(_ids(room.get("state", {}).get("events", ()))),
        )
        for room_id, room in response["rooms"]["join"].items()
    }


def _ids(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["event_id"] for event in events]


def _told(bursts: dict[str, list[Burst]]) -> dict[str, Any]:
    told: dict[str, Any] = {name: _one(listed) for name, listed in bursts.items()}
    if "synapse" in bursts:
        pairs = zip(bursts["synapse"], bursts["ours"], strict=True)
        told["ratio"] = spread([_average(theirs) / _average(own) for theirs, own in pairs])
    return told


def _one(listed: list[Burst]) -> dict[str, Any]:
    size = listed[0].response_bytes
    return {
        "average_seconds": spread([_average(one) for one in listed], digits=3),
        "slowest_seconds": spread([max(one.seconds) for one in listed], digits=3),
        "server_cpu_seconds": spread([one.server_cpu for one in listed], digits=3),
        "postgres_cpu_seconds": spread([one.postgres_cpu for one in listed], digits=3),
    } | ({"response_bytes": size} if size else {})


def _average(burst: Burst) -> float:
    return sum(burst.seconds) / len(burst.seconds)


# ------------------------------------------------------------------------------------------------
# the sides


def _rooms(rooms: int, members: int) -> Iterator[RoomBuilder]:
    """Yield the rooms: all have the same members, and different speakers."""
    for seed in range(rooms):
        room = RoomBuilder(
            VERSION, seed=50_000 + seed, servers=(SERVER,), checked=False, exact=False
        )
        room.start(room.user(1), name=f"room {seed}")
        for number in range(2, members + 1):
            room.join(room.user(number), displayname=f"User number {number}")
        for number in range(MESSAGES):
            room.message(room.user(1 + (7 * seed + 3 * number) % members), f"message {number}")
        yield room


@asynccontextmanager
async def _sides(
    bench: Bench, users: list[str], size: tuple[int, int], *, alone: bool
) -> AsyncIterator[dict[str, FirstSyncSide]]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        session = await enter(
            aiohttp.ClientSession(timeout=UNLIMITED, connector=aiohttp.TCPConnector(limit=0))
        )
        dsn = await enter(bench.database())
        store = await enter(storage.open(dsn, server_name=SERVER, instance_name="benchmark"))
        ports = [free_port() for _ in range(3)]
        peer = (
            None if alone else await enter(synapse(bench.server.dsn, SERVER, client_port=ports[2]))
        )
        for room in _rooms(*size):
            batches = [room.pdus[at : at + BATCH] for at in range(0, len(room.pdus), BATCH)]
            for batch in batches:
                await stored(store, batch)
            if peer:
                await _give(peer, room.room_id, batches)
        sides: dict[str, FirstSyncSide] = {"call": CallAlone(store, users)}
        sides["ours"] = await enter(_example(session, dsn, ports[0], ports[1], users))
        if peer:
            bench.results["peer"] = await peer.ask("versions")
            sides["synapse"] = await _logged_in(session, peer, ports[2], users)
            await peer.ask("settle", quiet_seconds=2.0, timeout_seconds=60.0)
        yield sides


async def _give(peer: SynapseProcess, room_id: str, batches: list[list[bytes]]) -> None:
    await peer.ask("room", room_id=room_id, room_version=VERSION)
    await peer.load([batches])
    await peer.ask("persist", how="steps")


async def _logged_in(
    session: aiohttp.ClientSession, peer: SynapseProcess, port: int, users: list[str]
) -> OverHttp:
    tokens = [secrets.token_urlsafe(16) for _ in users]
    for user, token in zip(users, tokens, strict=True):
        await peer.ask("log_in", user_id=user, token=token)
    return OverHttp(session, f"http://127.0.0.1:{port}", peer.process.pid, tokens)


@asynccontextmanager
async def _example(
    session: aiohttp.ClientSession, dsn: str, port: int, federation_port: int, users: list[str]
) -> AsyncIterator[OverHttp]:
    """Run the example homeserver on a database, and register its users."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="room-storage-example-") as folder:
        command = [sys.executable, "-m", "examples.homeserver", "--folder", folder, "--dsn", dsn]
        command += ["--name", SERVER, "--client-port", str(port)]
        command += ["--federation-port", str(federation_port)]
        with (Path(folder) / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            await _started(session, url, process, Path(folder) / "log")
            tokens = [await _registered(session, url, user) for user in users]
            yield OverHttp(session, url, process.pid, tokens)
        finally:
            process.kill()
            await process.wait()


async def _started(
    session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process, log: Path
) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not await _is_up(session, url):
            if process.returncode is not None:
                raise RuntimeError(await asyncio.to_thread(log.read_text, "utf-8", "replace"))
            await asyncio.sleep(0.1)


async def _is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/_matrix/client/versions") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def _registered(session: aiohttp.ClientSession, url: str, user: str) -> str:
    """Return an access token of a new user."""
    name = user[1:].partition(":")[0]
    given = {"username": name, "password": PASSWORD, "auth": {"type": "m.login.dummy"}}
    async with session.post(f"{url}{CLIENT}/register", json=given) as response:
        return str((await response.json())["access_token"])
