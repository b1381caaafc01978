"""The part of the write for the memberships of local users, in the timeline and out of band."""

from typing import Final, LiteralString

from storage.database.columns import MEMBERSHIPS
from storage.database.placeholders import ColumnValues, by_column
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.row_changes import MembershipChange

SET_MEMBERSHIP: Final = MEMBERSHIPS.rows(
    "set_membership",
    MEMBERSHIPS.but("stream_ordering", "writer_nid", "forgotten"),
    cause_nid="bigint",
    stripped_state="text",
    entered="boolean",
)
MEMBERSHIP_INPUTS: Final = (SET_MEMBERSHIP,)

PART_MEMBERSHIPS: Final[LiteralString] = """
out_of_band AS (
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT nextval('events_stream'), i.event_nid, :writer_nid
    FROM :set_membership.rows(event_nid, cause_nid) AS i
    WHERE i.cause_nid IS NULL
    RETURNING stream_id, event_nid
),
set_membership AS (
    INSERT INTO memberships (:set_membership.columns, stream_ordering, writer_nid)
    SELECT :set_membership.values, COALESCE(p.stream_ordering, o.stream_id), :writer_nid
    FROM :set_membership.rows(event_nid, principal_nid, room_nid, membership, cause_nid) AS i
    LEFT JOIN positioned p ON p.event_nid = i.cause_nid
    LEFT JOIN out_of_band o ON o.event_nid = i.event_nid AND i.cause_nid IS NULL
    ON CONFLICT (principal_nid, room_nid) DO UPDATE
        SET :set_membership.update(EXCLUDED),
            stream_ordering = EXCLUDED.stream_ordering,
            writer_nid = EXCLUDED.writer_nid,
            -- until a join, an invite or a knock; code that does not know the column keeps it
            forgotten = memberships.forgotten AND memberships.membership < 3
                AND EXCLUDED.membership < 3 AND NOT EXISTS (
                    SELECT FROM :set_membership.rows(principal_nid, room_nid, entered) AS a
                    WHERE a.entered AND a.principal_nid = EXCLUDED.principal_nid
                        AND a.room_nid = EXCLUDED.room_nid
                )
),
set_out_of_band AS (
    INSERT INTO out_of_band_memberships (room_nid, principal_nid, event_nid, stripped_state)
    SELECT i.room_nid, i.principal_nid, i.event_nid, i.stripped_state
    FROM :set_membership.rows(event_nid, principal_nid, room_nid, cause_nid, stripped_state) AS i
    WHERE i.cause_nid IS NULL
    ON CONFLICT (room_nid, principal_nid)
        DO UPDATE SET event_nid = EXCLUDED.event_nid, stripped_state = EXCLUDED.stripped_state
),
overruled AS (
    DELETE FROM out_of_band_memberships o
    USING :set_membership.rows(principal_nid, room_nid, cause_nid) AS i
    WHERE o.room_nid = i.room_nid AND o.principal_nid = i.principal_nid AND i.cause_nid IS NOT NULL
)"""


def membership_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return the new memberships of local users."""
    changes = change_set.members.memberships
    if not changes:
        return {"set_membership": {}}
    columns = dict(by_column(MembershipChange._fields, changes.values()))
    columns["stripped_state"] = [change_set.members.stripped.get(key) for key in changes]
    return {"set_membership": columns}
