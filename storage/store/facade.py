"""`Store`: the calls of a homeserver, listed by subject.

Each call is a function of the module of its subject. It checks its arguments, takes a connection
or a snapshot, and calls one function of a layer below.
"""

from typing import Final

from storage.store import federation, pages, states, syncing, writing
from storage.store import federation as missing
from storage.store import states as membership_calls
from storage.store.core import StoreCore


class Store(StoreCore):
    """The rooms of one homeserver, on one database. Open it with `storage.open`."""

    append: Final = writing.append
    readmit: Final = writing.readmit
    create_room: Final = writing.create_room
    send: Final = writing.send
    template: Final = writing.template
    erase_user: Final = writing.erase_user
    restore_user: Final = writing.restore_user

    event: Final = pages.event
    events: Final = pages.events
    visible_to_user: Final = pages.visible_to_user
    visible_to_server: Final = pages.visible_to_server
    explain_visibility: Final = pages.explain_visibility

    state_before: Final = states.state_before
    state_after: Final = states.state_after
    states_before: Final = states.states_before
    states_after: Final = states.states_after
    current_state: Final = states.current_state
    forward_extremities: Final = states.forward_extremities
    backward_extremities: Final = states.backward_extremities
    rooms_of: Final = states.rooms_of

    rooms: Final = states.rooms
    space_children: Final = states.space_children

    sync: Final = syncing.sync
    unread: Final = syncing.unread
    sliding_sync: Final = syncing.sliding_sync
    positions_of: Final = syncing.positions_of

    messages: Final = pages.messages
    context: Final = pages.context
    relations: Final = pages.relations
    aggregations: Final = pages.aggregations
    threads: Final = pages.threads
    event_near: Final = pages.event_near

    client_events: Final = pages.client_events

    membership: Final = membership_calls.membership
    member_ids: Final = membership_calls.member_ids
    members: Final = membership_calls.members
    state_at_leave: Final = membership_calls.state_at_leave
    memberships_of: Final = membership_calls.memberships_of
    forget: Final = membership_calls.forget
    joined_servers: Final = membership_calls.joined_servers
    partial_rooms: Final = membership_calls.partial_rooms
    shared_rooms: Final = membership_calls.shared_rooms
    users_sharing: Final = membership_calls.users_sharing
    sharing_changes: Final = membership_calls.sharing_changes

    is_resident: Final = federation.is_resident
    backfill: Final = federation.backfill
    missing_events: Final = federation.missing_events
    timestamp_to_event: Final = federation.timestamp_to_event
    state_ids: Final = federation.state_ids
    event_auth: Final = federation.event_auth
    auth_chain_ids: Final = federation.auth_chain_ids
    auth_chain_difference: Final = federation.auth_chain_difference

    define_stream: Final = writing.define_stream
    stream: Final = writing.stream
    outbox: Final = federation.outbox

    gaps: Final = missing.gaps
    gap_failed: Final = missing.gap_failed

    async def server_up(self, server_name: str) -> None:
        """Record that a server can be reached again, which ends the pauses of its failed gaps."""
        await missing.server_up(self, server_name)
