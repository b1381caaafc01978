"""Load all that a batch of events needs by one statement (`storage.persist.load.prefetch`).

A small statement is enough if only names are missing. Rows of all kinds come in the same columns
(`storage.persist.load.column_packing`). Each kind has a function that puts them into the change
set. If planning needs more, `storage.persist.load.on_demand` loads it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from storage.codec import decode_recent
from storage.database.connection import Connection
from storage.database.names import (
    KEY_CREATE,
    KEY_HISTORY_VISIBILITY,
    KEY_JOIN_RULES,
    KEY_POWER_LEVELS,
)
from storage.database.placeholders import by_column
from storage.event import load as load_event
from storage.graph.chains import Chain, ChainPosition
from storage.persist.load.column_packing import PackedRow
from storage.persist.load.lookups import keep_rows
from storage.persist.load.prefetch import STANDING, BatchRequest
from storage.persist.load.prefetch_statements import (
    EVENT,
    GAP,
    GROUP,
    LOAD_BATCH,
    LOAD_NAMES,
    NAMES,
    POSITION,
    ROOM,
    SQL_LOAD_BATCH,
    SQL_LOAD_NAMES,
    VISIBLE,
    WAITING,
)
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.nid_blocks import BLOCK_LENGTHS
from storage.persist.model.rows import UNSEEN, EventRow, MissingRow, RoomRow, VisibilityRow
from storage.state.read import groups_of
from storage.state.rows import GroupRow
from storage.visibility import multirange

DECIDING_KEYS: Final = [KEY_CREATE, KEY_POWER_LEVELS, KEY_JOIN_RULES, KEY_HISTORY_VISIBILITY]
"""State keys whose events decide about most others: their contents come with the room."""

UNPACK_ROOM: Final = ROOM.unpacker()
UNPACK_EVENT: Final = EVENT.unpacker()
UNPACK_GAP: Final = GAP.unpacker()
UNPACK_WAITING: Final = WAITING.unpacker()
UNPACK_GROUP: Final = GROUP.unpacker()
UNPACK_POSITION: Final = POSITION.unpacker()
UNPACK_VISIBLE: Final = VISIBLE.unpacker()


async def load_batch(conn: Connection, change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Load what is requested, and remember as absent what does not exist.

    Nothing of it is known before the result is here, while other events are planned.
    """
    if lacking.is_of_names:
        given = LOAD_NAMES.bind({"names": _names(lacking)})
        rows = await conn.fetch(SQL_LOAD_NAMES, *given, row=PackedRow)
    else:
        given = LOAD_BATCH.bind({"names": _names(lacking), "request": _request(lacking)})
        rows = await conn.fetch(SQL_LOAD_BATCH, *given, row=PackedRow)
    _expect(change_set, lacking)
    found: dict[str, list[PackedRow]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    for kind, rows in found.items():
        KEEP[kind](change_set, rows, lacking)
    _absent_names(change_set, lacking)


def _names(lacking: BatchRequest) -> dict[str, Sequence[Any]]:
    nothing: dict[str, Sequence[Any]] = dict.fromkeys(NAMES.types, ())
    blocks = {name: -(-number // BLOCK_LENGTHS[name]) for name, number in lacking.numbers.items()}
    return {
        **nothing,
        "principals": list(lacking.principals),
        "types": list(lacking.types),
        **by_column(("key_types", "state_keys"), lacking.state_keys),
        **by_column(("visible_rooms", "visible_names"), lacking.seen),
        **by_column(("sequences", "blocks"), blocks.items()),
    }


def _request(lacking: BatchRequest) -> dict[str, Sequence[Any]]:
    return {
        "rooms": list(lacking.rooms),
        "events": list(lacking.events),
        "parents": list(lacking.parents),
        "auth": list(lacking.auth),
        "contents": list(lacking.contents),
        "groups": list(lacking.groups),
        "positions": list(lacking.places),
        "deciding_keys": DECIDING_KEYS,
    }


def _expect(change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Remember everything requested as absent, until a row says otherwise."""
    for room_id in lacking.rooms:
        change_set.rooms.known.setdefault(room_id, None)
    for event_id in lacking.events:
        change_set.events.rows.setdefault(event_id, None)
        change_set.events.missing.setdefault(event_id, None)
        change_set.events.waiting.setdefault(event_id, ())
    for name in lacking.principals:
        change_set.names.principals.setdefault(name, None)
    for name in lacking.types:
        change_set.names.types.setdefault(name, None)


def _absent_names(change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Remember as absent what was requested by names whose nids are known only now."""
    names = change_set.caches.names
    for type_name, state_key in lacking.state_keys:
        type_nid = names.types.get(type_name) or change_set.names.types.get(type_name)
        if type_nid is not None:
            change_set.names.state_keys.setdefault((type_nid, state_key), None)
    for room_id, name in lacking.seen:
        room = change_set.rooms.known.get(room_id) or change_set.caches.rooms.get(room_id)
        nid = (
            STANDING.get(name)
            or change_set.names.principals.get(name)
            or names.principals.get(name)
        )
        if (
            room is not None
            and nid is not None
            and not change_set.visibility.knows_visibility(room.room_nid, nid)
        ):
            change_set.visibility.current[room.room_nid, nid] = UNSEEN


def _rooms(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        room = RoomRow._make(UNPACK_ROOM(row))
        change_set.rooms.known[room.room_id] = room._replace(
            forward_extremities=tuple(room.forward_extremities),
            out_of_range=multirange.from_text(str(room.out_of_range)),
        )


def _events(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    keep_rows(change_set, [EventRow._make(UNPACK_EVENT(row)) for row in rows])


def _missing(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        gap = MissingRow._make(UNPACK_GAP(row))
        if (
            gap.event_id not in change_set.events.new_missing
            and gap.event_id not in change_set.events.gone_missing
        ):
            change_set.events.missing[gap.event_id] = gap._replace(child_nids=tuple(gap.child_nids))


def _waiting(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        redaction_nid, target = UNPACK_WAITING(row)
        change_set.events.waiting[target] = (*change_set.events.waiting[target], redaction_nid)


def _contents(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        event_id, room_id, version = row.texts
        nid, redacted = row.numbers
        raw = decode_recent(row.data, event_id, room_id)
        change_set.events.parsed[nid] = load_event(raw, version, event_id, redacted=bool(redacted))


def _groups(change_set: ChangeSet, rows: Sequence[PackedRow], lacking: BatchRequest) -> None:
    """Keep the groups that are wanted; the other rows are of their paths."""
    known = [GroupRow._make(UNPACK_GROUP(row)) for row in rows]
    parts = {row.state_group: row for row in known}
    rooms = [
        room
        for room_id in lacking.rooms
        if (room := change_set.rooms.known.get(room_id)) is not None
    ]
    parents = lacking.parents | {
        change_set.events.row_ids[nid] for room in rooms for nid in room.forward_extremities
    }
    rows_before = (change_set.events.rows.get(parent) for parent in parents)
    wanted = {row.after for row in rows_before if row is not None and not row.outlier}
    wanted |= {room.current_state_group for room in rooms if room.current_state_group is not None}
    change_set.states.groups.update(groups_of(wanted | lacking.groups, parts))


def _positions(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        nid, *position = UNPACK_POSITION(row)
        change_set.auth_graph.places[nid] = ChainPosition(*position)


def _chains(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    """Keep the lengths of chains, and their links. A known chain is newer."""
    links: dict[int, dict[int, int]] = {}
    for row in rows:
        chain_nid, target, number = row.numbers
        if target is not None:
            links.setdefault(chain_nid, {})[target] = number
    for row in rows:
        chain_nid, target, number = row.numbers
        if (
            target is None
            and chain_nid not in change_set.auth_graph.chains
            and chain_nid not in change_set.caches.chains
        ):
            change_set.auth_graph.chains[chain_nid] = Chain(number, links.get(chain_nid, {}))


def _principals(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    change_set.names.principals.update((row.texts[0], row.numbers[0]) for row in rows)


def _types(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.names.types[row.texts[0]] = row.numbers[0]
        change_set.names.type_names[row.numbers[0]] = row.texts[0]


def _state_keys(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        type_nid, nid = row.numbers
        change_set.names.state_keys[type_nid, row.texts[0]] = nid
        change_set.names.state_key_names[nid] = (type_nid, row.texts[0])


def _visible(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        room_nid, nid, *values = UNPACK_VISIBLE(row)
        if not change_set.visibility.knows_visibility(room_nid, nid):
            known = VisibilityRow._make(values)
            change_set.visibility.current[room_nid, nid] = known._replace(
                audiences=multirange.from_text(str(known.audiences)),
                invited_audiences=multirange.from_text(str(known.invited_audiences or "")),
            )


def _numbers(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.blocks.put(row.texts[0], row.numbers[0])


KEEP: Final[dict[str, Callable[[ChangeSet, Sequence[PackedRow], BatchRequest], None]]] = {
    "room": _rooms,
    "event": _events,
    "missing": _missing,
    "waiting": _waiting,
    "content": _contents,
    "group": _groups,
    "position": _positions,
    "chain": _chains,
    "principal": _principals,
    "type": _types,
    "state_key": _state_keys,
    "visible": _visible,
    "number": _numbers,
}
