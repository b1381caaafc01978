"""The part of the write for audiences, and for the principals that belong to them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, LiteralString

from storage.database.columns import AUDIENCES, PAST_VISIBILITY, VISIBILITY
from storage.database.placeholders import ColumnValues, by_column
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import AudienceRow, PastRow, VisibilityRow
from storage.persist.write.event_edges import sparse
from storage.visibility import multirange
from storage.visibility.multirange import Ranges

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
set_past AS (
    INSERT INTO past_visibility (:set_past.columns)
    SELECT :set_past.values
    FROM :set_past.rows AS i
    ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE
        SET audiences = EXCLUDED.audiences,
            invited_audiences = EXCLUDED.invited_audiences,
            topological_ranges = EXCLUDED.topological_ranges
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
)"""


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
