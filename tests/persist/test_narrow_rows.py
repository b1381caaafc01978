"""Nearly all rows of state groups and chain positions are narrow."""

from typing import Final

import storage
from storage import Store
from storage.rebuild import Rebuilder
from storage.testing import SHAPES, generate_room
from tests.maintenance.rooms import SERVER, deliver, findings

SQL_FORMS: Final = """
SELECT
    (SELECT count(path) FROM state_groups) AS paths,
    (SELECT count(back) FROM state_groups) AS arrays,
    (SELECT count(*) FROM state_groups WHERE digest IS NULL) AS without_digest,
    (SELECT count(*) FROM state_groups WHERE event_nid IS NOT NULL) AS single,
    (SELECT count(*) FROM auth_chains WHERE chain_nid > 0) AS numbered,
    (SELECT count(*) FROM auth_chains WHERE chain_nid IS NULL) AS first_events,
    (SELECT count(link_1) FROM auth_chains) AS inline_links,
    (SELECT count(*) FROM auth_chain_links) AS links
"""
NARROW: Final = ("paths", "without_digest", "single", "first_events", "inline_links")


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


async def forms(store: Store) -> dict[str, int]:
    async with store.database.connection() as conn:
        return dict(await conn._driver.fetchrow(SQL_FORMS))


async def test_the_rows_of_a_room_are_narrow(dsn: str) -> None:
    """Verification compares each digest, path and link with its own; a rebuild writes the same."""
    room = generate_room(SHAPES["fork_heavy"], 120, seed=3, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, room)
        found = await forms(store)
        assert all(found[name] > 0 for name in NARROW)
        assert found["arrays"] == found["numbered"] == 0
        assert await findings(store) == []
        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            assert (await rebuilder.rebuild(room.room_id)).events == 0
        assert await forms(store) == found
