"""A new state event's place in the chain cover (`storage.graph.chains`)."""

from storage.graph.chains import Entry, Parent, enter
from storage.persist.draft import Draft
from storage.persist.rows import EventRow


def cover(draft: Draft, row: EventRow) -> Entry | None:
    """The place of a state event that is accepted and has none yet; None for any other event."""
    if row.state_key_nid is None or row.rejected is not None:
        return None
    draft.state_key_names[row.state_key_nid] = draft.state_key_name(row.state_key_nid)  # stays known until it is written beside the place
    draft.ensure_places(row.auth_events)
    rows = [draft.row_of(nid) for nid in row.auth_events]  # they have been looked up by their ids
    parents = [Parent(auth.event_nid, draft.place(auth.event_nid), auth.auth_events) for auth in rows]
    own = [parent.place for parent, auth in zip(parents, rows, strict=True) if auth.state_key_nid == row.state_key_nid]
    predecessor = max(own, default=None)
    chain = None if predecessor is None else draft.chain(predecessor.chain_nid)
    return enter(predecessor, chain, draft.chain_nid_for(row.event_nid), parents)
