"""Purging: history below an event or a time, whole rooms, and what a room's retention policy says.

A purge is a job (`purge_jobs`) of many short transactions, between which everything that is left
can be read, written and verified. One that is killed goes on when it is asked for again.
`purge_history` says what it is given, history.py what goes and what stays, sweep.py what goes in
the end. Between and after the batches a room has gaps where its history was: `Store.gaps` tells
them, and history that is filled in again takes its old numbers where anything refers to it.
"""

from storage.maintenance.purge.job import PurgeJob, jobs
from storage.maintenance.purge.run import Purged, purge_history, purge_retention, purge_room, resume

__all__ = ["PurgeJob", "Purged", "jobs", "purge_history", "purge_retention", "purge_room", "resume"]
