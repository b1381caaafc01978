"""Random rooms purged at random points: reads of kept events do not change, verify is clean."""

import os
import random
from dataclasses import replace

import pytest

import storage
from storage import Config, Store
from storage.ids import EventId
from storage.maintenance.purge import purge_history
from storage.testing import GeneratedRoom, RoomBuilder, build_room, deliver_late, deliver_with_gap
from storage.testing.world import ODD_SOME, Odd
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.small_limits import purges_in_batches

ROOMS = int(os.environ.get("STORAGE_ROOMS", "12"))
ODD = replace(
    ODD_SOME, false_depth=0.02, rejected=0.04, soft_failed=0.03, early_redaction=0.04, late=0.1
)
CONFIG = Config(purge_pause_ms=0)
small_batches = purges_in_batches(7)


def delivery(seed: int) -> tuple[RoomBuilder, GeneratedRoom]:
    shape = LIVELY.replaced(fork_rate=0.2, fork_depth=4.0, odd=ODD if seed % 2 else Odd())
    room = build_room(shape, 150, seed=seed, version=str(1 + seed % 12), sign=False)
    match seed % 4:
        case 0 | 1:
            return room, deliver_late(room, seed)
        case _:
            start = 10 + seed % 50
            return room, deliver_with_gap(room, start, start + 60)


async def principals(store: Store, room_id: str) -> list[str]:
    """Whose sight is settled."""
    async with store.database.connection() as conn:
        found: list[str] = await conn.fetchvals(
            "SELECT p.name FROM visibility v JOIN principals p USING (principal_nid) "
            "JOIN rooms r USING (room_nid) WHERE r.room_id = $1::text",
            room_id,
        )
    return found


async def told(store: Store, room_id: str, shown: list[str]) -> dict[str, object]:
    """Of each event of the timeline: bytes, states, auth chain, who of these sees it."""
    async with store.database.connection() as conn:
        ids: list[EventId] = await conn.fetchvals(
            "SELECT e.event_id FROM events e JOIN rooms r USING (room_nid) "
            "WHERE r.room_id = $1::text AND NOT e.outlier",
            room_id,
        )
    users = sorted(name for name in shown if name.startswith("@"))
    servers = sorted(name for name in shown if not name.startswith(("@", "*")))
    seen = {user: set(await store.visible_to_user(user, ids)) for user in users}
    seen |= {server: set(await store.visible_to_server(server, ids)) for server in servers}
    answers: dict[str, object] = {}
    for event_id in ids:
        event = await store.event(event_id)
        assert event is not None
        state = await store.state_before(event_id), await store.state_after(event_id)
        answers[event_id] = (
            event,
            state,
            [one.event_id for one in await store.event_auth(event_id)],
            frozenset(name for name, visible in seen.items() if event_id in visible),
        )
    return answers


@pytest.mark.parametrize("seed", range(ROOMS))
async def test_what_is_kept_stays_as_it_was(dsn: str, seed: int) -> None:
    rng = random.Random(seed)
    room, delivered = delivery(seed)
    async with storage.open(dsn, server_name=SERVER, config=CONFIG) as store:
        await deliver(store, delivered, batch=rng.choice([1, 5, 50]))
        clean = await findings(store)
        shown = await principals(store, room.room_id)
        before = await told(store, room.room_id, shown)
        async with store.database.connection() as conn:
            places: list[EventId] = await conn.fetchvals(
                "SELECT event_id FROM events WHERE NOT outlier AND topological_ordering <= "
                "(SELECT max(e.topological_ordering) FROM rooms r "
                "JOIN events e ON e.event_nid = ANY(r.forward_extremities)) "
                "ORDER BY topological_ordering, stream_ordering"
            )
        after = before
        for share in sorted(rng.random() for _ in range(2)):
            point = places[int(len(places) * share)]
            if point not in await told(store, room.room_id, shown):
                continue
            await purge_history(
                store.database,
                room.room_id,
                server_name=SERVER,
                before_event_id=point,
                local=rng.random() < 0.5,
            )
            assert [one for one in await findings(store) if one not in clean] == []
            after = await told(store, room.room_id, shown)
            for event_id, answer in after.items():
                assert answer == before[event_id], event_id
        assert len(after) < len(before)
