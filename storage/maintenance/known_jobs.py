"""The background jobs that this release can run: those of migrations, and `ENCODE_EVENTS`."""

from storage.database.background import Job
from storage.database.migrate import script_directory
from storage.maintenance.reencode import ENCODE_EVENTS


def known_jobs() -> dict[str, Job]:
    from storage.database.migration_steps import jobs_of  # noqa: PLC0415  # alembic is slow to import

    return {job.name: job for job in (ENCODE_EVENTS, *jobs_of(script_directory()))}
