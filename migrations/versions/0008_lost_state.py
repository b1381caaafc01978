"""Make the function that reads a state without its members report lost rows."""

from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0008"
down_revision: Final = "0007"
phase: Final[Phase] = "pre"

SCRIPT: Final = """
CREATE OR REPLACE FUNCTION state_but_members(state_group bigint)
RETURNS TABLE (state_key_nid int, event_nid bigint)
LANGUAGE sql STABLE ROWS 20 AS $$
    SELECT folded.state_key_nid, folded.event_nid
    FROM (
        SELECT DISTINCT ON (entry.state_key_nid) entry.state_key_nid, entry.event_nid
        FROM (SELECT $1 AS state_group WHERE $1 IS NOT NULL) AS one
        LEFT JOIN state_groups wanted USING (state_group)
        LEFT JOIN LATERAL unnest(wanted.back) WITH ORDINALITY AS step (back, place) ON true
        LEFT JOIN state_groups part ON part.state_group = wanted.state_group - step.back
        CROSS JOIN LATERAL unnest(
            CASE WHEN part.state_group IS NULL THEN '{NULL}' ELSE part.key_nids END,
            CASE WHEN part.state_group IS NULL THEN '{NULL}' ELSE part.event_nids END
        ) AS entry (state_key_nid, event_nid)
        ORDER BY entry.state_key_nid, step.place DESC
    ) AS folded
    WHERE folded.event_nid IS DISTINCT FROM 0
$$;
COMMENT ON FUNCTION state_but_members IS
    'As state_entries, without the members, which are not looked at. '
    'A row of NULLs says that the group or a row of its path is lost.';
"""

BEFORE: Final = """
CREATE OR REPLACE FUNCTION state_but_members(state_group bigint)
RETURNS TABLE (state_key_nid int, event_nid bigint)
LANGUAGE sql STABLE ROWS 20 AS $$
    SELECT folded.state_key_nid, folded.event_nid
    FROM (
        SELECT DISTINCT ON (entry.state_key_nid) entry.state_key_nid, entry.event_nid
        FROM state_groups wanted
        CROSS JOIN unnest(wanted.back) WITH ORDINALITY AS step (back, place)
        JOIN state_groups part ON part.state_group = wanted.state_group - step.back
        CROSS JOIN LATERAL unnest(part.key_nids, part.event_nids)
            AS entry (state_key_nid, event_nid)
        WHERE wanted.state_group = $1
        ORDER BY entry.state_key_nid, step.place DESC
    ) AS folded
    WHERE folded.event_nid <> 0
$$;
COMMENT ON FUNCTION state_but_members IS
  'As state_entries, without the members, which are not looked at.';
"""


def upgrade() -> None:
    run_script(SCRIPT)


def downgrade() -> None:
    run_script(BEFORE)
