"""The longest time for which one request stops the event loop, for the largest requests.

Other clients and servers choose the sizes: lists of ids, members, invites, keys, values of JSON.
Nothing else of the process runs between two turns of the loop. So the longest CPU time between two
turns is the longest delay of all other requests.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

from signedjson.key import encode_verify_key_base64
from signedjson.sign import sign_json

import storage
from benchmarks.harness import Bench, Heartbeat, note
from storage import EventId, RoomId, ServerName, Store, responses
from storage.federation import Receiver, Remote, RemoteError, Responder
from storage.federation.keys import read_server_keys
from storage.testing import KEY_ID, RoomBuilder, signing_key, verify_key

SERVER: Final = "s1.test"
ADMIN: Final = f"@admin:{SERVER}"
VERSION: Final = "11"
LISTS: Final = 20_000  # empty lists in an event: about 60,000 bytes
PAGE: Final = 100

Json = dict[str, Any]
Case = Callable[[], Awaitable[Any]]


async def run(bench: Bench) -> None:
    """Measure all cases."""
    async with opened(bench) as store:
        await _pages(bench, store)
        await _batches(bench, store)
        await _ids(bench, store)
        await _members(bench, store)
        await _keys(bench)
    async with opened(bench) as store:
        await _invites(bench, store)
    async with opened(bench) as store:
        await _rooms(bench, store)
    async with opened(bench) as store:
        await _spaces(bench, store)


@asynccontextmanager
async def opened(bench: Bench) -> AsyncIterator[Store]:
    """Open a store on a database of its own."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        yield store


async def measure(bench: Bench, name: str, case: Case) -> Any:
    """Run a case, and note its longest work at once. A result is freed afterwards."""
    gc.collect()
    gc.freeze()
    async with Heartbeat() as heart:
        found = await case()
    bench.results[f"{name}, ms"] = heart.longest_ms
    note(f"{name}: {heart.longest_ms} ms")
    return found


def _room(seed: int, **how: Any) -> RoomBuilder:
    room = RoomBuilder(VERSION, seed=seed, sign=False, **how)
    room.start(ADMIN)
    return room


def _lists(room: RoomBuilder, number: int) -> None:
    for _ in range(number):
        room.send(ADMIN, "m.room.message", {"body": "lists", "a": [[]] * LISTS})


