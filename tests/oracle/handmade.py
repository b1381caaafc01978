"""Small rooms for the oracle's own tests."""

from collections.abc import Sequence

from storage.ids import EventId
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import Outcome


def outcomes(answers: Sequence[tuple[str | None, Outcome]]) -> list[Outcome]:
    return [outcome for _, outcome in answers]


def new_room(
    version: str = "11", visibility: str = "shared", **more: str
) -> tuple[RoomBuilder, str, str]:
    """A room of user 1 (s1.test), and user 2 (s2.test), who has joined."""
    room = RoomBuilder(version, sign=False)
    room.start(room.user(1), history_visibility=visibility, **more)  # type: ignore[arg-type]
    room.join(room.user(2))
    return room, room.user(1), room.user(2)


def filled(room: RoomBuilder) -> Oracle:
    oracle = Oracle()
    assert set(outcomes(oracle.append(room.pdus))) == {"stored"}
    return oracle


def ids(*events: BuiltEvent) -> list[EventId]:
    return [event.event_id for event in events]
