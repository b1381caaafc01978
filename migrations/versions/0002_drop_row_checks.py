"""Drop the CHECK constraints of the tables that each append writes.

Postgres parses their texts again in each statement, which is 10 to 20 % of a lone append. `verify`
holds the same rules (storage/maintenance/verify/row_rules.py), and the write builds each row in one
place. NOT NULL, UNIQUE, and the primary and foreign keys stay.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase

revision: Final = "0002"
down_revision: Final = "0001"
phase: Final[Phase] = "pre"

CHECKS: Final = {
    "rooms": {
        "rooms_extremities_check": (
            "forward_extremities = '{}' OR current_state_group IS NOT NULL"
        ),
    },
    "events": {
        "events_outlier_check": (
            "outlier = (stream_ordering IS NULL) AND outlier = (topological_ordering IS NULL)"
            " AND outlier = (state_group_before IS NULL) AND outlier = (audience IS NULL)"
        ),
        "events_depth_check": "depth IS NOT NULL OR topological_ordering IS NOT NULL",
        "events_state_after_check": (
            "state_group_after IS NULL"
            " OR (state_key_nid IS NOT NULL AND rejected IS NULL AND NOT outlier)"
        ),
        "events_membership_check": (
            "(membership IS NOT NULL) = (type_nid = 2 AND state_key_nid IS NOT NULL)"
        ),
        "events_relation_check": (
            "(relates_to IS NULL) = (rel_type_nid IS NULL)"
            " AND (replaces IS NULL) = (rel_type_nid IS DISTINCT FROM 19)"
        ),
        "events_refused_check": "refused IS NULL OR soft_failed",
        "events_superseded_check": "superseded IS NULL OR refused IS NOT NULL",
        "events_distance_check": (
            "(prev_events IS NULL OR prev_distance IS NULL)"
            " AND (auth_events IS NULL OR auth_distance_1 IS NULL)"
        ),
    },
    "reordered_events": {"reordered_events_moves_check": "moves > 0"},
    "state_groups": {
        "state_groups_back_check": "back[cardinality(back)] = 0",
        "state_groups_keys_check": (
            "cardinality(key_nids) IS NOT DISTINCT FROM cardinality(event_nids)"
        ),
        "state_groups_member_keys_check": (
            "cardinality(member_key_nids) IS NOT DISTINCT FROM cardinality(member_event_nids)"
        ),
        "state_groups_path_check": (
            "(path IS NULL) <> (back IS NULL) AND (digest IS NOT NULL OR get_byte(path, 0) > 4)"
        ),
        "state_groups_entry_check": (
            "CASE WHEN event_nid IS NULL THEN COALESCE(key_nid, member_key_nid) IS NULL"
            " ELSE (key_nid IS NULL) <> (member_key_nid IS NULL)"
            " AND COALESCE(key_nids, member_key_nids) IS NULL END"
        ),
    },
    "visibility": {"visibility_counts_check": "joined_count >= 0 AND invited_count >= 0"},
}


def upgrade() -> None:
    for table, checks in CHECKS.items():
        dropped = ", ".join(f"DROP CONSTRAINT {name}" for name in checks)
        op.execute(f"ALTER TABLE {table} {dropped}")


def downgrade() -> None:
    for table, checks in CHECKS.items():
        added = ", ".join(f"ADD CONSTRAINT {name} CHECK ({rule})" for name, rule in checks.items())
        op.execute(f"ALTER TABLE {table} {added}")
