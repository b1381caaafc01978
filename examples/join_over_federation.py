"""An invite, a join, a gap and a backfill between two servers, with signed events as bytes.

Each server has a store in a database of its own. Give two empty databases, or none: then two
embedded servers run in a temporary folder:

    python join_over_federation.py [DSN_OF_A DSN_OF_B]
"""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import local_events
import orjson
from signedjson.key import generate_signing_key, get_verify_key
from signedjson.types import SigningKey, VerifyKey

import storage
from storage import EventId, RoomId, Store, event
from storage.database.embedded import embedded_postgres

ALICE, BOB = "@alice:a.test", "@bob:b.test"
VERSION = "12"
Keys = Mapping[tuple[str, str], VerifyKey]


@dataclass(frozen=True)
class Homeserver:
    """One server: its store, its key, and what it answers to other servers."""

    name: str
    store: Store
    key: SigningKey

    async def raw(self, event_ids: set[EventId]) -> list[bytes]:
        """Return events as bytes."""
        return [one.raw for one in (await self.store.events(event_ids)).values()]

    async def make_join(self, room_id: RoomId, user_id: str) -> bytes:
        """Return the template of a join, for the other server to sign."""
        content = {"membership": "join"}
        template, _ = await local_events.draft(
            self.store, room_id, user_id, "m.room.member", content, state_key=user_id
        )
        return orjson.dumps(template)

    async def send_join(self, join: bytes, keys: Keys) -> tuple[list[bytes], list[bytes]]:
        """Store a signed join. Return the state before it, and the auth chain of that state."""
        [result] = await self.store.append([join], verify_keys=keys)
        assert result.event_id is not None
        assert result.outcome in ("stored", "duplicate"), result.reason
        ids = await self.store.state_ids(result.event_id)
        return await self.raw(set(ids.state_ids)), await self.raw(set(ids.auth_chain_ids))

    async def send(self, room_id: RoomId, sender: str, body: str) -> bytes:
        """Store a message of a local user. Return it as the other servers get it."""
        content = {"msgtype": "m.text", "body": body}
        event_id = await local_events.send(
            self.store, room_id, sender, "m.room.message", content, key=self.key
        )
        [raw] = await self.raw({event_id})
        return raw


async def invite(a: Homeserver, b: Homeserver, room_id: RoomId, keys: Keys) -> None:
    """Invite Bob: A builds and signs the event, B signs it as well and stores it out of band."""
    content = {"membership": "invite"}
    pdu, _ = await local_events.draft(
        a.store, room_id, ALICE, "m.room.member", content, state_key=BOB
    )
    signed = event.sign(event.sign(pdu, VERSION, a.name, a.key), VERSION, b.name, b.key)
    name = {"type": "m.room.name", "state_key": "", "sender": ALICE, "content": {"name": "Pantry"}}
    shown = {EventId(event.event_id(signed, VERSION)): [name]}
    [result] = await b.store.append(
        [orjson.dumps(signed)],
        room_version=VERSION,
        origin="out_of_band",
        stripped_state=shown,
        verify_keys=keys,
    )
    print("B stores the invite:", result.outcome)
    await local_events.stored(a.store, signed, VERSION)  # it is part of the room on A only
    print("B's /sync:", (await b.store.sync(BOB)).invite[room_id].invite_state[0]["content"])


async def join(a: Homeserver, b: Homeserver, room_id: RoomId, keys: Keys) -> None:
    """Join Bob: B signs A's template, A stores it, B stores the state before it, then the join."""
    template = orjson.loads(await a.make_join(room_id, BOB))
    signed = orjson.dumps(event.sign(template, VERSION, b.name, b.key))
    state, auth_chain = await a.send_join(signed, keys)
    await b.store.append(
        [*auth_chain, *state], room_version=VERSION, origin="outlier", verify_keys=keys
    )
    join_id = EventId(event.event_id(orjson.loads(signed), VERSION))
    before = [EventId(event.event_id(orjson.loads(one), VERSION)) for one in state]
    [result] = await b.store.append(
        [signed], room_version=VERSION, state_before={join_id: before}, verify_keys=keys
    )
    print("B stores the join:", result.outcome)


async def fill_gap(
    a: Homeserver, b: Homeserver, room_id: RoomId, latest: bytes, keys: Keys
) -> None:
    """Give B an event whose parents it lacks. It requests them."""
    [result] = await b.store.append([latest], verify_keys=keys)
    print("B receives an event:", result.outcome, len(result.missing))
    assert result.event_id is not None
    earliest = await b.store.forward_extremities(room_id)
    between = await a.store.missing_events(room_id, earliest, [result.event_id], server_name=b.name)
    results = await b.store.append([*(one.raw for one in between), latest], verify_keys=keys)
    print("B stores them:", [one.outcome for one in results])


async def backfill(a: Homeserver, b: Homeserver, room_id: RoomId, keys: Keys) -> None:
    """Page back on B to the gap below its join, and request the history before it."""
    page = await b.store.messages(room_id, BOB, limit=50)
    print("B's page:", len(page.chunk), "events, a gap:", bool(page.gaps))
    [gap] = page.gaps
    history = await a.store.backfill(room_id, gap.backfill_from, 100, server_name=b.name)
    results = await b.store.append(
        [one.raw for one in history], origin="backfill", verify_keys=keys
    )
    print("B stores the history:", {one.outcome for one in results})
    whole = await b.store.messages(room_id, BOB, limit=50)
    print("B's page:", len(whole.chunk), "events, a gap:", bool(whole.gaps))


async def both(a: Homeserver, b: Homeserver) -> None:
    """Run the steps, then compare the states."""
    keys: dict[tuple[str, str], VerifyKey] = {
        (one.name, "ed25519:1"): get_verify_key(one.key) for one in (a, b)
    }
    room_id = await local_events.create_room(a.store, ALICE, key=a.key, version=VERSION)
    await a.send(room_id, ALICE, "before the invite")
    await invite(a, b, room_id, keys)
    await join(a, b, room_id, keys)
    await a.send(room_id, ALICE, "B does not get this one")
    await fill_gap(a, b, room_id, await a.send(room_id, ALICE, "but this one"), keys)
    await backfill(a, b, room_id, keys)
    [result] = await a.store.append([await b.send(room_id, BOB, "hello A")], verify_keys=keys)
    print("A receives a message of B:", result.outcome)
    same = await a.store.current_state(room_id) == await b.store.current_state(room_id)
    print("A and B have the same state:", same)


async def main(dsns: list[str]) -> None:
    """Open both stores."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        servers = []
        for number, name in enumerate(("a.test", "b.test")):
            dsn = (
                dsns[number]
                if dsns
                else await stack.enter_async_context(embedded_postgres(Path(folder, name)))
            )
            opened = storage.open(dsn, server_name=name, migrate=True)
            store = await stack.enter_async_context(opened)
            servers.append(Homeserver(name, store, generate_signing_key("1")))
        await both(*servers)


asyncio.run(main(sys.argv[1:]))
