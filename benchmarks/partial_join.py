"""Join a room of 10,000 members by the whole answer of send_join, and with the members omitted.

The answer is parsed JSON in memory, and so are the answers of other servers: no network is
measured. The clock runs from the answer until the end of the first sync with its timeline. After
the join with the members omitted, the rest is fetched while a local user sends a message every few
milliseconds. Each round has new databases, and joins a small room first.
"""

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

from signedjson.key import encode_verify_key_base64
from signedjson.sign import sign_json

import storage
from benchmarks.harness import Bench, percentiles, show, spread
from storage import EventId, RoomId, Store, SyncFilter, UserId
from storage.federation import Receiver
from storage.testing import KEY_ID, BuiltEvent, RoomBuilder, signing_key, verify_key

MEMBERS: Final = 10_000
SERVERS: Final = 100
MESSAGES: Final = 50
"""Messages after the joins, of which some servers may know the senders."""
SERVER: Final = "here.test"
USER: Final = UserId(f"@dora:{SERVER}")
VERSION: Final = "12"
MEMBER: Final = "m.room.member"
PAUSE_S: Final = 0.005
GOAL_MS: Final = 300
Json = dict[str, Any]


class BuiltRoom(NamedTuple):
    """A room, the join of the local user, and the two answers to it."""

    room: RoomBuilder
    join: BuiltEvent
    answers: Mapping[str, Json]


class MemoryRemote:
    """The answers of the servers in a room."""

    def __init__(self, rooms: Iterable[BuiltRoom]) -> None:
        self._rooms = {one.room.room_id: one for one in rooms}

    async def event(self, server: str, event_id: EventId) -> Json:
        """Answer with an event."""
        del server
        rooms = [one.room for one in self._rooms.values() if event_id in one.room.graph]
        return {"pdus": [rooms[0].event(event_id).json]}

    async def state_ids(self, server: str, room_id: RoomId, event_id: str) -> Json:
        """Answer with the ids of the state before an event."""
        del server
        room = self._rooms[room_id].room
        ids = list(room.event(event_id).state_before.values())
        return {"pdu_ids": ids, "auth_chain_ids": list(room.graph.auth_chain(ids))}

    async def state(self, server: str, room_id: RoomId, event_id: str) -> Json:
        """Answer with the state before an event."""
        del server, event_id
        whole = self._rooms[room_id].answers["whole"]
        return {"pdus": whole["state"], "auth_chain": whole["auth_chain"]}

    async def server_keys(self, server: str) -> Json:
        """Answer with the keys of a server."""
        body = {
            "server_name": server,
            "verify_keys": {KEY_ID: {"key": encode_verify_key_base64(verify_key(server))}},
            "valid_until_ts": 1 << 42,
        }
        return dict(sign_json(body, server, signing_key(server)))


class JoinTimes(NamedTuple):
    """Milliseconds of a join, of the first sync after it, and of sends before and in the fill."""

    joined: float
    sync: float
    completion: float = 0.0
    idle: tuple[float, ...] = ()
    sends: tuple[float, ...] = ()


async def run(bench: Bench) -> None:
    """Join by both answers in turns."""
    built = build_room(bench.size(MEMBERS, 300))
    small = build_room(10, seed=2)
    gc.collect()
    gc.freeze()  # keep the benchmark's own rooms out of garbage collection
    found: dict[str, list[JoinTimes]] = {name: [] for name in built.answers}
    for _ in range(bench.size(5, 2)):
        for name, times in found.items():
            times.append(await _joined(bench, small, built, name))
    bench.results.update(members=bench.size(MEMBERS, 300), servers=SERVERS, goal_ms=GOAL_MS)
    for name, times in found.items():
        bench.results[name] = {
            "until_first_sync_ms": spread([one.joined + one.sync for one in times]),
            "join_ms": spread([one.joined for one in times]),
            "first_sync_ms": spread([one.sync for one in times]),
        }
    fills = found["members omitted"]
    bench.results["members omitted"] |= {
        "completion_ms": spread([one.completion for one in fills]),
        "send_before_ms": percentiles([ms for one in fills for ms in one.idle]),
        "send_in_the_fill_ms": percentiles([ms for one in fills for ms in one.sends]),
        "longest_send_ms": spread([max(one.sends) for one in fills]),
    }
    rows = [
        [name, *(bench.results[name][key]["median"] for key in ("until_first_sync_ms", "join_ms"))]
        for name in found
    ]
    show("Join a large room", ["answer", "until the first sync, ms", "join, ms"], rows)
    bench.write()


