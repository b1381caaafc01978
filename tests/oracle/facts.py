"""Facts of a room that two servers with the same events must agree on, as plain values.

Also the differences between two servers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from storage import EventFilter, SyncFilter
from storage.ids import EventId, RoomId
from tests.oracle.oracle import Oracle, Position
from tests.oracle.room_graph import Origin, Outcome
from tests.oracle.syncing import Answer

Facts = dict[str, Any]
Stretch = tuple[Any | None, Any | None, Literal["b", "f"]]  # since, upto, direction
EVERYTHING = 1_000_000


@dataclass(frozen=True)
class Audience:
    """The user and servers whose view is compared."""

    users: Sequence[str]
    servers: Sequence[str]


class Subject(Protocol):
    """The subject of the comparison: a store behind an adapter.

    The adapter runs its coroutines to their end.
    """

    def append(
        self,
        pdus: Sequence[bytes],
        *,
        room_version: str | None,
        origin: Origin,
        state_before: Mapping[EventId, Sequence[EventId]] | None,
        refused: Mapping[EventId, str] | None = None,
    ) -> list[tuple[EventId | None, Outcome]]:
        """As `Oracle.append`."""

    def readmit(self, event_id: EventId) -> Outcome:
        """As `Oracle.readmit`."""

    def forget(self, room_id: RoomId, user_id: str) -> None:
        """A user forgets a room that they have left."""

    def positions(self, room_id: RoomId) -> dict[EventId, Position]:
        """(topological, stream) of every timeline event."""

    def facts(self, room_id: RoomId, audience: Audience, known: Collection[EventId] = ()) -> Facts:
        """As `oracle_facts`: the same keys, the same plain values."""

    def sync(
        self,
        user_id: str,
        since: Any | None,
        limit: int,
        wanted: SyncFilter,
        ignored: Collection[str] = (),
    ) -> Answer:
        """Sync like `tests.oracle.syncing.sync`.

        `next_batch`, of any type, is `since` of the next call.
        """

    def send(self, user_id: str, device_id: str, bodies: Sequence[str]) -> None:
        """As `Inboxes.send`."""

    def receive(self, user_id: str, device_id: str, since: Any | None) -> tuple[list[str], Any]:
        """As `Inboxes.receive`; the second is what the next call gets as `since`, of any type."""

    def between(
        self, room_id: RoomId, user_id: str, stretch: Stretch, wanted: EventFilter
    ) -> list[EventId]:
        """As `Oracle.between`, by pages; since and upto are as `next_batch`."""

    def page_back(
        self, room_id: RoomId, user_id: str, at: Any | None
    ) -> tuple[list[EventId], Any | None]:
        """As `Oracle.page_back`; the second is what the next call gets as `at`, of any type."""


def oracle_facts(
    oracle: Oracle, room_id: RoomId, audience: Audience, known: Collection[EventId] = ()
) -> Facts:
    """Return everything about a room.

    Of the ``known`` events leave out facts that never change once they are in the timeline.
    """
    timeline = oracle.timeline(room_id)
    new = [event_id for event_id in timeline if event_id not in known]
    return {
        **_state_facts(oracle, room_id, new),
        **_reader_facts(oracle, room_id, audience, new),
        **_federation_facts(oracle, room_id, audience, new, known),
    }


def _held(oracle: Oracle, room_id: RoomId) -> list[EventId]:
    return [event_id for event_id, one in oracle.held.items() if one.event.room_id == room_id]


def _state_facts(oracle: Oracle, room_id: RoomId, new: Sequence[EventId]) -> Facts:
    return {
        "flags": {
            event_id: (
                one.outlier,
                one.rejected,
                one.soft_failed,
                one.refused,
                oracle.redacted_by(event_id),
            )
            for event_id, one in oracle.held.items()
            if one.event.room_id == room_id
        },
        "state before": {event_id: oracle.state_before(event_id) for event_id in new},
        "state after": {event_id: oracle.state_after(event_id) for event_id in new},
        "current state": oracle.current_state(room_id),
        "forward extremities": set(oracle.forward_extremities(room_id)),
        "backward extremities": oracle.backward_extremities(room_id),
    }


def _reader_facts(
    oracle: Oracle, room_id: RoomId, audience: Audience, new: Sequence[EventId]
) -> Facts:
    held = _held(oracle, room_id)
    times = {oracle.get(event_id).event.origin_server_ts for event_id in new}
    return {
        "seen by user": {user: oracle.visible_to_user(user, held) for user in audience.users},
        "messages": {user: oracle.messages(room_id, user) for user in audience.users},
        "messages forwards": {
            user: oracle.messages(room_id, user, direction="f") for user in audience.users
        },
        "goes on at a gap": {
            user: oracle.page_back(room_id, user)[1] is not None for user in audience.users
        },
        "context": {
            user: {event_id: oracle.context(event_id, user, 5) for event_id in new}
            for user in audience.users
        },
        "near": {
            user: {time: near(oracle, room_id, user, time) for time in times}
            for user in audience.users
        },
        "relations": {
            user: {event_id: oracle.relations(event_id, user) for event_id in held}
            for user in audience.users
        },
        "indirect": {
            user: {event_id: oracle.relations(event_id, user, recurse=True) for event_id in held}
            for user in audience.users
        },
        "aggregations": {
            user: {event_id: oracle.aggregations(event_id, user) for event_id in held}
            for user in audience.users
        },
    }


def _federation_facts(
    oracle: Oracle,
    room_id: RoomId,
    audience: Audience,
    new: Sequence[EventId],
    known: Collection[EventId],
) -> Facts:
    held = _held(oracle, room_id)
    not_known = [event_id for event_id in held if event_id not in known]
    timeline = oracle.timeline(room_id)
    latest = sorted(oracle.forward_extremities(room_id))
    earliest = [event_id for event_id in timeline if not oracle.get(event_id).event.prev_event_ids]
    return {
        "seen by server": {
            server: oracle.visible_to_server(server, held) for server in audience.servers
        },
        "resident": {server: oracle.is_resident(server, room_id) for server in audience.servers},
        "sent to server": {
            server: oracle.sent(server, room_id, oracle.backfill(room_id, latest))
            for server in audience.servers
        },
        "backfill": oracle.backfill(room_id, latest, EVERYTHING),
        "backfill 3": oracle.backfill(room_id, latest, 3),
        "missing events": oracle.missing_events(room_id, earliest, latest, limit=EVERYTHING),
        "backfill of each": {event_id: oracle.backfill(room_id, [event_id], 4) for event_id in new},
        "missing events of each": {
            event_id: oracle.missing_events(room_id, earliest, [event_id], limit=3, min_depth=2)
            for event_id in new
        },
        "state ids": {event_id: oracle.state_ids(event_id) for event_id in {*latest, *new}},
        "event auth": {
            event_id: oracle.auth_chain([event_id]) - {event_id} for event_id in not_known
        },
        "chain difference": oracle.auth_chain_difference(
            [oracle.state_after(event_id).values() for event_id in new]
        ),
        "auth chains": {event_id: oracle.auth_chain([event_id]) for event_id in not_known},
    }


def near(
    oracle: Oracle, room_id: RoomId, user_id: str, timestamp_ms: int
) -> tuple[EventId | None, EventId | None]:
    """The events nearest to a time: (at or before it, at or after it)."""
    return oracle.event_near(room_id, user_id, timestamp_ms, "b"), oracle.event_near(
        room_id, user_id, timestamp_ms, "f"
    )


def differences(expected: Facts, found: Facts, path: str = "") -> list[str]:
    """One line for each value that differs, with the way to it."""
    lines: list[str] = []
    for key in sorted({*expected, *found}, key=str):
        where = f"{path}/{key}"
        if key not in expected or key not in found:
            lines.append(f"{where}: {'not expected' if key in found else 'not found'}")
            continue
        one, other = expected[key], found[key]
        if isinstance(one, dict) and isinstance(other, dict):
            lines += differences(one, other, where)
        elif isinstance(one, set) and isinstance(other, Collection) and one != set(other):
            lines.append(
                f"{where}: too few {sorted(one - set(other))}, too many {sorted(set(other) - one)}"
            )
        elif one != other and not isinstance(one, set):
            lines.append(f"{where}: expected {one}, found {other}")
    return lines


def order_violations(
    oracle: Oracle, room_id: RoomId, positions: Mapping[EventId, Position], *, exact: bool
) -> list[str]:
    """Check the order of any store: every timeline event has a position, parents come first.

    Arrivals are in stream order. `exact`: the room never had a gap, so its topological order is
    that of the oracle.
    """
    timeline = oracle.timeline(room_id)
    if set(positions) != set(timeline):
        return [f"positions of {sorted(set(positions) ^ set(timeline))}"]
    lines = [
        f"{event_id} at {positions[event_id]} is not after"
        f" its parent {parent} at {positions[parent]}"
        for event_id, held in timeline.items()
        for parent in held.event.prev_event_ids
        if parent in positions and positions[parent][0] >= positions[event_id][0]
    ]
    by_stream = sorted(timeline, key=lambda event_id: positions[event_id][1])
    if by_stream != list(timeline):
        lines.append(f"stream order {by_stream}, order of arrival {list(timeline)}")
    if exact:
        own = oracle.topological_orderings(room_id)
        wrong = [event_id for event_id in timeline if positions[event_id][0] != own[event_id]]
        lines += [
            f"{event_id}: topological {positions[event_id][0]}, expected {own[event_id]}"
            for event_id in wrong
        ]
    return lines
