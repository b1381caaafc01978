"""Unread counts as the oracle makes them: by looking at every event of the timeline."""

from collections.abc import Collection, Iterable

from storage.ids import EventId, RoomId
from storage.queries.unread import UNREAD_TYPES
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import OracleEvent


def unread(
    oracle: Oracle, room_id: RoomId, user_id: str, read: Iterable[EventId], ignored: Collection[str]
) -> int:
    """Return the number of unread events of a member. ``read`` are the events with a receipt.

    The rooms have no threads and no edits.
    """
    live = [held for held in oracle.timeline(room_id).values() if held.origin == "live"]
    receipts = [oracle.get(one).arrival for one in read]
    upto = max(receipts) if receipts else _stay(oracle, room_id, user_id)
    said = [held.arrival for held in live if held.event.sender == user_id and not _is_state(held)]
    upto = max([upto, *said])
    visible = oracle.visible_to_user(user_id, [held.event.event_id for held in live])
    return sum(
        held.arrival > upto
        and held.event.event_id in visible
        and held.event.type in UNREAD_TYPES
        and not _is_state(held)
        and held.event.sender != user_id
        and _was_joined(oracle, held.event.event_id, user_id)
        and not oracle.is_ignored(held.event.sender, ignored)
        and oracle.redacted_by(held.event.event_id) is None
        for held in live
    )


def _was_joined(oracle: Oracle, event_id: EventId, user_id: str) -> bool:
    return oracle.membership_in(oracle.state_before(event_id), user_id) == "join"


def _is_state(held: OracleEvent) -> bool:
    return held.event.is_state


def _stay(oracle: Oracle, room_id: RoomId, user_id: str) -> int:
    """Return the arrival of the join that began the present stay, before changes of the profile."""
    own = oracle.get(oracle.current_state(room_id)["m.room.member", user_id])
    arrivals: list[int] = []
    while True:
        if not own.outlier and own.origin == "live":
            arrivals.append(own.arrival)
        cited = [oracle.held[one] for one in own.event.auth_event_ids if one in oracle.held]
        joins = [
            one
            for one in cited
            if one.event.is_state
            and one.event.key == own.event.key
            and one.event.content.get("membership") == "join"
        ]
        if not joins:
            return min(arrivals, default=0)
        own = joins[0]
