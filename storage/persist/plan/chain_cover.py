"""Give a new state event its position in the chain cover (`storage.graph.chains`)."""

from storage.graph.chains import ChainEntry, ChainParent, enter
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow


def cover_event(change_set: ChangeSet, row: EventRow) -> ChainEntry | None:
    """Return the chain cover entry of a state event; None for a rejected or message event.

    The event's auth events must have positions. The highest of those with its own state key is its
    predecessor: the event continues that chain, or begins a new one (`enter`).
    """
    if row.state_key_nid is None or row.rejected is not None:
        return None
    # keep the name until it is written together with the position
    change_set.names.state_key_names[row.state_key_nid] = change_set.names.state_key_name(
        row.state_key_nid
    )
    change_set.auth_graph.ensure_places(row.auth_events)
    # no MissingData here: `auth_rows_of` has looked them up by their ids
    rows = [change_set.events.row_of(nid) for nid in row.auth_events]
    parents = [
        ChainParent(auth.event_nid, change_set.auth_graph.place(auth.event_nid), auth.auth_events)
        for auth in rows
    ]
    own = [
        parent.place
        for parent, auth in zip(parents, rows, strict=True)
        if auth.state_key_nid == row.state_key_nid
    ]
    predecessor = max(own, default=None)
    chain = None if predecessor is None else change_set.auth_graph.chain(predecessor.chain_nid)
    return enter(predecessor, chain, -row.event_nid, parents)
