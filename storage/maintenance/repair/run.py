"""Run the parts of a repair, in the order of their dependencies."""

import logging
from functools import partial
from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.database.sql_template import fill
from storage.errors import PermissionRefused, StorageCorrupt
from storage.maintenance.indexes import prove_indexes
from storage.maintenance.repair.chain_cover import rebuild_cover
from storage.maintenance.repair.current import (
    repair_current,
    repair_member_positions,
    repair_state_tables,
)
from storage.maintenance.repair.damaged import (
    damaged_events,
    repair_after_gaps,
    repair_group_facts,
)
from storage.maintenance.repair.deltas import repair_deltas
from storage.maintenance.repair.doubled import drop_doubled
from storage.maintenance.repair.graph import repair_extremities, repair_gaps, repair_reorderings
from storage.maintenance.repair.reauthorise import (
    RemovedEvents,
    append_again,
    drop_groups,
    take_out,
)
from storage.maintenance.repair.redactions import repair_redactions
from storage.maintenance.repair.relations import repair_relations
from storage.maintenance.repair.replay import replay
from storage.maintenance.repair.room_planner import RepairPlanner
from storage.maintenance.repair.time_order import repair_time_order
from storage.maintenance.repair.verdicts import repair_superseded
from storage.maintenance.room_events import PART_ROOM_EVENTS
from storage.maintenance.room_states import RoomStates
from storage.maintenance.verify.version import read_room
from storage.observability.progress import Report, silent
from storage.persist.room_lock import lock_room
from storage.streams.caches import CURRENT_STATE
from storage.streams.invalidate_caches import invalidate_caches, register_writer

logger: logging.Logger = logging.getLogger(__name__)

TEMPLATE_NAMELESS: Final[LiteralString] = """
SELECT DISTINCT e.state_key_nid
FROM {events} AS e
LEFT JOIN LATERAL (
    SELECT true AS is_named FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k ON true
WHERE e.state_key_nid IS NOT NULL AND k.is_named IS NULL
"""

SQL_NAMELESS: Final[LiteralString] = fill(
    TEMPLATE_NAMELESS,
    events=PART_ROOM_EVENTS,
)


async def repair(
    database: Database,
    room_id: str,
    *,
    server_name: str,
    indexes_proven: bool = False,
    report: Report = silent,
) -> None:
    """Rebuild everything that follows from a room's events and their states, in one transaction.

    Events whose columns, positions, states or auth results are wrong are appended again first
    (`storage.maintenance.repair.reauthorise`). Writers of the room wait meanwhile. ``server_name``:
    its users are local. ``indexes_proven``: the caller has called `prove_indexes`.

    Raise `UnknownRoom`. Raise `StorageCorrupt` if an index is corrupt, a state key has lost its
    row, or required states cannot be read: nothing has changed then.
    """

    async def work(conn: Connection, *, reauthorise: bool = True) -> None:
        room_nid = await lock_room(conn, room_id)
        room = await read_room(conn, room_id, server_name)
        await _check_names(conn, room_nid)
        await repair_group_facts(conn, room)
        again = await drop_doubled(conn, room_nid) | await damaged_events(conn, room)
        taken = await take_out(conn, room, again) if reauthorise else RemovedEvents()
        await rebuild_cover(conn, room_nid)
        await repair_reorderings(conn, room_nid)
        await repair_time_order(conn, room_nid)
        await repair_gaps(conn, room)
        await repair_redactions(conn, room)
        await repair_relations(conn, room)
        ends = await repair_extremities(conn, room_nid)
        planner = await RepairPlanner.of(conn, room_id, server_name, room.states)
        await repair_current(conn, planner, room.states, ends)
        await repair_state_tables(conn, room_nid, server_name)
        if taken:
            await drop_groups(conn, room_nid)
        await replay(conn, room_id, server_name, RoomStates(), report=report)
        if taken:
            await append_again(
                conn, taken, server_name, extremities_max=database.config.forward_extremities_max
            )
            await invalidate_caches(conn, "events")
        await repair_superseded(conn, room_nid)
        await repair_after_gaps(conn, room_nid)
        await repair_deltas(conn, await read_room(conn, room_id, server_name))
        await repair_member_positions(conn, room_nid)
        await invalidate_caches(conn)

    if not indexes_proven:
        await prove_indexes(database, "a repair", report=report)
    await register_writer(database)
    try:
        await database.run(work)
    except (PermissionRefused, StorageCorrupt):
        logger.warning(
            "events of a room cannot be appended again, the rest is repaired",
            exc_info=True,
            extra={"room_id": room_id},
        )
        await database.run(partial(work, reauthorise=False))


async def rebuild_visibility(
    database: Database, room_id: str, *, server_name: str, report: Report = silent
) -> None:
    """Rebuild the visibility table and the audiences of a room from its states, in one transaction.

    A fact of the stream "caches" names the room. Raise `UnknownRoom`, or `StorageCorrupt` if an
    index is corrupt: nothing has changed then.
    """

    async def work(conn: Connection) -> None:
        await lock_room(conn, room_id)
        await replay(conn, room_id, server_name, RoomStates(), report=report)
        await invalidate_caches(conn, CURRENT_STATE, [room_id])

    await prove_indexes(database, "a rebuild of visibility", report=report)
    await register_writer(database)
    await database.run(work)


async def _check_names(conn: Connection, room_nid: int) -> None:
    """Raise `StorageCorrupt` if rows of state keys are lost.

    Everything that a repair derives from the states would be wrong.
    """
    if nameless := await conn.fetchvals(SQL_NAMELESS, room_nid):
        raise StorageCorrupt(
            "state keys without a row in state_keys: restore these rows", state_key_nids=nameless
        )
