"""Which facts of the extensions a response needs, and up to where the client has them then."""

from collections.abc import Collection, Iterable

from storage.database.names import JOIN
from storage.queries.sliding.choice import Choice, WantedRoom
from storage.queries.sliding.connection import ClientRoom, ClientRooms
from storage.queries.sliding.extensions import ExtensionRequest, Extensions, RoomsToExtend
from storage.queries.sliding.prepared import PreparedRequest
from storage.queries.sliding.read_rooms import ReadRooms
from storage.queries.sliding.situation import Situation
from storage.queries.sync.positions import ACCOUNT_DATA, BESIDE, RECEIPTS, TO_DEVICE
from storage.streams import SyncToken, VectorPosition


def extension_request(situation: Situation, choice: Choice, rooms: ReadRooms) -> ExtensionRequest:
    """Return what to read. It is empty where the process knows that nothing is new."""
    request, sent = situation.request, situation.sent
    asked = ExtensionRequest(request.key.device_id, messages_max=request.body.to_device_limit)
    wanted = extended(choice)
    if TO_DEVICE in request.body.extensions and situation.concerns_user(TO_DEVICE):
        asked.to_device = request.extension_position(TO_DEVICE)
    if ACCOUNT_DATA in request.body.extensions:
        is_changed = situation.concerns_user(ACCOUNT_DATA)
        found = _rooms(ACCOUNT_DATA, wanted, sent, rooms.whole)
        found.live = list(sent) if is_changed else []
        asked.account_data_rooms = found
        if is_changed or found.after or found.new:
            asked.account_data = request.extension_position(ACCOUNT_DATA)
    if RECEIPTS in request.body.extensions:
        joined = (nid for nid, room in wanted.items() if room.listed.membership == JOIN)
        found = _rooms(RECEIPTS, joined, sent, rooms.whole)
        found.live = _rooms_with_receipts(situation, rooms.whole)
        asked.receipt_rooms = found
        if found.live or found.after or found.new:
            asked.receipts = request.extension_position(RECEIPTS)
            shown = rooms.shown.values()
            asked.event_ids = [event.event_id for room in shown for event in room.timeline]
    return asked


def extended(choice: Choice) -> dict[int, WantedRoom]:
    """Return the wanted rooms that the extensions have as well."""
    return {nid: room for nid, room in choice.wanted.items() if room.is_extended}


def _rooms(
    stream: str, wanted: Iterable[int], sent: ClientRooms, whole: Collection[int]
) -> RoomsToExtend:
    """Return the wanted rooms that do not follow the `pos`."""
    found = RoomsToExtend()
    for nid in wanted:
        known = sent.get(nid)
        upto = None if known is None else _upto(known, stream)
        if nid in whole:
            found.new.append(nid)
        elif upto is not None:
            found.after[nid] = upto
    return found


def _rooms_with_receipts(situation: Situation, whole: Collection[int]) -> list[int]:
    """Return the rooms that follow the `pos` and may have receipts after it."""
    sent, room_list = situation.sent, situation.room_list
    if not len(sent):
        return []
    keys = situation.changed_keys(RECEIPTS)
    listed = (
        (room_list.by_nid(nid) for nid in sent)
        if keys is None
        else (room_list.get(key) for key in keys)
    )
    return [
        room.room_nid
        for room in listed
        if room is not None
        and room.membership == JOIN
        and room.room_nid not in whole
        and (known := sent.get(room.room_nid)) is not None
        and known.receipts_upto is None
    ]


def marked(
    situation: Situation, choice: Choice, rooms: ReadRooms, found: Extensions
) -> dict[int, ClientRoom]:
    """Return the changed rows, with the positions up to which the client has facts of a room."""
    changes, sent = dict(rooms.changes), situation.sent
    for stream in (RECEIPTS, ACCOUNT_DATA):
        for nid, value in _positions(situation, choice, rooms, found, stream).items():
            row = changes.get(nid) or sent.get(nid)
            if row is not None and _upto(row, stream) != value:
                changes[nid] = _with_upto(row, stream, value)
    return changes


def _positions(
    situation: Situation, choice: Choice, rooms: ReadRooms, found: Extensions, stream: str
) -> dict[int, int | None]:
    """Return, by room, up to where the client has the facts of a stream. None: up to the `pos`."""
    request, wanted, sent = situation.request, extended(choice), situation.sent
    if stream not in request.body.extensions:
        has_position = request.extension_position(stream) != VectorPosition()
        return dict.fromkeys(rooms.whole, 0) if has_position else {}
    position = request.extension_position(stream).min
    behind = (nid for nid in found.behind.get(stream, ()) if nid in sent)
    return {
        **{nid: position for nid in behind if _upto(sent[nid], stream) is None},
        **dict.fromkeys(rooms.whole.difference(wanted), 0),
        **dict.fromkeys(wanted),
    }


def _upto(room: ClientRoom, stream: str) -> int | None:
    return room.receipts_upto if stream == RECEIPTS else room.account_data_upto


def _with_upto(room: ClientRoom, stream: str, value: int | None) -> ClientRoom:
    if stream == RECEIPTS:
        return room._replace(receipts_upto=value)
    return room._replace(account_data_upto=value)


def covered_by_extensions(
    request: PreparedRequest, upto: SyncToken, found: Extensions
) -> SyncToken:
    """Return the positions of the extensions that are not those of the response."""
    positions: dict[str, VectorPosition] = {}
    for stream in BESIDE:
        reached = upto.position(stream) or VectorPosition()
        at = reached
        if stream not in request.body.extensions:
            at = request.extension_position(stream).meet(reached)
        elif stream == TO_DEVICE and found.has_more:
            at = VectorPosition(found.to_device[-1].stream_id).meet(reached)
        if at != reached:
            positions[stream] = at
    return SyncToken.of(positions)