def build_room(members: int, seed: int = 1) -> BuiltRoom:
    """Return a room with so many members, and the answers to the join of a local user."""
    servers = tuple(f"s{number}.test" for number in range(1, min(SERVERS, members) + 1))
    room = RoomBuilder(VERSION, servers=servers, seed=seed, checked=False)
    room.start(room.user(1), name="A large room")
    for number in range(2, members + 1):
        room.join(room.user(number), displayname=f"User {number}")
    for number in range(MESSAGES):
        room.message(room.user(1 + number * 7 % members))
    join = room.join(USER)
    state = [room.event(one) for one in join.state_before.values()]
    others = [one for one in state if one.type != MEMBER]
    return BuiltRoom(
        room,
        join,
        {
            "whole": _answer(room, join, state),
            "members omitted": _answer(room, join, others)
            | {"members_omitted": True, "servers_in_room": list(servers)},
        },
    )


def _answer(room: RoomBuilder, join: BuiltEvent, state: list[BuiltEvent]) -> Json:
    chain = room.graph.auth_chain([join.event_id, *(one.event_id for one in state)])
    return {
        "state": [one.json for one in state],
        "auth_chain": [room.event(one).json for one in chain],
        "event": join.json,
    }


async def _joined(bench: Bench, small: BuiltRoom, built: BuiltRoom, name: str) -> JoinTimes:
    """Join a room in a new database."""
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(bench.database())
        store = await stack.enter_async_context(
            storage.open(dsn, server_name=SERVER, signing_key=signing_key(SERVER))
        )
        receiver = Receiver(store, MemoryRemote([small, built]))  # type: ignore[arg-type]
        await _join(store, receiver, small, name)
        await receiver.complete(small.room.room_id)
        times = await _join(store, receiver, built, name)
        if name == "whole":
            return times
        return await _filled(store, receiver, built.room.room_id, times)


async def _join(store: Store, receiver: Receiver, built: BuiltRoom, name: str) -> JoinTimes:
    """Join, and let the client sync."""
    lazy = SyncFilter(lazy_load_members=True)
    begin = time.perf_counter()
    result = await receiver.joined(
        built.room.user(1).partition(":")[2], built.join.json, built.answers[name], VERSION
    )
    joined = time.perf_counter()
    answer = await store.sync(USER, filter=lazy)
    end = time.perf_counter()
    assert result.outcome == "joined", result
    [*_, last] = answer.join[built.room.room_id].timeline.events
    assert last.event_id == built.join.event_id
    return JoinTimes((joined - begin) * 1000, (end - joined) * 1000)


async def _filled(store: Store, receiver: Receiver, room_id: RoomId, times: JoinTimes) -> JoinTimes:
    """Complete the room while a local user sends."""
    idle = [await _send(store, room_id) for _ in range(20)]
    begin = time.perf_counter()
    task = asyncio.create_task(receiver.complete(room_id))
    sends = []
    while not task.done():
        sends.append(await _send(store, room_id))
        await asyncio.sleep(PAUSE_S)
    assert await task
    completion = (time.perf_counter() - begin) * 1000
    return times._replace(completion=completion, idle=tuple(idle), sends=tuple(sends))


async def _send(store: Store, room_id: RoomId) -> float:
    begin = time.perf_counter()
    await store.send(room_id, USER, "m.room.message", {"body": "hello", "msgtype": "m.text"})
    return (time.perf_counter() - begin) * 1000