async def _pages(bench: Bench, store: Store) -> None:
    room = _room(1)
    _lists(room, bench.size(PAGE, 10))
    await measure(
        bench,
        "append, 100 messages of 20,000 lists",
        lambda: store.append(room.pdus, room_version=VERSION),
    )
    room_id = RoomId(room.room_id)

    async def page() -> Any:
        found = await store.messages(room_id, ADMIN, limit=PAGE)
        return found, await store.client_events(ADMIN, found.chunk)

    await measure(bench, "a page of 100 messages of 20,000 lists", page)

    async def around() -> Any:
        middle = room.events[len(room.events) // 2].event_id
        found = await store.context(middle, ADMIN, limit=PAGE)
        shown = [*found.events_before, found.event, *found.events_after]
        return found, await store.client_events(ADMIN, shown)

    await measure(bench, "a context of them", around)

    async def synced() -> Any:
        found = await store.sync(ADMIN, timeline_limit=PAGE)
        return found, await responses.sync(store, ADMIN, found)

    await measure(bench, "a first sync of them", synced)


async def _batches(bench: Bench, store: Store) -> None:
    room = _room(2)
    for number in range(bench.size(10_000, 1_000)):
        room.join(f"@u{number}:s2.test")
    await measure(
        bench, "append, 10,000 joins", lambda: store.append(room.pdus, room_version=VERSION)
    )
    await measure(bench, "the same again", lambda: store.append(room.pdus, room_version=VERSION))


async def _ids(bench: Bench, store: Store) -> None:
    room = _room(3)
    await store.append(room.pdus, room_version=VERSION)
    size = bench.size(100_000, 10_000)
    room_id, ids = RoomId(room.room_id), [EventId(f"${number:043}") for number in range(size)]
    rooms = [f"!{number:018}:s2.test" for number in range(size)]
    cases: dict[str, Case] = {
        "missing_events": lambda: store.missing_events(room_id, ids, ids[:10]),
        "events": lambda: store.events(ids),
        "rooms": lambda: store.rooms(rooms),
        "auth_chain_ids": lambda: _refused(store.auth_chain_ids(ids)),
        "aggregations": lambda: store.aggregations(ADMIN, ids),
        "visible_to_user": lambda: store.visible_to_user(ADMIN, ids),
        "gap_failed": lambda: store.gap_failed(room_id, ids, "lost"),
        "backfill": lambda: store.backfill(room_id, ids, 10),
        "states_before": lambda: _refused(store.states_before(ids)),
    }
    for name, case in cases.items():
        await measure(bench, f"{name}, 100,000 ids", case)


async def _keys(bench: Bench) -> None:
    server = ServerName("s2.test")
    key = {"key": encode_verify_key_base64(verify_key(server)), "expired_ts": 7}
    size = bench.size(100_000, 10_000)
    body = sign_json(
        {
            "server_name": server,
            "verify_keys": {KEY_ID: key},
            "old_verify_keys": {f"ed25519:{number}": key for number in range(size)},
            "valid_until_ts": 4_000_000_000_000,
        },
        server,
        signing_key(server),
    )

    async def read() -> None:
        with suppress(RemoteError):
            read_server_keys(server, body, 0)

    await measure(bench, "a response with 100,000 old keys", read)


async def _refused(call: Awaitable[Any]) -> None:
    try:
        await call
    except storage.StorageError:
        return


async def _members(bench: Bench, store: Store) -> None:
    room = _room(4, exact=False)
    for number in range(bench.size(20_000, 2_000)):
        room.join(f"@u{number}:s{number % 500 + 2}.test")
    last = room.message(ADMIN, "hello")
    await store.append(room.pdus, room_version=VERSION)
    room_id, last_id = RoomId(room.room_id), last.event_id
    cases: dict[str, Case] = {
        "state_ids": lambda: store.state_ids(last_id),
        "state_before": lambda: store.state_before(last_id),
        "current_state": lambda: store.current_state(room_id),
        "members": lambda: store.members(room_id),
        "member_ids": lambda: store.member_ids(room_id),
        "event_auth": lambda: store.event_auth(last_id),
        "users_sharing": lambda: store.users_sharing(ADMIN),
        "joined_servers": lambda: store.joined_servers(room_id),
    }
    for name, case in cases.items():
        await measure(bench, f"{name}, 20,000 members", case)
        await measure(bench, f"{name} again, 20,000 members", case)

    responder = Responder(Receiver(store, cast("Remote", None)))
    await measure(
        bench, "/state for a server, 20,000", lambda: responder.state("s2.test", room_id, last_id)
    )

    async def listed() -> Any:
        found = await store.members(room_id)
        return found, await store.client_events(ADMIN, found, as_state=True)

    await measure(bench, "members for a client, 20,000", listed)

    async def state_for_client() -> Any:
        found = await store.events((await store.current_state(room_id)).values())
        return found, await store.client_events(ADMIN, found.values(), as_state=True)

    await measure(bench, "state for a client, 20,000", state_for_client)

    await measure(bench, "first sync, 20,000 members", lambda: _synced(store))


async def _synced(store: Store) -> Any:
    found = await store.sync(ADMIN)
    return found, await responses.sync(store, ADMIN, found)


async def _invites(bench: Bench, store: Store) -> None:
    size = bench.size(10_000, 500)
    for at in range(0, size, 100):
        await asyncio.gather(*(_invite(store, at + number) for number in range(100)))
    found = await measure(bench, "first sync, 10,000 invites", lambda: store.sync(ADMIN))
    await measure(
        bench, "its response, 10,000 invites", lambda: responses.sync(store, ADMIN, found)
    )
    await _sliding(bench, store, "10,000 invites", size)
    await measure(bench, "memberships_of", lambda: store.memberships_of(ADMIN, ("invite",)))


async def _sliding(bench: Bench, store: Store, what: str, size: int) -> None:
    """Measure the first hundred rooms of a list, and all."""
    for name, most in (("100 of", 99), ("all", size)):
        listed = storage.SlidingList(
            ranges=[(0, most)], timeline_limit=1, required_state=[("m.room.create", "")]
        )
        wanted = storage.SlidingSyncRequest(lists={"all": listed})

        async def read(wanted: Any = wanted, device_id: str = name) -> Any:
            found = await store.sliding_sync(ADMIN, wanted, device_id=device_id)
            return found, await responses.sliding_sync(store, ADMIN, wanted, found)

        await measure(bench, f"sliding sync, {name} {what}", read)


async def _rooms(bench: Bench, store: Store) -> None:
    size = bench.size(10_000, 500)
    pdus: list[bytes] = []
    for number in range(size):
        room = RoomBuilder(VERSION, seed=number, sign=False)
        room.create(ADMIN)
        room.join(ADMIN)
        pdus += room.pdus
    await measure(bench, "append, 10,000 new rooms", lambda: store.append(pdus))
    await measure(bench, "first sync, 10,000 rooms", lambda: _synced(store))
    await _sliding(bench, store, "10,000 rooms", size)


async def _invite(store: Store, number: int) -> None:
    sender = "@a:s2.test"
    room = RoomBuilder(VERSION, seed=number, sign=False)
    room.start(sender)
    invite = room.invite(sender, ADMIN)
    shown = [
        {"type": "m.room.name", "state_key": "", "sender": sender, "content": {"name": f"{number}"}}
    ]
    await store.append(
        [invite.pdu],
        room_version=VERSION,
        origin="out_of_band",
        stripped_state={invite.event_id: shown},
    )


async def _spaces(bench: Bench, store: Store) -> None:
    space = RoomBuilder(VERSION, seed=1, sign=False)
    space.start(ADMIN, content={"type": "m.space"})
    for number in range(bench.size(5_000, 200)):
        space.state_event(
            ADMIN, "m.space.child", {"via": ["s2.test"]}, state_key=f"!{number}:s2.test"
        )
    await store.append(space.pdus, room_version=VERSION)
    await measure(
        bench,
        "hierarchy, 5,000 children",
        lambda: responses.hierarchy(store, ADMIN, RoomId(space.room_id), limit=5),
    )
