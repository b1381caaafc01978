"""Load what a decision lacks: one statement per kind of thing, whatever the number of keys.

The rows go where the views of `storage.persist.model` look for them. A row that does not
exist is remembered as absent, for the current batch only.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.persist.load import events, lookups
from storage.persist.load.chain_ancestors import load_closures
from storage.persist.load.lookups import LOOKUPS, load_transactions
from storage.persist.load.prefetch import BatchRequest, load_batch
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import RoomRow
from storage.state.groups import read_groups
from storage.visibility import multirange

SQL_ROOMS: Final[LiteralString] = """
SELECT room_nid, room_id, room_version, write_version, next_audience, current_state_group,
    max_topological_ordering, forward_extremities,
    current_audience, out_of_range::text AS out_of_range, removals, is_partial,
    in_order_ts
FROM rooms
WHERE room_id = ANY($1::text[])
"""


class KnownRoomRow(NamedTuple):
    """A row of `rooms`."""

    room_nid: int
    room_id: str
    room_version: str
    write_version: int
    next_audience: int
    current_state_group: int | None
    max_topological_ordering: int
    forward_extremities: list[int]
    current_audience: int
    out_of_range: str
    removals: int
    is_partial: bool
    in_order_ts: int


async def load(conn: Connection, change_set: ChangeSet, needs: MissingData) -> None:
    """Load what a decision lacks."""
    await LOADERS[needs.kind](conn, change_set, needs.keys)


def tells_of(needs: MissingData, change_set: ChangeSet) -> bool:
    """Return whether the database has this while the caches are ahead by a change set."""
    if needs.kind == "questions":
        return False
    if needs.kind == "past":
        changed = {key[:2] for key in change_set.visibility.new_past}
        return all(key[:2] not in changed for key in needs.keys if isinstance(key, tuple))
    if needs.kind == "events":
        return change_set.events.new_events.keys().isdisjoint(needs.keys)
    gaps = (
        change_set.events.new_missing
        or change_set.events.deleted_missing
        or change_set.events.new_waiting
        or change_set.events.deleted_waiting
    )
    if needs.kind == "batch":
        requests = [request for request in needs.keys if isinstance(request, BatchRequest)]
        return all(
            change_set.events.new_events.keys().isdisjoint(request.contents)
            and not (request.events and gaps)
            for request in requests
        )
    return not (needs.kind in ("event_ids", "cited", "gap_nids") and gaps)


async def _batch(conn: Connection, change_set: ChangeSet, keys: Collection[BatchRequest]) -> None:
    for lacking in keys:
        await load_batch(conn, change_set, lacking)


async def _groups(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    change_set.states.groups.update(await read_groups(conn, keys))


async def _rooms(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    for key in keys:
        change_set.rooms.rows.setdefault(key, None)
    for row in await conn.fetch(SQL_ROOMS, list(keys), row=KnownRoomRow):
        out_of_range = multirange.from_text(row.out_of_range)
        change_set.rooms.rows[row.room_id] = RoomRow(
            *row[:7],
            tuple(row.forward_extremities),
            row.current_audience,
            out_of_range,
            row.removals,
            row.is_partial,
            row.in_order_ts,
        )


async def _questions(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[Any, ...]]
) -> None:
    for question in keys:
        change_set.answers.results[question] = await LOOKUPS[question[0]](
            conn, change_set, *question[1:]
        )


LOADERS: Final[dict[str, Callable[[Connection, ChangeSet, Any], Awaitable[None]]]] = {
    "nids": lookups.load_nids,
    "batch": _batch,
    "event_ids": events.load_event_ids,
    "event_nids": events.load_event_nids,
    "gap_nids": events.load_gap_nids,
    "events": events.load_events,
    "cited": events.load_cited,
    "standing": events.load_ancestors,
    "groups": _groups,
    "rooms": _rooms,
    "types": lookups.load_types,
    "type_names": lookups.load_type_names,
    "state_keys": lookups.load_state_keys,
    "state_key_names": lookups.load_state_key_names,
    "principals": lookups.load_principals,
    "visibility": events.load_visibility,
    "past": events.load_past,
    "audiences": events.load_audiences,
    "places": events.load_chain_positions,
    "chains": events.load_chains,
    "closures": load_closures,
    "questions": _questions,
    "transactions": load_transactions,
}
