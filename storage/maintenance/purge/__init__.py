"""Purge history before an event or a time, whole rooms, and by a room's retention policy.

A purge is a job (`purge_jobs`) of many short transactions. Between them the rest of the room can be
read, written and verified. A killed purge resumes at the next call. `purge_history` describes the
arguments, history.py which events go and which stay, sweep.py which retained events go at the end.
During and after the purge a room has gaps where its history was: `Store.gaps` returns them. History
that is backfilled again takes its old nids where anything refers to it.
"""

from storage.maintenance.purge.job import PurgeJob, jobs, running
from storage.maintenance.purge.run import Purged, purge_history, purge_retention, purge_room, resume

__all__ = [
    "PurgeJob",
    "Purged",
    "jobs",
    "purge_history",
    "purge_retention",
    "purge_room",
    "resume",
    "running",
]
