"""The parts of the write for state groups, the current state, its deltas, and the chain cover."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, LiteralString

from storage.database.columns import (
    AUDIENCES,
    AUTH_CHAIN_LINKS,
    AUTH_CHAINS,
    CURRENT_STATE,
    MEMBERSHIPS,
    PAST_VISIBILITY,
    STATE_DELTAS,
    STATE_GROUPS,
    VISIBILITY,
)
from storage.database.names import TYPE_MEMBER
from storage.database.placeholders import ColumnValues, InputRows, by_column, fill
from storage.graph.chains import ChainColumns, all_columns
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import (
    AudienceRow,
    MembershipChange,
    PastRow,
    StateDelta,
    VisibilityRow,
)
from storage.persist.write.events import sparse
from storage.state.groups import GroupRow, row_of
from storage.visibility import multirange
from storage.visibility.multirange import Ranges

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
new_delta AS (
    INSERT INTO state_deltas (:new_delta.columns, stream_ordering, writer_nid)
    SELECT :new_delta.values, p.stream_ordering, :writer_nid
    FROM :new_delta.rows AS i
    JOIN positioned p ON p.event_nid = i.cause_nid
),
"""

PART_REMOVED_STATE: Final[LiteralString] = """
removed_state AS (
    DELETE FROM current_state c
    USING :removed_state.rows AS i
    WHERE c.room_nid = i.room_nid AND c.state_key_nid = i.state_key_nid
),
"""

