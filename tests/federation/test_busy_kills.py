"""Two servers in a busy room are killed: what they have acknowledged reaches both, unasked.

`STORAGE_EXAMPLES` is the number of kills, and `STORAGE_SEED` the first of their seeds.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from storage import EventId, RoomId
from tests.federation.busy_process import busy_room
from tests.federation.partial_process import Forks, forks
from tests.federation.peers import Homeserver, start
from tests.federation.rooms import shared_room
from tests.maintenance.rooms import findings

KILLS: Final = int(os.environ.get("STORAGE_EXAMPLES", "2"))
FIRST: Final = int(os.environ.get("STORAGE_SEED", "0"))
KILLS_EACH: Final = 5
STATEMENTS: Final = (100, 1_500)
EXCHANGES: Final = 100


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks("tests.federation.busy_process") as started:
        yield started


async def lacking(server: Homeserver, ids: list[EventId]) -> list[EventId]:
    stored = await server.store.events(ids)
    return [one for one in ids if one not in stored or stored[one].outlier]


async def arrived(dsns: list[str], room_id: RoomId, ids: list[EventId]) -> int:
    """Exchange messages until both servers have these events; return how often that was."""
    async with busy_room(dsns, room_id) as room:
        for number in range(1, EXCHANGES):
            await room.exchange()
            if not any([await lacking(server, ids) for server in room.servers]):
                return number
        raise AssertionError([await lacking(server, ids) for server in room.servers])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(FIRST, FIRST + KILLS, KILLS_EACH))
async def test_what_was_acknowledged_reaches_both_servers(
    first: int,
    dsn: str,
    another_dsn: str,
    processes: Forks,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    dsns, path = [dsn, another_dsn], tmp_path / "acknowledged"
    async with AsyncExitStack() as stack:
        room_id = await shared_room(*await start(stack, dsns))
    for seed in range(first, min(first + KILLS_EACH, FIRST + KILLS)):
        number = random.Random(seed).randint(*STATEMENTS)
        code = await asyncio.to_thread(processes.run, dsns, room_id, seed, number, str(path))
        assert code == -signal.SIGKILL
        ids = [EventId(one) for one in path.read_text("ascii").splitlines()]
        exchanges = await arrived(dsns, room_id, ids)
        record_property(f"kill {seed}", f"{len(ids)} acknowledged so far, {exchanges} exchanges")
    async with AsyncExitStack() as stack:
        servers = await start(stack, dsns)
        states = [await server.store.current_state(room_id) for server in servers]
        assert states[0] == states[1]
        for server in servers:
            assert await findings(server.store) == []
