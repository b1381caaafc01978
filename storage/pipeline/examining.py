"""The first stage of an import: each line by itself, in executors. Read, parsed, hashed, and its signatures checked where keys are given.

Embarrassingly parallel, and the same pure functions as `Store.append`. What is wrong with a line becomes a reason; what is well becomes a
row that needs no check of its bytes any more (`Examined`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from signedjson.key import decode_verify_key_bytes
from signedjson.types import VerifyKey
from unpaddedbase64 import decode_base64, encode_base64

from storage.errors import InvalidEvent
from storage.event import Event
from storage.event.ndjson import ORIGINS, read_line
from storage.persist import intake
from storage.persist.results import AppendResult

IDS: Final = pa.list_(pa.string())
LINES: Final = pa.schema(
    [
        ("path_index", pa.int32()),
        ("place", pa.int64()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("raw", pa.binary()),
        ("pdu", pa.binary()),
        ("room_version", pa.string()),
        ("origin", pa.string()),
        ("state_before", IDS),
    ]
)
"""What archives are read as: ``raw`` is a line of NDJSON, else the others are columns of Parquet. Order: path, place, source, line."""

EXAMINED: Final = pa.schema(
    [
        ("path_index", pa.int32()),
        ("place", pa.int64()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("room_id", pa.string()),
        ("room_version", pa.string()),
        ("event_id", pa.string()),
        ("redacted_form", pa.bool_()),
        ("origin", pa.string()),
        ("state_before", IDS),
        ("needs", IDS),
        ("pdu", pa.binary()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
    ]
)
"""``needs``: the events that have to come before. ``outcome`` and ``reason``: of a reject, whose bytes are in ``pdu``; else null."""


class Input(NamedTuple):
    """What a line or row holds."""

    pdu: bytes
    room_version: str | None
    origin: str
    state_before: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Examiner:
    """What lines are examined by. ``versions``: of known rooms; ``room_version``: for rooms that nobody knows.

    ``keys``: (server, key id) to the unpadded base64 of a verify key; empty: signatures are not checked.
    """

    versions: Mapping[str, str]
    room_version: str | None = None
    keys: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`LINES` in, `EXAMINED` out, row by row."""
        keys = {(server, key_id): verify_key(key_id, text) for (server, key_id), text in self.keys.items()}
        rows = batch.to_pylist()
        return pa.RecordBatch.from_pylist(asyncio.run(self._rows(rows, keys)), schema=EXAMINED)

    async def _rows(self, rows: Iterable[dict[str, Any]], keys: Mapping[tuple[str, str], VerifyKey]) -> list[dict[str, Any]]:
        return [await self._row(row, keys) for row in rows]

    async def _row(self, row: dict[str, Any], keys: Mapping[tuple[str, str], VerifyKey]) -> dict[str, Any]:
        where = {name: row[name] for name in ("path_index", "place", "source", "line")}
        try:
            given = input_of(row)
        except InvalidEvent as error:
            return where | {"pdu": row["raw"] or row["pdu"], "outcome": "bad_line", "reason": error.reason}
        read = self.parsed(given)
        if keys and isinstance(read, Event):
            read = await intake.check_signatures(read, keys) or read
        if not isinstance(read, Event):
            return where | {"pdu": given.pdu, "event_id": read.event_id, "outcome": read.outcome, "reason": read.reason}
        return where | examined(read, given)

    def parsed(self, given: Input) -> Event | AppendResult:
        """The event; or what is wrong with it."""
        glanced = intake.glances([given.pdu])
        rooms = intake.room_ids(glanced)
        [version] = intake.versions(glanced, rooms, self.versions, given.room_version or self.room_version)
        return intake.read(given.pdu, glanced[0], version)


def input_of(row: dict[str, Any]) -> Input:
    """What a row of `LINES` holds. `InvalidEvent` for a bad line."""
    if row["raw"] is None:
        if row["pdu"] is None:
            raise InvalidEvent("there is no PDU in this row")
        origin, state = row["origin"] or "live", row["state_before"]
        if origin not in ORIGINS:
            raise InvalidEvent(f"origin {origin!r} is none of {', '.join(ORIGINS)}")
        return Input(row["pdu"], row["room_version"], origin, None if state is None else tuple(state))
    line = read_line(row["raw"])
    return Input(line.pdu, line.room_version, line.origin or "live", line.state_before)


def examined(event: Event, given: Input) -> dict[str, Any]:
    """The columns of an event that is well."""
    return {
        "room_id": event.room_id,
        "room_version": event.room_version.identifier,
        "event_id": event.event_id,
        "redacted_form": not event.content_hash_valid,
        "origin": given.origin,
        "state_before": given.state_before,
        "needs": needs(event, given),
        "pdu": event.raw,
        "outcome": None,
        "reason": None,
    }


def needs(event: Event, given: Input) -> list[str]:
    """What has to be held before this event can be stored: its auth events, and parents or the state that stands for them.

    Parents are marked by a leading ``^``: to them an outlier is not enough.
    """
    needed = list(event.auth_event_ids)
    if event.room_version.create_room_id and event.type != "m.room.create":
        needed.append("$" + event.room_id[1:])  # type: ignore[arg-type]  # an event id
    if given.origin == "outlier":
        return [*needed]
    if given.state_before is not None:
        return [*needed, *given.state_before]
    return [*needed, *("^" + parent for parent in event.prev_event_ids)]


def created(batch: pa.RecordBatch) -> dict[str, str]:
    """The rooms whose create events are in a batch of `LINES`, with their versions."""
    found: dict[str, str] = {}
    candidates = batch.filter(pc.match_substring(pc.coalesce(batch.column("raw"), batch.column("pdu")), b"m.room.create"))
    for row in candidates.to_pylist():
        try:
            given = input_of(row)
        except InvalidEvent:
            continue  # told of when it is examined
        glanced = intake.glances([given.pdu])
        [room] = intake.room_ids(glanced)
        [version] = intake.versions(glanced, [room], {}, None)
        if room is not None and version is not None:
            found.setdefault(room, given.room_version or version)
    return found


def key_texts(keys: Mapping[tuple[str, str], VerifyKey]) -> dict[tuple[str, str], str]:
    """Verify keys as text, to be sent to executors."""
    return {name: encode_base64(bytes(key)) for name, key in keys.items()}


def verify_key(key_id: str, text: str) -> VerifyKey:
    """The key of `key_texts`."""
    return decode_verify_key_bytes(key_id, decode_base64(text))
