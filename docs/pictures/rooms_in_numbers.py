"""The picture of `examples/rooms_in_numbers.ipynb`: `python -m docs.pictures.rooms_in_numbers`.

The rooms are generated. Their events are spread over ten weeks, more in the later ones, and each
server has a lag of its own.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Final

import asyncpg

import storage
from storage.database.embedded import embedded_postgres
from storage.pipeline import mirror
from storage.testing import SHAPES, generate_room
from tests.pipeline import notebook

PICTURE: Final = Path(__file__).parent / "rooms-in-numbers.png"
ROOMS: Final = 6
EVENTS: Final = 500
SPREAD: Final = """
UPDATE events e
SET received_ts = 1735689600000 + (6048000000 * sqrt(
        (e.event_nid % 500 + random() * 9)::float / 510))::bigint
"""
LAGS: Final = """
UPDATE events e
SET origin_server_ts = e.received_ts - (
    900 * (abs(hashtext(split_part(p.name, ':', 2))) % 4) + 400 - 300 * ln(random()))::bigint
FROM principals p
WHERE p.principal_nid = e.sender_nid
"""


async def fill(dsn: str) -> None:
    """Store the rooms."""
    async with storage.open(dsn, server_name="s1.test", migrate=True) as store:
        for seed in range(ROOMS):
            room = generate_room(SHAPES["small_chat"], EVENTS, seed=seed, sign=False)
            await store.append(room.pdus, room_version=room.room_version)
    connection = await asyncpg.connect(dsn)
    await connection.execute("SELECT setseed(0.5)")
    await connection.execute(SPREAD)
    await connection.execute(LAGS)
    await connection.close()


async def draw() -> None:
    """Fill a store, mirror it, run the notebook, and save its picture."""
    with tempfile.TemporaryDirectory(prefix="room-storage-picture-") as folder:
        async with embedded_postgres(Path(folder) / "data") as dsn:
            await fill(dsn)
            mirror(None, dsn, f"{folder}/mirror", ("events",), once=True)
        os.environ["MIRROR"] = f"{folder}/mirror"
        notebook.run()["figure"].savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    asyncio.run(draw())
