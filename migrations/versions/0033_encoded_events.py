"""Encode the bytes of events: code that reads the bytes alone would take them for damaged.

A job encodes older events. The readers know all forms, so it may be run at any time, or never.
"""

from typing import Final

from storage.database.migration_steps import Job, Phase, background_job, run_work
from storage.maintenance.reencode import JOB_NAME, decode_all, encode_batch

revision: Final = "0033"
down_revision: Final = "0032"
phase: Final[Phase] = "post"

job: Final = Job(JOB_NAME, batch=encode_batch, expected="SELECT count(*) FROM events")


def upgrade() -> None:
    background_job(job, revision, where="EXISTS (SELECT FROM events)")


def downgrade() -> None:
    """Decode all events. No process may run meanwhile: it would encode new ones."""
    run_work(decode_all)
