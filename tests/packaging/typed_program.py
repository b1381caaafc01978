"""A program of a user, as strict type checkers see the wheel. `test_types.py` checks it.

It uses the public interface widely, and is not run.
"""

import asyncio
from collections.abc import Mapping

import storage
from storage import (
    AppendResult,
    AuthDenied,
    Config,
    DatabaseUnavailable,
    EventFilter,
    EventId,
    ExtraMissing,
    InputError,
    Page,
    ResyncNeeded,
    RoomId,
    StateUnknown,
    StorageError,
    Store,
    StoredEvent,
    Sync,
    SyncFilter,
    UserId,
)
from storage.replication import Client, Handlers, Hub, ReplicationPeer, Server

CONFIG = Config(statement_timeout_ms=5_000, synchronous_commit="on")


def outcome(result: AppendResult) -> str:
    if result.outcome == "missing_parents":
        return ", ".join(result.missing)
    return result.reason or result.outcome


async def write(store: Store, pdus: list[bytes]) -> list[EventId]:
    results = await store.append(pdus, origin="backfill", verify_keys={})
    print([outcome(one) for one in results])
    return [one.event_id for one in results if one.event_id is not None]


async def client(store: Store, user: UserId, since: str | None) -> str:
    answer: Sync = await store.sync(
        user, since=since, timeout_ms=10, filter=SyncFilter(timeline=EventFilter(types=["m.x"]))
    )
    for room_id, room in answer.join.items():
        bodies: list[object] = [event.content.get("body") for event in room.timeline.events]
        print(room_id, bodies, room.timeline.limited, room.state_after[:1])
    return answer.next_batch


async def pages(store: Store, room: RoomId, user: UserId) -> list[StoredEvent]:
    page: Page = await store.messages(room, user, direction="b", limit=20)
    found = list(page.chunk)
    if page.end is not None:
        found += (await store.messages(room, user, from_=page.end)).chunk
    for gap in page.gaps:
        print(gap)
    context = await store.context(found[0].event_id, user)
    print(context.event.sender.upper(), context.end)
    return found


async def state(store: Store, room: RoomId, event: EventId) -> Mapping[tuple[str, str], EventId]:
    try:
        return await store.state_before(event)
    except StateUnknown as error:
        print(error.event_id)
    return await store.current_state(room)


async def federation(store: Store, room: RoomId, event: EventId) -> int:
    known = await store.backfill(room, [event], 10, server_name="s2.test")
    missing = await store.missing_events(room, [], [event], limit=5)
    chain: set[EventId] = await store.auth_chain_ids([event])
    return len(known) + len(missing) + len(chain) + len((await store.state_ids(event)).state_ids)


async def replicate(store: Store) -> None:
    handlers = Handlers()
    async with (
        Server(store, handlers=handlers) as server,
        Client(store, "127.0.0.1", 9092) as worker,
        ReplicationPeer(store, Hub().join(store.instance_name)),
    ):
        await server.serve(port=0)
        await worker.connected()
        print(store.streams["events"].current(), server.address)


def pure(pdu: bytes) -> str:
    event = storage.event.parse(pdu, "11")
    keys: set[tuple[str, str]] = set(storage.auth.keys_needed(event))
    return f"{event.event_id} {event.depth + 1} {len(keys)} {storage.__version__.upper()}"


def advice(error: StorageError) -> str:
    match error:
        case AuthDenied():
            return error.rule.upper()
        case ExtraMissing():
            return error.extra.upper()
        case ResyncNeeded() | DatabaseUnavailable():
            return str(error)
        case InputError():
            return "refused"
        case _:
            return "failed"


async def main() -> None:
    async with storage.open(
        "postgresql://rooms", server_name="s1.test", config=CONFIG, migrate=True
    ) as store:
        room, user = RoomId("!room:s1.test"), UserId("@alice:s1.test")
        try:
            ids = await write(store, [b"{}"])
            await client(store, user, None)
            print(await pages(store, room, user), await state(store, room, ids[0]))
            print(await federation(store, room, ids[0]), pure(b"{}"))
            await replicate(store)
        except StorageError as error:
            print(advice(error))


asyncio.run(main())