PART_CHAINS: Final[LiteralString] = """
new_chain_position AS (
    INSERT INTO auth_chains (:new_chain_position.columns)
    SELECT * FROM :new_chain_position.rows AS i
),
new_link AS (
    INSERT INTO auth_chain_links (:new_link.columns)
    SELECT * FROM :new_link.rows AS i
),
"""


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
    positions, links = all_columns(change_set.auth_graph.new_places)
    texts = (_auth_event(change_set, position.event_nid) for position in positions)
    columns = by_column(
        (*ChainColumns._fields, "event_id", "state_key"),
        ((*position, *text) for position, text in zip(positions, texts, strict=True)),
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


# --------------------------------------------------------------------------------------------------
# The part of the write for audiences, and for the principals that belong to them.

SET_VISIBILITY: Final = VISIBILITY.rows("set_visibility", is_new="boolean")
SET_PAST: Final = PAST_VISIBILITY.rows("set_past")
SET_AUDIENCE: Final = AUDIENCES.rows("set_audience", is_new="boolean")
VISIBILITY_INPUTS: Final = (SET_VISIBILITY, SET_PAST, SET_AUDIENCE)

PART_VISIBILITY: Final[LiteralString] = """
new_visibility AS (
    INSERT INTO visibility (:set_visibility.columns)
    SELECT :set_visibility.values
    FROM :set_visibility.rows AS i
    WHERE i.is_new
),
set_visibility AS (  -- a purge may have deleted the row
    INSERT INTO visibility (:set_visibility.columns)
    SELECT :set_visibility.values
    FROM :set_visibility.rows AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, principal_nid) DO UPDATE SET :set_visibility.update(EXCLUDED)
),
new_audience AS (
    INSERT INTO audiences (:set_audience.columns)
    SELECT :set_audience.values
    FROM :set_audience.rows AS i
    WHERE i.is_new
),
set_audience AS (
    INSERT INTO audiences (:set_audience.columns)
    SELECT :set_audience.values
    FROM :set_audience.rows AS i
    WHERE NOT i.is_new
    ON CONFLICT (room_nid, audience)
        DO UPDATE SET branches = EXCLUDED.branches, continued = EXCLUDED.continued
),
"""

PART_PAST_VISIBILITY: Final[LiteralString] = """
set_past AS (
    INSERT INTO past_visibility (:set_past.columns)
    SELECT :set_past.values
    FROM :set_past.rows AS i
    ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE
        SET audiences = EXCLUDED.audiences,
            invited_audiences = EXCLUDED.invited_audiences,
            topological_ranges = EXCLUDED.topological_ranges
),
"""


def visibility_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return the rows of audiences, and those of principals, that are new or changed."""
    view = change_set.visibility
    return {
        "set_visibility": _visibility(view.new_visibility, view.absent_visibility),
        "set_past": _past(view.new_past),
        "set_audience": _audiences(change_set),
    }


def _audiences(change_set: ChangeSet) -> ColumnValues:
    """Return the rows of audiences; `continued` is None for those without a next one."""
    view = change_set.visibility
    columns = by_column(
        ("room_nid", "audience", *AudienceRow._fields, "is_new"),
        ((*key, *row, key in view.absent_audiences) for key, row in view.new_audiences.items()),
    )
    return columns and {
        **columns,
        "continued": sparse([flag or None for flag in columns["continued"]]),
    }


def _visibility(
    rows: Mapping[tuple[int, int], VisibilityRow], absent: Collection[tuple[int, int]]
) -> ColumnValues:
    keys = by_column(("room_nid", "principal_nid"), rows)
    return keys and {
        **keys,
        **by_column(VisibilityRow._fields, rows.values()),
        "is_new": [key in absent for key in rows],
        "audiences": [multirange.to_text(row.audiences) for row in rows.values()],
        "invited_audiences": _texts_or_none(row.invited_audiences for row in rows.values()),
    }


def _past(rows: Mapping[tuple[int, int, int], PastRow]) -> ColumnValues:
    keys = by_column(("room_nid", "principal_nid", "first_audience"), rows)
    return keys and {
        **keys,
        "opened_topological": [row.opened_topological for row in rows.values()],
        "audiences": [multirange.to_text(row.audiences) for row in rows.values()],
        "invited_audiences": _texts_or_none(row.invited_audiences for row in rows.values()),
        "topological_ranges": [multirange.to_text(row.topological_ranges) for row in rows.values()],
    }


def _texts_or_none(column: Iterable[Ranges]) -> list[str | None]:
    """Return multiranges as text; None is stored for an empty one."""
    return [multirange.to_text(ranges) if ranges else None for ranges in column]


# --------------------------------------------------------------------------------------------------
# The part of the write for the memberships of local users, in the timeline and out of band.

SET_MEMBERSHIP: Final = MEMBERSHIPS.rows(
    "set_membership",
    MEMBERSHIPS.but("stream_ordering", "writer_nid", "forgotten"),
    cause_nid="bigint",
    entered="boolean",
)
OUT_OF_BAND: Final = InputRows.own(
    "out_of_band", event_nid="bigint", principal_nid="int", room_nid="int", stripped_state="text"
)

PART_OUT_OF_BAND: Final[LiteralString] = """
out_of_band AS (
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT nextval('events_stream'), i.event_nid, :writer_nid
    FROM :out_of_band.rows(event_nid) AS i
    RETURNING stream_id, event_nid
),
set_out_of_band AS (
    INSERT INTO out_of_band_memberships (room_nid, principal_nid, event_nid, stripped_state)
    SELECT i.room_nid, i.principal_nid, i.event_nid, i.stripped_state
    FROM :out_of_band.rows AS i
    ON CONFLICT (room_nid, principal_nid)
        DO UPDATE SET event_nid = EXCLUDED.event_nid, stripped_state = EXCLUDED.stripped_state
),
"""

TEMPLATE_MEMBERSHIPS: Final[LiteralString] = """
set_membership AS (
    INSERT INTO memberships (:set_membership.columns, stream_ordering, writer_nid)
    SELECT :set_membership.values, {position}, :writer_nid
    FROM :set_membership.rows(event_nid, principal_nid, room_nid, membership, cause_nid) AS i
    LEFT JOIN positioned p ON p.event_nid = i.cause_nid
    {out_of_band}
    ON CONFLICT (principal_nid, room_nid) DO UPDATE
        SET :set_membership.update(EXCLUDED),
            stream_ordering = EXCLUDED.stream_ordering,
            writer_nid = EXCLUDED.writer_nid,
            -- until a join, an invite or a knock; code that does not know the column keeps it
            forgotten = memberships.forgotten AND memberships.membership < {KNOCK}
                AND EXCLUDED.membership < {KNOCK} AND NOT EXISTS (
                    SELECT FROM :set_membership.rows(principal_nid, room_nid, entered) AS a
                    WHERE a.entered AND a.principal_nid = EXCLUDED.principal_nid
                        AND a.room_nid = EXCLUDED.room_nid
                )
),
overruled AS (
    DELETE FROM out_of_band_memberships o
    USING :set_membership.rows(principal_nid, room_nid, cause_nid) AS i
    WHERE o.room_nid = i.room_nid AND o.principal_nid = i.principal_nid AND i.cause_nid IS NOT NULL
),
"""
PART_MEMBERSHIPS: Final[LiteralString] = fill(
    TEMPLATE_MEMBERSHIPS,
    position="COALESCE(p.stream_ordering, o.stream_id)",
    out_of_band="""
    LEFT JOIN out_of_band o ON o.event_nid = i.event_nid AND i.cause_nid IS NULL
    """,
)
PART_TIMELINE_MEMBERSHIPS: Final[LiteralString] = fill(
    TEMPLATE_MEMBERSHIPS, position="p.stream_ordering", out_of_band=""
)


def membership_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return the new memberships of local users, and those of them that are out of band."""
    members = change_set.members
    return {
        "set_membership": by_column(MembershipChange._fields, members.memberships.values()),
        "out_of_band": by_column(
            ("event_nid", "principal_nid", "room_nid", "stripped_state"),
            (
                (row.event_nid, row.principal_nid, row.room_nid, members.stripped.get(key))
                for key, row in members.memberships.items()
                if row.cause_nid is None
            ),
        ),
    }
