"""The parts of the write for state groups, the current state, its deltas, and the chain cover."""

from typing import Final, LiteralString

from storage.database.columns import (
    AUTH_CHAIN_LINKS,
    AUTH_CHAINS,
    CURRENT_STATE,
    STATE_DELTAS,
    STATE_GROUPS,
)
from storage.database.names import TYPE_MEMBER
from storage.database.placeholders import ColumnValues, InputRows, by_column
from storage.graph.chain_rows import ChainColumns, all_columns
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.row_changes import StateDelta
from storage.persist.write.event_edges import sparse
from storage.state.rows import GroupRow, row_of

NEW_GROUP: Final = STATE_GROUPS.rows("new_group")
SET_STATE: Final = CURRENT_STATE.rows("set_state", is_new="boolean")
REMOVED_STATE: Final = InputRows.own("removed_state", room_nid="int", state_key_nid="int")
NEW_DELTA: Final = STATE_DELTAS.rows(
    "new_delta", STATE_DELTAS.but("stream_ordering", "writer_nid"), cause_nid="bigint"
)
NEW_CHAIN_POSITION: Final = AUTH_CHAINS.rows("new_chain_position")
NEW_LINK: Final = AUTH_CHAIN_LINKS.rows("new_link")
STATE_INPUTS: Final = (NEW_GROUP, SET_STATE, REMOVED_STATE, NEW_DELTA, NEW_CHAIN_POSITION, NEW_LINK)

PART_STATE: Final[LiteralString] = """
new_group AS (
    INSERT INTO state_groups (:new_group.columns)
    SELECT :new_group.values
    FROM :new_group.rows AS i
),
new_state AS (
    INSERT INTO current_state (:set_state.columns)
    SELECT :set_state.values
    FROM :set_state.rows AS i
    WHERE i.is_new
),
set_state AS (
    INSERT INTO current_state (:set_state.columns)
    SELECT :set_state.values
    FROM :set_state.rows AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET :set_state.update(EXCLUDED)
),
removed_state AS (
    DELETE FROM current_state c
    USING :removed_state.rows AS i
    WHERE c.room_nid = i.room_nid AND c.state_key_nid = i.state_key_nid
),
new_delta AS (
    INSERT INTO state_deltas (:new_delta.columns, stream_ordering, writer_nid)
    SELECT :new_delta.values, p.stream_ordering, :writer_nid
    FROM :new_delta.rows AS i
    JOIN positioned p ON p.event_nid = i.cause_nid
)"""

PART_CHAINS: Final[LiteralString] = """
new_chain_position AS (
    INSERT INTO auth_chains (:new_chain_position.columns)
    SELECT * FROM :new_chain_position.rows AS i
),
new_link AS (
    INSERT INTO auth_chain_links (:new_link.columns)
    SELECT * FROM :new_link.rows AS i
)"""


def state_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return new state groups, what changes in current states, and new events' chain positions."""
    current, absent = change_set.states.current_changes, change_set.states.absent_keys
    return {
        "new_group": _groups(change_set),
        "set_state": by_column(
            ("room_nid", "state_key_nid", "event_nid", "membership", "is_new"),
            ((*key, *value, key in absent) for key, value in current.items() if value[0]),
        ),
        "removed_state": by_column(
            ("room_nid", "state_key_nid"), (key for key, value in current.items() if not value[0])
        ),
        "new_delta": by_column(StateDelta._fields, change_set.states.deltas),
        **_chains(change_set),
    }


def _groups(change_set: ChangeSet) -> ColumnValues:
    def is_member(key: int) -> bool:
        return change_set.names.state_key_name(key)[0] == TYPE_MEMBER

    rows = [row_of(group, is_member) for group in change_set.states.new_groups.values()]
    columns = by_column(GroupRow._fields, rows)
    return {name: sparse(column) for name, column in columns.items()}


def _chains(change_set: ChangeSet) -> dict[str, ColumnValues]:
    places, links = all_columns(change_set.auth_graph.new_places)
    texts = (_auth_event(change_set, place.event_nid) for place in places)
    columns = by_column(
        (*ChainColumns._fields, "event_id", "state_key"),
        ((*place, *text) for place, text in zip(places, texts, strict=True)),
    )
    return {
        "new_chain_position": {name: sparse(column) for name, column in columns.items()},
        "new_link": by_column(
            ("chain_nid", "sequence_number", "target_chain_nid", "target_sequence_number"), links
        ),
    }


def _auth_event(change_set: ChangeSet, nid: int) -> tuple[str, str]:
    row = change_set.events.row_of(nid)
    return row.event_id, change_set.names.state_key_name(row.state_key_nid or 0)[1]
