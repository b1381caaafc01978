"""`Store`: the calls of a homeserver, listed by subject.

Each call is a function of the module of its subject. It checks its arguments, takes a connection
or a snapshot, and calls one function of a layer below.
"""

from storage.store import federation, pages, reading, sending, states, syncing, writing
from storage.store import missing_events as missing
from storage.store.core import StoreCore


class Store(StoreCore):
    """The rooms of one homeserver, on one database. Open it with `storage.open`."""

    append = writing.append
    create_room = sending.create_room
    send = sending.send
    template = sending.template
    erase_user = writing.erase_user
    restore_user = writing.restore_user

    event = reading.event
    events = reading.events
    visible_to_user = reading.visible_to_user
    visible_to_server = reading.visible_to_server
    explain_visibility = reading.explain_visibility

    state_before = states.state_before
    state_after = states.state_after
    states_before = states.states_before
    states_after = states.states_after
    current_state = states.current_state
    forward_extremities = states.forward_extremities
    backward_extremities = states.backward_extremities
    rooms_of = states.rooms_of

    sync = syncing.sync
    positions_of = syncing.positions_of

    messages = pages.messages
    context = pages.context
    relations = pages.relations
    aggregations = pages.aggregations
    event_near = pages.event_near

    is_resident = federation.is_resident
    backfill = federation.backfill
    missing_events = federation.missing_events
    state_ids = federation.state_ids
    event_auth = federation.event_auth
    auth_chain_ids = federation.auth_chain_ids
    auth_chain_difference = federation.auth_chain_difference

    gaps = missing.gaps
    gap_failed = missing.gap_failed
    server_up = missing.server_up
