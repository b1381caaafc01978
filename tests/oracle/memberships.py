"""Memberships as sync sees them: by the state, and out of band."""

from itertools import pairwise

from storage.ids import RoomId, server_name_of
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import OracleEvent


def own_member_event(oracle: Oracle, room_id: RoomId, user_id: str, at: int) -> OracleEvent | None:
    """Return the user's member event: from the current state then, or a later outlier.

    Such an outlier arrived while the server was not in the room: an invite or knock, or its end.
    """
    key = ("m.room.member", user_id)
    own = [
        held
        for held in oracle.held.values()
        if held.event.room_id == room_id
        and held.event.is_state
        and held.event.key == key
        and not held.rejected
        if held.outlier
        and held.event.content.get("membership")
        != "join"  # nobody is in a room of which there is history only
        if held.arrival <= at
        and not server_is_in(oracle, room_id, server_name_of(user_id), held.arrival)
    ]
    changed, value = 0, None
    for arrival, room, state in oracle.current_states:
        if room == room_id and arrival <= at and state.get(key) != value:
            changed, value = arrival, state.get(key)
    if own and own[-1].arrival > changed:
        return own[-1]
    return None if value is None else oracle.get(value)


def server_is_in(oracle: Oracle, room_id: RoomId, server_name: str, at: int) -> bool:
    state = oracle.current_state_at(room_id, at)
    members = [
        user
        for type_, user in state
        if type_ == "m.room.member" and server_name_of(user) == server_name
    ]
    return any(oracle.membership_in(state, user) == "join" for user in members)


def last_change(oracle: Oracle, room_id: RoomId, user_id: str, upto: int) -> int | None:
    """Return when the user's membership changed last, in the state or out of band."""
    own = [own_member_event(oracle, room_id, user_id, at) for at in range(upto + 1)]
    changes = [at for at, (then, now) in enumerate(pairwise(own), 1) if then is not now]
    return changes[-1] if changes else None


def peeked(oracle: Oracle, room_id: RoomId, user_id: str, upto: int) -> bool:
    """Whether a user who never joined could see the room at their last membership."""
    own = own_member_event(oracle, room_id, user_id, upto)
    if own is None or not is_out(own) or _ever_joined(oracle, room_id, user_id):
        return False
    return bool(oracle.visible_to_user(user_id, [own.event.event_id]))


def _ever_joined(oracle: Oracle, room_id: RoomId, user_id: str) -> bool:
    return oracle.membership(room_id, user_id) == "join" or any(
        held.accepted
        and held.event.key == ("m.room.member", user_id)
        and held.event.content.get("membership") == "join"
        for held in oracle.timeline(room_id).values()
        if held.event.is_state
    )


def is_out(own: OracleEvent) -> bool:
    return own.event.content.get("membership") in ("leave", "ban")
