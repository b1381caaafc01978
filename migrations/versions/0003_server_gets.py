"""Add a function that decides whether a server gets an event in any form.

A server that was never joined to a room gets only world-readable events.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0003"
down_revision: Final = "0002"
phase: Final[Phase] = "pre"

SCRIPT: Final = """
CREATE FUNCTION server_gets(
  event events, joined_audiences int8multirange, world_audiences int8multirange
) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT COALESCE($2 <> '{}' OR $3 @> $1.audience, false)
$$;
COMMENT ON FUNCTION server_gets IS
    'Whether a server gets an event in any form. '
    'A server that was never joined to the room gets world-readable events only. It was joined '
    'if it is in any audience otherwise than by an invitation.';
COMMENT ON FUNCTION server_sees IS
    'Whether history visibility allows a server the whole event; '
    'otherwise it gets the redacted form. server_gets is tested as well.';
"""


def upgrade() -> None:
    run_script(SCRIPT)


def downgrade() -> None:
    op.execute("DROP FUNCTION server_gets")
