"""The results of the builder and the generators, and their NDJSON form.

`BuiltEvent` is an event with everything its author knew (parents, state before and after); it is
part of a graph. `GeneratedEvent` is the same event as delivered to a store: bytes, origin, and
expected outcome.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from signedjson.types import VerifyKey

from storage.ids import EventId, RoomId, StateKey
from storage.persistent_map import Map

State: TypeAlias = "Map[StateKey, EventId]"
Origin = Literal["live", "backfill", "outlier"]
Expected = Literal["stored", "rejected", "soft_failed", "redacted", "invalid"]
"""The expected outcome in a store that got every event in order of creation."""


class Merged(NamedTuple):
    """A state before an event, and the keys on which the parents' states disagreed."""

    state: State
    disputed: frozenset[StateKey]


@dataclass(frozen=True, slots=True, eq=False)
class BuiltEvent:
    """One event of a built room.

    Functions that take an event also take its id.

    `state_before` and `state_after` are the true states by state resolution, (type, state key) ->
    event id; a rejected or invalid event leaves the state unchanged. `topological` is 1 for the
    create event and else 1 + the largest of the parents', whatever `depth` claims. `expected` is
    None for an ordinary event: allowed by its own state, hence never rejected, but perhaps
    soft-failed where another branch came first.
    """

    event_id: EventId
    room_id: RoomId
    room_version: str
    pdu: bytes
    type: str
    sender: str
    state_key: str | None
    prev_events: tuple[EventId, ...]
    auth_events: tuple[EventId, ...]
    depth: int
    topological: int
    origin_server_ts: int
    state_before: State = field(repr=False)
    state_after: State = field(repr=False)
    expected: Expected | None = None

    @property
    def key(self) -> StateKey | None:
        """Return (type, state key) of a state event, None for a message."""
        return None if self.state_key is None else (self.type, self.state_key)

    @property
    def json(self) -> dict[str, Any]:
        """Parse the PDU again at each call."""
        parsed: dict[str, Any] = json.loads(self.pdu)
        return parsed

    @property
    def content(self) -> dict[str, Any]:
        """Return the PDU's content, as sent."""
        content: dict[str, Any] = self.json["content"]
        return content

    def generated(
        self, origin: Origin = "live", state_before: Iterable[EventId] | None = None
    ) -> "GeneratedEvent":
        """Return the event as a delivery to a store."""
        state_ids = None if state_before is None else tuple(state_before)
        return GeneratedEvent(
            self.pdu,
            self.event_id,
            self.room_id,
            self.room_version,
            origin,
            state_ids,
            self.expected,
        )


@dataclass(frozen=True, slots=True)
class GeneratedEvent:
    """One delivery: an argument of ``store.append`` with its metadata.

    `state_before` is set for an event after a gap: the ids of the state before it, for
    ``append(state_before=…)``.
    """

    pdu: bytes = field(repr=False)
    event_id: EventId
    room_id: RoomId
    room_version: str
    origin: Origin = "live"
    state_before: tuple[EventId, ...] | None = field(default=None, repr=False)
    expected: Expected | None = None


@dataclass(frozen=True, slots=True)
class GeneratedRoom:
    """A whole room in order of delivery, with the keys of its servers."""

    room_id: RoomId
    room_version: str
    events: tuple[GeneratedEvent, ...] = field(repr=False)
    keys: Mapping[tuple[str, str], VerifyKey] = field(repr=False)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[GeneratedEvent]:
        return iter(self.events)

    @property
    def pdus(self) -> list[bytes]:
        """Return the bytes alone, in order of delivery."""
        return [event.pdu for event in self.events]


def ndjson_line(event: GeneratedEvent) -> bytes:
    r"""Return ``{"pdu":…,"room_version":…,"origin":…}`` and a newline.

    The PDU is embedded byte for byte, so a reader that needs the bytes must cut them out and not
    re-encode. After a gap ``"state_before"`` (a list of event ids) follows. Raise ValueError for a
    PDU with a raw line break, which has no such form.
    """
    if b"\n" in event.pdu or b"\r" in event.pdu:
        raise ValueError(f"{event.event_id}: a PDU with a line break has no NDJSON form")
    tail: dict[str, Any] = {"room_version": event.room_version, "origin": event.origin}
    if event.state_before is not None:
        tail["state_before"] = list(event.state_before)
    return (
        b'{"pdu":' + event.pdu + b"," + json.dumps(tail, separators=(",", ":")).encode()[1:] + b"\n"
    )


def write_ndjson(events: Iterable[GeneratedEvent], target: Path | str | IO[bytes]) -> int:
    """Write one line per event, as `ndjson_line`; return how many.

    `target` is a path or an open binary file.
    """
    if isinstance(target, str | Path):
        with Path(target).open("wb") as file:
            return write_ndjson(events, file)
    written = 0
    for event in events:
        target.write(ndjson_line(event))
        written += 1
    return written
