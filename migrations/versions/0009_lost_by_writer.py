"""Record for each writer where the gap of a restore begins.

Code before this revision reads only the gap of the furthest writer.
"""

from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0009"
down_revision: Final = "0008"
phase: Final[Phase] = "pre"

SCRIPT: Final = """
ALTER TABLE lost_positions
    ADD COLUMN instance_names text[] COLLATE "C" NOT NULL DEFAULT '{}',
    ADD COLUMN kept_upto bigint[] NOT NULL DEFAULT '{}',
    ADD CONSTRAINT lost_positions_writers_check
        CHECK (cardinality(instance_names) = cardinality(kept_upto));
COMMENT ON COLUMN lost_positions.instance_names IS
    'The writers that the stream had. Empty: the gap is of code that did not note them.';
COMMENT ON COLUMN lost_positions.kept_upto IS
    'For each of these writers: up to where its facts were kept. Its gap begins there, '
    'at or before lost_after, as writers do not commit in the order of their ids.';
"""

BEFORE: Final = """
ALTER TABLE lost_positions
    DROP COLUMN instance_names,
    DROP COLUMN kept_upto;
"""


def upgrade() -> None:
    run_script(SCRIPT)


def downgrade() -> None:
    run_script(BEFORE)
