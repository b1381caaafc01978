"""What tests of plans share: a store, a room of an admin here and a member elsewhere, and rows."""

from typing import Any

from storage import Store
from storage.persist.load.on_demand import load
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.results import AppendResult
from storage.persist.plan.event import plan_event
from storage.testing import BuiltEvent, RoomBuilder

SERVER = "s1.test"


SQL_ROWS = """
SELECT e.event_id, e.topological_ordering,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.membership, e.outlier, e.backfilled,
    e.soft_failed, e.redacted_form, e.rejected,
    e.ineffective, coalesce(e.after_gap, false) AS after_gap,
        e.state_group_after IS NOT NULL AS changes_state,
    cardinality(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS parents
FROM events e
"""


SQL_MEMBERSHIPS = """
SELECT p.name, m.membership, e.event_id
FROM memberships m JOIN principals p USING (principal_nid)
    LEFT JOIN events e ON e.event_nid = m.event_nid
ORDER BY p.name
"""


async def fetch(store: Store, sql: str) -> list[tuple[Any, ...]]:
    async with store.database.connection() as conn:
        return [tuple(row) for row in await conn._driver.fetch(sql)]


async def rows(store: Store) -> dict[str, dict[str, Any]]:
    async with store.database.connection() as conn:
        return {row["event_id"]: dict(row) for row in await conn._driver.fetch(SQL_ROWS)}


async def take(store: Store, *events: BuiltEvent, **how: Any) -> list[AppendResult]:
    return await store.append([event.pdu for event in events], room_version="11", **how)


def begun() -> tuple[RoomBuilder, str, str]:
    """Return a room of an admin here and a member elsewhere."""
    room = RoomBuilder("11", seed=1, sign=False)
    admin, other = room.user(1, SERVER), room.user(2, "s2.test")
    room.start(admin)
    room.join(other)
    return room, admin, other


async def planned(store: Store, change_set: ChangeSet, incoming: IncomingEvent) -> AppendResult:
    """Plan an event that is not written."""
    async with store.database.connection() as conn:
        while True:
            try:
                return plan_event(change_set, incoming)
            except MissingData as needs:
                await load(conn, change_set, needs)
